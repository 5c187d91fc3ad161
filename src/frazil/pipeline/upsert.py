"""The changes of a batch to an upsert table → its last rows, and the keys they replace. Executors.

    rows and deletes of a task ─▶ cut by key into parcels ─▶ Spark's shuffle ─▶ last change of each
                                                                                key ─▶ files

A batch's change of a key is its last record: within a Kafka partition the one with the highest
offset. Offsets of different partitions cannot be compared, so where a key came from several, the
partition decides whose records of that key carry the newest timestamp (of the same, the last by
name). Where a column of the table says which change is the newer one (`version_column`), the
highest of it counts first, and of what the table has already (`versions.highest`) no newer change
is undone: one that is older is left out, with its key. A delete without an order takes the highest
that its key had; so the order of a key never falls.

What wins becomes a row, or nothing where it is a delete. Every key of the batch goes into an
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
import pyarrow.compute as pc

from frazil.files.writer import DataFileDescriptor, OpenFiles, TableWriter, WriterSpec
from frazil.kafka.record_batch import Longs
from frazil.offsets import Partition
from frazil.pipeline.chunk import TablePlan
from frazil.pipeline.versions import column_of, comparable, highest

#: Rows of one parcel: some tens of megabytes.
PARCEL_ROWS = 262_144
#: So many rows of a bucket are unpacked and written together.
TOGETHER_ROWS = 1_000_000

_ODD = np.uint64(0x9E3779B97F4A7C15)
_TURN = np.uint64(29)


@dataclass(slots=True)
class KeyChanges:
    """Of one table, as one task gathers them."""

    rows: list[pa.Table] = field(default_factory=list)
    #: key columns, and those that say where the record is from
    gone: list[pa.Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.gone)


@dataclass(frozen=True, slots=True)
class UpsertResult:
    """What became of the changes of one bucket, or one task."""

    #: rows of each Kafka partition
    written: Mapping[Partition, int]
    files: tuple[DataFileDescriptor, ...]
    deletes: tuple[DataFileDescriptor, ...]
    keys: int
    seconds: float
    #: of these keys, where others may have them as well; each a number (see `shared`)
    hashes: Any = None
    #: what was deleted, for the table that remembers it
    noted: UpsertResult | None = None

    def __add__(self, other: UpsertResult) -> UpsertResult:
        both = self.written.keys() | other.written.keys()
        return UpsertResult(
            {p: self.written.get(p, 0) + other.written.get(p, 0) for p in both},
            self.files + other.files,
            self.deletes + other.deletes,
            self.keys + other.keys,
            self.seconds + other.seconds,
            noted=self.noted + other.noted
            if self.noted and other.noted
            else self.noted or other.noted,
        )


# ── from the tasks that read to those that write ─────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ShuffleBlock:
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


def shuffle_blocks(
    plan: TablePlan, changes: KeyChanges, buckets: int, parts: int
) -> Iterator[tuple[int, ShuffleBlock]]:
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
                found = ShuffleBlock(plan.shape.name, number, gone, len(some), _packed(some))
                yield number % buckets, found


def unpacked(parcels: Iterable[ShuffleBlock]) -> Iterator[tuple[str, KeyChanges]]:
    """The changes of each table, not too many at once, and all of a key together."""
    ordered = sorted(parcels, key=lambda each: (each.table, each.part))
    for table, mine in itertools.groupby(ordered, key=lambda each: each.table):
        changes, count = KeyChanges(), 0
        for _, part in itertools.groupby(mine, key=lambda each: each.part):
            for each in part:
                with pa.ipc.open_stream(pa.py_buffer(each.rows)) as stream:
                    (changes.gone if each.gone else changes.rows).append(stream.read_all())
                count += each.count
            if count >= TOGETHER_ROWS:
                yield table, changes
                changes, count = KeyChanges(), 0
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
        column = (
            column.cast(pa.large_binary())
            if not pa.types.is_decimal(kind)
            else (column.view(pa.binary(kind.bit_width // 8)).cast(pa.large_binary()))
        )
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


def apply(plan: TablePlan, changes: KeyChanges, prefix: str, alone: bool = False) -> UpsertResult:
    """Write what the changes leave: rows, and the keys that are replaced or deleted. `alone`: there
    may be others with changes of the same keys."""
    assert plan.deletes is not None
    began = time.perf_counter()
    rows = pa.concat_tables([plan.shape.arrow.empty_table(), *changes.rows])
    target = plan.of_deletes
    gone = pa.concat_tables([target.empty_table(), *changes.gone])
    every = pa.concat_tables([_origins(plan, rows), gone])
    files = OpenFiles()
    noted = None
    if plan.order:
        last, orders = _newest(plan, every)
        noted = _noted(plan, every, last, orders, last >= len(rows), prefix, files)
        last = last[_above(plan, every.take(pa.array(last)))]
    else:
        last = _last(plan, every)
    kept = rows.take(pa.array(np.sort(last[last < len(rows)])))
    keys = every.select(plan.key).take(pa.array(last))
    writer = TableWriter(plan.shape, prefix, files)
    writer.write(kept)
    written = writer.close()
    deleter = TableWriter(plan.deletes, prefix, files)
    deleter.write(keys)
    hashes = None
    if alone:  # also of keys of which nothing is applied: others may have the newer change
        hashes = np.unique(_hashed(every, plan.key)) if plan.order else _hashed(keys, plan.key)
    return UpsertResult(
        _counted(plan, kept),
        tuple(written),
        tuple(deleter.close()),
        len(keys),
        time.perf_counter() - began,
        hashes,
        noted,
    )


def _counted(plan: TablePlan, rows: pa.Table) -> dict[Partition, int]:
    """How many there are of each Kafka partition."""
    sources = rows.select([plan.metadata.topic, plan.metadata.partition])
    count = sources.group_by(sources.column_names).aggregate([([], "count_all")]).to_pylist()
    return {
        Partition(*(each[name] for name in sources.column_names)): each["count_all"]
        for each in count
    }


def _origins(plan: TablePlan, rows: pa.Table) -> pa.Table:
    """The columns of rows that deletes have, too."""
    target = plan.of_deletes
    columns = [
        column_of(rows, name) if name == plan.order else rows.column(name) for name in target.names
    ]
    return pa.table(columns, schema=target)


def deletes_shape(shape: WriterSpec, key: Sequence[str], spec: str) -> WriterSpec:
    """Of equality deletes: the key columns alone, under a spec without partitions."""
    schema = json.loads(shape.schema)
    fields = [each for each in schema["fields"] if each["name"] in key]
    ids = tuple(each["id"] for each in fields)
    schema |= {"fields": fields, "identifier-field-ids": list(ids)}
    return replace(shape, schema=json.dumps(schema), spec=spec, sort_order="", equality=ids)


def _last(plan: TablePlan, changes: pa.Table) -> Longs:
    """Positions of the changes that count."""
    frame, names = _comparables(plan, changes)
    found = (
        frame.sort("offset", "at", maintain_order=True)
        .group_by([*names, "source"])
        .agg(pl.col("at").last(), pl.col("stamp").max())
    )
    if frame["source"].n_unique() > 1:
        found = found.sort("stamp", "source").unique(subset=names, keep="last")
    return np.asarray(found["at"].to_numpy(), np.int64)


def _comparables(plan: TablePlan, changes: pa.Table) -> tuple[pl.DataFrame, list[str]]:
    """What says which change of a key is its last, and the names of its key columns."""
    source = [plan.metadata.topic, plan.metadata.partition]
    keys = {f"key {n}": comparable(changes.column(name)) for n, name in enumerate(plan.key)}
    frame = pl.DataFrame(
        {
            **keys,
            "source": _codes(changes.select(source)),
            "offset": changes.column(plan.metadata.offset).to_numpy(),
            "stamp": _stamps(changes, plan.metadata.timestamp),
            "at": np.arange(len(changes)),
        }
    )
    return frame, list(keys)


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


# ── the newest change of each key, by a column ───────────────────────────────────────────────────


def _newest(plan: TablePlan, changes: pa.Table) -> tuple[Longs, pl.Series]:
    """Positions of the changes that count, and the order that each key has with them."""
    frame, names = _comparables(plan, changes)
    frame = frame.with_columns(order=comparable(changes.column(plan.order)))
    known = highest(plan.known, frame.select(names).unique())
    known = known.rename({"order": "known"}).cast({"known": frame.schema["order"]})
    frame = frame.join(known, on=names, how="left")
    as_they_come = ["offset", "at"]
    if frame["source"].n_unique() > 1:
        frame = frame.with_columns(pl.col("stamp").max().over([*names, "source"]))
        as_they_come = ["stamp", "source", *as_they_come]
    frame = frame.sort(as_they_come)
    if frame["order"].null_count():
        frame = _ordered(frame, names)
    found = (
        frame.filter(pl.col("known").is_null() | (pl.col("order") >= pl.col("known")))
        .sort("order", nulls_last=False, maintain_order=True)
        .group_by(names)
        .agg(pl.col("at", "order").last())
    )
    return np.asarray(found["at"].to_numpy(), np.int64), found["order"]


def _ordered(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Changes without an order (deletes) take the highest that their key had before them; none, if
    nothing is known of the key. They come as they follow each other."""
    ranks = pl.concat([frame["order"], frame["known"]]).rank("dense")
    values = pl.DataFrame({"rank": ranks, "order": pl.concat([frame["order"], frame["known"]])})
    highest_yet = pl.col("rank").cum_max().forward_fill().over(names)
    ranked = frame.select(*names, known=ranks[len(frame) :], rank=ranks[: len(frame)])
    return (
        frame.with_columns(
            rank=ranked.select(
                pl.coalesce("rank", pl.max_horizontal(highest_yet, "known"))
            ).to_series()
        )
        .drop("order")
        .join(values.unique("rank").drop_nulls(), on="rank", how="left", maintain_order="left")
    )


def _above(plan: TablePlan, changes: pa.Table) -> Any:
    """Which of these changes the table has not yet."""
    found = np.ones(len(changes), bool)
    offsets = changes.column(plan.metadata.offset).to_numpy()
    for (topic, number), floor in plan.floor.items():
        here = pc.and_(
            pc.equal(changes.column(plan.metadata.topic), topic),
            pc.equal(changes.column(plan.metadata.partition), number),
        )
        found &= ~(here.to_numpy() & (offsets < floor))
    return found


def _noted(
    plan: TablePlan,
    changes: pa.Table,
    last: Longs,
    orders: pl.Series,
    deleted: Any,
    prefix: str,
    files: OpenFiles,
) -> UpsertResult:
    """Write down which keys were deleted, and with what order."""
    assert plan.memory is not None
    shape = plan.memory.shape
    deleted = deleted & orders.is_not_null().to_numpy()
    gone = changes.take(pa.array(last[deleted]))
    order = orders.filter(pl.Series(deleted)).to_arrow()
    names = {remembered_order(plan.order): order}
    columns = [names.get(each.name, each.name) for each in shape.arrow]
    notes = pa.table(
        [gone.column(each) if isinstance(each, str) else each for each in columns],
        names=shape.arrow.names,
    ).cast(shape.arrow)
    notes = notes.filter(pa.array(_above(plan.memory, notes)))
    writer = TableWriter(shape, prefix, files)
    writer.write(notes)
    return UpsertResult(_counted(plan.memory, notes), tuple(writer.close()), (), 0, 0.0)


def remembered_columns(plan: TablePlan) -> pa.Schema:
    """Of the table that remembers what was deleted; the columns of origin come behind them."""
    order = plan.order_field.with_name(remembered_order(plan.order))
    return pa.schema([*plan.key_columns, *([order] if plan.own_order else [])])


def remembered_order(path: str) -> str:
    return path.replace(".", "_")


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
