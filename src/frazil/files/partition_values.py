"""Partition values: computed from columns, written to descriptors and paths. Runs on executors.

Every value that Iceberg has can be a partition value: floats with NaN, infinities and both zeros,
texts of any length, dates and timestamps of any year. A value that cannot be computed raises
`SchemaMismatch` before anything is written: an hour beyond 32 bits, a truncated decimal beyond its
precision, a timestamp of the outermost days that Iceberg's own text form cannot carry.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import to_json
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    NestedField,
    PrimitiveType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    UUIDType,
)

from frazil.errors import SchemaMismatch

Apply = Callable[[pa.Array], pa.Array]

#: Maximum length of one value's path segment, and of all segments: file systems allow 255 bytes
#: for a name, and object stores 1,024 for a path.
SEGMENT, SEGMENTS = 128, 512

_MOMENTS = (TimestampType, TimestamptzType, TimestampNanoType, TimestamptzNanoType)
_DAY = {"us": 86_400_000_000, "ns": 86_400_000_000_000}


def transformation(transform: Any, kind: PrimitiveType) -> Apply:
    """The function that computes a partition or sort value from a column of this type."""
    word = str(transform).split("[")[0]
    if word in ("year", "month"):
        return lambda column: _calendar(column, word[0].upper())
    if word == "day":
        return lambda column: _floored(column, _days(column))
    if word == "hour":
        return lambda column: _floored(column, _DAY[column.type.unit] // 24)
    if word == "truncate" and isinstance(kind, BinaryType):
        width = int(str(transform).split("[")[1][:-1])
        return lambda column: pc.binary_slice(column, 0, width)
    rust: Apply = transform.pyarrow_transform(kind)
    if word == "bucket" and isinstance(kind, (TimestampNanoType, TimestamptzNanoType)):
        # Iceberg hashes the microseconds, rounded down before 1970, too.
        zone = None if isinstance(kind, TimestampNanoType) else "UTC"
        return lambda column: rust(_floored(column, 1000).cast(pa.timestamp("us", zone)))
    return rust


def source_of(rows: pa.Table, schema: Schema, field_id: int) -> pa.Array:
    """The source column of a partition or sort field; it may be inside structs."""
    first, *rest = _places(schema.fields, field_id)
    column = rows.column(schema.fields[first].name)
    return (pc.struct_field(column, rest) if rest else column).combine_chunks()


def plain(column: Any) -> pa.Array:
    """Values that Python compares as Iceberg does: dates and timestamps as integers, floats as
    their bits, with two different zeros and one NaN."""
    if isinstance(column.type, pa.BaseExtensionType):  # uuid
        column = column.storage
    if pa.types.is_floating(column.type):
        wide = column.type == pa.float64()
        floats = column.fill_null(0.0).to_numpy(False).copy()
        floats[np.isnan(floats)] = np.nan
        bits = floats.view(np.int64 if wide else np.int32)
        return pa.array(bits, mask=column.is_null().to_numpy(False))
    if pa.types.is_temporal(column.type):
        return column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
    return column


def json_value(kind: PrimitiveType, value: Any) -> Any:
    """A plain value in Iceberg's JSON; NaN and the infinities as in Python's JSON."""
    if value is None:
        return None
    if isinstance(kind, FloatType):
        return struct.unpack("<f", struct.pack("<i", value))[0]
    if isinstance(kind, DoubleType):
        return struct.unpack("<d", struct.pack("<q", value))[0]
    if isinstance(kind, UUIDType):
        return str(uuid.UUID(bytes=value))
    if isinstance(kind, DateType):
        return _date(value)
    if isinstance(kind, _MOMENTS):
        digits = 9 if isinstance(kind, (TimestampNanoType, TimestamptzNanoType)) else 6
        zone = "+00:00" if isinstance(kind, (TimestamptzType, TimestamptzNanoType)) else ""
        return _moment(value, digits) + zone
    return to_json(kind, value)


def path_of(spec: PartitionSpec, kinds: Sequence[PrimitiveType], partition: Sequence[Any]) -> str:
    """The path of a partition's files. A value that is too long for a name is replaced by its
    digest: values are never read from paths."""
    segments = []
    for field, kind, value in zip(spec.fields, kinds, partition, strict=True):
        label = _human(str(field.transform), value) or json_value(kind, value)
        text = "null" if label is None else str(label)
        segments.append(_bounded(f"{quote_plus(field.name)}={quote_plus(text)}", SEGMENT))
    return _bounded("/".join(segments), SEGMENTS)


def check(rows: pa.Table, schema: str, spec: str, table: str) -> None:
    """Raises `SchemaMismatch` if a partition value of some row cannot be computed."""
    for name, field_id, fits in _fallible(schema, spec):
        if fact := fits(source_of(rows, _read(schema), field_id)):
            raise SchemaMismatch(
                f"cannot fit {table}: column {name!r}, by which the table is partitioned, "
                f"has {fact}"
            )


@lru_cache(maxsize=2048)
def _fallible(schema: str, spec: str) -> list[tuple[str, int, Callable[[pa.Array], str]]]:
    """The partition fields that not every value has, with the check that finds such a value."""
    checks: list[tuple[str, int, Callable[[pa.Array], str]]] = []
    columns = _read(schema)
    for field in PartitionSpec.model_validate_json(spec).fields if spec else ():
        kind = columns.find_type(field.source_id)
        word = str(field.transform).split("[")[0]
        fits: Callable[[pa.Array], str] | None = None
        if isinstance(kind, _MOMENTS) and word == "hour":
            fits = _hours_fit
        elif isinstance(kind, _MOMENTS) and word == "identity":
            fits = _moments_fit
        elif isinstance(kind, DecimalType) and word == "truncate":
            fits = _truncated_fit(kind, transformation(field.transform, kind))
        if fits is not None:
            checks.append((str(columns.find_column_name(field.source_id)), field.source_id, fits))
    return checks


def _hours_fit(column: pa.Array) -> str:
    hours = _floored(column, _DAY[column.type.unit] // 24)
    beyond = _beyond(hours, -(2**31), 2**31 - 1)
    return "a moment whose hour takes more than 32 bits" if beyond else ""


def _moments_fit(column: pa.Array) -> str:
    day = _DAY[column.type.unit]
    beyond = _beyond(column.view(pa.int64()), -(2**63) + day, 2**63 - 1 - day)
    return "a moment at the very end of time, which has no text form" if beyond else ""


def _truncated_fit(kind: DecimalType, truncate: Apply) -> Callable[[pa.Array], str]:
    most = Decimal((0, (9,) * kind.precision, -kind.scale))

    def fits(column: pa.Array) -> str:
        beyond = _beyond(truncate(column), -most, most)
        return f"a value that is beyond {kind} when it is truncated" if beyond else ""

    return fits


def _beyond(column: pa.Array, low: Any, high: Any) -> bool:
    span = pc.min_max(column).as_py()
    return span["min"] is not None and not (low <= span["min"] and span["max"] <= high)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


def _days(column: pa.Array) -> int:
    return 1 if pa.types.is_date(column.type) else _DAY[column.type.unit]


def _floored(column: pa.Array, unit: int) -> pa.Array:
    numbers = plain(column).cast(pa.int64()).fill_null(0).to_numpy(False)
    return pa.array(np.floor_divide(numbers, unit), mask=column.is_null().to_numpy(False))


def _calendar(column: pa.Array, unit: str) -> pa.Array:
    """Months or years since 1970."""
    days = _floored(column, _days(column)).fill_null(0).to_numpy(False)
    periods = days.astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.int64)
    return pa.array(periods, mask=column.is_null().to_numpy(False))


def _date(days: int) -> str:
    """ISO 8601, with a sign before years that do not fit four digits, as Java parses it."""
    day = np.datetime64(days, "D")
    year = int(day.astype("datetime64[Y]").astype(np.int64)) + 1970
    month = int(day.astype("datetime64[M]").astype(np.int64)) % 12 + 1
    of_month = int((day - day.astype("datetime64[M]").astype("datetime64[D]")).astype(int)) + 1
    sign = "" if 0 <= year <= 9999 else "-" if year < 0 else "+"
    return f"{sign}{abs(year):04d}-{month:02d}-{of_month:02d}"


def _moment(value: int, digits: int) -> str:
    seconds, part = divmod(value, 10**digits)
    days, second = divmod(seconds, 86_400)
    clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
    return f"{_date(days)}T{clock}" + (f".{part:0{digits}d}" if part else "")


def _human(transform: str, value: Any) -> str:
    """Years, months and hours in readable form; empty for other transforms."""
    if value is None or transform not in ("year", "month", "hour"):
        return ""
    if transform == "hour":
        return f"{_date(value // 24)}-{value % 24:02d}"
    if transform == "month":
        return f"{1970 + value // 12}-{value % 12 + 1:02d}"
    return str(1970 + value)


def _bounded(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    name = text.partition("=")[0]
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return f"{name}={digest}" if len(name) < most - 32 else digest


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=2048)
def _read(schema: str) -> Schema:
    return Schema.model_validate_json(schema)


def _places(fields: Sequence[NestedField], field_id: int) -> list[int]:
    """The path to a field, as positions in structs; names may contain dots."""
    for at, field in enumerate(fields):
        if field.field_id == field_id:
            return [at]
        kind = field.field_type
        if isinstance(kind, StructType) and (way := _places(kind.fields, field_id)):
            return [at, *way]
    return []
