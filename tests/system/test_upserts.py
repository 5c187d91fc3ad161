"""Upserts on real Kafka, Spark and Iceberg: at every snapshot the table is what a plain dictionary
holds after the records up to there, read by Spark and by DuckDB."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from frazil.commit.provisioning import TableProvisioner
from frazil.config.model import Config
from frazil.errors import ConfigError, Overlap
from frazil.iceberg import rewrite_data_files
from frazil.pipeline.task import BatchPlan
from frazil.pipeline.versions import FileBounds
from frazil.sink import Sink
from frazil.sources import range_tasks
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import (
    Steps,
    all_proven,
    catch_up,
    eventually,
    proven,
    running,
)
from tests.upserts import Oracle, Record, history, of_envelope, spark_rows

Make = Callable[..., Config]
NOW = int(time.time() * 1000)
PER_RUN = 150


class Feed:
    """Records into a topic, which an oracle knows as well."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        partitions: int,
        key: tuple[str, ...] = ("id",),
        order: Callable[[Any], Any] | None = None,
    ):
        """`order`: of a row or a change, where one says which is the newer."""
        create_topic(broker.bootstrap, topic, partitions)
        # A topic just made has no leader: what is tried again must not come out of order.
        settings = {"bootstrap.servers": broker.bootstrap, "enable.idempotence": "true"}
        self._producer = Producer(settings)
        self.topic, self._key = topic, key
        self._next = [0] * partitions
        self._order = order or (lambda _: None)
        self.oracle = Oracle(key=key, ordered=order is not None)

    def send(
        self, *rows: dict[str, Any], partition: int = 0, stamp: int = 1, gone: bool = False
    ) -> None:
        """Rows; with `gone`, the keys of rows that are no more."""
        for row in rows:
            key = {name: row[name] for name in self._key}
            value = None if gone else json.dumps(row)
            self._put(value, json.dumps(key), partition, stamp)
            record = Record(
                self.topic,
                partition,
                self._next[partition] - 1,
                stamp,
                tuple(key.values()),
                None if gone else row,
                order=None if gone else self._order(row),
            )
            self.oracle.add([record])

    def change(self, *changes: dict[str, Any], partition: int = 0) -> None:
        """Debezium's."""
        for change in changes:
            self._put(json.dumps(change), None, partition, 1)
            offset = self._next[partition] - 1
            self.oracle.add(
                [
                    of_envelope(
                        (self.topic, partition), offset, 1, change, self._key, order=self._order
                    )
                ]
            )

    def raw(self, value: str | None, key: str | None, partition: int = 0) -> None:
        """What the oracle need not know."""
        self._put(value, key, partition, 1)

    def _put(self, value: str | None, key: str | None, partition: int, stamp: int) -> None:
        # (What is older than a week, retention takes.)
        self._producer.produce(self.topic, value, key, partition=partition, timestamp=NOW + stamp)
        self._next[partition] += 1
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(30) == 0


@pytest.fixture
def check(spark: Any, lake: Lake) -> Callable[..., int]:
    def every_snapshot(feed: Feed, table: str) -> int:
        rows = spark_rows(spark, f"lake.{table}")
        return feed.oracle.check(lake.metadata_file(table), Spark=rows)

    return every_snapshot


def upsert(**more: Any) -> dict[str, Any]:
    return {"mode": "upsert", "key": ["id"], **more}


def batches(lake: Lake, table: str) -> list[dict[str, str]]:
    """Summaries of the snapshots that took records in."""
    snapshots = history(json.loads(Path(lake.metadata_file(table)).read_text()))
    return [
        dict(snapshot.summary)
        for snapshot in snapshots
        if any(a < b for a, b in snapshot.ranges.values())
    ]


def chaos(feed: Feed, seed: int, count: int, keys: int, partitions: int) -> None:
    """Any key in any partition at any time, deleted now and then."""
    chance = random.Random(seed)
    for n in range(count):
        row = {"id": chance.randrange(keys), "value": seed * 10_000 + n}
        feed.send(
            row,
            partition=chance.randrange(partitions),
            stamp=chance.randrange(1, 50),
            gone=chance.random() < 0.2,
        )
    feed.flush()


@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.long), 3])
def test_at_every_snapshot_the_table_is_what_a_dictionary_holds(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any, version: int
):
    feed = Feed(broker, name, 3)
    config = make_config(
        decode={"format": "json"},
        table=upsert(format_version=version),
        sink={"max_records_per_trigger": 150},
    )
    for number in range(2):
        chaos(feed, number, 400, keys=60, partitions=3)
        catch_up(config, spark)
    assert check(feed, f"db.{name}") >= 10
    report = proven(config, spark)
    assert report.proves == "changes"
    counted = sum(line.counts.written + line.counts.merged for line in report.partitions)
    assert counted == 800
    assert all(
        int(batch["frazil.keys"]) == int(batch["added-equality-deletes"])
        for batch in batches(lake, f"db.{name}")
    )


def test_one_key_inserted_updated_deleted_and_inserted_again_in_one_batch(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any
):
    feed = Feed(broker, name, 1, key=("id", "part"))
    config = make_config(decode={"format": "json"}, table=upsert(key=["id", "part"]))
    one = {"id": 1, "part": "a"}
    feed.send({**one, "value": 1}, {**one, "value": 2})
    feed.send(one, gone=True)
    feed.send({**one, "value": 3}, {"id": 1, "part": "b", "value": 4})
    feed.send({"id": 2, "part": "a", "value": 5})
    feed.send({"id": 2, "part": "a"}, gone=True)
    feed.flush()
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "id, part, value", "ORDER BY ALL")
    assert rows == [(1, "a", 3), (1, "b", 4)]
    [summary] = batches(lake, f"db.{name}")
    assert json.loads(summary["frazil.counts"]) == {"read": 2, "written": 2, "merged": 5}
    check(feed, f"db.{name}")


def test_a_key_that_moves_to_another_partition_leaves_no_twin_also_when_the_spec_changes(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any
):
    feed = Feed(broker, name, 1)
    config = make_config(
        decode={"format": "json"},
        table=upsert(partition_by=["place", "bucket(4, id)"], compact_after_commits=0),
    )
    places = ["north", "south", "east"]
    for turn in range(3):
        feed.send(*({"id": n, "place": places[(n + turn) % 3]} for n in range(20)))
        feed.flush()
        catch_up(config, spark)
        if turn == 1:
            spark.sql(
                f"ALTER TABLE lake.db.{name} REPLACE PARTITION FIELD place WITH truncate(1, place)"
            )
    feed.send(*({"id": n} for n in range(5)), gone=True)
    feed.flush()
    catch_up(config, spark)
    assert len(lake.query(f"db.{name}", "id")) == 15
    assert check(feed, f"db.{name}") >= 8
    specs = spark.sql(f"SELECT DISTINCT spec_id FROM lake.db.{name}.files").collect()
    assert sorted(row[0] for row in specs) == [0, 1, 2]  # its first, that of deletes, its second
    proven(config, spark)


def test_batches_that_gathered_are_snapshots_of_their_own_and_in_order(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any
):
    feed = Feed(broker, name, 1)
    config = make_config(
        decode={"format": "json"},
        table=upsert(),
        sink={"max_records_per_trigger": 10, "commit_interval": "1h"},
    )
    feed.send({"id": 0, "value": -1})
    feed.flush()
    steps = Steps()
    with running(config, spark, steps) as sink:
        sink.wait_until(sink.ends())
        for turn in range(4):  # the same keys in each batch
            feed.send(*({"id": n, "value": turn} for n in range(10)))
        feed.flush()
        eventually(lambda: len(sink.committer.pending) == 4, "four batches wait", sink=sink)
    assert len(batches(lake, f"db.{name}")) == 5
    assert sorted(lake.query(f"db.{name}", "id, value")) == [(n, 3) for n in range(10)]
    check(feed, f"db.{name}")
    proven(config, spark)


def test_keys_that_stay_in_their_kafka_partition_need_no_shuffle_and_others_are_found_out(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any
):
    feed = Feed(broker, name, 2)
    config = make_config(decode={"format": "json"}, table=upsert(partitioned_by_key=True))
    for turn in range(2):
        for n in range(40):
            feed.send({"id": n % 20, "value": turn * 100 + n}, partition=n % 2)
        feed.flush()
        catch_up(config, spark)
    check(feed, f"db.{name}")
    proven(config, spark)
    feed.send({"id": 100, "value": 1}, partition=0)
    feed.send({"id": 100, "value": 2}, partition=1)
    feed.flush()
    sink = Sink(config).start(spark)
    try:
        with pytest.raises(Overlap, match="the same key came from"):
            sink.wait_until(sink.ends())
    finally:
        sink.stop()
    assert len(lake.query(f"db.{name}", "id")) == 20  # nothing of the batch was written


def test_tasks_that_had_a_key_in_common_write_again_and_leave_nothing_behind(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any, monkeypatch
):
    ways: list[bool] = []

    def collected(spark: Any, plan: BatchPlan, *more: Any) -> Any:
        ways.append(bool(plan.together))
        return run(spark, plan, *more)

    run = range_tasks._collect
    monkeypatch.setattr(range_tasks, "_collect", collected)
    feed = Feed(broker, name, 2)
    config = make_config(
        decode={"format": "json"}, table=upsert(), sink={"max_records_per_trigger": 40}
    )

    def batches_of(keys: int, count: int) -> list[bool]:
        ways.clear()
        for n in range(40 * count):
            feed.send({"id": n % keys, "value": n}, partition=n % 2)
        feed.flush()
        catch_up(config, spark)
        return ways

    assert batches_of(20, 2) == [False, False]  # each task by itself
    assert batches_of(5, 2) == [False, True, True]
    check(feed, f"db.{name}")
    proven(config, spark)
    kept = spark.sql(f"SELECT file_path FROM lake.db.{name}.all_files").collect()
    file_names = {
        path.name for path in (lake.folder / "warehouse" / "db" / name / "data").rglob("*.parquet")
    }
    assert file_names == {Path(row.file_path).name for row in kept}


def change(op: str, before: Any = None, after: Any = None) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after, "ts_ms": 1}


def test_changes_of_a_database_are_applied_and_keys_that_change_too(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    feed = Feed(broker, name, 1)
    config = make_config(
        decode={"format": "json"},
        table=upsert(),
        route=[{"pattern": ".*", "to": [f"db.{name}"], "envelope": "debezium"}],
        dead_letters={"table": f"db.{name}_dead"},
    )

    def rows() -> list[tuple[Any, ...]]:
        return sorted(lake.query(f"db.{name}", "id, name, _op"))

    def row(number: int | None, name: str = "a") -> dict[str, Any]:
        return {"id": number, "name": name}

    feed.change(change("c", after=row(1)), change("c", after=row(2)), change("c", after=row(3)))
    feed.change(change("u", row(1), row(1, "b")), change("d", row(2)))
    feed.raw(None, '{"id": 2}')  # the tombstone behind a delete
    feed.flush()
    catch_up(config, spark)
    assert rows() == [(1, "b", "u"), (3, "a", "c")]
    feed.raw(json.dumps(change("u", row(3), row(4, "moved"))), None)
    feed.raw(json.dumps(change("c", after=row(2, "again"))), None)
    feed.raw(json.dumps(change("c", after=row(None))), None)  # a key must have a value
    feed.flush()
    catch_up(config, spark)
    assert rows() == [(1, "b", "u"), (2, "again", "c"), (4, "moved", "u")]
    assert lake.query(f"db.{name}_dead", '"offset"') == [(8,)]
    proven(config, spark)


def test_a_tombstone_before_there_is_a_table_deletes_nothing(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, check: Any
):
    feed = Feed(broker, name, 1)
    config = make_config(decode={"format": "json"}, table=upsert())
    feed.send({"id": 1}, gone=True)
    feed.flush()
    with running(config, spark) as sink:
        feed.send({"id": 2, "value": 1})
        feed.flush()
        assert sink.wait_until(sink.ends(), 60)
    assert lake.query(f"db.{name}", "id") == [(2,)]
    proven(config, spark)


def test_a_table_with_another_identity_is_refused(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    feed = Feed(broker, name, 1)
    spark.sql(f"CREATE TABLE lake.db.{name} (id BIGINT NOT NULL, value BIGINT) USING iceberg")
    feed.send({"id": 2, "value": 1})
    feed.flush()
    sink = Sink(make_config(decode={"format": "json"}, table=upsert()))
    with pytest.raises(ConfigError, match="its identifier fields are none"):
        sink.start(spark)


def test_a_change_log_has_every_change_as_a_row(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    feed = Feed(broker, name, 1)
    config = make_config(decode={"format": "json"}, table={"mode": "changelog", "key": ["id"]})
    feed.send({"id": 1, "value": 1}, {"id": 1, "value": 2})
    feed.send({"id": 1}, gone=True)
    feed.flush()
    catch_up(config, spark)
    feed.send({"id": 1, "value": 3, "more": "x"})
    feed.flush()
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_offset, _op, id, value, more", "ORDER BY _offset")
    assert rows == [
        (0, "u", 1, 1, None),
        (1, "u", 1, 2, None),
        (2, "d", 1, None, None),
        (3, "u", 1, 3, "x"),
    ]
    assert proven(config, spark).proves == "records"


def test_late_changes_do_not_win_and_deletes_are_remembered_by_a_databases_log_number(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Make,
    check: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """Out of order within a batch and from batch to batch, from one Kafka partition and the other,
    before and behind a delete, over compactions of both tables and a restart."""
    monkeypatch.setattr(rewrite_data_files, "MANY", 2)
    feed = Feed(broker, name, 2, order=lambda change: change["source"]["lsn"])
    config = make_config(
        decode={"format": "json"},
        table=upsert(version_column="_source.lsn", compact_after_commits=2),
        route=[{"pattern": ".*", "to": [f"db.{name}"], "envelope": "debezium"}],
        sink={"max_records_per_trigger": PER_RUN // 3},
    )
    chance = random.Random(7)
    for number in range(2):
        for n in range(PER_RUN):
            row = {"id": chance.randrange(25), "value": number * 1000 + n}
            op = chance.choice("uuud")
            feed.change(
                {
                    **change(op, row if op == "d" else None, None if op == "d" else row),
                    "source": {"lsn": n + number * 120 + chance.randrange(-60, 60), "db": "x"},
                },
                partition=chance.randrange(2),
            )
        feed.flush()
        catch_up(config, spark)
    assert check(feed, f"db.{name}") >= 12
    by_table = all_proven(config, spark, f"db.{name}", f"db.{name}_deleted")
    assert (by_table[f"db.{name}"].proves, by_table[f"db.{name}_deleted"].proves) == (
        "changes",
        "records",
    )
    for table in (f"db.{name}", f"db.{name}_deleted"):
        snapshots = history(json.loads(Path(lake.metadata_file(table)).read_text()))
        assert any("frazil.compact" in snapshot.summary for snapshot in snapshots), table
    totals = lake.query(config.index_table, "written, skipped", "WHERE table_name = '*'")
    assert [sum(column) for column in zip(*totals, strict=True)] == [2 * PER_RUN, 0]


@pytest.mark.long
def test_what_is_staged_counts_and_a_tombstone_takes_the_order_of_what_it_deletes(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Make,
    check: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    listed: list[str] = []

    def known(tables: TableProvisioner, table: str) -> Any:
        """The first list has a file that is gone since: another is made."""
        answer = real(tables, table)
        listed.append(table)
        gone = FileBounds(f"{lake.folder}/gone.parquet", (None,))
        return answer if len(listed) > 1 else (replace(answer[0], files=(gone,)), *answer[1:])

    real = TableProvisioner._known
    monkeypatch.setattr(TableProvisioner, "_known", known)
    feed = Feed(broker, name, 1, order=lambda row: row["version"])
    config = make_config(
        decode={"format": "json"},
        table=upsert(version_column="version"),
        dead_letters={"table": f"db.{name}_dead"},
        sink={"max_records_per_trigger": 4, "commit_interval": "1h"},
    )

    def rows(*versions: int | None, value: int) -> None:
        for number, version in enumerate(versions):
            if version is not None:
                feed.send({"id": number, "version": version, "value": value})
            else:
                feed.send({"id": number}, gone=True)

    rows(5, 5, 5, 5, value=0)
    feed.flush()
    with running(config, spark) as sink:
        sink.wait_until(sink.ends())
        assert len(listed) == 2
        rows(7, 3, None, 5, value=1)  # none of these four batches is committed before the last
        rows(6, 4, 4, None, value=2)
        rows(6, 5, 5, 4, value=3)
        rows(8, None, None, 6, value=4)
        feed.flush()
        eventually(lambda: len(sink.committer.pending) == 4, "four batches wait", sink=sink)
    assert sorted(lake.query(f"db.{name}", "id, version, value")) == [(0, 8, 4), (3, 6, 4)]
    check(feed, f"db.{name}")
    feed.raw('{"id": 9, "version": null}', '{"id": 9}')
    feed.flush()
    catch_up(config, spark)
    [(offset, why)] = lake.query(f"db.{name}_dead", '"offset", message')
    assert offset == 20
    assert "column 'version' says which change of a key is the newer one" in why
    all_proven(config, spark, f"db.{name}", f"db.{name}_deleted")
    kept = lake.query(f"db.{name}_deleted", "id, version, _offset", "ORDER BY _offset")
    assert kept == [(2, 5, 6), (3, 5, 11), (1, 5, 17), (2, 5, 18)]
