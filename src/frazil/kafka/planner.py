"""Kafka in, planned offset ranges out. Runs on the driver, and in Spark's planning process.

`Planner` speaks to Kafka and knows nothing of Spark; `frazil.kafka.range_source` hands its plans to
Structured Streaming.

The planner detects, and never passes over: a topic that was dropped and recreated, another cluster
behind the same address, retention that overtook the position, new partitions. The end of a plan is
the last stable offset, so an open transaction holds the plan back, and nothing else does.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from frazil.errors import ConfigError, Expired, IdentityMismatch, Unavailable, counted
from frazil.kafka.connection import client_settings
from frazil.kafka.leader_epochs import epoch_ends
from frazil.kafka.setting_names import refusals
from frazil.offsets import BATCHES, Cut, Partition, Range, newest_names

if TYPE_CHECKING:
    from frazil.config.model import Config

_log = logging.getLogger("frazil")

#: one call to Kafka may take this long; the planner's patience spans many calls
_CALL_SECONDS = 10.0
SMALLEST_PIECE = 50_000
_SAMPLE_SECONDS = 30.0
#: Kafka's topic id where there is none.
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
WITHOUT_IDS = (
    "the brokers have no topic ids (they are older than 2.8): a topic that is dropped "
    "and recreated cannot be distinguished from the one that was read, unless it ends "
    "before the position"
)
#: Most partitions that a hint lists.
_NAMED = 8


class _KnownIdentity(Protocol):
    @property
    def cluster(self) -> str: ...
    @property
    def topics(self) -> Mapping[str, str]: ...
    @property
    def leaders(self) -> Mapping[Partition, int]: ...


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Identity of the topics: their ids, and the cluster's."""

    cluster: str = ""
    topics: Mapping[str, str] = field(default_factory=dict)
    #: partition → leader epoch of the last record batch that was read, where it is known
    leaders: Mapping[Partition, int] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(known: _KnownIdentity | None) -> TopicIdentity:
        """The identity in a ledger entry or a staged batch; None: there is none yet."""
        if known is None:
            return TopicIdentity()
        return TopicIdentity(known.cluster, known.topics, known.leaders)

    def differs(self, now: TopicIdentity, topic: str) -> bool:
        """Is it another topic now? Unknown for brokers before 2.8, which have no topic ids."""
        known, current = self.topics.get(topic), now.topics.get(topic)
        return bool(known and current and known != current)

    def without(self, partitions: Iterable[Partition]) -> TopicIdentity:
        """The same without the leader epochs of partitions whose offsets were passed over."""
        gone = set(partitions)
        kept = {p: epoch for p, epoch in self.leaders.items() if p not in gone}
        return TopicIdentity(self.cluster, self.topics, kept)

    def check(self, now: TopicIdentity) -> None:
        """`now` must be the same cluster and topics as these, as far as these are known."""
        if self.cluster and now.cluster != self.cluster:
            raise IdentityMismatch(
                f"cannot continue: the ledger belongs to Kafka cluster {self.cluster}, "
                f"found cluster {now.cluster}",
                hint="point bootstrap.servers at the right cluster; or, if this cluster "
                "replaces it: frazil offsets adopt-topic CONFIG",
            )
        for topic, known in self.topics.items():
            if self.differs(now, topic):
                raise IdentityMismatch(
                    f"cannot continue: topic {topic} was dropped and recreated; expected "
                    f"topic id {known}, found {now.topics[topic]}",
                    hint="the new topic starts at offset 0. To read it in addition to the "
                    "existing rows: frazil offsets adopt-topic CONFIG --topic "
                    f"{Partition(topic, 0).kafka_topic}",
                )


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The offsets of each partition: `[low, end)`, end being the last stable offset."""

    low: Cut
    end: Cut
    #: partitions that did not answer, where others did
    silent: frozenset[Partition] = frozenset()
    #: the leader epoch in which each partition answered
    leaders: Mapping[Partition, int] = field(default_factory=dict)


class Planner:
    """The stream's side of a batch: the available offsets, and how many of them to take."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        *,
        topics: tuple[str, ...] = (),
        pattern: str = "",
        origin: TopicIdentity | None = None,
        trusting: bool = False,
    ) -> None:
        """`origin`: topic identity in the ledger, under the ledger's names. `trusting`: accept
        another identity; the caller compares it."""
        self._kafka = dict(kafka)
        self._topics = topics
        self._pattern = pattern
        self.known = origin or TopicIdentity()
        #: no record batch below the position has a later leader epoch
        self._epochs: dict[Partition, int] = dict(self.known.leaders)
        self._trusting = trusting
        with refusals(kafka):
            self._admin = AdminClient({"log_level": "2", **client_settings(kafka)})
        self._uncommitted = kafka.get("isolation.level") == "read_uncommitted"
        #: did the last cut take all that the limits allow?
        self.full = False
        self._mean_bytes = 0.0
        self._sampled_at = -_SAMPLE_SECONDS

    @classmethod
    def of(cls, config: Config, known: _KnownIdentity | None, trusting: bool = False) -> Planner:
        """The planner of a sink. `known`: its ledger entry, or the topic identity that it has."""
        return cls(
            config.kafka.resolved(),
            topics=config.sink.topics,
            pattern=config.sink.topic_pattern,
            origin=TopicIdentity.of(known),
            trusting=trusting,
        )

    def learn(self, more: TopicIdentity) -> None:
        """Add topics that staged batches know, and the ledger does not yet."""
        self.known = TopicIdentity(self.known.cluster, {**self.known.topics, **more.topics})
        self._epochs = {**self._epochs, **more.leaders}

    def origin(self) -> tuple[TopicIdentity, list[Partition]]:
        """Identity and partitions of the topics now, checked against the known identity."""
        names = self._names()
        if not names:
            return TopicIdentity(self.known.cluster, {}), []
        with self._asking(f"describe topics {', '.join(names)}"):
            cluster = self._admin.describe_cluster(request_timeout=_CALL_SECONDS).result()
            described = self._admin.describe_topics(
                TopicCollection(names), request_timeout=_CALL_SECONDS
            )
            topics, partitions = {}, []
            called = newest_names(self.known.topics)
            for name in names:
                topic = _exists(name, described[name])
                ledger_name = called.get(name, name)
                number = str(topic.topic_id)
                topics[ledger_name] = "" if number == _NO_ID else number
                partitions += [Partition(ledger_name, part.id) for part in topic.partitions]
            now = TopicIdentity(str(cluster.cluster_id), topics)
        if not self._trusting:
            self.known.check(now)
        learned = {topic: number for topic, number in now.topics.items() if number}
        merged = {**now.topics, **self.known.topics, **learned}
        self.known = TopicIdentity(now.cluster, merged)
        return now, sorted(partitions)

    def watermarks(self, partitions: list[Partition], patient: bool = False) -> Watermarks:
        """`patient`: it is enough that some partitions answer."""
        with self._asking(f"read the offsets of {counted(len(partitions), 'partition')}"):
            low, _ = self._offsets(partitions, OffsetSpec.earliest(), patient)  # type: ignore[no-untyped-call]
            reachable = [partition for partition in partitions if partition in low]
            end, leaders = self._offsets(reachable, OffsetSpec.latest(), patient)  # type: ignore[no-untyped-call]
            return Watermarks(low, end, frozenset(partitions) - frozenset(end), leaders)

    def start(
        self, position: Cut, start: str | Mapping[str, Mapping[str, int]], *, first: bool = True
    ) -> Cut:
        """Where to begin: the table's position, and the configured start where it has none.

        Not `first`: the caller has a position of its own, and an expired start is not reported.
        """
        now, partitions = self.origin()
        marks = self.watermarks(partitions)
        if first and (unnamed := [topic for topic, number in now.topics.items() if not number]):
            _log.warning("%s: %s", ", ".join(unnamed[:_NAMED]), WITHOUT_IDS)
        explicit = Cut() if isinstance(start, str) else Cut.of(start)  # type: ignore[arg-type]
        # The start of a recreated topic was given when it was adopted.
        called = newest_names(marks.end.topics)
        explicit = Cut({p: o for p, o in explicit.items() if called.get(p.topic, p.topic) == p[0]})
        for partition, offset in explicit.items():
            if partition not in marks.end:
                raise ConfigError(f"cannot start: {partition} does not exist")
            if offset > marks.end[partition]:
                raise ConfigError(
                    f"cannot start at {partition} offset {offset}: "
                    f"it ends at {marks.end[partition]}"
                )
        began = {}
        for partition in partitions:
            if start == "latest" and not position:
                began[partition] = marks.end[partition]
            else:
                began[partition] = explicit.get(partition, beginning(partition, position, marks))
        if first:
            new = [p for p in partitions if p not in position and p not in explicit]
            say_trimmed(new if start != "latest" or position else [], began)
            # Offsets of the position may be staged already: they are required when that is known.
            self.require(Cut({p: o for p, o in began.items() if p not in position}), marks)
        return Cut({**began, **position})

    def require(self, position: Cut, marks: Watermarks) -> None:
        """All offsets from `position` on must still exist; raises with the exact ranges if not."""
        lost = [
            Range(partition, offset, marks.low[partition])
            for partition, offset in position.items()
            if partition in marks.low and offset < marks.low[partition]
        ]
        if lost:
            raise Expired(
                f"cannot continue: retention has deleted {', '.join(map(str, lost))} "
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
            raise IdentityMismatch(
                f"cannot continue: the topic ends before the position: {', '.join(back)}",
                hint="the topic was truncated, or its uncommitted tail was lost with a broker; to "
                "read on from its end: frazil offsets seek CONFIG "
                + _options(
                    "--to",
                    (
                        f"{p.kafka_topic}:{p.number}:{marks.end[p]}"
                        for p, o in position.items()
                        if o > marks.end.get(p, o)
                    ),
                ),
            )
        gone = [str(partition) for partition in position if partition not in marks.end]
        if gone:
            raise IdentityMismatch(f"cannot continue: {', '.join(gone)} no longer exist")
        self._refuse_replaced(position, marks)

    def compare(self, position: Cut, epochs: Mapping[Partition, int]) -> None:
        """Raises where records that were read in these leader epochs, up to `position`, are no
        longer in the log. Checks nothing else about the position: it belongs to a Spark query, and
        no command moves it."""
        wanted = [p for p in self._own(epochs) if p in position]
        if not wanted:
            return
        marks = self.watermarks(wanted)
        self._epochs = {p: epochs[p] for p in wanted}
        within = {p: position[p] for p in wanted if position[p] <= marks.end[p]}
        self._refuse_replaced(Cut(within), marks, movable=False)

    def led(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Current leader epochs of those partitions that belong to this planner and answer."""
        wanted = self._own(partitions)
        with self._asking(f"read the leader epochs of {counted(len(wanted), 'partition')}"):
            return self._offsets(wanted, OffsetSpec.latest(), patient=True)[1]  # type: ignore[no-untyped-call]

    def _own(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Those of the planner's topics, whatever the ledger calls them."""
        own = {(p.kafka_topic, p.number) for p in self.origin()[1]}
        return sorted(p for p in partitions if (p.kafka_topic, p.number) in own)

    def _refuse_replaced(self, position: Cut, marks: Watermarks, movable: bool = True) -> None:
        replaced = self.replaced(position, marks)
        if replaced:
            ends = (
                f"{r.partition.kafka_topic}:{r.partition.number}:"
                f"{max(r.start, marks.low[r.partition])}"
                for r in replaced
            )
            remedy = (
                f"frazil offsets seek CONFIG {_options('--to', ends)}"
                if movable
                else "use another sink id, with starting_offsets from which to read the new records"
            )
            raise IdentityMismatch(
                "cannot continue: topic data was truncated and overwritten: "
                f"{', '.join(map(str, replaced))} were read, but the log has other "
                "records there now",
                hint="the cause is an unclean leader election, or a broker that lost its "
                f"disk. To read the new records: {remedy}",
            )

    def replaced(self, position: Cut, marks: Watermarks) -> list[Range]:
        """Ranges that were read and are no longer in the log: it ends earlier in the leader epoch
        of the last record batch that was read, and continues in a later one (KIP-320).

        Asked only where a partition's leader has changed since.
        """
        asked = {
            partition: self._epochs[partition]
            for partition in position
            if partition in self._epochs
            and partition in marks.end
            and marks.leaders.get(partition) != self._epochs[partition]
        }
        ends = epoch_ends(self._kafka, asked, position) if asked else {}
        ranges = [
            Range(partition, max(0, end), position[partition])
            for partition, end in sorted(ends.items())
            if end < position[partition]
        ]
        if not ranges:
            for partition, epoch in marks.leaders.items():
                if partition in position and (partition in ends or partition not in asked):
                    self._epochs[partition] = epoch
        return ranges

    def waiting(self, position: Cut, most: int) -> list[Range]:
        """The next ranges, at most `most` offsets of each partition."""
        ends = self.watermarks(list(position)).end
        return [
            Range(partition, offset, min(ends[partition], offset + most))
            for partition, offset in position.items()
            if ends[partition] > offset
        ]

    def advance(self, position: Cut, *, records: int, bytes: int, until: Cut | None) -> Cut:
        """The next cut: everything available, within the limits of one trigger.

        A new partition enters the next cut with its first offset; its records come with the cut
        after that. A partition that does not answer stays where it is, and holds no other up.
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
        self.full = total >= limit
        if total > limit:
            shares = {partition: backlog[partition] * limit // total for partition in position}
            left = limit - sum(shares.values())  # of rounding down: smallest share first
            waiting = [partition for partition in position if backlog[partition]]
            for partition in sorted(waiting, key=lambda p: shares[p])[:left]:
                shares[partition] += 1
            ends = {partition: position[partition] + share for partition, share in shares.items()}
        for partition in marks.end:
            if partition not in ends and (until is None or partition in until):
                ends[partition] = beginning(partition, position, marks)
        say_trimmed([p for p in ends if p not in position], ends)
        return Cut(ends)

    def _records_in(
        self, bytes: int, position: Cut, backlog: Mapping[Partition, int], most: int
    ) -> int:
        """How many records `bytes` hold, by a sample of the next ones.

        Kafka reports sizes only with the records. The sample is renewed now and then, and taken
        only where the limit could matter.
        """
        if sum(backlog.values()) * max(self._mean_bytes, 1.0) <= bytes and self._mean_bytes:
            return most
        if time.monotonic() - self._sampled_at >= _SAMPLE_SECONDS:
            where = max(backlog, key=lambda p: backlog[p], default=None)
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
            topics = self._admin.list_topics(timeout=_CALL_SECONDS).topics
        expected = re.compile(self._pattern)
        return sorted(t for t in topics if expected.fullmatch(t) and not t.startswith("__"))

    def _offsets(
        self, partitions: list[Partition], spec: Any, patient: bool = False
    ) -> tuple[Cut, dict[Partition, int]]:
        """Offsets, and the leader epochs in which they were reported."""
        if not partitions:
            return Cut(), {}
        level = (
            IsolationLevel.READ_UNCOMMITTED if self._uncommitted else IsolationLevel.READ_COMMITTED
        )
        futures = self._admin.list_offsets(
            {
                TopicPartition(partition.kafka_topic, partition.number): spec
                for partition in partitions
            },
            isolation_level=level,
            request_timeout=_CALL_SECONDS,
        )
        called = {(partition.kafka_topic, partition.number): partition for partition in partitions}
        offsets: dict[Partition, int] = {}
        leaders: dict[Partition, int] = {}
        trouble: KafkaException | None = None
        for where, future in futures.items():
            try:
                result = future.result()
                offsets[called[where.topic, where.partition]] = result.offset
                if (epoch := getattr(result, "leader_epoch", None)) is not None and epoch >= 0:
                    leaders[called[where.topic, where.partition]] = epoch
            except KafkaException as error:  # for example, it has no leader
                trouble = error
        if trouble is not None and not (patient and offsets):
            raise trouble
        return Cut(offsets), leaders

    def _asking(self, action: str) -> _TopicQuery:
        return _TopicQuery(action, self._kafka.get("bootstrap.servers", "?"))


class _TopicQuery:
    """Names the server and the request when Kafka does not answer."""

    def __init__(self, action: str, server: str) -> None:
        self._what, self._server = action, server

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
    own = {"group.id": "frazil-sample", "auto.offset.reset": "error", "enable.auto.commit": "false"}
    with refusals(kafka):
        consumer = Consumer({"log_level": "2", **client_settings(kafka), **own})
    try:
        where = wanted.partition
        consumer.assign([TopicPartition(where.kafka_topic, where.number, wanted.start)])
        messages = consumer.consume(len(wanted), timeout=1.0)
        return [len(message.value() or b"") for message in messages if message.error() is None]
    finally:
        consumer.close()


def beginning(partition: Partition, position: Cut, marks: Watermarks) -> int:
    """Where a partition begins that the position does not contain.

    Of a topic that was read before, every record is wanted: records of a new partition that
    retention has deleted are missing. Deleted records of a new topic were never part of this sink.
    """
    return 0 if partition.topic in position.topics else marks.low[partition]


def say_trimmed(new: Iterable[Partition], began: Mapping[Partition, int]) -> None:
    """Log partitions of new topics that begin above 0; ledger and index record where."""
    lines = [f"{p} begins at offset {began[p]}" for p in new if began[p]]
    if lines:
        left = len(lines) - _NAMED
        more = f", and {counted(left, 'more partition')}" if left > 0 else ""
        _log.warning(
            "%s%s: earlier offsets were deleted before this sink first read the topic, "
            "and are not part of its proof",
            ", ".join(lines[:_NAMED]),
            more,
        )


def with_new_partitions(position: Cut, marks: Watermarks) -> Cut:
    """The position, and partitions that its topics have got since."""
    known = set(position.topics)
    return Cut({**{p: 0 for p in marks.end if p.topic in known}, **position})


def kafka_only(cut: Cut) -> Cut:
    """The part of a cut that Kafka knows: without the count of batches that a DataFrame's sink
    keeps beside the offsets, and without topics that were recreated since."""
    return Cut({p: offset for p, offset in cut.current.items() if p != BATCHES})


def spelled(lost: Range) -> str:
    """In the syntax of the command line."""
    return f"{lost.partition.topic}:{lost.partition.number}:{lost.start}..{lost.end}"


def _options(name: str, values: Iterable[str]) -> str:
    """The option for each value; where they are many, a note that the command lists them."""
    texts = list(values)
    if len(texts) > _NAMED:
        return "(which shows all of them)"
    return " ".join(f"{name} {text}" for text in texts)


def _cap(until: Cut | None, partition: Partition) -> int:
    return 2**63 if until is None else until.get(partition, 0)


def split(ranges: Sequence[Range], *, most: int, parallelism: int) -> list[Range]:
    """Ranges in pieces: none over `most` offsets, and enough of them for every core."""
    total = sum(map(len, ranges))
    fair = max(SMALLEST_PIECE, -(-total // max(1, parallelism)))
    return [piece for r in ranges if len(r) for piece in r.pieces(min(most, fair))]


def publish(kafka: Mapping[str, str], group: str, cut: Cut) -> None:
    """Commit the tables' position to Kafka, for its own lag tools. Never read back."""
    own = {"group.id": group, "enable.auto.commit": "false"}
    with refusals(kafka):
        consumer = Consumer({"log_level": "2", **client_settings(kafka), **own})
    try:
        consumer.commit(
            offsets=[
                TopicPartition(partition.kafka_topic, partition.number, offset)
                for partition, offset in kafka_only(cut).items()
            ],
            asynchronous=False,
        )
    except KafkaException as error:
        raise Unavailable(
            f"cannot publish the offsets of group {group}: {error.args[0].str()}"
        ) from None
    finally:
        consumer.close()
