"""A data generator: Avro orders with the Confluent header, into the partitions of a topic."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "order_id", "type": "long"},
            {"name": "customer", "type": "string"},
            {"name": "sku", "type": "string"},
            {"name": "quantity", "type": "int"},
            {"name": "price", "type": "double"},
            {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "country", "type": "string"},
            {"name": "express", "type": "boolean"},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
)
SCHEMA_ID = 1


def zigzag(number: int) -> bytes:
    """A non-negative number as an Avro long."""
    number <<= 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _text(value: str) -> bytes:
    raw = value.encode()
    return zigzag(len(raw)) + raw


class OrderGenerator:
    """Orders with distinct ids and realistic repetition in the rest. Same seed, same orders."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._id = 0
        self._head = b"\0" + struct.pack(">I", SCHEMA_ID)
        self._customers = [_text(f"customer-{i:06d}") for i in range(200_000)]
        self._skus = [_text(f"sku-{i:04d}") for i in range(5_000)]
        self._prices = [struct.pack("<d", cents / 100) for cents in range(100, 50_000)]
        self._tails = [
            _text(country) + (b"\1" if express else b"\0") + note
            for country in ("DE", "FR", "US", "JP", "BR", "IN")
            for express in (False, False, False, True)
            for note in (b"\0", b"\0", b"\2" + _text("gift wrap"))
        ]

    def next(self, placed_at: int) -> bytes:
        """One encoded order, placed at a time in microseconds."""
        pick = self._random.random
        self._id += 1
        return b"".join(
            (
                self._head,
                zigzag(self._id),
                self._customers[int(pick() * 200_000)],
                self._skus[int(pick() * 5_000)],
                bytes((2 * int(1 + pick() * 9),)),
                self._prices[int(pick() * 49_900)],
                zigzag(placed_at),
                self._tails[int(pick() * 72)],
            )
        )


def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        future.result()


def produce(
    bootstrap: str,
    topic: str,
    partitions: int,
    *,
    rows: int,
    orders: OrderGenerator | None = None,
    go_on: Callable[[int], bool] = lambda _: True,
) -> int:
    """Produce `rows` orders, round robin over the partitions, until `go_on(sent)` is false; returns
    the number sent."""
    orders = orders or OrderGenerator()
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "batch.num.messages": 20_000,
            "queue.buffering.max.messages": 200_000,
            "enable.idempotence": True,
            "log_level": 3,  # hides the retries while the broker starts
        }
    )
    sent = 0
    while sent < rows and go_on(sent):
        now = int(time.time() * 1_000_000)
        for i in range(min(5_000, rows - sent)):
            value = orders.next(now + i)
            while True:
                try:
                    producer.produce(topic, value, partition=sent % partitions)
                    break
                except BufferError:
                    producer.poll(0.05)
            sent += 1
        producer.poll(0)
    producer.flush()
    return sent
