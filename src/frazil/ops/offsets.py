"""`frazil offsets`: the position of a stream, and an operator's decisions about it.

`preview` plans a decision; `apply` applies it, as a run of one batch (`sources.operator_decision`).
"""

from __future__ import annotations

import getpass
import itertools
import re
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pyspark.sql import SparkSession

from frazil.commit.batch_chain import chain
from frazil.commit.protocol import TableCommitter
from frazil.commit.rewind_note import refuse_unfinished
from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError, counted
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.kafka.planner import (
    WITHOUT_IDS,
    Planner,
    TopicIdentity,
    kafka_only,
    spelled,
    with_new_partitions,
)
from frazil.ledger.entry import LedgerEntry, OperatorNote
from frazil.ledger.sink_state import index_entry, staged_batches
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.ops.startup_checks import doubt_lines, in_doubt
from frazil.render import Line, error_values, label, text_table
from frazil.sink import Sink
from frazil.sources.operator_decision import (
    EARLIEST,
    LATEST,
    OperatorDecision,
    OperatorDecisionSource,
    WantedPosition,
    decide,
    overtaken,
    planner_for,
)
from frazil.spark.open_table import Open

#: With more partitions than this, healthy ones are not shown one by one.
_SHOWN = 50
_REASON_LENGTH = 500  # characters: the note is stored in a snapshot's summary


@dataclass(frozen=True, slots=True)
class OffsetsPlan:
    """The effect of a decision, planned or done."""

    JSON: ClassVar = (
        "command=wanted.command applied sink index position staged *decision expired_ranges "
        "epoch note"
    )

    sink: str
    index: str
    wanted: WantedPosition
    decision: OperatorDecision
    position: Cut
    #: staged batches, which are committed first
    staged: int
    #: the cluster and topics that Kafka reported
    now: TopicIdentity
    #: unread ranges that retention has deleted, whatever the decision
    expired_ranges: tuple[Range, ...] = ()
    note: OperatorNote | None = None
    epoch: int | None = None
    #: the path of the config, for the command that is printed
    config: str = "CONFIG"

    @property
    def applied(self) -> bool:
        return self.note is not None

    def lines(self) -> Iterator[Line]:
        for range_ in self.decision.lost:
            yield f"{range_}: {counted(len(range_), 'offset')} given up"
        for partition, offset in self.decision.begin.items():
            yield f"{partition} continues at {offset}"
        if self.applied:
            yield f"done in epoch {self.epoch}: {self.decision.message}; {self.note}"
        elif self.decision:
            batches = counted(self.staged, "staged batch is", "staged batches are")
            before = f"{batches} committed first; " if self.staged else ""
            yield (
                f"{self.decision.message}; {before}nothing was written. Apply it with "
                "--apply and a --reason; this stops a running sink"
            )
        elif self.wanted.command == "accept-loss" and self.expired_ranges:
            for range_ in self.expired_ranges:
                lost = counted(len(range_), "offset")
                yield f"{range_}: retention deleted {lost} before they were read"
            options = " ".join(
                f"--lost {shlex.quote(spelled(lost))}" for lost in self.expired_ranges
            )
            yield (
                f"to accept that: frazil offsets accept-loss {self.config} {options} "
                "--reason '…' --apply"
            )
        else:
            yield f"nothing to {self.wanted.command}: the stream can continue as it is"


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


def accept_loss(texts: Sequence[str]) -> WantedPosition:
    return WantedPosition("accept-loss", lost=tuple(map(_range, texts)))


def adopt_topic(topics: Sequence[str], start: str, same_offsets: bool) -> WantedPosition:
    if start not in (EARLIEST, LATEST):
        raise ConfigError(f"cannot begin at {start!r}: expected earliest or latest")
    return WantedPosition(
        "adopt-topic", topics=tuple(topics), start=start, same_offsets=same_offsets
    )


def seek(texts: Sequence[str]) -> WantedPosition:
    to = {}
    for text in texts:
        match = re.fullmatch(r"(.+):(\d+):(\d+)", text)
        if match is None:
            raise ConfigError(f"cannot read {text!r}: expected TOPIC:PARTITION:OFFSET")
        to[Partition(match[1], 0).kafka_topic, int(match[2])] = int(match[3])
    return WantedPosition("seek", to=to)


def _range(text: str) -> Range:
    match = re.fullmatch(r"(.+):(\d+):(\d+)\.\.(\d+)", text)
    if match is None:
        raise ConfigError(f"cannot read {text!r}: expected TOPIC:PARTITION:START..END")
    return Range(Partition(match[1], int(match[2])), int(match[3]), int(match[4]))


def operator_note(command: str, why: str, by: str = "") -> OperatorNote:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return OperatorNote(
        command,
        by.strip() or f"{_user()}@{socket.gethostname()}",
        now,
        why.strip()[:_REASON_LENGTH],
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id may have no name
        return "unknown"


# ── decisions ────────────────────────────────────────────────────────────────────────────────────


def preview(
    config: Config, spark: SparkSession, wanted: WantedPosition, path: Path | str = "CONFIG"
) -> OffsetsPlan:
    """The plan of a decision; claims and writes nothing. Raises if it is not possible. `path`: of
    the config, for commands that are printed."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index = catalog.load(config.index_table)
    entry = None
    if index is not None:
        refuse_unfinished(index.properties, config.sink.id, wanted.command)
        entry = (
            TableCommitter(index, "main", config.sink.id, 0, time, claimed_first=True).head().entry
        )
    if entry is None or index is None:
        raise ConfigError(f"cannot {wanted.command}: sink {config.sink.id} has no position yet")
    known = TopicIdentity.of(entry)
    position, staged, known = _position_after_staged(config, catalog, index, entry, known)
    planner = planner_for(config, known, wanted)
    now, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    # A recreated topic has not lost the old topic's offsets: they belong to another topic.
    same = Cut({p: o for p, o in position.items() if not known.differs(now, p.topic)})
    decision = decide(wanted, position, known, now, marks, str(entry.epoch + 1))
    return OffsetsPlan(
        config.sink.id,
        config.index_table,
        wanted,
        decision,
        position,
        staged,
        now,
        tuple(overtaken(same, marks)),
        config=str(path),
    )


def _whole(catalog: JavaCatalog, batch: StagedBatch) -> bool:
    """Whether all files of the batch exist; if not, the batch is read again."""
    tables = [(catalog.load(staged.name), staged.manifests) for staged in batch.tables]
    return not any(table.lacking(manifests) for table, manifests in tables if table is not None)


def _position_after_staged(
    config: Config, catalog: JavaCatalog, index: JavaTable, entry: LedgerEntry, known: TopicIdentity
) -> tuple[Cut, int, TopicIdentity]:
    """The position after the staged batches, which are committed first; their number; and the
    topics."""
    stored = [batch for _, batch in staged_batches(config, index) if batch]
    staged = chain(entry.end, stored, set(), entry.source[1])
    staged = list(itertools.takewhile(partial(_whole, catalog), staged))
    if not staged:
        return entry.end, 0, known
    return staged[-1].end, len(staged), TopicIdentity.of(staged[-1])


def apply(
    config: Config, spark: SparkSession, plan: OffsetsPlan, note: OperatorNote
) -> OffsetsPlan:
    """Apply the plan; running processes of the sink are fenced."""
    source = partial(OperatorDecisionSource, wanted=plan.wanted, note=note, expected=plan.now)
    sink = Sink(config, source=source)
    sink.once(spark)
    assert isinstance(sink.source, OperatorDecisionSource)
    decision = sink.source.decision
    return replace(
        plan, decision=decision, note=replace(note, result=decision.message), epoch=sink.epoch
    )


def confirm(
    config: Config, spark: SparkSession, table: str, note: OperatorNote | None
) -> ConfirmReport:
    """Record that an operator vouches for the content of a table whose history is expired. Without
    a note, nothing is written."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index, java_table = catalog.load(config.index_table), catalog.load(table)
    if index is None or java_table is None:
        raise ConfigError(
            f"cannot confirm table {table}: {'it' if index else 'the index'} does not exist"
        )
    sink = config.sink.id
    refuse_unfinished(index.properties, sink, "confirm")
    known = None
    if table != config.index_table:
        position = TableCommitter(index, "main", sink, 0, time, claimed_first=True).head().entry
        known = position and replace(position, tables={}, index=config.index_table)
    target = TableCommitter(java_table, config.branch(table), sink, 0, time)
    doubted = target.doubted(known)
    if note is not None and doubted is not None:
        says = f"{table} has all offsets below {doubted.end.text} and nothing beyond"
        note = replace(note, result=says)
        target.confirm(doubted, note.text())
    return ConfirmReport(sink, table, doubted.end if doubted else None, note if doubted else None)


@dataclass(frozen=True, slots=True)
class ConfirmReport:
    JSON: ClassVar = "sink table confirmable up_to applied note"

    sink: str
    table: str
    #: where the ledger ends; None: the history shows what the table holds
    end: Cut | None
    note: OperatorNote | None

    @property
    def confirmable(self) -> bool:
        return self.end is not None

    @property
    def up_to(self) -> Cut:
        return self.end or Cut()

    @property
    def applied(self) -> bool:
        return self.note is not None

    def lines(self) -> Iterator[Line]:
        cut = self.up_to.text
        if not self.confirmable:
            yield f"nothing to confirm: the history of {self.table} shows what it has"
        elif self.applied:
            yield f"confirmed: {self.table} has all offsets below {cut} and none beyond"
        else:
            yield (
                f"does {self.table} have all offsets below {cut}, and no row of sink "
                f"{self.sink} beyond? Rows beyond would be written twice: delete them "
                "first. Nothing was written: --apply with a --reason confirms it"
            )


# ── position ─────────────────────────────────────────────────────────────────────────────────────


class OffsetsReport(dict[str, Any]):
    """The values of `frazil offsets show --json`."""

    def lines(self) -> Iterator[Line]:
        partitions = self["partitions"]
        shown = partitions
        if len(shown) > _SHOWN:
            shown = [line for line in shown if line["state"] != "read" or line["expired_offsets"]]
        numbers = ("position", "earliest_offset", "latest_offset", "lag")
        yield text_table(
            f"sink {self['sink']}: epoch {self['epoch']}",
            ("partition", *map(label, numbers), "state"),
            (
                (
                    f"{line['topic']}[{line['partition']}]",
                    *("-" if line[name] is None else f"{line[name]:,}" for name in numbers),
                    f"{line['expired_offsets']} deleted before they were read"
                    if line["expired_offsets"]
                    else label(line["state"]),
                )
                for line in shown[:_SHOWN]
            ),
            right=[label(name) for name in numbers],
        )
        lag = sum(line["lag"] or 0 for line in partitions)
        yield f"{counted(len(partitions), 'partition')}, lag {lag:,}"
        if self["without_ids"]:
            yield f"{counted(len(self['without_ids']), 'topic')}: {WITHOUT_IDS}"
        if stops := self["stops"]:
            yield f"{stops['class']}: {stops['message']}\nhint: {stops['hint']}"
        yield from doubt_lines(self["in_doubt"])


def show_offsets(config: Config, opened: Open) -> OffsetsReport:
    """The position per partition, and the error that would stop a run now, with its hint."""
    index, sink = opened(config.index_table), config.sink.id
    entry = None
    if index is not None:
        entry = index_entry(index, sink)
    position = entry.end if entry else Cut()
    known = TopicIdentity.of(entry)
    planner = Planner.of(config, entry, trusting=True)
    now, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    stops: FrazilError | None = None
    try:
        known.check(now)
        planner.require(kafka_only(with_new_partitions(position, marks)), marks)
    except FrazilError as error:
        stops = error
    values = {
        "sink": sink,
        "index": config.index_table,
        "epoch": entry.epoch if entry else None,
        "cluster": now.cluster,
        "cluster_known": known.cluster,
        "without_ids": sorted(topic for topic, number in now.topics.items() if not number),
        "stops": None if stops is None else error_values(stops),
        "in_doubt": in_doubt(config, opened),
        "partitions": [
            _line(p, position, marks.low, marks.end, known, now)
            for p in sorted({*partitions, *position} - {BATCHES})
        ],
    }
    return OffsetsReport(values)


def _line(
    partition: Partition,
    position: Cut,
    low: Cut,
    end: Cut,
    known: TopicIdentity,
    now: TopicIdentity,
) -> dict[str, Any]:
    offset, topic = position.get(partition), partition.topic
    retired = topic not in now.topics
    other = known.differs(now, topic)
    begins, ends = (None, None) if retired else (low.get(partition), end.get(partition))
    due = 0 if offset is None and topic in position.topics else offset
    first = begins if due is None else due
    lag = None if other or ends is None or first is None else ends - first
    return {
        "topic": topic,
        "partition": partition.number,
        "position": offset,
        "earliest_offset": begins,
        "latest_offset": ends,
        "lag": lag,
        "expired_offsets": max(0, (begins or 0) - due) if due is not None and not other else 0,
        "state": "recreated"
        if retired
        else "other_topic"
        if other
        else "gone"
        if ends is None
        else "new"
        if offset is None
        else "read",
    }
