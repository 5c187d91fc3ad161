"""Frazil against Spark's own way, in one run, on one topic, on one machine.

Spark's way: its Kafka source → `from_avro` → Iceberg's streaming append. Frazil's way: `Sink`, with
ledger, index, offset columns and checks. Each runs in one process for the whole run and does the
same job several times, in turns, so that both are warm and both see the same noise. A repetition is
the whole job: from `start` until every record is committed. Rows are counted on both sides.

    make bench                       # 16M records, six times each: six minutes
    make bench ARGS='--rows 4000000 --repeat 8'
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from frazil.spark import jars
from frazil.testing import datagen
from frazil.testing.jars import spark_kafka_jars
from frazil.testing.kafka import Broker

TOPIC = "orders"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Peer:
    """One side: a process that does a repetition on request, and says how it went."""

    def __init__(self, side: str, **settings: object) -> None:
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--side", side, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.runs: list[dict[str, Any]] = []
        assert self._answer() == {"ready": True}

    def repeat(self) -> dict[str, Any]:
        before = cpu_seconds(self.process.pid)
        self._tell("go")
        run = self._answer()
        run["cpu"] = cpu_seconds(self.process.pid) - before
        self.runs.append(run)
        return run

    def end(self) -> None:
        self._tell("end")
        self.process.wait(60)

    def _tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"the {self.side} side ended")


def cpu_seconds(pid: int) -> float:
    """Of a process and all below it."""
    total = 0.0
    main = psutil.Process(pid)
    for process in [main, *main.children(recursive=True)]:
        try:
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
        except psutil.NoSuchProcess:
            pass
    return total


def compare(rows: int, repeat: int, partitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as name:
        folder = Path(name)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", jvm=("-Xmx1g",), say=say) as broker:
            datagen.create_topic(broker.bootstrap, TOPIC, partitions)
            say(f"producing {rows:,} orders")
            began = time.monotonic()
            datagen.produce(broker.bootstrap, TOPIC, partitions, rows=rows)
            say(f"  {time.monotonic() - began:.0f} s")
            (folder / "order.avsc").write_text(datagen.SCHEMA)
            settings = {"folder": name, "bootstrap": broker.bootstrap, "rows": rows}
            say("starting both sides")
            sides = [Peer("spark", **settings), Peer("frazil", **settings)]
            kafka = psutil.Process(broker.pid)
            for number in range(repeat):
                for side in sides:
                    before = sum(kafka.cpu_times()[:2])
                    run = side.repeat()
                    run["broker_cpu"] = sum(kafka.cpu_times()[:2]) - before
                    if run["rows"] != rows:
                        raise SystemExit(f"{side.side} has {run['rows']} rows of {rows}")
                    say(
                        f"  {number + 1}/{repeat} {side.side:>6}: {run['seconds']:6.2f} s "
                        f"{rows / run['seconds']:>9,.0f} rows/s  cpu {run['cpu']:.1f} s"
                    )
            for side in sides:
                side.end()
    return _summary(rows, repeat, *sides)


def _summary(rows: int, repeat: int, spark: Peer, frazil: Peer) -> dict[str, Any]:
    warm = max(1, repeat - 3)  # a JVM is warm at its fourth repetition

    def rate(peer: Peer) -> float:
        return rows / statistics.median(run["seconds"] for run in peer.runs[-warm:])

    def cpu(peer: Peer, key: str = "cpu") -> float:
        return statistics.median(run[key] for run in peer.runs[-warm:]) / rows * 1e6

    split = {
        key: round(statistics.median(run["split"].get(key, 0.0) for run in frazil.runs[-warm:]), 2)
        for key in frazil.runs[-1]["split"]
    }
    result = {
        "rows": rows,
        "frazil_rows_per_s": round(rate(frazil)),
        "spark_rows_per_s": round(rate(spark)),
        "ratio": round(rate(frazil) / rate(spark), 2),
        "ratio_cold": round(spark.runs[0]["seconds"] / frazil.runs[0]["seconds"], 2),
        "frazil_cpu_s_per_million": round(cpu(frazil), 2),
        "spark_cpu_s_per_million": round(cpu(spark), 2),
        "broker_cpu_s_per_million": round(cpu(frazil, "broker_cpu"), 2),
        "frazil_seconds_by_station": split,
        "warm_repetitions": warm,
        "frazil_seconds": [round(run["seconds"], 2) for run in frazil.runs],
        "spark_seconds": [round(run["seconds"], 2) for run in spark.runs],
    }
    say(f"\n{'':8}{'rows/s':>12}{'CPU-s per million':>20}")
    for name in ("frazil", "spark"):
        say(f"{name:8}{result[f'{name}_rows_per_s']:>12,}{result[f'{name}_cpu_s_per_million']:>20}")
    say(f"ratio {result['ratio']} warm, {result['ratio_cold']} cold")
    say("seconds by station (tasks added up): " + ", ".join(f"{k} {v}" for k, v in split.items()))
    return result


def side(name: str, settings: dict[str, Any]) -> None:
    """The child: prepare, then one repetition for each line on standard input."""
    job = (spark_side if name == "spark" else frazil_side)(settings)
    print(json.dumps({"ready": True}), flush=True)
    for number, line in enumerate(sys.stdin):
        if line.strip() != "go":
            return
        print(json.dumps(job(number)), flush=True)


def spark_side(settings: dict[str, Any]) -> Any:
    from pyspark.sql import SparkSession
    from pyspark.sql.avro.functions import from_avro
    from pyspark.sql.functions import col, expr

    jar_paths = [
        *jars.fetch(jars.ICEBERG, transitive=False, say=say),
        *spark_kafka_jars(say),
    ]
    folder = settings["folder"]
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(map(str, jar_paths)))
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.lake.type", "hadoop")
        .config("spark.sql.catalog.lake.warehouse", f"{folder}/spark")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    columns = (
        "order_id bigint, customer string, sku string, quantity int, price double, "
        "placed_at timestamp, country string, express boolean, note string"
    )

    def job(number: int) -> dict[str, Any]:
        spark.sql(
            f"CREATE TABLE lake.db.t{number} ({columns}) USING iceberg "
            "TBLPROPERTIES ('write.parquet.compression-codec'='zstd')"
        )
        began = time.monotonic()
        records = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", settings["bootstrap"])
            .option("subscribe", TOPIC)
            .option("startingOffsets", "earliest")
            .load()
        )
        payload = expr("substring(value, 6)")
        rows = records.select(from_avro(payload, datagen.SCHEMA).alias("o")).select(col("o.*"))
        query = (
            rows.writeStream.format("iceberg")
            .outputMode("append")
            .option("checkpointLocation", f"{folder}/spark-checkpoint-{number}")
            .trigger(availableNow=True)
            .toTable(f"lake.db.t{number}")
        )
        query.awaitTermination()
        seconds = time.monotonic() - began
        counted = spark.table(f"lake.db.t{number}").count()
        return {"seconds": seconds, "rows": counted, "split": {}}

    return job


def frazil_side(settings: dict[str, Any]) -> Any:
    from frazil.config.model import from_document
    from frazil.sink import Sink
    from frazil.spark.session import session
    from frazil.steps import Step

    folder = settings["folder"]
    monitored: str = settings.get("monitored", "")

    def config(number: int, monitor: bool = False) -> Any:
        return from_document(
            {
                "sink": {
                    "id": f"bench{number}",
                    "topics": [TOPIC],
                    "index_table": f"db.index{number}",
                    "trigger": "10ms",
                    "commit_interval": "0s",
                },
                "kafka": {"bootstrap.servers": settings["bootstrap"]},
                "decode": {"schema": f"{folder}/order.avsc"},
                "catalog": {"type": "hadoop", "warehouse": f"{folder}/frazil"},
                "table": [{"name": f"db.t{number}"}],
                **({"metrics": {"address": "127.0.0.1:0"}} if monitor else {}),
            }
        )

    spark = session(config(0), say=say)

    def job(number: int) -> dict[str, Any]:
        steps: list[Step] = []
        monitor = bool(monitored) and monitored[number % len(monitored)] == "1"
        began = time.monotonic()
        if monitor:
            seconds = monitored_run(config(number, monitor), spark, steps, f"{folder}/log")
        else:
            sink = Sink(config(number), on_step=steps.append).start(spark)
            sink.wait_until(sink.ends())
            seconds = time.monotonic() - began
            sink.stop()
        counted = spark.table(f"lake.db.t{number}").count()
        return {"seconds": seconds, "rows": counted, "split": _split(steps)}

    return job


def monitored_run(config: Any, spark: Any, steps: list[Any], log: str) -> float:
    """A run as `frazil run --metrics … --log-format json --log-file …` makes it. Its seconds."""
    from frazil import logs
    from frazil.monitoring.setup import monitoring_of
    from frazil.sink import Sink

    began = time.monotonic()
    logs.configure("json", "INFO", log)
    monitoring = monitoring_of(config)

    def on_step(step: Any) -> None:
        steps.append(step)
        monitoring.step(step)

    run = Sink(config, on_step=on_step).start(spark)
    monitoring.started(run)
    run.wait_until(run.ends(), unless=lambda: bool(monitoring.tick(run)))
    seconds = time.monotonic() - began
    run.stop()
    monitoring.ended(None)
    logs.remove()
    return seconds


def _split(steps: list[Any]) -> dict[str, float]:
    """Seconds per station: the tasks' own clocks, and the driver's between its steps."""
    split = {"fetch": 0.0, "decode": 0.0, "write": 0.0, "stage": 0.0, "commit": 0.0}
    at: dict[tuple[int, str], float] = {(step.batch, step.name): step.at for step in steps}
    for step in steps:
        if step.name == "written":
            for key in ("fetch", "decode", "write"):
                split[key] += step.seconds[key]
            split["stage"] += at[step.batch, "staged"] - step.at
        if step.name == "commit" and (step.batch, "done") in at:
            split["commit"] += at[step.batch, "done"] - step.at
    return split


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=16_000_000)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side(given.side, json.loads(given.settings))
    else:
        print(json.dumps(compare(given.rows, given.repeat, given.partitions)))
