"""Random schemas and values from bytes to a table and back, judged by the values that were encoded.

    schema ─▶ values ─▶ fastavro or json ─▶ decode, settle, write ─▶ data files ─▶ pyarrow ─▶ same?
                                              └─▶ evolve, write more ─▶ compact ─▶ pyarrow ─▶ same?

A `Case` comes from a number alone. Every type of Avro and JSON, down to six levels; optional
records with required fields, empty and over-long values, the ends of numbers and of time, NaN and
both zeros, the neighbours of half surrogate pairs. Nothing of the code it judges is used to say
what a value must be: dates and moments are numbers, decimals their digits, floats their bits.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from frazil.config.model import RouteConfig, TableConfig
from frazil.files.rewrite import RewriteJob, SourceFile, rewrite
from frazil.files.writer import TableWriter, WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import (
    SchemaUpdate,
    iceberg_schema,
    partition_spec,
    sort_order,
    update,
)
from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline, TablePlan, aliases_of
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules

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
    #: of a record: name, what it is in Avro, type; of an array or map: one without a name
    inside: tuple[tuple[str, Node], ...] = ()
    optional: str = ""  # first or last: where the union has its null
    #: names of fields that were renamed → what they were
    olds: Mapping[str, str] = field(default_factory=dict)


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


def decimal(precision: int, size: int | None) -> Callable[[random.Random], tuple[bytes, Any]]:
    most = 10 ** min(precision, 38) - 1

    def draw(dice: random.Random) -> tuple[bytes, Any]:
        value = dice.choice([0, 1, -1, most, -most, dice.randint(-most, most)])
        least = (value.bit_length() + 8) // 8
        return value.to_bytes(size or least + dice.randint(0, 1), "big", signed=True), (
            "decimal",
            value,
        )

    return draw


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
    lambda s: Node("string", logical("string", "uuid"), same(lambda d: UUID)),
    lambda s: s.decimal(),
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

    def decimal(self) -> Node:
        precision = self.dice.choice([1, 9, 10, 18, 19, 38])
        scale = self.dice.randint(0, precision)
        more = {"precision": precision, "scale": scale}
        if self.dice.random() < 0.5:
            return Node("decimal", logical("bytes", "decimal", **more), decimal(precision, None))
        size = ((10**precision).bit_length() + 8) // 8
        avro = logical("fixed", "decimal", name=self.name("F"), size=size, **more)
        return Node("decimal", avro, decimal(precision, size))

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
            return self.dice.choice(
                [
                    Node("boolean", None, same(lambda d: d.random() < 0.5)),
                    Node("long", None, whole(64)),
                    Node("double", None, _finite),
                    Node("string", None, same(text)),
                ]
            )
        found = self.dice.choice(LEAVES)(self)
        while self.engines and found.kind in ("time", "nanos"):
            found = self.dice.choice(LEAVES)(self)
        if self.engines and found.kind in ("date", "moment"):
            millis = "millis" in found.avro["logicalType"]
            day = 1 if found.kind == "date" else 86_400_000 if millis else 86_400_000_000
            draw = _between(-719_162 * day, 2_932_896 * day, 1000 if millis else 1)
            found = replace(found, draw=draw)
        return found

    def node(self, depth: int, bare: bool = False) -> Node:
        if depth < DEPTH and self.left > 4 and self.dice.random() < 0.5:
            word = self.dice.choice(["record", "record", "array", "array", "map", "union"])
            if word == "record":
                found = self.record(depth + 1)
            elif word == "union" and not self.json and not bare:
                return self.union()
            elif word == "map" and not self.json:
                found = Node("map", inside=(("", self.node(depth + 1)),))
            else:
                found = Node("array", inside=(("", self.node(depth + 1)),))
        else:
            found = self.leaf()
        optional = "" if bare or self.dice.random() < 0.5 else self.dice.choice(["first", "last"])
        return replace(found, optional="first" if self.json else optional)

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


def _finite(dice: random.Random) -> tuple[float, Any]:
    value = dice.choice([0.5, -1e300, 5e-324, 1.5, dice.uniform(-1e3, 1e3) + 0.1])
    return value, bits(value)


def avro_of(node: Node) -> Any:
    if node.kind == "record":
        fields = []
        for name, inside in node.inside:
            field = {"name": name, "type": avro_of(inside)}
            fields.append(field | ({"aliases": [node.olds[name]]} if name in node.olds else {}))
        found: Any = {"type": "record", "name": node.avro, "fields": fields}
    elif node.kind == "array":
        found = {"type": "array", "items": avro_of(node.inside[0][1])}
    elif node.kind == "map":
        found = {"type": "map", "values": avro_of(node.inside[0][1])}
    else:
        found = node.avro
    return {"": found, "first": ["null", found], "last": [found, "null"]}[node.optional]


def plain(schema: Any) -> Any:
    """Without logical types: so fastavro takes numbers and bytes as they are."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: each
        for key, each in schema.items()
        if key not in ("logicalType", "precision", "scale")
    }
    nested = ("type", "items", "values", "fields")
    return {key: plain(each) if key in nested else each for key, each in kept.items()}


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
    assert node.draw is not None
    return node.draw(dice)


class Unsayable(Exception):
    """JSON, or a calendar that ends with the year 9999, has no text for it."""


def json_of(node: Node, wanted: Any) -> Any:
    """A value that must come back, as a JSON document says it to a table with such a column."""
    if wanted is None:
        return None
    if node.kind == "record":
        return {name: json_of(inside, wanted[name]) for name, inside in node.inside}
    if node.kind == "array":
        return [json_of(node.inside[0][1], each) for each in wanted]
    if node.kind == "map":
        return {key: json_of(node.inside[0][1], each) for key, each in wanted}
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
        digits = str(abs(wanted[1])).rjust(node.avro["scale"] + 1, "0")
        at = len(digits) - node.avro["scale"]
        sign = "-" if wanted[1] < 0 else ""
        return f"{sign}{digits[:at]}.{digits[at:]}" if node.avro["scale"] else f"{sign}{digits}"
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
    """A later writer's: fields added, left out, renamed, made optional, numbers widened."""
    dice = schemas.dice
    if node.kind == "record":
        inside, olds = [], {}
        for name, child in node.inside:
            if len(node.inside) > 1 and inside and dice.random() < 0.1:
                continue
            if dice.random() < 0.15:
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
    elif node.kind in ("int", "float") and dice.random() < 0.5:
        wide = {
            "int": Node("long", "long", whole(64)),
            "float": Node("double", "double", floats("<d")),
        }
        node = replace(wide[node.kind], optional=node.optional)
    if not node.optional and node.kind != "union" and dice.random() < 0.2:
        node = replace(node, optional="last")
    return node


def under(wanted: Any, mine: Node, other: Node, newer: bool) -> Any:
    """A value of one writer as a table of both has it. `newer`: it is the later writer's."""
    if wanted is None:
        return None
    if mine.kind == "record":
        renamed = (mine if newer else other).olds
        found = {}
        theirs = dict(other.inside)
        for name, child in mine.inside:
            if newer:
                there = renamed.get(name, name)
                final = name
            else:
                final = next((now for now, was in renamed.items() if was == name), name)
                there = final
            like = theirs.get(there)
            found[final] = wanted[name] if like is None else under(wanted[name], child, like, newer)
        for name, _ in other.inside:
            final = (
                next((now for now, was in renamed.items() if was == name), name) if newer else name
            )
            found.setdefault(final, None)
        return found
    if mine.kind == "array":
        return [under(each, mine.inside[0][1], other.inside[0][1], newer) for each in wanted]
    if mine.kind == "map":
        return [
            (key, under(each, mine.inside[0][1], other.inside[0][1], newer)) for key, each in wanted
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
                holder, key = next(each for each in kind["fields"] if each["name"] == word), "type"
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
        for each in kind:
            yield from _ids(each)


def _shift(kind: Any, by: int) -> None:
    if isinstance(kind, dict):
        for key, inside in kind.items():
            if key in ("id", "element-id", "key-id", "value-id"):
                kind[key] = inside + by
            _shift(inside, by)
    elif isinstance(kind, list):
        for each in kind:
            _shift(each, by)


# ── what comes back ──────────────────────────────────────────────────────────────────────────────


def canonical(scalar: Any) -> Any:
    """A value of Arrow's as the oracle has it."""
    if isinstance(scalar, pa.ExtensionScalar):
        scalar = scalar.value
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pa.types.is_struct(kind):
        return {each.name: canonical(scalar[at]) for at, each in enumerate(kind)}
    if pa.types.is_map(kind):
        pairs = scalar.values
        return [(canonical(each[0]), canonical(each[1])) for each in pairs]
    if pa.types.is_nested(kind):
        return [canonical(each) for each in scalar.values]
    if pa.types.is_temporal(kind):
        return scalar.value
    if pa.types.is_decimal(kind):
        found = scalar.as_py().as_tuple()
        number = int("".join(map(str, found.digits)) or "0")
        return "decimal", -number if found.sign else number
    return bits(scalar.as_py()) if pa.types.is_floating(kind) else scalar.as_py()


def rows_of(table: pa.Table, metadata: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
    """By offset."""
    names = [name for name in table.schema.names if name not in metadata]
    found = {}
    for at, offset in enumerate(table.column("_offset").to_pylist()):
        assert offset not in found, f"offset {offset} is there twice"
        found[offset] = {name: canonical(table.column(name)[at]) for name in names}
    return found


def check_bounds(fact: Mapping[str, Any], rows: pa.Table) -> None:
    ids = {int(each.metadata[b"PARQUET:field_id"]): each for each in rows.schema}
    for key, low in (("lower-bounds", True), ("upper-bounds", False)):
        said = fact.get(key) or {"keys": [], "values": []}
        for number, bound in zip(said["keys"], said["values"], strict=True):
            column = ids[number]
            limit = _bound(column.type, bytes.fromhex(bound))
            for each in rows.column(column.name):
                value = canonical(each)
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
    values: list[bytes]
    wanted: dict[int, dict[str, Any]]
    #: positions of values that are broken
    broken: set[int] = field(default_factory=set)


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
        dice = self.dice
        found = Written(node, [], {})
        schema = fastavro.parse_schema(plain(self.avro(node))) if self.kind != "json" else None
        for offset in range(start, start + dice.choice([1, 2, 5, 12])):
            given, wanted = value(node, dice, full=self.kind == "json" and offset == start)
            if self.kind == "json":
                found.values.append(json.dumps(given, ensure_ascii=dice.random() < 0.5).encode())
            else:
                if self.kind == "debezium":
                    given, wanted = self.change(given, wanted)
                out = io.BytesIO()
                fastavro.schemaless_writer(out, schema, given)
                found.values.append(out.getvalue())
            found.wanted[offset] = wanted
        if dice.random() < 0.3:  # one that is broken, and takes the careful way with its neighbours
            found.broken.add(len(found.values))
            found.values.append(b"{" if self.kind == "json" else b"")
        return found

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

    def format(self, node: Node) -> RecordFormat:
        return (
            RecordFormat("json")
            if self.kind == "json"
            else RecordFormat("avro", json.dumps(self.avro(node)))
        )

    def settler(self, node: Node, *plans: TablePlan) -> ChunkPipeline:
        rules = None
        if self.kind == "debezium":
            rules = RoutingRules(
                [RouteConfig(topics=(HERE.topic,), to=(TABLE,), envelope="debezium")], [TABLE]
            )
        tables = {each.shape.name: each for each in plans}
        return ChunkPipeline(self.format(node), rules, tables, None, TABLE)

    def opened(self, sent: Written) -> RawRecords:
        start = min(sent.wanted)
        offsets = np.arange(start, start + len(sent.values), dtype=np.int64)
        return RawRecords(list(sent.values), offsets, offsets * 1000, None, None)

    def needed(self, sent: Written, *plans: TablePlan) -> pa.Schema | None:
        settled = self.settler(sent.node, *plans).settle(HERE, self.opened(sent), None, frozenset())
        return settled.needs.get(TABLE)

    def rows(self, sent: Written, plan: TablePlan) -> list[pa.Table]:
        settler = self.settler(sent.node, plan)
        settled = settler.settle(HERE, self.opened(sent), None, frozenset())
        assert not settled.needs, f"still needed: {settled.needs}"
        assert set(settled.letters) == sent.broken, {
            i: x.reason for i, x in settled.letters.items()
        }
        return [rows for _, rows in settled.rows]

    def layout(self, schema: str) -> tuple[str, str, dict[str, str]]:
        """A partition spec, a sort order and properties that the table may have."""
        dice, spec, order = self.dice, partition_spec(schema, (), TABLE), ""
        terms = []
        for each in json.loads(schema)["fields"]:
            kind, name = each["type"], each["name"]
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
        if self.kind == "json":
            return None
        self.schemas.left = 12
        node = replace(evolved(replace(self.node, optional=""), self.schemas), optional="")
        if self.version < 3 and "nanos" in str(avro_of(node)):
            return None
        return self.sent(node, max(self.first.wanted) + 100)

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
            beside={each.name for each in METADATA.fields},
        )
        schema = applied(plan.shape.schema, change)
        return self.planned(replace(plan.shape, schema=schema, schema_id=1))

    def wanted(self, more: Written | None) -> dict[int, dict[str, Any]]:
        """All that a table of both writers must hold."""
        first = {offset: dict(row) for offset, row in self.first.wanted.items()}
        if more is None:
            return first
        ops = {offset: row.pop("_op") for offset, row in first.items() if "_op" in row}
        found = {o: under(row, self.node, more.node, newer=False) for o, row in first.items()}
        for offset, row in more.wanted.items():
            row = dict(row)
            if "_op" in row:
                ops[offset] = row.pop("_op")
            found[offset] = under(row, more.node, self.node, newer=True)
        return {
            offset: {**row, **({"_op": ops[offset]} if offset in ops else {})}
            for offset, row in found.items()
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
        """The same table filled with documents: its columns say how they are read."""
        values, wanted = [], {}
        for _ in range(6):
            with suppress(Unsayable):
                _, row = value(replace(self.node, optional=""), self.dice)
                document = json.dumps(
                    json_of(self.node, row), ensure_ascii=self.dice.random() < 0.5
                )
                wanted[len(values)] = row
                values.append(document.encode())
        if values:
            settler = ChunkPipeline(RecordFormat("json"), None, {TABLE: plan}, None, TABLE)
            sent = Written(self.node, values, wanted)
            settled = settler.settle(HERE, self.opened(sent), None, frozenset())
            reasons = {i: letter.reason for i, letter in settled.letters.items()}
            assert not reasons, f"of {values[min(reasons)][:300]!r}: {reasons[min(reasons)]}"
            writer = TableWriter(plan.shape, "j")
            for _, rows in settled.rows:
                writer.write(rows)
            self.compare([file.descriptor for file in writer.close()], wanted)

    def compare(self, files: Sequence[str], wanted: Mapping[int, Any]) -> None:
        found: dict[int, Any] = {}
        for text in files:
            fact = json.loads(text)
            rows = pq.ParquetFile(fact["file-path"]).read()
            assert rows.num_rows == fact["record-count"]
            check_bounds(fact, rows)
            beside = [
                "_topic",
                "_topic_partition",
                "_offset",
                "_timestamp",
                "_row_id",
                "_last_updated_sequence_number",
            ]
            mine = rows_of(rows, beside)
            assert not found.keys() & mine.keys(), "a row is there twice"
            found |= mine
        compare(found, wanted)


def compare(found: Mapping[int, Any], wanted: Mapping[int, Any]) -> None:
    assert found.keys() == wanted.keys()
    for offset, row in wanted.items():
        if found[offset] != row:
            names = [
                n for n in {**row, **found[offset]} if found[offset].get(n, ...) != row.get(n, ...)
            ]
            expected, there = (
                str(each.get(names[0], "none"))[:300] for each in (row, found[offset])
            )
            raise AssertionError(
                f"offset {offset}, column {names[0]!r}: expected {expected}, found {there}"
            )
