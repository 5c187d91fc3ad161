from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from frazil.errors import SchemaMismatch
from frazil.kafka.record_batch import HEADERS
from frazil.offsets import Partition
from frazil.pipeline.projection import LAST_MS, MetadataColumns, moments, project_rows, too_late

P = Partition("orders", 3)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
ENVELOPE = MetadataColumns(
    "_topic", "_topic_partition", "_offset", "_timestamp", "_key", "_headers"
)


def routed(
    rows: pa.Table, *columns: pa.Field, metadata: MetadataColumns = METADATA, **envelope: pa.Array
) -> pa.Table:
    offsets = np.arange(100, 100 + len(rows), dtype=np.int64)
    stamps = np.arange(len(rows), dtype=np.int64) * 1000
    target = pa.schema([*columns, *metadata.fields])
    return project_rows(rows, target, metadata, P, offsets, stamps, **envelope)


def one(kind: pa.DataType, values: list[Any]) -> pa.Table:
    return pa.table({"x": pa.array(values, kind)})


def x(kind: pa.DataType, nullable: bool = True) -> pa.Field:
    return pa.field("x", kind, nullable)


def test_each_row_gets_its_origin_beside_it():
    out = routed(one(pa.int32(), [7, 8]), x(pa.int32()))
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
    assert out.to_pylist() == [
        {"x": 7, "_topic": "orders", "_topic_partition": 3, "_offset": 100, "_timestamp": epoch},
        {
            "x": 8,
            "_topic": "orders",
            "_topic_partition": 3,
            "_offset": 101,
            "_timestamp": epoch + dt.timedelta(seconds=1),
        },
    ]


def test_the_order_of_columns_is_the_tables():
    rows = pa.table({"b": [1], "a": [2]})
    out = routed(rows, pa.field("a", pa.int64()), pa.field("b", pa.int64()))
    assert out.schema.names == ["a", "b", "_topic", "_topic_partition", "_offset", "_timestamp"]
    assert out.select(["a", "b"]).to_pylist() == [{"a": 2, "b": 1}]


def test_the_metadata_columns_may_be_anywhere_and_have_other_names():
    metadata = MetadataColumns("t", "p", "o", "at")
    target = pa.schema([*metadata.fields, x(pa.int64())])
    out = project_rows(one(pa.int64(), [1]), target, metadata, P, np.array([5]), np.array([0]))
    assert out.select(["t", "p", "o", "x"]).to_pylist() == [{"t": "orders", "p": 3, "o": 5, "x": 1}]


def test_a_timestamp_column_without_a_name_is_left_out():
    out = routed(one(pa.int64(), [1]), x(pa.int64()), metadata=MetadataColumns("t", "p", "o", ""))
    assert out.schema.names == ["x", "t", "p", "o"]


def test_a_record_without_a_timestamp_has_none_instead_of_1969():
    target = pa.schema([x(pa.int64()), *METADATA.fields])
    out = project_rows(
        one(pa.int64(), [1, 2]), target, METADATA, P, np.arange(2), np.array([-1, 0])
    )
    assert out.column("_timestamp").null_count == 1
    assert out.column("_timestamp")[0].as_py() is None


def test_key_and_headers_follow_the_timestamp_and_may_be_null():
    assert ENVELOPE.fields == [
        *METADATA.fields,
        pa.field("_key", pa.large_binary()),
        pa.field("_headers", HEADERS),
    ]
    only = MetadataColumns("t", "p", "o", "", headers="h")
    assert [field.name for field in only.fields] == ["t", "p", "o", "h"]


def test_each_row_gets_its_key_and_headers_beside_it():
    keys = pa.array([b"k", None, b""], pa.large_binary())
    headers = [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], [], []]
    out = routed(
        one(pa.int64(), [1, 2, 3]),
        x(pa.int64()),
        metadata=ENVELOPE,
        keys=keys,
        headers=pa.array(headers, HEADERS),
    )
    assert out.column("_key").to_pylist() == [b"k", None, b""]
    assert out.column("_headers").to_pylist() == headers


def test_without_keys_and_headers_the_keys_are_null_and_the_headers_empty():
    out = routed(one(pa.int64(), [1, 2]), x(pa.int64()), metadata=ENVELOPE)
    assert out.column("_key").to_pylist() == [None, None]
    assert out.column("_headers").to_pylist() == [[], []]
    out.validate(full=True)
    assert len(routed(one(pa.int64(), []), x(pa.int64()), metadata=ENVELOPE)) == 0


def test_keys_and_headers_without_a_column_are_left_out():
    keys, headers = pa.array([b"k"], pa.large_binary()), pa.array([[]], HEADERS)
    out = routed(one(pa.int64(), [1]), x(pa.int64()), keys=keys, headers=headers)
    assert out.schema.names == ["x", "_topic", "_topic_partition", "_offset", "_timestamp"]


@pytest.mark.parametrize("given", [None, [[{"key": "a", "value": None}], []]])
def test_headers_take_the_shape_that_the_table_has_for_them(given: list[Any] | None):
    """Iceberg names a list's items `element`, and others may have made its fields required."""
    pair = pa.struct(
        [pa.field("key", pa.large_string(), nullable=False), pa.field("value", pa.large_binary())]
    )
    wanted = pa.large_list(pa.field("element", pair, nullable=False))
    target = pa.schema([pa.field("_headers", wanted, nullable=False)])
    metadata = MetadataColumns("", "", "", "", headers="_headers")
    headers = None if given is None else pa.array(given, HEADERS)
    rows = pa.Table.from_batches([pa.RecordBatch.from_pylist([{}, {}], schema=pa.schema([]))])
    out = project_rows(
        rows, target, metadata, P, np.arange(2), np.zeros(2, np.int64), headers=headers
    )
    assert out.column("_headers").type == wanted
    assert out.column("_headers").to_pylist() == (given or [[], []])


def test_a_column_with_the_name_of_the_keys_column_is_a_misfit():
    with pytest.raises(SchemaMismatch, match="'_key', which is also the name of a metadata column"):
        routed(pa.table({"_key": [b"k"]}), metadata=ENVELOPE)


def test_no_rows_make_no_rows_of_the_right_shape():
    out = routed(one(pa.int32(), []), x(pa.int64()))
    assert len(out) == 0
    assert out.schema.field("x").type == pa.int64()


def test_an_optional_column_the_record_lacks_is_null():
    out = routed(one(pa.int64(), [1, 2]), x(pa.int64()), pa.field("note", pa.large_string()))
    assert out.column("note").to_pylist() == [None, None]


def test_a_required_column_the_record_lacks_is_a_misfit():
    with pytest.raises(
        SchemaMismatch, match=r"orders\[3\]: the table requires column 'note'.*lacks"
    ) as e:
        routed(one(pa.int64(), [1]), x(pa.int64()), pa.field("note", pa.string(), nullable=False))
    assert "DROP NOT NULL" in e.value.hint


def test_a_column_the_table_lacks_is_a_misfit_and_not_dropped():
    with pytest.raises(SchemaMismatch, match=r"a column 'y' \(int64\) that the table lacks"):
        routed(pa.table({"x": [1], "y": [2]}), x(pa.int64()))


def test_a_column_with_a_metadata_columns_name_is_a_misfit():
    with pytest.raises(
        SchemaMismatch, match="'_offset', which is also the name of a metadata column"
    ):
        routed(pa.table({"x": [1], "_offset": [2]}), x(pa.int64()))


@pytest.mark.parametrize(
    ("given", "wanted", "values"),
    [
        (pa.int32(), pa.int64(), [1, None, -(2**31)]),
        (pa.float32(), pa.float64(), [0.5, None]),
        (pa.string(), pa.large_string(), ["a", None, ""]),
        (pa.binary(), pa.large_binary(), [b"\0", None]),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), [None]),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), [[1, None], [], None]),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64()), [[("k", 1)], None]),
        (pa.struct({"a": pa.int32()}), pa.struct({"a": pa.int64()}), [{"a": 1}, None]),
    ],
)
def test_a_column_is_widened_to_the_tables_type(
    given: pa.DataType, wanted: pa.DataType, values: list[Any]
):
    out = routed(one(given, values), x(wanted)).column("x")
    assert out.type == wanted
    assert out.to_pylist() == values


def test_fields_of_a_struct_find_their_own_by_name():
    given = pa.struct({"b": pa.int32(), "a": pa.int32()})
    wanted = pa.struct({"a": pa.int32(), "b": pa.int32(), "c": pa.string()})
    out = routed(one(given, [{"a": 1, "b": 2}]), x(wanted))
    assert out.column("x").to_pylist() == [{"a": 1, "b": 2, "c": None}]


@pytest.mark.parametrize(
    ("wrap", "value"),
    [
        (lambda kind: kind, {"a": 1, "b": 2}),
        (pa.list_, [{"a": 1, "b": 2}]),
        (lambda kind: pa.map_(pa.string(), kind), [("k", {"a": 1, "b": 2})]),
    ],
)
def test_a_nested_field_the_table_lacks_is_a_misfit_and_not_dropped(wrap: Any, value: Any):
    given, wanted = pa.struct({"a": pa.int32(), "b": pa.int32()}), pa.struct({"a": pa.int32()})
    with pytest.raises(SchemaMismatch, match=r"b"):
        routed(one(wrap(given), [value]), x(wrap(wanted)))


@pytest.mark.parametrize(
    ("given", "wanted", "value"),
    [
        (pa.int64(), pa.int32(), 2**40),
        (pa.float64(), pa.int64(), 1.5),
        (pa.int64(), pa.float64(), 2**53 + 1),
        (pa.string(), pa.int64(), "x"),
        (pa.timestamp("ns"), pa.timestamp("us"), 1),
        (pa.decimal128(9, 3), pa.decimal128(9, 2), "0.001"),
        (pa.list_(pa.int64()), pa.list_(pa.int32()), [2**40]),
        (pa.struct({"a": pa.int64()}), pa.struct({"a": pa.int32()}), {"a": 2**40}),
        (pa.int64(), pa.struct({"a": pa.int64()}), 1),
    ],
)
def test_a_value_the_table_cannot_hold_unchanged_is_a_misfit(
    given: pa.DataType, wanted: pa.DataType, value: Any
):
    array = pa.array([value], pa.string()).cast(given) if isinstance(value, str) else None
    rows = pa.table({"x": array if array is not None else pa.array([value], given)})
    with pytest.raises(
        SchemaMismatch, match=r"orders\[3\]: column 'x' does not fit; the table has"
    ):
        routed(rows, x(wanted))


@pytest.mark.parametrize(
    ("given", "wanted", "value"),
    [
        (pa.string(), pa.int64(), "012"),
        (pa.int64(), pa.large_string(), 12),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), 0),
    ],
)
def test_a_column_of_another_kind_is_a_misfit_though_arrow_could_convert_it(
    given: pa.DataType, wanted: pa.DataType, value: Any
):
    with pytest.raises(SchemaMismatch):
        routed(one(given, [value]), x(wanted))


def test_nulls_in_a_required_column_are_a_misfit_with_their_number():
    with pytest.raises(SchemaMismatch, match="requires column 'x', 2 records have no value in it"):
        routed(one(pa.int64(), [1, None, None]), x(pa.int64(), nullable=False))
    assert len(routed(one(pa.int64(), [1, 2]), x(pa.int64(), nullable=False))) == 2


def test_nulls_in_required_elements_of_a_list_are_a_misfit():
    wanted = pa.list_(pa.field("element", pa.int32(), nullable=False))
    with pytest.raises(SchemaMismatch):
        routed(one(pa.list_(pa.int32()), [[1, None]]), x(wanted))


def test_an_optional_field_goes_into_a_required_one_while_it_holds_no_null():
    given = pa.struct({"a": pa.int32()})
    wanted = pa.struct([pa.field("a", pa.int32(), nullable=False)])
    assert routed(one(given, [{"a": 1}]), x(wanted)).column("x").to_pylist() == [{"a": 1}]
    with pytest.raises(SchemaMismatch, match=r"requires column 'x\.a'"):
        routed(one(given, [{"a": None}]), x(wanted))


def test_a_timestamp_never_becomes_another_one():
    stamps = np.array([0, LAST_MS, LAST_MS + 1, 1794867748844274479, 2**63 - 1, -1], np.int64)
    micros = moments(stamps).cast(pa.int64()).to_pylist()
    assert micros == [0, LAST_MS * 1000, None, None, None, None]
    assert too_late(stamps).tolist() == [2, 3, 4]
