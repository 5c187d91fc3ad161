"""What a new life takes of what others staged."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from frazil.commit.recovery import Recovery, _contradicted
from frazil.commit.startup import Startup
from frazil.errors import Expired, Fenced, Gap
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut
from tests.fakes import FakeTable
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
    """An overtaken life stages them once more, and somebody emptied the folder in between."""
    table = FakeTable()
    life = target(table)
    for each in (batch(0, 5, "a"), batch(5, 9, "b"), batch(9, 12, "c")):
        put(life, each)
    after = {"db.t": life.entries_after(Cut({P: 5})), "db.empty": []}
    assert [entry.commit_ids for entry, _ in after["db.t"]] == [("b",), ("c",)]
    assert _contradicted(staged, after) is contradicted


def test_nobody_goes_on_from_the_position_of_a_newer_life():
    """A table may have been rolled back to this life's own claim: nothing would fence it there."""
    table = FakeTable("db.i")
    life = object.__new__(Recovery)
    life._target = target(table)
    life._target.claim()
    target(table, epoch=2).claim()
    with pytest.raises(Fenced, match="newer run"):
        life.recover()


@pytest.mark.parametrize(("stale", "put_back"), [(0, False), (3, False), (99, True)])
def test_a_stale_read_of_a_table_is_not_taken_for_one_that_was_put_back(
    monkeypatch: pytest.MonkeyPatch, stale: int, put_back: bool
):
    """The catalog answers with the table as it was before batch `b`, whose rows the index has."""
    table = FakeTable()
    states = []
    writer = target(table)
    for each in (batch(0, 5, "a"), batch(5, 9, "b")):
        put(writer, each)
        states.append(dict(table.refs))
    reads = iter(range(stale))

    def refresh() -> None:
        table.refs = states[next(reads, None) is None]

    monkeypatch.setattr(table, "refresh", refresh)
    life = object.__new__(Startup)
    life._alone, life._told = False, {"db.t": {P: (0, 9)}}
    error = life._mismatch(target(table))
    assert isinstance(error, Gap) == put_back
    assert error is None or f"{P} [5, 9)" in str(error)


def test_what_is_staged_counts_up_to_the_first_batch_whose_files_are_gone():
    """Unless the table has it: what was committed may have been compacted since."""
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    table.deleted = ["m-a", "m-c"]
    life = object.__new__(Recovery)
    life.tables = {"db.t": SimpleNamespace(target=target(table))}  # type: ignore[assignment]
    staged = [batch(5 * n, 5 * n + 5, name) for n, name in enumerate("abcd")]
    after = {"db.t": target(table).entries_after(Cut())}
    assert life._whole(staged, after, set()) == (staged[:2], ["m-c"])
    assert life._whole(staged, after, {"c"}) == (staged, [])
    assert life._whole(staged, {}, set()) == (staged, []), "of a table that is amiss: it waits"


def _starting(index_rows: int = 0, made: bool = False, alone: bool = False) -> Startup:
    """A start whose index has so many rows of its sink."""
    life = object.__new__(Startup)
    rows = SimpleNamespace(num_rows=index_rows)
    plain = SimpleNamespace(rows=lambda *_: rows)
    life.index = SimpleNamespace(name="db.i", made=made, plain=plain)  # type: ignore[assignment]
    table, sink = SimpleNamespace(name="db.t"), SimpleNamespace(id="s")
    life._config = SimpleNamespace(  # type: ignore[assignment]
        sink=sink, index_table="db.i", tables=(table,)
    )
    life._alone = alone
    return life


def _holding(table: FakeTable) -> SimpleNamespace:
    return SimpleNamespace(target=target(table, epoch=9), table=table)


@pytest.mark.parametrize(
    ("rows", "made", "number", "refused"),
    [
        (3, False, -1, True),
        (0, False, -1, False),  # a sink that has committed nothing yet
        (3, True, -1, False),  # the index was made a moment ago, and another life was quicker
        (3, False, 0, False),  # the ledger has batches
    ],
)
def test_an_index_with_rows_of_the_sink_and_no_ledger_is_refused(rows, made, number, refused):
    life = _starting(rows, made)
    claimed = LedgerEntry("s", 2, ("c",), (number, number), Cut(), Cut())
    assert life._refuse_a_forgotten_ledger(None) is None
    with pytest.raises(Expired, match="its ledger") if refused else nullcontext():
        life._refuse_a_forgotten_ledger(claimed)


def test_a_table_that_the_sink_filled_and_the_index_does_not_know_is_refused():
    table = FakeTable()
    life = _starting()
    life.refuse_unknown(_holding(table))  # type: ignore[arg-type]
    earlier = target(table)
    earlier.claim(lambda _: Cut({P: 0}))
    life.refuse_unknown(_holding(table))  # type: ignore[arg-type]
    put(earlier, batch(0, 5, "a"))
    with pytest.raises(Gap, match=r"table db\.t holds what sink s wrote before"):
        life.refuse_unknown(_holding(table))  # type: ignore[arg-type]


def test_before_an_index_is_made_anew_every_table_is_asked_unless_there_is_one_alone():
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    for alone in (True, False):
        life = _starting(alone=alone)
        life.tables = SimpleNamespace(held={"db.t": _holding(table)})  # type: ignore[assignment]
        with nullcontext() if alone else pytest.raises(Gap, match="knows nothing"):
            life._refuse_a_lost_index()


@pytest.mark.parametrize(("begins", "lost"), [(0, False), (5, False), (6, True)])
def test_one_table_that_ends_before_kafka_begins_is_refused_though_no_record_comes(begins, lost):
    """The index was lost and made anew, the table put back to older metadata, and Kafka has deleted
    what lies between."""
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    held = _holding(table)
    held.target.claim()
    life = object.__new__(Recovery)
    life._config = _starting(alone=True)._config
    life.tables = SimpleNamespace(held={"db.t": held})  # type: ignore[assignment]
    expected = pytest.raises(Gap, match=rf"neither has: {re.escape(str(P))} \[5, 6\)")
    with expected if lost else nullcontext():
        life.check_table({}, Cut({P: begins}))
