"""All definitions together: what a statement changes in them, and the config of each sink.

In: definitions by kind and name, and a statement. Out: the definitions that it makes, changes or
takes away, after all checks: nothing is kept that refers to nothing, and nothing is dropped that
something refers to. Pure: `frazil.sql.definitions` keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frazil.config.checks import check_catalog
from frazil.config.environment import overlay
from frazil.config.model import Config, from_document
from frazil.config.origins import Origins
from frazil.errors import ConfigError, SqlError
from frazil.sql import connections
from frazil.sql.document_builder import (
    Objects,
    SourceLocations,
    checked_query,
    connection,
    document,
    named,
    qualified,
    refusal,
)
from frazil.sql.formatter import name_text
from frazil.sql.option_names import in_words
from frazil.sql.options import RawOption
from frazil.sql.statements import (
    Alter,
    Connection,
    Create,
    Definition,
    Drop,
    Key,
    Option,
    Secret,
    SecretName,
    Setting,
    SinkStatement,
    View,
    Word,
    key_of,
)

Change = Create | Alter | Drop
#: What becomes of definitions; None: taken away.
Changes = dict[Key, Definition | None]


def config_of(
    objects: Objects, name: str, base: Path = Path(), environ: Mapping[str, str] | None = None
) -> tuple[Config, Origins]:
    """The config of a sink, and where each of its settings comes from. `base`: the folder of paths;
    `environ`: variables that override settings."""
    sink = named(objects, SinkStatement, name, None)
    content, locations = document(objects, sink)
    origins: Origins = {setting: str(location) for setting, location in locations.items()}
    overlay(content, environ or {}, origins)
    try:
        config = from_document(content, base)
        check_catalog(config)
    except SqlError:
        raise
    except ConfigError as error:
        raise _placed(error, locations, sink) from None
    return config, origins


def _placed(error: ConfigError, locations: SourceLocations, sink: SinkStatement) -> SqlError:
    """The error, with the line of the setting that it concerns."""
    words = ".".join(error.path).split(".")
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    location = next((locations[name] for name in names if name in locations), sink.location)
    assert location is not None
    return SqlError(
        f"{in_words(error._fact)} ({location})",
        hint=in_words(error.hint),
        path=error.path,
        excerpt=location.source.excerpt(location.at),
    )


def changes(objects: Objects, statement: Change, base: Path = Path()) -> Changes:
    """Raises `SqlError` if the statement cannot be; an empty result: there is nothing to do."""
    if isinstance(statement, Create):
        made = _created(objects, statement)
    elif isinstance(statement, Drop):
        made = _dropped(objects, statement)
    else:
        made = _altered(objects, statement)
    after = {key: value for key, value in {**objects, **made}.items() if value is not None}
    for key, definition in made.items():
        if definition is not None:
            _check(after, definition, base)
            for sink in _sinks_of(after, key):
                if _valid(objects, sink, base):
                    config_of(after, sink, base)
    return made


def _created(objects: Objects, statement: Create) -> Changes:
    definition = statement.definition
    key = key_of(definition)
    if key in objects:
        if statement.if_not_exists:
            return {}
        if not statement.replace:
            kind, name = key
            raise refusal(
                statement.location,
                f"there is a {kind} {name} already",
                hint=f"CREATE OR REPLACE {kind.upper()} {name_text(name)} …, or IF NOT EXISTS",
            )
    alike = [name for kind, name in objects if kind == key[0] and name.lower() == key[1].lower()]
    if alike and key not in objects:
        raise refusal(
            statement.location,
            f"there is a {key[0]} {alike[0]}; expected a name that differs in more than case",
        )
    return {key: definition}


def _dropped(objects: Objects, statement: Drop) -> Changes:
    kind, name = statement.key
    if statement.key not in objects:
        if statement.if_exists:
            return {}
        raise _absent(objects, statement)
    users = [f"{of} {user}" for of, user in dependents(objects, statement.key)]
    if users:
        raise refusal(
            statement.location,
            f"{', '.join(users)} {'need' if len(users) > 1 else 'needs'} {kind} {name}",
            hint="drop that first",
        )
    return {statement.key: None}


def _absent(objects: Objects, statement: Alter | Drop) -> SqlError:
    kinds: dict[str, type[Any]] = {t.KIND: t for t in (Secret, Connection, View, SinkStatement)}
    try:
        named(objects, kinds[statement.key[0]], statement.key[1], statement.location)
    except SqlError as error:
        return error
    raise AssertionError(statement)


def _altered(objects: Objects, statement: Alter) -> Changes:
    if statement.key not in objects:
        if statement.if_exists:
            return {}
        raise _absent(objects, statement)
    before = objects[statement.key]
    if isinstance(before, Connection):
        return {statement.key: _altered_connection(before, statement)}
    assert isinstance(before, SinkStatement)
    if not statement.table:
        options = _merged(before.options, statement)
        return {statement.key: dataclasses.replace(before, options=options)}
    tables = list(before.tables)
    names = [table.name for table in tables]
    wanted = qualified(before, statement.table)
    whole = [qualified(before, name) for name in names]
    if wanted not in whole:
        raise refusal(
            statement.location,
            f"sink {before.name} has no table {statement.table!r}; its "
            f"tables are {', '.join(map(repr, names))}",
        )
    at = whole.index(wanted)
    tables[at] = dataclasses.replace(tables[at], options=_merged(tables[at].options, statement))
    return {statement.key: dataclasses.replace(before, tables=tuple(tables))}


def _merged(before: Mapping[Setting, Option], statement: Alter) -> dict[Setting, Option]:
    if not statement.removing:
        return {**before, **statement.options}
    for setting, option in statement.options.items():
        if setting not in before:
            raise refusal(
                option.location, f"{' '.join(setting).replace('_', ' ').upper()} is not set"
            )
    return {key: value for key, value in before.items() if key not in statement.options}


def _altered_connection(before: Connection, statement: Alter) -> Connection:
    raw: list[RawOption] = statement.options
    if not statement.removing:
        given = connections.connection_options(before.type, raw)
        return dataclasses.replace(before, options={**before.options, **given})
    options = dict(before.options)
    for option in raw:
        name = connections.property_name(before.type, option)
        if name not in options:
            raise option.error(f"{option.shown} is not set")
        del options[name]
    return dataclasses.replace(before, options=options)


def _check(objects: Objects, definition: Definition, base: Path) -> None:
    """All that a definition refers to is there."""
    if isinstance(definition, Connection):
        connections.check_complete(definition)
        for option in definition.options.values():
            if isinstance(option.value, SecretName):
                named(objects, Secret, option.value.name, option.location)
            elif isinstance(option.value, Word):
                connection(objects, option.value.text, "aws", option.location)
    elif isinstance(definition, View):
        checked_query(definition)
        connection(objects, definition.source.connection, "kafka", definition.source.location)
        if definition.source.registry:
            connection(objects, definition.source.registry, "registry", definition.source.location)
    elif isinstance(definition, SinkStatement):
        config_of(objects, definition.name, base)


def _valid(objects: Objects, sink: str, base: Path) -> bool:
    try:
        config_of(objects, sink, base)
    except Exception:  # a defect of one sink must not hinder statements about others
        return False
    return True


def uses(definition: Definition) -> Iterator[Key]:
    """What a definition refers to."""
    options: list[Option] = []
    if isinstance(definition, Connection):
        options = list(definition.options.values())
    elif isinstance(definition, View):
        yield from _of_source(definition.source)
    elif isinstance(definition, SinkStatement):
        yield "connection", definition.catalog
        if definition.aws:
            yield "connection", definition.aws
        if isinstance(definition.source, str):
            yield "view", definition.source
        else:
            yield from _of_source(definition.source)
        options = list(definition.options.values())
    for option in options:
        if isinstance(option.value, SecretName):
            yield "secret", option.value.name
        elif isinstance(option.value, Word):
            yield "connection", option.value.text


def _of_source(source: Any) -> Iterator[Key]:
    yield "connection", source.connection
    if source.registry:
        yield "connection", source.registry
    for option in source.options.values():
        if isinstance(option.value, SecretName):
            yield "secret", option.value.name


def dependents(objects: Objects, key: Key) -> list[Key]:
    """What refers to this, directly."""
    return sorted(other for other, definition in objects.items() if key in uses(definition))


def concerned(objects: Objects, made: Changes) -> Iterator[str]:
    """The sinks whose configs a change may change."""
    after = {key: value for key, value in {**objects, **made}.items() if value is not None}
    for key in made:
        if key[0] == "sink":
            yield key[1]
        yield from _sinks_of(objects, key)
        yield from _sinks_of(after, key)


def _sinks_of(objects: Objects, key: Key) -> Iterator[str]:
    """The sinks that this concerns, but for itself."""
    waiting, done = [key], {key}
    while waiting:
        for other in dependents(objects, waiting.pop()):
            if other not in done:
                done.add(other)
                waiting.append(other)
                if other[0] == "sink":
                    yield other[1]
