"""What lives leave behind, and what they look after. Never anything live is touched.

`leftovers`: what failed attempts left, listed, and removed on request. A file of ours says in its
name which sink, life and batch made it. It is a leftover if its life is over (an older epoch than
the ledger's newest: fenced, so it can never be committed), no snapshot refers to it, and no staged
batch that may still be committed does. `abandoned`: the same of files that Iceberg itself made for
a commit, whose names say nothing.

`MaintenanceTask`: whoever rewrites files of a table beside a stream of commits to it, and yields
to them.
`ExpireSnapshots`: snapshots that are old go, and the files that nothing else needs. Never what a
branch or a tag names, so no witness; never a sink's newest entry, whether it has its witness yet
or not; never what the index lacks; never what the table's own properties want kept
(`SnapshotRetention`). Of commits of others that brought rows the table keeps what they were.
`RewriteIndexFiles`: the offset index stays small. Every commit adds a file to it, a manifest and a
snapshot. The life that commits merges them now and then, between two commits and on the thread
that makes them, so never against itself. Others who write to the same index do the same: of two
that merge the same files one gives way, and tries again later. Whatever goes wrong here is for
later, too.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from frazil.config.model import NEVER, duration
from frazil.errors import AccountingError, Conflict, Fatal, FrazilError
from frazil.files.writer import WriterSpec
from frazil.iceberg import foreign_commits
from frazil.iceberg.live_files import LiveFiles
from frazil.iceberg.static_table import DataFile
from frazil.ledger import entry as ledger
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, Snapshot
from frazil.ledger.sink_state import REPLAY
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Partition

#: In the summary of a snapshot that is no entry of a ledger: which merge it is.
MERGE = f"{PREFIX}merge"
#: The property of a table that names the sink which made it.
CREATED_BY = f"{PREFIX}created-by"
#: How many snapshots of the index are kept at least and at most: each is in every metadata file.
KEPT, MOST = 100, 500
#: The same of a table; and for how many seconds they are kept, where nobody says otherwise.
TABLE_KEPT, TABLE_MOST, TABLE_AGE = 10, 1500, 86400.0
#: So many of the index, or of a table, go at once at least, and a tenth of all: to find out which
#: files they alone need, all others are looked at.
AT_ONCE, TABLE_AT_ONCE = 100, 10
#: Seconds of peace after a failure, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0


def orphan_files(
    paths: Iterable[str],
    *,
    sink: str,
    epoch: int,
    referenced: Iterable[str],
    staged: Iterable[StagedBatch],
) -> list[str]:
    """Those of `paths` that lives of `sink` before `epoch` made and nothing needs."""
    ours = re.compile(
        rf"frazil-{re.escape(sink)}-(\d+)-(\d+)-[0-9a-f-]{{36}}(-m\d)?\.(parquet|avro|puffin)"
    )
    live = LiveFiles(referenced)
    waiting = {(batch.epoch, batch.number) for batch in staged}
    found = []
    for path in paths:
        name = ours.fullmatch(path.rsplit("/", 1)[-1])
        if name is None or int(name[1]) >= epoch or path in live:
            continue
        if (int(name[1]), int(name[2])) not in waiting:
            found.append(path)
    return found


def abandoned(paths: Iterable[str], referenced: Iterable[str]) -> list[str]:
    """Those of `paths` that are manifests, or lists of them, of Iceberg's own naming, and that no
    snapshot refers to: of commits that came to nothing, if they are old enough."""
    live = LiveFiles(referenced)
    its = re.compile(r"(snap-\d+-\d+-)?[0-9a-f-]{36}(-m\d+)?\.avro")
    return [path for path in paths if its.fullmatch(path.rsplit("/", 1)[-1]) and path not in live]


@dataclass(frozen=True, slots=True)
class SnapshotRetention:
    """Which snapshots stay: those younger than `age` (seconds), and the newest `least` ones. Beyond
    the newest `most` they go whatever their age."""

    age: float
    least: int
    most: int | None = None

    def within(self, properties: Mapping[str, str]) -> SnapshotRetention | None:
        """As far as the table's own properties allow it; None: they do not."""
        age = properties.get("history.expire.max-snapshot-age-ms")
        least = properties.get("history.expire.min-snapshots-to-keep", "1")
        readable = (age is None or age.isdecimal()) and least.isdecimal()
        if properties.get("gc.enabled", "true").lower() == "false" or not readable:
            return None  # what cannot be read may ask for anything
        return SnapshotRetention(
            self.age if age is None else max(self.age, int(age) / 1000),
            max(self.least, int(least)),
            self.most if age is None else None,
        )


def retention(keep: str, properties: Mapping[str, str]) -> SnapshotRetention | None:
    """Of a table with such properties, where the config says `keep`; None: all snapshots stay. Of a
    table that no sink made nobody but its owner knows what they are worth."""
    if keep == NEVER or (not keep and CREATED_BY not in properties):
        return None
    wanted = SnapshotRetention(TABLE_AGE, TABLE_KEPT, TABLE_MOST)
    if keep:
        wanted = SnapshotRetention(duration(keep), TABLE_KEPT)
    return wanted.within(properties)


def advice(tables: Mapping[str, tuple[str, Mapping[str, str]]]) -> list[str]:
    """What the owner of tables could do for them, who alone may change their properties. For each
    the config's `snapshot_retention`, and the properties it has."""
    found = []
    files = [name for name, (_, has) in tables.items() if _REMOVED not in has]
    if files:
        wanted = ", ".join(f"'{key}' = '{value}'" for key, value in index.OLD_METADATA.items())
        found.append(
            f"every metadata file of {_few(files)} is kept; to keep the newest alone: ALTER TABLE "
            f"{files[0]} SET TBLPROPERTIES ({wanted})"
        )
    ever = [name for name, (keep, has) in tables.items() if not keep and CREATED_BY not in has]
    if ever:
        found.append(
            f"every snapshot of {_few(ever)} is kept, for no sink made it; to expire old ones "
            'set snapshot_retention of its [[table]], or "never" to be told no more'
        )
    return found


_REMOVED = "write.metadata.delete-after-commit.enabled"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class MaintainedTable(Protocol):
    """What looking after a table needs of it."""

    name: str

    def refresh(self) -> None: ...
    def history(self, branch: str) -> Iterator[Snapshot]: ...
    def tagged(self, tag: str) -> Snapshot | None: ...
    def manifests(self, snapshot_id: int) -> set[str]: ...
    def remove(self, paths: Sequence[str]) -> None: ...


class ListedFiles(Protocol):
    """The manifests of a table, as far as forgetting snapshots needs them."""

    def added(self, snapshot_id: int) -> list[DataFile]: ...


class ExpirableTable(MaintainedTable, Protocol):
    """What forgetting snapshots of a table needs of it."""

    @property
    def properties(self) -> dict[str, str]: ...
    @property
    def plain(self) -> ListedFiles: ...
    def set_property(self, key: str, value: str) -> None: ...
    def branches(self) -> list[str]: ...
    def tags(self) -> dict[str, int]: ...
    def count(self) -> int: ...
    def moment(self, number: int) -> int | None: ...
    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None: ...
    def needed(self, paths: Sequence[str]) -> set[str]: ...


class MaintainedIndex(ExpirableTable, Protocol):
    """What looking after the index needs of it."""

    def live(self) -> tuple[Snapshot | None, Sequence[Any]]: ...
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


class WallClock(Protocol):
    def monotonic(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _MergedIndexFiles:
    path: str
    rows: int
    deletes: int = 0


@dataclass(slots=True)
class RewriteAttempt:
    """A rewrite that was asked for: was it done? The table will tell."""

    id: str
    #: the snapshot whose files it read
    since: int
    #: files that it made, and those that Iceberg made for it and wants deleted
    made: list[str]
    unneeded: list[str]
    #: the newest snapshot when it was looked for in vain; 0: it was not looked for yet; `since`: it
    #: can be done on that snapshot only
    seen: int = 0


class MaintenanceTask:
    """Of one table and one life of a sink. `tidy` is called after each commit of that life; what it
    does is `work`. Whatever goes wrong there is for later: no commit of the stream fails for it."""

    def __init__(
        self,
        table: MaintainedTable,
        *,
        sink: str,
        epoch: int,
        mark: str,
        branch: str = "main",
        clock: WallClock = time,
    ) -> None:
        """`mark`: under which name the summary of a snapshot says which rewrite it is."""
        self.trouble = ""
        #: when it wants to be called again, though nothing new was committed
        self.again: float | None = None
        self._kept = table
        self._sink = sink
        self._epoch = epoch
        self._mark = mark
        self._branch = branch
        self._clock = clock
        self._tries: list[RewriteAttempt] = []
        self._failures = 0
        self._until = 0.0

    def tidy(self) -> str:
        """Do what is due; what went wrong, if something did."""
        now = self._clock.monotonic()
        if now < self._until:
            return self.trouble
        self._failures += 1  # unless it goes well
        self._until = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 10))
        self.again = self._until
        try:
            self.settle()
            self.again = self.work()
        except (FrazilError, OSError, pa.ArrowException) as error:
            self.trouble = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
            return self.trouble
        self._failures, self._until, self.trouble = 0, 0.0, ""
        return ""

    def work(self) -> float | None:
        """What is due; and when there will be more, whatever comes."""
        raise NotImplementedError

    def attempt(self, this: RewriteAttempt, rewrite: Callable[[], None]) -> None:
        """Ask for a rewrite; if it was not done, raise why."""
        self._tries.append(this)
        trouble: FrazilError | None = None
        try:
            rewrite()
        except FrazilError as error:
            trouble = error  # applied or not: the next look at the table tells
        if this not in self.settle():
            raise trouble or Conflict(
                f"cannot rewrite files of {self._kept.name}: the commit "
                "returned, and the table does not show it"
            )

    def newest_life(self) -> Callable[[Iterator[Snapshot]], str | None]:
        """Is this life still the newest? Asked on each try of a commit."""
        tag = f"frazil/{self._sink}"
        witness = self._kept.tagged(tag if self._branch == "main" else f"{tag}/{self._branch}")

        def check(history: Iterator[Snapshot]) -> str | None:
            entry = ledger.head(history, self._sink, witness).entry
            if entry is None or entry.epoch != self._epoch:
                return f"sink {self._sink} has another life than epoch {self._epoch}"
            return None

        return check

    def settle(self) -> list[RewriteAttempt]:
        """Those that were done: only the table knows. What none of them needs is removed.

        An answer may be lost, and the request still on its way. It was made for a snapshot that was
        the newest one, so once there is a newer one it can come to nothing any more. Where the way
        back to that snapshot is lost (it was expired, or the branch moved), nothing can be told and
        nothing is removed: `leftovers` looks for what nobody needs.
        """
        if self._tries:
            self._kept.refresh()
        found = []
        for each in list(self._tries):
            after, whole = self._after(each.since)
            done = [s.id for s in after if s.summary.get(self._mark) == each.id]
            newest = after[0].id if after else each.since
            if done:
                needed = LiveFiles(self._kept.manifests(done[0]))
                self._kept.remove([path for path in each.unneeded if path not in needed])
                found.append(each)
            elif each.seen in (0, newest):
                each.seen = newest
                continue
            elif whole:
                self._kept.remove([*each.made, *each.unneeded])
            self._tries.remove(each)
        return found

    def _after(self, snapshot_id: int) -> tuple[list[Snapshot], bool]:
        """The snapshots since that one, newest first; was it met?"""
        found: list[Snapshot] = []
        for snapshot in self._kept.history(self._branch):
            if snapshot.id == snapshot_id:
                return found, True
            found.append(snapshot)
        return found, False


class ExpireSnapshots(MaintenanceTask):
    """Of one table and one life of a sink: snapshots are forgotten when they are old."""

    def __init__(
        self,
        table: ExpirableTable,
        *,
        sink: str,
        epoch: int,
        retention: Callable[[Mapping[str, str]], SnapshotRetention | None],
        position: Callable[[], Cut] | None = None,
        branch: str = "main",
        at_once: int | None = None,
        step: Callable[[str], None] = lambda _: None,
        clock: WallClock = time,
    ) -> None:
        """`retention`: by the table's properties. `position`: where the index stands, if it is not
        the table itself."""
        super().__init__(table, sink=sink, epoch=epoch, mark="", branch=branch, clock=clock)
        self._table = table
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
        if oldest >= before or self.newest_life()(self._table.history(self._branch)):
            return
        before = min([before, *(each.timestamp_ms for each in self._held())])
        if oldest < before:
            if self._position is not None:  # the rows of the index have no offsets of their own
                self._keep_foreign_commits(before, kept.least)
            self._step("expire")
            self._table.expire(before, kept.least, self._unneeded)
            self._step("expired")
            self._sweep()

    def _keep_foreign_commits(self, before: int, keep: int) -> None:
        """Commits of others that brought rows, and that are about to be expired: the table keeps
        what they were, for the audit to doubt the rows as it does now. If that cannot be written,
        nothing is expired."""
        known = foreign_commits.recorded(self._table.name, self._table.properties)
        expiring: dict[int, Snapshot] = {}
        for branch in self._table.branches():
            for number, snapshot in enumerate(self._table.history(branch)):
                if number >= keep and snapshot.timestamp_ms < before:
                    expiring[snapshot.id] = snapshot
        foreign = list(filter(foreign_commits.brings_rows, expiring.values()))
        if not foreign:
            return
        plain = self._table.plain
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
        """Whose rows the sinks of this table write; None where rows stand for no single offset."""
        table = self._table
        histories = [snapshot for name in table.branches() for snapshot in table.history(name)]
        # Of a sink that ended long ago the witness alone is left.
        tagged = [table.tagged(tag) for tag in table.tags() if tag.startswith("frazil/")]
        partitions: set[Partition] = set()
        seen: set[str] = set()
        for snapshot in (*histories, *filter(None, tagged)):
            sink = snapshot.summary.get(f"{PREFIX}sink")
            if sink is None or sink in seen or (entry := ledger.parse(snapshot.summary)) is None:
                continue
            partitions |= set(entry.end) - {BATCHES}
            # A replay counts batches, but its rows have the offsets of their letters.
            unplaced = BATCHES in entry.end and not sink.endswith(REPLAY)
            if unplaced or any(entry.counts(each.partition).merged for each in entry.ranges):
                return None
            if entry.ranges:  # a claim does not say what its batches are like
                seen.add(sink)
        return partitions

    def _held(self) -> Iterator[Snapshot]:
        """Snapshots that nothing names, and that somebody counts on: a sink's newest entry where
        its witness is still on the one before, which a later life would take for the newest; and
        what the index has yet to be told."""
        position = self._position and self._position()
        for branch in self._table.branches():
            seen: set[str] = set()
            told = position is None or branch != self._branch
            for snapshot in self._table.history(branch):
                sink = snapshot.summary.get(f"{PREFIX}sink")
                if sink is None:
                    continue
                if sink not in seen and self._ahead(sink, branch, snapshot):
                    yield snapshot
                elif sink == self._sink and not told:
                    entry = ledger.parse(snapshot.summary)
                    told = entry is None or position is None or position.reaches(entry.end)
                    if not told:
                        yield snapshot
                seen.add(sink)

    def _ahead(self, sink: str, branch: str, snapshot: Snapshot) -> bool:
        """Of the witness, if there is one: who finds none in an expired history stops."""
        tag = f"frazil/{sink}"
        witness = self._table.tagged(tag if branch == "main" else f"{tag}/{branch}")
        return witness is not None and witness.id != snapshot.id

    def _sweep(self) -> None:
        """Remove what only those needed that are gone. Where Iceberg cannot read what a snapshot
        needs, it takes it to need nothing (it goes on after the third try): so it is looked at
        again."""
        if self._unneeded:
            needed = LiveFiles(self._table.needed(self._unneeded))
            self._table.remove([path for path in self._unneeded if path not in needed])
            self._unneeded.clear()


def _added(table: ListedFiles, snapshot_id: int) -> list[DataFile] | None:
    """None where the snapshot's own files are gone or broken: they will not come back."""
    try:
        return table.added(snapshot_id)
    except Fatal:
        return None


class RewriteIndexFiles(MaintenanceTask):
    """Of one life of a sink. `tidy` is called after each of its commits to the index."""

    def __init__(
        self,
        table: MaintainedIndex,
        *,
        sink: str,
        epoch: int,
        shape: Callable[[], WriterSpec],
        prefix: Callable[[], str],
        history: float,
        step: Callable[[str], None] = lambda _: None,
        clock: WallClock = time,
    ) -> None:
        """`history`: seconds after which a snapshot of the index is forgotten."""
        super().__init__(table, sink=sink, epoch=epoch, mark=MERGE, clock=clock)
        self._table = table
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
        self._enough = index.FANOUT  # so many files are worth a look at each of them

    def work(self) -> None:
        self._commits += 1
        self._merge()
        self._expiry.work()

    def _merge(self) -> None:
        """Many files of a tier into one of the next."""
        newest = next(self._table.history("main"), None)
        if newest is None or not self._worth_a_look(newest):
            return
        check = self.newest_life()
        if check(self._table.history("main")):
            return  # a newer life looks after it; the next commit will tell this one
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
        self._enough = index.enough([*left, _MergedIndexFiles(this.made[0], expected)])

    def _worth_a_look(self, newest: Snapshot) -> bool:
        count = newest.summary.get("total-data-files")
        if count is None:  # somebody else's commit did not say
            return self._commits % index.FANOUT == 0
        return int(count) >= self._enough
