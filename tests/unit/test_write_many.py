"""Many files at once: what a task may hold, rows clustered and sorted, ceilings and options."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import struct
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.errors import ConfigError
from frazil.files import parquet_settings
from frazil.files import writer as write
from frazil.files.writer import DataFileDescriptor, OpenFiles, TableWriter, WriterSpec, check
from tests.unit.test_write import UTC, by_partition, facts, shape, written

KEYED = pa.schema({"k": pa.int32(), "n": pa.int64()})


def table(where: WriterSpec, **columns: Any) -> pa.Table:
    return pa.table(columns, schema=where.arrow)


def read(files: list[DataFileDescriptor]) -> list[list[dict[str, Any]]]:
    """The rows of each file, in their order."""
    return [pq.ParquetFile(fact["file-path"]).read().to_pylist() for fact in facts(files)]


def sort_order(*fields: tuple[int, str, str, str], number: int = 3) -> str:
    keys = ("source-id", "transform", "direction", "null-order")
    listed = [dict(zip(keys, field, strict=True)) for field in fields]
    return json.dumps({"order-id": number, "fields": listed})


# ── what a task may hold ─────────────────────────────────────────────────────────────────────────


def test_all_tables_of_a_task_share_the_cap_on_open_files(tmp_path: Path):
    files = OpenFiles(most=2, bytes=0)
    tables = [shape(tmp_path / str(i), pa.schema({"n": pa.int64()})) for i in range(4)]
    writers = [TableWriter(table, "p", files) for table in tables]
    for i in (0, 1, 0, 2, 3, 0):  # 1 and then 0 give way, both to other tables
        writers[i].write(table(tables[i], n=[i]))
        assert files.open <= 2
    sizes = [[file.rows for file in writer.close()] for writer in writers]
    assert sizes == [[2, 1], [1], [1], [1]]
    assert files.open == 0


def test_the_fullest_table_gives_way_and_the_small_ones_wait(tmp_path: Path):
    files = OpenFiles(bytes=100_000)
    large, small = (shape(tmp_path / name, pa.schema({"n": pa.int64()})) for name in "ab")
    writers = TableWriter(large, "p", files), TableWriter(small, "p", files)
    for _ in range(100):
        writers[0].write(table(large, n=list(range(1000))))
        writers[1].write(table(small, n=[1]))
        assert files.bytes <= 100_000
    assert not list((tmp_path / "b").rglob("*.parquet"))
    (whole,) = writers[1].close()
    (also,) = writers[0].close()  # row groups, one after the other, of one file
    assert (whole.rows, also.rows) == (100, 100_000)
    metadata = [pq.ParquetFile(facts([file])[0]["file-path"]).metadata for file in (whole, also)]
    assert metadata[0].num_row_groups == 1
    assert 8 < metadata[1].num_row_groups < 20


def test_a_thousand_tables_lose_no_row_and_stay_within_the_bound(tmp_path: Path):
    files = OpenFiles(most=8, bytes=2**20)
    tables = [shape(tmp_path / str(i), KEYED, *(["k"] if i % 7 == 0 else [])) for i in range(1000)]
    writers = [TableWriter(table, "p", files) for table in tables]
    dice = random.Random(3)
    given = dict.fromkeys(range(1000), 0)
    for _ in range(3000):
        i = min(int(dice.expovariate(1 / 50)), 999)
        many = dice.randrange(1, 50)
        writers[i].write(table(tables[i], k=[j % 3 for j in range(many)], n=list(range(many))))
        given[i] += many
        assert files.open <= 8
        assert files.bytes <= 2**20
    assert {i: sum(f.rows for f in writer.close()) for i, writer in enumerate(writers)} == given
    assert (files.open, files.bytes) == (0, 0)


def test_a_writer_without_rows_reads_no_schema_and_opens_nothing(tmp_path: Path):
    broken = WriterSpec("t", str(tmp_path), "no JSON", 0, "", {}, 1, "zstd", {})
    assert TableWriter(broken, "p").close() == []


def test_tables_of_the_same_store_and_credentials_share_the_way_to_it(tmp_path: Path):
    one, two = (shape(tmp_path / name, KEYED, io={"s3.region": "eu"}) for name in "ab")
    other = shape(tmp_path / "c", KEYED, io={"s3.region": "us"})
    assert write._shared_io(one) is write._shared_io(two)
    assert write._shared_io(one) is not write._shared_io(other)
    s3 = shape(tmp_path, KEYED, location="s3://bucket/t", io={"s3.region": "eu"})
    assert write._shared_io(s3) is not write._shared_io(one)
    assert write._shared_io(s3).properties == {"s3.region": "eu"}


def test_shapes_that_differ_are_never_taken_for_one_another(tmp_path: Path):
    one = shape(tmp_path, KEYED)
    two = shape(tmp_path, KEYED, compression="gzip")
    assert hash(one) == hash(two)
    for where, codec in ((one, "ZSTD"), (two, "GZIP"), (one, "ZSTD")):
        (fact,) = facts(written(where, {"k": [1], "n": [1]}))
        column = pq.ParquetFile(fact["file-path"]).metadata.row_group(0).column(0)
        assert column.compression == codec


def test_a_few_rows_out_of_many_do_not_keep_the_many_in_memory(tmp_path: Path):
    where = shape(tmp_path, KEYED)
    writer = TableWriter(where, "p")
    many = table(where, k=list(range(100_000)), n=list(range(100_000)))
    writer.write(many.slice(500, 10))
    (kept,) = writer._rows
    assert kept.equals(many.slice(500, 10))
    assert kept.get_total_buffer_size() < 1000
    writer.write(many)
    assert writer._rows[1] is many


def test_crumbs_are_put_together(tmp_path: Path):
    where = shape(tmp_path, KEYED)
    writer = TableWriter(where, "p", files := OpenFiles())
    for n in range(1000):
        writer.write(table(where, k=[n], n=[n]))
    assert len(writer._rows) < 16
    assert files.bytes < 2 * 1000 * 12 + 16 * 2 * 1000
    (rows,) = read(writer.close())
    assert [row["n"] for row in rows] == list(range(1000))


def test_crumbs_and_clusters_are_made_of_columns_of_any_type(tmp_path: Path):
    kinds = {
        "k": (pa.int32(), lambda n: n % 5),
        "u": (pa.uuid(), lambda n: uuid.UUID(int=n).bytes),
        "m": (pa.map_(pa.string(), pa.int64()), lambda n: [("a", n)]),
        "s": (pa.struct({"l": pa.list_(pa.string())}), lambda n: {"l": [str(n)]}),
        "d": (pa.decimal128(20, 2), lambda n: Decimal(n)),
        "f": (pa.binary(2), lambda n: b"ab"),
    }
    columns = pa.schema({name: kind for name, (kind, _) in kinds.items()})
    where = shape(
        tmp_path, columns, "k", sort_order=sort_order((2, "identity", "desc", "nulls-last"))
    )
    rows = pa.table(
        {name: [value(n) for n in range(200)] for name, (_, value) in kinds.items()}, where.arrow
    )
    writer = TableWriter(where, "p", OpenFiles(bytes=30_000))
    for n in range(200):
        writer.write(rows.slice(n, 1))
    tables = [pq.ParquetFile(fact["file-path"]).read() for fact in facts(writer.close())]
    for table in tables:
        raw = table.column("u").to_pylist()
        assert raw == sorted(raw, reverse=True)
    back = pa.concat_tables(tables).cast(where.arrow).to_pylist()
    assert sorted(back, key=lambda row: row["u"].int) == rows.to_pylist()


# ── clusters ─────────────────────────────────────────────────────────────────────────────────────


def test_a_backfill_makes_few_files_of_many_partitions(tmp_path: Path):
    where = shape(tmp_path, KEYED, "k")
    dice = np.random.default_rng(1)
    files = OpenFiles(most=8, bytes=200_000)  # some 16,000 rows
    writer = TableWriter(where, "p", files)
    keys = dice.integers(0, 200, 60_000)
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000].astype(np.int32)
        writer.write(table(where, k=part, n=np.arange(start, start + 1000)))
        assert files.bytes <= 200_000
        assert files.open <= 8
    finished = writer.close()
    # A file per partition whenever the memory is full would make 200 × 60,000 / 16,000 = 750.
    assert 200 <= len(finished) < 650
    rows = by_partition(finished)
    assert {k: len(part) for (k,), part in rows.items()} == dict(
        zip(*(array.tolist() for array in np.unique(keys, return_counts=True)), strict=True)
    )
    assert sorted(row["n"] for part in rows.values() for row in part) == list(range(60_000))


def test_large_partitions_stay_open_while_small_ones_wait(tmp_path: Path):
    where = shape(tmp_path, KEYED, "k")
    dice = np.random.default_rng(2)
    writer = TableWriter(where, "p", OpenFiles(most=8, bytes=200_000))
    for start in range(0, 100_000, 1000):
        keys = np.where(dice.random(1000) < 0.9, 0, dice.integers(1, 300, 1000)).astype(np.int32)
        writer.write(table(where, k=keys, n=np.arange(start, start + 1000)))
    count: dict[int, int] = {}
    for fact in facts(writer.close()):
        count[fact["partition"][0]] = count.get(fact["partition"][0], 0) + 1
    assert count.pop(0) == 1
    assert set(count) == set(range(1, 300))
    assert sum(count.values()) < 450


def test_the_combinations_of_many_partition_fields_are_distinguished(tmp_path: Path):
    names = [f"c{i}" for i in range(5)]
    where = shape(tmp_path, pa.schema({name: pa.int64() for name in names}), *names)
    layout = write._layout(where)
    many = 20_000  # 20,000⁵ is more than 64 bits hold
    dice = np.random.default_rng(4)
    columns = [dice.permutation(many) for _ in names]
    columns = [np.concatenate([column, column]) for column in columns]  # each combination twice
    parts = layout.clusters(pa.table(dict(zip(names, columns, strict=True)), schema=where.arrow))
    assert len(parts) == many
    for partition, index in parts:
        assert [tuple(int(column[i]) for column in columns) for i in index] == [partition] * 2


# ── the ceiling ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [1, 7, 4000])
@pytest.mark.parametrize("codec", ["zstd", "snappy", "none"])
def test_no_file_is_over_the_ceiling_whatever_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, step: int
):
    monkeypatch.setattr(write, "CEILING", 400_000)
    monkeypatch.setattr(parquet_settings, "FOOTER_BYTES", 1024)
    columns = pa.schema({"x": pa.binary(), "n": pa.int64()})
    where = shape(tmp_path, columns, target_file_size=2**30, compression=codec)
    dice = random.Random(1)
    values = [dice.randbytes(500) for _ in range(4000)]
    writer = TableWriter(where, "p")
    for i in range(0, len(values), step):
        part = values[i : i + step]
        writer.write(table(where, x=part, n=list(range(i, i + len(part)))))
    finished = writer.close()
    assert all(file.bytes <= 400_000 for file in finished)
    assert len(finished) <= 12  # and they are more than half full
    assert [row["x"] for rows in read(finished) for row in rows] == values


def test_lists_of_booleans_stay_below_the_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "CEILING", 200_000)
    monkeypatch.setattr(parquet_settings, "FOOTER_BYTES", 1024)
    columns = pa.schema({"x": pa.list_(pa.bool_())})
    where = shape(tmp_path, columns, target_file_size=2**30, compression="none")
    dice = random.Random(1)
    values = [[dice.choice([True, False, None]) for _ in range(5000)] for _ in range(200)]
    finished = written(where, {"x": values})
    assert all(file.bytes <= 200_000 for file in finished)
    assert [row["x"] for rows in read(finished) for row in rows] == values


def test_a_large_row_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "CEILING", 100_000)
    where = shape(tmp_path, pa.schema({"x": pa.binary()}), target_file_size=2**30)
    values = [b"a", random.Random(1).randbytes(150_000), b"b"]
    assert [len(rows) for rows in read(written(where, {"x": values}))] == [1, 1, 1]


# ── sorted files ─────────────────────────────────────────────────────────────────────────────────


def test_each_file_is_sorted_from_end_to_end_and_says_by_what(tmp_path: Path):
    order = sort_order((2, "identity", "desc", "nulls-last"), number=7)
    where = shape(tmp_path, KEYED, "k", sort_order=order)
    writer = TableWriter(where, "p", OpenFiles(bytes=100_000))
    dice = random.Random(1)
    total = 0
    for _ in range(50):
        values = [dice.choice([None, dice.randrange(10**6)]) for _ in range(1000)]
        writer.write(table(where, k=[dice.randrange(3) for _ in values], n=values))
        total += len(values)
    finished = writer.close()
    assert {fact["sort-order-id"] for fact in facts(finished)} == {7}
    assert len(finished) > 3
    for rows in read(finished):
        values = [row["n"] for row in rows]
        assert values == sorted(values, key=lambda n: (n is None, -(n or 0)))
        assert len({row["k"] for row in rows}) == 1
    assert sum(file.rows for file in finished) == total


def test_a_sorted_run_may_be_several_files_and_goes_on_from_one_to_the_next(tmp_path: Path):
    order = sort_order((1, "identity", "asc", "nulls-first"))
    columns = pa.schema({"n": pa.int64(), "x": pa.binary()})
    where = shape(tmp_path, columns, sort_order=order, target_file_size=50_000)
    dice = random.Random(1)
    numbers = [dice.randrange(10**9) for _ in range(1000)]
    finished = written(where, {"n": numbers, "x": [dice.randbytes(500) for _ in numbers]})
    assert len(finished) > 4
    assert [row["n"] for rows in read(finished) for row in rows] == sorted(numbers)


def test_rows_alike_stay_in_offset_order(tmp_path: Path):
    where = shape(tmp_path, KEYED, sort_order=sort_order((1, "identity", "desc", "nulls-first")))
    dice = random.Random(2)
    keys = [dice.choice([None, 1, 2, 3]) for _ in range(3000)]
    (rows,) = read(written(where, {"k": keys, "n": list(range(3000))}))
    assert [(row["k"], row["n"]) for row in rows] == sorted(
        ((k, n) for n, k in enumerate(keys)),
        key=lambda pair: (pair[0] is not None, -(pair[0] or 0), pair[1]),
    )


@pytest.mark.parametrize("first", ["nulls-first", "nulls-last"])
@pytest.mark.parametrize("second", ["nulls-first", "nulls-last"])
@pytest.mark.parametrize("direction", ["asc", "desc"])
def test_each_field_places_its_own_nulls(tmp_path: Path, first: str, second: str, direction: str):
    order = sort_order((1, "identity", "asc", first), (2, "identity", direction, second))
    where = shape(tmp_path, KEYED, sort_order=order)
    pairs = [(k, n) for k in (2, None, 1) for n in (None, 5, 6)]
    (rows,) = read(written(where, {"k": [p[0] for p in pairs], "n": [p[1] for p in pairs]}))
    outer = [None, 1, 2] if first == "nulls-first" else [1, 2, None]
    inner: list[int | None] = [5, 6] if direction == "asc" else [6, 5]
    inner = [None, *inner] if second == "nulls-first" else [*inner, None]
    assert [(row["k"], row["n"]) for row in rows] == [(k, n) for k in outer for n in inner]


AT = dt.datetime(2024, 2, 28, 13, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "transform", "values"),  # as they must come out; alike ones as they went in
    [
        (pa.string(), "identity", ["", "Z", "a", "ab", "ü", "\U0001f9ca"]),
        (pa.binary(), "identity", [b"", b"\x01", b"\x7f", b"\xff"]),
        (pa.binary(2), "identity", [b"\0\1", b"\1\0", b"\xff\0"]),
        (pa.bool_(), "identity", [False, True]),
        (pa.date32(), "identity", [dt.date(1960, 1, 1), dt.date(2024, 1, 1)]),
        (pa.time64("us"), "identity", [dt.time(0, 1), dt.time(23, 1)]),
        (pa.int64(), "truncate[10]", [-1, -5, 7, 3, 12]),
        (pa.string(), "truncate[1]", ["ab", "aa", "b"]),
        (pa.timestamp("us", "UTC"), "hour", [AT, AT.replace(minute=1), AT.replace(hour=14)]),
        (pa.timestamp("us", "UTC"), "day", [AT, AT.replace(hour=1), AT.replace(month=3)]),
        (pa.timestamp("us", "UTC"), "month", [AT, AT.replace(day=1), AT.replace(month=3)]),
        (pa.timestamp("us", "UTC"), "year", [AT, AT.replace(month=1), AT.replace(year=2025)]),
        (pa.date32(), "year", [dt.date(1969, 5, 1), dt.date(1969, 1, 1), dt.date(1970, 1, 1)]),
    ],
)
def test_files_are_sorted_by_what_a_transform_makes_of_any_type(
    tmp_path: Path, kind: pa.DataType, transform: str, values: list[Any]
):
    def back(direction: str, given: list[Any]) -> list[Any]:
        order = sort_order((1, transform, direction, "nulls-last"))
        where = shape(tmp_path, pa.schema({"x": kind}), sort_order=order)
        (rows,) = read(written(where, {"x": given}))
        return [row["x"] for row in rows]

    if transform == "identity":
        assert back("asc", [None, *reversed(values)]) == [*values, None]
        assert back("desc", [None, *values]) == [*reversed(values), None]
    else:  # all but the last have others like them
        assert back("asc", [None, values[-1], *values[:-1]]) == [*values, None]


def test_buckets_sort_by_their_number(tmp_path: Path):
    order = sort_order((1, "bucket[16]", "asc", "nulls-first"))
    where = shape(tmp_path, pa.schema({"x": pa.int64()}), "bucket(16, x)", sort_order=order)
    plain = shape(tmp_path, pa.schema({"x": pa.int64()}), sort_order=order)
    numbers = list(range(500))
    bucket = {
        row["x"]: k
        for (k,), rows in by_partition(written(where, {"x": numbers})).items()
        for row in rows
    }
    (rows,) = read(written(plain, {"x": numbers}))
    assert [row["x"] for row in rows] == sorted(numbers, key=lambda x: bucket[x])


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_floats_sort_as_iceberg_says_not_a_number_included(tmp_path: Path, kind: pa.DataType):
    negative = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0000))[0]
    ordered = [negative, -math.inf, -1.5, -0.0, 0.0, 1.5, math.inf, math.nan]

    def form(value: float | None) -> bytes | None:
        return None if value is None else struct.pack("<f", value)

    for direction in ("asc", "desc"):
        order = sort_order((1, "identity", direction, "nulls-first"))
        where = shape(tmp_path, pa.schema({"x": kind}), sort_order=order)
        mixed = [*ordered[::2], None, *ordered[1::2]]
        random.Random(1).shuffle(mixed)
        (rows,) = read(written(where, {"x": mixed}))
        expected = ordered if direction == "asc" else ordered[::-1]
        assert [form(row["x"]) for row in rows] == [None, *map(form, expected)]


def test_a_column_inside_a_struct_can_be_sorted_by(tmp_path: Path):
    columns = pa.schema({"s": pa.struct({"k": pa.int64()})})
    where = shape(tmp_path, columns, sort_order=sort_order((2, "identity", "asc", "nulls-last")))
    (rows,) = read(written(where, {"s": [{"k": 2}, None, {"k": None}, {"k": 1}]}))
    assert [row["s"] and row["s"]["k"] for row in rows] == [1, 2, None, None]


def test_an_order_without_fields_is_none(tmp_path: Path):
    where = shape(tmp_path, KEYED, sort_order=sort_order(number=0))
    (fact,) = facts(written(where, {"k": [2, 1], "n": [1, 2]}))
    assert fact["sort-order-id"] == 0


# ── options ──────────────────────────────────────────────────────────────────────────────────────


def metadata(files: list[DataFileDescriptor]) -> Any:
    (fact,) = facts(files)
    return pq.ParquetFile(fact["file-path"]).metadata


@pytest.mark.parametrize(
    ("codec", "expected"),
    [("gzip", "GZIP"), ("SNAPPY", "SNAPPY"), ("uncompressed", "UNCOMPRESSED"), ("lz4", "LZ4")],
)
def test_the_tables_codec_goes_before_the_configs(tmp_path: Path, codec: str, expected: str):
    properties = {"write.parquet.compression-codec": codec, "write.parquet.compression-level": "3"}
    where = shape(tmp_path, KEYED, properties=properties)
    column = metadata(written(where, {"k": [1], "n": [1]})).row_group(0).column(0)
    assert column.compression == expected


def test_a_level_compresses_as_asked(tmp_path: Path):
    dice = random.Random(1)
    text = [" ".join(dice.choices(["the", "quick", "brown", "fox"], k=9)) for _ in range(5000)]
    sizes = []
    for level in ("1", "19"):
        properties = {"write.parquet.compression-level": level}
        where = shape(tmp_path, pa.schema({"x": pa.string()}), properties=properties)
        sizes.append(written(where, {"x": text})[0].bytes)
    assert sizes[1] < 0.9 * sizes[0]


def test_row_groups_have_the_size_the_table_asks_for(tmp_path: Path):
    properties = {"write.parquet.row-group-size-bytes": "80000"}
    where = shape(tmp_path, pa.schema({"n": pa.int64()}), properties=properties)
    footer = metadata(written(where, *({"n": list(range(1000))} for _ in range(100))))
    assert footer.num_row_groups == 10


def test_pages_and_dictionaries_have_the_size_the_table_asks_for(tmp_path: Path):
    def sizes(**more: str) -> int:
        properties = {f"write.parquet.{key.replace('_', '-')}": v for key, v in more.items()}
        where = shape(
            tmp_path, pa.schema({"n": pa.string()}), properties=properties, compression="none"
        )
        rows = {"n": [f"{i % 997:0100}" for i in range(50_000)]}
        return int(metadata(written(where, rows)).row_group(0).column(0).total_compressed_size)

    usual = sizes()
    assert sizes(page_row_limit="200") > 1.05 * usual
    assert sizes(page_size_bytes="1024") > 1.05 * usual
    assert sizes(dict_size_bytes="2000") > 10 * usual


def test_bloom_filters_are_written_where_the_table_asks_for_them(tmp_path: Path):
    columns = pa.schema({"id": pa.int64(), "l": pa.list_(pa.string()), "b": pa.bool_()})
    prefix = "write.parquet.bloom-filter-"
    names = ("id", "l.element", "b", "absent")
    properties = {f"{prefix}enabled.column.{name}": "true" for name in names}
    properties |= {f"{prefix}fpp.column.id": "0.1", f"{prefix}max-bytes": "1024"}
    where = shape(tmp_path, columns, properties=properties)
    rows = {"id": list(range(50_000)), "l": [["a"]] * 50_000, "b": [True] * 50_000}
    group = metadata(written(where, rows)).row_group(0)
    chunks = {group.column(i).path_in_schema: group.column(i) for i in range(3)}
    assert 1024 <= chunks["id"].bloom_filter_length < 1100  # the bound, and a header
    assert chunks["l.list.element"].bloom_filter_length
    assert chunks["b"].bloom_filter_length is None


def test_options_that_are_not_known_are_passed_over(tmp_path: Path):
    properties = {"write.parquet.colour": "blue", "write.parquet.compression-level": ""}
    check(shape(tmp_path, KEYED, properties=properties))


@pytest.mark.parametrize(
    ("properties", "fact"),
    [
        ({"write.format.default": "orc"}, "its files are to be orc"),
        ({"write.format.default": "avro"}, "its files are to be avro"),
        ({"write.parquet.compression-codec": "lzo"}, "compression codec 'lzo' is unknown"),
        ({"write.parquet.compression-level": "23"}, "from -131072 to 22, found 23"),
        ({"write.parquet.compression-level": "fast"}, "compression-level, found 'fast'"),
        ({"write.parquet.row-group-size-bytes": "64MB"}, "row-group-size-bytes, found '64MB'"),
        ({"write.parquet.page-size-bytes": "0"}, "page-size-bytes, found '0'"),
        (
            {
                "write.parquet.bloom-filter-enabled.column.k": "true",
                "write.parquet.bloom-filter-fpp.column.k": "2",
            },
            "bloom-filter-fpp.column.k, found '2'",
        ),
    ],
)
def test_what_cannot_be_written_is_said_in_a_sentence(
    tmp_path: Path, properties: dict[str, str], fact: str
):
    where = shape(tmp_path, KEYED, properties=properties)
    with pytest.raises(ConfigError, match=r"cannot write table db\.t: ") as caught:
        check(where)
    assert fact in str(caught.value)
    with pytest.raises(ConfigError):
        written(where, {"k": [1], "n": [1]})


def test_an_order_that_cannot_be_computed_is_refused(tmp_path: Path):
    for transform, name in (("zorder", "unknown"), ("year", "year")):
        order = sort_order((1, transform, "asc", "nulls-first"))
        with pytest.raises(ConfigError, match=f"cannot write table db.t: {name} of 'k'"):
            check(shape(tmp_path, KEYED, sort_order=order))
