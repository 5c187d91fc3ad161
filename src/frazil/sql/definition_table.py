"""Definitions in an Iceberg table: a row for each object, so that a team without a shared directory
shares them where its tables are.

In: a catalog, a table's name, and the texts to write. Out: its rows, and its newest snapshot as the
version of all. A write replaces all rows in one snapshot, only if the newest one is still the one
that was read (compare-and-set); earlier snapshots are the history. Reads need no JVM where the
catalog allows it; a write starts Spark. Runs on the driver.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from frazil.commit.table_schemas import writer_spec
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.errors import CommitStateUnknown, ConfigError, Conflict
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.table import Snapshot
from frazil.ledger.index import put
from frazil.spark.open_table import opener, with_new_catalog
from frazil.spark.session import session
from frazil.sql.definition_files import StoredTexts, version_of

_SCHEMA = json.dumps(
    {
        "type": "struct",
        "schema-id": 0,
        "fields": [
            {"id": 1, "name": "name", "required": True, "type": "string"},
            {"id": 2, "name": "text", "required": True, "type": "string"},
        ],
    }
)
_COLUMNS = ["name", "text"]
_UNPARTITIONED = json.dumps({"spec-id": 0, "fields": []})
#: Marks a snapshot as that of one write.
_COMMIT = "definitions.commit-id"


class DefinitionTable:
    def __init__(self, name: str, config: Config, say: Callable[[str], None]) -> None:
        """`config`: of the catalog. `say` is told when Spark has to start."""
        self._name = name
        self._config = config
        self._say = say
        self._open = opener(config, None, say)
        #: paths in definitions are those of the process
        self.base = Path()

    @property
    def arguments(self) -> str:
        return f"{self._name} --catalog …"

    def read(self) -> StoredTexts:
        table = with_new_catalog(self._config, self._open)(self._name)
        if table is None:
            return StoredTexts({}, version_of({}))
        if table.having(_COLUMNS) != _COLUMNS:
            raise ConfigError(
                f"cannot read definitions: table {self._name} has no columns name and text",
                hint="give a table of its own: the first CREATE makes it",
            )
        newest = next(table.history("main"), None)
        if newest is None:
            return StoredTexts({}, version_of({}))
        rows = table.rows(_COLUMNS)
        names, texts = (rows.column(column).cast(pa.string()).to_pylist() for column in _COLUMNS)
        return StoredTexts(dict(zip(names, texts, strict=True)), str(newest.id))

    def write(self, before: StoredTexts, texts: Mapping[str, str | None]) -> None:
        merged = {**before.texts, **texts}
        kept = {name: text for name, text in sorted(merged.items()) if text is not None}
        table = self._table()
        newest, files = table.live()
        if (str(newest.id) if newest else version_of({})) != before.version:
            raise self._conflict()
        commit = str(uuid.uuid4())
        rows = pa.table({"name": list(kept), "text": list(kept.values())})
        prefix = f"definitions-{commit}"
        added = put(writer_spec(table, TableConfig(self._name)), prefix, rows) if kept else []

        def check(history: Iterator[Snapshot]) -> str | None:
            last = next(history, None)
            same = (last.id if last else None) == (newest.id if newest else None)
            return None if same else "another process changed them"

        summary = {_COMMIT: commit}
        try:
            if newest is None:
                table.append(added, summary, branch="main", check=check, leftovers=[])
            else:
                table.rewrite(
                    files, added, summary, since=newest.id, same=False, check=check, leftovers=[]
                )
        except (Conflict, CommitStateUnknown) as error:
            table.refresh()
            history = list(table.history("main"))
            if any(snapshot.summary.get(_COMMIT) == commit for snapshot in history):
                return
            if (history[0].id if history else None) != (newest.id if newest else None):
                raise self._conflict() from error
            raise

    def _conflict(self) -> Conflict:
        return Conflict(
            f"cannot change definitions in table {self._name}: another process changed them "
            "at the same time"
        )

    def _table(self) -> JavaTable:
        table = self._catalog.load(self._name)
        if table is None:
            self._say(f"making table {self._name}")
            table = self._catalog.create(self._name, _SCHEMA, _UNPARTITIONED, properties={})
        return table

    @cached_property
    def _catalog(self) -> JavaCatalog:
        return JavaCatalog(session(self._config, say=self._say), self._config.catalog.name)

    def watched(self) -> bool | None:
        return None
