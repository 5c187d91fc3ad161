"""Runs one offset range of a batch: fetch ▶ process ▶ write. Runs on executors.

In: the plan of the batch, shared by all tasks, and one range. Out: one `RangeResult`, small and
serializable, which the driver checks against the plan before it stages anything.
"""

from __future__ import annotations

import base64
import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.accounting import RangeCounts, for_table
from frazil.errors import (
    AccountingError,
    FrazilError,
    SchemaMismatch,
    Undecodable,
    Unroutable,
    Unwritable,
    encode_for_spark,
)
from frazil.files.writer import DataFileDescriptor, OpenFiles, TableWriter
from frazil.formats.decode_result import UndecodableRecord
from frazil.kafka.fetch import FetchedChunk, fetch
from frazil.kafka.record_batch import Longs, RawRecords
from frazil.ledger.staged_batch import range_counts_of, range_counts_values
from frazil.offsets import Partition, Range
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult, Rejection
from frazil.pipeline.isolation import (
    IsolatingPipeline,
    StepFailed,
    WriteSieve,
    ask_store,
    noticing,
    unwritable,
)
from frazil.pipeline.missing_columns import add_need
from frazil.pipeline.projection import MetadataColumns, project_rows
from frazil.pipeline.sandbox import Sandbox, around
from frazil.pipeline.table_plan import ChunkPlan, TablePlan
from frazil.pipeline.upsert import (
    KeyChanges,
    ShuffleBlock,
    UpsertResult,
    apply,
    shuffle_blocks,
    unpacked,
)

#: Attempts of a task, counted from 0, without a sandbox. Later attempts process every chunk in a
#: child process, so that a record that kills the process is found.
FEARLESS = 2

#: Longest reason of a rejected record in a result, in characters; the dead letter has all of it.
_REASON = 300
#: Columns of a dead letter: the unchanged record, the reason, the rejecting tables, and the time.
DEAD_LETTER_METADATA = MetadataColumns(
    "topic", "partition", "offset", "timestamp", "key", "headers"
)
DEAD_LETTER_COLUMNS = pa.schema(
    [
        pa.field("value", pa.large_binary()),
        pa.field("kind", pa.large_string(), nullable=False),
        pa.field("message", pa.large_string(), nullable=False),
        pa.field("schema_id", pa.int64()),  # an unsigned 32-bit number
        pa.field("tables", pa.list_(pa.field("element", pa.large_string(), nullable=False))),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("rejected_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(ChunkPlan):
    """The input shared by all tasks of a batch. Sent pickled; its repr contains no secrets."""

    kafka: Mapping[str, str] = field(repr=False)
    #: the dead-letter table; None: a rejected record stops the stream
    dead_letters: TablePlan | None = None
    #: upsert tables with changes that must be shuffled, because several tasks may have the same
    #: key; the number of buckets, and the most records of a batch
    together: frozenset[str] = frozenset()
    buckets: int = 1
    most_records: int = 1
    file_prefix: str = ""
    batch: int = 0
    patience: float = 60.0
    client: bool = False  # read with confluent-kafka in any case
    #: an attempt to write the batch failed: rows are written in parts to find the one at fault
    isolating: bool = False

    @property
    def envelope(self) -> bool:
        """Whether keys and headers of all records are needed."""
        selected = any(
            plan.selection.wants_key or plan.selection.wants_headers
            for plan in self.selects.values()
        )
        return bool(self.keyed) or bool(self.rules and self.rules.wants_headers) or selected

    @property
    def schema_ids(self) -> bool:
        """Whether a header may carry the schema id instead of the prefix of the value."""
        return self.format.kind == "confluent-avro"

    @property
    def may_need_envelope(self) -> bool:
        """Whether keys and headers of some records may be needed: a dead letter has its own."""
        return self.envelope or self.schema_ids or self.dead_letters is not None

    @property
    def deleted_keys_plans(self) -> list[TablePlan]:
        """The `_deleted` tables."""
        return [table.deleted_keys for table in self.tables.values() if table.deleted_keys]

    def pieces(self, wanted: Range) -> Iterator[tuple[Range, frozenset[str]]]:
        """The range, cut at the floors of tables; each piece with the tables that contain it."""
        floors = {
            name: plan.floor[wanted.partition]
            for name, plan in (
                *self.tables.items(),
                *(
                    (table.shape.name, table)
                    for table in (self.dead_letters, *self.deleted_keys_plans)
                    if table
                ),
            )
            if wanted.start < plan.floor.get(wanted.partition, 0)
        }
        cuts = sorted({min(floor, wanted.end) for floor in floors.values()} | {wanted.end})
        start = wanted.start
        for end in cuts:
            below = frozenset(name for name, floor in floors.items() if floor > start)
            yield Range(wanted.partition, start, end), below
            start = end


@dataclass(frozen=True, slots=True)
class RangeResult:
    #: counts of all records of the range, for all tables together
    total: RangeCounts
    #: counts for each table that received or rejected records
    tallies: Mapping[str, RangeCounts]
    files: Mapping[str, tuple[DataFileDescriptor, ...]]
    #: tables that must be created or changed first, with the columns they need; if there are any,
    #: the batch is run again
    needs: Mapping[str, pa.Schema]
    #: tables that already contain the range
    below: frozenset[str]
    seconds: Mapping[str, float]  # fetch, decode, write; and cpu of the whole worker process
    #: the leader epoch in which the range's last offset was read; -1: unknown
    leader: int = -1
    #: kind of rejected records → their number, and offset and reason of the last of them
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: the most files that the task had open at a time
    open_files: int = 0

    def values(self) -> list[object]:
        return [
            range_counts_values(self.total),
            {name: range_counts_values(tally) for name, tally in self.tallies.items()},
            {
                name: [[f.descriptor, f.rows, f.bytes] for f in files]
                for name, files in self.files.items()
            },
            {
                name: base64.b64encode(columns.serialize()).decode()
                for name, columns in self.needs.items()
            },
            sorted(self.below),
            dict(self.seconds),
            self.leader,
            {kind: list(pair) for kind, pair in self.rejected.items()},
            self.open_files,
        ]

    @staticmethod
    def of(values: list[object]) -> RangeResult:
        total, tallies, files, needs, below, seconds, leader, rejected, open_files = values
        return RangeResult(
            range_counts_of(total),  # type: ignore[arg-type]
            {name: range_counts_of(counts) for name, counts in tallies.items()},  # type: ignore[attr-defined]
            {
                name: tuple(DataFileDescriptor(*file) for file in table_files)
                for name, table_files in files.items()  # type: ignore[attr-defined]
            },
            {
                name: pa.ipc.read_schema(pa.py_buffer(base64.b64decode(columns)))
                for name, columns in needs.items()  # type: ignore[attr-defined]
            },
            frozenset(below),  # type: ignore[call-overload]
            seconds,  # type: ignore[arg-type]
            leader,  # type: ignore[arg-type]
            {kind: (count, last) for kind, (count, last) in rejected.items()},  # type: ignore[attr-defined]
            open_files,  # type: ignore[arg-type]
        )


def run(
    plan: BatchPlan,
    wanted: Range,
    below: frozenset[str] = frozenset(),
    attempt: int = 0,
    dry: bool = False,
    changes: dict[str, KeyChanges] | None = None,
) -> RangeResult:
    """Run one range as a whole, or raise; files of a failed run are in no result. `dry`: only
    report needs, write nothing.

    Changes of upsert tables are not written but added to `changes`. They count as merged until the
    last record of each key is known.
    """
    output = _RangeOutput(plan, wanted, below, dry, changes)
    reading = _RangeInput(plan, wanted.partition, attempt, output.clock)
    leader = -1
    chunks = fetch(
        plan.kafka,
        wanted,
        patience=plan.patience,
        client=plan.client,
        envelope=plan.may_need_envelope,
    )
    while (chunk := reading.next_of(chunks, output.total.range.end)) is not None:
        leader = chunk.leader
        opened, result = reading.processed(chunk)
        output.add_needs(result)
        result = output.sifted(result, opened)
        rejections = list(result.rejections.values())
        if rejections and plan.dead_letters is None and not dry:
            raise refused(wanted.partition, opened.offsets, rejections)
        output.write(chunk, result, rejections)
        output.count(chunk, opened, result, rejections)
    if output.total.range != wanted:
        raise AccountingError(f"cannot finish {wanted}: the reader reached {output.total.range}")
    return output.range_result(leader)


class _RangeInput:
    """The first steps of a range: fetch and process."""

    def __init__(
        self, plan: BatchPlan, partition: Partition, attempt: int, clock: Stopwatch
    ) -> None:
        self._envelope, self._schema_ids = plan.envelope, plan.schema_ids
        self._partition = partition
        self._clock = clock
        self._fearless = attempt < FEARLESS
        self._pipeline = ChunkPipeline(plan)
        self._process = (IsolatingPipeline if self._fearless else Sandbox)(self._pipeline).process

    def next_of(self, chunks: Iterator[FetchedChunk], reached: int) -> FetchedChunk | None:
        """Fetch the next chunk; None at the end of the range."""
        with self._clock("fetch"), _reading(self._partition, reached):
            return next(chunks, None)

    def processed(self, chunk: FetchedChunk) -> tuple[RawRecords, ChunkResult]:
        """The records of a chunk, and the outcome."""
        with self._clock("decode"):
            with _reading(self._partition, chunk.span.start):
                opened = chunk.open(self._envelope, self._schema_ids)
            if chunk.broken:
                way = self._pipeline.way(self._partition)
                return opened, around(self._process, self._partition, opened, chunk.broken, way)
            return opened, self._process(self._partition, opened, frozenset())


class TaskOutput:
    """Data files and counts of one task: a range, or a replay of dead letters."""

    def __init__(self, plan: BatchPlan, nothing: RangeCounts, dry: bool) -> None:
        """`nothing`: the counts of no record. `dry`: nothing is written."""
        self._plan = plan
        self._nothing = nothing
        self._dry = dry
        self.clock = Stopwatch()
        self._files = OpenFiles()
        self._writers: dict[str, TableWriter] = {}
        self.total = nothing
        self._tallies: dict[str, RangeCounts] = {}
        self._needs: dict[str, pa.Schema] = {}

    @property
    def _idle(self) -> bool:
        """Whether nothing is written: the batch is run again."""
        return bool(self._needs) or self._dry

    def add_needs(self, result: ChunkResult) -> None:
        for name, columns in result.needs.items():
            add_need(self._needs, name, columns)

    def _put(self, table: TablePlan, rows: pa.Table) -> None:
        name = table.shape.name
        if name not in self._writers:
            self._writers[name] = TableWriter(table.shape, self._plan.file_prefix, self._files)
        self._writers[name].write(rows)

    def _add(self, name: str, **counts: object) -> None:
        known = self._tallies.get(name, self._nothing)
        self._tallies[name] = known + replace(self._nothing, **counts)  # type: ignore[arg-type]

    def result(self) -> RangeResult:
        """Close all files. If tables are missing, the files and their counts are left out."""
        with self.clock("write"), noticing():
            files = {name: tuple(writer.close()) for name, writer in self._writers.items()}
        needs, seconds = self._needs, self.clock.seconds()
        tallies = {} if needs else self._tallies
        return RangeResult(
            self.total,
            tallies,
            {} if needs else files,
            needs,
            frozenset(),
            seconds,
            open_files=self._files.peak,
        )


class _RangeOutput(TaskOutput):
    """The last steps of a range: write rows and dead letters, and count every record."""

    def __init__(
        self,
        plan: BatchPlan,
        wanted: Range,
        below: frozenset[str],
        dry: bool,
        changes: dict[str, KeyChanges] | None,
    ) -> None:
        start = Range(wanted.partition, wanted.start, wanted.start)
        super().__init__(plan, RangeCounts(start, 0), dry)
        self._partition = wanted.partition
        self._below = below
        self._changes = changes
        self._sieve = WriteSieve(plan.tables, plan.file_prefix) if plan.isolating else None
        self._rejected: dict[str, tuple[int, str]] = {}

    def sifted(self, result: ChunkResult, opened: RawRecords) -> ChunkResult:
        """The outcome of a chunk; in isolation, records that cannot be written are rejected."""
        if self._sieve is None or self._idle:
            return result
        with self.clock("write"), noticing():
            return self._sieve.sift(result, opened, self._below)

    def write(self, chunk: FetchedChunk, result: ChunkResult, rejections: list[Rejection]) -> None:
        plan = self._plan
        with self.clock("write"), noticing():
            for name, rows in result.rows:
                self._write(name, plan.tables[name], rows)
            for name, keys in result.gone if not self._idle else ():
                self._delete(name, keys)
                if name not in self._below:
                    self._add(name, merged=len(keys))
            for name, keys in result.left if not self._idle else ():
                self._delete(name, keys)
            if plan.dead_letters is not None and rejections:
                rows = _dead_letter_rows(plan, chunk, self._partition, rejections)
                self._write(plan.dead_letters.shape.name, plan.dead_letters, rows)

    def _write(self, name: str, table: TablePlan, rows: pa.Table) -> None:
        if self._idle:
            return
        span = watermark(rows, table.event_time)
        if table is not self._plan.dead_letters:  # dead letters have no event time
            reached = self.total.range.end
            self.total += RangeCounts(Range(self._partition, reached, reached), 0, watermark=span)
        if name in self._below:
            return  # the table already contains them
        if table.key:
            self._gathered(name).rows.append(rows)
            self._add(name, merged=len(rows), watermark=span)
            return
        if self._sieve is None:
            self._put(table, rows)
        elif table is self._plan.dead_letters:
            self._sieve.put(table, rows)
        self._add(name, written=len(rows), watermark=span)

    def _delete(self, name: str, keys: pa.Table) -> None:
        deleted_keys = self._plan.tables[
            name
        ].deleted_keys  # its position may be behind that of the table
        if name not in self._below or (deleted_keys and deleted_keys.shape.name not in self._below):
            self._gathered(name).gone.append(keys)

    def _gathered(self, name: str) -> KeyChanges:
        assert self._changes is not None
        return self._changes.setdefault(name, KeyChanges())

    def count(
        self,
        chunk: FetchedChunk,
        opened: RawRecords,
        result: ChunkResult,
        rejections: list[Rejection],
    ) -> None:
        """Add the outcome of every offset of a chunk to the counts."""
        offsets = opened.offsets
        for rejection in sorted(rejections, key=lambda rejection: rejection.index):
            for name in rejection.tables:
                if name in self._plan.tables and name not in self._below:
                    self._add(name, rejected=1)
            reason = f"{self._partition} offset {int(offsets[rejection.index])}: {rejection.reason}"
            count = self._rejected.get(rejection.kind, (0, ""))[0] + 1
            self._rejected[rejection.kind] = count, reason[:_REASON]
        # The reader has passed every offset of the span: offsets without a record are invisible.
        self.total += RangeCounts(
            chunk.span,
            len(offsets) - len(rejections) - result.skipped,
            rejected=len(rejections),
            skipped=result.skipped,
            invisible=len(chunk.span) - len(offsets),
            seen=(int(offsets[0]), int(offsets[-1])) if len(offsets) else None,
        )

    def range_result(self, leader: int) -> RangeResult:
        """Close all files. `leader`: the leader epoch of the last chunk."""
        done = replace(self.result(), below=self._below)
        if done.needs:
            return done
        if self._sieve is not None:
            done = replace(done, files={n: tuple(files) for n, files in self._sieve.files.items()})
        tallies = {name: for_table(self.total, tally) for name, tally in done.tallies.items()}
        return replace(done, tallies=tallies, leader=leader, rejected=self._rejected)


def _dead_letter_rows(
    plan: BatchPlan, chunk: FetchedChunk, partition: Partition, rejections: list[Rejection]
) -> pa.Table:
    """Rejected records as rows of the dead-letter table."""
    assert plan.dead_letters is not None
    rejections = sorted(rejections, key=lambda rejection: rejection.index)
    opened = chunk.open(envelope=True)
    at = np.array([rejection.index for rejection in rejections])
    now = int(time.time() * 1_000_000)
    rows = pa.Table.from_pylist(
        [
            {
                "value": opened.values[rejection.index],
                "kind": rejection.kind,
                "message": rejection.reason,
                "schema_id": rejection.schema_id,
                "tables": list(rejection.tables),
                "batch": plan.batch,
                "rejected_at": now,
            }
            for rejection in rejections
        ],
        DEAD_LETTER_COLUMNS,
    )
    assert opened.keys is not None
    assert opened.headers is not None
    return project_rows(
        rows,
        plan.dead_letters.shape.arrow,
        plan.dead_letters.metadata,
        partition,
        opened.offsets[at],
        opened.stamps[at],
        keys=opened.keys.take(pa.array(at)),
        headers=opened.headers.take(pa.array(at)),
    )


@dataclass(frozen=True, slots=True)
class EndedRange:
    """A finished range: one result per piece."""

    planned: Range
    results: tuple[RangeResult, ...]


@dataclass(frozen=True, slots=True)
class UpsertOutcome:
    """The result of changes to an upsert table. `alone`: the Kafka partition of all of them, if one
    task wrote them without a shuffle."""

    table: str
    done: UpsertResult
    alone: Partition | None = None


#: Output of a task, with its bucket.
Handed = tuple[int, EndedRange | UpsertOutcome | ShuffleBlock]


def run_all(plan: BatchPlan, ranges: Iterable[Range], attempt: int = 0) -> Iterator[Handed]:
    """Run the ranges of one task."""
    with in_worker():
        for wanted in ranges:
            results, applied, changes = _range(plan, wanted, attempt)
            for name, key_changes in changes.items():
                yield from shuffle_blocks(
                    plan.tables[name], key_changes, plan.buckets, plan.most_records
                )
            for outcome in applied:
                yield 0, outcome
            yield 0, EndedRange(wanted, results)


@contextmanager
def in_worker() -> Iterator[None]:
    """A task in a Python worker of Spark: errors are encoded for Spark, and the garbage collector
    is off. Spark runs it after every task. With a thousand modules loaded that takes longer than a
    small task, so all present objects are frozen."""
    gc.disable()
    gc.freeze()
    try:
        yield
    except FrazilError as error:
        raise encode_for_spark(error) from None
    finally:
        gc.enable()


def _range(
    plan: BatchPlan, wanted: Range, attempt: int
) -> tuple[tuple[RangeResult, ...], list[UpsertOutcome], dict[str, KeyChanges]]:
    """Run a range. Returns its results, the upserts applied, and the changes to be shuffled.

    If a writer fails, the range is run again in isolation. Files left by the failed attempt are in
    no result; `frazil orphans` removes them.
    """
    changes: dict[str, KeyChanges] = {}
    applied: list[UpsertOutcome] = []
    try:
        results = tuple(
            run(plan, piece, below, attempt, changes=changes)
            for piece, below in plan.pieces(wanted)
        )
        if any(result.needs for result in results):
            return results, [], {}  # the batch is run again
        for name in changes.keys() - plan.together:
            done = _apply(plan, name, changes.pop(name), alone=True)
            applied.append(UpsertOutcome(name, done, wanted.partition))
        return results, applied, changes
    except StepFailed as error:
        if plan.isolating:
            raise Unwritable(
                f"cannot write the records of {wanted}: {error}",
                hint="nothing of the batch was staged; report the message",
            ) from error
        return _range(replace(plan, isolating=True), wanted, attempt)


def _apply(plan: BatchPlan, name: str, changes: KeyChanges, alone: bool = False) -> UpsertResult:
    table = plan.tables[name]
    try:
        with noticing():
            return apply(table, changes, plan.file_prefix, alone)
    except StepFailed as error:
        if alone and not plan.isolating:
            raise
        ask_store(table.shape, plan.file_prefix)
        unwritable(name, changes.rows + changes.gone, table, error)


def apply_all(plan: BatchPlan, handed: Iterable[Handed]) -> Iterator[Handed]:
    """Process one bucket after the shuffle: write the changes, pass everything else on."""
    gathered: list[ShuffleBlock] = []
    try:
        for bucket, item in handed:
            if isinstance(item, ShuffleBlock):
                gathered.append(item)
            else:
                yield bucket, item
        for name, changes in unpacked(gathered):
            yield 0, UpsertOutcome(name, _apply(plan, name, changes))
    except FrazilError as error:
        raise encode_for_spark(error) from None


def watermark(rows: pa.Table, event_time: str) -> tuple[int, int] | None:
    """Lowest and highest event time in microseconds; None: the rows have none."""
    if not event_time or not len(rows):
        return None
    span = pc.min_max(rows.column(event_time).cast(pa.timestamp("us", "UTC"), safe=False))
    return (span["min"].value, span["max"].value) if span["min"].is_valid else None


def refused(partition: Partition, offsets: Longs, rejections: list[Rejection]) -> FrazilError:
    """The error that stops the stream if a record is rejected and there is no dead-letter table."""
    first = min(rejections, key=lambda rejection: rejection.index)
    hint = "set [dead_letters] table, and such records go there"
    where = f"{partition} offset {int(offsets[first.index])}"
    if first.kind in ("misfit", "unwritable"):
        more = f" (and {len(rejections) - 1} more of {len(offsets)})" if len(rejections) > 1 else ""
        kind = SchemaMismatch if first.kind == "misfit" else Unwritable
        return kind(f"cannot write {where}: {first.reason}{more}", hint=hint)
    if first.kind in ("route", "name"):
        return Unroutable(
            f"cannot route {where}: {first.reason.partition(': ')[2] or first.reason}",
            hint="add a [[route]] for it, or set [dead_letters] table",
        )
    return undecodable(partition, offsets, rejections)


def undecodable(
    partition: Partition, offsets: Longs, rejected: Sequence[UndecodableRecord | Rejection]
) -> Undecodable:
    first = min(rejected, key=lambda record: record.index)
    more = f" (and {len(rejected) - 1} more of {len(offsets)})" if len(rejected) > 1 else ""
    return Undecodable(
        f"cannot decode {partition} offset {int(offsets[first.index])}: {first.reason}{more}",
        hint="nothing was lost or skipped; the stream continues here when the record can be read",
    )


@contextmanager
def _reading(partition: Partition, offset: int) -> Iterator[None]:
    """Raise `Undecodable` for unexpected errors before records are taken out of their batch."""
    try:
        with noticing():
            yield
    except StepFailed as error:
        raise Undecodable(
            f"cannot read {partition} from offset {offset} on: {error}",
            hint="nothing was lost or skipped; this is a fault of the software: report the message",
        ) from error


class Stopwatch:
    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._cpu = time.process_time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        return {**self._spent, "cpu": time.process_time() - self._cpu}
