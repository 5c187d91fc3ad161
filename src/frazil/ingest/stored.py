"""Data files as they are stored, read by the ids of their columns. Runs on executors.

A table's columns may have been renamed, widened or added since a file was written: what comes out
has the names and types of the schema that is asked for, and null where the file knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import _to_requested_schema, pyarrow_to_schema
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, StructType

from frazil.core.errors import Miscount


class Opened:
    """A Parquet file. Of a struct only those fields are read that are asked for."""

    def __init__(self, file: pq.ParquetFile) -> None:
        self.groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._file = file
        self._schema = pyarrow_to_schema(file.schema_arrow, format_version=3)

    def read(self, wanted: Schema, group: int) -> pa.Table:
        names = list(_paths(wanted.fields, self._schema.fields))
        rows = self._file.read_row_group(group, names).combine_chunks()
        # (Arrow forgets how many rows there are where there is no column.)
        batches = rows.to_batches() or [pa.RecordBatch.from_pylist([{}] * self.groups[group])]
        return pa.Table.from_batches(
            [_to_requested_schema(wanted, self._schema, each) for each in batches]
        )


def _paths(wanted: Iterable[NestedField], there: Iterable[NestedField]) -> Iterator[str]:
    """What is wanted and there, in Parquet's words: fields of structs one by one."""
    here = {field.field_id: field for field in there}
    for field in wanted:
        mine = here.get(field.field_id)
        if mine is None:
            continue
        inside: list[str] = []
        if isinstance(field.field_type, StructType) and isinstance(mine.field_type, StructType):
            inside = list(_paths(field.field_type.fields, mine.field_type.fields))
        yield from (f"{mine.name}.{name}" for name in inside) if inside else [mine.name]


@contextmanager
def opened(io: FileIO, path: str, rows: int | None = None) -> Iterator[Opened]:
    with io.new_input(path).open() as stream:
        file = Opened(pq.ParquetFile(stream))
        if rows is not None and sum(file.groups) != rows:
            raise Miscount(f"cannot read {path}: expected {rows} rows, found {sum(file.groups)}")
        yield file


def whole(io: FileIO, path: str, wanted: Schema, rows: int | None = None) -> pa.Table:
    with opened(io, path, rows) as file:
        found = [file.read(wanted, group) for group in range(len(file.groups))]
    return pa.concat_tables(found)
