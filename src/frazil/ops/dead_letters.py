"""`frazil dead-letters`: list the dead letters of a sink, and replay them after a fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql

from frazil.commit.provisioning import TableProvisioner
from frazil.commit.startup import Startup
from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError, counted
from frazil.iceberg.java import JavaCatalog
from frazil.ledger.completeness import Timestamp
from frazil.ledger.sink_state import known_tables, staged_batches
from frazil.render import Line, json_values, text_table
from frazil.retry import Retry
from frazil.sink import Sink
from frazil.sources.base import BatchTables, StreamPosition, StreamState
from frazil.sources.dead_letters import (
    DeadLetterSelection,
    DeadLetterSource,
    ReplayReport,
    notes_table,
    read_dead_letters,
    replaying,
    waiting,
)
from frazil.steps import Step

_TIMES = ("timestamp", "rejected_at", "replayed_at")
#: Characters of a message shown on the terminal.
_WIDTH = 100


def selection(
    config: Config,
    topics: list[str],
    partitions: list[int],
    offsets: str,
    kinds: list[str],
    tables: list[str],
    limit: int | None,
) -> DeadLetterSelection:
    """`offsets`: `17`, or half-open `10..20`, `10..`, `..20`."""
    notes_table(config)  # refuses a config without dead letters
    start, end = _span(offsets) if offsets else (None, None)
    if limit is not None and limit < 1:
        raise ConfigError(f"cannot take --limit {limit}: expected at least 1")
    return DeadLetterSelection(
        tuple(topics), tuple(partitions), start, end, tuple(kinds), tuple(tables), limit
    )


def _span(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d*)(\.\.)?(\d*)", text)
    if not match or not (match[1] or match[3]):
        raise ConfigError(
            f"cannot read --offsets {text!r}: expected one offset, or START..END without END itself"
        )
    start = int(match[1]) if match[1] else None
    if not match[2]:
        return start, int(match[1]) + 1
    return start, int(match[3]) if match[3] else None


# ── list ─────────────────────────────────────────────────────────────────────────────────────────


class DeadLetterList(dict[str, Any]):
    """The values of `frazil dead-letters list --json`."""

    def lines(self) -> Iterator[Line]:
        if self["groups"]:
            yield text_table(
                f"{self['table']}: dead letters of sink {self['sink']}",
                ("kind", "tables", "partition", "offsets", "records", "", "first message"),
                (
                    (
                        group["kind"],
                        ", ".join(group["tables"] or ()) or "none",
                        f"{group['topic']}[{group['partition']}]",
                        f"{group['first']:,} … {group['last']:,}",
                        f"{group['count']:,}",
                        _state(group["replayed"]),
                        _short(group["message"]),
                    )
                    for group in self["groups"]
                ),
                right=("records",),
            )
        for record in self["dead_letters"]:
            where = f"{record['topic']}[{record['partition']}]@{record['offset']}"
            yield f"{where}  {record['kind']}  {_short(record['message'])}"
        yield (
            f"{counted(self['waiting'], 'dead letter waits', 'dead letters wait')}, "
            f"{counted(self['replayed'], 'was', 'were')} replayed"
        )


def list_dead_letters(
    config: Config, spark: SparkSession, wanted: DeadLetterSelection, which: str = "waiting"
) -> DeadLetterList:
    """Counts of all selected dead letters, and the newest `wanted.limit` of them. `which`: waiting,
    replayed, or all."""
    frame = read_dead_letters(spark, config)
    listing = DeadLetterList(
        sink=config.sink.id,
        table=config.dead_letters.table,
        waiting=0,
        replayed=0,
        groups=[],
        dead_letters=[],
    )
    if frame is None:
        return listing
    frame = replace(wanted, limit=None).of(frame)
    replayed = sql.col("replayed_at").isNotNull()
    by = ["kind", "tables", "topic", "partition"]
    groups = (
        frame.groupBy(*by, replayed.alias("replayed"))
        .agg(
            sql.count("*").alias("count"),
            sql.min("offset").alias("first"),
            sql.max("offset").alias("last"),
            sql.min_by("message", "offset").alias("message"),
        )
        .orderBy(sql.desc("count"), *by)
        .collect()
    )
    for name, done in (("waiting", False), ("replayed", True)):
        listing[name] = sum(group["count"] for group in groups if group.replayed == done)
    listing["groups"] = [
        group.asDict() for group in groups if which in ("all", _state(group.replayed))
    ]
    listing["dead_letters"] = [_values(row) for row in _newest(frame, which, wanted.limit or 10)]
    return listing


def _newest(frame: DataFrame, which: str, limit: int) -> list[Row]:
    if which != "all":
        frame = waiting(frame) if which == "waiting" else frame.where("replayed_at IS NOT NULL")
    columns = [
        "topic",
        "partition",
        "offset",
        "timestamp",
        "kind",
        "message",
        "schema_id",
        "tables",
        "batch",
        "rejected_at",
        "replayed_at",
        "replayed_to",
    ]
    newest = frame.orderBy(sql.desc("rejected_at"), "topic", "partition", sql.desc("offset"))
    newest = newest.select(*columns).limit(limit)
    for name in _TIMES:  # integers: a record may have a year outside of Python's range
        newest = newest.withColumn(name, sql.unix_micros(name))
    return newest.collect()


def _values(row: Row) -> dict[str, Any]:
    values = row.asDict()
    return values | {name: json_values(Timestamp.of(values[name])) for name in _TIMES}


def _state(replayed: bool) -> str:
    return "replayed" if replayed else "waiting"


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


# ── replay ───────────────────────────────────────────────────────────────────────────────────────


def replay(
    config: Config,
    spark: SparkSession,
    wanted: DeadLetterSelection,
    on_step: Callable[[Step], None] | None = None,
) -> ReplayReport:
    """Write the selected waiting dead letters to their tables by the current rules. Batches that an
    earlier replay staged but did not commit are committed first."""
    sink, source = _sink(config, wanted, on_step)
    index = JavaCatalog(spark, config.catalog.name).load(config.index_table)
    left = index is not None and any(staged_batches(sink.config, index))
    if not left and not _waiting(config, spark, wanted):
        return ReplayReport()
    staged = sink.once(spark, counts_on=notes_table(config))
    source.outcome.finished = sum(t.written + t.skipped for batch in staged for t in batch.total)
    return source.outcome


def preview_replay(
    config: Config, spark: SparkSession, wanted: DeadLetterSelection
) -> ReplayReport:
    """The report that a replay would return; nothing is written."""
    sink, source = _sink(config, wanted, None)
    if not _waiting(config, spark, wanted):
        return ReplayReport()
    tables = _existing_tables(sink.config, spark, source, config.sink.id)
    return source.dry_run(source.stream(spark, None), tables)


def _existing_tables(
    config: Config, spark: SparkSession, source: DeadLetterSource, sink: str
) -> BatchTables:
    """The tables of the replay and of `sink`: nothing is claimed, nothing can be written."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index = catalog.load(config.index_table)
    startup = Startup(config, catalog, source)
    startup.open_readonly(spark, known_tables(index, sink) if index else ())
    stream = StreamState(config.sink.id, startup.epoch, StreamPosition(), 0)
    retry = Retry(duration(config.sink.unavailable_timeout), lambda: False)
    return TableProvisioner(config, startup, stream, retry).plans(versions=False)


def _waiting(config: Config, spark: SparkSession, wanted: DeadLetterSelection) -> bool:
    frame = read_dead_letters(spark, config)
    return frame is not None and not wanted.of(waiting(frame)).isEmpty()


def _sink(
    config: Config, wanted: DeadLetterSelection, on_step: Callable[[Step], None] | None
) -> tuple[Sink, DeadLetterSource]:
    source = partial(DeadLetterSource, wanted=wanted, of=config)
    sink = Sink(replaying(config), source=source, on_step=on_step)
    assert isinstance(sink.source, DeadLetterSource)
    return sink, sink.source


@dataclass(frozen=True, slots=True)
class ReplayOutput:
    """What `frazil dead-letters replay` prints."""

    report: ReplayReport
    dry_run: bool

    @property
    def JSON(self) -> str:
        return f"*report {'needs=report.needs ' if self.dry_run else ''}dry_run"

    @property
    def exit_code(self) -> int:
        return 3 if self.report.rejected else 0

    def lines(self) -> Iterator[Line]:
        report, would = self.report, "would be " if self.dry_run else ""
        if report.finished:
            yield f"{counted(report.finished, 'letter')} of an earlier replay: committed now"
        for letter in report.rejected_again:
            where = f"{letter.topic}[{letter.partition}]@{letter.offset}"
            yield f"{where}  {letter.kind}  {_short(letter.reason)}"
        for name, rows in sorted(report.rows.items()):
            yield f"{name}: {counted(rows, 'row')}"
        for name in report.needs:
            yield f"{name}: to be created or changed first"
        skipped = f", {report.skipped:,} skipped by a rule" if report.skipped else ""
        yield (
            f"{counted(report.selected, 'letter')} selected: {report.replayed:,} {would}replayed"
            f"{skipped}, {report.rejected:,} {would}rejected again"
        )
