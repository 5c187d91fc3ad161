"""Tokens → trees of statements, by the grammar in `grammar.lark` (LALR, with lark).

In: a `SourceText`. Out: one lark tree per statement, whose tokens know their place. A word is a
keyword only where the statement goes on with it, so that every name and option may be any word;
the source of a view ends where the grammar ends it, and what is behind it is Spark's. Raises
`SqlError` that names what is expected, in the words of the language.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer

from frazil.errors import SqlError
from frazil.sql.lexer import RawToken, next_token, open_quote, query_token
from frazil.sql.source_text import SourceText

_GRAMMAR = Path(__file__).with_name("grammar.lark")
#: How terminals that are no keywords are called in messages.
_CALLED = {
    "NAME": "a name",
    "QUOTED": "a name in double quotes",
    "STRING": "a text in single quotes",
    "NUMBER": "a number",
    "QUERY": "a query",
    "DOT": "'.'",
    "$END": "the end of the statement",
    "_LPAR": "'('",
    "_RPAR": "')'",
    "_LSQB": "'['",
    "_RSQB": "']'",
    "_COMMA": "','",
    "_EQUAL": "'='",
    "_ARROW": "'=>'",
    "_DOT": "'.'",
}
#: Clauses of a source or a sink: behind the source of a view they are no part of the query.
_NO_QUERY = ("FORMAT", "ENVELOPE", "USING", "TO", "INTO")
_TABLES = "a sink makes its tables: CREATE CONNECTION …, CREATE SINK … FROM … TO ICEBERG CATALOG …"
_VIEWS = "a query belongs in a view: CREATE VIEW v AS SELECT … FROM KAFKA CONNECTION name (…) …"
#: What other systems have in place of connections, views and sinks.
_ELSEWHERE = {
    **dict.fromkeys(("TABLE", "STREAM", "SOURCE", "CATALOG", "DATABASE", "SCHEMA"), _TABLES),
    **dict.fromkeys(("SELECT", "INSERT", "WITH", "MATERIALIZED"), _VIEWS),
}
#: Brackets within brackets: more of them are no options.
_DEEPEST = 50


class _NoLexer(Lexer):
    """Tokens are fed one by one."""

    def __init__(self, _: Any) -> None: ...

    def lex(self, *_: Any) -> Iterator[Token]:
        return iter(())


@cache
def _terminals() -> frozenset[str]:
    lines = [line for line in _GRAMMAR.read_text().splitlines() if not line.startswith("//")]
    return frozenset(re.findall(r"\b[A-Z_]*[A-Z]\b", "\n".join(lines)))


@cache
def _parser() -> Lark:
    declared = f"{_GRAMMAR.read_text()}\n%declare {' '.join(sorted(_terminals()))}\n"
    return Lark(declared, parser="lalr", lexer=_NoLexer, propagate_positions=True)


@cache
def keywords() -> frozenset[str]:
    """All keywords of the language."""
    words = (name[1:] for name in _terminals() if name[0] == "_" and name not in _CALLED)
    return frozenset(words)


class ParsedStatement(NamedTuple):
    tree: Tree[Token]
    start: int
    #: behind its last token
    end: int
    #: behind its `;`; 0: it has none
    behind: int


def parse(source: SourceText) -> Iterator[ParsedStatement]:
    at = 0
    while True:
        statement = _OpenStatement(source, at)
        while statement.feed():
            pass
        if statement.tokens:
            tree = statement.tree()
            start, end = statement.tokens[0].start, statement.tokens[-1].end
            yield ParsedStatement(tree, start, end, statement.behind)
        if not statement.behind:
            return
        at = statement.behind


def open_statement(source: SourceText) -> tuple[list[RawToken], set[str]]:
    """The tokens of the last statement, if it has no `;`, and the terminals that may stand behind
    them: none where no statement begins like this."""
    at = 0
    while True:
        statement = _OpenStatement(source, at)
        try:
            while statement.feed():
                pass
            expected = set(statement.state.accepts())
        except SqlError as error:
            if error.path == ("open",):
                raise
            expected = set()
            statement.skip()
        if not statement.behind:
            return statement.tokens, expected
        at = statement.behind


def is_open(text: str) -> bool:
    """Whether a text is not complete yet: its last statement lacks `;`, or a quote its end."""
    try:
        return bool(open_statement(SourceText("", text))[0])
    except SqlError:
        return True


class _OpenStatement:
    """A statement as far as it is read."""

    def __init__(self, source: SourceText, at: int) -> None:
        self.source = source
        self.tokens: list[RawToken] = []
        self.behind = 0
        self.state: Any = _parser().parse_interactive("")
        self._at = at
        self._depth = 0

    def feed(self) -> bool:
        """Reads a token; False: the statement ends before it."""
        token = self._next()
        if self._ends(token):
            return False
        self._depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.kind, 0)
        if self._depth > _DEEPEST:
            raise self.source.error(token.start, f"more than {_DEEPEST} brackets are open here")
        kind = self._terminal(token)
        self.tokens.append(token)
        self._at = token.end
        try:
            self.state.feed_token(
                Token(kind, token.value, start_pos=token.start, end_pos=token.end)
            )
        except UnexpectedToken as error:
            raise self._unexpected(error.token, token) from None
        return True

    def tree(self) -> Tree[Token]:
        last = self.tokens[-1].end
        try:
            end = Token("$END", "", start_pos=last, end_pos=last)
            tree: Tree[Token] = self.state.feed_token(end)
        except UnexpectedToken as error:
            raise self._unexpected(error.token, None) from None
        return tree

    def skip(self) -> None:
        """To the end of a statement that cannot be read."""
        while not self._ends(token := next_token(self.source, self._at)):
            self.tokens.append(token)
            self._at = token.end

    def _ends(self, token: RawToken) -> bool:
        if token.kind == "OPEN":
            fact = f"{open_quote(token)} that begins here has no end"
            raise self.source.error(token.start, fact, path=("open",))
        if token.kind == "SEMICOLON":
            self.behind = token.end
        return token.kind in ("SEMICOLON", "END")

    def _next(self) -> RawToken:
        choices = self.state.choices()
        if choices.keys() == {"QUERY"}:
            token = query_token(self.source, self._at, head=True)
            return token if token.value.strip() else next_token(self.source, self._at)
        token = next_token(self.source, self._at)
        if token.kind in ("END", "SEMICOLON") or "QUERY" not in choices:
            return token
        if not any(fed.kind == "QUERY" for fed in self.tokens):  # the source of a sink
            return token
        word = token.value.upper() if token.kind == "NAME" else ""
        if f"_{word}" in choices or f"_{token.kind}" in choices or word in _NO_QUERY:
            return token
        return query_token(self.source, self._at, head=False)

    def _terminal(self, token: RawToken) -> str:
        choices = self.state.choices()
        if token.kind == "ODD":
            raise self._odd(token)
        if token.kind != "NAME":
            kind = f"_{token.kind}"
            plain = token.kind in choices or token.kind in _CALLED
            return token.kind if plain and kind not in choices else kind
        word = token.value.upper()
        keyword = f"_{word}"
        if keyword not in choices:
            return keyword if word in _NO_QUERY and "QUERY" in choices else "NAME"
        if "NAME" not in choices:
            return keyword
        behind = next_token(self.source, token.end)
        as_name = self._goes_on("NAME", behind) and not self._goes_on(keyword, behind)
        return "NAME" if as_name else keyword

    def _goes_on(self, kind: str, behind: RawToken) -> bool:
        """Whether the statement may go on with this terminal, and this token behind it."""
        kinds = {"END": ["$END"], "SEMICOLON": ["$END"], "NAME": ["NAME"]}.get(behind.kind)
        kinds = kinds or [behind.kind, f"_{behind.kind}"]
        if behind.kind == "NAME":
            kinds.append(f"_{behind.value.upper()}")
        return any(self._accepts(kind, other) for other in kinds)

    def _accepts(self, *kinds: str) -> bool:
        trial = self.state.copy(deepcopy_values=False)
        trial.parser_state.parse_conf = copy(trial.parser_state.parse_conf)
        trial.parser_state.parse_conf.callbacks = {}
        try:
            for kind in kinds:
                trial.feed_token(Token(kind, ""))
        except UnexpectedToken:
            return False
        return True

    # ── what is said of a statement that cannot be read ──────────────────────────────────────────

    def _odd(self, token: RawToken) -> SqlError:
        hint = ""
        if token.value in "<>!*+/%|&":
            hint = "a ROUTE compares with = and IN; other conditions and columns are for a view: "
            hint += "CREATE VIEW v AS SELECT … WHERE …"
        return self.source.error(
            token.start,
            "this sign is none of SQL's; expected a word, a number or a text in quotes",
            hint=hint,
        )

    def _unexpected(self, token: Token, raw: RawToken | None) -> SqlError:
        at = token.start_pos if token.start_pos is not None else self.tokens[-1].end
        word = self.source.text[at : token.end_pos] if token.type == "NAME" else ""
        hidden = any(first <= at < last for first, last in self.source.secrets)
        accepted = self.state.accepts()
        expected = sorted({_CALLED.get(name, name.removeprefix("_")) for name in accepted})
        fact = f"expected {_or(expected)}, found {_found(token, '' if hidden else word)}"
        if near := difflib.get_close_matches(word.upper(), expected, n=1, cutoff=0.6):
            fact += f"; did you mean {near[0]}?"
        hint = ""
        if token.type == "QUOTED" and "STRING" in accepted:
            hint = "a text belongs in single quotes; double quotes are for names"
        elif len(self.tokens) <= 2 and word.upper() in _ELSEWHERE:
            hint = _ELSEWHERE[word.upper()]
        elif "_KAFKA" in accepted and "_NOT" not in accepted and raw is None:
            hint = "the query of a view reads FROM KAFKA CONNECTION name (TOPIC '…') FORMAT …"
        return self.source.error(at, fact, hint=hint)


def _found(token: Token, word: str) -> str:
    if token.type == "NAME":
        return word if 0 < len(word) <= 40 else "another word"
    if token.type in keywords() or (token.type[0] == "_" and token.type not in _CALLED):
        return token.type.removeprefix("_")
    return _CALLED.get(token.type, "a sign")


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
