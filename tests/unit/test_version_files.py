"""Which files tell the orders of keys, and what becomes of a table whose memory is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from frazil.commit.table_configs import TableConfigs
from frazil.commit.tables import SinkTable, SinkTables, refuse_unsupported
from frazil.commit.version_files import VersionFiles
from frazil.config.model import Config
from frazil.config.sections import DecodeConfig, SinkConfig, TableConfig
from frazil.config.settings import Settings
from frazil.errors import ConfigError, Gap, IdentityMismatch, SchemaMismatch
from frazil.files.writer import WriterSpec
from frazil.iceberg.schema import iceberg_schema
from frazil.pipeline.projection import MetadataColumns

METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
KEYED = TableConfig("db.t", mode="upsert", key=("id",), version_column="version")
SCHEMA = iceberg_schema(
    pa.schema([pa.field("id", pa.int64()), pa.field("version", pa.int64())]), METADATA, KEYED
)
SHAPE = WriterSpec("db.t", "", SCHEMA, 0, "", {}, 0, "", {})


def file(path: str, low: int, high: int, **more: str) -> Any:
    def bound(number: int) -> dict[str, Any]:
        return {"keys": [1], "values": [number.to_bytes(8, "little", signed=True).hex()]}

    fact = {
        "file-path": path,
        "file-format": "PARQUET",
        "lower-bounds": bound(low),
        "upper-bounds": bound(high),
        **more,
    }
    return SimpleNamespace(descriptor=json.dumps(fact))


class Listing:
    """A table: manifest → files; which of them were read, in order."""

    def __init__(self, **manifests: list[Any]) -> None:
        self.manifests = manifests
        self.live: list[str] = []
        self.expired = False
        self.read: list[str] = []

    def refresh(self) -> None: ...

    def contents(
        self, branch: str, known: Mapping[str, list[Any]], data: bool = False
    ) -> tuple[Any, dict[str, list[Any]]]:
        assert data
        self.live = [path for path in self.live if path != "expired"] if self.expired else self.live
        self.expired = "expired" in self.live
        return None, {
            path: known[path] if path in known else self.staged(path) for path in self.live
        }

    def staged(self, manifest: str) -> list[Any]:
        self.read.append(manifest)
        if manifest not in self.manifests:
            raise IdentityMismatch(f"{manifest} is gone")
        return self.manifests[manifest]


def batch(*manifests: str, table: str = "db.t") -> Any:
    return SimpleNamespace(tables=[SimpleNamespace(name=table, manifests=manifests)])


def test_staged_and_live_files_are_listed_together_and_each_manifest_is_read_once():
    table = Listing(a=[file("a", 1, 5)], b=[file("b", 6, 9)], c=[file("b", 6, 9)])
    orders = VersionFiles(table, "main", ("id",), "version")

    def listed(*pending: Any) -> dict[str, Any]:
        listed_bounds = orders.within(SHAPE, pending)
        assert (listed_bounds.key, listed_bounds.order) == (("id",), "version")
        return {file.path: file.spans for file in listed_bounds.files}

    table.live = ["a"]
    assert listed(batch("b"), batch("x", table="db.other")) == {"a": ((1, 5),), "b": ((6, 9),)}
    table.live = ["a", "c"]  # committed, under a manifest of its own
    assert listed(batch("b")) == listed() == {"a": ((1, 5),), "b": ((6, 9),)}
    table.live = ["c"]
    assert listed() == {"b": ((6, 9),)}
    assert table.read == ["b", "a", "c"]
    table.live = ["c", "expired"]  # a compaction and an expiry in between
    assert listed() == {"b": ((6, 9),)}
    assert listed(batch("gone")) == {"b": ((6, 9),)}  # removed when its batch was done


def test_a_file_that_is_no_parquet_is_reported():
    table = Listing(a=[file("a", 1, 5, **{"file-format": "ORC"})])
    table.live = ["a"]
    with pytest.raises(SchemaMismatch, match="expected Parquet, found orc"):
        VersionFiles(table, "main", ("id",), "version").within(SHAPE, [])


@pytest.mark.parametrize("version_column", ["version", ""])
def test_a_table_waits_for_its_memory(version_column: str):
    keyed = TableConfig("db.t", mode="upsert", key=("id",), version_column=version_column)
    config = Config(SinkConfig("s"), Settings(), (keyed,), DecodeConfig("json"))
    configs = TableConfigs(config, lambda name: name)
    tables = SinkTables(None, config, configs)  # type: ignore[arg-type]
    for name, back in (("db.t", False), ("db.t_deleted", True)):
        table: Any = SimpleNamespace(uuid=name, name=name)
        target: Any = SimpleNamespace(tag_mismatch=lambda back=back: Gap("back") if back else None)
        tables.held[name] = SinkTable(keyed, table, target, METADATA)
    tables.compare(
        {"db.t": "db.t", "db.t_deleted": "db.t_deleted"}, lambda target: target.tag_mismatch()
    )
    if version_column:
        assert configs.names == ["db.t", "db.t_deleted"]
        assert configs.is_deleted_keys_table("db.t_deleted")
        assert not configs.is_deleted_keys_table("db.t")
        assert {type(error) for error in tables.unhealthy.values()} == {Gap}
        assert set(tables.unhealthy) == {"db.t", "db.t_deleted"}
    else:
        assert tables.unhealthy == {}  # none of ours any more


@pytest.mark.parametrize(
    ("version", "properties", "words"),
    [
        (1, {}, r"ALTER TABLE db.t SET TBLPROPERTIES \('format-version' = '2'\)"),
        (2, {"write.location-provider.impl": "com.acme.Paths"}, "Java class.*com.acme.Paths"),
        (3, {"encryption.key-id": "k1"}, "encrypted"),
    ],
)
def test_a_table_that_tasks_cannot_write_as_it_wants_is_refused_when_it_is_opened(
    version: int, properties: dict[str, str], words: str
):
    table: Any = SimpleNamespace(name="db.t", format_version=version, properties=properties)
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(table)
    assert re.search(words, str(caught.value))
    for fine in (2, 3):
        table = SimpleNamespace(name="db.t", format_version=fine, properties={})
        refuse_unsupported(table)
