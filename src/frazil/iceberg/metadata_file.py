"""One metadata file of an Iceberg table, read without a JVM. In: its path, and the settings of its
store. Out: schema, properties, snapshots, branches and tags, all of one state."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from frazil.errors import Fatal, IdentityMismatch
from frazil.format_version import KEY, check_table
from frazil.iceberg.file_io import FileStore
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import joined

_VERSIONS = 3  # the highest supported format version


class MetadataFile:
    """A table as one of its metadata files describes it: schema, snapshots, branches and tags.

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
                raise TypeError("a property or a summary has a value that is not text")
        for snapshot in self._snapshots.values():
            numbers = [
                snapshot["snapshot-id"],
                snapshot["timestamp-ms"],
                snapshot.get("sequence-number", 0),
                snapshot.get("parent-snapshot-id") or 0,
            ]
            if not all(type(value) is int and abs(value) < 2**63 for value in numbers):
                raise TypeError(
                    f"snapshot {snapshot['snapshot-id']} has a field that is not a number"
                )
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
                earlier = MetadataFile(self.name, log.pop(), self.store.properties)
            except IdentityMismatch:  # removed, and so are all older ones
                return
            while wanted is not None and wanted in earlier._snapshots:
                snapshot = earlier._snapshot(earlier._snapshots[wanted])
                yield snapshot
                wanted = snapshot.parent

    def _snapshot(self, values: Mapping[str, Any]) -> Snapshot:
        snapshot = Snapshot.of_json(values)
        return replace(snapshot, summary=joined(snapshot.summary, self.properties))

    def tags(self) -> dict[str, Snapshot]:
        names = [name for name, ref in self._refs.items() if ref["type"] == "tag"]
        return {name: snapshot for name in names if (snapshot := self.tagged(name)) is not None}
