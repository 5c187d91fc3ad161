"""Checks of `[health]`, `[log]` and `[notify]`. In: all sections. Out: nothing; the first wrong
setting raises `ConfigError`, with its path. Nothing is asked or opened."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from frazil.config.messages import nearest
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


def check_monitoring(config: ConfigSections) -> None:
    for section, name in (
        ("health", "heartbeat_interval"),
        ("health", "max_wait"),
        ("health", "max_start"),
        ("notify", "timeout"),
    ):
        value = getattr(getattr(config, section), name)
        if not (name == "heartbeat_interval" and value == NEVER):
            duration(value, f"[{section}] {name}", (section, name))
    check_log(config.log)
    _check_notify(config.notify)


def check_log(log: LogConfig) -> None:
    for name, known in (
        ("format", LOG_FORMATS),
        ("level", LOG_LEVELS),
        ("spark_level", SPARK_LEVELS),
    ):
        value = getattr(log, name)
        if value not in known:
            raise ConfigError(
                f"cannot read [log] {name}: {value!r} is unknown{nearest(value, known)}; expected "
                f"one of {', '.join(known)}",
                path=("log", name),
            )


def _check_notify(notify: NotifyConfig) -> None:
    for event in notify.events:
        if event not in EVENTS:
            raise ConfigError(
                f"cannot read [notify] events: {event!r} is unknown{nearest(event, EVENTS)}; "
                f"expected some of {', '.join(EVENTS)}",
                path=("notify", "events"),
            )
    if notify.webhook and not REFERENCE.match(notify.webhook):
        check_webhook(notify.webhook)
    for name, value in notify.headers.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or re.search(r"[\r\n\0]", value):
            raise ConfigError(
                f"cannot read [notify] headers: {name!r} is not a header name",
                path=("notify", "headers"),
            )
        if (SECRET.search(name) or _SECRET_HEADER.search(name)) and not REFERENCE.match(value):
            raise ConfigError(
                f"cannot take [notify] headers {name}: a secret is written in the config; "
                "expected env:NAME or file:PATH",
                path=("notify", "headers"),
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
            path=("notify", "webhook"),
        )
