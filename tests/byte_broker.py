"""A broker of bytes: one topic partition whose log is whatever a test puts into it.

Speaks as much of Kafka's protocol as both readers need (ApiVersions, Metadata, Fetch up to version
11), so that states which no real broker can be brought into are served to our own Fetch request and
to librdkafka alike.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c

TOPIC = "t"
_METADATA, _FETCH, _VERSIONS, _COORDINATOR = 3, 1, 18, 10


def zigzag(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def sized(data: bytes | None) -> bytes:
    return zigzag(-1) if data is None else zigzag(len(data)) + data


def record(
    delta: int,
    value: bytes | None,
    key: bytes | None = None,
    later: int = 0,
    headers: Sequence[tuple[bytes, bytes | None]] = (),
) -> bytes:
    body = b"\0" + zigzag(later) + zigzag(delta) + sized(key) + sized(value)
    body += zigzag(len(headers)) + b"".join(sized(name) + sized(text) for name, text in headers)
    return zigzag(len(body)) + body


def batch(
    base: int,
    records: bytes | Sequence[bytes],
    *,
    count: int | None = None,
    last_delta: int | None = None,
    attributes: int = 0,
    producer: int = -1,
    length: int | None = None,
    epoch: int = 0,
    stamp: int = 1_700_000_000_000,
) -> bytes:
    """A record batch (format v2) with the right checksum, whatever else it says."""
    given = [] if isinstance(records, bytes) else records
    body = records if isinstance(records, bytes) else b"".join(records)
    count = len(given) if count is None else count
    last_delta = count - 1 if last_delta is None else last_delta
    covered = struct.pack(">hiqqqhii", attributes, last_delta, stamp, stamp, producer, 0, 0, count)
    covered += body
    checked = struct.pack(">ibI", epoch, 2, google_crc32c.value(covered)) + covered
    return struct.pack(">qi", base, len(checked) if length is None else length) + checked


def values(base: int, count: int, **how: Any) -> bytes:
    """A plain batch of `count` records, `v<offset>` each."""
    return batch(base, [record(i, b"v%d" % (base + i)) for i in range(count)], **how)


def old(offset: int, value: bytes, magic: int = 1, key: bytes | None = None) -> bytes:
    """A message of the formats before record batches."""
    parts = b"".join(
        struct.pack(">i", -1) if field is None else struct.pack(">i", len(field)) + field
        for field in (key, value)
    )
    stamp = struct.pack(">q", 1_700_000_000_000) if magic else b""
    covered = struct.pack(">bb", magic, 0) + stamp + parts
    message = struct.pack(">I", zlib.crc32(covered)) + covered
    return struct.pack(">qi", offset, len(message)) + message


def compressed(codec: int, body: bytes) -> bytes:
    import pyarrow as pa

    if codec == 1:
        return gzip.compress(body)
    if codec == 2:
        packed: bytes = pa.compress(body, "snappy", asbytes=True)
        return packed
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {3: "lz4", 4: "zstd"}[codec]) as stream:
        stream.write(body)
    framed: bytes = sink.getvalue().to_pybytes()
    return framed


def _behind(batch: bytes) -> int:
    """The offset behind a record batch, or a message of an older format."""
    base: int = struct.unpack_from(">q", batch)[0]
    return base + 1 + (struct.unpack_from(">i", batch, 23)[0] if batch[16] == 2 else 0)


class ByteBroker:
    """`log(offset)` says which bytes a Fetch from there gets. `alter` may change a whole answer."""

    def __init__(self, *log: bytes, end: int = 0) -> None:
        self.log: Callable[[int], bytes] = lambda offset: b"".join(
            block for block in log if _behind(block) > offset
        )
        self.end = end
        self.aborted: list[tuple[int, int]] = []
        self.alter: Callable[[bytes], bytes] = lambda answer: answer
        self.topic, self.number = TOPIC, 0
        self.fetches = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._closed = False

    @property
    def kafka(self) -> dict[str, str]:
        return {"bootstrap.servers": f"127.0.0.1:{self._server.getsockname()[1]}"}

    def __enter__(self) -> ByteBroker:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for connection in (self._server, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                connection, _ = self._server.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, struct.error),
            connection.makefile("rb") as stream,
            connection,
        ):
            while head := stream.read(4):
                request = stream.read(struct.unpack(">i", head)[0])
                kind, version, correlation, name = struct.unpack_from(">hhih", request)
                body = request[10 + max(0, name) :]
                answer = struct.pack(">i", correlation) + self._answer(kind, version, body)
                if kind == _FETCH:
                    answer = self.alter(answer)
                connection.sendall(struct.pack(">i", len(answer)) + answer)

    def _answer(self, kind: int, version: int, body: bytes) -> bytes:
        if kind == _VERSIONS:
            known = (
                (0, 0, 7),
                (_FETCH, 0, 11),
                (2, 0, 2),
                (_COORDINATOR, 0, 2),
                (_METADATA, 0, 4),
                (_VERSIONS, 0, 0),
            )
            error = 0 if version == 0 else 35
            return struct.pack(">hi", error, len(known)) + b"".join(
                struct.pack(">hhh", *api) for api in known
            )
        if kind == _METADATA:
            return self._metadata()
        if kind == _COORDINATOR:  # there is none
            return struct.pack(">ihhihi", 0, 15, -1, -1, 0, -1)
        if kind != _FETCH:
            raise OSError("what it does not know, a broker answers by hanging up")
        self.fetches += 1
        at = 4 + 4 + 4 + 4 + 1 + (8 if version >= 7 else 0) + 4
        at += 2 + struct.unpack_from(">h", body, at)[0] + 4
        offset = struct.unpack_from(">q", body, at + 4 + (4 if version >= 9 else 0))[0]
        return self._fetched(version, offset)

    def _metadata(self) -> bytes:
        port = self._server.getsockname()[1]
        return b"".join(
            (
                struct.pack(">iiih", 0, 1, 0, 9),
                b"127.0.0.1",
                struct.pack(">ih", port, -1),
                struct.pack(">h", 5),
                b"bytes",
                struct.pack(">i", 0),
                struct.pack(">ihh", 1, 0, len(TOPIC)),
                TOPIC.encode(),
                b"\0",
                struct.pack(">ihiiiiii", 1, 0, 0, 0, 1, 0, 1, 0),
            )
        )

    def _fetched(self, version: int, offset: int) -> bytes:
        records = self.log(offset)
        name = self.topic.encode()
        return b"".join(
            (
                struct.pack(">i", 0),
                struct.pack(">hi", 0, 0) if version >= 7 else b"",
                struct.pack(">ih", 1, len(name)),
                name,
                struct.pack(">iihqq", 1, self.number, 0, self.end, self.end),
                struct.pack(">q", 0) if version >= 5 else b"",
                struct.pack(">i", len(self.aborted)),
                b"".join(struct.pack(">qq", *transaction) for transaction in self.aborted),
                struct.pack(">i", -1) if version >= 11 else b"",
                struct.pack(">i", len(records)),
                records,
            )
        )
