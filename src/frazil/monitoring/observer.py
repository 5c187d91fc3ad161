"""Observers of a run: metrics, log, health and notifications see a sink through these four calls.

In: a run's start, its steps, a call about every second, and its end. Promised: an observer that
fails is logged and never stops the stream. Runs on the driver: `step` on the threads of the batches
and of the committer, the others on the thread that watches the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from frazil.config.model import Config
from frazil.errors import FrazilError
from frazil.run import Run
from frazil.steps import Step

_log = logging.getLogger("frazil")


class Observer(Protocol):
    def started(self, run: Run) -> None:
        """The sink has claimed its tables, and its query runs. Steps may come before it."""

    def step(self, step: Step) -> None: ...

    def tick(self, run: Run) -> None:
        """About once a second while it runs."""

    def ended(self, error: FrazilError | None) -> None:
        """The run is over, by `error` or because it was stopped."""


#: Makes the observer of one sink.
ObserverFactory = Callable[[Config], Observer]


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def started(self, run: Run) -> None:
        self._call(lambda observer: observer.started(run))

    def step(self, step: Step) -> None:
        self._call(lambda observer: observer.step(step))

    def tick(self, run: Run) -> None:
        self._call(lambda observer: observer.tick(run))

    def ended(self, error: FrazilError | None) -> None:
        self._call(lambda observer: observer.ended(error))

    def _call(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception as error:  # a defect of an observer is no reason to stop a stream
                name = type(observer).__name__
                _log.warning("%s failed: %s: %s", name, type(error).__name__, error)
