"""Checks of `[[table]]` and `[dead_letters]`: names, modes, keys, columns, partitions.

In: all sections of a config. Out: a rule for each setting, or each few of them, that no sink can
use. Asks no server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from frazil.config.messages import nearest, within
from frazil.config.rules import PRESENCE, Checked, Rule, under
from frazil.config.sections import (
    CODECS,
    EVOLUTION,
    MODES,
    NEVER,
    RESERVED,
    ConfigSections,
    DeadLettersConfig,
    TableConfig,
    deleted_keys_table,
    replayed,
)
from frazil.config.select_checks import select_rules
from frazil.config.units import ORDER, duration, size, transform_of
from frazil.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def table_rules(config: ConfigSections) -> Iterator[Rule]:
    yield Rule(lambda: _check_any(config), (("table", PRESENCE),))
    both = (("table", PRESENCE), ("route", PRESENCE))
    yield Rule(lambda: _check_routed(config), both)
    query = (("transform", "sql"), ("transform", "python"))
    yield Rule(lambda: _check_alone(config), (("route", PRESENCE), *query))
    yield Rule(lambda: _check_no_dead_letters(config), (("dead_letters", "table"), *query))
    yield Rule(lambda: _check_template(config), (("table", "0", "name"), ("route", PRESENCE)))
    names = _names(config)
    for at, (path, name) in enumerate(names):
        for other, known in names[:at]:
            if name.lower() == known.lower():
                yield Rule(partial(_refuse_twice, name, path), (other, path))
                break
    for number, table in enumerate(config.tables):
        yield from under(("table", str(number)), _rules_of(table))
        yield from under(("table", str(number)), select_rules(config, table))
    yield from under(("dead_letters",), _dead_letter_rules(config.dead_letters))
    yield Rule(lambda: _check_most(config), (("sink", "max_tables"), ("table", PRESENCE)))


def _check_any(config: ConfigSections) -> None:
    if not config.tables:
        raise ConfigError("cannot read [[table]]: expected a table, found none", path=("table",))


def _check_routed(config: ConfigSections) -> None:
    if len(config.tables) > 1 and not config.routes:
        raise ConfigError(
            f"cannot read [[table]]: {len(config.tables)} tables, and no [[route]] assigns "
            "records to them",
            path=("table", "1"),
        )


def _check_alone(config: ConfigSections) -> None:
    if config.routes and config.transform:
        raise ConfigError(
            "cannot use [[route]] with a [transform]: what comes out of a query goes to one table",
            hint="use a sink for each query",
            path=("route", "0"),
        )


def _check_no_dead_letters(config: ConfigSections) -> None:
    if config.dead_letters and config.transform:
        raise ConfigError(
            "cannot use [dead_letters] with a [transform]: a query's rows are Spark's own",
            path=("dead_letters",),
        )


def _check_template(config: ConfigSections) -> None:
    if config.tables and not config.routes and "{" in config.tables[0].name:
        raise ConfigError(
            f"cannot use table {config.tables[0].name}: no [[route]] supplies the words in its "
            "name",
            path=("table", "0", "name"),
        )


def _names(config: ConfigSections) -> list[tuple[tuple[str, ...], str]]:
    """Every table of the sink, with the setting that names it; the last of two is the wrong one."""
    names: list[tuple[tuple[str, ...], str]] = [
        (("table", str(n), "name"), table.name) for n, table in enumerate(config.tables)
    ]
    for number, table in enumerate(config.tables):
        if table.version_column and table.upsert_key:
            of_version = ("table", str(number), "version_column")
            names.append((of_version, deleted_keys_table(table.name)))
    if config.tables:
        names.append((("sink", "index_table"), config.index_table))
    if table_name := config.dead_letters.table:
        path = ("dead_letters", "table")
        names += [(path, table_name), (path, replayed(table_name))]
    return names


def _refuse_twice(name: str, path: tuple[str, ...]) -> None:
    raise ConfigError(f"cannot use table {name}: two tables of the sink have that name", path=path)


def _check_most(config: ConfigSections) -> None:
    if config.sink.max_tables < len(config.tables):
        raise ConfigError(
            f"cannot read [sink] max_tables: {config.sink.max_tables} is less than "
            f"the {len(config.tables)} tables of the config",
            path=("sink", "max_tables"),
        )


def _dead_letter_rules(dead_letters: DeadLettersConfig) -> Iterator[Checked]:
    yield lambda: _check_dead_letter_table(dead_letters.table), ["table"]
    yield lambda: _check_fraction(dead_letters.max_fraction), ["max_fraction"]
    yield lambda: _check_rejected(dead_letters.max_count), ["max_count"]


def _check_dead_letter_table(name: str) -> None:
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            f"cannot read [dead_letters] table: expected namespace.table, found {name!r}",
            path=("table",),
        )


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise ConfigError(
            "cannot read [dead_letters] max_fraction: expected a number from 0 to 1, "
            f"found {fraction}",
            path=("max_fraction",),
        )


def _check_rejected(most: int) -> None:
    if most < 0:
        raise ConfigError(
            f"cannot read [dead_letters] max_count: expected at least 0, found {most}",
            path=("max_count",),
        )


def _rules_of(table: TableConfig) -> Iterator[Checked]:
    yield lambda: _check_name(table), ["name"]
    yield lambda: _check_location(table), ["name", "location"]
    for name, known in (
        ("schema_evolution", EVOLUTION),
        ("compression", CODECS),
        ("mode", MODES),
    ):
        yield partial(_check_word, table, name, known), [name]
    yield lambda: _check_max_columns(table), ["max_columns"]
    for key in ("key", "partition_by", "identifier_fields"):
        yield partial(_check_repeated, table, key), [key]
    yield from _mode_rules(table)
    kept = "" if table.snapshot_retention == NEVER else table.snapshot_retention
    for name, text in (("commit_interval", table.commit_interval), ("snapshot_retention", kept)):
        if text:
            key = f"[[table]] {name} of {table.name}"
            yield partial(duration, text, key, (name,)), [name]
    if table.commit_bytes:
        key = f"[[table]] commit_bytes of {table.name}"
        yield partial(size, table.commit_bytes, key, ("commit_bytes",)), ["commit_bytes"]
    for at, text in enumerate(table.partition_by):
        yield partial(_check_partition, table, text), [("partition_by", str(at))]
    for at, text in enumerate(table.sort_by):
        yield partial(_check_order, table, text), [("sort_by", str(at))]
    yield from _column_rules(table)
    yield lambda: _check_version(table), ["format_version"]
    yield lambda: _check_file_size(table), ["target_file_size"]
    yield lambda: _check_branch(table), ["branch"]
    for column, header in table.headers.items():
        yield partial(_check_header, table, column, header), [("headers", column)]


def _check_word(table: TableConfig, name: str, known: Sequence[str]) -> None:
    value = getattr(table, name)
    if value not in known:
        raise ConfigError(
            f"cannot use table {table.name}: {name} {value!r} is unknown{nearest(value, known)}",
            path=(name,),
        )


def _check_max_columns(table: TableConfig) -> None:
    if table.max_columns < 1:
        raise ConfigError(
            f"cannot use table {table.name}: expected max_columns from 1, found "
            f"{table.max_columns}",
            path=("max_columns",),
        )


def _check_repeated(table: TableConfig, key: str) -> None:
    texts = [text.lower() for text in getattr(table, key)]
    if repeated := [text for text in texts if texts.count(text) > 1]:
        raise ConfigError(
            f"cannot use table {table.name}: {key} names {repeated[0]!r} twice", path=(key,)
        )


def _check_partition(table: TableConfig, text: str) -> None:
    with within("partition_by"):
        transform_of(text, f"cannot partition table {table.name} by {text!r} in partition_by")


def _check_order(table: TableConfig, text: str) -> None:
    match = ORDER.fullmatch(text)
    with within("sort_by"):
        transform_of(
            match["term"] if match else text,
            f"cannot sort table {table.name} by {text!r} in sort_by",
        )


def _check_version(table: TableConfig) -> None:
    if table.format_version not in (2, 3):
        raise ConfigError(
            f"cannot use table {table.name}: expected format_version 2 or 3, "
            f"found {table.format_version}",
            path=("format_version",),
        )


def _check_file_size(table: TableConfig) -> None:
    largest = ("target_file_size",)
    number = size(table.target_file_size, f"[[table]] {largest[0]} of {table.name}", largest)
    if number > 2**29:
        raise ConfigError(
            f"cannot use table {table.name}: target_file_size is over 512MiB", path=largest
        )
    if not number:
        raise ConfigError(
            f"cannot use table {table.name}: expected a target_file_size from 1, found "
            f"{table.target_file_size!r}",
            path=largest,
        )


def _check_branch(table: TableConfig) -> None:
    if not re.fullmatch(r"\S+", table.branch):
        raise ConfigError(
            f"cannot use table {table.name}: expected the name of a branch, found {table.branch!r}",
            hint="the branch that every table has is main",
            path=("branch",),
        )


def _check_header(table: TableConfig, column: str, header: str) -> None:
    if not column or not header:
        raise ConfigError(
            f'cannot use table {table.name}: expected headers = {{column = "header"}}, found '
            f"{column!r} = {header!r}",
            path=("headers",),
        )


def _check_name(table: TableConfig) -> None:
    if not _NAME.fullmatch(re.sub(r"\{\w+\}", "x", table.name)):
        raise ConfigError(
            f"cannot use table name {table.name!r}: expected namespace.table of "
            "letters, digits and underscores",
            path=("name",),
        )
    if "{" in table.name.rpartition(".")[0]:
        raise ConfigError(
            f"cannot use table name {table.name!r}: a namespace does not come from the data",
            path=("name",),
        )


def _check_location(table: TableConfig) -> None:
    if "{" in table.name and table.location:
        raise ConfigError(
            f"cannot use table {table.name}: tables made of a template cannot share one location",
            path=("location",),
        )


#: The metadata columns.
_COLUMNS = ("topic_column", "partition_column", "offset_column", "timestamp_column")
_BESIDE = list(_COLUMNS)


def _column_rules(table: TableConfig) -> Iterator[Checked]:
    """The names of the metadata columns."""
    for at, key in enumerate(_COLUMNS):
        yield partial(_check_column, table, key), [key]
        for other in _COLUMNS[:at]:
            yield partial(_check_two, table, other, key), [other, key]


def _check_column(table: TableConfig, key: str) -> None:
    name = getattr(table, key)
    if not name and key != "timestamp_column":
        raise ConfigError(
            f"cannot use table {table.name}: {key} is empty; the topic, "
            "partition and offset columns carry the proof and cannot be left "
            "out",
            path=(key,),
        )
    if name in RESERVED:
        raise ConfigError(
            f"cannot use table {table.name}: the column name {name!r} of {key} "
            "is reserved by Iceberg",
            path=(key,),
        )


def _check_two(table: TableConfig, key: str, other: str) -> None:
    name = getattr(table, key)
    if name and name == getattr(table, other):
        raise ConfigError(
            f"cannot use table {table.name}: two metadata columns are named "
            f"{name!r}: {key} and {other}",
            path=(other,),
        )


def _mode_rules(table: TableConfig) -> Iterator[Checked]:
    yield lambda: _check_key(table), ["mode", "key"]
    yield lambda: _check_compaction(table), ["compact_after_commits"]
    yield lambda: _check_partitioned(table), ["partitioned_by_key", "mode", "key"]
    yield lambda: _check_identifiers(table), ["identifier_fields", "mode", "key"]
    yield lambda: _check_key_columns(table), ["key", *_BESIDE]
    yield lambda: _check_version_mode(table), ["version_column", "mode", "key"]
    yield lambda: _check_version_column(table), ["version_column", "key", *_BESIDE]
    yield lambda: _check_delete_column(table), ["delete_column", "mode", "key"]


def _check_key(table: TableConfig) -> None:
    doing = f"cannot use table {table.name}"
    if (table.mode == "append") == bool(table.key):
        raise ConfigError(
            f"{doing}: it has a key, and its mode is append"
            if table.key
            else f"{doing}: its mode is {table.mode}, and key is missing, which identifies the "
            "rows to replace",
            hint='mode = "upsert"\nkey = ["id"]',
            path=("key" if table.key else "mode",),
        )


def _check_compaction(table: TableConfig) -> None:
    if table.compact_after_commits < 0:
        raise ConfigError(
            f"cannot use table {table.name}: compact_after_commits is below 0",
            path=("compact_after_commits",),
        )


def _check_partitioned(table: TableConfig) -> None:
    if table.partitioned_by_key and not table.upsert_key:
        raise ConfigError(
            f"cannot use table {table.name}: partitioned_by_key is for upsert tables",
            path=("partitioned_by_key",),
        )


def _check_identifiers(table: TableConfig) -> None:
    if table.upsert_key and set(table.identifier_fields or table.key) != set(table.key):
        raise ConfigError(
            f"cannot use table {table.name}: its key and its identifier_fields are different "
            "columns",
            path=("identifier_fields",),
        )


def _beside(table: TableConfig) -> set[str]:
    return {getattr(table, key) for key in _COLUMNS}


def _check_key_columns(table: TableConfig) -> None:
    if taken := _beside(table) & set(table.key):
        raise ConfigError(
            f"cannot use table {table.name}: {min(taken)!r} is a metadata column, and cannot "
            "be a key",
            path=("key",),
        )


def _check_version_mode(table: TableConfig) -> None:
    if table.version_column and not table.upsert_key:
        raise ConfigError(
            f"cannot use table {table.name}: version_column is for upsert tables",
            hint="rows of other tables are not replaced: sort_by orders them in their files",
            path=("version_column",),
        )


def _check_version_column(table: TableConfig) -> None:
    doing = f"cannot use table {table.name}"
    if table.version_column in table.key:
        raise ConfigError(
            f"{doing}: version_column is {table.version_column!r}, which is its key: changes of "
            "one key would all be alike",
            path=("version_column",),
        )
    if table.version_column in _beside(table) - {table.timestamp_column, ""}:
        raise ConfigError(
            f"{doing}: version_column is {table.version_column!r}, a metadata column; "
            "these decide only between equal versions",
            path=("version_column",),
        )


def _check_delete_column(table: TableConfig) -> None:
    if table.delete_column and not table.upsert_key:
        raise ConfigError(
            f"cannot use table {table.name}: delete_column is for upsert tables",
            path=("delete_column",),
        )
    if table.delete_column in table.key:
        raise ConfigError(
            f"cannot use table {table.name}: delete_column is {table.delete_column!r}, which is "
            "in its key",
            path=("delete_column",),
        )
