"""Columns with a default (format version 3): written where a record lacks them, and only there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema

from frazil.arrow.default_values import declared
from frazil.errors import SchemaMismatch
from frazil.files.writer import TableWriter
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import update
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.evolution import changes
from frazil.pipeline.projection import MetadataColumns, fitted
from frazil.pipeline.table_plan import ChunkPlan, TablePlan
from tests.unit.test_chunk import HERE, NOBODY, opened
from tests.unit.test_compact import schema, shape
from tests.unit.test_projection import _INT, DEFAULTS, VALUES, _list, _struct

NOWHERE = MetadataColumns("", "", "", "")


def column(
    number: int, name: str, kind: str, required: bool = False, **more: Any
) -> dict[str, Any]:
    given = {"write-default": DEFAULTS[kind], **more}
    return {"id": number, "name": name, "required": required, "type": kind, **given}


def table(*fields: Any) -> pa.Schema:
    return declared(Schema.model_validate_json(schema(*fields)))


@pytest.mark.parametrize("kind", DEFAULTS)
def test_what_a_record_lacks_is_the_write_default_at_every_depth(tmp_path: Path, kind: str):
    spec = replace(
        shape(tmp_path),
        schema=schema(
            _INT("id", 1),
            column(2, "d", kind),
            column(3, "r", kind, True),
            _struct(4, "s", _INT("a", 5), column(6, "d", kind, True)),
            _list(7, "l", _INT("a", 9), column(10, "d", kind)),
        ),
    )
    inner = pa.struct([("a", pa.int32())])
    rows = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "s": pa.array([{"a": 1}, None], inner),
            "l": pa.array([[{"a": 1}, None], None], pa.large_list(inner)),
        }
    )
    writer = TableWriter(spec, "p")
    writer.write(fitted(rows, spec.arrow, "x"))
    [file] = writer.close()
    value = VALUES[kind]
    assert pq.ParquetFile(json.loads(file.descriptor)["file-path"]).read().to_pylist() == [
        {
            "id": 1,
            "d": value,
            "r": value,
            "s": {"a": 1, "d": value},
            "l": [{"a": 1, "d": value}, None],
        },
        {"id": 2, "d": value, "r": value, "s": None, "l": None},
    ]


def test_a_null_that_a_record_has_is_no_default():
    target = table(column(1, "d", "int"), column(2, "r", "int", True))
    rows = pa.table({"d": pa.array([None, 5], pa.int32())})
    assert fitted(rows, target, "x").to_pylist() == [{"d": None, "r": 3}, {"d": 5, "r": 3}]
    with pytest.raises(SchemaMismatch, match="requires column 'r'"):
        fitted(pa.table({"r": pa.array([None], pa.int32())}), target, "x")


def test_the_initial_default_is_not_written():
    target = table({"id": 1, "name": "d", "required": False, "type": "int", "initial-default": 9})
    assert fitted(pa.table({"d": [1]}).select([]), target, "x").num_columns == 1
    rows = pa.table({"e": pa.array([1], pa.int32())})
    both = table(
        _INT("e", 2), {"id": 1, "name": "d", "required": False, "type": "int", "initial-default": 9}
    )
    assert fitted(rows, both, "x").to_pylist() == [{"e": 1, "d": None}]


def test_a_required_column_with_a_default_need_not_become_optional():
    fields = (
        _INT("id", 1),
        column(2, "r", "int", True),
        _struct(3, "s", _INT("a", 4), column(5, "d", "int", True)),
    )
    records = pa.schema({"id": pa.int32(), "s": pa.struct([("a", pa.int32())])})
    assert not changes(table(*fields), records)
    more = records.append(pa.field("new", pa.int32()))
    change = update(schema(*fields), more, "t", spec='{"fields": []}', format_version=3)
    assert change.relax == ()
    assert [name for _, name, _ in change.add] == ["new"]


def test_members_that_json_lacks_are_the_write_default(tmp_path: Path):
    text = schema(
        _INT("id", 1),
        column(2, "d", "date"),
        column(3, "r", "string", True),
        _struct(4, "s", _INT("a", 5), column(6, "d", "int", True)),
        column(7, "u", "uuid"),
    )
    plan = TablePlan(replace(shape(tmp_path), schema=text), NOWHERE, "", "reject", format_version=3)
    settler = ChunkPipeline(ChunkPlan(RecordFormat("json"), None, {"db.t": plan}, {}, "db.t"))
    values = [
        b'{"id":1}',
        b'{"id":2,"d":null,"r":"x","s":{"a":1},"u":null}',
        b'{"id":3,"s":{"d":5}}',
        b'{"id":4,"r":null}',
    ]
    settled = settler.process(HERE, opened(values), NOBODY)
    [(_, rows)] = settled.rows
    date, text_, uuid_ = VALUES["date"], VALUES["string"], VALUES["uuid"]
    assert rows.to_pylist() == [
        {"id": 1, "d": date, "r": text_, "s": None, "u": uuid_},
        {"id": 2, "d": None, "r": "x", "s": {"a": 1, "d": 3}, "u": None},
        {"id": 3, "d": date, "r": text_, "s": {"a": None, "d": 5}, "u": uuid_},
    ]
    assert list(settled.rejections) == [3]


def test_a_new_field_is_added_where_json_lacks_a_required_column_with_a_default(tmp_path: Path):
    text = schema(_INT("id", 1), column(2, "r", "string", True))
    plan = TablePlan(replace(shape(tmp_path), schema=text), NOWHERE, "", format_version=3)
    settler = ChunkPipeline(ChunkPlan(RecordFormat("json"), None, {"db.t": plan}, {}, "db.t"))
    settled = settler.process(HERE, opened([b'{"id":2,"new":5}']), NOBODY)
    assert settled.rejections == {}
    assert "new" in settled.needs["db.t"].names
    assert not settled.needs["db.t"].field("r").nullable, "it stays required"
