"""Staged batches in, snapshots out: `decide` (pure), then apply, then read back.

The protocol for one table, and why each step is there:

1. Read the ledger: the newest entry of this sink in the branch's ancestry.
2. `decide`. The batch's id is in the ledger: it is committed already. A newer epoch: fenced. An
   entry other than the one last seen, or one the batch does not continue: refuse, with both ranges.
3. Append the staged manifests with the new entry in the summary, under a compare-and-set that
   Iceberg repeats on each of its own retries: the newest entry must still be the one of step 1.
   Check-then-commit alone is no fence: two writers can both see "absent" (H3). Iceberg's clean-up
   after failures is deferred, for it would delete the manifest list of a commit that was applied
   and whose answer was lost (H1).
4. Whatever came back, success or any error: go to 1. Only the table knows what happened. So there
   is one way to end well, step 2 finding the id, and nothing is deleted before that.
5. Move the witness, a tag on the entry's snapshot, so that expiry cannot erase the ledger (H4).

A batch is committed to its table first and to the index last: the index's ledger is the stream's
position. A table that fails for now does not stop the stream: its batches wait, staged, and are
committed together later. Everything here runs against `Table`, a small interface, so that the same
code runs against Iceberg and inside a simulation.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from frazil.core.errors import (
    Conflict,
    Expired,
    Fenced,
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
    def tag(self, tag: str, snapshot_id: int) -> None: ...
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


Step = Callable[[str, StagedBatch | None], None]


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
        return Refuse(
            Fenced(
                f"cannot commit to table {table}: sink {entry.sink} has a newer life; this one is "
                f"epoch {entry.epoch}, the table is at epoch {there.epoch}",
                hint="stop this one; the newer life has taken over and nothing of this one is lost",
            )
        )
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


def witness_tag(sink: str) -> str:
    return f"frazil/{sink}"


def entry_of(batches: Sequence[StagedBatch], table: str, epoch: int) -> Entry:
    """One ledger entry for batches that follow each other."""
    unwritten: dict[Partition, Counts] = {}
    rows = 0
    low: list[int] = []
    high: list[int] = []
    for batch in batches:
        for tally in batch.table(table).tallies:
            key = tally.range.partition
            counts = Counts(0, tally.rejected, tally.skipped, tally.invisible, tally.merged)
            if key == BATCHES:
                rows += tally.written
            elif counts != Counts():
                unwritten[key] = unwritten.get(key, Counts()) + counts
            if tally.watermark:
                low.append(tally.watermark[0])
                high.append(tally.watermark[1])
    first, last = batches[0], batches[-1]
    begin = dict(first.begin)
    for batch in batches[1:]:  # a partition that appeared later begins where it appeared
        begin = {**batch.begin, **begin}
    return Entry(
        sink=last.sink,
        epoch=epoch,
        commit_ids=tuple(batch.commit_id for batch in batches),
        batches=(first.number, last.number),
        begin=Cut(begin),
        end=last.end,
        unwritten=unwritten,
        topics=last.topics,
        cluster=last.cluster,
        schema_id=last.table(table).schema_id,
        watermark=(min(low), max(high)) if low else None,
        rows=rows,
        source=(first.source[0], last.source[1]),
    )


class Target:
    """One table as one life of a sink sees it."""

    def __init__(self, table: Table, branch: str, sink: str, epoch: int, clock: Clock) -> None:
        self.table = table
        self.sink = sink
        self.epoch = epoch
        self.seen: str | None = None
        self._branch = branch
        self._clock = clock
        self._tag = witness_tag(sink) if branch == "main" else f"{witness_tag(sink)}/{branch}"

    def head(self) -> Head:
        self.table.refresh()
        witness = self.table.tagged(self._tag)
        return ledger.head(self.table.history(self._branch), self.sink, witness)

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
            self.seen = head.commit_id
            end = extend(head.entry.end if head.entry else Cut())
            number = head.entry.batches[1] if head.entry else -1
            base = head.entry or Entry(self.sink, 0, (), (0, 0), Cut(), Cut())
            claim = replace(
                base, epoch=self.epoch, commit_ids=(str(uuid.uuid4()),), begin=end, end=end,
                batches=(number, number), unwritten={}, watermark=None, rows=0,
                source=(base.source[1], base.source[1]),
                cluster=cluster or base.cluster, topics={**base.topics, **(topics or {})},
            )  # fmt: skip
            try:
                self.commit([], claim)
                return self.head()
            except (Gap, Overlap):  # an older life was quicker: look again
                self._pause(attempt)
        raise Unavailable(f"cannot claim table {self.table.name}: it changes too fast")

    def commit(self, manifests: Sequence[str], entry: Entry) -> Snapshot:
        """Apply one entry, or find that it is there. Raises Retryable when it is for later."""
        leftovers: list[str] = []
        trouble: FrazilError | None = None
        for attempt in range(ATTEMPTS + 1):
            head = self.head()
            decision = decide(self.table.name, head, self.seen, entry)
            if isinstance(decision, Already):
                self.seen = entry.commit_ids[-1]
                self._sweep(leftovers, decision.snapshot)
                return decision.snapshot
            if isinstance(decision, Refuse):
                raise decision.error
            if attempt == ATTEMPTS:
                break  # the last try was read back as well
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
        if trouble is None:
            trouble = Conflict("the commit returned, and the table does not show it")
        raise Unavailable(f"cannot commit to table {self.table.name} in {ATTEMPTS} tries: "
                          f"{trouble.message}", hint=trouble.hint)  # fmt: skip

    def witness(self, snapshot: Snapshot) -> None:
        self.table.tag(self._tag, snapshot.id)

    def entries_after(self, cut: Cut) -> list[tuple[Entry, Snapshot]]:
        """Entries that go beyond `cut`, oldest first."""
        found = []
        for entry, snapshot in ledger.entries(self.table.history(self._branch), self.sink):
            if cut.reaches(entry.end):
                break
            found.append((entry, snapshot))
        return found[::-1]

    def locate(self, batches: Sequence[StagedBatch]) -> dict[str, Snapshot]:
        """Those of `batches` that the table has already, from a try whose answer was lost or from
        an earlier life. They are the first ones: batches are committed in order."""
        self.table.refresh()
        found = self.entries_after(batches[0].begin)
        where = {i: snapshot for entry, snapshot in found for i in entry.commit_ids}
        there: dict[str, Snapshot] = {}
        for batch in batches:
            if batch.commit_id not in where:
                break
            there[batch.commit_id] = where[batch.commit_id]
        if there and [*there][-1] in found[-1][0].commit_ids:
            self.seen = found[-1][0].commit_ids[-1]  # our own commit, whose answer was lost
        return there

    def _compare(self, head: Head, entry: Entry) -> Callable[[Iterator[Snapshot]], str | None]:
        """The compare-and-set: asked on each try, Iceberg's own retries included."""
        witness = head.snapshot

        def check(history: Iterator[Snapshot]) -> str | None:
            now = ledger.head(history, self.sink, witness)
            if not now.complete or now.commit_id != head.commit_id:
                return f"the newest entry of sink {self.sink} is no longer {head.commit_id}"
            return None

        return check

    def _sweep(self, leftovers: list[str], live: Snapshot) -> None:
        """Remove the manifest lists of tries that came to nothing, and never the live one."""
        for path in leftovers:
            if path != live.manifest_list and "/snap-" in path:
                self.table.delete(path)

    def _pause(self, attempt: int) -> None:
        self._clock.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Absorption: how much may wait for a commit before the stream blocks."""

    batches: int
    bytes: int
    age: float  # seconds


@dataclass
class Progress:
    """What status and metrics show. Written by the committer alone."""

    position: Cut = field(default_factory=Cut)
    committed_batches: int = 0
    commits: int = 0
    last_commit_ms: int = 0
    trouble: str = ""
    blocked: str = ""
    unpublished: str = ""


class Committer:
    """Commits staged batches in order: the table, then the index. One thread of the driver."""

    def __init__(
        self,
        *,
        data: Callable[[], Target],
        index: Target,
        index_manifests: Callable[[Sequence[tuple[StagedBatch, Snapshot]]], list[str]],
        committed: Callable[[Sequence[StagedBatch]], None],
        position: Cut,
        interval: float,
        bounds: Bounds,
        step: Step,
        clock: Clock = time,
    ) -> None:
        self.progress = Progress(position=position)
        self._data = data
        self._index = index
        self._index_manifests = index_manifests
        self._committed = committed
        self._interval = interval
        self._bounds = bounds
        self._step = step
        self._clock = clock
        self._changed = threading.Condition()
        self._pending: list[tuple[StagedBatch, float]] = []
        self._failure: FrazilError | None = None
        self._flushing = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="frazil-committer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> list[StagedBatch]:
        with self._changed:
            return [batch for batch, _ in self._pending]

    @property
    def failure(self) -> FrazilError | None:
        return self._failure

    def submit(self, batch: StagedBatch) -> None:
        """Hand over a staged batch; blocks while more than the bounds allow is waiting."""
        with self._changed:
            while (reason := self._over()) and not self._flushing:
                self._raise_failure()
                self.progress.blocked = reason
                self._changed.wait(1.0)
            self._raise_failure()
            self.progress.blocked = ""
            self._pending.append((batch, self._clock.monotonic()))
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
        """Commit what is waiting now, whatever the interval says, and hold nobody at a bound."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """`hurry`, and wait for it."""
        self.hurry()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._pending, timeout)
            self._flushing = False
            self._raise_failure()
            return not self._pending

    def close(self) -> None:
        """End the thread after the commit under way. What is staged waits for the next life."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        last = self._clock.monotonic() - self._interval
        failures = 0
        while True:
            with self._changed:
                due = self._pending and (
                    self._flushing
                    or self._clock.monotonic() - last >= self._interval
                    or self._over()  # a bound is no reason to wait for the interval
                )
                if self._closed:
                    return
                if not due:
                    self._changed.wait(min(1.0, self._interval) if self._pending else None)
                    continue
                batches = [batch for batch, _ in self._pending]
            try:
                self.commit(batches)
                failures, self.progress.trouble = 0, ""
                last = self._clock.monotonic()
            except (Retryable, Unknown) as error:
                # Absorbed: the batches stay staged, the stream goes on, the next round takes old
                # and new together.
                self.progress.trouble = error.message
                failures += 1
                with self._changed:
                    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures)
                    self._changed.wait_for(lambda: self._closed, pause)
            except FrazilError as error:
                self._fail(error)
                return
            except Exception as error:
                # The thread's outermost frame: what is not one of ours must still stop the stream.
                self._fail(FrazilError(f"cannot commit: {type(error).__name__}: {error}"))
                raise

    def commit(self, batches: Sequence[StagedBatch]) -> None:
        """One round: the table, then the index, each with its witness."""
        data, index = self._data(), self._index
        name = data.table.name
        snapshots = self._bring(
            "",
            data,
            batches,
            lambda rest: [m for batch in rest for m in batch.table(name).manifests],
            lambda rest: entry_of(rest, name, data.epoch),
        )
        self._bring(
            "index-",
            index,
            batches,
            lambda rest: self._index_manifests([(b, snapshots[b.commit_id]) for b in rest]),
            lambda rest: replace(entry_of(rest, name, index.epoch), tables={name: data.table.uuid}),
        )
        with self._changed:
            del self._pending[: len(batches)]
            self.progress.position = batches[-1].end
            self.progress.commits += 1
            self.progress.committed_batches += len(batches)
            self.progress.last_commit_ms = int(time.time() * 1000)
            self._changed.notify_all()
        self._committed(batches)
        self._step("done", batches[-1])

    def _bring(
        self,
        prefix: str,
        target: Target,
        batches: Sequence[StagedBatch],
        manifests: Callable[[Sequence[StagedBatch]], list[str]],
        entry: Callable[[Sequence[StagedBatch]], Entry],
    ) -> dict[str, Snapshot]:
        """`batches` into one table; where each of them is, by commit id."""
        where = target.locate(batches)
        rest = batches[len(where) :]
        if rest:
            ready = manifests(rest)
            self._step(f"{prefix}commit", rest[-1])
            snapshot = target.commit(ready, entry(rest))
            self._step(f"{prefix}committed", rest[-1])
            where |= {batch.commit_id: snapshot for batch in rest}
        else:
            newest = target.head().snapshot  # maybe a claim on top: the tag never moves back
            assert newest is not None
            snapshot = newest
        target.witness(snapshot)
        self._step(f"{prefix}witnessed", batches[-1])
        return where

    def _over(self) -> str:
        waiting = len(self._pending)
        if waiting >= self._bounds.batches:
            return f"{waiting} batches wait for a commit; the bound is {self._bounds.batches}"
        stored = sum(batch.bytes for batch, _ in self._pending)
        if waiting and stored >= self._bounds.bytes:
            return f"{stored} staged bytes wait for a commit; the bound is {self._bounds.bytes}"
        if waiting:
            age = self._clock.monotonic() - self._pending[0][1]
            if age >= self._bounds.age:
                return f"a batch has waited {age:.0f} s; the bound is {self._bounds.age:.0f} s"
        return ""

    def _fail(self, error: FrazilError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


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


def _joins(before: str, here: str) -> bool:
    """A place of Spark's sources against the one before it; a feed of Kafka's ranges has none."""
    return not before or not here or before == here


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
