"""What a person may decide about a position: exactly what is lost, no more; no offset twice under
one name; and what was done is distinguished from what is proven."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frazil.accounting import OutcomeCounts, RangeCounts
from frazil.auditing.checks import audit
from frazil.auditing.history import Evidence
from frazil.commit.batch_chain import entry_of
from frazil.commit.committer import _grouped_by_deletes
from frazil.errors import ConfigError, Expired, IdentityMismatch
from frazil.kafka.planner import TopicIdentity, Watermarks, kafka_only
from frazil.ledger import staged_batch
from frazil.ledger.completeness import CompletenessMark, CompletenessRules, complete
from frazil.ledger.entry import PREFIX, OperatorNote, parse
from frazil.ledger.index import rebuilt, rows
from frazil.ledger.range_columns import of_entries
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import BATCHES, Cut, Partition, Range, newest_names
from frazil.render import json_values
from frazil.sources.operator_decision import OperatorDecision, WantedPosition, decide, overtaken
from tests.unit.test_audit import History
from tests.unit.test_index_rows import parsed_rows

A, B = Partition("orders", 0), Partition("orders", 1)
AGAIN = Partition("orders@7", 0)
NOTE = OperatorNote("accept-loss", "ann@ops", "2026-11-15T10:00:00+00:00", "retention was an hour")
KNOWN = TopicIdentity("k", {"orders": "id-1"})
OTHER = TopicIdentity("k", {"orders": "id-2"})


def marks(low: dict[Partition, int], end: dict[Partition, int]) -> Watermarks:
    return Watermarks(Cut(low), Cut(end))


def decided(wanted: WantedPosition, now: TopicIdentity = KNOWN, **more: Any) -> OperatorDecision:
    position = more.get("position", Cut({A: 50, B: 60}))
    watermarks = more.get("marks", marks({A: 0, B: 0}, {A: 100, B: 100}))
    return decide(wanted, position, more.get("known", KNOWN), now, watermarks, "7")


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def test_a_topic_that_was_taken_over_has_a_name_of_its_own_and_kafkas():
    assert (AGAIN.kafka_topic, AGAIN.generation) == ("orders", 7)
    assert (A.kafka_topic, A.generation) == ("orders", 0)
    assert newest_names(["orders", "orders@12", "orders@7", "users"]) == {
        "orders": "orders@12",
        "users": "users",
    }


def test_nothing_more_comes_of_a_topic_that_was_made_again():
    cut = Cut({A: 50, AGAIN: 3, BATCHES: 9, Partition("users", 0): 1})
    assert kafka_only(cut) == Cut({AGAIN: 3, Partition("users", 0): 1})


def test_a_topic_that_was_made_again_holds_no_hour_back():
    known_marks = {A: CompletenessMark(100, 0), AGAIN: CompletenessMark(900, 0)}
    assert complete(Cut({A: 50, AGAIN: 3}), known_marks, CompletenessRules(), dict, 0) == 900


# ── accepting a loss ─────────────────────────────────────────────────────────────────────────────

LOST = marks({A: 70, B: 0}, {A: 100, B: 100})


def test_what_retention_overtook_is_reported_to_the_offset():
    assert overtaken(Cut({A: 50, B: 60, BATCHES: 3}), LOST) == [Range(A, 50, 70)]


def test_so_is_what_it_took_of_a_partition_that_was_never_read():
    watermarks = marks({A: 0, B: 7}, {A: 100, B: 100})
    position = Cut({A: 50})
    assert overtaken(position, watermarks) == [Range(B, 0, 7)]
    intervention = decided(
        WantedPosition("accept-loss", (Range(B, 0, 7),)), position=position, marks=watermarks
    )
    assert intervention.lost == (Range(B, 0, 7),)
    assert overtaken(Cut({Partition("users", 0): 3}), watermarks) == [], "of a topic that is new"


def test_of_partitions_whose_offsets_were_passed_over_no_leader_epoch_is_known_any_more():
    """The epoch before a loss may have ended within it."""
    known = replace(KNOWN, leaders={A: 3, B: 4})
    lost = decided(WantedPosition("accept-loss", (Range(A, 50, 70),)), marks=LOST, known=known)
    ahead = decided(WantedPosition("seek", to={("orders", 0): 70}), known=known)
    assert lost.origin.leaders == ahead.origin.leaders == {B: 4}
    back = decided(WantedPosition("seek", to={("orders", 0): 20}), known=known)
    assert not {p for p in back.origin.leaders if p in back.begin}
    other = decided(WantedPosition("adopt-topic", same_offsets=True), OTHER, known=known)
    assert other.origin.leaders == {}


def test_without_topic_ids_only_another_cluster_makes_topics_others():
    nameless = TopicIdentity("k", {"orders": ""})
    upgraded = decided(
        WantedPosition("adopt-topic"), TopicIdentity("k", {"orders": "id-1"}), known=nameless
    )
    assert not upgraded.begin
    moved = decided(
        WantedPosition("adopt-topic"), TopicIdentity("other", {"orders": ""}), known=nameless
    )
    assert set(moved.begin) == {AGAIN, Partition("orders@7", 1)}


def test_exactly_what_is_lost_is_accepted():
    intervention = decided(WantedPosition("accept-loss", (Range(A, 50, 70),)), marks=LOST)
    assert intervention.lost == (Range(A, 50, 70),)
    assert not intervention.begin
    assert intervention.origin == KNOWN


def test_less_than_is_lost_may_be_accepted_while_retention_goes_on():
    assert decided(WantedPosition("accept-loss", (Range(A, 50, 65),)), marks=LOST).lost


@pytest.mark.parametrize(
    "wrong",
    [
        Range(A, 50, 71),
        Range(A, 49, 70),
        Range(A, 51, 70),
        Range(A, 50, 50),
        Range(B, 60, 61),
        Range(Partition("orders", 2), 0, 1),
        Range(Partition("users", 0), 0, 1),
    ],
)
def test_nothing_else_is(wrong: Range):
    with pytest.raises(ConfigError):
        decided(WantedPosition("accept-loss", (wrong,)), marks=LOST)


# ── adopting ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("start", "at"), [("earliest", 2), ("latest", 30)])
def test_a_recreated_topic_is_read_under_a_new_name_from_the_given_start(start: str, at: int):
    watermarks = marks({A: 2}, {A: 30})  # with one partition less
    intervention = decided(WantedPosition("adopt-topic", start=start), OTHER, marks=watermarks)
    assert intervention.begin == Cut({AGAIN: at})
    assert intervention.origin == TopicIdentity("k", {"orders": "id-1", "orders@7": "id-2"})
    assert not intervention.lost


def test_one_that_was_adopted_can_be_adopted_again():
    known = TopicIdentity("k", {"orders": "id-1", "orders@5": "id-2"})
    old = Partition("orders@5", 0)
    intervention = decide(
        WantedPosition("adopt-topic"),
        Cut({A: 50, old: 9}),
        known,
        TopicIdentity("k", {"orders@5": "id-3"}),
        marks({old: 0}, {old: 4}),
        "7",
    )
    assert intervention.begin == Cut({AGAIN: 0})
    assert intervention.origin.topics == {"orders": "id-1", "orders@5": "id-2", "orders@7": "id-3"}


def test_nothing_is_adopted_where_all_are_the_same():
    assert not decided(WantedPosition("adopt-topic"))
    with pytest.raises(ConfigError, match="cannot adopt topic orders"):
        decided(WantedPosition("adopt-topic", topics=("orders",)))


def test_the_same_offsets_go_on_under_the_old_name():
    intervention = decided(WantedPosition("adopt-topic", same_offsets=True), OTHER)
    assert intervention.begin == Cut({A: 50, B: 60})
    assert intervention.origin == OTHER


@pytest.mark.parametrize(
    "watermarks", [marks({A: 0, B: 0}, {A: 49, B: 100}), marks({A: 0}, {A: 100})]
)
def test_offsets_that_are_not_there_are_not_the_same(watermarks: Watermarks):
    with pytest.raises(IdentityMismatch, match="ends before the position"):
        decided(WantedPosition("adopt-topic", same_offsets=True), OTHER, marks=watermarks)


def test_another_cluster_is_adopted_with_all_its_topics():
    intervention = decided(WantedPosition("adopt-topic"), TopicIdentity("k2", {"orders": "id-2"}))
    assert intervention.origin.cluster == "k2"
    assert intervention.begin == Cut({AGAIN: 0, Partition("orders@7", 1): 0})
    assert "cluster k2 for k" in intervention.message


def test_a_cluster_with_the_same_topics_changes_its_id_alone():
    intervention = decided(WantedPosition("adopt-topic"), TopicIdentity("k2", {"orders": "id-1"}))
    assert intervention.begin == Cut({A: 50, B: 60})
    assert intervention.origin == TopicIdentity("k2", {"orders": "id-1"})


# ── rebasing ─────────────────────────────────────────────────────────────────────────────────────


def test_forward_gives_up_what_lies_between():
    intervention = decided(WantedPosition("seek", to={("orders", 0): 80}))
    assert intervention.lost == (Range(A, 50, 80),)
    assert not intervention.begin


def test_back_reads_the_whole_topic_on_under_a_new_name():
    """Partitions that are not named go on where they stood: none of their records comes twice."""
    intervention = decided(WantedPosition("seek", to={("orders", 0): 20}))
    assert intervention.begin == Cut({AGAIN: 20, Partition("orders@7", 1): 60})
    assert intervention.origin.topics == {"orders": "id-1", "orders@7": "id-1"}
    assert "30 offsets are read again" in intervention.message


def test_a_topic_that_lost_its_tail_is_read_on_from_its_end():
    intervention = decided(
        WantedPosition("seek", to={("orders", 0): 40}), marks=marks({A: 0, B: 0}, {A: 40, B: 100})
    )
    assert intervention.begin[AGAIN] == 40


@pytest.mark.parametrize("to", [101, 5])
def test_only_where_the_partition_has_offsets(to: int):
    with pytest.raises(ConfigError, match="the partition has offsets 10 to 100"):
        decided(
            WantedPosition("seek", to={("orders", 0): to}),
            marks=marks({A: 10, B: 0}, {A: 100, B: 100}),
        )


def test_not_both_ways_at_once_and_not_past_a_loss():
    with pytest.raises(ConfigError, match="forward and back"):
        decided(WantedPosition("seek", to={("orders", 0): 80, ("orders", 1): 10}))
    with pytest.raises(Expired, match=r"deleted orders\[0\]"):
        decided(WantedPosition("seek", to={("orders", 1): 10}), marks=LOST)
    with pytest.raises(ConfigError, match="does not read it"):
        decided(WantedPosition("seek", to={("users", 0): 10}))
    assert not decided(WantedPosition("seek", to={("orders", 0): 50}))


# ── what is written down ─────────────────────────────────────────────────────────────────────────


def lost_batch(note: str = NOTE.text(), **more: Any) -> StagedBatch:
    tally = RangeCounts(Range(A, 10, 15), 0, lost=5)
    table = StagedTable("db.t", "u", 0, (), (), 0, 0, (tally,))
    return StagedBatch(
        "s", 2, 3, "c", Cut({A: 10}), Cut({A: 15}), {}, "k", 0, 1, (table,), note=note, **more
    )


def test_a_decision_survives_stage_ledger_and_index():
    batch = lost_batch()
    assert batch.tables[0].tallies[0].balanced
    assert staged_batch.load(staged_batch.dump(batch)) == batch
    entry = entry_of([batch], "db.t", 2)
    assert parse(entry.summary()) == entry
    assert entry.counts(A) == OutcomeCounts(lost=5)
    assert OperatorNote.of(entry.note) == NOTE
    spans = of_entries([entry.summary()])
    assert (spans.lost.tolist(), spans.written.tolist()) == ([5], [0])
    again = rebuilt(entry, "db.t", "u")
    assert (again.note, again.tables[0].tallies[0].lost) == (batch.note, 5)
    [row] = rows([(batch, {"db.t": History().add({}).snapshots[0]})]).to_pylist()
    assert (row["lost"], row["written"], OperatorNote.of(row["operator_note"])) == (5, 0, NOTE)


def test_what_is_signed_for_shares_no_snapshot():
    plain = replace(lost_batch(note=""), commit_id="p")
    groups = list(_grouped_by_deletes([plain, plain, lost_batch(), plain], "db.t"))
    assert [[batch.commit_id for batch in some] for some in groups] == [["p", "p"], ["c"], ["p"]]


# ── the proof ────────────────────────────────────────────────────────────────────────────────────


def history(note: str, lost: int = 5) -> History:
    return (
        History()
        .commit({A: (0, 10)}, commit_ids=("a",))
        .commit({A: (10, 15)}, outcomes={A: OutcomeCounts(lost=lost)}, note=note, commit_ids=("b",))
        .commit({A: (15, 20)}, commit_ids=("c",))
    )


def test_a_loss_that_is_signed_for_is_accepted_and_not_proven():
    report = history(NOTE.text()).report()
    assert report.verdict == "accepted_loss"
    assert report.partitions[0].counts == OutcomeCounts(written=15, lost=5)
    assert report.notes == (NOTE,)
    assert report.partitions[0].ranges("accepted_loss") == (Range(A, 10, 15),)
    assert json_values(report)["partitions"][0]["lost"] == 5


@pytest.mark.parametrize(
    "note", ["", "{}", "not JSON", replace(NOTE, reason="").text(), replace(NOTE, by="").text()]
)
def test_a_loss_that_no_operator_accepted_is_a_gap(note: str):
    report = history(note).report()
    assert report.verdict == "gap"
    assert report.partitions[0].gaps == (Range(A, 10, 15),)
    assert "accepted_loss" not in {finding.kind for finding in report.findings}


def test_a_note_covers_its_own_range_alone():
    report = history(NOTE.text(), lost=4).report()
    assert report.verdict == "gap"


def test_a_hole_beside_an_accepted_loss_is_still_a_gap():
    recorded = History().commit({A: (0, 10)})
    recorded.commit({A: (10, 15)}, outcomes={A: OutcomeCounts(lost=5)}, note=NOTE.text())
    report = recorded.commit({A: (17, 20)}).report()
    assert report.verdict == "gap"
    assert report.partitions[0].gaps == (Range(A, 15, 17),)
    assert report.partitions[0].ranges("accepted_loss") == (Range(A, 10, 15),)


@pytest.mark.parametrize("signed", [True, False])
def test_of_an_expired_ledger_the_index_has_the_note(signed: bool):
    recorded = history(NOTE.text())
    located = []
    for snapshot in recorded.snapshots:
        entry = parse(snapshot.summary)
        assert entry is not None
        batch = rebuilt(replace(entry, note=entry.note if signed else ""), "db.t", "u")
        located.append((batch, {"db.t": snapshot}))
    left = [replace(recorded.snapshots[-1], parent=2)]
    [report] = audit(
        Evidence("db.t", left, files=recorded.files, index={"s": parsed_rows(rows(located))})
    )
    assert report.verdict == ("accepted_loss" if signed else "gap")
    assert report.notes == ((NOTE,) if signed else ())


def test_rows_where_offsets_were_given_up_are_found():
    recorded = history(NOTE.text())
    recorded.files.append(replace(recorded.files[0], path="/x", rows=2, offsets=(11, 12)))
    assert recorded.report().verdict == "overlap"


def test_a_summary_says_nothing_of_losses_where_there_are_none():
    summary = History().commit({A: (0, 10)}).snapshots[0].summary
    assert "lost" not in summary[PREFIX + "counts"]
    assert PREFIX + "operator-note" not in summary
