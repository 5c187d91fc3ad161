"""An Iceberg table, read from its own files: read only, without Spark and without a JVM.

In: a catalog's settings and a table's name, or a path. Out: the history of a branch, tags, live
files with their bounds, and rows, for the audit and for queries of the index.

One metadata file is read, once, and all results are of that state. Local files are opened directly;
other stores and catalogs cost the import of pyiceberg. Catalogs and stores that only Iceberg for
Spark supports raise `NeedsSpark`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frazil.errors import Expired, Fatal, IdentityMismatch
from frazil.format_version import KEY, check_table
from frazil.iceberg.file_io import AvroFile, FileStore, frame, local
from frazil.iceberg.file_io import NeedsSpark as NeedsSpark
from frazil.iceberg.metadata_location import metadata_file
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger.entry import joined
from frazil.offsets import Partition

#: Table property with the names of the topic, partition, offset and timestamp columns.
COLUMNS_PROPERTY = "frazil.metadata-columns"
T = TypeVar("T")
_READERS = 8  # threads: reads wait for the store, and polars and Arrow release the GIL
_PIECE = 64  # manifests per read
_VERSIONS = 3  # the highest supported format version
_DATA, _EQUALITY = 0, 2  # contents of a file
_ADDED, _DELETED = 1, 2  # status of an entry

_TEXT = pa.dictionary(pa.int32(), pa.string())
#: Iceberg types of the index's columns and of the topic, partition and offset columns.
_TYPES = {
    "string": _TEXT,
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}
_COUNTS, _BOUNDS = (
    pl.List(pl.Struct({"key": pl.Int32, "value": kind})) for kind in (pl.Int64, pl.Binary)
)
#: Columns read from a manifest entry.
_ENTRY = {
    "status": pl.Int32(),
    "snapshot_id": pl.Int64(),
    "sequence_number": pl.Int64(),
    "content": pl.Int32(),
    "file_path": pl.String(),
    "file_format": pl.String(),
    "record_count": pl.Int64(),
    "null_value_counts": _COUNTS,
    "lower_bounds": _BOUNDS,
    "upper_bounds": _BOUNDS,
}


#: Columns read to compare an entry with its file.
_CLAIMS = {**_ENTRY, "value_counts": _COUNTS}


class ReadOnlyTable:
    """An Iceberg table in the state of one metadata file.

    `properties` are those of the catalog or of its file IO, and may hold credentials.
    """

    def __init__(self, name: str, metadata_file: str, properties: Mapping[str, str]) -> None:
        self.name = name
        self.metadata_file = metadata_file
        self.store = FileStore(properties)
        raw = self.store.read(metadata_file)
        try:
            self.metadata = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            version = int(self.metadata["format-version"])
            self.location = str(self.metadata["location"]).rstrip("/")
            self.properties: dict[str, str] = dict(self.metadata.get("properties") or {})
            self._check()
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OSError,
            EOFError,
            zlib.error,
        ) as error:
            raise Fatal(
                f"cannot read {metadata_file}: expected the metadata of a table, found "
                f"{type(error).__name__}: {error}"
            ) from None
        if version > _VERSIONS:
            raise Fatal(
                f"cannot read table {name}: expected a format version up to {_VERSIONS}, "
                f"found {version}"
            )
        check_table(name, self.properties.get(KEY))
        self.uuid = str(self.metadata.get("table-uuid", ""))

    def _check(self) -> None:
        """Checks the types of all metadata that is used later, so that an error is raised on
        opening."""
        texts = [
            self.properties,
            *(snapshot.get("summary") or {} for snapshot in self._snapshots.values()),
        ]
        for mapping in texts:
            if not all(type(value) is str for value in mapping.values()):
                raise TypeError("a property or a summary has a value that is no text")
        for snapshot in self._snapshots.values():
            numbers = [
                snapshot["snapshot-id"],
                snapshot["timestamp-ms"],
                snapshot.get("sequence-number", 0),
                snapshot.get("parent-snapshot-id") or 0,
            ]
            if not all(type(value) is int and abs(value) < 2**63 for value in numbers):
                raise TypeError(f"snapshot {snapshot['snapshot-id']} has a number that is none")
            if not isinstance(snapshot.get("manifest-list", ""), str):
                raise TypeError(
                    f"snapshot {snapshot['snapshot-id']} has a manifest list without a name"
                )
        for ref in self._refs.values():
            if type(ref["snapshot-id"]) is not int or not isinstance(ref["type"], str):
                raise TypeError("a branch or a tag does not name a snapshot")
        for field in self._schema["fields"]:
            if type(field["id"]) is not int or not isinstance(field["name"], str):
                raise TypeError("a column has no id or no name")
            if not isinstance(field["type"], (str, dict)):
                raise TypeError(f"column {field['name']} has no type")
        if not all(
            isinstance(entry["metadata-file"], str)
            for entry in self.metadata.get("metadata-log") or ()
        ):
            raise TypeError("the metadata log names no file")

    @property
    def schema(self) -> str:
        """The current schema, as JSON."""
        return json.dumps(self._schema)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        current = self.metadata.get("current-schema-id")
        for schema in self.metadata.get("schemas") or ():
            if schema.get("schema-id") == current:
                return dict(schema)
        return dict(self.metadata["schema"])  # format version 1 may have only this one

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _snapshots(self) -> dict[int, dict[str, Any]]:
        return {
            snapshot["snapshot-id"]: snapshot for snapshot in self.metadata.get("snapshots") or ()
        }

    @cached_property
    def _refs(self) -> dict[str, dict[str, Any]]:
        current = self.metadata.get("current-snapshot-id")
        main = {} if current in (None, -1) else {"main": {"snapshot-id": current, "type": "branch"}}
        return {**(self.metadata.get("refs") or {}), **main}

    def _head(self, ref: str) -> int | None:
        return self._refs[ref]["snapshot-id"] if ref in self._refs else None

    def history(self, branch: str) -> Iterator[Snapshot]:
        snapshot_id = self._head(branch)
        for _ in range(len(self._snapshots)):  # bounded: damaged metadata may have a cycle
            if snapshot_id is None or snapshot_id not in self._snapshots:
                return
            snapshot = self._snapshot(self._snapshots[snapshot_id])
            yield snapshot
            snapshot_id = snapshot.parent

    def tagged(self, tag: str) -> Snapshot | None:
        snapshot_id = self._head(tag)
        return (
            self._snapshot(self._snapshots[snapshot_id]) if snapshot_id in self._snapshots else None
        )

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        log = [entry["metadata-file"] for entry in self.metadata.get("metadata-log") or ()]
        wanted: int | None = snapshot_id
        while wanted is not None and log:
            try:
                earlier = ReadOnlyTable(self.name, log.pop(), self.store.properties)
            except IdentityMismatch:  # removed, and so are all older ones
                return
            while wanted is not None and wanted in earlier._snapshots:
                snapshot = earlier._snapshot(earlier._snapshots[wanted])
                yield snapshot
                wanted = snapshot.parent

    def carries(self, branch: str, snapshot_id: int) -> bool:
        manifests = self._manifests(snapshot_id)
        newest = max((manifest.get("sequence_number") or 0 for manifest in manifests), default=0)
        wanted = {
            manifest["manifest_path"]
            for manifest in manifests
            if (manifest.get("sequence_number") or 0) == newest
        }
        head = self._head(branch)
        listed = (
            {manifest["manifest_path"] for manifest in self._manifests(head)} if head else set()
        )
        return not wanted or bool(wanted & listed)

    def refresh(self) -> None:
        """Does nothing: the table is in the state of one metadata file."""

    def _snapshot(self, values: Mapping[str, Any]) -> Snapshot:
        snapshot = Snapshot.of_json(values)
        return replace(snapshot, summary=joined(snapshot.summary, self.properties))

    def tags(self) -> dict[str, Snapshot]:
        names = [name for name, ref in self._refs.items() if ref["type"] == "tag"]
        return {name: snapshot for name in names if (snapshot := self.tagged(name)) is not None}

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def files(
        self, branch: str = "main", snapshot_id: int | None = None
    ) -> tuple[list[DataFile], int]:
        """The live data files, and the number of live delete files."""
        live = self._live(branch, snapshot_id)
        data = live.filter(pl.col("content") == _DATA)
        return self._described(data), live.height - data.height

    def added(self, snapshot_id: int) -> list[DataFile]:
        """The data files that a snapshot added, whether they are live now or not."""
        entries = self._of_snapshot(snapshot_id, by_itself=True)
        return self._described(
            entries.filter(
                (pl.col("content") == _DATA)
                & (pl.col("status") == _ADDED)
                & (pl.col("snapshot_id").fill_null(snapshot_id) == snapshot_id)
            )
        )

    def misdescribed(self, branch: str) -> Iterator[tuple[str, str]]:
        """False claims of manifests about live files: path, and claim."""
        from frazil.iceberg.footers import DescribedFile, misdescribed

        head = self._head(branch)
        if head is None:
            return
        live = self._of_snapshot(head, columns=_CLAIMS).filter(
            (pl.col("status") < _DELETED) & (pl.col("file_format").str.to_lowercase() == "parquet")
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

        with ThreadPoolExecutor(_READERS) as readers:
            for problems in readers.map(one, live.select(columns).iter_rows()):
                yield from problems

    def has_equality_deletes(self, branch: str) -> bool:
        return bool((self._live(branch)["content"] == _EQUALITY).any())

    def _described(self, data: pl.DataFrame) -> list[DataFile]:
        ids = {field["name"]: field["id"] for field in self._schema["fields"]}
        topic, partition, offset = (ids.get(name, -1) for name in self._origin)
        low, high, nulls = (
            _BoundValues(data[name])
            for name in ("lower_bounds", "upper_bounds", "null_value_counts")
        )
        files = []
        topics: dict[
            tuple[bytes, bytes], tuple[str, str]
        ] = {}  # one string for all files of a topic
        columns = (
            data["file_path"],
            data["record_count"],
            data["sequence_number"],
            low[topic],
            high[topic],
            _number(low[partition]),
            _number(high[partition]),
            _number(low[offset]),
            _number(high[offset]),
            nulls[offset].fill_null(0),
        )
        for path, rows, sequence, t0, t1, p0, p1, o0, o1, lacking in zip(
            *(column.to_list() for column in columns), strict=True
        ):
            named = owner = None
            if t0 is not None and t1 is not None:
                named = topics.get((t0, t1))
                if named is None:
                    named = t0.decode(errors="replace"), t1.decode(errors="replace")
                    topics[t0, t1] = named
                # Truncated bounds are never equal: the upper one is raised above all values.
                if t0 == t1 and p0 is not None and p0 == p1:
                    owner = Partition(named[0], p0)
            span = None if o0 is None or o1 is None else (o0, o1)
            files.append(DataFile(path, rows, owner, span, lacking, sequence, named))
        return files

    @property
    def _origin(self) -> list[str]:
        names = self.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset")
        return names.split(",")[:3]

    def _live(self, branch: str, snapshot_id: int | None = None) -> pl.DataFrame:
        """The live entries of all manifests, data and deletes."""
        wanted = self._head(branch) if snapshot_id is None else snapshot_id
        if wanted is None:
            return pl.DataFrame(schema=_ENTRY)
        return self._of_snapshot(wanted).filter(pl.col("status") < _DELETED)

    def _of_snapshot(
        self,
        wanted: int,
        by_itself: bool = False,
        columns: Mapping[str, pl.DataType] = _ENTRY,
    ) -> pl.DataFrame:
        """The entries of a snapshot's manifests, or only of those that it added `by_itself`."""
        none = pl.DataFrame(schema=columns)
        manifests = self._manifests(wanted)
        if by_itself:
            manifests = [m for m in manifests if m.get("added_snapshot_id", wanted) == wanted]
        size = min(_PIECE, -(-len(manifests) // _READERS)) or 1
        pieces = [manifests[at : at + size] for at in range(0, len(manifests), size)]
        with ThreadPoolExecutor(_READERS) as readers:
            read = partial(self._entries, columns=columns)
            frames = [entries for group in readers.map(read, pieces) for entries in group]
        return pl.concat([none, *frames], rechunk=True)

    def _manifests(self, wanted: int) -> list[dict[str, Any]]:
        """The manifests that a snapshot lists."""
        if wanted not in self._snapshots:
            raise Expired(f"cannot read snapshot {wanted} of table {self.name}: it is not there")
        snapshot = self._snapshots[wanted]
        if "manifest-list" in snapshot:
            return frame([AvroFile(self.store, snapshot["manifest-list"])]).to_dicts()
        # format version 1 may list them in the metadata file
        return [{"manifest_path": path} for path in snapshot.get("manifests", ())]

    def _entries(
        self, manifests: Sequence[Mapping[str, Any]], columns: Mapping[str, pl.DataType]
    ) -> list[pl.DataFrame]:
        alike: dict[bytes, list[tuple[AvroFile, int]]] = {}
        for manifest in manifests:
            file = AvroFile(self.store, manifest["manifest_path"])
            counts = [
                manifest.get(f"{kind}_files_count") for kind in ("added", "existing", "deleted")
            ]
            known = [count for count in counts if count is not None]  # version 1 may omit them
            if len(known) == len(counts) and sum(known) != file.rows:
                raise Fatal(
                    f"cannot read {file.path}: expected {sum(known)} entries, found {file.rows}"
                )
            if file.rows:
                sequence = manifest.get("sequence_number") or 0
                alike.setdefault(file.schema, []).append((file, sequence))
        frames = []
        for group in alike.values():
            entries = frame([file for file, _ in group], columns)
            # An added entry has no number of its own: it inherits that of its manifest.
            numbers = np.repeat(
                [sequence for _, sequence in group], [file.rows for file, _ in group]
            )
            entries = entries.with_columns(
                pl.col("sequence_number").fill_null(pl.Series(numbers, dtype=pl.Int64)),
                pl.col("content").fill_null(_DATA),
            )
            frames.append(entries)
        return frames

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
            yield self._file(wanted, {}, file.path).select(columns)

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
            live = _holding(live, self._column(name).id, values)
        if (live["content"] == _EQUALITY).any():
            raise Fatal(
                f"cannot read table {self.name}: it has rows deleted by equality",
                hint="rewrite its data files with Spark first",
            )
        if other := set(live["file_format"].str.to_lowercase()) - {"parquet", "puffin"}:
            raise Fatal(f"cannot read table {self.name}: expected parquet, found {other.pop()}")
        if (live["content"] != _DATA).any():
            yield make(_fitting(self._scanned(branch, wanted), wanted, where).select(columns))
            return

        def one(path: str) -> T:
            return make(self._file(wanted, where, path).select(columns))

        # Remote reads wait for the store. Local ones do not, and each reader needs memory.
        all_local = all(map(local, live["file_path"]))
        count = min(_READERS, os.cpu_count() or 1) if all_local else _READERS
        with ThreadPoolExecutor(count) as readers:
            yield from readers.map(one, live["file_path"])

    def _column(self, name: str) -> _Column:
        for field in self._schema["fields"]:
            if field["name"] == name and isinstance(field["type"], str) and field["type"] in _TYPES:
                return _Column(field["id"], name, _TYPES[field["type"]])
        raise IdentityMismatch(
            f"cannot read table {self.name}: it has no column {name} of a simple type"
        )

    def _file(
        self, wanted: Sequence[_Column], where: Mapping[str, Collection[str]], path: str
    ) -> pa.Table:
        with self.store.reading(path), self.store.open(path) as source:
            file = pq.ParquetFile(source)
            # Iceberg identifies columns by id: names may have changed since the file was written.
            ids = {
                (field.metadata or {}).get(b"PARQUET:field_id"): field.name
                for field in file.schema_arrow
            }
            if set(ids) == {None}:  # an imported file without field ids
                ids = {
                    b"%d" % column.id: column.name
                    for column in wanted
                    if column.name in file.schema_arrow.names
                }
            columns = {ids[key]: column for column in wanted if (key := b"%d" % column.id) in ids}
            texts = [name for name, column in columns.items() if column.type is _TEXT]
            file = pq.ParquetFile(source, metadata=file.metadata, read_dictionary=texts)
            groups = set(range(file.metadata.num_row_groups))
            for name in texts:
                if (values := where.get(columns[name].name)) is not None:
                    groups &= _groups(file.metadata, name, values)
            table = file.read_row_groups(sorted(groups), list(columns), use_threads=False)
            table = table.rename_columns([columns[name].name for name in table.column_names])
            return _fitting(table, wanted, where)

    def _scanned(self, branch: str, wanted: Sequence[_Column]) -> pa.Table:
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


class _Column(NamedTuple):
    id: int
    name: str
    type: pa.DataType


class _BoundValues:
    """A column of maps, to look up one key in all of them."""

    def __init__(self, maps: pl.Series) -> None:
        lengths = maps.list.len().fill_null(0)
        pairs = maps.filter(lengths > 0).explode()  # polars versions differ on empty ones
        self._rows = np.repeat(np.arange(len(maps)), lengths.to_numpy())
        self._keys = pairs.struct.field("key").to_numpy()
        self._values = pairs.struct.field("value")
        self._count = len(maps)

    def __getitem__(self, key: int) -> pl.Series:
        """One value per map; null if the map does not have the key."""
        at = np.flatnonzero(self._keys == key)
        places = np.full(self._count, -1)
        places[self._rows[at]] = at
        values: pl.Series = self._values.gather(pl.Series(places).replace(-1, None))
        return values


def _number(bounds: pl.Series) -> pl.Series:
    """Integer bounds: four bytes are an int, eight a long; a column may have been widened."""
    four, eight = (bounds.bin.reinterpret(dtype=kind) for kind in (pl.Int32(), pl.Int64()))
    numbers: pl.Series = eight.zip_with(eight.is_not_null(), four.cast(pl.Int64))
    return numbers


def _holding(live: pl.DataFrame, key: int, values: Collection[str]) -> pl.DataFrame:
    """Without the data files whose bounds exclude all of the values."""
    ordered = sorted(value.encode() for value in values)
    low, high = (
        _BoundValues(live[name])[key].to_list() for name in ("lower_bounds", "upper_bounds")
    )
    kept = [
        content != _DATA or _any_within(ordered, *bounds)
        for content, *bounds in zip(live["content"], low, high, strict=True)
    ]
    return live.filter(pl.Series(kept, dtype=pl.Boolean))


def _groups(metadata: pq.FileMetaData, name: str, values: Collection[str]) -> set[int]:
    """The row groups of a file that may contain one of the values."""
    ordered = sorted(values)
    at = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(name)
    statistics = [
        metadata.row_group(i).column(at).statistics for i in range(metadata.num_row_groups)
    ]
    bounds = [
        (stats.min, stats.max) if stats and stats.has_min_max else (None, None)
        for stats in statistics
    ]
    return {i for i, span in enumerate(bounds) if _any_within(ordered, *span)}


def _any_within(ordered: Sequence[Any], low: Any, high: Any) -> bool:
    if low is None or high is None:  # no bounds: it may
        return True
    at = bisect_left(ordered, low)
    return at < len(ordered) and bool(ordered[at] <= high)


def _all(texts: pa.DictionaryArray, values: Collection[str]) -> bool:
    """Is every text one of the values?"""
    return not texts.null_count and set(texts.dictionary.to_pylist()) <= set(values)


def _fitting(
    table: pa.Table, wanted: Sequence[_Column], where: Mapping[str, Collection[str]]
) -> pa.Table:
    """The wanted columns with their types, of the rows that match `where`."""
    columns = {
        column.name: table[column.name].cast(column.type)
        if column.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, column.type)])
        for column in wanted
    }
    rows = pa.table(columns)
    for name, values in where.items():
        if all(_all(chunk, values) for chunk in rows[name].chunks):
            continue  # nothing to leave out: a filter would copy every column
        chosen = pa.array(list(values), pa.string())
        masks = [
            pc.is_in(chunk.dictionary, chosen).take(chunk.indices) for chunk in rows[name].chunks
        ]
        rows = rows.filter(pa.chunked_array(masks, pa.bool_()))
    return rows


def find(catalog: Mapping[str, str], name: str) -> ReadOnlyTable | None:
    """The table of that name, or at that path; None if there is none.

    `catalog`: its settings as Spark gets them, without the prefix. They may hold credentials.
    """
    path, properties = metadata_file(catalog, name)
    return ReadOnlyTable(name, path, properties) if path else None
