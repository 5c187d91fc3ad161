"""What `frazil locate` says: which batch read an offset, which snapshots and files hold it.

From metadata alone: the index's rows, the ledgers of the tables where the index has none, and the
bounds of the live data files. Without Spark, as a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from frazil.config.model import Config
from frazil.errors import ConfigError
from frazil.iceberg.static_table import COLUMNS_PROPERTY, DataFile, ReadOnlyTable
from frazil.ledger.completeness import shown
from frazil.ledger.entry import (
    PREFIX,
    OperatorNote,
    OutcomeCounts,
    Snapshot,
    entries,
    head,
    parse,
)
from frazil.ledger.sink_state import REPLAY, STREAM, known_tables
from frazil.offsets import Partition, Range
from frazil.spark.open_table import Open

_COLUMNS = (
    "sink",
    "batch",
    "table_name",
    "topic",
    "partition",
    "start_offset",
    "end_offset",
    "written",
    "rejected",
    "skipped",
    "invisible",
    "merged",
    "lost",
    "signed",
    "event_time_low",
    "event_time_high",
    "epoch",
    "commit_id",
    "snapshot_id",
    "committed_at",
)
#: So many files are shown; JSON has all of them.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TableHit:
    """A table that a batch wrote to, as far as one offset is concerned."""

    table: str
    #: `yes`, `no`, `maybe`: does the table hold it; `merged`: in rows that stand for several
    holds: str
    why: str
    counts: OutcomeCounts
    #: the first snapshot that has the batch
    snapshot: int | None = None
    #: of an expired one: the oldest that is left and has it; None: none is left
    instead: int | None = None
    expired: bool = False
    files: tuple[str, ...] = ()
    #: microseconds: a record may claim a year that Python's dates do not reach
    event_time: tuple[int | None, int | None] = (None, None)
    sql: str = ""


@dataclass(frozen=True, slots=True)
class LocatedBatch:
    """The batch that read the offset; there is one, unless something is wrong or sinks are many."""

    sink: str
    number: int
    commit_id: str
    epoch: int
    range: Range
    #: of all offsets of the range, whichever table they went to; None: not told
    counts: OutcomeCounts | None
    committed_at: int | None
    places: tuple[TableHit, ...]
    #: `index`, or `ledger` where the index has no row of it (yet)
    told_by: str = "index"
    #: who gave the range up, when and why
    note: OperatorNote | None = None


@dataclass(frozen=True, slots=True)
class LocateReport:
    partition: Partition
    offset: int
    batches: tuple[LocatedBatch, ...]
    #: why there is none
    said: str = ""
    #: other names of Kafka's topic, which was dropped and made again: their offsets are others
    also: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        return any(place.holds != "no" for batch in self.batches for place in batch.places)


@dataclass(frozen=True, slots=True)
class _Where:
    """What is asked, and of whom."""

    partition: Partition
    offset: int
    catalog: str
    opened: Open
    branches: Mapping[str, str] = field(default_factory=dict)

    def branch(self, table: str) -> str:
        return branch_of(self.branches, table)


def branch_of(branches: Mapping[str, str], table: str) -> str:
    """A table's own, or its template's; `branches` has those that the config names."""
    for name, branch in branches.items():
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(name)), table):
            return branch
    return "main"


def of_sink(
    config: Config, opened: Open, where: Partition, offset: int, table: str = ""
) -> LocateReport:
    """In all tables of the sink, or in one of them."""
    opened = cache(opened)  # one moment for all questions
    index = opened(config.index_table)
    if index is None:
        raise ConfigError(
            f"cannot locate {where} at {offset}: the index {config.index_table} does not exist"
        )
    names = [*known_tables(index, config.sink.id)]
    if table and table not in names:
        raise ConfigError(
            f"cannot locate {where} at {offset} in table {table}: sink "
            f"{config.sink.id} fills {', '.join(names) or 'none'}"
        )
    branches = {each.name: each.branch for each in config.tables}
    asked = _Where(where, offset, config.catalog.name, opened, branches)
    found = _answer(asked, index, [config.sink.id], [table] if table else names)
    return replace(found, also=_also(index, config.sink.id, where))


def _also(index: ReadOnlyTable, sink: str, where: Partition) -> tuple[str, ...]:
    entry = head(index.history("main"), sink, index.tagged(f"frazil/{sink}")).entry
    known = entry.end if entry else ()
    same = {p.topic for p in known if p.kafka_topic == where.kafka_topic}
    return tuple(sorted(same - {where.topic}))


def of_table(
    catalog: str, opened: Open, name: str, where: Partition, offset: int, branch: str = "main"
) -> LocateReport:
    """In one table, whoever wrote it; its ledger names the index."""
    opened = cache(opened)
    table = opened(name)
    if table is None:
        raise ConfigError(f"cannot locate {where} at {offset}: table {name} does not exist")
    indexes: dict[str, list[str]] = {}
    for snapshot in table.history(branch):
        sink, said = (snapshot.summary.get(PREFIX + key, "") for key in ("sink", "index"))
        if sink and sink not in (each for sinks in indexes.values() for each in sinks):
            indexes.setdefault(said, []).append(sink)
    if not indexes:
        raise ConfigError(
            f"cannot locate {where} at {offset}: no snapshot of table {name} was written by Frazil"
        )
    asked = _Where(where, offset, catalog, opened, {name: branch})
    found = [
        _answer(asked, opened(index) if index else None, sinks, [name])
        for index, sinks in indexes.items()
    ]
    batches = tuple(batch for each in found for batch in each.batches)
    return LocateReport(where, offset, batches, "" if batches else found[0].said)


def _answer(
    asked: _Where, index: ReadOnlyTable | None, sinks: Sequence[str], tables: Sequence[str]
) -> LocateReport:
    where, offset = asked.partition, asked.offset
    here, lowest = _rows(index, sinks, where, offset) if index is not None else ([], None)
    batches = [
        _of_index(asked, [row for row in here if _key(row) == key], tables)
        for key in dict.fromkeys(map(_key, here))
    ]
    told = {batch.sink for batch in batches}
    # Of what lies before all rows no ledger knows more.
    for sink in sinks if lowest is None or offset >= lowest else ():
        if sink not in told:
            batches += _of_ledger(asked, sink, tables)
    if batches:
        return LocateReport(where, offset, tuple(batches))
    return LocateReport(where, offset, (), _outside(asked, index, sinks, lowest))


def _rows(
    index: ReadOnlyTable, sinks: Sequence[str], where: Partition, offset: int
) -> tuple[list[dict[str, Any]], int | None]:
    """The rows whose range has the offset, and the lowest offset that any row of the partition has;
    None: there is no row."""
    found = index.rows(index.having(_COLUMNS), {"sink": sinks, "topic": [where.topic]})
    found = found.filter(pc.equal(found["partition"], where.number))
    starts, ends = found["start_offset"], found["end_offset"]
    here = found.filter(pc.and_(pc.less_equal(starts, offset), pc.greater(ends, offset)))
    for at, column in enumerate(here.schema):
        if pa.types.is_timestamp(column.type):
            here = here.set_column(at, column.name, here.column(at).cast(pa.int64()))
    return sorted(here.to_pylist(), key=_key), pc.min(starts).as_py()


def _key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["sink"], row["batch"], row["commit_id"]


def _counts(row: Mapping[str, Any]) -> OutcomeCounts:
    return OutcomeCounts(
        row["written"],
        row["rejected"],
        row["skipped"],
        row["invisible"],
        row["merged"] or 0,
        lost=row.get("lost") or 0,
    )


def _of_index(asked: _Where, rows: Sequence[dict[str, Any]], tables: Sequence[str]) -> LocatedBatch:
    first = rows[0]
    whole = [row for row in rows if row["table_name"] == STREAM]
    mine = [row for row in rows if row["table_name"] in tables]
    total = _counts(whole[0]) if whole else _counts(mine[0]) if len(mine) == 1 else None
    places = [
        _place(
            asked,
            row["sink"],
            row["table_name"],
            _counts(row),
            row["snapshot_id"],
            (row["event_time_low"], row["event_time_high"]),
        )
        for row in mine
    ]
    told = {place.table for place in places}
    for name in (each for each in tables if each not in told and total and whole):
        # Nothing of the batch was for it; but letters may have been replayed into it.
        found = _place(asked, first["sink"], name, OutcomeCounts(), None, (None, None))
        places += [found] if found.holds != "no" else []
    return LocatedBatch(
        sink=first["sink"],
        number=first["batch"],
        commit_id=first["commit_id"],
        epoch=first["epoch"],
        range=Range(asked.partition, first["start_offset"], first["end_offset"]),
        counts=total,
        committed_at=first["committed_at"],
        places=tuple(places),
        note=OperatorNote.of(first.get("signed")),
    )


def _of_ledger(asked: _Where, sink: str, tables: Sequence[str]) -> Iterator[LocatedBatch]:
    """Batches that the index does not tell of, by commit id."""
    found: dict[str, LocatedBatch] = {}
    for name in tables:
        table = asked.opened(name)
        if table is None:
            continue
        for entry, snapshot in entries(table.history(asked.branch(name)), sink):
            begin = entry.begin.get(asked.partition, 0)
            end = entry.end.get(asked.partition, 0)
            if end <= asked.offset:
                break  # older ones end before it, too
            if begin > asked.offset:
                continue
            counts = entry.counts(asked.partition)
            span = entry.watermark or (None, None)
            place = _place(asked, sink, name, counts, snapshot.id, span)
            key = entry.commit_ids[-1]
            places = found[key].places if key in found else ()
            found[key] = LocatedBatch(
                sink,
                entry.batches[1],
                key,
                entry.epoch,
                Range(asked.partition, begin, end),
                None,
                snapshot.timestamp_ms * 1000,
                (*places, place),
                "ledger",
                OperatorNote.of(entry.note),
            )
    yield from found.values()


def _place(
    asked: _Where,
    sink: str,
    name: str,
    counts: OutcomeCounts,
    snapshot: int | None,
    event_time: tuple[int | None, int | None],
) -> TableHit:
    table, where, offset = asked.opened(name), asked.partition, asked.offset
    if table is None:
        return TableHit(
            name, "no", "the table is gone", counts, snapshot, None, True, (), event_time
        )
    branch = asked.branch(name)
    files, deletes = table.files(branch)
    near = [
        file
        for file in files
        if file.partition in (where, None)
        and file.rows > file.nulls
        and (file.offsets is None or file.offsets[0] <= offset <= file.offsets[1])
    ]
    holds, why = _judged(sink, counts, near, where, deletes)
    history = list(table.history(branch))
    there = snapshot is None or any(each.id == snapshot for each in history)
    instead = None if there else _oldest(history, sink, where, offset)
    version = snapshot if there else instead
    return TableHit(
        name,
        holds,
        why,
        counts,
        snapshot,
        instead,
        not there,
        tuple(file.path for file in near) if holds != "no" else (),
        event_time,
        _sql(asked, table, version, holds),
    )


def _judged(
    sink: str, counts: OutcomeCounts, near: Sequence[DataFile], where: Partition, deletes: int
) -> tuple[str, str]:
    """Does the table hold the offset, as far as counts and bounds tell?"""
    if counts.merged:
        return "merged", f"{counts.merged} offsets of the batch became rows that stand for several"
    every = counts.written == counts.offsets > 0
    if not near:
        if not counts.written:
            return "no", _fates(counts)
        return "no", f"{_fates(counts)}, and no live file's bounds hold it"
    if deletes:
        return "maybe", f"{_fates(counts)}; {deletes} delete files may hide it"
    for file in near:
        if file.partition == where and file.offsets is not None:
            low, high = file.offsets
            if file.rows - file.nulls == high - low + 1:
                return "yes", "a live file has every offset of its bounds"
    if every:
        return "yes", "all offsets of the batch were written"
    if not counts.written:
        if any(f"/frazil-{sink}{REPLAY}-" in file.path for file in near):
            return "maybe", f"{_fates(counts)}; but letters were replayed around it"
        return "no", _fates(counts)
    return "maybe", _fates(counts)


def _fates(counts: OutcomeCounts) -> str:
    names = ("written", "rejected", "skipped", "invisible", "elsewhere", "lost")
    told = [f"{number} {name}" for name in names if (number := getattr(counts, name))]
    return f"of {counts.offsets} offsets {', '.join(told)}" if told else "nothing was for it"


def _oldest(history: Sequence[Snapshot], sink: str, where: Partition, offset: int) -> int | None:
    """The oldest snapshot left that has the offset; they come newest first."""
    found, last = None, None
    for snapshot in history:
        last = snapshot.id
        entry = parse(snapshot.summary)
        if entry is None or entry.sink != sink:
            continue
        if entry.end.get(where, 0) <= offset:
            return found  # None: rolled back behind it
        found = snapshot.id
    return last  # all that came before was expired


def _sql(asked: _Where, table: ReadOnlyTable, version: int | None, holds: str) -> str:
    if version is None or holds == "no":
        return ""
    said = table.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset").split(",")
    text = f"SELECT * FROM {asked.catalog}.{table.name} VERSION AS OF {version}"
    if holds == "merged":
        return text
    topic = asked.partition.topic.replace("'", "\\'")
    return (
        f"{text} WHERE `{said[0]}` = '{topic}' AND `{said[1]}` = {asked.partition.number} "
        f"AND `{said[2]}` = {asked.offset}"
    )


def _outside(
    asked: _Where, index: ReadOnlyTable | None, sinks: Iterable[str], lowest: int | None
) -> str:
    """Why no batch has it."""
    where, offset = asked.partition, asked.offset
    if index is None:
        return f"no ledger entry that is left tells of {where} at {offset}, and there is no index"
    positions = [
        (sink, entry.end)
        for sink in sinks
        if (entry := head(index.history("main"), sink, index.tagged(f"frazil/{sink}")).entry)
    ]
    knowing = [(sink, end) for sink, end in positions if where in end]
    if not knowing:
        known = sorted({str(key) for _, end in positions for key in end})
        return f"no sink reads {where}; read are {', '.join(known) or 'none'}"
    sink, end = knowing[0]
    if offset >= end[where]:
        return f"not read yet: sink {sink} stands at {end[where]}"
    if lowest is not None and offset < lowest:
        return f"before the beginning: sink {sink} began at {lowest}"
    return (
        f"no batch of the index has it, and sink {sink} stands at {end[where]}: see `frazil audit`"
    )


def values(answer: LocateReport) -> dict[str, Any]:
    """For `--json`."""
    return {
        "topic": answer.partition.topic,
        "partition": answer.partition.number,
        "offset": answer.offset,
        "held": answer.held,
        "said": answer.said,
        "also": list(answer.also),
        "batches": [
            {
                "sink": batch.sink,
                "batch": batch.number,
                "commit_id": batch.commit_id,
                "epoch": batch.epoch,
                "start": batch.range.start,
                "end": batch.range.end,
                "committed_at": shown(batch.committed_at),
                "told_by": batch.told_by,
                "note": asdict(batch.note) if batch.note else None,
                **({} if batch.counts is None else {"counts": _told(batch.counts)}),
                "tables": [
                    {
                        "table": place.table,
                        "holds": place.holds,
                        "why": place.why,
                        "counts": _told(place.counts),
                        "snapshot": place.snapshot,
                        "expired": place.expired,
                        "oldest_left": place.instead,
                        "files": list(place.files),
                        "event_time_low": shown(place.event_time[0]),
                        "event_time_high": shown(place.event_time[1]),
                        "sql": place.sql,
                    }
                    for place in batch.places
                ],
            }
            for batch in answer.batches
        ],
    }


def _told(counts: OutcomeCounts) -> dict[str, int]:
    names = ("written", "rejected", "skipped", "invisible", "merged", "elsewhere", "lost")
    return {name: getattr(counts, name) for name in names}


def show(answer: LocateReport, console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if answer.said:
        say(f"{answer.partition} at {answer.offset}: {answer.said}")
    if answer.also:
        say(f"the topic was made again; the same offset is another one of {', '.join(answer.also)}")
    for batch in answer.batches:
        by = "" if batch.told_by == "index" else " (by the ledger; not in the index)"
        say(
            f"{answer.partition} at {answer.offset}: batch {batch.number} of sink {batch.sink}, "
            f"{batch.range}, epoch {batch.epoch}, commit {batch.commit_id}, "
            f"{shown(batch.committed_at)}{by}"
        )
        if batch.counts is not None:
            say(f"  {_fates(batch.counts)}")
        if batch.note is not None:
            say(f"  {batch.note}")
        for place in batch.places:
            _show_place(place, say)
        if not any(place.holds != "no" for place in batch.places):
            say("  no table holds it")


def _show_place(place: TableHit, say: Any) -> None:
    say(f"  {place.table}: {place.holds}: {place.why}")
    low, high = place.event_time
    if low is not None:
        say(f"    event time {shown(low)} to {shown(high)}")
    if place.expired:
        left = (
            f"the oldest one left that has it is {place.instead}"
            if place.instead
            else "none is left"
        )
        say(f"    first in snapshot {place.snapshot}, which was expired; {left}")
    elif place.snapshot is not None:
        say(f"    first in snapshot {place.snapshot}")
    for path in place.files[:_SHOWN]:
        say(f"    {path}")
    if len(place.files) > _SHOWN:
        say(f"    and {len(place.files) - _SHOWN} files more whose bounds hold it")
    if place.sql:
        say(f"    {place.sql}")
