"""Default values of columns (Iceberg's format version 3). Runs on executors and on the driver.

A table's columns know their `write-default` from `declared` on: it travels in the metadata of their
Arrow fields, structs' own among them. Who brings rows into a table's shape writes it where a record
lacks the column. A null that a record has is a null: the default does not stand for it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, index_by_id

from frazil.arrow.cast import DEFAULT, default_of, field_id, project


def default_values(schema: Schema, which: str) -> dict[int, pa.Scalar]:
    """The columns' `initial_default` or `write_default`, by field id."""
    found = {}
    for number, field in index_by_id(schema).items():
        value = getattr(field, which)
        if value is not None:
            kind = schema_to_pyarrow(field.field_type)
            plain = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
            column = pa.array([value.bytes if isinstance(value, uuid.UUID) else value], plain)
            found[number] = project(column, pa.field("", kind))[0]
    return found


def declared(schema: Schema) -> pa.Schema:
    """A table's columns in Arrow's types, with field ids and what is written by default."""
    columns = schema_to_pyarrow(schema)
    defaults = default_values(schema, "write_default")
    return pa.schema([_declared(each, defaults) for each in columns]) if defaults else columns


def _declared(field: pa.Field, defaults: Mapping[int, pa.Scalar]) -> pa.Field:
    field = field.with_type(_mapped(field.type, lambda each: _declared(each, defaults)))
    default = defaults.get(field_id(field) or 0)
    if default is None:
        return field
    batch = pa.record_batch([pa.repeat(default, 1)], names=[""])
    with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return field.with_metadata({**(field.metadata or {}), DEFAULT: sink.getvalue().to_pybytes()})


def any_of(columns: pa.Schema) -> bool:
    return any(_any(field) for field in columns)


def loosened(columns: pa.Schema) -> pa.Schema:
    """The same, and what has a default may be missing."""
    return pa.schema([_loosened(each) for each in columns])


def of_json(rows: pa.Table, columns: pa.Schema, values: Sequence[bytes | None]) -> pa.Table:
    """Rows that were read from JSON objects, with the defaults of members that these lack, at the
    top and in structs. (In lists and maps a member that is not there is null.)"""
    objects = [json.loads(value) if value else None for value in values]
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
        lacking = [isinstance(each, dict) and field.name not in each for each in objects]
        both = pa.concat_arrays([column, pa.repeat(default, 1)])
        places = [len(column) if lacks else at for at, lacks in enumerate(lacking)]
        return both.take(pa.array(places, pa.int64()))
    if not pa.types.is_struct(field.type) or not _any(field):
        return column
    inside = [each.get(field.name) if isinstance(each, dict) else None for each in objects]
    children = [_filled(column.field(at), each, inside) for at, each in enumerate(field.type)]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(column.type), mask=mask)


def _any(field: pa.Field) -> bool:
    if default_of(field) is not None:
        return True
    return pa.types.is_struct(field.type) and any(_any(each) for each in field.type)


def _loosened(field: pa.Field) -> pa.Field:
    loose = field.with_type(_mapped(field.type, _loosened))
    return loose.with_nullable(True) if default_of(field) is not None else loose


def _mapped(kind: pa.DataType, change: Any) -> pa.DataType:
    """A type with the fields that are in it changed."""
    if pa.types.is_struct(kind):
        return pa.struct([change(each) for each in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(change(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(change(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, change(kind.item_field))
    return kind
