"""The audit on hand-made histories: what is whole is proven, and nothing else is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from frazil.accounting import OutcomeCounts
from frazil.auditing.checks import audit
from frazil.auditing.history import Evidence
from frazil.auditing.report import TableReport
from frazil.errors import IdentityMismatch
from frazil.iceberg.foreign_commits import ForeignCommits, brings_rows, of_snapshots
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger.entry import LedgerEntry, parse
from frazil.ledger.sink_state import known_tables
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.render import json_values
from tests.unit.test_index_rows import parsed_rows

A, B = Partition("orders", 0), Partition("orders", 1)
Ranges = Mapping[Partition, tuple[int, int]]


def entry(ranges: Ranges, sink: str = "s", **more: Any) -> LedgerEntry:
    begin = Cut({p: start for p, (start, _) in ranges.items()})
    end = Cut({p: stop for p, (_, stop) in ranges.items()})
    return replace(LedgerEntry(sink, 1, ("c",), (0, 0), begin, end), **more)


def files_of(one: LedgerEntry, name: str = "f") -> list[DataFile]:
    """One file per partition that got rows, as the writer makes them."""
    return [
        DataFile(f"/{name}-{r.partition.number}-{r.start}", rows, r.partition, (r.start, r.end - 1))
        for r in one.ranges
        if (rows := one.counts(r.partition).written)
    ]


@dataclass
class History:
    """A branch, oldest snapshot first, and the data files that are live at its end."""

    snapshots: list[Snapshot] = field(default_factory=list)
    files: list[DataFile] = field(default_factory=list)
    deletes: int = 0
    #: snapshot → the data files that it brought
    brought: dict[int, list[DataFile]] = field(default_factory=dict)

    def add(
        self, summary: Mapping[str, str], operation: str = "append", *brought: DataFile
    ) -> History:
        number = len(self.snapshots) + 1
        self.brought[number] = list(brought)
        parent = number - 1 or None
        snapshot = Snapshot(number, parent, number, number, operation, dict(summary))
        self.snapshots.append(snapshot)
        return self

    def commit(self, ranges: Ranges, sink: str = "s", **more: Any) -> History:
        one = entry(ranges, sink, **more)
        self.files += files_of(one, f"{sink}-{len(self.snapshots)}")
        return self.add({**one.summary(), "added-records": str(one.total.written)})

    def reports(self, sink: str = "") -> list[TableReport]:
        return audit(
            Evidence(
                "db.t",
                self.snapshots[::-1],
                files=self.files,
                deletes=self.deletes,
                brought=self.brought.__getitem__,
            ),
            sink,
        )

    def report(self) -> TableReport:
        (only,) = self.reports()
        return only


def whole() -> History:
    return (
        History()
        .commit({A: (0, 0), B: (0, 0)})
        .commit({A: (0, 5), B: (0, 3)})
        .commit({A: (5, 9), B: (3, 3)})
        .commit({A: (9, 12), B: (3, 7)})
    )


def test_bounds_that_the_footers_contradict_are_findings():
    history = whole()
    lies = [("f.parquet", "column s: 1 value above its upper bound")]
    given = Evidence("db.t", history.snapshots[::-1], files=history.files, misdescribed=lies)
    (report,) = audit(given)
    assert report.verdict != "proven"
    assert any(
        "f.parquet" in str(finding) and "upper bound" in str(finding) for finding in report.findings
    )
    (report,) = audit(
        Evidence("db.t", history.snapshots[::-1], files=history.files, misdescribed=[])
    )
    assert report.verdict == "proven"


# ── proven ───────────────────────────────────────────────────────────────────────────────────


def test_ranges_that_join_and_files_that_hold_them_are_proven():
    report = whole().report()
    assert report.verdict == "proven"
    assert report.written == 19
    assert report.commits == 3
    assert [(str(line.range), line.rows_in_files) for line in report.partitions] == [
        ("orders[0] [0, 12)", 12),
        ("orders[1] [0, 7)", 7),
    ]


def test_offsets_that_hold_no_row_are_accounted_for():
    other = {A: OutcomeCounts(0, rejected=1, skipped=2, invisible=3)}
    report = History().commit({A: (0, 10)}, outcomes=other).report()
    assert report.verdict == "proven"
    assert report.partitions[0].counts == OutcomeCounts(4, 1, 2, 3)


def test_a_range_without_any_row_needs_no_file():
    other = {A: OutcomeCounts(0, invisible=4)}
    history = History().commit({A: (0, 4), B: (0, 2)}, outcomes=other).commit({A: (4, 6)})
    assert [f.partition for f in history.files] == [B, A]
    assert history.report().verdict == "proven"


def test_a_stream_need_not_begin_at_zero():
    assert History().commit({A: (70, 75)}).commit({A: (75, 80)}).report().verdict == "proven"


def test_a_partition_may_come_later():
    report = History().commit({A: (0, 5)}).commit({A: (5, 5), B: (0, 3)}).report()
    assert report.verdict == "proven"


def test_claims_between_batches_do_not_matter():
    history = whole()
    history.commit({A: (12, 12), B: (7, 7)}, epoch=2).commit({A: (12, 14), B: (7, 7)}, epoch=2)
    report = history.report()
    assert report.verdict == "proven"
    assert report.commits == 4


def test_a_claim_in_a_table_without_data_has_nothing_to_prove():
    report = History().commit({}).report()
    assert (report.verdict, report.partitions, report.commits) == ("proven", (), 0)


def test_compaction_is_proven_by_the_sum():
    """Files that span partitions: the bounds no longer say whose rows they hold."""
    history = whole().add({"added-records": "19", "deleted-records": "19"}, "replace")
    history.files = [DataFile("/big", 19, None, None)]
    report = history.report()
    assert report.verdict == "proven"
    assert {line.rows_in_files for line in report.partitions} == {None}


def test_a_compaction_that_lost_a_row_is_found():
    history = whole().add({"added-records": "18", "deleted-records": "19"}, "replace")
    history.files = [DataFile("/big", 18, None, None)]
    assert history.report().verdict != "proven"


def test_a_foreign_append_is_accounted_for():
    history = whole().add({"added-records": "100"})
    history.files.append(DataFile("/foreign", 100, None, None, nulls=100))
    assert history.report().verdict == "proven"


def test_rows_of_others_that_have_offsets_may_be_copies_of_ours():
    """INSERT INTO t SELECT * FROM t, compacted with the rest: whose they are, nobody can tell."""
    history = whole().add({"added-records": "19"})
    history.files = [DataFile("/big", 38, None, (0, 11))]
    assert history.report().verdict == "cannot_tell"
    history.files = [DataFile("/big", 38, None, (0, 11), nulls=19)]
    assert history.report().verdict == "proven"
    history.files = [DataFile("/big", 38, None, (0, 11), topics=("orders", "orders"))]
    assert history.report().verdict == "overlap"


def test_rows_of_others_in_a_file_of_one_partition_are_not_counted_as_ours():
    history = (
        whole()
        .add({"added-records": "4"})
        .add({"added-records": "9", "deleted-records": "9"}, "replace")
    )
    history.files[0] = replace(history.files[0], rows=history.files[0].rows + 4, nulls=4)
    report = history.report()
    assert (report.verdict, report.partitions[0].rows_in_files) == ("proven", 12)


def test_what_was_removed_may_have_been_theirs():
    """Somebody added rows and took them back; ours are all there, in a file of all partitions."""
    history = whole().add({"added-records": "5"}).add({"deleted-records": "5"}, "delete")
    history.files = [DataFile("/big", 19, None, (0, 11), topics=("orders", "orders"))]
    assert history.report().verdict == "proven"
    history.files = [DataFile("/big", 19, None, None)]
    assert history.report().verdict == "cannot_tell"


def test_a_foreign_snapshot_without_records_does_not_matter():
    assert whole().add({}).report().verdict == "proven"


def test_a_table_no_sink_wrote_to_has_no_report():
    assert audit(Evidence("db.t", [], files=[])) == []
    assert History().add({"added-records": "3"}).reports() == []
    assert whole().reports("another") == []


# ── found ────────────────────────────────────────────────────────────────────────────────────


def test_a_gap_is_found_with_its_exact_range():
    report = History().commit({A: (0, 5)}).commit({A: (7, 9)}).report()
    assert report.verdict == "gap"
    assert report.partitions[0].gaps == (Range(A, 5, 7),)


def test_a_gap_in_one_partition_does_not_hide_behind_the_others():
    report = History().commit({A: (0, 5), B: (0, 5)}).commit({A: (5, 9), B: (6, 9)}).report()
    assert report.verdict == "gap"
    assert [line.gaps for line in report.partitions] == [(), (Range(B, 5, 6),)]


def test_an_overlap_is_found_with_its_exact_range():
    report = History().commit({A: (0, 5)}).commit({A: (3, 9)}).report()
    assert report.verdict == "overlap"
    assert report.partitions[0].overlaps == (Range(A, 3, 5),)


def test_a_range_inside_another_is_an_overlap_of_its_own_length():
    report = History().commit({A: (0, 9)}).commit({A: (2, 4)}).commit({A: (9, 10)}).report()
    assert report.partitions[0].overlaps == (Range(A, 2, 4),)
    assert report.partitions[0].gaps == ()


def test_a_shifted_range_is_a_gap_and_an_overlap():
    report = History().commit({A: (0, 5)}).commit({A: (6, 10)}).commit({A: (9, 12)}).report()
    assert report.verdict == "gap"
    assert report.partitions[0].gaps == (Range(A, 5, 6),)
    assert report.partitions[0].overlaps == (Range(A, 9, 10),)


def test_a_file_that_is_in_the_table_twice_is_found():
    history = whole()
    history.files.append(history.files[0])
    report = history.report()
    assert report.verdict != "proven"
    assert f"1 data files are in the table twice: {history.files[0].path}" in str(
        report.findings[0]
    )


@pytest.mark.parametrize("by", [-1, 1])
def test_manifests_that_hold_other_rows_than_the_ledger_says_are_found(by: int):
    history = whole()
    history.files[0] = replace(history.files[0], rows=history.files[0].rows + by)
    report = history.report()
    assert report.verdict == {-1: "unaccounted", 1: "overlap"}[by]
    assert report.partitions[0].ranges(report.verdict) == (Range(A, 0, 5),)
    assert report.partitions[1].verdict == "proven"


def test_rows_that_moved_between_partitions_are_found_though_the_sum_is_right():
    history = whole()
    history.files[0] = replace(history.files[0], rows=history.files[0].rows + 1)
    history.files[1] = replace(history.files[1], rows=history.files[1].rows - 1)
    assert [line.verdict for line in history.report().partitions] == ["overlap", "unaccounted"]


def test_a_missing_file_is_found():
    history = whole()
    del history.files[1]
    report = history.report()
    assert report.verdict == "gap"
    assert [line.gaps for line in report.partitions] == [(), (Range(B, 0, 3),)]


def test_an_empty_table_that_should_hold_rows_is_found():
    history = whole()
    history.files = []
    report = history.report()
    assert [line.gaps for line in report.partitions] == [
        (Range(A, 0, 12),),
        (Range(B, 0, 7),),
    ]


def test_a_foreign_copy_of_our_rows_is_found():
    """INSERT INTO t SELECT * FROM t: the sum is announced, the partition has its rows twice."""
    history = whole().add({"added-records": "19"})
    history.files += [replace(file, path=file.path + "-copy") for file in history.files]
    assert history.report().verdict == "overlap"


@pytest.mark.parametrize("operation", ["delete", "overwrite"])
def test_rows_that_a_foreign_commit_removed_are_unaccounted_for(operation: str):
    history = whole().add({"deleted-records": "5"}, operation)
    history.files = history.files[1:]
    report = history.report()
    assert report.verdict == "gap"
    assert report.partitions[0].gaps == (Range(A, 0, 5),)


def test_a_foreign_delete_that_later_appends_make_up_for_is_still_found():
    history = whole().add({"deleted-records": "5"}, "delete").add({"added-records": "5"})
    history.files[0] = replace(history.files[0], partition=None, offsets=None)
    assert history.report().verdict == "unaccounted"


def rewritten(**change: Any) -> History:
    """UPDATE of rows in one file: another file, as many rows, the same bounds."""
    history = whole()
    foreign = replace(history.files[0], path="/theirs", **change)
    history.files[0] = foreign
    return history.add({"deleted-records": "5", "added-records": "5"}, "overwrite", foreign)


def test_rows_that_another_writer_rewrote_are_cannot_tell():
    """One offset may be there twice and another not at all: `UPDATE SET _offset = 6 WHERE …`."""
    report = rewritten().report()
    assert report.verdict == "cannot_tell"
    assert [finding.ranges for finding in report.findings] == [(Range(A, 0, 5),)]
    assert "snapshot 5, overwrite" in str(report.findings[0])
    assert "--deep" in str(report.findings[0])
    assert [line.verdict for line in report.partitions] == ["cannot_tell", "proven"]
    assert json_values(report)["partitions"][0]["cannot_tell"] == [[0, 5]]


def test_rows_that_another_writer_rewrote_are_decided_by_reading_them():
    history = rewritten()
    every = {A: range(12), B: range(7)}
    twice = {A: [0, 1, 1, 3, *range(4, 12)], B: range(7)}
    assert deep_report(history, every).verdict == "proven"
    assert deep_report(history, twice).verdict == "overlap"


def deep_report(history: History, offsets: Mapping[Partition, Sequence[int]]) -> TableReport:
    rows = [
        {"topic": p.topic, "partition": p.number, "offset": o}
        for p, held in offsets.items()
        for o in held
    ]
    evidence = Evidence(
        "db.t",
        history.snapshots[::-1],
        files=history.files,
        brought=history.brought.__getitem__,
        deep=pa.Table.from_pylist(rows),
    )
    (report,) = audit(evidence)
    return report


def test_a_row_deleted_and_its_neighbour_inserted_again_is_cannot_tell():
    """DELETE offset 2, by a file written anew; then INSERT a second 3: as many rows as before."""
    history = whole()
    left = replace(history.files[0], path="/left", rows=4)
    again = DataFile("/again", 1, A, (3, 3))
    history.files = [left, again, *history.files[1:]]
    history.add({"deleted-records": "5", "added-records": "4"}, "overwrite", left)
    history.add({"added-records": "1"}, "append", again)
    report = history.report()
    assert (report.verdict, report.partitions[0].ranges("cannot_tell")) == (
        "cannot_tell",
        (Range(A, 0, 5),),
    )


def test_it_is_cannot_tell_also_when_a_compaction_came_after_it():
    history = rewritten()
    one = DataFile("/compacted", 12, A, (0, 11))
    history.files = [one, *(f for f in history.files if f.partition == B)]
    history.add({"added-records": "12", "deleted-records": "12"}, "replace", one)
    report = history.report()
    assert (report.verdict, report.partitions[0].ranges("cannot_tell")) == (
        "cannot_tell",
        (Range(A, 0, 12),),
    )


def test_a_foreign_compaction_is_believed_where_counts_and_bounds_agree():
    history = whole()
    one = DataFile("/compacted", 12, A, (0, 11))
    history.files = [one, *(f for f in history.files if f.partition == B)]
    history.add({"added-records": "12", "deleted-records": "12"}, "replace", one)
    assert history.report().verdict == "proven"


def test_what_a_sink_wrote_itself_is_proven_whatever_others_did_beside_it():
    """A delete took a foreign file; an overwrite wrote another partition anew."""
    history = rewritten()
    own = "/frazil-s-1-7-00000000-0000-0000-0000-000000000000.parquet"
    for at, file in enumerate(history.files):
        if file.partition == A:
            history.files[at] = replace(file, path=own + str(at), sequence=0)
    assert history.report().verdict == "proven"


def test_rows_of_others_that_came_and_went_leave_the_sinks_provable():
    foreign = DataFile("/theirs", 5, Partition("other", 0), (0, 11), topics=("other", "other"))
    history = whole().add({"added-records": "5"}, "append", foreign)
    history.add({"deleted-records": "5"}, "delete")
    assert history.report().verdict == "proven"


@pytest.mark.parametrize("operation", ["overwrite", "delete"])
def test_a_commit_of_others_that_counts_nothing_may_have_done_anything(operation: str):
    """Iceberg asks for the operation alone in a summary."""
    history = whole()
    history.add({}, operation, history.files[0])
    assert history.report().verdict == "cannot_tell"


def test_unknown_rows_of_others_put_the_whole_table_in_doubt():
    history = rewritten()
    evidence = Evidence("db.t", history.snapshots[::-1], files=history.files)
    (report,) = audit(evidence)
    assert report.verdict == "cannot_tell"
    assert report.partitions[1].ranges("cannot_tell") == (Range(B, 0, 7),)


@pytest.mark.parametrize("operation", ["delete", "overwrite"])
def test_rows_that_a_foreign_merge_on_read_delete_hides_are_unaccounted_for(operation: str):
    """DELETE FROM t with position deletes: no data file changes, no deleted-records is said."""
    summary = {"added-delete-files": "1", "added-position-deletes": "5"}
    history = whole().add(summary, operation)
    history.deletes = 1
    assert history.report().verdict == "unaccounted"


def test_rows_that_a_foreign_overwrite_replaced_by_as_many_are_unaccounted_for():
    history = whole().add({"deleted-records": "19", "added-records": "19"}, "overwrite")
    history.files = [DataFile("/theirs", 19, None, None)]
    assert history.report().verdict == "unaccounted"


def test_files_whose_offsets_are_not_the_ledgers_are_found():
    history = History().commit({A: (0, 5)})
    history.files = [replace(history.files[0], offsets=(1, 5))]
    assert history.report().verdict != "proven"


def test_one_batch_twice_and_another_not_at_all_is_found_though_the_rows_add_up():
    history = History().commit({A: (0, 5)}).commit({A: (5, 10)})
    history.files[1] = replace(history.files[0], path="/other")
    assert history.report().verdict != "proven"


# ── cannot tell ──────────────────────────────────────────────────────────────────────────────


def expired(history: History, keep: int) -> History:
    history.snapshots = history.snapshots[-keep:]
    return history


def test_an_expired_history_is_not_called_proven():
    report = expired(whole(), 1).report()
    assert report.verdict != "proven"
    assert any("cannot tell: snapshots before" in str(finding) for finding in report.findings)
    assert [str(line.range) for line in report.partitions] == [
        "orders[0] [9, 12)",
        "orders[1] [3, 7)",
    ]


def test_an_expired_history_is_reported_instead_of_blaming_the_rows():
    assert expired(whole(), 2).report().verdict == "cannot_tell"


def test_a_gap_in_what_is_left_of_an_expired_history_is_a_gap():
    history = expired(History().commit({A: (0, 5)}).commit({A: (5, 6)}).commit({A: (8, 9)}), 2)
    assert history.report().verdict == "gap"


def test_two_sinks_in_one_table_are_not_distinguished():
    history = whole().commit({A: (0, 5)}, "other")
    reports = history.reports()
    assert [(r.sink, r.verdict) for r in reports] == [
        ("other", "cannot_tell"),
        ("s", "cannot_tell"),
    ]
    assert [(r.sink, r.written) for r in history.reports("s")] == [("s", 19)]


def test_the_gap_of_one_sink_is_not_filled_by_another():
    history = History().commit({A: (0, 5)}).commit({A: (5, 7)}, "other").commit({A: (7, 9)})
    assert {r.sink: r.verdict for r in history.reports()} == {"other": "cannot_tell", "s": "gap"}


def test_a_sink_that_only_claimed_does_not_disturb_the_proof():
    history = whole().commit({}, "other")
    assert {r.sink: r.verdict for r in history.reports()}["s"] == "proven"


def test_the_report_is_plain_json():
    values = json.loads(
        json.dumps(json_values(History().commit({A: (0, 5)}).commit({A: (7, 9)}).report()))
    )
    assert values["verdict"] == "gap"
    assert values["partitions"] == [
        {
            "topic": "orders",
            "partition": 0,
            "verdict": "gap",
            "start": 0,
            "end": 9,
            "written": 7,
            "rejected": 0,
            "skipped": 0,
            "invisible": 0,
            "merged": 0,
            "elsewhere": 0,
            "lost": 0,
            "rows_in_files": 7,
            "gaps": [[5, 7]],
            "overlaps": [],
            "unaccounted": [],
            "cannot_tell": [],
        }
    ]


# ── several tables ───────────────────────────────────────────────────────────────────────────


def test_batches_that_held_nothing_for_a_table_are_accounted_for():
    other = {A: OutcomeCounts(0, rejected=1, skipped=2, elsewhere=4)}
    report = History().commit({A: (0, 10)}, outcomes=other).report()
    assert report.verdict == "proven"
    assert json_values(report)["partitions"][0]["elsewhere"] == 4
    assert report.written == 3


FOUR = {A: OutcomeCounts(0, rejected=4)}


def named(sink: str, batch: int) -> str:
    return f"/data/frazil-{sink}-1-{batch}-{uuid.uuid4()}.parquet"


def replayed(history: History, rows: int, at: tuple[int, int], batch: int = 0) -> History:
    """A batch of dead letters of sink `s`, written by the sink that replays them."""
    history.commit({BATCHES: (batch, batch + 1)}, "s.replay", rows=rows)
    history.files[-1] = DataFile(named("s.replay", batch), rows, A, at)
    return history


def test_replayed_dead_letters_are_counted_in_and_batches_of_replays_are_proven():
    history = whole().commit({A: (12, 20), B: (7, 9)}, outcomes={A: OutcomeCounts(0, rejected=3)})
    history.files = [replace(f, path=named("s", i)) for i, f in enumerate(history.files)]
    own, replay = replayed(history, 3, (13, 17)).reports()
    assert (own.sink, own.verdict, own.proves) == ("s", "proven", "records")
    assert [line.rows_in_files for line in own.partitions] == [
        17,
        9,
    ]  # names tell whose rows they are
    assert (replay.sink, replay.verdict, replay.proves) == ("s.replay", "proven", "batches")
    assert replay.written == 3


def test_dead_letters_of_a_time_before_the_table_lie_outside_its_ranges():
    history = replayed(History().commit({A: (100, 110)}), 2, (5, 8))
    history.files[0] = replace(history.files[0], path=named("s", 0))
    assert {report.verdict for report in history.reports()} == {"proven"}


def test_a_replayed_dead_letter_too_many_is_found_by_both():
    history = replayed(History().commit({A: (0, 10)}, outcomes=FOUR), 2, (3, 6))
    history.files[-1] = replace(history.files[-1], rows=3)
    assert {report.verdict for report in history.reports()} == {"unaccounted"}


def test_dead_letters_that_were_replayed_twice_are_found_though_the_ledger_says_so_too():
    other = {A: OutcomeCounts(0, rejected=2)}
    history = replayed(History().commit({A: (0, 10)}, outcomes=other), 2, (4, 5))
    assert {report.verdict for report in history.reports()} == {"proven"}
    twice = replayed(history, 2, (4, 5), batch=1)
    assert {report.sink: report.verdict for report in twice.reports()}["s"] == "overlap"


def test_a_batch_of_a_replay_that_is_missing_or_there_twice_is_found():
    history = replayed(History().commit({A: (0, 10)}, outcomes=FOUR), 1, (3, 3))
    history = replayed(history, 1, (4, 4), batch=2)
    assert {r.sink: r.verdict for r in history.reports()} == {"s": "proven", "s.replay": "gap"}


def test_another_sink_that_only_sounds_alike_is_no_companion():
    history = whole().commit({A: (0, 3)}, "t.replay")
    assert {r.verdict for r in history.reports()} == {"cannot_tell"}


@dataclass
class IndexOnly:
    """The index, as far as the audit looks at it."""

    entry: LedgerEntry | None
    properties: dict[str, str] = field(default_factory=dict)

    def history(self, branch: str) -> Iterator[Snapshot]:
        if self.entry is not None:
            yield Snapshot(1, None, 1, 1, "append", self.entry.summary())

    def tagged(self, tag: str) -> Snapshot | None:
        return None


def test_the_index_knows_the_tables_of_a_sink_few_or_many():
    few = entry({A: (0, 1)}, tables={"db.a": "1"})
    assert known_tables(IndexOnly(few), "s") == {"db.a": "1"}
    assert known_tables(IndexOnly(few), "other") == {}
    assert known_tables(IndexOnly(None), "s") == {}
    many = entry({A: (0, 1)}, tables="frazil.tables.x")
    properties = {"frazil.tables.x": '{"db.b": "2"}'}
    assert known_tables(IndexOnly(many, properties), "s") == {"db.b": "2"}
    with pytest.raises(IdentityMismatch, match="lacks its property"):
        known_tables(IndexOnly(many), "s")


# ── any history ──────────────────────────────────────────────────────────────────────────────


@st.composite
def chains(draw: st.DrawFn) -> History:
    """A clean history of a sink: partitions come and go on, claims and foreign appends between."""
    history = History()
    position = {
        Partition("orders", n): draw(st.integers(0, 50)) for n in range(draw(st.integers(1, 4)))
    }
    for _ in range(draw(st.integers(2, 8))):
        kind = draw(st.sampled_from(["data", "data", "data", "claim", "foreign"]))
        if kind == "claim":
            history.commit({p: (o, o) for p, o in position.items()})
        elif kind == "foreign":
            rows = draw(st.integers(0, 9))
            history.add({"added-records": str(rows)})
            foreign = DataFile(f"/x{len(history.files)}", rows, None, None, nulls=rows)
            history.files += [foreign] * bool(rows)
        else:
            ranges = {p: (o, o + draw(st.integers(0, 20))) for p, o in position.items()}
            outcomes = {}
            for p, (start, end) in ranges.items():
                lost = draw(st.integers(0, max(0, end - start - 1)))  # at least one row is written
                outcomes[p] = OutcomeCounts(0, invisible=lost)
            history.commit(ranges, outcomes=outcomes)
            position = {p: end for p, (_, end) in ranges.items()}
    return history


def data_entries(history: History) -> list[int]:
    indices = []
    for i, snapshot in enumerate(history.snapshots):
        if '"read":0' not in snapshot.summary.get("frazil.counts", '"read":0'):
            indices.append(i)
    return indices


def linked(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """As if the chain had always been this one."""
    return [replace(snapshot, id=i + 1, parent=i or None) for i, snapshot in enumerate(snapshots)]


quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(chains())
def test_a_clean_chain_is_always_proven(history: History):
    for report in history.reports():
        assert report.verdict == "proven"


@quick
@given(chains(), st.data())
def test_an_entry_that_is_dropped_repeated_or_shifted_is_always_found(
    history: History, data: st.DataObject
):
    """The files stay as they are. A shift shows in the ledger where it has neighbours."""
    numbers = data_entries(history)
    assume(len(numbers) > 1)
    at = data.draw(st.sampled_from(numbers))
    fault = data.draw(st.sampled_from(["drop", "repeat", "shift"]))
    snapshots = list(history.snapshots)
    if fault == "drop":
        del snapshots[at]
    elif fault == "repeat":
        snapshots.insert(data.draw(st.integers(at, len(snapshots))), snapshots[at])
    else:
        whole_entry = parse(snapshots[at].summary)
        assert whole_entry is not None
        others = [e for i in numbers if i != at and (e := parse(history.snapshots[i].summary))]
        touched = {r.partition for e in others for r in e.ranges}
        moved = [r.partition for r in whole_entry.ranges if r.partition in touched]
        assume(moved)
        which = data.draw(st.sampled_from(moved))
        by = data.draw(st.integers(1, 5))
        shifted = replace(
            whole_entry,
            begin=Cut({**whole_entry.begin, which: whole_entry.begin[which] + by}),
            end=Cut({**whole_entry.end, which: whole_entry.end[which] + by}),
        )
        snapshots[at] = replace(snapshots[at], summary=shifted.summary())
    history.snapshots = linked(snapshots)
    assert [r.verdict for r in history.reports()] != ["proven"]


# ── a DataFrame's sink ───────────────────────────────────────────────────────────────────────


def frames() -> History:
    """Two batches of a query that merges records: 10 became 3 rows, then 4 became 2."""
    merged = [{A: OutcomeCounts(merged=count)} for count in (10, 4)]
    history = History()
    history.commit({A: (0, 10), BATCHES: (0, 1)}, outcomes=merged[0], rows=3, source=("p0", "p1"))
    history.commit({A: (10, 14), BATCHES: (1, 2)}, outcomes=merged[1], rows=2, source=("p1", "p2"))
    history.files = [DataFile("/one", 3, None, None), DataFile("/two", 2, None, None)]
    return history


def test_rows_of_several_records_prove_batches():
    report = frames().report()
    assert (report.verdict, report.proves, report.written) == ("proven", "batches", 5)


def test_a_batch_counted_beside_whole_records_still_proves_records():
    history = History().commit({A: (0, 5), BATCHES: (0, 1)}, source=("p0", "p1"))
    history.files = [file for file in history.files if file.partition == A]
    report = history.report()
    assert (report.verdict, report.proves) == ("proven", "records")


def test_one_batch_that_proves_less_makes_the_whole_verdict_one_of_batches():
    history = frames()
    files = list(history.files)
    history.commit({A: (14, 20), BATCHES: (2, 3)}, source=("p2", "p3"))
    history.files = [*files, DataFile("/three", 6, A, (14, 19))]
    report = history.report()
    assert (report.verdict, report.proves, report.written) == ("proven", "batches", 11)


def test_a_row_too_many_or_too_few_is_found_without_offsets_too():
    for rows in (1, 3):
        history = frames()
        history.files[1] = DataFile("/two", rows, None, None)
        assert history.report().verdict == "unaccounted"


def test_a_batch_that_is_missing_or_there_twice_is_found_by_its_number():
    more = {A: OutcomeCounts(merged=6)}
    gap = frames().commit({A: (14, 20), BATCHES: (3, 4)}, outcomes=more, source=("p2", "p3"))
    assert gap.report().verdict == "gap"
    twice = frames().commit({A: (14, 20), BATCHES: (1, 2)}, outcomes=more, source=("p2", "p3"))
    assert twice.report().verdict == "overlap"


def test_batches_that_count_on_but_do_not_join_are_found_by_their_places():
    """The numbers go on; the source was elsewhere in between."""
    history = frames()
    history.add(entry({BATCHES: (2, 3)}, source=("p9", "p10")).summary())
    report = history.report()
    assert report.verdict == "gap"
    assert "begins at p9" in str(report.findings[0])
    assert "ends at p2" in str(report.findings[0])


def test_a_claim_between_two_batches_does_not_break_the_chain():
    history = frames()
    history.add(entry({A: (14, 14), BATCHES: (2, 2)}, source=("p2", "p2")).summary())
    history.add(entry({A: (14, 14), BATCHES: (2, 3)}, source=("p2", "p3")).summary())
    assert history.report().verdict == "proven"


# ── the index ────────────────────────────────────────────────────────────────────────────────


def indexed(history: History) -> pa.Table:
    """The rows that a sink's index has of such a history, with one batch in each commit."""
    rows = []
    for number, snapshot in enumerate(history.snapshots):
        one = parse(snapshot.summary)
        for span in one.ranges if one else ():
            assert one is not None
            counts = one.counts(span.partition)
            start = span.start + counts.elsewhere  # batches that held nothing for it came before
            rows.append(
                {
                    "sink": one.sink,
                    "batch": number,
                    "table_name": "db.t",
                    "topic": span.partition.topic,
                    "partition": span.partition.number,
                    "start_offset": start,
                    "end_offset": span.end,
                    "written": counts.written,
                    "rejected": counts.rejected,
                    "skipped": counts.skipped,
                    "invisible": counts.invisible,
                    "merged": counts.merged,
                    "epoch": one.epoch,
                    "commit_id": one.commit_ids[-1],
                    "snapshot_id": snapshot.id,
                }
            )
    return pa.Table.from_pylist(rows)


def numbered() -> History:
    """As `whole`, where every commit has its own id and number."""
    history = History()
    for number, (a, b) in enumerate(
        [((0, 0), (0, 0)), ((0, 5), (0, 3)), ((5, 9), (3, 3)), ((9, 12), (3, 7))]
    ):
        history.commit({A: a, B: b}, commit_ids=(f"c{number}",), batches=(number, number))
    return history


POSITION = Cut({A: 12, B: 7})


def heard(history: History, rows: pa.Table | None = None, **more: Any) -> TableReport:
    rows = indexed(history) if rows is None else rows
    given = {
        "files": history.files,
        "index": {"s": parsed_rows(rows)},
        "positions": {"s": POSITION},
        **more,
    }
    (only,) = audit(Evidence("db.t", history.snapshots[::-1], **given))
    return only


def changed(rows: pa.Table, at: int, **values: Any) -> pa.Table:
    listed = rows.to_pylist()
    listed[at].update(values)
    return pa.Table.from_pylist(listed)


def test_three_sources_that_agree_prove_it():
    report = heard(numbered())
    assert (report.verdict, report.findings) == ("proven", ())
    assert report.examined == ("ledger", "index", "manifests")


def test_what_was_expired_is_proven_by_the_index_and_the_manifests():
    history = numbered()
    rows = indexed(history)
    report = heard(expired(history, 1), rows)
    assert report.verdict == "proven", report
    assert [str(line.range) for line in report.partitions] == [
        "orders[0] [0, 12)",
        "orders[1] [0, 7)",
    ]
    assert (report.written, report.commits) == (19, 1)


def test_of_what_was_expired_too_a_missing_file_is_found_with_its_range():
    history = numbered()
    rows = indexed(history)
    del history.files[0]
    report = heard(expired(history, 1), rows)
    assert report.verdict == "gap"
    assert [line.gaps for line in report.partitions] == [(Range(A, 0, 5),), ()]


def test_only_the_tag_is_left_and_nothing_is_missing():
    """Compacted, and then expired down to the compaction: the tag still names the last entry."""
    history = numbered()
    rows, tagged = indexed(history), history.snapshots[-1]
    history.add({"added-records": "19", "deleted-records": "19"}, "replace")
    history.files = [DataFile("/big", 19, None, (0, 11), topics=("orders", "orders"))]
    report = heard(expired(history, 1), rows, tagged_snapshots={"s": tagged})
    assert report.verdict == "proven", report


@pytest.mark.parametrize(
    "change",
    [
        {"written": 4},
        {"written": 4, "rejected": 1},
        {"rejected": 1},
        {"start_offset": 1},
        {"end_offset": 4},
        {"end_offset": 6},
        {"commit_id": "c9"},
        {"snapshot_id": 3},
        {"batch": 2},
        {"epoch": 7},
        {"partition": 1},
        {"topic": "others"},
    ],
)
def test_an_index_row_that_was_edited_is_found(change: dict[str, Any]):
    history = numbered()
    report = heard(history, changed(indexed(history), 0, **change))
    assert report.verdict != "proven"
    named = {r.partition for finding in report.findings for r in finding.ranges}
    assert named <= {A, B, Partition("others", 0)}


@pytest.mark.parametrize(
    "change",
    [{"written": 4}, {"rejected": 1}, {"written": 6, "rejected": -2}, {"end_offset": -5}],
)
def test_an_index_row_whose_outcomes_do_not_add_up_is_named(change: dict[str, Any]):
    history = numbered()
    report = heard(history, changed(indexed(history), 0, **change))
    assert any(
        "the index's row of" in str(f) and "does not add up" in str(f) for f in report.findings
    )


def test_an_entry_that_wrote_less_than_nothing_is_named():
    outcomes = {A: OutcomeCounts(0, rejected=5)}
    assert History().commit({A: (0, 5)}, outcomes=outcomes).report().verdict == "proven"
    outcomes = {A: OutcomeCounts(0, rejected=6)}
    report = History().commit({A: (0, 5)}, outcomes=outcomes).report()
    assert report.verdict == "unaccounted"
    assert any("more records of" in str(finding) for finding in report.findings)


def test_an_index_row_that_is_missing_is_named():
    history = numbered()
    report = heard(history, indexed(history).slice(1))
    assert report.verdict == "unaccounted"
    assert [line.verdict for line in report.partitions] == ["unaccounted", "proven"]
    assert report.partitions[0].ranges("unaccounted") == (Range(A, 0, 5),)


def test_an_index_row_that_is_there_twice_is_named():
    history = numbered()
    rows = indexed(history)
    report = heard(history, pa.concat_tables([rows, rows.slice(2, 1)]))
    assert report.verdict == "overlap"
    assert [line.overlaps for line in report.partitions] == [(Range(A, 5, 9),), ()]


def test_what_the_index_does_not_know_yet_is_no_fault():
    """The index is committed last: a table may be a commit ahead of it."""
    history = numbered()
    rows = indexed(history)
    behind = rows.filter([row["batch"] < 3 for row in rows.to_pylist()])
    assert heard(history, behind, positions={"s": Cut({A: 9, B: 3})}).verdict == "proven"
    assert heard(history, behind).verdict == "unaccounted"


def test_a_table_that_was_rolled_back_is_found_by_the_index_and_by_its_tag():
    history = numbered()
    rows, tagged = indexed(history), history.snapshots[-1]
    history.snapshots.pop()
    history.files = history.files[:-2]
    report = heard(history, rows)
    assert report.verdict == "gap"
    assert [line.gaps for line in report.partitions] == [(Range(A, 9, 12),), (Range(B, 3, 7),)]
    evidence = Evidence("db.t", history.snapshots[::-1], {"s": tagged}, history.files)
    (report,) = audit(evidence)
    assert "rolled back" in str(report.findings[0])


def test_a_table_rolled_back_behind_all_entries_is_found():
    history = numbered()
    (report,) = audit(Evidence("db.t", [], files=[], index={"s": parsed_rows(indexed(history))}))
    assert report.verdict == "gap"


def test_batches_that_held_nothing_for_a_table_have_rows_of_the_stream():
    """Expired but for the last entry: between rows of the table lie rows of the whole stream."""
    history = History()
    history.commit({A: (0, 5)}, commit_ids=("c0",))
    history.commit(
        {A: (5, 20)}, commit_ids=("c1",), batches=(1, 1), outcomes={A: OutcomeCounts(elsewhere=7)}
    )
    history.files = [DataFile("/one", 5, A, (0, 4)), DataFile("/two", 8, A, (12, 19))]
    rows = indexed(history)
    assert rows["start_offset"].to_pylist() == [0, 12]
    stream = changed(rows, 0, start_offset=5, end_offset=12, written=7, table_name="*").slice(0, 1)
    position = {"s": Cut({A: 20})}
    whole = heard(expired(history, 1), rows, stream={"s": parsed_rows(stream)}, positions=position)
    assert whole.verdict == "proven", whole
    assert whole.partitions[0].counts == OutcomeCounts(13, elsewhere=7)
    short = changed(stream, 0, end_offset=11, written=6)
    report = heard(history, rows, stream={"s": parsed_rows(short)}, positions=position)
    assert report.partitions[0].gaps == (Range(A, 11, 12),)


def test_an_entry_that_says_other_counts_than_its_ranges_or_its_snapshot_is_found():
    history = numbered()
    summary = dict(history.snapshots[1].summary)
    more = {
        **summary,
        "frazil.counts": summary["frazil.counts"].replace('"written":8', '"written":9'),
    }
    assert more != summary
    for wrong in (more, {**summary, "added-records": "9"}):
        history.snapshots[1] = replace(history.snapshots[1], summary=wrong)
        report = history.report()
        assert report.verdict == "unaccounted"
        assert "batches 1..1" in str(report.findings[0])


# ── the rows themselves ──────────────────────────────────────────────────────────────────────


def rows_of(*offsets: tuple[Partition, Sequence[int]]) -> pa.Table:
    listed = [(p.topic, p.number, offset) for p, numbers in offsets for offset in numbers]
    return pa.table(list(zip(*listed, strict=True)), names=["topic", "partition", "offset"])


def test_rows_that_are_all_there_once_are_proven_behind_delete_files_too():
    deep = rows_of((A, range(12)), (B, range(7)))
    report = heard(numbered(), deep=deep, deletes=2)
    assert (report.verdict, report.examined[-1]) == ("proven", "rows")


@pytest.mark.parametrize(
    ("kind", "offsets", "where"),
    [
        ("gap", [0, 1, 3, 4, *range(5, 12)], Range(A, 0, 5)),
        ("overlap", [0, 1, 1, 3, 4, *range(5, 12)], Range(A, 1, 2)),
        ("overlap", [*range(12), 11], Range(A, 11, 12)),
    ],
)
def test_rows_that_are_missing_or_there_twice_are_found_by_reading_them(
    kind: str, offsets: list[int], where: Range
):
    """What metadata cannot tell: counts and bounds are as they should be."""
    report = heard(numbered(), deep=rows_of((A, offsets), (B, range(7))))
    assert [line.verdict for line in report.partitions][1] == "proven"
    assert where in report.partitions[0].ranges(kind)


def test_rows_that_no_sink_wrote_are_found_by_reading_them():
    report = heard(numbered(), deep=rows_of((A, [*range(12), 99]), (B, range(7))))
    assert report.verdict == "unaccounted"


def test_rows_of_batches_may_carry_offsets():
    """An exploded list: several rows of one record, each with its offset."""
    history = frames()
    history.files = [
        replace(file, offsets=(0, 9), topics=("orders", "orders")) for file in history.files
    ]
    assert history.report().verdict == "proven"
    history.files[0] = replace(history.files[0], rows=history.files[0].rows - 1)
    assert history.report().verdict == "unaccounted"


# ── upserts ──────────────────────────────────────────────────────────────────────────────────


def upserted() -> History:
    """Two batches of ten records over six keys each; of the second, one deletes."""
    history = History().commit({A: (0, 0)})
    for start, written in ((0, 6), (10, 5)):
        one = entry(
            {A: (start, start + 10)},
            outcomes={A: OutcomeCounts(merged=10 - written)},
            keys=6,
            commit_ids=(f"c{start}",),
            batches=(1 + start // 10,) * 2,
        )
        history.files.append(DataFile(f"/f-{start}", written, None, (start, start + 9)))
        history.deletes += 1
        history.add(
            {
                **one.summary(),
                "added-records": str(written),
                "added-delete-files": "1",
                "added-equality-deletes": "6",
            },
            "overwrite",
        )
    return history


def groups_upserted() -> History:
    """Two batches of a query: ten records became three rows, then four became two. The rows carry
    offsets, several the same, so no offset has a row of its own."""
    history = History()
    for number, (start, end, rows) in enumerate([(0, 10, 3), (10, 14, 2)]):
        one = entry(
            {A: (start, end), BATCHES: (number, number + 1)},
            outcomes={A: OutcomeCounts(merged=end - start)},
            rows=rows,
            keys=rows + 1,
            source=(f"p{number}", f"p{number + 1}"),
            commit_ids=(f"c{number}",),
            batches=(number, number),
        )
        history.files.append(DataFile(f"/g-{number}", rows, A, (start, end - 1)))
        history.deletes += 1
        added = {"added-records": str(rows), "added-equality-deletes": str(rows + 1)}
        history.add({**one.summary(), **added, "added-delete-files": "1"}, "overwrite")
    return history


def test_rows_of_groups_in_an_upsert_table_prove_batches():
    report = groups_upserted().report()
    assert (report.verdict, report.proves, report.written) == ("proven", "batches", 5)
    assert {line.range.partition: line.counts.merged for line in report.partitions}[A] == 14


def test_damage_to_rows_of_groups_in_an_upsert_table_is_found():
    files = groups_upserted().files
    for damaged, verdict in (
        (files[1:], "unaccounted"),
        ([*files, DataFile("/more", 1, A, (3, 3))], "unaccounted"),
        ([*files, files[0]], "overlap"),
    ):
        history = groups_upserted()
        history.files = damaged
        assert history.report().verdict == verdict
    history = groups_upserted()
    summary = {**history.snapshots[1].summary, "added-equality-deletes": "2"}
    history.snapshots[1] = replace(history.snapshots[1], summary=summary)
    assert history.report().verdict == "unaccounted"
    history = groups_upserted()
    del history.snapshots[0]
    assert history.report().verdict != "proven"
    summary = {"deleted-records": "1"}
    assert groups_upserted().add(summary, "delete").report().verdict == "unaccounted"


def test_of_an_upsert_table_changes_are_proven_though_its_deletes_hide_rows():
    report = upserted().report()
    assert (report.verdict, report.proves) == ("proven", "changes")
    assert report.partitions[0].counts == OutcomeCounts(11, merged=9)


def test_the_remaining_claim_shows_an_upsert_table_whose_batches_were_expired():
    history = upserted()
    rows = indexed(history)
    history.files, history.deletes = [DataFile("/g", 7, None, (0, 19))], 0
    history.add({"frazil.compact": "u", "added-records": "7", "deleted-records": "11"}, "replace")
    history.add(
        {**entry({A: (20, 20)}, keys=0, commit_ids=("later",)).summary(), "frazil.epoch": "2"}
    )
    report = heard(expired(history, 1), rows)
    assert (report.findings, report.proves) == ((), "changes")
    history.files[0] = replace(history.files[0], rows=12)
    assert heard(history, rows).verdict != "proven", "more than were written"


def test_a_delete_file_that_is_not_what_the_entry_says_is_found():
    history = upserted()
    summary = {**history.snapshots[-1].summary, "added-equality-deletes": "5"}
    history.snapshots[-1] = replace(history.snapshots[-1], summary=summary)
    report = history.report()
    assert report.verdict == "unaccounted"
    assert "deletes 6 keys" in str(report.findings[0])


def test_rows_that_are_missing_or_too_many_in_an_upsert_table_are_found():
    history = upserted()
    lost, kept = history.files.copy(), history.files.copy()
    history.files = lost[1:]
    assert history.report().verdict == "unaccounted"
    history.files = [*kept, DataFile("/more", 3, None, (0, 9))]
    assert history.report().verdict == "unaccounted"
    history.files = [*kept, kept[0]]
    assert history.report().verdict == "overlap"


def test_the_sinks_own_compaction_takes_rows_away_and_that_is_well():
    history = upserted()
    history.files, history.deletes = [DataFile("/g", 7, None, (0, 19))], 0
    history.add({"frazil.compact": "u", "added-records": "7", "deleted-records": "11"}, "replace")
    assert history.report().verdict == "proven"
    history.add({"frazil.compact": "v", "added-records": "9", "deleted-records": "7"}, "replace")
    assert history.report().verdict == "overlap"


@pytest.mark.parametrize(
    ("operation", "summary", "verdict"),
    [
        ("delete", {"deleted-records": "2"}, "unaccounted"),
        ("delete", {"added-delete-files": "1", "added-position-deletes": "1"}, "unaccounted"),
        ("append", {"added-records": "2"}, "cannot_tell"),
    ],
)
def test_what_others_do_to_an_upsert_table_is_reported(
    operation: str, summary: dict[str, str], verdict: str
):
    assert upserted().add(summary, operation).report().verdict == verdict


def test_a_gap_in_the_ledger_of_an_upsert_table_is_found():
    history = upserted()
    del history.snapshots[1]
    report = history.report()
    assert "gap" in {finding.kind for finding in report.findings}


def bridged() -> tuple[History, dict[str, Any]]:
    """Of an upsert table a foreign compaction alone is left; the tag names the last batch."""
    history = upserted()
    rows = indexed(history)
    tagged = history.snapshots[-1]
    history.files, history.deletes = [DataFile("/g", 6, None, (0, 9))], 0
    history.add({"added-records": "6", "deleted-records": "6"}, "replace")
    history.add({"added-records": "6", "deleted-records": "6"}, "replace")
    return expired(history, 1), {"rows": rows, "tagged_snapshots": {"s": tagged}}


def test_of_an_upsert_table_that_was_rolled_back_compacted_and_expired_nothing_is_proven():
    history, given = bridged()
    report = heard(history, **given)
    assert report.verdict == "cannot_tell"
    assert report.findings[0].ranges == (Range(A, 10, 20),)
    report = heard(history, **given, behind={"s": False})
    assert (report.verdict, report.findings[0].ranges) == ("gap", (Range(A, 10, 20),))
    assert heard(history, **given, behind={"s": True}).verdict == "proven"


def test_the_files_show_that_an_append_table_was_rolled_back_compacted_and_expired():
    history = numbered()
    rows, tagged = indexed(history), history.snapshots[-1]
    kept = [f for f in history.files if f.offsets and f.offsets[1] < 9]
    history.add({"added-records": "1", "deleted-records": "1"}, "replace")
    history.add({"added-records": "1", "deleted-records": "1"}, "replace")
    given = {"rows": rows, "tagged_snapshots": {"s": tagged}}
    assert heard(expired(history, 1), **given).verdict == "proven"
    history.files = kept
    assert heard(history, **given).verdict == "gap"


# ── commits of others whose snapshots the sink expired ───────────────────────────────────────────


def overwritten() -> tuple[History, dict[str, Any]]:
    """`UPDATE t SET _offset = …` of one file, more commits, and then the sink's own expiry: what it
    keeps of the UPDATE, and the index, which knows what was expired."""
    history = numbered()
    foreign_file = replace(history.files[0], path="/theirs")
    history.files[0] = foreign_file
    history.add({"deleted-records": "5", "added-records": "5"}, "overwrite", foreign_file)
    for number in range(5, 7):
        ranges = {A: (number + 7, number + 8), B: (7, 7)}
        history.commit(ranges, commit_ids=(f"c{number}",), batches=(number, number))
    rows = indexed(history)
    foreign = filter(brings_rows, history.snapshots[:-1])
    commits = of_snapshots(foreign, history.brought.__getitem__, [A, B])
    assert commits is not None
    given = {
        "rows": rows,
        "positions": {"s": Cut({A: 14, B: 7})},
        "brought": history.brought.__getitem__,
        "foreign_commits": [commits],
    }
    return expired(history, 1), given


def offsets_read(first: Sequence[int]) -> pa.Table:
    """What `--deep` reads: the first five offsets of A, and all others as they should be."""
    rows = [(A, offset) for offset in [*first, *range(5, 14)]] + [(B, o) for o in range(7)]
    columns = [{"topic": p.topic, "partition": p.number, "offset": o} for p, o in rows]
    return pa.Table.from_pylist(columns)


def test_rows_that_others_wrote_stay_in_doubt_when_the_sink_expires_their_snapshots():
    history, given = overwritten()
    report = heard(history, **given)
    assert report.verdict == "cannot_tell"
    assert [finding.ranges for finding in report.findings] == [(Range(A, 0, 5),)]
    assert "snapshot 5, overwrite at 1970-01-01T00:00:00+00:00" in str(report.findings[0])
    assert "--deep" in str(report.findings[0])
    assert [line.verdict for line in report.partitions] == ["cannot_tell", "proven"]
    # Where others expire them nothing is kept: the guide lists it among what proven leaves open.
    assert heard(history, **{**given, "foreign_commits": ()}).verdict == "proven"


def test_rows_that_others_wrote_and_whose_snapshots_are_expired_are_decided_by_reading_them():
    history, given = overwritten()
    assert heard(history, **given, deep=offsets_read(range(5))).verdict == "proven"
    wrong = heard(history, **given, deep=offsets_read([0, 1, 1, 3, 4]))
    assert {finding.kind for finding in wrong.findings} == {"overlap"}
    assert wrong.partitions[0].overlaps == (Range(A, 1, 2),)


def test_the_sinks_own_files_are_proven_whatever_the_table_keeps_of_others():
    history, given = overwritten()
    own = "/frazil-s-1-7-00000000-0000-0000-0000-000000000000.parquet"
    history.files[0] = replace(history.files[0], path=own)
    assert heard(history, **given).verdict == "proven"


def test_a_compaction_of_other_ranges_is_believed_whatever_the_table_keeps_of_others():
    history, given = overwritten()
    late = [f for f in history.files if f.partition == A and f.path != "/theirs"]
    compacted = DataFile("/compacted", 9, A, (5, 13))
    history.files = [f for f in history.files if f not in late] + [compacted]
    report = heard(history, **given)
    assert report.partitions[0].ranges("cannot_tell") == (Range(A, 0, 5),)
    # What became one file with rows in doubt is in doubt, and so is all where no range was kept.
    history.files = [f for f in history.files if f.partition == B]
    history.files.append(DataFile("/all", 14, A, (0, 13)))
    assert heard(history, **given).partitions[0].ranges("cannot_tell") == (Range(A, 0, 14),)
    unbounded = replace(given["foreign_commits"][0], ranges=None)
    report = heard(history, **{**given, "foreign_commits": [unbounded]})
    assert [line.verdict for line in report.partitions] == ["cannot_tell", "cannot_tell"]


def test_what_a_table_keeps_of_snapshots_that_are_still_there_says_nothing_new():
    """The sink wrote it down, and died before it expired them."""
    history = numbered()
    foreign = DataFile("/theirs", 3, None, None, nulls=3)
    history.add({"added-records": "3"}, "append", foreign)
    history.files.append(foreign)
    rows = indexed(history)
    commits = ForeignCommits(5, "append", 5, False, None)
    given = {"rows": rows, "brought": history.brought.__getitem__}
    assert heard(history, **given, foreign_commits=[commits]).verdict == "proven"
    older = replace(commits, older=True)
    assert heard(history, **given, foreign_commits=[older]).verdict == "cannot_tell"


def test_of_rows_without_single_offsets_the_whole_table_stays_in_doubt():
    history = History()
    for number in range(3):
        ranges = {BATCHES: (number, number + 1)}
        history.commit(ranges, commit_ids=(f"c{number}",), batches=(number, number), rows=4)
    history.files = [DataFile("/theirs", 12, None, None)]
    commits = ForeignCommits(2, "overwrite", 2, False, None)
    (report,) = audit(Evidence("db.t", history.snapshots[::-1], files=history.files))
    assert report.verdict == "proven"
    evidence = Evidence(
        "db.t",
        history.snapshots[::-1],
        files=history.files,
        foreign_commits=[replace(commits, older=True)],
    )
    (report,) = audit(evidence)
    assert report.verdict == "cannot_tell"
    assert "of the table (snapshot 2, overwrite" in str(report.findings[0])


def test_an_upsert_table_stays_in_doubt_when_the_sink_expires_what_others_brought():
    history = upserted()
    commits = ForeignCommits(99, "append", 1, False, None)
    evidence = Evidence(
        "db.t",
        history.snapshots[::-1],
        files=history.files,
        deletes=history.deletes,
        foreign_commits=[commits],
    )
    (report,) = audit(evidence)
    assert (history.report().verdict, report.verdict) == ("proven", "cannot_tell")
    assert "snapshot 99, append" in str(report.findings[0])
