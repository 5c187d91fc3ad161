"""The committer commits staged batches, table by table, on its own thread.

A batch is committed to its tables first and to the index last: the index's ledger is the stream's
position, the cut that all tables have reached. A table that fails temporarily does not stop the
stream or the other tables: its staged batches wait and are committed together later. `protocol`
describes how one table takes a batch exactly once, `commit_queue` when it is due.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from frazil.commit.batch_chain import entry_of
from frazil.commit.commit_queue import (
    INDEX,
    BackpressureLimits,
    CommitQueue,
    CommitTrigger,
    PendingBatch,
)
from frazil.commit.protocol import TableCommitter
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Expired,
    Fatal,
    Fenced,
    FrazilError,
    Gap,
    IdentityMismatch,
    Overlap,
    Retryable,
)
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut
from frazil.retry import Clock

#: Tables committed to concurrently.
THREADS = 4
#: Maximum number of batches in one snapshot: its summary lists their ids.
TOGETHER = 256

#: Seconds after which the files of a staged batch are checked before its commit.
AGED = 600.0

#: A batch, and the snapshot that holds it in each of its tables.
Located = tuple[StagedBatch, Mapping[str, Snapshot]]


@dataclass
class Progress:
    """The state of a run for status and metrics. Written by the committer; `advice` at the start,
    `on_complete_error` by the thread of that callback."""

    position: Cut = field(default_factory=Cut)
    committed_batches: int = 0
    commits: int = 0
    last_commit_ms: int = 0
    #: table → why commits to it fail at present
    stuck: dict[str, str] = field(default_factory=dict)
    blocked: str = ""
    unpublished: str = ""
    #: why index maintenance failed
    maintenance_error: str = ""
    #: the error of `on_complete`, until a later call succeeds
    on_complete_error: str = ""
    #: suggestions for the owner of tables that existed before the sink
    advice: list[str] = field(default_factory=list)

    @property
    def trouble(self) -> str:
        return "; ".join(list(self.stuck.values()))


class CommitEvents(Protocol):
    """What the committer asks of the rest of a run, and what it reports. Called on the committer's
    threads."""

    def table(self, name: str) -> TableCommitter:
        """The table to commit to; raises where it cannot take commits."""

    def trigger(self, name: str) -> CommitTrigger: ...

    def recorded_tables(self) -> Mapping[str, str] | str:
        """The tables to record in the index entry: table → uuid, or the property that has them."""

    def index_manifests(self, located: Sequence[Located]) -> list[str]:
        """Write the index rows of these batches."""

    def step(
        self, name: str, batches: Sequence[StagedBatch], table: str, seconds: float = 0.0
    ) -> None:
        """A named moment of batches that are committed together; `seconds`: of the commit that it
        ends."""

    def failed(self, table: str, error: FrazilError, seconds: float) -> None:
        """A commit failed, and is absorbed: its batches wait."""

    def indexed(self, batches: Sequence[StagedBatch]) -> None:
        """The batches are in the index; the new position is not published yet."""

    def committed(self, batches: Sequence[StagedBatch]) -> None:
        """The new position is published."""

    def maintain(self) -> float | None:
        """Run maintenance after a commit to the index. Returns when to call again if nothing is
        committed until then. Must not raise."""


class Committer:
    """Commits staged batches in order: each to its tables, then to the index. Runs on one driver
    thread, with a small pool if several tables are due."""

    def __init__(
        self,
        events: CommitEvents,
        index: TableCommitter,
        progress: Progress,
        limits: BackpressureLimits,
        *,
        clock: Clock = time,
        alone: bool = True,
    ) -> None:
        """`alone`: a single table takes all records, so its ledger is never behind the index, and
        its errors stop the stream."""
        self.progress = progress
        self._events = events
        self._index = index
        self.queue = CommitQueue(limits, events.trigger, clock, alone)
        self._changed = threading.Condition()
        #: (commit id, table) → when the batch's files were last checked
        self._checked_at: dict[tuple[str, str], float] = {}
        #: a batch whose staged files are gone: the next run reads its offsets again
        self._unstaged: FrazilError | None = None
        self._failure: FrazilError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, staged: Sequence[StagedBatch] = ()) -> None:
        """`staged`: the batches that an earlier run left, however many wait."""
        self._thread = threading.Thread(target=self._run, name="frazil-committer", daemon=True)
        self._thread.start()
        for batch in staged:
            self.submit(batch, bounded=False)

    @property
    def pending(self) -> list[StagedBatch]:
        with self._changed:
            return [item.batch for item in self.queue.pending]

    @property
    def failure(self) -> FrazilError | None:
        return self._failure

    def submit(self, batch: StagedBatch, bounded: bool = True) -> None:
        """Hand over a staged batch; blocks while the waiting batches exceed the bounds."""
        with self._changed:
            while bounded and (reason := self.queue.over()) and not self.queue.flushing:
                self._raise_failure()
                self.progress.blocked = self._with_cause(reason)
                self._changed.wait(1.0)
            self._raise_failure()
            self.progress.blocked = ""
            self.queue.add(batch)
            self._changed.notify_all()

    def wait_until(self, cut: Mapping, timeout: float | None = None) -> bool:  # type: ignore[type-arg]
        """Block until every offset below `cut` is committed. False when the time is up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self.progress.position.reaches(cut), timeout
            )
            reached = self.progress.position.reaches(cut)
            if not reached:
                self._raise_failure()
            return reached

    def hurry(self) -> None:
        """Commit the waiting batches now, ignoring intervals, and stop blocking at the bounds."""
        with self._changed:
            self.queue.hurried = True
            self._changed.notify_all()

    def adapt(self, limits: BackpressureLimits) -> None:
        """From now on so much may wait; the triggers of the tables may have changed, too."""
        with self._changed:
            self.queue.limits = limits
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Commit the waiting batches now. False if that times out or is impossible."""
        with self._changed:
            self.queue.flushers += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: self._failure or not self.queue.pending or self.stalled(), timeout
                )
            finally:
                self.queue.flushers -= 1
            self._raise_failure()
            return not self.queue.pending

    def stalled(self) -> FrazilError | None:
        """The error that stops all commits until an operator repairs a table; None otherwise."""
        with self._changed:
            return self.queue.stalled()

    def close(self) -> None:
        """End the thread after the current commit. Staged batches wait for the next run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._closed:
                        return
                    due = self.queue.due()
                    nap = self.queue.nap()
                    if not due and (nap is None or nap > 0):
                        self._changed.wait(nap)
                        continue
                if due:
                    self.round(due)
                else:
                    self.queue.maintain_at = self._events.maintain()
        except FrazilError as error:
            self._fail(error)
        except Exception as error:
            # The thread's outermost frame: an unexpected error must also stop the stream.
            self._fail(FrazilError(f"cannot commit: {type(error).__name__}: {error}"))
            raise

    def round(self, due: Sequence[str]) -> None:
        """Commit to each due table, then to the index up to the batch that all tables have."""
        names = [name for name in due if name != INDEX]
        pending = self._snapshot_of_pending()
        if len(names) > 1:
            with ThreadPoolExecutor(min(THREADS, len(names)), "frazil-committer") as pool:
                list(pool.map(lambda name: self._commit_table(name, pending), names))
        for name in names if len(names) == 1 else []:
            self._commit_table(name, pending)
        if self.queue.needs_operator.keys() - {INDEX}:
            self._refuse_overtaken()
        done = list(itertools.takewhile(lambda item: not item.left, pending))[:TOGETHER]
        if done and INDEX in due:
            self._attempt(INDEX, lambda: self._commit_index(done))

    def _refuse_overtaken(self) -> None:
        """Before calling for an operator: raises Fenced if a newer epoch has taken over."""
        try:
            self._index.still_newest()
        except Fenced:
            raise
        except FrazilError:
            pass  # commits to the index report its own errors

    def _snapshot_of_pending(self) -> list[PendingBatch]:
        with self._changed:
            return list(self.queue.pending)

    def _commit_table(self, name: str, pending: Sequence[PendingBatch]) -> None:
        waiting = [item for item in pending if item.lacks(name)]
        chosen = waiting[:TOGETHER]
        batches = [item.batch for item in chosen]
        began = self.queue.clock.monotonic()

        def commit() -> None:
            target = self._events.table(name)
            for batch in batches:
                if batch.table(name).uuid != target.table.uuid:
                    raise IdentityMismatch(
                        f"cannot commit to table {name}: it was dropped and recreated; a "
                        f"batch was staged for uuid {batch.table(name).uuid}, found "
                        f"{target.table.uuid}"
                    )
            where = self._commit_batches(
                "",
                target,
                batches,
                lambda rest: self._files(rest, target),
                lambda rest: replace(
                    entry_of(rest, name, target.epoch, None if self.queue.alone else target.end),
                    index=self._index.table.name,
                ),
            )
            with self._changed:
                for item in chosen:
                    item.snapshots[name] = replace(where[item.batch.commit_id], summary={})
                self._changed.notify_all()

        self._attempt(name, commit)
        if len(chosen) == len(waiting):  # else the rest is due at once
            self.queue.committed(name, began, batches[-1])

    def _files(self, batches: Sequence[StagedBatch], target: TableCommitter) -> list[str]:
        """The batches' manifests for a table. Iceberg would commit missing files, too, and make the
        table unreadable; so the files of batches that may have waited long are checked first."""
        name, now = target.table.name, self.queue.clock.monotonic()
        old = [
            batch
            for batch in batches
            if batch.epoch != target.epoch or time.time() - batch.staged_at_ms / 1000 > AGED
            if now - self._checked_at.get((batch.commit_id, name), -AGED) >= AGED
        ]
        self._refuse_missing(old, target)
        self._checked_at |= {(batch.commit_id, name): now for batch in old}
        return _manifests(batches, name)

    def _refuse_missing(self, batches: Sequence[StagedBatch], target: TableCommitter) -> None:
        """Raises if staged files of the batches are gone."""
        name = target.table.name
        for batch in batches:
            if gone := target.table.lacking(batch.table(name).manifests):
                self._unstaged = Expired(
                    f"cannot commit {ranges_of(batch, name)} to table {name}: {len(gone)} "
                    f"of its staged files are missing, for example {gone[0]}",
                    hint="something removed files that no snapshot refers to yet (orphan "
                    "removal, a lifecycle rule). Start the sink again: it reads these "
                    "offsets again, or reports those that Kafka no longer has",
                )
                raise self._unstaged

    def _commit_index(self, done: Sequence[PendingBatch]) -> None:
        batches = [item.batch for item in done]
        located = {item.batch.commit_id: (item.batch, item.snapshots) for item in done}
        tables = self._events.recorded_tables()
        self._commit_batches(
            "index-",
            self._index,
            batches,
            lambda rest: self._events.index_manifests([located[b.commit_id] for b in rest]),
            lambda rest: replace(entry_of(rest, INDEX, self._index.epoch), tables=tables),
        )
        self._events.indexed(batches)
        with self._changed:
            del self.queue.pending[: len(batches)]
            for batch in batches:
                for name in batch.names:
                    self._checked_at.pop((batch.commit_id, name), None)
            self.progress.position = batches[-1].end
            self.progress.commits += 1
            self.progress.committed_batches += len(batches)
            self.progress.last_commit_ms = int(time.time() * 1000)
            self._changed.notify_all()
        self._events.committed(batches)
        self._events.step("done", batches, self._index.table.name)
        self.queue.maintain_at = self._events.maintain()

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        """Run `call`; after a failure the table pauses and its staged batches wait.

        The failure is absorbed: the stream goes on, and the next attempt commits old and new
        batches together. A table that needs an operator waits as well while others go on; status
        names it. The same holds for the index: tables take data without it, up to the bounds.
        """
        began = self.queue.clock.monotonic()
        try:
            call()
            self.queue.succeeded(name)
            self.progress.stuck.pop(name, None)
        except Fenced:
            raise
        except (Retryable, CommitStateUnknown, Fatal, ConfigError) as error:
            if isinstance(error, (Fatal, ConfigError)):
                # The index contradicts the stream's position: another writer may have moved it.
                contradicted = name == INDEX and isinstance(error, (Gap, Overlap))
                unstaged = error is self._unstaged
                if contradicted or unstaged or (self.queue.alone and name != INDEX):
                    raise
                self.queue.needs_operator[name] = error
            self.progress.stuck[name] = error.message
            self.queue.failed(name)
            table = self._index.table.name if name == INDEX else name
            self._events.failed(table, error, self.queue.clock.monotonic() - began)

    def _commit_batches(
        self,
        prefix: str,
        target: TableCommitter,
        batches: Sequence[StagedBatch],
        manifests: Callable[[Sequence[StagedBatch]], list[str]],
        entry: Callable[[Sequence[StagedBatch]], LedgerEntry],
    ) -> dict[str, Snapshot]:
        """Commit `batches` to one table. Returns commit id → snapshot."""
        where = target.locate(batches)
        snapshot: Snapshot | None = None
        for some in _grouped_by_deletes(batches[len(where) :], target.table.name):
            ready = manifests(some)
            began = self.queue.clock.monotonic()
            self._events.step(f"{prefix}commit", some, target.table.name)
            try:
                snapshot = target.commit(ready, entry(some))
            except IdentityMismatch:
                if target is not self._index:
                    self._refuse_missing(some, target)
                raise
            seconds = self.queue.clock.monotonic() - began
            self._events.step(f"{prefix}committed", some, target.table.name, seconds)
            where |= {batch.commit_id: snapshot for batch in some}
        if snapshot is None:
            snapshot = target.head().snapshot  # maybe a later claim: the tag never moves back
            if snapshot is None:
                raise target.unknown_outcome("records that the table already has")
        target.set_tag(snapshot)
        self._events.step(f"{prefix}tagged", batches, target.table.name)
        return where

    def _with_cause(self, reason: str) -> str:
        """`reason`, with the cause of the wait if known."""
        waiting = sum(not item.left for item in self.queue.pending)
        if waiting and not self.queue.pending[0].left:
            reason += f"; {waiting} of them are committed to all tables, but not to the index"
        return f"{reason}: {self.progress.trouble}" if self.progress.trouble else reason

    def _fail(self, error: FrazilError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def ranges_of(batch: StagedBatch, table: str) -> str:
    return ", ".join(str(tally.range) for tally in batch.table(table).tallies)


def _manifests(batches: Sequence[StagedBatch], table: str) -> list[str]:
    """The batches' manifests for a table. A batch rebuilt from the table's ledger has no manifests:
    it must be in the table, unless the table was rolled back since."""
    for batch in batches:
        staged = batch.table(table)
        if not staged.manifests and (staged.keys or any(t.written for t in staged.tallies)):
            raise Gap(
                f"cannot commit {ranges_of(batch, table)} to table {table}: the table had "
                "them when this run began, and lacks them now",
                hint="the table was rolled back or its branch replaced; see `frazil audit`",
            )
    return [manifest for batch in batches for manifest in batch.table(table).manifests]


def _grouped_by_deletes(batches: Sequence[StagedBatch], table: str) -> Iterator[list[StagedBatch]]:
    """Group batches that may share a snapshot of the table.

    A batch with equality deletes gets its own snapshot: the deletes apply to older snapshots only,
    so two batches in one snapshot would keep both versions of a key (H5). A batch with an
    operator's note also gets its own, so that the note covers only that batch.
    """
    together: list[StagedBatch] = []
    for batch in batches:
        keyed = any(staged.keys for staged in batch.tables if staged.name == table)
        if not keyed and not batch.note:
            together.append(batch)
            continue
        if together:
            yield together
        yield [batch]
        together = []
    if together:
        yield together
