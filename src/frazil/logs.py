"""The log of a process: Python's logging under `frazil`, as lines of text or of JSON.

In: format, level and file. Out: one handler on the logger `frazil`, and nothing else is touched. A
line has time, level and sink; `fields` of a record become keys of JSON. Promised: a line is one
line, secrets are masked in it, and an exception is its class and place, because its text
may quote a record. Nothing is installed on import: a program that uses Frazil as a library decides
by itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any

from frazil.config.secret_values import masked
from frazil.errors import ConfigError

#: Tells Spark's planning process how to log.
_VARIABLE = "FRAZIL_LOG"
_BREAKS = str.maketrans({"\n": " | ", "\r": "", "\0": ""})

#: Handlers that this module has installed.
_installed: list[logging.Handler] = []
#: What no line may show, the longest first.
_secrets: list[str] = []


class LineFormatter(logging.Formatter):
    """`2026-11-19T02:00:00.123Z INFO sink orders: batch 7 committed: …`"""

    def format(self, record: logging.LogRecord) -> str:
        sink = getattr(record, "sink", "")
        subject = f"sink {sink}" if sink else "frazil"
        text = f"{_time(record)} {record.levelname} {subject}: {_message(record)}"
        return str(masked(text, _secrets))


class JsonFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {"time": _time(record), "level": record.levelname}
        values |= {"sink": getattr(record, "sink", None), "message": _message(record)}
        values |= getattr(record, "fields", {})
        return json.dumps(masked(values, _secrets), ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        text = f"{text} ({type(error).__name__}{place})"
    return text.translate(_BREAKS)


def mask(secrets: Iterable[str]) -> None:
    """From now on no line shows these texts."""
    _secrets[:] = sorted({*_secrets, *secrets}, key=len, reverse=True)


def configure(format: str, level: str, file: str = "") -> None:
    """Send what is logged under `frazil` to `file`, or to standard error, from now on. `format`:
    text or json. Processes that Spark starts for its planning do the same."""
    try:
        handler: logging.Handler
        handler = _opened(file) if file else logging.StreamHandler()
    except OSError as error:
        raise ConfigError(
            f"cannot write log {file}: {error.strerror}", path=("log", "file")
        ) from None
    handler.setFormatter((JsonFormatter if format == "json" else LineFormatter)())
    _install(handler, level)
    os.environ[_VARIABLE] = json.dumps([format, level, file])


def of_environment() -> None:
    """In Spark's planning process: log as the driver does, or warnings to standard error."""
    try:
        format, level, file = json.loads(os.environ.get(_VARIABLE, '["text", "WARNING", ""]'))
        configure(str(format), str(level), str(file))
    except (ValueError, ConfigError):
        configure("text", "WARNING")


def _opened(file: str) -> logging.Handler:
    return WatchedFileHandler(file, encoding="utf-8", errors="backslashreplace")


def _install(handler: logging.Handler, level: str) -> None:
    logger = logging.getLogger("frazil")
    remove()
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    _installed.append(handler)


def remove() -> None:
    """Take away what `configure` has installed."""
    logger = logging.getLogger("frazil")
    while _installed:
        handler = _installed.pop()
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    os.environ.pop(_VARIABLE, None)


def active() -> bool:
    """Has a log been configured?"""
    return bool(_installed)


def installed() -> bool:
    """Does a handler of this module write to standard error?"""
    return any(getattr(handler, "stream", None) is sys.stderr for handler in _installed)
