"""A topic becomes a table: real Kafka, Spark and Iceberg; the oracle reads the data files."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from frazil.commit import protocol
from frazil.config.model import Config
from frazil.config.sections import SinkConfig
from frazil.errors import ConfigError, Fenced, FrazilError, Unavailable, Undecodable
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.ledger.entry import entries
from frazil.offsets import Cut
from frazil.run import Run
from frazil.sink import Sink
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact, assert_once, topic_records
from tests.system.streams import (
    WITHIN,
    Registry,
    Steps,
    avro,
    catch_up,
    eventually,
    numbered,
    part,
    produce,
    proven,
    running,
)

Make = Callable[..., Config]


def index_rows(lake: Lake, name: str) -> list[dict[str, Any]]:
    columns = (
        "batch",
        "topic",
        "partition",
        "start_offset",
        "end_offset",
        "written",
        "rejected",
        "skipped",
        "invisible",
        "epoch",
        "snapshot_id",
        "commit_id",
    )
    rows = lake.query(f"db.{name}_index", ", ".join(columns), "ORDER BY topic, partition, batch")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def assert_joined(rows: list[dict[str, Any]]) -> None:
    """The index from its own rows: no gap, no overlap, every offset with one fate."""
    reached: dict[tuple[str, int], int] = {}
    for row in sorted(rows, key=lambda r: (r["topic"], r["partition"], r["start_offset"])):
        key = row["topic"], row["partition"]
        assert row["start_offset"] == reached.get(key, row["start_offset"]), row
        assert row["end_offset"] - row["start_offset"] == sum(
            row[fate] for fate in ("written", "rejected", "skipped", "invisible")
        )
        reached[key] = row["end_offset"]


# ── the plain way ────────────────────────────────────────────────────────────────────────────────


def test_a_topic_becomes_a_table_with_index_proof_and_group_offsets(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 3)
    produce(broker.bootstrap, name, numbered(900), 3)
    config = make_config(sink={"consumer_group": f"{name}-lag"})
    sink = catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 900
    rows = index_rows(lake, name)
    assert_joined(rows)
    assert sum(row["written"] for row in rows) == 900
    assert {row["snapshot_id"] for row in rows} <= {
        s.id
        for s in JavaCatalog(spark, "lake").load(f"db.{name}").history("main")  # type: ignore[union-attr]
    }
    assert proven(config, spark).written == 900
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": f"{name}-lag"})
    published = consumer.committed([TopicPartition(name, p) for p in range(3)], timeout=10)
    consumer.close()
    assert Cut({part(name, p.partition): p.offset for p in published}) == sink.position
    assert sink.position == Cut({part(name, p): 300 for p in range(3)})


def test_nulls_and_empty_values_are_values(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [None, b"", b"x", None])  # type: ignore[list-item]
    catch_up(make_config(), spark)
    assert lake.query(f"db.{name}", "value", "ORDER BY _offset") == [
        (None,),
        (b"",),
        (b"x",),
        (None,),
    ]


# ── transactions ─────────────────────────────────────────────────────────────────────────────────


def transaction(bootstrap: str, name: str, topic: str, values: list[bytes], end: str) -> Producer:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    for i, value in enumerate(values):
        producer.produce(topic, value, partition=i % 2)
    producer.flush(30)
    if end == "commit":
        producer.commit_transaction(30)
    elif end == "abort":
        producer.abort_transaction(30)
    return producer


def test_aborted_records_and_markers_are_counted_and_never_written(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """Markers and aborted records stand between and at the tail of the ranges (H11)."""
    create_topic(broker.bootstrap, name, 2)
    b = broker.bootstrap
    produce(b, name, numbered(10), 2)
    transaction(b, f"{name}-a", name, list(numbered(20, 100)), "commit")
    transaction(b, f"{name}-b", name, list(numbered(14, 200)), "abort")
    transaction(b, f"{name}-c", name, list(numbered(6, 300)), "commit")
    transaction(b, f"{name}-d", name, list(numbered(8, 400)), "abort")
    waiting = transaction(b, f"{name}-e", name, list(numbered(4, 500)), "leave open")
    config = make_config(sink={"max_records_per_trigger": 15})
    with running(config, spark) as sink:
        ends = sink.ends()
        assert sink.wait_until(ends, WITHIN)
        assert assert_exact(lake, f"db.{name}", b, name) == 36
        waiting.commit_transaction(30)
        eventually(lambda: sink.ends() != ends, "the last stable offset moves", sink=sink)
        ends = sink.ends()
        assert sink.wait_until(ends, WITHIN)
    assert assert_exact(lake, f"db.{name}", b, name) == 40
    rows = index_rows(lake, name)
    assert_joined(rows)
    assert sum(row["invisible"] for row in rows) == sum(ends.values()) - 40
    assert proven(config, spark).written == 40


def test_a_topic_of_nothing_but_aborted_records_is_caught_up_and_recorded_later(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    b = broker.bootstrap
    transaction(b, f"{name}-a", name, list(numbered(14)), "abort")
    config = make_config()
    with running(config, spark) as sink:
        ends = sink.ends()
        assert sum(ends.values()) == 16
        assert sink.wait_until(ends, WITHIN)
        produce(b, name, numbered(3), 1)
        assert sink.wait_until(sink.ends(), WITHIN)
    assert assert_exact(lake, f"db.{name}", b, name) == 3
    rows = index_rows(lake, name)
    assert_joined(rows)
    assert sum(row["invisible"] for row in rows) == 16
    proven(config, spark)


# ── topics that grow ─────────────────────────────────────────────────────────────────────────────


def test_partitions_that_are_added_during_the_run_are_read_from_their_beginning(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 3)
    produce(b, name, numbered(30), 3)
    config = make_config(sink={"starting_offsets": "latest"})
    config_earliest = make_config()
    with running(config_earliest, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        admin = AdminClient({"bootstrap.servers": b})
        admin.create_partitions([NewPartitions(name, 12)])[name].result()
        eventually(lambda: len(sink.ends()) == 12, "twelve partitions", sink=sink)
        produce(b, name, numbered(120, 100), 12)
        assert sink.wait_until(sink.ends(), WITHIN)
        assert len(sink.position) == 12
    assert assert_exact(lake, f"db.{name}", b, name) == 150
    assert_joined(index_rows(lake, name))
    produce(b, name, numbered(24, 300), 12)
    catch_up(config, spark)  # `latest` is for a sink without a position
    assert assert_exact(lake, f"db.{name}", b, name) == 174
    assert len(proven(config, spark).partitions) == 12


def test_topics_by_pattern_and_one_that_appears_later(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    for topic in (f"{name}-eu", f"{name}-us", f"x{name}-eu"):
        create_topic(b, topic, 1)
        produce(b, topic, numbered(10))
    config = make_config(sink={"topics": [], "topic_pattern": rf"{name}-.*"})
    with running(config, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        create_topic(b, f"{name}-jp", 2)
        produce(b, f"{name}-jp", numbered(10, 50), 2)
        eventually(lambda: len(sink.ends()) == 4, "the new topic is seen", sink=sink)
        assert sink.wait_until(sink.ends(), WITHIN)
    rows = lake.query(f"db.{name}", "_topic, _topic_partition, _offset, value")
    by_offset = {row[:3]: row[3] for row in rows}
    assert len(by_offset) == len(rows)
    assert by_offset == {
        (topic, *at): value
        for topic in (f"{name}-eu", f"{name}-us", f"{name}-jp")
        for at, value in topic_records(b, topic).items()
    }
    proven(config, spark)


# ── where it begins ──────────────────────────────────────────────────────────────────────────────


def test_latest_takes_what_comes_after_the_start(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(10), 2)
    with running(make_config(sink={"starting_offsets": "latest"}), spark) as sink:
        produce(broker.bootstrap, name, numbered(6, 100), 2)
        assert sink.wait_until(sink.ends(), WITHIN)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset")
    assert sorted(rows) == [(p, o) for p in (0, 1) for o in (5, 6, 7)]
    assert_joined(index_rows(lake, name))


def test_a_sink_that_begins_at_the_end_of_the_topic_is_caught_up_at_once(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(10), 2)
    with running(make_config(sink={"starting_offsets": "latest"}), spark) as sink:
        assert sink.wait_until(sink.ends(), 10), "it waits for records that it will never read"


def test_the_beginning_of_a_sink_does_not_move_with_a_restart(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """What came after the first start is the sink's, even if nothing was committed before."""
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(5))
    config = make_config(sink={"starting_offsets": "latest"})
    with running(config, spark):
        pass
    produce(broker.bootstrap, name, numbered(4, 50))
    with running(config, spark) as sink:
        produce(broker.bootstrap, name, numbered(3, 90))
        assert sink.wait_until(sink.ends(), WITHIN)
    rows = lake.query(f"db.{name}", "_offset", "ORDER BY ALL")
    assert rows == [(o,) for o in range(5, 12)], "records between two runs were skipped in silence"


def test_an_explicit_cut_is_the_beginning_and_one_beyond_the_end_is_refused(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(20), 2)
    with pytest.raises(ConfigError, match=rf"{name}\[1\] offset 11: it ends at 10"):
        Sink(make_config(sink={"starting_offsets": {name: {"1": 11}}})).start(spark)
    with pytest.raises(ConfigError, match=rf"{name}\[7\] does not exist"):
        Sink(make_config(sink={"starting_offsets": {name: {"7": 0}}})).start(spark)
    catch_up(make_config(sink={"starting_offsets": {name: {"1": 7}}}), spark)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset", "ORDER BY ALL")
    assert rows == [(0, o) for o in range(10)] + [(1, o) for o in range(7, 10)]


# ── how much at a time ───────────────────────────────────────────────────────────────────────────


def test_no_batch_has_more_records_than_the_limit(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 3)
    produce(broker.bootstrap, name, numbered(300), 3)
    steps = Steps()
    catch_up(make_config(sink={"max_records_per_trigger": 100}), spark, steps)
    sizes = [step.records for step in steps.named("written")]
    assert sum(sizes) == 300
    assert max(sizes) <= 100, sizes
    assert len(sizes) <= 5, "the limit is used, not just kept"
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 300


def test_no_batch_is_much_larger_than_the_limit_in_bytes(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, (b"x" * 1000 for _ in range(200)), 2)
    steps = Steps()
    catch_up(make_config(sink={"max_bytes_per_trigger": "50KB"}), spark, steps)
    sizes = [step.records for step in steps.named("written")]
    assert sum(sizes) == 200
    assert 40 <= max(sizes) <= 55, sizes


def test_a_large_range_is_split_over_tasks(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(200))
    config = make_config(sink={"max_records_per_task": 60})
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 200
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    assert sorted(file.rows for file in table.readonly.files()[0]) == [50] * 4


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_lost_old_or_foreign_checkpoint_changes_nothing(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    """The table is the checkpoint."""
    b = broker.bootstrap
    create_topic(b, name, 2)
    own, older, foreign = (tmp_path / word for word in ("mine", "older", "foreign"))
    config = make_config(sink={"checkpoint_location": str(own)})
    produced = 0

    def live(situation: str) -> None:
        nonlocal produced
        produced += produce(b, name, numbered(10, produced), 2)
        sink = catch_up(config, spark)
        assert sink.position == Cut({part(name, p): produced // 2 for p in (0, 1)}), situation
        assert assert_exact(lake, f"db.{name}", b, name) == produced, situation

    live("the first")
    assert any(own.glob("*/offsets/*")), "the configured checkpoint was not used"
    shutil.copytree(own, older)
    live("after an ordinary restart")
    shutil.rmtree(own)
    live("after the checkpoint was deleted")
    shutil.rmtree(own)
    shutil.copytree(older, own)
    live("after an older copy was put back")
    other = lake.config(f"{name}x", name, b, sink={"checkpoint_location": str(foreign)})
    catch_up(other, spark)
    shutil.rmtree(own)
    shutil.copytree(foreign, own)
    live("after another sink's was put there")
    assert_joined(index_rows(lake, name))
    assert proven(config, spark).written == produced


def test_batches_gather_for_the_commit_interval_and_share_a_snapshot(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(250))
    config = make_config(sink={"max_records_per_trigger": 50, "commit_interval": "30s"})
    steps = Steps()
    catch_up(config, spark, steps)
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    committed = [e for e, _ in entries(table.history("main"), config.sink.id) if e.ranges]
    assert len(steps.named("staged")) == 5
    assert [len(e.commit_ids) for e in committed] == [4, 1], (
        "the first at once, the others together"
    )
    rows = index_rows(lake, name)
    assert [row["batch"] for row in rows] == [0, 1, 2, 3, 4]
    assert_joined(rows)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 250
    proven(config, spark)


def test_by_default_the_first_rows_are_there_at_once_and_the_next_gather_for_a_minute(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(10), 2)
    defaults = {key: getattr(SinkConfig("x"), key) for key in ("trigger", "commit_interval")}
    steps = Steps()
    with running(make_config(sink=defaults), spark, steps) as sink:
        eventually(lambda: len(steps.named("done")) == 1, "the first batch is committed", sink=sink)
        produce(b, name, numbered(3, 10), 2)
        time.sleep(2.5)  # Spark looks once a second
        assert len(steps.named("planned")) == 1, "a few records did not wait for their batch"
        assert sink.wait_until(sink.ends(), WITHIN)
        assert len(steps.named("planned")) == 2, "who waits for them gets them, together"
    assert assert_exact(lake, f"db.{name}", b, name) == 13


# ── a catalog that is away ───────────────────────────────────────────────────────────────────────


class Outage:
    """Commits to one table fail while it lasts."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.over = False
        self.tries = 0


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Outage]:
    state = Outage(f"db.{name}")
    append = JavaTable.append

    def failing(self: JavaTable, manifests: Any, *args: Any, **more: Any) -> None:
        if self.name == state.table and manifests and not state.over:
            state.tries += 1
            raise Unavailable("cannot commit: the catalog is away")
        append(self, manifests, *args, **more)

    monkeypatch.setattr(JavaTable, "append", failing)
    monkeypatch.setattr(protocol, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(protocol, "LONGEST_PAUSE", 0.05)
    yield state
    state.over = True


def test_while_the_catalog_is_away_the_stream_goes_on_and_catches_up_in_order(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, outage: Outage
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    config = make_config()
    steps = Steps()
    with running(config, spark, steps) as sink:
        for number in range(1, 4):
            produce(b, name, numbered(20, number * 20), 2)
            eventually(lambda n=number: len(sink.committer.pending) >= n, "staged", sink=sink)  # type: ignore[misc]
        eventually(lambda: sink.committer.progress.trouble, "the trouble is reported", sink=sink)
        assert "the catalog is away" in sink.committer.progress.trouble
        assert spark.table(f"lake.db.{name}").count() == 0
        assert not any(sink.position.values())
        outage.over = True
        assert sink.wait_until(sink.ends(), WITHIN)
        eventually(lambda: sink.committer.progress.trouble == "", "the trouble is over", sink=sink)
    assert assert_exact(lake, f"db.{name}", b, name) == 60
    rows = index_rows(lake, name)
    assert_joined(rows)
    for number in (0, 1):
        starts = [row["start_offset"] for row in rows if row["partition"] == number]
        assert starts == sorted(starts), "batches out of order"
    proven(config, spark)


def test_beyond_its_bound_the_stream_blocks_with_the_reason_and_goes_on_by_itself(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, outage: Outage
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(100))
    config = make_config(sink={"max_records_per_trigger": 20, "max_pending_batches": 2})
    with running(config, spark) as sink:
        eventually(lambda: sink.committer.progress.blocked, "the stream blocks", sink=sink)
        blocked = sink.committer.progress.blocked
        assert blocked.startswith("2 batches wait for a commit; the bound is 2: cannot"), blocked
        assert len(sink.committer.pending) == 2
        outage.over = True
        assert sink.wait_until(sink.ends(), WITHIN)
        assert sink.committer.progress.blocked == ""
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 100
    proven(config, spark)


def test_a_blocked_stream_can_be_stopped_and_nothing_is_lost(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, outage: Outage
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(100))
    config = make_config(sink={"max_records_per_trigger": 20, "max_pending_batches": 2})
    sink = Sink(config).start(spark)
    eventually(lambda: sink.committer.progress.blocked, "the stream blocks", sink=sink)
    stopping = threading.Thread(target=sink.stop, args=(0.5,), daemon=True)
    stopping.start()
    stopping.join(20)
    stuck = stopping.is_alive()
    outage.over = True  # whatever comes of it: the next test needs the session
    stopping.join(WITHIN)
    assert not stuck, "stop() waits for a catalog that is away"
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 100


def test_what_one_run_staged_the_next_commits_without_reading_kafka_again(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, outage: Outage
):
    """Nothing is committed yet; the records are gone from Kafka before the next run."""
    b = broker.bootstrap
    create_topic(b, name, 2)
    config = make_config()
    with running(config, spark, flush=0.2) as sink:
        for number in range(1, 4):
            produce(b, name, numbered(20, number * 20), 2)
            eventually(lambda n=number: len(sink.committer.pending) >= n, "staged", sink=sink)  # type: ignore[misc]
        ends = sink.ends()
        eventually(lambda: sink.committer.pending[-1].end == ends, "all is staged", sink=sink)
    expected = topic_records(b, name)
    assert len(expected) == 60
    admin = AdminClient({"bootstrap.servers": b})
    for future in admin.delete_records(
        [TopicPartition(name, p.number, offset) for p, offset in ends.items()]
    ).values():
        future.result()
    outage.over = True
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset, value")
    assert_once(row[:2] for row in rows)
    lost = expected.keys() - {row[:2] for row in rows}
    assert not lost, f"{len(lost)} of {len(expected)} staged records are lost, first {min(lost)}"
    assert {row[:2]: row[2] for row in rows} == expected
    assert_joined(index_rows(lake, name))
    proven(config, spark)


@pytest.mark.long
def test_staged_batches_of_a_partition_that_came_later_are_all_taken_over(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, outage: Outage
):
    """A batch of nothing but the new partition, then one of the old: both stand on the position."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    config = make_config()
    outage.over = True
    catch_up(config, spark)
    outage.over = False
    with running(config, spark, flush=0.2) as sink:
        admin = AdminClient({"bootstrap.servers": b})
        admin.create_partitions([NewPartitions(name, 2)])[name].result()
        eventually(lambda: len(sink.ends()) == 2, "two partitions", sink=sink)
        producer = Producer({"bootstrap.servers": b})
        for staged, partition in enumerate((1, 0), 1):
            for value in numbered(5, staged * 100):
                producer.produce(name, value, partition=partition)
            assert producer.flush(30) == 0
            ends = sink.ends()
            eventually(
                lambda ends=ends: [x for x in sink.committer.pending if x.end.reaches(ends)],  # type: ignore[misc]
                "staged",
                sink=sink,
            )
    outage.over = True
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", b, name) == 20


@pytest.mark.long
def test_a_table_ahead_of_the_index_is_completed_when_a_partition_came_meanwhile(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, outage: Outage
):
    """The run ended between the table and the index; the topic grew before the next one."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    config = make_config()
    outage.table = f"db.{name}_index"
    steps = Steps()
    with running(config, spark, steps, flush=0.2) as sink:
        eventually(lambda: steps.named("committed"), "the table has the batch", sink=sink)
        eventually(lambda: outage.tries, "and the index has not", sink=sink)
    admin = AdminClient({"bootstrap.servers": b})
    admin.create_partitions([NewPartitions(name, 2)])[name].result()
    eventually(lambda: len(sink.ends()) == 2, "two partitions")
    produce(b, name, numbered(10, 50), 2)
    outage.over = True
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", b, name) == 20
    assert_joined(index_rows(lake, name))
    proven(config, spark)


# ── two at once ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After the call, runs begin as in another process: none is known to run here."""
    return lambda: monkeypatch.setattr("frazil.run._runs", {})


@pytest.mark.long
def test_the_older_of_two_runs_is_fenced_and_its_rows_are_absent(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    elsewhere: Callable[[], None],
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(20), 2)
    config = make_config()
    catch_up(config, spark)
    steps = Steps(hold="written")
    with running(config, spark, steps) as older:
        produce(b, name, numbered(20, 100), 2)
        assert steps.held.wait(WITHIN), "the older run has written files and not staged them"
        elsewhere()
        newer = catch_up(config, spark)
        assert newer.epoch == older.epoch + 1
        steps.go.set()
        with pytest.raises(Fenced, match=f"this one is epoch {older.epoch}, the table is at epoch"):
            older.wait_until(Cut({part(name, 0): 10**6}), WITHIN)
    assert assert_exact(lake, f"db.{name}", b, name) == 40
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    epochs = Counter(
        file.path.rsplit("/", 1)[1].removeprefix(f"frazil-{name}-").split("-")[0]
        for file in table.readonly.files()[0]
    )
    assert str(older.epoch) not in epochs
    assert_joined(index_rows(lake, name))
    proven(config, spark)


def ended(sink: Run) -> FrazilError | None:
    try:
        sink.check()
    except FrazilError as error:
        return error
    return None


def test_of_two_runs_that_both_made_the_table_the_newer_goes_on(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    elsewhere: Callable[[], None],
):
    """Both began before there was a table to claim."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    config = make_config()
    with running(config, spark) as older:
        elsewhere()
        steps = Steps(hold="planned")
        with running(config, spark, steps) as newer:
            produce(b, name, numbered(10))
            assert steps.held.wait(WITHIN)
            assert isinstance(eventually(lambda: ended(older), "the older one ends"), Fenced)
            steps.go.set()
            assert newer.wait_until(newer.ends(), WITHIN)
    assert assert_exact(lake, f"db.{name}", b, name) == 10
    proven(config, spark)


def test_two_runs_started_at_the_same_moment_leave_one_and_an_exact_table(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(20), 2)
    config = make_config()
    both = threading.Barrier(2)
    outcomes: list[Any] = []

    def live() -> None:
        both.wait()
        try:
            sink = Sink(config).start(spark)
        except Fenced as error:
            outcomes.append(error)
            return
        try:
            outcomes.append(sink.wait_until(sink.ends(), WITHIN))
        except Fenced as error:
            outcomes.append(error)
        finally:
            sink.stop(5)

    threads = [threading.Thread(target=live) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WITHIN)
        assert not thread.is_alive()
    assert len(outcomes) == 2, "one of them ended with an error that is not its own fence"
    assert True in outcomes, outcomes
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 20
    assert_joined(index_rows(lake, name))


def test_stop_while_the_next_batch_is_about_to_begin_returns(
    broker: Broker, spark: Any, name: str, make_config: Make, monkeypatch: pytest.MonkeyPatch
):
    """Spark calls the batch at the very moment that `stop` has decided to let no more begin."""
    create_topic(broker.bootstrap, name, 1)
    sink = Sink(make_config())
    entering, go = threading.Event(), threading.Event()
    guarded = sink._gated_batch

    def gated(*args: Any) -> None:
        entering.set()
        go.wait(WITHIN)
        guarded(*args)

    monkeypatch.setattr(sink, "_gated_batch", gated)
    run = sink.start(spark)
    query = run._running.query  # Spark's own: the one that `start` hands out stops the sink
    assert query is not None
    stop, stop_asked = query.stop, threading.Event()
    monkeypatch.setattr(query, "stop", lambda: (stop_asked.set(), stop()))
    produce(broker.bootstrap, name, numbered(5))
    assert entering.wait(WITHIN)
    stopping = threading.Thread(target=run.stop, args=(1,), daemon=True)
    stopping.start()
    assert stop_asked.wait(WITHIN), "stop() waits for a batch that has not begun"
    go.set()
    stopping.join(20)
    stuck = stopping.is_alive()
    if stuck and sink._gate.lock.locked():
        sink._gate.lock.release()  # so that the tests after this one have a session
        stopping.join(WITHIN)
    assert not stuck, "stop() waits for the batch, and the batch for stop()"


# ── what the records hold ────────────────────────────────────────────────────────────────────────

UTC = dt.timezone.utc
EVENT = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "placed", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "seen", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "name", "type": "string"},
        {"name": "country", "type": ["null", "string"], "default": None},
    ],
}


def events(count: int) -> list[dict[str, Any]]:
    begin = dt.datetime(2024, 2, 28, 21, 30, tzinfo=UTC)
    return [
        {
            "id": i * 7919,
            "placed": begin + dt.timedelta(hours=5 * i),
            "seen": begin + dt.timedelta(minutes=20 * i),
            "name": f"{'äbc'[i % 3]}{i % 4}-{i}",
            "country": [None, "DE", "F R/1", ""][i % 4],
        }
        for i in range(count)
    ]


def test_partition_transforms_put_each_row_into_its_partition(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 2)
    produced = events(12)
    produce(broker.bootstrap, name, (avro(EVENT, e, 1) for e in produced), 2)
    schema = tmp_path / "event.avsc"
    schema.write_text(json.dumps(EVENT))
    config = make_config(
        decode={"format": "confluent-avro", "schema": str(schema)},
        table={
            "partition_by": [
                "day(placed)",
                "hour(seen)",
                "bucket(4, id)",
                "truncate(2, name)",
                "country",
            ]
        },
    )
    catch_up(config, spark)
    key = "id, placed, seen, name, country"
    duck = sorted(lake.query(f"db.{name}", key))
    expected = sorted((e["id"], e["placed"], e["seen"], e["name"], e["country"]) for e in produced)
    assert [(*r[:1], *(t.astimezone(UTC) for t in r[1:3]), *r[3:]) for r in duck] == expected
    times = "unix_micros(placed) placed, unix_millis(seen) seen"
    rows = spark.sql(
        f"SELECT id, {times}, name, country, _file, lake.system.bucket(4, id) AS bucket "
        f"FROM lake.db.{name}"
    ).collect()
    micros = {e["id"]: int(e["placed"].timestamp() * 1_000_000) for e in produced}
    assert {r.id: r.placed for r in rows} == micros
    assert len(rows) == 12
    files = spark.sql(f"SELECT file_path, partition, record_count FROM lake.db.{name}.files")
    spans = {row.file_path: row for row in files.collect()}
    assert len(spans) > 6
    assert sum(row.record_count for row in spans.values()) == 12
    for row in rows:
        where = spans[row._file].partition
        assert where.placed_day == dt.date(1970, 1, 1) + dt.timedelta(row.placed // 86_400_000_000)
        assert where.seen_hour == row.seen // 3_600_000
        assert where.id_bucket == row.bucket
        assert where.name_trunc == row.name[:2]
        assert where.country == row.country
    # A filter on each source column finds the same rows in both engines: no file is pruned wrongly.
    one = produced[5]
    for rule in (
        f"placed = TIMESTAMP '{one['placed']:%Y-%m-%d %H:%M:%S}'",
        f"id = {one['id']}",
        f"name = '{one['name']}'",
        "country = 'F R/1'",
        "country IS NULL",
    ):
        wanted = spark.sql(f"SELECT id FROM lake.db.{name} WHERE {rule}").collect()
        assert wanted, rule
        assert lake.query(f"db.{name}", "count(*)", f"WHERE {rule}") == [(len(wanted),)], rule
    proven(config, spark)


TAGS = {"name": "tags", "type": ["null", {"type": "map", "values": "long"}], "default": None}
NEWER = {**EVENT, "fields": [*EVENT["fields"], TAGS]}


def test_several_writer_schemas_of_a_registry_go_into_one_table(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    old, new = events(6), [{**e, "tags": {"a": i}} for i, e in enumerate(events(6))]
    mixed = [(EVENT, 1, e) for e in old] + [(NEWER, 2, e) for e in new]
    mixed[1], mixed[8] = mixed[8], mixed[1]
    produce(broker.bootstrap, name, (avro(s, e, i) for s, i, e in mixed))
    with Registry(id1=EVENT, id2=NEWER) as registry:
        config = make_config(decode={"format": "confluent-avro", "registry": {"url": registry.url}})
        catch_up(config, spark)
    rows = lake.query(f"db.{name}", "id, name, tags", "ORDER BY _offset")
    assert [r[:2] for r in rows] == [(e["id"], e["name"]) for _, _, e in mixed]
    assert [r[2] for r in rows] == [e.get("tags") for _, _, e in mixed]
    proven(config, spark)


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_bare_avro_and_json_come_out_as_they_went_in(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path, kind: str
):
    create_topic(broker.bootstrap, name, 1)
    given = [
        {"id": i, "name": f"é{i}", "ratio": i / 4, "deep": {"tags": ["x"] * i}} for i in range(5)
    ]
    schema = tmp_path / "row.avsc"
    deep = {
        "type": "record",
        "name": "Deep",
        "fields": [{"name": "tags", "type": {"type": "array", "items": "string"}}],
    }
    kinds = {"id": "long", "name": "string", "ratio": "double", "deep": deep}
    record = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": k, "type": t} for k, t in kinds.items()],
    }
    schema.write_text(json.dumps(record))
    if kind == "avro":
        produce(broker.bootstrap, name, (avro(record, value) for value in given))
        config = make_config(decode={"format": "avro", "schema": str(schema)})
    else:
        produce(broker.bootstrap, name, (json.dumps(value).encode() for value in given))
        config = make_config(decode={"format": "json"})
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "id, name, ratio, deep", "ORDER BY _offset")
    assert rows == [(e["id"], e["name"], e["ratio"], e["deep"]) for e in given]
    read = spark.sql(f"SELECT id, name, ratio, deep.tags FROM lake.db.{name} ORDER BY id").collect()
    assert [tuple(r) for r in read] == [
        (e["id"], e["name"], e["ratio"], e["deep"]["tags"]) for e in given
    ]


def test_a_record_that_cannot_be_decoded_stops_the_stream_and_is_read_once_it_can_be(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """The registry at hand does not know the second schema; the right one does."""
    create_topic(broker.bootstrap, name, 2)
    values = [avro(EVENT, e, 1) for e in events(20)]
    values[15] = avro(NEWER, {**events(1)[0], "tags": None}, 2)  # partition 1, offset 7
    produce(broker.bootstrap, name, values, 2)
    with Registry(id1=EVENT) as registry:
        config = make_config(decode={"format": "confluent-avro", "registry": {"url": registry.url}})
        with running(config, spark) as sink:
            with pytest.raises(Undecodable) as raised:
                sink.wait_until(sink.ends(), WITHIN)
            assert f"{name}[1] offset 7: " in raised.value.message
            assert "Schema not found" in raised.value.message or "2" in raised.value.message
            assert "nothing was lost or skipped" in raised.value.hint
            assert not any(sink.position.values())
    assert spark.table(f"lake.db.{name}").count() == 0, "a part of the batch is visible"
    spark.sql(f"ALTER TABLE lake.db.{name} ADD COLUMN tags map<string, bigint>")
    with Registry(id1=EVENT, id2=NEWER) as registry:
        config = make_config(decode={"format": "confluent-avro", "registry": {"url": registry.url}})
        catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset")
    assert_once(rows)  # type: ignore[arg-type]
    assert set(rows) == {(p, o) for p in (0, 1) for o in range(10)}
    proven(config, spark)
