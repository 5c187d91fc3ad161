"""Statements that change definitions, and what becomes of the texts that are kept.

In: a store and a statement. Out: the definitions before and after. A file may hold several
statements, and comments: only the statement that changes is replaced. Where another process was
first, the statement is checked and applied again. Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frazil.errors import Conflict, FrazilError
from frazil.sql.definition_files import DefinitionStore, StoredTexts
from frazil.sql.definition_set import Changes, changes, concerned
from frazil.sql.definitions import (
    RUNNING,
    STOPPED,
    LoadedDefinitions,
    MemoryStore,
    definitions_of,
    home_of,
    loaded,
)
from frazil.sql.document_builder import Objects, named
from frazil.sql.formatter import create_text, name_text
from frazil.sql.statements import Command, Create, SinkStatement, Statement, key_of
from frazil.sql.tree_reader import spanned_statements

#: How often a statement is applied again where others change the definitions, too.
_TRIES = 20


@dataclass(frozen=True)
class AppliedStatement:
    before: LoadedDefinitions
    after: LoadedDefinitions
    #: the sinks whose configs may differ
    sinks: frozenset[str]

    @property
    def changed(self) -> bool:
        one, other = self.before, self.after
        return (one.objects, _stopped(one)) != (other.objects, _stopped(other))


def _stopped(definitions: LoadedDefinitions) -> set[str]:
    return {name for name, state in definitions.states.items() if state == STOPPED}


def apply(
    store: DefinitionStore | MemoryStore,
    statement: Statement,
    refuse: Callable[[Objects, Changes], None] = lambda before, made: None,
) -> AppliedStatement:
    """CREATE, ALTER, DROP, START or STOP. Raises `SqlError` if it cannot be, what `refuse` raises,
    and `Conflict` if others are always faster."""
    for attempt in range(_TRIES):
        before = definitions_of(store)
        made, states = _changes(before, statement, store)
        refuse(before.objects, made)
        sinks = frozenset({*concerned(before.objects, made), *states})
        if isinstance(store, MemoryStore):
            store.change(made, states)
            return AppliedStatement(before, store.definitions, sinks)
        texts = _changed_texts(before, made, states)
        after = loaded(StoredTexts(texts, ""))
        _verify(before, after, made)
        differing = {
            name: texts.get(name)
            for name in {**before.stored.texts, **texts}
            if texts.get(name) != before.stored.texts.get(name)
        }
        try:
            if differing:
                store.write(before.stored, differing)
            return AppliedStatement(before, after, sinks)
        except Conflict:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError


def _changes(
    before: LoadedDefinitions, statement: Statement, store: DefinitionStore | MemoryStore
) -> tuple[Changes, dict[str, str]]:
    if isinstance(statement, Command):
        named(before.objects, SinkStatement, statement.name, statement.location)
        state = RUNNING if statement.verb == "start" else STOPPED
        known = before.states.get(statement.name, RUNNING)
        return {}, {statement.name: state} if state != known else {}
    made = changes(before.objects, statement, store.base)
    gone = {key[1]: RUNNING for key, value in made.items() if key[0] == "sink" and value is None}
    return made, gone


def _changed_texts(
    before: LoadedDefinitions, made: Changes, states: Mapping[str, str]
) -> dict[str, str]:
    texts = dict(before.stored.texts)
    for key, definition in made.items():
        if definition is not None and key not in before.homes:
            home = home_of(key)
            if home in before.errors:
                raise before.errors[home]
            texts[home] = _joined(texts.get(home, ""), create_text(definition))
    for name in before.stored.texts:
        if name not in before.errors:
            texts[name] = _changed_text(name, texts[name], before, made, states)
    for sink, state in states.items():
        key = ("sink", sink)
        if state == STOPPED:
            home = before.homes[key]
            texts[home] = _joined(texts[home], f"STOP SINK {name_text(sink)};")
    return {name: text for name, text in texts.items() if text.strip()}


def _joined(text: str, statement: str) -> str:
    """The text with one more statement."""
    closed = all(parsed.behind for parsed, _ in spanned_statements(text, ""))
    lead = f"{text.rstrip()}{'' if closed else ';'}\n\n" if text.strip() else ""
    return f"{lead}{statement}\n"


def _changed_text(
    name: str,
    text: str,
    before: LoadedDefinitions,
    made: Changes,
    states: Mapping[str, str],
) -> str:
    """The text of a file with each statement replaced or removed that changes."""
    pieces, at = [], 0
    for raw, statement in spanned_statements(text, name):
        end = raw.behind or raw.end
        if isinstance(statement, Create):
            key = key_of(statement.definition)
            if key not in made or key not in before.homes:
                continue
            definition = made[key]
            replacement = create_text(definition) if definition else ""
        elif isinstance(statement, Command) and statement.name in states:
            replacement = ""
        else:
            continue
        pieces += [text[at : raw.start], replacement]
        at = end if replacement else _line_end(text, end)
    return "".join([*pieces, text[at:]])


def _line_end(text: str, at: int) -> int:
    """Behind the line break, if nothing else is on the line."""
    end = text.find("\n", at)
    return end + 1 if end >= 0 and not text[at:end].strip() else at


def _verify(before: LoadedDefinitions, after: LoadedDefinitions, made: Changes) -> None:
    """What is written must be read as what it was made of."""
    expected = {
        key: value for key, value in {**before.objects, **made}.items() if value is not None
    }
    if after.errors.keys() != before.errors.keys() or after.objects != expected:
        raise FrazilError(
            "cannot change definitions: their text would be read as another definition",
            hint="nothing was changed; please report the statement",
        )
