"""Retries a call while storage or a broker is unavailable: a batch is not lost for that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from frazil.errors import CommitStateUnknown, Unavailable

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0


class Clock(Protocol):
    """Time and pauses: the module `time`, or the clock of a test."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class Retry:
    """`retry(call)` calls again after growing pauses, until `timeout` seconds have passed or
    `stopping` returns true; then the error is raised. The call must be safe to repeat."""

    def __init__(self, timeout: float, stopping: Callable[[], bool]) -> None:
        self._timeout = timeout
        self._stopping = stopping
        #: gets the reason of each wait, and "" at its end
        self.waiting: Callable[[str], None] = lambda reason: None

    def __call__(self, call: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                result = call()
                if pause > _FIRST_PAUSE:
                    self.waiting("")
                return result
            except (Unavailable, CommitStateUnknown) as error:
                if self._stopping() or time.monotonic() > deadline:
                    raise
                self.waiting(error.message)
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
