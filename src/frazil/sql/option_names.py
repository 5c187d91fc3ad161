"""The names of options: words of SQL ↔ settings of the config, by one rule.

In: `COMMIT INTERVAL`, `COMPLETENESS IDLE_TIMEOUT`, `SPARK 'spark.master'`. Out: the setting,
`("sink", "commit_interval")`. The sections and their keys are the dataclasses of
`frazil.config.sections`; nothing is listed twice, so a new key can be said in SQL at once.

The rule for an option of a sink: a key of `[sink]`; else one of `[[table]]`; else the name of a
section and one of its keys. A key of a section that passes through stands in quotes.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from frazil.config.messages import nearest
from frazil.config.sections import ConfigSections
from frazil.config.settings import Settings
from frazil.sql.statements import Setting


@dataclass(frozen=True)
class Section:
    #: as in the file: `table`, `dead_letters`, `decode.registry`
    name: str
    #: key → its type, as declared; empty: keys pass through
    keys: dict[str, str]
    #: attribute of `ConfigSections`
    attribute: str
    several: bool = False

    @property
    def passes_through(self) -> bool:
        return not self.keys


@cache
def sections() -> dict[str, Section]:
    made: dict[str, Section] = {}
    for attribute, hint in typing.get_type_hints(ConfigSections).items():
        several = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if several else hint
        name = attribute.removesuffix("s") if several else attribute
        if kind is Settings:
            made[name] = Section(name, {}, attribute)
            continue
        types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
        nested = [key for key, text in types.items() if text == "Settings"]
        if "properties" in nested:  # [catalog]: what is not its own passes through
            made[name] = Section(name, {}, attribute)
            continue
        for key in nested:
            made[f"{name}.{key}"] = Section(f"{name}.{key}", {}, attribute)
            del types[key]
        made[name] = Section(name, types, attribute, several)
    return made


#: What the statement itself says, and no option.
SAID = {("sink", "id"), ("sink", "topics"), ("sink", "topic_pattern"), ("table", "name")}
SAID |= {("route", "to"), ("route", "skip")}
#: Other words for a key.
_ALIASES = {"topic": "topics", "partitioned_by": "partition_by"}
#: Between the words of a key that passes through.
SEPARATORS = {"catalog": "-"}


class UnknownOption(Exception):
    """`str()`: the nearest known, or what is expected."""


def setting_of(words: tuple[str, ...], key: str, scopes: tuple[str, ...]) -> Setting:
    """`scopes`: the sections whose keys need no prefix, in this order. With `sink` among them, any
    other section may be named."""
    name = "_".join(words).lower()
    if not key:
        plain = _ALIASES.get(name, name)
        for scope in scopes:
            if plain in sections()[scope].keys:
                return scope, plain
    elif not words and "sink" in scopes and key.startswith("spark."):
        return "spark", key
    if not words:
        plain = shown(key.replace("-", "_").lower())
        if plain in option_names(scopes):
            raise UnknownOption(f"; expected {plain} without quotes")
        raise UnknownOption("; expected its section before it, as in KAFKA 'client.id'")
    for section in _candidates(scopes):
        rest = _behind(section, name, bool(key))
        if rest is None or not (rest or key):
            continue
        if section.passes_through:
            return section.name, key or rest.replace("_", SEPARATORS.get(section.name, "."))
        if not key and rest in section.keys:
            return section.name, rest
        if key and section.keys.get(rest, "").startswith("dict"):
            return f"{section.name}.{rest}", key
    known = list(option_names(scopes))
    if elsewhere := [option for option in known if option.endswith(f" {shown(name)}")]:
        raise UnknownOption(f"; did you mean {elsewhere[0]!r}?")
    raise UnknownOption(nearest(shown(name), known))


def _candidates(scopes: tuple[str, ...]) -> Iterator[Section]:
    """Sections that a prefix may name, the longest name first."""
    inside = {section for section in sections() if section.split(".")[0] in scopes}
    known = set(sections()) - {"route"} if "sink" in scopes else inside
    yield from (sections()[name] for name in sorted(known, key=lambda n: (-len(n), n)))


def _behind(section: Section, name: str, keyed: bool) -> str | None:
    """What is behind the section's name; None: it does not begin with it."""
    lead = section.name.replace(".", "_")
    inner = section.name.partition(".")[2]
    for word in (lead, inner):
        if word and (name == word or name.startswith(f"{word}_")):
            return name[len(word) + 1 :]
    if keyed and name in section.keys:  # PROPERTIES 'write.format.default'
        return name
    return None


def option_names(scopes: tuple[str, ...]) -> Iterator[str]:
    """All names that are known in these scopes, as one would write them."""
    first: set[str] = set()
    for scope in scopes:
        for key in sections()[scope].keys:
            if (scope, key) not in SAID and key not in first:
                first.add(key)
                yield shown(key)
    if "sink" in scopes:
        for section in sections().values():
            if section.name not in (*scopes, "route"):
                yield from (f"{shown(section.name)} {shown(key)}" for key in section.keys)


def option_name(setting: Setting, scopes: tuple[str, ...]) -> str:
    """The name of a setting in these scopes: the shortest that the rule reads back."""
    section, key = setting
    known = sections().get(section)
    if known and key in known.keys:
        for words in (shown(key), f"{shown(section)} {shown(key)}"):
            with suppress(UnknownOption):
                if setting_of(tuple(words.split()), "", scopes) == setting:
                    return words
    quoted = "'" + key.replace("'", "''") + "'"
    if section == "spark" and key.startswith("spark."):
        return quoted
    if section.split(".")[0] in scopes[:1] and "." in section:
        return f"{shown(section.partition('.')[2])} {quoted}"
    return f"{shown(section)} {quoted}"


def shown(key: str) -> str:
    return key.replace("_", " ").replace(".", " ").upper()


def type_of(setting: Setting) -> str:
    """The declared type of a setting; that of keys that pass through is `str`."""
    section = sections().get(setting[0])
    return section.keys.get(setting[1], "str") if section else "str"


_TOML = re.compile(r"\[\[?(\w+(?:\.\w+)?)\]\]?(?: (\w+)\b)?")
#: What sections are called in statements.
_CALLED = {"table": "TABLE", "route": "ROUTE", "transform": "a query for Spark", "sink": "the sink"}
_CALLED |= {"kafka": "the Kafka connection", "catalog": "the catalog's connection"}
_CALLED |= {"decode.registry": "the registry's connection", "decode": "FORMAT"}
_CALLED |= {"dead_letters": "DEAD LETTERS TABLE"}


def in_words(text: str) -> str:
    """A message about settings of TOML, in the words of statements."""

    def words(match: re.Match[str]) -> str:
        section, key = match[1], match[2] or ""
        known = sections().get(section)
        if known and key in known.keys:
            if (section, key) in SAID:
                return shown(key)
            return option_name((section, key), ("sink", "table"))
        if known is None:
            return match[0]
        called = _CALLED.get(section, shown(section))
        return f"{called} {key}".rstrip()

    lines = []
    for line in text.splitlines():
        setting = re.fullmatch(r"(\w+) = (.*)", line)
        if setting:
            value = setting[2].replace("'", "''").replace('"', "'")
            value = re.sub(r"^\[(.*)\]$", r"(\1)", value)
            lines.append(f"{shown(setting[1])} = {value}")
        elif not re.fullmatch(r"\[\[?[\w.]+\]\]?", line):
            lines.append(_TOML.sub(words, line))
    return ", ".join(lines) if "\n" in text else "".join(lines)
