"""What the ledgers tell and the index lacks. Pure: snapshots and rows in, rows out.

The ledger is the truth: an entry says what became of the offsets of its ranges, partition by
partition. The index must say the same, batch by batch. Where it does not, the rows of that entry
and partition are made to add up again:

- rows that are there and agree with the ledger as far as they go stay; what is missing to the
  entry's counts is told in a row for each range that has none;
- where that could be told in several ways (ranges of several batches are lost, with rows of others
  between them, and not all their offsets had the same fate), the rows left of the entry give way to
  one row for all of its range, as they do where they contradict the ledger;
- a table among several has no row of a batch that held nothing for it. Which ranges those are, the
  rows of the whole stream say; and how much of which batch was written, as long as they were not
  compacted, its data files: their names tell the batch. Where that does not tell it clearly,
  nothing is written, and the range is named.

A row that was written anew stands for all batches of its commit that have lost theirs, and has the
number of the last one; that it has no `window_start` tells it apart. What no snapshot tells any
more cannot be told here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from frazil.iceberg.static_table import DataFile
from frazil.ledger import index
from frazil.ledger.columns import TOLD, RangeColumns, codes, of_entries, of_rows, select
from frazil.ledger.entry import PREFIX, LedgerEntry, OutcomeCounts, Snapshot, parse
from frazil.ledger.index import Located
from frazil.ledger.sink_state import STREAM
from frazil.ledger.staged_batch import RangeCounts, StagedBatch, StagedTable
from frazil.offsets import BATCHES, Cut, Partition, Range, join

#: What must be read of the index's rows of one sink.
COLUMNS = (
    "batch",
    "table_name",
    "topic",
    "partition",
    "start_offset",
    "end_offset",
    "written",
    "rejected",
    "skipped",
    "invisible",
    "merged",
    "lost",
    "window_start",
    "commit_id",
)
_ID = f"{PREFIX}commit-id"
#: The batch in a data file's name.
_NAME = re.compile(r"/frazil-.+-\d+-(\d+)-[0-9a-f-]{36}\.parquet$")
#: The fates that rows of the index have columns for.
_FATES = TOLD


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """One sink's ledger in one table; in the index itself it is that of the whole stream."""

    table: str
    uuid: str
    #: those with an entry of the sink, oldest first
    snapshots: Sequence[Snapshot]
    #: the table's live data files
    files: Sequence[DataFile] = ()


@dataclass(slots=True)
class RebuiltRows:
    """What is to be done to the index."""

    located: list[Located] = field(default_factory=list)
    #: places of rows that give way
    drop: list[int] = field(default_factory=list)
    #: what is told anew; what cannot be told, and why
    ranges: list[tuple[str, Range]] = field(default_factory=list)
    unknown: list[tuple[str, Range, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    place: int
    range: Range
    counts: OutcomeCounts
    commit_id: str
    #: of one batch for certain
    one: bool


class _Rows:
    """The index's rows of one table, to be asked for by offsets."""

    def __init__(self, rows: pa.Table, places: NDArray[np.int64]) -> None:
        # What a person did may stand in a row of no offsets: no entry tells of those.
        lengths = pc.subtract(rows["end_offset"].take(places), rows["start_offset"].take(places))
        places = places[np.asarray(lengths.combine_chunks()) != 0]
        mine = rows.take(places)
        self._ids, self._code = codes(mine["commit_id"])
        self.places = places
        self._one = np.asarray(mine["window_start"].is_valid().combine_chunks())
        spans = of_rows(mine)
        bounds = np.searchsorted(spans.key, np.arange(len(spans.partitions) + 1))
        self.parts = {
            partition: select(spans, slice(low, high))
            for partition, low, high in zip(spans.partitions, bounds, bounds[1:], strict=False)
        }

    def part(self, partition: Partition) -> RangeColumns:
        return self.parts.get(partition, _NOTHING)

    def owners(self, partition: Partition, entries: dict[str, int]) -> NDArray[np.int64]:
        """Which entry has the batch of each row; -1: none."""
        known = np.array([entries.get(each, -1) for each in self._ids] or [-1], np.int64)
        return known[self._code[self.part(partition).source]]

    def within(self, partition: Partition, start: int, end: int) -> list[_Row]:
        """Those that begin there, by their offsets."""
        part = self.part(partition)
        low, high = np.searchsorted(part.start, (start, end))
        return [
            _Row(
                int(self.places[part.source[i]]),
                Range(partition, int(part.start[i]), max(int(part.start[i]), int(part.end[i]))),
                OutcomeCounts(**{fate: int(getattr(part, fate)[i]) for fate in _FATES}),
                self._ids[self._code[part.source[i]]],
                bool(self._one[part.source[i]]),
            )
            for i in range(low, high)
        ]


_NOTHING = of_entries([])


def rebuild(told: Sequence[LedgerHistory], rows: pa.Table, position: Cut) -> RebuiltRows:
    """`rows`: the index's of one sink (`COLUMNS`); `position`: where the index stands. Beyond it
    rows are for the sink to write. `told`: of a sink with several tables also the whole stream."""
    found = RebuiltRows()
    names, of = codes(rows["table_name"])
    tables = {name: _Rows(rows, np.flatnonzero(of == n)) for n, name in enumerate(names)}
    nothing = _Rows(rows, np.flatnonzero(of < 0))
    batches = _batches(rows)
    whole = [each.summary for table in told if table.table == STREAM for each in table.snapshots]
    single = {each[_ID] for each in whole if "," not in each[_ID]}
    several = any(each.table == STREAM for each in told)
    for each in sorted(told, key=lambda each: each.table != STREAM):
        alone = each.table == STREAM or not several
        mine = tables.get(each.table, nothing)
        _LedgerRows(each, mine, tables, batches, single, alone, found).compare(position)
        if each.table == STREAM:  # as they will be: they say what batches span
            batches |= {batch.commit_id: batch.number for batch, _ in found.located}
            new = index.rows(found.located).select(rows.column_names).cast(rows.schema)
            kept = np.setdiff1d(mine.places, found.drop)
            places = np.append(kept, np.arange(len(rows), len(rows) + len(new)))
            tables[STREAM] = _Rows(pa.concat_tables([rows, new]), places)
    return found


def _batches(rows: pa.Table) -> dict[str, int]:
    """Commit id → batch number."""
    ids, code = codes(rows["commit_id"])
    there, first = np.unique(code, return_index=True)
    numbers = rows["batch"].take(first).to_pylist()
    return {ids[c]: number for c, number in zip(there.tolist(), numbers, strict=True)}


class _LedgerRows:
    """A table's ledger against the index's rows of that table."""

    def __init__(
        self,
        told: LedgerHistory,
        rows: _Rows,
        tables: Mapping[str, _Rows],
        batches: Mapping[str, int],
        single: Collection[str],
        alone: bool,
        found: RebuiltRows,
    ) -> None:
        """`alone`: every offset has a row of this table. `single`: batches that the index has in a
        commit of their own."""
        self._told = told
        self._rows = rows
        self._tables = tables
        self._batches = batches
        self._single = single
        self._alone = alone
        self._found = found
        self._entries: dict[int, LedgerEntry] = {}
        self._files: Counter[tuple[int, int, Partition | None]] = Counter()
        for file in told.files:
            if named := _NAME.search(file.path):
                self._files[file.sequence, int(named[1]), file.partition] += file.rows

    def compare(self, position: Cut) -> None:
        summaries = [each.summary for each in self._told.snapshots]
        spans = of_entries(summaries)
        entry_of = {
            commit_id: number
            for number, summary in enumerate(summaries)
            for commit_id in summary[_ID].split(",")
        }
        for key, partition in enumerate(spans.partitions):
            mine = select(spans, (spans.key == key) & (spans.end > spans.start))
            if not len(mine):
                continue
            rows = self._rows.part(partition)
            low = np.searchsorted(rows.start, mine.start)
            high = np.searchsorted(rows.start, mine.end)
            differ = np.zeros(len(mine), bool)
            for fate in ("length", *_FATES):
                if fate == "length" and partition == BATCHES and not self._alone:
                    continue  # which batches held nothing for the table, its ledger does not say
                column = rows.end - rows.start if fate == "length" else getattr(rows, fate)
                sums = np.append(0, np.cumsum(column))
                wanted = getattr(mine, fate, mine.end - mine.start - mine.elsewhere)
                differ |= sums[high] - sums[low] != wanted
            # Rows that name another commit, reach beyond their entry, or into each other.
            owner = self._rows.owners(partition, entry_of)
            home = np.searchsorted(mine.start, rows.start, "right") - 1
            inside = (home >= 0) & (rows.start < mine.end[home])
            odd = inside & ((owner != mine.source[home]) | (rows.end > mine.end[home]))
            odd[1:] |= inside[1:] & (rows.start[1:] < rows.end[:-1])
            differ[home[odd]] = True
            differ &= mine.end <= position.get(partition, 0)
            for i in np.flatnonzero(differ):
                self._mend(int(mine.source[i]), partition)
            if self._alone:
                self._forgotten(partition, rows, int(mine.start[0]))

    def _forgotten(self, partition: Partition, rows: RangeColumns, since: int) -> None:
        """Holes from before the oldest entry left."""
        end = np.append(rows.start[:1], np.maximum.accumulate(rows.end))
        for here, start in zip(end.tolist(), [*rows.start.tolist(), since], strict=False):
            if here < start <= since:
                self._cannot(Range(partition, here, start), "no snapshot tells of it any more")

    def _mend(self, number: int, partition: Partition) -> None:
        """One entry, one partition."""
        entry = self._entries.get(number)
        if entry is None:
            entry = parse(self._told.snapshots[number].summary)
            assert entry is not None
            self._entries[number] = entry
        span = Range(partition, entry.begin[partition], entry.end[partition])
        wanted = entry.counts(partition)
        mine = self._rows.within(partition, span.start, span.end)
        if self._told.table == STREAM and not mine and self._once_alone(entry, span):
            return
        left = _less(wanted, mine)
        if self._agree(entry, span, mine, left):
            pieces = self._pieces(entry, span, mine)
            if pieces is not None and self._tell(number, entry, pieces, left):
                return
        # As the ledger tells it, and without what is left of it in the index.
        pieces = self._pieces(entry, span, [])
        if pieces is not None and self._tell(number, entry, pieces, _less(wanted, [])):
            self._found.drop += [each.place for each in mine]
        else:
            self._cannot(span, "which of its batches had how much of it cannot be told apart")

    def _once_alone(self, entry: LedgerEntry, span: Range) -> bool:
        """From a time when there was one table: its rows tell of the whole stream."""
        if isinstance(entry.tables, str) or len(entry.tables) != 1:
            return False
        rows = self._tables.get(next(iter(entry.tables)))
        mine = rows.within(span.partition, span.start, span.end) if rows else []
        left = _less(entry.counts(span.partition), mine)
        told = sum(len(each.range) for each in mine) == len(span)
        return told and left == OutcomeCounts() and self._agree(entry, span, mine, left)

    def _agree(
        self, entry: LedgerEntry, span: Range, mine: Sequence[_Row], left: OutcomeCounts
    ) -> bool:
        """Do the rows that are there say nothing else than the ledger?"""
        ends = [span.start, *(each.range.end for each in mine)]
        return (
            all(getattr(left, fate) >= 0 for fate in _FATES)
            and all(each.commit_id in entry.commit_ids for each in mine)
            and len({each.commit_id for each in mine}) == len(mine)
            and all(each.range.start >= end for each, end in zip(mine, ends, strict=False))
            and ends[-1] <= span.end
            and all(_tally(each.range, each.counts).balanced for each in mine)
        )

    def _pieces(
        self, entry: LedgerEntry, span: Range, mine: Sequence[_Row]
    ) -> list[tuple[Range, str]] | None:
        """Ranges without a row, each with the last batch that may have lost it; None where that
        cannot be told."""
        there = [each.commit_id for each in mine]
        lost = [each for each in entry.commit_ids if each not in there]
        if self._alone:
            found = []
            starts = [*(each.range.start for each in mine), span.end]
            ends = [span.start, *(each.range.end for each in mine)]
            at = [entry.commit_ids.index(each) for each in there]
            for start, end, after, before in zip(
                ends, starts, [-1, *at], [*at, len(entry.commit_ids)], strict=True
            ):
                if start < end:
                    between = [
                        each for each in entry.commit_ids[after + 1 : before] if each in lost
                    ]
                    if not between:
                        return None
                    found.append((Range(span.partition, start, end), between[-1]))
            return found
        whole = self._tables[STREAM].within(span.partition, span.start, span.end)
        whole = [each for each in whole if each.commit_id in lost]
        if not all(each.one or each.commit_id in self._single for each in whole):
            return None
        return [(each.range, each.commit_id) for each in whole]

    def _tell(
        self,
        number: int,
        entry: LedgerEntry,
        pieces: Sequence[tuple[Range, str]],
        left: OutcomeCounts,
    ) -> bool:
        """Write down what is left to tell of an entry; False where it could be told otherwise."""
        batches = [self._batch(entry, commit_id) for _, commit_id in pieces]
        if not pieces or None in batches:
            return False
        snapshot, partition = self._told.snapshots[number], pieces[0][0].partition
        length = sum(len(each) for each, _ in pieces)
        if partition != BATCHES and length != left.offsets:
            return False
        together = join(each for each, _ in pieces)
        fates = {fate for fate in _FATES if getattr(left, fate)}
        written = [self._written(snapshot, batch, partition) for batch in batches]
        told: list[tuple[Range, str, int | None, OutcomeCounts]]
        if len(together) == 1:
            told = [(together[0], pieces[-1][1], batches[-1], left)]
        elif partition == BATCHES:
            return False
        elif len(fates) == 1:
            told = [
                (each, commit_id, batch, OutcomeCounts(**{min(fates): len(each)}))
                for (each, commit_id), batch in zip(pieces, batches, strict=True)
            ]
        elif fates == {"written", "skipped"} and sum(written) == left.written:
            told = [
                (each, commit_id, batch, OutcomeCounts(rows, skipped=len(each) - rows))
                for (each, commit_id), batch, rows in zip(pieces, batches, written, strict=True)
            ]
        else:
            return False
        sole = [together[0]] == entry.ranges
        for each, commit_id, batch, counts in told:
            tally = _tally(each, counts, entry.watermark if sole else None)
            self._write(snapshot, entry, batch or 0, commit_id, tally)
        return True

    def _written(self, snapshot: Snapshot, batch: int | None, partition: Partition) -> int:
        """The rows of a batch, by the data files that its commit brought."""
        return self._files.get((snapshot.sequence, batch or 0, partition), 0)

    def _write(
        self, snapshot: Snapshot, entry: LedgerEntry, batch: int, commit_id: str, tally: RangeCounts
    ) -> None:
        staged = StagedTable(self._told.table, self._told.uuid, 0, (), (), 0, 0, (tally,))
        stream = self._told.table == STREAM
        made = StagedBatch(
            sink=entry.sink,
            epoch=entry.epoch,
            number=batch,
            commit_id=commit_id,
            begin=entry.begin,
            end=entry.end,
            topics=entry.topics,
            cluster=entry.cluster,
            staged_at_ms=0,
            window_start_ms=0,
            source=entry.source,
            note=entry.note,
            leaders=entry.leaders,
            tables=() if stream else (staged,),
            total=(tally,) if stream else (),
        )
        self._found.located.append((made, {self._told.table: snapshot}))
        self._found.ranges.append((self._told.table, tally.range))

    def _batch(self, entry: LedgerEntry, commit_id: str) -> int | None:
        first, last = entry.batches
        at, many = entry.commit_ids.index(commit_id), len(entry.commit_ids)
        if commit_id in self._batches:
            return self._batches[commit_id]
        if many == last - first + 1:
            return first + at
        return last if at == many - 1 else first if at == 0 else None

    def _cannot(self, what: Range, why: str) -> None:
        self._found.unknown.append((self._told.table, what, why))


def _less(counts: OutcomeCounts, rows: Sequence[_Row]) -> OutcomeCounts:
    """What rows leave to be told; `elsewhere` has no rows."""
    sums = {fate: sum(getattr(each.counts, fate) for each in rows) for fate in _FATES}
    return OutcomeCounts(**{fate: getattr(counts, fate) - sums[fate] for fate in _FATES})


def _tally(
    range: Range, counts: OutcomeCounts, watermark: tuple[int, int] | None = None
) -> RangeCounts:
    return RangeCounts(
        range,
        counts.written,
        counts.rejected,
        counts.skipped,
        counts.invisible,
        counts.merged,
        watermark=watermark,
        lost=counts.lost,
    )
