"""Did every optional value of a block say which branch it is, 0 or 1? Runs on executors.

polars takes any other number for the second branch. What it read is given here again: its columns,
the bytes they came from, and where each datum begins and ends. From the values follows how many
bytes each takes in its shortest form, so where the byte stands that names a branch:

    datum   │ 0e 61 62 …  │ 02 │ 06 …  │ 00 │ …
    columns │ text, 7     │ 1: a long   │ 0: null

Nothing is shorter than its shortest form, so if the datums end where they should, every value is in
it and stands where it was looked for. Where they do not (numbers with needless bytes, arrays in
several blocks), nothing is known, and the strict reader has to say.

(A decimal of no bytes is 0, and shorter than the shortest form that others write. It makes the ends
differ, unless the same datum has as many needless bytes elsewhere.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Longs = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Sizes = Longs | int


def optional(glued: Any) -> bool:
    """Has a type as polars reads it any optional value, itself or inside?"""
    if isinstance(glued, list):
        return True
    if not isinstance(glued, dict):
        return False
    inner = [each["type"] for each in glued.get("fields", ())] + [glued.get("items")]
    return any(map(optional, inner))


def branches_valid(
    fields: Sequence[Any], arrays: Sequence[pa.Array], data: Bytes, starts: Longs, ends: Longs
) -> bool:
    """`fields`: the types by which polars read the `arrays`."""
    sizes = [_sizes(glued, array) for glued, array in zip(fields, arrays, strict=True)]
    places = [starts]
    for size in sizes:
        places.append(places[-1] + size)
    if not np.array_equal(places[-1], ends):
        return False
    return all(
        _told(glued, array, at, data, None)
        for glued, array, at in zip(fields, arrays, places, strict=False)
        if optional(glued)
    )


def width(numbers: Longs) -> Longs:
    """Bytes of each number as a zigzag varint in its shortest form."""
    zigzag = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    found = np.ones(len(numbers), np.int64)
    limit = 1 << 7
    highest = int(zigzag.max()) if len(zigzag) else 0
    while limit <= highest:
        found += zigzag >= np.uint64(limit)
        limit <<= 7
    return found


def _sizes(glued: Any, array: pa.Array) -> Sizes:
    """How many bytes each value takes; of a null that is not optional itself, any number."""
    if isinstance(glued, list):
        with_index: Longs = 1 + _sizes(_real(glued), array) * _valid(array)
        return with_index
    kind = glued if isinstance(glued, str) else glued["type"]
    if kind == "long":
        return width(_numbers(array, np.int64))
    if kind in _FIXED:
        return _FIXED[kind]
    if kind == "fixed":
        return int(glued["size"])
    if kind == "record":
        inner = [each["type"] for each in glued["fields"]]
        sizes = [_sizes(each, array.field(i)) for i, each in enumerate(inner)]
        total: Sizes = 0
        for size in sizes:
            total = total + size
        return total
    if kind == "array":
        offsets, _, ends = _items(glued, array)
        counts = np.diff(offsets)
        return ends[offsets[1:]] - ends[offsets[:-1]] + np.where(counts > 0, width(counts) + 1, 1)
    if pa.types.is_decimal(array.type):
        lengths = _decimal_bytes(array)
    else:
        lengths = np.diff(_numbers(array, np.int64, 1))
    return width(lengths) + lengths


def _told(glued: Any, array: pa.Array, at: Longs, data: Bytes, live: Any) -> bool:
    """`at`: where each value begins. `live`: which of them there are; None: all."""
    if isinstance(glued, list):
        valid = _valid(array)
        expected = np.where(valid == (glued[0] == "null"), 2, 0)
        if live is None:
            right = np.array_equal(data[at], expected)
        else:
            right = np.array_equal(data[at[live]], expected[live])
        inner = _real(glued)
        return right and (
            not optional(inner)
            or _told(inner, array, at + 1, data, valid if live is None else live & valid)
        )
    if glued["type"] == "record":
        for i, each in enumerate(glued["fields"]):
            child = array.field(i)
            if optional(each["type"]) and not _told(each["type"], child, at, data, live):
                return False
            at = at + _sizes(each["type"], child)
        return True
    if not len(array):
        return True
    offsets, items, ends = _items(glued, array)
    counts = np.diff(offsets)
    first = at + width(counts) - ends[offsets[:-1]]
    places = np.repeat(first, counts) + ends[offsets[0] : offsets[-1]]
    inside = None if live is None else np.repeat(live, counts)
    some = items.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return _told(glued["items"], some, places, data, inside)


def _items(glued: Any, array: pa.Array) -> tuple[Longs, pa.Array, Longs]:
    """Where the items of each list begin, the items, and where each ends, from the first on."""
    offsets = _numbers(array, np.int64, 1)
    items = array.values
    sizes = np.broadcast_to(_sizes(glued["items"], items), len(items))
    return offsets, items, np.concatenate(([0], np.cumsum(sizes)))


def _real(branches: list[Any]) -> Any:
    return branches[0] if branches[1] == "null" else branches[1]


def _valid(array: pa.Array) -> Any:
    if not array.null_count:
        return np.ones(len(array), bool)
    return array.is_valid().to_numpy(zero_copy_only=False)


def _numbers(array: pa.Array, kind: Any, more: int = 0) -> Longs:
    """What stands in an array, nulls too; `more`: of the borders of its values."""
    found = np.frombuffer(array.buffers()[1] or b"", kind)
    return found[array.offset : array.offset + len(array) + more]


_FIXED = {"boolean": 1, "float": 4, "double": 8}


def _decimal_bytes(array: pa.Array) -> Longs:
    """Of two's complement, as few as are needed."""
    pairs = np.frombuffer(array.buffers()[1] or b"", np.int64).reshape(-1, 2)
    low, high = pairs[array.offset : array.offset + len(array)].T
    low, high = (np.where(high < 0, ~each, each).view(np.uint64) for each in (low, high))
    found = np.ones(len(array), np.int64)
    for bits in range(7, 127, 8):
        limit = np.uint64(1 << bits % 64)
        found += (high >= limit) if bits > 63 else (high > 0) | (low >= limit)
    return found
