"""Values that are hard to carry: from a database's changes in Kafka to tables, and compacted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frazil.config.model import Config
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import Registry, Steps, all_proven, avro, eventually, produce, running
from tests.system.test_debezium import change, envelope

Make = Callable[..., Config]


def record(name: str, *fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}


DECIMAL = record("VariableScaleDecimal", ("scale", "int"), ("value", "bytes"))
TAGS = {"type": "array", "items": record("Tag", ("t", "string"))}
MARKS = {"type": "map", "values": record("Mark", ("n", "long"))}
POINT = record("Point", ("x", "double"), ("y", "double"))
COLUMNS = [
    {"name": "id", "type": "long"},
    {"name": "n", "type": ["null", DECIMAL]},
    {"name": "tags", "type": ["null", TAGS]},
    {"name": "marks", "type": ["null", MARKS]},
]
ONE = envelope(*COLUMNS)
TWO = envelope(*COLUMNS, {"name": "p", "type": ["null", POINT]})


def row(number: int, full: bool, **more: Any) -> dict[str, Any]:
    if not full:
        return {"id": number, "n": None, "tags": None, "marks": None, **more}
    return {"id": number, "n": {"scale": 2, "value": b"\x01"}, "tags": [], "marks": {}, **more}


def seen(number: int, full: bool, x: float | None = None) -> tuple[Any, ...]:
    """As DuckDB and Spark show it: scale, number of tags, number of marks, x."""
    return (number, 2, 0, 0, x) if full else (number, None, None, None, x)


def test_nulls_stay_nulls_and_empty_stays_empty_in_both_modes_and_after_compaction(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """Optional records with required fields, null lists and maps of records; a record type that is
    younger than most files."""
    create_topic(broker.bootstrap, name, 1)
    log, state = f"db.{name}", f"db.{name}_state"
    steps = Steps()
    with Registry(**{"1": ONE, "2": TWO}) as registry:
        config = make_config(
            decode={"format": "confluent-avro", "registry": {"url": registry.url}},
            route=[{"pattern": ".*", "to": [log, state], "envelope": "debezium"}],
            table=[
                {"name": log},
                {"name": state, "mode": "upsert", "key": ["id"], "compact_after_commits": 1},
            ],
        )
        with running(config, spark, steps) as sink:

            def sent(*values: bytes) -> None:
                produce(broker.bootstrap, name, values)
                ends = sink.ends()
                assert sink.wait_until(ends, 180)

            sent(*(avro(ONE, change("c", after=row(i, i % 2 == 0)), 1) for i in range(8)))
            sent(
                avro(ONE, change("u", row(0, True), row(0, False)), 1),
                avro(ONE, change("d", row(1, False)), 1),
            )
            point = {"x": 0.5, "y": 1.0}
            sent(
                avro(TWO, change("u", None, row(2, True, p=point)), 2),
                avro(TWO, change("u", None, row(3, False, p=None)), 2),
                avro(TWO, change("d", row(5, False, p=None)), 2),
            )
            eventually(lambda: steps.named("compacted"), "a compaction", sink=sink)
    wanted = [
        seen(0, False),
        seen(2, True, 0.5),
        seen(3, False),
        seen(4, True),
        seen(6, True),
        seen(7, False),
    ]
    select = "id, n.scale, len(tags), cardinality(marks), p.x"
    assert sorted(lake.query(state, select)) == wanted
    spark.sql(f"REFRESH TABLE lake.{state}")
    sizes = "if(tags IS NULL, NULL, size(tags)), if(marks IS NULL, NULL, size(marks))"
    by_spark = spark.sql(f"SELECT id, n.scale, {sizes}, p.x FROM lake.{state}")
    assert sorted(map(tuple, by_spark.collect())) == wanted
    nulls = lake.query(log, "count(*)", "WHERE tags IS NULL AND marks IS NULL AND n IS NULL")
    assert nulls == [(8,)]
    assert lake.query(log, "count(*)") == [(13,)]
    all_proven(config, spark, log, state)
