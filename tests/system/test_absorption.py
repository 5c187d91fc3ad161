"""A REST catalog that is away, or takes no commits: batches wait, staged, and nothing is lost. The
server is really stopped; what it holds afterwards is read by DuckDB."""

from __future__ import annotations

import threading
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from frazil.commit import protocol
from frazil.config.model import Config
from frazil.errors import Unavailable
from frazil.iceberg.java import JavaCatalog
from frazil.ledger.entry import LedgerEntry, entries
from frazil.ops.orphans import orphans
from frazil.ops.status import status
from frazil.run import Run
from frazil.testing.datagen import create_topic
from tests.bench import faults
from tests.system.streams import WITHIN, eventually, running

ALWAYS = 10**9


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(protocol, "LONGEST_PAUSE", 0.05)


@pytest.fixture
def table(name: str) -> str:
    """A name that no test of another fixture's catalog has, either."""
    return f"{name}_{uuid.uuid4().hex[:6]}"


def streaming(world: faults.World, table: str, way: str) -> Config:
    create_topic(world.bootstrap, table, len(faults.PARTITIONS))
    return faults.config_of(
        world,
        table,
        way,
        topic=table,
        bootstrap=world.bootstrap,
        trigger="50ms",
        commit_interval="0s",
    )


def staged(sink: Run, world: faults.World, table: str, way: str, batches: range) -> None:
    """Each of them is a batch of its own."""
    for number in batches:
        faults.produce(world.bootstrap, table, way, number)
        ends = sink.ends()
        eventually(
            lambda: sink.committer.pending[-1:] and sink.committer.pending[-1].end == ends,  # noqa: B023
            f"batch {number} is staged",
            sink=sink,
        )


def ledger(world: faults.World, config: Config) -> list[LedgerEntry]:
    """What the table's snapshots say of records, oldest first."""
    loaded = world.catalog.load(config.tables[0].name)
    assert loaded is not None
    return [e for e, _ in entries(loaded.history("main"), config.sink.id) if e.ranges][::-1]


def exact(world: faults.World, table: str, way: str) -> bool:
    return world.judge(f"db.{table}", {"main": faults.rows_of(way)}) == "exact"


@pytest.mark.parametrize("way", [pytest.param("append", marks=pytest.mark.long), "upsert"])
def test_while_the_catalog_is_down_batches_are_staged_and_go_in_by_order_when_it_is_back(
    world: faults.World, table: str, way: str
):
    config = streaming(world, table, way)
    with running(config, world.spark) as sink:
        faults.produce(world.bootstrap, table, way, 0)
        assert sink.wait_until(sink.ends(), WITHIN)
        before = sink.position
        world.proxy.refuse()
        world.server.kill()
        try:
            staged(sink, world, table, way, range(1, faults.BATCHES))
            eventually(lambda: sink.committer.progress.trouble, "the trouble is shown", sink=sink)
            assert f"cannot refresh table db.{table}" in sink.committer.progress.trouble
            assert "Connection refused" in sink.committer.progress.trouble
            assert sink.position == before
            with pytest.raises(Unavailable, match="Connection refused"):
                status(config, JavaCatalog(world.spark, config.catalog.name).open_readonly)
        finally:
            world.server.start()
            world.proxy.accept()
        assert sink.wait_until(sink.ends(), WITHIN)
        eventually(lambda: not sink.committer.progress.trouble, "the trouble is over", sink=sink)
    assert exact(world, table, way)
    ledger_entries = ledger(world, config)
    assert len(ledger_entries) > 1
    assert all(a.batches[1] + 1 == b.batches[0] for a, b in pairwise(ledger_entries)), (
        "out of order"
    )
    together = [len(entry.commit_ids) for entry in ledger_entries]
    if way == "upsert":
        assert set(together) == {1}, "a snapshot each (H5)"
    else:
        assert together[-1] > 1
    assert faults.verdict(world, config) == "proven"


def test_a_run_that_takes_over_from_an_outage_needs_no_kafka_and_orphan_removal_leaves_it_alone(
    world: faults.World, table: str
):
    """The catalog can be read, and takes no commits of data: claims go through, batches do not."""
    config = streaming(world, table, "upsert")
    with running(config, world.spark, flush=0.2) as first:
        faults.produce(world.bootstrap, table, "upsert", 0)
        assert first.wait_until(first.ends(), WITHIN)
        world.proxy.plot(table, "503", after=False, times=ALWAYS)
        staged(first, world, table, "upsert", range(1, faults.BATCHES))
        ends, waiting = first.ends(), first.committer.pending
    assert len(waiting) > 1
    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    gone = [TopicPartition(table, p.number, offset) for p, offset in ends.items()]
    for future in admin.delete_records(gone).values():
        future.result()
    with running(config, world.spark, flush=0.2) as heir:
        eventually(lambda: heir.committer.progress.trouble, "it fails for the heir, too", sink=heir)
        answer: dict[str, Any] = status(
            config, JavaCatalog(world.spark, config.catalog.name).open_readonly
        )
        assert answer["epoch"] == heir.epoch == first.epoch + 1
        assert (
            answer["pending_batches"] == answer["waiting"][f"db.{table}"]["batches"] == len(waiting)
        )
        assert answer["pending_bytes"] == sum(batch.bytes for batch in waiting) > 0
        orphan = planted(world, table, epoch=first.epoch)
        leftovers = orphans(config, world.spark)
        assert [Path(path.removeprefix("file:")) for _, path in leftovers] == [orphan]
        for handle, path in leftovers:
            handle.delete(path)
        world.proxy.settle(table)  # the outage is over
        assert heir.wait_until(ends, WITHIN)
    assert exact(world, table, "upsert")
    last = ledger(world, config)[-len(waiting) :]
    assert [e.commit_ids for e in last] == [(batch.commit_id,) for batch in waiting]
    assert {e.epoch for e in last} == {heir.epoch}
    assert faults.verdict(world, config) == "proven"


def planted(world: faults.World, table: str, epoch: int) -> Path:
    """A file as a task that died would have left it, in a batch that was never staged."""
    loaded = world.catalog.load(f"db.{table}")
    assert loaded is not None
    name = f"frazil-{table}-{epoch}-99-{uuid.uuid4()}.parquet"
    path = Path(loaded.location.removeprefix("file:")) / "data" / name
    path.write_bytes(b"of no use")
    return path


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ({"max_pending_batches": 2}, "2 batches wait for a commit; the bound is 2: cannot"),
        ({"max_pending_bytes": "1KB"}, "staged bytes wait for a commit; the bound is 1000: cannot"),
        ({"max_pending_age": "500ms"}, "s; the bound is 0 s: cannot"),
    ],
    ids=["count", "bytes", "age"],
)
def test_each_bound_holds_the_stream_until_commits_go_through_and_says_why(
    world: faults.World, table: str, bound: dict[str, Any], reason: str
):
    run = faults.ScriptedRun(faults.config_of(world, table, "append", **bound), "append")
    run.begin(world.spark)
    try:
        run.batch()
        run.commit()
        world.proxy.plot(table, "503", after=False, times=ALWAYS)
        run.batch()
        progress = run.committer.progress
        eventually(lambda: progress.trouble, "the commit fails")
        more = threading.Thread(target=lambda: [run.batch() for _ in range(3)], daemon=True)
        more.start()
        blocked = eventually(lambda: progress.blocked, "the stream is held")
        assert reason in blocked
        assert "Service failed: 503" in blocked, "and why they wait"
        held = len(run.committer.pending)
        assert held <= 2
        more.join(0.5)
        assert more.is_alive()
        assert len(run.committer.pending) == held
        world.proxy.settle(table)
        more.join(WITHIN)
        assert not more.is_alive()
        run.commit()
        assert progress.blocked == ""
    finally:
        run.end()
    rows = faults.rows_of("append", run.staged)
    assert run.staged == 5
    assert world.judge(f"db.{table}", {"main": rows}) == "exact"
