"""Default values of columns (Iceberg's format version 3). Runs on executors and on the driver.

`declared` puts each column's `write-default` into the metadata of its Arrow field, nested fields
included. Code that fits rows to a table writes the default where a record lacks the column. An
explicit null in a record stays null.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, index_by_id

from frazil.arrow.cast import DEFAULT, default_of, field_id, project


def default_values(schema: Schema, which: str) -> dict[int, pa.Scalar]:
    """The columns' `initial_default` or `write_default`, by field id."""
    defaults = {}
    for number, field in index_by_id(schema).items():
        value = getattr(field, which)
        if value is not None:
            kind = schema_to_pyarrow(field.field_type)
            plain = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
            column = pa.array([value.bytes if isinstance(value, uuid.UUID) else value], plain)
            defaults[number] = project(column, pa.field("", kind))[0]
    return defaults


def declared(schema: Schema) -> pa.Schema:
    """A table's columns in Arrow's types, with field ids and write defaults."""
    columns = schema_to_pyarrow(schema)
    defaults = default_values(schema, "write_default")
    return pa.schema([_declared(column, defaults) for column in columns]) if defaults else columns


def _declared(field: pa.Field, defaults: Mapping[int, pa.Scalar]) -> pa.Field:
    field = field.with_type(_mapped(field.type, lambda child: _declared(child, defaults)))
    default = defaults.get(field_id(field) or 0)
    if default is None:
        return field
    batch = pa.record_batch([pa.repeat(default, 1)], names=[""])
    with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return field.with_metadata({**(field.metadata or {}), DEFAULT: sink.getvalue().to_pybytes()})


def loosened(columns: pa.Schema) -> pa.Schema:
    """The same columns; columns with a default are nullable."""
    return pa.schema([_loosened(column) for column in columns])


def of_json(
    rows: pa.Table,
    columns: pa.Schema,
    values: Sequence[bytes | None],
    index: np.ndarray[Any, np.dtype[np.int64]] | None,
) -> pa.Table:
    """Rows read from JSON objects, with defaults for absent members, at the top level and in
    structs. (In lists and maps an absent member is null.) `index`: those of the `values` that are
    rows; None: all of them."""
    if not any(map(_any, columns)):
        return rows
    texts = values if index is None else [values[i] for i in index.tolist()]
    objects = [json.loads(text) if text else None for text in texts]
    arrays = [
        _filled(rows.column(field.name).combine_chunks(), field, objects)
        if field.name in rows.schema.names and _any(field)
        else rows.column(field.name)
        for field in columns
        if field.name in rows.schema.names
    ]
    return pa.Table.from_arrays(arrays, schema=rows.schema)


def _filled(column: Any, field: pa.Field, objects: Sequence[Any]) -> Any:
    default = default_of(field)
    if default is not None:
        lacking = [isinstance(value, dict) and field.name not in value for value in objects]
        both = pa.concat_arrays([column, pa.repeat(default, 1)])
        places = [len(column) if lacks else at for at, lacks in enumerate(lacking)]
        return both.take(pa.array(places, pa.int64()))
    if not pa.types.is_struct(field.type) or not _any(field):
        return column
    inside = [value.get(field.name) if isinstance(value, dict) else None for value in objects]
    children = [_filled(column.field(at), child, inside) for at, child in enumerate(field.type)]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(column.type), mask=mask)


def _any(field: pa.Field) -> bool:
    inside = field.type if pa.types.is_struct(field.type) else ()
    return _has_default(field) or any(map(_any, inside))


def _has_default(field: pa.Field) -> bool:
    return DEFAULT in (field.metadata or {})


def _loosened(field: pa.Field) -> pa.Field:
    loose = field.with_type(_mapped(field.type, _loosened))
    return loose.with_nullable(True) if _has_default(field) else loose


def _mapped(kind: pa.DataType, change: Any) -> pa.DataType:
    """A type with `change` applied to its child fields."""
    if pa.types.is_struct(kind):
        return pa.struct([change(child) for child in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(change(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(change(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, change(kind.item_field))
    return kind
