"""A JSON value and the columns of a table → the changes that the table needs. Runs on executors,
and on the driver for a sample; pure.

In: values of records, and the columns of the table if there is one. Out: columns for a new table,
or the changes that an existing one needs, as kinds (see `frazil.formats.json_inference`). A value
that fits no table raises `UnexpectedJson`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa

from frazil.errors import SchemaMismatch
from frazil.formats.json_inference import SeenValues, arrow, common_kind, kind_of, kinds_of
from frazil.formats.json_values import (
    NestedTooDeep,
    NotThisShape,
    converter,
    json_type,
    no_json,
    parse_json,
    to_decimal,
    to_float,
)


def infer(values: Iterable[bytes]) -> pa.Schema:
    """The columns that fit all these JSON objects; other values are ignored."""
    seen: dict[str, Any] = {}
    for value in values:
        try:
            parsed = parse_json(value)
            kind = kind_of(parsed) if type(parsed) is dict else {}
        except (ValueError, RecursionError, NestedTooDeep, SchemaMismatch):
            continue  # the decoder rejects it, with reason and position
        seen = common_kind(seen, kind, "")
    return pa.schema([pa.field(name, arrow(kind, name)) for name, kind in seen.items()])


def wanted(
    value: bytes, columns: pa.Schema, renames: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The changes that a table with `columns` needs to hold the value, as a kind (see
    `frazil.formats.json_inference`). Raises `UnexpectedJson` if no change helps. `renames`: new
    name of a column → its current name.

    A field that the table has is checked as in `JsonShape`: can its value be converted to the
    column's type? Only fields that the table lacks are inferred.
    """
    try:
        parsed = parse_json(value)
        if type(parsed) is not dict:
            raise NotThisShape("object", json_type(parsed))
        fields = {column.name: column for column in columns}
        for name, old in (renames or {}).items():
            if name in parsed and name not in fields and old in fields and old not in parsed:
                fields[name] = fields.pop(old).with_metadata({_RENAMED: old.encode()})
        return _wanted_of(parsed, fields)
    except NestedTooDeep as error:
        raise UnexpectedJson("limit", str(error)) from None
    except RecursionError:
        raise UnexpectedJson("limit", str(NestedTooDeep())) from None
    except NotThisShape as error:
        raise UnexpectedJson("shape", str(error)) from None
    except SchemaMismatch as error:
        raise UnexpectedJson("shape", error.message) from None
    except UnicodeEncodeError:
        raise UnexpectedJson(
            "shape", "cannot infer a type: found half of a surrogate pair"
        ) from None
    except ValueError as error:
        raise UnexpectedJson("json", no_json(value, error)) from None


class UnexpectedJson(Exception):
    """A value that fits no table, even after a schema change."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


_RENAMED = b"frazil.renamed"
#: Metadata of a column whose type the config declares: no value changes it.
DECLARED = b"frazil.declared"


def _wanted_of(value: dict[str, Any], fields: Mapping[str, pa.Field]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, member in value.items():
        try:
            column = fields.get(name)
            if column is not None:
                kind = _wanted(member, column)
                old = (column.metadata or {}).get(_RENAMED)
                kind = kind if old is None else f"={old.decode()}"
            elif member is None:
                continue  # null is the same as absent
            elif (kind := kinds_of(kind_of({name: member}))) is None:
                raise NotThisShape("no such field", f"{json_type(member)} without any value")
            else:
                kind = kind[name]
            if kind is not None:
                changes[name] = kind
        except NotThisShape as error:
            error.path.append(name)
            raise
    for name, column in fields.items():
        if name not in value and not column.nullable:
            raise NotThisShape("a value", "nothing", name)
    return changes


def _wanted(value: Any, column: pa.Field) -> Any:
    """The change that the column needs for the value; None: no change."""
    try:
        converter(column)(value)
        return None
    except NotThisShape:
        kind = column.type
        if DECLARED in (column.metadata or {}):
            raise
        if pa.types.is_struct(kind) and type(value) is dict:
            return _wanted_of(value, {child.name: child for child in kind}) or None
        if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and type(value) is list:
            return [_wanted_by_all(value, kind.value_field)]
        if pa.types.is_map(kind) and type(value) is dict:
            for name in value:
                converter(kind.key_field)(name)
            return SeenValues(_wanted_by_all(value.values(), kind.item_field))
        if wider := _wider(value, kind):
            return wider
        raise


def _wanted_by_all(values: Iterable[Any], column: pa.Field) -> Any:
    kind = None
    for value in values:
        kind = common_kind(kind, _wanted(value, column), column.name)
    return kind


def _wider(value: Any, kind: pa.DataType) -> str:
    """The type to which Iceberg can widen the column so that it holds the value; empty: none."""
    if pa.types.is_int32(kind) and type(value) is int and -(2**63) <= value < 2**63:
        return "long"
    if pa.types.is_float32(kind) and type(value) in (int, Decimal):
        with suppress(NotThisShape):
            to_float(value, pa.float64())
            return "double"
    if pa.types.is_decimal(kind):
        for precision in range(kind.precision + 1, 39):
            with suppress(NotThisShape):
                to_decimal(value, pa.decimal128(precision, kind.scale))
                return f"decimal:{precision}"
    return ""
