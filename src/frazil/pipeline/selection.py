"""`[[table]] select`: rows of records → the columns of their table. Runs on executors.

In: columns of decoded records, with their Kafka keys and headers. Out: the columns that the config
selects, in its order. A field that the records lack is no column: the table decides about it as
about every absent column. `Unselectable` if a value cannot be cast or a function does not take its
type; the caller halves the rows until the record at fault is alone.

Fields as they are cost nothing: their arrays are passed on. Casts and masks are Arrow's kernels;
`sha256`, and casts of text, run once for each distinct value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.avro_types import CONNECT
from frazil.config.column_types import ColumnType, quoted
from frazil.config.select import (
    AllHeaders,
    Cast,
    Column,
    Digest,
    Expression,
    Header,
    Item,
    KeyBytes,
    KeyColumns,
    KeyField,
    Literal,
    Mask,
    Selection,
    Star,
    innermost,
)
from frazil.formats.declared_columns import arrow_type
from frazil.kafka.record_batch import HEADERS, no_headers
from frazil.pipeline.field_text import header_values
from frazil.pipeline.strict_cast import CastMismatch, as_plain, by_distinct, strict_cast

_STARS = "***"


class Unselectable(Exception):
    """Why records have no row."""


@dataclass(frozen=True, slots=True)
class SelectPlan:
    """The selected columns of a table. `salts`: reference of a salt → the salt."""

    selection: Selection
    salts: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class RecordEnvelope:
    """What records have beside their value. `fields`: their decoded keys, a struct."""

    count: int
    keys: pa.Array | None = None
    headers: pa.Array | None = None
    fields: pa.Array | None = None

    def take(self, at: pa.Array) -> RecordEnvelope:
        columns = (self.keys, self.headers, self.fields)
        return RecordEnvelope(len(at), *(c if c is None else c.take(at) for c in columns))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns made so far."""

    fields: list[pa.Field] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)

    def add(self, name: str, made: tuple[Any, bool] | None, of: pa.Field | None = None) -> None:
        """`of`: the field whose values these are, as they are."""
        if made is not None and not pa.types.is_null(made[0].type):
            connect = None if of is None else (of.metadata or {}).get(CONNECT)
            metadata = {CONNECT: connect} if connect else None
            self.fields.append(pa.field(name, made[0].type, made[1], metadata))
            self.arrays.append(made[0])


def selected(plan: SelectPlan, rows: pa.Table, envelope: RecordEnvelope) -> pa.Table:
    """The table's columns of these records."""
    work, columns = _Evaluation(plan, rows, envelope), _Columns()
    for item in plan.selection.items:
        if isinstance(item, Star):
            for field, array in zip(rows.schema, rows.columns, strict=True):
                if plan.selection.passes(field.name):
                    columns.add(field.name, (array, field.nullable), field)
        elif isinstance(item, KeyColumns):
            _add_key(columns, item.prefix, envelope.fields)
        else:
            path = item.of.names if isinstance(item.of, Column) else ()
            columns.add(item.name, work.column(item), field_at(rows.schema, path))
    if not columns.fields:
        raise Unselectable("the record has none of the selected columns")
    return pa.Table.from_arrays(columns.arrays, schema=pa.schema(columns.fields))


def selected_keys(
    plan: SelectPlan, envelope: RecordEnvelope, names: Mapping[str, object] | None = None
) -> pa.Table:
    """The columns of these records that need no value: key, headers and constants. `names`: only
    these."""
    nothing = pa.table({"": pa.nulls(envelope.count)})
    work, columns = _Evaluation(plan, nothing, envelope), _Columns()
    for item in plan.selection.items:
        if isinstance(item, KeyColumns):
            _add_key(columns, item.prefix, envelope.fields, names)
        elif (
            isinstance(item, Item)
            and (names is None or item.name in names)
            and not isinstance(innermost(item.of), Column)
        ):
            columns.add(item.name, work.column(item))
    return pa.Table.from_arrays(columns.arrays, schema=pa.schema(columns.fields))


def _add_key(
    columns: _Columns,
    prefix: str,
    fields: pa.Array | None,
    names: Mapping[str, object] | None = None,
) -> None:
    for child in fields.type if fields is not None else ():
        name = f"{prefix}{child.name}"
        if names is None or name in names:
            columns.add(name, (pc.struct_field(fields, child.name), True))


def static_type(of: Expression, declared: pa.Schema, keys: pa.Schema) -> pa.DataType | None:
    """The type of an expression, if it does not depend on the records. `declared`, `keys`: the
    declared columns of the value and of the key."""
    match of:
        case Cast(_, kind):
            return arrow_type(kind)
        case Mask() | Digest():
            return pa.large_string()
        case KeyBytes() | Header():
            return pa.large_binary()
        case AllHeaders():
            return HEADERS
        case Literal(value):
            return _scalar(value).type
        case Column(names) if declared_field := field_at(declared, names):
            return declared_field.type
        case KeyField(()):
            return pa.struct(list(keys)) if len(keys) else None
        case KeyField(names) if key_field := field_at(keys, names):
            return key_field.type
    return None


def field_at(columns: pa.Schema, names: tuple[str, ...]) -> pa.Field | None:
    """The column at a path, through structs; None: there is none."""
    inside: Any = list(columns)
    column = None
    for name in names:
        column = next((child for child in inside if child.name == name), None)
        if column is None:
            return None
        inside = list(column.type) if pa.types.is_struct(column.type) else []
    return column


class _Evaluation:
    """The expressions of one set of rows."""

    def __init__(self, plan: SelectPlan, rows: pa.Table, envelope: RecordEnvelope) -> None:
        self._plan = plan
        self._rows = dict(
            zip(rows.schema.names, zip(rows.schema, rows.columns, strict=True), strict=True)
        )
        self._envelope = envelope

    def column(self, item: Item) -> tuple[Any, bool] | None:
        """The values of an item, and whether they may be null; None: the records lack its field."""
        try:
            return self._of(item.of)
        except (CastMismatch, Unselectable) as error:
            raise Unselectable(f"cannot select {quoted(item.name)}: {error}") from None

    def _of(self, of: Expression) -> tuple[Any, bool] | None:
        count = self._envelope.count
        match of:
            case Column(names):
                return self._field(names)
            case KeyBytes():
                keys = self._envelope.keys
                return (pa.nulls(count, pa.large_binary()) if keys is None else keys), True
            case KeyField(names):
                return self._key_field(names)
            case AllHeaders():
                headers = self._envelope.headers
                return (no_headers(count) if headers is None else headers), True
            case Header(name):
                values = header_values(self._envelope.headers, name)
                return (pa.nulls(count, pa.large_binary()) if values is None else values), True
            case Literal(value):
                return pa.repeat(_scalar(value), count), True
        made = self._of(of.of)
        if made is None:
            return None
        array, nullable = made
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if isinstance(of, Cast):
            return strict_cast(array, of.kind), nullable
        if isinstance(of, Mask):
            return _masked(_text(array, "mask"), of.keep), nullable
        return self._digest(array, of.salt), nullable

    def _field(self, names: tuple[str, ...]) -> tuple[Any, bool] | None:
        first, *inside = names
        if first not in self._rows:
            return None
        field, column = self._rows[first]
        nullable = field.nullable
        for name in inside:
            if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
                return None
            nullable = nullable or column.type.field(name).nullable
            column = pc.struct_field(column, name)
        return column, nullable

    def _key_field(self, names: tuple[str, ...]) -> tuple[Any, bool] | None:
        array = self._envelope.fields
        for name in names:
            if (
                array is None
                or not pa.types.is_struct(array.type)
                or array.type.get_field_index(name) < 0
            ):
                return None
            array = pc.struct_field(array, name)
        return None if array is None else (array, True)

    def _digest(self, array: pa.Array, salt: str) -> pa.Array:
        salted = hashlib.sha256(self._plan.salts[salt] if salt else b"")
        array = as_plain(array)
        if not pa.types.is_large_binary(array.type):
            array = _text(array, "sha256").cast(pa.large_binary())

        def digest(value: bytes | None) -> str | None:
            if value is None:
                return None
            state = salted.copy()
            state.update(value)
            return state.hexdigest()

        return by_distinct(array, digest, pa.large_string())


def _text(array: pa.Array, function: str) -> pa.Array:
    """Text, or values with a text that is theirs alone."""
    array = as_plain(array)
    types = pa.types
    kind = array.type
    if not (
        types.is_large_string(kind)
        or types.is_integer(kind)
        or types.is_decimal(kind)
        or isinstance(kind, pa.UuidType)
    ):
        raise Unselectable(
            f"{function} takes text, whole numbers, decimals and UUIDs, found {kind}"
        )
    return strict_cast(array, ColumnType("string"))


def _masked(texts: pa.Array, keep: int) -> pa.Array:
    stars = pa.scalar(_STARS, pa.large_string())
    shown: Any = stars
    if keep:
        end = pc.utf8_slice_codeunits(texts, -keep, 2**31 - 1)
        joined = pc.binary_join_element_wise(stars, end, pa.scalar("", pa.large_string()))
        # Of a short text nothing is shown: its end would be all of it, or tell its length.
        shown = pc.if_else(pc.greater(pc.utf8_length(texts), 2 * keep), joined, stars)
    return pc.if_else(texts.is_valid(), shown, pa.scalar(None, pa.large_string()))


def _scalar(value: str | int | Decimal | bool | None) -> pa.Scalar:
    if isinstance(value, Decimal):
        exponent = -int(value.as_tuple().exponent)
        digits = max(len(value.as_tuple().digits), exponent)
        return pa.scalar(value, pa.decimal128(digits, exponent))
    kinds = {str: pa.large_string(), bool: pa.bool_(), int: pa.int64(), type(None): pa.null()}
    return pa.scalar(value, kinds[type(value)])
