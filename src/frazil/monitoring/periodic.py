"""Calls something at intervals, on a thread of its own, until it is closed.

A call that raises is logged at DEBUG and made again at the next interval: what monitoring does must
never stop a stream. Runs on the driver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("frazil")


class Periodic:
    def __init__(
        self,
        name: str,
        seconds: float,
        call: Callable[[], object],
        last: Callable[[], object] = lambda: None,
    ) -> None:
        """`last`: called instead when it is closed, on the same thread."""
        self._seconds = seconds
        self._call, self._last = call, last
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"frazil-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._make(self._call)
        while not self._closed.wait(self._seconds):
            self._make(self._call)
        self._make(self._last)

    def _make(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # a defect here is no reason to stop a stream
            _log.debug("%s: %s: %s", self._thread.name, type(error).__name__, error)

    def close(self, timeout: float = 5.0) -> None:
        """Waits for a call under way and for the last one, but no longer than `timeout`."""
        self._closed.set()
        self._thread.join(timeout)
