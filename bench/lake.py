"""Iceberg tables, and runs of sinks on them, without a JVM, a broker or a stream.

`Metadata` is one table of format 2 as the specification has it: a metadata file, manifest lists and
manifests, which any reader of Iceberg reads. It is also what the committer needs of a table.

`History` is that of one sink on such tables, by chance and by a seed. What Kafka and Spark do is
made up: topics with transaction markers, aborted and compacted records, batches, rows and files.
What Frazil does is Frazil's own code: claims, ledger entries, absorbed and recovered batches, index
rows. Around it others live: compaction, expiry, schema changes, foreign rows, tags and branches.

The records of a topic are made once, so that a run that reads a range again reads the same.
"""

from __future__ import annotations

import json
import random
import struct
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    MANIFEST_LIST_FILE_SCHEMAS,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from frazil.accounting import RangeCounts
from frazil.commit.batch_chain import chain, entry_of
from frazil.commit.commit_queue import INDEX, BackpressureLimits, CommitTrigger
from frazil.commit.committer import Committer, Located, Progress
from frazil.commit.protocol import TableCommitter
from frazil.commit.rewind import IndexRemoval, RewindSteps
from frazil.config.sections import TableConfig
from frazil.errors import FrazilError
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg import schema
from frazil.iceberg.table import Snapshot
from frazil.ledger import index
from frazil.ledger.entry import LedgerEntry, entries, head, split
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.ledger.tags import ledger_tag
from frazil.offsets import BATCHES, Cut, Partition, Range
from frazil.pipeline.projection import MetadataColumns as Names

#: A data or delete file as Iceberg's JSON has it; and under "rows" what it holds, for ourselves.
File = dict[str, Any]
#: Topic, partition and offset; of a foreign row, all None.
Row = tuple[str | None, int | None, int | None]
#: The topic that foreign rows carry where they must carry one, and another sink with its topic.
BACKFILL, NEIGHBOUR = "backfill", "neighbour"

NO_SPEC = '{"spec-id": 0, "fields": []}'
FOREVER = 2**63 - 1
_EXISTING, _ADDED, _DELETED = 0, 1, 2
_CONTENTS = {"data": 0, "position-deletes": 1, "equality-deletes": 2}
_MAPS = (
    "column-sizes",
    "value-counts",
    "null-value-counts",
    "nan-value-counts",
    "lower-bounds",
    "upper-bounds",
)


# ── a table ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Filed:
    """A file as a manifest has it: added, kept or removed, and since when."""

    status: int
    snapshot: int
    sequence: int
    file: File


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    path: str
    deletes: bool
    snapshot: int
    sequence: int
    files: tuple[Filed, ...]

    @property
    def live(self) -> list[Filed]:
        return [file for file in self.files if file.status != _DELETED]


class Metadata:
    """One table. Nothing is on disk before `save`; nothing that is on disk is changed by it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        schema: str,
        properties: Mapping[str, str] | None = None,
        *,
        spec: str = NO_SPEC,
        seed: object = 0,
        codec: str = "null",
    ) -> None:
        self.name = name
        self.location = str(folder)
        self.properties = dict(properties or {})
        self.schemas = [json.loads(schema)]
        self.spec = json.loads(spec)
        self.random = random.Random(f"{name} {seed}")
        self.uuid = self.new_uuid()
        self.snapshots: dict[int, Snapshot] = {}
        #: those that were expired, too
        self.every: dict[int, Snapshot] = {}
        self.lists: dict[int, tuple[Manifest, ...]] = {}
        self.refs: dict[str, int] = {}
        self.branches = {"main"}
        self.sequence = 0
        self.now = 1_700_000_000_000
        self._schema_ids: dict[int, int] = {}
        self._log: list[tuple[int, int]] = []
        self._staged: dict[str, tuple[File, ...]] = {}
        self._codec = codec
        self._version = 0
        self._lengths: dict[str, int] = {}  # of what is written

    # ── what the committer needs ─────────────────────────────────────────────────────────────

    def refresh(self) -> None: ...

    def history(self, branch: str) -> Iterator[Snapshot]:
        at = self.refs.get(branch)
        while at is not None and at in self.snapshots:
            yield self.snapshots[at]
            at = self.snapshots[at].parent

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        """All metadata files that there ever were are kept."""
        at: int | None = snapshot_id
        while at in self.every:
            yield self.every[at]
            at = self.every[at].parent

    def carries(self, branch: str, snapshot_id: int) -> bool:
        manifests = self.lists[snapshot_id]
        newest = max((manifest.sequence for manifest in manifests), default=0)
        wanted = {manifest.path for manifest in manifests if manifest.sequence == newest}
        return not wanted or bool(
            wanted & {manifest.path for manifest in self.lists[self.refs[branch]]}
        )

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        return [path for path in manifests if path not in self._staged]

    def tagged(self, tag: str) -> Snapshot | None:
        return self.snapshots.get(self.refs[tag]) if tag in self.refs else None

    def tag(self, tag: str, snapshot_id: int, was: int | None = None) -> None:
        self.refs[tag] = snapshot_id

    def delete(self, path: str) -> None: ...

    def stage(self, files: Iterable[File]) -> str:
        """A manifest that a later `append` takes as it is."""
        path = self.path(f"frazil-{self._id()}-m0.avro")
        self._staged[path] = tuple(files)
        return path

    def append(
        self,
        manifests: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
        tag: str = "",
    ) -> None:
        if refusal := check(self.history(branch)):
            raise AssertionError(f"nobody else commits here, and yet: {refusal}")
        self.snapshot(summary, manifests=manifests, branch=branch)

    # ── what a rewind needs ──────────────────────────────────────────────────────────────────

    def tags(self) -> dict[str, int]:
        return {name: i for name, i in self.refs.items() if name not in self.branches}

    def fork(self, branch: str, snapshot_id: int) -> None:
        self.refs[branch] = snapshot_id
        self.branches.add(branch)

    def move(self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]) -> None:
        for name, wanted in expected.items():
            assert self.refs.get(name) == wanted, name
        for name, number in refs.items():
            if number is None:
                self.refs.pop(name, None)
                self.branches -= {name} - {"main"}
            else:
                self.refs[name] = number

    def set_property(self, key: str, value: str) -> None:
        self.properties[key] = value

    def remove_property(self, key: str) -> None:
        self.properties.pop(key, None)

    def rewrite(
        self,
        removed: Sequence[File],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        since: int,
        same: bool,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
    ) -> None:
        """`added`: staged manifests."""
        assert check(self.history("main")) is None
        gone = {file["file-path"] for file in removed}
        files = [file for path in added for file in self._staged[path]]
        self.snapshot(summary, files, gone, "replace" if same else "overwrite")

    # ── what others do ───────────────────────────────────────────────────────────────────────

    def snapshot(
        self,
        summary: Mapping[str, str] | None = None,
        added: Sequence[File] = (),
        removed: Collection[str] = (),
        operation: str = "append",
        branch: str = "main",
        manifests: Sequence[str] = (),
    ) -> Snapshot:
        """A commit: files that come and files that go, with the summary that Iceberg makes of them.

        `manifests` are staged ones. A path in `removed` goes wherever it stands.
        """
        parent = self.refs.get(branch, self.refs.get("main"))
        number, self.sequence = self._id(), self.sequence + 1
        self.now += self.random.randrange(1, 90_000)
        gone: list[File] = []
        kept = []
        for manifest in self.lists.get(parent, ()) if parent is not None else ():
            if removed and any(one.file["file-path"] in removed for one in manifest.live):
                gone += [o.file for o in manifest.live if o.file["file-path"] in removed]
                kept.append(self._without(manifest, removed, number))
            elif manifest.live or not removed:
                kept.append(manifest)
        come = [*added, *(file for path in manifests for file in self._staged[path])]
        new = [
            Manifest(path, False, number, self.sequence, self._filed(self._staged[path], number))
            for path in manifests
        ]
        for content in (False, True):
            files = [file for file in added if (file["content"] != "data") == content]
            if files:
                path = self.path(f"{self._id():x}-m{int(content)}.avro")
                filed = self._filed(files, number)
                new.append(Manifest(path, content, number, self.sequence, filed))
        whole_summary = {
            **(summary or {}),
            **_counted(come, gone, self.snapshots[parent].summary if parent else {}),
            "manifests-created": str(len(new)),
            "manifests-kept": str(len(kept)),
        }
        made = Snapshot(
            number,
            parent,
            self.sequence,
            self.now,
            operation,
            whole_summary,
            self.path(f"snap-{number}-1-{self._id():x}.avro"),
        )
        self.snapshots[number] = self.every[number] = made
        self.lists[number] = (*new, *kept)
        self._schema_ids[number] = self.schemas[-1]["schema-id"]
        self.refs[branch] = number
        self.branches.add(branch)
        if branch == "main":
            self._log.append((self.now, number))
        return made

    def rewrite_manifests(self, branch: str = "main", dropped: Collection[str] = ()) -> Snapshot:
        """All live files in one manifest. What is `dropped` is lost in it, and nobody says so."""
        live = [file for m in self.lists[self.refs[branch]] for file in m.live]
        counts = self.snapshots[self.refs[branch]].summary
        made = self.snapshot(operation="replace", branch=branch)
        new = [
            Manifest(
                self.path(f"optimized-m-{self._id():x}.avro"),
                content,
                made.id,
                made.sequence,
                tuple(
                    replace(file, status=_EXISTING)
                    for file in live
                    if (file.file["content"] != "data") == content
                    and file.file["file-path"] not in dropped
                ),
            )
            for content in (False, True)
        ]
        self.lists[made.id] = tuple(manifest for manifest in new if manifest.files)
        totals = {key: value for key, value in counts.items() if key.startswith("total-")}
        self.snapshots[made.id] = replace(made, summary={**made.summary, **totals})
        return self.snapshots[made.id]

    def expire(self, keep: Collection[int]) -> None:
        """All snapshots go but these and those that a tag or branch names."""
        held = {*keep, *self.refs.values()}
        self.snapshots = {i: snapshot for i, snapshot in self.snapshots.items() if i in held}
        self.lists = {i: manifests for i, manifests in self.lists.items() if i in held}
        self._log = [record for record in self._log if record[1] in held]

    def evolve(self, change: Callable[[dict[str, Any]], None]) -> None:
        new = json.loads(json.dumps(self.schemas[-1]))
        change(new)
        new["schema-id"] = self.schemas[-1]["schema-id"] + 1
        self.schemas.append(new)

    def rollback(self, snapshot_id: int, branch: str = "main") -> None:
        """As Iceberg does it: the branch moves, and the snapshots stay for a while."""
        self.refs[branch] = snapshot_id
        self.now += 1000
        if branch == "main":
            self._log.append((self.now, snapshot_id))

    # ── what should not happen ───────────────────────────────────────────────────────────────

    def forge(self, change: Callable[[Filed], Sequence[Filed]], branch: str = "main") -> None:
        """Other files in the newest manifests than were committed, and no snapshot that says so."""
        number = self.refs[branch]
        forged = []
        for manifest in self.lists[number]:
            files = tuple(new for old in manifest.files for new in change(old))
            if files != manifest.files:
                manifest = replace(manifest, path=self.path(f"{self._id():x}-m0.avro"), files=files)
            forged += [manifest] if files else []
        self.lists[number] = tuple(forged)
        path = self.path(f"snap-{number}-1-{self._id():x}.avro")
        self.snapshots[number] = replace(self.snapshots[number], manifest_list=path)

    def amend(self, snapshot_id: int, summary: Mapping[str, str]) -> None:
        """Other words in a snapshot's summary than were committed."""
        old = self.snapshots[snapshot_id]
        self.snapshots[snapshot_id] = replace(old, summary={**old.summary, **summary})

    def forget(self, snapshot_id: int, branch: str = "main") -> None:
        """A snapshot that never was, with the files it brought, as if others had been picked."""
        gone = self.snapshots.pop(snapshot_id)
        self.lists.pop(snapshot_id)
        self._log = [record for record in self._log if record[1] != snapshot_id]
        for number, snapshot in self.snapshots.items():
            if snapshot.parent == snapshot_id:
                self.snapshots[number] = replace(snapshot, parent=gone.parent)
        for ref, number in list(self.refs.items()):
            if number == snapshot_id and gone.parent in self.snapshots:
                self.refs[ref] = gone.parent
            elif number == snapshot_id:
                del self.refs[ref]
        if branch in self.refs:
            self.forge(lambda filed: [filed] if filed.snapshot != snapshot_id else [], branch)

    def hidden(self, file: File, positions: Sequence[int]) -> File:
        """A file of position deletes that hides rows of another."""
        path = f"{self.location}/data/{self._id():x}-deletes.parquet"
        fields = [
            pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
            pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
        ]
        columns = [[file["file-path"]] * len(positions), list(positions)]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, fields, strict=True)]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), path)
        bound = {"keys": [2147483546], "values": [file["file-path"].encode().hex()]}
        return {
            "spec-id": 0,
            "content": "position-deletes",
            "file-path": path,
            "file-format": "parquet",
            "partition": file["partition"],
            "file-size-in-bytes": Path(path).stat().st_size,
            "record-count": len(positions),
            "lower-bounds": bound,
            "upper-bounds": bound,
            "rows": [],
        }

    # ── what is there ────────────────────────────────────────────────────────────────────────

    def filed(self, branch: str = "main") -> list[Filed]:
        if branch not in self.refs:
            return []
        return [filed for m in self.lists[self.refs[branch]] for filed in m.live]

    def live(self, branch: str = "main") -> list[File]:
        """The data files that a reader sees."""
        return [filed.file for filed in self.filed(branch) if filed.file["content"] == "data"]

    @property
    def schema(self) -> str:
        return json.dumps(self.schemas[-1])

    @property
    def spec_text(self) -> str:
        return json.dumps(self.spec)

    def path(self, name: str) -> str:
        return f"{self.location}/metadata/{name}"

    # ── on disk ──────────────────────────────────────────────────────────────────────────────

    def save(self, complete: bool = False) -> str:
        """A new metadata file. Manifest lists are written of what tags and branches name, or
        `complete`: of every snapshot."""
        Path(self.path("")).mkdir(parents=True, exist_ok=True)
        for number in self.lists if complete else set(self.refs.values()):
            self._write_list(self.snapshots[number])
        self._version += 1
        path = self.path(f"v{self._version}.metadata.json")
        Path(path).write_text(json.dumps(self._json()))
        Path(self.path("version-hint.text")).write_text(str(self._version))
        return path

    def _json(self) -> dict[str, Any]:
        ids = [field["id"] for field in self.schemas[-1]["fields"]]
        document: dict[str, Any] = {
            "format-version": 2,
            "table-uuid": self.uuid,
            "location": self.location,
            "last-sequence-number": self.sequence,
            "last-updated-ms": self.now,
            "last-column-id": max(ids),
            "current-schema-id": self.schemas[-1]["schema-id"],
            "schemas": self.schemas,
            "default-spec-id": self.spec["spec-id"],
            "partition-specs": [self.spec],
            "last-partition-id": max([999, *(f["field-id"] for f in self.spec["fields"])]),
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": {
                **self.properties,
                **{k: v for s in self.snapshots.values() for k, v in split(s.summary)[1].items()},
            },
            "current-snapshot-id": self.refs.get("main", -1),
            "refs": {
                name: {"snapshot-id": number, "type": "branch"}
                if name in self.branches
                else {"snapshot-id": number, "type": "tag", "max-ref-age-ms": FOREVER}
                for name, number in self.refs.items()
            },
            "snapshots": [self._snapshot_json(snapshot) for snapshot in self.snapshots.values()],
            "statistics": [],
            "partition-statistics": [],
            "snapshot-log": [{"timestamp-ms": at, "snapshot-id": i} for at, i in self._log],
            "metadata-log": [],
        }
        return document

    def _snapshot_json(self, snapshot: Snapshot) -> dict[str, Any]:
        parent = {} if snapshot.parent is None else {"parent-snapshot-id": snapshot.parent}
        return {
            "sequence-number": snapshot.sequence,
            "snapshot-id": snapshot.id,
            **parent,
            "timestamp-ms": snapshot.timestamp_ms,
            "summary": {"operation": snapshot.operation, **split(snapshot.summary)[0]},
            "manifest-list": snapshot.manifest_list,
            "schema-id": self._schema_ids[snapshot.id],
        }

    def _write_list(self, snapshot: Snapshot) -> None:
        if snapshot.manifest_list in self._lengths:
            return
        records = [self._listed(manifest) for manifest in self.lists[snapshot.id]]
        meta = {
            "snapshot-id": str(snapshot.id),
            "parent-snapshot-id": str(snapshot.parent or "null"),
            "sequence-number": str(snapshot.sequence),
            "format-version": "2",
        }
        self._write(snapshot.manifest_list, _list_schema(), records, meta)

    def _listed(self, manifest: Manifest) -> dict[str, Any]:
        self._write_manifest(manifest)
        counts = {
            f"{word}_{unit}_count": sum(
                filed.file["record-count"] if unit == "rows" else 1
                for filed in manifest.files
                if filed.status == status
            )
            for status, word in ((_ADDED, "added"), (_EXISTING, "existing"), (_DELETED, "deleted"))
            for unit in ("files", "rows")
        }
        return {
            "manifest_path": manifest.path,
            "manifest_length": self._lengths[manifest.path],
            "partition_spec_id": self.spec["spec-id"],
            "content": int(manifest.deletes),
            "sequence_number": manifest.sequence,
            "min_sequence_number": min((e.sequence for e in manifest.live), default=0),
            "added_snapshot_id": manifest.snapshot,
            **counts,
            "partitions": self._summarised(manifest),
        }

    def _summarised(self, manifest: Manifest) -> list[dict[str, Any]]:
        summaries = []
        for i in range(len(self.spec["fields"])):
            values = [filed.file["partition"][i] for filed in manifest.files]
            present = [value for value in values if value is not None]
            low, high = (
                (struct.pack("<i", min(present)), struct.pack("<i", max(present)))
                if present
                else (None, None)
            )
            summaries.append(
                {
                    "contains_null": len(present) < len(values),
                    "contains_nan": False,
                    "lower_bound": low,
                    "upper_bound": high,
                }
            )
        return summaries

    def _write_manifest(self, manifest: Manifest) -> None:
        if manifest.path in self._lengths:
            return
        for filed in manifest.files:
            self.materialise(filed.file)
        names = [field["name"] for field in self.spec["fields"]]
        records = [
            {
                "status": filed.status,
                # Of what is added the reader takes them from the list, as from a staged manifest.
                "snapshot_id": None if filed.status == _ADDED else filed.snapshot,
                "sequence_number": None if filed.status == _ADDED else filed.sequence,
                "file_sequence_number": None if filed.status == _ADDED else filed.sequence,
                "data_file": _avro(filed.file, names),
            }
            for filed in manifest.files
        ]
        meta = {
            "schema": self.schema,
            "schema-id": str(self.schemas[-1]["schema-id"]),
            "partition-spec": json.dumps(self.spec["fields"]),
            "partition-spec-id": str(self.spec["spec-id"]),
            "format-version": "2",
            "content": "deletes" if manifest.deletes else "data",
        }
        self._write(manifest.path, _entry_schema(self.schema, self.spec_text), records, meta)

    def materialise(self, file: File) -> None:
        """Whatever is to be done before a file is described in a manifest."""

    def _write(self, path: str, avro: Any, records: list[Any], meta: dict[str, str]) -> None:
        with open(path, "wb") as out:
            fastavro.writer(out, avro, records, codec=self._codec, metadata=meta)
            self._lengths[path] = out.tell()

    def _filed(self, files: Iterable[File], snapshot: int) -> tuple[Filed, ...]:
        return tuple(Filed(_ADDED, snapshot, self.sequence, file) for file in files)

    def _without(self, manifest: Manifest, removed: Collection[str], snapshot: int) -> Manifest:
        files = [
            replace(filed, status=_DELETED, snapshot=snapshot)
            if filed.file["file-path"] in removed
            else replace(filed, status=_EXISTING)
            for filed in manifest.live
        ]
        path = self.path(f"{self._id():x}-m0.avro")
        return Manifest(path, manifest.deletes, snapshot, self.sequence, tuple(files))

    def _id(self) -> int:
        return self.random.getrandbits(62)

    def new_uuid(self) -> str:
        return str(uuid.UUID(int=self.random.getrandbits(128)))


def _counted(
    come: Sequence[File], gone: Sequence[File], before: Mapping[str, str]
) -> dict[str, str]:
    """What Iceberg tells in the summary: only what there is, and totals of everything."""
    counts: dict[str, int] = {}

    def count(key: str, number: int) -> None:
        if number:
            counts[key] = counts.get(key, 0) + number

    totals = {
        name: int(before.get(f"total-{name}", 0))
        for name in (
            "data-files",
            "records",
            "delete-files",
            "position-deletes",
            "equality-deletes",
        )
    }
    for files, sign in ((come, 1), (gone, -1)):
        for file in files:
            kind, rows = file["content"], file["record-count"]
            if kind == "data":
                count("added-data-files" if sign > 0 else "deleted-data-files", 1)
                count("added-records" if sign > 0 else "deleted-records", rows)
                totals["data-files"] += sign
                totals["records"] += sign * rows
            else:
                verb = "added" if sign > 0 else "removed"
                count(f"{verb}-delete-files", 1)
                count(f"{verb}-{kind[:-1]}-files", 1)
                count(f"{verb}-{kind}", rows)
                totals["delete-files"] += sign
                totals[kind] += sign * rows
    changes = {key: str(value) for key, value in counts.items()}
    return {**changes, **{f"total-{key}": str(value) for key, value in totals.items()}}


def _avro(file: File, partition: Sequence[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "content": _CONTENTS[file["content"]],
        "file_path": file["file-path"],
        "file_format": "PARQUET",
        "partition": dict(zip(partition, file["partition"], strict=True)),
        "record_count": file["record-count"],
        "file_size_in_bytes": file["file-size-in-bytes"],
        "split_offsets": file.get("split-offsets") or None,
        "equality_ids": file.get("equality-ids"),
        "sort_order_id": file.get("sort-order-id"),
    }
    for name in _MAPS:
        pairs = file.get(name)
        if pairs is None:
            continue
        values = pairs["values"]
        if name.endswith("bounds"):
            values = [bytes.fromhex(value) for value in values]
        record[name.replace("-", "_")] = [
            {"key": key, "value": value} for key, value in zip(pairs["keys"], values, strict=True)
        ]
    return record


@lru_cache(maxsize=1)
def _list_schema() -> Any:
    made = AvroSchemaConversion().iceberg_to_avro(MANIFEST_LIST_FILE_SCHEMAS[2], "manifest_file")
    return fastavro.parse_schema(made)


def _entry_schema(schema_json: str, spec: str) -> Any:
    return _entries("", "") if spec == NO_SPEC else _entries(schema_json, spec)


@lru_cache(maxsize=64)
def _entries(schema_json: str, spec: str) -> Any:
    inside = PartitionSpec.model_validate_json(spec or NO_SPEC)
    made = Schema.model_validate_json(schema_json) if schema_json else Schema()
    file = data_file_with_partition(inside.partition_type(made), format_version=2)
    entry = manifest_entry_schema_with_data_file(format_version=2, data_file=file)
    return fastavro.parse_schema(AvroSchemaConversion().iceberg_to_avro(entry, "manifest_entry"))


# ── a table of records ──────────────────────────────────────────────────────────────────────────

#: The records' own columns. Tables are partitioned by `kind`, if at all.
COLUMNS = pa.schema([("id", pa.int64()), ("kind", pa.int32()), ("note", pa.large_string())])
KINDS = 3


class Table(Metadata):
    """A table that a sink fills. `real`: its data files are there, and described as `files.writer`
    describes them; otherwise they are described likewise, and nobody can read them."""

    def __init__(
        self,
        folder: Path,
        name: str,
        names: Names,
        *,
        real: bool = False,
        optional: bool = False,
        split: bool = False,
        branch: str = "main",
        seed: object = 0,
        codec: str = "null",
    ) -> None:
        """`optional`: rows may lack topic, partition and offset. `split`: by kind."""
        made, spec = _made(names, optional, split)
        columns = (names.topic, names.partition, names.offset, names.timestamp)
        properties = {"frazil.metadata-columns": ",".join(columns)}
        if not optional:  # made by a sink, and not by somebody else
            properties[f"write.metadata.metrics.column.{names.topic}"] = "full"
        super().__init__(folder, name, made, properties, spec=spec, seed=seed, codec=codec)
        self.names = names
        self.optional = optional
        self.split = split
        self.branch = branch
        self.real = real
        field_ids = {field["name"]: field["id"] for field in self.schemas[0]["fields"]}
        self.ids = [field_ids[column] for column in columns[:3]]

    def write(
        self, rows: Sequence[Row], prefix: str, *, whole: bool = True, measured: bool = True
    ) -> list[File]:
        """Rows into files, one for each kind if it is partitioned so.

        `whole`: bounds hold the whole topic, as in a sink's own files and in all of a table that a
        sink made; Iceberg cuts at 16 bytes.
        `measured`: without it there are no bounds or counts of columns at all.
        """
        whole = whole or not self.optional
        if self.real:
            return self._really(rows, prefix, whole, measured)
        parts: dict[int, list[Row]] = {}
        for row in rows:
            parts.setdefault(kind_of(row) if self.split else 0, []).append(row)
        return [
            self._described(
                part,
                f"{self.location}/data/{prefix}-{self.new_uuid()}.parquet",
                [kind] if self.split else [],
                whole,
                measured,
            )
            for kind, part in parts.items()
        ]

    def again(self, file: File, rows: Sequence[Row], path: str = "") -> File:
        """The same file with other rows: what a bad writer or a bad copy would have made of it."""
        made = self._described(rows, path or file["file-path"], file["partition"], True, True)
        if self.real:
            made["file-path"] = path = f"{self.location}/data/{self._id():x}.parquet"
            self._to_disk(rows, path)
            made["file-size-in-bytes"] = Path(path).stat().st_size
        return made

    def unequal(self, file: File, count: int) -> File:
        """A file of equality deletes on the offset column. (Nobody reads it.)"""
        return {
            "spec-id": 0,
            "content": "equality-deletes",
            "file-path": f"{self.location}/data/{self._id():x}-equal.parquet",
            "file-format": "parquet",
            "partition": file["partition"],
            "file-size-in-bytes": 1000,
            "record-count": count,
            "equality-ids": [self.ids[2]],
            "rows": [],
        }

    def _described(
        self, rows: Sequence[Row], path: str, partition: list[int], whole: bool, measured: bool
    ) -> File:
        file: File = {
            "spec-id": 0,
            "content": "data",
            "file-path": path,
            "file-format": "parquet",
            "partition": partition,
            "file-size-in-bytes": 500 + 8 * len(rows),
            "record-count": len(rows),
            "split-offsets": [4],
            "sort-order-id": 0,
            "rows": rows,
        }
        if not measured:
            return file
        low, high, nulls = [], [], []
        for column in range(3):
            values = [row[column] for row in rows if row[column] is not None]
            nulls.append(len(rows) - len(values))
            low.append(min(values) if values else None)
            high.append(max(values) if values else None)
        if not whole:
            low[0], high[0] = _cut(low[0]), _cut(high[0], up=True)
        bounded = [i for i in range(3) if low[i] is not None]
        keys = [self.ids[i] for i in bounded]
        file["value-counts"] = {"keys": list(self.ids), "values": [len(rows)] * 3}
        file["null-value-counts"] = {"keys": list(self.ids), "values": nulls}
        file["lower-bounds"] = {"keys": keys, "values": [_hex(i, low[i]) for i in bounded]}
        file["upper-bounds"] = {"keys": keys, "values": [_hex(i, high[i]) for i in bounded]}
        return file

    def arrow(self, rows: Sequence[Row]) -> pa.Table:
        """The rows as the table has them."""
        names, values = self.names, list(zip(*rows, strict=True)) or [(), (), ()]
        columns: dict[str, list[Any]] = {
            "id": list(values[2]),
            "kind": [kind_of(row) for row in rows],
            "note": ["x" if offset is None else f"record {offset}" for offset in values[2]],
            names.topic: list(values[0]),
            names.partition: list(values[1]),
            names.offset: list(values[2]),
            names.timestamp: [None if o is None else event_time(o) for o in values[2]],
        }
        arrow = self.shape(True).arrow
        arrays = [pa.array(columns.get(f.name, [None] * len(rows)), f.type) for f in arrow]
        return pa.Table.from_arrays(arrays, schema=arrow)

    def shape(self, whole: bool, measured: bool = True) -> WriterSpec:
        metrics = "write.metadata.metrics"
        more = {f"{metrics}.column.{self.names.topic}": "full"} if whole else {}
        if not measured:
            more = {f"{metrics}.default": "none"}
        return WriterSpec(
            self.name,
            self.location,
            self.schema,
            self.schemas[-1]["schema-id"],
            self.spec_text,
            {**self.properties, **more},
            1 << 27,
            "zstd",
            {},
        )

    def _really(self, rows: Sequence[Row], prefix: str, whole: bool, measured: bool) -> list[File]:
        writer = TableWriter(self.shape(whole, measured), prefix)
        writer.write(self.arrow(rows))
        files = [json.loads(file.descriptor) for file in writer.close()]
        for file in files:
            read = pq.read_table(file["file-path"], partitioning=None)
            columns = [
                read[n].to_pylist()
                for n in (self.names.topic, self.names.partition, self.names.offset)
            ]
            file["rows"] = list(zip(*columns, strict=True))
        return files

    def _to_disk(self, rows: Sequence[Row], path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(self.arrow(rows), path, store_schema=False)


@lru_cache(maxsize=64)
def _made(names: Names, optional: bool, split: bool) -> tuple[str, str]:
    """Schema and partition spec."""
    made = schema.iceberg_schema(COLUMNS, names, TableConfig("t"))
    if optional:
        text = json.loads(made)
        for field in text["fields"]:
            field["required"] = False
        made = json.dumps(text)
    return made, schema.partition_spec(made, ("kind",), "t") if split else NO_SPEC


@lru_cache(maxsize=1)
def _index_schema() -> str:
    return schema.iceberg_schema(index.COLUMNS, Names("", "", "", ""), TableConfig("i"))


def kind_of(row: Row) -> int:
    return (row[2] or 0) % KINDS


def event_time(offset: int) -> int:
    """Microseconds; not in the order of offsets."""
    return 1_700_000_000_000_000 + 1_000_000 * (offset ^ 5)


def _topic_bounds(file: File, table: Table) -> set[str]:
    """Both bounds of the topic, as hex; nothing where there are no topics."""
    return {
        value
        for bounds in (file["lower-bounds"], file["upper-bounds"])
        for key, value in zip(bounds["keys"], bounds["values"], strict=True)
        if key == table.ids[0]
    }


def _hex(column: int, value: Any) -> str:
    if column == 0:
        return str(value.encode().hex())
    return struct.pack("<i" if column == 1 else "<q", value).hex()


def _cut(text: str | None, up: bool = False) -> str | None:
    """A bound as Iceberg cuts it: at 16 characters, the upper one rounded up."""
    if text is None or len(text) <= 16:
        return text
    return text[:15] + chr(ord(text[15]) + 1) if up else text[:16]


# ── the index ───────────────────────────────────────────────────────────────────────────────────


class Index(Metadata):
    """The offset index. Its files are always there: the audit reads them."""

    def __init__(
        self, folder: Path, name: str, *, real: bool = False, seed: object = 0, codec: str = "null"
    ) -> None:
        made = _index_schema()
        super().__init__(folder, name, made, seed=seed, codec=codec)
        self.real = real
        self.shape = WriterSpec(name, self.location, made, 0, NO_SPEC, {}, 1 << 27, "zstd", {})

    def located(self, located: Sequence[Located], prefix: str) -> list[File]:
        """The rows of some batches as the sink would write them."""
        if not self.real:
            return [self.file(index.rows(located), prefix)]
        files = [json.loads(descriptor) for descriptor in index.write(self.shape, prefix, located)]
        for file in files:
            file["rows"] = pq.read_table(file["file-path"], partitioning=None)
        return files

    def file(self, rows: pa.Table, prefix: str) -> File:
        """Rows as a file, which is written when it is first needed."""
        return {
            "spec-id": 0,
            "content": "data",
            "file-path": f"{self.location}/data/{prefix}-{self._id():x}.parquet",
            "file-format": "parquet",
            "partition": [],
            "file-size-in-bytes": 0,
            "record-count": len(rows),
            "sort-order-id": 0,
            "rows": rows,
        }

    def rows(self) -> pa.Table:
        """All that is in it."""
        tables = [file["rows"].cast(index.COLUMNS) for file in self.live()]
        return pa.concat_tables(tables) if tables else index.COLUMNS.empty_table()

    def materialise(self, file: File) -> None:
        if file["file-size-in-bytes"]:
            return
        rows = file["rows"].select(self.shape.arrow.names).cast(self.shape.arrow)
        Path(file["file-path"]).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            rows,
            file["file-path"],
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            store_schema=False,
        )
        file["file-size-in-bytes"] = Path(file["file-path"]).stat().st_size
        ids = {field["name"]: field["id"] for field in self.schemas[0]["fields"]}
        low, high, keys = [], [], []
        for name in ("sink", "table_name", "topic", "partition", "start_offset", "end_offset"):
            bounds = pc.min_max(rows[name]).as_py() if len(rows) else {"min": None}
            if bounds["min"] is None:
                continue
            column = 0 if isinstance(bounds["min"], str) else 1 if name == "partition" else 2
            keys.append(ids[name])
            cut = column == 0
            low.append(_hex(column, _cut(bounds["min"]) if cut else bounds["min"]))
            high.append(_hex(column, _cut(bounds["max"], up=True) if cut else bounds["max"]))
        file["value-counts"] = {"keys": list(ids.values()), "values": [len(rows)] * len(ids)}
        file["null-value-counts"] = {
            "keys": list(ids.values()),
            "values": [rows[name].null_count for name in ids],
        }
        file["lower-bounds"] = {"keys": keys, "values": low}
        file["upper-bounds"] = {"keys": keys, "values": high}


# ── a topic ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Fate:
    """What is to become of one record: the tables it is for, and those of them that reject it."""

    tables: frozenset[str] = frozenset()
    rejecting: frozenset[str] = frozenset()
    #: cannot be read, or no rule knows where to: a dead letter that names no table
    lost: bool = False

    @property
    def rejected(self) -> bool:
        return self.lost or bool(self.rejecting)


class Topics:
    """Records that were made once. `None` at an offset: nothing that a reader would see."""

    def __init__(self, r: random.Random, tables: Sequence[str], alone: bool) -> None:
        self._random = r
        self._tables = tables
        self._alone = alone
        self.style = r.choice(["plain", "plain", "transactions", "compacted", "both"])
        self._fates: dict[Partition, list[Fate | None]] = {}
        self.first: dict[Partition, int] = {}
        self._skips = 0.0 if r.random() < 0.5 else r.choice([0.05, 0.3])
        self._rejects = r.choice([0.0, 0.0, 0.05, 0.2])
        if alone:  # there is nowhere to put what is rejected, and no rule that skips
            self._rejects = 0.0

    def add(self, partition: Partition) -> None:
        """A partition that begins anywhere: what came before is gone by retention."""
        r = self._random
        self.first[partition] = r.choice([0, 0, 0, r.randrange(500), 2**31 + r.randrange(9)])
        self._fates[partition] = []

    def grow(self, partition: Partition, end: int) -> None:
        fates = self._fates[partition]
        r = self._random
        while len(fates) + self.first[partition] < end:
            if self.style in ("transactions", "both") and r.random() < 0.3:
                aborted = r.random() < 0.3
                run = [None if aborted else self._fate() for _ in range(r.randrange(1, 8))]
                fates += [*run, None]  # and the marker
            elif self.style in ("compacted", "both") and r.random() < 0.5:
                fates += [None] * r.randrange(1, 6)  # a hole, at the head as well
            else:
                fates += [self._fate() for _ in range(r.randrange(1, 10))]

    def at(self, partition: Partition, start: int, end: int) -> list[Fate | None]:
        self.grow(partition, end)
        first = self.first[partition]
        return self._fates[partition][start - first : end - first]

    def _fate(self) -> Fate:
        r = self._random
        if r.random() < self._skips:
            return Fate()
        if r.random() < self._rejects and r.random() < 0.4:
            return Fate(lost=True)
        some = 1 if self._alone or r.random() < 0.8 else min(2, len(self._tables))
        tables = frozenset(r.sample(self._tables, some))
        if r.random() < self._rejects:
            rejecting = frozenset(r.sample(sorted(tables), r.randrange(1, len(tables) + 1)))
            return Fate(tables, rejecting)
        return Fate(tables)


# ── a sink's run ────────────────────────────────────────────────────────────────────────────────


class _Clock:
    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing fails here, so nobody waits")


@dataclass
class _Events:
    """`CommitEvents` of a sink in this lake."""

    history: History
    targets: Mapping[str, TableCommitter]
    sink: str
    epoch: int

    def table(self, name: str) -> TableCommitter:
        return self.targets[name]

    def trigger(self, name: str) -> CommitTrigger:
        return CommitTrigger()

    def recorded_tables(self) -> dict[str, str]:
        return {name: table.uuid for name, table in sorted(self.history.tables.items())}

    def index_manifests(self, located: Sequence[Located]) -> list[str]:
        return self.history.index_manifests(located, self.sink, self.epoch)

    def step(self, *_: Any) -> None: ...
    def failed(self, table: str, error: FrazilError, seconds: float) -> None: ...
    def indexed(self, batches: Sequence[StagedBatch]) -> None: ...
    def committed(self, batches: Sequence[StagedBatch]) -> None: ...

    def maintain(self) -> float | None:
        return None


@dataclass
class DeadLetter:
    row: Row
    tables: frozenset[str]


@dataclass
class History:
    """One sink, its tables and its index, from the first batch on. `live()` lets it happen."""

    folder: Path
    seed: object
    real: bool = False
    #: what happened, for whoever looks at a seed
    diary: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.random = random.Random(f"history {self.seed}")
        self.sink = r.choice(["s", "orders", "a.b-c"])
        self.feed = r.choice(["ranges"] * 8 + ["rows", "merged"])
        self.alone = self.feed != "ranges" or r.random() < 0.5
        self.codec = r.choice(["null", "null", "null", "deflate"])
        names = ["db.t"] if self.alone else [f"db.t{i}" for i in range(r.choice([1, 2, 2, 3, 5]))]
        self.dead_letters = "" if self.alone else "db.letters"
        words = ["orders", "t", "a-topic-with-a-long-name"]  # foreign rows say `backfill`
        self.read = r.sample(words, r.choice([1, 1, 1, 2]))
        self.topics = Topics(r, names, self.alone)
        self.tables: dict[str, Table] = {}
        self.index = Index(
            self.folder / "index", "db.index", real=self.real, seed=self.seed, codec=self.codec
        )
        self.branch = r.choice(["main"] * 9 + ["side"]) if self.alone else "main"
        self.names = names
        self._plan = {name: self._shape(name) for name in names}
        self._waiting: list[DeadLetter] = []
        self._pieces = r.choice([1, 1, 2, 3])
        self._friendly = r.choice([0] * 9 + [4])
        #: so many partitions that ledger entries are packed
        self._wide = r.random() < 0.05 and not self.real
        self._partitions = 0
        self._replays = 0
        self._source = ""
        self.position = Cut()  # what has been read
        self.floors: dict[str, Cut] = {}
        self._untold: list[Located] = []

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def live(self, events: int = 0) -> History:
        r = self.random
        for _ in range(r.randrange(60, 120) if self._wide else r.choice([1, 1, 2, 3, 4])):
            self._new_partition()
        self.begin()
        happenings: list[tuple[int, Callable[[], None]]] = [
            (26, self.batch),
            (4, self.begin),
            (2, self._grow),
            (3, self.compact),
            (3, self.foreign),
            (1, self.foreign_removed),
            (1, self.rewrite),
            (2, self.expire),
            (3, self.compact_index),
            (1, self.expire_index),
            (2, self.evolve),
            (1, self.label),
            (2, self.replay),
            (1, self.lose_stage),
            (1, self.rewind),
            (1, self.mistake),
            (self._friendly, self.neighbour),
        ]
        weights = [weight for weight, _ in happenings]
        for _ in range(events or r.choice([4, 8, 12, 18])):
            r.choices([happening for _, happening in happenings], weights)[0]()
        for _ in range(r.randrange(2)):
            self.batch()
        if r.random() < 0.85:
            self._commit()
        while not self._indexed():  # of something that is not there yet nothing can be proven
            self.batch(least=1)
            self._commit()
        return self

    def _indexed(self) -> bool:
        entry = self.own.head().entry
        begun = entry is not None and any(
            offset > self.topics.first.get(partition, 0) for partition, offset in entry.end.items()
        )
        return begun and any(self.entries(name) for name in self.tables)

    def say(self, text: str) -> None:
        self.diary.append(text)

    def begin(self) -> None:
        """A run: claims, and what the run before had staged."""
        pending = self.committer.pending if hasattr(self, "committer") else []
        self._claim()
        claimed = self.own.head().entry
        assert claimed is not None
        staged = chain(claimed.end, pending, self._committed(), claimed.source[1])
        assert len(staged) == len(pending), "a staged batch does not follow from the position"
        pending = staged
        self._unindexed_commits({batch.commit_id for batch in staged}, claimed.end)
        self._look_ahead(staged[-1].end if staged else claimed.end)
        self.say(f"run {self.epoch} begins with {len(pending)} staged batches")
        for batch in pending:
            self.committer.submit(batch, bounded=False)
        if pending and self.random.random() < 0.7:
            self._commit()

    def _committed(self) -> set[str]:
        committed = [entry for name in self.tables for entry, _ in self.entries(name)]
        return {i for entry in committed for i in entry.commit_ids}

    def _claim(self) -> None:
        known = {name: self._target(name, 0) for name in self.tables}
        own = TableCommitter(self.index, "main", self.sink, 0, _Clock(), claimed_first=True)
        heads = [target.head().entry for target in (own, *known.values())]
        self.epoch = 1 + max((head.epoch for head in heads if head), default=0)
        own.epoch = self.epoch
        origin: dict[str, Any] = {"cluster": "c1", "topics": dict.fromkeys(self.read, "id1")}
        start = dict(self.topics.first)
        claimed = own.claim(lambda position: Cut({**start, **position}), **origin)
        assert claimed.snapshot is not None
        assert claimed.entry is not None
        own.set_tag(claimed.snapshot)
        for target in known.values():
            target.epoch = self.epoch
            snapshot = target.claim(**origin).snapshot
            assert snapshot is not None
            target.set_tag(snapshot)
        self.targets = known
        self.own = own
        if not self.position:
            self.position = claimed.entry.end
        self.position = Cut({**claimed.entry.end, **self.position})
        self.number = max(claimed.entry.batches[1] + 1, getattr(self, "number", 0))
        self.committer = self._committer(own, known, claimed.entry.end, self.sink)

    def _committer(
        self, own: TableCommitter, targets: Mapping[str, TableCommitter], position: Cut, sink: str
    ) -> Committer:
        return Committer(
            _Events(self, targets, sink, own.epoch),
            own,
            Progress(position=position),
            BackpressureLimits(1000, 2**60, 2.0**60),
            clock=_Clock(),
            alone=self.alone,
        )

    def index_manifests(self, located: Sequence[Located], sink: str, epoch: int) -> list[str]:
        late: list[Located] = []
        if sink == self.sink:
            late, self._untold = self._untold, []
        return [self.index.stage(self.index.located([*late, *located], f"frazil-{sink}-{epoch}"))]

    def _target(self, name: str, epoch: int, sink: str = "") -> TableCommitter:
        table = self.tables[name]
        # A sink that replays comes late to tables that are there, and claims them first.
        return TableCommitter(
            table, table.branch, sink or self.sink, epoch, _Clock(), claimed_first=bool(sink)
        )

    def batch(self, least: int = 0) -> None:
        """Some ranges, settled and staged; committed now or later, here sooner than there."""
        r = self.random
        size = 4 if self._wide else r.choice([1, 5, 20, 20, 60])
        ranges = []
        for partition, start in self.position.items():
            if partition != BATCHES and (r.random() < 0.8 or least):
                ranges.append(Range(partition, start, start + r.randrange(least, size + 1)))
        ranges = [span for span in ranges if len(span)]
        if not ranges:
            return  # nobody sent anything
        staged = self._staged(ranges)
        self.say(f"batch {staged.number}: {', '.join(map(str, ranges))} for {staged.names}")
        self.committer.submit(staged, bounded=False)
        if r.random() < 0.85:
            self._commit(patient=r.random() < 0.1)

    def _commit(self, patient: bool = False) -> None:
        """`patient`: some tables are left for later, and so is the index where one is."""
        names = sorted({name for pending in self.committer.queue.pending for name in pending.left})
        for name in names:
            if not (patient and self.random.random() < 0.5):
                self.committer.round([name])
        if not (patient and self.random.random() < 0.5):
            self.committer.round([INDEX])
        if self.committer.progress.stuck:
            raise AssertionError(self.committer.progress.stuck)

    def _staged(self, ranges: Sequence[Range]) -> StagedBatch:
        begin = Cut({**{span.partition: span.start for span in ranges}, **self.position})
        if self.feed != "ranges":
            begin = Cut({BATCHES: 0, **begin})
        end = begin.after(ranges)
        rows: dict[str, list[tuple[Partition, list[Row]]]] = {}
        tallies: dict[str, list[RangeCounts]] = {}
        totals = []
        for wanted in ranges:
            total, by_table = self._settled(wanted, rows)
            totals.append(total)
            for name, tally in by_table.items():
                tallies.setdefault(name, []).append(tally)
        prefix = f"frazil-{self.sink}-{self.epoch}-{self.number}"
        source = ("", "")
        if self.feed == "ranges":
            touched = {
                name
                for name, counts in tallies.items()
                if any(t.written or t.rejected for t in counts)
            }
            if self.alone:
                touched = {"db.t"}
        else:
            touched = {"db.t"}
            self._framed(rows, tallies, ranges)
            end = end.after([Range(BATCHES, end[BATCHES], end[BATCHES] + 1)])
            source = (self._source, f'{{"sum": {sum(end.values())}}}')
            self._source = source[1]
        staged = []
        for name in sorted(touched):
            table = self._provide(name)
            files = [
                file
                for chunk in self._chunks(rows.get(name, []))
                for file in table.write(chunk, prefix)
            ]
            staged.append(
                StagedTable(
                    name,
                    table.uuid,
                    table.schemas[-1]["schema-id"],
                    (table.stage(files),) if files else (),
                    (),
                    len(files),
                    1,
                    tuple(tallies.get(name, ())),
                )
            )
        batch = StagedBatch(
            sink=self.sink,
            epoch=self.epoch,
            number=self.number,
            commit_id=self.index.new_uuid(),
            begin=begin,
            end=end,
            topics=dict.fromkeys(self.read, "id1"),
            cluster="c1",
            staged_at_ms=1,
            window_start_ms=self.index.now,
            tables=tuple(staged),
            total=() if self.alone else tuple(totals),
            source=source,
        )
        self.number += 1
        self.position = end
        return batch

    def _settled(
        self, wanted: Range, rows: dict[str, list[tuple[Partition, list[Row]]]]
    ) -> tuple[RangeCounts, dict[str, RangeCounts]]:
        """What becomes of a range: of everything, and in each table above its own floor."""
        partition = wanted.partition
        fates = self.topics.at(partition, wanted.start, wanted.end)
        seen = [wanted.start + i for i, fate in enumerate(fates) if fate is not None]

        def tally(start: int, name: str = "") -> RangeCounts:
            pairs = [(o, fates[o - wanted.start]) for o in seen if o >= start]
            settled = [(o, fate) for o, fate in pairs if fate is not None]
            if not name:
                written = [o for o, f in settled if f.tables and not f.rejected]
                rejected = [o for o, f in settled if f.rejected]
            elif name == self.dead_letters:
                written, rejected = [o for o, f in settled if f.rejected], []
            else:
                written = [o for o, f in settled if name in f.tables - f.rejecting and not f.lost]
                rejected = [o for o, f in settled if name in f.rejecting]
            if name and written:
                rows.setdefault(name, []).append((partition, [(*partition, o) for o in written]))
            times = [event_time(o) for o in written] if name else []
            return RangeCounts(
                Range(partition, start, wanted.end),
                len(written),
                len(rejected),
                len(settled) - len(written) - len(rejected),
                wanted.end - start - len(settled),
                seen=(settled[0][0], settled[-1][0]) if settled else None,
                watermark=(min(times), max(times)) if times else None,
            )

        tallies = {}
        for name in [*self.names, *([self.dead_letters] if self.dead_letters else [])]:
            floor = max(wanted.start, self.floors.get(name, Cut()).get(partition, 0))
            if floor < wanted.end:
                tallies[name] = tally(floor, name)
        for o in seen:
            fate = fates[o - wanted.start]
            if fate is not None and fate.rejected and self.dead_letters:
                self._waiting.append(DeadLetter((*partition, o), fate.rejecting))
        return tally(wanted.start), tallies

    def _framed(
        self,
        rows: dict[str, list[tuple[Partition, list[Row]]]],
        tallies: dict[str, list[RangeCounts]],
        ranges: Sequence[Range],
    ) -> None:
        """As a DataFrame brings it: rows of all partitions together; or rows that are none of the
        records."""
        r = self.random
        many = 0
        if self.feed == "merged":
            tallies["db.t"] = [RangeCounts(span, 0, merged=len(span)) for span in ranges]
            many = r.randrange(0, 9)
            rows["db.t"] = [(BATCHES, [(None, None, None)] * many)] if many else []
        else:
            together = [row for _, chunk in rows.get("db.t", []) for row in chunk]
            r.shuffle(together)
            rows["db.t"] = [(BATCHES, together)] if together else []
        number = self.position.get(BATCHES, 0)
        tallies["db.t"].append(RangeCounts(Range(BATCHES, number, number + 1), many))

    def _chunks(self, settled: Sequence[tuple[Partition, list[Row]]]) -> Iterator[list[Row]]:
        """A range may have been planned in pieces, and each piece has files of its own."""
        for _, rows in settled:
            pieces = min(self._pieces, len(rows))
            for i in range(pieces):
                yield rows[len(rows) * i // pieces : len(rows) * (i + 1) // pieces]

    def _shape(self, name: str) -> dict[str, Any]:
        r = self.random
        plain = Names("_topic", "_topic_partition", "_offset", "_timestamp")
        other = Names("t", "p", "o", "at")
        return {
            "names": other if r.random() < 0.2 else plain,
            "optional": r.random() < 0.5 or self.feed == "merged",
            "split": r.random() < 0.25,
            "branch": self.branch,
        }

    def _provide(self, name: str) -> Table:
        """The table, made when it is first needed. Who made it need not claim it."""
        if name not in self.tables:
            shape = self._plan.get(name) or {
                "names": Names("topic", "partition", "offset", "timestamp"),
                "optional": False,
                "split": False,
                "branch": "main",
            }
            self.tables[name] = Table(
                self.folder / name, name, real=self.real, seed=self.seed, codec=self.codec, **shape
            )
            self.targets[name] = self._target(name, self.epoch)
        return self.tables[name]

    # ── trouble ──────────────────────────────────────────────────────────────────────────────

    def lose_stage(self) -> None:
        """A run ends, and so do its batch records. What tables have and the index has not comes
        from the ledger; the rest is read again, by each table from its own floor on."""
        if not self.committer.pending:
            return
        self._claim()
        claimed = head(self.index.history("main"), self.sink).entry
        assert claimed is not None
        self.say(f"run {self.epoch} begins without the records of what was staged")
        self.position, self.number = claimed.end, claimed.batches[1] + 1
        self._source = claimed.source[1]
        if self.alone:
            lost = [
                index.rebuilt(entry, name, self.tables[name].uuid)
                for name, target in self.targets.items()
                for entry, _ in target.entries_after(claimed.end)
                if entry.ranges
            ]
            for batch in chain(claimed.end, lost, self._committed(), claimed.source[1]):
                self.committer.submit(batch, bounded=False)
                self.position, self.number = batch.end, batch.number + 1
                self._source = batch.source[1]
            self._commit()
        else:
            self._unindexed_commits(set(), claimed.end)
            self._look_ahead(claimed.end)
        self._reads_again()

    def _reads_again(self) -> None:
        self.position = Cut({**self.topics.first, **self.position})
        # What waits for a replay was rejected by a batch that is there.
        self._waiting = [
            dead_letter
            for dead_letter in self._waiting
            if dead_letter.row[2] < self.position[Partition(dead_letter.row[0], dead_letter.row[1])]  # type: ignore
        ]

    def _look_ahead(self, ahead: Cut) -> None:
        """As `Recovery._look_ahead`: a table takes nothing that it has."""
        ends = {name: target.head().entry for name, target in self.targets.items()}
        self.floors = {
            name: Cut({p: o for p, o in entry.end.items() if o > ahead.get(p, 0)})
            for name, entry in ends.items()
            if entry is not None and not self.alone
        }

    def rewind(self) -> None:
        """All tables and the index go back to an earlier batch, as `frazil rewind` does it."""
        if self._replayed():
            return  # refused: what was replayed may be dead letters of batches that go
        tables = {name: (table, table.branch) for name, table in self.tables.items()}
        doing = RewindSteps(
            self.sink,
            self.index,
            tables,
            rows=self.index.rows,
            staged=lambda: [(batch.file_name, batch) for batch in self.committer.pending],
            without=self._without,
            clock=_Clock(),
        )
        doing.read()
        last = doing.state.timeline.last.batch
        choice = doing.choice(doing.state.timeline.at(self.random.randrange(-1, last + 1)))
        if choice.trouble or choice.expired or choice.foreign or not choice.moves:
            return
        doing.claim()
        doing.read()
        choice = doing.choice(doing.state.timeline.at(choice.boundary.batch))
        doing.run(choice, f"batch:{choice.boundary.batch}", lambda _: None)
        self.say(f"rewound to batch {choice.boundary.batch}")
        del self.committer
        self.position, self.number, self._untold = Cut(), 0, []
        self._claim()
        claimed = self.own.head().entry
        assert claimed is not None
        self._source = claimed.source[1]
        self._look_ahead(claimed.end)
        self._reads_again()

    def _replayed(self) -> bool:
        return f"{self.dead_letters}_replayed" in self.tables

    def _without(self, batch: int, epoch: int) -> IndexRemoval:
        """The index without batches behind one: files that go, and a staged one that comes."""
        base = next(self.index.history("main"))
        removed, kept = [], []
        for file in self.index.live():
            rows = file["rows"].cast(index.COLUMNS)
            gone = pc.and_(pc.equal(rows["sink"], self.sink), pc.greater(rows["batch"], batch))
            if pc.any(gone).as_py():
                removed.append(file)
                kept.append(rows.filter(pc.invert(gone)))
        rows = pa.concat_tables(kept) if kept else index.COLUMNS.empty_table()
        new = [self.index.stage([self.index.file(rows, "rewound")])] if len(rows) else []
        return IndexRemoval(base.id, removed, new)

    def mistake(self) -> None:
        """Somebody deletes a file of ours, sees it, and rolls that back."""
        table = self._some()
        if table is not None:
            before = table.refs[table.branch]
            file = self.random.choice(table.live(table.branch))
            table.snapshot({}, (), {file["file-path"]}, "delete", table.branch)
            table.rollback(before, table.branch)
            self.say(f"{table.name}: a mistake is undone")

    def _unindexed_commits(self, staged: set[str], position: Cut) -> None:
        """As `Sink._left_untold`: what tables have and no staged batch tells of, the index gets
        from their ledgers, with the next batch."""
        indexed = {
            (row["commit_id"], row["table_name"])
            for row in self.index.rows().select(["commit_id", "table_name"]).to_pylist()
        }
        self._untold = []
        for name, target in self.targets.items() if not self.alone else ():
            for entry, snapshot in target.entries_after(position):
                known = all(
                    (gone := entry.counts(span.partition).elsewhere) == 0
                    or span.start + gone <= position.get(span.partition, 0)
                    for span in entry.ranges
                )
                if entry.ranges and known and not staged & set(entry.commit_ids):
                    batch = index.rebuilt(entry, name, self.tables[name].uuid)
                    if (batch.commit_id, name) not in indexed:
                        self._untold.append((batch, {name: snapshot}))

    def replay(self) -> None:
        """Dead letters, once more: a sink of its own over the same tables."""
        r = self.random
        done = self.own.head().entry
        ready = [
            dead_letter
            for dead_letter in self._waiting
            if done
            and dead_letter.tables
            and dead_letter.tables <= set(self.tables)
            and dead_letter.row[2]
            < done.end.get(Partition(dead_letter.row[0], dead_letter.row[1]), 0)  # type: ignore
        ]
        if not ready:
            return
        chosen = r.sample(ready, r.randrange(1, len(ready) + 1))
        sink, notes = f"{self.sink}.replay", f"{self.dead_letters}_replayed"
        own = TableCommitter(self.index, "main", sink, 0, _Clock(), claimed_first=True)
        targets = {name: self._target(name, 0, sink) for name in self.tables}
        heads = [target.head() for target in (own, *targets.values())]
        assert all(head.complete for head in heads)
        epoch = 1 + max((head.entry.epoch for head in heads if head.entry), default=0)
        for target in (own, *targets.values()):
            target.epoch = epoch
            began = own is target
            claimed = target.claim((lambda c: Cut({BATCHES: 0, **c})) if began else (lambda c: c))
            assert claimed.snapshot is not None
            assert claimed.entry is not None
            target.set_tag(claimed.snapshot)
            if began:
                number, before = claimed.entry.end[BATCHES], claimed.entry.batches[1] + 1
                position = claimed.entry.end
        if notes not in self.tables:
            self._provide(notes)
            targets[notes] = self._target(notes, epoch, sink)
        self._waiting = [dead_letter for dead_letter in self._waiting if dead_letter not in chosen]
        prefix = f"frazil-{sink}-{epoch}-{before}"
        rows: dict[str, list[Row]] = {}
        for dead_letter in sorted(chosen, key=lambda dead_letter: dead_letter.row):
            for name in dead_letter.tables:
                rows.setdefault(name, []).append(dead_letter.row)
            rows.setdefault(notes, []).append(dead_letter.row)
        counted = Range(BATCHES, number, number + 1)
        staged = [
            StagedTable(
                name,
                self.tables[name].uuid,
                0,
                (self.tables[name].stage(self.tables[name].write(table_rows, prefix)),),
                (),
                1,
                1,
                (RangeCounts(counted, len(table_rows)),),
            )
            for name, table_rows in sorted(rows.items())
        ]
        batch = StagedBatch(
            sink=sink,
            epoch=epoch,
            number=before,
            commit_id=self.index.new_uuid(),
            begin=Cut({BATCHES: number}),
            end=Cut({BATCHES: number + 1}),
            topics={},
            cluster="",
            staged_at_ms=1,
            window_start_ms=1,
            tables=tuple(staged),
            total=(RangeCounts(counted, len(chosen)),),
        )
        committer = self._committer(own, targets, position, sink)
        committer.submit(batch, bounded=False)
        for name in rows:
            committer.round([name])
        committer.round([INDEX])
        assert not committer.progress.stuck, committer.progress.stuck
        self.say(f"{len(chosen)} dead letters are replayed")

    # ── what others do ───────────────────────────────────────────────────────────────────────

    def _new_partition(self) -> Partition:
        topic = self.read[self._partitions % len(self.read)]
        new = Partition(topic, self._partitions // len(self.read))
        self.topics.add(new)
        self._partitions += 1
        return new

    def _grow(self) -> None:
        """A partition more; the stream goes on, and finds it while it runs."""
        if self._partitions < 6:
            new = self._new_partition()
            self.position = Cut({**self.position, new: self.topics.first[new]})
            self.say(f"{new} is new")

    def _some(self) -> Table | None:
        filled = [table for _, table in sorted(self.tables.items()) if table.live(table.branch)]
        return self.random.choice(filled) if filled else None

    def compact(self) -> None:
        r = self.random
        table = self._some()
        if table is None:
            return
        live = table.live(table.branch)
        files = live if r.random() < 0.6 else r.sample(live, r.randrange(1, len(live) + 1))
        rows = [row for file in files for row in file["rows"]]
        how = r.choice(["by partition", "by partition", "mixed", "mixed", "unmeasured"])
        blind = how == "unmeasured"
        r.shuffle(rows)
        parts: dict[Any, list[Row]] = {}
        for i, row in enumerate(rows):
            key = row[:2] if how == "by partition" else i * 2 // len(rows)
            parts.setdefault(key, []).append(row)
        new = [
            file
            for part in parts.values()
            for file in table.write(part, "00000-1-spark", whole=False, measured=not blind)
        ]
        table.snapshot({}, new, {file["file-path"] for file in files}, "replace", table.branch)
        self.say(f"{table.name}: {len(files)} files are compacted into {len(new)}, {how}")

    def foreign(self) -> None:
        """Rows of somebody else: without an offset, or with a topic that no sink reads."""
        r = self.random
        table = self._some()
        if table is None or self.feed == "merged":
            return
        many = r.randrange(1, 9)
        null = table.optional and r.random() < 0.7
        rows: list[Row] = [(None, None, None) if null else (BACKFILL, 0, i) for i in range(many)]
        files = table.write(rows, "00000-7-backfill", whole=False)
        table.snapshot({}, files, branch=table.branch)
        self.say(f"{table.name}: {many} foreign rows {'without offsets' if null else 'of a topic'}")

    def neighbour(self) -> None:
        """Another sink, whose index is elsewhere, writes records of its own topic."""
        r = self.random
        table = self._some()
        if table is None or self.feed == "merged":
            return
        target = TableCommitter(table, table.branch, NEIGHBOUR, 0, _Clock(), claimed_first=True)
        before = target.head().entry
        target.epoch = 1 + (before.epoch if before else 0)
        partition = Partition(NEIGHBOUR, 0)
        claimed = target.claim(lambda end: Cut({partition: 0, **end}))
        assert claimed.entry is not None
        begin = claimed.entry.end
        wanted = Range(partition, begin[partition], begin[partition] + r.randrange(1, 20))
        rows: list[Row] = [(*partition, offset) for offset in range(wanted.start, wanted.end)]
        number = claimed.entry.batches[1] + 1
        files = table.write(rows, f"frazil-{NEIGHBOUR}-{target.epoch}-{number}")
        staged = StagedTable(
            table.name,
            table.uuid,
            0,
            (table.stage(files),),
            (),
            len(files),
            1,
            (RangeCounts(wanted, len(rows)),),
        )
        batch = StagedBatch(
            sink=NEIGHBOUR,
            epoch=target.epoch,
            number=number,
            commit_id=self.index.new_uuid(),
            begin=begin,
            end=begin.after([wanted]),
            topics={},
            cluster="",
            staged_at_ms=1,
            window_start_ms=1,
            tables=(staged,),
        )
        entry = entry_of([batch], table.name, target.epoch)
        target.set_tag(target.commit(staged.manifests, entry))
        self.say(f"{table.name}: another sink writes {wanted}")

    def foreign_removed(self) -> None:
        """Whoever brought rows may take them back."""
        table = self._some()
        files = [
            file
            for file in (table.live(table.branch) if table else [])
            if all(row[0] in (None, BACKFILL) for row in file["rows"])
        ]
        if table is None or not files or self.feed == "merged":
            return
        file = self.random.choice(files)
        table.snapshot({}, (), {file["file-path"]}, "delete", table.branch)
        self.say(f"{table.name}: foreign rows are taken back")

    def rewrite(self) -> None:
        table = self._some()
        if table is not None:
            table.rewrite_manifests(table.branch)
            self.say(f"{table.name}: manifests are rewritten")

    def expire(self) -> None:
        table = self._some()
        if table is None:
            return
        recent = [snapshot.id for snapshot in table.history(table.branch)]
        kept = recent[: self.random.choice([1, 1, 2, len(recent) // 2 + 1])]
        table.expire([*kept, *(i for i in [table.refs.get("main")] if i)])
        self.say(f"{table.name}: {len(recent) - len(kept)} snapshots are expired")

    def compact_index(self) -> None:
        live = self.index.live()
        if len(live) < 2:
            return
        many = len(live) if self.random.random() < 0.6 else self.random.randrange(2, len(live) + 1)
        some = live[:many]
        rows = pa.concat_tables(file["rows"].cast(index.COLUMNS) for file in some)
        keys = ["table_name", "topic", "partition", "start_offset"]
        ordered = rows.sort_by([(key, "ascending") for key in keys])
        new = self.index.file(ordered, "compacted")
        self.index.snapshot({}, [new], {file["file-path"] for file in some}, "replace")
        self.say(f"the index's {len(some)} files are one")

    def expire_index(self) -> None:
        recent = [snapshot.id for snapshot in self.index.history("main")]
        self.index.expire(recent[: self.random.choice([1, 3])])
        self.say("snapshots of the index are expired")

    def evolve(self) -> None:
        table = self._some()
        if table is None:
            return

        def change(schema: dict[str, Any]) -> None:
            most = max(field["id"] for field in schema["fields"])
            new = {"id": most + 1, "name": f"c{most}", "required": False, "type": "string"}
            schema["fields"].append(new)

        table.evolve(change)
        self.say(f"{table.name}: a column is added")

    def label(self) -> None:
        """Tags and branches of others, which lead elsewhere."""
        table = self._some()
        if table is None:
            return
        table.tag("release", self.random.choice(sorted(table.snapshots)))
        if self.random.random() < 0.5 and "lab" not in table.refs:
            table.refs["lab"] = table.refs[table.branch]
            live = table.live("lab")
            table.snapshot({}, (), {self.random.choice(live)["file-path"]}, "delete", "lab")
        self.say(f"{table.name}: tags and branches")

    # ── what is there ────────────────────────────────────────────────────────────────────────

    def entries(self, name: str, sink: str = "") -> list[tuple[LedgerEntry, Snapshot]]:
        """What the ledger still has, oldest first; claims left out."""
        table = self.tables[name]
        pairs = entries(table.history(table.branch), sink or self.sink)
        return [(entry, snapshot) for entry, snapshot in pairs if entry.ranges][::-1]

    def unclear(self, table: Table) -> list[File]:
        """Live files that do not say whose their rows are: without bounds, or of several topics, or
        of one whose name was cut, or with rows of ours that have no offsets either."""
        return [
            file
            for file in table.live(table.branch)
            if "lower-bounds" not in file
            or len(_topic_bounds(file, table)) > 1
            or self.feed == "merged"
        ]

    def untold(self, table: Table) -> bool:
        """Is `cannot tell` allowed? Whose rows they are, files do not say, and others
        wrote here or took rows away, or may have done so before the oldest snapshot left."""
        return self._stranger(table) or (
            bool(self.unclear(table)) and (self._lossy(table) or self._others(table, "added"))
        )

    def masked(self, table: Table) -> int:
        """Foreign rows that nobody can tell from the sink's: so many of its own may be missing."""
        if not self._lossy(table):
            return 0
        if self._stranger(table):
            return sum(file["record-count"] for file in table.live(table.branch))
        return sum(
            row[0] == BACKFILL or (row[0] is None and "lower-bounds" not in file)
            for file in self.unclear(table)
            for row in file["rows"]
        )

    def _lossy(self, table: Table) -> bool:
        """Is it unknown, of all rows together, how many of them are not the sink's?"""
        chain = list(table.history(table.branch))
        return chain[-1].parent is not None or self._others(table, "deleted")

    def _stranger(self, table: Table) -> bool:
        """Did another sink write here, and part of its ledger is gone, or files mix their rows?"""
        if self.tag_of(table, NEIGHBOUR) not in table.refs:
            return False
        if self.tag_of(table, f"{self.sink}.replay") in table.refs:
            return True  # of three, two count records and one counts batches
        mixed = any(len({row[:2] for row in f["rows"]}) > 1 for f in table.live(table.branch))
        chain = list(table.history(table.branch))
        return mixed or bool(self.unclear(table)) or chain[-1].parent is not None

    def _others(self, table: Table, verb: str) -> bool:
        keys = [f"{verb}-records", *(["added-delete-files"] if verb == "deleted" else [])]
        return any(
            "frazil.sink" not in snapshot.summary
            and snapshot.operation != "replace"
            and any(key in snapshot.summary for key in keys)
            for snapshot in table.history(table.branch)
        )

    def save(self, complete: bool = False) -> dict[str, str]:
        """Table → metadata file; the index too."""
        every: list[Metadata] = [*self.tables.values(), self.index]
        return {table.name: table.save(complete) for table in every}

    def tag_of(self, table: Table, sink: str = "") -> str:
        tag = ledger_tag(sink or self.sink)
        return tag if table.branch == "main" else f"{tag}/{table.branch}"
