"""Read-only tables: from their metadata files alone, in milliseconds; with Spark where the catalog
or the store cannot be opened otherwise."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from frazil.config.model import Config
from frazil.config.settings import Settings
from frazil.iceberg.file_io import NeedsSpark, local
from frazil.iceberg.metadata_location import REST_TIMEOUTS
from frazil.iceberg.static_table import ReadOnlyTable, find

#: Name → the table as it is now; None where it does not exist.
Open = Callable[[str], ReadOnlyTable | None]


def opener(config: Config, spark: bool | None = None, say: Callable[[str], None] = print) -> Open:
    """`spark`: with it, or without it; None: only where it is needed."""
    # Several catalogs may share a database: the name distinguishes them.
    settings = {"name": config.catalog.name, **config.catalog.properties.resolved()}

    def plainly(name: str) -> ReadOnlyTable | None:
        return find(settings, name)

    with_spark: list[Open] = []

    def by_spark(name: str) -> ReadOnlyTable | None:
        if not with_spark:
            with_spark.append(_by_spark(config, say))
        return with_spark[0](name)

    def either(name: str) -> ReadOnlyTable | None:
        try:
            return by_spark(name) if with_spark else plainly(name)
        except NeedsSpark as error:
            say(f"{error.message}; starting Spark")
            return by_spark(name)

    return either if spark is None else by_spark if spark else plainly


def _by_spark(config: Config, say: Callable[[str], None]) -> Open:
    from frazil.iceberg.java import JavaCatalog
    from frazil.spark.session import session

    return JavaCatalog(session(_impatient(config), say=say), config.catalog.name).open_readonly


def _impatient(config: Config) -> Config:
    """Reads that wait for a REST catalog no longer than those without Spark."""
    properties = config.catalog.properties
    if properties.get("type") != "rest" and "REST" not in properties.get("catalog-impl", ""):
        return config
    catalog = dataclasses.replace(
        config.catalog, properties=Settings({**REST_TIMEOUTS, **properties})
    )
    return dataclasses.replace(config, catalog=catalog)


def not_made_yet(config: Config) -> str:
    """The file of a catalog on SQLite that the first start makes; empty if it is there."""
    uri = config.catalog.properties.get("uri", "")
    if config.catalog.properties.get("type") != "jdbc" or not uri.startswith("jdbc:sqlite:"):
        return ""
    path = local(uri.removeprefix("jdbc:sqlite:").partition("?")[0])
    return "" if os.path.exists(path) else path


def with_new_catalog(config: Config, opened: Open) -> Open:
    """Opens nothing where the catalog itself does not exist yet."""
    return (lambda _: None) if not_made_yet(config) else opened
