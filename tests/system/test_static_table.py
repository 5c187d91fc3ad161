"""What Java's Iceberg writes is read without it, and means the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import Config
from frazil.errors import ConfigError, Unavailable
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable as Java
from frazil.iceberg.static_table import ReadOnlyTable, find
from frazil.ledger import index
from frazil.offsets import Partition
from frazil.spark.open_table import opener
from frazil.testing import datagen
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import catch_up, numbered, produce
from tests.system.test_object_store import _sink


def loaded(spark: Any, catalog: str, name: str) -> Java:
    table = JavaCatalog(spark, catalog).load(name)
    assert table is not None
    return table


def opened(catalog: dict[str, str], name: str) -> ReadOnlyTable:
    table = find(catalog, name)
    assert table is not None
    return table


def assert_alike(
    plain: ReadOnlyTable, java: Java, spark: Any, name: str, branch: str = "main"
) -> None:
    """`name`: of the table in Spark."""
    assert plain.metadata_file.removeprefix("file:") == java.metadata_file.removeprefix("file:")
    assert (plain.uuid, plain.location) == (java.uuid, java.location)
    assert plain.properties == java.properties
    schemas = [json.loads(table.schema) for table in (plain, java)]
    for schema in schemas:
        schema.setdefault("identifier-field-ids", [])  # of none, some writers say so
    assert schemas[0] == schemas[1]
    history = list(plain.history(branch))
    assert history == list(java.history(branch))
    assert history
    refs = spark.sql(f"SELECT name, type FROM {name}.refs").collect()
    assert plain.tags() == {row.name: java.tagged(row.name) for row in refs if row.type == "TAG"}

    version = "" if branch == "main" else f" VERSION AS OF '{branch}'"
    ids = {field["name"]: field["id"] for field in json.loads(plain.schema)["fields"]}
    topic, number, offset = (ids[column] for column in ("_topic", "_topic_partition", "_offset"))
    expected = {}
    rows = spark.sql(
        "SELECT file_path, record_count, null_value_counts, lower_bounds, upper_bounds "
        f"FROM {name}.files{version} WHERE content = 0"
    )
    for path, count, nulls, low, high in rows.collect():
        low, high = ({key: bytes(bound) for key, bound in (b or {}).items()} for b in (low, high))
        whose = span = None
        if topic in low and low[topic] == high.get(topic) and low[number] == high[number]:
            whose = Partition(low[topic].decode(), int.from_bytes(low[number], "little"))
        if offset in low:
            span = tuple(int.from_bytes(bounds[offset], "little") for bounds in (low, high))
        expected[path] = (count, whose, span, (nulls or {}).get(offset, 0))
    files, deletes = plain.files(branch)
    assert {f.path: (f.rows, f.partition, f.offsets, f.nulls) for f in files} == expected
    assert len(files) == len(expected)
    live = spark.sql(
        "SELECT data_file.content, data_file.file_path, sequence_number "
        f"FROM {name}.entries{version} WHERE status < 2"
    ).collect()
    assert {f.path: f.sequence for f in files} == {p: n for content, p, n in live if content == 0}
    assert deletes == sum(content > 0 for content, _, _ in live)

    select = f"SELECT _topic, _topic_partition, _offset FROM {name}{version}"
    order = lambda row: tuple((value is not None, value) for value in row)  # noqa: E731
    truth = sorted((tuple(row) for row in spark.sql(select).collect()), key=order)
    deep = plain.origins(branch)
    assert deep.column_names == ["topic", "partition", "offset"]
    assert sorted((tuple(row.values()) for row in deep.to_pylist()), key=order) == truth


def test_the_tables_of_a_sink_are_the_same_with_and_without_a_jvm(
    spark: Any, broker: Broker, lake: Lake, make_config: Callable[..., Config], name: str
):
    datagen.create_topic(broker.bootstrap, name, 3)
    config = make_config(sink={"max_records_per_trigger": 200})
    for _ in range(2):
        produce(broker.bootstrap, name, numbered(900), partitions=3)
        catch_up(config, spark)
    settings = config.catalog.properties.resolved()
    plain = opened(settings, f"db.{name}")
    assert_alike(plain, loaded(spark, "lake", f"db.{name}"), spark, f"lake.db.{name}")
    assert {file.partition for file in plain.files()[0]} == {Partition(name, n) for n in range(3)}
    assert sum(file.rows for file in plain.files()[0]) == 1800
    assert plain.tagged(f"frazil/{name}") is not None

    rows = opened(settings, f"db.{name}_index")
    columns = [column for column in index.COLUMNS.names if column in rows.schema]
    read = rows.rows(columns, {"table_name": [f"db.{name}"], "sink": [name]})
    names = ", ".join(columns)
    truth = spark.sql(f"SELECT {names} FROM lake.db.{name}_index").toArrow()
    order = [("batch", "ascending"), ("partition", "ascending")]
    assert read.num_rows > 6
    assert read.cast(truth.schema).sort_by(order) == truth.sort_by(order)
    assert rows.rows(["batch"], {"table_name": ["another"]}).num_rows == 0
    assert find(settings, f"db.{name}_none") is None
    assert find({**settings, "name": "another"}, f"db.{name}") is None
    assert opened(settings, plain.location.removeprefix("file:")).uuid == plain.uuid


@pytest.mark.parametrize(
    ("version", "codec", "mode"),
    [
        pytest.param(1, "gzip", "copy-on-write", marks=pytest.mark.long),
        pytest.param(2, "snappy", "copy-on-write", marks=pytest.mark.long),
        (2, "zstd", "merge-on-read"),
        (3, "uncompressed", "merge-on-read"),
    ],
)
def test_what_spark_writes_and_deletes_is_read(
    spark: Any, lake: Lake, name: str, version: int, codec: str, mode: str
):
    """Bounds cut short, nulls, partitions that changed, rows deleted in files or beside them."""
    table = f"lake.db.{name}"
    spark.sql(
        f"CREATE TABLE {table} (value string, _topic string, _topic_partition int, _offset bigint) "
        f"USING iceberg PARTITIONED BY (_topic) TBLPROPERTIES ('format-version' = '{version}', "
        f"'write.manifest.compression-codec' = '{codec}', 'write.delete.mode' = '{mode}', "
        "'write.metadata.compression-codec' = 'gzip')"
    )

    def insert(topic: str, number: int, start: int, end: int) -> None:
        spark.sql(
            f"INSERT INTO {table} SELECT concat('v', id), {topic}, {number}, id "
            f"FROM range({start}, {end}, 1, 1)"
        )

    insert("'short'", 0, 0, 10)
    insert("'a.topic.longer.than.bounds.are'", 1, 0, 10)
    spark.sql(f"ALTER TABLE {table} CREATE TAG frazil_tag")
    spark.sql(f"ALTER TABLE {table} CREATE BRANCH other")
    spark.sql(f"ALTER TABLE {table} DROP PARTITION FIELD _topic")
    insert("if(id % 2 = 0, 'even', 'odd')", 2, 5, 9)
    insert("NULL", 3, 0, 3)
    spark.sql(f"INSERT INTO {table}.branch_other VALUES ('b', 'short', 0, NULL)")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN value TO content")
    spark.sql(f"DELETE FROM {table} WHERE _offset IN (3, 7)")
    spark.sql(f"DELETE FROM {table} WHERE _topic = 'odd' AND _offset = 5")
    catalog = lake.config("x", "x", "x:1").catalog.properties.resolved()
    plain = opened(catalog, f"db.{name}")
    assert ".gz." in plain.metadata_file
    for branch in ("main", "other"):
        assert_alike(plain, loaded(spark, "lake", f"db.{name}"), spark, table, branch)
    assert bool(plain.files()[1]) == (mode == "merge-on-read")
    assert set(plain.tags()) == {"frazil_tag"}
    assert plain.rows(["_offset"], {"_topic": ["short", "odd"]}).num_rows == 8

    first = [snapshot.id for snapshot in plain.history("main")][-1]
    assert len(plain.files(snapshot_id=first)[0]) == 1
    spark.sql(
        f"CALL lake.system.expire_snapshots(table => 'db.{name}', retain_last => 1, "
        "older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    expired = opened(catalog, f"db.{name}")
    assert len(list(expired.history("main"))) == 1
    assert_alike(expired, loaded(spark, "lake", f"db.{name}"), spark, table)


def test_a_hadoop_catalog_is_read(spark: Any, tmp_path: Path, name: str):
    settings = {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")}
    spark.conf.set(f"spark.sql.catalog.{name}", "org.apache.iceberg.spark.SparkCatalog")
    for key, value in settings.items():
        spark.conf.set(f"spark.sql.catalog.{name}.{key}", value)
    spark.sql(
        f"CREATE TABLE {name}.db.sub.t (_topic string, _topic_partition int, _offset bigint) "
        "USING iceberg"
    )
    for number in range(3):
        spark.sql(f"INSERT INTO {name}.db.sub.t VALUES ('t', {number}, {number})")
    plain = opened(settings, "db.sub.t")
    assert_alike(plain, loaded(spark, name, "db.sub.t"), spark, f"{name}.db.sub.t")
    assert find(settings, "db.sub.none") is None


def test_a_rest_catalog_and_an_object_store_are_read(
    spark: Any, broker: Broker, store: dict[str, str], name: str, tmp_path: Path
):
    datagen.create_topic(broker.bootstrap, name, 2)
    datagen.produce(broker.bootstrap, name, 2, rows=2_000)
    made = _sink(spark, broker, store, name, tmp_path, staging_location="s3://stage/frazil")
    sink = made.start(spark)
    try:
        assert sink.wait_until(sink.ends(), 90), sink.committer.progress
    finally:
        sink.stop()
    settings = made.config.catalog.properties.resolved()
    plain = opened(settings, f"db.{name}")
    assert plain.location.startswith("s3://lake/")
    assert_alike(plain, loaded(spark, "s3lake", f"db.{name}"), spark, f"s3lake.db.{name}")
    assert opened(settings, f"db.{name}_index").rows(["sink"]).num_rows >= 2
    assert opened(settings, plain.location).uuid == plain.uuid
    assert find(settings, "db.none") is None
    assert find(settings, "none.none") is None
    as_commands_do = opener(made.config, spark=False)(f"db.{name}")
    assert as_commands_do is not None
    assert as_commands_do.uuid == plain.uuid

    secret = settings["s3.secret-access-key"]
    for wrong, kind in (
        ({"s3.secret-access-key": "another-secret"}, ConfigError),
        ({"credential": "frazil:another-secret"}, ConfigError),
        ({"uri": "http://127.0.0.1:1"}, Unavailable),
    ):
        with pytest.raises(kind) as caught:
            opened({**settings, **wrong}, f"db.{name}").files()
        assert secret not in str(caught.value)
        assert "another-secret" not in str(caught.value)
