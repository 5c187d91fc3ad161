"""`frazil audit`: every table of a sink, or every sink of a table.

This module gathers the evidence from metadata files and the rows of the index; `auditing.checks`
judges it. A proof covers committed offsets only. `of_config` asks the broker for the lag, so that
the proof of a stopped sink is not mistaken for a proof of its topics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from rich.table import Table
from rich.text import Text

from frazil.auditing.checks import audit
from frazil.auditing.history import Evidence
from frazil.auditing.report import Finding, TableReport, worst
from frazil.config.model import Config
from frazil.config.sections import replayed
from frazil.errors import ConfigError, Fatal, NotProven, Unavailable, counted
from frazil.iceberg import foreign_commits
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger import index_rows
from frazil.ledger.entry import PREFIX, parse
from frazil.ledger.index_rows import IndexRows
from frazil.ledger.sink_state import REPLAY, STREAM, index_entry, known_tables
from frazil.ledger.tags import ledger_tag
from frazil.offsets import BATCHES, Cut, Partition
from frazil.render import Line, colour, json_values, label, text_table
from frazil.spark.open_table import Open

_PROVES = {
    "records": "every record is accounted for",
    "batches": "every range of the source was processed in exactly one committed batch; rows are "
    "not distinguished by record",
    "changes": "every record was applied by exactly one committed batch; which of their rows later "
    "ones replaced is not distinguished",
}
_NOTHING = "nothing_committed"
#: With more reports than this, only those not proven are shown partition by partition.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class AuditResult:
    JSON: ClassVar = "=with_broker"

    reports: list[TableReport]
    #: tables of the config that do not exist, or that the sink has not written to yet
    absent: tuple[str, ...] = ()
    #: offsets and lag per partition as Kafka reports them; empty where Kafka was not asked
    broker: list[dict[str, object]] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()
    #: offsets in Kafka not yet committed; None where Kafka was not asked
    lag: int | None = None
    #: when the sink's last batch was committed, in milliseconds; None where no snapshot shows it
    committed_ms: int | None = None

    @property
    def verdict(self) -> str:
        findings = [finding for report in self.reports for finding in report.findings]
        return worst((*findings, *self.findings))

    @property
    def proven(self) -> bool:
        """Every offset is accounted for; a loss that an operator accepted is one of them."""
        return self.verdict in ("proven", "accepted_loss")

    @property
    def exit_code(self) -> int:
        return 0 if self.proven else 3

    @property
    def with_broker(self) -> list[TableReport | dict[str, object]]:
        """The reports, and behind them that on the broker, if it was asked."""
        if self.lag is None and not self.findings:
            return [*self.reports]
        broker: dict[str, object] = {
            "broker": self.broker,
            "lag": self.lag,
            "last_commit_at": _moment(self.committed_ms),
            "verdict": worst(self.findings),
            "findings": self.findings,
        }
        return [*self.reports, broker]

    def raise_unless_proven(self) -> None:
        if not self.proven:
            findings = [(report.table, one) for report in self.reports for one in report.findings]
            findings += [("", one) for one in self.findings]
            facts = [f"{table}: {one}" if table else str(one) for table, one in findings]
            more = f"; and {len(facts) - 3} more" if len(facts) > 3 else ""
            raise NotProven(
                f"cannot prove the stream: {label(self.verdict)}: {'; '.join(facts[:3])}{more}",
                hint="frazil audit CONFIG shows every finding with its ranges",
            )

    def lines(self) -> Iterator[Line]:
        tables = [report for report in self.reports if "manifests" in report.examined]
        for report in self.reports:
            few = report in tables and len(tables) <= _SHOWN
            if few or report.verdict != "proven":
                yield audit_table(json_values(report))
        for report in self.reports:
            lead = "" if len(self.reports) == 1 else f"{report.table}, sink {report.sink}: "
            facts = (
                f"{counted(report.written, 'row')} in {counted(report.commits, 'commit')}; "
                f"{_PROVES[report.proves]} ({', '.join(report.examined)})"
            )
            if any(finding.kind == _NOTHING for finding in report.findings):
                facts = "no offset to account for"
            yield Text.from_markup(
                f"{lead}[{colour(report.verdict)}]{label(report.verdict)}[/]: {facts}"
            )
        for note in dict.fromkeys(note for report in self.reports for note in report.notes):
            yield f"{note}{f' ({note.result})' if note.result else ''}"
        yield from beginnings(self)
        for line in self.broker:
            yield (
                f"{line['topic']}[{line['partition']}]: "
                + (
                    "not read yet"
                    if line["read_from"] is None
                    else f"read from {line['read_from']} to {line['position']}"
                )
                + f"; the broker has {line['earliest_offset']} to "
                f"{line['latest_offset']}; lag {line['lag']}"
                + (
                    f"; {line['never_read']} offsets before the sink's first"
                    if line["never_read"]
                    else ""
                )
            )
        if self.lag is not None:
            yield _lag(self)
        yield from map(str, self.findings)
        if self.absent:
            yield f"not written to yet: {', '.join(self.absent)}"


class ReadOnlyIndex:
    """One sink's part of the offset index: read once for all tables, on a background thread."""

    def __init__(self, table: ReadOnlyTable, sink: str) -> None:
        self.table = table
        self.sink = sink
        entry = index_entry(table, sink)
        self.claimed = entry is not None
        self.position = entry.end if entry else Cut()
        self.tables = known_tables(table, sink)
        beside = ThreadPoolExecutor(1)
        self._reading = beside.submit(self._read)
        beside.shutdown(wait=False)

    def _read(self) -> dict[str, IndexRows]:
        where = {"sink": [self.sink]}
        return index_rows.by_table(
            self.table.map_files(index_rows.of_file, self.table.having(index_rows.COLUMNS), where)
        )

    @property
    def _rows(self) -> dict[str, IndexRows]:
        return self._reading.result()

    @property
    def stream(self) -> IndexRows:
        return self.rows_of(STREAM)

    def rows_of(self, table: str) -> IndexRows:
        return self._rows.get(table, index_rows.NOTHING)

    def chain(self) -> IndexRows:
        """Rows that cover all records: the stream's, and the table's own where the stream has none
        because there was only one table. Snapshot ids are cleared: they are not the index's."""
        others = [rows for name, rows in self._rows.items() if name != STREAM]
        if len(self.stream):
            others = [index_rows.outside(rows, self.stream) for rows in others]
            others = [self.stream, *(rows for rows in others if len(rows))]
        chain = index_rows.one(others)
        return replace(chain, snapshots=np.zeros_like(chain.snapshots))

    def report(self) -> TableReport:
        """The report on the whole stream: do the index rows join and agree with its ledger?"""
        evidence = Evidence(
            self.table.name,
            list(self.table.history("main")),
            _tagged_snapshots(self.table, "main"),
            index={self.sink: self.chain()},
        )
        reports = _audit(evidence, self.sink)
        return reports[0] if reports else TableReport(self.table.name, self.sink, (), 0)


class _ReadAhead(Mapping[str, IndexRows]):
    """Sink → its index rows of a table; blocks on access until the index is read."""

    def __init__(self, indexes: Iterable[ReadOnlyIndex], table: str) -> None:
        self._indexes = {index.sink: index for index in indexes}
        self._table = table

    def __getitem__(self, sink: str) -> IndexRows:
        return self._indexes[sink].rows_of(self._table)

    def __iter__(self) -> Iterator[str]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._indexes)


def of_table(opened: Open, name: str, branch: str, deep: bool = False) -> AuditResult:
    """One report per sink that wrote to the table; each ledger names the sink's index."""
    table = opened(name)
    if table is None:
        raise ConfigError(f"cannot audit table {name}: it does not exist")
    indexes: dict[str, ReadOnlyIndex] = {}
    history = list(table.history(branch))
    for snapshot in (*history, *table.tags().values()):  # tags outlive expired snapshots
        sink = snapshot.summary.get(PREFIX + "sink", "")
        index_name = snapshot.summary.get(PREFIX + "index", "")
        if index_name and sink not in indexes and (index := opened(index_name)) is not None:
            indexes[sink] = ReadOnlyIndex(index, sink)
    reports = _reports(table, branch, history, indexes.values(), deep)
    if not reports:
        raise ConfigError(f"cannot audit table {name}: no snapshot of it was written by Frazil")
    return AuditResult(_started([*reports, *_streams(indexes.values())]))


def of_sink(config: Config, opened: Open, deep: bool = False) -> AuditResult:
    """Reports on every table of the sink: those of the config, those named by the data, the dead
    letters and the table of their replays. The sink that replays has its own reports."""
    index = opened(config.index_table)
    sinks = (config.sink.id, config.sink.id + REPLAY)
    indexes = [] if index is None else [ReadOnlyIndex(index, sink) for sink in sinks]
    known = [name for sink_index in indexes for name in sink_index.tables]
    named = [table.name for table in config.tables if "{" not in table.name]
    if config.dead_letters:
        named += [config.dead_letters.table, replayed(config.dead_letters.table)]
    result: list[TableReport] = []
    absent: list[str] = []
    for name in dict.fromkeys([*named, *sorted(known)]):
        table = opened(name)
        reports = None
        if table is not None:
            branch = config.branch(name)
            reports = _reports(table, branch, list(table.history(branch)), indexes, deep)
        if reports is None and name in known:
            gone = Finding("gap", "the table does not exist; the index has rows of it")
            reports = [TableReport(name, config.sink.id, (), 0, (gone,))]
        own = [
            report
            for report in reports or ()
            if report.sink == config.sink.id
            # A replay claims every table, and writes to few of them.
            or (report.sink in sinks and (report.commits or report.verdict != "proven"))
        ]
        if not own and name in named:
            absent.append(name)
        result += own
    result += _streams(indexes)
    if not result:  # it has claimed its tables, or was never started
        claimed = index is not None and indexes[0].claimed
        examined = ("ledger", "index") if claimed else ()
        result = [TableReport(config.index_table, config.sink.id, (), 0, examined=examined)]
    return AuditResult(_started(result), tuple(absent))


def _started(reports: Sequence[TableReport]) -> list[TableReport]:
    """Add a finding to the reports of a sink that claimed its tables and never committed a batch:
    nothing to prove is no proof of its topics."""
    moved = {
        report.sink
        for report in reports
        if report.findings or any(line.range.end > line.range.start for line in report.partitions)
    }
    return [
        report
        if report.sink in moved or report.sink.endswith(REPLAY)
        else replace(report, findings=(_nothing(report),))
        for report in reports
    ]


def _nothing(report: TableReport) -> Finding:
    return Finding(
        _NOTHING,
        f"sink {report.sink} never committed a batch here; whether records wait in Kafka is not "
        "known (see frazil status CONFIG)",
    )


def _streams(indexes: Iterable[ReadOnlyIndex]) -> list[TableReport]:
    reports = [index.report() for index in indexes]
    return [report for report in reports if report.commits or report.findings or report.partitions]


def _reports(
    table: ReadOnlyTable,
    branch: str,
    history: Sequence[Snapshot],
    indexes: Iterable[ReadOnlyIndex],
    deep: bool,
) -> list[TableReport]:
    files, deletes = table.files(branch)
    tagged_snapshots = _tagged_snapshots(table, branch)
    evidence = Evidence(
        table.name,
        history,
        tagged_snapshots,
        _behind(table, history, tagged_snapshots),
        files,
        deletes,
        lambda snapshot_id: _brought(table, snapshot_id),
        tuple(foreign_commits.recorded(table.name, table.properties).values()),
        index=_ReadAhead(indexes, table.name),
        stream=_ReadAhead(indexes, STREAM),
        positions={index.sink: index.position for index in indexes},
        # Only engines apply equality deletes to rows; footers are readable in any case.
        deep=table.origins(branch) if deep and not table.has_equality_deletes(branch) else None,
        misdescribed=list(table.misdescribed(branch)) if deep else None,
    )
    return _audit(evidence)


def _audit(evidence: Evidence, sink: str = "") -> list[TableReport]:
    """Run the audit; an unreadable ledger entry or index row raises Fatal."""
    try:
        return audit(evidence, sink)
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, pa.ArrowException) as error:
        raise Fatal(
            f"cannot audit table {evidence.table}: an entry of its ledger, or a row of its index, "
            f"cannot be read: {type(error).__name__}: {error}",
            hint="it was altered by hand, or damaged; frazil index rebuild CONFIG writes the "
            "index again, and rollback_to_snapshot leaves a damaged snapshot of a table",
        ) from None


def _behind(
    table: ReadOnlyTable, history: Sequence[Snapshot], tagged_snapshots: Mapping[str, Snapshot]
) -> dict[str, bool]:
    """Sink → do earlier metadata files show its tagged snapshot among the expired ancestors?"""
    oldest = history[-1] if history else None
    if oldest is None or oldest.parent is None:
        return {}
    near = {*(snapshot.id for snapshot in history), oldest.parent}
    sought = {
        sink: tagged
        for sink, tagged in tagged_snapshots.items()
        if tagged.id not in near and tagged.sequence < oldest.sequence
    }
    behind: dict[str, bool] = {}
    for snapshot in table.expired(oldest.parent) if sought else ():
        for sink, tagged in sought.items():
            # Sequence numbers fall towards the root: below the tag's it cannot follow any more.
            if (
                snapshot.id == tagged.id
                or snapshot.sequence < tagged.sequence
                or not snapshot.parent
            ):
                behind.setdefault(sink, snapshot.id == tagged.id)
        if len(behind) == len(sought):
            break
    return behind


def _brought(table: ReadOnlyTable, snapshot_id: int) -> list[DataFile] | None:
    """None where the manifests of the snapshot are gone or broken: readers do not need them."""
    try:
        return table.added(snapshot_id)
    except Fatal:
        return None


def _tagged_snapshots(table: ReadOnlyTable, branch: str) -> dict[str, Snapshot]:
    snapshots = {}
    for tag, snapshot in table.tags().items():
        sink = snapshot.summary.get(PREFIX + "sink")
        if sink and tag == ledger_tag(sink, branch):
            snapshots[sink] = snapshot
    return snapshots


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """How far a sink may be behind; None: no limit."""

    lag: int | None = None
    #: seconds since the last commit, while there is lag
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
    """The proof of a sink, and its lag in Kafka.

    `ask`: True: Kafka must answer; False: it is not asked; None: it is asked, and a missing answer
    is printed and changes no verdict. An unknown lag is a finding where `limits` are set.
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
    """Add the broker's offsets to the proof: the lag, and offsets that can never be read."""
    from frazil.auditing import broker

    index = opened(config.index_table)
    entry = None
    if index is not None:
        sink = config.sink.id
        entry = index_entry(index, sink)
    began = {
        line.range.partition: line.range.start
        for report in proof.reports
        if report.sink == config.sink.id and index is not None and report.table == index.name
        for line in report.partitions
    }
    offsets = broker.compare(config, entry, began)
    return replace(
        proof,
        reports=[_waited(report, offsets.lag) for report in proof.reports],
        broker=offsets.lines,
        findings=offsets.findings,
        lag=offsets.lag,
        committed_ms=_last_commit(index, config.sink.id),
    )


def _waited(report: TableReport, lag: int) -> TableReport:
    """A report without commits: is there nothing to read, or is there lag?"""
    if report.verdict != _NOTHING:
        return report
    if not lag:
        return replace(report, findings=())
    says = f"sink {report.sink} never committed a batch, and {lag:,} offsets wait in Kafka"
    return replace(report, findings=(Finding(_NOTHING, says),))


def _last_commit(index: ReadOnlyTable | None, sink: str) -> int | None:
    """When the position last moved. A claim does not count: a sink that crashes on every start
    makes many."""
    for snapshot in index.history("main") if index is not None else ():
        if snapshot.summary.get(PREFIX + "sink") == sink:
            entry = parse(snapshot.summary)
            if entry is not None and entry.ranges:
                return snapshot.timestamp_ms
    return None


def _within(limits: AuditLimits, proof: AuditResult, why: str) -> AuditResult:
    """Add a finding where the sink is further behind than `limits`, or its lag is unknown."""
    findings: list[Finding] = []
    if limits and proof.lag is None:
        findings.append(Finding("cannot_tell", f"how far the sink is behind: {why}"))
    elif proof.lag and limits.lag is not None and proof.lag > limits.lag:
        findings.append(
            Finding(
                "behind", f"{proof.lag:,} offsets wait in Kafka; expected at most {limits.lag:,}"
            )
        )
    if proof.lag and limits.age is not None:
        at = proof.committed_ms
        age = None if at is None else time.time() - at / 1000
        if age is None or age > limits.age:
            last = (
                "is older than the snapshots that are left"
                if age is None
                else f"was {age:,.0f} s ago"
            )
            says = f"{proof.lag:,} offsets wait in Kafka, and the last commit {last}"
            findings.append(Finding("behind", f"{says}; expected within {limits.age:,.0f} s"))
    return replace(proof, findings=(*proof.findings, *findings))


def beginnings(proof: AuditResult) -> list[str]:
    """Partitions whose first offsets are not part of the proof: the sink started later, or records
    were deleted before it first read the topic."""
    began: dict[tuple[str, Partition], int] = {}
    for report in proof.reports:
        for line in report.partitions:
            key = (report.sink, line.range.partition)
            began[key] = min(line.range.start, began.get(key, line.range.start))
    late = [(p, start) for (_, p), start in sorted(began.items()) if start and p != BATCHES]
    lines = [
        f"{p} begins at offset {start:,}: earlier offsets are not part of this proof"
        for p, start in late[:_SHOWN]
    ]
    return lines + [f"and {len(late) - _SHOWN} partitions more"] * (len(late) > _SHOWN)


def _moment(ms: int | None) -> str | None:
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="seconds")


def _lag(proof: AuditResult) -> str:
    if not proof.lag:
        return "nothing waits in Kafka"
    moment = _moment(proof.committed_ms)
    last = f"the last commit was at {moment}" if moment else "no commit of the sink was found"
    return f"{proof.lag:,} offsets wait in Kafka and are not part of this proof; {last}"


def audit_table(report: dict[str, Any]) -> Table:
    """The table of a report's partitions; `report` is its JSON, which also a process prints."""
    outcomes = ["written", "rejected", "skipped", "invisible"]
    outcomes += [
        outcome
        for outcome in ("merged", "elsewhere", "lost")
        if any(line[outcome] for line in report["partitions"])
    ]
    numbers = (*outcomes, "gaps", "overlaps")
    table = text_table(
        f"{report['table']}: sink {report['sink']}",
        ("partition", "range", *numbers),
        (
            (
                f"{line['topic']}[{line['partition']}]",
                f"[{line['start']:,}, {line['end']:,})",
                *(f"{line[outcome]:,}" for outcome in outcomes),
                *(_spans(line[kind]) for kind in ("gaps", "overlaps")),
            )
            for line in report["partitions"]
        ),
        right=numbers,
    )
    if report["findings"]:
        table.caption = "\n".join(report["findings"])
    return table


def _spans(spans: list[list[int]]) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in spans) or "0"
