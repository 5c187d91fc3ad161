"""All tables of a sink, and its index, go back to a boundary together. Runs on the driver.

The steps, each of which can be the last one before a kill (decision 022 tells what follows then):

1. *Claim*: an empty commit with the next epoch, on the index first and then on every table. Every
   life that still runs is fenced; what is read from here on stays as it is.
2. *Note*: a property of the index says to which boundary. As long as it is there no life of the
   sink starts, and no other rewind. Then look once more: a life that claimed before it could see
   the note is seen now.
3. *Fork and move*, table by table: an empty commit with a newer epoch on top of the snapshot to go
   to, on a branch of its own; then branch and witness are pointed there at once, if nobody has
   written in between. So no moment shows the old snapshot with its old epoch, on which a life of
   that time could go on.
4. *Unstage*: the records of staged batches are removed.
5. *Index*: one commit takes the rows of all batches that went and puts the position where the
   tables stand. The index is not rolled back: other sinks have their ledgers in it, too.
6. The note is removed.

Run again after a kill it claims anew, finds the note, and does what is left: a table that has
nothing beyond the boundary any more is done. Everything here runs against `Table`, a small
interface, so that the same code runs against Iceberg and inside a simulation.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from frazil.core.errors import (
    Conflict,
    Expired,
    Fatal,
    Fenced,
    Gap,
    Retryable,
    Unavailable,
    Unknown,
)
from frazil.core.offsets import Cut, Range
from frazil.ingest.stage import StagedBatch
from frazil.table import commit
from frazil.table.boundary import Ancestry, Boundary, Choice, Stand, State, Stream, choose, stand
from frazil.table.commit import ATTEMPTS, FIRST_PAUSE, Clock, Target, witness_tag
from frazil.table.ledger import PREFIX, Entry, Snapshot, head
from frazil.table.tables import each_of

#: Property of the index, with the sink's id behind it, while a rewind is under way.
PROPERTY = "frazil.rewind"
#: Key of the index's snapshot that a rewind made, beside its entry's: the last batch that stayed.
REWOUND = f"{PREFIX}rewound"
#: The steps of a rewind, in order; those in the middle once for each table that moves.
STEPS = ("claimed", "noted", "forked", "moved", "unstaged", "indexed", "done")


class Table(commit.Table, Protocol):
    """What a rewind needs of a table."""

    def tags(self) -> dict[str, int]: ...
    def fork(self, branch: str, snapshot_id: int) -> None: ...
    def move(
        self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]
    ) -> None: ...


class Index(Table, Protocol):
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


@dataclass(frozen=True, slots=True)
class Note:
    """What the index's property says of a rewind under way."""

    to: str
    batch: int
    cut: Cut

    def text(self) -> str:
        return json.dumps({"to": self.to, "batch": self.batch, "cut": self.cut.nested()})


def note_of(properties: Mapping[str, str], sink: str) -> Note | None:
    said = properties.get(f"{PROPERTY}.{sink}")
    if said is None:
        return None
    values = json.loads(said)
    return Note(values["to"], values["batch"], Cut.of(values["cut"]))


def refuse_unfinished(properties: Mapping[str, str], sink: str) -> None:
    """Some tables may have gone back already, and the position has not."""
    note = note_of(properties, sink)
    if note is not None:
        raise Gap(
            f"cannot start sink {sink}: a rewind to {note.to} was begun and not finished; its "
            "tables do not stand together",
            hint=f"finish it: frazil rewind CONFIG --to '{note.to}'",
        )


def fence(index: Target, tables: Sequence[Target]) -> int:
    """Fence every life off, the index first, as a life does; the epoch that this takes."""
    heads = each_of(lambda target: target.head().entry, [index, *tables])
    epoch = 1 + max((entry.epoch for entry in heads if entry is not None), default=0)

    def take(target: Target) -> None:
        target.epoch = epoch
        found = target.claim()
        assert found.snapshot is not None
        target.witness(found.snapshot)

    take(index)
    each_of(take, tables)
    return epoch


class Rewinding:
    def __init__(
        self,
        sink: str,
        index: Index,
        tables: Mapping[str, tuple[Table, str]],
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
        self._rows_of_index = rows
        self._stored = staged
        self._without = without
        self._clock = clock
        self._step = step
        self._index_target = Target(index, "main", sink, 0, clock, claimed_first=True)
        self._targets = {
            name: Target(table, branch, sink, 0, clock) for name, (table, branch) in tables.items()
        }
        self.epoch = 0
        self._first = Cut()

    # ── looking ──────────────────────────────────────────────────────────────────────────────

    def read(self) -> None:
        """Index, tables and stage as they are now."""
        newest = self._index_target.head()
        if newest.entry is None:
            raise Gap(f"cannot rewind sink {self.sink}: its index knows nothing of it")
        self.entry = newest.entry
        self.rows = self._rows_of_index()
        self.stream = Stream(self.rows, self.entry.end)
        self.note = note_of(self._index.properties, self.sink)
        ranges: dict[str, dict[str, list[Range]]] = {}
        stored = self._stored()
        self.staged = len(stored)
        for batch in (each for _, each in stored if each is not None):
            for each in batch.tables:
                mine = ranges.setdefault(each.name, {})
                mine[batch.commit_id] = [tally.range for tally in each.tallies]
        self._held = ranges
        self.states = each_of(self._state, list(self._tables))

    def _state(self, name: str) -> State:
        table, branch = self._tables[name]
        table.refresh()
        return State(
            name,
            branch,
            Ancestry(table.history(branch)),
            table.tagged(self._tag(branch)),
            table.tags(),
            self._held.get(name, {}),
        )

    def _tag(self, branch: str) -> str:
        return witness_tag(self.sink) if branch == "main" else f"{witness_tag(self.sink)}/{branch}"

    def choice(self, start: Boundary) -> Choice:
        return choose(self.stream, self.states, self.sink, start)

    # ── doing ────────────────────────────────────────────────────────────────────────────────

    def claim(self) -> None:
        self.epoch = fence(self._index_target, list(self._targets.values()))
        self._step("claimed", "")

    def run(self, choice: Choice, to: str, refuse: Callable[[Choice], None]) -> None:
        """To the boundary of `choice`, which was chosen after the claim. `refuse`: raises where a
        table's stand must not be; asked again of each before it moves."""
        note = Note(to, choice.boundary.batch, choice.boundary.cut)
        if self.note != note:
            self._index.set_property(f"{PROPERTY}.{self.sink}", note.text())
        # A life that claimed the index before it could see the note is seen here, and goes on.
        if self._index_target.head().commit_id != self._index_target.seen:
            if self.note is None:
                self._index.remove_property(f"{PROPERTY}.{self.sink}")
            raise self._fenced(self._index.name)
        self._step("noted", "")
        boundary = choice.boundary
        source = _place(choice.stands)
        begin = self.stream.beginnings
        # A table cannot miss what lies before the beginning of a partition.
        self._first = Cut({key: o for key, o in boundary.cut.items() if o == begin[key]})
        each_of(lambda name: self._back(name, boundary, refuse), list(self._tables))
        for path, _ in self._stored():
            self._index.delete(path)
        self._step("unstaged", "")
        self._index_back(boundary, source)
        self._step("indexed", "")
        self._index.remove_property(f"{PROPERTY}.{self.sink}")
        self._step("done", "")

    def _back(self, name: str, boundary: Boundary, refuse: Callable[[Choice], None]) -> None:
        """One table: again until there is nothing of the sink beyond the boundary."""
        table, branch = self._tables[name]
        target = self._targets[name]
        trouble = ""
        for attempt in range(ATTEMPTS):
            if trouble:
                self._clock.sleep(FIRST_PAUSE * 2**attempt)
            found = stand(self._state(name), self.sink, boundary, self.stream)
            if not found.moves and not found.trouble and not found.expired:
                self._extend(target)
                return
            if found.trouble:
                raise Fatal(f"cannot rewind table {name}: {found.trouble}")
            refuse(Choice(boundary, (found,)))
            newest = head(table.history(branch), self.sink).commit_id
            if newest != target.seen:
                raise self._fenced(name)
            try:
                if found.then is None:
                    self._emptied(target, table, found)
                else:
                    self._forked(table, found)
                self._step("moved", name)
            except (Retryable, Unknown) as error:
                trouble = error.message  # moved or not: the next look tells
        raise Unavailable(f"cannot rewind table {name} in {ATTEMPTS} tries: {trouble}")

    def _forked(self, table: Table, found: Stand) -> None:
        assert found.then is not None
        assert found.entry is not None
        fork = f"frazil-rewind-{self.sink}"
        table.fork(fork, found.then)
        end = Cut({**self._first, **found.entry.end})
        entry = _claim(found.entry, self.epoch + 1, end)
        leftovers: list[str] = []

        def check(history: Iterator[Snapshot]) -> str | None:
            newest = next(history, None)
            there = None if newest is None else newest.id
            return None if there == found.then else f"branch {fork} is at {there}"

        try:
            table.append([], entry.summary(), branch=fork, check=check, leftovers=leftovers)
        except (Retryable, Unknown):
            table.refresh()  # applied or not
        claimed = head(table.history(fork), self.sink)
        if claimed.commit_id != entry.commit_ids[-1] or claimed.snapshot is None:
            raise Conflict(f"cannot claim branch {fork} of table {table.name}")
        self._step("forked", table.name)
        moves = {found.branch: claimed.snapshot.id, self._tag(found.branch): claimed.snapshot.id}
        table.move(
            {**found.tags, **moves, fork: None},
            expected={found.branch: found.now, fork: claimed.snapshot.id},
        )

    def _emptied(self, target: Target, table: Table, found: Stand) -> None:
        """A table that had nothing at the boundary has no snapshot, and then a claim.

        What slips in between is seen by the next look, and goes once more.
        """
        if found.branch != "main" and next(table.history("main"), None) is not None:
            raise Fatal(f"cannot rewind table {table.name}: its branch {found.branch} began empty, "
                        "and would begin with what main has now")  # fmt: skip
        self._step("forked", table.name)
        table.move(
            {**found.tags, found.branch: None, self._tag(found.branch): None},
            expected={found.branch: found.now},
        )
        self._extend(target)

    def _extend(self, target: Target) -> None:
        """A ledger that also knows partitions it has nothing of: a life of one table compares."""
        newest = target.head().entry
        if newest is not None and (newest.epoch > self.epoch or newest.end.reaches(self._first)):
            return  # claimed on top already, or no need
        target.epoch = self.epoch + 1
        claimed = target.claim(lambda end: Cut({**self._first, **end}))
        assert claimed.snapshot is not None
        target.witness(claimed.snapshot)

    def _index_back(self, boundary: Boundary, source: str) -> None:
        target, trouble = self._index_target, ""
        mine = ""
        for attempt in range(ATTEMPTS):
            if trouble:
                self._clock.sleep(FIRST_PAUSE * 2**attempt)
            newest = target.head()
            if newest.entry is None or newest.snapshot is None:
                raise Expired(f"cannot rewind the index {self._index.name}: its ledger is gone")
            if mine and newest.commit_id == mine:
                target.witness(newest.snapshot)
                return
            if newest.commit_id != target.seen:
                raise self._fenced(self._index.name)
            without = self._without(boundary.batch, self.epoch + 1)
            entry = _claim(newest.entry, self.epoch + 1, boundary.cut)
            entry = replace(entry, batches=(boundary.batch,) * 2, source=(source, source))
            # What the ledger said before, beyond the cut, is void: its rows are gone.
            summary = {**entry.summary(), REWOUND: str(boundary.batch)}
            mine = entry.commit_ids[-1]
            check = self._unchanged(newest.commit_id)
            leftovers: list[str] = []
            try:
                if without.removed:
                    self._index.rewrite(
                        without.removed, without.added, summary, since=without.since,
                        same=False, check=check, leftovers=leftovers,
                    )  # fmt: skip
                else:
                    self._index.append([], summary, branch="main", check=check, leftovers=leftovers)
            except (Retryable, Unknown) as error:
                trouble = error.message
        if target.head().commit_id == mine:
            return
        raise Unavailable(
            f"cannot rewind the index {self._index.name} in {ATTEMPTS} tries: {trouble}",
            hint="run it again: it goes on where it stopped",
        )

    def _unchanged(self, commit_id: str | None) -> Callable[[Iterator[Snapshot]], str | None]:
        def check(history: Iterator[Snapshot]) -> str | None:
            if head(history, self.sink).commit_id == commit_id:
                return None
            return f"the newest entry of sink {self.sink} is no longer {commit_id}"

        return check

    def _fenced(self, table: str) -> Fenced:
        return Fenced(
            f"cannot rewind sink {self.sink}: another life of it, or another rewind, claimed "
            f"{table} meanwhile",
            hint="stop that one, and run the rewind again",
        )


def _claim(base: Entry, epoch: int, end: Cut) -> Entry:
    """Nothing but a newer epoch, at a cut."""
    last = base.batches[1]
    return replace(
        base, epoch=epoch, commit_ids=(str(uuid.uuid4()),), batches=(last, last), begin=end,
        end=end, unwritten={}, watermark=None, rows=0, source=(base.source[1], base.source[1]),
    )  # fmt: skip


def _place(stands: Sequence[Stand]) -> str:
    """Where Spark's sources stood: only a DataFrame has such a place, and it fills one table."""
    found = [each.entry.source[1] for each in stands if each.entry is not None]
    return found[0] if len(found) == 1 else ""
