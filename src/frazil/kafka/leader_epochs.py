"""The end of a partition's log in a leader epoch (KIP-320): shows a log that lost its tail and grew
again. Runs on the driver and in the planner's process."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, TopicPartition

from frazil.errors import Unavailable
from frazil.kafka.connection import (
    DEFAULTS,
    FIXED,
    Unsupported,
    client_settings,
    connection_to,
    drop_connection,
    leader_of,
    look_up_leaders,
    next_correlation,
    read_answer,
    supports,
)
from frazil.kafka.setting_names import refusals
from frazil.offsets import Partition


def epoch_ends(
    kafka: Mapping[str, str],
    epochs: Mapping[Partition, int],
    position: Mapping[Partition, int],
    *,
    client: bool = False,
    patience: float = 30.0,
) -> dict[Partition, int]:
    """The end of each partition's log in a leader epoch, as far as it is below the position.

    Over plain connections the broker is asked. Otherwise, and for brokers too old for that request,
    librdkafka asks, which compares before it fetches, if it can: given position and epoch, it
    returns a record, the end of the partition, or an error with the end that it found.
    """
    if not client and supports(kafka):
        with contextlib.suppress(Unsupported):
            return asked_epoch_ends(kafka, epochs)
    little = {
        "queued.min.messages": "1",
        "queued.max.messages.kbytes": "64",
        "fetch.message.max.bytes": "4096",
    }
    conf = {**DEFAULTS, **kafka, **little, **FIXED}
    conf.setdefault("group.id", "frazil-reader")
    with refusals(conf):
        consumer = Consumer(client_settings(conf))
    called = {(partition.kafka_topic, partition.number): partition for partition in epochs}
    ends: dict[Partition, int] = {}
    try:
        consumer.assign(
            [
                TopicPartition(
                    partition.kafka_topic, partition.number, position[partition], leader_epoch=epoch
                )
                for partition, epoch in epochs.items()
            ]
        )
        deadline = time.monotonic() + patience
        while len(ends) < len(epochs) and time.monotonic() < deadline:
            for message in consumer.consume(len(epochs), timeout=0.2):
                where = called.get((message.topic() or "", message.partition() or 0))
                error = message.error()
                if where is None:
                    continue
                if error is None or error.code() == KafkaError._PARTITION_EOF:
                    ends.setdefault(where, position[where])
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                    match = re.search(r"broker end offset is (-?\d+)", error.str())
                    ends[where] = int(match[1]) if match else -1
    finally:
        consumer.close()
    if len(ends) < len(epochs):
        missing = next(partition for partition in epochs if partition not in ends)
        raise Unavailable(
            f"cannot compare leader epochs of {missing}: no answer in {patience:.0f} s"
        )
    return ends


def asked_epoch_ends(
    kafka: Mapping[str, str], epochs: Mapping[Partition, int], tries: int = 3
) -> dict[Partition, int]:
    """The end of each partition's log in a leader epoch: behind the last record of that epoch, or
    of an earlier one. -1: the broker knows no such epoch. Raises `Unsupported` if a broker closes
    the connection."""
    ends: dict[Partition, int] = {}
    for attempt in range(tries):
        left = {partition: epoch for partition, epoch in epochs.items() if partition not in ends}
        try:
            if len({partition.kafka_topic for partition in left}) > 1:
                look_up_leaders(kafka, None)
            by_leader: dict[tuple[str, int], dict[Partition, int]] = {}
            for partition, epoch in left.items():
                by_leader.setdefault(leader_of(kafka, partition), {})[partition] = epoch
            for group in by_leader.values():
                ends.update(_epoch_ends(connection_to(kafka, next(iter(group))), group))
            return ends
        except (OSError, EOFError, struct.error) as error:
            for partition in left:
                drop_connection(kafka, partition)
            trouble, closed = str(error) or type(error).__name__, isinstance(error, EOFError)
        time.sleep(0.1 * 2**attempt)
    if closed:  # brokers do so for requests that they do not know
        raise Unsupported(trouble, -1)
    raise Unavailable(
        f"cannot ask {kafka['bootstrap.servers']} for the end of leader epochs of {len(epochs)} "
        f"partitions, {next(iter(epochs))} among them: {trouble}",
        hint="check that the brokers are up; the user needs the right to describe the topics",
    )


def _epoch_ends(connection: socket.socket, epochs: Mapping[Partition, int]) -> dict[Partition, int]:
    """OffsetForLeaderEpoch, version 3: supported by every broker from 2.3 on."""
    correlation = next_correlation()
    topics: dict[str, list[Partition]] = {}
    for partition in epochs:
        topics.setdefault(partition.kafka_topic, []).append(partition)
    body = struct.pack(">hhih", 23, 3, correlation, 6) + b"frazil"
    body += struct.pack(">ii", -1, len(topics))
    for topic, parts in topics.items():
        name = topic.encode()
        body += struct.pack(">h", len(name)) + name + struct.pack(">i", len(parts))
        body += b"".join(
            struct.pack(">iii", partition.number, -1, epochs[partition]) for partition in parts
        )
    connection.sendall(struct.pack(">i", len(body)) + body)
    answer = read_answer(connection)
    echoed, _, count = struct.unpack_from(">iii", answer)
    if echoed != correlation:
        raise OSError(f"expected the answer to request {correlation}, found {echoed}")
    called = {(partition.kafka_topic, partition.number): partition for partition in epochs}
    ends: dict[Partition, int] = {}
    at = 12
    for _ in range(count):
        size = struct.unpack_from(">h", answer, at)[0]
        topic = bytes(answer[at + 2 : at + 2 + size]).decode(errors="replace")
        parts_count = struct.unpack_from(">i", answer, at + 2 + size)[0]
        at += 6 + size
        for _ in range(parts_count):
            error, number, _, end = struct.unpack_from(">hiiq", answer, at)
            at += 18
            if error or (topic, number) not in called:
                raise OSError(f"{topic}[{number}]: error {error}")
            ends[called[topic, number]] = end
    if len(ends) != len(epochs):
        raise OSError(f"expected {len(epochs)} partitions, found {len(ends)}")
    return ends
