"""Text → statements of tokens.

In: the text of a file. Out: one `RawStatement` per statement, with its tokens and their places; the
parser decides which words are keywords. The query of a view is Spark's: in it, texts, names and
comments are read by Spark's rules. Raises `SqlError` for a text or comment without an end, and for
a character that no statement has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from frazil.errors import SqlError
from frazil.sql.source_text import SourceText


class RawToken(NamedTuple):
    #: NAME, QUOTED, STRING, NUMBER, PIECE (of Spark's), or the name of a sign
    kind: str
    value: str
    start: int
    end: int


@dataclass(frozen=True)
class RawStatement:
    tokens: list[RawToken]
    start: int
    #: behind its last token, before the `;`
    end: int
    #: behind its `;`; 0: it has none
    behind: int
    #: number of the first token of a view's query; 0: no query
    query: int = 0


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
#: Brackets within brackets: more of them are no options.
_DEEPEST = 50
_OURS = re.compile(
    r"(?P<blank>\s+|--[^\n]*)|(?P<comment>/\*)|(?P<string>'[^']*(?:''[^']*)*')"
    r"|(?P<quoted>\"[^\"]*(?:\"\"[^\"]*)*\")|(?P<number>[+-]?\d[\w.]*(?:(?<=\d[eE])[+-]\d+)?)|(?P<name>[^\W\d]\w*)"
    r"|(?P<sign>=>|[()\[\],=.;])"
)
_SPARK = re.compile(
    r"(?P<blank>\s+|--[^\n]*)|(?P<comment>/\*)|(?P<string>'[^'\\]*(?:(?:\\.|'')[^'\\]*)*')"
    r"|(?P<piece>\"[^\"\\]*(?:\\.[^\"\\]*)*\"|`[^`]*(?:``[^`]*)*`)|(?P<number>\d[\w.]*)|(?P<name>[^\W\d]\w*)"
    r"|(?P<sign>[()\[\],=.;])|(?P<other>.)",
    re.DOTALL,
)
_OPEN = {"'": "the text in single quotes", '"': "the name in double quotes", "`": "the name"}
_COMMENT_SIGN = re.compile(r"/\*|\*/")


def statements(source: SourceText) -> Iterator[RawStatement]:
    """The statements of a text; the last one may be open."""
    tokens: list[RawToken] = []
    query = depth = 0
    at = 0
    while at < len(source.text):
        token, at = _next(source, at, bool(query))
        if token is None:
            continue
        depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.kind, 0)
        if depth > _DEEPEST and not query:
            raise source.error(token.start, f"more than {_DEEPEST} brackets are open here")
        if token.kind == "SEMICOLON":
            if tokens:
                yield RawStatement(tokens, tokens[0].start, tokens[-1].end, at, query)
            tokens, query, depth = [], 0, 0
            continue
        tokens.append(token)
        if not query and token.value.upper() == "AS" and _begins_view(tokens):
            query = len(tokens)
    if tokens:
        yield RawStatement(tokens, tokens[0].start, tokens[-1].end, 0, query)


def query_tokens(text: str) -> Iterator[RawToken]:
    """The tokens of a part of a view's query."""
    source, at = SourceText("", text), 0
    while at < len(text):
        token, at = _next(source, at, spark=True)
        if token is not None:
            yield token


def _begins_view(tokens: list[RawToken]) -> bool:
    """`CREATE [OR REPLACE] VIEW [IF NOT EXISTS] name AS`: a query is next."""
    words = [t.value.upper() if t.kind == "NAME" else "" for t in tokens[:3]]
    return len(tokens) <= 9 and words[0] == "CREATE" and "VIEW" in (words[1], _fourth(tokens))


def _fourth(tokens: list[RawToken]) -> str:
    return tokens[3].value.upper() if len(tokens) > 3 and tokens[3].kind == "NAME" else ""


def _next(source: SourceText, at: int, spark: bool) -> tuple[RawToken | None, int]:
    match = (_SPARK if spark else _OURS).match(source.text, at)
    if match is None or match.lastgroup == "other":
        sign = source.text[at]
        if sign in _OPEN:
            raise source.error(at, f"{_OPEN[sign]} that begins here has no end", path=("open",))
        if match is None:
            raise source.error(
                at, "this sign is none of SQL's; expected a word, a number or a text in quotes"
            )
    kind, value, end = match.lastgroup or "", match[0], match.end()
    if kind == "comment":
        return None, _comment_end(source, at)
    if kind == "blank":
        return None, end
    if kind == "sign":
        return RawToken(SIGNS[value], value, at, end), end
    if kind in ("string", "quoted"):
        quote = value[0]
        value = value[1:-1].replace(quote * 2, quote)
    elif kind in ("piece", "other"):
        kind = "piece"
    return RawToken(kind.upper(), value, at, end), end


def _comment_end(source: SourceText, at: int) -> int:
    """Behind the comment that begins here; comments nest, as in Spark."""
    depth, end = 0, at
    while match := _COMMENT_SIGN.search(source.text, end):
        depth += 1 if match[0] == "/*" else -1
        end = match.end()
        if not depth:
            return end
    raise source.error(at, "the comment that begins here has no end", path=("open",))


def is_open(text: str) -> bool:
    """Whether a text is not complete yet: its last statement lacks `;`, or a quote its end."""
    try:
        return not all(statement.behind for statement in statements(SourceText("", text)))
    except SqlError as error:
        return error.path == ("open",)
