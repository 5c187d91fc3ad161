"""`frazil offsets`: the position of a stream, and an operator's decisions about it.

`look` plans a decision; `done` applies it, as a run of one batch (`sources.intervention`).
"""

from __future__ import annotations

import getpass
import itertools
import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from frazil.commit.batch_chain import chain
from frazil.commit.protocol import TableCommitter
from frazil.commit.recovery import staging_folder
from frazil.commit.rewind import refuse_unfinished
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
from frazil.ledger import staged_batch
from frazil.ledger.entry import LedgerEntry, OperatorNote
from frazil.ledger.sink_state import index_entry
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.ops.startup_checks import in_doubt, show_doubts
from frazil.render import TextTable
from frazil.sink import Sink
from frazil.sources.intervention import (
    EARLIEST,
    LATEST,
    Intervention,
    InterventionSource,
    WantedPosition,
    asked,
    decide,
    overtaken,
)
from frazil.spark.open_table import Open

#: With more partitions than this, healthy ones are not shown one by one.
_SHOWN = 50
_WHY = 500  # characters: the note is stored in a snapshot's summary


@dataclass(frozen=True, slots=True)
class OffsetsPlan:
    """The effect of a decision, planned or done."""

    sink: str
    index: str
    wanted: WantedPosition
    decision: Intervention
    position: Cut
    #: staged batches, which are committed first
    staged: int
    #: the cluster and topics that Kafka reported
    now: TopicIdentity
    #: unread ranges that retention has deleted, whatever the decision
    overtaken: tuple[Range, ...] = ()
    note: OperatorNote | None = None
    epoch: int | None = None

    def values(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "did": self.wanted.did,
            "done": self.note is not None,
            "sink": self.sink,
            "index": self.index,
            "position": self.position.nested(),
            "staged": self.staged,
            "lost": [[*r.partition, r.start, r.end] for r in self.decision.lost],
            "begin": self.decision.begin.nested(),
            "says": self.decision.says,
            "overtaken": [[*r.partition, r.start, r.end] for r in self.overtaken],
            "epoch": self.epoch,
            "note": asdict(self.note) if self.note else None,
        }


# ── arguments ────────────────────────────────────────────────────────────────────────────────────


def losses(texts: Sequence[str]) -> WantedPosition:
    return WantedPosition("accept-loss", lost=tuple(map(_range, texts)))


def adoption(topics: Sequence[str], start: str, same_offsets: bool) -> WantedPosition:
    if start not in (EARLIEST, LATEST):
        raise ConfigError(f"cannot begin at {start!r}: expected earliest or latest")
    return WantedPosition(
        "adopt-topic", topics=tuple(topics), start=start, same_offsets=same_offsets
    )


def seeking(texts: Sequence[str]) -> WantedPosition:
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


def signed(did: str, why: str, by: str = "") -> OperatorNote:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return OperatorNote(
        did, by.strip() or f"{_user()}@{socket.gethostname()}", now, why.strip()[:_WHY]
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id may have no name
        return "unknown"


# ── decisions ────────────────────────────────────────────────────────────────────────────────────


def look(config: Config, spark: SparkSession, wanted: WantedPosition) -> OffsetsPlan:
    """The plan of a decision; claims and writes nothing. Raises if it is not possible."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index = catalog.load(config.index_table)
    entry = None
    if index is not None:
        refuse_unfinished(index.properties, config.sink.id, wanted.did)
        entry = (
            TableCommitter(index, "main", config.sink.id, 0, time, claimed_first=True).head().entry
        )
    if entry is None or index is None:
        raise ConfigError(f"cannot {wanted.did}: sink {config.sink.id} has no position yet")
    known = TopicIdentity.of(entry)
    position, staged, known = _reached(config, catalog, index, entry, known)
    planner = asked(config, known, wanted)
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
    )


def _whole(catalog: JavaCatalog, batch: staged_batch.StagedBatch) -> bool:
    """Whether all files of the batch exist; if not, the batch is read again."""
    tables = [(catalog.load(staged.name), staged.manifests) for staged in batch.tables]
    return not any(table.lacking(manifests) for table, manifests in tables if table is not None)


def _reached(
    config: Config, catalog: JavaCatalog, index: JavaTable, entry: LedgerEntry, known: TopicIdentity
) -> tuple[Cut, int, TopicIdentity]:
    """The position after the staged batches, which are committed first; their number; and the
    topics."""
    paths = index.listing(staging_folder(config, index))
    stored = [
        staged_batch.load(index.fetch(path), path) for path in paths if path.endswith(".json")
    ]
    staged = chain(entry.end, [batch for batch in stored if batch], set(), entry.source[1])
    staged = list(itertools.takewhile(partial(_whole, catalog), staged))
    if not staged:
        return entry.end, 0, known
    return staged[-1].end, len(staged), TopicIdentity.of(staged[-1])


def done(config: Config, spark: SparkSession, plan: OffsetsPlan, note: OperatorNote) -> OffsetsPlan:
    """Apply the plan; running processes of the sink are fenced."""
    source = partial(InterventionSource, wanted=plan.wanted, note=note, expected=plan.now)
    sink = Sink(config, source=source)
    sink.once(spark)
    assert isinstance(sink.source, InterventionSource)
    decision = sink.source.decision
    return replace(
        plan, decision=decision, note=replace(note, result=decision.says), epoch=sink.epoch
    )


def confirmed(
    config: Config, spark: SparkSession, table: str, note: OperatorNote | None
) -> dict[str, Any]:
    """Record that an operator vouches for the content of a table whose history is expired. Without
    a note, nothing is written."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index, java_table = catalog.load(config.index_table), catalog.load(table)
    if index is None or java_table is None:
        raise ConfigError(
            f"cannot confirm table {table}: {'it' if index else 'the index'} is not there"
        )
    sink = config.sink.id
    refuse_unfinished(index.properties, sink, "confirm")
    branch = next(
        (table_config.branch for table_config in config.tables if table_config.name == table),
        "main",
    )
    known = None
    if table != config.index_table:
        position = TableCommitter(index, "main", sink, 0, time, claimed_first=True).head().entry
        known = position and replace(position, tables={}, index=config.index_table)
    target = TableCommitter(java_table, branch, sink, 0, time)
    doubted = target.doubted(known)
    if note is not None and doubted is not None:
        says = f"{table} holds everything below {spelled_cut(doubted.end)} and nothing beyond"
        note = replace(note, result=says)
        target.confirm(doubted, note.text())
    return {
        "sink": sink,
        "table": table,
        "doubted": doubted is not None,
        "below": doubted.end.nested() if doubted else {},
        "done": note is not None and doubted is not None,
        "note": asdict(note) if note and doubted else None,
    }


def spelled_cut(cut: Cut) -> str:
    return ", ".join(f"{partition}@{offset}" for partition, offset in cut.items())


def show_confirmed(result: dict[str, Any], console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    cut = spelled_cut(Cut.of(result["below"]))
    if not result["doubted"]:
        say(f"nothing to confirm: the history of {result['table']} tells what it holds")
    elif result["done"]:
        say(f"confirmed: {result['table']} holds everything below {cut} and nothing beyond")
    else:
        say(
            f"does {result['table']} hold everything below {cut}, and nothing of sink "
            f"{result['sink']} beyond? Rows beyond would be there twice: delete them first. "
            "Nothing was written: --yes and a --reason confirm it"
        )


# ── position ─────────────────────────────────────────────────────────────────────────────────────


def standing(config: Config, opened: Open) -> dict[str, Any]:
    """The position per partition, and the error that would stop a run now, with its hint."""
    index, sink = opened(config.index_table), config.sink.id
    entry = None
    if index is not None:
        entry = index_entry(index, sink)
    position = entry.end if entry else Cut()
    known = TopicIdentity.of(entry) if entry else TopicIdentity()
    planner = Planner(
        config.kafka.resolved(),
        topics=config.sink.topics,
        pattern=config.sink.topic_pattern,
        origin=known,
        trusting=True,
    )
    now, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    stops: FrazilError | None = None
    try:
        known.check(now)
        planner.require(kafka_only(with_new_partitions(position, marks)), marks)
    except FrazilError as error:
        stops = error
    return {
        "sink": sink,
        "index": config.index_table,
        "epoch": entry.epoch if entry else None,
        "cluster": now.cluster,
        "cluster_known": known.cluster,
        "without_ids": sorted(topic for topic, number in now.topics.items() if not number),
        "stops": None
        if stops is None
        else {"kind": type(stops).__name__, "says": stops.message, "hint": stops.hint},
        "in_doubt": in_doubt(config, opened),
        "partitions": [
            _line(p, position, marks.low, marks.end, known, now)
            for p in sorted({*partitions, *position} - {BATCHES})
        ],
    }


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
        "begins": begins,
        "ends": ends,
        "lag": lag,
        "overtaken": max(0, (begins or 0) - due) if due is not None and not other else 0,
        "state": "made again"
        if retired
        else "another topic"
        if other
        else "gone"
        if ends is None
        else "new"
        if offset is None
        else "read",
    }


def show_standing(report: dict[str, Any], console: Console) -> None:
    shown = TextTable(title=f"sink {report['sink']}: epoch {report['epoch']}")
    for name in ("partition", "position", "begins", "ends", "lag", "state"):
        shown.add_column(name, justify="left" if name in ("partition", "state") else "right")
    lines = report["partitions"]
    if len(lines) > _SHOWN:
        lines = [line for line in lines if line["state"] != "read" or line["overtaken"]][:_SHOWN]
    for line in lines:
        state = line["state"]
        if line["overtaken"]:
            state = f"{line['overtaken']} deleted before they were read"
        numbers = [line[name] for name in ("position", "begins", "ends", "lag")]
        shown.add_row(
            f"{line['topic']}[{line['partition']}]".replace("[", "\\["),
            *("-" if n is None else f"{n:,}" for n in numbers),
            state,
        )
    console.print(shown)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    lag = sum(line["lag"] or 0 for line in report["partitions"])
    say(f"{counted(len(report['partitions']), 'partition')}, {counted(lag, 'offset')} to come")
    if report["without_ids"]:
        say(f"{counted(len(report['without_ids']), 'topic')}: {WITHOUT_IDS}")
    if report["stops"]:
        say(
            f"{report['stops']['kind']}: {report['stops']['says']}\nhint: {report['stops']['hint']}"
        )
    show_doubts(report["in_doubt"], console)


def show(plan: OffsetsPlan, config: Path, console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for range_ in plan.decision.lost:
        say(f"{range_}: {counted(len(range_), 'offset')} given up")
    for partition, offset in plan.decision.begin.items():
        say(f"{partition} goes on at {offset}")
    if plan.note is not None:
        say(f"done in epoch {plan.epoch}: {plan.decision.says}; {plan.note}")
        return
    if not plan.decision:
        if plan.wanted.did == "accept-loss" and plan.overtaken:
            for range_ in plan.overtaken:
                lost = counted(len(range_), "offset")
                say(f"{range_}: retention deleted {lost} before they were read")
            options = " ".join(
                f"--lost {shlex.quote(spelled(range_))}" for range_ in plan.overtaken
            )
            say(f"to accept that: frazil offsets accept-loss {config} {options} --reason '…' --yes")
        else:
            say(f"nothing to {plan.wanted.did}: the stream can go on as it is")
        return
    before = (
        f"{counted(plan.staged, 'staged batch is', 'staged batches are')} committed first; "
        if plan.staged
        else ""
    )
    say(
        f"{plan.decision.says}; {before}nothing was written: --yes and a --reason do it, and stop "
        "a running sink"
    )
