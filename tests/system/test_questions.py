"""The questions of docs/guide/questions.md to a real index, in Spark and in DuckDB; `frazil locate`
and `frazil.as_of` on real tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

import frazil
from frazil.config.model import Config, load
from frazil.errors import ConfigError, Expired
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import catch_up, numbered, produce
from tests.unit.test_questions import BLOCKS, SNAPSHOT

Make = Callable[..., Config]


class Engines:
    """The page's blocks, with this test's names in them."""

    def __init__(self, spark: Any, lake: Lake, index: str, table: str, topic: str) -> None:
        self._spark = spark
        self._duckdb = duckdb.connect()
        self._names = {
            "lake.shop.frazil_index": f"lake.{index}",
            "'warehouse/shop/frazil_index'": f"'{lake.metadata_file(index)}'",
            "lake.shop.orders": f"lake.{table}",
            "'warehouse/shop/orders'": f"'{lake.metadata_file(table)}'",
            "'orders'": f"'{topic}'",
            "1700": "17",
            "2000": "40",
            "1000": "10",
        }

    def put(self, **names: str) -> None:
        self._names |= names

    def run(self, key: str) -> dict[str, list[tuple[Any, ...]]]:
        """Engine → rows, of those that the block is for."""
        engine, text = BLOCKS[key]
        for name, own_name in self._names.items():
            text = text.replace(name, own_name)
        answers = {}
        if engine != "DuckDB":
            for statement in filter(str.strip, text.split(";")):
                rows = self._spark.sql(statement).collect()
            answers["Spark"] = [tuple(row) for row in rows]
        if engine != "Spark":
            answers["DuckDB"] = self._duckdb.execute(text).fetchall()
        return answers


def test_every_question_has_the_same_answer_in_spark_and_in_duckdb(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """On the index of a real stream, first as it is, then with known faults in it."""
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    for number in range(3):
        produce(broker.bootstrap, name, numbered(40, 40 * number), 2)
        catch_up(config, spark)
    whole = f"db.{name}_index"
    engines = Engines(spark, lake, whole, f"db.{name}", name)
    (first,) = lake.query(whole, "snapshot_id", "WHERE partition = 0 AND start_offset = 0")
    engines.put(**{SNAPSHOT: str(first[0])})
    answers = {key: engines.run(key) for key in BLOCKS}
    for key, answer in answers.items():
        if len(answer) == 2 and "CREATE" not in BLOCKS[key][1] and key != "Slowest batches 1":
            assert plain(answer["Spark"]) == plain(answer["DuckDB"]), key
    assert answers["Gaps 1"]["DuckDB"] == answers["Overlaps 1"]["DuckDB"] == []
    assert [row[:5] for row in answers["Where offset N is 1"]["Spark"]] == [
        (name, f"db.{name}", 0, first[0], 0)
    ]
    assert (
        answers["As of an offset 1"]["Spark"] == answers["As of an offset 2"]["DuckDB"] == [(40,)]
    )
    assert [row[3] for row in answers["Position 1"]["Spark"]] == [60, 60]
    newest = answers["Open it 3"]["Spark"][0][0].removeprefix("file:")
    assert newest == lake.metadata_file(whole)

    # The same rows without one batch of partition 0, and with another one twice and shifted.
    planted = f"db.{name}_planted"
    spark.sql(
        f"CREATE TABLE lake.{planted} AS SELECT * FROM lake.{whole} "
        "WHERE NOT (batch = 1 AND partition = 0)"
    )
    spark.sql(
        f"INSERT INTO lake.{planted} SELECT * FROM lake.{whole} WHERE batch = 1 AND partition = 1"
    )
    engines = Engines(spark, lake, planted, f"db.{name}", name)
    for key in [key for key in BLOCKS if key.startswith("Open it")]:
        engines.run(key)
    for engine, rows in engines.run("Gaps 1").items():
        assert rows == [(name, name, 0, 20, 40, 20, 2)], engine
    for engine, rows in engines.run("Overlaps 1").items():
        assert rows == [(name, name, 1, 20, 40, 1)], engine


def plain(rows: list[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    """Without the time zone that only one of the engines tells."""
    return [
        tuple(
            value.replace(tzinfo=None).isoformat() if hasattr(value, "tzinfo") else f"{value}"
            for value in row
        )
        for row in rows
    ]


def test_of_many_tables_the_stream_joins_and_no_table_does(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_a"}, {"name": f"db.{name}_b"}],
        route=[{"field": "k", "values": [k], "to": [f"db.{name}_{k}"]} for k in ("a", "b")],
        dead_letters={"table": f"db.{name}_dead"},
    )
    for kinds in (["a", "odd"], ["b"], ["a"]):
        produce(broker.bootstrap, name, [json.dumps({"k": kind}).encode() for kind in kinds])
        catch_up(config, spark)
    engines = Engines(spark, lake, f"db.{name}_index", f"db.{name}_a", name)
    for key in [key for key in BLOCKS if key.startswith("Open it")]:
        engines.run(key)
    assert engines.run("Gaps 1") == {"Spark": [], "DuckDB": []}
    for rows in engines.run("Rejected by day 1").values():
        assert [(row[1], row[2], row[3], float(row[4])) for row in rows] == [(name, 1, 4, 25.0)]


# ── locate ───────────────────────────────────────────────────────────────────────────────────────


def frazil_locate(*arguments: str) -> tuple[int, Any, str]:
    """In a process of its own, which never starts a JVM."""
    code = "from frazil.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "locate", *arguments, "--no-spark", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_locate_finds_batch_snapshot_and_files_without_a_jvm(
    broker: Broker, spark: Any, lake: Lake, name: str, write_toml: Callable[..., Path]
):
    create_topic(broker.bootstrap, name, 2)
    path = write_toml()
    for number in range(3):
        produce(broker.bootstrap, name, numbered(40, 40 * number), 2)
        catch_up(load(path), spark)
    code, answer, errors = frazil_locate(str(path), name, "0", "25")
    assert code == 0, errors
    (batch,) = answer["batches"]
    (place,) = batch["tables"]
    assert (batch["sink"], batch["batch"], batch["start"], batch["end"]) == (name, 1, 20, 40)
    assert (place["table"], place["contains"], place["expired"]) == (f"db.{name}", "yes", False)
    (row,) = spark.sql(place["sql"]).collect()
    assert (row["_topic_partition"], row["_offset"]) == (0, 25)
    (file,) = (
        spark.table(f"lake.db.{name}")
        .where("_topic_partition = 0 AND _offset = 25")
        .select("_file")
        .collect()
    )
    assert place["files"] == [file[0]]
    # It was not there one snapshot before.
    (older,) = spark.sql(
        f"SELECT parent_id FROM lake.db.{name}.snapshots WHERE snapshot_id = {place['snapshot']}"
    ).collect()
    before = place["sql"].replace(str(place["snapshot"]), str(older[0]))
    assert spark.sql(before).collect() == []

    uri = f"jdbc:sqlite:{lake.folder}/catalog.db"
    code, by_name, errors = frazil_locate(
        f"db.{name}",
        name,
        "0",
        "25",
        "--catalog",
        "type=jdbc",
        "--catalog",
        f"uri={uri}",
        "--catalog",
        f"warehouse={lake.folder}/warehouse",
    )
    assert code == 0, errors
    assert by_name["batches"] == answer["batches"]
    code, outside, _ = frazil_locate(str(path), name, "0", "60")
    assert (code, outside["reason"]) == (3, f"not read yet: sink {name} is at 60")

    spark.sql(
        f"CALL lake.system.expire_snapshots(table => 'db.{name}', retain_last => 1, "
        "older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    code, answer, _ = frazil_locate(str(path), name, "0", "25")
    (place,) = answer["batches"][0]["tables"]
    assert (code, place["expired"]) == (0, True)
    assert f"VERSION AS OF {place['oldest_snapshot']} " in place["sql"]
    assert len(spark.sql(place["sql"]).collect()) == 1


# ── as of ────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_as_of_an_offset_or_a_cut(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    for number in range(3):
        produce(broker.bootstrap, name, numbered(40, 40 * number), 2)
        catch_up(config, spark)

    def rows(*where: Any, **more: Any) -> int:
        return int(frazil.as_of(spark, *where, **more).count())

    assert [rows(config, name, 0, offset) for offset in (0, 19, 20, 59)] == [40, 40, 80, 120]
    assert rows(config, cut={name: {"0": 20, "1": 21}}) == 80
    assert rows(f"db.{name}", name, 1, 5) == 40
    with pytest.raises(ConfigError, match=rf"sink {name} is at {name}\[0\]@60"):
        frazil.as_of(spark, config, name, 0, 60)
    with pytest.raises(ConfigError, match="no snapshot of it has these partitions"):
        frazil.as_of(spark, config, "other", 0, 1)
    with pytest.raises(ConfigError, match="does not exist"):
        frazil.as_of(spark, f"db.{name}_none", name, 0, 1)
    for wrong in ((), (name,), (name, 0)):
        with pytest.raises(ConfigError, match="cannot read a table as of a cut"):
            frazil.as_of(spark, config, *wrong)
    spark.sql(
        f"CALL lake.system.expire_snapshots(table => 'db.{name}', retain_last => 1, "
        "older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    with pytest.raises(Expired) as refused:
        frazil.as_of(spark, config, name, 0, 5)
    number = refused.value.hint.rsplit(" ", 1)[1]
    assert spark.sql(f"SELECT * FROM lake.db.{name} VERSION AS OF {number}").count() == 120
    assert rows(config, name, 0, 59) == 120


@pytest.mark.long
def test_a_table_that_got_nothing_lately_is_as_it_is(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_a"}, {"name": f"db.{name}_b"}],
        route=[{"field": "k", "values": [k], "to": [f"db.{name}_{k}"]} for k in ("a", "b")],
    )
    for kinds in (["a", "b"], ["b"], ["b"]):
        produce(broker.bootstrap, name, [json.dumps({"k": kind}).encode() for kind in kinds])
        catch_up(config, spark)
    assert frazil.as_of(spark, config, name, 0, 3, table=f"db.{name}_a").count() == 1
    assert frazil.as_of(spark, config, name, 0, 2, table=f"db.{name}_b").count() == 2
    with pytest.raises(ConfigError, match="fills several"):
        frazil.as_of(spark, config, name, 0, 3)
