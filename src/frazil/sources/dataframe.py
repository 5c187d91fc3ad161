"""Any streaming DataFrame into the table: joins, windows, state, Python, any source Spark has.

A batch is identified by the offsets of Spark's sources before and after it (`spark.checkpoint`),
and counted in a partition of its own, `BATCHES`. Where the sources are Kafka's, their ranges are in
the ledger as well.

The proof depends on the rows: if every row carries the topic, partition and offset of one record of
the batch, and no two rows the same, then every record is accounted for: written, skipped by the
query (a filter), or invisible. If rows stand for several records or for none (aggregation, join,
explode), or the source does not report which offsets held no record, the offsets count as merged:
processed in exactly this batch, and nothing more is known.

Into an upsert table the rows of a key come together in one task, by Spark's shuffle. Then records
are written if their row is the last of its key, and merged if a later one replaced it.

Leader epochs (decision 041) are those that the tasks of `frazil.read` report beside the rows. Tasks
of `format("frazil")` report none: there the leader epoch of a partition counts if it is the same
before and after the batch is read. For Spark's own Kafka source no epoch is kept.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from frazil.accounting import RangeCounts, moved_to_written
from frazil.config.model import Config
from frazil.config.sections import TableConfig, deleted_keys_table
from frazil.errors import (
    AccountingError,
    ConfigError,
    Conflict,
    Fatal,
    Gap,
    Overlap,
    SchemaMismatch,
    from_traceback,
)
from frazil.iceberg.java_errors import FAILED
from frazil.iceberg.java_spark import (
    HadoopFolder,
    group_columns,
    operators,
    refuse_unsupported,
)
from frazil.kafka.planner import TopicIdentity, kafka_only
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.pipeline.projection import NO_METADATA, MetadataColumns
from frazil.retry import Retry
from frazil.sources.base import (
    BatchRun,
    BatchSource,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TableWriteResult,
    TemporaryView,
    WriteResult,
)
from frazil.sources.query_state import QueryState, offsets_of, offsets_text
from frazil.spark.checkpoint import Checkpoint, SourceOffsets, began
from frazil.spark.read import FRAZIL, planner, reported_counts, reports_counts
from frazil.spark.tasks import OUTCOMES, ReadCounts, WriteOutcome, WritePlan, write_all
from frazil.spark.upsert_task import UpsertPlan, upsert_all

#: Rows per batch that Spark hands to Python: the number while their size is unknown, the most, and
#: the bytes to aim at, by the size of rows in the batch before.
_FIRST_ROWS, _MOST_ROWS, _HANDED_BYTES = 4_000, 10_000, 16 * 1024**2
#: Rows that a task of an upsert table should hold at most, by the number of the batch before.
_TOGETHER_ROWS = 1_000_000


@dataclass(frozen=True)
class DataFrameRun(BatchRun):
    outcomes: Sequence[WriteOutcome] = ()
    #: leader epochs in which the ranges were read, where that is certain
    leaders: Mapping[Partition, int] = field(default_factory=dict)
    #: records and offsets without one, as the tasks of `frazil.read` counted them
    counts: ReadCounts = field(default_factory=dict)


class DataFrameSource(BatchSource[DataFrameRun]):
    changes = "rows"

    def __init__(
        self, config: Config, retry: Retry, build: Callable[[SparkSession], DataFrame]
    ) -> None:
        self._config = config
        self._retry = retry
        self._build = build
        self._temporary = TemporaryView()
        #: rows and bytes of the batch before
        self._size = (0, 0)

    @property
    def output_mode(self) -> str:
        return self._config.transform.output_mode

    # ── before anything is claimed ───────────────────────────────────────────────────────────

    def identify(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        self._spark = spark
        self._frame = self._build(spark)
        table = self._config.tables[0]
        if not isinstance(self._frame, DataFrame):
            raise ConfigError(
                f"cannot write to table {table.name}: expected a DataFrame, found "
                f"{type(self._frame).__name__}"
            )
        if not self._frame.isStreaming:
            raise ConfigError(
                f"cannot write to table {table.name}: the DataFrame is not a stream",
                hint="read with spark.readStream or frazil.read; write a batch with "
                "df.writeTo(table).append()",
            )
        refuse_unsupported(self._frame, self.output_mode)
        self._query = QueryState(self._config.sink, operators(self._frame))
        self._query.refuse_settings()
        columns = _columns(self._frame, table.name)
        if table.upsert_key:
            columns = _without_deletes(columns, table)
        if self.output_mode == "update":
            self._query.refuse_vanishing_rows()
            _refuse_other_keys(group_columns(self._frame), table)
        # The columns of the DataFrame; the metadata columns are among them.
        self.columns, self.metadata = {table.name: columns}, _origin_columns(columns, table)
        self._query.refuse_no_checkpoint()
        asked = [(source, planner(source.source, source.options)) for source in self._query.sources]
        self._planners = [kafka for _, kafka in asked if kafka is not None]
        own = [(read.options, kafka) for read, kafka in asked if kafka and read.source in FRAZIL]
        self._own = [kafka for _, kafka in own]
        self._silent = [kafka for given, kafka in own if not reports_counts(given)]
        return self._origin_now()

    def check_resumable(self, reached: Callable[[], StreamPosition]) -> None:
        for left in (2, 1, 0):
            position = reached()
            try:
                if self._query.bound:
                    self._query.check_agreement(Checkpoint(self._files(), bound=True), position)
                else:
                    self._query.check_seedable(offsets_of(position))
                position.origin.check(self._origin_now())
                return
            except Fatal:
                if not left:
                    raise
                time.sleep(0.5)  # a run that is still alive may have moved on meanwhile

    def _files(self) -> HadoopFolder:
        return HadoopFolder(self._spark, self._config.sink.checkpoint_location.rstrip("/"))

    def _origin_now(self) -> TopicIdentity:
        """Identity of the topics, as far as Kafka can be asked."""
        cluster, topics = "", dict[str, str]()
        for kafka in self._planners:
            now, _ = self._retry(kafka.origin)
            if cluster and now.cluster != cluster:
                raise ConfigError(
                    f"cannot read from two Kafka clusters in one query: {cluster} and "
                    f"{now.cluster}; a ledger distinguishes topics by name",
                    hint="use a sink for each",
                )
            cluster, topics = now.cluster, {**topics, **now.topics}
        return TopicIdentity(cluster, topics)

    @property
    def stateful(self) -> bool:
        return self._query.stateful

    # ── resuming after the previous run ──────────────────────────────────────────────────────

    def resume(self, reached: StreamPosition, epoch: int) -> None:
        ledger_end = offsets_of(reached)
        if self._query.bound:
            self.checkpoint = self._config.sink.checkpoint_location.rstrip("/")
            self._log = Checkpoint(self._files(), bound=True)
            self._query.check_agreement(self._log, reached)
        else:
            self._query.check_seedable(ledger_end)
            self.checkpoint = self._temporary.folder(self._config.sink.checkpoint_location, epoch)
            self._log = Checkpoint(HadoopFolder(self._spark, self.checkpoint), bound=False)
            if ledger_end != SourceOffsets():
                self._log.seed(ledger_end, self._query.kinds)
        self._compare(kafka_only(reached.cut), reached.origin.leaders)

    @property
    def required(self) -> Mapping[str, pa.Schema]:
        return self.columns

    def _compare(self, position: Cut, epochs: Mapping[Partition, int]) -> None:
        """Raises where our own sources have lost records that were read in these epochs."""
        if epochs:
            for kafka in self._own:
                self._retry(functools.partial(kafka.compare, position, epochs))

    # ── batch by batch ───────────────────────────────────────────────────────────────────────

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame:
        return self._frame

    @property
    def paced(self) -> bool:
        return bool(self._query.reads)

    def ends(self) -> Cut:
        ends: dict[Partition, int] = {}
        for kafka in self._planners:
            ends |= kafka.watermarks(kafka.origin()[1]).end
        for source in self._query.sources:  # with `assign` only these partitions are read
            for topic, numbers in json.loads(source.options.get("assign", "{}")).items():
                ends = {p: end for p, end in ends.items() if p.topic != topic or p[1] in numbers}
        return Cut(ends)

    def close(self) -> None:
        self._temporary.remove()

    def opening(self, batch: int, reached: StreamPosition) -> WriteResult | None:
        """The beginning of the very first batch, for the ledger, before a record of it is read.

        `latest` is resolved once: should the batch fail, the next run begins at the same offsets.
        (A bound query has them in its checkpoint.)
        """
        if self._query.bound or batch or offsets_of(reached) != SourceOffsets():
            return None
        before = self._log.before(0)
        if not any(before.cut.values()):
            return None
        cut = Cut({**before.cut, BATCHES: 0})
        text = (before.text, before.text)
        nothing = {self._config.tables[0].name: TableWriteResult((), ())}
        return WriteResult(cut, cut, nothing, self._origin_now(), source=text)

    def plan(self, frame: DataFrame, batch: int, reached: StreamPosition) -> PlannedBatch | None:
        before, after = self._log.before(batch), self._log.after(batch)
        ledger_end = offsets_of(reached)
        if ledger_end.cut and not ledger_end.text and ledger_end.cut == before.cut:
            ledger_end = before  # fed by ranges so far: the ledger has no text of Spark's
        if after == ledger_end:
            # Staged by the previous run, which ended before Spark recorded the batch. Its rows are
            # staged; its state may be missing.
            if self.stateful:
                frame.write.format("noop").mode("overwrite").save()
            return None
        if before != ledger_end and (ledger_end != SourceOffsets() or batch):
            self._apart(before, after, ledger_end)
        begin, end = {**reached.cut, **began(before, after)}, {**reached.cut, **after.cut}
        ranges = [Range(p, begin[p], end[p]) for p in sorted(after.cut) if end[p] > begin[p]]
        return PlannedBatch(frame, reached, ranges, before, after)

    def run(self, plan: PlannedBatch, tables: BatchTables) -> DataFrameRun:
        name = self._config.tables[0].name
        if name in tables.refused:
            raise SchemaMismatch(f"cannot write to table {name}: {tables.refused[name]}")
        table = tables.plans[name]
        metadata = self.metadata or NO_METADATA
        event_time = table.event_time if table.event_time in plan.frame.columns else ""
        origin = (metadata.topic, metadata.partition, metadata.offset)
        write_plan = WritePlan(
            table=table.shape,
            origin=origin if metadata.offset else None,
            event_time=event_time if _is_timestamp(table.shape.arrow, event_time) else "",
            file_prefix=tables.file_prefix,
        )
        upsert_plan = None
        if table.key:
            deleted_keys = table.deleted_keys and replace(table.deleted_keys, metadata=NO_METADATA)
            plan_of_rows = replace(table, metadata=metadata, deleted_keys=deleted_keys)
            upsert_plan = UpsertPlan(plan_of_rows, write_plan, self._config.tables[0].delete_column)
        counts_before = [reported_counts(given) for given in self._query.reads]
        led_before = self._led(plan.ranges)
        try:
            outcomes = self._run(plan.frame, write_plan, upsert_plan)
        except FAILED as error:
            if not isinstance(from_traceback(str(error)), Conflict):
                raise
            # A file with versions of keys is gone; other files have its rows.
            return DataFrameRun(again=True)
        counts = [reported_counts(given) for given in self._query.reads]
        leaders = steady(led_before, self._led(plan.ranges))
        leaders |= read_leader_epochs(plan.ranges, counts_before, counts)
        every = {key: value for read in counts for key, value in read.items()}
        records = _records(plan.ranges, every)
        return DataFrameRun(records=records, outcomes=outcomes, leaders=leaders, counts=every)

    def check(
        self, plan: PlannedBatch, tables: BatchTables, run: DataFrameRun
    ) -> WriteResult | None:
        reached, ranges, outcomes = plan.position, plan.ranges, run.outcomes
        name = self._config.tables[0].name
        origin = self._origin_now()
        # A topic that was recreated between plan and fetch has other records.
        TopicIdentity(plan.after.cluster, plan.after.topics).check(origin)
        reached.origin.check(origin)
        number = reached.cut.get(BATCHES, 0)
        begin = Cut({**reached.cut, **began(plan.before, plan.after), BATCHES: number})
        leaders = self._leaders(begin, ranges, reached.origin, run.leaders)
        tallies = None
        if not self._query.holds_back and set(plan.after.cut.topics) <= set(origin.topics):
            tallies = accounted(ranges, outcomes, run.counts)
        if tallies is None:
            tallies = [RangeCounts(r, 0, merged=len(r)) for r in ranges]
        elif self._config.tables[0].upsert_key:
            tallies = [replaced_merged(tally, outcomes) for tally in tallies]
        tallies = [_timed(tally, outcomes) for tally in tallies]
        rows = sum(outcome.rows for outcome in outcomes) - sum(tally.written for tally in tallies)
        spans = [outcome.watermark for outcome in outcomes if outcome.watermark]
        span = (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else None
        tallies.append(RangeCounts(Range(BATCHES, number, number + 1), rows, watermark=span))
        written = TableWriteResult(
            tuple(tallies),
            tuple(file for outcome in outcomes for file in outcome.files),
            tuple(file for outcome in outcomes for file in outcome.deletes),
            sum(outcome.keys for outcome in outcomes),
        )
        written_tables = {name: written}
        if noted := tuple(file for outcome in outcomes for file in outcome.noted):
            notes = [RangeCounts(r, 0, merged=len(r)) for r in ranges]
            notes.append(RangeCounts(tallies[-1].range, sum(file.rows for file in noted)))
            written_tables[deleted_keys_table(name)] = TableWriteResult(tuple(notes), noted)
        return WriteResult(
            begin=begin,
            end=Cut({**reached.cut, **plan.after.cut, BATCHES: number + 1}),
            tables=written_tables,
            total=() if self._config.one_table else tuple(tallies),
            origin=TopicIdentity(origin.cluster, origin.topics, leaders),
            timings=[outcome.seconds for outcome in outcomes],
            source=(plan.before.text, plan.after.text),
        )

    def _led(self, ranges: Sequence[Range]) -> dict[Partition, int]:
        """Current leader epochs, for sources whose tasks do not report the epochs they read in."""
        partitions, epochs = [r.partition for r in ranges], dict[Partition, int]()
        for kafka in self._silent if partitions else ():
            epochs |= self._retry(functools.partial(kafka.led, partitions))
        return epochs

    def _leaders(
        self,
        begin: Cut,
        ranges: Sequence[Range],
        known: TopicIdentity,
        epochs: Mapping[Partition, int],
    ) -> dict[Partition, int]:
        """The leader epochs for the ledger after a batch that was read in `epochs`. Where they
        differ from the known ones, records read before must still be in the log: it may have lost
        them since the batch was planned, and no later comparison would notice."""
        passed = [r.partition for r in ranges]
        changed = {p: known.leaders[p] for p in passed if p in known.leaders}
        self._compare(begin, {p: e for p, e in changed.items() if epochs.get(p) != e})
        return {**known.without(passed).leaders, **epochs}

    def _run(
        self, frame: DataFrame, plan: WritePlan, upsert_plan: UpsertPlan | None
    ) -> list[WriteOutcome]:
        # Numbered: PySpark looks columns up by name there, and takes a backtick for a quote.
        names = tuple(frame.columns)
        numbered = frame.toDF(*(f"c{i}" for i in range(len(names))))
        write: Callable[..., Iterator[pa.RecordBatch]] = functools.partial(
            write_all, plan, names=names
        )
        if upsert_plan is not None:
            # By the values of the key: equal ones meet in one task, which holds all of its rows.
            parts = max(
                frame.sparkSession.sparkContext.defaultParallelism,
                -(-self._size[0] // _TOGETHER_ROWS),
            )
            key = [f"c{names.index(name)}" for name in upsert_plan.table.key]
            numbered = numbered.repartition(parts, *key)
            write = functools.partial(upsert_all, upsert_plan, names=names)
        tasks = numbered.mapInArrow(write, OUTCOMES)
        rows = _FIRST_ROWS
        if self._size[0]:
            count, size = self._size
            rows = max(1, min(_MOST_ROWS, int(_HANDED_BYTES * count / max(1, size))))
        with _handed_by(frame.sparkSession, rows):
            results = tasks.collect()
        outcomes = [WriteOutcome.load(row.outcome) for row in results]
        for outcome in outcomes:
            for files, count in ((outcome.files, outcome.rows), (outcome.deletes, outcome.keys)):
                if (in_files := sum(file.rows for file in files)) != count:
                    raise AccountingError(
                        f"cannot stage a batch: a task had {count} rows, {in_files} in its files"
                    )
        if handed := sum(outcome.given or outcome.rows for outcome in outcomes):
            self._size = handed, sum(outcome.bytes for outcome in outcomes)
        return outcomes

    def _apart(
        self, before: SourceOffsets, after: SourceOffsets, ledger_end: SourceOffsets
    ) -> None:
        kind = Overlap if ledger_end.cut and ledger_end.cut.reaches(before.cut) else Gap
        raise kind(
            f"cannot continue: the batch goes from {offsets_text(before)} to "
            f"{offsets_text(after)}; the ledger of sink {self._config.sink.id} ends at "
            f"{offsets_text(ledger_end)}",
            hint="the checkpoint or a source was changed while the query was stopped; see "
            "`frazil audit`",
        )


def steady(before: Mapping[Partition, int], after: Mapping[Partition, int]) -> dict[Partition, int]:
    """Leader epochs that are the same at both times. Epochs only grow, so the leader was the same
    in between, and records read meanwhile were in the log of that epoch."""
    return {p: epoch for p, epoch in before.items() if epoch >= 0 and after.get(p) == epoch}


def read_leader_epochs(
    ranges: Sequence[Range], earlier: Sequence[ReadCounts], later: Sequence[ReadCounts]
) -> dict[Partition, int]:
    """The leader epoch in which the last offset of each range was read, by the counts that the
    tasks of each read reported since `earlier`. None where no task reported it, or where two
    attempts or two reads reported different ones: the rows may be from either."""
    wanted = {r.partition: r for r in ranges}
    epochs: dict[Partition, set[int]] = {}
    for before, after in zip(earlier, later, strict=True):
        for key, (_, _, tries) in after.items():
            partition, start, end = Partition(key[0], key[1]), key[2], key[3]
            whole = wanted.get(partition)
            if whole is None or end != whole.end or start < whole.start:
                continue
            old = len(before[key][2]) if key in before else 0
            epochs.setdefault(partition, set()).update(tries[old:])
    return {p: min(seen) for p, seen in epochs.items() if len(seen) == 1 and min(seen) >= 0}


def accounted(
    ranges: Sequence[Range], outcomes: Sequence[WriteOutcome], counts: ReadCounts
) -> list[RangeCounts] | None:
    """The outcome of every offset, where the rows themselves prove it; None where they do not."""
    written = {r.partition: np.zeros(len(r), bool) for r in ranges}
    starts = {r.partition: r.start for r in ranges}
    for outcome in outcomes:
        if outcome.carried is None:
            return None
        for partition, offsets in outcome.carried.items():
            bits, start = written.get(partition), starts.get(partition, 0)
            if bits is None or offsets[0] < start or offsets[-1] >= start + len(bits):
                return None  # a row of another batch: held back by a join, or made up
            if bits[offsets - start].any():
                return None  # an offset that another task wrote as well
            bits[offsets - start] = True
    tallies = []
    for planned in ranges:
        bits = written[planned.partition]
        count = int(bits.sum())
        seen = np.flatnonzero(bits)[[0, -1]] + planned.start if count else None
        invisible = _invisible(planned, counts)
        if invisible is None and count == len(planned):
            invisible = 0  # nothing but records, and all of them written
        if invisible is None or count + invisible > len(planned):
            return None
        skipped = len(planned) - count - invisible
        span = None if seen is None else (int(seen[0]), int(seen[1]))
        tallies.append(RangeCounts(planned, count, skipped=skipped, invisible=invisible, seen=span))
    return tallies


def replaced_merged(tally: RangeCounts, outcomes: Sequence[WriteOutcome]) -> RangeCounts:
    """The counts of a range in an upsert table: the records whose rows are not in its files were
    replaced by a later one of their key, or deleted it."""
    kept = sum(outcome.kept.get(tally.range.partition, 0) for outcome in outcomes)
    return moved_to_written(replace(tally, written=0, merged=tally.written), kept, "merged")


def _timed(tally: RangeCounts, outcomes: Sequence[WriteOutcome]) -> RangeCounts:
    """The counts with the event times of their partition's rows, where rows carry the partition."""
    candidates = [outcome.watermarks.get(tally.range.partition) for outcome in outcomes]
    spans = [span for span in candidates if span]
    if not spans:
        return tally
    return replace(tally, watermark=(min(s[0] for s in spans), max(s[1] for s in spans)))


def _records(ranges: Sequence[Range], counts: ReadCounts) -> dict[Partition, int]:
    planned = {span.partition: span for span in ranges}
    records: dict[Partition, int] = {}
    for (topic, number, start, end), (delivered, _, _) in counts.items():
        span = planned.get(partition := Partition(topic, number))
        if span is not None and span.start <= start and end <= span.end:
            records[partition] = records.get(partition, 0) + delivered
    return records


def _invisible(wanted: Range, counts: ReadCounts) -> int | None:
    """Offsets of a range that held no record, by the tasks' counts of its pieces; None where these
    do not cover it. Other queries may have read other pieces of the same topic."""
    pieces = {
        start: (end, absent)
        for (topic, number, start, end), (_, absent, _) in counts.items()
        if Partition(topic, number) == wanted.partition and end <= wanted.end
    }
    at, invisible = wanted.start, 0
    while at < wanted.end:
        if at not in pieces:
            return None
        at, absent = pieces[at]
        invisible += absent
    return invisible


@contextmanager
def _handed_by(session: SparkSession, rows: int) -> Iterator[None]:
    """Spark hands over `rows` rows per batch, or fewer where the user configured fewer.

    Its limit by bytes is suspended meanwhile: to keep it, Spark asks each vector for its size after
    every row, which takes longer than everything else together.
    """
    by_bytes = "spark.sql.execution.arrow.maxBytesPerBatch"
    by_rows = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = {key: session.conf.get(key) for key in (by_bytes, by_rows)}
    most = int(before[by_rows] or 0)
    session.conf.set(by_bytes, str(2**31 - 1))
    session.conf.set(by_rows, str(min(rows, most) if most > 0 else rows))
    try:
        yield
    finally:
        for key, value in before.items():
            if value is not None:
                session.conf.set(key, value)


def _is_timestamp(columns: pa.Schema, name: str) -> bool:
    return name in columns.names and pa.types.is_timestamp(columns.field(name).type)


def _columns(frame: DataFrame, table: str) -> pa.Schema:
    """The DataFrame's columns in Arrow's types; raises for one that Iceberg has no type for."""
    columns = []
    for spark_field in frame.schema:
        try:
            [column] = to_arrow_schema(type(frame.schema)([spark_field]))
        except (PySparkException, TypeError, ValueError):
            column = None
        lacking = column is None or pa.types.is_null(column.type)
        if (
            lacking
            or pa.types.is_duration(column.type)
            or "variant" in spark_field.dataType.typeName()
        ):
            raise SchemaMismatch(
                f"cannot write to table {table}: column {spark_field.name!r} is "
                f"{spark_field.dataType.simpleString()}, which Iceberg has no type for",
                hint=f"cast it, or leave it out: .drop({spark_field.name!r})",
            )
        columns.append(column)
    return pa.schema(columns)


def _without_deletes(columns: pa.Schema, table: TableConfig) -> pa.Schema:
    """The columns of an upsert table: those of the rows, without the one that marks deletes."""
    doing, known = f"cannot upsert into table {table.name}", ", ".join(columns.names)
    for name, key in ((table.delete_column, "delete_column"), *((k, "key") for k in table.key)):
        if name and name not in columns.names:
            raise ConfigError(
                f"{doing}: the rows have no column {name!r} for its {key}; they have {known}"
            )
    if not table.delete_column:
        return columns
    number = columns.get_field_index(table.delete_column)
    if not pa.types.is_boolean(columns.field(number).type):
        raise ConfigError(
            f"{doing}: delete_column {table.delete_column!r} is {columns.field(number).type}; "
            "expected a boolean",
            hint="an expression makes one: op = 'd' AS deleted",
        )
    return columns.remove(number)


def _refuse_other_keys(groups: Sequence[Sequence[str]] | None, table: TableConfig) -> None:
    """Refuse a key that is not that of the groups: rows of other groups would be replaced, or
    former rows of the same group stay."""
    if groups is None:
        return
    key, held = set(table.key), {name for group in groups for name in group}
    if key <= held and all(key & set(group) for group in groups):
        return
    shown = ", ".join(group[0] if group else "(a group without a column)" for group in groups)
    raise ConfigError(
        f"cannot upsert into table {table.name} by {', '.join(table.key)}: in output mode update "
        f"the key is the columns that hold the groups; expected {shown or 'at least one group'}",
        hint="an expression of a group may be the same for two groups: group by the expression",
    )


def _origin_columns(columns: pa.Schema, table: TableConfig) -> MetadataColumns:
    names = (table.topic_column, table.partition_column, table.offset_column)
    expected = (pa.types.is_string, pa.types.is_int32, pa.types.is_int64)
    if all(
        name in columns.names and fits(columns.field(name).type)
        for name, fits in zip(names, expected, strict=True)
    ):
        stamp = table.timestamp_column
        timed = stamp in columns.names and (
            not table.upsert_key or pa.types.is_timestamp(columns.field(stamp).type)
        )
        return MetadataColumns(*names, stamp if timed else "")
    return NO_METADATA
