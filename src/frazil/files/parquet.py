"""Reads data files by the ids of their columns. Runs on executors.

A table's columns may have been renamed, widened or added since a file was written. The result has
the names, types and nullability of the requested schema, with every null and every empty list in
place. A column that the file does not have is its initial default, or null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from frazil.arrow.cast import MissingField, absent, by_id, field_id, project
from frazil.arrow.default_values import default_values
from frazil.errors import AccountingError, SchemaMismatch


class ParquetDataFile:
    """A Parquet file. Of a struct, only the requested fields are read."""

    def __init__(self, file: pq.ParquetFile, path: str) -> None:
        self.groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._file = file
        self._path = path
        self._columns = {field_id(field): field.name for field in file.schema_arrow}
        if unnamed := next(_unnamed(file.schema_arrow, ""), None):
            raise SchemaMismatch(
                f"cannot read {path}: its column {unnamed!r} has no field id",
                hint="rewrite the files that were added to the table without field ids",
            )

    def read(self, wanted: Schema, group: int) -> pa.Table:
        target = schema_to_pyarrow(wanted)
        defaults = default_values(wanted, "initial_default")
        names = list(_paths(target, self._file.schema_arrow))
        rows = self._file.read_row_group(group, names)
        try:
            columns = [self._column(rows, field, self.groups[group], defaults) for field in target]
        except MissingField as error:
            raise SchemaMismatch(
                f"cannot read {self._path}: the table requires column {error.path!r}, "
                f"{error.count} rows have no value in it"
            ) from None
        return pa.Table.from_arrays(columns, schema=target)

    def _column(
        self, rows: pa.Table, field: pa.Field, count: int, defaults: Mapping[int, pa.Scalar]
    ) -> pa.ChunkedArray:
        name = self._columns.get(field_id(field))
        if name is None:
            return pa.chunked_array([absent(count, field, defaults)], field.type)
        return project(rows.column(name), field, by_id, defaults)


def _unnamed(fields: Iterable[pa.Field], parent: str) -> Iterator[str]:
    """Paths of fields without an id: they cannot be matched to a column."""
    for field in fields:
        path, kind = f"{parent}{field.name}", field.type
        if field_id(field) is None:
            yield path
        if pa.types.is_map(kind):
            kind = pa.struct([kind.key_field, kind.item_field])
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = pa.struct([kind.value_field])
        if pa.types.is_struct(kind):
            yield from _unnamed(kind, f"{path}.")


def _paths(wanted: Iterable[pa.Field], stored: Iterable[pa.Field]) -> Iterator[str]:
    """Parquet's paths of the wanted fields that the file has; fields of structs one by one."""
    columns = {field_id(field): field for field in stored}
    for field in wanted:
        column = columns.get(field_id(field))
        if column is None:
            continue
        inside: list[str] = []
        if pa.types.is_struct(field.type) and pa.types.is_struct(column.type):
            inside = list(_paths(field.type, column.type))
        yield from (f"{column.name}.{name}" for name in inside) if inside else [column.name]


@contextmanager
def open_data_file(io: FileIO, path: str, rows: int | None = None) -> Iterator[ParquetDataFile]:
    with io.new_input(path).open() as stream:
        file = ParquetDataFile(pq.ParquetFile(stream), path)
        if rows is not None and sum(file.groups) != rows:
            raise AccountingError(
                f"cannot read {path}: expected {rows} rows, found {sum(file.groups)}"
            )
        yield file


def whole(io: FileIO, path: str, wanted: Schema, rows: int | None = None) -> pa.Table:
    with open_data_file(io, path, rows) as file:
        tables = [file.read(wanted, group) for group in range(len(file.groups))]
    return pa.concat_tables(tables)
