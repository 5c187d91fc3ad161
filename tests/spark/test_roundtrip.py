"""Random schemas through real Iceberg tables: Spark, DuckDB and Arrow read what was sent.

As it was appended, after evolution by Iceberg's own hand, after compaction, and after a rewind with
the records read again.
"""

from __future__ import annotations

import itertools
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from frazil.config.model import TableConfig
from frazil.files.rewrite import RewriteJob, SourceFile, rewrite
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg.java import JavaCatalog, JavaTable
from frazil.iceberg.schema import iceberg_schema, update
from frazil.pipeline.chunk import TablePlan, aliases_of
from frazil.pipeline.projection import project_rows
from tests.oracle import Lake
from tests.roundtrip import HERE, METADATA, Case, Written, compare, rows_of

ORIGIN = [each.name for each in METADATA.fields]
_manifests = itertools.count()


class Stream:
    """The records of a case on their way into a table."""

    def __init__(self, spark: Any, lake: Lake, table: JavaTable, case: Case) -> None:
        self.spark, self.lake, self.table, self.case = spark, lake, table, case
        self.name = table.name

    @property
    def plan(self) -> TablePlan:
        table = self.table
        table.refresh()
        shape = WriterSpec(
            "db.t",
            table.location,
            table.schema,
            table.schema_id,
            table.spec,
            table.properties,
            2**27,
            "zstd",
            {},
            table.sort_order,
        )
        return self.case.planned(shape)

    def append(self, sent: Written) -> int:
        files = self.case.written(self.plan, sent)
        path = f"{self.table.location}/metadata/staged-{next(_manifests)}-m0.avro"
        manifest = self.table.write_manifest(path, files)
        self.table.append([manifest], {}, branch="main", check=lambda _: None, leftovers=[])
        return self.newest

    @property
    def newest(self) -> int:
        self.table.refresh()
        return next(self.table.history("main")).id

    def follow(self, sent: Written) -> None:
        need = self.case.needed(sent, self.plan)
        if need is None:
            return
        self.table.evolve(
            lambda there: update(
                there,
                need,
                "db.t",
                spec=self.table.spec,
                format_version=self.case.version,
                aliases=aliases_of(need),
                beside=set(ORIGIN),
            )
        )

    def compact(self) -> None:
        newest, live = self.table.live()
        assert newest is not None
        sources = [SourceFile(each.path, each.rows, 1, each.sequence, True) for each in live]
        done = rewrite(RewriteJob(self.plan.shape, "c", tuple(sources), (), 0.2, 2**30))
        self.table.replace(
            [each.descriptor for each in live],
            [f.descriptor for f in done.files],
            {},
            branch="main",
            since=newest.id,
            leftovers=[],
        )

    def check(self, wanted: dict[int, Any], arrow: bool = True) -> None:
        """By Arrow, too, where all files have the table's columns."""
        self.spark.sql(f"REFRESH TABLE lake.{self.name}")
        # (toArrow() casts, which Arrow refuses where a required field is inside a null.)
        batches = self.spark.sql(f"SELECT * FROM lake.{self.name}")._collect_as_arrow()
        compare(rows_of(pa.Table.from_batches(batches), ORIGIN), wanted)
        connection = duckdb.connect()
        connection.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'")
        scan = f"SELECT * FROM iceberg_scan('{self.lake.metadata_file(self.name)}')"
        by_duckdb = connection.execute(scan).to_arrow_table()
        compare(rows_of(by_duckdb, ORIGIN), wanted)
        if arrow:
            _, manifests = self.table.contents("main", {}, data=True)
            files = [each.descriptor for some in manifests.values() for each in some]
            self.case.compare(files, wanted)


def created(spark: Any, name: str, case: Case) -> JavaTable:
    columns = case.needed(case.first)
    assert columns is not None
    schema = iceberg_schema(columns, METADATA, TableConfig(name, format_version=case.version))
    spec, order, properties = case.layout(schema)
    properties["format-version"] = str(case.version)
    catalog = JavaCatalog(spark, "lake")
    return catalog.create(name, schema, spec, sort_order=order, properties=properties)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_sent_is_what_spark_duckdb_and_arrow_read(
    spark: Any, lake: Lake, name: str, seed: int
):
    case = Case(seed, engines=True)
    stream = Stream(spark, lake, created(spark, f"db.{name}", case), case)
    first = stream.append(case.first)
    stream.check(case.wanted(None))
    more = case.next()
    if more is not None:
        stream.follow(more)
        last = stream.append(more)
        stream.check(case.wanted(more), arrow=False)
        stream.table.move({"main": first}, expected={"main": last})
        stream.append(more)
    stream.compact()
    stream.check(case.wanted(more))


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
        found = spark.sql(f"SELECT _offset, s.a, s.n, d FROM lake.db.{name} ORDER BY 1").collect()
        assert [tuple(row) for row in found] == wanted
        stream.compact()
