"""Tables made on first data: as the config says, where it says, and no others."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from frazil.config.model import Config
from frazil.errors import ConfigError
from frazil.iceberg.java import JavaCatalog
from frazil.sink import Sink
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_once
from tests.property.test_names import hostile
from tests.system.streams import (
    WITHIN,
    all_proven,
    audited,
    avro,
    catch_up,
    eventually,
    produce,
    running,
)

Make = Callable[..., Config]
ROW = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "country", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {
            "name": "inner",
            "type": {
                "type": "record",
                "name": "Inner",
                "fields": [{"name": "n", "type": "int"}, {"name": "x", "type": "double"}],
            },
        },
        {"name": "list", "type": {"type": "array", "items": "string"}},
    ],
}
BEGIN = datetime(2023, 12, 31, 22, 30, tzinfo=timezone.utc)
#: As the config has it, and Iceberg's own function of the same.
TRANSFORMS = {
    "country": "country",
    "inner.n": "inner.n",
    "truncate(2, country)": "truncate(2, country)",
    "bucket(4, id)": "bucket(4, id)",
    "year(at)": "years(at)",
    "month(at)": "months(at)",
    "day(at)": "days(at)",
    "hour(at)": "hours(at)",
}


def rows(count: int) -> list[dict[str, Any]]:
    countries = ["germany", "greece", None, "france", "fr"]
    return [
        {
            "id": i,
            "country": countries[i % 5],
            "at": BEGIN + timedelta(minutes=97 * i),
            "inner": {"n": i % 3, "x": i / 2},
            "list": ["a"],
        }
        for i in range(count)
    ]


def tables_like(lake: Lake, pattern: str) -> list[str]:
    """What the catalog has, asked of SQLite itself."""
    with sqlite3.connect(lake.folder / "catalog.db") as catalog:
        rows = catalog.execute("SELECT table_namespace, table_name FROM iceberg_tables").fetchall()
    return [name for name in sorted(map(".".join, rows)) if re.fullmatch(pattern, name)]


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "row.avsc"
    path.write_text(json.dumps(ROW))
    return str(path)


def test_tables_are_partitioned_sorted_identified_and_placed_as_the_config_says(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, schema: str
):
    create_topic(broker.bootstrap, name, 1)
    given = rows(40)
    produce(broker.bootstrap, name, [avro(ROW, row) for row in given])
    by = {f"db.{name}_{i}": text for i, text in enumerate(TRANSFORMS)}
    special, place = f"new_{name}.inside.it", str(lake.folder / "elsewhere" / name)
    config = make_config(
        decode={"format": "avro", "schema": schema},
        table=[
            *({"name": table, "partition_by": [text]} for table, text in by.items()),
            {
                "name": special,
                "location": place,
                "format_version": 3,
                "identifier_fields": ["id", "inner.n"],
                "partition_by": ["truncate(1, country)"],
                "sort_by": ["country desc nulls last", "bucket(2, id)", "at desc"],
                "properties": {"write.metadata.previous-versions-max": "7", "owner": "me"},
            },
        ],
        route=[{"topics": [name], "to": [*by, special]}],
    )
    catch_up(config, spark)
    all_proven(config, spark, *by, special)
    expected = [(row["id"], row["country"], row["at"]) for row in given]
    for table in by:
        assert lake.query(table, 'id, country, "at"', "ORDER BY id") == expected
    asked = [
        f"SELECT '{table}' AS t, CAST({_sql(text)} AS STRING) AS p, count(*) AS n "
        f"FROM lake.{table} GROUP BY 2"
        for table, text in by.items()
    ]
    by_function = Counter({(r.t, r.p): r.n for r in spark.sql(" UNION ALL ".join(asked)).collect()})
    by_metadata: Counter[tuple[str, str | None]] = Counter()
    for table in by:
        for row in spark.table(f"lake.{table}.partitions").collect():
            [value] = row.partition
            by_metadata[table, None if value is None else str(value)] += row.record_count
    assert by_metadata == by_function

    made = JavaCatalog(spark, "lake").load(special)
    assert made is not None
    assert made.format_version == 3
    assert made.location == place
    assert made.properties["write.metadata.previous-versions-max"] == "7"
    assert made.properties["owner"] == "me"
    fields = json.loads(made.schema)
    named = {field["name"]: field for field in fields["fields"]}
    inside = {field["name"]: field for field in named["inner"]["type"]["fields"]}
    assert sorted(fields["identifier-field-ids"]) == sorted([named["id"]["id"], inside["n"]["id"]])
    assert all(field["required"] for field in (named["id"], named["inner"], inside["n"]))
    files = spark.table(f"lake.{special}.files").select("file_path", "sort_order_id").collect()
    assert {row.sort_order_id for row in files} == {1}
    seen = []
    buckets = dict(spark.sql(f"SELECT id, lake.system.bucket(2, id) FROM lake.{special}").collect())
    for path in (row.file_path.removeprefix("file:") for row in files):
        assert path.startswith(f"{place}/data/")
        file_rows = pq.read_table(path, partitioning=None).to_pylist()
        keys = [
            (r["country"] is None, _backwards(r["country"]), buckets[r["id"]], -r["at"].timestamp())
            for r in file_rows
        ]
        assert keys == sorted(keys)
        seen += [row["id"] for row in file_rows]
    assert sorted(seen) == [row["id"] for row in given]
    assert len(files) < len(seen) / 4, "there was something to sort"


def _sql(text: str) -> str:
    function = TRANSFORMS[text]
    return f"lake.system.{function}" if "(" in function else function


def _backwards(text: str | None) -> list[int]:
    return [-ord(letter) for letter in text or ""] + [1]


WRONG = {
    "partition_by": [
        "day(country)",
        "hour(missing)",
        "bucket(id)",
        "list",
        "truncate(2, at)",
        "median(id)",
        "inner",
    ],
    "identifier_fields": ["missing", "inner.x", "list", "inner"],
    "sort_by": ["missing desc", "year(country)", "id sideways"],
}


def test_what_does_not_fit_the_records_is_refused_before_anything_is_made(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, schema: str
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [avro(ROW, row) for row in rows(2)])
    for key, texts in WRONG.items():
        for text in texts:
            sections: Any = {
                "decode": {"format": "avro", "schema": schema},
                "table": [{"name": f"db.{name}_fine"}, {"name": f"db.{name}_wrong", key: [text]}],
                "route": [{"topics": [name], "to": [f"db.{name}_fine", f"db.{name}_wrong"]}],
            }
            with pytest.raises(ConfigError, match=re.escape(f"db.{name}_wrong")) as error:
                Sink(make_config(**sections)).start(spark)
            column = re.sub(r".*[(, ]|\)", "", text.removesuffix(" desc"))
            assert text in error.value.message or column in error.value.message
    assert tables_like(lake, rf"db\.{name}_.*") == [f"db.{name}_index"]


def test_two_sinks_that_make_the_same_table_at_once_make_one(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """Each brings a column that the other has not."""
    configs = []
    for suffix in "ab":
        topic = f"{name}.{suffix}"
        create_topic(broker.bootstrap, topic, 1)
        values = [json.dumps({"id": i, suffix: f"{suffix}{i}"}).encode() for i in range(20)]
        produce(broker.bootstrap, topic, values)
        configs.append(
            lake.config(
                f"{name}_{suffix}",
                topic,
                broker.bootstrap,
                decode={"format": "json"},
                table=[{"name": f"db.{name}"}],
                route=[{"topics": [topic], "to": [f"db.{name}"]}],
            )
        )
    both = threading.Barrier(2)
    ended: list[bool] = []

    def live(config: Config) -> None:
        both.wait()
        sink = Sink(config).start(spark)
        try:
            ended.append(sink.wait_until(sink.ends(), WITHIN))
        finally:
            sink.stop(5)

    threads = [threading.Thread(target=live, args=(config,)) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WITHIN)
    assert ended == [True, True]
    rows = lake.query(f"db.{name}", "_topic, _offset, id, a, b")
    assert_once(row[:2] for row in rows)
    assert {row[0]: (row[3:]) for row in rows if row[1] == 3} == {
        f"{name}.a": ("a3", None),
        f"{name}.b": (None, "b3"),
    }
    assert len(rows) == 40
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    reports = audited(spark, table.name)
    assert [report.sink for report in reports] == [f"{name}_a", f"{name}_b"]
    assert [report.written for report in reports] == [20, 20]
    for report in reports:
        assert report.verdict == "proven", report  # the files' names tell them apart


def test_a_sink_makes_no_more_tables_than_it_may_and_goes_on(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """The names come by two partitions at once: no task knows what the other asks for."""
    create_topic(broker.bootstrap, name, 2)
    made = f"db.{name}_of_{{value}}"
    config = make_config(
        sink={"max_tables": 5},
        decode={"format": "json"},
        table=[{"name": f"db.{name}_own"}, {"name": made}],
        route=[
            {"field": "kind", "values": ["own"], "to": [f"db.{name}_own"]},
            {"field": "kind", "to": [made]},
        ],
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
    )

    def send(*kinds: str) -> None:
        values = [json.dumps({"kind": kind}).encode() for kind in kinds]
        produce(broker.bootstrap, name, values, 2)

    send("own", "a")
    with running(config, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        send(*(f"{part}{i}" for i in range(5) for part in "cd"))
        eventually(lambda: sink.wait_until(sink.ends(), 1), "the stream goes on", sink=sink)
        send("own", "a", "late", "own")
        eventually(lambda: sink.wait_until(sink.ends(), 1), "and on", sink=sink)
    tables = tables_like(lake, rf"db\.{name}_(own|of_\w+)")
    assert len(tables) == 5, tables
    held = {table: len(lake.query(table, "kind")) for table in tables}
    assert held[f"db.{name}_own"] == 3
    assert held[f"db.{name}_of_a"] == 2
    dead_letters = lake.query(f"db.{name}_dead", "kind, message")
    assert sum(held.values()) + len(dead_letters) == 16
    assert len(dead_letters) == 8
    assert all(kind == "name" and "no room" in message for kind, message in dead_letters), (
        dead_letters
    )
    all_proven(config, spark, *tables, f"db.{name}_dead")


def test_hostile_names_make_nothing_outside_the_namespace(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """The allowlist lets everything through: what is left is the floor that no setting lifts."""
    create_topic(broker.bootstrap, name, 2)
    names = hostile(seed=5, count=400)
    produce(broker.bootstrap, name, [json.dumps({"to": hostile}).encode() for hostile in names], 2)
    made = f"db.{name}_{{value}}"
    config = make_config(
        sink={"max_tables": 12},
        decode={"format": "json"},
        table=[{"name": made}],
        route=[{"field": "to", "allowed_names": "(?s).*", "to": [made]}],
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
    )
    before = set(lake.folder.rglob("*"))
    outside = set(lake.folder.parent.iterdir())
    catch_up(config, spark)
    assert set(lake.folder.parent.iterdir()) == outside
    home = lake.folder / "warehouse" / "db"
    for path in set(lake.folder.rglob("*")) - before:
        if path.name.startswith("catalog.db"):
            continue
        inside = path.relative_to(home).parts
        assert re.fullmatch(rf"{name}_[A-Za-z0-9_]{{1,128}}", inside[0]), path
        assert len(inside) == 1 or inside[1] in ("data", "metadata", "stage"), path
    tables = tables_like(lake, rf"(?s)(.*\W)?{name}_.*")
    assert all(re.fullmatch(rf"db\.{name}_[A-Za-z0-9_]+", table) for table in tables), tables
    filled = [table for table in tables if not table.endswith(("_index", f"{name}_dead"))]
    assert 5 < len(filled) <= 12, "some of them are names"
    assert len({table.lower() for table in filled}) == len(filled)
    written = [row for table in filled for row in lake.query(table, "_topic_partition, _offset")]
    dead_letters = lake.query(f"db.{name}_dead", '"partition", "offset"')
    assert_once([*written, *dead_letters])
    assert len(written) + len(dead_letters) == len(names)
    all_proven(config, spark, *filled, f"db.{name}_dead")


def test_files_lie_where_the_table_says_and_format_version_1_is_refused(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [b'{"id": 1}', b'{"id": 2}'])
    data, metadata = tmp_path / "its data", tmp_path / "its metadata"
    wanted = {
        "write.data.path": str(data),
        "write.metadata.path": str(metadata),
        "write.object-storage.enabled": "true",
    }
    config = make_config(decode={"format": "json"}, table={"properties": wanted})
    catch_up(config, spark)
    all_proven(config, spark, f"db.{name}")
    assert sorted(lake.query(f"db.{name}", "id")) == [(1,), (2,)]
    [file] = data.rglob("*.parquet")
    assert len(file.relative_to(data).parts) == 5, "by the hash of its name"
    assert list(metadata.glob("frazil-*-m0.avro"))
    assert not list((lake.folder / "warehouse" / "db" / name).rglob("frazil-*"))
    old = make_config(
        decode={"format": "json"}, sink={"id": f"{name}_old"}, table={"name": f"db.{name}_old"}
    )
    spark.sql(
        f"CREATE TABLE lake.db.{name}_old (id BIGINT) USING iceberg "
        "TBLPROPERTIES ('format-version' = '1')"
    )
    with pytest.raises(ConfigError, match="expected format version 2 or 3, found 1"):
        Sink(old).start(spark)
