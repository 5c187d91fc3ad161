"""One committer, several tables in memory: each has its batches once and in order, whatever fails.

`Stream` is the world around: tables, an index, and the staged batches that outlive a committer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from frazil.accounting import OutcomeCounts, RangeCounts
from frazil.commit.batch_chain import chain, entry_of
from frazil.commit.commit_queue import INDEX, BackpressureLimits, CommitTrigger, PendingBatch
from frazil.commit.committer import Committer, Progress
from frazil.commit.protocol import ATTEMPTS, LONGEST_PAUSE, TableCommitter
from frazil.commit.table_configs import TableConfigs
from frazil.commit.tables import SinkTables
from frazil.config.model import Config
from frazil.config.sections import DeadLettersConfig, DecodeConfig, SinkConfig, TableConfig
from frazil.config.settings import Settings
from frazil.errors import ConfigError, Fenced, FrazilError, Gap, IdentityMismatch, Unavailable
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import LedgerEntry, entries
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range
from tests.commit_events import Events
from tests.fakes import FakeClock, FakeTable

P, Q = Partition("orders", 0), Partition("orders", 1)
ROOMY = BackpressureLimits(100, 10**9, 3600)
#: Every try of one commit.
AWAY = ["dropped"] * ATTEMPTS


class Stream:
    """Batches of one partition, ten offsets each, and tables that are made when they are named."""

    def __init__(self, *names: str, paces: Mapping[str, CommitTrigger] | None = None) -> None:
        self.tables = {name: FakeTable(name, f"uuid-{name}") for name in names}
        self.index = FakeTable("db.index", "uuid-index")
        self.paces = dict(paces or {})
        self.staged: dict[str, StagedBatch] = {}
        self.made = 0
        self.clock = FakeClock()
        self.epoch = 0
        self.bounds = ROOMY
        self.steps: list[tuple[str, str]] = []
        self.unhealthy: dict[str, FrazilError] = {}
        self.begin_run()

    def begin_run(self) -> None:
        """A run begins: claims, and what is staged is taken over."""
        self.epoch += 1
        self.index_target = TableCommitter(self.index, "main", "s", self.epoch, self.clock)
        head = self.index_target.claim(lambda position: Cut({P: 0, Q: 0, **position}))
        assert head.entry is not None
        self.targets = {
            name: TableCommitter(table, "main", "s", self.epoch, self.clock)
            for name, table in self.tables.items()
        }
        for name, target in self.targets.items():
            if name not in self.unhealthy:
                target.claim()
        events = Events(
            table=self._target,
            index_manifests=lambda located: [
                f"{b.commit_id}:{','.join(sorted(s))}" for b, s in located
            ],
            committed=self._committed,
            trigger=lambda name: self.paces.get(name, CommitTrigger()),
            step=lambda name, batches, *_: self.steps.append((name, batches[-1].commit_id)),
        )
        self.committer = Committer(
            events,
            self.index_target,
            Progress(position=head.entry.end),
            self.bounds,
            clock=self.clock,
            alone=False,
        )
        committed = {
            i for table in self.tables.values() for entry in ledger(table) for i in entry.commit_ids
        }
        chained = chain(head.entry.end, list(self.staged.values()), committed)
        self.end = chained[-1].end if chained else head.entry.end
        for batch in chained:
            self.committer.submit(batch)

    def _target(self, name: str) -> TableCommitter:
        if name in self.unhealthy:
            raise self.unhealthy[name]
        return self.targets[name]

    def _committed(self, batches: Any) -> None:
        for batch in batches:
            del self.staged[batch.commit_id]

    def batch(self, bytes: int = 1, at: Partition = P, **written: int) -> StagedBatch:
        """`a=3`: three of the ten records are for db.a, the others are for nobody."""
        self.made += 1
        range_ = Range(at, self.end[at], self.end[at] + 10)
        commit_id = f"c{self.made}"
        tables = tuple(
            StagedTable(
                f"db.{name}",
                f"uuid-db.{name}",
                0,
                (f"{commit_id}-{name}",),
                (),
                1,
                bytes,
                (RangeCounts(range_, count, skipped=10 - count),),
            )
            for name, count in written.items()
        )
        total = RangeCounts(range_, min(10, sum(written.values())))
        total = RangeCounts(range_, total.written, skipped=10 - total.written)
        after = self.end.after([range_])
        made = StagedBatch(
            "s", self.epoch, self.made, commit_id, self.end, after, {}, "", 0, 0, tables, (total,)
        )
        self.staged[commit_id] = made
        self.end = after
        return made

    def hand(self, **written: Any) -> StagedBatch:
        made = self.batch(**written)
        self.committer.submit(made)
        return made

    def due(self) -> list[str]:
        return self.committer.queue.due()

    def round(self) -> list[str]:
        """One turn of the committer's thread."""
        due = self.due()
        self.committer.round(due)
        return due

    def settle(self, rounds: int = 50) -> None:
        """Until nothing is due, however long the pauses are."""
        for _ in range(rounds):
            if not self.round():
                if not self.committer.pending:
                    return
                self.clock.sleep(LONGEST_PAUSE)
        assert not self.committer.pending, self.committer.progress.stuck

    def live(self, name: str) -> list[str]:
        return self.tables[f"db.{name}"].live()

    @property
    def indexed(self) -> list[str]:
        return [path.partition(":")[0] for path in self.index.live()]

    @property
    def stuck(self) -> Mapping[str, str]:
        return self.committer.progress.stuck


def ledger(table: FakeTable) -> list[LedgerEntry]:
    """Oldest first, claims left out."""
    committed = [entry for entry, _ in entries(table.history("main"), "s")][::-1]
    return [entry for entry in committed if entry.ranges]


def counts(entry: LedgerEntry, partition: Partition = P) -> OutcomeCounts:
    return entry.counts(partition)


@pytest.fixture
def stream() -> Stream:
    return Stream("db.a", "db.b")


# ── the order of things ─────────────────────────────────────────────────────────────────────────


def test_a_batch_goes_to_each_of_its_tables_and_then_to_the_index(stream: Stream):
    stream.hand(a=3, b=2)
    stream.hand(b=4)
    assert stream.round() == ["db.a", "db.b", INDEX]
    assert stream.live("a") == ["c1-a"]
    assert stream.live("b") == ["c1-b", "c2-b"]
    assert stream.index.live() == ["c1:db.a,db.b", "c2:db.b"]
    assert stream.committer.progress.position == Cut({P: 20, Q: 0})
    assert stream.staged == {}
    names = [name for name, _ in stream.steps]
    assert names.index("index-commit") > max(i for i, n in enumerate(names) if n == "tagged")


def test_a_batch_that_holds_nothing_for_any_table_moves_the_index_alone(stream: Stream):
    stream.hand()
    assert stream.round() == [INDEX]
    assert stream.committer.progress.position == Cut({P: 10, Q: 0})
    [entry] = ledger(stream.index)
    assert counts(entry) == OutcomeCounts(skipped=10)
    assert ledger(stream.tables["db.a"]) == []


def test_a_batch_without_tables_waits_for_the_one_before_it(stream: Stream):
    stream.tables["db.a"].faults = list(AWAY)
    stream.hand(a=3)
    stream.hand()
    stream.round()
    assert stream.indexed == []
    stream.settle()
    assert stream.indexed == ["c1", "c2"]


def test_an_idle_table_begins_where_it_ended_and_counts_what_passed_as_elsewhere(stream: Stream):
    stream.hand(a=3, b=1)
    stream.settle()
    for _ in range(3):
        stream.hand(b=1)
        stream.settle()
    stream.hand(a=2)
    stream.hand(b=1)
    stream.settle()
    stream.hand(a=1, at=Q)
    stream.settle()
    first, second, third = ledger(stream.tables["db.a"])
    assert counts(first) == OutcomeCounts(3, skipped=7)
    assert (second.begin, second.end) == (Cut({P: 10, Q: 0}), Cut({P: 50, Q: 0}))
    assert counts(second) == OutcomeCounts(2, skipped=8, elsewhere=30)
    assert (third.begin, third.end) == (Cut({P: 50, Q: 0}), Cut({P: 60, Q: 10}))
    assert counts(third) == OutcomeCounts(elsewhere=10)
    assert counts(third, Q) == OutcomeCounts(1, skipped=9)


def test_a_table_that_skipped_a_batch_in_the_middle_of_a_commit_counts_it_too(stream: Stream):
    for a in (1, 0, 0, 4):
        stream.hand(**({"a": a} if a else {"b": 1}))
    stream.settle()
    [entry] = ledger(stream.tables["db.a"])
    assert counts(entry) == OutcomeCounts(5, skipped=15, elsewhere=20)
    assert entry.commit_ids == ("c1", "c4")


def test_a_table_that_appears_later_begins_with_its_first_batch(stream: Stream):
    stream.hand(a=1)
    stream.settle()
    stream.tables["db.new"] = FakeTable("db.new", "uuid-db.new")
    stream.targets["db.new"] = TableCommitter(stream.tables["db.new"], "main", "s", 1, stream.clock)
    stream.hand(new=5)
    stream.settle()
    [entry] = ledger(stream.tables["db.new"])
    assert entry.begin == Cut({P: 10, Q: 0})
    assert counts(entry) == OutcomeCounts(5, skipped=5)


def test_an_entry_that_would_hold_offsets_twice_is_refused(stream: Stream):
    one = stream.batch(a=1)
    with pytest.raises(FrazilError, match=r"it has orders\[0\] \[0, 7\) already"):
        entry_of([one], "db.a", 1, Cut({P: 7, Q: 0}))


def test_a_table_ahead_in_one_partition_takes_records_of_another(stream: Stream):
    """After a replay below its floor: it gets none of the one, and stays where it is in it."""
    one = stream.batch(at=Q, a=4)
    entry = entry_of([one], "db.a", 1, Cut({P: 25, Q: 0}))
    assert (entry.begin, entry.end) == (Cut({P: 25, Q: 0}), Cut({P: 25, Q: 10}))
    assert entry.total == OutcomeCounts(4, skipped=6)


# ── a table that is stuck ───────────────────────────────────────────────────────────────────────


def test_a_stuck_table_holds_back_the_index_and_no_other_table(stream: Stream):
    stream.tables["db.a"].faults = AWAY * 3
    for i in range(5):
        stream.hand(a=i + 1, b=1)
        stream.round()
    assert stream.live("b") == [f"c{i}-b" for i in range(1, 6)]
    assert (stream.live("a"), stream.indexed) == ([], [])
    assert "503" in stream.stuck["db.a"]
    assert "503" in stream.committer.progress.trouble
    stream.settle()
    assert stream.live("a") == [f"c{i}-a" for i in range(1, 6)]
    assert len(ledger(stream.tables["db.a"])) == 1, "old and new together"
    assert stream.indexed == ["c1", "c2", "c3", "c4", "c5"]
    assert (dict(stream.stuck), stream.committer.progress.trouble) == ({}, "")


@pytest.mark.parametrize(
    "error",
    [IdentityMismatch("cannot go on: it is gone"), Gap("cannot go on"), ConfigError("cannot: 403")],
)
def test_what_a_person_must_see_to_keeps_only_its_own_table_waiting(
    stream: Stream, error: FrazilError
):
    stream.unhealthy["db.a"] = error
    stream.hand(a=1, b=1)
    stream.hand(b=1)
    stream.round()
    assert stream.stuck == {"db.a": error.message}
    assert stream.live("b") == ["c1-b", "c2-b"]
    assert stream.committer.progress.position == Cut({P: 0, Q: 0})
    del stream.unhealthy["db.a"]
    stream.settle()
    assert stream.indexed == ["c1", "c2"]


def test_a_stuck_table_is_left_in_peace_for_longer_and_longer_and_never_given_up(stream: Stream):
    stream.unhealthy["db.a"] = Unavailable("cannot reach it")
    stream.hand(a=1)
    pauses = []
    for _ in range(1100):  # an outage of more than eight hours
        assert stream.round() == ["db.a", INDEX]
        _, until = stream.committer.queue._failures["db.a"]
        pauses.append(until - stream.clock.now)
        assert stream.due() == []
        stream.clock.now = until
    assert pauses[0] < 1 < pauses[5] < LONGEST_PAUSE == max(pauses) == pauses[-1]
    del stream.unhealthy["db.a"]
    stream.settle()
    assert stream.indexed == ["c1"]


def test_the_index_goes_as_far_as_all_tables_have_come(stream: Stream):
    stream.hand(b=1)
    stream.hand(a=1, b=1)
    stream.hand(b=1)
    stream.tables["db.a"].faults = list(AWAY)
    stream.round()
    assert stream.indexed == ["c1"]
    assert [batch.commit_id for batch in stream.committer.pending] == ["c2", "c3"]
    stream.settle()
    assert stream.indexed == ["c1", "c2", "c3"]


def test_an_index_that_is_away_is_for_later_and_one_that_is_wrong_stops_the_stream(stream: Stream):
    stream.index.faults = list(AWAY)
    stream.hand(a=1)
    stream.round()
    assert INDEX in stream.stuck
    assert stream.due() == []
    stream.settle()
    assert (stream.indexed, dict(stream.stuck)) == (["c1"], {})
    stream.index.refs["main"] = next(iter(stream.index.snapshots))  # rolled back to the claim
    stream.hand(a=1)
    with pytest.raises(FrazilError, match="newest entry"):
        stream.round()


# ── answers that were lost, runs that ended ─────────────────────────────────────────────────────


def test_a_table_whose_answer_was_lost_has_its_batch_once(stream: Stream):
    stream.tables["db.a"].faults = ["lost"]
    stream.hand(a=1, b=1)
    stream.hand(a=2)
    stream.settle()
    assert stream.live("a") == ["c1-a", "c2-a"]
    assert [counts(entry).written for entry in ledger(stream.tables["db.a"])] == [3]


def test_a_lost_answer_is_found_though_the_group_has_grown_and_the_table_was_idle(stream: Stream):
    """The commit went through, reading back did not: the next try has more batches."""
    table = stream.tables["db.a"]
    stream.hand(b=1)
    stream.settle()
    stream.hand(a=1)
    tag, table.tag = table.tag, _refusing  # type: ignore[method-assign]
    stream.round()
    assert stream.stuck
    table.tag = tag  # type: ignore[method-assign]
    stream.hand(b=1)
    stream.hand(a=2)
    stream.settle()
    assert stream.live("a") == ["c2-a", "c4-a"]
    first, second = ledger(table)
    assert counts(first) == OutcomeCounts(1, skipped=9)
    assert counts(second) == OutcomeCounts(2, skipped=8, elsewhere=10)


def _refusing(*_: Any) -> None:
    raise Unavailable("cannot move tag: 503")


def test_a_run_that_ended_in_the_middle_is_taken_over_table_by_table(stream: Stream):
    stream.tables["db.a"].faults = list(AWAY)
    stream.hand(a=1, b=1)
    stream.hand(b=2)
    stream.round()
    assert stream.live("b") == ["c1-b", "c2-b"]
    stream.begin_run()
    stream.hand(a=3, b=3)
    stream.settle()
    assert stream.live("a") == ["c1-a", "c3-a"]
    assert stream.live("b") == ["c1-b", "c2-b", "c3-b"]
    assert stream.indexed == ["c1", "c2", "c3"]
    assert [counts(entry) for entry in ledger(stream.tables["db.a"])] == [
        OutcomeCounts(4, skipped=16, elsewhere=10)
    ]


def test_a_table_that_stays_stuck_over_several_runs_loses_nothing(stream: Stream):
    stream.unhealthy["db.a"] = IdentityMismatch("cannot go on: it is gone")
    for _ in range(3):
        stream.hand(a=1, b=1)
        stream.hand(b=1)
        stream.round()
        stream.begin_run()
    assert stream.indexed == []
    del stream.unhealthy["db.a"]
    stream.begin_run()
    stream.settle()
    assert stream.live("a") == ["c1-a", "c3-a", "c5-a"]
    assert stream.live("b") == [f"c{i}-b" for i in range(1, 7)]
    assert stream.indexed == [f"c{i}" for i in range(1, 7)]


def test_batches_are_found_though_the_history_behind_them_was_expired(stream: Stream):
    """One table waits for long, the others go on and are maintained, and then a new run begins."""
    stream.unhealthy["db.a"] = IdentityMismatch("cannot go on: it is gone")
    for _ in range(4):
        stream.hand(a=1, b=1)
        stream.round()
    stream.tables["db.b"].expire()
    stream.begin_run()
    stream.tables["db.b"].expire()
    del stream.unhealthy["db.a"]
    stream.begin_run()
    stream.hand(b=5)
    stream.settle()
    assert dict(stream.stuck) == {}
    assert stream.indexed == ["c1", "c2", "c3", "c4", "c5"]
    assert counts(ledger(stream.tables["db.b"])[-1]) == OutcomeCounts(5, skipped=5)


def test_a_newer_run_on_one_table_stops_the_older_one_for_all(stream: Stream):
    stream.hand(a=1, b=1)
    TableCommitter(stream.tables["db.b"], "main", "s", 9, stream.clock).claim()
    with pytest.raises(Fenced):
        stream.round()
    assert stream.live("b") == []
    assert stream.indexed == []


def test_a_fenced_thread_raises_in_the_threads_that_submit_or_wait():
    stream = Stream("db.a", "db.b")
    stream.committer.queue.clock = time
    TableCommitter(stream.tables["db.b"], "main", "s", 9, stream.clock).claim()
    stream.committer.start()
    try:
        stream.hand(a=1, b=1)
        with pytest.raises(Fenced):
            stream.committer.wait_until(Cut({P: 10}), 10)
        with pytest.raises(Fenced):
            stream.hand(a=1)
        with pytest.raises(Fenced):
            stream.committer.flush(10)
    finally:
        stream.committer.close()


def test_files_that_were_staged_for_another_table_of_that_name_are_not_committed(stream: Stream):
    stream.hand(a=1, b=1)
    stream.tables["db.a"] = FakeTable("db.a", "another")
    stream.targets["db.a"] = TableCommitter(stream.tables["db.a"], "main", "s", 1, stream.clock)
    stream.round()
    assert "dropped and recreated" in stream.stuck["db.a"]
    assert stream.live("a") == []


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────


def test_batches_that_wait_for_a_stuck_table_alone_do_not_count_by_number():
    stream = Stream("db.a", "db.b")
    stream.bounds = BackpressureLimits(2, 100, 3600)
    stream.begin_run()
    stream.unhealthy["db.a"] = IdentityMismatch("cannot go on: it is gone")
    for _ in range(20):
        stream.hand(a=1, b=1)  # never blocks
        stream.round()
    assert len(stream.committer.pending) == 20
    assert stream.committer.queue.over() == ""
    stream.committer.queue.pending.append(PendingBatch(stream.batch(a=1, b=1, bytes=1), 0.0))
    stream.committer.queue.pending.append(PendingBatch(stream.batch(b=1), 0.0))
    assert stream.committer.queue.over() == "2 batches wait for a commit; the bound is 2"


def test_bytes_and_age_hold_the_stream_though_one_table_only_is_stuck():
    stream = Stream("db.a", "db.b")
    stream.bounds = BackpressureLimits(2, 100, 3600)
    stream.begin_run()
    stream.unhealthy["db.a"] = IdentityMismatch("cannot go on: it is gone")
    stream.hand(a=1, b=1, bytes=60)
    stream.round()
    stream.hand(a=1, bytes=60)
    assert stream.committer.queue.over() == "120 staged bytes wait for a commit; the bound is 100"
    stream.bounds = BackpressureLimits(2, 1000, 3600)
    stream.begin_run()
    stream.round()
    assert stream.committer.queue.over() == ""
    stream.clock.now += 3600
    assert stream.committer.queue.over() == "a batch has waited 3600 s; the bound is 3600 s"


def test_a_stuck_table_does_not_hold_those_who_flush_for_ever():
    stream = Stream("db.a", "db.b")
    stream.committer.queue.clock = time
    stream.unhealthy["db.a"] = IdentityMismatch("cannot go on: it is gone")
    stream.committer.start()
    try:
        stream.hand(a=1, b=1)
        answers: list[bool] = []
        waiter = threading.Thread(target=lambda: answers.append(stream.committer.flush()))
        waiter.start()
        waiter.join(10)
        assert answers == [False]
        assert isinstance(stream.committer.stalled(), IdentityMismatch)
    finally:
        stream.committer.close()
    assert stream.live("b") == ["c1-b"]


def test_a_table_that_is_back_soon_is_worth_waiting_for():
    stream = Stream("db.a", "db.b")
    stream.committer.queue.clock = time
    stream.tables["db.a"].faults = list(AWAY)
    stream.committer.start()
    try:
        stream.hand(a=1, b=1)
        assert stream.committer.flush(30)
        assert stream.committer.stalled() is None
    finally:
        stream.committer.close()
    assert stream.indexed == ["c1"]


# ── pace ────────────────────────────────────────────────────────────────────────────────────────


def test_the_most_urgent_table_is_first_and_the_index_last():
    stream = Stream("db.a", "db.b", "db.c", paces={"db.c": CommitTrigger(priority=5)})
    stream.hand(b=1)
    stream.clock.now += 1
    stream.hand(a=1, c=1)
    assert stream.due() == ["db.c", "db.b", "db.a", INDEX]


def test_a_table_gathers_for_its_interval_while_others_go_on_at_theirs():
    stream = Stream("db.a", "db.b", paces={"db.a": CommitTrigger(interval=60)})
    stream.hand(a=1, b=1)
    assert stream.round() == ["db.a", "db.b", INDEX], "the first is not kept waiting"
    for _ in range(5):
        stream.hand(a=1, b=1)
        assert stream.round() == ["db.b"]
        stream.clock.now += 10
    assert 0 < stream.committer.queue.nap() <= 1.0  # type: ignore[operator]
    assert stream.indexed == ["c1"]
    stream.clock.now += 10
    assert stream.round() == ["db.a", INDEX]
    assert len(ledger(stream.tables["db.a"])) == 2
    assert stream.indexed == [f"c{i}" for i in range(1, 7)]


def test_a_batch_that_comes_once_an_interval_does_not_wait_for_the_commit_of_the_one_before():
    stream = Stream("db.a", paces={"db.a": CommitTrigger(interval=60)})
    table = stream.tables["db.a"]
    refresh, took = table.refresh, [0.0]

    def slow() -> None:
        stream.clock.now += took[0]
        refresh()

    table.refresh = slow  # type: ignore[method-assign]
    for _ in range(20):
        took[0] = 1.0
        stream.hand(a=1)
        at = stream.clock.now
        assert stream.round() == ["db.a", INDEX]
        stream.clock.now = at + 60
    assert len(ledger(table)) == 20


def test_a_late_commit_does_not_delay_the_batches_that_come_once_an_interval():
    """The first batch of a run takes long: workers start."""
    stream = Stream("db.a", paces={"db.a": CommitTrigger(interval=60)})
    start = stream.clock.now

    def hand(begun: float, staged: float) -> None:
        stream.clock.now = start + staged
        made = replace(stream.batch(a=1), window_start_ms=int(1000 * begun))
        stream.committer.submit(made)

    hand(begun=0, staged=50)
    assert stream.round() == ["db.a", INDEX]
    hand(begun=60, staged=61)
    assert stream.round() == ["db.a", INDEX]
    hand(begun=119, staged=120)
    assert stream.round() == [], "it gathered for less than the interval"


def test_enough_bytes_or_a_flush_end_the_gathering():
    stream = Stream("db.a", "db.b", paces={"db.a": CommitTrigger(interval=60, bytes=100)})
    stream.hand(a=1)
    stream.round()
    stream.hand(a=1, bytes=60)
    stream.hand(b=1, bytes=60)
    assert stream.round() == ["db.b"]
    stream.hand(a=1, bytes=40)
    assert stream.round() == ["db.a", INDEX]
    stream.hand(a=1)
    assert stream.round() == []
    stream.committer.hurry()
    assert stream.round() == ["db.a", INDEX]


def test_a_bound_ends_the_gathering_too():
    stream = Stream("db.a", paces={"db.a": CommitTrigger(interval=3600)})
    stream.bounds = BackpressureLimits(2, 10**9, 7200)
    stream.begin_run()
    stream.hand(a=1)
    stream.round()
    stream.hand(a=1)
    assert stream.due() == []
    stream.hand(a=1)
    assert stream.due() == ["db.a", INDEX]


def test_more_than_an_entry_can_name_is_committed_in_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("frazil.commit.committer.TOGETHER", 4)
    stream = Stream("db.a", paces={"db.a": CommitTrigger(interval=3600)})
    stream.unhealthy["db.a"] = Unavailable("cannot reach it")
    for _ in range(10):
        stream.hand(a=1)
    stream.round()
    del stream.unhealthy["db.a"]
    stream.clock.now += 10
    while stream.round():
        pass
    assert [len(entry.commit_ids) for entry in ledger(stream.tables["db.a"])] == [4, 4, 2]
    assert [len(entry.commit_ids) for entry in ledger(stream.index)] == [4, 4, 2]
    assert stream.indexed == [f"c{i}" for i in range(1, 11)]


def test_nothing_waits_where_nothing_is_pending(stream: Stream):
    assert (stream.due(), stream.committer.queue.nap()) == ([], None)


def test_a_table_that_is_staged_for_and_not_there_is_named_and_keeps_only_itself_waiting():
    config = Config(
        SinkConfig("s", topics=("t",)),
        Settings({"bootstrap.servers": "x"}),
        (TableConfig("db.t"),),
        DecodeConfig("json"),
        dead_letters=DeadLettersConfig("db.dead"),
    )
    configs = TableConfigs(config, lambda name: name)
    tables = SinkTables(Any, config, configs)  # type: ignore[arg-type]
    with pytest.raises(IdentityMismatch, match=r"db\.gone"):
        tables.target("db.gone")
    assert configs.commit_trigger("db.gone", 5.0).interval == 5.0


def test_a_run_that_was_fenced_does_not_wait_for_a_person():
    """It may have taken batches of the newer one, for tables that it knows nothing of."""
    stream = Stream("db.a")
    old = stream.committer
    stream.unhealthy["db.a"] = IdentityMismatch("cannot commit to table db.a: it does not exist")
    old.submit(stream.batch(a=3))
    old.round(old.queue.due())
    assert "does not exist" in old.progress.trouble
    stream.begin_run()
    with pytest.raises(Fenced, match="this one is epoch 1"):
        old.round(["db.a"])


# ── brokers without topic ids ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("other_topics", "own_topics", "shared"),
    [
        ({"orders": ""}, {"orders": ""}, True),
        ({"orders": ""}, {"users": ""}, False),
        ({"orders": "id-1"}, {"renamed": "id-1"}, True),
        ({"orders": "id-1"}, {"orders": "id-2"}, False),
        ({"orders": "id-1"}, {"orders": ""}, True),
    ],
)
def test_without_topic_ids_two_sinks_of_a_table_are_distinguished_by_topic_names(
    other_topics: dict[str, str], own_topics: dict[str, str], shared: bool
):
    cut = Cut({Partition("orders", 0): 5})
    other = LedgerEntry("other", 1, ("c",), (0, 0), cut, cut, topics=other_topics)
    snapshot = Snapshot(1, None, 1, 1, "append", other.summary())
    table: Any = SimpleNamespace(
        name="db.t",
        tags=lambda: {"frazil/other": 1},
        tagged=lambda _: snapshot,
        history=lambda _: [snapshot],
    )
    held: Any = SimpleNamespace(
        config=SimpleNamespace(branch="main"), table=table, target=SimpleNamespace(table=table)
    )
    sink = SimpleNamespace(id="s", allow_shared_topics=False)
    tables: Any = SimpleNamespace(_config=SimpleNamespace(sink=sink))
    if shared:
        with pytest.raises(ConfigError, match="sink other also fills it from"):
            SinkTables.refuse_shared(tables, held, own_topics)
    else:
        SinkTables.refuse_shared(tables, held, own_topics)
