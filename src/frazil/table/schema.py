"""Writer columns in, an Iceberg table's schema and spec out; and what does not fit, said exactly.

Runs on the driver, before any task writes. In this version a table is created from the writer's
columns, or must fit them already; it is not changed afterwards.
"""

from __future__ import annotations

import json
import re

import pyarrow as pa
from pyiceberg.exceptions import ValidationError
from pyiceberg.io.pyarrow import (
    UnsupportedPyArrowTypeException,
    _pyarrow_to_schema_without_ids,
    schema_to_pyarrow,
)
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.transforms import Transform, parse_transform
from pyiceberg.types import TimestampType, TimestamptzType

from frazil.core.config import RESERVED, TableConfig
from frazil.core.errors import ConfigError, Misfit
from frazil.ingest.route import Metadata

_TRANSFORM = re.compile(
    r"\s*(?:(?P<name>[a-z]+)\s*\(\s*(?:(?P<width>\d+)\s*,\s*)?(?P<inner>[^(),]+?)\s*"
    r"(?:,\s*(?P<behind>\d+)\s*)?\)|(?P<column>[^(),]+?))\s*"
)


def iceberg_schema(columns: pa.Schema, metadata: Metadata, table: TableConfig) -> str:
    """Iceberg's JSON of a new table: the record's columns, then the metadata columns."""
    clash = set(columns.names) & {field.name for field in metadata.fields}
    if clash:
        raise Misfit(
            f"cannot create table {table.name}: the records have a column {sorted(clash)[0]!r}, "
            "which is also the name of a metadata column",
            hint="give the metadata column another name in [[table]]",
        )
    if taken := RESERVED & set(columns.names):
        raise Misfit(f"cannot create table {table.name}: the records have a column {min(taken)!r}, "
                     "a name that Iceberg keeps for itself")  # fmt: skip
    lower: dict[str, str] = {}
    for name in columns.names:  # Spark, and most engines, do not tell `Id` from `id`
        if name.lower() in lower:
            raise Misfit(f"cannot create table {table.name}: columns {lower[name.lower()]!r} and "
                         f"{name!r} differ only in case")  # fmt: skip
        lower[name.lower()] = name
    try:
        schema = _pyarrow_to_schema_without_ids(
            pa.schema([*columns, *metadata.fields]), format_version=table.format_version
        )
    except (UnsupportedPyArrowTypeException, TypeError, ValidationError) as error:
        raise Misfit(
            f"cannot create table {table.name}: {error}",
            hint="nanosecond timestamps need format_version = 3",
        ) from None
    return str(assign_fresh_schema_ids(schema).model_dump_json())


def partition_spec(schema_json: str, partition_by: tuple[str, ...], table: str) -> str:
    """Iceberg's JSON of `["day(placed_at)", "bucket(16, id)", "country"]`, checked."""
    schema = Schema.model_validate_json(schema_json)
    fields = []
    for number, text in enumerate(partition_by):
        column, transform = _parse(text, table)
        try:
            source = schema.find_field(column)
        except ValueError:
            raise ConfigError(
                f"cannot partition table {table} by {text!r}: there is no column {column!r}; "
                f"expected one of {', '.join(schema.column_names)}"
            ) from None
        if not transform.can_transform(source.field_type):
            raise ConfigError(
                f"cannot partition table {table} by {text!r}: {column} is {source.field_type}, "
                f"which {str(transform).split('[')[0]} does not take"
            )
        fields.append(
            {
                "source-id": source.field_id,
                "field-id": 1000 + number,
                "name": _partition_name(column, transform),
                "transform": str(transform),
            }
        )
    return json.dumps({"spec-id": 0, "fields": fields})


def check_fits(columns: pa.Schema, schema_json: str, metadata: Metadata, table: str) -> None:
    """The writer's columns against a table that is there: every difference, or none."""
    target = schema_to_pyarrow(Schema.model_validate_json(schema_json), include_field_ids=False)
    found = differences(pa.schema([*columns, *metadata.fields]), target)
    if found:
        raise Misfit(
            f"cannot write to table {table}: its schema does not fit the records: "
            + "; ".join(found),
            hint="change the table with ALTER TABLE, or write to another one",
        )


def differences(columns: pa.Schema, target: pa.Schema) -> list[str]:
    found = []
    for field in columns:
        if field.name not in target.names:
            found.append(f"column {field.name!r} ({field.type}) is not in the table")
            continue
        there = target.field(field.name)
        if not _castable(field.type, there.type):
            found.append(f"column {field.name!r} is {there.type} in the table, "
                         f"{field.type} in the records")  # fmt: skip
    for there in target:
        if there.name not in columns.names and not there.nullable:
            found.append(f"column {there.name!r} ({there.type}) is required by the table and not "
                         "in the records")  # fmt: skip
    return found


def event_time_column(schema_json: str, table: TableConfig) -> str:
    """The column the watermarks come from: the configured one, or the record's timestamp."""
    if not table.event_time:
        return table.timestamp_column
    schema = Schema.model_validate_json(schema_json)
    try:
        if table.event_time not in {field.name for field in schema.fields}:
            raise ValueError
        kind = schema.find_type(table.event_time)
    except ValueError:
        raise ConfigError(f"cannot use event_time {table.event_time!r} of table {table.name}: "
                          "there is no such column at the top level") from None  # fmt: skip
    if not isinstance(kind, (TimestampType, TimestamptzType)):
        raise ConfigError(f"cannot use event_time {table.event_time!r} of table {table.name}: "
                          f"expected a timestamp, found {kind}")  # fmt: skip
    return table.event_time


def _castable(given: pa.DataType, there: pa.DataType) -> bool:
    """May every value of `given` go into `there` unchanged (Iceberg's own promotions)?"""
    if pa.types.is_struct(given) and pa.types.is_struct(there):
        return not differences(pa.schema(list(given)), pa.schema(list(there)))
    if _is_list(given) and _is_list(there):
        return _castable(given.value_type, there.value_type)
    if pa.types.is_map(given) and pa.types.is_map(there):
        return _castable(given.key_type, there.key_type) and _castable(
            given.item_type, there.item_type
        )
    if pa.types.is_decimal(given) and pa.types.is_decimal(there):
        return given.scale == there.scale and given.precision <= there.precision
    widening = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}
    return _plain(given) == _plain(there) or (given, there) in widening


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if isinstance(kind, pa.BaseExtensionType):  # uuid
        return kind.storage_type
    return kind


def _parse(text: str, table: str) -> tuple[str, Transform]:  # type: ignore[type-arg]
    found = _TRANSFORM.fullmatch(text)
    if not found:
        raise ConfigError(f"cannot partition table {table} by {text!r}: expected a column, or one "
                          "of year, month, day, hour(column), bucket(n, column), "
                          "truncate(n, column)")  # fmt: skip
    if found["column"]:
        return found["column"], parse_transform("identity")
    name = found["name"].removesuffix("s")
    width = found["width"] or found["behind"]
    if name in ("year", "month", "day", "hour", "identity") and not width:
        return found["inner"], parse_transform(name)
    if name in ("bucket", "truncate") and width and int(width) > 0:
        return found["inner"], parse_transform(f"{name}[{width}]")
    raise ConfigError(f"cannot partition table {table} by {text!r}: unknown transform, or one "
                      "without its number; expected bucket(n, column) or truncate(n, column), "
                      "or year, month, day, hour(column)")  # fmt: skip


def _partition_name(column: str, transform: Transform) -> str:  # type: ignore[type-arg]
    word = str(transform).split("[")[0]
    flat = column.replace(".", "_")
    return flat if word == "identity" else f"{flat}_{'trunc' if word == 'truncate' else word}"
