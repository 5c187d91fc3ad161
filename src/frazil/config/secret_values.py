"""The secrets of a config, so that whatever leaves the process can be searched for them.

In: a config. Out: their values. Never log or store them. A secret that cannot be resolved is left
out: its use raises an error. A secret of several lines is also known by its lines, and a short one
is masked only where it stands as a word of its own, because it may be a part of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from frazil.config.sections import ConfigSections
from frazil.config.settings import PAIR, SECRET, resolve, resolve_reference
from frazil.errors import ConfigError, passwords_in, without_passwords

#: Shorter ones may be parts of words.
_SHORT = 6
#: Texts that are the values of switches, whatever the setting is called.
_SWITCHES = ("true", "false")
_IN_JAAS = re.compile(r"(?:password|secret)\s*=\s*[\"']?([^\"';\s]+)", re.IGNORECASE)


def secret_values(config: ConfigSections) -> list[str]:
    """The longest first."""
    sections = (config.kafka, config.catalog.properties, config.decode.registry, config.spark)
    pairs = [pair for section in sections for pair in section.items()]
    values = {part for key, value in pairs for part in _of_setting(key, value)}
    notify = config.notify
    for key, value in (*notify.headers.items(), ("webhook", notify.webhook)):
        values.update(part for part in _resolved(key, value, resolve_reference) if len(part) > 5)
    values.update(_of_url(config.metrics.otlp_endpoint))
    return sorted(values - {"", *_SWITCHES}, key=len, reverse=True)


def _resolved(key: str, value: str, by: Any = resolve) -> list[str]:
    try:
        resolved = by(key, value)
    except ConfigError:
        return []
    return [*_lines(resolved), *_of_url(resolved)]


def _of_setting(key: str, value: str) -> Iterator[str]:
    if not SECRET.search(key):
        for resolved in _resolved(key, value):
            yield from _of_url(resolved)
        return
    for resolved in _resolved(key, value):
        yield resolved
        yield from _IN_JAAS.findall(resolved)
        behind = resolved.rpartition(":")[2]
        if PAIR.search(key) or len(behind) >= _SHORT:
            yield behind


def _lines(value: str) -> Iterator[str]:
    yield value.strip()
    if "\n" in value.strip():  # a line of a log is one line
        lines = (line.strip() for line in value.splitlines())
        yield from (line for line in lines if len(line) >= _SHORT and not line.startswith("-----"))


def _of_url(value: str) -> Iterator[str]:
    for password in passwords_in(value):
        yield from (password, unquote(password))


@lru_cache(16)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Longer secrets come first: one may be a part of another."""
    ordered = sorted(secrets, key=len, reverse=True)
    return re.compile(
        "|".join(
            re.escape(secret) if len(secret) >= _SHORT else rf"(?<!\w){re.escape(secret)}(?!\w)"
            for secret in ordered
        )
    )


def masked(value: Any, secrets: Sequence[str]) -> Any:
    """The text, or the JSON values, with *** for each secret, and for passwords in URLs."""
    if isinstance(value, str):
        known: Iterable[str] = filter(None, secrets)
        pattern = _pattern(tuple(known))
        return without_passwords(pattern.sub("***", value) if pattern.pattern else value)
    if isinstance(value, Mapping):
        return {key: masked(member, secrets) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(member, secrets) for member in value]
    return value
