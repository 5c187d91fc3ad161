"""Metrics to an OpenTelemetry collector: OTLP over HTTP, with OpenTelemetry's own SDK.

In: the values of `monitoring.metrics`, read when the SDK asks for them, and each observation of a
histogram. Out: the same names and labels as for Prometheus. The SDK's `OTEL_…` variables apply:
headers, timeout, certificates, interval, temporality, resource. A collector that is away costs
nothing but its metrics. Runs on a thread of the SDK; one export for each endpoint of a process.
Imported only where `[metrics] otlp_endpoint` is set: the package is an extra, `frazil[otel]`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

import frazil
from frazil.config.sections import OTLP_ENVIRONMENT
from frazil.monitoring.metrics import METRICS, Distribution, Labels, Metric, MetricRegistry

#: Seconds that the end of a run waits for the last export.
_LAST_EXPORT = 5.0

_exports: dict[str, OtlpExport] = {}
_lock = threading.Lock()


class OtlpExport:
    """A shared export: `close` ends it, with a last export, once everybody has closed it."""

    def __init__(self, endpoint: str, metrics: MetricRegistry) -> None:
        self.endpoint = endpoint
        self._metrics = metrics
        self._users = 0
        url = None if endpoint == OTLP_ENVIRONMENT else f"{endpoint.rstrip('/')}/v1/metrics"
        named = "OTEL_SERVICE_NAME" in os.environ
        named |= SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self.provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter(url))],
            Resource.create({} if named else {SERVICE_NAME: "frazil"}),
            shutdown_on_exit=False,
        )
        meter = self.provider.get_meter("frazil", frazil.__version__)
        self._histograms: dict[Metric, Histogram] = {}
        for metric in METRICS:
            name, text, callbacks = metric.name, metric.help, [self._callback(metric)]
            if metric.kind == "counter":
                meter.create_observable_counter(name, callbacks, description=text)
            elif metric.kind == "gauge":
                meter.create_observable_gauge(name, callbacks, description=text)
            else:
                self._histograms[metric] = meter.create_histogram(
                    name,
                    description=text,
                    explicit_bucket_boundaries_advisory=Distribution.BOUNDS,
                )
        metrics.listeners.append(self._observed)

    @classmethod
    def open(cls, endpoint: str, metrics: MetricRegistry) -> OtlpExport:
        with _lock:
            export = _exports.get(endpoint)
            if export is None:
                export = _exports[endpoint] = cls(endpoint, metrics)
            export._users += 1
            return export

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observations(_: CallbackOptions) -> Iterable[Observation]:
            for labels, value in self._metrics.values(metric).items():
                yield Observation(value, dict(zip(metric.label_names, labels, strict=True)))

        return observations

    def _observed(self, metric: Metric, value: float, labels: Labels) -> None:
        self._histograms[metric].record(value, dict(zip(metric.label_names, labels, strict=True)))

    def close(self) -> None:
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            del _exports[self.endpoint]
        self._metrics.listeners.remove(self._observed)
        # A collector that is away must not hold up the end of a run.
        last = threading.Thread(
            target=self.provider.shutdown, args=(_LAST_EXPORT * 1000,), daemon=True
        )
        last.start()
        last.join(_LAST_EXPORT + 1)
