"""The changes of a batch to an upsert table → its last rows, and the keys they replace. Executors.

    rows and deletes of a task ─▶ cut by key into parcels ─▶ Spark's shuffle ─▶ last change of each
                                                                                key ─▶ files

A batch's change of a key is its last record: within a Kafka partition the one with the highest
offset. Offsets of different partitions cannot be compared, so where a key came from several, the
partition decides whose records of that key carry the newest timestamp (of the same, the last by
name). What wins becomes a row, or nothing where it is a delete. Every key of the batch goes into an
equality-delete file, which takes away the rows that older snapshots have of it, wherever they are:
it belongs to no partition of the table, so a key that moves to another leaves no twin behind.

Records go through the shuffle as Arrow's own bytes, many in one parcel: Spark moves them, and its
JVM never looks into them. But most topics are partitioned by key, and then each task has all
records of its keys and writes by itself. Whether it was so, the driver sees by `shared`: a batch of
which two tasks had a key in common is written again, and together.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from frazil.core.offsets import Partition
from frazil.ingest.records import Longs
from frazil.ingest.settle import TablePlan
from frazil.ingest.write import OpenFiles, TableShape, Writer, WrittenFile

#: Rows of one parcel: some tens of megabytes.
PARCEL_ROWS = 262_144
#: So many rows of a bucket are unpacked and written together.
TOGETHER_ROWS = 1_000_000

_ODD = np.uint64(0x9E3779B97F4A7C15)
_TURN = np.uint64(29)


@dataclass(slots=True)
class Changes:
    """Of one table, as one task gathers them."""

    rows: list[pa.Table] = field(default_factory=list)
    #: key columns, and those that say where the record is from
    gone: list[pa.Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.gone)


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of the changes of one bucket, or one task."""

    #: rows of each Kafka partition
    written: Mapping[Partition, int]
    files: tuple[WrittenFile, ...]
    deletes: tuple[WrittenFile, ...]
    keys: int
    seconds: float
    #: of these keys, where others may have them as well; each a number (see `shared`)
    hashes: Any = None

    def __add__(self, other: Applied) -> Applied:
        both = self.written.keys() | other.written.keys()
        return Applied(
            {p: self.written.get(p, 0) + other.written.get(p, 0) for p in both},
            self.files + other.files,
            self.deletes + other.deletes,
            self.keys + other.keys,
            self.seconds + other.seconds,
        )


# ── from the tasks that read to those that write ─────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Parcel:
    """Changes of one table whose keys fall into one part of a bucket."""

    table: str
    part: int
    gone: bool
    count: int
    rows: bytes


def parts_of(records: int, buckets: int) -> int:
    """Into how many parts all keys are cut, for a batch of so many records at most: as many as
    there are buckets, or times as many where a bucket is too much at once."""
    return buckets * -(-records // (buckets * TOGETHER_ROWS))


def parcels(
    plan: TablePlan, changes: Changes, buckets: int, parts: int
) -> Iterator[tuple[int, Parcel]]:
    """Each with the bucket that it is for."""
    for gone, tables in ((False, changes.rows), (True, changes.gone)):
        if not tables:
            continue
        rows = pa.concat_tables(tables)
        part = (_hashed(rows, plan.key) % np.uint64(parts)).astype(np.uint32)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=parts)).tolist()
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            for at in range(start, end, PARCEL_ROWS):
                some = rows.take(pa.array(order[at : min(at + PARCEL_ROWS, end)]))
                found = Parcel(plan.shape.name, number, gone, len(some), _packed(some))
                yield number % buckets, found


def unpacked(parcels: Iterable[Parcel]) -> Iterator[tuple[str, Changes]]:
    """The changes of each table, not too many at once, and all of a key together."""
    ordered = sorted(parcels, key=lambda each: (each.table, each.part))
    for table, mine in itertools.groupby(ordered, key=lambda each: each.table):
        changes, count = Changes(), 0
        for _, part in itertools.groupby(mine, key=lambda each: each.part):
            for each in part:
                with pa.ipc.open_stream(pa.py_buffer(each.rows)) as stream:
                    (changes.gone if each.gone else changes.rows).append(stream.read_all())
                count += each.count
            if count >= TOGETHER_ROWS:
                yield table, changes
                changes, count = Changes(), 0
        if changes:
            yield table, changes


def _packed(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue())


def _hashed(rows: pa.Table, key: Sequence[str]) -> Any:
    """A number of each key, the same on every machine: twins in two buckets would both be written.
    (Hashes of the libraries at hand may differ from one processor or version to the next.)"""
    found = np.zeros(len(rows), np.uint64)
    for name in key:
        column = rows.column(name).combine_chunks()
        found = (found ^ _number(column)) * _ODD
        found ^= found >> _TURN
    return found


def _number(column: Any) -> Any:
    if isinstance(column.type, pa.BaseExtensionType):  # uuid
        column = column.storage
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        column = column.cast(pa.large_binary())
    elif pa.types.is_large_string(kind):
        column = column.view(pa.large_binary())
    elif pa.types.is_temporal(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        if pa.types.is_temporal(kind):
            column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
        return np.asarray(column.cast(pa.int64())).view(np.uint64)
    elif pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.large_binary()) if not pa.types.is_decimal(kind) else (
            column.view(pa.binary(kind.bit_width // 8)).cast(pa.large_binary())
        )  # fmt: skip
    _, borders, data = column.buffers()
    ends = np.frombuffer(borders, np.int64)[column.offset : column.offset + len(column) + 1]
    first, last = int(ends[0]), int(ends[-1])
    content = np.frombuffer(data or b"", np.uint8)[first:last].astype(np.uint64)
    lengths = np.diff(ends)
    place = np.arange(last - first) - np.repeat(ends[:-1] - first, lengths)
    # One number per place, so that the order of the bytes counts; sums may wrap around.
    sums = np.concatenate([[np.uint64(0)], np.cumsum((content + np.uint64(1)) * _weights(place))])
    return sums[ends[1:] - first] - sums[ends[:-1] - first]


def _weights(place: Longs) -> Any:
    mixed = (place.astype(np.uint64) + np.uint64(1)) * _ODD
    return mixed ^ (mixed >> _TURN)


# ── the last change of each key ──────────────────────────────────────────────────────────────────


def apply(plan: TablePlan, changes: Changes, prefix: str, alone: bool = False) -> Applied:
    """Write what the changes leave: rows, and the keys that are replaced or deleted. `alone`: there
    may be others with changes of the same keys."""
    assert plan.deletes is not None
    began = time.perf_counter()
    rows = pa.concat_tables([plan.shape.arrow.empty_table(), *changes.rows])
    target = plan.of_deletes
    gone = pa.concat_tables([target.empty_table(), *changes.gone])
    last = _last(plan, pa.concat_tables([rows.select(target.names), gone]))
    kept = rows.take(pa.array(np.sort(last[last < len(rows)])))
    keys = pa.concat_tables([rows.select(plan.key), gone.select(plan.key)]).take(pa.array(last))
    files = OpenFiles()
    writer = Writer(plan.shape, prefix, files)
    writer.write(kept)
    written = writer.close()
    deleter = Writer(plan.deletes, prefix, files)
    deleter.write(keys)
    sources = kept.select([plan.metadata.topic, plan.metadata.partition])
    count = sources.group_by(sources.column_names).aggregate([([], "count_all")]).to_pylist()
    return Applied(
        {Partition(*(each[name] for name in sources.column_names)): each["count_all"]
         for each in count},
        tuple(written), tuple(deleter.close()), len(keys), time.perf_counter() - began,
        _hashed(keys, plan.key) if alone else None,
    )  # fmt: skip


def deletes_shape(shape: TableShape, key: Sequence[str], spec: str) -> TableShape:
    """Of equality deletes: the key columns alone, under a spec without partitions."""
    schema = json.loads(shape.schema)
    fields = [each for each in schema["fields"] if each["name"] in key]
    ids = tuple(each["id"] for each in fields)
    schema |= {"fields": fields, "identifier-field-ids": list(ids)}
    return replace(shape, schema=json.dumps(schema), spec=spec, sort_order="", equality=ids)


def _last(plan: TablePlan, changes: pa.Table) -> Longs:
    """Positions of the changes that count."""
    source = [plan.metadata.topic, plan.metadata.partition]
    key = list(plan.key)
    frame = pl.DataFrame(
        {
            **{f"key {n}": _comparable(changes.column(name)) for n, name in enumerate(key)},
            "source": _codes(changes.select(source)),
            "offset": changes.column(plan.metadata.offset).to_numpy(),
            "stamp": _stamps(changes, plan.metadata.timestamp),
            "at": np.arange(len(changes)),
        }
    )
    names = [f"key {n}" for n in range(len(key))]
    found = (
        frame.sort("offset", "at", maintain_order=True)
        .group_by([*names, "source"])
        .agg(pl.col("at").last(), pl.col("stamp").max())
    )
    if frame["source"].n_unique() > 1:
        found = found.sort("stamp", "source").unique(subset=names, keep="last")
    return np.asarray(found["at"].to_numpy(), np.int64)


def _comparable(column: Any) -> pl.Series:
    if isinstance(column.type, pa.BaseExtensionType):  # uuid
        column = pa.chunked_array(
            [each.storage for each in column.chunks], column.type.storage_type
        )
    return pl.Series(pl.from_arrow(column))


def _codes(sources: pa.Table) -> Any:
    """A number for each Kafka partition, in the order of their names."""
    topic, number = sources.columns
    found = pl.DataFrame({"t": pl.from_arrow(topic), "n": pl.from_arrow(number)})
    return found.select(pl.struct("t", "n").rank("dense"))["t"]


def _stamps(changes: pa.Table, name: str) -> Any:
    """Milliseconds are enough; a table without such a column has none."""
    if not name:
        return np.zeros(len(changes), np.int64)
    return pl.Series(pl.from_arrow(changes.column(name).cast(pa.int64()).fill_null(-1)))


# ── does each task have all records of its keys? ─────────────────────────────────────────────────


def shared(told: Sequence[Any]) -> tuple[int, int] | None:
    """Two that have a key in common, given the hashes of each one's keys. (Two keys of the same
    hash count as one: then a batch is brought together without need.)"""
    keys = np.concatenate(told)
    ordered = np.sort(keys)
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not len(same):
        return None
    ends = np.cumsum([len(each) for each in told])
    one, other = np.searchsorted(ends, np.flatnonzero(keys == ordered[same[0]])[:2], "right")
    return int(one), int(other)
