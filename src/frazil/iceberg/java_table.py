"""One Iceberg table, through Iceberg's Java API: stages manifests and commits snapshots.

In: files and manifests as Iceberg's own JSON, the summary of the snapshot, and the check of the
ledger. Out: one snapshot, or nothing; the paths that Iceberg would delete, which nothing here
deletes. An error that leaves the outcome open is `CommitStateUnknown`. Runs on the driver; Iceberg
calls back into Python while it commits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError

from frazil.errors import Conflict, Unwritable
from frazil.iceberg.java_errors import FAILED, causes, translated
from frazil.iceberg.java_files import JavaTableFiles
from frazil.iceberg.java_metadata import JavaTableUpdates
from frazil.iceberg.schema import identifier_columns
from frazil.iceberg.static_table import COLUMNS_PROPERTY
from frazil.iceberg.table import Check, LiveFile, Snapshot
from frazil.ledger import entry
from frazil.ledger.entry import PREFIX

#: position of `added_snapshot_id` in Iceberg's manifest-file record (the spec's field order)
_SNAPSHOT_ID = 6
_PLACEHOLDER = 2**62  # too large for an Integer, so Py4J makes it the Long that Java wants


class _Validator:
    """Calls `check` with the ancestry on every attempt of a commit, Iceberg's own retries
    included."""

    def __init__(self, check: Check, read: Any) -> None:
        self._check = check
        self._read = read
        self.refusal = ""

    def validate(self, base_snapshots: Any) -> bool:
        def history() -> Iterator[Snapshot]:
            iterator = base_snapshots.iterator()
            while iterator.hasNext():
                yield self._read(iterator.next())

        self.refusal = self._check(history()) or ""
        return not self.refusal

    def errorMessage(self) -> str:
        return self.refusal or "the ledger has moved"

    class Java:
        implements = ("org.apache.iceberg.SnapshotAncestryValidator",)


class _Deferred:
    """Collects the paths that Iceberg would delete after a failed commit, and deletes nothing.

    A commit that was applied, but whose response was lost, looks like a failure to Iceberg, and its
    clean-up would remove the manifest list of the live snapshot (H1).
    """

    def __init__(self) -> None:
        self.paths: list[str] = []

    def accept(self, path: str) -> None:
        self.paths.append(path)

    class Java:
        implements = ("java.util.function.Consumer",)


class _Tagging:
    """Table operations whose commits also point a tag at the snapshot that they add: snapshot and
    tag are in one metadata file, so neither can exist without the other.

    An exception of a commit passes through Python and reaches Iceberg without its class, so Iceberg
    neither retries nor cleans up. The error is kept in `trouble`, and the files that the attempt
    wrote are in `made`: the caller reads back, retries and removes them.
    """

    def __init__(self, table: JavaTable, branch: str, tag: str) -> None:
        self._table = table
        self._operations = table._table.operations()
        self._branch, self._tag = branch, tag
        self._metadata: Any = None
        self.trouble: Py4JError | None = None
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def current(self) -> Any:  # called often: cached, to save calls to Java
        if self._metadata is None:
            self._metadata = self._operations.current()
        return self._metadata

    def refresh(self) -> Any:
        self._metadata = self._operations.refresh()
        return self._metadata

    def commit(self, base: Any, metadata: Any) -> None:
        self._metadata = None
        snapshot = metadata.snapshot(metadata.ref(self._branch).snapshotId())
        try:
            tagged = self._table.pointed(metadata, {self._tag: int(snapshot.snapshotId())})
            self._operations.commit(base, tagged)
        except Py4JError as error:
            self.trouble = error
            with suppress(Py4JError):
                self.made.append(str(snapshot.manifestListLocation()))
                for manifest in snapshot.allManifests(self._operations.io()):
                    if manifest.snapshotId() == snapshot.snapshotId():
                        self.made.append(str(manifest.path()))
            raise

    class Java:
        implements = ("org.apache.iceberg.TableOperations",)


class JavaTable(JavaTableUpdates, JavaTableFiles):
    """One Iceberg table: the operations that the committer, the audit and the sink need."""

    def write_manifest(self, path: str, files: Sequence[str]) -> str:
        """Writes files (as Iceberg's JSON), all data or all deletes, into one manifest at `path`;
        returns its encoded description."""
        with translated(f"write manifest {path}"):
            specs = self._table.specs()
            out = self._table.io().newOutputFile(path)
            first = json.loads(files[0])
            manifests = self._iceberg.ManifestFiles
            make = manifests.write if first["content"] == "data" else manifests.writeDeleteManifest
            writer = make(self.format_version, specs.get(first["spec-id"]), out, None)
            try:
                parse = self._iceberg.ContentFileParser.fromJson
                try:
                    nodes = self._mapper.readTree("[" + ",".join(files) + "]").elements()
                    parsed = [parse(node, specs) for node in nodes]
                except FAILED:
                    self._name_unlisted(
                        files, lambda text: parse(self._mapper.readTree(text), specs)
                    )
                    raise
                for file in parsed:
                    writer.add(file)
            finally:
                writer.close()
            # Iceberg's encoding requires a snapshot id, which a staged manifest does not have. The
            # placeholder is reset to null before the commit, so that Iceberg assigns the id.
            manifest = writer.toManifestFile().copy()
            manifest.put(_SNAPSHOT_ID, _PLACEHOLDER)
            return base64.b64encode(self._iceberg.ManifestFiles.encode(manifest)).decode()

    def _name_unlisted(self, files: Sequence[str], parse: Callable[[str], Any]) -> None:
        """Raises `Unwritable` for the first file that Iceberg does not take into a manifest. No
        store is involved, so a retry would not help."""
        for text in files:
            try:
                parse(text)
            except FAILED as error:
                fact = str(error).strip().splitlines()[0]
                if isinstance(error, Py4JJavaError):
                    _, fact = causes(error.java_exception)
                names = self.properties.get(COLUMNS_PROPERTY, "_topic,_topic_partition,_offset")
                rows = identifier_columns(text, self.schema, names.split(",")[:3])
                raise Unwritable(
                    f"cannot list a file of table {self.name}: {fact}; {rows}",
                    hint="nothing of the batch was staged; report the message",
                ) from None

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
        """See `Table`. An item may also be a data file, as Iceberg's JSON: with few files it is
        faster to have the commit write their manifest. A staged manifest that the commit merges
        into another is no longer needed, and is added to `leftovers`. The same commit points `tag`
        at the snapshot, unless it is the table's first."""
        with translated(f"commit to table {self.name}"):
            summary = self._keep(summary)
            table, operations = self._table, None
            if tag and self.count():  # some catalogs refuse tags in a table without snapshots
                operations = _Tagging(self, branch, tag)
                table = self._iceberg.BaseTable(operations, self.name)
            files = [text for text in manifests if text.startswith("{")]
            staged = [
                self._iceberg.ManifestFiles.decode(base64.b64decode(text))
                for text in manifests
                if not text.startswith("{")
            ]
            update: Any
            if any(str(manifest.content().name()) == "DELETES" for manifest in staged):
                update = table.newRowDelta()
                for file in files:
                    update.addRows(self._data_file(file))
                for manifest in staged:
                    self._add_each(update, manifest)
            else:
                # `newAppend` merges manifests when there are many, by the table's properties.
                # Otherwise every batch would leave a manifest for every reader to open.
                update = table.newAppend() if staged else table.newFastAppend()
                for file in files:
                    update.appendFile(self._data_file(file))
                for manifest in staged:
                    manifest.put(_SNAPSHOT_ID, None)
                    update.appendManifest(manifest)
            try:
                self._commit(update, summary, branch, check, leftovers)
            except Py4JError:
                if operations is None or operations.trouble is None:
                    raise
                leftovers.extend(operations.made)
                raise operations.trouble from None

    def _keep(self, summary: Mapping[str, str]) -> dict[str, str]:
        """The summary to commit. Properties that its entry refers to are set before the snapshot
        exists; those that no snapshot refers to any more, of this epoch and of epochs that it has
        fenced, are removed."""
        lean, kept = entry.split(summary)
        stored = entry.split(self.properties)[1] if kept else {}
        missing = {key: text for key, text in kept.items() if stored.get(key) != text}
        if missing:
            sink, epoch = summary[f"{PREFIX}sink"], int(summary[f"{PREFIX}epoch"])
            summaries = [
                self._catalog.to_snapshot(snapshot).summary for snapshot in self._table.snapshots()
            ]
            update = self._table.updateProperties()
            for key in entry.forgotten(stored, summaries, sink, epoch):
                if key not in kept:
                    update.remove(key)
            for key, text in missing.items():
                update.set(key, text)
            update.commit()
        return lean

    def _add_each(self, update: Any, manifest: Any) -> None:
        """Adds the files of a staged manifest one by one: a row delta takes no manifests."""
        deletes = str(manifest.content().name()) == "DELETES"
        manifests = self._iceberg.ManifestFiles
        read = manifests.readDeleteManifest if deletes else manifests.read
        reader = read(manifest, self._table.io(), self._table.specs())
        try:
            entries = reader.iterator()
            while entries.hasNext():
                file = entries.next().copy()
                if deletes:
                    update.addDeletes(file)
                else:
                    update.addRows(file)
        finally:
            reader.close()

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
        with translated(f"rewrite files of table {self.name}"):
            update: Any
            if same:
                update = self._table.newRewrite()
            else:  # the validation makes it fail, too, if a file is gone already
                update = self._table.newOverwrite().validateNoConflictingDeletes()
            update.validateFromSnapshot(since)
            for file in removed:
                update.deleteFile(self._data_file(file.descriptor))
            for descriptor in added:
                update.addFile(self._data_file(descriptor))
            self._commit(update, summary, "main", check, leftovers)

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
        """See `Table`. New data files get the sequence number of this commit. Iceberg drops deletes
        that are older than all data files it keeps, and ignores new ones that claim an older number
        (H6); here no commit lies in between whose deletes could be missed.
        """

        def check(history: Iterator[Snapshot]) -> str | None:
            newest = next(history, None)
            if newest is None or newest.id != since:
                return f"snapshot {since} is no longer the newest one"
            return None

        self.refresh()
        if refusal := check(self.history(branch)):  # Iceberg's own message is longer
            raise Conflict(f"cannot rewrite files of table {self.name}: {refusal}")
        with translated(f"rewrite files of table {self.name}"):
            update = self._table.newRewrite().validateFromSnapshot(since)
            for descriptor in removed:
                update.deleteFile(self._data_file(descriptor))
            for descriptor in added:
                update.addFile(self._data_file(descriptor))
            self._commit(update, summary, branch, check, leftovers)

    def _commit(
        self,
        update: Any,
        summary: Mapping[str, str],
        branch: str,
        check: Check,
        leftovers: list[str],
    ) -> None:
        deferred = _Deferred()
        for key, value in summary.items():
            update.set(key, value)
        if branch != "main":
            update.toBranch(branch)
        update.validateWith(_Validator(check, self._read))
        update.deleteWith(deferred)
        try:
            update.commit()
        finally:
            leftovers.extend(deferred.paths)
            self._catalog.changed(self.name)

    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None:
        deferred = _Deferred()
        with translated(f"expire snapshots of table {self.name}"):
            update = self._table.expireSnapshots().expireOlderThan(before_ms).retainLast(keep)
            update.deleteWith(deferred)
            try:
                update.commit()
            finally:
                unneeded.extend(deferred.paths)
                self._catalog.changed(self.name)
            self._table.refresh()
