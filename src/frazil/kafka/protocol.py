"""A range in, the broker's record batches out: Kafka's Fetch request, and nothing else of Kafka.

The client libraries create one object per record, which costs more than all further processing.
Here the bytes stay as the broker sends them (`record_batch` reads them). Features that this module
lacks (old formats, Kerberos) raise `Unsupported`, and `fetch` continues with confluent-kafka from
the same offset.

Promises the same as `fetch`: all committed records of the range, and the offsets in between proven
empty: they lie in batches that were seen, or between two of them.

No byte of an answer is trusted. Correlation id, topic, partition, lengths and checksums must be
right, else the connection is dropped and the request repeated, within the reader's patience. A
batch with the right checksum that cannot be decompressed is marked (`RecordBatchHeader.broken`):
its records are rejected, or reading stops with topic, partition and offsets.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import google_crc32c
import pyarrow as pa
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from frazil.errors import Expired, Unavailable
from frazil.kafka.connection import (
    Unsupported,
    admin_client,
    connection_to,
    drop_connection,
    next_correlation,
    read_answer,
)
from frazil.kafka.record_batch import RecordBatches, RecordBatchHeader
from frazil.offsets import Partition, Range

FETCH_BYTES = 2 * 1024**2
#: A batch that claims to unpack to more than this is not unpacked.
LARGEST_BATCH = 512 * 1024**2
_WAIT_MS = 500
_HEADER = struct.Struct(">qiibIhiqqqhii")  # of a record batch, all 61 bytes
_MAGIC_AT = 16  # in every message format
_CRC_FROM = 21  # the checksum covers the bytes behind it
#: A message of the formats before record batches (v0, v1), without key and value.
_SMALLEST_OLD = 26

_OUT_OF_RANGE = 1
#: Errors of a broker that is moving, starting, or no longer the leader: look the leader up again.
_PASSING = frozenset((-1, 3, 5, 6, 7, 8, 9, 13, 56, 74, 75, 78, 103))

_TRANSACTIONAL, _CONTROL, _APPEND_TIME = 1 << 4, 1 << 5, 1 << 3


class _FetchAnswer(NamedTuple):
    """A request in progress: its answer comes on this connection, with this correlation id."""

    connection: socket.socket
    correlation: int


class _Unpackable(Exception):
    """A batch with the very bytes that the producer sent, which cannot be decompressed."""


def fetch(kafka: Mapping[str, str], wanted: Range, *, patience: float) -> Iterator[RecordBatches]:
    """The record batches that hold `wanted`, in order; each item covers its own offsets."""
    committed = kafka.get("isolation.level", "read_committed") == "read_committed"
    position = wanted.start
    deadline = time.monotonic() + patience
    trouble = "no data"
    pause = 0.05
    asked: _FetchAnswer | None = None
    try:
        while position < wanted.end:
            try:
                if asked is None:
                    asked = _send(kafka, wanted.partition, position, committed)
                request, asked = asked, None
                code, batches, aborted = _receive(request, wanted.partition)
                visible = list(_visible(batches, aborted, wanted, position))
            except (OSError, EOFError, struct.error) as error:  # malformed bytes, too
                drop_connection(kafka, wanted.partition)
                code, batches, visible, trouble = -1, [], [], str(error) or type(error).__name__
            if code == _OUT_OF_RANGE:
                _require(kafka, wanted, position)
            elif code not in _PASSING and code != 0:
                raise Unavailable(f"cannot fetch {wanted}: the broker answers error {code}")
            if code != 0 or not batches or _behind(batches[-1]) <= position:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"cannot fetch {wanted}: {kafka['bootstrap.servers']} returned no "
                        f"records at offset {position} for {patience:.0f} s ({trouble}, "
                        f"error {code})",
                        hint="check that the brokers are up and reachable from the executors",
                    )
                if code != 0:
                    drop_connection(kafka, wanted.partition)
                    time.sleep(pause)
                    pause = min(2.0, pause * 2)
                continue
            pause, deadline = 0.05, time.monotonic() + patience
            reached = min(wanted.end, _behind(batches[-1]))
            if reached < wanted.end:  # the broker prepares the next answer while we read this one
                with contextlib.suppress(OSError):
                    asked = _send(kafka, wanted.partition, reached, committed)
            yield RecordBatches(visible, position, reached, _HEADER.unpack_from(batches[-1])[2])
            position = reached
    finally:
        if asked is not None:
            drop_connection(kafka, wanted.partition)  # its answer is never read


def _behind(raw: memoryview) -> int:
    """The offset behind a batch."""
    header = _HEADER.unpack_from(raw)
    return int(header[0] + header[6] + 1)


def _visible(
    batches: list[memoryview], aborted: list[tuple[int, int]], wanted: Range, position: int
) -> Iterator[RecordBatchHeader]:
    """The batches that a committed reader sees: no control batches, no aborted transactions.

    `aborted` lists for this answer which producer's records are void from which offset on; the
    abort marker in the log ends that.
    """
    waiting = sorted(aborted, key=lambda transaction: transaction[1])
    void: set[int] = set()
    behind = -1
    for raw in batches:
        if raw[_MAGIC_AT] != 2:
            raise Unsupported(f"message format {raw[_MAGIC_AT]}", position)
        (base, _, _, _, crc, attributes, last_delta, first_ms, max_ms, producer, _, _, count) = (
            _HEADER.unpack_from(raw)
        )
        if google_crc32c.value(bytes(raw[_CRC_FROM:])) != crc:
            raise OSError(f"record batch at offset {base} has a wrong checksum")
        if base < behind or last_delta < 0:
            raise OSError(
                f"record batch [{base}, {base + last_delta + 1}) follows one that ends at {behind}"
            )
        behind = base + last_delta + 1
        while waiting and waiting[0][1] < behind:
            void.add(waiting.pop(0)[0])
        if attributes & _CONTROL:
            # A marker, or what the log cleaner left of one, ends its producer's transaction. The
            # next aborted one begins behind it, and is in `waiting`.
            void.discard(producer)
            continue
        if attributes & _TRANSACTIONAL and producer in void:
            continue
        if behind <= position or base >= wanted.end:
            continue
        if not count and len(raw) == _HEADER.size:
            continue  # the log cleaner removed its records
        append_ms = max_ms if attributes & _APPEND_TIME else None
        try:
            records, broken = _unpacked(raw[_HEADER.size :], attributes & 7, position), ""
        except _Unpackable as error:
            records, broken = b"", str(error)
        if not count:
            broken = broken or f"its header counts no record, and {len(records)} bytes are there"
        yield RecordBatchHeader(base, last_delta, count, first_ms, append_ms, records, broken)


def _unpacked(records: memoryview, codec: int, position: int) -> memoryview | bytes:
    if codec == 0:
        return records
    if codec > 4:
        raise Unsupported(f"compression {codec}", position)
    try:
        if codec == 1:
            return _unzipped(records)
        if codec == 2:
            return _unsnapped(records)
        with pa.CompressedInputStream(pa.BufferReader(records), _STREAMS[codec]) as stream:
            return _bounded(stream.read(LARGEST_BATCH + 1))
    except MemoryError:  # also Arrow's own: not a fault of the batch
        raise
    except (zlib.error, pa.ArrowException, OSError, struct.error, EOFError) as error:
        raise _Unpackable(f"its compressed bytes are broken: {error}") from None


_STREAMS = {3: "lz4", 4: "zstd"}


def _unzipped(records: memoryview) -> bytes:
    """Gzip, of one member or several."""
    unpacked, left = bytearray(), bytes(records)
    while left:
        unpack = zlib.decompressobj(wbits=31)
        unpacked += unpack.decompress(left, LARGEST_BATCH + 1 - len(unpacked))
        _bounded(unpacked)
        if not unpack.eof:
            raise EOFError("the gzip data is cut off")
        left = unpack.unused_data
    return bytes(unpacked)


def _unsnapped(records: memoryview) -> bytes:
    """Snappy, bare or in the framing of Java's library."""
    data = bytes(records)
    chunks = [data]
    if data.startswith(b"\x82SNAPPY\x00"):
        chunks, at = [], 16
        while at < len(data):
            size = struct.unpack_from(">I", data, at)[0]
            chunks.append(data[at + 4 : at + 4 + size])
            at += 4 + size
    unpacked = b""
    for chunk in chunks:
        size = shift = 0
        for byte in chunk[:5]:  # its unpacked size, a plain varint
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if size + len(unpacked) <= LARGEST_BATCH:
            unpacked += pa.decompress(chunk, size, codec="snappy", asbytes=True)
        else:
            raise _Unpackable(_TOO_LARGE)
    return unpacked


_TOO_LARGE = f"it unpacks to more than {LARGEST_BATCH // 1024**2} MiB"


def _bounded(data: bytes | bytearray) -> bytes:
    if len(data) > LARGEST_BATCH:
        raise _Unpackable(_TOO_LARGE)
    return data  # type: ignore[return-value]


# ── the protocol ─────────────────────────────────────────────────────────────────────────────────


def _send(
    kafka: Mapping[str, str], partition: Partition, offset: int, committed: bool
) -> _FetchAnswer:
    """Fetch, version 11: supported by every broker from 2.3 on."""
    topic = partition.kafka_topic.encode()
    asked = _FetchAnswer(connection_to(kafka, partition), next_correlation())
    body = b"".join(
        (
            struct.pack(">hhih", 1, 11, asked.correlation, 6),
            b"frazil",
            struct.pack(">iiiibii", -1, _WAIT_MS, 1, FETCH_BYTES, int(committed), 0, -1),
            struct.pack(">ih", 1, len(topic)),
            topic,
            struct.pack(">iiiqqi", 1, partition.number, -1, offset, -1, FETCH_BYTES),
            struct.pack(">ih", 0, 0),
        )
    )
    asked.connection.sendall(struct.pack(">i", len(body)) + body)
    return asked


def _receive(
    asked: _FetchAnswer, partition: Partition
) -> tuple[int, list[memoryview], list[tuple[int, int]]]:
    """Error code, whole record batches, and (producer, first offset) of aborted transactions."""
    answer = read_answer(asked.connection)
    correlation, _, error, _, topics = struct.unpack_from(">iihii", answer)
    if correlation != asked.correlation:
        raise OSError(f"expected the answer to request {asked.correlation}, found {correlation}")
    if error or topics != 1:
        return error or -1, [], []
    at = 20 + struct.unpack_from(">h", answer, 18)[0]
    parts, number, code = struct.unpack_from(">iih", answer, at)
    topic = bytes(answer[20:at]).decode(errors="replace")
    if (topic, parts, number) != (partition.kafka_topic, 1, partition.number):
        raise OSError(f"expected records of {partition}, found {topic}[{number}]")
    at += 4 + 4 + 2 + 8 + 8 + 8
    count = max(0, struct.unpack_from(">i", answer, at)[0])
    at += 4
    if at + 16 * count > len(answer):
        raise OSError(f"{count} aborted transactions in an answer of {len(answer)} bytes")
    aborted = [struct.unpack_from(">qq", answer, at + 16 * i) for i in range(count)]
    at += 16 * count + 4
    size = max(0, struct.unpack_from(">i", answer, at)[0])
    if at + 4 + size > len(answer):
        raise OSError(f"{size} bytes of records in an answer of {len(answer)} bytes")
    return code, _split(memoryview(answer)[at + 4 : at + 4 + size]), aborted


def _split(records: memoryview) -> list[memoryview]:
    """The batches, or the messages of older formats; the last one may be cut off."""
    batches: list[memoryview] = []
    at = 0
    while at + _MAGIC_AT < len(records):
        base, length = struct.unpack_from(">qi", records, at)
        length += 12
        smallest = _HEADER.size if records[at + _MAGIC_AT] == 2 else _SMALLEST_OLD
        if length < smallest:
            raise OSError(f"record batch at offset {base} says it has {length} bytes")
        if at + length > len(records):
            break
        batches.append(records[at : at + length])
        at += length
    if not batches and len(records):  # a broker sends the first one whole
        raise OSError(f"{len(records)} bytes of a record batch that is cut off")
    return batches


def _require(kafka: Mapping[str, str], wanted: Range, position: int) -> None:
    """Out of range: raises if the log begins later; otherwise the leader lags behind."""
    where: Any = TopicPartition(wanted.partition.kafka_topic, wanted.partition.number)
    try:
        earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        low = admin_client(kafka).list_offsets({where: earliest})[where].result(10).offset
    except (KafkaException, TimeoutError):
        return
    if low > position:
        raise Expired(
            f"cannot fetch {wanted}: retention has deleted "
            f"{Range(wanted.partition, position, min(low, wanted.end))}",
            hint="nothing was skipped; `frazil status` shows what the topic still holds",
        )
