"""The files of a table, through Iceberg's Java API: those that manifests list, and its storage.

In: branches, manifests and paths. Out: plain Python values; data and delete files as Iceberg's own
JSON. Nothing here commits. Errors are translated by `iceberg.java_errors`. Runs on the driver.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from py4j.protocol import Py4JJavaError

from frazil.iceberg.java_errors import causes, translated
from frazil.iceberg.java_metadata import JavaTableState
from frazil.iceberg.live_files import spellings
from frazil.iceberg.table import LiveFile, ManifestEntry, Snapshot

_CHECKERS = 16  # staged files that are checked concurrently
#: Names of manifests and manifest lists, Iceberg's and ours; no data file has such a name.
_LISTING = re.compile(r"/(snap-\d+-\d+-[0-9a-f-]{36}|[^/]+-m\d+)\.avro$")
_READERS = 8  # threads


class JavaTableFiles(JavaTableState):
    """The files of one table."""

    def live(self) -> tuple[Snapshot | None, list[LiveFile]]:
        """The current snapshot of main, and its data files, those with the oldest rows first."""
        with translated(f"list the files of table {self.name}"):
            snapshot = self._table.currentSnapshot()
            if snapshot is None:
                return None, []
            specs = dict(self._table.specs())
            (spec,) = specs.values() if len(specs) == 1 else (None,)
            newest = self._catalog.to_snapshot(snapshot)
            hidden = newest.summary.get("total-delete-files") != "0"
            tasks = self._table.newScan().useSnapshot(newest.id).planFiles()
            files = []
            try:  # few calls to Java: they are costly, and made per file
                iterator = tasks.iterator()
                while iterator.hasNext():
                    task = iterator.next()
                    file = task.file()
                    text = self._described(file, specs[file.specId()] if spec is None else spec)
                    values = json.loads(text)
                    deletes = int(task.deletes().size()) if hidden else 0
                    sequence = int(file.dataSequenceNumber() or 0)
                    files.append(
                        LiveFile(
                            values["file-path"], values["record-count"], sequence, deletes, text
                        )
                    )
            finally:
                tasks.close()
            return newest, sorted(files, key=lambda file: file.sequence)

    def contents(
        self, branch: str, known: Mapping[str, list[ManifestEntry]], data: bool = False
    ) -> tuple[Snapshot | None, dict[str, list[ManifestEntry]]]:
        """The newest snapshot of a branch, and the entries of its manifests by path; `data`: of
        data manifests only. Manifests never change: those in `known` are not read again."""
        with translated(f"list the files of table {self.name}"):
            snapshot = (
                self._table.currentSnapshot() if branch == "main" else self._table.snapshot(branch)
            )
            if snapshot is None:
                return None, {}
            entries = {}
            io = self._table.io()
            for manifest in snapshot.dataManifests(io) if data else snapshot.allManifests(io):
                path = str(manifest.path())
                entries[path] = known[path] if path in known else self._listed(manifest)
            return self._catalog.to_snapshot(snapshot), entries

    def staged(self, manifest: str) -> list[ManifestEntry]:
        """The data files of a manifest written by `write_manifest`."""
        with translated(f"list staged files of table {self.name}"):
            decoded = self._iceberg.ManifestFiles.decode(base64.b64decode(manifest))
            return self._listed(decoded) if str(decoded.content().name()) == "DATA" else []

    def _listed(self, manifest: Any) -> list[ManifestEntry]:
        specs, files = self._table.specs(), self._iceberg.ManifestFiles
        spec = specs.get(manifest.partitionSpecId())
        everywhere = bool(spec.isUnpartitioned())
        data = str(manifest.content().name()) == "DATA"
        read = files.read if data else files.readDeleteManifest
        reader = read(manifest, self._table.io(), specs)
        entries = []
        try:
            iterator = reader.iterator()
            while iterator.hasNext():
                file = iterator.next()
                text = self._described(file, spec)
                entries.append(ManifestEntry(text, int(file.dataSequenceNumber() or 0), everywhere))
        finally:
            reader.close()
        return entries

    def lacking(self, manifests: Sequence[str]) -> list[str]:
        """Paths that the store no longer has, of manifests written by `write_manifest` and of the
        files that they list: data and deletes."""
        with translated(f"look for staged files of table {self.name}"):
            io, specs = self._table.io(), self._table.specs()
            decoded = [self._iceberg.ManifestFiles.decode(base64.b64decode(m)) for m in manifests]
            gone = self._missing(io, [str(manifest.path()) for manifest in decoded])
            paths: list[str] = []
            for manifest in decoded:
                if str(manifest.path()) not in gone:
                    files = self._iceberg.ManifestFiles.readPaths(manifest, io, specs)
                    try:
                        paths += [str(path) for path in files.iterator()]
                    finally:
                        files.close()
            return gone + self._missing(io, paths)

    def _missing(self, io: Any, paths: Sequence[str]) -> list[str]:
        def exists(path: str) -> bool:
            with translated(f"look for {path}"):
                return bool(io.newInputFile(path).exists())

        if not paths:
            return []
        with ThreadPoolExecutor(min(_CHECKERS, len(paths)), "frazil-staged") as pool:
            present = list(pool.map(exists, paths))
        return [path for path, is_there in zip(paths, present, strict=True) if not is_there]

    def needed(self, paths: Sequence[str]) -> set[str]:
        """Those of `paths` that a snapshot of the table references, in any spelling: manifest
        lists, manifests and files."""
        with translated(f"read the manifests of table {self.name}"):
            self._table.refresh()
            io, specs = self._table.io(), self._table.specs()
            sets: Any = self._iceberg.relocated.com.google.common.collect.Sets
            named = {name: path for path in paths for name in spellings(path)}
            asked, needed, manifests = (sets.newHashSet(items) for items in (list(named), [], []))
            # Paths stay in the JVM: they may be many. Threads, because reads wait for the store.
            with ThreadPoolExecutor(_READERS, "frazil-needed") as pool:
                snapshots = list(self._table.snapshots())
                for listed in pool.map(lambda snapshot: snapshot.allManifests(io), snapshots):
                    manifests.addAll(listed)
                for snapshot in snapshots:
                    needed.add(snapshot.manifestListLocation())
                for manifest in manifests:
                    needed.add(manifest.path())
                if not all(map(_LISTING.search, paths)):  # otherwise no manifest names any of them
                    for listed in pool.map(
                        lambda m: self._paths_among(m, io, specs, asked), manifests
                    ):
                        needed.addAll(listed)
            needed.retainAll(asked)
            return {named[str(name)] for name in needed}

    def _paths_among(self, manifest: Any, io: Any, specs: Any, asked: Any) -> Any:
        """Those of the paths `asked` that a manifest names, as a Java set."""
        sets: Any = self._iceberg.relocated.com.google.common.collect.Sets
        files = self._iceberg.ManifestFiles.readPaths(manifest, io, specs)
        try:
            held = sets.newHashSet(files.iterator())
        finally:
            files.close()
        held.retainAll(asked)
        return held

    def _described(self, file: Any, spec: Any) -> str:
        """Iceberg's JSON of a file. Iceberg quotes NaN and Infinity, and cannot parse them so."""
        text = str(self._iceberg.ContentFileParser.toJson(file, spec))
        if not any(word in text for word in ('"NaN"', 'Infinity"')):
            return text
        values = json.loads(text)
        types = [str(column.type()) for column in spec.partitionType().fields()]
        values["partition"] = [
            float(value) if kind in ("float", "double") and value is not None else value
            for kind, value in zip(types, values["partition"], strict=True)
        ]
        return json.dumps(values)

    def _data_file(self, descriptor: str) -> Any:
        node = self._mapper.readTree(descriptor)
        return self._iceberg.ContentFileParser.fromJson(node, self._table.specs())

    @cached_property
    def _mapper(self) -> Any:
        """Iceberg's JSON mapper, which here also accepts NaN and Infinity: a float may be a
        partition value."""
        mapper = self._iceberg.util.JsonUtil.mapper().copy()
        name = str(mapper.getClass().getName())  # shaded: prefixed with Iceberg's package
        name = name.replace(".databind.ObjectMapper", ".core.JsonParser$Feature")
        features = mapper.getClass().getClassLoader().loadClass(name)
        value_of = self._catalog._jvm.java.lang.Enum.valueOf
        return mapper.configure(value_of(features, "ALLOW_NON_NUMERIC_NUMBERS"), True)

    # The table's own storage, for staged batches beside the data.

    def store(self, path: str, content: bytes, overwrite: bool = False) -> None:
        """Writes an object, by default a new one: names contain a fresh id."""
        with translated(f"write {path}"):
            file = self._table.io().newOutputFile(path)
            out = file.createOrOverwrite() if overwrite else file.create()
            try:
                out.write(bytearray(content))
            finally:
                out.close()

    def fetch(self, path: str) -> bytes:
        with translated(f"read {path}"):
            stream = self._table.io().newInputFile(path).newStream()
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def listing(self, prefix: str, before_ms: int | None = None) -> list[str]:
        """The paths under a prefix; with `before_ms`, only those created before that moment."""
        with translated(f"list {prefix}"):
            try:
                paths, files = [], self._table.io().listPrefix(prefix).iterator()
                while files.hasNext():
                    file = files.next()
                    if before_ms is None or file.createdAtMillis() < before_ms:
                        paths.append(str(file.location()))
                return sorted(paths)
            except Py4JJavaError as error:
                if "FileNotFoundException" in causes(error.java_exception)[0]:
                    return []
                raise

    def remove(self, paths: Sequence[str]) -> None:
        """Removes many objects at once, if the store can; objects that it refuses to remove
        stay."""
        with translated(f"remove {len(paths)} files of table {self.name}"):
            if paths:
                io = self._table.io()
                self._iceberg.CatalogUtil.deleteFiles(io, list(paths), "unneeded", True)

    def delete(self, path: str) -> None:
        """Removes an object; one that is gone already is no error."""
        with translated(f"delete {path}"):
            try:
                self._table.io().deleteFile(path)
            except Py4JJavaError as error:
                names = causes(error.java_exception)[0]
                if not {"NotFoundException", "FileNotFoundException"} & set(names):
                    raise

    def delete_folder(self, path: str) -> None:
        """Removes everything below a path, known to the table or not."""
        with translated(f"delete {path}"):
            try:
                self._table.io().deletePrefix(path.rstrip("/") + "/")
            except Py4JJavaError as error:
                if "FileNotFoundException" not in causes(error.java_exception)[0]:
                    raise
