"""The start of a run: which staged batches it recovers, and which tables it refuses."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from frazil.commit.protocol import TableCommitter
from frazil.commit.recovery import Recovery, _contradicts
from frazil.commit.startup import Startup
from frazil.commit.tables import second_handle
from frazil.errors import (
    CommitStateUnknown,
    Conflict,
    Expired,
    Fenced,
    Gap,
    IdentityMismatch,
    Unavailable,
)
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut
from tests.fakes import FakeClock, FakeTable
from tests.unit.test_commit import P, batch, put, target


@pytest.mark.parametrize(
    ("staged", "contradicted"),
    [
        (batch(5, 9, "b"), False),  # it is there
        (batch(5, 9, "z"), True),
        (batch(7, 20, "z"), True),  # a part of it
        (batch(0, 5, "a"), False),  # before the oldest entry: expired, or it would be among them
        (batch(12, 15, "d"), False),
    ],
)
def test_a_batch_whose_records_a_table_has_with_another_is_read_again(staged, contradicted):
    """A fenced run stages them once more, and somebody emptied the folder in between."""
    table = FakeTable()
    committer = target(table)
    for committed in (batch(0, 5, "a"), batch(5, 9, "b"), batch(9, 12, "c")):
        put(committer, committed)
    after = {"db.t": committer.entries_after(Cut({P: 5})), "db.empty": []}
    assert [entry.commit_ids for entry, _ in after["db.t"]] == [("b",), ("c",)]
    assert _contradicts(staged, after) is contradicted


def test_no_run_continues_from_the_position_of_a_newer_run():
    """A table may have been rolled back to this run's own claim: nothing would fence it there."""
    table = FakeTable("db.i")
    recovery = object.__new__(Recovery)
    recovery._target = target(table)
    recovery._target.claim()
    target(table, epoch=2).claim()
    with pytest.raises(Fenced, match="newer run"):
        recovery.recover()


@pytest.mark.parametrize(("stale", "put_back"), [(0, False), (3, False), (99, True)])
def test_a_stale_read_of_a_table_is_not_taken_for_one_that_was_put_back(
    monkeypatch: pytest.MonkeyPatch, stale: int, put_back: bool
):
    """The catalog answers with the table as it was before batch `b`, whose rows the index has."""
    table = FakeTable()
    states = []
    writer = target(table)
    for committed in (batch(0, 5, "a"), batch(5, 9, "b")):
        put(writer, committed)
        states.append(dict(table.refs))
    reads = iter(range(stale))

    def refresh() -> None:
        table.refs = states[next(reads, None) is None]

    monkeypatch.setattr(table, "refresh", refresh)
    startup = object.__new__(Startup)
    startup._alone, startup._index_ends = False, {"db.t": {P: (0, 9)}}
    error = startup._mismatch(target(table))
    assert isinstance(error, Gap) == put_back
    assert error is None or f"{P} [5, 9)" in str(error)


def test_what_is_staged_counts_up_to_the_first_batch_whose_files_are_gone():
    """Unless the table has it: what was committed may have been compacted since."""
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    table.deleted = ["m-a", "m-c"]
    recovery = object.__new__(Recovery)
    recovery.tables = {"db.t": SimpleNamespace(target=target(table))}  # type: ignore[assignment]
    staged = [batch(5 * n, 5 * n + 5, name) for n, name in enumerate("abcd")]
    after = {"db.t": target(table).entries_after(Cut())}
    assert recovery._with_files(staged, after, set()) == (staged[:2], ["m-c"])
    assert recovery._with_files(staged, after, {"c"}) == (staged, [])
    assert recovery._with_files(staged, {}, set()) == (staged, []), (
        "of an unhealthy table: it waits"
    )


@pytest.mark.parametrize(
    ("floor", "held", "unhealthy", "used"),
    [
        (5, True, False, True),
        (6, True, False, False),  # the table was restored to an older state
        (5, False, False, False),  # it is gone, and the index never knew it
        (6, True, True, True),  # it waits for an operator, and so does the batch
        (0, False, False, True),  # no table had any of it
    ],
)
def test_a_batch_that_leaves_out_what_a_table_has_is_used_while_the_table_has_it(
    floor, held, unhealthy, used
):
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    recovery = object.__new__(Recovery)
    recovery.tables = Mock(
        held={"db.t": None} if held else {}, unhealthy={"db.t": Gap("")} if unhealthy else {}
    )
    recovery.tables.__getitem__ = lambda *_: SimpleNamespace(target=target(table))
    staged = replace(batch(5, 9, "b"), already_written={"db.t": Cut({P: floor})} if floor else {})
    assert recovery._with_records([staged]) == [staged] * used


def _starting(index_rows: int = 0, made: bool = False, alone: bool = False) -> Startup:
    """A start whose index has so many rows of its sink."""
    startup = object.__new__(Startup)
    rows = SimpleNamespace(num_rows=index_rows)
    plain = SimpleNamespace(rows=lambda *_: rows)
    startup.index = SimpleNamespace(name="db.i", made=made, readonly=plain)  # type: ignore[assignment]
    table, sink = SimpleNamespace(name="db.t"), SimpleNamespace(id="s")
    startup._config = SimpleNamespace(  # type: ignore[assignment]
        sink=sink, index_table="db.i", tables=(table,)
    )
    startup._alone = alone
    return startup


def _holding(table: FakeTable) -> SimpleNamespace:
    return SimpleNamespace(target=target(table, epoch=9), table=table)


@pytest.mark.parametrize(
    ("rows", "made", "number", "refused"),
    [
        (3, False, -1, True),
        (0, False, -1, False),  # a sink that has committed nothing yet
        (3, True, -1, False),  # the index was made a moment ago, and another run was quicker
        (3, False, 0, False),  # the ledger has batches
    ],
)
def test_an_index_with_rows_of_the_sink_and_no_ledger_is_refused(rows, made, number, refused):
    startup = _starting(rows, made)
    claimed = LedgerEntry("s", 2, ("c",), (number, number), Cut(), Cut())
    with pytest.raises(Expired, match="its ledger") if refused else nullcontext():
        startup._refuse_a_forgotten_ledger(claimed)
    with pytest.raises(Expired, match="its ledger") if rows and not made else nullcontext():
        startup._refuse_a_forgotten_ledger(None)  # before the claim


def test_a_table_that_the_sink_filled_and_the_index_does_not_know_is_refused():
    table = FakeTable()
    startup = _starting()
    startup.refuse_unknown(_holding(table))  # type: ignore[arg-type]
    earlier = target(table)
    earlier.claim(lambda _: Cut({P: 0}))
    startup.refuse_unknown(_holding(table))  # type: ignore[arg-type]
    put(earlier, batch(0, 5, "a"))
    with pytest.raises(Gap, match=r"table db\.t has rows of sink s"):
        startup.refuse_unknown(_holding(table))  # type: ignore[arg-type]


def test_before_an_index_is_created_again_every_table_is_asked_unless_there_is_only_one():
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    for alone in (True, False):
        startup = _starting(alone=alone)
        startup.tables = SimpleNamespace(held={"db.t": _holding(table)})  # type: ignore[assignment]
        with nullcontext() if alone else pytest.raises(Gap, match="has no entry of the sink"):
            startup._refuse_a_lost_index()


@pytest.mark.parametrize("alone", [True, False])
def test_a_table_that_says_the_sink_fills_it_and_has_no_entry_is_refused(alone):
    """Index, tag and entries are gone: what is left is the property."""
    table = FakeTable()
    earlier = target(table)
    put(earlier, batch(0, 5, "a"))
    earlier.set_filled("db.i")
    startup = _starting(alone=alone)
    startup.tables = SimpleNamespace(held={"db.t": _holding(table)})  # type: ignore[assignment]
    table.refs.pop("frazil/s", None)
    table.add(["somebody's"], {})
    table.expire()
    with pytest.raises(Expired, match="their position is unknown"):
        startup._refuse_a_lost_index()
    late = TableCommitter(table, "main", "s", 2, FakeClock(), claimed_first=True)
    assert not late.head().complete, "nor is it taken for new where the index is there"
    table.properties = {}
    startup._refuse_a_lost_index()
    assert late.head().complete


@pytest.mark.parametrize("error", [Unavailable, CommitStateUnknown, Conflict])
def test_the_property_of_a_filled_table_is_written_once_whatever_the_catalog_answers(error):
    table, calls = FakeTable(), []

    def set_property(key: str, value: str) -> None:
        calls.append(key)
        if len(calls) > 1:  # the answer of the second try is lost
            table.properties = {key: value}
        raise error("cannot set a property: 503")

    table.set_property = set_property  # type: ignore[method-assign]
    target(table).set_filled("db.i")
    assert table.properties == {"frazil.filled-by.s": "db.i"}
    assert len(calls) == 2
    table.properties, table.set_property = {}, Mock(side_effect=error("503"))  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"frazil\.filled-by\.s of table db\.t"):
        target(table).set_filled("db.i")


@pytest.mark.parametrize(
    ("new_uuid", "fact"), [(None, "was dropped while"), ("b", "was dropped and recreated")]
)
def test_a_table_that_is_replaced_between_two_loads_is_not_opened(new_uuid, fact):
    first = SimpleNamespace(name="db.t", uuid="a")
    again = new_uuid and SimpleNamespace(name="db.t", uuid=new_uuid)
    with pytest.raises(IdentityMismatch, match=fact):
        second_handle(SimpleNamespace(load=lambda _: again), first)  # type: ignore[arg-type]
    assert second_handle(SimpleNamespace(load=lambda _: first), first) is first  # type: ignore[arg-type]


@pytest.mark.parametrize(("begins", "lost"), [(0, False), (5, False), (6, True)])
def test_one_table_that_ends_before_kafka_begins_is_refused_though_no_record_comes(begins, lost):
    """The index was lost and made anew, the table put back to older metadata, and Kafka has deleted
    what lies between."""
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    held = _holding(table)
    held.target.claim()
    recovery = object.__new__(Recovery)
    recovery._config = _starting(alone=True)._config
    recovery.tables = SimpleNamespace(held={"db.t": held})  # type: ignore[assignment]
    expected = pytest.raises(Gap, match=rf"both lack {re.escape(str(P))} \[5, 6\)")
    with expected if lost else nullcontext():
        recovery.check_table({}, Cut({P: begins}))
