"""Columns as programs for compiled readers, and what these have read as arrays. Runs on executors.

In: columns as one struct, and values of records as slices of bytes. Out: the rows that a compiled
reader has read, in order, and the numbers of the doubtful ones, which another reader decides about.
`in_order` puts the rows of both together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.native import programs
from frazil.native.columns import (
    BIT,
    COLUMN,
    DATA,
    DATA_ROOM,
    OFFSETS,
    ROOM,
    VALIDITY,
    VALUES,
    WORDS,
    Longs,
)
from frazil.native.compiler import CHECKED
from frazil.native.memory import SLACK, watch

#: Room for texts of a column at first, in bytes for each record.
_TEXT = 24
#: The words of a column that has no place in a program yet.
_NOWHERE = np.zeros(0, np.int64)


def fields_below(kind: pa.DataType) -> list[pa.Field]:
    """The columns directly below one of this type. Maps have some if their keys are texts."""
    if pa.types.is_struct(kind):
        return [kind.field(i) for i in range(kind.num_fields)]
    if pa.types.is_map(kind):
        is_text = pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)
        return [kind.key_field, kind.item_field] if is_text else []
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [kind.value_field]
    return []


def _stored_as(kind: pa.DataType) -> pa.DataType:
    """The type by which compiled code stores a column of this type."""
    if pa.types.is_map(kind):
        return pa.large_list(pa.struct([kind.key_field, kind.item_field]))
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_field)
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _width_of(kind: pa.DataType) -> int:
    """Bytes of a value; 0 without values (a struct), `BIT`, or `OFFSETS`."""
    types = pa.types
    if types.is_struct(kind) or types.is_null(kind):
        return 0
    if types.is_boolean(kind):
        return BIT
    if types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return OFFSETS
    return int(kind.bit_width) // 8


class ColumnNode:
    """A column of a program, its words and its buffers."""

    def __init__(
        self,
        field: pa.Field,
        kind: int,
        numbers: Mapping[int, int],
        children: Sequence[ColumnNode],
        stored: pa.DataType | None = None,
        nullable: bool = True,
    ) -> None:
        """`kind`, `numbers`: what the compiled reader finds in its words. `stored`: the type by
        which it is stored if not by `_stored_as`; null: it is not, and all null. `nullable`: it has
        a bit for each value."""
        self.field = field
        self.kind = kind
        self.children = children
        self.words = _NOWHERE
        self._numbers = numbers
        self._stored = _stored_as(field.type) if stored is None else stored
        self._is_stored = not pa.types.is_null(self._stored)
        self._width = _width_of(self._stored)
        self._has_data = self._width == OFFSETS and not pa.types.is_large_list(self._stored)
        self._nullable = nullable
        self._release()

    def flat(self) -> Iterator[ColumnNode]:
        """This column and all below it, in the order of a program."""
        yield self
        for child in self.children:
            yield from child.flat()

    def place(self, words: Longs, end: int) -> None:
        """`words`: its row in the table of the program. `end`: the address behind all below it."""
        self.words = words
        for word, number in self._numbers.items():
            words[word // 8] = number
        words[programs.KIND // 8], words[programs.END // 8] = self.kind, end
        words[programs.WIDTH // 8] = self._width
        words[ROOM // 8] = 0 if self._is_stored else 1 << 62

    def start(self, room: int) -> None:
        """New buffers, empty, for so many values."""
        self._release()
        if self._is_stored:
            self._grow_values(room)
            if self._has_data:
                self._grow_data(_TEXT * room)
        for child in self.children:
            child.start(room)

    def _release(self) -> None:
        """Keeps no buffer: arrays made of them do."""
        self._validity: Any = None
        self._values: Any = None
        self._data: Any = None

    def make_room(self, data: int) -> None:
        """Room for so many bytes of texts; 0: for more elements of a list or map."""
        if data:
            self._grow_data(max(data, 2 * int(self.words[DATA_ROOM // 8])))
        else:
            room = 64 + 2 * int(self.children[0].words[ROOM // 8])
            for child in self.children:
                child._grow(room)

    def _grow(self, room: int) -> None:
        """Room for so many values of this column, and so of a struct's fields."""
        if self._is_stored:
            self._grow_values(room)
        for child in self.children if pa.types.is_struct(self.field.type) else ():
            child._grow(room)

    def _grow_values(self, room: int) -> None:
        bits = (room + 7) // 8 + SLACK
        if self._nullable:
            self._validity = self._sized(self._validity, VALIDITY, bits)
        if self._width:
            fresh = self._values is None
            sizes = {BIT: bits, OFFSETS: 8 * room + 8 + SLACK}
            size = sizes.get(self._width, self._width * room + SLACK)
            self._values = self._sized(self._values, VALUES, size)
            if fresh and self._width == OFFSETS:
                np.frombuffer(self._values, np.int64, 1)[0] = 0
        self.words[ROOM // 8] = room

    def _grow_data(self, room: int) -> None:
        self._data = self._sized(self._data, DATA, room + SLACK)
        self.words[DATA_ROOM // 8] = room

    def _sized(self, buffer: Any, word: int, size: int) -> Any:
        if buffer is None:
            buffer = pa.allocate_buffer(size, resizable=True)
        else:
            buffer.resize(size)
        self.words[word // 8] = buffer.address
        return buffer

    @property
    def buffers(self) -> list[pa.Buffer]:
        every = self._validity, self._values, self._data
        return [buffer for buffer in every if buffer is not None]

    def array(self, length: int) -> pa.Array:
        """What was read. A required field has a value also where its struct is null."""
        kind = self.field.type
        if not self._is_stored:
            return pa.nulls(length, kind)
        is_map = pa.types.is_map(kind)
        if is_map or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            count = self._offset(length)
            items = [child.array(count) for child in self.children]
            if is_map:
                fields = [kind.key_field, kind.item_field]
                items = [pa.StructArray.from_arrays(items, fields=fields)]
            array = self._array(length, items)
            array = array if pa.types.is_large_list(kind) else _with_narrow_offsets(array, kind)
        else:
            array = self._array(length, [child.array(length) for child in self.children])
            if isinstance(kind, pa.BaseExtensionType):
                array = pa.ExtensionArray.from_storage(kind, array)
        self._release()
        if pa.types.is_fixed_size_binary(kind) and array.type != kind:
            return _with_places(array, kind)
        return array if array.type == kind else array.cast(kind)

    def _array(self, length: int, children: list[pa.Array]) -> pa.Array:
        """The first values, in the type by which they are stored."""
        buffers = [self._validity]
        if self._width:
            buffers.append(self._values)
        if self._has_data:
            buffers.append(self._data.slice(0, self._offset(length)))
        return pa.Array.from_buffers(self._stored, length, buffers, children=children)

    def _offset(self, length: int) -> int:
        """Behind so many values: bytes of data, or items of lists."""
        return int(np.frombuffer(self._values, np.int64, length + 1)[-1])


def _with_narrow_offsets(array: pa.Array, kind: pa.DataType) -> pa.Array:
    validity, offsets = array.buffers()[:2]
    narrow = np.frombuffer(offsets, np.int64, len(array) + 1).astype(np.int32)
    buffers = [validity, pa.py_buffer(narrow)]
    return pa.Array.from_buffers(kind, len(array), buffers, children=[array.values])


def _with_places(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values of one size, with a place for the absent ones too, which are null."""
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1)
    values = pa.Array.from_buffers(
        kind, int(offsets[-1]) // kind.byte_width, [None, array.buffers()[2]]
    )
    places = pa.array(offsets[:-1] // kind.byte_width, mask=np.diff(offsets) == 0)
    return values.take(places)


class ColumnProgram:
    """Reads the plain records of chunks by compiled code. Threads take turns."""

    def __init__(
        self,
        top: ColumnNode,
        decode: Callable[[int, int, int, int, int, int], int],
        stack: int,
    ) -> None:
        """`top`: the columns as one required struct. `decode`: the compiled reader, which needs a
        stack of so many words."""
        self._nodes = list(top.flat())
        self._words = np.zeros((len(self._nodes), WORDS), np.int64)
        for at, node in enumerate(self._nodes):
            below = sum(1 for _ in node.flat())
            node.place(self._words[at], _address(self._words) + COLUMN * (at + below))
        self._decode = decode
        self._stack = np.zeros(stack, np.int64)
        self._state = np.zeros(programs.STATE_WORDS, np.int64)
        self._state[programs.STACK // 8] = _address(self._stack)
        #: what words point to
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def _keep(self, array: Any) -> int:
        """Keeps an array that words point to; returns its address."""
        self._kept.append(array)
        return _address(array)

    def decode(self, values: ByteSlices) -> tuple[pa.StructArray, Longs]:
        """The records that are read, in order, and the rows of the others."""
        with self._lock:
            return self._decoded(values)

    def _decoded(self, values: ByteSlices) -> tuple[pa.StructArray, Longs]:
        count, top, state = len(values), self._nodes[0], self._state
        starts, sizes = map(np.ascontiguousarray, (values.starts, values.sizes))
        doubtful = np.empty(count, np.int64)
        state[[programs.ROW // 8, programs.SLOT // 8, programs.DOUBTFUL // 8]] = 0
        state[programs.DOUBTFUL_ROWS // 8] = _address(doubtful)
        top.start(count)
        places = values.address, _address(starts), _address(sizes), count
        while True:
            if CHECKED:
                watch(self._watched(values, starts, sizes, doubtful))
            if self._decode(*places, _address(self._words), _address(state)) != programs.FULL:
                break
            at = (int(state[programs.FULL_NODE // 8]) - _address(self._words)) // COLUMN
            self._nodes[at].make_room(int(state[programs.NEEDED // 8]))
        rows = top.array(int(state[programs.SLOT // 8]))
        return rows, doubtful[: state[programs.DOUBTFUL // 8]]

    def _watched(self, values: ByteSlices, *arrays: Any) -> list[tuple[int, int]]:
        """All that compiled code may access."""
        every = [self._words, self._stack, self._state, *self._kept, values.data, *arrays]
        buffers = [buffer for node in self._nodes for buffer in node.buffers]
        return [
            *((_address(array), array.nbytes) for array in every),
            *((buffer.address, buffer.size) for buffer in buffers),
        ]


def in_order(
    rows: pa.StructArray, others: pa.StructArray, doubtful: Longs, bad: Sequence[int] = ()
) -> pa.StructArray:
    """Rows that were read in two ways as one array. `others`: what was read of the `doubtful` ones,
    without those that are `bad`, the numbers of which are those of all rows."""
    if not len(others):
        return rows
    is_other = np.zeros(len(rows) + len(doubtful), bool)
    is_other[doubtful] = True
    is_other = np.delete(is_other, bad)
    order = np.empty(len(is_other), np.int64)
    order[~is_other] = np.arange(len(rows))
    order[is_other] = np.arange(len(rows), len(is_other))
    return pa.concat_arrays([rows, others]).take(pa.array(order))


def table_of(rows: pa.StructArray, schema: pa.Schema) -> pa.Table:
    """The columns of a struct as a table."""
    if not len(schema):  # only a struct array keeps the number of its rows
        return pa.Table.from_batches([pa.RecordBatch.from_struct_array(rows)])
    columns = [rows.field(i) for i in range(len(schema))]
    return pa.Table.from_arrays(columns, schema=schema)


def _address(array: Any) -> int:
    return int(array.ctypes.data)
