"""How a section is made: known keys only, and each value in the type of its field.

In: a dataclass of `frazil.config.sections`, and a table of keys or keyword arguments. Out: the
section, with lists as tuples and texts of variables as numbers. A wrong type, an unknown or a
missing key raises `ConfigError` with the setting's name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from frazil.config.messages import nearest, placed, within
from frazil.config.settings import settings_of
from frazil.errors import ConfigError, without_passwords

T = TypeVar("T")


class CheckedSection:
    """Checks sections made in Python like those of a file: lists become tuples, and an error names
    the setting with a wrong type."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):  # type: ignore[arg-type]
            where = f"{section_title(type(self))} {setting.name}"
            with placed(lambda path: f"argument {path[0]}"), within(setting.name):
                fitted = _fit(where, str(setting.type), getattr(self, setting.name))
            object.__setattr__(self, setting.name, fitted)


def section_title(kind: Any) -> str:
    """`[sink]`, `[[table]]`: the section name at the start of the class's docstring."""
    match = re.search(r"`(\[+[\w.]+\]+)`", kind.__doc__ or "")
    assert match, kind
    return match[1]


def section_of(kind: Callable[..., T], given: Any) -> T:
    if isinstance(given, Mapping):
        return _section(kind, section_title(kind), given)
    if type(given) is not kind:
        raise ConfigError(
            f"cannot read {section_title(kind)}: expected a table of keys, found {given!r}"
        )
    return cast(T, given)


def numbered_sections(name: str, kind: Callable[..., T], given: Any) -> tuple[T, ...]:
    made = []
    for number, section in enumerate(given):
        with within(name, str(number)):
            made.append(section_of(kind, section))
    return tuple(made)


def _section(kind: Callable[..., T], title: str, values: Mapping[str, Any]) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(
                f"cannot read {title}: unknown key {key!r}{nearest(key, fields)}", path=(key,)
            )
        taken[key] = value
    required = [
        n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in taken:
            raise ConfigError(f"cannot read {title}: {name!r} is missing")
    return kind(**taken)


def check_section(section: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"cannot read config: [{section}] is {values!r}; expected a table of keys",
            path=tuple(section.split(".")),
        )


#: Types of fields, as named in messages.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple[str, ...]": "a list of texts",
    "dict[str, str]": "a table of texts",
    "Settings": "a table of keys",
    "str | Callable[..., Any]": "module:function",
    "str | dict[str, dict[str, int]]": "earliest, latest or a cut",
}


def _fit(where: str, kind: str, value: Any) -> Any:
    try:
        if kind == "int" and isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
        if kind == "float" and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
        if kind == "bool" and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if kind.startswith("str | Callable") and (isinstance(value, str) or callable(value)):
            return value
        if kind == "str" and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
        if kind.startswith("tuple") and isinstance(value, (list, tuple)):
            return tuple(_text(item) for item in value)
        if kind == "dict[str, str]" and isinstance(value, Mapping):
            return {str(k): _text(v) for k, v in value.items()}
        if kind.startswith("str | dict") and isinstance(value, (str, Mapping)):
            return value
        if kind == "Settings" and isinstance(value, Mapping):
            return settings_of(where.split()[0].strip("[]"), value)
    except ValueError:
        pass
    raise ConfigError(f"cannot read {where}: expected {_WORDS[kind]}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = without_passwords(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}…"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
