"""`frazil completeness`: until when a stream is complete, and which partitions hold it back.

Reads the index only: no Kafka, and normally no Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.ledger.completeness import (
    COLUMNS,
    SECOND,
    CompletenessRules,
    end_of,
    recalled,
    shown,
)
from frazil.ledger.entry import OperatorNote
from frazil.ledger.sink_state import index_entry
from frazil.offsets import BATCHES, Partition, Range

#: Seconds between two checks while waiting for an hour.
_EVERY = 1.0
#: Number of partitions shown one by one; JSON lists all.
_SHOWN = 20
_NO_LIMIT = 2**60
_LOST = ("topic", "partition", "start_offset", "end_offset", "lost", "operator_note")


@dataclass(frozen=True, slots=True)
class TableCompleteness:
    """The completeness of one partition."""

    partition: Partition
    #: every offset below it is committed
    offset: int
    #: the highest accepted event time; None: no record has one
    event_time: int | None
    #: the highest event time, if it is too far ahead of the clock to be accepted
    unbelieved: int | None
    #: `holds`: holds the stream back; `ahead`: of the partition that does; `idle`: does not count
    #: once it is read to its end; `silent`: without event time, counts until it is read to its end
    state: str
    #: microseconds missing until the end of the hour
    lacks: int = 0


@dataclass(frozen=True, slots=True)
class CompletenessReport:
    sink: str
    index: str
    lateness: int
    until: int | None
    hour: str
    #: end of the hour
    end: int | None
    standings: tuple[TableCompleteness, ...]
    #: ranges that an operator gave up; their event times are unknown
    lost: tuple[tuple[Range, OperatorNote | None], ...] = ()

    @property
    def complete(self) -> bool | None:
        """Whether the hour is complete; None if no hour was given."""
        if self.end is None:
            return None
        return self.until is not None and self.until >= self.end


def awaited(
    config: Config, opened: Callable[[str], ReadOnlyTable | None], hour: str = "", wait: str = ""
) -> CompletenessReport:
    """The report once the hour is complete or `wait` has passed; without `wait`, at once."""
    if wait and not hour:
        raise ConfigError("cannot wait: no hour is given", hint="frazil completeness CONFIG HOUR")
    deadline = time.monotonic() + (duration(wait) if wait else 0.0)
    while True:
        report = answer(config, opened, hour)
        left = deadline - time.monotonic()
        if report.complete is not False or left <= 0:
            return report
        time.sleep(min(_EVERY, left))


def answer(
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

    def standing(partition: Partition) -> TableCompleteness:
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
        unbelieved = highest if highest != high else None
        return TableCompleteness(partition, entry.end[partition], high, unbelieved, state, lacks)

    return CompletenessReport(
        sink, name, rules.lateness, until, hour, end, tuple(map(standing, judged)), _given_up(rows)
    )


def _given_up(rows: pa.Table) -> tuple[tuple[Range, OperatorNote | None], ...]:
    lost = rows.filter(pc.greater(rows["lost"], 0)).select(_LOST).to_pylist()
    return tuple(
        (
            Range(
                Partition(row["topic"], row["partition"]), row["start_offset"], row["end_offset"]
            ),
            OperatorNote.of(row["operator_note"]),
        )
        for row in lost
    )


def values(report: CompletenessReport) -> dict[str, object]:
    return {
        "sink": report.sink,
        "index": report.index,
        "complete_until": shown(report.until),
        "lateness": report.lateness / SECOND,
        "hour": report.hour or None,
        "ends": shown(report.end),
        "complete": report.complete,
        "partitions": [
            {
                "topic": standing.partition.topic,
                "partition": standing.partition.number,
                "offset": standing.offset,
                "event_time": shown(standing.event_time),
                "unbelieved": shown(standing.unbelieved),
                "state": standing.state,
                "lacks": standing.lacks / SECOND,
            }
            for standing in report.standings
        ],
        "lost": [
            {
                "topic": gone.partition.topic,
                "partition": gone.partition.number,
                "start": gone.start,
                "end": gone.end,
                "note": asdict(note) if note else None,
            }
            for gone, note in report.lost
        ],
    }


def show(report: CompletenessReport, console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    until = "cannot say yet until when it is complete"
    if report.until is not None:
        until = f"complete until {shown(report.until)}"
    say(f"sink {report.sink}: {until}")
    if report.end is not None:
        verdict = "complete" if report.complete else "not complete yet"
        say(f"{report.hour}: {verdict}; it ends at {shown(report.end)}")
    held = sorted(
        (standing for standing in report.standings if _matters(standing, report)),
        key=lambda standing: (standing.event_time is not None, standing.event_time or 0),
    )
    for standing in held[:_SHOWN]:
        say(f"  {standing.partition}: {_sentence(standing)}")
    if len(held) > _SHOWN:
        say(f"  and {len(held) - _SHOWN} more; --json has all of them")
    for gone, note in report.lost[:_SHOWN]:
        say(f"  {gone}: given up; of which hours they were is not known ({note})")


def _matters(standing: TableCompleteness, report: CompletenessReport) -> bool:
    if report.complete:
        return False
    return standing.state != "ahead" or standing.lacks > 0 or standing.unbelieved is not None


def _sentence(standing: TableCompleteness) -> str:
    if standing.event_time is None:
        text = (
            f"no record with an event time, up to offset {standing.offset}; holds the others back "
            "as long as there is more to read"
        )
    else:
        text = f"at {shown(standing.event_time)}"
        if standing.state == "holds":
            text += ", holds the others back"
        if standing.state == "idle":
            text += ", idle: does not hold the others back once it is read to its end"
        if standing.lacks:
            text += f", lacks {timedelta(microseconds=standing.lacks)}"
    if standing.unbelieved is not None:
        text += f"; {shown(standing.unbelieved)} is too far ahead of the clock to be believed"
    return text
