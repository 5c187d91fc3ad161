"""Changes of a database become rows: real Kafka, Spark and Iceberg; the oracle reads the files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from frazil.config.model import Config
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import Registry, all_proven, avro, catch_up, produce
from tests.unit.test_debezium_types import AVRO, COLUMNS, FORMS, OTHERS, values

Make = Callable[..., Config]
SOURCE = {
    "type": "record",
    "name": "Source",
    "fields": [
        {"name": "db", "type": "string"},
        {"name": "table", "type": "string"},
        {"name": "pos", "type": "long"},
    ],
}


def envelope(*columns: Any) -> dict[str, Any]:
    """As Debezium registers it, for a table with such columns."""
    row = {"type": "record", "name": "Value", "fields": list(columns)}
    return {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": ["null", row]},
            {"name": "after", "type": ["null", "Value"]},
            {"name": "source", "type": SOURCE},
            {"name": "op", "type": "string"},
            {"name": "ts_ms", "type": ["null", "long"]},
            {"name": "transaction", "type": ["null", "string"], "default": None},
        ],
    }


def change(
    op: str, before: Any = None, after: Any = None, pos: int = 0, table: str = "people"
) -> dict[str, Any]:
    source = {"db": "shop", "table": table, "pos": pos}
    return {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1_000 + pos}


def person(number: int, name: str | None, **more: Any) -> dict[str, Any]:
    return {"id": number, "name": name, **more}


def fates(lake: Lake, name: str) -> tuple[Any, ...]:
    """Written, rejected and skipped of the whole stream, as the index has it."""
    select = "sum(written), sum(rejected), sum(skipped)"
    return lake.query(f"db.{name}_index", select, "WHERE table_name = '*'")[0]


ROWS = [
    ("r", 1, "Ada", 0),
    ("c", 2, "Bob", 1),
    ("u", 2, None, 2),
    ("d", 1, "Ada", 3),
]
CHANGES = [
    change("r", after=person(1, "Ada")),
    change("c", after=person(2, "Bob"), pos=1),
    change("u", before=person(2, "Bob"), after=person(2, None), pos=2),
    change("d", before=person(1, "Ada"), pos=3),
    None,
    change("t", pos=5),
    change("m", pos=6),
    change("u", before=person(2, "Bob"), pos=7),
]


def test_avro_changes_become_rows_and_what_is_no_row_a_dead_letter(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    columns = [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"]}]
    one = envelope(*columns)
    two = envelope(*columns, {"name": "age", "type": "int"})
    with Registry(**{"1": one, "2": two}) as registry:
        config = make_config(
            decode={"format": "confluent-avro", "registry": {"url": registry.url}},
            route=[{"pattern": ".*", "to": [f"db.{name}"], "envelope": "debezium"}],
            dead_letters={"table": f"db.{name}_dead"},
        )
        values: list[Any] = [change and avro(one, change, 1) for change in CHANGES]
        produce(broker.bootstrap, name, values)
        catch_up(config, spark)
        rows = lake.query(f"db.{name}", "_op, id, name, _source.pos", "ORDER BY _offset")
        assert rows == ROWS
        # A column more: the changes that follow have it, and deletes tell of it as well.
        later = [
            change("u", person(2, None, age=1), person(2, "B", age=2), 8),
            change("d", person(2, "B", age=2), pos=9),
        ]
        produce(broker.bootstrap, name, [avro(two, change, 2) for change in later])
        catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_op, age, _source.table, _ts_ms", "ORDER BY _offset")
    assert rows[3:] == [
        ("d", None, "people", 1_003),
        ("u", 2, "people", 1_008),
        ("d", 2, "people", 1_009),
    ]
    dead_letters = lake.query(f"db.{name}_dead", '"offset", kind, schema_id, value', "ORDER BY 1")
    assert [row[:3] for row in dead_letters] == [(n, "envelope", 1) for n in (5, 7)]
    assert [row[3] for row in dead_letters] == [values[5], values[7]]
    assert fates(lake, name) == (6, 2, 2), "a tombstone and a message are skipped"
    all_proven(config, spark, f"db.{name}", f"db.{name}_dead")


def test_json_changes_become_rows_with_a_schema_around_them_and_without(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)

    def text(value: Any, wrapped: bool) -> bytes | None:
        around = {"schema": {"type": "struct", "fields": []}, "payload": value}
        return json.dumps(around if wrapped else value).encode() if value or wrapped else None

    config = make_config(
        decode={"format": "json"},
        route=[{"topics": [name], "to": [f"db.{name}"], "envelope": "debezium"}],
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
    )
    changes = [*CHANGES, change("c", after=person(2**62 + 1, "large", tags=["x"]), pos=8)]
    values: list[Any] = [text(change, wrapped) for wrapped in (False, True) for change in changes]
    values += [b"{", b"[1]", b'{"op": "c"}', b'{"id": 1}', b"null"]
    produce(broker.bootstrap, name, values)
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_op, id, name, _source.pos, tags", "ORDER BY _offset")
    both = [*((*row, None) for row in ROWS), ("c", 2**62 + 1, "large", 8, ["x"])]
    assert rows == both * 2
    dead_letters = lake.query(f"db.{name}_dead", '"offset", kind, value', "ORDER BY 1")
    assert [row[:2] for row in dead_letters] == [
        *((n, "envelope") for n in (5, 7, 14, 16)),
        (18, "json"),
        (19, "envelope"),
        (20, "envelope"),
        (21, "envelope"),
        (22, "envelope"),
    ]
    assert [row[2] for row in dead_letters] == [values[row[0]] for row in dead_letters]
    assert fates(lake, name) == (10, 9, 4), (
        "tombstones and messages are skipped, in a wrapper or not"
    )
    all_proven(config, spark, f"db.{name}", f"db.{name}_dead")


def test_changes_of_many_tables_in_one_topic_go_where_their_source_says(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    made = f"db.{name}_{{value}}"
    config = make_config(
        decode={"format": "json"},
        table=[{"name": made}],
        route=[{"field": "source.table", "to": [made], "envelope": "debezium"}],
        dead_letters={"table": f"db.{name}_dead"},
    )
    values: list[Any] = [
        change("c", after={"id": 1}, table="one"),
        change("c", after={"key": "k"}, table="two"),
        change("d", before={"id": 1}, table="one"),
        None,
        change("c", after={"id": 2, "more": 1}, table="one"),
        change("t", table="two"),
        change("c", after={"id": 3}, table="../three"),
    ]
    produce(broker.bootstrap, name, [value and json.dumps(value).encode() for value in values])
    catch_up(config, spark)
    rows = lake.query(f"db.{name}_one", "_op, id, more", "ORDER BY _offset")
    assert rows == [("c", 1, None), ("d", 1, None), ("c", 2, 1)]
    assert lake.query(f"db.{name}_two", "_op, key") == [("c", "k")]
    dead_letters = lake.query(f"db.{name}_dead", '"offset", kind', "ORDER BY 1")
    assert dead_letters == [(5, "envelope"), (6, "name")]
    assert fates(lake, name) == (4, 2, 1)
    all_proven(config, spark, *(f"db.{name}_{suffix}" for suffix in ("one", "two", "dead")))


@pytest.mark.parametrize("form", FORMS)
def test_a_snapshot_and_the_changes_after_it_become_the_table_with_its_types(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, form: str
):
    """Records of Debezium's own classes: rows that a snapshot read, then c, u, d, a tombstone, a
    truncate, a message and a value that its column cannot hold."""
    create_topic(broker.bootstrap, name, 1)
    message = next(line for line in OTHERS if line["name"] == "message")
    schemas = {"1": json.loads(AVRO.schema), "2": json.loads(message["avsc"])}

    def sent(*names: str) -> list[bytes]:
        head = b"\0\0\0\0\1" if form == "avro" else b""
        return [head + value for _, value in values(list(names), form)]

    with Registry(**schemas) as registry:
        avro_format = {"format": "confluent-avro", "registry": {"url": registry.url}}
        config = make_config(
            decode=avro_format if form == "avro" else {"format": "json"},
            table={
                "mode": "upsert",
                "key": ["id"],
                "compact_after_commits": 1,
                # Avro's time-millis is a column of type time, and Spark reads no table with one
                "select": ["* except (connect_time)"],
            },
            route=[{"topics": [name], "to": [f"db.{name}"], "envelope": "debezium"}],
            dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
        )
        produce(broker.bootstrap, name, sent("read", "read nulls"))
        catch_up(config, spark)
        select = ", ".join(COLUMNS)
        assert lake.query(f"db.{name}", select, "ORDER BY id")[0] == duckdb_row(1)
        other = b"\0\0\0\0\2" + base64.b64decode(message["avro"])
        changes: list[Any] = [
            *sent("create", "update", "delete"),
            None,
            *sent("truncate", "beyond stamptz infinity"),
            other if form == "avro" else message["json"].encode(),
        ]
        produce(broker.bootstrap, name, changes)
        catch_up(config, spark)
    assert lake.query(f"db.{name}", select, "ORDER BY id") == [
        (2, *duckdb_row(1)[1:]),
        duckdb_row(2),
    ]
    dead_letters = lake.query(f"db.{name}_dead", '"offset", kind', "ORDER BY 1")
    assert dead_letters == [(6, "envelope"), (7, "misfit")]
    assert fates(lake, name)[1:] == (2, 2), "a tombstone and a message are skipped"
    [row] = spark.sql(
        "SELECT id, price, numeric_any, born, CAST(stamp6 AS STRING) AS stamp6, uid, hstore,"
        f" unix_micros(stamptz) AS stamptz, shape.srid AS srid FROM lake.db.{name} WHERE id = 2"
    ).collect()
    assert row.asDict() == {
        "id": 2,
        **{name: COLUMNS[name][1] for name in ("price", "numeric_any", "born")},
        "stamp6": "2021-01-01 12:34:56.123456",
        "uid": str(COLUMNS["uid"][1]),
        "hstore": {"k": "v"},
        "stamptz": 1609497296123456,
        "srid": 4326,
    }
    all_proven(config, spark, f"db.{name}", f"db.{name}_dead")


@pytest.mark.parametrize("form", FORMS)
def test_a_key_of_a_named_type_is_one_key_in_every_batch(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, form: str
):
    create_topic(broker.bootstrap, name, 1)
    with Registry(**{"1": json.loads(AVRO.schema)}) as registry:
        avro_format = {"format": "confluent-avro", "registry": {"url": registry.url}}
        config = make_config(
            decode=avro_format if form == "avro" else {"format": "json"},
            table={"mode": "upsert", "key": ["uid"], "version_column": "stamptz"},
            route=[{"topics": [name], "to": [f"db.{name}"], "envelope": "debezium"}],
        )
        head = b"\0\0\0\0\1" if form == "avro" else b""
        for names in (["read", "create"], ["update"], ["delete"]):
            produce(broker.bootstrap, name, [head + v for _, v in values(names, form)])
            catch_up(config, spark)
            rows = lake.query(f"db.{name}", "uid, id", "ORDER BY id")
            lower = [(COLUMNS["uid"][2], 3)]
            first = {"read": 1, "update": 2}.get(names[0])
            assert rows == sorted(
                [*lower, *([(COLUMNS["uid"][1], first)] if first else [])], key=lambda row: row[1]
            )
    all_proven(config, spark, f"db.{name}")


def duckdb_row(at: int) -> tuple[Any, ...]:
    """Row 1 or 3 of the records, as DuckDB returns it."""
    row = []
    for kind, *both in COLUMNS.values():
        value = both[at - 1]
        row.append(dict(value) if value is not None and kind.startswith("map") else value)
    return tuple(row)


def test_heartbeats_and_transactions_are_left_out_by_their_topics(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    beside = {
        "heartbeat": f"__debezium-heartbeat.{name}",
        "begin": f"{name}.transaction",
        "end": f"{name}.transaction",
    }
    topics = sorted({name, *beside.values()})
    for topic in topics:
        create_topic(broker.bootstrap, topic, 1)
    config = make_config(
        sink={"topics": topics},
        decode={"format": "json"},
        table={"mode": "upsert", "key": ["id"]},
        route=[
            {"pattern": rf"{name}\.transaction|__debezium-heartbeat\..*", "skip": True},
            {"topics": [name], "to": [f"db.{name}"], "envelope": "debezium"},
        ],
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
    )
    lines = {line["name"]: line["json"].encode() for line in OTHERS}
    for kind, topic in beside.items():
        produce(broker.bootstrap, topic, [lines[kind]])
    changes = [value for _, value in values(["read", "update"], "plain")]
    # The last one is in a topic where no rule skips it.
    produce(broker.bootstrap, name, [*changes, lines["message"], lines["heartbeat"]])
    catch_up(config, spark)
    assert lake.query(f"db.{name}", "id", "ORDER BY id") == [(1,), (2,)]
    [(kind, reason)] = lake.query(f"db.{name}_dead", "kind, message")
    assert (kind, "it is a heartbeat" in reason) == ("envelope", True)
    assert fates(lake, name) == (2, 1, 4)
    all_proven(config, spark, f"db.{name}", f"db.{name}_dead")
