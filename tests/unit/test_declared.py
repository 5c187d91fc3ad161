"""Declared columns of JSON: types, what fits them, what happens to other fields."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from frazil.arrow.byte_slices import ByteSlices
from frazil.config.column_types import SyntaxFault, column_path, column_type
from frazil.errors import ConfigError
from frazil.formats.declared_columns import declared_columns, marked
from frazil.formats.json_reader import JsonShape
from tests.json_ways import one_by_one
from tests.selects import TABLE, Sent, World, config_of

UTC = dt.timezone.utc
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=UTC)


def doc(**members: Any) -> bytes:
    return json.dumps(members).encode()


def declaring(columns: dict[str, str] | None = None, **decode: Any) -> Any:
    more = {"columns": columns} if columns else {}
    return config_of(decode={"format": "json", **more, **decode})


FITS: list[tuple[str, bytes, Any]] = [
    ("boolean", b"true", True),
    ("int", b"2147483647", 2**31 - 1),
    ("long", b"9007199254740993", 2**53 + 1),
    ("double", b"0.1", 0.1),
    ("float", b"0.5", 0.5),
    ("decimal(38,20)", b"0.12345678901234567890", Decimal("0.12345678901234567890")),
    ("decimal(10,2)", b'"1.50"', Decimal("1.50")),
    ("decimal(10,2)", b"1e2", Decimal(100)),
    ("string", b'"\\u00e9"', "é"),
    ("date", b'"2026-03-01"', dt.date(2026, 3, 1)),
    ("time", b'"10:00:00.123456"', dt.time(10, 0, 0, 123456)),
    ("timestamp", b'"2026-03-01 12:00:00"', NOON.replace(tzinfo=None)),
    ("timestamptz", b'"2026-03-01T13:00:00+01:00"', NOON),
    ("timestamptz(ms)", b"1772366400000", NOON),
    ("timestamptz(s)", b"1772366400.000001", NOON + dt.timedelta(microseconds=1)),
    ("timestamp(us)", b"1772366400000000", NOON.replace(tzinfo=None)),
    ("date(d)", b"20513", NOON.date()),
    ("date(d)", b'"2026-03-01"', NOON.date()),
    ("time(ms)", b"43200000", NOON.time()),
    ("time(s)", b"43200.000001", NOON.time().replace(microsecond=1)),
    ("time(ns)", b"43200000001000", NOON.time().replace(microsecond=1)),
    ("time(us)", b'"12:00"', NOON.time()),
    ("timestamptz(ns)", b"1772366400000000000", NOON),
    ("timestamptz(ms)", b'"2026-03-01T12:00:00Z"', NOON),
    (
        "uuid",
        b'"a3b1c2d4-0000-4000-8000-000000000001"',
        uuid.UUID("a3b1c2d4-0000-4000-8000-000000000001"),
    ),
    ("binary", b'"AP8="', b"\0\xff"),
    ("fixed(2)", b'"AP8="', b"\0\xff"),
    ("list<decimal(3,1)>", b"[1.5,null]", [Decimal("1.5"), None]),
    ("map<string, long>", b'{"a":1}', [("a", 1)]),
    ("struct<a: int, `b c`: list<timestamp>>", b'{"a":1}', {"a": 1, "b c": None}),
]
UNFIT: list[tuple[str, bytes]] = [
    ("boolean", b'"true"'),
    ("boolean", b"1"),
    ("int", b"2147483648"),
    ("int", b"1.0"),
    ("long", b'"5"'),
    ("long", b"9223372036854775808"),
    ("float", b"1e39"),
    ("decimal(10,2)", b"0.105"),
    ("decimal(3,2)", b"10"),
    ("decimal(3,2)", b'"1,5"'),
    ("string", b"5"),
    ("date", b'"2026-02-29"'),
    ("date", b"20000"),
    ("timestamp", b'"2026-03-01T12:00:00Z"'),
    ("timestamp", b"1772366400"),
    ("timestamptz", b'"2026-03-01T12:00:00"'),
    ("timestamptz(ns)", b"1772366400000000001"),
    ("timestamptz(ms)", b"1e300"),
    ("timestamptz(ms)", b"true"),
    ("date(d)", b"2147483648"),
    ("date(d)", b"1.5"),
    ("date(d)", b"true"),
    ("date", b"18628"),
    ("time(ms)", b"86400000"),
    ("time(ms)", b"-1"),
    ("time(ns)", b"1"),
    ("time(us)", b'"24:00"'),
    ("time", b"1"),
    ("uuid", b'"x"'),
    ("binary", b'"not base64"'),
    ("fixed(3)", b'"AP8="'),
    ("list<long>", b'["1"]'),
    ("struct<a: int>", b'{"a":"x"}'),
]


@pytest.mark.parametrize(("kind", "text", "wanted"), FITS)
def test_a_value_of_the_declared_type_comes_back(kind: str, text: bytes, wanted: Any):
    world = World(declaring({"a": kind}))
    [row] = world.send(b'{"a":%b}' % text)
    assert row["a"] == wanted
    assert world.rejections == {}


@pytest.mark.parametrize(("kind", "text"), UNFIT)
def test_a_value_of_another_type_is_rejected_alone_with_its_field(kind: str, text: bytes):
    world = World(declaring({"a": kind}))
    rows = world.send(b'{"a":null}', b'{"a":%b}' % text, b"{}")
    assert [row["_offset"] for row in rows] == [0, 2]
    assert world.rejections[1].kind == "misfit"
    assert "field a" in world.rejections[1].reason


NO_TYPES = ["money", "decimal(39,0)", "decimal(2,3)", "list", "list<", "map<int, int>", "fixed(0)"]
NO_TYPES += ["struct<a: int, a: int>", "timestamp(m)", "int int", "", "list<" * 40 + "int"]
NO_TYPES += ["date(ms)", "date(s)", "time(d)", "time()"]


@pytest.mark.parametrize("text", NO_TYPES)
def test_a_type_that_is_none_is_refused(text: str):
    with pytest.raises(SyntaxFault):
        column_type(text)
    with pytest.raises(ConfigError, match=r"cannot read \[decode\] columns") as caught:
        declaring({"a": text})
    assert caught.value.path == ("decode", "columns", "a")


@pytest.mark.parametrize(
    ("decode", "fact"),
    [
        ({"columns": {"a": "long", "a.b": "long"}}, "a and a.b declare one field"),
        ({"columns": {"a..b": "long"}}, "expected a name"),
        ({"columns": {"a": "long"}, "undeclared": "ignore"}, "'ignore' is unknown"),
        ({"undeclared": "drop"}, "nothing is declared"),
        ({"format": "raw", "columns": {"a": "long"}}, "they are for JSON, and format is raw"),
        ({"columns": {"a": "long"}, "schema": "x"}, "expected either columns or schema"),
    ],
)
def test_declarations_that_contradict_are_refused(decode: dict[str, Any], fact: str):
    with pytest.raises(ConfigError) as caught:
        declaring(**decode)
    assert fact in caught.value.message
    assert caught.value.path[0] == "decode"


def test_a_path_makes_objects_and_backticks_keep_a_dot():
    assert column_path("a.`b.c`.d") == ("a", "b.c", "d")
    columns = declared_columns({"m.a": "int", "m.`b.c`": "string", "n": "date"})
    assert columns.field("m").type == pa.struct([("a", pa.int32()), ("b.c", pa.large_string())])


def test_declared_columns_are_there_from_the_first_record_and_others_are_inferred_beside():
    world = World(declaring({"at": "timestamptz", "m.id": "long"}))
    rows = world.send(doc(x=1, m={"y": "z"}))
    assert rows == [{"at": None, "m": {"id": None, "y": "z"}, "x": 1, "_offset": 0}]
    world.send(doc(m={"id": 5, "w": 1.5}))
    assert world.columns()["at"] == "timestamptz"
    assert [f["name"] for f in world.columns()["m"]["fields"]] == ["id", "y", "w"]


def test_no_record_widens_a_declared_column():
    world = World(declaring({"a": "int", "d": "decimal(3,1)", "f": "float"}))
    rows = world.send(doc(a=2**31), doc(d=1000), doc(f=1e39), doc(a=1, d=1.5, f=0.5))
    assert [row["_offset"] for row in rows] == [3]
    assert world.columns() == {"a": "int", "d": "decimal(3, 1)", "f": "float"}


def test_values_are_read_as_declared_where_the_table_is_wider():
    world = World(declaring({"a": "int"}), {TABLE: pa.schema([("a", pa.int64())])})
    assert [row["a"] for row in world.send(doc(a=1), doc(a=2**31))] == [1]
    assert world.columns() == {"a": "long"}


def test_a_table_of_another_type_takes_no_record():
    world = World(declaring({"a": "string"}), {TABLE: pa.schema([("a", pa.int64())])})
    assert world.send(doc(a="x"), doc(b=1)) == []
    assert "column 'a' is int64 in the table" in world.rejections[0].reason


def test_a_table_is_widened_to_the_declared_type():
    world = World(declaring({"a": "long"}), {TABLE: pa.schema([("a", pa.int32())])})
    assert [row["a"] for row in world.send(doc(a=2**40))] == [2**40]
    assert world.columns() == {"a": "long"}


@pytest.mark.parametrize("undeclared", ["drop", "reject"])
def test_other_fields_are_passed_over_or_reject_the_record_at_every_depth(undeclared: str):
    columns = {"id": "int", "m.a": "long", "l": "list<struct<x: long>>"}
    world = World(declaring(columns, undeclared=undeclared))
    rows = world.send(
        doc(id=0),
        doc(id=1, z={"deep": [1, "a", {}]}),
        doc(id=2, m={"a": 1, "b": 2}),
        doc(id=3, l=[{"x": 1, "y": 2}]),
        doc(id=4, z=None),  # null is the same as absent
    )
    assert [row["id"] for row in rows] == ([0, 1, 2, 3, 4] if undeclared == "drop" else [0, 4])
    assert list(world.columns()) == ["id", "m", "l"]
    if undeclared == "reject":
        assert "field m.b" in world.rejections[2].reason


def test_passing_fields_over_does_not_lose_fields_that_are_to_be_found():
    """`ignore` of pyarrow's reader would hold for every object of the value."""
    world = World(config_of({"select": ["* except (skipped)"]}))
    world.send(doc(id=1, m={"a": 1}))
    rows = world.send(doc(id=1, m={"a": 1, "new": 2}, skipped={"x": [1, "a"]}), doc(id=2, other=1))
    assert rows[0]["m"] == {"a": 1, "new": 2}
    assert rows[1]["other"] == 1
    assert "skipped" not in world.columns()


def test_the_fast_reader_and_the_careful_one_pass_the_same_fields_over():
    columns = marked(declared_columns({"a": "long", "m.b": "string"}), "drop")
    values = [doc(a=i, m={"b": "x", "c": [i]}, z="q" if i % 2 else {"y": i}) for i in range(40)]
    shape = JsonShape(columns)
    careful = one_by_one(columns)
    for given in (values[::2], values):
        [one], [other] = shape.decode(given)[0], careful.decode(given)[0]
        assert one.rows.equals(other.rows)
    _, doubtful = shape._program.decode(ByteSlices.of(values))
    assert not len(doubtful)


SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "integer"},
        "at": {"type": ["string", "null"], "format": "date-time"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "tags": {"type": "object", "additionalProperties": {"type": "string"}},
        "raw": {"type": "string", "contentEncoding": "base64"},
    },
    "$defs": {
        "line": {"type": "object", "properties": {"sku": {"type": "string", "format": "uuid"}}}
    },
}


def test_a_json_schema_declares_the_columns(tmp_path: Path):
    (tmp_path / "x.json").write_text(json.dumps(SCHEMA))
    world = World(declaring(schema=str(tmp_path / "x.json"), undeclared="drop"))
    sku = "a3b1c2d4-0000-4000-8000-000000000001"
    value = {"id": 1, "at": "2026-03-01T12:00:00Z", "lines": [{"sku": sku}], "tags": {"a": "b"}}
    rows = world.send(doc(**value, raw="AP8=", more=1), doc(at=None))
    assert rows[0]["at"] == NOON
    assert rows[0]["lines"] == [{"sku": uuid.UUID(sku)}]
    assert rows[0]["tags"] == [("a", "b")]
    assert "field id: expected a value" in world.rejections[1].reason


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": ["string", "integer"]},
        {"type": "array"},
        {"type": "object"},
        {"$ref": "http://elsewhere/x.json"},
        {"$ref": "#/properties/a"},
        {"type": "money"},
        True,
    ],
)
def test_a_json_schema_of_no_one_type_is_refused(tmp_path: Path, schema: Any):
    (tmp_path / "x.json").write_text(json.dumps({"properties": {"a": schema}}))
    with pytest.raises(ConfigError, match=r"cannot use .*x\.json as the schema of JSON records: a"):
        World(declaring(schema=str(tmp_path / "x.json")))


def test_an_avro_schema_declares_the_columns_of_json(tmp_path: Path):
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    fields = [{"name": "id", "type": "long"}, {"name": "amount", "type": ["null", decimal]}]
    schema = {"type": "record", "name": "R", "fields": fields}
    (tmp_path / "x.avsc").write_text(json.dumps(schema))
    world = World(declaring(schema=str(tmp_path / "x.avsc")))
    rows = world.send(b'{"id":1,"amount":1.10}', b'{"amount":1}', b'{"id":2,"more":true}')
    assert [(r["id"], r["amount"], r["more"]) for r in rows] == [
        (1, Decimal("1.10"), None),
        (2, None, True),
    ]


def test_declared_and_selected_columns_agree():
    table = {"select": ["at as seen", "cast(n as decimal(5,1)) as n", "* except (at)"]}
    columns = {"at": "timestamptz(ms)", "n": "long"}
    world = World(config_of(table, decode={"format": "json", "columns": columns}))
    rows = world.send(doc(at=0, n=2**53 + 1), doc(at=0, n=7, x=1), doc(n="7"))
    assert [(r["seen"], r["n"], r["x"]) for r in rows] == [
        (dt.datetime(1970, 1, 1, tzinfo=UTC), Decimal("7.0"), 1)
    ]
    assert sorted(world.rejections) == [0, 2]


def test_a_select_names_declared_fields_where_no_other_becomes_a_column():
    decode = {"format": "json", "columns": {"id": "long"}, "undeclared": "drop"}
    with pytest.raises(ConfigError, match=r"names the field 'idd', which .* does not declare"):
        config_of({"select": ["idd as id"]}, decode=decode)


def test_keys_of_upserts_are_read_as_declared():
    table = {"mode": "upsert", "key": ["at"]}
    decode = {"format": "json", "columns": {"at": "timestamptz(ms)"}}
    world = World(config_of(table, decode=decode))
    world.send(doc(at=0, a=1))
    world.send(doc(at=0, a=1), Sent(None, b'{"at":0}'))
    assert [row["at"].year for row in world.deleted] == [1970]
