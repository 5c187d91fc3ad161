"""The protocol's rules on a table in memory; each test says what must never happen."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from frazil.accounting import RangeCounts
from frazil.commit.batch_chain import chain, entry_of, preceding
from frazil.commit.commit_queue import INDEX, BackpressureLimits, PendingBatch
from frazil.commit.committer import Committer, Progress
from frazil.commit.protocol import ATTEMPTS, TableCommitter
from frazil.errors import (
    CommitStateUnknown,
    Expired,
    Fenced,
    Gap,
    IdentityMismatch,
    Overlap,
    Unavailable,
)
from frazil.ledger import entry as ledger
from frazil.ledger.entry import parse
from frazil.ledger.index import rebuilt
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.ledger.tags import ledger_tag
from frazil.offsets import BATCHES, Cut, Partition, Range
from tests.commit_events import Events
from tests.fakes import FakeClock, FakeTable

P = Partition("orders", 0)


def batch(begin: int, end: int, commit_id: str, number: int = 0, epoch: int = 1) -> StagedBatch:
    tally = RangeCounts(Range(P, begin, end), end - begin)
    table = StagedTable("db.t", "uuid-1", 0, (f"m-{commit_id}",), (), 1, 10, (tally,))
    return StagedBatch(
        "s", epoch, number, commit_id, Cut({P: begin}), Cut({P: end}), {}, "", 0, 0, (table,)
    )


def target(table: FakeTable, epoch: int = 1) -> TableCommitter:
    return TableCommitter(table, "main", "s", epoch, FakeClock())


def put(where: TableCommitter, one: StagedBatch) -> None:
    where.commit(one.table("db.t").manifests, entry_of([one], "db.t", where.epoch))


def test_batches_are_committed_once_and_in_order():
    table = FakeTable()
    committer = target(table)
    put(committer, batch(0, 5, "a"))
    put(committer, batch(5, 9, "b"))
    assert table.live() == ["m-a", "m-b"]


def test_entries_with_records_take_the_tag_along_and_claims_leave_it_where_it_is():
    """A run holds its branch against the tag after its claim: a rollback would not be seen."""
    table = FakeTable()
    tags: list[str] = []
    append = table.append

    def seen(*given: Any, tag: str, **more: Any) -> None:
        tags.append(tag)
        append(*given, **more)

    table.append = seen  # type: ignore[method-assign]
    committer = target(table)
    committer.claim()
    put(committer, batch(0, 5, "a"))
    assert tags == ["", "frazil/s"]


def test_what_a_merging_commit_has_no_use_for_is_removed_and_what_it_has_is_not():
    table = FakeTable()
    merged, kept = "/t/metadata/staged-m0.avro", "/t/metadata/merged-m1.avro"
    append = table.append

    def merging(*given: Any, leftovers: list[str], **more: Any) -> None:
        append(*given, leftovers=leftovers, **more)
        leftovers += [merged, kept]

    table.append = merging  # type: ignore[method-assign]

    class Asked(dict[int, list[str]]):
        def __call__(self, _: int) -> set[str]:
            return {kept}

    table.manifests = Asked()
    put(target(table), batch(0, 5, "a"))
    assert table.deleted == [merged]


@pytest.mark.parametrize(
    ("left", "live", "removed"),
    [
        ("s3a://b/t/metadata/snap-1.avro", "s3://b/t/metadata/snap-1.avro", False),
        ("file:/t/metadata/m0.avro", "/t/metadata/m0.avro", False),
        ("gs://b/t/metadata/snap-1.avro", "s3://b/t/metadata/snap-1.avro", False),  # who can tell
        ("s3a://b/t/metadata/snap-2.avro", "s3://b/t/metadata/snap-1.avro", True),
    ],
)
def test_what_is_live_under_another_spelling_is_not_swept(left: str, live: str, removed: bool):
    """A catalog may spell anew what it is given."""
    table = FakeTable()
    append = table.append

    def leaving(*given: Any, leftovers: list[str], **more: Any) -> None:
        append(*given, leftovers=leftovers, **more)
        newest = next(table.history("main"))
        table.snapshots[newest.id] = replace(newest, manifest_list=live)
        leftovers.append(left)

    table.append = leaving  # type: ignore[method-assign]

    class Asked(dict[int, list[str]]):
        def __call__(self, _: int) -> set[str]:
            return {live}

    table.manifests = Asked()
    put(target(table), batch(0, 5, "a"))
    assert table.deleted == ([left] if removed else [])


def test_a_lost_answer_is_found_again_and_nothing_is_added_twice():
    """H1, H2: the commit was applied, the client saw an error."""
    table = FakeTable()
    committer = target(table)
    table.faults = ["lost"]
    put(committer, batch(0, 5, "a"))
    put(committer, batch(5, 9, "b"))
    assert table.live() == ["m-a", "m-b"]


def test_a_dropped_request_is_tried_again_with_the_same_files():
    table = FakeTable()
    table.faults = ["dropped", "dropped"]
    put(target(table), batch(0, 5, "a"))
    assert table.live() == ["m-a"]


def test_a_catalog_that_stays_away_is_for_later_and_leaves_the_batch_alone():
    table = FakeTable()
    table.faults = ["dropped"] * ATTEMPTS
    committer = target(table)
    with pytest.raises(Unavailable, match="in 6 tries"):
        put(committer, batch(0, 5, "a"))
    assert table.live() == []
    put(committer, batch(0, 5, "a"))
    assert table.live() == ["m-a"]


def test_a_foreign_commit_in_between_survives_and_does_not_disturb():
    table = FakeTable()
    committer = target(table)
    table.race = lambda: table.add(["foreign"], {})
    table.faults = ["race"]
    put(committer, batch(0, 5, "a"))
    assert table.live() == ["foreign", "m-a"]


def test_check_then_commit_would_double_but_compare_and_set_does_not():
    """H3: two runs both saw nothing; the second one's append must not get in."""
    table = FakeTable()
    zombie, heir = target(table, 1), target(table, 2)
    table.race = lambda: put(heir, batch(0, 5, "heir", epoch=2))
    table.faults = ["race"]
    with pytest.raises(Fenced, match="this one is epoch 1, the table is at epoch 2"):
        put(zombie, batch(0, 5, "zombie"))
    assert table.live() == ["m-heir"]


def test_what_failed_tries_left_is_swept_but_never_the_live_manifest_list():
    table = FakeTable()
    committer = target(table)
    other = target(table)
    table.race = lambda: put(other, batch(0, 5, "a"))  # the same batch, by a lost first try
    table.faults = ["race"]
    append = table.append

    def as_iceberg_does(*args: Any, leftovers: list[str], **more: Any) -> None:
        """H1: what it takes for a failure it cleans up, the list of the applied try included."""
        try:
            append(*args, leftovers=leftovers, **more)
        except CommitStateUnknown:
            leftovers.append(next(table.history("main")).manifest_list)
            raise

    table.append = as_iceberg_does  # type: ignore[method-assign]
    put(committer, batch(0, 5, "a"))
    assert table.live() == ["m-a"]
    live = next(table.history("main")).manifest_list
    assert table.deleted
    assert live not in table.deleted


def fail_to_tag(table: FakeTable, *answers: str) -> list[int]:
    """The next moves of a tag: `lost` is done without an answer, `dropped` is not done."""
    tag, left, tries = table.tag, list(answers), []

    def failing(name: str, snapshot_id: int, was: int | None) -> None:
        tries.append(snapshot_id)
        answer = left.pop(0) if left else ""
        if answer != "dropped":
            tag(name, snapshot_id, was)
        if answer:
            raise Unavailable("cannot move tag: 503")

    table.tag = failing  # type: ignore[method-assign]
    return tries


@pytest.mark.parametrize(("answers", "tries"), [(["lost"], 1), (["dropped", "dropped"], 3)])
def test_a_tag_whose_answer_was_lost_is_read_back_and_a_missing_one_is_set_again(
    answers: list[str], tries: int
):
    table = FakeTable()
    committer = target(table)
    put(committer, batch(0, 5, "a"))
    made = fail_to_tag(table, *answers)
    newest = next(table.history("main"))
    committer.set_tag(newest)
    assert made == [newest.id] * tries
    assert table.tagged(ledger_tag("s")) == newest


def test_a_claim_fences_the_older_run():
    table = FakeTable()
    old = target(table, 1)
    put(old, batch(0, 5, "a"))
    heir = target(table, 2)
    heir.claim()
    with pytest.raises(Fenced):
        put(old, batch(5, 9, "b"))
    put(heir, batch(5, 8, "c"))
    assert table.live() == ["m-a", "m-c"]


def test_a_run_checks_that_it_is_still_the_newest():
    table, committer = claimed_table()
    put(committer, batch(0, 5, "a"))
    for who in (committer, target(table, epoch=0)):  # who only looks is not overtaken
        entry = who.still_newest()
        assert entry is not None
        assert entry.commit_ids == ("a",)
    target(table, epoch=2).claim()
    with pytest.raises(Fenced, match="epoch 1, the table is at epoch 2"):
        committer.still_newest()


def test_of_two_claims_at_once_one_wins():
    table = FakeTable()
    first, second = target(table, 1), target(table, 1)
    table.race = lambda: first.claim()  # type: ignore[func-returns-value]
    table.faults = ["race"]
    with pytest.raises(Fenced):
        second.claim()
    put(first, batch(0, 5, "a"))
    assert table.live() == ["m-a"]


def test_an_older_run_that_commits_during_the_claim_is_taken_into_account():
    table = FakeTable()
    old, heir = target(table, 1), target(table, 2)
    table.race = lambda: put(old, batch(0, 5, "a"))
    table.faults = ["race"]
    head = heir.claim()
    assert head.entry is not None
    assert head.entry.end == Cut({P: 5})


def test_a_gap_and_an_overlap_are_refused_with_both_ranges():
    table = FakeTable()
    committer = target(table)
    put(committer, batch(0, 5, "a"))
    with pytest.raises(Gap, match=r"orders\[0\] \[7, 9\).*ledger ends at orders\[0\]@5"):
        put(committer, batch(7, 9, "b"))
    with pytest.raises(Overlap):
        put(committer, batch(3, 9, "c"))
    assert table.live() == ["m-a"]


def test_a_rolled_back_table_stops_the_sink():
    table = FakeTable()
    committer = target(table)
    put(committer, batch(0, 5, "a"))
    before = table.refs["main"]
    put(committer, batch(5, 9, "b"))
    table.refs["main"] = before
    with pytest.raises((Gap, Overlap), match="expected b as the newest entry, found a"):
        put(committer, batch(9, 12, "c"))


def test_expiry_without_a_tag_stops_and_with_one_goes_on():
    """H4: not found is not never committed."""
    table = FakeTable()
    committer = target(table)
    put(committer, batch(0, 5, "a"))
    tagged = next(table.history("main"))
    table.add(["compacted"], {})
    table.add(["compacted again"], {})
    bare = FakeTable()
    bare.__dict__.update(
        {k: (dict(v) if isinstance(v, dict) else v) for k, v in vars(table).items()}
    )
    bare.expire()
    with pytest.raises(Expired, match="cannot prove that table"):
        put(target(bare, 2), batch(5, 9, "b"))
    committer.set_tag(tagged)
    table.expire()
    put(committer, batch(5, 9, "b"))
    assert table.live()[-1] == "m-b"


def test_who_always_claims_first_may_come_to_a_table_whose_history_was_expired():
    """A claim leaves a tag: none is there, so no data of the sink is."""
    table = FakeTable()
    put(target(table), batch(0, 5, "a"))
    table.add(["compacted"], {})
    table.expire()
    with pytest.raises(Expired):
        TableCommitter(table, "main", "s.replay", 1, FakeClock()).claim()
    late = TableCommitter(table, "main", "s.replay", 1, FakeClock(), claimed_first=True)
    head = late.claim()
    assert head.entry is not None
    assert head.snapshot is not None
    late.set_tag(head.snapshot)
    table.add(["compacted again"], {})
    table.expire()
    assert late.head().entry == head.entry, "with a tag it counts, as ever"
    older = TableCommitter(table, "main", "s.replay", 1, FakeClock(), claimed_first=True)
    with pytest.raises(Fenced):
        older.claim()


# ── a branch that was moved, and what would tell of it expired ───────────────────────────────────


def rolled_back_and_expired(metadata_kept: bool, keys: int | None = None) -> FakeTable:
    """Three batches; back to the first; somebody else's two commits; the rest is expired."""
    table = FakeTable()
    table.metadata_kept = metadata_kept
    committer = target(table)
    for n, name in enumerate("abc"):
        entry = replace(entry_of([batch(5 * n, 5 * n + 5, name)], "db.t", 1), keys=keys)
        committer.set_tag(committer.commit([f"m-{name}"], entry))
    first = [*table.history("main")][-1]
    table.refs["main"] = first.id
    expired(table)
    return table


@pytest.mark.parametrize("metadata_kept", [True, False])
@pytest.mark.parametrize("keys", [None, 5])
@pytest.mark.parametrize("running", [True, False])
def test_a_sequence_number_is_no_proof_that_the_tagged_snapshot_is_an_ancestor(
    metadata_kept: bool, keys: int | None, running: bool
):
    """The tag is older than all that is left, and the branch was rolled back behind it."""
    table = rolled_back_and_expired(metadata_kept, keys)
    committer = target(table, 1 if running else 2)
    words = r"found a with orders\[0\] \[0, 5\)" if metadata_kept else "has all offsets below ord"
    if running:
        committer.seen, committer.end = "c", Cut({P: 15})
        with pytest.raises(Gap if metadata_kept else Expired, match=words):
            put(committer, batch(15, 20, "d"))
    elif metadata_kept:
        committer.claim()  # on top of what is there; whoever begins looks whether that is enough
        assert committer.end == Cut({P: 5})
    else:
        with pytest.raises(Expired, match=r"all offsets below orders\[0\]@15"):
            committer.claim()
    tag_mismatch = committer.tag_mismatch()
    assert isinstance(tag_mismatch, Gap if metadata_kept else Expired)
    assert "m-d" not in table.live()


@pytest.mark.parametrize("keys", [None, 5])
def test_maintenance_by_others_does_not_stop_a_sink_if_earlier_metadata_shows_it(
    keys: int | None,
):
    table = FakeTable()
    table.metadata_kept = table.rewritten = True
    committer = target(table)
    committer.set_tag(
        committer.commit(["m-a"], replace(entry_of([batch(0, 5, "a")], "db.t", 1), keys=keys))
    )
    expired(table)
    put(committer, batch(5, 9, "b"))
    expired(table)
    heir = target(table, 2)
    claimed = heir.claim()
    assert claimed.entry is not None
    assert claimed.entry.unknown_before == 0
    assert claimed.entry.end == Cut({P: 9})
    assert heir.tag_mismatch() is None
    put(heir, batch(9, 12, "c", epoch=2))
    assert table.live()[-1] == "m-c"


def test_without_earlier_metadata_the_newest_manifest_of_the_tagged_snapshot_proves_ancestry():
    """Of appends. A rewrite may have taken all trace of a delete away."""
    for keys, rewritten, shown in ((None, False, True), (None, True, False), (5, False, False)):
        table = FakeTable()
        table.rewritten = rewritten
        committer = target(table)
        entry = replace(entry_of([batch(0, 5, "a")], "db.t", 1), keys=keys)
        committer.set_tag(committer.commit(["m-a"], entry))
        expired(table)
        if shown:
            put(committer, batch(5, 9, "b"))
            assert table.live()[-1] == "m-b"
            continue
        with pytest.raises(Expired, match="cannot prove that table"):
            put(committer, batch(5, 9, "b"))


def test_a_commit_that_was_expired_before_its_tag_is_found_in_earlier_metadata():
    """Whether it was applied need not be guessed; and the tag goes to an entry on top."""
    table, committer = claimed_table()
    table.metadata_kept = True
    append = table.append

    def lost(*given: Any, **more: Any) -> None:
        table.append = append  # type: ignore[method-assign]
        append(*given, **more)
        expired(table)
        raise CommitStateUnknown("cannot commit: CommitStateUnknownException")

    table.append = lost  # type: ignore[method-assign]
    one = batch(0, 5, "a")
    snapshot = committer.commit(one.table("db.t").manifests, entry_of([one], "db.t", 1))
    assert snapshot.id not in table.snapshots
    assert [*committer.locate([one])] == ["a"]
    committer.set_tag(snapshot)
    newest = next(table.history("main"))
    assert table.tagged("frazil/s") == newest
    assert parse(newest.summary).end == Cut({P: 5})  # type: ignore[union-attr]
    put(committer, batch(5, 9, "b"))
    assert sum("m-a" in added for added in table.manifests.values()) == 1


# ── expiry between a commit and its tag ──────────────────────────────────────────────────────────


def claimed_table() -> tuple[FakeTable, TableCommitter]:
    """A table that a run has claimed."""
    table = FakeTable()
    committer = target(table)
    claimed = committer.claim().snapshot
    assert claimed is not None
    committer.set_tag(claimed)
    return table, committer


def expired(table: FakeTable) -> None:
    """Two of somebody else's commits, and all that is no head and no tag is gone."""
    table.add(["foreign"], {})
    table.add(["foreign too"], {})
    table.expire()


def test_a_tag_never_moves_back():
    """A run that was fenced may come to its tag late: expiry would take the newer one's."""
    table = FakeTable()
    old, heir = target(table, 1), target(table, 2)
    claimed = old.claim().snapshot
    newest = heir.claim().snapshot
    assert claimed is not None
    assert newest is not None
    heir.set_tag(newest)
    old.set_tag(claimed)
    assert table.tagged("frazil/s") == newest


def test_a_tag_that_another_writer_moves_meanwhile_is_read_again():
    table = FakeTable()
    committer = target(table)
    first = committer.claim().snapshot
    assert first is not None
    put(committer, batch(0, 5, "a"))
    newest = next(table.history("main"))
    seen, table.tagged = table.tagged, lambda _: None  # type: ignore[method-assign]
    table.refs["frazil/s"] = first.id

    def refresh() -> None:
        table.tagged = seen  # type: ignore[method-assign]

    table.refresh = refresh  # type: ignore[method-assign]
    committer.set_tag(newest)
    assert table.tagged("frazil/s") == newest


def test_a_run_whose_manifests_a_newer_one_has_removed_is_fenced():
    """A row delta reads them, before Iceberg asks whether the ledger is still the same."""
    table = FakeTable()
    committer, heir = target(table, 1), target(table, 2)
    committer.claim()

    def overtaken(*_: Any, **__: Any) -> None:
        del table.append  # type: ignore[method-assign]
        heir.claim()
        table.append = gone  # type: ignore[method-assign]
        gone()

    def gone(*_: Any, **__: Any) -> None:
        raise IdentityMismatch("cannot commit: NotFoundException")

    table.append = overtaken  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        put(committer, batch(0, 5, "a"))
    table.append = gone  # type: ignore[method-assign]
    with pytest.raises(IdentityMismatch, match="NotFoundException"):
        put(heir, batch(0, 5, "a"))


@pytest.mark.parametrize("then", ["the answer is lost", "Iceberg tries again by itself"])
def test_a_commit_that_was_expired_before_its_tag_is_not_made_again(then: str):
    """What is left of the table tells of an older entry only."""
    table, committer = claimed_table()
    append = table.append

    def lost(*given: Any, **more: Any) -> None:
        append(*given, **more)
        expired(table)
        if "again" in then:
            append(*given, **more)
        raise CommitStateUnknown("cannot commit: CommitStateUnknownException")

    table.append = lost  # type: ignore[method-assign]
    with pytest.raises(
        Expired, match=r"orders\[0\] \[0, 5\).*outcome of an earlier attempt is unknown"
    ):
        put(committer, batch(0, 5, "a"))
    table.append = append  # type: ignore[method-assign]
    with pytest.raises(Expired, match="outcome of an earlier attempt is unknown"):
        committer.locate([batch(0, 5, "a")])
    assert sum("m-a" in added for added in table.manifests.values()) == 1


def test_a_history_that_is_expired_right_before_the_first_try_is_no_reason_to_stop():
    table, committer = claimed_table()
    append = table.append

    def late(*given: Any, **more: Any) -> None:
        table.append = append  # type: ignore[method-assign]
        expired(table)
        append(*given, **more)

    table.append = late  # type: ignore[method-assign]
    put(committer, batch(0, 5, "a"))
    assert sum("m-a" in added for added in table.manifests.values()) == 1


def test_a_batch_that_was_not_tried_yet_goes_on_behind_an_expired_history():
    """And from the entry that is set on top first, the outcome of its attempts is known."""
    table = FakeTable()
    committer = target(table)
    committer.set_tag(committer.commit(["m-a"], entry_of([batch(0, 5, "a")], "db.t", 1)))
    expired(table)
    table.faults = ["dropped", "", "lost"]
    assert committer.locate([batch(5, 9, "b")]) == {}
    put(committer, batch(5, 9, "b"))
    assert table.live() == ["foreign too", "m-b"]


def test_an_empty_entry_on_top_whose_answer_was_lost_is_our_own():
    table = FakeTable()
    committer = target(table)
    committer.set_tag(committer.commit(["m-a"], entry_of([batch(0, 5, "a")], "db.t", 1)))
    expired(table)
    before = len(table.manifests)

    def away() -> None:
        if len(table.manifests) > before:
            raise Unavailable("cannot load db.t: 503")

    table.refresh = away  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        put(committer, batch(5, 9, "b"))
    del table.refresh  # type: ignore[method-assign]
    assert len(table.manifests) == before + 1
    put(committer, batch(5, 9, "b"))
    assert table.live() == ["foreign too", "m-b"]


def test_a_run_that_claims_behind_an_expired_history_leaves_alone_what_older_ones_staged():
    """Nobody can tell whether they had it in the table. What it stages itself is another matter."""
    table = FakeTable()
    old = target(table)
    old.set_tag(old.commit(["m-a"], entry_of([batch(0, 5, "a")], "db.t", 1)))
    expired(table)
    for epoch in (2, 3):
        heir = target(table, epoch)
        claimed = heir.claim()
        assert claimed.entry is not None
        assert claimed.entry.unknown_before == 2
        assert claimed.snapshot is not None
        heir.set_tag(claimed.snapshot)
        with pytest.raises(Expired, match="outcome of an earlier attempt is unknown"):
            heir.locate([batch(5, 9, "b", epoch=1)])
        assert heir.locate([batch(5, 9, "c", epoch=2)]) == {}
    put(heir, batch(5, 9, "c", epoch=2))
    assert heir.locate([batch(9, 12, "d", epoch=1)]) == {}, "an entry with records ends the doubt"


def test_a_claim_that_was_expired_before_its_tag_is_made_again():
    """What is seen then is the older run's entry, by its tag: nobody would be fenced."""
    table = FakeTable()
    old = target(table)
    old.set_tag(old.commit(["m-a"], entry_of([batch(0, 5, "a")], "db.t", 1)))
    looks: list[int] = []

    def expire_once() -> None:
        looks.append(1)
        if len(looks) == 3:  # the claim was read back, and is looked at for its tag
            expired(table)

    table.refresh = expire_once  # type: ignore[method-assign]
    claimed = target(table, 2).claim()
    assert claimed.entry is not None
    assert claimed.entry.epoch == 2
    assert claimed.snapshot == next(table.history("main"))
    with pytest.raises(Fenced):
        put(old, batch(5, 9, "b"))


def test_a_claim_that_was_expired_and_then_passed_by_an_older_run_is_no_claim():
    """Its run may see it all the same: reads may be old. Its tag would be set behind."""
    table = FakeTable()
    old, heir = target(table), target(table, 2)
    old.set_tag(old.commit(["m-a"], entry_of([batch(0, 5, "a")], "db.t", 1)))
    claimed = heir.claim().snapshot
    assert claimed is not None
    expired(table)
    old.set_tag(old.commit(["m-b"], entry_of([batch(5, 9, "b")], "db.t", 1)))
    with pytest.raises(Unavailable, match="run of epoch 1 committed without"):
        heir.set_tag(claimed)


@pytest.mark.parametrize("tagged", [True, False])
def test_a_claim_detects_entries_that_were_expired_after_its_read(tagged: bool):
    """The older run went on from the entry that was seen, and what it committed is gone."""
    table = FakeTable()
    old, heir = target(table), target(table, 2)
    seen = old.commit(["m-a"], entry_of([batch(0, 5, "a")], "db.t", 1))
    if tagged:
        old.set_tag(seen)

    def went_on() -> None:
        put(old, batch(5, 9, "b"))
        expired(table)

    table.race = went_on
    table.faults = ["race"]
    if not tagged:  # and nothing is left that tells of it
        with pytest.raises(Expired, match="its tag was removed"):
            heir.claim()
        return
    claimed = heir.claim()
    assert claimed.entry is not None
    assert claimed.entry.unknown_before == 2
    with pytest.raises(Expired, match="outcome of an earlier attempt is unknown"):
        heir.locate([batch(5, 9, "b")])


def test_what_leads_up_to_the_oldest_entry_that_is_left_is_in_the_table():
    """A zombie staged the same records in other ranges: those must not be taken."""
    batches = [batch(0, 5, "a", 0), batch(5, 9, "b", 1), batch(0, 7, "z", 0, epoch=2)]
    assert preceding(batches, [Cut({P: 9})]) == {"a", "b"}
    committed = preceding(batches, [Cut({P: 9})]) | {"c"}
    last = batch(9, 12, "c", 2)
    chained = chain(Cut({P: 0}), [*batches, last], committed)
    assert [batch.commit_id for batch in chained] == ["a", "b", "c"]


def test_batches_whose_entry_in_the_index_was_expired_are_there_all_the_same():
    """Two commits to the index, and both times its tag could not be moved."""
    table = FakeTable("db.i")
    committer = target(table)
    batches = [batch(0, 5, "a"), batch(5, 9, "b", 1), batch(9, 12, "c", 2)]
    for committed in batches[:2]:
        put(committer, committed)
    table.add(["merged"], {})
    table.expire(keep=2)
    assert list(committer.locate(batches)) == ["a", "b"]


class Rig:
    """A committer over two tables in memory, driven by hand."""

    def __init__(self, bounds: BackpressureLimits | None = None) -> None:
        self.data, self.index = FakeTable(), FakeTable("db.i", "uuid-2")
        self.steps: list[str] = []
        self.finished: list[str] = []
        self.restart()
        self.bounds = bounds

    def restart(self, epoch: int = 1, bounds: BackpressureLimits | None = None) -> None:
        data, index = target(self.data, epoch), target(self.index, epoch)
        data.claim()
        index.claim()
        self.targets = (data, index)
        self.events = Events(
            table=lambda _: data,
            recorded_tables=lambda: {"db.t": "uuid-1"},
            index_manifests=lambda located: [f"i-{b.commit_id}@{s['db.t'].id}" for b, s in located],
            committed=lambda done: self.finished.extend(b.commit_id for b in done),
            step=lambda name, *_: self.steps.append(name),
        )
        limits = bounds or BackpressureLimits(100, 10**9, 3600)
        self.committer = Committer(
            self.events, index, Progress(position=Cut()), limits, clock=FakeClock()
        )

    def commit(self, *batches: StagedBatch) -> None:
        self.committer.queue.pending = [PendingBatch(b, 0.0) for b in batches]
        self.committer.round(["db.t", INDEX])
        if self.committer.progress.trouble:
            raise Unavailable(self.committer.progress.trouble)


def test_tables_are_maintained_when_nothing_is_committed_any_more():
    rig = Rig()
    called = threading.Semaphore(0)
    moments = [time.monotonic() + 0.02, None]

    def run_due() -> float | None:
        called.release()
        return moments.pop(0)

    rig.committer.queue.clock, rig.events.maintain = time, run_due
    rig.committer.start()
    rig.committer.submit(batch(0, 5, "a"))
    try:
        assert called.acquire(timeout=10)
        assert called.acquire(timeout=10), "a second time, though there is nothing new"
        assert not called.acquire(timeout=0.1)
    finally:
        rig.committer.close()


def test_the_index_is_committed_last_and_names_the_snapshot_of_the_data():
    rig = Rig()
    rig.commit(batch(0, 5, "a"))
    assert rig.steps == [
        "commit",
        "committed",
        "tagged",
        "index-commit",
        "index-committed",
        "index-tagged",
        "done",
    ]
    snapshot = next(rig.data.history("main"))
    assert rig.index.live() == [f"i-a@{snapshot.id}"]
    assert rig.committer.progress.position == Cut({P: 5})
    assert rig.finished == ["a"]


@pytest.mark.parametrize("staged", ["by an earlier run", "long ago", "just now"])
def test_a_batch_whose_staged_files_are_gone_is_not_committed(staged: str):
    """Iceberg would commit it, and nobody could read the table any more."""
    rig = Rig()
    now = int(time.time() * 1000)
    if staged == "by an earlier run":
        rig.restart(epoch=2)
    one = replace(batch(0, 5, "a"), staged_at_ms=0 if staged == "long ago" else now)
    rig.data.deleted = ["m-a"]
    if staged == "just now":  # it is not looked for each time
        return rig.commit(one)
    with pytest.raises(
        Expired, match=r"orders\[0\] \[0, 5\).*1 of its staged files are missing, for example m-a"
    ):
        rig.commit(one)
    assert rig.data.live() == []
    rig.data.deleted = []
    rig.commit(one)
    assert rig.data.live() == ["m-a"]


def test_of_several_tables_one_that_lacks_staged_files_ends_the_run_that_cannot_commit_them():
    """The next one reads them again: no person need look."""
    rig = Rig()
    rig.committer.queue.alone = False
    rig.data.deleted = ["m-a"]
    with pytest.raises(Expired, match="staged files are missing"):
        rig.commit(batch(0, 5, "a"))


def test_staged_files_that_vanish_during_the_commit_are_named_as_such():
    """Iceberg reads them in some commits, and its error says nothing of what to do."""
    rig = Rig()

    def append(*_: object, **__: object) -> None:
        rig.data.deleted = ["m-a"]
        raise IdentityMismatch("cannot read m-a: it is gone")

    rig.data.append = append  # type: ignore[method-assign]
    fresh = replace(batch(0, 5, "a"), staged_at_ms=int(time.time() * 1000))
    with pytest.raises(Expired, match="staged files are missing") as stop:
        rig.commit(fresh)
    assert "Start the sink again" in stop.value.hint


def test_absorbed_batches_share_one_snapshot_and_one_entry():
    rig = Rig()
    rig.commit(batch(0, 5, "a"), batch(5, 9, "b", 1), batch(9, 12, "c", 2))
    assert rig.data.live() == ["m-a", "m-b", "m-c"]
    assert len(list(rig.data.history("main"))) == 2  # the claim and the commit


def test_a_batch_rebuilt_from_the_ledger_is_refused_where_the_table_was_rolled_back_since():
    """It brings no files: to commit it would say that rows are there which are not."""
    rig = Rig()
    rig.index.faults = ["dropped"] * 2 * ATTEMPTS
    with pytest.raises(Unavailable):
        rig.commit(batch(0, 5, "a"))
    rig.index.faults = []
    [entry] = [e for e, _ in ledger.entries(rig.data.history("main"), "s") if e.ranges]
    rig.restart(epoch=2)
    rig.data.refs["main"] = next(s.id for s in rig.data.history("main") if s.parent is None)
    rig.targets[0]._set_seen(parse(next(rig.data.history("main")).summary))
    with pytest.raises(Gap, match=r"orders\[0\] \[0, 5\).*lacks them now"):
        rig.commit(rebuilt(entry, "db.t", "uuid-1"))
    assert rig.data.live() == []
    assert rig.index.live() == []


def deleting(one: StagedBatch, keys: int = 3) -> StagedBatch:
    return replace(one, tables=tuple(replace(table, keys=keys) for table in one.tables))


def test_absorbed_batches_with_deletes_are_snapshots_of_their_own_and_in_order():
    rig = Rig()
    rig.commit(
        batch(0, 5, "a"),
        batch(5, 9, "b", 1),
        deleting(batch(9, 12, "c", 2)),
        deleting(batch(12, 15, "d", 3), 1),
        batch(15, 16, "e", 4),
    )
    entries = [parse(snapshot.summary) for snapshot in rig.data.history("main")][::-1][1:]
    assert [entry and entry.commit_ids for entry in entries] == [("a", "b"), ("c",), ("d",), ("e",)]
    assert [entry and entry.keys for entry in entries] == [None, 3, 1, 0]
    assert len(list(rig.index.history("main"))) == 2  # one entry of the index for all of them


def test_batches_with_deletes_go_on_where_an_answer_was_lost():
    rig = Rig()
    rig.data.faults = ["", "lost"] + ["dropped"] * ATTEMPTS
    batches = [deleting(batch(n, n + 1, str(n), n)) for n in range(4)]
    with pytest.raises(Unavailable):
        rig.commit(*batches)
    rig.data.faults = []
    rig.commit(*batches)
    assert rig.data.live() == [f"m-{n}" for n in range(4)]
    assert rig.committer.progress.position == Cut({P: 4})


def test_a_batch_whose_answer_was_lost_may_come_back_together_with_new_ones():
    """The group changes between the tries; what is there must be seen batch by batch."""
    rig = Rig()
    rig.data.faults = ["lost"] + ["dropped"] * ATTEMPTS
    fail_to_tag(rig.data, *["dropped"] * ATTEMPTS)
    with pytest.raises(Unavailable):
        rig.commit(batch(0, 5, "a"))
    rig.data.faults = []
    rig.commit(batch(0, 5, "a"), batch(5, 9, "b", 1))
    assert rig.data.live() == ["m-a", "m-b"]
    assert [m.split("@")[0] for m in rig.index.live()] == ["i-a", "i-b"]


@pytest.mark.parametrize("where", ["data", "index"])
def test_a_try_that_arrives_while_a_larger_group_is_tried_is_for_later_and_no_overlap(where: str):
    rig = Rig()
    late: FakeTable = getattr(rig, where)
    append, flying = late.append, []

    def times_out(*given: Any, **more: Any) -> None:
        assert more["check"](late.history("main")) is None
        flying.append(given)
        raise CommitStateUnknown("cannot commit: CommitStateUnknownException")

    def arrives() -> None:
        late.add(*flying[0])

    late.append = times_out  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        rig.commit(batch(0, 5, "a"))
    late.append, late.race, late.faults = append, arrives, ["race"]  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"with only orders\[0\] \[0, 5\), was applied late"):
        rig.commit(batch(0, 5, "a"), batch(5, 9, "b", 1))
    rig.commit(batch(0, 5, "a"), batch(5, 9, "b", 1))
    assert rig.data.live() == ["m-a", "m-b"]
    assert [m.split("@")[0] for m in rig.index.live()] == ["i-a", "i-b"]


def test_an_index_answer_lost_for_one_batch_does_not_double_its_row():
    rig = Rig()
    rig.index.faults = ["lost"]
    fail_to_tag(rig.index, *["dropped"] * ATTEMPTS)
    with pytest.raises(Unavailable):
        rig.commit(batch(0, 5, "a"))
    rig.commit(batch(0, 5, "a"), batch(5, 9, "b", 1))
    assert [m.split("@")[0] for m in rig.index.live()] == ["i-a", "i-b"]


def test_a_run_that_died_between_table_and_index_is_completed_by_the_next():
    rig = Rig()
    rig.index.faults = ["dropped"] * 2 * ATTEMPTS
    with pytest.raises(Unavailable):
        rig.commit(batch(0, 5, "a"))
    rig.index.faults = []
    rig.restart(epoch=2)
    rig.commit(batch(0, 5, "a"))
    assert rig.data.live() == ["m-a"]
    assert [m.split("@")[0] for m in rig.index.live()] == ["i-a"]


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        (BackpressureLimits(2, 10**9, 3600), "2 batches wait for a commit; the bound is 2"),
        (BackpressureLimits(100, 20, 3600), "20 staged bytes wait for a commit; the bound is 20"),
        (BackpressureLimits(100, 10**9, 0), "a batch has waited 0 s; the bound is 0 s"),
    ],
)
def test_each_bound_of_absorption_blocks_and_says_why(bounds: BackpressureLimits, reason: str):
    rig = Rig()
    rig.restart(epoch=2, bounds=bounds)
    rig.committer.queue.pending = [
        PendingBatch(batch(0, 5, "a"), 0.0),
        PendingBatch(batch(5, 9, "b"), 0.0),
    ]
    assert rig.committer.queue.over() == reason


def test_the_chain_prefers_what_the_table_already_has():
    own, other, behind = batch(0, 5, "mine"), batch(0, 5, "other", epoch=2), batch(5, 7, "x", 1)
    assert chain(Cut({P: 0}), [other, own, behind], {"mine"}) == [own, behind]
    assert chain(Cut({P: 0}), [other, own], set()) == [other]
    assert chain(Cut({P: 9}), [other, own, behind], set()) == []


def test_an_entry_of_several_batches_begins_where_a_new_partition_appeared():
    new = Partition("orders", 1)
    late = replace(batch(5, 9, "b", 1), begin=Cut({P: 5, new: 40}), end=Cut({P: 9, new: 44}))
    entry = entry_of([batch(0, 5, "a"), late], "db.t", 1)
    assert entry.begin == Cut({P: 0, new: 40})
    assert entry.end == Cut({P: 9, new: 44})


def test_a_commit_that_goes_through_on_the_last_try_is_read_back_too():
    table = FakeTable()
    table.faults = ["dropped"] * (ATTEMPTS - 1) + ["lost"]
    put(target(table), batch(0, 5, "a"))
    assert table.live() == ["m-a"]


def test_a_new_partition_beside_an_idle_one_is_taken_over_from_its_first_batch():
    """The position does not know the partition: every batch of it seems to lead on."""
    new = Partition("orders", 1)

    def of_new(begin: int, end: int, number: int, epoch: int = 1) -> StagedBatch:
        one = batch(0, 0, f"n{number}", number, epoch)
        return replace(one, begin=Cut({P: 5, new: begin}), end=Cut({P: 5, new: end}))

    staged = [of_new(20, 30, 2, epoch=2), of_new(10, 20, 1), of_new(0, 10, 0)]
    assert [b.number for b in chain(Cut({P: 5}), staged, set())] == [0, 1, 2]


def test_a_claim_names_the_cut_that_the_run_starts_from():
    table = FakeTable()
    head = target(table).claim(lambda position: Cut({**{P: 7}, **position}))
    assert head.entry is not None
    assert head.entry.end == Cut({P: 7})
    again = target(table, 2).claim(lambda position: Cut({**{P: 99}, **position}))
    assert again.entry is not None
    assert again.entry.end == Cut({P: 7}), "the ledger's cut counts, not the second look"


def test_the_tag_never_moves_back_from_a_claim_to_an_older_batch():
    rig = Rig()
    rig.index.faults = ["dropped"] * 2 * ATTEMPTS
    with pytest.raises(Unavailable):
        rig.commit(batch(0, 5, "a"))
    rig.index.faults = []
    rig.restart(epoch=2)
    for committer in rig.targets:
        committer.set_tag(next(committer.table.history("main")))
    rig.commit(batch(0, 5, "a"))
    claimed = rig.data.tagged("frazil/s")
    assert claimed is not None
    assert claimed.summary["frazil.epoch"] == "2"


def test_a_bound_that_is_reached_brings_the_commit_forward_and_hurry_lets_everyone_in():
    rig = Rig()
    rig.restart(epoch=2, bounds=BackpressureLimits(1, 10**9, 3600))
    committer = rig.committer
    committer._interval = 3600
    committer.queue.clock = time
    committer.start()
    try:
        committer.submit(batch(0, 5, "a", epoch=2))
        committer.submit(batch(5, 9, "b", 1, epoch=2))  # would wait an hour for the interval
        assert committer.wait_until(Cut({P: 5}), 10)
        committer.hurry()
        committer.submit(batch(9, 12, "c", 2, epoch=2))
        assert committer.flush(10)
    finally:
        committer.close()
    assert rig.data.live() == ["m-a", "m-b", "m-c"]


def counted(number: int, commit_id: str, before: str, after: str) -> StagedBatch:
    """Batch `number` of a source without offsets: known by its places alone."""
    begin, end = Cut({BATCHES: number}), Cut({BATCHES: number + 1})
    tally = RangeCounts(Range(BATCHES, number, number + 1), 7)
    table = StagedTable("db.t", "uuid-1", 0, (f"m-{commit_id}",), (), 1, 10, (tally,))
    return StagedBatch(
        "s", 1, number, commit_id, begin, end, {}, "", 0, 0, (table,), source=(before, after)
    )


def test_a_batch_that_a_fenced_run_counted_alike_is_not_taken_over():
    """Two runs counted from the same place and took different steps: their second batches have the
    same number and begin elsewhere. The one that does not begin at the ledger's place would leave
    out, or double, what lies between."""
    fenced, next_of_fenced = counted(5, "a", "s5", "s7"), counted(6, "b", "s7", "s9")
    own = counted(6, "c", "s6", "s8")
    assert chain(Cut({BATCHES: 6}), [fenced, next_of_fenced], set(), "s6") == []
    assert chain(Cut({BATCHES: 6}), [next_of_fenced, own], set(), "s6") == [own]
    assert chain(Cut({BATCHES: 5}), [next_of_fenced, fenced], set(), "s5") == [
        fenced,
        next_of_fenced,
    ]


def test_a_batch_that_does_not_begin_at_the_ledgers_place_is_refused():
    table = FakeTable()
    committer = target(table)
    put(committer, counted(0, "a", "s0", "s2"))
    with pytest.raises((Gap, Overlap), match="begins at s1"):
        put(committer, counted(1, "b", "s1", "s3"))
    put(committer, counted(1, "c", "s2", "s3"))
    assert table.live() == ["m-a", "m-c"]
    entry = committer.head().entry
    assert entry is not None
    assert (entry.rows, entry.source, entry.total.written) == (7, ("s2", "s3"), 7)


def test_an_entry_never_begins_before_the_ledger_it_goes_on_from():
    """An idle table's entry begins at its own end: what lies below that would be written twice."""
    with pytest.raises(Overlap, match=r"\[5, 9\) to table db.t: it has orders\[0\] \[5, 7\)"):
        entry_of([batch(5, 9, "b")], "db.t", 1, Cut({P: 7}))
    idle = entry_of([batch(5, 9, "b")], "db.t", 1, Cut({P: 2}))
    assert (idle.begin[P], idle.end[P], idle.counts(P).elsewhere, idle.counts(P).written) == (
        2,
        9,
        3,
        4,
    )


def test_an_entry_that_is_not_the_one_last_seen_is_refused_even_if_it_would_join():
    """Another writer under this sink's id, whose entry happens to end where ours begins."""
    table = FakeTable()
    committer, other = target(table), target(table)
    put(committer, batch(0, 5, "a"))
    other.claim = None  # type: ignore[assignment,method-assign]  # it never claimed anything
    other.seen = "a"
    put(other, batch(5, 9, "b"))
    with pytest.raises((Gap, Overlap), match="expected a as the newest entry, found b"):
        put(committer, batch(9, 12, "c"))


def test_icebergs_own_retry_does_not_move_the_branch_back_over_another_commit():
    """The commit was applied and its response lost; somebody rolled the branch back and committed.
    Iceberg's retry would point the branch at the first snapshot again."""
    table = FakeTable()
    append = table.append

    def retried(*given: Any, check: Any, leftovers: list[str], **more: Any) -> None:
        before = table.refs.get("main")
        append(*given, check=check, leftovers=leftovers, **more)
        if "somebody's" not in table.live():
            ours = table.refs["main"]
            table.refs.pop("main") if before is None else table.refs.update(main=before)
            table.add(["somebody's"], {})
            if refusal := check(table.history("main")):
                raise CommitStateUnknown(f"cannot commit: ValidationException: {refusal}")
            table.refs["main"] = ours

    table.append = retried  # type: ignore[method-assign]
    put(target(table), batch(0, 5, "a"))
    assert table.live() == ["somebody's", "m-a"]


def test_a_fenced_run_stays_fenced_though_the_table_is_restored():
    """A newer run committed what this one staged; then the table was restored to its beginning."""
    table = FakeTable()
    run, newer = target(table), target(table, epoch=2)
    first, second = batch(0, 5, "a"), batch(5, 9, "b")
    newer.claim()
    put(newer, first)
    put(newer, batch(5, 9, "c"))
    assert [*run.locate([first])] == ["a"]
    table.refs.clear()
    with pytest.raises(Gap):
        put(run, second)
    assert table.live() == []


@pytest.mark.parametrize("tagged", [True, False])
def test_a_batch_is_not_called_absent_where_the_history_shows_nothing(tagged: bool):
    table = FakeTable()
    run = target(table)
    put(run, batch(0, 5, "a"))
    if not tagged:
        table.refs.pop("frazil/s", None)
    table.add([], {})
    table.every.clear()  # earlier metadata files are gone, too
    table.expire()
    later = TableCommitter(table, "main", "s", 2, FakeClock())
    assert not later.head().complete
    assert not later.absent(batch(0, 5, "a"))


def test_a_run_that_has_seen_an_entry_does_not_take_its_loss_for_a_new_table():
    """Somebody removed the tag, and the entries expired."""
    table = FakeTable()
    run = TableCommitter(table, "main", "s", 1, FakeClock(), claimed_first=True)
    put(run, batch(0, 5, "a"))
    table.refs.pop("frazil/s", None)
    table.add([], {})
    table.every.clear()
    table.expire()
    with pytest.raises(Expired, match="cannot prove that table"):
        put(run, batch(5, 9, "b"))
