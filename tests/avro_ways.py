"""Avro by compiled code, by the strict reader, and by fastavro; and datums to compare them with.

`Maker` makes schemas of all that a table can hold, and datums of them byte by byte, in all forms
that Avro allows: arrays in several blocks, blocks with their size, numbers with redundant bytes.
`compare` reads datums in three ways. fastavro knows nothing of the others. It reads the plain types
below the logical ones, and this module says which column value they stand for.
"""

from __future__ import annotations

import io
import json
import math
import random
import struct
from decimal import Context, Decimal
from typing import Any

import fastavro
import pyarrow as pa

from frazil.arrow.avro import WriterSchema
from frazil.arrow.byte_slices import ByteSlices
from frazil.arrow.column_program import table_of

# ── comparison ───────────────────────────────────────────────────────────────────────────────────

#: What we reject and fastavro reads: numbers of 11 bytes, an index of -1, a number that is too
#: large for its type.
STRICTER = (
    *(
        "at most 10 bytes",
        "expected a symbol",
        "expected a branch",
        "of a union",
        "the only branch",
    ),
    *("expected -", "expected 0 to", "expected a decimal"),
)
_DIGITS = Context(prec=38)


def raw(array: Any) -> list[Any]:
    """The values of a column, dates and times as numbers."""
    kind = array.type
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        columns = [raw(array.field(i)) for i in range(kind.num_fields)]
        rows = zip(*columns, strict=True) if columns else [()] * len(array)
        valid = array.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if present else None
            for row, present in zip(rows, valid, strict=True)
        ]
    if pa.types.is_map(kind) or pa.types.is_large_list(kind):
        values = raw(array.values)
        if pa.types.is_map(kind):
            values = [(pair["key"], pair["value"]) for pair in values]
        ends = array.offsets.to_pylist()
        valid = array.is_valid().to_pylist()
        return [values[ends[i] : ends[i + 1]] if valid[i] else None for i in range(len(array))]
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return array.view(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_date32(kind):
        return array.view(pa.int32()).to_pylist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def rows_of(table: pa.Table) -> list[Any]:
    if not table.num_columns:
        return [{}] * table.num_rows
    columns = [raw(column.combine_chunks()) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def without_logical(kind: Any) -> Any:
    """The schema for fastavro: it gives numbers and bytes."""
    if isinstance(kind, list):
        return [without_logical(branch) for branch in kind]
    if not isinstance(kind, dict):
        return kind
    plain = {key: value for key, value in kind.items() if key != "logicalType"}
    for key in ("type", "items", "values"):
        if key in plain:
            plain[key] = without_logical(plain[key])
    if "fields" in plain:
        plain["fields"] = [without_logical(entry) for entry in plain["fields"]]
    return plain


class Judge:
    """Compares values of columns with what fastavro reads."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self._named: dict[str, Any] = {}
        self._parsed = fastavro.parse_schema(without_logical(schema))
        self._name(schema)

    def _name(self, kind: Any) -> None:
        if isinstance(kind, list):
            for branch in kind:
                self._name(branch)
        if isinstance(kind, dict):
            if "name" in kind and kind["type"] in ("record", "enum", "fixed"):
                self._named[kind["name"]] = kind
            for entry in kind.get("fields", ()):
                self._name(entry["type"])
            for key in ("items", "values"):
                self._name(kind.get(key))

    def read(self, datum: bytes) -> Any:
        """As fastavro reads it; None: it is none, or followed by other bytes."""
        stream = io.BytesIO(datum)
        try:
            value = fastavro.schemaless_reader(stream, self._parsed, None)
        except Exception:
            return None
        return (value,) if stream.tell() == len(datum) else None

    def same(self, value: Any, other: Any, kind: Any, top: bool = False) -> bool:
        """Does a value of a column of a type stand for `other`, as fastavro reads it?"""
        if isinstance(kind, str) and kind in self._named:
            kind = self._named[kind]
        if isinstance(kind, list):
            return self._same_in_union(value, other, kind)
        name = kind["type"] if isinstance(kind, dict) else kind
        if name == "record":
            fields = {entry["name"]: entry["type"] for entry in kind["fields"]}
            return value.keys() == fields.keys() and all(
                self.same(value[field], other[field], inner) for field, inner in fields.items()
            )
        if name == "array":
            return len(value) == len(other) and all(
                self.same(*pair, kind["items"]) for pair in zip(value, other, strict=True)
            )
        if name == "map":  # of equal keys fastavro gives the last
            value = dict(value)
            return value.keys() == other.keys() and all(
                self.same(value[key], other[key], kind["values"]) for key in value
            )
        if name == "boolean":  # to fastavro, bytes other than 0 and 1 are true
            return value == other or (value is False and other is True)
        meaning = meant(kind if isinstance(kind, dict) else {}, name, other)
        if isinstance(value, float):
            return repr(value) == repr(meaning)  # zeros have signs, NaN is NaN
        return type(value) is type(meaning) and bool(value == meaning)

    def _same_in_union(self, value: Any, other: Any, branches: list[Any]) -> bool:
        if value is None or other is None:
            return value is other
        real = [branch for branch in branches if branch != "null"]
        if len(real) == 1:
            return self.same(value, other, real[0])
        members = [(i, member) for i, member in enumerate(value.values()) if member is not None]
        return len(members) == 1 and self.same(members[0][1], other, real[members[0][0]])


def meant(kind: dict[str, Any], name: str, plain: Any) -> Any:
    """The column value that a plain value stands for."""
    logical = kind.get("logicalType")
    if logical == "decimal":
        number = int.from_bytes(plain, "big", signed=True)
        return Decimal(number).scaleb(-kind.get("scale", 0), _DIGITS)
    if (name, logical) == ("int", "time-millis") or logical in (
        "timestamp-millis",
        "local-timestamp-millis",
    ):
        return plain * 1000
    return plain


def compare(schema: Any, datums: list[bytes], good: int) -> tuple[int, int]:
    """How many datums were read by compiled code, and how many rejected; raises where the readers
    differ. The first `good` ones are datums of the schema."""
    writer, judge = WriterSchema(json.dumps(schema)), Judge(schema)
    slices = ByteSlices.of(datums)
    assert writer._program is not None
    rows, doubtful = writer._program.decode(slices)
    table, bad = writer.read(slices)
    table.validate(full=True)
    refused: list[tuple[int, str]] = []
    strict = table_of(writer._each(slices, range(len(datums)), refused), writer.columns)
    assert bad == refused
    assert table.schema.equals(strict.schema)
    values = rows_of(table)
    assert table.equals(strict) or repr(values) == repr(rows_of(strict))
    assert not len(doubtful) or doubtful[0] >= good, ("doubtful", datums[doubtful[0]])
    reasons, left = dict(bad), iter(values)
    for i, datum in enumerate(datums):
        answer = judge.read(datum)
        if i in reasons:
            stricter = any(phrase in reasons[i] for phrase in STRICTER)
            assert answer is None or (i >= good and stricter), (reasons[i], datum, answer)
            continue
        value = next(left)
        assert answer is not None, ("fastavro refuses it", datum, value)
        assert judge.same(value, answer[0], schema), (datum, value, answer)
    for i in range(good, len(datums), 10):  # alone: in the checked mode nothing is behind it
        _, alone = writer.read([datums[i]])
        assert [why for _, why in alone] == [why for why in [reasons.get(i)] if why]
    return len(rows), len(bad)


# ── schemas and datums ───────────────────────────────────────────────────────────────────────────

PRIMITIVES = ["boolean", "int", "long", "float", "double", "string", "bytes"]
LOGICAL = [
    *(("int", "date"), ("int", "time-millis"), ("long", "time-micros"), ("string", "uuid")),
    *(
        ("long", f"{zone}timestamp-{unit}")
        for zone in ("", "local-")
        for unit in ("millis", "micros")
    ),
    *(("long", "timestamp-nanos"), ("long", "local-timestamp-nanos"), ("long", "unheard-of")),
]
DAY = 86_400_000
#: Bounds of numbers by type and logical type.
BOUNDS = {
    "int": (-(2**31), 2**31 - 1),
    "long": (-(2**63), 2**63 - 1),
    "time-millis": (0, DAY - 1),
    "time-micros": (0, 1000 * DAY - 1),
    "timestamp-millis": (-(2**63 // 1000), (2**63 - 1) // 1000),
    "local-timestamp-millis": (-(2**63 // 1000), (2**63 - 1) // 1000),
}
TEXTS = ["", "a", "é", "\U0001f600", "sixteen bytes...", "\0", "x" * 100, "ünïcödé" * 3, "\x7f"]
#: Numbers beyond some bound, as they stand in a datum.
HUGE = [
    *(b"\x80\x80\x80\x80\x80\x20", b"\xff" * 9 + b"\x01", b"\xfe" * 9 + b"\x01", b"\xff\xff\x7f"),
    *(b"\x80" * 9 + b"\x7f", b"\x80" * 10 + b"\x00", b"\xff" * 4 + b"\x0f", b"\x80" * 4 + b"\x10"),
]


def zigzag(number: int, redundant: int = 0) -> bytes:
    """A number, with some more bytes than needed."""
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    for _ in range(min(redundant, 10 - len(out))):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


class Maker:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self._names = 0
        self._named: dict[str, Any] = {}

    def schema(self) -> Any:
        """A record, in most cases with some fields."""
        schema = self._record(self.r.randrange(1, 7) if self.r.random() < 0.98 else 0, 0)
        self._named = {}
        self._refer(schema)
        return schema

    def _refer(self, kind: Any) -> None:
        """Some fields have the type of another one before them, by its name."""
        for entry in kind.get("fields", ()) if isinstance(kind, dict) else ():
            if self._named and self.r.random() < 0.05:
                entry["type"] = self.r.choice(list(self._named))
            self._refer(entry["type"])
        if isinstance(kind, list):
            for branch in kind:
                self._refer(branch)
        if isinstance(kind, dict):
            self._refer(kind.get("items", kind.get("values")))
            if "name" in kind:
                self._named[kind["name"]] = kind

    def _name(self) -> str:
        self._names += 1
        return f"N{self._names}"

    def _record(self, count: int, depth: int) -> Any:
        inside = [{"name": f"f{i}", "type": self._kind(depth)} for i in range(count)]
        return {"type": "record", "name": self._name(), "fields": inside}

    def _kind(self, depth: int) -> Any:
        r = self.r
        if r.random() < 0.35:
            return self._union(depth)
        return self._real(depth)

    def _union(self, depth: int) -> Any:
        r = self.r
        count = r.choice([1, 1, 1, 1, 1, 1, 2, 3, 4])
        branches: dict[str, Any] = {}
        for _ in range(count):
            kind = self._real(depth + 1)
            name = kind["type"] if isinstance(kind, dict) else kind
            branches[kind.get("name", name) if isinstance(kind, dict) else name] = kind
        union = list(branches.values())
        if r.random() < 0.9:
            union.insert(r.choice([0, 0, len(union), r.randrange(len(union) + 1)]), "null")
        return union

    def _real(self, depth: int) -> Any:
        """A type that is no union."""
        r = self.r
        way = r.random()
        if way < 0.3 and depth < 4:
            if way < 0.1:
                return {"type": "array", "items": self._kind(depth + 1)}
            if way < 0.18:
                return {"type": "map", "values": self._kind(depth + 1)}
            return self._record(r.randrange(1, 4), depth + 1)
        if way < 0.5:
            return self._fixed() if r.random() < 0.6 else self._enum()
        if way < 0.7:
            kind, logical = r.choice(LOGICAL)
            return {"type": kind, "logicalType": logical}
        if way < 0.78:
            return {"type": "bytes", **self._decimal(r.choice([1, 3, 9, 18, 19, 30, 38, 64]))}
        return r.choice(PRIMITIVES)

    def _enum(self) -> Any:
        count = self.r.choice([1, 2, 3, 70])
        symbols = [f"S{i}" * self.r.choice([1, 1, 8]) for i in range(count)]
        return {"type": "enum", "name": self._name(), "symbols": symbols}

    def _fixed(self) -> Any:
        size = self.r.choice([1, 2, 3, 4, 7, 8, 12, 16, 17, 20, 33, 256, 257])
        kind: dict[str, Any] = {"type": "fixed", "name": self._name(), "size": size}
        if size == 16 and self.r.random() < 0.5:
            kind["logicalType"] = "uuid"
        elif size < 40 and self.r.random() < 0.5:
            kind |= self._decimal(min(38, int(math.log10(2 ** (8 * size - 1) - 1)) or 1))
        return kind

    def _decimal(self, precision: int) -> dict[str, Any]:
        scale = self.r.randrange(min(precision, 38) + 1)
        return {"logicalType": "decimal", "precision": precision, "scale": scale}

    # ── datums ──

    def datum(self, kind: Any) -> bytes:
        r = self.r
        if isinstance(kind, str) and kind in self._named:
            kind = self._named[kind]
        if isinstance(kind, list):
            index = r.randrange(len(kind))
            return self._long(index) + self.datum(kind[index])
        more = kind if isinstance(kind, dict) else {}
        name = more.get("type", kind)
        if name == "record":
            return b"".join(self.datum(entry["type"]) for entry in more["fields"])
        if name == "array":
            return self._blocks(lambda: self.datum(more["items"]))
        if name == "map":
            return self._blocks(lambda: self._text() + self.datum(more["values"]))
        if name == "enum":
            return self._long(r.randrange(len(more["symbols"])))
        if name in ("bytes", "fixed"):
            return self._bytes(more)
        return self._scalar(name, more.get("logicalType"))

    def _scalar(self, name: str, logical: str | None) -> bytes:
        r = self.r
        if name == "null":
            return b""
        if name == "boolean":
            return r.choice([b"\0", b"\1"])
        if name == "float":
            return r.choice([struct.pack("<f", r.uniform(-9, 9)), b"\0\0\x80\x7f", b"\0\0\xc0\x7f"])
        if name == "double":
            return r.choice([struct.pack("<d", r.uniform(-9, 9)), r.randbytes(8), bytes(8)])
        if name == "string":
            return self._text()
        low, high = BOUNDS.get(str(logical), BOUNDS[name])
        close = max(low, min(high, r.randrange(-100, 100)))
        return self._long(r.choice([close, close, r.randint(low, high), low, high]))

    def _long(self, number: int) -> bytes:
        return zigzag(number, self.r.choice([0] * 40 + [1, 2, 9]))

    def _text(self) -> bytes:
        text = self.r.choice(TEXTS).encode()
        return self._long(len(text)) + text

    def _bytes(self, kind: dict[str, Any]) -> bytes:
        r, size = self.r, kind.get("size")
        if kind.get("logicalType") == "decimal":
            most = 10 ** min(kind["precision"], 38) - 1
            number = r.choice([0, 1, -1, most, -most, r.randint(-most, most)])
            needed = (number if number >= 0 else ~number).bit_length() // 8 + 1
            width = size or needed + r.choice([0, 0, 0, 1, 9])
            content = number.to_bytes(width, "big", signed=True)
            content = b"" if number == 0 and not size and r.random() < 0.3 else content
        else:
            content = r.randbytes(size or r.choice([0, 1, 5, 16, 40]))
        return content if size else self._long(len(content)) + content

    def _blocks(self, item: Any) -> bytes:
        r, out = self.r, b""
        for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
            items = [item() for _ in range(r.choice([1, 2, 3, 3, 20]) if len(out) < 500 else 1)]
            body = b"".join(items)
            if r.random() < 0.2:
                out += self._long(-len(items)) + self._long(len(body)) + body
            else:
                out += self._long(len(items)) + body
        return out + self._long(0)

    def mutated(self, datum: bytes, other: bytes) -> bytes:
        r = self.r
        for _ in range(r.choice([1, 1, 1, 2, 3])):
            at = r.randrange(len(datum) + 1)
            way = r.randrange(11)
            if way < 4:
                datum = datum[:at] + bytes([r.choice(_BYTES)]) + datum[at + 1 :]
            elif way < 6:
                datum = datum[:at] + r.choice(HUGE) + datum[at + r.randrange(2) :]
            elif way == 6:
                datum = datum[:at] + r.randbytes(r.choice([1, 1, 2, 8])) + datum[at:]
            elif way == 7:
                datum = datum[:at] + datum[at + r.choice([1, 1, 2, 8]) :]
            elif way == 8:
                datum = r.choice([datum[:at], datum[at:], datum + r.randbytes(1), datum + other])
            elif way == 9:
                datum = datum[:at] + other[r.randrange(len(other) + 1) :]
            else:
                datum = datum[:at] + zigzag(r.randrange(-70, 70)) + datum[at + 1 :]
        return datum


_BYTES = [*range(256), *[0, 1, 2, 3, 4, 5, 6, 63, 64, 127, 128, 129, 254, 255] * 9]
