"""Between our columns and the rows of Spark's DataFrames. Runs on executors.

`read_all`: offset ranges in, decoded records out as Arrow batches, in types that Spark has. The
counts of each range are reported beside the rows (`report`), because a later filter leaves no trace
in them. `write_all`: the rows of any DataFrame in, data files out, with the offsets they carry.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.cast import project
from frazil.errors import AccountingError, Unwritable
from frazil.files.writer import DataFileDescriptor, TableWriter, WriterSpec
from frazil.formats.decode_result import UndecodableRecord
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.kafka.fetch import fetch
from frazil.kafka.record_batch import Longs
from frazil.offsets import Partition, Range
from frazil.pipeline.isolation import StepFailed, ask_store, noticing
from frazil.pipeline.projection import (
    MetadataColumns,
    fitted,
    project_rows,
    too_late,
    why_too_late,
)
from frazil.pipeline.sandbox import UNREAD
from frazil.pipeline.task import Stopwatch, in_worker, undecodable, watermark

#: Spark's batches are small: rows are collected up to these limits and then written.
GATHER_ROWS, GATHER_BYTES = 65_536, 32 * 1024**2
#: Widest span of offsets of one partition that a task reports, as bits.
WIDEST_SPAN = 2**27
#: Output columns of `write_all`, for Spark and for Arrow.
OUTCOMES = "outcome string"
_OUTCOMES = pa.schema([("outcome", pa.string())])

#: (topic, partition, start, end) → records delivered, offsets that held none, and for each attempt
#: the leader epoch in which the last offset of the range was read (-1: not known)
ReadCounts = dict[tuple[str, int, int, int], tuple[int, int, tuple[int, ...]]]


class ReadCountsAccumulator:
    """Adds up the reports of tasks: a range reported again, by a second attempt, counts once.
    Leader epochs of all attempts are kept, because they may differ."""

    def zero(self, _: ReadCounts) -> ReadCounts:
        return {}

    def addInPlace(self, total: ReadCounts, more: ReadCounts) -> ReadCounts:
        for key, (delivered, absent, epochs) in more.items():
            earlier = total[key][2] if key in total else ()
            total[key] = delivered, absent, earlier + epochs
        return total


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Shared by all tasks of a read. Travels pickled; its secrets are never shown."""

    kafka: Mapping[str, str] = field(repr=False)
    format: RecordFormat = field(repr=False)
    columns: pa.Schema  # of the records, as they are decoded
    metadata: MetadataColumns
    patience: float
    client: bool = False

    @property
    def target(self) -> pa.Schema:
        return presented(pa.schema([*self.columns, *self.metadata.fields]))


def presented(schema: pa.Schema) -> pa.Schema:
    """The same columns in types that Spark has."""
    return pa.schema([_field(column, top=True) for column in schema])


def _field(field: pa.Field, top: bool = False) -> pa.Field:
    return pa.field(field.name, _type(field.type, top), field.nullable)


def _type(kind: pa.DataType, top: bool = False) -> pa.DataType:
    if isinstance(kind, pa.UuidType):
        return pa.large_string() if top else pa.large_binary()
    if pa.types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if pa.types.is_time(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ns"):
        return pa.int64()  # microseconds of the day; nanoseconds since 1970
    if pa.types.is_struct(kind):
        return pa.struct([_field(child) for child in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_field(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_field(kind.key_field), _field(kind.item_field))
    return kind


def _present(column: Any, kind: pa.DataType) -> Any:
    if column.type == kind:
        return column
    if isinstance(column.type, pa.UuidType) and pa.types.is_large_string(kind):
        texts = [None if value is None else str(value) for value in column.to_pylist()]
        return pa.array(texts, kind)
    if pa.types.is_time(column.type):
        column = column.cast(pa.time64("us"))
    return project(column, pa.field("", kind))


def read(
    plan: ReadPlan, wanted: Range, report: Callable[[ReadCounts], None]
) -> Iterator[pa.RecordBatch]:
    """All records of one range, or an error."""
    target = plan.target
    decoder = Decoder(plan.format, plan.columns)
    envelope = bool(plan.metadata.key or plan.metadata.headers)
    delivered, reached, epoch = 0, wanted.start, -1
    for chunk in fetch(
        plan.kafka, wanted, patience=plan.patience, client=plan.client, envelope=envelope
    ):
        values, offsets, stamps, keys, headers = chunk.open(envelope)
        rejected = [UndecodableRecord(i, UNREAD, fact) for i, fact in chunk.broken.items()]
        if not rejected:
            groups, rejected = decoder.decode(values, headers)
        if rejected:
            raise undecodable(chunk.span.partition, offsets, rejected)
        if plan.metadata.timestamp and len(late := too_late(stamps)):
            bad = [
                UndecodableRecord(i, "timestamp", why_too_late(int(stamps[i])))
                for i in late.tolist()
            ]
            raise undecodable(chunk.span.partition, offsets, bad)
        for group in groups:
            at = slice(None) if group.index is None else group.index
            plain = pa.table(
                {
                    name: _present(
                        group.rows.column(name), _type(group.rows.field(name).type, True)
                    )
                    for name in group.rows.schema.names
                }
            )
            rows = project_rows(
                plain,
                target,
                plan.metadata,
                wanted.partition,
                offsets[at],
                stamps[at],
                keys=_at(keys, group.index),
                headers=_at(headers, group.index),
            )
            yield from rows.combine_chunks().to_batches()
        delivered += len(offsets)
        reached, epoch = chunk.span.end, chunk.leader
    if reached != wanted.end:
        raise AccountingError(f"cannot finish {wanted}: the reader reached {reached}")
    counts = delivered, len(wanted) - delivered, (epoch,)
    report({(*wanted.partition, wanted.start, wanted.end): counts})


def _at(column: pa.Array | None, index: Longs | None) -> pa.Array | None:
    return column if column is None or index is None else column.take(pa.array(index))


def read_all(
    plan: ReadPlan, report: Callable[[ReadCounts], None], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """For Spark's `mapInArrow`: rows of ranges in, rows of records out."""
    with in_worker():
        for batch in batches:
            for row in batch.to_pylist():
                wanted = Range(Partition(row["topic"], row["partition"]), row["start"], row["end"])
                yield from read(plan, wanted, report)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Shared by all tasks of a batch."""

    table: WriterSpec
    #: names of the topic, partition and offset columns; None where the rows carry none
    origin: tuple[str, str, str] | None
    event_time: str
    file_prefix: str


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The result of one task."""

    files: tuple[DataFileDescriptor, ...]
    rows: int
    bytes: int
    #: the offsets its rows carry; None where a row carries none, or two rows the same
    carried: Mapping[Partition, Longs] | None
    watermark: tuple[int, int] | None
    seconds: Mapping[str, float]
    #: `watermark` of each partition, where the rows carry theirs
    watermarks: Mapping[Partition, tuple[int, int]] = field(default_factory=dict)
    #: upsert tables: delete files, the number of their keys, the rows in `files` of each partition,
    #: how many rows the task was given, and files of the `_deleted` table
    deletes: tuple[DataFileDescriptor, ...] = ()
    keys: int = 0
    kept: Mapping[Partition, int] = field(default_factory=dict)
    given: int = 0
    noted: tuple[DataFileDescriptor, ...] = ()

    def dump(self) -> str:
        files, deletes, noted = (
            [[f.descriptor, f.rows, f.bytes] for f in some]
            for some in (self.files, self.deletes, self.noted)
        )
        carried = (
            None
            if self.carried is None
            else [[*partition, *_pack(offsets)] for partition, offsets in self.carried.items()]
        )
        spans = [[*partition, *span] for partition, span in self.watermarks.items()]
        kept = [[*partition, rows] for partition, rows in self.kept.items()]
        upserted = [deletes, self.keys, kept, self.given, noted]
        seconds = dict(self.seconds)
        return json.dumps(
            [files, self.rows, self.bytes, carried, self.watermark, seconds, spans, upserted]
        )

    @staticmethod
    def load(text: str) -> WriteOutcome:
        files, rows, bytes, carried, span, seconds, spans, upserted = json.loads(text)
        deletes, keys, kept, given, noted = upserted
        return WriteOutcome(
            tuple(DataFileDescriptor(*file) for file in files),
            rows,
            bytes,
            None
            if carried is None
            else {Partition(topic, number): _unpack(*packed) for topic, number, *packed in carried},
            tuple(span) if span else None,
            seconds,
            {Partition(topic, number): (low, high) for topic, number, low, high in spans},
            tuple(DataFileDescriptor(*file) for file in deletes),
            keys,
            {Partition(topic, number): count for topic, number, count in kept},
            given,
            tuple(DataFileDescriptor(*file) for file in noted),
        )


def _pack(offsets: Longs) -> tuple[int, int, str]:
    """Sorted numbers as bits from the lowest on: no more than the span, and runs compress to almost
    nothing."""
    low = int(offsets[0])
    bits = np.zeros(int(offsets[-1]) - low + 1, bool)
    bits[offsets - low] = True
    return low, len(bits), base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 1)).decode()


def _unpack(low: int, length: int, packed: str) -> Longs:
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8))
    return np.flatnonzero(bits[:length]) + low


def write_all(
    plan: WritePlan, batches: Iterable[pa.RecordBatch], names: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """For Spark's `mapInArrow`: a task's rows in, one row with its outcome out. `names`: the column
    names, where those of the batches are placeholders."""
    if names:
        batches = (batch.rename_columns(list(names)) for batch in batches)
    with in_worker():
        outcome = write(plan, batches)
    yield outcome_batch(outcome)


def outcome_batch(outcome: WriteOutcome) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"outcome": outcome.dump()}], schema=_OUTCOMES)


def write(plan: WritePlan, batches: Iterable[pa.RecordBatch]) -> WriteOutcome:
    clock = Stopwatch()
    target = plan.table.arrow
    writer = TableWriter(plan.table, plan.file_prefix)
    carried = CarriedColumns(plan.origin, plan.event_time)
    count = size = 0
    low, high = [], []
    for given in _gathered(batches):
        with clock("write"), explaining(plan, carried):
            size += given.nbytes
            count += len(given)
            rows = fitted(given, _as_given(target, given.schema), f"to table {plan.table.name}")
            carried.add(rows)
            writer.write(rows)
            if span := watermark(rows, plan.event_time):
                low.append(span[0])
                high.append(span[1])
    with clock("write"), explaining(plan, carried):
        files = tuple(writer.close())
    span = (min(low), max(high)) if low else None
    return WriteOutcome(
        files, count, size, carried.offsets(), span, clock.seconds(), carried.watermarks
    )


@contextmanager
def explaining(plan: WritePlan, carried: CarriedColumns) -> Iterator[None]:
    """Raises unforeseen failures with the table and, where the rows carry them, their offsets."""
    try:
        with noticing():
            yield
    except StepFailed as error:
        ask_store(plan.table, plan.file_prefix)
        spans = ", ".join(f"{at} [{low}, {high + 1})" for at, (low, high) in carried.spans.items())
        where = f"; its rows are of {spans}" if spans else ""
        raise Unwritable(
            f"cannot write to table {plan.table.name}: {error}{where}",
            hint="nothing of the batch was staged; report the message",
        ) from error


def _as_given(target: pa.Schema, given: pa.Schema) -> pa.Schema:
    """`target` with Spark's types of text: in Parquet Arrow's two kinds are one."""
    short = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    same = [
        field.name in given.names and given.field(field.name).type == short.get(field.type)
        for field in target
    ]
    return pa.schema(
        [
            f.with_type(short[f.type]) if as_it_is else f
            for f, as_it_is in zip(target, same, strict=True)
        ]
    )


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch)
        size += batch.nbytes
        if rows >= GATHER_ROWS or size >= GATHER_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(waiting)


class CarriedColumns:
    """The offsets of the rows, whether each occurs once, and the event times of each partition."""

    def __init__(self, columns: tuple[str, str, str] | None, event_time: str = "") -> None:
        self._columns = columns
        self._event_time = event_time
        self._seen: dict[Partition, list[Longs]] = {}
        self.watermarks: dict[Partition, tuple[int, int]] = {}

    def add(self, rows: pa.Table) -> None:
        if self._columns is None:
            return
        topic, number, offset = (rows.column(name).combine_chunks() for name in self._columns)
        if topic.null_count or number.null_count or offset.null_count:
            self._columns = None
            return
        offsets = offset.to_numpy()
        names = pc.unique(topic).to_pylist()
        numbers = np.asarray(number)
        for name in names:
            in_topic = None if len(names) == 1 else np.asarray(pc.equal(topic, name))
            for partition_id in np.unique(numbers if in_topic is None else numbers[in_topic]):
                mask = (
                    numbers == partition_id
                    if in_topic is None
                    else in_topic & (numbers == partition_id)
                )
                partition = Partition(name, int(partition_id))
                self._seen.setdefault(partition, []).append(offsets[mask])
                self._widen(partition, rows, mask)

    def _widen(self, partition: Partition, rows: pa.Table, mask: npt.NDArray[np.bool_]) -> None:
        if not self._event_time:
            return
        times = rows.select([self._event_time])
        span = watermark(times if mask.all() else times.filter(pa.array(mask)), self._event_time)
        if span:
            low, high = self.watermarks.get(partition, span)
            self.watermarks[partition] = min(low, span[0]), max(high, span[1])

    @property
    def complete(self) -> bool:
        """Does every row carry a topic, a partition and an offset?"""
        return self._columns is not None

    @property
    def spans(self) -> dict[Partition, tuple[int, int]]:
        """Lowest and highest offset of each partition."""
        return {
            partition: (int(min(map(np.min, parts))), int(max(map(np.max, parts))))
            for partition, parts in sorted(self._seen.items())
        }

    def offsets(self) -> dict[Partition, Longs] | None:
        if self._columns is None:
            return None
        carried = {}
        for partition, parts in self._seen.items():
            all_of_them = np.concatenate(parts)
            if (np.diff(all_of_them) <= 0).any():
                all_of_them = np.sort(all_of_them)
                if (np.diff(all_of_them) == 0).any():
                    return None
            if all_of_them[-1] - all_of_them[0] >= WIDEST_SPAN:
                return None
            carried[partition] = all_of_them
        return carried
