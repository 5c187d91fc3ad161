"""One range through the executor's stations: fetch ▶ settle ▶ write.

Comes in: the plan of a batch (what all tasks share) and one range. Goes out: one `RangeResult`,
small and plain, which the driver checks against the plan before it stages anything.
"""

from __future__ import annotations

import base64
import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
from frazil.formats.decoder import RecordFormat, UndecodableRecord
from frazil.kafka.fetch import FetchedChunk, fetch
from frazil.kafka.record_batch import Longs, RawRecords
from frazil.ledger.staged_batch import RangeCounts, range_counts_of, range_counts_values
from frazil.offsets import Partition, Range
from frazil.pipeline.chunk import ChunkPipeline, NewTable, Rejection, TablePlan, add_need
from frazil.pipeline.isolation import (
    IsolatingPipeline,
    StationFailed,
    WriteSieve,
    ask_store,
    noticing,
    unwritable,
)
from frazil.pipeline.projection import MetadataColumns, project_rows
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.sandbox import Sandbox, around
from frazil.pipeline.upsert import (
    KeyChanges,
    ShuffleBlock,
    UpsertResult,
    apply,
    shuffle_blocks,
    unpacked,
)

#: Tries of a task, counted from 0, that go the usual way: behind them every chunk is settled in a
#: process of its own, so that a record which kills it is found.
FEARLESS = 2

#: Characters of what a batch tells of a rejected record; the dead letter has all of it.
_REASON = 300
#: A dead letter: the record as it was, why it was rejected, by which tables, and when.
LETTERS = MetadataColumns("topic", "partition", "offset", "timestamp", "key", "headers")
LETTER_COLUMNS = pa.schema(
    [
        pa.field("value", pa.large_binary()),
        pa.field("kind", pa.large_string(), nullable=False),
        pa.field("message", pa.large_string(), nullable=False),
        pa.field("schema_id", pa.int64()),  # 32 bits, without a sign
        pa.field("tables", pa.list_(pa.field("element", pa.large_string(), nullable=False))),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("rejected_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What all tasks of a batch share. Travels pickled; its secrets are never shown."""

    kafka: Mapping[str, str] = field(repr=False)
    format: RecordFormat = field(repr=False)
    #: name → table; those that records may also go to and that are not here are needs
    tables: Mapping[str, TablePlan]
    #: None: everything goes to the table `only`
    rules: RoutingRules | None = None
    only: str = ""
    #: where rejected records go; None: they stop the stream
    letters: TablePlan | None = None
    #: names and templates of upsert tables and change logs, with their mode; and how the keys of
    #: records without a value are read
    keyed: Mapping[str, str] = field(default_factory=dict)
    key_format: RecordFormat | None = field(default=None, repr=False)
    #: names and templates of tables, with what is known of one before it is made
    new: Mapping[str, NewTable] = field(default_factory=dict)
    #: upsert tables for which changes of a key may come from several tasks: into how many buckets
    #: they are cut, and these into how many parts all together
    together: frozenset[str] = frozenset()
    buckets: int = 1
    parts: int = 1
    #: tables that could not be made or changed as records wanted it, and why
    refused: Mapping[str, str] = field(default_factory=dict)
    file_prefix: str = ""
    batch: int = 0
    patience: float = 60.0
    client: bool = False  # read with confluent-kafka, whatever else is possible
    #: a try to write the batch failed: rows are written in parts, so that the one at fault is found
    isolating: bool = False

    @property
    def envelope(self) -> bool:
        """Are keys and headers wanted?"""
        # A header may say that the schema's id does not stand before the value.
        headers = bool(self.rules and self.rules.wants_headers) or (
            self.format.kind == "confluent-avro"
        )
        return self.letters is not None or bool(self.keyed) or headers

    @property
    def memories(self) -> list[TablePlan]:
        """The tables that remember what was deleted from others."""
        return [each.memory for each in self.tables.values() if each.memory]

    def pieces(self, wanted: Range) -> Iterator[tuple[Range, frozenset[str]]]:
        """The range, cut where some table begins to lack records; and who has them already."""
        floors = {
            name: plan.floor[wanted.partition]
            for name, plan in (
                *self.tables.items(),
                *((each.shape.name, each) for each in (self.letters, *self.memories) if each),
            )
            if wanted.start < plan.floor.get(wanted.partition, 0)
        }
        cuts = sorted({min(each, wanted.end) for each in floors.values()} | {wanted.end})
        start = wanted.start
        for end in cuts:
            below = frozenset(name for name, floor in floors.items() if floor > start)
            yield Range(wanted.partition, start, end), below
            start = end


@dataclass(frozen=True, slots=True)
class RangeResult:
    #: of all records of the range, whichever tables they went to
    total: RangeCounts
    #: of each table that got, or rejected, any
    tallies: Mapping[str, RangeCounts]
    files: Mapping[str, tuple[DataFileDescriptor, ...]]
    #: tables that must be made or changed first, with the columns they need; then nothing counts
    needs: Mapping[str, pa.Schema]
    #: tables that have the range already
    below: frozenset[str]
    seconds: Mapping[str, float]  # fetch, decode, write; and cpu of the whole worker process
    #: the leader epoch in which the range's last offset was read; -1: not known
    leader: int = -1
    #: kind of rejected records → how many there are, and where and why the last of them was
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)

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
            {kind: list(each) for kind, each in self.rejected.items()},
        ]

    @staticmethod
    def of(values: list[object]) -> RangeResult:
        total, tallies, files, needs, below, seconds, leader, rejected = values
        return RangeResult(
            range_counts_of(total),  # type: ignore[arg-type]
            {name: range_counts_of(each) for name, each in tallies.items()},  # type: ignore[attr-defined]
            {
                name: tuple(DataFileDescriptor(*file) for file in each)
                for name, each in files.items()  # type: ignore[attr-defined]
            },
            {
                name: pa.ipc.read_schema(pa.py_buffer(base64.b64decode(columns)))
                for name, columns in needs.items()  # type: ignore[attr-defined]
            },
            frozenset(below),  # type: ignore[call-overload]
            seconds,  # type: ignore[arg-type]
            leader,  # type: ignore[arg-type]
            {kind: (count, last) for kind, (count, last) in rejected.items()},  # type: ignore[attr-defined]
        )


def run(
    plan: BatchPlan,
    wanted: Range,
    below: frozenset[str] = frozenset(),
    attempt: int = 0,
    dry: bool = False,
    changes: dict[str, KeyChanges] | None = None,
) -> RangeResult:
    """Everything of one range, or an error and nothing that counts. `dry`: only what is needed.

    What is for upsert tables is not written but added to `changes`; until it is known which record
    of a key is the last, it counts as merged.
    """
    clock = Stopwatch()
    settler = ChunkPipeline(
        plan.format,
        plan.rules,
        plan.tables,
        plan.refused,
        plan.only,
        plan.keyed,
        plan.key_format,
        plan.new,
    )
    settle = (IsolatingPipeline if attempt < FEARLESS else Sandbox)(settler).settle
    sieve = WriteSieve(plan.tables, plan.file_prefix) if plan.isolating else None
    files = OpenFiles()
    writers: dict[str, TableWriter] = {}
    tallies: dict[str, RangeCounts] = {}
    needs: dict[str, pa.Schema] = {}
    here = Range(wanted.partition, wanted.start, wanted.start)
    total = RangeCounts(here, 0)
    leader = -1
    rejected: dict[str, tuple[int, str]] = {}

    def write(name: str, table: TablePlan, rows: pa.Table) -> None:
        nonlocal total
        if needs or dry:
            return  # the batch is run again
        span = watermark(rows, table.event_time)
        if table is not plan.letters:  # a record that could not be read has no event time
            total += RangeCounts(
                Range(wanted.partition, total.range.end, total.range.end), 0, watermark=span
            )
        if name in below:
            return  # the table has them
        if table.key:
            gathered(name).rows.append(rows)
            count(name, merged=len(rows), watermark=span)
            return
        if sieve is None:
            if name not in writers:
                writers[name] = TableWriter(table.shape, plan.file_prefix, files)
            writers[name].write(rows)
        elif table is plan.letters:
            sieve.put(table, rows)
        count(name, written=len(rows), watermark=span)

    def delete(name: str, keys: pa.Table) -> None:
        memory = plan.tables[name].memory  # it may lack what the table has
        if name not in below or (memory and memory.shape.name not in below):
            gathered(name).gone.append(keys)

    def gathered(name: str) -> KeyChanges:
        assert changes is not None
        return changes.setdefault(name, KeyChanges())

    def count(name: str, **counts: object) -> None:
        known = tallies.get(name, RangeCounts(here, 0))
        tallies[name] = known + replace(RangeCounts(here, 0), **counts)  # type: ignore[arg-type]

    chunks = fetch(
        plan.kafka, wanted, patience=plan.patience, client=plan.client, envelope=plan.envelope
    )
    while True:
        with clock("fetch"), _reading(wanted.partition, total.range.end):
            chunk = next(chunks, None)
        if chunk is None:
            break
        leader = chunk.leader
        with clock("decode"):
            framed = None
            if attempt < FEARLESS:
                with (
                    suppress(StationFailed),
                    noticing(),
                ):  # then value by value, which finds the one
                    framed = settler.framed(chunk.records)
            if framed is not None:
                opened = RawRecords([], framed.offsets, framed.stamps, framed.keys)
            else:
                with _reading(wanted.partition, chunk.span.start):
                    opened = chunk.open(plan.envelope)
            if chunk.broken:
                settled = around(
                    settle, wanted.partition, opened, chunk.broken, settler.way(wanted.partition)
                )
            else:
                settled = settle(wanted.partition, opened, framed, frozenset())
        for name, columns in settled.needs.items():
            add_need(needs, name, columns)
        if sieve is not None and not (needs or dry):
            with clock("write"), noticing():
                settled = sieve.sift(settled, opened, below)
        letters = list(settled.letters.values())
        if letters and plan.letters is None and not dry:
            raise refused(wanted.partition, opened.offsets, letters)
        with clock("write"), noticing():
            for name, rows in settled.rows:
                write(name, plan.tables[name], rows)
            for name, keys in settled.gone if not (needs or dry) else ():
                delete(name, keys)
                if name not in below:
                    count(name, merged=len(keys))
            for name, keys in settled.left if not (needs or dry) else ():
                delete(name, keys)
            if plan.letters is not None and letters:
                rows = _letters(plan, chunk, wanted.partition, letters)
                write(plan.letters.shape.name, plan.letters, rows)
        for letter in sorted(letters, key=lambda each: each.index):
            for name in letter.tables:
                if name in plan.tables and name not in below:
                    count(name, rejected=1)
            said = f"{wanted.partition} offset {int(opened.offsets[letter.index])}: {letter.reason}"
            rejected[letter.kind] = rejected.get(letter.kind, (0, ""))[0] + 1, said[:_REASON]
        offsets = opened.offsets
        # Every offset of the span was seen by the reader: those without a record are invisible.
        total += RangeCounts(
            chunk.span,
            len(offsets) - len(letters) - settled.skipped,
            rejected=len(letters),
            skipped=settled.skipped,
            invisible=len(chunk.span) - len(offsets),
            seen=(int(offsets[0]), int(offsets[-1])) if len(offsets) else None,
        )
    if total.range != wanted:
        raise AccountingError(f"cannot finish {wanted}: the reader reached {total.range}")
    with clock("write"), noticing():
        written = {name: tuple(writer.close()) for name, writer in writers.items()}
    if sieve is not None:
        written = {name: tuple(each) for name, each in sieve.files.items()}
    if needs:
        return RangeResult(total, {}, {}, needs, below, clock.seconds())
    return RangeResult(
        total,
        {name: of_table(total, tally) for name, tally in tallies.items()},
        written,
        {},
        below,
        clock.seconds(),
        leader,
        rejected,
    )


def of_table(total: RangeCounts, mine: RangeCounts) -> RangeCounts:
    """What became of the range in one table: what was not for it, it skipped."""
    read = total.written + total.rejected + total.skipped
    return replace(
        total,
        written=mine.written,
        rejected=mine.rejected,
        merged=mine.merged,
        watermark=mine.watermark,
        skipped=read - mine.written - mine.rejected - mine.merged,
    )


def _letters(
    plan: BatchPlan, chunk: FetchedChunk, partition: Partition, letters: list[Rejection]
) -> pa.Table:
    """Rejected records as rows of the dead-letter table."""
    assert plan.letters is not None
    letters = sorted(letters, key=lambda letter: letter.index)
    opened = chunk.open(envelope=True)
    at = np.array([letter.index for letter in letters])
    now = int(time.time() * 1_000_000)
    values = [
        (
            opened.values[letter.index],
            letter.kind,
            letter.reason,
            letter.schema_id,
            list(letter.tables),
            plan.batch,
            now,
        )
        for letter in letters
    ]
    columns = zip(zip(*values, strict=True), LETTER_COLUMNS, strict=True)
    rows = pa.table([pa.array(v, each.type) for v, each in columns], schema=LETTER_COLUMNS)
    assert opened.keys is not None
    assert opened.headers is not None
    return project_rows(
        rows,
        plan.letters.shape.arrow,
        plan.letters.metadata,
        partition,
        opened.offsets[at],
        opened.stamps[at],
        keys=opened.keys.take(pa.array(at)),
        headers=opened.headers.take(pa.array(at)),
    )


@dataclass(frozen=True, slots=True)
class EndedRange:
    """What became of a range: a result for each piece of it."""

    planned: Range
    results: tuple[RangeResult, ...]


@dataclass(frozen=True, slots=True)
class UpsertOutcome:
    """What became of changes to an upsert table; `alone`: the Kafka partition they are all from,
    where a task wrote them that saw no others."""

    table: str
    done: UpsertResult
    alone: Partition | None = None


#: What tasks hand on, with the bucket it is for.
Handed = tuple[int, EndedRange | UpsertOutcome | ShuffleBlock]


def run_all(plan: BatchPlan, ranges: Iterable[Range], attempt: int = 0) -> Iterator[Handed]:
    """The ranges of one task."""
    # Spark collects garbage after every task, which takes longer than a small task among a thousand
    # modules: they are taken out of its sight.
    gc.disable()
    gc.freeze()
    try:
        for wanted in ranges:
            results, applied, changes = _range(plan, wanted, attempt)
            for name, mine in changes.items():
                yield from shuffle_blocks(plan.tables[name], mine, plan.buckets, plan.parts)
            for each in applied:
                yield 0, each
            yield 0, EndedRange(wanted, results)
    except FrazilError as error:
        raise encode_for_spark(error) from None
    finally:
        gc.enable()


def _range(
    plan: BatchPlan, wanted: Range, attempt: int
) -> tuple[tuple[RangeResult, ...], list[UpsertOutcome], dict[str, KeyChanges]]:
    """What became of a range, and the changes that are to be brought together with those of others.

    Where a writer fails, the range is run again in isolation. Files that the failed try left behind
    are in no result, and `frazil orphans` finds them.
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
    except StationFailed as error:
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
    except StationFailed as error:
        if alone and not plan.isolating:
            raise
        ask_store(table.shape, plan.file_prefix)
        unwritable(name, changes.rows + changes.gone, table, error)


def apply_all(plan: BatchPlan, handed: Iterable[Handed]) -> Iterator[Handed]:
    """All of one bucket: changes are written, everything else is handed on."""
    gathered: list[ShuffleBlock] = []
    try:
        for bucket, each in handed:
            if isinstance(each, ShuffleBlock):
                gathered.append(each)
            else:
                yield bucket, each
        for name, changes in unpacked(gathered):
            yield 0, UpsertOutcome(name, _apply(plan, name, changes))
    except FrazilError as error:
        raise encode_for_spark(error) from None


def watermark(rows: pa.Table, event_time: str) -> tuple[int, int] | None:
    """Lowest and highest event time, in microseconds."""
    if not event_time or not len(rows):
        return None
    span = pc.min_max(rows.column(event_time).cast(pa.timestamp("us", "UTC"), safe=False))
    return (span["min"].value, span["max"].value) if span["min"].is_valid else None


def refused(partition: Partition, offsets: Longs, letters: list[Rejection]) -> FrazilError:
    """What stops the stream where rejected records have nowhere to go."""
    first = min(letters, key=lambda each: each.index)
    hint = "set [dead_letters] table, and such records go there"
    where = f"{partition} offset {int(offsets[first.index])}"
    if first.kind in ("misfit", "unwritable"):
        more = f" (and {len(letters) - 1} more of {len(offsets)})" if len(letters) > 1 else ""
        kind = SchemaMismatch if first.kind == "misfit" else Unwritable
        return kind(f"cannot write {where}: {first.reason}{more}", hint=hint)
    if first.kind in ("route", "name"):
        return Unroutable(
            f"cannot route {partition} offset {int(offsets[first.index])}: "
            f"{first.reason.partition(': ')[2] or first.reason}",
            hint="add a [[route]] for it, or set [dead_letters] table",
        )
    return undecodable(
        partition, offsets, [UndecodableRecord(e.index, e.kind, e.reason) for e in letters]
    )


def undecodable(
    partition: Partition, offsets: Longs, rejected: list[UndecodableRecord]
) -> Undecodable:
    first = min(rejected, key=lambda each: each.index)
    more = f" (and {len(rejected) - 1} more of {len(offsets)})" if len(rejected) > 1 else ""
    return Undecodable(
        f"cannot decode {partition} offset {int(offsets[first.index])}: {first.reason}{more}",
        hint="nothing was lost or skipped; the stream goes on from here when it can be read",
    )


@contextmanager
def _reading(partition: Partition, offset: int) -> Iterator[None]:
    """What nobody foresaw of a record that is not taken out of its batch yet."""
    try:
        with noticing():
            yield
    except StationFailed as error:
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
