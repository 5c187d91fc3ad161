"""One stream, many tables: real Kafka, Spark and Iceberg; the oracle reads the data files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from frazil.commit import committer
from frazil.config.model import Config
from frazil.config.sections import RouteConfig
from frazil.errors import Fatal, Gap, SchemaMismatch, TooManyRejected, Unroutable
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.ledger.entry import entries, split
from frazil.offsets import Cut
from frazil.ops.status import status
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, topic_records
from tests.system.streams import (
    WITHIN,
    Registry,
    Steps,
    all_proven,
    avro,
    catch_up,
    eventually,
    part,
    produce,
    running,
)

Make = Callable[..., Config]


def events(*kinds: str, start: int = 0) -> list[bytes]:
    return [json.dumps({"kind": kind, "id": i}).encode() for i, kind in enumerate(kinds, start)]


def lines(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def cut(lake: Lake, index: str) -> Cut:
    """Where all tables stand together, as anybody can ask it of the index."""
    select = "topic, partition, max(end_offset)"
    rows = lake.query(index, select, "WHERE table_name = '*' GROUP BY topic, partition")
    return Cut({part(topic, number): end for topic, number, end in rows})


def commits(spark: Any, config: Config, table: str) -> list[tuple[str, ...]]:
    """The batches of each of a table's snapshots that added records, oldest first."""
    loaded = JavaCatalog(spark, "lake").load(table)
    assert loaded is not None
    own_entries = entries(loaded.history("main"), config.sink.id)
    return [entry.commit_ids for entry, _ in own_entries if entry.total.written][::-1]


# ── routing ──────────────────────────────────────────────────────────────────────────────────────


def test_records_go_where_a_field_says_and_every_table_is_proven(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, events(*["a", "b", "c", "noise"] * 25), 2)
    tables = [f"db.{name}_{suffix}" for suffix in ("a", "rest", "all")]
    config = make_config(
        decode={"format": "json"},
        table=[{"name": table} for table in tables],
        route=[
            {"field": "kind", "values": ["noise"], "skip": True},
            {"field": "kind", "values": ["a"], "to": [f"db.{name}_a", f"db.{name}_all"]},
            {"field": "kind", "to": [f"db.{name}_rest", f"db.{name}_all"]},
        ],
    )
    catch_up(config, spark)
    produce(broker.bootstrap, name, events("a", "a"), 2)  # the others stay idle
    sink = catch_up(config, spark)
    assert [len(lake.query(table, "id")) for table in tables] == [27, 50, 77]
    all_proven(config, spark, *tables)
    rows = lake.query(
        f"db.{name}_index", "table_name, sum(written), sum(skipped)", "GROUP BY 1 ORDER BY 1"
    )
    assert rows[0] == ("*", 77, 25)
    assert (
        cut(lake, f"db.{name}_index")
        == sink.position
        == Cut({part(name, 0): 51, part(name, 1): 51})
    )


def test_a_packed_ledger_entry_comes_back_from_the_catalog(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """Many partitions, of which one table takes few: counts, names and base are packed."""
    partitions = 300
    create_topic(broker.bootstrap, name, partitions)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})

    def send() -> int:
        for number in range(partitions):
            for value in events(*["a" if number < 3 else "b"] * (5 + number * 7 % 23)):
                producer.produce(name, value, partition=number)
        assert producer.flush(30) == 0
        return sum(5 + number * 7 % 23 for number in range(partitions))

    few, others = f"db.{name}_few", f"db.{name}_others"
    config = make_config(
        decode={"format": "json"},
        table=[{"name": few}, {"name": others}],
        route=[
            {"field": "kind", "values": ["a"], "to": [few]},
            {"field": "kind", "to": [others]},
        ],
    )
    sent = 0
    for _ in range(2):  # the second run begins from the entries of the first
        sent += send()
        catch_up(config, spark)
    table = JavaCatalog(spark, "lake").load(few)
    assert table is not None
    entry, snapshot = next(iter(entries(table.history("main"), config.sink.id)))
    assert {"frazil.remainder", "frazil.partitions"} <= set(snapshot.summary)
    own, _ = split(snapshot.summary)  # without what stands in properties of the table
    size = sum(len(key) + len(text) for key, text in own.items() if key.startswith("frazil."))
    assert size < 4096
    assert len(entry.end) == partitions
    assert entry.total.skipped == entry.total.offsets - entry.total.written
    all_proven(config, spark, few, others)
    assert len(lake.query(few, "id")) == 2 * sum(5 + number * 7 % 23 for number in range(3))
    assert len(lake.query(few, "id")) + len(lake.query(others, "id")) == sent


def test_topics_by_name_and_by_pattern_each_have_their_tables(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    b = broker.bootstrap
    topics = [f"{name}.{suffix}" for suffix in ("orders", "eu.refunds", "us.refunds", "log", "odd")]
    for topic in topics:
        create_topic(b, topic, 2)
        produce(b, topic, [f"{topic} {i}".encode() for i in range(12)], 2)
    made = f"db.{name}_{{region}}_{{what}}"
    config = make_config(
        sink={"topics": [], "topic_pattern": f"{name}[.].*"},
        table=[{"name": f"db.{name}_orders"}, {"name": f"db.{name}_all"}, {"name": made}],
        route=[
            {"topics": [f"{name}.orders"], "to": [f"db.{name}_orders"]},
            {
                "pattern": rf"{name}\.(?P<region>[a-z]+)\.(?P<what>\w+)",
                "to": [made, f"db.{name}_all"],
            },
            {"pattern": r".*\.log", "skip": True},
        ],
        dead_letters={"table": f"db.{name}_dead"},
    )
    sink = catch_up(config, spark)
    truth = {topic: topic_records(b, topic) for topic in topics}
    into = {
        "orders": topics[:1],
        "eu_refunds": topics[1:2],
        "us_refunds": topics[2:3],
        "all": topics[1:3],
        "dead": topics[4:],
    }
    for suffix, of in into.items():
        columns = (
            'topic, partition, "offset"'
            if suffix == "dead"
            else ("_topic, _topic_partition, _offset")
        )
        rows = lake.query(f"db.{name}_{suffix}", f"{columns}, value")
        expected = {(topic, *at): value for topic in of for at, value in truth[topic].items()}
        assert len(rows) == len(expected)
        assert {row[:3]: row[3] for row in rows} == expected
    kinds = lake.query(f"db.{name}_dead", "DISTINCT kind, message")
    assert kinds == [("route", f"cannot route a record of {name}.odd: no rule matches it")]
    all_proven(config, spark, *(f"db.{name}_{suffix}" for suffix in into))
    assert cut(lake, f"db.{name}_index") == sink.position
    fates = lake.query(
        f"db.{name}_index", "sum(written), sum(rejected), sum(skipped)", "WHERE table_name = '*'"
    )
    assert fates == [(36, 12, 12)]


def test_a_header_says_where_a_record_goes(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    heads: list[Any] = [
        [("to", b"a")],
        [("to", b"b"), ("to", b"a")],
        [("to", b"c")],
        [("other", b"a")],
        [("to", None)],
        [("to", b"\xff")],
        None,
        [("to", b"noise"), ("x", b"")],
    ]
    for i, headers in enumerate(heads):
        producer.produce(name, str(i).encode(), headers=headers, key=f"k{i}")
    assert producer.flush(30) == 0
    config = make_config(
        table=[{"name": f"db.{name}_a"}, {"name": f"db.{name}_to_{{value}}"}],
        route=[
            {"header": "to", "values": ["noise"], "skip": True},
            {"header": "to", "values": ["a"], "to": [f"db.{name}_a"]},
            {"header": "to", "to": [f"db.{name}_to_{{value}}"]},
        ],
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
    )
    catch_up(config, spark)
    assert lake.query(f"db.{name}_a", "value", "ORDER BY _offset") == [(b"0",), (b"1",)]
    assert lake.query(f"db.{name}_to_c", "value") == [(b"2",)]
    dead_letters = lake.query(f"db.{name}_dead", '"offset", key, kind, headers', "ORDER BY 1")
    assert [row[:3] for row in dead_letters] == [
        (i, f"k{i}".encode(), "route") for i in (3, 4, 5, 6)
    ]
    headers = [[tuple(h.values()) for h in row[3] or []] for row in dead_letters]
    assert headers == [[("other", b"a")], [("to", None)], [("to", b"\xff")], []]
    all_proven(config, spark, *(f"db.{name}_{suffix}" for suffix in ("a", "to_c", "dead")))


NESTED = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "id", "type": "int"},
        {
            "name": "source",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "s",
                    "fields": [
                        {"name": "table", "type": ["null", "string"]},
                        {"name": "shard", "type": "int"},
                        {"name": "test", "type": "boolean"},
                    ],
                },
            ],
        },
    ],
}


@pytest.mark.parametrize("format", ["avro", "json"])
def test_a_field_inside_a_struct_says_where_a_record_goes(
    format: str,
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Make,
    tmp_path: Path,
):
    def source(table: str | None, shard: int = 0, test: bool = False) -> dict[str, Any]:
        return {"table": table, "shard": shard, "test": test}

    places = [source("x"), source("y"), source("x", 3), source("y", test=True), source(None), None]
    values = [{"id": i, "source": place} for i, place in enumerate(places)]
    create_topic(broker.bootstrap, name, 1)
    schema = tmp_path / "nested.avsc"
    schema.write_text(json.dumps(NESTED))
    decode = {"format": format, **({"schema": str(schema)} if format == "avro" else {})}
    encoded = [avro(NESTED, value) for value in values] if format == "avro" else lines(*values)
    produce(broker.bootstrap, name, encoded)
    config = make_config(
        decode=decode,
        table=[{"name": f"db.{name}_shard"}, {"name": f"db.{name}_of_{{value}}"}],
        route=[
            {"field": "source.test", "values": ["true"], "skip": True},
            {"field": "source.shard", "values": ["3", "4"], "to": [f"db.{name}_shard"]},
            {"field": "source.table", "to": [f"db.{name}_of_{{value}}"]},
        ],
        dead_letters={"table": f"db.{name}_dead"},
    )
    catch_up(config, spark)
    tables = [f"db.{name}_{suffix}" for suffix in ("of_x", "of_y", "shard", "dead")]
    assert [lake.query(table, "id, source.shard") for table in tables[:3]] == [
        [(0, 0)],
        [(1, 0)],
        [(2, 3)],
    ]
    assert lake.query(tables[3], '"offset", kind', "ORDER BY 1") == [(4, "route"), (5, "route")]
    all_proven(config, spark, *tables)


FUNCTION = """
import pyarrow.compute as pc


def by_size(rows):
    "Large values to a table of their own, empty ones nowhere; of the rest nothing is said."
    size = pc.binary_length(rows.column("value"))
    return [None if n is None or 0 < n < 100 else "(skip)" if n == 0 else "TABLE" for n in
            size.to_pylist()]
"""


def test_functions_from_a_file_and_from_the_program_say_where_records_go(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 1)
    produce(
        broker.bootstrap, name, [b"x" * 200, b"", b"0", b"1", b"2", b"3", b"bad", b"y" * 100, b"9"]
    )
    (tmp_path / "where.py").write_text(FUNCTION.replace("TABLE", f"db.{name}_large"))
    config = make_config(
        table=[{"name": f"db.{name}_{suffix}"} for suffix in ("large", "even", "all", "no_{rest}")],
        route=[{"python": f"{tmp_path}/where.py:by_size"}],
        dead_letters={"table": f"db.{name}_dead"},
    )

    def by_parity(rows: pa.Table) -> list[list[str] | str | None]:
        assert {"_topic", "_offset", "_timestamp", "_key", "_headers"} <= set(rows.schema.names)
        answers: list[list[str] | str | None] = []
        for value in rows.column("value").to_pylist():
            if value == b"bad":
                answers.append(f"db.{name}_no_../..")
            elif value == b"9":
                answers.append(None)
            else:
                even = [f"db.{name}_even"] if int(value) % 2 == 0 else []
                answers.append([*even, f"db.{name}_all"])
        return answers

    config = replace(config, routes=(*config.routes, RouteConfig(python=by_parity)))
    catch_up(config, spark)
    tables = [f"db.{name}_{suffix}" for suffix in ("large", "even", "all", "dead")]
    offsets = [
        [row[0] for row in lake.query(table, "_offset", "ORDER BY 1")] for table in tables[:3]
    ]
    assert offsets == [[0, 7], [2, 4], [2, 3, 4, 5]]
    dead_letters = lake.query(tables[3], '"offset", kind', "ORDER BY 1")
    assert dead_letters == [(6, "name"), (8, "route")]
    all_proven(config, spark, *tables)

    def broken(rows: pa.Table) -> Any:
        raise ValueError("no idea")

    produce(broker.bootstrap, name, [b"4"])
    with pytest.raises(Fatal, match=r"cannot route by .*broken: ValueError: no idea"):
        catch_up(replace(config, routes=(RouteConfig(python=broken),)), spark)
    catch_up(config, spark)
    assert len(lake.query(tables[1], "_offset")) == 3, "nothing was skipped meanwhile"


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
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
    )
    catch_up(config, spark)
    assert len(lake.query(f"db.{name}_x", "id")) == 2
    assert len(lake.query(f"db.{name}_y", "id")) == 2
    dead_letters = lake.query(f"db.{name}_dead", '"offset", kind, value', "ORDER BY 1")
    assert [(offset, kind) for offset, kind, _ in dead_letters] == [
        (2, "name"),
        (4, "name"),
        (5, "name"),
    ]
    assert bytes(dead_letters[0][2]) == events(*kinds)[2]
    all_proven(config, spark, f"db.{name}_x", f"db.{name}_y", f"db.{name}_dead")


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
    produce(broker.bootstrap, name, [b'{"id": 1}'] * 300 + [b"{"] * 150)
    config = make_config(
        decode={"format": "json"}, dead_letters={"table": f"db.{name}_dead", "max_fraction": 0.2}
    )
    with pytest.raises(TooManyRejected, match="150 of 450 records are rejected"):
        catch_up(config, spark)


# ── evolution ────────────────────────────────────────────────────────────────────────────────────


def decimal(precision: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 2}


def test_several_versions_of_a_schema_in_one_batch_evolve_the_table(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    def version(*fields: Any) -> dict[str, Any]:
        return {"type": "record", "name": "r", "fields": list(fields)}

    one = version(
        {"name": "id", "type": "int"},
        {"name": "old", "type": "string"},
        {"name": "gone", "type": "string"},
        {"name": "price", "type": decimal(5)},
        {"name": "weight", "type": "float"},
    )
    two = version(
        {"name": "id", "type": "long"},
        {"name": "more", "type": ["null", "double"]},
        {"name": "old", "type": "string"},
        {"name": "price", "type": decimal(20)},
        {"name": "weight", "type": "double"},
    )
    three = version(
        {"name": "id", "type": "long"}, {"name": "renamed", "type": "string", "aliases": ["old"]}
    )
    create_topic(broker.bootstrap, name, 1)
    first = {"gone": "g", "price": Decimal("1.25"), "weight": 0.5}
    with Registry(**{"1": one, "2": two, "3": three}) as registry:
        config = make_config(decode={"format": "confluent-avro", "registry": {"url": registry.url}})
        produce(broker.bootstrap, name, [avro(one, {"id": 1, "old": "a", **first}, 1)])
        catch_up(config, spark)
        large = {"price": Decimal("123456789012345678.25"), "weight": 0.1}
        produce(
            broker.bootstrap,
            name,
            [
                avro(two, {"id": 2**40, "more": 1.5, "old": "b", **large}, 2),
                avro(one, {"id": 3, "old": "c", **first}, 1),
                avro(three, {"id": 4, "renamed": "d"}, 3),
            ],
        )
        catch_up(config, spark)
    rows = lake.query(f"db.{name}", "id, more, renamed, gone, price, weight", "ORDER BY id")
    assert rows == [
        (1, None, "a", "g", Decimal("1.25"), 0.5),
        (3, None, "c", "g", Decimal("1.25"), 0.5),
        (4, None, "d", None, None, None),
        (2**40, 1.5, "b", None, large["price"], 0.1),
    ]
    all_proven(config, spark, f"db.{name}")


def test_json_evolves_one_table_and_is_rejected_by_a_frozen_one(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    sections: dict[str, Any] = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_e"}, {"name": f"db.{name}_f", "schema_evolution": "reject"}],
        "route": [
            {"field": "t", "values": [suffix], "to": [f"db.{name}_{suffix}"]} for suffix in "ef"
        ],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }

    def e(number: Any, **more: Any) -> dict[str, Any]:
        return {"t": "e", "id": number, **more}

    first = [e(1, old="a", s={"a": 1}, l=[{"p": 1}]), {"t": "f", "id": 1}]
    produce(b, name, lines(*first))
    catch_up(make_config(**sections), spark)
    sections["table"][0]["aliases"] = {"new": "old"}
    config = make_config(**sections)
    rest = [
        e(2, new="b", s={"a": 2, "b": {"c": "deep"}}, l=[{"p": 2, "q": [1.5]}, {"p": 3}]),
        e("three", new="c"),
        e(4, new="d", s={"a": "text"}),
        {"t": "f", "id": 2, "more": True},
        e(5, old="e", extra={"m": {"n": [[1]]}}),
        {"t": "f", "id": 3},
        e(6.5),
    ]
    produce(b, name, lines(*rest))
    catch_up(config, spark)
    produce(b, name, lines(e(7, old="late"), e(8)))
    catch_up(config, spark)
    rows = lake.query(f"db.{name}_e", 'id, "new", s.b.c, l, extra.m.n', "ORDER BY id")
    assert rows == [
        (1, "a", None, [{"p": 1, "q": None}], None),
        (2, "b", "deep", [{"p": 2, "q": [1.5]}, {"p": 3, "q": None}], None),
        (5, "e", None, None, [[1]]),
        (7, "late", None, None, None),
        (8, None, None, None, None),
    ]
    assert lake.query(f"db.{name}_f", "id", "ORDER BY id") == [(1,), (3,)]
    dead_letters = lake.query(f"db.{name}_dead", '"offset", kind, value, tables', "ORDER BY 1")
    assert [(row[0], row[1], row[3]) for row in dead_letters] == [
        (offset, "misfit", [f"db.{name}_{suffix}"])
        for offset, suffix in ((3, "e"), (4, "e"), (5, "f"), (8, "e"))
    ]
    assert [row[2] for row in dead_letters] == lines(rest[1], rest[2], rest[3], rest[6])
    all_proven(config, spark, *(f"db.{name}_{suffix}" for suffix in ("e", "f", "dead")))


def test_a_table_set_to_reject_stops_the_stream_and_nothing_is_written(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, events("a", "b"))
    sections: dict[str, Any] = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_a", "schema_evolution": "fail"}, {"name": f"db.{name}_b"}],
        "route": [{"field": "kind", "values": [k], "to": [f"db.{name}_{k}"]} for k in "ab"],
        "dead_letters": {"table": f"db.{name}_dead"},
    }
    catch_up(make_config(**sections), spark)
    more = lines({"kind": "b", "id": 2, "new": 1}, {"kind": "a", "id": 3, "new": 1})
    produce(broker.bootstrap, name, more)
    with pytest.raises(SchemaMismatch, match=f"db.{name}_a"):
        catch_up(make_config(**sections), spark)
    assert lake.query(f"db.{name}_b", "id") == [(1,)]
    sections["table"][0]["schema_evolution"] = "evolve"
    config = make_config(**sections)
    catch_up(config, spark)
    assert lake.query(f"db.{name}_a", "id, new", "ORDER BY 1") == [(0, None), (3, 1)]
    assert lake.query(f"db.{name}_b", "id, new", "ORDER BY 1") == [(1, None), (2, 1)]
    assert lake.query(f"db.{name}_dead", "kind") == []
    all_proven(config, spark, f"db.{name}_a", f"db.{name}_b")


def test_files_that_were_staged_under_an_older_schema_are_committed(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(decode={"format": "json"}, dead_letters={"table": f"db.{name}_dead"})
    steps = Steps(hold="commit")
    produce(broker.bootstrap, name, lines({"id": 1, "old": "a"}))
    with running(config, spark, steps) as sink:
        assert steps.held.wait(WITHIN), "the first batch is staged, and not committed"
        produce(broker.bootstrap, name, lines({"id": 2, "old": "b", "s": {"new": 1}}))
        eventually(lambda: len(sink.committer.pending) == 2, "the second is staged", sink=sink)
        table = JavaCatalog(spark, "lake").load(f"db.{name}")
        assert table is not None
        assert "new" in table.schema, "the table was changed meanwhile"
        assert lake.query(f"db.{name}", "id") == []
        ids = {batch.table(f"db.{name}").schema_id for batch in sink.committer.pending}
        assert len(ids) == 2
        steps.go.set()
        assert sink.wait_until(sink.ends(), WITHIN)
    rows = lake.query(f"db.{name}", "id, old, s.new", "ORDER BY id")
    assert rows == [(1, "a", None), (2, "b", 1)]
    all_proven(config, spark, f"db.{name}")


# ── the committer ────────────────────────────────────────────────────────────────────────────────


def test_each_table_is_committed_at_its_own_pace_and_the_cut_waits_for_all(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    """`first` goes before the others, `large` waits for bytes, `lazy` for an hour."""
    monkeypatch.setattr(committer, "THREADS", 1)  # one after the other, so that there is an order
    order: list[str] = []
    append = JavaTable.append

    def noted(table: JavaTable, manifests: Any, *args: Any, **kwargs: Any) -> None:
        order.extend([table.name.removeprefix(f"db.{name}_")] if manifests else [])
        append(table, manifests, *args, **kwargs)

    monkeypatch.setattr(JavaTable, "append", noted)
    create_topic(broker.bootstrap, name, 1)
    kinds = ("any", "first", "large", "lazy")
    late = {"commit_interval": "1h"}
    more = {"first": {"priority": 7}, "lazy": late, "large": {**late, "commit_bytes": "64KiB"}}
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{kind}", **more.get(kind, {})} for kind in kinds],
        route=[{"field": "kind", "values": [kind], "to": [f"db.{name}_{kind}"]} for kind in kinds],
    )
    produce(broker.bootstrap, name, events(*kinds))
    with running(config, spark) as sink:
        assert sink.wait_until({part(name, 0): 4}, WITHIN)
        assert order == ["first", "any", "large", "lazy", "index"]

        def settled(count: int) -> bool:
            return all(
                len(lake.query(f"db.{name}_{suffix}", "id")) == count for suffix in ("any", "first")
            )

        produce(broker.bootstrap, name, events(*kinds))
        eventually(lambda: settled(2), "tables without a pace of their own go on", sink=sink)
        assert [len(lake.query(f"db.{name}_{kind}", "id")) for kind in kinds] == [2, 2, 1, 1]
        assert cut(lake, f"db.{name}_index") == Cut({part(name, 0): 4})
        big = {"kind": "large", "id": 0, "text": os.urandom(80_000).hex()}
        produce(broker.bootstrap, name, lines(big))
        eventually(
            lambda: len(lake.query(f"db.{name}_large", "id")) == 3, "enough bytes", sink=sink
        )
        assert len(lake.query(f"db.{name}_lazy", "id")) == 1
        assert cut(lake, f"db.{name}_index") == Cut({part(name, 0): 4})
    assert len(lake.query(f"db.{name}_lazy", "id")) == 2, "what is staged is committed at the end"
    assert cut(lake, f"db.{name}_index") == sink.position == Cut({part(name, 0): 9})
    assert [len(commit) for commit in commits(spark, config, f"db.{name}_large")] == [1, 2]
    assert len(commits(spark, config, f"db.{name}_lazy")) == 2
    all_proven(config, spark, *(f"db.{name}_{kind}" for kind in kinds))


def test_a_table_that_is_gone_waits_for_its_return_and_the_others_go_on(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """Over three runs: dropped in the first, missing in the second, back before the third."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, events("a", "b"))
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{{value}}"}],
        route=[{"field": "kind", "to": [f"db.{name}_{{value}}"]}],
        dead_letters={"table": f"db.{name}_dead"},
    )
    gone, other = f"db.{name}_a", f"db.{name}_b"

    def ids(table: str) -> list[int]:
        return [row[0] for row in lake.query(table, "id", "ORDER BY 1")]

    with running(config, spark, flush=0.5) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        metadata = lake.metadata_file(gone)
        spark.sql(f"DROP TABLE lake.{gone}")
        produce(b, name, events("a", "b", "b", start=2))
        eventually(lambda: len(ids(other)) == 3, "b goes on", sink=sink)
        eventually(lambda: gone in sink.committer.progress.stuck, "a waits", sink=sink)
        assert list(sink.committer.progress.stuck) == [gone]
        assert gone in sink.committer.progress.trouble
        produce(b, name, events("a", "b", start=5))
        eventually(lambda: len(ids(other)) == 4, "b goes on and on", sink=sink)
    assert sink.position == cut(lake, f"db.{name}_index") == Cut({part(name, 0): 2})
    waiting: Any = status(config, JavaCatalog(spark, config.catalog.name).open_readonly)["waiting"]
    assert list(waiting) == [gone], "whoever asks from outside sees it as well"
    assert "does not exist" in str(waiting[gone])
    with running(config, spark, flush=0.5) as sink:
        eventually(lambda: gone in sink.committer.progress.stuck, "a is still named", sink=sink)
        produce(b, name, events("b", start=7))
        eventually(lambda: len(ids(other)) == 5, "b goes on after a restart", sink=sink)
        assert sink.committer.pending
        assert sink.position == Cut({part(name, 0): 2})
    spark.sql(f"CALL lake.system.register_table('{gone}', '{metadata}')")
    produce(b, name, events("a", "b", start=8))
    catch_up(config, spark)
    assert ids(gone) == [0, 2, 5, 8]
    assert ids(other) == [1, 3, 4, 6, 7, 9]
    assert cut(lake, f"db.{name}_index") == Cut({part(name, 0): 10})
    all_proven(config, spark, gone, other)
    assert lake.query(f"db.{name}_dead", "kind") == []


def test_a_table_that_comes_back_is_filled_without_a_restart(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, events("a", "b"))
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{suffix}"} for suffix in "ab"],
        route=[{"field": "kind", "values": [k], "to": [f"db.{name}_{k}"]} for k in "ab"],
    )
    with running(config, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        metadata = lake.metadata_file(f"db.{name}_a")
        spark.sql(f"DROP TABLE lake.db.{name}_a")
        produce(b, name, events("a", "b", start=2))
        eventually(lambda: sink.committer.progress.stuck, "a waits", sink=sink)
        spark.sql(f"CALL lake.system.register_table('db.{name}_a', '{metadata}')")
        assert sink.wait_until(sink.ends(), WITHIN)
        assert not sink.committer.progress.stuck
    assert lake.query(f"db.{name}_a", "id", "ORDER BY 1") == [(0,), (2,)]
    all_proven(config, spark, f"db.{name}_a", f"db.{name}_b")


def test_a_record_that_a_missing_table_cannot_take_is_a_dead_letter_and_stops_nothing(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """It has a column that the table cannot get, or comes when a run never saw the table."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, events("a", "b"))
    gone, other, dead = (f"db.{name}_{suffix}" for suffix in ("a", "b", "dead"))
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{{value}}"}],
        route=[{"field": "kind", "to": [f"db.{name}_{{value}}"]}],
        dead_letters={"table": dead},
    )
    with running(config, spark, flush=0.5) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        metadata = lake.metadata_file(gone)
        spark.sql(f"DROP TABLE lake.{gone}")
        produce(b, name, lines({"kind": "a", "id": 2, "new": 1}, {"kind": "b", "id": 3}))
        eventually(lambda: len(lake.query(other, "id")) == 2, "b goes on", sink=sink)
    produce(b, name, events("a", "b", start=4))
    with running(config, spark, flush=0.5) as sink:
        eventually(lambda: len(lake.query(other, "id")) == 3, "and on", sink=sink)
    spark.sql(f"CALL lake.system.register_table('{gone}', '{metadata}')")
    produce(b, name, events("a", start=6))
    catch_up(config, spark)
    assert lake.query(gone, "id", "ORDER BY 1") == [(0,), (6,)]
    dead_letters = lake.query(dead, '"offset", kind, tables', "ORDER BY 1")
    assert dead_letters == [(2, "misfit", [gone]), (4, "misfit", [gone])]
    all_proven(config, spark, gone, other, dead)


@pytest.mark.long
def test_a_lost_batch_record_brings_no_table_anything_twice(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """Some tables have the batch and one has not, and nobody knows any more what was staged: it is
    read again, and each table takes what it lacks."""
    b = broker.bootstrap
    create_topic(b, name, 2)
    tables = [f"db.{name}_{suffix}" for suffix in ("a", "b", "dead")]
    config = make_config(
        decode={"format": "json"},
        table=[{"name": tables[0]}, {"name": tables[1], "commit_interval": "1h"}],
        route=[{"field": "kind", "values": [k], "to": [f"db.{name}_{k}"]} for k in "ab"],
        dead_letters={"table": tables[2], "max_fraction": 1},
    )
    kinds = ["a", "a", "b", "b", "bad", "bad"]
    produce(b, name, events(*kinds), 2)
    with running(config, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        produce(b, name, events(*kinds, start=6), 2)
        for table, count in ((tables[0], 4), (tables[2], 4)):
            eventually(lambda t=table, n=count: len(lake.query(t, "kind")) == n, table, sink=sink)
        assert len(lake.query(tables[1], "id")) == 2
        sink.committer.close()  # as a crash would end it: nothing more is committed
        sink.stop(0.1)
    stage = lake.folder / "warehouse" / "db" / f"{name}_index" / "stage" / name
    staged = list(stage.glob("*.json"))
    assert staged
    for path in staged:
        path.unlink()
    produce(b, name, events(*kinds, start=12), 2)
    catch_up(config, spark)
    truth = topic_records(b, name)
    for table, kind in zip(tables, ("a", "b", "bad"), strict=True):
        where = '"partition", "offset"' if kind == "bad" else "_topic_partition, _offset"
        rows = lake.query(table, where)
        assert Counter(rows) == Counter(
            at for at, value in truth.items() if json.loads(value or b"")["kind"] == kind
        )
    all_proven(config, spark, *tables)
    assert cut(lake, f"db.{name}_index") == Cut({part(name, 0): 9, part(name, 1): 9})
    spans: Iterable[Any] = lake.query(
        f"db.{name}_index",
        "partition, start_offset, end_offset",
        "WHERE table_name = '*' ORDER BY ALL",
    )
    reached = {0: 0, 1: 0}
    for number, start, end in spans:
        assert start == reached[number]
        reached[number] = end


def test_a_name_from_data_is_in_the_index_before_its_table_is_filled_and_a_lost_index_is_refused(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """So that a newer run finds every table that an older one may fill; without the index nobody
    can tell what passed such a table by from what was lost, however often it is tried."""
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, events("a", "b"))
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_a"}, {"name": f"db.{name}_from_{{value}}"}],
        route=[
            {"field": "kind", "values": ["a"], "to": [f"db.{name}_a"]},
            {"field": "kind", "to": [f"db.{name}_from_{{value}}"]},
        ],
        dead_letters={"table": f"db.{name}_dead"},
    )
    steps = Steps(hold="staged")
    with running(config, spark, steps) as sink:
        assert steps.held.wait(WITHIN)
        index = JavaCatalog(spark, "lake").load(config.index_table)
        assert index is not None
        assert f"db.{name}_from_b" in index.properties[f"frazil.tables.{config.sink.id}"]
        assert lake.query(f"db.{name}_from_b", "count(*)") == [(0,)]
        steps.go.set()
        assert sink.wait_until(sink.ends(), WITHIN)
    spark.sql(f"DROP TABLE lake.{config.index_table}")
    for _ in range(2):
        with pytest.raises(Gap, match=rf"table db.{name}_a has rows of sink"):
            catch_up(config, spark)
    # A table that only data names is found when the data does.
    alone = replace(config, routes=config.routes[1:], tables=config.tables[1:])
    produce(broker.bootstrap, name, events("b"))
    for _ in range(2):
        with pytest.raises(Gap, match=rf"table db.{name}_from_b has rows of sink"):
            catch_up(alone, spark)
    assert lake.query(f"db.{name}_from_b", "count(*)") == [(1,)]
