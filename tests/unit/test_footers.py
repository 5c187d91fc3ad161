"""Manifests against the files that they describe: every difference is found, and nothing else."""

from __future__ import annotations

import datetime
import random
import uuid
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import to_bytes
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    UUIDType,
)

from frazil.files.column_bounds import ColumnExtent, extents
from frazil.iceberg.footers import DescribedFile, misdescribed

NAMES = {1: "x"}


def written(folder: Path, kind: pa.DataType, *groups: list[Any]) -> pq.ParquetFile:
    field = pa.field("x", kind, metadata={b"PARQUET:field_id": b"1"})
    path = folder / f"{uuid.uuid4()}.parquet"
    with pq.ParquetWriter(path, pa.schema([field])) as out:
        for values in groups:
            out.write_table(pa.table({"x": pa.array(values, kind)}, schema=pa.schema([field])))
    return pq.ParquetFile(path)


def described(file: pq.ParquetFile, lower: bytes | None, upper: bytes | None) -> DescribedFile:
    rows, column = file.metadata.num_rows, file.read().column(0)
    low, high = ({} if bound is None else {1: bound} for bound in (lower, upper))
    return DescribedFile("/f", rows, {1: rows}, {1: column.null_count}, low, high)


DAY, MOMENT = datetime.date(2026, 11, 17), datetime.datetime(2026, 11, 17, 12)
KINDS = [
    (pa.int32(), IntegerType(), [-5, 3, 7]),
    (pa.int64(), LongType(), [-(2**62), 0, 2**62]),
    (pa.float64(), DoubleType(), [-1.5, 0.0, 2.5]),
    (pa.string(), StringType(), ["a", "m", "zz"]),
    (pa.large_string(), StringType(), ["a", "m", "zz"]),
    (pa.binary(), BinaryType(), [b"\x00", b"m", b"\xff"]),
    (pa.date32(), DateType(), [DAY, DAY + datetime.timedelta(1), DAY + datetime.timedelta(9)]),
    (pa.timestamp("us"), TimestampType(), [MOMENT + datetime.timedelta(n) for n in (0, 1, 9)]),
    (pa.decimal128(10, 2), DecimalType(10, 2), [Decimal(n) for n in ("-1.10", "0.00", "2.20")]),
    (pa.binary(16), FixedType(16), [bytes([n]) * 16 for n in (1, 2, 200)]),
]


def raw(kind: Any, value: Any) -> bytes:
    if isinstance(value, datetime.datetime):
        value = int((value - datetime.datetime(1970, 1, 1)).total_seconds() * 1_000_000)
    elif isinstance(value, datetime.date):
        value = (value - datetime.date(1970, 1, 1)).days
    return to_bytes(kind, value)


@pytest.mark.parametrize(("arrow", "kind", "values"), KINDS, ids=[str(case[0]) for case in KINDS])
def test_bounds_that_leave_values_out_are_reported_with_their_number(
    arrow: pa.DataType, kind: Any, values: list[Any], tmp_path: Path
):
    low, middle, high = values
    file = written(tmp_path, arrow, [low, middle, None], [high, high])
    assert misdescribed(described(file, raw(kind, low), raw(kind, high)), file, NAMES) == []
    assert misdescribed(described(file, None, None), file, NAMES) == []
    for lower, upper, many in ((middle, high, 1), (low, middle, 2), (high, high, 2)):
        [message] = misdescribed(described(file, raw(kind, lower), raw(kind, upper)), file, NAMES)
        assert message == f"bounds of column x that leave {many} of its values out"


def test_values_too_long_for_a_footer_are_read_before_anything_is_said(tmp_path: Path):
    """As it was: a row group with a value of 5,000 bytes, and bounds of the others."""
    file = written(tmp_path, pa.string(), ["a", "m"], ["n", "z" * 5000, "y"])
    [message] = misdescribed(described(file, b"a", b"m"), file, NAMES)
    assert message == "bounds of column x that leave 3 of its values out"
    assert misdescribed(described(file, b"a", b"zzzzzzzzzzzzzzz{"), file, NAMES) == []


def test_counts_that_are_not_the_footers_are_reported(tmp_path: Path):
    file = written(tmp_path, pa.int64(), [1, None, 3])
    right = described(file, None, None)
    assert misdescribed(right, file, NAMES) == []
    wrong = {
        "4 rows; expected 3, as its footer says": replace(right, rows=4),
        "2 values of column x; expected 3": replace(right, values={1: 2}),
        "0 nulls of column x; expected 1": replace(right, nulls={1: 0}),
    }
    for message, description in wrong.items():
        assert misdescribed(description, file, NAMES) == [message]


def test_bounds_of_a_wider_type_count_and_those_of_no_type_are_reported(tmp_path: Path):
    file = written(tmp_path, pa.int32(), [1, 5])
    assert misdescribed(described(file, raw(LongType(), 1), raw(LongType(), 5)), file, NAMES) == []
    [message] = misdescribed(described(file, raw(LongType(), 2), raw(LongType(), 5)), file, NAMES)
    assert "leave 1 of" in message
    file = written(tmp_path, pa.int64(), [1])
    assert misdescribed(described(file, b"\x01", None), file, NAMES) == [
        "bounds of column x that are no long"
    ]


def test_columns_inside_structs_are_compared_and_those_in_lists_have_no_bounds(tmp_path: Path):
    inner = pa.field("b", pa.string(), metadata={b"PARQUET:field_id": b"2"})
    outer = pa.field("a", pa.struct([inner]), metadata={b"PARQUET:field_id": b"1"})
    item = pa.field("element", pa.int64(), metadata={b"PARQUET:field_id": b"4"})
    many = pa.field("l", pa.list_(item), metadata={b"PARQUET:field_id": b"3"})
    texts = pa.array([{"b": "k"}, None, {"b": "q"}], outer.type)
    lists = pa.array([[1, 2], [], None], many.type)
    pq.write_table(
        pa.table([texts, lists], schema=pa.schema([outer, many])), tmp_path / "f.parquet"
    )
    file = pq.ParquetFile(tmp_path / "f.parquet")
    description = DescribedFile("/f", 3, {2: 3}, {2: 1}, {2: b"k"}, {2: b"p"})
    assert misdescribed(description, file, {}) == [
        "bounds of column a.b that leave 1 of its values out"
    ]
    assert misdescribed(replace(description, upper={2: b"q"}), file, {}) == []


def test_uuids_are_compared_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from frazil.iceberg import footers

    values = sorted(uuid.UUID(int=random.Random(n).getrandbits(128)) for n in range(3))
    file = written(tmp_path, pa.binary(16), [value.bytes for value in values])
    uuid_extents = {1: replace(extents(file.metadata)[1], kind=UUIDType())}
    monkeypatch.setattr(footers, "extents", lambda _: uuid_extents)
    monkeypatch.setattr(ColumnExtent, "within", lambda *_: None)
    [message] = misdescribed(described(file, values[1].bytes, values[2].bytes), file, NAMES)
    assert "leave 1 of" in message
