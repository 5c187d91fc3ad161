"""Changes that come in any order, batch after batch, late and out of turn: what is written is what
a plain dictionary holds that never goes back, and deletes are remembered."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema

from frazil.config.sections import TableConfig
from frazil.errors import ConfigError, Conflict
from frazil.files.writer import DataFileDescriptor, TableWriter, WriterSpec
from frazil.iceberg.schema import check_order, iceberg_schema
from frazil.offsets import Partition
from frazil.pipeline import versions
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import (
    KeyChanges,
    UpsertResult,
    apply,
    deleted_keys_columns,
    deleted_keys_version,
    deletes_shape,
)
from frazil.pipeline.versions import FileBounds, VersionLookup, file_bounds, highest
from tests.property.test_upsert import (
    BARE,
    METADATA,
    contents,
    record,
    table,
    through_parcels,
)

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SOURCE = pa.struct([("lsn", pa.int64()), ("name", pa.large_string())])


def shape_of(folder: str, name: str, columns: pa.Schema, key: tuple[str, ...] = ()) -> WriterSpec:
    config = TableConfig(name, mode="upsert", key=key) if key else TableConfig(name)
    schema = iceberg_schema(columns, METADATA, config)
    return WriterSpec(name, f"{folder}/{name}", schema, 0, BARE, {}, 2**20, "zstd", {})


def plan(folder: str, path: str = "version", kind: pa.DataType | None = None) -> TablePlan:
    columns = [pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.int64())]
    top = path.partition(".")[0]
    if path != "_timestamp":
        columns.append(pa.field(top, SOURCE if "." in path else kind or pa.int64()))
    shape = shape_of(folder, "t", pa.schema(columns), ("id",))
    main = TablePlan(
        shape, METADATA, "", key=("id",), order=path, deletes=deletes_shape(shape, ("id",), BARE)
    )
    deleted_keys = shape_of(folder, "t_deleted", deleted_keys_columns(main))
    return replace(main, deleted_keys=TablePlan(deleted_keys, METADATA, ""))


def listed(of: WriterSpec, files: tuple[DataFileDescriptor, ...], order: str) -> list[FileBounds]:
    listed_bounds = []
    for file in files:
        descriptor = json.loads(file.descriptor)
        bounds = [
            dict(zip(descriptor[name]["keys"], descriptor[name]["values"], strict=True))
            for name in ("lower-bounds", "upper-bounds")
        ]
        listed_bounds.append(
            file_bounds(
                Schema.model_validate_json(of.schema), ("id",), descriptor["file-path"], bounds
            )
        )
    return listed_bounds


class Lake:
    """Two tables that grow with each batch."""

    def __init__(self, of: TablePlan) -> None:
        assert of.deleted_keys is not None
        self.plan = of
        self.order = deleted_keys_version(of.order)
        self.files: tuple[DataFileDescriptor, ...] = ()
        self.notes: tuple[DataFileDescriptor, ...] = ()
        self.rows: dict[int, dict[str, Any]] = {}

    @property
    def now(self) -> TablePlan:
        deleted_keys = self.plan.deleted_keys
        assert deleted_keys is not None
        return replace(
            self.plan,
            known=(
                VersionLookup(
                    self.plan.shape,
                    ("id",),
                    self.plan.order,
                    tuple(listed(self.plan.shape, self.files, self.plan.order)),
                ),
                VersionLookup(
                    deleted_keys.shape,
                    ("id",),
                    self.order,
                    tuple(listed(deleted_keys.shape, self.notes, self.order)),
                ),
            ),
        )

    def take(self, done: UpsertResult) -> list[int]:
        """The keys whose older rows went."""
        assert done.noted is not None
        self.files += done.files
        self.notes += done.noted.files
        keys = [row["id"] for row in contents(done.deletes)]
        for key in keys:
            self.rows.pop(key, None)
        written = contents(done.files)
        assert {row["id"] for row in written} <= set(keys)
        assert len(written) == sum(done.written.values())
        self.rows |= {row["id"]: row for row in written}
        assert len(contents(done.noted.files)) == sum(done.noted.written.values())
        return keys

    def compact(self) -> None:
        """Rows that are hidden are not written again."""
        writer = TableWriter(self.plan.shape, "compacted")
        writer.write(table(self.plan.shape.arrow, list(self.rows.values())))
        self.files = tuple(writer.close())


class Model:
    """Key → the order it stands at, and its row."""

    def __init__(self) -> None:
        self.orders: dict[int, Any] = {}
        self.rows: dict[int, int] = {}

    def take(self, records: list[dict[str, Any]]) -> set[int]:
        newest: dict[tuple[int, int], Any] = {}
        for change in records:
            place = change["id"], change["_topic_partition"]
            newest[place] = max(newest.get(place, EPOCH), change["_timestamp"])

        def turn(change: dict[str, Any]) -> tuple[Any, ...]:
            number = change["_topic_partition"]
            return newest[change["id"], number], number, change["_offset"]

        applied = set()
        for change in sorted(records, key=turn):
            order, known_order = change["order"], self.orders.get(change["id"])
            if order is not None and known_order is not None and order < known_order:
                continue
            applied.add(change["id"])
            self.orders[change["id"]] = known_order if order is None else order
            if change["value"] is None:
                self.rows.pop(change["id"], None)
            else:
                self.rows[change["id"]] = change["value"]
        return applied


def changes(of: TablePlan, records: list[dict[str, Any]]) -> KeyChanges:
    """As they are settled: a row has its order in its column, a delete beside its key."""
    top, _, inside = of.order.partition(".")
    rows = [
        {**record, top: {inside: record["order"]} if inside else record["order"]}
        for record in records
        if record["value"] is not None
    ]
    gone = [{**record, of.order: record["order"]} for record in records if record["value"] is None]
    key_changes = KeyChanges()
    if rows:
        key_changes.rows.append(table(of.shape.arrow, rows))
    if gone:
        key_changes.gone.append(table(of.of_deletes, gone))
    return key_changes


Batch = list[tuple[int, int, int, int | None, bool]]
batches = st.lists(
    st.tuples(
        st.lists(
            st.tuples(
                st.integers(0, 5),  # key
                st.integers(0, 1),  # Kafka partition
                st.integers(0, 3),  # timestamp
                st.one_of(st.none(), st.integers(0, 6)),  # order; a row always has one
                st.booleans(),  # a delete
            ),
            max_size=12,
        ),
        st.booleans(),  # compacted afterwards
    ),
    max_size=6,
)


@settings(deadline=None)
@given(sent=batches, tasks=st.integers(1, 3), buckets=st.integers(1, 2), nested=st.booleans())
def test_batch_after_batch_the_table_is_what_a_dictionary_holds_that_never_goes_back(
    sent: list[tuple[Batch, bool]], tasks: int, buckets: int, nested: bool
):
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake(plan(folder, "_source.lsn" if nested else "version"))
        model, offsets, value = Model(), [0, 0], 0
        for batch, compacted in sent:
            records = []
            for key, number, stamp, which, gone in batch:
                value += 1
                one = record({"id": key}, number, offsets[number], stamp, None if gone else value)
                records.append({**one, "order": which if gone else which or 0})
                offsets[number] += 1
            pieces = [changes(lake.plan, records[n::tasks]) for n in range(tasks)]
            keys = lake.take(through_parcels(lake.now, pieces, buckets)) if records else []
            assert len(keys) == len(set(keys))
            assert set(keys) == model.take(records)
            assert {key: row["value"] for key, row in lake.rows.items()} == model.rows
            if compacted:
                lake.compact()


KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [-1, 0, 2**31 - 1]),
    (pa.large_string(), ["", "10", "9"]),  # as text, not as numbers
    (pa.date32(), [date(1969, 1, 1), date(1970, 1, 1), date(2026, 1, 2)]),
    (pa.timestamp("us", "UTC"), [EPOCH + timedelta(microseconds=n) for n in (-1, 0, 1)]),
    (pa.timestamp("us"), [datetime(2020, 1, n) for n in (1, 2, 3)]),
    (pa.decimal128(20, 2), [Decimal("-1.00"), Decimal("2.00"), Decimal("10.00")]),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=lambda value: str(value)[:20])
def test_an_order_may_be_a_number_a_moment_or_a_text(
    kind: pa.DataType, values: list[Any], tmp_path
):
    lake = Lake(plan(str(tmp_path), kind=kind))
    low, middle, high = values

    def send(offset: int, value: int | None, which: Any) -> dict[int, int]:
        one = {**record({"id": 1}, 0, offset, 0, value), "order": which}
        lake.take(apply(lake.now, changes(lake.plan, [one]), "frazil-s-1"))
        return {key: row["value"] for key, row in lake.rows.items()}

    assert send(0, 10, middle) == {1: 10}
    assert send(1, 11, low) == {1: 10}
    assert send(2, None, low) == {1: 10}
    assert send(3, None, None) == {}
    lake.compact()
    assert send(4, 14, low) == {}  # the delete took the order of what it deleted
    assert send(5, 15, middle) == {1: 15}
    assert send(6, None, high) == {}
    lake.compact()
    assert send(7, 17, middle) == {}
    assert send(8, 18, high) == {1: 18}
    assert [row["version"] for row in contents(lake.notes)] == [middle, high]


def test_the_time_of_a_record_may_be_its_order(tmp_path):
    lake = Lake(plan(str(tmp_path), "_timestamp"))
    assert lake.plan.own_order == ""
    for offset, (value, stamp) in enumerate([(1, 50), (2, 40), (None, 45), (3, 60), (None, 70)]):
        one = record({"id": 1}, 0, offset, stamp, value)
        key_changes = KeyChanges()
        (key_changes.rows if value else key_changes.gone).append(
            table(lake.plan.shape.arrow if value else lake.plan.of_deletes, [one])
        )
        lake.take(apply(lake.now, key_changes, "frazil-s-1"))
        assert [row["value"] for row in lake.rows.values()] == ([[1], [1], [1], [3], []][offset])
    [note] = contents(lake.notes)
    assert (note["_offset"], note["_timestamp"]) == (4, EPOCH + timedelta(milliseconds=70))


def test_what_the_table_has_already_is_only_noted_and_what_is_noted_is_only_applied(tmp_path):
    lake = Lake(plan(str(tmp_path)))
    assert lake.plan.deleted_keys is not None
    both = [{**record({"id": n}, 0, n, 0, None), "order": 5} for n in (1, 2, 3)]
    floors = {Partition("t", 0): 2}, {Partition("t", 0): 3}
    behind = replace(
        lake.now, floor=floors[0], deleted_keys=replace(lake.plan.deleted_keys, floor=floors[1])
    )
    done = apply(behind, changes(lake.plan, both), "frazil-s-1")
    assert done.noted is not None
    assert sorted(row["id"] for row in contents(done.deletes)) == [2, 3]
    assert [row["id"] for row in contents(done.noted.files)] == [3]
    ahead = replace(lake.now, floor=floors[1])
    done = apply(ahead, changes(lake.plan, both), "frazil-s-1")
    assert done.noted is not None
    assert [row["id"] for row in contents(done.deletes)] == [3]
    assert sorted(row["id"] for row in contents(done.noted.files)) == [1, 2, 3]


def test_files_whose_keys_do_not_meet_are_not_opened(tmp_path, monkeypatch):
    lake = Lake(plan(str(tmp_path)))
    for start in (0, 100, 200):
        sent = [{**record({"id": start + n}, 0, start + n, 0, n), "order": start} for n in range(9)]
        lake.take(apply(lake.now, changes(lake.plan, sent), "frazil-s-1"))
    read: list[str] = []
    real = versions.open_data_file
    monkeypatch.setattr(
        versions, "open_data_file", lambda io, path: (read.append(path), real(io, path))[1]
    )
    maxima = highest(lake.now.known, pl.DataFrame({"key 0": [103, 150, 108]}))
    assert sorted(maxima.rows()) == [(103, 100), (108, 100)]
    assert len(read) == 1
    gone = replace(lake.now.known[0], files=(FileBounds(str(tmp_path / "gone.parquet"), (None,)),))
    with pytest.raises(Conflict, match="it was removed after the files were listed"):
        highest([gone], pl.DataFrame({"key 0": [1]}))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nothing", "there is no column 'nothing'"),
        ("_source", "it is struct"),
        ("ratio", "it is double"),
        ("tags.element", "is inside a list"),
    ],
)
def test_a_column_that_says_no_order_is_refused(path: str, why: str):
    columns = pa.schema(
        [
            ("id", pa.int64()),
            ("_source", SOURCE),
            ("ratio", pa.float64()),
            ("tags", pa.list_(pa.field("element", pa.int64()))),
        ]
    )
    config = TableConfig("db.t", mode="upsert", key=("id",), version_column=path)
    made = iceberg_schema(columns, METADATA, config)
    with pytest.raises(ConfigError, match=why):
        check_order(made, config)
    check_order(made, replace(config, version_column="_source.lsn"))
