"""Ranges and their outcomes in columns, for the audit. Pure.

A ledger of 100,000 entries over 100 partitions holds ten million ranges, and so does its index.
Both are converted to the same few columns, without a Python object per range. `entry.parse` defines
the meaning of an entry; a test compares the two.

Allocating memory is the main cost. Large inputs are read in pieces whose buffers are reused, and
only the result is copied, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from frazil.accounting import OUTCOME_NAMES
from frazil.errors import Fatal
from frazil.format_version import KEY
from frazil.ledger.entry import PREFIX, VERSION, base_of, parse, partitions_of
from frazil.ledger.packing import Numbers, PackedVectors, TopicNames
from frazil.offsets import BATCHES, Partition

#: Columns of the index that identify a row: its batch, table and range.
RANGE_COLUMNS = ("batch", "table_name", "topic", "partition", "start_offset", "end_offset")
#: The outcomes in index rows: a batch without records for a table has no row there.
INDEXED_OUTCOMES = tuple(name for name in OUTCOME_NAMES if name != "elsewhere")
#: Entries read together.
_ENTRIES = 8192


@dataclass(frozen=True, slots=True)
class RangeColumns:
    """One element per range, by partition: ranges of entries in commit order, ranges of index rows
    in offset order.

    `key` is the number of the partition in sorted `partitions`; `source` the number of the entry or
    row. Outcome counts have 64 bits, or fewer if the outcomes of one range cannot overflow when
    added; `sum` and `cumsum` widen them.
    """

    partitions: tuple[Partition, ...]
    key: Numbers
    source: Numbers
    start: Numbers
    end: Numbers
    written: Numbers
    rejected: Numbers
    skipped: Numbers
    invisible: Numbers
    merged: Numbers
    elsewhere: Numbers
    lost: Numbers

    def __len__(self) -> int:
        return len(self.key)

    def outcomes(self) -> list[Numbers]:
        return [getattr(self, name) for name in OUTCOME_NAMES]


def of_entries(summaries: Sequence[Mapping[str, str]]) -> RangeColumns:
    """Columns of one sink's snapshot summaries in a table, oldest first.

    The values equal `begin`, `end` and `counts(partition)` of `entry.parse(summary)`.
    """
    try:
        places = range(0, len(summaries) or 1, _ENTRIES)
        return together(_entries(summaries[at : at + _ENTRIES], at) for at in places)
    except (KeyError, ValueError, TypeError, OverflowError, AttributeError) as error:
        for summary in summaries:  # raises the error of the unreadable entry
            parse(summary)
        raise Fatal(f"cannot read the ledger: {error!r}") from None


def of_rows(rows: pa.Table | Iterable[pa.Table]) -> RangeColumns:
    """Columns of index rows: `topic`, `partition`, `start_offset`, `end_offset` and the outcomes.

    Fast if rows are sorted, or come file by file as the sink writes its index; an iterable of files
    also saves memory. An outcome without a column (`elsewhere`) counts as 0.
    """
    if isinstance(rows, pa.Table):
        pieces = _rows(pa.Table.from_batches([batch]) for batch in rows.to_batches())
    else:
        pieces = map(narrow, _rows(rows))
    return together(pieces, rising=True)


def by_partition(spans: RangeColumns) -> dict[Partition, RangeColumns]:
    return {where: select(spans, slice(low, high)) for where, low, high in _bounds(spans)}


def select(spans: RangeColumns, chosen: NDArray[Any] | slice) -> RangeColumns:
    """Elements chosen by a mask, indices or a slice; the partitions keep their keys."""
    key = spans.key[chosen]
    columns = [getattr(spans, field.name) for field in fields(RangeColumns)[2:]]
    return RangeColumns(
        spans.partitions,
        key,
        *(column[chosen] if column.strides[0] else _none(len(key)) for column in columns),
    )


def _bounds(spans: RangeColumns) -> Iterator[tuple[Partition, int, int]]:
    """Partition, first index and end index of its elements."""
    wanted = np.arange(len(spans.partitions) + 1, dtype=spans.key.dtype)
    bounds = np.searchsorted(spans.key, wanted).tolist()
    for partition, (low, high) in zip(spans.partitions, pairwise(bounds), strict=True):
        if low < high:
            yield partition, low, high


# ── concatenating pieces ─────────────────────────────────────────────────────────────────────────


def together(pieces: Iterable[RangeColumns], rising: bool = False) -> RangeColumns:
    """Concatenates the pieces by partition; `rising`: in offset order."""
    chunks = list(pieces)
    if len(chunks) == 1 and not any(map(_is_small, chunks[0].outcomes())):
        return chunks[0]
    runs: dict[Partition, list[tuple[int, int, slice]]] = {}
    for i, chunk in enumerate(chunks):
        for partition, low, high in _bounds(chunk):
            runs.setdefault(partition, []).append((int(chunk.start[low]), i, slice(low, high)))
    partitions = tuple(sorted(runs))
    if rising:
        for group in runs.values():
            group.sort(key=lambda run: run[:2])
    ordered = [(i, run) for partition in partitions for _, i, run in runs[partition]]
    lengths = [
        sum(run.stop - run.start for _, _, run in runs[partition]) for partition in partitions
    ]
    key = np.repeat(np.arange(len(partitions), dtype=np.int32), lengths)
    columns: list[Numbers] = []
    for name in (field.name for field in fields(RangeColumns)[2:]):
        parts = [getattr(chunk, name) for chunk in chunks]
        if any(part.strides[0] for part in parts):
            # Sums of 16-bit numbers fit into 32 bits.
            small = all(_is_small(part) or not part.strides[0] for part in parts)
            kind = np.int32 if small or name == "source" else np.int64
            columns.append(np.concatenate([parts[i][run] for i, run in ordered], dtype=kind))
        else:
            columns.append(_none(len(key)))
    spans = RangeColumns(partitions, key, *columns)
    if rising:
        # Overlapping files: duplicate rows, or rows that were never sorted.
        falls = spans.start[1:] < spans.start[:-1]
        if (falls & (key[1:] == key[:-1])).any():
            return select(spans, np.lexsort((spans.start, key)))
    return spans


def narrow(spans: RangeColumns) -> RangeColumns:
    """A compact copy that does not share memory with its input."""
    own = [+column for column in (spans.source, spans.start, spans.end)]
    return RangeColumns(spans.partitions, spans.key, *own, *map(_small, spans.outcomes()))


def _small(column: Numbers) -> Numbers:
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    if low == high == 0:
        return _none(len(column))
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low <= high <= np.iinfo(kind).max:
            return column.astype(kind)
    return +column


def _is_small(column: Numbers) -> bool:
    return column.dtype.itemsize < 4


def _none(count: int) -> Numbers:
    """`count` zeros with stride 0, which take no memory."""
    return np.broadcast_to(np.int64(0), count)


# ── ledger entries ───────────────────────────────────────────────────────────────────────────────


def _entries(summaries: Sequence[Mapping[str, str]], place: int) -> RangeColumns:
    names = TopicNames()
    ranges, packed, remainder = (PackedVectors(names) for _ in range(3))
    rows = np.zeros(len(summaries), np.int64)
    for i, summary in enumerate(summaries):
        if summary[KEY] != VERSION:
            raise ValueError(summary[KEY])
        parts, _ = partitions_of(summary)
        block = names.block(parts) if parts else None
        ranges.add(i, summary[PREFIX + "ranges"], block, base_of(summary, len(parts))[0])
        width = 0
        if (text := summary.get(PREFIX + "outcomes")) is not None:
            width = packed.add(i, text, block)
        text = summary.get(PREFIX + "remainder")
        if text is not None and (remainder.add(i, text, block) != width or not width):
            raise ValueError("other outcomes are the remainder than there are counts of")
        if (text := summary.get(PREFIX + "rows-without-offset")) is not None:
            rows[i] = int(text)
    if ranges.widths - {2} or max(packed.widths, default=0) >= len(OUTCOME_NAMES):
        raise ValueError("more or fewer numbers than there are names for")
    entry, key, start, end = ranges.columns(2)
    partitions, ranks = names.ranks()
    key = ranks[key]
    # 16-bit numbers are radix-sorted.
    order = np.argsort(
        key.astype(np.uint16 if len(partitions) <= 1 << 16 else np.int32), kind="stable"
    )
    if (entry[1:] < entry[:-1]).any():  # readable and packed entries are mixed
        order = np.lexsort((entry, key))
    key, entry, start, end = (column[order] for column in (key, entry, start, end))
    outcomes = _aligned(packed, ranks, entry, key, len(summaries))
    marks = _aligned(remainder, ranks, entry, key, len(summaries))
    _restore(outcomes, marks, end - start)
    written = end - start
    for outcome in outcomes:
        if outcome.strides[0]:
            written -= outcome
    if BATCHES in partitions:
        mask = key == partitions.index(BATCHES)
        written[mask] = rows[entry[mask]]
        outcomes = [np.where(mask, 0, column) for column in outcomes]
    return narrow(
        RangeColumns(partitions, key, entry + np.int32(place), start, end, written, *outcomes)
    )


def _aligned(
    vectors: PackedVectors, ranks: Numbers, entry: Numbers, key: Numbers, entries: int
) -> list[Numbers]:
    """One column per outcome except `written`; 0 if an entry has no number for a partition."""
    columns = [_none(len(key)) for _ in OUTCOME_NAMES[1:]]
    # Only as many columns as some entry has: most entries omit the last outcomes.
    of, whose, *counts = vectors.columns(max(vectors.widths, default=0))
    if not len(of):
        return columns
    # (partition, entry) as one number with the same order.
    at = ranks[whose].astype(np.int64) * entries + of
    if len(key) < entries * len(ranks):  # some entries lack some partitions
        known = key.astype(np.int64) * entries + entry
        to = np.minimum(np.searchsorted(known, at), len(key) - 1)
        present = known[to] == at
        at, counts = to[present], [column[present] for column in counts]
    for i, numbers in enumerate(counts):
        if numbers.any():
            columns[i] = np.zeros(len(key), np.int64)
            columns[i][at] = numbers
    return columns


def _restore(
    outcomes: list[Numbers], marks: Sequence[Numbers], remainder: NDArray[np.int64]
) -> None:
    """Restore the counts that were stored as the remainder of a range. `remainder`: the lengths;
    modified."""
    marked = [i for i, mark in enumerate(marks) if mark.strides[0]]
    if not marked:
        return
    for outcome in outcomes:
        if outcome.strides[0]:
            remainder -= outcome
    table = np.stack([marks[i] for i in marked])
    if table.min() < 0 or table.sum(axis=0).max() > 1:
        raise ValueError("expected at most one outcome of a range as its remainder")
    for i in marked:
        outcomes[i] = np.where(marks[i] != 0, remainder, outcomes[i])


# ── index rows ───────────────────────────────────────────────────────────────────────────────────


def _rows(tables: Iterable[pa.Table]) -> Iterator[RangeColumns]:
    """Each table separately, sorted by partition and offset."""
    place = 0
    for table in tables:
        yield sorted_rows(table, place)
        place += len(table)


def sorted_rows(rows: pa.Table, place: int = 0) -> RangeColumns:
    """Rows sorted by partition and offset; `place`: number of the first row."""
    topics, code = codes(rows["topic"])
    ranked = sorted(topics)
    rank = np.array([ranked.index(name) for name in topics], np.int64)
    number, start = numbers(rows["partition"]), numbers(rows["start_offset"])
    breaks = number[1:] != number[:-1]
    if len(topics) > 1:
        breaks |= code[1:] != code[:-1]
    firsts = np.append(0, np.flatnonzero(breaks) + 1)[: len(rows)]
    # (topic, partition) of a run as one number with the same order.
    whose = number[firsts] + (rank[code[firsts]] << 32 if topics else 0)
    keys, key = np.unique(whose, return_inverse=True)
    spans = RangeColumns(
        tuple(
            Partition(ranked[combined >> 32], combined & 0xFFFFFFFF) for combined in keys.tolist()
        ),
        np.repeat(key.astype(np.int32), np.diff(np.append(firsts, len(rows)))),
        np.arange(place, place + len(rows), dtype=np.int32),
        start,
        numbers(rows["end_offset"]),
        *(
            numbers(rows[name]) if name in rows.column_names else _none(len(rows))
            for name in OUTCOME_NAMES
        ),
    )
    breaks |= start[1:] >= start[:-1]
    if breaks.all() and (key[1:] > key[:-1]).all():
        return spans
    return select(spans, np.lexsort((start, spans.key)))


def numbers(column: pa.ChunkedArray, none: int = 0) -> NDArray[Any]:
    """A column of integers, with `none` for null. Not copied if it is a single chunk without nulls.

    (Arrow's own `to_numpy` imports pandas first, which takes longer than a small audit.)
    """
    arrays = [_buffered(chunk, none) for chunk in column.chunks if len(chunk)]
    if not arrays:
        return np.empty(0, column.type.to_pandas_dtype())
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _buffered(array: pa.Array, none: int) -> NDArray[Any]:
    validity, values = array.buffers()
    kind = np.dtype(array.type.to_pandas_dtype())
    part = slice(array.offset, array.offset + len(array))
    result = np.frombuffer(values, kind)[part] if values else np.full(len(array), none, kind)
    if array.null_count and validity:
        bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[part]
        result = np.where(bits, result, kind.type(none))
    return result


def codes(column: pa.ChunkedArray) -> tuple[list[Any], NDArray[np.int32]]:
    """A column of strings as its distinct values and the index of each row's value."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    if not column.num_chunks:
        return [], np.empty(0, np.int32)
    indices = numbers(pa.chunked_array([chunk.indices for chunk in column.chunks]))
    return column.chunk(0).dictionary.to_pylist(), indices
