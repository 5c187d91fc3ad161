"""Compares manifests' claims about data files with the files, for `frazil audit --deep`.

Engines skip files, delete files included, by the counts and bounds in manifests. If bounds do not
cover a file's values, queries lose rows silently. In: a file as its manifest describes it, and the
open Parquet file. Out: one sentence per false claim.

Counts and bounds are compared with the footer. Where the footer contradicts the bounds or lacks its
own (Parquet omits a minimum or maximum of over 4,096 bytes), the column is read and the values
outside are counted. Columns inside lists and maps have no bounds. Reads only.
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


def misdescribed(
    described: DescribedFile, file: pq.ParquetFile, names: Mapping[int, str]
) -> list[str]:
    """The false claims of a manifest about a file. `names`: the table's column names, by field
    id."""
    footer = file.metadata
    problems = []
    if footer.num_rows != described.rows:
        problems.append(f"{described.rows} rows; expected {footer.num_rows}, as its footer says")
    paths = column_paths(footer)
    counted = _counts(footer)
    for field_id, extent in extents(footer).items():
        name = names.get(field_id, paths[field_id])
        values, nulls = counted[paths[field_id]]
        for measure, claimed, actual in (
            ("values", described.values.get(field_id), values),
            ("nulls", described.nulls.get(field_id), nulls),
        ):
            if claimed is not None and actual is not None and claimed != actual:
                problems.append(f"{claimed} {measure} of column {name}; expected {actual}")
        lower, upper = described.lower.get(field_id), described.upper.get(field_id)
        if _within(extent, lower, upper):
            continue
        column = _column(file, paths[field_id])
        outside = _outside(column, extent.kind, lower, upper)
        if outside is None:
            problems.append(f"bounds of column {name} that are no {extent.kind}")
        elif outside:
            problems.append(f"bounds of column {name} that leave {outside:,} of its values out")
    return problems


def _within(extent: ColumnExtent, lower: bytes | None, upper: bytes | None) -> bool:
    """Does the footer alone prove that the bounds cover the column?"""
    try:
        return extent.within(lower, upper) is True
    except (ValueError, struct.error):  # of a type the column was widened to since, or malformed
        return False


def _counts(footer: pq.FileMetaData) -> dict[str, tuple[int, int | None]]:
    """Values and nulls of each column; nulls are None if some row group does not record them."""
    counts: dict[str, tuple[int, int | None]] = {}
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for position in range(footer.num_columns):
            column = group.column(position)
            statistics = column.statistics if column.is_stats_set else None
            more = (
                statistics.null_count
                if statistics is not None and statistics.has_null_count
                else None
            )
            values, nulls = counts.get(column.path_in_schema, (0, 0))
            known = None if nulls is None or more is None else nulls + more
            counts[column.path_in_schema] = (values + column.num_values, known)
    return counts


def _column(file: pq.ParquetFile, path: str) -> pa.ChunkedArray:
    """One leaf column, extracted from the structs around it."""
    column = file.read(columns=[path], use_threads=False).column(0)
    while pa.types.is_struct(column.type):  # only the path to the leaf was read
        column = pc.struct_field(column, [0])
    return column


def _outside(
    column: pa.ChunkedArray, kind: PrimitiveType, lower: bytes | None, upper: bytes | None
) -> int | None:
    """The number of values outside the bounds; None if the bounds cannot be decoded."""
    try:
        low, high = (None if bound is None else _plain(kind, bound) for bound in (lower, upper))
    except (ValueError, struct.error):
        return None
    values = _comparable(column)
    if isinstance(kind, (IntegerType, FloatType)):  # bounds may be those of the wider type
        values = values.cast(pa.int64() if isinstance(kind, IntegerType) else pa.float64())
    below = pc.less(values, pa.scalar(low, values.type)) if low is not None else None
    above = pc.greater(values, pa.scalar(high, values.type)) if high is not None else None
    return sum(pc.sum(mask).as_py() or 0 for mask in (below, above) if mask is not None)


def _plain(kind: PrimitiveType, raw: bytes) -> Any:
    wider = {IntegerType: LongType(), FloatType: DoubleType()}
    value = from_bytes(wider.get(type(kind), kind) if len(raw) == 8 else kind, raw)
    return value.bytes if isinstance(value, UUID) else value


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates and timestamps as the integers that bounds contain."""
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
