"""Which files tell the orders of keys, and what becomes of a table whose memory is gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from frazil.core.config import Config, DecodeConfig, Settings, SinkConfig, TableConfig
from frazil.core.errors import Foreign, Gap, Misfit
from frazil.ingest.route import Metadata
from frazil.ingest.write import TableShape
from frazil.table.orders import Orders
from frazil.table.schema import iceberg_schema
from frazil.table.tables import Held, Tables

METADATA = Metadata("_topic", "_topic_partition", "_offset", "_timestamp")
KEYED = TableConfig("db.t", mode="upsert", key=("id",), order_by="version")
SCHEMA = iceberg_schema(
    pa.schema([pa.field("id", pa.int64()), pa.field("version", pa.int64())]), METADATA, KEYED
)
SHAPE = TableShape("db.t", "", SCHEMA, 0, "", {}, 0, "", {})


def file(path: str, low: int, high: int, **more: str) -> Any:
    def bound(number: int) -> dict[str, Any]:
        return {"keys": [1], "values": [number.to_bytes(8, "little", signed=True).hex()]}

    said = {"file-path": path, "file-format": "PARQUET", "lower-bounds": bound(low),
            "upper-bounds": bound(high), **more}  # fmt: skip
    return SimpleNamespace(descriptor=json.dumps(said))


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
        self.live = [each for each in self.live if each != "expired"] if self.expired else self.live
        self.expired = "expired" in self.live
        return None, {each: known[each] if each in known else self.staged(each)
                      for each in self.live}  # fmt: skip

    def staged(self, manifest: str) -> list[Any]:
        self.read.append(manifest)
        if manifest not in self.manifests:
            raise Foreign(f"{manifest} is gone")
        return self.manifests[manifest]


def batch(*manifests: str, table: str = "db.t") -> Any:
    return SimpleNamespace(tables=[SimpleNamespace(name=table, manifests=manifests)])


def test_staged_and_live_files_are_listed_together_and_each_manifest_is_read_once():
    table = Listing(a=[file("a", 1, 5)], b=[file("b", 6, 9)], c=[file("b", 6, 9)])
    orders = Orders(table, "main", ("id",), "version")

    def listed(*pending: Any) -> dict[str, Any]:
        found = orders.within(SHAPE, pending)
        assert (found.key, found.order) == (("id",), "version")
        return {each.path: each.spans for each in found.files}

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


def test_a_file_that_is_no_parquet_is_told():
    table = Listing(a=[file("a", 1, 5, **{"file-format": "ORC"})])
    table.live = ["a"]
    with pytest.raises(Misfit, match="expected Parquet, found orc"):
        Orders(table, "main", ("id",), "version").within(SHAPE, [])


@pytest.mark.parametrize("order_by", ["version", ""])
def test_a_table_waits_for_its_memory(order_by: str):
    keyed = TableConfig("db.t", mode="upsert", key=("id",), order_by=order_by)
    config = Config(SinkConfig("s"), Settings(), (keyed,), DecodeConfig("json"))
    tables = Tables(None, config, lambda name: name)  # type: ignore[arg-type]
    for name, back in (("db.t", False), ("db.t_deleted", True)):
        table: Any = SimpleNamespace(uuid=name, name=name)
        target: Any = SimpleNamespace(rolled_back=lambda back=back: back)
        tables.held[name] = Held(keyed, table, target, METADATA)
    tables.compare({"db.t": "db.t", "db.t_deleted": "db.t_deleted"})
    if order_by:
        assert tables.names == ["db.t", "db.t_deleted"]
        assert tables.remembers("db.t_deleted")
        assert not tables.remembers("db.t")
        assert {type(each) for each in tables.amiss.values()} == {Gap}
        assert set(tables.amiss) == {"db.t", "db.t_deleted"}
    else:
        assert tables.amiss == {}  # none of ours any more
