"""Hostile records among good ones, through the real thing: Kafka, Spark, Iceberg.

Two topics, Avro behind the Confluent header and JSON. Half of what is in them is hostile: made from
good datums with knowledge of their structure. Most is bad by construction (cut short, a byte too
many, counts and lengths that lie, numbers out of range, broken text, headers of schemas that are
unknown or unfit, …). Where chance may leave a datum good (bytes flipped, spliced, lost), a reader
of this file's own decides, and what it can read counts among the good.

Then every row of every data file is compared, all columns, and every byte of every dead letter.

A third topic has records that kill the worker: by a signal, and by a crash in native code. A fourth
and a fifth, in Debezium's envelope, have records at which a station between unwrapping and the
closing of a file raises an error that nobody foresaw: the stations are made to, by a function of
the sink's own route that runs in the workers.

    make poison N=1000000            # a million hostile, a million good
    make poison N=20000 ARGS='--seed 7'
"""

from __future__ import annotations

import argparse
import array
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from confluent_kafka import Producer

from frazil.config.model import from_document
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker

Row = dict[str, Any]
PARTITIONS = 4
#: Good datums differ in their id, and otherwise are one of so many.
POOL = 4_000
#: As a varint of five bytes, whatever is added to it.
FIRST_ID = 1 << 27
#: Records at the head of each partition are good: the table is made of them.
HEAD = 256


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── Avro: a schema, a writer that remembers where things are, and a strict reader ───────────────


def _record(name: str, *fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}


def _logical(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meaning, **more}


NOTE = ("note", ["null", "string"])
FIELDS: list[tuple[str, Any]] = [
    ("id", "long"),
    ("small", "int"),
    ("ok", "boolean"),
    ("ratio", "float"),
    ("score", "double"),
    ("name", "string"),
    ("blob", "bytes"),
    ("hash", {"type": "fixed", "name": "Hash", "size": 8}),
    ("color", {"type": "enum", "name": "Color", "symbols": ["RED", "GREEN", "BLUE"]}),
    ("price", _logical("bytes", "decimal", precision=18, scale=4)),
    ("day", _logical("int", "date")),
    ("clock", _logical("int", "time-millis")),
    ("at", _logical("long", "timestamp-micros")),
    NOTE,
    ("tags", {"type": "array", "items": "string"}),
    ("counts", {"type": "map", "values": "long"}),
    ("sub", _record("Sub", ("x", "long"), ("y", ["null", "double"]))),
]
EVENT = _record("Event", *FIELDS)
#: Fits the same table.
OLDER = _record("Event", *[field for field in FIELDS if field is not NOTE])
#: Can be read, and fits no table of these events.
OTHER = _record("Other", ("id", "long"), ("unheard_of", "string"))
RECURSIVE = _record("Node", ("id", "long"), ("next", ["null", "Node"]))
NULLS = _record("Nulls", ("id", "long"), ("nothing", {"type": "array", "items": "null"}))
GOOD = {1: EVENT, 8: OLDER}
#: What the registry says of ids that lead nowhere.
REFUSED: dict[int, dict[str, Any]] = {
    2: {"schema": json.dumps(RECURSIVE)},
    3: {"schema": json.dumps(NULLS)},
    4: {"schema": 'syntax = "proto3"; message M {}', "schemaType": "PROTOBUF"},
    5: {"schema": '{"type": "record"'},
    6: {"schema": '{"type": "object"}', "schemaType": "JSON"},
    7: {"schema": json.dumps(OTHER)},
}
#: Ids that the registry does not know. Each is one question to it, of each worker.
UNKNOWN = [0, *range(1_000, 1_200), 2**31 - 1, 2**31, 2**32 - 1]

#: The columns as the files have them, moments and days as the numbers they are.
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int32()),
        ("ok", pa.bool_()),
        ("ratio", pa.float32()),
        ("score", pa.float64()),
        ("name", pa.large_string()),
        ("blob", pa.large_binary()),
        ("hash", pa.large_binary()),
        ("color", pa.large_string()),
        ("price", pa.decimal128(18, 4)),
        ("day", pa.int32()),
        ("clock", pa.int64()),
        ("at", pa.int64()),
        ("note", pa.large_string()),
        ("tags", pa.large_list(pa.large_string())),
        ("counts", pa.map_(pa.large_string(), pa.int64())),
        ("sub", pa.struct([("x", pa.int64()), ("y", pa.float64())])),
    ]
)

Marks = list[tuple[str, int, int]]


def zigzag(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63 if number < 0 else 0)
    number &= (1 << 70) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def encode(schema: Any, value: Any, out: bytearray, marks: Marks) -> None:
    """`marks`: what stands where."""
    kind = (
        schema if isinstance(schema, str) else "union" if type(schema) is list else schema["type"]
    )
    at = len(out)

    def put(part: str, raw: bytes) -> None:
        marks.append((part, len(out), len(out) + len(raw)))
        out.extend(raw)

    if kind == "record":
        for field in schema["fields"]:
            encode(field["type"], value[field["name"]], out, marks)
    elif kind == "union":
        put("union", zigzag(int(value is not None)))
        if value is not None:
            encode(schema[1], value, out, marks)
    elif kind in ("int", "long"):
        logical = isinstance(schema, dict) and schema["logicalType"]
        put("clock" if logical == "time-millis" else kind, zigzag(value))
    elif kind == "boolean":
        put(kind, bytes([value]))
    elif kind in ("float", "double"):
        put(kind, struct.pack("<f" if kind == "float" else "<d", value))
    elif kind == "enum":
        put(kind, zigzag(schema["symbols"].index(value)))
    elif kind == "fixed":
        put(kind, value)
    elif kind in ("string", "bytes"):
        if isinstance(value, Decimal):
            whole = int(value.scaleb(4))
            value = whole.to_bytes(whole.bit_length() // 8 + 1, "big", signed=True)
        raw = value.encode() if kind == "string" else value
        put("length", zigzag(len(raw)))
        out.extend(raw)
        marks.append((kind if isinstance(schema, str) else "decimal", at, len(out)))
    else:  # an array or a map
        items = list(value.items()) if kind == "map" else value
        if items:
            put("count", zigzag(len(items)))
        for item in items:
            if kind == "map":
                encode("string", item[0], out, marks)
            encode(
                schema["values" if kind == "map" else "items"],
                item[-1] if kind == "map" else item,
                out,
                marks,
            )
        put("count", b"\0")


class Bad(Exception):
    """What the strict reader cannot read."""


class Reader:
    """Strict, but for what Avro's own readers are easy about too: a number may be written in more
    bytes than it needs (up to ten), and a boolean is true if it is 1."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise Bad("too short")
        self.at += size
        return self.data[self.at - size : self.at]

    def long(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                value &= (1 << 64) - 1
                return (value >> 1) ^ -(value & 1)
        raise Bad("a number without end")

    def within(self, low: int, high: int) -> int:
        value = self.long()
        if not low <= value <= high:
            raise Bad("out of range")
        return value

    def text(self) -> str:
        try:
            return self.take(self.long()).decode()
        except UnicodeDecodeError:
            raise Bad("no UTF-8") from None

    def read(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return self.read(schema[1]) if self.within(0, 1) else None
        kind = schema if isinstance(schema, str) else schema["type"]
        logical = "" if isinstance(schema, str) else schema.get("logicalType")
        if kind == "record":
            return {field["name"]: self.read(field["type"]) for field in schema["fields"]}
        if logical == "time-millis":
            return 1000 * self.within(0, 86_399_999)
        if kind == "int":
            return self.within(-(2**31), 2**31 - 1)
        if kind == "long":
            return self.long()
        if kind == "boolean":
            return self.take(1) == b"\1"
        if kind == "float":
            return struct.unpack("<f", self.take(4))[0]
        if kind == "double":
            return struct.unpack("<d", self.take(8))[0]
        if kind == "string":
            return self.text()
        if kind == "fixed":
            return self.take(schema["size"])
        if kind == "enum":
            return schema["symbols"][self.within(0, len(schema["symbols"]) - 1)]
        if kind == "bytes":
            raw = self.take(self.long())
            if logical != "decimal":
                return raw
            whole = int.from_bytes(raw, "big", signed=True)
            if abs(whole) >= 10**18:
                raise Bad("too many digits")
            return Decimal(whole).scaleb(-4)
        items: list[Any] = []
        while count := self.long():
            if count < 0:
                count = -count
                self.long()
            if count > len(self.data) - self.at:
                raise Bad("more items than bytes")
            for _ in range(count):
                key = self.text() if kind == "map" else None
                item = self.read(schema["values" if kind == "map" else "items"])
                items.append((key, item) if kind == "map" else item)
        return items


def judged_avro(value: bytes | None) -> Row | None:
    """The row, or None: it is bad."""
    if value is None or len(value) < 5 or value[0]:
        return None
    schema = GOOD.get(int.from_bytes(value[1:5], "big"))
    if schema is None:
        return None
    reader = Reader(value[5:])
    try:
        row = reader.read(schema)
    except Bad:
        return None
    return None if reader.at < len(reader.data) else {"note": None, **row}


# ── good and hostile Avro ───────────────────────────────────────────────────────────────────────

WORDS = [
    "",
    "a",
    "Käse",
    "日本",
    "🧊",
    "null",
    "0",
    " ",
    "\n",
    '"',
    "\\",
    "x" * 100,
    "\0",
    "é" * 64,
]


class Avro:
    """Datums of one seed. `good(i)` and `hostile()` give a value; a hostile one comes with its kind
    and, if it may be good all the same, with its row."""

    columns = COLUMNS

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"avro {seed}")
        self.rows: list[Row] = []
        self._bodies: list[tuple[bytes, bytes, Marks]] = []
        for _ in range(POOL):
            row = self._row()
            number = 8 if self.random.random() < 0.1 else 1
            if number == 8:
                row["note"] = None
            out, marks = bytearray(), Marks()
            encode(GOOD[number], {**row, "id": FIRST_ID}, out, marks)
            self.rows.append({**row, "clock": row["clock"] * 1000})
            self._bodies.append((b"\0" + number.to_bytes(4, "big"), bytes(out), marks))
        self._next = FIRST_ID

    def _row(self) -> Row:
        r = self.random
        return {
            "small": r.choice([0, -1, 2**31 - 1, -(2**31), r.randrange(-1000, 1000)]),
            "ok": r.random() < 0.5,
            "ratio": r.choice([0.0, 1.5, -2.25, float("inf"), r.randrange(1000) / 8]),
            "score": r.choice([0.0, 1e300, float("-inf"), 5e-324, r.random()]),
            "name": r.choice(WORDS) + str(r.randrange(1000)) * r.randrange(2),
            "blob": r.randbytes(r.choice([0, 1, 7, 30])),
            "hash": r.randbytes(8),
            "color": r.choice(["RED", "GREEN", "BLUE"]),
            "price": Decimal(r.choice([0, 1, -1, 10**18 - 1, 1 - 10**18, 12_345_678])).scaleb(-4),
            "day": r.randrange(-100_000, 100_000),
            "clock": r.choice([0, 86_399_999, r.randrange(86_400_000)]),
            "at": r.choice([0, -1, r.randrange(2**52)]),
            "note": r.choice([None, *WORDS]),
            "tags": [r.choice(WORDS) for _ in range(r.choice([0, 0, 1, 3, 12]))],
            "counts": {w: r.randrange(-99, 99) for w in r.sample(WORDS, r.choice([0, 1, 4]))},
            "sub": {"x": r.choice([0, 2**63 - 1, -(2**63)]), "y": r.choice([None, 0.5])},
        }

    def _pick(self) -> tuple[bytes, bytes, Marks, int]:
        at = int(self.random.random() * POOL)
        head, body, marks = self._bodies[at]
        self._next += 1
        return head, zigzag(self._next) + body[5:], marks, at

    def good(self) -> tuple[bytes, int, int]:
        """The value, its id, and which of the rows it is otherwise."""
        head, body, _, at = self._pick()
        return head + body, self._next, at

    def hostile(self) -> tuple[str, bytes | None, Row | None]:
        make = self.random.choice(self._MAKE)
        value = make(self)
        kind = make.__name__.strip("_")
        return kind, value, judged_avro(value) if make in self._BY_CHANCE else None

    # ── bad by construction ──────────────────────────────────────────────────────────────────

    def _put(self, part: str, make: Callable[[bytes], bytes]) -> bytes:
        """A datum with one of its parts made anew."""
        while True:
            head, body, marks, _ = self._pick()
            places = [mark for mark in marks if mark[0] == part]
            if places:
                _, start, end = self.random.choice(places)
                return head + body[:start] + make(body[start:end]) + body[end:]

    def truncated(self) -> bytes:
        head, body, *_ = self._pick()
        return head + body[: self.random.randrange(len(body))]

    def extended(self) -> bytes:
        head, body, *_ = self._pick()
        return head + body + self.random.randbytes(self.random.choice([1, 2, 8, 40]))

    def twice(self) -> bytes:
        head, body, *_ = self._pick()
        return head + body + self.random.choice([body, head + body])

    def endless_number(self) -> bytes:
        end = self.random.randbytes(1) + b"\0" * self.random.randrange(2)
        return self._put("long", lambda _: b"\x80" * self.random.randrange(10, 30) + end)

    def wide_int(self) -> bytes:
        number = 2**31 + self.random.choice([0, 1, 2**8, 2**20, 2**31, 2**40])
        return self._put("int", lambda _: zigzag(self.random.choice([number, -number - 1])))

    def no_symbol(self) -> bytes:
        return self._put("enum", lambda _: zigzag(self.random.choice([3, 4, 127, -1, -2, 2**40])))

    def lying_length(self) -> bytes:
        number = self.random.choice([-1, -2, -(2**31), -(2**63), 10_000, 2**31 - 1, 2**31, 2**62])
        return self._put("length", lambda _: zigzag(number))

    def lying_count(self) -> bytes:
        number = self.random.choice([30_000_000, -30_000_000, 2**31, 2**62, -(2**62), 1_000_000])
        size = zigzag(self.random.choice([0, 1, 2**40])) if number < 0 else b""
        return self._put("count", lambda _: zigzag(number) + size)

    def no_text(self) -> bytes:
        bad = self.random.choice(
            [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
        )
        return self._put("string", lambda _: zigzag(len(bad)) + bad)

    def no_time(self) -> bytes:
        number = self.random.choice([86_400_000, -1, 2**31 - 1, -(2**31), 2**33])
        return self._put("clock", lambda _: zigzag(number))

    def long_decimal(self) -> bytes:
        size = self.random.choice([9, 16, 17, 40, 2000])
        raw = self.random.choice([b"\x7f", b"\x80"]) + self.random.randbytes(size - 1)
        return self._put("decimal", lambda _: zigzag(size) + raw)

    def more_digits(self) -> bytes:
        whole = self.random.choice([10**18, -(10**18), 2**63 - 1, -(2**63)])
        return self._put("decimal", lambda _: zigzag(8) + whole.to_bytes(8, "big", signed=True))

    def no_magic(self) -> bytes:
        head, body, *_ = self._pick()
        return bytes([self.random.randrange(1, 256)]) + head[1:] + body

    def no_header(self) -> bytes:
        return self._pick()[0][: self.random.randrange(5)]

    def nothing(self) -> None:
        return None

    def no_datum(self) -> bytes:
        return self._pick()[0]

    def unknown_schema(self) -> bytes:
        return b"\0" + self.random.choice(UNKNOWN).to_bytes(4, "big") + self._pick()[1]

    def unfit_schema(self) -> bytes:
        return b"\0" + self.random.choice(list(REFUSED)).to_bytes(4, "big") + self._pick()[1]

    def nulls(self) -> bytes:
        """Thirty million items that take no byte at all."""
        return b"\0" + (3).to_bytes(4, "big") + zigzag(1) + zigzag(30_000_000) + b"\0"

    def recursion(self) -> bytes:
        depth = self.random.choice([10, 1000, 20_000]) if self.random.random() < 0.1 else 3
        return b"\0" + (2).to_bytes(4, "big") + b"\2\2" * depth + b"\2\0"

    def other_schema(self) -> bytes:
        word = self.random.choice(WORDS).encode()
        return b"\0" + (7).to_bytes(4, "big") + zigzag(self._next) + zigzag(len(word)) + word

    # ── by chance ────────────────────────────────────────────────────────────────────────────

    def flipped(self) -> bytes:
        head, body, *_ = self._pick()
        return head + _flipped(self.random, body)

    def flipped_anywhere(self) -> bytes:
        head, body, *_ = self._pick()
        datum = _flipped(self.random, head + body)
        # Every id that the registry does not know is a question to it.
        return datum if datum[1:4] == b"\0\0\0" else datum[:1] + head[1:] + datum[5:]

    def lost(self) -> bytes:
        head, body, *_ = self._pick()
        at = self.random.randrange(len(body))
        return head + body[:at] + body[at + self.random.choice([1, 2, 9]) :]

    def inserted(self) -> bytes:
        head, body, *_ = self._pick()
        at = self.random.randrange(len(body))
        return head + body[:at] + self.random.randbytes(self.random.choice([1, 2, 9])) + body[at:]

    def spliced(self) -> bytes:
        head, one, *_ = self._pick()
        other = self._pick()[1]
        return (
            head
            + one[: self.random.randrange(len(one))]
            + other[self.random.randrange(len(other)) :]
        )

    def noise(self) -> bytes:
        return self._pick()[0] + self.random.randbytes(self.random.randrange(200))

    def odd_boolean(self) -> bytes:
        return self._put("boolean", lambda _: bytes([self.random.randrange(2, 256)]))

    def odd_branch(self) -> bytes:
        return self._put("union", lambda _: zigzag(self.random.choice([0, 1, 2, -1, 2**40])))

    def padded_number(self) -> bytes:
        return self._put("long", lambda raw: _padded(raw, self.random.randrange(1, 10)))

    def padded_decimal(self) -> bytes:
        whole = self.random.choice([0, 1, -1, 10**18 - 1])
        size = self.random.choice([8, 16, 17, 40])
        return self._put(
            "decimal", lambda _: zigzag(size) + whole.to_bytes(size, "big", signed=True)
        )

    _BY_CHANCE = frozenset(
        [
            flipped,
            flipped_anywhere,
            lost,
            inserted,
            spliced,
            noise,
            odd_boolean,
            odd_branch,
            padded_number,
            padded_decimal,
        ]
    )
    #: What is left to chance is rare: half of it is good.
    _MAKE = (
        *[
            truncated,
            extended,
            twice,
            endless_number,
            wide_int,
            no_symbol,
            lying_length,
            lying_count,
            no_text,
            no_time,
            long_decimal,
            more_digits,
            no_magic,
            no_header,
            nothing,
            no_datum,
            unknown_schema,
            unfit_schema,
            nulls,
            recursion,
            other_schema,
        ]
        * 2,
        *[flipped] * 6,
        flipped_anywhere,
        lost,
        lost,
        inserted,
        inserted,
        spliced,
        spliced,
        noise,
        odd_boolean,
        odd_branch,
        padded_number,
        padded_decimal,
    )


def _flipped(r: random.Random, raw: bytes) -> bytes:
    out = bytearray(raw)
    for _ in range(r.choice([1, 1, 2, 8])):
        out[r.randrange(len(out))] ^= 1 << r.randrange(8)
    return bytes(out)


def _padded(raw: bytes, count: int) -> bytes:
    count = min(count, 10 - len(raw))
    return raw if count < 1 else raw[:-1] + bytes([raw[-1] | 0x80]) + b"\x80" * (count - 1) + b"\0"


# ── good and hostile JSON ───────────────────────────────────────────────────────────────────────

JSON_TABLE = (
    "id bigint NOT NULL, small int, score double, ok boolean, name string, tags array<string>, "
    "sub struct<x: bigint, y: double>"
)
JSON_COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int32()),
        ("score", pa.float64()),
        ("ok", pa.bool_()),
        ("name", pa.large_string()),
        ("tags", pa.large_list(pa.large_string())),
        ("sub", pa.struct([("x", pa.int64()), ("y", pa.float64())])),
    ]
)


def judged_json(value: bytes | None) -> Row | None:
    """The row, or None: it is bad. Numbers as `json` reads them, kinds as they are, no more names
    than there are columns unless they say null."""
    try:
        row = json.loads((value or b"").decode(), parse_constant=_no_number)
        return _fitted(row, {column.name: column.type for column in JSON_COLUMNS}, {"id"})
    except (ValueError, RecursionError, Bad, OverflowError):
        return None


def _no_number(name: str) -> None:
    raise Bad(name)


def _fitted(value: Any, columns: dict[str, pa.DataType], required: set[str]) -> Row:
    if type(value) is not dict or any(value[name] is not None for name in value.keys() - columns):
        raise Bad("no such record")
    if any(value.get(name) is None for name in required):
        raise Bad("nothing there")
    return {name: _fit(value.get(name), kind) for name, kind in columns.items()}


def _fit(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return _fitted(value, {field.name: field.type for field in kind}, set())
    if pa.types.is_large_list(kind) and type(value) is list:
        return [_fit(item, kind.value_type) for item in value]
    if pa.types.is_large_string(kind) and type(value) is str:
        value.encode()
        return value
    if pa.types.is_boolean(kind) and type(value) is bool:
        return value
    if pa.types.is_integer(kind) and type(value) is int:
        if not -(2 ** (kind.bit_width - 1)) <= value < 2 ** (kind.bit_width - 1):
            raise Bad("out of range")
        return value
    if pa.types.is_float64(kind) and type(value) in (int, float):
        if float(value) in (float("inf"), float("-inf")):
            raise Bad("out of range")
        return float(value)
    raise Bad("another kind")


class Json:
    columns = JSON_COLUMNS

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"json {seed}")
        self.rows: list[Row] = []
        self._rests: list[bytes] = []  # behind {"id":1
        for _ in range(POOL):
            row = self._row()
            self.rows.append(row)
            kept = list(row.items())
            self.random.shuffle(kept)
            kept = [
                (name, member)
                for name, member in kept
                if member is not None or self.random.random() < 0.5
            ]
            space = self.random.choice([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n")])
            text = json.dumps(dict(kept), ensure_ascii=self.random.random() < 0.5, separators=space)
            self._rests.append((f",{text[1:]}" if kept else "}").encode())
        self._next = FIRST_ID

    def _row(self) -> Row:
        r = self.random
        maybe = lambda value: value if r.random() < 0.8 else None  # noqa: E731
        return {
            "small": maybe(r.choice([0, -1, 2**31 - 1, -(2**31), r.randrange(1000)])),
            "score": maybe(r.choice([0.5, 1e300, 5e-324, -1.25, r.random(), r.random() * 1e20])),
            "ok": maybe(r.random() < 0.5),
            "name": maybe(r.choice(WORDS) + str(r.randrange(1000))),
            "tags": maybe([maybe(r.choice(WORDS)) for _ in range(r.randrange(4))]),
            "sub": maybe({"x": maybe(r.choice([0, 2**63 - 1, -(2**63)])), "y": maybe(0.25)}),
        }

    def _pick(self) -> tuple[bytes, int]:
        at = int(self.random.random() * POOL)
        self._next += 1
        return b'{"id":%d%b' % (self._next, self._rests[at]), at

    def good(self) -> tuple[bytes, int, int]:
        value, at = self._pick()
        return value, self._next, at

    def hostile(self) -> tuple[str, bytes | None, Row | None]:
        make = self.random.choice(self._MAKE)
        value = make(self)
        kind = make.__name__
        return kind, value, judged_json(value) if make in self._BY_CHANCE else None

    def _with(self, field: str) -> bytes:
        """With a member more, before all others."""
        return b"{" + field.encode("utf-8", "surrogatepass") + b"," + self._pick()[0][1:]

    def _instead(self, name: str, text: str) -> bytes:
        """A record whose one column has this text."""
        members = {"id": str(self._next), name: text}
        return (
            "{" + ",".join(f'"{key}":{member}' for key, member in members.items()) + "}"
        ).encode("utf-8", "surrogatepass")

    # ── bad by construction ──────────────────────────────────────────────────────────────────

    def truncated(self) -> bytes:
        value, _ = self._pick()
        return value[: self.random.randrange(len(value))]

    def extended(self) -> bytes:
        more = [
            "x",
            "}",
            "]",
            "{}",
            ",",
            "1",
            "\0",
            '{"id":1}',
            '\n{"id":1}',
            "//",
            "null",
            ',"id":1}',
        ]
        return self._pick()[0] + self.random.choice(more).encode()

    def twice(self) -> bytes:
        value, _ = self._pick()
        return value + self.random.choice([b"\n", b"", b",", b"\0"]) + value

    def no_number(self) -> bytes:
        odd = [
            "NaN",
            "Infinity",
            "-Infinity",
            "01",
            "+1",
            "0x1f",
            ".5",
            "5.",
            "1e",
            "--1",
            "1_0",
            "٣",
            "nan",
            "1e400",
            "-1e400",
            "1" * 400,
        ]
        return self._instead("score", self.random.choice(odd))

    def out_of_range(self) -> bytes:
        name, text = self.random.choice(
            [
                ("small", str(2**31)),
                ("small", str(-(2**31) - 1)),
                ("id", str(2**63)),
                ("id", str(-(2**63) - 1)),
                ("id", "1.5"),
                ("id", "1e3"),
                ("small", "1.0"),
                ("id", "9" * 5000),
                ("small", "1" * 30),
                ("sub", '{"x":9223372036854775808}'),
            ]
        )
        return self._instead(name, text)

    def other_kind(self) -> bytes:
        texts = [
            '"1"',
            "true",
            "{}",
            "[]",
            "1",
            '{"x":1}',
            '["a"]',
            "[[]]",
            "[1]",
            '{"x":"1"}',
            "0.5",
        ]
        fits = {
            "id": {"1"},
            "small": {"1"},
            "score": {"1", "0.5"},
            "ok": {"true"},
            "name": {'"1"'},
            "tags": {"[]", '["a"]'},
            "sub": {"{}", '{"x":1}'},
        }
        name = self.random.choice(list(fits))
        return self._instead(name, self.random.choice([t for t in texts if t not in fits[name]]))

    def unheard_of(self) -> bytes:
        names = [
            "more",
            "ID",
            "",
            "id ",
            "sub.x",
            "_offset",
            "__proto__",
            "naïve",
            "\\ud800",
            "\\udfff\\udfff",
            "\\u0000",
            "x" * 5000,
        ]
        value = self.random.choice(["1", "{}", "[]", "false", '""'])
        return self._with(f'"{self.random.choice(names)}":{value}')

    def unheard_of_inside(self) -> bytes:
        return self._instead("sub", '{"x":1,"z":%s}' % self.random.choice(["1", "[]", "false"]))  # noqa: UP031

    def no_id(self) -> bytes:
        return self.random.choice(
            [b"{}", b'{"id":null}', b'{"small":1}', b'{"Id":1}', b'{"name":"id","ok":true}']
        )

    def deep(self) -> bytes:
        depth = self.random.choice([100, 500, 1500])
        if self.random.random() < 0.01:
            depth = 100_000
        opened, closed = self.random.choice([("[", "]"), ('{"id":', "}"), ('{"sub":', "}")])
        inner = self.random.choice(["1", "", '"x"', "null"])
        return (
            opened * depth + inner + closed * self.random.choice([depth, 0, depth - 1])
        ).encode()

    def deep_inside(self) -> bytes:
        depth = self.random.choice([100, 1500])
        return self._instead("tags", "[" * depth + "]" * depth)

    def no_text(self) -> bytes:
        bad = self.random.choice(
            [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
        )
        return self._instead("name", '"@"').replace(b"@", bad)

    def half_a_pair(self) -> bytes:
        word = self.random.choice(["\\ud800", "\\udc00", "\\udfff x", "\\ud83e\\ud83e"])
        return self._instead(*self.random.choice([("name", f'"{word}"'), ("tags", f'["{word}"]')]))

    def bare(self) -> bytes:
        value, _ = self._pick()
        return self.random.choice(
            [b"null", b"1", b'"x"', b"true", b"[]", b"[%b]" % value, b"-0", b"{"]
        )

    def syntax(self) -> bytes:
        texts = [
            "{'id':@}",
            '{"id":@,}',
            '{"id":@/**/}',
            "{id:@}",
            '{"id" @}',
            '{"id":@ "ok":true}',
            '{"id":@,,"ok":true}',
            '{"id":@,"name":"\n"}',
            '{"id":@,"name":"\t"}',
            '{"id":@,"name":"\\x41"}',
            '{"id":@,"name":"\\u12"}',
            '{"id":@,"ok":True}',
            '\ufeff{"id":@}',
            '{"id":@,"name":"}',
            '{"id":@,"ok"}',
            '{"id":@]',
            '{"id":@}}',
            '({"id":@})',
        ]
        return self.random.choice(texts).replace("@", str(self._next)).encode()

    def other_encoding(self) -> bytes:
        return (
            self._pick()[0].decode().encode(self.random.choice(["utf-16", "utf-16-le", "utf-32"]))
        )

    def nothing(self) -> bytes | None:
        return self.random.choice([None, b"", b" ", b"\n", b"\0", b"\0\0\0\0\1"])

    # ── by chance ────────────────────────────────────────────────────────────────────────────

    def flipped(self) -> bytes:
        return _flipped(self.random, self._pick()[0])

    def lost(self) -> bytes:
        value, _ = self._pick()
        at = self.random.randrange(len(value))
        return value[:at] + value[at + self.random.choice([1, 2, 9]) :]

    def inserted(self) -> bytes:
        value, _ = self._pick()
        at = self.random.randrange(len(value))
        more = self.random.choice(
            [b'"', b"{", b"}", b"[", b"\\", b",", b":", b"0", b" ", b"\0", b"e9"]
        )
        return value[:at] + more + value[at:]

    def spliced(self) -> bytes:
        one, other = self._pick()[0], self._pick()[0]
        return one[: self.random.randrange(len(one))] + other[self.random.randrange(len(other)) :]

    _BY_CHANCE = frozenset([flipped, lost, inserted, spliced])
    _MAKE = (
        *[
            truncated,
            extended,
            twice,
            no_number,
            out_of_range,
            other_kind,
            unheard_of,
            unheard_of_inside,
            no_id,
            deep,
            deep_inside,
            no_text,
            half_a_pair,
            bare,
            syntax,
            other_encoding,
            nothing,
        ],
        flipped,
        flipped,
        lost,
        inserted,
        spliced,
    )


# ── what goes into a topic, and what must come out ──────────────────────────────────────────────


def order(hostile: int, r: random.Random) -> Iterator[bool]:
    """Which records are hostile: as many as not. In turns shuffled evenly, few among many good ones
    (so that whole blocks are read at once, with one bad datum in them), and nearly all."""
    while hostile > 0:
        size = min(hostile, 10_000)
        half, few = size // 2, size // 200
        for bad, fine in ((half, half), (few, half - few), (half - few, few)):
            mixed = [True] * bad + [False] * fine
            r.shuffle(mixed)
            yield from mixed
        yield from [True, False] * (size % 2)
        hostile -= size


PLACE = ("_topic_partition", "_offset")
VALUE = pa.schema([("value", pa.large_binary())])


class Topic:
    """The records of one topic as they are produced, and the truth about them."""

    def __init__(self, name: str, source: Avro | Json) -> None:
        self.name, self.source = name, source
        self.kinds: Counter[str] = Counter()
        self.hostile = self.lucky = self.count = 0
        #: of each partition, by offset: the pool's row, -1 a hostile one, -2 by chance a good one
        self.which = [array.array("q") for _ in range(PARTITIONS)]
        self.ids = [array.array("q") for _ in range(PARTITIONS)]
        self.values: list[list[bytes | None]] = [[] for _ in range(PARTITIONS)]
        self.rows: list[list[Row]] = [[] for _ in range(PARTITIONS)]

    def records(self, hostile: int, seed: int, head: int = HEAD) -> Iterator[bytes | None]:
        """Round robin over the partitions."""
        for _ in range(head * PARTITIONS):
            yield self._good()
        for bad in order(hostile, random.Random(seed)):
            if not bad:
                yield self._good()
                continue
            while True:  # what is good by chance comes on top
                kind, value, row = self.source.hostile()
                yield self._counted(value, -1 if row is None else -2, 0)
                number = (self.count - 1) % PARTITIONS
                if row is None:
                    self.kinds[kind] += 1
                    self.hostile += 1
                    self.values[number].append(value)
                    break
                self.lucky += 1
                self.rows[number].append(row)

    def _good(self) -> bytes:
        value, number, at = self.source.good()
        self._counted(value, at, number)
        return value

    def _counted(self, value: bytes | None, which: int, number: int) -> bytes | None:
        partition = self.count % PARTITIONS
        self.which[partition].append(which)
        self.ids[partition].append(number)
        self.count += 1
        return value

    @property
    def good(self) -> int:
        return self.count - self.hostile

    def expected_rows(self) -> pa.Table:
        """All good records, with the partition and offset they have; in that order."""
        columns = self.source.columns
        pool = pa.Table.from_pylist([{"id": 0, **row} for row in self.source.rows], columns)
        parts = []
        for number in range(PARTITIONS):
            which = np.frombuffer(self.which[number], np.int64)
            at = np.flatnonzero(which >= 0)
            ids = np.frombuffer(self.ids[number], np.int64)[at]
            parts.append(
                _placed(pool.take(pa.array(which[at])), number, at).set_column(
                    2, "id", pa.array(ids)
                )
            )
            lucky = pa.Table.from_pylist(self.rows[number], columns)
            parts.append(_placed(lucky, number, np.flatnonzero(which == -2)))
        return _in_order(pa.concat_tables(parts))

    def expected_letters(self) -> pa.Table:
        parts = []
        for number in range(PARTITIONS):
            at = np.flatnonzero(np.frombuffer(self.which[number], np.int64) == -1)
            values = pa.table({"value": pa.array(self.values[number], pa.large_binary())})
            parts.append(_placed(values, number, at))
        return _in_order(pa.concat_tables(parts))


def _placed(rows: pa.Table, number: int, offsets: Any) -> pa.Table:
    numbers = pa.array(np.full(len(rows), number, np.int32))
    rows = rows.add_column(0, "offset", pa.array(offsets, pa.int64()))
    return rows.add_column(0, "partition", numbers)


def _in_order(rows: pa.Table) -> pa.Table:
    return rows.take(pc.sort_indices(rows, [("partition", "ascending"), ("offset", "ascending")]))


def read(files: Sequence[str]) -> Iterator[pa.Table]:
    for file in files:
        yield pq.ParquetFile(file.removeprefix("file:")).read()


def gathered(
    tables: Iterable[pa.Table], columns: pa.Schema, partition: str, offset: str
) -> pa.Table:
    """All rows, in the types of `columns`, in order."""
    wanted = {partition: pa.int32(), offset: pa.int64()}
    wanted |= dict(zip(columns.names, columns.types, strict=True))
    names = ["partition", "offset", *columns.names]
    parts = [
        pa.table([_as(rows.column(name), kind) for name, kind in wanted.items()], names=names)
        for rows in tables
    ]
    return _in_order(pa.concat_tables(parts))


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_temporal(column.type):
        column = pa.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
    return column if column.type == kind else column.cast(kind)


def same(actual: pa.Table, expected: pa.Table) -> tuple[int, str]:
    """How many rows are exact, and the first difference. Both are in order."""
    keys = [
        np.asarray(table.column("partition")).astype(np.int64) << 48
        | np.asarray(table.column("offset"))
        for table in (actual, expected)
    ]
    if len(np.unique(keys[0])) != len(keys[0]):
        return 0, "an offset is there twice"
    if not np.array_equal(*keys):
        lost, more = np.setdiff1d(keys[1], keys[0]), np.setdiff1d(keys[0], keys[1])
        where = [f"{key >> 48}:{key & (1 << 48) - 1}" for key in (*lost[:3], *more[:3])]
        common = len(np.intersect1d(*keys))
        return common, f"{len(lost)} are missing, {len(more)} are too many: {', '.join(where)}"
    wrong = np.zeros(len(actual), bool)
    why = ""
    for name in expected.schema.names:
        one, other = (_plain(table.column(name)) for table in (actual, expected))
        if not one.equals(other):
            differ = np.array(
                [
                    a != b and str(a) != str(b)
                    for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True)
                ]
            )
            if differ.any() and not why:
                at = int(np.flatnonzero(differ)[0])
                texts = [str(side[at].as_py())[:200] for side in (other, one)]
                where = f"{actual['partition'][at]}:{actual['offset'][at]}"
                why = f"{where} {name}: expected {texts[0]}, found {texts[1]}"
            wrong |= differ
    return int((~wrong).sum()), why


def _plain(column: pa.ChunkedArray) -> pa.Array:
    values = column.combine_chunks()
    if pa.types.is_floating(values.type):  # not a number is a number like any other here
        values = pc.if_else(pc.is_nan(values), pa.scalar(-12345.0, values.type), values)
    return values


class Registry:
    """Knows the schemas of this file."""

    def __init__(self) -> None:
        known = {
            number: {"schema": json.dumps(schema)} for number, schema in GOOD.items()
        } | REFUSED
        asked = self.asked = Counter[int]()

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet

            def do_GET(self) -> None:
                number = int(self.path.split("?")[0].rsplit("/", 1)[-1])
                asked[number] += 1
                missing = {"error_code": 40403, "message": "Schema not found"}
                raw = json.dumps(known.get(number, missing)).encode()
                self.send_response(200 if number in known else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Whoever asked may have been killed."""

        self._server = Server(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Registry:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


# ── records that kill ───────────────────────────────────────────────────────────────────────────

DEADLY = _record("Deadly", ("id", "long"), ("word", "string"))
DEADLY_ROUTE = """
import ctypes, os, signal

def sort(rows):
    words = rows.column("word").to_pylist()
    if "kill" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    if "crash" in words:
        ctypes.string_at(0)
    return ["db.deadly"] * len(words)
"""
DEADLY_AT = {
    1: "kill",
    5_000: "kill",
    5_004: "crash",
    12_345: "kill",
    30_002: "crash",
    39_999: "kill",
}
DEADLY_ROWS = 40_000


def deadly_records() -> Iterator[bytes]:
    for number in range(DEADLY_ROWS):
        word = DEADLY_AT.get(number, "fine").encode()
        yield zigzag(number) + zigzag(len(word)) + word


# ── records at which a station fails ────────────────────────────────────────────────────────────

STATIONS = ("decode", "learn", "fit", "partition", "path", "encode", "close")
STATIONS_ROUTE = """
def plant():
    from frazil.files import writer
    from frazil.formats import debezium, json_reader
    from frazil.pipeline import fitting, json_records

    def raising(where, name, matches):
        original = getattr(where, name)
        if getattr(original, "planted", False):
            return

        def planted(*args, **named):
            if matches(*args):
                raise ArithmeticError("out of the blue, at " + name)
            return original(*args, **named)

        planted.planted = True
        setattr(where, name, planted)

    def has(rows, word):
        return "word" in rows.schema.names and word in rows.column("word").to_pylist()

    layout = writer._Layout
    shape = json_reader.JsonShape
    raising(shape, "decode", lambda _, given: any(b'"decode"' in v for v in given if v))
    raising(debezium, "_change", lambda text: '"unwrap"' in text)
    raising(json_records, "wanted", lambda value, *_: b'"learn"' in value)
    raising(fitting, "project_rows", lambda rows, *_: has(rows, "fit"))
    raising(layout, "clusters", lambda _, rows: has(rows, "partition"))
    raising(layout, "path", lambda _, partition, name: "path" in partition)
    raising(writer._OpenFile, "encode", lambda _, rows: has(rows, "encode"))
    raising(layout, "descriptor", lambda _, path, partition, *rest: "close" in partition)


def sort(rows):
    plant()
    return ["db.stations"] * len(rows)


def ask_the_next_rule(rows):
    plant()
    return [None] * len(rows)
"""
STATIONS_ROWS = 5_000
STATIONS_AT = {7 + 331 * n: STATIONS[n % len(STATIONS)] for n in range(14)}
#: The same in Debezium's envelope.
CHANGES_AT = {7 + 331 * n: ("unwrap", *STATIONS)[n % 8] for n in range(15)}


def station_records(stations: dict[int, str]) -> Iterator[bytes]:
    for number in range(STATIONS_ROWS):
        word = stations.get(number, "fine")
        row = {"id": number, "word": word, **({"more": 1} if word == "learn" else {})}
        change = {"op": "c", "before": None, "after": row}
        yield json.dumps(change if stations is CHANGES_AT else row).encode()


# ── the run ─────────────────────────────────────────────────────────────────────────────────────


def produce(bootstrap: str, topic: str, values: Iterator[bytes | None]) -> int:
    create_topic(bootstrap, topic, PARTITIONS)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 500_000,
            "log_level": 3,
        }
    )
    count = 0
    for value in values:
        while True:
            try:
                producer.produce(topic, value, partition=count % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.05)
        count += 1
        if count % 10_000 == 0:
            producer.poll(0)
        if count % 500_000 == 0:
            say(f"  {count:,}")
    assert producer.flush(120) == 0
    return count


class Memory:
    """The largest resident set of each sort of process under one, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            with suppress(psutil.NoSuchProcess):
                for process in [self._root, *self._root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        mib = process.memory_info().rss / 2**20
                        sort = self._sort(process)
                        self.peak[sort] = max(self.peak.get(sort, 0.0), mib)

    def _sort(self, process: psutil.Process) -> str:
        if process.pid == self._root.pid:
            return "driver"
        line = process.cmdline()
        if "java" in process.name():
            return "jvm"
        return "careful" if "frazil.pipeline.sandbox" in line else "worker"

    def end(self) -> dict[str, float]:
        self._done.set()
        self._thread.join()
        return {sort: round(mib, 1) for sort, mib in self.peak.items()}


def document(folder: Path, name: str, bootstrap: str, **sections: Any) -> dict[str, Any]:
    uri = f"jdbc:sqlite:{folder}/catalog.db?busy_timeout=10000&journal_mode=WAL"
    return {
        "sink": {
            "id": name,
            "topics": [name],
            "index_table": f"db.{name}_index",
            "trigger": "available-now",
            "max_records_per_task": 50_000,
            "max_records_per_trigger": 400_000,
        },
        "kafka": {"bootstrap.servers": bootstrap},
        "catalog": {
            "type": "jdbc",
            "uri": uri,
            "jdbc.schema-version": "V1",
            "warehouse": f"{folder}/warehouse",
        },
        "spark": {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file:{folder}/events",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.compress": "false",
        },
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1, "max_count": 100_000_000},
        "table": [{"name": f"db.{name}", "schema_evolution": "reject"}],
        **sections,
    }


def side(documents: list[dict[str, Any]]) -> None:
    """The child: one sink after the other, each to the end of its topic; then what is there."""
    from pyiceberg.table import StaticTable

    from frazil.auditing.evidence import of_table
    from frazil.iceberg.java import JavaCatalog
    from frazil.sink import Sink
    from frazil.spark.session import session
    from frazil.steps import Step

    spark = None
    for document in documents:
        made = document.pop("create", "")
        config = from_document(document)
        spark = spark or session(config, say=say)
        if made:
            spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
            spark.sql(made)
        began = time.monotonic()
        done = 0
        spent: Counter[str] = Counter()

        def on_step(step: Step, began: float = began) -> None:
            nonlocal done
            if step.name == "written":
                done += step.records
                spent.update(step.seconds or {})  # noqa: B023
                text = f"  {done:,} records in {time.monotonic() - began:.0f} s"
                print(json.dumps({"say": text}), flush=True)

        Sink(config, on_step=on_step).start(spark).awaitTermination()
        catalog = JavaCatalog(spark, config.catalog.name)
        answer: dict[str, Any] = {
            "sink": config.sink.id,
            "seconds": time.monotonic() - began,
            "spent": {k: round(v, 1) for k, v in spent.items()},
        }
        for name in (config.tables[0].name, config.dead_letters.table):
            table = catalog.load(name)
            assert table is not None, name
            all_reports = of_table(catalog.open_readonly, name, "main").reports
            own_key = (name, config.sink.id)  # and not the index, which has a report of its own
            reports = [report for report in all_reports if (report.table, report.sink) == own_key]
            # By pyiceberg, with not a line of ours.
            files = StaticTable.from_metadata(table.metadata_file).scan().plan_files()
            answer[name] = {
                "verdicts": [report.verdict for report in reports],
                "files": [file.file.file_path for file in files],
            }
        print(json.dumps(answer), flush=True)
    assert spark is not None
    spark.stop()


def failures(folder: Path) -> list[int]:
    """How often each task failed, of those that did: as Spark's own log has it."""
    failed: Counter[tuple[int, int, int]] = Counter()
    for path in folder.iterdir():
        for line in path.open():
            if '"SparkListenerTaskEnd"' in line:
                event = json.loads(line)
                task = event["Task Info"]
                if task["Failed"]:
                    failed[event["Stage ID"], event["Stage Attempt ID"], task["Index"]] += 1
    return sorted(failed.values())


def poison(hostile: int, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    avro, plain = Topic("avro", Avro(seed)), Topic("json", Json(seed))
    with tempfile.TemporaryDirectory(prefix="frazil-poison-") as name, Registry() as registry:
        folder = Path(name)
        (folder / "events").mkdir()
        (folder / "deadly.avsc").write_text(json.dumps(DEADLY))
        (folder / "deadly.py").write_text(DEADLY_ROUTE)
        (folder / "stations.py").write_text(STATIONS_ROUTE)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", say=say) as broker:
            for topic, share in ((avro, hostile - hostile // 2), (plain, hostile // 2)):
                say(f"producing {share:,} hostile records of {topic.name} among good ones")
                produce(broker.bootstrap, topic.name, topic.records(share, seed))
            produce(broker.bootstrap, "deadly", deadly_records())
            produce(broker.bootstrap, "stations", station_records(STATIONS_AT))
            produce(broker.bootstrap, "changes", station_records(CHANGES_AT))
            produced = time.monotonic() - began
            documents = [
                document(
                    folder,
                    "avro",
                    broker.bootstrap,
                    decode={"format": "confluent-avro", "registry": {"url": registry.url}},
                ),
                {
                    **document(folder, "json", broker.bootstrap, decode={"format": "json"}),
                    "create": f"CREATE TABLE lake.db.json ({JSON_TABLE}, _topic string NOT NULL, "
                    "_topic_partition int NOT NULL, _offset bigint NOT NULL, _timestamp timestamp) "
                    "USING iceberg",
                },
                document(
                    folder,
                    "deadly",
                    broker.bootstrap,
                    decode={"format": "avro", "schema": f"{folder}/deadly.avsc"},
                    route=[{"python": f"{folder}/deadly.py:sort"}],
                ),
                document(
                    folder,
                    "stations",
                    broker.bootstrap,
                    decode={"format": "json"},
                    table=[{"name": "db.stations", "partition_by": ["word"]}],
                    route=[{"python": f"{folder}/stations.py:sort"}],
                ),
                document(
                    folder,
                    "changes",
                    broker.bootstrap,
                    decode={"format": "json"},
                    table=[{"name": "db.changes", "partition_by": ["word"]}],
                    route=[
                        {"python": f"{folder}/stations.py:ask_the_next_rule"},
                        {"to": ["db.changes"], "envelope": "debezium"},
                    ],
                ),
            ]
            say("starting the sinks")
            answers, peak = _run(documents, folder / "log")
        result: dict[str, Any] = {
            "hostile": avro.hostile + plain.hostile,
            "good": avro.good + plain.good,
            "good_exact": 0,
            "rejected_once": 0,
        }
        troubles: list[str] = []
        for topic, answer in zip((avro, plain), answers, strict=False):
            say(
                f"comparing {topic.name}: {topic.good:,} good, of them {topic.lucky:,} by chance; "
                f"{topic.hostile:,} hostile"
            )
            rows = read(answer[f"db.{topic.name}"]["files"])
            dead_letters = read(answer[f"db.{topic.name}_dead"]["files"])
            exact, why = same(gathered(rows, topic.source.columns, *PLACE), topic.expected_rows())
            once, why_not = same(
                gathered(dead_letters, VALUE, "partition", "offset"), topic.expected_letters()
            )
            result["good_exact"] += exact
            result["rejected_once"] += once
            troubles += [f"{topic.name}: {trouble}" for trouble in (why, why_not) if trouble]
        result["deadly"], fine = _found(answers[2], "deadly", DEADLY_AT, DEADLY_ROWS)
        result["stations"], others = _found(answers[3], "stations", STATIONS_AT, STATIONS_ROWS)
        result["changes"], unwrapped = _found(answers[4], "changes", CHANGES_AT, STATIONS_ROWS)
        verdicts = {
            name: facts["verdicts"]
            for answer in answers
            for name, facts in answer.items()
            if name.startswith("db.")
        }
        troubles += [
            f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict != ["proven"]
        ]
        failed = failures(folder / "events")
    result |= {
        "deadly_others_exact": fine,
        "stations_others_exact": others,
        "changes_others_exact": unwrapped,
        "crash_loops": sum(times > 2 for times in failed),
        "task_failures": sum(failed),
        "proven": len(verdicts),
        "seconds": round(time.monotonic() - began, 1),
        "produce_seconds": round(produced, 1),
        "sink_seconds": {part["sink"]: round(part["seconds"], 1) for part in answers},
        "task_seconds": {part["sink"]: part["spent"] for part in answers},
        "peak_worker_mib": peak.get("worker", 0.0),
        "peak_mib": peak,
        "good_by_chance": avro.lucky + plain.lucky,
        "kinds": len(avro.kinds) + len(plain.kinds),
        "registry_asked": sum(registry.asked.values()),
        "seed": seed,
        "troubles": troubles,
    }
    return result


def _of_polars(line: str) -> bool:
    return not line or "panicked at" in line or line.startswith(("range end", "note: run with"))


def _run(
    documents: list[dict[str, Any]], log: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What the child says of each sink, and the memory it took."""
    with log.open("w") as errors:  # polars tells of every block that it cannot read
        process = subprocess.Popen(
            [sys.executable, __file__, "--side", json.dumps(documents)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    memory = Memory(process.pid)
    answers = []
    assert process.stdout is not None
    for line in process.stdout:
        message = json.loads(line) if line.startswith("{") else {}
        if "say" in message:
            say(message["say"])
        elif message:
            say(f"{message['sink']}: {message['seconds']:.0f} s")
            answers.append(message)
    if process.wait() or len(answers) != len(documents):
        lines = [line for line in log.read_text().splitlines() if not _of_polars(line)]
        raise SystemExit(
            "\n".join([f"the sinks' process ended: {process.returncode}", *lines[-60:]])
        )
    return answers, memory.end()


def _found(answer: dict[str, Any], name: str, bad: dict[int, str], count: int) -> tuple[int, int]:
    """Bad records that are in the dead letters as what they are, and others, in the table."""
    dead_letters = pa.concat_tables(read(answer[f"db.{name}_dead"]["files"])).to_pylist()
    places = {(at % PARTITIONS, at // PARTITIONS) for at in bad}
    kinds = {"deadly"} if name == "deadly" else {"failed", "unwritable"}
    rejected = [(row["partition"], row["offset"]) for row in dead_letters if row["kind"] in kinds]
    assert len(rejected) == len(dead_letters) == len(set(rejected)), dead_letters
    rows = gathered(read(answer[f"db.{name}"]["files"]), pa.schema([("id", pa.int64())]), *PLACE)
    ids = np.array([at for at in range(count) if at not in bad])
    expected = pa.table(
        {
            "partition": pa.array(ids % PARTITIONS, pa.int32()),
            "offset": ids // PARTITIONS,
            "id": ids,
        }
    )
    return len(places & set(rejected)), same(rows, _in_order(expected))[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hostile", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side(json.loads(given.side))
    else:
        result = poison(given.hostile, given.seed)
        print(json.dumps(result))
        right = (
            result["good_exact"] == result["good"]
            and result["rejected_once"] == result["hostile"]
            and result["deadly"] == len(DEADLY_AT)
            and result["deadly_others_exact"] == DEADLY_ROWS - len(DEADLY_AT)
            and result["stations"] == len(STATIONS_AT)
            and result["stations_others_exact"] == STATIONS_ROWS - len(STATIONS_AT)
            and result["changes"] == len(CHANGES_AT)
            and result["changes_others_exact"] == STATIONS_ROWS - len(CHANGES_AT)
            and not result["crash_loops"]
            and not result["troubles"]
        )
        sys.exit(0 if right else 1)
