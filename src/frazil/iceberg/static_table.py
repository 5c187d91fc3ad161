"""An Iceberg table, read from its own files: read only, without Spark and without a JVM.

In: a catalog's settings and a table's name, or a path. Out: the history of a branch, tags, live
files with their bounds, and rows, for the audit and for queries of the index.

One metadata file is read, once, and all results are of that state. Local files are opened directly;
other stores and catalogs cost the import of pyiceberg. Catalogs and stores that only Iceberg for
Spark supports raise `NeedsSpark`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from frazil.errors import Fatal, IdentityMismatch
from frazil.iceberg.file_io import NeedsSpark as NeedsSpark
from frazil.iceberg.file_io import local
from frazil.iceberg.manifests import (
    ADDED,
    CLAIMS,
    DATA,
    DELETED,
    EQUALITY,
    READERS,
    ManifestReader,
    described,
    holding,
)
from frazil.iceberg.metadata_file import MetadataFile
from frazil.iceberg.metadata_location import metadata_file
from frazil.iceberg.row_reader import TYPES, SimpleColumn, fitting, rows_of_file
from frazil.iceberg.table import DataFile

#: Table property with the names of the topic, partition, offset and timestamp columns.
COLUMNS_PROPERTY = "frazil.metadata-columns"
T = TypeVar("T")


class ReadOnlyTable(MetadataFile):
    """The table of a metadata file, with its data files and rows."""

    def refresh(self) -> None:
        """Does nothing: the table is in the state of one metadata file."""

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def files(
        self, branch: str = "main", snapshot_id: int | None = None
    ) -> tuple[list[DataFile], int]:
        """The live data files, and the number of live delete files."""
        live = self._live(branch, snapshot_id)
        data = live.filter(pl.col("content") == DATA)
        return self._data_files(data), live.height - data.height

    def added(self, snapshot_id: int) -> list[DataFile]:
        """The data files that a snapshot added, whether they are live now or not."""
        entries = self._manifests.entries(snapshot_id, by_itself=True)
        return self._data_files(
            entries.filter(
                (pl.col("content") == DATA)
                & (pl.col("status") == ADDED)
                & (pl.col("snapshot_id").fill_null(snapshot_id) == snapshot_id)
            )
        )

    def misdescribed(self, branch: str) -> Iterator[tuple[str, str]]:
        """False claims of manifests about live files: path, and claim."""
        from frazil.iceberg.footers import DescribedFile, misdescribed

        head = self._head(branch)
        if head is None:
            return
        live = self._manifests.entries(head, columns=CLAIMS).filter(
            (pl.col("status") < DELETED) & (pl.col("file_format").str.to_lowercase() == "parquet")
        )
        names = {field["id"]: field["name"] for field in self._schema["fields"]}
        maps = ("value_counts", "null_value_counts", "lower_bounds", "upper_bounds")
        columns = ("file_path", "record_count", *maps)

        def one(row: tuple[Any, ...]) -> list[tuple[str, str]]:
            claims = [{pair["key"]: pair["value"] for pair in pairs or ()} for pairs in row[2:]]
            described = DescribedFile(row[0], row[1], *claims)
            with self.store.reading(described.path), self.store.open(described.path) as source:
                return [
                    (described.path, problem)
                    for problem in misdescribed(described, pq.ParquetFile(source), names)
                ]

        with ThreadPoolExecutor(READERS) as readers:
            for problems in readers.map(one, live.select(columns).iter_rows()):
                yield from problems

    def carries(self, branch: str, snapshot_id: int) -> bool:
        manifests = self._manifests.listed(snapshot_id)
        newest = max((manifest.get("sequence_number") or 0 for manifest in manifests), default=0)
        wanted = {
            manifest["manifest_path"]
            for manifest in manifests
            if (manifest.get("sequence_number") or 0) == newest
        }
        head = self._head(branch)
        listed = (
            {manifest["manifest_path"] for manifest in self._manifests.listed(head)}
            if head
            else set()
        )
        return not wanted or bool(wanted & listed)

    def has_equality_deletes(self, branch: str) -> bool:
        return bool((self._live(branch)["content"] == EQUALITY).any())

    def _data_files(self, entries: pl.DataFrame) -> list[DataFile]:
        ids = {field["name"]: field["id"] for field in self._schema["fields"]}
        return described(entries, [ids.get(name, -1) for name in self._origin])

    @property
    def _origin(self) -> list[str]:
        names = self.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset")
        return names.split(",")[:3]

    @cached_property
    def _manifests(self) -> ManifestReader:
        return ManifestReader(self.name, self.store, self._snapshots)

    def _live(self, branch: str, snapshot_id: int | None = None) -> pl.DataFrame:
        """The live entries of all manifests, data and deletes."""
        return self._manifests.live(self._head(branch) if snapshot_id is None else snapshot_id)

    # ── files beside it ──────────────────────────────────────────────────────────────────────────

    def listing(self, prefix: str) -> list[str]:
        """Paths of the files in a folder of the table's store."""
        return [f"{prefix.rstrip('/')}/{name}" for name in sorted(self.store.names(prefix))]

    def fetch(self, path: str) -> bytes:
        return self.store.read(path)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def rows(
        self, columns: Sequence[str], where: Mapping[str, Collection[str]] | None = None
    ) -> pa.Table:
        """The rows of main that have, in each column of `where`, one of its values.

        Texts come as dictionaries. A column that a file is too old to have is null for its rows.
        """
        tables = [self._schema_of(columns).empty_table(), *self.scan(columns, where)]
        return pa.concat_tables(tables)

    def rows_of(self, files: Iterable[DataFile], columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of these files, one table per file; deleted rows are included."""
        wanted = [self._column(name) for name in columns]
        for file in files:
            yield rows_of_file(self.store, file.path, wanted, {}).select(columns)

    def scan(
        self, columns: Sequence[str], where: Mapping[str, Collection[str]] | None = None
    ) -> Iterator[pa.Table]:
        """As `rows`, one table per file."""
        return self.map_files(lambda table: table, columns, where)

    def map_files(
        self,
        make: Callable[[pa.Table], T],
        columns: Sequence[str],
        where: Mapping[str, Collection[str]] | None = None,
    ) -> Iterator[T]:
        """The result of `make` for the rows of each file; the rows themselves are not kept."""
        return self._read("main", columns, where or {}, make)

    def having(self, columns: Sequence[str]) -> list[str]:
        """Those of the columns that exist: the table may be older than the caller."""
        names = {field["name"] for field in self._schema["fields"]}
        return [name for name in columns if name in names]

    def _schema_of(self, columns: Sequence[str]) -> pa.Schema:
        return pa.schema([(name, self._column(name).type) for name in columns])

    def origins(self, branch: str) -> pa.Table:
        """Topic, partition and offset of every live row, from the data itself."""
        empty = self._schema_of(self._origin).empty_table()
        rows = pa.concat_tables([empty, *self._read(branch, self._origin, {}, lambda table: table)])
        return rows.rename_columns(["topic", "partition", "offset"])

    def _read(
        self,
        branch: str,
        columns: Sequence[str],
        where: Mapping[str, Collection[str]],
        make: Callable[[pa.Table], T],
    ) -> Iterator[T]:
        wanted = [self._column(name) for name in dict.fromkeys((*columns, *where))]
        live = self._live(branch)
        for name, values in where.items():
            live = holding(live, self._column(name).id, values)
        if (live["content"] == EQUALITY).any():
            raise Fatal(
                f"cannot read table {self.name}: it has rows deleted by equality",
                hint="rewrite its data files with Spark first",
            )
        if other := set(live["file_format"].str.to_lowercase()) - {"parquet", "puffin"}:
            raise Fatal(f"cannot read table {self.name}: expected parquet, found {other.pop()}")
        if (live["content"] != DATA).any():
            yield make(fitting(self._scanned(branch, wanted), wanted, where).select(columns))
            return

        def one(path: str) -> T:
            return make(rows_of_file(self.store, path, wanted, where).select(columns))

        # Remote reads wait for the store. Local ones do not, and each reader needs memory.
        all_local = all(map(local, live["file_path"]))
        count = min(READERS, os.cpu_count() or 1) if all_local else READERS
        with ThreadPoolExecutor(count) as readers:
            yield from readers.map(one, live["file_path"])

    def _column(self, name: str) -> SimpleColumn:
        for field in self._schema["fields"]:
            if field["name"] == name and isinstance(field["type"], str) and field["type"] in TYPES:
                return SimpleColumn(field["id"], name, TYPES[field["type"]])
        raise IdentityMismatch(
            f"cannot read table {self.name}: it has no column {name} of a simple type"
        )

    def _scanned(self, branch: str, wanted: Sequence[SimpleColumn]) -> pa.Table:
        """Read by pyiceberg, which applies position deletes."""
        from pyiceberg.catalog.noop import NoopCatalog
        from pyiceberg.table import StaticTable
        from pyiceberg.table.metadata import TableMetadataUtil

        names = tuple(column.name for column in wanted)
        with self.store.reading(f"table {self.name}"):
            table = StaticTable(
                ("plain", self.name),
                TableMetadataUtil.parse_obj({**self.metadata}),
                self.metadata_file,
                self.store.io(self.metadata_file),
                NoopCatalog("plain"),
            )
            return table.scan(selected_fields=names, snapshot_id=self._head(branch)).to_arrow()


def find(catalog: Mapping[str, str], name: str) -> ReadOnlyTable | None:
    """The table of that name, or at that path; None if there is none.

    `catalog`: its settings as Spark gets them, without the prefix. They may hold credentials.
    """
    path, properties = metadata_file(catalog, name)
    return ReadOnlyTable(name, path, properties) if path else None
