"""The observer that shows the health of a sink: endpoint, file and heartbeat.

In: the health of a run, and the run. Out: `/healthz` and `/readyz` where metrics are served, the
health file, and a heartbeat beside the staged batches, by which `frazil status` knows on any
machine that the sink runs, or that it starts. Promised: what asks or writes has a thread of its
own, and no failure of it stops or delays the stream. Runs on the driver.
"""

from __future__ import annotations

import json

from frazil.config.model import Config
from frazil.config.sections import NEVER
from frazil.config.units import duration
from frazil.errors import FrazilError
from frazil.monitoring import process_health
from frazil.monitoring.http import MonitoringServer
from frazil.monitoring.periodic import Periodic
from frazil.monitoring.process_health import HealthFile
from frazil.monitoring.sink_health import SinkHealth
from frazil.monitoring.start_heartbeat import StartHeartbeat
from frazil.run import Run
from frazil.steps import Step

#: Seconds between two questions for the ends of the topics.
_ASK_SECONDS = 10.0


class HealthObserver:
    def __init__(self, config: Config, health: SinkHealth) -> None:
        """Raises ConfigError if the health file cannot be written or the address be bound."""
        self._config = config
        self._health = health
        process_health.add(health)
        self._file = HealthFile.open(config.health.file) if config.health.file else None
        where = config.metrics.address
        self._server = MonitoringServer.open(where, process_health.ROUTES) if where else None
        self._threads: list[Periodic] = []
        self._start: StartHeartbeat | None = None
        interval = config.health.heartbeat_interval
        if interval != NEVER:
            beat = self._start = StartHeartbeat(config, health, duration(interval))
            self._threads.append(Periodic("start", duration(interval), beat, beat.last))

    def started(self, run: Run) -> None:
        if self._start is not None:
            self._start.claimed = True
            self._threads.pop(0).close(0)
        self._threads.append(Periodic("ends", _ASK_SECONDS, lambda: self._ask(run)))
        interval = self._config.health.heartbeat_interval
        if interval != NEVER:
            beat = _Heartbeat(self._health, run, duration(interval))
            self._threads.append(Periodic("heartbeat", duration(interval), beat, beat))

    def step(self, step: Step) -> None: ...

    def tick(self, run: Run) -> None: ...

    def ended(self, error: FrazilError | None) -> None:
        for thread in self._threads:
            thread.close()
        if self._file is not None:
            self._file.close()
        if self._server is not None:
            self._server.close()

    def _ask(self, run: Run) -> None:
        try:
            self._health.saw_ends(run.ends())
        except FrazilError as error:
            if not self._health.over:
                self._health.saw_no_ends(error)


class _Heartbeat:
    """Writes the values of a sink, and how often that happens."""

    def __init__(self, health: SinkHealth, run: Run, interval: float) -> None:
        self._health, self._run, self._interval = health, run, interval

    def __call__(self) -> None:
        values = {**self._health.values(), "interval": self._interval}
        self._run.beat(json.dumps(values).encode())
