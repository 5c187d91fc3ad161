"""Definitions → their SQL text, always in the same form.

In: a definition. Out: its CREATE statement, with a line for each clause and option: a change of a
definition is a change of lines. The parser reads the same definition from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from frazil.sql.connections import TYPES, property_words
from frazil.sql.option_names import option_name
from frazil.sql.statements import (
    Connection,
    Definition,
    Option,
    RouteClause,
    Secret,
    SecretName,
    Setting,
    Settings,
    SinkStatement,
    SourceClause,
    TableClause,
    View,
    Word,
)

_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")
_COLUMN = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
#: A term that stands without quotes and is read back as it is.
_TERM = re.compile(
    rf"(?:{_COLUMN}|[A-Za-z]+\((?:\d+, )?{_COLUMN}\))"
    r"( (?i:asc|desc))?( (?i:nulls first|nulls last))?",
    re.ASCII,
)
#: Words that the grammar takes for something else where a name stands.
_RESERVED = {"if", "kafka", "connection"}
_SINK_SCOPES = ("sink", "table")


def create_text(definition: Definition) -> str:
    kind = definition.KIND.upper()
    lines = "\n".join(_BODIES[definition.KIND](definition))
    gap = "" if lines.startswith("\n") else " "
    return f"CREATE {kind} {name_text(definition.name)}{gap}{lines};"


def name_text(name: str) -> str:
    if _PLAIN.fullmatch(name) and name not in _RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, SecretName):
        return f"SECRET {name_text(value.name)}"
    if isinstance(value, Word):
        return name_text(value.text)
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return terms_text(value)
        return f"LIST [{', '.join(map(_nested, value))}]"
    if isinstance(value, Mapping):
        entries = (f"{literal(str(key))} => {_nested(below)}" for key, below in value.items())
        return f"MAP [{', '.join(entries)}]"
    return repr(value) if isinstance(value, (int, float)) else literal(str(value))


def _nested(value: Any) -> str:
    """In a list or map, a list stands in brackets, too."""
    if isinstance(value, list):
        return f"LIST [{', '.join(map(_nested, value))}]"
    return value_text(value)


def terms_text(terms: list[str]) -> str:
    """`(day(placed_at), bucket(16, id), 'any other text')`."""
    return f"({', '.join(term if _TERM.fullmatch(term) else literal(term) for term in terms)})"


def _in_parentheses(options: list[str], indent: str = "") -> str:
    inner = f",\n{indent}  ".join(options)
    return f"(\n{indent}  {inner}\n{indent})" if options else "()"


def _secret(secret: Secret) -> Iterator[str]:
    yield f"AS {literal(secret.reference)}"


def _connection(connection: Connection) -> Iterator[str]:
    options = [
        f"{property_words(connection.type, name)} = {value_text(option.value)}"
        for name, option in connection.options.items()
    ]
    yield f"TO {TYPES[connection.type][0]} {_in_parentheses(options)}"


def _view(view: View) -> Iterator[str]:
    yield f"AS\n{view.head}{' '.join(source_clauses(view.source))}{view.tail}"


def source_clauses(source: SourceClause) -> Iterator[str]:
    options = dict(source.options)
    topics = options.pop(("sink", "topics"), Option([]))
    read = [f"TOPIC {literal(topic)}" for topic in topics.value]
    envelope = options.pop(("route", "envelope"), None)
    kind = options.pop(("decode", "format"), None)
    schema = options.get(("decode", "schema"))
    read += _named(_of(options, "sink"), ("sink",))
    yield f"KAFKA CONNECTION {name_text(source.connection)} ({', '.join(read)})"
    decode = _of(options, "decode")
    if kind:
        word = str(kind.value)
        text = f"FORMAT {word.removeprefix('confluent-').upper()}"
        if source.registry:
            text += f" USING CONFLUENT SCHEMA REGISTRY CONNECTION {name_text(source.registry)}"
        elif schema:
            confluent = "CONFLUENT " if word.startswith("confluent-") else ""
            text += f" USING {confluent}SCHEMA FILE {literal(str(schema.value))}"
            del decode["decode", "schema"]
        if decode:
            text += f" ({', '.join(_named(decode, ('decode',)))})"
        yield text
    if envelope:
        yield f"ENVELOPE {str(envelope.value).upper()}"


def _of(options: Settings, section: str) -> dict[Setting, Option]:
    return {
        setting: option
        for setting, option in options.items()
        if setting[0].split(".")[0] == section
    }


def _named(options: Settings, scopes: tuple[str, ...], sign: str = " = ") -> list[str]:
    return [
        f"{option_name(setting, scopes)}{sign}{value_text(option.value)}"
        for setting, option in options.items()
    ]


def _sink(sink: SinkStatement) -> Iterator[str]:
    source = sink.source
    clauses = [name_text(source)] if isinstance(source, str) else list(source_clauses(source))
    yield f"\nFROM {clauses[0]}"
    yield from clauses[1:]
    yield f"TO ICEBERG CATALOG {name_text(sink.catalog)}"
    if sink.aws:
        yield f"USING AWS CONNECTION {name_text(sink.aws)}"
    if sink.namespace:
        yield f"NAMESPACE {literal(sink.namespace)}"
    yield ",\n  ".join(f"TABLE {_table(table)}" for table in sink.tables)
    options = dict(sink.options)
    for key, words in _CLAUSES.items():
        if option := options.pop(("table", key), None):
            value = option.value
            yield f"{words} {value.upper() if key == 'mode' else value_text(value)}"
    yield from map(_route, sink.routes)
    if dead := options.pop(("dead_letters", "table"), None):
        yield f"DEAD LETTERS TABLE {literal(str(dead.value))}"
    if options:
        yield f"WITH {_in_parentheses(_named(options, _SINK_SCOPES))}"


_CLAUSES = {"key": "KEY", "mode": "MODE", "partition_by": "PARTITION BY"}


def _table(table: TableClause) -> str:
    name = literal(table.name)
    if not table.options:
        return name
    return f"{name} {_in_parentheses(_named(table.options, ('table',)), '  ')}"


def _route(route: RouteClause) -> str:
    options = {key: option for (_, key), option in route.options.items()}
    conditions = []
    if topics := options.pop("topics", None):
        conditions.append(f"TOPIC {_equal(topics.value)}")
    if pattern := options.pop("pattern", None):
        conditions.append(f"TOPIC MATCHES {literal(str(pattern.value))}")
    for key in ("field", "header"):
        if option := options.pop(key, None):
            values = options.pop("values", None)
            name = f"HEADER {literal(option.value)}" if key == "header" else _path(option.value)
            conditions.append(f"{name} {_equal(values.value) if values else 'IS NOT NULL'}")
    python = options.pop("python", None) if route.action == "python" else None
    text = "ROUTE"
    if options:
        rest = {("route", key): option for key, option in options.items()}
        text += f" ({', '.join(_named(rest, ('route',)))})"
    if route.otherwise:
        text += " ELSE"
    elif conditions:
        text += f" WHEN {' AND '.join(conditions)}"
    if python:
        return f"{text} BY {literal(str(python.value))}"
    if route.action != "tables":
        return f"{text} {route.action.upper()}"
    return f"{text} TO {', '.join(f'TABLE {literal(name)}' for name in route.tables)}"


def _equal(values: list[str]) -> str:
    if len(values) == 1:
        return f"= {literal(values[0])}"
    return f"IN ({', '.join(map(literal, values))})"


def _path(text: str) -> str:
    parts = text.split(".")
    plain = all(re.fullmatch(r"[A-Za-z_]\w*", part, re.ASCII) for part in parts)
    reserved = {"topic", "header", "else"}
    if plain and parts[0].lower() not in reserved:
        return text
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


_BODIES: Mapping[str, Any] = {
    "secret": _secret,
    "connection": _connection,
    "view": _view,
    "sink": _sink,
}
