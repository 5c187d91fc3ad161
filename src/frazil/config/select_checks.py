"""Checks of declared columns and of `[[table]] select`, before anything starts.

In: all sections of a config. Out: nothing; the first column that cannot be made raises
`ConfigError`, with its path. Asks no server and opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from frazil.config.column_types import SyntaxFault, column_path, column_type
from frazil.config.messages import nearest, within
from frazil.config.sections import (
    RESERVED,
    UNDECLARED,
    ConfigSections,
    DecodeConfig,
    TableConfig,
)
from frazil.config.select import (
    KEY_TYPES,
    Column,
    Digest,
    Expression,
    Item,
    KeyBytes,
    KeyColumns,
    KeyField,
    Literal,
    Mask,
    Selection,
    innermost,
    table_selection,
)
from frazil.config.units import ORDER, transform_of
from frazil.errors import ConfigError


def check_declared(decode: DecodeConfig) -> None:
    """Checks `columns`, `key_columns` and `undeclared` of `[decode]`."""
    if decode.undeclared not in UNDECLARED:
        raise ConfigError(
            f"cannot read [decode] undeclared: {decode.undeclared!r} is unknown"
            f"{nearest(decode.undeclared, UNDECLARED)}",
            path=("decode", "undeclared"),
        )
    if decode.format != "json" and decode.columns:
        raise ConfigError(
            f"cannot read [decode] columns: they are for JSON, and format is {decode.format}",
            hint="the types of Avro are in its schema; [[table]] select can cast them",
            path=("decode", "columns"),
        )
    if decode.columns and decode.schema:
        raise ConfigError(
            "cannot read [decode]: expected either columns or schema, found both",
            path=("decode", "columns"),
        )
    if decode.undeclared != "infer" and not (decode.columns or decode.schema):
        raise ConfigError(
            f"cannot read [decode] undeclared: it is {decode.undeclared}, and nothing is declared",
            hint='columns = {id = "long"}',
            path=("decode", "undeclared"),
        )
    for setting in ("columns", "key_columns"):
        _check_paths(getattr(decode, setting), setting)


def _check_paths(columns: Mapping[str, str], setting: str) -> None:
    paths: dict[tuple[str, ...], str] = {}
    for text, kind in columns.items():
        at = ("decode", setting, text)
        try:
            path = column_path(text)
            column_type(kind)
        except SyntaxFault as error:
            raise ConfigError(
                f"cannot read [decode] {setting}, {text} = {kind!r}: {error.fact}",
                hint=error.shown,
                path=at,
            ) from None
        for other in paths:
            size = min(len(other), len(path))
            if other[:size] == path[:size]:
                raise ConfigError(
                    f"cannot read [decode] {setting}: {paths[other]} and {text} declare one field",
                    path=at,
                )
        paths[path] = text


def check_selects(config: ConfigSections) -> None:
    """Checks the columns of every `[[table]]`."""
    for number, table in enumerate(config.tables):
        with within("table", str(number)):
            if table.key_column_type not in KEY_TYPES:
                raise ConfigError(
                    f"cannot use table {table.name}: key_column_type {table.key_column_type!r} is "
                    f"unknown{nearest(table.key_column_type, KEY_TYPES)}",
                    path=("key_column_type",),
                )
            selection = table_selection(table)
            if selection is not None:
                _check_select(config, table, selection)


def _check_select(config: ConfigSections, table: TableConfig, selection: Selection) -> None:
    path = (_setting(table),)
    doing = f"cannot use table {table.name}"
    if config.transform:
        raise ConfigError(
            f"{doing}: it has {path[0]}, and its rows come from a [transform]",
            hint="select the columns there; its view has the key and headers as _key and _headers",
            path=path,
        )
    if table.aliases and table.select:
        raise ConfigError(
            f"{doing}: it has aliases and select",
            hint='select renames a field: "old as new"',
            path=("aliases",),
        )
    _check_names(table, selection, doing, path)
    _check_known(config.decode, selection, doing)
    _check_key_fields(config, selection, doing, path)
    for of in selection.nodes:
        if isinstance(of, (Mask, Digest)) and isinstance(innermost(of), Literal):
            raise ConfigError(f"{doing}: select hides a constant", path=("select",))
    if nulls := [name for name, of in selection.named.items() if of == Literal(None)]:
        raise ConfigError(
            f"{doing}: select makes {nulls[0]!r} null without a type",
            hint=f"cast(null as string) as {nulls[0]}",
            path=("select",),
        )
    _check_used(table, selection, doing)
    _check_key(table, selection, doing)


def _setting(table: TableConfig) -> str:
    settings = ("select", "key_column", "key_fields_prefix", "headers_column", "headers")
    return next(name for name in settings if getattr(table, name))


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


def _check_used(table: TableConfig, selection: Selection, doing: str) -> None:
    """Columns that other settings name are among the columns of the table."""
    of_terms = {
        setting: [transform_of(_term(text), doing)[0] for text in getattr(table, setting)]
        for setting in ("partition_by", "sort_by")
    }
    used: dict[str, Iterable[str]] = {
        "key": table.key,
        "identifier_fields": table.identifier_fields,
        "version_column": filter(None, [table.version_column]),
        "event_time": filter(None, [table.event_time]),
        **of_terms,
    }
    beside = {
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
        "_op",
    }
    for setting, paths in used.items():
        for path in paths:
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
