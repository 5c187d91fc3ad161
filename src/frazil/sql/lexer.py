"""Text → tokens: one at a time, because only the grammar knows whose token is next.

In: a text and a position. Out: the token there, with its place. Statements are read by our rules;
the query of a view, up to its source and behind it, is Spark's, and one token: in it, texts, names
and comments end where Spark ends them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from frazil.sql.source_text import SourceText


class RawToken(NamedTuple):
    #: NAME, QUOTED, STRING, NUMBER, QUERY, the name of a sign; END of the text; ODD: no sign of
    #: SQL; OPEN: a quote or comment without an end
    kind: str
    value: str
    start: int
    end: int


SIGNS = {
    "(": "LPAR",
    ")": "RPAR",
    "[": "LSQB",
    "]": "RSQB",
    ",": "COMMA",
    "=>": "ARROW",
    "=": "EQUAL",
    ".": "DOT",
    ";": "SEMICOLON",
}
_OURS = re.compile(
    r"(?P<blank>\s+|--[^\n]*)|(?P<comment>/\*)|(?P<string>'[^']*(?:''[^']*)*')"
    r"|(?P<quoted>\"[^\"]*(?:\"\"[^\"]*)*\"|`[^`]*(?:``[^`]*)*`)"
    r"|(?P<number>[+-]?\d[\w.]*(?:(?<=\d[eE])[+-]\d+)?)|(?P<name>[^\W\d]\w*)"
    r"|(?P<sign>=>|[()\[\],=.;])"
)
_SPARK = re.compile(
    r"(?P<blank>\s+|--[^\n]*)|(?P<comment>/\*)|(?P<piece>[rR](?:'[^']*'|\"[^\"]*\")"
    r"|'[^'\\]*(?:(?:\\.|'')[^'\\]*)*'|\"[^\"\\]*(?:\\.[^\"\\]*)*\"|`[^`]*(?:``[^`]*)*`"
    r"|\d[\w.]*)|(?P<name>[^\W\d]\w*)|(?P<sign>;)|(?P<other>[^'\"`])",
    re.DOTALL,
)
_OPEN = {"'": "the text in single quotes", '"': "the name in double quotes", "`": "the name"}
_COMMENT_SIGN = re.compile(r"/\*|\*/")
#: The words that begin the source in a view's query.
_SOURCE = ["FROM", "KAFKA", "CONNECTION"]


def next_token(source: SourceText, at: int) -> RawToken:
    """The token at a position, or the next one."""
    return next(_tokens(source, at, _OURS))


def query_token(source: SourceText, at: int, *, head: bool) -> RawToken:
    """The part of a view's query that begins here. `head`: the one before the source."""
    words: list[RawToken] = []
    end = at
    for token in _tokens(source, at, _SPARK):
        if token.kind == "OPEN":
            return token
        if token.kind in ("END", "SEMICOLON"):
            break
        words = [*words[-2:], token]
        if [word.value.upper() for word in words][-2:] == _SOURCE[1:]:
            end = words[-2].start
            if not head or [word.value.upper() for word in words] != _SOURCE:
                fact = "expected FROM before KAFKA CONNECTION in a view's query"
                if not head:
                    fact = "a view reads one Kafka connection; expected no second one"
                raise source.error(end, fact)
            break
        end = token.end
    return RawToken("QUERY", source.text[at:end], at, end)


def _tokens(source: SourceText, at: int, rules: re.Pattern[str]) -> Iterator[RawToken]:
    text = source.text
    while at < len(text):
        match = rules.match(text, at)
        kind = match.lastgroup or "" if match else "OPEN" if text[at] in _OPEN else "ODD"
        value, end = (match[0], match.end()) if match else (text[at], at + 1)
        if kind == "comment" and not (end := _comment_end(text, at)):
            kind, end = "OPEN", len(text)
        if kind not in ("blank", "comment"):
            if kind == "sign":
                kind = SIGNS[value]
            elif kind in ("string", "quoted"):
                value = value[1:-1].replace(value[0] * 2, value[0])
            yield RawToken(kind.upper(), value, at, end)
        at = end
    yield RawToken("END", "", at, at)


def _comment_end(text: str, at: int) -> int:
    """Behind the comment that begins here; comments nest, as in Spark. 0: it has no end."""
    depth, end = 0, at
    while match := _COMMENT_SIGN.search(text, end):
        depth += 1 if match[0] == "/*" else -1
        end = match.end()
        if not depth:
            return end
    return 0


def open_quote(token: RawToken) -> str:
    """What a token has no end of."""
    return _OPEN.get(token.value, "the comment")
