"""Any rows of a query in any order, with offsets or without: what a task writes is what a plain
dictionary holds after them, or the batch is refused."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.config.sections import TableConfig
from frazil.errors import SchemaMismatch
from frazil.files.writer import WriterSpec
from frazil.iceberg.schema import iceberg_schema
from frazil.offsets import BATCHES, Partition
from frazil.pipeline.projection import NO_METADATA, MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import deletes_shape
from frazil.spark.tasks import WriteOutcome, WritePlan
from frazil.spark.upsert_task import UpsertPlan, upsert

ORIGIN = MetadataColumns("_topic", "_topic_partition", "_offset", "")
BARE = '{"spec-id": 0, "fields": []}'
#: The rows as Spark hands them over: its own kind of text, and nothing required.
GIVEN = pa.schema([("id", pa.int32()), ("value", pa.int64()), ("gone", pa.bool_())])
CARRIED = pa.schema(
    [("_topic", pa.string()), ("_topic_partition", pa.int32()), ("_offset", "int64")]
)

Change = dict[str, Any]


def plan(folder: str, origin: bool) -> UpsertPlan:
    metadata = ORIGIN if origin else NO_METADATA
    columns = pa.schema(
        [*(field for field in GIVEN if field.name != "gone"), *(CARRIED if origin else [])]
    )
    schema = iceberg_schema(columns, NO_METADATA, TableConfig("db.t", mode="upsert", key=("id",)))
    shape = WriterSpec("db.t", folder, schema, 0, BARE, {}, 2**20, "zstd", {})
    table = TablePlan(shape, metadata, "", key=("id",), deletes=deletes_shape(shape, ("id",), BARE))
    names = ("_topic", "_topic_partition", "_offset") if origin else None
    return UpsertPlan(table, WritePlan(shape, names, "", "frazil-s-1"), "gone")


def batches(changes: Sequence[Change], origin: bool, at: int) -> list[pa.RecordBatch]:
    schema = pa.schema([*GIVEN, *(CARRIED if origin else [])])
    return [
        pa.RecordBatch.from_pylist(list(some), schema)
        for some in (changes[:at], changes[at:])
        if some
    ]


def rows_of(outcome: WriteOutcome, deletes: bool = False) -> list[dict[str, Any]]:
    files = outcome.deletes if deletes else outcome.files
    paths = [json.loads(file.descriptor)["file-path"] for file in files]
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


changes_of_keys = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(0, 4), "value": st.integers(0, 99), "gone": st.booleans()}
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60)
@given(changes_of_keys, st.integers(0, 20), st.randoms(use_true_random=False))
def test_rows_with_offsets_are_applied_in_their_order(changes: list[Change], at: int, order: Any):
    expected: dict[int, int] = {}
    for number, change in enumerate(changes):
        change |= {"_topic": "t", "_topic_partition": 0, "_offset": number}
        expected.pop(change["id"], None)
        if not change["gone"]:
            expected[change["id"]] = change["value"]
    order.shuffle(changes)
    with tempfile.TemporaryDirectory() as folder:
        outcome = upsert(plan(folder, True), batches(changes, True, at))
        rows = rows_of(outcome)
        assert {row["id"]: row["value"] for row in rows} == expected
        keys = [row["id"] for row in rows_of(outcome, deletes=True)]
        assert sorted(keys) == sorted({change["id"] for change in changes})
        assert "gone" not in (rows[0] if rows else {})
    partition = Partition("t", 0)
    assert outcome.carried is not None
    assert outcome.carried[partition].tolist() == list(range(len(changes)))
    assert outcome.kept.get(partition, 0) == outcome.rows == len(expected)
    assert (outcome.keys, outcome.given) == (len(keys), len(changes))


@settings(max_examples=60)
@given(changes_of_keys, st.integers(0, 20))
def test_rows_without_offsets_are_one_of_each_key_or_refused(changes: list[Change], at: int):
    shared = any(count > 1 for count in Counter(change["id"] for change in changes).values())
    with tempfile.TemporaryDirectory() as folder:
        if shared:
            with pytest.raises(SchemaMismatch, match=r"share their key .id. .*no offset of Kafka"):
                upsert(plan(folder, False), batches(changes, False, at))
            return
        outcome = upsert(plan(folder, False), batches(changes, False, at))
        expected = {(c["id"], c["value"]) for c in changes if not c["gone"]}
        assert {(row["id"], row["value"]) for row in rows_of(outcome)} == expected
    assert outcome.carried is None
    assert dict(outcome.kept) == {BATCHES: len(expected)}


def change(
    id: int | None, offset: int | None, gone: bool | None = False, partition: int = 0
) -> Change:
    return {
        **{"id": id, "value": 1, "gone": gone},
        **{"_topic": "t", "_topic_partition": partition, "_offset": offset},
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([change(1, 5), change(1, 5)], "2 rows of a batch share their key .id. .*the same offset"),
        ([change(1, 5), change(1, None)], "2 rows .* no offset of Kafka"),
        ([change(1, 5), change(1, 5, True)], "2 rows .* the same offset"),
        ([change(1, 5), change(1, 6, partition=1)], "several Kafka partitions and no timestamp"),
        ([change(None, 5)], "'id', part of its key, is null in 1 row of a batch"),
        ([change(1, 5, None)], "'gone', its delete_column, is null in 1 row"),
    ],
)
def test_what_has_no_order_or_no_key_is_refused(tmp_path: Any, changes: list[Change], words: str):
    with pytest.raises(SchemaMismatch, match=words):
        upsert(plan(str(tmp_path), True), batches(changes, True, 0))
    assert list(tmp_path.iterdir()) == []


def test_an_offset_in_rows_of_two_keys_is_no_tie_and_proves_no_record(tmp_path: Any):
    outcome = upsert(plan(str(tmp_path), True), batches([change(1, 5), change(2, 5)], True, 0))
    assert {row["id"] for row in rows_of(outcome)} == {1, 2}
    assert outcome.carried is None
    assert WriteOutcome.load(outcome.dump()) == outcome


def test_a_task_without_rows_writes_nothing(tmp_path: Any):
    outcome = upsert(plan(str(tmp_path), True), [])
    assert (outcome.files, outcome.deletes, outcome.carried) == ((), (), {})
