"""Reduces the changes of a batch to an upsert table to the last change of each key, and writes data
files and equality-delete files. Runs on executors.

    rows and deletes of a task ─▶ cut by key into blocks ─▶ Spark's shuffle ─▶ last change of each
                                                                               key ─▶ files

The last change of a key is the record with the highest offset of its Kafka partition. Offsets of
different partitions cannot be compared: if a key occurs in several, the partition wins whose
records of that key have the newest timestamp (with equal timestamps, the last partition by name).
Rows of a query may carry no offsets, or several rows the same. Their changes have no order, and are
refused where a key has two of them in one batch (`refuse_ties`).
With a `version_column` the highest version wins first, and a change older than the version in the
table (`versions.highest`) is not applied. A delete without a version takes the highest version that
its key had, so the version of a key never falls.

The last change becomes a row, or no row if it is a delete. Every key of the batch goes into an
equality-delete file, which removes its rows of older snapshots from all partitions of the table:
the file belongs to no partition, so a key that moves to another partition leaves no duplicate.

Records pass the shuffle as Arrow IPC, many in one block; the JVM does not deserialize them. Most
topics are partitioned by key. Then each task has all records of its keys, and writes them without a
shuffle. The driver verifies this with `shared`: if two tasks had a key in common, the batch is
written again, with the shuffle.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.lazy_polars import pl
from frazil.errors import SchemaMismatch
from frazil.files.writer import DataFileDescriptor, OpenFiles, TableWriter, WriterSpec
from frazil.kafka.record_batch import Longs
from frazil.offsets import BATCHES, Partition
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.versions import column_of, comparable, highest

#: Rows of one shuffle block: some tens of megabytes.
PARCEL_ROWS = 262_144
#: Rows of a bucket that are unpacked and written together.
TOGETHER_ROWS = 1_000_000

_ODD = np.uint64(0x9E3779B97F4A7C15)
_TURN = np.uint64(29)


@dataclass(slots=True)
class KeyChanges:
    """The changes of one table, as one task collects them."""

    rows: list[pa.Table] = field(default_factory=list)
    #: deletes: key columns and metadata columns
    gone: list[pa.Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.gone)


@dataclass(frozen=True, slots=True)
class UpsertResult:
    """The files and counts for the changes of one bucket or one task."""

    #: rows of each Kafka partition
    written: Mapping[Partition, int]
    files: tuple[DataFileDescriptor, ...]
    deletes: tuple[DataFileDescriptor, ...]
    keys: int
    seconds: float
    #: hashes of the keys, if other tasks may have changes of the same keys (see `shared`)
    hashes: Any = None
    #: the rows written to the `_deleted` table
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


# ── shuffle, from tasks that read to tasks that write ────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ShuffleBlock:
    """Changes of one table with keys in one part of a bucket."""

    table: str
    part: int
    gone: bool
    count: int
    rows: bytes


def _parts_of(records: int, buckets: int) -> int:
    """The number of parts into which the keys of a batch are cut, for at most `records` records: a
    multiple of the number of buckets, so that a part has at most about `TOGETHER_ROWS` rows."""
    return buckets * -(-records // (buckets * TOGETHER_ROWS))


def shuffle_blocks(
    plan: TablePlan, changes: KeyChanges, buckets: int, most: int
) -> Iterator[tuple[int, ShuffleBlock]]:
    """The changes as shuffle blocks, each with its bucket. `most`: records of the whole batch."""
    parts = _parts_of(most, buckets)
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
                block = ShuffleBlock(plan.shape.name, number, gone, len(some), _packed(some))
                yield number % buckets, block


def unpacked(blocks: Iterable[ShuffleBlock]) -> Iterator[tuple[str, KeyChanges]]:
    """The changes of each table in portions of limited size; all changes of a key come together."""
    ordered = sorted(blocks, key=lambda block: (block.table, block.part))
    for table, group in itertools.groupby(ordered, key=lambda block: block.table):
        changes, count = KeyChanges(), 0
        for _, part in itertools.groupby(group, key=lambda block: block.part):
            for block in part:
                with pa.ipc.open_stream(pa.py_buffer(block.rows)) as stream:
                    (changes.gone if block.gone else changes.rows).append(stream.read_all())
                count += block.count
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
    """A hash of each key, the same on every machine: a key in two buckets would be written twice.
    (Hashes of Arrow, polars or Python may differ between processors or versions.)"""
    hashes = np.zeros(len(rows), np.uint64)
    for name in key:
        column = rows.column(name).combine_chunks()
        hashes = (hashes ^ _number(column)) * _ODD
        hashes ^= hashes >> _TURN
    return hashes


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
    # One weight per byte position, so that the order of the bytes counts; sums may wrap around.
    sums = np.concatenate([[np.uint64(0)], np.cumsum((content + np.uint64(1)) * _weights(place))])
    return sums[ends[1:] - first] - sums[ends[:-1] - first]


def _weights(place: Longs) -> Any:
    mixed = (place.astype(np.uint64) + np.uint64(1)) * _ODD
    return mixed ^ (mixed >> _TURN)


# ── the last change of each key ──────────────────────────────────────────────────────────────────


def apply(plan: TablePlan, changes: KeyChanges, prefix: str, alone: bool = False) -> UpsertResult:
    """Write the last changes: rows, and equality deletes of all changed keys. `alone`: without a
    shuffle; other tasks may have changes of the same keys, so the result contains key hashes."""
    assert plan.deletes is not None
    began = time.perf_counter()
    rows, every = _together(plan, changes)
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
    if alone:  # includes keys with no applied change: another task may have a newer one
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


def _together(plan: TablePlan, changes: KeyChanges) -> tuple[pa.Table, pa.Table]:
    """The rows; and all changes, rows first, in the columns of deletes."""
    rows = pa.concat_tables([plan.shape.arrow.empty_table(), *changes.rows])
    gone = pa.concat_tables([plan.of_deletes.empty_table(), *changes.gone])
    return rows, pa.concat_tables([_origins(plan, rows), gone])


def _counted(plan: TablePlan, rows: pa.Table) -> dict[Partition, int]:
    """The number of rows of each Kafka partition; without metadata columns of the whole batch."""
    if not plan.metadata.offset:
        return {BATCHES: len(rows)}
    sources = rows.select([plan.metadata.topic, plan.metadata.partition])
    counts = sources.group_by(sources.column_names).aggregate([([], "count_all")]).to_pylist()
    return {
        Partition(*(row[name] for name in sources.column_names)): row["count_all"] for row in counts
    }


def _origins(plan: TablePlan, rows: pa.Table) -> pa.Table:
    """Rows reduced to the columns of deletes."""
    target = plan.of_deletes
    columns = [
        column_of(rows, name) if name == plan.order else rows.column(name) for name in target.names
    ]
    return pa.table(columns, schema=target)


def deletes_shape(shape: WriterSpec, key: Sequence[str], spec: str) -> WriterSpec:
    """The writer spec of equality deletes: key columns only, an unpartitioned spec."""
    schema = json.loads(shape.schema)
    fields = [column for column in schema["fields"] if column["name"] in key]
    ids = tuple(column["id"] for column in fields)
    schema |= {"fields": fields, "identifier-field-ids": list(ids)}
    return replace(shape, schema=json.dumps(schema), spec=spec, sort_order="", equality=ids)


def _last(plan: TablePlan, changes: pa.Table) -> Longs:
    """Positions of the last change of each key."""
    frame, names = _comparables(plan, changes)
    last = (
        frame.sort("offset", "at", maintain_order=True)
        .group_by([*names, "source"])
        .agg(pl.col("at").last(), pl.col("stamp").max())
    )
    if frame["source"].n_unique() > 1:
        last = last.sort("stamp", "source").unique(subset=names, keep="last")
    return np.asarray(last["at"].to_numpy(), np.int64)


def _comparables(plan: TablePlan, changes: pa.Table) -> tuple[pl.DataFrame, list[str]]:
    """The columns that order the changes of a key, and the names of its key columns."""
    keys = {f"key {n}": comparable(changes.column(name)) for n, name in enumerate(plan.key)}
    nothing = np.zeros(len(changes), np.int64)
    source, offset = nothing, nothing
    if plan.metadata.offset:
        source = _codes(changes.select([plan.metadata.topic, plan.metadata.partition]))
        offset = changes.column(plan.metadata.offset).to_numpy()
    frame = pl.DataFrame(
        {
            **keys,
            "source": source,
            "offset": offset,
            "stamp": _stamps(changes, plan.metadata.timestamp),
            "at": np.arange(len(changes)),
        }
    )
    return frame, list(keys)


def refuse_ties(plan: TablePlan, changes: KeyChanges) -> None:
    """Raises if a key has changes without an order: which of them is the last would be a guess."""
    _, every = _together(plan, changes)
    frame, names = _comparables(plan, every)
    fact = "the same offset" if plan.metadata.offset else "no offset of Kafka"
    if plan.order:
        frame = frame.with_columns(order=comparable(every.column(plan.order)))
        names, fact = [*names, "order"], f"the same {plan.order} and {fact}"
    tied = int(frame.select(*names, "source", "offset").is_duplicated().sum())
    if not tied and not plan.metadata.timestamp:
        tied = int(frame.select(*names, "source").unique().select(names).is_duplicated().sum())
        fact = "offsets of several Kafka partitions and no timestamp"
    if tied:
        raise SchemaMismatch(
            f"cannot write to table {plan.shape.name}: {tied} rows of a batch share their key "
            f"({', '.join(plan.key)}) with another, and have {fact}, so none of them is the last",
            hint="keep _topic, _topic_partition, _offset and _timestamp of the record in the rows, "
            "which order them; or name a version_column; or aggregate to one row for each key",
        )


def _codes(sources: pa.Table) -> Any:
    """A number for the Kafka partition of each row, ascending by topic and partition."""
    topic, number = sources.columns
    frame = pl.DataFrame({"t": pl.from_arrow(topic), "n": pl.from_arrow(number)})
    return frame.select(pl.struct("t", "n").rank("dense"))["t"]


def _stamps(changes: pa.Table, name: str) -> Any:
    """The timestamps of the records; zeros if the table has no timestamp column."""
    if not name:
        return np.zeros(len(changes), np.int64)
    return pl.Series(pl.from_arrow(changes.column(name).cast(pa.int64()).fill_null(-1)))


# ── the newest change of each key, by version ────────────────────────────────────────────────────


def _newest(plan: TablePlan, changes: pa.Table) -> tuple[Longs, pl.Series]:
    """Positions of the newest change of each key, and the resulting version of each key. Keys whose
    version in the table is newer are left out."""
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
    newest = (
        frame.filter(pl.col("known").is_null() | (pl.col("order") >= pl.col("known")))
        .sort("order", nulls_last=False, maintain_order=True)
        .group_by(names)
        .agg(pl.col("at", "order").last())
    )
    return np.asarray(newest["at"].to_numpy(), np.int64), newest["order"]


def _ordered(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Give changes without a version (deletes) the highest version that their key had before them;
    null if it had none. The changes of `frame` are in order."""
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
    """Mask of the changes that the table does not contain yet."""
    above = np.ones(len(changes), bool)
    if not plan.floor:
        return above
    offsets = changes.column(plan.metadata.offset).to_numpy()
    for (topic, number), floor in plan.floor.items():
        mask = pc.and_(
            pc.equal(changes.column(plan.metadata.topic), topic),
            pc.equal(changes.column(plan.metadata.partition), number),
        )
        above &= ~(mask.to_numpy() & (offsets < floor))
    return above


def _noted(
    plan: TablePlan,
    changes: pa.Table,
    last: Longs,
    orders: pl.Series,
    deleted: Any,
    prefix: str,
    files: OpenFiles,
) -> UpsertResult:
    """Write the deleted keys and their versions to the `_deleted` table."""
    assert plan.deleted_keys is not None
    shape = plan.deleted_keys.shape
    deleted = deleted & orders.is_not_null().to_numpy()
    gone = changes.take(pa.array(last[deleted]))
    order = orders.filter(pl.Series(deleted)).to_arrow()
    names = {deleted_keys_version(plan.order): order}
    columns = [names.get(column.name, column.name) for column in shape.arrow]
    notes = pa.table(
        [gone.column(column) if isinstance(column, str) else column for column in columns],
        names=shape.arrow.names,
    ).cast(shape.arrow)
    notes = notes.filter(pa.array(_above(plan.deleted_keys, notes)))
    writer = TableWriter(shape, prefix, files)
    writer.write(notes)
    return UpsertResult(_counted(plan.deleted_keys, notes), tuple(writer.close()), (), 0, 0.0)


def deleted_keys_columns(plan: TablePlan) -> pa.Schema:
    """The columns of the `_deleted` table, without metadata columns, which follow them."""
    order = plan.order_field.with_name(deleted_keys_version(plan.order))
    return pa.schema([*plan.key_columns, *([order] if plan.own_order else [])])


def deleted_keys_version(path: str) -> str:
    return path.replace(".", "_")


# ── check that each task had all records of its keys ─────────────────────────────────────────────


def shared(hashes: Sequence[Any]) -> tuple[int, int] | None:
    """Two tasks with a key in common, given the hashes of each task's keys; None: no such tasks.
    (A hash collision counts as a common key: the batch is shuffled without need.)"""
    keys = np.concatenate(hashes)
    ordered = np.sort(keys)
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not len(same):
        return None
    ends = np.cumsum([len(part) for part in hashes])
    one, other = np.searchsorted(ends, np.flatnonzero(keys == ordered[same[0]])[:2], "right")
    return int(one), int(other)
