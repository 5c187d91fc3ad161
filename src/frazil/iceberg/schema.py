"""Writer columns in; an Iceberg table's schema, spec and sort order, or a schema change, out.

Runs on the driver, before any task writes. Errors name the exact mismatch. Inputs and
outputs are Iceberg's JSON or plain values: nothing here touches a table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import ValidationError
from pyiceberg.io.pyarrow import (
    UnsupportedPyArrowTypeException,
    _pyarrow_to_schema_without_ids,
)
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.transforms import Transform, parse_transform
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
)

from frazil.arrow.default_values import declared
from frazil.config.sections import TableConfig
from frazil.config.units import ORDER, transform_of
from frazil.errors import ConfigError, SchemaMismatch
from frazil.iceberg.table import SchemaUpdate
from frazil.offsets import Partition
from frazil.pipeline.evolution import Aliases, changes, differences, unmakeable
from frazil.pipeline.projection import MetadataColumns


def iceberg_schema(columns: pa.Schema, metadata: MetadataColumns, table: TableConfig) -> str:
    """Iceberg's JSON of a new table: the record's columns, then the metadata columns."""
    if refusal := unmakeable(columns, [field.name for field in metadata.fields]):
        hint = "give the metadata column another name in [[table]]"
        raise SchemaMismatch(
            f"cannot create table {table.name}: {refusal}",
            hint=hint if "metadata column" in refusal else "",
        )
    try:
        schema = _fresh([*columns, *metadata.fields], table.format_version)
    except (UnsupportedPyArrowTypeException, TypeError, ValueError, ValidationError) as error:
        nanoseconds = "timestamp[ns" in str(error)
        raise SchemaMismatch(
            f"cannot create table {table.name}: {error}",
            hint="nanosecond timestamps need format_version = 3" if nanoseconds else "",
        ) from None
    return str(_identified(schema, table).model_dump_json())


def _fresh(fields: Iterable[pa.Field], format_version: int) -> Schema:
    schema = _pyarrow_to_schema_without_ids(
        pa.schema(list(fields)), format_version=3 if format_version == 3 else 2
    )
    return assign_fresh_schema_ids(schema)


def _identified(schema: Schema, table: TableConfig) -> Schema:
    """The schema with the configured identifier fields; they and their parents become required."""
    ids: list[int] = []
    required: set[int] = set()
    for path in table.upsert_key or table.identifier_fields:
        doing = f"cannot use identifier field {path!r} of table {table.name}"
        way = _source(schema, path, doing)
        kind = way[-1].field_type
        if not kind.is_primitive or isinstance(kind, (FloatType, DoubleType)):
            raise ConfigError(
                f"{doing}: it is {kind}; expected a single value, and neither float nor double"
            )
        ids.append(way[-1].field_id)
        required |= {step.field_id for step in way}
    text = json.loads(schema.model_dump_json())
    for field in _fields(text):
        field["required"] = field["required"] or field["id"] in required
    return Schema.model_validate({**text, "identifier-field-ids": ids})


def partition_spec(schema_json: str, partition_by: tuple[str, ...], table: str) -> str:
    """Iceberg's JSON of `["day(placed_at)", "bucket(16, id)", "country"]`, checked."""
    schema = Schema.model_validate_json(schema_json)
    fields: list[dict[str, object]] = []
    for number, text in enumerate(partition_by):
        doing = f"cannot partition table {table} by {text!r}"
        source, column, transform = _transformed(schema, text, doing)
        term = {"source-id": source.field_id, "transform": str(transform)}
        if any(term.items() <= field.items() for field in fields):
            raise ConfigError(f"{doing}: it exists already")
        name = _partition_name(column, transform)
        while name in schema.column_names and name != column:
            name += "_part"  # Iceberg refuses the name of a column that is not its source
        fields.append({**term, "field-id": 1000 + number, "name": name})
    return json.dumps({"spec-id": 0, "fields": fields})


def sort_order(schema_json: str, sort_by: tuple[str, ...], table: str) -> str:
    """Iceberg's JSON of `["country", "placed_at desc", "bucket(16, id) asc nulls last"]`, checked.

    Empty for no order. As in Spark, nulls are least unless the order states otherwise.
    """
    schema = Schema.model_validate_json(schema_json)
    fields: list[dict[str, object]] = []
    for text in sort_by:
        doing = f"cannot sort table {table} by {text!r}"
        match = ORDER.fullmatch(text)
        source, _, transform = _transformed(schema, match["term"] if match else text, doing)
        term = {"source-id": source.field_id, "transform": str(transform)}
        if any(term.items() <= field.items() for field in fields):
            raise ConfigError(f"{doing}: it exists already")
        direction = (match["direction"] or "asc").lower() if match else "asc"
        nulls = match["nulls"] if match else ""
        nulls = (nulls or ("first" if direction == "asc" else "last")).lower()
        fields.append({**term, "direction": direction, "null-order": f"nulls-{nulls}"})
    return json.dumps({"order-id": 1, "fields": fields}) if fields else ""


def update(
    schema_json: str,
    columns: pa.Schema,
    table: str,
    *,
    spec: str,
    format_version: int,
    aliases: Aliases | None = None,
    beside: Collection[str] = (),
) -> SchemaUpdate:
    """The changes that make records with `columns` fit the table; none if they fit already.

    Raises `SchemaMismatch` if no change can. A type is encoded as Iceberg's JSON of a schema with
    one column of that type.
    """
    schema = Schema.model_validate_json(schema_json)
    keys = schema.identifier_field_names()
    partitions = [field["name"] for field in json.loads(spec)["fields"]]
    evolution = changes(
        columns_of(schema_json),
        columns,
        aliases,
        beside=beside,
        identifier=keys,
        partitions=partitions,
        format_version=format_version,
    )
    if evolution.impossible:
        raise SchemaMismatch(
            f"cannot change table {table} so that the records fit: "
            + "; ".join(evolution.impossible)
        )

    for path, name in sorted(evolution.rename, reverse=True):  # nested columns before their parents
        keys = {_moved(key, path, name) for key in keys}
    return SchemaUpdate(
        add=tuple(
            (path, field.name, _typed(field.type, format_version)) for path, field in evolution.add
        ),
        widen=tuple((path, _typed(kind, format_version)) for path, kind in evolution.widen),
        relax=evolution.relax,
        rename=evolution.rename,
        identifier=tuple(sorted(keys)),
    )


@lru_cache(maxsize=256)  # thousands of columns share a few types
def _typed(kind: pa.DataType, format_version: int) -> str:
    return str(_fresh([pa.field("type", kind)], format_version).model_dump_json())


def _moved(key: str, path: str, name: str) -> str:
    if key != path and not key.startswith(f"{path}."):
        return key
    return path[: len(path) - len(path.rpartition(".")[2])] + name + key[len(path) :]


def former_names(schema_json: str, earlier: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names that the table's columns had in its earlier schemas; current path → names.

    With them, records of a writer that does not know of a rename still find their column.
    """
    names: dict[int, list[str]] = {}
    for text in earlier:
        for field in _fields(json.loads(text)):
            names.setdefault(field["id"], []).append(field["name"])
    schema = Schema.model_validate_json(schema_json)
    former = {}
    for field in _fields(json.loads(schema_json)):
        olds = dict.fromkeys(name for name in names.get(field["id"], ()) if name != field["name"])
        if olds:
            former[str(schema.find_column_name(field["id"]))] = tuple(olds)
    return former


def identifier_fields(schema_json: str) -> tuple[str, ...]:
    return tuple(sorted(Schema.model_validate_json(schema_json).identifier_field_names()))


def columns_of(schema_json: str) -> pa.Schema:
    """A table's columns, in the form in which records are compared with them."""
    return declared(Schema.model_validate_json(schema_json))


def check_fits(columns: pa.Schema, schema_json: str, metadata: MetadataColumns, table: str) -> None:
    """Compares the writer's columns with an existing table; raises `SchemaMismatch` with every
    difference."""
    mismatches = differences(pa.schema([*columns, *metadata.fields]), columns_of(schema_json))
    if mismatches:
        raise SchemaMismatch(
            f"cannot write to table {table}: its schema does not fit the records: "
            + "; ".join(mismatches),
            hint="change the table with ALTER TABLE, or write to another one",
        )


def identifier_columns(file: str, schema_json: str, columns: Sequence[str]) -> str:
    """Describes a data file's records by its bounds of `columns` (topic, partition, offset).

    `file` is Iceberg's JSON of it.
    """
    descriptor = json.loads(file)
    schema = Schema.model_validate_json(schema_json)
    bounds = [
        dict(zip(bound.get("keys", ()), bound.get("values", ()), strict=True))
        for bound in (descriptor.get("lower-bounds", {}), descriptor.get("upper-bounds", {}))
    ]
    spans: list[list[Any]] = []
    for name in columns:
        field: Any = next((column for column in schema.fields if column.name == name), None)
        if field is None or not all(field.field_id in bound for bound in bounds):
            break
        spans.append(
            [from_bytes(field.field_type, bytes.fromhex(bound[field.field_id])) for bound in bounds]
        )
    text = f"it has {descriptor.get('record-count')} rows"
    if len(spans) < 3:
        return text
    topics, partitions, offsets = spans
    where = "" if topics[0] == topics[1] else f" to {topics[1]}"
    return (
        f"{text} of {Partition(topics[0], partitions[0])}{where} [{offsets[0]}, {offsets[1] + 1})"
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
        raise ConfigError(
            f"cannot use event_time {table.event_time!r} of table {table.name}: "
            "there is no such column at the top level"
        ) from None
    if not isinstance(kind, (TimestampType, TimestamptzType)):
        raise ConfigError(
            f"cannot use event_time {table.event_time!r} of table {table.name}: "
            f"expected a timestamp, found {kind}"
        )
    return table.event_time


_ORDERED = (
    IntegerType,
    LongType,
    DecimalType,
    StringType,
    DateType,
    TimestampType,
    TimestamptzType,
    TimestampNanoType,
    TimestamptzNanoType,
)


def check_order(schema_json: str, table: TableConfig) -> None:
    """Checks that the version column, which orders the changes of a key, exists and is sortable."""
    if not table.version_column:
        return
    doing = f"cannot order the changes of table {table.name} by {table.version_column!r}"
    kind = _source(Schema.model_validate_json(schema_json), table.version_column, doing)[
        -1
    ].field_type
    if not isinstance(kind, _ORDERED):
        raise ConfigError(
            f"{doing}: it is {kind}; expected an integer, a decimal, a date, a "
            "timestamp or a string"
        )


def _fields(schema: Any) -> Iterator[dict[str, Any]]:
    """All struct fields in Iceberg's JSON, at any depth."""
    if isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield field
            yield from _fields(field["type"])
        for inside in ("element", "key", "value"):
            yield from _fields(schema.get(inside))


def _source(schema: Schema, path: str, doing: str) -> list[NestedField]:
    """The path to a column, the column last; refused inside lists and maps, as by Iceberg."""
    try:
        way = _way(schema.fields, schema.find_field(path).field_id)
    except ValueError:
        raise ConfigError(
            f"{doing}: there is no column {path!r}; expected one of "
            f"{', '.join(schema.column_names)}"
        ) from None
    if any(isinstance(field.field_type, (ListType, MapType)) for field in way[:-1]):
        raise ConfigError(f"{doing}: {path} is inside a list or a map")
    return way


def _way(fields: Iterable[NestedField], field_id: int) -> list[NestedField]:
    for field in fields:
        if field.field_id == field_id:
            return [field]
        kind = field.field_type
        inside: tuple[NestedField, ...] = ()
        if isinstance(kind, StructType):
            inside = kind.fields
        elif isinstance(kind, ListType):
            inside = (kind.element_field,)
        elif isinstance(kind, MapType):
            inside = kind.key_field, kind.value_field
        if way := _way(inside, field_id):
            return [field, *way]
    return []


def _transformed(schema: Schema, text: str, doing: str) -> tuple[NestedField, str, Transform]:  # type: ignore[type-arg]
    """The column, its path and the transform of `day(placed_at)`."""
    path, word = transform_of(text, doing)
    transform: Transform = parse_transform(word)  # type: ignore[type-arg]
    source = _source(schema, path, doing)[-1]
    if not transform.can_transform(source.field_type):
        raise _untaken(source, path, transform, doing)
    return source, path, transform


def _untaken(source: NestedField, path: str, transform: Any, doing: str) -> ConfigError:
    return ConfigError(
        f"{doing}: {path} is {source.field_type}, which {_word(transform)} does not take"
    )


def _word(transform: Any) -> str:
    return str(transform).split("[")[0]


def _partition_name(column: str, transform: Transform) -> str:  # type: ignore[type-arg]
    word = _word(transform)
    flat = column.replace(".", "_")
    return flat if word == "identity" else f"{flat}_{'trunc' if word == 'truncate' else word}"
