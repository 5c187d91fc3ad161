"""What manifests say of data files, against the files themselves: for `frazil audit --deep`.

Engines pass over files, delete files too, by the counts and bounds in manifests. Where these do not
cover what a file holds, a query loses rows and nobody sees it. In: a file as its manifest
describes it, and the open Parquet file. Out: each statement that is not true, in a sentence.

Counts are compared with the footer. Bounds are, too, and where the footer does not tell (Parquet
leaves a minimum or maximum of over 4,096 bytes out) or contradicts them, the column is read and the
values outside are counted. Columns inside lists and maps have no bounds. Reads only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.types import DoubleType, FloatType, IntegerType, LongType, PrimitiveType

from frazil.files.column_bounds import ColumnExtent, column_paths, extents


@dataclass(frozen=True, slots=True)
class DescribedFile:
    """A live file as its manifest describes it; columns by field id."""

    path: str
    rows: int
    values: Mapping[int, int]
    nulls: Mapping[int, int]
    lower: Mapping[int, bytes]
    upper: Mapping[int, bytes]


def misdescribed(said: DescribedFile, file: pq.ParquetFile, names: Mapping[int, str]) -> list[str]:
    """What a manifest says of a file and is not so. `names`: of the table's columns, by id."""
    footer = file.metadata
    found = []
    if footer.num_rows != said.rows:
        found.append(f"{said.rows} rows; expected {footer.num_rows}, as its footer says")
    paths = column_paths(footer)
    counted = _counts(footer)
    for field_id, extent in extents(footer).items():
        name = names.get(field_id, paths[field_id])
        values, nulls = counted[paths[field_id]]
        for what, told, true in (
            ("values", said.values.get(field_id), values),
            ("nulls", said.nulls.get(field_id), nulls),
        ):
            if told is not None and true is not None and told != true:
                found.append(f"{told} {what} of column {name}; expected {true}")
        lower, upper = said.lower.get(field_id), said.upper.get(field_id)
        if _within(extent, lower, upper):
            continue
        column = _column(file, paths[field_id])
        outside = _outside(column, extent.kind, lower, upper)
        if outside is None:
            found.append(f"bounds of column {name} that are no {extent.kind}")
        elif outside:
            found.append(f"bounds of column {name} that leave {outside:,} of its values out")
    return found


def _within(extent: ColumnExtent, lower: bytes | None, upper: bytes | None) -> bool:
    """Does the footer alone tell that the bounds cover the column?"""
    try:
        return extent.within(lower, upper) is True
    except (ValueError, struct.error):  # of a type that the column has become since, or of none
        return False


def _counts(footer: pq.FileMetaData) -> dict[str, tuple[int, int | None]]:
    """Values and nulls of each column; None where some row group does not tell."""
    found: dict[str, tuple[int, int | None]] = {}
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for position in range(footer.num_columns):
            column = group.column(position)
            said = column.statistics if column.is_stats_set else None
            more = said.null_count if said is not None and said.has_null_count else None
            values, nulls = found.get(column.path_in_schema, (0, 0))
            known = None if nulls is None or more is None else nulls + more
            found[column.path_in_schema] = (values + column.num_values, known)
    return found


def _column(file: pq.ParquetFile, path: str) -> pa.ChunkedArray:
    """One leaf, out of the structs that it lies in."""
    found = file.read(columns=[path], use_threads=False).column(0)
    while pa.types.is_struct(found.type):  # only the leaf's own way was read
        found = pc.struct_field(found, [0])
    return found


def _outside(
    column: pa.ChunkedArray, kind: PrimitiveType, lower: bytes | None, upper: bytes | None
) -> int | None:
    """How many values lie outside of the bounds; None where the bounds cannot be read."""
    try:
        low, high = (None if each is None else _plain(kind, each) for each in (lower, upper))
    except (ValueError, struct.error):
        return None
    values = _comparable(column)
    if isinstance(kind, (IntegerType, FloatType)):  # bounds may be those of the wider type
        values = values.cast(pa.int64() if isinstance(kind, IntegerType) else pa.float64())
    below = pc.less(values, pa.scalar(low, values.type)) if low is not None else None
    above = pc.greater(values, pa.scalar(high, values.type)) if high is not None else None
    return sum(pc.sum(each).as_py() or 0 for each in (below, above) if each is not None)


def _plain(kind: PrimitiveType, raw: bytes) -> Any:
    wider = {IntegerType: LongType(), FloatType: DoubleType()}
    value = from_bytes(wider.get(type(kind), kind) if len(raw) == 8 else kind, raw)
    return value.bytes if isinstance(value, UUID) else value


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Days and moments as the numbers that bounds have."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column = column.cast(kind.storage_type)
        kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return column.cast(pa.int64())
    if pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    return column
