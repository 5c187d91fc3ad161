"""The metadata of a table, through Iceberg's Java API: reads it, and changes it without a snapshot.

`JavaTableState` reads: schema, spec, properties, snapshots, references. `JavaTableUpdates` changes
schema, spec, properties and references; each change is one commit, applied whole or not at all.
Plain Python values in and out. Errors are translated by `iceberg.java_errors`. Runs on the driver.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from py4j.protocol import Py4JError, Py4JJavaError

from frazil import format_version
from frazil.errors import CommitStateUnknown, ConfigError, Conflict, IdentityMismatch
from frazil.iceberg.java_errors import causes, translated
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import SchemaUpdate, Snapshot
from frazil.ledger import entry

_EVOLUTIONS = 5  # attempts to change a schema while other writers change it too


class CatalogAccess(Protocol):
    """What the handle of a table uses of the catalog that opened it (`java.JavaCatalog`)."""

    _jvm: Any
    _iceberg: Any

    def open(self, table: str) -> Any: ...

    def changed(self, table: str) -> None: ...

    def to_dict(self, properties: Any) -> dict[str, str]: ...

    def to_snapshot(self, snapshot: Any) -> Snapshot: ...


class _property(property):
    """A property that is read from Java; a table that is gone raises one of our errors."""

    def __get__(self, table: Any, kind: Any = None) -> Any:
        if table is None:
            return self
        with translated(f"read table {table.name}"):
            return super().__get__(table, kind)


class JavaTableState:
    """The current state of one table, and its history."""

    def __init__(
        self, catalog: CatalogAccess, name: str, table: Any, *, made: bool = False
    ) -> None:
        self.name = name
        self.made = made  # created by us, just now: no one else has written to it before
        self._catalog = catalog
        self._iceberg = catalog._iceberg
        self._table = table
        self.uuid: str = table.uuid().toString()
        format_version.check_table(name, table.properties().get(format_version.KEY))
        #: properties that ledger entries refer to
        self._entry_properties: dict[str, str] = {}

    def refresh(self) -> None:
        with translated(f"refresh table {self.name}"):
            try:
                self._table.refresh()
                uuid = self._table.uuid().toString()
            except Py4JJavaError as error:
                names, fact = causes(error.java_exception)
                if "NullPointerException" in names:
                    # A handle that found its table missing does not notice that it exists again.
                    self._table = self._catalog.open(self.name)
                    uuid = self._table.uuid().toString()
                elif "UUID does not match" in fact:  # Iceberg's own check
                    uuid = fact.rpartition("=")[2]
                else:
                    raise
        if uuid != self.uuid:
            raise IdentityMismatch(
                f"cannot refresh table {self.name}: it was dropped and recreated; "
                f"expected uuid {self.uuid}, found {uuid}"
            )

    @_property
    def location(self) -> str:
        return str(self._table.location()).rstrip("/")

    @_property
    def schema(self) -> str:
        return str(self._iceberg.SchemaParser.toJson(self._table.schema()))

    @_property
    def schema_id(self) -> int:
        return int(self._table.schema().schemaId())

    @_property
    def schemas(self) -> list[str]:
        """All schemas that the table still has, oldest first."""
        schemas = self._table.schemas()
        return [str(self._iceberg.SchemaParser.toJson(schemas[i])) for i in sorted(schemas)]

    @_property
    def spec(self) -> str:
        return str(self._iceberg.PartitionSpecParser.toJson(self._table.spec()))

    @_property
    def sort_order(self) -> str:
        """Empty if there is none."""
        order = self._table.sortOrder()
        return "" if order.isUnsorted() else str(self._iceberg.SortOrderParser.toJson(order))

    @_property
    def properties(self) -> dict[str, str]:
        return self._catalog.to_dict(self._table.properties())

    @_property
    def format_version(self) -> int:
        return int(self._iceberg.TableUtil.formatVersion(self._table))

    @_property
    def metadata_file(self) -> str:
        return str(self._table.operations().current().metadataFileLocation())

    def metadata_path(self, name: str) -> str:
        """The location of a metadata file of that name (`write.metadata.path`)."""
        with translated(f"read table {self.name}"):
            return str(self._table.operations().metadataFileLocation(name))

    @property
    def readonly(self) -> ReadOnlyTable:
        """The table in the state of its current metadata file."""
        self.refresh()
        return ReadOnlyTable(self.name, self.metadata_file, self.io_properties)

    @property
    def io_properties(self) -> dict[str, str]:
        """Properties for the executors' file IO. They may hold credentials: never log them."""
        try:
            return self._catalog.to_dict(self._table.io().properties())
        except Py4JError:  # a FileIO need not have properties
            return {}

    def history(self, branch: str) -> Iterator[Snapshot]:
        with translated(f"read the history of table {self.name}"):
            snapshot = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            while snapshot is not None:
                yield self._read(snapshot)
                parent = snapshot.parentId()
                snapshot = None if parent is None else self._table.snapshot(parent)

    def expired(self, snapshot_id: int) -> Iterator[Snapshot]:
        # The newest file that has a snapshot also has those of its ancestors that were not expired
        # by then.
        with translated(f"read earlier metadata of table {self.name}"):
            parse, io = self._iceberg.TableMetadataParser.read, self._table.io()
            files = [
                str(previous.file())
                for previous in self._table.operations().current().previousFiles()
            ]
            wanted: int | None = snapshot_id
            while wanted is not None and files:
                try:
                    metadata = parse(io, files.pop())
                except Py4JJavaError as error:
                    if "NotFoundException" in causes(error.java_exception)[0]:
                        return  # removed, and so are all older ones
                    raise
                while wanted is not None and (snapshot := metadata.snapshot(wanted)) is not None:
                    yield self._read(snapshot, metadata)
                    parent = snapshot.parentId()
                    wanted = None if parent is None else int(parent)

    def carries(self, branch: str, snapshot_id: int) -> bool:
        with translated(f"read the manifests of table {self.name}"):
            io = self._table.io()
            manifests = list(self._table.snapshot(snapshot_id).allManifests(io))
            newest = max((int(manifest.sequenceNumber()) for manifest in manifests), default=0)
            wanted = {
                str(manifest.path())
                for manifest in manifests
                if int(manifest.sequenceNumber()) == newest
            }
            head = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            listed = {str(manifest.path()) for manifest in head.allManifests(io)}
            return not wanted or bool(wanted & listed)

    def tagged(self, tag: str) -> Snapshot | None:
        with translated(f"read tag {tag} of table {self.name}"):
            reference = self._table.refs().get(tag)
            if reference is None:
                return None
            snapshot = self._table.snapshot(reference.snapshotId())
            return None if snapshot is None else self._read(snapshot)

    def _read(self, snapshot: Any, metadata: Any = None) -> Snapshot:
        """A snapshot, with the properties that its ledger entry refers to. Property names contain
        the digest of the text: a property is never read twice."""
        parsed = self._catalog.to_snapshot(snapshot)
        wanted = entry.referred(parsed.summary)
        if not self._entry_properties.keys() >= set(wanted):
            properties = self._table.properties() if metadata is None else metadata.properties()
            self._entry_properties |= entry.split(self._catalog.to_dict(properties))[1]
        return replace(parsed, summary=entry.joined(parsed.summary, self._entry_properties))

    def manifests(self, snapshot_id: int) -> set[str]:
        """The paths of a snapshot's manifests and of its manifest list."""
        with translated(f"read the manifests of table {self.name}"):
            snapshot = self._table.snapshot(snapshot_id)
            paths = {str(manifest.path()) for manifest in snapshot.allManifests(self._table.io())}
            return {*paths, str(snapshot.manifestListLocation())}

    def moment(self, number: int) -> int | None:
        """Timestamp of the n-th snapshot (milliseconds; -1 is the newest); None if there is
        none."""
        with translated(f"read the snapshots of table {self.name}"):
            snapshots = self._table.operations().current().snapshots()
            at = number if number >= 0 else int(snapshots.size()) + number
            exists = 0 <= at < int(snapshots.size())
            return int(snapshots.get(at).timestampMillis()) if exists else None

    def count(self) -> int:
        """The number of snapshots."""
        with translated(f"read the snapshots of table {self.name}"):
            return int(self._table.operations().current().snapshots().size())

    def branches(self) -> list[str]:
        with translated(f"read the branches of table {self.name}"):
            refs = self._table.refs()
            return [str(name) for name in refs if refs[name].isBranch()]

    def tags(self) -> dict[str, int]:
        """Tag → snapshot id."""
        with translated(f"read the tags of table {self.name}"):
            refs = self._table.refs()
            return {str(n): int(refs[n].snapshotId()) for n in refs if refs[n].isTag()}


class JavaTableUpdates(JavaTableState):
    """Changes of a table that add no snapshot."""

    def unpartitioned_spec(self) -> str:
        """A spec of the table without partitions, under which deletes apply to all of its rows. A
        table without one gets it, in one commit that leaves its current spec as it is."""
        with translated(f"give table {self.name} a spec without partitions"):
            for _ in range(2):
                for spec in self._table.specs().values():
                    if not spec.fields().size():
                        return str(self._iceberg.PartitionSpecParser.toJson(spec))
                fields = json.loads(self.spec)["fields"]
                transaction = self._table.newTransaction()
                change = transaction.updateSpec()
                for field in fields:
                    change.removeField(field["name"])
                change.commit()
                change = transaction.updateSpec()
                for field in fields:
                    change.addField(field["name"], self._term(field))
                change.commit()
                transaction.commitTransaction()
                self._table.refresh()
        raise Conflict(f"cannot give table {self.name} a spec without partitions")

    def _term(self, field: Mapping[str, Any]) -> Any:
        """A partition field's transform of its column, as an expression."""
        terms = self._iceberg.expressions.Expressions
        column = self._table.schema().findColumnName(field["source-id"])
        name, _, width = str(field["transform"]).rstrip("]").partition("[")
        if name in ("bucket", "truncate"):
            return getattr(terms, name)(column, int(width))
        return terms.ref(column) if name == "identity" else getattr(terms, name)(column)

    def evolve(self, plan: Callable[[str], SchemaUpdate]) -> None:
        """Applies the change that `plan` returns for the current schema, in one commit.

        If another writer was first, or the response was lost, `plan` is called again: it no longer
        returns changes that have been made.
        """
        tries = _EVOLUTIONS
        while True:
            self.refresh()
            update = plan(self.schema)
            if not update:
                return
            tries -= 1
            try:
                with translated(f"change the schema of table {self.name}"):
                    self._change(update)
                return
            # ConfigError, too: Spark shares the table, and may have refreshed it in between.
            except (Conflict, CommitStateUnknown, ConfigError):
                if not tries:
                    raise

    def _change(self, update: SchemaUpdate) -> None:
        def parsed(schema: str) -> Any:
            return self._iceberg.SchemaParser.fromJson(schema).columns().get(0).type()

        change = self._table.updateSchema()
        for path, name in update.rename:
            change.renameColumn(path, name)
        for path in update.relax:
            change.makeColumnOptional(path)
        for path, kind in update.widen:
            change.updateColumn(path, parsed(kind))
        for path, name, kind in update.add:
            change.addColumn(path or None, name, parsed(kind))
        if update.rename and update.identifier:  # Iceberg loses identifier fields inside a struct
            change.setIdentifierFields(list(update.identifier))
        change.commit()
        self._catalog.changed(self.name)

    def set_property(self, key: str, value: str) -> None:
        with translated(f"set property {key} of table {self.name}"):
            self._table.updateProperties().set(key, value).commit()
            self._catalog.changed(self.name)

    def remove_property(self, key: str) -> None:
        with translated(f"remove property {key} of table {self.name}"):
            self._table.updateProperties().remove(key).commit()
            self._catalog.changed(self.name)

    def tag(self, tag: str, snapshot_id: int, was: int | None) -> None:
        """Points `tag` at a snapshot, in a commit of its own; a Conflict if it is not where it
        `was`. Expiry never removes it."""
        self.move({tag: snapshot_id}, expected={tag: was})

    def untag(self, tag: str) -> None:
        with translated(f"remove tag {tag} of table {self.name}"):
            if self._table.refs().get(tag) is not None:
                self._table.manageSnapshots().removeTag(tag).commit()

    def fork(self, branch: str, snapshot_id: int) -> None:
        """Creates a branch at a snapshot, or moves an existing one there."""
        with translated(f"fork branch {branch} of table {self.name}"):
            update = self._table.manageSnapshots()
            if self._table.refs().get(branch) is None:
                update.createBranch(branch, snapshot_id)
            else:
                update.replaceBranch(branch, snapshot_id)
            update.commit()

    def move(self, refs: Mapping[str, int | None], *, expected: Mapping[str, int | None]) -> None:
        """Points branches and tags at other snapshots, or removes them, all in one commit; a
        Conflict if those in `expected` are elsewhere. A reference that does not exist yet becomes a
        tag.

        Iceberg's own updates of references are retried on any state they find. This one is not.
        """
        with translated(f"move {', '.join(refs)} of table {self.name}"):
            operations = self._table.operations()
            base = operations.refresh()
            for name, wanted in expected.items():
                ref = base.ref(name)
                current = None if ref is None else int(ref.snapshotId())
                if current != wanted:
                    raise Conflict(
                        f"cannot move {name} of table {self.name}: expected it at snapshot "
                        f"{wanted}, found {current}"
                    )
            operations.commit(base, self.pointed(base, refs))
            self._catalog.changed(self.name)
            self._table.refresh()

    def pointed(self, metadata: Any, refs: Mapping[str, int | None]) -> Any:
        """Java's metadata with branches and tags at other snapshots, or removed."""
        references = self._iceberg.SnapshotRef
        update = self._iceberg.TableMetadata.buildFrom(metadata)
        for name, snapshot_id in refs.items():
            ref = metadata.ref(name)
            if snapshot_id is None:
                if ref is not None and ref.isBranch():
                    # A REST catalog checks where a reference is only if it is set, not if it is
                    # removed. Setting it first, to the same snapshot, guards the removal.
                    keep = (ref.minSnapshotsToKeep() or 0) + 1
                    kept = references.builderFrom(ref).minSnapshotsToKeep(keep)
                    update.setRef(name, kept.build())
                update.removeRef(name)
            elif ref is None:
                made = references.tagBuilder(snapshot_id).maxRefAgeMs(2**63 - 1).build()
                update.setRef(name, made)
            else:
                update.setRef(name, references.builderFrom(ref, snapshot_id).build())
        return update.build()
