"""Ranges and their fates in columns: what the audit adds up, however many there are. Pure.

A ledger of 100,000 entries over 100 partitions holds ten million ranges, and so does the index
beside it. Here both become the same few columns, without a Python object for each range.
`entry.parse` says what an entry means; a test holds the two together.

New memory is what costs most. So what is large is read in pieces, whose rooms are used again and
again, and only what is kept is laid down, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from frazil.errors import Fatal
from frazil.ledger.entry import PREFIX, VERSIONS, OutcomeCounts, base_of, names_of, parse
from frazil.ledger.packing import Numbers, PackedVectors, TopicNames
from frazil.offsets import BATCHES, Partition

#: What can become of an offset, in the order of `OutcomeCounts`.
FATES = tuple(each.name for each in fields(OutcomeCounts))
#: Those that rows of the index tell of: what held nothing for a table has no row.
TOLD = tuple(each for each in FATES if each != "elsewhere")
#: Entries that are read at once.
_ENTRIES = 8192
#: Elements that are looked at together: what fits into the processor's own memory.
_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class RangeColumns:
    """One element per range, partition by partition: ranges of entries in the order of commits,
    those of the index's rows in the order of offsets.

    `key` numbers the partitions, which are sorted; `source` tells which entry or row it is of.
    Fates are of 64 bits, or of fewer where it is certain that a range's can be added to each other
    in them; `sum` and `cumsum` widen them.
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

    def fates(self) -> list[Numbers]:
        return [getattr(self, name) for name in FATES]


@dataclass(frozen=True, slots=True)
class Joint:
    """All ranges of one partition, laid side by side."""

    partition: Partition
    ranges: int
    #: where the first begins and the farthest ends
    start: int
    end: int
    counts: OutcomeCounts
    gaps: tuple[tuple[int, int], ...] = ()
    overlaps: tuple[tuple[int, int], ...] = ()
    #: ranges that no batch can have made: their fates are not as many as their offsets, or
    #: something in them is below 0 (of `BATCHES` only the latter: a batch holds any rows)
    odd: tuple[tuple[int, int], ...] = ()


def of_entries(summaries: Sequence[Mapping[str, str]]) -> RangeColumns:
    """Of the summaries that one sink left in a table's snapshots, oldest first.

    The same as `entry.parse(summary)` says of each: `begin`, `end` and `counts(partition)`.
    """
    try:
        places = range(0, len(summaries) or 1, _ENTRIES)
        return together(_entries(summaries[at : at + _ENTRIES], at) for at in places)
    except (KeyError, ValueError, TypeError, OverflowError, AttributeError) as error:
        for summary in summaries:  # the entry that cannot be read says so itself
            parse(summary)
        raise Fatal(f"cannot read the ledger: {error!r}") from None


def of_rows(rows: pa.Table | Iterable[pa.Table]) -> RangeColumns:
    """Of rows of the index: `topic`, `partition`, `start_offset`, `end_offset` and the fates.

    Quick where they come sorted so, or file by file, as the sink keeps its index; and small where
    one file comes after the other. A fate that an older index has no column for was nobody's.
    """
    if isinstance(rows, pa.Table):
        found = _rows(pa.Table.from_batches([each]) for each in rows.to_batches())
    else:
        found = map(narrow, _rows(rows))
    return together(found, rising=True)


def joints(spans: RangeColumns) -> list[Joint]:
    """For each partition: do its ranges join? In the order they have."""
    found: list[Joint] = []
    some: list[tuple[Partition, int, int]] = []
    for each in _bounds(spans):
        some.append(each)
        if each[2] - some[0][1] >= _AT_ONCE:
            found += _joints(spans, some)
            some = []
    return found + _joints(spans, some)


def side_by_side(pieces: Iterable[Sequence[Joint]]) -> list[Joint] | None:
    """Of pieces that were joined each by itself; None where they reach into each other, and only
    all ranges together can tell."""
    found: dict[Partition, list[Joint]] = {}
    for joint in chain.from_iterable(pieces):
        found.setdefault(joint.partition, []).append(joint)
    joined = []
    for partition, each in sorted(found.items()):
        each.sort(key=lambda joint: joint.start)
        if any(one.end > other.start for one, other in pairwise(each)):
            return None
        between = [(a.end, b.start) for a, b in pairwise(each) if a.end < b.start]
        joined.append(
            Joint(
                partition,
                sum(joint.ranges for joint in each),
                each[0].start,
                each[-1].end,
                sum((joint.counts for joint in each), OutcomeCounts()),
                tuple(sorted([*chain.from_iterable(joint.gaps for joint in each), *between])),
                tuple(chain.from_iterable(joint.overlaps for joint in each)),
                tuple(chain.from_iterable(joint.odd for joint in each)),
            )
        )
    return joined


def by_partition(spans: RangeColumns) -> dict[Partition, RangeColumns]:
    return {where: select(spans, slice(low, high)) for where, low, high in _bounds(spans)}


def select(spans: RangeColumns, chosen: NDArray[Any] | slice) -> RangeColumns:
    """Some of its elements, by a mask, their places or a slice; the partitions keep their keys."""
    key = spans.key[chosen]
    columns = [getattr(spans, each.name) for each in fields(RangeColumns)[2:]]
    return RangeColumns(
        spans.partitions,
        key,
        *(each[chosen] if each.strides[0] else _none(len(key)) for each in columns),
    )


def _bounds(spans: RangeColumns) -> Iterator[tuple[Partition, int, int]]:
    """Where each partition begins and ends."""
    wanted = np.arange(len(spans.partitions) + 1, dtype=spans.key.dtype)
    bounds = np.searchsorted(spans.key, wanted).tolist()
    for partition, (low, high) in zip(spans.partitions, pairwise(bounds), strict=True):
        if low < high:
            yield partition, low, high


def _joints(spans: RangeColumns, bounds: Sequence[tuple[Partition, int, int]]) -> list[Joint]:
    """Of some partitions. With most all is well, and one look at all of them together tells so."""
    if not bounds:
        return []
    place = bounds[0][1]
    part = select(spans, slice(place, bounds[-1][2]))
    firsts = np.array([low - place for _, low, _ in bounds])
    left = part.end - part.start
    doubtful = left < 0
    sums = []
    for each in part.fates():
        sums.append(np.add.reduceat(each, firsts, dtype=np.int64).tolist())
        if each.strides[0]:
            left -= each
            if each.min() < 0:
                doubtful |= each < 0
    doubtful |= left != 0
    apart = part.start[1:] != part.end[:-1]
    apart[firsts[1:] - 1] = False  # there another partition begins
    doubtful[1:] |= apart
    doubtful[firsts] |= part.start[firsts] < 0
    found = []
    for (partition, low, high), odd, *counts in zip(
        bounds, np.logical_or.reduceat(doubtful, firsts).tolist(), *sums, strict=True
    ):
        if odd or partition == BATCHES:
            found.append(_joint(partition, select(spans, slice(low, high))))
        else:
            start, end = int(spans.start[low]), int(spans.end[high - 1])
            found.append(Joint(partition, high - low, start, end, OutcomeCounts(*counts)))
    return found


def _joint(partition: Partition, part: RangeColumns) -> Joint:
    start, end, fates = part.start, part.end, part.fates()
    length = end - start
    wrong = np.zeros(len(part), bool)
    if partition != BATCHES:
        left = length.copy()
        for each in fates:
            left -= each
        wrong |= left != 0
    for each in (start, length, *fates):
        if each.min() < 0:
            wrong |= each < 0
    reached = np.maximum(np.maximum.accumulate(end), start[0])
    here = np.append(start[0], reached[:-1])
    again = np.minimum(end, here)
    apart, twice = start > here, again > start
    return Joint(
        partition,
        len(part),
        int(start[0]),
        int(reached[-1]),
        OutcomeCounts(*(int(each.sum()) for each in fates)),
        _pairs(here[apart], start[apart]),
        _pairs(start[twice], again[twice]),
        _pairs(start[wrong], end[wrong]),
    )


def _pairs(low: Numbers, high: Numbers) -> tuple[tuple[int, int], ...]:
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


# ── pieces, put together ─────────────────────────────────────────────────────────────────────────


def together(pieces: Iterable[RangeColumns], rising: bool = False) -> RangeColumns:
    """Partition by partition what the pieces have; `rising`: in the order of offsets."""
    found = list(pieces)
    if len(found) == 1 and not any(map(_is_small, found[0].fates())):
        return found[0]
    runs: dict[Partition, list[tuple[int, int, slice]]] = {}
    for i, piece in enumerate(found):
        for partition, low, high in _bounds(piece):
            runs.setdefault(partition, []).append((int(piece.start[low]), i, slice(low, high)))
    partitions = tuple(sorted(runs))
    if rising:
        for each in runs.values():
            each.sort(key=lambda run: run[:2])
    ordered = [(i, run) for partition in partitions for _, i, run in runs[partition]]
    lengths = [sum(run.stop - run.start for _, _, run in runs[each]) for each in partitions]
    key = np.repeat(np.arange(len(partitions), dtype=np.int32), lengths)
    columns: list[Numbers] = []
    for name in (each.name for each in fields(RangeColumns)[2:]):
        parts = [getattr(piece, name) for piece in found]
        if any(part.strides[0] for part in parts):
            # Numbers of 16 bits can be added to each other in 32.
            small = all(_is_small(part) or not part.strides[0] for part in parts)
            kind = np.int32 if small or name == "source" else np.int64
            columns.append(np.concatenate([parts[i][run] for i, run in ordered], dtype=kind))
        else:
            columns.append(_none(len(key)))
    spans = RangeColumns(partitions, key, *columns)
    if rising:
        # Files that reach into each other: rows that are there twice, or were never sorted.
        falls = spans.start[1:] < spans.start[:-1]
        if (falls & (key[1:] == key[:-1])).any():
            return select(spans, np.lexsort((spans.start, key)))
    return spans


def narrow(spans: RangeColumns) -> RangeColumns:
    """The same in less room, for as long as it waits; and nobody else's memory."""
    own = [+each for each in (spans.source, spans.start, spans.end)]
    return RangeColumns(spans.partitions, spans.key, *own, *map(_small, spans.fates()))


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
    """As many zeros, which take no room: their one value stands for all."""
    return np.broadcast_to(np.int64(0), count)


# ── entries of the ledger ────────────────────────────────────────────────────────────────────────


def _entries(summaries: Sequence[Mapping[str, str]], place: int) -> RangeColumns:
    names = TopicNames()
    ranges, unwritten, rest = PackedVectors(names), PackedVectors(names), PackedVectors(names)
    rows = np.zeros(len(summaries), np.int64)
    for i, summary in enumerate(summaries):
        if summary[PREFIX + "version"] not in VERSIONS:
            raise ValueError(summary[PREFIX + "version"])
        parts, _ = names_of(summary)
        block = names.block(parts) if parts else None
        ranges.add(i, summary[PREFIX + "ranges"], block, base_of(summary, len(parts))[0])
        width = 0
        if (text := summary.get(PREFIX + "unwritten")) is not None:
            width = unwritten.add(i, text, block)
        text = summary.get(PREFIX + "rest")
        if text is not None and (rest.add(i, text, block) != width or not width):
            raise ValueError("other outcomes are the rest than there are counts of")
        if (text := summary.get(PREFIX + "rows")) is not None:
            rows[i] = int(text)
    if ranges.widths - {2} or max(unwritten.widths, default=0) >= len(FATES):
        raise ValueError("more or fewer numbers than there are names for")
    entry, key, start, end = ranges.columns(2)
    partitions, ranks = names.ranks()
    key = ranks[key]
    # Numbers of 16 bits are sorted in one pass, without comparing.
    order = np.argsort(
        key.astype(np.uint16 if len(partitions) <= 1 << 16 else np.int32), kind="stable"
    )
    if (entry[1:] < entry[:-1]).any():  # some are readable, some are packed
        order = np.lexsort((entry, key))
    key, entry, start, end = (each[order] for each in (key, entry, start, end))
    fates = _aligned(unwritten, ranks, entry, key, len(summaries))
    marks = _aligned(rest, ranks, entry, key, len(summaries))
    _restore(fates, marks, end - start)
    written = end - start
    for fate in fates:
        if fate.strides[0]:
            written -= fate
    if BATCHES in partitions:
        mine = key == partitions.index(BATCHES)
        written[mine] = rows[entry[mine]]
        fates = [np.where(mine, 0, each) for each in fates]
    return narrow(
        RangeColumns(partitions, key, entry + np.int32(place), start, end, written, *fates)
    )


def _aligned(
    vectors: PackedVectors, ranks: Numbers, entry: Numbers, key: Numbers, entries: int
) -> list[Numbers]:
    """A column per outcome beside `written`: 0 where an entry has no number for a partition."""
    columns = [_none(len(key)) for _ in FATES[1:]]
    # Only as many as some entry has: most have no count of the last outcomes.
    of, whose, *counts = vectors.columns(max(vectors.widths, default=0))
    if not len(of):
        return columns
    # One number per partition and entry that sorts as they do.
    at = ranks[whose].astype(np.int64) * entries + of
    if len(key) < entries * len(ranks):  # some entries lack some partitions
        known = key.astype(np.int64) * entries + entry
        to = np.minimum(np.searchsorted(known, at), len(key) - 1)
        there = known[to] == at
        at, counts = to[there], [each[there] for each in counts]
    for i, numbers in enumerate(counts):
        if numbers.any():
            columns[i] = np.zeros(len(key), np.int64)
            columns[i][at] = numbers
    return columns


def _restore(fates: list[Numbers], marks: Sequence[Numbers], rest: NDArray[np.int64]) -> None:
    """Put the counts in their places that are the rest of a range. `rest`: the lengths."""
    marked = [i for i, each in enumerate(marks) if each.strides[0]]
    if not marked:
        return
    for fate in fates:
        if fate.strides[0]:
            rest -= fate
    table = np.stack([marks[i] for i in marked])
    if table.min() < 0 or table.sum(axis=0).max() > 1:
        raise ValueError("expected at most one outcome of a range as its rest")
    for i in marked:
        fates[i] = np.where(marks[i] != 0, rest, fates[i])


# ── rows of the index ────────────────────────────────────────────────────────────────────────────


def _rows(tables: Iterable[pa.Table]) -> Iterator[RangeColumns]:
    """Each table by itself, by partition and offset."""
    place = 0
    for table in tables:
        yield sorted_rows(table, place)
        place += len(table)


def sorted_rows(rows: pa.Table, place: int = 0) -> RangeColumns:
    """By partition and offset; the first of them is row number `place`."""
    topics, code = codes(rows["topic"])
    ranked = sorted(topics)
    rank = np.array([ranked.index(name) for name in topics], np.int64)
    number, start = numbers(rows["partition"]), numbers(rows["start_offset"])
    breaks = number[1:] != number[:-1]
    if len(topics) > 1:
        breaks |= code[1:] != code[:-1]
    firsts = np.append(0, np.flatnonzero(breaks) + 1)[: len(rows)]
    # What a run is of, as a number that sorts as topic and partition do.
    whose = number[firsts] + (rank[code[firsts]] << 32 if topics else 0)
    keys, key = np.unique(whose, return_inverse=True)
    spans = RangeColumns(
        tuple(Partition(ranked[each >> 32], each & 0xFFFFFFFF) for each in keys.tolist()),
        np.repeat(key.astype(np.int32), np.diff(np.append(firsts, len(rows)))),
        np.arange(place, place + len(rows), dtype=np.int32),
        start,
        numbers(rows["end_offset"]),
        *(numbers(rows[name]) if name in rows.column_names else _none(len(rows)) for name in FATES),
    )
    breaks |= start[1:] >= start[:-1]
    if breaks.all() and (key[1:] > key[:-1]).all():
        return spans
    return select(spans, np.lexsort((start, spans.key)))


def numbers(column: pa.ChunkedArray, none: int = 0) -> NDArray[Any]:
    """A column of whole numbers; `none` where there is no number. Without a copy where it is in one
    piece.

    (Arrow's own `to_numpy` imports pandas first, which takes longer than a small audit.)
    """
    found = [_buffered(chunk, none) for chunk in column.chunks if len(chunk)]
    if not found:
        return np.empty(0, column.type.to_pandas_dtype())
    return found[0] if len(found) == 1 else np.concatenate(found)


def _buffered(array: pa.Array, none: int) -> NDArray[Any]:
    there, values = array.buffers()
    kind = np.dtype(array.type.to_pandas_dtype())
    part = slice(array.offset, array.offset + len(array))
    found = np.frombuffer(values, kind)[part] if values else np.full(len(array), none, kind)
    if array.null_count and there:
        bits = np.unpackbits(np.frombuffer(there, np.uint8), bitorder="little")[part]
        found = np.where(bits, found, kind.type(none))
    return found


def codes(column: pa.ChunkedArray) -> tuple[list[Any], NDArray[np.int32]]:
    """A column of texts: each one that there is, and which of them each row has."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    if not column.num_chunks:
        return [], np.empty(0, np.int32)
    found = numbers(pa.chunked_array([chunk.indices for chunk in column.chunks]))
    return column.chunk(0).dictionary.to_pylist(), found
