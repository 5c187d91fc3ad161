"""Until when a stream is complete: the rules one by one, and against a plain model."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.accounting import RangeCounts
from frazil.commit import completeness_callback
from frazil.commit.commit_queue import BackpressureLimits
from frazil.commit.committer import Committer, Progress
from frazil.commit.completeness_callback import CompletenessCallback
from frazil.commit.protocol import EXPIRED, TableCommitter
from frazil.config.sections import CompletenessConfig
from frazil.errors import ConfigError
from frazil.ledger import index
from frazil.ledger.completeness import (
    HOUR,
    SECOND,
    CompletenessMark,
    CompletenessRules,
    CompletenessTracker,
    Timestamp,
    believed,
    complete,
    crossed,
    end_of,
    moment,
    recalled,
)
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import BATCHES, Cut, Partition, Range
from tests.commit_events import Events
from tests.fakes import FakeClock, FakeTable

A, B, C = (Partition("orders", number) for number in range(3))
MINUTE = 60 * SECOND
#: 2026-11-15T00:00Z
DAY = 1_794_700_800 * SECOND
#: the clock of all batches, unless they say otherwise: the evening of that day
NOW = DAY + 20 * HOUR


def at(text: str) -> int:
    """A time of that day: `10:50`."""
    hour, minute = text.split(":")
    return DAY + int(hour) * HOUR + int(minute) * MINUTE


def never() -> Mapping[Partition, int]:
    raise AssertionError("nobody needs to ask where the topics end")


def marks(**stands: str) -> dict[Partition, CompletenessMark]:
    return {
        {"a": A, "b": B, "c": C}[name]: CompletenessMark(at(text), NOW)
        for name, text in stands.items()
    }


Spans = Mapping[Partition, tuple[int, int] | None]


def batch(
    commit_id: str,
    end: Mapping[Partition, int],
    spans: Spans,
    *,
    began: int = NOW,
    number: int = 0,
    more: Mapping[str, Spans] | None = None,
    total: Spans | None = None,
) -> StagedBatch:
    """A batch of one table, or of several."""

    def tallies(spans: Spans) -> tuple[RangeCounts, ...]:
        return tuple(
            RangeCounts(Range(p, end[p] - 1, end[p]), 1, watermark=span)
            for p, span in spans.items()
        )

    tables = {"db.t": spans, **(more or {})}
    return StagedBatch(
        "s",
        1,
        number,
        commit_id,
        Cut(end),
        Cut(end),
        {},
        "",
        began // 1000,
        began // 1000,
        tuple(StagedTable(n, "u", 0, ("m",), (), 1, 0, tallies(t)) for n, t in tables.items()),
        tallies(total or {}),
    )


def judged(
    judge: CompletenessTracker, one: StagedBatch, ends: Any = never, now: int = NOW
) -> int | None:
    return judge.tell([one], ends, now)[one.commit_id]


# ── where the stream stands ──────────────────────────────────────────────────────────────────────


def test_a_stream_is_as_complete_as_its_last_partition_less_lateness():
    cut = Cut({A: 9, B: 9, C: 9})
    known_marks = marks(a="11:20", b="10:50", c="11:31")
    assert complete(cut, known_marks, CompletenessRules(), never, NOW) == at("10:50")
    assert complete(cut, known_marks, CompletenessRules(lateness=5 * MINUTE), never, NOW) == at(
        "10:45"
    )


def test_a_partition_with_records_to_read_holds_everything_back_until_it_has_an_event_time():
    cut = Cut({A: 9, B: 3})
    assert complete(cut, marks(a="11:20"), CompletenessRules(), lambda: {A: 9, B: 4}, NOW) is None
    assert (
        complete(cut, marks(a="11:20"), CompletenessRules(), lambda: {A: 9}, NOW) is None
    )  # not known


def test_a_partition_that_is_empty_or_brought_no_event_time_to_its_end_does_not():
    cut = Cut({A: 9, B: 3, C: 0})
    ends = {A: 100, B: 3, C: 0}
    assert complete(cut, marks(a="11:20"), CompletenessRules(), lambda: ends, NOW) == at("11:20")


def test_partitions_that_the_position_does_not_know_do_not_count():
    assert complete(Cut({A: 9}), marks(a="11:20", b="9:00"), CompletenessRules(), never, NOW) == at(
        "11:20"
    )


def test_the_completeness_of_a_stream_without_event_times_is_unknown():
    assert complete(Cut({A: 0}), {}, CompletenessRules(), lambda: {A: 0}, NOW) is None
    assert complete(Cut(), {}, CompletenessRules(), never, NOW) is None


def test_a_partition_idle_for_long_enough_and_read_to_its_end_does_not_count():
    cut = Cut({A: 9, B: 3})
    known_marks = {
        A: CompletenessMark(at("11:20"), NOW),
        B: CompletenessMark(at("9:00"), NOW - 10 * MINUTE),
    }
    idle = CompletenessRules(idle=10 * MINUTE)
    assert complete(cut, known_marks, idle, lambda: {A: 9, B: 3}, NOW) == at("11:20")
    assert complete(cut, known_marks, idle, lambda: {A: 9, B: 4}, NOW) == at("9:00")  # it has more
    assert complete(cut, known_marks, idle, lambda: {}, NOW) == at("9:00")  # nobody knows
    assert complete(cut, known_marks, CompletenessRules(idle=11 * MINUTE), never, NOW) == at("9:00")
    assert complete(cut, known_marks, CompletenessRules(), never, NOW) == at("9:00")  # never idle


def test_where_all_are_idle_nothing_is_said():
    known_marks = {A: CompletenessMark(at("11:20"), 0)}
    assert (
        complete(Cut({A: 9}), known_marks, CompletenessRules(idle=MINUTE), lambda: {A: 9}, NOW)
        is None
    )


def test_batches_count_where_rows_do_not_say_which_partition_they_come_from():
    cut = Cut({A: 9, B: 9, BATCHES: 2})
    known_marks = {BATCHES: CompletenessMark(at("11:20"), NOW)}
    assert complete(cut, known_marks, CompletenessRules(lateness=MINUTE), never, NOW) == at("11:19")
    assert complete(cut, {}, CompletenessRules(), never, NOW) is None
    by_partition = {**known_marks, **marks(a="11:10", b="10:40")}
    assert complete(cut, by_partition, CompletenessRules(), never, NOW) == at("10:40")
    assert (
        complete(
            cut, {**known_marks, **marks(a="11:10")}, CompletenessRules(), lambda: {B: 10}, NOW
        )
        is None
    )


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((at("10:00"), NOW + HOUR), NOW + HOUR),
        ((at("10:00"), NOW + HOUR + 1), at("10:00")),
        ((NOW + HOUR + 1, NOW + 99 * HOUR), None),
    ],
)
def test_event_times_far_ahead_of_the_clock_are_not_believed(span: Any, expected: int | None):
    assert believed(span, NOW, HOUR) == expected


# ── batch by batch ───────────────────────────────────────────────────────────────────────────────


def test_it_goes_on_with_each_batch_and_never_goes_back():
    judge = CompletenessTracker(CompletenessRules())
    span = (at("10:00"), at("10:30"))
    assert judged(judge, batch("1", {A: 1, B: 0}, {A: span}), lambda: {B: 5}) is None
    assert judged(judge, batch("2", {A: 1, B: 1}, {B: (at("9:00"), at("10:10"))})) == at("10:10")
    late = batch("3", {A: 2, B: 2}, {A: (at("8:00"), at("8:10")), B: span})
    assert judged(judge, late) == at("10:30")
    older = batch("4", {A: 3, B: 2, C: 1}, {A: (at("12:00"), at("12:00")), C: (0, at("3:00"))})
    assert judged(judge, older) == at("10:30")  # a new partition with older data


def test_a_batch_is_judged_once_however_often_its_commit_is_tried():
    judge = CompletenessTracker(CompletenessRules())
    first = batch("1", {A: 1, B: 0}, {A: (0, at("10:30"))})
    assert judged(judge, first, lambda: {A: 1, B: 0}) == at("10:30")
    # The try was lost, or was it? Meanwhile a record came into the partition that was empty.
    assert judge.tell([first], lambda: {A: 1, B: 7}, NOW) == {"1": at("10:30")}
    assert judge.committed([first]) == at("10:30")


def test_the_time_that_a_batch_takes_is_no_silence():
    judge = CompletenessTracker(CompletenessRules(idle=MINUTE))
    slow = batch("1", {A: 1, B: 1}, {A: (0, at("10:30")), B: (0, at("10:10"))}, began=NOW - HOUR)
    assert judged(judge, slow, lambda: {A: 1, B: 1}) == at("10:10")


def test_a_caller_that_waits_for_a_position_knows_how_complete_it_is():
    """`indexed` comes before the position is published."""
    index_table, data = FakeTable("db.i", "u2"), FakeTable("db.t", "u")
    targets = [TableCommitter(table, "main", "s", 1, FakeClock()) for table in (data, index_table)]
    for target in targets:
        target.claim()
    seen: list[Cut] = []
    events = Events(
        table=lambda _: targets[0],
        index_manifests=lambda _: ["i"],
        indexed=lambda done: seen.append(committer.progress.position),
    )
    committer = Committer(
        events, targets[1], Progress(position=Cut()), BackpressureLimits(9, 10**9, 60.0)
    )
    committer.start()
    one = batch("1", {A: 1}, {A: None})
    committer.submit(replace(one, begin=Cut({A: 0})))
    assert committer.wait_until(Cut({A: 1}), 30)
    committer.close()
    assert seen == [Cut()]


def test_batches_that_are_committed_together_each_have_their_own_answer():
    judge = CompletenessTracker(CompletenessRules())
    both = [batch("1", {A: 1}, {A: (0, at("10:30"))}), batch("2", {A: 2}, {A: (0, at("11:30"))})]
    for _ in ("first", "tried again"):
        assert judge.tell(both, never, NOW) == {"1": at("10:30"), "2": at("11:30")}
    assert judge.committed(both) == at("11:30")


def test_who_is_idle_is_seen_from_when_a_batch_began_not_from_when_it_is_committed():
    judge = CompletenessTracker(CompletenessRules(idle=5 * MINUTE))
    first = batch("1", {A: 1, B: 1}, {A: (0, at("10:30")), B: (0, at("10:10"))}, began=NOW - HOUR)
    later = batch("2", {A: 2, B: 1}, {A: (0, at("10:40"))}, began=NOW - HOUR + 6 * MINUTE)
    answers = judge.tell([first, later], lambda: {A: 2, B: 1}, NOW)
    assert answers == {"1": at("10:10"), "2": at("10:40")}


def test_the_topics_ends_are_asked_for_once_for_all_batches_of_a_commit():
    asked = []

    def ends() -> dict[Partition, int]:
        asked.append(1)
        return {B: 0, C: 0}

    judge = CompletenessTracker(CompletenessRules())
    cut = {A: 1, B: 0, C: 0}
    judge.tell([batch("1", cut, {A: (0, 1)}), batch("2", cut, {A: (0, 2)})], ends, NOW)
    assert asked == [1]


def test_dead_letters_have_no_event_time_and_the_highest_of_several_tables_counts():
    judge = CompletenessTracker(CompletenessRules(), apart="db.dead")
    several = batch(
        "1",
        {A: 1},
        {A: (0, at("9:00"))},
        more={"db.u": {A: (0, at("10:00"))}, "db.dead": {A: (0, at("12:00"))}},
    )
    assert judged(judge, several) == at("10:00")
    # Tables that have the range already, of a batch whose record was lost: the sum knows.
    again = batch("2", {A: 2}, {A: None}, total={A: (0, at("11:00"))})
    assert judged(judge, again) == at("11:00")


def test_a_broken_clock_completes_nothing():
    judge = CompletenessTracker(CompletenessRules())
    assert judged(judge, batch("1", {A: 1}, {A: (at("10:00"), DAY + 10**6 * HOUR)})) == at("10:00")
    assert judged(judge, batch("2", {A: 2}, {A: (at("10:30"), at("11:00"))})) == at("11:00")


# ── what the index remembers ─────────────────────────────────────────────────────────────────────


def rows(judge: CompletenessTracker, *batches: StagedBatch, ends: Any = never) -> pa.Table:
    values = judge.tell(batches, ends, NOW)
    where = {name: EXPIRED for batch in batches for name in batch.names}
    return index.rows([(batch, where) for batch in batches], values)


def test_every_row_of_a_batch_says_until_when_the_stream_is_complete_with_it():
    judge = CompletenessTracker(CompletenessRules())
    index_rows = rows(
        judge,
        batch("1", {A: 1, B: 1}, {A: (0, at("10:30")), B: (0, at("10:40"))}, total={A: None}),
        batch("2", {A: 2, B: 2}, {A: (0, at("10:50"))}, number=1),
    )
    assert "complete_until" in index_rows.column_names
    first, second = moment(at("10:30")), moment(at("10:40"))
    assert index_rows["complete_until"].to_pylist() == [first] * 3 + [second]
    assert index.rows([(batch("1", {A: 1}, {A: None}), {"db.t": EXPIRED})])[
        "complete_until"
    ].to_pylist() == [None]


def test_the_next_run_knows_from_the_rows_what_the_last_one_knew():
    judge = CompletenessTracker(CompletenessRules(), "db.dead")
    wild = {A: (at("9:50"), DAY + 10**6 * HOUR), B: (0, at("10:40"))}
    index_rows = rows(
        judge,
        batch("1", {A: 1, B: 1}, wild, began=NOW - MINUTE, more={"db.dead": {B: (0, at("12:00"))}}),
        batch("2", {A: 2, B: 2}, {A: (0, at("9:40")), B: None}, began=NOW),
    )
    stands = {A: CompletenessMark(at("9:50"), NOW), B: CompletenessMark(at("10:40"), NOW - MINUTE)}
    assert recalled(index_rows, CompletenessRules(), "db.dead") == (stands, at("9:50"))
    assert recalled(index_rows.slice(0, 0), CompletenessRules()) == ({}, None)
    older = index_rows.drop_columns("complete_until")  # somebody dropped it
    assert recalled(older, CompletenessRules(), "db.dead") == (stands, None)


def test_rows_that_were_made_from_the_ledger_have_no_beginning_and_count_by_their_commit():
    index_rows = rows(
        CompletenessTracker(CompletenessRules()), batch("1", {A: 1}, {A: (0, at("10:30"))}, began=0)
    )
    assert index_rows["started_at"].null_count == 1
    stands, until = recalled(index_rows, CompletenessRules())
    assert (stands[A].high, until) == (at("10:30"), at("10:30"))


def test_text_columns_of_any_kind_are_read():
    index_rows = rows(
        CompletenessTracker(CompletenessRules()), batch("1", {A: 1}, {A: (0, at("10:30"))})
    )
    other = index_rows.set_column(
        3, "topic", index_rows["topic"].cast(pa.string()).dictionary_encode()
    )
    assert recalled(other, CompletenessRules()) == recalled(index_rows, CompletenessRules())


# ── against a plain model ────────────────────────────────────────────────────────────────────────


@dataclass
class Model:
    """Every record, looked at anew for every answer."""

    rules: CompletenessRules
    records: list[tuple[Partition, int, int]] = field(default_factory=list)  # time, and when read
    until: int | None = None

    def judge(self, cut: Mapping[Partition, int], ends: Mapping[Partition, int], now: int) -> None:
        stands = []
        for partition in cut:
            own_records = [(time, read) for p, time, read in self.records if p == partition]
            caught_up = ends[partition] <= cut[partition]
            if not own_records and not caught_up:
                return
            quiet = own_records and now - max(read for _, read in own_records) >= (
                self.rules.idle or 10**18
            )
            if own_records and not (quiet and caught_up):
                stands.append(max(time for time, _ in own_records))
        if stands:
            now_until = min(stands) - self.rules.lateness
            self.until = now_until if self.until is None else max(self.until, now_until)


#: Minutes of the day, or a record without an event time.
times = st.one_of(st.none(), st.integers(0, 600))
#: Into which partition, which records, how many of all that wait are read, how long that takes; and
#: what happens then: nothing, the commit is tried again, or another run begins.
steps = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(times, max_size=3),
        st.integers(0, 4),
        st.integers(0, 30),
        st.sampled_from(["", "", "again", "restart"]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 60), st.one_of(st.none(), st.integers(1, 40)))
def test_it_is_what_a_plain_model_says_and_never_goes_back(
    happened: list[tuple[int, list[int | None], int, int, str]], lateness: int, idle: int | None
):
    rules = CompletenessRules(lateness * MINUTE, None if idle is None else idle * MINUTE)
    parts = [Partition("t", number) for number in range(4)]
    model = Model(rules)
    judge = CompletenessTracker(rules)
    written = pa.table({f.name: pa.array([], f.type) for f in index.COLUMNS}, index.COLUMNS)
    log: dict[Partition, list[int | None]] = {p: [] for p in parts[:2]}  # others appear later
    cut = dict.fromkeys(log, 0)
    now, before = NOW, None
    for number, (where, records, room, minutes, then) in enumerate(happened):
        log.setdefault(parts[where], []).extend(records)
        now += minutes * MINUTE
        spans: dict[Partition, tuple[int, int] | None] = {}
        for partition, arrived in log.items():
            if partition not in cut and not arrived:
                continue
            start = cut.setdefault(partition, 0)
            taken = arrived[start : start + room]
            room -= len(taken)
            cut[partition] += len(taken)
            known = [DAY + minute * MINUTE for minute in taken if minute is not None]
            model.records += [(partition, time, now) for time in known]
            if taken:
                spans[partition] = (min(known), max(known)) if known else None
        if not spans:
            continue
        ends = {partition: len(arrived) for partition, arrived in log.items()}
        one = batch(f"c{number}", cut, spans, began=now, number=number)
        answers = judge.tell([one], lambda ends=ends: ends, now + HOUR)  # it took an hour
        model.judge(cut, ends, now)
        assert answers[one.commit_id] == model.until
        assert before is None or model.until >= before  # type: ignore[operator]
        before = model.until
        if then == "again":
            later = {partition: end + 9 for partition, end in ends.items()}
            assert judge.tell([one], lambda later=later: later, now + HOUR) == answers
        written = pa.concat_tables([written, index.rows([(one, {"db.t": EXPIRED})], answers)])
        assert judge.committed([one]) == model.until
        if then == "restart":
            stands, until = recalled(written, rules)
            assert until == model.until
            judge = CompletenessTracker(rules, "", stands, until)


# ── hours and days ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("2026-11-15T10", at("11:00")),
        ("2026-11-15T10Z", at("11:00")),
        (" 2026-11-15 10 ", at("11:00")),
        ("2026-11-15T23", DAY + 24 * HOUR),
        ("2026-11-15", DAY + 24 * HOUR),
        ("1969-12-31T23", 0),
    ],
)
def test_an_hour_or_a_day_has_an_end(text: str, end: int):
    assert end_of(text) == end


@pytest.mark.parametrize(
    "text", ["", "10", "2026-11-15T24", "2026-13-01", "2026-11-15T10:30", "9999-12-31", "now"]
)
def test_what_is_no_hour_and_no_day_is_refused(text: str):
    with pytest.raises(ConfigError, match="expected an hour, 2026-11-15T10, or a day"):
        end_of(text)


def test_moments_beyond_the_calendar_are_its_ends():
    assert moment(-(2**62)).year == 1
    assert moment(2**62).year == 9999


def test_moments_beyond_the_calendar_are_shown_as_numbers():
    assert str(Timestamp(1_700_000_000_000_000_000)) == "1700000000000000000 µs since 1970"
    assert str(Timestamp(-(2**63))) == "-9223372036854775808 µs since 1970"
    assert str(Timestamp(1_000_000)) == "1970-01-01T00:00:01+00:00"
    assert Timestamp.of(None) is None


def test_an_hour_is_crossed_when_one_is_complete_that_was_not():
    assert crossed(None, at("10:30"))
    assert not crossed(at("10:30"), at("10:59"))
    assert crossed(at("10:59"), at("11:00"))
    assert not crossed(at("11:00"), at("11:00"))
    assert not crossed(at("11:00"), None)
    assert not crossed(None, None)


def test_the_settings_are_durations():
    given = CompletenessConfig(allowed_lateness="90s", idle_timeout="2m", max_future="500ms")
    assert CompletenessRules.of(given) == CompletenessRules(90 * SECOND, 2 * MINUTE, SECOND // 2)
    assert CompletenessRules.of(CompletenessConfig()) == CompletenessRules(0, None, HOUR)


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_the_command_loads_no_spark():
    code = (
        "import sys, frazil.cli.commands, frazil.ops.completeness, frazil.spark.open_table; "
        "print('pyspark' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert completed.stdout.strip() == "False"


# ── the callback ─────────────────────────────────────────────────────────────────────────────────


def test_a_function_is_called_in_order_and_in_utc_on_another_thread():
    heard: list[tuple[datetime, str]] = []
    caller = CompletenessCallback(
        lambda until: heard.append((until, threading.current_thread().name))
    )
    for hour in (10, 11):
        caller.tell(DAY + hour * HOUR)
    assert caller.close(10)
    assert heard == [
        (datetime(2026, 11, 15, hour, tzinfo=timezone.utc), "frazil-complete") for hour in (10, 11)
    ]


def test_a_function_that_raises_is_called_again_and_its_error_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(completeness_callback, "FIRST_PAUSE", 0.01)
    heard: list[datetime] = []
    release = threading.Event()

    def moody(until: datetime) -> None:
        heard.append(until)
        if not release.is_set():
            raise ValueError("the door is shut")

    caller = CompletenessCallback(moody)
    caller.tell(at("10:00"))
    deadline = time.monotonic() + 30
    while len(heard) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(heard) >= 3
    assert "until 2026-11-15T10:00:00+00:00: on_complete raised ValueError: the door is shut" in (
        caller.trouble
    )
    release.set()
    caller.tell(at("11:00"))
    while caller.trouble and time.monotonic() < deadline:
        time.sleep(0.005)
    assert caller.close(10)
    assert heard[-2:] == [moment(at("10:00")), moment(at("11:00"))]
    assert "the door is shut" in caplog.text


def test_a_run_does_not_wait_for_a_function_that_only_raises():
    caller = CompletenessCallback(lambda _: 1 / 0)
    caller.tell(at("10:00"))
    assert not caller.close(10)
    assert "ZeroDivisionError" in caller.trouble
