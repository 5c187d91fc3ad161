"""`frazil orphans`: files that killed or failed runs of a sink left behind; never a live file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql import SparkSession

from frazil.commit.protocol import TableCommitter
from frazil.config.model import Config
from frazil.errors import IdentityMismatch
from frazil.iceberg import maintenance_tasks
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.live_files import place, refuse_shared
from frazil.ledger.sink_state import known_tables, staged_batches
from frazil.sources.dead_letters import replaying

#: Age in seconds from which an unreferenced Iceberg file belongs to no commit in progress: in the
#: index, and in tables, where other writers may take longer (Iceberg's procedure waits as long).
_OLD, _OLDER = 24 * 3600.0, 3 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class OrphansReport:
    orphans: list[str]
    removed: bool

    def lines(self) -> list[str]:
        return self.orphans


def orphans(
    config: Config, spark: SparkSession, older_than: float = 0.0
) -> list[tuple[JavaTable, str]]:
    """Files left behind by earlier runs of the sink and by replays of its dead letters, each with
    its table. Files younger than `older_than` seconds are left out."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index_table = catalog.load(config.index_table)
    if index_table is None:
        return []
    entry = TableCommitter(index_table, "main", config.sink.id, 0, time).head().entry
    if entry is None:
        return []
    # The order protects files that a running sink commits meanwhile: staged batches first, then
    # the file listings, then the files that snapshots reference.
    stored = [batch for _, batch in staged_batches(config, index_table) if batch]
    names = {table.name for table in config.tables if "{" not in table.name}
    known = {*known_tables(index_table, config.sink.id), *(n for b in stored for n in b.names)}
    loaded = {name: catalog.load(name) for name in sorted(names | known)}
    tables = [index_table, *filter(None, loaded.values())]
    now = time.time()
    listed = []
    for table in tables:
        if _shared(table) and (gone := sorted(n for n in known if loaded[n] is None)):
            raise IdentityMismatch(
                f"cannot decide which files below {', '.join(_shared(table))} are live: "
                f"table {gone[0]} does not exist, and its files may be there",
                hint="it may have been renamed; nothing was removed",
            )
        before = int((now - older_than) * 1000) if older_than else None
        files = [path for root in _folders(table) for path in table.listing(root, before)]
        # Iceberg's file names do not name the table: list only the table's own metadata folder.
        age = max(older_than, _OLD if table is index_table else _OLDER)
        old = table.listing(f"{table.location}/metadata/", int((now - age) * 1000))
        listed.append((table, files, old))
    # Over all tables: some may share a folder.
    live = [path for table in tables for path in _referenced(config, spark, table)]
    leftovers = []
    for table, files, old in listed:
        ours = maintenance_tasks.orphan_files(
            files, sink=config.sink.id, epoch=entry.epoch, referenced=live, staged=stored
        )
        leftovers += [(table, path) for path in (*maintenance_tasks.abandoned(old, live), *ours)]
    if config.dead_letters:
        leftovers += orphans(replaying(config), spark, older_than)
    return list(dict.fromkeys(leftovers))


def remove(leftovers: list[tuple[JavaTable, str]]) -> None:
    """Delete the leftovers; none at all if files of one table may belong to another."""
    for table in dict.fromkeys(table for table, _ in leftovers):
        refuse_shared(table.name, table.properties)
    for table, path in leftovers:
        table.delete(path)


def _folders(table: JavaTable) -> list[str]:
    """The folders of a table's files, by its location and its properties."""
    own = [f"{table.location}/data/", f"{table.location}/metadata/"]
    configured = [f"{path.rstrip('/')}/" for path in _configured_folders(table)]
    return list(dict.fromkeys([*own, *configured]))


def _configured_folders(table: JavaTable) -> list[str]:
    """The folders that a table's properties name; two properties are of older Iceberg versions."""
    names = ("data", "metadata", "object-storage", "folder-storage")
    paths = [table.properties.get(f"write.{name}.path", "") for name in names]
    return [path for path in paths if path]


def _shared(table: JavaTable) -> list[str]:
    """Folders outside of the table's location, which other tables may use, too."""
    prefix, home = place(table.location)
    places = [(path, place(path)) for path in _configured_folders(table)]
    return [p for p, at in places if at[0] != prefix or not at[1].startswith(f"{home}/")]


def _referenced(config: Config, spark: SparkSession, table: JavaTable) -> Iterator[str]:
    """All files that a snapshot references: data and delete files, manifests, manifest lists."""
    name = f"{config.catalog.name}.{table.name}"
    columns = (
        ("all_files", "file_path"),
        ("all_manifests", "path"),
        ("snapshots", "manifest_list"),
    )
    for rows, column in columns:
        for row in spark.table(f"{name}.{rows}").select(column).collect():
            if row[0] is not None:
                yield row[0]
