"""Finds a boundary that all tables of a sink can be rewound to, and the changes needed. Pure.

A *boundary* is the cut after one batch of the index. A table can be rewound to it if one of its
snapshots holds exactly the table's records below the cut. Absorbed batches share a snapshot, so
there is no boundary between them. The index rows record the exact ranges of a commit, by commit id
(the staged batch does, for batches not in the index yet); if neither exists, the ledger's ranges
are used, which may be larger than the records committed.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import ConfigError, counted
from frazil.iceberg.table import Snapshot
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, LedgerEntry, head, parse
from frazil.ledger.range_columns import RANGE_COLUMNS
from frazil.ledger.sink_state import STREAM
from frazil.offsets import Cut, Partition, Range

#: Columns read from the index.
COLUMNS = (*RANGE_COLUMNS, "commit_id", "committed_at")
#: Before the first batch.
BEGINNING = -1
#: Maximum number of boundaries tried, oldest first, to find the earliest possible one.
_TRIES = 1000

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
#: Snapshots, newest first, each with its ledger entry, of any sink.
Walked = list[tuple[Snapshot, LedgerEntry | None]]


@dataclass(frozen=True, slots=True)
class Boundary:
    #: number of the last batch below it
    batch: int
    cut: Cut
    #: when that batch was committed to the index; None: before the first batch
    committed_at: datetime | None = None

    def __str__(self) -> str:
        at = self.committed_at
        when = f", {at.isoformat(timespec='seconds')}" if at else ""
        name = f"batch:{self.batch}" if self.batch != BEGINNING else "the beginning (batch:-1)"
        return f"{name}{when}"


class BatchSpans(NamedTuple):
    """Ranges of one topic partition, batch by batch, in order."""

    batch: Numbers
    start_offset: Numbers
    end_offset: Numbers


class BatchTimeline:
    """The batches of one sink, from its index rows: their boundaries and ranges."""

    def __init__(self, rows: pa.Table, position: Cut) -> None:
        """`rows`: `COLUMNS` of this sink only; `position`: end of the index's ledger."""
        # Readers differ in their string types.
        types = pa.schema([index.COLUMNS.field(name) for name in COLUMNS])
        self.rows = rows.select(COLUMNS).cast(types)
        self.position = position
        batches, names = self.rows["batch"], self.rows["table_name"]
        # For a batch of several tables use its `*` rows, otherwise the rows of its only table.
        starred = pc.equal(names, STREAM)
        several = pc.is_in(batches, pc.unique(pc.filter(batches, starred)))
        stream = self.rows.filter(pc.or_(starred, pc.invert(several)))
        self._spans = _by_partition(stream)
        torn = [b[1:][starts[1:] != ends[:-1]] for b, starts, ends in self._spans.values()]
        #: the first batch that does not continue the one before: there is no boundary beyond it
        self.broken = min((int(numbers.min()) for numbers in torn if len(numbers)), default=None)
        whole = stream.group_by("batch").aggregate([("committed_at", "max")]).sort_by("batch")
        if self.broken is not None:
            whole = whole.filter(pc.less(whole["batch"], self.broken))
        self._batches: Numbers = whole["batch"].to_numpy()
        self._times = whole["committed_at_max"]

    @property
    def last(self) -> Boundary:
        return self.at(int(self._batches[-1]) if len(self._batches) else BEGINNING)

    @property
    def beginnings(self) -> Cut:
        return self.at(BEGINNING).cut

    def at(self, batch: int) -> Boundary:
        """The boundary after that batch, or after the last batch before it."""
        before = int(np.searchsorted(self._batches, batch, "right"))
        number = int(self._batches[before - 1]) if before else BEGINNING
        cut = dict(self.position)
        for key, (batches, starts, ends) in self._spans.items():
            count = int(np.searchsorted(batches, number, "right"))
            cut[key] = int(ends[count - 1]) if count else int(starts[0])
        return Boundary(number, Cut(cut), self._times[before - 1].as_py() if before else None)

    def below(self, offsets: Mapping[Partition, int]) -> Boundary:
        """The newest boundary without records at or beyond these offsets (or the beginning)."""
        number = self.last.batch
        for key in offsets.keys() & self._spans.keys():
            batches, _, ends = self._spans[key]
            if len(beyond := batches[ends > offsets[key]]):
                number = min(number, int(beyond.min()) - 1)
        return self.at(number)

    def beyond(self, boundary: Boundary, offsets: Mapping[Partition, int]) -> Iterator[Boundary]:
        """The boundaries after `boundary` that reach these offsets, oldest first."""
        later = self._batches[self._batches > boundary.batch].tolist()
        first = bisect_left(later, True, key=lambda batch: self.at(batch).cut.reaches(offsets))
        return map(self.at, later[first:])

    def named(self, text: str) -> Boundary:
        """The newest boundary at or below a cut given as text: `batch:17`, `2025-11-15T20:00`,
        `{"orders": {"0": 1700}}`."""
        if match := re.fullmatch(r"batch:(-?\d+)", text):
            if int(match[1]) > self.last.batch:
                raise ConfigError(f"cannot rewind to {text}: the last batch is {self.last.batch}")
            return self.at(int(match[1]))
        try:
            if text.lstrip().startswith("{"):
                return self._below_known(Cut.of(json.loads(text)))
            # (Python before 3.11 does not parse the Z.)
            moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"cannot read the cut {text!r}: expected batch:N, a time as 2025-11-15T20:00:00Z, "
                'or offsets as {"topic": {"0": 1700}}'
            ) from None
        moment = moment.replace(tzinfo=moment.tzinfo or timezone.utc)
        late = pc.greater(self._times, pa.scalar(moment, self._times.type))
        later = self._batches[late.to_numpy()]
        return self.at(int(later[0]) - 1) if len(later) else self.last

    def _below_known(self, cut: Cut) -> Boundary:
        begin = self.beginnings
        for key, offset in cut.items():
            if key not in begin:
                known = ", ".join(map(str, begin)) or "none"
                raise ConfigError(
                    f"cannot rewind to {key} at {offset}: the sink does not read it; "
                    f"it reads {known}"
                )
            if offset < begin[key]:
                raise ConfigError(
                    f"cannot rewind to {key} at {offset}: the sink began at {begin[key]}"
                )
        return self.below(cut)

    def held(self, table: str, commits: Sequence[str]) -> dict[str, list[Range]]:
        """Commit id → ranges of these commits in a table."""
        rows = self._of(table)
        ids = pa.array(commits, rows["commit_id"].type)
        ranges = defaultdict(list)
        for row in rows.filter(pc.is_in(rows["commit_id"], ids)).to_pylist():
            where = Partition(row["topic"], row["partition"])
            ranges[row["commit_id"]].append(Range(where, row["start_offset"], row["end_offset"]))
        return ranges

    def ends(self, table: str, batch: int) -> dict[Partition, tuple[int, int]]:
        """Partition → begin and end of the table's ranges in batches up to `batch`."""
        rows = self._of(table)
        spans = _by_partition(rows.filter(pc.less_equal(rows["batch"], batch)))
        return {
            key: (int(starts.min()), int(ends.max())) for key, (_, starts, ends) in spans.items()
        }

    def _of(self, table: str) -> pa.Table:
        return self.rows.filter(pc.equal(self.rows["table_name"], table))


def _by_partition(rows: pa.Table) -> dict[Partition, BatchSpans]:
    order = ("topic", "partition", "batch", "start_offset")
    rows = rows.sort_by([(name, "ascending") for name in order])
    groups = rows.group_by(["topic", "partition"], use_threads=False)  # threads reorder rows
    lists = groups.aggregate([(name, "list") for name in BatchSpans._fields])
    return {
        Partition(group["topic"], group["partition"]): BatchSpans(
            *(np.array(group[f"{name}_list"]) for name in BatchSpans._fields)
        )
        for group in lists.to_pylist()
    }


# ── one table ────────────────────────────────────────────────────────────────────────────────────


class Ancestry(Iterable[Snapshot]):
    """A branch's snapshots, newest first, read lazily and cached.

    Can be iterated several times, but not concurrently.
    """

    def __init__(self, history: Iterator[Snapshot]) -> None:
        self._history = history
        self._read: list[Snapshot] = []

    def __iter__(self) -> Iterator[Snapshot]:
        yield from self._read
        for snapshot in self._history:
            self._read.append(snapshot)
            yield snapshot


@dataclass(frozen=True, slots=True)
class TableState:
    """The current state of a table."""

    name: str
    branch: str
    history: Ancestry
    #: the snapshot of the sink's tag
    tagged: Snapshot | None = None
    #: tag → snapshot id
    tags: Mapping[str, int] = field(default_factory=dict)
    #: commit id → ranges of staged batches for this table
    staged: Mapping[str, Sequence[Range]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LostCommit:
    """A commit of another writer that a rewind would undo."""

    snapshot: int
    #: id of the other sink; empty: not written by a sink
    sink: str
    reason: str

    def __str__(self) -> str:
        return f"snapshot {self.snapshot}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TableRewind:
    """The effect of a rewind to a boundary on one table."""

    JSON: ClassVar = (
        "table branch rewound snapshot_now snapshot_then commits rows ranges foreign expired"
    )

    table: str
    branch: str
    #: the newest snapshot before and after the rewind; None: the table is empty
    snapshot_now: int | None = None
    snapshot_then: int | None = None
    #: the sink's removed snapshots that have records: their number, ranges and rows
    commits: int = 0
    ranges: tuple[Range, ...] = ()
    rows: int = 0
    foreign: tuple[LostCommit, ...] = ()
    #: time of the oldest removed commit (milliseconds)
    since_ms: int | None = None
    #: the sink's newest remaining entry, or the one derived from the first removed entry
    entry: LedgerEntry | None = None
    #: tags of other sinks to move: tag → snapshot, or None to remove the tag
    tags: Mapping[str, int | None] = field(default_factory=dict)
    #: why the rewind is impossible: a commit has records on both sides of the boundary, or
    #: records below it are missing; the boundary must then be below `limit`
    trouble: str = ""
    limit: Mapping[Partition, int] = field(default_factory=dict)
    #: if the target snapshot expired: the cut that the boundary must reach
    floor: Cut = field(default_factory=Cut)

    @property
    def rewound(self) -> bool:
        return self.commits > 0

    @property
    def expired(self) -> bool:
        return bool(self.floor)


def table_rewind(
    state: TableState, sink: str, boundary: Boundary, stream: BatchTimeline
) -> TableRewind:
    cut = boundary.cut
    walked: Walked = []
    beyond: list[LedgerEntry] = []  # the sink's entries with records beyond the cut
    going = 0  # number of snapshots to remove, from the newest on
    for snapshot in state.history:
        entry = parse(snapshot.summary)
        walked.append((snapshot, entry))
        if entry is not None and entry.sink == sink and entry.ranges:
            if cut.reaches(entry.end):
                break  # all earlier entries are below the cut, too
            beyond.append(entry)
            going = len(walked)
    if across := _straddling(state, beyond, cut, stream):
        return across
    now = walked[0][0].id if walked else None
    rewind = TableRewind(state.name, state.branch, now, now)
    if beyond:
        rewind = _removal(state, sink, walked[:going], beyond, cut)
        if rewind.snapshot_then is not None and going == len(walked):  # expired
            return replace(rewind, floor=beyond[-1].end)
    left = [snapshot for snapshot, _ in walked[going:]]
    if not beyond and not head(left, sink, state.tagged).complete:
        # Rolled back manually to a snapshot that shows no entry of the sink.
        return replace(
            rewind,
            trouble=f"what sink {sink} has in table {state.name} is unknown: the snapshots "
            f"below {now} were expired, and its tag names none (see frazil offsets confirm)",
        )
    kept = _remaining_entry(state, sink, left, beyond)
    end = kept.end if kept else Cut()
    if not cut.reaches(end):  # the remaining ledger begins beyond the cut
        return replace(rewind, floor=end)
    lacking = {
        key: end.get(key, first)
        for key, (first, last) in stream.ends(state.name, boundary.batch).items()
        if last > end.get(key, first)
    }
    if lacking:
        missing = ", ".join(f"{key} from {offset} on" for key, offset in lacking.items())
        return replace(rewind, trouble=f"table {state.name} lacks {missing}", limit=lacking)
    return replace(rewind, entry=kept)


def _straddling(
    state: TableState, beyond: Sequence[LedgerEntry], cut: Cut, stream: BatchTimeline
) -> TableRewind | None:
    """The refusal, if a commit has records on both sides of the cut."""
    ids = [commit_id for entry in beyond for commit_id in entry.commit_ids]
    held = {**state.staged, **stream.held(state.name, ids)}
    for entry in beyond:
        exact = all(held.get(i) for i in entry.commit_ids)
        known = [span for i in entry.commit_ids for span in held.get(i, ()) if len(span)]
        ranges = known if exact and known else entry.ranges
        if any(span.start < cut.get(span.partition, 0) for span in ranges):
            first, last = entry.batches
            fact = f"took batches {first} to {last}"
            if first == last:
                fact = f"has {', '.join(map(str, ranges))}"
            return TableRewind(
                state.name,
                state.branch,
                trouble=f"table {state.name} {fact} in one commit",
                limit={span.partition: span.start for span in sorted(ranges, reverse=True)},
            )
    return None


def _removal(
    state: TableState, sink: str, gone: Walked, beyond: Sequence[LedgerEntry], cut: Cut
) -> TableRewind:
    """The effect of removing the snapshots `gone`; `beyond`: those with the sink's records."""
    oldest = gone[-1][0]
    begin = {key: offset for entry in beyond for key, offset in entry.begin.items()}  # oldest last
    spans = [(key, max(begin[key], cut.get(key, 0)), end) for key, end in beyond[0].end.items()]
    foreign = tuple(
        lost for snapshot, entry in gone if (lost := _lost_commit(snapshot, entry, sink))
    )
    return TableRewind(
        state.name,
        state.branch,
        gone[0][0].id,
        oldest.parent,
        commits=len(beyond),
        ranges=tuple(Range(*span) for span in spans if span[1] < span[2]),
        rows=sum(entry.total.written for entry in beyond),
        foreign=foreign,
        since_ms=oldest.timestamp_ms,
        tags=_tags(
            state, {snapshot.id for snapshot, _ in gone}, {sink, *(lost.sink for lost in foreign)}
        ),
    )


def _remaining_entry(
    state: TableState, sink: str, left: Sequence[Snapshot], beyond: Sequence[LedgerEntry]
) -> LedgerEntry | None:
    """The sink's newest remaining entry (a claim or records), or one derived from `beyond`."""
    newest = head(left, sink, None if beyond else state.tagged)
    if newest.entry is not None or not beyond:
        return newest.entry
    # A ledger has no gaps: it ended where the first removed entry begins. The very first entry
    # begins where its batch begins.
    first = beyond[-1]
    if newest.complete:
        return empty(first, Cut(), BEGINNING, "")
    return empty(first, first.begin, first.batches[0] - 1, first.source[0])


def empty(entry: LedgerEntry, end: Cut, batch: int, source: str) -> LedgerEntry:
    """`entry` without its ranges and counts: an empty entry after `batch`, at the cut `end`."""
    return LedgerEntry(
        entry.sink,
        entry.epoch,
        entry.commit_ids,
        (batch, batch),
        end,
        end,
        topics=entry.topics,
        cluster=entry.cluster,
        schema_id=entry.schema_id,
        tables=entry.tables,
        source=(source, source),
        index=entry.index,
        leaders={p: epoch for p, epoch in entry.leaders.items() if p in end},
    )


def _lost_commit(snapshot: Snapshot, entry: LedgerEntry | None, sink: str) -> LostCommit | None:
    """The commit of another writer; None for a claim or a compaction, which changes no row."""
    if entry is not None:
        if entry.sink == sink or not entry.ranges:
            return None
        return LostCommit(
            snapshot.id,
            entry.sink,
            f"sink {entry.sink} wrote {counted(entry.total.written, 'row')}",
        )
    added, deleted, hidden = (
        int(snapshot.summary.get(key, 0))
        for key in ("added-records", "deleted-records", "added-delete-files")
    )
    if snapshot.operation == "replace" and added == deleted and not hidden:
        return None
    if PREFIX + "compact" in snapshot.summary:  # the sink's compaction of an upsert table
        return None
    text = f"{snapshot.operation or 'a commit'}: {counted(added, 'row')} added, {deleted:,} deleted"
    return LostCommit(
        snapshot.id, "", text + (f", {counted(hidden, 'delete file')}" if hidden else "")
    )


def _tags(state: TableState, gone: set[int], losers: set[str]) -> dict[str, int | None]:
    """Moves of other sinks' tags whose claims are removed: to their newest remaining entry.

    A sink that loses records keeps its tag, so that it detects the loss.
    """
    moves: dict[str, int | None] = {}
    for tag, snapshot_id in state.tags.items():
        prefix, _, rest = tag.partition("/")
        whose, _, branch = rest.partition("/")
        ours = prefix == "frazil" and (branch or "main") == state.branch
        if ours and snapshot_id in gone and whose not in losers:
            left = head(
                (snapshot for snapshot in state.history if snapshot.id not in gone), whose
            ).snapshot
            moves[tag] = left.id if left else None
    return moves


# ── all tables ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """A boundary that all tables can be rewound to, with the effect on each."""

    JSON: ClassVar = "*boundary reasons tables"

    boundary: Boundary
    tables: tuple[TableRewind, ...]
    #: why it is not the requested boundary
    reasons: tuple[str, ...] = ()

    @property
    def moves(self) -> tuple[TableRewind, ...]:
        return tuple(rewind for rewind in self.tables if rewind.rewound)

    @property
    def expired(self) -> tuple[TableRewind, ...]:
        return tuple(rewind for rewind in self.tables if rewind.expired)

    @property
    def foreign(self) -> tuple[LostCommit, ...]:
        return tuple(lost for rewind in self.tables for lost in rewind.foreign)

    @property
    def trouble(self) -> str:
        """Why not even a rewind to the beginning is possible; empty otherwise."""
        return next((rewind.trouble for rewind in self.tables if rewind.trouble), "")


def choose(
    stream: BatchTimeline, states: Sequence[TableState], sink: str, start: Boundary
) -> RewindPlan:
    """The newest boundary at or below `start` that no table's commit straddles."""
    boundary, reasons = start, list[str]()
    while True:
        rewinds: list[TableRewind] = []
        for state in states:
            rewinds.append(table_rewind(state, sink, boundary, stream))
            if rewinds[-1].trouble:
                break
        last = rewinds[-1] if rewinds else None
        reasons += [last.trouble] if last and last.trouble else []
        if last is None or not last.trouble or boundary.batch == BEGINNING:
            return RewindPlan(boundary, tuple(rewinds), tuple(dict.fromkeys(reasons)))
        boundary = stream.at(min(stream.below(last.limit).batch, boundary.batch - 1))


def earliest(
    stream: BatchTimeline,
    states: Sequence[TableState],
    sink: str,
    refused: RewindPlan,
    allowed: Callable[[RewindPlan], bool],
) -> Boundary | None:
    """The oldest `allowed` boundary after the refused one; None: not found."""
    floor: dict[Partition, int] = {}
    for rewind in refused.expired:
        for key, offset in rewind.floor.items():
            floor[key] = max(floor.get(key, 0), offset)
    for boundary in islice(stream.beyond(refused.boundary, floor), _TRIES):
        choice = choose(stream, states, sink, boundary)
        if choice.boundary == boundary and not choice.expired and allowed(choice):
            return boundary
    return None
