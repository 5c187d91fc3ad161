"""Avro types → Arrow types, a strict reader for each, and what compiled code needs to know. Runs on
executors; pure.

In: a schema as parsed JSON. Out: an `AvroType` for each column. Its reader takes one datum at a
time, accepts nothing that the schema does not say, and gives the reason. Compiled code
(`frazil.native.avro`) reads datums by a program of the nodes, and must come to the same result.

A schema that no Iceberg table can hold raises `UnsupportedSchema`: recursion, null alone, a struct
without fields. This also bounds hostile data: each array item takes at least one byte, so a count
cannot exceed the number of bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

from frazil.arrow.avro_datum import Datum, UnreadableDatum
from frazil.native import avro as native

#: Nesting limit for every format. pyiceberg uses 15 stack frames per column level, and Python's
#: recursion limit is 1,000.
MAX_DEPTH = 48
MAX_TYPES = 10_000  # after references to named types are expanded
#: A fixed of more bytes takes no space where it is null.
LARGE_FIXED = 256
#: Metadata of a column: the name that Kafka Connect gives its type (see `pipeline.connect_types`).
CONNECT = b"frazil.connect"

Read = Callable[["Datum"], Any]


class UnsupportedSchema(Exception):
    """A schema that cannot become a table."""


@dataclass(frozen=True, slots=True)
class AvroType:
    """One Avro type: its Arrow type, its strict reader, and its node in a program."""

    arrow: pa.DataType
    read: Read
    #: of the node: its kind, None if compiled code cannot read the type; words of it; the types
    #: inside; the symbols of an enum
    kind: int | None
    words: Mapping[int, int] = field(default_factory=dict)
    inside: Sequence[AvroType] = ()
    symbols: Sequence[str] = ()
    nullable: bool = False
    #: Kafka Connect's name of the type, if it is one of `_DEBEZIUM`
    connect: str = ""

    def field(self, name: str) -> pa.Field:
        metadata = {CONNECT: self.connect.encode()} if self.connect else None
        return pa.field(name, self.arrow, self.nullable, metadata)


class ColumnBuilder:
    """Avro's JSON schema → `AvroType`s. Keeps the named types seen so far."""

    def __init__(self) -> None:
        self.named: dict[str, tuple[dict[str, Any], str]] = {}
        self.open: list[str] = []  # records being built, outermost first
        self.path: list[str] = []  # of the column being built
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.count = 0

    def type(self, schema: Any, space: str, depth: int) -> AvroType:
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_TYPES:
            raise UnsupportedSchema(
                f"the schema is too large; expected at most {MAX_DEPTH} levels "
                f"and {MAX_TYPES} types"
            )
        if isinstance(schema, list):
            return self.union(schema, space, depth)
        if isinstance(schema, dict):
            kind = schema.get("type")
            if isinstance(kind, (dict, list)):
                return self.type(kind, space, depth + 1)
        else:
            kind, schema = schema, {}
        if not isinstance(kind, str):
            raise UnsupportedSchema(f"expected an Avro type, found {kind!r}")
        if kind == "null":
            raise UnsupportedSchema("a column that is always null; Iceberg has no such type")
        if kind in ("record", "error"):
            fields = self.fields(schema, space, depth)
            if not fields:
                raise UnsupportedSchema(
                    f"record {schema.get('name')} has no fields; "
                    "Parquet has no struct without fields"
                )
            return replace(record_type(fields), connect=_connect("record", schema))
        if kind == "array":
            return _array(self.inside("element", _part(schema, "items"), space, depth))
        if kind == "map":
            return _map(self.inside("value", _part(schema, "values"), space, depth))
        if kind in ("enum", "fixed"):
            self.name(schema, space)
            return _enum(schema) if kind == "enum" else _fixed(schema)
        if kind in _PRIMITIVES:
            return _primitive(kind, schema)
        return self.reference(kind, space, depth)

    def inside(self, name: str, schema: Any, space: str, depth: int) -> AvroType:
        self.path.append(name)
        try:
            return self.type(schema, space, depth + 1)
        finally:
            self.path.pop()

    def name(self, schema: dict[str, Any], space: str) -> tuple[str, str]:
        """Registers a named type. Returns its full name and the namespace for its nested types."""
        name = _text(_part(schema, "name"))
        space = _text(schema.get("namespace", space) or "")
        full = name if "." in name or not space else f"{space}.{name}"
        self.named[full] = schema, full.rpartition(".")[0]
        return full, full.rpartition(".")[0]

    def reference(self, name: str, space: str, depth: int) -> AvroType:
        full = f"{space}.{name}" if space and "." not in name else name
        full = full if full in self.named else name
        if full not in self.named:
            raise UnsupportedSchema(f"type {name} is not known")
        if full in self.open:
            way = " → ".join([*self.open[self.open.index(full) :], full])
            raise UnsupportedSchema(
                f"the schema is recursive ({way}); Iceberg has no recursive types"
            )
        schema, inner = self.named[full]
        return self.type({**schema, "namespace": inner}, inner, depth + 1)

    def fields(self, schema: dict[str, Any], space: str, depth: int) -> dict[str, AvroType]:
        full, space = self.name(schema, space)
        self.open.append(full)
        fields: dict[str, AvroType] = {}
        for entry in _list(_part(schema, "fields")):
            name = _text(_part(entry, "name"))
            if name in fields:
                raise UnsupportedSchema(f"record {full} has field {name!r} twice")
            try:
                fields[name] = self.inside(name, _part(entry, "type"), space, depth)
            except UnsupportedSchema as error:
                raise UnsupportedSchema(f"field {name}: {error}") from None
            if isinstance(olds := entry.get("aliases"), list):
                path = ".".join([*self.path, name])
                self.aliases[path] = tuple(alias for alias in olds if _is_text(alias))
        self.open.pop()
        return fields

    def union(self, branches: list[Any], space: str, depth: int) -> AvroType:
        null = [branch in ("null", {"type": "null"}) for branch in branches]
        numbers = iter(range(len(branches)))
        several = len(branches) - sum(null) > 1
        types = [
            None
            if is_null
            else self.inside(f"member{next(numbers)}", branch, space, depth)
            if several
            else self.type(branch, space, depth + 1)
            for branch, is_null in zip(branches, null, strict=True)
        ]
        real = [avro_type for avro_type in types if avro_type]
        if not real:
            raise UnsupportedSchema("a column that is always null; Iceberg has no such type")
        if sum(null) > 1 or any(isinstance(branch, list) for branch in branches):
            raise UnsupportedSchema(
                "a union within a union, or null twice in one; Avro allows neither"
            )
        if len(real) == 1:
            return _optional(real[0], null[0]) if len(types) == 2 else _only(real[0])
        return _members(types)


def _part(schema: Any, key: str) -> Any:
    if not isinstance(schema, dict) or key not in schema:
        raise UnsupportedSchema(f"expected a part {key!r}, found {json.dumps(schema)[:80]}")
    return schema[key]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UnsupportedSchema(f"expected a list, found {json.dumps(value)[:80]}")
    return value


def _text(value: Any) -> str:
    if not _is_text(value):
        raise UnsupportedSchema(f"expected a name, found {json.dumps(value)[:80]}")
    return str(value)


def _is_text(value: Any) -> bool:
    """JSON can escape half of a surrogate pair, which is not valid text."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _number(low: int, high: int, arrow: pa.DataType, times: int = 1) -> AvroType:
    """An integer with bounds, multiplied by `times`, as `arrow`."""

    def read(datum: Datum) -> int:
        value = datum.long()
        if not low <= value <= high:
            raise UnreadableDatum(f"expected {low} to {high}, found {value}")
        return value * times

    kind = native.NUMBER8 if arrow.bit_width == 64 else native.NUMBER4
    words = {native.LOW: low, native.HIGH: high, native.TIMES: times}
    return AvroType(arrow, read, kind, words)


_INT32 = -(2**31), 2**31 - 1
_INT64 = -(2**63), 2**63 - 1
_MILLIS = -(2**63 // 1000), (2**63 - 1) // 1000  # the range that fits in microseconds
_DAY = 86_400_000
_UTC = pa.timestamp("us", "UTC")
_LOCAL = pa.timestamp("us")
_TIME = pa.time64("us")
_NUMBERS: Mapping[tuple[str, str], AvroType] = {
    ("int", ""): _number(*_INT32, pa.int32()),
    ("int", "date"): _number(*_INT32, pa.date32()),
    ("int", "time-millis"): _number(0, _DAY - 1, _TIME, 1000),
    ("long", ""): _number(*_INT64, pa.int64()),
    ("long", "time-micros"): _number(0, _DAY * 1000 - 1, _TIME),
    ("long", "timestamp-millis"): _number(*_MILLIS, _UTC, 1000),
    ("long", "timestamp-micros"): _number(*_INT64, _UTC),
    ("long", "timestamp-nanos"): _number(*_INT64, pa.timestamp("ns", "UTC")),
    ("long", "local-timestamp-millis"): _number(*_MILLIS, _LOCAL, 1000),
    ("long", "local-timestamp-micros"): _number(*_INT64, _LOCAL),
    ("long", "local-timestamp-nanos"): _number(*_INT64, pa.timestamp("ns")),
}


def _read_string(datum: Datum) -> str:
    try:
        return datum.take(datum.long()).decode()
    except UnicodeDecodeError as error:
        raise UnreadableDatum(f"expected UTF-8, found {error.reason}") from None


def _read_float(datum: Datum) -> float:
    return float(struct.unpack("<f", datum.take(4))[0])


def _read_double(datum: Datum) -> float:
    return float(struct.unpack("<d", datum.take(8))[0])


def _read_bytes(datum: Datum) -> bytes:
    return datum.take(datum.long())


_PRIMITIVES: Mapping[str, AvroType] = {
    "int": _NUMBERS["int", ""],
    "long": _NUMBERS["long", ""],
    "float": AvroType(pa.float32(), _read_float, native.PLAIN),
    "double": AvroType(pa.float64(), _read_double, native.PLAIN),
    # As in Avro's Java library: 1 is true, any other byte is false.
    "boolean": AvroType(pa.bool_(), lambda datum: datum.take(1) == b"\x01", native.BOOLEAN),
    "string": AvroType(pa.large_string(), _read_string, native.TEXT),
    "bytes": AvroType(pa.large_binary(), _read_bytes, native.BYTES),
}
#: Debezium's named types → Avro logical types. The others keep their underlying type; what becomes
#: of them is decided with the table, since not every value fits the type that the name suggests.
_DEBEZIUM: Mapping[tuple[str, str], str] = {
    ("int", "io.debezium.time.Date"): "date",
    ("long", "io.debezium.time.Timestamp"): "local-timestamp-millis",
    ("long", "io.debezium.time.MicroTimestamp"): "local-timestamp-micros",
    ("int", "io.debezium.time.Time"): "",
    ("long", "io.debezium.time.MicroTime"): "",
    ("long", "io.debezium.time.NanoTime"): "",
    ("long", "io.debezium.time.NanoTimestamp"): "",
    ("string", "io.debezium.time.ZonedTimestamp"): "",
    ("string", "io.debezium.data.Uuid"): "",
    ("record", "io.debezium.data.VariableScaleDecimal"): "",
}


def _connect(kind: str, schema: dict[str, Any]) -> str:
    name = str(schema.get("connect.name"))
    return name if (kind, name) in _DEBEZIUM else ""


def _primitive(kind: str, schema: dict[str, Any]) -> AvroType:
    # The Avro specification ignores a logical type that is unknown or on the wrong type.
    connect = _connect(kind, schema)
    logical = schema.get("logicalType") or _DEBEZIUM.get((kind, connect))
    if kind == "bytes" and logical == "decimal":
        return _decimal(schema, _read_bytes, 0) or _PRIMITIVES[kind]
    plain = _NUMBERS.get((kind, str(logical))) or _PRIMITIVES[kind]
    return replace(plain, connect=connect) if connect else plain


def _decimal(schema: dict[str, Any], read: Read, size: int) -> AvroType | None:
    """`size`: of its bytes, 0 if each has a size of its own. None: not a valid decimal."""
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if type(precision) is not int or type(scale) is not int:
        return None
    if precision < 1 or not 0 <= scale <= precision:
        return None
    if scale > 38:
        raise UnsupportedSchema(f"expected a decimal scale of at most 38, found {scale}")
    # Iceberg has 38 digits. Kafka Connect's decimals have no precision, and Confluent's converter
    # registers 64 for all of them: whether a value fits is checked per value.
    precision = min(precision, 38)
    most = 10**precision - 1
    context = Context(prec=38)

    def read_decimal(datum: Datum) -> Decimal:
        unscaled = int.from_bytes(read(datum), "big", signed=True)
        if not -most <= unscaled <= most:
            raise UnreadableDatum(f"expected a decimal of at most {precision} digits, found more")
        return Decimal(unscaled).scaleb(-scale, context)

    high, low = divmod(most, 1 << 64)
    low -= low >> 63 << 64  # a word is signed
    words = {native.SIZE: size, native.MOST_HIGH: high, native.MOST_LOW: low}
    return AvroType(pa.decimal128(precision, scale), read_decimal, native.DECIMAL, words)


def _fixed(schema: dict[str, Any]) -> AvroType:
    size = _part(schema, "size")
    if type(size) is not int or not 0 < size < 2**31:
        raise UnsupportedSchema(f"expected a fixed of at least one byte, found {size!r}")
    read: Read = lambda datum: datum.take(size)  # noqa: E731
    if schema.get("logicalType") == "decimal":
        decimal = _decimal(schema, read, size)
        if decimal:
            return decimal
    # A place for every row, null or not: a huge optional fixed would exhaust memory.
    if size > LARGE_FIXED:
        return AvroType(pa.binary(size), read, native.BYTES, {native.SIZE: size})
    return AvroType(pa.binary(size), read, native.PLAIN)


def _enum(schema: dict[str, Any]) -> AvroType:
    symbols = [_text(symbol) for symbol in _list(_part(schema, "symbols"))]

    def read(datum: Datum) -> Any:
        index = datum.long()
        if not 0 <= index < len(symbols):
            raise UnreadableDatum(f"expected a symbol from 0 to {len(symbols) - 1}, found {index}")
        return symbols[index]

    return AvroType(
        pa.large_string(), read, native.ENUM, {native.SYMBOLS: len(symbols)}, symbols=symbols
    )


def record_type(fields: dict[str, AvroType]) -> AvroType:
    arrow = pa.struct([avro_type.field(name) for name, avro_type in fields.items()])
    parts = [(name, avro_type.read) for name, avro_type in fields.items()]

    def read(datum: Datum) -> dict[str, Any]:
        row = {}
        name = ""
        try:
            for name, part in parts:
                row[name] = part(datum)
        except UnreadableDatum as error:
            error.path.append(name)
            raise
        return row

    return AvroType(arrow, read, native.RECORD, inside=list(fields.values()))


def _blocks(datum: Datum, read: Read) -> list[Any]:
    items: list[Any] = []
    while True:
        count = datum.long()
        if count < 0:
            datum.long()  # the block's size in bytes: only needed to skip it
            # The minimum long is read as no items: it has no positive counterpart.
            count = -count if count != -(2**63) else 0
        elif count == 0:
            return items
        # Each item takes at least one byte, so a count above the bytes left is invalid.
        if count > len(datum.data) - datum.place:
            raise UnreadableDatum(f"expected at most one item a byte, found a count of {count}")
        items.extend(read(datum) for _ in range(count))


def _array(item: AvroType) -> AvroType:
    arrow = pa.large_list(item.field("element"))

    return AvroType(arrow, lambda datum: _blocks(datum, item.read), native.ARRAY, inside=[item])


def _map(value: AvroType) -> AvroType:
    arrow = pa.map_(pa.large_string(), value.field("value"))

    def pair(datum: Datum) -> tuple[str, Any]:
        return _read_string(datum), value.read(datum)

    inside = [_PRIMITIVES["string"], value]
    return AvroType(arrow, lambda datum: _blocks(datum, pair), native.MAP, inside=inside)


def _optional(real: AvroType, null_first: bool) -> AvroType:
    def read(datum: Datum) -> Any:
        index = datum.long()
        if index not in (0, 1):
            raise UnreadableDatum(f"expected branch 0 or 1 of a union, found {index}")
        return None if (index == 0) is null_first else real.read(datum)

    return replace(_in_union(real, 2, 0 if null_first else 1), read=read, nullable=True)


def _only(real: AvroType) -> AvroType:
    """A union of one branch: an index that is always 0, then the value."""

    def read(datum: Datum) -> Any:
        index = datum.long()
        if index != 0:
            raise UnreadableDatum(f"expected the only branch of the union, found {index}")
        return real.read(datum)

    return replace(_in_union(real, 1, -1), read=read, nullable=False)


def _in_union(real: AvroType, branches: int, null: int) -> AvroType:
    """Avro allows no union within a union; in other words (`{"type": [...]}`) there may be one."""
    if native.BRANCHES in real.words:
        return replace(real, kind=None)
    words = {**real.words, native.BRANCHES: branches, native.NULL_BRANCH: null}
    return replace(real, words=words)


def _members(types: list[AvroType | None]) -> AvroType:
    """A union of several branches: a struct with one optional member per branch."""
    names = iter(f"member{i}" for i in range(len(types)))
    named = [(next(names), avro_type) if avro_type else None for avro_type in types]
    arrow = pa.struct([pa.field(*_pair(member)) for member in named if member])

    def read(datum: Datum) -> dict[str, Any] | None:
        index = datum.long()
        if not 0 <= index < len(named):
            raise UnreadableDatum(f"expected a branch from 0 to {len(named) - 1}, found {index}")
        member = named[index]
        return {member[0]: member[1].read(datum)} if member else None

    null = types.index(None) if None in types else -1
    words = {native.BRANCHES: len(types), native.NULL_BRANCH: null}
    inside = [replace(avro_type, nullable=True) for avro_type in types if avro_type]
    return AvroType(arrow, read, native.UNION, words, inside, nullable=null >= 0)


def _pair(member: tuple[str, AvroType]) -> tuple[str, pa.DataType]:
    return member[0], member[1].arrow
