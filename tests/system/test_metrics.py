"""A sink's metrics, and the progress of Spark's query, against a real broker, catalog and query."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql.streaming.listener import StreamingQueryListener

import frazil
from frazil.config.model import Config
from frazil.monitoring.metrics_observer import MetricsObserver
from frazil.offsets import Partition
from frazil.sink import Sink
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.system.streams import eventually, produce


def scraped(observer: MetricsObserver) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) → value."""
    with urllib.request.urlopen(observer.url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Listener(StreamingQueryListener):
    """What any listener of Spark is told of the queries of one sink."""

    def __init__(self, sink: str) -> None:
        self.rows: list[int] = []
        self.sources: list[dict[str, Any]] = []
        self._sink = sink

    def onQueryStarted(self, event: Any) -> None: ...

    def onQueryIdle(self, event: Any) -> None: ...

    def onQueryTerminated(self, event: Any) -> None: ...

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        if progress.name.startswith(f"frazil-{self._sink}-") and progress.numInputRows:
            self.rows.append(progress.numInputRows)
            self.sources += [json.loads(source.json) for source in progress.sources]


@contextmanager
def listening(spark: Any, sink: str) -> Iterator[Listener]:
    listener = Listener(sink)
    spark.streams.addListener(listener)
    try:
        yield listener
    finally:
        spark.streams.removeListener(listener)


def orders(count: int, start: int = 0) -> list[bytes]:
    numbers = range(start, start + count)
    return [json.dumps({"id": i, "kind": "a" if i % 5 else "b"}).encode() for i in numbers]


def test_metrics_show_what_a_run_did_and_spark_counts_records(
    broker: Broker, spark: Any, name: str, make_config: Callable[..., Config]
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, [*orders(20), b"no json", b"nor this"], 2)
    table, dead = f"db.{name}", f"db.{name}_dead"
    config = make_config(
        decode={"format": "json"},
        sink={"commit_interval": "1s"},
        dead_letters={"table": dead},
        route=[{"field": "kind", "values": ["b"], "skip": True}, {"to": [table]}],
        metrics={"address": "127.0.0.1:0", "lag_interval": "1s", "audit_interval": "1s"},
    )
    observer = MetricsObserver(config)
    with listening(spark, name) as listener:
        run = Sink(config, on_step=observer.step).start(spark)
        observer.started(run)
        try:
            assert run.wait_until(run.ends(), 120)
            produce(broker.bootstrap, name, orders(10, 20), 2)
            assert run.wait_until(run.ends(), 120)
            eventually(lambda: sum(listener.rows) == 32, f"all records, not {listener.rows}")
            observer.tick(run)
            wanted = {
                ("frazil_up", name): 1,
                ("frazil_epoch", name): 1,
                ("frazil_rows_total", name, table): 24,
                ("frazil_rows_total", name, dead): 2,
                ("frazil_records_written_total", name): 24,
                ("frazil_records_skipped_total", name): 6,
                ("frazil_pending_batches", name): 0,
                ("frazil_lag_records", name, name): 0,
                ("frazil_lag_seconds", name, name): 0,
                ("frazil_audit_proven", name): 1,
                ("frazil_audit_verdict", name, table, "proven"): 1,
                ("frazil_audit_verdict", name, config.index_table, "proven"): 1,
                ("frazil_fenced_total", name): 0,
                ("frazil_processes", "driver"): 1,
            }
            eventually(
                lambda: {key: scraped(observer).get(key) for key in wanted} == wanted,
                f"{wanted}, not {scraped(observer)}",
            )
            shown = scraped(observer)
            rejected = [v for k, v in shown.items() if k[0] == "frazil_records_rejected_total"]
            assert sum(rejected) == 2
            assert shown["frazil_commits_total", "committed", name, table] >= 2
            assert shown["frazil_freshness_seconds", name] < 120
            assert shown["frazil_memory_bytes", "jvm"] > 100_000_000
            assert shown["frazil_memory_bytes", "workers"] > 10_000_000
            assert shown["frazil_open_writers", name] == 1
            for step in ("write", "stage", "commit", "tag", "index-commit", "batch"):
                assert shown["frazil_step_duration_seconds_count", name, step] >= 1, step
            for part in ("fetch", "decode", "write"):
                assert shown["frazil_task_seconds_total", part, name] > 0, part
            assert not any("record" in str(v) or "no json" in str(v) for k in shown for v in k[1:])
            progress = json.loads(next(p for p in run.recentProgress if p.numInputRows).json)
            assert progress["numInputRows"] == progress["sources"][0]["numInputRows"] > 0
        finally:
            run.stop()
            observer.ended(None)
    cuts = [source["endOffset"]["cut"][name] for source in listener.sources]
    assert cuts[-1] == {"0": 16, "1": 16}, "offsets are Kafka's"
    for source in listener.sources:  # as documented: not the end of the topic
        assert source["latestOffset"] == source["endOffset"]
    again = Sink(config).start(spark)
    try:
        newest = again.event_times
        assert {*newest} == {Partition(name, 0), Partition(name, 1)}, "a backlog has an age"
        assert all(abs(time.time() - at / 1_000_000) < 600 for at in newest.values())
    finally:
        again.stop()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, kind FROM stream WHERE kind = 'a'",
        "SELECT /*+ REPARTITION(3) */ id, kind FROM stream WHERE kind = 'a'",
    ],
)
def test_spark_counts_the_records_of_a_transform_before_its_filter(
    broker: Broker, spark: Any, name: str, make_config: Callable[..., Config], sql: str
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, orders(20), 2)
    config = make_config(decode={"format": "json"}, transform={"sql": sql})
    with listening(spark, name) as listener:
        with Sink(config).start(spark) as run:
            assert run.wait_until(run.ends(), 120)
            eventually(lambda: listener.rows, "a progress")
        assert sum(listener.rows) == 20
    assert spark.table(f"lake.db.{name}").count() == 16


def test_spark_counts_the_rows_of_other_sources_itself(
    broker: Broker, spark: Any, name: str, make_config: Callable[..., Config]
):
    """A source of Spark's own beside one of ours keeps its count."""
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, orders(20), 2)
    config = make_config(decode={"format": "json"})
    ours = frazil.read(spark, config).select("id")
    others = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .option("subscribe", name)
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("get_json_object(cast(value AS string), '$.id') AS id")
    )
    both = ours.selectExpr("cast(id AS string) AS id").union(others)
    sink = frazil.write(both, f"db.{name}", id=name, trigger="1s")
    with listening(spark, name) as listener, sink.start(spark) as run:
        eventually(lambda: sum(listener.rows) >= 40, "40 rows", sink=run)
        run.processAllAvailable()
    counts: Counter[bool] = Counter()
    for source in listener.sources:
        counts["cut" in source["endOffset"]] += source["numInputRows"]
    assert counts == {True: 20, False: 20}
    assert sum(listener.rows) == 40
    assert spark.table(f"lake.db.{name}").count() == 40
