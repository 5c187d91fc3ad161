"""The observers that a config asks for: `observers_of`. They are made before anything is claimed,
so what cannot be served or written is an error with nothing begun."""

from __future__ import annotations

from frazil.config.model import Config
from frazil.monitoring.metrics_observer import MetricsObserver
from frazil.monitoring.observer import ObserverFactory


def observers_of(config: Config) -> list[ObserverFactory]:
    return [MetricsObserver] if config.metrics else []
