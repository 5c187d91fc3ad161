"""`[[table]] select`: the columns of a table as expressions over a record. Pure; standard library.

In: texts, each an item of a SELECT list: `id`, `customer.name as name`, `cast(amount as
decimal(10,2)) as amount`, `mask(email) as email`, `* except (ssn)`. Out: a `Selection`, which
`frazil.pipeline.selection` evaluates; or `ConfigError` with a caret under the fault.

The list is deliberately no expression language: no arithmetic, no conditions, no joins. What needs
those is a `[transform]`. `parse_item` and `parse_select` are for every front end that has such a
list: a stateless `SELECT` of SQL is a list of its items' texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

from frazil.config.column_types import ColumnType, Scanner, SyntaxFault, type_of
from frazil.config.messages import nearest, within
from frazil.config.sections import TableConfig
from frazil.config.settings import REFERENCE
from frazil.errors import ConfigError

#: Words that stand for the record's key and headers, beside the fields of its value.
KEY, HEADERS = "_key", "_headers"
#: What the key's column holds: the bytes, their text, or the fields that key_format decodes.
KEY_TYPES = ("binary", "string", "struct")
_FUNCTIONS = ("cast", "mask", "sha256")


@dataclass(frozen=True, slots=True)
class Column:
    """A field of the record's value, at a path."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeyBytes:
    """The record's key."""


@dataclass(frozen=True, slots=True)
class KeyField:
    """A field of the record's key, as `[decode] key_format` decodes it; no name: all of it."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllHeaders:
    """The record's headers, in order, a name as often as it was set."""


@dataclass(frozen=True, slots=True)
class Header:
    """The value of the last header of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant: text, a whole number, a decimal, true, false, null."""

    value: str | int | Decimal | bool | None


@dataclass(frozen=True, slots=True)
class Cast:
    of: Expression
    kind: ColumnType


@dataclass(frozen=True, slots=True)
class Mask:
    """`***`, followed by the last `keep` characters of a longer text."""

    of: Expression
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Digest:
    """SHA-256 in hex, of the salt and the value. `salt`: env:NAME or file:PATH; empty: none."""

    of: Expression
    salt: str = ""


Expression = Column | KeyBytes | KeyField | AllHeaders | Header | Literal | Cast | Mask | Digest


@dataclass(frozen=True, slots=True)
class Item:
    """An expression, and the name of its column."""

    of: Expression
    name: str


@dataclass(frozen=True, slots=True)
class Star:
    """All fields of the value but those that are excluded, or that an item names."""

    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """The fields of the decoded key, each as a column, its name behind a prefix."""

    prefix: str


@dataclass(frozen=True)
class Selection:
    """The items of a SELECT list, in the order of the columns."""

    items: tuple[Item | Star | KeyColumns, ...]

    @cached_property
    def star(self) -> Star | None:
        return next((item for item in self.items if isinstance(item, Star)), None)

    @cached_property
    def named(self) -> dict[str, Expression]:
        """Column → expression, of all columns that are named."""
        return {item.name: item.of for item in self.items if isinstance(item, Item)}

    def passes(self, name: str) -> bool:
        """Is the record's field of this name a column by `*`?"""
        star = self.star
        return star is not None and name not in star.excluded and name not in self.named

    def source(self, path: str) -> tuple[str, ...] | None:
        """The path in the record's value of a column, or of a field inside it, that is a field as
        it is; None: it is computed, or no column."""
        first, *inside = [path] if path in self.named or self.passes(path) else path.split(".")
        if self.passes(first):
            return first, *inside
        of = self.named.get(first)
        return (*of.names, *inside) if isinstance(of, Column) else None

    def lacks(self, path: str) -> bool:
        """Is there certainly no column at this path?"""
        first = path if path in self.named or self.passes(path) else path.split(".")[0]
        prefixes = [item.prefix for item in self.items if isinstance(item, KeyColumns)]
        return not (
            first in self.named or self.passes(first) or any(map(first.startswith, prefixes))
        )

    @property
    def salts(self) -> set[str]:
        return {node.salt for node in self.nodes if isinstance(node, Digest) and node.salt}

    @property
    def nodes(self) -> Iterator[Expression]:
        """All expressions, inner ones too."""
        waiting = list(self.named.values())
        while waiting:
            node = waiting.pop()
            yield node
            if isinstance(node, (Cast, Mask, Digest)):
                waiting.append(node.of)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {item.name: at for at, item in enumerate(self.items) if isinstance(item, Item)}

    def place(self, name: str) -> int:
        """The number of the item that makes a column."""
        if name in self._places:
            return self._places[name]
        for at, item in enumerate(self.items):
            passing = isinstance(item, Star) and self.passes(name)
            if passing or (isinstance(item, KeyColumns) and name.startswith(item.prefix)):
                return at
        return len(self.items)

    @property
    def fields(self) -> set[str]:
        """The fields at the top of the value that it names."""
        names = {node.names[0] for node in self.nodes if isinstance(node, Column)}
        return names | set(self.star.excluded if self.star else ())

    @property
    def wants_key(self) -> bool:
        return self.decodes_key or any(isinstance(node, KeyBytes) for node in self.nodes)

    @property
    def decodes_key(self) -> bool:
        columns = any(isinstance(item, KeyColumns) for item in self.items)
        return columns or any(isinstance(node, KeyField) for node in self.nodes)

    @property
    def wants_headers(self) -> bool:
        return any(isinstance(node, (AllHeaders, Header)) for node in self.nodes)


def innermost(of: Expression) -> Expression:
    """What casts and masks are made of."""
    while isinstance(of, (Cast, Mask, Digest)):
        of = of.of
    return of


def parse_select(items: Sequence[str]) -> Selection:
    """The items of a SELECT list. Raises `ConfigError`."""
    made = [parse_item(text) for text in items]
    names = [item.name for item in made if isinstance(item, Item)]
    counts = Counter(name.lower() for name in names)
    if twins := [name for name in names if counts[name.lower()] > 1]:
        raise ConfigError(f"cannot read select: two of its columns are called {twins[0]!r}")
    if sum(isinstance(item, Star) for item in made) > 1:
        raise ConfigError("cannot read select: it has * twice")
    return Selection(tuple(made))


def parse_item(text: str) -> Item | Star:
    """One item of a SELECT list. Raises `ConfigError`."""
    try:
        scanner = Scanner(text)
        item = _star(scanner) if scanner.accept("*") else _item(scanner)
        scanner.finish()
    except SyntaxFault as error:
        raise ConfigError(f"cannot read select: {error.fact}", hint=error.shown) from None
    return item


def _star(scanner: Scanner) -> Star:
    if not scanner.accept("except"):
        return Star()
    scanner.expect("(")
    names = [scanner.name()]
    while scanner.accept(","):
        names.append(scanner.name())
    scanner.expect(")")
    return Star(tuple(names))


def _item(scanner: Scanner) -> Item:
    of = _expression(scanner)
    if scanner.accept("as"):
        return Item(of, scanner.name("a name for the column"))
    match of:
        case Column(names) | KeyField(names) if names:
            return Item(of, names[-1])
        case KeyBytes() | KeyField(()):
            return Item(of, KEY)
        case AllHeaders():
            return Item(of, HEADERS)
    raise scanner.fault("expected a name for the column: … as name")


def _expression(scanner: Scanner, depth: int = 0) -> Expression:
    token, after = scanner.peek(), scanner.peek(1)
    if depth > 20:
        raise scanner.fault("expected at most 20 levels")
    if token.kind in ("text", "number"):
        scanner.take()
        if token.kind == "text":
            return Literal(token.text)
        return _number(scanner.text, token.text, token.at)
    if token.kind == "name" and after.text == "(" and after.kind == "mark":
        return _call(scanner, depth)
    word = token.text.lower()
    if token.kind == "name" and word in ("true", "false", "null") and after.text != ".":
        scanner.take()
        return Literal({"true": True, "false": False, "null": None}[word])
    first = scanner.name("a column, a function or a constant")
    if token.kind == "name" and first == HEADERS:
        return _header(scanner)
    names = [] if token.kind == "name" and first == KEY else [first]
    ours = not names
    while scanner.accept("."):
        if ours and not names and scanner.accept("*"):
            return KeyField(())
        names.append(scanner.name())
    if ours:
        return KeyField(tuple(names)) if names else KeyBytes()
    return Column(tuple(names))


def _number(text: str, number: str, at: int) -> Literal:
    digits = number.lstrip("+-").replace(".", "")
    if "." not in number and len(digits) <= 19 and -(2**63) <= int(number) < 2**63:
        return Literal(int(number))
    if len(digits) > 38:
        raise SyntaxFault("expected a number of at most 38 digits", text, at)
    return Literal(Decimal(number))


def _header(scanner: Scanner) -> Expression:
    if not scanner.accept("["):
        return AllHeaders()
    if scanner.peek().kind != "text":
        raise scanner.fault("expected the name of a header in quotes, as _headers['trace']")
    name = scanner.take().text
    scanner.expect("]")
    return Header(name)


def _call(scanner: Scanner, depth: int) -> Expression:
    token = scanner.take()
    word = token.text.lower()
    if word not in _FUNCTIONS:
        raise SyntaxFault(
            f"unknown function {token.text!r}{nearest(word, _FUNCTIONS)}. Other expressions are "
            "for a [transform]",
            scanner.text,
            token.at,
        )
    scanner.expect("(")
    of = _expression(scanner, depth + 1)
    made: Expression
    if word == "cast":
        scanner.expect("as")
        made = Cast(of, type_of(scanner))
    elif word == "mask":
        keep = 0
        if scanner.accept(","):
            if not re.fullmatch(r"\d{1,4}", scanner.peek().text):
                raise scanner.fault("expected how many of the last characters to keep")
            keep = int(scanner.take().text)
        made = Mask(of, keep)
    else:
        salt = ""
        if scanner.accept(","):
            if scanner.peek().kind != "text" or not REFERENCE.match(scanner.peek().text):
                raise SyntaxFault(
                    "expected a salt as 'env:NAME' or 'file:PATH'",  # without it: it is a secret
                    scanner.text[: scanner.peek().at],
                    scanner.peek().at,
                )
            salt = scanner.take().text
        made = Digest(of, salt)
    scanner.expect(")")
    return made


def table_selection(table: TableConfig) -> Selection | None:
    """The columns of a table beside its metadata columns: those of `select`, then those of the
    key and the headers. None: the fields of the record's value, as they are."""
    with within("select"):
        parsed = parse_select(table.select)
    items = [*parsed.items] or [Star()]
    if table.key_column:
        items.append(Item(_key_of_type(table.key_column_type), table.key_column))
    if table.key_fields_prefix:
        items.append(KeyColumns(table.key_fields_prefix))
    if table.headers_column:
        items.append(Item(AllHeaders(), table.headers_column))
    text = ColumnType("string")
    items += [Item(Cast(Header(name), text), column) for column, name in table.headers.items()]
    if items == [Star()]:
        return None
    made = Selection(tuple(items))
    if table.mode == "changelog" and made.lacks("_op"):  # says what the row is
        made = Selection((*items, Item(Column(("_op",)), "_op")))
    return made


def _key_of_type(kind: str) -> Expression:
    if kind == "string":
        return Cast(KeyBytes(), ColumnType("string"))
    return KeyField(()) if kind == "struct" else KeyBytes()
