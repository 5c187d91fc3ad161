"""`frazil dead-letters`: list the dead letters of a sink, and replay them after a fix."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql
from rich.console import Console

from frazil.commit.recovery import staging_folder
from frazil.config.model import Config
from frazil.errors import ConfigError, counted
from frazil.iceberg.java import JavaCatalog
from frazil.ledger.completeness import shown
from frazil.ledger.sink_state import known_tables
from frazil.render import TextTable
from frazil.sink import Sink
from frazil.sources.dead_letters import (
    DeadLetterSelection,
    DeadLetterSource,
    ReplayReport,
    all_dead_letters,
    notes_table,
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


def list_dead_letters(
    config: Config, spark: SparkSession, wanted: DeadLetterSelection, which: str = "waiting"
) -> dict[str, Any]:
    """Counts of all selected dead letters, and the newest `wanted.limit` of them. `which`: waiting,
    replayed, or all."""
    frame = all_dead_letters(spark, config)
    shown: dict[str, Any] = {
        "sink": config.sink.id,
        "table": config.dead_letters.table,
        "waiting": 0,
        "replayed": 0,
        "groups": [],
        "letters": [],
    }
    if frame is None:
        return shown
    frame = dataclasses.replace(wanted, limit=None).of(frame)
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
        shown[name] = sum(group["count"] for group in groups if group.replayed == done)
    shown["groups"] = [
        group.asDict() for group in groups if which in ("all", _state(group.replayed))
    ]
    shown["letters"] = [_letter(row) for row in _newest(frame, which, wanted.limit or 10)]
    return shown


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


def _letter(row: Row) -> dict[str, Any]:
    values = row.asDict()
    return values | {name: shown(values[name]) for name in _TIMES}


def _state(replayed: bool) -> str:
    return "replayed" if replayed else "waiting"


def show_list(listing: dict[str, Any], console: Console) -> None:
    if listing["groups"]:
        groups = TextTable(title=f"{listing['table']}: dead letters of sink {listing['sink']}")
        for name in ("kind", "tables", "partition", "offsets", "letters", "", "first message"):
            groups.add_column(name, justify="right" if name == "letters" else "left")
        for group in listing["groups"]:
            groups.add_row(
                group["kind"],
                ", ".join(group["tables"] or ()) or "none",
                _text(f"{group['topic']}[{group['partition']}]"),
                f"{group['first']:,} … {group['last']:,}",
                f"{group['count']:,}",
                _state(group["replayed"]),
                _text(_short(group["message"])),
            )
        console.print(groups)
    for letter in listing["letters"]:
        where = f"{letter['topic']}[{letter['partition']}]@{letter['offset']}"
        console.print(_text(f"{where}  {letter['kind']}  {_short(letter['message'])}"))
    console.print(
        f"{counted(listing['waiting'], 'letter waits', 'letters wait')}, "
        f"{counted(listing['replayed'], 'was', 'were')} replayed"
    )


def _text(plain: str) -> str:
    return plain.replace("[", "\\[")


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
    left = index is not None and any(
        path.endswith(".json") for path in index.listing(staging_folder(sink.config, index))
    )
    if not left and not _waiting(config, spark, wanted):
        return ReplayReport()
    staged = sink.once(spark, counts_on=notes_table(config))
    source.outcome.finished = sum(t.written + t.skipped for batch in staged for t in batch.total)
    return source.outcome


def look(config: Config, spark: SparkSession, wanted: DeadLetterSelection) -> ReplayReport:
    """The report that a replay would return; nothing is written."""
    sink, source = _sink(config, wanted, None)
    if not _waiting(config, spark, wanted):
        return ReplayReport()
    index = JavaCatalog(spark, config.catalog.name).load(config.index_table)
    tables = sink.look(spark, known_tables(index, config.sink.id) if index else ())
    return source.dry_run(source.stream(spark, None), tables)


def _waiting(config: Config, spark: SparkSession, wanted: DeadLetterSelection) -> bool:
    frame = all_dead_letters(spark, config)
    return frame is not None and not wanted.of(waiting(frame)).isEmpty()


def _sink(
    config: Config, wanted: DeadLetterSelection, on_step: Callable[[Step], None] | None
) -> tuple[Sink, DeadLetterSource]:
    source = partial(DeadLetterSource, wanted=wanted, of=config)
    sink = Sink(replaying(config), source=source, on_step=on_step)
    assert isinstance(sink.source, DeadLetterSource)
    return sink, sink.source


def values(outcome: ReplayReport, dry: bool) -> dict[str, Any]:
    """For `--json`."""
    result = {"selected": outcome.selected, **dataclasses.asdict(outcome), "dry_run": dry}
    if not dry:
        result.pop("needs")
    return result


def show_replay(outcome: ReplayReport, dry: bool, console: Console) -> None:
    if outcome.finished:
        console.print(f"{counted(outcome.finished, 'letter')} of an earlier replay: committed now")
    for letter in outcome.again:
        where = f"{letter.topic}[{letter.partition}]@{letter.offset}"
        console.print(_text(f"{where}  {letter.kind}  {_short(letter.reason)}"))
    for name, rows in sorted(outcome.rows.items()):
        console.print(f"{name}: {counted(rows, 'row')}")
    for name in outcome.needs:
        console.print(f"{name}: to be made or changed first")
    would, skipped = "would be " if dry else "", f", {outcome.skipped:,} skipped by a rule"
    console.print(
        f"{counted(outcome.selected, 'letter')} selected: {outcome.replayed:,} {would}replayed"
        f"{skipped if outcome.skipped else ''}, {outcome.rejected:,} {would}rejected again"
    )
