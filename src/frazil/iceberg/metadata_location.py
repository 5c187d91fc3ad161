"""Finds a table's current metadata file through its catalog, without a JVM.

In: a catalog's settings as Spark gets them, without the prefix, and a table's name. Hadoop folders
and SQLite are read directly, PostgreSQL with psycopg if it is installed, REST, Glue, Hive and
DynamoDB with pyiceberg's clients. Any other catalog raises `NeedsSpark`. A server that accepts and
does not answer raises `Unavailable` within seconds: each request of a REST catalog has a time
limit, and so has every question as a whole.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from frazil.errors import ConfigError, Unavailable
from frazil.iceberg.file_io import FileStore, NeedsSpark, local, missing_file_error

#: Iceberg's catalog classes → catalog types.
_KINDS = {
    "HadoopCatalog": "hadoop",
    "JdbcCatalog": "jdbc",
    "RESTCatalog": "rest",
    "GlueCatalog": "glue",
    "HiveCatalog": "hive",
    "DynamoDbCatalog": "dynamodb",
}
_TABLES = "SELECT * FROM iceberg_tables WHERE table_namespace = {0} AND table_name = {0}"
_METADATA = re.compile(r"v?(\d+)(-.*)?(\.gz)?\.metadata\.json(\.gz)?")
#: Iceberg's own settings of a REST client → milliseconds, where they are not set: to connect, and
#: to wait for data.
REST_TIMEOUTS = {
    "rest.client.connection-timeout-ms": "10000",
    "rest.client.socket-timeout-ms": "10000",
}
#: Catalog types whose clients are extras of Frazil.
_EXTRAS = {"glue": "glue", "dynamodb": "glue", "hive": "hive", "rest": "glue"}
#: Seconds for a question to a catalog's server, which may be several requests.
_TOTAL = 20.0

T = TypeVar("T")


def metadata_file(catalog: Mapping[str, str], name: str) -> tuple[str, Mapping[str, str]]:
    """The path of a table's current metadata file, and the properties of its store; an empty path
    if there is no such table.

    `name` may be the path of a table's folder, or of a metadata file.
    """
    given = catalog.get("catalog-impl", "")
    kind = _KINDS.get(given.rpartition(".")[2], given) or catalog.get("type", "hive").lower()
    if ".metadata.json" in name:
        return name, catalog
    if "/" in name:
        return _newest(FileStore(catalog), name), catalog
    if kind == "hadoop":
        folder = "/".join([_setting(catalog, "warehouse").rstrip("/"), *name.split(".")])
        return _newest(FileStore(catalog), folder), catalog
    if kind == "jdbc":
        return _from_database(catalog, name), catalog
    if kind in ("rest", "glue", "hive", "dynamodb"):
        if kind in ("rest", "hive"):
            _setting(catalog, "uri")
        return _from_client(catalog, kind, name)
    raise NeedsSpark(f"cannot open a catalog of type {kind} without Spark")


def _setting(catalog: Mapping[str, str], key: str) -> str:
    if not catalog.get(key):
        raise ConfigError(f"cannot open the catalog: it lacks {key}", hint=f"set [catalog] {key}")
    return catalog[key]


def _newest(store: FileStore, folder: str) -> str:
    """The current metadata file of a table in a folder, by the rules of Iceberg's Hadoop catalog;
    empty if there is none."""
    folder = folder.rstrip("/") + "/metadata"
    names = store.names(folder)
    files: dict[int, list[str]] = {}
    for name in names:
        if match := _METADATA.fullmatch(name):
            files.setdefault(int(match[1]), []).append(name)
    if not files:
        return ""
    version = max(files)
    if "version-hint.text" in names:
        hint = store.read(f"{folder}/version-hint.text").strip()
        if hint.isdigit() and int(hint) in files:  # it may be stale: a commit writes it last
            version = int(hint)
            while version + 1 in files:
                version += 1
    if len(files[version]) > 1:
        # Two attempts at a commit: only the catalog knows which one was applied.
        raise ConfigError(
            f"cannot find the newest metadata in {folder}: {' and '.join(sorted(files[version]))}",
            hint="give the metadata file itself, or the table's name with its catalog",
        )
    return f"{folder}/{files[version][0]}"


def _from_database(catalog: Mapping[str, str], name: str) -> str:
    """A table's metadata location in the database of Iceberg's JDBC catalog; empty if there is
    none."""
    kind, _, place = _setting(catalog, "uri").removeprefix("jdbc:").partition(":")
    read = {"sqlite": _sqlite, "postgresql": _postgres}.get(kind)
    if read is None:
        raise NeedsSpark(f"cannot open a catalog in {kind} without Spark")
    # Several catalogs may share a database, and views are listed beside tables.
    listed = _within(_TOTAL, name, lambda: read(catalog, place, name.rpartition(".")[::2]))
    rows = [
        row
        for row in listed
        if row["catalog_name"] == catalog.get("name", row["catalog_name"])
        and row.get("iceberg_type") in (None, "TABLE")
    ]
    if len(rows) > 1:
        raise ConfigError(
            f"cannot choose table {name} among several: catalogs "
            f"{' and '.join(sorted(row['catalog_name'] for row in rows))} have one"
        )
    return str(rows[0]["metadata_location"]) if rows else ""


def _sqlite(
    catalog: Mapping[str, str], place: str, name: Sequence[str]
) -> Iterable[Mapping[str, Any]]:
    path = local(place.partition("?")[0])
    if not os.path.isfile(path):
        raise ConfigError(f"cannot open catalog {path}: it does not exist")
    try:
        with closing(
            sqlite3.connect(f"file:{quote(path)}?mode=ro", timeout=30, uri=True)
        ) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(_TABLES.format("?"), name)]
    except sqlite3.Error as error:
        if "no such table" in str(error):
            return []
        raise Unavailable(f"cannot read catalog {path}: {error}") from None


def _postgres(
    catalog: Mapping[str, str], place: str, name: Sequence[str]
) -> Iterable[Mapping[str, Any]]:
    try:
        import psycopg  # type: ignore[import-not-found]  # optional: saves starting Spark
    except ImportError:
        raise NeedsSpark(
            "cannot open a catalog in postgresql without Spark: psycopg is not installed",
            hint="pip install 'frazil[postgres]'",
        ) from None
    try:
        with psycopg.connect(
            f"postgresql:{place}",
            user=catalog.get("jdbc.user"),
            connect_timeout=10,
            password=catalog.get("jdbc.password"),
            row_factory=psycopg.rows.dict_row,
        ) as connection:
            return list(connection.execute(_TABLES.format("%s"), name))
    except psycopg.errors.UndefinedTable:
        return []
    except psycopg.ProgrammingError as error:  # Java's driver has options that this one lacks
        raise NeedsSpark(f"cannot open the catalog: {missing_file_error(error, catalog)}") from None
    except psycopg.Error as error:
        raise Unavailable(
            f"cannot read the catalog: {missing_file_error(error, catalog)}"
        ) from None


def rest_timeouts(catalog: Mapping[str, str]) -> tuple[float, float]:
    """Seconds to connect to a REST catalog, and to wait for data."""
    given = {key: catalog.get(key) or default for key, default in REST_TIMEOUTS.items()}
    for key, value in given.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
            raise ConfigError(
                f"cannot read [catalog] {key}: expected milliseconds, found {value!r}",
                path=("catalog", key),
            )
    connect, wait = given.values()
    return int(connect) / 1000, int(wait) / 1000


def _within(seconds: float, name: str, ask: Callable[[], T]) -> T:
    """The answer to a question about a table. It is asked on a thread of its own, because not every
    client has a time limit for all that it does; a thread without an answer is left behind."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # raised below, on the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="frazil-catalog", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise _no_answer(name, seconds)
    return answers[0]


def _from_client(catalog: Mapping[str, str], kind: str, name: str) -> tuple[str, Mapping[str, str]]:
    seconds = max(_TOTAL, 2 * sum(rest_timeouts(catalog))) if kind == "rest" else _TOTAL
    return _within(seconds, name, lambda: _ask_client(catalog, kind, name))


def _ask_client(catalog: Mapping[str, str], kind: str, name: str) -> tuple[str, Mapping[str, str]]:
    """With pyiceberg's client of the catalog."""
    from pyiceberg import exceptions
    from requests import RequestException, Timeout

    try:
        table = _client(catalog, kind).load_table(tuple(name.split(".")))
    except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError) as error:
        if str(error).startswith(
            "RESTError "
        ):  # pyiceberg's prefix for a body that is no catalog's
            raise Unavailable(
                f"cannot ask the catalog for {name}: the answer is not that of a catalog: "
                f"{missing_file_error(error, catalog)}",
                hint="check [catalog] uri, and a proxy before it",
            ) from None
        return "", catalog
    except (exceptions.NotInstalledError, ImportError) as error:
        raise NeedsSpark(
            f"cannot open the catalog without Spark: {missing_file_error(error, catalog)}",
            hint=f"pip install 'frazil[{_EXTRAS[kind]}]'" if kind in _EXTRAS else "",
        ) from None
    except Timeout:
        raise _no_answer(name, max(rest_timeouts(catalog))) from None
    except (exceptions.ServerError, exceptions.ServiceUnavailableError, RequestException) as error:
        raise Unavailable(
            f"cannot ask the catalog for {name}: {missing_file_error(error, catalog)}"
        ) from None
    except (exceptions.RESTError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"cannot ask the catalog for {name}: {missing_file_error(error, catalog)}"
        ) from None
    vended = {key: value for key, value in table.io.properties.items() if isinstance(value, str)}
    return table.metadata_location, {**catalog, **vended}


def _client(catalog: Mapping[str, str], kind: str) -> Any:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.rest import RestCatalog

    class TimedRestCatalog(RestCatalog):
        """pyiceberg's requests have no time limit. Its sessions get their headers before their
        first request, which may be for a token."""

        def _config_headers(self, session: Any) -> None:
            super()._config_headers(session)
            session.request = partial(session.request, timeout=rest_timeouts(catalog))

    settings: dict[str, Any] = {**catalog, "type": kind, "snapshot-loading-mode": "refs"}
    settings.pop("name", None)  # Spark's name: pyiceberg would look it up in its own config files
    if (auth := catalog.get("rest.auth.type", "oauth2").lower()) == "basic":
        user = {key: catalog.get(f"rest.auth.basic.{key}") for key in ("username", "password")}
        settings["auth"] = {"type": "basic", "basic": user}
    elif auth == "sigv4":
        settings["rest.sigv4-enabled"] = "true"
    elif auth not in ("none", "oauth2"):
        raise NeedsSpark(f"cannot open the catalog without Spark: rest.auth.type is {auth}")
    if kind == "rest":
        return TimedRestCatalog("plain", **settings)
    return load_catalog("plain", **settings)


def _no_answer(name: str, seconds: float) -> Unavailable:
    return Unavailable(
        f"cannot ask the catalog for {name}: expected an answer within {seconds:g} s, found none",
        hint="check that [catalog] uri is the catalog's, and that the server is well",
    )
