"""Arithmetic of the ranges that the checks compare. Pure.

In: ranges of one partition with their counts, in columns (`RangeColumns`). Out: such
columns again, or pairs of a first and an end offset.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from frazil.ledger.range_columns import INDEXED_OUTCOMES, RangeColumns, of_entries, select
from frazil.offsets import BATCHES, Partition

#: No ranges at all.
NOTHING = of_entries([])


def joined_columns(one: RangeColumns, other: RangeColumns) -> RangeColumns:
    """Ranges of the same partition, `one` before `other`."""
    columns = [column.name for column in fields(RangeColumns)[1:]]
    return RangeColumns(
        one.partitions,
        *(np.concatenate([getattr(one, name), getattr(other, name)]) for name in columns),
    )


def nonempty(part: RangeColumns) -> RangeColumns:
    """The ranges that are not empty."""
    busy = part.end > part.start
    return part if busy.all() else select(part, busy)


def same(entries: RangeColumns, rows: RangeColumns) -> bool:
    """Do both have the same ranges and counts?"""
    if len(entries) != len(rows) or entries.elsewhere.any():
        return False
    columns = ("start", "end", *INDEXED_OUTCOMES)
    return all((getattr(entries, name) == getattr(rows, name)).all() for name in columns)


def joints(part: RangeColumns) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
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


def spans_of(part: RangeColumns, chosen: NDArray[np.bool_] | None = None) -> list[tuple[int, int]]:
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


def uncovered(whole: RangeColumns | None, start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end) that no range of `whole` covers."""
    if whole is None:
        return [(start, end)]
    gaps, _ = joints(whole)
    bare = [(start, int(whole.start[0])), *gaps, (int(whole.end.max()), end)]
    cut = [(max(a, start), min(b, end)) for a, b in bare]
    return [(a, b) for a, b in cut if a < b]


def is_unplaced(partition: Partition, part: RangeColumns) -> bool:
    """Do rows of the partition stand for no single offset?"""
    return partition == BATCHES or bool(part.merged.any())
