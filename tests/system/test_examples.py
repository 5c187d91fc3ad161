"""The examples do what they say: each against real Kafka, its table read by another engine."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples import enrich, many_tables, python_udf, sessionise, spark_kafka, totals

from frazil.config.model import Config, document, for_frame, from_document
from frazil.testing import datagen
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_once
from tests.system.streams import WITHIN, catch_up, produce, proven

Make = Callable[..., Config]
NOW = {"trigger": "available-now"}


def ended(query: Any) -> None:
    """Everything there was is committed."""
    assert query.awaitTermination(WITHIN), "not within its time"


def lines(values: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def counts(report: Any) -> dict[str, int]:
    fates = ("written", "skipped", "invisible", "merged")
    return {fate: sum(getattr(line.counts, fate) for line in report.partitions) for fate in fates}


def test_enrich_joins_the_stream_with_a_table_as_it_is_at_each_batch(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    (tmp_path / "order.avsc").write_text(datagen.SCHEMA)
    spark.sql(f"CREATE TABLE lake.db.{name}_countries (country string, name string) USING iceberg")
    spark.sql(f"INSERT INTO lake.db.{name}_countries VALUES ('DE', 'Germany'), ('FR', 'France')")
    create_topic(broker.bootstrap, name, 2)
    made = datagen.OrderGenerator()
    datagen.produce(broker.bootstrap, name, 2, rows=600, orders=made)
    decode = {"format": "confluent-avro", "schema": str(tmp_path / "order.avsc")}
    config = make_config(decode=decode)

    query = enrich.main(spark, config, f"db.{name}_countries")
    query.processAllAvailable()
    first = lake.query(f"db.{name}", "country, name", "GROUP BY ALL ORDER BY ALL")
    spark.sql(f"INSERT INTO lake.db.{name}_countries VALUES ('JP', 'Japan')")
    datagen.produce(broker.bootstrap, name, 2, rows=600, orders=made)
    query.processAllAvailable()
    query.stop()

    known = {"BR": None, "DE": "Germany", "FR": "France", "IN": None, "JP": None, "US": None}
    assert dict(first) == known
    rows = lake.query(f"db.{name}", "_topic_partition, _offset, order_id, country, name")
    assert_once((p, o) for p, o, *_ in rows)
    assert {order for _, _, order, *_ in rows} == set(range(1, 1201))
    later = {(c, n) for _, _, order, c, n in rows if order > 600}
    assert later == set({**known, "JP": "Japan"}.items())
    report = proven(config, spark)
    assert report.proves == "records"
    assert counts(report) == {"written": 1200, "skipped": 0, "invisible": 0, "merged": 0}


def test_sessionise_writes_each_session_once_over_several_runs(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)

    def click(user: str, minute: int) -> dict[str, Any]:
        return {"user": user, "at": (noon + dt.timedelta(minutes=minute)).isoformat()}

    create_topic(broker.bootstrap, name, 1)
    config = make_config(
        sink={**NOW, "checkpoint_location": str(tmp_path / "checkpoint")}, decode={"format": "json"}
    )
    clicks = [
        click("ann", 0),
        click("bob", 5),
        click("ann", 20),
        click("ann", 100),
        click("bob", 110),
    ]
    produce(broker.bootstrap, name, lines(clicks))
    ended(sessionise.main(spark, config))
    # ann is open since minute 100, and bob's second session too, when the first run ends
    produce(broker.bootstrap, name, lines([click("ann", 120), click("eve", 500)]))
    ended(sessionise.main(spark, config))
    produce(broker.bootstrap, name, lines([click("eve", 900)]))
    ended(sessionise.main(spark, config))

    def at(minute: int) -> dt.datetime:
        return noon + dt.timedelta(minutes=minute)

    rows = lake.query(f"db.{name}", '"user", start, "end", clicks', "ORDER BY ALL")
    expected = [
        ("ann", at(0), at(50), 2),
        ("ann", at(100), at(150), 2),
        ("bob", at(5), at(35), 1),
        ("bob", at(110), at(140), 1),
        ("eve", at(500), at(530), 1),
    ]
    assert rows == expected  # eve's second is open still
    report = proven(config, spark)
    assert report.proves == "batches"
    assert counts(report)["merged"] == 8
    assert counts(report)["written"] == len(rows)


def test_totals_has_a_row_of_each_customer_over_several_runs(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)

    def payment(number: int) -> dict[str, Any]:
        at = (noon + dt.timedelta(minutes=number)).isoformat()
        return {"customer": f"c{number % 7}", "cents": number, "at": at}

    create_topic(broker.bootstrap, name, 2)
    config = make_config(
        sink={**NOW, "checkpoint_location": str(tmp_path / "checkpoint")},
        decode={"format": "json"},
        table={"mode": "upsert", "key": ["customer"]},
    )
    for start, end in ((0, 100), (100, 130), (130, 133)):
        produce(broker.bootstrap, name, lines([payment(n) for n in range(start, end)]), 2)
        ended(totals.main(spark, config))
        of = {f"c{k}": [n for n in range(end) if n % 7 == k] for k in range(7)}
        expected = [
            (customer, len(some), sum(some), noon + dt.timedelta(minutes=max(some)))
            for customer, some in of.items()
        ]
        rows = lake.query(f"db.{name}", "customer, payments, cents, last_at", "ORDER BY ALL")
        assert rows == expected
    report = proven(config, spark)
    assert report.proves == "batches"
    assert counts(report)["merged"] == 133


def test_python_udf_accounts_for_every_record(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    mails = [f"user{i}@{'EXAMPLE.org' if i % 3 else 'test.net'}" for i in range(500)]
    values = [{"id": i, "email": mail} for i, mail in enumerate(mails)]
    values += [{"id": 1000 + i, "email": "none"} for i in range(20)]
    produce(broker.bootstrap, name, lines(values), 2)
    config = make_config(sink=NOW, decode={"format": "json"})
    ended(python_udf.main(spark, config))
    produce(broker.bootstrap, name, lines([{"id": 2000, "email": "z@z.eu"}]))
    ended(python_udf.main(spark, config))  # a second run goes on where the first one ended

    rows = lake.query(f"db.{name}", "id, domain, fingerprint, _topic_partition, _offset")
    assert_once((p, o) for *_, p, o in rows)
    assert {(i, d, f) for i, d, f, *_ in rows} == {
        (i, mail.partition("@")[2].lower(), hashlib.sha256(mail.encode()).hexdigest())
        for i, mail in [*enumerate(mails), (2000, "z@z.eu")]
    }
    assert "email" not in {field.name for field in spark.table(f"lake.db.{name}").schema}
    report = proven(config, spark)
    assert report.proves == "records"
    assert counts(report) == {"written": 501, "skipped": 20, "invisible": 0, "merged": 0}


def test_spark_kafka_accounts_for_every_record(broker: Broker, lake: Lake, spark: Any, name: str):
    create_topic(broker.bootstrap, name, 2)
    values = [{"sensor": f"s{i % 5}", "celsius": i / 10} for i in range(400)]
    settings = {"id": name, "index_table": f"db.{name}_index", **NOW}
    for part in (values[:300], values[300:]):  # two runs, with nothing but the ledger between
        produce(broker.bootstrap, name, lines(part), 2)
        ended(spark_kafka.main(spark, broker.bootstrap, name, f"db.{name}", **settings))

    rows = lake.query(f"db.{name}", "_topic_partition, _offset, sensor, celsius")
    assert_once((p, o) for p, o, *_ in rows)
    assert sorted(c for *_, c in rows) == [v["celsius"] for v in values]
    report = proven(for_frame(f"db.{name}", "lake", settings), spark)
    assert report.proves == "records"
    assert counts(report) == {"written": 400, "skipped": 0, "invisible": 0, "merged": 0}


def test_many_tables_sends_every_record_where_it_belongs(broker: Broker, lake: Lake, spark: Any):
    many_tables.main(broker.bootstrap)
    example = Path(many_tables.__file__).with_suffix(".toml")
    given = document(example, {"FRAZIL_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap})
    given["catalog"] = lake.document("shop", "none", broker.bootstrap)["catalog"]
    config = from_document(given, base=example.parent)
    catch_up(config, spark)
    tables = ("orders", "money", "inventory", "events_click", "events_search", "dead_letters")
    row_counts = {table: lake.query(f"shop.{table}", "count(*)")[0][0] for table in tables}
    assert row_counts == {
        "orders": 101,
        "money": 101,
        "inventory": 101,
        "events_click": 101,
        "events_search": 100,
        "dead_letters": 2,
    }
    assert lake.query("shop.inventory", "item", "WHERE _op = 'd'") == [(5,)]
    kinds = {kind for (kind,) in lake.query("shop.dead_letters", "kind")}
    assert kinds == {"route", "name"}
    everything = lake.query(
        "shop.frazil_index", "sum(written), sum(rejected), sum(skipped)", "WHERE table_name = '*'"
    )
    assert everything == [(403, 2, 102)]
