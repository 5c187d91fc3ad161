"""JSON values → columns, or rejected records. Runs on executors.

In: columns, and the values of a chunk. Out: one table with the rows in order, and an
`UndecodableRecord` for each value that does not fit.

Two readers: compiled code (`frazil.native.json`) reads plain records and leaves out doubtful ones;
`frazil.formats.json_values` reads those one by one, and is the only one that rejects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.cast import by_place, project
from frazil.arrow.column_program import in_order, table_of
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord
from frazil.formats.json_program import JsonProgram
from frazil.formats.json_values import (
    NestedTooDeep,
    NotThisShape,
    converter,
    no_json,
    parse_json,
)


class JsonShape:
    """Columns, compiled to read JSON objects into them. Fields that are passed over stand in the
    metadata (see `json_values.IGNORED`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        top = pa.field("", pa.struct(list(schema)), nullable=False, metadata=schema.metadata)
        self._convert = converter(top)
        self._plain = [_without_extensions(column.type) for column in schema]
        self._program = JsonProgram(top)

    def decode(
        self, values: Sequence[bytes | None]
    ) -> tuple[list[DecodedChunk], list[UndecodableRecord]]:
        slices = ByteSlices.of(values)
        rows, doubtful = self._program.decode(slices)
        if not len(doubtful):
            table = table_of(rows, self._schema)
            return ([DecodedChunk(table, None, None)] if len(rows) else []), []
        rejected: list[UndecodableRecord] = []
        others = self._each(slices, doubtful.tolist(), rejected)
        if not len(rows) + len(others):
            return [], rejected
        bad = [record.index for record in rejected]
        table = table_of(in_order(rows, others, doubtful, bad), self._schema)
        index = np.delete(np.arange(len(values)), bad) if bad else None
        return [DecodedChunk(table, index, None)], rejected

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
