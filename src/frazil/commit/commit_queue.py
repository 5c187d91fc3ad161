"""The staged batches that wait for their commits: which tables are due, and when staging blocks.

A table is due when its commit interval has passed, its staged files are large enough, or a bound is
reached; after a failure it pauses. No I/O. The committer calls the methods under its lock, except
`succeeded`, `failed` and `committed`, which concern one table and are called by the thread that
commits to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frazil.commit.protocol import pause_after
from frazil.config.sections import SinkConfig
from frazil.config.units import duration, size
from frazil.errors import FrazilError
from frazil.iceberg.table import Snapshot
from frazil.ledger.staged_batch import StagedBatch
from frazil.retry import Clock

#: Name of the index in the list of due tables; no table can have it.
INDEX = "(index)"


@dataclass(frozen=True, slots=True)
class BackpressureLimits:
    """Absorption limits: staged batches that may wait for a commit before the stream blocks."""

    batches: int
    bytes: int
    age: float  # seconds

    @classmethod
    def of(cls, config: SinkConfig) -> BackpressureLimits:
        return cls(
            config.max_pending_batches,
            size(config.max_pending_bytes),
            duration(config.max_pending_age),
        )


@dataclass(frozen=True, slots=True)
class CommitTrigger:
    """A table's staged files are committed when they are large enough or have waited long enough;
    `priority` orders tables that are due."""

    interval: float = 0.0
    bytes: int | None = None
    priority: int = 0


class PendingBatch:
    """A staged batch on its way into its tables."""

    def __init__(self, batch: StagedBatch, since: float) -> None:
        self.batch = batch
        self.since = since
        self.snapshots: dict[str, Snapshot] = {}

    def lacks(self, table: str) -> bool:
        return table in self.batch.names and table not in self.snapshots

    @property
    def left(self) -> list[str]:
        return [name for name in self.batch.names if name not in self.snapshots]


class CommitQueue:
    def __init__(
        self,
        limits: BackpressureLimits,
        trigger: Callable[[str], CommitTrigger],
        clock: Clock,
        alone: bool,
    ) -> None:
        """`alone`: a single table takes all records."""
        self.pending: list[PendingBatch] = []
        self.clock = clock
        self.alone = alone
        self.hurried = False
        self.flushers = 0
        #: when maintenance is due even without a commit
        self.maintain_at: float | None = None
        #: tables that need an operator
        self.needs_operator: dict[str, FrazilError] = {}
        self.limits = limits
        self._trigger = trigger
        #: table → time of its last commit, and when its newest batch began to be read; table →
        #: failures since, and the time of the next attempt
        self._last: dict[str, tuple[float, int]] = {}
        self._failures: dict[str, tuple[int, float]] = {}

    def add(self, batch: StagedBatch) -> None:
        self.pending.append(PendingBatch(batch, self.clock.monotonic()))

    @property
    def flushing(self) -> bool:
        """Are intervals ignored?"""
        return self.hurried or self.flushers > 0

    def due(self) -> list[str]:
        """The tables to commit to now, most urgent first; the index, `INDEX`, comes last."""
        now = self.clock.monotonic()
        hurried = self.flushing or bool(self.over())  # at a bound, waiting would block the stream
        # since when, how many bytes, and when the newest batch began to be read
        waiting: dict[str, tuple[float, int, int]] = {}
        for item in self.pending:
            for staged in item.batch.tables:
                if staged.name not in item.snapshots:
                    since, size, _ = waiting.get(staged.name, (item.since, 0, 0))
                    newest = item.batch.window_start_ms
                    waiting[staged.name] = since, size + staged.bytes, newest
        due = []
        for name, (since, size, newest) in waiting.items():
            trigger = self._trigger(name)
            rested = self._rested(name, trigger.interval, now, newest)
            large = trigger.bytes is not None and size >= trigger.bytes
            if (hurried or rested or large) and self._failures.get(name, (0, 0.0))[1] <= now:
                due.append((-trigger.priority, since, name))
        names = [name for _, _, name in sorted(due)]
        if self._failures.get(INDEX, (0, 0.0))[1] <= now:
            ready = bool(self.pending) and all(name in names for name in self.pending[0].left)
            names += [INDEX] if ready else []
        return names

    def _rested(self, name: str, interval: float, now: float, newest: int) -> bool:
        """Has the interval passed since the last commit, or between the batches? A batch whose
        records have gathered for the interval does not wait because the commit of the one before
        came late, as that of a run's first batch does: all later ones would be as late."""
        if name not in self._last:
            return True  # the first commit is due at once
        last, begun = self._last[name]
        return now - last >= interval or newest - begun >= 1000 * interval

    def nap(self) -> float | None:
        """Seconds until something may be due; a new batch wakes the thread. 0: maintain."""
        if not self.pending:
            return self.maintain_at and max(0.0, self.maintain_at - self.clock.monotonic())
        names = {name for item in self.pending for name in item.left} | {INDEX}
        waits = [
            self._failures[name][1] - self.clock.monotonic()
            for name in names
            if name in self._failures
        ]
        paces = [self._trigger(name).interval for name in names - {INDEX}]
        return max(0.01, min([1.0, *(wait for wait in (*waits, *paces) if wait > 0)]))

    def over(self) -> str:
        """Why no more may be staged; empty if staging may go on.

        Batches that wait only for a stuck table do not count towards the number of batches: the
        other tables go on until the bytes or age bound is reached.
        """
        stuck = set() if self.alone else set(self._failures) - {INDEX}
        moving = [item for item in self.pending if not stuck or set(item.left) - stuck]
        if len(moving) >= self.limits.batches:
            return f"{len(moving)} batches wait for a commit; the bound is {self.limits.batches}"
        stored = sum(
            table.bytes
            for item in self.pending
            for table in item.batch.tables
            if table.name not in item.snapshots
        )
        if self.pending and stored >= self.limits.bytes:
            return f"{stored} staged bytes wait for a commit; the bound is {self.limits.bytes}"
        if self.pending:
            age = self.clock.monotonic() - self.pending[0].since
            if age >= self.limits.age:
                return f"a batch has waited {age:.0f} s; the bound is {self.limits.age:.0f} s"
        return ""

    def stalled(self) -> FrazilError | None:
        """The error that stops all commits until an operator repairs a table; None otherwise."""
        hopeless = dict(self.needs_operator)
        left = {name for item in self.pending for name in item.left}
        if not self.pending or not left <= set(hopeless):
            return None
        # The index waits only for the tables of the first batch.
        return hopeless[min(left)] if self.pending[0].left else hopeless.get(INDEX)

    def committed(self, name: str, began: float, newest: StagedBatch) -> None:
        """All that waited for the table was tried, up to the batch `newest`. Its interval is
        measured from start to start: otherwise a batch that comes once per interval would wait
        longer each time, by the duration of the previous commit."""
        self._last[name] = began, newest.window_start_ms

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)
        self.needs_operator.pop(name, None)

    def failed(self, name: str) -> None:
        """The table pauses, longer after each failure."""
        times = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = times, self.clock.monotonic() + pause_after(times)
