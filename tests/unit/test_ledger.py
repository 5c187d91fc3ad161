from __future__ import annotations

import random
from dataclasses import replace

import pytest

from frazil.core.errors import Fatal
from frazil.core.offsets import Cut, Partition
from frazil.table import ledger
from frazil.table.ledger import Counts, Entry, Snapshot

P = Partition("orders", 0)


def entry(begin: int, end: int, commit_id: str, **more: object) -> Entry:
    base = Entry(
        "s", 1, (commit_id,), (0, 0), Cut({P: begin}), Cut({P: end}), topics={"orders": "t"}
    )
    return replace(base, **more)  # type: ignore[arg-type]


def snapshot(number: int, parent: int | None, summary: dict[str, str]) -> Snapshot:
    return Snapshot(number, parent, number, number, "append", summary)


def test_an_entry_survives_the_summary():
    full = entry(
        3, 9, "c1", unwritten={P: Counts(0, 1, 0, 2)}, cluster="k", schema_id=4, watermark=(5, 6),
        tables={"db.t": "u"}, commit_ids=("c0", "c1"), batches=(7, 9),
    )  # fmt: skip
    assert ledger.parse(full.summary()) == full
    assert full.total == Counts(written=3, rejected=1, skipped=0, invisible=2)


def test_a_foreign_summary_is_no_entry_and_a_newer_format_is_refused():
    assert ledger.parse({"added-records": "3"}) is None
    with pytest.raises(Fatal, match="expected format version 1, found 2"):
        ledger.parse({**entry(0, 1, "c").summary(), "frazil.version": "2"})


def test_a_broken_entry_stops_instead_of_being_passed_over():
    with pytest.raises(Fatal, match="cannot read a ledger entry of sink s"):
        ledger.parse({**entry(0, 1, "c").summary(), "frazil.ranges": "{"})


def test_the_two_cuts_of_an_entry_name_the_same_partitions():
    with pytest.raises(Fatal, match="different partitions"):
        Entry("s", 1, ("c",), (0, 0), Cut(), Cut({P: 1}))


def test_an_entry_of_a_thousand_partitions_stays_within_four_kib():
    """Balanced topic, transactions on: 1,000 partitions with markers in each."""
    dice = random.Random(7)
    parts = [Partition("orders", i) for i in range(1000)]
    begin = {p: 3_000_000_000 + dice.randrange(8_000) for p in parts}
    big = Entry(
        "a-sink-with-a-name", 12, ("0" * 36,), (1234, 1234), Cut(begin),
        Cut({p: begin[p] + 2_000 + dice.randrange(100) for p in parts}),
        {p: Counts(0, 0, 0, dice.randrange(3)) for p in parts},
        {"orders": "x" * 22}, "y" * 22, 3, (1_790_000_000_000_000, 1_790_000_060_000_000),
    )  # fmt: skip
    summary = big.summary()
    assert ledger.parse(summary) == big
    assert sum(len(key) + len(value) for key, value in summary.items()) <= 4096


def test_packed_vectors_of_any_size_come_back_as_they_were():
    dice = random.Random(3)
    for _ in range(50):
        parts = [
            Partition(f"t{i % 3}", dice.randrange(10_000)) for i in range(dice.randrange(1, 300))
        ]
        vectors = {p: (dice.randrange(2**40), dice.randrange(2**40)) for p in set(parts)}
        assert ledger._decode(ledger._encode(vectors)) == vectors


def test_the_newest_entry_of_the_sink_counts_and_foreign_commits_are_passed_over():
    other = replace(entry(0, 99, "x"), sink="other")
    history = [
        snapshot(4, 3, {}),
        snapshot(3, 2, other.summary()),
        snapshot(2, 1, entry(3, 9, "new").summary()),
        snapshot(1, None, entry(0, 3, "old").summary()),
    ]
    head = ledger.head(history, "s")
    assert head.commit_id == "new"
    assert head.snapshot is not None
    assert head.snapshot.id == 2


def test_no_entry_in_a_whole_history_means_never_committed():
    assert ledger.head([snapshot(1, None, {})], "s").complete
    assert ledger.head([], "s").complete


def test_no_entry_in_an_expired_history_means_nothing_without_the_witness():
    expired = [snapshot(9, 8, {})]
    assert not ledger.head(expired, "s").complete
    witness = snapshot(5, 4, entry(0, 3, "seen").summary())
    head = ledger.head(expired, "s", witness)
    assert head.complete
    assert head.commit_id == "seen"


def test_a_witness_that_the_branch_was_moved_away_from_does_not_count():
    """Newer than what is left of the branch: it cannot be an ancestor."""
    witness = snapshot(12, 11, entry(0, 3, "gone").summary())
    assert not ledger.head([snapshot(9, 8, {})], "s", witness).complete
