"""Metrics as Prometheus reads them: the route `/metrics`.

In: what this process knows of itself and of its sinks, in memory. Out: the text format, made when
it is asked for; nothing is asked of a broker, a catalog or Spark. Runs on the threads of requests.
"""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import InfoMetricFamily

import frazil


class _Build:
    def collect(self) -> list[InfoMetricFamily]:
        build = {"version": frazil.__version__, "python": platform.python_version()}
        return [InfoMetricFamily("frazil_build", "Version of Frazil and Python.", build)]


registry = CollectorRegistry(auto_describe=False)
registry.register(_Build())
ProcessCollector(registry=registry)


def metrics_page() -> tuple[int, str, bytes]:
    return 200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry)
