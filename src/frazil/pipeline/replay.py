"""Dead letters through the stations once more: settle ▶ write. Runs on executors.

Comes in: letters as they lie in their table. Goes out: rows of the tables that take them now, a
note for each letter that went through, and why the others are rejected again.

A letter goes through as a whole or not at all: to every table it is for, or to none. One that names
the tables which rejected it is for those alone, since all others have the record already.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from frazil.errors import FrazilError, Unavailable, Unwritable, encode_for_spark
from frazil.files.writer import OpenFiles, TableWriter
from frazil.formats.decoder import FramedRecords, ask_again
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.ledger.staged_batch import RangeCounts
from frazil.offsets import BATCHES, Partition, Range
from frazil.pipeline.chunk import ChunkPipeline, ChunkResult, Rejection, TablePlan, add_need
from frazil.pipeline.isolation import IsolatingPipeline, StationFailed, WriteSieve, noticing
from frazil.pipeline.projection import MetadataColumns, project_rows
from frazil.pipeline.sandbox import UNREAD, Sandbox
from frazil.pipeline.task import FEARLESS, LETTERS, BatchPlan, RangeResult, Stopwatch, watermark

#: What is read of a letter.
READ = (*(each.name for each in LETTERS.fields), "value", "kind", "tables")
#: What `run_all` gives, in Spark's words and in Arrow's.
OUTCOMES = "result string, again string"
_OUTCOMES = pa.schema([("result", pa.string()), ("again", pa.string())])
#: So many letters that are rejected again tell why, of each task.
TOLD = 20

#: The note of a letter that went through: to which tables (none: a rule skips it now), and when.
NOTES = MetadataColumns("topic", "partition", "offset", "timestamp")
NOTE_COLUMNS = pa.schema(
    [
        pa.field("tables", pa.list_(pa.field("element", pa.large_string(), nullable=False))),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("replayed_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)

Settle = Callable[[Partition, RawRecords, FramedRecords | None, frozenset[str]], ChunkResult]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What all tasks of a replay share."""

    plan: BatchPlan
    #: where letters that went through are noted; None: nothing is written, only looked at
    notes: TablePlan | None
    #: the number of the batch among all batches of replays
    number: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A letter that is rejected once more."""

    topic: str
    partition: int
    offset: int
    kind: str
    reason: str


class AllBut(frozenset[str]):
    """Every name there is, except these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


@dataclass(slots=True)
class _ReplayOutcomes:
    """What became of the letters of a group, by their positions."""

    settled: ChunkResult
    #: the tables of those that went through
    tables: dict[int, list[str]] = field(default_factory=dict)
    again: dict[int, Rejection] = field(default_factory=dict)
    skipped: int = 0
    #: those that wait for a table to be made or changed
    waiting: int = 0


def run(
    replay: ReplayPlan, batches: Iterable[pa.RecordBatch], attempt: int = 0
) -> tuple[RangeResult, list[ReplayResult]]:
    """All letters of one task. The result counts letters, and rows of each table."""
    clock = Stopwatch()
    plan = replay.plan
    settler = ChunkPipeline(
        plan.format, plan.rules, plan.tables, plan.refused, plan.only, new=plan.new
    )
    settle: Settle = (IsolatingPipeline if attempt < FEARLESS else Sandbox)(settler).settle
    if plan.isolating:
        settle = _sifted(settle, WriteSieve(plan.tables, plan.file_prefix, keep=False))
    files = OpenFiles()
    writers: dict[str, TableWriter] = {}
    tallies: dict[str, RangeCounts] = {}
    needs: dict[str, pa.Schema] = {}
    again: list[ReplayResult] = []
    total = nothing = RangeCounts(Range(BATCHES, replay.number, replay.number + 1), 0)

    def write(table: TablePlan, rows: pa.Table) -> None:
        name = table.shape.name
        if needs or replay.notes is None or not len(rows):
            return
        if name not in writers:
            writers[name] = TableWriter(table.shape, plan.file_prefix, files)
        writers[name].write(rows)
        tallies[name] = tallies.get(name, nothing) + replace(
            nothing, written=len(rows), watermark=watermark(rows, table.event_time)
        )

    for partition, tables, group in (each for batch in batches for each in _groups(batch)):
        with clock("decode"):
            opened = _opened(group)
            if group.column("kind")[0].as_py() == UNREAD:
                fates = _unread(opened)
            else:
                fates = _settled(settle, plan, partition, tables, opened)
        for name, columns in fates.settled.needs.items():
            add_need(needs, name, columns)
        with clock("write"), noticing():
            for name, shaped in fates.settled.rows:
                write(plan.tables[name], _without(shaped, plan.tables[name], opened, fates.again))
            if fates.tables and replay.notes is not None:
                rows = _notes(replay.notes, plan.batch, partition, opened, fates.tables)
                write(replay.notes, rows)
        total += replace(
            nothing,
            written=sum(map(bool, fates.tables.values())) + fates.waiting,
            rejected=len(fates.again),
            skipped=fates.skipped,
        )
        again += [
            ReplayResult(*partition, int(opened.offsets[i]), each.kind, each.reason)
            for i, each in sorted(fates.again.items())[: TOLD - len(again)]
        ]
    with clock("write"), noticing():
        written = {name: tuple(writer.close()) for name, writer in writers.items()}
    done = {} if needs else written
    return RangeResult(
        total, tallies if done else {}, done, needs, frozenset(), clock.seconds()
    ), again


def _run(
    replay: ReplayPlan, letters: Callable[[], Iterator[pa.RecordBatch]], attempt: int
) -> tuple[RangeResult, list[ReplayResult]]:
    """Where a writer fails, once more in isolation: the letter at fault is rejected again."""
    try:
        return run(replay, letters(), attempt)
    except StationFailed as error:
        if replay.plan.isolating:
            raise Unwritable(f"cannot write the records of dead letters: {error}") from error
        isolating = replace(replay, plan=replace(replay.plan, isolating=True))
        return _run(isolating, letters, attempt)


@contextmanager
def _on_disk(
    batches: Iterable[pa.RecordBatch],
) -> Iterator[Callable[[], Iterator[pa.RecordBatch]]]:
    """Letters that can be read more than once, one batch in memory at a time."""
    with tempfile.TemporaryFile(prefix="frazil-letters-") as file:
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

        def letters() -> Iterator[pa.RecordBatch]:
            file.seek(0)
            if writer is not None:
                yield from pa.ipc.open_stream(file)

        yield letters


@contextmanager
def _keeping() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot keep dead letters in a temporary file: {error}") from error


def _sifted(settle: Settle, sieve: WriteSieve) -> Settle:
    def settled(
        partition: Partition,
        opened: RawRecords,
        framed: FramedRecords | None,
        below: frozenset[str],
    ) -> ChunkResult:
        found = settle(partition, opened, framed, below)
        return found if found.needs else sieve.sift(found, opened, below)

    return settled


def run_all(
    replay: ReplayPlan, batches: Iterable[pa.RecordBatch], attempt: int = 0
) -> Iterator[pa.RecordBatch]:
    """The shape Spark's `mapInArrow` wants."""
    gc.disable()  # see task.run_all
    gc.freeze()
    ask_again()
    try:
        with _on_disk(batches) as letters:
            result, again = _run(replay, letters, attempt)
        told = [[e.topic, e.partition, e.offset, e.kind, e.reason] for e in again]
        row = {"result": json.dumps(result.values()), "again": json.dumps(told)}
        yield pa.RecordBatch.from_pylist([row], schema=_OUTCOMES)
    except FrazilError as error:
        raise encode_for_spark(error) from None
    finally:
        gc.enable()


def _groups(
    batch: pa.RecordBatch,
) -> Iterator[tuple[Partition, tuple[str, ...], pa.RecordBatch]]:
    """Letters of the same partition that are for the same tables, those without a record apart."""
    found: dict[tuple[Partition, tuple[str, ...], bool], list[int]] = {}
    columns = (
        batch.column(name).to_pylist()
        for name in (LETTERS.topic, LETTERS.partition, "tables", "kind")
    )
    for i, (topic, number, tables, kind) in enumerate(zip(*columns, strict=True)):
        same = (Partition(topic, number), tuple(tables or ()), kind == UNREAD)
        found.setdefault(same, []).append(i)
    for (partition, tables, _), index in found.items():
        yield partition, tables, batch.take(pa.array(index))


def _opened(rows: pa.RecordBatch) -> RawRecords:
    """Letters as the records they were."""
    stamps = rows.column(LETTERS.timestamp).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return RawRecords(
        rows.column("value").to_pylist(),
        rows.column(LETTERS.offset).to_numpy(),
        np.array([-1 if each is None else each // 1000 for each in stamps.to_pylist()], np.int64),
        rows.column(LETTERS.key).cast(pa.large_binary()),
        pa.array(
            [
                [(each["key"], each["value"]) for each in headers or ()]
                for headers in rows.column(LETTERS.headers).to_pylist()
            ],
            HEADERS,
        ),
    )


def _unread(opened: RawRecords) -> _ReplayOutcomes:
    """Letters that never had their record: null is not what was sent."""
    reason = "cannot replay: the record batch could not be read, and the letter has no value"
    again = {i: Rejection(i, UNREAD, reason) for i in range(len(opened.offsets))}
    return _ReplayOutcomes(ChunkResult(), again=again)


def _settled(
    settle: Settle,
    plan: BatchPlan,
    partition: Partition,
    tables: tuple[str, ...],
    opened: RawRecords,
) -> _ReplayOutcomes:
    below = AllBut(tables) if tables else frozenset[str]()
    settled = settle(partition, opened, None, below)
    fates = _ReplayOutcomes(settled, again=dict(settled.letters))
    where = {offset: i for i, offset in enumerate(opened.offsets.tolist())}
    for name, rows in settled.rows:
        for offset in rows.column(plan.tables[name].metadata.offset).to_pylist():
            if where[offset] not in fates.again:
                fates.tables.setdefault(where[offset], []).append(name)
    left = [i for i in where.values() if i not in fates.tables and i not in fates.again]
    if settled.needs:
        fates.skipped, fates.waiting = settled.skipped, len(left) - settled.skipped
        return fates
    for i in left:
        # Skipped by a rule; or the rules have nothing to say of the tables that rejected it.
        alone = len(left) > settled.skipped
        if not alone or settle(partition, _one(opened, i), None, below).skipped:
            fates.skipped += 1
            fates.tables[i] = []
        else:
            reason = (
                f"cannot replay into {', '.join(tables)}: the rules send the record elsewhere, "
                "where it may be already"
            )
            fates.again[i] = Rejection(i, "route", reason, tables)
    return fates


def _one(opened: RawRecords, i: int) -> RawRecords:
    assert opened.keys is not None
    assert opened.headers is not None
    at = slice(i, i + 1)
    keys, headers = (each.take(pa.array([i])) for each in (opened.keys, opened.headers))
    return RawRecords(opened.values[at], opened.offsets[at], opened.stamps[at], keys, headers)


def _without(
    rows: pa.Table, table: TablePlan, opened: RawRecords, again: Iterable[int]
) -> pa.Table:
    """The rows of letters that go through as a whole."""
    rejected = opened.offsets[list(again)]
    if not len(rejected):
        return rows
    offsets = rows.column(table.metadata.offset).to_numpy()
    return rows.filter(pa.array(~np.isin(offsets, rejected)))


def _notes(
    table: TablePlan,
    batch: int,
    partition: Partition,
    opened: RawRecords,
    tables: Mapping[int, list[str]],
) -> pa.Table:
    index = sorted(tables)
    now = int(time.time() * 1_000_000)
    columns = [[tables[i] for i in index], [batch] * len(index), [now] * len(index)]
    rows = pa.table(
        [pa.array(values, each.type) for values, each in zip(columns, NOTE_COLUMNS, strict=True)],
        schema=NOTE_COLUMNS,
    )
    return project_rows(
        rows,
        table.shape.arrow,
        table.metadata,
        partition,
        opened.offsets[index],
        opened.stamps[index],
    )
