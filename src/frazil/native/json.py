"""JSON objects → Arrow columns, by a program of the columns. Runs on executors.

Values are stored where the nodes of the program (see `frazil.native.programs`) say, as they are
read. A record is read here only if it is plain: JSON, each field once, each value exactly what its
column holds. Everything else is *doubtful*, and the reader in `frazil.formats.json_values` decides
about it, whether it is a number of many digits or no JSON at all. So a record is never rejected
here, and whatever is read here is read as the other reader would.
"""

from __future__ import annotations

from frazil.native.columns import COLUMN, DATA, ROOM, VALIDITY, VALUES, store_bit
from frazil.native.compiler import cached, compiled
from frazil.native.json_moments import NONE, day, moment, store_uuid, time_of_day
from frazil.native.json_numbers import double, number, scaled
from frazil.native.json_text import base64_size, text_end, unbase64, unescape
from frazil.native.memory import load1, load4, load8, single_bits, store4, store8
from frazil.native.programs import (
    DOUBT,
    DOUBTFUL,
    DOUBTFUL_ROWS,
    END,
    FLAGS,
    FULL,
    KIND,
    OWN,
    READER,
    REQUIRED,
    ROW,
    SLOT,
    STACK,
    WIDTH,
    has_room,
    no_room_for_elements,
    store_bytes,
    store_null,
)

#: Words of a node.
NAME, NAME_SIZE, TABLE, MASK, SEEN, FIELDS = range(OWN, OWN + 48, 8)
#: Kinds of nodes. `OTHER` holds what is not read here, `PASSED` is a field without a
#: column, `RAW` the text of any value but objects and arrays, which are null there.
STRUCT, LIST, BOOLEAN, INT32, INT64, FLOAT32, FLOAT64, TEXT, NOTHING, OTHER, PASSED = range(11)
DATE, TIME, TIMESTAMP, DECIMAL, UUID, RAW, MAP, BINARY, FIXED = range(11, 20)
#: Flags beside `REQUIRED`: fields of a struct that have no node are passed over; timestamps have a
#: zone; numbers are timestamps.
OPEN, ZONED, EPOCH = 2, 4, 8
#: Of nodes that are no struct: digits of a second, or behind the point of a decimal; the same of
#: the numbers in an `EPOCH` column; the first whole number that is too large for a decimal.
SCALE, GIVEN_SCALE, BOUND = FIELDS, TABLE, MASK

#: A word of the state: a number for each object.
OBJECTS = READER

#: Words of an open object or array, up to `MOST_OPEN` of them; the node is 0 in what is passed
#: over.
FRAME_WORDS = 8
_FRAME = 8 * FRAME_WORDS
_CLOSING, _NODE, _SLOT, _OBJECT, _EXPECTED, _COUNT, _NEXT, _NEXT_SLOT = range(0, 64, 8)
MOST_OPEN = 48
#: Keys of a map, which are compared with each other.
_MOST_KEYS = 64

#: Names are hashed by words of 8 bytes.
HASH_FACTOR = -0x61C8864680B583EB
HASH_SHIFT = 32

_QUOTE, _COMMA, _COLON, _MINUS = b'",:-'
_OBJECT_OPENS, _OBJECT_ENDS, _ARRAY_OPENS, _ARRAY_ENDS = b"{}[]"
_T, _F, _N, _E = b"tfne"
_NULL, _TRUE, _FALS = (int.from_bytes(word, "little") for word in (b"null", b"true", b"fals"))


@compiled
def _space(at: int, end: int) -> int:
    """The address behind white space."""
    while at < end:
        byte = load1(at)
        if byte > 32 or (byte != 32 and byte != 10 and byte != 13 and byte != 9):
            return at
        at += 1
    return at


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@compiled
def _is_named(field: int, at: int, end: int) -> bool:
    """Does the field's name stand at `at`, and a quote behind it?"""
    name, size = load8(field + NAME), load8(field + NAME_SIZE)
    if size < 0 or at + size >= end or load1(at + size) != _QUOTE:
        return False
    while size >= 8:
        if load8(at) != load8(name):
            return False
        at, name, size = at + 8, name + 8, size - 8
    return (load8(at) ^ load8(name)) & ((1 << (8 * size)) - 1) == 0


@compiled
def _field(node: int, at: int, size: int, end: int) -> int:
    """The struct's field of this name; 0: none."""
    table, mask = load8(node + TABLE), load8(node + MASK)
    hashed, place, left = size, at, size
    while left >= 8:
        hashed = (hashed ^ load8(place)) * HASH_FACTOR
        place, left = place + 8, left - 8
    hashed = (hashed ^ (load8(place) & ((1 << (8 * left)) - 1))) * HASH_FACTOR
    index = (hashed >> HASH_SHIFT) & mask
    while True:
        field = load8(table + 8 * index)
        if field == 0 or (load8(field + NAME_SIZE) == size and _is_named(field, at, end)):
            return field
        index = (index + 1) & mask


@compiled
def _key(at: int, end: int, frame: int) -> int:
    """Reads a name and the colon; `_NEXT` becomes the node of its value."""
    if at >= end or load1(at) != _QUOTE:
        return DOUBT
    at += 1
    node = load8(frame + _NODE)
    field = load8(frame + _EXPECTED)
    if node and field < load8(node + END) and _is_named(field, at, end):
        behind = at + load8(field + NAME_SIZE)
    else:
        behind, escaped = text_end(at, end)
        if behind <= 0 or (node and escaped):
            return DOUBT
        field = _field(node, at, behind - at, end) if node else 0
    at = _space(behind + 1, end)
    if at >= end or load1(at) != _COLON:
        return DOUBT
    at = _space(at + 1, end)
    if field and load8(field + KIND) != PASSED:
        if load8(field + SEEN) == load8(frame + _OBJECT):
            return DOUBT  # the last of two counts
        store8(field + SEEN, load8(frame + _OBJECT))
        store8(frame + _COUNT, load8(frame + _COUNT) + 1)
        store8(frame + _EXPECTED, load8(field + END))
        store8(frame + _NEXT, field)
        return at
    is_new = node != 0 and field == 0 and not load8(node + FLAGS) & OPEN
    if is_new and (at + 4 > end or load4(at) != _NULL):
        return DOUBT  # but null is the same as absent
    store8(frame + _NEXT, 0)
    return at


# ── values ───────────────────────────────────────────────────────────────────────────────────────


@compiled
def _store_text(at: int, behind: int, escaped: int, node: int, slot: int, state: int) -> int:
    if not escaped:
        return behind + 1 if store_bytes(at, behind - at, node, slot, state) else FULL
    offsets = load8(node + VALUES) + 8 * slot
    start = load8(offsets)
    if not has_room(node, start + behind - at, state):
        return FULL
    size = unescape(at, behind, load8(node + DATA) + start)
    store8(offsets + 8, start + size)
    return behind + 1


@compiled
def _store_raw(at: int, behind: int, node: int, slot: int, state: int) -> int:
    stored = _store_text(at, behind, 0, node, slot, state)
    return behind if stored > 0 else stored


@compiled
def _store_binary(at: int, behind: int, node: int, slot: int, state: int) -> int:
    offsets = load8(node + VALUES) + 8 * slot
    start, size = load8(offsets), base64_size(at, behind)
    if size < 0:
        return DOUBT
    if not has_room(node, start + size, state):
        return FULL
    store8(offsets + 8, start + size)
    return behind + 1 if unbase64(at, behind, load8(node + DATA) + start) else DOUBT


@compiled
def _store_decimal(digits: int, exponent: int, negative: int, node: int, slot: int) -> bool:
    """False: digits would be lost, or there are too many."""
    whole = scaled(digits, exponent + load8(node + SCALE))
    if whole < 0 or whole >= load8(node + BOUND):
        return False
    target = load8(node + VALUES) + 16 * slot
    whole = -whole if negative else whole
    store8(target, whole)
    store8(target + 8, whole >> 63)
    return True


@compiled
def _store_typed(at: int, end: int, node: int, kind: int, slot: int) -> bool:
    """Stores a text that is something else in its column; False: it is doubtful."""
    values, digits = load8(node + VALUES), load8(node + SCALE)
    if kind == DECIMAL:
        behind, number_digits, exponent, form = number(at, end)
        negative = form & 1
        return behind == end and _store_decimal(number_digits, exponent, negative, node, slot)
    if kind == FIXED:
        width = load8(node + WIDTH)
        return base64_size(at, end) == width and unbase64(at, end, values + width * slot)
    if kind == UUID:
        return store_uuid(at, end, values + 16 * slot)
    if kind == DATE:
        value = day(at, end) if end - at == 10 else NONE
        store4(values + 4 * slot, value)
        return value != NONE
    if kind == TIME:
        value = time_of_day(at, end, digits)
    elif kind == TIMESTAMP:
        value = moment(at, end, digits, load8(node + FLAGS) & ZONED)
    else:
        return False
    store8(values + 8 * slot, value)
    return value != NONE


@compiled
def _store_number(at: int, end: int, node: int, kind: int, slot: int, state: int) -> int:
    start = at
    at, digits, exponent, form = number(at, end)
    if at <= 0 or kind == PASSED:
        return at
    if kind == RAW:
        return _store_raw(start, at, node, slot, state) if digits or form != 1 else DOUBT
    values = load8(node + VALUES)
    negative = form & 1
    if kind in (INT64, INT32):
        if form > 1:  # a fraction or an exponent
            return DOUBT
        value = -digits if negative else digits
        if kind == INT64:
            store8(values + 8 * slot, value)
            return at
        if value < -0x8000_0000 or value > 0x7FFF_FFFF:
            return DOUBT
        store4(values + 4 * slot, value)
        return at
    if kind == DECIMAL:
        return at if _store_decimal(digits, exponent, negative, node, slot) else DOUBT
    if kind == TIMESTAMP and load8(node + FLAGS) & EPOCH:
        ticks = scaled(digits, exponent + load8(node + SCALE) - load8(node + GIVEN_SCALE))
        store8(values + 8 * slot, -ticks if negative else ticks)
        return at if ticks >= 0 else DOUBT
    if kind != FLOAT64 and kind != FLOAT32:
        return DOUBT
    bits = double(digits, exponent, negative)
    if kind == FLOAT64:
        store8(values + 8 * slot, bits)
        return at if bits != -1 else DOUBT
    bits = single_bits(bits) if bits != -1 else -1
    store4(values + 4 * slot, bits)
    return at if bits & 0x7F80_0000 != 0x7F80_0000 else DOUBT


@compiled
def _store_boolean(at: int, end: int, node: int, kind: int, slot: int, state: int) -> int:
    true = at + 4 <= end and load4(at) == _TRUE
    if not true and not (at + 5 <= end and load4(at) == _FALS and load1(at + 4) == _E):
        return DOUBT
    behind = at + 5 - true
    if kind == RAW:
        return _store_raw(at, behind, node, slot, state)
    if kind == BOOLEAN:
        store_bit(load8(node + VALUES), slot, true)
    elif kind != PASSED:
        return DOUBT
    return behind


@compiled
def _scalar(at: int, end: int, node: int, slot: int, state: int) -> int:
    """Reads a value that is no object or array, and stores it; returns the address behind it."""
    kind = load8(node + KIND) if node else PASSED
    byte = load1(at)
    if byte == _N:
        if at + 4 > end or load4(at) != _NULL or (node and load8(node + FLAGS) & REQUIRED):
            return DOUBT
        if node:
            store_null(node, slot)
        return at + 4
    if byte == _QUOTE:
        behind, escaped = text_end(at + 1, end)
        if behind <= 0:
            return DOUBT
        if kind in (TEXT, RAW):
            at = _store_text(at + 1, behind, escaped, node, slot, state)
        elif kind == BINARY:
            at = _store_binary(at + 1, behind, node, slot, state)
        elif kind == PASSED or (not escaped and _store_typed(at + 1, behind, node, kind, slot)):
            at = behind + 1
        else:
            return DOUBT
    elif byte in (_T, _F):
        at = _store_boolean(at, end, node, kind, slot, state)
    else:
        at = _store_number(at, end, node, kind, slot, state)
    if node and at > 0:
        store_bit(load8(node + VALIDITY), slot, 1)
    return at


# ── objects and arrays ───────────────────────────────────────────────────────────────────────────


@compiled
def _open(frame: int, byte: int, node: int, slot: int, state: int) -> bool:
    """Opens an object or array; False: the column holds another kind of value."""
    is_object = byte == _OBJECT_OPENS
    if node and load8(node + KIND) == RAW:
        store_null(node, slot)
        node = 0
    kind = load8(node + KIND) if node else PASSED
    if node and not (kind in (STRUCT, MAP) if is_object else kind == LIST):
        return False
    objects = load8(state + OBJECTS) + 1
    store8(state + OBJECTS, objects)
    store8(frame + _CLOSING, _OBJECT_ENDS if is_object else _ARRAY_ENDS)
    store8(frame + _NODE, node)
    store8(frame + _SLOT, slot)
    store8(frame + _OBJECT, objects)
    store8(frame + _EXPECTED, node + COLUMN)
    # Of an array or map the place of its next element.
    store8(frame + _COUNT, 0)
    if kind in (LIST, MAP):
        store8(frame + _COUNT, load8(load8(node + VALUES) + 8 * slot))
    return True


@compiled
def _close(frame: int) -> bool:
    """Ends an object or array; False: a required field is absent."""
    node, slot = load8(frame + _NODE), load8(frame + _SLOT)
    if node == 0:
        return True
    if load8(node + KIND) in (LIST, MAP):
        store8(load8(node + VALUES) + 8 * slot + 8, load8(frame + _COUNT))
    elif load8(frame + _COUNT) < load8(node + FIELDS):
        field, end = node + COLUMN, load8(node + END)
        while field < end:
            if load8(field + SEEN) != load8(frame + _OBJECT):
                if load8(field + FLAGS) & REQUIRED:
                    return False
                store_null(field, slot)
            field = load8(field + END)
    if load8(node + VALIDITY):
        store_bit(load8(node + VALIDITY), slot, 1)
    return True


@compiled
def _map_key(at: int, end: int, node: int, place: int, first: int, state: int) -> int:
    """Reads and stores a key of a map; returns the address of its value."""
    if at >= end or load1(at) != _QUOTE or place - first >= _MOST_KEYS:
        return DOUBT
    behind, escaped = text_end(at + 1, end)
    if behind <= 0:
        return DOUBT
    key = node + COLUMN
    behind = _store_text(at + 1, behind, escaped, key, place, state)
    if behind <= 0:
        return behind
    offsets, data = load8(key + VALUES), load8(key + DATA)
    start, size = load8(offsets + 8 * place), load8(offsets + 8 * place + 8)
    size -= start
    for other in range(first, place):
        begins = load8(offsets + 8 * other)
        if load8(offsets + 8 * other + 8) - begins == size:
            same = 0
            while same < size and load1(data + start + same) == load1(data + begins + same):
                same += 1
            if same == size:
                return DOUBT  # the last of two counts
    store_bit(load8(key + VALIDITY), place, 1)
    at = _space(behind, end)
    return at + 1 if at < end and load1(at) == _COLON else DOUBT


@compiled
def _next(at: int, end: int, frame: int, state: int) -> int:
    """In an open object reads a name, in a map a key, in an array finds room; `_NEXT` and
    `_NEXT_SLOT` are where the value belongs."""
    node, slot = load8(frame + _NODE), load8(frame + _SLOT)
    kind = load8(node + KIND) if node else PASSED
    if kind not in (LIST, MAP):
        store8(frame + _NEXT_SLOT, slot)
        if load8(frame + _CLOSING) == _OBJECT_ENDS:
            return _key(at, end, frame)
        store8(frame + _NEXT, 0)
        return at
    element, place = node + COLUMN, load8(frame + _COUNT)
    if place >= load8(element + ROOM):
        return no_room_for_elements(node, state)
    if kind == MAP:
        at = _map_key(at, end, node, place, load8(load8(node + VALUES) + 8 * slot), state)
        element += COLUMN
    store8(frame + _COUNT, place + 1)
    store8(frame + _NEXT, element)
    store8(frame + _NEXT_SLOT, place)
    return at


@compiled
def _record(at: int, end: int, node: int, slot: int, state: int) -> int:
    """Reads a record; returns an address, `DOUBT` or `FULL`."""
    bottom = load8(state + STACK)
    frame = bottom - _FRAME  # nothing is open
    while True:
        at = _space(at, end)
        if at >= end:
            return DOUBT
        byte = load1(at)
        opened = byte in (_OBJECT_OPENS, _ARRAY_OPENS)
        if opened:
            frame += _FRAME
            if frame == bottom + MOST_OPEN * _FRAME or not _open(frame, byte, node, slot, state):
                return DOUBT
            at += 1
        else:
            at = _scalar(at, end, node, slot, state)
            if at <= 0:
                return at
        while True:
            at = _space(at, end)
            if frame < bottom:
                return at if at == end else DOUBT
            if at >= end:
                return DOUBT
            byte = load1(at)
            if byte != load8(frame + _CLOSING):
                break
            if not _close(frame):
                return DOUBT
            at += 1
            frame -= _FRAME
            opened = False
        if not opened:
            if byte != _COMMA:
                return DOUBT
            at = _space(at + 1, end)
        at = _next(at, end, frame, state)
        if at <= 0:
            return at
        node, slot = load8(frame + _NEXT), load8(frame + _NEXT_SLOT)


@cached("int64(int64, int64, int64, int64, int64, int64)")
def decode(data: int, starts: int, sizes: int, count: int, program: int, state: int) -> int:
    """Reads records from row `ROW` on, until a node has no room: `FULL`, else 0."""
    row, slot = load8(state + ROW), load8(state + SLOT)
    doubtful = load8(state + DOUBTFUL)
    result = 0
    while row < count:
        size = load8(sizes + 8 * row)
        at = data + load8(starts + 8 * row)
        result = _record(at, at + size, program, slot, state) if size >= 0 else DOUBT
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
