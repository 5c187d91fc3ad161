"""What `frazil completeness` says: until when a stream is complete, and what holds it back.

From the index alone: neither Kafka nor, as a rule, Spark is asked.
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

from frazil.commit.protocol import ledger_tag
from frazil.config.model import Config, duration
from frazil.errors import ConfigError
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.ledger import entry as ledger
from frazil.ledger.completeness import (
    COLUMNS,
    SECOND,
    CompletenessRules,
    end_of,
    recalled,
    shown,
)
from frazil.ledger.entry import OperatorNote
from frazil.offsets import BATCHES, Partition, Range

#: How often an hour that is waited for is looked at.
_EVERY = 1.0
#: So many partitions are shown one by one; JSON has all of them.
_SHOWN = 20
_NO_LIMIT = 2**60
_LOST = ("topic", "partition", "start_offset", "end_offset", "lost", "signed")


@dataclass(frozen=True, slots=True)
class TableCompleteness:
    """One partition."""

    partition: Partition
    #: everything below it is committed
    offset: int
    #: the highest event time that counts; None: there was none
    event_time: int | None
    #: the highest one there was, where it is not believed
    unbelieved: int | None
    #: `holds` the stream back; is `ahead` of the one that does; is `idle`, and does not count once
    #: it is read to its end; is `silent`, without an event time, and counts until it is
    state: str
    #: what it lacks until the end of the hour
    lacks: int = 0


@dataclass(frozen=True, slots=True)
class CompletenessReport:
    sink: str
    index: str
    lateness: int
    until: int | None
    hour: str
    #: where the hour ends
    end: int | None
    standings: tuple[TableCompleteness, ...]
    #: what was given up: of which hours it was, nobody knows
    lost: tuple[tuple[Range, OperatorNote | None], ...] = ()

    @property
    def complete(self) -> bool | None:
        """Is the hour? None where none was asked for."""
        if self.end is None:
            return None
        return self.until is not None and self.until >= self.end


def awaited(
    config: Config, opened: Callable[[str], ReadOnlyTable | None], hour: str = "", wait: str = ""
) -> CompletenessReport:
    """The answer as it is now, or as soon as the hour is complete, or when the time is up."""
    if wait and not hour:
        raise ConfigError("cannot wait: no hour is given", hint="frazil completeness CONFIG HOUR")
    deadline = time.monotonic() + (duration(wait) if wait else 0.0)
    while True:
        found = answer(config, opened, hour)
        left = deadline - time.monotonic()
        if found.complete is not False or left <= 0:
            return found
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
    entry = ledger.head(table.history("main"), sink, table.tagged(ledger_tag(sink))).entry
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
        here = stands.get(partition)
        lacks = max(0, end - here) if end is not None and here is not None else 0
        state = "ahead"
        if here is None:
            state = "silent"
        elif partition in idle:
            state = "idle"
        elif here == lowest:
            state = "holds"
        unbelieved = highest if highest != high else None
        return TableCompleteness(partition, entry.end[partition], high, unbelieved, state, lacks)

    return CompletenessReport(
        sink, name, rules.lateness, until, hour, end, tuple(map(standing, judged)), _given_up(rows)
    )


def _given_up(rows: pa.Table) -> tuple[tuple[Range, OperatorNote | None], ...]:
    if "lost" not in rows.column_names:  # an index of an older Frazil
        return ()
    found = rows.filter(pc.greater(rows["lost"], 0)).select(_LOST).to_pylist()
    return tuple(
        (
            Range(
                Partition(row["topic"], row["partition"]), row["start_offset"], row["end_offset"]
            ),
            OperatorNote.of(row["signed"]),
        )
        for row in found
    )


def values(found: CompletenessReport) -> dict[str, object]:
    return {
        "sink": found.sink,
        "index": found.index,
        "complete_until": shown(found.until),
        "lateness": found.lateness / SECOND,
        "hour": found.hour or None,
        "ends": shown(found.end),
        "complete": found.complete,
        "partitions": [
            {
                "topic": each.partition.topic,
                "partition": each.partition.number,
                "offset": each.offset,
                "event_time": shown(each.event_time),
                "unbelieved": shown(each.unbelieved),
                "state": each.state,
                "lacks": each.lacks / SECOND,
            }
            for each in found.standings
        ],
        "lost": [
            {
                "topic": gone.partition.topic,
                "partition": gone.partition.number,
                "start": gone.start,
                "end": gone.end,
                "note": asdict(note) if note else None,
            }
            for gone, note in found.lost
        ],
    }


def show(found: CompletenessReport, console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    until = "cannot say yet until when it is complete"
    if found.until is not None:
        until = f"complete until {shown(found.until)}"
    say(f"sink {found.sink}: {until}")
    if found.end is not None:
        verdict = "complete" if found.complete else "not complete yet"
        say(f"{found.hour}: {verdict}; it ends at {shown(found.end)}")
    held = sorted(
        (each for each in found.standings if _matters(each, found)),
        key=lambda each: (each.event_time is not None, each.event_time or 0),
    )
    for each in held[:_SHOWN]:
        say(f"  {each.partition}: {_sentence(each)}")
    if len(held) > _SHOWN:
        say(f"  and {len(held) - _SHOWN} more; --json has all of them")
    for gone, note in found.lost[:_SHOWN]:
        say(f"  {gone}: given up; of which hours they were is not known ({note})")


def _matters(each: TableCompleteness, found: CompletenessReport) -> bool:
    if found.complete:
        return False
    return each.state != "ahead" or each.lacks > 0 or each.unbelieved is not None


def _sentence(each: TableCompleteness) -> str:
    if each.event_time is None:
        text = (
            f"no record with an event time, up to offset {each.offset}; holds the others back "
            "as long as there is more to read"
        )
    else:
        text = f"at {shown(each.event_time)}"
        if each.state == "holds":
            text += ", holds the others back"
        if each.state == "idle":
            text += ", idle: does not hold the others back once it is read to its end"
        if each.lacks:
            text += f", lacks {timedelta(microseconds=each.lacks)}"
    if each.unbelieved is not None:
        text += f"; {shown(each.unbelieved)} is too far ahead of the clock to be believed"
    return text
