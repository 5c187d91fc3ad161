"""Proves from metadata, without reading data, that a table holds every offset exactly once.

Three sources are compared; each of them could be wrong alone:

- *the ledger*: the entries in the table's snapshots must join without gap or overlap, partition by
  partition, and each snapshot must have added the rows that its entry states;
- *the index*: its rows, one per batch and partition, must join too, and agree with the entries;
- *the manifests*: the rows of the live data files, by the files' own counts and bounds of the
  offset columns, must be the rows that the other two report as written, range by range.

Counts and bounds cannot distinguish one offset from another. Where other writers added rows in the
sink's ranges and rows were also removed, the counts may agree although the rows differ. Such a
range is `cannot tell`, unless a sink wrote all of its files, or the rows are read. A compaction
(`replace`) is trusted to keep rows as they are, as Iceberg defines it, where counts agree.

A ledger whose older snapshots were expired proves only the part that is left; the index covers the
rest. Where two sources cannot confirm the third, the verdict is `cannot tell`, with the reason. On
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
`accepted loss` where an operator signed for them, and a `gap` otherwise.

A sink and the sink that replays its dead letters write to the same tables. Their rows add up, and
each has its own ledger: the sink's counts records, the replay's counts batches.

This package does not import `commit`: the proof must not depend on the code that it proves.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import compress, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from frazil.iceberg.foreign_commits import (
    EVERYTHING,
    ForeignCommits,
    brings_rows,
    counted,
    reaches,
)
from frazil.iceberg.static_table import DataFile
from frazil.ledger.columns import FATES, TOLD, RangeColumns, by_partition, of_entries, select
from frazil.ledger.entry import PREFIX, OperatorNote, OutcomeCounts, Snapshot, parse
from frazil.ledger.index_rows import IndexRows
from frazil.ledger.sink_state import REPLAY
from frazil.offsets import BATCHES, Cut, Partition, Range

#: The worst first. `accepted loss` is no fault: an operator has signed for it.
KINDS = (
    "gap",
    "overlap",
    "unaccounted",
    "cannot tell",
    "nothing committed",
    "behind",
    "accepted loss",
)
#: The most ranges of one kind, and the most files, that are listed one by one.
_NAMED, _FILES = 100, 20
#: All files are rewritten: a filter would skip the files whose bounds are wrong.
_REWRITE = "CALL system.rewrite_data_files(table => '{}', options => map('rewrite-all', 'true'))"


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    says: str
    ranges: tuple[Range, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts about one table, from its metadata and from the rows of the index."""

    table: str
    #: the branch's ancestry, newest first
    history: Sequence[Snapshot]
    #: sink → the snapshot that its tag names
    witnesses: Mapping[str, Snapshot] = field(default_factory=dict)
    #: sink → is its tagged snapshot an ancestor of the branch, though snapshots between were
    #: expired? A sink is missing where no metadata file shows it
    behind: Mapping[str, bool] = field(default_factory=dict)
    #: the live data files; None: not examined
    files: Sequence[DataFile] | None = None
    #: live delete files, which hide rows of data files
    deletes: int = 0
    #: snapshot id → the data files that it added; None: unknown
    brought: Callable[[int], Sequence[DataFile] | None] | None = None
    #: the table's record of foreign commits whose snapshots its sinks expired
    foreign_commits: Sequence[ForeignCommits] = ()
    #: sink → the index rows of this table; a sink whose index was not found is missing
    index: Mapping[str, IndexRows] = field(default_factory=dict)
    #: sink → the index rows of the whole stream (`*`), for a sink that fills several tables
    stream: Mapping[str, IndexRows] = field(default_factory=dict)
    #: sink → the position in the index, which all of its tables have reached
    positions: Mapping[str, Cut] = field(default_factory=dict)
    #: topic, partition and offset of every visible row
    deep: pa.Table | None = None
    #: (path, wrong statement) of live files that a manifest misdescribes; None: not examined
    misdescribed: Sequence[tuple[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The verdict on one topic partition."""

    range: Range
    counts: OutcomeCounts
    findings: tuple[Finding, ...] = ()
    #: rows in the live files; None where files mix partitions and only the sum is known
    rows: int | None = None

    def ranges(self, kind: str) -> tuple[Range, ...]:
        ranges = [r for finding in self.findings if finding.kind == kind for r in finding.ranges]
        return tuple(sorted({r for r in ranges if r.partition == self.range.partition}))

    @property
    def gaps(self) -> tuple[Range, ...]:
        return self.ranges("gap")

    @property
    def overlaps(self) -> tuple[Range, ...]:
        return self.ranges("overlap")

    @property
    def by_record(self) -> bool:
        """Is the verdict about single records?"""
        return self.range.partition != BATCHES and not self.counts.merged

    @property
    def verdict(self) -> str:
        return worst(self.findings)


@dataclass(frozen=True, slots=True)
class TableReport:
    table: str
    sink: str
    lines: tuple[PartitionReport, ...]
    commits: int
    found: tuple[Finding, ...] = ()
    #: the sources that were examined
    witnesses: tuple[str, ...] = ()
    #: do its batches replace the rows of their keys?
    upserts: bool = False
    #: interventions of operators in the stream
    notes: tuple[OperatorNote, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        return tuple(map(str, self.found))

    @property
    def written(self) -> int:
        return sum(line.counts.written for line in self.lines)

    @property
    def proves(self) -> str:
        """The subject of the verdict: `records`, `batches` or `changes`."""
        if self.upserts:
            return "changes"
        counted = [line for line in self.lines if line.range.partition != BATCHES]
        rows = sum(line.counts.written for line in self.lines if line.range.partition == BATCHES)
        by_record = counted and not rows and all(line.by_record for line in counted)
        return "records" if by_record else "batches"

    @property
    def verdict(self) -> str:
        """`proven`, or the kind of the worst finding; `accepted loss` where everything else is
        proven."""
        return worst(self.found)

    def values(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "table": self.table,
            "sink": self.sink,
            "verdict": self.verdict,
            "proves": self.proves,
            "witnesses": list(self.witnesses),
            "commits": self.commits,
            "written": self.written,
            "findings": list(self.findings),
            "notes": [asdict(note) for note in self.notes],
            "partitions": [
                {
                    "topic": line.range.partition.topic,
                    "partition": line.range.partition.number,
                    "verdict": line.verdict,
                    "start": line.range.start,
                    "end": line.range.end,
                    "written": line.counts.written,
                    "rejected": line.counts.rejected,
                    "skipped": line.counts.skipped,
                    "invisible": line.counts.invisible,
                    "merged": line.counts.merged,
                    "elsewhere": line.counts.elsewhere,
                    "lost": line.counts.lost,
                    "rows_in_files": line.rows,
                    "gaps": [[r.start, r.end] for r in line.gaps],
                    "overlaps": [[r.start, r.end] for r in line.overlaps],
                    "unaccounted": [[r.start, r.end] for r in line.ranges("unaccounted")],
                    "cannot_tell": [[r.start, r.end] for r in line.ranges("cannot tell")],
                }
                for line in self.lines
            ],
        }


def worst(findings: Iterable[Finding]) -> str:
    kinds = {finding.kind for finding in findings}
    return next((kind for kind in KINDS if kind in kinds), "proven")


def audit(evidence: Evidence, sink: str = "") -> list[TableReport]:
    """One report per sink that wrote to the table (or for `sink` only)."""
    table = _TableHistory(evidence)
    return [
        _Check(evidence, table, name).report()
        for name in sorted(table.sinks)
        if not sink or name == sink
    ]


Parts = Mapping[Partition, RangeColumns]


@dataclass(frozen=True, slots=True)
class _SinkLedger:
    """One sink's entries in one table, oldest first."""

    snapshots: tuple[Snapshot, ...]
    parts: Parts
    #: does it go back to the table's first snapshot?
    complete: bool


class _TableHistory:
    """The history of a table, for all of its sinks."""

    def __init__(self, evidence: Evidence) -> None:
        oldest_first = list(evidence.history)[::-1]
        self.complete = not oldest_first or oldest_first[0].parent is None
        self._oldest = oldest_first[0] if oldest_first else None
        self._ids = {snapshot.id for snapshot in oldest_first}
        by_sink: dict[str, list[Snapshot]] = {}
        #: rows that other writers added, less those they removed
        self.foreign = 0
        #: did other writers remove any rows; did they certainly remove rows of a sink?
        self.removed = self.taken = False
        #: did a sink itself remove the rows that its deletes hide?
        self.compacted = False
        #: compactions that wrote more rows than they read
        self.swollen: list[str] = []
        #: foreign commits that added rows, and those that removed rows
        self._bringing: list[Snapshot] = []
        self.taking: list[Snapshot] = []
        self._brought = evidence.brought
        #: foreign commits whose snapshots a sink has expired
        self.expired_commits = [c for c in evidence.foreign_commits if not c.within(self._ids)]
        rewound = set()
        for snapshot in oldest_first:
            summary = snapshot.summary
            if (sink := summary.get(PREFIX + "sink")) is not None:
                if PREFIX + "rewound" in summary:  # of the index: its rows record what stayed
                    by_sink[sink] = []
                    rewound.add(sink)
                by_sink.setdefault(sink, []).append(snapshot)
                continue
            added = int(summary.get("added-records", 0))
            removed = int(summary.get("deleted-records", 0))
            if snapshot.operation == "replace":  # rows replaced by the same rows: none are added
                if added > removed:
                    self.swollen.append(f"snapshot {snapshot.id} rewrote {removed} rows as {added}")
                removed, added = max(0, removed - added), 0
                if PREFIX + "compact" in summary:
                    self.compacted = True
                    continue
            elif brings_rows(snapshot):
                self._bringing.append(snapshot)
            # A commit that removes rows, or hides them behind delete files, may have removed rows
            # of a sink; it certainly has if it removed more than other writers had added.
            hides = int(summary.get("added-delete-files", 0)) > 0
            if removed > 0 or hides or (snapshot.operation in _TAKING and not counted(summary)):
                self.removed = True
                self.taking.append(snapshot)
            self.taken |= self.complete and removed > self.foreign
            self.foreign += added - removed
        for sink, witness in evidence.witnesses.items():
            # If the history was expired, the tag still has the newest entry.
            expired = not self.complete and witness.sequence < oldest_first[0].sequence
            if expired and sink not in by_sink and parse(witness.summary) is not None:
                by_sink[sink] = [witness]
        # The ledgers first: the index may still be loading.
        entries = {
            name: of_entries([snapshot.summary for snapshot in snapshots])
            for name, snapshots in by_sink.items()
        }
        #: sink → its index rows of this table
        self.rows = {name: by_partition(index.spans) for name, index in evidence.index.items()}
        # If the table was rolled back behind its first entry, only the index may know the sink.
        self.sinks = {
            name: _SinkLedger(
                tuple(by_sink.get(name, ())),
                by_partition(entries.get(name, NOTHING)),
                self.complete and name not in rewound,
            )
            for name in {*by_sink, *(name for name, rows in self.rows.items() if rows)}
        }
        self.whole = {name: self._together(name) for name in self.sinks}
        #: sinks whose batches replace the rows of their keys
        self.upserts = {
            name
            for name, snapshots in by_sink.items()
            if any(PREFIX + "keys" in snapshot.summary for snapshot in snapshots)
        }

    def apart(self, witness: Snapshot) -> bool:
        """Do expired snapshots lie between a tagged snapshot and the history that is left?"""
        return self._oldest is not None and witness.id not in (*self._ids, self._oldest.parent)

    def _together(self, sink: str) -> Parts:
        """The ranges of a sink: from the index where the ledger was expired, else the ledger."""
        ledger, rows = self.sinks[sink], self.rows.get(sink, {})
        if ledger.complete:
            return ledger.parts
        parts = dict(ledger.parts)
        for partition, part in rows.items():
            left = ledger.parts.get(partition)
            if left is None:
                parts[partition] = part
                continue
            before = part.end <= left.start[0]
            if not _same(_busy(left), select(part, ~before)):  # else the index has all of them
                parts[partition] = joined_columns(select(part, before), left)
            else:
                parts[partition] = part
        return parts

    def knows(self, sink: str) -> bool:
        """Do ledger and index together record everything that a sink wrote to this table?"""
        ledger = self.sinks[sink]
        return ledger.complete or sink in self.rows or not ledger.parts

    @cached_property
    def brought(self) -> list[tuple[Snapshot, Sequence[DataFile] | None]]:
        """Files that foreign commits added, where rows may also have been removed: foreign rows may
        then replace as many of the sink's in the same ranges. Without removals counts suffice."""
        if self.complete and not self.removed:
            return []
        return [(s, self._brought(s.id) if self._brought else None) for s in self._bringing]

    def owners(self, partition: Partition) -> set[str]:
        return {name for name, parts in self.whole.items() if partition in parts}


class _Check:
    """The audit of one sink in one table."""

    def __init__(self, evidence: Evidence, table: _TableHistory, sink: str) -> None:
        self.evidence = evidence
        self.table = table
        self.sink = sink
        self.ledger = table.sinks[sink]
        self.rows = table.rows.get(sink, {})
        self.whole = table.whole[sink]
        self.findings: list[Finding] = []
        self.notes: list[OperatorNote] = []
        self.in_files: dict[Partition, int | None] = {}

    def report(self) -> TableReport:
        self.hear_ledger()
        if self.sink in self.table.rows:
            self.hear_index()
        if not self.table.knows(self.sink):
            self.found(
                "cannot tell",
                "snapshots before the oldest one left were expired, and no "
                "index was found; the ranges are what the ledger left proves",
            )
        if self.evidence.files is not None:
            self.hear_manifests()
            self.hear_others()
        if self.evidence.misdescribed is not None:
            self.hear_footers()
        if self.evidence.deep is not None:
            self.hear_rows()
        self.hear_notes()
        lines = []
        for partition, part in sorted(self.whole.items()):
            findings = [f for f in self.findings if any(r.partition == partition for r in f.ranges)]
            start, end = int(part.start[0]), int(part.end.max())
            lines.append(
                PartitionReport(
                    Range(partition, start, max(start, end)),
                    self._counts(partition),
                    tuple(findings),
                    self.in_files.get(partition),
                )
            )
        busy = np.zeros(len(self.ledger.snapshots), bool)
        for part in self.ledger.parts.values():
            busy[part.source[part.end > part.start]] = True
        commits = int(busy.sum())
        heard = {
            "ledger": bool(self.ledger.snapshots),
            "index": self.sink in self.table.rows,
            "manifests": self.evidence.files is not None,
            "footers": self.evidence.misdescribed is not None,
            "rows": self.evidence.deep is not None,
        }
        ordered = sorted(self.findings, key=lambda finding: KINDS.index(finding.kind))
        return TableReport(
            self.evidence.table,
            self.sink,
            tuple(lines),
            commits,
            tuple(ordered),
            tuple(name for name, was in heard.items() if was),
            self.sink in self.table.upserts,
            tuple(self.notes),
        )

    def _counts(self, partition: Partition) -> OutcomeCounts:
        """The outcomes of a partition's offsets. Offsets between rows of the index held nothing for
        the table."""
        part = self.whole[partition]
        sums = {fate: int(getattr(part, fate).sum()) for fate in FATES}
        if partition != BATCHES and not self.ledger.complete:
            holes, _ = _joints(part)
            sums["elsewhere"] += sum(end - start for start, end in holes)
        return OutcomeCounts(**sums)

    def found(self, kind: str, says: str, ranges: Iterable[Range] = ()) -> None:
        self.findings.append(Finding(kind, says, tuple(ranges)))

    def ranged(
        self, kind: str, partition: Partition, spans: Iterable[tuple[int, int]], says: str
    ) -> None:
        """Add a finding for ranges of one partition, if any; `{}` in the text stands for them."""
        ranges = [Range(partition, max(0, a), max(0, a, b)) for a, b in islice(spans, _NAMED)]
        if ranges:
            named = ", ".join(map(str, ranges[:4])) + (" …" if len(ranges) > 4 else "")
            self.found(kind, says.format(named), ranges)

    # ── notes of operators ───────────────────────────────────────────────────────────────────

    def hear_notes(self) -> None:
        """Every offset recorded as lost must lie in a range that an operator gave up as a whole and
        signed for: in the ledger or, where that was expired, in the index."""
        signed: dict[tuple[Partition, int, int], OperatorNote] = {}
        for number, snapshot in enumerate(self.ledger.snapshots):
            if (
                note := OperatorNote.of(snapshot.summary.get(PREFIX + "operator-note"))
            ) is not None:
                self._signed(signed, note, self._of_entry(number))
        index = self.evidence.index.get(self.sink)
        for range_, text in index.notes if index is not None else ():
            if (note := OperatorNote.of(text)) is not None:
                self._signed(signed, note, [range_])
        for partition, part in self.whole.items():
            if not part.lost.any():
                continue
            unsigned = []
            at = np.flatnonzero(part.lost)
            spans = zip(
                part.start[at].tolist(), part.end[at].tolist(), part.lost[at].tolist(), strict=True
            )
            for start, end, lost in spans:
                known = signed.get((partition, start, end))
                if known is None or lost != end - start:
                    unsigned.append((start, end))
                else:
                    gone = Range(partition, start, end)
                    self.found("accepted loss", f"{gone}: {known}", [gone])
            self.ranged("gap", partition, unsigned, "{} are told as lost, and nobody signed for it")

    def _signed(
        self,
        signed: dict[tuple[Partition, int, int], OperatorNote],
        note: OperatorNote,
        ranges: Iterable[Range],
    ) -> None:
        if note not in self.notes:
            self.notes.append(note)
        signed |= {(range_.partition, range_.start, range_.end): note for range_ in ranges}

    # ── the ledger ───────────────────────────────────────────────────────────────────────────

    def hear_ledger(self) -> None:
        for partition, part in self.ledger.parts.items():
            gaps, overlaps = _joints(part)
            self.ranged("gap", partition, gaps, "no entry of the ledger has {}")
            self.ranged("overlap", partition, overlaps, "the ledger has {} twice")
            self.ranged(
                "unaccounted",
                partition,
                _pairs(part, part.written < 0),
                "of {} more is told than there is",
            )
        self._unchained()
        self._miscounted()
        self._rolled_back()

    def _unchained(self) -> None:
        """Find entries that do not begin at the Spark source offset where the previous one ended.
        The offsets are compared as text; a sink that reads Kafka directly has none."""
        end = ""
        for snapshot in self.ledger.snapshots:
            source = snapshot.summary.get(PREFIX + "source")
            before, after = json.loads(source) if source else ("", "")
            if end and before and before != end:
                batch = snapshot.summary[PREFIX + "batches"].partition("..")[0]
                self.found(
                    "gap", f"batch {batch} begins at {before}, and the one before it ends at {end}"
                )
            end = after

    def _miscounted(self) -> None:
        """Find entries whose counts differ from their own ranges, or from Iceberg's summary."""
        derived = np.zeros((len(FATES), len(self.ledger.snapshots)), np.int64)
        for part in self.ledger.parts.values():
            for counts, fate in zip(derived, FATES, strict=True):
                if not getattr(part, fate).any():
                    continue
                if len(part) == len(counts):  # every entry has it
                    counts += getattr(part, fate)
                else:
                    counts[part.source] += getattr(part, fate)  # an entry names a partition once
        for i, (snapshot, sums) in enumerate(
            zip(self.ledger.snapshots, derived.T.tolist(), strict=True)
        ):
            summary, rows = snapshot.summary, sums[0]
            text = summary.get(PREFIX + "counts", "{}")
            counted = {} if text == _counts(sums) else json.loads(text)
            if counted and any(counted.get(f, 0) != n for f, n in zip(FATES, sums, strict=True)):
                entry = {fate: number for fate, number in counted.items() if number}
                ranges = {f: n for f, n in zip(FATES, sums, strict=True) if n}
                self.found(
                    "unaccounted",
                    f"the entry of batches {summary[PREFIX + 'batches']} says"
                    f" {entry}; its ranges say {ranges}",
                    self._of_entry(i),
                )
            added = summary.get("added-records", "0")
            if self.evidence.files is not None and int(added) != rows:
                self.found(
                    "unaccounted",
                    f"the entry of batches {summary[PREFIX + 'batches']} says"
                    f" {rows} written; its snapshot {snapshot.id} added {added}",
                    self._of_entry(i),
                )
            keys, gone = (
                summary.get(name, "0") for name in (PREFIX + "keys", "added-equality-deletes")
            )
            if self.evidence.files is not None and keys != gone:
                self.found(
                    "unaccounted",
                    f"the entry of batches {summary[PREFIX + 'batches']} says"
                    f" that it takes {keys} keys away; its snapshot {snapshot.id} takes "
                    f"{gone}",
                    self._of_entry(i),
                )

    def _of_entry(self, number: int) -> list[Range]:
        return [
            Range(partition, int(part.start[at]), int(part.end[at]))
            for partition, part in self.ledger.parts.items()
            for at in np.flatnonzero((part.source == number) & (part.end > part.start))[:1]
        ]

    def _rolled_back(self) -> None:
        witness = self.evidence.witnesses.get(self.sink)
        entry = parse(witness.summary) if witness is not None else None
        if witness is None or entry is None:
            return
        if witness in self.ledger.snapshots and self.table.apart(witness):
            self._bridged(witness, entry.ranges)
            return
        reached = {p: int(part.end.max()) for p, part in self.ledger.parts.items()}
        lost = [
            Range(partition, reached.get(partition, 0), end)
            for partition, end in entry.end.items()
            if reached.get(partition, 0) < end
        ]
        if lost:
            named = ", ".join(map(str, lost[:4]))
            self.found(
                "gap",
                f"the table was rolled back: its witness has {named}, and its ledger has not",
                lost,
            )

    def _bridged(self, witness: Snapshot, ranges: Sequence[Range]) -> None:
        """Snapshots between the sink's newest entry and the oldest one left were expired. A lower
        sequence number proves nothing: numbers rise on a branch that was rolled back, too. In an
        append table the files show a rollback; in an upsert table only the ancestry does."""
        behind = self.evidence.behind.get(self.sink)
        if behind is False:
            self.found(
                "gap",
                f"the table was rolled back behind snapshot {witness.id}, the newest "
                "entry of the sink, and snapshots were expired since",
                ranges,
            )
        elif behind is None and self.sink in self.table.upserts:
            self.found(
                "cannot tell",
                f"snapshots since the newest entry of the sink ({witness.id})"
                " were expired, and no earlier metadata file shows that the table was not "
                "rolled back; compare it with its topics (frazil offsets confirm signs for "
                "it)",
                ranges,
            )

    # ── the index ────────────────────────────────────────────────────────────────────────────

    def hear_index(self) -> None:
        stream = self.evidence.stream.get(self.sink)
        whole = {} if stream is None else by_partition(stream.spans)
        strange = by_partition(self.evidence.index[self.sink].strange)
        position = self.evidence.positions.get(self.sink)
        for partition, part in self.rows.items():
            gaps, overlaps = _joints(part)
            # Batches that held nothing for the table have rows in the whole stream only.
            bare = [hole for gap in gaps for hole in _uncovered(whole.get(partition), *gap)]
            self.ranged("gap", partition, bare, "the index has no row of {}")
            self.ranged("overlap", partition, overlaps, "the index has {} twice")
            sums = part.written + part.rejected + part.skipped + part.invisible + part.merged
            sums = sums + part.lost
            odd = (sums != part.end - part.start) if partition != BATCHES else sums < 0
            wrong = [*_pairs(part, odd), *_pairs(strange.get(partition, NOTHING))]
            self.ranged("unaccounted", partition, wrong, "the index's row of {} does not add up")
        for partition in sorted({*self.rows, *self.ledger.parts}):
            offset = None if position is None else position.get(partition, 0)
            self._compare(partition, offset)
        self._misnamed()

    def _compare(self, partition: Partition, position: int | None) -> None:
        """Compare each entry of the ledger with its rows in the index."""
        rows = self.rows.get(partition, NOTHING)
        entries = self.ledger.parts.get(partition, NOTHING)
        reached = int(entries.end.max()) if len(entries) else 0
        if self.ledger.snapshots or self.ledger.complete:
            self.ranged(
                "gap",
                partition,
                _pairs(rows, rows.end > reached),
                "the index has {}, and the table's ledger has not",
            )
        if self.ledger.complete and len(entries):
            self.ranged(
                "unaccounted",
                partition,
                _pairs(rows, rows.start < entries.start[0]),
                "the index has {}, from before the ledger begins",
            )
        entries = _busy(entries)
        if not len(entries) or _same(entries, rows):
            return
        low = np.searchsorted(rows.start, entries.start)
        high = np.searchsorted(rows.start, entries.end)
        # The index is committed last: it may lack rows of entries beyond its position.
        later = entries.end > (entries.end.max() if position is None else position)
        wanted = {"length": entries.end - entries.start - entries.elsewhere}
        wanted |= {fate: getattr(entries, fate) for fate in TOLD}
        if partition == BATCHES:  # a ledger records only the rows written of a batch
            wanted = {"written": entries.written}
        differ = np.zeros(len(entries), bool)
        for fate, expected in wanted.items():
            column = rows.end - rows.start if fate == "length" else getattr(rows, fate)
            sums = np.append(0, np.cumsum(column))
            actual = sums[high] - sums[low]
            differ |= np.where(later, actual > expected, actual != expected)
        # A row that begins in an entry ends in it.
        last = np.maximum(high, 1) - 1
        differ |= (high > low) & (rows.end[last] > entries.end) if len(rows) else False
        none = differ & (low == high)
        self.ranged(
            "unaccounted",
            partition,
            _pairs(entries, none),
            "the ledger has {}, and the index has no row of it",
        )
        self.ranged(
            "unaccounted",
            partition,
            _pairs(entries, differ & ~none),
            "ledger and index tell different counts of {}",
        )

    def _misnamed(self) -> None:
        """Each row of a batch must name a commit of the ledger, with its snapshot and epoch."""
        index = self.evidence.index[self.sink]
        places: dict[str, tuple[int, int, int, int]] = {}
        for snapshot in self.ledger.snapshots:
            summary = snapshot.summary
            first, _, last = summary[PREFIX + "batches"].partition("..")
            fact = (snapshot.id, int(first), int(last), int(summary[PREFIX + "epoch"]))
            places |= dict.fromkeys(summary[PREFIX + "commit-id"].split(","), fact)
        known = [places.get(commit_id) for commit_id in index.commit_ids]
        unknown = np.array([fact is None for fact in known], bool)
        facts = np.array([fact or (0, 0, 0, 0) for fact in known], np.int64).reshape(-1, 4)
        snapshot_ids, first, last, epoch = facts.T
        wrong = (index.snapshots != snapshot_ids) & (index.snapshots != 0)
        wrong |= (index.batches < first) | (index.batches > last) | (index.epochs > epoch)
        if not (wrong | unknown).any():
            return
        for partition, rows in self.rows.items():
            entries = self.ledger.parts.get(partition, NOTHING)
            if not len(entries):
                continue
            # The commits of expired entries are unknown.
            since = rows.start >= entries.start[0]
            odd = np.where(unknown[rows.source], since, wrong[rows.source])
            self.ranged(
                "unaccounted",
                partition,
                _pairs(rows, odd),
                "the index's row of {} names another batch, epoch, commit or snapshot than"
                " the ledger",
            )

    # ── the manifests ────────────────────────────────────────────────────────────────────────

    def hear_manifests(self) -> None:
        files = self.evidence.files or ()
        times = Counter(file.path for file in files)
        if twice := sorted(path for path, count in times.items() if count > 1):
            ranges = {r for file in files if times[file.path] > 1 and (r := _range_of(file))}
            self.found(
                "overlap",
                f"{len(twice)} data files are in the table twice: {twice[0]}",
                sorted(ranges),
            )
        for rewrite in self.table.swollen:
            self.found("overlap", f"a compaction left rows there twice: {rewrite}")
        if self.table.upserts:
            self._hear_upserts(files)
            return
        if not self.table.knows(self.sink):
            return
        companion = (
            self.sink.removesuffix(REPLAY) if self.sink.endswith(REPLAY) else self.sink + REPLAY
        )
        writers = {
            name
            for name, parts in self.table.whole.items()
            if name != self.sink and any(part.written.any() for part in parts.values())
        }
        # The name of a file shows which sink wrote it, until it is compacted.
        named = {file.path: _maker(file.path) for file in files}
        maker = named if writers else dict.fromkeys(named, self.sink)
        mixed = any(
            file.partition is None
            and file.nulls < file.rows
            and maker[file.path] in ("", self.sink)
            for file in files
        )
        by_partition: dict[Partition | None, list[DataFile]] = {}
        for file in files:
            by_partition.setdefault(file.partition, []).append(file)
        all_sure = True  # bounds and names alone suffice
        for partition, part in self.whole.items():
            if _unplaced(partition, part):
                all_sure = all_sure and not part.written.any()
                continue
            if _joints(part)[1]:
                continue  # reported already; overlapping rows have no single owner
            group = by_partition.get(partition, [])
            rivals = (self.table.owners(partition) & writers) | ({companion} & writers)
            own = [f for f in group if f.offsets and (not rivals or maker[f.path] == self.sink)]
            sure = not mixed and not any(not maker[f.path] for f in group if rivals)
            sure = sure and all(file.offsets for file in group)
            all_sure = all_sure and sure
            held = sum(file.rows - file.nulls for file in own)
            self.in_files[partition] = held if sure else None
            if sure or not rivals:
                self._segments(partition, part, own, part.written, sure)
                self._homes(partition, [f for f in own if named[f.path] == self.sink])
            if rivals == {companion}:
                # Replayed dead letters have offsets that the table rejected, or that no rule routed
                # to it, or that lie outside.
                near = [file for file in group if file.offsets]
                room = part.written + part.rejected + part.skipped
                self._segments(partition, part, near, room, None)
        topics = {partition.topic for partition in self.whole}
        for where, strays in by_partition.items():
            if where and where.topic in topics and not self.table.owners(where):
                self.ranged(
                    "unaccounted",
                    where,
                    [(f.offsets[0], f.offsets[1] + 1) for f in strays if f.offsets],
                    "data files hold {}, which nobody says was written",
                )
        if not all_sure or self.evidence.deletes:
            self._sum(files, writers - {companion})

    def hear_others(self) -> None:
        """Doubt ranges to which other writers added rows although the counts agree: as many rows
        were removed, either the sink's or theirs. Counts and bounds cannot show which. Files that a
        sink wrote hold what it wrote; only files of other writers are in doubt."""
        strange = [f for f in self.evidence.files or () if _maker(f.path) not in self.table.sinks]
        if self.table.upserts or not strange:
            return
        if not (self.table.brought or self.table.expired_commits):
            return
        alone = {self.sink} >= {name for name, parts in self.table.whole.items() if parts}
        unplaced = False
        for partition, part in self.whole.items():
            if _unplaced(partition, part):
                unplaced |= bool(part.written.any())
                continue
            if self.evidence.deep is not None and alone:
                continue  # `hear_rows` checks every row
            foreign = []
            for snapshot, files in self.table.brought:
                reach = [EVERYTHING] if files is None else reaches(files, partition)
                foreign += [(*span, snapshot) for span in reach]
            begins, ends = int(part.start[0]), int(part.end.max())
            doubtful = []
            by: dict[int, Snapshot] = {}
            for low, high in reaches(strange, partition):
                met = {s.id: s for a, b, s in foreign if a < high and low < b}
                if met and max(low, begins) < min(high, ends):
                    doubtful.append((max(low, begins), min(high, ends)))
                    by |= met
            says = _DOUBT.format(_named(by.values()))
            self.ranged("cannot tell", partition, _union(doubtful), says)
            self._doubt_expired(partition, (begins, ends), reaches(strange, partition))
        if unplaced and self.table.removed and self.table.brought:
            self.found(
                "cannot tell",
                _DOUBT.format(_named(s for s, _ in self.table.brought)).format("the table"),
            )
        for commits in self.table.expired_commits if unplaced else ():
            self.found("cannot tell", _EXPIRED_DOUBT.format(commits).format("the table"))

    def _doubt_expired(
        self, partition: Partition, whole: tuple[int, int], strange: Sequence[tuple[int, int]]
    ) -> None:
        """The same for commits whose snapshots are expired: the table records their ranges."""
        begins, ends = whole
        for commits in self.table.expired_commits:
            reach = commits.reach(partition)
            doubtful = [
                (max(low, begins), min(high, ends))
                for low, high in strange
                if reach and reach[0] < high and low < reach[1]
            ]
            spans = _union((low, high) for low, high in doubtful if low < high)
            self.ranged("cannot tell", partition, spans, _EXPIRED_DOUBT.format(commits))

    def _hear_upserts(self, files: Sequence[DataFile]) -> None:
        """Every row must be recorded as written by ledger or index. Until a compaction every row
        written is still in the files, though deletes may hide it."""
        table = self.table
        if table.removed:
            self.found(
                "unaccounted",
                "rows were removed or hidden by a commit that is not the "
                f"sink's: {_named(table.taking)}",
            )
        elif table.foreign:
            self.found(
                "cannot tell", "others added rows to this table, of keys that it may have already"
            )
        for commits in table.expired_commits:
            self.found(
                "cannot tell",
                f"others wrote rows into this table ({commits}), of keys that it may have "
                "already, and their snapshots were expired",
            )
        for partition, part in self.whole.items():
            own = [file for file in files if file.partition == partition and file.offsets]
            if partition != BATCHES and not _joints(part)[1]:
                self._segments(partition, part, own, part.written, False)
                made = [file for file in own if _maker(file.path) == self.sink]
                self._homes(partition, made if not table.compacted else [])
        live = sum(file.rows for file in files)
        every = (part for parts in table.whole.values() for part in parts.values())
        written = sum(int(part.written.sum()) for part in every)
        known = table.complete and all(map(table.knows, table.sinks)) and not table.removed
        if live > written + table.foreign or (known and not table.compacted and live < written):
            self.found(
                "unaccounted",
                f"the manifests hold {live} rows; ledger and index say that {written} were written",
            )

    def _segments(
        self,
        partition: Partition,
        part: RangeColumns,
        files: Sequence[DataFile],
        room: NDArray[np.int64],
        sure: bool | None,
    ) -> None:
        """Compare the rows of the files with the rows written, range by range.

        Files and ranges need not have the same borders: ranges that share a file are compared as
        one. `sure`: no other file can hold rows of the partition; None: rows may lie outside of it.
        """
        if (part.start[1:] < part.start[:-1]).any() or (part.end <= part.start).any():
            order = np.argsort(part.start, kind="stable")
            order = order[part.end[order] > part.start[order]]
            part, room = select(part, order), room[order]
        offsets = np.array([f.offsets for f in files], np.int64).reshape(-1, 2)
        rows = np.array([f.rows - f.nulls for f in files], np.int64)
        low = np.searchsorted(part.start, offsets[:, 0], "right") - 1
        high = np.searchsorted(part.start, offsets[:, 1], "right") - 1
        inside = np.zeros(len(files), bool)
        if len(part):
            inside = (low >= 0) & (offsets[:, 0] < part.end[low]) & (offsets[:, 1] < part.end[high])
        if sure is not None:
            self.ranged(
                "unaccounted",
                partition,
                [(a, b + 1) for a, b in offsets[~inside].tolist()],
                "data files hold {}, which nobody says was written",
            )
        low, high, rows = low[inside], high[inside], rows[inside]
        covered = np.zeros(len(part) + 1, np.int64)
        if len(low):
            order = np.argsort(low, kind="stable")
            low, high, rows = low[order], np.maximum.accumulate(high[order]), rows[order]
            first = np.flatnonzero(np.append(True, low[1:] > high[:-1]))
            begins, ends = low[first], high[np.append(first[1:], len(low)) - 1]
            np.add.at(covered, begins, 1)
            np.add.at(covered, ends + 1, -1)
            held = np.add.reduceat(rows, first)
            sums = np.append(0, np.cumsum(room))
            wanted = sums[ends + 1] - sums[begins]
            spans = list(zip(part.start[begins].tolist(), part.end[ends].tolist(), strict=True))
            self.ranged(
                "overlap",
                partition,
                compress(spans, held > wanted),
                "the files hold more rows of {} than were written",
            )
            if sure:
                self.ranged(
                    "unaccounted",
                    partition,
                    compress(spans, held < wanted),
                    "the files hold fewer rows of {} than were written",
                )
        if sure:
            bare = (np.cumsum(covered[:-1]) == 0) & (part.written > 0)
            self.ranged("gap", partition, _pairs(part, bare), "no data file holds {}")

    @cached_property
    def entries(self) -> dict[int, int]:
        """Sequence number of a commit → number of its entry in the ledger."""
        return {snapshot.sequence: i for i, snapshot in enumerate(self.ledger.snapshots)}

    def _homes(self, partition: Partition, files: Sequence[DataFile]) -> None:
        """A file that the sink wrote must lie within the ranges of the commit that added it."""
        part = self.ledger.parts.get(partition, NOTHING)
        entry = self.entries
        known = [(f.offsets, entry[f.sequence]) for f in files if f.offsets and f.sequence in entry]
        at = np.searchsorted(part.source, [number for _, number in known])
        astray = [
            (low, high + 1)
            for ((low, high), number), i in zip(known, at.tolist(), strict=True)
            if i == len(part)
            or part.source[i] != number
            or low < part.start[i]
            or high >= part.end[i]
        ]
        self.ranged(
            "unaccounted",
            partition,
            astray,
            "data files hold {}, outside of what was written by their commit",
        )

    def _sum(self, files: Sequence[DataFile], others: Collection[str]) -> None:
        """Compare the total rows of the table, where bounds cannot separate its writers."""
        if self.evidence.deep is not None:
            return  # `hear_rows` checks every row
        if self.evidence.deletes:
            self.found(
                "unaccounted",
                f"{self.evidence.deletes} delete files hide rows of this "
                "table; which ones, metadata does not say (see --deep)",
            )
            return
        if not all(map(self.table.knows, self.table.sinks)):
            self.found(
                "cannot tell",
                "another sink writes to this table, whose older snapshots "
                "were expired; its rows are not told apart",
            )
            return
        table = self.table
        every = [(sink, *pair) for sink, parts in table.whole.items() for pair in parts.items()]
        # Rows of sinks: with an offset (a replay's too, though it counts batches), and without.
        placed = unplaced = 0
        topics = {topic for cut in self.evidence.positions.values() for topic in cut.topics}
        for sink, partition, part in every:
            rows = int(part.written.sum())
            if partition != BATCHES:
                topics.add(partition.topic)
                placed += rows
            elif sink.endswith(REPLAY):
                placed += rows
            else:
                unplaced += rows
        # Rows of the files: with an offset in a topic that a sink of the table reads, in another
        # topic, or in an unknown one; without an offset; and without bounds.
        measured = [file for file in files if file.offsets or file.nulls == file.rows]
        with_offset = between = elsewhere = unclear = 0
        for file in measured:
            low, high = file.topics or ("", "")
            if low in topics and low == high:
                with_offset += file.rows - file.nulls
            elif low in topics and high in topics:
                between += file.rows - file.nulls
            elif low and low == high:
                elsewhere += file.rows - file.nulls
            else:
                unclear += file.rows - file.nulls
        without = sum(file.nulls for file in measured)
        live = sum(file.rows for file in files)
        unknown = live - sum(file.rows for file in measured)
        if unplaced:  # rows that stand for several records may carry the offset of one of them
            with_offset = between = elsewhere = unclear = without = 0
            unknown = live
        spare = max(0, unplaced - without)  # of the unknown rows, those that must have no offset
        most = with_offset + between + unclear + unknown - spare
        kept = table.complete and not table.removed  # then all foreign changes are known
        expected = placed + unplaced + (table.foreign if kept else elsewhere)
        if (kept and live != expected) or live < expected or most < placed or unknown < spare:
            self.found(
                "unaccounted",
                f"the manifests hold {live} rows; ledger and index say "
                f"{expected}, {placed} of them with offsets",
            )
        elif table.taken and (unplaced or unknown):
            self.found("unaccounted", "rows were removed by a commit that is not the sink's")
        elif with_offset > placed:
            self.found(
                "overlap",
                f"the manifests hold {with_offset} rows with offsets; ledger and "
                f"index say {placed}",
            )
        elif (
            (placed and most > placed and (table.foreign or not kept))
            or (unplaced and not kept and (live > expected or table.removed))
            or ((unknown or unclear or between) and (table.removed or (placed and not kept)))
        ):
            self.found(
                "cannot tell",
                "others wrote to this table, or removed rows, and their rows "
                "are not told apart from the sink's (see --deep)",
            )
        elif others:
            self.found(
                "cannot tell", "several sinks write to this table; its rows are not told apart"
            )

    # ── the files themselves ─────────────────────────────────────────────────────────────────

    def hear_footers(self) -> None:
        """Engines prune files by their manifests: wrong statements there lose rows."""
        statements = self.evidence.misdescribed or ()
        ranges = {f.path: range_ for f in self.evidence.files or () if (range_ := _range_of(f))}
        for path, says in statements[:_FILES]:
            lie = f"the manifest of {path} tells of {says}: filters and deletes may pass it over"
            self.found(
                "unaccounted",
                f"{lie} ({_REWRITE.format(self.evidence.table)})",
                [ranges[path]] if path in ranges else (),
            )
        if len(statements) > _FILES:
            files = len({path for path, _ in statements})
            self.found(
                "unaccounted",
                f"so do the manifests of {files} files in all, in {len(statements)} statements",
            )

    # ── the rows themselves ──────────────────────────────────────────────────────────────────

    def hear_rows(self) -> None:
        """Every visible offset must be unique, and each range have as many as were written."""
        rows = self.evidence.deep
        assert rows is not None
        alone = {self.sink} >= {name for name, parts in self.table.whole.items() if parts}
        upserts = self.sink in self.table.upserts
        for partition, part in self.whole.items():
            if _unplaced(partition, part) and not upserts:
                continue
            mask = pc.and_(
                pc.equal(rows["topic"], partition.topic),
                pc.equal(rows["partition"], partition.number),
            )
            offsets = np.sort(np.asarray(rows["offset"].filter(mask).combine_chunks()))
            again = offsets[1:][offsets[1:] == offsets[:-1]].tolist()
            self.ranged("overlap", partition, _runs(again), "rows of {} are there twice")
            part = select(part, part.end > part.start)
            held = np.searchsorted(offsets, part.end) - np.searchsorted(offsets, part.start)
            missing = _pairs(part, held < part.written) if not upserts else []
            self.ranged("gap", partition, missing, "of {} rows are missing")
            if alone:
                self.ranged(
                    "overlap",
                    partition,
                    _pairs(part, held > part.written),
                    "of {} there are more rows than were written",
                )
                if len(offsets) > held.sum():
                    self.found(
                        "unaccounted",
                        f"{len(offsets) - held.sum()} rows of {partition} lie"
                        " where nobody says that any were written",
                    )


#: No ranges at all.
NOTHING = of_entries([])
#: Iceberg operations that may remove rows.
_TAKING = ("overwrite", "delete")
_DOUBT = (
    "rows of {{}} were written by others ({}), and rows were taken away: counts and bounds "
    "agree, but whether each offset is there once only the rows tell (frazil audit … --deep)"
)
_EXPIRED_DOUBT = (
    "others wrote rows into {{}} ({}), and their snapshots were expired: rows may have been taken "
    "away, too, and whether each offset is there once only the rows tell (frazil audit … --deep)"
)


def joined_columns(one: RangeColumns, other: RangeColumns) -> RangeColumns:
    """Ranges of the same partition, `one` before `other`."""
    columns = [column.name for column in fields(RangeColumns)[1:]]
    return RangeColumns(
        one.partitions,
        *(np.concatenate([getattr(one, name), getattr(other, name)]) for name in columns),
    )


def _counts(sums: Sequence[int]) -> str:
    """Counts as the text of an entry: comparing text spares parsing most entries."""
    others = [f',"{fate}":{n}' for fate, n in zip(FATES[1:], sums[1:], strict=True) if n]
    return f'{{"read":{sum(sums[:3])},"written":{sums[0]}{"".join(others)}}}'


def _busy(part: RangeColumns) -> RangeColumns:
    """The ranges that are not empty."""
    busy = part.end > part.start
    return part if busy.all() else select(part, busy)


def _same(entries: RangeColumns, rows: RangeColumns) -> bool:
    """Do both have the same ranges and counts?"""
    if len(entries) != len(rows) or entries.elsewhere.any():
        return False
    columns = ("start", "end", *TOLD)
    return all((getattr(entries, name) == getattr(rows, name)).all() for name in columns)


def _joints(part: RangeColumns) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Gaps and overlaps of the ranges of one partition, in their order."""
    if (part.start[1:] == part.end[:-1]).all() and (part.start <= part.end).all():
        return [], []
    reached = np.maximum.accumulate(part.end)
    expected = np.append(part.start[0], np.maximum(reached[:-1], part.start[0]))
    apart = part.start > expected
    twice = np.minimum(part.end, expected) > part.start
    gaps = zip(expected[apart].tolist(), part.start[apart].tolist(), strict=True)
    ends = np.minimum(part.end, expected)[twice]
    return list(gaps), list(zip(part.start[twice].tolist(), ends.tolist(), strict=True))


def _pairs(part: RangeColumns, chosen: NDArray[np.bool_] | None = None) -> list[tuple[int, int]]:
    """The chosen ranges, or all; adjacent ones merged."""
    pairs: list[tuple[int, int]] = []
    if chosen is None:
        chosen = np.ones(len(part), bool)
    for start, end in zip(part.start[chosen].tolist(), part.end[chosen].tolist(), strict=True):
        if pairs and pairs[-1][1] == start:
            pairs[-1] = (pairs[-1][0], end)
        else:
            pairs.append((start, end))
    return pairs


def _runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Single offsets, in order, as ranges."""
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and runs[-1][1] >= offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs


def _uncovered(whole: RangeColumns | None, start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end) that no range of `whole` covers."""
    if whole is None:
        return [(start, end)]
    gaps, _ = _joints(whole)
    bare = [(start, int(whole.start[0])), *gaps, (int(whole.end.max()), end)]
    cut = [(max(a, start), min(b, end)) for a, b in bare]
    return [(a, b) for a, b in cut if a < b]


def _unplaced(partition: Partition, part: RangeColumns) -> bool:
    """Do rows of the partition stand for no single offset?"""
    return partition == BATCHES or bool(part.merged.any())


def _named(snapshots: Iterable[Snapshot]) -> str:
    """The newest three, as text."""
    every = sorted(snapshots, key=lambda snapshot: -snapshot.sequence)
    text = ", ".join(f"snapshot {snapshot.id}, {snapshot.operation}" for snapshot in every[:3])
    return text + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    union: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _range_of(file: DataFile) -> Range | None:
    if file.partition is None or file.offsets is None:
        return None
    return Range(file.partition, file.offsets[0], file.offsets[1] + 1)


def _maker(path: str) -> str:
    """The sink that wrote a data file, by the file's name; empty: unknown."""
    named = re.match(r"frazil-(.+)-\d+-\d+-[0-9a-f-]{36}", path.rsplit("/", 1)[-1])
    return named[1] if named else ""
