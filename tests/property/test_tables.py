"""One stream into several tables, through every disorder that hypothesis thinks of: tables that
fail, answers that are lost, runs that end at any step or do not know that they ended, staged
records that are gone, history that is expired. Every record is in each of its tables once.

A record's offset says which tables it is for, so a batch that is read again holds the same; and a
manifest's name says which offsets it holds, so what a table has can be counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.accounting import OutcomeCounts, RangeCounts
from frazil.commit.batch_chain import chain, entry_of
from frazil.commit.commit_queue import BackpressureLimits, CommitTrigger
from frazil.commit.committer import Committer, Progress
from frazil.commit.protocol import LONGEST_PAUSE, TableCommitter
from frazil.errors import Fenced, IdentityMismatch, Unavailable
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import LedgerEntry, parse
from frazil.ledger.staged_batch import StagedBatch, StagedTable, dump, load
from frazil.offsets import Cut, Partition, Range
from tests.commit_events import Events
from tests.fakes import FakeClock, FakeTable

P, Q = Partition("orders", 0), Partition("orders", 1)
TABLES = ("db.a", "db.b", "db.c")


def tables_of(partition: Partition, offset: int) -> list[str]:
    """Some records are for several tables, some for none, and each table is idle for a while."""
    return [
        name
        for i, name in enumerate(TABLES)
        if (offset // (5 + 3 * i) + partition.number + i) % (2 + i) == 0
    ]


def manifest(where: Range) -> str:
    return f"{where.partition.number}|{where.start}|{where.end}"


def offsets(manifest: str, table: str) -> list[tuple[Partition, int]]:
    number, start, end = map(int, manifest.split("|"))
    at = Partition("orders", number)
    return [(at, offset) for offset in range(start, end) if table in tables_of(at, offset)]


class Died(BaseException):
    """The process of the committer, at some step."""


class Table(FakeTable):
    """Remembers what was added to it, whatever is expired."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"uuid-{name}")
        self.added: list[tuple[LedgerEntry, Sequence[str]]] = []

    def add(
        self, manifests: Sequence[str], summary: Mapping[str, str], branch: str = "main"
    ) -> Snapshot:
        if (entry := parse(summary)) is not None:
            self.added.append((entry, manifests))
        made = super().add(manifests, summary, branch)
        # Never the same again, though others are expired.
        self.snapshots[made.id] = replace(made, sequence=made.id)
        return self.snapshots[made.id]

    def rows(self) -> Counter[tuple[Partition, int]]:
        return Counter(
            row for _, manifests in self.added for m in manifests for row in offsets(m, self.name)
        )


class World:
    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.index = Table("db.index")
        self.clock = FakeClock()
        self.stored: dict[str, bytes] = {}
        self.unhealthy: set[str] = set()
        self.fuse = 0  # steps until the process dies; 0: it does not
        self.epoch = self.made = 0
        self.begin_run()

    # ── as the sink does it ──────────────────────────────────────────────────────────────────

    def begin_run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Until one can be started."""
        while True:
            with suppress(Unavailable):
                return self._begin(meanwhile)

    def _begin(self, meanwhile: Callable[[], None]) -> None:
        """Claims, the index first; `meanwhile` an older run may still act."""
        self.epoch += 1
        self.fuse = 0
        index = TableCommitter(self.index, "main", "s", self.epoch, self.clock)
        index.claim(lambda position: Cut({P: 0, Q: 0, **position}))
        meanwhile()
        head = index.head().entry
        assert head is not None
        targets: dict[str, TableCommitter] = {}
        ends: dict[str, Cut] = {}
        committed: set[str] = set()
        for name, table in self.tables.items():
            targets[name] = TableCommitter(table, "main", "s", self.epoch, self.clock)
            claimed = targets[name].claim()
            assert claimed.snapshot is not None
            targets[name].set_tag(claimed.snapshot)
            ends[name] = targets[name].end
            newer = targets[name].entries_after(head.end)
            committed |= {i for entry, _ in newer for i in entry.commit_ids}
        staged = chain(
            head.end, [loaded for text in self.stored.values() if (loaded := load(text))], committed
        )
        self.stored = {batch.commit_id: dump(batch) for batch in staged}
        self.end = staged[-1].end if staged else head.end
        self.floors = {
            name: {p: o for p, o in end.items() if o > self.end[p]} for name, end in ends.items()
        }
        self.targets = targets
        events = Events(
            table=lambda name: self._target(targets, name),
            committed=self._committed,
            trigger=lambda name: CommitTrigger(5.0 if name == "db.b" else 0.0),
            step=self._step,
        )
        self.committer = Committer(
            events,
            index,
            Progress(position=head.end),
            BackpressureLimits(10**6, 10**9, 10**9),
            clock=self.clock,
            alone=False,
        )
        for batch in staged:
            self.committer.submit(batch)

    def _target(self, targets: Mapping[str, TableCommitter], name: str) -> TableCommitter:
        if name in self.unhealthy:
            raise IdentityMismatch("cannot go on: it is gone")
        return targets[name]

    def _step(self, *_: Any) -> None:
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise Died

    def _committed(self, batches: Sequence[StagedBatch]) -> None:
        for batch in batches:
            self.stored.pop(batch.commit_id, None)

    def stage(self, *lengths: tuple[Partition, int]) -> None:
        """Read on, and hand a batch to the committer."""
        ranges = [Range(p, self.end[p], self.end[p] + length) for p, length in lengths if length]
        if not ranges:
            return
        tables = []
        for name in TABLES:
            parts = [
                Range(span.partition, max(span.start, min(floor, span.end)), span.end)
                for span in ranges
                if (floor := self.floors.get(name, {}).get(span.partition, 0)) < span.end
            ]
            rows_by_part = [offsets(manifest(part), name) for part in parts]
            if any(rows_by_part):
                self._make(name)
                tallies = tuple(
                    RangeCounts(part, len(rows), skipped=len(part) - len(rows))
                    for part, rows in zip(parts, rows_by_part, strict=True)
                )
                manifests = tuple(map(manifest, parts))
                tables.append(StagedTable(name, f"uuid-{name}", 0, manifests, (), 1, 1, tallies))
        total = tuple(RangeCounts(span, len(span)) for span in ranges)
        self.made += 1
        after = self.end.after(ranges)
        batch = StagedBatch(
            "s",
            self.epoch,
            self.made,
            f"c{self.made}",
            self.end,
            after,
            {},
            "",
            0,
            0,
            tuple(tables),
            total,
        )
        self.stored[batch.commit_id] = dump(batch)
        self.end = after
        self.committer.submit(batch)

    def _make(self, name: str) -> None:
        if name not in self.tables:
            self.tables[name] = Table(name)
            self.targets[name] = TableCommitter(
                self.tables[name], "main", "s", self.epoch, self.clock
            )

    # ── what can happen ──────────────────────────────────────────────────────────────────────

    def round(self) -> None:
        try:
            self.committer.round(self.committer.queue.due())
        except Died:
            self.begin_run()

    def die_after(self, steps: int) -> None:
        self.fuse = steps

    def restart(self) -> None:
        self.begin_run()

    def overtaken(self) -> None:
        """The older run does not know that it is over, until a ledger tells it."""
        old = self.committer

        def acts() -> None:
            with suppress(Fenced, Died):
                old.hurry()
                old.round(old.queue.due())

        self.begin_run(acts)
        before = {name: table.rows() for name, table in self.tables.items()}
        acts()
        assert before == {name: table.rows() for name, table in self.tables.items()}

    def overtaken_at(self, name: str) -> None:
        """A new run begins between the last look of the older one and its commit."""
        table = {**self.tables, "db.index": self.index}.get(name)
        if table is None:
            return
        old, fuse = self.committer, [self.begin_run]
        table.race = lambda: fuse.pop()() if fuse else None
        table.faults.insert(0, "race")
        old.hurry()
        with suppress(Fenced, Died):
            for pending in old.queue.due():
                old.round([pending])
        fuse.clear()

    def fail(self, name: str, faults: list[str]) -> None:
        table = {**self.tables, "db.index": self.index}.get(name)
        if table is not None:
            table.faults += faults
            table.race = lambda: table.add([], {})  # type: ignore[func-returns-value]

    def maintain(self, name: str, keep: int) -> None:
        """Somebody compacts, and expires what is old: never what was committed just now."""
        if name in self.tables:
            table = self.tables[name]
            tagged = table.tagged("frazil/s")
            newest = next((s for s in table.history("main") if parse(s.summary)), None)
            table.add([], {"by": "somebody else"})
            if newest is not None and newest == tagged:
                table.expire(keep)

    def gone(self, name: str) -> None:
        self.unhealthy ^= {name}

    def lose(self, which: int) -> None:
        """A staged record, torn or gone, and the process with it."""
        if self.stored:
            lost = list(self.stored)[which % len(self.stored)]
            self.stored[lost] = b"torn"
        self.begin_run()

    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    # ── what must hold ───────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        position = self.committer.progress.position
        for name, table in self.tables.items():
            rows = table.rows()
            assert not [row for row, times in rows.items() if times > 1], f"twice in {name}"
            below = {row for p, o in position.items() for row in offsets(f"{p.number}|0|{o}", name)}
            assert below <= rows.keys(), f"the index counts on rows that {name} has not"
            self.check_ledger(table)
        self.check_ledger(self.index)

    def check_ledger(self, table: Table) -> None:
        """Entries join, every offset in them has a fate, and what is called written is there."""
        reached: dict[Partition, int] = {}
        epochs = [entry.epoch for entry, _ in table.added]
        assert epochs == sorted(epochs), "a run went on after it was over"
        for entry, manifests in table.added:
            assert entry.begin.continues(reached)
            reached = dict(entry.end)
            rows = Counter(p for m in manifests for p, _ in offsets(m, table.name))
            for span in entry.begin.to(entry.end):
                counts = entry.counts(span.partition)
                assert counts.offsets == len(span)
                assert min(counts.written, counts.skipped, counts.elsewhere) >= 0
                if table is self.index:
                    assert counts == OutcomeCounts(written=len(span))
                else:
                    assert counts.written == rows[span.partition]

    def heal(self) -> None:
        """All is well again: then everything is where it belongs."""
        self.unhealthy = set()
        self.fuse = 0
        for table in (*self.tables.values(), self.index):
            table.faults = []
        for _ in range(100):
            if not self.committer.pending:
                break
            self.clock.now += LONGEST_PAUSE
            self.round()
        stuck = self.committer.progress.stuck
        if stuck and all("earlier attempt is unknown" in why for why in stuck.values()):
            # Snapshots behind the tag were expired, and no earlier metadata file is left: nothing
            # shows whether an earlier run tried the batch. It waits for an operator, and is right.
            for name in stuck:
                head = self.targets[name].head()
                assert head.bridged or (head.entry and head.entry.unknown_before), name
            return self.check()
        assert not self.committer.pending, stuck
        assert self.committer.progress.position == self.end
        assert self.stored == {}
        self.check()
        for name, table in self.tables.items():
            rows = {row for p, o in self.end.items() for row in offsets(f"{p.number}|0|{o}", name)}
            floors = self.floors.get(name, {})
            ahead = {row for p, o in floors.items() for row in offsets(f"{p.number}|0|{o}", name)}
            assert table.rows().keys() == rows | ahead


lengths = st.integers(0, 30)
names = st.sampled_from(TABLES)
faults = st.lists(st.sampled_from(["lost", "dropped", "race"]), max_size=14)
happenings = st.one_of(
    st.tuples(st.just("stage"), st.tuples(st.just(P), lengths), st.tuples(st.just(Q), lengths)),
    st.tuples(st.just("stage"), st.tuples(st.just(P), lengths)),
    st.tuples(st.just("round")),
    st.tuples(st.just("round")),
    st.tuples(st.just("fail"), st.sampled_from([*TABLES, "db.index"]), faults),
    st.tuples(st.just("maintain"), names, st.integers(1, 3)),
    st.tuples(st.just("gone"), names),
    st.tuples(st.just("die_after"), st.integers(1, 12)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("overtaken")),
    st.tuples(st.just("overtaken_at"), st.sampled_from([*TABLES, "db.index"])),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(0, 40)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(happenings, min_size=5, max_size=60))
def test_every_record_is_in_each_of_its_tables_once_whatever_happens(acts: list[Any]):
    world = World()
    for name, *arguments in acts:
        getattr(world, name)(*arguments)
        world.check()
    world.heal()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), lengths)),
    st.integers(0, 60),
)
def test_the_counts_of_an_entry_are_those_of_its_batches_and_of_what_passed(
    batches: list[Any], since: int
):
    """Whatever a table's ledger lacks before, between and behind its batches is `elsewhere`."""
    position, staged = since, []
    for written, gap in batches:
        start = position + gap
        end = start + 10
        tables = tuple(
            StagedTable(
                f"db.{name}",
                "",
                0,
                (),
                (),
                0,
                0,
                (RangeCounts(Range(P, start, end), count, skipped=10 - count),),
            )
            for name, count in written.items()
        )
        staged.append(
            StagedBatch(
                "s",
                1,
                len(staged),
                str(len(staged)),
                Cut({P: start, Q: 3}),
                Cut({P: end, Q: 3}),
                {},
                "",
                0,
                0,
                tables,
                (RangeCounts(Range(P, start, end), 10),),
            )
        )
        position = end
    for table in ("db.a", "db.b", "db.c"):
        own_batches = [batch for batch in staged if table in batch.names]
        if not own_batches:
            continue
        entry = entry_of(own_batches, table, 1, Cut({P: since}))
        assert entry.begin[P] == since
        assert entry.end[P] == own_batches[-1].end[P]
        counts = entry.counts(P)
        tallies = [batch.table(table).tallies[0] for batch in own_batches]
        assert counts.written == sum(tally.written for tally in tallies)
        assert counts.skipped == sum(tally.skipped for tally in tallies)
        assert counts.elsewhere == entry.end[P] - since - 10 * len(own_batches)
        again = parse(entry.summary())
        assert again == entry
