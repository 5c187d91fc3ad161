"""Checks of declared columns and of `[[table]] select`, before anything starts.

In: all sections of a config. Out: a rule for each column that may not be made. Asks no server and
opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial

from frazil.config.column_types import ColumnType, SyntaxFault, column_path, column_type
from frazil.config.messages import nearest, within
from frazil.config.rules import PRESENCE, Checked
from frazil.config.sections import (
    RESERVED,
    UNDECLARED,
    ConfigSections,
    DecodeConfig,
    TableConfig,
)
from frazil.config.select import (
    KEY_TYPES,
    Cast,
    Column,
    Digest,
    Expression,
    Header,
    Item,
    KeyBytes,
    KeyColumns,
    KeyField,
    Literal,
    Mask,
    Selection,
    innermost,
    parse_select,
    table_selection,
)
from frazil.config.units import ORDER, transform_of
from frazil.errors import ConfigError


def declared_rules(decode: DecodeConfig) -> Iterator[Checked]:
    """`columns`, `key_columns` and `undeclared` of `[decode]`."""
    yield lambda: _check_undeclared(decode.undeclared), ["undeclared"]
    given = ("columns", PRESENCE)
    yield lambda: _check_json(decode), ["format", given]
    yield lambda: _check_one_schema(decode), [given, "schema"]
    yield lambda: _check_declares(decode), ["undeclared", given, "schema"]
    for setting in ("columns", "key_columns"):
        columns: Mapping[str, str] = getattr(decode, setting)
        for text, kind in columns.items():
            yield partial(_check_declared, setting, text, kind), [(setting, text)]
        for text, other in _overlapping(columns):
            paths = [(setting, other), (setting, text)]
            yield partial(_refuse_overlap, setting, text, other), paths


def _check_undeclared(undeclared: str) -> None:
    if undeclared not in UNDECLARED:
        raise ConfigError(
            f"cannot read [decode] undeclared: {undeclared!r} is unknown"
            f"{nearest(undeclared, UNDECLARED)}",
            path=("undeclared",),
        )


def _check_json(decode: DecodeConfig) -> None:
    if decode.format != "json" and decode.columns:
        raise ConfigError(
            f"cannot read [decode] columns: they are for JSON, and format is {decode.format}",
            hint="the types of Avro are in its schema; [[table]] select can cast them",
            path=("columns",),
        )


def _check_one_schema(decode: DecodeConfig) -> None:
    if decode.columns and decode.schema:
        raise ConfigError(
            "cannot read [decode]: expected either columns or schema, found both",
            path=("columns",),
        )


def _check_declares(decode: DecodeConfig) -> None:
    if decode.undeclared != "infer" and not (decode.columns or decode.schema):
        raise ConfigError(
            f"cannot read [decode] undeclared: it is {decode.undeclared}, and nothing is declared",
            hint='columns = {id = "long"}',
            path=("undeclared",),
        )


def _check_declared(setting: str, text: str, kind: str) -> None:
    try:
        column_path(text)
        column_type(kind)
    except SyntaxFault as error:
        raise ConfigError(
            f"cannot read [decode] {setting}, {text} = {kind!r}: {error.fact}",
            hint=error.shown,
            path=(setting, text),
        ) from None


def _overlapping(columns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Declarations of one field, or of one inside the other: the later, and the earlier."""
    paths: dict[tuple[str, ...], str] = {}
    for text in columns:
        with suppress(SyntaxFault):
            path = column_path(text)
            for other in paths:
                size = min(len(other), len(path))
                if other[:size] == path[:size]:
                    yield text, paths[other]
                    break
            paths[path] = text


def _refuse_overlap(setting: str, text: str, other: str) -> None:
    raise ConfigError(
        f"cannot read [decode] {setting}: {other} and {text} declare one field",
        path=(setting, text),
    )


#: Settings of `[[table]]` that make its columns.
_SELECTS = ("select", "key_column", "key_fields_prefix", "headers_column", "headers")
_METADATA = ("topic_column", "partition_column", "offset_column", "timestamp_column")


def select_rules(config: ConfigSections, table: TableConfig) -> Iterator[Checked]:
    """The columns of one `[[table]]`."""
    yield lambda: _check_key_type(table), ["key_column_type"]
    yield lambda: _check_key_column(table), ["key_column", "key_column_type"]
    for at, text in enumerate(table.select):
        yield partial(_check_item, text), [("select", str(at))]
    columns = [*_SELECTS, "key_column_type", "mode"]
    doing = f"cannot use table {table.name}"
    decode = ["/decode/format", "/decode/columns", "/decode/undeclared", "/decode/schema"]
    keys = [f"/decode/{key}" for key in ("key_format", "key_columns", "key_schema")]

    selection = cache(lambda: table_selection(table))

    def of_selection(
        check: Callable[[Selection], object], *settings: str
    ) -> tuple[Callable[[], object], list[str]]:
        def checked() -> None:
            made = selection()
            if made is not None:
                check(made)

        return checked, [*columns, *settings]

    path = next(((name,) for name in _SELECTS if getattr(table, name)), ())
    yield of_selection(lambda _: _check_query(config, doing, path), "/transform/sql")
    yield of_selection(lambda _: _check_aliases(table, doing), "aliases")
    yield of_selection(lambda s: _check_names(table, s, doing, path), *_METADATA)
    yield of_selection(lambda s: _check_known(config.decode, s, doing), *decode)
    yield of_selection(lambda s: _check_key_fields(config, s, doing, path), *decode, *keys)
    yield of_selection(lambda s: _check_constants(s, doing))
    yield of_selection(lambda s: _check_hidden(config, table, s, doing), *decode, "/route")
    yield of_selection(lambda s: _check_casts(config, s, doing), *decode, *keys, "/route")
    for name in _NAMING:
        read = [name, *_METADATA, "aliases", "/transform/sql"]
        yield (
            partial(_check_declares_column, config, table, name, doing),
            [*columns, *decode, *read],
        )
    for name in _NAMING:
        yield of_selection(partial(_check_used, table, name, doing), name, *_METADATA)
    yield of_selection(lambda s: _check_key(table, s, doing), "key", "version_column")


def _check_key_type(table: TableConfig) -> None:
    if table.key_column_type not in KEY_TYPES:
        raise ConfigError(
            f"cannot use table {table.name}: key_column_type {table.key_column_type!r} is "
            f"unknown{nearest(table.key_column_type, KEY_TYPES)}",
            path=("key_column_type",),
        )


def _check_key_column(table: TableConfig) -> None:
    if table.key_column_type != KEY_TYPES[0] and not table.key_column:
        raise ConfigError(
            f"cannot use table {table.name}: key_column_type is {table.key_column_type}, and there "
            "is no key_column",
            hint='key_column = "key"',
            path=("key_column_type",),
        )


def _check_item(text: str) -> None:
    with within("select"):
        parse_select([text])


def _check_query(config: ConfigSections, doing: str, path: tuple[str, ...]) -> None:
    if config.transform:
        raise ConfigError(
            f"{doing}: it has {path[0]}, and its rows come from a [transform]",
            hint="select the columns there; its view has the key and headers as _key and _headers",
            path=path,
        )


def _check_aliases(table: TableConfig, doing: str) -> None:
    if table.aliases and table.select:
        raise ConfigError(
            f"{doing}: it has aliases and select",
            hint='select renames a field: "old as new"',
            path=("aliases",),
        )


def _check_constants(selection: Selection, doing: str) -> None:
    for of in selection.nodes:
        if isinstance(of, (Mask, Digest)) and isinstance(innermost(of), Literal):
            raise ConfigError(f"{doing}: select hides a constant", path=("select",))
    if nulls := [name for name, of in selection.named.items() if of == Literal(None)]:
        raise ConfigError(
            f"{doing}: select makes {nulls[0]!r} null without a type",
            hint=f"cast(null as string) as {nulls[0]}",
            path=("select",),
        )


def _check_names(
    table: TableConfig, selection: Selection, doing: str, path: tuple[str, ...]
) -> None:
    metadata = {
        name.lower()
        for name in (
            table.topic_column,
            table.partition_column,
            table.offset_column,
            table.timestamp_column,
        )
    }
    names = [item.name for item in selection.items if isinstance(item, Item)]
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise ConfigError(f"{doing}: two of its columns are called {name!r}", path=path)
        seen.add(name.lower())
        if name.lower() in metadata:
            raise ConfigError(
                f"{doing}: {name!r} is the name of a metadata column",
                hint=f"give the metadata column another name, e.g. _frazil{name}",
                path=path,
            )
        if name in RESERVED:
            raise ConfigError(
                f"{doing}: the column name {name!r} is reserved by Iceberg", path=path
            )
        if table.mode == "changelog" and name == "_op":
            of = selection.named[name]
            if of != Column(("_op",)):
                raise ConfigError(f"{doing}: _op is the change log's own column", path=path)


def _check_known(decode: DecodeConfig, selection: Selection, doing: str) -> None:
    """Where only declared fields become columns, a select names no other."""
    if decode.undeclared == "infer" or not decode.columns:
        return
    declared = {column_path(text)[0] for text in decode.columns} | {"_op", "_source", "_ts_ms"}
    if unknown := sorted(selection.fields - declared):
        raise ConfigError(
            f"{doing}: select names the field {unknown[0]!r}, which [decode] columns does not "
            f"declare{nearest(unknown[0], declared)}",
            path=("select",),
        )


def _check_key_fields(
    config: ConfigSections, selection: Selection, doing: str, path: tuple[str, ...]
) -> None:
    decode = config.decode
    if not selection.decodes_key:
        return
    kind = decode.key_format or ("avro" if decode.key_schema else "")
    if not kind:
        registry = decode.format == "confluent-avro" and not decode.schema
        kind = decode.format if registry or decode.format == "json" else "text"
    if kind == "text":
        raise ConfigError(
            f"{doing}: it has fields of the key, and keys are text",
            hint='[decode]\nkey_format = "json"\nkey_columns = {id = "long"}',
            path=path,
        )
    if kind == "confluent-avro" and decode.format == "json" and not decode.key_schema:
        raise ConfigError(
            f"{doing}: it has fields of the key, values are JSON, and the types of the "
            "key are missing",
            hint="set [decode] key_schema",
            path=path,
        )
    if kind == "json" and not decode.key_columns:
        raise ConfigError(
            f"{doing}: it has fields of the key, which is JSON, and their types are missing",
            hint='[decode]\nkey_columns = {id = "long"}',
            path=path,
        )


#: Settings whose items are columns, or transforms of them; and all that name columns.
_TERMS = ("partition_by", "sort_by")
_NAMING = ("key", "identifier_fields", "version_column", "event_time", *_TERMS)


def _check_hidden(
    config: ConfigSections, table: TableConfig, selection: Selection, doing: str
) -> None:
    """A column of the key or of headers does not take the place of a declared field unnoticed."""
    star = selection.star
    if star is None or config.transform or any(route.envelope for route in config.routes):
        return
    fields = {column_path(text)[0] for text in config.decode.columns} - set(star.excluded)
    names = {"key_column": [table.key_column], "headers_column": [table.headers_column]}
    for setting, columns in {**names, "headers": [*table.headers]}.items():
        for column in columns:
            if column in fields:
                raise ConfigError(
                    f"{doing}: its {setting} is {column!r}, and [decode] columns declares a field "
                    "of that name",
                    hint=f'choose another name, or select = ["* except ({column})"]',
                    path=(setting,),
                )


def _used(table: TableConfig, setting: str, doing: str) -> list[str]:
    """The columns that a setting names."""
    value = getattr(table, setting)
    used = [value] if isinstance(value, str) else list(value)
    if setting in _TERMS:
        used = [transform_of(_term(text), doing)[0] for text in used]
    return [path for path in used if path]


def _check_declares_column(
    config: ConfigSections, table: TableConfig, setting: str, doing: str
) -> None:
    """Where only declared fields become columns, no setting names another one."""
    decode, selection = config.decode, table_selection(table)
    if decode.undeclared == "infer" or not decode.columns or config.transform:
        return
    if any(route.envelope for route in config.routes):
        return  # rows are inside the declared envelope
    known = {column_path(text)[0] for text in decode.columns}
    known |= {"_op", "_source", "_ts_ms", *table.aliases, *table.aliases.values()}
    known |= {getattr(table, name) for name in _METADATA}
    made = selection.named.keys() if selection else set()
    prefixes = [table.key_fields_prefix] if table.key_fields_prefix else []
    for path in _used(table, setting, doing):
        first = path.split(".")[0]
        if first in known or path in made or first in made or any(map(first.startswith, prefixes)):
            continue
        if selection is not None and selection.lacks(path):
            continue  # `_check_used` reports it
        raise ConfigError(
            f"{doing}: {setting} names {path!r}, which [decode] columns does not declare"
            f"{nearest(first, known)}",
            hint=f'columns = {{{first} = "…"}}, or undeclared = "infer"',
            path=(setting,),
        )


#: Type → the types that its values are cast to, as `pipeline.strict_cast` does; others are never.
_NUMBERS = ("int", "long", "float", "double", "decimal")
_ZONED, _LOCAL = ("timestamptz", "timestamptz_ns"), ("timestamp", "timestamp_ns")
_WHOLE = (*_NUMBERS, "string", "timestamp", "timestamptz")
_CASTS: Mapping[str, tuple[str, ...]] = {
    "boolean": ("string",),
    "int": _WHOLE,
    "long": _WHOLE,
    "float": _NUMBERS,
    "double": _NUMBERS,
    "decimal": (*_NUMBERS, "string"),
    "string": ("boolean", *_NUMBERS, "binary", "date", "time", *_LOCAL, *_ZONED, "uuid"),
    "binary": ("string",),
    "date": ("string", *_LOCAL),
    "time": (),
    **dict.fromkeys(_LOCAL, _LOCAL),
    **dict.fromkeys(_ZONED, _ZONED),
    "uuid": ("string", "fixed"),
    "fixed": ("string", "binary", "uuid"),
    **dict.fromkeys(("list", "map", "struct"), ()),
}


def never_cast(given: ColumnType, target: ColumnType) -> bool:
    """Is no value of the one type ever cast to the other?"""
    if target.name == given.name:
        return False
    if given.name in ("int", "long") and target.name in ("timestamp", "timestamptz"):
        return not target.epoch  # a number needs a unit
    return target.name not in _CASTS[given.name]


def _check_casts(config: ConfigSections, selection: Selection, doing: str) -> None:
    """Casts of fields whose types are declared."""
    if any(route.envelope for route in config.routes):
        return
    for node in selection.nodes:
        if not isinstance(node, Cast):
            continue
        given = _type_of(config.decode, node.of)
        if given is not None and never_cast(given, node.kind):
            raise ConfigError(
                f"{doing}: select casts {given} to {node.kind}, which no value is ever cast to",
                hint="see the table of casts in docs/guide/columns.md",
                path=("select",),
            )


def _type_of(decode: DecodeConfig, of: Expression) -> ColumnType | None:
    """The type of an expression, where the config says it."""
    match of:
        case Cast(_, kind):
            return kind
        case Mask() | Digest():
            return ColumnType("string")
        case KeyBytes() | Header():
            return ColumnType("binary")
        case Column(names):
            return _declared_type(decode.columns, names)
        case KeyField(names) if names:
            return _declared_type(decode.key_columns, names)
    return None


def _declared_type(columns: Mapping[str, str], names: tuple[str, ...]) -> ColumnType | None:
    for text, kind in columns.items():
        path = tuple(column_path(text))
        if names[: len(path)] == path:
            made: ColumnType | None = column_type(kind)
            for name in names[len(path) :]:
                made = dict(made.inside).get(name) if made and made.name == "struct" else None
            return made
        if path[: len(names)] == names:
            return ColumnType("struct")
    return None


def _check_used(table: TableConfig, setting: str, doing: str, selection: Selection) -> None:
    """Columns that another setting names are among the columns of the table."""
    beside = {*(getattr(table, name) for name in _METADATA), "_op", ""}
    for path in _used(table, setting, doing):
        if path not in beside and selection.lacks(path):
            raise ConfigError(
                f"{doing}: select leaves out {path!r}, which {setting} names",
                hint=f'select = ["{path}", …]',
                path=("select",),
            )


def _term(text: str) -> str:
    match = ORDER.fullmatch(text)
    return match["term"] if match else text


def _check_key(table: TableConfig, selection: Selection, doing: str) -> None:
    """Records without a value, and changes of a key, name the rows that they delete by the fields
    as they were sent: the columns of a key are such fields, or come from Kafka's key."""
    if not table.key:
        return
    of_key = [name for name in table.key if from_key(selection, name)]
    if of_key and len(of_key) < len(table.key):
        raise ConfigError(
            f"{doing}: {of_key[0]!r} comes from the record's key, and the other columns of its "
            "key from the value",
            path=("key",),
        )
    plain = [*(() if of_key else table.key), *filter(None, [table.version_column])]
    for name in plain:
        if name != table.timestamp_column and selection.source(name) is None:
            raise ConfigError(
                f"{doing}: select computes {name!r}, which is its "
                f"{'key' if name in table.key else 'version_column'}; expected a field as it is",
                hint="a deleted row is found by the value that was sent; use a [transform]",
                path=("select",),
            )
        source = selection.source(name)
        twins = [other for other in plain if source and selection.source(other) == source]
        if len(twins) > 1:
            raise ConfigError(
                f"{doing}: select makes two columns of its key of one field: {', '.join(twins)}",
                path=("select",),
            )
        if source is not None and name in table.key and len(source) > 1 and name in selection.named:
            raise ConfigError(
                f"{doing}: select takes {name!r}, which is its key, from inside {source[0]!r}; "
                "expected a field at the top",
                path=("select",),
            )


def from_key(selection: Selection, name: str) -> bool:
    """Does a column come from the record's key?"""
    of: Expression | None = selection.named.get(name)
    if of is None:
        prefixes = [item.prefix for item in selection.items if isinstance(item, KeyColumns)]
        return not selection.passes(name) and any(map(name.startswith, prefixes))
    return isinstance(innermost(of), (KeyBytes, KeyField))
