"""Every encoding that the writer chooses is read by Spark's vectorised reader, DuckDB and
pyiceberg."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import StaticTable

from tests.oracle import Lake
from tests.spark.test_partitions import written_table

COUNT = 30_000
UTC = dt.timezone.utc


def columns() -> pa.Table:
    """Columns for which the writer chooses delta encoding and byte-stream-split, with nulls, in
    several pages, with negative values and steps of all widths."""
    random = np.random.default_rng(1)
    steps = random.integers(-(2**40), 2**40, COUNT).cumsum()
    nulls = random.random(COUNT) < 0.1
    small = random.integers(-500, 500, COUNT).cumsum().astype(np.int32)
    floats = random.normal(1e6, 1, COUNT)
    number = np.arange(COUNT)
    return pa.table(
        {
            "n": pa.array(number, pa.int32()),
            "long": pa.array(steps, mask=nulls),
            "int": pa.array(small, mask=nulls),
            "day": pa.array(small, pa.int32(), mask=nulls).view(pa.date32()),
            "at": pa.array(steps // 2**8).view(pa.timestamp("us", "UTC")),
            "local": pa.array(steps // 2**8, mask=nulls).view(pa.timestamp("us")),
            "double": pa.array(floats, mask=nulls),
            "float": pa.array(random.normal(1e6, 1e5, COUNT).astype(np.float32)),
            "word": pa.array(number % 7).cast(pa.string()),
            "money": pa.array([Decimal(int(step)) / 100 for step in number], pa.decimal128(18, 2)),
            "list": pa.array([[int(step), int(step) + 1] for step in number], pa.list_(pa.int64())),
            "pair": pa.array([{"a": int(step)} if step % 5 else None for step in number]),
        }
    )


def test_spark_duckdb_and_pyiceberg_read_every_encoding(spark: Any, lake: Lake, name: str):
    rows = columns()
    table = written_table(spark, f"db.{name}", rows)
    _, (live,) = table.live()
    footer = pq.read_metadata(live.path.removeprefix("file:")).row_group(0)
    encodings = {
        footer.column(number).path_in_schema: set(footer.column(number).encodings)
        for number in range(footer.num_columns)
    }
    for path in ("n", "long", "int", "day", "at", "local", "list.list.element", "pair.a"):
        assert "DELTA_BINARY_PACKED" in encodings[path], path
    assert "BYTE_STREAM_SPLIT" in encodings["double"] & encodings["float"]
    assert "RLE_DICTIONARY" in encodings["word"]

    sent = rows.to_pylist()
    assert spark.conf.get("spark.sql.iceberg.vectorization.enabled", "true") == "true"
    # Columns inside lists and structs are read row by row.
    flat = "n, long, int, day, at, local, double, float, word, money"
    query = spark.table(f"lake.db.{name}").selectExpr(*flat.split(", "))
    assert "ColumnarToRow" in query._jdf.queryExecution().executedPlan().toString()
    back = spark.sql(f"SELECT {flat}, list, pair FROM lake.db.{name} ORDER BY n").toArrow()
    assert back.select(flat.split(", ")).to_pylist() == [
        {key: row[key] for key in flat.split(", ")} for row in sent
    ]
    assert query.sort("n").toArrow().to_pylist() == back.select(flat.split(", ")).to_pylist()
    assert back.column("list").to_pylist() == rows.column("list").to_pylist()
    assert back.column("pair").to_pylist() == rows.column("pair").to_pylist()

    assert [row[0] for row in lake.query(f"db.{name}", "t", "t ORDER BY n")] == [
        {**row, "at": row["at"].astimezone(UTC)} for row in sent
    ]
    read = StaticTable.from_metadata(lake.metadata_file(f"db.{name}")).scan().to_arrow()
    assert read.sort_by("n").to_pylist() == sent
