"""An operator's decision about a stream's position: a loss accepted, a topic adopted, a cut moved.

A decision is a batch of its own without records, made by a run of its own: batches that an earlier
run left staged are committed first, and a run that is still alive is fenced. The decision is staged
and committed like any batch, so a kill at any point leaves it done or undone. Its note (who, when,
why) is in the ledger and in its rows of the index, which outlive every snapshot.

    accept-loss   [position, end) is recorded as *lost*: retention has deleted it
    seek          forward: the same for records that still exist and are given up;
                  back: the topic is read as a new one, from the given offset
    adopt-topic   the topic, or the cluster, is another one: it is read as a new one; or, with the
                  same offsets, only its id changes

A topic that is read as a new one has the epoch behind its name, `orders@7`, in the ledger and in
the rows: its offset 17 is not the offset 17 written before, and both stay provable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession

from frazil.accounting import RangeCounts
from frazil.config.model import Config
from frazil.errors import ConfigError, Expired, Fatal, IdentityMismatch
from frazil.kafka.planner import Planner, TopicIdentity, Watermarks, kafka_only, with_new_partitions
from frazil.kafka.range_source import BatchGathering
from frazil.ledger.entry import LedgerEntry, OperatorNote
from frazil.offsets import Cut, Partition, Range, newest_names
from frazil.retry import Retry
from frazil.sources.base import (
    BatchRun,
    BatchSource,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TableWriteResult,
    WriteResult,
)
from frazil.sources.batch_plans import BatchPlans

EARLIEST, LATEST = "earliest", "latest"


@dataclass(frozen=True, slots=True)
class WantedPosition:
    """The request of an operator."""

    #: `accept-loss`, `adopt-topic` or `seek`
    command: str
    #: exactly these ranges are given up
    lost: tuple[Range, ...] = ()
    #: Kafka topics to adopt; empty: all topics with another identity
    topics: tuple[str, ...] = ()
    #: where they begin: `earliest`, `latest`
    start: str = EARLIEST
    #: the same offset of both topics is the same record
    same_offsets: bool = False
    #: Kafka topic and partition → offset to continue from
    to: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OperatorDecision:
    """The effect of a request."""

    JSON: ClassVar = "lost start_offsets=begin message"

    lost: tuple[Range, ...] = ()
    #: first offsets of partitions under new names, and of partitions with only a new topic id
    begin: Cut = field(default_factory=Cut)
    origin: TopicIdentity = field(default_factory=TopicIdentity)
    message: str = ""

    def __bool__(self) -> bool:
        return bool(self.lost or self.begin)


def overtaken(position: Cut, marks: Watermarks) -> list[Range]:
    """Ranges that retention deleted before they were read."""
    return [
        Range(partition, offset, marks.low[partition])
        for partition, offset in kafka_only(with_new_partitions(position, marks)).items()
        if offset < marks.low.get(partition, 0)
    ]


def decide(
    wanted: WantedPosition,
    position: Cut,
    known: TopicIdentity,
    now: TopicIdentity,
    marks: Watermarks,
    epoch: str,
) -> OperatorDecision:
    """Pure. `known`: topic identity in the ledger; `now`, `marks`: Kafka's answers, under the
    ledger's names; `epoch`: the suffix of topics that are read as new ones."""
    if wanted.command != "adopt-topic":
        position = with_new_partitions(position, marks)
    if wanted.command == "accept-loss":
        return _accepted(wanted, position, known, marks)
    if wanted.command == "adopt-topic":
        return _adopted(wanted, position, known, now, marks, epoch)
    return _rebased(wanted, position, known, marks, epoch)


def _accepted(
    wanted: WantedPosition, position: Cut, known: TopicIdentity, marks: Watermarks
) -> OperatorDecision:
    for lost in wanted.lost:
        offset, low = _offset_of(lost.partition, position), marks.low.get(lost.partition)
        if low is None or lost.start != offset or lost.end <= lost.start:
            raise ConfigError(
                f"cannot accept the loss of {lost}: the position is {lost.partition}@{offset}"
            )
        if lost.end > low:
            raise ConfigError(
                f"cannot accept the loss of {lost}: Kafka still has all offsets from {low}",
                hint="`frazil offsets seek` skips offsets that Kafka has",
            )
    offsets = sum(map(len, wanted.lost))
    origin = known.without(lost.partition for lost in wanted.lost)
    return OperatorDecision(
        wanted.lost, origin=origin, message=f"{offsets} offsets accepted as lost"
    )


def _adopted(
    wanted: WantedPosition,
    position: Cut,
    known: TopicIdentity,
    now: TopicIdentity,
    marks: Watermarks,
    epoch: str,
) -> OperatorDecision:
    # Without topic ids only another cluster shows that topics are others.
    moved = known.cluster not in ("", now.cluster)
    others = {
        topic
        for topic, number in now.topics.items()
        if known.differs(now, topic) or (moved and not (number and known.topics.get(topic)))
    }
    others &= set(position.topics)  # the rest is new, and begins as new topics do
    asked = {p: topic for p, topic in newest_names(now.topics).items() if p in wanted.topics}
    for name in wanted.topics:
        if asked.get(name) not in others:
            raise ConfigError(
                f"cannot adopt topic {name}: the ledger has this topic id already, or the "
                "sink never read the topic"
            )
    taken = sorted(set(asked.values()) if wanted.topics else others)
    offsets = {p: o for p, o in kafka_only(position).items() if p.topic in taken}
    partitions = [p for p in marks.end if p.topic in taken]
    if wanted.same_offsets:
        beyond = [
            f"{p} (position {o}, end {marks.end.get(p, 'none')})"
            for p, o in offsets.items()
            if o > marks.end.get(p, -1)
        ]
        if beyond:
            raise IdentityMismatch(
                "cannot adopt the topic with its offsets: the topic ends before the "
                f"position: {', '.join(beyond)}",
                hint="its offsets belong to other records; without --same-offsets it is read "
                "as a new topic, from its beginning",
            )
        topics = {topic: now.topics[topic] for topic in taken}
        begin, says = Cut(offsets), f"{', '.join(taken)} continue with the same offsets"
    else:
        called = {topic: f"{Partition(topic, 0).kafka_topic}@{epoch}" for topic in taken}
        topics = {called[topic]: now.topics[topic] for topic in taken}
        ends = marks.end if wanted.start == LATEST else marks.low
        begin = Cut({Partition(called[p.topic], p.number): ends[p] for p in partitions})
        says = ", ".join(f"{old} is read as {new}" for old, new in called.items())
        says += f", from {'its end' if wanted.start == LATEST else 'its beginning'}" if says else ""
    if known.cluster and known.cluster != now.cluster:
        says = f"cluster {now.cluster} for {known.cluster}; {says}".removesuffix("; ")
        begin = begin or kafka_only(position)
    same = known.leaders if known.cluster in ("", now.cluster) else {}
    kept = {p: leader for p, leader in same.items() if p.topic not in taken}
    origin = TopicIdentity(now.cluster, {**known.topics, **topics}, kept)
    return OperatorDecision(begin=begin, origin=origin, message=says)


def _rebased(
    wanted: WantedPosition, position: Cut, known: TopicIdentity, marks: Watermarks, epoch: str
) -> OperatorDecision:
    names = newest_names(position.topics)
    to: dict[Partition, int] = {}
    for (topic, number), offset in wanted.to.items():
        partition = Partition(names.get(topic, topic), number)
        at = _offset_of(partition, position)
        if not marks.low.get(partition, 0) <= offset <= marks.end.get(partition, -1):
            raise ConfigError(
                f"cannot seek to {topic}:{number}:{offset}: the partition has offsets "
                f"{marks.low.get(partition, 0)} to {marks.end.get(partition, 0)}"
            )
        if offset != at:
            to[partition] = offset
    current = kafka_only(position)
    ahead = [Range(p, current[p], offset) for p, offset in to.items() if offset > current[p]]
    back = {p: offset for p, offset in to.items() if offset < current[p]}
    if ahead and back:
        raise ConfigError("cannot seek forward and back in one command; run one seek per direction")
    if ahead:
        offsets = sum(map(len, ahead))
        origin = known.without(r.partition for r in ahead)
        return OperatorDecision(tuple(ahead), origin=origin, message=f"{offsets} offsets given up")
    called = {p.topic: f"{p.kafka_topic}@{epoch}" for p in back}
    moved = {p: back.get(p, o) for p, o in current.items() if p.topic in called}
    missing = [p for p, o in moved.items() if o < marks.low.get(p, 0)]
    if missing:
        raise Expired(
            f"cannot seek: retention has deleted {', '.join(map(str, missing))} before "
            "they were read",
            hint="accept this loss first: frazil offsets accept-loss CONFIG",
        )
    begin = Cut({Partition(called[p.topic], p.number): offset for p, offset in moved.items()})
    topics = {called[topic]: known.topics[topic] for topic in called if topic in known.topics}
    again = sum(current[p] - min(offset, current[p]) for p, offset in back.items())
    says = ", ".join(f"{old} is read as {new}" for old, new in called.items())
    says += f"; {again} offsets are read again" if again else ""
    return OperatorDecision(
        begin=begin,
        message=says,
        origin=TopicIdentity(known.cluster, {**known.topics, **topics}, known.leaders),
    )


def _offset_of(partition: Partition, position: Cut) -> int:
    if partition not in kafka_only(position):
        known = ", ".join(map(str, kafka_only(position))) or "none"
        raise ConfigError(f"cannot move {partition}: the sink does not read it; it reads {known}")
    return position[partition]


def planner_for(config: Config, known: TopicIdentity, wanted: WantedPosition) -> Planner:
    """A planner for the decision: an adoption accepts another topic or cluster."""
    return Planner.of(config, known, trusting=wanted.command == "adopt-topic")


class OperatorDecisionSource(BatchSource[BatchRun]):
    """One batch: the decision alone."""

    changes = "records"

    def __init__(
        self,
        config: Config,
        retry: Retry,
        gathering: BatchGathering,
        *,
        wanted: WantedPosition,
        note: OperatorNote,
        expected: TopicIdentity | None = None,
    ) -> None:
        """`expected`: topic identity when the operator decided."""
        if config.transform:
            raise ConfigError(
                f"cannot {wanted.command}: sink {config.sink.id} has a [transform]; "
                "Spark's checkpoint holds its position",
                hint="use another sink id",
            )
        self._config = config
        self._plans = BatchPlans(config, config.kafka.resolved())
        self._wanted = wanted
        self._note = note
        self._expected = expected
        self._epoch = 0
        self.decision = OperatorDecision()

    def template(self, table: str) -> str:
        return self._plans.template(table)

    def identify(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        if entry is None:
            raise ConfigError(
                f"cannot {self._wanted.command}: sink {self._config.sink.id} has no position yet"
            )
        known = TopicIdentity.of(entry)
        now, _ = planner_for(self._config, known, self._wanted).origin()
        if self._expected is not None and self._expected != now:
            raise Fatal(
                f"cannot {self._wanted.command}: topic or cluster changed since the preview",
                hint="run it again",
            )
        return TopicIdentity(entry.cluster)  # the claim records nothing new

    def resume(self, reached: StreamPosition, epoch: int) -> None:
        self._epoch = epoch

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame:
        return spark.range(0).toDF("id")

    def run(self, plan: PlannedBatch, tables: BatchTables) -> BatchRun:
        return BatchRun()

    def check(self, plan: PlannedBatch, tables: BatchTables, run: BatchRun) -> WriteResult | None:
        reached, known = plan.position, plan.position.origin
        planner = planner_for(self._config, known, self._wanted)
        now, partitions = planner.origin()
        marks = planner.watermarks(partitions)
        decision = decide(self._wanted, reached.cut, known, now, marks, str(self._epoch))
        self.decision = decision
        if not decision:
            return None
        new = {lost.partition: lost.start for lost in decision.lost}  # of a partition not read yet
        begin = Cut({**new, **reached.cut, **decision.begin})
        tallies = [RangeCounts(lost, 0, lost=len(lost)) for lost in decision.lost]
        tallies += [
            RangeCounts(Range(p, offset, offset), 0) for p, offset in decision.begin.items()
        ]
        return WriteResult(
            begin,
            begin.after(decision.lost),
            tables=self._of_tables(tallies, tables),
            total=() if self._of_tables(tallies, tables) else tuple(tallies),
            origin=decision.origin,
            note=replace(self._note, result=decision.message).text(),
        )

    def _of_tables(
        self, tallies: Sequence[RangeCounts], tables: BatchTables
    ) -> dict[str, TableWriteResult]:
        """The ledger of an only table advances with the index. Those of several tables need not."""
        if not self._config.one_table or not tables.plans:
            return {}
        return {self._config.tables[0].name: TableWriteResult(tuple(tallies), ())}
