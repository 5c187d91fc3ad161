"""One micro-batch in its eight steps, with a source of values: no Spark, no catalog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from frazil.errors import AccountingError, SchemaMismatch, Unavailable, from_traceback
from frazil.kafka.planner import TopicIdentity
from frazil.offsets import Cut, Partition
from frazil.retry import Retry
from frazil.sink import _RERUNS, MicroBatches
from frazil.sources.base import (
    BatchRun,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    StreamState,
    WriteResult,
)
from frazil.spark.foreach_batch import BatchGate, interrupt
from frazil.steps import Step

P = Partition("t", 0)
COLUMNS = pa.schema({"id": pa.int64()})


def result(start: int, end: int, **more: Any) -> WriteResult:
    origin = TopicIdentity("c", {"t": "id"})
    return WriteResult(Cut({P: start}), Cut({P: end}), {}, origin, **more)


@dataclass
class Source:
    """Answers with the runs it was given, and then with one that has all its tables."""

    runs: list[BatchRun] = field(default_factory=list)
    written: WriteResult | None = None
    opens: WriteResult | None = None
    staged_before: bool = False
    samples: list[Mapping[str, pa.Schema]] = field(default_factory=list)
    seen: list[BatchTables] = field(default_factory=list)
    required: Mapping[str, pa.Schema] = field(default_factory=dict)

    def opening(self, batch: int, reached: StreamPosition) -> WriteResult | None:
        return self.opens

    def plan(self, frame: Any, batch: int, reached: StreamPosition) -> PlannedBatch | None:
        return None if self.staged_before else PlannedBatch(frame, reached)

    def run(self, plan: PlannedBatch, tables: BatchTables) -> BatchRun:
        self.seen.append(tables)
        return self.runs.pop(0) if self.runs else BatchRun(records={P: 5})

    def check(self, plan: PlannedBatch, tables: BatchTables, run: BatchRun) -> WriteResult | None:
        assert tables is self.seen[-1], "the tables of the run that counts"
        return self.written

    def resume(self, reached: StreamPosition, epoch: int) -> None: ...

    def sample(self, tables: BatchTables) -> Mapping[str, pa.Schema]:
        return self.samples.pop(0) if self.samples else {}


class Tables:
    def __init__(self) -> None:
        self.ensured: list[set[str]] = []
        self.renewed = 0

    def renew(self, names: set[str]) -> None:
        names.clear()
        self.renewed += 1

    def plans(self, versions: bool = True) -> BatchTables:
        return BatchTables({}, {}, len(self.ensured), "prefix")

    def ensure(self, needs: Mapping[str, pa.Schema]) -> None:
        self.ensured.append(set(needs))

    def holds_no_records(self, table: str) -> bool:
        return False


class Rig:
    def __init__(self, source: Source) -> None:
        self.steps: list[str] = []
        self.reports: list[Mapping[Partition, int]] = []
        self.submitted: list[Any] = []
        self.refusals: list[Exception] = []
        self.tables = Tables()
        self.stream = StreamState("s", 3, StreamPosition(Cut({P: 0})), 7)
        self.changed = {"db.t"}
        self.batches = MicroBatches(
            source,  # type: ignore[arg-type]
            self.tables,  # type: ignore[arg-type]
            SimpleNamespace(write=self._write),  # type: ignore[arg-type]
            SimpleNamespace(submit=self._submit),  # type: ignore[arg-type]
            stream=self.stream,
            changed=self.changed,
            retry=Retry(5.0, lambda: False),
            on_step=self._step,
            report=self.reports.append,
        )

    def _step(self, step: Step) -> None:
        self.steps.append(step.name)

    def _write(self, written: WriteResult, window_start_ms: int) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        return SimpleNamespace(number=self.stream.number, end=written.end)

    def _submit(self, batch: Any) -> None:
        self.submitted.append(batch)

    def run(self) -> None:
        self.batches.run(None, 0)  # type: ignore[arg-type]

    @property
    def ends(self) -> Sequence[int]:
        return [batch.end[P] for batch in self.submitted]


def test_a_batch_is_planned_written_staged_and_submitted():
    rig = Rig(Source(written=result(0, 5, source=("a", "b"))))
    rig.run()
    assert rig.steps == ["planned", "written", "staged"]
    assert rig.ends == [5]
    assert rig.reports == [{P: 5}], "the records that were read are reported"
    assert (rig.stream.position.cut[P], rig.stream.position.source) == (5, "b")
    assert rig.stream.number == 8
    assert rig.changed == set(), "tables that others changed are loaded again before the batch"


def test_missing_tables_are_ensured_and_the_batch_runs_again_with_new_plans():
    source = Source([BatchRun(missing={"db.t": COLUMNS}), BatchRun(again=True)], result(0, 5))
    rig = Rig(source)
    rig.run()
    assert rig.tables.ensured == [{"db.t"}, set()]
    assert [tables.number for tables in source.seen] == [0, 1, 2]
    assert rig.ends == [5]


def test_tables_that_never_come_to_fit_stop_the_stream_and_nothing_is_staged():
    rig = Rig(Source([BatchRun(missing={"db.t": COLUMNS})] * (2 * _RERUNS), result(0, 5)))
    with pytest.raises(SchemaMismatch, match=r"still do not fit the records: db\.t"):
        rig.run()
    assert len(rig.tables.ensured) == _RERUNS
    assert (rig.submitted, rig.stream.number, rig.stream.position.cut[P]) == ([], 7, 0)


def test_a_batch_that_does_not_add_up_is_not_staged():
    source = Source()
    rig = Rig(source)

    def check(*_: Any) -> WriteResult:
        raise AccountingError("cannot stage t[0]")

    source.check = check  # type: ignore[method-assign]
    with pytest.raises(AccountingError):
        rig.run()
    assert (rig.steps, rig.submitted, rig.stream.number) == (["planned"], [], 7)


def test_a_batch_without_anything_to_stage_leaves_the_position():
    rig = Rig(Source(written=None))
    rig.run()
    assert (rig.steps, rig.submitted, rig.stream.number) == (["planned"], [], 7)


def test_a_batch_that_an_earlier_run_staged_is_not_run_again():
    source = Source(staged_before=True, written=result(0, 5))
    rig = Rig(source)
    rig.run()
    assert (source.seen, rig.submitted, rig.stream.number) == ([], [], 7)


def test_where_a_stream_begins_is_staged_before_its_first_record_is_read():
    rig = Rig(Source(written=result(3, 5), opens=result(3, 3)))
    rig.run()
    assert rig.ends == [3, 5]
    assert rig.stream.number == 9
    assert rig.steps == ["planned", "written", "staged"], "nothing of it is a step of a batch"


def test_a_store_that_is_away_while_a_batch_is_staged_is_waited_for():
    rig = Rig(Source(written=result(0, 5)))
    rig.refusals = [Unavailable("cannot write: 503"), Unavailable("cannot write: 503")]
    rig.run()
    assert rig.ends == [5]


def test_before_the_first_batch_the_tables_of_the_next_records_are_ensured():
    source = Source(samples=[{"db.a": COLUMNS}, {"db.b": COLUMNS}], required={"db.dead": COLUMNS})
    rig = Rig(source)
    rig.batches.resume()
    assert rig.tables.ensured == [{"db.dead"}, {"db.a"}, {"db.b"}]


def test_a_gate_runs_batches_until_it_is_closed():
    gate, ran = BatchGate(), []
    assert gate.run(lambda _, number: ran.append((number, gate.lock.locked())), None, 7)  # type: ignore[arg-type]
    gate.close()
    assert not gate.run(lambda _, number: ran.append((number, True)), None, 8)  # type: ignore[arg-type]
    assert ran == [(7, True)], "`close` waits for a batch in progress: it holds the lock"


def test_an_error_of_a_batch_is_found_again_in_what_spark_makes_of_it():
    def batch(*_: object) -> None:
        raise Unavailable("cannot reach the store", hint="wait")

    with pytest.raises(Exception, match="cannot reach the store") as caught:
        BatchGate().run(batch, None, 0)  # type: ignore[arg-type]
    assert isinstance(from_traceback(f"Py4JException: {caught.value}\n  at Spark"), Unavailable)


def test_a_batch_that_the_gate_refused_ends_as_interrupted_after_the_query():
    active = iter([True, True, False])
    with pytest.raises(RuntimeError, match="InterruptedException"):
        interrupt(lambda: next(active))
    assert next(active, None) is None


def test_what_is_unavailable_for_longer_than_the_timeout_is_raised():
    reasons: list[str] = []
    retry = Retry(0.0, lambda: False)
    retry.waiting = reasons.append

    def call() -> None:
        raise Unavailable("cannot reach the store")

    with pytest.raises(Unavailable, match="the store"):
        retry(call)
    stopping = Retry(60.0, lambda: True)
    with pytest.raises(Unavailable):
        stopping(call)
    assert len(reasons) <= 1
