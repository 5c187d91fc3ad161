"""Where the orders of a table's keys are to be found: its data files, staged and live. Driver.

What is staged is taken first, then what is live: a batch that is committed in between is in both,
and none is in neither (`pipeline.versions`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pyiceberg.schema import Schema

from frazil.errors import IdentityMismatch, SchemaMismatch
from frazil.files.writer import WriterSpec
from frazil.ledger.staged_batch import StagedBatch
from frazil.pipeline.versions import FileBounds, VersionLookup, looked


class VersionFile(Protocol):
    @property
    def descriptor(self) -> str: ...


class VersionFileLister(Protocol):
    """What is needed of a table; a handle of its own."""

    def refresh(self) -> None: ...
    def contents(
        self, branch: str, known: Mapping[str, list[Any]], data: bool = False
    ) -> tuple[Any, dict[str, list[Any]]]: ...
    def staged(self, manifest: str) -> list[Any]: ...


class VersionFiles:
    """Of one table. Manifests never change: each is read once, as long as it is of use."""

    def __init__(
        self, table: VersionFileLister, branch: str, key: tuple[str, ...], order: str
    ) -> None:
        self._table = table
        self._branch = branch
        self._key = key
        self._order = order
        self._staged: dict[str, list[VersionFile]] = {}
        self._live: dict[str, list[VersionFile]] = {}
        self._looked: dict[str, FileBounds] = {}
        self._schema = ""

    def within(self, shape: WriterSpec, pending: Sequence[StagedBatch]) -> VersionLookup:
        """`pending`: listed before this is called."""
        manifests = {
            manifest
            for batch in pending
            for table in batch.tables
            if table.name == shape.name
            for manifest in table.manifests
        }
        if not manifests <= self._staged.keys():
            self._table.refresh()  # it may be partitioned anew
        self._staged = {each: self._listed(each) for each in manifests}
        self._live = self._listed_live()
        if shape.schema != self._schema:
            self._schema, self._looked = shape.schema, {}
        schema = Schema.model_validate_json(shape.schema)
        every = (
            file for some in (self._staged, self._live) for each in some.values() for file in each
        )
        known, self._looked = self._looked, {}
        for file in every:
            said = known.get(file.descriptor) or self._said(schema, file.descriptor, shape.name)
            self._looked[file.descriptor] = said
        files = {each.path: each for each in self._looked.values()}
        return VersionLookup(shape, self._key, self._order, tuple(files.values()))

    def _listed(self, manifest: str) -> list[VersionFile]:
        if manifest in self._staged:
            return self._staged[manifest]
        try:
            return self._table.staged(manifest)
        except IdentityMismatch:
            return []  # its batch is committed meanwhile, and so its files are live

    def _listed_live(self) -> dict[str, list[VersionFile]]:
        """Of the newest snapshot; of a newer one, where that was replaced and expired meanwhile."""
        for again in (True, True, False):
            self._table.refresh()
            try:
                return self._table.contents(self._branch, self._live, data=True)[1]
            except IdentityMismatch:
                if not again:
                    raise
        raise AssertionError

    def _said(self, schema: Schema, descriptor: str, table: str) -> FileBounds:
        said = json.loads(descriptor)
        if (kind := str(said["file-format"]).lower()) != "parquet":
            raise SchemaMismatch(
                f"cannot look into {said['file-path']} of table {table} for the order of "
                f"its keys: expected Parquet, found {kind}",
                hint="rewrite it, or leave version_column out",
            )
        bounds = []
        for name in ("lower-bounds", "upper-bounds"):
            values = said.get(name) or {"keys": (), "values": ()}
            bounds.append(dict(zip(values["keys"], values["values"], strict=True)))
        try:
            return looked(schema, self._key, said["file-path"], bounds)
        except struct.error:  # the column is wider now than it was: the file is looked into
            return FileBounds(said["file-path"], (None,) * len(self._key))
