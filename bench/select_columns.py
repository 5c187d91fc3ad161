"""What a select costs: 1M records through decode, select and fit, in one process.

    python bench/select_columns.py [--rows 1000000] [--format avro|json]

Rows are decoded and fitted to their table in chunks of 50,000, as in a task, without fetch and
write; CPU seconds of one core, the best of three. Figures: decision 078.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from tests.selects import HERE, TABLE, World, config_of

from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.pipeline.chunk import ChunkPipeline
from frazil.sources.base import BatchTables

CHUNK = 50_000
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "long"},
        {"name": "email", "type": "string"},
        {"name": "country", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "quantity", "type": "int"},
        {"name": "paid", "type": "boolean"},
        {"name": "note", "type": "string"},
    ],
}
SELECTS: dict[str, dict[str, Any]] = {
    "none": {},
    "rename, drop": {"select": ["customer as buyer", "* except (customer, note)"]},
    "a list of 3": {"select": ["id", "customer", "amount"]},
    "mask": {"select": ["mask(email) as email", "*"]},
    "mask, keep 4": {"select": ["mask(email, 4) as email", "*"]},
    "sha256": {"select": ["sha256(email) as email", "*"]},
    "cast to long": {"select": ["cast(quantity as long) as quantity", "*"]},
    "cast to decimal": {"select": ["cast(customer as decimal(18,0)) as customer", "*"]},
    "cast double to decimal": {"select": ["cast(amount as decimal(12,2)) as amount", "*"]},
    "key": {"key_column": "_key"},
    "headers": {"headers_column": "_headers", "headers": {"trace": "t"}},
}


def records(count: int, form: str) -> list[bytes]:
    dice = np.random.default_rng(1)
    parsed = fastavro.parse_schema(SCHEMA)
    values = []
    for i in range(count):
        row = {
            "id": i,
            "customer": int(dice.integers(10**6)),
            "email": f"user{i}@example.com",
            "country": "DE" if i % 2 else "NO",
            "amount": i % 10_000 / 100,
            "quantity": i % 7,
            "paid": i % 2 == 0,
            "note": "as agreed",
        }
        if form == "json":
            values.append(json.dumps(row).encode())
            continue
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        values.append(out.getvalue())
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", default="avro", choices=["avro", "json"])
    given = parser.parse_args()
    distinct = records(CHUNK * 4, given.format)
    keys = pa.array([b"%d" % i for i in range(CHUNK)], pa.large_binary())
    headers = pa.array([[("t", b"%d" % i)] for i in range(CHUNK)], HEADERS)
    base = 0.0
    with TemporaryDirectory() as folder:
        path = Path(folder, "order.avsc")
        path.write_text(json.dumps(SCHEMA))
        decode = {"format": "json"}
        if given.format == "avro":
            decode = {"format": "avro", "schema": str(path)}
        for name, table in SELECTS.items():
            seconds = min(spent(table, decode, distinct, keys, headers, given) for _ in range(3))
            base = base or seconds
            more = 1_000_000 * (seconds - base) / given.rows
            print(f"{name:24} {seconds:6.2f} s  {more:+6.2f} s per 1M rows", flush=True)


def spent(
    table: dict[str, Any],
    decode: dict[str, str],
    distinct: list[bytes],
    keys: pa.Array,
    headers: pa.Array,
    given: argparse.Namespace,
) -> float:
    world = World(config_of(table, decode=decode))
    world.send(*distinct[:10])
    plan = world.plans.plan(BatchTables({TABLE: world.table_plan(TABLE)}, {}, 0, "f"))
    pipeline, offsets = ChunkPipeline(plan), np.arange(CHUNK)
    seconds = 0.0
    for at in range(0, given.rows, CHUNK):
        values: list[bytes | None] = [*distinct[at % len(distinct) :][:CHUNK]]
        opened = RawRecords(values, offsets, offsets, keys, headers)
        start = time.process_time()
        result = pipeline.process(HERE, opened, frozenset())
        seconds += time.process_time() - start
        assert sum(len(rows) for _, rows in result.rows) == CHUNK, result.rejections
    return seconds


if __name__ == "__main__":
    main()
