"""Where all tables of a sink stood together, and what going back there would take. Pure.

A *boundary* is the cut after one batch of the index. A table can go back to it if some snapshot of
it holds all that is for the table below the cut and nothing beyond: batches that were absorbed
share a snapshot, and then the boundaries between them are nobody's. What a commit holds the index's
rows say exactly, by commit id (of batches that are not in the index yet: the staged batch); where
neither does, the ledger's ranges count, and they may say more than there is.
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
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import ConfigError, counted
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, LedgerEntry, Snapshot, head, parse
from frazil.ledger.sink_state import STREAM
from frazil.offsets import Cut, Partition, Range

#: What is read of the index.
COLUMNS = (
    "batch",
    "table_name",
    "topic",
    "partition",
    "start_offset",
    "end_offset",
    "commit_id",
    "committed_at",
)
#: Before the first batch.
BEGINNING = -1
#: How many boundaries are tried, upward, for the earliest that is possible.
_TRIES = 1000

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
#: Snapshots, newest first, each with the entry that it carries, of any sink.
Walked = list[tuple[Snapshot, LedgerEntry | None]]


@dataclass(frozen=True, slots=True)
class Boundary:
    #: the last batch below it, as the index counts
    batch: int
    cut: Cut
    #: when the index took that batch; None: before the first
    at: datetime | None = None

    def __str__(self) -> str:
        when = f", {self.at.isoformat(timespec='seconds')}" if self.at else ""
        name = f"batch:{self.batch}" if self.batch != BEGINNING else "the beginning (batch:-1)"
        return f"{name}{when}"


class BatchSpans(NamedTuple):
    """What batches hold of one topic partition, in their order."""

    batch: Numbers
    start_offset: Numbers
    end_offset: Numbers


class BatchTimeline:
    """The batches of one sink: their boundaries, and what each holds, by the rows of its index."""

    def __init__(self, rows: pa.Table, position: Cut) -> None:
        """`rows`: `COLUMNS` of this sink alone; `position`: where the index's ledger ends."""
        # Whoever read them has types of his own for texts.
        types = pa.schema([index.COLUMNS.field(name) for name in COLUMNS])
        self.rows = rows.select(COLUMNS).cast(types)
        self.position = position
        batches, names = self.rows["batch"], self.rows["table_name"]
        # Of a batch for several tables the rows of `*` join, of others those of its only table.
        starred = pc.equal(names, STREAM)
        several = pc.is_in(batches, pc.unique(pc.filter(batches, starred)))
        stream = self.rows.filter(pc.or_(starred, pc.invert(several)))
        self._spans = _by_partition(stream)
        torn = [b[1:][starts[1:] != ends[:-1]] for b, starts, ends in self._spans.values()]
        #: the first batch that does not join: no boundary lies beyond, it is not one stream there
        self.broken = min((int(each.min()) for each in torn if len(each)), default=None)
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
        """After that batch, or the last one before it."""
        before = int(np.searchsorted(self._batches, batch, "right"))
        number = int(self._batches[before - 1]) if before else BEGINNING
        cut = dict(self.position)
        for key, (batches, starts, ends) in self._spans.items():
            here = int(np.searchsorted(batches, number, "right"))
            cut[key] = int(ends[here - 1]) if here else int(starts[0])
        return Boundary(number, Cut(cut), self._times[before - 1].as_py() if before else None)

    def below(self, offsets: Mapping[Partition, int]) -> Boundary:
        """The newest that has nothing at or beyond these offsets (or the beginning)."""
        number = self.last.batch
        for key in offsets.keys() & self._spans.keys():
            batches, _, ends = self._spans[key]
            if len(beyond := batches[ends > offsets[key]]):
                number = min(number, int(beyond.min()) - 1)
        return self.at(number)

    def beyond(self, boundary: Boundary, offsets: Mapping[Partition, int]) -> Iterator[Boundary]:
        """Those after one that have everything below these offsets, oldest first."""
        later = self._batches[self._batches > boundary.batch].tolist()
        first = bisect_left(later, True, key=lambda batch: self.at(batch).cut.reaches(offsets))
        return map(self.at, later[first:])

    def named(self, text: str) -> Boundary:
        """The newest at or below a cut as a person says it: `batch:17`, `2025-11-15T20:00`,
        `{"orders": {"0": 1700}}`."""
        if found := re.fullmatch(r"batch:(-?\d+)", text):
            if int(found[1]) > self.last.batch:
                raise ConfigError(f"cannot rewind to {text}: the last batch is {self.last.batch}")
            return self.at(int(found[1]))
        try:
            if text.lstrip().startswith("{"):
                return self._below_known(Cut.of(json.loads(text)))
            # (Python before 3.11 does not know the Z.)
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
        """What these commits hold of a table's own, by commit id."""
        mine = self._of(table)
        ids = pa.array(commits, mine["commit_id"].type)
        found = defaultdict(list)
        for row in mine.filter(pc.is_in(mine["commit_id"], ids)).to_pylist():
            where = Partition(row["topic"], row["partition"])
            found[row["commit_id"]].append(Range(where, row["start_offset"], row["end_offset"]))
        return found

    def ends(self, table: str, batch: int) -> dict[Partition, tuple[int, int]]:
        """How far batches up to that one have told of a table: where that begins and ends."""
        mine = self._of(table)
        spans = _by_partition(mine.filter(pc.less_equal(mine["batch"], batch)))
        return {
            key: (int(starts.min()), int(ends.max())) for key, (_, starts, ends) in spans.items()
        }

    def _of(self, table: str) -> pa.Table:
        return self.rows.filter(pc.equal(self.rows["table_name"], table))


def _by_partition(rows: pa.Table) -> dict[Partition, BatchSpans]:
    order = ("topic", "partition", "batch", "start_offset")
    rows = rows.sort_by([(name, "ascending") for name in order])
    groups = rows.group_by(["topic", "partition"], use_threads=False)  # they would mix the rows
    lists = groups.aggregate([(name, "list") for name in BatchSpans._fields])
    return {
        Partition(each["topic"], each["partition"]): BatchSpans(
            *(np.array(each[f"{name}_list"]) for name in BatchSpans._fields)
        )
        for each in lists.to_pylist()
    }


# ── one table ────────────────────────────────────────────────────────────────────────────────────


class Ancestry(Iterable[Snapshot]):
    """A branch's snapshots, newest first, read as far as somebody asks and no further.

    They are asked for again, and not by two at once.
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
    """A table as it is."""

    name: str
    branch: str
    history: Ancestry
    #: the snapshot that the sink's tag names
    witness: Snapshot | None = None
    #: tag → snapshot id
    tags: Mapping[str, int] = field(default_factory=dict)
    #: what batches that are staged hold for it, by commit id
    staged: Mapping[str, Sequence[Range]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LostCommit:
    """A commit of somebody else's that a rewind would undo."""

    snapshot_id: int
    #: another sink's id; empty: none wrote it
    sink: str
    said: str

    def __str__(self) -> str:
        return f"snapshot {self.snapshot_id}: {self.said}"


@dataclass(frozen=True, slots=True)
class TableRewind:
    """What going back to a boundary means for one table."""

    table: str
    branch: str
    #: the newest snapshot now, and then; None: the table is empty
    now: int | None = None
    then: int | None = None
    #: snapshots that go, of the sink itself: how many have records, which, and how many rows
    commits: int = 0
    ranges: tuple[Range, ...] = ()
    rows: int = 0
    foreign: tuple[LostCommit, ...] = ()
    #: when the oldest of the commits that go was made (milliseconds)
    since_ms: int | None = None
    #: the sink's newest entry that stays, or what the first that goes says of it
    entry: LedgerEntry | None = None
    #: tags of others that must move along: to a snapshot, or away
    tags: Mapping[str, int | None] = field(default_factory=dict)
    #: why it cannot be: commits hold records on both sides, or some are missing below; the
    #: boundary must be below `limit` then
    trouble: str = ""
    limit: Mapping[Partition, int] = field(default_factory=dict)
    #: where the snapshot to go to was expired: what the boundary must reach
    floor: Cut = field(default_factory=Cut)

    @property
    def moves(self) -> bool:
        return self.commits > 0

    @property
    def expired(self) -> bool:
        return bool(self.floor)


def stand(state: TableState, sink: str, boundary: Boundary, stream: BatchTimeline) -> TableRewind:
    cut = boundary.cut
    walked: Walked = []
    beyond: list[LedgerEntry] = []  # the sink's that have records there
    going = 0  # so many snapshots, from the newest on
    for snapshot in state.history:
        entry = parse(snapshot.summary)
        walked.append((snapshot, entry))
        if entry is not None and entry.sink == sink and entry.ranges:
            if cut.reaches(entry.end):
                break  # all that lies before it is below, too
            beyond.append(entry)
            going = len(walked)
    if across := _across(state, beyond, cut, stream):
        return across
    now = walked[0][0].id if walked else None
    found = TableRewind(state.name, state.branch, now, now)
    if beyond:
        found = _going(state, sink, walked[:going], beyond, cut)
        if found.then is not None and going == len(walked):  # expired
            return replace(found, floor=beyond[-1].end)
    left = [snapshot for snapshot, _ in walked[going:]]
    if not beyond and not head(left, sink, state.witness).complete:
        # Rolled back by hand to where nothing tells what the sink had committed.
        return replace(
            found,
            trouble=f"what sink {sink} has in table {state.name} cannot be told: the snapshots "
            f"below {now} were expired, and its tag names none (see frazil offsets confirm)",
        )
    kept = _kept(state, sink, left, beyond)
    end = kept.end if kept else Cut()
    if not cut.reaches(end):  # what is left of its ledger begins beyond
        return replace(found, floor=end)
    lacking = {
        key: end.get(key, first)
        for key, (first, last) in stream.ends(state.name, boundary.batch).items()
        if last > end.get(key, first)
    }
    if lacking:
        missing = ", ".join(f"{key} from {offset} on" for key, offset in lacking.items())
        return replace(found, trouble=f"table {state.name} lacks {missing}", limit=lacking)
    return replace(found, entry=kept)


def _across(
    state: TableState, beyond: Sequence[LedgerEntry], cut: Cut, stream: BatchTimeline
) -> TableRewind | None:
    """Where a commit holds records on both sides of the cut."""
    ids = [commit_id for entry in beyond for commit_id in entry.commit_ids]
    held = {**state.staged, **stream.held(state.name, ids)}
    for entry in beyond:
        exact = all(held.get(i) for i in entry.commit_ids)
        told = [each for i in entry.commit_ids for each in held.get(i, ()) if len(each)]
        ranges = told if exact and told else entry.ranges
        if any(each.start < cut.get(each.partition, 0) for each in ranges):
            first, last = entry.batches
            what = f"took batches {first} to {last}"
            if first == last:
                what = f"has {', '.join(map(str, ranges))}"
            return TableRewind(
                state.name,
                state.branch,
                trouble=f"table {state.name} {what} in one commit",
                limit={each.partition: each.start for each in sorted(ranges, reverse=True)},
            )
    return None


def _going(
    state: TableState, sink: str, gone: Walked, beyond: Sequence[LedgerEntry], cut: Cut
) -> TableRewind:
    """What the snapshots `gone` have, of which those `beyond` hold the sink's records."""
    oldest = gone[-1][0]
    begin = {key: offset for entry in beyond for key, offset in entry.begin.items()}  # oldest last
    spans = [(key, max(begin[key], cut.get(key, 0)), end) for key, end in beyond[0].end.items()]
    foreign = tuple(lost for snapshot, entry in gone if (lost := _lost(snapshot, entry, sink)))
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
        tags=_tags(state, {each.id for each, _ in gone}, {sink, *(lost.sink for lost in foreign)}),
    )


def _kept(
    state: TableState, sink: str, left: Sequence[Snapshot], beyond: Sequence[LedgerEntry]
) -> LedgerEntry | None:
    """The sink's newest entry that stays: a claim, or records; or what can be told of it."""
    found = head(left, sink, None if beyond else state.witness)
    if found.entry is not None or not beyond:
        return found.entry
    # A ledger joins: it ended where the first entry that goes begins. A first entry of all begins
    # where its batch does.
    first = beyond[-1]
    if found.complete:
        return empty(first, Cut(), BEGINNING, "")
    return empty(first, first.begin, first.batches[0] - 1, first.source[0])


def empty(entry: LedgerEntry, end: Cut, batch: int, source: str) -> LedgerEntry:
    """What it says of the sink, and nothing of what it added; after a batch."""
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


def _lost(snapshot: Snapshot, entry: LedgerEntry | None, sink: str) -> LostCommit | None:
    """What others did; not a claim, nor a compaction, which changes no row."""
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
    if PREFIX + "compact" in snapshot.summary:  # of an upsert table, by its sink
        return None
    said = f"{snapshot.operation or 'a commit'}: {counted(added, 'row')} added, {deleted:,} deleted"
    return LostCommit(
        snapshot.id, "", said + (f", {counted(hidden, 'delete file')}" if hidden else "")
    )


def _tags(state: TableState, gone: set[int], losers: set[str]) -> dict[str, int | None]:
    """Witnesses of other sinks whose claims go: they count as far as those still stand.

    A sink that loses records keeps its witness: it shall see that it was robbed.
    """
    found: dict[str, int | None] = {}
    for tag, snapshot_id in state.tags.items():
        prefix, _, rest = tag.partition("/")
        whose, _, branch = rest.partition("/")
        ours = prefix == "frazil" and (branch or "main") == state.branch
        if ours and snapshot_id in gone and whose not in losers:
            left = head((each for each in state.history if each.id not in gone), whose).snapshot
            found[tag] = left.id if left else None
    return found


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """A boundary at which all tables stand together."""

    boundary: Boundary
    stands: tuple[TableRewind, ...]
    #: why it is not the one that was wanted
    because: tuple[str, ...] = ()

    @property
    def moves(self) -> tuple[TableRewind, ...]:
        return tuple(each for each in self.stands if each.moves)

    @property
    def expired(self) -> tuple[TableRewind, ...]:
        return tuple(each for each in self.stands if each.expired)

    @property
    def foreign(self) -> tuple[LostCommit, ...]:
        return tuple(lost for each in self.stands for lost in each.foreign)

    @property
    def trouble(self) -> str:
        """Why not even the beginning is possible."""
        return next((each.trouble for each in self.stands if each.trouble), "")


def choose(
    stream: BatchTimeline, states: Sequence[TableState], sink: str, start: Boundary
) -> RewindPlan:
    """The newest boundary at or below `start` that no table stands across."""
    boundary, because = start, list[str]()
    while True:
        stands: list[TableRewind] = []
        for state in states:
            stands.append(stand(state, sink, boundary, stream))
            if stands[-1].trouble:
                break
        last = stands[-1] if stands else None
        because += [last.trouble] if last and last.trouble else []
        if last is None or not last.trouble or boundary.batch == BEGINNING:
            return RewindPlan(boundary, tuple(stands), tuple(dict.fromkeys(because)))
        boundary = stream.at(min(stream.below(last.limit).batch, boundary.batch - 1))


def earliest(
    stream: BatchTimeline,
    states: Sequence[TableState],
    sink: str,
    refused: RewindPlan,
    allowed: Callable[[RewindPlan], bool],
) -> Boundary | None:
    """The oldest boundary beyond one that was refused which is `allowed`; None: not found."""
    floor: dict[Partition, int] = {}
    for each in refused.expired:
        for key, offset in each.floor.items():
            floor[key] = max(floor.get(key, 0), offset)
    for here in islice(stream.beyond(refused.boundary, floor), _TRIES):
        choice = choose(stream, states, sink, here)
        if choice.boundary == here and not choice.expired and allowed(choice):
            return here
    return None
