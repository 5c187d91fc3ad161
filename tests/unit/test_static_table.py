"""Iceberg's files read without a JVM. The metadata is written here by hand, as the spec says, and
by pyiceberg's own writers; what Java writes is read in `tests/system/test_static_table.py`."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import sqlite3
import subprocess
import sys
import threading
import types
import uuid
import zlib
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg import manifest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from frazil.errors import (
    ConfigError,
    Expired,
    Fatal,
    FrazilError,
    IdentityMismatch,
    Unavailable,
)
from frazil.iceberg import metadata_location
from frazil.iceberg.file_io import NeedsSpark, zigzag
from frazil.iceberg.metadata_location import REST_TIMEOUTS, rest_timeouts
from frazil.iceberg.static_table import ReadOnlyTable, find
from frazil.iceberg.table import DataFile
from frazil.offsets import Partition

#: name, id, Iceberg's type
FIELDS = (
    ("value", 1, "string"),
    ("_topic", 2, "string"),
    ("_topic_partition", 3, "int"),
    ("_offset", 4, "long"),
)
TOPIC, NUMBER, OFFSET = 2, 3, 4


# ── a table, written by hand ─────────────────────────────────────────────────────────────────────


#: What the spec numbers the fields of manifests and of their lists.
IDS = {
    "status": 0,
    "snapshot_id": 1,
    "sequence_number": 3,
    "file_sequence_number": 4,
    "data_file": 2,
    "content": 134,
    "file_path": 100,
    "file_format": 101,
    "partition": 102,
    "record_count": 103,
    "file_size_in_bytes": 104,
    "block_size_in_bytes": 105,
    "column_sizes": 108,
    "value_counts": 109,
    "null_value_counts": 110,
    "nan_value_counts": 137,
    "lower_bounds": 125,
    "upper_bounds": 128,
    "key_metadata": 131,
    "split_offsets": 132,
    "equality_ids": 135,
    "sort_order_id": 140,
    "first_row_id": 142,
    "referenced_data_file": 143,
    "content_offset": 144,
    "manifest_path": 500,
    "manifest_length": 501,
    "partition_spec_id": 502,
    "added_snapshot_id": 503,
    "added_files_count": 504,
    "existing_files_count": 505,
    "deleted_files_count": 506,
    "added_rows_count": 512,
    "existing_rows_count": 513,
    "deleted_rows_count": 514,
}


def required(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "field-id": IDS.get(name, 1000)}


def optional(name: str, kind: Any) -> dict[str, Any]:
    return {**required(name, ["null", kind]), "default": None}


def pairs(name: str, value: str, number: int) -> dict[str, Any]:
    """A map with ints as keys, which Avro has not."""
    fields = [
        {"name": "key", "type": "int", "field-id": number},
        {"name": "value", "type": value, "field-id": number + 1},
    ]
    item = {"type": "record", "name": f"k{number}_v{number + 1}", "fields": fields}
    return optional(name, {"type": "array", "logicalType": "map", "items": item})


def many(name: str, kind: str, number: int) -> dict[str, Any]:
    return optional(name, {"type": "array", "items": kind, "element-id": number})


def entry_schema(version: int, partition: Sequence[dict[str, Any]]) -> dict[str, Any]:
    file = [
        *([required("content", "int")] if version > 1 else []),
        required("file_path", "string"),
        required("file_format", "string"),
        required("partition", {"type": "record", "name": "r102", "fields": partition}),
        required("record_count", "long"),
        required("file_size_in_bytes", "long"),
        *([required("block_size_in_bytes", "long")] if version == 1 else []),
        pairs("column_sizes", "long", 117),
        pairs("value_counts", "long", 119),
        pairs("null_value_counts", "long", 121),
        pairs("nan_value_counts", "long", 138),
        pairs("lower_bounds", "bytes", 126),
        pairs("upper_bounds", "bytes", 129),
        optional("key_metadata", "bytes"),
        many("split_offsets", "long", 133),
        many("equality_ids", "int", 136),
        optional("sort_order_id", "int"),
        *(
            [
                optional("first_row_id", "long"),
                optional("referenced_data_file", "string"),
                optional("content_offset", "long"),
            ]
            if version > 2
            else []
        ),
    ]
    numbers = [optional("sequence_number", "long"), optional("file_sequence_number", "long")]
    return {
        "type": "record",
        "name": "manifest_entry",
        "fields": [
            required("status", "int"),
            optional("snapshot_id", "long"),
            *(numbers if version > 1 else []),
            required("data_file", {"type": "record", "name": "r2", "fields": file}),
        ],
    }


def list_schema(version: int) -> dict[str, Any]:
    names = [
        ("content", "int", 517),
        ("sequence_number", "long", 515),
        ("min_sequence_number", "long", 516),
    ]
    kinds = ("added", "existing", "deleted")
    return {
        "type": "record",
        "name": "manifest_file",
        "fields": [
            required("manifest_path", "string"),
            required("manifest_length", "long"),
            required("partition_spec_id", "int"),
            *(
                {"name": name, "type": kind, "field-id": id}
                for name, kind, id in names
                if version > 1
            ),
            required("added_snapshot_id", "long"),
            *(optional(f"{kind}_files_count", "int") for kind in kinds),
            *(required(f"{kind}_rows_count", "long") for kind in kinds),
        ],
    }


def bounds(topic: str | None, number: int | None, offset: int | None) -> dict[int, bytes]:
    values = {1: b"a value"}
    if topic is not None:
        values[TOPIC] = topic.encode()
    if number is not None:
        values[NUMBER] = number.to_bytes(4, "little", signed=True)
    if offset is not None:
        values[OFFSET] = offset.to_bytes(8, "little", signed=True)
    return values


def data(
    path: str,
    low: dict[int, bytes] | None = None,
    high: dict[int, bytes] | None = None,
    *,
    rows: int = 10,
    nulls: dict[int, int] | None = None,
    status: int = 1,
    sequence: int | None = None,
    content: int = 0,
    kind: str = "PARQUET",
    partition: dict[str, Any] | None = None,
) -> dict[str, Any]:
    def mapped(values: dict[int, Any] | None) -> list[dict[str, Any]] | None:
        if values is None:
            return None
        return [{"key": key, "value": value} for key, value in values.items()]

    file = {
        "content": content,
        "file_path": path,
        "file_format": kind,
        "partition": partition or {},
        "record_count": rows,
        "file_size_in_bytes": 1000,
        "block_size_in_bytes": 1000,
        "column_sizes": mapped({1: 100, 2: 100}),
        "value_counts": mapped({1: rows, 2: rows}),
        "null_value_counts": mapped(nulls),
        "lower_bounds": mapped(low),
        "upper_bounds": mapped(high),
        "split_offsets": [4],
        "sort_order_id": 0,
    }
    return {"status": status, "sequence_number": sequence, "data_file": file}


def of(path: str, topic: str, number: int, low: int, high: int, **more: Any) -> dict[str, Any]:
    """A file of one topic partition."""
    return data(path, bounds(topic, number, low), bounds(topic, number, high), **more)


class Made:
    """A table in a folder; snapshots are numbered 1, 2, 3, …"""

    def __init__(self, folder: Path, version: int = 2, fields: Sequence[Any] = FIELDS) -> None:
        self.folder = folder
        self.version = version
        (folder / "metadata").mkdir(parents=True)
        (folder / "data").mkdir()
        schema = {
            "type": "struct",
            "schema-id": 1,
            "fields": [
                {"id": id, "name": name, "required": False, "type": kind}
                for name, id, kind in fields
            ],
        }
        self.values: dict[str, Any] = {
            "format-version": version,
            "table-uuid": str(uuid.uuid4()),
            "location": f"{folder}/",
            "last-updated-ms": 1,
            "last-column-id": 4,
            "current-schema-id": 1,
            "schemas": [{"type": "struct", "schema-id": 0, "fields": []}, schema],
            "default-spec-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}],
            "last-partition-id": 999,
            "default-sort-order-id": 0,
            "last-sequence-number": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": {},
            "snapshots": [],
            "current-snapshot-id": -1,
            "refs": {},
        }

    def path(self, *parts: str) -> str:
        return str(self.folder.joinpath(*parts))

    def avro(self, schema: Any, rows: Sequence[Any], codec: str = "deflate") -> str:
        path = self.path("metadata", f"{uuid.uuid4()}.avro")
        with open(path, "wb") as file:
            fastavro.writer(file, fastavro.parse_schema(schema), rows, codec=codec, sync_interval=1)
        return path

    def manifest(
        self,
        *entries: dict[str, Any],
        sequence: int = 0,
        content: int = 0,
        partition: Sequence[dict[str, Any]] = (),
        codec: str = "deflate",
    ) -> dict[str, Any]:
        counts = [sum(entry["status"] == status for entry in entries) for status in (1, 0, 2)]
        names = ("added_files_count", "existing_files_count", "deleted_files_count")
        return {
            "manifest_path": self.avro(entry_schema(self.version, partition), entries, codec),
            "manifest_length": 1,
            "partition_spec_id": 0,
            "content": content,
            "sequence_number": sequence,
            "min_sequence_number": 0,
            "added_snapshot_id": 1,
            "added_rows_count": 0,
            "existing_rows_count": 0,
            "deleted_rows_count": 0,
            **dict(zip(names, counts, strict=True)),
        }

    def commit(
        self,
        *manifests: dict[str, Any],
        branch: str = "main",
        parent: int | None = None,
        **summary: str,
    ) -> int:
        """A snapshot with exactly these manifests."""
        number = len(self.values["snapshots"]) + 1
        head = self.values["refs"].get(branch, {}).get("snapshot-id") if parent is None else parent
        snapshot = {
            "snapshot-id": number,
            "timestamp-ms": 1000 * number,
            "schema-id": 1,
            "summary": {"operation": "append", **summary},
            "manifest-list": self.avro(list_schema(self.version), manifests),
        }
        if self.version > 1:
            snapshot["sequence-number"] = number
        if head:
            snapshot["parent-snapshot-id"] = head
        self.values["snapshots"].append(snapshot)
        self.values["refs"][branch] = {"snapshot-id": number, "type": "branch"}
        if branch == "main":
            self.values["current-snapshot-id"] = number
        return number

    def save(self, name: str = "v1.metadata.json") -> str:
        raw = json.dumps(self.values).encode()
        path = self.path("metadata", name)
        Path(path).write_bytes(gzip.compress(raw) if "gz" in name else raw)
        return path

    def plain(self) -> ReadOnlyTable:
        return ReadOnlyTable("db.t", self.save(), {})


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "t")


def parquet(
    made: Made, name: str, columns: dict[str, Any], ids: Sequence[int] = (), **write: Any
) -> str:
    """A data file; `ids`: of its columns, in their order."""
    table = pa.table(columns)
    fields = [
        field.with_metadata({"PARQUET:field_id": str(id)})
        for field, id in zip(table.schema, ids, strict=False)
    ]
    path = made.path("data", name)
    pq.write_table(table.cast(pa.schema(fields)) if ids else table, path, **write)
    return path


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────


def test_a_table_is_what_its_metadata_file_says(made: Made):
    made.values["properties"] = {"frazil.metadata-columns": "a,b,c,d"}
    table = made.plain()
    assert table.name == "db.t"
    assert table.metadata_file == made.path("metadata", "v1.metadata.json")
    assert table.uuid == made.values["table-uuid"]
    assert table.location == str(made.folder)
    assert table.properties == {"frazil.metadata-columns": "a,b,c,d"}
    assert json.loads(table.schema) == made.values["schemas"][1]
    assert list(table.history("main")) == []
    assert table.files() == ([], 0)
    assert table.tags() == {}


def test_version_1_may_have_one_schema_and_no_uuid(made: Made):
    schema = made.values.pop("schemas")[1]
    for key in ("current-schema-id", "table-uuid", "refs", "properties"):
        del made.values[key]
    made.values.update({"format-version": 1, "schema": schema, "current-snapshot-id": None})
    table = made.plain()
    assert json.loads(table.schema) == schema
    assert (table.uuid, table.properties, list(table.history("main"))) == ("", {}, [])


@pytest.mark.parametrize("name", ["00001-a.gz.metadata.json", "v1.metadata.json.gz"])
def test_metadata_may_be_compressed(made: Made, name: str):
    made.commit(sink="s")
    assert next(ReadOnlyTable("t", made.save(name), {}).history("main")).summary == {"sink": "s"}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b"\x1f\x8bnot gzip", b'{"location": "x"}']
)
def test_a_file_that_is_no_metadata_is_refused(tmp_path: Path, raw: bytes):
    (tmp_path / "v1.metadata.json").write_bytes(raw)
    with pytest.raises(Fatal, match=r"cannot read .*v1.metadata.json: expected the metadata of a"):
        ReadOnlyTable("t", str(tmp_path / "v1.metadata.json"), {})


def test_a_newer_format_is_not_guessed_at(made: Made):
    made.values["format-version"] = 4
    with pytest.raises(Fatal, match="expected a format version up to 3, found 4"):
        made.plain()


def test_a_metadata_file_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(
        IdentityMismatch, match=r"cannot read .*/v9.metadata.json: it does not exist"
    ):
        ReadOnlyTable("t", str(tmp_path / "v9.metadata.json"), {})


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────


def test_history_is_a_branchs_ancestry_newest_first(made: Made):
    for number in ("1", "2", "3"):
        made.commit(n=number)
    made.commit(branch="audit", parent=2, n="4")
    table = made.plain()
    snapshots = list(table.history("main"))
    assert [(snapshot.id, snapshot.parent, snapshot.sequence) for snapshot in snapshots] == [
        (3, 2, 3),
        (2, 1, 2),
        (1, None, 1),
    ]
    assert snapshots[0].timestamp_ms == 3000
    assert snapshots[0].operation == "append"
    assert snapshots[0].summary == {"n": "3"}
    assert snapshots[0].manifest_list == made.values["snapshots"][2]["manifest-list"]
    assert [snapshot.id for snapshot in table.history("audit")] == [4, 2, 1]
    assert list(table.history("none")) == []


def test_history_ends_where_snapshots_were_expired(made: Made):
    for _ in range(4):
        made.commit()
    del made.values["snapshots"][:2]
    assert [(snapshot.id, snapshot.parent) for snapshot in made.plain().history("main")] == [
        (4, 3),
        (3, 2),
    ]


def test_history_that_bites_its_own_tail_ends(made: Made):
    made.commit()
    made.commit()
    made.values["snapshots"][0]["parent-snapshot-id"] = 2
    assert [snapshot.id for snapshot in made.plain().history("main")] == [2, 1]


def test_tags_name_snapshots_that_are_still_there(made: Made):
    made.commit(n="1")
    made.commit(n="2")
    made.values["refs"]["frazil/s"] = {"snapshot-id": 1, "type": "tag"}
    made.values["refs"]["lost"] = {"snapshot-id": 77, "type": "tag"}
    table = made.plain()
    assert {name: snapshot.id for name, snapshot in table.tags().items()} == {"frazil/s": 1}
    tagged = table.tagged("frazil/s")
    assert tagged is not None
    assert tagged.summary == {"n": "1"}
    assert table.tagged("lost") is None
    assert table.tagged("none") is None


def test_a_branch_carries_a_snapshot_whose_newest_manifest_it_lists(made: Made):
    first, second, third = (made.manifest(data(f"f{n}"), sequence=n) for n in (1, 2, 3))
    made.commit(first)
    tagged = made.commit(first, second)
    made.commit(first, second, third)
    assert made.plain().carries("main", tagged)
    made.commit(second, third)
    assert made.plain().carries("main", tagged)
    made.commit(first, third)  # rolled back, and others went on
    assert not made.plain().carries("main", tagged)
    assert made.plain().carries("main", 1)


def test_a_hundred_thousand_snapshots_are_made_one_by_one(made: Made):
    made.commit()
    one = made.values["snapshots"][0]
    made.values["snapshots"] = [
        {**one, "snapshot-id": n, "parent-snapshot-id": n - 1} for n in range(1, 100_001)
    ]
    made.values["current-snapshot-id"] = 100_000
    table = made.plain()
    history = table.history("main")
    assert next(history).id == 100_000
    assert sum(1 for _ in history) == 99_999


# ── files ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_files_bounds_say_whose_records_it_holds(tmp_path: Path, version: int):
    made = Made(tmp_path / "t", version)
    made.commit(
        made.manifest(
            of("a", "orders", 0, 0, 9, rows=10, nulls={OFFSET: 0}),
            of("b", "orders", 3, 5, 2**40, rows=7, nulls={1: 3}),
            sequence=1,
        ),
        made.manifest(of("c", "päyments", 0, 0, 0, rows=3, nulls={OFFSET: 2}), sequence=2),
    )
    files, deletes = made.plain().files()
    assert deletes == 0
    first, second = (1, 2) if version > 1 else (0, 0)
    assert files == [
        DataFile("a", 10, Partition("orders", 0), (0, 9), 0, first, ("orders",) * 2),
        DataFile("b", 7, Partition("orders", 3), (5, 2**40), 0, first, ("orders",) * 2),
        DataFile("c", 3, Partition("päyments", 0), (0, 0), 2, second, ("päyments",) * 2),
    ]


def test_only_what_is_live_counts(made: Made):
    made.commit(
        made.manifest(
            of("gone", "t", 0, 0, 9, status=2),
            of("old", "t", 0, 10, 19, status=0, sequence=4),
            of("new", "t", 0, 20, 29),
            sequence=9,
        ),
        made.manifest(of("all gone", "t", 0, 0, 9, status=2), sequence=9),
        made.manifest(
            data("d1", content=1),
            data("d2", content=2),
            data("d3", content=1, kind="PUFFIN"),
            data("d4", content=1, status=2),
            content=1,
            sequence=9,
        ),
    )
    files, deletes = made.plain().files()
    assert [(file.path, file.sequence) for file in files] == [("old", 4), ("new", 9)]
    assert deletes == 3


@pytest.mark.parametrize(
    ("low", "high", "partition", "offsets"),
    [
        (bounds("t", 0, 3), bounds("t", 1, 4), None, (3, 4)),
        (bounds("s", 0, 3), bounds("t", 0, 4), None, (3, 4)),
        # a topic of more than 16 characters, as Iceberg cuts bounds by default
        (bounds("a.topic.with.a.l", 0, 3), bounds("a.topic.with.a.m", 0, 4), None, (3, 4)),
        # all that would be larger is cut away as well: no upper bound
        (bounds("\U0010ffff" * 16, 0, 3), bounds(None, 0, 4), None, (3, 4)),
        (
            bounds("a.topic.of.16.ch", 0, 3),
            bounds("a.topic.of.16.ch", 0, 4),
            Partition("a.topic.of.16.ch", 0),
            (3, 4),
        ),
        (bounds("t", 0, 3), bounds("t", 0, None), Partition("t", 0), None),
        (bounds("t", None, 3), bounds("t", None, 4), None, (3, 4)),
        (bounds(None, 0, 3), bounds(None, 0, 4), None, (3, 4)),
        (bounds("t", 0, None), bounds("t", 0, 4), Partition("t", 0), None),
        (bounds("", 0, -3), bounds("", 0, -1), Partition("", 0), (-3, -1)),
        ({}, {}, None, None),
        (None, None, None, None),
        # a column that was an int before it became a long, and one that is a long here
        (
            {**bounds("t", None, None), NUMBER: b"\1" + b"\0" * 7, OFFSET: b"\5\0\0\0"},
            {**bounds("t", None, None), NUMBER: b"\1" + b"\0" * 7, OFFSET: b"\6\0\0\0"},
            Partition("t", 1),
            (5, 6),
        ),
    ],
)
def test_bounds_that_do_not_say_it_for_certain_say_nothing(
    made: Made, low: Any, high: Any, partition: Any, offsets: Any
):
    # between files that have all: what one lacks must not come from its neighbour
    around = [of(path, "near", 7, 70, 79) for path in ("x", "y")]
    made.commit(made.manifest(around[0], data("a", low, high), around[1]))
    (_, file, _), _ = made.plain().files()
    assert (file.path, file.partition, file.offsets) == ("a", partition, offsets)
    topics = [(bound or {}).get(TOPIC) for bound in (low, high)]
    assert file.topics == (None if None in topics else tuple(topic.decode() for topic in topics))


def test_the_columns_are_those_that_the_table_names(tmp_path: Path):
    fields = (
        ("value", 1, "string"),
        ("_offset", 9, "long"),
        ("where", TOPIC, "string"),
        ("number", NUMBER, "int"),
        ("place", OFFSET, "long"),
    )
    made = Made(tmp_path / "t", fields=fields)
    made.commit(made.manifest(of("a", "t", 1, 2, 3)))
    (file,), _ = made.plain().files()
    assert (file.partition, file.offsets) == (None, None)
    made.values["properties"]["frazil.metadata-columns"] = "where,number,place,when"
    (file,), _ = made.plain().files()
    assert (file.partition, file.offsets) == (Partition("t", 1), (2, 3))


def test_partitioned_tables_and_those_whose_partitions_changed(made: Made):
    """The manifests of one snapshot have different schemas, and may be many."""
    day = {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None}
    price = {
        "type": "fixed",
        "name": "decimal_9_2",
        "size": 4,
        "logicalType": "decimal",
        "precision": 9,
        "scale": 2,
    }
    specs = [
        ([], {}),
        ([day], {"day": 20_000}),
        ([day, optional("key", "string")], {"day": None, "key": "a"}),
        ([optional("price", price)], {"price": b"\0\0\0\7"}),
        ([optional("id", {"type": "fixed", "name": "uuid_fixed", "size": 16})], {"id": b"i" * 16}),
        ([optional("_offset", "long")], {"_offset": 5}),
    ]
    made.commit(
        *(
            made.manifest(
                *(of(f"{i}/{j}", f"t{i % 3}", i % 5, j, j + 1, partition=values) for j in range(3)),
                partition=partition,
                sequence=i + 1,
            )
            for i in range(200)
            for partition, values in [specs[i % len(specs)]]
        )
    )
    files, _ = made.plain().files()
    expected = [
        DataFile(
            f"{i}/{j}", 10, Partition(f"t{i % 3}", i % 5), (j, j + 1), 0, i + 1, (f"t{i % 3}",) * 2
        )
        for i in range(200)
        for j in range(3)
    ]
    assert sorted(files, key=lambda f: f.path) == sorted(expected, key=lambda f: f.path)


def test_files_of_a_branch_or_of_any_snapshot(made: Made):
    first = made.manifest(of("a", "t", 0, 0, 9))
    second = made.manifest(of("b", "t", 0, 10, 19))
    made.commit(first)
    made.commit(first, second)
    made.commit(second, branch="other", parent=1)
    table = made.plain()
    assert [file.path for file in table.files()[0]] == ["a", "b"]
    assert [file.path for file in table.files("other")[0]] == ["b"]
    assert [file.path for file in table.files("main", 1)[0]] == ["a"]
    assert table.files("none") == ([], 0)
    with pytest.raises(Expired, match=r"cannot read snapshot 9 of table db.t: it does not exist"):
        table.files(snapshot_id=9)


def test_version_1_may_name_its_manifests_itself(tmp_path: Path):
    made = Made(tmp_path / "t", 1)
    manifest = made.manifest(of("a", "t", 0, 0, 9))
    made.commit()
    del made.values["snapshots"][0]["manifest-list"]
    made.values["snapshots"][0]["manifests"] = [manifest["manifest_path"]]
    assert [file.path for file in made.plain().files()[0]] == ["a"]


def snappy(path: str) -> None:
    """A container without compression, packed anew: no writer here knows how."""
    raw = Path(path).read_bytes()
    mark = raw[-16:]
    packed = [raw[: raw.index(mark)].replace(b"\x08null", b"\x0csnappy"), mark]
    with open(path, "rb") as file:
        for block in fastavro.block_reader(file):
            plain = block.bytes_.getvalue()
            small = pa.compress(plain, "snappy", asbytes=True) + zlib.crc32(plain).to_bytes(
                4, "big"
            )
            packed += [zigzag(block.num_records), zigzag(len(small)), small, mark]
    Path(path).write_bytes(b"".join(packed))


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "snappy"])
def test_manifests_in_several_blocks_of_any_codec(made: Made, codec: str):
    entries = [of(f"f{i}" * 20, "t", 0, i, i) for i in range(50)]
    manifest = made.manifest(*entries, codec="null" if codec == "snappy" else codec)
    if codec == "snappy":
        snappy(manifest["manifest_path"])
    made.commit(manifest, made.manifest(of("more", "t", 1, 0, 0)))
    files, _ = made.plain().files()
    assert [file.path for file in files] == [*(f"f{i}" * 20 for i in range(50)), "more"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"x" + raw,
        lambda raw: raw[:-1] + b"x",
        lambda raw: raw + b"\2\2",
        lambda raw: raw.replace(b"deflate", b"unheard"),
    ],
)
def test_a_damaged_manifest_is_named_and_nothing_is_read_from_it(made: Made, spoil: Any):
    bad = made.manifest(*(of(f"f{i}", "t", 0, i, i) for i in range(50)))
    made.commit(made.manifest(of("good", "t", 0, 0, 9)), bad)
    path = Path(bad["manifest_path"])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Fatal, match=f"cannot read {path}: "):
        made.plain().files()


def test_a_manifest_with_fewer_entries_than_the_list_says_is_refused(made: Made):
    manifest = made.manifest(of("a", "t", 0, 0, 9), of("b", "t", 0, 10, 19))
    made.commit({**manifest, "existing_files_count": 1})
    with pytest.raises(Fatal, match=r"expected 3 entries, found 2"):
        made.plain().files()


def test_a_manifest_that_says_no_counts_is_believed(made: Made):
    nothing = dict.fromkeys(("added_files_count", "existing_files_count", "deleted_files_count"))
    made.commit({**made.manifest(of("a", "t", 0, 0, 9)), **nothing})
    assert len(made.plain().files()[0]) == 1


def test_a_manifest_that_is_gone_is_named(made: Made):
    manifest = made.manifest(of("a", "t", 0, 0, 9))
    made.commit(manifest)
    Path(manifest["manifest_path"]).unlink()
    with pytest.raises(
        IdentityMismatch, match=f"cannot read {manifest['manifest_path']}: it does not exist"
    ):
        made.plain().files()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("codec", ["null", "deflate", "zstandard", "bzip2"])
def test_what_pyiceberg_writes_is_read(tmp_path: Path, version: Any, codec: Any):
    made = Made(tmp_path / "t", version)
    schema = Schema.model_validate(made.values["schemas"][1])
    store = PyArrowFileIO()
    output = store.new_output(made.path("metadata", "m.avro"))
    with manifest.write_manifest(version, PartitionSpec(), schema, output, 1, codec) as entries:
        for i in range(300):
            file = manifest.DataFile.from_args(
                content=manifest.DataFileContent.DATA,
                file_path=f"f{i}",
                record_count=1,
                file_format=manifest.FileFormat.PARQUET,
                partition=Record(),
                file_size_in_bytes=1,
                null_value_counts={OFFSET: 1},
                lower_bounds=bounds("t", i % 7, i),
                upper_bounds=bounds("t", i % 7, i + 1),
            )
            status = manifest.ManifestEntryStatus.ADDED
            entries.add(
                manifest.ManifestEntry.from_args(status=status, snapshot_id=1, data_file=file)
            )
    listed = made.path("metadata", "l.avro")
    output = store.new_output(listed)
    with manifest.write_manifest_list(version, output, 1, None, 1, codec) as manifests:
        manifests.add_manifests([entries.to_manifest_file()])
    made.commit()
    made.values["snapshots"][0]["manifest-list"] = listed
    files, _ = made.plain().files()
    assert files == [
        DataFile(f"f{i}", 1, Partition("t", i % 7), (i, i + 1), 1, int(version > 1), ("t", "t"))
        for i in range(300)
    ]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────

INDEX = (
    ("table_name", 1, "string"),
    ("topic", 2, "string"),
    ("start", 3, "long"),
    ("partition", 4, "int"),
    ("seen", 5, "timestamptz"),
)


@pytest.fixture
def index(tmp_path: Path) -> Made:
    return Made(tmp_path / "index", fields=INDEX)


def test_rows_come_as_columns_with_texts_as_dictionaries(index: Made):
    first = parquet(
        index,
        "a",
        {"table_name": pa.array(["x", "y", "x"], pa.large_string()), "start": [1, 2, 3]},
        (1, 3),
    )
    # an older file: by its old name, and when the column was an int
    second = parquet(
        index, "b", {"begin": pa.array([4, None], pa.int32()), "table": ["x", None]}, (3, 1)
    )
    index.commit(index.manifest(data(first), data(second)))
    rows = index.plain().rows(["start", "table_name", "topic", "seen"])
    assert rows.to_pydict() == {
        "start": [1, 2, 3, 4, None],
        "table_name": ["x", "y", "x", "x", None],
        "topic": [None] * 5,
        "seen": [None] * 5,
    }
    text = pa.dictionary(pa.int32(), pa.string())
    assert rows.schema.types == [pa.int64(), text, text, pa.timestamp("us", "UTC")]


def test_rows_are_chosen_by_values(index: Made):
    columns = {
        "table_name": ["x", "y", None, "x"],
        "topic": ["a", "a", "a", "b"],
        "start": [1, 2, 3, 4],
    }
    index.commit(
        index.manifest(
            data(parquet(index, "a", columns, (1, 2, 3))),
            data(parquet(index, "b", {"start": [5]}, (3,))),
        )
    )
    table = index.plain()
    assert table.rows(["start"], {"table_name": ["x", "z"]})["start"].to_pylist() == [1, 4]
    assert table.rows(["start"], {"table_name": {"x"}, "topic": {"b"}})["start"].to_pylist() == [4]
    assert table.rows(["topic"], {"table_name": ["y"]}).to_pydict() == {"topic": ["a"]}
    none = table.rows(["start", "table_name"], {"table_name": []})
    assert none.num_rows == 0
    assert none.schema.types == [pa.int64(), pa.dictionary(pa.int32(), pa.string())]


def test_files_whose_bounds_exclude_the_values_are_not_opened(index: Made):
    def held(name: str, low: str, high: str) -> dict[str, Any]:
        path = parquet(index, name, {"table_name": [low, high]}, (1,))
        return data(path, {1: low.encode()[:16]}, {1: (high[:15] + "~").encode()})

    entries = [held("a", "db.a", "db.c"), held("b", "db.d", "db.f"), held("c", "db.f", "db.z")]
    index.commit(index.manifest(*entries))
    Path(index.path("data", "a")).unlink()
    table = index.plain()
    assert table.rows(["table_name"], {"table_name": ["db.f", "zz"]}).num_rows == 2
    with pytest.raises(IdentityMismatch, match="it does not exist"):
        table.rows(["table_name"], {"table_name": ["db.b"]})


def test_groups_of_rows_whose_bounds_exclude_the_values_are_not_read(index: Made):
    names = [name for name in "abc" for _ in range(1000)]
    path = parquet(
        index,
        "a",
        {"table_name": names, "start": list(range(3000))},
        (1, 3),
        row_group_size=1000,
        compression="none",
        use_dictionary=["table_name"],
    )
    index.commit(index.manifest(data(path)))
    column = pq.ParquetFile(path).metadata.row_group(0).column(1)
    with open(path, "r+b") as file:  # the first group's numbers cannot be read any more
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 40)
    table = index.plain()
    assert table.rows(["start"], {"table_name": ["b"]})["start"].to_pylist() == [*range(1000, 2000)]
    with pytest.raises(FrazilError, match=f"cannot read {path}"):
        table.rows(["start"], {"table_name": ["a"]})


def test_a_file_without_ids_is_read_by_names(index: Made):
    index.commit(index.manifest(data(parquet(index, "a", {"topic": ["a"], "start": [1]}))))
    assert index.plain().rows(["start", "topic"]).to_pylist() == [{"start": 1, "topic": "a"}]


def test_of_no_files_there_are_no_rows(index: Made):
    assert index.plain().rows(["start", "topic"]).to_pydict() == {"start": [], "topic": []}
    assert index.plain().rows(["start"], {"topic": ["a"]}).to_pydict() == {"start": []}


def test_a_column_that_the_table_lacks_is_named(index: Made):
    with pytest.raises(IdentityMismatch, match=r"cannot read table db.t: it has no column nope"):
        index.plain().rows(["start", "nope"])


def test_a_data_file_that_is_no_parquet_is_named(index: Made):
    path = index.path("data", "a")
    Path(path).write_bytes(b"PAR1 is how it begins, and no more")
    index.commit(index.manifest(data(path)))
    with pytest.raises(Fatal, match=f"cannot read {path}"):
        index.plain().rows(["start"])
    index.commit(index.manifest(data(path, kind="ORC")))
    with pytest.raises(Fatal, match="expected parquet, found orc"):
        index.plain().rows(["start"])


def test_deleted_positions_are_left_out(made: Made):
    """Of the first file two rows, of the second none."""
    columns = {"_topic": ["t"] * 4, "_topic_partition": pa.array([1] * 4, pa.int32())}
    paths = [
        parquet(made, name, {**columns, "_offset": [start + i for i in range(4)]}, (2, 3, 4))
        for name, start in (("a.parquet", 0), ("b.parquet", 10))
    ]
    deleted = {"file_path": [paths[0]] * 2, "pos": [0, 2]}
    delete = parquet(made, "d.parquet", deleted, (2147483546, 2147483545))
    files = made.manifest(*(data(path, rows=4, status=0, sequence=1) for path in paths), sequence=1)
    made.commit(files)
    made.commit(files, made.manifest(data(delete, rows=2, content=1), content=1, sequence=2))
    table = made.plain()
    assert table.files()[1] == 1
    assert sorted(table.origins("main")["offset"].to_pylist()) == [1, 3, 10, 11, 12, 13]
    assert table.rows(["_offset"], {"_topic": ["u"]}).num_rows == 0
    assert table.rows(["_offset"], {"_topic": ["t"]}).num_rows == 6


def test_rows_deleted_by_equality_are_not_guessed_at(made: Made):
    path = parquet(made, "a", {"_offset": [1]}, (4,))
    made.commit(made.manifest(data(path)), made.manifest(data("d", content=2), content=1))
    for read in (lambda: made.plain().origins("main"), lambda: made.plain().rows(["_offset"])):
        with pytest.raises(Fatal, match=r"cannot read table db.t: it has rows deleted by equality"):
            read()


def test_origins_are_topic_partition_and_offset_of_every_row(made: Made):
    path = parquet(
        made,
        "a",
        {
            "value": ["v", "w"],
            "_topic": ["t", "u"],
            "_topic_partition": pa.array([0, 1], pa.int32()),
            "_offset": [5, 6],
        },
        (1, 2, 3, 4),
    )
    foreign = parquet(made, "b", {"value": ["v"]}, (1,))
    made.commit(made.manifest(data(path)), branch="b")
    made.commit(made.manifest(data(path), data(foreign)))
    table = made.plain()
    assert table.origins("b").to_pydict() == {
        "topic": ["t", "u"],
        "partition": [0, 1],
        "offset": [5, 6],
    }
    assert table.origins("main")["offset"].to_pylist() == [5, 6, None]
    assert table.origins("none").to_pydict() == {"topic": [], "partition": [], "offset": []}


# ── catalogs ─────────────────────────────────────────────────────────────────────────────────────


def test_a_hadoop_table_is_its_newest_version(tmp_path: Path):
    made = Made(tmp_path / "warehouse" / "db" / "sub" / "t")
    catalog = {"type": "hadoop", "warehouse": f"file://{tmp_path}/warehouse/"}

    def newest() -> str:
        table = find(catalog, "db.sub.t")
        assert table is not None
        return Path(table.metadata_file).name

    assert find(catalog, "db.sub.t") is None
    assert find(catalog, "db.none") is None
    for n in (2, 3, 9, 10):
        made.save(f"v{n}.metadata.json")
    assert newest() == "v10.metadata.json"
    hint = made.folder / "metadata" / "version-hint.text"
    hint.write_text("2")  # it is behind by one: a commit writes it last
    assert newest() == "v3.metadata.json"
    hint.write_text("garbage")
    assert newest() == "v10.metadata.json"
    hint.write_text("11\n")
    assert newest() == "v10.metadata.json"
    made.save("v11.gz.metadata.json")
    assert newest() == "v11.gz.metadata.json"
    made.save("v12.metadata.json.gz")
    assert newest() == "v12.metadata.json.gz"


def test_a_table_may_be_given_as_a_path(made: Made):
    first = made.save("00001-aaa.metadata.json")
    newest = made.save("00002-bbb.metadata.json")
    for name in (str(made.folder), f"{made.folder}/", f"file:{made.folder}"):
        table = find({}, name)
        assert table is not None
        assert table.metadata_file.removeprefix("file:") == newest
    for name in (first, f"file://{first}"):
        table = find({"type": "nessie"}, name)
        assert table is not None
        assert table.metadata_file == name
    made.save("00002-ccc.metadata.json")
    with pytest.raises(ConfigError, match=r"00002-bbb.metadata.json and 00002-ccc.metadata.json"):
        find({}, str(made.folder))
    assert find({}, "/nowhere/t") is None


def catalog_of(folder: Path, rows: Sequence[tuple[Any, ...]], version: int = 1) -> dict[str, str]:
    path = folder / "a catalog #1%.db"
    kind = ", iceberg_type VARCHAR(5)" if version else ""
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE iceberg_tables (catalog_name VARCHAR(255), table_namespace VARCHAR(255), "
            "table_name VARCHAR(255), metadata_location VARCHAR(1000), "
            f"previous_metadata_location VARCHAR(1000){kind})"
        )
        for row in rows:
            marks = ", ".join("?" * (5 + version))
            database.execute(f"INSERT INTO iceberg_tables VALUES ({marks})", row)
    database.close()
    return {"type": "jdbc", "uri": f"jdbc:sqlite:{path}?busy_timeout=10000&journal_mode=WAL"}


@pytest.mark.parametrize("version", [0, 1])
def test_a_catalog_in_sqlite_says_where_its_tables_are(made: Made, tmp_path: Path, version: int):
    path = made.save()
    kinds = [("TABLE",), (None,)] if version else [(), ()]
    rows = [
        ("lake", "db", "t", f"file:{path}", None, *kinds[0]),
        ("lake", "db.sub", "u", path, path, *kinds[1]),
    ]
    if version:
        rows.append(("lake", "db", "v", "/a/view", None, "VIEW"))
    catalog = catalog_of(tmp_path, rows, version)
    for name in ("db.t", "db.sub.u"):
        table = find(catalog, name)
        assert table is not None
        assert (table.name, table.uuid) == (name, made.values["table-uuid"])
    for name in ("db.v", "db.w", "u", "sub.u"):
        assert find(catalog, name) is None


def test_catalogs_that_share_a_database_are_distinguished_by_name(made: Made, tmp_path: Path):
    rows = [("one", "db", "t", made.save(), None, None), ("two", "db", "t", "/other", None, None)]
    catalog = catalog_of(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"table db.t among several: catalogs one and two have"):
        find(catalog, "db.t")
    assert find({**catalog, "name": "one"}, "db.t") is not None
    assert find({**catalog, "name": "three"}, "db.t") is None


def test_a_catalog_that_is_not_there_is_no_empty_one(tmp_path: Path):
    catalog = {"type": "jdbc", "uri": f"jdbc:sqlite:{tmp_path}/none.db"}
    with pytest.raises(ConfigError, match=r"cannot open catalog .*none.db: it does not exist"):
        find(catalog, "db.t")
    assert not (tmp_path / "none.db").exists()
    with sqlite3.connect(tmp_path / "none.db") as database:
        database.execute("CREATE TABLE other (a)")
    database.close()
    assert find(catalog, "db.t") is None
    (tmp_path / "none.db").write_bytes(b"not a database, but long enough to be one" * 100)
    with pytest.raises(Unavailable, match="cannot read catalog"):
        find(catalog, "db.t")


@pytest.mark.parametrize(
    ("catalog", "message"),
    [
        ({"type": "nessie"}, "a catalog of type nessie"),
        ({"catalog-impl": "com.example.Own"}, "a catalog of type com.example.Own"),
        ({"type": "jdbc", "uri": "jdbc:mysql://h/d?password=pass-word"}, "a catalog in mysql"),
        ({"type": "jdbc", "uri": "jdbc:postgresql://h/d?password=pass-word"}, "psycopg"),
        ({"type": "hive", "uri": "thrift://localhost:1"}, "not installed"),
        ({"type": "glue"}, "not installed"),
        ({"catalog-impl": "org.apache.iceberg.aws.glue.GlueCatalog"}, "not installed"),
        ({"uri": "thrift://localhost:1"}, "not installed"),  # Spark's default is Hive
        ({"type": "rest", "uri": "http://h", "rest.auth.type": "google"}, "google"),
        ({"type": "hadoop", "warehouse": "hdfs://nowhere:1/w"}, "hdfs://nowhere:1/w"),
        ({"type": "hadoop", "warehouse": "unheard://nowhere/w"}, "unheard"),
    ],
)
@pytest.mark.filterwarnings("ignore:No preferred file implementation")
def test_what_python_cannot_open_needs_spark(catalog: dict[str, str], message: str):
    with pytest.raises(NeedsSpark, match=message) as caught:
        find(catalog, "db.t")
    assert "pass-word" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("catalog", [{"type": "hadoop"}, {"type": "jdbc"}, {"type": "rest"}])
def test_a_setting_that_is_missing_is_named(catalog: dict[str, str]):
    with pytest.raises(ConfigError, match=r"cannot open the catalog: it lacks (warehouse|uri)"):
        find(catalog, "db.t")


class Rest:
    """A REST catalog of one table. `answers`: path → status, or what to say."""

    def __init__(self, location: str) -> None:
        self.answers: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []
        rest = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                rest.asked.append((self.path, self.headers.get("Authorization", "")))
                self.say(*rest.get(path, location))

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                rest.asked.append((self.path, self.rfile.read(length).decode()))
                self.say(200, {"access_token": "lent", "token_type": "bearer"})

            def say(self, status: int, body: Any) -> None:
                status = rest.answers.get(self.path.partition("?")[0], status)
                if status >= 400:
                    body = {"error": {"message": "says no-one", "type": "Any", "code": status}}
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def get(self, path: str, location: str) -> tuple[int, Any]:
        if path == "/v1/config":
            return 200, {"defaults": {}, "overrides": {"prefix": "lake"}}
        if path == "/v1/lake/namespaces/db/tables/t":
            metadata = json.loads(Path(location).read_text())
            return 200, {
                "metadata-location": location,
                "metadata": metadata,
                "config": {"lent": "x"},
            }
        return 404, None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def rest(made: Made) -> Iterator[Rest]:
    made.commit(n="1")
    running = Rest(made.save())
    yield running
    running.close()


TABLE = "/v1/lake/namespaces/db/tables/t"


def test_a_rest_catalog_is_asked(rest: Rest, made: Made):
    catalog = {"type": "rest", "uri": rest.uri, "token": "the-token", "cache-enabled": "false"}
    table = find(catalog, "db.t")
    assert table is not None
    assert table.uuid == made.values["table-uuid"]
    assert [snapshot.summary for snapshot in table.history("main")] == [{"n": "1"}]
    assert rest.asked[-1] == (f"{TABLE}?snapshots=refs", "Bearer the-token")
    assert find(catalog, "db.none") is None
    assert find(catalog, "none.t") is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_rest_catalog_gets_the_name_of_the_client(rest: Rest):
    impl = {"catalog-impl": "org.apache.iceberg.rest.RESTCatalog", "uri": rest.uri}
    basic = {
        "rest.auth.type": "basic",
        "rest.auth.basic.username": "u",
        "rest.auth.basic.password": "p",
    }
    assert find({**impl, **basic}, "db.t") is not None
    assert rest.asked[-1][1] == "Basic " + base64.b64encode(b"u:p").decode()
    assert find({**impl, "credential": "id:a-secret"}, "db.t") is not None
    assert rest.asked[-1][1] == "Bearer lent"
    assert any("client_secret=a-secret" in body for _, body in rest.asked)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (TABLE, 400, ConfigError),
        (TABLE, 403, ConfigError),
        (TABLE, 401, ConfigError),
        (TABLE, 500, Unavailable),
        (TABLE, 503, Unavailable),
        ("/v1/config", 401, ConfigError),
        ("/v1/config", 500, Unavailable),
        ("/v1/oauth/tokens", 401, ConfigError),
    ],
)
def test_a_rest_catalog_that_says_no(rest: Rest, path: str, status: int, kind: type[FrazilError]):
    rest.answers[path] = status
    with pytest.raises(kind, match=r"cannot ask the catalog for db.t: .*\*\*\*") as caught:
        find({"type": "rest", "uri": rest.uri, "credential": "id:no-one"}, "db.t")
    assert "no-one" not in str(caught.value)


def test_a_rest_catalog_that_does_not_answer(rest: Rest):
    rest.close()
    with pytest.raises(Unavailable, match=r"cannot ask the catalog for db.t") as caught:
        find({"type": "rest", "uri": rest.uri.replace("//", "//me:hidden@")}, "db.t")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("auth", [{}, {"credential": "id:no-one"}], ids=["config", "token"])
def test_a_rest_catalog_that_never_answers_has_ten_seconds(
    auth: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(REST_TIMEOUTS, "rest.client.socket-timeout-ms", "200")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"expected an answer within 10 s, found none"):
            find({"type": "rest", "uri": uri, **auth}, "db.t")


def test_the_time_limits_of_a_rest_catalog_are_those_of_iceberg():
    assert rest_timeouts({}) == (10.0, 10.0)
    assert rest_timeouts({"rest.client.socket-timeout-ms": "2500"}) == (10.0, 2.5)
    with pytest.raises(ConfigError, match=r"socket-timeout-ms: expected milliseconds, found 'x'"):
        rest_timeouts({"rest.client.socket-timeout-ms": "x"})


def test_a_client_without_time_limits_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    """A server that sends a byte now and then meets no time limit of one read."""
    monkeypatch.setattr(metadata_location, "_TOTAL", 0.2)
    released = threading.Event()
    monkeypatch.setattr(metadata_location, "_ask_client", lambda *_: released.wait(30))
    with pytest.raises(Unavailable, match=r"within 0.2 s, found none"):
        find({"type": "hive", "uri": "thrift://host:9083"}, "db.t")
    released.set()


def test_a_catalog_in_postgresql_is_asked_where_there_is_a_driver(
    made: Made, monkeypatch: pytest.MonkeyPatch
):
    """The driver is none of our dependencies: here is one that remembers its requests."""
    calls: list[Any] = []
    rows = [{"catalog_name": "lake", "metadata_location": made.save(), "iceberg_type": "TABLE"}]

    class Connection:
        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *_: object) -> None: ...

        def execute(self, query: str, values: tuple[str, ...]) -> list[dict[str, str]]:
            calls.append((query, values))
            return rows

    psycopg = types.ModuleType("psycopg")

    class Error(Exception): ...

    class ProgrammingError(Error): ...

    class UndefinedTable(ProgrammingError): ...

    failure: list[Exception] = []

    def connect(place: str, **settings: Any) -> Connection:
        if failure:
            raise failure[0]
        calls.append((place, settings["user"], settings["password"]))
        return Connection()

    psycopg.connect, psycopg.Error, psycopg.ProgrammingError = connect, Error, ProgrammingError  # type: ignore[attr-defined]
    psycopg.errors = types.SimpleNamespace(UndefinedTable=UndefinedTable)  # type: ignore[attr-defined]
    psycopg.rows = types.SimpleNamespace(dict_row=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "psycopg", psycopg)
    catalog = {
        "type": "jdbc",
        "uri": "jdbc:postgresql://host:5432/lake",
        "jdbc.user": "me",
        "jdbc.password": "pass-word",
    }
    assert find(catalog, "db.sub.t") is not None
    assert calls[0] == ("postgresql://host:5432/lake", "me", "pass-word")
    assert calls[1][0].count("%s") == 2
    assert calls[1][1] == ("db.sub", "t")
    for error, kind in ((Error("no pass-word"), Unavailable), (ProgrammingError(), NeedsSpark)):
        failure[:] = [error]
        with pytest.raises(kind) as caught:
            find(catalog, "db.t")
        assert "pass-word" not in str(caught.value)
    failure[:] = [UndefinedTable()]
    assert find(catalog, "db.t") is None


def test_reading_local_files_loads_nothing_of_weight(made: Made):
    path = parquet(made, "a", {"_offset": [1]}, (4,))
    made.commit(made.manifest(data(path)))
    made.save()
    code = (
        "import sys; from frazil.iceberg.static_table import find\n"
        f"table = find({{}}, {str(made.folder)!r})\n"
        "assert len(table.files()[0]) == table.rows(['_offset']).num_rows == 1\n"
        "print([name for name in ('pyiceberg', 'pyspark', 'py4j', 'duckdb', 'confluent_kafka') "
        "if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert completed.stdout.strip() == "[]"


def test_expired_ancestors_are_read_from_earlier_metadata_files(made: Made):
    for number in range(1, 5):
        made.commit(n=str(number))
    earlier = made.save("v1.metadata.json")
    made.commit(n="5")
    middle = made.save("v2.metadata.json")
    made.values["metadata-log"] = [
        {"timestamp-ms": 1, "metadata-file": "/gone/v0.metadata.json"},
        {"timestamp-ms": 2, "metadata-file": earlier},
        {"timestamp-ms": 3, "metadata-file": middle},
    ]
    made.values["snapshots"] = made.values["snapshots"][-1:]
    table = ReadOnlyTable("db.t", made.save("v3.metadata.json"), {})
    assert [snapshot.id for snapshot in table.history("main")] == [5]
    assert [snapshot.id for snapshot in table.expired(4)] == [4, 3, 2, 1]
    assert list(table.expired(99)) == []
