"""Checks of the catalog and of its storage, before a sink runs.

In: a config, and a function that opens tables read-only. Out: findings. The catalog is asked for
the sink's tables. The right to write is proven by a probe file, where the sink would stage its
batches and write its data: written, read back, removed. Without the probe nothing is written.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError, counted
from frazil.files.writer import file_io
from frazil.iceberg.file_io import NeedsSpark, local, missing_file_error
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.ledger.sink_state import new_location, staging_folder
from frazil.ops.findings import CheckFinding
from frazil.ops.start_plan import names_of
from frazil.spark.open_table import Open, not_made_yet

_OPENERS = 8
#: Probes of folders at most: tables of one catalog lie in one store as a rule.
_PROBES = 8
_PROBE = b"frazil check: this file may be removed"


class CatalogCheck:
    def __init__(self, config: Config, opened: Open) -> None:
        self._config = config
        self._opened = opened
        self.tables: dict[str, ReadOnlyTable | None] = {}
        self.reached = False

    def run(self) -> list[CheckFinding]:
        config = self._config
        kind = config.catalog.properties.get("type", "") or "catalog-impl"
        setting = ("catalog", "uri" if "uri" in config.catalog.properties else "warehouse")
        if path := not_made_yet(config):
            return self._of_new_file(path, setting)
        names = list(dict.fromkeys(names_of(config)))
        try:
            with ThreadPoolExecutor(_OPENERS, "frazil-check") as pool:
                first = self._opened(names[0])  # one error, not one of each table
                self.tables = {names[0]: first}
                self.tables |= zip(names[1:], pool.map(self._opened, names[1:]), strict=True)
        except NeedsSpark as error:
            hint = "frazil check --spark CONFIG starts Spark for it, and takes longer"
            hint = f"{error.hint}; or {hint}" if error.hint else hint
            return [CheckFinding("catalog", "skipped", error.message, hint, ("catalog", "type"))]
        except FrazilError as error:
            return [CheckFinding.of("catalog", error, setting)]
        self.reached = True
        existing = sum(table is not None for table in self.tables.values())
        says = f"the {kind} catalog answers; {existing} of {counted(len(names), 'table')} exist"
        return [CheckFinding("catalog", "ok", says), *self._right_to_create(kind)]

    def _of_new_file(self, path: str, setting: tuple[str, ...]) -> list[CheckFinding]:
        folder = _existing(os.path.dirname(path) or ".")
        if not os.access(folder, os.W_OK):
            says = f"cannot make catalog {path}: {folder} may not be written to"
            return [CheckFinding("catalog", "error", says, "", setting)]
        self.reached = True
        if not os.path.isdir(os.path.dirname(path)):
            says = f"cannot make catalog {path}: SQLite makes a file, and no folder for it"
            hint = f"mkdir -p {os.path.dirname(path)}"
            return [CheckFinding("catalog", "error", says, hint, setting)]
        return [CheckFinding("catalog", "ok", f"the catalog {path} is made by the first start")]

    def _right_to_create(self, kind: str) -> Iterator[CheckFinding]:
        """The right to create tables, as far as a catalog can be asked for it."""
        uri = self._config.catalog.properties.get("uri", "")
        if uri.startswith("jdbc:sqlite:"):
            path = local(uri.removeprefix("jdbc:sqlite:").partition("?")[0])
            for target in (path, os.path.dirname(path) or "."):
                if not os.access(target, os.W_OK):
                    says = f"tables cannot be made or committed: {target} may not be written to"
                    yield CheckFinding("catalog", "error", says, "", ("catalog", "uri"))
                    return
        elif kind != "hadoop" and None in self.tables.values():
            says = f"whether tables may be made cannot be asked of a {kind} catalog"
            yield CheckFinding("catalog", "note", says, "the first start shows it")

    # ── storage ──────────────────────────────────────────────────────────────────────────────

    def storage(self, write: bool) -> list[CheckFinding]:
        """Probes the folder of staged batches and those of the tables."""
        folders = self._folders()
        if not folders:
            says = "no table exists yet, and only the catalog knows where it will put them"
            return [CheckFinding("storage", "note", says, "the first start shows it")]
        if not write:
            says = f"not probed (--no-write): {', '.join(folders)}"
            return [CheckFinding("storage", "note", says)]
        with ThreadPoolExecutor(_OPENERS, "frazil-probe") as pool:
            items = list(folders.items())[:_PROBES]
            findings = [f for f in pool.map(lambda item: self._probed(*item), items) if f]
        if not findings:
            probed = ", ".join(path for path, _ in items)
            says = f"a probe file was written, read and removed in {probed}"
            findings = [CheckFinding("storage", "ok", says)]
        return findings

    def _folders(self) -> dict[str, Mapping[str, str]]:
        """Folder → properties of its store: of the staging folder first, then of each store in
        which tables lie."""
        config = self._config
        properties = config.catalog.properties.resolved()
        index = self.tables.get(config.index_table)
        folders: dict[str, Mapping[str, str]] = {}
        if index is not None:
            folders[staging_folder(config, index)] = index.store.properties
        elif config.sink.staging_location:
            folders[f"{config.sink.staging_location.rstrip('/')}/{config.sink.id}/"] = properties
        elif location := new_location(config, config.index_table):
            folders[f"{location}/stage/{config.sink.id}/"] = properties
        seen = {_parent(path) for path in folders}
        configured = {table.name: table.location for table in config.tables}
        for name in self.tables or dict.fromkeys(names_of(config)):
            table = self.tables.get(name)
            location = table.location if table else configured.get(name, "")
            location = location or new_location(config, name)
            if location and _parent(location) not in seen:
                seen.add(_parent(location))
                folders[f"{location}/data/"] = table.store.properties if table else properties
        return folders

    def _probed(self, folder: str, properties: Mapping[str, str]) -> CheckFinding | None:
        setting = ("sink", "staging_location") if self._staged(folder) else ("catalog", "warehouse")
        where = local(folder)
        if folder.startswith(("hdfs:", "viewfs:")):
            says = f"{folder} was not probed: only Spark writes there"
            return CheckFinding("storage", "skipped", says)
        try:
            _probe_local(where) if where else _probe_store(folder, properties)
        except (OSError, ValueError, ImportError, pa.ArrowException) as error:
            fact = missing_file_error(error, properties)
            says = f"cannot write, read and remove a probe file in {folder}: {fact}"
            return CheckFinding(
                "storage", "error", says, "check the folder and its rights", setting
            )
        except ConfigError as error:
            return CheckFinding.of("storage", error, setting)
        return None

    def _staged(self, folder: str) -> bool:
        location = self._config.sink.staging_location
        return bool(location) and folder.startswith(location.rstrip("/"))


def _probe_local(folder: str) -> None:
    """In the folder, or in the nearest one that exists: no folder is left behind."""
    path = Path(_existing(folder), f".frazil-check-{uuid.uuid4()}")
    file = next((place for place in Path(folder).absolute().parents if place.is_file()), None)
    if file is not None:
        raise OSError(f"{file} is a file, not a folder")
    try:
        path.write_bytes(_PROBE)
        if path.read_bytes() != _PROBE:
            raise OSError("the probe file that was read back differs")
    finally:
        path.unlink(missing_ok=True)


def _probe_store(folder: str, properties: Mapping[str, str]) -> None:
    path = f"{folder.rstrip('/')}/.frazil-check-{uuid.uuid4()}"
    io = file_io(folder, properties)
    try:
        with io.new_output(path).create() as stream:
            stream.write(_PROBE)
        with io.new_input(path).open() as stream:
            if stream.read() != _PROBE:
                raise OSError("the probe file that was read back differs")
    finally:
        io.delete(path)


def _existing(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).absolute()
    return str(next(place for place in (path, *path.parents) if place.is_dir()))


def _parent(folder: str) -> str:
    """What shares the rights of a folder: the bucket, or the local folder that exists."""
    if path := local(folder):
        return _existing(path)
    scheme, separator, rest = folder.partition("://")
    return f"{scheme}{separator}{rest.partition('/')[0]}"
