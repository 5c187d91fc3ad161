"""Names of tables that come from data: templates, and what no name may be. Runs on executors; pure.

In: the names of `[[table]]`, with templates among them, and reserved names. Out: `TableNames`,
which fills templates with words from data, and admits or refuses names. Names from data are attack
input: a word is never altered to fit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from frazil.errors import ConfigError

#: Longest part of a table name, whatever the configuration allows.
LONGEST = 128
_PART = re.compile(rf"[A-Za-z0-9_]{{1,{LONGEST}}}")
Allowed = re.Pattern[str]


class TableNames:
    """`reserved`: tables that no record may go to. `room`: how many more tables may be created;
    None: any number."""

    def __init__(self, tables: Sequence[str], reserved: Collection[str], room: int | None) -> None:
        self.plain = frozenset(name for name in tables if "{" not in name)
        self.templates = {name: _Template(name) for name in tables if name not in self.plain}
        self._reserved = {name: _Template(name) for name in reserved if "{" in name}
        #: Most literal characters first: a name belongs to the first template that matches it.
        every = [*self.templates.values(), *self._reserved.values()]
        self._by_weight = sorted(every, key=lambda template: -template.weight)
        #: name in lower case → name and kind: of tables and namespaces
        self._taken: dict[str, tuple[str, str]] = {}
        self._room = room
        self._check(tables, reserved)

    def template(self, table: str) -> str:
        """The name of the `[[table]]` that configures this table."""
        if table in self.plain:
            return table
        if (template := self._template_of(table)) is None:
            raise ConfigError(
                f"cannot configure table {table}: no [[table]] has this name, and no template "
                "matches it"
            )
        return template.name

    def admit(self, name: str) -> str:
        """The reason why a name from data is refused; empty: it is accepted, and known from now on.

        Restrictions that no setting lifts: every part has 1 to 128 ASCII letters, digits and
        underscores, and there are as many parts as in the template. The name is neither reserved
        nor the name of a `[[table]]`. No part differs from a known name only in case: some catalogs
        and stores ignore case. No table lies inside another, as `orders.metadata` would.
        """
        if why := self._refused(name):
            return why
        if self._room is not None and name.lower() not in self._taken:
            self._room -= 1
        self.take(name, "table")
        return ""

    def _refused(self, name: str) -> str:
        if name in self.plain:
            fact = "a [[table]] of its own has this name"
        elif (template := self._template_of(name)) is None:
            fact = "no [[table]] has or makes such a name"
        elif template.name in self._reserved:
            fact = f"tables of {template} are not for records"
        elif self._room is not None and self._room <= 0 and name.lower() not in self._taken:
            fact = "there is no room for another table"
        else:
            fact = self._clash(name, "table")
        return fact and f"cannot name a table {shown(name)}: {fact}"

    def _clash(self, name: str, kind: str) -> str:
        """The known table or namespace that equals the name, or a namespace of it, but for case or
        kind; empty: none."""
        for level, level_kind in _levels(name, kind):
            other, other_kind = self._taken.get(level.lower(), (level, level_kind))
            if (other, other_kind) != (level, level_kind):
                return f"there is the {other_kind} {other}"
        return ""

    def take(self, name: str, kind: str = "table") -> None:
        """The name is known from now on."""
        for level, level_kind in _levels(name, kind):
            self._taken.setdefault(level.lower(), (level, level_kind))

    def _template_of(self, name: str) -> _Template | None:
        if not all(map(_PART.fullmatch, name.split("."))):
            return None
        return next(
            (template for template in self._by_weight if template.words_of(name) is not None), None
        )

    @staticmethod
    def _unfit(words: Mapping[str, str | None], used: Collection[str], allowed: Allowed) -> str:
        """The reason why these words may not be part of a name; empty: they may."""
        for word in used:
            text = words.get(word)
            if text is None:
                return f"cannot name a table: {{{word}}} is nothing"
            if len(text) > LONGEST:
                return f"cannot name a table {shown(text)}: it has {len(text)} characters"
            if not allowed.fullmatch(text):
                return f"cannot name a table {shown(text)}: expected {allowed.pattern!r}"
        return ""

    def filled(self, to: str, words: Mapping[str, str | None], allowed: Allowed) -> tuple[str, str]:
        """The table name that a template makes of these words, and the reason to refuse it.
        `allowed`: what a word may be, in whole."""
        if (template := self.templates.get(to)) is None:
            return to, ""
        if why := self._unfit(words, template.words, allowed):
            return "", why
        name = template.filled(words)
        if (other := self._template_of(name)) not in (template, None):
            return "", f"cannot name a table {shown(name)}: it would be one of {other}"
        return name, self._refused(name)

    def answered(self, name: str | None, allowed: Allowed) -> tuple[str, str]:
        """A table name returned by a Python function, and the reason to refuse it."""
        if name is None or name in self.plain:
            return name or "", "" if name else "cannot name a table: a name is null"
        template = self._template_of(name)
        words = template.words_of(name) if template else None
        return name, (words and self._unfit(words, words, allowed)) or self._refused(name)

    def _check(self, tables: Sequence[str], reserved: Collection[str]) -> None:
        """Raise `ConfigError` for names that cannot be, or cannot be distinguished."""
        for name in reserved:
            if name not in self._reserved:
                self.take(name, "reserved table")
        for name in tables:
            bare = self.templates[name].filled({}) if name in self.templates else name
            if not all(map(_PART.fullmatch, bare.split("."))) or "." not in bare:
                raise ConfigError(
                    f"cannot use table name {name!r}: expected namespace.table of "
                    "letters, digits, underscores and {words}"
                )
            if name in self.plain:
                if clash := self._clash(name, "table"):
                    raise ConfigError(f"cannot use table {name}: {clash}")
                self.take(name, "table")
        if len(tables) > len(self.plain) + len(self.templates):
            twice = next(name for name in tables if tables.count(name) > 1)
            raise ConfigError(f"cannot use table {twice}: there are two [[table]] of this name")
        alike: dict[tuple[str, ...], str] = {}
        for template in (*self.templates.values(), *self._reserved.values()):
            if (other := alike.setdefault(template.literals, template.name)) != template.name:
                raise ConfigError(
                    f"cannot distinguish tables of {template.name} from tables of "
                    f"{other}: only the words in them differ"
                )


def _levels(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """The namespaces of a name and the name itself, each with its kind."""
    at = name.find(".")
    while at >= 0:
        yield name[:at], "namespace"
        at = name.find(".", at + 1)
    yield name, kind


class _Template:
    """A table name with {words} to fill in."""

    def __init__(self, name: str) -> None:
        pieces = re.split(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", name)
        self.name, self.literals, self._order = name, tuple(pieces[::2]), pieces[1::2]
        self.words = tuple(dict.fromkeys(self._order))
        self.weight = sum(map(len, self.literals))
        pattern = re.escape(pieces[0])
        for i, (word, literal) in enumerate(zip(self._order, self.literals[1:], strict=True)):
            again = word in self._order[:i]
            pattern += f"(?P={word})" if again else f"(?P<{word}>{_PART.pattern})"
            pattern += re.escape(literal)
        self._pattern = re.compile(pattern)

    def __str__(self) -> str:
        return self.name

    def filled(self, words: Mapping[str, str | None]) -> str:
        pairs = zip(self._order, self.literals[1:], strict=True)
        return self.literals[0] + "".join((words.get(w, w) or "") + text for w, text in pairs)

    def words_of(self, name: str) -> dict[str, str] | None:
        """The words that make this name; None: the template does not match it."""
        match = self._pattern.fullmatch(name)
        return match.groupdict() if match else None


def shown(text: str) -> str:
    """A text from data made safe to print: short, ASCII, control characters escaped."""
    return ascii(text if len(text) <= 64 else f"{text[:61]}...")
