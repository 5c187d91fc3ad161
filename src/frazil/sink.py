"""One micro-batch in eight steps; the first file to read.

    1 plan     which offsets, before any record of them is read
    2 run      fetch, decode, route, fit and write them, on executors
    3 ensure   create or evolve the tables that are missing, and run again
    4 check    every planned offset has exactly one outcome
    5 stage    manifests and a batch record: durable, not visible
    6 commit   to each table, by compare-and-set     ┐
    7 tag      the commit, which protects it from expiry │ the committer, beside the next batch
    8 index    rows that tell where each offset is   ┘

`MicroBatches.run` below tells it. Structured Streaming calls it; the source (`frazil.sources`)
knows the input: offset ranges where nothing stands between topic and table, or the rows of any
streaming DataFrame. Every step has a name; a callback `on_step` can watch, time, or kill at a step.

The table is the checkpoint. Each run of a sink begins from the ledgers and the staged batches
(`commit.startup`). Spark's own checkpoint is created for each run and never read back, unless the
query keeps state in it (`sources.query_state`); then it must agree with the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from frazil.commit.commit_queue import BackpressureLimits
from frazil.commit.committer import Committer
from frazil.commit.events import SinkCommitEvents
from frazil.commit.index_writer import completeness_tracker
from frazil.commit.provisioning import TableProvisioner
from frazil.commit.recovery import Recovered
from frazil.commit.staging import Staging
from frazil.commit.startup import Startup
from frazil.config.model import Config, load
from frazil.config.sections import AVAILABLE_NOW
from frazil.config.units import duration
from frazil.errors import ConfigError, SchemaMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.kafka.range_source import BatchGathering
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut, Partition
from frazil.retry import Retry
from frazil.run import Run, RunParts, not_committed, refuse_a_second_run
from frazil.sources.base import (
    BatchRun,
    BatchSource,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    StreamState,
    WriteResult,
)
from frazil.sources.factory import refuse_keys, source_of
from frazil.sources.kafka import KafkaSource
from frazil.spark.foreach_batch import BatchGate, interrupt, with_trigger
from frazil.spark.progress import report_records
from frazil.spark.query import Running, started, translated
from frazil.spark.session import session
from frazil.steps import Step

#: How often a batch is run because tables must be created or evolved for it. Each run reports all
#: needs of all tasks, so that more than a few mean that another writer changes the tables.
_RERUNS = 8


class MicroBatches:
    """The batches of one run, one after the other, on the thread that Spark calls them on."""

    def __init__(
        self,
        source: BatchSource[Any],
        tables: TableProvisioner,
        staging: Staging,
        committer: Committer,
        *,
        stream: StreamState,
        changed: set[str],
        retry: Retry,
        on_step: Callable[[Step], None],
        report: Callable[[Mapping[Partition, int]], None] = lambda _: None,
    ) -> None:
        """`changed`: tables whose columns another writer changed, as the committer finds them;
        `report`: gets the number of records that a batch read of each partition."""
        self._source = source
        self._tables = tables
        self._staging = staging
        self._committer = committer
        self._stream = stream
        self._changed = changed
        self._retry = retry
        self._on_step = on_step
        self._report = report

    def run(self, frame: DataFrame, spark_batch_id: int) -> None:
        window_start_ms = int(time.time() * 1000)
        if opening := self._source.opening(spark_batch_id, self._stream.position):
            self._stage(opening, window_start_ms)
        plan = self._source.plan(frame, spark_batch_id, self._stream.position)  # 1
        planned = sum(span.end - span.start for span in plan.ranges) if plan else 0
        self._on_step(Step("planned", self._stream.number, time.time(), records=planned))
        if plan is None:
            return
        tables, run = self._run(plan)  # 2, 3
        result = self._source.check(plan, tables, run)  # 4
        self._report(run.records)
        if result is None:
            return
        self._on_step(result.step(self._stream.number, self._tables.holds_no_records))
        self._stage(result, window_start_ms)  # 5; 6, 7 and 8 are the committer's

    def _run(self, plan: PlannedBatch) -> tuple[BatchTables, BatchRun]:
        self._tables.renew(self._changed)
        for _ in range(_RERUNS):
            tables = self._tables.plans()
            run = self._source.run(plan, tables)  # 2
            if not run.missing and not run.again:
                return tables, run
            self._tables.ensure(run.missing)  # 3
        raise SchemaMismatch(
            f"cannot write a batch: after {_RERUNS} attempts the tables still do not fit "
            f"the records: {', '.join(sorted(run.missing))}",
            hint="another writer may be changing them",
        )

    def _stage(self, result: WriteResult, window_start_ms: int) -> None:
        batch = self._retry(lambda: self._staging.write(result, window_start_ms))
        self._stream.position = StreamPosition(result.end, result.source[1], result.origin)
        self._stream.number += 1
        if result.begin != result.end:
            self._on_step(Step("staged", batch.number, time.time()))
        self._committer.submit(batch)

    def resume(self) -> None:
        """Before a query: the source continues from the stream's position, with the tables that its
        next records need."""
        self._source.resume(self._stream.position, self._stream.epoch)
        self._tables.ensure(self._source.required)
        for _ in range(_RERUNS):
            missing = self._source.sample(self._tables.plans(versions=False))
            if not missing:
                return
            self._tables.ensure(missing)


class Sink:
    def __init__(
        self,
        config: Config,
        *,
        frame: DataFrame | None = None,
        source: Callable[[Config, Retry, BatchGathering], BatchSource[Any]] | None = None,
        on_step: Callable[[Step], None] | None = None,
        on_complete: Callable[[datetime], object] | None = None,
    ) -> None:
        """`frame`: a streaming DataFrame to write; without it, the stream of the config, or the
        source that `source` makes. `on_complete` is called with the time until which the stream is
        complete, at the start and then whenever that crosses an hour; on a thread of its own, and
        again where it raises."""
        self.config = config
        self._frame = frame
        self._on_step = on_step or (lambda _: None)
        self._on_complete = on_complete
        #: a DataFrame's sources cannot gather: there Spark's trigger has to do
        self.gathering = BatchGathering(0.0 if frame is not None else config.gather)
        self._gate = BatchGate()
        self._retry = Retry(duration(config.sink.unavailable_timeout), lambda: self._gate.closed)
        make = source or partial(source_of, frame=frame)
        self.source = make(config, self._retry, self.gathering)
        refuse_keys(config, self.source)
        self._query: Running | None = None
        self._started = False

    @classmethod
    def from_toml(
        cls,
        path: str | Path,
        *,
        on_step: Callable[[Step], None] | None = None,
        on_complete: Callable[[datetime], object] | None = None,
    ) -> Sink:
        """A sink by its TOML file, with `FRAZIL_…` environment variables over it."""
        return cls(load(path), on_step=on_step, on_complete=on_complete)

    def start(self, spark: SparkSession | None = None, *, until: Cut | None = None) -> Run:
        """Take over from the previous run, commit what it staged, and continue the stream.

        With `until` the plan ends at that cut. Without `spark` the DataFrame's session is taken,
        or one is made as the config says.
        """
        if spark is None:
            spark = session(self.config) if self._frame is None else self._frame.sparkSession
        if until is not None and not isinstance(self.source, KafkaSource):
            raise ConfigError(
                "cannot stop at a cut: the sources of a DataFrame plan their own batches"
            )
        if self._started:
            raise ConfigError(
                f"cannot start sink {self.config.sink.id} a second time",
                hint="every run needs a Sink of its own",
            )
        self._started = True
        refuse_a_second_run(self.config)
        staged = self._begin(spark)
        writer = self._writer(spark, until)
        available_now = self.config.sink.trigger == AVAILABLE_NOW
        # Our own source plans one batch after the other, within its limits; Spark's trigger would
        # take the end of the first batch for the end of the data.
        ends = self.source.ends() if available_now and self.source.paced else None
        try:
            if self._on_complete is not None:
                failed = partial(setattr, self._events.progress, "on_complete_error")
                self._events.index_writer.call(self._on_complete, failed)
            self.committer.start(staged)
            self._query = Running(
                started(writer.start),
                lambda: started(self._retry(lambda: self._writer(spark, until)).start),
                patience=duration(self.config.sink.unavailable_timeout),
                blocked=self._retry.waiting,
            )
        except BaseException as error:
            self.committer.close()
            self.source.close()
            self.gathering.close()
            self._events.index_writer.close(0)
            if isinstance(error, PySparkException):
                raise translated(error) from None
            raise
        return Run(
            self.config,
            self._query,
            self.committer,
            self.source,
            parts=RunParts(self._stream, self._gate, self.gathering, self._events),
            ends_by_itself=available_now,
            ends=ends,
        )

    def cancel(self) -> None:
        """From another thread: a start in progress gives up waiting for servers, and no batch
        begins."""
        self._gate.closed = True

    def once(self, spark: SparkSession, counts_on: str = "") -> Sequence[StagedBatch]:
        """A run of one batch, without a query. Returns the batches that an earlier run left staged.

        Those are committed before the batch is read, because it may be read from their tables. It
        may also be read from the table `counts_on`, which must be as the ledger knows it.
        """
        refuse_a_second_run(self.config)
        staged = self._begin(spark, counts_on)
        try:
            self.committer.start(staged)
            self._commit_all()
            with self._startup.explaining_missing_files():
                self._batches.resume()
            self._batches.run(self.source.stream(spark, None), 0)
            self._commit_all()
        except PySparkException as error:
            raise translated(error) from None
        finally:
            self.committer.close()
            self.source.close()
        return staged

    # ── the beginning of a run ───────────────────────────────────────────────────────────────

    def _begin(self, spark: SparkSession, counts_on: str = "") -> Sequence[StagedBatch]:
        """Take over from the previous run: its staged batches are the first to be committed."""
        catalog = JavaCatalog(spark, self.config.catalog.name)
        startup = self._startup = Startup(self.config, catalog, self.source)
        startup.claim(spark)
        self._retry(startup.widen_index)
        left = startup.recover()
        if counts_on in startup.tables.unhealthy:
            raise startup.tables.unhealthy[counts_on]
        self._assemble(spark, startup, left)
        return left.staged

    def _assemble(self, spark: SparkSession, startup: Startup, left: Recovered) -> None:
        """The parts of the run: some for the thread of the batches, some for the committer's."""
        config = self.config
        self._stream = StreamState(config.sink.id, startup.epoch, left.reached, left.number)
        events = self._events = SinkCommitEvents(
            config,
            startup,
            self._stream,
            left,
            tracker=completeness_tracker(config, startup, self._retry),
            ends=self.source.ends,
            on_step=self._on_step,
        )
        self._retry.waiting = partial(setattr, events.progress, "blocked")
        limits = BackpressureLimits.of(config.sink)
        committer = self.committer = Committer(
            events, startup.target, events.progress, limits, alone=config.one_table
        )
        among, pending = self.source.metadata, lambda: committer.pending
        provisioner = TableProvisioner(config, startup, self._stream, self._retry, among, pending)
        self._batches = MicroBatches(
            self.source,
            provisioner,
            events.staging,
            committer,
            stream=self._stream,
            changed=events.changed,
            retry=self._retry,
            on_step=self._on_step,
            report=partial(report_records, spark, self._query_name),
        )

    def _commit_all(self) -> None:
        if not self.committer.flush(duration(self.config.sink.unavailable_timeout)):
            raise self.committer.stalled() or not_committed(self.committer)

    @property
    def epoch(self) -> int:
        return self._startup.epoch

    # ── Spark's query ────────────────────────────────────────────────────────────────────────

    @property
    def _query_name(self) -> str:
        return f"frazil-{self.config.sink.id}-{self.epoch}"

    def _writer(self, spark: SparkSession, until: Cut | None) -> DataStreamWriter:
        """For a query from the stream's position; the query before it has ended, with its batch."""
        with self._startup.explaining_missing_files():
            self._batches.resume()
        writer = (
            self.source.stream(spark, until)
            .writeStream.foreachBatch(self._gated_batch)
            .queryName(self._query_name)
            .outputMode(self.source.output_mode)
            .option("checkpointLocation", self.source.checkpoint)
        )
        return with_trigger(
            writer, self.config, paced=self.source.paced, gathers=self._frame is None
        )

    def _gated_batch(self, frame: DataFrame, spark_batch_id: int) -> None:
        if not self._gate.run(self._batches.run, frame, spark_batch_id):
            interrupt(lambda: self._query is not None and self._query.query.isActive)
