"""A REST catalog and an S3 bucket, both real servers (SeaweedFS; not Iceberg's own code)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from frazil.auditing.evidence import of_table
from frazil.config.model import from_document
from frazil.errors import ConfigError
from frazil.iceberg.java import JavaCatalog
from frazil.sink import Sink
from frazil.testing import datagen
from frazil.testing.kafka import Broker

KEY, SECRET = "frazil", "not-a-real-secret"


def _sink(
    spark: Any,
    broker: Broker,
    store: dict[str, str],
    name: str,
    folder: Path,
    table: dict[str, Any] | None = None,
    decode: dict[str, str] | None = None,
    **sink: Any,
) -> Sink:
    (folder / "order.avsc").write_text(datagen.SCHEMA)
    config = from_document(
        {
            "sink": {
                "id": name,
                "topics": [name],
                "index_table": f"db.{name}_index",
                "trigger": "50ms",
                "commit_interval": "0s",
                "max_records_per_trigger": 4_000,
                "unavailable_timeout": "30s",
                **sink,
            },
            "kafka": {"bootstrap.servers": broker.bootstrap},
            "decode": decode or {"schema": str(folder / "order.avsc")},
            "catalog": {"name": "s3lake", **store},
            "table": [{"name": f"db.{name}", **(table or {"partition_by": ["day(placed_at)"]})}],
        }
    )
    spark.conf.set("spark.sql.catalog.s3lake", "org.apache.iceberg.spark.SparkCatalog")
    for key, value in config.catalog.properties.resolved().items():
        spark.conf.set(f"spark.sql.catalog.s3lake.{key}", value)
    return Sink(config)


def test_a_topic_goes_to_s3_through_a_rest_catalog_and_two_runs(
    spark: Any, broker: Broker, store: dict[str, str], name: str, tmp_path: Path
):
    datagen.create_topic(broker.bootstrap, name, 2)
    source = datagen.OrderGenerator()
    for epoch in (1, 2):
        datagen.produce(broker.bootstrap, name, 2, rows=9_000, orders=source)
        made = _sink(spark, broker, store, name, tmp_path, staging_location="s3://stage/frazil")
        sink = made.start(spark)
        try:
            assert sink.wait_until(sink.ends(), 90), sink.committer.progress
        finally:
            sink.stop()
        assert sink.epoch == epoch
    sums = spark.sql(
        f"SELECT count(*), count(DISTINCT order_id), max(order_id) FROM s3lake.db.{name}"
    ).first()
    assert tuple(sums) == (18_000, 18_000, 18_000)
    catalog = JavaCatalog(spark, "s3lake")
    table = catalog.load(f"db.{name}")
    assert table is not None
    assert table.location.startswith("s3://lake/")
    report, stream = of_table(catalog.open_readonly, f"db.{name}", "main").reports
    assert stream.verdict == "proven"
    assert report.verdict == "proven"
    assert report.written == 18_000
    assert table.listing(f"s3://stage/frazil/{name}/") == [], "what is committed is cleaned up"


def test_changes_are_upserted_and_compacted_on_s3(
    spark: Any, broker: Broker, store: dict[str, str], name: str, tmp_path: Path
):
    datagen.create_topic(broker.bootstrap, name, 1)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    expected: dict[int, int] = {}
    for turn in range(1, 3):
        for n in range(300):
            key, gone = (n * turn) % 40, n % 7 == 0
            value = None if gone else json.dumps({"id": key, "value": turn * 1000 + n})
            producer.produce(name, value, str(key))
            expected.pop(key, None)
            expected |= {} if gone else {key: turn * 1000 + n}
        assert producer.flush(30) == 0
        made = _sink(
            spark,
            broker,
            store,
            name,
            tmp_path,
            table={"mode": "upsert", "key": ["id"], "compact_after_commits": 1},
            decode={"format": "json", "key_format": "text"},
            staging_location="s3://stage/frazil",
            max_records_per_trigger=100,
        )
        sink = made.start(spark)
        try:
            assert sink.wait_until(sink.ends(), 90), sink.committer.progress
        finally:
            sink.stop()
        assert not sink.committer.progress.maintenance_error
        rows = spark.sql(f"SELECT id, value FROM s3lake.db.{name}").collect()
        assert sorted(map(tuple, rows)) == sorted(expected.items())
    rounds = spark.sql(f"SELECT summary FROM s3lake.db.{name}.snapshots").collect()
    assert any("frazil.compact" in row.summary for row in rounds)
    catalog = JavaCatalog(spark, "s3lake")
    assert of_table(catalog.open_readonly, f"db.{name}", "main").reports[0].verdict == "proven"


def test_a_bucket_that_refuses_the_stage_is_named_at_once(
    spark: Any, broker: Broker, store: dict[str, str], name: str, tmp_path: Path
):
    """A table bucket takes Iceberg's files only; waiting would not help."""
    datagen.create_topic(broker.bootstrap, name, 1)
    datagen.produce(broker.bootstrap, name, 1, rows=100)
    sink = _sink(spark, broker, store, name, tmp_path).start(spark)
    try:
        with pytest.raises(ConfigError, match=r"cannot write s3://lake/.*403"):
            sink.wait_until(sink.ends(), 60)
    finally:
        sink.stop()
