"""Runs the ranges of a batch as Spark tasks. Runs on the driver.

One stage for append tables: a task reads a range and writes its rows. Changes of upsert tables go
through a second stage if several tasks may have changes of the same key: all changes of a key come
together in one task. Only results of successful tasks count.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pyspark import TaskContext
from pyspark.sql import SparkSession

from frazil.config.model import Config
from frazil.config.sections import deleted_keys_table
from frazil.errors import AccountingError, Overlap, counted
from frazil.files.writer import DataFileDescriptor, discard
from frazil.kafka.planner import SMALLEST_PIECE, split
from frazil.offsets import Partition, Range, join
from frazil.pipeline.task import (
    BatchPlan,
    EndedRange,
    Handed,
    UpsertOutcome,
    apply_all,
    run_all,
)
from frazil.pipeline.upsert import ShuffleBlock, UpsertResult, shared
from frazil.sources.range_results import KafkaRun


class RangeTasks:
    """The tasks of one run's batches."""

    def __init__(self, config: Config) -> None:
        self._config = config
        #: upsert tables in which several tasks of a batch changed the same key: later batches of
        #: the run shuffle their changes by key
        self._scattered: set[str] = set()

    def run(self, spark: SparkSession, ranges: Sequence[Range], plan: BatchPlan) -> KafkaRun:
        pieces = self._pieces(ranges, plan.buckets)
        cut = len(pieces) > len(ranges)  # then several tasks may have the same key
        keyed = {name for name, table in plan.tables.items() if table.key}
        apart = {name for name in keyed if plan.tables[name].partitioned_by_key}
        plan = replace(plan, together=frozenset((keyed if cut else self._scattered) - apart))
        outcomes = _collect(spark, plan, pieces)
        if scattered := _shared(plan, outcomes) - apart:
            # Tasks wrote rows of the same key independently: discard all, and run again by key.
            _discard(plan, outcomes)
            self._scattered |= scattered
            again = replace(plan, together=plan.together | scattered)
            outcomes = _collect(spark, again, pieces)
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

    def _pieces(self, ranges: Sequence[Range], parallelism: int) -> list[Range]:
        by_key = any(table.partitioned_by_key for table in self._config.tables)
        return split(
            ranges,
            # One task for each Kafka partition, so that a task sees all records of a key.
            most=sys.maxsize if by_key else self._config.sink.max_records_per_task,
            parallelism=1 if by_key else parallelism,
        )


def _collect(
    spark: SparkSession, plan: BatchPlan, pieces: Sequence[Range]
) -> list[EndedRange | UpsertOutcome]:
    if not pieces:
        return []
    ranges = spark.sparkContext.parallelize(pieces, number_of_tasks(pieces, plan.buckets))
    handed = ranges.mapPartitions(functools.partial(_tasks, plan))
    if plan.together:
        # All changes of a key come together in one task of a second stage.
        handed = handed.partitionBy(plan.buckets, _bucket).mapPartitions(
            functools.partial(apply_all, plan)
        )
    outcomes = [outcome for _, outcome in handed.collect() if not isinstance(outcome, ShuffleBlock)]
    done = [outcome for outcome in outcomes if isinstance(outcome, EndedRange)]
    if sorted(ended.planned for ended in done) != sorted(pieces):
        raise AccountingError(
            f"cannot stage a batch: {counted(len(pieces), 'range')} planned, {len(done)} returned"
        )
    for ended in done:
        whole = join(result.total.range for result in ended.results)
        if whole != [ended.planned]:
            raise AccountingError(
                f"cannot stage a batch: {ended.planned} was planned, "
                f"{', '.join(map(str, whole))} returned"
            )
    return outcomes


def number_of_tasks(pieces: Sequence[Range], parallelism: int) -> int:
    """The number of tasks for the pieces: one for each core, and more where there are enough
    records for them. A thousand partitions with few records each are not worth a thousand tasks."""
    worth = -(-sum(map(len, pieces)) // SMALLEST_PIECE)
    return min(len(pieces), max(parallelism, worth))


def _tasks(plan: BatchPlan, ranges: Iterable[Range]) -> Iterator[Handed]:
    context = TaskContext.get()
    return run_all(plan, ranges, context.attemptNumber() if context else 0)


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


def _not_by_key(table: str, one: Partition | None, other: Partition | None) -> Overlap:
    return Overlap(
        f"cannot write to table {table}: the same key came from {one} and from {other}, and "
        "partitioned_by_key says that a key has one partition",
        hint="remove partitioned_by_key from the [[table]]: then records of a key are brought "
        "together before they are written",
    )


def _bucket(number: int) -> int:
    return number


def _discard(plan: BatchPlan, outcomes: Sequence[EndedRange | UpsertOutcome]) -> None:
    """Remove files that tasks wrote. `frazil orphans` finds files that cannot be removed now."""
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
