from __future__ import annotations

import pytest

from frazil.accounting import RangeCounts
from frazil.ledger import staged_batch
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range

P = Partition("orders", 0)


def batch(**more: object) -> StagedBatch:
    tally = RangeCounts(Range(P, 0, 10), 7, rejected=1, invisible=2, seen=(0, 8), watermark=(5, 9))
    table = StagedTable("db.t", "u", 3, ("bWFuaWZlc3Q=",), ("/m.avro",), 1, 99, (tally,))
    values: dict[str, object] = {
        "sink": "s",
        "epoch": 2,
        "number": 5,
        "commit_id": "c",
        "begin": Cut({P: 0}),
        "end": Cut({P: 10}),
        "topics": {"orders": "id"},
        "cluster": "k",
        "staged_at_ms": 1,
        "window_start_ms": 2,
        "tables": (table,),
    }
    return StagedBatch(**{**values, **more})  # type: ignore[arg-type]


def test_a_batch_record_comes_back_as_it_was():
    assert staged_batch.load(staged_batch.dump(batch())) == batch()


@pytest.mark.parametrize("cut", [0, 1, 30, 64, 65, 100, -2])
def test_a_torn_record_does_not_count_as_staged(cut: int):
    assert staged_batch.load(staged_batch.dump(batch())[:cut]) is None


def test_an_altered_record_does_not_count_as_staged():
    assert staged_batch.load(staged_batch.dump(batch()).replace(b'"epoch":2', b'"epoch":3')) is None


def test_tallies_of_neighbours_add_up():
    one = RangeCounts(Range(P, 0, 4), 3, invisible=1, seen=(0, 2), watermark=(7, 9))
    two = RangeCounts(Range(P, 4, 6), 2, seen=(4, 5), watermark=(1, 8))
    both = one + two
    assert both == RangeCounts(Range(P, 0, 6), 5, invisible=1, seen=(0, 5), watermark=(1, 9))
    assert both.balanced
    assert not RangeCounts(Range(P, 0, 6), 5).balanced
