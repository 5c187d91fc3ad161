"""All tables of a sink, and its index, go back to a boundary together. Runs on the driver.

The steps, each of which can be the last one before a kill (decision 022 tells what follows then,
and why each is there):

1. *Claim* the next epoch, on the index first and then on every table: every life is fenced.
2. *Note* to which boundary, in a property of the index. As long as it is there no life starts.
3. *Fork and move*, table by table: an empty commit with a newer epoch on top of the snapshot to go
   to, on a branch of its own; then branch and witness are pointed there at once.
4. *Unstage*: the records of staged batches are removed.
5. *Index*: one commit takes out the rows of all batches that went, and is the new position.
6. The note is removed.

Run again after a kill it claims anew, finds the note, and does what is left. Everything here runs
against `Table`, a small interface, so that the same code runs against Iceberg and in a simulation.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from frazil.commit import protocol
from frazil.commit.protocol import ATTEMPTS, FIRST_PAUSE, Clock, TableCommitter
from frazil.commit.rewind_plan import (
    Ancestry,
    BatchTimeline,
    Boundary,
    RewindPlan,
    TableRewind,
    TableState,
    choose,
    empty,
    stand,
)
from frazil.commit.tables import ledger_tag_of, parallel_map
from frazil.errors import (
    CommitStateUnknown,
    Conflict,
    Fatal,
    Fenced,
    Gap,
    Retryable,
    Unavailable,
)
from frazil.ledger.entry import PREFIX, LedgerEntry, Snapshot, head
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut, Range

#: Property of the index, with the sink's id behind it, while a rewind is under way.
PROPERTY = "frazil.rewind"
#: Key of the index's snapshot that a rewind made, beside its entry's: the last batch that stayed.
REWOUND = f"{PREFIX}rewound"
#: The steps of a rewind, in order; those in the middle once for each table that moves.
STEPS = ("claimed", "noted", "forked", "moved", "unstaged", "indexed", "done")


class RewindableTable(protocol.CommitTable, Protocol):
    """What a rewind needs of a table."""

    def tags(self) -> dict[str, int]: ...
    def fork(self, branch: str, snapshot_id: int) -> None: ...
    def move(
        self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]
    ) -> None: ...


class RewindableIndex(RewindableTable, Protocol):
    """And of the index."""

    @property
    def properties(self) -> dict[str, str]: ...
    def set_property(self, key: str, value: str) -> None: ...
    def remove_property(self, key: str) -> None: ...
    def rewrite(
        self,
        removed: Sequence[Any],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        since: int,
        same: bool,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Without:
    """The index without the rows of batches behind one: files that go and that come, as of a
    snapshot."""

    since: int
    removed: Sequence[Any] = ()
    added: Sequence[str] = ()


class RewindNote(NamedTuple):
    """What the index's property says of a rewind under way."""

    to: str
    batch: int
    cut: dict[str, dict[str, int]]


def note_of(properties: Mapping[str, str], sink: str) -> RewindNote | None:
    said = properties.get(f"{PROPERTY}.{sink}")
    return None if said is None else RewindNote(**json.loads(said))


def refuse_unfinished(properties: Mapping[str, str], sink: str, what: str = "") -> None:
    """Some tables may have gone back already, and the position has not."""
    note = note_of(properties, sink)
    if note is not None:
        raise Gap(
            f"cannot {what or f'start sink {sink}'}: a rewind to {note.to} was begun and not "
            "finished; its tables do not stand together",
            hint=f"finish it: frazil rewind CONFIG --to '{note.to}'",
        )


def fence(index: TableCommitter, tables: Sequence[TableCommitter]) -> int:
    """Fence every life off, the index first, as a life does; the epoch that this takes."""
    heads = parallel_map(lambda target: target.head().entry, [index, *tables])
    epoch = 1 + max((entry.epoch for entry in heads if entry is not None), default=0)
    _take(index, epoch)
    parallel_map(lambda target: _take(target, epoch), tables)
    return epoch


def _take(
    target: TableCommitter, epoch: int, extend: Callable[[Cut], Cut] = lambda end: end
) -> None:
    target.epoch = epoch
    claimed = target.claim(extend)
    assert claimed.snapshot is not None
    target.witness(claimed.snapshot)


class RewindSteps:
    def __init__(
        self,
        sink: str,
        index: RewindableIndex,
        tables: Mapping[str, tuple[RewindableTable, str]],
        *,
        rows: Callable[[], pa.Table],
        staged: Callable[[], Sequence[tuple[str, StagedBatch | None]]],
        without: Callable[[int, int], Without],
        clock: Clock,
        step: Callable[[str, str], None] = lambda name, table: None,
    ) -> None:
        """`tables`: name → table and branch. `rows`: of the index, of this sink alone, as they are
        now. `staged`: the records in the stage, with their paths. `without`: the index without the
        batches behind a number, for files of an epoch."""
        self.sink = sink
        self._index = index
        self._tables = dict(tables)
        self._rows = rows
        self._stored = staged
        self._without = without
        self._clock = clock
        self._step = step
        self._index_target = TableCommitter(index, "main", sink, 0, clock, claimed_first=True)
        self._targets = {
            name: TableCommitter(table, branch, sink, 0, clock)
            for name, (table, branch) in tables.items()
        }
        self.epoch = 0
        self._first = Cut()

    # ── looking ──────────────────────────────────────────────────────────────────────────────

    def read(self) -> None:
        """Index, tables and stage as they are now."""
        entry = self._index_target.head().entry
        if entry is None:
            raise Gap(f"cannot rewind sink {self.sink}: its index knows nothing of it")
        self.entry = entry
        self.stream = BatchTimeline(self._rows(), entry.end)
        self.note = note_of(self._index.properties, self.sink)
        stored = self._stored()
        self.staged = len(stored)
        self._held: dict[str, dict[str, list[Range]]] = defaultdict(dict)
        for batch in (each for _, each in stored if each is not None):
            for table in batch.tables:
                ranges = [tally.range for tally in table.tallies]
                self._held[table.name][batch.commit_id] = ranges
        self.states = parallel_map(self._state, list(self._tables))

    def _state(self, name: str) -> TableState:
        table, branch = self._tables[name]
        table.refresh()
        witness = table.tagged(ledger_tag_of(self.sink, branch))
        history = Ancestry(table.history(branch))
        return TableState(name, branch, history, witness, table.tags(), self._held.get(name, {}))

    def choice(self, start: Boundary) -> RewindPlan:
        return choose(self.stream, self.states, self.sink, start)

    # ── doing ────────────────────────────────────────────────────────────────────────────────

    def claim(self) -> None:
        self.epoch = fence(self._index_target, list(self._targets.values()))
        self._step("claimed", "")

    def run(self, choice: RewindPlan, to: str, refuse: Callable[[RewindPlan], None]) -> None:
        """To the boundary of `choice`, which was chosen after the claim. `refuse`: raises where a
        table's stand must not be; asked again of each before it moves."""
        boundary, key = choice.boundary, f"{PROPERTY}.{self.sink}"
        note = RewindNote(to, boundary.batch, boundary.cut.nested())
        if self.note != note:
            self._index.set_property(key, json.dumps(note._asdict()))
        # A life that claimed the index before it could see the note is seen here, and goes on.
        if self._index_target.head().commit_id != self._index_target.seen:
            if self.note is None:
                self._index.remove_property(key)
            raise self._fenced(self._index.name)
        self._step("noted", "")
        begin = self.stream.beginnings
        # A table cannot miss what lies before the beginning of a partition.
        self._first = Cut({p: o for p, o in boundary.cut.items() if o == begin[p]})
        parallel_map(lambda name: self._back(name, boundary, refuse), list(self._tables))
        for path, _ in self._stored():
            self._index.delete(path)  # the record alone, to which no table refers: no guard
        self._step("unstaged", "")
        self._index_back(boundary, _place(choice.stands))
        self._step("indexed", "")
        self._index.remove_property(key)
        self._step("done", "")

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Look and do, again until a look shows that it is done: whether an attempt that failed
        was applied after all, only the next look tells."""
        trouble = ""
        for attempt in range(ATTEMPTS + 1):
            if trouble:
                self._clock.sleep(FIRST_PAUSE * 2**attempt)
            try:
                if done():
                    return
            except (Retryable, CommitStateUnknown) as error:
                trouble = error.message
        raise Unavailable(
            f"cannot rewind {what} in {ATTEMPTS} tries: {trouble}",
            hint="run it again: it goes on where it stopped",
        )

    def _back(self, name: str, boundary: Boundary, refuse: Callable[[RewindPlan], None]) -> None:
        """One table, until there is nothing of the sink beyond the boundary."""
        table, target = self._tables[name][0], self._targets[name]

        def done() -> bool:
            found = stand(self._state(name), self.sink, boundary, self.stream)
            if found.trouble:
                raise Fatal(f"cannot rewind table {name}: {found.trouble}")
            if not found.moves and not found.expired:
                self._extend(target)
                return True
            refuse(RewindPlan(boundary, (found,)))
            if target.head().commit_id != target.seen:
                raise self._fenced(name)
            if found.then is None:
                self._emptied(target, table, found)
            else:
                self._forked(table, found)
            self._step("moved", name)
            return False

        self._until(done, f"table {name}")

    def _forked(self, table: RewindableTable, found: TableRewind) -> None:
        kept = found.entry
        assert found.then is not None
        assert kept is not None
        fork = f"frazil-rewind-{self.sink}"
        table.fork(fork, found.then)
        end = Cut({**self._first, **kept.end})
        claim = self._claim(kept, end, kept.batches[1], kept.source[1])

        def check(history: Iterator[Snapshot]) -> str | None:
            newest = next(history, None)
            return None if newest and newest.id == found.then else f"branch {fork} has moved"

        try:
            table.append([], claim.summary(), branch=fork, check=check, leftovers=[])
        except (Retryable, CommitStateUnknown):
            table.refresh()  # applied or not
        claimed = head(table.history(fork), self.sink)
        if claimed.commit_id != claim.commit_ids[-1] or claimed.snapshot is None:
            raise Conflict(f"cannot claim branch {fork} of table {table.name}")
        self._step("forked", table.name)
        tag = ledger_tag_of(self.sink, found.branch)
        table.move(
            {**found.tags, found.branch: claimed.snapshot.id, tag: claimed.snapshot.id, fork: None},
            expected={found.branch: found.now, fork: claimed.snapshot.id},
        )

    def _emptied(self, target: TableCommitter, table: RewindableTable, found: TableRewind) -> None:
        """A table that had nothing at the boundary has no snapshot, and then a claim.

        What slips in between is seen by the next look, and goes once more.
        """
        if found.branch != "main" and next(table.history("main"), None) is not None:
            raise Fatal(
                f"cannot rewind table {table.name}: its branch {found.branch} began empty, "
                "and would begin with what main has now"
            )
        self._step("forked", table.name)
        table.move(
            {**found.tags, found.branch: None, ledger_tag_of(self.sink, found.branch): None},
            expected={found.branch: found.now},
        )
        self._extend(target)

    def _extend(self, target: TableCommitter) -> None:
        """A ledger that also knows partitions it has nothing of: a life of one table compares."""
        newest = target.head().entry
        if newest is not None and (newest.epoch > self.epoch or newest.end.reaches(self._first)):
            return  # claimed on top already, or no need
        _take(target, self.epoch + 1, lambda end: Cut({**self._first, **end}))

    def _index_back(self, boundary: Boundary, source: str) -> None:
        target = self._index_target
        entry = self._claim(self.entry, boundary.cut, boundary.batch, source)
        # What the ledger said before, beyond the cut, is void: its rows are gone.
        summary = {**entry.summary(), REWOUND: str(boundary.batch)}

        def check(history: Iterator[Snapshot]) -> str | None:
            if head(history, self.sink).commit_id == target.seen:
                return None
            return f"the newest entry of sink {self.sink} is no longer {target.seen}"

        def done() -> bool:
            newest = target.head()
            if newest.snapshot is not None and newest.commit_id == entry.commit_ids[-1]:
                target.witness(newest.snapshot)
                return True
            if newest.commit_id != target.seen:
                raise self._fenced(self._index.name)
            without = self._without(boundary.batch, self.epoch + 1)
            if without.removed:
                self._index.rewrite(
                    without.removed,
                    without.added,
                    summary,
                    since=without.since,
                    same=False,
                    check=check,
                    leftovers=[],
                )
            else:
                self._index.append([], summary, branch="main", check=check, leftovers=[])
            return False

        self._until(done, f"the index {self._index.name}")

    def _claim(self, base: LedgerEntry, end: Cut, batch: int, source: str) -> LedgerEntry:
        """Nothing but a newer epoch, at a cut."""
        claim = empty(base, end, batch, source)
        return replace(claim, epoch=self.epoch + 1, commit_ids=(str(uuid.uuid4()),))

    def _fenced(self, table: str) -> Fenced:
        return Fenced(
            f"cannot rewind sink {self.sink}: another life of it, or another rewind, claimed "
            f"{table} meanwhile",
            hint="stop that one, and run the rewind again",
        )


def _place(stands: Sequence[TableRewind]) -> str:
    """Where Spark's sources stood: only a DataFrame has such a place, and it fills one table."""
    found = [each.entry.source[1] for each in stands if each.entry is not None]
    return found[0] if len(found) == 1 else ""
