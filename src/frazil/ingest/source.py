"""Kafka in, planned offset ranges out. Runs on the driver, and in Spark's planning process.

`Planner` speaks to Kafka and knows nothing of Spark. `RangeSource` hands its plans to Structured
Streaming as a Python DataSource whose rows are ranges, not records. Spark plans in a process of its
own without Py4J, so all it needs travels as options, secrets as references only.

What the planner must see (and never passes over): a topic that was dropped and made again, another
cluster behind the same address, retention that overtook the position, new partitions. The end of a
plan is the last stable offset, so an open transaction holds the plan back and nothing else does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from frazil.core.config import Config, Settings, duration, size
from frazil.core.errors import ConfigError, Expired, Foreign, FrazilError, Unavailable, across
from frazil.core.offsets import BATCHES, Cut, Partition, Range, newest_names

FORMAT = "frazil_ranges"
RANGES = "topic string, partition int, start bigint, end bigint, pieces int, origin string"
#: one call to Kafka may take this long; the planner's patience spans many calls
_CALL_SECONDS = 10.0
_SMALLEST_PIECE = 50_000
_SAMPLE_SECONDS = 30.0
#: So many partitions are spelled out in a hint.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """Who the topics are: their ids, and the cluster's."""

    cluster: str = ""
    topics: Mapping[str, str] = field(default_factory=dict)

    def check(self, now: Origin) -> None:
        """`now` must be the same cluster and topics as these, as far as these are known."""
        if self.cluster and now.cluster != self.cluster:
            raise Foreign(
                f"cannot go on: the ledger belongs to Kafka cluster {self.cluster}, "
                f"found cluster {now.cluster}",
                hint="point bootstrap.servers at the right cluster; or, if this one takes its "
                "place: frazil offsets adopt CONFIG",
            )
        for topic, known in self.topics.items():
            found = now.topics.get(topic)
            if found is not None and found != known:
                raise Foreign(
                    f"cannot go on: topic {topic} was dropped and made again; expected topic id "
                    f"{known}, found {found}",
                    hint="its offsets begin anew; to read it from its beginning, beside what is "
                    f"there: frazil offsets adopt CONFIG --topic {Partition(topic, 0).kafka_topic}",
                )


@dataclass(frozen=True, slots=True)
class Watermarks:
    """What a topic partition holds: `[low, end)`, end being the last stable offset."""

    low: Cut
    end: Cut
    #: partitions that did not answer, where others did
    silent: frozenset[Partition] = frozenset()


class Planner:
    """The stream's side of a batch: what is there, and how much of it to take."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        *,
        topics: tuple[str, ...] = (),
        pattern: str = "",
        origin: Origin | None = None,
        trusting: bool = False,
    ) -> None:
        """`origin`: whose topics the ledger knows, and by which names. `trusting`: others may
        answer, and whoever asks looks for himself."""
        self._kafka = dict(kafka)
        self._topics = topics
        self._pattern = pattern
        self.known = origin or Origin()
        self._trusting = trusting
        self._admin = AdminClient({"log_level": "2", **kafka})
        self._uncommitted = kafka.get("isolation.level") == "read_uncommitted"
        self._mean_bytes = 0.0
        self._sampled_at = -_SAMPLE_SECONDS

    def learn(self, more: Origin) -> None:
        """Topics that staged batches know, and the ledger does not yet."""
        self.known = Origin(self.known.cluster, {**self.known.topics, **more.topics})

    def origin(self) -> tuple[Origin, list[Partition]]:
        """Identity and partitions of the topics as they are now, checked against the known."""
        names = self._names()
        if not names:
            return Origin(self.known.cluster, {}), []
        with self._asking(f"describe topics {', '.join(names)}"):
            cluster = self._admin.describe_cluster(request_timeout=_CALL_SECONDS).result()
            described = self._admin.describe_topics(
                TopicCollection(names), request_timeout=_CALL_SECONDS
            )
            topics, partitions = {}, []
            called = newest_names(self.known.topics)
            for name in names:
                topic = _exists(name, described[name])
                mine = called.get(name, name)
                topics[mine] = str(topic.topic_id)
                partitions += [Partition(mine, part.id) for part in topic.partitions]
            now = Origin(str(cluster.cluster_id), topics)
        if not self._trusting:
            self.known.check(now)
        merged = {**self.known.topics, **now.topics}
        self.known = Origin(now.cluster, merged)
        return now, sorted(partitions)

    def watermarks(self, partitions: list[Partition], patient: bool = False) -> Watermarks:
        """`patient`: it is enough that some partitions answer."""
        with self._asking(f"read the offsets of {len(partitions)} partitions"):
            low = self._offsets(partitions, OffsetSpec.earliest(), patient)  # type: ignore[no-untyped-call]
            there = [partition for partition in partitions if partition in low]
            end = self._offsets(there, OffsetSpec.latest(), patient)  # type: ignore[no-untyped-call]
            return Watermarks(low, end, frozenset(partitions) - frozenset(end))

    def start(
        self, position: Cut, start: str | Mapping[str, Mapping[str, int]], *, first: bool = True
    ) -> Cut:
        """Where to begin: the table's position, and the configured start where it has none.

        Not `first`: somebody else knows the position, and that the start is long gone is no news.
        """
        _, partitions = self.origin()
        marks = self.watermarks(partitions)
        explicit = Cut() if isinstance(start, str) else Cut.of(start)  # type: ignore[arg-type]
        # Where a topic that was made again begins, it was said when it was taken over.
        called = newest_names(marks.end.topics)
        explicit = Cut({p: o for p, o in explicit.items() if called.get(p.topic, p.topic) == p[0]})
        for partition, offset in explicit.items():
            if partition not in marks.end:
                raise ConfigError(f"cannot start: {partition} does not exist")
            if offset > marks.end[partition]:
                raise ConfigError(f"cannot start at {partition} offset {offset}: "
                                  f"it ends at {marks.end[partition]}")  # fmt: skip
        began = {}
        for partition in partitions:
            if start == "latest" and not position:
                began[partition] = marks.end[partition]
            else:
                began[partition] = explicit.get(partition, marks.low[partition])
        if first:
            # What the position names may be staged already: it is required when that is known.
            self.require(Cut({p: o for p, o in began.items() if p not in position}), marks)
        return Cut({**began, **position})

    def require(self, position: Cut, marks: Watermarks) -> None:
        """All offsets from `position` on must still be there: exact ranges where they are not."""
        lost = [
            Range(partition, offset, marks.low[partition])
            for partition, offset in position.items()
            if partition in marks.low and offset < marks.low[partition]
        ]
        if lost:
            raise Expired(
                f"cannot go on: retention has deleted {', '.join(map(str, lost))} "
                f"({sum(map(len, lost))} offsets) before they were read",
                hint="nothing was skipped; restore the records, or accept the loss: frazil offsets "
                f"accept-loss CONFIG {_options('--lost', map(spelled, lost))}",
            )
        back = [
            f"{partition} (position {offset}, end {marks.end[partition]})"
            for partition, offset in position.items()
            if partition in marks.end and offset > marks.end[partition]
        ]
        if back:
            raise Foreign(
                f"cannot go on: the topic ends before the position: {', '.join(back)}",
                hint="the topic was truncated, or its uncommitted tail was lost with a broker; to "
                "read on from its end: frazil offsets rebase CONFIG "
                + _options("--to", (f"{p.kafka_topic}:{p.number}:{marks.end[p]}"
                                    for p, o in position.items() if o > marks.end.get(p, o))),
            )  # fmt: skip
        gone = [str(partition) for partition in position if partition not in marks.end]
        if gone:
            raise Foreign(f"cannot go on: {', '.join(gone)} no longer exist")

    def waiting(self, position: Cut, most: int) -> list[Range]:
        """What comes next, at most so many offsets of each partition."""
        ends = self.watermarks(list(position)).end
        return [
            Range(partition, offset, min(ends[partition], offset + most))
            for partition, offset in position.items()
            if ends[partition] > offset
        ]

    def advance(self, position: Cut, *, records: int, bytes: int, until: Cut | None) -> Cut:
        """The next cut: everything there is, within the limits of one trigger.

        A partition that is new stands in the next cut with its beginning; its records come with the
        cut after that. One that does not answer stays where it is, and holds no other up.
        """
        _, partitions = self.origin()
        marks = self.watermarks(partitions, patient=True)
        self.require(Cut({p: o for p, o in position.items() if p not in marks.silent}), marks)
        ends = {
            partition: max(offset, min(marks.end.get(partition, offset), _cap(until, partition)))
            for partition, offset in position.items()
        }
        backlog = {partition: ends[partition] - offset for partition, offset in position.items()}
        total = sum(backlog.values())
        limit = min(records, self._records_in(bytes, position, backlog, records))
        if total > limit:
            shares = {partition: backlog[partition] * limit // total for partition in position}
            left = limit - sum(shares.values())  # of rounding down: first to who would get nothing
            waiting = [partition for partition in position if backlog[partition]]
            for partition in sorted(waiting, key=lambda each: shares[each])[:left]:
                shares[partition] += 1
            ends = {partition: position[partition] + share for partition, share in shares.items()}
        for partition in marks.end:
            if partition not in ends and (until is None or partition in until):
                ends[partition] = marks.low[partition]
        return Cut(ends)

    def _records_in(
        self, bytes: int, position: Cut, backlog: Mapping[Partition, int], most: int
    ) -> int:
        """How many records `bytes` hold, by a sample of those that come next.

        Kafka tells sizes only with the records. The sample is renewed now and then, and taken only
        where the limit could matter.
        """
        if sum(backlog.values()) * max(self._mean_bytes, 1.0) <= bytes and self._mean_bytes:
            return most
        if time.monotonic() - self._sampled_at >= _SAMPLE_SECONDS:
            where = max(backlog, key=lambda each: backlog[each], default=None)
            if where is None or not backlog[where]:
                return most
            wanted = Range(where, position[where], position[where] + min(500, backlog[where]))
            sizes = sample_sizes(self._kafka, wanted)
            self._mean_bytes = sum(sizes) / max(1, len(sizes))
            self._sampled_at = time.monotonic()
        return max(1, int(bytes / (self._mean_bytes or 1.0)))

    def _names(self) -> list[str]:
        if not self._pattern:
            return sorted(self._topics)
        with self._asking("list topics"):
            found = self._admin.list_topics(timeout=_CALL_SECONDS).topics
        expected = re.compile(self._pattern)
        return sorted(t for t in found if expected.fullmatch(t) and not t.startswith("__"))

    def _offsets(self, partitions: list[Partition], spec: Any, patient: bool = False) -> Cut:
        if not partitions:
            return Cut()
        level = (
            IsolationLevel.READ_UNCOMMITTED if self._uncommitted else IsolationLevel.READ_COMMITTED
        )
        futures = self._admin.list_offsets(
            {TopicPartition(each.kafka_topic, each.number): spec for each in partitions},
            isolation_level=level,
            request_timeout=_CALL_SECONDS,
        )
        called = {(each.kafka_topic, each.number): each for each in partitions}
        found: dict[Partition, int] = {}
        trouble: KafkaException | None = None
        for where, future in futures.items():
            try:
                found[called[where.topic, where.partition]] = future.result().offset
            except KafkaException as error:  # it has no leader, say
                trouble = error
        if trouble is not None and not (patient and found):
            raise trouble
        return Cut(found)

    def _asking(self, what: str) -> _Asking:
        return _Asking(what, self._kafka.get("bootstrap.servers", "?"))


class _Asking:
    """Names the server and the question when Kafka does not answer."""

    def __init__(self, what: str, server: str) -> None:
        self._what, self._server = what, server

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KafkaException, TimeoutError)):
            fact = (
                error.args[0].str() if error.args and hasattr(error.args[0], "str") else str(error)
            )
            raise Unavailable(
                f"cannot {self._what}: Kafka at {self._server} does not answer: {fact}",
                hint="check bootstrap.servers, and that the brokers are up",
            ) from None


def _exists(name: str, future: Any) -> Any:
    try:
        return future.result()
    except KafkaException as error:
        if error.args[0].name() == "UNKNOWN_TOPIC_OR_PART":
            raise ConfigError(
                f"cannot read topic {name}: it does not exist",
                hint="create it first, or correct [sink] topics",
            ) from None
        raise


def sample_sizes(kafka: Mapping[str, str], wanted: Range) -> list[int]:
    """Sizes of the first records of a range, as many as come at once."""
    conf = {"log_level": "2", **kafka, "group.id": "frazil-sample", "auto.offset.reset": "error"}
    consumer = Consumer({**conf, "enable.auto.commit": "false"})
    try:
        where = wanted.partition
        consumer.assign([TopicPartition(where.kafka_topic, where.number, wanted.start)])
        messages = consumer.consume(len(wanted), timeout=1.0)
        return [len(each.value() or b"") for each in messages if each.error() is None]
    finally:
        consumer.close()


def kafka_only(cut: Cut) -> Cut:
    """What Kafka can be asked about: without the count of batches that a DataFrame's sink keeps
    beside the offsets, and without topics that were made again since."""
    return Cut({p: offset for p, offset in cut.current.items() if p != BATCHES})


def spelled(lost: Range) -> str:
    """As the command line takes it."""
    return f"{lost.partition.topic}:{lost.partition.number}:{lost.start}..{lost.end}"


def _options(name: str, values: Iterable[str]) -> str:
    """Of many, the command itself says the rest."""
    found = list(values)
    if len(found) > _NAMED:
        return "(which shows all of them)"
    return " ".join(f"{name} {each}" for each in found)


def _cap(until: Cut | None, partition: Partition) -> int:
    return 2**63 if until is None else until.get(partition, 0)


def split(ranges: Sequence[Range], *, most: int, parallelism: int) -> list[Range]:
    """Ranges in pieces: none over `most` offsets, and enough of them for every core."""
    total = sum(map(len, ranges))
    fair = max(_SMALLEST_PIECE, -(-total // max(1, parallelism)))
    return [piece for each in ranges if len(each) for piece in each.pieces(min(most, fair))]


class RangeSource(DataSource):
    """Spark's view of the planner: a stream whose rows are ranges."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return RANGES

    def streamReader(self, schema: Any) -> RangeReader:
        return RangeReader(json.loads(self.options["plan"]))


def options(
    config: Config, *, start: Cut, origin: Origin, parallelism: int, until: Cut | None
) -> dict[str, str]:
    """What travels to the planning process. Secrets stay `env:` and `file:` references."""
    plan = {
        "kafka": dict(config.kafka),
        "topics": config.sink.topics,
        "pattern": config.sink.pattern,
        "cluster": origin.cluster,
        "known": dict(origin.topics),
        "start": start.nested(),
        "until": None if until is None else until.nested(),
        "records": config.sink.max_records_per_trigger,
        "bytes": size(config.sink.max_bytes_per_trigger),
        "task": config.sink.max_records_per_task,
        "parallelism": parallelism,
        "patience": duration(config.sink.patience),
    }
    return {"plan": json.dumps(plan)}


class RangeReader(DataSourceStreamReader):
    """Offsets as Spark keeps them: the cut, the cut the stream began from, and whose they are."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._planner: Planner | None = None
        self._start = Cut.of(self._plan["start"])
        self._at = self._start
        self._until = None if self._plan["until"] is None else Cut.of(self._plan["until"])
        self._origin = Origin(self._plan["cluster"], self._plan["known"])
        self._silent_since: float | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._offset(self._start)  # Spark may ask after the first latestOffset

    def latestOffset(self) -> dict[str, Any]:
        try:
            self._advance()
        except FrazilError as error:
            raise across(error) from None
        return self._offset(self._at)

    def _offset(self, cut: Cut) -> dict[str, Any]:
        known = self._planner.known if self._planner else self._origin
        return {"cut": cut.nested(), "start": self._start.nested(), "cluster": known.cluster,
                "topics": dict(known.topics)}  # fmt: skip

    def _advance(self) -> None:
        """One step, or none while Kafka is away: its absence is borne for the set patience."""
        try:
            if self._planner is None:
                self._planner = Planner(
                    Settings(self._plan["kafka"]).resolved(),
                    topics=tuple(self._plan["topics"]),
                    pattern=self._plan["pattern"],
                    origin=self._origin,
                )
            self._at = self._planner.advance(
                self._at,
                records=self._plan["records"],
                bytes=self._plan["bytes"],
                until=self._until,
            )
            self._silent_since = None
        except Unavailable:
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > self._plan["patience"]:
                raise

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, reach = Cut.of(start["cut"]), Cut.of(end["cut"])
        if start == end:
            # Spark's way to say, before anything else, where a restarted query stands. What the
            # options say of the start, and of whose topics these are, was for the first life.
            self._start, self._at = Cut.of(start["start"]), reach
            self._origin = Origin(start["cluster"], start["topics"])
            return []
        ranges = [Range(p, begin[p], offset) for p, offset in reach.items() if p in begin]
        pieces = split(ranges, most=self._plan["task"], parallelism=self._plan["parallelism"])
        known = self._planner.known if self._planner else self._origin
        origin = json.dumps([known.cluster, dict(known.topics)])
        return [InputPartition((*p.partition, p.start, p.end, len(pieces), origin)) for p in pieces]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        yield partition.value

    def commit(self, end: dict[str, Any]) -> None: ...

    def stop(self) -> None: ...


def publish(kafka: Mapping[str, str], group: str, cut: Cut) -> None:
    """Tell Kafka how far the tables are, for its own lag tools. Never read back."""
    consumer = Consumer(
        {"log_level": "2", **kafka, "group.id": group, "enable.auto.commit": "false"}
    )
    try:
        consumer.commit(
            offsets=[
                TopicPartition(each.kafka_topic, each.number, offset)
                for each, offset in kafka_only(cut).items()
            ],
            asynchronous=False,
        )
    except KafkaException as error:
        raise Unavailable(f"cannot publish the offsets of group {group}: "
                          f"{error.args[0].str()}") from None  # fmt: skip
    finally:
        consumer.close()
