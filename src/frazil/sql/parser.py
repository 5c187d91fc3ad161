"""Tokens → trees of statements, by the grammar in `grammar.lark` (LALR, with lark).

In: a `SourceText`. Out: one lark tree per statement, whose tokens know their place. A word is a
keyword only where the grammar expects one, so that every name and option may be any word. Raises
`SqlError` that names what is expected, in the words of the language.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.lexer import Lexer

from frazil.errors import SqlError
from frazil.sql.lexer import RawStatement, RawToken, statements
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
#: Keywords that stay in the tree, to tell where a clause begins.
_KEPT = frozenset(["ROUTE"])
#: The words that begin the source in a view's query.
_SOURCE = ["KAFKA", "CONNECTION"]


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
    return Lark(declared, parser="lalr", lexer=_NoLexer)


@cache
def keywords() -> frozenset[str]:
    """All keywords of the language."""
    words = (name[1:] for name in _terminals() if name[0] == "_" and name not in _CALLED)
    return frozenset(words) | _KEPT


def parse(source: SourceText) -> Iterator[tuple[RawStatement, Tree[Token]]]:
    for statement in statements(source):
        yield statement, _tree(source, statement)


def expected_terminals(source: SourceText, statement: RawStatement) -> set[str]:
    """The terminals that may stand behind a statement's tokens. Raises `SqlError` where no
    statement begins like this."""
    state: Any = _parser().parse_interactive("")
    try:
        for token in _with_query(source, statement):
            state.feed_token(Token(_terminal(token, state.choices()), token.value))
    except UnexpectedToken as error:
        raise source.error(statement.end, str(error.token)) from None
    return set(state.accepts())


def _tree(source: SourceText, statement: RawStatement) -> Tree[Token]:
    state: Any = _parser().parse_interactive("")
    tokens = _with_query(source, statement)
    last = statement.end
    try:
        for token in tokens:
            kind = _terminal(token, state.choices())
            state.feed_token(Token(kind, token.value, start_pos=token.start, end_pos=token.end))
        end = Token("$END", "", start_pos=last, end_pos=last)
        result: Tree[Token] = state.feed_token(end)
    except UnexpectedToken as error:
        raise _unexpected(source, statement, error.token, state.accepts()) from None
    return result


def _terminal(token: RawToken, choices: dict[str, Any]) -> str:
    if token.kind == "NAME":
        word = token.value.upper()
        keyword = word if word in _KEPT else f"_{word}"
        return keyword if keyword in choices else "NAME"
    if token.kind in choices or token.kind in _CALLED:
        return token.kind if f"_{token.kind}" not in choices else f"_{token.kind}"
    return f"_{token.kind}"


def _with_query(source: SourceText, statement: RawStatement) -> Iterator[RawToken]:
    """The tokens, with the query of a view as one token before its source and one behind it. The
    source is what stands from `KAFKA CONNECTION` to the last clause that the grammar knows."""
    if not statement.query:
        yield from statement.tokens
        return
    tokens = statement.tokens
    yield from tokens[: statement.query]
    first = _source_of(source, tokens, statement.query)
    begin = tokens[statement.query - 1].end
    head = tokens[first].start if first < len(tokens) else statement.end
    if head > begin:
        yield RawToken("QUERY", source.text[begin:head], begin, head)
    end = _behind_source(tokens, first)
    yield from tokens[first:end]
    if end < len(tokens):
        begin = tokens[end - 1].end
        again = _source_of(source, tokens, end)
        if again < len(tokens):
            raise source.error(
                tokens[again].start, "a view reads one Kafka connection; expected no second one"
            )
        yield RawToken("QUERY", source.text[begin : statement.end], begin, statement.end)


def _source_of(source: SourceText, tokens: list[RawToken], first: int) -> int:
    """Number of the token where `KAFKA CONNECTION` begins, or of the end."""
    for number in range(first, len(tokens) - 1):
        if _upper(tokens[number : number + 2]) == _SOURCE:
            if number and _upper(tokens[number - 1 : number]) != ["FROM"]:
                raise source.error(
                    tokens[number].start, "expected FROM before KAFKA CONNECTION in a view's query"
                )
            return number
    return len(tokens)


def _behind_source(tokens: list[RawToken], first: int) -> int:
    """Number of the first token behind the source: its options, and FORMAT and ENVELOPE."""
    at = _behind_parentheses(tokens, first + 3)
    if _upper(tokens[at : at + 1]) == ["FORMAT"]:
        at += 2
        if _upper(tokens[at : at + 1]) == ["USING"]:
            at += 1
            while at < len(tokens) and tokens[at].value.upper() in _OF_SCHEMAS:
                at += 1
            at += 1
        at = _behind_parentheses(tokens, at)
    if _upper(tokens[at : at + 1]) == ["ENVELOPE"]:
        at += 2
    return min(at, len(tokens))


_OF_SCHEMAS = {"CONFLUENT", "SCHEMA", "REGISTRY", "CONNECTION", "FILE"}


def _behind_parentheses(tokens: list[RawToken], at: int) -> int:
    depth = 0
    for number in range(at, len(tokens)):
        depth += {"LPAR": 1, "RPAR": -1}.get(tokens[number].kind, 0)
        if not depth:
            return number + 1 if number > at else at
    return at if depth == 0 else len(tokens)


def _upper(tokens: list[RawToken]) -> list[str]:
    return [token.value.upper() for token in tokens if token.kind == "NAME"]


def _unexpected(
    source: SourceText, statement: RawStatement, token: Token, accepted: set[str]
) -> SqlError:
    at = token.start_pos if token.start_pos is not None else statement.end
    word = source.text[at : token.end_pos] if token.type == "NAME" else ""
    hidden = any(first <= at < last for first, last in source.secrets)
    expected = sorted({_CALLED.get(name, name.removeprefix("_")) for name in accepted})
    fact = f"expected {_or(expected)}, found {_found(token, '' if hidden else word)}"
    if near := difflib.get_close_matches(word.upper(), expected, n=1, cutoff=0.6):
        fact += f"; did you mean {near[0]}?"
    hint = ""
    if token.type == "QUOTED" and "STRING" in accepted:
        hint = "a text is written in single quotes; double quotes are for names"
    elif statement.query and token.type == "$END" and "_KAFKA" in accepted:
        hint = "the query of a view reads FROM KAFKA CONNECTION name (TOPIC '…') FORMAT …"
    return source.error(at, fact, hint=hint)


def _found(token: Token, word: str) -> str:
    if token.type == "NAME":
        return word if 0 < len(word) <= 40 else "another word"
    if token.type in keywords() or (token.type[0] == "_" and token.type not in _CALLED):
        return token.type.removeprefix("_")
    return _CALLED.get(token.type, "a sign" if token.type != "PIECE" else "a part of a query")


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
