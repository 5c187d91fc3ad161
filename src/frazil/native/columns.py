"""Arrow columns that compiled code fills. Runs on executors.

A column is a row of a table of int64, at an address that compiled code gets. Its first words are
the same for every kind of column (`LENGTH` … `DATA_ROOM`); the others belong to whoever fills it.

    words of a column │ LENGTH │ ROOM │ VALIDITY │ VALUES │ DATA │ DATA_ROOM │ 10 more
    string, binary    │        │      │ bits     │ 8-byte offsets │ bytes    │
    list, map         │        │      │ bits     │ 8- or 4-byte offsets      │
    boolean           │        │      │ bits     │ bits   │
    other values      │        │      │ bits     │ values of one width       │
    struct            │        │      │ bits     │

Compiled code never allocates: it checks the room, and where that does not suffice it ends, Python
grows the column (`ColumnBuffers.grow`), and it is called again. To roll a value back is to set
`LENGTH` back: bits and offsets are stored anew by the next value, never assumed to be zero.

Also here: what several readers need, numbers of variable width and the check of UTF-8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from frazil.native.compiler import cached, compiled
from frazil.native.memory import SLACK, load1, load4, load8, move16, store1, store4, store8

Longs = np.ndarray[Any, np.dtype[np.int64]]

#: int64 words of a column, and the size of a column in bytes.
WORDS = 16
COLUMN = 8 * WORDS
#: Places of the words, in bytes.
LENGTH, ROOM, VALIDITY, VALUES, DATA, DATA_ROOM = range(0, 48, 8)

#: Instead of an address: the number ends beyond its data; it has more than 10 bytes.
ENDS, ENDLESS = -1, -2

_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # of 8 bytes
_POSITIVE = 0x7FFF_FFFF_FFFF_FFFF


@compiled
def varint(at: int, end: int) -> tuple[int, int]:
    """A zigzag number, and the address behind it; `ENDS` or `ENDLESS` if it is none."""
    value = shift = 0
    while at < end:
        byte = load1(at)
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return ((value >> 1) & _POSITIVE) ^ -(value & 1), at
        shift += 7
        if shift > 63:
            return 0, ENDLESS
    return 0, ENDS


@compiled
def copy(target: int, source: int, size: int) -> None:
    """Copies bytes, 16 at a time: both sides have `SLACK` bytes behind the last one."""
    moved = 0
    while moved < size:
        move16(target + moved, source + moved)
        moved += 16


@compiled
def store_bit(bits: int, index: int, bit: int) -> None:
    """Stores a bit; those of its byte stay."""
    at, place = bits + (index >> 3), index & 7
    store1(at, load1(at) & ~(1 << place) | bit << place)


@compiled
def is_utf8(at: int, size: int) -> bool:
    """As Python decodes it: no surrogates, nothing longer than needed, nothing beyond U+10FFFF."""
    end = at + size
    while at < end:
        word, left = load8(at), end - at
        if left < 8:
            word &= (1 << (8 * left)) - 1
        if word & _HIGH_BITS == 0:
            at += 8
            continue
        first = load1(at)
        if first < 0x80:
            at += 1
            continue
        more = (first >= 0xE0) + (first >= 0xF0) + 1
        if first < 0xC2 or first > 0xF4 or left <= more:
            return False
        second = load1(at + 1)
        low = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        high = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        if second < low or second > high:
            return False
        for i in range(2, more + 1):
            if load1(at + i) & 0xC0 != 0x80:
                return False
        at += more + 1
    return True


@compiled
def append_bytes(column: int, source: int, size: int) -> bool:
    """Appends a text or bytes to a column with room for one more; False: no room for its data.
    Does not touch the validity."""
    length = load8(column + LENGTH)
    offsets = load8(column + VALUES) + 8 * length
    start = load8(offsets)
    if start + size > load8(column + DATA_ROOM):
        return False
    copy(load8(column + DATA) + start, source, size)
    store8(offsets + 8, start + size)
    store8(column + LENGTH, length + 1)
    return True


@compiled
def append_none(column: int, width: int) -> None:
    """Appends a null to a column with room for one more. `width`: bytes of a value, 0 without
    values (a struct), -1 a bit, -4 and -8 offsets of so many bytes."""
    length, values = load8(column + LENGTH), load8(column + VALUES)
    if load8(column + VALIDITY):
        store_bit(load8(column + VALIDITY), length, 0)
    if width == 8:
        store8(values + 8 * length, 0)
    elif width == 4:
        store4(values + 4 * length, 0)
    elif width == -8:
        store8(values + 8 * length + 8, load8(values + 8 * length))
    elif width == -4:
        store4(values + 4 * length + 4, load4(values + 4 * length))
    elif width == -1:
        store_bit(values, length, 0)
    else:
        for i in range(width):
            store1(values + width * length + i, 0)
    store8(column + LENGTH, length + 1)


@cached("void(int64, int64, int64, int64, int64, int64)")
def gather(data: int, starts: int, sizes: int, count: int, offsets: int, target: int) -> None:
    """Slices of one buffer → the offsets and bytes of a column; negative sizes are nulls."""
    end = 0
    store8(offsets, 0)
    for i in range(0, 8 * count, 8):
        size = load8(sizes + i)
        if size > 0:
            copy(target + end, data + load8(starts + i), size)
            end += size
        store8(offsets + i + 8, end)


def width_of(kind: pa.DataType) -> int:
    """The width of a column's values, as `append_none` takes it."""
    if pa.types.is_struct(kind):
        return 0
    if pa.types.is_boolean(kind):
        return -1
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        return -4
    if pa.types.is_large_list(kind) or pa.types.is_large_string(kind):
        return -8
    if pa.types.is_large_binary(kind):
        return -8
    return int(kind.bit_width) // 8


class ColumnBuffers:
    """The buffers of one column, and its words."""

    def __init__(self, words: Longs, kind: pa.DataType, nullable: bool) -> None:
        """`words`: the row of the column in the table of its program."""
        self.words = words
        self.width = width_of(kind)
        self._has_data = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        self._nullable = nullable
        self.validity: Any = None
        self.values: Any = None
        self.data: Any = None

    def start(self, room: int, data_room: int = 0) -> None:
        """New buffers, empty."""
        self.validity = self.values = self.data = None
        self.words[LENGTH // 8] = 0
        self.grow(room)
        if self._has_data:
            self.grow_data(data_room)

    def grow(self, room: int) -> None:
        """Room for so many values."""
        bits = (room + 7) // 8 + SLACK
        sizes = {0: 0, -1: bits, -4: 4 * room + 4 + SLACK, -8: 8 * room + 8 + SLACK}
        if self._nullable:
            self.validity = self._sized(self.validity, VALIDITY, bits)
        if size := sizes.get(self.width, self.width * room + SLACK):
            fresh = self.values is None
            self.values = self._sized(self.values, VALUES, size)
            if fresh and self.width in (-4, -8):
                np.frombuffer(self.values, np.int8)[: -self.width] = 0  # the first offset
        self.words[ROOM // 8] = room

    def grow_data(self, room: int) -> None:
        """Room for so many bytes."""
        self.data = self._sized(self.data, DATA, room + SLACK)
        self.words[DATA_ROOM // 8] = room

    def _sized(self, buffer: Any, word: int, size: int) -> Any:
        if buffer is None:
            buffer = pa.allocate_buffer(size, resizable=True)
        else:
            buffer.resize(size)
        self.words[word // 8] = buffer.address
        return buffer

    @property
    def data_room(self) -> int:
        return int(self.words[DATA_ROOM // 8])

    @property
    def room(self) -> int:
        return int(self.words[ROOM // 8])

    @property
    def length(self) -> int:
        return int(self.words[LENGTH // 8])

    def last_offset(self) -> int:
        """Behind the last value: bytes of data, or items of lists."""
        kind = np.int32 if self.width == -4 else np.int64
        return int(np.frombuffer(self.values, kind, self.length + 1)[-1])

    def array(self, kind: pa.DataType, children: list[pa.Array] | None = None) -> pa.Array:
        """What was appended, as an Arrow array. `children`: of a list, map or struct."""
        buffers = [self.validity]
        if self.width:
            buffers.append(self.values)
        if self._has_data:
            buffers.append(self.data.slice(0, self.last_offset()))
        return pa.Array.from_buffers(kind, self.length, buffers, children=children)
