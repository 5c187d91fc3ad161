"""The observer that feeds metrics, and serves them while its sink runs."""

from __future__ import annotations

from frazil.config.model import Config
from frazil.errors import FrazilError
from frazil.monitoring.http import MonitoringServer
from frazil.monitoring.prometheus import metrics_page
from frazil.run import Run
from frazil.steps import Step


class MetricsObserver:
    def __init__(self, config: Config) -> None:
        """Raises ConfigError if `[metrics] address` cannot be bound."""
        self._server = MonitoringServer.open(config.metrics.address, {"/metrics": metrics_page})

    def started(self, run: Run) -> None:
        return

    def step(self, step: Step) -> None:
        return

    def tick(self, run: Run) -> None:
        return

    def ended(self, error: FrazilError | None) -> None:
        self._server.close()
