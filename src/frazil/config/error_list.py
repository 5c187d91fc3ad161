"""Every error of a config file, not only the first.

In: a path and environment variables. Out: the errors, each with its line; and a config without the
settings at fault, so that the rest can still be tried out.

Every section is made key by key, and every rule of the checks (`config.rules`) is tried on its own,
except those that read a setting at fault: so one error never hides another, and none is listed for
what only follows from it. Asks no server.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frazil.config import checks, origins
from frazil.config.messages import nearest, placed, within
from frazil.config.model import (
    SECTIONS,
    Config,
    check_document,
    document,
    from_document,
    without_catalog,
)
from frazil.config.rules import Rule, errors_of
from frazil.config.section_builder import check_section, section_title
from frazil.config.sections import CatalogConfig, ConfigSections
from frazil.config.settings import Settings, settings_of
from frazil.errors import ConfigError

#: At most so many variables, and settings at fault, are taken out.
_MOST = 200
_SEVERAL = ("table", "route")
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

    def location(self, *path: str) -> str:
        """Line or variable of a setting; empty: the default."""
        return origins.location(self.locations, path)

    def add(self, error: ConfigError) -> None:
        self.errors.append(error)
        self.sections.add(error.path[0] if error.path else "")


def every_error(path: str | Path, environ: Mapping[str, str]) -> ConfigErrors:
    result = ConfigErrors()
    given = _read(path, environ, result)
    if given is None:
        return result
    base = Path(path).parent
    for error in _Sections(given, base).errors():
        error.placed(origins.location(result.locations, error.path) or Path(path).name)
        result.add(error)
    result.config = _usable(given, base)
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


class _Sections:
    """The sections of a document, each as far as its own keys can be read."""

    def __init__(self, given: Mapping[str, Any], base: Path) -> None:
        self._given = given
        self._base = base
        #: settings at fault
        self._faults: set[tuple[str, ...]] = set()
        self._made: dict[str, Any] = {}

    def errors(self) -> Iterator[ConfigError]:
        """One after the other: a rule is tried only where all that it reads is well."""
        for name in self._given:
            if name not in SECTIONS:
                near = nearest(name, SECTIONS)
                yield self._fault(f"cannot read config: unknown section [{name}]{near}", (name,))
        for name, kind in SECTIONS.items():
            yield from self._section(name, kind)
        config = ConfigSections(**self._made)
        config = dataclasses.replace(config, **without_catalog(config))
        yield from errors_of(self._rules(config), self._faults)

    @staticmethod
    def _rules(config: ConfigSections) -> Iterator[Rule]:
        yield from checks.rules(config)
        if not (config.kafka or config.sink.topics or config.sink.topic_pattern):
            yield from checks.stream_rules(config)
        yield Rule(lambda: check_document(config), (("sink", "id"),))
        yield from checks.catalog_rules(config)

    def _fault(self, message: str, path: tuple[str, ...], hint: str = "") -> ConfigError:
        """An error, whose setting is at fault, and the one that was meant."""
        self._faults.add(path)
        if meant := _SUGGESTED.search(message):
            self._faults.add((*path[:-1], meant[1]))
        return ConfigError(message, hint=hint, path=path)

    def _section(self, name: str, kind: Any) -> Iterator[ConfigError]:
        """Makes a section; what cannot be read is left out of it."""
        given = self._given.get(name, [] if name in _SEVERAL else {})
        if name in _SEVERAL:
            yield from self._several(name, kind, given)
            return
        if not isinstance(given, Mapping):
            yield self._fault(_message(lambda: check_section(name, given)), (name,))
            given = {}
        elif name == "sink" and name not in self._given and (name,) not in self._faults:
            hint = '[sink]\nid = "orders"'
            yield self._fault("cannot read config: there is no [sink]", (name,), hint)
        if kind is None:
            yield from self._passed(name, given)
            return
        given = dict(given)
        if name == "decode":
            registry = given.pop("registry", {})
            if not isinstance(registry, Mapping):
                path = ("decode", "registry")
                yield self._fault(
                    _message(lambda: check_section("decode.registry", registry)), path
                )
                registry = {}
            given["registry"], errors = self._flat(("decode", "registry"), registry)
            yield from errors
        values, errors = self._keys((name,), kind, given)
        yield from errors
        self._made[name] = kind(**values)

    def _several(self, name: str, kind: Any, given: Any) -> Iterator[ConfigError]:
        made = []
        if not isinstance(given, list):
            message = f"cannot read config: [{name}] is one {name}; expected [[{name}]]"
            yield self._fault(message, (name,))
            given = []
        for number, section in enumerate(given):
            path = (name, str(number))
            if not isinstance(section, Mapping):
                yield self._fault(_message(lambda: check_section(name, section)), path)  # noqa: B023
                section = {}
            values, errors = self._keys(path, kind, section)
            yield from errors
            made.append(kind(**values))
        self._made[f"{name}s"] = tuple(made)

    def _passed(self, name: str, given: Mapping[str, Any]) -> Iterator[ConfigError]:
        given = dict(given)
        catalog = given.pop("name", "lake") if name == "catalog" else ""
        if not isinstance(catalog, str):
            message = f"cannot read [catalog] name: expected text, found {catalog!r}"
            yield self._fault(message, ("catalog", "name"))
            catalog = "lake"
        values, errors = self._flat((name,), given)
        yield from errors
        self._made[name] = CatalogConfig(catalog, values) if name == "catalog" else values

    def _flat(
        self, path: tuple[str, ...], given: Mapping[str, Any]
    ) -> tuple[Settings, list[ConfigError]]:
        """The settings of a pass-through section that are texts."""
        values, errors = Settings(), []
        for key, value in given.items():
            try:
                with within(*path):
                    values.update(settings_of(".".join(path), {key: value}))
            except ConfigError as error:
                self._faults.add(error.path)
                errors.append(error)
        return values, errors

    def _keys(
        self, path: tuple[str, ...], kind: Any, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[ConfigError]]:
        """The keys of a section that are known and have the right type, with stand-ins for those
        that are required."""
        fields = {field.name: field for field in dataclasses.fields(kind)}
        needed = {
            name: f"{_REQUIRED.get((path[0], name), '')}{''.join(path[1:])}"
            for name, field in fields.items()
            if field.default is field.default_factory is dataclasses.MISSING
        }
        values, errors = dict(needed), []
        for key, value in given.items():
            if key not in fields:
                title = section_title(kind)
                message = f"cannot read {title}: unknown key {key!r}{nearest(key, fields)}"
                errors.append(self._fault(message, (*path, key)))
                continue
            try:
                with within(*path):
                    kind(**{**needed, key: value})
                values[key] = value
            except ConfigError as error:
                error.path = (*path, key)
                self._faults.add(error.path)
                errors.append(error)
        for name in needed:
            missing = name not in given and (*path, name) not in self._faults
            if missing and path not in self._faults:
                self._faults.add((*path, name))
                message = f"cannot read {section_title(kind)}: {name!r} is missing"
                errors.append(ConfigError(message, path=path))
        return values, errors


def _message(check: Any) -> str:
    """The message of an error."""
    try:
        check()
    except ConfigError as error:
        return error.message
    return ""


# ── a config to try out ──────────────────────────────────────────────────────────────────────────


def _usable(given: dict[str, Any], base: Path) -> Config | None:
    """The config without the settings at fault: each is taken out of the document, or corrected to
    the nearest known word, until nothing raises."""
    given = copy.deepcopy(given)
    for _ in range(_MOST):
        try:
            config = from_document(copy.deepcopy(given), base=base)
            checks.check_catalog(config)
            return config
        except ConfigError as error:
            before = copy.deepcopy(given)
            _mend(given, error)
            if given == before:  # nothing to take out
                return None
    return None


def _section(path: tuple[str, ...]) -> tuple[str, ...]:
    return path[:2] if path[:1] in (("table",), ("route",)) else path[:1]


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
