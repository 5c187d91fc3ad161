"""What a new life takes of what others staged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from frazil.errors import Fenced, Gap
from frazil.offsets import Cut
from frazil.startup import Startup, _contradicted
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
    life = object.__new__(Startup)
    life.target = target(table)
    life.target.claim()
    target(table, epoch=2).claim()
    with pytest.raises(Fenced, match="newer life"):
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
    error = life._astray(target(table))
    assert isinstance(error, Gap) == put_back
    assert error is None or f"{P} [5, 9)" in str(error)


def test_what_is_staged_counts_up_to_the_first_batch_whose_files_are_gone():
    """Unless the table has it: what was committed may have been compacted since."""
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    table.deleted = ["m-a", "m-c"]
    life = object.__new__(Startup)
    life.tables = {"db.t": SimpleNamespace(target=target(table))}  # type: ignore[assignment]
    staged = [batch(5 * n, 5 * n + 5, name) for n, name in enumerate("abcd")]
    after = {"db.t": target(table).entries_after(Cut())}
    assert life._whole(staged, after, set()) == (staged[:2], ["m-c"])
    assert life._whole(staged, after, {"c"}) == (staged, [])
    assert life._whole(staged, {}, set()) == (staged, []), "of a table that is amiss: it waits"
