"""`frazil rewind`: reset all tables of a sink, and its index, to one cut.

`preview` reports what would be removed and what forbids it; `rewind` does it. `commit.rewind_plan`
finds the possible cuts; `commit.rewind` has the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]
from pyspark.sql import SparkSession

from frazil.commit.protocol import TableCommitter
from frazil.commit.rewind import IndexRemoval, RewindSteps, fence
from frazil.commit.rewind_plan import COLUMNS, RewindPlan, TableRewind, earliest
from frazil.commit.table_schemas import writer_spec
from frazil.commit.tables import parallel_map
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.errors import ConfigError, Expired, Fatal, FrazilError, IdentityMismatch, counted
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.kafka.connection import admin_client
from frazil.kafka.planner import Planner
from frazil.ledger import index as offset_index
from frazil.ledger.sink_state import (
    REPLAY,
    announced_tables,
    property_tables,
    staged_batches,
    tables_property,
)
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Range
from frazil.ops.index_rebuild import taken_out
from frazil.render import Line, text_table

#: Number of tables shown one by one; of the rest, a sum.
_SHOWN = 50
_CALL_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class RewindReport:
    """The effect of a rewind, planned or done."""

    JSON: ClassVar = (
        "sink index to *choice position batches staged unfinished warnings refused done "
    )

    sink: str
    index: str
    to: str
    choice: RewindPlan
    position: Cut
    #: batches to remove from the index, and from the staging folder
    batches: int
    staged: int
    #: whether this rewind finishes an unfinished one
    unfinished: bool = False
    #: warnings for the operator, and errors that forbid the rewind
    warnings: tuple[str, ...] = ()
    refusals: tuple[FrazilError, ...] = field(default=(), compare=False)
    done: bool = False

    @property
    def nothing(self) -> bool:
        """Whether everything is at the cut already."""
        return not (self.choice.moves or self.batches or self.staged or self.unfinished)

    @property
    def refused(self) -> list[str]:
        return [error.message for error in self.refusals]

    def lines(self) -> Iterator[Line]:
        """Per table: the current and the target snapshot, and what is removed."""
        boundary, moves = self.choice.boundary, self.choice.moves
        rows = sum(table.rows for table in moves)
        if moves:
            yield text_table(
                f"sink {self.sink} {'went' if self.done else 'goes'} back to {boundary}",
                ("table", "snapshot now", "then", "commits", "rows", "ranges"),
                map(_cells, moves[:_SHOWN]),
                right=("commits", "rows"),
            )
        if len(moves) > _SHOWN:
            yield f"and {counted(len(moves) - _SHOWN, 'table')} more: {counted(rows, 'row')}"
        yield from (*self.choice.reasons, *self.warnings)
        for table in moves:
            yield from (f"{table.table} loses {lost}" for lost in table.foreign)
        if self.nothing:
            at = f"{boundary} {_offsets(boundary.cut)}"
            yield f"all tables of sink {self.sink} are at {at} already"
            return
        yield (
            f"{counted(rows, 'row')} of {counted(len(moves), 'table')}, "
            f"{counted(self.batches, 'batch', 'batches')} of the index and "
            f"{counted(self.staged, 'staged batch', 'staged batches')} "
            f"{'were removed' if self.done else 'would be removed'}; the stream continues "
            f"at {_offsets(boundary.cut)}"
        )


def _cells(table: TableRewind) -> tuple[str, ...]:
    ranges = [*map(str, table.ranges[:8]), *(["…"] if len(table.ranges) > 8 else [])]
    return (
        table.table if table.branch == "main" else f"{table.table} ({table.branch})",
        str(table.snapshot_now),
        "empty" if table.snapshot_then is None else str(table.snapshot_then),
        f"{table.commits:,}",
        f"{table.rows:,}",
        "\n".join(ranges),
    )


def preview(
    config: Config, spark: SparkSession, to: str, *, discard_foreign: bool = False
) -> RewindReport:
    """The plan of a rewind; claims and writes nothing."""
    return _RewindCommand(config, spark, to, discard_foreign).preview()


def rewind(
    config: Config,
    spark: SparkSession,
    to: str,
    *,
    discard_foreign: bool = False,
    on_step: Callable[[str, str], None] = lambda name, table: None,
) -> RewindReport:
    """Rewind the sink; its running processes are fenced. Raises the first refusal of `preview`.

    `on_step` gets the name of each step and its table: `claimed`, `noted`, `forked` and `moved`
    (for each table that moves), `unstaged`, `indexed`, `done`.
    """
    doing = _RewindCommand(config, spark, to, discard_foreign, on_step)
    plan = doing.preview()
    for refusal in plan.refusals:
        raise refusal
    if not plan.nothing:
        doing.run(plan)
    return replace(plan, done=True)


class _RewindCommand:
    def __init__(
        self,
        config: Config,
        spark: SparkSession,
        to: str,
        discard_foreign: bool,
        on_step: Callable[[str, str], None] = lambda name, table: None,
    ) -> None:
        self._config = config
        self._spark = spark
        self._to = to
        self._discard_foreign = discard_foreign
        self._sink = config.sink.id
        self._replay = config.sink.id + REPLAY
        self._catalog = JavaCatalog(spark, config.catalog.name)
        index = self._catalog.load(config.index_table)
        if index is None:
            raise ConfigError(
                f"cannot rewind sink {self._sink}: its index {config.index_table} does not exist"
            )
        self._index = index
        self._tables = self._open()
        self._doing = RewindSteps(
            self._sink,
            index,
            self._tables,
            rows=lambda: self._rows(self._sink),
            staged=lambda: self._stored(self._sink),
            without=self._without,
            clock=time,
            step=on_step,
        )

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def _open(self) -> dict[str, tuple[JavaTable, str]]:
        """All tables that config, index or staged batches name, each with the sink's branch."""
        config, index = self._config, self._index
        entry = TableCommitter(index, "main", self._sink, 0, time, claimed_first=True).head().entry
        if entry is None:
            raise ConfigError(
                f"cannot rewind sink {self._sink}: its index {config.index_table} has no "
                "entry of it"
            )
        known = announced_tables(entry.tables, index.properties)
        announced = property_tables(index.properties, tables_property(self._sink))
        names = [table.name for table in config.tables if "{" not in table.name]
        names += [config.dead_letters.table] if config.dead_letters else []
        names += [n for _, batch in self._stored(self._sink) if batch for n in batch.names]
        names = list(dict.fromkeys([*names, *known, *announced]))
        tables = {}
        for name, table in zip(names, parallel_map(self._catalog.load, names), strict=True):
            if table is None and name not in known:
                continue  # not created yet
            if table is None or table.uuid != known.get(name, table.uuid):
                fact = "does not exist" if table is None else "was dropped and recreated"
                raise IdentityMismatch(
                    f"cannot rewind table {name}: it {fact}", hint="restore the table"
                )
            tables[name] = table, config.branch(name)
        return tables

    def _stored(self, sink: str) -> list[tuple[str, StagedBatch | None]]:
        config = replace(self._config, sink=replace(self._config.sink, id=sink))
        return list(staged_batches(config, self._index))

    def _rows(self, sink: str) -> pa.Table:
        """The sink's current index rows, read with Spark: any storage, deletes applied."""
        self._index.refresh()
        newest = next(self._index.history("main"))
        reader = self._spark.read.option("versionAsOf", str(newest.id))
        rows = reader.table(f"{self._catalog.name}.{self._index.name}")
        return rows.where(rows.sink == sink).select(*COLUMNS).toArrow()

    def _without(self, batch: int, epoch: int) -> IndexRemoval:
        """The index files with rows of batches after `batch`, rewritten without those rows."""
        self._index.refresh()
        base, files = self._index.live()
        assert base is not None
        shape = writer_spec(self._index, TableConfig(self._index.name))

        def gone(rows: pa.Table) -> pa.ChunkedArray:
            return pc.and_(pc.equal(rows["sink"], self._sink), pc.greater(rows["batch"], batch))

        removed, left = taken_out(shape, files, gone, "rewind")
        rows = pa.concat_tables([shape.arrow.empty_table(), *left])
        if not rows.num_rows:
            return IndexRemoval(base.id, removed)
        prefix = f"frazil-{self._sink}-{epoch}-{max(0, batch)}"
        added = offset_index.put(shape, prefix, offset_index.ordered(rows))
        return IndexRemoval(base.id, removed, added)

    def _read(self) -> None:
        self._doing.read()
        #: last commit of a dead-letter replay, and the number of its staged batches
        self._replayed_at = pc.max(self._rows(self._replay)["committed_at"]).as_py()
        self._replay_staged = len(self._stored(self._replay))

    # ── planning ─────────────────────────────────────────────────────────────────────────────

    def preview(self) -> RewindReport:
        doing = self._doing
        self._read()
        note, to = doing.state.note, self._to
        if note is not None and note.to != to:
            raise ConfigError(
                f"cannot rewind to {to}: a rewind to {note.to} is unfinished",
                hint=f"finish the other one first: --to '{note.to}'",
            )
        stream = doing.state.timeline
        start = stream.at(note.batch) if note is not None else stream.named(to)
        choice = doing.choice(start)
        number = choice.boundary.batch
        refusals = list(self._refusals(choice))
        if to.startswith("batch:") and note is None and choice.reasons:
            refusals.insert(
                0,
                ConfigError(
                    f"cannot rewind to {to}: {'; '.join(choice.reasons)}",
                    hint=f"the nearest boundary below is --to batch:{number}",
                ),
            )
        later = stream.rows.filter(pc.greater(stream.rows["batch"], number))
        return RewindReport(
            sink=self._sink,
            index=self._index.name,
            to=to,
            choice=choice,
            position=doing.state.entry.end,
            batches=pc.count_distinct(later["batch"]).as_py(),
            staged=doing.state.staged,
            unfinished=note is not None,
            warnings=tuple(self._warnings(choice)),
            refusals=tuple(refusals),
        )

    def _refusals(self, choice: RewindPlan) -> Iterator[FrazilError]:
        where = f"cannot rewind sink {self._sink} to {choice.boundary}"
        if choice.trouble:
            yield Fatal(f"{where}: {choice.trouble}", hint="see `frazil audit`")
        if choice.expired:
            names = ", ".join(table.table for table in choice.expired[:4])
            yield Expired(f"{where}: snapshots of {names} were expired", hint=self._instead(choice))
        if reason := self._replayed(choice):
            yield Fatal(f"{where}: {reason}", hint=self._instead(choice))
        elif choice.foreign and not self._discard_foreign:
            table = next(table for table in choice.tables if table.foreign)
            yield IdentityMismatch(
                f"{where}: table {table.table} would lose "
                f"{counted(len(table.foreign), 'commit')} of others, as {table.foreign[0]}",
                hint="--discard-foreign removes them; or choose a later cut",
            )
        if lost := self._lost(choice):
            yield Expired(
                f"{where}: Kafka no longer has {', '.join(map(str, lost[:4]))}; they would be lost",
                hint=self._instead(choice),
            )

    def _replayed(self, choice: RewindPlan) -> str:
        """Why a replay of dead letters forbids the rewind; empty if none does. It may have written
        rows, or replayed dead letters, that the rewind would remove."""
        if any(lost.sink == self._replay for lost in choice.foreign):
            return "dead letters were replayed into its tables after that"
        if self._replay_staged:
            return "a replay of dead letters was staged and not committed"
        since = min((table.since_ms for table in choice.tables if table.since_ms), default=None)
        if since is None or self._replayed_at is None:
            return ""
        if self._replayed_at >= datetime.fromtimestamp(since / 1000, timezone.utc):
            return (
                "dead letters were replayed after that; they may belong to batches that "
                "would be removed"
            )
        return ""

    def _lost(self, choice: RewindPlan) -> list[Range]:
        """The ranges to read again that Kafka no longer has."""
        if not self._config.kafka:
            return []
        end, kept = self._doing.state.entry.end, self._first_kept
        gone = {key: min(offset, kept.get(key, offset)) for key, offset in end.items()}
        cut = Cut({p: o for p, o in choice.boundary.cut.items() if p != BATCHES})
        return [Range(key, o, gone[key]) for key, o in cut.items() if o < gone[key]]

    @cached_property
    def _first_kept(self) -> Cut:
        """The first offsets that Kafka still has."""
        planner = Planner.of(self._config, self._doing.state.entry)
        _, partitions = planner.origin()
        return planner.watermarks(partitions).low

    def _instead(self, refused: RewindPlan) -> str:
        """A hint with the earliest cut that nothing forbids."""
        doing = self._doing

        def allowed(choice: RewindPlan) -> bool:
            return not self._replayed(choice) and not self._lost(choice)

        boundary = earliest(doing.state.timeline, doing.state.tables, self._sink, refused, allowed)
        if boundary is None:
            return "no later cut is possible either"
        return f"the earliest possible cut is --to batch:{boundary.batch} {_offsets(boundary.cut)}"

    def _warnings(self, choice: RewindPlan) -> Iterator[str]:
        config = self._config
        if config.sink.checkpoint_location and config.transform:
            yield (
                f"Spark's checkpoint in {config.sink.checkpoint_location} is not rewound: "
                "a stateful query needs a checkpoint of that time, or starts without "
                "state"
            )
        if choice.moves and (compacted := self._compacted()):
            yield (
                f"topic {', '.join(compacted)} is compacted: records that were compacted "
                "away since are not read again"
            )
        losers = {lost.sink for lost in choice.foreign if lost.sink}
        for sink in sorted(losers) if self._discard_foreign else ():
            yield f"sink {sink} loses records, and reports that when it starts"

    def _compacted(self) -> list[str]:
        topics = {p.kafka_topic for p in self._doing.state.entry.end.current if p != BATCHES}
        if not self._config.kafka or not topics:
            return []
        admin = admin_client(self._config.kafka.resolved())
        wanted = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        compacted = []
        for topic, answer in admin.describe_configs(wanted, request_timeout=_CALL_SECONDS).items():
            try:
                policy = answer.result()["cleanup.policy"].value
            except (KafkaException, KeyError):  # not authorized: only a warning is lost
                continue
            compacted += [topic.name] if "compact" in policy else []
        return sorted(compacted)

    # ── executing ────────────────────────────────────────────────────────────────────────────

    def run(self, plan: RewindReport) -> None:
        doing = self._doing
        self._fence_replay()
        doing.claim()
        self._read()
        choice = doing.choice(doing.state.timeline.at(plan.choice.boundary.batch))
        if choice.boundary != plan.choice.boundary:
            raise Fatal(
                f"cannot rewind sink {self._sink}: it committed in the meantime, and "
                f"{'; '.join(choice.reasons)}",
                hint="run it again",
            )
        self._refuse(choice)
        doing.run(choice, plan.to, self._refuse)

    def _refuse(self, choice: RewindPlan) -> None:
        for error in self._refusals(choice):
            raise error

    def _fence_replay(self) -> None:
        """Fence running replays of dead letters: a replay is a sink of its own."""
        target = TableCommitter(self._index, "main", self._replay, 0, time, claimed_first=True)
        entry = target.head().entry
        if entry is not None:
            known = announced_tables(entry.tables, self._index.properties)
            pairs = [pair for name, pair in self._tables.items() if name in known]
            fence(
                target,
                [TableCommitter(table, branch, self._replay, 0, time) for table, branch in pairs],
            )


def _offsets(cut: Cut) -> str:
    named = [f"{partition}@{offset}" for partition, offset in cut.items()]
    return f"({', '.join(named[:4])}{' …' if len(named) > 4 else ''})"
