"""Tables as a start would leave them: every commit is applied in memory, and noted.

In: a function that opens tables read-only, and the catalog's settings. Out: `MemoryCatalog`, to
which the code of a start can claim, create and evolve; and the changes of each table. The values
are those of Iceberg (its JSON of schema, spec and sort order). Nothing is written anywhere, and no
JVM is needed. Runs on the driver.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table.update.schema import UpdateSchema

from frazil import format_version
from frazil.errors import Conflict
from frazil.iceberg.file_io import FileStore
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import Check, SchemaUpdate, Snapshot

UNPARTITIONED = '{"spec-id": 0, "fields": []}'


@dataclass(slots=True)
class TableChanges:
    """What a start would change of one table."""

    created: bool = False
    updates: list[SchemaUpdate] = field(default_factory=list)
    #: the schema before the first update
    before: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    #: it gets a spec without partitions, beside its own
    unpartitioned: bool = False


class MemoryTable:
    """An `iceberg.table.Table` over a table that is only read, or over none: as far as a start
    uses one."""

    def __init__(self, name: str, base: ReadOnlyTable | None, metadata: Mapping[str, Any]) -> None:
        """`metadata`: of the table, as in Iceberg's metadata file."""
        self.name = name
        self._base = base
        self.made = base is None
        self.uuid = str(metadata["table-uuid"])
        self.location = str(metadata["location"]).rstrip("/")
        self.properties: dict[str, str] = dict(metadata.get("properties") or {})
        self.format_version = int(metadata["format-version"])
        current = metadata.get("current-schema-id", 0)
        schemas = metadata.get("schemas") or [metadata["schema"]]
        ordered = sorted(schemas, key=lambda schema: schema.get("schema-id", 0) == current)
        #: oldest first; the current one is the last
        self.schemas = [json.dumps(schema) for schema in ordered]
        self._specs = metadata.get("partition-specs") or [json.loads(UNPARTITIONED)]
        self.spec = json.dumps(_with_id(self._specs, "spec-id", metadata.get("default-spec-id", 0)))
        order = _with_id(
            metadata.get("sort-orders") or [], "order-id", metadata.get("default-sort-order-id", 0)
        )
        self.sort_order = json.dumps(order) if order and order.get("fields") else ""
        self._snapshots: dict[int, Snapshot] = {}
        self._refs: dict[str, int] = {}
        self.changes = TableChanges(created=base is None)

    # ── reads ────────────────────────────────────────────────────────────────────────────────────

    @property
    def schema(self) -> str:
        return self.schemas[-1]

    @property
    def schema_id(self) -> int:
        return int(json.loads(self.schema).get("schema-id", 0))

    @property
    def io_properties(self) -> Mapping[str, str]:
        return self._base.store.properties if self._base else {}

    @property
    def readonly(self) -> Any:
        return self._base or _NoRows()

    def refresh(self) -> None:
        """Does nothing: no other writer changes this state."""

    def history(self, branch: str) -> Iterator[Snapshot]:
        at = self._refs.get(branch)
        while at is not None and at in self._snapshots:
            yield self._snapshots[at]
            at = self._snapshots[at].parent
        if self._base is not None:
            yield from self._base.history(branch)

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        return self._base.expired(snapshot_id) if self._base else iter(())

    def carries(self, branch: str, snapshot_id: int) -> bool:
        return snapshot_id in self._snapshots or (
            self._base is not None and self._base.carries(branch, snapshot_id)
        )

    def tagged(self, tag: str) -> Snapshot | None:
        if tag in self._refs:
            return self._snapshots[self._refs[tag]]
        return self._base.tagged(tag) if self._base else None

    def tags(self) -> list[str]:
        return list(self._base.tags()) if self._base else []

    def listing(self, prefix: str) -> list[str]:
        return self._base.listing(prefix) if self._base else []

    def fetch(self, path: str) -> bytes:
        assert self._base is not None  # nothing was listed
        return self._base.fetch(path)

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        """None: staged files are looked for by the start itself, before they are committed."""
        return []

    # ── changes ──────────────────────────────────────────────────────────────────────────────────

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
        history = list(self.history(branch))
        if refusal := check(iter(history)):
            raise Conflict(f"cannot commit to table {self.name}: {refusal}")
        parent = history[0] if history else None
        snapshot = Snapshot(
            id=-1 - len(self._snapshots),  # Iceberg's own are positive
            parent=parent.id if parent else None,
            sequence=parent.sequence + 1 if parent else 1,
            timestamp_ms=int(time.time() * 1000),
            operation="append",
            summary=dict(summary),
        )
        self._snapshots[snapshot.id] = snapshot
        self._refs[branch] = snapshot.id

    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None:
        self._refs[tag] = snapshot_id

    def untag(self, tag: str) -> None:
        self._refs.pop(tag, None)

    def set_property(self, key: str, value: str) -> None:
        self.properties[key] = value
        if not self.changes.created:
            self.changes.properties[key] = value

    def evolve(self, plan: Callable[[str], SchemaUpdate]) -> None:
        if update := plan(self.schema):
            self.changes.before = self.changes.before or self.schema
            self.changes.updates.append(update)
            self.schemas.append(updated(self.schema, update))

    def unpartitioned_spec(self) -> str:
        for spec in self._specs:
            if not spec["fields"]:
                return json.dumps(spec)
        self.changes.unpartitioned = True
        self._specs.append({"spec-id": 1 + max(s["spec-id"] for s in self._specs), "fields": []})
        return json.dumps(self._specs[-1])


class _NoRows:
    """The rows of a table that does not exist yet."""

    def rows(self, columns: Sequence[str], where: Any = None) -> pa.Table:
        return pa.table({name: pa.nulls(0) for name in columns})


class MemoryCatalog:
    """A catalog whose tables are opened once and changed in memory only."""

    def __init__(
        self,
        opened: Callable[[str], ReadOnlyTable | None],
        location: Callable[[str], str],
        staging: FileStore,
    ) -> None:
        """`location`: where the catalog would put a new table; empty: unknown. `staging`: the store
        of a staging folder that is no table's."""
        self._opened = opened
        self._location = location
        self._staging = staging
        self.tables: dict[str, MemoryTable] = {}

    def load(self, name: str) -> MemoryTable | None:
        if name not in self.tables:
            base = self._opened(name)
            if base is None:
                return None
            # Two threads may have opened it: both get the first one.
            self.tables.setdefault(name, MemoryTable(name, base, base.metadata))
        return self.tables[name]

    def create(
        self,
        name: str,
        schema: str,
        spec: str,
        *,
        properties: Mapping[str, str],
        location: str = "",
        sort_order: str = "",
    ) -> MemoryTable:
        known = {key: value for key, value in properties.items() if key != "format-version"}
        order = json.loads(sort_order) if sort_order else {"order-id": 0, "fields": []}
        metadata = {
            "format-version": properties.get("format-version", "2"),
            "table-uuid": str(uuid.uuid4()),
            "location": location or self._location(name),
            "properties": {**known, format_version.KEY: format_version.TABLE},
            "schema": json.loads(schema),
            "partition-specs": [json.loads(spec)],
            "default-spec-id": json.loads(spec).get("spec-id", 0),
            "sort-orders": [order],
            "default-sort-order-id": order["order-id"],
        }
        self.tables[name] = _Staged(name, metadata, self._staging)
        return self.tables[name]


class _Staged(MemoryTable):
    """A table that would be created. Batches may be staged already, in a folder of their own."""

    def __init__(self, name: str, metadata: Mapping[str, Any], staging: FileStore) -> None:
        super().__init__(name, None, metadata)
        self._staging = staging

    def listing(self, prefix: str) -> list[str]:
        return [f"{prefix.rstrip('/')}/{name}" for name in sorted(self._staging.names(prefix))]

    def fetch(self, path: str) -> bytes:
        return self._staging.read(path)


def updated(schema: str, update: SchemaUpdate) -> str:
    """The schema with the changes, as Iceberg would have it."""
    current = Schema.model_validate_json(schema)
    # pyiceberg asks a transaction for the partitions to check and for the next id: given here.
    metadata = SimpleNamespace(partition_specs=(), schemas=(current,))
    transaction = cast(Any, SimpleNamespace(table_metadata=metadata))
    change = UpdateSchema(transaction, allow_incompatible_changes=True, schema=current)
    for path, name in update.rename:
        change.rename_column(path, name)
    for path in update.relax:
        change.make_column_optional(path)
    for path, kind in update.widen:
        change.update_column(path, _first_type(kind))
    for path, name, kind in update.add:
        change.add_column((*filter(None, path.split(".")), name), _first_type(kind))
    applied = change._apply()
    names = update.identifier if update.rename else current.identifier_field_names()
    ids = [applied.find_field(name).field_id for name in sorted(names)]
    return str(_identified(applied, ids).model_dump_json())


def _identified(schema: Schema, identifier: Sequence[int]) -> Schema:
    text = json.loads(schema.model_dump_json())
    return Schema.model_validate({**text, "identifier-field-ids": list(identifier)})


def _first_type(schema: str) -> Any:
    """The type in Iceberg's JSON of a schema with one column."""
    return Schema.model_validate_json(schema).fields[0].field_type


def _with_id(items: Sequence[Mapping[str, Any]], key: str, number: int) -> Any:
    return next((item for item in items if item.get(key) == number), items[0] if items else None)
