"""Columns in, Parquet data files out, as descriptors the committer can stage. Runs on executors.

    rows ─▶ gathered, table by table ─▶ clustered by partition, sorted ─▶ row groups ─▶ files
            └──────────────── bounded by `OpenFiles`, for all tables of a task ───────────┘

Promises: file names are unique per attempt; each file has Iceberg field ids and full statistics, is
within one partition of the table's spec, sorted from end to end if the table has a sort order, and
no larger than `CEILING`; only a file that is closed and uploaded has a descriptor. Files left by a
failed attempt are named after sink, epoch and batch number.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    parquet_path_to_id_mapping,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder
from pyiceberg.types import PrimitiveType

from frazil.arrow.cast import projected
from frazil.arrow.default_values import declared
from frazil.files.column_bounds import file_statistics
from frazil.files.encodings import choose
from frazil.files.parquet_settings import ParquetSettings, is_boolean, refused
from frazil.files.partition_values import check as check_partition
from frazil.files.partition_values import json_value, path_of, plain, source_of, transformation

#: Limits for all writers of one task together: open files, and Arrow's bytes of rows in memory.
MAX_OPEN = 64
MAX_BYTES = 128 * 1024**2
#: Maximum size of a file, for any target size.
CEILING = 512 * 1024**2
#: Arrow's overhead per column.
COLUMN_BYTES = 768

Partition = tuple[Any, ...]
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class WriterSpec:
    """All that an executor needs to know of a table. Picklable; `io` may hold credentials."""

    name: str
    location: str
    schema: str  # Iceberg's JSON
    schema_id: int
    spec: str  # Iceberg's JSON
    properties: Mapping[str, str]
    target_file_size: int
    compression: str  # if the table's properties name none
    io: Mapping[str, str] = field(repr=False)
    sort_order: str = ""  # Iceberg's JSON; empty: unsorted
    #: for equality deletes: the ids of the key columns
    equality: tuple[int, ...] = ()

    @property
    def arrow(self) -> pa.Schema:
        return _schema(self.schema)[1]

    def __hash__(self) -> int:
        return hash((self.name, self.location, self.schema, self.spec, self.sort_order))


@dataclass(frozen=True, slots=True)
class DataFileDescriptor:
    descriptor: str  # Iceberg's JSON of a data file
    rows: int
    bytes: int


#: Keys of Iceberg's Java file IO → pyiceberg's.
_IO_KEYS = {"client.region": "s3.region"}


def file_io(location: str, properties: Mapping[str, str]) -> FileIO:
    translated = {_IO_KEYS.get(key, key): value for key, value in properties.items()}
    # Java's class name and catalog type do not apply: the location's scheme decides.
    for key in ("io-impl", "type", "uri", "catalog-impl"):
        translated.pop(key, None)
    if translated.get("s3.path-style-access", "").lower() != "true" and "s3.endpoint" in translated:
        translated.setdefault("s3.force-virtual-addressing", "true")
    return load_file_io(translated, location)


def discard(shape: WriterSpec, files: Iterable[DataFileDescriptor]) -> None:
    """Removes files that are not needed, as far as the store allows it now."""
    io = file_io(shape.location, shape.io)
    for file in files:
        with suppress(OSError):
            io.delete(json.loads(file.descriptor)["file-path"])


def probe(shape: WriterSpec, name: str) -> None:
    """Writes a few bytes where the table's data lies, and removes them; raises the store's
    error."""
    io, path = _shared_io(shape), _layout(shape).path((), name)
    with io.new_output(path).create(overwrite=True) as stream:
        stream.write(b"frazil")
    io.delete(path)


def check(shape: WriterSpec) -> None:
    """Raises `ConfigError` if the table cannot be written."""
    _layout(shape)


class OpenFiles:
    """The files and rows that all writers of one task hold, and their eviction at the limits.

    Of open files, the least recently written one is finished. Of rows in memory, those of the
    fullest writer are written: they make large row groups, and the rows of other writers wait for
    more.
    """

    def __init__(self, most: int = MAX_OPEN, bytes: int = MAX_BYTES) -> None:
        self.most = most
        self._bytes = bytes
        self._gathered: dict[TableWriter, int] = {}  # bytes of rows in memory
        self._sum = 0
        self._open: dict[
            tuple[TableWriter, Partition], _OpenFile
        ] = {}  # least recently written first

    @property
    def open(self) -> int:
        return len(self._open)

    #: the most that were open at a time
    peak = 0

    @property
    def bytes(self) -> int:
        """Bytes of rows in memory."""
        return self._sum

    def gathered(self, writer: TableWriter, bytes: int) -> None:
        self._sum += bytes - self._gathered.pop(writer, 0)
        if bytes:
            self._gathered[writer] = bytes

    def relieve(self) -> None:
        while self._sum > self._bytes:
            max(self._gathered, key=self._gathered.__getitem__).flush()

    def take(self, writer: TableWriter, partition: Partition) -> _OpenFile | None:
        return self._open.pop((writer, partition), None)

    def keep(self, writer: TableWriter, partition: Partition, file: _OpenFile) -> None:
        self._open[writer, partition] = file
        self.peak = max(self.peak, len(self._open))

    def room(self) -> None:
        """Makes room for one more open file."""
        while len(self._open) >= self.most:
            writer, partition = next(iter(self._open))
            writer.finish(partition, self._open.pop((writer, partition)))

    def leave(self, writer: TableWriter) -> None:
        for owner, partition in list(self._open):
            if owner is writer:
                writer.finish(partition, self._open.pop((writer, partition)))


class TableWriter:
    """Writes the rows of one task into one table. `close()` returns the finished files.

    Costs next to nothing until the first row. `files` is shared by all writers of a task.
    """

    def __init__(self, shape: WriterSpec, prefix: str, files: OpenFiles | None = None) -> None:
        self._shape = shape
        self._prefix = prefix
        self._files = OpenFiles() if files is None else files
        self._layout: _Layout | None = None
        self._rows: list[pa.Table] = []
        self._count = self._bytes = 0
        self._spread = False  # over several partitions: worth gathering more than a row group
        self._finished: list[DataFileDescriptor] = []

    def write(self, rows: pa.Table) -> None:
        if not len(rows):
            return
        layout = self._layout = self._layout or _layout(self._shape)
        rows, size = _owned(rows)
        self._rows.append(rows)
        self._count += len(rows)
        self._bytes += size
        if len(self._rows) >= 16 and self._crumbs:
            self._gather(pa.concat_tables(self._rows).combine_chunks())
        group = (
            self._count >= layout.parquet.group_rows or self._bytes >= layout.parquet.group_bytes
        )
        if group and not self._spread and not layout.order:
            self.flush(alone=True)
        self._files.gathered(self, self._bytes)
        self._files.relieve()

    def close(self) -> list[DataFileDescriptor]:
        if self._rows:
            self.flush(everything=True)
        self._files.leave(self)
        return self._finished

    def flush(self, everything: bool = False, alone: bool = False) -> None:
        """Writes gathered rows: whole partitions, the largest first, until half of all is written.

        Rows of small partitions stay in memory, and accumulate before they make a file. With
        `alone`, writes only if all rows are of one partition.
        """
        assert self._layout is not None
        rows = pa.concat_tables(self._rows)
        if self._crumbs:
            rows = rows.combine_chunks()
        parts = self._layout.clusters(rows)
        self._spread = len(parts) > 1
        if alone and self._spread:
            return
        self._rows = []
        if len(parts) == 1:
            self._gather(None)
            self._put(parts[0][0], rows, False)
            return
        ends = np.cumsum([len(index) for _, index in parts])
        some = len(parts) if everything else int(np.searchsorted(ends, len(rows) / 2)) + 1
        order = [index for _, index in parts]
        ordered = rows.take(pa.array(np.concatenate(order[:some])))
        self._gather(rows.take(pa.array(np.concatenate(order[some:]))) if order[some:] else None)
        del rows
        for n, (partition, index) in enumerate(parts[:some]):
            # If not all can stay open, the large ones do.
            close = some > self._files.most and n >= self._files.most - 1
            self._put(partition, ordered.slice(int(ends[n]) - len(index), len(index)), close)

    def finish(self, partition: Partition, file: _OpenFile) -> None:
        self._finished.append(file.finish(partition))

    @property
    def _crumbs(self) -> bool:
        """Is most of the gathered rows' memory overhead, not values?"""
        columns = len(self._rows) * self._rows[0].num_columns
        return bool(self._bytes < 2 * columns * COLUMN_BYTES)

    def _gather(self, rows: pa.Table | None) -> None:
        """Replaces the gathered rows."""
        self._rows = [] if rows is None else [rows]
        self._count = 0 if rows is None else len(rows)
        self._bytes = 0 if rows is None else _size(rows)
        self._files.gathered(self, self._bytes)

    def _put(self, partition: Partition, rows: pa.Table, close: bool) -> None:
        layout = self._layout
        assert layout is not None
        file = self._files.take(self, partition)
        for group, most in layout.groups(layout.ordered(rows)):
            if file is not None and not file.fits(most):
                self.finish(partition, file)
                file = None
            if file is None:
                self._files.room()
                path = layout.path(partition, f"{self._prefix}-{uuid.uuid4()}.parquet")
                file = _OpenFile(layout, _shared_io(self._shape), path, group)
            file.encode(group)
            if file.full:
                self.finish(partition, file)
                file = None
        if file is None:
            return
        if close or layout.order:  # a second run would not continue the order of the first
            self.finish(partition, file)
        else:
            self._files.keep(self, partition, file)


# ── a table's layout ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Key:
    """A field of a partition spec or sort order."""

    source: int
    apply: Callable[[pa.Array], pa.Array]
    type: Any  # of the result
    descending: bool = False
    nulls_first: bool = False


class _Layout:
    """A parsed `WriterSpec`: how a table's rows are split, ordered, encoded and described."""

    def __init__(self, shape: WriterSpec) -> None:
        self._shape = shape
        properties = dict(shape.properties)
        kind = properties.get("write.format.default", "parquet")
        if kind.lower() != "parquet":
            raise refused(
                shape.name,
                f"its files are to be {kind} (write.format.default), and only Parquet is written",
            )
        self.schema, _ = _schema(shape.schema)
        self.spec = PartitionSpec.model_validate_json(shape.spec)
        self.partition = [self._key(term.source_id, term.transform) for term in self.spec.fields]
        order = SortOrder.model_validate_json(shape.sort_order or '{"order-id": 0, "fields": []}')
        self.order = [
            self._key(
                term.source_id,
                term.transform,
                term.direction == SortDirection.DESC,
                term.null_order == NullOrder.NULLS_FIRST,
            )
            for term in order.fields
        ]
        self.order_id = order.order_id if self.order else 0
        self._locations = load_location_provider(shape.location, properties)
        self.statistics = compute_statistics_plan(self.schema, properties)
        self.ids = parquet_path_to_id_mapping(self.schema)
        self.parquet = ParquetSettings(
            shape.name,
            self.schema,
            self.ids,
            properties,
            compression=shape.compression,
            target=min(shape.target_file_size, CEILING),
            ceiling=CEILING,
        )
        # A list's booleans are bits in Arrow; in Parquet they also have one or two levels.
        bits = (p for p in self.ids if ".list." in p or ".key_value." in p)
        self._swell = 8 if any(is_boolean(self.schema, self.ids[p]) for p in bits) else 1.5

    def _key(self, source: int, transform: Any, *order: bool) -> _Key:
        kind = self.schema.find_type(source)
        if not transform.can_transform(kind):
            raise refused(
                self._shape.name,
                f"{transform} of {self.schema.find_column_name(source)!r}, which "
                f"is {kind}, cannot be computed",
            )
        assert isinstance(kind, PrimitiveType)
        return _Key(source, transformation(transform, kind), transform.result_type(kind), *order)

    def path(self, partition: Partition, name: str) -> str:
        if partition:
            kinds = [key.type for key in self.partition]
            name = f"{path_of(self.spec, kinds, partition)}/{name}"
        return self._locations.new_data_location(name)

    def clusters(self, rows: pa.Table) -> list[tuple[Partition, Indices]]:
        """The row indices of each partition, in their order; the largest partition first."""
        if not self.partition:
            return [((), np.arange(0))]
        check_partition(rows, self._shape.schema, self._shape.spec, self._shape.name)
        keys = [
            plain(key.apply(source_of(rows, self.schema, key.source))) for key in self.partition
        ]
        codes, span = np.zeros(len(rows), np.int64), 1
        for key in keys:  # one number per combination of partition values
            encoded = key.dictionary_encode("encode")
            many = len(encoded.dictionary) + 1
            if span * many > 2**62:
                distinct, codes = np.unique(codes, return_inverse=True)
                span = len(distinct)
            codes, span = codes * many + np.asarray(encoded.indices), span * many
        if span <= 2**16:
            codes = codes.astype(np.uint16)  # numpy sorts these several times faster
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        ends = np.append(starts[1:], len(order))
        return [
            (
                tuple(key[int(order[starts[n]])].as_py() for key in keys),
                order[starts[n] : ends[n]],
            )
            for n in np.argsort(starts - ends, kind="stable")
        ]

    def ordered(self, rows: pa.Table) -> pa.Table:
        """The rows in the table's sort order; equal rows keep their order."""
        keys: dict[str, pa.Array] = {}
        by = []
        for n, key in enumerate(self.order):
            column = _sortable(key.apply(source_of(rows, self.schema, key.source)))
            if key.nulls_first and column.null_count:  # Arrow has one null order for all columns
                keys[f"null {n}"] = column.is_null()
                by.append((f"null {n}", "descending"))
            keys[str(n)] = column
            by.append((str(n), "descending" if key.descending else "ascending"))
        return rows.take(pc.sort_indices(pa.table(keys), sort_keys=by)) if by else rows

    def groups(self, rows: pa.Table) -> Iterator[tuple[pa.Table, int]]:
        """Halves the rows until each part is a row group of at most twice the size, or one row.

        With each part, the most that it can add to a file, however badly it compresses.
        """
        size = rows.nbytes
        most = int(size * self._swell) + len(rows) * len(self.ids) + self.parquet.tail
        large = len(rows) > 2 * self.parquet.group_rows or size > 2 * self.parquet.group_bytes
        large = large or most > CEILING
        if large and len(rows) > 1:
            yield from self.groups(rows.slice(0, len(rows) // 2))
            yield from self.groups(rows.slice(len(rows) // 2))
        else:
            yield rows, most

    def descriptor(self, path: str, partition: Partition, metadata: Any, size: int) -> str:
        descriptor = {
            "spec-id": self.spec.spec_id,
            "content": "data",
            "file-path": path,
            "file-format": "parquet",
            "partition": [
                json_value(key.type, value)
                for key, value in zip(self.partition, partition, strict=True)
            ],
            "file-size-in-bytes": size,
            "record-count": metadata.num_rows,
            "split-offsets": _split_offsets(metadata),
            "sort-order-id": self.order_id,
        }
        if ids := list(self._shape.equality):
            descriptor |= {"content": "equality-deletes", "equality-ids": ids}
        for name, values in file_statistics(metadata, self.statistics, self.ids).items():
            descriptor[name] = {
                "keys": list(values),
                "values": [v.hex() if isinstance(v, bytes) else v for v in values.values()],
            }
        return json.dumps(descriptor)


def _split_offsets(footer: pq.FileMetaData) -> list[int]:
    """The offsets at which the row groups begin."""
    first = (footer.row_group(number).column(0) for number in range(footer.num_row_groups))
    pages = ((chunk.dictionary_page_offset, chunk.data_page_offset) for chunk in first)
    return sorted(min(offset for offset in offsets if offset) for offsets in pages)


@lru_cache(maxsize=2048)  # a worker's next task writes the same tables
def _layout(shape: WriterSpec) -> _Layout:
    return _Layout(shape)


@lru_cache(maxsize=2048)
def _schema(text: str) -> tuple[Schema, pa.Schema]:
    schema = Schema.model_validate_json(text)
    return schema, declared(schema)


def _shared_io(shape: WriterSpec) -> FileIO:
    """One file IO for all tables of the same store and credentials: opening a new one is slow."""
    scheme, colon, _ = shape.location.partition("://")
    return _io(scheme + colon if colon else "", tuple(sorted(shape.io.items())))


@lru_cache(maxsize=64)
def _io(location: str, properties: tuple[tuple[str, str], ...]) -> FileIO:
    return file_io(location, dict(properties))


# ── a file ───────────────────────────────────────────────────────────────────────────────────────


class _OpenFile:
    def __init__(self, layout: _Layout, io: FileIO, path: str, sample: pa.Table) -> None:
        self._layout = layout
        self._path = path
        # The name is new: no need to look for a file first.
        self._stream = io.new_output(path).create(overwrite=True)
        parquet = layout.parquet
        encodings = choose(sample, parquet.compatible, parquet.options["compression"] != "none")
        self._writer = pq.ParquetWriter(
            self._stream,
            sample.schema,
            use_dictionary=encodings.dictionary or False,
            column_encoding=encodings.others or None,
            bloom_filter_options=parquet.blooms(len(sample)),
            **parquet.options,
        )
        self._tail = 0  # bytes that are not in the file yet

    def fits(self, more: int) -> bool:
        return bool(self._stream.tell() + self._tail + more <= CEILING)

    def encode(self, rows: pa.Table) -> None:
        self._writer.write_table(projected(rows), row_group_size=len(rows))
        self._tail += self._layout.parquet.tail

    @property
    def full(self) -> bool:
        return bool(self._stream.tell() >= self._layout.parquet.target)

    def finish(self, partition: Partition) -> DataFileDescriptor:
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        metadata = self._writer.writer.metadata
        descriptor = self._layout.descriptor(self._path, partition, metadata, size)
        return DataFileDescriptor(descriptor, metadata.num_rows, size)


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def _size(rows: pa.Table) -> int:
    return int(rows.nbytes + COLUMN_BYTES * rows.num_columns)


def _owned(rows: pa.Table) -> tuple[pa.Table, int]:
    """The rows, and their size in memory. A few rows of a large buffer are copied, to release
    it."""
    size = _size(rows)
    if rows.get_total_buffer_size() > 2 * size:
        rows = rows.take(pa.array(np.arange(len(rows))))
    return rows, size


def _sortable(column: pa.Array) -> pa.Array:
    """Floats as integers in Iceberg's order: -NaN, -∞, …, -0, 0, …, ∞, NaN; uuids as bytes."""
    if not pa.types.is_floating(column.type):
        return column.storage if isinstance(column.type, pa.BaseExtensionType) else column
    wide = column.cast(pa.float64())
    bits = np.asarray(wide.fill_null(0.0)).view(np.int64)
    return pa.array(bits ^ ((bits >> 63) & (2**63 - 1)), mask=np.asarray(wide.is_null()))
