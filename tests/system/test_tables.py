"""One stream, many tables: real Kafka, Spark and Iceberg; the oracle reads the data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from frazil.core.config import Config
from frazil.core.errors import Overflow, Unroutable
from frazil.surface.broker import Broker
from frazil.surface.orders import create_topic
from frazil.table.audit import Report, audit, live_files
from frazil.table.jvm import Catalog
from tests.oracle import Lake
from tests.system.streams import Registry, avro, catch_up, eventually, produce, running

Make = Callable[..., Config]


def reports(config: Config, spark: Any, *tables: str) -> list[Report]:
    """The audit of each table."""
    found = []
    for name in tables:
        table = Catalog(spark, config.catalog.name).load(name)
        assert table is not None, name
        found += audit(name, table.history("main"), live_files(table, "main"), config.sink.id)
    return found


def events(*kinds: str) -> list[bytes]:
    return [json.dumps({"kind": kind, "id": i}).encode() for i, kind in enumerate(kinds)]


def test_records_go_where_a_field_says_and_every_table_is_proven(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, events(*["a", "b", "c", "noise"] * 25), 2)
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{each}"} for each in ("a", "rest", "all")],
        route=[
            {"field": "kind", "values": ["noise"], "skip": True},
            {"field": "kind", "values": ["a"], "to": [f"db.{name}_a", f"db.{name}_all"]},
            {"field": "kind", "to": [f"db.{name}_rest", f"db.{name}_all"]},
        ],
    )
    catch_up(config, spark)
    produce(broker.bootstrap, name, events("a", "a"), 2)  # the others stay idle
    catch_up(config, spark)
    tables = [f"db.{name}_{each}" for each in ("a", "rest", "all")]
    counts = [len(lake.query(table, "id")) for table in tables]
    assert counts == [27, 50, 77]
    for report in reports(config, spark, *tables):
        assert report.verdict == "proven", report.values()
    rows = lake.query(
        f"db.{name}_index", "table_name, sum(written), sum(skipped)", "GROUP BY 1 ORDER BY 1"
    )
    assert rows[0] == ("*", 77, 25)


def test_names_from_data_make_tables_and_bad_ones_are_dead_letters(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    kinds = ["x", "y", "../evil", "x", "Y", "z" * 200, "y"]
    produce(broker.bootstrap, name, events(*kinds))
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{{value}}"}],
        route=[{"field": "kind", "to": [f"db.{name}_{{value}}"]}],
        dead_letters={"table": f"db.{name}_dead", "max_share": 1},
    )
    catch_up(config, spark)
    assert len(lake.query(f"db.{name}_x", "id")) == 2
    assert len(lake.query(f"db.{name}_y", "id")) == 2
    letters = lake.query(f"db.{name}_dead", '"offset", kind, value', "ORDER BY 1")
    assert [(offset, kind) for offset, kind, _ in letters] == [
        (2, "name"),
        (4, "name"),
        (5, "name"),
    ]
    assert bytes(letters[0][2]) == events(*kinds)[2]
    for report in reports(config, spark, f"db.{name}_x", f"db.{name}_y", f"db.{name}_dead"):
        assert report.verdict == "proven", report.values()


def test_a_record_that_no_rule_matches_stops_a_stream_without_dead_letters(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, events("a", "b"))
    config = make_config(
        decode={"format": "json"},
        route=[{"field": "kind", "values": ["a"], "to": [f"db.{name}"]}],
    )
    with pytest.raises(Unroutable, match=r"offset 1: no rule"):
        catch_up(config, spark)


def test_more_rejected_than_the_cap_stops_the_stream(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [b'{"id": 1}'] * 10 + [b"{"] * 5)
    config = make_config(
        decode={"format": "json"}, dead_letters={"table": f"db.{name}_dead", "max_share": 0.2}
    )
    with pytest.raises(Overflow, match="5 of 15 records of a batch are rejected"):
        catch_up(config, spark)


def test_several_versions_of_a_schema_in_one_batch_evolve_the_table(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    def version(*fields: Any) -> dict[str, Any]:
        return {"type": "record", "name": "r", "fields": list(fields)}

    one = version({"name": "id", "type": "int"}, {"name": "old", "type": "string"})
    two = version({"name": "id", "type": "long"}, {"name": "more", "type": ["null", "double"]},
                  {"name": "old", "type": "string"})  # fmt: skip
    three = version({"name": "id", "type": "long"},
                    {"name": "renamed", "type": "string", "aliases": ["old"]})  # fmt: skip
    create_topic(broker.bootstrap, name, 1)
    with Registry(**{"1": one, "2": two, "3": three}) as registry:
        config = make_config(decode={"format": "confluent-avro", "registry": {"url": registry.url}})
        produce(broker.bootstrap, name, [avro(one, {"id": 1, "old": "a"}, 1)])
        catch_up(config, spark)
        produce(
            broker.bootstrap,
            name,
            [
                avro(two, {"id": 2**40, "more": 1.5, "old": "b"}, 2),
                avro(one, {"id": 3, "old": "c"}, 1),
                avro(three, {"id": 4, "renamed": "d"}, 3),
            ],
        )
        catch_up(config, spark)
    rows = lake.query(f"db.{name}", "id, more, renamed", "ORDER BY id")
    assert rows == [(1, None, "a"), (3, None, "c"), (4, None, "d"), (2**40, 1.5, "b")]
    [report] = reports(config, spark, f"db.{name}")
    assert report.verdict == "proven", report.values()


def test_a_table_that_is_gone_waits_and_the_others_go_on(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, events("a", "b"))
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{{value}}"}],
        route=[{"field": "kind", "to": [f"db.{name}_{{value}}"]}],
        dead_letters={"table": f"db.{name}_dead"},
    )
    with running(config, spark, flush=3.0) as sink:
        assert sink.wait_until(sink.ends(), 60)
        spark.sql(f"DROP TABLE lake.db.{name}_a")
        produce(broker.bootstrap, name, events("a", "b", "b"))
        eventually(lambda: len(lake.query(f"db.{name}_b", "id")) == 3, "b goes on", sink=sink)
        eventually(lambda: f"db.{name}_a" in sink.committer.progress.stuck, "a waits", sink=sink)
