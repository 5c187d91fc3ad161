"""Column statistics from Parquet footers: bounds cover every value of a file, or are absent."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.schema import Schema
from pyiceberg.types import BinaryType, FloatType, LongType, NestedField, StringType

from frazil.files.column_bounds import ColumnExtent, _extent, extents
from frazil.iceberg.rewrite_data_files import RewriteState, TableFile
from tests.unit.test_write import bounds, counts, facts, shape, written

NAN = float("nan")


def described(folder: Path, kind: pa.DataType, *groups: list[Any], **properties: str) -> Any:
    """The descriptor of one file with a column of these values."""
    where = shape(folder, pa.schema({"x": kind}), properties=properties)
    (fact,) = facts(written(where, *({"x": values} for values in groups)))
    return fact


def test_a_row_group_with_an_over_long_value_leaves_its_column_without_bounds(tmp_path: Path):
    for kind, long in ((pa.string(), "z" * 5000), (pa.binary(), b"z" * 5000)):
        short = ["m", "n"] if kind == pa.string() else [b"m", b"n"]
        for groups in ([short, [long]], [[long], short], [[*short, long], short, short]):
            fact = described(tmp_path, kind, *groups, **{"write.parquet.row-group-size-bytes": "1"})
            assert bounds(fact, "lower-bounds") == bounds(fact, "upper-bounds") == {}
            assert counts(fact, "value-counts") == {1: sum(map(len, groups))}
            assert counts(fact, "null-value-counts") == {1: 0}


def test_row_groups_without_a_value_or_with_nan_alone_do_not_take_bounds_away(tmp_path: Path):
    small = {"write.parquet.row-group-size-bytes": "1"}
    fact = described(tmp_path, pa.string(), [None, None], ["b", "a"], [None], **small)
    assert (bounds(fact, "lower-bounds"), bounds(fact, "upper-bounds")) == ({1: b"a"}, {1: b"b"})
    fact = described(tmp_path, pa.float32(), [NAN], [0.0, NAN], [None, NAN], **small)
    low, high = (bounds(fact, f"{side}-bounds")[1] for side in ("lower", "upper"))
    assert (low.hex(), high.hex()) == ("00000080", "00000000")  # -0.0 and 0.0
    for values in ([None], [NAN], [NAN, None]):
        fact = described(tmp_path, pa.float64(), values)
        assert bounds(fact, "lower-bounds") == bounds(fact, "upper-bounds") == {}


@pytest.mark.parametrize("following", ["", "z", "\U0010ffff" * 3])
def test_an_upper_bound_that_is_cut_short_never_ends_in_half_a_surrogate_pair(tmp_path, following):
    value = "a" * 15 + "\ud7ff" + following
    fact = described(tmp_path, pa.string(), [value, "a"])
    high = bounds(fact, "upper-bounds")[1].decode()
    assert high == (value if not following else "a" * 15 + "\ue000")
    fact = described(tmp_path, pa.string(), ["\U0010ffff" * 17])
    assert bounds(fact, "upper-bounds") == {}
    assert bounds(fact, "lower-bounds") == {1: ("\U0010ffff" * 16).encode()}


def test_bounds_cover_every_value_whatever_the_row_groups_and_metrics_modes(tmp_path: Path):
    dice = random.Random(5)
    kinds = {
        pa.string(): lambda: "".join(dice.choices("a\ud7ff\ue000\U0010ffff\0", k=length())),
        pa.binary(): lambda: bytes(dice.choices([0, 127, 128, 255], k=length())),
        pa.int64(): lambda: dice.choice([-(2**63), -1, 0, 2**63 - 1]),
        pa.float64(): lambda: dice.choice([NAN, -0.0, 0.0, float("inf"), -float("inf"), 5e-324]),
        pa.decimal128(38, 5): lambda: Decimal(
            dice.choice(["-" + "9" * 33 + ".99999", "0", "2.55"])
        ),
        pa.uuid(): lambda: uuid.UUID(int=dice.choice([0, 2**127, 2**128 - 1])).bytes,
        pa.date32(): lambda: dice.choice([-(2**31), 0, 2**31 - 1]),
        pa.binary(3): lambda: bytes(dice.choices([0, 255], k=3)),
    }

    def length() -> int:
        return dice.choice([0, 1, 15, 16, 17, 18, 40, dice.choice([4095, 4097, 5000])])

    for _ in range(250):
        kind = dice.choice(list(kinds))
        mode = dice.choice(["truncate(16)", "truncate(1)", "full", "counts", "none"])
        groups = [
            [dice.choice([None, kinds[kind]()]) for _ in range(dice.randint(1, 4))]
            for _ in range(dice.randint(1, 4))
        ]
        size = {"write.parquet.row-group-size-bytes": dice.choice(["1", "1000"])}
        mode_ = {"write.metadata.metrics.default": mode}
        fact = described(tmp_path, kind, *groups, **size, **mode_)
        footer = pq.ParquetFile(fact["file-path"]).metadata
        (extent,) = extents(footer).values()
        values = [
            value for some in groups for value in some if value is not None and value == value
        ]
        low, high = (bounds(fact, f"{side}-bounds").get(1) for side in ("lower", "upper"))
        assert extent.within(low, high) is True
        assert not extent.complete or extent.low == min(values, default=None)
        assert not extent.complete or extent.high == max(values, default=None)
        for value in values:
            assert low is None or from_bytes(extent.kind, low) <= value
            assert high is None or from_bytes(extent.kind, high) >= value
        if mode in ("counts", "none"):
            assert (low, high) == (None, None)


def test_a_footer_shows_whether_bounds_of_a_manifest_cover_a_column(tmp_path: Path):
    small = {"write.parquet.row-group-size-bytes": "1"}
    fact = described(tmp_path, pa.string(), ["m"], ["z" * 5000], **small)
    extent = extents(pq.ParquetFile(fact["file-path"]).metadata)[1]
    assert extent == ColumnExtent(StringType(), "m", "m", complete=False)
    assert extent.within(b"m", b"m") is None  # what older versions wrote: only the values tell
    assert extent.within(None, None) is True
    assert extent.within(b"n", None) is False
    assert extent.within(None, b"l") is False
    assert (
        ColumnExtent(LongType(), 5, 7).within((5).to_bytes(4, "little"), None) is True
    )  # it was an int


def test_extents_are_of_columns_in_structs_too_and_not_of_those_in_lists(tmp_path: Path):
    columns = pa.schema(
        {"s": pa.struct({"a": pa.int64(), "a.b": pa.int64()}), "l": pa.list_(pa.int64())}
    )
    where = shape(tmp_path, columns)
    (fact,) = facts(written(where, {"s": [{"a": 1, "a.b": 2}, None], "l": [[3], None]}))
    by_column = extents(pq.ParquetFile(fact["file-path"]).metadata)
    assert {(extent.low, extent.high) for extent in by_column.values()} == {(1, 1), (2, 2)}
    plain = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"x": [1]}), plain)  # it has no field ids
    assert extents(pq.ParquetFile(plain).metadata) == {}


def test_of_another_writers_floats_without_a_minimum_nothing_is_known():
    class Chunk:
        path_in_schema, num_values, is_stats_set = "x", 2, True

        class statistics:
            has_min_max, has_null_count, null_count = False, True, 0

    assert _extent(Chunk, FloatType(), omits_nan=False).complete is False
    assert _extent(Chunk, FloatType(), omits_nan=True).complete is True


# ── those who prune by bounds ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Entry:
    descriptor: str
    sequence: int
    everywhere: bool = True


def entry(name: str, content: str, low: bytes | None, high: bytes | None, sequence: int) -> Entry:
    def one(value: bytes | None) -> dict[str, Any]:
        return (
            {"keys": [], "values": []} if value is None else {"keys": [1], "values": [value.hex()]}
        )

    descriptor = {
        "file-path": name,
        "record-count": 1,
        "file-size-in-bytes": 1,
        "content": content,
        "spec-id": 0,
        "partition": [],
        "file-format": "parquet",
        "lower-bounds": one(low),
        "upper-bounds": one(high),
        "equality-ids": [1] if content != "data" else None,
    }
    return Entry(json.dumps(descriptor), sequence)


@pytest.mark.parametrize(
    ("delete", "data", "meet"),
    [
        ((b"a", b"b"), (b"c", b"d"), False),
        ((b"a", b"c"), (b"c", b"d"), True),
        ((b"", b"a"), (b"b", b"c"), False),  # an empty key is a key
        ((b"", b""), (b"", b""), True),
        ((None, None), (b"c", b"d"), True),
        ((b"a", None), (b"c", b"d"), True),
        ((b"a", b"b"), (b"c", None), True),
        ((b"a", b"b"), (None, None), True),
    ],
)
def test_a_delete_without_bounds_may_hide_a_row_of_any_file(delete, data, meet):
    for kind in (BinaryType(), StringType()):
        schema = Schema(NestedField(1, "k", kind, required=True))
        entries = [entry("data", "data", *data, 1), entry("d", "equality-deletes", *delete, 2)]
        state = RewriteState(entries, schema, {})
        assert state.counts(state.deletes[0], state.data[0]) is meet
        assert isinstance(state.data[0], TableFile)
