"""Index rows that are missing or contradict the ledgers. Pure: snapshots and rows in, rows out.

The ledger is the truth: an entry records the outcomes of the offsets of its ranges per partition.
The index must record the same per batch. Where it does not, the rows of that entry and partition
are corrected:

- rows that are consistent with the ledger stay; the counts missing from the entry's total become
  one row for each range without a row;
- where the missing counts could be distributed in several ways (ranges of several batches are lost,
  with rows of others between them, and their offsets have different outcomes), one row for the
  entry's whole range replaces the remaining rows. It also replaces rows that contradict the ledger;
- one table among several has no row for a batch that contained nothing for it. The `*` rows define
  those ranges. The rows written per batch follow from the table's data files, whose names contain
  the batch, as long as they are not compacted. Where this is ambiguous, nothing is written, and the
  range is reported.

A rebuilt row stands for all batches of its commit that lost their rows, and has the number of the
last one. It is recognized by its null `started_at`. Ranges that no snapshot records any more
cannot be rebuilt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from frazil.accounting import OutcomeCounts, RangeCounts
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, LedgerEntry, parse
from frazil.ledger.index import Located
from frazil.ledger.range_columns import (
    INDEXED_OUTCOMES,
    RANGE_COLUMNS,
    RangeColumns,
    codes,
    of_entries,
    of_rows,
    select,
)
from frazil.ledger.sink_state import STREAM
from frazil.ledger.staged_batch import StagedTable
from frazil.offsets import BATCHES, Cut, Partition, Range, join

#: The index columns to read.
COLUMNS = (*RANGE_COLUMNS, *INDEXED_OUTCOMES, "started_at", "commit_id")
_ID = f"{PREFIX}commit-id"
#: The batch in a data file's name.
_NAME = re.compile(r"/frazil-.+-\d+-(\d+)-[0-9a-f-]{36}\.parquet$")


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """One sink's ledger in one table. The ledger in the index is that of the whole stream."""

    table: str
    uuid: str
    #: snapshots with an entry of the sink, oldest first
    snapshots: Sequence[Snapshot]
    #: the table's live data files
    files: Sequence[DataFile] = ()


@dataclass(frozen=True, slots=True)
class RebuiltRange:
    """A range whose rows are written again."""

    JSON: ClassVar = "table *range"

    table: str
    range: Range


@dataclass(frozen=True, slots=True)
class UnknownRange:
    """A range, or a whole table, whose rows the ledgers do not determine."""

    JSON: ClassVar = "table *range reason"

    table: str
    range: Range | None
    reason: str


@dataclass(slots=True)
class RebuiltRows:
    """The changes to make to the index."""

    located: list[Located] = field(default_factory=list)
    #: positions of rows to remove
    drop: list[int] = field(default_factory=list)
    ranges: list[RebuiltRange] = field(default_factory=list)
    unknown: list[UnknownRange] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    place: int
    range: Range
    counts: OutcomeCounts
    commit_id: str
    #: the row certainly stands for one batch only
    one: bool


class _Rows:
    """The index rows of one table, searchable by offset."""

    def __init__(self, rows: pa.Table, places: NDArray[np.int64]) -> None:
        # A row without offsets may hold an operator's note; no ledger entry covers it.
        lengths = pc.subtract(rows["end_offset"].take(places), rows["start_offset"].take(places))
        places = places[np.asarray(lengths.combine_chunks()) != 0]
        table_rows = rows.take(places)
        self._ids, self._code = codes(table_rows["commit_id"])
        self.places = places
        self._one = np.asarray(table_rows["started_at"].is_valid().combine_chunks())
        spans = of_rows(table_rows)
        bounds = np.searchsorted(spans.key, np.arange(len(spans.partitions) + 1))
        self.parts = {
            partition: select(spans, slice(low, high))
            for partition, low, high in zip(spans.partitions, bounds, bounds[1:], strict=False)
        }

    def part(self, partition: Partition) -> RangeColumns:
        return self.parts.get(partition, _NOTHING)

    def owners(self, partition: Partition, entries: dict[str, int]) -> NDArray[np.int64]:
        """The entry that contains the batch of each row; -1: none."""
        known = np.array([entries.get(commit_id, -1) for commit_id in self._ids] or [-1], np.int64)
        return known[self._code[self.part(partition).source]]

    def within(self, partition: Partition, start: int, end: int) -> list[_Row]:
        """The rows that begin in [start, end), by offset."""
        part = self.part(partition)
        low, high = np.searchsorted(part.start, (start, end))
        return [
            _Row(
                int(self.places[part.source[i]]),
                Range(partition, int(part.start[i]), max(int(part.start[i]), int(part.end[i]))),
                OutcomeCounts(
                    **{outcome: int(getattr(part, outcome)[i]) for outcome in INDEXED_OUTCOMES}
                ),
                self._ids[self._code[part.source[i]]],
                bool(self._one[part.source[i]]),
            )
            for i in range(low, high)
        ]


_NOTHING = of_entries([])


def rebuild(ledgers: Sequence[LedgerHistory], rows: pa.Table, position: Cut) -> RebuiltRows:
    """The changes after which the index rows of one sink agree with its ledgers.

    `rows` has `COLUMNS`. `position` is that of the index: rows beyond it are left to the sink. With
    several tables, `ledgers` includes the ledger of the whole stream.
    """
    result = RebuiltRows()
    names, of = codes(rows["table_name"])
    tables = {name: _Rows(rows, np.flatnonzero(of == n)) for n, name in enumerate(names)}
    nothing = _Rows(rows, np.flatnonzero(of < 0))
    batches = _batches(rows)
    whole = [
        snapshot.summary
        for ledger in ledgers
        if ledger.table == STREAM
        for snapshot in ledger.snapshots
    ]
    single = {summary[_ID] for summary in whole if "," not in summary[_ID]}
    several = any(ledger.table == STREAM for ledger in ledgers)
    for ledger in sorted(ledgers, key=lambda ledger: ledger.table != STREAM):
        alone = ledger.table == STREAM or not several
        table_rows = tables.get(ledger.table, nothing)
        _LedgerRows(ledger, table_rows, tables, batches, single, alone, result).compare(position)
        if ledger.table == STREAM:  # with the new rows: they define the ranges of batches
            batches |= {batch.commit_id: batch.number for batch, _ in result.located}
            new = index.rows(result.located).select(rows.column_names).cast(rows.schema)
            kept = np.setdiff1d(table_rows.places, result.drop)
            places = np.append(kept, np.arange(len(rows), len(rows) + len(new)))
            tables[STREAM] = _Rows(pa.concat_tables([rows, new]), places)
    return result


def _batches(rows: pa.Table) -> dict[str, int]:
    """Commit id → batch number."""
    ids, code = codes(rows["commit_id"])
    distinct, first = np.unique(code, return_index=True)
    numbers = rows["batch"].take(first).to_pylist()
    return {ids[c]: number for c, number in zip(distinct.tolist(), numbers, strict=True)}


class _LedgerRows:
    """Compares a table's ledger with the index rows of that table."""

    def __init__(
        self,
        ledger: LedgerHistory,
        rows: _Rows,
        tables: Mapping[str, _Rows],
        batches: Mapping[str, int],
        single: Collection[str],
        alone: bool,
        result: RebuiltRows,
    ) -> None:
        """`alone`: every offset has a row of this table. `single`: commit ids of batches that the
        index committed alone."""
        self._ledger = ledger
        self._rows = rows
        self._tables = tables
        self._batches = batches
        self._single = single
        self._alone = alone
        self._rebuilt = result
        self._entries: dict[int, LedgerEntry] = {}
        self._files: Counter[tuple[int, int, Partition | None]] = Counter()
        for file in ledger.files:
            if named := _NAME.search(file.path):
                self._files[file.sequence, int(named[1]), file.partition] += file.rows

    def compare(self, position: Cut) -> None:
        summaries = [snapshot.summary for snapshot in self._ledger.snapshots]
        spans = of_entries(summaries)
        entry_of = {
            commit_id: number
            for number, summary in enumerate(summaries)
            for commit_id in summary[_ID].split(",")
        }
        for key, partition in enumerate(spans.partitions):
            expected = select(spans, (spans.key == key) & (spans.end > spans.start))
            if not len(expected):
                continue
            rows = self._rows.part(partition)
            low = np.searchsorted(rows.start, expected.start)
            high = np.searchsorted(rows.start, expected.end)
            differ = np.zeros(len(expected), bool)
            for outcome in ("length", *INDEXED_OUTCOMES):
                if outcome == "length" and partition == BATCHES and not self._alone:
                    continue  # the ledger does not record which batches had nothing for the table
                column = rows.end - rows.start if outcome == "length" else getattr(rows, outcome)
                sums = np.append(0, np.cumsum(column))
                wanted = getattr(
                    expected, outcome, expected.end - expected.start - expected.elsewhere
                )
                differ |= sums[high] - sums[low] != wanted
            # Rows that name another commit, extend beyond their entry, or overlap.
            owner = self._rows.owners(partition, entry_of)
            home = np.searchsorted(expected.start, rows.start, "right") - 1
            inside = (home >= 0) & (rows.start < expected.end[home])
            odd = inside & ((owner != expected.source[home]) | (rows.end > expected.end[home]))
            odd[1:] |= inside[1:] & (rows.start[1:] < rows.end[:-1])
            differ[home[odd]] = True
            differ &= expected.end <= position.get(partition, 0)
            for i in np.flatnonzero(differ):
                self._mend(int(expected.source[i]), partition)
            if self._alone:
                self._forgotten(partition, rows, int(expected.start[0]))

    def _forgotten(self, partition: Partition, rows: RangeColumns, since: int) -> None:
        """Report gaps from before the oldest remaining entry."""
        end = np.append(rows.start[:1], np.maximum.accumulate(rows.end))
        for covered, start in zip(end.tolist(), [*rows.start.tolist(), since], strict=False):
            if covered < start <= since:
                self._cannot(Range(partition, covered, start), "no snapshot that is left has it")

    def _mend(self, number: int, partition: Partition) -> None:
        """Correct the rows of one entry and partition."""
        entry = self._entries.get(number)
        if entry is None:
            entry = parse(self._ledger.snapshots[number].summary)
            assert entry is not None
            self._entries[number] = entry
        span = Range(partition, entry.begin[partition], entry.end[partition])
        wanted = entry.counts(partition)
        rows = self._rows.within(partition, span.start, span.end)
        if self._ledger.table == STREAM and not rows and self._once_alone(entry, span):
            return
        left = _less(wanted, rows)
        if self._agree(entry, span, rows, left):
            pieces = self._pieces(entry, span, rows)
            if pieces is not None and self._tell(number, entry, pieces, left):
                return
        # From the ledger alone; the remaining index rows are dropped.
        pieces = self._pieces(entry, span, [])
        if pieces is not None and self._tell(number, entry, pieces, _less(wanted, [])):
            self._rebuilt.drop += [row.place for row in rows]
        else:
            self._cannot(span, "which of its batches had how much of it is unknown")

    def _once_alone(self, entry: LedgerEntry, span: Range) -> bool:
        """Whether the entry had one table only, and that table's rows cover the whole range."""
        if isinstance(entry.tables, str) or len(entry.tables) != 1:
            return False
        table_rows = self._tables.get(next(iter(entry.tables)))
        rows = table_rows.within(span.partition, span.start, span.end) if table_rows else []
        left = _less(entry.counts(span.partition), rows)
        complete = sum(len(row.range) for row in rows) == len(span)
        return complete and left == OutcomeCounts() and self._agree(entry, span, rows, left)

    def _agree(
        self, entry: LedgerEntry, span: Range, rows: Sequence[_Row], left: OutcomeCounts
    ) -> bool:
        """Whether the rows are consistent with the ledger."""
        ends = [span.start, *(row.range.end for row in rows)]
        return (
            all(getattr(left, outcome) >= 0 for outcome in INDEXED_OUTCOMES)
            and all(row.commit_id in entry.commit_ids for row in rows)
            and len({row.commit_id for row in rows}) == len(rows)
            and all(row.range.start >= end for row, end in zip(rows, ends, strict=False))
            and ends[-1] <= span.end
            and all(RangeCounts.of(row.range, row.counts).balanced for row in rows)
        )

    def _pieces(
        self, entry: LedgerEntry, span: Range, rows: Sequence[_Row]
    ) -> list[tuple[Range, str]] | None:
        """Ranges without a row, each with the last batch that may have lost it; None if
        ambiguous."""
        present = [row.commit_id for row in rows]
        lost = [commit_id for commit_id in entry.commit_ids if commit_id not in present]
        if self._alone:
            pieces = []
            starts = [*(row.range.start for row in rows), span.end]
            ends = [span.start, *(row.range.end for row in rows)]
            at = [entry.commit_ids.index(commit_id) for commit_id in present]
            for start, end, after, before in zip(
                ends, starts, [-1, *at], [*at, len(entry.commit_ids)], strict=True
            ):
                if start < end:
                    between = [
                        commit_id
                        for commit_id in entry.commit_ids[after + 1 : before]
                        if commit_id in lost
                    ]
                    if not between:
                        return None
                    pieces.append((Range(span.partition, start, end), between[-1]))
            return pieces
        whole = self._tables[STREAM].within(span.partition, span.start, span.end)
        whole = [row for row in whole if row.commit_id in lost]
        if not all(row.one or row.commit_id in self._single for row in whole):
            return None
        return [(row.range, row.commit_id) for row in whole]

    def _tell(
        self,
        number: int,
        entry: LedgerEntry,
        pieces: Sequence[tuple[Range, str]],
        left: OutcomeCounts,
    ) -> bool:
        """Write rows for the remaining counts of an entry; False if these are ambiguous."""
        batches = [self._batch(entry, commit_id) for _, commit_id in pieces]
        if not pieces or None in batches:
            return False
        snapshot, partition = self._ledger.snapshots[number], pieces[0][0].partition
        length = sum(len(range_) for range_, _ in pieces)
        if partition != BATCHES and length != left.offsets:
            return False
        together = join(range_ for range_, _ in pieces)
        outcome_names = {outcome for outcome in INDEXED_OUTCOMES if getattr(left, outcome)}
        written = [self._written(snapshot, batch, partition) for batch in batches]
        parts: list[tuple[Range, str, int | None, OutcomeCounts]]
        if len(together) == 1:
            parts = [(together[0], pieces[-1][1], batches[-1], left)]
        elif partition == BATCHES:
            return False
        elif len(outcome_names) == 1:
            parts = [
                (range_, commit_id, batch, OutcomeCounts(**{min(outcome_names): len(range_)}))
                for (range_, commit_id), batch in zip(pieces, batches, strict=True)
            ]
        elif outcome_names == {"written", "skipped"} and sum(written) == left.written:
            parts = [
                (range_, commit_id, batch, OutcomeCounts(rows, skipped=len(range_) - rows))
                for (range_, commit_id), batch, rows in zip(pieces, batches, written, strict=True)
            ]
        else:
            return False
        sole = [together[0]] == entry.ranges
        for range_, commit_id, batch, counts in parts:
            tally = RangeCounts.of(range_, counts, entry.watermark if sole else None)
            self._write(snapshot, entry, batch or 0, commit_id, tally)
        return True

    def _written(self, snapshot: Snapshot, batch: int | None, partition: Partition) -> int:
        """The rows of a batch, by the data files of its commit."""
        return self._files.get((snapshot.sequence, batch or 0, partition), 0)

    def _write(
        self, snapshot: Snapshot, entry: LedgerEntry, batch: int, commit_id: str, tally: RangeCounts
    ) -> None:
        if self._ledger.table == STREAM:
            made = index.batch_of(entry, batch, commit_id, tables=(), total=(tally,))
        else:
            staged = StagedTable(self._ledger.table, self._ledger.uuid, 0, (), (), 0, 0, (tally,))
            made = index.batch_of(entry, batch, commit_id, tables=(staged,))
        self._rebuilt.located.append((made, {self._ledger.table: snapshot}))
        self._rebuilt.ranges.append(RebuiltRange(self._ledger.table, tally.range))

    def _batch(self, entry: LedgerEntry, commit_id: str) -> int | None:
        first, last = entry.batches
        at, many = entry.commit_ids.index(commit_id), len(entry.commit_ids)
        if commit_id in self._batches:
            return self._batches[commit_id]
        if many == last - first + 1:
            return first + at
        return last if at == many - 1 else first if at == 0 else None

    def _cannot(self, span: Range, why: str) -> None:
        self._rebuilt.unknown.append(UnknownRange(self._ledger.table, span, why))


def _less(counts: OutcomeCounts, rows: Sequence[_Row]) -> OutcomeCounts:
    """The counts minus those of the rows; `elsewhere` has no rows."""
    sums = {
        outcome: sum(getattr(row.counts, outcome) for row in rows) for outcome in INDEXED_OUTCOMES
    }
    return OutcomeCounts(
        **{outcome: getattr(counts, outcome) - sums[outcome] for outcome in INDEXED_OUTCOMES}
    )
