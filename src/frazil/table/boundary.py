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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.core.errors import ConfigError
from frazil.core.offsets import Cut, Partition, Range
from frazil.table.index import STREAM
from frazil.table.ledger import Entry, Snapshot, parse

#: What is read of the index.
COLUMNS = ("batch", "table_name", "topic", "partition", "start_offset", "end_offset", "written",
           "commit_id", "committed_at")  # fmt: skip
#: Before the first batch.
BEGINNING = -1
#: How many boundaries are tried, upward, for the earliest that is possible.
_TRIES = 1000

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A cut as a person says it: a batch, a moment, or offsets."""

    text: str
    batch: int | None = None
    moment: datetime | None = None
    offsets: Cut = field(default_factory=Cut)


def wanted(text: str) -> Wanted:
    """`batch:17`, `2025-11-15T20:00`, `{"orders": {"0": 1700}}`."""
    if found := re.fullmatch(r"batch:(-?\d+)", text):
        return Wanted(text, batch=max(BEGINNING, int(found[1])))
    try:
        if text.lstrip().startswith("{"):
            return Wanted(text, offsets=Cut.of(json.loads(text)))
        # (Python before 3.11 does not know the Z.)
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"cannot read the cut {text!r}: expected batch:N, a time as 2025-11-15T20:00:00Z, or "
            'offsets as {"topic": {"0": 1700}}'
        ) from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return Wanted(text, moment=aware)


class Stream:
    """The batches of one sink: their boundaries, and what each holds, by the rows of its index."""

    def __init__(self, rows: pa.Table, position: Cut) -> None:
        """`rows`: `COLUMNS` of this sink alone; `position`: where the index's ledger ends."""
        self.position = position
        self._rows = rows
        batches, names = rows["batch"], _plain(rows["table_name"])
        starred = pc.unique(pc.filter(batches, pc.equal(names, STREAM)))
        # Of a batch for several tables the rows of `*` join, of others those of its only table.
        told = pc.or_(pc.equal(names, STREAM), pc.invert(pc.is_in(batches, starred)))
        stream = rows.filter(told)
        self._all: Numbers = np.unique(stream["batch"].to_numpy())
        self._partitions = dict(_by_partition(stream))
        self._times = stream.group_by("batch").aggregate([("committed_at", "max")]).sort_by("batch")
        self.broken = self._first_that_does_not_join()

    def _first_that_does_not_join(self) -> int | None:
        """No boundary lies beyond it: what the rows say there is not one stream."""
        found = [
            int(batches[1:][starts[1:] != ends[:-1]].min())
            for batches, starts, ends in self._partitions.values()
            if (starts[1:] != ends[:-1]).any()
        ]
        return min(found, default=None)

    @property
    def last(self) -> Boundary:
        return self.at(int(self._all[-1]) if len(self._all) else BEGINNING)

    @property
    def beginnings(self) -> Cut:
        return self.at(BEGINNING).cut

    def at(self, batch: int) -> Boundary:
        """After that batch, or the last one before it, as far as the rows join."""
        if self.broken is not None:
            batch = min(batch, self.broken - 1)
        before = self._all[self._all <= batch]
        number = int(before[-1]) if len(before) else BEGINNING
        cut = dict(self.position)
        for key, (batches, starts, ends) in self._partitions.items():
            here = int(np.searchsorted(batches, number, "right"))
            cut[key] = int(ends[here - 1]) if here else int(starts[0])
        when = self._times["committed_at_max"][len(before) - 1].as_py() if len(before) else None
        return Boundary(number, Cut(cut), when)

    def below(self, offsets: Mapping[Partition, int]) -> Boundary:
        """The newest that has nothing at or beyond these offsets (or the beginning)."""
        number = int(self._all[-1]) if len(self._all) else BEGINNING
        for key, offset in offsets.items():
            batches, _, ends = self._partitions.get(key, _NOTHING)
            if len(beyond := batches[ends > offset]):
                number = min(number, int(beyond.min()) - 1)
        return self.at(number)

    def reaching(self, offsets: Mapping[Partition, int]) -> Boundary | None:
        """The oldest that has everything below these offsets."""
        number = BEGINNING
        for key, offset in offsets.items():
            batches, starts, ends = self._partitions.get(key, _NOTHING)
            if not len(batches):
                if self.position.get(key, 0) < offset:
                    return None
            elif offset > starts[0]:
                if not len(enough := batches[ends >= offset]):
                    return None
                number = max(number, int(enough.min()))
        found = self.at(number)
        return found if found.cut.reaches(offsets) else None

    def following(self, boundary: Boundary) -> Boundary | None:
        later = self._all[self._all > boundary.batch]
        if not len(later):
            return None
        found = self.at(int(later[0]))
        return found if found.batch > boundary.batch else None

    def until(self, moment: datetime) -> Boundary:
        late = self._times.filter(
            pc.greater(self._times["committed_at_max"], pa.scalar(moment, _MOMENT))
        )
        first = pc.min(late["batch"]).as_py()
        return self.last if first is None else self.at(first - 1)

    def named(self, cut: Wanted) -> Boundary:
        """The newest boundary at or below what a person wants."""
        if cut.batch is not None:
            if cut.batch > self.last.batch:
                raise ConfigError(
                    f"cannot rewind to {cut.text}: the last batch is {self.last.batch}"
                )
            return self.at(cut.batch)
        if cut.moment is not None:
            return self.until(cut.moment)
        begin = self.beginnings
        for key, offset in cut.offsets.items():
            if key not in begin:
                known = ", ".join(map(str, begin)) or "none"
                raise ConfigError(f"cannot rewind to {key} at {offset}: the sink does not read it; "
                                  f"it reads {known}")  # fmt: skip
            if offset < begin[key]:
                raise ConfigError(f"cannot rewind to {key} at {offset}: the sink began at "
                                  f"{begin[key]}")  # fmt: skip
        return self.below(cut.offsets)

    def held(self, table: str, commits: Sequence[str]) -> dict[str, list[Range]]:
        """What these commits hold of a table's own, by commit id."""
        mine = self._of(table)
        ids = _plain(mine["commit_id"])
        mine = mine.filter(pc.is_in(ids, pa.array(commits, ids.type)))
        found: dict[str, list[Range]] = {}
        for row in mine.to_pylist():
            where = Partition(row["topic"], row["partition"])
            made = Range(where, row["start_offset"], row["end_offset"])
            found.setdefault(row["commit_id"], []).append(made)
        return found

    def ends(self, table: str, batch: int) -> dict[Partition, tuple[int, int]]:
        """How far batches up to that one have told of a table: where that begins and ends."""
        mine = self._of(table)
        mine = mine.filter(pc.less_equal(mine["batch"], batch))
        return {
            key: (int(starts.min()), int(ends.max()))
            for key, (_, starts, ends) in _by_partition(mine)
        }

    def _of(self, table: str) -> pa.Table:
        return self._rows.filter(pc.equal(_plain(self._rows["table_name"]), table))


_MOMENT = pa.timestamp("us", "UTC")
_NOTHING: tuple[Numbers, Numbers, Numbers] = (np.array([], np.int64),) * 3


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts, however they are encoded."""
    return column.cast(pa.large_string())


def _by_partition(rows: pa.Table) -> Iterator[tuple[Partition, tuple[Numbers, Numbers, Numbers]]]:
    """Batches, starts and ends of each topic partition, in the order of the batches."""
    topics = _plain(rows["topic"]).combine_chunks().dictionary_encode()
    codes = topics.indices.to_numpy(zero_copy_only=False)
    batches, starts, ends = (
        rows[name].to_numpy() for name in ("batch", "start_offset", "end_offset")
    )
    numbers = rows["partition"].to_numpy()
    order = np.lexsort((starts, batches, numbers, codes))
    codes, numbers = codes[order], numbers[order]
    firsts = np.flatnonzero((np.diff(codes) != 0) | (np.diff(numbers) != 0)) + 1
    for each in np.split(order, firsts) if len(order) else ():
        topic = topics.dictionary[int(topics.indices[int(each[0])].as_py())].as_py()
        key = Partition(topic, int(rows["partition"][int(each[0])].as_py()))
        yield key, (batches[each], starts[each], ends[each])


# ── one table ────────────────────────────────────────────────────────────────────────────────────


class Ancestry(Iterable[Snapshot]):
    """A branch's snapshots, newest first, read as far as somebody asks and no further."""

    def __init__(self, history: Iterator[Snapshot]) -> None:
        self._history = history
        self._read: list[Snapshot] = []

    def __iter__(self) -> Iterator[Snapshot]:
        at = 0
        while True:
            if at == len(self._read):
                following = next(self._history, None)
                if following is None:
                    return
                self._read.append(following)
            yield self._read[at]
            at += 1


@dataclass(frozen=True, slots=True)
class State:
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
class Lost:
    """A commit of somebody else's that a rewind would undo."""

    snapshot_id: int
    #: another sink's id; empty: none wrote it
    sink: str
    said: str

    def __str__(self) -> str:
        return f"snapshot {self.snapshot_id}: {self.said}"


@dataclass(frozen=True, slots=True)
class Stand:
    """What going back to a boundary means for one table."""

    table: str
    branch: str
    #: the newest snapshot now, and then; None: the table is empty
    now: int | None
    then: int | None
    #: snapshots that go, of the sink itself: how many have records, which, and how many rows
    commits: int = 0
    ranges: tuple[Range, ...] = ()
    rows: int = 0
    foreign: tuple[Lost, ...] = ()
    #: when the oldest of the commits that go was made (milliseconds)
    since_ms: int | None = None
    #: the sink's newest entry that stays, or what the first that goes says of it
    entry: Entry | None = None
    #: tags of others that must move along: to a snapshot, or away
    tags: Mapping[str, int | None] = field(default_factory=dict)
    #: why it cannot be: commits hold records on both sides, or some are missing below; the
    #: boundary must be below `limit` then
    trouble: str = ""
    limit: Mapping[Partition, int] = field(default_factory=dict)
    #: the snapshot to go to was expired; the boundary must reach `floor` then
    expired: bool = False
    floor: Cut = field(default_factory=Cut)

    @property
    def moves(self) -> bool:
        return self.commits > 0


def stand(state: State, sink: str, boundary: Boundary, stream: Stream) -> Stand:
    cut = boundary.cut
    walked: list[tuple[Snapshot, Entry | None]] = []
    asked: list[Entry] = []
    for snapshot in state.history:
        entry = parse(snapshot.summary)
        mine = entry if entry is not None and entry.sink == sink else None
        walked.append((snapshot, entry))
        if mine is not None and mine.ranges:
            if cut.reaches(mine.end):
                break  # all that lies before it is below, too
            asked.append(mine)
    held = stream.held(state.name, [i for entry in asked for i in entry.commit_ids])
    going = 0  # so many snapshots from the newest on
    below: Entry | None = None
    for at, (_, entry) in enumerate(walked):
        if entry is None or entry.sink != sink or not entry.ranges:
            continue
        if cut.reaches(entry.end):
            below = entry
            break
        ranges = _held(entry, held, state.staged)
        if any(each.start < cut.get(each.partition, 0) for each in ranges):
            starts = {each.partition: each.start for each in sorted(ranges, reverse=True)}
            first, last = entry.batches
            return Stand(
                state.name, state.branch, None, None,
                trouble=f"table {state.name} took batches {first} to {last} in one commit"
                if first != last
                else f"table {state.name} has {', '.join(map(str, ranges))} in one commit",
                limit=starts,
            )  # fmt: skip
        going = at + 1
    found = _going(state, sink, walked, going, cut)
    kept = _kept(state, sink, walked, going, below)
    end = kept.end if kept else Cut()
    if found.expired:
        return found
    if not cut.reaches(end):  # what is left of its ledger begins beyond
        return replace(found, expired=True, floor=end)
    lacking = {
        key: end.get(key, first)
        for key, (first, last) in stream.ends(state.name, boundary.batch).items()
        if last > end.get(key, first)
    }
    if lacking:
        missing = ", ".join(f"{key} from {offset} on" for key, offset in lacking.items())
        return replace(found, trouble=f"table {state.name} lacks {missing}", limit=lacking)
    return replace(found, entry=kept)


def _held(
    entry: Entry, held: Mapping[str, Sequence[Range]], staged: Mapping[str, Sequence[Range]]
) -> list[Range]:
    told = [held.get(i) or staged.get(i) for i in entry.commit_ids]
    if not all(told):
        return entry.ranges
    return [each for ranges in told for each in ranges or () if len(each)] or entry.ranges


def _going(
    state: State,
    sink: str,
    walked: Sequence[tuple[Snapshot, Entry | None]],
    going: int,
    cut: Cut,
) -> Stand:
    now = walked[0][0].id if walked else None
    if not going:
        return Stand(state.name, state.branch, now, now)
    gone = walked[:going]
    oldest, first = gone[-1]
    assert first is not None
    mine = [entry for _, entry in gone if entry is not None and entry.sink == sink]
    records = [entry for entry in mine if entry.ranges]
    begin: dict[Partition, int] = {}
    for entry in records:  # the oldest comes last
        begin |= {key: max(offset, cut.get(key, 0)) for key, offset in entry.begin.items()}
    there = oldest.parent is None or len(walked) > going
    foreign = tuple(lost for snapshot, entry in gone if (lost := _lost(snapshot, entry, sink)))
    return Stand(
        state.name,
        state.branch,
        now,
        oldest.parent,
        commits=len(records),
        ranges=tuple(
            Range(key, begin[key], end) for key, end in records[0].end.items() if end > begin[key]
        ),
        rows=sum(entry.total.written for entry in records),
        foreign=foreign,
        since_ms=oldest.timestamp_ms,
        tags=_tags(state, sink, {each.id for each, _ in gone}, {lost.sink for lost in foreign}),
        expired=not there,
        floor=first.end if not there else Cut(),
    )


def _kept(
    state: State,
    sink: str,
    walked: Sequence[tuple[Snapshot, Entry | None]],
    going: int,
    below: Entry | None,
) -> Entry | None:
    """The sink's newest entry that stays: a claim, or records; or what can be told of it."""
    for _, entry in walked[going:]:
        if entry is not None and entry.sink == sink:
            return entry
    if below is not None:
        return below
    if going:
        first = walked[going - 1][1]
        assert first is not None
        # A ledger joins: it ended where the first entry that goes begins. A first entry of all
        # begins where its batch does.
        complete = walked[-1][0].parent is None
        end = Cut() if complete else first.begin
        number = BEGINNING if complete else first.batches[0] - 1
        place = "" if complete else first.source[0]
        return replace(
            first, begin=end, end=end, batches=(number, number), unwritten={}, watermark=None,
            rows=0, source=(place, place),
        )  # fmt: skip
    oldest, witness = walked[-1][0] if walked else None, state.witness
    if oldest is None or oldest.parent is None or witness is None:
        return None
    return parse(witness.summary) if witness.sequence < oldest.sequence else None


def _lost(snapshot: Snapshot, entry: Entry | None, sink: str) -> Lost | None:
    """What others did; not a claim, nor a compaction, which changes no row."""
    if entry is not None:
        if entry.sink == sink or not entry.ranges:
            return None
        return Lost(snapshot.id, entry.sink,
                    f"sink {entry.sink} wrote {entry.total.written} rows")  # fmt: skip
    added = int(snapshot.summary.get("added-records", 0))
    deleted = int(snapshot.summary.get("deleted-records", 0))
    hidden = int(snapshot.summary.get("added-delete-files", 0))
    if snapshot.operation == "replace" and added == deleted and not hidden:
        return None
    said = f"{snapshot.operation or 'a commit'}: {added} rows added, {deleted} deleted"
    return Lost(snapshot.id, "", said + (f", {hidden} delete files" if hidden else ""))


def _tags(state: State, sink: str, gone: set[int], losers: set[str]) -> dict[str, int | None]:
    """Witnesses of other sinks whose claims go: they count as far as those still stand.

    A sink that loses records keeps its witness: it shall see that it was robbed.
    """
    found: dict[str, int | None] = {}
    for tag, snapshot_id in state.tags.items():
        prefix, _, rest = tag.partition("/")
        whose, _, branch = rest.partition("/")
        if prefix != "frazil" or (branch or "main") != state.branch:
            continue
        if snapshot_id not in gone or whose in (sink, *losers):
            continue
        found[tag] = next(
            (each.id for each in state.history if each.id not in gone and _of(each, whose)), None
        )
    return found


def _of(snapshot: Snapshot, sink: str) -> bool:
    entry = parse(snapshot.summary)
    return entry is not None and entry.sink == sink


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Choice:
    """A boundary at which all tables stand together."""

    boundary: Boundary
    stands: tuple[Stand, ...]
    #: why it is not the one that was wanted
    because: tuple[str, ...] = ()

    @property
    def moves(self) -> tuple[Stand, ...]:
        return tuple(each for each in self.stands if each.moves)

    @property
    def expired(self) -> tuple[Stand, ...]:
        return tuple(each for each in self.stands if each.expired)

    @property
    def foreign(self) -> tuple[Lost, ...]:
        return tuple(lost for each in self.stands for lost in each.foreign)

    @property
    def trouble(self) -> str:
        """Why not even the beginning is possible."""
        return next((each.trouble for each in self.stands if each.trouble), "")


def choose(stream: Stream, states: Sequence[State], sink: str, start: Boundary) -> Choice:
    """The newest boundary at or below `start` that no table stands across."""
    boundary, because = start, list[str]()
    while True:
        stands: list[Stand] = []
        for state in states:
            found = stand(state, sink, boundary, stream)
            if found.trouble:
                lower = stream.below(found.limit)
                if lower.batch >= boundary.batch:  # of the beginning nothing can lie below
                    lower = stream.at(boundary.batch - 1)
                because.append(found.trouble)
                if boundary.batch == BEGINNING:
                    return Choice(boundary, (*stands, found), tuple(because))
                boundary = lower
                break
            stands.append(found)
        else:
            return Choice(boundary, tuple(stands), tuple(dict.fromkeys(because)))


def earliest(
    stream: Stream,
    states: Sequence[State],
    sink: str,
    refused: Choice,
    allowed: Callable[[Choice], bool],
) -> Boundary | None:
    """The oldest boundary beyond one that was refused which is `allowed`; None: not found."""
    floor: dict[Partition, int] = {}
    for each in refused.expired:
        for key, offset in each.floor.items():
            floor[key] = max(floor.get(key, 0), offset)
    here = stream.reaching(floor) if floor else stream.following(refused.boundary)
    for _ in range(_TRIES):
        if here is None:
            return None
        choice = choose(stream, states, sink, here)
        stands = choice.boundary == here and not choice.trouble and not choice.expired
        if stands and allowed(choice):
            return here
        here = stream.following(here)
    return None
