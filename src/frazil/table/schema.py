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
from pyiceberg.types import (
    BinaryType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
)

from frazil.core.config import RESERVED, TableConfig
from frazil.core.errors import ConfigError, Misfit
from frazil.ingest.route import Metadata, differences

_TRANSFORM = re.compile(
    r"\s*(?:(?P<name>[a-z]+)\s*\(\s*(?:(?P<width>\d+)\s*,\s*)?(?P<inner>[^(),]+?)\s*"
    r"(?:,\s*(?P<behind>\d+)\s*)?\)|(?P<column>[^(),]+?))\s*"
)


def iceberg_schema(columns: pa.Schema, metadata: Metadata, table: TableConfig) -> str:
    """Iceberg's JSON of a new table: the record's columns, then the metadata columns."""
    taken_by_us = {field.name.lower() for field in metadata.fields}
    if clash := [name for name in columns.names if name.lower() in taken_by_us]:
        raise Misfit(
            f"cannot create table {table.name}: the records have a column {clash[0]!r}, "
            "which is also the name of a metadata column",
            hint="give the metadata column another name in [[table]]",
        )
    if taken := RESERVED & set(columns.names):
        raise Misfit(f"cannot create table {table.name}: the records have a column {min(taken)!r}, "
                     "a name that Iceberg keeps for itself")  # fmt: skip
    _check_case(list(columns), table.name)
    try:
        schema = _pyarrow_to_schema_without_ids(
            pa.schema([*columns, *metadata.fields]),
            format_version=3 if table.format_version == 3 else 2,
        )
    except (UnsupportedPyArrowTypeException, TypeError, ValueError, ValidationError) as error:
        nanoseconds = "timestamp[ns" in str(error)
        raise Misfit(
            f"cannot create table {table.name}: {error}",
            hint="nanosecond timestamps need format_version = 3" if nanoseconds else "",
        ) from None
    return str(assign_fresh_schema_ids(schema).model_dump_json())


def _check_case(fields: list[pa.Field], table: str) -> None:
    """Spark, and most engines, do not tell `Id` from `id`."""
    lower: dict[str, str] = {}
    for field in fields:
        if field.name.lower() in lower:
            raise Misfit(f"cannot create table {table}: columns {lower[field.name.lower()]!r} and "
                         f"{field.name!r} differ only in case")  # fmt: skip
        lower[field.name.lower()] = field.name
        kind = field.type
        if pa.types.is_nested(kind):
            inside = [kind.field(i) for i in range(kind.num_fields)]
            _check_case(inside, table)


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
        if not transform.can_transform(source.field_type) or _unwritable(
            str(transform).split("[")[0], source.field_type
        ):
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
        if fields[-1]["name"] in [each["name"] for each in fields[:-1]]:
            raise ConfigError(f"cannot partition table {table} by {text!r}: it is there already")
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


def _parse(text: str, table: str) -> tuple[str, Transform]:  # type: ignore[type-arg]
    found = _TRANSFORM.fullmatch(text)
    if not found:
        raise ConfigError(f"cannot partition table {table} by {text!r}: expected a column, or one "
                          "of year, month, day, hour(column), bucket(n, column), "
                          "truncate(n, column)")  # fmt: skip
    if found["column"]:
        return found["column"], parse_transform("identity")
    name = found["name"].removesuffix("s")
    width = found["width"] or found["behind"] if not (found["width"] and found["behind"]) else None
    if name in ("year", "month", "day", "hour", "identity") and not width:
        return found["inner"], parse_transform(name)
    if name in ("bucket", "truncate") and width and int(width) > 0:
        return found["inner"], parse_transform(f"{name}[{width}]")
    raise ConfigError(f"cannot partition table {table} by {text!r}: unknown transform, or one "
                      "without its number; expected bucket(n, column) or truncate(n, column), "
                      "or year, month, day, hour(column)")  # fmt: skip


def _unwritable(transform: str, kind: object) -> bool:
    """What Iceberg allows and pyiceberg's writer cannot compute."""
    if isinstance(kind, (TimestampNanoType, TimestamptzNanoType)):
        return transform in ("identity", "hour")
    return isinstance(kind, BinaryType) and transform == "truncate"


def _partition_name(column: str, transform: Transform) -> str:  # type: ignore[type-arg]
    word = str(transform).split("[")[0]
    flat = column.replace(".", "_")
    return flat if word == "identity" else f"{flat}_{'trunc' if word == 'truncate' else word}"
