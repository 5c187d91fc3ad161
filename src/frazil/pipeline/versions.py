"""Which change of a key is the newer one, where a column says so: what the table has. Executors.

    keys of a batch ─▶ files whose bounds they meet: key and order alone ─▶ each key's highest order

The order of a key only ever grows: a change with a lower one is not applied. So the highest order
that any row of the key has, in any data file, is the one it stands at, whether or not the row is
still to be seen: nobody needs to know which deletes count for which file. Of keys that were deleted
another table remembers the order, and is looked into the same way. To see a row twice does no harm,
so files that are staged and files that are live may be looked into together, in this order, and
nothing slips through when the ones become the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
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

from frazil.errors import Conflict
from frazil.files.parquet import open_data_file
from frazil.files.writer import WriterSpec, file_io

#: The lowest and the highest value of a column, as numbers or text; None: not known.
Span = tuple[Any, Any] | None

#: So many rows of files are held against the keys at once.
TOGETHER_ROWS = 1_000_000

_NUMBERS = (IntegerType, LongType, DateType, TimestampType, TimestamptzType)


@dataclass(frozen=True, slots=True)
class FileBounds:
    """A data file to look into, and the spans of its key columns."""

    path: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class VersionLookup:
    """A table to look into: its key columns, the path of its order, and its files."""

    shape: WriterSpec
    key: tuple[str, ...]
    order: str
    files: tuple[FileBounds, ...]


def field_of(columns: pa.Schema, path: str) -> pa.Field:
    """The column at a path, called by the path. It may be null where something around it is."""
    top, *inside = [path] if path in columns.names else path.split(".")
    found = columns.field(top)
    for name in inside:
        found = found.type.field(name)
    return pa.field(path, found.type, found.nullable or bool(inside))


def column_of(rows: pa.Table, path: str) -> Any:
    """The values at a path; None where the rows have no such column."""
    top, *inside = [path] if path in rows.schema.names else path.split(".")
    if top not in rows.schema.names:
        return None
    found = rows.column(top)
    for name in inside:
        if not pa.types.is_struct(found.type) or found.type.get_field_index(name) < 0:
            return None
        found = pc.struct_field(found, name)
    return found


def looked(
    schema: Schema, key: Sequence[str], path: str, bounds: Sequence[dict[int, str]]
) -> FileBounds:
    """`bounds`: the lowest and the highest values of columns, as a manifest has them, in hex."""
    spans: list[Span] = []
    for name in key:
        field = schema.find_field(name)
        low, high = (each.get(field.field_id) for each in bounds)
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
            [each.storage for each in column.chunks], column.type.storage_type
        )
    return pl.Series(pl.from_arrow(column))


def highest(tables: Iterable[VersionLookup], keys: pl.DataFrame) -> pl.DataFrame:
    """Of these keys those that some file has, each with the highest `order` that any row has; null
    where no row has one."""
    spans = [_span(column) for column in keys]
    rows = (rows for table in tables for rows in _rows(table, keys, spans))
    found = [some.join(keys, on=keys.columns, how="semi") for some in _together(rows)]
    if not found:
        return keys.clear().with_columns(order=pl.lit(None))
    return pl.concat(found, how="vertical_relaxed").group_by(keys.columns).max()


def _together(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Many at once: each join makes a table of all keys first."""
    waiting: list[pl.DataFrame] = []
    for each in frames:
        waiting.append(each)
        if sum(map(len, waiting)) >= TOGETHER_ROWS:
            yield pl.concat(waiting, how="vertical_relaxed")
            waiting = []
    if waiting:
        yield pl.concat(waiting, how="vertical_relaxed")


def _rows(
    table: VersionLookup, keys: pl.DataFrame, spans: Sequence[Span]
) -> Iterator[pl.DataFrame]:
    if not (files := [each for each in table.files if _meet(each.spans, spans)]):
        return
    io = file_io(table.shape.location, table.shape.io)
    schema = Schema.model_validate_json(table.shape.schema)
    wanted = prune_columns(
        schema, {schema.find_field(name).field_id for name in (*table.key, table.order)}
    )
    for each in files:
        try:
            with open_data_file(io, each.path) as file:
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
            # Files that were replaced may go with their snapshot, whoever has listed them.
            raise Conflict(
                f"cannot look into {each.path} of table {table.shape.name}: it is gone "
                "since the files were listed"
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


def _meet(there: Sequence[Span], here: Sequence[Span]) -> bool:
    return all(
        one is None or other is None or (one[0] <= other[1] and other[0] <= one[1])
        for one, other in itertools.zip_longest(there, here)
    )
