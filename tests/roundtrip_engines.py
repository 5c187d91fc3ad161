"""Cases of `tests.roundtrip` through real Iceberg tables, read by Spark, DuckDB and Arrow.

As it was appended, after evolution by Iceberg's own hand, after compaction, and after a rewind with
the records read again. For `tests/spark/test_roundtrip.py` and `bench/roundtrip.py --engines`.
"""

from __future__ import annotations

import itertools
from typing import Any

import duckdb
import pyarrow as pa

from frazil.config.sections import TableConfig
from frazil.files.rewrite import RewriteJob, SourceFile, rewrite
from frazil.files.writer import WriterSpec
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.schema import iceberg_schema, update
from frazil.pipeline.missing_columns import aliases_of
from frazil.pipeline.table_plan import TablePlan
from tests.oracle import Lake
from tests.roundtrip import METADATA, Case, Written, compare, rows_of

ORIGIN = [column.name for column in METADATA.fields]
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
            lambda schema: update(
                schema,
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
        sources = [SourceFile(file.path, file.rows, 1, file.sequence, True) for file in live]
        done = rewrite(RewriteJob(self.plan.shape, "c", tuple(sources), (), 0.2, 2**30))
        self.table.replace(
            [file.descriptor for file in live],
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
            files = [file.descriptor for some in manifests.values() for file in some]
            self.case.compare(files, wanted)


def created(spark: Any, name: str, case: Case) -> JavaTable:
    columns = case.needed(case.first)
    assert columns is not None
    schema = iceberg_schema(columns, METADATA, TableConfig(name, format_version=case.version))
    spec, order, properties = case.layout(schema)
    properties["format-version"] = str(case.version)
    catalog = JavaCatalog(spark, "lake")
    return catalog.create(name, schema, spec, sort_order=order, properties=properties)


def check(spark: Any, lake: Lake, name: str, case: Case) -> None:
    """What is sent into a new table of this name is what Spark, DuckDB and Arrow read."""
    stream = Stream(spark, lake, created(spark, name, case), case)
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
