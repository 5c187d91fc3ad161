"""An Iceberg table as its own files say it is: read only, without Spark and without a JVM.

In: a catalog's settings and a table's name, or a path. Out: what the audit and those who ask the
index need: the history of a branch, tags, live files with their bounds, rows.

One metadata file is read, once, and all that is told is of that moment. Local files are opened
directly; other stores and catalogs cost the import of pyiceberg. What cannot be opened so raises
`NeedsSpark`: Iceberg for Spark knows more catalogs and stores than Python does.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frazil.errors import Expired, Fatal, IdentityMismatch
from frazil.iceberg.file_io import AvroFile, FileStore, frame, local
from frazil.iceberg.file_io import NeedsSpark as NeedsSpark
from frazil.iceberg.metadata_location import metadata_file
from frazil.ledger.entry import Snapshot, joined
from frazil.offsets import Partition

#: Table property with the names of the topic, partition, offset and timestamp columns.
COLUMNS_PROPERTY = "frazil.columns"
T = TypeVar("T")
_READERS = 8  # threads: a store is waited for, and polars and Arrow work beside Python
_PIECE = 64  # manifests that are read as one
_VERSIONS = 3  # of Iceberg's format
_DATA, _EQUALITY = 0, 2  # contents of a file
_ADDED, _DELETED = 1, 2  # status of an entry

_TEXT = pa.dictionary(pa.int32(), pa.string())
#: Iceberg's types that the columns of the index and of origins have.
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
#: What is read of a manifest's entry.
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


#: What is read of it in order to compare it with the file.
_CLAIMS = {**_ENTRY, "value_counts": _COUNTS}


@dataclass(frozen=True, slots=True)
class DataFile:
    """A live data file as its manifest describes it."""

    path: str
    rows: int
    #: whose records it holds by its bounds; None where they span several or are unknown
    partition: Partition | None
    #: lowest and highest offset in it
    offsets: tuple[int, int] | None
    #: rows without an offset
    nulls: int = 0
    #: data sequence number: with which commit its rows came
    sequence: int = 0
    #: lowest and highest topic in it, as far as the bounds were not cut
    topics: tuple[str, str] | None = None


class ReadOnlyTable:
    """An Iceberg table as its metadata file says it is.

    `properties` are those of the catalog or of its file IO, and may hold credentials.
    """

    def __init__(self, name: str, metadata_file: str, properties: Mapping[str, str]) -> None:
        self.name = name
        self.metadata_file = metadata_file
        self._store = FileStore(properties)
        raw = self._store.read(metadata_file)
        try:
            self._metadata = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            version = int(self._metadata["format-version"])
            self.location = str(self._metadata["location"]).rstrip("/")
            self.properties: dict[str, str] = dict(self._metadata.get("properties") or {})
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
        self.uuid = str(self._metadata.get("table-uuid", ""))

    def _check(self) -> None:
        """What is asked of it later is there, and of the right kind: said now, in one sentence."""
        texts = [self.properties, *(each.get("summary") or {} for each in self._snapshots.values())]
        for each in texts:
            if not all(type(value) is str for value in each.values()):
                raise TypeError("a property or a summary has a value that is no text")
        for each in self._snapshots.values():
            numbers = [
                each["snapshot-id"],
                each["timestamp-ms"],
                each.get("sequence-number", 0),
                each.get("parent-snapshot-id") or 0,
            ]
            if not all(type(value) is int and abs(value) < 2**63 for value in numbers):
                raise TypeError(f"snapshot {each['snapshot-id']} has a number that is none")
            if not isinstance(each.get("manifest-list", ""), str):
                raise TypeError(
                    f"snapshot {each['snapshot-id']} has a manifest list without a name"
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
            isinstance(each["metadata-file"], str)
            for each in self._metadata.get("metadata-log") or ()
        ):
            raise TypeError("the metadata log names no file")

    @property
    def schema(self) -> str:
        """As JSON, the current one."""
        return json.dumps(self._schema)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        current = self._metadata.get("current-schema-id")
        for each in self._metadata.get("schemas") or ():
            if each.get("schema-id") == current:
                return dict(each)
        return dict(self._metadata["schema"])  # version 1 may have no other

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _snapshots(self) -> dict[int, dict[str, Any]]:
        return {each["snapshot-id"]: each for each in self._metadata.get("snapshots") or ()}

    @cached_property
    def _refs(self) -> dict[str, dict[str, Any]]:
        current = self._metadata.get("current-snapshot-id")
        main = {} if current in (None, -1) else {"main": {"snapshot-id": current, "type": "branch"}}
        return {**(self._metadata.get("refs") or {}), **main}

    def _head(self, ref: str) -> int | None:
        return self._refs[ref]["snapshot-id"] if ref in self._refs else None

    def history(self, branch: str) -> Iterator[Snapshot]:
        """The branch's ancestry, newest first, as far as it is still there."""
        here = self._head(branch)
        for _ in range(len(self._snapshots)):  # no more than there are: a circle ends too
            if here is None or here not in self._snapshots:
                return
            found = self._snapshot(self._snapshots[here])
            yield found
            here = found.parent

    def tagged(self, tag: str) -> Snapshot | None:
        here = self._head(tag)
        return self._snapshot(self._snapshots[here]) if here in self._snapshots else None

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        """An expired snapshot and its ancestors, as far as earlier metadata files tell of them."""
        log = [each["metadata-file"] for each in self._metadata.get("metadata-log") or ()]
        wanted: int | None = snapshot_id
        while wanted is not None and log:
            try:
                earlier = ReadOnlyTable(self.name, log.pop(), self._store.properties)
            except IdentityMismatch:  # it was removed, and those before it, too
                return
            while wanted is not None and wanted in earlier._snapshots:
                found = earlier._snapshot(earlier._snapshots[wanted])
                yield found
                wanted = found.parent

    def carries(self, branch: str, snapshot_id: int) -> bool:
        """Does the branch list the newest manifest of a snapshot? See `java.JavaTable.carries`."""
        theirs = self._manifests(snapshot_id)
        newest = max((each.get("sequence_number") or 0 for each in theirs), default=0)
        wanted = {m["manifest_path"] for m in theirs if (m.get("sequence_number") or 0) == newest}
        head = self._head(branch)
        listed = {each["manifest_path"] for each in self._manifests(head)} if head else set()
        return not wanted or bool(wanted & listed)

    def refresh(self) -> None:
        """Nothing: it is what one metadata file says."""

    def _snapshot(self, values: Mapping[str, Any]) -> Snapshot:
        found = _snapshot(values)
        return replace(found, summary=joined(found.summary, self.properties))

    def tags(self) -> dict[str, Snapshot]:
        names = [name for name, each in self._refs.items() if each["type"] == "tag"]
        return {name: found for name in names if (found := self.tagged(name)) is not None}

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def files(
        self, branch: str = "main", snapshot_id: int | None = None
    ) -> tuple[list[DataFile], int]:
        """The live data files, and how many delete files are live."""
        live = self._live(branch, snapshot_id)
        data = live.filter(pl.col("content") == _DATA)
        return self._described(data), live.height - data.height

    def added(self, snapshot_id: int) -> list[DataFile]:
        """The data files that a snapshot brought, whether they are live now or not."""
        entries = self._of_snapshot(snapshot_id, by_itself=True)
        return self._described(
            entries.filter(
                (pl.col("content") == _DATA)
                & (pl.col("status") == _ADDED)
                & (pl.col("snapshot_id").fill_null(snapshot_id) == snapshot_id)
            )
        )

    def misdescribed(self, branch: str) -> Iterator[tuple[str, str]]:
        """Live files of which their manifest says what is not so: path, and what."""
        from frazil.iceberg.footers import DescribedFile, misdescribed

        head = self._head(branch)
        if head is None:
            return
        live = self._of_snapshot(head, columns=_CLAIMS).filter(
            (pl.col("status") < _DELETED) & (pl.col("file_format").str.to_lowercase() == "parquet")
        )
        names = {each["id"]: each["name"] for each in self._schema["fields"]}
        maps = ("value_counts", "null_value_counts", "lower_bounds", "upper_bounds")
        columns = ("file_path", "record_count", *maps)

        def one(row: tuple[Any, ...]) -> list[tuple[str, str]]:
            told = [{each["key"]: each["value"] for each in pairs or ()} for pairs in row[2:]]
            said = DescribedFile(row[0], row[1], *told)
            with self._store.reading(said.path), self._store.open(said.path) as source:
                return [
                    (said.path, each) for each in misdescribed(said, pq.ParquetFile(source), names)
                ]

        with ThreadPoolExecutor(_READERS) as readers:
            for found in readers.map(one, live.select(columns).iter_rows()):
                yield from found

    def has_equality_deletes(self, branch: str) -> bool:
        return bool((self._live(branch)["content"] == _EQUALITY).any())

    def _described(self, data: pl.DataFrame) -> list[DataFile]:
        ids = {each["name"]: each["id"] for each in self._schema["fields"]}
        topic, partition, offset = (ids.get(name, -1) for name in self._origin)
        low, high, nulls = (
            _BoundValues(data[name])
            for name in ("lower_bounds", "upper_bounds", "null_value_counts")
        )
        found = []
        topics: dict[tuple[bytes, bytes], tuple[str, str]] = {}  # one text for all files of a topic
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
            *(each.to_list() for each in columns), strict=True
        ):
            named = whose = None
            if t0 is not None and t1 is not None:
                named = topics.get((t0, t1))
                if named is None:
                    named = t0.decode(errors="replace"), t1.decode(errors="replace")
                    topics[t0, t1] = named
                # Bounds that were cut never meet: the upper one is then raised above all values.
                if t0 == t1 and p0 is not None and p0 == p1:
                    whose = Partition(named[0], p0)
            span = None if o0 is None or o1 is None else (o0, o1)
            found.append(DataFile(path, rows, whose, span, lacking, sequence, named))
        return found

    @property
    def _origin(self) -> list[str]:
        said = self.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset")
        return said.split(",")[:3]

    def _live(self, branch: str, snapshot_id: int | None = None) -> pl.DataFrame:
        """The live entries of all manifests, of data and of deletes."""
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
        """The entries of a snapshot's manifests, or only of those that it made `by_itself`."""
        none = pl.DataFrame(schema=columns)
        manifests = self._manifests(wanted)
        if by_itself:
            manifests = [m for m in manifests if m.get("added_snapshot_id", wanted) == wanted]
        size = min(_PIECE, -(-len(manifests) // _READERS)) or 1
        pieces = [manifests[at : at + size] for at in range(0, len(manifests), size)]
        with ThreadPoolExecutor(_READERS) as readers:
            read = partial(self._entries, columns=columns)
            frames = [each for found in readers.map(read, pieces) for each in found]
        return pl.concat([none, *frames], rechunk=True)

    def _manifests(self, wanted: int) -> list[dict[str, Any]]:
        """What a snapshot lists."""
        if wanted not in self._snapshots:
            raise Expired(f"cannot read snapshot {wanted} of table {self.name}: it is not there")
        snapshot = self._snapshots[wanted]
        if "manifest-list" in snapshot:
            return frame([AvroFile(self._store, snapshot["manifest-list"])]).to_dicts()
        # version 1 may name them itself
        return [{"manifest_path": path} for path in snapshot.get("manifests", ())]

    def _entries(
        self, manifests: Sequence[Mapping[str, Any]], columns: Mapping[str, pl.DataType]
    ) -> list[pl.DataFrame]:
        alike: dict[bytes, list[tuple[AvroFile, int]]] = {}
        for each in manifests:
            found = AvroFile(self._store, each["manifest_path"])
            counts = [each.get(f"{kind}_files_count") for kind in ("added", "existing", "deleted")]
            said = [count for count in counts if count is not None]  # version 1 may say nothing
            if len(said) == len(counts) and sum(said) != found.rows:
                raise Fatal(
                    f"cannot read {found.path}: expected {sum(said)} entries, found {found.rows}"
                )
            if found.rows:
                sequence = each.get("sequence_number") or 0
                alike.setdefault(found.schema, []).append((found, sequence))
        frames = []
        for group in alike.values():
            entries = frame([found for found, _ in group], columns)
            # An entry just added has no number yet: it has that of its manifest, once committed.
            numbers = np.repeat([each for _, each in group], [found.rows for found, _ in group])
            entries = entries.with_columns(
                pl.col("sequence_number").fill_null(pl.Series(numbers, dtype=pl.Int64)),
                pl.col("content").fill_null(_DATA),
            )
            frames.append(entries)
        return frames

    # ── files beside it ──────────────────────────────────────────────────────────────────────────

    def listing(self, folder: str) -> list[str]:
        """Paths of the files in a folder of the table's store."""
        return [f"{folder.rstrip('/')}/{name}" for name in sorted(self._store.names(folder))]

    def fetch(self, path: str) -> bytes:
        return self._store.read(path)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def rows(
        self, columns: Sequence[str], where: Mapping[str, Collection[str]] | None = None
    ) -> pa.Table:
        """Of the rows of main those that have, in each column of `where`, one of its values.

        Texts come as dictionaries. A column that a file is too old to have is null there.
        """
        found = [self._schema_of(columns).empty_table(), *self.scan(columns, where)]
        return pa.concat_tables(found)

    def rows_of(self, files: Iterable[DataFile], columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of these files one after the other, deleted ones among them."""
        wanted = [self._column(name) for name in columns]
        for file in files:
            yield self._file(wanted, {}, file.path).select(columns)

    def scan(
        self, columns: Sequence[str], where: Mapping[str, Collection[str]] | None = None
    ) -> Iterator[pa.Table]:
        """The same, one file after the other."""
        return self.each(lambda table: table, columns, where)

    def each(
        self,
        make: Callable[[pa.Table], T],
        columns: Sequence[str],
        where: Mapping[str, Collection[str]] | None = None,
    ) -> Iterator[T]:
        """What is made of the rows of each file, which are needed no longer than that."""
        return self._read("main", columns, where or {}, make)

    def having(self, columns: Sequence[str]) -> list[str]:
        """Those of the columns that there are: a table may be older than who asks."""
        there = {each["name"] for each in self._schema["fields"]}
        return [name for name in columns if name in there]

    def _schema_of(self, columns: Sequence[str]) -> pa.Schema:
        return pa.schema([(name, self._column(name).type) for name in columns])

    def origins(self, branch: str) -> pa.Table:
        """Topic, partition and offset of every live row, from the data itself."""
        empty = self._schema_of(self._origin).empty_table()
        found = pa.concat_tables(
            [empty, *self._read(branch, self._origin, {}, lambda table: table)]
        )
        return found.rename_columns(["topic", "partition", "offset"])

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

        # A store is waited for. Local files are not, and each reader needs memory of its own.
        here = all(map(local, live["file_path"]))
        count = min(_READERS, os.cpu_count() or 1) if here else _READERS
        with ThreadPoolExecutor(count) as readers:
            yield from readers.map(one, live["file_path"])

    def _column(self, name: str) -> _Column:
        for each in self._schema["fields"]:
            if each["name"] == name and isinstance(each["type"], str) and each["type"] in _TYPES:
                return _Column(each["id"], name, _TYPES[each["type"]])
        raise IdentityMismatch(
            f"cannot read table {self.name}: it has no column {name} of a simple type"
        )

    def _file(
        self, wanted: Sequence[_Column], where: Mapping[str, Collection[str]], path: str
    ) -> pa.Table:
        with self._store.reading(path), self._store.open(path) as source:
            file = pq.ParquetFile(source)
            # Iceberg knows a column by its id: names are what they were when the file was written.
            ids = {
                (each.metadata or {}).get(b"PARQUET:field_id"): each.name
                for each in file.schema_arrow
            }
            if set(ids) == {None}:  # a file that was added as it is
                ids = {
                    b"%d" % each.id: each.name
                    for each in wanted
                    if each.name in file.schema_arrow.names
                }
            here = {ids[key]: each for each in wanted if (key := b"%d" % each.id) in ids}
            texts = [name for name, each in here.items() if each.type is _TEXT]
            file = pq.ParquetFile(source, metadata=file.metadata, read_dictionary=texts)
            groups = set(range(file.metadata.num_row_groups))
            for name in texts:
                if (values := where.get(here[name].name)) is not None:
                    groups &= _groups(file.metadata, name, values)
            table = file.read_row_groups(sorted(groups), list(here), use_threads=False)
            table = table.rename_columns([here[name].name for name in table.column_names])
            return _fitting(table, wanted, where)

    def _scanned(self, branch: str, wanted: Sequence[_Column]) -> pa.Table:
        """By pyiceberg, which leaves out the rows whose positions were deleted."""
        from pyiceberg.catalog.noop import NoopCatalog
        from pyiceberg.table import StaticTable
        from pyiceberg.table.metadata import TableMetadataUtil

        names = tuple(each.name for each in wanted)
        with self._store.reading(f"table {self.name}"):
            table = StaticTable(
                ("plain", self.name),
                TableMetadataUtil.parse_obj({**self._metadata}),
                self.metadata_file,
                self._store.io(self.metadata_file),
                NoopCatalog("plain"),
            )
            return table.scan(selected_fields=names, snapshot_id=self._head(branch)).to_arrow()


class _Column(NamedTuple):
    id: int
    name: str
    type: pa.DataType


def _snapshot(values: Mapping[str, Any]) -> Snapshot:
    summary = dict(values.get("summary") or {})
    return Snapshot(
        id=values["snapshot-id"],
        parent=values.get("parent-snapshot-id"),
        sequence=values.get("sequence-number", 0),
        timestamp_ms=values["timestamp-ms"],
        operation=summary.pop("operation", ""),
        summary=summary,
        manifest_list=values.get("manifest-list", ""),
    )


class _BoundValues:
    """A column of maps, asked for one key of all of them."""

    def __init__(self, maps: pl.Series) -> None:
        lengths = maps.list.len().fill_null(0)
        pairs = maps.filter(lengths > 0).explode()  # what an empty one leaves, polars has changed
        self._rows = np.repeat(np.arange(len(maps)), lengths.to_numpy())
        self._keys = pairs.struct.field("key").to_numpy()
        self._values = pairs.struct.field("value")
        self._count = len(maps)

    def __getitem__(self, key: int) -> pl.Series:
        """One value per map; null where it has none."""
        at = np.flatnonzero(self._keys == key)
        places = np.full(self._count, -1)
        places[self._rows[at]] = at
        found: pl.Series = self._values.gather(pl.Series(places).replace(-1, None))
        return found


def _number(bounds: pl.Series) -> pl.Series:
    """Four bytes are an int, eight a long; a column may have become one."""
    four, eight = (bounds.bin.reinterpret(dtype=kind) for kind in (pl.Int32(), pl.Int64()))
    found: pl.Series = eight.zip_with(eight.is_not_null(), four.cast(pl.Int64))
    return found


def _holding(live: pl.DataFrame, key: int, values: Collection[str]) -> pl.DataFrame:
    """Without the data files whose bounds say that they have none of the values."""
    ordered = sorted(each.encode() for each in values)
    low, high = (
        _BoundValues(live[name])[key].to_list() for name in ("lower_bounds", "upper_bounds")
    )
    kept = [
        content != _DATA or _any_within(ordered, *bounds)
        for content, *bounds in zip(live["content"], low, high, strict=True)
    ]
    return live.filter(pl.Series(kept, dtype=pl.Boolean))


def _groups(metadata: pq.FileMetaData, name: str, values: Collection[str]) -> set[int]:
    """The groups of rows of a file that may have one of the values."""
    ordered = sorted(values)
    at = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(name)
    said = [metadata.row_group(i).column(at).statistics for i in range(metadata.num_row_groups)]
    bounds = [(each.min, each.max) if each and each.has_min_max else (None, None) for each in said]
    return {i for i, each in enumerate(bounds) if _any_within(ordered, *each)}


def _any_within(ordered: Sequence[Any], low: Any, high: Any) -> bool:
    if low is None or high is None:  # no bounds: who knows
        return True
    at = bisect_left(ordered, low)
    return at < len(ordered) and bool(ordered[at] <= high)


def _all(texts: pa.DictionaryArray, values: Collection[str]) -> bool:
    """Is each of the texts one of the values?"""
    return not texts.null_count and set(texts.dictionary.to_pylist()) <= set(values)


def _fitting(
    table: pa.Table, wanted: Sequence[_Column], where: Mapping[str, Collection[str]]
) -> pa.Table:
    """The columns as they are wanted, and of the rows those that are."""
    columns = {
        each.name: table[each.name].cast(each.type)
        if each.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, each.type)])
        for each in wanted
    }
    found = pa.table(columns)
    for name, values in where.items():
        if all(_all(each, values) for each in found[name].chunks):
            continue  # nothing to leave out: a filter would copy every column
        chosen = pa.array(list(values), pa.string())
        masks = [
            pc.is_in(each.dictionary, chosen).take(each.indices) for each in found[name].chunks
        ]
        found = found.filter(pa.chunked_array(masks, pa.bool_()))
    return found


def find(catalog: Mapping[str, str], name: str) -> ReadOnlyTable | None:
    """The table of that name, or at that path; None where there is none.

    `catalog`: its settings as Spark gets them, without the prefix. They may hold credentials.
    """
    found, properties = metadata_file(catalog, name)
    return ReadOnlyTable(name, found, properties) if found else None
