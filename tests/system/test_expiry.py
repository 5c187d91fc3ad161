"""Snapshots of tables are expired by the sink: on real Kafka, Spark and Iceberg."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.core.config import Config
from frazil.sink import Sink, Step
from frazil.surface.broker import Broker
from frazil.table import maintain
from tests.oracle import Lake
from tests.system.streams import WITHIN, proven
from tests.system.test_upserts import Feed, chaos, upsert
from tests.upserts import history, spark_rows


def test_old_snapshots_go_with_their_files_and_all_that_is_left_is_exact(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr(maintain, "TABLE_KEPT", 4)
    monkeypatch.setattr(maintain, "TABLE_AT_ONCE", 4)
    table = f"db.{name}"
    feed = Feed(broker, name, 2)
    config = make_config(
        decode={"format": "json"}, table=upsert(compact_after=3, keep_snapshots="1ms"),
        sink={"max_records_per_trigger": 20},
    )  # fmt: skip
    seen: set[int] = set()

    def there() -> list[int]:
        metadata = json.loads(Path(lake.metadata_file(table)).read_text())
        return [each.id for each in history(metadata)]

    def on_step(step: Step) -> None:
        if step.name == "expire":  # every snapshot is compared before it goes
            feed.oracle.check(lake.metadata_file(table))
            seen.update(there())

    for life, count in enumerate((160, 40)):
        chaos(feed, life, count, keys=30, partitions=2)
        sink = Sink(config, on_step=on_step)
        sink.start(spark)
        try:
            assert sink.wait_until(sink.ends(), WITHIN)
        finally:
            sink.stop()
        assert sink.committer.progress.untidy == ""
        if life == 0:
            feed.oracle.check(lake.metadata_file(table))
            release = there()[-1]
            spark.sql(f"ALTER TABLE lake.{table} CREATE TAG release AS OF VERSION {release}")
    left = there()
    assert len(seen - set(left)) >= maintain.TABLE_AT_ONCE
    rows = spark_rows(spark, f"lake.{table}")
    assert feed.oracle.check(lake.metadata_file(table), Spark=rows) == 2 * len(left)
    tagged = feed.oracle._states[release]
    assert feed.oracle.compare(tagged, rows(release)) == []
    report = proven(config, spark)
    assert report.proves == "changes"
    assert sum(line.counts.written + line.counts.merged for line in report.lines) == 200
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
        known = sink.catalog.load(table)
        assert known is not None
        assert known.needed([*named, "/not/there.parquet"]) == named
