"""Rewinds all tables of a sink and its index to one boundary. Runs on the driver.

The process may be killed after any step (decision 022 gives the reason for each step, and the
recovery):

1. *Claim* the next epoch, on the index first and then on every table: this fences every run.
2. *Note* the boundary in a property of the index. No run starts while the property exists.
3. *Fork and move*, table by table: an empty commit with a newer epoch on top of the target
   snapshot, on a separate branch; then branch and tag are moved there in one commit.
4. *Unstage*: remove the batch records of staged batches.
5. *Index*: one commit removes the rows of all rewound batches and sets the new position.
6. Remove the note.

A rewind that is run again after a kill claims a new epoch, finds the note, and does the remaining
steps. This module runs against `iceberg.table.Table`, so the same code runs against Iceberg and in
a simulation.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from frazil.commit.protocol import ATTEMPTS, FIRST_PAUSE, TableCommitter
from frazil.commit.rewind_note import PROPERTY, RewindNote, note_of
from frazil.commit.rewind_plan import (
    Ancestry,
    BatchTimeline,
    Boundary,
    RewindPlan,
    TableRewind,
    TableState,
    choose,
    empty,
    table_rewind,
)
from frazil.commit.tables import parallel_map
from frazil.errors import (
    CommitStateUnknown,
    Conflict,
    Fatal,
    Fenced,
    Gap,
    Retryable,
    Unavailable,
)
from frazil.iceberg.table import LiveFile, Snapshot, Table
from frazil.ledger.entry import PREFIX, LedgerEntry, head
from frazil.ledger.staged_batch import StagedBatch
from frazil.ledger.tags import ledger_tag
from frazil.offsets import Cut, Range
from frazil.retry import Clock

#: Summary key of the index snapshot that a rewind commits: the last batch that remains.
REWOUND = f"{PREFIX}rewound"


@dataclass(frozen=True, slots=True)
class IndexRemoval:
    """Removes the rows of batches after a given one from the index: files to remove and to add,
    relative to snapshot `since`."""

    since: int
    removed: Sequence[LiveFile] = ()
    added: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RewindState:
    """The state of a sink before a step: of its index, tables and staged batches."""

    #: the newest entry of the index
    entry: LedgerEntry
    timeline: BatchTimeline
    note: RewindNote | None
    #: the number of batch records
    staged: int
    #: table → commit id of a staged batch → its ranges
    staged_ranges: Mapping[str, dict[str, list[Range]]]
    tables: Sequence[TableState]


def fence(index: TableCommitter, tables: Sequence[TableCommitter]) -> int:
    """Fence every run: claim the next epoch on the index first, as a run does. Returns it."""
    heads = parallel_map(lambda target: target.head().entry, [index, *tables])
    epoch = 1 + max((entry.epoch for entry in heads if entry is not None), default=0)
    _claim_epoch(index, epoch)
    parallel_map(lambda target: _claim_epoch(target, epoch), tables)
    return epoch


def _claim_epoch(
    target: TableCommitter, epoch: int, extend: Callable[[Cut], Cut] = lambda end: end
) -> None:
    target.epoch = epoch
    claimed = target.claim(extend)
    assert claimed.snapshot is not None
    target.set_tag(claimed.snapshot)


class RewindSteps:
    def __init__(
        self,
        sink: str,
        index: Table,
        tables: Mapping[str, tuple[Table, str]],
        *,
        rows: Callable[[], pa.Table],
        staged: Callable[[], Sequence[tuple[str, StagedBatch | None]]],
        without: Callable[[int, int], IndexRemoval],
        clock: Clock,
        step: Callable[[str, str], None] = lambda name, table: None,
    ) -> None:
        """`tables`: name → (table, branch). `rows`: reads the sink's rows of the index. `staged`:
        reads the staged batch records, with their paths. `without`: removes from the index the
        batches after a batch number; new files are named for the given epoch."""
        self.sink = sink
        self._index = index
        self._tables = dict(tables)
        self._rows = rows
        self._staged_records = staged
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

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def read(self) -> None:
        """Read the current state of index, tables and staged batches."""
        entry = self._index_target.head().entry
        if entry is None:
            raise Gap(f"cannot rewind sink {self.sink}: its index has no entry of it")
        timeline = BatchTimeline(self._rows(), entry.end)
        note = note_of(self._index.properties, self.sink)
        stored = self._staged_records()
        ranges: dict[str, dict[str, list[Range]]] = defaultdict(dict)
        for batch in (staged for _, staged in stored if staged is not None):
            for table in batch.tables:
                ranges[table.name][batch.commit_id] = [tally.range for tally in table.tallies]
        tables = parallel_map(lambda name: self._table(name, ranges), list(self._tables))
        self.state = RewindState(entry, timeline, note, len(stored), ranges, tables)

    def _table(self, name: str, ranges: Mapping[str, dict[str, list[Range]]]) -> TableState:
        table, branch = self._tables[name]
        table.refresh()
        tagged = table.tagged(ledger_tag(self.sink, branch))
        history = Ancestry(table.history(branch))
        return TableState(name, branch, history, tagged, table.tags(), ranges.get(name, {}))

    def choice(self, start: Boundary) -> RewindPlan:
        return choose(self.state.timeline, self.state.tables, self.sink, start)

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def claim(self) -> None:
        self.epoch = fence(self._index_target, list(self._targets.values()))
        self._step("claimed", "")

    def run(self, choice: RewindPlan, to: str, refuse: Callable[[RewindPlan], None]) -> None:
        """Rewind to the boundary of `choice`, which was chosen after the claim. `refuse` raises if
        a table's rewind is not allowed; it is called again for each table before it moves."""
        boundary, key = choice.boundary, f"{PROPERTY}.{self.sink}"
        note = RewindNote(to, boundary.batch, boundary.cut.nested())
        if self.state.note != note:
            self._index.set_property(key, note.text())
        # A run that claimed the index before it could read the note wins: the rewind stops.
        if self._index_target.head().commit_id != self._index_target.seen:
            if self.state.note is None:
                self._index.remove_property(key)
            raise self._fenced(self._index.name)
        self._step("noted", "")
        begin = self.state.timeline.beginnings
        # A table cannot lack offsets before the beginning of a partition.
        self._first = Cut({p: o for p, o in boundary.cut.items() if o == begin[p]})
        parallel_map(lambda name: self._rewind_table(name, boundary, refuse), list(self._tables))
        for path, _ in self._staged_records():
            self._index.delete(path)  # the batch record only: no table refers to it
        self._step("unstaged", "")
        self._rewind_index(boundary, _source_position(choice.tables))
        self._step("indexed", "")
        self._index.remove_property(key)
        self._step("done", "")

    def _attempt_until(self, done: Callable[[], bool], subject: str) -> None:
        """Call `done` until it reports True. It reads the state before it acts: only this shows
        whether a failed attempt was applied."""
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
            f"cannot rewind {subject} in {ATTEMPTS} tries: {trouble}",
            hint="run the command again: it continues where it stopped",
        )

    def _rewind_table(
        self, name: str, boundary: Boundary, refuse: Callable[[RewindPlan], None]
    ) -> None:
        """Rewind one table until it has no record of the sink beyond the boundary."""
        table, target = self._tables[name][0], self._targets[name]

        def done() -> bool:
            table_state = self._table(name, self.state.staged_ranges)
            rewind = table_rewind(table_state, self.sink, boundary, self.state.timeline)
            if rewind.trouble:
                raise Fatal(f"cannot rewind table {name}: {rewind.trouble}")
            if not rewind.rewound and not rewind.expired:
                self._extend(target)
                return True
            refuse(RewindPlan(boundary, (rewind,)))
            if target.head().commit_id != target.seen:
                raise self._fenced(name)
            if rewind.snapshot_then is None:
                self._empty_table(target, table, rewind)
            else:
                self._fork_and_move(table, rewind)
            self._step("moved", name)
            return False

        self._attempt_until(done, f"table {name}")

    def _fork_and_move(self, table: Table, rewind: TableRewind) -> None:
        kept = rewind.entry
        assert rewind.snapshot_then is not None
        assert kept is not None
        fork = f"frazil-rewind-{self.sink}"
        table.fork(fork, rewind.snapshot_then)
        end = Cut({**self._first, **kept.end})
        claim = self._claim(kept, end, kept.batches[1], kept.source[1])

        def check(history: Iterator[Snapshot]) -> str | None:
            newest = next(history, None)
            return (
                None if newest and newest.id == rewind.snapshot_then else f"branch {fork} has moved"
            )

        try:
            table.append([], claim.summary(), branch=fork, check=check, leftovers=[])
        except (Retryable, CommitStateUnknown):
            table.refresh()  # applied or not
        claimed = head(table.history(fork), self.sink)
        if claimed.commit_id != claim.commit_ids[-1] or claimed.snapshot is None:
            raise Conflict(f"cannot claim branch {fork} of table {table.name}")
        self._step("forked", table.name)
        tag = ledger_tag(self.sink, rewind.branch)
        table.move(
            {
                **rewind.tags,
                rewind.branch: claimed.snapshot.id,
                tag: claimed.snapshot.id,
                fork: None,
            },
            expected={rewind.branch: rewind.snapshot_now, fork: claimed.snapshot.id},
        )

    def _empty_table(self, target: TableCommitter, table: Table, rewind: TableRewind) -> None:
        """Remove all snapshots of a table that was empty at the boundary, then claim it.

        The next attempt sees a commit made in between, and removes it as well.
        """
        if rewind.branch != "main" and next(table.history("main"), None) is not None:
            raise Fatal(
                f"cannot rewind table {table.name}: its branch {rewind.branch} was "
                "created empty, and would be created again with the rows that main has "
                "now"
            )
        self._step("forked", table.name)
        table.move(
            {**rewind.tags, rewind.branch: None, ledger_tag(self.sink, rewind.branch): None},
            expected={rewind.branch: rewind.snapshot_now},
        )
        self._extend(target)

    def _extend(self, target: TableCommitter) -> None:
        """Add partitions without records to the ledger: a sink of one table compares them."""
        newest = target.head().entry
        if newest is not None and (newest.epoch > self.epoch or newest.end.reaches(self._first)):
            return  # claimed already, or nothing to add
        _claim_epoch(target, self.epoch + 1, lambda end: Cut({**self._first, **end}))

    def _rewind_index(self, boundary: Boundary, source: str) -> None:
        target = self._index_target
        entry = self._claim(self.state.entry, boundary.cut, boundary.batch, source)
        # Earlier ledger entries beyond the cut are void: their rows are removed.
        summary = {**entry.summary(), REWOUND: str(boundary.batch)}

        def check(history: Iterator[Snapshot]) -> str | None:
            if head(history, self.sink).commit_id == target.seen:
                return None
            return f"the newest entry of sink {self.sink} is no longer {target.seen}"

        def done() -> bool:
            newest = target.head()
            if newest.snapshot is not None and newest.commit_id == entry.commit_ids[-1]:
                target.set_tag(newest.snapshot)
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

        self._attempt_until(done, f"the index {self._index.name}")

    def _claim(self, base: LedgerEntry, end: Cut, batch: int, source: str) -> LedgerEntry:
        """An empty entry with a newer epoch at the cut `end`."""
        claim = empty(base, end, batch, source)
        return replace(claim, epoch=self.epoch + 1, commit_ids=(str(uuid.uuid4()),))

    def _fenced(self, table: str) -> Fenced:
        return Fenced(
            f"cannot rewind sink {self.sink}: another run of it, or another rewind, "
            f"claimed {table} at the same time",
            hint="stop the other one, then run the rewind again",
        )


def _source_position(rewinds: Sequence[TableRewind]) -> str:
    """The position of Spark's sources. Only a DataFrame sink has one, and it fills one table."""
    sources = [rewind.entry.source[1] for rewind in rewinds if rewind.entry is not None]
    return sources[0] if len(sources) == 1 else ""
