"""The observer that feeds metrics, and serves them while its sink runs.

In: steps and ticks of a run. Out: values of `monitoring.metrics`. A step costs some microseconds.
Runs on the driver: see `monitoring.observer` for the threads.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError, Conflict, Fenced, FrazilError
from frazil.monitoring import metrics as names
from frazil.monitoring.health_state import STATES
from frazil.monitoring.http import MonitoringServer
from frazil.monitoring.metrics import REGISTRY, Labels, Metric
from frazil.monitoring.probes import Probes
from frazil.monitoring.prometheus import metrics_page
from frazil.monitoring.sink_health import SinkHealth
from frazil.offsets import Partition
from frazil.pipeline.chunk_result import KINDS
from frazil.run import Run
from frazil.steps import COMMIT_FAILED, COMMIT_RETRIED, MAINTAINED, Step

#: Seconds between two looks at what a run holds.
_TICK_SECONDS = 1.0
#: step → the step of the same batch that begins it, and its name in metrics
_BEGINS = {"written": ("planned", "write"), "staged": ("written", "stage")}


if TYPE_CHECKING:
    from frazil.monitoring.otlp import OtlpExport


def exported(endpoint: str) -> OtlpExport | None:
    """The export to an OpenTelemetry collector; None without an endpoint."""
    if not endpoint:
        return None
    try:
        from frazil.monitoring.otlp import OtlpExport
    except ImportError as error:
        raise ConfigError(
            f"cannot send metrics to {endpoint}: a package is missing: {error}",
            hint="pip install 'frazil[otel]'",
            path=("metrics", "otlp_endpoint"),
        ) from None
    return OtlpExport.open(endpoint, REGISTRY)


class MetricsObserver:
    def __init__(self, config: Config, health: SinkHealth | None = None) -> None:
        """`health`: its verdict is shown. Raises ConfigError if `[metrics] address` cannot be
        bound, or a package is missing."""
        self._config = config
        self._health = health
        self._ahead = duration(config.completeness.max_future)
        self._server: MonitoringServer | None = None
        self._export: OtlpExport | None = None
        if config.metrics.address:
            routes = {"/metrics": metrics_page}
            self._server = MonitoringServer.open(config.metrics.address, routes)
        try:
            self._export = exported(config.metrics.otlp_endpoint)
        except ConfigError:
            self._close()
            raise
        self._values = REGISTRY.open(config.sink.id, config.metrics.max_labels)
        self._values.set(names.UP, 0)
        self._values.set(names.INFO, 1, config.catalog.name, config.index_table)
        self._show_verdict()
        for kind in KINDS:  # a rate of a series that appears with its first value misses that
            self._values.add(names.REJECTED, 0, kind)
        #: newest committed event by partition, in microseconds
        self._event_times: dict[Partition, int] = {}
        #: batch → step → when it came
        self._moments: dict[int, dict[str, float]] = {}
        self._lock = threading.Lock()
        self._probes: Probes | None = None
        self._looked_at = 0.0

    @property
    def url(self) -> str:
        return f"{self._server.url}/metrics" if self._server else ""

    def started(self, run: Run) -> None:
        self._values.set(names.UP, 1)
        self._values.set(names.START_TIME, time.time())
        self._values.set(names.EPOCH, run.epoch)
        for partition, newest in run.event_times.items():  # else a backlog looks new
            self._saw_event(partition, newest)
        self._probes = Probes(
            self._config,
            self._values,
            ends=run.ends,
            position=lambda: run.position,
            event_times=self._event_times,
        )
        self.tick(run)

    def tick(self, run: Run) -> None:
        if time.monotonic() - self._looked_at < _TICK_SECONDS:
            return
        self._looked_at = time.monotonic()
        values, progress = self._values, run.progress
        self._show_verdict()
        pending = run.committer.pending
        values.set(names.PENDING_BATCHES, len(pending))
        values.set(names.PENDING_BYTES, sum(batch.bytes for batch in pending))
        values.set(names.PENDING_AGE, pending[0].staged_at_ms / 1000 if pending else math.inf)
        values.set(names.BLOCKED, bool(progress.blocked))
        values.set(names.STUCK_TABLES, len(progress.stuck))
        if (until := run.complete_until) is not None:
            values.set(names.COMPLETE_UNTIL, until.timestamp())

    def ended(self, error: FrazilError | None) -> None:
        if self._probes is not None:
            self._probes.stop()
        values = self._values
        values.set(names.UP, 0)
        if error is not None:
            values.add(names.ERRORS, 1, type(error).__name__)
            values.add(names.FENCED, isinstance(error, Fenced))
        else:
            values.stopped_at = time.monotonic()
        self._show_verdict()
        self._close()

    def _show_verdict(self) -> None:
        if self._health is None:
            return
        verdict = self._health.verdict()
        states: dict[Labels, float] = {(state,): float(state == verdict.state) for state in STATES}
        self._values.put(names.STATE, states)
        self._values.set(names.OPERATOR, verdict.operator)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._export is not None:
            self._export.close()

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def step(self, step: Step) -> None:
        name = step.name
        if name in (COMMIT_FAILED, COMMIT_RETRIED):
            self._failed(step)
        elif name == MAINTAINED:
            self._maintained(step)
        elif name.endswith("committed") or name.endswith("tagged"):
            self._committed(step)
        elif name in ("planned", "written", "staged", "done"):
            self._batch(step)

    def _batch(self, step: Step) -> None:
        with self._lock:
            moments = self._moments.setdefault(step.batch, {})
            moments[step.name] = step.at
            if step.name == "done":
                done = [self._moments.pop(n) for n in sorted(self._moments) if n <= step.batch]
        if step.name in _BEGINS:
            first, shown = _BEGINS[step.name]
            self._timed(shown, moments.get(first), step.at)
        if step.name == "written":
            self._written(step)
        elif step.name == "done":
            for moments in done:
                self._timed("batch", moments.get("planned"), step.at)
            self._values.add(names.BATCHES, step.batches)
            for partition, newest in step.event_times.items():
                self._saw_event(partition, newest)

    def _saw_event(self, partition: Partition, newest: int) -> None:
        if self._plausible(newest):
            self._event_times[partition] = max(self._event_times.get(partition, 0), newest)

    def _written(self, step: Step) -> None:
        values = self._values
        values.add(names.WRITTEN, step.records)
        values.add(names.SKIPPED, step.skipped)
        values.add(names.INVISIBLE, step.invisible)
        values.set(names.OPEN_WRITERS, step.open_files)
        for kind, (count, _) in step.rejected.items():
            values.add(names.REJECTED, count, kind)
        for part, seconds in (step.seconds or {}).items():
            values.add(names.TASK_SECONDS, seconds, part)

    def _committed(self, step: Step) -> None:
        index = "index-" if step.name.startswith("index-") else ""
        with self._lock:
            moments = self._moments.setdefault(-1, {})
            key = f"{step.table} {index}committed"
            before = moments.pop(key, None)
            if step.name.endswith("committed"):
                moments[key] = step.at
        if step.name.endswith("tagged"):
            self._timed(f"{index}tag", before, step.at)
            return
        values, table = self._values, step.table
        values.observe(
            names.STEP_DURATION, (step.seconds or {}).get("commit", 0.0), f"{index}commit"
        )
        values.add(names.COMMITS, 1, table, "committed")
        values.set(names.LAST_COMMIT, step.at, table)
        if step.batches > 1:
            values.add(names.ABSORBED, step.batches - 1, table)
        for name, files in step.tables.items():
            self._add(names.ROWS, files.rows, name)
            self._add(names.FILES, files.files, name)
            self._add(names.BYTES, files.bytes, name)
            if files.newest and self._plausible(files.newest):
                values.highest(names.NEWEST_EVENT, files.newest / 1_000_000, name)
                values.highest(names.FRESHNESS, files.newest / 1_000_000)

    def _failed(self, step: Step) -> None:
        error = type(step.error).__name__
        values, table = self._values, step.table
        if step.name == COMMIT_FAILED:
            values.add(names.COMMITS, 1, table, "failed")
            values.add(names.COMMIT_FAILURES, 1, table, error)
            values.add(names.ERRORS, 1, error)
            return
        values.add(names.COMMIT_RETRIES, 1, table, error)
        if isinstance(step.error, Conflict):
            values.add(names.CONFLICTS, 1, table)

    def _maintained(self, step: Step) -> None:
        for task, seconds in (step.seconds or {}).items():
            self._values.observe(names.MAINTENANCE_DURATION, seconds, task)
            self._add(names.MAINTENANCE_FAILURES, step.error is not None, task)
            self._add(names.FILES_REMOVED, step.removed, task)
        if step.error is not None:
            self._values.add(names.ERRORS, 1, type(step.error).__name__)

    def _add(self, metric: Metric, amount: float, *labels: str) -> None:
        self._values.add(metric, amount, *labels)

    def _timed(self, name: str, began: float | None, ended: float) -> None:
        if began is not None:
            self._values.observe(names.STEP_DURATION, max(0.0, ended - began), name)

    def _plausible(self, microseconds: int) -> bool:
        """One wrong clock in the future would make the stream look fresh forever."""
        return microseconds / 1_000_000 <= time.time() + self._ahead
