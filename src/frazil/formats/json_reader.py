"""JSON values → columns, or rejected records. Runs on executors.

In: columns, and the values of a chunk. Out: one table with the rows in order, and an
`UndecodableRecord` for each value that does not fit.

Two readers: compiled code (`frazil.native.json`) reads plain records and leaves out doubtful ones;
`frazil.formats.json_values` reads those one by one, and is the only one that rejects. `JsonProgram`
says to compiled code which columns there are, `JsonShape` asks both readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.cast import by_place, project
from frazil.arrow.column_program import ColumnNode, ColumnProgram, fields_below, in_order, table_of
from frazil.config.column_types import EPOCH_UNITS
from frazil.formats.decode_result import Decoded, DecodedChunk, UndecodableRecord, accounted
from frazil.formats.json_values import (
    EPOCH,
    NestedTooDeep,
    NotThisShape,
    converter,
    ignored_fields,
    no_json,
    parse_json,
)
from frazil.native import json as native
from frazil.native.columns import WORDS
from frazil.native.memory import SLACK
from frazil.native.programs import FLAGS, KIND, REQUIRED

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
    (lambda kind: pa.types.is_map(kind) and bool(fields_below(kind)), native.MAP),
    (pa.types.is_binary, native.BINARY),
    (pa.types.is_large_binary, native.BINARY),
    (pa.types.is_fixed_size_binary, native.FIXED),
)
#: Metadata of a column of text: it takes the text of any value but objects and arrays.
RAW = b"frazil.raw"


def _node(field: pa.Field) -> ColumnNode:
    kinds = (kind for is_kind, kind in _KINDS if is_kind(field.type))
    kind = native.RAW if RAW in (field.metadata or {}) else next(kinds, native.OTHER)
    children = [_node(child) for child in fields_below(field.type)]
    stored = pa.null() if kind == native.OTHER else None
    return ColumnNode(field, kind, _numbers(field, kind), children, stored)


def _numbers(field: pa.Field, node_kind: int) -> dict[int, int]:
    """Word of a node → what stands in it."""
    kind = field.type
    numbers = {FLAGS: 0 if field.nullable else REQUIRED}
    if node_kind in (native.TIME, native.TIMESTAMP):
        numbers[native.SCALE] = {"us": 6, "ns": 9}[kind.unit]
    if node_kind == native.TIMESTAMP:
        numbers[FLAGS] |= native.ZONED if kind.tz else 0
        if unit := (field.metadata or {}).get(EPOCH):
            numbers[FLAGS] |= native.EPOCH
            numbers[native.GIVEN_SCALE] = EPOCH_UNITS[unit.decode()]
    if node_kind == native.DECIMAL:
        numbers[native.SCALE] = kind.scale
        numbers[native.BOUND] = 10 ** min(kind.precision, 18)
    return numbers


class JsonProgram(ColumnProgram):
    """Reads the plain records of chunks."""

    def __init__(self, top: pa.Field) -> None:
        """`top`: the columns as one required struct; fields that are passed over stand in its
        metadata (see `json_values.IGNORED`)."""
        super().__init__(_node(top), native.decode, native.MOST_OPEN * native.FRAME_WORDS)
        for node in self._nodes:
            if node.kind == native.STRUCT:
                node.words[native.FIELDS // 8] = len(node.children)
                passed = ignored_fields(node.field.metadata)
                if passed is None:
                    node.words[FLAGS // 8] |= native.OPEN
                self._name(node, sorted(passed or ()))

    def _name(self, node: ColumnNode, passed: list[str]) -> None:
        """Makes the table by which fields of a struct are found."""
        others = np.zeros((len(passed), WORDS), np.int64)
        others[:, KIND // 8] = native.PASSED
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
            padded = self._keep(np.frombuffer(text + bytes(SLACK), np.uint8))
            words[native.NAME // 8], words[native.NAME_SIZE // 8] = padded, len(text)
            index = _hash(text) & (size - 1)
            while table[index]:
                index = (index + 1) & (size - 1)
            table[index] = words.ctypes.data
        self._keep(others)
        node.words[native.TABLE // 8], node.words[native.MASK // 8] = self._keep(table), size - 1


#: Names that stand in JSON as they are.
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')


def _hash(name: bytes) -> int:
    """As the compiled code has it, in 64 bits."""
    hashed = len(name)
    for at in range(0, len(name) // 8 * 8 + 8, 8):
        word = int.from_bytes(name[at : at + 8], "little")
        hashed = (hashed ^ word) * native.HASH_FACTOR & (1 << 64) - 1
    return hashed >> native.HASH_SHIFT


class JsonShape:
    """Columns, compiled to read JSON objects into them. Fields that are passed over stand in the
    metadata (see `json_values.IGNORED`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        top = pa.field("", pa.struct(list(schema)), nullable=False, metadata=schema.metadata)
        self._convert = converter(top)
        self._plain = [_without_extensions(column.type) for column in schema]
        self._program = JsonProgram(top)

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        slices = ByteSlices.of(values)
        rows, doubtful = self._program.decode(slices)
        rejected: list[UndecodableRecord] = []
        bad: list[int] = []
        if len(doubtful):
            others = self._each(slices, doubtful.tolist(), rejected)
            bad = [record.index for record in rejected]
            rows = in_order(rows, others, doubtful, bad)
        index = np.delete(np.arange(len(values)), bad) if bad else None
        chunk = DecodedChunk(table_of(rows, self._schema), index, None)
        return accounted(len(values), [chunk] if len(rows) else [], rejected)

    def _each(
        self, values: ByteSlices, places: Iterable[int], rejected: list[UndecodableRecord]
    ) -> pa.StructArray:
        rows = []
        for i in places:
            value = values[i]
            if value is None:
                rejected.append(UndecodableRecord(i, "null", "cannot read the value: found null"))
                continue
            try:
                rows.append(self._convert(parse_json(value)))
            except NotThisShape as error:
                rejected.append(UndecodableRecord(i, "shape", str(error)))
            except (RecursionError, NestedTooDeep):
                rejected.append(UndecodableRecord(i, "limit", str(NestedTooDeep())))
            except ValueError as error:
                rejected.append(UndecodableRecord(i, "json", no_json(value, error)))
        if not len(self._schema):
            return pa.array(rows, pa.struct([]))
        arrays = []
        for column, plain in zip(self._schema, self._plain, strict=True):
            array = pa.array([row[column.name] for row in rows], plain)
            arrays.append(array if plain == column.type else project(array, column, by_place))
        return pa.StructArray.from_arrays(arrays, fields=list(self._schema))


def _without_extensions(kind: pa.DataType) -> pa.DataType:
    """The type that Arrow builds from Python values: in nested types bytes instead of UUIDs."""

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(_without_extensions(field.type))

    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([inside(child) for child in kind])
    if pa.types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = inside(kind.value_field)
        return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element)
    return kind
