"""Snapshots of tables are expired by the sink: on real Kafka, Spark and Iceberg."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import Config
from frazil.iceberg import maintenance_tasks
from frazil.iceberg.java import JavaCatalog
from frazil.sink import Sink
from frazil.steps import Step
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact
from tests.system.streams import WITHIN, catch_up, numbered, produce, proven
from tests.system.test_upserts import Feed, chaos, upsert
from tests.upserts import history, spark_rows


def test_old_snapshots_go_with_their_files_and_all_that_is_left_is_exact(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(maintenance_tasks, "TABLE_KEPT", 4)
    monkeypatch.setattr(maintenance_tasks, "TABLE_AT_ONCE", 4)
    table = f"db.{name}"
    feed = Feed(broker, name, 2)
    config = make_config(
        decode={"format": "json"},
        table=upsert(compact_after_commits=3, snapshot_retention="1ms"),
        sink={"max_records_per_trigger": 20},
    )
    seen: set[int] = set()

    def snapshot_ids() -> list[int]:
        metadata = json.loads(Path(lake.metadata_file(table)).read_text())
        return [snapshot.id for snapshot in history(metadata)]

    def on_step(step: Step) -> None:
        if step.name == "expire":  # every snapshot is compared before it goes
            feed.oracle.check(lake.metadata_file(table))
            seen.update(snapshot_ids())

    for number, count in enumerate((160, 40)):
        chaos(feed, number, count, keys=30, partitions=2)
        sink = Sink(config, on_step=on_step).start(spark)
        try:
            assert sink.wait_until(sink.ends(), WITHIN)
        finally:
            sink.stop()
        assert sink.committer.progress.maintenance_error == ""
        if number == 0:
            feed.oracle.check(lake.metadata_file(table))
            release = snapshot_ids()[-1]
            spark.sql(f"ALTER TABLE lake.{table} CREATE TAG release AS OF VERSION {release}")
    left = snapshot_ids()
    assert len(seen - set(left)) >= maintenance_tasks.TABLE_AT_ONCE
    rows = spark_rows(spark, f"lake.{table}")
    assert feed.oracle.check(lake.metadata_file(table), Spark=rows) == 2 * len(left)
    tagged = feed.oracle._states[release]
    assert feed.oracle.compare(tagged, rows(release)) == []
    report = proven(config, spark)
    assert report.proves == "changes"
    assert sum(line.counts.written + line.counts.merged for line in report.partitions) == 200
    # What only they needed is really gone, and nothing else.
    folder = lake.folder / "warehouse/db" / name
    for files, where, column in (
        ("data/**/*.*", "all_files", "file_path"),
        ("metadata/*-m*.avro", "all_manifests", "path"),
        ("metadata/snap-*.avro", "snapshots", "manifest_list"),
    ):
        named = {row[0] for row in spark.table(f"lake.{table}.{where}").select(column).collect()}
        disk = {path.name for path in folder.glob(files) if not path.name.startswith(".")}
        assert disk == {path.rsplit("/", 1)[-1] for path in named}
        known = JavaCatalog(spark, "lake").load(table)
        assert known is not None
        assert known.needed([*named, "/not/there.parquet"]) == named


def test_a_table_that_the_sink_made_keeps_few_snapshots_and_few_metadata_files(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(maintenance_tasks, "TABLE_AGE", 0.001)  # a day is long
    monkeypatch.setattr(maintenance_tasks, "TABLE_KEPT", 3)
    monkeypatch.setattr(maintenance_tasks, "TABLE_AT_ONCE", 3)
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(60))
    few = {"write.metadata.previous-versions-max": "5"}
    config = make_config(sink={"max_records_per_trigger": 5}, table={"properties": few})
    sink = catch_up(config, spark)
    assert sink.committer.progress.maintenance_error == ""
    assert sink.progress.advice == []
    folder = lake.folder / "warehouse/db" / name / "metadata"
    snapshots = spark.table(f"lake.db.{name}.snapshots").count()
    assert snapshots < 12, "some of the 12 commits are forgotten"
    assert len(list(folder.glob("snap-*.avro"))) == snapshots
    assert len(list(folder.glob("*.metadata.json"))) == 6
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 60
    proven(config, spark)


def test_a_table_that_was_there_keeps_everything_and_its_owner_gets_advice(
    broker: Broker,
    spark: Any,
    name: str,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(maintenance_tasks, "TABLE_AGE", 0.001)
    monkeypatch.setattr(maintenance_tasks, "TABLE_KEPT", 1)
    monkeypatch.setattr(maintenance_tasks, "TABLE_AT_ONCE", 1)
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(6))
    spark.sql(
        f"CREATE TABLE lake.db.{name} (value BINARY, _topic STRING, _topic_partition INT, "
        "_offset BIGINT, _timestamp TIMESTAMP) USING iceberg"
    )
    sink = catch_up(make_config(sink={"max_records_per_trigger": 2}), spark)
    assert [line.partition(" is kept")[0] for line in sink.progress.advice] == [
        f"every metadata file of db.{name}",
        f"every snapshot of db.{name}",
    ]
    assert spark.table(f"lake.db.{name}.snapshots").count() >= 4, "a claim and three batches"
