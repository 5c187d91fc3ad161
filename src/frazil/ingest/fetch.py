"""A range in, the bytes of its records out, in chunks. Runs on executors.

Promises: exactly the records of the range, in offset order, each once; and every offset of the
range is either a record or counted as invisible (transaction markers, aborted and compacted
records), which is known only when a record or an end-of-partition at or beyond the range's end was
seen, and never assumed. A position that retention has deleted raises; it is not jumped over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from frazil.core.errors import Expired, Miscount, Unavailable
from frazil.core.offsets import Partition, Range

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

_consumers: dict[tuple[tuple[str, str], ...], Consumer] = {}


@dataclass(frozen=True, slots=True)
class Chunk:
    partition: Partition
    values: list[bytes | None]
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    timestamps: np.ndarray[Any, np.dtype[np.int64]]  # milliseconds; -1 where the record has none
    invisible: int  # offsets without a record, before and between these records


def fetch(kafka: Mapping[str, str], wanted: Range, *, patience: float) -> Iterator[Chunk]:
    """All records of `wanted`. `patience`: seconds without any answer before it gives up."""
    if not len(wanted):
        return
    consumer = _consumer(kafka)
    topic, number = wanted.partition
    consumer.assign([TopicPartition(topic, number, wanted.start)])
    try:
        yield from _chunks(consumer, wanted, patience, kafka["bootstrap.servers"])
    finally:
        consumer.unassign()


def _chunks(consumer: Consumer, wanted: Range, patience: float, server: str) -> Iterator[Chunk]:
    position = wanted.start  # every offset below it is a record handed on, or counted invisible
    chunk = _Building(wanted.partition, wanted.start)
    call = CALL_RECORDS
    deadline = time.monotonic() + patience
    while position < wanted.end:
        messages = consumer.consume(call, timeout=1.0)
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
        while past and messages[past - 1].offset() >= wanted.end:
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
            chunk = _Building(wanted.partition, position)


class _Building:
    """A chunk while its records come in."""

    def __init__(self, partition: Partition, start: int) -> None:
        self.partition = partition
        self.next = start
        self.bytes = 0
        self.mean_bytes = 0.0
        self._invisible = 0
        self._values: list[bytes | None] = []
        self._offsets: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._timestamps: list[np.ndarray[Any, np.dtype[np.int64]]] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, messages: list[Message]) -> None:
        count = len(messages)
        first, last = messages[0].offset(), messages[-1].offset()
        assert first is not None and last is not None
        if first < self.next:
            raise Miscount(f"cannot read {self.partition}: expected offset {self.next} or later, "
                           f"found {first}")  # fmt: skip
        if last - first == count - 1:
            offsets = np.arange(first, last + 1, dtype=np.int64)
        else:
            offsets = np.fromiter(map(Message.offset, messages), np.int64, count)
        self._invisible += (last + 1 - self.next) - count
        self.next = last + 1
        self._offsets.append(offsets)
        self._timestamps.append(
            np.fromiter((stamp for _, stamp in map(Message.timestamp, messages)), np.int64, count)
        )
        values = list(map(Message.value, messages))
        self._values += values  # type: ignore[arg-type]
        sample = values[:: max(1, count // 32)]
        self.mean_bytes = sum(len(v) for v in sample if v is not None) / len(sample)
        self.bytes += int(self.mean_bytes * count)

    def close(self, end: int) -> int:
        """Nothing more comes before `end`: what is left of the range is invisible."""
        self._invisible += end - self.next
        self.next = end
        return end

    def done(self) -> Chunk:
        empty = np.empty(0, np.int64)
        return Chunk(
            self.partition,
            self._values,
            np.concatenate(self._offsets) if self._offsets else empty,
            np.concatenate(self._timestamps) if self._timestamps else empty,
            self._invisible,
        )


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
                hint="see `frazil status` for what the topic still holds",
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
