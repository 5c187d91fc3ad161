"""Definitions → the document of a sink's config, as a TOML file would have it.

In: all definitions, and the name of a sink. Out: the document, and where each setting of it stands
in SQL. `frazil.config.model.from_document` makes the config of it, with its checks: SQL and TOML
cannot differ in what they mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from frazil.config.messages import nearest
from frazil.config.settings import SECRET
from frazil.errors import SqlError
from frazil.sql import connections
from frazil.sql.lexer import RawToken, query_tokens
from frazil.sql.option_names import sections
from frazil.sql.statements import (
    Connection,
    Definition,
    Key,
    Option,
    RouteClause,
    Secret,
    SecretName,
    Setting,
    Settings,
    SinkStatement,
    SourceClause,
    SourceLocation,
    View,
)

Objects = Mapping[Key, Definition]
#: Setting, joined by dots → its place.
SourceLocations = dict[str, SourceLocation]
T = TypeVar("T", bound=Definition)


def refusal(location: SourceLocation | None, fact: str, *, hint: str = "") -> SqlError:
    assert location is not None
    return location.source.error(location.at, fact, hint=hint)


def named(objects: Objects, kind: type[T], name: str, location: SourceLocation | None) -> T:
    """The definition of this kind and name."""
    key = (kind.KIND, name)
    if key not in objects:
        names = [other for of, other in objects if of == kind.KIND]
        known = nearest(name, names) if names else ""
        raise refusal(location, f"there is no {kind.KIND} {name}{known}")
    return cast(T, objects[key])


def connection(
    objects: Objects, name: str, kind: str, location: SourceLocation | None
) -> Connection:
    made = named(objects, Connection, name, location)
    if made.type != kind:
        words, actual = connections.TYPES[kind][0], connections.TYPES[made.type][0]
        raise refusal(location, f"connection {name} is one to {actual}; expected one to {words}")
    return made


class Document:
    """The document under construction, and the places of its settings."""

    def __init__(self, objects: Objects, sink: SinkStatement) -> None:
        self.objects = objects
        self.sink = sink
        self.content: dict[str, Any] = {"sink": {"id": sink.name}}
        self.locations: SourceLocations = {}
        if sink.location:
            self.locations |= dict.fromkeys(("sink", "sink.id", "table", "route"), sink.location)

    def put(self, setting: Setting, option: Option, *, number: int | None = None) -> None:
        """`number`: of the table or route."""
        section, key = setting
        path = section.split(".")
        where = self.content
        if number is not None:
            where, path = where[path[0]][number], path[1:]
        for part in path:
            where = where.setdefault(part, {})
        where[key] = _text(self.objects, key, option)
        if option.location:
            lead = [section.split(".")[0], str(number)] if number is not None else []
            self.locations[".".join([*lead, *path, key])] = option.location


def _text(objects: Objects, key: str, option: Option) -> Any:
    """The value of an option; of a secret its reference."""
    value = option.value
    if not isinstance(value, SecretName):
        return value
    secret = named(objects, Secret, value.name, option.location)
    if secret.reference.startswith("file:") and not SECRET.search(key):
        raise refusal(
            option.location,
            f"{key} is no secret to Frazil, and a file is read only for one; expected text, or "
            "a secret AS 'env:NAME'",
        )
    return secret.reference


def document(objects: Objects, sink: SinkStatement) -> tuple[dict[str, Any], SourceLocations]:
    made = Document(objects, sink)
    source = _source(made)
    made.content["kafka"] = _passed(made, source.connection, "kafka", "kafka", source.location)
    if source.registry:
        registry = _passed(made, source.registry, "registry", "decode.registry", source.location)
        made.content["decode"] = {"registry": registry}
    made.content["catalog"] = _catalog(made)
    for setting, option in source.options.items():
        if setting[0] != "route":
            made.put(setting, option)
    _tables(made)
    for setting, option in made.sink.options.items():
        if not _of_table(setting):
            made.put(setting, option)
    _routes(made, source)
    return made.content, made.locations


def _of_table(setting: Setting) -> bool:
    return sections()[setting[0].split(".")[0]].several


def _source(made: Document) -> SourceClause:
    source = made.sink.source
    if not isinstance(source, str):
        return source
    view = named(made.objects, View, source, made.sink.named_at.get("view_name"))
    query = query_of(view)
    if query:
        refuse_endless_groups(view)
        _refuse_keyed(made.sink, view)
        made.content["transform"] = {"sql": query}
        if view.location:
            made.locations["transform"] = made.locations["transform.sql"] = view.location
    return view.source


_EVERYTHING = re.compile(r"SELECT\s*\*\s*FROM\s*", re.IGNORECASE)


def query_of(view: View) -> str:
    """The query for Spark over the view `stream`; empty: all columns of all records."""
    if not view.tail.strip() and _EVERYTHING.fullmatch(view.head):
        return ""
    return f"{view.head}stream{view.tail}"


_WINDOWS = (
    "FROM KAFKA CONNECTION … FORMAT … WATERMARK placed_at DELAY OF INTERVAL 10 MINUTES GROUP BY "
    "window(placed_at, '1 hour'), … gives each window one row, when it is over, in MODE APPEND"
)


def refuse_endless_groups(view: View) -> None:
    """Groups without a watermark never end: each of their rows would have to be replaced again and
    again. (Groups of a subquery may be those of a table, and Spark decides.)"""
    text = view.tail
    words: list[RawToken] = []
    depth = 0
    for token in query_tokens(text):
        depth += {"LPAR": 1, "RPAR": -1}.get(token.kind, 0)
        if not depth and token.kind == "NAME":
            words.append(token)
    names = [token.value.upper() for token in words]
    groups = [n for n in range(len(names) - 1) if names[n : n + 2] == ["GROUP", "BY"]]
    if not groups or "WATERMARK" in names or view.location is None:
        return
    begin = view.location.source.text.find(text, view.location.at)
    location = SourceLocation(view.location.source, begin + words[groups[0]].start)
    raise refusal(
        location,
        f"the groups of view {view.name} never end, so their rows would be replaced "
        "repeatedly, and rows of a query are only appended; expected a WATERMARK and "
        "windows",
        hint=f"{_WINDOWS}; or group the rows of the sink's table where you read them",
    )


def _refuse_keyed(sink: SinkStatement, view: View) -> None:
    """Rows of a query have neither Kafka's keys nor its order."""
    modes = [sink.options.get(("table", "mode"))]
    modes += [table.options.get(("table", "mode")) for table in sink.tables]
    for mode in modes:
        if mode and mode.value != "append":
            raise refusal(
                mode.location or sink.location,
                f"view {view.name} is a query for Spark, and its rows cannot be written in mode "
                f"{mode.value}: they carry no Kafka key and no order of changes, by which rows are "
                "replaced; expected MODE APPEND, or a sink without the query",
                hint=_WINDOWS,
            )


def _passed(
    made: Document, name: str, kind: str, section: str, location: SourceLocation | None
) -> dict[str, str]:
    """The properties of a connection."""
    given = connection(made.objects, name, kind, location)
    if given.location:
        made.locations[section] = given.location
    for key, option in given.options.items():
        if option.location:
            made.locations[f"{section}.{key}"] = option.location
    return connections.properties(given, _resolver(made.objects))


def _resolver(objects: Objects) -> Callable[[str, Option], str]:
    def resolved(key: str, option: Option) -> str:
        value = _text(objects, key, option)
        return str(value).lower() if isinstance(value, bool) else str(value)

    return resolved


def _catalog(made: Document) -> dict[str, str]:
    sink = made.sink
    location = sink.named_at.get("catalog", sink.location)
    properties = _passed(made, sink.catalog, "catalog", "catalog", location)
    given = connection(made.objects, sink.catalog, "catalog", location)
    used = given.options.get("aws-connection")
    if sink.aws and used and used.value.text.lower() != sink.aws:
        first, second = sorted((used.value.text.lower(), sink.aws))
        raise refusal(sink.location, f"two AWS connections are named: {first} and {second}")
    if used or not sink.aws:
        properties = _with_used_aws(made.objects, given, properties)
    else:
        at = sink.named_at.get("aws", sink.location)
        properties = _with_aws(made.objects, sink.aws, at, properties)
    return {"name": given.name, **properties}


def _with_used_aws(
    objects: Objects, catalog: Connection, properties: dict[str, str]
) -> dict[str, str]:
    used = catalog.options.get("aws-connection")
    if not used:
        return properties
    return _with_aws(objects, used.value.text.lower(), used.location, properties)


def _with_aws(
    objects: Objects, name: str, location: SourceLocation | None, properties: dict[str, str]
) -> dict[str, str]:
    aws = connection(objects, name, "aws", location)
    return connections.aws_properties(aws, properties, _resolver(objects))


def connection_properties(objects: Objects, given: Connection) -> dict[str, str]:
    """The properties of a connection alone, with references to secrets: those of its section, or
    of an object store."""
    if given.type == "aws":
        return connections.aws_properties(given, {}, _resolver(objects))
    properties = connections.properties(given, _resolver(objects))
    return _with_used_aws(objects, given, properties) if given.type == "catalog" else properties


def _tables(made: Document) -> None:
    sink = made.sink
    made.content["table"] = []
    shared = {setting: option for setting, option in sink.options.items() if _of_table(setting)}
    for number, table in enumerate(sink.tables):
        made.content["table"].append({"name": qualified(sink, table.name)})
        if table.location:
            made.locations[f"table.{number}"] = made.locations[f"table.{number}.name"] = (
                table.location
            )
        for setting, option in {**shared, **table.options}.items():
            made.put(setting, option, number=number)
    dead = sink.options.get(("dead_letters", "table"))
    if dead:
        name = Option(qualified(sink, str(dead.value)), dead.location)
        options: Settings = {**sink.options, ("dead_letters", "table"): name}
        made.sink = dataclasses.replace(sink, options=options)


def qualified(sink: SinkStatement, name: str) -> str:
    return name if "." in name or not sink.namespace else f"{sink.namespace}.{name}"


def _routes(made: Document, source: SourceClause) -> None:
    sink = made.sink
    envelope = source.options.get(("route", "envelope"))
    routes = list(sink.routes)
    if not routes and not envelope:
        return
    if not (routes and _last(routes[-1])):
        routes.append(
            RouteClause({}, (sink.tables[0].name,), otherwise=True, location=sink.location)
        )
    made.content["route"] = []
    for route in routes:
        if route.action == "reject":  # no rule matches: the record is rejected
            continue
        number = len(made.content["route"])
        content: dict[str, Any] = {}
        made.content["route"].append(content)
        if route.location:
            made.locations[f"route.{number}"] = route.location
        if envelope and route.action != "skip":
            made.put(("route", "envelope"), envelope, number=number)
        for setting, option in route.options.items():
            made.put(setting, option, number=number)
        if route.tables:
            content["to"] = [qualified(sink, name) for name in route.tables]
        if route.action == "skip":
            content["skip"] = True


def _last(route: RouteClause) -> bool:
    """Whether every record that comes to this rule is decided by it."""
    conditions = {key for _, key in route.options} & {"topics", "pattern", "field", "header"}
    return route.otherwise or not conditions
