"""Columns in, Parquet data files out, as descriptors the committer can stage. Runs on executors.

Promises: file names no other attempt has; Iceberg field ids and full statistics in each file; each
file within one partition of the table's spec; a descriptor only for a file that is closed and
uploaded. What an attempt that dies leaves behind is named after sink, epoch and batch number.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import to_json
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.locations import load_location_provider
from pyiceberg.typedef import Record

#: Open files per task: beyond it the one that was written least recently is finished.
MAX_OPEN = 64
#: What one row group gathers, as Arrow holds it, before it is encoded.
ROW_GROUP_BYTES = 64 * 1024**2
ROW_GROUP_ROWS = 512 * 1024
#: A column is dictionary-encoded where at most this share of a sample's values are distinct.
DICTIONARY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TableShape:
    """All that an executor must know of a table. Picklable; `io` may hold credentials."""

    name: str
    location: str
    schema: str  # Iceberg's JSON
    schema_id: int
    spec: str  # Iceberg's JSON
    properties: Mapping[str, str]
    target_file_size: int
    compression: str
    io: Mapping[str, str] = field(repr=False)

    @property
    def arrow(self) -> pa.Schema:
        return schema_to_pyarrow(Schema.model_validate_json(self.schema))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    descriptor: str  # Iceberg's JSON of a data file
    rows: int
    bytes: int


#: Keys that Iceberg's Java file IO and pyiceberg's name differently.
_IO_KEYS = {"client.region": "s3.region"}


def file_io(location: str, properties: Mapping[str, str]) -> FileIO:
    translated = {_IO_KEYS.get(key, key): value for key, value in properties.items()}
    # Java's class name and catalog type mean nothing here; the location's scheme chooses.
    for key in ("io-impl", "type", "uri", "catalog-impl"):
        translated.pop(key, None)
    if translated.get("s3.path-style-access", "").lower() != "true" and "s3.endpoint" in translated:
        translated.setdefault("s3.force-virtual-addressing", "true")
    return load_file_io(translated, location)


class Writer:
    """Writes the rows of one task into one table. `close()` gives the finished files."""

    def __init__(self, shape: TableShape, prefix: str) -> None:
        self._shape = shape
        self._prefix = prefix
        self._schema = Schema.model_validate_json(shape.schema)
        self._spec = PartitionSpec.model_validate_json(shape.spec)
        self._io = file_io(shape.location, shape.io)
        self._locations = load_location_provider(shape.location, dict(shape.properties))
        self._transforms = [
            (part, part.transform.pyarrow_transform(self._schema.find_type(part.source_id)))
            for part in self._spec.fields
        ]
        self._open: dict[tuple[Any, ...], _OpenFile] = {}  # least recently written first
        self._finished: list[WrittenFile] = []

    def write(self, rows: pa.Table) -> None:
        if not len(rows):
            return
        if not self._transforms:
            self._append((), rows)
            return
        for partition, part in self._partitioned(rows):
            self._append(partition, part)

    def close(self) -> list[WrittenFile]:
        while self._open:
            self._finish(next(iter(self._open)))
        return self._finished

    def _partitioned(self, rows: pa.Table) -> list[tuple[tuple[Any, ...], pa.Table]]:
        keys = pa.table(
            {
                str(i): transform(_source(rows, self._schema, part.source_id))
                for i, (part, transform) in enumerate(self._transforms)
            }
        )
        names = keys.schema.names
        codes = np.zeros(len(rows), np.int64)
        for name in names:  # one number per combination of partition values
            column = keys.column(name).combine_chunks()
            if isinstance(column.type, pa.BaseExtensionType):  # uuid: Arrow encodes its bytes
                column = column.storage
            encoded = column.dictionary_encode("encode")
            if isinstance(encoded, pa.ChunkedArray):
                encoded = encoded.combine_chunks()
            codes = codes * (len(encoded.dictionary) + 1) + np.asarray(encoded.indices)
        found, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        values = [tuple(keys.column(name)[int(at)].as_py() for name in names) for at in first]
        if len(found) == 1:
            return [(values[0], rows)]
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(len(found) + 1))
        ordered = rows.take(pa.array(order))
        return [
            (value, ordered.slice(int(bounds[i]), int(bounds[i + 1] - bounds[i])))
            for i, value in enumerate(values)
        ]

    def _append(self, partition: tuple[Any, ...], rows: pa.Table) -> None:
        file = self._open.pop(partition, None)
        if file is None:
            if len(self._open) >= MAX_OPEN:
                self._finish(next(iter(self._open)))
            file = _OpenFile(self._io, self._path(partition), self._shape, rows)
        self._open[partition] = file
        file.write(rows)
        if file.full:
            self._finish(partition)

    def _path(self, partition: tuple[Any, ...]) -> str:
        name = f"{self._prefix}-{uuid.uuid4()}.parquet"
        if partition:
            folder = self._spec.partition_to_path(Record(*partition), self._schema)
            name = f"{folder}/{name}"
        return self._locations.new_data_location(name)

    def _finish(self, partition: tuple[Any, ...]) -> None:
        file = self._open.pop(partition)
        metadata, size = file.close()
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=metadata,
            stats_columns=compute_statistics_plan(self._schema, dict(self._shape.properties)),
            parquet_column_mapping=parquet_path_to_id_mapping(self._schema),
        ).to_serialized_dict()
        descriptor = {
            "spec-id": self._spec.spec_id,
            "content": "data",
            "file-path": file.path,
            "file-format": "parquet",
            "partition": [
                None if value is None else to_json(self._result_type(part), value)
                for (part, _), value in zip(self._transforms, partition, strict=True)
            ],
            "file-size-in-bytes": size,
            "record-count": metadata.num_rows,
            "split-offsets": sorted(statistics["split_offsets"] or []),
            "sort-order-id": 0,
        }
        for key in ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts",
                    "lower_bounds", "upper_bounds"):  # fmt: skip
            values: dict[int, Any] = statistics[key] or {}
            descriptor[key.replace("_", "-")] = {
                "keys": list(values),
                "values": [v.hex() if isinstance(v, bytes) else v for v in values.values()],
            }
        self._finished.append(WrittenFile(json.dumps(descriptor), metadata.num_rows, size))

    def _result_type(self, part: Any) -> Any:
        return part.transform.result_type(self._schema.find_type(part.source_id))


class _OpenFile:
    def __init__(self, io: FileIO, path: str, shape: TableShape, sample: pa.Table) -> None:
        self.path = path
        self._target = shape.target_file_size
        self._output = io.new_output(path)
        self._stream = self._output.create(overwrite=True)  # the name is new: no need to ask first
        self._writer = pq.ParquetWriter(
            self._stream,
            sample.schema,
            compression=shape.compression,
            compression_level=_level(shape),
            use_dictionary=_repetitive(sample),
            store_schema=False,
            version="2.6",
        )
        self._group_bytes = min(ROW_GROUP_BYTES, shape.target_file_size)
        self._gathered: list[pa.Table] = []
        self._rows = self._bytes = 0

    def write(self, rows: pa.Table) -> None:
        self._gathered.append(rows)
        self._rows += len(rows)
        self._bytes += rows.nbytes
        if self._rows >= ROW_GROUP_ROWS or self._bytes >= self._group_bytes:
            self._encode()

    def _encode(self) -> None:
        if self._gathered:
            self._writer.write_table(pa.concat_tables(self._gathered), row_group_size=self._rows)
            self._gathered, self._rows, self._bytes = [], 0, 0

    @property
    def full(self) -> bool:
        return bool(self._stream.tell() >= self._target)

    def close(self) -> tuple[pq.FileMetaData, int]:
        self._encode()
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        return self._writer.writer.metadata, size


def _level(shape: TableShape) -> int | None:
    level = shape.properties.get("write.parquet.compression-level")
    return int(level) if level else None


def _repetitive(sample: pa.Table) -> list[str] | bool:
    """Columns worth a dictionary, by a sample: it costs time where most values differ."""
    head = sample.slice(0, 4096)
    found = []
    for column in head.schema:
        if pa.types.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            continue
        distinct = pc.count_distinct(head.column(column.name)).as_py()
        if distinct <= max(2, len(head) * DICTIONARY_SHARE):
            found.append(column.name)
    return found or False


def _source(rows: pa.Table, schema: Schema, field_id: int) -> pa.Array:
    """A partition field's source column, which may stand inside structs."""
    path = schema.find_column_name(field_id)
    assert path is not None
    if path in rows.schema.names:  # a dot may also stand in a name
        return rows.column(path).combine_chunks()
    first, *rest = path.split(".")
    column = rows.column(first)
    for name in rest:
        column = pc.struct_field(column, name)
    return column.combine_chunks()
