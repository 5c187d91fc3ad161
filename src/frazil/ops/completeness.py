"""`frazil completeness`: until when a stream is complete, and which partitions hold it back.

Reads the index only: no Kafka, and normally no Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.ledger.completeness import (
    COLUMNS,
    SECOND,
    CompletenessRules,
    Timestamp,
    end_of,
    recalled,
)
from frazil.ledger.entry import OperatorNote
from frazil.ledger.sink_state import index_entry
from frazil.offsets import BATCHES, Partition, Range
from frazil.render import Line

#: Seconds between two checks while waiting for an hour.
_EVERY = 1.0
#: Number of partitions shown one by one; JSON lists all.
_SHOWN = 20
_NO_LIMIT = 2**60
_LOST = ("topic", "partition", "start_offset", "end_offset", "lost", "operator_note")


@dataclass(frozen=True, slots=True)
class PartitionCompleteness:
    """The completeness of one partition."""

    partition: Partition
    #: every offset below it is committed
    offset: int
    #: the highest accepted event time; None: no record has one
    event_time: Timestamp | None
    #: the highest event time, if it is too far ahead of the clock to be accepted
    ignored_event_time: Timestamp | None
    #: `holds`: holds the stream back; `ahead`: of the partition that does; `idle`: does not count
    #: once it is read to its end; `silent`: without event time, counts until it is read to its end
    state: str
    #: seconds missing until the end of the hour
    missing_seconds: float = 0


@dataclass(frozen=True, slots=True)
class LostRange:
    """A range that an operator gave up; its event times are unknown."""

    JSON: ClassVar = "*range note"

    range: Range
    note: OperatorNote | None


@dataclass(frozen=True, slots=True)
class CompletenessReport:
    JSON: ClassVar = "sink index complete_until lateness hour hour_ends_at complete partitions lost"

    sink: str
    index: str
    #: seconds
    lateness: float
    complete_until: Timestamp | None
    hour: str | None
    #: end of the hour
    hour_ends_at: Timestamp | None
    partitions: tuple[PartitionCompleteness, ...]
    lost: tuple[LostRange, ...] = ()

    @property
    def complete(self) -> bool | None:
        """Whether the hour is complete; None if no hour was given."""
        if self.hour_ends_at is None:
            return None
        return self.complete_until is not None and self.complete_until >= self.hour_ends_at

    @property
    def exit_code(self) -> int:
        return 3 if self.complete is False else 0

    def lines(self) -> Iterator[Line]:
        until = "cannot say yet until when it is complete"
        if self.complete_until is not None:
            until = f"complete until {self.complete_until}"
        yield f"sink {self.sink}: {until}"
        if self.hour_ends_at is not None:
            verdict = "complete" if self.complete else "not complete yet"
            yield f"{self.hour}: {verdict}; it ends at {self.hour_ends_at}"
        held = sorted(
            (part for part in self.partitions if not self.complete and _matters(part)),
            key=lambda part: (part.event_time is not None, part.event_time or 0),
        )
        for part in held[:_SHOWN]:
            yield f"  {part.partition}: {_sentence(part)}"
        if len(held) > _SHOWN:
            yield f"  and {len(held) - _SHOWN} more; --json has all of them"
        for lost in self.lost[:_SHOWN]:
            yield f"  {lost.range}: accepted as lost; their event time is unknown ({lost.note})"


def wait_until_complete(
    config: Config, opened: Callable[[str], ReadOnlyTable | None], hour: str = "", wait: str = ""
) -> CompletenessReport:
    """The report once the hour is complete or `wait` has passed; without `wait`, at once."""
    if wait and not hour:
        raise ConfigError("cannot wait: no hour is given", hint="frazil completeness CONFIG HOUR")
    deadline = time.monotonic() + (duration(wait) if wait else 0.0)
    while True:
        report = completeness(config, opened, hour)
        left = deadline - time.monotonic()
        if report.complete is not False or left <= 0:
            return report
        time.sleep(min(_EVERY, left))


def completeness(
    config: Config, opened: Callable[[str], ReadOnlyTable | None], hour: str = ""
) -> CompletenessReport:
    end = end_of(hour) if hour else None
    sink, name = config.sink.id, config.index_table
    table = opened(name)
    if table is None:
        raise ConfigError(
            f"cannot say until when sink {sink} is complete: its index {name} does not exist"
        )
    entry = index_entry(table, sink)
    if entry is None:
        raise ConfigError(
            f"cannot say until when sink {sink} is complete: its index {name} has nothing of it"
        )
    rows = table.rows(table.having(list(dict.fromkeys([*COLUMNS, *_LOST]))), {"sink": [sink]})
    rules, apart = CompletenessRules.of(config.completeness), config.dead_letters.table
    marks, until = recalled(rows, rules, apart)
    wild, _ = recalled(rows, replace(rules, ahead=_NO_LIMIT), apart)
    judged = [p for p in entry.end.current if p != BATCHES]
    if BATCHES in entry.end and not any(p in marks for p in judged):
        judged = [BATCHES]
    stands = {p: marks[p].high - rules.lateness for p in judged if p in marks}
    newest = max((marks[p].since for p in stands), default=0)
    idle = {p for p in stands if rules.idle is not None and newest - marks[p].since >= rules.idle}
    lowest = min((stands[p] for p in stands if p not in idle), default=None)

    def judge(partition: Partition) -> PartitionCompleteness:
        high = marks[partition].high if partition in marks else None
        highest = wild[partition].high if partition in wild else None
        watermark = stands.get(partition)
        lacks = max(0, end - watermark) if end is not None and watermark is not None else 0
        state = "ahead"
        if watermark is None:
            state = "silent"
        elif partition in idle:
            state = "idle"
        elif watermark == lowest:
            state = "holds"
        return PartitionCompleteness(
            partition,
            entry.end[partition],
            Timestamp.of(high),
            Timestamp.of(highest) if highest != high else None,
            state,
            lacks / SECOND,
        )

    return CompletenessReport(
        sink,
        name,
        rules.lateness / SECOND,
        Timestamp.of(until),
        hour or None,
        Timestamp.of(end),
        tuple(map(judge, judged)),
        _given_up(rows),
    )


def _given_up(rows: pa.Table) -> tuple[LostRange, ...]:
    lost = rows.filter(pc.greater(rows["lost"], 0)).select(_LOST).to_pylist()
    return tuple(
        LostRange(
            Range(
                Partition(row["topic"], row["partition"]), row["start_offset"], row["end_offset"]
            ),
            OperatorNote.of(row["operator_note"]),
        )
        for row in lost
    )


def _matters(part: PartitionCompleteness) -> bool:
    return part.state != "ahead" or part.missing_seconds > 0 or part.ignored_event_time is not None


def _sentence(part: PartitionCompleteness) -> str:
    if part.event_time is None:
        text = (
            f"no record with an event time, up to offset {part.offset}; holds the others back "
            "as long as there is more to read"
        )
    else:
        text = f"at {part.event_time}"
        if part.state == "holds":
            text += ", holds the others back"
        if part.state == "idle":
            text += ", idle: does not hold the others back once it is read to its end"
        if part.missing_seconds:
            text += f", lacks {timedelta(seconds=part.missing_seconds)}"
    if part.ignored_event_time is not None:
        text += f"; {part.ignored_event_time} is too far ahead of the clock, and is ignored"
    return text
