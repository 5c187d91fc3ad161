"""`frazil locate`: the batch that read an offset, and the snapshots and files that contain it.

Reads metadata only: the index rows, the ledgers of the tables where the index has no row, and the
bounds of the live data files. Normally without Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from frazil.accounting import OutcomeCounts
from frazil.config.model import Config
from frazil.errors import ConfigError
from frazil.iceberg.static_table import COLUMNS_PROPERTY, ReadOnlyTable
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger.completeness import Timestamp
from frazil.ledger.entry import PREFIX, OperatorNote, entries, own_entry
from frazil.ledger.range_columns import INDEXED_OUTCOMES, RANGE_COLUMNS
from frazil.ledger.sink_state import REPLAY, STREAM, index_entry, known_tables
from frazil.offsets import Partition, Range
from frazil.render import Line
from frazil.spark.open_table import Open

_COLUMNS = (
    *("sink", *RANGE_COLUMNS, *INDEXED_OUTCOMES, "operator_note", "event_time_low"),
    *("event_time_high", "epoch", "commit_id", "snapshot_id", "committed_at"),
)
#: Number of files shown; JSON lists all.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TableHit:
    """Whether and where one table contains the offset."""

    table: str
    #: `yes`, `no`, `maybe`, or `merged`: in rows that stand for several offsets
    contains: str
    reason: str
    counts: OutcomeCounts
    #: the first snapshot that contains the batch
    snapshot: int | None = None
    expired: bool = False
    #: if it is expired: the oldest remaining snapshot with the offset; None: there is none
    oldest_snapshot: int | None = None
    files: tuple[str, ...] = ()
    event_time_low: Timestamp | None = None
    event_time_high: Timestamp | None = None
    sql: str = ""

    def lines(self) -> Iterator[str]:
        yield f"  {self.table}: {self.contains}: {self.reason}"
        if self.event_time_low is not None:
            yield f"    event time {self.event_time_low} to {self.event_time_high}"
        if self.expired:
            left = "no snapshot with it is left"
            if self.oldest_snapshot:
                left = f"the oldest remaining snapshot with it is {self.oldest_snapshot}"
            yield f"    first in snapshot {self.snapshot}, which was expired; {left}"
        elif self.snapshot is not None:
            yield f"    first in snapshot {self.snapshot}"
        for path in self.files[:_SHOWN]:
            yield f"    {path}"
        if len(self.files) > _SHOWN:
            yield f"    and {len(self.files) - _SHOWN} more files whose bounds include it"
        if self.sql:
            yield f"    {self.sql}"


@dataclass(frozen=True, slots=True)
class LocatedBatch:
    """A batch that read the offset; exactly one per sink, unless something is wrong."""

    sink: str
    batch: int
    commit_id: str
    epoch: int
    range: Range
    #: of all offsets of the range, over all tables; None: unknown
    counts: OutcomeCounts | None
    committed_at: Timestamp | None
    tables: tuple[TableHit, ...]
    #: `index`, or `ledger` if the index has no row of the batch (yet)
    found_in: str = "index"
    #: the operator's note, if the range was given up
    note: OperatorNote | None = None

    @property
    def JSON(self) -> str:
        names = "sink batch commit_id epoch start=range.start end=range.end committed_at found_in"
        return f"{names} note {'counts ' if self.counts else ''}tables"

    @property
    def contained(self) -> bool:
        return any(table.contains != "no" for table in self.tables)

    def lines(self) -> Iterator[str]:
        by = "" if self.found_in == "index" else " (by the ledger; not in the index)"
        yield (
            f"batch {self.batch} of sink {self.sink}, {self.range}, epoch {self.epoch}, commit "
            f"{self.commit_id}, {self.committed_at}{by}"
        )
        if self.counts is not None:
            yield f"  {_outcomes(self.counts)}"
        if self.note is not None:
            yield f"  {self.note}"
        for table in self.tables:
            yield from table.lines()
        if not self.contained:
            yield "  no table contains it"


@dataclass(frozen=True, slots=True)
class LocateReport:
    JSON: ClassVar = "partition offset contained reason other_topics batches"

    partition: Partition
    offset: int
    batches: tuple[LocatedBatch, ...]
    #: why there is no batch
    reason: str = ""
    #: other names of the Kafka topic, which was recreated: their offsets are unrelated
    other_topics: tuple[str, ...] = ()

    @property
    def contained(self) -> bool:
        return any(batch.contained for batch in self.batches)

    @property
    def exit_code(self) -> int:
        return 0 if self.contained else 3

    def lines(self) -> Iterator[Line]:
        if self.reason:
            yield f"{self.partition} at {self.offset}: {self.reason}"
        if self.other_topics:
            names = ", ".join(self.other_topics)
            yield f"the topic was recreated; {names} has another record at the same offset"
        for batch in self.batches:
            first, *others = batch.lines()
            yield f"{self.partition} at {self.offset}: {first}"
            yield from others


@dataclass(frozen=True, slots=True)
class _Where:
    """The offset to locate, and the catalog to search."""

    partition: Partition
    offset: int
    catalog: str
    opened: Open
    #: table → its branch
    branch: Callable[[str], str]


def of_sink(
    config: Config, opened: Open, where: Partition, offset: int, table: str = ""
) -> LocateReport:
    """Locate the offset in all tables of the sink, or in `table`."""
    opened = cache(opened)  # one version of each table for all steps
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
    asked = _Where(where, offset, config.catalog.name, opened, config.branch)
    report = _answer(asked, index, [config.sink.id], [table] if table else names)
    return replace(report, other_topics=_also(index, config.sink.id, where))


def _also(index: ReadOnlyTable, sink: str, where: Partition) -> tuple[str, ...]:
    entry = index_entry(index, sink)
    known = entry.end if entry else ()
    same = {p.topic for p in known if p.kafka_topic == where.kafka_topic}
    return tuple(sorted(same - {where.topic}))


def of_table(
    catalog: str, opened: Open, name: str, where: Partition, offset: int, branch: str = "main"
) -> LocateReport:
    """Locate the offset in one table, for every sink that wrote it; its ledger names the index."""
    opened = cache(opened)
    table = opened(name)
    if table is None:
        raise ConfigError(f"cannot locate {where} at {offset}: table {name} does not exist")
    indexes: dict[str, list[str]] = {}
    for snapshot in table.history(branch):
        sink, index = (snapshot.summary.get(PREFIX + key, "") for key in ("sink", "index"))
        if sink and sink not in (known for sinks in indexes.values() for known in sinks):
            indexes.setdefault(index, []).append(sink)
    if not indexes:
        raise ConfigError(
            f"cannot locate {where} at {offset}: no snapshot of table {name} was written by Frazil"
        )
    asked = _Where(where, offset, catalog, opened, lambda _: branch)
    reports = [
        _answer(asked, opened(index) if index else None, sinks, [name])
        for index, sinks in indexes.items()
    ]
    batches = tuple(batch for report in reports for batch in report.batches)
    return LocateReport(where, offset, batches, "" if batches else reports[0].reason)


def _answer(
    asked: _Where, index: ReadOnlyTable | None, sinks: Sequence[str], tables: Sequence[str]
) -> LocateReport:
    where, offset = asked.partition, asked.offset
    rows, lowest = _rows(index, sinks, where, offset) if index is not None else ([], None)
    batches = [
        _of_index(asked, [row for row in rows if _key(row) == key], tables)
        for key in dict.fromkeys(map(_key, rows))
    ]
    indexed = {batch.sink for batch in batches}
    # Below the lowest index row the ledgers have nothing either.
    for sink in sinks if lowest is None or offset >= lowest else ():
        if sink not in indexed:
            batches += _of_ledger(asked, sink, tables)
    if batches:
        return LocateReport(where, offset, tuple(batches))
    return LocateReport(where, offset, (), _outside(asked, index, sinks, lowest))


def _rows(
    index: ReadOnlyTable, sinks: Sequence[str], where: Partition, offset: int
) -> tuple[list[dict[str, Any]], int | None]:
    """The index rows whose range contains the offset, and the lowest offset of all rows of the
    partition; None: there is no row."""
    rows = index.rows(index.having(_COLUMNS), {"sink": sinks, "topic": [where.topic]})
    rows = rows.filter(pc.equal(rows["partition"], where.number))
    starts, ends = rows["start_offset"], rows["end_offset"]
    matches = rows.filter(pc.and_(pc.less_equal(starts, offset), pc.greater(ends, offset)))
    for at, column in enumerate(matches.schema):
        if pa.types.is_timestamp(column.type):
            matches = matches.set_column(at, column.name, matches.column(at).cast(pa.int64()))
    return sorted(matches.to_pylist(), key=_key), pc.min(starts).as_py()


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
    table_rows = [row for row in rows if row["table_name"] in tables]
    total = _counts(whole[0]) if whole else _counts(table_rows[0]) if len(table_rows) == 1 else None
    hits = [
        _hit(
            asked,
            row["sink"],
            row["table_name"],
            _counts(row),
            row["snapshot_id"],
            (row["event_time_low"], row["event_time_high"]),
        )
        for row in table_rows
    ]
    hit_tables = {hit.table for hit in hits}
    for name in (table for table in tables if table not in hit_tables and total and whole):
        # The batch had nothing for it, but dead letters may have been replayed into it.
        hit = _hit(asked, first["sink"], name, OutcomeCounts(), None, (None, None))
        hits += [hit] if hit.contains != "no" else []
    return LocatedBatch(
        sink=first["sink"],
        batch=first["batch"],
        commit_id=first["commit_id"],
        epoch=first["epoch"],
        range=Range(asked.partition, first["start_offset"], first["end_offset"]),
        counts=total,
        committed_at=Timestamp.of(first["committed_at"]),
        tables=tuple(hits),
        note=OperatorNote.of(first.get("operator_note")),
    )


def _of_ledger(asked: _Where, sink: str, tables: Sequence[str]) -> Iterator[LocatedBatch]:
    """Batches that the index lacks, from the ledgers of the tables."""
    batches: dict[str, LocatedBatch] = {}
    for name in tables:
        table = asked.opened(name)
        if table is None:
            continue
        for entry, snapshot in entries(table.history(asked.branch(name)), sink):
            begin = entry.begin.get(asked.partition, 0)
            end = entry.end.get(asked.partition, 0)
            if end <= asked.offset:
                break  # older entries end before it, too
            if begin > asked.offset:
                continue
            counts = entry.counts(asked.partition)
            span = entry.watermark or (None, None)
            hit = _hit(asked, sink, name, counts, snapshot.id, span)
            key = entry.commit_ids[-1]
            hits = batches[key].tables if key in batches else ()
            batches[key] = LocatedBatch(
                sink,
                entry.batches[1],
                key,
                entry.epoch,
                Range(asked.partition, begin, end),
                None,
                Timestamp(snapshot.timestamp_ms * 1000),
                (*hits, hit),
                "ledger",
                OperatorNote.of(entry.note),
            )
    yield from batches.values()


def _hit(
    asked: _Where,
    sink: str,
    name: str,
    counts: OutcomeCounts,
    snapshot: int | None,
    event_time: tuple[int | None, int | None],
) -> TableHit:
    table, where, offset = asked.opened(name), asked.partition, asked.offset
    low, high = map(Timestamp.of, event_time)
    if table is None:
        why = "the table does not exist"
        return TableHit(name, "no", why, counts, snapshot, True, None, (), low, high)
    branch = asked.branch(name)
    files, deletes = table.files(branch)
    near = [
        file
        for file in files
        if file.partition in (where, None)
        and file.rows > file.nulls
        and (file.offsets is None or file.offsets[0] <= offset <= file.offsets[1])
    ]
    contains, why = _verdict(sink, counts, near, where, deletes)
    history = list(table.history(branch))
    kept = snapshot is None or any(candidate.id == snapshot for candidate in history)
    oldest = None if kept else _oldest(history, sink, where, offset)
    version = snapshot if kept else oldest
    return TableHit(
        name,
        contains,
        why,
        counts,
        snapshot,
        not kept,
        oldest,
        tuple(file.path for file in near) if contains != "no" else (),
        low,
        high,
        _sql(asked, table, version, contains),
    )


def _verdict(
    sink: str, counts: OutcomeCounts, near: Sequence[DataFile], where: Partition, deletes: int
) -> tuple[str, str]:
    """Whether the table contains the offset, by counts and file bounds; and why."""
    if counts.merged:
        return "merged", f"{counts.merged} offsets of the batch were merged into shared rows"
    every = counts.written == counts.offsets > 0
    if not near:
        if not counts.written:
            return "no", _outcomes(counts)
        return "no", f"{_outcomes(counts)}, and no live file's bounds include it"
    if deletes:
        return "maybe", f"{_outcomes(counts)}; {deletes} delete files may hide it"
    for file in near:
        if file.partition == where and file.offsets is not None:
            low, high = file.offsets
            if file.rows - file.nulls == high - low + 1:
                return "yes", "a live file has every offset of its bounds"
    if every:
        return "yes", "all offsets of the batch were written"
    if not counts.written:
        if any(f"/frazil-{sink}{REPLAY}-" in file.path for file in near):
            return "maybe", f"{_outcomes(counts)}; but dead letters were replayed around it"
        return "no", _outcomes(counts)
    return "maybe", _outcomes(counts)


def _outcomes(counts: OutcomeCounts) -> str:
    names = ("written", "rejected", "skipped", "invisible", "elsewhere", "lost")
    parts = [f"{number} {name}" for name in names if (number := getattr(counts, name))]
    return (
        f"of {counts.offsets} offsets {', '.join(parts)}"
        if parts
        else "it got no records of the batch"
    )


def _oldest(history: Sequence[Snapshot], sink: str, where: Partition, offset: int) -> int | None:
    """The oldest remaining snapshot that contains the offset; `history` is newest first."""
    oldest, last = None, None
    for snapshot in history:
        last = snapshot.id
        entry = own_entry(snapshot, sink)
        if entry is None:
            continue
        if entry.end.get(where, 0) <= offset:
            return oldest  # None: the table was rolled back to before the offset
        oldest = snapshot.id
    return last  # all older snapshots are expired


def _sql(asked: _Where, table: ReadOnlyTable, version: int | None, contains: str) -> str:
    if version is None or contains == "no":
        return ""
    columns = table.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset").split(",")
    text = f"SELECT * FROM {asked.catalog}.{table.name} VERSION AS OF {version}"
    if contains == "merged":
        return text
    topic = asked.partition.topic.replace("'", "\\'")
    return (
        f"{text} WHERE `{columns[0]}` = '{topic}' AND `{columns[1]}` = {asked.partition.number} "
        f"AND `{columns[2]}` = {asked.offset}"
    )


def _outside(
    asked: _Where, index: ReadOnlyTable | None, sinks: Iterable[str], lowest: int | None
) -> str:
    """Why no batch contains the offset."""
    where, offset = asked.partition, asked.offset
    if index is None:
        return f"no remaining ledger entry has {where} at {offset}, and there is no index"
    positions = [(sink, entry.end) for sink in sinks if (entry := index_entry(index, sink))]
    knowing = [(sink, end) for sink, end in positions if where in end]
    if not knowing:
        known = sorted({str(key) for _, end in positions for key in end})
        return f"no sink reads {where}; read are {', '.join(known) or 'none'}"
    sink, end = knowing[0]
    if offset >= end[where]:
        return f"not read yet: sink {sink} is at {end[where]}"
    if lowest is not None and offset < lowest:
        return f"before the beginning: sink {sink} began at {lowest}"
    return f"no batch of the index has it, and sink {sink} is at {end[where]}: see `frazil audit`"
