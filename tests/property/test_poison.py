"""The hostile records of `make poison`, without Kafka and Spark: whatever stands around them, every
good one is exact and every bad one is rejected, once. And the judge is itself looked at."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from frazil.arrow.avro import WriterSchema
from frazil.config.sections import RouteConfig, TableConfig
from frazil.files import writer
from frazil.files.writer import WriterSpec
from frazil.formats import debezium, json_reader
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema, partition_spec
from frazil.kafka.fetch import FetchedChunk
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import Partition, Range
from frazil.pipeline import fitting, json_records, task
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import ChunkPlan, TablePlan
from frazil.pipeline.task import DEAD_LETTER_COLUMNS

_spec = importlib.util.spec_from_file_location(
    "poison", Path(__file__).parents[2] / "bench" / "poison.py"
)
assert _spec is not None
assert _spec.loader is not None
poison: Any = importlib.util.module_from_spec(_spec)
sys.modules["poison"] = poison
_spec.loader.exec_module(poison)

METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
SOURCES = pytest.mark.parametrize("kind", ["avro", "json"])


@pytest.fixture(scope="module")
def registry() -> Iterator[Any]:
    with poison.Registry() as running:
        yield running


def source(kind: str, seed: int) -> Any:
    return poison.Avro(seed) if kind == "avro" else poison.Json(seed)


def settler(kind: str, url: str) -> ChunkPipeline:
    if kind == "avro":
        columns = WriterSchema(json.dumps(poison.EVENT)).columns
        format = RecordFormat("confluent-avro", registry={"url": url})
    else:
        columns = pa.schema(
            [column.with_nullable(column.name != "id") for column in poison.JSON_COLUMNS]
        )
        format = RecordFormat("json")
    schema = iceberg_schema(columns, METADATA, TableConfig("db.t"))
    shape = WriterSpec("db.t", "", schema, 0, "", {}, 0, "", {})
    return ChunkPipeline(
        ChunkPlan(format, None, {"db.t": TablePlan(shape, METADATA, "", "reject")}, only="db.t")
    )


@SOURCES
@pytest.mark.parametrize("seed", range(3))
def test_every_good_record_is_exact_and_every_bad_one_is_rejected_once(
    kind: str, seed: int, registry: Any
):
    r = random.Random(seed)
    topic = poison.Topic(kind, source(kind, seed))
    values = list(topic.records(1_500, seed, head=20))
    settle = settler(kind, registry.url).process
    rows: list[pa.Table] = []
    dead_letters: list[tuple[int, int, bytes | None]] = []
    for number in range(poison.PARTITIONS):
        sent = values[number :: poison.PARTITIONS]
        start = 0
        while start < len(sent):
            part = sent[start : start + r.choice([1, 3, 50, 200, 2000])]
            offsets = np.arange(start, start + len(part))
            settled = settle(
                Partition("t", number), RawRecords(part, offsets, offsets), frozenset()
            )
            rows += [table for _, table in settled.rows]
            for name, key in (("message", "reason"), ("schema_id", "schema_id")):
                column = [getattr(rejection, key) for rejection in settled.rejections.values()]
                # what is reported can be written
                pa.array(column, DEAD_LETTER_COLUMNS.field(name).type)
            dead_letters += [(number, start + i, part[i]) for i in settled.rejections]
            assert not settled.needs
            assert not settled.skipped
            start += len(part)
    good_rows = poison.gathered(rows, topic.source.columns, *poison.PLACE)
    assert poison.same(good_rows, topic.expected_rows()) == (topic.good, "")
    actual = pa.table(
        [pa.array(cells) for cells in zip(*sorted(dead_letters), strict=True)],
        names=["partition", "offset", "value"],
    )
    actual = poison.gathered([actual], poison.VALUE, "partition", "offset")
    assert poison.same(actual, topic.expected_letters()) == (topic.hostile, "")
    assert topic.hostile == 1_500


@SOURCES
def test_a_hostile_record_of_each_kind_is_found_among_good_ones(kind: str, registry: Any):
    """Where all are read at once, and one is bad."""
    made = source(kind, 7)
    settle = settler(kind, registry.url).process
    bad = {name: value for name, value, row in (made.hostile() for _ in range(3_000)) if not row}
    assert len(bad) > 20
    for name, value in bad.items():
        values = [made.good()[0] for _ in range(40)]
        values[17] = value
        offsets = np.arange(len(values))
        settled = settle(Partition("t", 0), RawRecords(values, offsets, offsets), frozenset())
        assert list(settled.rejections) == [17], (name, value)
        assert sum(len(table) for _, table in settled.rows) == 39


# ── a record at which a station fails ───────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "stations", [poison.STATIONS_AT, poison.CHANGES_AT], ids=["rows", "changes"]
)
def test_a_record_at_which_a_station_fails_is_rejected_alone(
    stations: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The faults of `make poison`, planted here as its route plants them in Spark's workers."""
    layout = writer._Layout
    for where, name in (
        (json_reader.JsonShape, "decode"),
        (debezium, "_change"),
        (json_records, "wanted"),
        (fitting, "project_rows"),
        (layout, "clusters"),
        (layout, "path"),
        (writer._OpenFile, "encode"),
        (layout, "descriptor"),
    ):
        monkeypatch.setattr(where, name, getattr(where, name))  # what is planted is taken out again
    planted: dict[str, Any] = {}
    exec(poison.STATIONS_ROUTE, planted)
    planted["plant"]()
    values = list(poison.station_records(stations))

    def fetch(kafka: Any, wanted: Range, **_: Any) -> Iterator[FetchedChunk]:
        for start in range(wanted.start, wanted.end, 300):
            offsets = np.arange(start, min(start + 300, wanted.end))
            sent = values[start : int(offsets[-1]) + 1]
            keys = pa.nulls(len(sent), pa.large_binary())
            opened = RawRecords(sent, offsets, offsets, keys, pa.array([[]] * len(sent), HEADERS))
            yield FetchedChunk(
                Range(wanted.partition, start, start + len(sent)), None, opened, True
            )

    monkeypatch.setattr(task, "fetch", fetch)

    def made(
        name: str, columns: pa.Schema, metadata: MetadataColumns, by: tuple[str, ...]
    ) -> TablePlan:
        schema = iceberg_schema(columns, metadata, TableConfig(name))
        spec = partition_spec(schema, by, name)
        shape = WriterSpec(name, str(tmp_path / name), schema, 0, spec, {}, 2**28, "zstd", {})
        return TablePlan(shape, metadata, "")

    columns = pa.schema([("id", pa.int64()), ("word", pa.large_string()), ("_op", pa.string())])
    tables = {"db.stations": made("db.stations", columns, METADATA, ("word",))}
    dead_letters = made("db.dead", DEAD_LETTER_COLUMNS, task.DEAD_LETTER_METADATA, ())
    plan = task.BatchPlan(
        rules=None,
        kafka={},
        format=RecordFormat("json"),
        tables=tables,
        only="db.stations",
        dead_letters=dead_letters,
        file_prefix="p",
    )
    if stations is poison.CHANGES_AT:
        route = RouteConfig(to=("db.stations",), envelope="debezium")
        plan = replace(plan, only="", rules=RoutingRules([route], ["db.stations"]))
    [(_, ended)] = list(task.run_all(plan, [Range(Partition("t", 0), 0, len(values))]))
    [result] = ended.results
    files = {
        name: [json.loads(file.descriptor)["file-path"] for file in some]
        for name, some in result.files.items()
    }
    dead = pa.concat_tables(poison.read(files["db.dead"])).to_pylist()
    kinds = {row["offset"]: row["kind"] for row in dead}
    assert kinds == {
        at: "failed" if word in ("unwrap", "decode", "learn", "fit") else "unwritable"
        for at, word in stations.items()
    }
    ids = pa.concat_tables(poison.read(files["db.stations"])).column("id").to_pylist()
    assert sorted(ids) == [at for at in range(len(values)) if at not in stations]
    assert result.total.balanced


# ── the judge ───────────────────────────────────────────────────────────────────────────────────


@SOURCES
def test_what_is_bad_by_construction_is_bad_to_the_judge(kind: str):
    made = source(kind, 11)
    judge = poison.judged_avro if kind == "avro" else poison.judged_json
    for _ in range(5_000):
        name, value, row = made.hostile()
        if row is None:
            assert judge(value) is None, (name, value)


@SOURCES
def test_the_judge_reads_good_records_as_they_were_meant(kind: str):
    made = source(kind, 13)
    judge = poison.judged_avro if kind == "avro" else poison.judged_json
    for _ in range(500):
        value, number, at = made.good()
        row = {**made.rows[at], "id": number}
        if kind == "avro":
            row["counts"] = list(row["counts"].items())
        assert judge(value) == row


def test_good_avro_is_what_fastavro_writes():
    made = poison.Avro(17)
    for _ in range(300):
        value, number, at = made.good()
        row = {**made.rows[at], "id": number}
        row["clock"] //= 1000
        out = io.BytesIO()
        schema = poison.GOOD[int.from_bytes(value[1:5], "big")]
        fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
        assert value[5:] == out.getvalue()


def test_half_of_the_records_are_hostile():
    for count in (1, 2, 7, 1_000, 25_001):
        flags = list(poison.order(count, random.Random(1)))
        assert (sum(flags), len(flags)) == (count, 2 * count)


def test_what_is_lost_twice_or_wrong_is_seen():
    topic = poison.Topic("json", poison.Json(19))
    list(topic.records(50, 1, head=5))
    right = topic.expected_rows()
    names = pc.replace_substring(right["name"], "x", "y", max_replacements=1)
    wrong = {
        "1 are missing": right.slice(1),
        "twice": pa.concat_tables([right.slice(0, 1), right]),
        "1 are too many": pa.concat_tables(
            [right, right.slice(0, 1).set_column(0, "partition", pa.array([9], pa.int32()))]
        ),
        "name: expected": right.set_column(right.schema.get_field_index("name"), "name", names),
    }
    assert poison.same(right, right) == (topic.good, "")
    for why, damaged in wrong.items():
        count, reason = poison.same(damaged, right)
        assert why in reason
        assert count < topic.good or "too many" in reason
