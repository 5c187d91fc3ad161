"""Every error of a config file, not only the first.

In: a path and environment variables. Out: the errors, in the order in which they were found, and a
config in which each setting at fault is replaced, so that the rest can still be tried out.

The checks of a config raise at the first error. Here the setting that an error names is taken out
of the document (or corrected to the nearest known word), and the checks run again, until none
raises. An error that names a setting taken out before is its consequence, and is left out. Asks no
server.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frazil.config import origins
from frazil.config.checks import check_catalog
from frazil.config.messages import placed
from frazil.config.model import Config, document, from_document
from frazil.errors import ConfigError

#: At most so many errors are looked for.
_MOST = 200
#: Stand-ins for required settings and sections that are missing or at fault.
_SECTIONS: Mapping[str, Any] = {
    "sink": {"id": "unnamed", "topics": ["unnamed"]},
    "kafka": {"bootstrap.servers": "unnamed"},
    "catalog": {"type": "hadoop", "warehouse": "/unnamed"},
    "table": [{"name": "unnamed.unnamed"}],
    "decode": {"format": "raw"},
}
_REQUIRED = {
    ("sink", "id"): "unnamed",
    ("table", "name"): "unnamed.unnamed",
    ("kafka", "bootstrap.servers"): "unnamed",
}
_SUGGESTED = re.compile(r"did you mean '([^']+)'")
_VARIABLE = re.compile(r"environment variable (FRAZIL_\w+)")


class ConfigErrors:
    """The errors of a config file."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []
        #: the config without the settings at fault; None: there is not enough of it
        self.config: Config | None = None
        self.locations: origins.Origins = {}
        #: sections with an error
        self.sections: set[str] = set()
        #: names of the settings that were taken out, by section
        self._gone: dict[tuple[str, ...], set[str]] = {}

    def location(self, *path: str) -> str:
        """Line or variable of a setting; empty: the default."""
        return origins.location(self.locations, path)

    def add(self, error: ConfigError) -> None:
        section = _section(error.path)
        if not any(_names(error, name) for name in self._gone.get(section, ())):
            self.errors.append(error)
        self.sections.add(error.path[0] if error.path else "")
        if len(error.path) > len(section):
            self._gone.setdefault(section, set()).add(error.path[-1])


def every_error(path: str | Path, environ: Mapping[str, str]) -> ConfigErrors:
    result = ConfigErrors()
    given = _read(path, environ, result)
    if given is None:
        return result
    for _ in range(_MOST):
        try:
            with placed(
                lambda setting: origins.location(result.locations, setting) or Path(path).name
            ):
                config = from_document(copy.deepcopy(given), base=Path(path).parent)
                check_catalog(config)
            result.config = config
            break
        except ConfigError as error:
            before = copy.deepcopy(given)
            result.add(error)
            _mend(given, error)
            if given == before:  # nothing to take out: what is behind it stays unknown
                break
    return result


def _read(
    path: str | Path, environ: Mapping[str, str], result: ConfigErrors
) -> dict[str, Any] | None:
    """The file with the variables that can be read."""
    known = dict(environ)
    for _ in range(_MOST):
        result.locations.clear()
        try:
            with placed(
                lambda setting: origins.location(result.locations, setting) if setting else ""
            ):
                return document(path, known, result.locations)
        except ConfigError as error:
            variable = _VARIABLE.search(error.message)
            result.errors.append(error)
            result.sections.add("")
            if variable is None or known.pop(variable[1], None) is None:
                return None
    return None


def _section(path: tuple[str, ...]) -> tuple[str, ...]:
    return path[:2] if path[:1] in (("table",), ("route",)) else path[:1]


def _names(error: ConfigError, setting: str) -> bool:
    """Does the message name the setting, as its own words?"""
    return (
        bool(setting)
        and re.search(rf"(?<![\w.]){re.escape(setting)}(?!\w)", error.message) is not None
    )


def _mend(given: dict[str, Any], error: ConfigError) -> None:
    """Take out the setting at fault, correct it, or put a stand-in for a section."""
    path = error.path or _missing(error)
    parent, key = _parent(given, path)
    if parent is None:
        if path and path[0] in _SECTIONS:
            given[path[0]] = copy.deepcopy(_SECTIONS[path[0]])
        return
    suggested = _SUGGESTED.search(error.message)
    known = (_section(path)[0], key)
    if "unknown section" in error.message:
        parent.pop(key)
    elif isinstance(parent, list):
        parent[int(key)] = (
            {"name": f"unnamed.unnamed{key}"} if path[0] == "table" else {"skip": True}
        )
    elif "unknown key" in error.message:
        value = parent.pop(key)
        if suggested and suggested[1] not in parent:
            parent[suggested[1]] = value
    elif suggested and parent.get(key) != suggested[1]:
        parent[key] = suggested[1]
    elif known in _REQUIRED:
        number = path[1] if known[0] == "table" else ""
        stand_in = f"{_REQUIRED[known]}{number}"
        if parent.get(key) == stand_in:
            return
        parent[key] = stand_in
    elif len(path) == 1 and path[0] in _SECTIONS and key in parent:
        section = parent[key]
        stand_in_section = copy.deepcopy(_SECTIONS[path[0]])
        merged = isinstance(section, dict) and isinstance(stand_in_section, dict)
        parent[key] = {**section, **stand_in_section} if merged else stand_in_section
    else:
        parent.pop(key, None)


def _missing(error: ConfigError) -> tuple[str, ...]:
    """The section of an error that names none."""
    match = re.search(r"\[+(\w+)\]+", error.message)
    return (match[1],) if match else ()


def _parent(given: dict[str, Any], path: tuple[str, ...]) -> tuple[Any, str]:
    """What holds the setting, and its key in there; None: the file does not have it."""
    where: Any = given
    words = list(path)
    while words:
        # TOML nests dotted keys, unless they are quoted.
        options = [".".join(words[:count]) for count in range(len(words), 0, -1)]
        if isinstance(where, dict):
            key = next((option for option in options if option in where), None)
            if key is None:
                dotted = [w for word in words for w in word.split(".")]
                if dotted != words and dotted[0] in where:
                    words = dotted
                    continue
                required = len(words) == 1 and (_section(path)[0], words[0]) in _REQUIRED
                return (where, words[0]) if required else (None, "")
            taken = len(key.split(".")) if key not in words[:1] else 1
        elif isinstance(where, list) and words[0].isdigit() and int(words[0]) < len(where):
            key, taken = words[0], 1
        else:
            return None, ""
        if taken >= len(words):
            return where, key
        where = where[int(key)] if isinstance(where, list) else where[key]
        words = words[taken:]
    return None, ""
