"""The Spark query that drives a sink, restarted where Spark lost a Python process.

Spark gives a Python process 10 seconds to connect back, on a loopback port where any program may
connect first, and a query ends with the first failure. The stream itself is intact then, so the
query is restarted from the sink's position. Every other failure ends it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from frazil.errors import FrazilError, PythonWorkerUnavailable, cause, from_traceback

_log = logging.getLogger("frazil")

#: Errors of Spark and PySpark where a Python process was not started, or not reached, in time.
_NO_WORKER = re.compile(
    r"Python worker (?:failed )?to connect back|Python daemon failed to launch worker"
    r"|IllegalArgumentException: Authentication failed"
    r"|CANNOT_OPEN_SOCKET|UNEXPECTED_RESPONSE_FROM_SERVER|\b_do_server_auth\b"
)
_LOOK_SECONDS = 0.25
#: Queries that start at once: each starts a Python process, which needs a core to be in time.
STARTS = max(2, os.cpu_count() or 1)
#: Seconds after which a query that still starts no longer keeps others from it.
_START_SECONDS, _STATUS_SECONDS = 30.0, 0.05
_starts = threading.BoundedSemaphore(STARTS)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0


def translated(error: Exception) -> FrazilError:
    """Spark's error as one of ours: our own error inside it, or the cause that it names."""
    text = str(error)
    failure = from_traceback(text)
    if failure is None:
        fact = cause(text) or repr(error)
        if _NO_WORKER.search(text):
            failure = PythonWorkerUnavailable(
                f"cannot run the stream: Spark could not start or reach a Python process: {fact}",
                hint="check that the machine is not overloaded (Spark waits 10 s), and that "
                "nothing else calls ports of the loopback interface; then start again",
            )
        else:
            failure = FrazilError(f"cannot continue: Spark stopped the stream: {fact}")
        failure.detail = text
    return failure


def _error(query: StreamingQuery) -> FrazilError | None:
    error = query.exception()
    return None if error is None else translated(error)


def started(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query, when few enough others are starting. Fifty at once would all be late, and so
    would their restarts."""
    _starts.acquire()
    query = None
    try:
        query = start()
    finally:
        if query is None:
            _starts.release()
    threading.Thread(target=_release, args=(query,), name="frazil-start", daemon=True).start()
    return query


def _release(query: StreamingQuery) -> None:
    """Let the next query start when this one has its sources, or has ended."""
    deadline = time.monotonic() + _START_SECONDS
    with suppress(Exception):  # Spark's process has ended: the next use of the query raises that
        while query.isActive and query.status["message"].startswith("Initializing"):
            if time.monotonic() > deadline:
                break
            time.sleep(_STATUS_SECONDS)
    _starts.release()


class Running:
    """A query and its restarts. `start` makes one from the current position of the sink; `blocked`
    gets the reason why there is none at the moment, and "" when there is one again."""

    def __init__(
        self,
        query: StreamingQuery,
        start: Callable[[], StreamingQuery],
        *,
        patience: float,
        blocked: Callable[[str], None],
    ) -> None:
        self.query = query
        self._start = start
        self._patience = patience
        self._blocked = blocked
        self._closed = threading.Event()
        self._replacing = threading.Lock()
        self._failure: FrazilError | None = None
        self._thread = threading.Thread(target=self._watch, name="frazil-query", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        query = self.query  # it may be replaced between two calls
        return query.isActive or self._restarts(_error(query))

    @property
    def failure(self) -> FrazilError | None:
        """The error that ended it for good."""
        error = _error(self.query)
        return None if self._restarts(error) else self._failure or error

    def _restarts(self, error: FrazilError | None) -> bool:
        """Is a query that ended with `error` restarted?"""
        if self._closed.is_set() or self._failure:
            return False
        return isinstance(error, PythonWorkerUnavailable)

    def stop(self) -> None:
        with self._replacing:
            self._closed.set()
        self.query.stop()

    def _watch(self) -> None:
        deadline = pause = 0.0
        while not self._closed.wait(_LOOK_SECONDS):
            worked = self.query.lastProgress is not None if deadline else True
            if worked and deadline:
                self._blocked("")
                deadline = 0.0
            if self.query.isActive:
                continue
            if not isinstance(error := _error(self.query), PythonWorkerUnavailable):
                return
            if not deadline:
                deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
            if time.monotonic() > deadline:
                self._failure = error
                return
            self._blocked(error.message)
            _log.warning("%s; the query is started again", error.message)
            if self._closed.wait(pause) or not self._replaced():
                return
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _replaced(self) -> bool:
        try:
            query = self._start()
        except FrazilError as error:
            self._failure = error
            return False
        except PySparkException as error:
            self._failure = translated(error)
            return False
        with self._replacing:
            if not self._closed.is_set():
                self.query = query
                return True
        query.stop()
        return False
