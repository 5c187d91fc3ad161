"""The texts that people read: errors, hints, help, log lines. Each is read once, at night."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import frazil
from frazil.cli.commands import app

ROOT = Path(frazil.__file__).parent
#: Phrases that need a second reading → what says the same.
BANNED = {
    r"cannot go on": "cannot continue, cannot start, cannot commit to table …",
    r"(was|is|be|are) made again|made anew": "was recreated",
    r"put back|taken back": "rolled back, restored",
    r"meanwhile": "during …, since …",
    r"came and went": "was created and dropped",
    r"stands?": "is, is at, is written",
    r"for later": "postponed",
    r"tells?|told": "shows, records, reports",
    r"is known": "was found, is …",
    r"nobody|somebody|whoever": "no sink, another client, the caller",
    r"anew|amid|mends?|mended": "again, between, fix",
    r"at the same moment": "at the same time",
    r"knows nothing": "has no entry",
    r"wait, staged": "stay staged",
    r"(is|are) there twice": "is duplicated",
    r"any more": "no longer",
    r"look after": "maintain",
    r"nothing (says|shows)": "… is missing",
}
#: A subject without a name.
PRONOUN = re.compile(r"^cannot \w+ (it|them|they|that one|this one)\b")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return ""


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts of at least three words, with their lines; docstrings are not messages."""
    parts = {id(part) for node in ast.walk(tree) for part in _inner(node)}
    for node in ast.walk(tree):
        if id(node) not in parts and isinstance(node, (ast.Constant, ast.JoinedStr)):
            text = _text(node)
            if len(text.split()) >= 3:
                yield node.lineno, text


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of an f-string, and docstrings."""
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in ast.walk(node) if part is not node)
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from (line.value for line in node.body[:1] if isinstance(line, ast.Expr))


def helps(group: typer.Typer) -> Iterator[str]:
    """The help of each command, which is its docstring."""
    yield from (command.help or "" for command in group.registered_commands)
    for inner in group.registered_groups:
        assert inner.typer_instance
        yield from helps(inner.typer_instance)


TEXTS = {
    str(path.relative_to(ROOT)): list(messages(ast.parse(path.read_text())))
    for path in sorted(ROOT.rglob("*.py"))
}
TEXTS["--help"] = [(0, text) for text in helps(app)]


def test_messages_are_seen():
    """Else the next tests hold because nothing is seen."""
    tree = ast.parse('"""A doc string of words."""\nf("cannot read it: x")\ng(f"one {two} three")')
    assert list(messages(tree)) == [(2, "cannot read it: x"), (3, "one … three")]
    assert sum(map(len, TEXTS.values())) > 1_500


@pytest.mark.parametrize("module", TEXTS)
def test_no_message_has_a_phrase_that_needs_a_second_reading(module: str):
    phrases = "|".join(BANNED)
    wrong = [
        (line, text)
        for line, text in TEXTS[module]
        if re.search(rf"\b({phrases})\b", re.sub(r"`[^`]*`", "", text), re.IGNORECASE)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", TEXTS)
def test_a_message_names_its_object(module: str):
    assert [(line, text) for line, text in TEXTS[module] if PRONOUN.match(text)] == []
