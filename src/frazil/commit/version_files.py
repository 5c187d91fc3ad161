"""Lists the data files, staged and live, that contain the versions of a table's keys. Driver.

Staged files are listed first, then live ones: a batch committed in between is in both lists, and
no batch is in neither (`pipeline.versions`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from pyiceberg.schema import Schema

from frazil.errors import IdentityMismatch, SchemaMismatch
from frazil.files.writer import WriterSpec
from frazil.iceberg.table import ManifestEntry, Table
from frazil.ledger.staged_batch import StagedBatch
from frazil.pipeline.versions import FileBounds, VersionLookup, file_bounds


class VersionFiles:
    """The files of one table. Manifests are immutable: each is read once and cached while used."""

    def __init__(self, table: Table, branch: str, key: tuple[str, ...], order: str) -> None:
        self._table = table
        self._branch = branch
        self._key = key
        self._order = order
        self._staged: dict[str, list[ManifestEntry]] = {}
        self._live: dict[str, list[ManifestEntry]] = {}
        self._bounds: dict[str, FileBounds] = {}
        self._schema = ""

    def within(self, shape: WriterSpec, pending: Sequence[StagedBatch]) -> VersionLookup:
        """`pending`: staged batches, listed before this call."""
        manifests = {
            manifest
            for batch in pending
            for table in batch.tables
            if table.name == shape.name
            for manifest in table.manifests
        }
        if not manifests <= self._staged.keys():
            self._table.refresh()  # its partition spec may have changed
        self._staged = {manifest: self._listed(manifest) for manifest in manifests}
        self._live = self._listed_live()
        if shape.schema != self._schema:
            self._schema, self._bounds = shape.schema, {}
        schema = Schema.model_validate_json(shape.schema)
        every = (
            file
            for some in (self._staged, self._live)
            for listed in some.values()
            for file in listed
        )
        known, self._bounds = self._bounds, {}
        for file in every:
            bounds = known.get(file.descriptor) or self._file_bounds(
                schema, file.descriptor, shape.name
            )
            self._bounds[file.descriptor] = bounds
        files = {file.path: file for file in self._bounds.values()}
        return VersionLookup(shape, self._key, self._order, tuple(files.values()))

    def _listed(self, manifest: str) -> list[ManifestEntry]:
        if manifest in self._staged:
            return self._staged[manifest]
        try:
            return self._table.staged(manifest)
        except IdentityMismatch:
            return []  # its batch was committed meanwhile, so its files are live

    def _listed_live(self) -> dict[str, list[ManifestEntry]]:
        """Files of the newest snapshot; retried if that snapshot expires meanwhile."""
        for again in (True, True, False):
            self._table.refresh()
            try:
                return self._table.contents(self._branch, self._live, data=True)[1]
            except IdentityMismatch:
                if not again:
                    raise
        raise AssertionError

    def _file_bounds(self, schema: Schema, descriptor: str, table: str) -> FileBounds:
        file = json.loads(descriptor)
        if (kind := str(file["file-format"]).lower()) != "parquet":
            raise SchemaMismatch(
                f"cannot read the versions of keys in {file['file-path']} of table "
                f"{table}: expected Parquet, found {kind}",
                hint="rewrite it, or leave version_column out",
            )
        bounds = []
        for name in ("lower-bounds", "upper-bounds"):
            values = file.get(name) or {"keys": (), "values": ()}
            bounds.append(dict(zip(values["keys"], values["values"], strict=True)))
        try:
            return file_bounds(schema, self._key, file["file-path"], bounds)
        except struct.error:  # the column was widened since: no bounds, so the file is read
            return FileBounds(file["file-path"], (None,) * len(self._key))
