"""The planner against a Kafka of plain values: what it takes, what it refuses, how much."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec
from hypothesis import given
from hypothesis import strategies as st

from frazil.config.model import from_document
from frazil.errors import ConfigError, Expired, IdentityMismatch, Unavailable, from_traceback
from frazil.kafka import planner as source
from frazil.kafka import range_source
from frazil.kafka.planner import Planner, TopicIdentity, Watermarks, split
from frazil.kafka.range_source import BatchGathering, RangeStreamReader, options
from frazil.offsets import Cut, Partition, Range, join
from frazil.sources.range_tasks import number_of_tasks

A, B, C = Partition("orders", 0), Partition("orders", 1), Partition("orders", 2)
LOTS = 10**15


@dataclass
class Kafka:
    """A cluster in memory, and the part of the AdminClient that the planner speaks to."""

    low: dict[Partition, int] = field(default_factory=dict)
    end: dict[Partition, int] = field(default_factory=dict)
    cluster: str = "k"
    ids: dict[str, str] = field(default_factory=lambda: {"orders": "id-1"})
    record_bytes: int = 100
    down: bool = False
    leaderless: set[Partition] = field(default_factory=set)
    samples: list[Range] = field(default_factory=list)
    #: partition → its leader epochs and where each one ends, oldest first
    epochs: dict[Partition, list[tuple[int, int]]] = field(default_factory=dict)
    asked: list[dict[Partition, int]] = field(default_factory=list)
    levels: set[Any] = field(default_factory=set)

    def _answer(self, value: Any) -> Any:
        if self.down:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(result=lambda: value)

    def list_topics(self, timeout: float) -> Any:
        self._answer(None)
        return SimpleNamespace(topics={p.topic: None for p in self.end})

    def describe_cluster(self, request_timeout: float) -> Any:
        return self._answer(SimpleNamespace(cluster_id=self.cluster))

    def describe_topics(self, topics: Any, request_timeout: float) -> Any:
        return {name: self._described(name) for name in topics.topic_names}

    def _described(self, name: str) -> Any:
        def missing() -> Any:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))

        parts = [SimpleNamespace(id=p.number) for p in self.end if p.topic == name]
        if not parts:
            return SimpleNamespace(result=missing)
        return self._answer(SimpleNamespace(topic_id=self.ids.get(name, "?"), partitions=parts))

    def list_offsets(self, wanted: Any, isolation_level: Any, request_timeout: float) -> Any:
        self.levels.add(isolation_level)
        earliest = type(OffsetSpec.earliest())

        def leaderless() -> Any:
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))

        return {
            tp: SimpleNamespace(result=leaderless)
            if Partition(tp.topic, tp.partition) in self.leaderless
            else self._answer(
                SimpleNamespace(
                    offset=(self.low if isinstance(spec, earliest) else self.end)[
                        Partition(tp.topic, tp.partition)
                    ],
                    leader_epoch=self.epochs.get(Partition(*tp_of(tp)), [(-1, 0)])[-1][0],
                )
            )
            for tp, spec in wanted.items()
        }

    def epoch_ends(self, kafka: Any, epochs: Mapping[Partition, int], position: Cut) -> Any:
        """As a broker's own cache of epochs answers."""
        self.asked.append(dict(epochs))
        answers = {}
        for partition, epoch in epochs.items():
            ends = [end for number, end in self.epochs[partition] if number <= epoch]
            answers[partition] = (
                -1 if self.epochs[partition][-1][0] < epoch else ends[-1] if ends else 0
            )
        return answers

    def sample_sizes(self, kafka: Mapping[str, str], wanted: Range) -> list[int]:
        self.samples.append(wanted)
        return [self.record_bytes] * len(wanted)


def tp_of(where: Any) -> tuple[str, int]:
    return where.topic, where.partition


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    stub = Kafka({A: 0, B: 0}, {A: 1000, B: 500})
    monkeypatch.setattr(source, "AdminClient", lambda conf: stub)
    monkeypatch.setattr(source, "sample_sizes", stub.sample_sizes)
    monkeypatch.setattr(source, "epoch_ends", stub.epoch_ends)
    return stub


def planner(**more: Any) -> Planner:
    return Planner({"bootstrap.servers": "b:1"}, **{"topics": ("orders",), **more})


def advance(where: Planner, position: Cut, **more: Any) -> Cut:
    return where.advance(position, **{"records": LOTS, "bytes": LOTS, "until": None, **more})


def test_a_partition_that_does_not_answer_stays_where_it_is_and_holds_no_other_up(kafka: Kafka):
    kafka.leaderless = {B}
    assert advance(planner(), Cut({A: 10, B: 20})) == Cut({A: 1000, B: 20})
    assert advance(planner(), Cut({A: 10})) == Cut({A: 1000}), "a new one waits until it answers"
    with pytest.raises(Unavailable):
        planner().start(Cut(), "earliest")  # where it begins, nobody knows
    kafka.leaderless = {A, B}
    with pytest.raises(Unavailable):
        advance(planner(), Cut({A: 10, B: 20}))
    kafka.leaderless = set()
    assert advance(planner(), Cut({A: 1000, B: 20})) == Cut({A: 1000, B: 500})


# ── split ────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=8),
    st.integers(10_000, 10**6),
    st.integers(0, 64),
)
def test_pieces_cover_the_ranges_exactly_and_none_is_over_the_most(
    spans: list[tuple[int, int]], most: int, parallelism: int
):
    ranges = [Range(Partition("t", i), a, a + b) for i, (a, b) in enumerate(spans)]
    pieces = split(ranges, most=most, parallelism=parallelism)
    assert join(pieces) == [span for span in ranges if len(span)]
    assert all(0 < len(piece) <= most for piece in pieces)


def test_one_long_range_is_split_for_every_core():
    assert len(split([Range(A, 0, 4_000_000)], most=10**7, parallelism=4)) == 4


def test_short_ranges_are_not_split_further():
    ranges = [Range(A, 0, 50_000), Range(B, 0, 10)]
    assert split(ranges, most=10**6, parallelism=16) == ranges
    assert len(split([Range(A, 0, 50_001)], most=10**6, parallelism=16)) == 2


def test_an_empty_range_makes_no_task():
    assert split([Range(A, 5, 5)], most=10, parallelism=4) == []


# ── origin ───────────────────────────────────────────────────────────────────────────────────


def test_an_origin_that_knows_nothing_takes_any():
    TopicIdentity().check(TopicIdentity("k", {"orders": "1"}))


def test_the_same_cluster_and_topics_pass_and_new_topics_may_come():
    TopicIdentity("k", {"a": "1"}).check(TopicIdentity("k", {"a": "1", "b": "2"}))


def test_a_topic_that_is_not_asked_for_any_more_does_not_matter():
    TopicIdentity("k", {"a": "1", "gone": "9"}).check(TopicIdentity("k", {"a": "1"}))


def test_another_cluster_behind_the_address_stops_the_stream():
    with pytest.raises(IdentityMismatch, match="belongs to Kafka cluster k, found cluster other"):
        TopicIdentity("k").check(TopicIdentity("other"))


def test_a_topic_that_was_made_again_stops_the_stream():
    with pytest.raises(
        IdentityMismatch, match=r"topic a was dropped.*expected topic id 1, found 2"
    ):
        TopicIdentity("k", {"a": "1"}).check(TopicIdentity("k", {"a": "2"}))


def test_the_planner_remembers_whom_it_saw(kafka: Kafka):
    where = planner()
    origin, partitions = where.origin()
    assert origin == TopicIdentity("k", {"orders": "id-1"})
    assert partitions == [A, B]
    kafka.ids["orders"] = "id-2"
    with pytest.raises(IdentityMismatch, match="expected topic id id-1, found id-2"):
        advance(where, Cut({A: 0, B: 0}))


def test_a_topic_that_is_not_there_is_a_matter_of_configuration(kafka: Kafka):
    with pytest.raises(ConfigError, match="cannot read topic absent: it does not exist"):
        planner(topics=("absent",)).origin()


def test_a_pattern_takes_whole_names_and_no_internal_topics(kafka: Kafka):
    for name in ("orders-eu", "my-orders", "__orders"):
        kafka.end[Partition(name, 0)] = kafka.low[Partition(name, 0)] = 0
    _, partitions = planner(topics=(), pattern="(__)?orders.*").origin()
    assert {p.topic for p in partitions} == {"orders", "orders-eu"}


def test_a_pattern_that_no_topic_matches_yet_waits(kafka: Kafka):
    where = planner(topics=(), pattern="later-.*")
    assert advance(where, Cut()) == Cut()


def test_a_broker_that_is_away_is_named(kafka: Kafka):
    kafka.down = True
    with pytest.raises(Unavailable, match="cannot describe topics orders: Kafka at b:1 does not"):
        planner().origin()
    with pytest.raises(Unavailable, match="cannot list topics: Kafka at b:1 does not answer"):
        planner(topics=(), pattern=".*").origin()
    with pytest.raises(Unavailable, match="cannot read the offsets of 1 partition:"):
        planner().watermarks([A])


@pytest.mark.parametrize(
    ("setting", "level"),
    [
        ({}, IsolationLevel.READ_COMMITTED),
        ({"isolation.level": "read_committed"}, IsolationLevel.READ_COMMITTED),
        ({"isolation.level": "read_uncommitted"}, IsolationLevel.READ_UNCOMMITTED),
    ],
)
def test_the_end_is_the_last_stable_offset_unless_configured_otherwise(
    kafka: Kafka, setting: dict[str, str], level: Any
):
    where = Planner({"bootstrap.servers": "b:1", **setting}, topics=("orders",))
    assert where.watermarks([A]) == Watermarks(Cut({A: 0}), Cut({A: 1000}))
    assert kafka.levels == {level}


# ── require ──────────────────────────────────────────────────────────────────────────────────

MARKS = Watermarks(Cut({A: 10, B: 0}), Cut({A: 100, B: 50}))


@pytest.mark.parametrize("position", [{A: 10, B: 0}, {A: 100, B: 50}, {A: 55}, {}])
def test_a_position_within_what_is_there_is_good(kafka: Kafka, position: dict[Partition, int]):
    planner().require(Cut(position), MARKS)


def test_what_retention_deleted_is_reported_to_the_offset(kafka: Kafka):
    marks = Watermarks(Cut({A: 10, B: 7}), Cut({A: 100, B: 50}))
    with pytest.raises(Expired) as caught:
        planner().require(Cut({A: 4, B: 6}), marks)
    assert caught.value.message == (
        "cannot continue: retention has deleted orders[0] [4, 10), orders[1] [6, 7) (7 offsets) "
        "before they were read"
    )


def test_a_topic_that_ends_before_the_position_stops_the_stream(kafka: Kafka):
    with pytest.raises(
        IdentityMismatch, match=r"ends before.*orders\[0\] \(position 101, end 100\)"
    ):
        planner().require(Cut({A: 101, B: 50}), MARKS)


def test_a_partition_that_vanished_stops_the_stream(kafka: Kafka):
    with pytest.raises(IdentityMismatch, match=r"orders\[2\] no longer exist"):
        planner().require(Cut({A: 10, C: 5}), MARKS)


# ── start ────────────────────────────────────────────────────────────────────────────────────


def test_a_new_sink_starts_where_it_is_configured(kafka: Kafka):
    kafka.low[A] = 10
    assert planner().start(Cut(), "earliest") == Cut({A: 10, B: 0})
    assert planner().start(Cut(), "latest") == Cut({A: 1000, B: 500})
    assert planner().start(Cut(), {"orders": {"1": 77}}) == Cut({A: 10, B: 77})


@pytest.mark.parametrize("start", ["earliest", "latest", {"orders": {"0": 1}}])
def test_a_position_outweighs_the_configured_start(kafka: Kafka, start: Any):
    assert planner().start(Cut({A: 5, B: 6}), start) == Cut({A: 5, B: 6})


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_partition_that_came_while_the_sink_was_away_is_read_from_its_beginning(
    kafka: Kafka, start: str
):
    assert planner().start(Cut({A: 5}), start) == Cut({A: 5, B: 0})
    assert planner().start(Cut({A: 5}), {"orders": {"1": 30}}) == Cut({A: 5, B: 30})


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_what_retention_deleted_of_a_new_partition_is_missing_like_any_other_offset(
    kafka: Kafka, start: str
):
    kafka.low[B] = 3
    with pytest.raises(Expired, match=r"deleted orders\[1\] \[0, 3\) \(3 offsets\)") as error:
        planner().start(Cut({A: 5}), start)
    assert "accept-loss CONFIG --lost orders:1:0..3" in error.value.hint


def test_what_is_gone_of_a_topic_that_is_new_is_said(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
):
    kafka.low[B] = 3
    assert planner().start(Cut(), "earliest") == Cut({A: 0, B: 3})
    assert "orders[1] begins at offset 3: earlier offsets were deleted" in caplog.text
    assert "orders[0]" not in caplog.text
    caplog.clear()
    planner().start(Cut(), "latest")
    planner().start(Cut(), {"orders": {"0": 0, "1": 3}})
    planner().start(Cut({A: 0, B: 3}), "earliest")
    assert not caplog.text


def test_so_it_is_while_the_stream_runs(kafka: Kafka, caplog: pytest.LogCaptureFixture):
    users = Partition("users", 0)
    kafka.low[users], kafka.end[users] = 4, 9
    where = planner(topics=("orders", "users"))
    assert advance(where, Cut({A: 1000, B: 500}))[users] == 4
    assert "users[0] begins at offset 4" in caplog.text


def test_a_start_that_cannot_be_is_refused(kafka: Kafka):
    with pytest.raises(ConfigError, match=r"orders\[9\] does not exist"):
        planner().start(Cut(), {"orders": {"9": 1}})
    with pytest.raises(ConfigError, match=r"orders\[0\] offset 1001: it ends at 1000"):
        planner().start(Cut(), {"orders": {"0": 1001}})
    kafka.low[A] = 10
    with pytest.raises(Expired, match=r"orders\[0\] \[5, 10\)"):
        planner().start(Cut(), {"orders": {"0": 5}})


# ── advance ──────────────────────────────────────────────────────────────────────────────────


def test_without_limits_everything_is_taken(kafka: Kafka):
    assert advance(planner(), Cut({A: 10, B: 500})) == Cut({A: 1000, B: 500})


def test_a_limit_is_shared_in_proportion_to_what_waits(kafka: Kafka):
    assert advance(planner(), Cut({A: 0, B: 0}), records=300) == Cut({A: 200, B: 100})


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 10**6)), min_size=1, max_size=12),
    st.integers(1, 10**6),
)
def test_a_limited_plan_takes_exactly_the_limit(spans: list[tuple[int, int]], limit: int):
    parts = [Partition("orders", i) for i in range(len(spans))]
    low = dict(zip(parts, (a for a, _ in spans), strict=True))
    end = {p: a + b for p, (a, b) in zip(parts, spans, strict=True)}
    stub = Kafka(low, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "AdminClient", lambda conf: stub)
        patch.setattr(source, "sample_sizes", stub.sample_sizes)
        ahead = advance(planner(), Cut(low), records=limit)
    taken = {p: ahead[p] - low[p] for p in parts}
    backlog = {p: end[p] - low[p] for p in parts}
    assert all(0 <= taken[p] <= backlog[p] for p in parts)
    assert sum(taken.values()) == min(limit, sum(backlog.values()))


def test_a_new_partition_appears_with_its_beginning_and_is_read_from_there(kafka: Kafka):
    where = planner()
    kafka.low[C], kafka.end[C] = 0, 9
    first = advance(where, Cut({A: 1000, B: 500}))
    assert first == Cut({A: 1000, B: 500, C: 0})
    assert advance(where, first) == Cut({A: 1000, B: 500, C: 9})


def test_a_new_partition_that_lost_its_first_records_before_it_was_seen_stops_the_stream(
    kafka: Kafka,
):
    where = planner()
    kafka.low[C], kafka.end[C] = 7, 9
    first = advance(where, Cut({A: 1000, B: 500}))
    with pytest.raises(Expired, match=r"orders\[2\] \[0, 7\)"):
        advance(where, first)


def test_a_new_partition_appears_though_the_limit_is_reached(kafka: Kafka):
    kafka.low[C], kafka.end[C] = 0, 9
    assert advance(planner(), Cut({A: 0, B: 0}), records=3)[C] == 0


def test_a_plan_goes_no_further_than_until(kafka: Kafka):
    kafka.low[C], kafka.end[C] = 0, 9
    until = Cut({A: 30})
    assert advance(planner(), Cut({A: 10, B: 4}), until=until) == Cut({A: 30, B: 4})
    assert advance(planner(), Cut({A: 40, B: 4}), until=until) == Cut({A: 40, B: 4})
    assert advance(planner(), Cut({A: 0}), until=Cut({A: 5000, C: 5})) == Cut({A: 1000, C: 0})


def test_a_plan_is_refused_when_offsets_are_gone(kafka: Kafka):
    kafka.low[A] = 11
    with pytest.raises(Expired, match=r"orders\[0\] \[10, 11\)"):
        advance(planner(), Cut({A: 10, B: 0}))


def test_bytes_limit_a_plan_by_the_size_of_a_sample(kafka: Kafka):
    """1,500 records of 100 bytes wait; 30,000 bytes hold 300 of them."""
    assert advance(planner(), Cut({A: 0, B: 0}), bytes=30_000) == Cut({A: 200, B: 100})
    assert kafka.samples == [Range(A, 0, 500)]


def test_a_sample_is_kept_for_a_while_and_taken_only_where_it_could_matter(kafka: Kafka):
    where = planner()
    position = advance(where, Cut({A: 0, B: 0}), bytes=30_000)
    advance(where, position, bytes=30_000)
    assert len(kafka.samples) == 1
    assert advance(where, position, bytes=LOTS) == Cut({A: 1000, B: 500})
    assert len(kafka.samples) == 1


def test_nothing_to_read_needs_no_sample(kafka: Kafka):
    assert advance(planner(), Cut({A: 1000, B: 500}), bytes=1) == Cut({A: 1000, B: 500})
    assert kafka.samples == []


def test_a_record_larger_than_the_limit_still_goes_through(kafka: Kafka):
    where = planner()
    assert advance(where, Cut({A: 0, B: 500}), bytes=1) == Cut({A: 1, B: 500})


def test_few_records_of_many_partitions_make_few_tasks():
    crumbs = [Range(Partition("orders", n), 0, 10) for n in range(1000)]
    assert number_of_tasks(crumbs, parallelism=4) == 4
    assert number_of_tasks(crumbs[:3], parallelism=4) == 3
    large = [Range(Partition("orders", n), 0, 50_000) for n in range(100)]
    assert number_of_tasks(large, parallelism=4) == 100
    assert number_of_tasks([*large[:5], *crumbs], parallelism=4) == 6


# ── Spark's view ─────────────────────────────────────────────────────────────────────────────


def reader(
    start: Cut, until: Cut | None = None, gathering: BatchGathering | None = None, **sink: Any
) -> RangeStreamReader:
    config = from_document(
        {
            "sink": {"id": "s", "topics": ["orders"], **sink},
            "kafka": {"bootstrap.servers": "b:1", "sasl.password": "env:FRAZIL_TEST_PASSWORD"},
            "decode": {"format": "raw"},
            "table": [{"name": "db.t"}],
        }
    )
    given = options(
        config,
        start=start,
        origin=TopicIdentity("k", {}),
        parallelism=2,
        until=until,
        gathering=gathering,
    )
    return RangeStreamReader(json.loads(given["plan"]))


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAZIL_TEST_PASSWORD", "hunter2")


@pytest.mark.usefixtures("password")
def test_no_secret_travels_to_the_planning_process():
    config = reader(Cut())._plan
    assert config["kafka"]["sasl.password"] == "env:FRAZIL_TEST_PASSWORD"
    assert "hunter2" not in json.dumps(config)


@pytest.mark.usefixtures("password")
def test_the_stream_begins_at_its_start_and_hands_out_every_offset_once(kafka: Kafka):
    stream = reader(Cut({A: 5, B: 0}), max_records_per_task=300)
    assert stream.initialOffset()["cut"] == {"orders": {"0": 5, "1": 0}}
    end = stream.latestOffset()
    assert stream.initialOffset()["cut"] == {"orders": {"0": 5, "1": 0}}
    pieces = [partition.value for partition in stream.partitions(stream.initialOffset(), end)]
    spans = [Range(Partition(p[0], p[1]), p[2], p[3]) for p in pieces]
    assert join(spans) == [Range(A, 5, 1000), Range(B, 0, 500)]
    assert {p[4] for p in pieces} == {len(pieces)}
    assert {p[5] for p in pieces} == {'["k", {"orders": "id-1"}]'}


@pytest.mark.usefixtures("password")
def test_a_broker_that_is_away_is_borne_for_the_set_patience(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
):
    now = [100.0]
    for module in (source, range_source):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = reader(Cut({A: 5}), unavailable_timeout="10s")
    kafka.down = True
    assert stream.latestOffset()["cut"] == {"orders": {"0": 5}}
    now[0] += 9
    assert stream.latestOffset()["cut"] == {"orders": {"0": 5}}
    kafka.down = False
    assert stream.latestOffset()["cut"] != {"orders": {"0": 5}}
    kafka.down = True
    now[0] += 100
    stream.latestOffset()  # its silence is counted anew
    now[0] += 11
    with pytest.raises(RuntimeError) as caught:
        stream.latestOffset()
    assert isinstance(from_traceback(str(caught.value)), Unavailable)


@pytest.mark.usefixtures("password")
def test_what_cannot_go_on_leaves_the_planning_process_as_text(kafka: Kafka):
    kafka.low[A] = 50
    with pytest.raises(RuntimeError) as caught:
        reader(Cut({A: 5})).latestOffset()
    assert isinstance(from_traceback(str(caught.value)), Expired)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The planning process's clock."""
    clock = [100.0]
    for module in (source, range_source):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def planned(stream: RangeStreamReader) -> dict[str, int]:
    return dict(stream.latestOffset()["cut"]["orders"])


@pytest.mark.usefixtures("password")
def test_the_first_records_are_planned_at_once_and_later_ones_gather(
    kafka: Kafka, now: list[float]
):
    stream = reader(Cut({A: 5, B: 500}), gathering=BatchGathering(60.0))
    assert planned(stream) == {"0": 1000, "1": 500}
    for _ in range(59):
        now[0] += 1
        kafka.end[A] += 10
        assert planned(stream) == {"0": 1000, "1": 500}, "a small batch did not wait"
    now[0] += 1
    assert planned(stream) == {"0": 1590, "1": 500}
    now[0] += 3600  # a quiet stream: the next record is not kept waiting
    kafka.end[B] += 1
    assert planned(stream) == {"0": 1590, "1": 501}


@pytest.mark.usefixtures("password")
def test_batches_that_are_full_do_not_wait(kafka: Kafka, now: list[float]):
    gathering = BatchGathering(60.0)
    stream = reader(Cut({A: 0, B: 500}), gathering=gathering, max_records_per_trigger=400)
    assert [planned(stream)["0"] for _ in range(3)] == [400, 800, 800], "the last one is not full"
    now[0] += 60
    assert planned(stream)["0"] == 1000


@pytest.mark.usefixtures("password")
def test_nothing_gathers_while_a_caller_waits_for_it(kafka: Kafka, now: list[float]):
    gathering = BatchGathering(60.0)
    stream = reader(Cut({A: 0, B: 0}), gathering=gathering)
    stream.latestOffset()
    kafka.end[A] += 1
    assert planned(stream)["0"] == 1000
    with gathering.hurried(), gathering.hurried():
        assert planned(stream)["0"] == 1001
    kafka.end[A] += 1
    assert planned(stream)["0"] == 1001
    folder = Path(gathering.hurry).parent
    with gathering.hurried():
        gathering.close()
    with gathering.hurried():
        assert not folder.exists()
        assert not gathering._folder, "a sink that has stopped leaves nothing behind"


@pytest.mark.usefixtures("password")
def test_a_running_stream_takes_over_how_long_records_may_gather(kafka: Kafka, now: list[float]):
    gathering = BatchGathering(0.0)
    stream = reader(Cut({A: 0, B: 500}), gathering=gathering)
    assert planned(stream)["0"] == 1000
    kafka.end[A] += 1
    gathering.adapt(60.0)
    assert planned(stream)["0"] == 1000
    gathering.adapt(5.0)
    now[0] += 6
    assert planned(stream)["0"] == 1001
    gathering.close()
    gathering.adapt(1.0)
    assert not gathering._folder


@pytest.mark.usefixtures("password")
def test_a_run_to_a_given_cut_gathers_nothing(kafka: Kafka, now: list[float]):
    stream = reader(Cut({A: 0, B: 0}), until=Cut({A: 1001, B: 500}), gathering=BatchGathering(60.0))
    stream.latestOffset()
    kafka.end[A] += 1
    assert planned(stream)["0"] == 1001


@pytest.mark.usefixtures("password")
def test_a_new_partition_is_named_without_waiting(kafka: Kafka, now: list[float]):
    stream = reader(Cut({A: 0, B: 500}), gathering=BatchGathering(60.0))
    assert planned(stream) == {"0": 1000, "1": 500}
    kafka.end[A] += 1  # which gathers
    kafka.low[C], kafka.end[C] = 0, 10
    assert planned(stream) == {"0": 1000, "1": 500, "2": 0}
    now[0] += 60
    assert planned(stream) == {"0": 1001, "1": 500, "2": 10}


# ── topics that were made again ──────────────────────────────────────────────────────────────────

AGAIN = TopicIdentity("k", {"orders": "id-0", "orders@7": "id-1"})


def test_a_topic_that_was_adopted_is_asked_by_kafkas_name_and_answers_by_its_own(kafka: Kafka):
    where = planner(origin=AGAIN)
    now, partitions = where.origin()
    assert now.topics == {"orders@7": "id-1"}
    new = [Partition("orders@7", 0), Partition("orders@7", 1)]
    assert partitions == new
    assert where.watermarks(partitions).end == Cut({new[0]: 1000, new[1]: 500})
    position = Cut({A: 40, new[0]: 10, new[1]: 20})
    assert advance(where, position.current) == Cut({new[0]: 1000, new[1]: 500})
    # The configured start was that of the first topic of the name.
    assert where.start(position.current, {"orders": {"0": 5000}}) == position.current


def test_one_that_was_made_again_once_more_is_seen(kafka: Kafka):
    kafka.ids["orders"] = "id-2"
    with pytest.raises(
        IdentityMismatch, match="topic orders@7 was dropped and recreated"
    ) as caught:
        planner(origin=AGAIN).origin()
    assert caught.value.hint.endswith("frazil offsets adopt-topic CONFIG --topic orders")
    now, _ = planner(origin=AGAIN, trusting=True).origin()
    assert now.topics == {"orders@7": "id-2"}


def test_what_stops_the_stream_names_the_command_that_helps(kafka: Kafka):
    kafka.low[A] = 30
    where = planner()
    marks = where.watermarks([A, B])
    with pytest.raises(Expired) as lost:
        where.require(Cut({A: 10, B: 0}), marks)
    assert lost.value.hint.endswith("accept-loss CONFIG --lost orders:0:10..30")
    with pytest.raises(IdentityMismatch) as back:
        where.require(Cut({A: 1001, B: 501}), marks)
    assert back.value.hint.endswith("seek CONFIG --to orders:0:1000 --to orders:1:500")
    with pytest.raises(IdentityMismatch) as other:
        planner(origin=TopicIdentity("k0")).origin()
    assert other.value.hint.endswith("frazil offsets adopt-topic CONFIG")
    many = {Partition("orders", n): 9 for n in range(20)}
    with pytest.raises(Expired) as caught:
        where.require(Cut(dict.fromkeys(many, 1)), Watermarks(Cut(many), Cut(many)))
    assert caught.value.hint.endswith("accept-loss CONFIG (which shows all of them)")


# ── leader epochs ────────────────────────────────────────────────────────────────────────────────


def require(where: Planner, position: Cut) -> None:
    where.require(position, where.watermarks(sorted(position)))


def test_a_log_that_lost_its_tail_and_grew_again_stops_the_stream_with_the_ranges(kafka: Kafka):
    kafka.epochs = {A: [(3, 90), (5, 1000)], B: [(3, 500)]}
    where = planner(origin=TopicIdentity(leaders={A: 3, B: 3}))
    with pytest.raises(
        IdentityMismatch, match=r"truncated and overwritten: orders\[0\] \[90, 100\) were read"
    ) as error:
        require(where, Cut({A: 100, B: 100}))
    assert "frazil offsets seek CONFIG --to orders:0:90" in error.value.hint
    assert kafka.asked == [{A: 3}], "where the leader is still the same, nothing is asked"
    with pytest.raises(
        IdentityMismatch, match="truncated and overwritten"
    ):  # and again, as long as nobody decides
        require(where, Cut({A: 100, B: 100}))


def test_leaders_may_change_as_often_as_they_like_where_nothing_is_lost(kafka: Kafka):
    kafka.epochs = {A: [(3, 100), (5, 1000)]}
    where = planner(origin=TopicIdentity(leaders={A: 3}))
    require(where, Cut({A: 100}))
    require(where, Cut({A: 100}))
    require(where, Cut({A: 700}))
    assert kafka.asked == [{A: 3}], "once for each change"
    kafka.epochs[A] = [(3, 100), (5, 800), (6, 1000)]
    require(where, Cut({A: 700}))
    assert kafka.asked == [{A: 3}, {A: 5}]
    kafka.epochs[A] = [(3, 100), (5, 600), (7, 1000)]
    with pytest.raises(IdentityMismatch, match=r"\[600, 700\)"):
        require(where, Cut({A: 700}))


def test_a_run_that_began_without_epochs_sees_what_is_lost_while_it_runs(kafka: Kafka):
    kafka.epochs = {A: [(3, 1000)]}
    where = planner()
    require(where, Cut({A: 100}))
    kafka.epochs = {A: [(3, 60), (4, 1000)]}
    with pytest.raises(IdentityMismatch, match=r"\[60, 100\)"):
        require(where, Cut({A: 100}))


def test_a_broker_that_no_longer_knows_the_epoch_has_lost_everything(kafka: Kafka):
    kafka.epochs = {A: [(2, 1000)]}
    with pytest.raises(IdentityMismatch, match=r"\[0, 100\)"):
        require(planner(origin=TopicIdentity(leaders={A: 5})), Cut({A: 100}))


def test_what_retention_took_of_the_other_records_is_not_gone_back_to(kafka: Kafka):
    kafka.low[A] = 95
    kafka.epochs = {A: [(3, 90), (5, 1000)]}
    with pytest.raises(IdentityMismatch, match="truncated and overwritten") as error:
        require(planner(origin=TopicIdentity(leaders={A: 3})), Cut({A: 100}))
    assert "--to orders:0:95" in error.value.hint


def test_epochs_that_a_ledger_knows_are_compared_and_nothing_else(kafka: Kafka):
    kafka.epochs = {A: [(3, 90), (5, 1000)], B: [(3, 500)]}
    other = Partition("customers", 0)
    where = planner()
    where.compare(Cut({A: 90, B: 100, other: 7}), {A: 3, B: 3, other: 1})
    assert kafka.asked == [{A: 3}]
    where.compare(Cut({A: 100}), {})
    where.compare(Cut({A: 100}), {B: 3})
    assert len(kafka.asked) == 1, "what was compared before is forgotten"
    lost = r"truncated and overwritten: orders\[0\] \[90, 100\) were read"
    with pytest.raises(IdentityMismatch, match=lost) as error:
        where.compare(Cut({A: 100, B: 100}), {A: 3, B: 3})
    assert "use another sink id" in error.value.hint, "the position of a query cannot be moved"
    where.compare(
        Cut({A: 1001}), {A: 3}
    )  # it ends before the position: reported with the next plan
    where.compare(Cut({A: 900}), {A: 5})


def test_epochs_of_a_topic_are_compared_under_the_name_that_the_ledger_has_for_it(kafka: Kafka):
    kafka.epochs = {A: [(3, 90), (5, 1000)]}
    again = Partition("orders@7", 0)
    kafka.epochs[again] = kafka.epochs[A]
    with pytest.raises(IdentityMismatch, match=r"orders@7\[0\] \[90, 100\) were read"):
        planner().compare(Cut({again: 100}), {again: 3})


def test_the_epochs_of_today_are_those_of_partitions_that_answer(kafka: Kafka):
    kafka.epochs = {A: [(3, 90), (5, 1000)], B: [(3, 500)]}
    where = planner()
    assert where.led([A, B, Partition("customers", 0)]) == {A: 5, B: 3}
    assert where.led([]) == {}
    kafka.leaderless = {B}
    assert where.led([A, B]) == {A: 5}
    kafka.epochs = {}
    assert where.led([A]) == {}, "brokers that tell none"


def test_the_planning_process_gets_the_epochs(kafka: Kafka):
    kafka.epochs = {A: [(3, 90), (5, 1000)]}
    config = from_document(
        {
            "sink": {"id": "s", "topics": ["orders"]},
            "kafka": {"bootstrap.servers": "b:1"},
            "decode": {"format": "raw"},
            "table": [{"name": "db.t"}],
        }
    )
    given = options(
        config,
        start=Cut({A: 100, B: 0}),
        origin=TopicIdentity(leaders={A: 3}),
        parallelism=1,
        until=None,
    )
    with pytest.raises(RuntimeError, match="truncated and overwritten"):
        RangeStreamReader(json.loads(given["plan"])).latestOffset()


# ── brokers without topic ids ────────────────────────────────────────────────────────────────────


def test_that_topics_have_no_ids_is_said_and_taken_for_nothing_else(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
):
    kafka.ids = {"orders": "AAAAAAAAAAAAAAAAAAAAAA"}
    where = planner()
    where.start(Cut(), "earliest")
    assert "orders: the brokers have no topic ids (they are older than 2.8)" in caplog.text
    assert where.known.topics == {"orders": ""}
    # After an upgrade it is the same topic, and known from then on.
    kafka.ids = {"orders": "id-1"}
    where.origin()
    assert where.known.topics == {"orders": "id-1"}
    kafka.ids = {"orders": "id-2"}
    with pytest.raises(IdentityMismatch, match="dropped and recreated"):
        where.origin()
    # An old broker that answers in between does not make it forget.
    kafka.ids = {"orders": "AAAAAAAAAAAAAAAAAAAAAA"}
    where.origin()
    assert where.known.topics == {"orders": "id-1"}
