"""What a new life takes of what others staged."""

from __future__ import annotations

import pytest

from frazil.core.errors import Fenced
from frazil.core.offsets import Cut
from frazil.life import Life, _contradicted
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
    life = object.__new__(Life)
    life.target = target(table)
    life.target.claim()
    target(table, epoch=2).claim()
    with pytest.raises(Fenced, match="newer life"):
        life.recover()
