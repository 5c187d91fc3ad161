"""Staged batches in, snapshots out: `decide` (pure), then apply, then read back.

The protocol for one table, and why each step is there:

1. Read the ledger: the newest entry of this sink in the branch's ancestry.
2. `decide`. The batch's id is in the ledger: it is committed already. A newer epoch: fenced. An
   entry other than the one last seen, or one the batch does not continue: refuse, with both ranges.
3. Add the staged files with the new entry in the summary (an append, or a row delta where the batch
   takes rows away, which then is a snapshot of its own), under a compare-and-set that
   Iceberg repeats on each of its own retries: the newest entry must still be the one of step 1.
   Check-then-commit alone is no fence: two writers can both see "absent" (H3). Iceberg's clean-up
   after failures is deferred, for it would delete the manifest list of a commit that was applied
   and whose answer was lost (H1).
4. Whatever came back, success or any error: go to 1. Only the table knows what happened. So there
   is one way to end well, step 2 finding the id, and nothing is deleted before that.
5. The witness, a tag, stands on the entry's snapshot, so that expiry cannot erase the ledger (H4).
   Iceberg's tables set it in the commit of step 3; where a table did not, it is moved now. Nothing
   here counts on the former.

A table for which a batch holds nothing is not touched: its next entry begins where its ledger
ends, and what lies between counts as `elsewhere`. Everything here runs against `Table`, a small
interface, so that the same code runs against Iceberg and inside a simulation. Which table's turn it
is, and what waits meanwhile, `committer` knows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from frazil.errors import (
    CommitStateUnknown,
    Conflict,
    Expired,
    Fenced,
    FrazilError,
    Gap,
    IdentityMismatch,
    Overlap,
    Retryable,
    Unavailable,
)
from frazil.iceberg.live_files import LiveFiles
from frazil.ledger import entry as ledger
from frazil.ledger.entry import LedgerEntry, LedgerHead, OutcomeCounts, Snapshot
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Partition, Range

ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0


class CommitTable(Protocol):
    """What the committer needs of a table."""

    name: str
    uuid: str

    def refresh(self) -> None: ...
    def history(self, branch: str) -> Iterator[Snapshot]: ...
    def expired(self, snapshot_id: int) -> Iterator[Snapshot]: ...
    def carries(self, branch: str, snapshot_id: int) -> bool: ...
    def tagged(self, tag: str) -> Snapshot | None: ...
    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None: ...
    def untag(self, tag: str) -> None: ...
    def delete(self, path: str) -> None: ...
    def manifests(self, snapshot_id: int) -> set[str]: ...
    def lacking(self, manifests: Sequence[str]) -> list[str]: ...
    def append(
        self,
        manifests: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
        tag: str = "",
    ) -> None:
        """`tag` shall name the new snapshot. Where it does so with the same commit it cannot be
        left behind; where it does not, `witness` moves it."""


class Clock(Protocol):
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class DecidedAppend:
    """Go on: the entry follows the ledger's newest."""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The entry is in the ledger."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class RefusedCommit:
    error: FrazilError


def decide(
    table: str, head: LedgerHead, seen: str | None, entry: LedgerEntry
) -> DecidedAppend | AlreadyCommitted | RefusedCommit:
    """What to do with `entry`, given the ledger as it is now and the commit id last seen there."""
    there = head.entry
    if there is not None and entry.commit_ids[-1] in there.commit_ids:
        assert head.snapshot is not None
        return AlreadyCommitted(head.snapshot)
    if there is not None and there.epoch > entry.epoch:
        return RefusedCommit(_overtaken(f"commit to table {table}", entry.epoch, there))
    if not head.complete:
        return RefusedCommit(not_shown(table, entry.sink, head.unshown))
    if head.commit_id != seen:
        return RefusedCommit(_differs(table, there, seen, entry))
    if there is not None and not (
        entry.begin.continues(there.end) and _joins(entry.source[0], there.source[1])
    ):
        return RefusedCommit(_apart(table, there, entry))
    return DecidedAppend()


def pause_after(failures: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 10))


def ledger_tag(sink: str) -> str:
    return f"frazil/{sink}"


def entry_of(
    batches: Sequence[StagedBatch], table: str, epoch: int, since: Cut | None = None
) -> LedgerEntry:
    """One ledger entry for batches that follow each other.

    `since`: where the table's ledger ends, if batches may have passed that held nothing for it.
    Without a table of that name (the index) the entry tells of every record.
    """
    unwritten: dict[Partition, OutcomeCounts] = {}
    rows = keys = 0
    low: list[int] = []
    high: list[int] = []
    first, last = batches[0], batches[-1]
    begin = dict(first.begin)
    for batch in batches[1:]:  # a partition that appeared later begins where it appeared
        begin = {**batch.begin, **begin}
    if since is not None:
        begin |= {partition: offset for partition, offset in since.items() if partition in begin}
    here = dict(begin)
    for batch in batches:
        staged = next((each for each in batch.tables if each.name == table), None)
        keys += staged.keys if staged else 0
        for tally in staged.tallies if staged else batch.total or batch.tables[0].tallies:
            key = tally.range.partition
            between = tally.range.start - here[key] if since is not None else 0
            if between < 0:
                there = Range(key, tally.range.start, min(here[key], tally.range.end))
                raise Overlap(
                    f"cannot commit {tally.range} to table {table}: it has {there} already"
                )
            here[key] = tally.range.end
            counts = OutcomeCounts(
                0, tally.rejected, tally.skipped, tally.invisible, tally.merged, between, tally.lost
            )
            if key == BATCHES:
                rows += tally.written
            elif counts != OutcomeCounts():
                unwritten[key] = unwritten.get(key, OutcomeCounts()) + counts
            if tally.watermark:
                low.append(tally.watermark[0])
                high.append(tally.watermark[1])
    end = last.end
    if since is not None:  # a ledger may be ahead of a batch, in partitions it got nothing of
        end = Cut({key: max(offset, here[key]) for key, offset in end.items()})
        for key, offset in end.items():
            if key != BATCHES and (behind := offset - here[key]):
                unwritten[key] = unwritten.get(key, OutcomeCounts()) + OutcomeCounts(
                    elsewhere=behind
                )
    return LedgerEntry(
        sink=last.sink,
        epoch=epoch,
        commit_ids=tuple(batch.commit_id for batch in batches),
        batches=(first.number, last.number),
        begin=Cut(begin),
        end=end,
        unwritten=unwritten,
        topics=last.topics,
        cluster=last.cluster,
        schema_id=last.table(table).schema_id if table in last.names else 0,
        watermark=(min(low), max(high)) if low else None,
        rows=rows,
        keys=keys or None,
        source=(first.source[0], last.source[1]),
        note=last.note,
        leaders={p: epoch for p, epoch in last.leaders.items() if p in end},
    )


#: Of a batch that is in the table, in a snapshot that is not there any more.
EXPIRED = Snapshot(0, None, 0, 0, "", {})


class TableCommitter:
    """One table as one life of a sink sees it."""

    def __init__(
        self,
        table: CommitTable,
        branch: str,
        sink: str,
        epoch: int,
        clock: Clock,
        *,
        claimed_first: bool = False,
    ) -> None:
        """`claimed_first`: the sink never commits here what it has not claimed, and a claim leaves
        a witness behind. So no witness means no data of it, also where the history was expired."""
        self.table = table
        self.sink = sink
        self.epoch = epoch
        self.seen: str | None = None
        #: where the entry that was seen ends
        self.end = Cut()
        self._branch = branch
        self._clock = clock
        self.claimed_first = claimed_first
        self._tag = ledger_tag(sink) if branch == "main" else f"{ledger_tag(sink)}/{branch}"
        #: commit ids that were tried since the entry that was seen
        self._tried: set[str] = set()

    def head(self) -> LedgerHead:
        self.table.refresh()
        return self._head()

    def _head(self) -> LedgerHead:
        """Over expired snapshots only where the table's own files show that the way leads there.

        Snapshots keep their parents in earlier metadata files: as far as those are there, nothing
        is left to doubt. Without them, a branch that lists the newest manifest of the witness has
        what wrote it behind it, and all before that; but of deletes, which rewrites take away
        again, nothing need be left in the witness (see decision 037).
        """
        witness = self.table.tagged(self._tag)
        found = ledger.head(self.table.history(self._branch), self.sink, witness)
        if found.missing is None:
            return found
        if witness is None and self.claimed_first:
            return LedgerHead(None, None, complete=True, missing=found.missing)
        told = ledger.head(self._ancestry(), self.sink)
        if told.complete:
            return replace(told, missing=found.missing)
        if found.entry is not None and not self._carried(found.entry, witness):
            return LedgerHead(None, None, False, missing=found.missing, unshown=found.entry)
        return found

    def _carried(self, entry: LedgerEntry, witness: Snapshot | None) -> bool:
        appends = entry.keys is None
        return appends and witness is not None and self.table.carries(self._branch, witness.id)

    def _ancestry(self) -> Iterator[Snapshot]:
        """The branch's history, and what earlier metadata files tell of the expired part of it."""
        oldest = None
        for oldest in self.table.history(self._branch):
            yield oldest
        if oldest is not None and oldest.parent is not None:
            yield from self.table.expired(oldest.parent)

    def claim(
        self,
        extend: Callable[[Cut], Cut] = lambda position: position,
        *,
        cluster: str = "",
        topics: Mapping[str, str] | None = None,
    ) -> LedgerHead:
        """Begin a life: an empty commit with the next epoch. Of two at once, one wins.

        What an older life commits between the look and the claim is simply looked at again; only a
        claim of the same or a newer epoch means that somebody else was started at the same moment.
        `extend` adds the partitions that the position does not know yet, each with its beginning:
        from here on the ledger names every offset the life starts from, and whose they are.
        """
        for attempt in range(ATTEMPTS):
            head = self.head()
            if head.entry is not None and head.entry.epoch >= self.epoch:
                raise Fenced(
                    f"cannot claim table {self.table.name}: another life of sink {self.sink} "
                    f"claimed epoch {head.entry.epoch} at the same moment",
                    hint="let that one run, or start again to take over from it",
                )
            self._saw(head.entry)
            base = self._empty(head.entry)
            end = extend(base.end)
            claim = replace(
                base,
                begin=end,
                end=end,
                cluster=cluster or base.cluster,
                topics={**base.topics, **(topics or {})},
            )
            try:
                self.commit([], claim)
                found = self.head()
                if found.entry is not None and found.entry.epoch >= self.epoch:
                    return found
                # It was expired before its witness could be set, and fences nobody.
            except (Gap, Overlap):  # an older life was quicker: look again
                pass
            self.pause(attempt)
        raise Unavailable(f"cannot claim table {self.table.name}: it changes too fast")

    def _empty(self, after: LedgerEntry | None) -> LedgerEntry:
        """An entry of this life that adds nothing."""
        number = after.batches[1] if after else -1
        base = after or LedgerEntry(self.sink, 0, (), (0, 0), Cut(), Cut())
        return replace(
            base,
            epoch=self.epoch,
            commit_ids=(str(uuid.uuid4()),),
            begin=base.end,
            batches=(number, number),
            unwritten={},
            watermark=None,
            rows=0,
            keys=None,
            note="",
            source=(base.source[1], base.source[1]),
        )

    def commit(self, manifests: Sequence[str], entry: LedgerEntry) -> Snapshot:
        """Apply one entry, or find that it is there. Raises Retryable when it is for later."""
        leftovers: list[str] = []
        trouble: FrazilError | None = None
        for attempt in range(ATTEMPTS + 1):
            head = self.head()
            if entry.keys is None and head.entry is not None and head.entry.keys is not None:
                # Others may be expired: each says of itself that it is an upsert table's.
                entry = replace(entry, keys=0)
            if head.entry is not None and not head.entry.ranges and head.commit_id in self._tried:
                self._saw(head.entry)  # our own, on top of what was expired: its answer was lost
            decision = decide(self.table.name, head, self.seen, entry)
            if isinstance(decision, AlreadyCommitted):
                self._saw(entry)
                if head.missing is None:  # else what the snapshot has, those after it may need
                    self._sweep(leftovers, decision.snapshot)
                return decision.snapshot
            if isinstance(decision, RefusedCommit):
                if head.entry is not None and head.commit_id in self._tried:
                    raise Unavailable(
                        f"cannot commit {_spans(entry)} to table {self.table.name} yet: an earlier "
                        f"try, with {_spans(head.entry)} alone, was applied late; the rest follows"
                    )
                raise decision.error
            if attempt == ATTEMPTS:
                break  # the last try was read back as well
            if head.bridged and entry.ranges:
                if self._tried.intersection(entry.commit_ids):
                    raise self.untold(_spans(entry))
                # From an entry on top of what is left it can be told what became of a try.
                self.witness(self.commit([], self._empty(head.entry)))
                continue
            if head.bridged and head.entry is not None and head.entry.epoch < self.epoch:
                entry = replace(entry, doubt=self.epoch)  # a claim
            if trouble is not None:
                self.pause(attempt)
            try:
                self.table.append(
                    manifests,
                    replace(entry, kept=head.entry.kept if head.entry else {}).summary(),
                    branch=self._branch,
                    check=self._compare(head, entry),
                    leftovers=leftovers,
                    # A claim leaves it where it is: it is held against the branch first.
                    tag=self._tag if entry.ranges else "",
                )
            except (Retryable, CommitStateUnknown) as error:
                trouble = error  # applied or not: the next look at the ledger tells
            except IdentityMismatch as error:
                # What it would add is gone. A newer life removes it when the batch is done: then
                # the ledger says so.
                if isinstance(trouble, IdentityMismatch):
                    raise
                trouble = error
        if trouble is None:
            trouble = Conflict("the commit returned, and the table does not show it")
        raise Unavailable(
            f"cannot commit to table {self.table.name} in {ATTEMPTS} tries: {trouble.message}",
            hint=trouble.hint,
        )

    def witness(self, snapshot: Snapshot) -> None:
        """Move the tag on to an entry's snapshot; never back, whoever has moved it meanwhile.

        A life that was overtaken may come here late. Were the newest entry's snapshot expired then,
        its own would be taken for the newest.
        """
        for attempt in range(ATTEMPTS):
            there = self.table.tagged(self._tag)
            if there is not None and there.sequence >= snapshot.sequence:
                entry = ledger.parse(there.summary)
                if entry is not None and entry.epoch < self.epoch:
                    raise Unavailable(
                        f"cannot move tag {self._tag} of table {self.table.name}: this life's "
                        f"entries were expired, and one of epoch {entry.epoch} went on without them"
                    )
                return
            head = self._head()
            lost = head.missing is not None and not head.bridged  # expired before its tag was set
            if lost and head.entry is not None and head.entry.epoch == self.epoch:
                self._saw(head.entry)
                snapshot = self.commit([], self._empty(head.entry))
                continue
            try:
                return self.table.tag(self._tag, snapshot.id, there.id if there else None)
            except (
                Retryable,
                CommitStateUnknown,
            ) as error:  # another was first, or the answer is lost: look
                trouble = error
                self.pause(attempt)
                self.table.refresh()
        raise Unavailable(
            f"cannot move tag {self._tag} of table {self.table.name} in {ATTEMPTS} "
            f"tries: {trouble.message}",
            hint=trouble.hint,
        )

    def doubted(self, known: LedgerEntry | None = None) -> LedgerEntry | None:
        """The entry of which nothing shows that the table holds just what lies below its end; None
        where there is no doubt. `known`: what the index says, where no witness is left."""
        head = self.head()
        doubtful = not head.complete or head.bridged or (head.entry and head.entry.doubt)
        return (head.entry or head.unshown or known) if doubtful else None

    def confirm(self, entry: LedgerEntry, note: str) -> LedgerEntry:
        """A person says that there is no doubt: an empty entry, signed, on top of what is left."""
        self.epoch = entry.epoch
        signed = replace(self._empty(entry), doubt=0, note=note)
        for _ in range(ATTEMPTS):
            head = self.head()
            if head.entry is not None and head.commit_id == signed.commit_ids[-1]:
                assert head.snapshot is not None
                self.witness(head.snapshot)
                return head.entry
            if (head.entry or head.unshown or entry).commit_ids != entry.commit_ids:
                break
            with suppress(Retryable, CommitStateUnknown):  # applied or not: the next look tells
                self.table.append(
                    [],
                    signed.summary(),
                    branch=self._branch,
                    check=self._compare(head, signed),
                    leftovers=[],
                )
        raise Unavailable(
            f"cannot confirm table {self.table.name}: it changes meanwhile",
            hint="stop the sink, and run it again",
        )

    def still_newest(self) -> LedgerEntry | None:
        """The newest entry, unless another life has claimed the table since. (Who only looks has no
        epoch.)"""
        entry = self.head().entry
        if entry is not None and 0 < self.epoch < entry.epoch:
            raise _overtaken(f"go on with table {self.table.name}", self.epoch, entry)
        return entry

    def forget(self) -> None:
        """Take the witness of a claim away, where nothing else was ever committed."""
        self.table.untag(self._tag)

    def strayed(self) -> FrazilError | None:
        """Why the branch cannot be said to be behind the witness; None: it is."""
        witness = self.table.tagged(self._tag)
        last = ledger.parse(witness.summary) if witness else None
        if witness is None or last is None:
            return None
        oldest = None
        for oldest in self._ancestry():
            if oldest.id == witness.id:
                return None
            if oldest.sequence < witness.sequence:
                break
            newer = ledger.parse(oldest.summary)
            if newer is not None and newer.sink == self.sink and newer.begin.reaches(last.end):
                return None  # it was set on top of the witness, whose tag is late
        if oldest is not None and oldest.parent is not None and oldest.sequence > witness.sequence:
            found = self._carried(last, witness)
            return None if found else not_shown(self.table.name, self.sink, last)
        return Gap(
            f"cannot go on with table {self.table.name}: it was rolled back behind the snapshot "
            "that its witness names",
            hint="roll the table forward again; its batches wait, staged",
        )

    def entries_after(self, cut: Cut) -> list[tuple[LedgerEntry, Snapshot]]:
        """Entries that go beyond `cut`, oldest first, as far as that can still be told."""
        found: list[tuple[LedgerEntry, Snapshot]] = []
        for entry, snapshot in ledger.entries(self._ancestry(), self.sink):
            if cut.reaches(entry.end):
                return found[::-1]
            found.append((entry, snapshot))
        if not found:
            head = self.head()  # of an expired history the witness still has the newest
            if head.entry is not None and head.snapshot and not cut.reaches(head.entry.end):
                found.append((head.entry, head.snapshot))
        return found[::-1]

    def locate(self, batches: Sequence[StagedBatch]) -> dict[str, Snapshot]:
        """Those of `batches` that the table has already, from a try whose answer was lost or from
        an earlier life. They are the first ones: batches are committed in order."""
        self.table.refresh()
        found = self.entries_after(batches[0].begin)
        where = {i: snapshot for entry, snapshot in found for i in entry.commit_ids}
        there: dict[str, Snapshot] = {}
        for batch in batches:
            if batch.commit_id in where:
                there[batch.commit_id] = where[batch.commit_id]
            elif found and self._holds(batch, found[0][0]):
                there[batch.commit_id] = EXPIRED
            elif self.absent(batch):
                break
            else:
                raise self.untold(", ".join(map(str, batch.begin.to(batch.end))))
        if there and [*there][-1] in found[-1][0].commit_ids:
            self._saw(found[-1][0])  # our own commit, whose answer was lost
        return there

    def _holds(self, batch: StagedBatch, oldest: LedgerEntry) -> bool:
        """Was it committed with entries whose snapshots are expired, before the oldest one left?"""
        if self.table.name in batch.names:
            ranges = [tally.range for tally in batch.table(self.table.name).tallies]
        else:  # the index
            ranges = [each for each in batch.begin.to(batch.end) if len(each)]
        return bool(ranges) and all(
            each.end <= oldest.begin.get(each.partition, -1) for each in ranges
        )

    def absent(self, batch: StagedBatch) -> bool:
        """Is it certain that no try of a batch which was not found was applied?

        An entry of ours may be among snapshots that were expired before its tag was set. A claim
        that was made without them says so (`doubt`), and nothing is known of what was staged before
        it. A batch that was not tried yet is in no table.
        """
        head = self._head()
        if head.bridged:
            return batch.epoch == self.epoch and batch.commit_id not in self._tried
        return head.entry is None or batch.epoch >= head.entry.doubt

    def untold(self, what: str) -> Expired:
        return Expired(
            f"cannot commit {what} to table {self.table.name}: whether an earlier try was applied "
            "cannot be told; snapshots made since were expired before their witness was set",
            hint="look whether the table has these rows; and keep a few snapshots when you expire, "
            "so that it can be told",
        )

    def _saw(self, entry: LedgerEntry | None) -> None:
        self._tried.clear()
        self.seen = entry.commit_ids[-1] if entry else None
        self.end = entry.end if entry else Cut()

    def _compare(
        self, head: LedgerHead, entry: LedgerEntry
    ) -> Callable[[Iterator[Snapshot]], str | None]:
        """The compare-and-set: asked on each try, Iceberg's own retries included."""

        def check(history: Iterator[Snapshot]) -> str | None:
            now = ledger.head(history, self.sink)
            if now.missing is not None:
                # Below the same expired snapshot lies what was found there before.
                if now.missing != head.missing:
                    return f"snapshots since {head.commit_id} were expired"
            elif (now.commit_id, now.epoch) != (head.commit_id, head.epoch):
                return f"the newest entry of sink {self.sink} is no longer {head.commit_id}"
            self._tried.update(entry.commit_ids)
            return None

        return check

    def _sweep(self, leftovers: list[str], live: Snapshot) -> None:
        """Remove the manifest lists of tries that came to nothing, and manifests that the commit
        has merged into others; never what the live snapshot has, however the catalog spells it.
        What cannot be looked at or told apart now, `frazil orphans` finds.

        `gc.enabled` is not asked: other tables share files of snapshots, and these were made for
        this commit and are in none."""
        lists = [path for path in leftovers if "/snap-" in path]
        needed = {live.manifest_list}
        if len(lists) < len(leftovers):
            with suppress(Retryable, CommitStateUnknown):
                needed |= self.table.manifests(live.id)
                lists = leftovers
        guard = LiveFiles(needed)
        for path in lists:
            with suppress(IdentityMismatch):  # the commit is done: it stays
                if path not in guard:
                    self.table.delete(path)

    def pause(self, attempt: int) -> None:
        self._clock.sleep(pause_after(attempt))


def chain(
    position: Cut, staged: Sequence[StagedBatch], committed: set[str], source: str = ""
) -> list[StagedBatch]:
    """The staged batches that lead on from `position`, in order.

    `source`: where Spark's sources stand there. Batches are counted, and two lives may have counted
    different ones alike: a batch must begin at that very place, too.

    Where two lives staged the same ranges, the one that is in the table counts. A partition that
    the position does not know yet began with the batch that has its lowest offset.
    """
    found: list[StagedBatch] = []
    here = position
    while True:
        # A batch says nothing of a partition that came after it: there it stays where it is.
        known = [
            replace(batch, begin=Cut({**here, **batch.begin}), end=Cut({**here, **batch.end}))
            for batch in staged
        ]
        following = [
            batch
            for batch in known
            if batch.begin.continues(here)
            and not here.reaches(batch.end)
            and _joins(batch.source[0], source)
        ]
        if not following:
            return found
        ranked = [
            (
                sum(offset for partition, offset in batch.begin.items() if partition not in here),
                batch.commit_id not in committed,
                -batch.epoch,
                batch.number,
            )
            for batch in following
        ]
        found.append(following[ranked.index(min(ranked))])
        here, source = found[-1].end, found[-1].source[1]


def preceding(batches: Sequence[StagedBatch], begins: Iterable[Cut]) -> set[str]:
    """Commit ids of those that lead up to where entries begin: of the oldest ones that are left of
    a table's ledger. They are in the table, and their own entries expired."""
    places, found = list(begins), set()
    for batch in sorted(batches, key=lambda each: -each.number):
        if any(batch.end.continues(place) for place in places):
            found.add(batch.commit_id)
            places.append(batch.begin)
    return found


def _joins(before: str, here: str) -> bool:
    """A place of Spark's sources against the one before it; a feed of Kafka's ranges has none."""
    return not before or not here or before == here


def not_shown(table: str, sink: str, last: LedgerEntry | None) -> Expired:
    """`last`: by the witness; None: there is none."""
    what, back = "what the sink committed", ""
    if last is not None:
        what = f"everything below {_text(last.end)}"
        back = (
            f". If it does not: CALL system.set_current_snapshot(table => '{table}', ref => "
            f"'{ledger_tag(sink)}') takes it back to the sink's last commit"
        )
    return Expired(
        f"cannot commit to table {table}: its history since the last entry of sink {sink} was "
        f"expired, {'and no witness is left; ' if last is None else ''}and nothing shows that the "
        f"table still holds {what}; not found is not never committed",
        hint="see `frazil audit`: the table may have been rolled back. If it holds those rows, and "
        f"none beyond: frazil offsets confirm CONFIG --table {table}{back}",
    )


def _overtaken(what: str, epoch: int, there: LedgerEntry) -> Fenced:
    return Fenced(
        f"cannot {what}: sink {there.sink} has a newer life; this one is epoch {epoch}, the table "
        f"is at epoch {there.epoch}",
        hint="stop this one; the newer life has taken over and nothing of this one is lost",
    )


def _differs(
    table: str, there: LedgerEntry | None, seen: str | None, entry: LedgerEntry
) -> FrazilError:
    if there is None:
        return Gap(
            f"cannot commit to table {table}: the entry last seen there, {seen}, is gone, and with "
            f"it everything before {_text(entry.begin)}",
            hint="the table was rolled back or its branch replaced; see `frazil audit`",
        )
    text = f"expected {seen} as the newest entry, found {there.commit_ids[-1]} with {_spans(there)}"
    kind = Overlap if there.end.reaches(entry.begin) else Gap
    return kind(
        f"cannot commit {_spans(entry)} to table {table}: {text}",
        hint="another writer used this sink's id, or the table was rolled back; see `frazil audit`",
    )


def _apart(table: str, there: LedgerEntry, entry: LedgerEntry) -> FrazilError:
    kind = Overlap if there.end.reaches(entry.begin) else Gap
    return kind(
        f"cannot commit {_spans(entry)} to table {table}: its ledger ends at {_text(there.end)}"
        + (f", {there.source[1]}; the batch begins at {entry.source[0]}" if entry.source[0] else "")
    )


def _text(cut: Cut) -> str:
    return (
        ", ".join(f"{partition}@{offset}" for partition, offset in cut.items()) or "the beginning"
    )


def _spans(entry: LedgerEntry) -> str:
    ranges: list[Range] = entry.ranges
    return ", ".join(map(str, ranges[:8])) + (" …" if len(ranges) > 8 else "") or "no records"
