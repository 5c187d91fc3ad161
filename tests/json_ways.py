"""JSON read by compiled code, and by the reference alone; and records to compare the two with.

`Maker` makes records for any columns, most of them plain, some odd, some broken. `compare` reads
them in both ways, and compares what compiled code has read with the `json` of the standard library
as well, which knows nothing of either.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.config.column_types import EPOCH_UNITS
from frazil.formats.json_reader import JsonShape
from frazil.formats.json_values import EPOCH, IGNORED


class Doubting:
    """A program to which every record is doubtful."""

    def __init__(self, shape: JsonShape) -> None:
        self._none = shape._each(ByteSlices.of([]), [], [])

    def decode(self, values: ByteSlices) -> tuple[pa.StructArray, Any]:
        return self._none, np.arange(len(values))


def one_by_one(schema: pa.Schema) -> JsonShape:
    shape = JsonShape(schema)
    shape._program = Doubting(shape)  # type: ignore[assignment]
    return shape


# ── comparison ───────────────────────────────────────────────────────────────────────────────────


def same(one: pa.Array, other: pa.Array) -> bool:
    """Are they equal, the signs of zeros too?"""
    if not one.equals(other):
        return False
    kind = one.type
    if pa.types.is_struct(kind):
        return all(same(*pair) for pair in zip(one.flatten(), other.flatten(), strict=True))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return same(one.flatten(), other.flatten())
    if pa.types.is_map(kind):
        return same(one.items, other.items)  # `equals` has compared the rest
    if not pa.types.is_floating(kind):
        return True
    signs = [np.signbit(array.drop_null().to_numpy(False)) for array in (one, other)]
    return np.array_equal(*signs)


class MinusZero(int):
    """JSON's `-0`, which has a sign in a double."""


def whole(text: str) -> int:
    return MinusZero() if text == "-0" else int(text)


def by_json(kind: pa.DataType, value: Any) -> Any:
    """A value that `json` has parsed, as it must stand in a column of a plain type."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        assert type(value) is dict
        return {child.name: by_json(child.type, value.get(child.name)) for child in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        assert type(value) is list
        return [by_json(kind.value_type, item) for item in value]
    if pa.types.is_floating(kind):
        assert type(value) in (int, float, MinusZero)
        value = -0.0 if type(value) is MinusZero else value
        return float(np.float32(value)) if pa.types.is_float32(kind) else float(value)
    wanted = int if pa.types.is_integer(kind) else bool if pa.types.is_boolean(kind) else str
    assert type(value) is wanted or (wanted is int and type(value) is MinusZero)
    return wanted(value)


def is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(is_plain(child.type) for child in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_plain(kind.value_type)
    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    return text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def compare(schema: pa.Schema, values: list[bytes]) -> tuple[int, int]:
    """How many records were read by compiled code, and how many rejected; raises where it reads
    something that the reference reads otherwise or not at all."""
    shape = JsonShape(schema)
    rows, doubtful = shape._program.decode(ByteSlices.of(values))
    (groups, rejected), (others, refused) = (
        reader.decode(values) for reader in (shape, one_by_one(schema))
    )
    assert rejected == refused
    assert len(groups) == len(others)
    for group, other in zip(groups, others, strict=True):
        group.rows.validate(full=True)
        columns = zip(group.rows.columns, other.rows.columns, strict=True)
        for name, (one, another) in zip(schema.names, columns, strict=True):
            assert same(one.combine_chunks(), another.combine_chunks()), (name, values)
    plain = [i for i, column in enumerate(schema) if is_plain(column.type)]
    kept = pa.struct([schema.field(i) for i in plain])
    columns = zip(*(rows.field(i).to_pylist() for i in plain), strict=True)
    read = list(columns) if plain else [()] * len(rows)
    texts = np.delete(np.array([*values, b""], object)[:-1], doubtful)
    for text, row in zip(texts, read, strict=True):
        parsed = by_json(kept, json.loads(text.decode(), parse_int=whole))
        assert repr(tuple(parsed.values())) == repr(row), text
    return len(rows), len(rejected)


# ── records ──────────────────────────────────────────────────────────────────────────────────────

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
DECIMALS = [
    "0",
    "-0.00",
    "12.50",
    "-1e3",
    "123456789012345.678",
    "0.001",
    '"7.25"',
    '"1e2"',
    "1e-3",
]
DATES = ['"2024-02-29"', '"1969-12-31"', '"0001-01-01"', '"9999-12-31"', '"1900-02-28"']
CLOCKS = ["00:00", "23:59:59", "12:34:56.7", "12:34:56,789012", "01:02:03.1234560"]
ZONES = ["Z", "z", "+01:00", "-0430", "+05", "-00:00"]
UUIDS = ['"12345678-90ab-CDEF-1234-567890abcdef"', '"1234567890abcdef1234567890abcdef"']
#: Texts that are rarely or never of their type.
NOT_QUITE = [
    *('"2023-02-29"', '"2023-13-01"', '"2023-00-10"', '"0000-01-01"', '"20230228"', '"24:00"'),
    *('"2024-01-01T24:00:00Z"', '"2024-01-01T01:02:03.123456789Z"', '"2024-01-01T01:02:03+24:00"'),
    *('"12:34:56.1234567890"', '"12:34:"', '"12:3"', '"2024-01-01T"', '"2024-01-01T12:34:56"'),
    *("0e1000", "1772000000", "1e-3", '"0e1000"', '"\\u0032024-01-01"'),
    *('"AB=="', '"AAE"', '"A==="', '"AA=A"', '"AAECAwQ="', '"AA-_"', '"AAEC\\n"', '" AA=="'),
    *('"1677-01-01T00:00:00Z"', '"2262-12-31T00:00Z"', '"12345678-90ab-CDEF-1234-567890abcdeg"'),
]
#: As many as that, of good values, are another kind, junk, null.
ODD = 0.01
#: Names of columns: of one word and of more, alike in their first or last, not ASCII, with
#: characters that JSON escapes.
NAMES = [
    *("a", "id", "ID", "sevenby", "eightbyt", "ninebytes", "sixteenbytesname", "sixteenbytes_name"),
    *("é", "\U0001f600", " ", "a.b", "x" * 40, "x" * 40 + "y", "value1", "value2", "value3"),
]
ESCAPED = ['quo"te', "back\\slash", "line\nbreak", ""]
LEAVES = [
    *(pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.large_string(), pa.null(), pa.date32(), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC"), pa.uuid()),
    *(pa.decimal128(10, 2), pa.decimal128(38, 10), pa.large_binary(), pa.binary(4)),
]
#: A type that compiled code leaves to the other reader.
OTHERS = [pa.map_(pa.int64(), pa.int64())]


class Maker:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def columns(self) -> pa.Schema:
        r = self.r
        names = r.sample(NAMES, r.randrange(1, 10))
        if r.random() < 0.05:
            names[0] = r.choice(ESCAPED)
        fields = [self.column(name, 0) for name in names]
        return pa.schema(fields, self.passing())

    def passing(self) -> dict[bytes, bytes] | None:
        names = json.dumps(self.r.sample(NAMES, 3)).encode()
        return self.r.choice([None, None, {IGNORED: b"*"}, {IGNORED: names}])

    def column(self, name: str, depth: int) -> pa.Field:
        r = self.r
        kind, metadata = r.choice(OTHERS if r.random() < ODD else LEAVES), None
        if depth < 3 and r.random() < 0.3:
            way = r.random()
            if way < 0.2:
                text = r.choice([pa.string(), pa.large_string()])
                kind = pa.map_(text, self.column("value", depth + 1))
            elif way < 0.6:
                inside = [self.column(n, depth + 1) for n in r.sample(NAMES, r.randrange(4))]
                kind, metadata = pa.struct(inside), self.passing()
            else:
                made = r.choice([pa.list_, pa.large_list])
                kind = made(self.column("element", depth + 1))
        elif pa.types.is_timestamp(kind) and r.random() < 0.5:
            metadata = {EPOCH: r.choice(list(EPOCH_UNITS)).encode()}
        return pa.field(name, kind, r.random() < 0.8 or pa.types.is_null(kind), metadata)

    def value(self, kind: pa.DataType, required: bool) -> str:
        r = self.r
        if r.random() < ODD:
            return r.choice([*JUNK, *NUMBERS, *TEXTS, *NOT_QUITE, "null", "[]", "{}", "true"])
        if pa.types.is_null(kind) or (not required and r.random() < 0.1):
            return "null"
        if pa.types.is_struct(kind):
            return self.object(kind)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            field = kind.value_field
            items = [self.value(field.type, not field.nullable) for _ in range(r.randrange(4))]
            return "[" + r.choice([",", " , ", ",\n"]).join(items) + "]"
        if pa.types.is_map(kind):
            keys = [*TEXTS[:8], *(f'"{name}"' for name in NAMES)]
            chosen = (
                r.choices(keys, k=2) if r.random() < 3 * ODD else r.sample(keys, r.randrange(5))
            )
            item = kind.item_field
            items = [f"{key}:{self.value(item.type, not item.nullable)}" for key in chosen]
            return "{" + r.choice([",", " , "]).join(items) + "}"
        if pa.types.is_boolean(kind):
            return r.choice(["true", "false"])
        if pa.types.is_floating(kind):
            return (
                r.choice(NUMBERS)
                if r.random() < 0.5
                else repr(r.uniform(-1, 1) * 10 ** r.randrange(9))
            )
        if pa.types.is_integer(kind):
            return r.choice(WHOLE[:6] if kind.bit_width == 32 or r.random() < 0.9 else WHOLE)
        if pa.types.is_decimal(kind):
            return r.choice(DECIMALS)
        return self.text(kind)

    def text(self, kind: pa.DataType) -> str:
        r = self.r
        if pa.types.is_date32(kind):
            return r.choice(DATES)
        if pa.types.is_time64(kind):
            return f'"{r.choice(CLOCKS)}"'
        if pa.types.is_timestamp(kind):
            if r.random() < 0.03:
                return str(r.randrange(2 * 10**9) * 10 ** r.choice([0, 3, 6]))
            zone = r.choice(ZONES) if kind.tz else ""
            day = f"{r.randrange(1700, 2260)}-{r.randrange(1, 13):02}-{r.randrange(1, 29):02}"
            return f'"{day}{r.choice("Tt ")}{r.choice(CLOCKS)}{zone}"'
        if isinstance(kind, pa.UuidType):
            return r.choice(UUIDS)
        if pa.types.is_large_binary(kind):
            return r.choice(['""', '"AA=="', '"/+8="', '"AAECAw=="', '"' + "QUJD" * 9 + '"'])
        return '"AAECAw=="' if pa.types.is_fixed_size_binary(kind) else r.choice(TEXTS)

    def object(self, fields: Any) -> str:
        r = self.r
        members = []
        for field in fields:
            if not field.nullable or r.random() < 0.7:
                name = json.dumps(field.name, ensure_ascii=r.random() < 0.1)
                if field.name and r.random() < ODD:
                    name = r.choice([name.upper(), f'"\\u{ord(field.name[0]):04x}"', '""'])
                value = self.value(field.type, not field.nullable)
                members.append(f"{name}{r.choice([':', ' : '])}{value}")
        if r.random() < 2 * ODD:  # twice, or unheard of
            name = json.dumps(r.choice([*NAMES, "d", "x", "new", "\ud800"]), ensure_ascii=False)
            members.append(f"{name}:{self.value(r.choice(LEAVES), False)}")
        if r.random() < 0.1:
            r.shuffle(members)
        return "{" + r.choice([",", ", ", ",\n"]).join(members) + "}"

    def record(self, columns: pa.Schema) -> bytes:
        r = self.r
        raw = self.object(columns).encode("utf-8", "surrogatepass")
        if r.random() < ODD:
            flipped = bytearray(raw)
            flipped[r.randrange(len(raw))] ^= 1 << r.randrange(8)
            raw = bytes(flipped)
        around = [b""] * 400 + [b" ", b"\n", b"\xef\xbb\xbf", b"x", b"\0", b"{", b"}"]
        return r.choice(around) + raw + r.choice(around)

    def mutated(self, raw: bytes) -> bytes:
        """The record with one to three changes: bytes cut out, said twice, put in, exchanged."""
        r = self.r
        for _ in range(r.randrange(1, 4)):
            at = r.randrange(len(raw) + 1)
            behind = min(len(raw), at + r.choice([0, 0, 1, 1, 2, 5, 20]))
            word = r.choice([*JUNK, *NUMBERS[:20], *TEXTS, "null", *',:"{}[]\\-.eE0 \t'])
            fresh = r.choice([b"", word.encode("utf-8", "surrogatepass"), raw[at:behind] * 2])
            fresh = bytes([r.randrange(256)]) if r.random() < 0.2 else fresh
            raw = raw[:at] + fresh + raw[behind:]
        return raw
