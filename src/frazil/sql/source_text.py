"""The text of statements, and where something stands in it.

In: a text and the name of its file. Out: `orders.sql:3:14`, and errors that show the line with a
caret below the column. Values of secrets are masked, whatever the text is: it may be broken.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import cached_property

from frazil.config.settings import REFERENCE, SECRET
from frazil.errors import SqlError

#: How much of a long line an error shows.
_WIDTH = 96
_MASK = "***"
#: Any text splits into these: a text or comment without an end reaches to the end.
_PIECE = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))|(?P<string>'(?:[^']|'')*(?:'|\Z))|(?P<quoted>\"[^\"]*(?:\"|\Z))"
    r"|(?P<word>\w[\w.\-]*)|(?P<end>[,();])|(?P<equal>=)|\s+|.",
    re.DOTALL,
)
#: Words that a value follows without a sign between them.
_BEFORE = ("password", "passphrase", "token", "credential", "as", "key")
#: Words that somebody may have meant to be one of a secret.
_ALIKE = re.compile(r"pass|pw\b|pwd|secr|cred|token|webhook")
#: How many words before a value may make it a secret.
_NEAR = 50
_USER_INFO = re.compile(
    r"(?<=://)[^/\s'\"@]*:[^/\s'\"@]*(?=@)"
    r"|(?<=:)[^/\s:@'\"]+/[^/\s:@'\"]+(?=@)"
    r"|(?:(?<=password=)|(?<=api_key=)|(?<=apikey=)|(?<=access_key=)|(?<=token=)|(?<=secret=)"
    r"|(?<=sig=)|(?<=pwd=))[^&;\s'\"]+",
    re.I,
)


@dataclass(frozen=True)
class SourceText:
    name: str
    text: str = field(repr=False)

    def position(self, at: int) -> tuple[int, int]:
        """Line and column, from 1."""
        at = min(at, len(self.text))
        start = self.text.rfind("\n", 0, at) + 1
        return self.text.count("\n", 0, at) + 1, at - start + 1

    def location(self, at: int) -> str:
        line, column = self.position(at)
        return f"{self.name}:{line}:{column}"

    def error(self, at: int, fact: str, *, hint: str = "", path: tuple[str, ...] = ()) -> SqlError:
        """`cannot read orders.sql:3:14: FACT`, with the line."""
        message = f"cannot read {self.location(at)}: {fact}"
        return SqlError(message, hint=hint, path=path, excerpt=self.excerpt(at))

    def excerpt(self, at: int) -> str:
        at = min(at, len(self.text))
        start = self.text.rfind("\n", 0, at) + 1
        end = self.text.find("\n", at)
        end = len(self.text) if end < 0 else end
        first = max(start, at - _WIDTH // 2)
        last = min(end, first + _WIDTH)
        before = ("…" if first > start else "") + self._shown(first, at)
        after = self._shown(at, last) + ("…" if last < end else "")
        number = str(self.position(at)[0])
        gap = " " * (len(number) + 3 + _columns(before))
        return f"  {number} | {before}{after}\n  {gap}^"

    def _shown(self, start: int, end: int) -> str:
        """This part of the text on one line, with secrets masked."""
        pieces, at = [], start
        for first, last in self.secrets:
            if last > start and first < end:
                pieces += [self.text[at : max(at, first)], _MASK if first >= start else ""]
                at = max(at, min(last, end))
        pieces.append(self.text[at:end])
        return "".join(c if c.isprintable() else " " for c in "".join(pieces))

    @cached_property
    def secrets(self) -> list[tuple[int, int]]:
        """Where values stand that may be secrets."""
        return secret_spans(self.text)


def secret_spans(text: str) -> list[tuple[int, int]]:
    """The values behind words like PASSWORD, SECRET … AS or TOKEN; references are none."""
    spans: list[tuple[int, int]] = []
    words: list[str] = []
    equal = False
    for piece in _PIECE.finditer(text):
        kind, value = piece.lastgroup, piece[0]
        phrase = ".".join(words[-_NEAR:])
        secret = bool(SECRET.search(phrase) or _ALIKE.search(phrase))
        inner = {"comment": 2, "string": 1, "quoted": 1}.get(kind or "", 0)
        unclosed = inner == 1 and (len(value) == 1 or value[-1] != value[0])
        if (kind == "comment" or unclosed) and not secret:  # there may be a statement in it
            at = piece.start() + inner
            spans += [(at + first, at + last) for first, last in secret_spans(value[inner:])]
        elif kind in ("string", "quoted"):
            inside = value[1:].rstrip("'\"")
            if secret and not _reference(inside):
                spans.append(piece.span())
            elif hidden := [m.span() for m in _USER_INFO.finditer(value)]:
                spans += [(piece.start() + a, piece.start() + b) for a, b in hidden]
            words.append(inside.lower())
        elif kind == "word":
            named = bool(words) and words[-1] == "secret"
            bare = secret and not named and value.lower() != "secret"
            if bare and (equal or words[-1] in _BEFORE):
                spans.append(piece.span())
            words.append(value.lower())
        elif kind == "end":
            words, equal = [], False
        equal = kind == "equal" or (equal and not value.strip())
    return spans


def _reference(value: str) -> bool:
    return bool(REFERENCE.match(value)) and "\n" not in value


def masked(text: str) -> str:
    """The text with `***` in place of what may be a secret."""
    pieces, at = [], 0
    for first, last in secret_spans(text):
        pieces += [text[at:first], _MASK]
        at = last
    return "".join([*pieces, text[at:]])


def _columns(text: str) -> int:
    """Columns on a terminal: wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
