"""Frazil against Spark's own way, in one run, on the same topics, on one machine.

Spark's way: its Kafka source → `from_avro` or `from_json` → Iceberg's streaming append. Frazil's
way: `Sink`, with ledger, index, offset columns and checks. Each runs in one process for the whole
run and does the same jobs several times, in turns, so that both are warm and both see the same
noise. A repetition is the whole job: from `start` until every record is committed, in one batch on
both sides. Rows are counted on both sides.

    plain     Avro orders, both sides
    headers   the same orders with one header each, Frazil against its own plain
    alone     fetch, decode and write of the plain topic without Spark, staging and commit
    json      the same orders as JSON, both sides; a quarter of the rows

    make bench                       # 16M records, six times each: about ten minutes
    make bench ARGS='--cases plain'  # six minutes
    make bench ARGS='--rows 4000000 --repeat 8'
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from alone import Batch, noted_batches, seconds_alone
from frazil.spark import jars
from frazil.testing import datagen
from frazil.testing.jars import spark_kafka_jars
from frazil.testing.kafka import Broker
from peer_jobs import SPARK_COLUMNS, spark_orders
from peer_topics import HEADERS, orders, produce
from side import Side, answer_requests

#: The sides of each case; a case is the name of its topic as well.
CASES = {"plain": ("spark", "frazil"), "headers": ("frazil",), "json": ("spark", "frazil")}
#: JSON takes longer to produce and to read, so there are fewer of it: one in so many.
JSON_SHARE = 4


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def started(name: str, **settings: object) -> Side:
    command = [sys.executable, __file__, "--side", name, "--settings", json.dumps(settings)]
    return Side(name, command, watch_memory=False)


#: case and side → its runs
Runs = dict[tuple[str, str], list[dict[str, Any]]]


def compare(
    rows: int, repeat: int, partitions: int, cases: Sequence[str] = tuple(CASES)
) -> dict[str, Any]:
    counts = {case: rows // JSON_SHARE if case == "json" else rows for case in cases}
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as name:
        folder = Path(name)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", jvm=("-Xmx1g",), say=say) as broker:
            for case, count in counts.items():
                prepare(broker.bootstrap, case, count, partitions)
            (folder / "order.avsc").write_text(datagen.SCHEMA)
            runs = _in_turns(folder, broker, counts, repeat)
    return _summary(counts, repeat, runs)


def prepare(bootstrap: str, case: str, rows: int, partitions: int) -> None:
    """The topic of a case."""
    datagen.create_topic(bootstrap, case, partitions)
    say(f"{case}: producing {rows:,} orders")
    began = time.monotonic()
    headers = HEADERS[:1] if case == "headers" else ()
    values = orders(rows, as_json=case == "json")
    produce(bootstrap, case, values, partitions=partitions, headers=headers)
    say(f"  {time.monotonic() - began:.0f} s")


def _in_turns(folder: Path, broker: Broker, counts: dict[str, int], repeat: int) -> Runs:
    say("starting both sides")
    settings = {"folder": str(folder), "bootstrap": broker.bootstrap}
    needed = dict.fromkeys(side for case in counts for side in CASES[case])
    sides = {name: started(name, **settings) for name in needed}
    kafka = psutil.Process(broker.pid)
    runs: Runs = {}
    for number in range(repeat):
        for case, rows in counts.items():
            for name in CASES[case]:
                before = sum(kafka.cpu_times()[:2])
                run = sides[name].ask(case=case, number=number)
                run["broker_cpu"] = sum(kafka.cpu_times()[:2]) - before
                if run["rows"] != rows:
                    raise SystemExit(f"{name} has {run['rows']:,} rows of {rows:,} of {case}")
                runs.setdefault((case, name), []).append(run)
                say(
                    f"  {number + 1}/{repeat} {case:>7} {name:>6}: {run['seconds']:6.2f} s "
                    f"{rows / run['seconds']:>9,.0f} rows/s  cpu {run['cpu']:.1f} s"
                )
    if "plain" in counts and "frazil" in sides:
        runs["plain", "alone"] = [sides["frazil"].ask(alone=True)]
    for side in sides.values():
        side.end()
    return runs


def _summary(counts: dict[str, int], repeat: int, runs: Runs) -> dict[str, Any]:
    warm = max(1, repeat - 3)  # a JVM is warm at its fourth repetition

    def rate(case: str, name: str) -> float:
        seconds = [run["seconds"] for run in runs[case, name][-warm:]]
        return counts[case] / statistics.median(seconds)

    def cpu(case: str, name: str, key: str = "cpu") -> float:
        spent = [run[key] for run in runs[case, name][-warm:]]
        return statistics.median(spent) / counts[case] * 1e6

    result: dict[str, Any] = {"rows": counts.get("plain", 0)}
    if "plain" in counts:
        frazil, spark = runs["plain", "frazil"], runs["plain", "spark"]
        result |= {
            "frazil_rows_per_s": round(rate("plain", "frazil")),
            "spark_rows_per_s": round(rate("plain", "spark")),
            "ratio": round(rate("plain", "frazil") / rate("plain", "spark"), 2),
            "ratio_cold": round(spark[0]["seconds"] / frazil[0]["seconds"], 2),
            "cpu_ratio": round(cpu("plain", "spark") / cpu("plain", "frazil"), 2),
            "frazil_cpu_s_per_million": round(cpu("plain", "frazil"), 2),
            "spark_cpu_s_per_million": round(cpu("plain", "spark"), 2),
            "broker_cpu_s_per_million": round(cpu("plain", "frazil", "broker_cpu"), 2),
            "frazil_seconds_by_station": _by_station(frazil[-warm:]),
            "alone_rows_per_s": round(counts["plain"] / runs["plain", "alone"][0]["seconds"]),
            "pipeline_share": round(
                runs["plain", "alone"][0]["seconds"]
                / statistics.median(run["seconds"] for run in frazil[-warm:]),
                2,
            ),
            "frazil_seconds": [round(run["seconds"], 2) for run in frazil],
            "spark_seconds": [round(run["seconds"], 2) for run in spark],
        }
    if "headers" in counts:
        result |= {
            "headers_rows_per_s": round(rate("headers", "frazil")),
            "headers_cpu_s_per_million": round(cpu("headers", "frazil"), 2),
            "ratio_headers": round(rate("headers", "frazil") / rate("plain", "frazil"), 2),
        }
    if "json" in counts:
        result |= {
            "json_rows": counts["json"],
            "json_rows_per_s": round(rate("json", "frazil")),
            "json_cpu_s_per_million": round(cpu("json", "frazil"), 2),
            "spark_json_rows_per_s": round(rate("json", "spark")),
            "spark_json_cpu_s_per_million": round(cpu("json", "spark"), 2),
            "ratio_json": round(rate("json", "frazil") / rate("json", "spark"), 2),
        }
    result["warm_repetitions"] = warm
    say(f"\n{'':16}{'rows/s':>12}{'CPU-s per million':>20}")
    for case, name in runs:
        if name == "alone":
            continue
        say(f"{case:8}{name:8}{rate(case, name):>12,.0f}{cpu(case, name):>20.2f}")
    shown = ("ratio", "ratio_cold", "cpu_ratio", "ratio_headers", "ratio_json", "pipeline_share")
    say(", ".join(f"{key} {result[key]}" for key in shown if key in result))
    split = result.get("frazil_seconds_by_station", {})
    say("seconds by station (tasks added up): " + ", ".join(f"{k} {v}" for k, v in split.items()))
    return result


def _by_station(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {
        station: round(statistics.median(run["split"].get(station, 0.0) for run in runs), 2)
        for station in runs[-1]["split"]
    }


#: a request of the bench → how the job went
Job = Callable[[dict[str, Any]], dict[str, Any]]


def spark_side(settings: dict[str, Any]) -> Job:
    from pyspark.sql import SparkSession

    jar_paths = [
        *jars.fetch(jars.ICEBERG, transitive=False, say=say),
        *spark_kafka_jars(say),
    ]
    folder = settings["folder"]
    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.jars", ",".join(map(str, jar_paths)))
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.lake.type", "hadoop")
        .config("spark.sql.catalog.lake.warehouse", f"{folder}/spark")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")

    def job(request: dict[str, Any]) -> dict[str, Any]:
        case = request["case"]
        table = f"{case}{request['number']}"
        spark.sql(
            f"CREATE TABLE lake.db.{table} ({SPARK_COLUMNS}) USING iceberg "
            "TBLPROPERTIES ('write.parquet.compression-codec'='zstd')"
        )
        began = time.monotonic()
        records = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", settings["bootstrap"])
            .option("subscribe", case)
            .option("startingOffsets", "earliest")
            .load()
        )
        query = (
            spark_orders(records, as_json=case == "json")
            .writeStream.format("iceberg")
            .outputMode("append")
            .option("checkpointLocation", f"{folder}/spark-checkpoint-{table}")
            .trigger(availableNow=True)
            .toTable(f"lake.db.{table}")
        )
        query.awaitTermination()
        seconds = time.monotonic() - began
        counted = spark.table(f"lake.db.{table}").count()
        return {"seconds": seconds, "rows": counted, "split": {}}

    return job


def frazil_side(settings: dict[str, Any]) -> Job:
    from frazil.config.model import from_document
    from frazil.sink import Sink
    from frazil.spark.session import session
    from frazil.steps import Step

    folder = settings["folder"]

    def config(case: str, number: int, monitor: bool = False) -> Any:
        decode: dict[str, Any] = {"schema": f"{folder}/order.avsc"}
        if case == "json":
            decode = {"format": "json", "columns": {"placed_at": "timestamptz"}}
        return from_document(
            {
                "sink": {
                    "id": f"{case}{number}",
                    "topics": [case],
                    "index_table": f"db.{case}{number}_index",
                    "trigger": "10ms",
                    "commit_interval": "0s",
                    "max_bytes_per_trigger": "1TiB",
                },
                "kafka": {"bootstrap.servers": settings["bootstrap"]},
                "decode": decode,
                "catalog": {"type": "hadoop", "warehouse": f"{folder}/frazil"},
                "table": [{"name": f"db.{case}{number}"}],
                **({"metrics": {"address": "127.0.0.1:0"}} if monitor else {}),
            }
        )

    spark = session(config("plain", 0), say=say)
    plain: list[Batch] = []

    def job(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("alone"):
            slots = spark.sparkContext.defaultParallelism
            return {"seconds": sum(seconds_alone(batch, slots) for batch in plain)}
        case, number = request["case"], request["number"]
        monitor = request.get("monitored", False)
        steps: list[Step] = []
        began = time.monotonic()
        if monitor:
            seconds = monitored_run(config(case, number, True), spark, steps, f"{folder}/log")
        else:
            with noted_batches() as batches:
                sink = Sink(config(case, number), on_step=steps.append).start(spark)
                sink.wait_until(sink.ends())
                seconds = time.monotonic() - began
                sink.stop()
            if case == "plain":
                plain[:] = batches
        counted = spark.table(f"lake.db.{case}{number}").count()
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
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        make_job = spark_side if given.side == "spark" else frazil_side
        answer_requests(make_job(json.loads(given.settings)))
    elif "headers" in given.cases and "plain" not in given.cases:
        parser.error("headers are compared with plain: expected --cases plain headers")
    else:
        print(json.dumps(compare(given.rows, given.repeat, given.partitions, given.cases)))
