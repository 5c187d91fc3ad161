"""Compiled code for JSON: what it reads by itself, and that doubt costs one record."""

from __future__ import annotations

import json
import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from frazil.arrow.byte_slices import ByteSlices
from frazil.config.column_types import column_type
from frazil.formats.declared_columns import field_of_type
from frazil.formats.json_reader import JsonProgram, JsonShape
from frazil.formats.json_values import IGNORED, to_float
from frazil.pipeline import field_text
from tests.json_ways import JUNK, NUMBERS, TEXTS, Maker, one_by_one


def doubtful(schema: pa.Schema, values: list[bytes | None]) -> list[int]:
    return JsonShape(schema)._program.decode(ByteSlices.of(values))[1].tolist()


COLUMNS = pa.schema([("a", pa.int64()), ("s", pa.large_string())])


def test_a_doubtful_record_is_the_only_one_that_is_read_one_by_one():
    values: list[bytes | None] = [b'{"a":%d,"s":"x%d"}' % (i, i) for i in range(1_000)]
    values[1:1_000:10] = [b'{"a":1,"new":2}', b'{"a":"x"}', b"{", None, b'{"s":"\\ud800"}'] * 20
    shape = JsonShape(COLUMNS)
    rows, others = shape._program.decode(ByteSlices.of(values))
    assert others.tolist() == list(range(1, 1_000, 10))
    [group], rejected = shape.decode(values)
    assert len(rejected) == 100
    good = [i for i in range(1_000) if i % 10 != 1]
    assert group.index is not None
    assert group.index.tolist() == good
    assert group.rows.to_pylist() == [{"a": i, "s": f"x{i}"} for i in good]
    assert len(rows) == 900


@pytest.mark.parametrize(
    "value",
    [
        b'{"s":"said \\"yes\\", \\u00e9 \\ud83d\\ude00 \\n"}',
        '{"s":"Straße 😀"}'.encode(),
        b'{ "s" : "x" ,\r\n\t"a" : -9223372036854775807 } ',
        b'{"s":null,"new":null}',
        b"{}",
    ],
)
def test_escapes_white_space_and_nulls_are_plain(value: bytes):
    assert doubtful(COLUMNS, [value]) == []
    [group], _ = JsonShape(COLUMNS).decode([value])
    parsed = json.loads(value)
    assert group.rows.to_pylist() == [{name: parsed.get(name) for name in ("a", "s")}]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("date", '"2024-02-29"'),
        ("time", '"23:59:59.123456"'),
        ("timestamp", '"2024-02-29T01:02:03.456"'),
        ("timestamptz", '"2024-02-29T01:02:03Z"'),
        ("timestamptz", '"1969-12-31 23:59:59.999999-05:30"'),
        ("timestamptz_ns", '"2024-02-29T01:02:03.123456789+00:00"'),
        ("timestamptz(ms)", "1709168523456"),
        ("timestamptz(s)", "1709168523.25"),
        ("timestamptz(ms)", '"2024-02-29T01:02Z"'),
        ("decimal(12,2)", "-1234.5"),
        ("decimal(12,2)", '"1234.50"'),
        ("decimal(38,10)", "0.0000000001"),
        ("uuid", '"12345678-90ab-cdef-1234-567890ABCDEF"'),
        ("float", "0.1"),
        ("binary", '"AAECAw=="'),
        ("fixed(4)", '"AAECAw=="'),
        ("map<string, double>", '{"x":1.5,"y z":null,"\\u00e9":-2}'),
        ("map<string, list<int>>", '{"x":[1,2],"y":null,"":[]}'),
        ("list<struct<x: double>>", '[{"x":1.5},{"x":null},{}]'),
    ],
)
def test_usual_forms_of_declared_types_are_plain(kind: str, text: str):
    columns = pa.schema([field_of_type("a", column_type(kind))])
    values: list[bytes | None] = [b'{"a":%b}' % text.encode(), b"{}"]
    assert doubtful(columns, values) == []
    [group], [other] = JsonShape(columns).decode(values)[0], one_by_one(columns).decode(values)[0]
    assert group.rows.equals(other.rows)


def test_texts_and_lists_that_outgrow_their_buffers_are_read_whole():
    columns = pa.schema(
        [
            ("s", pa.large_string()),
            ("l", pa.large_list(pa.list_(pa.string()))),
            ("m", pa.map_(pa.string(), pa.list_(pa.int32()))),
            ("o", pa.large_list(pa.struct([("x", pa.int32()), ("y", pa.large_string())]))),
        ]
    )
    rows: list[dict[str, Any]] = [
        {"s": "é" * 100_000, "l": [["a" * i] * 3 for i in range(300)], "m": None, "o": None},
        {"s": "b", "l": [], "m": None, "o": [{"x": i, "y": "c" * 50} for i in range(5_000)]},
    ]
    maps = {f"key {i}": [i] * i for i in range(60)}
    values: list[bytes | None] = [json.dumps(row).encode() for row in rows]
    values.append(json.dumps({"m": maps}).encode())
    assert doubtful(columns, values) == []
    [group], _ = JsonShape(columns).decode(values)
    assert group.rows.to_pylist() == [
        *rows,
        {"s": None, "l": None, "m": [*maps.items()], "o": None},
    ]


def test_forty_eight_levels_are_plain_where_they_are_passed_over():
    passing = pa.schema([("a", pa.int64())], {IGNORED: b"*"})
    values: list[bytes | None] = [
        b'{"x":%b%b,"a":1}' % (b"[" * depth, b"]" * depth) for depth in (47, 48)
    ]
    assert doubtful(passing, values) == [1]
    assert [bad.kind for bad in JsonShape(passing).decode(values)[1]] == ["limit"]


def test_names_are_found_in_any_order_and_at_any_length():
    names = [f"{'n' * size}{i}" for size in (0, 1, 6, 7, 8, 9, 15, 16, 40) for i in range(30)]
    columns = pa.schema([(name, pa.int64()) for name in names])
    chance = random.Random(1)
    rows = []
    for _ in range(20):
        kept = chance.sample(names, chance.randrange(len(names)))
        rows.append({name: chance.randrange(100) for name in kept})
    values: list[bytes | None] = [json.dumps(row).encode() for row in rows]
    assert doubtful(columns, values) == []
    [group], _ = JsonShape(columns).decode(values)
    assert group.rows.to_pylist() == [{name: row.get(name) for name in names} for row in rows]


def doubles() -> list[str]:
    """Random bits, decimal numbers, and numbers just between two doubles."""
    chance = random.Random(5)
    texts = [repr(struct.unpack("d", chance.randbytes(8))[0]) for _ in range(3_000)]
    texts += [f"{chance.randrange(10**17)}e{chance.randrange(-330, 300)}" for _ in range(3_000)]
    for _ in range(2_000):
        halves = 2 * (chance.getrandbits(53) | 1 << 52) + 1
        texts.append(str(Decimal(halves) * Decimal(2) ** chance.randrange(-12, 8)))
    return [text for text in texts if "n" not in text]


def test_doubles_are_the_nearest_ones():
    columns = pa.schema([("d", pa.float64()), ("f", pa.float32())])
    texts = doubles()
    values: list[bytes | None] = [b'{"d":%b}' % text.encode() for text in texts]
    rows, others = JsonProgram(pa.field("", pa.struct(list(columns)), nullable=False)).decode(
        ByteSlices.of(values)
    )
    plain = [text for i, text in enumerate(texts) if i not in {*others.tolist()}]
    assert len(plain) > len(texts) / 2
    assert rows.field("d").to_pylist() == [to_float(Decimal(text), pa.float64()) for text in plain]


@pytest.mark.parametrize("text", ["92233720368547758080", "18446744073709551617", "1e20", "9" * 19])
def test_numbers_that_are_small_again_in_64_bits_are_not_believed(text: str):
    columns = pa.schema([("i", pa.int64()), ("d", pa.decimal128(20, 0))])
    for name in columns.names:
        value = b'{"%s":-%b}' % (name.encode(), text.encode())
        one, other = JsonShape(columns).decode([value]), one_by_one(columns).decode([value])
        assert one[1] == other[1]
        assert [g.rows.to_pylist() for g in one[0]] == [g.rows.to_pylist() for g in other[0]]


@pytest.mark.parametrize("seed", range(3))
def test_fields_that_rules_read_are_the_same_text_as_one_by_one(seed: int):
    make = Maker(seed)
    paths = ["a", "b.c", "b.d.e", "id"]
    every = [*JUNK, *NUMBERS, *TEXTS, "null", "true", "false", "{}", '{"c":1}', "[1,{}]"]
    values: list[bytes | None] = [None]
    for _ in range(1_500):
        a, c, e, outer = (make.r.choice(every[-30:]) for _ in range(4))
        nested = f'{{"c":{c},"d":{{"e":{e},"x":[]}}}}' if make.r.random() < 0.8 else outer
        text = f'{{"a":{a},"b":{nested},"id":{make.r.choice(every)}}}'
        values.append(text.encode("utf-8", "surrogatepass"))
    rows = field_text.peek(values, paths)
    steps = [path.split(".") for path in paths]
    picked = [field_text._picked(value, steps) for value in values]
    for name, column in zip(paths, zip(*picked, strict=True), strict=True):
        assert rows.column(name).to_pylist() == [field_text._whole(value) for value in column]
    assert rows.column("b.c").null_count < 0.7 * len(values)
