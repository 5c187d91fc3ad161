"""Corruption, planted in tables that were well: is every one of it found, and nothing else?

Each case is a history of a sink (`lake.History`) by a seed. As it is, the audit must prove it. Then
something happens to it that must not: nine kinds, each in several ways, on data tables, ledger and
index, at the beginning, in the middle and at the end, on one table and on many, also where others
have compacted and expired meanwhile. The audit must name it: a finding of a fitting kind, with a
range that the damage touches, or the file, or, where rows are mixed, the sum of the table.

The audit is the one of `frazil audit`, on metadata files alone.

What metadata cannot tell is listed apart and never counted as found: rows that were exchanged
inside a file, with the same counts and bounds, are for `--deep`, which reads the offset columns.
Nobody can tell from the tables that *all* of them, tags and index included, were put back to the
same older state: `--kafka` can.

    make planted N=2000
    python bench/planted.py --seed 17        # one case, with its story
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # small tables, and a process for each core

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))

from frazil.accounting import OutcomeCounts
from frazil.auditing import evidence
from frazil.auditing.report import KINDS as WEIGHTS
from frazil.auditing.report import Finding
from frazil.config.model import Config, from_document
from frazil.errors import Expired
from frazil.iceberg.foreign_commits import brings_rows, key_of, of_snapshots
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import Snapshot
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, LedgerEntry, entries, parse
from frazil.offsets import BATCHES, Cut, Partition, Range
from lake import BACKFILL, NEIGHBOUR, Filed, History, Row, Table

#: How many histories are made at most until one of them can suffer a kind of corruption.
TRIES = 40
GONE = frozenset({"gap", "unaccounted"})
TWICE = frozenset({"overlap", "unaccounted"})
WRONG = frozenset({"gap", "overlap", "unaccounted"})
DOUBT = WRONG | {"cannot_tell"}
#: The table is reported, and no range: its rows are mixed.
ANYWHERE = ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── the audit ───────────────────────────────────────────────────────────────────────────────────


def audited(history: History, deep: bool = False, by_name: str = "") -> evidence.AuditResult:
    """As `frazil audit` does it: from the metadata files, and nothing else; all tables of the sink,
    or one `by_name`, without the config."""
    paths = {name: table.save(complete=True) for name, table in history.tables.items()}
    paths[history.index.name] = history.index.save()

    def opened(name: str) -> ReadOnlyTable | None:
        return ReadOnlyTable(name, paths[name], {}) if name in paths else None

    if by_name:
        return evidence.of_table(opened, by_name, history.branch, deep)
    names = () if history.alone else tuple(history.names)
    return evidence.of_sink(_config(history.sink, history.branch, names), opened, deep)


@lru_cache(maxsize=256)
def _config(sink: str, branch: str, names: tuple[str, ...]) -> Config:
    document: dict[str, Any] = {
        "sink": {"id": sink, "topics": ["t"], "index_table": "db.index"},
        "kafka": {"bootstrap.servers": "nowhere:9092"},
        "decode": {"format": "raw"},
        "catalog": {"type": "hadoop", "warehouse": "nowhere"},
        "table": [{"name": name, "branch": branch} for name in names or ["db.t"]],
    }
    if names:
        *first, last = names
        rules = [{"topics": [name], "to": [name]} for name in first]
        document["route"] = [*rules, {"to": [last]}]
        document["dead_letters"] = {"table": "db.letters"}
    return from_document(document)


# ── what is planted ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Planted:
    """What was done, and what the audit must say: on one of `tables`, a finding of one of the kinds
    that touches one of the ranges, or has one of the words."""

    says: str
    tables: frozenset[str]
    kinds: frozenset[str]
    named: tuple[Range | str, ...]
    #: rows that were taken from a table, or that it has too many; where only their number tells
    lost: int = 0
    more: int = 0

    def tellable(self, history: History) -> bool:
        """Can the table's metadata tell it at all? What others wrote may hide it."""
        for name in self.tables & set(history.tables):
            table = history.tables[name]
            if self.lost and history.masked(table) >= self.lost:
                return False
            if self.more and history.untold(table):
                return False
        return True

    def at_least(self, before: evidence.AuditResult) -> Planted | None:
        """The verdict must then be `cannot tell`: which is news if it was proven before."""
        if any(
            report.table in self.tables and report.verdict != "proven" for report in before.reports
        ):
            return None
        return replace(self, kinds=self.kinds | {"cannot_tell"}, named=(*self.named, ANYWHERE))

    def by(self, result: evidence.AuditResult) -> Finding | None:
        fitting = [
            finding
            for report in result.reports
            if report.table in self.tables
            for finding in report.findings
            if finding.kind in self.kinds and any(_names(finding, wanted) for wanted in self.named)
        ]
        return min(fitting, key=lambda finding: WEIGHTS.index(finding.kind), default=None)

    def exactly(self, finding: Finding) -> bool:
        """Does it name nothing else?"""
        return bool(finding.ranges) and any(
            isinstance(wanted, Range)
            and wanted.partition == span.partition
            and wanted.start <= span.start
            and span.end <= wanted.end
            for wanted in self.named
            for span in finding.ranges
        )


def _names(finding: Finding, wanted: Range | str) -> bool:
    if isinstance(wanted, str):
        return wanted in finding.message
    return any(
        span.partition == wanted.partition and span.start < wanted.end and wanted.start < span.end
        for span in finding.ranges
    )


#: Does it to a history, or finds that this one cannot suffer it.
Plant = Callable[[History, random.Random], "Planted | None"]
KINDS: dict[str, list[Plant]] = {}
DEEP: list[Plant] = []


def plant(kind: str) -> Callable[[Plant], Plant]:
    def add(function: Plant) -> Plant:
        KINDS.setdefault(kind, []).append(function)
        return function

    return add


def deep(function: Plant) -> Plant:
    DEEP.append(function)
    return function


# ── looking around ──────────────────────────────────────────────────────────────────────────────


def filled(history: History, r: random.Random, least: int = 1) -> Table | None:
    """A table of whose ledger so many entries with data are left."""
    tables = [
        table
        for name, table in sorted(history.tables.items())
        if len(history.entries(name)) >= least
    ]
    return r.choice(tables) if tables else None


def ours(row: Row) -> bool:
    return row[0] not in (None, BACKFILL, NEIGHBOUR)


def owned(history: History, table: Table) -> list[dict[str, Any]]:
    """The live files that hold rows of the sink."""
    every = history.feed == "merged"
    return [f for f in table.live(table.branch) if any(every or ours(row) for row in f["rows"])]


def some_file(
    history: History, r: random.Random
) -> tuple[Table, dict[str, Any]] | tuple[None, None]:
    pairs = [
        (table, file)
        for _, table in sorted(history.tables.items())
        for file in owned(history, table)
    ]
    return r.choice(pairs) if pairs else (None, None)


def spans(rows: Sequence[Row]) -> list[Range]:
    """What rows of a sink reach over."""
    by_partition: dict[Partition, list[int]] = {}
    for topic, number, offset in rows:
        if ours((topic, number, offset)):
            assert topic is not None
            assert number is not None
            assert offset is not None
            by_partition.setdefault(Partition(topic, number), []).append(offset)
    return [Range(p, min(offsets), max(offsets) + 1) for p, offsets in sorted(by_partition.items())]


def named_ranges(table: Table, rows: Sequence[Row]) -> tuple[Range | str, ...]:
    """What must be named of rows: their range where bounds can tell it, else only the table."""
    by_bounds = all(
        len({row[:2] for row in file["rows"]}) == 1 and "lower-bounds" in file
        for file in table.live(table.branch)
    )
    # Iceberg cuts bounds of a long topic, and what is cut says nothing.
    cut = table.optional and any(
        "/frazil-" not in file["file-path"] and any(len(row[0] or "") > 16 for row in file["rows"])
        for file in table.live(table.branch)
    )
    ranges = tuple(spans(rows)) if by_bounds and not cut else ()
    replayed = any(tag.endswith(".replay") for tag in table.refs)  # by batches, not by records
    return (*ranges, ANYWHERE) if replayed or not ranges else ranges


def reached(history: History) -> Cut:
    """Where the index says that all tables stand."""
    entry = history.own.head().entry
    return entry.end if entry else Cut()


def everyone(history: History, *names: str) -> frozenset[str]:
    """A table, and the index's own word."""
    return frozenset({*names, history.index.name})


def known(history: History, table: Table) -> set[str]:
    """Commit ids in what is left of a table's ledger."""
    return {i for entry, _ in history.entries(table.name) for i in entry.commit_ids}


def stranger(table: Table, many: int) -> list[dict[str, Any]]:
    rows: list[Row] = [
        (None, None, None) if table.optional else (BACKFILL, 0, i) for i in range(many)
    ]
    return table.write(rows, "00000-8-stranger", whole=False)


def later(history: History, table: Table, r: random.Random) -> str:
    """What others do afterwards, without knowing: it must not hide anything."""
    if r.random() < 0.5:
        return ""
    compacted(table, r)
    table.expire([table.refs[table.branch], *(i for i in [table.refs.get("main")] if i)])
    return ", and expired later"


def compacted(table: Table, r: random.Random) -> str:
    """All files are one, or not."""
    live = table.live(table.branch)
    if r.random() < 0.5 or len(live) < 2:
        return ""
    rows = [row for file in live for row in file["rows"]]
    new = table.write(rows, "00000-2-later", whole=False)
    table.snapshot({}, new, {file["file-path"] for file in live}, "replace", table.branch)
    return ", and compacted later"


# ── a range dropped ─────────────────────────────────────────────────────────────────────────────


@plant("range dropped")
def entry_dropped(history: History, r: random.Random) -> Planted | None:
    """Somebody built the branch anew and left a snapshot out. The index still tells of it."""
    table = filled(history, r, least=2)
    if table is None:
        return None
    commits = history.entries(table.name)
    complete = list(table.history(table.branch))[-1].parent is None
    # Without its first entry an expired ledger is one that was expired a little later.
    chosen = commits[0 if complete else 1 : -1]
    if not chosen:
        return None
    entry, snapshot = r.choice(chosen)
    if not reached(history).reaches(entry.end):
        return None
    table.forget(snapshot.id, table.branch)
    return Planted(
        f"{table.name}: the entry of batches {entry.batches} is gone",
        everyone(history, table.name),
        WRONG,
        tuple(entry.ranges),
    )


@plant("range dropped")
def file_dropped(history: History, r: random.Random) -> Planted | None:
    """A rewrite of manifests that lost one file."""
    table, file = some_file(history, r)
    if table is None:
        return None
    named = named_ranges(table, file["rows"])
    table.rewrite_manifests(table.branch, {file["file-path"]})
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {_rows(file)} are in no manifest any more{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=_count(history, file["rows"]),
    )


@plant("range dropped")
def rows_of_a_batch_dropped(history: History, r: random.Random) -> Planted | None:
    """A batch that the index knows nothing of any more, while the table has it."""
    table = filled(history, r)
    if table is None:
        return None
    rows = history.index.rows()
    ids = known(history, table)
    index_rows = [
        index_row
        for index_row in _listed(rows)
        if index_row["table_name"] == table.name and index_row["commit_id"] in ids
    ]
    if not index_rows:
        return None
    row = r.choice(index_rows)
    _edit(
        history, lambda index_row: None if index_row["commit_id"] == row["commit_id"] else index_row
    )
    ranges = [
        _range(index_row) for index_row in index_rows if index_row["commit_id"] == row["commit_id"]
    ]
    return Planted(
        f"the index has no row of batch {row['batch']} any more",
        everyone(history, table.name),
        GONE,
        tuple(ranges),
    )


@plant("range dropped")
def index_emptied(history: History, r: random.Random) -> Planted | None:
    """`DELETE FROM` the index: its ledger still says what it knew."""
    rows = [
        index_row
        for index_row in _listed(history.index.rows())
        if index_row["sink"] == history.sink
    ]
    if not rows:
        return None
    paths = {file["file-path"] for file in history.index.live()}
    history.index.snapshot({}, (), paths, "delete")
    return Planted(
        "the index has no rows any more",
        everyone(history, *history.tables),
        GONE,
        tuple(map(_range, rows)),
    )


@plant("range dropped")
def row_of_the_stream_dropped(history: History, r: random.Random) -> Planted | None:
    """One row of the index that tells of all tables."""
    ids = {
        i
        for entry, _ in entries(history.index.history("main"), history.sink)
        for i in entry.commit_ids
    }
    index_rows = [
        index_row
        for index_row in _listed(history.index.rows())
        if index_row["table_name"] == index.STREAM
        and index_row["commit_id"] in ids
        and index_row["topic"] != BATCHES.topic
    ]
    index_rows = [
        index_row for index_row in index_rows if not _only_of_the_stream(history, index_row)
    ]
    if not index_rows:
        return None
    row = r.choice(index_rows)
    _edit(history, lambda index_row: None if index_row == row else index_row)
    return Planted(
        f"the index has lost its row {_range(row)} of the whole stream",
        everyone(history),
        GONE,
        (_range(row),),
    )


@plant("range dropped")
def batch_skipped(history: History, r: random.Random) -> Planted | None:
    """The stream went on behind a range that nobody has: neither table nor index."""
    if not history.alone:
        return None
    commits = history.entries("db.t") if "db.t" in history.tables else []
    if len(commits) < 3:
        return None
    entry, snapshot = r.choice(commits[1:-1])
    ids = set(entry.commit_ids)
    table = history.tables["db.t"]
    for index_entry, where in list(entries(history.index.history("main"), history.sink)):
        if ids & set(index_entry.commit_ids):
            if not set(index_entry.commit_ids) <= ids:
                return None
            history.index.forget(where.id)
    table.forget(snapshot.id, table.branch)
    _edit(history, lambda index_row: None if index_row["commit_id"] in ids else index_row)
    return Planted(
        f"nobody has batches {entry.batches}",
        everyone(history, "db.t"),
        frozenset({"gap"}),
        tuple(entry.ranges),
    )


# ── a file added twice ──────────────────────────────────────────────────────────────────────────


@plant("file added twice")
def path_twice(history: History, r: random.Random) -> Planted | None:
    """Iceberg takes a file that it has already, and says nothing."""
    table, file = some_file(history, r)
    if table is None:
        return None
    table.snapshot({}, [file], branch=table.branch)
    return Planted(
        f"{table.name}: {_rows(file)} were added once more",
        frozenset({table.name}),
        TWICE,
        (file["file-path"],),
    )


@plant("file added twice")
def path_twice_in_a_manifest(history: History, r: random.Random) -> Planted | None:
    table, file = some_file(history, r)
    if table is None:
        return None
    table.forge(
        lambda live_file: [live_file] * (1 + (live_file.file is file and live_file.status < 2)),
        table.branch,
    )
    return Planted(
        f"{table.name}: {_rows(file)} are in a manifest twice",
        frozenset({table.name}),
        TWICE,
        (file["file-path"],),
    )


@plant("file added twice")
def copy_added(history: History, r: random.Random) -> Planted | None:
    """A copy of a file, or some of its rows once more: `INSERT INTO t SELECT … FROM t`."""
    table, file = some_file(history, r)
    if table is None or history.feed == "merged":
        return None
    rows = [row for row in file["rows"] if ours(row)]
    rows = rows if r.random() < 0.5 else r.sample(rows, r.randrange(1, len(rows) + 1))
    table.snapshot({}, table.write(rows, "00000-3-copy", whole=False), branch=table.branch)
    return Planted(
        f"{table.name}: {len(rows)} rows are there a second time",
        frozenset({table.name}),
        TWICE,
        named_ranges(table, rows),
        more=1,
    )


@plant("file added twice")
def copy_compacted(history: History, r: random.Random) -> Planted | None:
    """The same, and then all files were compacted into one."""
    planted = copy_added(history, r)
    if planted is None:
        return None
    (name,) = planted.tables
    table = history.tables[name]
    live = table.live(table.branch)
    new = table.write([row for file in live for row in file["rows"]], "00000-9-all", whole=False)
    table.snapshot({}, new, {file["file-path"] for file in live}, "replace", table.branch)
    return replace(planted, says=f"{planted.says}, and all is compacted", named=(ANYWHERE,))


@plant("file added twice")
def compaction_left_its_input(history: History, r: random.Random) -> Planted | None:
    table, file = some_file(history, r)
    if table is None:
        return None
    new = table.write(file["rows"], "00000-4-half", whole=False)
    table.snapshot({}, new, operation="replace", branch=table.branch)
    named = named_ranges(table, file["rows"])
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {_rows(file)} were rewritten and are there still{after}",
        frozenset({table.name}),
        TWICE,
        _or_table(named, after),
        more=1,
    )


@plant("file added twice")
def file_of_another_table(history: History, r: random.Random) -> Planted | None:
    """A file of one table of the sink, added to another: the same records in two places."""
    table, file = some_file(history, r)
    others = [
        candidate
        for _, candidate in sorted(history.tables.items())
        if candidate is not table
        and candidate.live(candidate.branch)
        and candidate.name in history.names
        and table is not None
        and candidate.ids == table.ids
        and candidate.split == table.split
    ]
    if table is None or not others or any(not ours(row) for row in file["rows"]):
        return None
    other = r.choice(others)
    other_rows = {row for other_file in other.live(other.branch) for row in other_file["rows"]}
    if not [row for row in file["rows"] if row not in other_rows]:
        return None
    other.snapshot({}, [file], branch=other.branch)
    return Planted(
        f"{other.name}: {_rows(file)} of {table.name} are added",
        frozenset({other.name}),
        TWICE,
        named_ranges(other, file["rows"]),
        more=1,
    )


@plant("file added twice")
def index_file_twice(history: History, r: random.Random) -> Planted | None:
    """Of the index: the same file, or its rows in another."""
    files = history.index.live()
    if not files:
        return None
    file = r.choice(files)
    if r.random() < 0.5:
        history.index.snapshot({}, [file])
    else:
        history.index.snapshot({}, [history.index.file(file["rows"], "copy")])
    rows = [
        index_row
        for index_row in _listed(file["rows"])
        if index_row["end_offset"] > index_row["start_offset"]
    ]
    tables = {row["table_name"] for row in rows}
    return Planted(
        "the index has rows twice", everyone(history, *tables), TWICE, tuple(map(_range, rows))
    )


@plant("file added twice")
def batch_committed_twice(history: History, r: random.Random) -> Planted | None:
    """A writer that forgot what it had done: the same ranges in another entry."""
    table = filled(history, r)
    if table is None:
        return None
    entry, snapshot = r.choice(history.entries(table.name))
    files = [
        table.again(live_file.file, live_file.file["rows"], f"{live_file.file['file-path']}-again")
        for live_file in table.filed(table.branch)
        if live_file.snapshot == snapshot.id
    ]
    once_more = replace(entry, commit_ids=(table.new_uuid(),), epoch=entry.epoch)
    table.snapshot(once_more.summary(), files, branch=table.branch)
    return Planted(
        f"{table.name}: batches {entry.batches} are committed twice",
        frozenset({table.name}),
        TWICE,
        tuple(entry.ranges),
    )


# ── a range shifted ─────────────────────────────────────────────────────────────────────────────


@plant("range shifted")
def entry_shifted(history: History, r: random.Random) -> Planted | None:
    """An entry that tells of other offsets than the batch had."""
    table = filled(history, r, least=2)
    if table is None:
        return None
    entry, snapshot = r.choice(history.entries(table.name)[1:])
    moved = r.choice(entry.ranges)
    by = r.choice([1, 1, 3, 40, -1])
    if moved.start + by < 0 or moved.partition == BATCHES:
        return None
    p = moved.partition
    wrong = replace(
        entry,
        begin=Cut({**entry.begin, p: moved.start + by}),
        end=Cut({**entry.end, p: moved.end + by}),
    )
    table.amend(snapshot.id, wrong.summary())
    where = Range(p, min(moved.start, moved.start + by), max(moved.end, moved.end + by))
    return Planted(
        f"{table.name}: the ledger says {moved} {by:+} of batches {entry.batches}",
        everyone(history, table.name),
        WRONG,
        (where,),
    )


@plant("range shifted")
def file_shifted(history: History, r: random.Random) -> Planted | None:
    """A file of a batch whose rows have other offsets than the batch's range: beyond its end."""
    own_files = _own_files(history)
    if not own_files:
        return None
    table, filed, entry = r.choice(own_files)
    rows = filed.file["rows"]
    (before,) = spans(rows)
    end = entry.end[before.partition]
    by = end - before.end + r.choice([1, 1, 2, 30])
    moved = [(topic, number, (offset or 0) + by) for topic, number, offset in rows]
    _replace_file(table, filed, table.again(filed.file, moved))
    (after,) = spans(moved)
    return Planted(
        f"{table.name}: a file holds {after} instead of {before}",
        frozenset({table.name}),
        WRONG,
        (before, after),
    )


@plant("range shifted")
def file_of_another_partition(history: History, r: random.Random) -> Planted | None:
    own_files = _own_files(history)
    if not own_files:
        return None
    table, filed, entry = r.choice(own_files)
    rows = filed.file["rows"]
    (before,) = spans(rows)
    topic, own_number = before.partition
    number = r.choice(
        [p.number for p in entry.end if p.topic == topic and p.number != own_number] or [9]
    )
    moved = [(topic, number, offset) for topic, _, offset in rows]
    _replace_file(table, filed, table.again(filed.file, moved))
    (after,) = spans(moved)
    return Planted(
        f"{table.name}: a file holds {after} instead of {before}",
        frozenset({table.name}),
        WRONG,
        (before, after),
    )


@plant("range shifted")
def index_row_shifted(history: History, r: random.Random) -> Planted | None:
    row = _some_row(history, r)
    if row is None:
        return None
    by = r.choice([1, 2, 50])
    new = {**row, "start_offset": row["start_offset"] + by, "end_offset": row["end_offset"] + by}
    _edit(history, lambda index_row: new if index_row == row else index_row)
    where = Range(_range(row).partition, row["start_offset"], row["end_offset"] + by)
    return Planted(
        f"the index says {_range(new)} instead of {_range(row)} of {row['table_name']}",
        everyone(history, row["table_name"]),
        WRONG,
        (where,),
    )


# ── a tail lost ─────────────────────────────────────────────────────────────────────────────────


@plant("tail lost")
def table_restored(history: History, r: random.Random) -> Planted | None:
    """One table is put back to an older metadata file, tags and all."""
    table = filled(history, r, least=2)
    if table is None:
        return None
    commits = history.entries(table.name)
    keep = r.randrange(1, len(commits))
    lost = [span for entry, _ in commits[keep:] for span in entry.ranges]
    position = reached(history)
    lost = [span for span in lost if span.end <= position.get(span.partition, 0)]
    if not lost:
        return None
    last = commits[keep - 1][1]
    for number, snapshot in list(table.snapshots.items()):
        if snapshot.sequence > last.sequence:
            del table.snapshots[number]
            del table.lists[number]
    table.refs = {name: number for name, number in table.refs.items() if number in table.snapshots}
    table.refs[table.branch] = last.id
    table.refs[history.tag_of(table)] = last.id
    return Planted(
        f"{table.name}: restored as it was after batch {commits[keep - 1][0].batches[1]}",
        everyone(history, table.name),
        frozenset({"gap"}),
        tuple(lost),
    )


@plant("tail lost")
def last_file_lost(history: History, r: random.Random) -> Planted | None:
    """The file with the highest offset of a partition is in no manifest."""
    table, filed = _last_file(history, r)
    if table is None:
        return None
    named = named_ranges(table, filed.file["rows"])
    table.forge(lambda live_file: [] if live_file.file is filed.file else [live_file], table.branch)
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {_rows(filed.file)}, the last ones, are gone{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=_count(history, filed.file["rows"]),
    )


@plant("tail lost")
def last_rows_lost(history: History, r: random.Random) -> Planted | None:
    """A file that ends too early: a writer that did not write everything it says."""
    table, filed = _last_file(history, r)
    if table is None or len(filed.file["rows"]) < 2:
        return None
    rows = sorted(filed.file["rows"], key=lambda row: (row[2] is not None, row))
    kept = rows[: r.randrange(1, len(rows))]
    lost = rows[len(kept) :]
    if not any(history.feed == "merged" or ours(row) for row in lost):
        return None
    named = named_ranges(table, rows)
    _replace_file(table, filed, table.again(filed.file, kept, filed.file["file-path"]))
    return Planted(
        f"{table.name}: a file lacks its last {len(lost)} rows",
        frozenset({table.name}),
        GONE,
        named,
        lost=_count(history, lost),
    )


# ── an index row edited ─────────────────────────────────────────────────────────────────────────


@plant("index row edited")
def number_edited(history: History, r: random.Random) -> Planted | None:
    """One number of one row, so that the row no longer adds up or joins."""
    row = _some_row(history, r, any_entry=True)
    if row is None or row["topic"] == BATCHES.topic:
        return None
    column = r.choice(
        ["end_offset", "start_offset", "written", "rejected", "skipped", "invisible", "merged"]
    )
    by = r.choice([1, -1, 7, 1000])
    if (row[column] or 0) + by < 0:
        by = 5
    new = {**row, column: (row[column] or 0) + by}
    if new["start_offset"] > new["end_offset"]:
        return None
    _edit(history, lambda index_row: new if index_row == row else index_row)
    where = Range(
        _range(row).partition,
        min(row["start_offset"], new["start_offset"]),
        max(row["end_offset"], new["end_offset"]),
    )
    return Planted(
        f"{row['table_name']}: the index's row of {_range(row)} has {column} {by:+}",
        everyone(history, row["table_name"]),
        WRONG,
        (where,),
    )


@plant("index row edited")
def fate_edited(history: History, r: random.Random) -> Planted | None:
    """A row that still adds up, and tells of another fate than the ledger."""
    row = _some_row(history, r)
    if row is None or row["topic"] == BATCHES.topic:
        return None
    fates = ["written", "rejected", "skipped", "invisible"]
    source = r.choice([fate for fate in fates if row[fate]] or [""])
    if not source:
        return None
    target = r.choice([fate for fate in fates if fate != source])
    many = r.randrange(1, row[source] + 1)
    new = {**row, source: row[source] - many, target: row[target] + many}
    _edit(history, lambda index_row: new if index_row == row else index_row)
    return Planted(
        f"{row['table_name']}: of {_range(row)} the index says {many} {target} that were {source}",
        everyone(history, row["table_name"]),
        WRONG,
        (_range(row),),
    )


@plant("index row edited")
def place_edited(history: History, r: random.Random) -> Planted | None:
    """A row that names another commit, snapshot or batch, or another table or partition."""
    row = _some_row(history, r)
    if row is None:
        return None
    wrong: dict[str, Any] = {
        "commit_id": history.index.new_uuid(),
        "batch": row["batch"] + r.choice([100, -1]),
        "partition": row["partition"] + 40,
        "topic": "another",
        "table_name": "db.another",
        "epoch": row["epoch"] + 50,
    }
    if row["table_name"] != index.STREAM and row["snapshot_id"]:
        wrong["snapshot_id"] = row["snapshot_id"] + 1
    column = r.choice(sorted(wrong))
    alone = (
        sum(
            index_row["commit_id"] == row["commit_id"]
            for index_row in _listed(history.index.rows())
        )
        < 2
    )
    if wrong["batch"] < 0 or alone:
        wrong["batch"] = 900
    new = {**row, column: wrong[column]}
    _edit(history, lambda index_row: new if index_row == row else index_row)
    return Planted(
        f"{row['table_name']}: the index's row of {_range(row)} has another {column}",
        everyone(history, row["table_name"], "db.another"),
        WRONG,
        (_range(row), _range(new)),
    )


@plant("index row edited")
def seen_edited(history: History, r: random.Random) -> Planted | None:
    """The lowest or highest offset that was seen lies outside of the range."""
    row = _some_row(history, r, any_entry=True)
    if row is None or row["min_offset"] is None:
        return None
    new = r.choice(
        [
            {**row, "max_offset": row["end_offset"] + r.randrange(9)},
            {**row, "min_offset": row["start_offset"] - 1},
            {**row, "min_offset": row["max_offset"] + 1},
        ]
    )
    _edit(history, lambda index_row: new if index_row == row else index_row)
    return Planted(
        f"{row['table_name']}: the index saw {new['min_offset']} to {new['max_offset']} "
        f"in {_range(row)}",
        everyone(history, row["table_name"]),
        WRONG,
        (_range(row),),
    )


@plant("index row edited")
def row_invented(history: History, r: random.Random) -> Planted | None:
    """A row of a batch that never was, behind the last or before the first."""
    row = _some_row(history, r)
    if row is None or row["topic"] == BATCHES.topic:
        return None
    index_rows = [
        index_row
        for index_row in _listed(history.index.rows())
        if index_row["table_name"] == row["table_name"]
        and _range(index_row).partition == _range(row).partition
        and index_row["sink"] == row["sink"]
    ]
    end = max(index_row["end_offset"] for index_row in index_rows)
    new = {
        **row,
        "start_offset": end,
        "end_offset": end + 7,
        "written": 7,
        "rejected": 0,
        "skipped": 0,
        "invisible": 0,
        "min_offset": end,
        "max_offset": end + 6,
        "commit_id": history.index.new_uuid(),
        "batch": row["batch"] + 1,
    }
    rows = pa.Table.from_pylist([new], schema=index.COLUMNS)
    history.index.snapshot({}, [history.index.file(rows, "invented")])
    return Planted(
        f"{row['table_name']}: the index has {_range(new)}, which nobody committed",
        everyone(history, row["table_name"]),
        WRONG,
        (_range(new),),
    )


# ── a snapshot rolled back ──────────────────────────────────────────────────────────────────────


@plant("snapshot rolled back")
def table_rolled_back(history: History, r: random.Random) -> Planted | None:
    """`rollback_to_snapshot`: the tag stays where it was."""
    table = filled(history, r)
    if table is None:
        return None
    lost = _roll_back(history, table, r)
    if not lost:
        return None
    more = r.choice(["", " and others write on", " and the rest is expired"])
    if "others" in more:
        table.snapshot({}, stranger(table, 3), branch=table.branch)
    elif more:
        table.expire([table.refs[table.branch]])
    return Planted(
        f"{table.name}: rolled back{more}", everyone(history, table.name), GONE, tuple(lost)
    )


@plant("snapshot rolled back")
def table_replaced(history: History, r: random.Random) -> Planted | None:
    """`CREATE OR REPLACE TABLE`: the name and the tags stay, and the branch begins anew."""
    table = filled(history, r)
    if table is None or table.branch != "main":
        return None
    lost = [span for entry, _ in history.entries(table.name) for span in entry.ranges]
    del table.refs["main"]
    if r.random() < 0.7:
        table.snapshot({}, stranger(table, 4))
    return Planted(
        f"{table.name}: replaced by another", everyone(history, table.name), GONE, tuple(lost)
    )


@plant("snapshot rolled back")
def all_rolled_back(history: History, r: random.Random) -> Planted | None:
    """Tables and index together, to the same batch: nothing is apart, and the tags tell."""
    commits = [
        (entry, snapshot)
        for entry, snapshot in entries(history.index.history("main"), history.sink)
        if entry.ranges
    ][::-1]
    if len(commits) < 2 or any("rewound" in line for line in history.diary):
        return None
    entry, snapshot = commits[r.randrange(len(commits) - 1)]
    before = reached(history)
    moves = []
    for table in history.tables.values():
        chain = list(table.history(table.branch))
        beyond = [
            i
            for i, ancestor in enumerate(chain)
            if (parsed := parse(ancestor.summary))
            and parsed.sink == history.sink
            and not entry.end.reaches(parsed.end)
        ]
        at = beyond[-1] + 1 if beyond else 0
        if at == len(chain):
            return None
        moves.append((table, chain[at].id))
    for table, number in moves:
        table.rollback(number, table.branch)
    history.index.rollback(snapshot.id)
    lost = [Range(p, entry.end.get(p, 0), o) for p, o in before.items() if entry.end.get(p, 0) < o]
    return Planted(
        f"all is rolled back to batch {entry.batches[1]}",
        everyone(history, *history.tables),
        GONE,
        tuple(lost),
    )


@plant("snapshot rolled back")
def index_rolled_back(history: History, r: random.Random) -> Planted | None:
    commits = [
        (entry, snapshot)
        for entry, snapshot in entries(history.index.history("main"), history.sink)
        if entry.ranges
    ][::-1]
    if len(commits) < 2:
        return None
    before = reached(history)
    history.index.rollback(commits[r.randrange(len(commits) - 1)][1].id)
    after = next(entries(history.index.history("main"), history.sink))[0].end
    lost = [Range(p, after.get(p, 0), o) for p, o in before.items() if after.get(p, 0) < o]
    if not lost:
        return None  # a rewind went there before
    return Planted(
        "the index is rolled back", everyone(history, *history.tables), GONE, tuple(lost)
    )


# ── a file removed by a foreign delete ──────────────────────────────────────────────────────────


@plant("file removed")
def file_deleted(history: History, r: random.Random) -> Planted | None:
    """`DELETE FROM t WHERE …` that covers whole files."""
    table, file = some_file(history, r)
    if table is None:
        return None
    more = [f for f in owned(history, table) if f is not file and r.random() < 0.2]
    rows = [row for deleted in (file, *more) for row in deleted["rows"]]
    named = named_ranges(table, rows)
    paths = {deleted["file-path"] for deleted in (file, *more)}
    table.snapshot({}, (), paths, "delete", table.branch)
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {len(rows)} rows are deleted with their files{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=_count(history, rows),
    )


@plant("file removed")
def file_overwritten(history: History, r: random.Random) -> Planted | None:
    """`INSERT OVERWRITE`: as many rows of somebody else instead."""
    table, file = some_file(history, r)
    if table is None or history.feed == "merged":
        return None
    new = stranger(table, len(file["rows"]))
    named = named_ranges(table, file["rows"])
    table.snapshot({}, new, {file["file-path"]}, "overwrite", table.branch)
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {_rows(file)} are overwritten{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=_count(history, file["rows"]),
    )


@plant("file removed")
def table_emptied(history: History, r: random.Random) -> Planted | None:
    """`TRUNCATE TABLE`."""
    table, _ = some_file(history, r)
    if table is None:
        return None
    live = table.live(table.branch)
    rows = [row for file in live for row in file["rows"]]
    named = named_ranges(table, rows)
    table.snapshot({}, (), {file["file-path"] for file in live}, "delete", table.branch)
    after = later(history, table, r)
    return Planted(
        f"{table.name}: all {len(rows)} rows are gone{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=_count(history, rows),
    )


# ── rows deleted by hand ────────────────────────────────────────────────────────────────────────


@plant("rows deleted by hand")
def rows_rewritten_away(history: History, r: random.Random) -> Planted | None:
    """Copy on write: the file is written anew without some of its rows."""
    table, file = some_file(history, r)
    if table is None:
        return None
    some, left = _some_rows(history, file, r)
    new = table.write(left, "00000-5-cow", whole=False) if left else []
    table.snapshot({}, new, {file["file-path"]}, "overwrite", table.branch)
    named = named_ranges(table, some)
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {len(some)} rows are deleted{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=len(some),
    )


def _repeated(rows: list[Row], r: random.Random) -> tuple[Row, Row] | None:
    """One row gets the offset of another of its partition: what is lost, and what is twice now. The
    file has as many rows and the same bounds."""
    rows.sort()
    inner = [
        i
        for i in range(1, len(rows) - 1)
        if rows[i][:2] == rows[i - 1][:2] == rows[i + 1][:2] and ours(rows[i])
    ]
    if not inner:
        return None
    at = r.choice(inner)
    lost, rows[at] = rows[at], rows[at - 1]
    return lost, rows[at]


@plant("rows deleted by hand")
def offset_updated(history: History, r: random.Random) -> Planted | None:
    """`UPDATE t SET _offset = 6 WHERE _offset = 5`: neither counts nor bounds change."""
    table, file = some_file(history, r)
    if table is None or history.feed == "merged":
        return None
    rows = [(*row,) for row in file["rows"] if ours(row)]
    if len(rows) < len(file["rows"]) or (changed := _repeated(rows, r)) is None:
        return None
    new = table.write(rows, "00000-9-update", whole=False)
    table.snapshot({}, new, {file["file-path"]}, "overwrite", table.branch)
    after = compacted(table, r)
    return Planted(
        f"{table.name}: {changed[0]} has the offset of {changed[1]}{after}",
        frozenset({table.name}),
        DOUBT,
        (*spans(changed), ANYWHERE),
    )


@plant("rows deleted by hand")
def offset_updated_and_expired(history: History, r: random.Random) -> Planted | None:
    """The same, and the sink expires the snapshot of the UPDATE: the table keeps what it was."""
    planted = offset_updated(history, r)
    if planted is None:
        return None
    (table,) = (history.tables[name] for name in planted.tables)
    heads = [table.refs[ref] for ref in ("main", table.branch) if ref in table.refs]
    expiring = [snapshot for snapshot in table.history(table.branch) if snapshot.id not in heads]
    partitions = {p for entry, _ in history.entries(table.name) for p in entry.end}
    plain = ReadOnlyTable(table.name, table.save(complete=True), {})
    commits = of_snapshots(filter(brings_rows, expiring), plain.added, partitions)
    if commits is not None:
        table.set_property(key_of(history.sink), commits.text())
    table.expire(heads)
    return replace(planted, says=f"{planted.says}, and expired by the sink")


@plant("rows deleted by hand")
def row_swapped(history: History, r: random.Random) -> Planted | None:
    """`DELETE` of one offset, and `INSERT` of another that is there."""
    table, file = some_file(history, r)
    if table is None or history.feed == "merged":
        return None
    rows = [(*row,) for row in file["rows"] if ours(row)]
    if len(rows) < len(file["rows"]) or (changed := _repeated(rows, r)) is None:
        return None
    lost, twice = changed
    rows.remove(twice)
    left = table.write(rows, "00000-9-delete", whole=False)
    table.snapshot({}, left, {file["file-path"]}, "overwrite", table.branch)
    again = table.write([twice], "00000-9-insert", whole=False)
    table.snapshot({}, again, branch=table.branch)
    after = compacted(table, r)
    return Planted(
        f"{table.name}: {lost} is deleted, {twice} is there twice{after}",
        frozenset({table.name}),
        DOUBT,
        (*spans(changed), ANYWHERE),
    )


@plant("rows deleted by hand")
def rows_hidden(history: History, r: random.Random) -> Planted | None:
    """Merge on read: delete files, by position or by equality."""
    table, file = some_file(history, r)
    if table is None:
        return None
    many = r.randrange(1, len(file["rows"]) + 1)
    made = table.hidden(file, range(many)) if r.random() < 0.6 else table.unequal(file, many)
    table.snapshot({}, [made], operation="delete", branch=table.branch)
    return Planted(
        f"{table.name}: {many} rows are hidden by a delete file",
        frozenset({table.name}),
        GONE,
        (ANYWHERE,),
    )


@plant("rows deleted by hand")
def index_rows_hidden(history: History, r: random.Random) -> Planted | None:
    """The same in the index: which rows are left, the reader has to find out."""
    row = _some_row(history, r)
    if row is None or _only_of_the_stream(history, row):
        return None
    for file in history.index.live():
        at = [i for i, index_row in enumerate(_listed(file["rows"])) if index_row == row]
        if at:
            delete = history.index.hidden(file, at)
            history.index.snapshot({}, [delete], operation="delete")
    return Planted(
        f"the index's row of {_range(row)} of {row['table_name']} is hidden",
        everyone(history, row["table_name"]),
        GONE,
        (_range(row),),
    )


@plant("rows deleted by hand")
def rows_hidden_and_compacted(history: History, r: random.Random) -> Planted | None:
    """The same, and a compaction has applied it: neither rows nor delete files are left."""
    table, file = some_file(history, r)
    if table is None:
        return None
    some, left = _some_rows(history, file, r)
    delete = table.hidden(file, range(len(some)))
    table.snapshot({}, [delete], operation="delete", branch=table.branch)
    new = table.write(left, "00000-6-applied", whole=False) if left else []
    removed = {file["file-path"], delete["file-path"]}
    table.snapshot({}, new, removed, "replace", table.branch)
    named = named_ranges(table, some)
    after = later(history, table, r)
    return Planted(
        f"{table.name}: {len(some)} rows were hidden and are gone{after}",
        frozenset({table.name}),
        GONE,
        _or_table(named, after),
        lost=len(some),
    )


# ── counts off by one ───────────────────────────────────────────────────────────────────────────


@plant("counts off by one")
def ledger_off(history: History, r: random.Random) -> Planted | None:
    """An entry that says one more or one less of a fate, so that what was written is off."""
    table = filled(history, r)
    if table is None:
        return None
    entry, snapshot = r.choice(history.entries(table.name))
    chosen = r.choice(entry.ranges)
    p = chosen.partition
    if p == BATCHES:
        wrong = replace(entry, rows=entry.rows + 1)
    else:
        fate = r.choice(["rejected", "skipped", "invisible"])
        had = entry.outcomes.get(p, OutcomeCounts())
        by = 1 if not getattr(had, fate) or r.random() < 0.5 else -1
        if by > 0 and not entry.counts(p).written:
            return None
        outcomes = {**entry.outcomes, p: replace(had, **{fate: getattr(had, fate) + by})}
        wrong = replace(entry, outcomes=outcomes)
    table.amend(snapshot.id, wrong.summary())
    return Planted(
        f"{table.name}: the ledger is off by one in {chosen}",
        everyone(history, table.name),
        WRONG,
        (chosen,),
    )


@plant("counts off by one")
def ledger_sum_off(history: History, r: random.Random) -> Planted | None:
    """The sums of an entry are not those of its ranges; or not what Iceberg says it added."""
    table = filled(history, r)
    if table is None:
        return None
    entry, snapshot = r.choice(history.entries(table.name))
    key = PREFIX + "counts"
    if r.random() < 0.3 and "added-records" in snapshot.summary:
        key = "added-records"
        value = str(int(snapshot.summary[key]) + r.choice([1, -1]))
    else:
        counts = json.loads(snapshot.summary[key])
        fate = r.choice(["written", "rejected", "skipped", "invisible"])
        value = json.dumps({**counts, fate: counts.get(fate, 0) + 1}, separators=(",", ":"))
    table.amend(snapshot.id, {key: value})
    return Planted(
        f"{table.name}: {key} of batches {entry.batches} is off by one",
        frozenset({table.name}),
        WRONG,
        tuple(entry.ranges),
    )


@plant("counts off by one")
def ledger_end_off(history: History, r: random.Random) -> Planted | None:
    """An end that is one offset too far, or one too near."""
    table = filled(history, r)
    if table is None:
        return None
    entry, snapshot = r.choice(history.entries(table.name))
    chosen = r.choice(entry.ranges)
    p, by = chosen.partition, r.choice([1, -1])
    if p == BATCHES or not reached(history).reaches({p: chosen.end}):
        return None
    if by < 0 and not entry.counts(p).written:
        return None
    wrong = replace(entry, end=Cut({**entry.end, p: chosen.end + by}))
    table.amend(snapshot.id, wrong.summary())
    where = Range(p, chosen.start, chosen.end + 1)
    return Planted(
        f"{table.name}: the ledger ends {chosen} {by:+}",
        everyone(history, table.name),
        WRONG,
        (where,),
    )


@plant("counts off by one")
def manifest_off(history: History, r: random.Random) -> Planted | None:
    """A record count that is not the file's."""
    table, file = some_file(history, r)
    if table is None:
        return None
    named = named_ranges(table, file["rows"])
    by = r.choice([1, -1])
    wrong = {**file, "record-count": file["record-count"] + by}
    table.forge(
        lambda live_file: [replace(live_file, file=wrong) if live_file.file is file else live_file],
        table.branch,
    )
    return Planted(
        f"{table.name}: a manifest says {by:+} of {_rows(file)}",
        frozenset({table.name}),
        WRONG,
        named,
        lost=by < 0,
        more=by > 0,
    )


@plant("counts off by one")
def index_off(history: History, r: random.Random) -> Planted | None:
    row = _some_row(history, r, any_entry=True)
    if row is None or row["topic"] == BATCHES.topic:
        return None
    fate = r.choice(["written", "rejected", "skipped", "invisible"])
    by = 1 if not row[fate] or r.random() < 0.5 else -1
    new = {**row, fate: row[fate] + by}
    _edit(history, lambda index_row: new if index_row == row else index_row)
    return Planted(
        f"{row['table_name']}: the index's row of {_range(row)} says {fate} {by:+}",
        everyone(history, row["table_name"]),
        WRONG,
        (_range(row),),
    )


# ── for `--deep` ────────────────────────────────────────────────────────────────────────────────


@deep
def offset_repeated(history: History, r: random.Random) -> Planted | None:
    """A row with the offset of its neighbour: one is missing, one is there twice, and the file has
    as many rows and the same bounds."""
    table, file = some_file(history, r)
    if table is None or history.feed == "merged" or not history.entries(table.name):
        return None
    rows = [row for row in file["rows"] if ours(row)]
    if len(rows) < len(file["rows"]) or (changed := _repeated(rows, r)) is None:
        return None
    lost, twice = changed
    (filed,) = [live_file for live_file in table.filed(table.branch) if live_file.file is file]
    _replace_file(table, filed, table.again(file, rows))
    return Planted(
        f"{table.name}: {lost} has the offset of its neighbour",
        frozenset({table.name}),
        WRONG,
        tuple(spans([lost, twice])),
    )


@deep
def rows_exchanged(history: History, r: random.Random) -> Planted | None:
    """In a file of several partitions: one row less of one, one more of another."""
    table, file = some_file(history, r)
    if table is None or history.feed == "merged" or not history.entries(table.name):
        return None
    rows = sorted(row for row in file["rows"] if ours(row))
    parts = sorted({row[:2] for row in rows})
    if len(parts) < 2 or len(rows) < len(file["rows"]):
        return None
    one, other = r.sample(parts, 2)
    lost = r.choice([row for row in rows if row[:2] == one])
    again = r.choice([row for row in rows if row[:2] == other])
    rows.remove(lost)
    (filed,) = [live_file for live_file in table.filed(table.branch) if live_file.file is file]
    _replace_file(table, filed, table.again(file, [*rows, again]))
    return Planted(
        f"{table.name}: {lost} is gone, and {again} is there twice",
        frozenset({table.name}),
        WRONG,
        tuple(spans([lost, again])),
    )


@deep
def manifest_lies(history: History, r: random.Random) -> Planted | None:
    """A manifest whose bounds or counts of a column are not the file's: filters lose rows."""
    table, file = some_file(history, r)
    if table is None or not history.entries(table.name):
        return None
    key = r.choice(["value-counts", "upper-bounds"])
    bounds = file.get(key, {"keys": [], "values": []})
    others = [i for i, column in enumerate(bounds["keys"]) if column not in table.ids]
    lower = dict(zip(*file.get("lower-bounds", {"keys": [], "values": []}).values(), strict=True))
    if key == "upper-bounds":  # a column with several values, said to have the lowest alone
        others = [i for i in others if lower[bounds["keys"][i]] != bounds["values"][i]]
    if not others:
        return None
    at = r.choice(others)
    wrong = lower[bounds["keys"][at]] if key == "upper-bounds" else bounds["values"][at] + 1
    values = [*bounds["values"][:at], wrong, *bounds["values"][at + 1 :]]
    (filed,) = [live_file for live_file in table.filed(table.branch) if live_file.file is file]
    _replace_file(table, filed, {**file, key: {"keys": bounds["keys"], "values": values}})
    return Planted(
        f"{table.name}: {key} of column {bounds['keys'][at]} are not those of {file['file-path']}",
        frozenset({table.name}),
        frozenset({"unaccounted"}),
        (file["file-path"],),
    )


# ── doing it ────────────────────────────────────────────────────────────────────────────────────


def _count(history: History, rows: Sequence[Row]) -> int:
    """Those of the sink."""
    return sum(history.feed == "merged" or ours(row) for row in rows)


def _rows(file: dict[str, Any]) -> str:
    return f"{len(file['rows'])} rows ({', '.join(map(str, spans(file['rows'])[:3]))})"


def _or_table(named: tuple[Range | str, ...], after: str) -> tuple[Range | str, ...]:
    """What was compacted later is mixed."""
    return (*named, ANYWHERE) if after else named


def _listed(rows: pa.Table) -> list[dict[str, Any]]:
    return list(rows.to_pylist())


def _range(row: dict[str, Any]) -> Range:
    return Range(Partition(row["topic"], row["partition"]), row["start_offset"], row["end_offset"])


def _edit(history: History, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """`UPDATE` or `DELETE` on the index: the files that hold such rows are written anew."""
    new, gone = [], set()
    for file in history.index.live():
        rows = _listed(file["rows"])
        changed = [edited for row in rows if (edited := change(row)) is not None]
        if changed != rows:
            gone.add(file["file-path"])
            if changed:
                table = pa.Table.from_pylist(changed, schema=index.COLUMNS)
                new.append(history.index.file(table, "edited"))
    if gone:  # or a forgotten snapshot had them all
        history.index.snapshot({}, new, gone, "overwrite")


def _some_row(history: History, r: random.Random, any_entry: bool = False) -> dict[str, Any] | None:
    """A row of the index whose entry some ledger still has; or any row at all."""
    rows = [
        index_row
        for index_row in _listed(history.index.rows())
        if index_row["sink"] == history.sink
    ]
    if not any_entry:
        ids = {name: known(history, table) for name, table in history.tables.items()}
        ids[index.STREAM] = {
            i
            for entry, _ in entries(history.index.history("main"), history.sink)
            for i in entry.commit_ids
        }
        rows = [
            index_row
            for index_row in rows
            if index_row["commit_id"] in ids.get(index_row["table_name"], ())
        ]
    return r.choice(rows) if rows else None


def _only_of_the_stream(history: History, row: dict[str, Any]) -> bool:
    """The only row of a batch that tells of all tables: without it the batch looks as if it were of
    a time when the sink had one table, whose own row tells the same."""
    if row["table_name"] != index.STREAM:
        return False
    same = [
        index_row
        for index_row in _listed(history.index.rows())
        if index_row["table_name"] == index.STREAM and index_row["commit_id"] == row["commit_id"]
    ]
    return len(same) == 1


def _own_files(history: History) -> list[tuple[Table, Filed, LedgerEntry]]:
    """Files as a sink wrote them, of one partition and one batch, beside others of that kind."""
    own_files = []
    for name, table in sorted(history.tables.items()):
        filed = [
            live_file
            for live_file in table.filed(table.branch)
            if live_file.file["content"] == "data"
        ]
        plain = all(
            "lower-bounds" in f.file and len({row[:2] for row in f.file["rows"]}) == 1
            for f in filed
        )
        if not plain or history.feed == "merged":
            continue
        made = {snapshot.id: entry for entry, snapshot in history.entries(name)}
        own_files += [
            (table, live_file, made[live_file.snapshot])
            for live_file in filed
            if live_file.snapshot in made
            and len(made[live_file.snapshot].commit_ids) == 1
            and ours(live_file.file["rows"][0])
        ]
    return own_files


def _last_file(history: History, r: random.Random) -> tuple[Table, Filed] | tuple[None, None]:
    """The file with the highest offset of a partition, or the newest one of rows without any."""
    last: dict[tuple[str, Any], tuple[int, Table, Filed]] = {}
    for name, table in sorted(history.tables.items()):
        own_ids = {id(file) for file in owned(history, table)}
        for live_file in table.filed(table.branch):
            if id(live_file.file) not in own_ids:
                continue
            for row in live_file.file["rows"]:
                if ours(row) or history.feed == "merged":
                    high = live_file.sequence if row[2] is None else row[2]
                    if high > last.get((name, row[:2]), (-1,))[0]:
                        last[name, row[:2]] = (high, table, live_file)
    if not last:
        return None, None
    _, table, filed = r.choice(list(last.values()))
    return table, filed


def _replace_file(table: Table, old: Filed, new: dict[str, Any]) -> None:
    table.forge(
        lambda live_file: [replace(live_file, file=new) if live_file is old else live_file],
        table.branch,
    )


def _some_rows(
    history: History, file: dict[str, Any], r: random.Random
) -> tuple[list[Row], list[Row]]:
    """Some rows of the sink in a file, and those that are left."""
    every = history.feed == "merged"
    at = [i for i, row in enumerate(file["rows"]) if every or ours(row)]
    chosen = set(r.sample(at, r.randrange(1, len(at) + 1)))
    rows = file["rows"]
    return [rows[i] for i in sorted(chosen)], [r for i, r in enumerate(rows) if i not in chosen]


def _roll_back(history: History, table: Table, r: random.Random) -> list[Range]:
    """To an older snapshot, so that an entry with data is lost; the ranges that are."""
    chain: list[Snapshot] = list(table.history(table.branch))
    newest = next(
        i
        for i, snapshot in enumerate(chain)
        if (e := parse(snapshot.summary)) and e.ranges and e.sink == history.sink
    )
    if newest + 1 >= len(chain):
        return []
    to = r.randrange(newest + 1, len(chain))
    lost = [
        span
        for snapshot in chain[:to]
        if (entry := parse(snapshot.summary)) and entry.sink == history.sink
        for span in entry.ranges
    ]
    table.rollback(chain[to].id, table.branch)
    return lost


# ── the cases ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Score:
    """What is known of some cases."""

    planted: Counter[str] = field(default_factory=Counter)
    detected: Counter[str] = field(default_factory=Counter)
    exact: int = 0
    #: found, and the verdict could be no more than `cannot tell`
    unsure: int = 0
    clean: int = 0
    false_alarms: int = 0
    untold: int = 0
    deep_planted: int = 0
    deep_found: int = 0
    #: clean histories in which something happened
    happened: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def __iadd__(self, other: Score) -> Score:
        for name in ("planted", "detected", "happened"):
            getattr(self, name).update(getattr(other, name))
        for name in (
            "exact",
            "unsure",
            "clean",
            "false_alarms",
            "untold",
            "deep_planted",
            "deep_found",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.complaints += other.complaints
        return self


HAPPENINGS = {
    "compaction": "files are compacted",
    "expiry": "snapshots are expired",
    "evolution": "a column is added",
    "index compaction": "files are one",
    "index expiry": "snapshots of the index",
    "runs": "run 2",
    "replay": "dead letters are replayed",
    "foreign rows": "foreign rows",
    "lost records": "without the records",
    "manifests rewritten": "manifests are rewritten",
    "tags and branches": "tags and branches",
    "rewinds": "rewound to",
    "mistakes undone": "a mistake is undone",
    "two sinks": "another sink writes",
    "a hundred partitions": "[60]",
}


def cases(
    kind: str, seed: int, folder: Path, way: Plant | None = None
) -> Iterator[tuple[History, Plant, random.Random]]:
    """Histories, each with one way of the kind to try on it."""
    for attempt in range(TRIES):
        r = random.Random(f"plant {kind} {seed} {attempt}")
        where = folder / f"{seed}-{attempt}"
        try:
            history = History(where, f"{kind} {seed} {attempt}", real=kind == "deep").live()
        except Expired:  # the sink stops, and rightly: an expiry took what would tell where it is
            continue
        yield history, way or r.choice(DEEP if kind == "deep" else KINDS[kind]), r


def case(
    seed: int, folder: Path, kind: str = "", story: bool = False, way: Plant | None = None
) -> Score:
    """One clean history and one that is corrupted; by its seed always the same."""
    kind = kind or sorted(KINDS)[seed % len(KINDS)]
    score = Score()
    for history, chosen, r in cases(kind, seed, folder, way):
        try:
            before = audited(history, deep=kind == "deep")
            judged = _judge_clean(seed, history, before)
            planted = chosen(history, r)
            if planted is not None and not planted.tellable(history):
                planted = planted.at_least(before)
            if planted is None:
                continue
            score += judged
            name = f"{kind}: {chosen.__name__}"
            if story:
                say("\n".join([*history.diary, f"→ {name}: {planted.says}"]))
            if kind == "deep" and audited(history).verdict != "proven":
                continue  # the metadata tells it as well
            after = audited(history, deep=kind == "deep")
            _judge(score, seed, name, planted, after)
            if seed % 4 == 0 and kind != "deep" and planted.by(after):
                _judge_by_name(score, seed, name, planted, history)
            if story:
                for report in after.reports:
                    say(f"{report.table}, sink {report.sink}: {report.verdict}")
                    say("".join(f"  {finding}\n" for finding in report.findings))
            return score
        except Exception as error:  # a refusal or a crash is no verdict; the others go on
            where = traceback.extract_tb(error.__traceback__)[-1]
            score.complaints.append(
                f"seed {seed}: {kind}: {chosen.__name__}: {type(error).__name__}: {error} "
                f"({Path(where.filename).name}:{where.lineno})"
            )
            return score
        finally:
            shutil.rmtree(history.folder, ignore_errors=True)
    score.complaints.append(f"seed {seed}: {kind}: no history in {TRIES} could suffer it")
    return score


def _judge_clean(seed: int, history: History, before: evidence.AuditResult) -> Score:
    score = Score(clean=1)
    score.happened.update(
        word for word, text in HAPPENINGS.items() if any(text in line for line in history.diary)
    )
    score.happened.update(
        [
            history.topics.style,
            f"feed of {history.feed}",
            "one table" if history.alone else "several tables",
        ]
    )
    bad = [report for report in before.reports if report.verdict != "proven"]
    unclear = {name for name, table in history.tables.items() if history.untold(table)}
    if all(report.verdict == "cannot_tell" and report.table in unclear for report in bad):
        score.untold += bool(bad)
        return score
    score.false_alarms += 1
    for report in bad:
        score.complaints.append(
            f"seed {seed}: false alarm: {report.table}, sink {report.sink}: "
            + "; ".join(map(str, report.findings))
        )
    return score


def _judge(
    score: Score, seed: int, name: str, planted: Planted, after: evidence.AuditResult
) -> None:
    finding = planted.by(after)
    if name.startswith("deep"):
        score.deep_planted += 1
        score.deep_found += finding is not None
    else:
        score.planted[name] += 1
        score.detected[name] += finding is not None
        score.exact += finding is not None and planted.exactly(finding)
        score.unsure += finding is not None and finding.kind == "cannot_tell"
    if finding is None:
        findings = [
            f"{report.table}: {text}" for report in after.reports for text in report.findings
        ]
        score.complaints.append(
            f"seed {seed}: missed: {name}: {planted.says}; expected "
            f"{'/'.join(sorted(planted.kinds))} of {planted.named[:3]}; found "
            f"{findings or 'proven'}"
        )


def _judge_by_name(score: Score, seed: int, name: str, planted: Planted, history: History) -> None:
    """The table by its name alone must tell it too; it names its index itself."""
    for table in sorted(planted.tables & set(history.tables)):
        if planted.by(audited(history, by_name=table)):
            return
    if planted.tables & set(history.tables):
        score.complaints.append(f"seed {seed}: missed by name: {name}: {planted.says}")


def some(seeds: Sequence[int], kind: str = "") -> Score:
    """Cases in a folder of their own."""
    pa.set_cpu_count(1)
    score = Score()
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="planted-", dir=root) as folder:
        for seed in seeds:
            score += case(seed, Path(folder), kind)
    return score


def planted(count: int, first: int, processes: int) -> Score:
    begun = time.monotonic()
    score, done, next_word = Score(), 0, 5.0
    end = first + count
    jobs = [(list(range(i, min(i + 20, end))), "") for i in range(first, end, 20)]
    jobs += [([i], "deep") for i in range(first, first + max(1, count // 40))]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(some, *job) for job in jobs]):
            part = future.result()
            score += part
            for complaint in part.complaints:
                say(complaint)
            done += part.clean
            if (elapsed := time.monotonic() - begun) > next_word:
                say(f"{done} cases, {done / elapsed:.0f} a second")
                next_word = elapsed + 5
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this case alone, with its story")
    parser.add_argument("--kind", default="", help="of the case: one of the nine, or deep")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.seed is not None:
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            score = case(given.seed, Path(folder), given.kind, story=True)
        say("\n".join(score.complaints))
    else:
        begun = time.monotonic()
        score = planted(given.count, given.first, given.processes)
        seconds = time.monotonic() - begun
        for name, many in sorted(score.planted.items()):
            say(f"{name:55} {score.detected[name]:5} of {many:5}")
        say(f"for --deep alone: {score.deep_found} of {score.deep_planted}")
        say(", ".join(f"{word}: {many}" for word, many in score.happened.most_common()))
        say(f"{seconds:.0f} s, {score.clean / seconds:.0f} cases a second")
    kinds = Counter[str]()
    for name, many in score.planted.items():
        kinds[name.partition(":")[0]] += many
    print(
        json.dumps(
            {
                "planted": sum(score.planted.values()),
                "found": sum(score.detected.values()),
                "clean": score.clean,
                "false_alarms": score.false_alarms,
                "cannot_tell": score.untold,
                "exact_ranges": score.exact,
                "found_as_cannot_tell": score.unsure,
                "kinds": dict(sorted(kinds.items())),
                "ways": len(score.planted),
                "deep": [score.deep_found, score.deep_planted],
            }
        )
    )
    right = not score.complaints and score.detected == score.planted and not score.false_alarms
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
