"""Kafka straight into the tables: Spark gets ranges, and the records never enter its JVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from frazil.config.messages import nearest
from frazil.config.model import Config
from frazil.errors import ConfigError, SchemaMismatch, Undecodable
from frazil.formats import schema_sample
from frazil.iceberg.java_spark import HadoopFolder
from frazil.kafka.planner import Planner, TopicIdentity, kafka_only
from frazil.kafka.range_source import FORMAT, BatchGathering, options
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline.isolation import StepFailed
from frazil.pipeline.task import DEAD_LETTER_COLUMNS, RangeResult, run
from frazil.retry import Retry
from frazil.sources.base import (
    BatchSource,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TemporaryView,
    WriteResult,
)
from frazil.sources.batch_plans import BatchPlans, missing_tables
from frazil.sources.range_results import KafkaRun, write_result
from frazil.sources.range_tasks import RangeTasks
from frazil.spark.checkpoint import Checkpoint, SourceOffsets
from frazil.spark.read import register


class KafkaSource(BatchSource[KafkaRun]):
    """Plans batches of offset ranges, has their tasks run, and checks the results."""

    paced = True
    changes = "records"

    def __init__(self, config: Config, retry: Retry, gathering: BatchGathering) -> None:
        self._config = config
        self._retry = retry
        self._gathering = gathering
        self._kafka = config.kafka.resolved()
        self._plans = BatchPlans(config, self._kafka)
        self._tasks = RangeTasks(config)
        #: results of batches without a visible record and without a table
        self._carried: list[RangeResult] = []
        #: the next records when the run resumed, for `sample`
        self._next: Sequence[Range] = ()
        self._origin = TopicIdentity()
        self._leaders: Mapping[Partition, int] = {}
        #: source offsets after the last written batch
        self._last_offsets: dict[int, SourceOffsets] = {}
        self._temporary = TemporaryView()

    # ── before anything is claimed ───────────────────────────────────────────────────────────

    @property
    def fixed_columns(self) -> Mapping[str, pa.Schema]:
        return self._plans.fixed_columns

    def template(self, table: str) -> str:
        return self._plans.template(table)

    def identify(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        self._planner = Planner.of(self._config, entry)
        self._origin, _ = self._planner.origin()
        return self._origin

    def start(self, position: Cut) -> Cut:
        return Cut(
            {
                **position,
                **self._planner.start(kafka_only(position), self._config.sink.starting_offsets),
            }
        )

    # ── resuming after the previous run ──────────────────────────────────────────────────────

    def resume(self, reached: StreamPosition, epoch: int) -> None:
        self._carried, self._last_offsets = [], {}  # of an earlier query; read again from `reached`
        self._reached = kafka_only(reached.cut)
        self._leaders = reached.origin.leaders
        self._planner.learn(reached.origin)
        _, partitions = self._planner.origin()
        self._planner.require(self._reached, self._planner.watermarks(partitions))
        self._next = [
            Range(r.partition, r.start, min(r.end, r.start + schema_sample.RECORDS))
            for r in self._planner.waiting(self._reached, schema_sample.RECORDS)
        ]
        self.checkpoint = self._temporary.folder(self._config.sink.checkpoint_location, epoch)

    @property
    def required(self) -> Mapping[str, pa.Schema]:
        table = self._config.dead_letters.table
        return {table: DEAD_LETTER_COLUMNS} if table else {}

    def sample(self, tables: BatchTables) -> Mapping[str, pa.Schema]:
        if self._plans.rules is not None and self._plans.rules.wants_rows:
            # A user function may kill its process: a worker, never the driver.
            return {}
        self._refuse_unknown_fields(tables)
        plan = self._plans.plan(tables)
        try:
            return missing_tables([run(plan, r, dry=True) for r in self._next])
        except StepFailed:
            return {}  # it fails in a task as well, where the record at fault is found

    def _refuse_unknown_fields(self, tables: BatchTables) -> None:
        """Before the only table is created: a field that its select names, and the records' newest
        schema lacks, is a misspelled one. (Later it may be one that was removed.)"""
        config, format = self._config, schema_sample.format_of(self._config)
        table = config.tables[0]
        plan = self._plans.selects.get(table.name)
        if plan is None or config.routes or table.name in tables.plans or format.kind == "json":
            return
        with suppress(SchemaMismatch, Undecodable):
            columns = schema_sample.columns(config, self._kafka, format, self._next)
            known = columns.names if columns is not None else ()
            unknown = sorted(plan.selection.fields - {*known, "_op"}) if known else []
            if unknown:
                raise ConfigError(
                    f"cannot create table {table.name}: its select names the field {unknown[0]!r}, "
                    f"which the records do not have{nearest(unknown[0], known)}",
                    path=("table", "0", "select"),
                )

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame:
        register(spark)
        self._plans.parallelism = spark.sparkContext.defaultParallelism
        source = options(
            self._config,
            start=self._reached,
            origin=TopicIdentity(self._origin.cluster, self._origin.topics, self._leaders),
            parallelism=self._plans.parallelism,
            until=until,
            gathering=self._gathering,
        )
        return spark.readStream.format(FORMAT).options(**source).load()

    def ends(self) -> Cut:
        _, partitions = self._planner.origin()
        return self._planner.watermarks(partitions).end

    def carried(self) -> list[Range]:
        return [result.total.range for result in self._carried]

    def close(self) -> None:
        self._temporary.remove()

    # ── batch by batch ───────────────────────────────────────────────────────────────────────

    def plan(self, frame: DataFrame, batch: int, reached: StreamPosition) -> PlannedBatch | None:
        """The ranges that Spark planned for the batch, from its offset log. Tasks that read them as
        rows of the source would cost more than a small batch."""
        log = Checkpoint(HadoopFolder(frame.sparkSession, self.checkpoint), bound=False)
        before, after = self._last_offsets.get(batch - 1) or log.before(batch), log.after(batch)
        self._last_offsets = {batch: after}
        self._origin = TopicIdentity(after.cluster, after.topics)
        # A new partition enters the cut, with its first offset, one batch before it is read.
        ranges = [
            Range(p, before.cut[p], offset)
            for p, offset in after.cut.items()
            if p in before.cut and offset > before.cut[p]
        ]
        return PlannedBatch(frame, reached, ranges, before, after)

    def run(self, plan: PlannedBatch, tables: BatchTables) -> KafkaRun:
        tasks = partial(self._tasks.run, plan.frame.sparkSession, plan.ranges)
        run = self._plans.run(plan, tables, tasks)
        return replace(run, records=_records(plan, run))

    def check(self, plan: PlannedBatch, tables: BatchTables, run: KafkaRun) -> WriteResult | None:
        results = [*self._carried, *run.results]
        if not results:
            return None  # a cut that only named new partitions
        if self._config.one_table and not tables.plans:
            self._carried = results  # invisible offsets, no table yet: recorded with the next batch
            return None
        run = replace(run, results=results)
        written = write_result(self._config, run, plan.position, self._origin)
        # A topic that was recreated between plan and fetch has other records.
        self._origin.check(self._retry(lambda: self._planner.origin()[0]))
        self._carried = []
        return written


def _records(plan: PlannedBatch, run: KafkaRun) -> dict[Partition, int]:
    counts = dict.fromkeys((planned.partition for planned in plan.ranges), 0)
    for result in run.results:
        total = result.total
        counts[total.range.partition] += len(total.range) - total.invisible
    return counts
