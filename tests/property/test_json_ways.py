"""JSON is read in blocks where that can be, and one by one where not: a value is the same, or
rejected, both ways, whatever stands beside it."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from frazil.formats.json_reader import JsonShape

COLUMNS = pa.schema(
    [
        pa.field("r", pa.int64(), nullable=False),
        ("i", pa.int32()),
        ("d", pa.float64()),
        ("b", pa.bool_()),
        ("s", pa.large_string()),
        ("t", pa.string()),
        (
            "o",
            pa.struct(
                [
                    ("x", pa.float64()),
                    pa.field("y", pa.int64(), nullable=False),
                    ("z", pa.large_string()),
                ]
            ),
        ),
        ("f", pa.large_list(pa.field("element", pa.float64()))),
        ("l", pa.list_(pa.field("element", pa.struct([("q", pa.int64())]), nullable=False))),
    ]
)
WHOLE = [
    "0",
    "-0",
    "1",
    "-1",
    "2147483647",
    "-2147483648",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "-9223372036854775809",
]
NUMBERS = [
    *WHOLE,
    "-0.0",
    "0.0",
    "-0e0",
    "0e5",
    "1.5",
    "1e3",
    "1E+3",
    "1e-400",
    "-1e-400",
    "1e400",
    "0.1",
    "1.7976931348623157e308",
    "1.7976931348623159e308",
    "4.9e-324",
    "2e-324",
    "9007199254740993",
    "9007199254740992.5",
    "1" * 300,
    "1" * 400,
    "1" * 4301,
    "1" * 5000 + "e-4990",
    "12345678901234567890123",
    "100e-2",
    "0.1000000000000000055511151231257827021181583404541015625",
]
TEXTS = [
    '"a"',
    '""',
    '"\\u0000"',
    '"\\ud83d\\ude00"',
    '"é"',
    '"\U0001f600"',
    '"\\n"',
    '"\\/"',
    '"\x7f"',
    '"-0"',
    '"[{"',
    '"\ufeff"',
]
#: No JSON, or no text.
JUNK = [
    "00",
    "-00",
    "01",
    "-",
    "+1",
    ".5",
    "5.",
    "1e",
    "NaN",
    "-Infinity",
    "0x1",
    "1_0",
    "True",
    "'a'",
    '"\n"',
    '"\t"',
    '"\\x"',
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\ud83d\\u0041"',
    '"\x00"',
    "[1,]",
    "{,}",
    "{}{}",
    '{"x":1,}',
    "[",
    "nul",
    "1 2",
    "/**/1",
    "1e5000",
]
#: As many as that, of good values, are another kind, junk, null.
ODD = 0.01


class Maker:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def value(self, kind: pa.DataType, required: bool) -> str:
        r = self.r
        if r.random() < ODD:
            return r.choice([*JUNK, *NUMBERS, *TEXTS, "null", "[]", "{}", "true", '[["x"]]'])
        if not required and r.random() < 0.1:
            return "null"
        if pa.types.is_struct(kind):
            return self.object(kind)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            field = kind.value_field
            items = [self.value(field.type, not field.nullable) for _ in range(r.randrange(4))]
            return "[" + r.choice([",", " , ", ",\n"]).join(items) + "]"
        if pa.types.is_boolean(kind):
            return r.choice(["true", "false"])
        if pa.types.is_floating(kind):
            return r.choice(NUMBERS)
        if pa.types.is_integer(kind):
            return r.choice(WHOLE[:6] if kind.bit_width == 32 or r.random() < 0.9 else WHOLE)
        return r.choice(TEXTS)

    def object(self, fields: Any) -> str:
        r = self.r
        members = []
        for field in fields:
            if not field.nullable or r.random() < 0.7:
                name = (
                    field.name
                    if r.random() > ODD
                    else r.choice([field.name.upper(), f"\\u{ord(field.name):04x}", ""])
                )
                value = self.value(field.type, not field.nullable)
                members.append(f'"{name}"{r.choice([":", " : "])}{value}')
        if r.random() < ODD:  # twice, or unheard of
            name = r.choice(["d", "x", "new", "\\ud800"])
            members.append(f'"{name}":{r.choice(NUMBERS)}')
        if r.random() < 0.1:
            r.shuffle(members)
        return "{" + r.choice([",", ", ", ",\n"]).join(members) + "}"

    def record(self) -> bytes:
        r = self.r
        raw = self.object(COLUMNS).encode("utf-8", "surrogatepass")
        if r.random() < ODD:
            flipped = bytearray(raw)
            flipped[r.randrange(len(raw))] ^= 1 << r.randrange(8)
            raw = bytes(flipped)
        around = [b""] * 40 + [b" ", b"\n", b"\xef\xbb\xbf", b"x", b"\0", b"{", b"}"]
        return r.choice(around) + raw + r.choice(around)


def rendered(rows: pa.Table) -> str:
    """With the sign of zeros."""
    return repr(rows.to_pylist())


@pytest.mark.parametrize("seed", range(3))
def test_a_block_and_the_one_by_one_reader_agree_on_every_value(seed: int):
    make, shape = Maker(seed), JsonShape(COLUMNS)
    taken = rejected = 0
    for _ in range(2_000):
        value, bad = make.record(), list[Any]()
        block, one = shape._block([value]), shape._each([value], 0, 1, bad)
        if block is not None:
            assert not bad, value
            assert rendered(block) == rendered(one), value
            taken += 1
        rejected += len(bad)
    assert taken > 500, "the comparison means something"
    assert rejected > 200


@pytest.mark.parametrize("seed", range(3))
def test_a_value_is_the_same_whatever_stands_beside_it(seed: int):
    make, shape = Maker(100 + seed), JsonShape(COLUMNS)
    values = [make.record() for _ in range(1_500)]
    alone = [shape.decode([value]) for value in values]
    together, rejected = shape.decode(values)
    rows = [row for group in together for row in group.rows.to_pylist()]
    parts = [group.rows for groups, _ in alone for group in groups]
    assert repr(rows) == repr([row for part in parts for row in part.to_pylist()])
    assert [(rejection.index, rejection.kind, rejection.reason) for rejection in rejected] == [
        (i, rejection.kind, rejection.reason)
        for i, (_, bad) in enumerate(alone)
        for rejection in bad
    ]


@pytest.mark.parametrize("neighbour", [b'{"d":1}', b'{"d":1.5,"new":null}', b"{"])
def test_minus_zero_is_minus_zero_in_a_double_and_zero_in_a_whole_number(neighbour: bytes):
    shape = JsonShape(pa.schema([("d", pa.float64()), ("i", pa.int64())]))
    [group], _ = shape.decode([b'{"d":-0,"i":-0}', neighbour])
    assert repr(group.rows.slice(0, 1).to_pylist()) == "[{'d': -0.0, 'i': 0}]"
