"""What a round of compaction is worth, and what it costs: the clock of decision 024.

A table gets batches as the sink commits them (rows and global equality deletes, two files of each).
When k of them wait, all columns are scanned by Spark, warm; then a round takes them, with the
listing of files and the commit in its time, and the table is scanned again.

    python bench/compact.py                                   # a million keys
    python bench/compact.py --keys 10000000 --waiting 1,2,5
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.commit.table_schemas import writer_spec
from frazil.config.model import from_document
from frazil.config.sections import TableConfig
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.rewrite_data_files import RewriteDataFiles
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition
from frazil.spark.session import session

KINDS = {
    "id": "long",
    "version": "long",
    "customer": "string",
    "sku": "string",
    "quantity": "int",
    "price": "double",
    "placed_at": "timestamptz",
    "country": "string",
    "express": "boolean",
    "note": "string",
}
FIELDS = [
    {"id": number, "name": name, "required": name == "id", "type": kind}
    for number, (name, kind) in enumerate(KINDS.items(), 1)
]
SPEC = '{"spec-id": 0, "fields": []}'
WORDS = {
    "customer": pa.array([f"customer-{i:06d}" for i in range(200_000)]),
    "sku": pa.array([f"sku-{i:04d}" for i in range(5_000)]),
    "country": pa.array(["DE", "FR", "US", "JP", "BR", "IN"]),
    "note": pa.array([None, "gift wrap"]),
}
BEGAN = 1_767_225_600_000_000


class Upserted:
    def __init__(self, spark: Any, keys: int) -> None:
        self.spark, self.keys, self.batches = spark, keys, 0
        schema = {"type": "struct", "schema-id": 0, "fields": FIELDS, "identifier-field-ids": [1]}
        self._catalog = JavaCatalog(spark, "lake")
        self._table = self._catalog.create(
            "db.t", json.dumps(schema), SPEC, properties={"format-version": "2"}
        )
        self._draw = np.random.default_rng(1)

    def shape(self) -> WriterSpec:
        return writer_spec(self._table, TableConfig(self._table.name, target_file_size="256MiB"))

    def rows(self, ids: Any) -> pa.Table:
        draw, count = self._draw, len(ids)
        columns = {
            "id": ids,
            "version": np.arange(count),
            "quantity": draw.integers(1, 10, count),
            "price": draw.integers(100, 50_000, count) / 100,
            "express": draw.random(count) < 0.25,
            "placed_at": pa.array(BEGAN + np.arange(count), pa.timestamp("us", "UTC")),
            **{
                name: pool.take(pa.array(draw.integers(0, len(pool), count)))
                for name, pool in WORDS.items()
            },
        }
        return pa.table({name: columns[name] for name in KINDS}).cast(self.shape().arrow)

    def batch(self, ids: Any) -> None:
        keys = json.dumps({"type": "struct", "schema-id": 0, "fields": FIELDS[:1]})
        deletes = replace(self.shape(), schema=keys, equality=(1,))
        self._table.refresh()
        update = self._table._table.newRowDelta()
        for half in (ids[ids % 2 == 0], ids[ids % 2 == 1]):
            for shape, rows, add in (
                (self.shape(), self.rows(half), update.addRows),
                (deletes, pa.table({"id": half}).cast(deletes.arrow), update.addDeletes),
            ):
                writer = TableWriter(shape, "bench")
                writer.write(rows)
                for file in writer.close():
                    add(self._table._data_file(file.descriptor))
        where, number = Partition("t", 0), self.batches
        entry = LedgerEntry(
            "s",
            1,
            (str(uuid.uuid4()),),
            (number, number),
            Cut({where: number}),
            Cut({where: number + 1}),
            keys=len(ids),
        )
        for key, value in entry.summary().items():
            update.set(key, value)
        update.commit()
        self.batches += 1

    def changes(self, count: int) -> None:
        self.batch(np.unique(self._draw.integers(0, self.keys, count)))

    def round(self) -> float:
        table = self._catalog.load("db.t")
        assert table is not None
        keeper = RewriteDataFiles(
            table, sink="s", epoch=1, shape=self.shape, prefix=lambda: "frazil-s-1-0", after=1
        )
        began = time.monotonic()
        trouble = keeper.run_due()
        assert not trouble, trouble
        return time.monotonic() - began

    def scan(self, times: int = 4) -> float:
        """The median of some, the first left out; fewer where they are long."""
        runs: list[float] = []
        while len(runs) < times and sum(runs) < 25:
            began = time.monotonic()
            self.spark.table("lake.db.t").write.format("noop").mode("overwrite").save()
            runs.append(time.monotonic() - began)
        return statistics.median(runs[1:] or runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=500_000, help="changes of a batch")
    parser.add_argument("--waiting", default="1,2,3,5,10")
    given = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="frazil-compact-")
    config = from_document(
        {
            "sink": {"id": "bench", "topics": ["none"]},
            "kafka": {"bootstrap.servers": "none:1"},
            "table": [{"name": "db.t"}],
            "decode": {"format": "raw"},
            "catalog": {"type": "hadoop", "warehouse": folder},
            "spark": {"spark.master": "local[2]", "spark.driver.memory": "4g"},
        }
    )
    try:
        table = Upserted(session(config), given.keys)
        for low in range(0, given.keys, 5_000_000):
            table.batch(np.arange(low, min(given.keys, low + 5_000_000)))
        table.round()
        table.scan(8)
        result: dict[str, Any] = {"keys": given.keys, "scan_s": round(table.scan(), 2)}
        for count in map(int, given.waiting.split(",")):
            for _ in range(count):
                table.changes(given.rows)
            scan, took = table.scan(), table.round()
            result[f"waiting_{count}"] = {
                "scan_s": round(scan, 2),
                "round_s": round(took, 2),
                "scan_after_s": table.scan(),
                "round_s_per_million": round(took / (count * given.rows / 1e6), 2),
            }
            print(count, result[f"waiting_{count}"], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
