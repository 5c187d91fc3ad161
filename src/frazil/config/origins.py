"""The origin of a setting: a line of the TOML file, an environment variable, or the default.

In: the text of a file. Out: setting → origin, `sink.toml:5`. The name of a setting is its section,
its number if there are several, and its key, joined by dots: `table.0.name`,
`kafka.bootstrap.servers`. The standard library's parser keeps no line numbers, so they are
determined here. A setting whose line is unknown has the origin of its section, or the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Origins = dict[str, str]

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\-\"' ]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(
    r"\s*((?:[\w\-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w\-]+|\"[^\"]*\"|'[^']*'))*)\s*="
)
_PART = re.compile(r"[\w\-]+|\"[^\"]*\"|'[^']*'")


def lines(text: str, name: str) -> Origins:
    """The line of each setting and section in `text`; `name` is the file's name to show."""
    locations: Origins = {}
    counts: dict[str, int] = {}
    section = ""
    inside = ""  # the quotes that end a multi-line text
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            inside = "" if inside in line else inside
            continue
        for quotes in ('"""', "'''"):
            if line.count(quotes) % 2:
                inside = quotes
        if header := _HEADER.fullmatch(line):
            title = _dotted(header[2])
            if header[1] == "[[":
                counts[title] = counts.get(title, -1) + 1
            first, dot, rest = title.partition(".")
            # [table.properties] belongs to the last [[table]]
            section = f"{first}.{counts[first]}{dot}{rest}" if first in counts else title
            locations.setdefault(section, f"{name}:{number}")
            section += "."
        elif key := _KEY.match(line):
            locations.setdefault(section + _dotted(key[1]), f"{name}:{number}")
    return locations


def _dotted(text: str) -> str:
    return ".".join(part.strip("\"'") for part in _PART.findall(text))


def location(origins: Mapping[str, str], path: Sequence[str]) -> str:
    """The origin of a setting, or of its section; empty: unknown."""
    words = ".".join(path).split(".")
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((origins[name] for name in names if name in origins), "")
