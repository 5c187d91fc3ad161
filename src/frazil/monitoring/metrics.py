"""All metrics of Frazil, and their values: what Prometheus and OpenTelemetry get.

In: observations of observers and probes, by sink. Out: samples, in memory. Promised: names, help
texts and labels stand here once; kinds and errors are enumerations, and tables, topics and
partitions beyond a bound are one label, `other`; a sink that was stopped keeps its last values for
a while, one that failed until it is removed or runs again, with `frazil_up` 0. A lock is held only
while numbers are copied, so that a scrape never waits for the stream, or the stream for a scrape.
Runs on the driver, on any thread.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Seconds for which a sink that was stopped is shown.
SHOWN_AFTER_STOP = 900.0
#: Stands for the labels beyond the bound.
OTHER = "other"
#: Labels whose values come from users or data: only so many of them are shown.
BOUNDED = ("table", "topic", "partition", "kind")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: str  # counter, gauge, histogram
    help: str
    #: beside `sink`; none with `process`
    labels: tuple[str, ...] = ()
    #: how the values beyond the bound of labels become one
    combine: Callable[[Iterable[float]], float] = sum
    #: the stored value is a time, and its age is shown
    age: bool = False
    #: of this process, without a sink
    process: bool = False

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.labels if self.process else ("sink", *self.labels)


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"frazil_{name}_total", "counter", help, labels)


def _gauge(
    name: str,
    help: str,
    *labels: str,
    combine: Callable[[Iterable[float]], float] = sum,
    age: bool = False,
) -> Metric:
    return Metric(f"frazil_{name}", "gauge", help, labels, combine, age)


def _histogram(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"frazil_{name}", "histogram", help, labels)


UP = _gauge("up", "1 while the sink runs, 0 after its end.")
START_TIME = _gauge("start_time_seconds", "When the sink was started, in seconds since 1970.")
EPOCH = _gauge("epoch", "Epoch of the run.")
STATE = _gauge("sink_state", "1 for the state of the sink's verdict, 0 for the others.", "state")
OPERATOR = _gauge("operator_needed", "1 while the sink waits for an operator.")
INFO = _gauge("sink_info", "Always 1; catalog and index of the sink.", "catalog", "index")

ROWS = _counter("rows", "Rows in committed data files.", "table")
BYTES = _counter("bytes", "Bytes of committed data and delete files.", "table")
FILES = _counter("files", "Committed data and delete files.", "table")
BATCHES = _counter("batches", "Batches that are in all their tables and in the index.")
WRITTEN = _counter("records_written", "Rows written to files, committed or not; no dead letters.")
REJECTED = _counter("records_rejected", "Records rejected, by kind: dead letters.", "kind")
SKIPPED = _counter("records_skipped", "Records that a rule or a filter left out.")
INVISIBLE = _counter("offsets_invisible", "Offsets that held no record.")
STEP_DURATION = _histogram("step_duration_seconds", "Wall time of the steps of a batch.", "step")
TASK_SECONDS = _counter("task_seconds", "Seconds of tasks on executors, by part.", "part")
OPEN_WRITERS = _gauge("open_writers", "Most files that a task of the last batch had open at once.")

COMMITS = _counter("commits", "Commits to tables and index.", "table", "result")
COMMIT_FAILURES = _counter("commit_failures", "Failed commits, by error.", "table", "error")
COMMIT_RETRIES = _counter(
    "commit_retries", "Attempts of commits that were repeated at once, by error.", "table", "error"
)
CONFLICTS = _counter("commit_conflicts", "Attempts that lost to another writer.", "table")
ABSORBED = _counter("batches_absorbed", "Batches that shared the commit of another.", "table")
FENCED = _counter("fenced", "Runs that ended because a newer epoch took over.")
ERRORS = _counter("errors", "Errors of commits, probes and maintenance; the end's, too.", "error")
LAST_COMMIT = _gauge(
    "last_commit_timestamp_seconds", "When a table was last committed to.", "table", combine=min
)

PENDING_BATCHES = _gauge("pending_batches", "Staged batches that wait for a commit.")
PENDING_BYTES = _gauge("pending_bytes", "Bytes of their files.")
PENDING_AGE = _gauge("pending_age_seconds", "Age of the oldest of them; 0 without any.", age=True)
BLOCKED = _gauge("blocked", "1 while the stream waits: at a bound, or for a server.")
STUCK_TABLES = _gauge("stuck_tables", "Tables that cannot be committed to at present.")

LAG = _gauge("lag_records", "Offsets in Kafka that are not committed.", "topic")
PARTITION_LAG = _gauge(
    "partition_lag_records", "The same by partition, if there are few.", "topic", "partition"
)
LAG_SECONDS = _gauge(
    "lag_seconds", "Age of the oldest offset that is not committed.", "topic", combine=max
)
LAG_CHECKED = _gauge("lag_age_seconds", "Time since Kafka was last asked for the lag.", age=True)
NEWEST_EVENT = _gauge(
    "newest_event_timestamp_seconds", "Newest committed event time.", "table", combine=min
)
FRESHNESS = _gauge("freshness_seconds", "Age of the newest committed event of all.", age=True)
COMPLETE_UNTIL = _gauge(
    "complete_until_timestamp_seconds", "Until when the stream is complete; absent if unknown."
)

MAINTENANCE_DURATION = _histogram(
    "maintenance_duration_seconds", "Rounds of maintenance that did something, or failed.", "task"
)
MAINTENANCE_FAILURES = _counter("maintenance_failures", "Failed rounds of maintenance.", "task")
FILES_REMOVED = _counter("maintenance_files_removed", "Files that maintenance removed.", "task")

AUDIT_PROVEN = _gauge("audit_proven", "1 if the last audit proved every offset, else 0.")
AUDIT_VERDICT = _gauge(
    "audit_verdict",
    "1 for the verdict on a table in the last audit.",
    "table",
    "verdict",
    combine=max,
)
AUDIT_AGE = _gauge("audit_age_seconds", "Time since the last audit ended.", age=True)
AUDIT_DURATION = _gauge("audit_duration_seconds", "Duration of the last audit.")
AUDIT_FAILURES = _counter("audit_failures", "Audits that could not be made, by error.", "error")

MEMORY = Metric(
    "frazil_memory_bytes",
    "gauge",
    "Resident memory on this machine: driver, jvm, workers (Python processes of Spark).",
    ("process",),
    process=True,
)
PROCESSES = Metric(
    "frazil_processes", "gauge", "Processes on this machine, as above.", ("process",), process=True
)

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
ALWAYS = (
    BATCHES,
    WRITTEN,
    SKIPPED,
    INVISIBLE,
    FENCED,
    PENDING_BATCHES,
    PENDING_BYTES,
    BLOCKED,
    STUCK_TABLES,
)  # shown as 0 before anything happened

Labels = tuple[str, ...]
#: Called with each observation of a histogram, and its labels.
Listener = Callable[[Metric, float, Labels], None]


@dataclass(slots=True)
class Distribution:
    """A histogram: observations by bucket (the last one is above all bounds), and their sum."""

    counts: list[int]
    sum: float = 0.0

    BOUNDS = _SECONDS

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.BOUNDS, value)] += 1
        self.sum += value


class SinkMetrics:
    """The values of one run of a sink; of the process, if it has no name."""

    def __init__(self, sink: str = "", most: int = 100, listeners: Sequence[Listener] = ()) -> None:
        """`most`: labels of each bounded kind that are shown."""
        self.sink = sink
        self.stopped_at: float | None = None
        self._most = most
        self._listeners = listeners
        self._lock = threading.Lock()
        #: name of a label → values that are shown, the same for all metrics: those seen first
        self._slots: dict[str, set[str]] = {name: set() for name in BOUNDED}
        self._values: dict[Metric, dict[Labels, float]] = {m: {(): 0.0} for m in ALWAYS if sink}
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {}

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        with self._lock:
            self._take_slots(metric, labels)
            values = self._values.setdefault(metric, {})
            values[labels] = values.get(labels, 0.0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        with self._lock:
            self._take_slots(metric, labels)
            self._values.setdefault(metric, {})[labels] = value

    def highest(self, metric: Metric, value: float, *labels: str) -> None:
        with self._lock:
            self._take_slots(metric, labels)
            values = self._values.setdefault(metric, {})
            values[labels] = max(value, values.get(labels, value))

    def put(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """In place of all values that the metric had."""
        with self._lock:
            for labels in values:
                self._take_slots(metric, labels)
            self._values[metric] = dict(values)

    def _take_slots(self, metric: Metric, labels: Labels) -> None:
        """Of more values than are shown, the first ones keep their names."""
        for name, text in zip(metric.labels, labels, strict=True):
            if name in self._slots and len(self._slots[name]) < self._most:
                self._slots[name].add(text)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        with self._lock:
            of_metric = self._distributions.setdefault(metric, {})
            if labels not in of_metric:
                of_metric[labels] = Distribution([0] * (len(_SECONDS) + 1))
            of_metric[labels].observe(value)
        for listener in self._listeners:
            listener(metric, value, (self.sink, *labels))

    def samples(self, now: float) -> dict[Metric, dict[Labels, float]]:
        """Counters and gauges, with bounded labels and the sink's own."""
        with self._lock:
            copies = {metric: dict(values) for metric, values in self._values.items()}
        return {metric: self._shown(metric, values, now) for metric, values in copies.items()}

    def values(self, metric: Metric, now: float) -> dict[Labels, float]:
        """Those of one counter or gauge."""
        with self._lock:
            values = dict(self._values.get(metric, {}))
        return self._shown(metric, values, now)

    def distributions(self) -> dict[Metric, dict[Labels, Distribution]]:
        with self._lock:
            return {
                metric: {
                    (self.sink, *labels): Distribution(list(one.counts), one.sum)
                    for labels, one in values.items()
                }
                for metric, values in self._distributions.items()
            }

    def _shown(
        self, metric: Metric, values: Mapping[Labels, float], now: float
    ) -> dict[Labels, float]:
        own = () if metric.process else (self.sink,)
        groups: dict[Labels, list[float]] = {}
        slots = [self._slots.get(name) for name in metric.labels]
        for labels, value in values.items():
            texts = (
                text if known is None or text in known else OTHER
                for text, known in zip(labels, slots, strict=True)
            )
            groups.setdefault((*own, *texts), []).append(value)
        combined = {labels: metric.combine(some) for labels, some in groups.items()}
        if metric.age:
            return {labels: max(0.0, now - value) for labels, value in combined.items()}
        return combined


class MetricRegistry:
    """The sinks of this process, and the process itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: dict[str, SinkMetrics] = {}
        self.process = SinkMetrics()
        self.listeners: list[Listener] = []

    def open(self, sink: str, most: int = 100) -> SinkMetrics:
        """For a new run; the values of the run before are forgotten, as after a restart."""
        metrics = SinkMetrics(sink, most, self.listeners)
        with self._lock:
            self._sinks[sink] = metrics
        return metrics

    def remove(self, sink: str) -> None:
        with self._lock:
            self._sinks.pop(sink, None)

    def all(self) -> list[SinkMetrics]:
        """The process, the sinks that run or failed, and those that were stopped lately."""
        now = time.monotonic()
        with self._lock:
            for sink, metrics in list(self._sinks.items()):
                if metrics.stopped_at is not None and now - metrics.stopped_at > SHOWN_AFTER_STOP:
                    del self._sinks[sink]
            return [self.process, *self._sinks.values()]

    def samples(self) -> Iterator[tuple[Metric, dict[Labels, float]]]:
        """Every counter and gauge that has values, of all sinks together."""
        now = time.time()
        merged: dict[Metric, dict[Labels, float]] = {}
        for metrics in self.all():
            for metric, values in metrics.samples(now).items():
                merged.setdefault(metric, {}).update(values)
        return iter(merged.items())

    def values(self, metric: Metric) -> dict[Labels, float]:
        """Those of one counter or gauge, of all sinks together."""
        now = time.time()
        return {k: v for metrics in self.all() for k, v in metrics.values(metric, now).items()}

    def distributions(self) -> dict[Metric, dict[Labels, Distribution]]:
        merged: dict[Metric, dict[Labels, Distribution]] = {}
        for metrics in self.all():
            for metric, values in metrics.distributions().items():
                merged.setdefault(metric, {}).update(values)
        return merged


#: Of this process.
REGISTRY = MetricRegistry()
