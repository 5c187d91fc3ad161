"""Types that Debezium names → columns of a table, and their values. Runs on executors; pure.

In: decoded columns of Avro, whose fields carry Kafka Connect's name of their type (`CONNECT`), and
the columns of the table, if there is one. Out: the columns that the table needs, and arrays of the
types that it has, each value exactly, or `CastMismatch`.

    decoded             a new table             a table that has it as
    ───────────────     ──────────────────      ─────────────────────────
    Uuid, string     ─▶ uuid                    string: as it is decoded

A table decides for itself: a column that holds the value as it is decoded keeps it. So a table that
is there does not change, and a column of another type can be had by declaring it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.avro_types import CONNECT
from frazil.config.column_types import ColumnType
from frazil.formats.connect_schema import variable_scale
from frazil.formats.declared_columns import arrow_type
from frazil.formats.json_values import NotThisShape, to_decimal
from frazil.pipeline.evolution import Aliases
from frazil.pipeline.strict_cast import CastMismatch, strict_cast

Convert = Callable[[pa.Array, pa.DataType], pa.Array]


@dataclass(frozen=True, slots=True)
class NamedType:
    """What columns a named type can become. `new`: in a table that lacks the column; None: as it
    is decoded."""

    new: pa.DataType | None
    others: Mapping[pa.DataType, Convert]

    def conversion(self, kind: pa.DataType) -> Convert | None:
        if pa.types.is_decimal(kind) and self is _VARIABLE_SCALE:
            return _scaled
        return self.others.get(_large(kind))


def columns(given: pa.Schema, table: Iterable[pa.Field], aliases: Aliases) -> pa.Schema:
    """The columns that records with columns `given` need in a table with columns `table`."""
    if not any(map(_named, given)):
        return given
    held = {field.name: field for field in table}
    fields = []
    for field in given:
        olds = aliases.get(field.name, ())
        names = (field.name, *((olds,) if isinstance(olds, str) else olds))
        like = next((held[name] for name in names if name in held), None)
        fields.append(_column(field, like))
    return pa.schema(fields, given.metadata)


def converted(array: pa.Array, field: pa.Field, target: pa.DataType) -> pa.Array:
    """The values of a decoded column in the type of the table's, if the named type can become it;
    otherwise as they are. Raises `CastMismatch`."""
    named = _named(field)
    convert = named.conversion(target) if named else None
    if convert is None:
        return array
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    try:
        return convert(array, target)
    except (ValueError, NotThisShape) as error:
        name = (field.metadata or {})[CONNECT].decode()
        raise CastMismatch(f"column {field.name!r} is {name} in the records: {error}") from None


def _column(field: pa.Field, like: pa.Field | None) -> pa.Field:
    named = _named(field)
    if named is None:
        return field
    kind = named.new if like is None else like.type if named.conversion(like.type) else None
    return field.remove_metadata().with_type(kind or field.type)


def _named(field: pa.Field) -> NamedType | None:
    return _TYPES.get((field.metadata or {}).get(CONNECT, b"").decode())


def _large(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz:
        return pa.timestamp(kind.unit, "UTC")
    return pa.large_string() if pa.types.is_string(kind) else kind


# ── conversions ──────────────────────────────────────────────────────────────────────────────────


def _cast(kind: str, epoch: str = "") -> dict[pa.DataType, Convert]:
    of = ColumnType(kind, epoch=epoch)
    return {arrow_type(of): lambda array, _: strict_cast(array, of)}


def _instant(array: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return pc.cast(array, pa.timestamp(kind.unit, "UTC"))
    except pa.ArrowException:  # the one value at fault is found one by one
        return strict_cast(
            array, ColumnType("timestamptz_ns" if kind.unit == "ns" else "timestamptz")
        )


#: Byte of a hexadecimal digit → its value; of any other character: 255.
_NIBBLES = np.full(256, 255, np.uint8)
_NIBBLES[list(b"0123456789abcdef")] = _NIBBLES[list(b"0123456789ABCDEF")] = range(16)


def _uuids(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """All together if they are in the usual form, otherwise by the rules of a cast."""
    plain = pc.replace_substring(array, "-", "").fill_null("0" * 32)
    if pc.all(pc.equal(pc.binary_length(plain), 32), min_count=0).as_py():
        _, offsets, data = plain.buffers()
        start = int(np.frombuffer(offsets, np.int64)[plain.offset]) if len(plain) else 0
        texts = np.frombuffer(data or b"", np.uint8)[start : start + 32 * len(plain)]
        nibbles = _NIBBLES[texts]
        if not (nibbles == 255).any():
            stored = pa.py_buffer((nibbles[::2] << 4 | nibbles[1::2]).tobytes())
            made = pa.Array.from_buffers(kind.storage_type, len(plain), [None, stored])
            made = pc.if_else(array.is_valid(), made, pa.scalar(None, made.type))
            return pa.ExtensionArray.from_storage(kind, made)
    return strict_cast(array, ColumnType("uuid"))


def _number(stored: pa.DataType, divisor: int = 1) -> dict[pa.DataType, Convert]:
    """Back to the number that was sent."""

    def back(array: pa.Array, kind: pa.DataType) -> pa.Array:
        numbers = array.view(stored)
        return pc.cast(pc.divide(numbers, divisor) if divisor > 1 else numbers, kind)

    return dict.fromkeys((stored, pa.int64()), back)


def _texts(array: pa.Array) -> list[str | None]:
    scales, values = array.field("scale").to_pylist(), array.field("value").to_pylist()
    valid = array.is_valid().to_pylist()
    return [
        variable_scale(value, scale) if present else None
        for present, scale, value in zip(valid, scales, values, strict=True)
    ]


def _digits(array: pa.Array, _: pa.DataType) -> pa.Array:
    return pa.array(_texts(array), pa.large_string())


def _scaled(array: pa.Array, kind: pa.DataType) -> pa.Array:
    decimals = [None if text is None else to_decimal(text, kind) for text in _texts(array)]
    return pa.array(decimals, kind)


_VARIABLE_SCALE = NamedType(pa.large_string(), {pa.large_string(): _digits})
_TYPES: Mapping[str, NamedType] = {
    "io.debezium.time.Date": NamedType(None, _number(pa.int32())),
    "io.debezium.time.Timestamp": NamedType(None, _number(pa.int64(), 1000)),
    "io.debezium.time.MicroTimestamp": NamedType(None, _number(pa.int64())),
    # Spark reads no table with a column of type time, and databases have times beyond 24 hours.
    "io.debezium.time.Time": NamedType(None, _cast("time", "ms")),
    "io.debezium.time.MicroTime": NamedType(None, _cast("time", "us")),
    "io.debezium.time.NanoTime": NamedType(None, _cast("time", "ns")),
    "io.debezium.time.NanoTimestamp": NamedType(
        None, _cast("timestamp", "ns") | _cast("timestamp_ns", "ns")
    ),
    "io.debezium.time.ZonedTimestamp": NamedType(
        pa.timestamp("us", "UTC"),
        {pa.timestamp("us", "UTC"): _instant, pa.timestamp("ns", "UTC"): _instant},
    ),
    "io.debezium.data.Uuid": NamedType(pa.uuid(), {pa.uuid(): _uuids}),
    "io.debezium.data.VariableScaleDecimal": _VARIABLE_SCALE,
}
