"""Checks of `[[table]]` and `[dead_letters]`: names, modes, keys, columns, partitions.

In: all sections of a config. Out: nothing; the first table or setting that no sink can use raises
`ConfigError`, with its path. Asks no server.
"""

from __future__ import annotations

import re

from frazil.config.messages import nearest, within
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
from frazil.config.select_checks import check_selects
from frazil.config.units import ORDER, duration, size, transform_of
from frazil.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def check_tables(config: ConfigSections) -> None:
    names = [table.name for table in config.tables]
    if not names:
        raise ConfigError("cannot read [[table]]: expected a table, found none")
    if len(names) > 1 and not config.routes:
        raise ConfigError(
            f"cannot read [[table]]: {len(names)} tables, and no [[route]] assigns records to them",
            path=("table", "1"),
        )
    if config.routes and config.transform:
        raise ConfigError(
            "cannot use [[route]] with a [transform]: what comes out of a query goes to one table",
            hint="use a sink for each query",
            path=("route", "0"),
        )
    if config.dead_letters and config.transform:
        raise ConfigError(
            "cannot use [dead_letters] with a [transform]: a query's rows are Spark's own",
            path=("dead_letters",),
        )
    every = [*names, config.index_table]
    if config.dead_letters:
        every += [config.dead_letters.table, replayed(config.dead_letters.table)]
    every += map(deleted_keys_table, config.versioned_tables)
    if not config.routes and "{" in names[0]:
        raise ConfigError(
            f"cannot use table {names[0]}: no [[route]] supplies the words in its name",
            path=("table", "0", "name"),
        )
    lower = [name.lower() for name in every]
    if twice := [name for name in every if lower.count(name.lower()) > 1]:
        raise ConfigError(
            f"cannot use table {twice[0]}: two tables of the sink have that name",
            path=_named(config, twice),
        )
    for number, table in enumerate(config.tables):
        with within("table", str(number)):
            _check_table(table)
    check_selects(config)
    _check_dead_letters(config.dead_letters)
    if config.sink.max_tables < len(names):
        raise ConfigError(
            f"cannot read [sink] max_tables: {config.sink.max_tables} is less than "
            f"the {len(names)} tables of the config",
            path=("sink", "max_tables"),
        )


def _check_dead_letters(dead_letters: DeadLettersConfig) -> None:
    if dead_letters and not _NAME.fullmatch(dead_letters.table):
        raise ConfigError(
            f"cannot read [dead_letters] table: expected namespace.table, found "
            f"{dead_letters.table!r}",
            path=("dead_letters", "table"),
        )
    if not 0 <= dead_letters.max_fraction <= 1:
        raise ConfigError(
            "cannot read [dead_letters] max_fraction: expected a number from 0 to 1, "
            f"found {dead_letters.max_fraction}",
            path=("dead_letters", "max_fraction"),
        )
    if dead_letters.max_count < 0:
        raise ConfigError(
            f"cannot read [dead_letters] max_count: expected at least 0, found "
            f"{dead_letters.max_count}",
            path=("dead_letters", "max_count"),
        )


def _named(config: ConfigSections, names: list[str]) -> tuple[str, ...]:
    """The last setting that gives one of these names to a table."""
    wanted = {name.lower() for name in names}
    if config.dead_letters.table.lower() in wanted:
        return "dead_letters", "table"
    if config.sink.index_table.lower() in wanted:
        return "sink", "index_table"
    tables = [str(at) for at, table in enumerate(config.tables) if table.name.lower() in wanted]
    return ("table", tables[-1], "name") if tables else ()


def _check_table(table: TableConfig) -> None:
    _check_name(table)
    if table.schema_evolution not in EVOLUTION:
        raise ConfigError(
            f"cannot use table {table.name}: schema_evolution {table.schema_evolution!r} is "
            f"unknown{nearest(table.schema_evolution, EVOLUTION)}",
            path=("schema_evolution",),
        )
    if table.max_columns < 1:
        raise ConfigError(
            f"cannot use table {table.name}: expected max_columns from 1, found "
            f"{table.max_columns}",
            path=("max_columns",),
        )
    for key in ("key", "partition_by", "identifier_fields"):
        texts = [text.lower() for text in getattr(table, key)]
        if twice := [text for text in texts if texts.count(text) > 1]:
            raise ConfigError(
                f"cannot use table {table.name}: {key} names {twice[0]!r} twice", path=(key,)
            )
    _check_mode(table)
    kept = "" if table.snapshot_retention == NEVER else table.snapshot_retention
    for name, text in (("commit_interval", table.commit_interval), ("snapshot_retention", kept)):
        if text:
            duration(text, f"[[table]] {name} of {table.name}", (name,))
    if table.commit_bytes:
        size(table.commit_bytes, f"[[table]] commit_bytes of {table.name}", ("commit_bytes",))
    for text in table.partition_by:
        with within("partition_by"):
            transform_of(text, f"cannot partition table {table.name} by {text!r} in partition_by")
    for text in table.sort_by:
        match = ORDER.fullmatch(text)
        with within("sort_by"):
            transform_of(
                match["term"] if match else text,
                f"cannot sort table {table.name} by {text!r} in sort_by",
            )
    _check_columns(table)
    if table.compression not in CODECS:
        raise ConfigError(
            f"cannot use table {table.name}: compression {table.compression!r} is "
            f"unknown{nearest(table.compression, CODECS)}",
            path=("compression",),
        )
    if table.format_version not in (2, 3):
        raise ConfigError(
            f"cannot use table {table.name}: expected format_version 2 or 3, "
            f"found {table.format_version}",
            path=("format_version",),
        )
    largest = ("target_file_size",)
    if size(table.target_file_size, f"[[table]] {largest[0]} of {table.name}", largest) > 2**29:
        raise ConfigError(
            f"cannot use table {table.name}: target_file_size is over 512MiB", path=largest
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
    if "{" in table.name and table.location:
        raise ConfigError(
            f"cannot use table {table.name}: tables made of a template cannot share one location",
            path=("location",),
        )


def _check_columns(table: TableConfig) -> None:
    """Checks the names of the metadata columns."""
    names = {
        key: getattr(table, key)
        for key in ("topic_column", "partition_column", "offset_column", "timestamp_column")
    }
    for key, name in names.items():
        others = [other for other, value in names.items() if value == name and other != key]
        if not name and key != "timestamp_column":
            raise ConfigError(
                f"cannot use table {table.name}: {key} is empty; the topic, "
                "partition and offset columns carry the proof and cannot be left "
                "out",
                path=(key,),
            )
        if others:
            raise ConfigError(
                f"cannot use table {table.name}: two metadata columns are named "
                f"{name!r}: {key} and {others[0]}",
                path=(others[0],),
            )
        if name in RESERVED:
            raise ConfigError(
                f"cannot use table {table.name}: the column name {name!r} of {key} "
                "is reserved by Iceberg",
                path=(key,),
            )


def _check_mode(table: TableConfig) -> None:
    doing = f"cannot use table {table.name}"
    if table.mode not in MODES:
        raise ConfigError(
            f"{doing}: mode {table.mode!r} is unknown{nearest(table.mode, MODES)}", path=("mode",)
        )
    if (table.mode == "append") == bool(table.key):
        raise ConfigError(
            f"{doing}: it has a key, and its mode is append"
            if table.key
            else f"{doing}: its mode is {table.mode}, and key is missing, which identifies the "
            "rows to replace",
            hint='mode = "upsert"\nkey = ["id"]',
            path=("key" if table.key else "mode",),
        )
    if table.compact_after_commits < 0:
        raise ConfigError(
            f"{doing}: compact_after_commits is below 0", path=("compact_after_commits",)
        )
    if table.partitioned_by_key and not table.upsert_key:
        raise ConfigError(
            f"{doing}: partitioned_by_key is for upsert tables", path=("partitioned_by_key",)
        )
    if table.upsert_key and set(table.identifier_fields or table.key) != set(table.key):
        raise ConfigError(
            f"{doing}: its key and its identifier_fields are different columns",
            path=("identifier_fields",),
        )
    beside = {
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
    }
    if taken := beside & set(table.key):
        raise ConfigError(
            f"{doing}: {min(taken)!r} is a metadata column, and cannot be a key", path=("key",)
        )
    if table.version_column and not table.upsert_key:
        raise ConfigError(
            f"{doing}: version_column is for upsert tables",
            hint="rows of other tables are not replaced: sort_by orders them in their files",
            path=("version_column",),
        )
    if table.version_column in table.key:
        raise ConfigError(
            f"{doing}: version_column is {table.version_column!r}, which is its key: changes of "
            "one key would all be alike",
            path=("version_column",),
        )
    if table.version_column in beside - {table.timestamp_column, ""}:
        raise ConfigError(
            f"{doing}: version_column is {table.version_column!r}, a metadata column; "
            "these decide only between equal versions",
            path=("version_column",),
        )
