"""The public API as users type it: nothing runs, `make check` type-checks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import frazil


def run(path: Path, spark: SparkSession) -> None:
    sink: frazil.Sink = frazil.Sink.from_toml(path, on_step=lambda step: print(step.name))
    with sink.start() as run:
        done: bool = run.wait_until_caught_up(timeout=600)
        done = run.wait_until({"orders": {0: 5000}}) and done
        position: frazil.Cut = run.position
        committed: int = run.progress.commits
        print(position, committed)
    query: StreamingQuery = frazil.Sink(configured()).start(spark)
    query.awaitTermination()


def run_several(path: Path, spark: SparkSession) -> None:
    def changed(status: frazil.SinkStatus) -> None:
        print(status.sink, status.state, status.since, status.refused)

    with frazil.run_all([path, "sinks/", configured()], watch="2s", changed=changed) as service:
        over: bool = service.wait(timeout=60)
        error: frazil.errors.FrazilError | None = service.sinks["orders"].error
        problem: str = service.problems["orders.toml"]
        service.check()
        print(over, error, problem)
    once: frazil.Service = frazil.run_all([path], spark=spark, until_caught_up=True)
    stopped: bool = once.stop()
    print(stopped)


def configured() -> frazil.Config:
    return frazil.Config(
        sink={"id": "orders", "topics": ["orders"]},
        kafka={"bootstrap.servers": "broker:9092"},
        catalog={"type": "rest"},
        tables=[{"name": "shop.orders", "partition_by": ["day(at)"]}],
        dead_letters={"table": "shop.dead"},
    )


def prove(config: frazil.Config) -> int:
    proof = frazil.audit(config, deep=True, max_lag=10)
    try:
        proof.raise_unless_proven()
    except frazil.errors.NotProven as error:
        return error.exit_code
    report: dict[str, Any] = frazil.status("orders.toml")
    frazil.audit("shop.orders", catalog={"type": "rest"})
    frazil.locate(config, "orders", 0, 17)
    return len(report)


def frames(spark: SparkSession, config: frazil.Config) -> DataFrame:
    rows = frazil.read(spark, config)
    frazil.write(rows, "shop.orders", id="orders").start().stop()
    return frazil.as_of(spark, config, "orders", 0, 17)


def judge(path: Path) -> None:
    result: frazil.AuditResult = frazil.audit(path)
    report: frazil.LocateReport = frazil.locate(path, "orders", 0, 17)
    print(result.verdict, report.contained, report.other_topics)
