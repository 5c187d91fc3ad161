"""What `frazil audit` does: every table of a sink, or every sink of a table.

The evidence is gathered here, from metadata files and the index's rows; `table.audit` judges it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from frazil.core.config import Config, replayed
from frazil.core.errors import ConfigError
from frazil.core.offsets import BATCHES, Cut, Range
from frazil.surface.opened import Open
from frazil.table import told
from frazil.table.audit import (
    REPLAY,
    STREAM,
    Evidence,
    Finding,
    Report,
    audit,
    known_tables,
    worst,
)
from frazil.table.ledger import PREFIX, Snapshot, head
from frazil.table.plain import Plain
from frazil.table.told import Told

_PROVES = {
    "records": "every record is accounted for",
    "batches": "every range of the source was processed in exactly one committed batch; rows are "
    "not told apart by record",
    "changes": "every record was applied by exactly one committed batch; which of their rows later "
    "ones replaced is not told apart",
}
#: Of more reports than this, only those that are not proven are shown partition by partition.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Proof:
    reports: list[Report]
    #: tables of the config that nobody has made or written to yet
    absent: tuple[str, ...] = ()
    #: what Kafka itself says, where it was asked
    broker: list[dict[str, object]] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> str:
        found = [each for report in self.reports for each in report.found]
        return worst((*found, *self.findings))


class Index:
    """One sink's part of the offset index: read once, for all of its tables, and meanwhile."""

    def __init__(self, table: Plain, sink: str) -> None:
        self.table = table
        self.sink = sink
        entry = head(table.history("main"), sink, table.tagged(f"frazil/{sink}")).entry
        self.position = entry.end if entry else Cut()
        self.tables = known_tables(table, sink)
        beside = ThreadPoolExecutor(1)
        self._reading = beside.submit(self._read)
        beside.shutdown(wait=False)

    def _read(self) -> dict[str, Told]:
        where = {"sink": [self.sink]}
        return told.by_table(self.table.each(told.of_file, self.table.having(told.COLUMNS), where))

    @property
    def _told(self) -> dict[str, Told]:
        return self._reading.result()

    @property
    def stream(self) -> Told:
        return self.rows_of(STREAM)

    def rows_of(self, table: str) -> Told:
        return self._told.get(table, told.NOTHING)

    def chain(self) -> Told:
        """Rows that tell of all records: those of the stream; where it has none, as there was one
        table only, the table's own. Their snapshots are not the index's."""
        others = [each for name, each in self._told.items() if name != STREAM]
        if len(self.stream):
            others = [told.outside(each, self.stream) for each in others]
            others = [self.stream, *(each for each in others if len(each))]
        found = told.one(others)
        return replace(found, snapshots=np.zeros_like(found.snapshots))

    def report(self) -> Report:
        """Of the stream as a whole: do the index's rows join, and does its own ledger agree?"""
        evidence = Evidence(
            self.table.name, list(self.table.history("main")), _witnesses(self.table, "main"),
            index={self.sink: self.chain()},
        )  # fmt: skip
        found = audit(evidence, self.sink)
        return found[0] if found else Report(self.table.name, self.sink, (), 0)


class _Read(Mapping[str, Told]):
    """Sink → what its index tells of a table; waits for it when it is asked."""

    def __init__(self, indexes: Iterable[Index], table: str) -> None:
        self._indexes = {each.sink: each for each in indexes}
        self._table = table

    def __getitem__(self, sink: str) -> Told:
        return self._indexes[sink].rows_of(self._table)

    def __iter__(self) -> Iterator[str]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._indexes)


def of_table(opened: Open, name: str, branch: str, deep: bool = False) -> Proof:
    """One report for each sink that wrote to the table; its index is named in its ledger."""
    table = opened(name)
    if table is None:
        raise ConfigError(f"cannot audit table {name}: it does not exist")
    indexes: dict[str, Index] = {}
    history = list(table.history(branch))
    for snapshot in (*history, *table.tags().values()):  # of what was expired, witnesses are left
        sink = snapshot.summary.get(PREFIX + "sink", "")
        said = snapshot.summary.get(PREFIX + "index", "")
        if said and sink not in indexes and (index := opened(said)) is not None:
            indexes[sink] = Index(index, sink)
    reports = _reports(table, branch, history, indexes.values(), deep)
    if not reports:
        raise ConfigError(f"cannot audit table {name}: no snapshot of it was written by Frazil")
    return Proof([*reports, *_streams(indexes.values())])


def of_sink(config: Config, opened: Open, deep: bool = False) -> Proof:
    """Every table the sink fills: those of the config, those made by names from the data, the dead
    letters, and the notes of their replays. The sink that replays has reports of its own."""
    index = opened(config.index_table)
    sinks = (config.sink.id, config.sink.id + REPLAY)
    indexes = [] if index is None else [Index(index, sink) for sink in sinks]
    known = [name for each in indexes for name in each.tables]
    named = [table.name for table in config.tables if "{" not in table.name]
    if config.dead_letters:
        named += [config.dead_letters.table, replayed(config.dead_letters.table)]
    found: list[Report] = []
    absent = {}
    for name in dict.fromkeys([*named, *sorted(known)]):
        table = opened(name)
        reports = None
        if table is not None:
            branch = _branch(config, name)
            reports = _reports(table, branch, list(table.history(branch)), indexes, deep)
        if reports is None and name in known:
            gone = Finding("gap", "the table is gone; the index says that it was there")
            reports = [Report(name, config.sink.id, (), 0, (gone,))]
        mine = [
            report
            for report in reports or ()
            if report.sink == config.sink.id
            # A replay claims every table, and most get nothing from it.
            or (report.sink in sinks and (report.commits or report.verdict != "proven"))
        ]
        if not mine and name in named:
            nothing = f"no snapshot of it was written by sink {config.sink.id}"
            absent[name] = "it does not exist" if reports is None else nothing
        found += mine
    found += _streams(indexes)
    for name, why in absent.items() if not found else ():
        raise ConfigError(f"cannot audit table {name}: {why}")
    return Proof(found, tuple(absent))


def _streams(indexes: Iterable[Index]) -> list[Report]:
    reports = [each.report() for each in indexes]
    return [report for report in reports if report.commits or report.found or report.lines]


def _reports(
    table: Plain, branch: str, history: Sequence[Snapshot], indexes: Iterable[Index], deep: bool
) -> list[Report]:
    files, deletes = table.files(branch)
    evidence = Evidence(
        table.name,
        history,
        _witnesses(table, branch),
        files,
        deletes,
        index=_Read(indexes, table.name),
        stream=_Read(indexes, STREAM),
        positions={each.sink: each.position for each in indexes},
        deep=table.origins(branch) if deep else None,
    )
    return audit(evidence)


def _witnesses(table: Plain, branch: str) -> dict[str, Snapshot]:
    found = {}
    for tag, snapshot in table.tags().items():
        sink = snapshot.summary.get(PREFIX + "sink")
        if sink and tag == (f"frazil/{sink}" if branch == "main" else f"frazil/{sink}/{branch}"):
            found[sink] = snapshot
    return found


def _branch(config: Config, name: str) -> str:
    """A table's own, or its template's."""
    for table in config.tables:
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(table.name)), name):
            return table.branch
    return "main"


def against_kafka(config: Config, opened: Open, proof: Proof) -> Proof:
    """What the broker has, beside what was read: what is still to come, and what never will."""
    from frazil.ingest.source import Origin, Planner

    index = opened(config.index_table)
    entry = None
    if index is not None:
        sink = config.sink.id
        entry = head(index.history("main"), sink, index.tagged(f"frazil/{sink}")).entry
    began = {
        line.range.partition: line.range.start
        for report in proof.reports
        if report.sink == config.sink.id and index is not None and report.table == index.name
        for line in report.lines
    }
    position = entry.end if entry else Cut()
    ledger = Origin(entry.cluster, entry.topics) if entry else Origin()
    planner = Planner(config.kafka.resolved(), topics=config.sink.topics,
                      pattern=config.sink.pattern, origin=ledger, trusting=True)  # fmt: skip
    found, lines = [], []
    origin, partitions = planner.origin()
    for topic, known in (entry.topics if entry else {}).items():
        if origin.topics.get(topic, known) != known:
            found.append(Finding("unaccounted", f"topic {topic} was dropped and made again; "
                                 f"expected id {known}, found {origin.topics[topic]}"))  # fmt: skip
    if entry and entry.cluster and entry.cluster != origin.cluster:
        found.append(Finding("unaccounted", f"another cluster answers; expected {entry.cluster}, "
                             f"found {origin.cluster}"))  # fmt: skip
    marks = planner.watermarks(partitions)
    for partition in sorted({*partitions, *position.current} - {BATCHES}):
        low, end = marks.low.get(partition), marks.end.get(partition)
        here = position.get(partition)
        if low is None or end is None:
            found.append(Finding("unaccounted", f"{partition} is gone; it was read up to {here}"))
            continue
        if here is not None and here < low:
            lost = Range(partition, here, low)
            found.append(
                Finding("gap", f"retention has deleted {lost} before it was read", (lost,))
            )
        if here is not None and here > end:
            found.append(Finding("unaccounted", f"{partition} ends at {end}; it was read up to "
                                 f"{here}: it was truncated"))  # fmt: skip
        lines.append({
            "topic": partition.topic, "partition": partition.number, "earliest": low, "latest": end,
            "read_from": began.get(partition), "position": here,
            "lag": end - max(low, here or 0),
            "never_read": max(0, min(end, began.get(partition, low)) - low),
        })  # fmt: skip
    return Proof(proof.reports, proof.absent, lines, tuple(found))


def show(proof: Proof, console: Console) -> None:
    tables = [report for report in proof.reports if "manifests" in report.witnesses]
    for report in proof.reports:
        few = report in tables and len(tables) <= _SHOWN
        if few or report.verdict != "proven":
            console.print(audit_table(report.values()))
    for report in proof.reports:
        console.print(
            ("" if len(proof.reports) == 1 else f"{report.table}, sink {report.sink}: ")
            + f"{report.verdict}: {report.written:,} rows in {report.commits} commits; "
            f"{_PROVES[report.proves]} ({', '.join(report.witnesses)})",
            soft_wrap=True,
        )
    for note in dict.fromkeys(note for report in proof.reports for note in report.notes):
        console.print(f"{note}{f' ({note.says})' if note.says else ''}", soft_wrap=True,
                      markup=False, highlight=False)  # fmt: skip
    for line in proof.broker:
        console.print(
            f"{line['topic']}[{line['partition']}]: read from {line['read_from']} to "
            f"{line['position']}; the broker has {line['earliest']} to {line['latest']}, "
            f"{line['lag']} to come"
            + (f", {line['never_read']} before the beginning" if line["never_read"] else ""),
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    for finding in proof.findings:
        console.print(str(finding), soft_wrap=True, markup=False)
    if proof.absent:
        console.print(f"not written to yet: {', '.join(proof.absent)}", soft_wrap=True)


def audit_table(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['table']}: sink {report['sink']}")
    fates = ["written", "rejected", "skipped", "invisible"]
    fates += [
        fate
        for fate in ("merged", "elsewhere", "lost")
        if any(line[fate] for line in report["partitions"])
    ]
    for name in ("partition", "range", *fates, "gaps", "overlaps"):
        table.add_column(name, justify="left" if name in ("partition", "range") else "right")
    for line in report["partitions"]:
        table.add_row(
            f"{line['topic']}[{line['partition']}]",
            f"[{line['start']:,}, {line['end']:,})".replace("[", "\\[", 1),
            *(f"{line[fate]:,}" for fate in fates),
            _spans(line["gaps"]),
            _spans(line["overlaps"]),
        )
    for finding in report["findings"]:
        table.caption = f"{table.caption}\n{finding}" if table.caption else finding
    return table


def _spans(spans: list[list[int]]) -> str:
    return ", ".join(f"\\[{start}, {end})" for start, end in spans) or "0"


def values(proof: Proof) -> list[dict[str, object]]:
    """For `--json`: a list of reports, the broker's at the end."""
    found = [report.values() for report in proof.reports]
    if proof.broker or proof.findings:
        said = worst(proof.findings)
        found.append({"broker": proof.broker, "verdict": said,
                      "findings": list(map(str, proof.findings))})  # fmt: skip
    return found
