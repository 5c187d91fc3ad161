"""Avro datums → Arrow columns, by a program of the writer schema. Runs on executors.

The nodes of a program (see `frazil.native.programs`) stand in the order of the datum, so a datum is
read node by node. Only arrays, maps and unions of several types go elsewhere than to the next node:
these are open until the nodes inside them are done.

A datum is read here only if every byte is where the schema says: numbers have at most 10 bytes and
are in range, texts are UTF-8, sizes and counts do not exceed the bytes left, branches and symbols
exist, decimals have no more digits than their column, and the last value ends where the datum ends.
Any other datum is *doubtful*: the strict reader in `frazil.arrow.avro_types` decides about it. So a
datum is never rejected here, and whatever is read here is read as the strict reader would.
"""

from __future__ import annotations

from frazil.native.columns import COLUMN, ROOM, VALIDITY, VALUES, copy, is_utf8, store_bit, varint
from frazil.native.compiler import cached, compiled, inlined
from frazil.native.memory import load1, load8, store4, store8
from frazil.native.programs import (
    DOUBT,
    DOUBTFUL,
    DOUBTFUL_ROWS,
    END,
    FULL,
    KIND,
    OWN,
    ROW,
    SLOT,
    STACK,
    WIDTH,
    no_room_for_elements,
    store_bytes,
    store_null,
)

#: Words of a node. `BRANCHES`: of the union that the value is in, 0 if it is in none, and which of
#: them is null, -1 if none is.
BRANCHES, NULL_BRANCH = OWN, OWN + 8
#: Of numbers: the bounds, and the factor that makes them the column's.
LOW, HIGH, TIMES = range(OWN + 16, OWN + 40, 8)
#: Of bytes and decimals: how many bytes they have, 0 if that stands before each.
SIZE = LOW
#: Of decimals: the highest number, in two words.
MOST_HIGH, MOST_LOW = HIGH, TIMES
#: Of enums and unions of several types: the address and number of symbols, as pairs of address and
#: size; the addresses of the node of each branch.
TABLE, SYMBOLS = OWN + 40, HIGH

#: Kinds of nodes. `PLAIN` values are copied as they are.
RECORD, ARRAY, MAP, UNION, NUMBER4, NUMBER8, BOOLEAN, PLAIN, TEXT, BYTES, ENUM, DECIMAL = range(12)

#: Words of an open value: its node and slot, the items left in the block of an array or map, and
#: the node behind those inside.
FRAME_WORDS = 4
_FRAME = 8 * FRAME_WORDS
_NODE, _SLOT, _LEFT, _LIMIT = range(0, 32, 8)

#: Bytes of the header before a datum: zero, and the id of its schema.
HEADER = 5
#: Instead of an id: the value is null or has no such header.
NO_ID = -1

_SIGN = -0x8000_0000_0000_0000


@inlined
def _bytes(at: int, end: int, node: int, kind: int, slot: int, state: int) -> int:
    """Reads and stores a text, bytes or an enum's symbol."""
    if kind == ENUM:
        index, at = varint(at, end)
        if at < 0 or index < 0 or index >= load8(node + SYMBOLS):
            return DOUBT
        symbol = load8(node + TABLE) + 16 * index
        return at if store_bytes(load8(symbol), load8(symbol + 8), node, slot, state) else FULL
    size = load8(node + SIZE)
    if size == 0:
        size, at = varint(at, end)
        if at < 0:
            return DOUBT
    if size < 0 or size > end - at or (kind == TEXT and not is_utf8(at, size)):
        return DOUBT
    return at + size if store_bytes(at, size, node, slot, state) else FULL


@compiled
def _decimal(at: int, end: int, node: int, slot: int) -> int:
    """Reads and stores a decimal: its bytes are a number, the highest first."""
    size = load8(node + SIZE)
    if size == 0:
        size, at = varint(at, end)
        if at < 0:
            return DOUBT
    if size < 0 or size > end - at:
        return DOUBT
    sign = -(load1(at) >> 7) if size else 0
    high = low = sign
    for i in range(size):
        byte = load1(at + i)
        if i < size - 16 and byte != sign & 0xFF:
            return DOUBT
        high = high << 8 | low >> 56 & 0xFF
        low = low << 8 | byte
    # Of a negative number the two's complement is compared.
    part, rest = (~high + (low == 0), -low) if sign else (high, low)
    most = load8(node + MOST_HIGH)
    if high >> 63 != sign or part < 0 or part > most:
        return DOUBT
    if part == most and rest ^ _SIGN > load8(node + MOST_LOW) ^ _SIGN:
        return DOUBT
    target = load8(node + VALUES) + 16 * slot
    store8(target, low)
    store8(target + 8, high)
    return at + size


@inlined
def _value(at: int, end: int, node: int, kind: int, slot: int, state: int) -> int:
    """Reads and stores a value with none inside; returns the address behind it, or `DOUBT` or
    `FULL`."""
    values = load8(node + VALUES)
    if kind in (NUMBER4, NUMBER8):
        number, at = varint(at, end)
        if at < 0 or number < load8(node + LOW) or number > load8(node + HIGH):
            return DOUBT
        if kind == NUMBER4:
            store4(values + 4 * slot, number)
        else:
            store8(values + 8 * slot, number * load8(node + TIMES))
        return at
    if kind == PLAIN:
        width = load8(node + WIDTH)
        if width > end - at:
            return DOUBT
        copy(values + width * slot, at, width)
        return at + width
    if kind == BOOLEAN:
        if at >= end:
            return DOUBT
        store_bit(values, slot, load1(at) == 1)
        return at + 1
    if kind == DECIMAL:
        return _decimal(at, end, node, slot)
    return _bytes(at, end, node, kind, slot, state)


@compiled
def _block(at: int, end: int) -> tuple[int, int]:
    """The number of items in a block of an array or map, and the address of the first, or `DOUBT`.
    Each item takes at least one byte."""
    count, at = varint(at, end)
    if at > 0 and count < 0:  # the size of the block follows
        _, at = varint(at, end)
        count = -count
    if at < 0 or count < 0 or count > end - at:
        return 0, DOUBT
    return count, at


@inlined
def _open(frame: int, node: int, slot: int, left: int, limit: int) -> None:
    store8(frame + _NODE, node)
    store8(frame + _SLOT, slot)
    store8(frame + _LEFT, left)
    store8(frame + _LIMIT, limit)


@compiled
def _member(node: int, slot: int, index: int) -> int:
    """The node of a union's branch; the other members become null."""
    at, end = node + COLUMN, load8(node + END)
    while at < end:
        store_null(at, slot)
        at = load8(at + END)
    return load8(load8(node + TABLE) + 8 * index)


@compiled
def _items(at: int, end: int, frame: int, slot: int) -> int:
    """The address of the next item of an open array or map, whose last one had the slot before
    this one; `_LEFT` is 0 if there is none."""
    left = load8(frame + _LEFT) - 1
    if left == 0:
        left, at = _block(at, end)
    if left == 0 and at > 0:
        node = load8(frame + _NODE)
        store8(load8(node + VALUES) + 8 * load8(frame + _SLOT) + 8, slot)
    store8(frame + _LEFT, left)
    return at


@compiled
def _datum(at: int, end: int, program: int, slot: int, state: int) -> int:
    """Reads a datum; returns an address, `DOUBT` or `FULL`."""
    node, limit, index = program, load8(program + END), 0
    frame = load8(state + STACK)
    _open(frame, 0, slot, 0, limit)
    while True:
        if node == limit:
            node = load8(frame + _NODE)
            if node == 0:
                return at if at == end else DOUBT
            if load8(node + KIND) != UNION:
                slot += 1
                at = _items(at, end, frame, slot)
                if at <= 0:
                    return DOUBT
                if load8(frame + _LEFT):
                    if slot >= load8(node + COLUMN + ROOM):
                        return no_room_for_elements(node, state)
                    node += COLUMN
                    continue
            node, slot = load8(node + END), load8(frame + _SLOT)
            frame -= _FRAME
            limit = load8(frame + _LIMIT)
            continue
        branches = load8(node + BRANCHES)
        if branches:
            index, at = varint(at, end)
            if at < 0 or index < 0 or index >= branches:
                return DOUBT
            if index == load8(node + NULL_BRANCH):
                store_null(node, slot)
                node = load8(node + END)
                continue
        if load8(node + VALIDITY):
            store_bit(load8(node + VALIDITY), slot, 1)
        kind = load8(node + KIND)
        if kind > UNION:
            at = _value(at, end, node, kind, slot, state)
            if at <= 0:
                return at
            node += COLUMN
        elif kind == RECORD:
            node += COLUMN
        elif kind == UNION:
            frame += _FRAME
            node, outer = _member(node, slot, index), node
            limit = load8(node + END)
            _open(frame, outer, slot, 0, limit)
        else:
            frame += _FRAME
            limit = load8(node + END)
            _open(frame, node, slot, 1, limit)  # as behind an item before the first
            slot = load8(load8(node + VALUES) + 8 * slot) - 1
            node = limit


@cached("int64(int64, int64, int64, int64, int64, int64)")
def decode(data: int, starts: int, sizes: int, count: int, program: int, state: int) -> int:
    """Reads datums from row `ROW` on, until a node has no room: `FULL`, else 0."""
    row, slot = load8(state + ROW), load8(state + SLOT)
    doubtful = load8(state + DOUBTFUL)
    result = 0
    while row < count:
        at = data + load8(starts + 8 * row)
        result = _datum(at, at + load8(sizes + 8 * row), program, slot, state)
        if result == FULL:
            break
        if result == DOUBT:
            store8(load8(state + DOUBTFUL_ROWS) + 8 * doubtful, row)
            doubtful += 1
        else:
            slot += 1
        row += 1
    store8(state + ROW, row)
    store8(state + SLOT, slot)
    store8(state + DOUBTFUL, doubtful)
    return FULL if result == FULL else 0


@cached("void(int64, int64, int64, int64, int64)")
def schema_ids(data: int, starts: int, sizes: int, count: int, ids: int) -> None:
    """The schema id in the header of each value, or `NO_ID`."""
    for i in range(0, 8 * count, 8):
        at, number = data + load8(starts + i), NO_ID
        if load8(sizes + i) >= HEADER and load1(at) == 0:
            number = load1(at + 1) << 24 | load1(at + 2) << 16 | load1(at + 3) << 8 | load1(at + 4)
        store8(ids + i, number)
