"""Where a setting comes from: a line of the TOML file, an environment variable, or the default.

In: the text of a file. Out: the setting → its place, `sink.toml:5`. A setting is named by its
section, its number where there are several, and its key, with dots between them: `table.0.name`,
`kafka.bootstrap.servers`. The parser of the standard library keeps no lines, so they are found
here. A setting whose line is not found has the place of its section, or else the file's name.
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
    """`name` is the file's, as it is to be shown."""
    found: Origins = {}
    counts: dict[str, int] = {}
    section = ""
    inside = ""  # a text over several lines, and what ends it
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
            # [table.properties] is of the last [[table]]
            section = f"{first}.{counts[first]}{dot}{rest}" if first in counts else title
            found.setdefault(section, f"{name}:{number}")
            section += "."
        elif key := _KEY.match(line):
            found.setdefault(section + _dotted(key[1]), f"{name}:{number}")
    return found


def _dotted(text: str) -> str:
    return ".".join(part.strip("\"'") for part in _PART.findall(text))


def place(origins: Mapping[str, str], path: Sequence[str]) -> str:
    """Where a setting stands, or the section it belongs to; empty: nowhere."""
    words = ".".join(path).split(".")
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((origins[name] for name in names if name in origins), "")
