"""The rows of a Spark task into an upsert table. Runs on executors.

In: all rows of a batch with some of the keys; Spark's shuffle has brought the rows of each key
together. Out: data files with the last row of each key, and the deletes of all keys. A row whose
`delete_column` is true is no row of the table but deletes its key. The last change of a key is that
with the highest offset, as in `pipeline.upsert`, if every row carries the topic, partition and
offset of a record; with a `version_column` the highest version comes first. Otherwise a key may
have one change, and a batch with two is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import SchemaMismatch, counted
from frazil.pipeline.projection import NO_METADATA, fitted
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.task import in_worker, watermark
from frazil.pipeline.upsert import KeyChanges, apply, refuse_ties
from frazil.pipeline.versions import column_of
from frazil.spark.tasks import CarriedColumns, WriteOutcome, WritePlan, explaining, outcome_batch


@dataclass(frozen=True, slots=True)
class UpsertPlan:
    """Shared by all tasks of a batch."""

    #: its metadata columns are those that the rows carry
    table: TablePlan
    write: WritePlan
    #: the boolean column that makes a row a delete; empty: none
    delete_column: str = ""


def upsert_all(
    plan: UpsertPlan, batches: Iterable[pa.RecordBatch], names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """For Spark's `mapInArrow`: a task's rows in, one row with its outcome out. `names`: the column
    names; those of the batches are placeholders."""
    with in_worker():
        outcome = upsert(plan, [batch.rename_columns(list(names)) for batch in batches])
    yield outcome_batch(outcome)


def upsert(plan: UpsertPlan, batches: Sequence[pa.RecordBatch]) -> WriteOutcome:
    if not batches:
        return WriteOutcome((), 0, 0, {}, None, {})
    began, cpu = time.perf_counter(), time.process_time()
    given = pa.Table.from_batches(batches)
    carried = CarriedColumns(plan.write.origin, plan.write.event_time)
    with explaining(plan.write, carried):
        carried.add(given)
        table = plan.table
        if not carried.complete:  # a row without an offset: there is no order
            table = replace(table, metadata=NO_METADATA)
        changes = _changes(table, given, plan.delete_column)
        refuse_ties(table, changes)
        done = apply(table, changes, plan.write.file_prefix)
    seconds = {"write": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    return WriteOutcome(
        done.files,
        sum(done.written.values()),
        given.nbytes,
        carried.offsets(),
        watermark(given, plan.write.event_time),
        seconds,
        carried.watermarks,
        done.deletes,
        done.keys,
        done.written,
        len(given),
        done.noted.files if done.noted else (),
    )


def _changes(table: TablePlan, given: pa.Table, delete_column: str) -> KeyChanges:
    subject = f"to table {table.shape.name}"
    required = {**dict.fromkeys(table.key, "part of its key"), table.order: "its version_column"}
    for name, kind in {**required, delete_column: "its delete_column"}.items():
        column = column_of(given, name) if name else None
        if column is not None and column.null_count:
            raise SchemaMismatch(
                f"cannot write {subject}: {name!r}, {kind}, is null in "
                f"{counted(column.null_count, 'row')} of a batch",
                hint=f"filter them out, or coalesce({name}, …)",
            )
    if not delete_column:
        return KeyChanges([fitted(given, table.shape.arrow, subject)])
    deleted: Any = given.column(delete_column)
    rows = given.filter(pc.invert(deleted)).drop_columns([delete_column])
    target = table.of_deletes
    gone = given.filter(deleted)
    gone = pa.table([column_of(gone, name) for name in target.names], target.names)
    return KeyChanges([fitted(rows, table.shape.arrow, subject)], [fitted(gone, target, subject)])
