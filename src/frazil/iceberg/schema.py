"""Writer columns in; an Iceberg table's schema, spec and sort order out, or a change of its schema.

Runs on the driver, before any task writes. What does not fit is said exactly. All that goes in and
out is Iceberg's JSON or plain values: nothing here touches a table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from frazil.config.model import ORDER, TableConfig, transform_of
from frazil.errors import ConfigError, SchemaMismatch
from frazil.offsets import Partition
from frazil.pipeline.evolution import Aliases, changes, unmakeable
from frazil.pipeline.projection import MetadataColumns, differences


def iceberg_schema(columns: pa.Schema, metadata: MetadataColumns, table: TableConfig) -> str:
    """Iceberg's JSON of a new table: the record's columns, then the metadata columns."""
    if said := unmakeable(columns, [field.name for field in metadata.fields]):
        hint = "give the metadata column another name in [[table]]"
        raise SchemaMismatch(
            f"cannot create table {table.name}: {said}",
            hint=hint if "metadata column" in said else "",
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
    """With the identifier fields that the config names, which are required, and all around them."""
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
        required |= {each.field_id for each in way}
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
        if any(term.items() <= each.items() for each in fields):
            raise ConfigError(f"{doing}: it is there already")
        name = _partition_name(column, transform)
        while name in schema.column_names and name != column:
            name += "_part"  # the name of a column that is not its source: Iceberg refuses it
        fields.append({**term, "field-id": 1000 + number, "name": name})
    return json.dumps({"spec-id": 0, "fields": fields})


def sort_order(schema_json: str, sort_by: tuple[str, ...], table: str) -> str:
    """Iceberg's JSON of `["country", "placed_at desc", "bucket(16, id) asc nulls last"]`, checked.

    Empty for no order. As in Spark, nulls are least unless it is said where they stand.
    """
    schema = Schema.model_validate_json(schema_json)
    fields: list[dict[str, object]] = []
    for text in sort_by:
        doing = f"cannot sort table {table} by {text!r}"
        found = ORDER.fullmatch(text)
        source, _, transform = _transformed(schema, found["term"] if found else text, doing)
        term = {"source-id": source.field_id, "transform": str(transform)}
        if any(term.items() <= each.items() for each in fields):
            raise ConfigError(f"{doing}: it is there already")
        direction = (found["direction"] or "asc").lower() if found else "asc"
        nulls = found["nulls"] if found else ""
        nulls = (nulls or ("first" if direction == "asc" else "last")).lower()
        fields.append({**term, "direction": direction, "null-order": f"nulls-{nulls}"})
    return json.dumps({"order-id": 1, "fields": fields}) if fields else ""


@dataclass(frozen=True, slots=True)
class SchemaUpdate:
    """What is to be changed in a table's schema. Paths have the names that it has before."""

    add: tuple[tuple[str, str, str], ...] = ()  # path of the struct, name, type
    widen: tuple[tuple[str, str], ...] = ()  # path, type
    relax: tuple[str, ...] = ()  # paths
    rename: tuple[tuple[str, str], ...] = ()  # path, name
    #: names of the identifier fields afterwards
    identifier: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.widen or self.relax or self.rename)


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
    """What makes records with `columns` fit the table; nothing where they do, or a
    `SchemaMismatch`.

    A type stands for itself as Iceberg's JSON of a schema with one column of it.
    """
    schema = Schema.model_validate_json(schema_json)
    keys = schema.identifier_field_names()
    partitions = [each["name"] for each in json.loads(spec)["fields"]]
    found = changes(
        columns_of(schema_json),
        columns,
        aliases,
        beside=beside,
        identifier=keys,
        partitions=partitions,
        format_version=format_version,
    )
    if found.impossible:
        raise SchemaMismatch(
            f"cannot change table {table} so that the records fit: " + "; ".join(found.impossible)
        )

    for path, name in sorted(found.rename, reverse=True):  # what is inside before what is around
        keys = {_moved(each, path, name) for each in keys}
    return SchemaUpdate(
        add=tuple(
            (path, field.name, _typed(field.type, format_version)) for path, field in found.add
        ),
        widen=tuple((path, _typed(kind, format_version)) for path, kind in found.widen),
        relax=found.relax,
        rename=found.rename,
        identifier=tuple(sorted(keys)),
    )


@lru_cache(maxsize=256)  # thousands of columns have a few types
def _typed(kind: pa.DataType, format_version: int) -> str:
    return str(_fresh([pa.field("type", kind)], format_version).model_dump_json())


def _moved(each: str, path: str, name: str) -> str:
    if each != path and not each.startswith(f"{path}."):
        return each
    return path[: len(path) - len(path.rpartition(".")[2])] + name + each[len(path) :]


def former_names(schema_json: str, earlier: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names that the table's columns had in earlier schemas of it; newest path → names.

    So that the records of a writer that knows nothing of a rename still find their column.
    """
    names: dict[int, list[str]] = {}
    for text in earlier:
        for field in _fields(json.loads(text)):
            names.setdefault(field["id"], []).append(field["name"])
    schema = Schema.model_validate_json(schema_json)
    found = {}
    for field in _fields(json.loads(schema_json)):
        olds = dict.fromkeys(name for name in names.get(field["id"], ()) if name != field["name"])
        if olds:
            found[str(schema.find_column_name(field["id"]))] = tuple(olds)
    return found


def identifier_fields(schema_json: str) -> tuple[str, ...]:
    return tuple(sorted(Schema.model_validate_json(schema_json).identifier_field_names()))


def columns_of(schema_json: str) -> pa.Schema:
    """A table's columns, as records are compared with them."""
    return declared(Schema.model_validate_json(schema_json))


def check_fits(columns: pa.Schema, schema_json: str, metadata: MetadataColumns, table: str) -> None:
    """The writer's columns against a table that is there: every difference, or none."""
    found = differences(pa.schema([*columns, *metadata.fields]), columns_of(schema_json))
    if found:
        raise SchemaMismatch(
            f"cannot write to table {table}: its schema does not fit the records: "
            + "; ".join(found),
            hint="change the table with ALTER TABLE, or write to another one",
        )


def identifier_columns(file: str, schema_json: str, columns: Sequence[str]) -> str:
    """Which records a data file holds, as its bounds of `columns` (topic, partition, offset) tell.

    `file` is Iceberg's JSON of it.
    """
    told = json.loads(file)
    schema = Schema.model_validate_json(schema_json)
    bounds = [
        dict(zip(each.get("keys", ()), each.get("values", ()), strict=True))
        for each in (told.get("lower-bounds", {}), told.get("upper-bounds", {}))
    ]
    found: list[list[Any]] = []
    for name in columns:
        field: Any = next((each for each in schema.fields if each.name == name), None)
        if field is None or not all(field.field_id in each for each in bounds):
            break
        found.append(
            [from_bytes(field.field_type, bytes.fromhex(each[field.field_id])) for each in bounds]
        )
    what = f"it has {told.get('record-count')} rows"
    if len(found) < 3:
        return what
    topics, partitions, offsets = found
    where = "" if topics[0] == topics[1] else f" to {topics[1]}"
    return (
        f"{what} of {Partition(topics[0], partitions[0])}{where} [{offsets[0]}, {offsets[1] + 1})"
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
    """Is there the column that says which change of a key is the newer one?"""
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
    """All fields of structs in Iceberg's JSON, however deep."""
    if isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield field
            yield from _fields(field["type"])
        for inside in ("element", "key", "value"):
            yield from _fields(schema.get(inside))


def _source(schema: Schema, path: str, doing: str) -> list[NestedField]:
    """The way to a column, itself the last; refused inside lists and maps, as Iceberg does."""
    try:
        way = _way(schema.fields, schema.find_field(path).field_id)
    except ValueError:
        raise ConfigError(
            f"{doing}: there is no column {path!r}; expected one of "
            f"{', '.join(schema.column_names)}"
        ) from None
    if any(isinstance(each.field_type, (ListType, MapType)) for each in way[:-1]):
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
