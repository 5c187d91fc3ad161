"""A dead letter goes through as a whole or stays; whatever becomes of it, it is counted."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.config.model import Config
from frazil.config.sections import RouteConfig, TableConfig
from frazil.files.writer import TableWriter, WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema
from frazil.kafka.range_source import BatchGathering
from frazil.kafka.record_batch import HEADERS
from frazil.offsets import BATCHES, Range
from frazil.pipeline import replay, task
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.replay import NOTE_COLUMNS, NOTES, AllBut, ReplayPlan, ReplayResult
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.task import (
    DEAD_LETTER_COLUMNS,
    DEAD_LETTER_METADATA,
    FEARLESS,
    BatchPlan,
    RangeResult,
)
from frazil.retry import Retry
from frazil.sources.dead_letters import DeadLetterSelection, DeadLetterSource, replaying

METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
ID = pa.field("id", pa.int64())
KIND = pa.field("kind", pa.large_string())
#: A dead letter as Spark hands it over.
HANDED = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("value", pa.binary()),
        ("kind", pa.string()),
        ("tables", pa.list_(pa.string())),
    ]
)


def table(
    folder: Path, name: str, *columns: pa.Field, metadata: MetadataColumns = METADATA, **more: Any
) -> TablePlan:
    schema = iceberg_schema(pa.schema(columns or (ID, KIND)), metadata, TableConfig(name))
    spec = '{"spec-id": 0, "fields": []}'
    shape = WriterSpec(name, f"{folder}/{name}", schema, 0, spec, {}, 2**20, "zstd", {})
    return TablePlan(shape, metadata, metadata.timestamp, **more)


def dead_letter(offset: int, value: bytes | None, *tables: str, **more: Any) -> dict[str, Any]:
    given = {"topic": "events", "partition": 0, "offset": offset, "timestamp": offset * 1000}
    return {**given, "key": None, "headers": [], "value": value, "tables": list(tables), **more}


def doc(kind: str, **members: Any) -> bytes:
    return json.dumps({"id": 1, "kind": kind, **members}).encode()


class Replaying:
    """One task over dead letters, and what it wrote."""

    def __init__(self, folder: Path, *tables: TablePlan, routes: Any = None, **more: Any) -> None:
        self.folder = folder
        names = [table.shape.name for table in tables]
        rules = None if routes is None else RoutingRules(routes, more.pop("names", names))
        plan = BatchPlan(
            kafka={},
            format=RecordFormat("json"),
            tables={table.shape.name: table for table in tables},
            rules=rules,
            only=names[0],
            batch=7,
            file_prefix="frazil-s.replay-1-7",
        )
        notes = table(folder, "db.notes", *NOTE_COLUMNS, metadata=NOTES)
        self.replay = ReplayPlan(plan, more.pop("notes", notes), 3)

    def __call__(
        self, *dead_letters: dict[str, Any], attempt: int = 0
    ) -> tuple[RangeResult, list[ReplayResult]]:
        batch = pa.RecordBatch.from_pylist(list(dead_letters), schema=HANDED)
        result, rejected = replay.run(self.replay, [batch], attempt)
        for name, tally in result.tallies.items():
            assert tally.written == sum(file.rows for file in result.files[name])
        assert RangeResult.of(json.loads(json.dumps(result.values()))) == result
        return result, rejected

    def rows(self, name: str) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob(f"{name}/data/*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def offsets(self, name: str, column: str = "_offset") -> list[int]:
        return sorted(row[column] for row in self.rows(name))


def test_dead_letters_become_the_rows_they_should_have_been_and_are_noted(tmp_path: Path):
    replaying = Replaying(tmp_path, table(tmp_path, "db.t"))
    result, rejected = replaying(dead_letter(5, doc("a"), "db.t"), dead_letter(9, doc("b")))
    assert rejected == []
    assert (result.total.range, result.total.written) == (Range(BATCHES, 3, 4), 2)
    assert [(row["_offset"], row["kind"]) for row in replaying.rows("db.t")] == [(5, "a"), (9, "b")]
    assert [row["_timestamp"].microsecond for row in replaying.rows("db.t")] == [5000, 9000]
    notes = replaying.rows("db.notes")
    assert [(n["topic"], n["partition"], n["offset"], n["tables"], n["batch"]) for n in notes] == [
        ("events", 0, 5, ["db.t"], 7),
        ("events", 0, 9, ["db.t"], 7),
    ]


def test_what_is_rejected_again_is_neither_written_nor_noted(tmp_path: Path):
    replaying = Replaying(tmp_path, table(tmp_path, "db.t"))
    result, rejected = replaying(
        dead_letter(1, b"{"), dead_letter(2, doc("a")), dead_letter(3, None)
    )
    assert (result.total.written, result.total.rejected) == (1, 2)
    assert [(rejection.offset, rejection.kind) for rejection in rejected] == [
        (1, "json"),
        (3, "null"),
    ]
    assert replaying.offsets("db.t") == replaying.offsets("db.notes", "offset") == [2]


def test_a_dead_letter_without_its_record_is_never_replayed_as_a_null(tmp_path: Path):
    """What lay in a batch that could not be read: where null is a value, it is not this one's."""
    replaying = Replaying(tmp_path, table(tmp_path, "db.t", pa.field("value", pa.large_binary())))
    plan = replace(replaying.replay.plan, format=RecordFormat("raw"))
    replaying.replay = replace(replaying.replay, plan=plan)
    result, rejected = replaying(
        dead_letter(1, None, kind="batch"), dead_letter(2, b"x", kind="null")
    )
    assert (result.total.written, result.total.rejected) == (1, 1)
    assert [(rejection.offset, rejection.kind) for rejection in rejected] == [(1, "batch")]
    assert replaying.offsets("db.t") == replaying.offsets("db.notes", "offset") == [2]


def test_a_dead_letter_that_names_the_tables_which_rejected_it_is_for_no_other(tmp_path: Path):
    tables = [table(tmp_path, f"db.{suffix}") for suffix in "ab"]
    replaying = Replaying(tmp_path, *tables, routes=[RouteConfig(to=("db.a", "db.b"))])
    result, _ = replaying(dead_letter(1, doc("x"), "db.b"), dead_letter(2, doc("y")))
    assert result.total.written == 2
    assert (replaying.offsets("db.a"), replaying.offsets("db.b")) == ([2], [1, 2])
    assert [row["tables"] for row in replaying.rows("db.notes")] == [["db.b"], ["db.a", "db.b"]]


def test_a_dead_letter_goes_to_all_of_its_tables_or_to_none(tmp_path: Path):
    narrow = table(tmp_path, "db.b", ID, evolution="reject")
    replaying = Replaying(
        tmp_path, table(tmp_path, "db.a"), narrow, routes=[RouteConfig(to=("db.a", "db.b"))]
    )
    result, rejected = replaying(dead_letter(1, doc("x")), dead_letter(2, b'{"id": 3}'))
    assert (result.total.written, result.total.rejected) == (1, 1)
    assert rejected[0].offset == 1
    assert replaying.offsets("db.a") == replaying.offsets("db.b") == [2]


def test_what_a_rule_skips_now_is_noted_as_gone_nowhere(tmp_path: Path):
    routes = [RouteConfig(field="kind", values=("x",), skip=True), RouteConfig(to=("db.a",))]
    replaying = Replaying(tmp_path, table(tmp_path, "db.a"), routes=routes)
    result, _ = replaying(
        dead_letter(1, doc("x")), dead_letter(2, doc("y")), dead_letter(3, doc("x"), "db.a")
    )
    assert (result.total.written, result.total.skipped, result.total.rejected) == (1, 2, 0)
    notes = {row["offset"]: row["tables"] for row in replaying.rows("db.notes")}
    assert notes == {1: [], 2: ["db.a"], 3: []}


def test_a_dead_letter_whose_tables_the_rules_no_longer_name_stays(tmp_path: Path):
    routes = [RouteConfig(field="kind", values=("x",), skip=True), RouteConfig(to=("db.a",))]
    replaying = Replaying(tmp_path, table(tmp_path, "db.a"), routes=routes)
    given = [dead_letter(1, doc("y"), "db.old"), dead_letter(2, doc("x"), "db.old")]
    result, [rejected] = replaying(*given)
    assert (result.total.skipped, result.total.rejected) == (1, 1)
    assert rejected.offset == 1
    assert rejected.reason.startswith("cannot replay into db.old: the rules send the record")
    assert replaying.rows("db.a") == []


def test_needs_are_reported_and_nothing_counts_until_they_are_met(tmp_path: Path):
    routes = [RouteConfig(field="kind", to=("db.{value}",))]
    known = table(tmp_path, "db.a")
    replaying = Replaying(tmp_path, known, routes=routes, names=["db.{value}"])
    result, _ = replaying(dead_letter(1, doc("a")), dead_letter(2, doc("b")))
    assert set(result.needs) == {"db.b"}
    assert (result.files, result.tallies) == ({}, {})


def test_a_dry_run_of_a_replay_writes_nothing_and_reports_the_outcome(tmp_path: Path):
    routes = [RouteConfig(field="kind", to=("db.{value}",))]
    known = table(tmp_path, "db.a")
    replaying = Replaying(tmp_path, known, routes=routes, names=["db.{value}"], notes=None)
    result, _ = replaying(dead_letter(1, doc("a")), dead_letter(2, doc("b")), dead_letter(3, b"{"))
    assert (result.total.written, result.total.rejected) == (2, 1)
    assert set(result.needs) == {"db.b"}
    assert not list(tmp_path.rglob("*.parquet"))


def test_rules_see_the_headers_and_partitions_stay_apart(tmp_path: Path):
    routes = [RouteConfig(header="to", values=("a",), to=("db.a",))]
    replaying = Replaying(tmp_path, table(tmp_path, "db.a"), routes=routes)
    headers = [{"key": "to", "value": b"a"}]
    _, rejected = replaying(
        dead_letter(1, doc("x"), headers=headers),
        dead_letter(1, doc("x"), headers=headers, partition=4),
        dead_letter(2, doc("x"), timestamp=None),
    )
    assert [(rejection.partition, rejection.offset, rejection.kind) for rejection in rejected] == [
        (0, 2, "route")
    ]
    places = [(row["_topic_partition"], row["_offset"]) for row in replaying.rows("db.a")]
    assert places == [(0, 1), (4, 1)]


def test_a_task_that_died_twice_settles_its_dead_letters_with_care(tmp_path: Path):
    tables = [table(tmp_path, f"db.{suffix}") for suffix in "ab"]
    replaying = Replaying(tmp_path, *tables, routes=[RouteConfig(to=("db.a", "db.b"))])
    result, rejected = replaying(
        dead_letter(1, doc("x"), "db.b"),
        dead_letter(2, doc("y")),
        dead_letter(3, b"{"),
        attempt=FEARLESS,
    )
    assert (result.total.written, [rejection.offset for rejection in rejected]) == (2, [3])
    assert (replaying.offsets("db.a"), replaying.offsets("db.b")) == ([2], [1, 2])


def test_many_reasons_are_counted_and_some_of_them_reported(tmp_path: Path):
    replaying = Replaying(tmp_path, table(tmp_path, "db.t"))
    result, rejected = replaying(*(dead_letter(i, b"{") for i in range(3 * replay.MOST_REPORTED)))
    assert (result.total.rejected, len(rejected)) == (
        3 * replay.MOST_REPORTED,
        replay.MOST_REPORTED,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_holds_few_of_its_dead_letters_in_memory_and_writes_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """Also where a writer fails on the way, and all of them are settled once more."""

    class Torn(TableWriter):
        writes = 0

        def write(self, rows: pa.Table) -> None:
            Torn.writes += 1
            if fails and Torn.writes == 30:
                raise RuntimeError("the disk has a scratch")
            super().write(rows)

    held: list[weakref.ref[pa.RecordBatch]] = []
    most = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for offset in range(40):
            given = [dead_letter(offset, doc("paid"))]
            batch = pa.RecordBatch.from_pylist(given, schema=HANDED)
            held.append(weakref.ref(batch))
            yield batch
            del batch
            most = max(most, sum(reference() is not None for reference in held))

    monkeypatch.setattr(task, "TableWriter", Torn)
    replaying = Replaying(tmp_path, table(tmp_path, "db.t"))
    [output] = replay.run_all(replaying.replay, batches())
    result = RangeResult.of(json.loads(output.column("result")[0].as_py()))
    assert result.total.written == 40
    assert result.tallies["db.t"].written == sum(file.rows for file in result.files["db.t"]) == 40
    assert most <= 2
    assert (Torn.writes > 80) == fails


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = Path("/dev/full")
    monkeypatch.setattr(replay.tempfile, "TemporaryFile", lambda **_: full.open("r+b", 0))
    batch = pa.RecordBatch.from_pylist([dead_letter(1, doc("paid"))], schema=HANDED)
    with pytest.raises(Exception, match=r"keep dead letters in a temporary file: .*space"):
        list(replay.run_all(Replaying(tmp_path, table(tmp_path, "db.t")).replay, [batch]))


def test_a_task_without_dead_letters_has_a_result(tmp_path: Path):
    [output] = replay.run_all(Replaying(tmp_path, table(tmp_path, "db.t")).replay, [])
    assert RangeResult.of(json.loads(output.column("result")[0].as_py())).total.written == 0
    result, rejected = replay.run(Replaying(tmp_path, table(tmp_path, "db.t")).replay, [])
    assert (result.total.written, result.files, rejected) == (0, {}, [])


@pytest.mark.parametrize("copy", [lambda it: it, lambda it: pickle.loads(pickle.dumps(it))])
def test_all_names_but_these(copy: Any):
    others = copy(AllBut(["db.a"]))
    assert "db.b" in others
    assert "db.a" not in others


def test_what_is_read_of_a_dead_letter_is_there():
    columns = {*DEAD_LETTER_COLUMNS.names, *(field.name for field in DEAD_LETTER_METADATA.fields)}
    assert set(replay.READ) <= columns
    assert set(replay.READ) == set(HANDED.names)
    assert HEADERS.value_type.num_fields == 2


def test_a_replay_needs_no_settings_of_kafka():
    """Neither their secrets nor their servers: its records come from a table."""
    config = Config(
        {"id": "orders", "topics": ["t"]},
        {"bootstrap.servers": "env:FRAZIL_TEST_THAT_NOBODY_SETS"},
        [{"name": "db.t"}],
        dead_letters={"table": "db.dead"},
        decode={"format": "json"},
    )
    source = DeadLetterSource(
        replaying(config),
        Retry(0.0, lambda: True),
        BatchGathering(0.0),
        wanted=DeadLetterSelection(),
        of=config,
    )
    assert source.template("db.t") == "db.t"
    assert list(source.required) == ["db.dead_replayed"]
