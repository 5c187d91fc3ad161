"""The log of a process: Python's logging under `frazil`, as lines of text or of JSON.

In: format, level and file. Out: one handler on the logger `frazil`, and on the root logger for what
other libraries log as a warning or worse; Python's warnings, and exceptions that end a thread, come
the same way. A line has time, level and sink; `fields` of a record become keys of JSON, and
`logger` names another library. Promised: a line is one line without control characters, secrets are
masked in it, and an exception is its class and place, because its text may quote a record. Nothing
is installed on import: a program that uses Frazil as a library decides by itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
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
#: Longer messages of other libraries are cut: some have a whole response.
_LONGEST = 2000

#: Handlers that this module has installed.
_installed: list[logging.Handler] = []
#: What no line may show, the longest first.
_secrets: list[str] = []


class LineFormatter(logging.Formatter):
    """`2026-11-19T02:00:00.123Z INFO sink orders: batch 7 committed: …`"""

    def format(self, record: logging.LogRecord) -> str:
        sink = getattr(record, "sink", "")
        subject = f"sink {sink}" if sink else _library(record) or "frazil"
        message = str(masked(_message(record), _secrets)).translate(_BREAKS)
        return _printable(f"{_time(record)} {record.levelname} {subject}: {message}")


class JsonFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {"time": _time(record), "level": record.levelname}
        values |= {"sink": getattr(record, "sink", None), "message": _message(record)}
        if library := _library(record):
            values["logger"] = library
        values |= getattr(record, "fields", {})
        values = masked(values, _secrets)
        values["message"] = values["message"].translate(_BREAKS)
        return _printable(json.dumps(values, ensure_ascii=False, default=str))


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
    if _library(record) and len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return text


def _library(record: logging.LogRecord) -> str:
    """The logger of another library; empty: ours."""
    return "" if record.name.partition(".")[0] == "frazil" else record.name


def _printable(line: str) -> str:
    """Without what ends a line or controls a terminal; the escapes are also those of JSON."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else _escaped(char) for char in line)


def _escaped(char: str) -> str:
    number = ord(char)
    if number > 0xFFFF:  # a surrogate pair, as in JSON
        number -= 0x10000
        return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
    return f"\\u{number:04x}"


def secrets_masked(value: Any) -> Any:
    """A text, or the values of a report, without what no line may show."""
    return masked(value, _secrets)


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
    others = _OtherLibraries(handler)
    logging.getLogger().addHandler(others)
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    _installed.extend((handler, others))


class _OtherLibraries(logging.Handler):
    """Passes on what other libraries log as a warning or worse; all of it would be every request
    of every client, with its headers."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("py4j"):  # every connection that a JVM closes at its end
            return
        if record.levelno >= logging.getLogger("frazil").getEffectiveLevel():
            self._target.handle(record)


_thread_hook = threading.excepthook


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """An exception that nothing on its thread has caught."""
    if failure.exc_value is None or failure.exc_type is SystemExit:
        return
    name = failure.thread.name if failure.thread else "?"
    logging.getLogger("frazil").error(
        "thread %s ended by an exception",
        name,
        exc_info=(failure.exc_type, failure.exc_value, failure.exc_traceback),
        extra={"fields": {"event": "thread_failed", "thread": name}},
    )


def remove() -> None:
    """Take away what `configure` has installed."""
    logger = logging.getLogger("frazil")
    while _installed:
        handler = _installed.pop()
        logger.removeHandler(handler)
        logging.getLogger().removeHandler(handler)
        handler.close()
        logging.captureWarnings(False)
        threading.excepthook = _thread_hook
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    os.environ.pop(_VARIABLE, None)


def active() -> bool:
    """Has a log been configured?"""
    return bool(_installed)


def installed() -> bool:
    """Does a handler of this module write to standard error?"""
    return any(getattr(handler, "stream", None) is sys.stderr for handler in _installed)
