"""Dead letters through the stations once more: settle ▶ write. Runs on executors.

Comes in: letters as they lie in their table. Goes out: rows of the tables that take them now, a
note for each letter that went through, and why the others are rejected again.

A letter goes through as a whole or not at all: to every table it is for, or to none. One that names
the tables which rejected it is for those alone, since all others have the record already.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from frazil.core.errors import FrazilError, across
from frazil.core.offsets import BATCHES, Partition, Range
from frazil.ingest.careful import Careful
from frazil.ingest.decode import ask_again
from frazil.ingest.records import HEADERS, Opened
from frazil.ingest.route import Metadata, route
from frazil.ingest.settle import Letter, Settled, Settler, TablePlan, add_need
from frazil.ingest.stage import Tally
from frazil.ingest.task import FEARLESS, LETTERS, Plan, Result, Stopwatch, watermark
from frazil.ingest.write import OpenFiles, Writer

#: What is read of a letter.
READ = (*(each.name for each in LETTERS.fields), "value", "tables")
#: What `run_all` gives, in Spark's words and in Arrow's.
OUTCOMES = "result string, again string"
_OUTCOMES = pa.schema([("result", pa.string()), ("again", pa.string())])
#: So many letters that are rejected again tell why, of each task.
TOLD = 20

#: The note of a letter that went through: to which tables (none: a rule skips it now), and when.
NOTES = Metadata("topic", "partition", "offset", "timestamp")
NOTE_COLUMNS = pa.schema(
    [
        pa.field("tables", pa.list_(pa.field("element", pa.large_string(), nullable=False))),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("replayed_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)

Settle = Callable[[Partition, Opened, None, frozenset[str]], Settled]


@dataclass(frozen=True, slots=True)
class Replay:
    """What all tasks of a replay share."""

    plan: Plan
    #: where letters that went through are noted; None: nothing is written, only looked at
    notes: TablePlan | None
    #: the number of the batch among all batches of replays
    number: int


@dataclass(frozen=True, slots=True)
class Again:
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
class _Fates:
    """What became of the letters of a group, by their positions."""

    settled: Settled
    #: the tables of those that went through
    tables: dict[int, list[str]] = field(default_factory=dict)
    again: dict[int, Letter] = field(default_factory=dict)
    skipped: int = 0
    #: those that wait for a table to be made or changed
    waiting: int = 0


def run(
    replay: Replay, batches: Iterable[pa.RecordBatch], attempt: int = 0
) -> tuple[Result, list[Again]]:
    """All letters of one task. The result counts letters, and rows of each table."""
    clock = Stopwatch()
    plan = replay.plan
    settler = Settler(plan.format, plan.rules, plan.tables, plan.refused, plan.only)
    settle: Settle = settler.settle if attempt < FEARLESS else Careful(settler).settle
    files = OpenFiles()
    writers: dict[str, Writer] = {}
    tallies: dict[str, Tally] = {}
    needs: dict[str, pa.Schema] = {}
    again: list[Again] = []
    total = nothing = Tally(Range(BATCHES, replay.number, replay.number + 1), 0)

    def write(table: TablePlan, rows: pa.Table) -> None:
        name = table.shape.name
        if needs or replay.notes is None or not len(rows):
            return
        if name not in writers:
            writers[name] = Writer(table.shape, plan.file_prefix, files)
        writers[name].write(rows)
        tallies[name] = tallies.get(name, nothing) + replace(
            nothing, written=len(rows), watermark=watermark(rows, table.event_time)
        )

    for partition, tables, group in (each for batch in batches for each in _groups(batch)):
        with clock("decode"):
            opened = _opened(group)
            fates = _settled(settle, plan, partition, tables, opened)
        for name, columns in fates.settled.needs.items():
            add_need(needs, name, columns)
        with clock("write"):
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
            Again(*partition, int(opened.offsets[i]), each.kind, each.reason)
            for i, each in sorted(fates.again.items())[: TOLD - len(again)]
        ]
    with clock("write"):
        written = {name: tuple(writer.close()) for name, writer in writers.items()}
    done = {} if needs else written
    return Result(total, tallies if done else {}, done, needs, frozenset(), clock.seconds()), again


def run_all(
    replay: Replay, batches: Iterable[pa.RecordBatch], attempt: int = 0
) -> Iterator[pa.RecordBatch]:
    """The shape Spark's `mapInArrow` wants."""
    gc.disable()  # see task.run_all
    gc.freeze()
    ask_again()
    try:
        result, again = run(replay, batches, attempt)
        told = [[e.topic, e.partition, e.offset, e.kind, e.reason] for e in again]
        row = {"result": json.dumps(result.values()), "again": json.dumps(told)}
        yield pa.RecordBatch.from_pylist([row], schema=_OUTCOMES)
    except FrazilError as error:
        raise across(error) from None
    finally:
        gc.enable()


def _groups(
    batch: pa.RecordBatch,
) -> Iterator[tuple[Partition, tuple[str, ...], pa.RecordBatch]]:
    """Letters of the same partition that are for the same tables."""
    found: dict[tuple[Partition, tuple[str, ...]], list[int]] = {}
    columns = (batch.column(name).to_pylist() for name in (LETTERS.topic, LETTERS.partition,
                                                           "tables"))  # fmt: skip
    for i, (topic, number, tables) in enumerate(zip(*columns, strict=True)):
        found.setdefault((Partition(topic, number), tuple(tables or ())), []).append(i)
    for (partition, tables), index in found.items():
        yield partition, tables, batch.take(pa.array(index))


def _opened(rows: pa.RecordBatch) -> Opened:
    """Letters as the records they were."""
    stamps = rows.column(LETTERS.timestamp).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return Opened(
        rows.column("value").to_pylist(),
        rows.column(LETTERS.offset).to_numpy(),
        np.array([-1 if each is None else each // 1000 for each in stamps.to_pylist()], np.int64),
        rows.column(LETTERS.key).cast(pa.large_binary()),
        pa.array(
            [[(each["key"], each["value"]) for each in headers or ()]
             for headers in rows.column(LETTERS.headers).to_pylist()],
            HEADERS,
        ),
    )  # fmt: skip


def _settled(
    settle: Settle, plan: Plan, partition: Partition, tables: tuple[str, ...], opened: Opened
) -> _Fates:
    below = AllBut(tables) if tables else frozenset[str]()
    settled = settle(partition, opened, None, below)
    fates = _Fates(settled, again=dict(settled.letters))
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
            fates.again[i] = Letter(i, "route", reason, tables)
    return fates


def _one(opened: Opened, i: int) -> Opened:
    assert opened.keys is not None
    assert opened.headers is not None
    at = slice(i, i + 1)
    keys, headers = (each.take(pa.array([i])) for each in (opened.keys, opened.headers))
    return Opened(opened.values[at], opened.offsets[at], opened.stamps[at], keys, headers)


def _without(rows: pa.Table, table: TablePlan, opened: Opened, again: Iterable[int]) -> pa.Table:
    """The rows of letters that go through as a whole."""
    rejected = opened.offsets[list(again)]
    if not len(rejected):
        return rows
    offsets = rows.column(table.metadata.offset).to_numpy()
    return rows.filter(pa.array(~np.isin(offsets, rejected)))


def _notes(
    table: TablePlan, batch: int, partition: Partition, opened: Opened,
    tables: Mapping[int, list[str]],
) -> pa.Table:  # fmt: skip
    index = sorted(tables)
    now = int(time.time() * 1_000_000)
    columns = [[tables[i] for i in index], [batch] * len(index), [now] * len(index)]
    rows = pa.table(
        [pa.array(values, each.type) for values, each in zip(columns, NOTE_COLUMNS, strict=True)],
        schema=NOTE_COLUMNS,
    )
    return route(
        rows, table.shape.arrow, table.metadata, partition, opened.offsets[index],
        opened.stamps[index],
    )  # fmt: skip
