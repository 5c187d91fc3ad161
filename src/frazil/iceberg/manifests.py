"""The entries of a table's manifests, in columns, without a JVM: which files a snapshot has, with
their counts and bounds. Read only; the reads of many manifests wait side by side."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from frazil.errors import Expired, Fatal
from frazil.iceberg.file_io import AvroFile, FileStore, frame
from frazil.iceberg.table import DataFile
from frazil.offsets import Partition

READERS = 8  # threads: reads wait for the store, and polars and Arrow release the GIL
_PIECE = 64  # manifests per read
DATA, EQUALITY = 0, 2  # contents of a file
ADDED, DELETED = 1, 2  # status of an entry

_COUNTS, _BOUNDS = (
    pl.List(pl.Struct({"key": pl.Int32, "value": kind})) for kind in (pl.Int64, pl.Binary)
)
#: Columns read from a manifest entry.
ENTRY = {
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
CLAIMS = {**ENTRY, "value_counts": _COUNTS}


class ManifestReader:
    def __init__(
        self, table: str, store: FileStore, snapshots: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """`snapshots`: those of the table's metadata, by id."""
        self._table = table
        self._store = store
        self._snapshots = snapshots

    def entries(
        self,
        wanted: int,
        by_itself: bool = False,
        columns: Mapping[str, pl.DataType] = ENTRY,
    ) -> pl.DataFrame:
        """The entries of a snapshot's manifests, or only of those that it added `by_itself`."""
        none = pl.DataFrame(schema=columns)
        manifests = self.listed(wanted)
        if by_itself:
            manifests = [m for m in manifests if m.get("added_snapshot_id", wanted) == wanted]
        size = min(_PIECE, -(-len(manifests) // READERS)) or 1
        pieces = [manifests[at : at + size] for at in range(0, len(manifests), size)]
        with ThreadPoolExecutor(READERS) as readers:
            read = partial(self._read, columns=columns)
            frames = [entries for group in readers.map(read, pieces) for entries in group]
        return pl.concat([none, *frames], rechunk=True)

    def listed(self, wanted: int) -> list[dict[str, Any]]:
        """The manifests that a snapshot lists."""
        if wanted not in self._snapshots:
            raise Expired(
                f"cannot read snapshot {wanted} of table {self._table}: it does not exist"
            )
        snapshot = self._snapshots[wanted]
        if "manifest-list" in snapshot:
            return frame([AvroFile(self._store, snapshot["manifest-list"])]).to_dicts()
        # format version 1 may list them in the metadata file
        return [{"manifest_path": path} for path in snapshot.get("manifests", ())]

    def _read(
        self, manifests: Sequence[Mapping[str, Any]], columns: Mapping[str, pl.DataType]
    ) -> list[pl.DataFrame]:
        alike: dict[bytes, list[tuple[AvroFile, int]]] = {}
        for manifest in manifests:
            file = AvroFile(self._store, manifest["manifest_path"])
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
                pl.col("content").fill_null(DATA),
            )
            frames.append(entries)
        return frames

    def live(self, snapshot_id: int | None) -> pl.DataFrame:
        """The live entries of a snapshot, data and deletes; none without a snapshot."""
        if snapshot_id is None:
            return pl.DataFrame(schema=ENTRY)
        return self.entries(snapshot_id).filter(pl.col("status") < DELETED)


def described(data: pl.DataFrame, origin: Sequence[int]) -> list[DataFile]:
    """`origin`: the field ids of the topic, partition and offset columns."""
    topic, partition, offset = origin
    low, high, nulls = (
        _BoundValues(data[name]) for name in ("lower_bounds", "upper_bounds", "null_value_counts")
    )
    files = []
    topics: dict[tuple[bytes, bytes], tuple[str, str]] = {}  # one string for all files of a topic
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


def holding(live: pl.DataFrame, key: int, values: Collection[str]) -> pl.DataFrame:
    """Without the data files whose bounds exclude all of the values."""
    ordered = sorted(value.encode() for value in values)
    low, high = (
        _BoundValues(live[name])[key].to_list() for name in ("lower_bounds", "upper_bounds")
    )
    kept = [
        content != DATA or any_within(ordered, *bounds)
        for content, *bounds in zip(live["content"], low, high, strict=True)
    ]
    return live.filter(pl.Series(kept, dtype=pl.Boolean))


def any_within(ordered: Sequence[Any], low: Any, high: Any) -> bool:
    if low is None or high is None:  # no bounds: it may
        return True
    at = bisect_left(ordered, low)
    return at < len(ordered) and bool(ordered[at] <= high)
