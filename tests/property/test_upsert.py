"""Any changes of any keys, cut into any number of tasks and buckets: what is written is what a
plain dictionary holds after them, and every key is in the delete files once."""

from __future__ import annotations

import json
import pickle
import tempfile
import uuid
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.config.sections import TableConfig
from frazil.files.writer import WriterSpec
from frazil.iceberg.schema import iceberg_schema, partition_spec
from frazil.pipeline import upsert
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import (
    KeyChanges,
    ShuffleBlock,
    UpsertResult,
    apply,
    deletes_shape,
    shared,
    shuffle_blocks,
    unpacked,
)

METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
BARE = '{"spec-id": 0, "fields": []}'
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def plan(folder: str, *key: pa.Field, partition_by: tuple[str, ...] = ()) -> TablePlan:
    columns = pa.schema([*key, pa.field("value", pa.int64())])
    names = tuple(field.name for field in key)
    config = TableConfig("db.t", mode="upsert", key=names)
    schema = iceberg_schema(columns, METADATA, config)
    spec = json.loads(partition_spec(schema, partition_by, "db.t"))
    spec["spec-id"] = 1 if partition_by else 0
    shape = WriterSpec("db.t", folder, schema, 0, json.dumps(spec), {}, 2**20, "zstd", {})
    return TablePlan(shape, METADATA, "", key=names, deletes=deletes_shape(shape, names, BARE))


def key(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def table(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=schema)


def changes(of: TablePlan, records: list[dict[str, Any]]) -> KeyChanges:
    """In the order of one partition; a record without a value deletes."""
    rows = [record for record in records if record["value"] is not None]
    gone = [record for record in records if record["value"] is None]
    key_changes = KeyChanges()
    if rows:
        key_changes.rows.append(table(of.shape.arrow, rows))
    if gone:
        key_changes.gone.append(table(of.of_deletes, gone))
    return key_changes


def record(
    keys: dict[str, Any], number: int, offset: int, stamp: int, value: int | None
) -> dict[str, Any]:
    moment = EPOCH + timedelta(milliseconds=stamp)
    return {
        **keys,
        "value": value,
        "_topic": "t",
        "_topic_partition": number,
        "_offset": offset,
        "_timestamp": moment,
    }


def expected(records: list[dict[str, Any]], names: tuple[str, ...]) -> dict[Any, dict[str, Any]]:
    """Key → its last record, by the rule of the module."""
    by_key: dict[Any, dict[int, list[dict[str, Any]]]] = {}
    for record in records:
        by_partition = by_key.setdefault(tuple(record[name] for name in names), {})
        by_partition.setdefault(record["_topic_partition"], []).append(record)
    last = {}
    for which, partitions in by_key.items():
        winner = max(partitions, key=lambda n: (max(r["_timestamp"] for r in partitions[n]), n))
        last[which] = max(partitions[winner], key=lambda r: r["_offset"])
    return last


def contents(files: Any) -> list[dict[str, Any]]:
    paths = [json.loads(file.descriptor)["file-path"] for file in files]
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def through_parcels(
    of: TablePlan, tasks: list[KeyChanges], buckets: int, parts: int = 1
) -> UpsertResult:
    most = buckets * parts * upsert.TOGETHER_ROWS
    sent: dict[int, list[ShuffleBlock]] = {}
    for task in tasks:
        for bucket, parcel in shuffle_blocks(of, task, buckets, most):
            sent.setdefault(bucket, []).append(pickle.loads(pickle.dumps(parcel)))
    done = UpsertResult({}, (), (), 0, 0.0)
    for bucket in sent:
        for _, together in unpacked(sent[bucket]):
            done += pickle.loads(pickle.dumps(apply(of, together, "frazil-s-1")))
    return done


@settings(deadline=None)
@given(
    records=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 5), st.booleans()),
        max_size=60,
    ),
    tasks=st.integers(1, 4),
    buckets=st.integers(1, 3),
    parts=st.integers(1, 3),
    two=st.booleans(),
)
def test_what_is_written_is_what_a_dictionary_holds(
    records: list[tuple[int, int, int, bool]], tasks: int, buckets: int, parts: int, two: bool
):
    fields = [key("id", pa.int64()), key("name", pa.large_string())][: 1 + two]
    with tempfile.TemporaryDirectory() as folder:
        of = plan(folder, *fields)
        offsets = [0, 0, 0]
        sent = []
        for at, (n, number, stamp, gone) in enumerate(records):
            keys = {"id": n, **({"name": "ab"[n % 2]} if two else {})}
            sent.append(record(keys, number, offsets[number], stamp, None if gone else at))
            offsets[number] += 1
        pieces = [sent[n::tasks] for n in range(tasks)]
        done = through_parcels(of, [changes(of, piece) for piece in pieces], buckets, parts)
        last = expected(sent, of.key)
        rows = {tuple(row[name] for name in of.key): row["value"] for row in contents(done.files)}
        assert rows == {k: r["value"] for k, r in last.items() if r["value"] is not None}
        assert len(contents(done.files)) == len(rows) == sum(done.written.values())
        keys = [tuple(row[name] for name in of.key) for row in contents(done.deletes)]
        assert sorted(keys) == sorted(last)
        assert done.keys == len(keys)


KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [0, -1, 2**31 - 1]),
    (pa.int64(), [0, -(2**63), 2**63 - 1]),
    (pa.large_string(), ["", "a", "ab", "ba", "é" * 40]),
    (pa.large_binary(), [b"", b"\0", b"\0\0", b"ab"]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date(1970, 1, 1), date(2026, 1, 2)]),
    (pa.timestamp("us", "UTC"), [EPOCH, EPOCH + timedelta(microseconds=1)]),
    (pa.time64("us"), [(EPOCH + timedelta(seconds=n)).time() for n in (0, 1)]),
    (pa.decimal128(10, 2), [Decimal("0.00"), Decimal("-1.00"), Decimal("12345678.90")]),
    (pa.binary(3), [b"abc", b"cba"]),
    (pa.uuid(), [uuid.UUID(int=n) for n in (0, 1, 2**127)]),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=lambda value: str(value)[:20])
def test_a_key_may_be_of_any_type_that_iceberg_takes(
    kind: pa.DataType, values: list[Any], tmp_path
):
    of = plan(str(tmp_path), key("id", kind))
    assert of.shape.arrow.field("id").type == kind or "string" in str(kind)
    sent = [record({"id": v}, n, n, 0, n) for n, v in enumerate(values * 2)]
    parts = [changes(of, sent[: len(values)]), changes(of, sent[len(values) :])]
    done = through_parcels(of, parts, 3)
    assert len(contents(done.files)) == len(values) == done.keys
    hashed = [upsert._hashed(part.rows[0], of.key).tolist() for part in parts]
    assert hashed[0] == hashed[1]
    assert len(set(hashed[0])) == len(values)
    sliced = parts[0].rows[0].slice(1)
    assert upsert._hashed(sliced, of.key).tolist() == hashed[0][1:]


def test_the_number_of_a_key_is_the_same_on_every_machine(tmp_path):
    """Pinned: workers of different versions of this library may meet in one batch."""
    of = plan(str(tmp_path), key("id", pa.int64()), key("name", pa.large_string()))
    rows = changes(of, [record({"id": 7, "name": "seven"}, 0, 0, 0, 1)]).rows[0]
    assert upsert._hashed(rows, of.key).tolist() == [10377343820229914734]


def test_a_delete_file_belongs_to_no_partition_and_names_its_columns(tmp_path):
    of = plan(str(tmp_path), key("id", pa.int64()), partition_by=("bucket(4, id)",))
    done = apply(of, changes(of, [record({"id": n}, 0, n, 0, n) for n in range(50)]), "frazil-s-1")
    data = [json.loads(file.descriptor) for file in done.files]
    assert {descriptor["spec-id"] for descriptor in data} == {1}
    assert len({tuple(descriptor["partition"]) for descriptor in data}) == 4
    [deletes] = [json.loads(file.descriptor) for file in done.deletes]
    assert (deletes["content"], deletes["spec-id"], deletes["partition"]) == (
        "equality-deletes",
        0,
        [],
    )
    assert deletes["equality-ids"] == [1]
    assert pq.ParquetFile(deletes["file-path"]).schema_arrow.names == ["id"]


def test_many_changes_are_not_unpacked_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(upsert, "TOGETHER_ROWS", 100)
    of = plan(str(tmp_path), key("id", pa.int64()))
    sent = changes(of, [record({"id": n}, 0, n, 0, n) for n in range(1000)])
    assert [upsert._parts_of(*of_batch) for of_batch in ((1000, 1), (99, 1), (500, 4))] == [
        10,
        1,
        8,
    ]
    every = [parcel for _, parcel in shuffle_blocks(of, sent, 1, 1000)]
    counts = [sum(map(len, part.rows)) for _, part in unpacked(every)]
    assert sum(counts) == 1000
    assert max(counts) < 300
    assert len(counts) > 3


@given(st.lists(st.lists(st.integers(0, 60), unique=True), min_size=1, max_size=5))
def test_a_key_that_two_tasks_have_is_seen(tasks: list[list[int]]):
    pair = shared([np.array(task_keys, np.uint64) for task_keys in tasks])
    if pair is None:
        every = [key for task_keys in tasks for key in task_keys]
        assert len(set(every)) == len(every)
    else:
        one, other = pair
        assert one != other
        assert set(tasks[one]) & set(tasks[other])


def test_a_task_that_writes_by_itself_reports_its_keys(tmp_path):
    of = plan(str(tmp_path), key("id", pa.int64()))
    sent = [
        changes(of, [record({"id": n}, p, at, 0, n) for at, n in enumerate(ids)])
        for p, ids in enumerate([(1, 2, 2), (3, 4), (5, 2)])
    ]
    hashes = [apply(of, part, "x", alone=True).hashes for part in sent]
    assert [len(task_hashes) for task_hashes in hashes] == [2, 2, 2]
    assert shared(hashes[:2]) is None
    assert shared(hashes) == (0, 2)
