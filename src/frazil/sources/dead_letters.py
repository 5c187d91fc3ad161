"""Dead letters, read back from their table and processed again.

A replay is a run of a sink of its own, `<sink>.replay`, over the same tables: one batch of the
waiting dead letters, counted in the partition `BATCHES`. Replayed dead letters are noted in a table
beside theirs, in the same batch as the rows themselves. So a dead letter is noted if and only if
its rows are committed, whatever crashes in between: a batch of an earlier replay is committed
before this one looks for dead letters without a note, and an earlier replay that is still alive is
fenced.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from frazil.accounting import RangeCounts
from frazil.config.model import Config
from frazil.config.sections import DeadLettersConfig, RouteConfig, TableConfig, replayed
from frazil.config.settings import Settings
from frazil.errors import AccountingError, ConfigError, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.kafka.planner import TopicIdentity
from frazil.kafka.range_source import BatchGathering
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.sink_state import REPLAY, known_tables
from frazil.offsets import BATCHES, Cut, Range
from frazil.pipeline.replay import (
    MOST_REPORTED,
    NOTE_COLUMNS,
    NOTES,
    OUTCOMES,
    READ,
    ReplayPlan,
    ReplayResult,
    run_all,
)
from frazil.pipeline.task import BatchPlan, RangeResult
from frazil.retry import Retry
from frazil.sources.base import (
    BatchSource,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TableWriteResult,
    WriteResult,
)
from frazil.sources.batch_plans import BatchPlans
from frazil.sources.range_results import KafkaRun

_KEY = (NOTES.topic, NOTES.partition, NOTES.offset)


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """Criteria for dead letters; an empty field selects all."""

    topics: tuple[str, ...] = ()
    partitions: tuple[int, ...] = ()
    #: half-open, as everywhere; None: no bound
    start: int | None = None
    end: int | None = None
    kinds: tuple[str, ...] = ()
    #: one of these is among the tables that rejected the dead letter
    tables: tuple[str, ...] = ()
    #: at most this many, ordered by topic, partition and offset
    limit: int | None = None

    def of(self, dead_letters: DataFrame) -> DataFrame:
        for condition in self._conditions():
            dead_letters = dead_letters.where(condition)
        if self.limit is None:
            return dead_letters
        return dead_letters.orderBy(*_KEY).limit(self.limit)

    def _conditions(self) -> Iterator[Column]:
        if self.topics:
            yield sql.col("topic").isin(list(self.topics))
        if self.partitions:
            yield sql.col("partition").isin(list(self.partitions))
        if self.start is not None:
            yield sql.col("offset") >= self.start
        if self.end is not None:
            yield sql.col("offset") < self.end
        if self.kinds:
            yield sql.col("kind").isin(list(self.kinds))
        if self.tables:
            yield sql.arrays_overlap("tables", sql.array(*map(sql.lit, self.tables)))


@dataclass(slots=True)
class ReplayReport:
    """Outcome of the selected dead letters."""

    JSON: ClassVar = "selected replayed skipped rejected rows rejected_again finished"

    #: dead letters whose rows are in their tables now
    replayed: int = 0
    #: dead letters that are now routed to no table
    skipped: int = 0
    rejected: int = 0
    #: rows of each table
    rows: dict[str, int] = field(default_factory=dict)
    #: some of the dead letters that are rejected again
    rejected_again: list[ReplayResult] = field(default_factory=list)
    #: staged by an earlier replay and committed now
    finished: int = 0
    #: tables that would be created or evolved; only of a dry run
    needs: list[str] = field(default_factory=list)

    @property
    def selected(self) -> int:
        return self.replayed + self.skipped + self.rejected


def notes_table(config: Config) -> str:
    """The table that records which dead letters were replayed."""
    if not config.dead_letters:
        raise ConfigError(
            f"cannot look for dead letters of sink {config.sink.id}: the config has none",
            hint='[dead_letters]\ntable = "…"',
        )
    return replayed(config.dead_letters.table)


def replaying(config: Config) -> Config:
    """The config of the replaying sink: another id, the same tables, and the table of notes. It
    reads nothing from Kafka."""
    notes = TableConfig(
        notes_table(config),
        topic_column=NOTES.topic,
        partition_column=NOTES.partition,
        offset_column=NOTES.offset,
        timestamp_column=NOTES.timestamp,
        schema_evolution="fail",
    )
    sink = replace(
        config.sink,
        id=config.sink.id + REPLAY,
        index_table=config.index_table,
        topics=(),
        topic_pattern="",
        checkpoint_location="",
        commit_interval="0s",
        max_tables=config.sink.max_tables + 1,
    )
    return replace(
        config,
        sink=sink,
        kafka=Settings(),
        tables=(*config.tables, notes),
        routes=config.routes or (RouteConfig(to=(config.tables[0].name,)),),
        dead_letters=DeadLettersConfig(),
    )


def read_dead_letters(spark: SparkSession, config: Config) -> DataFrame | None:
    """All dead letters; `replayed_at` is null if one waits. None: the table does not exist yet."""
    catalog = JavaCatalog(spark, config.catalog.name)
    frame = _read(spark, catalog, config.dead_letters.table)
    if frame is None:
        return None
    notes = _read(spark, catalog, notes_table(config))
    if notes is None:
        return frame.withColumns(
            {
                "replayed_at": sql.lit(None).cast("timestamp"),
                "replayed_to": sql.lit(None).cast("array<string>"),
            }
        )
    notes = notes.select(*_KEY, "replayed_at", sql.col("tables").alias("replayed_to"))
    return frame.join(notes, list(_KEY), "left")


def waiting(dead_letters: DataFrame) -> DataFrame:
    return dead_letters.where("replayed_at IS NULL")


def _read(spark: SparkSession, catalog: JavaCatalog, name: str) -> DataFrame | None:
    """The table at its newest snapshot: a session may cache an older one."""
    table = catalog.load(name)
    newest = next(iter(table.history("main")), None) if table else None
    if newest is None:
        return None
    reader = spark.read.option("versionAsOf", str(newest.id))
    return reader.table(f"{catalog.name}.{name}")


class DeadLetterSource(BatchSource[KafkaRun]):
    """The rules and tables are those of `KafkaSource`; the records come from the dead-letter
    table."""

    def __init__(
        self,
        config: Config,
        retry: Retry,
        gathering: BatchGathering,
        *,
        wanted: DeadLetterSelection,
        of: Config,
    ) -> None:
        """`config`: of the replaying sink; `of`: of the sink that wrote the dead letters."""
        self._config = of
        self._plans = BatchPlans(of, kafka={})
        self._wanted = wanted
        self._notes = notes_table(of)
        self._known: list[str] = []  # tables that the sink itself has created
        self._number = 0
        self._again: list[ReplayResult] = []
        self.outcome = ReplayReport()

    def template(self, table: str) -> str:
        return self._plans.template(table)

    def identify(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        index = JavaCatalog(spark, self._config.catalog.name).load(self._config.index_table)
        self._known = [*known_tables(index, self._config.sink.id)] if index else []
        return TopicIdentity()

    def start(self, position: Cut) -> Cut:
        return Cut({BATCHES: 0, **position})

    @property
    def required(self) -> Mapping[str, pa.Schema]:
        return {self._notes: NOTE_COLUMNS}

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame:
        """The waiting dead letters of the selection, in order within each Spark partition."""
        frame = read_dead_letters(spark, self._config)
        if frame is None:
            raise ConfigError(f"cannot replay: table {self._config.dead_letters.table} is empty")
        return self._wanted.of(waiting(frame)).select(*READ).sortWithinPartitions(*_KEY)

    def plan(self, frame: DataFrame, batch: int, reached: StreamPosition) -> PlannedBatch | None:
        self._number = reached.cut[BATCHES]
        return PlannedBatch(frame, reached)

    def run(self, plan: PlannedBatch, tables: BatchTables) -> KafkaRun:
        return self._plans.run(
            plan,
            tables,
            lambda batch: KafkaRun(results=self._replayed(plan.frame, tables, batch)),
            self._known,
        )

    def check(self, plan: PlannedBatch, tables: BatchTables, run: KafkaRun) -> WriteResult | None:
        results, reached = run.results, plan.position
        total = sum((result.total for result in results), self._nothing)
        self._count(results, total)
        if not total.written + total.skipped:
            return None
        names = sorted({name for result in results for name in result.tallies})
        return WriteResult(
            begin=reached.cut,
            end=Cut({**reached.cut, BATCHES: self._number + 1}),
            tables={name: self._of_table(name, results) for name in names},
            total=(total,),
            origin=TopicIdentity(),
            timings=[result.seconds for result in results],
        )

    def dry_run(self, frame: DataFrame, tables: BatchTables) -> ReplayReport:
        """A dry run, as far as possible without creating or evolving tables."""
        plan = self._plans.plan(tables, self._known)
        results = self._replayed(frame, tables, plan, dry=True)
        self._count(results, sum((result.total for result in results), self._nothing))
        self.outcome.needs = sorted({name for result in results for name in result.needs})
        return self.outcome

    @property
    def _nothing(self) -> RangeCounts:
        return RangeCounts(Range(BATCHES, self._number, self._number + 1), 0)

    def _replayed(
        self, frame: DataFrame, tables: BatchTables, plan: BatchPlan, dry: bool = False
    ) -> list[RangeResult]:
        plans = dict(plan.tables)
        notes = plans.pop(self._notes, None)
        if notes is None and not dry:
            why = tables.refused.get(self._notes, "it does not exist")
            raise IdentityMismatch(f"cannot record replays in table {self._notes}: {why}")
        replay = ReplayPlan(replace(plan, tables=plans), None if dry else notes, self._number)
        rows = frame.mapInArrow(functools.partial(_tasks, replay), OUTCOMES).collect()
        self._again = sorted(
            (ReplayResult(*values) for row in rows for values in json.loads(row.again)),
            key=lambda result: (result.topic, result.partition, result.offset),
        )[:MOST_REPORTED]
        return [RangeResult.of(json.loads(row.result)) for row in rows]

    def _of_table(self, name: str, ordered: Sequence[RangeResult]) -> TableWriteResult:
        results = [result for result in ordered if name in result.tallies]
        tally = sum((result.tallies[name] for result in results), self._nothing)
        files = tuple(file for result in results for file in result.files[name])
        if sum(file.rows for file in files) != tally.written:
            raise AccountingError(
                f"cannot stage a replay: {tally.written} rows were written to {name}, "
                f"{sum(file.rows for file in files)} are in its files"
            )
        return TableWriteResult((tally,), files)

    def _count(self, results: Sequence[RangeResult], total: RangeCounts) -> None:
        rows: dict[str, int] = {}
        for result in results:
            for name, tally in result.tallies.items():
                rows[name] = rows.get(name, 0) + tally.written
        noted = rows.pop(self._notes, 0)
        self.outcome = ReplayReport(total.written, total.skipped, total.rejected, rows, self._again)
        if rows and noted != total.written + total.skipped:
            raise AccountingError(
                f"cannot stage a replay: {total.written + total.skipped} dead letters "
                f"were processed, {noted} are recorded"
            )


def _tasks(replay: ReplayPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    return run_all(replay, batches, context.attemptNumber() if context else 0)
