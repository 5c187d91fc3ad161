"""What `version_column` costs: one topic into two upsert tables, one of them with an order, in one
run.

Batches of changes over a million keys (those of `bench/upsert.py`), drawn evenly, so that every
batch meets every file: nothing is left out by its bounds. In each turn both sinks, in one process
and one Spark session, take the same records, from `start` until all is committed; who is first
changes from turn to turn. Both compact after ten commits with deletes, as by default. At the end
both tables are held against the records.

    python bench/order.py                              # 4 turns of 5 batches of 500,000
    python bench/order.py --turns 2 --turn 2 --rows 20000 --keys 40000
    python bench/order.py --apply                      # one task's part alone, without Spark

With `--apply` one of two tasks is looked at, by its own CPU: half of the keys, half of each batch,
and files that nobody compacts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from confluent_kafka import Producer

from frazil.config.model import from_document
from frazil.config.sections import TableConfig
from frazil.files.writer import WriterSpec
from frazil.iceberg.schema import iceberg_schema
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import KeyChanges, apply, deleted_keys_columns, deletes_shape
from frazil.pipeline.versions import FileBounds, VersionLookup
from frazil.sink import Sink
from frazil.spark.session import session
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from upsert import PARTITIONS, SCHEMA, SUMS, TOPIC, Accounts

SIDES = {"plain": {}, "ordered": {"version_column": "version"}}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cpu() -> float:
    """Of this process, its JVM and its workers; a worker that is gone counts with its parent."""
    total = 0.0
    main = psutil.Process()
    for process in [main, *main.children(recursive=True)]:
        if "kafka.Kafka" in process.cmdline():
            continue
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measured(given: argparse.Namespace, folder: str, bootstrap: str) -> dict[str, Any]:
    (Path(folder) / "account.avsc").write_text(SCHEMA)
    create_topic(bootstrap, TOPIC, PARTITIONS)
    configs = {
        side: from_document(
            {
                "sink": {
                    "id": side,
                    "topics": [TOPIC],
                    "index_table": f"db.{side}_index",
                    "trigger": "10ms",
                    "commit_interval": "0s",
                    "max_records_per_trigger": given.rows,
                },
                "kafka": {"bootstrap.servers": bootstrap},
                "decode": {"schema": f"{folder}/account.avsc"},
                "catalog": {"type": "hadoop", "warehouse": f"{folder}/lake"},
                "table": [{"name": f"db.{side}", "mode": "upsert", "key": ["id"], **more}],
            }
        )
        for side, more in SIDES.items()
    }
    spark = session(configs["plain"], say=say)
    accounts = Accounts(given.keys)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 500_000,
            "log_level": 3,
        }
    )
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for turn in range(given.turns):
        for _ in range(given.turn):
            accounts.produce(producer, given.rows)
        producer.flush()
        for side in list(SIDES)[:: 1 if turn % 2 else -1]:
            spent, began = cpu(), time.monotonic()
            sink = Sink(configs[side]).start(spark)
            sink.wait_until(sink.ends())
            sink.stop()
            times[side].append((time.monotonic() - began, cpu() - spent))
            say(f"  turn {turn} {side}: {times[side][-1][0]:.1f} s, {times[side][-1][1]:.1f} CPU-s")
    for side in SIDES:
        [row] = spark.sql(f"SELECT {SUMS} FROM lake.db.{side}").collect()
        assert [int(value) for value in row] == accounts.sums(), (
            f"{side} is not what the records say"
        )
    spark.stop()
    rows = given.rows * given.turn * (given.turns - 1)  # without the first turn, which is cold
    warm = {
        side: [sum(figures) for figures in zip(*turns[1:], strict=True)]
        for side, turns in times.items()
    }
    return {
        "rows": given.rows,
        "keys": given.keys,
        "turns": given.turns,
        "batches": given.turn,
        "rows_per_second": {side: round(rows / cost[0]) for side, cost in warm.items()},
        "cpu_seconds_per_million": {
            side: round(cost[1] / rows * 1e6, 2) for side, cost in warm.items()
        },
        "time_ratio": round(warm["ordered"][0] / warm["plain"][0], 2),
    }


def applied(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """CPU-seconds of `apply`, batch by batch, with and without an order."""
    columns = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("a", pa.int64()),
            pa.field("b", pa.float64()),
            pa.field("version", pa.int64()),
        ]
    )
    metadata = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
    bare = '{"spec-id": 0, "fields": []}'

    def shape(name: str, columns: pa.Schema, *key: str) -> WriterSpec:
        config = TableConfig(name, mode="upsert", key=key) if key else TableConfig(name)
        schema = iceberg_schema(columns, metadata, config)
        return WriterSpec(name, f"{folder}/{name}", schema, 0, bare, {}, 2**28, "zstd", {})

    main = shape("db.t", columns, "id")
    plain = TablePlan(main, metadata, "", key=("id",), deletes=deletes_shape(main, ("id",), bare))
    ordered = replace(plain, order="version")
    deleted_keys = shape("db.t_deleted", deleted_keys_columns(ordered))
    ordered = replace(ordered, deleted_keys=TablePlan(deleted_keys, metadata, ""))
    draw = np.random.default_rng(7)
    count, seen, files, spent = given.rows // 2, 0, [], []
    for number in range(given.turns * given.turn):
        at = np.arange(count) + number * count
        rows = pa.table(
            [
                draw.integers(0, given.keys // 2, count) * 2,
                at,
                draw.random(count),
                at,
                pa.repeat(pa.scalar("t", pa.large_string()), count),
                pa.array(draw.integers(0, PARTITIONS, count).astype("i4")),
                at,
                pa.array(at).cast(pa.timestamp("us", "UTC")),
            ],
            names=main.arrow.names,
        ).cast(main.arrow)
        known = (VersionLookup(main, ("id",), "version", tuple(files)),)
        took = []
        for plan in (plain, replace(ordered, known=known)):
            before = time.process_time()
            done = apply(plan, KeyChanges(rows=[rows]), "bench")
            took.append(time.process_time() - before)
        assert done.keys == len(np.unique(rows["id"].to_numpy()))  # each batch is newer
        spent.append(
            {"rows_in_files": seen, "plain": round(took[0], 3), "ordered": round(took[1], 3)}
        )
        paths = [json.loads(file.descriptor)["file-path"] for file in done.files]
        files += [FileBounds(path, (None,)) for path in paths]
        seen += sum(file.rows for file in done.files)
        say(f"  {spent[-1]}")
    return {"rows": count, "keys": given.keys // 2, "batches": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 500_000), ("keys", 1_000_000), ("turns", 4), ("turn", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--apply", action="store_true")
    given = parser.parse_args()
    if given.apply:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(applied(given, folder)))
        return
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "broker") as broker:
        print(json.dumps(measured(given, folder, broker.bootstrap)))


if __name__ == "__main__":
    main()
