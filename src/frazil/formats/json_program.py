"""Columns → the program by which `frazil.native.json` fills them. Runs on executors.

In: the columns of a table, as one struct. Out, of each chunk: a table of the records that are read
by compiled code, in order, and the rows of the doubtful ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.config.column_types import EPOCH_UNITS
from frazil.formats.json_values import EPOCH, ignored_fields
from frazil.native import json as native
from frazil.native.columns import COLUMN, LENGTH, ROOM, WORDS, ColumnBuffers, Longs
from frazil.native.compiler import CHECKED
from frazil.native.memory import SLACK, watch


def _is_text_map(kind: pa.DataType) -> bool:
    if not pa.types.is_map(kind):
        return False
    return bool(pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type))


_KINDS = (
    (pa.types.is_struct, native.STRUCT),
    (pa.types.is_list, native.LIST),
    (pa.types.is_large_list, native.LIST),
    (pa.types.is_boolean, native.BOOLEAN),
    (pa.types.is_int32, native.INT32),
    (pa.types.is_int64, native.INT64),
    (pa.types.is_float32, native.FLOAT32),
    (pa.types.is_float64, native.FLOAT64),
    (pa.types.is_string, native.TEXT),
    (pa.types.is_large_string, native.TEXT),
    (pa.types.is_null, native.NOTHING),
    (pa.types.is_date32, native.DATE),
    (pa.types.is_time64, native.TIME),
    (pa.types.is_timestamp, native.TIMESTAMP),
    (pa.types.is_decimal128, native.DECIMAL),
    (lambda kind: isinstance(kind, pa.UuidType), native.UUID),
    (_is_text_map, native.MAP),
    (pa.types.is_binary, native.BINARY),
    (pa.types.is_large_binary, native.BINARY),
    (pa.types.is_fixed_size_binary, native.FIXED),
)
#: Metadata of a column of text: it takes the text of any value but objects and arrays.
RAW = b"frazil.raw"
#: Room for texts of a column at first, in bytes for each record.
_TEXT = 24


class _Node:
    """A column of the program."""

    def __init__(self, words: Longs, field: pa.Field) -> None:
        self.words = words
        self.field = field
        kinds = (kind for is_kind, kind in _KINDS if is_kind(field.type))
        self.kind = next(kinds, native.OTHER)
        if RAW in (field.metadata or {}):
            self.kind = native.RAW
        words[native.KIND // 8] = self.kind
        words[native.FLAGS // 8] = 0 if field.nullable else native.REQUIRED
        self._set_scale(field)
        self.children: list[_Node] = []
        stored: pa.DataType | None = field.type
        if self.kind == native.LIST:
            stored = pa.large_list(field.type.value_field)
        elif self.kind == native.MAP:
            stored = pa.large_list(pa.struct([field.type.key_field, field.type.item_field]))
        elif self.kind == native.BINARY:
            stored = pa.large_binary()
        elif self.kind in (native.TEXT, native.RAW):
            stored = pa.large_string()
        elif self.kind == native.UUID:
            stored = field.type.storage_type
        elif self.kind in (native.NOTHING, native.OTHER):
            stored = None
            words[ROOM // 8] = 1 << 62
        self.stored = stored
        self.buffers = None if stored is None else ColumnBuffers(words, stored, nullable=True)

    def _set_scale(self, field: pa.Field) -> None:
        words, kind = self.words, field.type
        if self.kind in (native.TIME, native.TIMESTAMP):
            words[native.SCALE // 8] = {"us": 6, "ns": 9}[kind.unit]
        if self.kind == native.TIMESTAMP:
            words[native.FLAGS // 8] |= native.ZONED if kind.tz else 0
            if unit := (field.metadata or {}).get(EPOCH):
                words[native.FLAGS // 8] |= native.EPOCH
                words[native.GIVEN_SCALE // 8] = EPOCH_UNITS[unit.decode()]
        if self.kind == native.DECIMAL:
            words[native.SCALE // 8] = kind.scale
            words[native.BOUND // 8] = 10 ** min(kind.precision, 18)
        if self.kind == native.FIXED:
            words[native.WIDTH // 8] = kind.byte_width

    def grow(self, room: int) -> None:
        """Room for so many values of this column, and so of a struct's fields."""
        if self.buffers is not None:
            self.buffers.grow(room)
        for child in self.children if self.kind == native.STRUCT else ():
            child.grow(room)

    def start(self, room: int) -> None:
        if self.buffers is not None:
            self.buffers.start(room, _TEXT * room)
        for child in self.children:
            child.start(room)

    def make_room(self, data: int) -> None:
        """Room for so many bytes of texts; 0: for more elements of a list or map."""
        assert self.buffers is not None
        if data:
            self.buffers.grow_data(max(data, 2 * self.buffers.data_room))
        else:
            room = 64 + 2 * int(self.children[0].words[ROOM // 8])
            for child in self.children:
                child.grow(room)

    @property
    def all_buffers(self) -> list[pa.Buffer]:
        if self.buffers is None:
            return []
        every = self.buffers.validity, self.buffers.values, self.buffers.data
        return [buffer for buffer in every if buffer is not None]

    def array(self, length: int) -> pa.Array:
        """What was read. A required field has a value also where its struct is null."""
        kind = self.field.type
        if self.buffers is None:
            return pa.nulls(length, kind)
        assert self.stored is not None
        self.words[LENGTH // 8] = length
        if self.kind in (native.LIST, native.MAP):
            items = [child.array(self.buffers.last_offset()) for child in self.children]
            if self.kind == native.MAP:
                fields = [kind.key_field, kind.item_field]
                items = [pa.StructArray.from_arrays(items, fields=fields)]
            array = self.buffers.array(self.stored, items)
            return array if pa.types.is_large_list(kind) else _with_narrow_offsets(array, kind)
        array = self.buffers.array(self.stored, [child.array(length) for child in self.children])
        if self.kind == native.UUID:
            return pa.ExtensionArray.from_storage(kind, array)
        return array if array.type == kind else array.cast(kind)


def _with_narrow_offsets(array: pa.Array, kind: pa.DataType) -> pa.Array:
    validity, offsets = array.buffers()[:2]
    narrow = np.frombuffer(offsets, np.int64, len(array) + 1).astype(np.int32)
    buffers = [validity, pa.py_buffer(narrow)]
    return pa.Array.from_buffers(kind, len(array), buffers, children=[array.values])


class JsonProgram:
    """Reads the plain records of chunks."""

    def __init__(self, top: pa.Field) -> None:
        """`top`: the columns as one required struct; fields that are passed over stand in its
        metadata (see `json_values.IGNORED`)."""
        fields = list(_fields(top))
        self._words = np.zeros((len(fields), WORDS), np.int64)
        self._nodes = [
            _Node(words, field) for words, field in zip(self._words, fields, strict=True)
        ]
        #: what the words point to
        self._kept: list[Any] = []
        if self._built(0) != len(fields):
            raise AssertionError("a column without a node")
        self._stack = np.zeros(native.MOST_OPEN * native.FRAME_WORDS, np.int64)
        self._state = np.zeros(native.STATE_WORDS, np.int64)
        self._state[native.STACK // 8] = _address(self._stack)

    def _built(self, place: int) -> int:
        """Connects a node with those below it; returns the place behind them."""
        node, behind = self._nodes[place], place + 1
        while len(node.children) < _inside(node.field.type):
            node.children.append(self._nodes[behind])
            behind = self._built(behind)
        node.words[native.END // 8] = _address(self._words) + COLUMN * behind
        if node.kind == native.STRUCT:
            node.words[native.FIELDS // 8] = len(node.children)
            passed = ignored_fields(node.field.metadata)
            if passed is None:
                node.words[native.FLAGS // 8] |= native.OPEN
            self._name(node, sorted(passed or ()))
        return behind

    def _name(self, node: _Node, passed: list[str]) -> None:
        """Makes the table by which fields of a struct are found."""
        others = np.zeros((len(passed), WORDS), np.int64)
        others[:, native.KIND // 8] = native.PASSED
        size = 4
        while size < 2 * (len(node.children) + len(passed)):
            size *= 2
        table = np.zeros(size, np.int64)
        fields = [(child.field.name, child.words) for child in node.children]
        fields += zip(passed, others, strict=True)
        for name, words in fields:
            text = name.encode()
            words[native.NAME_SIZE // 8] = -1
            if not _PLAIN.fullmatch(text):
                continue  # in JSON it stands with escapes, which are not compared
            padded = np.frombuffer(text + bytes(SLACK), np.uint8)
            words[native.NAME // 8], words[native.NAME_SIZE // 8] = _address(padded), len(text)
            index = _hash(text) & (size - 1)
            while table[index]:
                index = (index + 1) & (size - 1)
            table[index] = _address(words)
            self._kept.append(padded)
        self._kept += (others, table)
        node.words[native.TABLE // 8], node.words[native.MASK // 8] = _address(table), size - 1

    def decode(self, values: ByteSlices) -> tuple[pa.StructArray, Longs]:
        """The records that are read, in order, and the rows of the others."""
        count, top, state = len(values), self._nodes[0], self._state
        starts, sizes = map(np.ascontiguousarray, (values.starts, values.sizes))
        doubtful = np.empty(count, np.int64)
        state[[native.ROW // 8, native.SLOT // 8, native.DOUBTFUL // 8]] = 0
        state[native.DOUBTFUL_ROWS // 8] = _address(doubtful)
        top.start(count)
        places = values.address, _address(starts), _address(sizes), count
        while True:
            if CHECKED:
                watch(self._watched(values, starts, sizes, doubtful))
            if native.decode(*places, _address(self._words), _address(state)) != native.FULL:
                break
            at = (int(state[native.FULL_NODE // 8]) - _address(self._words)) // COLUMN
            self._nodes[at].make_room(int(state[native.NEEDED // 8]))
        rows = top.array(int(state[native.SLOT // 8]))
        return rows, doubtful[: state[native.DOUBTFUL // 8]]

    def _watched(self, values: ByteSlices, *arrays: Any) -> list[tuple[int, int]]:
        """All that compiled code may access."""
        every = [self._words, self._stack, self._state, *self._kept, values.data, *arrays]
        buffers = [buffer for node in self._nodes for buffer in node.all_buffers]
        return [
            *((_address(array), array.nbytes) for array in every),
            *((buffer.address, buffer.size) for buffer in buffers),
        ]


def in_order(rows: pa.StructArray, others: pa.StructArray, mask: Any) -> pa.StructArray:
    """Rows that were read in two ways as one array. `mask`: which of them are the others."""
    if not len(others):
        return rows
    order = np.empty(len(mask), np.int64)
    order[~mask] = np.arange(len(rows))
    order[mask] = np.arange(len(rows), len(mask))
    return pa.concat_arrays([rows, others]).take(pa.array(order))


#: Names that stand in JSON as they are.
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')


def _fields(field: pa.Field) -> Iterator[pa.Field]:
    """A column and all below it, those of a struct in order."""
    yield field
    kind = field.type
    if _is_text_map(kind):
        yield from (*_fields(kind.key_field), *_fields(kind.item_field))
    for i in range(0 if _is_text_map(kind) else _inside(kind)):
        yield from _fields(kind.field(i) if pa.types.is_struct(kind) else kind.value_field)


def _inside(kind: pa.DataType) -> int:
    """The number of columns directly below one of this type."""
    if pa.types.is_struct(kind):
        return int(kind.num_fields)
    if _is_text_map(kind):
        return 2
    return int(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _address(array: Any) -> int:
    return int(array.ctypes.data)


def _hash(name: bytes) -> int:
    """As the compiled code has it, in 64 bits."""
    hashed = len(name)
    for at in range(0, len(name) // 8 * 8 + 8, 8):
        word = int.from_bytes(name[at : at + 8], "little")
        hashed = (hashed ^ word) * native.HASH_FACTOR & (1 << 64) - 1
    return hashed >> native.HASH_SHIFT
