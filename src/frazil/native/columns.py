"""Arrow columns that compiled code fills. Runs on executors.

A column is a row of a table of int64, at an address that compiled code gets. Its first words are
the same for every kind of column (`ROOM` … `DATA_ROOM`); the others belong to whoever fills it.

    words of a column │ ROOM │ VALIDITY │ VALUES │ DATA │ DATA_ROOM │ 11 more
    string, binary    │      │ bits     │ 8-byte offsets │ bytes    │
    list              │      │ bits     │ 8-byte offsets │
    boolean           │      │ bits     │ bits   │
    other values      │      │ bits     │ values of one width
    struct            │      │ bits     │

Compiled code never allocates: it checks the room, and where that does not suffice it ends, Python
grows the column (`frazil.arrow.column_program`), and it is called again. Nothing is rolled back:
bits and offsets are stored anew by the next value, never assumed to be zero.

Also here: what several readers need, numbers of variable width and the check of UTF-8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.native.compiler import cached, compiled, inlined
from frazil.native.memory import load1, load8, move16, store1, store8

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Longs = np.ndarray[Any, np.dtype[np.int64]]

#: int64 words of a column, and the size of a column in bytes.
WORDS = 16
COLUMN = 8 * WORDS
#: Places of the words, in bytes.
ROOM, VALIDITY, VALUES, DATA, DATA_ROOM = range(0, 40, 8)

#: Instead of a width in bytes: values of one bit, or offsets of 8 bytes.
BIT, OFFSETS = -1, -8

#: Instead of an address: the number ends beyond its data; it has more than 10 bytes.
ENDS, ENDLESS = -1, -2

_HIGH_BITS = -0x7F7F7F7F7F7F7F80  # of 8 bytes
_POSITIVE = 0x7FFF_FFFF_FFFF_FFFF


@inlined
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


@inlined
def copy(target: int, source: int, size: int) -> None:
    """Copies bytes, 16 at a time: both sides have `SLACK` bytes behind the last one."""
    moved = 0
    while moved < size:
        move16(target + moved, source + moved)
        moved += 16


@inlined
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


def new_bytes(size: int) -> Bytes:
    """An array from Arrow's pool. The C library returns large blocks to the system at once, and
    new pages of the system cost more than what is done with them."""
    return np.frombuffer(pa.allocate_buffer(size), np.uint8)


def new_longs(*shape: int) -> Longs:
    return new_bytes(8 * math.prod(shape)).view(np.int64).reshape(shape)
