"""The health of a process: the verdicts of all its sinks, for `/healthz`, `/readyz` and a file.

In: `SinkHealth` of each sink. Out: answers for probes, and a file that is replaced as a whole.
Promised: an answer asks no server and takes no lock that a commit holds. Runs on the driver.

A process is healthy while one of its sinks is alive: it runs, or waits for something that Frazil
tries again by itself. To start it again would not help that. It is ready if every sink that was not
stopped has claimed its tables, and none waits for an operator, or longer than `[health] max_wait`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frazil.errors import ConfigError
from frazil.monitoring.health_state import STOPPED
from frazil.monitoring.periodic import Periodic
from frazil.monitoring.sink_health import SinkHealth, moment

#: Seconds between two writes of a health file.
FILE_SECONDS = 5.0
_JSON = "application/json"

_sinks: dict[str, SinkHealth] = {}
_files: dict[str, HealthFile] = {}
_lock = threading.Lock()


def add(health: SinkHealth) -> None:
    """A sink of this process. A later run of the same sink takes its place."""
    with _lock:
        _sinks[health.sink] = health


def remove(sink: str) -> None:
    with _lock:
        _sinks.pop(sink, None)


def health_values() -> dict[str, Any]:
    with _lock:
        sinks = list(_sinks.values())
    values = [{**sink.values(), "alive": sink.alive(), "ready": sink.ready()} for sink in sinks]
    wanted = [sink for sink in values if sink["state"] != STOPPED]
    return {
        "written_at": moment(time.time()),
        "pid": os.getpid(),
        "healthy": any(sink["alive"] for sink in values),
        "ready": bool(wanted) and all(sink["ready"] for sink in wanted),
        "sinks": values,
    }


def healthz() -> tuple[int, str, bytes]:
    return _answer("healthy")


def readyz() -> tuple[int, str, bytes]:
    return _answer("ready")


ROUTES: dict[str, Callable[[], tuple[int, str, bytes]]] = {"/healthz": healthz, "/readyz": readyz}


def _answer(key: str) -> tuple[int, str, bytes]:
    values = health_values()
    return (200 if values[key] else 503), _JSON, json.dumps(values).encode() + b"\n"


class HealthFile:
    """A file with `health_values`, for all sinks of the process that name it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._users = 0
        try:
            self._write()
        except OSError as error:
            raise ConfigError(
                f"cannot write health file {path}: {error.strerror}", path=("health", "file")
            ) from None
        self._writer = Periodic("health-file", FILE_SECONDS, self._write, self._write)

    @classmethod
    def open(cls, path: str) -> HealthFile:
        """Raises ConfigError if it cannot be written."""
        with _lock:
            known = _files.get(path)
        file = known or cls(path)
        with _lock:
            _files[path] = file
            file._users += 1
        return file

    def _write(self) -> None:
        """As a whole: a reader sees the old content or the new."""
        text = json.dumps(health_values()) + "\n"
        own = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        own.write_text(text, encoding="utf-8")
        own.chmod(0o644)  # a probe may be another user; there is no secret in it
        own.replace(self._path)

    def close(self) -> None:
        """Writes the last state once everybody has closed it."""
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            _files.pop(str(self._path), None)
        self._writer.close()
