"""What may stand next in a statement: keywords of the grammar, options, and names of objects.

In: the text before the cursor, and the definitions. Out: candidates, and where the word begins that
they replace. The parser itself says which keywords fit, and the config's sections which options: no
list is kept here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from frazil.config.sections import MODES
from frazil.errors import SqlError
from frazil.sql.connections import CATALOGS, TYPES, known_options
from frazil.sql.document_builder import Objects
from frazil.sql.formatter import name_text
from frazil.sql.lexer import RawToken
from frazil.sql.option_names import UnknownOption, option_names, setting_of, type_of
from frazil.sql.parser import open_statement
from frazil.sql.source_text import SourceText
from frazil.sql.statements import Connection

#: Word before a name → the kinds of objects that it may name.
_NAMED: Mapping[str, tuple[str, ...]] = {
    "SECRET": ("secret",),
    "CONNECTION": ("connection",),
    "CATALOG": ("catalog",),
    "VIEW": ("view",),
    "SINK": ("sink",),
    "FROM": ("view",),
}
#: Words before CONNECTION → the type that it has to have.
_TYPED = {"KAFKA": "kafka", "REGISTRY": "registry", "CATALOG": "catalog", "AWS": "aws"}


class Candidate(NamedTuple):
    text: str
    #: keyword, option, value, or the kind of an object
    kind: str


class Completion(NamedTuple):
    #: how many characters before the cursor a candidate replaces
    replaced: int
    candidates: list[Candidate]


def complete(text: str, objects: Objects) -> Completion:
    """Candidates that begin with what is typed already."""
    word = _last_word(text)
    before = text[: len(text) - len(word)]
    try:
        tokens, expected = open_statement(SourceText("", before))
    except SqlError:  # in a text or comment without an end
        return Completion(0, [])
    if (option := _option(tokens)) is not None:
        lead, candidates = _options(option, tokens, before, objects)
        typed = text[lead:] if lead is not None else word
    else:
        typed, candidates = word, _next(tokens, expected, objects)
    matching = [c for c in candidates if c.text.upper().startswith(typed.upper())]
    return Completion(len(typed), matching)


def _last_word(text: str) -> str:
    at = len(text)
    while at and (text[at - 1].isalnum() or text[at - 1] in "_.-"):
        at -= 1
    return text[at:]


# ── outside of parentheses ───────────────────────────────────────────────────────────────────────


def _next(tokens: list[RawToken], expected: set[str], objects: Objects) -> Iterator[Candidate]:
    words = [token.value.upper() for token in tokens]
    if expected & {"NAME", "QUOTED"}:
        yield from _names(words, objects)
    for terminal in sorted(expected):
        word = terminal.removeprefix("_")
        if word.isalpha() and terminal[0] == "_" and word not in _SIGNS:
            yield Candidate(word, "keyword")
    if words[-1:] == ["MODE"]:
        yield from (Candidate(mode.upper(), "value") for mode in MODES)
    if words[-1:] == ["FORMAT"]:
        yield from (Candidate(name, "value") for name in ("AVRO", "JSON", "RAW"))
    if words[-1:] == ["ENVELOPE"]:
        yield Candidate("DEBEZIUM", "value")


_SIGNS = {"LPAR", "RPAR", "LSQB", "RSQB", "COMMA", "EQUAL", "ARROW", "DOT"}


def _names(words: list[str], objects: Objects) -> Iterator[Candidate]:
    last, lead = (words[-1:] or [""])[0], (words[-2:-1] or [""])[0]
    if words[:1] == ["CREATE"] and len(words) < 5 and last != "FROM":  # the name of a new object
        return
    kinds = _NAMED.get(last, ())
    wanted = _TYPED.get(lead if last == "CONNECTION" else last if last == "CATALOG" else "", "")
    for (kind, name), definition in sorted(objects.items()):
        if kind == "connection":
            fits = not wanted or (isinstance(definition, Connection) and definition.type == wanted)
            if fits and {"connection", "catalog"} & set(kinds):
                yield Candidate(name_text(name), kind)
        elif kind in kinds:
            yield Candidate(name_text(name), kind)


# ── options ──────────────────────────────────────────────────────────────────────────────────────


def _opening(tokens: list[RawToken]) -> int | None:
    """Number of the parenthesis in which the cursor is; None: in none, or in brackets."""
    opened: list[int] = []
    for number, token in enumerate(tokens):
        if token.kind in ("LPAR", "LSQB"):
            opened.append(number)
        elif token.kind in ("RPAR", "RSQB"):
            opened = opened[:-1]
    return opened[-1] if opened and tokens[opened[-1]].kind == "LPAR" else None


def _option(tokens: list[RawToken]) -> int | None:
    """Number of the first token of the option in which the cursor is; None: not in one."""
    opening = _opening(tokens)
    if opening is None:
        return None
    commas = [n for n in range(opening, len(tokens)) if tokens[n].kind == "COMMA"]
    return next((n + 1 for n in reversed(commas) if _opening(tokens[:n]) == opening), opening + 1)


def _options(
    begin: int, tokens: list[RawToken], before: str, objects: Objects
) -> tuple[int | None, Iterator[Candidate]]:
    """Where the option begins, and what it may be; None: it is the value that is completed."""
    words = [token.value.upper() for token in tokens[begin:]]
    scopes, known = _scopes(tokens[:begin], objects)
    if "SECRET" in words[-1:] or words[-2:] == ["SECRET", "="]:
        return None, _names(["SECRET"], objects)
    if words[-2:] == ["CONNECTION", "="] or words[-1:] == ["CONNECTION"]:
        return None, _names(["AWS", "CONNECTION"], objects)
    if words[-1:] == ["="]:
        return None, _values(words[:-1], scopes)
    names = [*known, *(option_names(scopes) if scopes else ())]
    lead = tokens[begin].start if words else len(before)
    return lead, (Candidate(name, "option") for name in names)


def _values(words: list[str], scopes: tuple[str, ...]) -> Iterator[Candidate]:
    if words == ["TYPE"]:
        yield from (Candidate(f"'{kind}'", "value") for kind in CATALOGS)
        return
    yield Candidate("SECRET", "keyword")
    try:
        kind = type_of(setting_of(tuple(words), "", scopes)) if scopes else ""
    except UnknownOption:
        return
    if kind == "bool":
        yield from (Candidate(text, "value") for text in ("TRUE", "FALSE"))
    elif words[-1:] == ["MODE"]:
        yield from (Candidate(f"'{mode}'", "value") for mode in MODES)


def _scopes(tokens: list[RawToken], objects: Objects) -> tuple[tuple[str, ...], list[str]]:
    """The sections whose keys are options of the open parentheses, and other options of them."""
    words = [token.value.upper() for token in tokens[: _opening(tokens)]]
    last = words[-1] if words else ""
    if words[:1] == ["CREATE"] and "CONNECTION" in (*words[1:2], *words[3:4]):
        kind = next(
            (kind for kind, (text, _) in TYPES.items() if " ".join(words).endswith(text)), ""
        )
        return (), known_options(kind) if kind else []
    if words[:2] == ["ALTER", "CONNECTION"]:
        name = tokens[2].value if tokens[2].kind == "QUOTED" else tokens[2].value.lower()
        given = objects.get(("connection", name))
        return (), known_options(given.type) if isinstance(given, Connection) else []
    if last in ("SET", "RESET"):
        return (("table",) if "TABLE" in words else ("sink", "table")), []
    if words[-3:-1] == ["KAFKA", "CONNECTION"]:
        return ("sink",), ["TOPIC", "TOPIC PATTERN"]
    if last == "WITH":
        return ("sink", "table"), []
    if last == "ROUTE":
        return ("route",), []
    if words[-2:-1] == ["TABLE"]:
        return ("table",), []
    if words[-2:-1] == ["CATALOG"] or words[-3:-1] == ["CATALOG", "CONNECTION"]:
        return (), ["NAMESPACE", "TABLE"]
    return (("decode",) if "FORMAT" in words and "TO" not in words else ()), []
