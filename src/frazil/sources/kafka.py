"""Kafka straight into the tables: Spark gets ranges, and the records never enter its JVM."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession

from frazil.accounting import RangeCounts, by_partition, for_table, miscounted, moved_to_written
from frazil.config.model import Config
from frazil.config.sections import TableConfig, deleted_keys_table, replayed
from frazil.config.units import duration, transform_of
from frazil.errors import (
    AccountingError,
    Conflict,
    Overlap,
    TooManyRejected,
    Unwritable,
    counted,
    from_traceback,
)
from frazil.files.writer import DataFileDescriptor, discard
from frazil.formats import schema_sample
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.java_errors import FAILED
from frazil.iceberg.java_spark import HadoopFolder
from frazil.kafka.planner import Planner, TopicIdentity, kafka_only, split, tasks
from frazil.kafka.range_source import FORMAT, BatchGathering, options
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition, Range, join
from frazil.pipeline.isolation import StationFailed
from frazil.pipeline.needs import add_need
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import NewTable
from frazil.pipeline.task import (
    DEAD_LETTER_COLUMNS,
    BatchPlan,
    EndedRange,
    Handed,
    RangeResult,
    UpsertOutcome,
    apply_all,
    run,
    run_all,
)
from frazil.pipeline.upsert import ShuffleBlock, UpsertResult, parts_of, shared
from frazil.retry import Retry
from frazil.sources.base import (
    BatchRun,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TableWriteResult,
    TemporaryView,
    WriteResult,
    added,
)
from frazil.spark.checkpoint import Checkpoint, SourceOffsets
from frazil.spark.read import register

#: With fewer rejected records `max_fraction` does not apply: a quiet stream has batches of one
#: record.
_FEW = 100


@dataclass(frozen=True)
class KafkaRun(BatchRun):
    results: Sequence[RangeResult] = ()
    #: of upsert tables: files of rows and deletes
    upserts: Mapping[str, UpsertResult] = field(default_factory=dict)


class KafkaSource:
    paced = True
    stateful = False
    upserts = True

    #: columns are known only from records, and the sink adds those of the metadata
    columns: Mapping[str, pa.Schema] = MappingProxyType({})
    metadata: MetadataColumns | None = None

    def __init__(self, config: Config, retry: Retry, gathering: BatchGathering) -> None:
        self._config = config
        self._retry = retry
        self._gathering = gathering
        self._kafka = self._config.kafka.resolved()
        self._format: RecordFormat = schema_sample.format_of(self._config)
        self._key_format = schema_sample.key_format_of(self._config)
        self._parallelism = 1
        self._rules = self._made_rules() if self._config.routes else None
        self._carried: list[RangeResult] = []
        #: the next records when the run resumed, for `sample`
        self._next: Sequence[Range] = ()
        #: changes of the batch in progress could not be written together
        self._isolating = False
        #: upsert tables in which several tasks of a batch changed the same key: this run shuffles
        #: their changes by key
        self._scattered: set[str] = set()
        self._origin = TopicIdentity()
        self._leaders: Mapping[Partition, int] = {}
        self.checkpoint = ""
        #: source offsets after the last written batch
        self._places: dict[int, SourceOffsets] = {}
        self._temporary = TemporaryView()

    # ── before anything is claimed ───────────────────────────────────────────────────────────

    def _made_rules(self) -> RoutingRules:
        names = [table.name for table in self._config.tables]
        reserved = [self._config.index_table]
        if table := self._config.dead_letters.table:
            reserved += [table, replayed(table)]
        reserved += map(deleted_keys_table, self._config.versioned_tables)
        rules = RoutingRules(self._config.routes, names, reserved=reserved)
        for module in rules.travelling:
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        return rules

    def _others(self) -> Iterable[str]:
        """Tables named by the data that this source does not hold itself."""
        return ()

    def template(self, table: str) -> str:
        """The `[[table]]` that a table was created from."""
        return self._rules.template(table) if self._rules else table

    def look(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        self._planner = Planner(
            self._kafka,
            topics=self._config.sink.topics,
            pattern=self._config.sink.topic_pattern,
            origin=TopicIdentity.of(entry) if entry else TopicIdentity(),
        )
        self._origin, _ = self._planner.origin()
        return self._origin

    def start(self, position: Cut) -> Cut:
        return Cut(
            {
                **position,
                **self._planner.start(kafka_only(position), self._config.sink.starting_offsets),
            }
        )

    def check_resumable(self, reached: Callable[[], StreamPosition]) -> None: ...

    # ── resuming after the previous run ──────────────────────────────────────────────────────

    def resume(self, reached: StreamPosition, epoch: int) -> None:
        self._carried, self._places = [], {}  # of an earlier query; read again from `reached`
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
        if self._rules is not None and self._rules.wants_rows:
            # A user function may kill its process: a worker, never the driver.
            return {}
        plan = self._plan(tables)
        try:
            return _missing([run(plan, r, dry=True) for r in self._next])
        except StationFailed:
            return {}  # it fails in a task as well, where the record at fault is found

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame:
        register(spark)
        self._parallelism = spark.sparkContext.defaultParallelism
        source = options(
            self._config,
            start=self._reached,
            origin=TopicIdentity(self._origin.cluster, self._origin.topics, self._leaders),
            parallelism=self._parallelism,
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

    def opening(self, batch: int, reached: StreamPosition) -> WriteResult | None:
        return None  # the claim names it

    def plan(self, frame: DataFrame, batch: int, reached: StreamPosition) -> PlannedBatch | None:
        """The ranges that Spark planned for the batch, from its offset log. Tasks that read them as
        rows of the source would cost more than a small batch."""
        log = Checkpoint(HadoopFolder(frame.sparkSession, self.checkpoint), bound=False)
        before, after = self._places.get(batch - 1) or log.before(batch), log.after(batch)
        self._places = {batch: after}
        self._origin = TopicIdentity(after.cluster, after.topics)
        self._isolating = False
        # A new partition enters the cut, with its first offset, one batch before it is read.
        ranges = [
            Range(p, before.cut[p], offset)
            for p, offset in after.cut.items()
            if p in before.cut and offset > before.cut[p]
        ]
        return PlannedBatch(frame, reached, ranges, before, after)

    def run(self, plan: PlannedBatch, tables: BatchTables) -> KafkaRun:
        try:
            done = self._run(plan, tables)
        except FAILED as error:
            failure = from_traceback(str(error))
            if isinstance(failure, Unwritable) and not self._isolating:
                self._isolating = True  # once more, in parts, to find the records at fault
            elif not isinstance(failure, Conflict):
                raise
            # On a conflict: a file to look keys up in is gone, others have its rows.
            return KafkaRun(again=True)
        return replace(done, missing=_missing(done.results))

    def check(self, plan: PlannedBatch, tables: BatchTables, run: KafkaRun) -> WriteResult | None:
        results = [*self._carried, *run.results]
        if not results:
            return None  # a cut that only named new partitions
        if self._config.one_table and not tables.plans:
            self._carried = results  # invisible offsets, no table yet: recorded with the next batch
            return None
        written = self._checked(replace(run, results=results), plan.position)
        self._carried = []
        return written

    def _plan(self, tables: BatchTables) -> BatchPlan:
        plans = dict(tables.plans)
        dead_letters = plans.pop(self._config.dead_letters.table, None)
        if self._rules is not None:
            named = {table.name for table in self._config.tables if "{" not in table.name}
            notes = replayed(self._config.dead_letters.table)
            made = {*plans, *self._others()} - named - {notes}
            room = max(0, self._config.sink.max_tables - len(named) - len(made))
            self._rules = self._rules.again(sorted({*made, *tables.refused} - named), room)
        return BatchPlan(
            kafka=self._kafka,
            format=self._format,
            tables=plans,
            keyed={table.name: table.mode for table in self._config.tables if table.key},
            key_format=self._key_format,
            new={table.name: _new(table) for table in self._config.tables},
            buckets=self._parallelism,
            parts=parts_of(self._config.sink.max_records_per_trigger, self._parallelism),
            rules=self._rules,
            only=self._config.tables[0].name,
            dead_letters=dead_letters,
            refused=tables.refused,
            file_prefix=tables.file_prefix,
            batch=tables.number,
            patience=duration(self._config.sink.unavailable_timeout),
            client=self._config.sink.kafka_client == "librdkafka",
            isolating=self._isolating,
        )

    def _run(self, planned: PlannedBatch, tables: BatchTables) -> KafkaRun:
        spark, pieces = planned.frame.sparkSession, self._pieces(planned.ranges)
        plan = self._plan(tables)
        cut = len(pieces) > len(planned.ranges)  # then several tasks may have the same key
        keyed = {name for name, table in plan.tables.items() if table.key}
        apart = {name for name in keyed if plan.tables[name].partitioned_by_key}
        plan = replace(plan, together=frozenset((keyed if cut else self._scattered) - apart))
        outcomes = self._collect(spark, plan, pieces)
        if scattered := _shared(plan, outcomes) - apart:
            # Tasks wrote rows of the same key independently: discard all, and run again by key.
            _discard(plan, outcomes)
            self._scattered |= scattered
            again = replace(plan, together=plan.together | scattered)
            outcomes = self._collect(spark, again, pieces)
        upserts: dict[str, UpsertResult] = {}
        for outcome in outcomes:
            if isinstance(outcome, UpsertOutcome):
                known = upserts.get(outcome.table)
                upserts[outcome.table] = known + outcome.done if known else outcome.done
        upserts |= {
            deleted_keys_table(name): done.noted for name, done in upserts.items() if done.noted
        }
        results = [
            result
            for outcome in outcomes
            if isinstance(outcome, EndedRange)
            for result in outcome.results
        ]
        return KafkaRun(results=results, upserts=upserts)

    def _pieces(self, ranges: Sequence[Range]) -> list[Range]:
        by_key = any(table.partitioned_by_key for table in self._config.tables)
        return split(
            ranges,
            # One task for each Kafka partition, so that a task sees all records of a key.
            most=sys.maxsize if by_key else self._config.sink.max_records_per_task,
            parallelism=1 if by_key else self._parallelism,
        )

    def _collect(
        self, spark: SparkSession, plan: BatchPlan, pieces: Sequence[Range]
    ) -> list[EndedRange | UpsertOutcome]:
        if not pieces:
            return []
        ranges = spark.sparkContext.parallelize(pieces, tasks(pieces, self._parallelism))
        handed = ranges.mapPartitions(functools.partial(_tasks, plan))
        if plan.together:
            # All changes of a key come together in one task of a second stage.
            handed = handed.partitionBy(plan.buckets, _bucket).mapPartitions(
                functools.partial(apply_all, plan)
            )
        outcomes = [
            outcome for _, outcome in handed.collect() if not isinstance(outcome, ShuffleBlock)
        ]
        done = [outcome for outcome in outcomes if isinstance(outcome, EndedRange)]
        if sorted(ended.planned for ended in done) != sorted(pieces):
            raise AccountingError(
                f"cannot stage a batch: {counted(len(pieces), 'range')} planned, {len(done)} came "
                "back"
            )
        for ended in done:
            whole = join(result.total.range for result in ended.results)
            if whole != [ended.planned]:
                raise AccountingError(
                    f"cannot stage a batch: {ended.planned} was planned, "
                    f"{', '.join(map(str, whole))} came back"
                )
        return outcomes

    def _checked(self, run: KafkaRun, before: StreamPosition) -> WriteResult:
        """Checks the arithmetic (I3), continuity with the batch before, and topic identity."""
        results, upserts = run.results, run.upserts
        for result in results:
            for name, tally in (("", result.total), *result.tallies.items()):
                files = sum(file.rows for file in result.files.get(name, ()))
                if not tally.balanced or (name and files != tally.written):
                    raise miscounted(tally, name, files)
        ordered = sorted(results, key=lambda result: result.total.range)
        self._refuse_too_many(ordered)
        ranges = join(result.total.range for result in results)
        reached = before.cut
        end = reached.after(ranges)
        last = {result.total.range.partition: result.leader for result in ordered}
        leaders = {p: e for p, e in {**before.origin.leaders, **last}.items() if e >= 0}
        begin = Cut({**{r.partition: r.start for r in ranges}, **reached})
        # A topic that was recreated between plan and fetch has other records.
        self._origin.check(self._retry(lambda: self._planner.origin()[0]))
        touched = dict.fromkeys(name for result in ordered for name in result.tallies)
        touched |= {name: None for name, done in upserts.items() if done.files}
        if self._config.one_table:
            touched = {self._config.tables[0].name: None}
        return WriteResult(
            begin,
            end,
            tables={name: _of_table(name, ordered, upserts) for name in touched},
            total=() if self._config.one_table else by_partition(r.total for r in ordered),
            origin=TopicIdentity(self._origin.cluster, self._origin.topics, leaders),
            rejected=_by_kind(ordered),
            seconds=added(
                [
                    *(result.seconds for result in results),
                    *({"write": done.seconds} for done in upserts.values()),
                ]
            ),
        )

    def _refuse_too_many(self, results: Sequence[RangeResult]) -> None:
        rejected = sum(result.total.rejected for result in results)
        read = rejected + sum(result.total.written + result.total.skipped for result in results)
        limits = self._config.dead_letters
        too_large_a_share = rejected >= _FEW and rejected > limits.max_fraction * read
        if rejected > limits.max_count or too_large_a_share:
            raise TooManyRejected(
                f"cannot go on: {rejected} of {read} records of a batch are rejected; "
                f"[dead_letters] allows {limits.max_fraction:.0%} and {limits.max_count}",
                hint="nothing of the batch was written; mend what sends or reads them, or raise "
                "max_fraction or max_count",
            )


def _tasks(plan: BatchPlan, ranges: Iterable[Range]) -> Iterator[Handed]:
    context = TaskContext.get()
    return run_all(plan, ranges, context.attemptNumber() if context else 0)


def _new(table: TableConfig) -> NewTable:
    names = (
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
    )
    terms = (
        transform_of(text, f"cannot partition table {table.name} by {text!r}")
        for text in table.partition_by
    )
    hashed = [path for path, word in terms if word.startswith(("bucket", "truncate"))]
    exact = (*table.key, *table.identifier_fields, table.version_column, *hashed)
    return NewTable(
        tuple(name for name in names if name), table.max_columns, tuple(filter(None, exact))
    )


def _shared(plan: BatchPlan, outcomes: Sequence[EndedRange | UpsertOutcome]) -> set[str]:
    """Tables in which two tasks changed the same key independently."""
    alone: dict[str, list[UpsertOutcome]] = {}
    for outcome in outcomes:
        if isinstance(outcome, UpsertOutcome) and outcome.alone:
            alone.setdefault(outcome.table, []).append(outcome)
    names = set()
    for name, upserts in alone.items():
        if pair := shared([upsert.done.hashes for upsert in upserts]):
            names.add(name)
            if plan.tables[name].partitioned_by_key:
                one, other = (upserts[i].alone for i in pair)
                raise _not_by_key(name, one, other)
    return names


def _of_table(
    name: str, ordered: Sequence[RangeResult], upserts: Mapping[str, UpsertResult]
) -> TableWriteResult:
    nothing = RangeCounts(ordered[0].total.range, 0)
    tallies = by_partition(
        result.tallies.get(name) or for_table(result.total, nothing)
        for result in ordered
        if name not in result.below
    )
    if name not in upserts:
        files = tuple(file for result in ordered for file in result.files.get(name, ()))
        return TableWriteResult(tallies, files)
    done = upserts[name]
    outcome = "skipped" if name in map(deleted_keys_table, upserts) else "merged"
    tallies = tuple(
        moved_to_written(tally, done.written.get(tally.range.partition, 0), outcome)
        for tally in tallies
    )
    rows = sum(file.rows for file in done.files)
    keys = sum(file.rows for file in done.deletes)
    if rows != sum(tally.written for tally in tallies) or keys != done.keys:
        raise miscounted(tallies[0], name, rows)
    return TableWriteResult(tallies, done.files, done.deletes, keys)


def _bucket(number: int) -> int:
    return number


def _discard(plan: BatchPlan, outcomes: Sequence[EndedRange | UpsertOutcome]) -> None:
    """Remove files that tasks wrote. `frazil orphans` finds those that cannot be removed now."""
    written: dict[str, list[DataFileDescriptor]] = {}
    for outcome in outcomes:
        if isinstance(outcome, UpsertOutcome):
            written.setdefault(outcome.table, []).extend(
                (*outcome.done.files, *outcome.done.deletes)
            )
            if outcome.done.noted:
                written.setdefault(deleted_keys_table(outcome.table), []).extend(
                    outcome.done.noted.files
                )
            continue
        for result in outcome.results:
            for name, some in result.files.items():
                written.setdefault(name, []).extend(some)
    shapes = {name: table.shape for name, table in plan.tables.items()}
    for apart in (plan.dead_letters, *plan.deleted_keys_plans):
        if apart:
            shapes[apart.shape.name] = apart.shape
    for name, files in written.items():
        discard(shapes[name], files)


def _missing(results: Sequence[RangeResult]) -> dict[str, pa.Schema]:
    missing: dict[str, pa.Schema] = {}
    for result in results:
        for name, columns in result.needs.items():
            add_need(missing, name, columns)
    return missing


def _not_by_key(table: str, one: Partition | None, other: Partition | None) -> Overlap:
    return Overlap(
        f"cannot write to table {table}: the same key came from {one} and from {other}, and "
        "partitioned_by_key says that this cannot be",
        hint="remove partitioned_by_key from the [[table]]: then records of a key are brought "
        "together before they are written",
    )


def _by_kind(results: Sequence[RangeResult]) -> dict[str, tuple[int, str]]:
    kinds: dict[str, tuple[int, str]] = {}
    for result in results:
        for kind, (count, last) in result.rejected.items():
            kinds[kind] = kinds.get(kind, (0, ""))[0] + count, last
    return kinds
