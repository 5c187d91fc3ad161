"""Proves from metadata, without reading data, that a table holds every offset exactly once.

Three sources are compared; each of them could be wrong alone:

- *the ledger*: the entries in the table's snapshots must join without gap or overlap, partition by
  partition, and each snapshot must have added the rows that its entry states;
- *the index*: its rows, one per batch and partition, must join too, and agree with the entries;
- *the manifests*: the rows of the live data files, by the files' own counts and bounds of the
  offset columns, must be the rows that the other two report as written, range by range.

Counts and bounds cannot distinguish one offset from another. Where other writers added rows in the
sink's ranges and rows were also removed, the counts may agree although the rows differ. Such a
range is `cannot_tell`, unless a sink wrote all of its files, or the rows are read. A compaction
(`replace`) is trusted to keep rows as they are, as Iceberg defines it, where counts agree.

A ledger whose older snapshots were expired proves only the part that is left; the index covers the
rest. Where two sources cannot confirm the third, the verdict is `cannot_tell`, with the reason. On
request (`deep`) the offset columns themselves are a fourth source.

The report states which of three things is proven:

- *records*: every offset of every range is written, rejected, skipped or invisible;
- *batches*, where rows stand for several records or none, or the source has no offsets: every range
  of the source was processed in exactly one committed batch, and the rows in the table are those
  the batches wrote;
- *changes*, in an upsert table: every offset was applied by exactly one committed batch, and each
  batch added the rows and deleted the keys that its entry states. Later batches and compactions
  remove rows of earlier ones, and metadata does not show which. The batches' own deletes ensure
  that the rows left are the last of their keys; no count can show it.

Offsets that retention deleted before they were read are neither present nor proven. They are an
`accepted_loss` where an operator signed for them, and a `gap` otherwise.

A sink and the sink that replays its dead letters write to the same tables. Their rows add up, and
each has its own ledger: the sink's counts records, the replay's counts batches.

This package does not import `commit`: the proof must not depend on the code that it proves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from frazil.accounting import OUTCOME_NAMES, OutcomeCounts
from frazil.auditing.history import Evidence, TableHistory
from frazil.auditing.index import IndexCheck
from frazil.auditing.ledgers import LedgerCheck, NoteCheck
from frazil.auditing.manifests import FooterCheck, ForeignRowCheck, ManifestCheck
from frazil.auditing.ranges import joints
from frazil.auditing.report import KINDS, Finding, PartitionReport, TableReport
from frazil.auditing.rows import RowCheck
from frazil.auditing.sink_check import SinkCheck
from frazil.offsets import BATCHES, Partition, Range


def audit(evidence: Evidence, sink: str = "") -> list[TableReport]:
    """One report per sink that wrote to the table (or for `sink` only)."""
    table = TableHistory(evidence)
    return [
        _report(evidence, table, name) for name in sorted(table.sinks) if not sink or name == sink
    ]


def _report(evidence: Evidence, table: TableHistory, sink: str) -> TableReport:
    manifests, notes = ManifestCheck(evidence, table, sink), NoteCheck(evidence, table, sink)
    checks: list[SinkCheck] = [LedgerCheck(evidence, table, sink)]
    if sink in table.rows:
        checks.append(IndexCheck(evidence, table, sink))
    if evidence.files is not None:
        checks += [manifests, ForeignRowCheck(evidence, table, sink)]
    if evidence.misdescribed is not None:
        checks.append(FooterCheck(evidence, table, sink))
    if evidence.deep is not None:
        checks.append(RowCheck(evidence, table, sink))
    checks.append(notes)
    for check in checks:
        check.run()
    findings = [finding for check in checks for finding in check.findings]
    heard = {
        "ledger": bool(table.sinks[sink].snapshots),
        "index": sink in table.rows,
        "manifests": evidence.files is not None,
        "footers": evidence.misdescribed is not None,
        "rows": evidence.deep is not None,
    }
    ordered = sorted(findings, key=lambda finding: KINDS.index(finding.kind))
    return TableReport(
        evidence.table,
        sink,
        tuple(_partitions(table, sink, findings, manifests.in_files)),
        _commits(table, sink),
        tuple(ordered),
        tuple(name for name, was in heard.items() if was),
        sink in table.upserts,
        tuple(notes.notes),
    )


def _partitions(
    table: TableHistory,
    sink: str,
    findings: Sequence[Finding],
    in_files: Mapping[Partition, int | None],
) -> list[PartitionReport]:
    lines = []
    for partition, part in sorted(table.whole[sink].items()):
        own = [f for f in findings if any(r.partition == partition for r in f.ranges)]
        start, end = int(part.start[0]), int(part.end.max())
        lines.append(
            PartitionReport(
                Range(partition, start, max(start, end)),
                _outcomes(table, sink, partition),
                tuple(own),
                in_files.get(partition),
            )
        )
    return lines


def _commits(table: TableHistory, sink: str) -> int:
    """The number of commits with records."""
    ledger = table.sinks[sink]
    busy = np.zeros(len(ledger.snapshots), bool)
    for part in ledger.parts.values():
        busy[part.source[part.end > part.start]] = True
    return int(busy.sum())


def _outcomes(table: TableHistory, sink: str, partition: Partition) -> OutcomeCounts:
    """The outcomes of a partition's offsets. Offsets between rows of the index held nothing for
    the table."""
    part = table.whole[sink][partition]
    sums = {outcome: int(getattr(part, outcome).sum()) for outcome in OUTCOME_NAMES}
    if partition != BATCHES and not table.sinks[sink].complete:
        holes, _ = joints(part)
        sums["elsewhere"] += sum(end - start for start, end in holes)
    return OutcomeCounts(**sums)
