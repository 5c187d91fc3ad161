"""Definitions → the document of a sink's config, as a TOML file would have it.

In: all definitions, and the name of a sink. Out: the document, and where each setting of it stands
in SQL. `frazil.config.model.from_document` makes the config of it, with its checks: SQL and TOML
cannot differ in what they mean.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from frazil.config.column_types import quoted
from frazil.config.messages import nearest
from frazil.config.select import KEY, Column, Item, Literal, Selection, Star
from frazil.config.settings import SECRET
from frazil.errors import SqlError
from frazil.spark.query_syntax import METADATA, STREAM, QueryFault, QuerySyntax, read_query
from frazil.sql import connections
from frazil.sql.formatter import literal
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
    if location is None:
        return SqlError(f"cannot read definitions: {fact}", hint=hint)
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
        #: the columns of a view that needs no Spark; none: all
        self.items: tuple[Item | Star, ...] = ()
        self.view: View | None = None
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
        where[key] = copy.deepcopy(_text(self.objects, key, option))
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
    query = checked_query(view)
    if goes_straight(view, query):
        made.items = () if query.items == (Star(),) else query.items
        made.view = view
        return view.source
    _refuse_behind_spark(made.sink, view, query)
    made.content["transform"] = {"sql": query_text(view)}
    if _replaces_groups(made.sink, view, query):
        made.content["transform"]["output_mode"] = "update"
    if view.location:
        made.locations["transform"] = made.locations["transform.sql"] = view.location
    return view.source


def query_text(view: View) -> str:
    """The query for Spark, over the view `stream`."""
    return f"{view.head}{STREAM}{view.tail}"


def goes_straight(view: View, query: QuerySyntax) -> bool:
    """Whether `[[table]] select` makes exactly the columns of the query. Spark finds a field in any
    case, a select does not: the names must be those of a schema, which refuses others."""
    options = view.source.options
    declared = options.get(("decode", "columns"))
    names = {str(path).partition(".")[0] for path in declared.value} if declared else set()
    known = Selection(query.items).fields <= names
    avro = str(options.get(("decode", "format"), Option("")).value).endswith("avro")
    return bool(query.items) and (avro or known or query.items == (Star(),))


def checked_query(view: View) -> QuerySyntax:
    """The query, if it is one, and its rows can be appended, or replaced by a key."""
    try:
        query = read_query(query_text(view))
    except QueryFault as fault:
        raise refusal(
            _place_in(view, fault.at),
            f"the query of view {view.name} cannot be read: {fault.fact}",
            hint="if Spark reads it: CREATE SINK … FROM KAFKA CONNECTION … WITH (TRANSFORM SQL = "
            "'…'), which frazil check warns of and Spark decides",
        ) from None
    if query.endless and query.unkeyed:
        raise _unkeyed(view, query.unkeyed)
    if query.endless and not query.groups:
        at, rows = query.endless
        raise refusal(
            _place_in(view, at),
            f"{rows} of view {view.name} never end, so their rows would be replaced again and "
            "again, and no columns name them; expected a WATERMARK, and a window or the "
            "watermark's column among the groups, or GROUP BY of the whole query",
            hint=f"{_WINDOWS}; GROUP BY customer, with KEY (customer) in the sink, keeps a row of "
            "each customer; or group the rows of the sink's table where you read them",
        )
    return query


def _unkeyed(view: View, fault: tuple[int, str]) -> SqlError:
    at, fact = fault
    return refusal(
        _place_in(view, at),
        f"the rows of view {view.name} are replaced as their groups change, and {fact}",
        hint="select each group as a column; a condition on groups may be a boolean column that "
        "the sink names: WITH (DELETE COLUMN = 'name')",
    )


def _replaces_groups(sink: SinkStatement, view: View, query: QuerySyntax) -> bool:
    """Whether the sink keeps a row of each group by its key. Raises where its key is not that of
    the query's rows."""
    key, upserts = _upsert_key(sink)
    expected = ", ".join(names[0] for names in query.groups)
    if not upserts:
        if query.endless:
            _, rows = query.endless
            raise refusal(
                sink.named_at.get("view_name", sink.location),
                f"cannot append view {view.name}: {rows} never end, so their rows are replaced "
                f"again and again; expected KEY ({expected})",
                hint="with KEY the table has a row of each group, as of the last batch",
            )
        return False
    if query.unkeyed:
        raise _unkeyed(view, query.unkeyed)
    if query.doubt:
        return False
    names = list(map(str, key.value)) if key else []
    location = key.location if key else sink.location
    if query.groups:
        known = {name for group in query.groups for name in group}
        if not (set(names) <= known and all(set(names) & set(group) for group in query.groups)):
            given = f"KEY ({', '.join(names)})" if names else "none"
            raise refusal(
                location,
                f"cannot write view {view.name}: expected KEY ({expected}), the columns of its "
                f"GROUP BY, found {given}",
            )
        return True
    if not (query.of_records or _versioned(sink)):
        raise refusal(
            location,
            f"cannot write view {view.name} with KEY: its query needs Spark ({_why_spark(query)}), "
            "and without the offsets of the records the changes of a key have no order; expected "
            f"{', '.join(METADATA)} among its columns, or WITH (VERSION COLUMN = 'name')",
            hint=_STRAIGHT,
        )
    return False


def _versioned(sink: SinkStatement) -> bool:
    options = (sink.options, *(table.options for table in sink.tables))
    return any(("table", "version_column") in given for given in options)


def _upsert_key(sink: SinkStatement) -> tuple[Option | None, bool]:
    """The key of the sink's table, and whether rows are replaced by it."""
    options = dict(sink.options)
    for table in sink.tables:
        options |= table.options
    key, mode = options.get(("table", "key")), options.get(("table", "mode"))
    return key, mode.value == "upsert" if mode else bool(key)


def _place_in(view: View, at: int) -> SourceLocation | None:
    """Where a position of the query stands in the statement."""
    if not view.parts:
        return view.location
    behind = at - len(view.head)
    if behind < 0 or len(view.parts) == 1:
        return SourceLocation(view.parts[0].source, view.parts[0].at + min(at, len(view.head)))
    return SourceLocation(view.parts[1].source, view.parts[1].at + max(0, behind - len(STREAM)))


_WINDOWS = (
    "FROM KAFKA CONNECTION … FORMAT … WATERMARK placed_at DELAY OF INTERVAL 10 MINUTES GROUP BY "
    "window(placed_at, '1 hour'), … gives each window one row, when it is over, in MODE APPEND"
)


def _refuse_behind_spark(sink: SinkStatement, view: View, query: QuerySyntax) -> None:
    """Rows of a query have neither Kafka's keys, nor records to route or reject."""
    clauses = [("ROUTE", route.location) for route in sink.routes]
    for options in (sink.options, *(table.options for table in sink.tables)):
        if (mode := options.get(("table", "mode"))) and mode.value == "changelog":
            clauses.append(("MODE CHANGELOG", mode.location))
    if option := sink.options.get(("dead_letters", "table")):
        clauses.append(("DEAD LETTERS", option.location))
    if option := view.source.options.get(("route", "envelope")):
        clauses.append(("ENVELOPE", option.location))
    if clauses:
        words, location = clauses[0]
        raise refusal(
            location or sink.location,
            f"cannot write view {view.name} with {words}: its query needs Spark "
            f"({_why_spark(query)}), and what comes out of it has no Kafka key and no record to "
            "route or reject",
            hint=f"{_STRAIGHT}; what needs Spark goes into one table",
        )


_STRAIGHT = (
    "a view of nothing but columns and new names for them needs no Spark, if it is AVRO, or JSON "
    "with COLUMNS MAP ['id' => 'long', …]"
)


def _why_spark(query: QuerySyntax) -> str:
    return query.beyond or "no schema declares its names"


def _passed(
    made: Document, name: str, kind: str, section: str, location: SourceLocation | None
) -> dict[str, str]:
    """The properties of a connection."""
    given = connection(made.objects, name, kind, location)
    if given.location:
        made.locations[section] = given.location
    properties = connections.properties(given, _resolver(made.objects))
    _place(made, section, properties, given)
    return properties


def _place(made: Document, section: str, properties: Iterable[str], given: Connection) -> None:
    """Each property is from its own option, or from the connection."""
    for key in properties:
        option = given.options.get(key)
        location = option.location if option else given.location
        if location and f"{section}.{key}" not in made.locations:
            made.locations[f"{section}.{key}"] = location


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
    if sink.aws and used and used.value.text != sink.aws:
        first, second = sorted((used.value.text, sink.aws))
        raise refusal(sink.location, f"two AWS connections are named: {first} and {second}")
    before = properties
    if used or not sink.aws:
        properties = _with_used_aws(made.objects, given, properties)
    else:
        at = sink.named_at.get("aws", sink.location)
        properties = _with_aws(made.objects, sink.aws, at, properties)
    if properties.keys() != before.keys():
        name = used.value.text if used else sink.aws
        aws = named(made.objects, Connection, name, given.location)
        _place(made, "catalog", properties, aws)
    _place(made, "catalog", {"name": given.name, **properties}, given)
    return {"name": given.name, **properties}


def _with_used_aws(
    objects: Objects, catalog: Connection, properties: dict[str, str]
) -> dict[str, str]:
    used = catalog.options.get("aws-connection")
    if not used:
        return properties
    return _with_aws(objects, used.value.text, used.location, properties)


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
        own = _with_mode({**shared, **table.options})
        if made.items:
            own = _with_columns(made, own)
        for setting, option in own.items():
            made.put(setting, option, number=number)
    dead = sink.options.get(("dead_letters", "table"))
    if dead:
        name = Option(qualified(sink, str(dead.value)), dead.location)
        options: Settings = {**sink.options, ("dead_letters", "table"): name}
        made.sink = dataclasses.replace(sink, options=options)


def _with_mode(options: Settings) -> Settings:
    """KEY alone replaces rows; with MODE APPEND it names the columns that identify a row."""
    key, mode = options.get(("table", "key")), options.get(("table", "mode"))
    if not key:
        return options
    if not mode:
        return {**options, ("table", "mode"): Option("upsert", key.location)}
    if mode.value != "append":
        return options
    if ("table", "identifier_fields") in options:
        raise refusal(
            key.location, "KEY with MODE APPEND is IDENTIFIER FIELDS; expected one of them"
        )
    made = {setting: option for setting, option in options.items() if option is not key}
    return {**made, ("table", "identifier_fields"): key}


def _with_columns(made: Document, options: Settings) -> Settings:
    assert made.view
    if given := options.get(("table", "select")):
        raise refusal(given.location, f"view {made.view.name} selects the columns already")
    texts = [_item_text(item) for item in made.items]
    return {**options, ("table", "select"): Option(texts, _place_in(made.view, 0))}


def _item_text(item: Item | Star) -> str:
    """The text of a column; `parse_item` reads it."""
    if isinstance(item, Star):
        excluded = ", ".join(map(quoted, item.excluded))
        return f"* except ({excluded})" if excluded else "*"
    if isinstance(item.of, Literal):
        value = item.of.value
        text = str(value).lower() if isinstance(value, bool) else literal(str(value))
        return f"{text} as {quoted(item.name)}"
    path = item.of.names if isinstance(item.of, Column) else ()
    text = ".".join(map(quoted, path)) or KEY
    return text if item.name == [KEY, *path][-1] else f"{text} as {quoted(item.name)}"


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
            if setting == ("route", "field") and made.items:
                option = _field_of_record(made, option)
            made.put(setting, option, number=number)
        if route.tables:
            content["to"] = [qualified(sink, name) for name in route.tables]
        if route.action == "skip":
            content["skip"] = True


def _field_of_record(made: Document, option: Option) -> Option:
    """The field that a column of the view is."""
    path = Selection(made.items).source(option.value)
    if path is None or not made.view:
        name = made.view.name if made.view else ""
        raise refusal(
            option.location, f"{option.value} is no column of view {name} as Kafka has it"
        )
    return dataclasses.replace(option, value=".".join(path))


def _last(route: RouteClause) -> bool:
    """Whether every record that comes to this rule is decided by it."""
    conditions = {key for _, key in route.options} & {"topics", "pattern", "field", "header"}
    return route.otherwise or not conditions
