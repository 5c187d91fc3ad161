"""Where rows of Spark's become files of ours: offsets they carry, reports, and what adds up."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frazil.accounting import RangeCounts
from frazil.errors import SchemaMismatch, Undecodable, from_traceback
from frazil.files.writer import DataFileDescriptor
from frazil.formats.decoder import RAW, RecordFormat
from frazil.kafka.planner import TopicIdentity
from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline.projection import MetadataColumns
from frazil.sources.dataframe import DataFrameSource, accounted, read_leader_epochs, steady
from frazil.spark import tasks as frame
from frazil.spark.tasks import (
    CarriedColumns,
    ReadCountsAccumulator,
    ReadPlan,
    WriteOutcome,
    WritePlan,
    presented,
    write,
)
from tests.unit.test_write import shape

A, B, C = Partition("orders", 0), Partition("orders", 1), Partition("other", 0)
COLUMNS = ("t", "p", "o")
UTC = dt.timezone.utc

ReportedPieces = dict[tuple[str, int, int, int], tuple[int, int, tuple[int, ...]]]


def outcome(
    carried: Mapping[Partition, Iterable[int]] | None, rows: int | None = None
) -> WriteOutcome:
    """Of a task whose rows carry these offsets."""
    if carried is None:
        return WriteOutcome((), rows or 0, 0, None, None, {})
    arrays = {key: np.array(sorted(offsets), np.int64) for key, offsets in carried.items()}
    return WriteOutcome((), sum(map(len, arrays.values())), 0, arrays, None, {})


# ── what a task hands back ───────────────────────────────────────────────────────────────────

offset_sets = st.builds(
    lambda low, above: {low + distance for distance in above},
    st.integers(0, 2**62),
    st.sets(st.integers(0, 5_000), min_size=1, max_size=200),
)
carried_sets = st.dictionaries(
    st.builds(Partition, st.sampled_from(["orders", "größe"]), st.integers(0, 9)),
    offset_sets,
    max_size=4,
)


@given(st.none() | carried_sets, st.none() | st.tuples(st.integers(), st.integers()))
def test_an_outcome_comes_back_as_it_went(
    carried: dict[Partition, set[int]] | None, span: tuple[int, int] | None
):
    packed = None if carried is None else {p: np.array(sorted(o)) for p, o in carried.items()}
    file = DataFileDescriptor('{"file-path":"/a"}', 3, 1000)
    sent = WriteOutcome((file, file), 6, 77, packed, span, {"write": 0.5})
    back = WriteOutcome.load(sent.dump())
    assert (back.files, back.rows, back.bytes, back.watermark, dict(back.seconds)) == (
        (file, file),
        6,
        77,
        span,
        {"write": 0.5},
    )
    if carried is None:
        assert back.carried is None
    else:
        assert back.carried is not None
        assert {p: o.tolist() for p, o in back.carried.items()} == {
            p: sorted(o) for p, o in carried.items()
        }


def test_a_long_run_of_offsets_takes_few_bytes():
    assert len(outcome({A: range(10**9, 10**9 + 10**6)}).dump()) < 2_000


# ── which offsets rows carry ─────────────────────────────────────────────────────────────────


def rows_with(*origins: tuple[Any, Any, Any]) -> pa.Table:
    kinds = (pa.large_string(), pa.int32(), pa.int64())
    columns = list(zip(*origins, strict=True)) or [(), (), ()]
    return pa.table([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], COLUMNS)


def carried(*tables: pa.Table) -> dict[Partition, list[int]] | None:
    seen = CarriedColumns(COLUMNS)
    for table in tables:
        seen.add(table)
    carried_offsets = seen.offsets()
    return (
        None
        if carried_offsets is None
        else {p: offsets.tolist() for p, offsets in carried_offsets.items()}
    )


def test_offsets_are_distinguished_by_topic_and_partition():
    mixed = rows_with(("a", 0, 5), ("b", 0, 5), ("a", 1, 5), ("b", 7, 1), ("a", 0, 6))
    assert carried(mixed) == {
        Partition("a", 0): [5, 6],
        Partition("a", 1): [5],
        Partition("b", 0): [5],
        Partition("b", 7): [1],
    }


def test_offsets_of_several_tables_come_together_in_order():
    tables = [rows_with(("a", 0, 9), ("a", 0, 3)), rows_with(("a", 0, 5)), rows_with()]
    assert carried(*tables) == {Partition("a", 0): [3, 5, 9]}


def test_columns_in_several_pieces_are_read_as_one():
    pieces = pa.concat_tables([rows_with(("a", 0, 1)), rows_with(("a", 1, 2), ("b", 0, 3))])
    assert carried(pieces) == {
        Partition("a", 0): [1],
        Partition("a", 1): [2],
        Partition("b", 0): [3],
    }


@pytest.mark.parametrize(
    "tables",
    [
        [[("a", 0, 5), ("a", 0, 5)]],
        [[("a", 0, 5), ("a", 0, 6)], [("a", 0, 4), ("a", 0, 5)]],
        [[("a", 0, 5), ("b", 0, 5)], [("b", 0, 5)]],
    ],
)
def test_an_offset_that_two_rows_carry_proves_nothing(tables: list[Any]):
    assert carried(*(rows_with(*table) for table in tables)) is None


@pytest.mark.parametrize("origin", [(None, 0, 5), ("a", None, 5), ("a", 0, None)])
def test_a_row_without_an_origin_proves_nothing_and_nothing_after_it_does(origin: Any):
    assert carried(rows_with(("a", 0, 1), origin), rows_with(("a", 0, 2))) is None
    assert carried(rows_with(("a", 0, 1)), rows_with(origin)) is None


def test_rows_without_the_columns_carry_nothing():
    seen = CarriedColumns(None)
    seen.add(pa.table({"x": [1]}))
    assert seen.offsets() is None


def test_offsets_too_far_apart_to_be_listed_one_by_one_prove_nothing():
    far = frame.WIDEST_SPAN
    assert carried(rows_with(("a", 0, 0), ("a", 0, far - 1))) == {Partition("a", 0): [0, far - 1]}
    assert carried(rows_with(("a", 0, 0), ("a", 0, far))) is None


def test_no_row_carries_no_offset():
    assert carried() == {}


# ── what adds up ─────────────────────────────────────────────────────────────────────────────


def reported(*pieces: tuple[Partition, int, int, int]) -> ReportedPieces:
    """(partition, start, end, how many of them held no record)"""
    return {(*p, start, end): (end - start - n, n, (7,)) for p, start, end, n in pieces}


R = Range(A, 10, 20)


def test_every_offset_written_is_accounted_for_without_a_report():
    split = [outcome({A: range(10, 14)}), outcome({A: range(14, 20)})]
    assert accounted([R], split, {}) == [RangeCounts(R, 10, seen=(10, 19))]
    assert accounted([R], [outcome({A: range(10, 20)})], reported((A, 10, 20, 0))) == [
        RangeCounts(R, 10, seen=(10, 19))
    ]


def test_what_a_filter_left_out_is_skipped_where_the_source_reported_the_number_of_records():
    tallies = accounted([R], [outcome({A: [12, 17]})], reported((A, 10, 15, 0), (A, 15, 20, 0)))
    assert tallies == [RangeCounts(R, 2, skipped=8, seen=(12, 17))]
    assert accounted([R], [], reported((A, 10, 20, 0))) == [RangeCounts(R, 0, skipped=10)]


def test_offsets_that_held_no_record_are_invisible_and_not_skipped():
    tallies = accounted([R], [outcome({A: [12, 17]})], reported((A, 10, 15, 2), (A, 15, 20, 1)))
    assert tallies == [RangeCounts(R, 2, skipped=5, invisible=3, seen=(12, 17))]
    assert accounted([R], [outcome({A: range(10, 17)})], reported((A, 10, 20, 3))) == [
        RangeCounts(R, 7, invisible=3, seen=(10, 16))
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(A, 10, 15, 0)],
        [(A, 10, 15, 0), (A, 16, 20, 0)],
        [(A, 10, 16, 0), (A, 15, 20, 0)],
        [(A, 10, 14, 0), (A, 12, 14, 0), (A, 16, 20, 0)],
        [(A, 9, 20, 0)],
        [(A, 10, 21, 0)],
        [(B, 10, 20, 0)],
        [(C, 10, 20, 0)],
    ],
)
def test_pieces_that_do_not_tile_the_range_prove_nothing_unless_all_of_it_was_written(
    pieces: list[Any],
):
    assert accounted([R], [outcome({A: [12, 17]})], reported(*pieces)) is None
    assert accounted([R], [outcome({A: range(10, 20)})], reported(*pieces)) == [
        RangeCounts(R, 10, seen=(10, 19))
    ]


def test_pieces_of_other_batches_and_partitions_do_not_disturb():
    pieces = reported((A, 0, 10, 4), (A, 10, 20, 1), (A, 20, 30, 4), (B, 10, 20, 4))
    assert accounted([R], [outcome({A: [12]})], pieces) == [
        RangeCounts(R, 1, skipped=8, invisible=1, seen=(12, 12))
    ]


def test_more_rows_than_records_prove_nothing():
    assert accounted([R], [outcome({A: range(10, 18)})], reported((A, 10, 20, 3))) is None


@pytest.mark.parametrize("offset", [9, 20])
def test_a_row_of_another_batch_proves_nothing(offset: int):
    assert accounted([R], [outcome({A: [12, offset]})], reported((A, 10, 20, 0))) is None


def test_a_row_of_a_partition_that_the_batch_does_not_have_proves_nothing():
    carried = {A: range(10, 20), B: [5]}
    assert accounted([R], [outcome(carried)], reported((A, 10, 20, 0))) is None


def test_an_offset_that_two_tasks_wrote_proves_nothing():
    twice = [outcome({A: [12, 13]}), outcome({A: [13, 14]})]
    assert accounted([R], twice, reported((A, 10, 20, 0))) is None


def test_one_task_whose_rows_carry_nothing_spoils_the_proof():
    some = [outcome({A: range(10, 20)}), outcome(None, rows=1)]
    assert accounted([R], some, reported((A, 10, 20, 0))) is None


def test_each_partition_has_a_tally_of_its_own():
    other = Range(B, 0, 3)
    tallies = accounted(
        [R, other],
        [outcome({A: [10], B: [1]}), outcome({B: [2]})],
        reported((A, 10, 20, 1), (B, 0, 3, 0)),
    )
    assert tallies == [
        RangeCounts(R, 1, skipped=8, invisible=1, seen=(10, 10)),
        RangeCounts(other, 2, skipped=1, seen=(1, 2)),
    ]
    assert all(tally.balanced for tally in tallies)


def test_a_batch_without_ranges_has_no_tally():
    assert accounted([], [], {}) == []
    assert accounted([], [outcome({A: [1]})], {}) is None


@given(st.data())
def test_what_is_accounted_for_always_adds_up(data: st.DataObject):
    """Any fate of any offset, over any tasks and pieces: the tallies are the fates."""
    start, length = data.draw(st.integers(0, 2**40)), data.draw(st.integers(1, 60))
    where = Range(A, start, start + length)
    fates = data.draw(st.lists(st.sampled_from("wsi"), min_size=length, max_size=length))
    written = [start + i for i, fate in enumerate(fates) if fate == "w"]
    tasks = data.draw(st.lists(st.integers(0, 2), min_size=len(written), max_size=len(written)))
    outcomes = [
        outcome({A: [o for o, t in zip(written, tasks, strict=True) if t == n]})
        for n in range(3)
        if n in tasks
    ]
    inner = data.draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
    edges = [start + edge for edge in sorted({0, length, *inner})]
    pieces = reported(
        *((A, a, b, fates[a - start : b - start].count("i")) for a, b in itertools.pairwise(edges))
    )
    [tally] = accounted([where], outcomes, pieces) or [None]
    assert tally is not None
    assert tally.balanced
    assert (tally.written, tally.skipped, tally.invisible) == tuple(map(fates.count, "wsi"))
    assert tally.seen == ((written[0], written[-1]) if written else None)


def test_a_range_that_a_second_attempt_reported_again_counts_once():
    adding = ReadCountsAccumulator()
    first = adding.addInPlace(adding.zero({}), {("a", 0, 0, 5): (4, 1, (3,))})
    again: ReportedPieces = {("a", 0, 0, 5): (4, 1, (4,)), ("a", 0, 5, 9): (4, 0, (4,))}
    both = adding.addInPlace(first, again)
    assert both == {("a", 0, 0, 5): (4, 1, (3, 4)), ("a", 0, 5, 9): (4, 0, (4,))}
    assert adding.zero(both) == {}


# ── leader epochs ────────────────────────────────────────────────────────────────────────────


def read_in(*pieces: tuple[Partition, int, int, tuple[int, ...]]) -> ReportedPieces:
    """(partition, start, end, the leader epoch that each attempt reported)"""
    return {(*p, start, end): (end - start, 0, epochs) for p, start, end, epochs in pieces}


def test_the_epoch_of_a_range_is_that_of_its_last_piece():
    pieces = read_in((A, 10, 15, (3,)), (A, 15, 20, (4,)), (B, 0, 5, (9,)), (C, 0, 20, (8,)))
    assert read_leader_epochs([R, Range(B, 0, 5)], [{}], [pieces]) == {A: 4, B: 9}


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "nobody reports"),
        ([(A, 10, 15, (3,))], "the end of the range is missing"),
        ([(A, 15, 21, (3,))], "of another batch"),
        ([(A, 9, 20, (3,))], "of another batch"),
        ([(B, 10, 20, (3,))], "of another partition"),
        ([(A, 10, 20, (-1,))], "the reader did not know it"),
        ([(A, 10, 20, (3, 4))], "two tries read in different epochs"),
        ([(A, 10, 20, (3, -1))], "one of two tries did not know it"),
        ([(A, 10, 20, (3,)), (A, 15, 20, (4,))], "two readers of the same offsets"),
    ],
)
def test_an_epoch_that_is_not_known_for_certain_is_not_kept(pieces: list[Any], why: str):
    assert read_leader_epochs([R], [{}], [read_in(*pieces)]) == {}, why


def test_only_reports_of_this_batch_count():
    """A batch that failed and is run again: its first try may have read other records."""
    earlier = read_in((A, 10, 20, (3,)))
    assert read_leader_epochs([R], [earlier], [earlier]) == {}
    assert read_leader_epochs([R], [earlier], [read_in((A, 10, 20, (3, 4)))]) == {A: 4}
    assert read_leader_epochs([R], [earlier], [read_in((A, 10, 20, (3, 4, 4)))]) == {A: 4}
    assert read_leader_epochs([R], [earlier], [read_in((A, 10, 20, (3, 4, 5)))]) == {}


def test_two_reads_of_one_topic_must_agree_on_the_epoch():
    one, other, third = (read_in((A, 10, 20, (epoch,))) for epoch in (3, 3, 4))
    assert read_leader_epochs([R], [{}, {}], [one, other]) == {A: 3}
    assert read_leader_epochs([R], [{}, {}], [one, third]) == {}


def test_an_epoch_in_which_a_partition_is_led_counts_only_if_it_is_the_same_after_the_read():
    assert steady({A: 3, B: 3, C: 3}, {A: 3, B: 4}) == {A: 3}
    assert steady({}, {A: 3}) == {}
    assert steady({A: -1}, {A: -1}) == {}


def test_a_task_reports_the_epoch_of_its_last_chunk(monkeypatch: pytest.MonkeyPatch):
    def chunk(start: int, end: int, leader: int) -> Any:
        texts, offsets = [b"x"] * (end - start), np.arange(start, end)
        opened = RawRecords(texts, offsets, offsets, None, None)  # type: ignore[arg-type]
        span = Range(A, start, end)
        return SimpleNamespace(
            records=None, broken={}, span=span, leader=leader, open=lambda _: opened
        )

    metadata = MetadataColumns("_topic", "_topic_partition", "_offset", "")
    plan = ReadPlan({}, RecordFormat("raw"), RAW, metadata, 1.0, False)
    tellings: list[Any] = []
    for leaders in ((3, 4), (3, -1)):
        chunks = [chunk(10, 15, leaders[0]), chunk(15, 20, leaders[1])]
        monkeypatch.setattr(frame, "fetch", lambda *_, chunks=chunks, **__: chunks)
        list(frame.read(plan, R, tellings.append))
    assert tellings == [{(*A, 10, 20): (10, 0, (4,))}, {(*A, 10, 20): (10, 0, (-1,))}]


class LeadersAsked:
    """A planner that notes what it is asked."""

    def __init__(self) -> None:
        self.compared: list[tuple[Cut, Mapping[Partition, int]]] = []

    def compare(self, position: Cut, epochs: Mapping[Partition, int]) -> None:
        self.compared.append((position, epochs))


def test_the_ledger_keeps_epochs_of_what_was_read_and_of_partitions_that_brought_nothing():
    source, asked = DataFrameSource.__new__(DataFrameSource), LeadersAsked()
    source._retry = lambda call: call()  # type: ignore[assignment]
    source._own = [asked]  # type: ignore[list-item]
    begin, known = Cut({A: 10, B: 0, C: 5}), TopicIdentity(leaders={A: 3, B: 3, C: 2})
    ranges = [R, Range(B, 0, 5)]
    assert source._leaders(begin, ranges, known, {A: 3, B: 3}) == {A: 3, B: 3, C: 2}
    assert asked.compared == [], "where the epoch is the same, nobody is asked"
    assert source._leaders(begin, ranges, known, {A: 4}) == {A: 4, C: 2}
    assert asked.compared == [(begin, {A: 3, B: 3})]
    assert source._leaders(begin, ranges, TopicIdentity(), {A: 4}) == {A: 4}
    assert len(asked.compared) == 1, "there is nothing to compare with"


# ── types that Spark has ─────────────────────────────────────────────────────────────────────

KINDS = [
    (pa.uuid(), pa.large_string(), pa.large_binary()),
    (pa.binary(16), pa.large_binary(), pa.large_binary()),
    (pa.time64("us"), pa.int64(), pa.int64()),
    (pa.time32("ms"), pa.int64(), pa.int64()),
    (pa.timestamp("ns", "UTC"), pa.int64(), pa.int64()),
    (pa.timestamp("ns"), pa.int64(), pa.int64()),
]
SAME = [
    pa.int32(),
    pa.int64(),
    pa.float64(),
    pa.bool_(),
    pa.large_string(),
    pa.large_binary(),
    pa.date32(),
    pa.decimal128(10, 2),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
]


@pytest.mark.parametrize(("kind", "top", "inside"), KINDS)
def test_types_that_spark_lacks_become_ones_that_it_has(
    kind: pa.DataType, top: pa.DataType, inside: pa.DataType
):
    deep = pa.struct(
        [
            pa.field("l", pa.list_(kind)),
            pa.field("m", pa.map_(pa.large_string(), kind)),
            pa.field("s", pa.struct([pa.field("x", kind, nullable=False)])),
        ]
    )
    given = pa.schema([pa.field("x", kind, nullable=False), pa.field("deep", deep)])
    schema = presented(given)
    assert schema.field("x") == pa.field("x", top, nullable=False)
    assert [field.name for field in schema.field("deep").type] == ["l", "m", "s"]
    lists, maps, struct = (field.type for field in schema.field("deep").type)
    assert lists.value_type == inside
    assert (maps.key_type, maps.item_type) == (pa.large_string(), inside)
    assert struct.field("x") == pa.field("x", inside, nullable=False)


@pytest.mark.parametrize("kind", SAME)
def test_types_that_spark_has_stay_as_they_are(kind: pa.DataType):
    assert presented(pa.schema({"x": kind})) == pa.schema({"x": kind})


ONE = uuid.UUID(int=7)
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.binary(3), [b"abc", None], [b"abc", None]),
        (pa.time64("us"), [dt.time(0, 0, 1, 5), None], [1_000_005, None]),
        (pa.time32("ms"), [dt.time(0, 0, 1), None], [1_000_000, None]),
        (pa.timestamp("ns", "UTC"), [NOON, None], [int(NOON.timestamp()) * 10**9, None]),
        (pa.list_(pa.time64("us")), [[dt.time(0, 0, 1)], None], [[1_000_000], None]),
        (pa.map_(pa.large_string(), pa.binary(2)), [[("k", b"xy")], None], [[("k", b"xy")], None]),
        (
            pa.struct({"t": pa.time64("us"), "u": pa.binary(2)}),
            [{"t": dt.time(0, 0, 1), "u": b"xy"}, None],
            [{"t": 1_000_000, "u": b"xy"}, None],
        ),
        (pa.decimal128(5, 2), [Decimal("1.25"), None], [Decimal("1.25"), None]),
    ],
)
def test_values_keep_their_meaning_in_types_that_spark_has(
    kind: pa.DataType, values: list[Any], expected: list[Any]
):
    assert shown(pa.array(values, kind)) == expected


def shown(column: pa.Array) -> list[Any]:
    kind = presented(pa.schema({"x": column.type})).field("x").type
    result = frame._present(column, kind)
    assert result.type == kind
    return list(result.to_pylist())


def test_uuids_are_text_at_the_top_and_bytes_inside():
    column = pa.array([ONE.bytes, None, ONE.bytes], pa.uuid())
    assert shown(column) == [str(ONE), None, str(ONE)]
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 3]), column)
    assert shown(lists) == [[ONE.bytes], [], [None, ONE.bytes]]
    assert shown(pa.StructArray.from_arrays([column], ["u"])) == [
        {"u": ONE.bytes},
        {"u": None},
        {"u": ONE.bytes},
    ]


def test_a_read_plan_shows_no_secret():
    plan = ReadPlan({"sasl.password": "hunter2"}, None, pa.schema([]), None, 1.0)  # type: ignore[arg-type]
    assert "hunter2" not in repr(plan)


# ── rows into files ──────────────────────────────────────────────────────────────────────────


def plan_for(
    folder: Path, columns: pa.Schema, *by: str, event_time: str = "", origin: bool = False
) -> WritePlan:
    return WritePlan(shape(folder, columns, *by), COLUMNS if origin else None, event_time, "f-s-1")


def batches(columns: pa.Schema, *rows: Sequence[Any]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(row), schema=columns) for row in rows]


def read_back(written: WriteOutcome) -> list[dict[str, Any]]:
    paths = [json.loads(file.descriptor)["file-path"] for file in written.files]
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def test_rows_come_back_from_the_files(tmp_path: Path):
    columns = pa.schema({"id": pa.int64(), "name": pa.string(), "at": pa.timestamp("us", "UTC")})
    rows = [{"id": i, "name": f"é{i}", "at": NOON + dt.timedelta(seconds=i)} for i in range(10)]
    plan = plan_for(tmp_path, columns, event_time="at")
    written = write(plan, batches(columns, rows[:4], [], rows[4:]))
    assert read_back(written) == rows
    assert written.rows == sum(file.rows for file in written.files) == 10
    assert written.bytes > 0
    assert written.carried is None
    low = int(NOON.timestamp()) * 10**6
    assert written.watermark == (low, low + 9 * 10**6)


def test_event_times_are_distinguished_by_the_partition_that_rows_say_they_come_from(
    tmp_path: Path,
):
    columns = pa.schema(
        {"t": pa.string(), "p": pa.int32(), "o": pa.int64(), "at": pa.timestamp("us", "UTC")}
    )
    low = int(NOON.timestamp()) * 10**6

    def row(partition: int, offset: int, second: int | None) -> dict[str, Any]:
        moment = None if second is None else NOON + dt.timedelta(seconds=second)
        return {"t": "a", "p": partition, "o": offset, "at": moment}

    given = [row(0, 0, 5), row(1, 0, 2), row(0, 1, 7), row(2, 0, None)], [row(1, 1, 9)]
    written = write(
        plan_for(tmp_path, columns, event_time="at", origin=True), batches(columns, *given)
    )
    a, b = Partition("a", 0), Partition("a", 1)
    spans = {a: (low + 5 * 10**6, low + 7 * 10**6), b: (low + 2 * 10**6, low + 9 * 10**6)}
    assert written.watermarks == spans
    assert WriteOutcome.load(written.dump()).watermarks == spans
    assert write(plan_for(tmp_path, columns, event_time="at"), []).watermarks == {}


def test_a_task_without_rows_writes_no_file_and_says_so(tmp_path: Path):
    columns = pa.schema({"t": pa.string(), "p": pa.int32(), "o": pa.int64()})
    written = write(plan_for(tmp_path, columns, origin=True), [])
    assert (written.files, written.rows, written.carried, written.watermark) == ((), 0, {}, None)
    assert list(tmp_path.rglob("*")) == []


def test_the_offsets_that_the_rows_carry_come_with_the_files(tmp_path: Path):
    columns = pa.schema({"t": pa.string(), "p": pa.int32(), "o": pa.int64(), "x": pa.int64()})
    rows = [{"t": "orders", "p": i % 2, "o": 100 - i, "x": i} for i in range(6)]
    written = write(plan_for(tmp_path, columns, origin=True), batches(columns, rows))
    assert written.carried is not None
    assert {p: o.tolist() for p, o in written.carried.items()} == {
        A: [96, 98, 100],
        B: [95, 97, 99],
    }


def test_small_batches_are_gathered_and_each_row_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(frame, "GATHER_ROWS", 10)
    columns = pa.schema({"t": pa.string(), "p": pa.int32(), "o": pa.int64()})
    sizes = [1, 0, 8, 3, 25, 9, 1, 4]
    numbers = iter(range(sum(sizes)))
    given = [[{"t": "orders", "p": 0, "o": next(numbers)} for _ in range(n)] for n in sizes]
    tables: list[int] = []
    gathered = frame._gathered

    def watched(stream: Iterable[pa.RecordBatch]) -> Any:
        for table in gathered(stream):
            tables.append(len(table))
            yield table

    monkeypatch.setattr(frame, "_gathered", watched)
    written = write(plan_for(tmp_path, columns, origin=True), batches(columns, *given))
    assert tables == [12, 25, 10, 4]
    assert [row["o"] for row in read_back(written)] == list(range(sum(sizes)))
    assert written.carried is not None
    assert written.carried[A].tolist() == list(range(sum(sizes)))


def test_the_tables_partitions_are_kept(tmp_path: Path):
    columns = pa.schema({"k": pa.string(), "n": pa.int64()})
    rows = [{"k": "ab"[i % 2], "n": i} for i in range(6)]
    written = write(plan_for(tmp_path, columns, "k"), batches(columns, rows[:3], rows[3:]))
    assert sorted((json.loads(f.descriptor)["partition"], f.rows) for f in written.files) == [
        (["a"], 3),
        (["b"], 3),
    ]
    assert sorted(row["n"] for row in read_back(written)) == list(range(6))


def test_columns_may_come_in_another_order_and_narrower_and_optional_ones_may_be_missing(
    tmp_path: Path,
):
    plan = plan_for(tmp_path, pa.schema({"a": pa.int64(), "b": pa.string(), "c": pa.float64()}))
    given = pa.schema({"c": pa.float32(), "a": pa.int32()})
    written = write(plan, batches(given, [{"c": 0.5, "a": 7}]))
    assert read_back(written) == [{"a": 7, "b": None, "c": 0.5}]


def test_a_row_that_does_not_fit_is_named_and_crosses_to_the_driver(tmp_path: Path):
    plan = plan_for(tmp_path, pa.schema([pa.field("a", pa.int64(), nullable=False)]))
    rows = batches(pa.schema({"a": pa.int64()}), [{"a": None}])
    with pytest.raises(SchemaMismatch, match=r"to table db\.t: the table requires column 'a'"):
        write(plan, rows)
    with pytest.raises(RuntimeError) as raised:
        list(frame.write_all(plan, rows))
    assert isinstance(from_traceback(str(raised.value)), SchemaMismatch)


def test_a_task_answers_with_one_row(tmp_path: Path):
    columns = pa.schema({"a": pa.int64()})
    [answer] = frame.write_all(plan_for(tmp_path, columns), batches(columns, [{"a": 1}, {"a": 2}]))
    [row] = answer.to_pylist()
    assert read_back(WriteOutcome.load(row["outcome"])) == [{"a": 1}, {"a": 2}]


def test_a_dataframe_of_records_whose_timestamp_does_not_fit_stops_with_the_offset(
    monkeypatch: pytest.MonkeyPatch,
):
    where = Partition("orders", 0)
    stamps = np.array([7, 2**62], np.int64)
    chunk = SimpleNamespace(
        records=None,
        broken={},
        span=Range(where, 0, 2),
        leader=4,
        open=lambda _: RawRecords([b"a", b"b"], np.arange(2), stamps, None, None),
    )
    monkeypatch.setattr(frame, "fetch", lambda *_, **__: [chunk])

    def rows(timestamp: str) -> list[pa.RecordBatch]:
        metadata = MetadataColumns("_topic", "_topic_partition", "_offset", timestamp)
        plan = ReadPlan({}, RecordFormat("raw"), RAW, metadata, 1.0, False)
        return list(frame.read(plan, chunk.span, lambda _: None))

    with pytest.raises(Undecodable, match=r"orders\[0\] offset 1: the record's timestamp does not"):
        rows("_timestamp")
    assert sum(map(len, rows(""))) == 2
