"""Table maintenance: orphan files, snapshot expiry, index compaction. Never deletes a live file.

`orphan_files`: files of failed attempts, to list or to remove. The name of a file contains the
sink, epoch and batch that wrote it. It is an orphan if its epoch is older than the ledger's newest
(fenced, so it can never be committed) and neither a snapshot nor a staged batch that may still be
committed refers to it. `abandoned`: the same for files that Iceberg itself wrote for a commit,
whose names contain none of this.

`MaintenanceTask`: rewrites files of a table during a stream of commits to it, and yields to them.
`ExpireSnapshots`: removes old snapshots and the files that only they need. It keeps snapshots that
a branch or tag names, a sink's newest entry even before it is tagged, entries that the index lacks,
and those that the table's own properties retain (`SnapshotRetention`). The table keeps a record of
expired foreign commits that added rows.
`RewriteIndexFiles`: keeps the offset index small. Every commit adds a file, a manifest and a
snapshot to it. The run that commits merges them from time to time, between two commits and on the
thread that commits, so never against itself. Other sinks with the same index do the same: of two
that merge the same files one yields. Failures are retried later.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from frazil.config.sections import NEVER
from frazil.config.units import duration
from frazil.errors import AccountingError, Conflict, Fatal, FrazilError
from frazil.files.writer import WriterSpec
from frazil.iceberg import foreign_commits
from frazil.iceberg.live_files import LiveFiles
from frazil.iceberg.table import Check, DataFile, LiveFile, Snapshot, Table, TableScan
from frazil.ledger import entry as ledger
from frazil.ledger import index
from frazil.ledger.entry import PREFIX
from frazil.ledger.sink_state import REPLAY
from frazil.ledger.staged_batch import StagedBatch
from frazil.ledger.tags import TAG_PREFIX, ledger_tag
from frazil.offsets import BATCHES, Cut, Partition
from frazil.retry import Clock

#: Summary key of a merge's snapshot, which is no ledger entry: the id of the merge.
MERGE = f"{PREFIX}merge"
#: Table property: the sink that created the table.
CREATED_BY = f"{PREFIX}created-by"
#: The least and the most index snapshots to keep: each is in every metadata file.
KEPT, MOST = 100, 500
#: The same for a table; and the default age in seconds up to which they are kept.
TABLE_KEPT, TABLE_MOST, TABLE_AGE = 10, 1500, 86400.0
#: The fewest snapshots of the index, and of a table, to expire at once; and at least a tenth of
#: all, since finding the files that only they need means reading all others.
AT_ONCE, TABLE_AT_ONCE = 100, 10
#: Seconds to pause after a first failure, and the longest pause.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0


def orphan_files(
    paths: Iterable[str],
    *,
    sink: str,
    epoch: int,
    referenced: Iterable[str],
    staged: Iterable[StagedBatch],
) -> list[str]:
    """Those of `paths` that epochs of `sink` before `epoch` wrote and nothing references."""
    ours = re.compile(
        rf"frazil-{re.escape(sink)}-(\d+)-(\d+)-[0-9a-f-]{{36}}(-m\d)?\.(parquet|avro|puffin)"
    )
    live = LiveFiles(referenced)
    waiting = {(batch.epoch, batch.number) for batch in staged}
    orphans = []
    for path in paths:
        name = ours.fullmatch(path.rsplit("/", 1)[-1])
        if name is None or int(name[1]) >= epoch or path in live:
            continue
        if (int(name[1]), int(name[2])) not in waiting:
            orphans.append(path)
    return orphans


def abandoned(paths: Iterable[str], referenced: Iterable[str]) -> list[str]:
    """Those of `paths` that are manifests or manifest lists with Iceberg's own names and that no
    snapshot references. If they are old enough, their commits have failed."""
    live = LiveFiles(referenced)
    its = re.compile(r"(snap-\d+-\d+-)?[0-9a-f-]{36}(-m\d+)?\.avro")
    return [path for path in paths if its.fullmatch(path.rsplit("/", 1)[-1]) and path not in live]


@dataclass(frozen=True, slots=True)
class SnapshotRetention:
    """Keep snapshots younger than `age` (seconds), and the newest `least`. Beyond the newest `most`
    they expire whatever their age."""

    age: float
    least: int
    most: int | None = None

    def within(self, properties: Mapping[str, str]) -> SnapshotRetention | None:
        """This retention, limited by the table's own properties; None: they forbid expiry."""
        age = properties.get("history.expire.max-snapshot-age-ms")
        least = properties.get("history.expire.min-snapshots-to-keep", "1")
        readable = (age is None or age.isdecimal()) and least.isdecimal()
        if properties.get("gc.enabled", "true").lower() == "false" or not readable:
            return None  # an unreadable property may mean anything
        return SnapshotRetention(
            self.age if age is None else max(self.age, int(age) / 1000),
            max(self.least, int(least)),
            self.most if age is None else None,
        )


def retention(keep: str, properties: Mapping[str, str]) -> SnapshotRetention | None:
    """The retention of a table with these properties and `keep` in its config; None: keep all
    snapshots. Only the owner can decide about a table that no sink created."""
    if keep == NEVER or (not keep and CREATED_BY not in properties):
        return None
    wanted = SnapshotRetention(TABLE_AGE, TABLE_KEPT, TABLE_MOST)
    if keep:
        wanted = SnapshotRetention(duration(keep), TABLE_KEPT)
    return wanted.within(properties)


def advice(tables: Mapping[str, tuple[str, Mapping[str, str]]]) -> list[str]:
    """Hints for the owner of tables, who alone may change their properties. `tables`: name →
    the config's `snapshot_retention`, and the table's properties."""
    hints = []
    files = [name for name, (_, has) in tables.items() if _REMOVED not in has]
    if files:
        wanted = ", ".join(f"'{key}' = '{value}'" for key, value in index.OLD_METADATA.items())
        hints.append(
            f"every metadata file of {_few(files)} is kept; to keep the newest alone: ALTER TABLE "
            f"{files[0]} SET TBLPROPERTIES ({wanted})"
        )
    ever = [name for name, (keep, has) in tables.items() if not keep and CREATED_BY not in has]
    if ever:
        hints.append(
            f"every snapshot of {_few(ever)} is kept, because no sink created it; to "
            'expire old ones set snapshot_retention of its [[table]], or "never" to '
            "silence this"
        )
    return hints


_REMOVED = "write.metadata.delete-after-commit.enabled"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(slots=True)
class RewriteAttempt:
    """A rewrite whose commit was requested; only the table shows whether it was applied."""

    id: str
    #: the snapshot whose files it read
    since: int
    #: files that it wrote, and those that Iceberg wrote for it and wants deleted
    made: list[str]
    unneeded: list[str]
    #: the newest snapshot when the table did not show it; 0: not checked yet; `since`: it can be
    #: applied to that snapshot only
    seen: int = 0


class MaintenanceTask:
    """Maintenance of one table by one run of a sink, which calls `run_due` after each of its
    commits. Failures are retried later: no commit of the stream fails for them."""

    NAME = ""

    def __init__(
        self,
        table: Table,
        *,
        sink: str,
        epoch: int,
        mark: str,
        branch: str = "main",
        clock: Clock = time,
    ) -> None:
        """`mark`: the summary key under which a snapshot has the id of its rewrite."""
        self.trouble = ""
        #: when to call `run_due` again, even without a new commit
        self.due_at: float | None = None
        self._table = table
        self._sink = sink
        self._epoch = epoch
        self._mark = mark
        self._branch = branch
        self._clock = clock
        self._attempts: list[RewriteAttempt] = []
        #: attempts since the last success
        self.failures = 0
        #: files removed so far
        self.removed = 0
        self._paused_until = 0.0

    def run_due(self) -> str:
        """Do the work that is due. Returns the error message, or an empty string."""
        now = self._clock.monotonic()
        if now < self._paused_until:
            return self.trouble
        self.failures += 1  # reset below on success
        self._paused_until = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures, 10))
        self.due_at = self._paused_until
        try:
            self.resolve()
            self.due_at = self.work()
        except (FrazilError, OSError, pa.ArrowException) as error:
            self.trouble = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
            return self.trouble
        self.failures, self._paused_until, self.trouble = 0, 0.0, ""
        return ""

    def _remove(self, paths: Sequence[str]) -> None:
        self._table.remove(paths)
        self.removed += len(paths)

    def work(self) -> float | None:
        """Do the work that is due. Returns when more is due even without a new commit."""
        raise NotImplementedError

    def attempt(self, this: RewriteAttempt, rewrite: Callable[[], None]) -> None:
        """Commit a rewrite; if it was not applied, raise the reason."""
        self._attempts.append(this)
        trouble: FrazilError | None = None
        try:
            rewrite()
        except FrazilError as error:
            trouble = error  # applied or not: `resolve` reads it from the table
        if this not in self.resolve():
            raise trouble or Conflict(
                f"cannot rewrite files of {self._table.name}: the commit returned, but "
                "the table does not have the snapshot"
            )

    def newest_run(self) -> Check:
        """A check, run on each attempt of a commit: is this run still the newest?"""
        tagged = self._table.tagged(ledger_tag(self._sink, self._branch))

        def check(history: Iterator[Snapshot]) -> str | None:
            entry = ledger.head(history, self._sink, tagged).entry
            if entry is None or entry.epoch != self._epoch:
                return f"sink {self._sink} has another run than epoch {self._epoch}"
            return None

        return check

    def resolve(self) -> list[RewriteAttempt]:
        """The attempts that the table shows as applied. Removes the files that no attempt needs.

        A response may be lost while the request is still under way. The request is based on the
        snapshot that was then the newest, so once there is a newer one it can no longer succeed. If
        that snapshot is no longer in the history (it was expired, or the branch moved), the outcome
        is unknown and nothing is removed: `orphan_files` finds the files later.
        """
        if self._attempts:
            self._table.refresh()
        applied = []
        for attempt in list(self._attempts):
            after, whole = self._after(attempt.since)
            done = [s.id for s in after if s.summary.get(self._mark) == attempt.id]
            newest = after[0].id if after else attempt.since
            if done:
                needed = LiveFiles(self._table.manifests(done[0]))
                self._remove([path for path in attempt.unneeded if path not in needed])
                applied.append(attempt)
            elif attempt.seen in (0, newest):
                attempt.seen = newest
                continue
            elif whole:
                self._remove([*attempt.made, *attempt.unneeded])
            self._attempts.remove(attempt)
        return applied

    def _after(self, snapshot_id: int) -> tuple[list[Snapshot], bool]:
        """The snapshots after that one, newest first; and whether it is in the history."""
        snapshots: list[Snapshot] = []
        for snapshot in self._table.history(self._branch):
            if snapshot.id == snapshot_id:
                return snapshots, True
            snapshots.append(snapshot)
        return snapshots, False


class ExpireSnapshots(MaintenanceTask):
    """Expiry of old snapshots of one table, by one run of a sink."""

    NAME = "expire-snapshots"

    def __init__(
        self,
        table: Table,
        *,
        sink: str,
        epoch: int,
        retention: Callable[[Mapping[str, str]], SnapshotRetention | None],
        position: Callable[[], Cut] | None = None,
        branch: str = "main",
        at_once: int | None = None,
        step: Callable[[str], None] = lambda _: None,
        clock: Clock = time,
    ) -> None:
        """`retention`: from the table's properties. `position`: the position in the index; None if
        the table is the index."""
        super().__init__(table, sink=sink, epoch=epoch, mark="", branch=branch, clock=clock)
        self._retention = retention
        self._position = position
        self._at_once = at_once or TABLE_AT_ONCE
        self._step = step
        self._commits = 0
        self._unneeded: list[str] = []

    def work(self) -> None:
        self._sweep()
        self._commits += 1
        if self._commits % min(self._at_once, index.FANOUT) != 1:
            return
        some = max(self._at_once, (count := self._table.count()) // 10)
        if (oldest := self._table.moment(some)) is None:
            return
        kept = self._retention(self._table.properties)
        if kept is None or count <= kept.least + some:
            return
        before = int((time.time() - kept.age) * 1000)
        if kept.most is not None:
            before = max(before, self._table.moment(-kept.most) or 0)
        if oldest >= before or self.newest_run()(self._table.history(self._branch)):
            return
        before = min([before, *(snapshot.timestamp_ms for snapshot in self._kept_snapshots())])
        if oldest < before:
            if self._position is not None:  # not the index: its rows have no offsets to audit
                self._keep_foreign_commits(before, kept.least)
            self._step("expire")
            self._table.expire(before, kept.least, self._unneeded)
            self._step("expired")
            self._sweep()

    def _keep_foreign_commits(self, before: int, keep: int) -> None:
        """Record foreign commits that added rows in a table property before they are expired, so
        that the audit still doubts the rows. If the record cannot be written, nothing is
        expired."""
        known = foreign_commits.recorded(self._table.name, self._table.properties)
        expiring: dict[int, Snapshot] = {}
        for branch in self._table.branches():
            for number, snapshot in enumerate(self._table.history(branch)):
                if number >= keep and snapshot.timestamp_ms < before:
                    expiring[snapshot.id] = snapshot
        foreign = list(filter(foreign_commits.brings_rows, expiring.values()))
        if not foreign:
            return
        plain = self._table.readonly
        commits = foreign_commits.of_snapshots(
            foreign, lambda snapshot_id: _added(plain, snapshot_id), self._partitions()
        )
        if commits is None:
            return
        key = foreign_commits.key_of(self._sink)
        if key in known:
            commits = known[key].joined(commits)
        if commits != known.get(key):
            self._table.set_property(key, commits.text())

    def _partitions(self) -> set[Partition] | None:
        """Partitions that sinks write to the table; None where rows stand for no single offset."""
        table = self._table
        histories = [snapshot for name in table.branches() for snapshot in table.history(name)]
        # Of a sink that ended long ago only the tag is left.
        tagged = [table.tagged(tag) for tag in table.tags() if tag.startswith(TAG_PREFIX)]
        partitions: set[Partition] = set()
        seen: set[str] = set()
        for snapshot in (*histories, *filter(None, tagged)):
            sink = snapshot.summary.get(f"{PREFIX}sink")
            if sink is None or sink in seen or (entry := ledger.parse(snapshot.summary)) is None:
                continue
            partitions |= set(entry.end) - {BATCHES}
            # A replay counts batches, but its rows have the offsets of their dead letters.
            unplaced = BATCHES in entry.end and not sink.endswith(REPLAY)
            if unplaced or any(entry.counts(range_.partition).merged for range_ in entry.ranges):
                return None
            if entry.ranges:  # a claim does not show how its batches count
                seen.add(sink)
        return partitions

    def _kept_snapshots(self) -> Iterator[Snapshot]:
        """Snapshots that no branch or tag names and that must be kept: a sink's newest entry while
        its tag is still on the previous one, which a later run would take for the newest; and
        entries that the index does not have yet."""
        position = self._position and self._position()
        for branch in self._table.branches():
            seen: set[str] = set()
            indexed = position is None or branch != self._branch
            for snapshot in self._table.history(branch):
                sink = snapshot.summary.get(f"{PREFIX}sink")
                if sink is None:
                    continue
                if sink not in seen and self._ahead(sink, branch, snapshot):
                    yield snapshot
                elif sink == self._sink and not indexed:
                    entry = ledger.parse(snapshot.summary)
                    indexed = entry is None or position is None or position.reaches(entry.end)
                    if not indexed:
                        yield snapshot
                seen.add(sink)

    def _ahead(self, sink: str, branch: str, snapshot: Snapshot) -> bool:
        """Is the snapshot ahead of the sink's tag? Without a tag, no: a sink that finds none in an
        expired history stops."""
        tagged = self._table.tagged(ledger_tag(sink, branch))
        return tagged is not None and tagged.id != snapshot.id

    def _sweep(self) -> None:
        """Remove the files that only expired snapshots needed. Where Iceberg cannot read the files
        of a snapshot, it assumes none (it goes on after the third attempt): so they are checked
        again."""
        if self._unneeded:
            needed = LiveFiles(self._table.needed(self._unneeded))
            self._remove([path for path in self._unneeded if path not in needed])
            self._unneeded.clear()


def _added(table: TableScan, snapshot_id: int) -> list[DataFile] | None:
    """None where the manifests of the snapshot are gone or broken: they will not come back."""
    try:
        return table.added(snapshot_id)
    except Fatal:
        return None


class RewriteIndexFiles(MaintenanceTask):
    """Merges index files in one run of a sink; `run_due` is called after its commits to
    the index."""

    NAME = "rewrite-index-files"

    def __init__(
        self,
        table: Table,
        *,
        sink: str,
        epoch: int,
        shape: Callable[[], WriterSpec],
        prefix: Callable[[], str],
        history: float,
        step: Callable[[str], None] = lambda _: None,
        clock: Clock = time,
    ) -> None:
        """`history`: seconds after which a snapshot of the index expires."""
        super().__init__(table, sink=sink, epoch=epoch, mark=MERGE, clock=clock)
        self._shape = shape
        self._prefix = prefix
        self._step = step
        self._expiry = ExpireSnapshots(
            table,
            sink=sink,
            epoch=epoch,
            retention=SnapshotRetention(history, KEPT, MOST).within,
            at_once=AT_ONCE,
            step=lambda name: step(f"index-{name}"),
        )
        self._commits = 0
        self._enough = index.FANOUT  # the number of files from which a merge may be due

    def work(self) -> None:
        self._commits += 1
        self._merge()
        before = self._expiry.removed
        try:
            self._expiry.work()
        finally:
            self.removed += self._expiry.removed - before

    def _merge(self) -> None:
        """Merge many files of a tier into one of the next."""
        newest = next(self._table.history("main"), None)
        if newest is None or not self._may_be_due(newest):
            return
        check = self.newest_run()
        if check(self._table.history("main")):
            return  # a newer run maintains it; this one is fenced at its next commit
        base, files = self._table.live()
        chosen = index.due(files)
        if base is None or not chosen:
            self._enough = index.enough(files)
            return
        shape = self._shape()
        rows = index.read(shape, [file.path for file in chosen])
        if len(rows) != (expected := sum(file.rows for file in chosen)):
            raise AccountingError(
                f"cannot merge {len(chosen)} files of {self._table.name}: expected "
                f"{expected} rows, found {len(rows)}"
            )
        written = index.put(shape, self._prefix(), index.ordered(rows))
        this = RewriteAttempt(str(uuid.uuid4()), base.id, index.paths(written), [])
        self._step("index-merge")
        self.attempt(
            this,
            lambda: self._table.rewrite(
                chosen,
                written,
                {MERGE: this.id},
                since=base.id,
                same=True,
                check=check,
                leftovers=this.unneeded,
            ),
        )
        self._step("index-merged")
        left = [file for file in files if file not in chosen]
        self._enough = index.enough([*left, LiveFile(this.made[0], expected)])

    def _may_be_due(self, newest: Snapshot) -> bool:
        count = newest.summary.get("total-data-files")
        if count is None:  # a foreign commit without the count
            return self._commits % index.FANOUT == 0
        return int(count) >= self._enough
