"""The observers that a config asks for: `observers_of`. They are made before anything is claimed,
so what cannot be served or written is an error with nothing begun."""

from __future__ import annotations

from frazil import logs
from frazil.config.model import Config
from frazil.config.secret_values import secret_values
from frazil.monitoring.health_observer import HealthObserver
from frazil.monitoring.log_observer import LogObserver
from frazil.monitoring.metrics_observer import MetricsObserver
from frazil.monitoring.notify_observer import NotifyObserver
from frazil.monitoring.observer import Observer, ObserverFactory, Observers
from frazil.monitoring.sink_health import SinkHealth


def observers_of(config: Config) -> list[ObserverFactory]:
    return [*([MetricsObserver] if config.metrics else []), health_of]


def health_of(config: Config) -> Observer:
    """Health of a run, and what follows from it. Health comes first: the others read it. Its
    outputs come last: at the end of a run they wait for a store."""
    logs.mask(secret_values(config))
    health = SinkHealth(config)
    shown = HealthObserver(config, health)
    notify = [NotifyObserver(config, health)] if config.notify else []
    return Observers([health, LogObserver(config, health), *notify, shown])
