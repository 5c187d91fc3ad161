"""Is every offset there exactly once? Proven from metadata alone, without reading data.

Two witnesses are compared. The ledger: the entries in the table's snapshots must join without hole
or overlap, partition by partition. The manifests: the rows that the live data files hold, by
their own counts and bounds of the offset columns, must be the rows the ledger says were written.

What a ledger can prove is one of two things, and the report says which. Of *records*: every offset
of every range is written, rejected, skipped or invisible. Of *batches*, where rows stand for
several records or none, or the source has no offsets: every range of the source was processed in
exactly one committed batch, and the rows in the table are those the batches wrote.

A sink and the one that replays its dead letters write to the same tables. Their rows add up, and
each has a ledger of its own: the sink's tells of records, the other's of batches.

This room does not import `commit`: the proof must not lean on what it proves.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from frazil.core.errors import Foreign
from frazil.core.offsets import BATCHES, Partition, Range
from frazil.table.ledger import Counts, Entry, Snapshot, head, parse

#: What the id of a sink that replays has behind the id of the sink whose dead letters they are.
REPLAY = ".replay"
#: Table property with the names of the topic, partition, offset and timestamp columns.
COLUMNS_PROPERTY = "frazil.columns"
#: Property of the index, with the sink's id behind it: table → uuid, as JSON.
TABLES_PROPERTY = "frazil.tables"


class Table(Protocol):
    """What the audit needs of a table."""

    @property
    def schema(self) -> str: ...
    @property
    def properties(self) -> dict[str, str]: ...
    def data_files(self, branch: str) -> Iterator[dict[str, Any]]: ...


class Index(Protocol):
    """What the audit needs of the offset index."""

    def history(self, branch: str) -> Iterator[Snapshot]: ...
    def tagged(self, tag: str) -> Snapshot | None: ...
    @property
    def properties(self) -> dict[str, str]: ...


def known_tables(index: Index, sink: str) -> dict[str, str]:
    """The tables that a sink's position counts on: name → uuid."""
    entry = head(index.history("main"), sink, index.tagged(f"frazil/{sink}")).entry
    if entry is None:
        return {}
    return said_tables(entry.tables, index.properties)


def said_tables(said: Mapping[str, str] | str, properties: Mapping[str, str]) -> dict[str, str]:
    """Of an entry of the index: its own words, or the property that it names."""
    if not isinstance(said, str):
        return dict(said)
    if said not in properties:
        raise Foreign(f"cannot tell the tables of a sink: the index lacks its property {said}")
    return dict(json.loads(properties[said]))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A live data file as its manifest describes it."""

    path: str
    rows: int
    #: whose records it holds; None where its bounds span several topic partitions
    partition: Partition | None
    #: lowest and highest offset in it
    offsets: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict on one topic partition."""

    range: Range
    counts: Counts
    gaps: tuple[Range, ...]
    overlaps: tuple[Range, ...]
    #: rows in the live files; None where files hold several partitions and only the sum can tell
    rows: int | None

    @property
    def by_record(self) -> bool:
        """Does it speak of single records?"""
        return self.range.partition != BATCHES and not self.counts.merged

    @property
    def proven(self) -> bool:
        if self.gaps or self.overlaps:
            return False
        if self.range.partition == BATCHES:
            return True
        return len(self.range) == self.counts.offsets and (
            self.rows is None or not self.by_record or self.rows == self.counts.written
        )


@dataclass(frozen=True, slots=True)
class Report:
    table: str
    sink: str
    lines: tuple[Line, ...]
    commits: int
    findings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def written(self) -> int:
        return sum(line.counts.written for line in self.lines)

    @property
    def proves(self) -> str:
        """`records` or `batches`: of what the verdict speaks."""
        counted = [line for line in self.lines if line.range.partition != BATCHES]
        rows = sum(line.counts.written for line in self.lines if line.range.partition == BATCHES)
        by_record = counted and not rows and all(line.by_record for line in counted)
        return "records" if by_record else "batches"

    @property
    def verdict(self) -> str:
        """`proven`, or the name of the worst that was found."""
        if any(line.gaps for line in self.lines):
            return "gap"
        if any(line.overlaps for line in self.lines):
            return "overlap"
        if any(not line.proven for line in self.lines):
            return "unaccounted"
        if self.findings:
            return self.findings[0].partition(":")[0]
        return "proven"

    def values(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "table": self.table,
            "sink": self.sink,
            "verdict": self.verdict,
            "proves": self.proves,
            "commits": self.commits,
            "written": self.written,
            "findings": list(self.findings),
            "partitions": [
                {
                    "topic": line.range.partition.topic,
                    "partition": line.range.partition.number,
                    "start": line.range.start,
                    "end": line.range.end,
                    "written": line.counts.written,
                    "rejected": line.counts.rejected,
                    "skipped": line.counts.skipped,
                    "invisible": line.counts.invisible,
                    "merged": line.counts.merged,
                    "elsewhere": line.counts.elsewhere,
                    "rows_in_files": line.rows,
                    "gaps": [[r.start, r.end] for r in line.gaps],
                    "overlaps": [[r.start, r.end] for r in line.overlaps],
                }
                for line in self.lines
            ],
        }


def live_files(table: Table, branch: str) -> list[DataFile]:
    """What the manifests say about the live data files, bounds of the origin columns included."""
    names = table.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset").split(",")
    ids = {field["name"]: field["id"] for field in json.loads(table.schema)["fields"]}
    topic, partition, offset = (ids.get(name) for name in names[:3])
    found = []
    for file in table.data_files(branch):
        low, high = _bounds(file, "lower-bounds"), _bounds(file, "upper-bounds")
        whose, span = None, None
        if topic in low and low.get(partition) and low[topic] == high.get(topic):
            if low[partition] == high.get(partition):
                whose = Partition(low[topic].decode(), int.from_bytes(low[partition], "little"))
            if offset in low and offset in high:
                span = (
                    int.from_bytes(low[offset], "little"),
                    int.from_bytes(high[offset], "little"),
                )
        found.append(DataFile(file["file-path"], file["record-count"], whose, span))
    return found


def _bounds(file: Mapping[str, Any], key: str) -> dict[int | None, bytes]:
    bounds = file.get(key) or {"keys": [], "values": []}
    return {
        key: bytes.fromhex(value)
        for key, value in zip(bounds["keys"], bounds["values"], strict=True)
    }


def audit(
    table: str, history: Iterable[Snapshot], files: Sequence[DataFile], sink: str = ""
) -> list[Report]:
    """One report per sink that wrote to the table (or for `sink` alone).

    `history` is the branch's ancestry, newest first; `files` are the live data files.
    """
    snapshots = list(history)[::-1]
    complete = not snapshots or snapshots[0].parent is None
    entries: dict[str, list[Entry]] = {}
    foreign = 0  # rows that others added, less those they removed
    removed = False
    for snapshot in snapshots:
        entry = parse(snapshot.summary)
        if entry is not None:
            entries.setdefault(entry.sink, []).append(entry)
        else:
            added = int(snapshot.summary.get("added-records", 0))
            deleted = int(snapshot.summary.get("deleted-records", 0))
            foreign += added - deleted
            # A compaction replaces rows by the same rows. Whatever else takes rows away, or hides
            # them behind delete files, may have taken ours.
            rewritten = snapshot.operation == "replace" and added == deleted
            removed |= deleted > 0 and not rewritten
            removed |= int(snapshot.summary.get("added-delete-files", 0)) > 0
    reports = []
    rows = {name: sum(each.total.written for each in mine) for name, mine in entries.items()}
    writers = {name for name, mine in entries.items() if any(each.ranges for each in mine)}
    for name, mine in sorted(entries.items()):
        if sink and name != sink:
            continue
        companion = name.removesuffix(REPLAY) if name.endswith(REPLAY) else name + REPLAY
        reports.append(
            _report(
                table, name, mine, files, complete, writers <= {name, companion},
                rows.get(companion, 0), None if removed else foreign,
            )
        )  # fmt: skip
    return reports


def _report(
    table: str,
    sink: str,
    entries: Sequence[Entry],
    files: Sequence[DataFile],
    complete: bool,
    alone: bool,
    beside: int,
    foreign: int | None,
) -> Report:
    """`beside`: rows of the sink that replays this one's dead letters, or of the one it does so
    for. Whose a file is, its name tells as long as it was not compacted."""
    findings = []
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        findings.append(f"overlap: {len(twice)} data files are in the table twice: {twice[0]}")
    told = alone and complete
    mixed = [file for file in files if beside and f"/frazil-{sink}-" not in file.path]
    lines = _lines(entries, files if told else [], {file.partition for file in mixed})
    findings += _unchained(entries)
    if told:
        findings += _misplaced(lines, files, {file.path for file in mixed})
    if not complete:
        findings.append(
            "cannot tell: snapshots before the oldest one left were expired; the ranges above are "
            "those the remaining ledger proves"
        )
    elif not alone:
        findings.append(
            "cannot tell: several sinks write to this table; its rows are not told apart"
        )
    elif foreign is None:
        findings.append("unaccounted: rows were removed by a commit that is not the sink's")
    else:
        live = sum(file.rows for file in files)
        expected = sum(line.counts.written for line in lines) + beside + foreign
        if live != expected:
            findings.append(
                f"unaccounted: the manifests hold {live} rows; the ledger says {expected}"
            )
    commits = sum(1 for entry in entries if entry.ranges)
    return Report(table, sink, tuple(lines), commits, tuple(findings))


def _unchained(entries: Sequence[Entry]) -> list[str]:
    """Where an entry does not begin at the very place of Spark's sources where the last one ended.

    Places are compared as they are. A sink that read Kafka by itself has none.
    """
    found, here = [], ""
    for entry in entries:
        before, after = entry.source
        if here and before and before != here:
            found.append(f"gap: batch {entry.batches[0]} begins at {before}, and the one before it "
                         f"ends at {here}")  # fmt: skip
        here = after
    return found


def _misplaced(
    lines: Sequence[Line], files: Sequence[DataFile], mixed: Collection[str]
) -> list[str]:
    """Offsets that the files' own bounds put outside the ledger's ranges, or in twice.

    What was replayed may lie outside: a record that no rule had a table for is in no table's
    ledger. In twice it may not be.

    Files whose bounds overlap share at most as many offsets as their bounds span together: more
    rows than that, and some offset is there twice.
    """
    found = []
    for line in (each for each in lines if each.by_record):
        mine = sorted(
            (f.offsets, f.rows, f.path in mixed)
            for f in files
            if f.partition == line.range.partition and f.offsets
        )
        low, high, rows = 0, -1, 0
        for (start, end), count, replayed in mine:
            if not replayed and (start < line.range.start or end >= line.range.end):
                found.append(f"unaccounted: a data file holds {line.range.partition} "
                             f"[{start}, {end + 1}); the ledger has {line.range}")  # fmt: skip
            if start > high:
                low, high, rows = start, end, count
            else:
                high, rows = max(high, end), rows + count
            if rows > high - low + 1:
                found.append(f"overlap: {rows} rows of {line.range.partition} lie in the "
                             f"{high - low + 1} offsets [{low}, {high + 1})")  # fmt: skip
    return found


def _lines(
    entries: Sequence[Entry],
    files: Sequence[DataFile],
    mixed: Collection[Partition | None] = (),
) -> list[Line]:
    """`mixed`: partitions of which others wrote rows as well, where only the sum can tell."""
    gaps: dict[Partition, list[Range]] = {}
    overlaps: dict[Partition, list[Range]] = {}
    counts: dict[Partition, Counts] = {}
    first: dict[Partition, int] = {}
    reached: dict[Partition, int] = {}
    for entry in entries:
        for partition, end in entry.end.items():
            begin = entry.begin[partition]
            first.setdefault(partition, begin)
            here = reached.setdefault(partition, begin)
            if begin > here:
                gaps.setdefault(partition, []).append(Range(partition, here, begin))
            elif begin < here:
                twice = Range(partition, begin, min(here, max(begin, end)))
                if len(twice):
                    overlaps.setdefault(partition, []).append(twice)
            reached[partition] = max(here, end)
            counts[partition] = counts.get(partition, Counts()) + entry.counts(partition)
    rows: dict[Partition, int | None] = dict.fromkeys((p for p in first if p != BATCHES), 0)
    rows |= dict.fromkeys(p for p in mixed if p in rows)
    for file in files:
        if file.partition in mixed and file.partition is not None:
            continue
        if file.partition is None or file.partition not in rows:
            rows = dict.fromkeys(rows)  # a compacted or foreign file: only the sum can tell
            break
        so_far = rows[file.partition]
        rows[file.partition] = None if so_far is None else so_far + file.rows
    if not files:
        rows = dict.fromkeys(rows)
    return [
        Line(
            Range(partition, first[partition], reached[partition]),
            counts[partition],
            tuple(gaps.get(partition, ())),
            tuple(overlaps.get(partition, ())),
            rows.get(partition),
        )
        for partition in sorted(first)
    ]
