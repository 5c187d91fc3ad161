"""Random schemas and values from bytes to a table and back, judged by the values that were encoded.

    schema ─▶ values ─▶ fastavro or json ─▶ decode, settle, write ─▶ data files ─▶ readers ─▶ same?
                                              └─▶ evolve, write more ─▶ compact ─▶ readers ─▶ same?

A `Case` comes from a number alone. Every type of Avro and JSON, down to six levels; optional
records with required fields, empty and over-long values, the ends of numbers and of time, NaN and
both zeros, the neighbours of half surrogate pairs. Some values fit no column (`Refused`): their
records must be rejected, and nobody else's. Nothing of the code it judges is used to say what a
value must be: dates and moments are numbers, decimals their digits, floats their bits. The readers
are pyarrow and DuckDB.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
import io
import json
import math
import random
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from frazil.config.sections import RouteConfig, TableConfig
from frazil.files.rewrite import RewriteJob, SourceFile, rewrite
from frazil.files.writer import TableWriter, WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema, partition_spec, sort_order, update
from frazil.iceberg.table import SchemaUpdate
from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.missing_columns import aliases_of
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import ChunkPlan, TablePlan

HERE = Partition("events", 0)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
DEPTH = 6
TABLE = "db.t"


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Node:
    """A type, and how values of it are drawn: as they are encoded, and as they must come back."""

    kind: str
    avro: Any = None
    draw: Callable[[random.Random], tuple[Any, Any]] | None = None
    #: of JSON: values that make the column what it is, in the one document that has them all
    first: Callable[[random.Random], tuple[Any, Any]] | None = None
    #: of a record: name, what it is in Avro, type; of an array or map: one without a name
    inside: tuple[tuple[str, Node], ...] = ()
    optional: str = ""  # first or last: where the union has its null
    #: names of fields that were renamed → what they were
    olds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """Comes back for a value that its column cannot hold: the record must be rejected."""

    document: Any  # the value, as JSON says it


@dataclass(frozen=True)
class Literal:
    """A number as its JSON text has it."""

    text: str


def refused(wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return any(map(refused, wanted.values()))
    if isinstance(wanted, list | tuple):
        return any(map(refused, wanted))
    return isinstance(wanted, Refused)


def same(values: Callable[[random.Random], Any]) -> Callable[[random.Random], tuple[Any, Any]]:
    def draw(dice: random.Random) -> tuple[Any, Any]:
        value = values(dice)
        return value, value

    return draw


def whole(bits: int, scale: int = 1) -> Callable[[random.Random], tuple[int, int]]:
    """Integers of so many bits; they come back `scale` times as large, if that can be."""
    most = (2 ** (bits - 1) - 1) if scale == 1 else (2**63 - 1) // scale

    def draw(dice: random.Random) -> tuple[int, int]:
        value = dice.choice([0, 1, -1, most, -most - (scale == 1), dice.randint(-most, most)])
        return value, value * scale

    return draw


def clock(end: int, scale: int) -> Callable[[random.Random], tuple[int, int]]:
    def draw(dice: random.Random) -> tuple[int, int]:
        value = dice.choice([0, end - 1, dice.randrange(end)])
        return value, value * scale

    return draw


def floats(form: str) -> Callable[[random.Random], tuple[float, Any]]:
    tiny, huge = (
        (1e-45, 3.4028234663852886e38) if form == "<f" else (5e-324, 1.7976931348623157e308)
    )

    def draw(dice: random.Random) -> tuple[float, Any]:
        given = dice.choice(
            [
                0.0,
                -0.0,
                math.nan,
                math.inf,
                -math.inf,
                tiny,
                -tiny,
                huge,
                -huge,
                dice.uniform(-1e3, 1e3),
            ]
        )
        return given, bits(struct.unpack(form, struct.pack(form, given))[0])

    return draw


def bits(value: float) -> tuple[str, bytes]:
    return "float", struct.pack(">d", math.nan if math.isnan(value) else value)


LETTERS = 'a\0 \n"\\/~é\u07ff\u0800\ud7ff\ue000\ufffd\uffff\U00010000\U0001f600\U0010ffff'


def length(dice: random.Random) -> int:
    return dice.choice([0, 1, 2, 15, 16, 17, 18, 40, dice.choice([300, 4097, 5000])])


def text(dice: random.Random) -> str:
    return "".join(dice.choices(LETTERS, k=length(dice)))


def octets(dice: random.Random) -> bytes:
    return bytes(dice.choices([0, 1, 127, 128, 254, 255], k=length(dice)))


def decimal(
    precision: int, scale: int, size: int | None
) -> Callable[[random.Random], tuple[bytes, Any]]:
    """Of a precision beyond 38 some values have more digits than a column, each for itself."""
    most = 10 ** min(precision, 38) - 1
    # the first three in 16 bytes, as many as the widest value that fits
    beyond = [most + 1, -most - 1, 2**127 - 1, 2**127, 10**precision - 1]

    def draw(dice: random.Random) -> tuple[bytes, Any]:
        value = dice.choice([0, 1, -1, most, -most, dice.randint(-most, most)])
        if precision > 38 and dice.random() < 0.2:
            value = dice.choice(beyond)
        fits = -most <= value <= most
        least = (value.bit_length() + 8) // 8
        given = value.to_bytes(size or least + (fits and dice.randint(0, 1)), "big", signed=True)
        return given, ("decimal", value) if fits else Refused(decimal_text(value, scale))

    return draw


def decimal_text(value: int, scale: int) -> str:
    digits = str(abs(value)).rjust(scale + 1, "0")
    at = len(digits) - scale
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:at]}.{digits[at:]}" if scale else f"{sign}{digits}"


def logical(base: str, word: str, **more: Any) -> dict[str, Any]:
    return {"type": base, "logicalType": word, **more}


UUID = "00000000-0000-4000-8000-ffffffffffff"
LEAVES: list[Callable[[Schemas], Node]] = [
    lambda s: Node("boolean", "boolean", same(lambda d: d.random() < 0.5)),
    lambda s: Node("int", "int", whole(32)),
    lambda s: Node("long", "long", whole(64)),
    lambda s: Node("float", "float", floats("<f")),
    lambda s: Node("double", "double", floats("<d")),
    lambda s: Node("string", "string", same(text)),
    lambda s: Node("bytes", "bytes", same(octets)),
    lambda s: Node("date", logical("int", "date"), whole(32)),
    lambda s: Node("time", logical("int", "time-millis"), clock(86_400_000, 1000)),
    lambda s: Node("time", logical("long", "time-micros"), clock(86_400_000_000, 1)),
    lambda s: Node("moment", logical("long", "timestamp-millis"), whole(64, 1000)),
    lambda s: Node("moment", logical("long", "timestamp-micros"), whole(64)),
    lambda s: Node("moment", logical("long", "local-timestamp-millis"), whole(64, 1000)),
    lambda s: Node("moment", logical("long", "local-timestamp-micros"), whole(64)),
    lambda s: Node("nanos", logical("long", "timestamp-nanos"), whole(64)),
    lambda s: Node("nanos", logical("long", "local-timestamp-nanos"), whole(64)),
    lambda s: Node("uuid", logical("string", "uuid"), same(lambda d: UUID)),
    lambda s: s.decimal((1, 9, 10, 18, 19, 38)),
    lambda s: s.decimal((39, s.dice.randint(40, 63), 64, 64)),
    lambda s: s.fixed(),
    lambda s: s.enum(),
]


class Schemas:
    """Draws types. `json`: only what JSON can say."""

    def __init__(self, dice: random.Random, json: bool = False) -> None:
        self.dice = dice
        self.json = json
        self.engines = False  # only what every engine has, times within everybody's calendar
        self.left = 30  # leaves
        self.names = 0

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def decimal(self, precisions: Sequence[int]) -> Node:
        precision = self.dice.choice(precisions)
        return self.decimal_of(precision, self.dice.randint(0, min(precision, 38)))

    def decimal_of(self, precision: int, scale: int) -> Node:
        more = {"precision": precision, "scale": scale}
        if self.dice.random() < 0.5:
            avro, size = logical("bytes", "decimal", **more), None
        else:
            size = ((10**precision).bit_length() + 8) // 8
            avro = logical("fixed", "decimal", name=self.name("F"), size=size, **more)
        return Node("decimal", avro, decimal(precision, scale, size))

    def fixed(self) -> Node:
        size = self.dice.choice([1, 3, 16, 40])
        avro = {"type": "fixed", "name": self.name("F"), "size": size}
        return Node("fixed", avro, same(lambda d: bytes(d.choices([0, 127, 128, 255], k=size))))

    def enum(self) -> Node:
        symbols = [f"S{i}" for i in range(self.dice.randint(1, 4))]
        avro = {"type": "enum", "name": self.name("E"), "symbols": symbols}
        return Node("enum", avro, same(lambda d: d.choice(symbols)))

    def leaf(self) -> Node:
        self.left -= 1
        if self.json:
            return self.dice.choice(JSON_LEAVES)
        node = self.dice.choice(LEAVES)(self)
        while self.engines and node.kind in ("time", "nanos"):
            node = self.dice.choice(LEAVES)(self)
        return within_calendar(node) if self.engines else node

    def node(self, depth: int, bare: bool = False) -> Node:
        if depth < DEPTH and self.left > 4 and self.dice.random() < 0.5:
            word = self.dice.choice(["record", "record", "array", "array", "map", "union"])
            if word == "record":
                node = self.record(depth + 1)
            elif word == "union" and not self.json and not bare:
                return self.union()
            elif word == "map" and not self.json:
                node = Node("map", inside=(("", self.node(depth + 1)),))
            else:
                node = Node("array", inside=(("", self.node(depth + 1)),))
        else:
            node = self.leaf()
        optional = "" if bare or self.dice.random() < 0.5 else self.dice.choice(["first", "last"])
        return replace(node, optional="first" if self.json else optional)

    def union(self) -> Node:
        """Of several branches: a struct with a member for each."""
        branches = [make(self) for make in self.dice.sample(LEAVES[:7], self.dice.randint(2, 4))]
        null = self.dice.random() < 0.5
        kinds = [branch.avro for branch in branches]

        def draw(dice: random.Random) -> tuple[Any, Any]:
            if null and dice.random() < 0.3:
                return None, None
            at = dice.randrange(len(branches))
            given, wanted = branches[at].draw(dice)
            members = dict.fromkeys((f"member{i}" for i in range(len(branches))), None)
            return (kinds[at], given), {**members, f"member{at}": wanted}

        return Node("union", [*(["null"] if null else []), *kinds], draw)

    def record(self, depth: int, least: int = 1) -> Node:
        names = [self.name("f") for _ in range(self.dice.randint(least, 4))]
        return Node("record", self.name("R"), inside=tuple((n, self.node(depth)) for n in names))


def _between(low: int, high: int, scale: int) -> Callable[[random.Random], tuple[int, int]]:
    def draw(dice: random.Random) -> tuple[int, int]:
        value = dice.choice([low, high, 0, -1, dice.randint(low, high)])
        return value, value * scale

    return draw


def within_calendar(node: Node) -> Node:
    """Dates and moments of the years 1 to 9999."""
    if node.kind not in ("date", "moment"):
        return node
    millis = "millis" in node.avro["logicalType"]
    day = 1 if node.kind == "date" else 86_400_000 if millis else 86_400_000_000
    return replace(node, draw=_between(-719_162 * day, 2_932_896 * day, 1000 if millis else 1))


# ── what JSON can say ────────────────────────────────────────────────────────────────────────────

_FRACTIONS = [
    "0.5",
    "-0.0",
    "0.0",
    "2.0",
    "-2e0",
    "1e3",
    "5e-324",
    "-1e300",
    "1e-400",
    "-1e-400",
    "9007199254740993.0",
    "1.7976931348623157e308",
    "0.1000000000000000055511151231257827021181583404541015625",
]
#: In a column of doubles that records made: others would make it a column of longs.
_WHOLES = ["2", "0", "-0", "-7", *map(str, (2**53, -(2**53), 2**62, -(2**63)))]
_WHOLES += [str(2**64 + 1), f"1{'0' * 30}1"]
_LONGS = [0, 1, -1, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1]
#: Text that other columns would take for something else.
_LOOKS = ["2024-02-29", "2024-02-29T12:00:00Z", "2024-02-29 12:00:00", "12:34:56", UUID, "AAAA"]
_LOOKS += ["1e400", "-0", "2", "null", "true", "NaN", "{}", "[]"]


def _number(text: str) -> tuple[Literal, Any]:
    return Literal(text), bits(float(text))


def _fraction(dice: random.Random) -> tuple[Literal, Any]:
    return _number(dice.choice([*_FRACTIONS, repr(dice.uniform(-1e3, 1e3) + 0.1)]))


def _double(dice: random.Random) -> tuple[Literal, Any]:
    if dice.random() < 0.01:
        beyond = Literal(dice.choice(["1e400", "-1e400", "1" * 400]))
        return beyond, Refused(beyond)
    return _fraction(dice) if dice.random() < 0.5 else _number(dice.choice(_WHOLES))


def _whole_long(dice: random.Random) -> tuple[Any, int]:
    if dice.random() < 0.1:
        return Literal("-0"), 0
    value = dice.choice([*_LONGS, dice.randint(-(2**63), 2**63 - 1)])
    return value, value


def _long(dice: random.Random) -> tuple[Any, Any]:
    if dice.random() < 0.01:
        beyond = dice.choice([2**63, -(2**63) - 1, 10**30])
        return beyond, Refused(beyond)
    return _whole_long(dice)


JSON_LEAVES = [
    Node("boolean", None, same(lambda d: d.random() < 0.5)),
    Node("long", None, _long, _whole_long),
    Node("double", None, _double, _fraction),
    Node("string", None, same(lambda d: d.choice(_LOOKS) if d.random() < 0.4 else text(d))),
]

#: What a column that is there does not take from a document, and no promised change helps.
MISFITS: dict[str, list[Any]] = {
    "boolean": [1, "true", [True]],
    "int": [Literal("2.5"), Literal("1e3"), "7", True, 2**63],
    "long": [Literal("2.5"), Literal("1e3"), "7", True, 2**63],
    "float": ["1.5", True, Literal("1e400")],
    "double": ["1.5", True, Literal("1e400")],
    "string": [1, True, ["a"]],
    "enum": [1, True],
    "bytes": ["*", "AA", 1],
    "fixed": ["*", "AA", "", 1],
    "date": ["2024-02-30", "2024-02-29T00:00:00", "today", 5],
    "time": ["24:00:00", "noon", 5],
    "moment": ["2024-02-29", "2024-02-29T24:00:00Z", "2024-02-29T24:00:00", 5],
    "nanos": ["2024-02-29", "2500-01-01T00:00:00Z", "2500-01-01T00:00:00", 5],
    "decimal": ["1e", "", f"0.{'1' * 39}", 10**39, True],
    "uuid": ["no uuid", 1],
}


def misfitting(node: Node) -> Node:
    """A leaf of a later writer, who now and then sends what the column does not take."""
    fitting, misfits = node.draw, MISFITS.get(node.kind)
    if fitting is None or misfits is None:
        return node

    def draw(dice: random.Random) -> tuple[Any, Any]:
        if dice.random() < 0.01:
            given = dice.choice(misfits)
            return given, Refused(given)
        return fitting(dice)

    return replace(node, draw=draw, first=node.first or fitting)


def tabled(node: Node) -> Node:
    """The columns of a table that somebody made, for documents: every value has a text, and a UUID
    is a type of its own."""
    node = replace(node, inside=tuple((name, tabled(child)) for name, child in node.inside))
    if node.kind in ("float", "double", "union"):
        return replace(node, draw=_sayable(node))
    if node.kind == "uuid":
        return replace(node, draw=same(lambda d: d.randbytes(16)))
    return within_calendar(node)


def _sayable(node: Node) -> Callable[[random.Random], tuple[Any, Any]]:
    def draw(dice: random.Random) -> tuple[Any, Any]:
        assert node.draw is not None
        while True:
            given, wanted = node.draw(dice)
            with suppress(Unsayable):
                json_of(node, wanted)
                return given, wanted

    return draw


def document(given: Any, ascii: bool) -> str:
    """JSON text, with numbers as they are given."""
    if isinstance(given, Literal):
        return given.text
    if isinstance(given, dict):
        pairs = (
            f"{json.dumps(name, ensure_ascii=ascii)}: {document(inside, ascii)}"
            for name, inside in given.items()
        )
        return f"{{{', '.join(pairs)}}}"
    if isinstance(given, list):
        return f"[{', '.join(document(item, ascii) for item in given)}]"
    return json.dumps(given, ensure_ascii=ascii)


def sparse(given: Any, dice: random.Random) -> Any:
    """Some of the fields that are null are left out."""
    if isinstance(given, dict):
        return {
            name: sparse(inside, dice)
            for name, inside in given.items()
            if inside is not None or dice.random() < 0.5
        }
    return [sparse(item, dice) for item in given] if isinstance(given, list) else given


def avro_of(node: Node) -> Any:
    if node.kind == "record":
        fields = []
        for name, inside in node.inside:
            field = {"name": name, "type": avro_of(inside)}
            fields.append(field | ({"aliases": [node.olds[name]]} if name in node.olds else {}))
        schema: Any = {"type": "record", "name": node.avro, "fields": fields}
    elif node.kind == "array":
        schema = {"type": "array", "items": avro_of(node.inside[0][1])}
    elif node.kind == "map":
        schema = {"type": "map", "values": avro_of(node.inside[0][1])}
    else:
        schema = node.avro
    return {"": schema, "first": ["null", schema], "last": [schema, "null"]}[node.optional]


def plain(schema: Any) -> Any:
    """Without logical types: so fastavro takes numbers and bytes as they are."""
    if isinstance(schema, list):
        return [plain(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value
        for key, value in schema.items()
        if key not in ("logicalType", "precision", "scale")
    }
    nested = ("type", "items", "values", "fields")
    return {key: plain(value) if key in nested else value for key, value in kept.items()}


def value(node: Node, dice: random.Random, full: bool = False) -> tuple[Any, Any]:
    """What is encoded, and what must come back. `full`: with nothing left out."""
    if node.optional and not full and dice.random() < 0.35:
        return None, None
    if node.kind == "record":
        pairs = {name: value(inside, dice, full) for name, inside in node.inside}
        return {n: g for n, (g, _) in pairs.items()}, {n: w for n, (_, w) in pairs.items()}
    if node.kind in ("array", "map"):
        count = dice.choice([1, 2] if full else [0, 0, 1, 2, 3])
        items = [value(node.inside[0][1], dice, full) for _ in range(count)]
        if node.kind == "array":
            return [g for g, _ in items], [w for _, w in items]
        keys = [f"{text(dice)}{i}" for i in range(count)]
        return (
            dict(zip(keys, (g for g, _ in items), strict=True)),
            list(zip(keys, (w for _, w in items), strict=True)),
        )
    draw = (node.first if full else None) or node.draw
    assert draw is not None
    return draw(dice)


class Unsayable(Exception):
    """JSON, or a calendar that ends with the year 9999, has no text for it."""


def json_of(node: Node, wanted: Any) -> Any:
    """A value that must come back, as a JSON document says it to a table with such a column."""
    if wanted is None:
        return None
    if isinstance(wanted, Refused):
        return wanted.document
    if node.kind == "record":
        return {name: json_of(inside, wanted[name]) for name, inside in node.inside}
    if node.kind == "array":
        return [json_of(node.inside[0][1], item) for item in wanted]
    if node.kind == "map":
        return {key: json_of(node.inside[0][1], item) for key, item in wanted}
    if node.kind == "union":
        members = [Node(kind) for kind in node.avro if kind != "null"]
        return {
            name: json_of(member, wanted[name])
            for name, member in zip(wanted, members, strict=True)
        }
    if node.kind in ("float", "double"):
        number = struct.unpack(">d", wanted[1])[0]
        if not math.isfinite(number):
            raise Unsayable
        return number
    if node.kind in ("bytes", "fixed"):
        return base64.b64encode(wanted).decode()
    if node.kind == "decimal":
        return decimal_text(wanted[1], node.avro["scale"])
    if node.kind == "uuid" and isinstance(wanted, bytes):
        return str(uuid.UUID(bytes=wanted))
    if node.kind in ("date", "time", "moment", "nanos"):
        return _clock_text(node, wanted)
    return wanted


def _clock_text(node: Node, wanted: int) -> str:
    word = node.avro["logicalType"]
    if node.kind == "date":
        return _calendar_text(wanted)
    unit = 10**9 if "nanos" in word else 10**6
    seconds, part = divmod(wanted, unit)
    days, second = divmod(seconds, 86_400)
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    clock += f".{part:0{len(str(unit)) - 1}}"
    if node.kind == "time":
        return clock
    return f"{_calendar_text(days)}T{clock}{'' if word.startswith('local') else 'Z'}"


def _calendar_text(days: int) -> str:
    if not -719_162 <= days <= 2_932_896:
        raise Unsayable
    return dt.date.fromordinal(days + 719_163).isoformat()


# ── what becomes of a schema ─────────────────────────────────────────────────────────────────────


def evolved(node: Node, schemas: Schemas) -> Node:
    """A later writer's: fields added and left out, numbers widened; in Avro also renamed and made
    optional, in documents also values that fit nowhere."""
    dice = schemas.dice
    if node.kind == "record":
        inside, olds = [], {}
        for name, child in node.inside:
            # A document without a value for a required column is rejected.
            droppable = not schemas.json or bool(child.optional)
            if len(node.inside) > 1 and inside and droppable and dice.random() < 0.1:
                continue
            if not schemas.json and dice.random() < 0.15:
                fresh = schemas.name("r")
                olds[fresh], name = name, fresh
            inside.append((name, evolved(child, schemas)))
        if dice.random() < 0.5:
            inside.append(
                (schemas.name("a"), replace(schemas.node(DEPTH - 1, bare=True), optional="first"))
            )
        node = replace(node, inside=tuple(inside), olds=olds)
    elif node.kind in ("array", "map"):
        node = replace(node, inside=(("", evolved(node.inside[0][1], schemas)),))
    elif dice.random() < 0.5:
        node = wider(node, schemas)
    if schemas.json:
        return misfitting(node)
    if not node.optional and node.kind != "union" and dice.random() < 0.2:
        node = replace(node, optional="last")
    return node


def wider(node: Node, schemas: Schemas) -> Node:
    """The wider type that a table may follow to. Its `first` values need it."""
    if node.kind == "int":
        wide = Node("long", "long", whole(64), same(lambda d: d.choice([2**31, -(2**63)])))
    elif node.kind == "float":
        huge = 1.7976931348623157e308
        wide = Node("double", "double", floats("<d"), lambda d: (huge, bits(huge)))
    elif node.kind == "decimal" and node.avro["precision"] < 38:
        precision = schemas.dice.randint(node.avro["precision"] + 1, 38)
        most = 10**precision - 1
        wide = schemas.decimal_of(precision, node.avro["scale"])
        wide = replace(wide, first=lambda d: (None, ("decimal", most)))
    else:
        return node
    wide = tabled(wide) if schemas.json else wide
    return replace(wide, optional=node.optional)


def under(wanted: Any, node: Node, other: Node, newer: bool) -> Any:
    """A value of one writer as a table of both has it. `newer`: it is the later writer's."""
    if wanted is None:
        return None
    if node.kind == "record":
        renamed = (node if newer else other).olds
        row = {}
        other_fields = dict(other.inside)
        for name, child in node.inside:
            if newer:
                other_name = renamed.get(name, name)
                final = name
            else:
                final = next((now for now, was in renamed.items() if was == name), name)
                other_name = final
            like = other_fields.get(other_name)
            row[final] = wanted[name] if like is None else under(wanted[name], child, like, newer)
        for name, _ in other.inside:
            final = (
                next((now for now, was in renamed.items() if was == name), name) if newer else name
            )
            row.setdefault(final, None)
        return row
    if node.kind == "array":
        return [under(item, node.inside[0][1], other.inside[0][1], newer) for item in wanted]
    if node.kind == "map":
        return [
            (key, under(item, node.inside[0][1], other.inside[0][1], newer)) for key, item in wanted
        ]
    return wanted


def applied(text: str, change: SchemaUpdate) -> str:
    """A table's schema after a change, as Iceberg would have it."""
    schema = json.loads(text)
    last = max(_ids(schema))

    def parts(path: str) -> Iterator[tuple[dict[str, Any], str]]:
        """The way to a type: whose member it is, and under which name."""
        holder, key = {"type": schema}, "type"
        for word in path.split(".") if path else ():
            kind = holder[key]
            if kind["type"] == "struct":
                holder, key = (
                    next(field for field in kind["fields"] if field["name"] == word),
                    "type",
                )
            else:
                holder, key = kind, {"element": "element", "key": "key", "value": "value"}[word]
        yield holder, key

    for path, wide in change.widen:
        [(holder, key)] = parts(path)
        holder[key] = json.loads(wide)["fields"][0]["type"]
    for path in change.relax:
        [(holder, key)] = parts(path)
        holder["required" if key == "type" else f"{key}-required"] = False
    for path, name, kind in change.add:
        [(holder, key)] = parts(path)
        added = json.loads(kind)["fields"][0]
        _shift(added, last)
        last = max(last, *_ids({"type": "struct", "fields": [added]}))
        holder[key]["fields"].append({**added, "name": name, "required": False})
    for path, name in sorted(change.rename, reverse=True):
        [(holder, _)] = parts(path)
        holder["name"] = name
    return json.dumps(schema)


def _ids(kind: Any) -> Iterator[int]:
    if isinstance(kind, dict):
        for key, inside in kind.items():
            if key in ("id", "element-id", "key-id", "value-id"):
                yield inside
            yield from _ids(inside)
    elif isinstance(kind, list):
        for part in kind:
            yield from _ids(part)


def _shift(kind: Any, by: int) -> None:
    if isinstance(kind, dict):
        for key, inside in kind.items():
            if key in ("id", "element-id", "key-id", "value-id"):
                kind[key] = inside + by
            _shift(inside, by)
    elif isinstance(kind, list):
        for part in kind:
            _shift(part, by)


# ── what comes back ──────────────────────────────────────────────────────────────────────────────


def canonical(scalar: Any) -> Any:
    """A value of Arrow's as the oracle has it."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ExtensionScalar):
        scalar = scalar.value
    kind = scalar.type
    if pa.types.is_struct(kind):
        return {field.name: canonical(scalar[at]) for at, field in enumerate(kind)}
    if pa.types.is_map(kind):
        pairs = scalar.values
        return [(canonical(pair[0]), canonical(pair[1])) for pair in pairs]
    if pa.types.is_nested(kind):
        return [canonical(value) for value in scalar.values]
    if pa.types.is_temporal(kind):
        return scalar.value
    if pa.types.is_decimal(kind):
        decimal_tuple = scalar.as_py().as_tuple()
        number = int("".join(map(str, decimal_tuple.digits)) or "0")
        return "decimal", -number if decimal_tuple.sign else number
    return bits(scalar.as_py()) if pa.types.is_floating(kind) else scalar.as_py()


def rows_of(table: pa.Table, metadata: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
    """By offset."""
    names = [name for name in table.schema.names if name not in metadata]
    rows = {}
    for at, offset in enumerate(table.column("_offset").to_pylist()):
        assert offset not in rows, f"offset {offset} is there twice"
        rows[offset] = {name: canonical(table.column(name)[at]) for name in names}
    return rows


def check_bounds(fact: Mapping[str, Any], rows: pa.Table) -> None:
    ids = {int(field.metadata[b"PARQUET:field_id"]): field for field in rows.schema}
    for key, low in (("lower-bounds", True), ("upper-bounds", False)):
        bounds = fact.get(key) or {"keys": [], "values": []}
        for number, bound in zip(bounds["keys"], bounds["values"], strict=True):
            column = ids[number]
            limit = _bound(column.type, bytes.fromhex(bound))
            for scalar in rows.column(column.name):
                value = canonical(scalar)
                value = value[1] if isinstance(value, tuple) and value[0] == "decimal" else value
                if isinstance(value, tuple):
                    value = struct.unpack(">d", value[1])[0]
                if value is None or value != value:
                    continue
                assert (limit <= value) if low else (limit >= value), (
                    f"{key} {limit!r} of {column} does not cover {value!r}"
                )


def _bound(kind: pa.DataType, raw: bytes) -> Any:
    if pa.types.is_floating(kind):
        return struct.unpack("<f" if len(raw) == 4 else "<d", raw)[0]
    if pa.types.is_decimal(kind):
        return int.from_bytes(raw, "big", signed=True)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return raw.decode()
    if pa.types.is_boolean(kind):
        return raw != b"\0"
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        return int.from_bytes(raw, "little", signed=True)
    return raw


# ── a case ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Written:
    """What a writer sent: its schema, and for each offset what must come back."""

    node: Node
    start: int = 0
    json: bool = False
    values: list[bytes] = field(default_factory=list)
    wanted: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: positions of values that are broken, or fit no column
    broken: set[int] = field(default_factory=set)

    def add(self, value: bytes, wanted: Any) -> None:
        if refused(wanted):
            self.broken.add(len(self.values))
        else:
            self.wanted[self.start + len(self.values)] = wanted
        self.values.append(value)


class Case:
    def __init__(self, seed: int, engines: bool = False) -> None:
        self.dice = dice = random.Random(seed)
        self.seed = seed
        self.kind = dice.choices(["avro", "json", "debezium"], [6, 2, 2])[0]
        self.schemas = Schemas(dice, json=self.kind == "json")
        self.schemas.engines = engines
        self.node = self.schemas.record(1)
        self.version = 3 if "nanos" in str(avro_of(self.node)) else dice.choice([2, 3])
        self.first = self.sent(self.node, 0)

    # records

    def sent(self, node: Node, start: int) -> Written:
        count = self.dice.choice([1, 2, 5, 12])
        sent = Written(node, start, self.kind == "json")
        if sent.json:
            self.add_documents(sent, count)
        else:
            self.add_datums(sent, count)
        if self.dice.random() < 0.3:  # broken: it takes the careful way with its neighbours
            sent.add(b"{" if sent.json else b"", Refused(None))
        return sent

    def add_datums(self, sent: Written, count: int) -> None:
        schema = fastavro.parse_schema(plain(self.avro(sent.node)))
        while len(sent.values) < count:
            given, wanted = value(sent.node, self.dice)
            if not sent.values and refused(wanted):
                continue  # a table is not made for rejected records
            if self.kind == "debezium":
                given, wanted = self.change(given, wanted)
            out = io.BytesIO()
            fastavro.schemaless_writer(out, schema, given)
            sent.add(out.getvalue(), wanted)

    def add_documents(self, sent: Written, count: int) -> None:
        """One of them, wherever it stands, has a fitting value for every column."""
        dice, full = self.dice, self.dice.randrange(count)
        while len(sent.values) < count:
            at = len(sent.values)
            given, wanted = value(sent.node, dice, full=at == full)
            if at == full and refused(wanted):
                continue
            # Of a table with types that JSON lacks, documents are made from what must come back.
            given = sparse(given, dice) if self.kind == "json" else json_of(sent.node, wanted)
            sent.add(document(given, dice.random() < 0.5).encode(), wanted)

    def avro(self, node: Node) -> Any:
        row = avro_of(replace(node, optional=""))
        if self.kind != "debezium":
            return row
        side = [
            {"name": "before", "type": ["null", row]},
            {"name": "after", "type": ["null", row["name"]]},
        ]
        return {
            "type": "record",
            "name": "Envelope",
            "fields": [*side, {"name": "op", "type": "string"}],
        }

    def change(self, given: Any, wanted: Any) -> tuple[Any, Any]:
        op = self.dice.choice(["c", "u", "d", "r"])
        before, after = (given, None) if op == "d" else (None, given)
        if op == "u" and self.dice.random() < 0.5:
            before = given
        return {"before": before, "after": after, "op": op}, {**wanted, "_op": op}

    # tables

    def format(self, sent: Written) -> RecordFormat:
        return (
            RecordFormat("json")
            if sent.json
            else RecordFormat("avro", json.dumps(self.avro(sent.node)))
        )

    def settler(self, sent: Written, *plans: TablePlan) -> ChunkPipeline:
        rules = None
        if self.kind == "debezium":
            rules = RoutingRules(
                [RouteConfig(topics=(HERE.topic,), to=(TABLE,), envelope="debezium")], [TABLE]
            )
        tables = {plan.shape.name: plan for plan in plans}
        return ChunkPipeline(ChunkPlan(self.format(sent), rules, tables, {}, TABLE))

    def opened(self, sent: Written) -> RawRecords:
        offsets = np.arange(sent.start, sent.start + len(sent.values), dtype=np.int64)
        return RawRecords(list(sent.values), offsets, offsets * 1000, None, None)

    def needed(self, sent: Written, *plans: TablePlan) -> pa.Schema | None:
        settled = self.settler(sent, *plans).process(HERE, self.opened(sent), frozenset())
        return settled.needs.get(TABLE)

    def rows(self, sent: Written, plan: TablePlan) -> list[pa.Table]:
        settler = self.settler(sent, plan)
        settled = settler.process(HERE, self.opened(sent), frozenset())
        assert not settled.needs, f"still needed: {settled.needs}"
        reasons = {at: rejection.reason for at, rejection in settled.rejections.items()}
        wrong = {at: reasons.get(at, "taken") for at in reasons.keys() ^ sent.broken}
        assert not wrong, f"{wrong}, of {sent.values[min(wrong)][:500]!r}"
        assert all(reasons.values())
        return [rows for _, rows in settled.rows]

    def layout(self, schema: str) -> tuple[str, str, dict[str, str]]:
        """A partition spec, a sort order and properties that the table may have."""
        dice, spec, order = self.dice, partition_spec(schema, (), TABLE), ""
        terms = []
        for column in json.loads(schema)["fields"]:
            kind, name = column["type"], column["name"]
            if not isinstance(kind, str) or name.startswith("_"):
                continue
            if not kind.startswith("timestamp"):  # the ends of time have no partition
                terms.append(name)
            if kind in ("date", "timestamp", "timestamptz"):
                terms += [f"year({name})", f"month({name})", f"day({name})"]
            if kind in ("int", "long", "string", "binary"):
                terms.append(f"truncate(3, {name})")
            if kind not in ("boolean", "float", "double"):
                terms.append(f"bucket(4, {name})")
        if terms and dice.random() < 0.35:
            with suppress(ValueError):
                spec = partition_spec(schema, (dice.choice(terms),), TABLE)
        if terms and dice.random() < 0.25:
            order = sort_order(schema, (dice.choice(terms),), TABLE)
        properties = {}
        if dice.random() < 0.5:
            properties["write.parquet.row-group-size-bytes"] = "1"
        if dice.random() < 0.3:
            properties["write.metadata.metrics.default"] = dice.choice(
                ["full", "truncate(1)", "counts"]
            )
        return spec, order, properties

    def plan(self, folder: str, columns: pa.Schema) -> TablePlan:
        config = TableConfig(TABLE, format_version=self.version)
        schema = iceberg_schema(columns, METADATA, config)
        spec, order, properties = self.layout(schema)
        shape = WriterSpec(TABLE, folder, schema, 0, spec, properties, 2**27, "snappy", {}, order)
        return self.planned(shape)

    def planned(self, shape: WriterSpec) -> TablePlan:
        return TablePlan(shape, METADATA, "", format_version=self.version)

    def written(self, plan: TablePlan, *sent: Written) -> list[str]:
        writer = TableWriter(plan.shape, "p")
        for some in sent:
            for rows in self.rows(some, plan):
                writer.write(rows)
        return [file.descriptor for file in writer.close()]

    def next(self) -> Written | None:
        """What a later writer sends; its schema may differ from the first one's in any way that a
        table can follow."""
        self.schemas.left = 12
        node = replace(evolved(replace(self.node, optional=""), self.schemas), optional="")
        if self.version < 3 and "nanos" in str(avro_of(node)):
            return None
        return self.sent(node, self.first.start + 100)

    def changed(self, plan: TablePlan, more: Written) -> TablePlan:
        """The plan of the table after what the later writer needs."""
        need = self.needed(more, plan)
        if need is None:
            return plan
        change = update(
            plan.shape.schema,
            need,
            TABLE,
            spec=plan.shape.spec,
            format_version=self.version,
            aliases=aliases_of(need),
            beside={field.name for field in METADATA.fields},
        )
        schema = applied(plan.shape.schema, change)
        return self.planned(replace(plan.shape, schema=schema, schema_id=1))

    def wanted(self, more: Written | None) -> dict[int, dict[str, Any]]:
        """All that a table of both writers must hold."""
        first = {offset: dict(row) for offset, row in self.first.wanted.items()}
        if more is None:
            return first
        ops = {offset: row.pop("_op") for offset, row in first.items() if "_op" in row}
        rows = {o: under(row, self.node, more.node, newer=False) for o, row in first.items()}
        for offset, row in more.wanted.items():
            row = dict(row)
            if "_op" in row:
                ops[offset] = row.pop("_op")
            rows[offset] = under(row, more.node, self.node, newer=True)
        return {
            offset: {**row, **({"_op": ops[offset]} if offset in ops else {})}
            for offset, row in rows.items()
        }

    # judging

    def check(self, folder: Path) -> None:
        """Files on disk, read by Arrow; no JVM."""
        columns = self.needed(self.first)
        assert columns is not None
        plan = self.plan(str(folder), columns)
        files = self.written(plan, self.first)
        self.compare(files, self.wanted(None))
        if self.kind == "avro":
            self.check_json(plan)
        more = self.next()
        if more is not None:
            plan = self.changed(plan, more)
            files += self.written(plan, more)
        sources = []
        for text in files:
            fact = json.loads(text)
            row_id = self.dice.choice([None, 1000]) if self.version == 3 else None
            sources.append(
                SourceFile(
                    fact["file-path"],
                    fact["record-count"],
                    fact["file-size-in-bytes"],
                    1,
                    True,
                    (),
                    row_id,
                )
            )
        done = rewrite(RewriteJob(plan.shape, "c", tuple(sources), (), 0.2, 2**30))
        self.compare([file.descriptor for file in done.files], self.wanted(more))

    def check_json(self, plan: TablePlan) -> None:
        """A table of the same types filled with documents, and a later writer's: its columns say
        how they are read."""
        table, node = self.handmade(plan), tabled(replace(self.node, optional=""))
        sent = Written(node, json=True)
        self.add_documents(sent, 6)
        self.compare(self.written(table, sent), sent.wanted)
        schemas = Schemas(self.dice, json=True)
        schemas.left, schemas.names = 6, self.schemas.names
        later = Written(evolved(node, schemas), 100, json=True)
        self.add_documents(later, 4)
        table = self.changed(table, later)
        wanted = {
            offset: under(row, later.node, node, newer=True) for offset, row in later.wanted.items()
        }
        self.compare(self.written(table, later), wanted)

    def handmade(self, plan: TablePlan) -> TablePlan:
        schema = json.loads(plan.shape.schema)
        _with_uuids(schema, self.node)
        text = json.dumps(schema)
        spec, order, properties = self.layout(text)
        return self.planned(
            replace(
                plan.shape,
                location=f"{plan.shape.location}/json",
                schema=text,
                spec=spec,
                properties=properties,
                sort_order=order,
            )
        )

    def compare(self, files: Sequence[str], wanted: Mapping[int, Any]) -> None:
        paths, tables = [], []
        for text in files:
            fact = json.loads(text)
            rows = pq.ParquetFile(fact["file-path"]).read()
            assert rows.num_rows == fact["record-count"]
            check_bounds(fact, rows)
            paths.append(fact["file-path"])
            tables.append(rows)
        for read in READERS:
            read(paths, tables, wanted)


def _with_uuids(kind: Any, node: Node) -> None:
    """In a schema of Iceberg's, text that is a UUID becomes one."""
    children = dict(node.inside)
    if node.kind == "record":
        for column in kind["fields"]:
            if column["name"] in children:
                child = children[column["name"]]
                column["type"] = "uuid" if child.kind == "uuid" else column["type"]
                _with_uuids(column["type"], child)
    elif node.kind in ("array", "map"):
        word = "element" if node.kind == "array" else "value"
        kind[word] = "uuid" if children[""].kind == "uuid" else kind[word]
        _with_uuids(kind[word], children[""])


# ── readers ──────────────────────────────────────────────────────────────────────────────────────

BESIDE = [
    "_topic",
    "_topic_partition",
    "_offset",
    "_timestamp",
    "_row_id",
    "_last_updated_sequence_number",
]


def read_by_arrow(
    paths: Sequence[str], tables: Sequence[pa.Table], wanted: Mapping[int, Any]
) -> None:
    rows: dict[int, Any] = {}
    for table in tables:
        some = rows_of(table, BESIDE)
        assert not rows.keys() & some.keys(), "a row is there twice"
        rows |= some
    compare(rows, wanted)


def read_by_duckdb(
    paths: Sequence[str], tables: Sequence[pa.Table], wanted: Mapping[int, Any]
) -> None:
    """Of `tables` it takes the types that are in the files, to know which ones DuckDB lacks."""
    table = (
        _duckdb()
        .execute("SELECT * FROM read_parquet(?, hive_partitioning = false)", [list(paths)])
        .to_arrow_table()
    )
    kinds = {column.name: column.type for column in tables[0].schema}
    lacking = {name for name, kind in kinds.items() if _lacks(kind)}
    expected = {
        offset: {
            name: told_by_duckdb(inside, kinds[name]) if name in lacking else inside
            for name, inside in row.items()
        }
        for offset, row in wanted.items()
    }
    compare(rows_of(table, BESIDE), expected, "DuckDB")


@functools.cache
def _duckdb() -> duckdb.DuckDBPyConnection:
    """One in a process. No file is read twice: a cache of them would fill the memory."""
    connection = duckdb.connect()
    connection.execute("SET threads = 1; SET TimeZone = 'UTC'")
    connection.execute("SET enable_external_file_cache = false; SET memory_limit = '256MB'")
    return connection


def _lacks(kind: pa.DataType) -> bool:
    """Has DuckDB another type for it? Nanoseconds with a zone are TIMESTAMPTZ, microseconds. A
    UUID, it has, and gives it to Arrow as text."""
    if pa.types.is_map(kind):
        return _lacks(kind.item_type)
    if pa.types.is_nested(kind):
        return any(_lacks(kind.field(at).type) for at in range(kind.num_fields))
    return kind == pa.timestamp("ns", "UTC") or kind == pa.uuid()


def told_by_duckdb(wanted: Any, kind: pa.DataType) -> Any:
    """A value as DuckDB tells it in the type that it has instead; all others as they are."""
    if wanted is None:
        return None
    if pa.types.is_struct(kind):
        return {column.name: told_by_duckdb(wanted[column.name], column.type) for column in kind}
    if pa.types.is_map(kind):
        return [(key, told_by_duckdb(inside, kind.item_type)) for key, inside in wanted]
    if pa.types.is_nested(kind):
        return [told_by_duckdb(item, kind.value_type) for item in wanted]
    if kind == pa.timestamp("ns", "UTC") and abs(wanted) != 2**63 - 1:  # its infinities
        return wanted // 1000 if wanted >= 0 else -(-wanted // 1000)
    return str(uuid.UUID(bytes=wanted)) if kind == pa.uuid() else wanted


READERS = [read_by_arrow, read_by_duckdb]


def compare(rows: Mapping[int, Any], wanted: Mapping[int, Any], reader: str = "") -> None:
    assert rows.keys() == wanted.keys()
    for offset, row in wanted.items():
        got = rows[offset]
        if got != row:
            name = next(n for n in {**row, **got} if got.get(n, ...) != row.get(n, ...))
            expected, shown = (str(one.get(name, "none"))[:300] for one in (row, got))
            raise AssertionError(
                f"offset {offset}, column {name!r}: expected {expected}, found {shown}"
                + (f" by {reader}" if reader else "")
            )
