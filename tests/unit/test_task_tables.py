"""One range into several tables: whatever comes, each table's arithmetic and the sum close (I3)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.accounting import RangeCounts, for_table
from frazil.config.sections import RouteConfig, TableConfig
from frazil.errors import SchemaMismatch, Undecodable, Unroutable
from frazil.files.writer import DataFileDescriptor, WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema, partition_spec
from frazil.kafka.fetch import FetchedChunk
from frazil.kafka.record_batch import HEADERS, RawRecords, RecordBatches, RecordBatchHeader
from frazil.offsets import Partition, Range
from frazil.pipeline import task
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.task import (
    DEAD_LETTER_COLUMNS,
    DEAD_LETTER_METADATA,
    BatchPlan,
    RangeResult,
    run,
)
from tests.byte_broker import record

HERE, OTHER = Partition("events", 0), Partition("events", 1)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
ID, KIND = pa.field("id", pa.int64(), nullable=False), pa.field("kind", pa.large_string())
DEAD = "db.dead"
Log = dict[int, bytes | None]


def plan(
    folder: Path, name: str, *columns: pa.Field, metadata: MetadataColumns = METADATA, **more: Any
) -> TablePlan:
    schema = iceberg_schema(pa.schema(columns or (ID, KIND)), metadata, TableConfig(name))
    spec = partition_spec(schema, (), name)
    shape = WriterSpec(name, str(folder / name), schema, 0, spec, {}, 2**28, "zstd", {})
    return TablePlan(shape, metadata, metadata.timestamp, **more)


def doc(**members: Any) -> bytes:
    return json.dumps(members).encode()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What the partition holds: offset → value. Chunks are of ten offsets."""
    held: Log = {}

    def fetch(kafka: Any, wanted: Range, **_: Any) -> Iterator[FetchedChunk]:
        for start in range(wanted.start, wanted.end, 10):
            end = min(start + 10, wanted.end)
            kept = [offset for offset in range(start, end) if offset in held]
            offsets = np.array(kept, np.int64)
            keys = pa.array([f"k{offset}".encode() for offset in kept], pa.large_binary())
            headers = pa.array([[("h", b"v")] for _ in kept], HEADERS)
            values = [held[offset] for offset in kept]
            opened = RawRecords(values, offsets, offsets * 1000, keys, headers)
            yield FetchedChunk(Range(wanted.partition, start, end), None, opened, envelope=True)

    monkeypatch.setattr(task, "fetch", fetch)
    return held


@pytest.fixture
def kinds(tmp_path: Path) -> BatchPlan:
    """a → db.a, b → db.b, both → both of them, skip → skipped; the rest are dead letters."""
    rules = RoutingRules(
        [
            RouteConfig(field="kind", values=("a",), to=("db.a",)),
            RouteConfig(field="kind", values=("b",), to=("db.b",)),
            RouteConfig(field="kind", values=("both",), to=("db.a", "db.b")),
            RouteConfig(field="kind", values=("skip",), skip=True),
        ],
        ["db.a", "db.b"],
    )
    return BatchPlan(
        kafka={},
        format=RecordFormat("json"),
        rules=rules,
        batch=7,
        file_prefix="p",
        tables={"db.a": plan(tmp_path, "db.a"), "db.b": plan(tmp_path, "db.b", evolution="reject")},
        dead_letters=plan(
            tmp_path, DEAD, *DEAD_LETTER_COLUMNS, metadata=DEAD_LETTER_METADATA, evolution="fail"
        ),
    )


def rows(result: RangeResult, table: str) -> list[dict[str, Any]]:
    """What the files of a table hold, by offset."""
    read_rows = []
    for file in result.files.get(table, ()):
        read = pq.ParquetFile(json.loads(file.descriptor)["file-path"]).read()
        assert len(read) == file.rows
        read_rows += read.to_pylist()
    return sorted(read_rows, key=lambda row: row.get("_offset", row.get("offset")))


def assert_closed(result: RangeResult) -> None:
    """I3: of the range, and of each table in it; and the files hold what is called written."""
    for name, tally in (("", result.total), *result.tallies.items()):
        assert tally.balanced, name
        assert tally.range == result.total.range
        assert tally.invisible == result.total.invisible
        if name:
            assert tally.written == len(rows(result, name)), name
            assert tally.skipped >= 0
    assert set(result.files) <= set(result.tallies)


def counts(tally: RangeCounts) -> tuple[int, int, int, int]:
    return tally.written, tally.rejected, tally.skipped, tally.invisible


# ── run ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_offset_has_a_fate_in_the_sum_and_in_each_table(log: Log, kinds: BatchPlan):
    log |= {
        0: doc(id=0, kind="a"),
        1: doc(id=1, kind="b"),
        2: doc(id=2, kind="both"),
        3: doc(id=3, kind="skip"),
        4: doc(id=4, kind="nowhere"),
        5: doc(id="x", kind="both"),
        6: doc(id="x", kind="b"),
        9: b"{",
        12: doc(id=12, kind="a"),
        13: doc(id=13, kind="a"),
    }
    result = run(kinds, Range(HERE, 0, 15))
    assert_closed(result)
    assert counts(result.total) == (5, 4, 1, 5)
    assert counts(result.tallies["db.a"]) == (4, 1, 5, 5)
    assert counts(result.tallies["db.b"]) == (2, 2, 6, 5)
    assert counts(result.tallies[DEAD]) == (4, 0, 6, 5)
    assert [row["id"] for row in rows(result, "db.a")] == [0, 2, 12, 13]
    assert [row["_offset"] for row in rows(result, "db.b")] == [1, 2]
    assert result.total.seen == (0, 13)
    assert result.tallies["db.a"].watermark == (0, 13_000_000)


def test_the_event_times_of_a_range_are_those_of_all_tables_and_not_of_dead_letters(
    log: Log, kinds: BatchPlan
):
    log |= {0: b"{", 3: doc(id=3, kind="a"), 5: doc(id=5, kind="b"), 9: b"{"}
    assert run(kinds, Range(HERE, 0, 10)).total.watermark == (3_000_000, 5_000_000)
    result = run(kinds, Range(HERE, 0, 10), frozenset({"db.b"}))  # which has its record already
    assert result.total.watermark == (3_000_000, 5_000_000)
    assert run(kinds, Range(HERE, 6, 10)).total.watermark is None


def test_a_dead_letter_is_the_record_as_it_was_with_reason_and_tables(log: Log, kinds: BatchPlan):
    log |= {3: b"{", 14: doc(id="x", kind="both"), 15: doc(id=1, kind="b", more=1)}
    result = run(kinds, Range(HERE, 0, 20))
    dead_letters = rows(result, DEAD)
    assert [(row["offset"], row["kind"], row["tables"]) for row in dead_letters] == [
        (3, "route", []),
        (14, "misfit", ["db.a", "db.b"]),
        (15, "misfit", ["db.b"]),
    ]
    assert [row["value"] for row in dead_letters] == [log[3], log[14], log[15]]
    first = dead_letters[0]
    assert (first["topic"], first["partition"], first["batch"]) == ("events", 0, 7)
    assert first["key"] == b"k3"
    assert first["headers"] == [{"key": "h", "value": b"v"}]
    assert first["timestamp"].timestamp() == 3
    assert "db.a" not in result.files
    assert counts(result.tallies["db.a"]) == (0, 1, 2, 17), "only rejected, and counted"


def test_a_table_that_got_nothing_is_not_reported(log: Log, kinds: BatchPlan):
    log |= {0: doc(id=0, kind="a"), 1: doc(id=1, kind="skip")}
    assert set(run(kinds, Range(HERE, 0, 2)).tallies) == {"db.a"}
    result = run(kinds, Range(HERE, 1, 5))
    assert (result.tallies, result.files) == ({}, {})
    assert counts(result.total) == (0, 0, 1, 3)


def test_an_empty_range_and_one_without_records_are_reported_in_full(log: Log, kinds: BatchPlan):
    assert counts(run(kinds, Range(HERE, 5, 25)).total) == (0, 0, 0, 20)
    assert run(kinds, Range(HERE, 5, 5)).total == RangeCounts(Range(HERE, 5, 5), 0)


def test_where_something_is_needed_nothing_counts_but_all_needs_are_reported(
    log: Log, kinds: BatchPlan
):
    log |= {
        0: doc(id=0, kind="a"),
        5: doc(id=5, kind="a", more=1),
        15: doc(id=1, kind="a", last="x"),
        16: doc(id=16, kind="b"),
    }
    result = run(kinds, Range(HERE, 0, 20))
    assert (result.tallies, result.files) == ({}, {})
    assert result.needs["db.a"].names == ["id", "kind", "last", "more"]
    assert result.total.range == Range(HERE, 0, 20)


def test_a_dry_run_reports_needs_and_writes_nothing(log: Log, kinds: BatchPlan, tmp_path: Path):
    log |= {0: doc(id=0, kind="a"), 1: b"{", 2: doc(id=0, kind="a", more=1)}
    bare = replace(kinds, dead_letters=None)
    assert list(run(bare, Range(HERE, 0, 3), dry=True).needs) == ["db.a"]
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (doc(id=0, kind="?"), Unroutable, r"cannot route events\[0\] offset 4: no rule matches"),
        (doc(id="x", kind="b"), SchemaMismatch, "cannot fit db.b: field id"),
    ],
)
def test_without_dead_letters_a_rejected_record_stops_the_stream_and_is_named(
    log: Log, kinds: BatchPlan, value: bytes, error: type[Exception], message: str
):
    log |= {3: doc(id=3, kind="a"), 4: value, 5: b"{"}
    with pytest.raises(error, match=message):
        run(replace(kinds, dead_letters=None), Range(HERE, 0, 6))


def test_without_rules_a_value_that_cannot_be_read_is_named_with_its_offset(
    log: Log, tmp_path: Path
):
    log |= {3: doc(id=3), 7: b"{", 8: b"{"}
    alone = BatchPlan(
        rules=None,
        kafka={},
        format=RecordFormat("json"),
        tables={"db.t": plan(tmp_path, "db.t")},
        only="db.t",
    )
    with pytest.raises(Undecodable, match=r"events\[0\] offset 7.*and 1 more of 3"):
        run(alone, Range(HERE, 0, 10))


@pytest.mark.parametrize("refused", [{}, {"db.t": "cannot make it"}])
def test_a_table_that_is_not_there_has_no_tally_of_its_own(
    log: Log, tmp_path: Path, refused: dict[str, str]
):
    log |= {0: b"{", 1: doc(id=1)} if refused else {0: b"{"}
    dead_letters = plan(tmp_path, DEAD, *DEAD_LETTER_COLUMNS, metadata=DEAD_LETTER_METADATA)
    nothing = BatchPlan(
        rules=None,
        kafka={},
        format=RecordFormat("json"),
        tables={},
        only="db.t",
        dead_letters=dead_letters,
        refused=refused,
    )
    result = run(nothing, Range(HERE, 0, 2))
    assert_closed(result)
    assert result.total.rejected == len(log)
    assert set(result.tallies) == {DEAD}


@pytest.mark.parametrize("seed", range(20))
def test_the_arithmetic_closes_whatever_comes(log: Log, kinds: BatchPlan, seed: int):
    dice = random.Random(seed)
    for offset in range(100):
        match dice.randrange(12):
            case 0:
                log[offset] = dice.choice([None, b"{", b"[]", b"", b"\xff", b"1"])
            case 1:
                log[offset] = doc(id=dice.choice([None, "x", 1.5, []]), kind=dice.choice("ab"))
            case 2:
                log[offset] = doc(id=1, kind=dice.choice([1, None, "c", {}, True]))
            case 3:
                log[offset] = doc(id=1, kind="b", more=1)
            case 4 | 5:
                pass
            case _:
                log[offset] = doc(id=offset, kind=dice.choice(["a", "b", "both", "skip"]))
    start, end = sorted(dice.sample(range(101), 2))
    floor = {HERE: dice.randrange(101)}
    plan = replace(
        kinds, tables={**kinds.tables, "db.a": replace(kinds.tables["db.a"], floor=floor)}
    )
    seen: dict[str, list[int]] = {"db.a": [], "db.b": [], DEAD: []}
    for piece, below in plan.pieces(Range(HERE, start, end)):
        result = run(plan, piece, below)
        assert not result.needs
        assert_closed(result)
        assert not set(result.tallies) & below
        for name in seen:
            seen[name] += [row.get("_offset", row.get("offset")) for row in rows(result, name)]
    kinds_by_offset = {
        offset: json.loads(value)["kind"]
        for offset, value in log.items()
        if start <= offset < end and value and b'"id": %d,' % offset in value
    }
    a = [offset for offset, kind in kinds_by_offset.items() if kind in ("a", "both")]
    assert [offset for offset in seen["db.a"] if offset in kinds_by_offset] == [
        o for o in a if o >= floor[HERE]
    ]
    assert not [offset for offset in seen["db.a"] if offset < floor[HERE]]
    b = [offset for offset, kind in kinds_by_offset.items() if kind in ("b", "both")]
    assert [offset for offset in seen["db.b"] if offset in kinds_by_offset] == b
    assert len(set(seen[DEAD])) == len(seen[DEAD]), "a record is one letter"


# ── pieces: where tables stand ahead of each other ──────────────────────────────────────────────


def pieces(plan: BatchPlan, wanted: Range) -> list[tuple[int, int, set[str]]]:
    return [(piece.start, piece.end, set(below)) for piece, below in plan.pieces(wanted)]


def ahead(plan: BatchPlan, **floors: int) -> BatchPlan:
    """db.<name> has everything below the floor, in the first partition."""
    tables = {
        name: replace(table, floor={HERE: floors[name[3:]]} if name[3:] in floors else {})
        for name, table in plan.tables.items()
    }
    dead_letters = plan.dead_letters
    if dead_letters and "dead" in floors:
        dead_letters = replace(dead_letters, floor={HERE: floors["dead"]})
    return replace(plan, tables=tables, dead_letters=dead_letters)


@pytest.mark.parametrize(
    ("floors", "expected"),
    [
        ({}, [(10, 20, set())]),
        ({"a": 10}, [(10, 20, set())]),
        ({"a": 5, "b": 3}, [(10, 20, set())]),
        ({"a": 20}, [(10, 20, {"db.a"})]),
        ({"a": 99}, [(10, 20, {"db.a"})]),
        ({"a": 15}, [(10, 15, {"db.a"}), (15, 20, set())]),
        ({"a": 15, "b": 15}, [(10, 15, {"db.a", "db.b"}), (15, 20, set())]),
        ({"a": 12, "b": 30}, [(10, 12, {"db.a", "db.b"}), (12, 20, {"db.b"})]),
        (
            {"a": 12, "b": 15},
            [(10, 12, {"db.a", "db.b"}), (12, 15, {"db.b"}), (15, 20, set())],
        ),
    ],
)
def test_a_range_is_cut_where_some_table_begins_to_lack_records(
    kinds: BatchPlan, floors: dict[str, int], expected: list[Any]
):
    assert pieces(ahead(kinds, **floors), Range(HERE, 10, 20)) == expected
    assert pieces(ahead(kinds, **floors), Range(OTHER, 10, 20)) == [(10, 20, set())]


def test_dead_letters_have_a_floor_like_any_table(log: Log, kinds: BatchPlan):
    log |= {0: b"{", 5: b"{"}
    plan = ahead(kinds, dead=5)
    assert pieces(plan, Range(HERE, 0, 10)) == [(0, 5, {DEAD}), (5, 10, set())]
    results = [run(plan, piece, below) for piece, below in plan.pieces(Range(HERE, 0, 10))]
    assert [row["offset"] for result in results for row in rows(result, DEAD)] == [5]


def test_what_a_table_rejected_below_its_floor_is_still_a_dead_letter(log: Log, kinds: BatchPlan):
    """The table has recorded it, and the dead letters may not have."""
    log |= {0: doc(id="x", kind="b"), 1: doc(id=1, kind="b"), 2: doc(id=2, kind="both")}
    result = run(kinds, Range(HERE, 0, 3), frozenset({"db.b"}))
    assert_closed(result)
    assert [(row["offset"], row["tables"]) for row in rows(result, DEAD)] == [(0, ["db.b"])]
    assert [row["id"] for row in rows(result, "db.a")] == [2]
    assert set(result.tallies) == {"db.a", DEAD}


# ── of a table, and on the way to the driver ────────────────────────────────────────────────────


def test_what_was_not_for_a_table_it_skipped():
    total = RangeCounts(Range(HERE, 0, 20), 10, 4, 3, 3, seen=(1, 19), watermark=(1, 9))
    own_counts = for_table(total, RangeCounts(Range(HERE, 0, 0), 6, 2, watermark=(2, 5)))
    assert own_counts == RangeCounts(Range(HERE, 0, 20), 6, 2, 9, 3, seen=(1, 19), watermark=(2, 5))
    assert own_counts.balanced
    assert counts(for_table(total, RangeCounts(Range(HERE, 0, 0), 0))) == (0, 0, 17, 3)


def test_a_result_comes_back_from_the_wire_as_it_was():
    need = pa.schema([pa.field("id", pa.int64(), nullable=False), ("s", pa.struct([("x", "str")]))])
    whole = RangeResult(
        total=RangeCounts(Range(HERE, 3, 9), 4, 1, 0, 1, seen=(3, 8)),
        tallies={"db.a": RangeCounts(Range(HERE, 3, 9), 4, 0, 1, 1, watermark=(5, 6))},
        files={"db.a": (DataFileDescriptor('{"x": 1}', 4, 100),), "db.b": ()},
        needs={"db.c": need.with_metadata({"frazil.aliases": '{"id":["key"]}'})},
        below=frozenset({"db.z", "db.y"}),
        seconds={"fetch": 0.5},
    )
    back = RangeResult.of(json.loads(json.dumps(whole.values())))
    assert back == whole
    assert back.needs["db.c"].equals(whole.needs["db.c"], check_metadata=True)


def test_what_an_upsert_table_has_already_is_not_deleted_from_it_again(log: Log, tmp_path: Path):
    """A row below its floor is not written again: a tombstone before it must not take it away."""
    plain_table = plan(tmp_path, "db.a", floor={HERE: 5}, key=("kind",))
    deleted_keys = plan(tmp_path, "db.a_deleted", KIND, floor={HERE: 3})
    log |= {2: None, 4: None, 6: None, 7: doc(id=1, kind="a")}
    seen: list[list[int]] = []
    for table in (plain_table, replace(plain_table, order="_timestamp", deleted_keys=deleted_keys)):
        kinds = BatchPlan(
            rules=None,
            kafka={},
            format=RecordFormat("json"),
            only="db.a",
            tables={"db.a": table},
            keyed={"db.a": "upsert"},
        )
        changes: dict[str, task.KeyChanges] = {}
        results = [
            run(kinds, piece, below, changes=changes)
            for piece, below in kinds.pieces(Range(HERE, 0, 8))
        ]
        assert all(result.total.balanced for result in results)
        assert [
            result.tallies["db.a"].merged for result in results if "db.a" in result.tallies
        ] == [2]
        seen.append([n for t in changes["db.a"].gone for n in t["_offset"].to_pylist()])
    assert seen == [[6], [4, 6]]  # what its memory lacks is looked at once more


# ── a batch of Kafka's that cannot be read ──────────────────────────────────────────────────────


def unreadable(*documents: bytes) -> list[FetchedChunk]:
    """Offsets 0 and 1, a batch [2, 5) that cannot be unpacked, and the last documents."""
    first, last = documents[:2], documents[2:]
    records = RecordBatches(
        [
            RecordBatchHeader(
                0, 1, 2, 1000, None, b"".join(record(i, v) for i, v in enumerate(first))
            ),
            RecordBatchHeader(2, 2, 3, 1000, None, b"", "it unpacks to more than 512 MiB"),
            RecordBatchHeader(
                5,
                len(last) - 1,
                len(last),
                1000,
                None,
                b"".join(record(i, v) for i, v in enumerate(last)),
            ),
        ],
        0,
        5 + len(last),
    )
    return [FetchedChunk(Range(HERE, 0, records.end), records, envelope=True)]


def test_records_of_a_batch_that_cannot_be_read_are_dead_letters_and_their_neighbours_are_rows(
    kinds: BatchPlan, monkeypatch: pytest.MonkeyPatch
):
    given = [doc(id=i, kind="a") for i in (0, 1, 5, 6)]
    monkeypatch.setattr(task, "fetch", lambda *_, **__: iter(unreadable(*given)))
    result = run(kinds, Range(HERE, 0, 7))
    assert_closed(result)
    assert counts(result.total) == (4, 3, 0, 0)
    assert [row["_offset"] for row in rows(result, "db.a")] == [0, 1, 5, 6]
    dead_letters = rows(result, DEAD)
    assert [
        (dead_letter["offset"], dead_letter["kind"], dead_letter["value"])
        for dead_letter in dead_letters
    ] == [(offset, "batch", None) for offset in (2, 3, 4)]
    assert "512 MiB" in dead_letters[0]["message"]


def test_without_dead_letters_a_batch_that_cannot_be_read_stops_with_its_offsets(
    kinds: BatchPlan, monkeypatch: pytest.MonkeyPatch
):
    given = [doc(id=i, kind="a") for i in (0, 1, 5, 6)]
    monkeypatch.setattr(task, "fetch", lambda *_, **__: iter(unreadable(*given)))
    with pytest.raises(Undecodable, match=r"events\[0\] offset 2: .*512 MiB \(and 2 more of 7\)"):
        run(replace(kinds, dead_letters=None), Range(HERE, 0, 7))


def test_where_everything_goes_to_one_table_it_is_that_table_which_rejects_them(
    kinds: BatchPlan, monkeypatch: pytest.MonkeyPatch
):
    given = [doc(id=i, kind="a") for i in (0, 1, 5, 6)]
    monkeypatch.setattr(task, "fetch", lambda *_, **__: iter(unreadable(*given)))
    result = run(replace(kinds, rules=None, only="db.a"), Range(HERE, 0, 7))
    assert counts(result.tallies["db.a"]) == (4, 3, 0, 0)
