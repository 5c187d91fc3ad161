"""One range through the executor's stations: fetch ▶ settle ▶ write.

Comes in: the plan of a batch (what all tasks share) and one range. Goes out: one `Result`, small
and plain, which the driver checks against the plan before it stages anything.
"""

from __future__ import annotations

import base64
import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.core.errors import FrazilError, Miscount, Misfit, Undecodable, Unroutable, across
from frazil.core.offsets import Partition, Range
from frazil.ingest.careful import Careful
from frazil.ingest.decode import Format, Rejected
from frazil.ingest.fetch import Chunk, fetch
from frazil.ingest.records import Longs, Opened
from frazil.ingest.route import Metadata, route
from frazil.ingest.rules import Rules
from frazil.ingest.settle import Letter, Settler, TablePlan, add_need
from frazil.ingest.stage import Tally, tally_of, tally_values
from frazil.ingest.upsert import Applied, Changes, Parcel, apply, parcels, unpacked
from frazil.ingest.write import OpenFiles, Writer, WrittenFile

#: Tries of a task, counted from 0, that go the usual way: behind them every chunk is settled in a
#: process of its own, so that a record which kills it is found.
FEARLESS = 2

#: A dead letter: the record as it was, why it was rejected, by which tables, and when.
LETTERS = Metadata("topic", "partition", "offset", "timestamp", "key", "headers")
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
class Plan:
    """What all tasks of a batch share. Travels pickled; its secrets are never shown."""

    kafka: Mapping[str, str] = field(repr=False)
    format: Format = field(repr=False)
    #: name → table; those that records may also go to and that are not here are needs
    tables: Mapping[str, TablePlan]
    #: None: everything goes to the table `only`
    rules: Rules | None = None
    only: str = ""
    #: where rejected records go; None: they stop the stream
    letters: TablePlan | None = None
    #: names and templates of upsert tables and change logs, with their mode; and how the keys of
    #: records without a value are read
    keyed: Mapping[str, str] = field(default_factory=dict)
    key_format: Format | None = field(default=None, repr=False)
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

    @property
    def envelope(self) -> bool:
        """Are keys and headers wanted?"""
        headers = bool(self.rules and self.rules.wants_headers)
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
class Result:
    #: of all records of the range, whichever tables they went to
    total: Tally
    #: of each table that got, or rejected, any
    tallies: Mapping[str, Tally]
    files: Mapping[str, tuple[WrittenFile, ...]]
    #: tables that must be made or changed first, with the columns they need; then nothing counts
    needs: Mapping[str, pa.Schema]
    #: tables that have the range already
    below: frozenset[str]
    seconds: Mapping[str, float]  # fetch, decode, write; and cpu of the whole worker process

    def values(self) -> list[object]:
        return [
            tally_values(self.total),
            {name: tally_values(tally) for name, tally in self.tallies.items()},
            {name: [[f.descriptor, f.rows, f.bytes] for f in files]
             for name, files in self.files.items()},
            {name: base64.b64encode(columns.serialize()).decode()
             for name, columns in self.needs.items()},
            sorted(self.below),
            dict(self.seconds),
        ]  # fmt: skip

    @staticmethod
    def of(values: list[object]) -> Result:
        total, tallies, files, needs, below, seconds = values
        return Result(
            tally_of(total),  # type: ignore[arg-type]
            {name: tally_of(each) for name, each in tallies.items()},  # type: ignore[attr-defined]
            {
                name: tuple(WrittenFile(*file) for file in each)
                for name, each in files.items()  # type: ignore[attr-defined]
            },
            {
                name: pa.ipc.read_schema(pa.py_buffer(base64.b64decode(columns)))
                for name, columns in needs.items()  # type: ignore[attr-defined]
            },
            frozenset(below),  # type: ignore[call-overload]
            seconds,  # type: ignore[arg-type]
        )


def run(
    plan: Plan,
    wanted: Range,
    below: frozenset[str] = frozenset(),
    attempt: int = 0,
    dry: bool = False,
    changes: dict[str, Changes] | None = None,
) -> Result:
    """Everything of one range, or an error and nothing that counts. `dry`: only what is needed.

    What is for upsert tables is not written but added to `changes`; until it is known which record
    of a key is the last, it counts as merged.
    """
    clock = Stopwatch()
    settler = Settler(
        plan.format, plan.rules, plan.tables, plan.refused, plan.only, plan.keyed,
        plan.key_format,
    )  # fmt: skip
    settle = settler.settle if attempt < FEARLESS else Careful(settler).settle
    files = OpenFiles()
    writers: dict[str, Writer] = {}
    tallies: dict[str, Tally] = {}
    needs: dict[str, pa.Schema] = {}
    here = Range(wanted.partition, wanted.start, wanted.start)
    total = Tally(here, 0)

    def write(name: str, table: TablePlan, rows: pa.Table) -> None:
        nonlocal total
        if needs or dry:
            return  # the batch is run again
        span = watermark(rows, table.event_time)
        if table is not plan.letters:  # a record that could not be read has no event time
            total += Tally(Range(wanted.partition, total.range.end, total.range.end), 0,
                           watermark=span)  # fmt: skip
        if name in below:
            return  # the table has them
        if table.key:
            gathered(name).rows.append(rows)
            count(name, merged=len(rows), watermark=span)
            return
        if name not in writers:
            writers[name] = Writer(table.shape, plan.file_prefix, files)
        writers[name].write(rows)
        count(name, written=len(rows), watermark=span)

    def delete(name: str, keys: pa.Table) -> None:
        memory = plan.tables[name].memory  # it may lack what the table has
        if name not in below or (memory and memory.shape.name not in below):
            gathered(name).gone.append(keys)

    def gathered(name: str) -> Changes:
        assert changes is not None
        return changes.setdefault(name, Changes())

    def count(name: str, **counts: object) -> None:
        known = tallies.get(name, Tally(here, 0))
        tallies[name] = known + replace(Tally(here, 0), **counts)  # type: ignore[arg-type]

    chunks = fetch(
        plan.kafka, wanted, patience=plan.patience, client=plan.client, envelope=plan.envelope
    )
    while True:
        with clock("fetch"):
            chunk = next(chunks, None)
        if chunk is None:
            break
        with clock("decode"):
            framed = settler.framed(chunk.records) if attempt < FEARLESS else None
            if framed is not None:
                opened = Opened([], framed.offsets, framed.stamps, framed.keys)
            else:
                opened = chunk.open(plan.envelope)
            settled = settle(wanted.partition, opened, framed, frozenset())
        letters = list(settled.letters.values())
        if letters and plan.letters is None and not dry:
            raise refused(wanted.partition, opened.offsets, letters)
        with clock("write"):
            for name, columns in settled.needs.items():
                add_need(needs, name, columns)
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
        for letter in letters:
            for name in letter.tables:
                if name in plan.tables and name not in below:
                    count(name, rejected=1)
        offsets = opened.offsets
        # Every offset of the span was seen by the reader: those without a record are invisible.
        total += Tally(
            chunk.span,
            len(offsets) - len(letters) - settled.skipped,
            rejected=len(letters),
            skipped=settled.skipped,
            invisible=len(chunk.span) - len(offsets),
            seen=(int(offsets[0]), int(offsets[-1])) if len(offsets) else None,
        )
    if total.range != wanted:
        raise Miscount(f"cannot finish {wanted}: the reader reached {total.range}")
    with clock("write"):
        written = {name: tuple(writer.close()) for name, writer in writers.items()}
    if needs:
        return Result(total, {}, {}, needs, below, clock.seconds())
    return Result(total, {name: of_table(total, tally) for name, tally in tallies.items()},
                  written, {}, below, clock.seconds())  # fmt: skip


def of_table(total: Tally, mine: Tally) -> Tally:
    """What became of the range in one table: what was not for it, it skipped."""
    read = total.written + total.rejected + total.skipped
    return replace(
        total, written=mine.written, rejected=mine.rejected, merged=mine.merged,
        watermark=mine.watermark, skipped=read - mine.written - mine.rejected - mine.merged,
    )  # fmt: skip


def _letters(plan: Plan, chunk: Chunk, partition: Partition, letters: list[Letter]) -> pa.Table:
    """Rejected records as rows of the dead-letter table."""
    assert plan.letters is not None
    letters = sorted(letters, key=lambda letter: letter.index)
    opened = chunk.open(envelope=True)
    at = np.array([letter.index for letter in letters])
    now = int(time.time() * 1_000_000)
    values = [
        (opened.values[letter.index], letter.kind, letter.reason, letter.schema_id,
         list(letter.tables), plan.batch, now)
        for letter in letters
    ]  # fmt: skip
    columns = zip(zip(*values, strict=True), LETTER_COLUMNS, strict=True)
    rows = pa.table([pa.array(v, each.type) for v, each in columns], schema=LETTER_COLUMNS)
    assert opened.keys is not None
    assert opened.headers is not None
    return route(
        rows, plan.letters.shape.arrow, plan.letters.metadata, partition, opened.offsets[at],
        opened.stamps[at], keys=opened.keys.take(pa.array(at)),
        headers=opened.headers.take(pa.array(at)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a range: a result for each piece of it."""

    planned: Range
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Upserted:
    """What became of changes to an upsert table; `alone`: the Kafka partition they are all from,
    where a task wrote them that saw no others."""

    table: str
    done: Applied
    alone: Partition | None = None


#: What tasks hand on, with the bucket it is for.
Handed = tuple[int, Ended | Upserted | Parcel]


def run_all(plan: Plan, ranges: Iterable[Range], attempt: int = 0) -> Iterator[Handed]:
    """The ranges of one task."""
    # Spark collects garbage after every task, which takes longer than a small task among a thousand
    # modules: they are taken out of its sight.
    gc.disable()
    gc.freeze()
    try:
        for wanted in ranges:
            changes: dict[str, Changes] = {}
            results = [run(plan, piece, below, attempt, changes=changes)
                       for piece, below in plan.pieces(wanted)]  # fmt: skip
            needed = any(result.needs for result in results)  # then the batch is run again
            for name, mine in changes.items() if not needed else ():
                table = plan.tables[name]
                if name in plan.together:
                    yield from parcels(table, mine, plan.buckets, plan.parts)
                else:
                    done = apply(table, mine, plan.file_prefix, alone=True)
                    yield 0, Upserted(name, done, wanted.partition)
            yield 0, Ended(wanted, tuple(results))
    except FrazilError as error:
        raise across(error) from None
    finally:
        gc.enable()


def apply_all(plan: Plan, handed: Iterable[Handed]) -> Iterator[Handed]:
    """All of one bucket: changes are written, everything else is handed on."""
    gathered: list[Parcel] = []
    try:
        for bucket, each in handed:
            if isinstance(each, Parcel):
                gathered.append(each)
            else:
                yield bucket, each
        for name, changes in unpacked(gathered):
            yield 0, Upserted(name, apply(plan.tables[name], changes, plan.file_prefix))
    except FrazilError as error:
        raise across(error) from None


def watermark(rows: pa.Table, event_time: str) -> tuple[int, int] | None:
    """Lowest and highest event time, in microseconds."""
    if not event_time or not len(rows):
        return None
    span = pc.min_max(rows.column(event_time).cast(pa.timestamp("us", "UTC"), safe=False))
    return (span["min"].value, span["max"].value) if span["min"].is_valid else None


def refused(partition: Partition, offsets: Longs, letters: list[Letter]) -> FrazilError:
    """What stops the stream where rejected records have nowhere to go."""
    first = min(letters, key=lambda each: each.index)
    if first.kind == "misfit":
        return Misfit(first.reason, hint="set [dead_letters] table, and such records go there")
    if first.kind in ("route", "name"):
        return Unroutable(
            f"cannot route {partition} offset {int(offsets[first.index])}: "
            f"{first.reason.partition(': ')[2] or first.reason}",
            hint="add a [[route]] for it, or set [dead_letters] table",
        )
    return undecodable(partition, offsets, [Rejected(e.index, e.kind, e.reason) for e in letters])


def undecodable(partition: Partition, offsets: Longs, rejected: list[Rejected]) -> Undecodable:
    first = min(rejected, key=lambda each: each.index)
    more = f" (and {len(rejected) - 1} more of {len(offsets)})" if len(rejected) > 1 else ""
    return Undecodable(
        f"cannot decode {partition} offset {int(offsets[first.index])}: {first.reason}{more}",
        hint="nothing was lost or skipped; the stream goes on from here when it can be read",
    )


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
