"""A config → the SQL statements that define the same sink.

In: a checked config. Out: a text of CREATE statements. What is written is read again before it is
given out: a setting that SQL cannot say is an error that names it, and is never left out. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from frazil.config.model import Config
from frazil.config.serializer import document_of
from frazil.config.settings import REFERENCE, SECRET
from frazil.errors import ConfigError, SqlError
from frazil.sql.connections import PAIRS
from frazil.sql.definition_set import config_of
from frazil.sql.document_builder import Objects
from frazil.sql.formatter import create_text
from frazil.sql.statements import (
    Connection,
    Create,
    Definition,
    Option,
    RouteClause,
    Secret,
    SecretName,
    Setting,
    SinkStatement,
    SourceClause,
    TableClause,
    View,
    key_of,
)
from frazil.sql.tree_reader import read_statements

_KAFKA, _REGISTRY, _CATALOG = "cluster", "registry", "catalog"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_PAIR = re.compile(r"(?!env:|file:)([^:\s]+):((?:env|file):.+)")
#: A query over one `stream`, which a view says with the source in its place.
_ONE_STREAM = re.compile(r"(.*\b(?i:FROM)\s+)stream\b(.*)", re.DOTALL)
#: Clauses of their own for one table.
_TABLE_CLAUSES = ("key", "mode", "partition_by")


def sql_of(config: Config) -> str:
    """Raises ConfigError where SQL cannot say the same."""
    try:
        return _verified(config, views=True)
    except ConfigError:  # a query that no view can say stands behind WITH
        return _verified(config, views=False)


def _verified(config: Config, views: bool) -> str:
    definitions = ConfigStatements(config).definitions(views)
    text = "\n\n".join(map(create_text, definitions)) + "\n"
    try:
        objects: Objects = {
            key_of(statement.definition): statement.definition
            for statement in read_statements(text, "export.sql")
            if isinstance(statement, Create)
        }
        again, _ = config_of(objects, config.sink.id)
    except SqlError as error:
        raise _unsayable(error.message) from None
    if again != config:
        raise _unsayable(", ".join(_differing(document_of(config), document_of(again))))
    return text


def _unsayable(reason: str) -> ConfigError:
    return ConfigError(
        f"cannot write the config as SQL: {reason}; expected settings that SQL can say",
        hint="keep this sink in TOML: `frazil run` takes files of both kinds",
    )


def _differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The settings that differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from _differing(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (item, another) in enumerate(zip(one, other, strict=True)):
            yield from _differing(item, another, f"{path}.{number}")
    elif one != other:
        yield path


class ConfigStatements:
    """The definitions of one config."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._document = document_of(config)
        #: reference → its secret
        self._secrets: dict[str, Secret] = {}

    def definitions(self, views: bool) -> list[Definition]:
        """In the order in which they can be created. `views`: a query becomes a view."""
        document = self._document
        connections = [Connection(_KAFKA, "kafka", self._properties(document.get("kafka", {})))]
        registry = self._registry()
        if registry:
            properties = self._properties(document["decode"]["registry"], "registry")
            connections.append(Connection(_REGISTRY, "registry", properties))
        connections.append(self._catalog())
        source = self._source(registry)
        view = self._view(source) if views else None
        sink = self._sink(view.name if view else source, bool(registry))
        queries = [view] if view else []
        return [*self._secrets.values(), *connections, *queries, sink]

    # ── connections ──────────────────────────────────────────────────────────────────────────

    def _catalog(self) -> Connection:
        properties = dict(self._document["catalog"])
        name = str(properties.pop("name"))
        kind = properties.get("type", "")
        options = self._properties(properties, kind)
        if not _NAME.fullmatch(name) or name in (_KAFKA, _REGISTRY):
            options = {"name": Option(name), **options}
            name = _CATALOG
        return Connection(name, "catalog", options)

    def _properties(self, properties: Mapping[str, str], kind: str = "") -> dict[str, Option]:
        options: dict[str, Option] = {}
        for key, value in properties.items():
            pair = _PAIR.fullmatch(value) if PAIRS.get(kind) == key else None
            if pair:
                options["user"] = Option(pair[1])
                options["password"] = Option(self._secret(pair[2]))
            else:
                options[key] = Option(self._value(key, value))
        return options

    def _value(self, key: str, value: str) -> Any:
        return self._secret(value) if SECRET.search(key) and REFERENCE.match(value) else value

    def _secret(self, reference: str) -> SecretName:
        if reference not in self._secrets:
            kind, _, location = reference.partition(":")
            location = location if kind == "env" else location.rstrip("/").rpartition("/")[2]
            name = re.sub(r"[^a-z0-9_]+", "_", location.lower()).strip("_")[:90] or "secret"
            taken = {secret.name for secret in self._secrets.values()}
            number = 2
            unique = name
            while unique in taken:
                unique, number = f"{name}_{number}", number + 1
            self._secrets[reference] = Secret(unique, reference)
        return SecretName(self._secrets[reference].name)

    def _registry(self) -> str:
        """The connection that FORMAT names; only Confluent's formats do."""
        decode = self._document.get("decode", {})
        confluent = self._config.decode.format.startswith("confluent-")
        return _REGISTRY if confluent and decode.get("registry") else ""

    # ── source and query ─────────────────────────────────────────────────────────────────────

    def _source(self, registry: str) -> SourceClause:
        sink, decode = self._config.sink, dict(self._document.get("decode", {}))
        decode.pop("registry", None)
        options: dict[Setting, Option] = {}
        if sink.topics:
            options["sink", "topics"] = Option(list(sink.topics))
        if sink.topic_pattern:
            options["sink", "topic_pattern"] = Option(sink.topic_pattern)
        options["decode", "format"] = Option(self._config.decode.format)
        options |= {("decode", key): Option(v) for key, v in decode.items() if key != "format"}
        return SourceClause(_KAFKA, options, registry)

    def _view(self, source: SourceClause) -> View | None:
        """The view of a query that reads the stream once."""
        query = self._config.transform.sql
        parts = _ONE_STREAM.fullmatch(query)
        if parts is None or len(re.findall(r"\bstream\b", query, re.IGNORECASE)) > 1:
            return None
        name = re.sub(r"\W", "_", self._config.sink.id.lower())
        return View(f"{name}_rows", parts[1], source, parts[2])

    # ── sink ─────────────────────────────────────────────────────────────────────────────────

    def _sink(self, source: SourceClause | str, registry: bool) -> SinkStatement:
        document = self._document
        options: dict[Setting, Option] = {}
        catalog = self._catalog().name
        tables = [dict(table) for table in document["table"]]
        if len(tables) == 1:
            clauses = {key: tables[0].pop(key) for key in _TABLE_CLAUSES if key in tables[0]}
            options |= {("table", key): Option(value) for key, value in clauses.items()}
            options |= {("table", k): Option(v) for k, v in tables[0].items() if k != "name"}
        for section, content in document.items():
            options |= self._options(section, content, bool(source) and isinstance(source, str))
        if not registry:
            settings = document.get("decode", {}).get("registry", {})
            options |= {
                ("decode.registry", key): Option(self._value(key, value))
                for key, value in settings.items()
            }
        return SinkStatement(
            name=self._config.sink.id,
            source=source,
            catalog=catalog,
            tables=tuple(_table(table, whole=len(tables) > 1) for table in tables),
            routes=tuple(self._routes()),
            options=options,
        )

    def _options(self, section: str, content: Any, view: bool) -> dict[Setting, Option]:
        """The options behind WITH of one section."""
        if section in ("kafka", "catalog", "decode", "table", "route"):
            return {}
        keys = set(content)
        if section == "sink":
            keys -= {"id", "topics", "topic_pattern"}
        elif section == "transform" and view:
            keys -= {"sql"}
        made: dict[Setting, Option] = {}
        for key in content:
            value = content[key]
            if key not in keys:
                continue
            if (section, key) == ("notify", "headers"):
                headers = ((k, Option(self._value(k, v))) for k, v in value.items())
                made |= {("notify.headers", name): option for name, option in headers}
            else:
                made[section, key] = Option(
                    self._value(key, value) if isinstance(value, str) else value
                )
        return made

    def _routes(self) -> Iterator[RouteClause]:
        routes = self._document.get("route", [])
        for route in routes:
            settings = {
                ("route", key): Option(value)
                for key, value in route.items()
                if key not in ("to", "skip")
            }
            action = "skip" if route.get("skip") else "python" if "python" in route else "tables"
            yield RouteClause(settings, tuple(route.get("to", ())), action)
        if routes and {"topics", "pattern", "field", "header"} & routes[-1].keys():
            yield RouteClause({}, (), "reject", otherwise=True)


def _table(table: Mapping[str, Any], *, whole: bool) -> TableClause:
    options = {("table", key): Option(value) for key, value in table.items() if key != "name"}
    return TableClause(str(table["name"]), options if whole else {})
