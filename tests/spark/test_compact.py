"""Compaction of upsert tables by Iceberg's own rules, read by Spark and by DuckDB."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from frazil.commit.protocol import TableCommitter
from frazil.errors import CommitStateUnknown
from frazil.files.rewrite import rewrite as compact
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.rewrite_data_files import COMPACT, RewriteDataFiles
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition
from tests.oracle import Lake

FIELDS = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "region", "required": True, "type": "string"},
    {"id": 3, "name": "value", "required": False, "type": "string"},
]
Row = tuple[int, str, str | None]


class Clock:
    """Between two looks enough time passes for any pause to be over."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 10_000.0
        return self.now

    def sleep(self, _: float) -> None: ...


class Upserted:
    """An upsert table of Iceberg's, and what it should hold."""

    def __init__(
        self,
        spark: Any,
        lake: Lake,
        name: str,
        *,
        version: int = 2,
        keys: int = 1,
        partitioned: bool = False,
        target: int = 2**27,
    ) -> None:
        self.spark, self.lake = spark, lake
        self.name, self.sql = f"db.{name}", f"lake.db.{name}"
        self.target = target
        schema = json.dumps(
            {"type": "struct", "schema-id": 0, "fields": FIELDS, "identifier-field-ids": [1]}
        )
        self.catalog = JavaCatalog(spark, "lake")
        self.table = self.catalog.create(
            self.name,
            schema,
            '{"spec-id": 0, "fields": []}',
            properties={"format-version": str(version)},
        )
        if partitioned:  # deletes stay under the spec without partitions, and count everywhere
            self.table._table.updateSpec().addField("region").commit()
        self.keys = tuple(range(1, keys + 1))
        self.model: dict[tuple[Any, ...], Row] = {}
        self.batches = 0

    @property
    def shape(self) -> WriterSpec:
        table = self.table
        return WriterSpec(
            table.name,
            table.location,
            table.schema,
            table.schema_id,
            table.spec,
            table.properties,
            self.target,
            "zstd",
            {},
        )

    def written(self, shape: WriterSpec, rows: Iterable[Sequence[Any]]) -> list[str]:
        writer = TableWriter(shape, "test")
        if columns := [list(column) for column in zip(*rows, strict=True)]:
            arrays = [pa.array(c, f.type) for c, f in zip(columns, shape.arrow, strict=True)]
            writer.write(pa.Table.from_arrays(arrays, schema=shape.arrow))
        return [file.descriptor for file in writer.close()]

    def upsert(self, rows: Sequence[Row], deleted: Sequence[tuple[Any, ...]] = ()) -> None:
        """One batch, as the sink commits it."""
        last = {row[: len(self.keys)]: row for row in rows}
        columns = {"type": "struct", "schema-id": 0, "fields": FIELDS[: len(self.keys)]}
        deletes = replace(
            self.shape,
            schema=json.dumps(columns),
            equality=self.keys,
            spec='{"spec-id": 0, "fields": []}',
        )
        gone = dict.fromkeys([*last, *deleted])
        self.table.refresh()
        update = self.table._table.newRowDelta()
        for descriptor in self.written(self.shape, last.values()):
            update.addRows(self.table._data_file(descriptor))
        for descriptor in self.written(deletes, gone):
            update.addDeletes(self.table._data_file(descriptor))
        for key, value in self.entry(self.batches).summary().items():
            update.set(key, value)
        update.commit()
        self.batches += 1
        for key in deleted:
            self.model.pop(key, None)
        self.model.update(last)

    def append(self, rows: Sequence[Row]) -> None:
        """By somebody else."""
        self.table.refresh()
        update = self.table._table.newAppend()
        for descriptor in self.written(self.shape, rows):
            update.appendFile(self.table._data_file(descriptor))
        update.commit()
        self.model.update({row[: len(self.keys)]: row for row in rows})

    @staticmethod
    def entry(number: int, epoch: int = 1) -> LedgerEntry:
        where = Partition("t", 0)
        return LedgerEntry(
            "s",
            epoch,
            (str(uuid.uuid4()),),
            (number, number),
            Cut({where: number}),
            Cut({where: number + 1}),
        )

    def compaction(self, **more: Any) -> RewriteDataFiles:
        own = self.catalog.load(self.name)
        assert own is not None
        given = {
            "sink": "s",
            "epoch": 1,
            "shape": lambda: self.shape,
            "after": 1,
            "clock": Clock(),
            "prefix": lambda: "frazil-s-1-0",
            **more,
        }
        return RewriteDataFiles(own, **given)

    def check(self) -> None:
        expected = sorted(self.model.values())
        rows = self.spark.sql(f"SELECT id, region, value FROM {self.sql}").collect()
        assert sorted(map(tuple, rows)) == expected
        assert sorted(self.lake.query(self.name, "id, region, value")) == expected

    @property
    def newest(self) -> Snapshot:
        self.table.refresh()
        return next(self.table.history("main"))

    @property
    def totals(self) -> tuple[int, int, int]:
        """Files of data, of deletes; keys deleted by equality."""
        keys = ("total-data-files", "total-delete-files", "total-equality-deletes")
        summary = self.newest.summary
        return tuple(int(summary[key]) for key in keys)  # type: ignore[return-value]


@pytest.fixture
def make(spark: Any, lake: Lake, name: str) -> Callable[..., Upserted]:
    return lambda **more: Upserted(spark, lake, name, **more)


@pytest.fixture(params=[2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("keys", [1, 2])
def test_after_a_round_the_table_holds_the_same_and_no_delete(
    make: Callable[..., Upserted], version: int, keys: int, partitioned: bool
):
    table = make(version=version, keys=keys, partitioned=partitioned)
    for batch in range(6):
        rows = [(key, "ab"[(key + batch) % 2], f"{batch}") for key in range(batch, batch + 50)]
        table.upsert(rows, [(200 + batch, "a")[:keys], (batch - 1, "ab"[batch % 2])[:keys]])
    table.check()
    assert table.totals[2] > 0
    assert table.compaction().run_due() == ""
    table.check()
    assert table.totals[1:] == (0, 0)
    assert table.newest.operation == "replace"
    assert COMPACT in table.newest.summary
    table.upsert(
        [(3, "a", "later")], [(30, "a")[:keys]]
    )  # the next delete counts for what was made
    table.check()


def test_rows_keep_their_numbers(make: Callable[..., Upserted], spark: Any):
    """Whoever follows changes by row ids sees none."""
    table = make(version=3)
    table.upsert([(key, "a", "x") for key in range(20)])
    table.upsert([(key, "a", "y") for key in range(5, 10)], [(0,)])
    table.upsert([(7, "a", "z")])
    lineage = f"SELECT id, _row_id, _last_updated_sequence_number FROM {table.sql} ORDER BY id"
    before = spark.sql(lineage).collect()
    files = table.totals[0]
    assert table.compaction().run_due() == ""
    assert table.totals[0] < files
    assert spark.sql(lineage).collect() == before
    table.check()


def test_of_large_files_rows_are_hidden_by_position(make: Callable[..., Upserted], version: int):
    table = make(version=version, partitioned=True, target=2**13)
    table.upsert([(key, "ab"[key % 2], uuid.uuid4().hex) for key in range(4000)])
    large = table.totals[0]
    keeper = table.compaction()
    for batch in range(3):
        table.upsert([(batch, "b", "new")], [(key,) for key in range(1000, 1010 + batch)])
        assert keeper.run_due() == ""
        table.check()
        data, deletes, equality = table.totals
        assert equality == 0
        assert 0 < deletes <= large, "no more than one for each file"
        assert data >= large
    table.upsert([], [(key,) for key in range(3000)])
    assert table.compaction().run_due() == ""  # of another run: what was remembered is found again
    assert table.totals[2] == 0
    table.check()


def test_a_table_too_large_for_one_round_takes_several(make: Callable[..., Upserted], version: int):
    table = make(version=version, target=2**13)
    for part in range(4):
        table.upsert([(part + 4 * key, "a", uuid.uuid4().hex) for key in range(1000)])
    table.upsert([], [(key,) for key in range(0, 4000, 100)])
    keeper = table.compaction(most=1)  # a file each
    rounds = 0
    while table.totals[2]:
        assert keeper.run_due() == ""
        table.check()
        rounds += 1
        assert rounds < 50
    assert rounds > 1


# ── H6 ───────────────────────────────────────────────────────────────────────────────────────────


def started(table: Upserted) -> tuple[list[Row], Callable[[], None]]:
    """A table where somebody may delete a row and append another while files are rewritten."""
    table.upsert([(1, "a", "deleted"), (2, "a", "x")])
    table.upsert([(2, "a", "y")])

    def meanwhile() -> None:
        table.upsert([], [(1,)])
        table.append([(3, "a", "z")])

    return [(2, "a", "y"), (3, "a", "z")], meanwhile


def test_icebergs_own_rewrite_brings_a_deleted_row_back(
    make: Callable[..., Upserted], spark: Any, tmp_path: Path
):
    """The hazard itself: should this test fail, Iceberg has learnt it."""
    table = make()
    _, meanwhile = started(table)
    context = spark.sparkContext
    gate = tmp_path / "open"
    slots = context.defaultParallelism
    path = str(gate)

    def wait(_: int) -> None:
        while not Path(path).exists():
            time.sleep(0.01)

    blocker = threading.Thread(
        target=lambda: context.parallelize(range(slots), slots).foreach(wait), daemon=True
    )
    call = (
        f"CALL lake.system.rewrite_data_files('{table.name}', options => map('rewrite-all','true'))"
    )
    rewrite = threading.Thread(target=lambda: spark.sql(call).collect(), daemon=True)
    tracker = context.statusTracker()
    try:
        blocker.start()
        until(lambda: len(tracker.getActiveJobsIds()) == 1)
        rewrite.start()  # it has planned what it will rewrite, and waits for room
        until(lambda: len(tracker.getActiveJobsIds()) > 1)
        meanwhile()
    finally:
        gate.touch()
    rewrite.join(120)
    blocker.join(120)
    rows = spark.sql(f"SELECT id, region, value FROM {table.sql}").collect()
    assert sorted(map(tuple, rows)) == [(1, "a", "deleted"), *sorted(table.model.values())]
    assert (1,) not in table.model


def test_our_own_does_not(make: Callable[..., Upserted], version: int):
    table = make(version=version)
    expected, meanwhile = started(table)
    once = [meanwhile]

    def run(jobs: Sequence[Any]) -> list[Any]:
        done = [compact(job) for job in jobs]
        if once:
            once.pop()()
        return done

    keeper = table.compaction(run=run)
    assert "no longer the newest one" in keeper.run_due()
    assert sorted(table.model.values()) == expected
    table.check()
    left = list(Path(table.table.location.removeprefix("file:")).rglob("frazil-s-1-*"))
    assert left == [], "what the round had written is removed"
    assert keeper.run_due() == ""
    table.check()
    assert table.totals[1] == 0


@pytest.mark.parametrize("deletes", [False, True])
def test_what_lands_at_the_last_moment_is_seen_by_the_commit_itself(
    make: Callable[..., Upserted], deletes: bool
):
    """An append is no conflict for Iceberg, a delete is one only for files that are replaced."""
    table = make()
    table.upsert([(1, "a", "x"), (2, "a", "x")])
    table.upsert([(2, "a", "y")])
    base, manifests = table.table.contents("main", {})
    files = [file.descriptor for some in manifests.values() for file in some]
    old = [descriptor for descriptor in files if json.loads(descriptor)["content"] == "data"]
    new = table.written(table.shape, [(1, "a", "x"), (2, "a", "y")])
    landed = table.upsert if deletes else table.append

    class Late(dict[str, str]):
        def items(self) -> Any:
            landed([(3, "a", "z")])
            return super().items()

    own = table.catalog.load(table.name)
    assert own is not None
    assert base is not None
    with pytest.raises(CommitStateUnknown, match=r"is no longer the newest one|found new delete"):
        own.replace(old, new, Late(), branch="main", since=base.id, leftovers=[])
    table.check()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ── beside the stream ────────────────────────────────────────────────────────────────────────────


def test_commits_of_the_stream_go_on_over_a_round(make: Callable[..., Upserted], version: int):
    table = make(version=version)
    for batch in range(3):
        table.upsert([(1, "a", str(batch)), (10 + batch, "a", "x")])
    own = table.catalog.load(table.name)
    assert own is not None
    committer = TableCommitter(own, "main", "s", 1, Clock())  # type: ignore[arg-type]
    committer._set_seen(committer.head().entry)
    keeper = table.compaction()
    for batch in range(3, 6):
        snapshot = committer.commit([], table.entry(batch))
        committer.set_tag(snapshot)
        table.batches = batch + 1
        assert keeper.run_due() == ""
    table.check()
    assert table.totals[1] == 0


def test_a_run_that_was_taken_over_from_rewrites_nothing(make: Callable[..., Upserted]):
    table = make()
    for value in "xy":
        table.upsert([(1, "a", value), (ord(value), "a", value)])
    keeper = table.compaction()
    own = table.catalog.load(table.name)
    assert own is not None
    TableCommitter(own, "main", "s", 2, Clock()).claim()  # type: ignore[arg-type]
    before = table.newest
    assert keeper.run_due() == ""
    assert table.newest == before


def test_a_lost_answer_is_searched_in_the_table(make: Callable[..., Upserted]):
    table = make()
    for value in "xyz":
        table.upsert([(1, "a", value), (ord(value), "a", value)])
    keeper = table.compaction()
    handle: Any = keeper._table
    real = handle.replace

    def lost(*args: Any, **more: Any) -> None:
        del handle.replace
        real(*args, **more)
        raise CommitStateUnknown("cannot rewrite: the answer was lost")

    handle.replace = lost
    assert keeper.run_due() == ""
    assert table.totals[1] == 0
    table.check()


def test_on_a_branch_main_stays_as_it_is(make: Callable[..., Upserted], spark: Any):
    table = make()
    for value in "xyz":
        table.upsert([(1, "a", value), (ord(value), "a", value)])
    table.table.fork("side", table.newest.id)
    main = table.newest
    keeper = table.compaction(branch="side")
    assert keeper.run_due() == ""
    assert table.newest == main
    side = next(iter(table.table.history("side")))
    assert side.summary["total-delete-files"] == "0"
    rows = spark.sql(f"SELECT * FROM {table.sql} VERSION AS OF 'side'").collect()
    assert sorted(map(tuple, rows)) == sorted(table.model.values())


def test_tasks_run_on_executors(make: Callable[..., Upserted], spark: Any):
    table = make()
    for value in "xyz":
        table.upsert([(1, "a", value), (ord(value), "a", value)])

    def run(jobs: Sequence[Any]) -> list[Any]:
        return list(spark.sparkContext.parallelize(jobs, len(jobs)).map(compact).collect())

    assert table.compaction(run=run).run_due() == ""
    assert table.totals[1] == 0
    table.check()
