"""One micro-batch, step by step; the first file to read; the Python API.

    sink = Sink(config)
    query = sink.start(spark)      # an ordinary StreamingQuery
    sink.wait_until(cut)           # every offset below `cut` is in the table, and in the index
    sink.stop()                    # after the batch in progress; staged batches get committed

Structured Streaming drives it. The source (`frazil.sources`) provides the input: offset ranges,
where nothing stands between topic and table, or the rows of any streaming DataFrame. `_batch` below
does the rest: the source writes the files and checks them against the plan, the sink stages them
and submits them to the committer, which works beside the next batch. Every step has a name; a
callback `on_step` can watch, time, or kill at a step.

The table is the checkpoint. Each run of a sink begins from the ledgers and the staged batches
(`start`). Spark's own checkpoint is made anew for each run and never read back, unless the query
keeps state in it (`sources.dataframe`); then it must agree with the ledger.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from frazil.commit.committer import BackpressureLimits, Committer, Located, Progress
from frazil.commit.tables import SinkTable, parallel_map, writer_spec
from frazil.config.checks import check_stream
from frazil.config.model import Config, load
from frazil.config.sections import AUTO, AVAILABLE_NOW, NEVER, TableConfig, remembered, replayed
from frazil.config.units import duration, size
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    FrazilError,
    IdentityMismatch,
    PythonWorkerUnavailable,
    SchemaMismatch,
    Unavailable,
    counted,
    encode_for_spark,
)
from frazil.files.writer import WriterSpec
from frazil.iceberg.java import JavaCatalog, JavaTable
from frazil.kafka.planner import publish
from frazil.kafka.range_source import BatchGathering
from frazil.ledger import completeness, index, staged_batch
from frazil.ledger.completeness import CompletenessCallback, CompletenessTracker
from frazil.ledger.sink_state import REPLAY
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.maintenance.rewrite_data_files import RewriteDataFiles
from frazil.maintenance.tasks import (
    ExpireSnapshots,
    MaintenanceTask,
    RewriteIndexFiles,
    advice,
    retention,
)
from frazil.offsets import Cut, Partition
from frazil.pipeline.chunk import TablePlan, needed
from frazil.pipeline.isolation import StationFailed, noticing
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.upsert import remembered_columns, remembered_order
from frazil.pipeline.versions import VersionLookup
from frazil.sources.base import BatchSource, StreamPosition, TableWriteResult, WriteResult
from frazil.sources.dataframe import DataFrameSource
from frazil.sources.intervention import InterventionSource
from frazil.sources.kafka import KafkaSource
from frazil.spark.query import Running, translated
from frazil.spark.read import transformed
from frazil.spark.session import session
from frazil.startup import Recovered, Startup

T = TypeVar("T")

#: The steps of a batch, in order. Crash tests kill at each of them.
STEPS = (
    "planned",
    "written",
    "staged",
    "commit",
    "committed",
    "witnessed",
    "index-commit",
    "index-committed",
    "index-witnessed",
    "done",
)

_STOP_SECONDS = 60.0
_CALL_SECONDS = 10.0  # for a callback under way when the sink stops
_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling a batch: "
    "java.lang.InterruptedException"
)

#: Sinks that stream in this process: one id, one stream.
_running: dict[tuple[str, str, str], Sink] = {}


@dataclass(frozen=True, slots=True)
class Step:
    """A named moment of a batch."""

    name: str
    batch: int
    at: float  # seconds since 1970
    #: rows of its tables, without dead letters and the rows of `_deleted` tables
    records: int = 0
    seconds: Mapping[str, float] | None = None
    skipped: int = 0
    #: kind of rejected records → their number, and position and reason of the last one
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)


class Run(StreamingQuery):
    """A running sink: Spark's own handle, except that its end means: everything is committed.

    As a context manager it stops the sink at the end of the block.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def _jsq(self) -> Any:
        return self._sink.running.query._jsq

    @property
    def isActive(self) -> bool:
        return self._sink.running.active

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Until the stream has ended and its staged batches are committed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended():
            if self._sink.committer.failure is not None:
                raise self._sink.committer.failure
            if deadline is not None and time.monotonic() > deadline:
                return False
        self._sink.stop()
        if self._sink.committer.failure is not None:
            raise self._sink.committer.failure
        if waiting := len(self._sink.committer.pending):
            raise Unavailable(
                f"cannot end: {counted(waiting, 'batch', 'batches')} staged and not committed: "
                f"{self._sink.committer.progress.trouble or 'the time was up'}",
                hint="nothing is lost: the next run commits them",
            )
        return None if timeout is None else True

    def _ended(self) -> bool | None:
        try:
            return super().awaitTermination(0.25)  # type: ignore[arg-type]
        except PySparkException as error:
            return self._sink.restarts(error)

    def processAllAvailable(self) -> None:
        """Until everything available now is committed."""
        with self._sink.gathering.hurried():
            done = 0
            while done < 2:  # the first may rest on a plan from before the hurry
                try:
                    super().processAllAvailable()
                    done += 1
                except PySparkException as error:
                    self._sink.restarts(error)
        if not self._sink.committer.flush():
            raise self._sink.committer.stalled() or Unavailable("cannot commit all that is staged")

    def stop(self) -> None:
        """After the batch in progress; staged batches are committed, or wait for the next run."""
        self._sink.stop()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_caught_up(self, timeout: float | None = None) -> bool:
        """Block until every record that is in the topics now is committed; False when the time is
        up. Raises the error that stopped the stream."""
        return self._sink.wait_until(self._sink.ends(), timeout)

    def wait_until(
        self,
        cut: Mapping[Partition, int] | Mapping[str, Mapping[int, int]],
        timeout: float | None = None,
    ) -> bool:
        """Block until every offset below `cut` is committed, `{"orders": {0: 5000}}`; False when
        the time is up."""
        nested = any(isinstance(offsets, Mapping) for offsets in cut.values())
        return self._sink.wait_until(Cut.of(cut) if nested else cut, timeout)  # type: ignore[arg-type]

    @property
    def position(self) -> Cut:
        """Everything below it is committed, in the tables and in the index."""
        return self._sink.position

    @property
    def complete_until(self) -> datetime | None:
        return self._sink.complete_until

    @property
    def progress(self) -> Progress:
        """Commits so far, and what holds them up."""
        return self._sink.committer.progress

    def check(self) -> None:
        """Raise the error that stopped the stream, if one did."""
        self._sink.check()


class Sink:
    def __init__(
        self,
        config: Config,
        *,
        frame: DataFrame | None = None,
        feed: Callable[[Sink], BatchSource] | None = None,
        on_step: Callable[[Step], None] | None = None,
        on_complete: Callable[[datetime], object] | None = None,
    ) -> None:
        """`frame`: a streaming DataFrame to write; without it, the stream of the config, or the
        source that `feed` makes. `on_complete` is called with the time until which the stream is
        complete, at the start and then whenever that crosses an hour; on a thread of its own, and
        again where it raises."""
        self.config = config
        self._frame = frame
        self._on_step = on_step or (lambda _: None)
        self._on_complete = on_complete
        self._caller: CompletenessCallback | None = None
        self._complete_until: int | None = None
        self._alone = config.one_table
        #: a DataFrame's sources cannot gather: there Spark's trigger has to do
        self.gathering = BatchGathering(0.0 if frame is not None else config.gather)
        self._feed: BatchSource
        if feed is not None:
            self._feed = feed(self)
        elif frame is not None:
            if config.transform:
                raise ConfigError(
                    "cannot write a DataFrame with a [transform]: transform it, or "
                    "start the sink without it"
                )
            if not config.one_table:
                raise ConfigError(
                    "cannot write a DataFrame with [[route]] or [dead_letters]: its "
                    "rows go to one table"
                )
            self._feed = DataFrameSource(self, lambda _: frame)
        else:
            check_stream(config)
            if config.transform:
                self._feed = DataFrameSource(
                    self, lambda spark: transformed(spark, config, self.gathering)
                )
            else:
                self._feed = KafkaSource(self)
        keyed = [table.name for table in config.tables if table.key]
        if keyed and (
            type(self._feed) is not KafkaSource and not isinstance(self._feed, InterventionSource)
        ):
            raise ConfigError(
                f"cannot write to table {keyed[0]}: only records that come straight from Kafka "
                "have keys that are upserted or logged",
                hint="leave out what stands between topic and table, or use mode append",
            )
        self._kafka = config.kafka.resolved()
        self._reached = StreamPosition()
        self._between_batches = threading.Lock()
        self._ending = threading.Lock()
        self._started = False
        self._stopping = False
        self._stopped = False
        self._running: Running | None = None
        self._index_shape: WriterSpec | None = None
        self._spent: list[str] = []
        self._copied: list[tuple[str, str]] = []
        #: tables whose columns another writer changed
        self._changed: set[str] = set()
        self._number = 0
        self._untold: list[Located] = []
        self._told_with = ""

    # ── startup ──────────────────────────────────────────────────────────────────────────────

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
        if until is not None and not isinstance(self._feed, KafkaSource):
            raise ConfigError("cannot stop at a cut: a DataFrame's sources plan by themselves")
        if self._started:
            raise ConfigError(
                f"cannot start sink {self.config.sink.id} a second time",
                hint="every run needs a Sink of its own",
            )
        self._started = True
        key = self._alone_here()
        staged = self._begin(spark)
        writer = self._writer(spark, until)
        # Our own source plans one batch after the other, within its limits; Spark's trigger would
        # take the end of the first batch for the end of the data.
        by_itself = self.config.sink.trigger == AVAILABLE_NOW and self._feed.paced
        ends = self.ends() if by_itself else None
        try:
            if self._on_complete is not None:
                self._caller = CompletenessCallback(self._on_complete)
                if self._complete_until is not None:
                    self._caller.tell(self._complete_until)  # the previous run may have died before
            self._committer.start()
            for batch in staged:
                self._committer.submit(batch, bounded=False)
            self._running = Running(
                writer.start(),
                lambda: self.patiently(lambda: self._writer(spark, until)).start(),
                patience=duration(self.config.sink.unavailable_timeout),
                blocked=partial(setattr, self._committer.progress, "blocked"),
            )
        except BaseException as error:
            self._committer.close()
            self._feed.close()
            self.gathering.close()
            if self._caller is not None:
                self._caller.close(0)
            if isinstance(error, PySparkException):
                raise translated(error) from None
            raise
        _running[key] = self
        if ends is not None:
            threading.Thread(
                target=self._end_at, args=(ends,), name="frazil-available-now", daemon=True
            ).start()
        return Run(self)

    def _writer(self, spark: SparkSession, until: Cut | None) -> DataStreamWriter:
        """For a query from the sink's position; the query before it has ended, with its batch."""
        self._resume()
        writer = (
            self._feed.stream(spark, until)
            .writeStream.foreachBatch(self._guarded_batch)
            .queryName(f"frazil-{self.config.sink.id}-{self.epoch}")
            .option("checkpointLocation", self._feed.checkpoint)
        )
        if self.config.sink.trigger == AVAILABLE_NOW and not self._feed.paced:
            return writer.trigger(availableNow=True)
        return writer.trigger(processingTime=f"{int(self._pause() * 1000)} milliseconds")

    def _pause(self) -> float:
        """Seconds between two polls of the sources by Spark."""
        trigger = self.config.sink.trigger
        if trigger == AVAILABLE_NOW:
            return 0.1
        if trigger != AUTO:
            return duration(trigger)
        # Our own source gathers by itself and is polled for a batch; others are polled when one is
        # due.
        pause = self.config.gather
        return max(0.2, min(1.0, pause / 10) if self._frame is None else pause)

    def once(self, spark: SparkSession, counts_on: str = "") -> Sequence[StagedBatch]:
        """A run of one batch, without a query. Returns the batches that an earlier run left staged.

        Those are committed before the batch is read, because it may be read from their tables. It
        may also be read from the table `counts_on`, which must be as the ledger knows it.
        """
        self._alone_here()
        staged = self._begin(spark, counts_on)
        self._committer.start()
        try:
            for batch in staged:
                self._committer.submit(batch, bounded=False)
            self._commit_all()
            self._resume()
            self._batch(self._feed.stream(spark, None), 0)
            self._commit_all()
        except PySparkException as error:
            raise translated(error) from None
        finally:
            self._committer.close()
            self._feed.close()
        return staged

    def _resume(self) -> None:
        with self._life.telling():
            self._feed.resume(self._reached, str(self.epoch))

    def _alone_here(self) -> tuple[str, str, str]:
        """The sink's key in `_running`; raises where an active sink of this process has it."""
        key = (self.config.catalog.name, self.config.index_table, self.config.sink.id)
        if key in _running and _running[key].active:
            raise ConfigError(
                f"cannot start sink {self.config.sink.id}: this process runs a sink of that id "
                "already",
                hint="stop that one first, or give this one another id",
            )
        return key

    def look(self, spark: SparkSession, tables: Iterable[str] = ()) -> None:
        """Open the existing tables, and `tables`: nothing is claimed, nothing can be written."""
        self._open(spark)
        self._life.look(spark, tables)

    def _open(self, spark: SparkSession) -> None:
        self._catalog = JavaCatalog(spark, self.config.catalog.name)
        self._life = Startup(self.config, self._catalog, self._feed)
        self._tables = self._life.tables

    def _begin(self, spark: SparkSession, counts_on: str = "") -> Sequence[StagedBatch]:
        """Take over from the previous run: its staged batches are the first to be committed."""
        self._open(spark)
        self._life.claim(spark)
        self.patiently(self._life.widen_index)
        left = self._life.recover()
        if counts_on in self._tables.amiss:
            raise self._tables.amiss[counts_on]
        self._recall(spark)
        self._take_over(left)
        self._spent += left.useless
        self._unstage([])
        return left.staged

    def _commit_all(self) -> None:
        if not self._committer.flush(duration(self.config.sink.unavailable_timeout)):
            raise self._committer.stalled() or Unavailable(
                f"cannot end: {counted(len(self._committer.pending), 'batch', 'batches')} staged "
                "and not committed: "
                f"{self._committer.progress.trouble or 'the time was up'}",
                hint="nothing is lost: the next run commits them",
            )

    @property
    def active(self) -> bool:
        return self._running is not None and self._running.active and not self._stopping

    @property
    def running(self) -> Running:
        assert self._running is not None
        return self._running

    def restarts(self, error: PySparkException) -> bool:
        """False, after a pause, where a query that ended with `error` is restarted; else raises."""
        reason = translated(error)
        failure = self.running.failure
        if failure is not None or not isinstance(reason, PythonWorkerUnavailable):
            raise failure or reason from None
        time.sleep(0.05)
        return False

    def _end_at(self, ends: Cut) -> None:
        """Like Spark's own trigger: everything up to `ends`, and the batch without data that closes
        the windows which the last records allow to close."""
        try:
            self.wait_until(ends)
            batch = self._number
            while self._feed.stateful and self._number == batch and self.running.active:
                status = self.running.query.status
                if not status["isTriggerActive"] and not status["isDataAvailable"]:
                    break
                time.sleep(0.05)
            self.stop()
        except FrazilError:
            if self._committer.failure is None:
                self.stop()  # a table waits for an operator: end the query

    def _recall(self, spark: SparkSession) -> None:
        """Until when the stream is complete, and the marks of its partitions, from the index's
        rows.

        (A replay of dead letters is no stream: its event times say nothing about later events.)
        """
        rules = completeness.CompletenessRules.of(self.config.completeness)
        apart, sink = self.config.dead_letters.table, self.config.sink.id
        self._judge = None if sink.endswith(REPLAY) else CompletenessTracker(rules, apart)
        if self._judge is None or self._life.index.made:
            return
        rows = self.patiently(lambda: self._life.index_rows(completeness.COLUMNS))
        marks, self._complete_until = completeness.recalled(rows, rules, apart)
        self._judge = CompletenessTracker(rules, apart, marks, self._complete_until)

    def _take_over(self, left: Recovered) -> None:
        self._reached, self._number, self._untold = left.reached, left.number, left.untold
        interval = duration(self.config.sink.commit_interval)
        self._committer = Committer(
            target=self._tables.target,
            index=self._life.target,
            index_manifests=self._index_manifests,
            tables=lambda: self._tables.said(self._life.handle()),
            committed=self._after_commit,
            indexed=self._complete,
            position=left.position,
            pace=lambda name: self._tables.pace(name, interval),
            alone=self._alone,
            bounds=BackpressureLimits(
                self.config.sink.max_pending_batches,
                size(self.config.sink.max_pending_bytes),
                duration(self.config.sink.max_pending_age),
            ),
            step=lambda name, batch: self._step(name, batch.number if batch else -1),
            tidy=self._tidy,
        )
        table = self._life.handle()
        upkeep = RewriteIndexFiles(
            table,
            sink=self.config.sink.id,
            epoch=self.epoch,
            shape=lambda: writer_spec(table, TableConfig(table.name)),
            prefix=lambda: self.prefix,
            history=duration(self.config.sink.index_snapshot_retention),
            step=lambda name: self._step(name, self._number),
            clock=time,
        )
        #: maintenance tasks of each table, the index first
        self._keepers: dict[str, list[MaintenanceTask]] = {table.name: [upkeep]}

    # ── the tables ───────────────────────────────────────────────────────────────────────────

    def check_fits(self, columns: pa.Schema, metadata: MetadataColumns) -> None:
        self._tables.check(self.config.tables[0].name, columns, metadata)

    def shape(
        self, columns: pa.Schema, metadata: MetadataColumns, among: MetadataColumns | None = None
    ) -> WriterSpec:
        """For the only table of a DataFrame, whose columns include the metadata."""
        name = self.config.tables[0].name
        made = self._provide(name, columns, metadata, among)
        self._move_in([made] if made else [])
        return writer_spec(
            self._tables[name].table, self._tables[name].config, (among or metadata).topic
        )

    def provide(self, needs: Mapping[str, pa.Schema]) -> None:
        """The one place where tables change: on the driver, between two runs of a batch."""
        for name in sorted(needs.keys() - self._tables.held.keys()):
            # A conflict with the config is refused before the first table is created.
            if name in self._tables.names:
                with suppress(SchemaMismatch), _making(name):
                    self._tables.check(name, needs[name], self._tables.metadata(name))
        held, names = self._tables.held, self._tables.names
        ours = {self.config.dead_letters.table, replayed(self.config.dead_letters.table)}
        ours |= {name for name in (*needs, *held) if self._tables.remembers(name)}
        room = self.config.sink.max_tables - len(held.keys() - ours)
        from_data = sorted(needs.keys() - {*held, *names, *ours})
        beyond = from_data[max(0, room) :]  # the plan of the next run has no room for them
        wanted = sorted(needs.keys() - set(beyond))

        def attempt(name: str) -> SinkTable | None:
            try:
                with _making(name):
                    return self._provide(name, needs[name], self._tables.metadata(name))
            except (SchemaMismatch, IdentityMismatch, ConfigError) as error:
                if self._alone or (isinstance(error, ConfigError) and name in names):
                    raise
                self._tables.refused[name] = error.message
                return None

        self._move_in([made for made in parallel_map(attempt, wanted) if made is not None])

    def _provide(
        self,
        name: str,
        columns: pa.Schema,
        metadata: MetadataColumns,
        among: MetadataColumns | None = None,
    ) -> SinkTable | None:
        """The table, if it had to be created."""
        if name in self._tables:
            # A JSON object that lacks a field implies nothing about the next: nothing becomes
            # optional.
            relax = self.config.decode.format != "json"
            self.patiently(lambda: self._tables.fit(name, columns, metadata, relax))
            return None
        return self.patiently(
            lambda: self._tables.make(name, columns, metadata, among or metadata, self.epoch)
        )

    def _move_in(self, made: Sequence[SinkTable]) -> None:
        """Claim tables that were just created, or raise if a newer run has begun.

        A newer run claims the index first, and then all tables that the config or the index names.
        So a table name from the data is recorded in the index before this run checks whether it is
        still the newest: either the newer run finds the name and claims the table, or this run sees
        its claim. For the same reason a table that this run created itself needs no claim.
        """
        if not made:
            return
        others = [held for held in made if not held.table.made]
        for held in others:  # one known to the index was found and claimed at startup
            self._life.refuse_unknown(held)
        if any(held.table.name not in self._tables.names for held in made):
            self.patiently(lambda: self._tables.announce(self._life.index))
        self.patiently(self._life.still_newest)
        for held in others:
            self._tables.refuse_shared(held, self._life.origin.topics)
            self._life.take_table(held)

    def plans(self) -> dict[str, TablePlan]:
        well = [name for name in self._tables.held if name not in self._tables.amiss]
        ours = [name for name in well if not self._tables.remembers(name)]
        plans = {name: self._tables.plan(name) for name in ours}
        for name, plan in list(plans.items()):
            if plan.order and not self.config.sink.id.endswith(REPLAY):  # which upserts nothing
                if memory := self._memory(plan):
                    plans[name] = replace(plan, memory=memory)
                else:
                    plans.pop(name)
        return plans

    def _memory(self, plan: TablePlan) -> TablePlan | None:
        """The table of keys deleted from this one, created or evolved for its keys; None where that
        is not possible: then records of this one are refused."""
        name, columns = remembered(plan.shape.name), remembered_columns(plan)
        existing = self._tables.plan(name).columns if name in self._tables else pa.schema([])
        if any(
            column.name not in existing.names or existing.field(column.name).type != column.type
            for column in columns
        ):
            self.provide({name: needed(columns, plan.aliases)})
        if why := self.refused.get(name):
            self._tables.refused[plan.shape.name] = why
            return None
        return self._tables.plan(name)

    def known(self, table: str) -> tuple[VersionLookup, ...]:
        pending = self._committer.pending
        plan, memory = self._tables.plan(table), self._tables.plan(remembered(table))
        order = remembered_order(plan.order)
        return self.patiently(
            lambda: (
                self._tables.orders(table, plan.key, plan.order).within(plan.shape, pending),
                self._tables.orders(memory.shape.name, plan.key, order).within(
                    memory.shape, pending
                ),
            )
        )

    @property
    def refused(self) -> Mapping[str, str]:
        # A missing table is not recreated from the middle of the stream: its records become dead
        # letters, to be replayed when it is back.
        amiss = {name: error.message for name, error in self._tables.amiss.items()}
        return {**self._tables.refused, **amiss}

    @property
    def epoch(self) -> int:
        return self._life.epoch

    @property
    def number(self) -> int:
        return self._number

    # ── one batch ────────────────────────────────────────────────────────────────────────────

    def _batch(self, frame: DataFrame, number: int) -> None:
        window_start = int(time.time() * 1000)
        opening = self._feed.opening(number, self._reached)
        if opening is not None:
            self._hand_over(opening, window_start)
        self._step("planned", self._number)
        self._tables.refused.clear()
        while self._changed:
            self.patiently(partial(self._tables.renew, self._changed.pop()))
        written = self._feed.write(frame, number, self._reached)
        if written is None:
            return
        self._on_step(
            Step(
                "written",
                self._number,
                time.time(),
                written.rows(self._apart),
                written.seconds,
                written.skipped,
                written.rejected,
            )
        )
        self._hand_over(written, window_start)

    def _apart(self, table: str) -> bool:
        """Does it hold anything but rows of records?"""
        letters = self.config.dead_letters.table
        return table in (letters, replayed(letters)) or self._tables.remembers(table)

    def _hand_over(self, written: WriteResult, window_start: int) -> None:
        """Stage the batch, and leave the rest to the committer."""
        batch = self.patiently(lambda: self._stage(written, window_start))
        self._reached = StreamPosition(written.end, written.source[1], written.origin)
        self._number += 1
        if written.begin != written.end:
            self._step("staged", batch.number)
        self._committer.submit(batch)

    def _stage(self, written: WriteResult, window_start_ms: int) -> StagedBatch:
        """Files into a manifest, the manifest into a batch record: durable, not yet visible.

        File names are unique per attempt. Files left by a failed attempt cannot collide with this
        one; `frazil orphans` removes them.
        """
        commit_id = str(uuid.uuid4())
        tables = parallel_map(
            lambda item: self._staged_table(*item, commit_id), list(written.tables.items())
        )
        batch = StagedBatch(
            sink=self.config.sink.id,
            epoch=self.epoch,
            number=self._number,
            commit_id=commit_id,
            begin=written.begin,
            end=written.end,
            topics=written.origin.topics,
            cluster=written.origin.cluster,
            staged_at_ms=int(time.time() * 1000),
            window_start_ms=window_start_ms,
            source=written.source,
            tables=tuple(tables),
            total=written.total,
            note=written.note,
            leaders=written.origin.leaders,
        )
        self._life.index.store(
            f"{self._life.stage_folder}{batch.file_name}", staged_batch.dump(batch)
        )
        return batch

    def _staged_table(self, name: str, written: TableWriteResult, commit_id: str) -> StagedTable:
        table = self._tables[name].table
        manifests, paths = [], []
        for number, files in enumerate((written.files, written.deletes)):
            if files:
                path = table.metadata_path(f"{self.prefix}-{commit_id}-m{number}.avro")
                manifests.append(table.write_manifest(path, [f.descriptor for f in files]))
                paths.append(path)
        return StagedTable(
            name=name,
            uuid=table.uuid,
            schema_id=table.schema_id,
            manifests=tuple(manifests),
            paths=tuple(paths),
            files=len(written.files) + len(written.deletes),
            bytes=sum(file.bytes for file in (*written.files, *written.deletes)),
            tallies=written.tallies,
            keys=written.keys,
        )

    # ── called by the committer ──────────────────────────────────────────────────────────────

    def _index_manifests(self, located: Sequence[Located]) -> list[str]:
        table = self._life.handle()
        if self._index_shape is None:
            self._index_shape = writer_spec(table, TableConfig(table.name))
        first = located[0][0].commit_id
        if self._told_with not in ("", first):
            self._untold = []  # written with the batch before this one
        self._told_with = first
        until = None
        if self._judge is not None:
            now = int(time.time() * 1_000_000)
            until = self._judge.tell([batch for batch, _ in located], self._known_ends, now)
        try:
            files = index.write(self._index_shape, self.prefix, [*self._untold, *located], until)
        except OSError as error:  # of the store
            raise Unavailable(f"cannot write to the index {table.name}: {error}") from None
        except pa.ArrowException as error:
            raise SchemaMismatch(f"cannot write to the index {table.name}: {error}") from None
        return files

    def _known_ends(self) -> Cut:
        """The current ends, if known: otherwise no partition counts as read to its end."""
        try:
            return self._feed.ends()
        except FrazilError:
            return Cut()

    def _complete(self, batches: Sequence[StagedBatch]) -> None:
        """The batches are in the index, with the time until which the stream is complete."""
        self._untold = []
        if self._judge is None:
            return
        before, now = self._complete_until, self._judge.committed(batches)
        self._complete_until = now
        if self._caller is not None and now is not None and completeness.crossed(before, now):
            self._caller.tell(now)

    def _after_commit(self, batches: Sequence[StagedBatch]) -> None:
        self._unstage(batches)
        for staged in {table.name: table for batch in batches for table in batch.tables}.values():
            handle = self._tables[staged.name].target.table  # as the commit has seen it
            assert isinstance(handle, JavaTable)
            if handle.schema_id != staged.schema_id:
                self._changed.add(staged.name)
        if not self._kafka:
            return
        try:
            publish(self._kafka, self.config.group, batches[-1].end)
            self._committer.progress.unpublished = ""
        except Unavailable as error:  # a courtesy to Kafka's lag tools; the position is the table's
            self._committer.progress.unpublished = error.message

    def _unstage(self, batches: Sequence[StagedBatch]) -> None:
        """Delete their batch records, and manifests whose files a row delta has listed anew; where
        that fails, later.

        No guard is asked. A batch record is in the stage folder, and no table refers to it. A batch
        with deleted keys has delete files (its counts were checked against them), so its commit was
        a row delta, which writes manifests of its own: the staged ones are in no snapshot.
        """
        for batch in batches:
            self._spent.append(f"{self._life.stage_folder}{batch.file_name}")
            self._copied += [(t.name, path) for t in batch.tables if t.keys for path in t.paths]
        try:
            while self._spent:
                self._life.target.table.delete(self._spent[0])
                self._spent.pop(0)
            while self._copied:
                name, path = self._copied[0]
                if name in self._tables:
                    self._tables[name].target.table.delete(path)
                self._copied.pop(0)
        except FrazilError as error:
            self._committer.progress.untidy = error.message

    def _tidy(self) -> float | None:
        """Table maintenance, after each commit to the index and when a task is due. No failure in
        it stops the stream."""
        for name, held in list(self._tables.held.items()):
            if name not in self._keepers:
                self._keepers[name] = self._keepers_of(name, held)
        troubles = []
        for name, keepers in self._keepers.items():
            for keeper in keepers if name not in self._tables.amiss else ():
                try:
                    troubles.append(keeper.tidy())
                except Exception as error:
                    troubles.append(f"cannot look after {name}: {type(error).__name__}: {error}")
        if any(troubles) or not (self._spent or self._copied):
            self._committer.progress.untidy = "; ".join(filter(None, troubles))
        moments = [keeper.again for keepers in self._keepers.values() for keeper in keepers]
        return min((moment for moment in moments if moment is not None), default=None)

    def _keepers_of(self, name: str, held: SinkTable) -> list[MaintenanceTask]:
        config, table = held.config, held.target.table  # the committer's own handle
        assert isinstance(table, JavaTable)
        common: dict[str, Any] = {
            "sink": self.config.sink.id,
            "epoch": self.epoch,
            "branch": config.branch,
            "step": lambda name: self._step(name, self._number),
            "clock": time,
        }
        tasks: list[MaintenanceTask] = []
        replaced = bool(config.upsert_key)
        if (replaced or self._tables.remembers(name)) and config.compact_after_commits:
            tasks.append(
                RewriteDataFiles(
                    table,
                    **common,
                    shape=lambda: writer_spec(table, config, held.metadata.topic),
                    prefix=lambda: self.prefix,
                    after=config.compact_after_commits,
                    counted="deletes" if replaced else "data",
                )
            )
        if config.snapshot_retention != NEVER:
            tasks.append(
                ExpireSnapshots(
                    table,
                    **common,
                    retention=partial(retention, config.snapshot_retention),
                    position=lambda: self.position,
                )
            )
        return tasks

    # ── waiting and ending ───────────────────────────────────────────────────────────────────

    @property
    def position(self) -> Cut:
        """Everything below it is committed, in the table and in the index."""
        return self._committer.progress.position

    @property
    def complete_until(self) -> datetime | None:
        """Every event before it is committed, unless one is later than `[completeness]` allows;
        None where nothing is known yet."""
        return None if self._complete_until is None else completeness.moment(self._complete_until)

    @property
    def untold(self) -> str:
        """The error of `on_complete`, until a later call succeeds."""
        return self._caller.trouble if self._caller else ""

    @property
    def advice(self) -> list[str]:
        """Suggestions for the owner of tables that existed before the sink."""
        held = {
            name: (sink_table.config.snapshot_retention, sink_table.table.properties)
            for name, sink_table in self._tables.held.items()
        }
        return advice(held)

    @property
    def committer(self) -> Committer:
        return self._committer

    @property
    def catalog(self) -> JavaCatalog:
        return self._catalog

    def ends(self) -> Cut:
        """The current end of the topics."""
        return self._feed.ends()

    def wait_until(
        self,
        cut: Mapping[Partition, int],
        timeout: float | None = None,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Block until every offset below `cut` is committed; False when the time is up, or when
        `unless`, called every now and then, returns true.

        Raises the error of the stream, if it stopped first.
        """
        with self.gathering.hurried():
            return self._wait_until(cut, timeout, unless)

    def _wait_until(
        self, cut: Mapping[Partition, int], timeout: float | None, unless: Callable[[], bool]
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._committer.wait_until(cut, 0.25):
            if unless():
                return False
            self.check()
            if not self.active and not self._committer.pending:
                return False  # available-now, and its end lies before the cut
            if self._reached.cut.reaches(cut):
                done = self._committer.flush(0.25)
                if timeout is None and not done and (stalled := self._committer.stalled()):
                    raise stalled  # nothing else would report it
            elif self._reached.cut.after(self._feed.untold()).reaches(cut):
                return True  # nothing but invisible offsets: there is nothing to commit
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    def check(self) -> None:
        """Raise the error that stopped the stream, as one of our own."""
        if self._committer.failure is not None:
            raise self._committer.failure
        if (error := self.running.failure) is not None:
            raise error
        ends_by_itself = self.config.sink.trigger == AVAILABLE_NOW and not self._stopped
        if not self.running.active and not ends_by_itself:
            raise FrazilError("cannot go on: the stream was stopped")

    def stop(self, timeout: float = 60.0) -> None:
        """After the batch in progress; staged batches are committed, or wait for the next run."""
        with self._ending:  # a second caller waits for the first
            if self._stopped or self._running is None:
                return
            self._stopped = True
            self._committer.hurry()
            with self._between_batches:
                self._stopping = True  # a batch that is called from here on is refused
            self._running.stop()  # not under the lock: it waits for a batch that may wait for it
            try:
                if self._committer.failure is None:
                    self._committer.flush(timeout)
            finally:
                self._committer.close()
                self._feed.close()
                self.gathering.close()
                if self._caller is not None:
                    self._caller.close(min(timeout, _CALL_SECONDS))

    # ── helpers ──────────────────────────────────────────────────────────────────────────────

    def _guarded_batch(self, frame: DataFrame, number: int) -> None:
        with self._between_batches:
            if not self._stopping:
                try:
                    return self._batch(frame, number)
                except PySparkException as error:
                    raise encode_for_spark(translated(error)) from None
                except FrazilError as error:
                    raise encode_for_spark(error) from None
        # Returning would make Spark record the batch as done. It takes this message for its own
        # interruption, once it has been asked to stop.
        deadline = time.monotonic() + _STOP_SECONDS
        while self._running and self._running.query.isActive and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError(f"{_INTERRUPTED}: the sink was stopped")

    def patiently(self, call: Callable[[], T]) -> T:
        """Retry while storage or brokers are unavailable; a batch is not lost for that."""
        deadline = time.monotonic() + duration(self.config.sink.unavailable_timeout)
        pause = 0.2
        while True:
            try:
                return call()
            except (Unavailable, CommitStateUnknown) as error:
                if self._stopping or time.monotonic() > deadline:
                    raise
                if hasattr(self, "_committer"):
                    self._committer.progress.blocked = error.message
                time.sleep(pause)
                pause = min(5.0, pause * 2)

    @property
    def prefix(self) -> str:
        """The file name prefix of the batch in progress: sink, epoch and batch number."""
        return f"frazil-{self.config.sink.id}-{self.epoch}-{self._number}"

    def _step(
        self,
        name: str,
        batch: int,
        records: int = 0,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._on_step(Step(name, batch, time.time(), records, seconds))


@contextmanager
def _making(table: str) -> Iterator[None]:
    """Unforeseen errors over the columns of records become a mismatch of this table alone."""
    try:
        with noticing():
            yield
    except StationFailed as error:
        raise SchemaMismatch(
            f"cannot make or change table {table} for its records: {error}"
        ) from error
