"""The offset index looks after itself, and its six caveats (L9 to L14): real Kafka, Spark and
Iceberg; DuckDB reads what is in the index."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from frazil.accounting import RangeCounts
from frazil.cli.commands import app
from frazil.commit.batch_chain import entry_of
from frazil.commit.protocol import TableCommitter
from frazil.commit.table_schemas import writer_spec
from frazil.config.model import Config, load
from frazil.config.sections import TableConfig
from frazil.errors import CommitStateUnknown, ConfigError, Expired
from frazil.iceberg import maintenance_tasks, schema
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.maintenance_tasks import RewriteIndexFiles
from frazil.iceberg.table import Snapshot
from frazil.ledger import index
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range
from frazil.ops.index_rebuild import rebuild_index
from frazil.ops.orphans import orphans
from frazil.pipeline.projection import MetadataColumns
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkProcess
from tests.oracle import Lake, assert_exact
from tests.system.streams import (
    WITHIN,
    all_proven,
    catch_up,
    eventually,
    numbered,
    produce,
    proven,
    reports,
    running,
)

Make = Callable[..., Config]
P, Q = Partition("orders", 0), Partition("orders", 1)
SPEC = '{"spec-id": 0, "fields": []}'


class IndexRun:
    """One run of a sink that does nothing but commit to an index and look after it."""

    def __init__(self, spark: Any, name: str, sink: str = "s", epoch: int = 1) -> None:
        self.name, self.sink, self.epoch = name, sink, epoch
        catalog = JavaCatalog(spark, "lake")
        made = schema.iceberg_schema(
            index.COLUMNS, MetadataColumns("", "", "", ""), TableConfig(name)
        )
        table = catalog.load(name) or catalog.create(name, made, SPEC, properties=index.PROPERTIES)
        self.table = table
        self.target = TableCommitter(table, "main", sink, epoch, time, claimed_first=True)
        head = self.target.claim(lambda position: Cut({P: 0, Q: 0, **position}))
        assert head.entry is not None
        assert head.snapshot is not None
        self.target.set_tag(head.snapshot)
        self.end, self.number = head.entry.end, head.entry.batches[1] + 1
        self.steps: list[str] = []
        self.held: Callable[[], None] = lambda: None
        self.upkeep = RewriteIndexFiles(
            table,
            sink=sink,
            epoch=epoch,
            shape=self.shape,
            history=86400,
            prefix=lambda: self.prefix,
            step=self._step,
        )

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == "index-merge":
            self.held()

    def shape(self) -> Any:
        return writer_spec(self.table, TableConfig(self.name))

    @property
    def prefix(self) -> str:
        return f"frazil-{self.sink}-{self.epoch}-{self.number}"

    def commit(self) -> str:
        """One batch of ten offsets of each partition; what the upkeep says to it."""
        ranges = [Range(p, self.end[p], self.end[p] + 10) for p in (P, Q)]
        tallies = tuple(RangeCounts(span, len(span)) for span in ranges)
        staged = StagedTable("db.t", "u", 0, (), (), 1, 1, tallies)
        batch = StagedBatch(
            self.sink,
            self.epoch,
            self.number,
            str(uuid.uuid4()),
            self.end,
            self.end.after(ranges),
            {},
            "",
            0,
            0,
            (staged,),
        )
        located = [(batch, {"db.t": Snapshot(7, None, 0, 0, "", {})})]
        files = index.write(self.shape(), self.prefix, located)
        self.target.set_tag(self.target.commit(files, entry_of([batch], "", self.epoch)))
        self.end, self.number = batch.end, self.number + 1
        return self.upkeep.run_due()

    def folder(self, kind: str) -> set[str]:
        """What lies in the index's folder."""
        where = Path(self.table.location.removeprefix("file:")) / kind
        return {path.name for path in where.iterdir() if not path.name.startswith(".")}

    def referred(self, spark: Any, metadata_table: str, column: str) -> set[str]:
        spark.catalog.refreshTable(f"lake.{self.name}")
        rows = spark.table(f"lake.{self.name}.{metadata_table}").select(column).collect()
        return {row[0].rsplit("/", 1)[-1] for row in rows}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files, ten snapshots are many here."""
    monkeypatch.setattr(index, "FANOUT", 4)
    monkeypatch.setattr(index, "FULL", 256)
    monkeypatch.setattr(maintenance_tasks, "KEPT", 10)
    monkeypatch.setattr(maintenance_tasks, "AT_ONCE", 10)
    monkeypatch.setattr(maintenance_tasks, "MOST", 30)


def exact(lake: Lake, name: str, batches: int, sinks: tuple[str, ...] = ("s",)) -> None:
    """Every row of every batch is in the index once, asked of DuckDB."""
    rows = lake.query(name, "sink, batch, partition, start_offset, end_offset, written")
    assert len(set(rows)) == len(rows)
    assert set(rows) == {
        (sink, n, p, n * 10, n * 10 + 10, 10)
        for sink in sinks
        for n in range(batches)
        for p in (0, 1)
    }


# ── it looks after itself ────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_hundreds_of_batches_stay_few_files_manifests_snapshots_and_metadata_files(
    spark: Any, lake: Lake, name: str, few: None
):
    """Years of batches stay fast; and what is not needed any more is not there any more."""
    run = IndexRun(spark, f"db.{name}")
    most_files = most_manifests = most_snapshots = 0
    for _ in range(150):
        assert run.commit() == ""
        newest = next(run.table.history("main"))
        most_files = max(most_files, int(newest.summary["total-data-files"]))
        if run.number % 10 == 0:
            most_manifests = max(most_manifests, len(run.table.manifests(newest.id)) - 1)
            most_snapshots = max(most_snapshots, _snapshots(run.table))
    assert most_files <= 4 * index.FANOUT + 300 // index.FULL
    assert most_manifests <= 3 * index.FANOUT
    assert most_snapshots <= maintenance_tasks.MOST + maintenance_tasks.AT_ONCE + 2 * index.FANOUT
    exact(lake, f"db.{name}", 150)
    assert _snapshots(run.table) >= maintenance_tasks.KEPT
    # What a merge replaced goes with its snapshot: of the oldest one left it may still be there.
    unreferenced = run.folder("data") - run.referred(spark, "all_data_files", "file_path")
    assert len(unreferenced) <= index.FANOUT
    run.upkeep._paused_until = 2**62
    run.commit()
    gone: list[str] = []
    run.table.expire(2**62, 1, gone)
    assert run.table.needed(gone) == set()
    run.table.remove(gone)
    data, metadata = run.folder("data"), run.folder("metadata")
    assert data == run.referred(spark, "all_data_files", "file_path")
    lists = {path for path in metadata if path.startswith("snap-")}
    assert len(lists) == _snapshots(run.table)
    manifests = {path for path in metadata if path.endswith(".avro")} - lists
    assert manifests == run.referred(spark, "all_manifests", "path")
    assert len([path for path in metadata if "metadata.json" in path]) <= 52
    heir = IndexRun(spark, f"db.{name}", epoch=2)
    assert heir.end == run.end == Cut({P: 1510, Q: 1510})
    assert heir.commit() == ""


def _snapshots(table: JavaTable) -> int:
    count = 0
    while table.moment(count) is not None:
        count += 1
    return count


@pytest.mark.long
def test_the_position_is_found_though_the_sinks_snapshots_were_expired(
    spark: Any, lake: Lake, name: str, few: None
):
    """L11, H4: an idle sink, a busy one on the same index, and then anybody's expiry."""
    idle, busy = IndexRun(spark, f"db.{name}", "idle"), IndexRun(spark, f"db.{name}", "busy")
    for _ in range(3):
        idle.commit()
    for _ in range(60):
        assert busy.commit() == ""
    assert _snapshots(busy.table) < 60
    assert all(s.summary.get("frazil.sink") != "idle" for s in busy.table.history("main"))
    spark.sql(
        f"CALL lake.system.expire_snapshots(table => 'db.{name}', retain_last => 1, "
        "older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    heir = IndexRun(spark, f"db.{name}", "idle", epoch=2)
    assert heir.end == idle.end == Cut({P: 30, Q: 30})
    for _ in range(5):
        assert heir.commit() == ""
    rows = lake.query(
        f"db.{name}", "sink, count(DISTINCT batch), count(*)", "GROUP BY 1 ORDER BY 1"
    )
    assert rows == [("busy", 60, 120), ("idle", 8, 16)]
    new = IndexRun(
        spark, f"db.{name}", "new"
    )  # one that was never here finds no history, and begins
    assert new.end == Cut({P: 0, Q: 0})


@pytest.fixture
def run(spark: Any, name: str, few: None) -> Iterator[IndexRun]:
    """With three files: one more makes it merge."""
    made = IndexRun(spark, f"db.{name}")
    for _ in range(3):
        made.commit()
    yield made
    assert not made.upkeep._attempts


def test_a_merge_whose_answer_was_lost_is_found(
    run: IndexRun, lake: Lake, monkeypatch: pytest.MonkeyPatch
):
    rewrite = run.table.rewrite

    def lost(*args: Any, leftovers: list[str], **more: Any) -> None:
        """H1: what Iceberg takes for a failure it wants cleaned up, what is live included."""
        rewrite(*args, leftovers=leftovers, **more)
        run.table.refresh()
        leftovers += run.table.manifests(next(run.table.history("main")).id)
        raise CommitStateUnknown("cannot rewrite: CommitStateUnknownException")

    monkeypatch.setattr(run.table, "rewrite", lost)
    assert run.commit() == ""
    assert len(run.table.live()[1]) == 1
    exact(lake, run.name, 4)


def test_of_two_merges_of_the_same_files_one_gives_way(run: IndexRun, spark: Any, lake: Lake):
    other = IndexRun(spark, run.name, "x")

    def first() -> None:
        other.table.refresh()
        other.upkeep._enough = 0
        assert other.upkeep.run_due() == ""

    run.held = first
    assert "Missing required files to delete" in run.commit()
    assert other.steps == ["index-merge", "index-merged"]
    assert len(run.table.live()[1]) == 1
    run.held, run.upkeep._paused_until = (lambda: None), 0.0
    assert run.commit() == ""
    exact(lake, run.name, 5)
    assert run.folder("data") == run.referred(spark, "all_data_files", "file_path")


def test_a_commit_of_another_sink_is_no_obstacle(run: IndexRun, spark: Any, lake: Lake):
    other = IndexRun(spark, run.name, "x")
    run.held = lambda: _silent(other)
    assert run.commit() == ""
    assert len(run.table.live()[1]) == 2
    rows = lake.query(run.name, "sink, count(*)", "GROUP BY 1 ORDER BY 1")
    assert rows == [("s", 8), ("x", 2)]


def _silent(other: IndexRun) -> None:
    other.upkeep._paused_until = 2**62
    other.commit()


def test_a_run_that_is_fenced_while_it_merges_changes_nothing(
    run: IndexRun, spark: Any, lake: Lake
):
    run.held = lambda: IndexRun(spark, run.name, epoch=2) and None
    assert "has another run than epoch 1" in run.commit()
    assert len(run.table.live()[1]) == 4
    exact(lake, run.name, 4)
    heir = IndexRun(spark, run.name, epoch=3)
    assert heir.commit() == ""
    run.table.refresh()
    run.upkeep.resolve()
    assert run.folder("data") == run.referred(spark, "all_data_files", "file_path")


def test_deleted_index_rows_do_not_come_back(run: IndexRun, spark: Any, lake: Lake):
    """H6: while files are merged; and where they are hidden by a delete file already."""
    spark.sql(
        f"ALTER TABLE lake.{run.name} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')"
    )
    delete = f"DELETE FROM lake.{run.name} WHERE batch = 1 AND partition = 0"
    run.held = lambda: spark.sql(delete) and None
    assert "found new delete for replaced data file" in run.commit()
    left = [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert lake.query(run.name, "batch, partition", "ORDER BY 1, 2") == left
    run.held, run.upkeep._paused_until = (lambda: None), 0.0
    assert run.commit() == ""
    assert run.steps.count("index-merged") == 1, "without the file whose rows are hidden"
    assert lake.query(run.name, "batch, partition", "ORDER BY 1, 2") == [*left, (4, 0), (4, 1)]


# ── the six caveats ──────────────────────────────────────────────────────────────────────────────


def away(spark: Any, config: Config) -> Callable[[], None]:
    """The index is gone from the catalog, until it is back."""
    name = config.index_table
    spark.sql(f"ALTER TABLE lake.{name} RENAME TO {name}_away")
    return lambda: spark.sql(f"ALTER TABLE lake.{name}_away RENAME TO {name}") and None


def test_l9_index_trouble_never_stops_the_data(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(20), 2)
    config = make_config()
    with running(config, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        before = sink.position
        back = away(spark, config)
        try:
            produce(broker.bootstrap, name, numbered(30, 100), 2)
            eventually(lambda: _count(lake, f"db.{name}") == 50, "the data is there", sink=sink)
            produce(broker.bootstrap, name, numbered(30, 200), 2)
            eventually(lambda: _count(lake, f"db.{name}") == 80, "and goes on", sink=sink)
            assert sink.position == before
            trouble = sink.committer.progress.trouble
            assert f"db.{name}_index" in trouble, trouble
        finally:
            back()
        assert sink.wait_until(sink.ends(), WITHIN)
        eventually(lambda: not sink.committer.progress.trouble, "all is well", sink=sink)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 80
    assert sum(row[0] for row in lake.query(f"db.{name}_index", "written")) == 80
    proven(config, spark)


def _count(lake: Lake, table: str) -> int:
    return int(lake.query(table, "count(*)")[0][0])


def test_l9_a_store_that_refuses_the_indexs_file_is_for_later(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config()
    write, left = index.write, [OSError("SlowDown"), pa.ArrowInvalid("no such cast")]

    def refusing(*args: Any) -> list[str]:
        if left:
            raise left.pop()
        return write(*args)

    with running(config, spark) as sink:
        monkeypatch.setattr(index, "write", refusing)
        produce(broker.bootstrap, name, numbered(10))
        assert sink.wait_until(sink.ends(), WITHIN)
    assert left == []
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 10
    proven(config, spark)


@pytest.mark.long
def test_l10_l11_l12_a_run_that_is_killed_while_it_merges_leaves_nothing_behind(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Callable[..., Path]
):
    """The merged file was written, and never committed: found by its name, and removed. Every row
    of the index is there once, and none without its data."""
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(80))
    path = write_toml(sink={"max_records_per_trigger": 2})
    child = SinkProcess(path, hold="index-merge", until="forever", log=path.with_suffix(".log"))
    held = next((event for event in child.events() if "held" in event), None)
    child.kill()
    assert held is not None, path.with_suffix(".log").read_text()[-2000:]
    config = load(path)
    rows = _count(lake, f"db.{name}_index")
    assert rows >= index.FANOUT
    with running(
        replace(config, sink=replace(config.sink, max_records_per_trigger=100)), spark
    ) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 80
    assert proven(config, spark).written == 80
    table = JavaCatalog(spark, "lake").load(f"db.{name}_index")
    assert table is not None
    assert len(table.live()[1]) < index.FANOUT, "the next run merged them"
    assert table.listing(f"{table.location}/stage/{name}/") == []
    folder = Path(table.location.removeprefix("file:")) / "metadata"
    new, old = (folder / f"{uuid.uuid4()}-m0.avro" for _ in "ab")
    for file in (new, old):
        file.write_bytes(b"of a commit that came to nothing")
    os.utime(old, (time.time() - 100_000,) * 2)
    leftovers = orphans(config, spark)
    assert [path for _, path in leftovers if path.endswith((new.name, old.name))] == [
        path for _, path in leftovers if path.endswith(old.name)
    ], "a new one may be of a commit under way"
    made = [path for _, path in leftovers if "/data/frazil-" in path and f"{name}_index" in path]
    assert made, "the file of the merge that was killed"
    for where, file in leftovers:
        where.delete(file)
    assert orphans(config, spark) == []
    ranges = lake.query(f"db.{name}_index", "start_offset, end_offset, snapshot_id", "ORDER BY 1")
    assert [start for start, _, _ in ranges] == [0, *(end for _, end, _ in ranges[:-1])]
    snapshot_ids = {s.id for s in JavaCatalog(spark, "lake").load(f"db.{name}").history("main")}  # type: ignore[union-attr]
    assert {snapshot for _, _, snapshot in ranges} <= snapshot_ids


def test_l12_records_in_the_stage_that_cannot_be_removed_now_are_removed_later(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config()
    delete = JavaTable.delete

    def refused(table: JavaTable, path: str) -> None:
        if path.endswith(".json"):
            raise ConfigError("cannot delete: Status Code: 403")
        delete(table, path)

    with running(config, spark) as sink:
        with monkeypatch.context() as patched:
            patched.setattr(JavaTable, "delete", refused)
            produce(broker.bootstrap, name, numbered(5))
            assert sink.wait_until(sink.ends(), WITHIN)
            eventually(
                lambda: "403" in sink.committer.progress.maintenance_error, "it is said", sink=sink
            )
        produce(broker.bootstrap, name, numbered(5, 100))
        assert sink.wait_until(sink.ends(), WITHIN)
    assert sink.committer.progress.maintenance_error == ""
    table = JavaCatalog(spark, "lake").load(f"db.{name}_index")
    assert table is not None
    assert table.listing(f"{table.location}/stage/{name}/") == []
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 10


def test_l14_a_slow_index_pushes_back_and_says_so(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(sink={"max_pending_batches": 2, "max_records_per_trigger": 10})
    slow, append = threading.Event(), JavaTable.append

    def slowly(table: JavaTable, *args: Any, **more: Any) -> None:
        if table.name.endswith("_index"):
            assert slow.wait(WITHIN)
        append(table, *args, **more)

    with running(config, spark) as sink:
        monkeypatch.setattr(JavaTable, "append", slowly)
        produce(broker.bootstrap, name, numbered(100))
        why = eventually(lambda: sink.committer.progress.blocked, "it pushes back", sink=sink)
        assert "2 batches wait for a commit; the bound is 2" in why
        assert len(sink.committer.pending) == 2
        slow.set()
        assert sink.wait_until(sink.ends(), WITHIN)
        assert sink.committer.progress.blocked == ""
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 100
    proven(config, spark)


# ── rebuilt from the ledgers ─────────────────────────────────────────────────────────────────────

TOLD = (
    "sink, batch, table_name, topic, partition, start_offset, end_offset, written, rejected, "
    "skipped, invisible, merged, epoch, commit_id, snapshot_id"
)


def index_rows(lake: Lake, name: str) -> set[tuple[Any, ...]]:
    rows = lake.query(f"db.{name}_index", TOLD)
    assert len(set(rows)) == len(rows)
    return set(rows)


def test_deleted_index_rows_are_rebuilt_and_l13_other_partitions_stay_proven(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Callable[..., Path]
):
    create_topic(broker.bootstrap, name, 3)
    produce(broker.bootstrap, name, numbered(60), 3)
    path = write_toml(sink={"max_records_per_trigger": 12})
    config = load(path)
    catch_up(config, spark)
    before = index_rows(lake, name)
    assert len({row[1] for row in before}) >= 5
    assert invoked(path, "--dry-run") == (0, [])
    spark.sql(f"DELETE FROM lake.db.{name}_index WHERE partition = 1 AND batch IN (1, 3)")
    lost = before - index_rows(lake, name)
    assert len(lost) == 2
    report = {report.table: report for report in reports(config, spark)}[f"db.{name}"]
    verdicts = {line.range.partition.number: line.verdict for line in report.partitions}
    assert verdicts[0] == verdicts[2] == "proven"
    assert verdicts[1] != "proven"
    wanted = sorted((row[5], row[6]) for row in lost)
    assert invoked(path, "--dry-run") == (2, wanted)
    assert index_rows(lake, name) == before - lost, "nothing is done in a dry run"
    assert invoked(path) == (2, wanted)
    assert index_rows(lake, name) == before
    assert invoked(path) == (0, [])
    proven(config, spark)
    produce(broker.bootstrap, name, numbered(6, 100), 3)
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 66
    proven(config, spark)


def test_an_index_whose_tag_and_entries_were_removed_is_refused_and_can_be_repaired(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """Its rows are there, and no position: all of them would be written once more."""
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(40), 2)
    config = make_config(sink={"max_records_per_trigger": 12})
    catch_up(config, spark)
    before = index_rows(lake, name)
    table = f"db.{name}_index"
    spark.sql(f"ALTER TABLE lake.{table} DROP TAG `frazil/{name}`")
    spark.sql(
        f"CALL lake.system.rewrite_data_files(table => '{table}', "
        "options => map('rewrite-all', 'true'))"
    )
    spark.sql(
        f"CALL lake.system.expire_snapshots(table => '{table}', retain_last => 1, "
        "older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    for _ in range(2):  # the claim of the first is there when the second comes
        with pytest.raises(Expired, match=rf"rows of sink {name}, but not its ledger"):
            catch_up(config, spark)
    assert index_rows(lake, name) == before
    spark.sql(f"DELETE FROM lake.{table} WHERE sink = '{name}'")
    produce(broker.bootstrap, name, numbered(6, 100), 2)
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 46
    ranges = {row[4:7] for row in index_rows(lake, name)}
    assert {row[4:7] for row in before} < ranges
    proven(config, spark)


def invoked(path: Path, *options: str) -> tuple[int, list[tuple[int, int]]]:
    """`frazil index rebuild`: how many rows are written, and of which ranges."""
    done = CliRunner().invoke(app, ["index", "rebuild", str(path), "--json", *options])
    assert done.exit_code == 0, (done.output, done.exception)
    [rebuilt] = json.loads(done.stdout)["sinks"]
    assert rebuilt["unknown"] == []
    return rebuilt["written"], sorted((span["start"], span["end"]) for span in rebuilt["ranges"])


@pytest.mark.long
def test_of_several_tables_each_gets_its_rows_and_the_stream_its_own(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config(
        decode={"format": "json"},
        sink={"max_records_per_trigger": 20},
        table=[{"name": f"db.{name}_a"}, {"name": f"db.{name}_b"}],
        route=[
            {"field": "kind", "values": [suffix], "to": [f"db.{name}_{suffix}"]} for suffix in "ab"
        ]
        + [{"field": "kind", "skip": True}],
    )
    for kinds in ("ab", "a", "b", "abx", "x", "ab"):
        records = [json.dumps({"kind": kinds[n % len(kinds)], "id": n}).encode() for n in range(20)]
        produce(broker.bootstrap, name, records, 2)
        catch_up(config, spark)
    before = index_rows(lake, name)
    spark.sql(f"DELETE FROM lake.db.{name}_index WHERE batch IN (1, 3, 5) AND partition = 0")
    assert {row[2] for row in before - index_rows(lake, name)} == {
        "*",
        f"db.{name}_a",
        f"db.{name}_b",
    }
    [outcome] = rebuild_index(config, spark).sinks
    assert outcome.unknown == ()
    assert index_rows(lake, name) == before
    all_proven(config, spark, f"db.{name}_a", f"db.{name}_b")


def test_a_rebuild_disturbs_no_running_sink_and_two_at_once_double_nothing(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(40))
    config = make_config(sink={"max_records_per_trigger": 10})
    catch_up(config, spark)
    before = index_rows(lake, name)
    spark.sql(f"DELETE FROM lake.db.{name}_index WHERE batch IN (1, 2)")
    rewrite, others = JavaTable.rewrite, []

    def raced(table: JavaTable, *args: Any, **more: Any) -> None:
        if not others:
            others.append(0)
            others[0] = rebuild_index(config, spark).sinks[0].written
        rewrite(table, *args, **more)

    with running(config, spark) as sink:
        produce(broker.bootstrap, name, numbered(10, 100))
        assert sink.wait_until(sink.ends(), WITHIN)
        monkeypatch.setattr(JavaTable, "rewrite", raced)
        [outcome] = rebuild_index(config, spark).sinks
        assert (others, outcome.written) == ([2], 0), "the second found nothing to do"
        produce(broker.bootstrap, name, numbered(10, 200))
        assert sink.wait_until(sink.ends(), WITHIN)
    assert before < index_rows(lake, name)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 60
    proven(config, spark)
