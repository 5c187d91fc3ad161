"""Bytes → columns, or rejected. The real fastavro; a real HTTP registry, in process."""

from __future__ import annotations

import datetime as dt
import gc
import io
import json
import math
import pickle
import resource
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Context, Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from frazil.arrow.avro import WriterSchema
from frazil.arrow.avro_types import UnsupportedSchema
from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.column_program import ColumnProgram
from frazil.errors import AccountingError, ConfigError, SchemaMismatch, Unavailable, Undecodable
from frazil.formats import schema_registry
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.formats.json_reader import JsonShape
from frazil.kafka.record_batch import HEADERS
from tests.json_ways import one_by_one


def encode(schema: Any, value: Any, header: bytes = b"") -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return header + out.getvalue()


def zigzag(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def record(**fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }


def logical(kind: str, meaning: str, /, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meaning, **more}


def header(schema_id: int) -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big")


def by_hand(schema: Any) -> WriterSchema:
    """Every datum is read by the strict reader."""
    writer = WriterSchema(json.dumps(schema))
    writer._program = None
    return writer


def doubtful(schema: Any, values: list[bytes]) -> list[int]:
    program = WriterSchema(json.dumps(schema))._program
    assert program is not None
    return program.decode(ByteSlices.of(values))[1].tolist()  # type: ignore[no-any-return]


def accounted(count: int, decoded: list[DecodedChunk], rejected: list[UndecodableRecord]) -> bool:
    seen = [rejection.index for rejection in rejected]
    for group in decoded:
        seen += range(count) if group.index is None else group.index.tolist()
        assert group.index is None or group.index.dtype == np.int64
        assert group.rows.num_rows == (count if group.index is None else len(group.index))
    return sorted(seen) == list(range(count))


POINT = {
    "type": "record",
    "name": "Point",
    "fields": [{"name": "x", "type": "int"}, {"name": "tag", "type": ["null", "string"]}],
}
COLOR = {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}
UTC = dt.timezone.utc
MOMENT = dt.datetime(2024, 2, 29, 1, 2, 3, 456000, UTC)
KEY = uuid.UUID(int=0x1234567890ABCDEF1234567890ABCDEF)

# Avro type, Arrow type, what fastavro writes, what the column holds.
TYPES: dict[str, tuple[Any, pa.DataType, list[Any], list[Any] | None]] = {
    "boolean": ("boolean", pa.bool_(), [True, False], None),
    "int": ("int", pa.int32(), [0, -(2**31), 2**31 - 1], None),
    "long": ("long", pa.int64(), [0, -(2**63), 2**63 - 1], None),
    "float": ("float", pa.float32(), [1.5, -2.0, float("inf")], None),
    "double": ("double", pa.float64(), [1.1, -2.0, float("-inf")], None),
    "string": ("string", pa.large_string(), ["", "é", "x" * 300], None),
    "bytes": ("bytes", pa.large_binary(), [b"", b"\xff", b"x" * 300], None),
    "fixed": (
        {"type": "fixed", "name": "F", "size": 3},
        pa.binary(3),
        [b"abc", b"\0\xff\1"],
        None,
    ),
    "large fixed": (
        {"type": "fixed", "name": "F", "size": 300},
        pa.binary(300),
        [b"a" * 300],
        None,
    ),
    "enum": (COLOR, pa.large_string(), ["RED", "BLUE", "RED"], None),
    "date": (
        logical("int", "date"),
        pa.date32(),
        [dt.date(1960, 1, 1), dt.date(2024, 2, 29)],
        None,
    ),
    "time-millis": (
        logical("int", "time-millis"),
        pa.time64("us"),
        [dt.time(0), dt.time(23, 59, 59, 999000)],
        None,
    ),
    "time-micros": (
        logical("long", "time-micros"),
        pa.time64("us"),
        [dt.time(0), dt.time(23, 59, 59, 999999)],
        None,
    ),
    "timestamp-millis": (
        logical("long", "timestamp-millis"),
        pa.timestamp("us", "UTC"),
        [MOMENT, -1],
        [MOMENT, dt.datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)],
    ),
    "timestamp-micros": (
        logical("long", "timestamp-micros"),
        pa.timestamp("us", "UTC"),
        [MOMENT],
        None,
    ),
    "timestamp-nanos": (
        logical("long", "timestamp-nanos"),
        pa.timestamp("ns", "UTC"),
        [1_709_168_523_456_000_000],
        [MOMENT],
    ),
    "local-timestamp-millis": (
        logical("long", "local-timestamp-millis"),
        pa.timestamp("us"),
        [MOMENT.replace(tzinfo=None)],
        None,
    ),
    "local-timestamp-micros": (
        logical("long", "local-timestamp-micros"),
        pa.timestamp("us"),
        [MOMENT.replace(tzinfo=None)],
        None,
    ),
    "local-timestamp-nanos": (
        logical("long", "local-timestamp-nanos"),
        pa.timestamp("ns"),
        [1_709_168_523_456_000_000],
        [MOMENT.replace(tzinfo=None)],
    ),
    "uuid on string": (logical("string", "uuid"), pa.large_string(), [str(KEY)], None),
    "uuid on fixed": (
        logical("fixed", "uuid", name="U", size=16),
        pa.binary(16),
        [KEY.bytes],
        None,
    ),
    "duration": (
        logical("fixed", "duration", name="D", size=12),
        pa.binary(12),
        [b"\1" * 12],
        None,
    ),
    "decimal on bytes": (
        logical("bytes", "decimal", precision=10, scale=2),
        pa.decimal128(10, 2),
        [Decimal("1.23"), Decimal("-99999999.99"), Decimal("0.00")],
        None,
    ),
    "decimal on fixed": (
        logical("fixed", "decimal", name="D", size=6, precision=10, scale=2),
        pa.decimal128(10, 2),
        [Decimal("1.23"), Decimal("-4.00")],
        None,
    ),
    "decimal of 38": (
        logical("bytes", "decimal", precision=38),
        pa.decimal128(38, 0),
        [Decimal(10**38 - 1), Decimal(1 - 10**38)],
        None,
    ),
    "decimal of 64": (
        logical("bytes", "decimal", precision=64, scale=2),
        pa.decimal128(38, 2),
        [Decimal("1.23"), Decimal(10**38 - 1).scaleb(-2, Context(prec=38))],
        None,
    ),
    "decimal on 20 bytes": (
        logical("fixed", "decimal", name="D", size=20, precision=38, scale=1),
        pa.decimal128(38, 1),
        [Decimal("-4.5")],
        None,
    ),
    "record": (
        POINT,
        pa.struct([pa.field("x", pa.int32(), False), ("tag", pa.large_string())]),
        [{"x": 1, "tag": None}, {"x": 2, "tag": "b"}],
        None,
    ),
    "array": (
        {"type": "array", "items": "int"},
        pa.large_list(pa.field("element", pa.int32(), False)),
        [[1, 2], [], [3]],
        None,
    ),
    "array of arrays": (
        {"type": "array", "items": {"type": "array", "items": ["null", "long"]}},
        pa.large_list(pa.field("element", pa.large_list(pa.field("element", pa.int64())), False)),
        [[[1, None], []], []],
        None,
    ),
    "array of enums": (
        {"type": "array", "items": COLOR},
        pa.large_list(pa.field("element", pa.large_string(), False)),
        [["RED", "BLUE"], []],
        None,
    ),
    "array of records": (
        {"type": "array", "items": POINT},
        pa.large_list(
            pa.field(
                "element",
                pa.struct([pa.field("x", pa.int32(), False), ("tag", pa.large_string())]),
                False,
            )
        ),
        [[{"x": 1, "tag": "a"}], []],
        None,
    ),
    "map": (
        {"type": "map", "values": ["null", "int"]},
        pa.map_(pa.large_string(), pa.int32()),
        [{"a": 1, "b": None}, {}],
        [[("a", 1), ("b", None)], []],
    ),
    "map of maps": (
        {"type": "map", "values": {"type": "map", "values": "long"}},
        pa.map_(
            pa.large_string(),
            pa.field(
                "value", pa.map_(pa.large_string(), pa.field("value", pa.int64(), False)), False
            ),
        ),
        [{"a": {"b": 1}}, {}],
        [[("a", [("b", 1)])], []],
    ),
    "union of one": (["int"], pa.int32(), [1, 2], None),
    "union of two": (
        ["int", "string"],
        pa.struct([("member0", pa.int32()), ("member1", pa.large_string())]),
        [1, "a"],
        [{"member0": 1, "member1": None}, {"member0": None, "member1": "a"}],
    ),
}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        (name, wrap)
        for name, case in TYPES.items()
        for wrap in ("required", "null first", "null last")
        if wrap == "required" or not isinstance(case[0], list)  # a union cannot hold a union
    ],
)
def test_each_type_is_read_alike_by_compiled_code_and_one_by_one(name: str, wrap: str) -> None:
    kind, arrow, written, expected = TYPES[name]
    expected = expected or written
    if wrap != "required":
        kind = ["null", kind] if wrap == "null first" else [kind, "null"]
        written, expected = [None, *written, None], [None, *expected, None]
    schema = record(before="long", it=kind, after="string")
    values = [
        encode(schema, {"before": i, "it": value, "after": "!"}) for i, value in enumerate(written)
    ]
    writer = WriterSchema(json.dumps(schema))
    assert writer.columns.field("it") == pa.field("it", arrow, wrap != "required")
    assert doubtful(schema, values) == []
    table, bad = writer.read(values)
    again, worse = by_hand(schema).read(values)
    assert not bad
    assert not worse
    for result in (table, again):
        result.validate(full=True)
        assert result.schema.equals(writer.columns)
        assert result["before"].to_pylist() == list(range(len(values)))
        assert result["it"].to_pylist() == expected
    assert table.equals(again)


def test_an_optional_union_of_several_is_null_or_one_member() -> None:
    schema = record(it=["string", "null", "long", COLOR])
    decoder = Decoder(RecordFormat("avro", json.dumps(schema)))
    values = [encode(schema, {"it": value}) for value in ("a", None, 5)]
    [group], rejected = decoder.decode(values)
    assert not rejected
    assert decoder.columns(values).field("it").nullable
    assert group.rows["it"].to_pylist() == [
        {"member0": "a", "member1": None, "member2": None},
        None,
        {"member0": None, "member1": 5, "member2": None},
    ]


def test_a_logical_type_without_sense_is_ignored_as_avro_says() -> None:
    columns = WriterSchema(
        json.dumps(
            record(
                a=logical("bytes", "decimal", precision=2, scale=5),
                b=logical("bytes", "decimal"),
                c=logical("string", "timestamp-micros"),
                d=logical("long", "new"),
            )
        )
    ).columns
    assert columns.types == [pa.large_binary(), pa.large_binary(), pa.large_string(), pa.int64()]


def test_a_named_type_used_twice_is_expanded_also_across_namespaces() -> None:
    inner = {**POINT, "namespace": "other"}
    schema = {
        **record(
            a=inner,
            b=["null", "other.Point"],
            c={
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Pair",
                    "namespace": "other",
                    "fields": [{"name": "p", "type": "Point"}],
                },
            },
        ),
        "namespace": "home",
    }
    row = {
        "a": {"x": 1, "tag": None},
        "b": {"x": 2, "tag": "t"},
        "c": [{"p": {"x": 3, "tag": None}}],
    }
    table, _ = WriterSchema(json.dumps(schema)).read([encode(schema, row)])
    assert table.to_pylist() == [row]


def test_field_names_are_kept_whatever_they_are() -> None:
    schema = json.dumps(record(**{"tag": "long", "head": "string", "f1": "int", "a-b ü.": "int"}))
    [group], _ = Decoder(RecordFormat("avro", schema)).decode(
        [zigzag(1) + b"\x02x" + b"\x02\x04"] * 3
    )
    assert group.rows.to_pylist() == [{"tag": 1, "head": "x", "f1": 1, "a-b ü.": 2}] * 3


def test_a_top_level_that_is_no_record_is_one_column_named_value() -> None:
    decoder = Decoder(RecordFormat("avro", '["null", "string"]'))
    [group], _ = decoder.decode([encode(["null", "string"], value) for value in ("a", None)])
    assert decoder.columns([]) == pa.schema([("value", pa.large_string())])
    assert group.rows.to_pylist() == [{"value": "a"}, {"value": None}]


def test_a_record_without_fields_keeps_the_number_of_rows() -> None:
    decoder = Decoder(RecordFormat("avro", json.dumps(record())))
    [group], rejected = decoder.decode([b"", b"x", b"", b""])
    assert (group.rows.num_rows, group.rows.num_columns) == (3, 0)
    assert [rejection.index for rejection in rejected] == [1]


RECURSIVE = {
    "type": "record",
    "name": "Node",
    "fields": [{"name": "next", "type": ["null", {"type": "array", "items": "Node"}]}],
}
LAUGHS: Any = {
    "type": "record",
    "name": "L0",
    "fields": [{"name": f"f{i}", "type": "int"} for i in range(2)],
}
for level in range(1, 20):  # each level uses the one below twice
    LAUGHS = {
        "type": "record",
        "name": f"L{level}",
        "fields": [{"name": "a", "type": LAUGHS}, {"name": "b", "type": f"L{level - 1}"}],
    }
DEEP: Any = "int"
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (RECURSIVE, "recursive"),
        (record(a=DEEP), "too large"),
        (LAUGHS, "too large"),
        (record(a="null"), "field a: a column that is always null"),
        (record(a=["null"]), "always null"),
        (record(a={"type": "array", "items": "null"}), "always null"),
        (
            record(a={"type": "array", "items": {"type": "record", "name": "E", "fields": []}}),
            "has no fields",
        ),
        (record(a={"type": "fixed", "name": "Z", "size": 0}), "fixed of at least one byte"),
        (record(a=logical("bytes", "decimal", precision=64, scale=39)), "at most 38, found 39"),
        (record(a="Nowhere"), "Nowhere is not known"),
        (record(a={"type": "array"}), "expected a part 'items'"),
        (record(a=["null", ["null", "int"]]), "a union within a union"),
        (record(a=7), "expected an Avro type, found 7"),
    ],
)
def test_a_schema_that_no_table_can_hold_is_rejected_with_its_reason(
    schema: Any, reason: str
) -> None:
    decoder = Decoder(RecordFormat("avro", json.dumps(schema)))
    decoded, rejected = decoder.decode([b"\x00", b"\x02"])
    assert not decoded
    assert [rejection.kind for rejection in rejected] == ["schema", "schema"]
    assert reason in rejected[0].reason
    with pytest.raises(SchemaMismatch, match="cannot make columns"):
        decoder.columns([b"\x00"])


def test_a_schema_text_nested_beyond_the_stack_is_rejected_not_a_crash() -> None:
    with pytest.raises(UnsupportedSchema):
        WriterSchema("[" * 100_000 + "]" * 100_000)
    with pytest.raises(UnsupportedSchema):
        WriterSchema("{nonsense")


FLAT = record(id="long", name="string", note=["null", "string"])


def flat(i: int, head: bytes = b"") -> bytes:
    return encode(FLAT, {"id": i, "name": f"n{i}", "note": None if i % 3 else "y"}, head)


@pytest.mark.parametrize("head", [b"", header(7)], ids=["avro", "confluent"])
@pytest.mark.parametrize("place", [0, 1, 1000, 1999])
def test_one_byte_too_many_harms_no_neighbour(head: bytes, place: int) -> None:
    """Datums have no borders of their own: read one behind the other, all later ones shift."""
    values = [flat(i, head) for i in range(2000)]
    values[place] += b"\x00"
    kind = "confluent-avro" if head else "avro"
    [group], [bad] = Decoder(RecordFormat(kind, json.dumps(FLAT))).decode(values)
    good = [i for i in range(2000) if i != place]
    assert (bad.index, bad.kind) == (place, "datum")
    assert "1 more bytes" in bad.reason
    assert group.index is not None
    assert group.index.tolist() == good
    assert group.rows["id"].to_pylist() == good
    assert group.rows["name"].to_pylist() == [f"n{i}" for i in good]


def test_two_datums_whose_cut_is_moved_are_both_rejected() -> None:
    """The glued bytes are those of two good datums: only the border is wrong."""
    one, two = flat(1), flat(2)
    decoder = Decoder(RecordFormat("avro", json.dumps(FLAT)))
    decoded, rejected = decoder.decode([flat(0), one + two[:2], two[2:], flat(3)])
    assert [rejection.index for rejection in rejected] == [1, 2]
    assert decoded[0].rows["id"].to_pylist() == [0, 3]


def test_the_last_datum_may_not_be_longer_though_nothing_follows_it() -> None:
    for extra in (b"\x00", b"\x00" * 8, flat(9)):
        _, rejected = Decoder(RecordFormat("avro", json.dumps(FLAT))).decode(
            [flat(0), flat(1) + extra]
        )
        assert [rejection.index for rejection in rejected] == [1]


def test_a_rejected_datum_names_the_field() -> None:
    _, [bad] = Decoder(RecordFormat("avro", json.dumps(record(a="long", p=POINT)))).decode(
        [b"\x02\x02"]
    )
    assert bad.reason == "cannot read p.tag: the datum ends within a number"


@pytest.mark.parametrize(
    ("kind", "datum", "fact"),
    [
        ("int", zigzag(2**40), "found 1099511627776"),  # in 32 bits: 0
        (COLOR, zigzag(2), "expected a symbol"),
        (COLOR, zigzag(-1), "expected a symbol"),  # fastavro: the last symbol
        ("string", zigzag(2) + b"\xed\xa0", "UTF-8"),
        ("string", zigzag(2**60), "ends too early"),
        ("string", zigzag(-1), "ends too early"),
        ("bytes", zigzag(2**40) + b"x", "expected 1099511627776 bytes, found 1"),
        ("long", b"\x80" * 10 + b"\x01", "at most 10 bytes"),
        ("double", b"\x00" * 7, "expected 8 bytes, found 7"),
        (logical("int", "time-millis"), zigzag(86_400_000), "found 86400000"),
        (logical("long", "time-micros"), zigzag(-1), "found -1"),
        (logical("long", "timestamp-millis"), zigzag(2**60), "expected"),
        (logical("bytes", "decimal", precision=4), zigzag(2) + b"\x27\x10", "at most 4 digits"),
        (
            logical("bytes", "decimal", precision=64),
            zigzag(16) + (10**38).to_bytes(16, "big"),
            "at most 38 digits",
        ),
        (
            logical("bytes", "decimal", precision=64),
            zigzag(17) + (-(10**38)).to_bytes(17, "big", signed=True),
            "at most 38 digits",
        ),
        (
            {"type": "array", "items": "int"},
            zigzag(30_000_000) + b"\x02\x00",
            "a count of 30000000",
        ),
        ({"type": "array", "items": "int"}, zigzag(2**62), "a count of"),
        ({"type": "array", "items": "int"}, zigzag(-(2**62)) + b"\x00\x00", "a count of"),
        ({"type": "map", "values": "int"}, zigzag(2**50) + b"\x00", "a count of"),
        (["null", "string"], zigzag(2) + b"\x02a", "branch 0 or 1 of a union, found 2"),
        (["null", "string"], zigzag(-1) + b"\x02a", "branch 0 or 1 of a union, found -1"),
        (["string", "null"], zigzag(9), "branch 0 or 1 of a union, found 9"),
        (["string", "null"], zigzag(2**40), "branch 0 or 1 of a union, found 1099511627776"),
        (
            {"type": "array", "items": ["null", "long"]},
            zigzag(2) + zigzag(1) + b"\x02" + zigzag(3) + b"\x02\x00",
            "branch 0 or 1 of a union, found 3",
        ),
        (["int"], zigzag(1) + b"\x02", "only branch"),
        (["int", "string", "long"], zigzag(3) + b"\x02", "expected a branch"),
        (["int", "string", "long"], zigzag(-1) + b"\x02", "expected a branch"),
    ],
)
def test_a_datum_out_of_its_bounds_is_rejected_and_its_neighbours_stay(
    kind: Any, datum: bytes, fact: str
) -> None:
    schema = record(it=kind)
    samples = {"int": 1, "string": "a", "bytes": b"a", "long": 1, "double": 1.5}
    good = next((case[2][0] for case in TYPES.values() if case[0] == kind), None)
    if good is None:
        good = samples.get(
            str(kind),
            {"array": [1], "map": {"a": 1}, "bytes": Decimal(9)}.get(
                kind["type"] if isinstance(kind, dict) else "",
                "a" if kind in (["null", "string"], ["string", "null"]) else 1,
            ),
        )
    values = [encode(schema, {"it": good})] * 200
    values[77] = datum
    [group], [bad] = Decoder(RecordFormat("avro", json.dumps(schema))).decode(values)
    assert (bad.index, bad.kind) == (77, "datum")
    assert fact in bad.reason
    assert group.rows.num_rows == 199
    assert len(set(map(str, group.rows["it"].to_pylist()))) == 1


@pytest.mark.parametrize(
    ("kind", "datum", "value"),
    [
        ("boolean", b"\x07", False),
        ("long", b"\x80\x80\x00", 0),
        ("long", b"\x80" * 9 + b"\x7f", 2**62),
        ({"type": "array", "items": "int"}, zigzag(-2) + zigzag(99) + b"\x02\x04\x00", [1, 2]),
        ({"type": "array", "items": "int"}, b"\xff" * 9 + b"\x01" + b"\x00\x00", []),
        (logical("bytes", "decimal", precision=4), zigzag(0), Decimal(0)),
        (
            {"type": "map", "values": "int"},
            zigzag(2) + b"\x02a\x02\x02a\x04\x00",
            [("a", 1), ("a", 2)],
        ),
    ],
)
def test_what_is_odd_but_right_is_read_alike_one_by_one(
    kind: Any, datum: bytes, value: Any
) -> None:
    schema = record(it=kind)
    table, _ = WriterSchema(json.dumps(schema)).read([datum])
    assert table["it"].to_pylist() == [value]
    again, bad = by_hand(schema).read([datum])
    assert not bad
    assert again.equals(table)


def test_what_a_few_bytes_claim_is_not_allocated() -> None:
    """Five bytes that claim 30 million items, or a text of an exabyte (H10)."""
    schema = record(
        a={"type": "array", "items": ["null", "int"]},
        s=["null", "string"],
        m={"type": "map", "values": "bytes"},
    )
    claims = [
        zigzag(30_000_000),
        zigzag(-30_000_000) + b"\x02",
        zigzag(2**62),
        b"\x00\x02" + zigzag(2**60),
        b"\x00\x00" + zigzag(2**40),
    ]
    values = [encode(schema, {"a": [1, None], "s": "x", "m": {"k": b"v"}})] * 3000
    for i in range(0, 3000, 30):
        values[i] = claims[i // 30 % len(claims)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [group], rejected = Decoder(RecordFormat("avro", json.dumps(schema))).decode(values)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(rejected) == 100
    assert group.rows.num_rows == 2900
    assert grown < 64 * 1024, f"{grown} KiB"


def test_a_doubtful_datum_is_the_only_one_that_is_read_one_by_one() -> None:
    values = [flat(i) for i in range(20_000)]
    odd = [4_321, 4_322, 19_999]
    values[4_321], values[4_322], values[19_999] = b"\x01", b"", values[19_999] + b"x"
    assert doubtful(FLAT, values) == odd
    _, rejected = Decoder(RecordFormat("avro", json.dumps(FLAT))).decode(values)
    assert [rejection.index for rejection in rejected] == odd


def test_rows_of_both_readers_are_in_order() -> None:
    """A count of the lowest number there is stands for no items, which compiled code leaves."""
    schema = record(a="long", l={"type": "array", "items": "int"})
    values = [zigzag(i) + b"\x00" for i in range(2_000)]
    values[0] = values[7] = values[1_999] = zigzag(5) + b"\xff" * 9 + b"\x01" + b"\x00\x00"
    values[8] = b""
    assert doubtful(schema, values) == [0, 7, 8, 1_999]
    [group], [bad] = Decoder(RecordFormat("avro", json.dumps(schema))).decode(values)
    assert bad.index == 8
    kept = [i for i in range(2_000) if i != 8]
    assert group.rows["a"].to_pylist() == [5 if i in (0, 7, 1_999) else i for i in kept]


def test_many_rows_are_read_alike() -> None:
    count = 70_000
    [group], rejected = Decoder(RecordFormat("avro", '"long"')).decode(
        [zigzag(i) for i in range(count)]
    )
    assert not rejected
    assert group.index is None
    assert group.rows["value"].to_pylist() == list(range(count))


def test_texts_and_lists_that_outgrow_their_room_are_read_on() -> None:
    schema = record(
        s="string",
        l={"type": "array", "items": {"type": "array", "items": "string"}},
        m={"type": "map", "values": {"type": "array", "items": POINT}},
        u=["bytes", {"type": "array", "items": "Point"}],
        f={"type": "fixed", "name": "F", "size": 5_000},
    )
    points = [{"x": i, "tag": None if i % 2 else "t" * i} for i in range(300)]
    rows = [
        {
            "s": "é" * 100_000,
            "l": [["a" * i] * 3 for i in range(300)],
            "m": {f"k{i}": points[:i] for i in range(90)},
            "u": b"b" * 5_000,
            "f": b"f" * 5_000,
        },
        {"s": "", "l": [[]] * 5_000, "m": {}, "u": points, "f": b"g" * 5_000},
    ]
    values = [encode(schema, row) for row in rows]
    assert doubtful(schema, values) == []
    table, _ = WriterSchema(json.dumps(schema)).read(values)
    again, _ = by_hand(schema).read(values)
    assert table.equals(again)


def test_a_large_fixed_takes_no_space_where_it_is_null() -> None:
    kind = {"type": "fixed", "name": "F", "size": 10_000_000}
    schema = record(it=["null", kind], u=["null", "int", "F"])
    values = [b"\x00" + b"\x02\x02"] * 20
    table, bad = WriterSchema(json.dumps(schema)).read(values[:1])
    assert not bad
    assert table["it"].null_count == 1


def test_threads_may_share_a_writer_schema() -> None:
    writer = WriterSchema(json.dumps(FLAT))
    parts = [[flat(i) for i in range(start, start + 3_000)] for start in range(0, 12_000, 3_000)]
    with ThreadPoolExecutor(4) as pool:
        tables = [table for table, _ in pool.map(writer.read, parts * 5)]
    for i, table in enumerate(tables):
        start = i % 4 * 3_000
        assert table["id"].to_pylist() == list(range(start, start + 3_000))


# --- Confluent ----------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """A registry of a few schemas, that counts what it is asked."""

    asked: list[str]
    #: status and body, as JSON unless it is bytes; then perhaps headers
    answers: dict[str, tuple[Any, ...]]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        unknown = {"error_code": 40403, "message": "Schema not found"}
        status, body, *headers = self.answers.get(path, (404, unknown))
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **dict(*headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    kind = type("Fresh", (Answers,), {"asked": [], "answers": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(schema_registry, "_writers", {})
    monkeypatch.setattr(schema_registry, "_missing", {})
    kind.url = f"http://user:secret@127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield kind
    server.shutdown()
    server.server_close()


def confluent(registry: Any, **more: str) -> Decoder:
    return Decoder(
        RecordFormat(
            "confluent-avro",
            registry={"url": registry.url, "max.retries": "1", "retries.wait.ms": "1", **more},
        )
    )


def test_each_schema_id_is_asked_for_once_in_a_process(registry: Any) -> None:
    registry.answers["/schemas/ids/7"] = 200, {"schema": json.dumps(FLAT)}
    for _ in range(3):
        [group], rejected = confluent(registry).decode([flat(i, header(7)) for i in range(9)])
        assert not rejected
        assert group.schema_id == 7
        assert group.index is None
    assert registry.asked == ["/schemas/ids/7"]


def test_a_chunk_of_everything_accounts_for_each_value_once(registry: Any) -> None:
    newer = record(id="long", extra="double")
    registry.answers["/schemas/ids/7"] = 200, {"schema": json.dumps(FLAT)}
    registry.answers["/schemas/ids/8"] = 200, {"schema": json.dumps(newer)}
    registry.answers["/schemas/ids/9"] = 200, {"schema": "{}", "schemaType": "PROTOBUF"}
    values: list[bytes | None] = [
        flat(0, header(7)),
        None,
        encode(newer, {"id": 2, "extra": 1.5}, header(8)),
        b"",
        b"{}",
        flat(5, header(404)),
        b"\x01" + flat(6, header(7))[1:],
        flat(7, header(7)),
        header(7),
        flat(9, header(9)),
        flat(10, header(7)),
    ]
    decoder = confluent(registry)
    decoded, rejected = decoder.decode(values)
    assert accounted(len(values), decoded, rejected)
    assert {(rejection.index, rejection.kind) for rejection in rejected} == {
        (1, "null"),
        (3, "header"),
        (4, "header"),
        (5, "schema"),
        (6, "header"),
        (8, "datum"),
        (9, "schema"),
    }
    assert [(chunk.schema_id, chunk.rows["id"].to_pylist()) for chunk in decoded] == [
        (7, [0, 7, 10]),
        (8, [2]),
    ]
    assert [chunk.index.tolist() for chunk in decoded if chunk.index is not None] == [
        [0, 7, 10],
        [2],
    ]
    # The newest id of the sample that the registry knows names the columns.
    assert decoder.columns([values[0], values[2]]).names == ["id", "extra"]
    assert decoder.columns([values[0], values[5]]).names == FLAT_NAMES


FLAT_NAMES = ["id", "name", "note"]


def test_a_header_that_changes_without_a_sign_in_the_datum_is_seen(registry: Any) -> None:
    """Both schemas have the same bytes: only the header tells them apart."""
    registry.answers["/schemas/ids/1"] = 200, {"schema": json.dumps(record(meters="long"))}
    registry.answers["/schemas/ids/2"] = 200, {"schema": json.dumps(record(feet="long"))}
    for last in (2, 3, 4):
        heads = [1, 1, 1, 1, 1]
        heads[last] = 2
        decoded, rejected = confluent(registry).decode([header(head) + b"\x02" for head in heads])
        assert not rejected
        assert [chunk.rows.column_names for chunk in decoded] == [["meters"], ["feet"]]
        assert decoded[1].index is not None
        assert decoded[1].index.tolist() == [last]


def test_good_values_of_one_schema_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriterSchema, "_each", lambda *_: pytest.fail("one by one"))
    [group], _ = Decoder(RecordFormat("confluent-avro", json.dumps(FLAT))).decode(
        [flat(i, header(7)) for i in range(50)]
    )
    assert group.rows["id"].to_pylist() == list(range(50))


def test_many_schemas_in_one_chunk_are_told_apart_by_their_headers(registry: Any) -> None:
    count = 300
    for i in range(count):
        registry.answers[f"/schemas/ids/{i}"] = (
            200,
            {"schema": json.dumps(record(**{f"f{i}": "int"}))},
        )
    values: list[bytes | None] = [header(i % count) + zigzag(i) for i in range(1_000)]
    values[500:503] = [None, b"\x00", b"\x01" * 9]
    decoded, rejected = confluent(registry).decode(values)
    assert [(rejection.index, rejection.kind) for rejection in rejected] == [
        (500, "null"),
        (501, "header"),
        (502, "header"),
    ]
    assert accounted(len(values), decoded, rejected)
    assert [chunk.schema_id for chunk in decoded] == list(range(count))
    for chunk in decoded:
        assert chunk.index is not None
        assert (chunk.index % count == chunk.schema_id).all()
        assert chunk.rows[f"f{chunk.schema_id}"].to_pylist() == chunk.index.tolist()


def test_rejecting_leaves_no_garbage_that_only_a_collector_finds() -> None:
    """Workers run without the garbage collector: a cycle would keep its whole chunk."""
    jobs = [
        (Decoder(RecordFormat("avro", json.dumps(FLAT))), [flat(0), b"\x02", flat(1) + b"x"]),
        (Decoder(RecordFormat("json"), SHAPE), [b'{"id":1}', b'{"id":"x"}', b'{"z":1}', b"{"]),
    ]
    for decoder, values in jobs:
        decoder.decode(values)
        gc.collect()
        gc.disable()
        try:
            assert len(decoder.decode(values)[1]) >= 2
            assert gc.collect() == 0
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("decoder", "values"),
    [
        (Decoder(RecordFormat("avro", json.dumps(FLAT))), [flat(0), flat(1)]),
        (JsonShape(pa.schema([("id", pa.int64())])), [b'{"id":1}', b'{"id":2}']),
    ],
)
def test_a_value_that_a_reader_loses_is_an_error(
    decoder: Any, values: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ColumnProgram.decode
    monkeypatch.setattr(ColumnProgram, "decode", lambda self, given: read(self, given[:-1]))
    with pytest.raises(AccountingError, match="expected 2 values, found 1"):
        decoder.decode(values)


def test_schemas_that_a_schema_refers_to_are_fetched(registry: Any) -> None:
    outer = {"type": "record", "name": "Outer", "fields": [{"name": "p", "type": "Point"}]}
    registry.answers["/schemas/ids/5"] = (
        200,
        {
            "schema": json.dumps(outer),
            "references": [{"name": "Point", "subject": "points", "version": 3}],
        },
    )
    registry.answers["/subjects/points/versions/3"] = (
        200,
        {"subject": "points", "version": 3, "id": 4, "schema": json.dumps(POINT)},
    )
    [group], _ = confluent(registry).decode([header(5) + b"\x02\x00"])
    assert group.rows.to_pylist() == [{"p": {"x": 1, "tag": None}}]


def test_with_a_schema_given_no_registry_is_asked() -> None:
    decoder = Decoder(RecordFormat("confluent-avro", json.dumps(FLAT)))
    decoded, rejected = decoder.decode([flat(0, header(1)), flat(1, header(2)), flat(2)])
    assert [chunk.schema_id for chunk in decoded] == [1, 2]
    assert [rejection.kind for rejection in rejected] == ["header"]


def test_an_unknown_id_is_asked_for_again_later(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = confluent(registry)
    assert decoder.decode([flat(0, header(7))])[1][0].kind == "schema"
    registry.answers["/schemas/ids/7"] = 200, {"schema": json.dumps(FLAT)}
    assert decoder.decode([flat(0, header(7))])[1][0].kind == "schema"
    assert len(registry.asked) == 1, "not once for each chunk"
    later = schema_registry.time.monotonic() + schema_registry.MISSING_SECONDS + 1
    monkeypatch.setattr(schema_registry.time, "monotonic", lambda: later)
    assert decoder.decode([flat(0, header(7))])[1] == []


def test_a_registry_that_fails_is_unavailable_and_its_credentials_stay_unsaid(
    registry: Any,
) -> None:
    registry.answers["/schemas/ids/7"] = 503, {"error_code": 50003, "message": "later"}
    with pytest.raises(Unavailable, match=r"//127\.0\.0\.1.*503") as failed:
        confluent(registry).decode([flat(0, header(7))])
    assert "secret" not in str(failed.value)
    assert len(registry.asked) == 2, "once, and once more"
    with pytest.raises(ConfigError, match=r"cannot set max\.retries"):
        confluent(registry, **{"max.retries": "many"})
    registry.answers["/schemas/ids/7"] = 401, {"error_code": 40101, "message": "who are you"}
    with pytest.raises(ConfigError, match="401"):
        confluent(registry).decode([flat(0, header(7))])


def test_a_registry_that_is_not_there_is_unavailable(registry: Any) -> None:
    with pytest.raises(Unavailable, match="does not answer") as failed:
        confluent(registry, url="http://user:secret@127.0.0.1:1").decode([flat(0, header(7))])
    assert "http://127.0.0.1:1" in str(failed.value)
    assert "secret" not in str(failed.value)


HTML = b"<html><body>Not here</body></html>"
KNOWN = {"schema": json.dumps(record(n="long"))}


@pytest.mark.parametrize(
    "answer",
    [
        (404, HTML, {"Content-Type": "text/html"}),
        (404, b""),
        (404, {}),
        (404, {"message": "no"}),
        (404, {"error_code": 404, "message": "HTTP 404 Not Found"}),
        (404, ["40403"]),
        (404, {"error_code": "40403"}),
        (404, {"error_code": None}),
        (410, HTML),
        (400, {}),
        (301, HTML, {"Location": "https://login.example/"}),
        (302, b""),
        (408, {}),
        (429, b"slow"),
        (500, HTML),
        (502, HTML),
        (503, {}),
        (599, b""),
        (200, b""),
        (204, b""),
        (200, HTML),
        (200, b"\xff\xfe"),
        (200, b"[" * 100_000),
        (200, []),
        (200, 5),
        (200, None),
        (200, {}),
        (200, {"schema": None}),
        (200, {"schema": ""}),
        (200, {"schema": 5}),
        (200, {"schema": {"type": "long"}}),
        (200, {"schema": ["long"]}),
        (200, {**KNOWN, "schemaType": 5}),
        (200, {**KNOWN, "references": 5}),
        (200, {**KNOWN, "references": [5]}),
        (200, {**KNOWN, "references": "x"}),
        (200, b"no gzip", {"Content-Encoding": "gzip"}),
        (200, b'{"schema": "tru'),
    ],
)
def test_what_is_not_the_registrys_own_word_is_unavailable(registry: Any, answer: Any) -> None:
    registry.answers["/schemas/ids/7"] = answer
    decoder = confluent(registry, **{"max.retries": "0"})
    for _ in range(2):  # and is not kept in mind
        with pytest.raises(Unavailable, match=r"cannot get schema 7: http://127") as failed:
            decoder.decode([flat(0, header(7))])
        assert "secret" not in str(failed.value)
        assert len(str(failed.value)) < 600
        assert failed.value.hint
    registry.answers["/schemas/ids/7"] = 200, {"schema": json.dumps(FLAT)}
    assert decoder.decode([flat(0, header(7))])[1] == []


@pytest.mark.parametrize("status", [401, 403, 407])
def test_a_registry_that_does_not_let_us_in_is_a_matter_of_credentials(
    registry: Any, status: int
) -> None:
    registry.answers["/schemas/ids/7"] = status, HTML
    with pytest.raises(ConfigError, match=str(status)):
        confluent(registry).decode([flat(0, header(7))])


@pytest.mark.parametrize("code", [40401, 40402, 40403, 40406])
def test_a_schema_whose_reference_is_gone_is_unknown(registry: Any, code: int) -> None:
    registry.answers["/schemas/ids/7"] = (
        200,
        {**KNOWN, "references": [{"name": "Point", "subject": "points", "version": 3}]},
    )
    registry.answers["/subjects/points/versions/3"] = 404, {"error_code": code, "message": "gone"}
    _, [rejected] = confluent(registry).decode([flat(0, header(7))])
    assert rejected.kind == "schema"
    assert "or one that it refers to" in rejected.reason
    registry.answers["/subjects/points/versions/3"] = 404, HTML
    schema_registry.ask_again()
    with pytest.raises(Unavailable):
        confluent(registry).decode([flat(0, header(7))])


def test_a_good_record_is_good_among_any_number_of_unknown_ids(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ask(_: Any, schema_id: int) -> Any:
        asked.append(schema_id)
        return (
            WriterSchema(json.dumps(FLAT))
            if schema_id == 7
            else schema_registry.UnknownSchemaId("no", math.inf)
        )

    monkeypatch.setattr(schema_registry.SchemaRegistry, "_ask", ask)
    monkeypatch.setattr(schema_registry, "MOST_MISSING", 100)
    ids = [*range(1_000, 3_000), 7]
    decoder = confluent(registry)
    [group], rejected = decoder.decode([flat(schema_id, header(schema_id)) for schema_id in ids])
    assert group.rows["id"].to_pylist() == [7]
    assert len(rejected) == 2_000
    assert len(schema_registry._missing) == 100
    decoder.decode([flat(schema_id, header(schema_id)) for schema_id in ids[-50:]])
    assert len(asked) == 2_001, "the newest are kept in mind"


def test_an_id_that_no_registry_can_have_is_not_asked_for(registry: Any) -> None:
    """Asked for it, a registry answers as if it had no such path: 404 without a word of its own."""
    _, rejected = confluent(registry).decode([flat(0, header(2**31)), flat(0, header(2**32 - 1))])
    assert [rejection.kind for rejection in rejected] == ["schema", "schema"]
    assert "expected an id of at most 2147483647" in rejected[0].reason
    assert registry.asked == []


def test_a_schema_id_in_a_header_is_not_taken_for_one_before_the_value(registry: Any) -> None:
    """A bare datum may begin as if it had an id: here it is one of a schema with the same bytes."""
    registry.answers["/schemas/ids/7"] = 200, {"schema": json.dumps(record(a="long"))}
    guid = b"\x01" + KEY.bytes
    pair = ("__value_schema_id", guid)
    listed = [[("x", b"1"), pair], [], [("__value_schema_id", None)], [("y", b"")], [pair]]
    values = [header(7) + b"\x02", header(7) + b"\x04", b"\x06", header(7) + b"\x08", None]
    headers = pa.array(listed, HEADERS)
    [group], rejected = confluent(registry).decode(values, headers)
    assert group.rows["a"].to_pylist() == [2, 4]
    assert [(rejection.index, rejection.kind) for rejection in rejected] == [
        (0, "header"),
        (2, "header"),
        (4, "null"),
    ]
    assert "header __value_schema_id, which is not read" in rejected[0].reason
    [group], rejected = confluent(registry).decode(values[1:2], headers[1:2])
    assert not rejected
    [_], [rejected_by_itself] = confluent(registry).decode(values[1:3], headers[1:3])
    assert rejected_by_itself.index == 1


def test_no_columns_without_a_value_that_names_a_schema(registry: Any) -> None:
    with pytest.raises(Undecodable, match="no value has the header"):
        confluent(registry).columns([None, b"x"])


# --- the interface ------------------------------------------------------------------------------


def test_a_format_can_be_pickled_and_hides_its_secrets() -> None:
    it = RecordFormat(
        "confluent-avro", registry={"url": "http://r", "basic.auth.user.info": "u:secret"}
    )
    assert pickle.loads(pickle.dumps(it)) == it
    assert "secret" not in repr(it)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xml",), "found 'xml'"),
        (("avro",), "expected a schema"),
        (("confluent-avro",), "expected a registry url"),
    ],
)
def test_a_format_that_makes_no_sense_is_a_config_error(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RecordFormat(*arguments)


def test_raw_takes_every_value_also_null() -> None:
    decoder = Decoder(RecordFormat("raw"))
    [group], rejected = decoder.decode([b"", None, b"\xff"])
    assert not rejected
    assert group.rows.schema.equals(decoder.columns([]))
    assert group.rows["value"].to_pylist() == [b"", None, b"\xff"]


@pytest.mark.parametrize("kind", ["avro", "confluent-avro", "json", "raw"])
def test_no_values_give_nothing(kind: str) -> None:
    assert Decoder(RecordFormat(kind, '"int"')).decode([]) == ([], [])


@pytest.mark.parametrize("kind", ["avro", "confluent-avro", "json"])
def test_only_nulls_are_all_rejected(kind: str) -> None:
    decoded, rejected = Decoder(RecordFormat(kind, '"int"'), pa.schema([("a", pa.int64())])).decode(
        [None, None]
    )
    assert not decoded
    assert [(rejection.index, rejection.kind) for rejection in rejected] == [
        (0, "null"),
        (1, "null"),
    ]


def test_the_module_needs_no_spark() -> None:
    code = "import sys, frazil.formats.decoder\nassert not {'pyspark', 'py4j'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- JSON ---------------------------------------------------------------------------------------

SHAPE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.large_string()),
        ("n", pa.int32()),
        ("f", pa.float64()),
        ("b", pa.bool_()),
        ("p", pa.struct([pa.field("x", pa.int64(), nullable=False), ("y", pa.string())])),
        ("l", pa.large_list(pa.field("element", pa.int64(), nullable=False))),
        ("m", pa.list_(pa.struct([("q", pa.float64())]))),
    ]
)


def both(shape: pa.Schema, values: list[bytes | None]) -> tuple[Any, list[UndecodableRecord], bool]:
    """Reads by compiled code and one by one, and says whether the first way took all. They must
    agree."""
    shape_read = JsonShape(shape)
    _, doubtful = shape_read._program.decode(ByteSlices.of(values))
    took = not len(doubtful)
    one, other = shape_read.decode(values), one_by_one(shape).decode(values)
    assert one[1] == other[1]
    assert accounted(len(values), *one)
    assert accounted(len(values), *other)
    assert len(one[0]) == len(other[0])
    for chunk, other_chunk in zip(one[0], other[0], strict=True):
        assert chunk.rows.schema.equals(shape)
        assert other_chunk.rows.schema.equals(shape)
        chunk.rows.validate(full=True)
        assert chunk.rows.equals(other_chunk.rows)
    return (one[0][0].rows.to_pylist() if one[0] else []), one[1], took


def test_json_objects_are_read_at_once() -> None:
    whole = {
        "id": 1,
        "name": "é\u0000",
        "n": -5,
        "f": 0.1,
        "b": True,
        "p": {"x": 1, "y": None},
        "l": [1, 2],
        "m": [{"q": 1.5}, None],
    }
    bare = {**dict.fromkeys(SHAPE.names), "id": 2}
    rows, rejected, took = both(SHAPE, [json.dumps(whole).encode(), b' {"id":2} '])
    assert took
    assert not rejected
    assert rows == [whole, bare]


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (b"", "json", "cannot read JSON"),
        (b"{", "json", "cannot read JSON"),
        (b'{"id":1', "json", "cannot read JSON"),
        (b'{"id":1}{"id":2}', "json", "Extra data"),
        (b'{"id":1,"f":NaN}', "json", "NaN is not JSON"),
        (b'{"id":1,"f":-Infinity}', "json", "-Infinity is not JSON"),
        (b'{"id":1,"name":"\xff"}', "json", "utf-8"),
        (b'{"id":1,"name":"a\nb"}', "json", "control character"),
        (b'{"id":1,"name":"a\tb"}', "json", "control character"),
        (b'{"id":1,"name":"\\ud800"}', "shape", "field name: expected text"),
        (b"null", "shape", "the value: expected object, found null"),
        (b"[1]", "shape", "expected object, found array"),
        (b'"a"', "shape", "expected object, found string"),
        (b"{}", "shape", "field id: expected a value, found nothing"),
        (b'{"id":null}', "shape", "field id: expected int64, found null"),
        (b'{"id":1,"new":[]}', "shape", "field new: expected no such field, found array"),
        (b'{"id":"1"}', "shape", "field id: expected int64, found string"),
        (b'{"id":true}', "shape", "field id: expected int64, found boolean"),
        (b'{"id":1.0}', "shape", "expected int64, found number with a fraction"),
        (b'{"id":1e2}', "shape", "expected int64, found number with a fraction"),
        (b'{"id":9223372036854775808}', "shape", "out of its range"),
        (b'{"id":1,"n":2147483648}', "shape", "field n: expected int32, found a number out of"),
        (
            b'{"id":1,"f":1e400}',
            "shape",
            "field f: expected double, found a number out of its range",
        ),
        (b'{"id":1,"f":1.7976931348623159e308}', "shape", "out of its range"),
        (b'{"id":1,"b":0}', "shape", "field b: expected boolean, found number"),
        (b'{"id":1,"name":5}', "shape", "field name: expected string, found number"),
        (b'{"id":1,"p":{}}', "shape", "field p.x: expected a value"),
        (b'{"id":1,"p":{"x":null}}', "shape", "field p.x"),
        (b'{"id":1,"p":{"x":1,"z":2}}', "shape", "field p.z: expected no such field"),
        (b'{"id":1,"l":[1,null]}', "shape", "field l: expected int64, found null"),
        (b'{"id":1,"l":{}}', "shape", "field l: expected array, found object"),
        (b'{"id":' + b"9" * 5000 + b"}", "json", "cannot read JSON"),
        (b"[" * 200_000, "limit", "nested too deep"),
        (b'{"id":1,"l":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "limit", "nested too deep"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_json_that_does_not_fit_is_rejected_and_its_neighbours_stay(
    value: bytes, kind: str, reason: str
) -> None:
    values: list[bytes | None] = [
        b'{"id":%d,"p":{"x":1}}' % i if i % 2 else b'{"id":%d}' % i for i in range(300)
    ]
    values[200] = value
    rows, [bad], took = both(SHAPE, values)
    assert not took
    assert (bad.index, bad.kind) == (200, kind)
    assert reason in bad.reason
    assert [row["id"] for row in rows] == [i for i in range(300) if i != 200]


def test_a_value_ends_where_its_record_ends() -> None:
    """The bytes of the next record stand behind it in the same buffer."""
    whole = b'{"id":12,"name":"ab","l":[1,2],"b":true}'
    for size in range(1, len(whole)):
        rows, rejected, _ = both(SHAPE, [whole[:size], whole[size:], whole])
        assert [rejection.kind for rejection in rejected] in (["json"] * 2, ["json", "shape"])
        assert [r["id"] for r in rows] == [12]


def test_the_last_of_two_equal_keys_counts() -> None:
    rows, rejected, took = both(SHAPE, [b'{"id":1,"id":2}', b'{"id":3}'])
    assert not took
    assert not rejected
    assert [row["id"] for row in rows] == [2, 3]


def test_json_in_several_lines_is_read_at_once_too() -> None:
    values = [json.dumps({"id": i, "l": [i]}, indent=2).encode() + b"\r\n" for i in range(500)]
    rows, rejected, took = both(SHAPE, values)
    assert took
    assert not rejected
    assert [row["id"] for row in rows] == list(range(500))


TYPED = pa.schema(
    [
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("fine", pa.timestamp("ns", "UTC")),
        ("day", pa.date32()),
        ("hour", pa.time64("us")),
        ("price", pa.decimal128(10, 2)),
        ("blob", pa.large_binary()),
        ("four", pa.binary(4)),
        ("tags", pa.map_(pa.string(), pa.int64())),
        ("single", pa.float32()),
        ("key", pa.uuid()),
    ]
)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("at", '"2024-02-29T01:02:03.456Z"', MOMENT),
        ("at", '"2024-02-29 03:02:03.456000000+02:00"', MOMENT),
        ("at", '"2024-02-28T20:32:03,456-0430"', MOMENT),
        ("local", '"2024-02-29T01:02"', dt.datetime(2024, 2, 29, 1, 2)),
        ("fine", '"2024-02-29T01:02:03.456Z"', MOMENT),
        ("day", '"1960-01-31"', dt.date(1960, 1, 31)),
        ("hour", '"23:59:59.999999"', dt.time(23, 59, 59, 999999)),
        ("price", '"-12345678.90"', Decimal("-12345678.90")),
        ("price", "12.34", Decimal("12.34")),
        ("price", "5", Decimal("5.00")),
        ("price", "1.5e3", Decimal("1500.00")),
        ("blob", '"AP8="', b"\x00\xff"),
        ("four", '"AAECAw=="', b"\0\1\2\3"),
        ("tags", '{"a":1,"b":null}', [("a", 1), ("b", None)]),
        ("single", "0.5", 0.5),
        ("key", f'"{KEY}"', KEY),
    ],
)
def test_json_text_becomes_the_type_of_its_column(name: str, text: str, value: Any) -> None:
    rows, rejected, _ = both(TYPED, [b'{"%s":%s}' % (name.encode(), text.encode())])
    assert not rejected
    assert rows[0][name] == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("at", '"2024-02-29T01:02:03"'),
        ("at", "1709168523"),
        ("at", '"2024-02-30T01:02:03Z"'),
        ("at", '"2024-02-29T24:00:00Z"'),
        ("at", '"2024-02-29T01:02:03.1234567Z"'),
        ("at", '"2024-02-29T01:02:03+25:00"'),
        ("at", '"29.2.2024"'),
        ("at", '"\u0662024-02-29"'),
        ("local", '"2024-02-29T01:02:03Z"'),
        ("fine", '"9999-02-28T01:02:03Z"'),
        ("day", '"2023-02-29"'),
        ("day", '"20230228"'),
        ("hour", '"25:00"'),
        ("price", '"1.234"'),
        ("price", "123456789"),
        ("price", "1e999999999"),
        ("price", '"NaN"'),
        ("price", '"1_0"'),
        ("price", "true"),
        ("price", "0.001"),
        ("blob", '"%%"'),
        ("blob", '"AA"'),
        ("four", '"AAEC"'),
        ("tags", "[]"),
        ("tags", '{"a":"b"}'),
        ("single", "1e39"),
        ("key", '"x"'),
    ],
)
def test_json_text_that_would_have_to_be_guessed_at_is_rejected(name: str, text: str) -> None:
    _, [bad], _ = both(TYPED, [b'{"%s":%s}' % (name.encode(), text.encode())])
    assert bad.kind == "shape"
    assert f"field {name}: expected" in bad.reason


def test_a_column_that_json_cannot_fill_is_a_misfit() -> None:
    for kind in (pa.duration("us"), pa.struct([("odd", pa.duration("us"))])):
        with pytest.raises(SchemaMismatch, match="cannot fit JSON into column odd"):
            Decoder(RecordFormat("json"), pa.schema([("odd", kind)]))


@pytest.mark.parametrize(
    ("kind", "document", "value"),
    [
        (pa.struct([pa.field("key", pa.uuid(), nullable=False)]), {"key": str(KEY)}, {"key": KEY}),
        (pa.large_list(pa.field("element", pa.uuid())), [str(KEY), None], [KEY, None]),
        (pa.map_(pa.large_string(), pa.uuid()), {"a": str(KEY)}, [("a", KEY)]),
    ],
)
def test_a_uuid_inside_a_column_is_read_from_text(kind: Any, document: Any, value: Any) -> None:
    columns = pa.schema([("n", pa.int64()), ("c", kind)])
    texts = [json.dumps({"n": 1, "c": document}), '{"n": 2, "c": null}', '{"n": 3, "c": 7}']
    [chunk], [bad] = Decoder(RecordFormat("json"), columns).decode([t.encode() for t in texts])
    assert chunk.rows.schema == columns
    chunk.rows.validate(full=True)
    assert chunk.rows.column("c").to_pylist() == [value, None]
    assert (bad.index, bad.kind) == (2, "shape")


def test_without_a_shape_json_is_inferred_from_the_values() -> None:
    decoder = Decoder(RecordFormat("json"))
    values = [
        b'{"a":1,"o":{"x":true},"l":[],"z":null}',
        b"[]",
        b'{"a":2.5,"t":"2024-01-01"}',
        b'{"l":[{"k":1}],"o":{"y":"s"}}',
    ]
    columns = decoder.columns(values)
    assert columns == pa.schema(
        [
            ("a", pa.float64()),
            ("o", pa.struct([("x", pa.bool_()), ("y", pa.large_string())])),
            ("l", pa.large_list(pa.field("element", pa.struct([("k", pa.int64())])))),
            ("z", pa.large_string()),
            ("t", pa.large_string()),
        ]
    )
    [group], [bad] = decoder.decode(values)
    assert bad.index == 1
    assert group.rows.schema.equals(columns)
    assert group.rows["a"].to_pylist() == [1.0, 2.5, None]


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ([b'{"a":1}', b'{"a":"x"}'], "field a: expected one type, found number and string"),
        ([b'{"a":{"b":true}}', b'{"a":{"b":[]}}'], "field a.b: .* found boolean and array"),
        ([b'{"a":{}}'], "field a: .* only empty objects"),
    ],
)
def test_json_of_two_minds_is_a_misfit(values: list[bytes], fact: str) -> None:
    with pytest.raises(SchemaMismatch, match=fact):
        Decoder(RecordFormat("json")).columns(values)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("leaf", [pa.uuid(), pa.int64()], ids=str)
def test_maps_with_required_and_with_optional_values_are_distinguished(
    leaf: pa.DataType, required: bool
):
    """Arrow takes maps of UUIDs for equal if only that differs; one worker fills both tables."""
    first, second = (
        pa.schema([("m", pa.map_(pa.large_string(), pa.field("value", leaf, nullable=nullable)))])
        for nullable in (required, not required)
    )
    for columns, nullable in ((first, required), (second, not required)):
        groups, rejected = Decoder(RecordFormat("json"), columns).decode([b'{"m":{"a":null}}'])
        assert len(rejected) == (not nullable)
        assert sum(len(group.rows) for group in groups) == nullable
