"""The rows of the offset index, in columns by table. Pure.

Rows come in file by file; out come the ranges of each table and the commits they name. All rows of
a batch name the same commit, so it is kept once, and each range has the number of its commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from frazil.ledger.range_columns import (
    INDEXED_OUTCOMES,
    RANGE_COLUMNS,
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

#: Columns read from the index.
COLUMNS = (
    *(*RANGE_COLUMNS, *INDEXED_OUTCOMES, "min_offset", "max_offset", "epoch", "commit_id"),
    *("snapshot_id", "operator_note"),
)
#: Columns that are the same in all rows of a commit.
_FACTS = ("snapshot_id", "batch", "epoch")


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The index rows of one table. `source` of a range is the index of its commit."""

    spans: RangeColumns
    commit_ids: tuple[str, ...] = ()
    snapshots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    batches: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    epochs: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    #: rows whose lowest and highest offset contradict the range or the number of records
    strange: RangeColumns = field(default_factory=lambda: together([]))
    #: operators' notes, with the range of each
    notes: tuple[tuple[Range, str], ...] = ()

    def __len__(self) -> int:
        return len(self.spans)


def of_file(rows: pa.Table) -> list[tuple[str, IndexRows]]:
    """Rows of any tables, by table. The result does not refer to `rows`."""
    return [(name, _parsed(part)) for name, part in _split(rows)]


def by_table(files: Iterable[Sequence[tuple[str, IndexRows]]]) -> dict[str, IndexRows]:
    """The rows of several files, by table."""
    tables: dict[str, list[IndexRows]] = {}
    for name, rows in chain.from_iterable(files):
        tables.setdefault(name, []).append(rows)
    return {name: _together(parts) for name, parts in tables.items()}


def one(several: Sequence[IndexRows]) -> IndexRows:
    """All rows, as if they were of one table."""
    if not several:
        return NOTHING
    return several[0] if len(several) == 1 else _together(several)


def outside(rows: IndexRows, whole: IndexRows) -> IndexRows:
    """Per-table rows that no `*` row of `whole` covers, from epochs that wrote no `*` rows. An
    epoch that writes `*` rows writes one for every batch."""
    covered = by_partition(whole.spans)
    silent = ~np.isin(rows.epochs, whole.epochs)
    kept = []
    for spans in (rows.spans, rows.strange):
        masks = [np.ones(0, bool)]
        for partition, part in by_partition(spans).items():
            mask = np.ones(len(part), bool)
            if partition in covered:
                at = np.searchsorted(covered[partition].start, part.start, "right") - 1
                reached = np.maximum.accumulate(covered[partition].end)
                mask = (at < 0) | (part.start >= reached[at])
            if len(silent):
                mask = mask & silent[part.source]
            masks.append(mask)
        kept.append(select(spans, np.concatenate(masks)))
    spans = kept[0]
    starts = {key: set(part.start.tolist()) for key, part in by_partition(spans).items()}
    notes = [(r, note) for r, note in rows.notes if r.start in starts.get(r.partition, ())]
    return replace(rows, spans=spans, strange=kept[1], notes=tuple(notes))


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


def _parsed(rows: pa.Table) -> IndexRows:
    spans = sorted_rows(rows)
    notes = _notes(rows)
    strange = select(spans, np.empty(0, np.intp))
    if {"min_offset", "max_offset"} <= set(rows.column_names):
        low, high = (numbers(rows[name], -1)[spans.source] for name in ("min_offset", "max_offset"))
        read = spans.written + spans.rejected  # a query does not report the skipped ones
        wrong = (low < spans.start) | (high >= spans.end) | (low > high) | (read > high - low + 1)
        wrong &= (low >= 0) | (high >= 0)
        strange = select(spans, np.flatnonzero(wrong))
    if not len(rows) or not {"commit_id", *_FACTS} <= set(rows.column_names):
        return IndexRows(narrow(spans), strange=strange, notes=notes)
    ids, code = codes(rows["commit_id"])
    facts = [numbers(rows[name]) for name in _FACTS]
    # The first row of a commit stands for the other rows with the same values.
    first = np.zeros(len(ids), np.intp)
    first[code[::-1]] = np.arange(len(rows))[::-1]
    same = np.ones(len(rows), bool)
    for fact in facts:
        same &= fact == fact[first[code]]
    commit = code
    if not same.all():  # rows that differ get a commit of their own
        alone = np.flatnonzero(~same)
        commit = code.copy()
        commit[alone] = len(ids) + np.arange(len(alone))
        ids = [*ids, *(ids[i] for i in code[alone].tolist())]
        first = np.append(first, alone)
    spans, strange = (
        replace(part, source=commit[part.source].astype(np.int32)) for part in (spans, strange)
    )
    snapshots, batches, epochs = (fact[first] for fact in facts)
    return IndexRows(narrow(spans), tuple(ids), snapshots, batches, epochs, narrow(strange), notes)


def _notes(rows: pa.Table) -> tuple[tuple[Range, str], ...]:
    if "operator_note" not in rows.column_names or rows["operator_note"].null_count == len(rows):
        return ()
    noted = rows.filter(pc.is_valid(rows["operator_note"]))
    names = ("topic", "partition", "start_offset", "end_offset", "operator_note")
    return tuple(
        (Range(Partition(topic, number), start, max(start, end)), note)
        for topic, number, start, end, note in zip(
            *(noted[name].to_pylist() for name in names), strict=True
        )
    )


def _together(several: Sequence[IndexRows]) -> IndexRows:
    spans: list[RangeColumns] = []
    strange: list[RangeColumns] = []
    place = 0
    for rows in several:
        for kept, into in ((rows.spans, spans), (rows.strange, strange)):
            into.append(replace(kept, source=kept.source + np.int32(place)))
        place += len(rows.commit_ids)
    return IndexRows(
        together(spans, rising=True),
        tuple(commit_id for rows in several for commit_id in rows.commit_ids),
        np.concatenate([rows.snapshots for rows in several]),
        np.concatenate([rows.batches for rows in several]),
        np.concatenate([rows.epochs for rows in several]),
        together(strange, rising=True),
        tuple(note for rows in several for note in rows.notes),
    )


#: No rows at all.
NOTHING = IndexRows(together([]))
