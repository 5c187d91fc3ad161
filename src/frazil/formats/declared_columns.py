"""Columns that the config declares → Arrow columns. Runs on the driver; pure.

In: the types of `[decode] columns`, an Avro schema, or a JSON Schema. Out: columns with exactly
these types, which the reader of JSON fills by its own rules (`frazil.formats.json_values`). A
schema that says more than a type (`oneOf`, tuples) raises `ConfigError`: nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from frazil.config.column_types import ColumnType, column_path, column_type
from frazil.errors import ConfigError
from frazil.formats.json_columns import DECLARED
from frazil.formats.json_values import EPOCH, IGNORED
from frazil.formats.schema_registry import RegistryRefusal, configured_writer

_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.large_string(),
    "binary": pa.large_binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", "UTC"),
    "uuid": pa.uuid(),
}


def field_of_type(name: str, kind: ColumnType, nullable: bool = True) -> pa.Field:
    """A column of the type; the unit of numbers that are timestamps is in its metadata."""
    metadata = {EPOCH: kind.epoch.encode()} if kind.epoch else None
    return pa.field(name, arrow_type(kind), nullable, metadata)


def arrow_type(kind: ColumnType) -> pa.DataType:
    inside = dict(kind.inside)
    if kind.name == "struct":
        return pa.struct([field_of_type(name, child) for name, child in kind.inside])
    if kind.name == "list":
        return pa.large_list(field_of_type("element", inside["element"]))
    if kind.name == "map":
        key = pa.field("key", pa.large_string(), nullable=False)
        return pa.map_(key, field_of_type("value", inside["value"]))
    if kind.name == "decimal":
        return pa.decimal128(*kind.numbers)
    return pa.binary(*kind.numbers) if kind.name == "fixed" else _TYPES[kind.name]


def declared_columns(columns: Mapping[str, str]) -> pa.Schema:
    """The columns of `{at = "timestamp", "meta.id" = "long"}`: a path makes structs."""
    tree: dict[str, Any] = {}
    for text, kind in columns.items():
        *parents, name = column_path(text)
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
        below[name] = column_type(kind)
    return pa.schema(_fields(tree))


def _fields(tree: Mapping[str, Any]) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(_fields(node)))
        if isinstance(node, dict)
        else field_of_type(name, node)
        for name, node in tree.items()
    ]


def marked(columns: pa.Schema, undeclared: str) -> pa.Schema:
    """Declared columns as a reader of JSON takes them: values do not change their types, and with
    `drop` fields beside them are passed over, at every depth."""
    metadata = {IGNORED: b"*"} if undeclared == "drop" else None
    return pa.schema([_marked(column, metadata) for column in columns], metadata)


def _marked(
    field: pa.Field, of_structs: dict[bytes, bytes] | None, inside: bool = False
) -> pa.Field:
    kind, metadata = field.type, dict(field.metadata or {})
    if pa.types.is_struct(kind):
        kind = pa.struct([_marked(child, of_structs, inside) for child in kind])
        metadata |= of_structs or {}
    elif pa.types.is_large_list(kind) or pa.types.is_list(kind):
        kind = pa.large_list(_marked(kind.value_field, of_structs, inside=True))
    elif pa.types.is_map(kind):
        kind = pa.map_(kind.key_field, _marked(kind.item_field, of_structs, inside=True))
    if not pa.types.is_struct(kind) and not inside:
        metadata[DECLARED] = b"1"
    return pa.field(field.name, kind, field.nullable, metadata)


def schema_file_columns(path: str, text: str) -> pa.Schema:
    """The columns of JSON records by a schema file: Avro, or JSON Schema."""
    doing = f"cannot use {path} as the schema of JSON records"
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{doing}: it is not JSON: {error}") from None
    if isinstance(schema, dict) and ("properties" in schema or "$schema" in schema):
        columns = _JsonSchema(schema, doing).fields(schema, "")
        if not columns:
            raise ConfigError(f"{doing}: it has no properties")
        return pa.schema(columns)
    writer = configured_writer(text)
    if isinstance(writer, RegistryRefusal):
        raise ConfigError(f"{doing}: {writer.reason}")
    return writer.columns


class _JsonSchema:
    """One JSON Schema, walked."""

    def __init__(self, root: Mapping[str, Any], doing: str) -> None:
        self._root = root
        self._doing = doing

    def fields(self, schema: Mapping[str, Any], path: str) -> list[pa.Field]:
        required = schema.get("required", [])
        return [
            self._field(name, inner, name not in required, f"{path}{name}")
            for name, inner in schema.get("properties", {}).items()
        ]

    def _field(self, name: str, schema: Any, nullable: bool, path: str, depth: int = 0) -> pa.Field:
        if depth > 64 or path.count(".") > 64:
            raise self._refused(path, "it refers to itself")
        if not isinstance(schema, dict):
            raise self._refused(path, f"expected a schema, found {schema!r}")
        if "$ref" in schema:
            return self._field(name, self._target(schema["$ref"], path), nullable, path, depth + 1)
        for word in ("oneOf", "anyOf", "allOf", "not", "patternProperties", "prefixItems"):
            if word in schema:
                raise self._refused(path, f"{word} is no type of one column")
        kinds = schema.get("type", "object" if "properties" in schema else None)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds or ())
        nullable = nullable or "null" in kinds
        kinds = [kind for kind in kinds if kind != "null"]
        if kinds in (["integer", "number"], ["number", "integer"]):
            kinds = ["number"]
        if len(kinds) != 1:
            raise self._refused(path, f"expected one type, found {', '.join(kinds) or 'none'}")
        return pa.field(name, self._type(kinds[0], schema, path), nullable)

    def _type(self, kind: str, schema: Mapping[str, Any], path: str) -> pa.DataType:
        if kind == "array":
            if not isinstance(schema.get("items"), dict):
                raise self._refused(path, "its array has no items")
            return pa.large_list(self._field("element", schema["items"], False, f"{path}.element"))
        if kind == "object":
            if inside := self.fields(schema, f"{path}."):
                return pa.struct(inside)
            values = schema.get("additionalProperties")
            if not isinstance(values, dict):
                raise self._refused(path, "its object has no properties")
            key = pa.field("key", pa.large_string(), nullable=False)
            return pa.map_(key, self._field("value", values, False, f"{path}.value"))
        if kind == "string":
            formats = {"date-time": "timestamptz", "date": "date", "uuid": "uuid"}
            word = formats.get(schema.get("format", ""), "string")
            return _TYPES["binary" if schema.get("contentEncoding") == "base64" else word]
        words = {"integer": "long", "number": "double", "boolean": "boolean"}
        if kind not in words:
            raise self._refused(path, f"unknown type {kind!r}")
        return _TYPES[words[kind]]

    def _target(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._refused(path, f"$ref {reference!r} is not in this file")
        node: Any = self._root
        for step in filter(None, reference[1:].split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or step not in node:
                raise self._refused(path, f"$ref {reference!r} leads nowhere")
            node = node[step]
        return node

    def _refused(self, path: str, fact: str) -> ConfigError:
        return ConfigError(
            f"{self._doing}: {path}: {fact}",
            hint="declare the types in [decode] columns",
        )
