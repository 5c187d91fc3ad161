"""What metrics ask for while a sink runs: lag, memory, the audit.

In: a run. Out: values of `monitoring.metrics`. Promised: each question has a thread of its own, so
that neither the stream nor a scrape waits for an answer; an answer that takes long is asked for
less often; no failure stops anything, all are counted. Runs on the driver.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from frazil.auditing.evidence import AuditResult, of_sink
from frazil.config.model import Config
from frazil.config.sections import NEVER
from frazil.config.units import duration
from frazil.errors import FrazilError
from frazil.monitoring import metrics as names
from frazil.monitoring.lag import LagTracker
from frazil.monitoring.metrics import REGISTRY, SinkMetrics
from frazil.monitoring.process_memory import memory
from frazil.offsets import Cut, Partition
from frazil.spark.open_table import opener

#: A question is asked again after at least so many times the seconds that its answer took.
_SHARE = 10
#: Seconds between two looks at the memory.
_MEMORY_SECONDS = 5.0
#: A verdict other than proven counts if it is found again after so many seconds: the first look may
#: have met a commit between a table and the index.
_AGAIN_SECONDS = 5.0
#: The audit's thread yields to those of the stream.
_NICE = 10

_log = logging.getLogger("frazil")


class Probe:
    """Calls `ask` at intervals, on a thread of its own, from `start` until `stop`."""

    def __init__(
        self, name: str, seconds: float, ask: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """`failed`: called with the class of an error of `ask`."""
        self._seconds = seconds
        self._ask = ask
        self._failed = failed
        self._stopped = threading.Event()
        #: seconds of the answer under way in which nothing was asked
        self._waited = 0.0
        self._thread = threading.Thread(target=self._run, name=f"frazil-{name}", daemon=True)

    def start(self) -> Probe:
        self._thread.start()
        return self

    def _run(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            began, self._waited = time.monotonic(), 0.0
            try:
                self._ask()
            except Exception as error:  # no question that fails is a reason to stop a stream
                _log.debug("%s failed: %s", self._thread.name, error)
                self._failed(type(error).__name__ if isinstance(error, FrazilError) else OTHER)
            asked = time.monotonic() - began - self._waited
            pause = max(self._seconds, _SHARE * asked)

    def wait(self, seconds: float) -> bool:
        """False if the probe was stopped meanwhile."""
        self._waited += seconds
        return not self._stopped.wait(seconds)

    def stop(self) -> None:
        """Does not wait for an answer under way."""
        self._stopped.set()


#: Class of errors that are not Frazil's own.
OTHER = "other"


class Probes:
    """The probes of one run."""

    def __init__(
        self,
        config: Config,
        values: SinkMetrics,
        *,
        ends: Callable[[], Cut],
        position: Callable[[], Cut],
        event_times: Mapping[Partition, int],
    ) -> None:
        """`ends` of the topics, the committed `position`, and the newest committed event by
        partition, in microseconds."""
        self._config = config
        self._values = values
        self._ends = ends
        self._position = position
        self._event_times = event_times
        self._tracker = LagTracker()
        self._probes = [Probe("memory", _MEMORY_SECONDS, measure_memory, self._count)]
        if config.metrics.lag_interval != NEVER:
            seconds = duration(config.metrics.lag_interval)
            self._probes.append(Probe("lag", seconds, self.ask_lag, self._count))
        if config.metrics.audit_interval != NEVER:
            seconds = duration(config.metrics.audit_interval)
            self._audit = Probe("audit", seconds, self.run_audit, self._audit_failed)
            self._probes.append(self._audit)
        for probe in self._probes:
            probe.start()

    def stop(self) -> None:
        for probe in self._probes:
            probe.stop()

    def _count(self, error: str) -> None:
        self._values.add(names.ERRORS, 1, error)

    def ask_lag(self) -> None:
        position = self._position()  # before the ends: else a commit between makes it negative
        ends = self._ends()
        if not ends:
            return  # sources without Kafka
        now = time.time()
        lags = self._tracker.lag(ends, position, dict(self._event_times), now)
        records: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        for partition, lag in lags.items():
            records[partition.topic] += lag.records
            seconds[partition.topic] = max(seconds.get(partition.topic, 0.0), lag.seconds)
        self._values.put(names.LAG, {(topic,): count for topic, count in records.items()})
        self._values.put(names.LAG_SECONDS, {(topic,): age for topic, age in seconds.items()})
        few = len(lags) <= self._config.metrics.max_labels
        self._values.put(
            names.PARTITION_LAG,
            {(p.topic, str(p.number)): lag.records for p, lag in lags.items() if few},
        )
        self._values.set(names.LAG_CHECKED, now)

    def run_audit(self) -> None:
        with suppress(OSError, AttributeError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        began = time.monotonic()
        result = self._verdict()
        if not result.proven and self._audit.wait(_AGAIN_SECONDS):
            result = self._verdict()
        self._values.put(
            names.AUDIT_VERDICT,
            {
                (report.table, report.verdict): 1.0
                for report in result.reports
                if report.sink == self._config.sink.id
            },
        )
        self._values.set(names.AUDIT_PROVEN, result.proven)
        self._values.set(names.AUDIT_AGE, time.time())
        self._values.set(names.AUDIT_DURATION, time.monotonic() - began)

    def _verdict(self) -> AuditResult:
        return of_sink(self._config, opener(self._config, spark=False))

    def _audit_failed(self, error: str) -> None:
        """What could not be audited is not proven."""
        self._values.set(names.AUDIT_PROVEN, 0)
        self._values.add(names.AUDIT_FAILURES, 1, error)
        self._count(error)


def measure_memory() -> None:
    sums = memory()
    REGISTRY.process.put(names.MEMORY, {(kind,): size for kind, (size, _) in sums.items()})
    REGISTRY.process.put(names.PROCESSES, {(kind,): count for kind, (_, count) in sums.items()})
