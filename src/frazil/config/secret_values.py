"""The secrets of a config, so that whatever leaves the process can be searched for them.

In: a config. Out: their values. Never log or store them. A secret that cannot be resolved is left
out: its use raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frazil.config.sections import ConfigSections
from frazil.config.settings import SECRET, resolve, resolve_reference
from frazil.errors import ConfigError

#: Shorter ones are no secrets, and would mask parts of words.
_SHORTEST = 6


def secret_values(config: ConfigSections) -> list[str]:
    """The longest first."""
    sections = (config.kafka, config.catalog.properties, config.decode.registry, config.spark)
    pairs = [(k, v) for section in sections for k, v in section.items() if SECRET.search(k)]
    values = []
    for key, value in pairs:
        try:
            values.append(resolve(key, value))
        except ConfigError:
            continue
    for key, value in (*config.notify.headers.items(), ("webhook", config.notify.webhook)):
        try:
            values.append(resolve_reference(key, value))
        except ConfigError:
            continue
    parts = [part for value in values for part in (value, value.rpartition(":")[2])]
    return sorted({part for part in parts if len(part) >= _SHORTEST}, key=len, reverse=True)


def masked(value: Any, secrets: Sequence[str]) -> Any:
    """The text, or the JSON values, with *** for each secret. Longer secrets come first in
    `secrets`: one may be a part of another."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {key: masked(member, secrets) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(member, secrets) for member in value]
    return value
