"""One contract for both ways of reading Kafka: our own Fetch request, and confluent-kafka."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from frazil.errors import Expired, Unavailable, Undecodable
from frazil.iceberg.file_io import zigzag
from frazil.kafka import connection as connections
from frazil.kafka.fetch import fetch
from frazil.kafka.record_batch import HEADERS
from frazil.offsets import Partition, Range
from frazil.testing.kafka import Broker, free_ports
from tests.oracle import topic_records

WAYS = pytest.mark.parametrize("client", [False, True], ids=["wire", "client"])


@pytest.fixture
def topic(broker: Broker, name: str) -> Callable[..., str]:
    def create(**config: str) -> str:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        for future in admin.create_topics([NewTopic(name, 1, 1, config=config)]).values():
            future.result()
        return name

    return create


def producer(broker: Broker, **settings: Any) -> Producer:
    quiet = {"linger.ms": 5, "log_level": 0}
    return Producer({"bootstrap.servers": broker.bootstrap, **quiet, **settings})


def read(
    broker: Broker, topic: str, start: int, end: int, client: bool
) -> tuple[dict[tuple[int, int], bytes | None], int]:
    """What comes out of a range, and how many of its offsets were invisible."""
    records: dict[tuple[int, int], bytes | None] = {}
    position, invisible = start, 0
    wanted = Range(Partition(topic, 0), start, end)
    for chunk in fetch({"bootstrap.servers": broker.bootstrap}, wanted, patience=30, client=client):
        values, offsets, stamps, keys, headers = chunk.open()
        assert chunk.span.start == position, "the spans of chunks join"
        assert len(values) == len(offsets) == len(stamps)
        assert keys is headers is None
        assert (np.diff(offsets) > 0).all()
        assert (stamps > 1_600_000_000_000).all()
        position = chunk.span.end
        invisible += len(chunk.span) - len(values)
        records.update({(0, int(o)): v for o, v in zip(offsets, values, strict=True)})
    assert position == end
    return records, invisible


@WAYS
@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_gives_the_same_records(
    broker: Broker, topic: Callable[..., str], compression: str, client: bool
):
    name = topic()
    sender = producer(broker, **{"compression.type": compression})
    for i in range(5_000):
        sender.produce(name, f"value-{i}".encode() * (1 + i % 5), key=b"k" if i % 3 else None)
    sender.flush()
    records, invisible = read(broker, name, 0, 5_000, client)
    assert records == topic_records(broker.bootstrap, name)
    assert invisible == 0


@WAYS
def test_keys_headers_tombstones_and_empty_values_survive(
    broker: Broker, topic: Callable[..., str], client: bool
):
    name = topic()
    sender = producer(broker)
    for i in range(300):
        value = None if i % 5 == 0 else b"" if i % 7 == 0 else b"v%d" % i
        headers = [("trace", b"x"), ("none", None)] if i % 3 == 0 else None
        sender.produce(name, value, key=b"key" if i % 2 else None, headers=headers)
    sender.flush()
    records, _ = read(broker, name, 0, 300, client)
    assert records == topic_records(broker.bootstrap, name)


#: A record's key and its headers.
Envelope = tuple[bytes | None, list[tuple[str, bytes | None]]]

HEADED: list[list[tuple[str, bytes | None]]] = [
    [],
    [("trace", b"x")],
    [("b", b"1"), ("a", b"2"), ("b", b"3"), ("b", b"1")],
    [("null", None), ("empty", b""), ("", b"\0\xff"), ("größe", b"x" * 300)],
]
#: Records of one kind are read at once, mixed ones one by one: neither may show.
ENVELOPES: dict[str, list[Envelope]] = {
    "no-keys": [(None, [])],
    "empty-keys": [(b"", [])],
    "keys": [(b"k", []), (b"\0\xff" * 100, []), (b"", [])],
    "first-without-key": [(None, []), (b"k", []), (b"", [])],
    "first-with-key": [(b"k", []), (None, []), (b"", [])],
    "first-with-empty-key": [(b"", []), (None, [])],
    "headers-on-all": [(None, HEADED[1]), (None, HEADED[2])],
    "headers-on-some": [(None, []), (None, HEADED[2]), (None, HEADED[3])],
    "everything": list(itertools.product((None, b"", b"key"), HEADED)),
}


def send(broker: Broker, topic: str, given: Sequence[Envelope], **settings: Any) -> None:
    """In one batch, so that a range may begin and end within it."""
    sender = producer(broker, **{"linger.ms": 500, **settings})
    for i, (key, headers) in enumerate(given):
        sender.produce(topic, b"v%d" % i, key=key, headers=headers)
    sender.flush()


def envelopes(broker: Broker, topic: str, start: int, end: int, client: bool) -> list[Envelope]:
    gathered: list[Envelope] = []
    kafka = {"bootstrap.servers": broker.bootstrap}
    wanted = Range(Partition(topic, 0), start, end)
    for chunk in fetch(kafka, wanted, patience=30, client=client, envelope=True):
        values, offsets, _, keys, headers = chunk.open(envelope=True)
        assert list(values) == [b"v%d" % offset for offset in offsets]
        assert keys is not None
        assert headers is not None
        assert (keys.type, headers.type) == (pa.large_binary(), HEADERS)
        assert headers.null_count == 0
        named = [
            [(header["key"], header["value"]) for header in row] for row in headers.to_pylist()
        ]
        gathered += zip(keys.to_pylist(), named, strict=True)
        assert len(gathered) == chunk.span.end - start
    return gathered


@WAYS
@pytest.mark.parametrize("kind", ENVELOPES)
def test_keys_and_headers_come_out_as_they_were_sent(
    broker: Broker, topic: Callable[..., str], kind: str, client: bool
):
    name = topic()
    given = (ENVELOPES[kind] * 60)[:60]
    send(broker, name, given)
    for start, end in ((0, 60), (0, 1), (7, 41), (58, 60), (5, 5)):
        assert envelopes(broker, name, start, end, client) == given[start:end]


@WAYS
@pytest.mark.parametrize("kind", ["keys", "everything"])
@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_every_compression_keeps_keys_and_headers(
    broker: Broker, topic: Callable[..., str], compression: str, kind: str, client: bool
):
    name = topic()
    given = (ENVELOPES[kind] * 300)[:300]
    send(broker, name, given, **{"compression.type": compression})
    assert envelopes(broker, name, 0, 300, client) == given
    assert envelopes(broker, name, 11, 222, client) == given[11:222]


@WAYS
def test_offsets_that_are_all_invisible_have_an_empty_envelope(
    broker: Broker, topic: Callable[..., str], client: bool
):
    name = topic()
    sender = producer(broker, **{"transactional.id": f"{name}-{client}"})
    sender.init_transactions()
    sender.begin_transaction()
    sender.produce(name, b"v0", key=b"k", headers=[("trace", b"x")])
    sender.flush()
    sender.abort_transaction()
    kafka = {"bootstrap.servers": broker.bootstrap}
    wanted = Range(Partition(name, 0), 0, 2)
    [chunk] = fetch(kafka, wanted, patience=30, client=client, envelope=True)
    opened = chunk.open(envelope=True)
    assert opened.keys == pa.array([], pa.large_binary())
    assert opened.headers == pa.array([], HEADERS)


@WAYS
def test_a_chunk_has_an_envelope_only_for_those_who_ask(
    broker: Broker, topic: Callable[..., str], client: bool
):
    name = topic()
    send(broker, name, [(b"k", HEADED[1])])
    kafka = {"bootstrap.servers": broker.bootstrap}
    wanted = Range(Partition(name, 0), 0, 1)
    [chunk] = fetch(kafka, wanted, patience=30, client=client, envelope=True)
    for envelope in (False, True, False):
        opened = chunk.open(envelope)
        assert list(opened.values) == [b"v0"]
        assert (opened.keys is None, opened.headers is None) == (not envelope, not envelope)
    [bare] = fetch(kafka, wanted, patience=30, client=client)
    with pytest.raises(AssertionError, match="not asked"):
        bare.open(envelope=True)
    assert list(bare.open().values) == [b"v0"]


def store(broker: Broker, topic: str, header: bytes) -> None:
    """A record with a header of that key, sent by hand: confluent-kafka sends UTF-8 only."""
    record = b"\0\0\0\1\4v1\2" + zigzag(len(header)) + header + b"\2x"
    now = int(time.time() * 1000)
    covered = struct.pack(">hiqqqhii", 0, 0, now, now, -1, -1, -1, 1) + zigzag(len(record)) + record
    checked = struct.pack(">ibI", -1, 2, google_crc32c.value(covered)) + covered
    batch = struct.pack(">qi", 0, len(checked)) + checked
    name = topic.encode()
    request = b"".join(
        (
            struct.pack(">hhihhhi", 0, 3, 0, -1, -1, -1, 10_000),
            struct.pack(">ih", 1, len(name)),
            name,
            struct.pack(">iii", 1, 0, len(batch)),
            batch,
        )
    )
    connection = connections.connection_to(
        {"bootstrap.servers": broker.bootstrap}, Partition(topic, 0)
    )
    connection.sendall(struct.pack(">i", len(request)) + request)
    [error] = struct.unpack_from(">h", connections.read_answer(connection), 18 + len(name))
    assert error == 0


@WAYS
def test_a_header_key_that_is_not_utf8_is_never_left_out_in_silence(
    broker: Broker, topic: Callable[..., str], client: bool
):
    """confluent-kafka cannot hand it over: it gives a list that kills whoever looks at it."""
    name = topic()
    send(broker, name, [(None, HEADED[1])])
    store(broker, name, b"a\xffb")
    if client:
        with pytest.raises(Undecodable, match=rf"{name}\[0\] offset 1: a header's key is not"):
            envelopes(broker, name, 0, 2, client)
    else:
        actual = envelopes(broker, name, 0, 2, client)
        assert actual == [(None, HEADED[1]), (None, [("a\ufffdb", b"x")])]
    # Who does not ask for headers is not stopped by them.
    assert len(read(broker, name, 0, 2, client)[0]) == 2


@WAYS
def test_a_range_begins_and_ends_in_the_middle_of_a_batch(
    broker: Broker, topic: Callable[..., str], client: bool
):
    name = topic()
    sender = producer(broker, **{"linger.ms": 500, "batch.num.messages": 1000})
    for i in range(1_000):
        sender.produce(name, b"v%d" % i)
    sender.flush()
    for start, end in ((0, 1), (17, 18), (123, 777), (999, 1000), (5, 5)):
        records, invisible = read(broker, name, start, end, client)
        assert sorted(offset for _, offset in records) == list(range(start, end))
        assert invisible == 0


@WAYS
def test_aborted_transactions_and_markers_are_invisible_and_counted(
    broker: Broker, topic: Callable[..., str], client: bool
):
    """Three producers interleave; a third of the transactions is aborted, the last one at the
    very tail, so that the range ends with aborted records and a marker."""
    name = topic()
    senders = []
    for number in range(3):
        sender = producer(broker, **{"transactional.id": f"{name}-{number}-{client}"})
        sender.init_transactions()
        senders.append(sender)
    committed = set()
    for turn in range(30):
        sender = senders[turn % 3]
        sender.begin_transaction()
        for i in range(20):
            sender.produce(name, b"%d-%d" % (turn, i))
        sender.flush()
        if turn % 3 == 2 or turn == 29:
            sender.abort_transaction()
        else:
            sender.commit_transaction()
            committed |= {b"%d-%d" % (turn, i) for i in range(20)}
    end = 30 * 21
    records, invisible = read(broker, name, 0, end, client)
    assert set(records.values()) == committed
    assert records == topic_records(broker.bootstrap, name)
    assert invisible == end - len(committed)
    # Cut anywhere, the pieces hold the same: also a piece that is nothing but invisible.
    pieces = [read(broker, name, at, min(at + 13, end), client) for at in range(0, end, 13)]
    joined = {key: value for part, _ in pieces for key, value in part.items()}
    assert joined == records
    assert sum(hidden for _, hidden in pieces) == invisible


@WAYS
def test_a_topic_stamped_by_the_broker_has_the_brokers_time(
    broker: Broker, topic: Callable[..., str], client: bool
):
    name = topic(**{"message.timestamp.type": "LogAppendTime"})
    sender = producer(broker)
    sender.produce(name, b"v", timestamp=1_000)
    sender.flush()
    read(broker, name, 0, 1, client)  # asserts a time of this century


@WAYS
def test_offsets_deleted_by_retention_stop_the_reader(
    broker: Broker, topic: Callable[..., str], client: bool
):
    from confluent_kafka import TopicPartition

    name = topic()
    sender = producer(broker)
    for i in range(100):
        sender.produce(name, b"v%d" % i)
    sender.flush()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([TopicPartition(name, 0, 60)]).values():
        future.result()
    with pytest.raises(Expired, match=r"\[10, 60\)" if not client else "offset 10"):
        read(broker, name, 10, 100, client)
    assert len(read(broker, name, 60, 100, client)[0]) == 40


@WAYS
def test_a_compacted_topic_has_holes_that_are_counted(
    broker: Broker, topic: Callable[..., str], client: bool
):
    name = topic(
        **{
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.01",
            "min.compaction.lag.ms": "0",
        }
    )
    sender = producer(broker, **{"linger.ms": 0})
    total = 0
    # Until the cleaner has been at it: new records roll the segments it may clean.
    for _ in range(60):
        for i in range(50):
            sender.produce(name, b"v%d" % total, key=b"k%d" % (i % 5))
            total += 1
        sender.flush()
        if len(topic_records(broker.bootstrap, name)) < total - 100:
            break
    records, invisible = read(broker, name, 0, total, client)
    expected = topic_records(broker.bootstrap, name)
    assert len(expected) < total, "the cleaner has not run"
    # The cleaner may take more away between two looks; what is left must be the same.
    assert expected.items() <= records.items()
    assert invisible == total - len(records)


@WAYS
def test_a_broker_that_does_not_answer_is_named(client: bool):
    [port] = free_ports(1)
    kafka = {"bootstrap.servers": f"127.0.0.1:{port}"}
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        list(fetch(kafka, Range(Partition("t", 0), 0, 9), patience=1, client=client))


def test_connections_that_only_the_client_library_makes_are_left_to_it():
    kerberos = {"security.protocol": "SASL_SSL"}  # librdkafka's default mechanism
    assert connections.supports({"bootstrap.servers": "x"})
    assert connections.supports({"security.protocol": "PLAINTEXT"})
    assert connections.supports({"security.protocol": "ssl"})
    assert connections.supports({**kerberos, "sasl.mechanism": "SCRAM-SHA-512"})
    assert not connections.supports(kerberos)
    assert not connections.supports({"security.protocol": "ssl", "ssl.keystore.location": "x"})


def test_a_broken_connection_is_made_again_and_nothing_is_missing(
    broker: Broker, topic: Callable[..., str]
):
    name = topic()
    sender = producer(broker)
    for i in range(60_000):
        sender.produce(name, b"v%06d" % i * 10)
        sender.poll(0)
    sender.flush()
    kafka = {"bootstrap.servers": broker.bootstrap}
    offsets: list[int] = []
    for chunk in fetch(kafka, Range(Partition(name, 0), 0, 60_000), patience=30):
        offsets += chunk.open()[1].tolist()
        for connection, _ in connections._own.connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(2)
    assert offsets == list(range(60_000))


def test_a_topic_with_a_custom_size_limit_is_read_though_a_batch_is_larger_than_a_fetch(
    broker: Broker, topic: Callable[..., str]
):
    name = topic(**{"max.message.bytes": str(8 * 1024**2)})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    assert admin.describe_configs([ConfigResource(ResourceType.TOPIC, name)])
    sender = producer(broker, **{"message.max.bytes": 8 * 1024**2})
    large = b"x" * (5 * 1024**2)
    for _ in range(3):
        sender.produce(name, large)
    sender.flush()
    records, _ = read(broker, name, 0, 3, client=False)
    assert list(records.values()) == [large] * 3
