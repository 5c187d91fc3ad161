"""A range in, the broker's record batches out: Kafka's Fetch request, and nothing else of Kafka.

The client libraries hand over one object per record, which costs more than everything that is done
with it. Here the bytes stay as the broker sends them (`records` reads them). Who leads a partition
is asked of confluent-kafka; what this cannot do (TLS, SASL, old formats) raises `Unsupported`, and
`fetch` goes on with confluent-kafka from the same offset.

Promises the same as `fetch`: all committed records of the range, and the offsets in between proven
empty: they lie in batches that were seen, or between two of them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
import pyarrow as pa
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from frazil.core.errors import Expired, Unavailable
from frazil.core.offsets import Partition, Range
from frazil.ingest.avro import Datum
from frazil.ingest.records import Batch, Records

FETCH_BYTES = 2 * 1024**2
#: A batch that claims to unpack to more than this is not unpacked.
LARGEST_BATCH = 512 * 1024**2
_WAIT_MS = 500
_HEADER = struct.Struct(">qiibIhiqqqhii")  # of a record batch, all 61 bytes
_CRC_FROM = 21  # the checksum covers what is behind it

_OUT_OF_RANGE = 1
#: Errors of a broker that is moving, starting, or no longer the leader: ask again who is.
_PASSING = frozenset((-1, 3, 5, 6, 7, 8, 9, 13, 56, 74, 75, 78, 103))

_TRANSACTIONAL, _CONTROL, _APPEND_TIME = 1 << 4, 1 << 5, 1 << 3

_admins: dict[str, AdminClient] = {}


class _Own(threading.local):
    """Of one thread: an answer belongs to who asked, and a driver may run several sinks."""

    def __init__(self) -> None:
        self.leaders: dict[tuple[str, Partition], tuple[str, int]] = {}
        self.connections: dict[tuple[str, int], socket.socket] = {}


_own = _Own()


class Unsupported(Exception):
    """Not for this module; `at` is the offset to go on from with the client library."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at


def supports(kafka: Mapping[str, str]) -> bool:
    """Plain connections only; everything else is the client library's."""
    return kafka.get("security.protocol", "plaintext").lower() == "plaintext"


def fetch(kafka: Mapping[str, str], wanted: Range, *, patience: float) -> Iterator[Records]:
    """The record batches that hold `wanted`, in order; each `Records` covers its own offsets."""
    committed = kafka.get("isolation.level", "read_committed") == "read_committed"
    position = wanted.start
    deadline = time.monotonic() + patience
    trouble = "no data"
    pause = 0.05
    outstanding = False
    try:
        while position < wanted.end:
            try:
                if not outstanding:
                    _send(kafka, wanted.partition, position, committed)
                outstanding = False
                code, batches, aborted = _receive(kafka, wanted.partition)
                visible = list(_visible(batches, aborted, wanted, position))
            except (OSError, EOFError, struct.error) as error:  # a wrong checksum too: try again
                _forget(kafka, wanted.partition)
                code, batches, visible, trouble = -1, [], [], str(error) or type(error).__name__
            if code == _OUT_OF_RANGE:
                _require(kafka, wanted, position)
            elif code not in _PASSING and code != 0:
                raise Unavailable(f"cannot fetch {wanted}: the broker answers error {code}")
            if code != 0 or not batches or _behind(batches[-1]) <= position:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"cannot fetch {wanted}: {kafka['bootstrap.servers']} gives nothing at "
                        f"offset {position} for {patience:.0f} s ({trouble}, error {code})",
                        hint="check that the brokers are up and reachable from the executors",
                    )
                if code != 0:
                    _forget(kafka, wanted.partition)
                    time.sleep(pause)
                    pause = min(2.0, pause * 2)
                continue
            pause, deadline = 0.05, time.monotonic() + patience
            reached = min(wanted.end, _behind(batches[-1]))
            if reached < wanted.end:  # the broker prepares the next answer while we read this one
                with contextlib.suppress(OSError):
                    _send(kafka, wanted.partition, reached, committed)
                    outstanding = True
            yield Records(visible, position, reached)
            position = reached
    finally:
        if outstanding:
            _forget(kafka, wanted.partition)  # an answer nobody reads would be the next one's


def _behind(raw: memoryview) -> int:
    """The offset behind a batch."""
    header = _HEADER.unpack_from(raw)
    return int(header[0] + header[6] + 1)


def _visible(
    batches: list[memoryview], aborted: list[tuple[int, int]], wanted: Range, position: int
) -> Iterator[Batch]:
    """Without control batches and what aborted transactions wrote, as a committed reader sees it.

    `aborted` tells for this answer which producer's records are void from which offset on; the
    abort marker in the log ends that.
    """
    waiting = sorted(aborted, key=lambda each: each[1])
    void: set[int] = set()
    for raw in batches:
        (base, _, _, magic, crc, attributes, last_delta, first_ms, max_ms, producer, _, _,
         count) = _HEADER.unpack_from(raw)  # fmt: skip
        if magic != 2:
            raise Unsupported(f"message format {magic}", position)
        if google_crc32c.value(bytes(raw[_CRC_FROM:])) != crc:
            raise OSError(f"record batch at offset {base} has a wrong checksum")
        while waiting and waiting[0][1] <= base + last_delta:
            void.add(waiting.pop(0)[0])
        if attributes & _CONTROL:
            if _is_abort(raw[_HEADER.size :]):
                void.discard(producer)
            continue
        if attributes & _TRANSACTIONAL and producer in void:
            continue
        if base + last_delta < position or base >= wanted.end or not count:
            continue
        records = _unpacked(raw[_HEADER.size :], attributes & 7, position)
        append_ms = max_ms if attributes & _APPEND_TIME else None
        yield Batch(base, last_delta, count, first_ms, append_ms, records)


def _is_abort(control: memoryview) -> bool:
    record = Datum(bytes(control), 0)
    record.long()
    record.take(1)
    record.long()
    record.long()
    _, kind = struct.unpack_from(">hh", record.take(record.long()))
    return bool(kind == 0)


def _unpacked(records: memoryview, codec: int, position: int) -> memoryview | bytes:
    if codec == 0:
        return records
    if codec == 1:
        unpack = zlib.decompressobj(wbits=31)
        whole = unpack.decompress(records, LARGEST_BATCH)
        return _all(whole, not unpack.unconsumed_tail, position)
    if codec == 2:
        return _unsnapped(records, position)
    if codec in (3, 4):
        kind = "lz4" if codec == 3 else "zstd"
        with pa.CompressedInputStream(pa.BufferReader(records), kind) as stream:
            whole = stream.read(LARGEST_BATCH)
            return _all(whole, not stream.read(1), position)
    raise Unsupported(f"compression {codec}", position)


def _unsnapped(records: memoryview, position: int) -> bytes:
    """Snappy, bare or in the framing of Java's library."""
    data = bytes(records)
    chunks = [data]
    if data.startswith(b"\x82SNAPPY\x00"):
        chunks, at = [], 16
        while at < len(data):
            size = struct.unpack_from(">i", data, at)[0]
            chunks.append(data[at + 4 : at + 4 + size])
            at += 4 + size
    found = []
    for chunk in chunks:
        size = shift = 0
        for byte in chunk[:5]:  # its unpacked size, a plain varint
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        _all(b"", size <= LARGEST_BATCH, position)
        found.append(pa.decompress(chunk, size, codec="snappy", asbytes=True))
    return b"".join(found)


def _all(data: bytes, complete: bool, position: int) -> bytes:
    if not complete:
        raise Unavailable(f"cannot unpack the record batch at offset {position}: "
                          f"it is larger than {LARGEST_BATCH} bytes")  # fmt: skip
    return data


# ── the protocol ─────────────────────────────────────────────────────────────────────────────────


def _send(kafka: Mapping[str, str], partition: Partition, offset: int, committed: bool) -> None:
    """Fetch, version 11: what every broker from 2.3 on understands."""
    topic = partition.kafka_topic.encode()
    body = b"".join(
        (
            struct.pack(">hhih", 1, 11, 0, 6), b"frazil",
            struct.pack(">iiiibii", -1, _WAIT_MS, 1, FETCH_BYTES, int(committed), 0, -1),
            struct.pack(">ih", 1, len(topic)), topic,
            struct.pack(">iiiqqi", 1, partition.number, -1, offset, -1, FETCH_BYTES),
            struct.pack(">ih", 0, 0),
        )
    )  # fmt: skip
    _connection(kafka, partition).sendall(struct.pack(">i", len(body)) + body)


def _receive(
    kafka: Mapping[str, str], partition: Partition
) -> tuple[int, list[memoryview], list[tuple[int, int]]]:
    """Error code, whole record batches, and (producer, first offset) of aborted transactions."""
    answer = _read(_connection(kafka, partition))
    error, _, topics = struct.unpack_from(">hii", answer, 8)
    if error or topics != 1:
        return error or -1, [], []
    at = 18 + 2 + struct.unpack_from(">h", answer, 18)[0] + 4
    code, *_ = struct.unpack_from(">h", answer, at + 4)
    at += 4 + 2 + 8 + 8 + 8
    count = struct.unpack_from(">i", answer, at)[0]
    at += 4
    aborted = [struct.unpack_from(">qq", answer, at + 16 * i) for i in range(max(0, count))]
    at += 16 * max(0, count) + 4
    size = struct.unpack_from(">i", answer, at)[0]
    at += 4
    end = at + max(0, size)
    view = memoryview(answer)
    batches = []
    while at + _HEADER.size <= end:
        length = 12 + struct.unpack_from(">i", answer, at + 8)[0]
        if at + length > end:
            break  # the last one may be cut off
        batches.append(view[at : at + length])
        at += length
    return code, batches, aborted


def _read(connection: socket.socket) -> bytearray:
    size = struct.unpack(">i", _exactly(connection, 4))[0]
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


def _connection(kafka: Mapping[str, str], partition: Partition) -> socket.socket:
    address = _leader(kafka, partition)
    if address not in _own.connections:
        connection = socket.create_connection(address, timeout=30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _own.connections[address] = connection
    return _own.connections[address]


def _leader(kafka: Mapping[str, str], partition: Partition) -> tuple[str, int]:
    key = (kafka["bootstrap.servers"], partition)
    if key not in _own.leaders:
        try:
            found = _admin(kafka).list_topics(partition.kafka_topic, timeout=10)
            leader = found.topics[partition.kafka_topic].partitions[partition.number].leader
            broker = found.brokers[leader]
        except (KafkaException, KeyError) as error:
            raise OSError(f"no leader of {partition}: {error}") from None
        _own.leaders[key] = (str(broker.host), broker.port)
    return _own.leaders[key]


def _admin(kafka: Mapping[str, str]) -> AdminClient:
    server = kafka["bootstrap.servers"]
    if server not in _admins:
        _admins[server] = AdminClient({"log_level": "2", **kafka})
    return _admins[server]


def _forget(kafka: Mapping[str, str], partition: Partition) -> None:
    """Drop the connection, and the belief who leads the partition."""
    address = _own.leaders.pop((kafka["bootstrap.servers"], partition), None)
    connection = _own.connections.pop(address, None) if address else None
    if connection is not None:
        connection.close()


def _require(kafka: Mapping[str, str], wanted: Range, position: int) -> None:
    """Out of range: gone for good if the log begins later, else a leader that lags behind."""
    where: Any = TopicPartition(wanted.partition.kafka_topic, wanted.partition.number)
    try:
        earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        low = _admin(kafka).list_offsets({where: earliest})[where].result(10).offset
    except (KafkaException, TimeoutError):
        return
    if low > position:
        raise Expired(
            f"cannot fetch {wanted}: retention has deleted "
            f"{Range(wanted.partition, position, min(low, wanted.end))}",
            hint="nothing was skipped; `frazil status` shows what the topic still holds",
        )
