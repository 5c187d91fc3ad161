"""What `frazil offsets` does: where a stream stands, and what a person decides about it.

`look` says what a decision would come to; `done` makes it, as a life of one batch (`feed.decided`).
"""

from __future__ import annotations

import getpass
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
from rich.table import Table as Shown

from frazil.core.config import Config
from frazil.core.errors import ConfigError, FrazilError
from frazil.core.offsets import BATCHES, Cut, Partition, Range
from frazil.feed.decided import (
    EARLIEST,
    LATEST,
    Decided,
    Decision,
    Wanted,
    asked,
    decide,
    overtaken,
)
from frazil.ingest import stage
from frazil.ingest.source import Origin, Planner, kafka_only, spelled
from frazil.life import stage_folder
from frazil.sink import Sink
from frazil.surface.opened import Open
from frazil.table.commit import Target, chain, witness_tag
from frazil.table.jvm import Catalog, Table
from frazil.table.ledger import Entry, Note, head
from frazil.table.rewind import refuse_unfinished

#: Of more partitions than this, those that stand well are not shown one by one.
_SHOWN = 50
_WHY = 500  # characters: a note stands in a snapshot's summary


@dataclass(frozen=True, slots=True)
class Plan:
    """What a decision would come to, or came to."""

    sink: str
    index: str
    wanted: Wanted
    decision: Decision
    position: Cut
    #: batches that are staged, and are committed before
    staged: int
    #: whom Kafka's answers came from
    now: Origin
    #: what retention has deleted, whatever is wanted
    overtaken: tuple[Range, ...] = ()
    note: Note | None = None
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


# ── what is asked for ────────────────────────────────────────────────────────────────────────────


def losses(texts: Sequence[str]) -> Wanted:
    return Wanted("accept-loss", lost=tuple(map(_range, texts)))


def adoption(topics: Sequence[str], start: str, same_offsets: bool) -> Wanted:
    if start not in (EARLIEST, LATEST):
        raise ConfigError(f"cannot begin at {start!r}: expected earliest or latest")
    return Wanted("adopt", topics=tuple(topics), start=start, same_offsets=same_offsets)


def rebasing(texts: Sequence[str]) -> Wanted:
    to = {}
    for text in texts:
        found = re.fullmatch(r"(.+):(\d+):(\d+)", text)
        if found is None:
            raise ConfigError(f"cannot read {text!r}: expected TOPIC:PARTITION:OFFSET")
        to[Partition(found[1], 0).kafka_topic, int(found[2])] = int(found[3])
    return Wanted("rebase", to=to)


def _range(text: str) -> Range:
    found = re.fullmatch(r"(.+):(\d+):(\d+)\.\.(\d+)", text)
    if found is None:
        raise ConfigError(f"cannot read {text!r}: expected TOPIC:PARTITION:START..END")
    return Range(Partition(found[1], int(found[2])), int(found[3]), int(found[4]))


def signed(did: str, why: str, by: str = "") -> Note:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Note(did, by.strip() or f"{_user()}@{socket.gethostname()}", now, why.strip()[:_WHY])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        return "unknown"


# ── looking and doing ────────────────────────────────────────────────────────────────────────────


def look(config: Config, spark: SparkSession, wanted: Wanted) -> Plan:
    """Nothing is claimed, nothing is written. Raises where it cannot be."""
    index = Catalog(spark, config.catalog.name).load(config.index_table)
    entry = None
    if index is not None:
        refuse_unfinished(index.properties, config.sink.id, wanted.did)
        entry = Target(index, "main", config.sink.id, 0, time, claimed_first=True).head().entry
    if entry is None or index is None:
        raise ConfigError(f"cannot {wanted.did}: sink {config.sink.id} has no position yet")
    known = Origin(entry.cluster, entry.topics)
    position, staged, known = _reached(config, index, entry, known)
    planner = asked(config, known, wanted)
    now, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    # A topic that is another one has lost nothing of the old one's offsets: they are no longer its.
    same = Cut({p: o for p, o in position.items() if now.topics.get(p.topic) ==
                known.topics.get(p.topic)})  # fmt: skip
    found = decide(wanted, position, known, now, marks, str(entry.epoch + 1))
    return Plan(config.sink.id, config.index_table, wanted, found, position, staged, now,
                tuple(overtaken(same, marks)))  # fmt: skip


def _reached(config: Config, index: Table, entry: Entry, known: Origin) -> tuple[Cut, int, Origin]:
    """Behind what is staged: that is committed first."""
    paths = index.listing(stage_folder(config, index))
    stored = [stage.load(index.fetch(path)) for path in paths if path.endswith(".json")]
    staged = chain(entry.end, [each for each in stored if each], set(), entry.source[1])
    if not staged:
        return entry.end, 0, known
    return staged[-1].end, len(staged), Origin(staged[-1].cluster, staged[-1].topics)


def done(config: Config, spark: SparkSession, plan: Plan, note: Note) -> Plan:
    """Make it so; running lives of the sink are fenced."""
    feeds: list[Decided] = []

    def feed(host: Sink) -> Decided:
        feeds.append(Decided(host, plan.wanted, note, plan.now))
        return feeds[0]

    sink = Sink(config, feed=feed)
    sink.once(spark)
    found = feeds[0].decision
    return replace(plan, decision=found, note=replace(note, says=found.says), epoch=sink.epoch)


# ── where it stands ──────────────────────────────────────────────────────────────────────────────


def standing(config: Config, opened: Open) -> dict[str, Any]:
    """Partition by partition; what would stop a life now, with the command that helps."""
    index, sink = opened(config.index_table), config.sink.id
    entry = None
    if index is not None:
        entry = head(index.history("main"), sink, index.tagged(witness_tag(sink))).entry
    position = entry.end if entry else Cut()
    known = Origin(entry.cluster, entry.topics) if entry else Origin()
    planner = Planner(config.kafka.resolved(), topics=config.sink.topics,
                      pattern=config.sink.pattern, origin=known, trusting=True)  # fmt: skip
    now, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    stops: FrazilError | None = None
    try:
        known.check(now)
        planner.require(kafka_only(position), marks)
    except FrazilError as error:
        stops = error
    return {
        "sink": sink,
        "index": config.index_table,
        "epoch": entry.epoch if entry else None,
        "cluster": now.cluster,
        "cluster_known": known.cluster,
        "stops": None if stops is None else {"kind": type(stops).__name__, "says": stops.message,
                                             "hint": stops.hint},
        "partitions": [_line(p, position, marks.low, marks.end, known, now)
                       for p in sorted({*partitions, *position} - {BATCHES})],
    }  # fmt: skip


def _line(
    partition: Partition, position: Cut, low: Cut, end: Cut, known: Origin, now: Origin
) -> dict[str, Any]:
    here, topic = position.get(partition), partition.topic
    retired = topic not in now.topics
    other = not retired and known.topics.get(topic, now.topics[topic]) != now.topics[topic]
    begins, ends = (None, None) if retired else (low.get(partition), end.get(partition))
    first = begins if here is None else here
    lag = None if other or ends is None or first is None else ends - first
    return {
        "topic": topic,
        "partition": partition.number,
        "position": here,
        "begins": begins,
        "ends": ends,
        "lag": lag,
        "overtaken": max(0, (begins or 0) - here) if here is not None and not other else 0,
        "state": "made again" if retired else "another topic" if other else
                 "gone" if ends is None else "new" if here is None else "read",
    }  # fmt: skip


def show_standing(found: dict[str, Any], console: Console) -> None:
    shown = Shown(title=f"sink {found['sink']}: epoch {found['epoch']}")
    for name in ("partition", "position", "begins", "ends", "lag", "state"):
        shown.add_column(name, justify="left" if name in ("partition", "state") else "right")
    lines = found["partitions"]
    if len(lines) > _SHOWN:
        lines = [each for each in lines if each["state"] != "read" or each["overtaken"]][:_SHOWN]
    for each in lines:
        state = each["state"]
        if each["overtaken"]:
            state = f"{each['overtaken']} deleted before they were read"
        numbers = [each[name] for name in ("position", "begins", "ends", "lag")]
        shown.add_row(f"{each['topic']}[{each['partition']}]".replace("[", "\\["),
                      *("-" if n is None else f"{n:,}" for n in numbers), state)  # fmt: skip
    console.print(shown)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    say(f"{len(found['partitions'])} partitions, "
        f"{sum(each['lag'] or 0 for each in found['partitions']):,} offsets to come")  # fmt: skip
    if found["stops"]:
        say(f"{found['stops']['kind']}: {found['stops']['says']}\nhint: {found['stops']['hint']}")


def show(plan: Plan, config: Path, console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for each in plan.decision.lost:
        say(f"{each}: {len(each):,} offsets given up")
    for partition, offset in plan.decision.begin.items():
        say(f"{partition} goes on at {offset}")
    if plan.note is not None:
        say(f"done in epoch {plan.epoch}: {plan.decision.says}; {plan.note}")
        return
    if not plan.decision:
        if plan.wanted.did == "accept-loss" and plan.overtaken:
            for each in plan.overtaken:
                say(f"{each}: retention deleted {len(each):,} offsets before they were read")
            options = " ".join(f"--lost {shlex.quote(spelled(each))}" for each in plan.overtaken)
            say(f"to accept that: frazil offsets accept-loss {config} {options} --reason '…' --yes")
        else:
            say(f"nothing to {plan.wanted.did}: the stream can go on as it is")
        return
    before = f"{plan.staged} staged batches are committed first; " if plan.staged else ""
    say(f"{plan.decision.says}; {before}nothing was written: --yes and a --reason do it, and stop "
        "a running life of the sink")  # fmt: skip
