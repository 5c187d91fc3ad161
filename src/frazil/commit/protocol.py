"""Staged batches in, snapshots out: `decide` (pure), then apply, then read back.

The protocol for one table, with the reason for each step:

1. Read the ledger: the newest entry of this sink in the branch's ancestry.
2. `decide`. The batch's id is in the ledger: it is committed already. A newer epoch: fenced. An
   entry other than the one last seen, or one the batch does not continue: refuse, with both ranges.
3. Add the staged files with the new entry in the summary (an append, or a row delta in a snapshot
   of its own if the batch deletes rows), under a compare-and-set that Iceberg repeats on each of
   its own retries: the newest entry must still be the one of step 1. Check-then-commit alone is no
   fence: two writers can both see "absent" (H3). Iceberg's clean-up after failures is deferred: it
   would delete the manifest list of a commit that was applied but whose response was lost (H1).
4. After success or any error: go to 1. Only the table shows whether the commit was applied. The
   only successful end is step 2 finding the id; nothing is deleted before that.
5. The sink's tag points to the entry's snapshot, so that expiry cannot erase the ledger (H4).
   Iceberg tables set it in the commit of step 3; otherwise it is moved now. This module does not
   rely on the former.

A batch with no records for a table does not touch it: the table's next entry begins where its
ledger ends, and the offsets in between count as `elsewhere`. This module runs against
`iceberg.table.Table`, so the same code runs against Iceberg and in a simulation.
`committer` decides which table is next and which batches wait.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from frazil.commit.batch_chain import joins
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
from frazil.iceberg.table import Check, Snapshot, Table
from frazil.ledger import entry as ledger
from frazil.ledger.entry import LedgerEntry, LedgerHead
from frazil.ledger.staged_batch import StagedBatch
from frazil.ledger.tags import filled_by, ledger_tag
from frazil.offsets import Cut, Range
from frazil.retry import Clock

ATTEMPTS = 6
#: How often Iceberg may post one commit. Its own retry posts the same snapshot again. If the first
#: post was applied, its response was lost, and another writer rolled the branch back and committed,
#: that retry would move the branch back to the snapshot, and the other commit would be lost.
POSTS = 1
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class DecidedAppend:
    """The entry continues the ledger's newest entry: commit it."""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The entry is in the ledger already."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class RefusedCommit:
    error: FrazilError


def decide(
    table: str, head: LedgerHead, seen: str | None, entry: LedgerEntry
) -> DecidedAppend | AlreadyCommitted | RefusedCommit:
    """Decide about `entry`, given the ledger as it is now and the commit id last seen in it."""
    newest = head.entry
    if newest is not None and entry.commit_ids[-1] in newest.commit_ids:
        assert head.snapshot is not None
        return AlreadyCommitted(head.snapshot)
    if newest is not None and newest.epoch > entry.epoch:
        return RefusedCommit(_fenced(f"commit to table {table}", entry.epoch, newest))
    if not head.complete:
        return RefusedCommit(not_shown(table, entry.sink, head.unshown))
    if head.commit_id != seen:
        return RefusedCommit(_unexpected_entry(table, newest, seen, entry))
    if newest is not None and not (
        entry.begin.continues(newest.end) and joins(entry.source[0], newest.source[1])
    ):
        return RefusedCommit(_discontinuous(table, newest, entry))
    return DecidedAppend()


def pause_after(failures: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 10))


#: Stands for the expired snapshot of a batch that is in the table.
EXPIRED = Snapshot(0, None, 0, 0, "", {})


class TableCommitter:
    """One table, as seen by one epoch of a sink."""

    def __init__(
        self,
        table: Table,
        branch: str,
        sink: str,
        epoch: int,
        clock: Clock,
        *,
        claimed_first: bool = False,
    ) -> None:
        """`claimed_first`: the sink claims this table before its first commit, and a claim sets the
        tag. So without a tag the table has no data of the sink, even if its history expired;
        unless the table's property says that the sink fills it (`filled_by`)."""
        self.table = table
        self.sink = sink
        self.epoch = epoch
        self.seen: str | None = None
        #: called with the table's name and the error of an attempt that is repeated
        self.on_retry: Callable[[str, FrazilError], None] = lambda table, error: None
        #: end of the entry last seen
        self.end = Cut()
        self._branch = branch
        self._clock = clock
        self.claimed_first = claimed_first
        self._tag = ledger_tag(sink, branch)
        #: commit ids attempted since the entry last seen
        self._sent: set[str] = set()

    def head(self) -> LedgerHead:
        self.table.refresh()
        return self._head()

    def _head(self) -> LedgerHead:
        """The head; expired snapshots are bridged only if the table's own files prove the ancestry.

        Earlier metadata files record the parents of expired snapshots: where they exist, there is
        no doubt. Without them, a branch that lists the newest manifest of the tagged snapshot
        descends from the commit that wrote it. This proves nothing for upserts: rewrites remove
        delete files, so the tagged snapshot may list none of them (see decision 037).
        """
        tagged = self.table.tagged(self._tag)
        head = ledger.head(self.table.history(self._branch), self.sink, tagged)
        if head.missing is None:
            return head
        if tagged is None and self.claimed_first and self.seen is None and not self.filled:
            return LedgerHead(None, None, complete=True, missing=head.missing)
        recovered = ledger.head(self._ancestry(), self.sink)
        if recovered.complete:
            return replace(recovered, missing=head.missing)
        if head.entry is not None and not self._carried(head.entry, tagged):
            return LedgerHead(None, None, False, missing=head.missing, unshown=head.entry)
        return head

    @property
    def filled(self) -> bool:
        """Does the table's property say that the sink fills it?"""
        return filled_by(self.sink) in self.table.properties

    def set_filled(self, index_table: str) -> None:
        """Write the property. After the claim and before the first batch: the sink then has rows in
        no table that lacks it, and a table that has it was claimed."""
        for attempt in range(ATTEMPTS):
            if self.filled:
                return
            try:
                return self.table.set_property(filled_by(self.sink), index_table)
            except (Retryable, CommitStateUnknown) as error:
                trouble = error
                self.pause(attempt)
                self.table.refresh()
        raise Unavailable(
            f"cannot set property {filled_by(self.sink)} of table {self.table.name} in {ATTEMPTS} "
            f"tries: {trouble.message}",
            hint=trouble.hint,
        )

    def _carried(self, entry: LedgerEntry, tagged: Snapshot | None) -> bool:
        appends = entry.keys is None
        return appends and tagged is not None and self.table.carries(self._branch, tagged.id)

    def _ancestry(self) -> Iterator[Snapshot]:
        """The branch's history, with its expired part as recorded in earlier metadata files."""
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
        """Start an epoch with an empty commit. Of two concurrent claims, one wins.

        If an older epoch commits between reading and claiming, the ledger is read again; only a
        claim of the same or a newer epoch means that another run was started concurrently.
        `extend` adds the partitions that the position does not contain yet, with their starting
        offsets: from here on the ledger records every offset that the epoch starts from.
        """
        for attempt in range(ATTEMPTS):
            head = self.head()
            if head.entry is not None and head.entry.epoch >= self.epoch:
                raise Fenced(
                    f"cannot claim table {self.table.name}: another run of sink "
                    f"{self.sink} claimed epoch {head.entry.epoch} at the same time",
                    hint="let the other run continue, or start this one again to take over",
                )
            self._set_seen(head.entry)
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
                claimed = self.head()
                if claimed.entry is not None and claimed.entry.epoch >= self.epoch:
                    return claimed
                # The claim expired before its tag was set, so it fences no writer.
            except (Gap, Overlap):  # an older epoch committed first: read again
                pass
            self.pause(attempt)
        raise Unavailable(
            f"cannot claim table {self.table.name}: other writers change it too often"
        )

    def _empty(self, after: LedgerEntry | None) -> LedgerEntry:
        """An entry of this epoch without ranges."""
        number = after.batches[1] if after else -1
        base = after or LedgerEntry(self.sink, 0, (), (0, 0), Cut(), Cut())
        return replace(
            base,
            epoch=self.epoch,
            commit_ids=(str(uuid.uuid4()),),
            begin=base.end,
            batches=(number, number),
            outcomes={},
            watermark=None,
            rows=0,
            keys=None,
            note="",
            source=(base.source[1], base.source[1]),
        )

    def commit(self, manifests: Sequence[str], entry: LedgerEntry) -> Snapshot:
        """Apply one entry, unless it is in the table already. Raises Retryable to try later."""
        leftovers: list[str] = []
        trouble: FrazilError | None = None
        for attempt in range(ATTEMPTS + 1):
            head = self.head()
            if entry.keys is None and head.entry is not None and head.entry.keys is not None:
                # Earlier entries may expire: every entry of an upsert table records `keys`.
                entry = replace(entry, keys=0)
            if head.entry is not None and not head.entry.ranges and head.commit_id in self._sent:
                self._set_seen(head.entry)  # our empty entry above expired snapshots: response lost
            decision = decide(self.table.name, head, self.seen, entry)
            if isinstance(decision, AlreadyCommitted):
                self._set_seen(entry)
                if head.missing is None:  # else later snapshots may need the leftovers
                    self._sweep(leftovers, decision.snapshot)
                return decision.snapshot
            if isinstance(decision, RefusedCommit):
                if head.entry is not None and head.commit_id in self._sent:
                    raise Unavailable(
                        f"cannot commit {_spans(entry)} to table {self.table.name} yet: an earlier "
                        f"attempt, with only {_spans(head.entry)}, was applied late; retrying"
                    )
                raise decision.error
            if attempt == ATTEMPTS:
                break  # the last attempt was read back as well
            if head.bridged and entry.ranges:
                if self._sent.intersection(entry.commit_ids):
                    raise self.unknown_outcome(_spans(entry))
                # An entry above the expired snapshots makes the outcome of an attempt visible.
                self.set_tag(self.commit([], self._empty(head.entry)))
                continue
            if head.bridged and head.entry is not None and head.entry.epoch < self.epoch:
                entry = replace(entry, unknown_before=self.epoch)  # a claim
            if trouble is not None:
                self.pause(attempt, trouble)
            try:
                self.table.append(
                    manifests,
                    replace(entry, kept=head.entry.kept if head.entry else {}).summary(),
                    branch=self._branch,
                    check=self._compare(head, entry),
                    leftovers=leftovers,
                    # A claim does not move the tag: it is compared with the branch first.
                    tag=self._tag if entry.ranges else "",
                )
            except (Retryable, CommitStateUnknown) as error:
                trouble = error  # applied or not: the ledger shows it in the next attempt
            except IdentityMismatch as error:
                # The staged files are gone. A newer epoch removes them after committing the
                # batch: then the ledger shows it.
                if isinstance(trouble, IdentityMismatch):
                    raise
                trouble = error
        if trouble is None:
            trouble = Conflict("the commit returned, but the table does not have the snapshot")
        raise Unavailable(
            f"cannot commit to table {self.table.name} in {ATTEMPTS} tries: {trouble.message}",
            hint=trouble.hint,
        )

    def set_tag(self, snapshot: Snapshot) -> None:
        """Move the tag forward to an entry's snapshot; never back, even if another writer moved it.

        A fenced epoch may arrive here late. If it moved the tag back and the newest entry's
        snapshot expired, its own entry would be taken for the newest.
        """
        for attempt in range(ATTEMPTS):
            tagged = self.table.tagged(self._tag)
            if tagged is not None and tagged.sequence >= snapshot.sequence:
                entry = ledger.parse(tagged.summary)
                if entry is not None and entry.epoch < self.epoch:
                    raise Unavailable(
                        f"cannot move tag {self._tag} of table {self.table.name}: the "
                        "entries of this run were expired, and a run of epoch "
                        f"{entry.epoch} committed without them"
                    )
                return
            head = self._head()
            lost = head.missing is not None and not head.bridged  # expired untagged
            if lost and head.entry is not None and head.entry.epoch == self.epoch:
                self._set_seen(head.entry)
                snapshot = self.commit([], self._empty(head.entry))
                continue
            try:
                return self.table.tag(self._tag, snapshot.id, tagged.id if tagged else None)
            except (
                Retryable,
                CommitStateUnknown,
            ) as error:  # another writer was first, or the response was lost: read again
                trouble = error
                self.pause(attempt)
                self.table.refresh()
        raise Unavailable(
            f"cannot move tag {self._tag} of table {self.table.name} in {ATTEMPTS} "
            f"tries: {trouble.message}",
            hint=trouble.hint,
        )

    def doubted(self, known: LedgerEntry | None = None) -> LedgerEntry | None:
        """The newest entry, if nothing proves that the table holds exactly the records below its
        end; None if there is no doubt. `known`: the index's entry, used if no tag is left."""
        head = self.head()
        doubtful = not head.complete or head.bridged or (head.entry and head.entry.unknown_before)
        return (head.entry or head.unshown or known) if doubtful else None

    def confirm(self, entry: LedgerEntry, note: str) -> LedgerEntry:
        """An operator confirms `entry`: commits an empty entry with a signed note after it."""
        self.epoch = entry.epoch
        signed = replace(self._empty(entry), unknown_before=0, note=note)
        for _ in range(ATTEMPTS):
            head = self.head()
            if head.entry is not None and head.commit_id == signed.commit_ids[-1]:
                assert head.snapshot is not None
                self.set_tag(head.snapshot)
                return head.entry
            if (head.entry or head.unshown or entry).commit_ids != entry.commit_ids:
                break
            with suppress(Retryable, CommitStateUnknown):  # applied or not: read back above
                self.table.append(
                    [],
                    signed.summary(),
                    branch=self._branch,
                    check=self._compare(head, signed),
                    leftovers=[],
                )
        raise Unavailable(
            f"cannot confirm table {self.table.name}: another writer committed during the check",
            hint="stop the sink, then run the command again",
        )

    def still_newest(self) -> LedgerEntry | None:
        """The newest entry; raises Fenced if a newer epoch has claimed the table. (A reader has
        epoch 0 and is never fenced.)"""
        entry = self.head().entry
        if entry is not None and 0 < self.epoch < entry.epoch:
            raise _fenced(f"commit to table {self.table.name}", self.epoch, entry)
        return entry

    def forget(self) -> None:
        """Remove the tag of a claim, if nothing else was ever committed."""
        self.table.untag(self._tag)

    def tag_mismatch(self) -> FrazilError | None:
        """The error, unless the branch is shown to descend from the tagged snapshot (None)."""
        tagged = self.table.tagged(self._tag)
        last = ledger.parse(tagged.summary) if tagged else None
        if tagged is None or last is None:
            return None
        oldest = None
        for oldest in self._ancestry():
            if oldest.id == tagged.id:
                return None
            if oldest.sequence < tagged.sequence:
                break
            newer = ledger.own_entry(oldest, self.sink)
            if newer is not None and newer.begin.reaches(last.end):
                return None  # committed after the tagged snapshot; the tag lags
        if oldest is not None and oldest.parent is not None and oldest.sequence > tagged.sequence:
            carried = self._carried(last, tagged)
            return None if carried else not_shown(self.table.name, self.sink, last)
        return Gap(
            f"cannot commit to table {self.table.name}: it was rolled back to before "
            f"snapshot {tagged.id} (tag {self._tag})",
            hint="roll the table forward again; its batches stay staged",
        )

    def entries_after(self, cut: Cut) -> list[tuple[LedgerEntry, Snapshot]]:
        """Entries that reach beyond `cut`, oldest first, as far as the history is known."""
        entries: list[tuple[LedgerEntry, Snapshot]] = []
        for entry, snapshot in ledger.entries(self._ancestry(), self.sink):
            if cut.reaches(entry.end):
                return entries[::-1]
            entries.append((entry, snapshot))
        if not entries:
            head = self.head()  # the tag keeps the newest entry of an expired history
            if head.entry is not None and head.snapshot and not cut.reaches(head.entry.end):
                entries.append((head.entry, head.snapshot))
        return entries[::-1]

    def locate(self, batches: Sequence[StagedBatch]) -> dict[str, Snapshot]:
        """Commit id → snapshot of those `batches` that are in the table already, from an attempt
        whose response was lost or from an earlier epoch. They are a prefix: batches are committed
        in order."""
        self.table.refresh()
        entries = self.entries_after(batches[0].begin)
        where = {i: snapshot for entry, snapshot in entries for i in entry.commit_ids}
        located: dict[str, Snapshot] = {}
        for batch in batches:
            if batch.commit_id in where:
                located[batch.commit_id] = where[batch.commit_id]
            elif entries and self._expired_entry_has(batch, entries[0][0]):
                located[batch.commit_id] = EXPIRED
            elif self.absent(batch):
                break
            else:
                raise self.unknown_outcome(", ".join(map(str, batch.begin.to(batch.end))))
        newest = entries[-1][0] if entries else None
        if newest is not None:
            own = bool(located) and [*located][-1] in newest.commit_ids  # the response was lost
            # A fenced run remembers it, even if the table is restored before its next commit.
            if own or newest.epoch > self.epoch:
                self._set_seen(newest)
        return located

    def _expired_entry_has(self, batch: StagedBatch, oldest: LedgerEntry) -> bool:
        """Was the batch committed before the `oldest` entry left, in a snapshot that expired?"""
        if self.table.name in batch.names:
            ranges = [tally.range for tally in batch.table(self.table.name).tallies]
        else:  # the index
            ranges = [span for span in batch.begin.to(batch.end) if len(span)]
        return bool(ranges) and all(
            span.end <= oldest.begin.get(span.partition, -1) for span in ranges
        )

    def absent(self, batch: StagedBatch) -> bool:
        """Is it certain that no attempt to commit a batch missing from the ledger was applied?

        An entry of this sink may be among snapshots that expired before the tag was moved. A claim
        made without them records this (`unknown_before`): the outcome of batches staged before it
        is unknown. A batch that was never attempted is in no table.
        """
        head = self._head()
        if not head.complete:
            return False
        if head.bridged:
            return batch.epoch == self.epoch and batch.commit_id not in self._sent
        return head.entry is None or batch.epoch >= head.entry.unknown_before

    def unknown_outcome(self, records: str) -> Expired:
        return Expired(
            f"cannot commit {records} to table {self.table.name}: the outcome of an "
            "earlier attempt is unknown: later snapshots were expired before their tag "
            "was set",
            hint="query the table for these offsets; when you expire snapshots, retain the "
            "last few",
        )

    def _set_seen(self, entry: LedgerEntry | None) -> None:
        self._sent.clear()
        self.seen = entry.commit_ids[-1] if entry else None
        self.end = entry.end if entry else Cut()

    def _compare(self, head: LedgerHead, entry: LedgerEntry) -> Check:
        """The compare-and-set, run whenever Iceberg posts the commit."""
        posts = itertools.count(1)

        def check(history: Iterator[Snapshot]) -> str | None:
            if next(posts) > POSTS:
                return "the outcome of the first attempt is read from the table first"
            now = ledger.head(history, self.sink)
            if now.missing is not None:
                # The same snapshot is missing: the ledger below it is unchanged.
                if now.missing != head.missing:
                    return f"snapshots since {head.commit_id} were expired"
            elif (now.commit_id, now.epoch) != (head.commit_id, head.epoch):
                return f"the newest entry of sink {self.sink} is no longer {head.commit_id}"
            self._sent.update(entry.commit_ids)
            return None

        return check

    def _sweep(self, leftovers: list[str], live: Snapshot) -> None:
        """Remove the manifest lists of failed attempts, and manifests that the commit merged into
        others; never a file of the live snapshot, however the catalog spells its path.
        `frazil orphans` removes the files that cannot be checked now.

        `gc.enabled` is not consulted: it protects files that other tables share, and these files
        were made for this commit and are in no snapshot."""
        lists = [path for path in leftovers if "/snap-" in path]
        needed = {live.manifest_list}
        if len(lists) < len(leftovers):
            with suppress(Retryable, CommitStateUnknown):
                needed |= self.table.manifests(live.id)
                lists = leftovers
        guard = LiveFiles(needed)
        for path in lists:
            with suppress(IdentityMismatch):  # the commit is done: a failed deletion is harmless
                if path not in guard:
                    self.table.delete(path)

    def pause(self, attempt: int, error: FrazilError | None = None) -> None:
        """`error`: of the attempt of a commit that is repeated then."""
        if error is not None:
            self.on_retry(self.table.name, error)
        self._clock.sleep(pause_after(attempt))


def not_shown(table: str, sink: str, last: LedgerEntry | None) -> Expired:
    """`last`: the tagged entry; None: there is no tag."""
    content, back = "the rows that the sink committed", ""
    if last is not None:
        content = f"all offsets below {_text(last.end)}"
        back = (
            f". If it lacks them: CALL system.set_current_snapshot(table => '{table}', "
            f"ref => '{ledger_tag(sink)}') restores the sink's last commit"
        )
    return Expired(
        f"cannot prove that table {table} still has {content}: the snapshots since the "
        f"last commit of sink {sink} were "
        f"expired{', and its tag was removed' if last is None else ''}",
        hint="see `frazil audit`: the table may have been rolled back. If it has these rows, "
        f"and none of later offsets: frazil offsets confirm CONFIG --table {table}{back}",
    )


def _fenced(action: str, epoch: int, newest: LedgerEntry) -> Fenced:
    return Fenced(
        f"cannot {action}: sink {newest.sink} has a newer run; this one is epoch {epoch}, the "
        f"table is at epoch {newest.epoch}",
        hint="stop this run; the newer run has taken over, and nothing is lost",
    )


def _unexpected_entry(
    table: str, newest: LedgerEntry | None, seen: str | None, entry: LedgerEntry
) -> FrazilError:
    if newest is None:
        return Gap(
            f"cannot commit to table {table}: the ledger entry last seen, {seen}, is "
            f"missing, and so are all offsets before {_text(entry.begin)}",
            hint="the table was rolled back or its branch replaced; see `frazil audit`",
        )
    text = (
        f"expected {seen} as the newest entry, found {newest.commit_ids[-1]} with {_spans(newest)}"
    )
    kind = Overlap if newest.end.reaches(entry.begin) else Gap
    return kind(
        f"cannot commit {_spans(entry)} to table {table}: {text}",
        hint="another writer used this sink's id, or the table was rolled back; see `frazil audit`",
    )


def _discontinuous(table: str, newest: LedgerEntry, entry: LedgerEntry) -> FrazilError:
    kind = Overlap if newest.end.reaches(entry.begin) else Gap
    return kind(
        f"cannot commit {_spans(entry)} to table {table}: its ledger ends at {_text(newest.end)}"
        + (
            f", {newest.source[1]}; the batch begins at {entry.source[0]}"
            if entry.source[0]
            else ""
        )
    )


def _text(cut: Cut) -> str:
    return (
        ", ".join(f"{partition}@{offset}" for partition, offset in cut.items()) or "the beginning"
    )


def _spans(entry: LedgerEntry) -> str:
    ranges: list[Range] = entry.ranges
    return ", ".join(map(str, ranges[:8])) + (" …" if len(ranges) > 8 else "") or "no records"
