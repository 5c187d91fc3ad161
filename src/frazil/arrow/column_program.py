"""Columns as programs for compiled readers, and what these have read as arrays. Runs on executors.

In: columns as one struct, and values of records as slices of bytes. Out: the rows that a compiled
reader has read, in order, and the numbers of the doubtful ones, which another reader decides about.
`in_order` puts the rows of both together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.native import programs
from frazil.native.columns import COLUMN, ROOM, WORDS, ColumnBuffers, Longs
from frazil.native.compiler import CHECKED
from frazil.native.memory import watch

#: Room for texts of a column at first, in bytes for each record.
_TEXT = 24


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


def stored_as(kind: pa.DataType) -> pa.DataType:
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


class ColumnNode:
    """A column of a program."""

    def __init__(
        self, words: Longs, field: pa.Field, kind: int, stored: pa.DataType | None, nullable: bool
    ) -> None:
        """`kind`: as the compiled reader has it. `stored`: the type by which it is stored; None: it
        is not, and all null. `nullable`: it has a bit for each value."""
        self.words = words
        self.field = field
        self.kind = kind
        self.children: list[ColumnNode] = []
        self._buffers = None if stored is None else ColumnBuffers(words, stored, nullable)
        words[programs.KIND // 8] = kind
        if self._buffers is None:
            words[ROOM // 8] = 1 << 62
        else:
            words[programs.WIDTH // 8] = self._buffers.width

    def start(self, room: int) -> None:
        if self._buffers is not None:
            self._buffers.start(room, _TEXT * room)
        for child in self.children:
            child.start(room)

    def make_room(self, data: int) -> None:
        """Room for so many bytes of texts; 0: for more elements of a list or map."""
        assert self._buffers is not None
        if data:
            self._buffers.grow_data(max(data, 2 * self._buffers.data_room))
        else:
            room = 64 + 2 * int(self.children[0].words[ROOM // 8])
            for child in self.children:
                child._grow(room)

    def _grow(self, room: int) -> None:
        """Room for so many values of this column, and so of a struct's fields."""
        if self._buffers is not None:
            self._buffers.grow(room)
        for child in self.children if pa.types.is_struct(self.field.type) else ():
            child._grow(room)

    @property
    def buffers(self) -> list[pa.Buffer]:
        return self._buffers.buffers if self._buffers is not None else []

    def array(self, length: int) -> pa.Array:
        """What was read. A required field has a value also where its struct is null."""
        kind = self.field.type
        if self._buffers is None:
            return pa.nulls(length, kind)
        is_map = pa.types.is_map(kind)
        if is_map or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            count = self._buffers.offset(length)
            items = [child.array(count) for child in self.children]
            if is_map:
                fields = [kind.key_field, kind.item_field]
                items = [pa.StructArray.from_arrays(items, fields=fields)]
            array = self._buffers.array(length, items)
            array = array if pa.types.is_large_list(kind) else _with_narrow_offsets(array, kind)
        else:
            array = self._buffers.array(length, [child.array(length) for child in self.children])
            if isinstance(kind, pa.BaseExtensionType):
                array = pa.ExtensionArray.from_storage(kind, array)
        self._buffers.release()
        if pa.types.is_fixed_size_binary(kind) and array.type != kind:
            return _with_places(array, kind)
        return array if array.type == kind else array.cast(kind)


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
        top: pa.Field,
        node_of: Callable[[Longs, pa.Field], ColumnNode],
        decode: Callable[[int, int, int, int, int, int], int],
        stack: int,
    ) -> None:
        """`top`: the columns as one required struct. `decode`: the compiled reader, which needs a
        stack of so many words."""
        fields = list(_flat(top))
        self._words = np.zeros((len(fields), WORDS), np.int64)
        rows = zip(self._words, fields, strict=True)
        self._nodes = [node_of(words, field) for words, field in rows]
        self._connect(0)
        self._decode = decode
        self._stack = np.zeros(stack, np.int64)
        self._state = np.zeros(programs.STATE_WORDS, np.int64)
        self._state[programs.STACK // 8] = address(self._stack)
        #: what words point to
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def _connect(self, place: int) -> int:
        """Connects a node with those below it; returns the place behind them."""
        node, behind = self._nodes[place], place + 1
        for _ in fields_below(node.field.type):
            node.children.append(self._nodes[behind])
            behind = self._connect(behind)
        node.words[programs.END // 8] = address(self._words) + COLUMN * behind
        return behind

    def decode(self, values: ByteSlices) -> tuple[pa.StructArray, Longs]:
        """The records that are read, in order, and the rows of the others."""
        with self._lock:
            return self._decoded(values)

    def _decoded(self, values: ByteSlices) -> tuple[pa.StructArray, Longs]:
        count, top, state = len(values), self._nodes[0], self._state
        starts, sizes = map(np.ascontiguousarray, (values.starts, values.sizes))
        doubtful = np.empty(count, np.int64)
        state[[programs.ROW // 8, programs.SLOT // 8, programs.DOUBTFUL // 8]] = 0
        state[programs.DOUBTFUL_ROWS // 8] = address(doubtful)
        top.start(count)
        places = values.address, address(starts), address(sizes), count
        while True:
            if CHECKED:
                watch(self._watched(values, starts, sizes, doubtful))
            if self._decode(*places, address(self._words), address(state)) != programs.FULL:
                break
            at = (int(state[programs.FULL_NODE // 8]) - address(self._words)) // COLUMN
            self._nodes[at].make_room(int(state[programs.NEEDED // 8]))
        rows = top.array(int(state[programs.SLOT // 8]))
        return rows, doubtful[: state[programs.DOUBTFUL // 8]]

    def _watched(self, values: ByteSlices, *arrays: Any) -> list[tuple[int, int]]:
        """All that compiled code may access."""
        every = [self._words, self._stack, self._state, *self._kept, values.data, *arrays]
        buffers = [buffer for node in self._nodes for buffer in node.buffers]
        return [
            *((address(array), array.nbytes) for array in every),
            *((buffer.address, buffer.size) for buffer in buffers),
        ]


def _flat(field: pa.Field) -> Iterator[pa.Field]:
    """A column and all below it, in the order of a program."""
    yield field
    for child in fields_below(field.type):
        yield from _flat(child)


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


def address(array: Any) -> int:
    return int(array.ctypes.data)
