"""JSON through the real thing: tables made and changed for it, and odd records in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from frazil.config.model import Config
from frazil.errors import Undecodable
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import all_proven, catch_up, produce

Make = Callable[..., Config]
ODD = [
    b'{"id":99,"ID":1}',
    b'{"id":99,"":1}',
    b'{"id":99,"_offset":1}',
    b'{"id":99,"_pos":1}',
    b'{"id":99,"at.b":1,"at":{"b":1}}',
    b'{"id":"x"}',
    b'{"id":99,"d":' + b'{"x":' * 70 + b"1" + b"}" * 71,
    b'{"id":99,"d":' + b"[" * 200 + b"]" * 200 + b"}",
]


def test_odd_records_in_the_batch_that_creates_a_table_cost_no_other_record(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    good = [json.dumps({"id": i, "at": {"b": i}}).encode() for i in range(40)]
    nested = b'{"id":40,"d":' + b'{"x":' * 46 + b"1" + b"}" * 47
    produce(broker.bootstrap, name, [*ODD, *good, nested])
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}"}],
        dead_letters={"table": f"db.{name}_dead"},
    )
    catch_up(config, spark)
    assert sorted(lake.query(f"db.{name}", "id")) == [(i,) for i in range(41)]
    dead_letters = sorted(lake.query(f"db.{name}_dead", '"offset", kind'))
    kinds = ["misfit"] * 6 + ["limit"] * 2
    assert dead_letters == list(enumerate(kinds))
    all_proven(config, spark, f"db.{name}", f"db.{name}_dead")


def test_new_fields_are_added_beside_columns_that_json_has_no_type_for(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    spark.sql(
        f"CREATE TABLE lake.db.{name} (id bigint NOT NULL, f double, at timestamp, day date, "
        "price decimal(9, 2), small int, s struct<at: timestamp>, raw binary) USING iceberg"
    )
    row = {
        "id": 1,
        "f": 2,
        "at": "2024-02-29T12:34:56Z",
        "day": "2024-02-29",
        "price": 1.5,
        "small": 1,
        "s": {"at": "2024-02-29T12:34:56Z"},
        "raw": "aGk=",
    }
    values = [
        row,
        {**row, "id": 2, "more": "x"},
        {**row, "id": 3, "s": {**row["s"], "n": 1}, "small": 2**40, "price": "12345678901.25"},
    ]
    produce(broker.bootstrap, name, [json.dumps(value).encode() for value in values])
    config = make_config(decode={"format": "json"}, table=[{"name": f"db.{name}"}])
    catch_up(config, spark)
    rows = sorted(lake.query(f"db.{name}", "id, f, more, s.n, small, cast(price as varchar)"))
    assert rows == [
        (1, 2.0, None, None, 1, "1.50"),
        (2, 2.0, "x", None, 1, "1.50"),
        (3, 2.0, None, 1, 2**40, "12345678901.25"),
    ]


def test_what_is_no_json_stops_a_sink_without_dead_letters_with_its_place_and_its_first_bytes(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [b"id,name,price", b"1,apple,2.50"])
    config = make_config(decode={"format": "json"}, table=[{"name": f"db.{name}"}])
    with pytest.raises(Undecodable) as caught:
        catch_up(config, spark)
    assert f"{name}[0] offset 0: " in caught.value.message
    assert "not JSON" in caught.value.message
    assert "b'id,name,price'" in caught.value.message


def test_a_transform_takes_columns_of_any_name(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    names = ["a`b", "`", "a.b", "a b", 'a"b', "a'b", "``x``"]
    produce(broker.bootstrap, name, [json.dumps({"id": 1} | dict.fromkeys(names, 5)).encode()])
    config = make_config(
        decode={"format": "json"},
        table=[{"name": f"db.{name}"}],
        transform={"sql": "SELECT * EXCEPT (_key, _headers) FROM stream"},
    )
    catch_up(config, spark)
    quoted = ", ".join('"' + column.replace('"', '""') + '"' for column in names)
    assert lake.query(f"db.{name}", quoted) == [(5,) * len(names)]
