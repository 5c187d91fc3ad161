"""A Parquet footer in; column statistics as Iceberg's manifests have them out. Runs on executors.

Promises: a bound covers every value of the column in the file (except NaN, which Iceberg leaves out
of bounds), or is absent. Parquet omits a row group's minimum and maximum if they are longer than
4,096 bytes: a column with such a row group has no bounds, even if other row groups have them.
`extents` is also used to check manifests against footers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    StatisticsCollector,
    UnsupportedPyArrowTypeException,
    pyarrow_to_schema,
)
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    PrimitiveType,
    StringType,
)
from pyiceberg.utils.decimal import unscaled_to_decimal

_FLOATS = (FloatType, DoubleType)
_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True)
class ColumnExtent:
    """The value range of one column of a file, as far as its footer records it.

    Dates and timestamps are integers, so they are not limited to Python's year 9999.
    """

    kind: PrimitiveType
    #: lowest and highest value of the row groups that record them; None if none does
    low: Any = None
    high: Any = None
    #: False: some row group has values but no minimum and maximum; values may lie outside
    complete: bool = True

    def joined(self, other: ColumnExtent) -> ColumnExtent:
        lows = [value for value in (self.low, other.low) if value is not None]
        highs = [value for value in (self.high, other.high) if value is not None]
        low, high = min(lows, default=None), max(highs, default=None)
        return ColumnExtent(self.kind, low, high, self.complete and other.complete)

    def within(self, lower: bytes | None, upper: bytes | None) -> bool | None:
        """Do a manifest's bounds cover the column? None: the footer does not show it."""
        if lower is not None and self.low is not None and from_bytes(self.kind, lower) > self.low:
            return False
        if upper is not None and self.high is not None and from_bytes(self.kind, upper) < self.high:
            return False
        return True if self.complete or (lower is None and upper is None) else None


def extents(footer: pq.FileMetaData) -> dict[int, ColumnExtent]:
    """The extents of the file's columns, by field id; without columns that are inside lists or
    maps, have no field id, or have a type that Iceberg does not have."""
    leaves = dict(_leaves(footer.schema.to_arrow_schema(), ""))
    kinds = {int(field.metadata[_ID]): _kind(field) for field in leaves.values()}
    ids = {path: int(field.metadata[_ID]) for path, field in leaves.items()}
    return _extents(footer, ids, kinds)


def column_paths(footer: pq.FileMetaData) -> dict[int, str]:
    """Field id → Parquet's path, of the columns that `extents` may return."""
    leaves = _leaves(footer.schema.to_arrow_schema(), "")
    return {int(field.metadata[_ID]): path for path, field in leaves}


def file_statistics(
    footer: pq.FileMetaData, plan: Mapping[int, StatisticsCollector], ids: Mapping[str, int]
) -> dict[str, dict[int, Any]]:
    """The six statistics maps of a data file in a manifest. `plan`: the statistics to keep of each
    column, by id; `ids`: ids of the file's columns, by Parquet's path."""
    sizes: dict[int, int] = {}
    values: dict[int, int] = {}
    nulls: dict[int, int | None] = {}
    for column in _chunks(footer):
        field_id = ids[column.path_in_schema]
        sizes[field_id] = sizes.get(field_id, 0) + column.total_compressed_size
        if plan[field_id].mode.type == MetricModeTypes.NONE:
            continue
        values[field_id] = values.get(field_id, 0) + column.num_values
        statistics = column.statistics if column.is_stats_set else None
        known = nulls.get(field_id, 0)
        more = (
            statistics.null_count if statistics is not None and statistics.has_null_count else None
        )
        nulls[field_id] = None if known is None or more is None else known + more
    bounded = {
        path: field_id
        for path, field_id in ids.items()
        if plan[field_id].mode.type in (MetricModeTypes.TRUNCATE, MetricModeTypes.FULL)
    }
    kinds = {field_id: plan[field_id].iceberg_type for field_id in bounded.values()}
    lower: dict[int, bytes] = {}
    upper: dict[int, bytes] = {}
    for field_id, extent in _extents(footer, bounded, kinds).items():
        low, high = _bounds(extent, plan[field_id].mode.length)
        lower |= {} if low is None else {field_id: low}
        upper |= {} if high is None else {field_id: high}
    return {
        "column-sizes": sizes,
        "value-counts": values,
        "null-value-counts": {
            field_id: count for field_id, count in nulls.items() if count is not None
        },
        "nan-value-counts": {},
        "lower-bounds": lower,
        "upper-bounds": upper,
    }


def _bounds(extent: ColumnExtent, length: int | None) -> tuple[bytes | None, bytes | None]:
    if not extent.complete or extent.low is None:
        return None, None
    low, high = extent.low, extent.high
    if length is not None and isinstance(extent.kind, (StringType, BinaryType)):
        low, high = low[:length], _above(high, length)
    return to_bytes(extent.kind, low), None if high is None else to_bytes(extent.kind, high)


def _above(value: Any, length: int) -> Any:
    """The least text or bytes of at most `length` that is not below `value`; None if there is none.

    In text the character after U+D7FF is U+E000: code points between are halves of surrogates.
    """
    if len(value) <= length:
        return value
    for at in range(length - 1, -1, -1):
        head, last = value[:at], value[at]
        if isinstance(value, bytes):
            if last < 0xFF:
                return head + bytes([last + 1])
        elif ord(last) < 0x10FFFF:
            return head + ("\ue000" if last == "\ud7ff" else chr(ord(last) + 1))
    return None


def _extents(
    footer: pq.FileMetaData, ids: Mapping[str, int], kinds: Mapping[int, PrimitiveType | None]
) -> dict[int, ColumnExtent]:
    # Arrow's writer leaves NaN out of statistics: without a minimum, a row group of floats is all
    # NaN. Other writers give no minimum where any value is NaN.
    omits_nan = (footer.created_by or "").startswith("parquet-cpp")
    result: dict[int, ColumnExtent] = {}
    for column in _chunks(footer):
        field_id = ids.get(column.path_in_schema)
        kind = None if field_id is None else kinds[field_id]
        if field_id is None or kind is None:
            continue
        extent = _extent(column, kind, omits_nan)
        result[field_id] = result[field_id].joined(extent) if field_id in result else extent
    return result


def _extent(column: pq.ColumnChunkMetaData, kind: PrimitiveType, omits_nan: bool) -> ColumnExtent:
    """The extent of one row group."""
    statistics = column.statistics if column.is_stats_set else None
    if statistics is None:
        return ColumnExtent(kind, complete=False)
    if statistics.has_min_max:
        try:
            return ColumnExtent(
                kind, _plain(kind, statistics.min_raw), _plain(kind, statistics.max_raw)
            )
        except UnicodeDecodeError:  # text of another writer may be invalid UTF-8
            return ColumnExtent(kind, complete=False)
    all_null = statistics.has_null_count and statistics.null_count == column.num_values
    return ColumnExtent(kind, complete=all_null or (omits_nan and isinstance(kind, _FLOATS)))


def _plain(kind: PrimitiveType, raw: Any) -> Any:
    if isinstance(kind, StringType):
        return raw.decode()
    if isinstance(kind, DecimalType):
        unscaled = int.from_bytes(raw, "big", signed=True) if isinstance(raw, bytes) else raw
        return unscaled_to_decimal(unscaled, kind.scale)
    return raw


def _chunks(footer: pq.FileMetaData) -> Iterator[pq.ColumnChunkMetaData]:
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for position in range(footer.num_columns):
            yield group.column(position)


def _leaves(fields: Iterable[pa.Field], parent: str) -> Iterator[tuple[str, pa.Field]]:
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _leaves(field.type, f"{parent}{field.name}.")
        elif not pa.types.is_nested(field.type) and _ID in (field.metadata or {}):
            yield f"{parent}{field.name}", field


def _kind(field: pa.Field) -> PrimitiveType | None:
    try:
        kind = pyarrow_to_schema(pa.schema([field]), format_version=3).fields[0].field_type
    except UnsupportedPyArrowTypeException:
        return None
    return kind if isinstance(kind, PrimitiveType) else None
