"""The hostile records of `make poison`, without Kafka and Spark: whatever stands around them, every
good one is exact and every bad one is rejected, once. And the judge is itself looked at."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from frazil.core.config import TableConfig
from frazil.core.offsets import Partition
from frazil.ingest.avro import Writer
from frazil.ingest.decode import Format
from frazil.ingest.records import Opened
from frazil.ingest.route import Metadata
from frazil.ingest.settle import Settler, TablePlan
from frazil.ingest.task import LETTER_COLUMNS
from frazil.ingest.write import TableShape
from frazil.table.schema import iceberg_schema

_spec = importlib.util.spec_from_file_location(
    "poison", Path(__file__).parents[2] / "bench" / "poison.py"
)
assert _spec is not None
assert _spec.loader is not None
poison: Any = importlib.util.module_from_spec(_spec)
sys.modules["poison"] = poison
_spec.loader.exec_module(poison)

METADATA = Metadata("_topic", "_topic_partition", "_offset", "_timestamp")
SOURCES = pytest.mark.parametrize("kind", ["avro", "json"])


@pytest.fixture(scope="module")
def registry() -> Iterator[Any]:
    with poison.Registry() as running:
        yield running


def source(kind: str, seed: int) -> Any:
    return poison.Avro(seed) if kind == "avro" else poison.Json(seed)


def settler(kind: str, url: str) -> Settler:
    if kind == "avro":
        columns = Writer(json.dumps(poison.EVENT)).columns
        format = Format("confluent-avro", registry={"url": url})
    else:
        columns = pa.schema([each.with_nullable(each.name != "id") for each in poison.JSON_COLUMNS])
        format = Format("json")
    schema = iceberg_schema(columns, METADATA, TableConfig("db.t"))
    shape = TableShape("db.t", "", schema, 0, "", {}, 0, "", {})
    return Settler(format, None, {"db.t": TablePlan(shape, METADATA, "", "frozen")}, only="db.t")


@SOURCES
@pytest.mark.parametrize("seed", range(3))
def test_every_good_record_is_exact_and_every_bad_one_is_rejected_once(
    kind: str, seed: int, registry: Any
):
    r = random.Random(seed)
    topic = poison.Topic(kind, source(kind, seed))
    values = list(topic.records(1_500, seed, head=20))
    settle = settler(kind, registry.url).settle
    rows: list[pa.Table] = []
    letters: list[tuple[int, int, bytes | None]] = []
    for number in range(poison.PARTITIONS):
        mine = values[number :: poison.PARTITIONS]
        start = 0
        while start < len(mine):
            part = mine[start : start + r.choice([1, 3, 50, 200, 2000])]
            offsets = np.arange(start, start + len(part))
            settled = settle(
                Partition("t", number), Opened(part, offsets, offsets), None, frozenset()
            )
            rows += [each for _, each in settled.rows]
            for name, told in (("message", "reason"), ("schema_id", "schema_id")):
                column = [getattr(each, told) for each in settled.letters.values()]
                pa.array(column, LETTER_COLUMNS.field(name).type)  # what is told can be written
            letters += [(number, start + i, part[i]) for i in settled.letters]
            assert not settled.needs
            assert not settled.skipped
            start += len(part)
    found = poison.gathered(rows, topic.source.columns, *poison.PLACE)
    assert poison.same(found, topic.expected_rows()) == (topic.good, "")
    told = pa.table([pa.array(each) for each in zip(*sorted(letters), strict=True)],
                    names=["partition", "offset", "value"])  # fmt: skip
    told = poison.gathered([told], poison.VALUE, "partition", "offset")
    assert poison.same(told, topic.expected_letters()) == (topic.hostile, "")
    assert topic.hostile == 1_500


@SOURCES
def test_a_hostile_record_of_each_kind_is_found_among_good_ones(kind: str, registry: Any):
    """Where all are read at once, and one is bad."""
    made = source(kind, 7)
    settle = settler(kind, registry.url).settle
    bad = {name: value for name, value, row in (made.hostile() for _ in range(3_000)) if not row}
    assert len(bad) > 20
    for name, value in bad.items():
        values = [made.good()[0] for _ in range(40)]
        values[17] = value
        offsets = np.arange(len(values))
        settled = settle(Partition("t", 0), Opened(values, offsets, offsets), None, frozenset())
        assert list(settled.letters) == [17], (name, value)
        assert sum(len(each) for _, each in settled.rows) == 39


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
        told = list(poison.order(count, random.Random(1)))
        assert (sum(told), len(told)) == (count, 2 * count)


def test_what_is_lost_twice_or_wrong_is_seen():
    topic = poison.Topic("json", poison.Json(19))
    list(topic.records(50, 1, head=5))
    right = topic.expected_rows()
    names = pc.replace_substring(right["name"], "x", "y", max_replacements=1)
    wrong = {
        "1 are missing": right.slice(1),
        "twice": pa.concat_tables([right.slice(0, 1), right]),
        "1 are too many": pa.concat_tables([right, right.slice(0, 1).set_column(
            0, "partition", pa.array([9], pa.int32()))]),
        "name: expected": right.set_column(right.schema.get_field_index("name"), "name", names),
    }  # fmt: skip
    assert poison.same(right, right) == (topic.good, "")
    for why, found in wrong.items():
        count, said = poison.same(found, right)
        assert why in said
        assert count < topic.good or "too many" in said
