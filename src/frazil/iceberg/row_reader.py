"""Reads the rows of data files by field id, without a JVM: simple columns, with a filter on texts.
Deleted rows are included."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frazil.iceberg.file_io import FileStore
from frazil.iceberg.manifests import any_within

_TEXT = pa.dictionary(pa.int32(), pa.string())
#: Iceberg types of the index's columns and of the topic, partition and offset columns.
TYPES = {
    "string": _TEXT,
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}


class SimpleColumn(NamedTuple):
    id: int
    name: str
    type: pa.DataType


def rows_of_file(
    store: FileStore,
    path: str,
    wanted: Sequence[SimpleColumn],
    where: Mapping[str, Collection[str]],
) -> pa.Table:
    """The wanted columns of a file, of the rows that match `where`."""
    with store.reading(path), store.open(path) as source:
        file = pq.ParquetFile(source)
        # Iceberg identifies columns by id: names may have changed since the file was written.
        ids = {
            (field.metadata or {}).get(b"PARQUET:field_id"): field.name
            for field in file.schema_arrow
        }
        if set(ids) == {None}:  # an imported file without field ids
            ids = {
                b"%d" % column.id: column.name
                for column in wanted
                if column.name in file.schema_arrow.names
            }
        columns = {ids[key]: column for column in wanted if (key := b"%d" % column.id) in ids}
        texts = [name for name, column in columns.items() if column.type is _TEXT]
        file = pq.ParquetFile(source, metadata=file.metadata, read_dictionary=texts)
        groups = set(range(file.metadata.num_row_groups))
        for name in texts:
            if (values := where.get(columns[name].name)) is not None:
                groups &= _groups(file.metadata, name, values)
        table = file.read_row_groups(sorted(groups), list(columns), use_threads=False)
        table = table.rename_columns([columns[name].name for name in table.column_names])
        return fitting(table, wanted, where)


def _groups(metadata: pq.FileMetaData, name: str, values: Collection[str]) -> set[int]:
    """The row groups of a file that may contain one of the values."""
    ordered = sorted(values)
    at = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(name)
    statistics = [
        metadata.row_group(i).column(at).statistics for i in range(metadata.num_row_groups)
    ]
    bounds = [
        (stats.min, stats.max) if stats and stats.has_min_max else (None, None)
        for stats in statistics
    ]
    return {i for i, span in enumerate(bounds) if any_within(ordered, *span)}


def _all(texts: pa.DictionaryArray, values: Collection[str]) -> bool:
    """Is every text one of the values?"""
    return not texts.null_count and set(texts.dictionary.to_pylist()) <= set(values)


def fitting(
    table: pa.Table, wanted: Sequence[SimpleColumn], where: Mapping[str, Collection[str]]
) -> pa.Table:
    """The wanted columns with their types, of the rows that match `where`."""
    columns = {
        column.name: table[column.name].cast(column.type)
        if column.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, column.type)])
        for column in wanted
    }
    rows = pa.table(columns)
    for name, values in where.items():
        if all(_all(chunk, values) for chunk in rows[name].chunks):
            continue  # nothing to leave out: a filter would copy every column
        chosen = pa.array(list(values), pa.string())
        masks = [
            pc.is_in(chunk.dictionary, chosen).take(chunk.indices) for chunk in rows[name].chunks
        ]
        rows = rows.filter(pa.chunked_array(masks, pa.bool_()))
    return rows
