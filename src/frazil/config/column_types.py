"""Types and names of columns as text → values. Pure.

In: `decimal(10,2)`, `list<struct<id: long>>`, `timestamptz(ms)`, `customer.name`. Out: a
`ColumnType`, the names of a path. Any other text raises `SyntaxFault` with the position at which
it went wrong; the caller adds the setting. The words are Iceberg's, with Spark's as synonyms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from frazil.config.messages import nearest

#: Units of numbers that count from 1970, as `timestamptz(ms)`, or from midnight, as `time(ms)`:
#: unit → digits of a second.
EPOCH_UNITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
#: The unit of numbers that are dates: days from 1970, `date(d)`.
DAYS = "d"
_SYNONYMS = {
    "bool": "boolean",
    "integer": "int",
    "bigint": "long",
    "text": "string",
    "varchar": "string",
    "bytes": "binary",
    "array": "list",
    "row": "struct",
    "timestamp_ntz": "timestamp",
    "timestamp_ltz": "timestamptz",
}
_PLAIN = (
    "boolean",
    "int",
    "long",
    "float",
    "double",
    "string",
    "binary",
    "date",
    "time",
    "timestamp",
    "timestamptz",
    "timestamp_ns",
    "timestamptz_ns",
    "uuid",
)
TYPES = (*_PLAIN, "decimal(p,s)", "fixed(n)", "list<t>", "map<string, t>", "struct<name: t, …>")
#: Words that a type may begin with.
_WORDS = (*_PLAIN, "decimal", "fixed", "list", "map", "struct", *_SYNONYMS)
#: How deep types may be nested.
_DEPTH = 30


class SyntaxFault(ValueError):
    """What is wrong with a text, and where."""

    def __init__(self, fact: str, text: str, at: int) -> None:
        super().__init__(fact)
        self.fact, self.text, self.at = fact, text, at

    @property
    def shown(self) -> str:
        """The text, with a caret under the place."""
        start = max(0, self.at - 60)
        text = self.text[start : self.at + 60].replace("\n", " ")
        return f"in\n    {text}\n    {' ' * (self.at - start)}^"


@dataclass(frozen=True, slots=True)
class ColumnType:
    name: str
    #: precision and scale of a decimal, length of fixed
    numbers: tuple[int, ...] = ()
    #: unit of a timestamp or a time that is a number: s, ms, us, ns; of a date: d
    epoch: str = ""
    #: fields of a struct; of a list `element`, of a map `key` and `value`
    inside: tuple[tuple[str, ColumnType], ...] = ()

    def __str__(self) -> str:
        if self.name == "struct":
            fields = ", ".join(f"{quoted(name)}: {kind}" for name, kind in self.inside)
            return f"struct<{fields}>"
        if self.inside:
            return f"{self.name}<{', '.join(str(kind) for _, kind in self.inside)}>"
        numbers = self.epoch or ", ".join(map(str, self.numbers))
        return f"{self.name}({numbers})" if numbers else self.name


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # name, quoted, text, number, mark, end
    text: str
    at: int


_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?![\w.])|(?P<name>[^\W\d]\w*)"
    r"|`(?P<back>(?:[^`]|``)+)`|\"(?P<double>(?:[^\"]|\"\")+)\"|'(?P<text>(?:[^']|'')*)'"
    r"|(?P<mark>[*.,:()<>\[\]])"
)


class Scanner:
    """The tokens of a text, one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = list(self._scan())
        self._next = 0

    def _scan(self) -> Iterator[Token]:
        at = 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise SyntaxFault(f"unexpected {self.text[at]!r}", self.text, at)
            kind, word = match.lastgroup or "", match[match.lastgroup or 0]
            if kind in ("back", "double"):
                mark = "`" if kind == "back" else '"'
                yield Token("quoted", word.replace(mark * 2, mark), at)
            elif kind == "text":
                yield Token("text", word.replace("''", "'"), at)
            elif kind != "space":
                yield Token(kind, word, at)
            at = match.end()
        yield Token("end", "", at)

    def peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def take(self) -> Token:
        token = self.peek()
        self._next += 1
        return token

    def accept(self, mark: str) -> bool:
        """Take the next token if it is this mark or, in any case, this word."""
        token = self.peek()
        taken = token.kind in ("mark", "name") and token.text.lower() == mark
        self._next += taken
        return taken

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self.fault(f"expected {mark!r}")

    def name(self, meaning: str = "a name") -> str:
        token = self.peek()
        if token.kind not in ("name", "quoted"):
            raise self.fault(f"expected {meaning}")
        return self.take().text

    def fault(self, expected: str, at: Token | None = None) -> SyntaxFault:
        token = at or self.peek()
        word = repr(token.text) if token.kind != "end" else "the end"
        return SyntaxFault(f"{expected}, found {word}", self.text, token.at)

    def finish(self) -> None:
        if self.peek().kind != "end":
            raise self.fault("expected the end")


def column_type(text: str) -> ColumnType:
    """The type that a text names."""
    scanner = Scanner(text)
    kind = type_of(scanner)
    scanner.finish()
    return kind


def column_path(text: str) -> tuple[str, ...]:
    """The names of `customer.name`; names with other characters stand in backticks."""
    scanner = Scanner(text)
    names = [scanner.name()]
    while scanner.accept("."):
        names.append(scanner.name())
    scanner.finish()
    return tuple(names)


def quoted(name: str) -> str:
    return name if re.fullmatch(r"[^\W\d]\w*", name) else "`" + name.replace("`", "``") + "`"


def type_of(scanner: Scanner, depth: int = 0) -> ColumnType:
    """The type at the scanner's place."""
    token = scanner.peek()
    if token.kind != "name":
        raise scanner.fault("expected a type")
    if depth > _DEPTH:
        raise scanner.fault(f"expected at most {_DEPTH} levels")
    word = scanner.take().text.lower()
    word = _SYNONYMS.get(word, word)
    if word == "decimal":
        numbers = _numbers(scanner, 2)
        if not (1 <= numbers[0] <= 38 and 0 <= numbers[1] <= numbers[0]):
            raise scanner.fault("expected decimal(p,s) with p up to 38 and s up to p", token)
        return ColumnType(word, numbers)
    if word == "fixed":
        numbers = _numbers(scanner, 1)
        if not 1 <= numbers[0] <= 2**31 - 1:
            raise scanner.fault("expected fixed(n) with n from 1", token)
        return ColumnType(word, numbers)
    if word == "list":
        scanner.expect("<")
        inside: list[tuple[str, ColumnType]] = [("element", type_of(scanner, depth + 1))]
    elif word == "map":
        scanner.expect("<")
        at = scanner.peek()
        if type_of(scanner, depth + 1).name != "string":
            raise scanner.fault("expected a map with keys of type string", at)
        scanner.expect(",")
        inside = [("key", ColumnType("string")), ("value", type_of(scanner, depth + 1))]
    elif word == "struct":
        inside = _fields(scanner, depth)
    elif word in _PLAIN:
        return ColumnType(word, epoch=_epoch(scanner, word))
    else:
        raise SyntaxFault(
            f"unknown type {token.text!r}{nearest(token.text.lower(), _WORDS, TYPES)}",
            scanner.text,
            token.at,
        )
    scanner.expect(">")
    return ColumnType(word, inside=tuple(inside))


def _fields(scanner: Scanner, depth: int) -> list[tuple[str, ColumnType]]:
    fields: dict[str, ColumnType] = {}
    scanner.expect("<")
    while True:
        at = scanner.peek()
        name = scanner.name()
        if name in fields:
            raise scanner.fault("expected another name", at)
        scanner.accept(":")
        fields[name] = type_of(scanner, depth + 1)
        if not scanner.accept(","):
            return list(fields.items())


def _numbers(scanner: Scanner, count: int) -> tuple[int, ...]:
    numbers = []
    scanner.expect("(")
    for number in range(count):
        if number:
            scanner.expect(",")
        if not scanner.peek().text.isdecimal():
            raise scanner.fault("expected a whole number")
        numbers.append(int(scanner.take().text[:12]))
    scanner.expect(")")
    return tuple(numbers)


def _epoch(scanner: Scanner, word: str) -> str:
    """The unit in `timestamptz(ms)`; empty if there is none."""
    units = (DAYS,) if word == "date" else tuple(EPOCH_UNITS)
    if not word.startswith(("timestamp", "time", "date")) or not scanner.accept("("):
        return ""
    unit = scanner.peek()
    if unit.text not in units:
        raise scanner.fault(f"expected one of {', '.join(units)}")
    scanner.take()
    scanner.expect(")")
    return unit.text
