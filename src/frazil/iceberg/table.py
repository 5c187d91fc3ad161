"""An Iceberg table: its plain values, and the interface of a table that is read or committed to.

`ReadableTable` is what a metadata file can answer: `static_table.ReadOnlyTable` and
`java_table.JavaTable` implement it. `Table` adds commits; `JavaTable` implements it, and so does
the table of the simulation. Whatever commits runs against `Table`, on either. Imports nothing of
Iceberg, Spark or Arrow: the ledger reads tables through this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from frazil.offsets import Partition


@dataclass(frozen=True, slots=True)
class Snapshot:
    id: int
    parent: int | None
    sequence: int
    timestamp_ms: int
    operation: str
    summary: Mapping[str, str]
    manifest_list: str = ""

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> Snapshot:
        """From Iceberg's JSON of a snapshot."""
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


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file with the offsets of its records, as its manifest describes it."""

    path: str
    rows: int
    #: partition of its records, by its bounds; None if they span several or are unknown
    partition: Partition | None
    #: lowest and highest offset in it
    offsets: tuple[int, int] | None
    #: rows without an offset
    nulls: int = 0
    #: data sequence number: the commit that added its rows
    sequence: int = 0
    #: lower and upper bound of its topics; they may be truncated
    topics: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of a table's newest snapshot."""

    path: str
    rows: int
    #: data sequence number: the commit that added its rows
    sequence: int = 0
    #: number of delete files that apply to it
    deletes: int = 0
    #: Iceberg's JSON
    descriptor: str = ""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A data or delete file that a manifest lists."""

    #: Iceberg's JSON
    descriptor: str
    #: data sequence number: the commit that added it
    sequence: int
    #: its spec has no partitions; its deletes apply to all partitions
    everywhere: bool


@dataclass(frozen=True, slots=True)
class SchemaUpdate:
    """Changes to a table's schema. Paths use the names from before the update."""

    add: tuple[tuple[str, str, str], ...] = ()  # path of the struct, name, type
    widen: tuple[tuple[str, str], ...] = ()  # path, type
    relax: tuple[str, ...] = ()  # paths
    rename: tuple[tuple[str, str], ...] = ()  # path, name
    #: names of the identifier fields afterwards
    identifier: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.widen or self.relax or self.rename)


#: Gets the ancestry that a commit would build on, newest first; returns None, or why to refuse it.
Check = Callable[[Iterator[Snapshot]], "str | None"]


class ReadableTable(Protocol):
    """A table that is read, in its current state or in that of one metadata file."""

    name: str
    uuid: str

    @property
    def location(self) -> str: ...
    @property
    def properties(self) -> Mapping[str, str]: ...
    @property
    def schema(self) -> str: ...

    def refresh(self) -> None: ...

    def history(self, branch: str) -> Iterator[Snapshot]:
        """The branch's ancestry, newest first, up to the oldest snapshot that is not expired."""

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        """An expired snapshot and its ancestors, as far as earlier metadata files contain them."""

    def carries(self, branch: str, snapshot_id: int) -> bool:
        """Does the branch list the newest manifest of a snapshot? Then the commit that wrote the
        manifest, or the part of it that the snapshot had, is in the branch."""

    def tagged(self, tag: str) -> Snapshot | None: ...

    def listing(self, prefix: str) -> list[str]:
        """The paths in a folder of the table's store."""

    def fetch(self, path: str) -> bytes: ...


class TableScan(Protocol):
    """Rows and files of a table, in the state of one metadata file."""

    def rows(
        self, columns: Sequence[str], where: Mapping[str, Collection[str]] | None = None
    ) -> Any:
        """The rows of main that have, in each column of `where`, one of its values."""

    def added(self, snapshot_id: int) -> list[DataFile]:
        """The data files that a snapshot added, whether they are live now or not."""


class TableFiles(ReadableTable, Protocol):
    """The files of a table and its store: the part of `Table` that commits nothing."""

    @property
    def readonly(self) -> TableScan: ...
    def manifests(self, snapshot_id: int) -> set[str]: ...
    def live(self) -> tuple[Snapshot | None, list[LiveFile]]: ...
    def contents(
        self, branch: str, known: Mapping[str, list[ManifestEntry]], data: bool = False
    ) -> tuple[Snapshot | None, dict[str, list[ManifestEntry]]]: ...
    def staged(self, manifest: str) -> list[ManifestEntry]: ...
    def lacking(self, manifests: Sequence[str]) -> list[str]: ...
    def needed(self, paths: Sequence[str]) -> set[str]: ...
    def store(self, path: str, content: bytes, overwrite: bool = False) -> None:
        """Write an object. It must not exist, unless `overwrite` is set."""

    def metadata_path(self, name: str) -> str: ...
    def write_manifest(self, path: str, files: Sequence[str]) -> str: ...
    def delete(self, path: str) -> None: ...
    def remove(self, paths: Sequence[str]) -> None: ...


class Table(TableFiles, Protocol):
    """A table that is committed to. A commit is applied whole or not at all; an error that leaves
    the outcome open is `CommitStateUnknown`. Nothing deletes a file that a commit may need: paths
    that Iceberg wants to delete are added to `leftovers`."""

    #: created by this handle: no other writer has written to it before
    made: bool

    @property
    def schemas(self) -> Sequence[str]: ...
    @property
    def schema_id(self) -> int: ...
    @property
    def spec(self) -> str: ...
    @property
    def sort_order(self) -> str: ...
    @property
    def format_version(self) -> int: ...
    @property
    def io_properties(self) -> Mapping[str, str]: ...

    def branches(self) -> list[str]: ...
    def tags(self) -> dict[str, int]: ...
    def count(self) -> int: ...
    def moment(self, number: int) -> int | None: ...
    def set_property(self, key: str, value: str) -> None: ...
    def remove_property(self, key: str) -> None: ...
    def unpartitioned_spec(self) -> str: ...
    def evolve(self, plan: Callable[[str], SchemaUpdate]) -> None: ...
    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None: ...
    def untag(self, tag: str) -> None: ...
    def fork(self, branch: str, snapshot_id: int) -> None: ...
    def move(
        self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]
    ) -> None: ...

    def append(
        self,
        manifests: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        check: Check,
        leftovers: list[str],
        tag: str = "",
    ) -> None:
        """Add one snapshot with all of `manifests`: an append, or a row delta if some of them hold
        deletes. `check` is called on every attempt, Iceberg's own retries included. `tag`: the tag
        to set on the new snapshot. A table that sets it in the same commit cannot leave it behind;
        for other tables, `TableCommitter.set_tag` moves it."""

    def rewrite(
        self,
        removed: Sequence[LiveFile],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        since: int,
        same: bool,
        check: Check,
        leftovers: list[str],
    ) -> None:
        """Add one snapshot to main that replaces the files `removed` by `added` (Iceberg's JSON).
        `since`: the snapshot that was read. Later changes by other writers to the removed files are
        a conflict, later additions are none. `same`: the rows are the same ones."""

    def replace(
        self,
        removed: Sequence[str],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        since: int,
        leftovers: list[str],
    ) -> None:
        """Add one snapshot that replaces the files `removed` by `added`, data and deletes (as
        Iceberg's JSON), with the same rows; on top of the snapshot `since`, or not at all."""

    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None:
        """Expire the snapshots before a moment, except the last `keep` of each branch and those
        that a tag or branch names. Paths that Iceberg wants to delete are added to `unneeded`."""
