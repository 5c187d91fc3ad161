"""What `frazil dead-letters` does: list the dead letters of a sink, and replay them after a fix."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql
from rich.console import Console

from frazil.config.model import Config
from frazil.errors import ConfigError
from frazil.iceberg.java import JavaCatalog
from frazil.ledger.completeness import shown
from frazil.ledger.sink_state import known_tables
from frazil.render import TextTable, counted
from frazil.sink import Sink, Step
from frazil.sources.dead_letters import (
    DeadLetterSelection,
    DeadLetterSource,
    ReplayReport,
    letters,
    notes_table,
    replaying,
    waiting,
)
from frazil.startup import staging_folder

_TIMES = ("timestamp", "rejected_at", "replayed_at")
#: Of a message, on the terminal.
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
    found = re.fullmatch(r"(\d*)(\.\.)?(\d*)", text)
    if not found or not (found[1] or found[3]):
        raise ConfigError(
            f"cannot read --offsets {text!r}: expected one offset, or START..END without END itself"
        )
    start = int(found[1]) if found[1] else None
    if not found[2]:
        return start, int(found[1]) + 1
    return start, int(found[3]) if found[3] else None


# ── list ─────────────────────────────────────────────────────────────────────────────────────────


def list_dead_letters(
    config: Config, spark: SparkSession, wanted: DeadLetterSelection, which: str = "waiting"
) -> dict[str, Any]:
    """Counts of all letters that are wanted, and the newest `wanted.limit` of them. `which`:
    waiting, replayed, or all."""
    found = letters(spark, config)
    shown: dict[str, Any] = {
        "sink": config.sink.id,
        "table": config.dead_letters.table,
        "waiting": 0,
        "replayed": 0,
        "groups": [],
        "letters": [],
    }
    if found is None:
        return shown
    found = dataclasses.replace(wanted, limit=None).of(found)
    replayed = sql.col("replayed_at").isNotNull()
    by = ["kind", "tables", "topic", "partition"]
    groups = (
        found.groupBy(*by, replayed.alias("replayed"))
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
    shown["letters"] = [_letter(row) for row in _newest(found, which, wanted.limit or 10)]
    return shown


def _newest(found: DataFrame, which: str, limit: int) -> list[Row]:
    if which != "all":
        found = waiting(found) if which == "waiting" else found.where("replayed_at IS NOT NULL")
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
    newest = found.orderBy(sql.desc("rejected_at"), "topic", "partition", sql.desc("offset"))
    newest = newest.select(*columns).limit(limit)
    for name in _TIMES:  # numbers: a record may claim a year that Python's dates do not reach
        newest = newest.withColumn(name, sql.unix_micros(name))
    return newest.collect()


def _letter(row: Row) -> dict[str, Any]:
    values = row.asDict()
    return values | {name: shown(values[name]) for name in _TIMES}


def _state(replayed: bool) -> str:
    return "replayed" if replayed else "waiting"


def show_list(found: dict[str, Any], console: Console) -> None:
    if found["groups"]:
        groups = TextTable(title=f"{found['table']}: dead letters of sink {found['sink']}")
        for name in ("kind", "tables", "partition", "offsets", "letters", "", "first message"):
            groups.add_column(name, justify="right" if name == "letters" else "left")
        for each in found["groups"]:
            groups.add_row(
                each["kind"],
                ", ".join(each["tables"] or ()) or "none",
                _text(f"{each['topic']}[{each['partition']}]"),
                f"{each['first']:,} … {each['last']:,}",
                f"{each['count']:,}",
                _state(each["replayed"]),
                _text(_short(each["message"])),
            )
        console.print(groups)
    for each in found["letters"]:
        where = f"{each['topic']}[{each['partition']}]@{each['offset']}"
        console.print(_text(f"{where}  {each['kind']}  {_short(each['message'])}"))
    console.print(
        f"{counted(found['waiting'], 'letter waits', 'letters wait')}, "
        f"{counted(found['replayed'], 'was', 'were')} replayed"
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
    """The letters that are wanted and wait, into their tables by the rules as they are now; first
    what an earlier replay staged and did not live to commit."""
    sink, feed = _sink(config, wanted, on_step)
    index = JavaCatalog(spark, config.catalog.name).load(config.index_table)
    left = index is not None and any(
        path.endswith(".json") for path in index.listing(staging_folder(sink.config, index))
    )
    if not left and not _waiting(config, spark, wanted):
        return ReplayReport()
    staged = sink.once(spark, counts_on=notes_table(config))
    feed.outcome.finished = sum(t.written + t.skipped for each in staged for t in each.total)
    return feed.outcome


def look(config: Config, spark: SparkSession, wanted: DeadLetterSelection) -> ReplayReport:
    """What would become of them; nothing is written."""
    sink, feed = _sink(config, wanted, None)
    if not _waiting(config, spark, wanted):
        return ReplayReport()
    index = JavaCatalog(spark, config.catalog.name).load(config.index_table)
    sink.look(spark, known_tables(index, config.sink.id) if index else ())
    return feed.would(feed.stream(spark, None))


def _waiting(config: Config, spark: SparkSession, wanted: DeadLetterSelection) -> bool:
    found = letters(spark, config)
    return found is not None and not wanted.of(waiting(found)).isEmpty()


def _sink(
    config: Config, wanted: DeadLetterSelection, on_step: Callable[[Step], None] | None
) -> tuple[Sink, DeadLetterSource]:
    feeds: list[DeadLetterSource] = []

    def feed(sink: Sink) -> DeadLetterSource:
        feeds.append(DeadLetterSource(sink, config, wanted))
        return feeds[0]

    sink = Sink(replaying(config), feed=feed, on_step=on_step)
    return sink, feeds[0]


def values(outcome: ReplayReport, dry: bool) -> dict[str, Any]:
    """For `--json`."""
    found = {"selected": outcome.selected, **dataclasses.asdict(outcome), "dry_run": dry}
    if not dry:
        found.pop("needs")
    return found


def show_replay(outcome: ReplayReport, dry: bool, console: Console) -> None:
    if outcome.finished:
        console.print(f"{counted(outcome.finished, 'letter')} of an earlier replay: committed now")
    for each in outcome.again:
        where = f"{each.topic}[{each.partition}]@{each.offset}"
        console.print(_text(f"{where}  {each.kind}  {_short(each.reason)}"))
    for name, rows in sorted(outcome.rows.items()):
        console.print(f"{name}: {counted(rows, 'row')}")
    for name in outcome.needs:
        console.print(f"{name}: to be made or changed first")
    would, skipped = "would be " if dry else "", f", {outcome.skipped:,} skipped by a rule"
    console.print(
        f"{counted(outcome.selected, 'letter')} selected: {outcome.replayed:,} {would}replayed"
        f"{skipped if outcome.skipped else ''}, {outcome.rejected:,} {would}rejected again"
    )
