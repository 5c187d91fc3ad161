"""Definitions as a process that runs sinks sees them: each sink with its config, whether it is to
run, and a version that changes with the config.

In: a directory or table of definitions, or a file of statements. Out: `sinks()`, read again with
each call; a definition that cannot be read is the error of the sinks that need it, and no other's.

    definitions = open_definitions("defs")
    with definitions.watching():
        for name, sink in definitions.sinks().items(): ...
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from frazil.config.model import Config, load
from frazil.config.origins import Origins
from frazil.errors import ConfigError, SqlError, counted, defect
from frazil.sql.definition_files import (
    MARKER,
    DefinitionFiles,
    DefinitionStore,
    StoredTexts,
    read_file,
)
from frazil.sql.definition_set import Changes, changes, config_of
from frazil.sql.document_builder import document, named
from frazil.sql.statements import (
    Alter,
    Command,
    Create,
    Definition,
    Drop,
    Key,
    SinkStatement,
    key_of,
)
from frazil.sql.tree_reader import read_statements, spanned_statements

RUNNING, STOPPED = "running", "stopped"


class SinkDefinition(NamedTuple):
    #: None: it cannot be made, and `error` says why
    config: Config | None
    #: running or stopped: what START SINK or STOP SINK said last; running where neither did
    state: str
    #: changes with the config, whichever statement changes it; not with the state
    version: str
    error: ConfigError | None = None


@dataclass
class LoadedDefinitions:
    """What a store holds, read."""

    stored: StoredTexts
    objects: dict[Key, Definition] = field(default_factory=dict)
    #: of the sinks that START or STOP SINK named
    states: dict[str, str] = field(default_factory=dict)
    #: the file or row of each object
    homes: dict[Key, str] = field(default_factory=dict)
    #: file or row → why it cannot be read
    errors: dict[str, ConfigError] = field(default_factory=dict)


def loaded(stored: StoredTexts) -> LoadedDefinitions:
    made = LoadedDefinitions(stored)
    for name, text in stored.texts.items():
        try:
            _load(made, name, text)
        except SqlError as error:
            made.errors[name] = error
        except Exception as error:  # a defect concerns one definition, and no other
            made.errors[name] = defect(error)
    for name, text in stored.texts.items():
        for command in _commands(text, name) if name not in made.errors else ():
            try:
                named(made.objects, SinkStatement, command.name, command.location)
            except SqlError as error:
                made.errors[name] = error
    return made


def _commands(text: str, name: str) -> Iterator[Command]:
    for _, statement in spanned_statements(text, name):
        if isinstance(statement, Command):
            yield statement


def _load(made: LoadedDefinitions, name: str, text: str) -> None:
    for statement in read_statements(text, name):
        if isinstance(statement, Create):
            key = key_of(statement.definition)
            if key in made.homes:
                assert statement.location
                fact = f"{' '.join(key)} is also defined in {made.homes[key]}"
                raise statement.location.source.error(statement.location.at, fact)
            made.objects[key], made.homes[key] = statement.definition, name
        elif isinstance(statement, Command) and statement.verb in ("start", "stop"):
            made.states[statement.name] = RUNNING if statement.verb == "start" else STOPPED
        else:
            assert statement.location
            raise statement.location.source.error(
                statement.location.at,
                "a directory of definitions holds CREATE, START and STOP, and nothing else",
            )


class MemoryStore:
    """Definitions of one command or prompt, as they were read: gone with the process."""

    arguments = ""

    def __init__(self, base: Path = Path()) -> None:
        self.base = base
        self.definitions = LoadedDefinitions(StoredTexts({}, ""))

    def change(self, made: Changes, states: Mapping[str, str]) -> None:
        before = self.definitions
        merged = {**before.objects, **made}
        objects = {key: definition for key, definition in merged.items() if definition is not None}
        kept = {name: state for name, state in before.states.items() if ("sink", name) in objects}
        self.definitions = LoadedDefinitions(before.stored, objects, {**kept, **states})

    def watched(self) -> bool | None:
        return False


def definitions_of(store: DefinitionStore | MemoryStore) -> LoadedDefinitions:
    return store.definitions if isinstance(store, MemoryStore) else loaded(store.read())


def home_of(key: Key) -> str:
    """The file of an object, or its row: `sinks/orders.sql`."""
    return f"{key[0]}s/{key[1]}.sql"


class StoredDefinitions:
    """Definitions that are kept, for a process that runs their sinks."""

    def __init__(self, store: DefinitionStore, environ: Mapping[str, str] = os.environ) -> None:
        self.store = store
        self._environ = environ

    def sinks(self) -> dict[str, SinkDefinition]:
        """All sinks as they are now, by name."""
        return sink_definitions(loaded(self.store.read()), self.store.base, self._environ)

    def watching(self) -> AbstractContextManager[None]:
        """START SINK tells whether some process is in here."""
        if isinstance(self.store, DefinitionFiles):
            return self.store.watching()
        return nullcontext()


def sink_definitions(
    definitions: LoadedDefinitions,
    base: Path,
    environ: Mapping[str, str],
    only: Collection[str] | None = None,
) -> dict[str, SinkDefinition]:
    """All sinks, or only these."""
    made: dict[str, SinkDefinition] = {}
    for (kind, name), definition in sorted(definitions.objects.items()):
        if kind != "sink" or not isinstance(definition, SinkStatement):
            continue
        if only is not None and name not in only:
            continue
        state = definitions.states.get(name, RUNNING)
        try:
            content, _ = document(definitions.objects, definition)
            text = json.dumps(content, sort_keys=True, default=str)
            version = hashlib.sha256(text.encode()).hexdigest()[:16]
            config, _ = config_of(definitions.objects, name, base, environ)
            made[name] = SinkDefinition(config, state, version)
        except ConfigError as error:
            made[name] = SinkDefinition(None, state, "", error)
        except Exception as error:
            made[name] = SinkDefinition(None, state, "", defect(error))
    for home, trouble in definitions.errors.items():  # a sink's own file cannot be read
        folder, _, name = home.partition("/")
        name = name.removesuffix(".sql")
        if folder == "sinks" and name not in made and (only is None or name in only):
            made[name] = SinkDefinition(None, RUNNING, "", trouble)
    return made


def open_definitions(
    directory: str | Path, environ: Mapping[str, str] = os.environ
) -> StoredDefinitions:
    return StoredDefinitions(DefinitionFiles(directory), environ)


def configs_of(path: str | Path, environ: Mapping[str, str] = os.environ) -> dict[str, Config]:
    """The configs of the sinks that a TOML file, a file of statements, or a directory of such files
    defines and does not stop, by name. Statements that show, explain or audit are left out."""
    path = Path(path)
    if path.is_dir():
        sinks = open_definitions(path, environ).sinks()
        for sink in sinks.values():
            if sink.error:
                raise sink.error
        return {
            n: sink.config for n, sink in sinks.items() if sink.config and sink.state == RUNNING
        }
    if path.suffix == ".toml":
        config = load(path, environ)
        return {config.sink.id: config}
    definitions = file_definitions(read_file(path), path)
    return {
        name: config_of(definitions.objects, name, path.parent, environ)[0]
        for kind, name in definitions.objects
        if kind == "sink" and definitions.states.get(name) != STOPPED
    }


def file_definitions(text: str, path: Path) -> LoadedDefinitions:
    """What the statements of a file define, one after the other."""
    store = MemoryStore(path.parent)
    for statement in read_statements(text, path.name):
        objects = store.definitions.objects
        if isinstance(statement, Create | Alter | Drop):
            store.change(changes(objects, statement, path.parent), {})
        elif statement.verb in ("start", "stop"):
            named(objects, SinkStatement, statement.name, statement.location)
            state = RUNNING if statement.verb == "start" else STOPPED
            store.change({}, {statement.name: state})
    return store.definitions


def config_of_file(
    path: str | Path, sink: str = "", environ: Mapping[str, str] = os.environ
) -> tuple[Config, Origins]:
    """The config of a sink in a file of statements, of its only one if none is named, and the
    origin of each setting. A file `sinks/NAME.sql` may be one of a directory of definitions."""
    path = Path(path)
    if path.parent.name == "sinks" and (path.parent.parent / MARKER).exists() and not sink:
        stored = loaded(DefinitionFiles(path.parent.parent).read())
        homes = [
            name for (kind, name), home in stored.homes.items() if home == f"sinks/{path.name}"
        ]
        if len(homes) == 1:
            return config_of(stored.objects, homes[0], path.parent.parent, environ)
    objects = file_definitions(read_file(path), path).objects
    names = [name for kind, name in objects if kind == "sink"]
    shown = ", ".join(names)
    if sink and sink not in names:
        raise ConfigError(f"cannot find sink {sink} in {path}: its sinks are {shown}")
    if not sink and len(names) != 1:
        raise ConfigError(
            f"cannot take {path} for one config: it defines {counted(len(names), 'sink')}; "
            "expected one",
            hint=shown if names else "CREATE SINK name FROM … TO …",
        )
    return config_of(objects, sink or names[0], path.parent, environ)
