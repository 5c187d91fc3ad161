"""Connections to the leaders of partitions, one per broker and thread; and the settings of
librdkafka.

Leaders come from confluent-kafka; TLS and SASL are in `frazil.kafka.security`. Runs on executors
and in the planner's process: imports nothing of weight.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from frazil.kafka.security import secured, token_function, unsupported
from frazil.kafka.setting_names import refusals
from frazil.offsets import Partition

#: Defaults under the user's own [kafka] settings.
DEFAULTS = {
    "isolation.level": "read_committed",
    "check.crcs": "true",
    # The data is known to exist: never wait for more of it, never pause a full queue for long.
    "fetch.wait.max.ms": "10",
    "fetch.queue.backoff.ms": "2",
    # Records beyond the range's end are fetched in vain: keep the queue short.
    "queued.min.messages": "30000",
    "queued.max.messages.kbytes": "16384",
    "fetch.message.max.bytes": "1048576",
    "log_level": "2",
}
#: Required by the promise: overrides the user's settings.
FIXED = {
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
}

#: Address of a broker, and the settings: a process may read as several users.
_Connected = tuple[tuple[str, int], tuple[tuple[str, str], ...]]
_admins: dict[tuple[tuple[str, str], ...], AdminClient] = {}


class _ThreadState(threading.local):
    """Per thread: an answer belongs to the thread that asked; a driver may run several sinks."""

    def __init__(self) -> None:
        #: server, topic, partition → address of its leader
        self.leaders: dict[tuple[str, str, int], tuple[str, int]] = {}
        #: address and settings → the connection, and when the broker ends its session
        self.connections: dict[_Connected, tuple[socket.socket, float]] = {}


_own = _ThreadState()
_correlations = itertools.count(1)


def next_correlation() -> int:
    return next(_correlations) & 0x7FFFFFFF


class Unsupported(Exception):
    """Not for this module; `at` is the offset to continue from with the client library."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at


def supports(kafka: Mapping[str, str]) -> bool:
    """Whether these settings are for connections of our own; else the client library is used."""
    return not unsupported(kafka)


def read_answer(connection: socket.socket) -> bytearray:
    size = struct.unpack(">i", _exactly(connection, 4))[0]
    if size < 0:
        raise OSError(f"an answer of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the broker closed the connection")
        view = view[got:]
    return buffer


def connection_to(kafka: Mapping[str, str], partition: Partition) -> socket.socket:
    address = leader_of(kafka, partition)
    place = address, tuple(sorted(kafka.items()))
    connection, until = _own.connections.get(place, (None, 0.0))
    if connection is None or time.monotonic() > until:
        if connection is not None:
            connection.close()
            del _own.connections[place]
        _own.connections[place] = _connected(address, kafka)
    return _own.connections[place][0]


def _connected(address: tuple[str, int], kafka: Mapping[str, str]) -> tuple[socket.socket, float]:
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.create_connection(address, timeout=30))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ready = secured(connection, address[0], kafka, _request)
        opened.pop_all()
    return ready


def _request(connection: socket.socket, api: int, version: int, body: bytes) -> bytearray:
    """The answer to a request whose header is the first version of all."""
    correlation = next_correlation()
    body = struct.pack(">hhih", api, version, correlation, 6) + b"frazil" + body
    connection.sendall(struct.pack(">i", len(body)) + body)
    answer = read_answer(connection)
    if struct.unpack_from(">i", answer)[0] != correlation:
        raise OSError(f"an answer to another request than {correlation}")
    return answer[4:]


def leader_of(kafka: Mapping[str, str], partition: Partition) -> tuple[str, int]:
    key = (kafka["bootstrap.servers"], partition.kafka_topic, partition.number)
    if key not in _own.leaders:
        look_up_leaders(kafka, partition.kafka_topic)
    if key not in _own.leaders:
        raise OSError(f"no leader of {partition}")
    return _own.leaders[key]


def look_up_leaders(kafka: Mapping[str, str], topic: str | None) -> None:
    """Cache the leaders of the partitions of a topic, or of all topics."""
    try:
        metadata = admin_client(kafka).list_topics(topic, timeout=10)
    except KafkaException as error:
        raise OSError(f"no metadata of {topic or 'the cluster'}: {error}") from None
    for name, entry in metadata.topics.items():
        for number, part in entry.partitions.items():
            if (broker := metadata.brokers.get(part.leader)) is not None:
                where = (kafka["bootstrap.servers"], name, number)
                _own.leaders[where] = (str(broker.host), broker.port)


def admin_client(kafka: Mapping[str, str]) -> AdminClient:
    key = tuple(sorted(kafka.items()))
    if key not in _admins:
        with refusals(kafka):
            _admins[key] = AdminClient({"log_level": "2", **client_settings(kafka)})
    return _admins[key]


def client_settings(kafka: Mapping[str, str]) -> dict[str, Any]:
    """The settings as confluent-kafka takes them."""
    settings: dict[str, Any] = dict(kafka)
    if name := kafka.get("oauth_cb"):
        settings["oauth_cb"] = token_function(name)
    return settings


def drop_connection(kafka: Mapping[str, str], partition: Partition) -> None:
    """Drop the connection, and the cached leader of the partition."""
    where = (kafka["bootstrap.servers"], partition.kafka_topic, partition.number)
    address = _own.leaders.pop(where, None)
    place = address, tuple(sorted(kafka.items()))
    connection, _ = _own.connections.pop(place, (None, 0.0))  # type: ignore[arg-type]
    if connection is not None:
        connection.close()
