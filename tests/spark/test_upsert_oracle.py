"""The oracle of upsert tables against real ones: Spark writes them, with what is planted in them,
and both readers must tell the same of every snapshot."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pyspark.sql.functions import lit

from tests.oracle import Lake
from tests.upserts import Oracle, Record, spark_rows

COLUMNS = "id long, n int, _topic string, _topic_partition int, _offset long"

#: Three batches: two keys come; one changes and one is deleted; the deleted one is back.
RECORDS = [
    Record("t", 0, 0, 10, (1,), {"id": 1, "n": 1}),
    Record("t", 0, 1, 11, (2,), {"id": 2, "n": 1}),
    Record("t", 0, 2, 12, (1,), {"id": 1, "n": 2}),
    Record("t", 0, 3, 13, (2,), None),
    Record("t", 0, 4, 14, (2,), {"id": 2, "n": 3}),
]
BATCHES = [(0, 2), (2, 4), (4, 5)]
TABLES = [[0, 1], [2], [2, 4]]  # the records whose rows each snapshot holds


def made(spark: Any, name: str, tables: list[list[int]]) -> None:
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
    spark.sql(
        f"CREATE TABLE lake.db.{name} ({COLUMNS}) USING iceberg "
        "TBLPROPERTIES ('format-version' = '2')"
    )
    for (begin, end), held in zip(BATCHES, tables, strict=True):
        rows = [
            (r.key[0], (r.value or {"n": None})["n"], r.topic, r.partition, r.offset)
            for r in (RECORDS[i] for i in held)
        ]
        summary = {"sink": "s", "ranges": json.dumps({"t": {"0": [begin, end]}})}
        write = spark.createDataFrame(rows, COLUMNS).writeTo(f"lake.db.{name}")
        for key, value in summary.items():
            write = write.option(f"snapshot-property.frazil.{key}", value)
        write.overwrite(lit(True))


def check(oracle: Oracle, spark: Any, lake: Lake, name: str) -> int:
    return oracle.check(
        lake.metadata_file(f"db.{name}"), Spark=spark_rows(spark, f"lake.db.{name}")
    )


def test_a_right_table_is_compared_at_every_snapshot_by_both_readers(
    spark: Any, lake: Lake, name: str
):
    made(spark, name, TABLES)
    oracle = Oracle(RECORDS, key=("id",))
    assert check(oracle, spark, lake, name) == 2 * len(BATCHES)
    # What takes nothing in changes nothing: a compaction, and then the first snapshots expire.
    options = "map('rewrite-all', 'true')"
    spark.sql(f"CALL lake.system.rewrite_data_files(table => 'db.{name}', options => {options})")
    assert check(oracle, spark, lake, name) == 2 * (len(BATCHES) + 1)
    spark.sql(
        f"CALL lake.system.expire_snapshots(table => 'db.{name}', retain_last => 2, "
        "older_than => TIMESTAMP '2100-01-01')"
    )
    assert check(oracle, spark, lake, name) == 2 * 2
    with pytest.raises(AssertionError, match="expired before it was checked"):
        check(Oracle(RECORDS, key=("id",)), spark, lake, name)
    # A row that a person deleted is lost, in the snapshot where that was done.
    spark.sql(f"DELETE FROM lake.db.{name} WHERE id = 2")
    with pytest.raises(AssertionError, match=r"lost: key 2 in snapshot \d+ \(number 5\)"):
        check(oracle, spark, lake, name)


@pytest.mark.parametrize(
    ("number", "held", "pattern"),
    [
        (2, [0, 2], r"twin: key 1 .*2 rows: .*t\[0\]@0.*t\[0\]@2"),
        (2, [1, 2], r"undeleted: key 2 .*t\[0\]@3 deleted it, and it is there as t\[0\]@1"),
        (2, [0], r"stale: key 1 .*n is 1, not 2.*it is the row of t\[0\]@0"),
        (2, [], r"lost: key 1 .*t\[0\]@2 brought it"),
        (1, [0, 1, 4], r"twin: key 2 "),
        (3, [2, 1], r"stale: key 2 .*the row of t\[0\]@1"),
    ],
    ids=["a twin", "a lost delete", "a stale value", "a lost row", "too early", "an older one"],
)
def test_a_fault_in_one_snapshot_is_reported_for_that_one_by_both_readers(
    number: int, held: list[int], pattern: str, spark: Any, lake: Lake, name: str
):
    tables = [held if i == number else right for i, right in enumerate(TABLES, 1)]
    made(spark, name, tables)
    with pytest.raises(AssertionError) as caught:
        check(Oracle(RECORDS, key=("id",)), spark, lake, name)
    text = str(caught.value)
    assert text.startswith("2 differences\n"), text
    for reader in ("DuckDB", "Spark"):
        where = f"(number {number}), read by {reader}:"
        [line] = [line for line in text.splitlines() if where in line]
        assert re.search(pattern, line), line
