"""Metrics as Prometheus reads them: the route `/metrics`.

In: the values of `monitoring.metrics`, in memory. Out: the text format, made when it is asked for;
nothing is asked of a broker, a catalog or Spark. Runs on the threads of requests.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as MetricFamily

import frazil
from frazil.monitoring.metrics import REGISTRY, Distribution, MetricRegistry

_BOUNDS = (*map(str, map(float, Distribution.BOUNDS)), "+Inf")
_BUILD = {"version": frazil.__version__, "python": platform.python_version()}


class FrazilCollector:
    def __init__(self, metrics: MetricRegistry) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[MetricFamily]:
        yield InfoMetricFamily("frazil_build", "Version of Frazil and Python.", _BUILD)
        for metric, values in self._metrics.samples():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.label_names)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
        for metric, distributions in self._metrics.distributions().items():
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
            for labels, one in distributions.items():
                totals = map(float, accumulate(one.counts))
                histogram.add_metric(labels, list(zip(_BOUNDS, totals, strict=True)), one.sum)
            yield histogram


registry = CollectorRegistry(auto_describe=False)
registry.register(FrazilCollector(REGISTRY))
ProcessCollector(registry=registry)


def metrics_page() -> tuple[int, str, bytes]:
    return 200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry)
