"""Sections that pass through to librdkafka, Iceberg, Spark and the registry client, and the secrets
in them.

In: nested tables of a TOML file, or dicts. Out: `Settings`, flat texts whose repr masks secrets. A
secret is never a value in the file: it is `env:NAME` or `file:PATH`, resolved where it is used; as
part of a pair of name and secret, `NAME:env:PASSWORD`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frazil.errors import ConfigError, without_passwords

#: Keys of the pass-through sections whose values are secrets.
SECRET = re.compile(
    r"password|passphrase|secret|credential(?!s?[.\-](provider|source))|(^|[.\-_])token($|\.)"
    r"|user\.info|key\.pem|oauthbearer\.config|authorization|account\.key|connection-string"
    r"|api[\-_. ]?key|jaas\.config|(^|\.)header\..*(auth|key|cookie)",
    re.IGNORECASE,
)
#: A reference to a secret.
REFERENCE = re.compile(r"(env|file):.")
#: Keys whose value is a name and a secret, with a colon between them: `NAME:env:PASSWORD`.
PAIR = re.compile(r"(^|\.)credential$|user\.info$")
_PAIR_REFERENCE = re.compile(r"(?!env:|file:)([^:\s]+):((env|file):.+)")


class Settings(dict[str, str]):
    """A pass-through section. Its repr masks the values of secrets, and passwords in URLs."""

    def __repr__(self) -> str:
        return repr({key: shown(key, value) for key, value in self.items()})

    def resolved(self) -> dict[str, str]:
        """The settings with `env:` and `file:` references resolved. Never log or store them."""
        return {key: resolve(key, value) for key, value in self.items()}


def shown(key: str, value: str) -> str:
    """A setting as it may be shown."""
    return "***" if value and SECRET.search(key) else without_passwords(value)


def is_reference(key: str, value: str) -> bool:
    """Whether a secret is named by this value, and does not stand in it."""
    return bool(REFERENCE.match(value) or (PAIR.search(key) and _PAIR_REFERENCE.match(value)))


def resolve(key: str, value: str) -> str:
    if PAIR.search(key) and (pair := _PAIR_REFERENCE.fullmatch(value)):
        return f"{pair[1]}:{resolve(key, pair[2])}"
    kind, _, name = value.partition(":")
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(
                f"cannot resolve {key}: environment variable {name} is not set",
                hint=f"export {name}=…",
            )
        return os.environ[name]
    if kind == "file" and SECRET.search(key):
        return _content(key, name)
    return value


def resolve_reference(key: str, value: str) -> str:
    """As `resolve`, for a setting that may always be a reference to a file."""
    kind, _, name = value.partition(":")
    return _content(key, name) if kind == "file" else resolve(key, value)


def _content(key: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        fact = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot resolve {key}: {path}: {fact}") from None


def settings_of(section: str, values: Mapping[str, Any]) -> Settings:
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):  # TOML reads `bootstrap.servers = …` as a nested table
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), below)
        elif isinstance(value, bool):
            flat[prefix] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            flat[prefix] = str(value)
        else:
            # without the value: it may be a secret
            raise ConfigError(
                f"cannot read [{section}] {prefix}: expected text or a number, found "
                f"{type(value).__name__}",
                path=(prefix,),
            )

    if not isinstance(values, Mapping):
        raise ConfigError(
            f"cannot read [{section}]: expected a table of keys, found {type(values).__name__}"
        )
    walk("", values)
    return Settings(flat)
