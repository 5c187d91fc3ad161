"""Which sinks a service runs: their definitions, looked at again and again.

In: TOML files, files of SQL statements, and folders of both. Out: what they define now, and what is
wrong with them. A file is taken as it is when two looks have seen the same content, so one that is
being written does not count. A file that cannot be read, or that contradicts another, defines
nothing, and takes nothing away: a sink of its former content goes on. Runs on the driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from frazil.config.model import Config, load
from frazil.errors import ConfigError, FrazilError, defect
from frazil.sql.definition_files import (
    DefinitionFiles,
    DefinitionStore,
    StoredTexts,
    is_folder,
)
from frazil.sql.definitions import (
    RUNNING,
    StoredDefinitions,
    configs_of,
    home_of,
    loaded,
    sink_definitions,
)


@dataclass(frozen=True, slots=True)
class Definition:
    """One sink, as it is defined now."""

    config: Config
    #: where: `orders.toml`
    origin: str
    #: another one whenever the definition was changed
    version: str = ""
    #: should it run?
    running: bool = True

    @property
    def sink(self) -> str:
        return self.config.sink.id


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a file defines no sink; `sinks`: ids of sinks that it must not take away."""

    message: str
    sinks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Definitions:
    """One look: sinks by id, and problems by file."""

    sinks: Mapping[str, Definition] = field(default_factory=dict)
    problems: Mapping[str, Problem] = field(default_factory=dict)

    def keeps(self, definition: Definition) -> bool:
        """Is a sink that is not defined any more to go on, because of a problem?"""
        return definition.origin in self.problems or any(
            definition.sink in problem.sinks for problem in self.problems.values()
        )


class DefinitionSource(Protocol):
    def read(self) -> Definitions:
        """What is defined now. Does not raise for what is wrong in a definition."""

    def watching(self) -> AbstractContextManager[object]:
        """Held by a service that looks again and again."""


def combined(definitions: Iterable[Definition], problems: Mapping[str, Problem]) -> Definitions:
    """Sinks by their ids; an id that several have is a problem of each of them."""
    by_sink: dict[str, list[Definition]] = {}
    for definition in definitions:
        by_sink.setdefault(definition.sink, []).append(definition)
    wrong = dict(problems)
    for sink, several in by_sink.items():
        if len(several) > 1:
            origins = sorted(definition.origin for definition in several)
            message = f"cannot run sink {sink}: it is defined {len(several)} times: in " + (
                f"{', '.join(origins[:-1])} and {origins[-1]}"
            )
            for origin in origins:
                known = wrong.get(origin, Problem(message)).sinks
                wrong[origin] = Problem(message, known | {sink})
    single = {sink: several[0] for sink, several in by_sink.items() if len(several) == 1}
    return Definitions(single, wrong)


@dataclass(frozen=True, slots=True)
class FixedConfigs:
    """Sinks by their configs: nothing changes."""

    configs: Sequence[Config]

    def read(self) -> Definitions:
        made = [Definition(c, f"config {number}") for number, c in enumerate(self.configs, 1)]
        return combined(made, {})

    def watching(self) -> AbstractContextManager[object]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Several:
    """Sources together: an id may be in one of them only."""

    sources: Sequence[DefinitionSource]

    def read(self) -> Definitions:
        looks = [source.read() for source in self.sources]
        problems = {name: problem for look in looks for name, problem in look.problems.items()}
        return combined([made for look in looks for made in look.sinks.values()], problems)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for source in self.sources:
                stack.enter_context(source.watching())
            yield


def source_of(targets: Sequence[str | Path | Config | DefinitionStore]) -> DefinitionSource:
    """Files and folders of files, configs, or stores of SQL statements."""
    configs = [target for target in targets if isinstance(target, Config)]
    paths = [Path(target) for target in targets if isinstance(target, (str, Path))]
    stores = [t for t in targets if not isinstance(t, (str, Path, Config))]
    stores += [DefinitionFiles(path) for path in paths if is_folder(path)]
    stored = [StoredStatements(store) for store in stores]
    return Several([FixedConfigs(configs), ConfigFiles(paths), *stored])


class StoredStatements:
    """The SQL statements of a folder or table: together they define its sinks."""

    def __init__(self, store: DefinitionStore) -> None:
        self._definitions = StoredDefinitions(store)
        self._seen = self._taken = ""
        self._result = Definitions()

    def read(self) -> Definitions:
        store = self._definitions.store
        try:
            stored = store.read()
        except FrazilError as error:  # a catalog may be away for a while
            held = frozenset(self._result.sinks)
            return Definitions({}, {store.arguments: Problem(str(error), held)})
        settled = not self._taken or stored.version == self._seen
        self._seen = stored.version
        if settled and stored.version != self._taken:
            self._taken, self._result = stored.version, self._read(stored)
        return self._result

    def _read(self, stored: StoredTexts) -> Definitions:
        made = loaded(stored)
        problems = {home: Problem(str(error)) for home, error in made.errors.items()}
        definitions = []
        sinks = sink_definitions(made, self._definitions.store.base, os.environ)
        for name, sink in sinks.items():
            key = ("sink", name)
            home = made.homes.get(key, home_of(key))
            if sink.config is not None:
                running = sink.state == RUNNING
                definitions.append(Definition(sink.config, home, sink.version, running))
            else:
                message = str(sink.error)
                problems[home] = Problem(message, problems.get(home, Problem("")).sinks | {name})
        return combined(definitions, problems)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._result.sinks:  # it leaves a file in the folder
                with suppress(OSError):  # in one that may only be read it cannot
                    stack.enter_context(self._definitions.watching())
            yield


#: The content of a file, and when it was written; None if it cannot be read.
_Content = tuple[bytes, int] | None
_NOTHING = (b"", -1)


@dataclass(slots=True)
class _File:
    """What the last look has seen, and what is taken from the file."""

    name: str
    seen: _Content = _NOTHING
    taken: _Content = _NOTHING
    definitions: tuple[Definition, ...] = ()
    problem: Problem | None = None
    gone: bool = False

    @property
    def sinks(self) -> frozenset[str]:
        kept = self.problem.sinks if self.problem else frozenset()
        return kept | {definition.sink for definition in self.definitions}


class ConfigFiles:
    """Files, and folders of TOML files. Symbolic links are followed, hidden files are not read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._folders = {path for path in paths if is_folder(path)}
        homes = {path if path in self._folders else path.parent for path in paths}
        self._short = len(homes) == 1
        self._files: dict[Path, _File] = {}
        self._first = True

    def read(self) -> Definitions:
        listed, problems = self._listed()
        for path in [*listed, *(path for path in self._files if path not in listed)]:
            name = path.name if self._short else str(path)
            file = self._files.setdefault(path, _File(name))
            if path in listed:
                self._look(path, file)
            elif not problems:  # a folder that cannot be listed does not show what was removed
                if file.gone:
                    del self._files[path]
                file.gone = True
        self._first = False
        files = self._files.values()
        problems |= {file.name: file.problem for file in files if file.problem}
        return combined([made for file in files for made in file.definitions], problems)

    def watching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _listed(self) -> tuple[list[Path], dict[str, Problem]]:
        paths: dict[Path, None] = {}
        problems = {}
        for path in self._paths:
            if path not in self._folders:
                if self._first or _exists(path):  # a file that was never there is a problem
                    paths[path] = None
                continue
            try:
                below = sorted(path.iterdir())
            except OSError as error:
                held = [file.sinks for known, file in self._files.items() if known.parent == path]
                problems[str(path)] = Problem(
                    f"cannot read folder {path}: {error.strerror}", frozenset().union(*held)
                )
            else:
                paths |= dict.fromkeys(
                    p for p in below if p.suffix == ".toml" and not p.name.startswith(".")
                )
        return list(paths), problems

    def _look(self, path: Path, file: _File) -> None:
        file.gone = False
        content = _content(path)
        settled = self._first or content == file.seen
        file.seen = content
        if not settled or content == file.taken:
            return
        definitions: tuple[Definition, ...] = ()
        problem = None
        try:
            configs = configs_of(path) if path.suffix == ".sql" else _of_toml(path)
            version = str(content[1]) if content else ""
            definitions = tuple(Definition(c, file.name, version) for c in configs.values())
        except ConfigError as error:
            problem = Problem(str(error), file.sinks)
        except Exception as error:
            problem = Problem(str(defect(error)), file.sinks)
        if _content(path) == content:  # else it was written meanwhile
            file.taken, file.definitions, file.problem = content, definitions, problem


def _of_toml(path: Path) -> Mapping[str, Config]:
    config = load(path)
    return {config.sink.id: config}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _content(path: Path) -> _Content:
    try:
        return path.read_bytes(), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
