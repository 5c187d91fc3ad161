"""What Kafka Connect's and Debezium's schemas name becomes a column's type: dates, moments,
decimals; and what no column could hold stays what it is. Events as Debezium's connectors send
them; `test_debezium_types` has events that its own classes wrote."""

from __future__ import annotations

import base64
import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from frazil.arrow.avro import WriterSchema
from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.column_program import table_of
from frazil.config.sections import RouteConfig
from frazil.errors import SchemaMismatch
from frazil.formats import debezium
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult
from tests.unit.test_deletes import datum, left, plan, settle, settler

ROUTES = (RouteConfig(to=("db.t",), envelope="debezium"),)
DECIMAL = "org.apache.kafka.connect.data.Decimal"


def unscaled(number: int) -> str:
    size = max(1, (number.bit_length() + 8) // 8)
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def field(name: str, kind: str, meaning: str = "", **parameters: str) -> dict[str, Any]:
    named = {"name": meaning, "version": 1} if meaning else {}
    return {
        "field": name,
        "type": kind,
        "optional": True,
        **named,
        **({"parameters": parameters} if parameters else {}),
    }


#: column, what the schema says, what the payload has, the column's type, its value
COLUMNS: list[tuple[dict[str, Any], Any, pa.DataType, Any]] = [
    (field("id", "int64"), 7, pa.int64(), 7),
    (field("born", "int32", "io.debezium.time.Date"), 18628, pa.date32(), dt.date(2021, 1, 1)),
    (
        field("day", "int32", "org.apache.kafka.connect.data.Date"),
        -1,
        pa.date32(),
        dt.date(1969, 12, 31),
    ),
    (
        field("at", "int64", "io.debezium.time.Timestamp"),
        1609459200123,
        pa.timestamp("us"),
        dt.datetime(2021, 1, 1, 0, 0, 0, 123000),
    ),
    (
        field("exactly", "int64", "io.debezium.time.MicroTimestamp"),
        1609459200123456,
        pa.timestamp("us"),
        dt.datetime(2021, 1, 1, 0, 0, 0, 123456),
    ),
    (
        field("instant", "int64", "org.apache.kafka.connect.data.Timestamp"),
        1609459200123,
        pa.timestamp("us", "UTC"),
        dt.datetime(2021, 1, 1, 0, 0, 0, 123000, dt.timezone.utc),
    ),
    (
        field("price", "bytes", DECIMAL, **{"scale": "2", "connect.decimal.precision": "10"}),
        unscaled(-1234),
        pa.decimal128(10, 2),
        Decimal("-12.34"),
    ),
    (
        field("huge", "bytes", DECIMAL, scale="0"),
        unscaled(10**38 - 1),
        pa.decimal128(38, 0),
        Decimal(10**38 - 1),
    ),
    (field("plain", "bytes", DECIMAL, scale="3"), 1.25, pa.decimal128(38, 3), Decimal("1.250")),
    (
        field("zoned", "string", "io.debezium.time.ZonedTimestamp"),
        "2021-01-01T01:00:00.5+01:00",
        pa.timestamp("us", "UTC"),
        dt.datetime(2021, 1, 1, 0, 0, 0, 500000, dt.timezone.utc),
    ),
    # what stays what it is
    (
        field("clock", "int64", "io.debezium.time.MicroTime"),
        86_400_000_000,
        pa.int64(),
        86_400_000_000,
    ),
    (
        field("nanos", "int64", "io.debezium.time.NanoTimestamp"),
        1609459200123456789,
        pa.int64(),
        1609459200123456789,
    ),
    (field("year", "int32", "io.debezium.time.Year"), 2021, pa.int64(), 2021),
    (field("kind", "string", "io.debezium.data.Enum", allowed="a,b"), "a", pa.large_string(), "a"),
    (field("raw", "bytes"), "BNI=", pa.large_binary(), b"\x04\xd2"),
]


def event(op: str, before: Any, after: Any, columns: Any = COLUMNS) -> bytes:
    fields = [column for column, *_ in columns]
    sides = [
        {
            "field": side,
            "type": "struct",
            "optional": True,
            "name": "s.public.t.Value",
            "fields": fields,
        }
        for side in ("before", "after")
    ]
    schema = {
        "type": "struct",
        "optional": False,
        "name": "s.public.t.Envelope",
        "fields": [*sides, {"field": "op", "type": "string", "optional": False}],
    }
    return json.dumps(
        {"schema": schema, "payload": {"before": before, "after": after, "op": op}}
    ).encode()


ROW = {column["field"]: value for column, value, *_ in COLUMNS}
WANTED = {column["field"]: value for column, _, _, value in COLUMNS}
TYPES = {column["field"]: kind for column, _, kind, _ in COLUMNS}


def making() -> ChunkPipeline:
    """Of an append table that is not there yet."""
    return settler(RecordFormat("json"), routes=ROUTES, upserts=("db.t",), modes={})


def needed(settled: ChunkResult) -> dict[str, pa.DataType]:
    columns = settled.needs["db.t"]
    return {column.name: column.type for column in columns if column.name in TYPES}


def rows(settled: ChunkResult) -> list[dict[str, Any]]:
    return [
        {name: row[name] for name in TYPES} for _, rows in settled.rows for row in rows.to_pylist()
    ]


@pytest.mark.parametrize("op", ["c", "d"])
def test_a_table_made_of_json_has_the_types_that_the_schema_beside_it_names(op: str):
    value = event(op, *((ROW, None) if op == "d" else (None, ROW)))
    settled = settle(making(), (None, value))
    assert settled.rejections == {}
    assert list(needed(settled).items()) == list(TYPES.items())
    columns = pa.schema([*TYPES.items(), ("_op", pa.large_string())])
    first = settle(
        settler(RecordFormat("json"), plan("db.t", columns, key=()), routes=ROUTES),
        (None, value),
        (None, event("c", None, dict.fromkeys(ROW))),
    )
    assert first.rejections == {}
    assert rows(first) == [WANTED, dict.fromkeys(TYPES)]


def test_a_column_that_is_new_to_a_table_has_the_type_that_the_schema_names():
    columns = pa.schema([("id", pa.int64()), ("_op", pa.large_string())])
    settled = settle(
        settler(RecordFormat("json"), plan("db.t", columns, key=()), routes=ROUTES),
        (None, event("c", None, {"id": 1, "born": 0, "price": unscaled(5)})),
    )
    types = needed(settled)
    assert (types["born"], types["price"]) == (pa.date32(), pa.decimal128(10, 2))


def test_without_a_schema_beside_it_json_is_what_it_is():
    value = json.dumps({"op": "c", "after": {"id": 1, "born": 18628, "price": "BNI="}}).encode()
    types = needed(settle(making(), (None, value)))
    assert types == {"id": pa.int64(), "born": pa.int64(), "price": pa.large_string()}


def test_keys_of_named_types_are_compared_and_deleted_as_what_they_are():
    columns = [COLUMNS[6]]
    table = pa.schema([("price", pa.decimal128(10, 2)), ("_op", pa.large_string())])
    settled = settle(
        settler(RecordFormat("json"), plan("db.t", table, key=("price",)), routes=ROUTES),
        (None, event("u", {"price": unscaled(100)}, {"price": unscaled(200)}, columns)),
        (None, event("u", {"price": unscaled(5)}, {"price": "AAU="}, columns)),  # 5 in two bytes
        (None, event("d", {"price": unscaled(300)}, None, columns)),
    )
    assert settled.rejections == {}
    assert left(settled) == [(100, Decimal("1.00"))]
    assert [row["price"] for _, gone in settled.gone for row in gone.to_pylist()] == [
        Decimal("3.00")
    ]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (COLUMNS[1][0], 2**31 - 1),
        (COLUMNS[1][0], "x"),
        (COLUMNS[1][0], [1]),
        (COLUMNS[3][0], 2**62),
        (COLUMNS[6][0], "no base64"),
        (COLUMNS[6][0], {"a": 1}),
        (field("price", "bytes", DECIMAL, scale="2"), unscaled(10**38)),
    ],
)
def test_a_value_that_is_not_what_its_type_says_is_rejected_by_itself(column: Any, value: Any):
    name = column["field"]
    columns = [COLUMNS[0], (column, value, None, None)]
    table = pa.schema([("id", pa.int64()), (name, TYPES[name]), ("_op", pa.large_string())])
    settled = settle(
        settler(RecordFormat("json"), plan("db.t", table, key=()), routes=ROUTES),
        (None, event("c", None, {"id": 1, name: value}, columns)),
        (None, event("c", None, {"id": 2, name: None}, columns)),
    )
    assert {i: rejection.kind for i, rejection in settled.rejections.items()} == {0: "misfit"}
    assert [row["id"] for _, table in settled.rows for row in table.to_pylist()] == [2]


@pytest.mark.parametrize(
    "schema",
    [
        5,
        "x",
        [],
        {},
        {"fields": 5},
        {"fields": [5]},
        {"fields": [{"field": "after"}]},
        {"fields": [{"field": "after", "fields": [{"field": 5, "type": 5, "name": 5}]}]},
        {
            "fields": [
                {
                    "field": "after",
                    "fields": [
                        {
                            "field": "id",
                            "type": "bytes",
                            "name": DECIMAL,
                            "parameters": {"scale": "x"},
                        }
                    ],
                }
            ]
        },
        {
            "fields": [
                {
                    "field": "after",
                    "fields": [
                        {
                            "field": "id",
                            "type": "bytes",
                            "name": DECIMAL,
                            "parameters": {"scale": "99"},
                        }
                    ],
                }
            ]
        },
    ],
)
def test_a_schema_that_says_nothing_of_use_changes_nothing(schema: Any):
    text = json.dumps({"schema": schema, "payload": {"op": "c", "after": {"id": 1}}})
    unwrapped = debezium.unwrap_json([text.encode()])
    assert unwrapped.rows == [b'{"id": 1,"_op":"c"}']
    assert (unwrapped.rejected, unwrapped.named) == ([], [{}])


# ── Avro ─────────────────────────────────────────────────────────────────────────────────────────


def connect(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "connect.version": 1, "connect.name": name}


def test_avro_has_the_types_that_debezium_names():
    schema = {
        "type": "record",
        "name": "Value",
        "fields": [
            {"name": "born", "type": connect("int", "io.debezium.time.Date")},
            {"name": "at", "type": ["null", connect("long", "io.debezium.time.Timestamp")]},
            {"name": "exactly", "type": connect("long", "io.debezium.time.MicroTimestamp")},
            {
                "name": "days",
                "type": {"type": "array", "items": connect("int", "io.debezium.time.Date")},
            },
            {"name": "clock", "type": connect("long", "io.debezium.time.MicroTime")},
            {"name": "zoned", "type": connect("string", "io.debezium.time.ZonedTimestamp")},
            {"name": "wrong", "type": connect("long", "io.debezium.time.Date")},
            {
                "name": "instant",
                "type": {
                    **connect("long", "org.apache.kafka.connect.data.Timestamp"),
                    "logicalType": "timestamp-millis",
                },
            },
        ],
    }
    row = {
        "born": 18628,
        "at": 1609459200123,
        "exactly": 1609459200123456,
        "days": [0, -1],
        "clock": 86_400_000_000,
        "zoned": "infinity",
        "wrong": 1,
        "instant": 0,
    }
    writer = WriterSchema(json.dumps(schema))
    value = datum(schema, **row)
    table, bad = writer.read([value] * 3)
    assert bad == []
    assert table.to_pylist()[0] == {
        "born": dt.date(2021, 1, 1),
        "at": dt.datetime(2021, 1, 1, 0, 0, 0, 123000),
        "exactly": dt.datetime(2021, 1, 1, 0, 0, 0, 123456),
        "days": [dt.date(1970, 1, 1), dt.date(1969, 12, 31)],
        "clock": 86_400_000_000,
        "zoned": "infinity",
        "wrong": 1,
        "instant": dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc),
    }
    rows = writer._each(ByteSlices.of([value] * 3), range(3), bad)
    assert table_of(rows, writer.columns).equals(table)


# ── what is no change of a row ───────────────────────────────────────────────────────────────────


def test_documents_of_mongodb_are_rejected_with_the_reason():
    value = json.dumps({"op": "c", "after": '{"_id": {"$oid": "5"}}', "ts_ms": 5}).encode()
    [rejected] = debezium.unwrap_json([value]).rejected
    assert rejected.kind == "envelope"
    assert "after is text; expected an object. MongoDB's connector" in rejected.reason
    assert "ExtractNewDocumentState" in rejected.reason
    schema = pa.schema([("op", pa.string()), ("before", pa.string()), ("after", pa.string())])
    with pytest.raises(SchemaMismatch, match=r"after is text; expected an object\. MongoDB"):
        debezium.unwrap(schema.empty_table())


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (
            "s.transaction",
            {
                "status": "BEGIN",
                "id": "571:53195829",
                "ts_ms": 5,
                "event_count": None,
                "data_collections": None,
            },
        ),
        ("__debezium-heartbeat.s", {"ts_ms": 1570448151611}),
        (
            "s",
            {
                "source": {"server": "s"},
                "databaseName": "inventory",
                "ddl": "CREATE TABLE t",
                "tableChanges": [],
            },
        ),
    ],
)
def test_what_debezium_sends_beside_changes_is_left_out_by_a_rule(topic: str, value: Any):
    skip = RouteConfig(pattern=r"s|s\.transaction|__debezium-heartbeat\..*", skip=True)
    by = settler(RecordFormat("json"), routes=(skip, *ROUTES), upserts=("db.t",))
    assert by.plan.rules is not None
    share = by.plan.rules.of_topic(topic)
    assert share is not None
    assert not getattr(share, "tables", True)
    _, [rejected, *_] = debezium.unwrap_json([json.dumps(value).encode()])[:2]
    assert rejected.kind == "envelope"


def test_the_decoder_of_the_registry_gives_the_same_types():
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "d", "type": connect("int", "io.debezium.time.Date")}],
    }
    assert Decoder(RecordFormat("avro", json.dumps(schema))).columns([b""]).types == [pa.date32()]
