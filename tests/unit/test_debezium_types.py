"""Every type that Debezium names, in records that its own classes and Connect's converters wrote
(tests/fixtures/debezium): the column that it becomes in a new table, the value in it, what a table
that is there makes of it, and what is rejected."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import uuid
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from frazil.arrow.avro import WriterSchema
from frazil.arrow.avro_types import CONNECT
from frazil.config.column_types import column_type
from frazil.config.sections import RouteConfig, TableConfig
from frazil.config.select import parse_select
from frazil.formats.connect_schema import named, variable_scale
from frazil.formats.declared_columns import arrow_type, declared_columns, marked
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema
from frazil.pipeline import connect_types
from frazil.pipeline.chunk_result import ChunkResult
from frazil.pipeline.selection import RecordEnvelope, SelectPlan, Unselectable, selected
from frazil.pipeline.strict_cast import CastMismatch
from tests.unit.test_deletes import METADATA, gone, left, plan, settle, settler

FILES = Path(__file__).parents[1] / "fixtures" / "debezium"
SCHEMA = (FILES / "kinds.schema.json").read_text().strip()
AVRO = RecordFormat("avro", (FILES / "kinds.avsc").read_text())
JSON = RecordFormat("json")
KINDS = {
    line["name"]: line for line in map(json.loads, (FILES / "kinds.jsonl").read_text().splitlines())
}
OTHERS = [json.loads(line) for line in (FILES / "others.jsonl").read_text().splitlines()]
BEYOND = [name for name in KINDS if name.startswith("beyond")]
CHANGES = ["read", "read nulls", "create", "update", "delete"]
ROUTES = (RouteConfig(to=("db.t",), envelope="debezium"),)
FORMS = ("avro", "schema")
ENVELOPE = RecordEnvelope(1)


def utc(*of: int) -> dt.datetime:
    return dt.datetime(*of, tzinfo=dt.timezone.utc)  # type: ignore[misc]


def point(x: str, y: str) -> bytes:
    return bytes.fromhex("0101000000" + x + y)


ONE, TWO, THREE, FOUR = (f"000000000000{n}" for n in ("f03f", "0040", "0840", "1040"))
WKB = point(ONE, TWO)
CLOCK = dt.time(12, 34, 56, 123456)
#: column → its type, its value in row 1, its value in row 3, which has the highest and lowest
COLUMNS: dict[str, tuple[str, Any, Any]] = {
    "id": ("long", 1, 3),
    "flag": ("boolean", True, None),
    "small": ("int", 7, None),
    "real4": ("float", 1.5, None),
    "text": ("string", "Łódź", None),
    "bytea": ("binary", b"\x00\xff\n", None),
    "price": ("decimal(10,2)", Decimal("-12.34"), Decimal("99999999.99")),
    "numeric_any": ("string", "123.4500", f"1{'0' * 30}.{'0' * 59}1"),
    "money_text": ("string", "12.34", None),
    "born": ("date", dt.date(2021, 1, 1), dt.date(1, 1, 1)),
    "time3": ("int", 45296123, 86399999),
    "time6": ("long", 45296123456, 86399999999),
    "time9": ("long", 45296123456000, 86399999999999),
    "timetz": ("string", "12:34:56.123456Z", None),
    "stamp3": (
        "timestamp",
        dt.datetime(2021, 1, 1, 12, 34, 56, 123000),
        dt.datetime(1582, 10, 4),
    ),
    "stamp6": (
        "timestamp",
        dt.datetime(2021, 1, 1, 12, 34, 56, 123456),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
    ),
    "stamp9": ("long", 1609504496123456000, 9223286400000000001),
    "stamptz": ("timestamptz", utc(2021, 1, 1, 10, 34, 56, 123456), utc(1899, 12, 31, 18, 30)),
    "iso_date": ("string", "2021-01-01Z", None),
    "iso_time": ("string", "12:34:56.123456Z", None),
    "iso_stamp": ("string", "2021-01-01T12:34:56.123456Z", None),
    "connect_date": ("date", dt.date(2021, 1, 1), dt.date(1969, 12, 31)),
    "connect_stamp": (
        "timestamptz",
        utc(2021, 1, 1, 12, 34, 56, 123000),
        utc(1969, 12, 31, 23, 59, 59, 999000),
    ),
    "span": ("long", 2813645500000, -1),
    "span_text": ("string", "P0Y1M2DT3H4M5.5S", None),
    "year": ("int", 2021, 0),
    "bits": ("binary", b"\x01\x02", b""),
    "mood": ("string", "ok", None),
    "moods": ("string", "a,c", None),
    "doc": ("string", '{"a": 1}', None),
    "xml": ("string", "<a/>", None),
    "uid": ("uuid", uuid.UUID("09e28f00-49a4-4b5a-9d4c-1a1d4d0b0e55"), uuid.UUID(int=2**128 - 1)),
    "shape": ("struct<wkb: binary, srid: int>", {"wkb": WKB, "srid": 4326}, None),
    "land": (
        "struct<wkb: binary, srid: int>",
        {"wkb": point(THREE, FOUR), "srid": None},
        None,
    ),
    "place": (
        "struct<x: double, y: double, wkb: binary, srid: int>",
        {"x": 1.5, "y": -2.5, "wkb": point("000000000000f83f", "00000000000004c0"), "srid": None},
        None,
    ),
    "vector": ("list<double>", [1.5, -2.0], None),
    "halfvec": ("list<float>", [0.5, 3.0], None),
    "tags": ("list<string>", ["x", None], None),
    "hstore": ("map<string, string>", [("k", "v")], None),
}
#: What differs between the two forms: a map without text as keys, named types inside others, and
#: Connect's time of day, which is Avro's own type time-millis.
UNLIKE = {"sparsevec", "days", "connect_time"}
#: JSON has numbers of one kind, and so have its columns.
WIDE = {"int": "long", "float": "double"}


def values(names: list[str], form: str) -> list[tuple[None, bytes]]:
    lines = [KINDS[name] for name in names]
    if form == "avro":
        return [(None, base64.b64decode(line["avro"])) for line in lines]
    if form == "schema":
        return [
            (None, f'{{"schema":{SCHEMA},"payload":{line["json"]}}}'.encode()) for line in lines
        ]
    return [(None, line["json"].encode()) for line in lines]


def format_of(form: str) -> RecordFormat:
    return AVRO if form == "avro" else JSON


def needed(form: str, names: list[str] = CHANGES) -> pa.Schema:
    by = settler(format_of(form), routes=ROUTES, upserts=("db.t",), modes={})
    made = settle(by, *values(names, form)).needs["db.t"]
    return pa.schema(list(made))


def written(
    form: str, columns: pa.Schema, names: list[str], format: RecordFormat | None = None
) -> ChunkResult:
    by = settler(format or format_of(form), plan("db.t", columns), routes=ROUTES)
    return settle(by, *values(names, form))


def rows(settled: ChunkResult) -> list[dict[str, Any]]:
    return [row for _, table in settled.rows for row in table.to_pylist()]


def wide(text: str, form: str) -> str:
    if form == "avro":
        return text
    for small, large in WIDE.items():
        text = text.replace(f"{small}>", f"{large}>")
        text = large if text == small else text
    return text


@pytest.mark.parametrize("form", FORMS)
def test_a_new_table_has_the_types_that_debezium_names(form: str):
    types = {c.name: c.type for c in needed(form) if not c.name.startswith("_")}
    assert list(types)[:8] == list(COLUMNS)[:8], "in the order of the database's table"
    assert types.keys() == COLUMNS.keys() | UNLIKE
    for name, (text, *_) in COLUMNS.items():
        expected = arrow_type(column_type(wide(text, form)))
        if pa.types.is_nested(expected):
            # the same but for what may be null
            assert str(types[name]).replace(" not null", "") == str(expected), name
        else:
            assert types[name] == expected, name


@pytest.mark.parametrize("form", FORMS)
def test_every_value_is_the_one_that_was_sent(form: str):
    settled = written(form, needed(form), CHANGES)
    assert settled.rejections == {}
    made = rows(settled)
    assert [row["_op"] for row in made] == ["r", "r", "c", "u"]
    for row, at in ((made[0], 1), (made[2], 2)):
        assert {name: row[name] for name in COLUMNS} == {
            name: expected[at] for name, expected in COLUMNS.items()
        }
    assert {name for name, value in made[1].items() if value is not None and name[0] != "_"} == {
        "id"
    }
    assert {name: made[3][name] for name in COLUMNS} | {"id": 1} == {
        name: made[0][name] for name in COLUMNS
    }
    assert gone(settled) == [(104, 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BEYOND)
def test_a_value_beyond_its_column_is_rejected_by_itself_with_the_column(form: str, name: str):
    column = name.split()[1]
    types = {c.name: c for c in needed(form)}
    types |= {n: pa.field(n, pa.time64("us")) for n in ("time3", "time6")}
    settled = written(form, pa.schema([*types.values()]), ["read", name, "create"])
    if (form, column) == ("avro", "stamp6"):  # the year 294247
        assert settled.rejections == {}
        return
    assert {i: r.kind for i, r in settled.rejections.items()} == {1: "misfit"}
    assert column in settled.rejections[1].reason
    assert [row["id"] for row in rows(settled)] == [1, 3]


#: Columns of new tables that take every number or text.
ANY = {"time3", "time6"}


@pytest.mark.parametrize("form", FORMS)
def test_times_of_day_that_no_column_of_that_type_takes_are_numbers(form: str):
    names = [name for name in BEYOND if name.split()[1] in ANY]
    settled = written(form, needed(form), names)
    assert settled.rejections == {}
    assert [(row["time3"], row["time6"]) for row in rows(settled)] == [
        (86_400_000, None),
        (None, 86_400_000_000),
        (None, -3_016_800_000_000),
    ]


#: The columns of a table that an earlier version created, by the form of its records.
BEFORE = {
    "avro": {
        "id": "long",
        "born": "int",
        "time3": "int",
        "time6": "long",
        "stamp3": "long",
        "stamp6": "long",
        "stamptz": "string",
        "uid": "string",
        "numeric_any": "struct<scale: int, value: binary>",
    },
    "schema": {
        "id": "long",
        "born": "long",
        "time3": "long",
        "time6": "long",
        "stamp3": "long",
        "stamp6": "long",
        "connect_time": "long",
        "stamptz": "string",
        "uid": "string",
        "bytea": "string",
        "price": "string",
        "numeric_any": "struct<scale: long, value: string>",
    },
}
SENT = {
    "born": 18628,
    "time3": 45296123,
    "time6": 45296123456,
    "stamp3": 1609504496123,
    "stamp6": 1609504496123456,
    "connect_time": 45296123,
    "stamptz": "2021-01-01T12:34:56.123456+02:00",
    "uid": "09e28f00-49a4-4b5a-9d4c-1a1d4d0b0e55",
    "bytea": "AP8K",
    "price": "+y4=",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_that_is_there_keeps_its_columns_and_what_fits_them(form: str):
    new = {c.name: c for c in needed(form)}
    old = {n: pa.field(n, arrow_type(column_type(t))) for n, t in BEFORE[form].items()}
    settled = written(form, pa.schema([*(new | old).values()]), ["read", "read nulls"])
    assert (settled.rejections, settled.needs) == ({}, {})
    row, empty = rows(settled)
    assert {name: row[name] for name in SENT if name in old} == {
        name: value for name, value in SENT.items() if name in old
    }
    unscaled = b"\x12\xd6D" if form == "avro" else "EtZE"
    assert row["numeric_any"] == {"scale": 4, "value": unscaled}
    assert {empty[name] for name in old if name != "id"} == {None}


def test_a_column_that_is_to_be_renamed_keeps_its_type():
    new = [c for c in needed("avro") if c.name != "stamptz"]
    columns = pa.schema([*new, pa.field("moment", pa.large_string())])
    table = replace(plan("db.t", columns), aliases={"stamptz": ("moment",)})
    settled = settle(settler(AVRO, table, routes=ROUTES), *values(["read"], "avro"))
    assert settled.rejections == {}
    assert settled.needs["db.t"].field("stamptz").type == pa.large_string()


#: Columns of format version 3, and the nanoseconds in them.
FINE = {
    "stamp9": (pa.timestamp("ns"), 9223286400000000001),
    "stamptz": (pa.timestamp("ns", "UTC"), -2209008600 * 10**9),
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_nanoseconds_take_every_digit(form: str):
    new = {c.name: c for c in needed(form)}
    fine = {name: pa.field(name, kind) for name, (kind, _) in FINE.items()}
    columns = pa.schema([*(new | fine).values()])
    table = plan("db.t", pa.schema([*new.values()]))
    shape = replace(
        table.shape,
        schema=iceberg_schema(
            columns, METADATA, TableConfig("db.t", mode="upsert", key=("id",), format_version=3)
        ),
    )
    table = replace(table, shape=shape, format_version=3)
    by = settler(format_of(form), table, routes=ROUTES)
    settled = settle(by, *values(["create", "beyond stamptz 2021-01-01T00:00:00.1234567Z"], form))
    assert settled.rejections == {}
    made = pa.concat_tables([table for _, table in settled.rows])
    for name, (_, nanos) in FINE.items():
        assert made.column(name).cast(pa.int64())[0].as_py() == nanos
    assert made.column("stamptz").cast(pa.int64())[1].as_py() == 1609459200123456700


#: Types that a table may have, of what would be a number or text in a new one.
OTHER = {
    "time3": ("time", CLOCK.replace(microsecond=123000)),
    "time6": ("time", CLOCK),
    "time9": ("time", CLOCK),
    "stamp9": ("timestamp", dt.datetime(2021, 1, 1, 12, 34, 56, 123456)),
    "numeric_any": ("decimal(38,4)", Decimal("123.4500")),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_may_have_types_that_hold_some_of_the_values_exactly(form: str):
    new = {c.name: c for c in needed(form)}
    old = {n: pa.field(n, arrow_type(column_type(t))) for n, (t, _) in OTHER.items()}
    settled = written(form, pa.schema([*(new | old).values()]), ["read", "create"])
    assert {i: r.kind for i, r in settled.rejections.items()} == {1: "misfit"}
    [row] = rows(settled)
    assert {name: row[name] for name in OTHER} == {n: value for n, (_, value) in OTHER.items()}


def declaring(**columns: str) -> RecordFormat:
    return RecordFormat("json", declared=marked(declared_columns(columns), "infer"))


DECLARED = {
    "id": "long",
    "bytea": "binary",
    "born": "date(d)",
    "time3": "time(ms)",
    "time6": "time(us)",
    "time9": "time(ns)",
    "stamp3": "timestamp(ms)",
    "stamp6": "timestamp(us)",
    "stamp9": "timestamp(ns)",
    "stamptz": "timestamptz",
    "connect_date": "date(d)",
    "connect_time": "time(ms)",
    "connect_stamp": "timestamptz(ms)",
    "bits": "binary",
    "uid": "uuid",
    "numeric_any": "struct<scale: int, value: binary>",
    "shape": "struct<wkb: binary, srid: int>",
    "days": "list<date(d)>",
    "hstore": "map<string, string>",
}


@pytest.mark.parametrize("form", ["plain", "schema"])
def test_declared_types_read_what_debezium_sends_with_a_schema_beside_it_and_without(form: str):
    format = declaring(**DECLARED)
    by = settler(format, routes=ROUTES, upserts=("db.t",), modes={})
    columns = pa.schema(list(settle(by, *values(CHANGES, form)).needs["db.t"]))
    expected = {name: arrow_type(column_type(text)) for name, text in DECLARED.items()}
    assert {name: columns.field(name).type for name in DECLARED} == expected
    settled = written(form, columns, ["read", "delete", BEYOND[0], "create"], format)
    assert {i: r.kind for i, r in settled.rejections.items()} == {2: "misfit", 3: "misfit"}
    assert "field time3: expected a time of day" in settled.rejections[2].reason
    assert "field time9" in settled.rejections[3].reason, "its nanoseconds are no microseconds"
    [row] = rows(settled)
    wanted = {n: COLUMNS[n][1] for n in DECLARED if n in COLUMNS} | {
        **{n: value for n, (_, value) in OTHER.items() if n in DECLARED},
        "connect_time": OTHER["time3"][1],
        "numeric_any": {"scale": 4, "value": b"\x12\xd6D"},
        "days": [dt.date(1970, 1, 1), None, dt.date(1969, 12, 31)],
    }
    assert {name: row[name] for name in DECLARED} == wanted
    assert gone(settled) == [(101, 1)]


def test_a_declared_type_is_stronger_than_the_schema_beside_the_record():
    format = declaring(time6="long", stamptz="string", price="decimal(12,4)", born="date")
    by = settler(format, routes=ROUTES, upserts=("db.t",), modes={})
    columns = pa.schema(list(settle(by, *values(["read"], "schema")).needs["db.t"]))
    [row] = rows(written("schema", columns, ["read"], format))
    assert (row["time6"], row["stamptz"]) == (SENT["time6"], SENT["stamptz"])
    assert (row["price"], row["born"]) == (Decimal("-12.3400"), dt.date(2021, 1, 1))


@pytest.mark.parametrize("form", ["avro", "schema", "plain"])
def test_a_truncate_is_rejected_with_what_to_do(form: str):
    columns = pa.schema([pa.field("id", pa.int64())]) if form == "plain" else needed(form)
    settled = written(form, columns, ["truncate"])
    assert settled.rejections[0].kind == "envelope"
    assert settled.rejections[0].reason == (
        "cannot make a row of a change: the table was truncated (op t), and rows that were written "
        "before are still there. Delete them; a [[route]] on the field op can skip such records"
    )
    skip = RouteConfig(field="op" if form != "schema" else "payload.op", values=("t",), skip=True)
    by = settler(format_of(form), plan("db.t", columns), routes=(skip, *ROUTES))
    assert settle(by, *values(["truncate"], form)).skipped == 1


def other_values(form: str) -> list[tuple[str, str, RecordFormat, bytes]]:
    """Name, topic, format and value of what Debezium sends beside changes."""
    return [
        (
            line["name"],
            line["topic"],
            RecordFormat("avro", line["avsc"]) if form == "avro" else JSON,
            base64.b64decode(line["avro"])
            if form == "avro"
            else line["json"].encode()
            if form == "plain"
            else f'{{"schema":{line["schema"]},"payload":{line["json"]}}}'.encode(),
        )
        for line in OTHERS
    ]


#: Why it is no change; empty: it is skipped.
WHY = {
    "heartbeat": "it is a heartbeat",
    "begin": "it is transaction metadata",
    "end": "it is transaction metadata",
    "message": "",
    "schema change": "it is a schema change",
}


@pytest.mark.parametrize("form", ["avro", "schema", "plain"])
def test_what_debezium_sends_beside_changes_has_an_outcome(form: str):
    columns = pa.schema([pa.field("id", pa.int64())])
    assert WHY.keys() == {line["name"] for line in OTHERS}
    for name, topic, format, value in other_values(form):
        settled = settle(settler(format, plan("db.t", columns), routes=ROUTES), (None, value))
        if not WHY[name]:
            assert (settled.skipped, settled.rejections) == (1, {}), name
            continue
        assert settled.rejections[0].kind == "envelope"
        assert settled.rejections[0].reason == (
            f"cannot unwrap a change: {WHY[name]}, which comes in a topic of its own. Put a "
            "[[route]] with its topic and skip = true before this one"
        )
        skip = RouteConfig(
            pattern=r"shop(\.transaction|\.message)?|__debezium-heartbeat\..*", skip=True
        )
        by = settler(format, plan("db.t", columns), routes=(skip, *ROUTES))
        assert by.plan.rules is not None
        share = by.plan.rules.of_topic(topic)
        assert share is not None, topic
        assert not getattr(share, "tables", True)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────

KEYS = ["uid", "born", "stamptz", "numeric_any", "stamp6"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", KEYS)
def test_keys_of_named_types_are_deleted_as_what_the_table_has(form: str, key: str):
    columns = needed(form)
    table = plan("db.t", columns, key=(key,))
    settled = settle(settler(format_of(form), table, routes=ROUTES), *values(["delete"], form))
    assert settled.rejections == {}
    assert gone(settled) == [(100, COLUMNS[key][1])]
    assert settled.gone[0][1].schema.field(key).type == columns.field(key).type


def test_a_schema_may_say_the_types_of_before_alone():
    schema = json.loads(SCHEMA)
    schema["fields"] = [field for field in schema["fields"] if field["field"] != "after"]
    value = f'{{"schema":{json.dumps(schema)},"payload":{KINDS["delete"]["json"]}}}'.encode()
    by = settler(JSON, plan("db.t", needed("schema"), key=("born",)), routes=ROUTES)
    assert gone(settle(by, (None, value))) == [(100, COLUMNS["born"][1])]


def moved(key: str, form: str, before: str, after: str) -> bytes:
    """A change whose row was that of one event, and is that of another."""
    if form == "avro":
        schema = fastavro.parse_schema(json.loads(AVRO.schema))
        read = {
            name: fastavro.schemaless_reader(
                io.BytesIO(base64.b64decode(KINDS[name]["avro"])), schema, None
            )
            for name in (before, after)
        }
        change = {**read[after], "op": "u", "before": read[before]["after"]}
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, change)
        return out.getvalue()
    one, other = (json.loads(KINDS[name]["json"]) for name in (before, after))
    payload = json.dumps({**other, "op": "u", "before": one["after"]})
    return f'{{"schema":{SCHEMA},"payload":{payload}}}'.encode()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_named_type_that_changes_leaves_no_twin(form: str, key: str):
    columns = needed(form)
    by = settler(format_of(form), plan("db.t", columns, key=(key,)), routes=ROUTES)
    settled = settle(
        by,
        (None, moved(key, form, "read", "create")),
        (None, moved(key, form, "read", "read")),
    )
    assert settled.rejections == {}
    assert left(settled) == [(100, COLUMNS[key][1])]


def test_the_kafka_key_of_a_record_without_a_value_is_read_as_the_table_has_it():
    uid = {"type": "string", "connect.version": 1, "connect.name": "io.debezium.data.Uuid"}
    schema = {"type": "record", "name": "Key", "fields": [{"name": "uid", "type": uid}]}
    columns = pa.schema([pa.field("uid", pa.uuid()), pa.field("name", pa.large_string())])
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, {"uid": str(COLUMNS["uid"][1])})
    key = RecordFormat("avro", json.dumps(schema))
    by = settler(JSON, plan("db.t", columns, key=("uid",)), key=key)
    assert gone(settle(by, (out.getvalue(), None))) == [(100, COLUMNS["uid"][1])]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def test_a_decimal_of_any_scale_is_text_with_all_its_digits():
    for unscaled, scale, text in (
        (0, 0, "0"),
        (0, 3, "0.000"),
        (-5, 3, "-0.005"),
        (987, -10, "9870000000000"),
        (10**5000 + 1, 2500, f"1{'0' * 2500}.{'0' * 2499}1"),
        (2**127, 0, str(2**127)),
    ):
        data = unscaled.to_bytes(unscaled.bit_length() // 8 + 1, "big", signed=True)
        assert variable_scale(data, scale) == text


@pytest.mark.parametrize("scale", [2**31 - 1, -(2**31)])
def test_a_scale_without_measure_is_no_text_of_gigabytes(scale: int):
    with pytest.raises(ValueError, match="at most 200000 digits"):
        variable_scale(b"\x01", scale)


def test_a_select_casts_numbers_to_times_and_dates():
    rows = pa.table({"t": [45296123456, None], "d": [18628, None]})
    select = parse_select(["cast(t as time(us)) as t", "cast(d as date(d)) as d"])
    made = selected(SelectPlan(select), rows, RecordEnvelope(2))
    assert made.to_pylist() == [{"t": CLOCK, "d": dt.date(2021, 1, 1)}, {"t": None, "d": None}]
    for item, number in (("cast(t as time(us)) as t", -1), ("cast(t as date(d)) as t", 2**31)):
        with pytest.raises(Unselectable, match="cannot select t"):
            selected(SelectPlan(parse_select([item])), pa.table({"t": [number]}), ENVELOPE)


def uuids(*texts: str | None) -> list[Any]:
    field = pa.field("uid", pa.large_string(), metadata={CONNECT: b"io.debezium.data.Uuid"})
    array = pa.array(["x", *texts, "x"], pa.large_string()).slice(1, len(texts))
    made = connect_types.converted(array, field, pa.uuid())
    made.validate(full=True)
    assert made.type == pa.uuid()
    return list(made.to_pylist())


def test_uuids_are_read_together_and_by_the_rules_of_a_cast():
    one, other = str(uuid.UUID(int=2**127 + 5)), str(uuid.UUID(int=255)).upper()
    expected = [uuid.UUID(one), None, uuid.UUID(other)]
    assert uuids(one, None, other) == expected
    assert uuids(f"{{{one}}}", None, other) == expected, "not in the usual form"
    assert uuids(None) == [None]
    assert uuids() == []
    for wrong in ("", "x", one[:-1], one[:-1] + "g", one[:-1] + "é", one + "0"):
        with pytest.raises(CastMismatch, match="column 'uid' is io"):
            uuids(one, wrong)


def test_a_selected_field_has_the_type_that_its_name_gives_it_unless_it_is_cast():
    table = WriterSchema(AVRO.schema).read([base64.b64decode(KINDS["read"]["avro"])])[0]
    after = pa.Table.from_struct_array(table.column("after").combine_chunks())
    select = parse_select(["uid as code", "cast(stamptz as string) as text", "* except (uid)"])
    rows = selected(SelectPlan(select), after.select(["stamptz", "uid"]), ENVELOPE)
    columns = connect_types.columns(rows.schema, (), {})
    assert columns.names == ["code", "text", "stamptz"]
    assert columns.types == [pa.uuid(), pa.large_string(), pa.timestamp("us", "UTC")]


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "int32"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "column",
    [
        {"field": "bad", **nested_schema(200)},
        {"field": "bad", "type": "struct", "fields": [{"field": "\ud800", "type": "int32"}]},
        {"field": "bad", "type": "struct", "fields": [{"type": "int32"}]},
        {"field": "bad", "type": "struct", "fields": []},
        {"field": "bad", "type": "map", "keys": {"type": "int32"}, "values": {"type": "int32"}},
        {"field": "bad", "type": {"x": []}},
        {"field": "\ud800", "type": "int32"},
        {"field": 5, "type": "int32"},
        {"field": "absent", "type": "int32"},
    ],
)
def test_a_schema_says_nothing_of_columns_that_no_table_can_have_or_no_record_has(column: Any):
    after = {"field": "after", "fields": [{"field": "id", "type": "int32"}, column]}
    text = json.dumps({"schema": {"fields": [after]}, "payload": {"op": "c", "after": {"id": 1}}})
    by = settler(JSON, routes=ROUTES, upserts=("db.t",), modes={})
    columns = pa.schema(list(settle(by, (None, text.encode())).needs["db.t"]))
    assert columns.names == ["id", "_op"]
    assert list(named(json.dumps({"fields": [after]}), "after")) in (["id"], ["id", "absent"])


def test_arrays_are_as_deep_as_records_may_be():
    for depth in (46, 47):
        schema = {
            "fields": [{"field": "after", "fields": [{"field": "a", **nested_schema(depth)}]}]
        }
        assert list(named(json.dumps(schema), "after")) == ["a"][: 47 - depth]


def test_a_schema_that_is_deep_or_broken_says_nothing():
    assert named("", "after") == {}
    assert named('{"fields":' * 100_000, "after") == {}
