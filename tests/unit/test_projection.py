"""Values in another type, nulls where they were: what leaves decode can be cast and written."""

from __future__ import annotations

import datetime as dt
import io
import json
import random
import uuid
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.arrow.cast import MissingField, absent, by_id, project, projected
from frazil.errors import SchemaMismatch
from frazil.files.rewrite import RewriteJob, rewrite
from frazil.files.writer import TableWriter
from frazil.formats.debezium import unwrap
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.pipeline.evolution import renamed
from frazil.pipeline.projection import fitted
from frazil.spark.tasks import _present, _type
from tests.unit.test_compact import schema, shape, source

X = pa.field("x", pa.int32(), nullable=False)
POINT = pa.struct([X, pa.field("wkb", pa.large_binary(), nullable=False)])
INNER = pa.struct(
    [
        pa.field("p", POINT, nullable=False),
        pa.field("u", pa.uuid(), nullable=False),
        pa.field("t", pa.large_list(pa.field("element", POINT, nullable=False)), nullable=False),
        pa.field("m", pa.map_(pa.large_string(), pa.field("value", POINT)), nullable=False),
    ]
)
KINDS = [
    POINT,
    INNER,
    pa.large_list(pa.field("element", POINT)),
    pa.large_list(pa.field("element", INNER)),
    pa.map_(pa.large_string(), pa.field("value", INNER)),
    pa.struct([pa.field("i", INNER), pa.field("l", pa.list_(pa.field("element", INNER)))]),
]


def columns(kind: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field("c", kind)])


def value(kind: pa.DataType, dice: random.Random, null: bool = True) -> Any:
    if null and dice.random() < 0.3:
        return None
    if pa.types.is_struct(kind):
        return {child.name: value(child.type, dice, child.nullable) for child in kind}
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return [
            value(kind.value_type, dice, kind.value_field.nullable)
            for _ in range(dice.randint(0, 2))
        ]
    if pa.types.is_map(kind):
        names = dice.sample("abc", dice.randint(0, 2))
        return [(name, value(kind.item_type, dice, kind.item_field.nullable)) for name in names]
    return {pa.int32(): 7, pa.large_binary(): b"w", pa.uuid(): b"u" * 16}[kind]


def made(values: list[Any], kind: pa.DataType) -> pa.Array:
    """(Arrow makes no uuids inside other types.)"""

    def plain(field: pa.Field) -> pa.Field:
        kind = field.type
        if pa.types.is_struct(kind):
            kind = pa.struct([plain(child) for child in kind])
        elif pa.types.is_map(kind):
            kind = pa.map_(plain(kind.key_field), plain(kind.item_field))
        elif pa.types.is_nested(kind):
            kind = pa.large_list(plain(kind.value_field))
        return field.with_type(pa.binary(16) if kind == pa.uuid() else kind)

    field = pa.field("c", kind)
    return project(pa.array(values, plain(field).type), field)


def round_trip(rows: pa.Table) -> list[Any]:
    sink = io.BytesIO()
    pq.write_table(projected(rows), sink, store_schema=False)
    return pq.read_table(sink).to_pylist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_required_children_of_null_parents_can_be_written_and_cast(kind: pa.DataType):
    dice = random.Random(3)
    for _ in range(20):
        values = [value(kind, dice) for _ in range(6)]
        plain = pa.table([made(values, kind)], schema=columns(kind))
        null = pa.table([pa.nulls(4, kind)], schema=columns(kind))
        for rows in (
            plain,
            null,
            plain.slice(2, 3),
            plain.take(pa.array([5, 0, None, 3])),
            plain.filter(
                pa.array([True, None, True, True, False, True]), null_selection_behavior="emit_null"
            ),
            pa.concat_tables([plain, null]).combine_chunks(),
        ):
            assert round_trip(rows) == rows.to_pylist()
            fitted(rows, columns(kind), "x").cast(columns(kind)).validate(full=True)


def test_bytes_under_a_null_are_in_no_statistics():
    under = pa.array([999, 1, 2], pa.int32())
    rows = pa.StructArray.from_arrays([under], fields=[X], mask=pa.array([True, False, False]))
    sink = io.BytesIO()
    pq.write_table(projected(pa.table({"c": rows})), sink)
    statistics = pq.ParquetFile(sink).metadata.row_group(0).column(0).statistics
    assert (statistics.min, statistics.max, statistics.null_count) == (1, 2, 1)


def test_columns_that_are_sound_are_not_copied():
    rows = pa.table(
        [pa.array([{"x": 1, "wkb": b""}, {"x": 2, "wkb": b""}], POINT)], schema=columns(POINT)
    )
    assert projected(rows).column("c").chunk(0).buffers()[2].address == (
        rows.column("c").chunk(0).buffers()[2].address
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_null_that_is_not_allowed_is_reported_with_its_path(kind: pa.DataType):
    def loose(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(child.name, loose(child.type)) for child in kind])
        if pa.types.is_map(kind):
            return pa.map_(kind.key_type, loose(kind.item_type))
        if pa.types.is_nested(kind):
            return pa.large_list(pa.field("element", loose(kind.value_type)))
        return kind

    def bare(kind: pa.DataType) -> Any:
        """Everything is there but the innermost values."""
        if pa.types.is_struct(kind):
            return {child.name: bare(child.type) for child in kind}
        if pa.types.is_map(kind):
            return [("a", bare(kind.item_type))]
        return [bare(kind.value_type)] if pa.types.is_nested(kind) else None

    rows = pa.table({"c": made([None, bare(kind), None], loose(kind))})
    with pytest.raises(MissingField, match=r"1 values without 'c\."):
        project(rows.column("c"), pa.field("c", kind))
    with pytest.raises(SchemaMismatch, match=r"requires column 'c\..*, 1 records"):
        fitted(rows, columns(kind), "x")


def test_a_list_of_which_nulls_hide_values_shows_none_of_them():
    items = pa.array([{"x": 1, "wkb": b""}] * 5, POINT)
    offsets = pa.array([0, 2, 4, 5], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, items, mask=pa.array([False, True, False]))
    kind = pa.large_list(pa.field("element", POINT, nullable=False))
    assert [value and len(value) for value in project(lists, pa.field("c", kind)).to_pylist()] == [
        2,
        None,
        1,
    ]
    assert [
        value and len(value) for value in project(lists.slice(1), pa.field("c", kind)).to_pylist()
    ] == [None, 1]


def test_fields_are_found_by_id_and_missing_ones_get_defaults():
    def field(number: int, name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    struct = pa.struct([field(2, "a", pa.int32()), field(3, "b", pa.string())])
    wanted = pa.struct(
        [
            field(3, "a", pa.large_string()),
            field(2, "c", pa.int64()),
            field(4, "b", pa.int32()),
            field(5, "d", pa.int32()),
        ]
    )
    column = pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}], struct)
    out = project(column, field(1, "s", wanted), by_id, {4: pa.scalar(9, pa.int32())})
    assert out.to_pylist() == [
        {"a": "x", "c": 1, "b": 9, "d": None},
        None,
        {"a": None, "c": None, "b": 9, "d": None},
    ]
    assert absent(2, field(4, "b", pa.int32()), {4: pa.scalar(9, pa.int32())}).to_pylist() == [9, 9]


# ── the ways of the data that met such nulls ─────────────────────────────────────────────────────


OPTIONAL = {
    "type": "record",
    "name": "R",
    "fields": [
        {
            "name": "s",
            "type": [
                "null",
                {"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]},
            ],
        }
    ],
}


def datum(schema: Any, record: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def avro(*records: Any, schema: Any = OPTIONAL) -> pa.Table:
    values = [datum(schema, record) for record in records]
    groups, rejected = Decoder(RecordFormat("avro", json.dumps(schema))).decode(values)
    assert not rejected
    [group] = groups
    return group.rows


def test_a_null_in_an_optional_record_with_a_required_field_is_written(tmp_path: Path):
    spec = replace(shape(tmp_path), schema=schema(_struct(1, "s", _INT("x", 2, True))))
    for records in ([{"s": None}, {"s": {"x": 5}}], [{"s": None}]):
        writer = TableWriter(spec, "p")
        writer.write(fitted(avro(*records), spec.arrow, "x"))
        assert _read(writer.close()[0].descriptor) == records


def test_an_older_writer_without_such_a_record_is_written(tmp_path: Path):
    spec = replace(
        shape(tmp_path), schema=schema(_INT("id", 3, True), _struct(1, "s", _INT("x", 2, True)))
    )
    writer = TableWriter(spec, "p")
    writer.write(fitted(pa.table({"id": pa.array([1], pa.int32())}), spec.arrow, "x"))
    assert _read(writer.close()[0].descriptor) == [{"id": 1, "s": None}]


def test_an_alias_inside_such_a_record_is_applied():
    target = pa.schema({"s": pa.struct([pa.field("y", pa.int32(), nullable=False)])})
    rows = renamed(avro({"s": None}, {"s": {"x": 5}}), target, {"s.y": ("x",)})
    assert fitted(rows, target, "x").to_pylist() == [{"s": None}, {"s": {"y": 5}}]


DECIMAL = {
    "type": "record",
    "name": "VariableScaleDecimal",
    "namespace": "io.debezium.data",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
}
ROW = {
    "type": "record",
    "name": "Value",
    "fields": [{"name": "id", "type": "long"}, {"name": "n", "type": ["null", DECIMAL]}],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", ROW]},
        {"name": "after", "type": ["null", "Value"]},
        {"name": "op", "type": "string"},
    ],
}


def test_a_database_row_with_a_null_decimal_of_any_scale_is_a_row_and_so_is_its_delete():
    full, bare = {"id": 1, "n": {"scale": 2, "value": b"\x01"}}, {"id": 2, "n": None}
    changes = [
        ("c", None, full),
        ("c", None, bare),
        ("u", full, bare),
        ("u", bare, full),
        ("d", full, None),
        ("d", bare, None),
    ]
    for some in (changes, changes[:2], changes[4:], [changes[1]], [changes[5]]):
        records = [{"op": op, "before": before, "after": after} for op, before, after in some]
        rows, _, rejected = unwrap(avro(*records, schema=ENVELOPE))
        assert rejected == []
        wanted = [before if op == "d" else after for op, before, after in some]
        target = rows.schema.remove(rows.schema.get_field_index("_op"))
        assert fitted(rows.select(["id", "n"]), target, "x").to_pylist() == wanted
        assert round_trip(rows.select(["id", "n"])) == wanted


def test_decoded_rows_with_such_records_go_to_spark():
    column = avro({"s": None}, {"s": {"x": 5}}).column("s")
    kind = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    assert _present(column, kind).to_pylist() == [None, {"x": 5}]
    nested = made([None, {"u": b"u" * 16}], pa.struct([pa.field("u", pa.uuid(), nullable=False)]))
    assert _present(nested, _type(nested.type)).to_pylist() == [None, {"u": b"u" * 16}]


# ── files that are read again ────────────────────────────────────────────────────────────────────


def _INT(name: str, number: int, required: bool = False) -> dict[str, Any]:
    return {"id": number, "name": name, "required": required, "type": "int"}


def _struct(number: int, name: str, *fields: Any) -> dict[str, Any]:
    kind = {"type": "struct", "fields": list(fields)}
    return {"id": number, "name": name, "required": False, "type": kind}


def _list(number: int, name: str, *fields: Any) -> dict[str, Any]:
    kind = {
        "type": "list",
        "element-id": number + 1,
        "element-required": False,
        "element": {"type": "struct", "fields": list(fields)},
    }
    return {"id": number, "name": name, "required": False, "type": kind}


def _map(number: int, name: str, *fields: Any) -> dict[str, Any]:
    kind = {
        "type": "map",
        "key-id": number + 1,
        "key": "string",
        "value-id": number + 2,
        "value-required": False,
        "value": {"type": "struct", "fields": list(fields)},
    }
    return {"id": number, "name": name, "required": False, "type": kind}


def _read(descriptor: str) -> list[Any]:
    return pq.ParquetFile(json.loads(descriptor)["file-path"]).read().to_pylist()


def _compacted(folder: Path, rows: list[Any], old: str, new: str) -> list[Any]:
    before = replace(shape(folder), schema=old)
    writer = TableWriter(before, "p")
    writer.write(pa.Table.from_pylist(rows, schema=before.arrow))
    [file] = writer.close()
    done = rewrite(
        RewriteJob(replace(before, schema=new), "p", (source(file.descriptor, 1),), (), 0.2, 0)
    )
    return [row for file in done.files for row in _read(file.descriptor)]


def test_compaction_keeps_null_lists_and_maps_of_structs_apart_from_empty_ones(tmp_path: Path):
    columns = schema(_list(1, "l", _INT("x", 9, True)), _map(3, "m", _INT("x", 10)))
    rows = [
        {"l": None, "m": None},
        {"l": [], "m": []},
        {"l": [None], "m": [("a", None)]},
        {"l": [{"x": 1}, None], "m": [("a", {"x": None})]},
    ]
    assert _compacted(tmp_path, rows, columns, columns) == rows


def test_compaction_of_a_file_older_than_such_a_struct_gives_null(tmp_path: Path):
    new = schema(
        _INT("id", 1), _struct(2, "s", _INT("x", 3, True)), _list(4, "l", _INT("y", 6, True))
    )
    rows = _compacted(tmp_path, [{"id": 1}, {"id": None}], schema(_INT("id", 1)), new)
    assert rows == [{"id": 1, "s": None, "l": None}, {"id": None, "s": None, "l": None}]


def test_compaction_follows_ids_through_renames_drops_and_additions_at_every_depth(tmp_path: Path):
    old = schema(
        _struct(1, "s", _INT("a", 2), _INT("b", 3)), _list(4, "l", _INT("a", 6), _INT("b", 7))
    )
    wide = {"id": 3, "name": "a", "required": False, "type": "long"}
    new = schema(_list(4, "k", _INT("b", 6), _INT("a", 20)), _struct(1, "s", wide, _INT("c", 21)))
    rows = [{"s": {"a": 1, "b": 2}, "l": [{"a": 3, "b": 4}, None]}, {"s": None, "l": None}]
    assert _compacted(tmp_path, rows, old, new) == [
        {"k": [{"b": 3, "a": None}, None], "s": {"a": 2, "c": None}},
        {"k": None, "s": None},
    ]


DEFAULTS = {
    "int": 3,
    "long": 2**60,
    "double": 0.1,
    "float": 0.5,
    "boolean": False,
    "string": "",
    "date": "2024-01-02",
    "time": "03:04:05.123456",
    "timestamp": "2024-01-02T03:04:05.123456",
    "timestamptz": "2024-01-02T03:04:05.123456+00:00",
    "binary": "0a0b",
    "fixed[2]": "0a0b",
    "uuid": "eb26bdb1-a1d8-4aa6-990e-da940875492c",
    "decimal(9, 2)": "1.20",
}
#: as Arrow has them in Python
VALUES = {
    **DEFAULTS,
    "date": dt.date(2024, 1, 2),
    "time": dt.time(3, 4, 5, 123456),
    "timestamp": dt.datetime(2024, 1, 2, 3, 4, 5, 123456),
    "timestamptz": dt.datetime(2024, 1, 2, 3, 4, 5, 123456, dt.timezone.utc),
    "binary": b"\n\x0b",
    "fixed[2]": b"\n\x0b",
    "uuid": uuid.UUID(DEFAULTS["uuid"]),
    "decimal(9, 2)": Decimal("1.20"),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_column_that_a_file_lacks_has_its_initial_default_after_compaction(tmp_path, kind: str):
    def added(number: int, required: bool) -> Any:
        return {
            "id": number,
            "name": f"n{number}",
            "required": required,
            "type": kind,
            "initial-default": DEFAULTS[kind],
        }

    old = schema(_struct(1, "s", _INT("a", 2)), _list(4, "l", _INT("a", 6)))
    new = schema(
        _struct(1, "s", _INT("a", 2), added(20, True)),
        _list(4, "l", _INT("a", 6), added(21, False)),
        added(22, True),
    )
    rows = [{"s": {"a": 1}, "l": [{"a": 3}, None]}, {"s": None, "l": None}]
    value = VALUES[kind]
    assert _compacted(tmp_path, rows, old, new) == [
        {"s": {"a": 1, "n20": value}, "l": [{"a": 3, "n21": value}, None], "n22": value},
        {"s": None, "l": None, "n22": value},
    ]


def test_a_file_without_field_ids_is_not_read_as_one_of_nulls(tmp_path: Path):
    spec = replace(shape(tmp_path), schema=schema(_INT("id", 1)))
    pq.write_table(pa.table({"id": pa.array([1], pa.int32())}), tmp_path / "f.parquet")
    fact = {"file-path": str(tmp_path / "f.parquet"), "record-count": 1, "file-size-in-bytes": 1}
    with pytest.raises(SchemaMismatch, match="column 'id' has no field id"):
        rewrite(RewriteJob(spec, "p", (source(json.dumps(fact), 1),), (), 0.2, 0))
    top = pa.field("s", pa.struct({"x": pa.int32()}), metadata={"PARQUET:field_id": "1"})
    rows = pa.Table.from_pylist([{"s": {"x": 1}}], schema=pa.schema([top]))
    pq.write_table(rows, tmp_path / "f.parquet", store_schema=False)
    spec = replace(spec, schema=schema(_struct(1, "s", _INT("x", 2))))
    with pytest.raises(SchemaMismatch, match=r"column 's\.x' has no field id"):
        rewrite(RewriteJob(spec, "p", (source(json.dumps(fact), 1),), (), 0.2, 0))
