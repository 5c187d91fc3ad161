"""Partition values of every kind: computed, serialised and named."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.transforms import parse_transform
from pyiceberg.types import DateType, TimestampNanoType, TimestampType, TimestamptzNanoType

from frazil.errors import SchemaMismatch
from frazil.files.partition_values import json_value, transformation
from frazil.files.writer import TableWriter
from tests.unit.test_write import facts, shape

NAN = float("nan")
EPOCH = dt.date(1970, 1, 1)


def files(folder: Path, column: pa.Array, *by: str, version: int = 2) -> list[dict[str, Any]]:
    """The descriptors of a table with one column `x`."""
    where = shape(folder, pa.schema({"x": column.type}), *by, version=version)
    writer = TableWriter(where, "p")
    writer.write(pa.table([column], schema=where.arrow))
    return facts(writer.close())


def values(fact: dict[str, Any]) -> list[Any]:
    return pq.ParquetFile(fact["file-path"]).read().column("x").to_pylist()


def bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<d", math.nan if math.isnan(value) else value)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_each_float_is_a_partition_of_its_own_both_zeros_and_nan_too(tmp_path: Path, kind: Any):
    minus_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    column = pa.array([NAN, 0.0, -0.0, math.inf, -math.inf, 0.1, None, minus_nan, -0.0], kind)
    facts = files(tmp_path, column, "x")
    for fact in facts:
        (described,) = json.loads(json.dumps(fact["partition"]))  # as the driver hears it
        assert {bits(value) for value in values(fact)} == {bits(described)}
    assert sorted(len(values(fact)) for fact in facts) == [1, 1, 1, 1, 1, 2, 2]


def test_files_of_one_partition_are_not_mixed_with_those_of_the_other_zero(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"x": pa.float64()}), "x")
    writer = TableWriter(where, "p")
    for value in (0.0, -0.0, 0.0, -0.0, NAN, NAN):
        writer.write(pa.table({"x": [value]}, schema=where.arrow))
        writer.flush(everything=True)
    assert sorted(fact["record-count"] for fact in facts(writer.close())) == [2, 2, 2]


@pytest.mark.parametrize("length", [100, 127, 400, 5000, 100_000])
def test_a_partition_of_any_text_has_a_path_that_every_store_takes(tmp_path: Path, length: int):
    texts = ["a" * length, "a" * (length - 1) + "b", "ü/%\0" * length]
    facts = files(tmp_path, pa.array(texts, pa.large_string()), "x")
    assert sorted(fact["partition"][0] for fact in facts) == sorted(texts)
    folders = {Path(fact["file-path"]).parent.name for fact in facts}
    assert len(folders) == 3
    assert all(len(folder) <= 128 for folder in folders)


def test_many_partition_fields_together_have_a_short_path(tmp_path: Path):
    names = [f"{'n' * 40}{i}" for i in range(20)]
    where = shape(tmp_path, pa.schema({name: pa.large_string() for name in names}), *names)
    writer = TableWriter(where, "p")
    writer.write(pa.table({name: ["v" * 50] for name in names}, schema=where.arrow))
    (fact,) = facts(writer.close())
    assert len(fact["file-path"]) - len(str(tmp_path)) < 600
    assert fact["partition"] == ["v" * 50] * 20


def test_bytes_are_truncated(tmp_path: Path):
    column = pa.array([b"abc", b"abd", b"\xff\xff\xff", b"", None], pa.large_binary())
    counts = {
        fact["partition"][0]: len(values(fact))
        for fact in files(tmp_path, column, "truncate(2, x)")
    }
    assert counts == {"6162": 2, "ffff": 1, "": 1, None: 1}


def test_a_source_inside_structs_is_found_whatever_the_names(tmp_path: Path):
    inner = pa.struct({"c.d": pa.date32(), ".e": pa.int32()})
    column = pa.array(
        [{"a.b": {"c.d": 0, ".e": 5}}, {"a.b": None}, None], pa.struct({"a.b": inner})
    )
    assert sorted(map(str, (f["partition"] for f in files(tmp_path, column, "x.a.b.c.d")))) == [
        "['1970-01-01']",
        "[None]",
    ]
    assert len(files(tmp_path, column, "x.a.b..e")) == 2


def test_calendar_transforms_are_those_of_pythons_calendar():
    dice = random.Random(4)
    days = [-719_162, 2_932_896, 0, -1, *(dice.randint(-719_162, 2_932_896) for _ in range(500))]
    dates = [EPOCH + dt.timedelta(days=day) for day in days]
    for kind, unit, zone in (
        (DateType(), "", None),
        (TimestampType(), "us", None),
        (TimestamptzNanoType(), "ns", "UTC"),
    ):
        near = [day for day in days if abs(day) < 100_000 or unit != "ns"]
        near_dates = [date for day, date in zip(days, dates, strict=True) if day in set(near)]
        scale = {"": 1, "us": 86_400_000_000, "ns": 86_400_000_000_000}[unit]
        last = 0 if not unit else scale - 1  # the end of the day
        numbers = [day * scale + last for day in near]
        column = (
            pa.array(numbers, pa.timestamp(unit, zone)) if unit else pa.array(numbers, pa.date32())
        )

        def by(word: str, kind: Any = kind, column: Any = column) -> list[Any]:
            return transformation(parse_transform(word), kind)(column).to_pylist()

        assert by("year") == [date.year - 1970 for date in near_dates]
        assert by("month") == [(date.year - 1970) * 12 + date.month - 1 for date in near_dates]
        assert by("day") == near
        if unit:
            assert by("hour") == [day * 24 + 23 for day in near]
        assert [json_value(DateType(), day) for day in near] == [
            date.isoformat() for date in near_dates
        ]


@pytest.mark.parametrize(
    ("days", "text", "year", "month"),
    [
        (-719_528, "0000-01-01", -1970, -23640),
        (-719_529, "-0001-12-31", -1971, -23641),
        (2_932_897, "+10000-01-01", 8030, 96360),
        (2**31 - 1, "+5881580-07-11", 5879610, 70555326),
        (-(2**31), "-5877641-06-23", -5879611, -70555327),
    ],
)
def test_years_that_python_does_not_have_are_partitions_too(
    tmp_path: Path, days: int, text: str, year: int, month: int
):
    column = pa.array([days, None], pa.date32())
    for by, value in (("x", text), ("day(x)", text), ("year(x)", year), ("month(x)", month)):
        partitions = [fact["partition"][0] for fact in files(tmp_path, column, by)]
        assert sorted(partitions, key=str) == sorted([value, None], key=str)


def test_timestamps_are_exact_to_the_last_digit():
    us = dt.datetime(2024, 2, 29, 23, 59, 59, 5)
    micros = (us - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
    assert json_value(TimestampType(), micros) == "2024-02-29T23:59:59.000005"
    assert json_value(TimestampType(), 0) == "1970-01-01T00:00:00"
    assert json_value(TimestamptzNanoType(), -1) == "1969-12-31T23:59:59.999999999+00:00"


def test_nanoseconds_are_partitions_by_themselves_by_hour_and_by_bucket(tmp_path: Path):
    column = pa.array([1, -1, 3_600_000_000_000, -1001], pa.timestamp("ns"))
    partitions = [fact["partition"][0] for fact in files(tmp_path, column, "x", version=3)]
    assert sorted(partitions)[0] == "1969-12-31T23:59:59.999998999"
    hours = {fact["partition"][0] for fact in files(tmp_path, column, "hour(x)", version=3)}
    assert hours == {-1, 0, 1}
    buckets = transformation(parse_transform("bucket[16]"), TimestampNanoType())(column)
    micros = pa.array(np.array([0, -1, 3_600_000_000, -2]), pa.timestamp("us"))
    assert buckets == transformation(parse_transform("bucket[16]"), TimestampType())(micros)


def test_rows_that_no_partition_can_have_are_refused_by_the_writer(tmp_path: Path):
    """Where nothing rejects records: those of a DataFrame."""
    with pytest.raises(SchemaMismatch, match="whose hour takes more than 32 bits"):
        files(tmp_path, pa.array([0, 2**63 - 1], pa.timestamp("us")), "hour(x)")
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_sort_order_by_the_hour_takes_every_moment(tmp_path: Path):
    order = {
        "order-id": 1,
        "fields": [
            {"source-id": 1, "transform": "hour", "direction": "asc", "null-order": "nulls-first"}
        ],
    }
    where = shape(tmp_path, pa.schema({"x": pa.timestamp("us")}), sort_order=json.dumps(order))
    writer = TableWriter(where, "p")
    column = pa.array([2**63 - 1, 0, -(2**63)], pa.timestamp("us"))
    writer.write(pa.table([column], schema=where.arrow))
    (fact,) = facts(writer.close())
    back = pq.ParquetFile(fact["file-path"]).read().column("x").cast(pa.int64())
    assert back.to_pylist() == [-(2**63), 0, 2**63 - 1]
