"""Calls a user's function when hours become complete, on a thread of its own.

In: times until which the stream is complete. Out: calls, repeated until they succeed, and their
errors. Runs on the driver.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from datetime import datetime

from frazil.ledger.completeness import Timestamp, moment

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
_log = logging.getLogger("frazil")


class CompletenessCallback:
    """Calls a user's function when hours become complete, on a separate thread: neither its
    duration nor its errors affect commits. If it raises, it is called again with growing pauses
    until it succeeds; `failed` and the log get the error, and `failed` gets "" after it."""

    def __init__(
        self, call: Callable[[datetime], object], failed: Callable[[str], None] = lambda _: None
    ) -> None:
        self.trouble = ""
        self._call = call
        self._failed = failed
        self._waiting: queue.Queue[int | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frazil-complete", daemon=True)
        self._thread.start()

    def tell(self, until: int) -> None:
        self._waiting.put(until)

    def close(self, timeout: float) -> bool:
        """Stop after the pending calls. Returns whether all of them succeeded."""
        self._waiting.put(None)
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.trouble

    def _run(self) -> None:
        while (until := self._waiting.get()) is not None:
            pause = FIRST_PAUSE
            while not self._called(until):
                if self._closing.wait(pause):
                    return  # the next run calls it again
                pause = min(LONGEST_PAUSE, pause * 2)

    def _called(self, until: int) -> bool:
        try:
            self._call(moment(until))
        except Exception as error:  # the user's function may raise anything
            self.trouble = (
                f"cannot report completeness until {Timestamp(until)}: on_complete raised "
                f"{type(error).__name__}: {error}"
            )
            self._failed(self.trouble)
            _log.warning("%s; it is called again", self.trouble, exc_info=True)
            return False
        self.trouble = ""
        self._failed("")
        return True
