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
5. Move the witness, a tag on the entry's snapshot, so that expiry cannot erase the ledger (H4).

A table for which a batch holds nothing is not touched: its next entry begins where its ledger
ends, and what lies between counts as `elsewhere`. Everything here runs against `Table`, a small
interface, so that the same code runs against Iceberg and inside a simulation. Which table's turn it
is, and what waits meanwhile, `committer` knows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from frazil.core.errors import (
    Conflict,
    Expired,
    Fenced,
    Foreign,
    FrazilError,
    Gap,
    Overlap,
    Retryable,
    Unavailable,
    Unknown,
)
from frazil.core.offsets import BATCHES, Cut, Partition, Range
from frazil.ingest.stage import StagedBatch
from frazil.table import ledger
from frazil.table.ledger import Counts, Entry, Head, Snapshot

ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0


class Table(Protocol):
    """What the committer needs of a table."""

    name: str
    uuid: str

    def refresh(self) -> None: ...
    def history(self, branch: str) -> Iterator[Snapshot]: ...
    def tagged(self, tag: str) -> Snapshot | None: ...
    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None: ...
    def untag(self, tag: str) -> None: ...
    def delete(self, path: str) -> None: ...
    def append(
        self,
        manifests: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
    ) -> None: ...


class Clock(Protocol):
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Append:
    """Go on: the entry follows the ledger's newest."""


@dataclass(frozen=True, slots=True)
class Already:
    """The entry is in the ledger."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Refuse:
    error: FrazilError


def decide(table: str, head: Head, seen: str | None, entry: Entry) -> Append | Already | Refuse:
    """What to do with `entry`, given the ledger as it is now and the commit id last seen there."""
    there = head.entry
    if there is not None and entry.commit_ids[-1] in there.commit_ids:
        assert head.snapshot is not None
        return Already(head.snapshot)
    if there is not None and there.epoch > entry.epoch:
        return Refuse(_overtaken(f"commit to table {table}", entry.epoch, there))
    if not head.complete:
        return Refuse(
            Expired(
                f"cannot commit to table {table}: its history ends before an entry of sink "
                f"{entry.sink}, and there is no witness; not found is not never committed",
                hint=f"compare table and topic, then set the tag {witness_tag(entry.sink)}",
            )
        )
    if head.commit_id != seen:
        return Refuse(_differs(table, there, seen, entry))
    if there is not None and not (
        entry.begin.continues(there.end) and _joins(entry.source[0], there.source[1])
    ):
        return Refuse(_apart(table, there, entry))
    return Append()


def pause_after(failures: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 10))


def witness_tag(sink: str) -> str:
    return f"frazil/{sink}"


def entry_of(
    batches: Sequence[StagedBatch], table: str, epoch: int, since: Cut | None = None
) -> Entry:
    """One ledger entry for batches that follow each other.

    `since`: where the table's ledger ends, if batches may have passed that held nothing for it.
    Without a table of that name (the index) the entry tells of every record.
    """
    unwritten: dict[Partition, Counts] = {}
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
                raise Overlap(f"cannot commit {tally.range} to table {table}: it has {there} "
                              "already")  # fmt: skip
            here[key] = tally.range.end
            counts = Counts(0, tally.rejected, tally.skipped, tally.invisible, tally.merged,
                            between, tally.lost)  # fmt: skip
            if key == BATCHES:
                rows += tally.written
            elif counts != Counts():
                unwritten[key] = unwritten.get(key, Counts()) + counts
            if tally.watermark:
                low.append(tally.watermark[0])
                high.append(tally.watermark[1])
    end = last.end
    if since is not None:  # a ledger may be ahead of a batch, in partitions it got nothing of
        end = Cut({key: max(offset, here[key]) for key, offset in end.items()})
        for key, offset in end.items():
            if key != BATCHES and (behind := offset - here[key]):
                unwritten[key] = unwritten.get(key, Counts()) + Counts(elsewhere=behind)
    return Entry(
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
    )


#: Of a batch that is in the table, in a snapshot that is not there any more.
EXPIRED = Snapshot(0, None, 0, 0, "", {})


class Target:
    """One table as one life of a sink sees it."""

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
        self._claimed_first = claimed_first
        self._tag = witness_tag(sink) if branch == "main" else f"{witness_tag(sink)}/{branch}"
        #: commit ids that were tried since the entry that was seen
        self._tried: set[str] = set()

    def head(self) -> Head:
        self.table.refresh()
        return self._head()

    def _head(self) -> Head:
        witness = self.table.tagged(self._tag)
        found = ledger.head(self.table.history(self._branch), self.sink, witness)
        if not found.complete and witness is None and self._claimed_first:
            return Head(None, None, complete=True)
        return found

    def claim(
        self,
        extend: Callable[[Cut], Cut] = lambda position: position,
        *,
        cluster: str = "",
        topics: Mapping[str, str] | None = None,
    ) -> Head:
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
                base, begin=end, end=end, cluster=cluster or base.cluster,
                topics={**base.topics, **(topics or {})},
            )  # fmt: skip
            try:
                self.commit([], claim)
                found = self.head()
                if found.entry is not None and found.entry.epoch >= self.epoch:
                    return found
                # It was expired before its witness could be set, and fences nobody.
            except (Gap, Overlap):  # an older life was quicker: look again
                pass
            self._pause(attempt)
        raise Unavailable(f"cannot claim table {self.table.name}: it changes too fast")

    def _empty(self, after: Entry | None) -> Entry:
        """An entry of this life that adds nothing."""
        number = after.batches[1] if after else -1
        base = after or Entry(self.sink, 0, (), (0, 0), Cut(), Cut())
        return replace(
            base, epoch=self.epoch, commit_ids=(str(uuid.uuid4()),), begin=base.end,
            batches=(number, number), unwritten={}, watermark=None, rows=0, keys=None, note="",
            source=(base.source[1], base.source[1]),
        )  # fmt: skip

    def commit(self, manifests: Sequence[str], entry: Entry) -> Snapshot:
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
            if isinstance(decision, Already):
                self._saw(entry)
                self._sweep(leftovers, decision.snapshot)
                return decision.snapshot
            if isinstance(decision, Refuse):
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
                self._pause(attempt)
            try:
                self.table.append(
                    manifests,
                    entry.summary(),
                    branch=self._branch,
                    check=self._compare(head, entry),
                    leftovers=leftovers,
                )
            except (Retryable, Unknown) as error:
                trouble = error  # applied or not: the next look at the ledger tells
            except Foreign as error:
                # What it would add is gone. A newer life removes it when the batch is done: then
                # the ledger says so.
                if isinstance(trouble, Foreign):
                    raise
                trouble = error
        if trouble is None:
            trouble = Conflict("the commit returned, and the table does not show it")
        raise Unavailable(f"cannot commit to table {self.table.name} in {ATTEMPTS} tries: "
                          f"{trouble.message}", hint=trouble.hint)  # fmt: skip

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
            try:
                return self.table.tag(self._tag, snapshot.id, there.id if there else None)
            except (Retryable, Unknown) as error:  # another was first, or the answer is lost: look
                trouble = error
                self._pause(attempt)
                self.table.refresh()
        raise Unavailable(f"cannot move tag {self._tag} of table {self.table.name} in {ATTEMPTS} "
                          f"tries: {trouble.message}", hint=trouble.hint)  # fmt: skip

    def still_newest(self) -> Entry | None:
        """The newest entry, unless another life has claimed the table since. (Who only looks has no
        epoch.)"""
        entry = self.head().entry
        if entry is not None and 0 < self.epoch < entry.epoch:
            raise _overtaken(f"go on with table {self.table.name}", self.epoch, entry)
        return entry

    def forget(self) -> None:
        """Take the witness of a claim away, where nothing else was ever committed."""
        self.table.untag(self._tag)

    def rolled_back(self) -> bool:
        """Is the branch no longer behind the witness? (Where history was expired, it may be.)"""
        witness = self.table.tagged(self._tag)
        if witness is None:
            return False
        oldest = None
        for oldest in self.table.history(self._branch):
            if oldest.id == witness.id:
                return False
        expired = oldest is not None and oldest.parent is not None
        return not (expired and oldest is not None and witness.sequence < oldest.sequence)

    def entries_after(self, cut: Cut) -> list[tuple[Entry, Snapshot]]:
        """Entries that go beyond `cut`, oldest first, as far as they were not expired."""
        found: list[tuple[Entry, Snapshot]] = []
        for entry, snapshot in ledger.entries(self.table.history(self._branch), self.sink):
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
            elif self._absent(batch):
                break
            else:
                raise self.untold(", ".join(map(str, batch.begin.to(batch.end))))
        if there and [*there][-1] in found[-1][0].commit_ids:
            self._saw(found[-1][0])  # our own commit, whose answer was lost
        return there

    def _holds(self, batch: StagedBatch, oldest: Entry) -> bool:
        """Was it committed with entries whose snapshots are expired, before the oldest one left?"""
        if self.table.name in batch.names:
            ranges = [tally.range for tally in batch.table(self.table.name).tallies]
        else:  # the index
            ranges = [each for each in batch.begin.to(batch.end) if len(each)]
        return bool(ranges) and all(
            each.end <= oldest.begin.get(each.partition, -1) for each in ranges
        )

    def _absent(self, batch: StagedBatch) -> bool:
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

    def _saw(self, entry: Entry | None) -> None:
        self._tried.clear()
        self.seen = entry.commit_ids[-1] if entry else None
        self.end = entry.end if entry else Cut()

    def _compare(self, head: Head, entry: Entry) -> Callable[[Iterator[Snapshot]], str | None]:
        """The compare-and-set: asked on each try, Iceberg's own retries included."""
        witness = head.snapshot

        def check(history: Iterator[Snapshot]) -> str | None:
            now = ledger.head(history, self.sink, witness)
            forgotten = not now.complete and not (head.entry is None and self._claimed_first)
            if forgotten or now.commit_id != head.commit_id:
                return f"the newest entry of sink {self.sink} is no longer {head.commit_id}"
            if now.bridged and not head.bridged:  # there may have been more entries among them
                return f"snapshots since {head.commit_id} were expired"
            self._tried.update(entry.commit_ids)
            return None

        return check

    def _sweep(self, leftovers: list[str], live: Snapshot) -> None:
        """Remove the manifest lists of tries that came to nothing, and never the live one."""
        for path in leftovers:
            if path != live.manifest_list and "/snap-" in path:
                self.table.delete(path)

    def _pause(self, attempt: int) -> None:
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


def led_up_to(batches: Sequence[StagedBatch], begins: Iterable[Cut]) -> set[str]:
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


def _overtaken(what: str, epoch: int, there: Entry) -> Fenced:
    return Fenced(
        f"cannot {what}: sink {there.sink} has a newer life; this one is epoch {epoch}, the table "
        f"is at epoch {there.epoch}",
        hint="stop this one; the newer life has taken over and nothing of this one is lost",
    )


def _differs(table: str, there: Entry | None, seen: str | None, entry: Entry) -> FrazilError:
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


def _apart(table: str, there: Entry, entry: Entry) -> FrazilError:
    kind = Overlap if there.end.reaches(entry.begin) else Gap
    return kind(
        f"cannot commit {_spans(entry)} to table {table}: its ledger ends at {_text(there.end)}"
        + (f", {there.source[1]}; the batch begins at {entry.source[0]}" if entry.source[0] else "")
    )


def _text(cut: Cut) -> str:
    return (
        ", ".join(f"{partition}@{offset}" for partition, offset in cut.items()) or "the beginning"
    )


def _spans(entry: Entry) -> str:
    ranges: list[Range] = entry.ranges
    return ", ".join(map(str, ranges[:8])) + (" …" if len(ranges) > 8 else "") or "no records"
