"""What the offset index tells of a sink's tables, in columns. Pure.

Rows come in, file by file; out come the ranges of each table, and whose they say that they are.
All rows of a batch name the same commit, so that is kept once, and a range says which one it is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from frazil.ledger.columns import (
    RangeColumns,
    by_partition,
    codes,
    narrow,
    numbers,
    select,
    sorted_rows,
    together,
)
from frazil.offsets import Partition, Range

#: What is read of the index.
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
    "min_offset",
    "max_offset",
    "epoch",
    "commit_id",
    "snapshot_id",
    "lost",
    "signed",
)
#: Whose a row says that it is.
_FACTS = ("snapshot_id", "batch", "epoch")


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The index's rows of one table. The `source` of a range is its place among the commits."""

    spans: RangeColumns
    commit_ids: tuple[str, ...] = ()
    snapshots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    batches: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    epochs: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    #: rows whose lowest and highest offset seen cannot be those of so many records
    strange: RangeColumns = field(default_factory=lambda: together([]))
    #: what persons did to the stream: of which range, and what they signed
    notes: tuple[tuple[Range, str], ...] = ()

    def __len__(self) -> int:
        return len(self.spans)


def of(rows: pa.Table) -> IndexRows:
    """Rows of one table."""
    return _together([_told(rows)])


def of_file(rows: pa.Table) -> list[tuple[str, IndexRows]]:
    """Rows of any tables, table by table; after this the rows are not needed any more."""
    return [(name, _told(mine)) for name, mine in _split(rows)]


def by_table(files: Iterable[Sequence[tuple[str, IndexRows]]]) -> dict[str, IndexRows]:
    """What several files tell."""
    found: dict[str, list[IndexRows]] = {}
    for name, told in chain.from_iterable(files):
        found.setdefault(name, []).append(told)
    return {name: _together(told) for name, told in found.items()}


def one(several: Sequence[IndexRows]) -> IndexRows:
    """All of them, as if they were of one table."""
    if not several:
        return NOTHING
    return several[0] if len(several) == 1 else _together(several)


def outside(told: IndexRows, whole: IndexRows) -> IndexRows:
    """Those rows that begin where no row of `whole` is, of lives of which it has none at all: a
    life that tells of the whole stream does so of each batch."""
    there = by_partition(whole.spans)
    silent = ~np.isin(told.epochs, whole.epochs)
    kept = []
    for spans in (told.spans, told.strange):
        masks = [np.ones(0, bool)]
        for partition, rows in by_partition(spans).items():
            mask = np.ones(len(rows), bool)
            if partition in there:
                at = np.searchsorted(there[partition].start, rows.start, "right") - 1
                reached = np.maximum.accumulate(there[partition].end)
                mask = (at < 0) | (rows.start >= reached[at])
            if len(silent):
                mask = mask & silent[rows.source]
            masks.append(mask)
        kept.append(select(spans, np.concatenate(masks)))
    spans = kept[0]
    starts = {key: set(rows.start.tolist()) for key, rows in by_partition(spans).items()}
    notes = [(r, note) for r, note in told.notes if r.start in starts.get(r.partition, ())]
    return replace(told, spans=spans, strange=kept[1], notes=tuple(notes))


def _split(file: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    names, code = codes(file["table_name"])
    if len(names) == 1:
        yield names[0], file
        return
    sorted_so = bool((code[1:] >= code[:-1]).all())
    for i, name in enumerate(names):
        if sorted_so:
            low, high = np.searchsorted(code, np.array([i, i + 1], code.dtype)).tolist()
            yield name, file.slice(low, high - low)
        else:
            yield name, file.take(np.flatnonzero(code == i))


def _told(rows: pa.Table) -> IndexRows:
    spans = sorted_rows(rows)
    notes = _notes(rows)
    strange = select(spans, np.empty(0, np.intp))
    if {"min_offset", "max_offset"} <= set(rows.column_names):
        low, high = (numbers(rows[each], -1)[spans.source] for each in ("min_offset", "max_offset"))
        read = spans.written + spans.rejected  # what a query skipped, nobody saw
        wrong = (low < spans.start) | (high >= spans.end) | (low > high) | (read > high - low + 1)
        wrong &= (low >= 0) | (high >= 0)
        strange = select(spans, np.flatnonzero(wrong))
    if not len(rows) or not {"commit_id", *_FACTS} <= set(rows.column_names):
        return IndexRows(narrow(spans), strange=strange, notes=notes)
    ids, code = codes(rows["commit_id"])
    facts = [numbers(rows[each]) for each in _FACTS]
    # The first row that names a commit speaks for the others, if they say the same.
    first = np.zeros(len(ids), np.intp)
    first[code[::-1]] = np.arange(len(rows))[::-1]
    same = np.ones(len(rows), bool)
    for each in facts:
        same &= each == each[first[code]]
    commit = code
    if not same.all():  # those that differ speak for themselves
        alone = np.flatnonzero(~same)
        commit = code.copy()
        commit[alone] = len(ids) + np.arange(len(alone))
        ids = [*ids, *(ids[each] for each in code[alone].tolist())]
        first = np.append(first, alone)
    spans, strange = (
        replace(each, source=commit[each.source].astype(np.int32)) for each in (spans, strange)
    )
    snapshots, batches, epochs = (each[first] for each in facts)
    return IndexRows(narrow(spans), tuple(ids), snapshots, batches, epochs, narrow(strange), notes)


def _notes(rows: pa.Table) -> tuple[tuple[Range, str], ...]:
    if "signed" not in rows.column_names or rows["signed"].null_count == len(rows):
        return ()
    noted = rows.filter(pc.is_valid(rows["signed"]))
    names = ("topic", "partition", "start_offset", "end_offset", "signed")
    return tuple(
        (Range(Partition(topic, number), start, max(start, end)), note)
        for topic, number, start, end, note in zip(
            *(noted[name].to_pylist() for name in names), strict=True
        )
    )


def _together(told: Sequence[IndexRows]) -> IndexRows:
    spans: list[RangeColumns] = []
    strange: list[RangeColumns] = []
    place = 0
    for each in told:
        for kept, into in ((each.spans, spans), (each.strange, strange)):
            into.append(replace(kept, source=kept.source + np.int32(place)))
        place += len(each.commit_ids)
    return IndexRows(
        together(spans, rising=True),
        tuple(one for each in told for one in each.commit_ids),
        np.concatenate([each.snapshots for each in told]),
        np.concatenate([each.batches for each in told]),
        np.concatenate([each.epochs for each in told]),
        together(strange, rising=True),
        tuple(note for each in told for note in each.notes),
    )


#: No rows at all.
NOTHING = IndexRows(together([]))
