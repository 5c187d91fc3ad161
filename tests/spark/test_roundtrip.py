"""Random schemas through real Iceberg tables: Spark, DuckDB and Arrow read what was sent.

`make roundtrip N=0 ARGS='--engines 500'` runs more of the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from frazil.config.sections import TableConfig
from frazil.files.writer import TableWriter
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.schema import iceberg_schema
from frazil.pipeline.projection import project_rows
from tests import roundtrip_engines
from tests.oracle import Lake
from tests.roundtrip import HERE, METADATA, Case
from tests.roundtrip_engines import Stream


@pytest.mark.parametrize("seed", range(12))
def test_what_is_sent_is_what_spark_duckdb_and_arrow_read(
    spark: Any, lake: Lake, name: str, seed: int
):
    roundtrip_engines.check(spark, lake, f"db.{name}", Case(seed, engines=True))


def test_defaults_are_icebergs_own_before_and_after_compaction(spark: Any, lake: Lake, name: str):
    """A column that Iceberg adds with a default: old rows have the first one, new rows that lack it
    the one of their time."""
    case = Case(0, engines=True)
    case.version = 3
    columns = pa.schema([pa.field("s", pa.struct([pa.field("a", pa.int32())]))])
    schema = iceberg_schema(columns, METADATA, TableConfig(f"db.{name}", format_version=3))
    table = JavaCatalog(spark, "lake").create(
        f"db.{name}", schema, '{"spec-id": 0, "fields": []}', properties={"format-version": "3"}
    )
    stream = Stream(spark, lake, table, case)
    java = spark._jvm.org.apache.iceberg
    lit, types = java.expressions.Expressions.lit, java.types.Types

    def written(offset: int) -> None:
        rows = pa.table({"s": pa.array([{"a": offset}, None], columns.field(0).type)})
        offsets = np.array([offset, offset + 1])
        shaped = project_rows(rows, stream.plan.shape.arrow, METADATA, HERE, offsets, offsets)
        writer = TableWriter(stream.plan.shape, "p")
        writer.write(shaped)
        files = [file.descriptor for file in writer.close()]
        manifest = table.write_manifest(f"{table.location}/metadata/d{offset}-m0.avro", files)
        table.append([manifest], {}, branch="main", check=lambda _: None, leftovers=[])

    written(0)
    update_ = table._table.updateSchema()
    update_.addRequiredColumn("d", types.StringType.get(), "", lit("one"))
    update_.addColumn("s", "n", types.LongType.get(), "", lit(7)).commit()
    written(10)
    table.refresh()
    table._table.updateSchema().updateColumnDefault("d", lit("two")).commit()
    written(20)
    wanted = []
    for at, word in ((0, "one"), (10, "one"), (20, "two")):
        wanted += [(at, at, 7, word), (at + 1, None, None, word)]
    for _ in range(2):
        spark.sql(f"REFRESH TABLE lake.db.{name}")
        rows = spark.sql(f"SELECT _offset, s.a, s.n, d FROM lake.db.{name} ORDER BY 1").collect()
        assert [tuple(row) for row in rows] == wanted
        stream.compact()
