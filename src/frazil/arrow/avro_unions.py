"""Checks that every optional value of a block has a branch index of 0 or 1. Runs on executors.

polars reads any other index as the second branch. In: the columns that polars read, the bytes they
came from, and the start and end of each datum. The values determine how many bytes each takes in
its shortest form, and therefore the position of each branch index:

    datum   │ 0e 61 62 …  │ 02 │ 06 …  │ 00 │ …
    columns │ text, 7     │ 1: a long   │ 0: null

No encoding is shorter than the shortest form. So if all datums end at the computed positions, every
value is in its shortest form and at its computed position. If they do not (numbers with redundant
bytes, arrays in several blocks), the check fails and the strict reader decides.

(A decimal of no bytes is 0, and shorter than the shortest form computed here. It makes the ends
differ, unless the same datum has as many redundant bytes elsewhere.)
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
    """Is a type of the schema for polars optional, or does it contain an optional type?"""
    if isinstance(glued, list):
        return True
    if not isinstance(glued, dict):
        return False
    inner = [field["type"] for field in glued.get("fields", ())] + [glued.get("items")]
    return any(map(optional, inner))


def branches_valid(
    fields: Sequence[Any], arrays: Sequence[pa.Array], data: Bytes, starts: Longs, ends: Longs
) -> bool:
    """`fields`: the types in the schema for polars, one per array of `arrays`."""
    sizes = [_sizes(glued, array) for glued, array in zip(fields, arrays, strict=True)]
    places = [starts]
    for size in sizes:
        places.append(places[-1] + size)
    if not np.array_equal(places[-1], ends):
        return False
    return all(
        _indexes_valid(glued, array, at, data, None)
        for glued, array, at in zip(fields, arrays, places, strict=False)
        if optional(glued)
    )


def width(numbers: Longs) -> Longs:
    """Bytes of each number as a zigzag varint in its shortest form."""
    zigzag = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    widths = np.ones(len(numbers), np.int64)
    limit = 1 << 7
    highest = int(zigzag.max()) if len(zigzag) else 0
    while limit <= highest:
        widths += zigzag >= np.uint64(limit)
        limit <<= 7
    return widths


def _sizes(glued: Any, array: pa.Array) -> Sizes:
    """Bytes that each value takes; arbitrary for a null whose type is not optional."""
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
        inner = [field["type"] for field in glued["fields"]]
        sizes = [_sizes(inner_type, array.field(i)) for i, inner_type in enumerate(inner)]
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


def _indexes_valid(glued: Any, array: pa.Array, at: Longs, data: Bytes, live: Any) -> bool:
    """Are all branch indexes right? `at`: start of each value. `live`: mask of present values;
    None: all."""
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
            or _indexes_valid(inner, array, at + 1, data, valid if live is None else live & valid)
        )
    if glued["type"] == "record":
        for i, field in enumerate(glued["fields"]):
            child = array.field(i)
            if optional(field["type"]) and not _indexes_valid(field["type"], child, at, data, live):
                return False
            at = at + _sizes(field["type"], child)
        return True
    if not len(array):
        return True
    offsets, items, ends = _items(glued, array)
    counts = np.diff(offsets)
    first = at + width(counts) - ends[offsets[:-1]]
    places = np.repeat(first, counts) + ends[offsets[0] : offsets[-1]]
    inside = None if live is None else np.repeat(live, counts)
    some = items.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return _indexes_valid(glued["items"], some, places, data, inside)


def _items(glued: Any, array: pa.Array) -> tuple[Longs, pa.Array, Longs]:
    """Offsets of the lists, their items, and the cumulative sizes of the items in bytes."""
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
    """The second buffer of an array, nulls included: its values, or with `more=1` its offsets."""
    values = np.frombuffer(array.buffers()[1] or b"", kind)
    return values[array.offset : array.offset + len(array) + more]


_FIXED = {"boolean": 1, "float": 4, "double": 8}


def _decimal_bytes(array: pa.Array) -> Longs:
    """Bytes of each decimal in the shortest two's complement."""
    pairs = np.frombuffer(array.buffers()[1] or b"", np.int64).reshape(-1, 2)
    low, high = pairs[array.offset : array.offset + len(array)].T
    low, high = (np.where(high < 0, ~half, half).view(np.uint64) for half in (low, high))
    sizes = np.ones(len(array), np.int64)
    for bits in range(7, 127, 8):
        limit = np.uint64(1 << bits % 64)
        sizes += (high >= limit) if bits > 63 else (high > 0) | (low >= limit)
    return sizes
