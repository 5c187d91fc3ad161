"""Options in parentheses → settings and values.

In: the trees of `option`, which the grammar leaves as words and values in a row. Out: settings with
`Option`s. `=` may be left out: the value is the last text, number or list, `SECRET name`, TRUE or
FALSE, or the name behind CONNECTION. Raises `SqlError` at the option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lark import Token, Tree

from frazil.config.settings import SECRET
from frazil.errors import SqlError
from frazil.sql.option_names import SAID, UnknownOption, sections, setting_of, type_of
from frazil.sql.source_text import SourceText
from frazil.sql.statements import Option, SecretName, Setting, SourceLocation, Word

Node = Token | Tree[Token]
_COLLECTIONS = ("MAP", "LIST", "ARRAY")


@dataclass(frozen=True)
class RawOption:
    words: tuple[str, ...]
    #: the key in quotes, behind the words or alone
    key: str
    value: Any
    location: SourceLocation
    value_location: SourceLocation

    @property
    def shown(self) -> str:
        words = list(self.words)
        if self.value is None:  # a word behind PASSWORD may be one
            secret = [
                SECRET.search(".".join(words[: n + 1])) is not None for n in range(len(words))
            ]
            words = words[: secret.index(True) + 1] if True in secret else words
        return " ".join(filter(None, (" ".join(words).upper(), self.key and f"'{self.key}'")))

    def error(self, fact: str, *, hint: str = "") -> SqlError:
        return self.location.source.error(self.location.at, fact, hint=hint)


def raw_options(source: SourceText, tree: Tree[Token]) -> Iterator[RawOption]:
    """The options of a pair of parentheses; `value` is None where there is none."""
    for option in tree.children:
        assert isinstance(option, Tree)
        left, *right = [part.children for part in option.children if isinstance(part, Tree)]
        location = SourceLocation(source, first(left[0]))
        if right:
            words, key = _name(source, left)
            value, value_at = value_of(source, right[0]), first(right[0][0]) or location.at
            if len(words) > 1 and words[-1].upper() == "SECRET" and isinstance(value, Word):
                words, value = words[:-1], SecretName(identifier(right[0][0]))
        else:
            words, key, value, value_at = _split(source, left)
        yield RawOption(words, key, value, location, SourceLocation(source, value_at))


def _name(source: SourceText, parts: list[Node]) -> tuple[tuple[str, ...], str]:
    words: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(part, Token) and part.type == "NAME":
            words.append(str(part))
        elif isinstance(part, Token) and part.type in ("STRING", "QUOTED"):
            if number == len(parts) - 1:
                return tuple(words), str(part)
            raise source.error(first(parts[number + 1]), "expected '=' behind the key")
        else:
            raise source.error(first(part), "expected the name of an option before '='")
    return tuple(words), ""


def _split(source: SourceText, parts: list[Node]) -> tuple[tuple[str, ...], str, Any, int]:
    """An option without `=`: its words, its key, its value, and where that stands."""
    last = parts[-1]
    at = first(last) or first(parts[0])
    kinds = [kind_of(part) for part in parts]
    value: Any
    words = [str(part).upper() for part in parts]
    if len(parts) == 1 and kinds[0] in ("STRING", "QUOTED"):
        return (), str(last), None, at
    if len(parts) > 2 and words[-2] == "SECRET" and kinds[-1] in ("NAME", "QUOTED"):
        value, parts = SecretName(identifier(last)), parts[:-2]
    elif len(parts) > 1 and words[-2] == "CONNECTION" and kinds[-1] in ("NAME", "QUOTED"):
        value, parts = Word(identifier(last)), parts[:-1]
    elif kinds[-1] != "NAME":
        before = -2 if isinstance(last, Tree) and words[-2:-1] and _collects(words, kinds) else -1
        value, parts = value_of(source, parts[before:]), parts[:before]
    elif len(parts) > 1 and words[-1] in ("TRUE", "FALSE"):
        value, parts = words[-1] == "TRUE", parts[:-1]
    else:
        value = None
    if not parts:
        raise source.error(at, "expected the name of an option before its value")
    return (*_name(source, parts), value, at)


def _collects(words: list[str], kinds: list[str]) -> bool:
    return len(words) > 2 and kinds[-2] == "NAME" and words[-2] in _COLLECTIONS


def value_of(source: SourceText, parts: list[Node]) -> Any:
    """The value of an option: one part, `SECRET name` or `MAP […]`."""
    last = parts[-1]
    words = [str(part).upper() if isinstance(part, Token) else "" for part in parts]
    if words[0] == "SECRET" and [kind_of(part) for part in parts[1:]] in (["NAME"], ["QUOTED"]):
        return SecretName(identifier(last))
    if len(parts) == 2 and words[0] in _COLLECTIONS and isinstance(last, Tree):
        return _collection(source, last)
    if len(parts) > 1:
        raise source.error(first(parts[1]), "expected ',' or ')' behind the value")
    if isinstance(last, Tree):
        return _collection(source, last) if last.data == "entries" else texts(source, last)
    if last.type == "NUMBER":
        return number(str(last))
    if last.type == "NAME":
        upper = str(last).upper()
        return upper == "TRUE" if upper in ("TRUE", "FALSE") else Word(identifier(last))
    return Word(identifier(last)) if last.type == "QUOTED" else str(last)


def _collection(source: SourceText, tree: Tree[Token]) -> Any:
    """`['a', 'b']` or `['a' => 1]`, nested as one likes."""
    pairs = []
    for entry in tree.children:
        assert isinstance(entry, Tree)
        pairs.append([_entry(source, value) for value in entry.children])
    if {len(pair) for pair in pairs} == {2}:
        return {str(key): value for key, value in pairs}
    if any(len(pair) == 2 for pair in pairs):
        raise source.error(first(tree), "expected 'key' => value everywhere in the map, or nowhere")
    return [pair[0] for pair in pairs]


def _entry(source: SourceText, value: Any) -> Any:
    parts = value.children
    made = value_of(source, parts)
    if isinstance(made, Word):
        raise source.error(first(parts[0]), "expected a value in single quotes")
    return made


def texts(source: SourceText, tree: Tree[Token]) -> list[str]:
    """The items of `(day(placed_at), bucket(16, id), 'a text')`, as texts."""
    return [_term(source, item) for item in tree.children]


#: What may stand behind a term of SORT BY.
_ORDERS = {"ASC", "DESC", "NULLS", "FIRST", "LAST"}


def _term(source: SourceText, item: Any) -> str:
    text = ""
    for before, atom in zip([None, *item.children], item.children, strict=False):
        names = [kind_of(part) in ("NAME", "QUOTED", "STRING") for part in (before, atom)]
        if all(names) and str(atom).upper() not in _ORDERS:
            raise source.error(first(atom), f"expected ',' or ')' before {atom}")
        if isinstance(atom, Tree):
            # the name of a function, as BUCKET, is lower-case; names of columns stay as they are
            text = f"{text.lower()}({', '.join(_term(source, below) for below in atom.children)})"
        elif atom.type == "DOT":
            text += "."
        else:
            glue = " " if text and not text.endswith((".", "(")) else ""
            text += f"{glue}{atom}"
    return text


def number(text: str) -> int | float | str:
    """A number, or a text like `20m` that needs no quotes."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text) if len(text) < 40 else text
    if re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", text):
        return float(text)
    return text


def kind_of(node: Node) -> str:
    return node.type if isinstance(node, Token) else ""


def identifier(token: Any) -> str:
    """The name of an object: without quotes in lower case, as in other SQLs."""
    return str(token) if token.type != "NAME" else str(token).lower()


def first(node: Any) -> int:
    """Where a node of the tree begins."""
    if isinstance(node, Tree):
        return 0 if node.meta.empty else node.meta.start_pos
    return getattr(node, "start_pos", 0) or 0


def settings(
    options: Iterator[RawOption],
    scopes: tuple[str, ...],
    *,
    removing: bool = False,
    allowed: Callable[[Setting], bool] = lambda setting: setting not in SAID,
) -> dict[Setting, Option]:
    """The settings that options name; `removing`: they have no values (RESET)."""
    made: dict[Setting, Option] = {}
    for option in chain.from_iterable(map(_keys_of, options)):
        setting, value = _setting(option, scopes, removing)
        if not allowed(setting):
            raise option.error(
                f"{option.shown} is not an option here: a clause of the statement sets it"
            )
        if setting in made:
            raise option.error(f"{option.shown} is given twice")
        made[setting] = Option(_fitted(option, setting, value), option.value_location)
    return made


def _keys_of(option: RawOption) -> Iterator[RawOption]:
    """`KAFKA = MAP ['a' => 1]` is `KAFKA 'a' = 1`."""
    names = {name.replace(".", "_") for name, of in sections().items() if of.passes_through}
    if isinstance(option.value, Mapping) and "_".join(option.words).lower() in names:
        for key, value in option.value.items():
            yield replace(option, key=key, value=value)
    else:
        yield option


def _setting(option: RawOption, scopes: tuple[str, ...], removing: bool) -> tuple[Setting, Any]:
    words, value = option.words, option.value
    try:
        setting = setting_of(words, option.key, scopes)
    except UnknownOption as error:
        if value is None and len(words) > 1 and not option.key and not removing:
            try:
                setting, value = setting_of(words[:-1], "", scopes), Word(words[-1])
            except UnknownOption:
                raise unknown(option, str(error)) from None
        else:
            raise unknown(option, str(error)) from None
    if removing:
        if value is not None:
            raise option.error(f"expected {option.shown} without a value: RESET takes it away")
    elif value is None:
        if type_of(setting) != "bool":
            raise option.error(f"{option.shown} has no value")
        value = True
    return setting, value


_COLUMNS = {("table", "key"), ("table", "identifier_fields")}


def unknown(option: RawOption, known: str) -> SqlError:
    cut = option.shown.split("'")[0].strip() != " ".join(option.words).upper()
    return option.error(f"unknown option {option.shown}{'' if cut else known}")


def _fitted(option: RawOption, setting: Setting, value: Any) -> Any:
    kind = type_of(setting)
    if isinstance(value, Word):
        if setting == ("table", "mode"):
            return value.text.lower()
        shown = "" if SECRET.search(setting[1]) else f", found {value.text[:40]}"
        raise option.value_location.source.error(
            option.value_location.at, f"expected a value in single quotes{shown}"
        )
    if setting in _COLUMNS and any(re.fullmatch(r"\w+\(.*\)", str(text)) for text in value):
        at = option.value_location
        raise at.source.error(at.at, f"{option.shown} takes columns, and no functions of them")
    if setting[0] == "route" and kind == "str" and isinstance(value, (int, float)):
        at = option.value_location
        raise at.source.error(at.at, f"expected a text in single quotes, found {value}")
    if kind.startswith("tuple") and isinstance(value, (str, int, float)):
        return [str(value)]
    if value == [] and "dict" in kind:
        return {}
    mapping, secret = isinstance(value, Mapping), isinstance(value, SecretName)
    if (mapping and kind == "str") or (secret and kind != "str"):
        raise option.error(f"{option.shown} takes another kind of value")
    return value
