"""Looks up the current version of keys in a table with a `version_column`. Runs on executors.

    keys of a batch ─▶ files with overlapping bounds: key and version only ─▶ highest version by key

The version of a key never falls: a change with a lower version is not applied. So the current
version of a key is the highest of all its rows in all data files, deleted rows included: the lookup
need not know which delete file applies to which data file. Versions of deleted keys are in another
table, which is searched the same way. Reading a row twice does no harm. So staged files are listed
first and live files second, and a file that is committed in between is not missed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.schema import Schema, prune_columns
from pyiceberg.types import (
    DateType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from frazil.arrow.lazy_polars import pl
from frazil.errors import Conflict
from frazil.files.parquet import open_data_file
from frazil.files.writer import WriterSpec, file_io

#: The lowest and the highest value of a column, as numbers or text; None: unknown.
Span = tuple[Any, Any] | None

#: Rows of files that are joined with the keys at once.
TOGETHER_ROWS = 1_000_000

_NUMBERS = (IntegerType, LongType, DateType, TimestampType, TimestamptzType)


@dataclass(frozen=True, slots=True)
class FileBounds:
    """A data file and the bounds of its key columns."""

    path: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class VersionLookup:
    """A table to search: its key columns, the path of its version column, and its files."""

    shape: WriterSpec
    key: tuple[str, ...]
    order: str
    files: tuple[FileBounds, ...]


def field_of(columns: pa.Schema, path: str) -> pa.Field:
    """The column at a path, named by the path; nullable if it is nested."""
    top, *inside = [path] if path in columns.names else path.split(".")
    field = columns.field(top)
    for name in inside:
        field = field.type.field(name)
    return pa.field(path, field.type, field.nullable or bool(inside))


def column_of(rows: pa.Table, path: str) -> Any:
    """The values at a path; None: the rows have no such column."""
    top, *inside = [path] if path in rows.schema.names else path.split(".")
    if top not in rows.schema.names:
        return None
    column = rows.column(top)
    for name in inside:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = pc.struct_field(column, name)
    return column


def file_bounds(
    schema: Schema, key: Sequence[str], path: str, bounds: Sequence[dict[int, str]]
) -> FileBounds:
    """The bounds of a data file. `bounds`: lower and upper bounds of its manifest entry, in hex."""
    spans: list[Span] = []
    for name in key:
        field = schema.find_field(name)
        low, high = (bound.get(field.field_id) for bound in bounds)
        if low is None or high is None or not isinstance(field.field_type, (*_NUMBERS, StringType)):
            spans.append(None)
        else:
            spans.append(
                (
                    from_bytes(field.field_type, bytes.fromhex(low)),
                    from_bytes(field.field_type, bytes.fromhex(high)),
                )
            )
    return FileBounds(path, tuple(spans))


def comparable(column: Any) -> pl.Series:
    if isinstance(column.type, pa.BaseExtensionType):  # uuid
        column = pa.chunked_array(
            [chunk.storage for chunk in column.chunks], column.type.storage_type
        )
    return pl.Series(pl.from_arrow(column))


def highest(tables: Iterable[VersionLookup], keys: pl.DataFrame) -> pl.DataFrame:
    """The keys that occur in a file, each with the highest `order` of its rows; null if no row has
    one."""
    spans = [_span(column) for column in keys]
    rows = (rows for table in tables for rows in _rows(table, keys, spans))
    matches = [some.join(keys, on=keys.columns, how="semi") for some in _together(rows)]
    if not matches:
        return keys.clear().with_columns(order=pl.lit(None))
    return pl.concat(matches, how="vertical_relaxed").group_by(keys.columns).max()


def _together(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Concatenate small frames: each join builds a hash table of all keys."""
    waiting: list[pl.DataFrame] = []
    for frame in frames:
        waiting.append(frame)
        if sum(map(len, waiting)) >= TOGETHER_ROWS:
            yield pl.concat(waiting, how="vertical_relaxed")
            waiting = []
    if waiting:
        yield pl.concat(waiting, how="vertical_relaxed")


def _rows(
    table: VersionLookup, keys: pl.DataFrame, spans: Sequence[Span]
) -> Iterator[pl.DataFrame]:
    if not (files := [data_file for data_file in table.files if _meet(data_file.spans, spans)]):
        return
    io = file_io(table.shape.location, table.shape.io)
    schema = Schema.model_validate_json(table.shape.schema)
    wanted = prune_columns(
        schema, {schema.find_field(name).field_id for name in (*table.key, table.order)}
    )
    for data_file in files:
        try:
            with open_data_file(io, data_file.path) as file:
                for group in range(len(file.groups)):
                    rows = file.read(wanted, group)
                    yield pl.DataFrame(
                        {
                            **{
                                column: comparable(rows.column(name)).cast(keys.schema[column])
                                for column, name in zip(keys.columns, table.key, strict=True)
                            },
                            "order": comparable(column_of(rows, table.order)),
                        }
                    )
        except FileNotFoundError:
            # A replaced file is deleted when its snapshot expires, even if it was just listed.
            raise Conflict(
                f"cannot read {data_file.path} of table {table.shape.name}: it was "
                "removed after the files were listed"
            ) from None


def _span(column: pl.Series) -> Span:
    if column.dtype.is_integer() or column.dtype in (
        pl.Date,
        pl.Datetime("us", "UTC"),
        pl.Datetime("us"),
    ):
        column = column.to_physical()
    elif column.dtype != pl.String:
        return None
    return (column.min(), column.max()) if len(column) else None


def _meet(file_spans: Sequence[Span], key_spans: Sequence[Span]) -> bool:
    return all(
        one is None or other is None or (one[0] <= other[1] and other[0] <= one[1])
        for one, other in itertools.zip_longest(file_spans, key_spans)
    )
