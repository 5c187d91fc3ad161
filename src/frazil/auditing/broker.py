"""Compares a sink's ledger with the offsets that Kafka has: the lag, and offsets that can never be
read. In: the newest entry of the index. Out: a line per partition, and findings. Runs on the driver
or in a command; it only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from frazil.auditing.report import Finding
from frazil.config.model import Config
from frazil.kafka.planner import Planner, TopicIdentity, kafka_only
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import BATCHES, Cut, Partition, Range


@dataclass(frozen=True, slots=True)
class BrokerOffsets:
    #: offsets and lag per partition
    lines: list[dict[str, Any]]
    findings: tuple[Finding, ...]
    #: offsets in Kafka not yet committed
    lag: int


def compare(
    config: Config, entry: LedgerEntry | None, began: Mapping[Partition, int]
) -> BrokerOffsets:
    """Ask Kafka. `entry`: the newest one of the index; `began`: the first offset of each partition
    that the sink read."""
    position = entry.end if entry else Cut()
    planner = Planner.of(config, entry, trusting=True)
    origin, partitions = planner.origin()
    findings = list(_changed_identity(entry, origin)) if entry else []
    lines = []
    marks = planner.watermarks(partitions)
    for partition in sorted({*partitions, *position.current} - {BATCHES}):
        low, end = marks.low.get(partition), marks.end.get(partition)
        offset = position.get(partition)
        if low is None or end is None:
            findings.append(
                Finding("unaccounted", f"{partition} no longer exists; it was read up to {offset}")
            )
            continue
        if offset is not None:
            findings += _unreadable(partition, offset, low, end)
        lines.append(_line(partition, offset, low, end, began.get(partition)))
    for lost in planner.replaced(kafka_only(position), marks):
        findings.append(
            Finding(
                "unaccounted",
                f"{lost} were read, but the topic was truncated and has other records there now",
                (lost,),
            )
        )
    return BrokerOffsets(lines, tuple(findings), sum(int(line["lag"]) for line in lines))


def _changed_identity(entry: LedgerEntry, origin: TopicIdentity) -> Iterator[Finding]:
    """Topics with another id than in the ledger, and another cluster."""
    ledger = TopicIdentity.of(entry)
    for topic, known in entry.topics.items():
        if ledger.differs(origin, topic):
            yield Finding(
                "unaccounted",
                f"topic {topic} was dropped and recreated; expected id {known}, found "
                f"{origin.topics[topic]}",
            )
    if entry.cluster and entry.cluster != origin.cluster:
        yield Finding(
            "unaccounted",
            f"another cluster answers; expected {entry.cluster}, found {origin.cluster}",
        )


def _unreadable(partition: Partition, offset: int, low: int, end: int) -> Iterator[Finding]:
    """A partition that was read up to `offset` and that has the offsets `[low, end)` now."""
    if offset < low:
        lost = Range(partition, offset, low)
        yield Finding("gap", f"retention has deleted {lost} before it was read", (lost,))
    if offset > end:
        yield Finding(
            "unaccounted",
            f"{partition} ends at {end}; it was read up to {offset}: it was truncated",
        )


def _line(
    partition: Partition, offset: int | None, low: int, end: int, began: int | None
) -> dict[str, Any]:
    return {
        "topic": partition.topic,
        "partition": partition.number,
        "earliest_offset": low,
        "latest_offset": end,
        "read_from": began,
        "position": offset,
        "lag": max(0, end - max(low, offset or 0)),
        "never_read": max(0, min(end, low if began is None else began) - low),
    }
