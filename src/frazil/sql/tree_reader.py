"""Trees of the grammar → statements.

In: a text. Out: its statements, with the place of each. Raises `SqlError` for what the grammar
allows and no statement can mean: an unknown option, a clause that stands twice, a secret as a text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from lark import Token, Tree

from frazil.config.sections import ENVELOPES, FORMATS
from frazil.config.settings import REFERENCE
from frazil.sql import options as reading
from frazil.sql.connections import connection_options
from frazil.sql.option_names import SAID
from frazil.sql.options import first, identifier
from frazil.sql.parser import ParsedStatement, parse
from frazil.sql.source_text import SourceText
from frazil.sql.statements import (
    Alter,
    Command,
    Connection,
    Create,
    Definition,
    Drop,
    Key,
    Option,
    RouteClause,
    Secret,
    Setting,
    SinkStatement,
    SourceClause,
    SourceLocation,
    Statement,
    TableClause,
    View,
)

#: As in `[sink] id`.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_COMMANDS = {"start_sink": "start", "stop_sink": "stop"}


def read_statements(text: str, name: str = "statement") -> list[Statement]:
    """`name`: of the file, for errors."""
    return [statement for _, statement in spanned_statements(text, name)]


@lru_cache(1024)
def spanned_statements(text: str, name: str) -> tuple[tuple[ParsedStatement, Statement], ...]:
    """The statements of a text, each with its place there. Kept, because a change of definitions
    reads all of them again."""
    source = SourceText(name, text)
    return tuple(
        (parsed, _statement(source, parsed.tree, SourceLocation(source, parsed.start)))
        for parsed in parse(source)
    )


def _statement(source: SourceText, tree: Tree[Token], location: SourceLocation) -> Statement:
    kind = tree.data
    if kind == "create":
        *replace, created = trees(tree)
        parts = trees(created)
        if replace and any(part.data == "if_not_exists" for part in parts):
            raise source.error(location.at, "expected OR REPLACE or IF NOT EXISTS, found both")
        return Create(
            _BUILDERS[created.data](source, created, location),
            replace=bool(replace),
            force=any(trees(part) for part in replace),
            if_not_exists=any(part.data == "if_not_exists" for part in parts),
            location=location,
        )
    parts = trees(tree)
    if kind.startswith("alter"):
        return _alter(source, tree, location)
    if kind == "drop":
        exists = any(part.data == "if_exists" for part in parts)
        return Drop(_key(source, parts[0], parts[-1]), exists, location)
    if kind.startswith("show_") and kind != "show_create":
        return Command("show", kind.removeprefix("show_"), location=location)
    if kind == "show_create":
        return Command("show create", *_key(source, parts[0], parts[1]), location=location)
    of = "connection" if kind == "validate" else "sink"
    return Command(_COMMANDS.get(kind, kind), of, _name(source, parts[0]), location)


def trees(tree: Tree[Token]) -> list[Tree[Token]]:
    return [child for child in tree.children if isinstance(child, Tree)]


def _key(source: SourceText, kind: Tree[Token], name: Tree[Token]) -> Key:
    return kind.data.removeprefix("a_"), _name(source, name)


def _name(source: SourceText, tree: Tree[Token]) -> str:
    token = tree.children[0]
    name = identifier(token)
    if not _NAME.fullmatch(name):
        raise source.error(
            first(token), "expected a name of 1 to 100 letters, digits, dots, dashes, underscores"
        )
    return name


def _named(source: SourceText, tree: Tree[Token], kind: str = "name") -> str:
    """The name in a clause, or in this one of its trees."""
    return _name(source, next(part for part in trees(tree) if part.data == kind))


def _text(tree: Tree[Token]) -> str:
    """`'shop.orders'` or `shop.orders`."""
    (child,) = tree.children
    return path_text(child) if isinstance(child, Tree) else str(child)


def path_text(tree: Tree[Token]) -> str:
    return ".".join(map(str, tree.children))


def _secret(source: SourceText, tree: Tree[Token], location: SourceLocation) -> Definition:
    reference = tree.children[-1]
    assert isinstance(reference, Token)
    if not REFERENCE.match(reference):
        raise source.error(
            first(reference),
            "the secret itself is written in the statement; expected 'env:NAME' or 'file:PATH'",
            hint="put it into a variable or a file; definitions hold no secrets",
        )
    return Secret(_named(source, tree), str(reference), location)


def _connection(source: SourceText, tree: Tree[Token], location: SourceLocation) -> Definition:
    *_, kind, options = trees(tree)
    name = kind.data.removesuffix("_connection")
    given = connection_options(name, reading.raw_options(source, options))
    return Connection(_named(source, tree), name, given, location)


def _view(source: SourceText, tree: Tree[Token], location: SourceLocation) -> Definition:
    queries = [child for child in tree.children if isinstance(child, Token)]
    (kafka,) = (part for part in trees(tree) if part.data == "kafka")
    head, *tails = queries
    tail = str(tails[0]).rstrip() if tails else ""
    lead = len(head) - len(head.lstrip())
    parts = [SourceLocation(source, (head.start_pos or 0) + lead)]
    parts += [SourceLocation(source, token.start_pos or 0) for token in tails]
    return View(_named(source, tree), head.lstrip(), _kafka(source, kafka), tail, location, parts)


def _kafka(source: SourceText, tree: Tree[Token]) -> SourceClause:
    name, options, *clauses = trees(tree)
    location = SourceLocation(source, first(name))

    def allowed(setting: Setting) -> bool:
        return setting not in SAID - {("sink", "topics"), ("sink", "topic_pattern")}

    raw = list(reading.raw_options(source, options))
    topics = [o for o in raw if o.words and o.words[0].upper() == "TOPIC" and len(o.words) == 1]
    made = reading.settings(iter([o for o in raw if o not in topics]), ("sink",), allowed=allowed)
    if topics:
        values = [text for o in topics for text in _texts_of(o)]
        if ("sink", "topics") in made:
            raise topics[0].error("expected TOPIC or TOPICS, found both")
        made["sink", "topics"] = Option(values, topics[0].value_location)
    registry = ""
    for clause in clauses:
        if clause.data == "envelope":
            word = _known(source, clause, ENVELOPES[1:])
            made["route", "envelope"] = Option(word, SourceLocation(source, first(clause)))
        else:
            registry = _format(source, clause, made)
    return SourceClause(_name(source, name), made, registry, location)


def _known(source: SourceText, tree: Tree[Token], known: tuple[str, ...]) -> str:
    """The word of a clause that takes one of a few."""
    token = tree.children[0]
    word = str(token).lower()
    if word not in known:
        words = " or ".join(known).upper()
        fact = f"expected {words} behind {str(tree.data).upper()}, found {str(token)[:40]}"
        raise source.error(first(token), fact)
    return word


def _texts_of(option: reading.RawOption) -> list[str]:
    if isinstance(option.value, list):
        return list(map(str, option.value))
    if not isinstance(option.value, str):
        raise option.error("expected TOPIC and a name in single quotes")
    return [option.value]


def _format(source: SourceText, tree: Tree[Token], made: dict[Setting, Option]) -> str:
    """Adds the settings of `[decode]`; returns the name of the registry's connection."""
    word = tree.children[0]
    known = dict.fromkeys(name.removeprefix("confluent-") for name in FORMATS)
    kind, registry = _known(source, tree, tuple(known)), ""
    for part in trees(tree):
        if part.data == "options":
            made |= reading.settings(reading.raw_options(source, part), ("decode",))
        elif part.data == "from_registry":
            registry = _named(source, part)
        else:
            file = part.children[0]
            made["decode", "schema"] = Option(str(file), SourceLocation(source, first(file)))
        if part.data in ("from_registry", "from_confluent_file"):
            kind = f"confluent-{kind}"
    made["decode", "format"] = Option(kind, SourceLocation(source, first(word)))
    return registry


def _sink(source: SourceText, tree: Tree[Token], location: SourceLocation) -> Definition:
    parts = [part for part in trees(tree) if part.data != "if_not_exists"]
    name, read, catalog, *clauses = parts
    fields: dict[str, Any] = {"options": {}, "tables": [], "routes": []}
    given: set[str] = set()
    for clause in sorted(clauses, key=lambda clause: clause.data == "route"):
        kind = clause.data
        if kind in given and kind != "route":
            shown = _CLAUSES.get(kind, kind).upper()
            at = first(clause) or location.at
            raise source.error(at, f"the clause {shown} is given twice")
        given.add(kind)
        _CLAUSE_BUILDERS[kind](source, clause, fields)
    if not fields["tables"]:
        raise source.error(location.at, "the sink has no table; expected TABLE 'name'")
    return SinkStatement(
        name=_name(source, name),
        source=_kafka(source, read) if read.data == "kafka" else _named(source, read),
        catalog=_name(source, catalog),
        named_at={
            part.data: SourceLocation(source, first(part))
            for part in (read, *clauses)
            if part.data in _NAMED
        }
        | {"catalog": SourceLocation(source, first(catalog))},
        tables=tuple(fields.pop("tables")),
        routes=tuple(fields.pop("routes")),
        location=location,
        **fields,
    )


_NAMED = ("view_name", "aws")
_CLAUSES = {
    "add_tables": "table",
    "partition_by": "partition by",
    "dead_letters": "dead letters table",
    "with_options": "with",
    "options": "(namespace …)",
    "aws": "using aws connection",
}


def _tables(source: SourceText, tree: Tree[Token]) -> list[TableClause]:
    made = []
    for table in trees(tree):
        text, *options = trees(table)
        settings = reading.settings(
            (raw for part in options for raw in reading.raw_options(source, part)), ("table",)
        )
        made.append(TableClause(_text(text), settings, SourceLocation(source, first(text))))
    return made


def _add_tables(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    fields["tables"] += _tables(source, trees(clause)[0])


def _target(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    """`(NAMESPACE = 'shop', TABLE = 'orders')` behind the catalog."""
    for option in reading.raw_options(source, clause):
        words = " ".join(option.words).upper()
        if words not in ("NAMESPACE", "TABLE") or not isinstance(option.value, str):
            raise option.error("expected NAMESPACE = 'name' or TABLE = 'name'")
        if words == "NAMESPACE":
            fields["namespace"] = option.value
        else:
            fields["tables"].append(TableClause(option.value, {}, option.value_location))


def _option(
    section: str, key: str, value: Any, source: SourceText, node: Any, fields: dict[str, Any]
) -> None:
    setting, location = (section, key), SourceLocation(source, first(node))
    if setting in fields["options"]:
        raise source.error(location.at, f"{key.replace('_', ' ').upper()} is given twice")
    fields["options"][setting] = Option(value, location)


def _list_clause(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    items = trees(clause)[0]
    for item in trees(items) if clause.data == "key" else ():
        if trees(item):
            raise source.error(first(item), "KEY takes columns, and no functions of them")
    _option("table", clause.data, reading.texts(source, items), source, clause, fields)


def _mode(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    word = clause.children[0]
    _option("table", "mode", str(word).lower(), source, clause, fields)


def _dead_letters(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    (text,) = trees(clause)
    _option("dead_letters", "table", _text(text), source, clause, fields)


def _with(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    raw = reading.raw_options(source, trees(clause)[0])
    for setting, option in reading.settings(raw, ("sink", "table")).items():
        if setting in fields["options"]:
            assert option.location
            shown = setting[1].replace("_", " ").upper()
            raise source.error(option.location.at, f"{shown} is given twice")
        fields["options"][setting] = option


def _namespace(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    fields["namespace"] = _text(trees(clause)[0])


def _aws(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    fields["aws"] = _named(source, clause)


def _route(source: SourceText, clause: Tree[Token], fields: dict[str, Any]) -> None:
    settings: dict[Setting, Option] = {}
    tables: list[TableClause] = []
    action, otherwise, location = "tables", False, SourceLocation(source, first(clause))
    for part in trees(clause):
        if part.data == "options":
            settings |= reading.settings(reading.raw_options(source, part), ("route",))
        elif part.data == "when":
            _conditions(source, part, settings)
        elif part.data == "otherwise":
            otherwise = True
        elif part.data == "to_tables":
            tables = _tables(source, trees(part)[0])
        elif part.data == "by_function":
            word = part.children[0]
            settings["route", "python"] = Option(str(word), SourceLocation(source, first(word)))
            action = "python"
        else:
            action = part.data
    if action == "reject" and not (otherwise and fields["routes"]):
        raise source.error(
            location.at,
            "only what no ROUTE before it takes can be rejected; expected ROUTE ELSE REJECT",
        )
    known = {table.name for table in fields["tables"]}
    for table in tables:
        if table.name not in known:
            fields["tables"].append(table)
        elif table.options:
            assert table.location
            raise source.error(table.location.at, f"the options of {table.name!r} are given twice")
    names = tuple(table.name for table in tables)
    fields["routes"].append(RouteClause(settings, names, action, otherwise, location))


def _conditions(source: SourceText, tree: Tree[Token], made: dict[Setting, Option]) -> None:
    for condition in trees(tree):
        head, *rest = condition.children
        if condition.data == "with_values":
            assert isinstance(head, Tree)
            key = "header" if head.data == "header" else "field"
            name = head.children[0]
            text = path_text(name) if isinstance(name, Tree) else str(name)
            if isinstance(name, Tree) and any("." in str(part) for part in name.children):
                raise source.error(
                    first(name), "a field whose own name has a dot cannot be named here"
                )
            values = [_literal(node) for node in rest]
            pairs = [(key, text, head), *([("values", values, rest[0])] if values else [])]
        elif condition.data == "of_pattern":
            pairs = [("pattern", str(head), head)]
        else:
            pairs = [("topics", list(map(str, condition.children)), head)]
        for key, value, node in pairs:
            if ("route", key) in made:
                raise source.error(
                    first(node),
                    "a ROUTE takes one condition on the topic and one "
                    "on a field or header; expected another ROUTE",
                )
            made["route", key] = Option(value, SourceLocation(source, first(node)))


def _literal(node: Any) -> str:
    return str(node.children[0]) if node.children else str(node.data)


def _alter(source: SourceText, tree: Tree[Token], location: SourceLocation) -> Statement:
    parts = trees(tree)
    names = {part.data: part for part in parts}
    kind = parts[0].data.removeprefix("a_")
    removing = tree.data == "alter_reset"
    raw = reading.raw_options(source, names["options"])
    table = _text(trees(names["of_table"])[0]) if "of_table" in names else ""
    options: Any = list(raw)
    if kind == "sink":
        scopes = ("table",) if table else ("sink", "table")
        options = reading.settings(iter(options), scopes, removing=removing)
    elif table:
        raise source.error(location.at, "a connection has no tables")
    return Alter(
        (kind, _named(source, tree)),
        options,
        "if_exists" in names,
        table,
        removing,
        "force" in names,
        location,
    )


_BUILDERS = {"secret": _secret, "connection": _connection, "view": _view, "sink": _sink}
_CLAUSE_BUILDERS = {
    "options": _target,
    "aws": _aws,
    "namespace": _namespace,
    "add_tables": _add_tables,
    "key": _list_clause,
    "partition_by": _list_clause,
    "mode": _mode,
    "route": _route,
    "dead_letters": _dead_letters,
    "with_options": _with,
}
