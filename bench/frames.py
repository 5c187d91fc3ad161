"""DataFrames: Frazil's write and read against Spark's own, in one run, in one JVM.

Writing: the same streaming DataFrame (Parquet files of orders, nine columns, available-now) through
`frazil.write` and through Iceberg's streaming append, both zstd. A repetition is the whole job,
from `start` until all is committed; Frazil's makes its tables, and has ledger, index and checks.

Reading: the same topic (Confluent Avro) as decoded rows into Spark's `noop` sink, available-now.
Spark's way: its Kafka source → `from_avro`, nine columns. Frazil's way: `frazil.read` as it comes,
with topic, partition, offset, timestamp, key and headers beside the nine; and once more with the
nine alone selected, as `selected`.

Both sides share one Spark session, made by `frazil.spark.session` for a config with a
`[transform]`: the JVM has its full compiler and -XX:+UseParallelGC; `spark.master` is local[2],
`spark.driver.memory` 4g; all else is as the session sets it, for both. They take turns, so both are
warm and see the same noise. Rows are counted on both sides. The cold figures are from before that:
the first job of a process and a JVM of its own for each side, the session's start not counted.

    make bench-df                       # 4M rows, eight times each
    make bench-df ARGS='--rows 200000 --repeat 4'
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import frazil
from frazil.config.model import Config, from_document
from frazil.spark.session import session
from frazil.testing import datagen
from frazil.testing.jars import spark_kafka_jars
from frazil.testing.kafka import Broker

TOPIC = "orders"
COLUMNS = (
    "order_id bigint, customer string, sku string, quantity int, price double, "
    "placed_at timestamp, country string, express boolean, note string"
)
NAMES = [column.split()[0] for column in COLUMNS.split(", ")]
FILES = 8

#: repetition → its seconds, the rows that came out, and what else is worth telling
Job = Callable[[int], dict[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One folder, one broker, one session."""

    def __init__(self, folder: str, bootstrap: str, rows: int, broker: int) -> None:
        self.folder, self.bootstrap, self.rows = folder, bootstrap, rows
        self._broker = broker
        self.config = self._config()
        self.spark = session(self.config, say=say)

    def _config(self) -> Config:
        return from_document(
            {
                "sink": {
                    "id": "bench",
                    "topics": [TOPIC],
                    "max_bytes_per_trigger": "1TiB",
                    "max_records_per_trigger": 10 * self.rows,
                },
                "kafka": {"bootstrap.servers": self.bootstrap},
                "decode": {"schema": f"{self.folder}/order.avsc"},
                "transform": {"sql": "SELECT * FROM stream"},
                "catalog": {"type": "hadoop", "warehouse": f"{self.folder}/lake"},
                "spark": {
                    "spark.master": "local[2]",
                    "spark.driver.memory": "4g",
                    "spark.jars": ",".join(map(str, spark_kafka_jars(say))),
                },
                "table": [{"name": "db.bench"}],
            }
        )

    def cpu(self) -> float:
        """Of this process and all below it, the broker's excepted: seconds so far."""
        total = 0.0
        me = psutil.Process()
        broker = psutil.Process(self._broker)
        apart = {broker, *broker.children(recursive=True)}
        for process in [me, *me.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            if process not in apart:
                total += times.user + times.system
                if process != me:  # whose children of the past were other sessions
                    total += times.children_user + times.children_system
        return total

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def frame(self) -> Any:
        files = f"{self.folder}/orders"
        return self.spark.readStream.schema(COLUMNS).parquet(files)

    def frazil_write(self, number: int) -> dict[str, Any]:
        table, checkpoint = f"db.frazil{number + 1}", f"{self.folder}/checkpoint-frazil{number}"
        began = time.monotonic()
        query = frazil.write(
            self.frame(),
            table,
            id=f"write{number + 1}",
            index_table=f"db.index{number + 1}",
            trigger="available-now",
            checkpoint_location=checkpoint,
        ).start()
        query.awaitTermination()
        return self._written(began, table, f"db.index{number + 1}")

    def iceberg_append(self, number: int) -> dict[str, Any]:
        table, checkpoint = f"db.iceberg{number + 1}", f"{self.folder}/checkpoint-iceberg{number}"
        self.spark.sql(
            f"CREATE TABLE lake.{table} ({COLUMNS}) USING iceberg "
            "TBLPROPERTIES ('write.parquet.compression-codec' = 'zstd')"
        )
        began = time.monotonic()
        query = (
            self.frame()
            .writeStream.format("iceberg")
            .outputMode("append")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .toTable(f"lake.{table}")
        )
        query.awaitTermination()
        return self._written(began, table)

    def _written(self, began: float, *tables: str) -> dict[str, Any]:
        seconds = time.monotonic() - began
        rows = self.spark.table(f"lake.{tables[0]}").count()
        [(size,)] = self.spark.sql(
            f"SELECT sum(file_size_in_bytes) FROM lake.{tables[0]}.files"
        ).collect()
        for table in tables:
            self.spark.sql(f"DROP TABLE lake.{table} PURGE")
        return {"seconds": seconds, "rows": rows, "bytes": size}

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def frazil_read(self, number: int) -> dict[str, Any]:
        began = time.monotonic()
        return self._into_nothing(began, frazil.read(self.spark, self.config))

    def frazil_read_selected(self, number: int) -> dict[str, Any]:
        began = time.monotonic()
        return self._into_nothing(began, frazil.read(self.spark, self.config).select(*NAMES))

    def spark_read(self, number: int) -> dict[str, Any]:
        from pyspark.sql.avro.functions import from_avro
        from pyspark.sql.functions import col, expr

        began = time.monotonic()
        records = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.bootstrap)
            .option("subscribe", TOPIC)
            .option("startingOffsets", "earliest")
            .load()
        )
        payload = expr("substring(value, 6)")  # without the Confluent header
        rows = records.select(from_avro(payload, datagen.SCHEMA).alias("o")).select(col("o.*"))
        return self._into_nothing(began, rows)

    def _into_nothing(self, began: float, frame: Any) -> dict[str, Any]:
        checkpoint = tempfile.mkdtemp(dir=self.folder, prefix="checkpoint-")
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        seconds = time.monotonic() - began
        rows = sum(progress.sink.numOutputRows for progress in query.recentProgress)
        shutil.rmtree(checkpoint, ignore_errors=True)
        return {"seconds": seconds, "rows": rows}


class Side:
    def __init__(self, name: str) -> None:
        self.name = name
        self.cold: dict[str, Any] = {}
        self.runs: list[dict[str, Any]] = []


def first(side: Side, settings: dict[str, Any]) -> None:
    """One job in a process of its own."""
    given = ["--cold", side.name, "--settings", json.dumps(settings)]
    run = subprocess.run(
        [sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True, check=True
    )
    side.cold = checked(side, json.loads(run.stdout.splitlines()[-1]), settings["rows"])
    say(f"  {side.name:>20}: {side.cold['seconds']:6.2f} s")


def checked(side: Side, run: dict[str, Any], rows: int) -> dict[str, Any]:
    if run["rows"] != rows:
        raise SystemExit(f"{side.name} has {run['rows']} rows of {rows}")
    return run


def in_turns(bench: Bench, sides: list[Side], repeat: int) -> None:
    for number in range(repeat):
        for side in sides:
            before = bench.cpu()
            job: Job = getattr(bench, side.name)
            run = checked(side, job(number), bench.rows)
            run["cpu"] = bench.cpu() - before
            side.runs.append(run)
            say(
                f"  {number + 1}/{repeat} {side.name:>20}: {run['seconds']:6.2f} s "
                f"{bench.rows / run['seconds']:>9,.0f} rows/s  cpu {run['cpu']:.1f} s"
            )


def make_files(folder: Path, rows: int) -> None:
    """The orders of `frazil.testing.datagen`, as Parquet files; same rows each time."""
    folder.mkdir()
    draw = np.random.default_rng(1)
    texts = {
        "customer": [f"customer-{i:06d}" for i in range(200_000)],
        "sku": [f"sku-{i:04d}" for i in range(5_000)],
        "country": ["DE", "FR", "US", "JP", "BR", "IN"],
        "note": [None, None, "gift wrap"],
    }
    pools = {name: pa.array(values, pa.string()) for name, values in texts.items()}
    for number, ids in enumerate(np.array_split(np.arange(1, rows + 1), FILES)):
        count = len(ids)
        columns = {
            "order_id": pa.array(ids, pa.int64()),
            "quantity": pa.array(draw.integers(1, 10, count), pa.int32()),
            "price": pa.array(draw.integers(100, 50_000, count) / 100),
            "placed_at": pa.array(1_767_225_600_000_000 + ids, pa.timestamp("us", "UTC")),
            "express": pa.array(draw.random(count) < 0.25),
        }
        for name, pool in pools.items():
            columns[name] = pool.take(pa.array(draw.integers(0, len(pool), count)))
        table = pa.table({name: columns[name] for name in NAMES})
        pq.write_table(table, folder / f"{number}.parquet", compression="snappy")


def compare(rows: int, repeat: int, partitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as name:
        folder = Path(name)
        say(f"making {rows:,} orders as files")
        make_files(folder / "orders", rows)
        (folder / "order.avsc").write_text(datagen.SCHEMA)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", jvm=("-Xmx1g",), say=say) as broker:
            datagen.create_topic(broker.bootstrap, TOPIC, partitions)
            say(f"producing {rows:,} orders")
            datagen.produce(broker.bootstrap, TOPIC, partitions, rows=rows)
            write, append = Side("frazil_write"), Side("iceberg_append")
            read, selected = Side("frazil_read"), Side("frazil_read_selected")
            spark = Side("spark_read")
            settings = {
                "folder": name,
                "bootstrap": broker.bootstrap,
                "rows": rows,
                "broker": broker.pid,
            }
            say("each side cold")
            for side in (write, append, read, spark):
                first(side, settings)
            bench = Bench(**settings)
            say("writing a DataFrame")
            in_turns(bench, [write, append], repeat)
            say("reading a topic")
            in_turns(bench, [read, selected, spark], repeat)
            bench.spark.stop()
    warm = max(1, repeat - 3)  # a JVM is warm at its fourth repetition

    def rate(side: Side) -> float:
        return rows / statistics.median(run["seconds"] for run in side.runs[-warm:])

    def cold(ours: Side, other: Side) -> float:
        return round(other.cold["seconds"] / ours.cold["seconds"], 2)

    result: dict[str, Any] = {
        "rows": rows,
        "ratio_df": round(rate(write) / rate(append), 2),
        "ratio_df_cold": cold(write, append),
        "ratio_read": round(rate(read) / rate(spark), 2),
        "ratio_read_cold": cold(read, spark),
        "ratio_read_selected": round(rate(selected) / rate(spark), 2),
        "warm_repetitions": warm,
    }
    say(f"\n{'':22}{'rows/s':>12}{'CPU-s per million':>20}")
    for side in (write, append, read, selected, spark):
        per_million = statistics.median(run["cpu"] for run in side.runs[-warm:]) / rows * 1e6
        result[f"{side.name}_rows_per_s"] = round(rate(side))
        result[f"{side.name}_cpu_s_per_million"] = round(per_million, 2)
        result[f"{side.name}_seconds"] = [round(run["seconds"], 2) for run in side.runs]
        if side.cold:
            result[f"{side.name}_cold_seconds"] = round(side.cold["seconds"], 2)
        say(f"{side.name:22}{rate(side):>12,.0f}{per_million:>20.2f}")
    for side in (write, append):
        result[f"{side.name}_bytes"] = side.runs[-1]["bytes"]
    say(f"writing: {result['ratio_df']} warm, {result['ratio_df_cold']} cold")
    say(
        f"reading: {result['ratio_read']} warm, {result['ratio_read_cold']} cold, "
        f"{result['ratio_read_selected']} with the record's columns alone"
    )
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--cold", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cold:
        print(json.dumps(getattr(Bench(**json.loads(given.settings)), given.cold)(-1)))
    else:
        print(json.dumps(compare(given.rows, given.repeat, given.partitions)))
