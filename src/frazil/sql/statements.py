"""What the statements say, as values.

In: nothing but what was written. Out: frozen dataclasses; two of them are equal if they say the
same, wherever it was written. `Definition`s are kept, the others do something once. Options have
the names of the config's settings: `("sink", "commit_interval")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from frazil.sql.source_text import SourceText


class SourceLocation(NamedTuple):
    source: SourceText
    at: int

    def __str__(self) -> str:
        return self.source.location(self.at)


@dataclass(frozen=True)
class SecretName:
    """`SECRET name` in place of a value."""

    name: str


@dataclass(frozen=True)
class Word:
    """A word without quotes in place of a value: the name of an object, or of a mode."""

    text: str


@dataclass(frozen=True)
class Option:
    #: text, number, true or false, a list, a mapping, a `SecretName` or a `Word`; None: no value
    value: Any
    location: SourceLocation | None = field(default=None, compare=False)


#: A key of a section of the config: `("sink", "commit_interval")`, `("kafka", "client.id")`.
Setting = tuple[str, str]
Settings = Mapping[Setting, Option]


@dataclass(frozen=True)
class Secret:
    KIND: ClassVar = "secret"

    name: str
    reference: str
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Connection:
    KIND: ClassVar = "connection"

    name: str
    #: a key of `frazil.sql.connections.TYPES`
    type: str
    options: Mapping[str, Option]
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SourceClause:
    connection: str
    #: of `[sink]` and `[decode]`, and of the routes
    options: Settings
    #: name of the connection to the schema registry
    registry: str = ""
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class View:
    KIND: ClassVar = "view"

    name: str
    #: the query before the source, and behind it
    head: str
    source: SourceClause
    tail: str = ""
    location: SourceLocation | None = field(default=None, compare=False)
    #: where the parts of the query begin
    parts: Sequence[SourceLocation] = field(default=(), compare=False)


@dataclass(frozen=True)
class TableClause:
    name: str
    options: Settings = field(default_factory=dict)
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RouteClause:
    #: of `[[route]]`, without `to` and `skip`
    options: Settings
    tables: tuple[str, ...] = ()
    #: tables, skip, reject or python
    action: str = "tables"
    otherwise: bool = False
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SinkStatement:
    KIND: ClassVar = "sink"

    name: str
    #: a Kafka connection, or the name of a view
    source: SourceClause | str
    catalog: str
    tables: tuple[TableClause, ...]
    aws: str = ""
    namespace: str = ""
    routes: tuple[RouteClause, ...] = ()
    #: of any section; those of `[[table]]` are for all tables that do not say otherwise
    options: Settings = field(default_factory=dict)
    location: SourceLocation | None = field(default=None, compare=False)
    #: where the names of other objects stand: view, catalog, aws
    named_at: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False)


Definition = Secret | Connection | View | SinkStatement
#: An object's kind and name.
Key = tuple[str, str]


def key_of(definition: Definition) -> Key:
    return definition.KIND, definition.name


@dataclass(frozen=True)
class Create:
    definition: Definition
    replace: bool = False
    if_not_exists: bool = False
    #: also if it leaves a ledger behind
    force: bool = False
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Alter:
    key: Key
    #: of a sink: settings; of a connection: `RawOption`s, whose meaning depends on its type
    options: Any
    if_exists: bool = False
    #: only of this table of the sink
    table: str = ""
    #: RESET: the options have no values
    removing: bool = False
    force: bool = False
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Drop:
    key: Key
    if_exists: bool = False
    location: SourceLocation | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Command:
    """A statement that reads, or starts and stops: its verb, and the object if there is one."""

    #: show, show create, describe, explain, validate, start, stop, audit
    verb: str
    #: of what is shown or done
    kind: str
    name: str = ""
    location: SourceLocation | None = field(default=None, compare=False)


Statement = Create | Alter | Drop | Command
