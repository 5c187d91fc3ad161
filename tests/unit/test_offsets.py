from __future__ import annotations

import pytest

from frazil.errors import ConfigError, Gap, Overlap
from frazil.offsets import Cut, Partition, Range, join

A, B = Partition("a", 0), Partition("b", 3)


def test_a_range_is_half_open_and_refuses_to_be_backwards():
    assert len(Range(A, 3, 3)) == 0
    assert len(Range(A, 3, 7)) == 4
    with pytest.raises(ConfigError, match=r"found \[4, 3\)"):
        Range(A, 4, 3)


def test_pieces_cover_a_range_exactly_and_none_is_over_the_size():
    pieces = list(Range(A, 10, 1000).pieces(300))
    assert join(pieces) == [Range(A, 10, 1000)]
    assert max(map(len, pieces)) <= 300
    assert list(Range(A, 5, 5).pieces(10)) == [Range(A, 5, 5)]


def test_touching_ranges_join_and_a_hole_stays_visible():
    assert join([Range(A, 5, 9), Range(A, 0, 5), Range(B, 1, 2)]) == [
        Range(A, 0, 9),
        Range(B, 1, 2),
    ]
    assert join([Range(A, 0, 5), Range(A, 6, 9)]) == [Range(A, 0, 5), Range(A, 6, 9)]


def test_overlapping_ranges_cannot_be_joined():
    with pytest.raises(Overlap, match=r"a\[0\] \[0, 6\) and a\[0\] \[5, 9\)"):
        join([Range(A, 0, 6), Range(A, 5, 9)])


def test_a_cut_continues_only_at_its_own_offsets():
    cut = Cut({A: 5})
    assert cut.after([Range(A, 5, 9)]) == Cut({A: 9})
    with pytest.raises(Gap, match=r"missing a\[0\] \[5, 7\)"):
        cut.after([Range(A, 7, 9)])
    with pytest.raises(Overlap, match=r"\[3, 5\) would be written twice"):
        cut.after([Range(A, 3, 9)])


def test_a_partition_that_is_new_begins_where_its_first_range_begins():
    assert Cut({A: 5}).after([Range(B, 40, 41)]) == Cut({A: 5, B: 41})


def test_a_cut_survives_json_and_knows_what_it_reaches():
    cut = Cut({A: 5, B: 7})
    assert Cut.of(cut.nested()) == cut
    assert hash(Cut.of(cut.nested())) == hash(cut)
    assert cut.reaches({A: 5})
    assert not cut.reaches({A: 6})
    assert cut.continues({A: 5})
    assert not cut.continues({A: 4})
