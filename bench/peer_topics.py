"""What every side of the comparison reads and writes: broker, schema registry, catalog and topics.

One broker with a plaintext and a TLS listener, one REST catalog on local files, one registry, and a
topic for each case. All topics hold the same orders.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.certificates import Authority

import rest
from frazil.testing import datagen
from frazil.testing.kafka import Broker, free_ports
from schema_registry import SchemaRegistry

#: Cases of the comparison, by the name of their topic.
CASES = {
    "avro": "Avro",
    "headers": "Avro with key and headers",
    "json": "JSON",
    "tls": "Avro over TLS",
}
PARTITIONS = 4
#: OpenTelemetry's trace context, and one more.
HEADERS = [
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("source", b"shop-frontend"),
]


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the servers are."""

    bootstrap: str
    secure_bootstrap: str
    #: certificate of the authority that signed the broker's, as PEM
    authority: str
    catalog: str
    registry: str
    #: the registry by Apicurio's own interface
    apicurio: str


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic and how to read it, as a side gets it."""

    case: str
    name: str
    servers: Servers

    @property
    def is_json(self) -> bool:
        return self.case == "json"

    @property
    def java(self) -> dict[str, str]:
        """Settings of a Java client."""
        if self.case != "tls":
            return {"bootstrap.servers": self.servers.bootstrap}
        return {
            "bootstrap.servers": self.servers.secure_bootstrap,
            "security.protocol": "SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.servers.authority,
        }

    @property
    def librdkafka(self) -> dict[str, str]:
        if self.case != "tls":
            return {"bootstrap.servers": self.servers.bootstrap}
        return {
            "bootstrap.servers": self.servers.secure_bootstrap,
            "security.protocol": "ssl",
            "ssl.ca.location": self.servers.authority,
        }


class Lake:
    """The servers, started on entry and ended on exit."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._stack = ExitStack()

    def __enter__(self) -> Lake:
        with ExitStack() as stack:
            self._say("starting Apache Kafka, a REST catalog and a schema registry")
            authority = Authority.make(self._folder / "tls")
            broker, secure = self._broker(authority)
            stack.enter_context(broker)
            catalog = stack.enter_context(rest.RestCatalog(self._folder / "catalog", self._say))
            registry = SchemaRegistry(self._folder / "registry", self._say)
            self._registry = stack.enter_context(registry)
            self.servers = Servers(
                broker.bootstrap,
                secure,
                str(authority.path),
                catalog.uri,
                registry.url,
                registry.apicurio,
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def create(self, case: str, name: str) -> Topic:
        """An empty topic for a case, its schema in the registry."""
        topic = Topic(case, name, self.servers)
        datagen.create_topic(self.servers.bootstrap, topic.name, PARTITIONS)
        if not topic.is_json:
            number = self._registry.register(f"{topic.name}-value", datagen.SCHEMA)
            if number != datagen.SCHEMA_ID:
                raise SystemExit(f"the registry gave schema {number}, not {datagen.SCHEMA_ID}")
        return topic

    def produce(self, topic: Topic, rows: int, per_second: float = 0.0) -> float:
        """Produce `rows` orders round robin; returns when the first was produced.

        With a rate, order k is produced at its time: the first one's plus k / rate.
        """
        headers = HEADERS if topic.case == "headers" else ()
        return produce(
            self.servers.bootstrap,
            topic.name,
            orders(rows, as_json=topic.is_json),
            with_key=bool(headers),
            headers=headers,
            per_second=per_second,
        )

    def _broker(self, authority: Authority) -> tuple[Broker, str]:
        """The broker, and the address of its TLS listener."""
        certificate, key = authority.issue("broker")
        broker = Broker(self._folder / "kafka", jvm=("-Xmx1g",), say=self._say)
        [port] = free_ports(1)
        secure = f"127.0.0.1:{port}"
        listeners = f"PLAINTEXT://{broker.bootstrap},SSL://{secure}"
        broker.settings |= {
            "listeners": f"{listeners},CONTROLLER://{broker.controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SSL:SSL,CONTROLLER:PLAINTEXT",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _property(certificate),
            "ssl.keystore.key": _property(key),
        }
        return broker, secure


def produce(
    bootstrap: str,
    topic: str,
    values: Iterable[bytes],
    *,
    partitions: int = PARTITIONS,
    with_key: bool = False,
    headers: Sequence[tuple[str, bytes]] = (),
    per_second: float = 0.0,
) -> float:
    """Produce records round robin; returns when the first was produced.

    With a rate, record k is produced at its time: the first one's plus k / rate.
    """
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 5 if per_second else 20,
            "batch.num.messages": 20_000,
            "queue.buffering.max.messages": 400_000,
            "enable.idempotence": True,
            "log_level": 3,  # hides the retries while the broker starts
        }
    )
    began, attached = time.time(), list(headers) or None
    for number, value in enumerate(values):
        if per_second and number % 500 == 0:
            producer.poll(0)
            time.sleep(max(0.0, began + number / per_second - time.time()))
        key = b"%d" % number if with_key else None
        while True:
            try:
                producer.produce(topic, value, key, number % partitions, headers=attached)
                break
            except BufferError:
                producer.poll(0.05)
    if producer.flush(120):
        raise SystemExit("the broker did not take all records within two minutes")
    return began


def orders(rows: int, *, as_json: bool = False) -> Iterator[bytes]:
    """The same orders for every case: as Avro with the Confluent header, or as JSON."""
    if as_json:
        yield from map(_json_order, range(rows))
        return
    generator, now = datagen.OrderGenerator(), int(time.time() * 1_000_000)
    for number in range(rows):
        yield generator.next(now + number)


def _json_order(number: int) -> bytes:
    spread = number * 2_654_435_761 % 2**32
    minute, second, micros = spread % 60, spread // 60 % 60, spread % 10**6
    order: dict[str, Any] = {
        "order_id": number,
        "customer": f"customer-{spread % 200_000:06d}",
        "sku": f"sku-{spread % 5_000:04d}",
        "quantity": 1 + spread % 9,
        "price": (100 + spread % 49_900) / 100,
        "placed_at": f"2026-11-19T12:{minute:02d}:{second:02d}.{micros:06d}Z",
        "country": ("DE", "FR", "US", "JP", "BR", "IN")[spread % 6],
        "express": spread % 4 == 3,
        "note": "gift wrap" if spread % 3 == 2 else None,
    }
    return json.dumps(order, separators=(",", ":")).encode()


def _property(path: Path) -> str:
    """A file's text as one value of Java's properties."""
    return path.read_text().strip().replace("\n", "\\n\\\n")
