"""Programs of columns, by which compiled readers store values. Runs on executors.

A node of a program is a column (see `frazil.native.columns`); the columns inside it follow: the
fields of a struct, the element of a list, key and value of a map.

    {"id": 7, "place": {"x": 1.5}, "tags": ["a"]}     node 0  struct (the record)
                                                           1    id       long
                                                           2    place    struct
                                                           3      x      double
                                                           4    tags     list
                                                           5      element  string

A reader stores each value at a *slot* of its node: the fields of a struct have the slot of the
struct, and the elements of a list the slots from the offset on that the list before it has stored.
So a record that cannot be read leaves nothing behind: the next one is stored over it. A store may
go up to 15 bytes beyond its slot, because later slots are stored later.
"""

from __future__ import annotations

from frazil.native.columns import (
    BIT,
    COLUMN,
    DATA,
    DATA_ROOM,
    OFFSETS,
    VALIDITY,
    VALUES,
    copy,
    store_bit,
)
from frazil.native.compiler import compiled, inlined
from frazil.native.memory import load8, store8

#: Words of a node behind those of a column: the kind and flags that a reader knows, the node behind
#: this one and those inside it, and the width of a value. The words from `OWN` on are the reader's.
KIND, FLAGS, END, WIDTH, OWN = range(40, 80, 8)
#: A flag: null does not fit.
REQUIRED = 1

#: Words of the state: next row and its slot, number of doubtful rows and where they are stored, the
#: node that has no room and the bytes that it needs (0: room for its elements), the stack of open
#: values, and one word of the reader's.
ROW, SLOT, DOUBTFUL, DOUBTFUL_ROWS, FULL_NODE, NEEDED, STACK, READER = range(0, 64, 8)
STATE_WORDS = 8

#: Instead of an address: another reader decides; a buffer has no room.
DOUBT, FULL = 0, -1


@compiled
def store_null(node: int, slot: int) -> None:
    """Stores null, also in the fields of a struct; required fields of it get an empty value."""
    at, end = node, load8(node + END)
    while at < end:
        width, values = load8(at + WIDTH), load8(at + VALUES)
        if load8(at + VALIDITY):
            store_bit(load8(at + VALIDITY), slot, (at != node) & load8(at + FLAGS) & REQUIRED)
        if width == OFFSETS:
            store8(values + 8 * slot + 8, load8(values + 8 * slot))
        elif width == BIT:
            store_bit(values, slot, 0)
        else:
            for i in range(0, width, 8):
                store8(values + width * slot + i, 0)
        at = load8(at + END) if width == OFFSETS else at + COLUMN


@inlined
def has_room(node: int, needed: int, state: int) -> bool:
    """Has a column of texts or bytes room for so many bytes? If not, the state says so."""
    if needed <= load8(node + DATA_ROOM):
        return True
    store8(state + FULL_NODE, node)
    store8(state + NEEDED, needed)
    return False


@compiled
def no_room_for_elements(node: int, state: int) -> int:
    """`FULL`, and the state says that a list or map needs room for elements."""
    store8(state + FULL_NODE, node)
    store8(state + NEEDED, 0)
    return FULL


@inlined
def store_bytes(source: int, size: int, node: int, slot: int, state: int) -> bool:
    """Stores a text or bytes; False: the column has no room."""
    offsets = load8(node + VALUES) + 8 * slot
    start = load8(offsets)
    if not has_room(node, start + size, state):
        return False
    copy(load8(node + DATA) + start, source, size)
    store8(offsets + 8, start + size)
    return True
