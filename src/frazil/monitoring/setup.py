"""What monitors a run, as its config asks for: `monitoring_of`. It is made before anything is
claimed, so what cannot be served or written is an error with nothing begun."""

from __future__ import annotations

from frazil import logs
from frazil.config.model import Config
from frazil.config.secret_values import secret_values
from frazil.config.sections import NEVER
from frazil.config.units import duration
from frazil.errors import FrazilError
from frazil.monitoring import process_health
from frazil.monitoring.health_observer import HealthObserver
from frazil.monitoring.log_observer import LogObserver
from frazil.monitoring.metrics import REGISTRY
from frazil.monitoring.metrics_observer import MetricsObserver
from frazil.monitoring.notify_observer import NotifyObserver
from frazil.monitoring.observer import Observer, Observers
from frazil.monitoring.periodic import Periodic
from frazil.monitoring.sink_health import SinkHealth
from frazil.monitoring.start_heartbeat import StartHeartbeat


def monitoring_of(config: Config) -> Observers:
    """Health comes first: the others read it. What shows it comes last: at the end of a run it
    waits for a store."""
    logs.mask(secret_values(config))
    health = SinkHealth(config)
    try:
        return _observers(config, health)
    except FrazilError as error:  # `frazil status` must show why there is no run
        health.ended(error)
        if config.health.heartbeat_interval != NEVER:
            beat = StartHeartbeat(config, health, duration(config.health.heartbeat_interval))
            Periodic("start", _ONCE, beat).close()
        raise


def _observers(config: Config, health: SinkHealth) -> Observers:
    observers: list[Observer] = [health]
    if config.metrics:
        observers.append(MetricsObserver(config, health))
    observers.append(LogObserver(config, health))
    if config.notify:
        observers.append(NotifyObserver(config, health))
    return Observers([*observers, HealthObserver(config, health)])


#: Seconds: it is written once.
_ONCE = 3600.0


def forget(sink: str) -> None:
    """A sink that has ended and is no longer defined is not shown."""
    process_health.remove(sink)
    REGISTRY.remove(sink)
