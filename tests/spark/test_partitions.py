"""Partition values that are hard to tell: taken by Iceberg, read by Spark, listed again."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa

from frazil.config.sections import TableConfig
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.schema import iceberg_schema, partition_spec
from frazil.pipeline.projection import MetadataColumns
from tests.oracle import Lake

NAN = float("nan")
FAR = 5_000_000  # days: the year 15659
HARD: list[tuple[pa.DataType, str, list[Any]]] = [
    (pa.float64(), "x", [NAN, 0.0, -0.0, math.inf, -math.inf, 0.1, None]),
    (pa.float32(), "x", [NAN, 0.0, -0.0, math.inf, -math.inf, 0.5, None]),
    (pa.large_string(), "x", ["a" * 400, "ü/%" * 200, "", None]),
    (pa.large_binary(), "truncate(2, x)", [b"abc", b"abd", b"", b"\xff\xff\xff", None]),
    (pa.date32(), "day(x)", [FAR, -FAR, 0, None]),
    (pa.date32(), "x", [FAR, -FAR, 0, None]),
    (pa.date32(), "month(x)", [2**31 - 1, -(2**31), 0, None]),
    (pa.timestamp("us", "UTC"), "x", [FAR * 86_400_000_000 + 1, -FAR * 86_400_000_000, 5, None]),
    (pa.timestamp("us"), "hour(x)", [FAR * 86_400_000_000 + 1, -FAR * 86_400_000_000, 5, None]),
]


def written_table(spark: Any, name: str, rows: pa.Table, *by: str) -> JavaTable:
    """A new table with these rows."""
    schema = iceberg_schema(rows.schema, MetadataColumns("", "", "", ""), TableConfig(name))
    table = JavaCatalog(spark, "lake").create(
        name, schema, partition_spec(schema, by, name), properties={"format-version": "2"}
    )
    shape = WriterSpec(
        table.name,
        table.location,
        table.schema,
        table.schema_id,
        table.spec,
        table.properties,
        2**27,
        "zstd",
        {},
    )
    writer = TableWriter(shape, "test")
    writer.write(pa.Table.from_arrays(rows.columns, schema=shape.arrow))
    files = [file.descriptor for file in writer.close()]
    manifest = table.write_manifest(f"{table.location}/metadata/{name}-m0.avro", files)
    table.append([manifest], {}, branch="main", check=lambda _: None, leftovers=[])
    return table


def test_hard_partition_values_are_taken_by_iceberg_and_come_back(spark, lake: Lake, name: str):
    for number, (kind, by, values) in enumerate(HARD):
        column = pa.array(values, kind)
        numbers = pa.array(range(len(column)), pa.int32())
        rows = pa.table({"n": numbers, "x": column})
        table = written_table(spark, f"db.{name}_{number}", rows, by)
        table_name = f"lake.db.{name}_{number}"
        back = spark.sql(f"SELECT n, {exact(kind)} AS x FROM {table_name}").collect()
        assert {row.n: row.x for row in back} == dict(enumerate(map(spelled(kind), column))), by
        # What Iceberg lists can be given to it again: so compaction and rewind do.
        _, listed = table.live()
        for live in listed:
            again = table._data_file(live.descriptor)
            (described,) = json.loads(table._described(again, table._table.spec()))["partition"]
            (value,) = json.loads(live.descriptor)["partition"]
            assert str(described) == str(value)
        assert spark.sql(f"SELECT count(*) FROM {table_name} WHERE x IS NULL").first()[0] == 1


def exact(kind: pa.DataType) -> str:
    """Spark's own calendar ends, and Python's before it: days and moments as numbers."""
    if pa.types.is_floating(kind):
        return "CAST(x AS STRING)"
    if pa.types.is_date(kind):
        return "datediff(x, DATE'1970-01-01')"
    return "unix_micros(CAST(x AS TIMESTAMP))" if pa.types.is_timestamp(kind) else "x"


def spelled(kind: pa.DataType) -> Any:
    def spell(value: pa.Scalar) -> Any:
        if not value.is_valid:
            return None
        if pa.types.is_temporal(kind):
            return value.value
        if not pa.types.is_floating(kind):
            return value.as_py()
        words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        return words.get(str(value.as_py()), str(value.as_py()))

    return spell
