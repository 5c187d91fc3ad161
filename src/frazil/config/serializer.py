"""A config as the document of its TOML file: what differs from the defaults, and nothing else.

In: a checked config. Out: nested dicts of JSON values, from which `config.model.from_document`
makes the same config. References to secrets stay references. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from frazil.config.model import Config
from frazil.errors import ConfigError

_PASSED = ("kafka", "spark")


def document_of(config: Config) -> dict[str, Any]:
    """Raises ConfigError for a function that has no name, which only Python can say."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        name = field.name
        if name == "catalog":
            content: Any = {"name": section.name, **section.properties}
        elif name in _PASSED:
            content = dict(section)
        elif isinstance(section, tuple):
            name = name.removesuffix("s")
            content = [_changed(name, item) for item in section]
        else:
            content = _changed(name, section)
        if content:
            made[name] = content
    return made


def _changed(name: str, section: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            values[field.name] = _plain(f"[{name}] {field.name}", value)
    return values


def _plain(setting: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(setting, below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(setting, item) for item in value]
    if callable(value):
        raise ConfigError(
            f"cannot write {setting}: it is a function of this process; expected module:function",
        )
    return value
