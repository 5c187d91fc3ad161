"""Metrics: what steps of a run become, how labels are bounded, and that the reference has all."""

from __future__ import annotations

import gzip
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client.parser import text_string_to_metric_families

from frazil.config.model import Config
from frazil.errors import ConfigError, Conflict, Fenced, FrazilError, Gap, Unavailable
from frazil.ledger import index
from frazil.ledger.completeness import COLUMNS, CompletenessRules, CompletenessTracker, recalled
from frazil.monitoring import metrics as names
from frazil.monitoring import probes
from frazil.monitoring.health_state import STATES
from frazil.monitoring.lag import LagTracker
from frazil.monitoring.metrics import METRICS, OTHER, REGISTRY, SinkMetrics
from frazil.monitoring.metrics_observer import MetricsObserver
from frazil.monitoring.process_memory import memory
from frazil.monitoring.prometheus import metrics_page
from frazil.monitoring.setup import forget, monitoring_of
from frazil.offsets import BATCHES, Cut, Partition
from frazil.pipeline.chunk_result import KINDS
from frazil.spark import progress
from frazil.steps import COMMIT_FAILED, COMMIT_RETRIED, MAINTAINED, Step, WrittenFiles

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"
P0, P1 = Partition("orders", 0), Partition("orders", 1)


def config(sink: str = "s", **metrics: Any) -> Config:
    return Config(
        sink={"id": sink, "topics": ["orders"]},
        kafka={"bootstrap.servers": "127.0.0.1:1"},
        decode={"format": "json"},
        catalog={"type": "hadoop", "warehouse": "/nowhere"},
        tables=[{"name": "shop.orders"}],
        metrics={"lag_interval": "never", **metrics},
    )


class StubRun:
    """What the observer reads of a run."""

    def __init__(self, pending: int = 0) -> None:
        self.epoch = 7
        self.position = Cut({P0: 90})
        self.complete_until = None
        self.event_times: dict[Partition, int] = {}
        self.progress = SimpleNamespace(blocked="", stuck={})
        batch = SimpleNamespace(bytes=10, staged_at_ms=(time.time() - 100) * 1000)
        self.committer = SimpleNamespace(pending=[batch] * pending)

    def ends(self) -> Cut:
        return Cut({P0: 100, P1: 5})


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    REGISTRY._sinks.clear()


def page() -> dict[str, float]:
    """`name{label="value"}` → value, read by Prometheus's own parser."""
    status, kind, body = metrics_page()
    assert (status, kind[:10]) == (200, "text/plain")
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in values, "a series appears once"
            values[key] = sample.value
    return values


def a_batch(observer: MetricsObserver, number: int, together: int = 1) -> None:
    """The steps of a batch of 3 rows, 100 seconds old, one record rejected."""
    now = time.time()
    newest = int((now - 100) * 1_000_000)
    files = WrittenFiles(3, 1, 500, newest)
    spent = {"commit": 0.3}
    observer.step(Step("planned", number, now - 5))
    observer.step(
        Step(
            "written",
            number,
            now - 3,
            records=3,
            seconds={"fetch": 1.0, "decode": 2.0},
            skipped=2,
            invisible=4,
            open_files=6,
            rejected={"route": (1, "orders[0] offset 5: no rule")},
        )
    )
    observer.step(Step("staged", number, now - 2))
    observer.step(Step("commit", number, now - 2, table="shop.orders"))
    observer.step(
        Step(
            "committed",
            number,
            now - 1,
            seconds=spent,
            batches=together,
            tables={"shop.orders": files},
            table="shop.orders",
        )
    )
    observer.step(Step("tagged", number, now - 0.5, table="shop.orders"))
    observer.step(Step("index-committed", number, now, seconds=spent, table="shop.frazil_index"))
    observer.step(Step("index-tagged", number, now, table="shop.frazil_index"))
    observer.step(Step("done", number, now, batches=together, event_times={P0: newest}, table="x"))


def test_a_batch_becomes_counts_durations_and_freshness():
    observer = MetricsObserver(config())
    a_batch(observer, 0)
    a_batch(observer, 2, together=2)
    shown = page()
    assert shown['frazil_rows_total{sink="s",table="shop.orders"}'] == 6
    assert shown['frazil_bytes_total{sink="s",table="shop.orders"}'] == 1000
    assert shown['frazil_files_total{sink="s",table="shop.orders"}'] == 2
    assert shown['frazil_batches_total{sink="s"}'] == 3
    assert shown['frazil_batches_absorbed_total{sink="s",table="shop.orders"}'] == 1
    assert shown['frazil_records_written_total{sink="s"}'] == 6
    assert shown['frazil_records_rejected_total{kind="route",sink="s"}'] == 2
    assert shown['frazil_records_skipped_total{sink="s"}'] == 4
    assert shown['frazil_offsets_invisible_total{sink="s"}'] == 8
    assert shown['frazil_open_writers{sink="s"}'] == 6
    assert shown['frazil_task_seconds_total{part="decode",sink="s"}'] == 4
    assert shown['frazil_commits_total{result="committed",sink="s",table="shop.orders"}'] == 2
    assert 99 < shown['frazil_freshness_seconds{sink="s"}'] < 110
    assert (
        abs(
            shown['frazil_last_commit_timestamp_seconds{sink="s",table="shop.orders"}']
            + 1
            - time.time()
        )
        < 5
    )
    seconds = 'frazil_step_duration_seconds_sum{{sink="s",step="{}"}}'
    sums = {"write": 4, "stage": 2, "commit": 0.6, "tag": 1, "index-commit": 0.6, "batch": 10}
    assert {step: pytest.approx(shown[seconds.format(step)], abs=0.01) for step in sums} == sums
    bucket = 'frazil_step_duration_seconds_bucket{{le="{}",sink="s",step="batch"}}'
    assert [shown[bucket.format(le)] for le in ("2.5", "5.0", "10.0", "+Inf")] == [0, 2, 2, 2]


def test_failures_are_counted_by_what_they_are():
    observer = MetricsObserver(config())
    at, table = time.time(), "shop.orders"
    observer.step(Step(COMMIT_RETRIED, -1, at, table=table, error=Conflict("a")))
    observer.step(Step(COMMIT_RETRIED, -1, at, table=table, error=Unavailable("b")))
    observer.step(Step(COMMIT_FAILED, -1, at, table=table, error=Unavailable("c")))
    spent = {"expire-snapshots": 0.2}
    observer.step(Step(MAINTAINED, 1, at, seconds=spent, removed=4, table=table))
    observer.step(Step(MAINTAINED, 1, at, seconds=spent, table=table, error=FrazilError("d")))
    observer.ended(Fenced("e"))
    shown = page()
    retries = 'frazil_commit_retries_total{{error="{}",sink="s",table="shop.orders"}}'
    assert [shown[retries.format(error)] for error in ("Conflict", "Unavailable")] == [1, 1]
    assert shown['frazil_commit_conflicts_total{sink="s",table="shop.orders"}'] == 1
    failed = 'frazil_commit_failures_total{error="Unavailable",sink="s",table="shop.orders"}'
    assert shown[failed] == 1
    assert shown['frazil_commits_total{result="failed",sink="s",table="shop.orders"}'] == 1
    task = 'sink="s",task="expire-snapshots"'
    assert shown[f"frazil_maintenance_duration_seconds_count{{{task}}}"] == 2
    assert shown[f"frazil_maintenance_failures_total{{{task}}}"] == 1
    assert shown[f"frazil_maintenance_files_removed_total{{{task}}}"] == 4
    assert shown['frazil_fenced_total{sink="s"}'] == 1
    assert shown['frazil_errors_total{error="Fenced",sink="s"}'] == 1
    assert not any("secret" in key or "offset 5" in key for key in shown)


def test_a_run_is_up_until_its_end_and_forgotten_later(monkeypatch: pytest.MonkeyPatch):
    first, second = MetricsObserver(config("a")), MetricsObserver(config("b"))
    for observer in (first, second):
        observer.started(StubRun(pending=2))  # type: ignore[arg-type]
    shown = page()
    assert [shown[f'frazil_up{{sink="{sink}"}}'] for sink in "ab"] == [1, 1]
    assert shown['frazil_epoch{sink="a"}'] == 7
    assert shown['frazil_pending_batches{sink="a"}'] == 2
    assert shown['frazil_pending_bytes{sink="a"}'] == 20
    assert 100 <= shown['frazil_pending_age_seconds{sink="a"}'] < 110
    a_batch(first, 1)
    first.ended(None)
    shown = page()
    assert [shown[f'frazil_up{{sink="{sink}"}}'] for sink in "ab"] == [0, 1]
    assert shown['frazil_rows_total{sink="a",table="shop.orders"}'] == 3, "it keeps its values"
    monkeypatch.setattr(names, "SHOWN_AFTER_STOP", -1)
    assert not any('sink="a"' in key for key in page())
    assert MetricsObserver(config("a")) is not None  # another run of the sink begins at 0
    assert 'frazil_rows_total{sink="a",table="shop.orders"}' not in page()
    second.ended(None)


def test_nothing_pending_has_no_age():
    observer = MetricsObserver(config())
    observer.started(StubRun())  # type: ignore[arg-type]
    assert page()['frazil_pending_age_seconds{sink="s"}'] == 0
    observer.ended(None)


def test_an_event_of_the_far_future_does_not_count_as_fresh():
    observer = MetricsObserver(config())
    for age in (100, -90_000):  # the second comes from a clock that is a day ahead
        newest = int((time.time() - age) * 1_000_000)
        files = {"t": WrittenFiles(1, 1, 1, newest)}
        observer.step(Step("committed", 0, time.time(), tables=files, table="t"))
    assert page()['frazil_freshness_seconds{sink="s"}'] > 99


def test_labels_beyond_the_bound_become_one():
    values = SinkMetrics("s", most=3)
    for number in range(100):
        values.add(names.ROWS, 1, f"t{number}")
        values.set(names.LAST_COMMIT, 1000 - number, f"t{number}")
        values.set(names.LAG_SECONDS, number, f"topic{number}")
    shown = values.samples(0.0)
    assert shown[names.ROWS] == {
        **{("s", f"t{number}"): 1 for number in range(3)},
        ("s", OTHER): 97,
    }
    assert shown[names.LAST_COMMIT]["s", OTHER] == 901, "the oldest"
    assert shown[names.LAG_SECONDS]["s", OTHER] == 99, "the longest"
    values.add(names.ROWS, 1, "t1")
    assert values.samples(0.0)[names.ROWS]["s", "t1"] == 2, "labels stay what they were"


def test_the_same_labels_are_the_others_in_every_metric():
    """A table that one metric names is named by all: else their series cannot be joined."""
    values = SinkMetrics("s", most=2)
    values.add(names.COMMITS, 1, "b", "committed")
    values.set(names.LAST_COMMIT, 9, "c")
    for table in ("a", "b", "c", "d"):
        values.add(names.ROWS, 1, table)
    values.put(names.AUDIT_VERDICT, {(table, "proven"): 1.0 for table in ("d", "c", "b")})
    shown = values.samples(0.0)
    assert shown[names.ROWS] == {("s", "b"): 1, ("s", "c"): 1, ("s", OTHER): 2}
    assert set(shown[names.AUDIT_VERDICT]) == {("s", t, "proven") for t in ("b", "c", OTHER)}
    values.put(names.AUDIT_VERDICT, {("a", "proven"): 1.0})
    assert set(values.samples(0.0)[names.AUDIT_VERDICT]) == {("s", OTHER, "proven")}


def test_hostile_names_make_a_page_that_can_be_parsed():
    values = REGISTRY.open("s")
    for name in ('a"b', "a\\b", "a\nb", "a}b", "ä,=b"):
        values.add(names.ROWS, 1, name)
    assert sum(key.startswith("frazil_rows_total") for key in page()) == 5


def test_a_scrape_beside_a_busy_stream_is_whole():
    """Sums only grow, and a histogram's count is the sum of its buckets at each moment."""
    observer = MetricsObserver(config())
    stop = threading.Event()
    failures: list[BaseException] = []

    def stream() -> None:
        number = 0
        try:
            while not stop.is_set():
                a_batch(observer, number := number + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    last = 0.0
    for _ in range(50):
        shown = page()
        rows = shown.get('frazil_rows_total{sink="s",table="shop.orders"}', 0)
        assert rows >= last
        last = rows
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert last > 0


def test_lag_is_in_offsets_and_seconds():
    tracker = LagTracker()
    lag = tracker.lag({P0: 100, BATCHES: 3}, {P0: 100}, {}, 1000.0)
    assert {p: (one.records, one.seconds) for p, one in lag.items()} == {P0: (0, 0.0)}
    for now, end in ((1010.0, 150), (1020.0, 200), (1030.0, 200)):
        lag = tracker.lag({P0: end}, {P0: 100}, {}, now)
    assert (lag[P0].records, lag[P0].seconds) == (100, 20.0), "since an end beyond it was seen"
    lag = tracker.lag({P0: 200}, {P0: 150}, {}, 1040.0)
    assert (lag[P0].records, lag[P0].seconds) == (50, 20.0)
    lag = tracker.lag({P0: 200}, {P0: 200}, {}, 1050.0)
    assert (lag[P0].records, lag[P0].seconds) == (0, 0.0)
    lag = tracker.lag({P0: 10}, {P0: 0}, {}, 1060.0)
    assert (lag[P0].records, lag[P0].seconds) == (10, 0.0), "a topic that was made again"


def test_a_backlog_from_before_the_start_is_as_old_as_the_newest_committed_event():
    lag = LagTracker().lag({P0: 100}, {P0: 50}, {P0: 400 * 1_000_000}, 1000.0)
    assert (lag[P0].records, lag[P0].seconds) == (50, 600.0)


def test_a_restart_shows_the_age_of_its_backlog_at_once():
    """The index knows the newest committed event of each partition; before any batch of its own a
    run has nothing else."""
    began = int(time.time()) - 86_400
    rules = CompletenessRules()
    high = datetime.fromtimestamp(began, timezone.utc)
    row = dict.fromkeys(COLUMNS)
    row |= {"table_name": "shop.orders", "topic": "orders", "partition": 0}
    row |= {"event_time_low": high, "event_time_high": high, "committed_at": high}
    row |= {"started_at": high}
    schema = pa.schema([index.COLUMNS.field(name) for name in COLUMNS])
    marks, until = recalled(pa.Table.from_pylist([row], schema=schema), rules)
    run = StubRun()
    run.position = Cut({P0: 100})
    run.ends = lambda: Cut({P0: 5_000_100})  # type: ignore[method-assign]
    run.event_times = CompletenessTracker(rules, marks=marks, until=until).event_times
    observer = MetricsObserver(config(lag_interval="1s"))
    observer.started(run)  # type: ignore[arg-type]
    deadline = time.monotonic() + 10
    while not (age := page().get('frazil_lag_seconds{sink="s",topic="orders"}')):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    observer.ended(None)
    assert 86_390 < age < 86_500


def test_a_long_lag_is_remembered_in_little():
    tracker = LagTracker()
    for second in range(100_000):
        lag = tracker.lag({P0: second + 1}, {P0: 1}, {}, float(second))
    assert len(tracker._ends[P0]) <= 66
    assert lag[P0].seconds > 99_000


def test_lag_by_partition_is_left_out_where_there_are_many():
    for most, shown in ((2, True), (1, False)):
        values = SinkMetrics("s", most)
        run = StubRun()
        probe = probes.Probes(
            config(max_labels=most),
            values,
            ends=run.ends,
            position=lambda: run.position,  # noqa: B023
            event_times={},
        )
        probe.ask_lag()
        samples = values.samples(time.time())
        assert samples[names.LAG] == {("s", "orders"): 15}
        assert bool(samples[names.PARTITION_LAG]) is shown
        probe.stop()


def test_a_probe_that_fails_is_counted_and_asks_again():
    failed, asked = [], threading.Event()

    def ask() -> None:
        if len(failed) > 1:
            asked.set()
        raise Unavailable("cannot ask Kafka: it is away")

    probe = probes.Probe("test", 0.01, ask, failed.append).start()
    assert asked.wait(10)
    probe.stop()
    assert set(failed) == {"Unavailable"}


def test_a_probe_that_waited_asks_again_as_soon_as_ever():
    asked = []

    def ask() -> None:
        asked.append(time.monotonic())
        probe.wait(0.3)

    probe = probes.Probe("test", 0.01, ask, lambda _: None).start()
    deadline = time.monotonic() + 10
    while len(asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    probe.stop()
    assert asked[2] - asked[1] < 2.0, "ten times what was asked, not what was waited"


def test_an_audit_that_cannot_be_made_is_not_a_proof(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> Any:
        raise ConfigError("cannot open a catalog of type nessie without Spark")

    monkeypatch.setattr(probes, "of_sink", refuse)
    values = SinkMetrics("s")
    run = StubRun()
    given = config(audit_interval="1h")
    probe = probes.Probes(
        given, values, ends=run.ends, position=lambda: run.position, event_times={}
    )
    end = time.monotonic() + 30
    while names.AUDIT_FAILURES not in values.samples(0.0):
        assert time.monotonic() < end
        time.sleep(0.01)
    probe.stop()
    shown = values.samples(0.0)
    assert shown[names.AUDIT_PROVEN] == {("s",): 0}
    assert shown[names.AUDIT_FAILURES] == {("s", "ConfigError"): 1}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux")
def test_memory_of_children_is_that_of_workers():
    child = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(50_000_000); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        sums = memory()
    finally:
        child.communicate(b"\n")
    assert sums["workers"][0] > 50_000_000
    assert sums["workers"][1] >= 1
    assert sums["driver"][1] == 1
    assert sums["driver"][0] > 10_000_000


def test_a_jvm_is_distinguished_from_workers_by_its_name(tmp_path: Path):
    for pid, name, parent in (
        (10, "python", 1),
        (11, "java", 10),
        (12, "python (x) y", 11),
        (13, "python3", 12),
        (99, "java", 1),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 0 0")
        (tmp_path / str(pid) / "statm").write_text("9 5 1 1 0 1 0")
    page = os.sysconf("SC_PAGE_SIZE")
    sums = {"driver": (5 * page, 1), "jvm": (5 * page, 1), "workers": (10 * page, 2)}
    assert memory(tmp_path, driver=10) == sums


def test_names_follow_the_conventions_of_prometheus():
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40
    for metric in METRICS:
        assert re.fullmatch(r"frazil(_[a-z]+)+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|count)(_|$)", metric.name)


def test_counts_that_spark_does_not_take_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any) -> None:
        raise FrazilError("cannot report the rows of a batch to Spark: another Spark")

    monkeypatch.setattr(progress, "set_input_rows", refuse)
    spark: Any = None
    with caplog.at_level("DEBUG", "frazil"):
        for query in ("frazil-a-1", "frazil-a-1", "frazil-b-1"):
            progress.report_records(spark, query, {P0: 5})
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "WARNING"]
    assert "another Spark" in caplog.text


def test_every_metric_is_in_the_reference_and_no_other():
    rows = re.findall(
        r"^\| `(frazil_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", REFERENCE.read_text(), re.M
    )
    documented = {
        name: (kind, re.findall(r"\w+", labels), help) for name, kind, labels, help in rows
    }
    code = {m.name: (m.kind, [*m.label_names], m.help) for m in METRICS}
    assert documented == code
    labels = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]* \|$", REFERENCE.read_text(), re.M)
    explained = {word for row in labels for word in re.findall(r"\w+", row)}
    assert {label for metric in METRICS for label in metric.label_names} <= explained


def test_metrics_are_observed_only_if_they_are_read():
    def kinds(**metrics: Any) -> list[str]:
        monitoring = monitoring_of(config(**metrics))
        monitoring.ended(None)
        return [type(observer).__name__ for observer in monitoring._observers]

    assert kinds() == ["SinkHealth", "LogObserver", "HealthObserver"]
    assert kinds(address="0") == ["SinkHealth", "MetricsObserver", "LogObserver", "HealthObserver"]


def test_the_verdict_is_a_metric_until_a_failed_sink_is_removed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(names, "SHOWN_AFTER_STOP", -1)
    monitoring = monitoring_of(config(address="0"))
    assert page()['frazil_sink_state{sink="s",state="starting"}'] == 1
    monitoring.ended(Gap("cannot go on: a range is missing"))
    shown = page()
    states = {key: value for key, value in shown.items() if key.startswith("frazil_sink_state")}
    assert [key for key, value in states.items() if value] == [
        'frazil_sink_state{sink="s",state="failed"}'
    ]
    assert len(states) == len(STATES)
    assert shown['frazil_operator_needed{sink="s"}'] == 1
    assert shown['frazil_errors_total{error="Gap",sink="s"}'] == 1
    forget("s")
    assert not any('sink="s"' in key for key in page())


def test_every_kind_of_rejected_records_has_a_series_from_the_start():
    observer = MetricsObserver(config())
    shown = page()
    guide = (REFERENCE.parents[1] / "guide" / "dead-letters.md").read_text()
    table = guide.partition("| kind | |")[2].partition("\n\n")[0]
    kinds = {
        kind
        for row in re.findall(r"^\| (`.*?) \|", table, re.M)
        for kind in re.findall(r"\w+", row)
    }
    assert kinds == set(KINDS)
    assert all(
        shown[f'frazil_records_rejected_total{{kind="{kind}",sink="s"}}'] == 0 for kind in kinds
    )
    observer.ended(None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("address", "nowhere"),
        ("lag_interval", "10"),
        ("lag_interval", "100ms"),
        ("audit_interval", "sometimes"),
        ("max_labels", 0),
        ("otlp_endpoint", "127.0.0.1:4318"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(key: str, value: object):
    with pytest.raises(ConfigError, match=rf"\[metrics\] {key}: expected .*found"):
        config(**{key: value})


# ── OpenTelemetry ────────────────────────────────────────────────────────────────────────────────


class Collector(ThreadingHTTPServer):
    """Receives OTLP over HTTP, and reads it with OpenTelemetry's own protobuf classes."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], ExportMetricsServiceRequest]] = []
        super().__init__(("127.0.0.1", 0), CollectorRequest)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def points(self) -> dict[str, Any]:
        """`name{label="value"}` → value, or (count, sum, buckets), of the last request."""
        points: dict[str, Any] = {}
        _, _, message = self.requests[-1]
        for scope in message.resource_metrics[0].scope_metrics:
            for metric in scope.metrics:
                data = getattr(metric, metric.WhichOneof("data"))
                for point in data.data_points:
                    labels = sorted((a.key, a.value.string_value) for a in point.attributes)
                    text = ",".join(f'{key}="{value}"' for key, value in labels)
                    value: Any = getattr(point, "as_double", None) or getattr(point, "as_int", 0)
                    if metric.WhichOneof("data") == "histogram":
                        value = point.count, point.sum, tuple(point.explicit_bounds)
                    points[f"{metric.name}{{{text}}}"] = value
        return points


class CollectorRequest(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportMetricsServiceRequest.FromString(body)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, message))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_a_collector_receives_what_prometheus_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with Collector() as collector:
        first = MetricsObserver(config("a", otlp_endpoint=collector.url))
        second = MetricsObserver(config("b", otlp_endpoint=f"{collector.url}"))
        assert first._export is second._export, "one export for an endpoint"
        for observer in (first, second):
            observer.started(StubRun(pending=1))  # type: ignore[arg-type]
            a_batch(observer, 1)
        shown = {key: value for key, value in page().items() if key.startswith("frazil_")}
        first.ended(None)
        second.ended(None)  # the last export
        path, headers, message = collector.requests[-1]
        points = collector.points()
    assert (path, headers["x-tenant"], headers["content-encoding"]) == ("/v1/metrics", "a", "gzip")
    resource = {
        a.key: a.value.string_value for a in message.resource_metrics[0].resource.attributes
    }
    assert resource["service.name"] == "frazil"
    assert resource["deployment.environment"] == "test"
    moving = ("frazil_up", "frazil_memory", "frazil_processes", "frazil_build", "frazil_step")
    expected = {
        key: value
        for key, value in shown.items()
        if not key.startswith(moving) and "_seconds{" not in key
    }
    assert len(expected) > 30
    assert {key: points.get(key) for key in expected} == expected
    count, total, bounds = points['frazil_step_duration_seconds{sink="a",step="write"}']
    assert (count, bounds) == (1, names.Distribution.BOUNDS)
    assert total == pytest.approx(2, abs=0.01)
    assert points['frazil_up{sink="a"}'] == 0


def test_opentelemetrys_variables_say_where_to(monkeypatch: pytest.MonkeyPatch):
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "orders")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        observer = MetricsObserver(config(otlp_endpoint="env"))
        end = time.monotonic() + 20
        while not collector.requests:
            assert time.monotonic() < end
            time.sleep(0.01)
        observer.ended(None)
        attributes = collector.requests[0][2].resource_metrics[0].resource.attributes
    assert {a.key: a.value.string_value for a in attributes}["service.name"] == "orders"


def test_a_collector_that_is_away_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("frazil.monitoring.otlp._LAST_EXPORT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        observer = MetricsObserver(config(otlp_endpoint=where))
        a_batch(observer, 1)
        began = time.monotonic()
        observer.ended(None)
        assert time.monotonic() - began < 10


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "frazil.monitoring.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(ConfigError, match=r"cannot send metrics to http://h:1: a package") as e:
        MetricsObserver(config(otlp_endpoint="http://h:1"))
    assert e.value.hint == "pip install 'frazil[otel]'"
