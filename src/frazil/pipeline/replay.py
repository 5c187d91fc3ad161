"""Replays dead letters: process ▶ write. Runs on executors.

In: rows of the dead-letter table. Out: rows of the tables that accept them now, a note for each
replayed dead letter, and the reasons why others are rejected again.

A dead letter is replayed as a whole or not at all: into all of its tables or into none. If it names
the tables that rejected it, it goes to these alone: all others already contain the record.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from frazil.accounting import RangeCounts
from frazil.errors import Unavailable, Unwritable
from frazil.formats.schema_registry import ask_again
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import BATCHES, Partition, Range
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult, Rejection, without_offsets
from frazil.pipeline.isolation import (
    IsolatingPipeline,
    StepFailed,
    WriteSieve,
    noticing,
    part_of,
)
from frazil.pipeline.projection import MetadataColumns, project_rows
from frazil.pipeline.sandbox import UNREAD, ProcessChunk, Sandbox
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.task import (
    DEAD_LETTER_METADATA,
    FEARLESS,
    BatchPlan,
    RangeResult,
    TaskOutput,
    in_worker,
    watermark,
)

#: Columns that are read of a dead letter.
READ = (*(column.name for column in DEAD_LETTER_METADATA.fields), "value", "kind", "tables")
#: The output schema of `run_all`, for Spark and for Arrow.
OUTCOMES = "result string, again string"
_OUTCOMES = pa.schema([("result", pa.string()), ("again", pa.string())])
#: Dead letters rejected again that each task reports with their reason, at most.
MOST_REPORTED = 20

#: The note of a replayed dead letter: its tables (none: a rule skips it now), and the time.
NOTES = MetadataColumns("topic", "partition", "offset", "timestamp")
NOTE_COLUMNS = pa.schema(
    [
        pa.field("tables", pa.list_(pa.field("element", pa.large_string(), nullable=False))),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("replayed_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The input shared by all tasks of a replay."""

    plan: BatchPlan
    #: the table of notes on replayed dead letters; None: a dry run, nothing is written
    notes: TablePlan | None
    #: the number of this batch among all replay batches
    number: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A dead letter that is rejected again."""

    topic: str
    partition: int
    offset: int
    kind: str
    reason: str


class AllBut(frozenset[str]):
    """The set of all names except these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


@dataclass(slots=True)
class _ReplayOutcomes:
    """The outcomes of a group of dead letters, by position."""

    processed: ChunkResult
    #: tables of the dead letters that were replayed
    tables: dict[int, list[str]] = field(default_factory=dict)
    again: dict[int, Rejection] = field(default_factory=dict)
    skipped: int = 0
    #: dead letters that wait for a table to be created or changed
    waiting: int = 0


def run(
    replay: ReplayPlan, batches: Iterable[pa.RecordBatch], attempt: int = 0
) -> tuple[RangeResult, list[ReplayResult]]:
    """Replay all dead letters of one task. The result counts dead letters, and rows per table."""
    plan = replay.plan
    isolate = IsolatingPipeline if attempt < FEARLESS else Sandbox
    process: ProcessChunk = isolate(ChunkPipeline(plan)).process
    output = _ReplayOutput(replay)
    for partition, tables, group in (group for batch in batches for group in _groups(batch)):
        with output.clock("decode"):
            opened = _opened(group)
            if group.column("kind")[0].as_py() == UNREAD:
                outcomes = _unread(opened)
            else:
                outcomes = _outcomes_of(process, plan, partition, tables, opened)
        output.add_needs(outcomes.processed)
        with output.clock("write"), noticing():
            output.write(partition, opened, outcomes)
        output.count(partition, opened, outcomes)
    return output.result(), output.again


class _ReplayOutput(TaskOutput):
    """Rows and notes of replayed dead letters, and their counts."""

    def __init__(self, replay: ReplayPlan) -> None:
        batch = Range(BATCHES, replay.number, replay.number + 1)
        super().__init__(replay.plan, RangeCounts(batch, 0), dry=replay.notes is None)
        self._notes = replay.notes
        self.again: list[ReplayResult] = []

    def write(self, partition: Partition, opened: RawRecords, outcomes: _ReplayOutcomes) -> None:
        plan, notes = self._plan, self._notes
        rejected = opened.offsets[list(outcomes.again)]
        for name, rows in outcomes.processed.rows:
            table = plan.tables[name]
            self._write(table, without_offsets(rows, table.metadata.offset, rejected))
        if outcomes.tables and notes is not None:
            self._write(notes, _notes(notes, plan.batch, partition, opened, outcomes.tables))

    def _write(self, table: TablePlan, rows: pa.Table) -> None:
        if not self._idle and len(rows):
            self._put(table, rows)
            span = watermark(rows, table.event_time)
            self._add(table.shape.name, written=len(rows), watermark=span)

    def count(self, partition: Partition, opened: RawRecords, outcomes: _ReplayOutcomes) -> None:
        self.total += replace(
            self._nothing,
            written=sum(map(bool, outcomes.tables.values())) + outcomes.waiting,
            rejected=len(outcomes.again),
            skipped=outcomes.skipped,
        )
        self.again += [
            ReplayResult(*partition, int(opened.offsets[i]), rejection.kind, rejection.reason)
            for i, rejection in sorted(outcomes.again.items())[: MOST_REPORTED - len(self.again)]
        ]


def _run(
    replay: ReplayPlan, dead_letters: Callable[[], Iterator[pa.RecordBatch]], attempt: int
) -> tuple[RangeResult, list[ReplayResult]]:
    """Run a task. If a writer fails, run it again in isolation: the dead letter at fault is
    rejected again."""
    try:
        return run(replay, dead_letters(), attempt)
    except StepFailed as error:
        if replay.plan.isolating:
            raise Unwritable(f"cannot write the records of dead letters: {error}") from error
        isolating = replace(replay, plan=replace(replay.plan, isolating=True))
        return _run(isolating, dead_letters, attempt)


@contextmanager
def _on_disk(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[Callable[[], Iterator[pa.RecordBatch]]]:
    """A function that reads the dead letters again from a file, one batch in memory at a time."""
    with tempfile.TemporaryFile(prefix="frazil-dead-letters-") as file:
        writer = None
        for batch in batches:
            with _keeping():
                if writer is None:
                    writer = pa.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
            del batch  # before the next one is made
        with _keeping():
            if writer is not None:
                writer.close()
            file.flush()

        def dead_letters() -> Iterator[pa.RecordBatch]:
            file.seek(0)
            if writer is not None:
                yield from pa.ipc.open_stream(file)

        yield dead_letters


@contextmanager
def _keeping() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot keep dead letters in a temporary file: {error}") from error


def run_all(
    replay: ReplayPlan, batches: Iterable[pa.RecordBatch], attempt: int = 0
) -> Iterator[pa.RecordBatch]:
    """Run one task; the function for Spark's `mapInArrow`."""
    with in_worker():
        ask_again()
        with _on_disk(batches) as dead_letters:
            result, again = _run(replay, dead_letters, attempt)
        rejected = [[e.topic, e.partition, e.offset, e.kind, e.reason] for e in again]
        row = {"result": json.dumps(result.values()), "again": json.dumps(rejected)}
        yield pa.RecordBatch.from_pylist([row], schema=_OUTCOMES)


def _groups(
    batch: pa.RecordBatch,
) -> Iterator[tuple[Partition, tuple[str, ...], pa.RecordBatch]]:
    """Dead letters grouped by partition and tables. Dead letters without a record are separate."""
    groups: dict[tuple[Partition, tuple[str, ...], bool], list[int]] = {}
    columns = (
        batch.column(name).to_pylist()
        for name in (DEAD_LETTER_METADATA.topic, DEAD_LETTER_METADATA.partition, "tables", "kind")
    )
    for i, (topic, number, tables, kind) in enumerate(zip(*columns, strict=True)):
        same = (Partition(topic, number), tuple(tables or ()), kind == UNREAD)
        groups.setdefault(same, []).append(i)
    for (partition, tables, _), index in groups.items():
        yield partition, tables, batch.take(pa.array(index))


def _opened(rows: pa.RecordBatch) -> RawRecords:
    """Dead letters as the Kafka records they were."""
    stamps = (
        rows.column(DEAD_LETTER_METADATA.timestamp).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    )
    return RawRecords(
        rows.column("value").to_pylist(),
        rows.column(DEAD_LETTER_METADATA.offset).to_numpy(),
        np.array(
            [-1 if stamp is None else stamp // 1000 for stamp in stamps.to_pylist()], np.int64
        ),
        rows.column(DEAD_LETTER_METADATA.key).cast(pa.large_binary()),
        pa.array(
            [
                [(header["key"], header["value"]) for header in headers or ()]
                for headers in rows.column(DEAD_LETTER_METADATA.headers).to_pylist()
            ],
            HEADERS,
        ),
    )


def _unread(opened: RawRecords) -> _ReplayOutcomes:
    """Reject dead letters without a record: their null value is not the value that was sent."""
    reason = "cannot replay: the record batch could not be read, and the letter has no value"
    again = {i: Rejection(i, UNREAD, reason) for i in range(len(opened.offsets))}
    return _ReplayOutcomes(ChunkResult(), again=again)


def _outcomes_of(
    process: ProcessChunk,
    plan: BatchPlan,
    partition: Partition,
    tables: tuple[str, ...],
    opened: RawRecords,
) -> _ReplayOutcomes:
    below = AllBut(tables) if tables else frozenset[str]()
    processed = process(partition, opened, below)
    if plan.isolating and not processed.needs:
        sieve = WriteSieve(plan.tables, plan.file_prefix, keep=False)
        processed = sieve.sift(processed, opened, below)
    outcomes = _ReplayOutcomes(processed, again=dict(processed.rejections))
    where = {offset: i for i, offset in enumerate(opened.offsets.tolist())}
    for name, rows in processed.rows:
        for offset in rows.column(plan.tables[name].metadata.offset).to_pylist():
            if where[offset] not in outcomes.again:
                outcomes.tables.setdefault(where[offset], []).append(name)
    left = [i for i in where.values() if i not in outcomes.tables and i not in outcomes.again]
    if processed.needs:
        outcomes.skipped, outcomes.waiting = processed.skipped, len(left) - processed.skipped
        return outcomes
    for i in left:
        # A rule skips it, or routes it to other tables than the ones that rejected it.
        alone = len(left) > processed.skipped
        if not alone or process(partition, part_of(opened, i, i + 1), below).skipped:
            outcomes.skipped += 1
            outcomes.tables[i] = []
        else:
            reason = (
                f"cannot replay into {', '.join(tables)}: the rules send the record elsewhere, "
                "where it may be already"
            )
            outcomes.again[i] = Rejection(i, "route", reason, tables)
    return outcomes


def _notes(
    table: TablePlan,
    batch: int,
    partition: Partition,
    opened: RawRecords,
    tables: Mapping[int, list[str]],
) -> pa.Table:
    index = sorted(tables)
    now = int(time.time() * 1_000_000)
    rows = pa.Table.from_pylist(
        [{"tables": tables[i], "batch": batch, "replayed_at": now} for i in index], NOTE_COLUMNS
    )
    return project_rows(
        rows,
        table.shape.arrow,
        table.metadata,
        partition,
        opened.offsets[index],
        opened.stamps[index],
    )
