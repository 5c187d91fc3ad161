"""Rows of a query into upsert tables: at every snapshot the table is what a plain dictionary holds,
read by Spark and by DuckDB."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import frazil
from frazil.auditing.report import TableReport
from frazil.config.explain import path_taken
from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError, SchemaMismatch
from frazil.offsets import BATCHES
from frazil.sql.definitions import config_of_file
from frazil.steps import Step
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, topic_records
from tests.system.streams import catch_up, eventually, produce
from tests.system.test_dataframes import assert_proven, caught_up, fates, rate, written
from tests.upserts import cuts, duckdb_rows, history, spark_rows

Make = Callable[..., Config]
#: (partition, offset) → record
Records = Mapping[tuple[int, int], dict[str, Any]]
PARTITIONS = 2


def changes(count: int, start: int = 0) -> list[bytes]:
    """JSON records of seven keys in five countries; each eleventh deletes its key."""
    return [
        json.dumps({"id": n % 7, "n": n, "c": f"c{n % 5}", "gone": n % 11 == 0}).encode()
        for n in range(start, start + count)
    ]


def records_of(broker: Broker, topic: str) -> dict[tuple[int, int], dict[str, Any]]:
    values = topic_records(broker.bootstrap, topic)
    return {at: json.loads(value or b"") for at, value in values.items()}


def assert_each_snapshot(
    lake: Lake,
    spark: Any,
    name: str,
    records: Records,
    expected: Callable[[Records], set[tuple[Any, ...]]],
    columns: str,
) -> int:
    """Every snapshot holds what `expected` makes of the records below its cut; how many do."""
    metadata = lake.metadata_file(f"db.{name}")
    engines = {"DuckDB": duckdb_rows(metadata), "Spark": spark_rows(spark, f"lake.db.{name}")}
    reached: dict[int, int] = {}
    snapshots = 0
    for snapshot in history(json.loads(Path(metadata).read_text())):
        for (topic, number), (_, end) in cuts(snapshot.summary.get("frazil.ranges", "{}")).items():
            if topic == name:
                reached[number] = end
        below = {at: r for at, r in records.items() if at[1] < reached.get(at[0], 0)}
        for engine, read in engines.items():
            rows = [tuple(row[c] for c in columns.split()) for row in read(snapshot.id)]
            assert len(set(rows)) == len(rows), (engine, snapshot)
            assert set(rows) == expected(below), (engine, snapshot)
        snapshots += 1
    return snapshots


def counted(records: Records) -> set[tuple[Any, ...]]:
    counts = Counter(record["c"] for record in records.values())
    return {
        (c, count, sum(r["n"] for r in records.values() if r["c"] == c))
        for c, count in counts.items()
    }


def test_an_aggregation_without_a_watermark_is_the_table_at_every_snapshot(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, PARTITIONS)
    config = make_config(decode={"format": "json"}, sink={"max_records_per_trigger": 25})
    dies = {"staged": True}

    def sink(on_step: Any = None) -> frazil.Sink:
        rows = (
            frazil.read(spark, config)
            .groupBy("c")
            .agg(F.count("*").alias("n"), F.sum("n").alias("s"))
        )
        return written(
            rows,
            name,
            output_mode="update",
            mode="upsert",
            key=["c"],
            compact_after_commits=2,
            checkpoint_location=str(tmp_path / "checkpoint"),
            on_step=on_step,
        )

    def die(step: Step) -> None:
        if dies.pop(step.name, False):
            raise FrazilError("the run ends here")

    produce(broker.bootstrap, name, changes(60), PARTITIONS)
    caught_up(sink())
    produce(broker.bootstrap, name, changes(60, 60), PARTITIONS)
    run = sink(die).start()  # the batch is staged, and Spark has not heard of it
    eventually(lambda: not run.active, "the run ends")
    run.stop()
    caught_up(sink())
    records = records_of(broker, name)
    assert assert_each_snapshot(lake, spark, name, records, counted, "c n s") >= 5
    report = assert_proven(spark, name, "batches")
    assert fates(report, name) == {"merged": len(records)}


def windows(records: Records) -> set[tuple[Any, ...]]:
    counts = Counter((record["n"] // 10 * 10, record["c"]) for record in records.values())
    return {
        (dt.datetime.fromtimestamp(start, dt.timezone.utc), c, n)
        for (start, c), n in counts.items()
    }


def test_windows_appear_with_their_first_record_and_stay_when_they_are_closed(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, PARTITIONS)
    config = make_config(decode={"format": "json"}, sink={"max_records_per_trigger": 40})
    for start in (0, 100):
        produce(broker.bootstrap, name, changes(100, start), PARTITIONS)
        timed = frazil.read(spark, config).withColumn("at", F.timestamp_seconds("n"))
        grouped = timed.withWatermark("at", "60 seconds").groupBy(F.window("at", "10 seconds"), "c")
        sink = written(
            grouped.count().selectExpr("window.start AS start", "c", "count AS n"),
            name,
            output_mode="update",
            **{"mode": "upsert", "key": ["start", "c"]},
            checkpoint_location=str(tmp_path / "checkpoint"),
        )
        caught_up(sink)
    records = records_of(broker, name)
    assert assert_each_snapshot(lake, spark, name, records, windows, "start c n") >= 5
    assert_proven(spark, name, "batches")


VIEW = """
CREATE CONNECTION k TO KAFKA (BROKER '{bootstrap}');
CREATE CONNECTION lake TO ICEBERG CATALOG (TYPE 'jdbc', URI '{uri}', WAREHOUSE '{warehouse}',
  'jdbc.schema-version' 'V1');
CREATE VIEW totals AS SELECT c, count(*) AS n, sum(n) AS s, count(*) > 40 AS many
  FROM KAFKA CONNECTION k (TOPIC '{name}') FORMAT JSON GROUP BY c;
CREATE SINK {name} FROM totals TO ICEBERG CATALOG lake NAMESPACE 'db' TABLE '{name}' KEY (c)
  WITH (TRIGGER '50ms', COMMIT INTERVAL '0s', MAX RECORDS PER TRIGGER 50, DELETE COLUMN 'many',
  INDEX TABLE 'db.{name}_index', CHECKPOINT LOCATION '{folder}/checkpoint');
"""


def test_a_view_with_groups_is_the_table_and_a_condition_on_groups_deletes_them(
    broker: Broker, lake: Lake, spark: Any, name: str, tmp_path: Path
):
    create_topic(broker.bootstrap, name, PARTITIONS)
    catalog = lake.document(name, name, broker.bootstrap)["catalog"]
    where = {"bootstrap": broker.bootstrap, "name": name, "folder": tmp_path}
    (tmp_path / "totals.sql").write_text(VIEW.format(**where, **catalog))
    config, _ = config_of_file(tmp_path / "totals.sql")
    assert (
        f"output mode update → shuffle by c → upsert in Python workers → db.{name}"
        in (path_taken(config)[0])
    )
    for start in (0, 130):
        produce(broker.bootstrap, name, changes(130, start), PARTITIONS)
        catch_up(config, spark)

    def few(records: Records) -> set[tuple[Any, ...]]:
        return {row for row in counted(records) if row[1] <= 40}

    records = records_of(broker, name)
    assert assert_each_snapshot(lake, spark, name, records, few, "c n s") >= 6
    assert few(records) == set() != counted(records)
    assert_proven(spark, name, "batches")


def last_rows(records: Records) -> set[tuple[Any, ...]]:
    """All records of a key are in one partition here: those of a higher offset are later."""
    rows: dict[int, tuple[Any, ...]] = {}
    for (_, _), record in sorted(records.items(), key=lambda item: item[0][1]):
        if record["gone"]:
            rows.pop(record["id"], None)
        elif record["n"] % 3:
            rows[record["id"]] = (record["id"], record["n"] * 2)
    return set(rows.values())


def test_rows_of_records_are_upserted_in_the_order_of_their_offsets_and_deleted_by_a_column(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, changes(100))
    config = make_config(
        decode={"format": "json"},
        sink={"max_records_per_trigger": 30},
        transform={
            "sql": "SELECT id, n * 2 AS n, gone, _topic, _topic_partition, _offset, _timestamp "
            "FROM stream WHERE gone OR n % 3 > 0"
        },
        table={"mode": "upsert", "key": ["id"], "delete_column": "gone"},
    )
    catch_up(config, spark)
    records = records_of(broker, name)
    assert assert_each_snapshot(lake, spark, name, records, last_rows, "id n") >= 4
    assert "gone" not in spark.table(f"lake.db.{name}").columns
    outcomes = fates(assert_proven(spark, name, "changes"), name)
    kept = [r for r in records.values() if r["gone"] or r["n"] % 3]
    assert outcomes["skipped"] == len(records) - len(kept)
    assert outcomes["written"] + outcomes["merged"] == len(kept)
    assert outcomes["written"] < 4 * 7 + 1


def test_a_source_without_offsets_upserts_one_row_of_a_key_in_each_batch(
    lake: Lake, spark: Any, name: str
):
    rows = rate(spark, 10).selectExpr("value % 10 AS id", "value")
    run = written(rows, name, mode="upsert", key=["id"]).start()
    eventually(lambda: run.position.get(BATCHES, 0) >= 3, "three batches")
    run.stop()
    count = run.position[BATCHES]
    last = {(n, (count - 1) * 10 + n) for n in range(10)}
    assert set(lake.query(f"db.{name}", "id, value")) == last
    assert_proven(spark, name, "batches")


def test_two_rows_of_a_key_without_an_order_are_refused(lake: Lake, spark: Any, name: str):
    run = written(
        rate(spark, 10).selectExpr("value % 5 AS id", "value"), name, mode="upsert", key=["id"]
    ).start()
    with pytest.raises(SchemaMismatch, match=r"rows of a batch share their key \(id\)"):
        run.awaitTermination(60)
    run.stop()
    assert lake.query(f"db.{name}") == []


def newest(records: Records) -> set[tuple[Any, ...]]:
    """Of each key the change with the highest version, deletes included."""
    last: dict[int, dict[str, Any]] = {}
    for record in records.values():
        known = last.get(record["id"])
        if known is None or record["n"] > known["n"]:
            last[record["id"]] = record
    return {(r["id"], r["n"]) for r in last.values() if not r["gone"]}


@pytest.mark.parametrize(
    ("origin", "proves"),
    [("", "batches"), (", _topic, _topic_partition, _offset", "changes")],
    ids=["without offsets", "with offsets"],
)
def test_the_highest_version_counts_whatever_the_order_of_rows_and_batches(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    origin: str,
    proves: str,
):
    """A late change does not win, nor does it bring back a deleted key."""
    create_topic(broker.bootstrap, name, PARTITIONS)
    shuffled = changes(120)
    random.Random(5).shuffle(shuffled)
    produce(broker.bootstrap, name, shuffled, PARTITIONS)
    config = make_config(
        decode={"format": "json"},
        sink={"max_records_per_trigger": 30},
        transform={"sql": f"SELECT id, n, gone{origin} FROM stream"},
        table={
            **{"mode": "upsert", "key": ["id"], "delete_column": "gone"},
            **{"version_column": "n", "compact_after_commits": 2},
        },
    )
    catch_up(config, spark)
    records = records_of(broker, name)
    assert assert_each_snapshot(lake, spark, name, records, newest, "id n") >= 4
    assert newest(records) != last_rows(records)
    deleted = lake.query(f"db.{name}_deleted", "id, n")
    assert {*deleted} <= {(r["id"], r["n"]) for r in records.values() if r["gone"]}
    result = frazil.audit(config, spark=True)
    assert result.proven, result
    reports = {r.table: r for r in result.reports if isinstance(r, TableReport)}
    assert reports[f"db.{name}"].proves == proves
    assert reports[f"db.{name}_deleted"].proves == "batches"
    if origin:
        outcomes = fates(reports[f"db.{name}"], name)
        assert outcomes["written"] + outcomes["merged"] == len(records)


@pytest.mark.parametrize("compact", [0, 1])
def test_rows_that_share_an_offset_are_proven_by_batch(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, compact: int
):
    """A record becomes two rows of different keys: files have its offset, and no offset a row."""
    create_topic(broker.bootstrap, name, PARTITIONS)
    produce(broker.bootstrap, name, changes(40), PARTITIONS)
    config = make_config(
        decode={"format": "json"},
        sink={"max_records_per_trigger": 15},
        transform={
            "sql": "SELECT explode(array(n, -n - 1)) AS id, c, _topic, _topic_partition, _offset "
            "FROM stream"
        },
        table={"mode": "upsert", "key": ["id"], "compact_after_commits": compact},
    )
    catch_up(config, spark)
    assert {n for (n,) in lake.query(f"db.{name}", "id")} == set(range(-40, 40))
    assert_proven(spark, name, "batches")
    assert frazil.audit(config, deep=True, spark=True).proven
    spark.sql(f"DELETE FROM lake.db.{name} WHERE id = 3")  # damage that is planted
    assert frazil.audit(config, spark=True).verdict == "unaccounted"


# ── what cannot work is refused before anything is made ──────────────────────────────────────────


def having(rows: Any) -> Any:
    return rows.groupBy("value").count().where("count > 1")


def total(rows: Any) -> Any:
    return rows.groupBy("value").count()


def halved(rows: Any) -> Any:
    """A column that is the same for two groups."""
    return total(rows).selectExpr("value div 2 AS value", "count")


def of_two(rows: Any) -> Any:
    return rows.groupBy("value", F.expr("value % 3 AS kind")).count()


UPSERT = {"mode": "upsert", "key": ["value"]}
REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "having": (having, UPSERT, "update: Filter is behind the aggregation"),
    "key": (total, {**UPSERT, "key": ["id"]}, "no column 'id' for its key; they have value, count"),
    "not a group": (total, {**UPSERT, "key": ["value", "count"]}, "by value, count: .* value$"),
    "an expression": (halved, UPSERT, "expected .a group without a column."),
    "some groups": (of_two, UPSERT, "expected value, kind"),
    "all rows": (lambda rows: rows.agg(F.count("*").alias("value")), UPSERT, "at least one group"),
    "delete column": (total, {**UPSERT, "delete_column": "count"}, "is int64; expected a boolean"),
    "no checkpoint": (total, UPSERT, "Aggregate keeps state.*needs a permanent checkpoint"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_upsert_that_cannot_be_exact_is_refused_and_nothing_is_made(
    lake: Lake, spark: Any, name: str, why: str
):
    made, table, words = REFUSED[why]
    with pytest.raises(ConfigError, match=f"(?m){words}"):
        written(made(rate(spark)), name, output_mode="update", **table).start()
    for table_name in (f"db.{name}", f"db.{name}_index"):
        with pytest.raises(LookupError):
            lake.metadata_file(table_name)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"mode": "changelog", "key": ["value"]}, "its mode is changelog"),
        ({**UPSERT, "partitioned_by_key": True}, "partitioned_by_key is for records that come"),
    ],
)
def test_settings_of_records_are_refused_for_rows_of_a_query(
    spark: Any, name: str, table: dict[str, Any], words: str
):
    with pytest.raises(ConfigError, match=words):
        written(rate(spark), name, **table)
