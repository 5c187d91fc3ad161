"""A range in, the bytes of its records out, in chunks. Runs on executors.

Promises: exactly the records of the range, in offset order, each once; and every offset of the
range is either a record or invisible (transaction markers, aborted and compacted records). An
offset counts as invisible only once something at or beyond it was seen. A position that retention
has deleted raises; it is not skipped.

Two ways to the same chunks: Kafka's own batches over a plain connection (`protocol`), and
confluent-kafka for everything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from frazil.arrow.avro_datum import UnreadableDatum
from frazil.errors import AccountingError, Expired, Unavailable, Undecodable
from frazil.kafka import protocol
from frazil.kafka.connection import DEFAULTS, FIXED, Unsupported, client_settings, supports
from frazil.kafka.record_batch import HEADERS, Longs, RawRecords, RecordBatches
from frazil.kafka.setting_names import refusals
from frazil.offsets import Partition, Range

#: Records and bytes per decoded chunk: large records make smaller chunks.
CHUNK_RECORDS = 50_000
CHUNK_BYTES = 32 * 1024**2
#: Records per call: small enough to stay in the CPU's cache between librdkafka and Python.
CALL_RECORDS = 5_000

_Headers = list[tuple[str, bytes | None]]

_consumers: dict[tuple[tuple[str, str], ...], Consumer] = {}


@dataclass(slots=True)
class FetchedChunk:
    """Records of one partition: all that the offsets `[start, end)` hold.

    Either Kafka's own batches, unopened, or values already extracted.
    """

    span: Range
    records: RecordBatches | None
    opened: RawRecords | None = None
    #: keys and headers are available
    envelope: bool = False
    #: the leader epoch in which the span's last offset was proven; -1: not known
    leader: int = -1

    def open(self, envelope: bool = False, schema_ids: bool = False) -> RawRecords:
        """Values, offsets, timestamps; with `envelope` keys and headers too, and with `schema_ids`
        if a record may have its schema id in a header."""
        assert self.envelope or not envelope, "the envelope was not asked of `fetch`"
        wanted = envelope or schema_ids
        if self.opened is None or (wanted and self.records and self.opened.keys is None):
            assert self.records is not None
            try:
                self.opened = self.records.open(envelope, schema_ids)
            except UnreadableDatum as error:
                at = self.span.partition
                raise Undecodable(f"cannot read {at}: {error.fact}", hint=_behind(at)) from None
        return self.opened if wanted else self.opened._replace(keys=None, headers=None)

    @property
    def broken(self) -> Mapping[int, str]:
        """Index of each opened record in an unreadable batch → the reason."""
        return self.records.broken if self.records is not None else {}


def fetch(
    kafka: Mapping[str, str],
    wanted: Range,
    *,
    patience: float,
    client: bool = False,
    envelope: bool = False,
) -> Iterator[FetchedChunk]:
    """All records of `wanted`. `patience`: seconds without any answer before it raises.

    `client` forces confluent-kafka, which is also used where `protocol` does not apply. With
    `envelope` the chunks can give keys and headers.
    """
    if not client and supports(kafka):
        try:
            for records in protocol.fetch(kafka, wanted, patience=patience):
                span = Range(wanted.partition, records.start, records.end)
                yield FetchedChunk(span, records, None, envelope, records.leader)
            return
        except Unsupported as where:
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
) -> Iterator[FetchedChunk]:
    position = wanted.start  # every offset below it is a record handed on, or counted invisible
    chunk = _ChunkBuilder(wanted.partition, wanted.start, envelope)
    at = wanted.partition
    call = CALL_RECORDS
    deadline = time.monotonic() + patience
    while position < wanted.end:
        # Waits for all of `call` or the time-out: short, because the tail of a range has fewer
        # records.
        messages = consumer.consume(call, timeout=0.05)
        if not messages:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"cannot fetch {wanted}: no record and no error from {server} in "
                    f"{patience:.0f} s at offset {position}; the range is retried",
                    hint="check that the brokers are up and reachable from the executors; if they "
                    "are, a record batch there may be broken in a way that librdkafka does not "
                    "report",
                )
            continue
        deadline = time.monotonic() + patience
        ended = -1
        if any(map(Message.error, messages)):
            messages, ended = _without_errors(messages, wanted, position)
        past = len(messages)
        while past and (messages[past - 1].offset() or 0) >= wanted.end:
            past -= 1
        beyond: int | None = None
        if past < len(messages):
            beyond = messages[past].leader_epoch()
            ended = wanted.end
            del messages[past:]
        if messages:
            origins = set(map(Message.topic, messages)), set(map(Message.partition, messages))
            if origins != ({at.kafka_topic}, {at.number}):
                raise AccountingError(f"cannot read {at}: found records of {origins}")
            chunk.add(messages)
            position = chunk.next
            call = max(1, min(CALL_RECORDS, int(CHUNK_BYTES / 4 / (chunk.mean_bytes + 1))))
        if ended >= wanted.end:
            position = chunk.close(wanted.end, beyond)
        if len(chunk) >= CHUNK_RECORDS or chunk.bytes >= CHUNK_BYTES or position >= wanted.end:
            yield chunk.done()
            chunk = _ChunkBuilder(wanted.partition, position, envelope)


class _ChunkBuilder:
    """A chunk while its records arrive."""

    def __init__(self, partition: Partition, start: int, envelope: bool) -> None:
        self.partition = partition
        self.start = self.next = start
        self.bytes = 0
        self.mean_bytes = 0.0
        self.leader: int | None = None
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
        offsets = np.fromiter(map(Message.offset, messages), np.int64, count)
        steps = np.diff(offsets, prepend=self.next - 1)
        if steps.min() < 1:  # librdkafka does not check the offsets of a batch
            at = int(np.argmax(steps < 1))
            raise _broken(
                self.partition,
                int(offsets[at]),
                f"expected offset {offsets[at] - steps[at] + 1} or later; its batch is broken",
            )
        self.next = int(offsets[-1]) + 1
        self.leader = messages[-1].leader_epoch()
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
        """Adds keys and headers; returns their bytes."""
        keys = list(map(Message.key, messages))
        headers = _headers(messages, self.partition)
        self._keys += keys
        self._headers += headers
        return sum(len(key) for key in keys if key) + sum(
            len(name) + len(value or b"") for pairs in headers for name, value in pairs
        )

    def close(self, end: int, beyond: int | None) -> int:
        """Nothing more comes before `end`: the rest of the range is invisible. `beyond`: the leader
        epoch of a record behind it; invisible offsets have none of their own."""
        if beyond is not None or self.next < end:
            self.leader = beyond
        self.next = end
        return end

    def done(self) -> FetchedChunk:
        empty = np.empty(0, np.int64)
        offsets = np.concatenate(self._offsets) if self._offsets else empty
        stamps = np.concatenate(self._timestamps) if self._timestamps else empty
        span = Range(self.partition, self.start, self.next)
        opened = RawRecords(self._values, offsets, stamps)
        if self._envelope:
            opened = opened._replace(
                keys=pa.array(self._keys, pa.large_binary()),
                headers=pa.array(self._headers, HEADERS),
            )
        return FetchedChunk(
            span, None, opened, self._envelope, -1 if self.leader is None else self.leader
        )


def _headers(messages: list[Message], partition: Partition) -> list[_Headers]:
    result: list[_Headers] = []
    try:
        # By `map`: for a key that is not UTF-8 confluent-kafka sets an error and returns a list all
        # the same, with a hole that kills the process when touched. A call written out in Python
        # may miss the error; `map` never does.
        for headers in map(Message.headers, messages):
            result.append(headers or [])  # type: ignore[arg-type]  # a dict is only ever sent
    except (SystemError, UnicodeDecodeError):
        raise Undecodable(
            f"cannot read the headers of {partition} offset "
            f"{messages[len(result)].offset()}: a header's key is not UTF-8, and "
            "confluent-kafka does not return it",
            hint="leave the column with the headers out, or read over a plain connection",
        ) from None
    return result


def _behind(at: Partition) -> str:
    return (
        "nothing was skipped; to continue after it: frazil offsets seek CONFIG --to "
        f"{at.kafka_topic}:{at.number}:OFFSET"
    )


def _broken(at: Partition, offset: int | None, fact: str) -> Undecodable:
    """A broken record batch. librdkafka reports none of its offsets, nor continues behind it."""
    return Undecodable(f"cannot read {at} at offset {offset}: {fact}", hint=_behind(at))


def _without_errors(
    messages: list[Message], wanted: Range, position: int
) -> tuple[list[Message], int]:
    """The records among `messages`, and an offset behind all of them if reported, else -1."""
    records, ended, partition = [], -1, wanted.partition
    for message in messages:
        error = message.error()
        if error is None:
            records.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            at = message.offset()
            if (message.topic(), message.partition()) == (partition.kafka_topic, partition.number):
                ended = max(ended, -1 if at is None else at)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise Expired(
                f"cannot fetch {wanted}: offset {position} is no longer in the topic; "
                "retention deleted it before it was read",
                hint="nothing was skipped; `frazil status` shows what the topic still holds",
            )
        elif error.code() in _BROKEN:
            at = message.offset()
            if at is None or at < wanted.end:
                raise _broken(partition, at, error.str())
            ended = max(ended, at)  # behind all that is wanted
        elif not error.retriable() and error.code() not in _PASSING:
            raise Unavailable(f"cannot fetch {wanted}: {error.str()}")
    return records, ended


#: A record batch that librdkafka cannot read, and requests again and again.
_BROKEN = (
    KafkaError._BAD_MSG,
    KafkaError._BAD_COMPRESSION,
    KafkaError._UNDERFLOW,
    KafkaError.INVALID_MSG,
)
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
        with refusals(kafka):
            _consumers[key] = Consumer(client_settings(conf))
    return _consumers[key]
