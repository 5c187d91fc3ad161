"""Data files with deleted rows in; files without them, or the positions of those rows, out.

    keys deleted ─▶ the newest delete of each key ─┐
    data files ─▶ their keys ──────────────────────┴▶ which rows are gone ─▶ live rows ─▶ new files
                                                                          └▶ or their positions

A row is gone if its key was deleted by a later commit than the one that added it: equality deletes
apply to lower sequence numbers only. A file that is small, or of which much is gone, is replaced by
a new file with its live rows; for any other file the positions of the gone rows are returned, so
that a large file is not rewritten for a few rows. `rewrite` runs on executors; `mask` writes
positions in Iceberg's form: a Parquet file (format version 2) or a deletion vector (3).
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.table.locations import load_location_provider
from pyiceberg.types import LongType, NestedField
from pyroaring import BitMap64

from frazil.errors import AccountingError, SchemaMismatch
from frazil.files.parquet import open_data_file, whole
from frazil.files.writer import DataFileDescriptor, TableWriter, WriterSpec, file_io

Positions = np.ndarray[Any, np.dtype[np.uint64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

#: Iceberg's row lineage: the row's id, kept in every rewrite, and the commit that changed it last.
ROW_ID, UPDATED = 2147483540, 2147483539
_LINEAGE = [
    NestedField(ROW_ID, "_row_id", LongType(), required=False),
    NestedField(UPDATED, "_last_updated_sequence_number", LongType(), required=False),
]
_PATH, _POSITION = 2147483546, 2147483545  # columns of a file of positions
_VECTOR = bytes.fromhex("d1d33964")  # a deletion vector
_PUFFIN = b"PFA1"


@dataclass(frozen=True, slots=True)
class EqualityDelete:
    """A file of keys whose rows are deleted, in all files of earlier commits."""

    path: str
    sequence: int
    keys: tuple[int, ...]  # ids of its columns


@dataclass(frozen=True, slots=True)
class AppliedDeletes:
    """A file of deleted positions; `at`: offset and length of a deletion vector in it."""

    path: str
    at: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A data file, and its metadata."""

    path: str
    rows: int
    bytes: int
    #: data sequence number: the commit that added its rows
    sequence: int
    #: too small to keep as it is
    small: bool
    hiding: tuple[AppliedDeletes, ...] = ()
    #: the id of its first row; None: its rows have no ids
    first_row: int | None = None


@dataclass(frozen=True, slots=True)
class RewriteJob:
    shape: WriterSpec
    prefix: str
    sources: tuple[SourceFile, ...]
    deletes: tuple[EqualityDelete, ...]
    #: a file with this share of gone rows is rewritten, up to `bytes` of such files
    share: float
    bytes: int


@dataclass(frozen=True, slots=True)
class RewriteResult:
    #: new files, with the live rows of the sources that are `replaced`
    files: tuple[DataFileDescriptor, ...]
    replaced: tuple[str, ...]
    #: all gone positions of the other sources; empty if all of them are hidden already
    gone: dict[str, Positions]


def rewrite(job: RewriteJob) -> RewriteResult:
    io = file_io(job.shape.location, job.shape.io)
    schema = Schema.model_validate_json(job.shape.schema)
    deleted = _deleted(io, schema, job)
    shape = job.shape
    if any(source.first_row is not None for source in job.sources):
        schema = Schema(*schema.fields, *_LINEAGE, schema_id=schema.schema_id)
        shape = replace(shape, schema=schema.model_dump_json())
    writer = TableWriter(shape, job.prefix)
    replaced: list[str] = []
    gone: dict[str, Positions] = {}
    room, live = job.bytes, 0
    for source, new in zip(job.sources, deleted, strict=True):
        hidden = _hidden(io, source)
        dead = new | hidden
        count = int(dead.sum())
        if not source.small:
            if count < job.share * source.rows or room <= 0:
                more = dead if (new & ~hidden).any() else np.empty(0)
                gone[source.path] = np.flatnonzero(more).astype(np.uint64)
                continue
            room -= source.bytes
        live += source.rows - count
        replaced.append(source.path)
        for rows in _live(io, schema, source, dead):
            writer.write(rows)
    files = writer.close()
    if (written := sum(file.rows for file in files)) != live:
        raise AccountingError(
            f"cannot compact table {shape.name}: expected {live} live rows, found {written}"
        )
    return RewriteResult(tuple(files), tuple(replaced), gone)


# ── which rows are gone ──────────────────────────────────────────────────────────────────────────


def _deleted(io: FileIO, schema: Schema, job: RewriteJob) -> list[Mask]:
    """Per source, for each row: was its key deleted later?"""
    masks = [np.zeros(source.rows, np.bool_) for source in job.sources]
    for keys in dict.fromkeys(file.keys for file in job.deletes):
        wanted = _keys(schema, keys, job.shape.name)
        newest = (
            pl.concat(
                _frame(whole(io, file.path, wanted), deleted=file.sequence)
                for file in job.deletes
                if file.keys == keys
            )
            .group_by(pl.exclude("deleted"))
            .max()
        )
        rows = pl.concat(
            _frame(whole(io, source.path, wanted, source.rows), since=source.sequence)
            for source in job.sources
        )
        joined = rows.join(
            newest, on=rows.columns[:-1], how="left", nulls_equal=True, maintain_order="left"
        )
        later = joined.select((pl.col("deleted") > pl.col("since")).fill_null(False))
        ends = np.cumsum([source.rows for source in job.sources])[:-1]
        for mask, more in zip(masks, np.split(later.to_series().to_numpy(), ends), strict=True):
            mask |= more
    return masks


def _keys(schema: Schema, ids: Sequence[int], table: str) -> Schema:
    top = {field.field_id: field for field in schema.fields}
    if missing := set(ids) - set(top):
        raise SchemaMismatch(
            f"cannot compact table {table}: rows were deleted by column {min(missing)}, "
            "which is none of its own, or inside another"
        )
    return Schema(*(top[field_id] for field_id in ids))


def _frame(rows: pa.Table, **beside: int) -> pl.DataFrame:
    """The columns by number, for polars, which supports neither uuids nor fixed-size binaries."""
    columns = {}
    for number, column in enumerate(rows.columns):
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.cast(column.type.storage_type)
        fixed = pa.types.is_fixed_size_binary(column.type)
        columns[str(number)] = column.cast(pa.large_binary()) if fixed else column
    for name, value in beside.items():
        columns[name] = pa.repeat(pa.scalar(value, pa.int64()), len(rows))
    frame = pl.from_arrow(pa.table(columns))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _hidden(io: FileIO, source: SourceFile) -> Mask:
    """For each row: is it hidden by position?"""
    hidden = np.zeros(source.rows, np.bool_)
    for hiding in source.hiding:
        with io.new_input(hiding.path).open() as stream:
            if hiding.at is None:
                rows = pq.read_table(stream, columns=["file_path", "pos"])
                matching = rows.filter(pc.equal(rows["file_path"], source.path))
                hidden[matching["pos"].to_numpy()] = True
                continue
            stream.seek(hiding.at[0])
            blob = stream.read(hiding.at[1])
        if blob[4:8] != _VECTOR or zlib.crc32(blob[4:-4]) != int.from_bytes(blob[-4:], "big"):
            raise SchemaMismatch(
                f"cannot read {hiding.path}: expected a deletion vector of {source.path}"
            )
        hidden[np.array(BitMap64.deserialize(blob[8:-4]).to_array(), np.int64)] = True
    return hidden


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _live(io: FileIO, schema: Schema, source: SourceFile, dead: Mask) -> Iterator[pa.Table]:
    """The rows that are not gone, a row group at a time, each with its original row id."""
    at = 0
    with open_data_file(io, source.path, source.rows) as file:
        for group, count in enumerate(file.groups):
            kept = ~dead[at : at + count]
            if kept.any():
                rows = file.read(schema, group)
                if schema.fields[-1].field_id == UPDATED:
                    rows = _numbered(rows, source, at)
                yield rows if kept.all() else rows.filter(pa.array(kept))
            at += count


def _numbered(rows: pa.Table, source: SourceFile, at: int) -> pa.Table:
    if source.first_row is None:
        return rows
    first = source.first_row + at
    values = pa.array(np.arange(first, first + len(rows), dtype=np.int64)), source.sequence
    for place, value in zip((-2, -1), values, strict=True):
        column = rows.num_columns + place
        known = pc.coalesce(rows.column(column), value)
        rows = rows.set_column(column, rows.schema.field(column), known)
    return rows


# ── positions ────────────────────────────────────────────────────────────────────────────────────


def mask(shape: WriterSpec, prefix: str, version: int, descriptor: str, gone: Positions) -> str:
    """Writes a delete file for these positions of a data file, described by Iceberg's JSON; returns
    the descriptor of the new file."""
    data = json.loads(descriptor)
    kind = "puffin" if version >= 3 else "parquet"
    locations = load_location_provider(shape.location, dict(shape.properties))
    path = locations.new_data_location(f"{prefix}-{uuid.uuid4()}.{kind}")
    with file_io(shape.location, shape.io).new_output(path).create(overwrite=True) as stream:
        if version >= 3:
            more = _vector(stream, data["file-path"], gone)
        else:
            more = _positions(stream, data["file-path"], gone)
        size = stream.tell()
    return json.dumps(
        {
            "spec-id": data["spec-id"],
            "content": "position-deletes",
            "file-path": path,
            "file-format": kind,
            "partition": data.get("partition", []),
            "file-size-in-bytes": size,
            "record-count": len(gone),
            "referenced-data-file": data["file-path"],
            **more,
        }
    )


def _vector(stream: Any, path: str, gone: Positions) -> dict[str, Any]:
    """A Puffin file with one deletion vector."""
    bitmap = BitMap64(gone)
    bitmap.run_optimize()
    vector = _VECTOR + bitmap.serialize()
    blob = len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
    entry = {
        "type": "deletion-vector-v1",
        "fields": [_POSITION],
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": len(_PUFFIN),
        "length": len(blob),
        "properties": {"referenced-data-file": path, "cardinality": str(len(gone))},
    }
    footer = json.dumps({"blobs": [entry], "properties": {"created-by": "frazil"}}).encode()
    ends = len(footer).to_bytes(4, "little") + bytes(4) + _PUFFIN
    stream.write(_PUFFIN + blob + _PUFFIN + footer + ends)
    return {"content-offset": len(_PUFFIN), "content-size-in-bytes": len(blob)}


def _positions(stream: Any, path: str, gone: Positions) -> dict[str, Any]:
    """A Parquet file with the path and each position, in their order."""
    fields = [("file_path", pa.string(), _PATH), ("pos", pa.int64(), _POSITION)]
    columns = [
        pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(number)})
        for name, kind, number in fields
    ]
    positions = gone.astype(np.int64)
    rows = [pa.repeat(path, len(gone)), pa.array(positions)]
    table = pa.Table.from_arrays(rows, schema=pa.schema(columns))
    pq.write_table(table, stream, compression="zstd", store_schema=False)

    def bounds(position: int) -> dict[str, Any]:
        number = position.to_bytes(8, "little")
        return {"keys": [_PATH, _POSITION], "values": [path.encode().hex(), number.hex()]}

    return {
        "lower-bounds": bounds(int(positions[0])),
        "upper-bounds": bounds(int(positions[-1])),
    }
