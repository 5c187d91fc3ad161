"""Bugs that somebody could write into the protocol, one at a time: the simulation must see each.

Each replaces a part of the code by what a reasonable person might have written, from the outside:
nothing in `src` knows of it. `PLANTED`: name → what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from frazil.commit import committer, protocol, recovery
from frazil.commit.committer import Committer
from frazil.commit.index_writer import IndexWriter
from frazil.commit.protocol import DecidedAppend, RefusedCommit, TableCommitter
from frazil.commit.recovery import Recovery
from frazil.commit.startup import Startup
from frazil.commit.tables import SinkTables
from frazil.errors import CommitStateUnknown, Fenced, FrazilError, Gap, Retryable, Unavailable
from frazil.iceberg import maintenance_tasks
from frazil.iceberg.table import Snapshot
from frazil.ledger import entry as ledger
from frazil.ledger import index, staged_batch
from frazil.ledger.entry import LedgerEntry, LedgerHead
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut
from tests.simulation import catalog
from tests.simulation.catalog import Server, Table
from tests.simulation.oracle import INDEX
from tests.simulation.sink_run import SimulatedStartup, context

Planting = Callable[[ExitStack], None]
PLANTED: dict[str, Planting] = {}
#: Those that schedules with little but foreign hands show.
WILD: set[str] = set()


def planted(name: str, wild: bool = False) -> Callable[[Planting], Planting]:
    def keep(planting: Planting) -> Planting:
        PLANTED[name] = planting
        WILD.update([name] if wild else [])
        return planting

    return keep


@contextmanager
def plant(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        PLANTED[name](stack)
        yield


def put(stack: ExitStack, where: Any, name: str, value: Any) -> Any:
    """The value in its place; what was there."""
    was = getattr(where, name)
    stack.enter_context(mock.patch.object(where, name, value))
    return was


# ── the compare-and-set ──────────────────────────────────────────────────────────────────────────


@planted("no compare-and-set")
def _(stack: ExitStack) -> None:
    put(stack, TableCommitter, "_compare", lambda *_: lambda history: None)


@planted("the validator reads main, whatever the branch")
def _(stack: ExitStack) -> None:
    """H3."""
    was = TableCommitter._compare

    def compare(self: TableCommitter, head: LedgerHead, entry: LedgerEntry) -> Any:
        check = was(self, head, entry)
        return lambda history: check(self.table.history("main"))

    put(stack, TableCommitter, "_compare", compare)


@planted("check-then-commit")
def _(stack: ExitStack) -> None:
    """The table is looked at once, and the commit is not made again where another was first."""

    def compare(self: TableCommitter, head: LedgerHead, entry: LedgerEntry) -> Any:
        first: list[bool] = []

        def check(history: Iterator[Snapshot]) -> str | None:
            if first:
                return None
            first.append(True)
            newest = ledger.head(history, self.sink, head.snapshot)
            return None if newest.commit_id == head.commit_id else "moved"

        return check

    put(stack, TableCommitter, "_compare", compare)


@planted("the entry last seen is not compared: any newest entry passes")
def _(stack: ExitStack) -> None:
    was = protocol.decide
    put(
        stack,
        protocol,
        "decide",
        lambda table, head, seen, entry: was(table, head, head.commit_id, entry),
    )


@planted("a batch need not continue the ledger")
def _(stack: ExitStack) -> None:
    was = protocol.decide

    def decide(table: str, head: LedgerHead, seen: str | None, entry: LedgerEntry) -> Any:
        position = head.entry.end if head.entry else entry.begin
        return was(table, head, seen, replace(entry, begin=position))

    put(stack, protocol, "decide", decide)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


@planted("the decision ignores epochs")
def _(stack: ExitStack) -> None:
    was = protocol.decide
    put(
        stack,
        protocol,
        "decide",
        lambda table, head, seen, entry: was(table, head, seen, replace(entry, epoch=10**9)),
    )


@planted("a claim ignores epochs")
def _(stack: ExitStack) -> None:
    def claim(self: TableCommitter, extend: Any = lambda end: end, **more: Any) -> LedgerHead:
        real, self.epoch = self.epoch, 10**9
        try:
            return _claim(self, real, extend, **more)
        finally:
            self.epoch = real

    put(stack, TableCommitter, "claim", claim)


def _claim(self: TableCommitter, epoch: int, extend: Any, **_: Any) -> LedgerHead:
    for _attempt in range(protocol.ATTEMPTS):
        head = self.head()
        self._set_seen(head.entry)
        end = extend(head.entry.end if head.entry else Cut())
        base = head.entry or LedgerEntry(self.sink, 0, (), (0, 0), Cut(), Cut())
        claim = replace(
            base,
            epoch=epoch,
            commit_ids=(f"claim-{context.world.number()}",),
            begin=end,
            end=end,
            outcomes={},
            rows=0,
            keys=0,
        )
        try:
            self.commit([], claim)
            return self.head()
        except (protocol.Gap, protocol.Overlap):
            continue
    raise Unavailable("cannot claim")


@planted("a run takes the epoch of the run before")
def _(stack: ExitStack) -> None:
    def take(self: Startup, target: TableCommitter, extend: Any = lambda end: end) -> None:
        entry = target.head().entry
        target.epoch = max(1, entry.epoch if entry else 1)
        self.epoch = target.epoch
        head = _claim(target, target.epoch, extend)
        assert head.snapshot is not None
        target.set_tag(head.snapshot)

    put(stack, Startup, "_claim_target", take)


@planted("a claim without compare-and-set")
def _(stack: ExitStack) -> None:
    was = TableCommitter._compare

    def compare(self: TableCommitter, head: LedgerHead, entry: LedgerEntry) -> Any:
        return was(self, head, entry) if entry.ranges else lambda history: None

    put(stack, TableCommitter, "_compare", compare)


@planted("only the index is claimed")
def _(stack: ExitStack) -> None:
    put(stack, SinkTables, "claim_all", lambda *_: None)


@planted("the index is claimed last")
def _(stack: ExitStack) -> None:
    """Tables first: whoever commits to the index meanwhile moves the position after it was read."""

    def claim(self: Any, spark: Any) -> None:
        real, last = self._claim_target, []

        def take(target: TableCommitter, *more: Any) -> None:
            if target is self.target:
                target.epoch = self.epoch
                last.append((target, *more))
            else:
                real(target, *more)

        self._claim_target = take
        try:
            _REAL_CLAIM(self, spark)
        finally:
            del self._claim_target
        real(*last[0])

    put(stack, Startup, "claim", claim)


_REAL_CLAIM, _REAL_RECOVER = Startup.claim, Startup.recover


@planted("a run that was fenced while it started continues")
def _(stack: ExitStack) -> None:
    put(stack, SimulatedStartup, "still_newest", lambda *_: None)


@planted("staged batches are read before the claim")
def _(stack: ExitStack) -> None:
    def claim(self: Any, spark: Any) -> None:
        self._recovered = None
        take = self._claim_target

        def first(target: TableCommitter, *more: Any) -> None:
            if target is self.target and target.head().entry is not None:
                try:
                    self._recovered = _REAL_RECOVER(self)
                except FrazilError:
                    self._recovered = None
            take(target, *more)

        self._claim_target = first
        _REAL_CLAIM(self, spark)
        del self._claim_target

    def recover(self: Any) -> Any:
        recovery = getattr(self, "_recovered", None)
        return recovery if recovery is not None else _REAL_RECOVER(self)

    put(stack, Startup, "claim", claim)
    put(stack, Startup, "recover", recover)


# ── what came of a commit ────────────────────────────────────────────────────────────────────────


@planted("files of a failed commit are deleted at once")
def _(stack: ExitStack) -> None:
    """H1: Iceberg's own clean-up, not deferred."""
    was = Table._commit

    def commit_(self: Table, *given: Any) -> None:
        leftovers = given[6]
        try:
            was(self, *given)
        except (FrazilError, catalog.Lost):
            for path in leftovers:
                self._server.delete(path)
            raise

    put(stack, Table, "_commit", commit_)


@planted("all files of an attempt are deleted, the live manifest list too")
def _(stack: ExitStack) -> None:
    put(
        stack,
        TableCommitter,
        "_sweep",
        lambda self, leftovers, live: [self.table.delete(path) for path in leftovers],
    )


@planted("an unknown commit state counts as success")
def _(stack: ExitStack) -> None:
    was = TableCommitter.commit
    append = Table.append

    def quiet(self: Table, *given: Any, **more: Any) -> None:
        try:
            append(self, *given, **more)
        except CommitStateUnknown:
            if given[0]:
                raise _Assumed from None
            raise  # a claim

    def assuming(self: TableCommitter, manifests: Sequence[str], entry: LedgerEntry) -> Snapshot:
        try:
            return was(self, manifests, entry)
        except _Assumed:
            self._set_seen(entry)
            snapshot = self.head().snapshot
            return snapshot or protocol.EXPIRED

    put(stack, Table, "append", quiet)
    put(stack, TableCommitter, "commit", assuming)


class _Assumed(Exception):
    pass


@planted("an error counts as not applied: the commit is retried without a read")
def _(stack: ExitStack) -> None:
    def commit_(self: TableCommitter, manifests: Sequence[str], entry: LedgerEntry) -> Snapshot:
        head = self.head()
        decision = protocol.decide(self.table.name, head, self.seen, entry)
        if isinstance(decision, protocol.AlreadyCommitted):
            self._set_seen(entry)
            return decision.snapshot
        if isinstance(decision, RefusedCommit):
            raise decision.error
        for attempt in range(3):
            try:
                self.table.append(
                    manifests,
                    entry.summary(),
                    branch=self._branch,
                    check=lambda history: None,
                    leftovers=[],
                )
                self._set_seen(entry)
                snapshot = self.head().snapshot
                assert snapshot is not None
                return snapshot
            except (Retryable, CommitStateUnknown):
                self.pause(attempt)
        raise Unavailable("cannot commit")

    put(stack, TableCommitter, "commit", commit_)


@planted("a new commit id for each attempt")
def _(stack: ExitStack) -> None:
    was = committer.entry_of

    def entry_of(batches: Sequence[StagedBatch], *more: Any) -> LedgerEntry:
        ids = tuple(f"try-{context.world.number()}" for _ in batches)
        return replace(was(batches, *more), commit_ids=ids)

    put(stack, committer, "entry_of", entry_of)


@planted("a committed batch is not recognised")
def _(stack: ExitStack) -> None:
    was = protocol.decide

    def decide(table: str, head: LedgerHead, seen: str | None, entry: LedgerEntry) -> Any:
        decision = was(table, head, seen, entry)
        return DecidedAppend() if isinstance(decision, protocol.AlreadyCommitted) else decision

    put(stack, protocol, "decide", decide)
    put(stack, TableCommitter, "locate", lambda *_: {})


@planted("commits of an earlier attempt are not looked up")
def _(stack: ExitStack) -> None:
    put(stack, TableCommitter, "locate", lambda *_: {})


@planted("only the newest entry is searched for a commit id")
def _(stack: ExitStack) -> None:
    """Max id instead of ranges: what lies before a claim on top is not found."""

    def locate(self: TableCommitter, batches: Sequence[StagedBatch]) -> dict[str, Snapshot]:
        head = self.head()
        ids = head.entry.commit_ids if head.entry else ()
        located = {b.commit_id: head.snapshot for b in batches if b.commit_id in ids}
        if located:
            self._set_seen(head.entry)
        return located  # type: ignore[return-value]

    put(stack, TableCommitter, "locate", locate)


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────


@planted("a batch that is not found counts as never committed")
def _(stack: ExitStack) -> None:
    """H4."""
    was = ledger.head

    def head(*given: Any) -> LedgerHead:
        newest = was(*given)
        return newest if newest.complete else LedgerHead(None, None, complete=True)

    put(stack, ledger, "head", head)


@planted("the tag is not read")
def _(stack: ExitStack) -> None:
    put(stack, Table, "tagged", lambda *_: None)


@planted("no tag is set")
def _(stack: ExitStack) -> None:
    put(stack, TableCommitter, "set_tag", lambda *_: None)


@planted("the tag is moved before the commit")
def _(stack: ExitStack) -> None:
    was, set_tag = TableCommitter.commit, TableCommitter.set_tag

    def commit_(self: TableCommitter, manifests: Sequence[str], entry: LedgerEntry) -> Snapshot:
        head = self.head()
        if head.snapshot is not None:
            set_tag(self, head.snapshot)
        return was(self, manifests, entry)

    put(stack, TableCommitter, "commit", commit_)
    put(stack, TableCommitter, "set_tag", lambda self, snapshot: None)


@planted("the tag moves to any snapshot, also back")
def _(stack: ExitStack) -> None:
    def set_tag(self: TableCommitter, snapshot: Snapshot) -> None:
        for attempt in range(protocol.ATTEMPTS):
            tagged = self.table.tagged(self._tag)
            try:
                return self.table.tag(self._tag, snapshot.id, tagged.id if tagged else None)
            except protocol.Conflict:
                self.pause(attempt)
                self.table.refresh()
        raise Unavailable("cannot move the tag")

    put(stack, TableCommitter, "set_tag", set_tag)


@planted("expiry removes the tagged snapshot, too")
def _(stack: ExitStack) -> None:
    was = catalog.expire

    def expire(server: Server, name: str, keep: int, *more: Any) -> None:
        meta = server.tables[name]
        for ref in [ref for ref in meta.refs if ref.startswith("frazil/")]:
            del meta.refs[ref]
        was(server, name, keep, *more)

    from tests.simulation import schedule

    put(stack, catalog, "expire", expire)
    put(stack, schedule, "expire", expire)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


@planted("a table's uuid is not compared")
def _(stack: ExitStack) -> None:
    was = Server.create

    def create(self: Server, name: str) -> Any:
        made = was(self, name)
        if name != INDEX:
            made.uuid = f"uuid-{name}"
        return made

    put(stack, Server, "create", create)


@planted("upsert batches share a snapshot")
def _(stack: ExitStack) -> None:
    """H5."""
    put(
        stack,
        committer,
        "_grouped_by_deletes",
        lambda batches, _: [list(batches)] if batches else [],
    )


@planted("the index is committed before the tables")
def _(stack: ExitStack) -> None:
    def round_(self: Any, due: Sequence[str]) -> None:
        pending = self._snapshot_of_pending()
        self._attempt(committer.INDEX, lambda: self._commit_index(pending))
        for name in due:
            if name != committer.INDEX:
                self._commit_table(name, pending)

    put(stack, Committer, "round", round_)


@planted("a table that failed counts as done")
def _(stack: ExitStack) -> None:
    was = Committer._attempt

    def tried(self: Any, name: str, call: Callable[[], None]) -> None:
        was(self, name, call)
        if name in self.progress.stuck and name != committer.INDEX:
            for pending in self.queue.pending:
                if pending.lacks(name):
                    pending.snapshots[name] = protocol.EXPIRED

    put(stack, Committer, "_attempt", tried)


@planted("a fenced table is retried later like any other")
def _(stack: ExitStack) -> None:
    """And so the run goes on for ever."""
    was = Committer._attempt

    def tried(self: Any, name: str, call: Callable[[], None]) -> None:
        def calm() -> None:
            try:
                call()
            except Fenced as error:
                raise Unavailable(error.message) from None

        was(self, name, calm)

    put(stack, Committer, "_attempt", tried)


@planted("batches are committed in random order")
def _(stack: ExitStack) -> None:
    was = Committer._snapshot_of_pending

    def pending(self: Any) -> Any:
        batches = was(self)
        context.world.dice.shuffle(batches)
        return batches

    put(stack, Committer, "_snapshot_of_pending", pending)


@planted("only the first manifest of an absorbed group is committed")
def _(stack: ExitStack) -> None:
    was = Committer._commit_batches

    def bring(self: Any, prefix: str, target: Any, batches: Any, manifests: Any, entry: Any) -> Any:
        return was(self, prefix, target, batches, lambda rest: manifests(rest[:1]), entry)

    put(stack, Committer, "_commit_batches", bring)


@planted("the last offset with a record replaces the range's end")
def _(stack: ExitStack) -> None:
    """H11: offsets at the tail that hold no record are not counted."""
    was = committer.entry_of

    def entry_of(*given: Any) -> LedgerEntry:
        entry, topic = was(*given), context.oracle.topic
        end = dict(entry.end)
        for partition, offset in entry.end.items():
            while offset > entry.begin[partition] and not topic.tables(partition, offset - 1):
                offset -= 1
            end[partition] = offset
        return replace(entry, end=Cut(end))

    put(stack, committer, "entry_of", entry_of)


@planted("records of other tables are not counted")
def _(stack: ExitStack) -> None:
    was = committer.entry_of
    put(
        stack,
        committer,
        "entry_of",
        lambda batches, table, epoch, since=None: was(batches, table, epoch),
    )


@planted("only rows are counted")
def _(stack: ExitStack) -> None:
    was = committer.entry_of
    put(stack, committer, "entry_of", lambda *given: replace(was(*given), outcomes={}))


# ── what is staged ───────────────────────────────────────────────────────────────────────────────


@planted("staged batches are recovered as they are listed")
def _(stack: ExitStack) -> None:
    put(stack, recovery, "chain", lambda position, staged, *_: list(staged))


@planted("staged batches are chained by their numbers")
def _(stack: ExitStack) -> None:
    """Max id instead of ranges."""

    def chain(position: Cut, staged: Sequence[StagedBatch], *_: Any) -> list[StagedBatch]:
        by_number = {batch.number: batch for batch in sorted(staged, key=lambda b: -b.epoch)}
        beyond = [b for b in by_number.values() if not position.reaches(b.end)]
        return sorted(beyond, key=lambda b: b.number)

    put(stack, recovery, "chain", chain)


@planted("staged batches are not recovered")
def _(stack: ExitStack) -> None:
    """And read again: but some of their tables have them."""
    put(stack, recovery, "chain", lambda *_: [])
    put(stack, Recovery, "_set_floors", lambda *_: None)


@planted("no floor for a table that is ahead")
def _(stack: ExitStack) -> None:
    put(stack, Recovery, "_set_floors", lambda *_: None)


@planted("a batch record is removed before the index has the batch")
def _(stack: ExitStack) -> None:
    was = Committer._commit_table

    def into_table(self: Any, name: str, pending: Any) -> None:
        lacking = [waiting.batch for waiting in pending if waiting.lacks(name)]
        was(self, name, pending)
        if name not in self.progress.stuck:
            self._committed(lacking)

    put(stack, Committer, "_commit_table", into_table)


@planted("a torn batch record is accepted")
def _(stack: ExitStack) -> None:
    def load(stored: bytes, path: str = "") -> StagedBatch | None:
        _, _, body = stored.partition(b"\n")
        import hashlib

        return was(hashlib.sha256(body.rstrip(b"\n")).hexdigest().encode() + b"\n" + body)

    was = staged_batch.load
    put(stack, staged_batch, "load", load)


@planted("the checkpoint gives the position, not the table")
def _(stack: ExitStack) -> None:
    def recover(self: Any) -> Any:
        recovery = _REAL_RECOVER(self)
        start = Cut(dict.fromkeys(recovery.reached.cut, 0))
        return replace(recovery, reached=replace(recovery.reached, cut=start))

    put(stack, Startup, "recover", recover)


@planted("index rows that an earlier run left out are written again and again")
def _(stack: ExitStack) -> None:
    was = IndexWriter.manifests

    def manifests(self: Any, located: Any) -> list[str]:
        owed, self._unindexed_with = self._unindexed, ""
        paths = was(self, located)
        self._unindexed = owed
        return paths

    put(stack, IndexWriter, "manifests", manifests)
    put(stack, IndexWriter, "indexed", lambda *_: None)


@planted("an attempt is repeated after an expired history")
def _(stack: ExitStack) -> None:
    was = ledger.head
    put(stack, ledger, "head", lambda *given: replace(was(*given), bridged=False))


@planted("Iceberg's own retry ignores that its commit may have been expired")
def _(stack: ExitStack) -> None:
    put(stack, protocol, "POSTS", 99)
    was = TableCommitter._compare

    def compare(self: TableCommitter, head: LedgerHead, entry: LedgerEntry) -> Any:
        check = was(self, head, entry)
        return lambda history: None if "were expired" in (why := check(history) or "") else why

    put(stack, TableCommitter, "_compare", compare)


@planted("a table that was rolled back is detected neither by its tag nor by the index", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, TableCommitter, "tag_mismatch", lambda *_: None)
    put(stack, index, "ends", lambda _: {})


@planted("a tagged snapshot with a lower sequence number counts as an ancestor", wild=True)
def _(stack: ExitStack) -> None:
    """And nothing shows that it is one: a branch that was rolled back behind it goes on, too."""
    put(stack, Table, "expired", lambda *_: iter(()))
    put(stack, TableCommitter, "_carried", lambda *_: True)


@planted("staged files are not checked before they are committed", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, Table, "lacking", lambda *_: [])


@planted("a batch whose files are missing is left out, and those after it are recovered", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, Recovery, "_with_files", _without_holes)


def _without_holes(self: Any, staged: Any, *_: Any) -> Any:
    whole = [
        batch
        for batch in staged
        if not any(
            self.tables[table.name].target.table.lacking(table.manifests)
            for table in batch.tables
            if table.name in self.tables.held
        )
    ]
    return whole, []


@planted("a table's ledger is not compared with the index's rows of it", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, index, "ends", lambda _: {})


# ── tables that others take away or put back ─────────────────────────────────────────────────────


@planted("a sink's only table is recreated when missing, and filled from the position", wild=True)
def _(stack: ExitStack) -> None:
    was = Recovery.check_table

    def check(self: Any, known: Mapping[str, str], position: Cut) -> None:
        if self._config.tables[0].name in self.tables:
            was(self, known, position)

    put(stack, Recovery, "check_table", check)


@planted("one of several tables is recreated when missing, and filled from the position", wild=True)
def _(stack: ExitStack) -> None:
    was = SinkTables.compare

    def compare(self: SinkTables, known: Mapping[str, str], index_mismatch: Any) -> None:
        was(
            self,
            {name: uuid for name, uuid in known.items() if name in self.held},
            index_mismatch,
        )

    put(stack, SinkTables, "compare", compare)


@planted("a sink's only table is not compared with the position", wild=True)
def _(stack: ExitStack) -> None:
    """Rolled back or restored, it lacks what the index counts on. Commits would see it; but where
    no record comes, nobody does."""
    was = Recovery.check_table

    def check(self: Any, known: Mapping[str, str], position: Cut) -> None:
        with suppress(Gap):
            was(self, known, position)

    put(stack, Recovery, "check_table", check)


@planted("an index that has rows and no ledger is filled from the beginning", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, Startup, "_refuse_a_forgotten_ledger", lambda *_: None)


@planted("a table that the sink filled and the index does not list is accepted", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, Startup, "refuse_unknown", lambda *_: None)


@planted("a table without entries counts as new, whatever its property says", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, TableCommitter, "filled", False)


@planted("a staged batch is recovered though a table has lost what it leaves out", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, Recovery, "_with_records", lambda _, batches: batches)


@planted("a new index begins where Kafka does, wherever the sink's only table ends", wild=True)
def _(stack: ExitStack) -> None:
    put(stack, Recovery, "_refuse_a_late_start", lambda *_: None)


@planted("staged files are checked when a run begins, and not when they are committed", True)
def _(stack: ExitStack) -> None:
    def files(self: Any, batches: Sequence[StagedBatch], target: TableCommitter) -> list[str]:
        return committer._manifests(batches, target.table.name)

    put(stack, Committer, "_files", files)


# ── looking after tables ─────────────────────────────────────────────────────────────────────────


@planted("compaction does not check whether the table has moved")
def _(stack: ExitStack) -> None:
    """H6."""
    put(stack, catalog, "refusal", lambda *_: None)


@planted("files of a rewrite that is not found at once are deleted")
def _(stack: ExitStack) -> None:
    def resolve(self: Any) -> list[Any]:
        if self._attempts:
            self._table.refresh()
        resolved = []
        for attempt in list(self._attempts):
            done = [
                s.id
                for s in self._after(attempt.since)[0]
                if s.summary.get(self._mark) == attempt.id
            ]
            if done:
                resolved.append(attempt)
            else:
                self._table.remove([*attempt.made, *attempt.unneeded])
            self._attempts.remove(attempt)
        return resolved

    put(stack, maintenance_tasks.MaintenanceTask, "resolve", resolve)


@planted("orphans of a rewrite are removed with the files it needs")
def _(stack: ExitStack) -> None:
    put(stack, Table, "manifests", lambda *_: set())


# ── a sink as one writes it in an afternoon ──────────────────────────────────────────────────────


@contextmanager
def naive() -> Iterator[None]:
    """Check-then-commit by the id of the batch, deletion of what a failed commit made, another try
    after any error, no epochs, no tag. The rest is as it is: ranges, stage, order."""
    with ExitStack() as stack:

        def decide(table: str, head: LedgerHead, seen: str | None, entry: LedgerEntry) -> Any:
            known_ids = head.entry.commit_ids if head.entry else ()
            assert head.snapshot is not None or not known_ids
            return (
                protocol.AlreadyCommitted(head.snapshot)
                if entry.commit_ids[-1] in known_ids
                else DecidedAppend()
            )  # type: ignore[arg-type]

        def take(self: Startup, target: TableCommitter, extend: Any = lambda end: end) -> None:
            self.epoch = target.epoch = 1
            _claim(target, 1, extend)

        put(stack, protocol, "decide", decide)
        put(stack, Startup, "_claim_target", take)
        put(stack, SimulatedStartup, "still_newest", lambda *_: None)
        put(stack, TableCommitter, "set_tag", lambda *_: None)
        for name in ("no compare-and-set", "files of a failed commit are deleted at once"):
            PLANTED[name](stack)
        yield
