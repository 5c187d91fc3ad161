"""One run of one sink of a service, and who observes it. Runs on the sink's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from frazil.config.model import Config
from frazil.errors import FrazilError
from frazil.monitoring.observer import Observer, Observers
from frazil.run import Run
from frazil.sink import Sink
from frazil.spark.query import translated

#: Seconds between two looks at a run.
_TICK = 1.0


class SinkRun(Protocol):
    """`start`, then `watch` until it is over or there is an order, then `stop` or `failed`."""

    def start(self) -> None:
        """Blocks until the sink runs; raises why it cannot."""

    def watch(self, ordered: Callable[[], bool]) -> bool:
        """Until `ordered` is true: False; or until the run has ended by itself: True. Raises what
        stopped it."""

    def adapt(self, config: Config) -> None: ...

    def stop(self, error: FrazilError | None = None) -> None:
        """After the batch in progress; its observers get the error that ended it. Called once."""

    def cancel(self) -> None:
        """From another thread: a start in progress gives up waiting for servers."""


class ObservedRun:
    """A `SinkRun` of Spark."""

    def __init__(
        self,
        config: Config,
        session: Callable[[], SparkSession],
        observers: Callable[[Config], Sequence[Observer]],
        until_caught_up: bool,
    ) -> None:
        """Raises ConfigError for what can be refused without a server."""
        self._config = config
        self._session = session
        self._make_observers = observers
        self._observers = Observers([])
        self._until_caught_up = until_caught_up
        self._sink = Sink(config, on_step=lambda step: self._observers.step(step))
        self._run: Run | None = None

    def start(self) -> None:
        self._observers = Observers(self._make_observers(self._config))
        try:
            self._run = self._sink.start(self._session())
        except PySparkException as error:
            raise translated(error) from None
        self._observers.started(self._run)

    def watch(self, ordered: Callable[[], bool]) -> bool:
        run = self._run
        assert run is not None
        last = 0.0

        def over() -> bool:
            nonlocal last
            if time.monotonic() - last >= _TICK:
                last = time.monotonic()
                self._observers.tick(run)
            return ordered()

        if self._until_caught_up:
            return run.wait_until(run.ends(), unless=over) or not ordered()
        while not over():
            if run.awaitTermination(_TICK):
                return True  # available-now
            run.check()
        return False

    def adapt(self, config: Config) -> None:
        assert self._run is not None
        self._run.adapt(config)

    def stop(self, error: FrazilError | None = None) -> None:
        try:
            if self._run is not None:
                self._run.stop()
        except FrazilError as late:
            error = error or late
            raise
        finally:
            self._observers.ended(error)

    def cancel(self) -> None:
        self._sink.cancel()
