"""Records for `many_tables.toml`, and the function that one of its rules asks.

    python examples/many_tables.py localhost:9092

Makes the topics `shop.events` and `shop.inventory`, and sends a hundred customers' days: orders and
refunds, clicks and searches, changes of an inventory, probes and tests that no table gets, and
a few records that fit nowhere.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer

import frazil
from frazil.testing import create_topic


def probes(rows: pa.Table) -> pa.Array:
    """For each record a table's name, `frazil.SKIP`, or null: the next rule decides."""
    probe = pc.starts_with(rows["_key"].cast(pa.large_string()), "probe-")
    return pc.if_else(pc.fill_null(probe, False), frazil.SKIP, pa.scalar(None, pa.string()))


def main(bootstrap: str) -> None:
    for topic in ("shop.events", "shop.inventory"):
        create_topic(bootstrap, topic, 2)
    producer = Producer({"bootstrap.servers": bootstrap})

    def send(topic: str, key: str, value: Any, **headers: str) -> None:
        producer.produce(topic, json.dumps(value), key, headers=list(headers.items()))

    for i in range(100):
        who = f"customer-{i}"
        send("shop.events", who, {"kind": "order", "id": i, "customer": who, "total": i + 0.5})
        send("shop.events", who, {"kind": "click", "page": f"/items/{i}"})
        send("shop.events", who, {"kind": "search", "words": ["ice", "table"]})
        send("shop.events", f"probe-{i}", {"kind": "click", "page": "/health"})
        stock = {"item": i, "left": 10}
        send("shop.inventory", who, {"op": "c", "before": None, "after": stock, "ts_ms": i})
    send(
        "shop.events",
        "customer-7",
        {"kind": "refund", "id": 7, "customer": "customer-7", "total": 7.5},
    )
    send("shop.events", "customer-8", {"kind": "click", "page": "/", "mobile": True})  # a new field
    send("shop.events", "customer-9", {"kind": "order", "id": 1000}, test="yes")
    send("shop.events", "nobody", {"page": "/"})  # no kind
    send("shop.events", "nobody", {"kind": "../../etc"})  # and one that is no name for a table
    gone = {"op": "d", "before": {"item": 5, "left": 10}, "after": None, "ts_ms": 200}
    send("shop.inventory", "customer-5", gone)
    producer.produce("shop.inventory", None, "customer-5")  # the tombstone behind the delete
    producer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
