"""What `frazil audit` does: every table of a sink, or every sink of a table.

The evidence is gathered here, from metadata files and the index's rows; `auditing.checks` judges
it. A proof speaks of what was committed. What waits in Kafka is asked of the broker (`of_config`),
so that nobody takes the proof of a sink that stands still for the proof of its topics.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from frazil.auditing.checks import Evidence, Finding, TableReport, audit, worst
from frazil.config.model import Config, replayed
from frazil.errors import ConfigError, Fatal, Unavailable
from frazil.iceberg import foreign_commits
from frazil.iceberg.static_table import DataFile, ReadOnlyTable
from frazil.ledger import index_rows
from frazil.ledger.entry import PREFIX, Snapshot, head, parse
from frazil.ledger.index_rows import IndexRows
from frazil.ledger.sink_state import REPLAY, STREAM, known_tables
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.render import TextTable, colour, counted
from frazil.spark.open_table import Open

_PROVES = {
    "records": "every record is accounted for",
    "batches": "every range of the source was processed in exactly one committed batch; rows are "
    "not told apart by record",
    "changes": "every record was applied by exactly one committed batch; which of their rows later "
    "ones replaced is not told apart",
}
_NOTHING = "nothing committed"
#: Of more reports than this, only those that are not proven are shown partition by partition.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class AuditResult:
    reports: list[TableReport]
    #: tables of the config that nobody has made or written to yet
    absent: tuple[str, ...] = ()
    #: what Kafka itself says, where it was asked
    broker: list[dict[str, object]] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()
    #: offsets that wait in Kafka; None where Kafka was not asked
    lag: int | None = None
    #: when the sink's last batch was committed, in milliseconds; None where no snapshot tells
    committed_ms: int | None = None

    @property
    def verdict(self) -> str:
        found = [each for report in self.reports for each in report.found]
        return worst((*found, *self.findings))


class ReadOnlyIndex:
    """One sink's part of the offset index: read once, for all of its tables, and meanwhile."""

    def __init__(self, table: ReadOnlyTable, sink: str) -> None:
        self.table = table
        self.sink = sink
        entry = head(table.history("main"), sink, table.tagged(f"frazil/{sink}")).entry
        self.claimed = entry is not None
        self.position = entry.end if entry else Cut()
        self.tables = known_tables(table, sink)
        beside = ThreadPoolExecutor(1)
        self._reading = beside.submit(self._read)
        beside.shutdown(wait=False)

    def _read(self) -> dict[str, IndexRows]:
        where = {"sink": [self.sink]}
        return index_rows.by_table(
            self.table.each(index_rows.of_file, self.table.having(index_rows.COLUMNS), where)
        )

    @property
    def _told(self) -> dict[str, IndexRows]:
        return self._reading.result()

    @property
    def stream(self) -> IndexRows:
        return self.rows_of(STREAM)

    def rows_of(self, table: str) -> IndexRows:
        return self._told.get(table, index_rows.NOTHING)

    def chain(self) -> IndexRows:
        """Rows that tell of all records: those of the stream; where it has none, as there was one
        table only, the table's own. Their snapshots are not the index's."""
        others = [each for name, each in self._told.items() if name != STREAM]
        if len(self.stream):
            others = [index_rows.outside(each, self.stream) for each in others]
            others = [self.stream, *(each for each in others if len(each))]
        found = index_rows.one(others)
        return replace(found, snapshots=np.zeros_like(found.snapshots))

    def report(self) -> TableReport:
        """Of the stream as a whole: do the index's rows join, and does its own ledger agree?"""
        evidence = Evidence(
            self.table.name,
            list(self.table.history("main")),
            _witnesses(self.table, "main"),
            index={self.sink: self.chain()},
        )
        found = _judged(evidence, self.sink)
        return found[0] if found else TableReport(self.table.name, self.sink, (), 0)


class _ReadAhead(Mapping[str, IndexRows]):
    """Sink → what its index tells of a table; waits for it when it is asked."""

    def __init__(self, indexes: Iterable[ReadOnlyIndex], table: str) -> None:
        self._indexes = {each.sink: each for each in indexes}
        self._table = table

    def __getitem__(self, sink: str) -> IndexRows:
        return self._indexes[sink].rows_of(self._table)

    def __iter__(self) -> Iterator[str]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._indexes)


def of_table(opened: Open, name: str, branch: str, deep: bool = False) -> AuditResult:
    """One report for each sink that wrote to the table; its index is named in its ledger."""
    table = opened(name)
    if table is None:
        raise ConfigError(f"cannot audit table {name}: it does not exist")
    indexes: dict[str, ReadOnlyIndex] = {}
    history = list(table.history(branch))
    for snapshot in (*history, *table.tags().values()):  # of what was expired, witnesses are left
        sink = snapshot.summary.get(PREFIX + "sink", "")
        said = snapshot.summary.get(PREFIX + "index", "")
        if said and sink not in indexes and (index := opened(said)) is not None:
            indexes[sink] = ReadOnlyIndex(index, sink)
    reports = _reports(table, branch, history, indexes.values(), deep)
    if not reports:
        raise ConfigError(f"cannot audit table {name}: no snapshot of it was written by Frazil")
    return AuditResult(_started([*reports, *_streams(indexes.values())]))


def of_sink(config: Config, opened: Open, deep: bool = False) -> AuditResult:
    """Every table the sink fills: those of the config, those made by names from the data, the dead
    letters, and the notes of their replays. The sink that replays has reports of its own."""
    index = opened(config.index_table)
    sinks = (config.sink.id, config.sink.id + REPLAY)
    indexes = [] if index is None else [ReadOnlyIndex(index, sink) for sink in sinks]
    known = [name for each in indexes for name in each.tables]
    named = [table.name for table in config.tables if "{" not in table.name]
    if config.dead_letters:
        named += [config.dead_letters.table, replayed(config.dead_letters.table)]
    found: list[TableReport] = []
    absent = {}
    for name in dict.fromkeys([*named, *sorted(known)]):
        table = opened(name)
        reports = None
        if table is not None:
            branch = _branch(config, name)
            reports = _reports(table, branch, list(table.history(branch)), indexes, deep)
        if reports is None and name in known:
            gone = Finding("gap", "the table is gone; the index says that it was there")
            reports = [TableReport(name, config.sink.id, (), 0, (gone,))]
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
    if not found and index is not None and indexes[0].claimed:
        found = [TableReport(index.name, config.sink.id, (), 0, witnesses=("ledger", "index"))]
    for name, why in absent.items() if not found else ():
        raise ConfigError(f"cannot audit table {name}: {why}")
    return AuditResult(_started(found), tuple(absent))


def _started(reports: Sequence[TableReport]) -> list[TableReport]:
    """A sink that claimed its tables and never committed a batch has nothing to prove. That is no
    proof of its topics: every report of it says so."""
    moved = {
        each.sink
        for each in reports
        if each.found or any(line.range.end > line.range.start for line in each.lines)
    }
    return [
        each
        if each.sink in moved or each.sink.endswith(REPLAY)
        else replace(each, found=(_nothing(each),))
        for each in reports
    ]


def _nothing(report: TableReport) -> Finding:
    return Finding(
        _NOTHING,
        f"sink {report.sink} never committed a batch here; whether records wait in Kafka is not "
        "known (see frazil status CONFIG)",
    )


def _streams(indexes: Iterable[ReadOnlyIndex]) -> list[TableReport]:
    reports = [each.report() for each in indexes]
    return [report for report in reports if report.commits or report.found or report.lines]


def _reports(
    table: ReadOnlyTable,
    branch: str,
    history: Sequence[Snapshot],
    indexes: Iterable[ReadOnlyIndex],
    deep: bool,
) -> list[TableReport]:
    files, deletes = table.files(branch)
    witnesses = _witnesses(table, branch)
    evidence = Evidence(
        table.name,
        history,
        witnesses,
        _behind(table, history, witnesses),
        files,
        deletes,
        lambda snapshot_id: _brought(table, snapshot_id),
        tuple(foreign_commits.recorded(table.name, table.properties).values()),
        index=_ReadAhead(indexes, table.name),
        stream=_ReadAhead(indexes, STREAM),
        positions={each.sink: each.position for each in indexes},
        # Rows that equality deletes hide can be read by engines only; the files' footers by us.
        deep=table.origins(branch) if deep and not table.has_equality_deletes(branch) else None,
        misdescribed=list(table.misdescribed(branch)) if deep else None,
    )
    return _judged(evidence)


def _judged(evidence: Evidence, sink: str = "") -> list[TableReport]:
    """The one door to the audit: what is no entry of a ledger, or no row of an index, is said."""
    try:
        return audit(evidence, sink)
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, pa.ArrowException) as error:
        raise Fatal(
            f"cannot audit table {evidence.table}: an entry of its ledger, or a row of its index, "
            f"cannot be read: {type(error).__name__}: {error}",
            hint="it was altered by hand, or damaged; frazil index rebuild CONFIG writes the index "
            "anew, and rollback_to_snapshot leaves a damaged snapshot of a table",
        ) from None


def _behind(
    table: ReadOnlyTable, history: Sequence[Snapshot], witnesses: Mapping[str, Snapshot]
) -> dict[str, bool]:
    """Sink → whether earlier metadata files show its witness among the expired ancestors."""
    oldest = history[-1] if history else None
    if oldest is None or oldest.parent is None:
        return {}
    near = {*(each.id for each in history), oldest.parent}
    sought = {
        sink: each
        for sink, each in witnesses.items()
        if each.id not in near and each.sequence < oldest.sequence
    }
    found: dict[str, bool] = {}
    for snapshot in table.expired(oldest.parent) if sought else ():
        for sink, each in sought.items():
            # Numbers fall on the way back: below the witness's own it will not come any more.
            if snapshot.id == each.id or snapshot.sequence < each.sequence or not snapshot.parent:
                found.setdefault(sink, snapshot.id == each.id)
        if len(found) == len(sought):
            break
    return found


def _brought(table: ReadOnlyTable, snapshot_id: int) -> list[DataFile] | None:
    """None where the snapshot's own files are gone or broken: readers of today's need them not."""
    try:
        return table.added(snapshot_id)
    except Fatal:
        return None


def _witnesses(table: ReadOnlyTable, branch: str) -> dict[str, Snapshot]:
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


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """How far a sink may be behind; None: as far as it is."""

    lag: int | None = None
    #: seconds since its last commit, while records wait
    age: float | None = None

    def __bool__(self) -> bool:
        return self.lag is not None or self.age is not None


def of_config(
    config: Config,
    opened: Open,
    *,
    deep: bool = False,
    ask: bool | None = None,
    limits: AuditLimits = AuditLimits(),  # noqa: B008
    say: Callable[[str], None] = print,
) -> AuditResult:
    """The proof of a sink, and what waits for it in Kafka.

    `ask`: Kafka must answer, or is not asked; None: it is asked, and a broker that does not answer
    is said and changes no verdict. Not knowing the lag is a finding where a limit was set for it.
    """
    proof = of_sink(config, opened, deep)
    why = "Kafka was not asked"
    if ask is not False:
        try:
            proof = against_kafka(config, opened, proof)
        except (Unavailable, ConfigError) as error:
            if ask:
                raise
            why = error.message
            say(f"what waits in Kafka is not known: {why}")
    return _within(limits, proof, why)


def against_kafka(config: Config, opened: Open, proof: AuditResult) -> AuditResult:
    """What the broker has, beside what was read: what is still to come, and what never will."""
    from frazil.kafka.planner import Planner, TopicIdentity, kafka_only

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
    ledger = TopicIdentity.of(entry) if entry else TopicIdentity()
    planner = Planner(
        config.kafka.resolved(),
        topics=config.sink.topics,
        pattern=config.sink.topic_pattern,
        origin=ledger,
        trusting=True,
    )
    found, lines = [], []
    origin, partitions = planner.origin()
    for topic, known in (entry.topics if entry else {}).items():
        if ledger.differs(origin, topic):
            found.append(
                Finding(
                    "unaccounted",
                    f"topic {topic} was dropped and made again; "
                    f"expected id {known}, found {origin.topics[topic]}",
                )
            )
    if entry and entry.cluster and entry.cluster != origin.cluster:
        found.append(
            Finding(
                "unaccounted",
                f"another cluster answers; expected {entry.cluster}, found {origin.cluster}",
            )
        )
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
            found.append(
                Finding(
                    "unaccounted",
                    f"{partition} ends at {end}; it was read up to {here}: it was truncated",
                )
            )
        lines.append(
            {
                "topic": partition.topic,
                "partition": partition.number,
                "earliest": low,
                "latest": end,
                "read_from": began.get(partition),
                "position": here,
                "lag": max(0, end - max(low, here or 0)),
                "never_read": max(0, min(end, began.get(partition, low)) - low),
            }
        )
    for lost in planner.replaced(kafka_only(position), marks):
        found.append(
            Finding(
                "unaccounted",
                f"{lost} were read and are no longer in the topic, "
                "which lost its tail and grew again",
                (lost,),
            )
        )
    lag = sum(int(line["lag"]) for line in lines)
    reports = [_waited(report, lag) for report in proof.reports]
    return replace(
        proof,
        reports=reports,
        broker=lines,
        findings=tuple(found),
        lag=lag,
        committed_ms=_last_commit(index, config.sink.id),
    )


def _waited(report: TableReport, lag: int) -> TableReport:
    """Where nothing was committed: because nothing is there, or though something waits?"""
    if report.verdict != _NOTHING:
        return report
    if not lag:
        return replace(report, found=())
    says = f"sink {report.sink} never committed a batch, and {lag:,} offsets wait in Kafka"
    return replace(report, found=(Finding(_NOTHING, says),))


def _last_commit(index: ReadOnlyTable | None, sink: str) -> int | None:
    """When the position moved last. A claim is none: a sink that dies at each start makes many."""
    for snapshot in index.history("main") if index is not None else ():
        if snapshot.summary.get(PREFIX + "sink") == sink:
            entry = parse(snapshot.summary)
            if entry is not None and entry.ranges:
                return snapshot.timestamp_ms
    return None


def _within(limits: AuditLimits, proof: AuditResult, why: str) -> AuditResult:
    """What is further behind than it may be, or cannot be told to be within the limits."""
    found: list[Finding] = []
    if limits and proof.lag is None:
        found.append(Finding("cannot tell", f"how far the sink is behind: {why}"))
    elif proof.lag and limits.lag is not None and proof.lag > limits.lag:
        found.append(
            Finding(
                "behind", f"{proof.lag:,} offsets wait in Kafka; expected at most {limits.lag:,}"
            )
        )
    if proof.lag and limits.age is not None:
        at = proof.committed_ms
        age = None if at is None else time.time() - at / 1000
        if age is None or age > limits.age:
            told = (
                "no snapshot that is left tells of any" if age is None else f"was {age:,.0f} s ago"
            )
            says = f"{proof.lag:,} offsets wait in Kafka, and the last commit {told}"
            found.append(Finding("behind", f"{says}; expected within {limits.age:,.0f} s"))
    return replace(proof, findings=(*proof.findings, *found))


def show(proof: AuditResult, console: Console) -> None:
    tables = [report for report in proof.reports if "manifests" in report.witnesses]
    for report in proof.reports:
        few = report in tables and len(tables) <= _SHOWN
        if few or report.verdict != "proven":
            console.print(audit_table(report.values()))
    for report in proof.reports:
        console.print(
            ("" if len(proof.reports) == 1 else f"{report.table}, sink {report.sink}: ")
            + f"[{colour(report.verdict)}]{report.verdict}[/]: {counted(report.written, 'row')} in "
            f"{counted(report.commits, 'commit')}; "
            f"{_PROVES[report.proves]} ({', '.join(report.witnesses)})",
            soft_wrap=True,
        )
    for note in dict.fromkeys(note for report in proof.reports for note in report.notes):
        console.print(
            f"{note}{f' ({note.says})' if note.says else ''}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    for said in beginnings(proof):
        console.print(said, soft_wrap=True, markup=False, highlight=False)
    for line in proof.broker:
        console.print(
            f"{line['topic']}[{line['partition']}]: read from {line['read_from']} to "
            f"{line['position']}; the broker has {line['earliest']} to {line['latest']}, "
            f"{line['lag']} to come"
            + (f", {line['never_read']} before the beginning" if line["never_read"] else ""),
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    if proof.lag is not None:
        console.print(_standing(proof), soft_wrap=True, markup=False, highlight=False)
    for finding in proof.findings:
        console.print(str(finding), soft_wrap=True, markup=False)
    if proof.absent:
        console.print(f"not written to yet: {', '.join(proof.absent)}", soft_wrap=True)


def beginnings(proof: AuditResult) -> list[str]:
    """Partitions whose first offsets are not part of the proof: a late start, or records that were
    deleted before the sink first saw the topic."""
    began: dict[tuple[str, Partition], int] = {}
    for report in proof.reports:
        for line in report.lines:
            whose = (report.sink, line.range.partition)
            began[whose] = min(line.range.start, began.get(whose, line.range.start))
    late = [(p, start) for (_, p), start in sorted(began.items()) if start and p != BATCHES]
    said = [
        f"{p} begins at offset {start:,}: what lay before is not part of this proof"
        for p, start in late[:_SHOWN]
    ]
    return said + [f"and {len(late) - _SHOWN} partitions more"] * (len(late) > _SHOWN)


def _standing(proof: AuditResult) -> str:
    if not proof.lag:
        return "nothing waits in Kafka"
    at = proof.committed_ms
    moment = (
        ""
        if at is None
        else datetime.fromtimestamp(at / 1000, timezone.utc).isoformat(timespec="seconds")
    )
    last = f"the last commit was at {moment}" if moment else "no commit of the sink is known"
    return f"{proof.lag:,} offsets wait in Kafka and are not part of this proof; {last}"


def audit_table(report: dict[str, Any]) -> TextTable:
    table = TextTable(title=f"{report['table']}: sink {report['sink']}")
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


def values(proof: AuditResult) -> list[dict[str, object]]:
    """For `--json`: a list of reports, the broker's at the end."""
    found = [report.values() for report in proof.reports]
    if proof.lag is not None or proof.findings:
        found.append(
            {
                "broker": proof.broker,
                "lag": proof.lag,
                "last_commit_ms": proof.committed_ms,
                "verdict": worst(proof.findings),
                "findings": list(map(str, proof.findings)),
            }
        )
    return found
