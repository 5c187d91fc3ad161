"""Checks of `[health]`, `[log]` and `[notify]`. In: all sections. Out: nothing; the first wrong
setting raises `ConfigError`, with its path. Nothing is asked or opened."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

from frazil.config.messages import nearest
from frazil.config.rules import Checked, Rule, require, under
from frazil.config.sections import EVENTS, NEVER, ConfigSections, LogConfig, NotifyConfig
from frazil.config.settings import REFERENCE, SECRET
from frazil.config.units import duration
from frazil.errors import ConfigError

LOG_FORMATS = ("auto", "text", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
#: Levels of Spark's own log.
SPARK_LEVELS = ("OFF", "FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE")
#: Names of headers whose values are secrets, besides those that are in every section.
_SECRET_HEADER = re.compile(r"auth|key|cookie", re.IGNORECASE)


def monitoring_rules(config: ConfigSections) -> Iterator[Rule]:
    durations = {"health": ["max_wait", "max_start"], "notify": ["timeout"]}
    if config.health.heartbeat_interval != NEVER:
        durations["health"].append("heartbeat_interval")
    for section, names in durations.items():
        for name in names:
            text, path = getattr(getattr(config, section), name), (section, name)
            yield Rule(partial(duration, text, f"[{section}] {name}", path), (path,))
    yield from under(("log",), _log_rules(config.log))
    yield from under(("notify",), _notify_rules(config.notify))


def check_log(log: LogConfig) -> None:
    require(under(("log",), _log_rules(log)))


def _log_rules(log: LogConfig) -> Iterator[Checked]:
    for name, known in (
        ("format", LOG_FORMATS),
        ("level", LOG_LEVELS),
        ("spark_level", SPARK_LEVELS),
    ):
        yield partial(_check_word, name, getattr(log, name), known), [name]


def _check_word(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"cannot read [log] {name}: {value!r} is unknown{nearest(value, known)}", path=(name,)
        )


def _notify_rules(notify: NotifyConfig) -> Iterator[Checked]:
    for at, event in enumerate(notify.events):
        yield partial(_check_event, event), [("events", str(at))]
    if notify.webhook and not REFERENCE.match(notify.webhook):
        yield lambda: check_webhook(notify.webhook), ["webhook"]
    for name, value in notify.headers.items():
        yield partial(_check_header, name, value), [("headers", name)]


def _check_event(event: str) -> None:
    if event not in EVENTS:
        raise ConfigError(
            f"cannot read [notify] events: {event!r} is unknown{nearest(event, EVENTS)}",
            path=("events",),
        )


def _check_header(name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or re.search(r"[\r\n\0]", value):
        raise ConfigError(
            f"cannot read [notify] headers: {name!r} is not a header name",
            path=("headers",),
        )
    if (SECRET.search(name) or _SECRET_HEADER.search(name)) and not REFERENCE.match(value):
        raise ConfigError(
            f"cannot take [notify] headers {name}: a secret is written in the config; "
            "expected env:NAME or file:PATH",
            path=("headers",),
        )


def check_webhook(url: str) -> None:
    """The URL itself, after a reference was resolved. It may hold a secret: no error shows it."""
    try:
        parts = urlsplit(url)
        well = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        well = False
    if not well or re.search(r"[\s\0]", url):
        raise ConfigError(
            "cannot read [notify] webhook: expected a URL with http:// or https://",
            path=("webhook",),
        )
