"""Back to a cut: which boundary is possible, and that no kill on the way loses or doubles anything.

`World` is a stream into several tables in memory, committed by the real committer in any order,
with absorbed commits, runs that end, and foreign writers. The truth is which batches were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from frazil.accounting import RangeCounts
from frazil.commit import rewind_plan
from frazil.commit.batch_chain import chain, entry_of
from frazil.commit.commit_queue import INDEX, BackpressureLimits
from frazil.commit.committer import Committer, Progress
from frazil.commit.protocol import TableCommitter
from frazil.commit.rewind import (
    IndexRemoval,
    RewindSteps,
)
from frazil.commit.rewind_note import PROPERTY, RewindNote, note_of, refuse_unfinished
from frazil.commit.rewind_plan import BEGINNING, BatchTimeline, Boundary, RewindPlan, earliest
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Conflict,
    Fatal,
    Fenced,
    FrazilError,
    Gap,
)
from frazil.iceberg.table import Snapshot
from frazil.ledger import index as offset_index
from frazil.ledger.entry import entries, parse
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range
from tests.commit_events import Events
from tests.fakes import FakeClock, FakeTable

#: The steps of a rewind, in order; `forked` and `moved` occur once per table that moves.
STEPS = ("claimed", "noted", "forked", "moved", "unstaged", "indexed", "done")

P, Q = Partition("orders", 0), Partition("orders", 1)
TEN = 10


class Movable(FakeTable):
    """With branches that can be moved, and properties."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"uuid-{name}")
        self.properties: dict[str, str] = {}
        self.files: dict[int, list[str]] = {}  # of a snapshot that did not only add

    def tags(self) -> dict[str, int]:
        return {name: number for name, number in self.refs.items() if name.startswith("frazil/")}

    def fork(self, branch: str, snapshot_id: int) -> None:
        assert snapshot_id in self.snapshots
        self.refs[branch] = snapshot_id

    def move(self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "dropped" or any(self.refs.get(k) != v for k, v in expected.items()):
            raise Conflict("cannot move: another writer was first")
        for name, number in refs.items():
            self.refs.pop(name, None)
            if number is not None:
                self.refs[name] = number
        if fault == "lost":
            raise CommitStateUnknown("cannot move: CommitStateUnknownException")

    def set_property(self, key: str, value: str) -> None:
        self.properties[key] = value

    def remove_property(self, key: str) -> None:
        self.properties.pop(key, None)

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
    ) -> None:
        assert not same
        before = self.live()
        if refusal := check(self.history("main")):
            raise CommitStateUnknown(refusal)
        made = self.add([], summary)
        self.files[made.id] = [m for m in before if m not in removed] + list(added)

    def expire(self, keep: int = 1) -> None:
        files = {snapshot.id: self.live_at(snapshot.id) for snapshot in self.history("main")}
        super().expire(keep)
        self.files |= {number: files[number] for number in self.snapshots if number in files}

    def live_at(self, snapshot_id: int) -> list[str]:
        self.refs["at"] = snapshot_id
        files = self.live("at")
        del self.refs["at"]
        return files

    def live(self, branch: str = "main") -> list[str]:
        files: list[str] = []
        for snapshot in self.history(branch):
            if snapshot.id in self.files:
                return self.files[snapshot.id] + files
            files = self.manifests[snapshot.id] + files
        return files


class World:
    """Batches of ten offsets; `db.a`, `db.b`, … are made when a batch first names them."""

    def __init__(self, alone: bool = False, beginning: int = 0) -> None:
        self.alone = alone
        self.tables: dict[str, Movable] = {}
        self.index = Movable("db.index")
        self.batches: dict[str, StagedBatch] = {}
        self.staged: dict[str, StagedBatch] = {}
        self.clock = FakeClock()
        self.epoch = 0
        self.beginnings = {P: 0, Q: beginning}
        self.begin_run()

    def begin_run(self) -> None:
        refuse_unfinished(self.index.properties, "s")
        heads = [TableCommitter(t, "main", "s", 0, self.clock).head().entry for t in self.every]
        self.epoch = 1 + max((head.epoch for head in heads if head), default=0)
        self.index_target = TableCommitter(self.index, "main", "s", self.epoch, self.clock)
        head = take(self.index_target, lambda position: Cut({**self.beginnings, **position}))
        refuse_unfinished(self.index.properties, "s")
        self.targets: dict[str, TableCommitter] = {}
        for name, table in self.tables.items():
            assert not TableCommitter(table, "main", "s", 0, self.clock).tag_mismatch(), name
            self.targets[name] = TableCommitter(table, "main", "s", self.epoch, self.clock)
            claimed = take(self.targets[name])
            if self.alone:  # as `Recovery.check_table`
                assert claimed.entry.end.reaches(head.entry.end)
        events = Events(
            table=lambda name: self.targets[name],
            index_manifests=lambda located: [batch.commit_id for batch, _ in located],
            recorded_tables=lambda: {name: table.uuid for name, table in self.tables.items()},
            committed=lambda batches: [self.staged.pop(b.commit_id) for b in batches],
        )
        self.committer = Committer(
            events,
            self.index_target,
            Progress(position=head.entry.end),
            BackpressureLimits(10**6, 10**12, 1e9),
            clock=self.clock,
            alone=self.alone,
        )
        committed = {
            i
            for t in self.tables.values()
            for e, _ in entries(t.history("main"), "s")
            for i in e.commit_ids
        }
        chained = chain(head.entry.end, list(self.staged.values()), committed)
        self.end = chained[-1].end if chained else head.entry.end
        self.number = max([head.entry.batches[1] + 1, *(b.number + 1 for b in chained)])
        for batch in chained:
            self.committer.submit(batch)

    @property
    def every(self) -> list[Movable]:
        return [self.index, *self.tables.values()]

    def make(self, *names: str, at: Partition = P) -> StagedBatch:
        """A batch of ten records for each of these tables, or for nobody."""
        for name in names:
            if name not in self.tables:
                self.tables[name] = Movable(name)
                self.targets[name] = TableCommitter(
                    self.tables[name], "main", "s", self.epoch, self.clock
                )
        where = Range(at, self.end[at], self.end[at] + TEN)
        commit_id = f"c{len(self.batches)}"
        tables = tuple(
            StagedTable(
                name,
                f"uuid-{name}",
                0,
                (f"{commit_id}/{name}",),
                (),
                1,
                1,
                (RangeCounts(where, TEN),),
            )
            for name in names
        )
        total = (
            ()
            if self.alone
            else (RangeCounts(where, TEN if names else 0, skipped=0 if names else TEN),)
        )
        after = self.end.after([where])
        made = StagedBatch(
            "s", self.epoch, self.number, commit_id, self.end, after, {}, "", 0, 0, tables, total
        )
        self.batches[commit_id] = self.staged[commit_id] = made
        self.end = after
        self.number += 1
        self.committer.submit(made)
        return made

    def commit(self, *names: str) -> None:
        """What waits for these tables, each in one commit; `INDEX` last, as far as it can."""
        waiting = {name for batch in self.committer.queue.pending for name in batch.left}
        self.committer.round([name for name in names if name == INDEX or name in waiting])

    def settle(self) -> None:
        self.commit(*self.tables, INDEX)
        assert not self.committer.pending

    def rows(self) -> pa.Table:
        parts = []
        for at, commit_id in enumerate(self.index.live()):
            batch = self.batches[commit_id]
            made = offset_index.rows(
                [(batch, {n: Snapshot(1, None, 0, 0, "", {}) for n in batch.names})]
            )
            moment = pa.array([moment_of(at)] * made.num_rows, pa.timestamp("us", "UTC"))
            column = made.schema.get_field_index("committed_at")
            parts.append(made.set_column(column, "committed_at", moment))
        return pa.concat_tables(parts) if parts else offset_index.rows([])

    def rewinding(self, step: Callable[[str, str], None] = lambda name, table: None) -> RewindSteps:
        def without(batch: int, epoch: int) -> IndexRemoval:
            gone = [i for i in self.index.live() if self.batches[i].number > batch]
            return IndexRemoval(self.index.refs["main"], gone)

        self.index.delete = lambda path: self.staged.pop(path, None)
        return RewindSteps(
            "s",
            self.index,
            {name: (table, "main") for name, table in self.tables.items()},
            rows=self.rows,
            staged=lambda: list(self.staged.items()),
            without=without,
            clock=self.clock,
            step=step,
        )

    def choose(self, text: str) -> RewindPlan:
        rewinding = self.rewinding()
        rewinding.read()
        return rewinding.choice(rewinding.state.timeline.named(text))

    def earliest(self, refused: RewindPlan) -> Any:
        rewinding = self.rewinding()
        rewinding.read()
        return earliest(
            rewinding.state.timeline, rewinding.state.tables, "s", refused, lambda _: True
        )

    def rewind(
        self,
        text: str,
        step: Callable[[str, str], None] = lambda name, table: None,
        refuse: Callable[[RewindPlan], None] = lambda choice: None,
    ) -> Boundary:
        """As `ops.rewind` does it."""
        doing = self.rewinding(step)
        doing.read()
        begun = doing.state.note
        start = doing.state.timeline.at(begun.batch) if begun else doing.state.timeline.named(text)
        doing.claim()
        doing.read()
        choice = doing.choice(start)
        assert not choice.trouble
        refuse(choice)
        doing.run(choice, text, refuse)
        return choice.boundary

    def check(self, boundary: Boundary) -> None:
        """All tables and the index have exactly the batches below it."""
        kept = self.index.live()
        assert [self.batches[i].number for i in kept] == sorted(
            self.batches[i].number for i in kept
        )
        assert all(boundary.cut.reaches(self.batches[i].end) for i in kept)
        for name, table in self.tables.items():
            assert table.live() == [f"{i}/{name}" for i in kept if name in self.batches[i].names]
        head = TableCommitter(self.index, "main", "s", 0, self.clock).head().entry
        assert head is not None
        assert (head.end, head.batches[1]) == (boundary.cut, boundary.batch)
        for target in self.every:
            epochs = [
                e.epoch for e in map(parse, (s.summary for s in target.snapshots.values())) if e
            ]
            newest = TableCommitter(target, "main", "s", 0, self.clock).head().entry
            assert newest is not None
            assert newest.epoch == max(epochs), "none that went is newer"
        assert self.staged == {}
        assert f"{PROPERTY}.s" not in self.index.properties
        assert all("frazil-rewind" not in ref for table in self.every for ref in table.refs)


def take(target: TableCommitter, extend: Callable[[Cut], Cut] = lambda position: position) -> Any:
    head = target.claim(extend)
    target.set_tag(head.snapshot)
    return head


def moment_of(at: int) -> datetime:
    return datetime(2025, 1, 1, at, tzinfo=timezone.utc)


def filled(*batches: Sequence[str], alone: bool = False) -> World:
    """Each batch committed by itself."""
    world = World(alone)
    for names in batches:
        world.make(*names)
        world.settle()
    return world


# ── boundaries ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("batch:1", 1),
        ("batch:-1", BEGINNING),
        ("batch:-9", BEGINNING),
        ('{"orders": {"0": 20}}', 1),
        ('{"orders": {"0": 29}}', 1),
        ('{"orders": {"0": 99}}', 2),
        ('{"orders": {"0": 9}}', BEGINNING),
        ('{"orders": {"1": 0}}', 2),  # nothing is of it
        ("2025-01-01T01:59", 1),
        ("2025-01-01T01:59:00Z", 1),
        ("2025-01-01T03:59+02:00", 1),
        ("2025-01-01T02:00", 2),
        ("2024-12-31T23:59", BEGINNING),
    ],
)
def test_the_boundary_is_the_newest_at_or_below_a_batch_a_moment_or_offsets(text: str, batch: int):
    world = filled(["db.a"], ["db.a"], ["db.a"], alone=True)
    boundary = BatchTimeline(world.rows(), world.end).named(text)
    assert (boundary.batch, boundary.cut[P]) == (batch, 10 * (batch + 1))


@pytest.mark.parametrize("text", ["", "17", "batch:", "yesterday", "{", '{"orders": 7}', "[]"])
def test_what_is_no_cut_is_refused(text: str):
    with pytest.raises(ConfigError, match="cannot read the cut"):
        World().choose(text)


def test_a_later_partition_is_at_its_beginning():
    world = World(alone=True)
    world.make("db.a")
    world.make("db.a", at=Q)
    world.make("db.a")
    world.settle()
    stream = BatchTimeline(world.rows(), world.end)
    assert stream.at(0).cut == Cut({P: 10, Q: 0})
    assert stream.at(1).cut == Cut({P: 10, Q: 10})
    assert stream.beginnings == Cut({P: 0, Q: 0})
    assert [*stream.beyond(stream.at(0), {P: 10, Q: 1})] == [stream.at(1), stream.at(2)]
    assert [*stream.beyond(stream.at(0), {P: 21})] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch:9", "the last batch is 1"),
        ('{"orders": {"7": 1}}', "does not read it; it reads"),
        ('{"other": {"0": 1}}', "does not read it; it reads"),
    ],
)
def test_a_cut_that_the_sink_does_not_know_is_refused(text: str, message: str):
    world = filled(["db.a"], ["db.a"])
    with pytest.raises(ConfigError, match=message):
        world.choose(text)


def test_no_boundary_lies_behind_rows_that_do_not_join():
    world = filled(["db.a"], ["db.a"], ["db.a"], ["db.a"])
    whole = world.rows()
    torn = pa.concat_tables([whole.slice(0, 4), whole.slice(6)])  # without batch 2
    stream = BatchTimeline(torn, world.end)
    assert stream.broken == 3
    assert stream.at(3).batch == stream.at(2).batch == 1


# ── which boundary all tables share ──────────────────────────────────────────────────────────────


def test_absorbed_batches_share_a_snapshot_and_have_no_boundary_between_them():
    world = filled(["db.a", "db.b"])
    for _ in range(3):
        world.make("db.a", "db.b")
        world.commit("db.b")
    world.commit("db.a", "db.b", INDEX)
    choice = world.choose("batch:2")
    assert choice.boundary.batch == 0
    assert choice.reasons == ("table db.a took batches 1 to 3 in one commit",)
    assert [(move.table, move.rows) for move in choice.moves] == [("db.a", 30), ("db.b", 30)]
    assert [move.commits for move in choice.moves] == [1, 3]


def test_offsets_that_went_elsewhere_hold_no_table_back():
    """An entry begins where its table's ledger ends, far below the boundary; it holds nothing
    there, and the index knows."""
    world = filled(["db.a", "db.b"], ["db.b"], ["db.b"], ["db.a"])
    choice = world.choose("batch:1")
    assert choice.boundary.batch == 1
    assert {move.table: move.ranges for move in choice.moves} == {
        "db.a": (Range(P, 20, 40),),
        "db.b": (Range(P, 20, 30),),
    }


def test_a_table_that_is_ahead_of_the_index_goes_back_with_the_others():
    world = filled(["db.a", "db.b"], ["db.a", "db.b"])
    world.make("db.a", "db.b")
    world.commit("db.a")
    choice = world.choose("batch:1")
    assert [(move.table, move.rows) for move in choice.moves] == [("db.a", 10)]
    world.check(world.rewind("batch:1"))


def test_staged_batches_have_the_ranges_of_commits_that_the_index_lacks():
    world = filled(["db.a", "db.b"], ["db.b"], ["db.b"])
    world.make("db.a")
    world.commit("db.a")  # from 10, where its ledger ends; its records begin at 30
    choice = world.choose("batch:2")
    assert choice.boundary.batch == 2
    assert [(move.table, move.rows) for move in choice.moves] == [("db.a", 10)]
    world.staged.clear()
    assert world.choose("batch:2").boundary.batch == 0, "who cannot tell does not guess"


def test_a_batch_whose_record_was_lost_and_read_again_in_other_pieces_is_not_torn():
    """The table has what no index row tells of; the index's own batch covers a part of it."""
    world = filled(["db.a"])
    world.make("db.a")
    world.commit("db.a")  # [10, 20) is in the table, its record is lost
    world.staged.clear()
    world.begin_run()
    lost = world.batches["c1"]
    short = Range(P, 10, 15)
    staged = StagedBatch(
        "s",
        world.epoch,
        1,
        "c2",
        Cut({P: 10, Q: 0}),
        Cut({P: 15, Q: 0}),
        {},
        "",
        0,
        0,
        (),
        (RangeCounts(short, 5),),
    )
    world.batches["c2"] = world.staged["c2"] = staged
    world.committer.submit(staged)
    world.commit(INDEX)
    choice = world.choose("batch:1")
    assert choice.boundary.batch == 0, f"the boundary at 15 lies within {lost.commit_id}"


def test_a_table_that_was_rolled_back_by_hand_is_joined_at_its_position():
    world = filled(["db.a", "db.b"], ["db.a", "db.b"], ["db.a", "db.b"])
    older = [s.id for s in world.tables["db.a"].history("main")][1]
    world.tables["db.a"].refs["main"] = older
    choice = world.choose("batch:2")
    assert choice.boundary.batch == 1
    assert choice.reasons == ("table db.a lacks orders[0] from 20 on",)
    world.check(world.rewind("batch:2"))


def test_expired_snapshots_are_named_with_the_earliest_boundary_left():
    world = filled(["db.a", "db.b"], ["db.b"], ["db.a", "db.b"], ["db.a"], ["db.a"])
    world.tables["db.a"].expire(keep=2)
    choice = world.choose("batch:0")
    assert [(move.table, move.expired) for move in choice.expired] == [("db.a", True)]
    assert world.earliest(choice).batch == 3
    world.check(world.rewind("batch:3"))


def test_the_tag_alone_proves_a_table_that_does_not_move():
    world = filled(["db.a", "db.b"], ["db.b"], ["db.b"])
    table = world.tables["db.a"]
    table.add(["x"], {})
    table.add(["y"], {})
    table.expire(keep=1)
    choice = world.choose("batch:1")
    assert [move.table for move in choice.moves] == ["db.b"]
    assert world.choose("batch:-1").expired, "what it holds cannot be taken out any more"


# ── foreign commits ──────────────────────────────────────────────────────────────────────────────


def test_foreign_commits_that_would_go_are_listed_and_those_before_stay():
    world = filled(["db.a"], ["db.a"])
    table = world.tables["db.a"]
    table.add(["early"], {"added-records": "5"})
    world.make("db.a")
    world.settle()
    late = table.add(["late"], {"added-records": "1"})
    (lost,) = world.choose("batch:1").foreign
    assert (lost.snapshot, lost.sink, lost.reason) == (
        late.id,
        "",
        "append: 1 row added, 0 deleted",
    )
    assert [commit.snapshot for commit in world.choose("batch:0").foreign][1] == table.snapshots[
        late.parent or 0
    ].parent
    assert world.choose("batch:2").foreign == ()


def test_claims_of_others_and_compactions_are_no_loss_and_their_tags_move_along():
    world = filled(["db.a"])
    table = world.tables["db.a"]
    first = take(TableCommitter(table, "main", "s.replay", 1, world.clock))
    world.make("db.a")
    world.settle()
    take(TableCommitter(table, "main", "s.replay", 2, world.clock))
    take(TableCommitter(table, "main", "late", 1, world.clock))
    (move,) = world.choose("batch:0").moves
    assert move.foreign == ()
    assert move.tags == {"frazil/s.replay": first.snapshot.id, "frazil/late": None}
    world.rewind("batch:0")
    assert not TableCommitter(table, "main", "s.replay", 0, world.clock).tag_mismatch()
    assert "frazil/late" not in table.refs


def test_a_sink_that_loses_records_keeps_its_tag_so_that_it_detects_it():
    world = filled(["db.a"], ["db.a"])
    table = world.tables["db.a"]
    other = TableCommitter(table, "main", "other", 1, world.clock)
    other.claim()
    staged = StagedBatch(
        "other",
        1,
        0,
        "o",
        Cut({P: 0}),
        Cut({P: 10}),
        {},
        "",
        0,
        0,
        (
            StagedTable(
                "db.a", table.uuid, 0, ("o/a",), (), 1, 1, (RangeCounts(Range(P, 0, 10), 10),)
            ),
        ),
    )
    other.set_tag(other.commit(["o/a"], entry_of([staged], "db.a", 1)))
    choice = world.choose("batch:0")
    assert [commit.sink for commit in choice.foreign] == ["other"]
    world.rewind("batch:0")
    assert TableCommitter(table, "main", "other", 0, world.clock).tag_mismatch()


def test_what_must_not_be_undone_is_asked_for_right_before_a_table_moves():
    world = filled(["db.a"], ["db.a"])

    def refuse(choice: RewindPlan) -> None:
        if choice.foreign:
            raise Gap("cannot rewind: foreign commits")

    def step(name: str, table: str) -> None:
        if name == "noted":
            world.tables["db.a"].add(["x"], {"added-records": "1"})

    with pytest.raises(Gap, match="foreign"):
        world.rewind("batch:0", step, refuse)
    assert world.tables["db.a"].live()[-1] == "x"
    boundary = world.rewind("batch:0")  # with nobody to refuse
    world.check(boundary)


# ── all the way ──────────────────────────────────────────────────────────────────────────────────


def test_tables_and_index_go_back_together_and_the_stream_goes_on():
    world = filled(["db.a", "db.b"], ["db.a"], ["db.b"], ["db.a", "db.b"])
    before = world.epoch
    boundary = world.rewind("batch:1")
    world.check(boundary)
    assert boundary.cut == Cut({P: 20, Q: 0})
    world.begin_run()
    assert world.epoch > before + 1
    assert (world.end, world.number) == (boundary.cut, 2)
    world.make("db.b")
    world.settle()
    assert world.tables["db.a"].live() == ["c0/db.a", "c1/db.a"]
    assert world.tables["db.b"].live() == ["c0/db.b", "c4/db.b"]
    for table in world.tables.values():
        committed = [e for e, _ in entries(table.history("main"), "s")][::-1]
        for one, other in pairwise(committed):
            assert other.begin.continues(one.end), "the ledger joins"
            assert other.epoch >= one.epoch


@pytest.mark.parametrize("alone", [True, False])
def test_the_beginning_is_a_boundary_too(alone: bool):
    world = World(alone, beginning=100)
    world.make("db.a")
    world.make("db.a", at=Q)
    world.settle()
    boundary = world.rewind("batch:-1")
    assert boundary == Boundary(BEGINNING, Cut({P: 0, Q: 100}))
    world.check(boundary)
    assert world.tables["db.a"].live() == []
    world.begin_run()
    world.make("db.a")
    world.settle()
    assert world.tables["db.a"].live() == ["c2/db.a"]


def test_a_table_made_after_the_cut_is_empty_and_still_the_sinks():
    world = filled(["db.a"], ["db.b"], ["db.b"])
    world.check(world.rewind("batch:0"))
    table = world.tables["db.b"]
    (claim,) = table.history("main")
    assert claim.parent is None
    assert table.tags() == {"frazil/s": claim.id}
    world.begin_run()
    world.make("db.a", "db.b")
    world.settle()
    assert table.live() == ["c3/db.b"]


def test_a_lost_answer_is_read_back():
    world = filled(["db.a"], ["db.a"])

    def step(name: str, table: str) -> None:
        if name == "noted":
            world.tables["db.a"].faults = ["lost", "lost"]  # of the fork's claim and of the move
        if name == "unstaged":
            world.index.faults = ["lost"]

    world.check(world.rewind("batch:0", step))


def test_a_writer_in_between_is_a_conflict_and_is_read_again():
    world = filled(["db.a"], ["db.a"])
    table = world.tables["db.a"]
    times = [1]

    def step(name: str, which: str) -> None:
        if name == "forked" and times:
            times.pop()
            made = table.add([], {"added-records": "4", "deleted-records": "4"})
            table.snapshots[made.id] = replace(made, operation="replace")

    world.check(world.rewind("batch:0", step))
    assert times == []


# ── fences ───────────────────────────────────────────────────────────────────────────────────────


def test_an_earlier_run_can_commit_at_no_moment_of_a_rewind():
    """Also the one whose last commit is exactly what the table goes back to: its compare-and-set
    would hold, were it not for the newer epoch that is there in the same moment."""
    world = filled(["db.a", "db.b"], ["db.a", "db.b"])
    zombies = {name: world.targets[name] for name in world.tables}
    pending = world.make("db.a", "db.b")
    world.begin_run()
    world.settle()
    refusals = []

    def step(name: str, table: str) -> None:
        for which, zombie in zombies.items():
            with pytest.raises((Fenced, Gap, Fatal)) as refused:
                zombie.commit(["zombie"], entry_of([pending], which, zombie.epoch, zombie.end))
            refusals.append(refused.value)

    world.check(world.rewind("batch:1", step))
    assert len(refusals) == 2 * (len(STEPS) + 2)  # two tables move


def test_a_run_that_starts_during_a_rewind_is_refused_and_the_rewind_ends():
    world = filled(["db.a"], ["db.a"])
    refused = []

    def step(name: str, table: str) -> None:
        if name not in ("claimed", "done"):
            with pytest.raises(Gap, match="a rewind to batch:0 is unfinished"):
                world.begin_run()
            refused.append(name)

    # (The world's run looks before it claims, and once more after.)
    world.check(world.rewind("batch:0", step))
    assert refused == list(STEPS[1:-1])


def test_a_run_that_claims_before_it_can_see_the_note_goes_on_and_the_rewind_does_not():
    world = filled(["db.a"], ["db.a"])

    def step(name: str, table: str) -> None:
        if name == "claimed":
            world.begin_run()

    with pytest.raises(Fenced, match=r"claimed db\.index at the same time"):
        world.rewind("batch:0", step)
    assert note_of(world.index.properties, "s") is None
    world.make("db.a")
    world.settle()
    assert len(world.tables["db.a"].live()) == 3


@pytest.mark.parametrize("moment", ["noted", "forked", "moved", "unstaged"])
def test_of_two_rewinds_one_goes_through_and_the_other_stops(moment: str):
    """The slower one wakes up when the stream goes on already."""
    world = filled(["db.a"], ["db.a"], ["db.a"])

    def step(name: str, table: str) -> None:
        if name == moment:
            world.rewind("batch:1")
            world.begin_run()
            world.make("db.a")
            world.settle()

    with pytest.raises(Fenced):
        world.rewind("batch:1", step)
    assert world.tables["db.a"].live() == ["c0/db.a", "c1/db.a", "c3/db.a"]
    assert world.index.live() == ["c0", "c1", "c3"]


# ── kills ────────────────────────────────────────────────────────────────────────────────────────


class Killed(BaseException):
    pass


def killed_at(world: World, text: str, nth: int) -> bool:
    """Kill the rewind at its nth step; False where it has fewer."""
    left = [nth]

    def step(name: str, table: str) -> None:
        left[0] -= 1
        if left[0] < 0 and name != "done":  # there is nothing left to be done then
            raise Killed

    try:
        world.rewind(text, step)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("nth", range(2 * 2 + 5))
@pytest.mark.parametrize("text", ["batch:1", "batch:-1"])
def test_a_rewind_that_was_killed_is_finished_by_the_next(nth: int, text: str):
    world = filled(["db.a", "db.b"], ["db.a"], ["db.b"], ["db.a", "db.b"])
    world.make("db.a")
    assert killed_at(world, text, nth) == (nth < len(STEPS) - 1 + 2)  # two tables move
    started = True
    try:
        world.begin_run()  # refused, or right
    except Gap:
        started = False
    if started:
        live = {name: table.live() for name, table in world.tables.items()}
        kept = [i for i in world.batches if any(f"{i}/{n}" in live[n] for n in live)]
        for name in live:
            assert live[name] == [f"{i}/{name}" for i in kept if name in world.batches[i].names]
    world.check(world.rewind(text))
    world.begin_run()
    world.make("db.a", "db.b")
    world.settle()


names = st.sampled_from(["db.a", "db.b", "db.c"])
several = st.lists(names, max_size=3, unique=True)
doings = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), several, st.sampled_from([P, Q])),
        st.tuples(st.just("commit"), several),
        st.tuples(st.just("index")),
        st.tuples(st.just("begin_run")),
        st.tuples(st.just("foreign"), names),
        st.tuples(st.just("compact"), names),
        st.tuples(st.just("expire"), names, st.integers(1, 3)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    doings=doings,
    batch=st.integers(-1, 12),
    kills=st.lists(st.integers(0, 12), max_size=3),
    by_hand=st.none() | st.tuples(names, st.integers(1, 3)),
    more=st.lists(several, max_size=3),
)
@example(  # rolled back to a snapshot below which the ledger was expired
    doings=[
        ("batch", ["db.a"], P),
        ("begin_run",),
        ("foreign", "db.a"),
        ("begin_run",),
        ("expire", "db.a", 2),
        ("begin_run",),
    ],
    batch=0,
    kills=[],
    by_hand=("db.a", 2),
    more=[],
)
def test_after_any_history_and_a_kill_at_any_step_all_tables_are_at_one_cut(
    doings: list[Any], batch: int, kills: list[int], by_hand: Any, more: list[list[str]]
):
    world = World()
    for name, *rest in doings:
        if name == "batch":
            world.make(*rest[0], at=rest[1])
        elif name == "commit":
            world.commit(*(table for table in rest[0] if table in world.tables))
        elif name == "index":
            world.commit(INDEX)
        elif name == "begin_run":
            world.begin_run()
        elif name in ("foreign", "compact") and rest[0] in world.tables:
            table = world.tables[rest[0]]
            made = table.add([], {"added-records": "1", "deleted-records": "1"})
            kind = "replace" if name == "compact" else "append"
            table.snapshots[made.id] = replace(made, operation=kind)
        elif name == "expire" and world.tables.get(rest[0], world.index).tags():
            world.tables.get(rest[0], world.index).expire(rest[1])
    if by_hand and by_hand[0] in world.tables:  # somebody rolls a table back
        table = world.tables[by_hand[0]]
        older = [snapshot.id for snapshot in table.history("main")][by_hand[1] :][:1]
        if older:
            table.refs["main"] = older[0]
    last = max((world.batches[i].number for i in world.index.live()), default=-1)
    text = f"batch:{min(batch, last)}"
    choice = world.choose(text)
    assert choice.boundary.batch <= min(batch, last)
    if choice.trouble or choice.expired:
        boundary = world.earliest(choice)
        if boundary is None:
            return
        text = f"batch:{boundary.batch}"
        choice = world.choose(text)
    expected = choice.boundary
    if all(killed_at(world, text, kill) for kill in kills):  # else one went through
        assert world.rewind(text) == expected
    world.check(expected)
    world.begin_run()
    for arguments in more:
        world.make(*arguments)
    world.settle()
    kept = world.index.live()
    for name, table in world.tables.items():
        assert table.live() == [f"{i}/{name}" for i in kept if name in world.batches[i].names]
        committed = [e for e, _ in entries(table.history("main"), "s")][::-1]
        assert all(b.begin.continues(a.end) for a, b in pairwise(committed))
    joined = BatchTimeline(world.rows(), world.end)
    assert joined.broken is None


def test_an_unfinished_rewind_names_the_command_that_finishes_it():
    with pytest.raises(Gap) as refused:
        refuse_unfinished({f"{PROPERTY}.s": RewindNote("batch:3", 3, {}).text()}, "s")
    assert "frazil rewind CONFIG --to 'batch:3'" in refused.value.hint
    refuse_unfinished({f"{PROPERTY}.s": "…"}, "t")
    for broken in ("…", "7", '{"version":1}'):
        with pytest.raises(Fatal, match=r"cannot read property frazil\.rewind\.s of the index: "):
            refuse_unfinished({f"{PROPERTY}.s": broken}, "s")
    assert isinstance(refused.value, FrazilError)


@pytest.mark.parametrize(
    ("operation", "summary", "others"),
    [
        ("replace", {"added-records": "5", "deleted-records": "9", "frazil.compact": "u"}, False),
        ("replace", {"added-records": "5", "deleted-records": "9"}, True),
        ("replace", {"added-records": "9", "deleted-records": "9"}, False),
        ("append", {"added-records": "5"}, True),
    ],
)
def test_rows_that_a_compaction_removes_are_not_foreign(
    operation: str, summary: dict[str, str], others: bool
):
    snapshot = Snapshot(1, None, 1, 1, operation, summary)
    assert (rewind_plan._lost_commit(snapshot, None, "s") is not None) == others
