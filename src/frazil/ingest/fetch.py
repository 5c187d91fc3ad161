"""A range in, the bytes of its records out, in chunks. Runs on executors.

Promises: exactly the records of the range, in offset order, each once; and every offset of the
range is either a record or invisible (transaction markers, aborted and compacted records), which is
known only when something at or beyond it was seen, and never assumed. A position that retention has
deleted raises; it is not jumped over.

Two ways to the same chunks: Kafka's own batches over a plain connection (`wire`), and
confluent-kafka for everything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from frazil.core.errors import Expired, Miscount, Unavailable, Undecodable
from frazil.core.offsets import Partition, Range
from frazil.ingest import wire
from frazil.ingest.records import HEADERS, Longs, Opened, Records

#: Records per decoded chunk, and what one of them may weigh: large records make smaller chunks.
CHUNK_RECORDS = 50_000
CHUNK_BYTES = 32 * 1024**2
#: Records per call: small enough to stay in the CPU's cache between librdkafka and Python.
CALL_RECORDS = 5_000

#: Defaults under the user's own [kafka] settings.
DEFAULTS = {
    "isolation.level": "read_committed",
    "check.crcs": "true",
    # The data is known to be there: never wait for more of it, never pause a full queue for long.
    "fetch.wait.max.ms": "10",
    "fetch.queue.backoff.ms": "2",
    # What lies beyond the range's end is fetched for nothing: keep the queue short.
    "queued.min.messages": "30000",
    "queued.max.messages.kbytes": "16384",
    "fetch.message.max.bytes": "1048576",
    "log_level": "2",
}
#: What the promise needs, whatever the user's settings say.
FIXED = {
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
}

_Headers = list[tuple[str, bytes | None]]

_consumers: dict[tuple[tuple[str, str], ...], Consumer] = {}


class Chunk:
    """Records of one partition: all that the offsets `[start, end)` hold.

    Either Kafka's own batches, still closed, or values already taken out. `envelope` says whether
    keys and headers can be had.
    """

    def __init__(
        self,
        span: Range,
        records: Records | None,
        opened: Opened | None = None,
        envelope: bool = False,
    ) -> None:
        self.span = span
        self.records = records
        self._opened = opened
        self._envelope = envelope

    def open(self, envelope: bool = False) -> Opened:
        """Values, offsets, timestamps; with `envelope` keys and headers too."""
        assert self._envelope or not envelope, "the envelope was not asked of `fetch`"
        if self._opened is None or (envelope and self._opened.keys is None):
            assert self.records is not None
            self._opened = self.records.open(envelope)
        return self._opened if envelope else self._opened._replace(keys=None, headers=None)


def fetch(
    kafka: Mapping[str, str],
    wanted: Range,
    *,
    patience: float,
    client: bool = False,
    envelope: bool = False,
) -> Iterator[Chunk]:
    """All records of `wanted`. `patience`: seconds without any answer before it gives up.

    `client` insists on confluent-kafka, which is also what is used where `wire` cannot. With
    `envelope` the chunks may be asked for keys and headers.
    """
    if not client and wire.supports(kafka):
        try:
            for records in wire.fetch(kafka, wanted, patience=patience):
                span = Range(wanted.partition, records.start, records.end)
                yield Chunk(span, records, envelope=envelope)
            return
        except wire.Unsupported as where:
            wanted = Range(wanted.partition, where.at, wanted.end)
    if not len(wanted):
        return
    consumer = _consumer(kafka)
    at = wanted.partition
    consumer.assign([TopicPartition(at.kafka_topic, at.number, wanted.start)])
    try:
        yield from _chunks(consumer, wanted, patience, kafka["bootstrap.servers"], envelope)
    finally:
        consumer.unassign()


def _chunks(
    consumer: Consumer, wanted: Range, patience: float, server: str, envelope: bool
) -> Iterator[Chunk]:
    position = wanted.start  # every offset below it is a record handed on, or counted invisible
    chunk = _Building(wanted.partition, wanted.start, envelope)
    call = CALL_RECORDS
    deadline = time.monotonic() + patience
    while position < wanted.end:
        # Waits for all of `call` or the time-out: short, for a range's tail is shorter than that.
        messages = consumer.consume(call, timeout=0.05)
        if not messages:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"cannot fetch {wanted}: no answer from {server} in {patience:.0f} s at "
                    f"offset {position}; the range is read again",
                    hint="check that the brokers are up and reachable from the executors",
                )
            continue
        deadline = time.monotonic() + patience
        ended = -1
        if any(map(Message.error, messages)):
            messages, ended = _without_errors(messages, wanted, position)
        past = len(messages)
        while past and (messages[past - 1].offset() or 0) >= wanted.end:
            past -= 1
        if past < len(messages):
            ended = wanted.end
            del messages[past:]
        if messages:
            chunk.add(messages)
            position = chunk.next
            call = max(1, min(CALL_RECORDS, int(CHUNK_BYTES / 4 / (chunk.mean_bytes + 1))))
        if ended >= wanted.end:
            position = chunk.close(wanted.end)
        if len(chunk) >= CHUNK_RECORDS or chunk.bytes >= CHUNK_BYTES or position >= wanted.end:
            yield chunk.done()
            chunk = _Building(wanted.partition, position, envelope)


class _Building:
    """A chunk while its records come in."""

    def __init__(self, partition: Partition, start: int, envelope: bool) -> None:
        self.partition = partition
        self.start = self.next = start
        self.bytes = 0
        self.mean_bytes = 0.0
        self._values: list[bytes | None] = []
        self._offsets: list[Longs] = []
        self._timestamps: list[Longs] = []
        self._envelope = envelope
        self._keys: list[bytes | None] = []
        self._headers: list[_Headers] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, messages: list[Message]) -> None:
        count = len(messages)
        first, last = messages[0].offset() or 0, messages[-1].offset() or 0
        if first < self.next:
            raise Miscount(f"cannot read {self.partition}: expected offset {self.next} or later, "
                           f"found {first}")  # fmt: skip
        if last - first == count - 1:
            offsets = np.arange(first, last + 1, dtype=np.int64)
        else:
            offsets = np.fromiter(map(Message.offset, messages), np.int64, count)
        self.next = last + 1
        self._offsets.append(offsets)
        self._timestamps.append(
            np.fromiter((stamp for _, stamp in map(Message.timestamp, messages)), np.int64, count)
        )
        values = list(map(Message.value, messages))
        self._values += values
        sample = values[:: max(1, count // 32)]
        self.mean_bytes = sum(len(v) for v in sample if v is not None) / len(sample)
        if self._envelope:
            self.mean_bytes += self._add_envelope(messages) / count
        self.bytes += int(self.mean_bytes * count)

    def _add_envelope(self, messages: list[Message]) -> int:
        """Keys and headers; what they weigh."""
        keys = list(map(Message.key, messages))
        headers = _headers(messages, self.partition)
        self._keys += keys
        self._headers += headers
        return sum(len(key) for key in keys if key) + sum(
            len(name) + len(value or b"") for each in headers for name, value in each
        )

    def close(self, end: int) -> int:
        """Nothing more comes before `end`: what is left of the range is invisible."""
        self.next = end
        return end

    def done(self) -> Chunk:
        empty = np.empty(0, np.int64)
        offsets = np.concatenate(self._offsets) if self._offsets else empty
        stamps = np.concatenate(self._timestamps) if self._timestamps else empty
        span = Range(self.partition, self.start, self.next)
        opened = Opened(self._values, offsets, stamps)
        if self._envelope:
            opened = opened._replace(
                keys=pa.array(self._keys, pa.large_binary()),
                headers=pa.array(self._headers, HEADERS),
            )
        return Chunk(span, None, opened, self._envelope)


def _headers(messages: list[Message], partition: Partition) -> list[_Headers]:
    found: list[_Headers] = []
    try:
        # By `map`: for a key that is not UTF-8 confluent-kafka sets an error and returns a list all
        # the same, with a hole that kills the process when touched. A call written out in Python
        # may miss the error; `map` never does.
        for headers in map(Message.headers, messages):
            found.append(headers or [])  # type: ignore[arg-type]  # a dict is only ever sent
    except (SystemError, UnicodeDecodeError):
        raise Undecodable(
            f"cannot read the headers of {partition} offset {messages[len(found)].offset()}: "
            "a header's key is not UTF-8, and confluent-kafka does not hand it over",
            hint="leave the column with the headers out, or read over a plain connection",
        ) from None
    return found


def _without_errors(
    messages: list[Message], wanted: Range, position: int
) -> tuple[list[Message], int]:
    """The records among `messages`, and the offset of an end-of-partition event, or -1."""
    records, ended = [], -1
    for message in messages:
        error = message.error()
        if error is None:
            records.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            at = message.offset()
            ended = max(ended, -1 if at is None else at)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise Expired(
                f"cannot fetch {wanted}: offset {position} is no longer in the topic; "
                f"retention has overtaken the sink",
                hint="nothing was skipped; `frazil status` shows what the topic still holds",
            )
        elif not error.retriable() and error.code() not in _PASSING:
            raise Unavailable(f"cannot fetch {wanted}: {error.str()}")
    return records, ended


#: Errors that librdkafka reports as events while it goes on trying by itself.
_PASSING = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)


def _consumer(kafka: Mapping[str, str]) -> Consumer:
    """One consumer per worker process and cluster, kept warm from task to task."""
    conf = {**DEFAULTS, **kafka, **FIXED}
    conf.setdefault("group.id", "frazil-reader")  # librdkafka wants one; it is never joined
    key = tuple(sorted(conf.items()))
    if key not in _consumers:
        try:
            _consumers[key] = Consumer(conf)
        except KafkaException as error:
            raise Unavailable(f"cannot make a Kafka consumer: {error.args[0].str()}") from None
    return _consumers[key]
