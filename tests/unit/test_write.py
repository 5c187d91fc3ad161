"""The writer on a folder: files, their descriptors, and the rows that come back from them."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import random
import struct
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.config.sections import TableConfig
from frazil.errors import ConfigError
from frazil.files import writer as write
from frazil.files.writer import DataFileDescriptor, OpenFiles, TableWriter, WriterSpec, file_io
from frazil.iceberg.schema import iceberg_schema, partition_spec
from frazil.pipeline.projection import MetadataColumns

UTC = dt.timezone.utc
NONE = MetadataColumns("", "", "", "")
Rows = dict[str, list[Any]]


def shape(
    folder: Path, columns: pa.Schema, *partition_by: str, version: int = 2, **more: Any
) -> WriterSpec:
    schema = iceberg_schema(columns, NONE, TableConfig("db.t", format_version=version))
    values: dict[str, Any] = {
        "name": "db.t",
        "location": str(folder),
        "schema": schema,
        "schema_id": 0,
        "spec": partition_spec(schema, partition_by, "db.t"),
        "properties": {},
        "target_file_size": 256 * 1024**2,
        "compression": "zstd",
        "io": {},
    }
    return WriterSpec(**{**values, **more})


def written(where: WriterSpec, *tables: Rows) -> list[DataFileDescriptor]:
    writer = TableWriter(where, "frazil-s-1")
    for rows in tables:
        writer.write(pa.table(rows, schema=where.arrow))
    return writer.close()


def facts(files: list[DataFileDescriptor]) -> list[dict[str, Any]]:
    return [json.loads(file.descriptor) for file in files]


def by_partition(files: list[DataFileDescriptor]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Partition values → the rows of its files, as Arrow reads them."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for fact in facts(files):
        rows = pq.ParquetFile(fact["file-path"]).read().to_pylist()
        assert len(rows) == fact["record-count"]
        grouped.setdefault(tuple(fact["partition"]), []).extend(rows)
    return grouped


# ── files ────────────────────────────────────────────────────────────────────────────────────


def test_rows_come_back_as_they_went_in(tmp_path: Path):
    columns = pa.schema({"id": pa.int64(), "name": pa.string(), "at": pa.timestamp("us", "UTC")})
    first = {"id": [1, 2], "name": ["a", None], "at": [dt.datetime(2024, 1, 1, tzinfo=UTC), None]}
    then = {"id": [3], "name": ["ü"], "at": [dt.datetime(1, 1, 1, tzinfo=UTC)]}
    where = shape(tmp_path, columns)
    (file,) = written(where, first, then)
    (fact,) = facts([file])
    back = pq.ParquetFile(fact["file-path"]).read()
    expected = pa.concat_tables([pa.table(t, schema=where.arrow) for t in (first, then)])
    assert back.to_pylist() == expected.to_pylist()
    assert file.rows == fact["record-count"] == 3
    assert file.bytes == fact["file-size-in-bytes"] == Path(fact["file-path"]).stat().st_size


def test_no_rows_make_no_file(tmp_path: Path):
    for partition_by in ((), ("id",)):
        where = shape(tmp_path, pa.schema({"id": pa.int64()}), *partition_by)
        assert written(where) == []
        assert written(where, {"id": []}, {"id": []}) == []
    assert list(tmp_path.rglob("*.parquet")) == []


def test_files_are_named_after_the_sink_and_no_two_alike(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"id": pa.int64()}))
    paths = [
        Path(fact["file-path"]) for _ in range(20) for fact in facts(written(where, {"id": [1]}))
    ]
    assert len(set(paths)) == 20
    assert all(p.parent == tmp_path / "data" and p.name.startswith("frazil-s-1-") for p in paths)


def test_the_location_the_table_asks_for_is_used(tmp_path: Path):
    columns = pa.schema({"id": pa.int64()})
    where = shape(tmp_path, columns, properties={"write.data.path": f"{tmp_path}/elsewhere"})
    (fact,) = facts(written(where, {"id": [1]}))
    assert Path(fact["file-path"]).parent == tmp_path / "elsewhere"


def test_a_file_is_rolled_when_it_reaches_the_target_size(tmp_path: Path):
    dice = random.Random(1)
    where = shape(tmp_path, pa.schema({"x": pa.binary()}), target_file_size=100_000)
    chunks = [{"x": [dice.randbytes(1000) for _ in range(30)]} for _ in range(20)]
    files = written(where, *chunks)
    assert len(files) == 5  # four chunks of 30 kB each make one full
    assert all(100_000 <= file.bytes < 140_000 for file in files)
    assert sum(file.rows for file in files) == 600
    back = [row["x"] for rows in by_partition(files).values() for row in rows]
    assert back == [value for chunk in chunks for value in chunk["x"]]


def test_open_files_are_capped_and_the_least_recently_written_is_finished_first(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"k": pa.int32()}), "k")
    files_open = OpenFiles(most=3, bytes=0)  # no row waits in memory
    writer = TableWriter(where, "p", files_open)
    for k in (1, 2, 3, 1, 4, 5, 1):  # 2 and 3 are pushed out, 1 stays
        writer.write(pa.table({"k": [k]}, schema=where.arrow))
        assert files_open.open <= 3
    files = writer.close()
    assert sorted((fact["partition"], fact["record-count"]) for fact in facts(files)) == [
        ([1], 3),
        ([2], 1),
        ([3], 1),
        ([4], 1),
        ([5], 1),
    ]
    assert [fact["partition"] for fact in facts(files)][:2] == [[2], [3]]


def test_more_partitions_than_open_files_lose_no_row(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"k": pa.int32()}), "k")
    keys = list(range(write.MAX_OPEN + 10)) * 2
    grouped = by_partition(written(where, {"k": keys}, {"k": keys}))
    assert {k: len(rows) for (k,), rows in grouped.items()} == dict.fromkeys(set(keys), 4)


@pytest.mark.parametrize("codec", ["zstd", "snappy", "gzip", "none"])
def test_the_compression_is_the_one_that_was_asked_for(tmp_path: Path, codec: str):
    where = shape(tmp_path, pa.schema({"x": pa.int64()}), compression=codec)
    (fact,) = facts(written(where, {"x": list(range(100))}))
    column = pq.ParquetFile(fact["file-path"]).metadata.row_group(0).column(0)
    assert column.compression == {"none": "UNCOMPRESSED"}.get(codec, codec.upper())


def test_a_shape_travels_and_does_not_show_its_credentials(tmp_path: Path):
    secret = {"s3.secret-access-key": "hunter2"}
    where = shape(tmp_path, pa.schema({"x": pa.int64()}), io=secret)
    assert pickle.loads(pickle.dumps(where)) == where
    assert "hunter2" not in repr(where)


def test_javas_names_of_settings_become_pyicebergs():
    given = {"client.region": "eu", "io-impl": "org.X", "type": "rest", "s3.endpoint": "http://m"}
    assert file_io("s3://b/x", given).properties == {
        "s3.region": "eu",
        "s3.endpoint": "http://m",
        "s3.force-virtual-addressing": "true",
    }
    path_style = {"s3.endpoint": "http://m", "s3.path-style-access": "true"}
    assert "s3.force-virtual-addressing" not in file_io("s3://b/x", path_style).properties


# ── descriptors ──────────────────────────────────────────────────────────────────────────────


def bounds(fact: dict[str, Any], key: str) -> dict[int, bytes]:
    both = fact[key]
    return {i: bytes.fromhex(v) for i, v in zip(both["keys"], both["values"], strict=True)}


def counts(fact: dict[str, Any], key: str) -> dict[int, int]:
    return dict(zip(fact[key]["keys"], fact[key]["values"], strict=True))


def test_a_descriptor_says_what_the_file_holds(tmp_path: Path):
    kinds = {
        "i": (pa.int32(), [3, -7, None], "<i"),
        "l": (pa.int64(), [2**40, -1, None], "<q"),
        "f": (pa.float32(), [0.5, -0.5, None], "<f"),
        "d": (pa.float64(), [1e300, float("nan"), -1.0], "<d"),
        "date": (pa.date32(), [dt.date(1960, 1, 1), dt.date(2024, 1, 1), None], "<i"),
        "ts": (pa.timestamp("us"), [dt.datetime(2024, 1, 1), dt.datetime(1960, 1, 1), None], "<q"),
    }
    columns = pa.schema({name: kind for name, (kind, _, _) in kinds.items()})
    where = shape(tmp_path, columns)
    (fact,) = facts(written(where, {name: values for name, (_, values, _) in kinds.items()}))
    low, high = bounds(fact, "lower-bounds"), bounds(fact, "upper-bounds")
    for number, (name, (kind, values, form)) in enumerate(kinds.items(), 1):
        ordered = pa.array([v for v in values if v is not None and v == v], kind)
        if form in ("<i", "<q"):
            ordered = ordered.view(pa.int32() if form == "<i" else pa.int64())
        assert struct.unpack(form, low[number])[0] == min(ordered.to_pylist()), name
        assert struct.unpack(form, high[number])[0] == max(ordered.to_pylist()), name
    assert counts(fact, "value-counts") == dict.fromkeys(range(1, 7), 3)
    assert counts(fact, "null-value-counts") == {1: 1, 2: 1, 3: 1, 4: 0, 5: 1, 6: 1}
    assert set(counts(fact, "column-sizes")) == set(range(1, 7))
    assert (fact["content"], fact["file-format"], fact["spec-id"]) == ("data", "parquet", 0)


def test_bounds_of_long_text_hold_it_between_them(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"s": pa.string(), "b": pa.binary(), "t": pa.bool_()}))
    text, raw = "a-topic-with-a-long-name", b"\xff" * 20
    (fact,) = facts(written(where, {"s": [text], "b": [raw], "t": [True]}))
    low, high = bounds(fact, "lower-bounds"), bounds(fact, "upper-bounds")
    assert (low[1], high[1]) == (text[:16].encode(), b"a-topic-with-a-m")
    assert low[2] <= raw
    assert 2 not in high  # nothing of 16 bytes is above it
    assert (low[3], high[3]) == (b"\1", b"\1")


def test_the_metrics_the_table_asks_for_are_kept_in_full(tmp_path: Path):
    properties = {"write.metadata.metrics.column.s": "full"}
    where = shape(tmp_path, pa.schema({"s": pa.string()}), properties=properties)
    (fact,) = facts(written(where, {"s": ["a-topic-with-a-long-name"]}))
    assert bounds(fact, "lower-bounds")[1] == b"a-topic-with-a-long-name"


def test_split_offsets_are_where_the_row_groups_begin(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"x": pa.int64()}))
    (fact,) = facts(written(where, {"x": [1]}, {"x": [2]}, {"x": [3]}))
    metadata = pq.ParquetFile(fact["file-path"]).metadata
    columns = [metadata.row_group(i).column(0) for i in range(metadata.num_row_groups)]
    assert fact["split-offsets"] == [
        min(o for o in (c.dictionary_page_offset, c.data_page_offset) if o) for c in columns
    ]


def test_every_field_has_icebergs_id_in_the_file_nested_ones_too(tmp_path: Path):
    columns = pa.schema(
        {
            "id": pa.int64(),
            "list": pa.list_(pa.struct({"q": pa.string()})),
            "map": pa.map_(pa.string(), pa.float64()),
            "deep": pa.struct({"a": pa.struct({"b": pa.int32()})}),
        }
    )
    where = shape(tmp_path, columns)
    row = {"id": [1], "list": [[{"q": "x"}]], "map": [[("k", 1.0)]], "deep": [{"a": {"b": 1}}]}
    (fact,) = facts(written(where, row))
    file = pq.ParquetFile(fact["file-path"])

    def ids(fields: Any) -> dict[int, str]:
        names: dict[int, str] = {}
        for field in fields:
            names[int(field.metadata[b"PARQUET:field_id"])] = field.name
            kind = field.type
            if pa.types.is_struct(kind):
                names |= ids(kind)
            elif pa.types.is_map(kind):
                names |= ids([kind.key_field, kind.item_field])
            elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
                names |= ids([kind.value_field])
        return names

    assert ids(file.schema_arrow) == ids(where.arrow)
    assert len(ids(file.schema_arrow)) == 10
    assert file.read().to_pylist() == [{name: values[0] for name, values in row.items()}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.decimal128(38, 2), Decimal("12345678901234567890.12")),
        (pa.binary(16), b"\1" * 16),
        (pa.time64("us"), dt.time(23, 59, 59, 999999)),
        (pa.list_(pa.list_(pa.int32())), [[1], [], [None]]),
        (pa.struct({"a": pa.int32()}), None),
        pytest.param(pa.uuid(), uuid.UUID(int=7)),
    ],
)
def test_a_column_of_any_type_can_be_written(tmp_path: Path, kind: pa.DataType, value: Any):
    where = shape(tmp_path, pa.schema({"x": kind}))
    given = value.bytes if isinstance(value, uuid.UUID) else value
    (fact,) = facts(written(where, {"x": [given, None]}))
    back = pq.ParquetFile(fact["file-path"]).read().cast(where.arrow)
    assert back.column("x").to_pylist() == [value, None]


# ── partitions ───────────────────────────────────────────────────────────────────────────────

AT = dt.datetime(2024, 2, 29, 13, 5, tzinfo=UTC)
BEFORE = dt.datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
TZ = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("kind", "by", "values", "partitions"),
    [
        (pa.string(), "x", ["a", "b/ c=ü", "", None], ["a", "b/ c=ü", "", None]),
        (pa.int32(), "x", [1, -1, None], [1, -1, None]),
        (pa.int64(), "x", [2**40, None], [2**40, None]),
        (pa.bool_(), "x", [True, False, None], [True, False, None]),
        (pa.date32(), "x", [AT.date(), BEFORE.date(), None], ["2024-02-29", "1969-12-31", None]),
        (TZ, "x", [AT, None], ["2024-02-29T13:05:00+00:00", None]),
        (pa.decimal128(9, 2), "x", [Decimal("1.20"), None], ["1.20", None]),
        (TZ, "year(x)", [AT, BEFORE, None], [54, -1, None]),
        (TZ, "month(x)", [AT, BEFORE, None], [649, -1, None]),
        (TZ, "day(x)", [AT, BEFORE, None], ["2024-02-29", "1969-12-31", None]),
        (TZ, "hour(x)", [AT, BEFORE, None], [474781, -1, None]),
        (pa.date32(), "year(x)", [AT.date(), BEFORE.date(), None], [54, -1, None]),
        (pa.date32(), "month(x)", [AT.date(), BEFORE.date(), None], [649, -1, None]),
        (pa.date32(), "day(x)", [AT.date(), None], ["2024-02-29", None]),
        (pa.int64(), "truncate(10, x)", [10, -1, 0, None], [10, -10, 0, None]),
        (pa.string(), "truncate(2, x)", ["iceberg", "ü", None], ["ic", "ü", None]),
        (pa.decimal128(9, 2), "truncate(50, x)", [Decimal("10.65"), None], ["10.50", None]),
    ],
)
def test_each_file_lies_within_one_partition(
    tmp_path: Path, kind: pa.DataType, by: str, values: list[Any], partitions: list[Any]
):
    where = shape(tmp_path, pa.schema({"x": kind, "n": pa.int64()}), by)
    rows = {"x": values * 2, "n": list(range(len(values) * 2))}
    grouped = by_partition(written(where, rows))
    assert set(grouped) == {(wanted,) for wanted in partitions}
    for n, (value, partition) in enumerate(zip(values, partitions, strict=True)):
        assert {"x": value, "n": n} in grouped[(partition,)]
        assert {"x": value, "n": n + len(values)} in grouped[(partition,)]
    assert sum(map(len, grouped.values())) == len(values) * 2


@pytest.mark.parametrize(
    ("kind", "value", "hashed"),
    [  # the hashes that Iceberg's specification gives in its appendix B
        (pa.int32(), 34, 2017239379),
        (pa.int64(), 34, 2017239379),
        (pa.decimal128(9, 2), Decimal("14.20"), -500754589),
        (pa.date32(), dt.date(2017, 11, 16), -653330422),
        (pa.time64("us"), dt.time(22, 31, 8), -662762989),
        (pa.timestamp("us"), dt.datetime(2017, 11, 16, 22, 31, 8), -2047944441),
        (TZ, dt.datetime(2017, 11, 16, 22, 31, 8, 1, UTC), -1207196810),
        (pa.string(), "iceberg", 1210000089),
        (pa.binary(), b"\0\1\2\3", -188683207),
        (pa.binary(4), b"\0\1\2\3", -188683207),
        pytest.param(
            pa.uuid(),
            uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7").bytes,
            1488055340,
        ),
    ],
)
def test_buckets_are_those_of_icebergs_specification(
    tmp_path: Path, kind: pa.DataType, value: Any, hashed: int
):
    where = shape(tmp_path, pa.schema({"x": kind}), "bucket(1000, x)")
    grouped = by_partition(written(where, {"x": [value, None]}))
    assert set(grouped) == {((hashed & 0x7FFFFFFF) % 1000,), (None,)}


def test_two_partition_fields_make_every_combination_apart(tmp_path: Path):
    columns = pa.schema({"at": TZ, "k": pa.string(), "n": pa.int64()})
    where = shape(tmp_path, columns, "day(at)", "k")
    days = [dt.datetime(2024, 1, day, hour, tzinfo=UTC) for day in (1, 2) for hour in (0, 23)]
    rows = [(at, k) for at in days for k in ("a", "b", None)]
    given = {"at": [r[0] for r in rows], "k": [r[1] for r in rows], "n": list(range(len(rows)))}
    grouped = by_partition(written(where, given))
    assert set(grouped) == {(d, k) for d in ("2024-01-01", "2024-01-02") for k in ("a", "b", None)}
    for (day, key), inside in grouped.items():
        assert [(str(row["at"].date()), row["k"]) for row in inside] == [(day, key)] * 2
        assert [row["n"] for row in inside] == sorted(row["n"] for row in inside)


def test_a_partition_field_may_be_inside_a_struct(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"s": pa.struct({"k": pa.string()})}), "s.k")
    grouped = by_partition(written(where, {"s": [{"k": "a"}, {"k": "b"}, {"k": "a"}, None]}))
    assert {key: len(rows) for key, rows in grouped.items()} == {("a",): 2, ("b",): 1, (None,): 1}


def test_rows_of_one_partition_from_many_writes_share_a_file(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"k": pa.string()}), "k")
    files = written(where, {"k": ["a", "b"]}, {"k": ["b", "a"]}, {"k": ["a"]})
    assert sorted((f["partition"], f["record-count"]) for f in facts(files)) == [
        (["a"], 3),
        (["b"], 2),
    ]


def test_chunked_columns_are_partitioned_as_whole_ones(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"k": pa.string(), "n": pa.int64()}), "k")
    chunks = [pa.table({"k": [k], "n": [n]}, where.arrow) for n, k in enumerate("abab")]
    writer = TableWriter(where, "p")
    writer.write(pa.concat_tables(chunks))
    grouped = by_partition(writer.close())
    assert {k: [r["n"] for r in rows] for (k,), rows in grouped.items()} == {
        "a": [0, 2],
        "b": [1, 3],
    }


def test_rows_of_a_partition_stay_in_offset_order(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"k": pa.int32(), "n": pa.int64()}), "k")
    dice = random.Random(5)
    grouped = by_partition(
        written(where, {"k": [dice.randrange(3) for _ in range(5000)], "n": list(range(5000))})
    )
    assert len(grouped) == 3
    for rows in grouped.values():
        assert [row["n"] for row in rows] == sorted(row["n"] for row in rows)


def test_a_partition_value_like_a_path_stays_in_its_folder(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"k": pa.string()}), "k")
    (fact,) = facts(written(where, {"k": ["../../x"]}))
    assert Path(fact["file-path"]).resolve().is_relative_to(tmp_path / "data")
    assert fact["partition"] == ["../../x"]


def test_a_partition_column_may_have_a_dot_in_its_name(tmp_path: Path):
    where = shape(tmp_path, pa.schema({"a.b": pa.string()}), "a.b")
    assert set(by_partition(written(where, {"a.b": ["x"]}))) == {("x",)}


@pytest.mark.parametrize(
    ("kind", "by", "value"),
    [
        (pa.binary(), "truncate(2, x)", b"abc"),
        (pa.timestamp("ns", "UTC"), "hour(x)", AT),
        (pa.timestamp("ns", "UTC"), "x", AT),
        (pa.uuid(), "x", uuid.UUID(int=7).bytes),
    ],
)
def test_a_spec_that_cannot_be_written_is_refused_before_any_task(
    tmp_path: Path, kind: pa.DataType, by: str, value: Any
):
    try:
        where = shape(tmp_path, pa.schema({"x": kind}), by, version=3)
    except ConfigError:
        return
    assert len(written(where, {"x": [value, None]})) == 2
