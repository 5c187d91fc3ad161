"""Bytes → columns, or rejected. Runs on executors; the second station of the data's way.

In: the values of a chunk of records. Out: tables of plain Arrow types, one for each writer schema,
and a `Rejected` for each value that cannot be read. Every value is in exactly one of them.

Promises: a value is good or rejected by itself, whatever else is in the chunk; bad data never
raises. What raises is the world around: a registry that does not answer (`Unavailable`), one that
refuses us or a setting that makes no sense (`ConfigError`).

Avro is read in `frazil.ingest.avro`. JSON is read here in the same manner: all values at once by
pyarrow, each wrapped with a tag, and if anything is odd one by one. The one-by-one reader is the
rule; the fast one is used only for types where it is known to agree.
"""

from __future__ import annotations

import base64
import binascii
import functools
import importlib
import io
import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from decimal import Context, Decimal, DecimalException
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from frazil.core.errors import ConfigError, Miscount, Misfit, Unavailable, Undecodable
from frazil.ingest.avro import BLOCK_ROWS, Unfit, Writer, open_block, preamble, sift
from frazil.ingest.records import Layout, Longs, Records

KINDS = ("confluent-avro", "avro", "json", "raw")
RAW = pa.schema([pa.field("value", pa.large_binary())])
HEADER = 5  # a zero byte, then the schema's id in 4 bytes


@dataclass(frozen=True, slots=True)
class Format:
    """What the configuration says about the values of a topic. Can be pickled."""

    kind: str
    schema: str = ""
    registry: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds secrets

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"cannot decode values: expected one of {', '.join(KINDS)}, found {self.kind!r}"
            )
        if self.kind == "avro" and not self.schema:
            raise ConfigError("cannot decode avro: expected a schema, found none")
        if self.kind == "confluent-avro" and not (self.schema or self.registry.get("url")):
            raise ConfigError(
                "cannot decode confluent-avro: expected a registry url or a schema, found neither"
            )


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of one writer schema, in the order of the input."""

    rows: pa.Table
    index: np.ndarray[Any, np.dtype[np.int64]] | None  # positions in the input; None: all
    schema_id: int | None


class Framed(NamedTuple):
    """Kafka's batches in columns, with what stands beside each value. No record has headers."""

    decoded: Decoded
    offsets: Longs
    stamps: Longs
    keys: pa.Array | None  # large_binary; None: no record has one


@dataclass(frozen=True, slots=True)
class Rejected:
    """A value that cannot be read: itself a value, never an exception."""

    index: int
    #: null | header | schema | datum | json | shape | limit, and of those behind: route | name |
    #: envelope
    kind: str
    reason: str
    schema_id: int | None = None


class Decoder:
    def __init__(self, format: Format, shape: pa.Schema | None = None) -> None:
        self._format = format
        self._registry = Registry(format.registry) if format.registry else None
        self._shape = Shape(shape) if shape is not None and format.kind == "json" else None

    def decode(self, values: Sequence[bytes | None]) -> tuple[list[Decoded], list[Rejected]]:
        if not values:
            return [], []
        if self._format.kind == "raw":
            rows = pa.Table.from_arrays([pa.array(values, RAW.field(0).type)], schema=RAW)
            return [Decoded(rows, None, None)], []
        if self._format.kind == "json":
            decoded, rejected = (self._shape or Shape(self.columns(values))).decode(values)
        else:
            decoded, rejected = self._avro(values)
        rejected.sort(key=lambda each: each.index)
        counted = sum(each.rows.num_rows for each in decoded) + len(rejected)
        if counted != len(values):
            raise Miscount(f"cannot decode: expected {len(values)} values, found {counted}")
        return decoded, rejected

    def framed(self, records: Records) -> Framed | None:
        """Kafka's batches straight into columns, with their offsets, timestamps and keys.

        None where that cannot be, or anything at all is odd: then the values are taken out first
        and `decode` says which of them is bad. Only with the Confluent header, whose five known
        bytes in every record are part of the proof that no border is shifted.
        """
        first = records.first_value if records.count else None
        if self._format.kind != "confluent-avro" or first is None or _misheaded(first):
            return None
        header = first[:HEADER]
        writer = self._writer(_id(header))
        if not isinstance(writer, Writer) or not writer.gluable:
            return None
        rows_in_block = records.rows_in_block
        frame = open_block(_framed(writer, records.layout), records.block, rows_in_block)
        if frame is None or frame.height != rows_in_block:
            return None
        if not (frame["head"] == pl.Series([header])).all():
            return None
        known = records.checked(frame, frame["size"].to_numpy())
        table = writer.table(frame.select(name for name, _ in writer.glued))
        if known is None or table is None:
            return None
        offsets, stamps = known
        rows = records.rows(offsets)
        part = table.slice(rows.start, rows.stop - rows.start)
        decoded = Decoded(part, None, _id(header))
        return Framed(decoded, offsets[rows], stamps[rows], records.keys(frame, rows))

    def columns(self, values: Sequence[bytes | None]) -> pa.Schema:
        """The columns that a table for such values has, with their nullability."""
        if self._format.kind == "raw":
            return RAW
        if self._format.kind == "json":
            return infer(value for value in values if value is not None)
        ids: Iterable[int | None] = [None]
        if self._format.kind == "confluent-avro" and not self._format.schema:
            heads = {value[:HEADER] for value in values if value is not None}
            ids = sorted((_id(head) for head in heads if not _misheaded(head)), reverse=True)
        why = "no value has the header of a schema"
        for each in ids:
            writer = self._writer(each)
            if isinstance(writer, Writer):
                return writer.columns
            if not isinstance(writer, Missing):
                raise Misfit(writer.reason)
            why = writer.reason
        raise Undecodable(f"cannot name the columns of {len(values)} values: {why}")

    def aliases(self, schema_id: int | None) -> Mapping[str, tuple[str, ...]]:
        """Former names of columns, as the writer's schema tells them."""
        if self._format.kind not in ("avro", "confluent-avro"):
            return {}
        writer = self._writer(schema_id)
        return writer.aliases if isinstance(writer, Writer) else {}

    def _avro(self, values: Sequence[bytes | None]) -> tuple[list[Decoded], list[Rejected]]:
        headed = self._format.kind == "confluent-avro"
        size = HEADER if headed else 0
        # The common case is one schema and no bad value: try that without looking at each value.
        first = values[0] if len(values) <= BLOCK_ROWS else None
        tried = None
        if first is not None and not (headed and _misheaded(first)):
            tried = first[:size]
            schema_id = _id(tried) if headed else None
            writer = self._writer(schema_id)
            if isinstance(writer, Writer):
                table = writer.block(values, tried)  # type: ignore[arg-type]
                if table is not None:
                    return [Decoded(table, None, schema_id)], []

        decoded: list[Decoded] = []
        rejected: list[Rejected] = []
        groups: dict[bytes, list[int]] = {}
        for i, value in enumerate(values):
            if value is None:
                rejected.append(Rejected(i, "null", "cannot read the value: found null"))
            elif headed and _misheaded(value):
                rejected.append(Rejected(i, "header", _misheaded(value)))
            else:
                groups.setdefault(value[:size], []).append(i)
        for header, members in groups.items():
            schema_id = _id(header) if headed else None
            writer = self._writer(schema_id)
            if not isinstance(writer, Writer):
                rejected.extend(Rejected(i, "schema", writer.reason, schema_id) for i in members)
                continue
            every = len(members) == len(values)
            group = values if every else [values[i] for i in members]
            table, bad = writer.read(
                group,  # type: ignore[arg-type]
                header,
                tried=every and header == tried,
            )
            rejected.extend(Rejected(members[i], "datum", why, schema_id) for i, why in bad)
            if table.num_rows:
                index = None if every and not bad else _without(members, bad)
                decoded.append(Decoded(table, index, schema_id))
        return decoded, rejected

    def _writer(self, schema_id: int | None) -> Writer | Refused:
        if self._format.schema:
            found = _writers.get(("", self._format.schema))
            if found is None:
                found = _prepared("the schema", self._format.schema)
                _writers["", self._format.schema] = found
            return found
        assert self._registry is not None
        assert schema_id is not None
        return self._registry.writer(schema_id)


@functools.lru_cache(maxsize=256)
def _framed(writer: Writer, layout: Layout) -> bytes:
    header = {"type": "fixed", "size": HEADER}
    inner = [("size", "long"), ("head", header), *writer.glued]
    return preamble([*layout.before, *inner, *layout.after])


def _misheaded(value: bytes) -> str:
    """What is wrong with the Confluent header, or nothing."""
    if len(value) < HEADER:
        return f"cannot read the header: expected {HEADER} bytes, found {len(value)}"
    return "" if value[0] == 0 else f"cannot read the header: expected byte 0, found {value[0]}"


def _id(header: bytes) -> int:
    return int.from_bytes(header[1:HEADER], "big")


def _without(
    members: list[int], bad: Sequence[tuple[int, object]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.delete(np.array(members, np.int64), [i for i, _ in bad])


# --- the schema registry ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A schema that cannot be used. The reason goes into each record rejected for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Missing(Refused):
    """The registry does not know the id; it may tomorrow."""

    until: float = 0.0


# For the life of the process: a schema never changes under its id.
_writers: dict[tuple[str, str | int], Writer | Refused] = {}
_missing: dict[tuple[str, str | int], Missing] = {}
MISSING_SECONDS = 30.0
#: So many unknown ids are asked for in that time. Hostile data has 2³² of them.
MOST_MISSING = 1_000


def _prepared(name: str, text: str, references: Sequence[str] = ()) -> Writer | Refused:
    try:
        return Writer(text, references)
    except Unfit as error:
        return Refused(f"cannot make columns of {name}: {error}")


def ask_again() -> None:
    """Forget which schemas registries did not have: somebody says that they have them now."""
    _missing.clear()


class Registry:
    """Writer schemas by id, asked for once in a process."""

    _BOUNDS: Mapping[str, int] = {
        "timeout": 10, "max.retries": 4, "retries.wait.ms": 200, "retries.max.wait.ms": 2_000,
    }  # fmt: skip

    def __init__(self, conf: Mapping[str, str]) -> None:
        self._conf: dict[str, Any] = {**self._BOUNDS, **conf}
        for key in (*self._BOUNDS, "cache.capacity", "cache.latest.ttl.sec"):
            if isinstance(self._conf.get(key), str):
                try:
                    self._conf[key] = float(self._conf[key])
                except ValueError as error:
                    raise ConfigError(f"cannot set {key} of the registry: {error}") from None
        self.url = re.sub(r"//[^/@]*@", "//", str(conf.get("url", "")))
        self._client: Any = None

    def writer(self, schema_id: int) -> Writer | Refused:
        key = (self.url, schema_id)
        if key in _writers:
            return _writers[key]
        now = time.monotonic()
        if key in _missing and _missing[key].until > now:
            return _missing[key]
        if len(_missing) >= MOST_MISSING:
            for old in [each for each, missing in _missing.items() if missing.until <= now]:
                del _missing[old]
            if len(_missing) >= MOST_MISSING:
                return Refused(f"cannot find schema {schema_id}: {MOST_MISSING} others were not "
                               "found just now, and no more are asked for")  # fmt: skip
        found = self._ask(schema_id)
        if isinstance(found, Missing):
            _missing[key] = found
        else:
            _writers[key] = found
        return found

    def _ask(self, schema_id: int) -> Writer | Refused:
        # Imported here: it brings an HTTP client and OAuth along, and only this format needs it.
        library = importlib.import_module("confluent_kafka.schema_registry")
        errors = importlib.import_module("confluent_kafka.schema_registry.error")
        try:
            if self._client is None:
                self._client = library.SchemaRegistryClient(self._conf)
            schema = self._client.get_schema(schema_id)
            references = self._references(schema, set())
        except errors.SchemaRegistryError as error:
            fact = f"{self.url} answers {error.http_status_code}: {error.error_message}"
            if error.http_status_code == 404:
                until = time.monotonic() + MISSING_SECONDS
                return Missing(f"cannot find schema {schema_id}: {fact}", until)
            message = f"cannot get schema {schema_id}: {fact}"
            if error.http_status_code in (429, *range(500, 600)):
                raise Unavailable(message, hint="is the registry up?") from None
            raise ConfigError(message, hint="check the registry's credentials") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"cannot ask the registry {self.url}: {error}") from None
        except (OSError, errors.OAuthTokenError, *_transport_errors()) as error:
            raise Unavailable(
                f"cannot get schema {schema_id}: {self.url} does not answer: "
                f"{type(error).__name__}",
                hint="is the registry up, and its url right?",
            ) from None
        if (schema.schema_type or "AVRO") != "AVRO":
            return Refused(
                f"cannot read schema {schema_id}: expected AVRO, found {schema.schema_type}"
            )
        return _prepared(f"schema {schema_id}", schema.schema_str or "", references)

    def _references(self, schema: Any, seen: set[tuple[str, int]]) -> list[str]:
        """The texts of the schemas that this one uses, each after those that it uses itself."""
        texts: list[str] = []
        for each in schema.references or ():
            if (each.subject, each.version) not in seen:
                seen.add((each.subject, each.version))
                used = self._client.get_version(each.subject, each.version).schema
                texts += [*self._references(used, seen), used.schema_str]
        return texts


def _transport_errors() -> list[type[Exception]]:
    # The client uses the one or the other of these, and lets their errors through.
    found: list[type[Exception]] = []
    for name in ("httpx", "httpx2"):
        try:
            found.append(importlib.import_module(name).TransportError)
        except ImportError:
            continue
    return found


# --- JSON ---------------------------------------------------------------------------------------

# Secret names: a value cannot close the wrapper around it and write the tag itself.
_BODY = f"v{os.urandom(8).hex()}"
_TAG = f"t{os.urandom(8).hex()}"
_OPEN = b'{"%s":' % _BODY.encode()
_CLOSE = b',"%s":%%d}\n' % _TAG.encode()
_FAST = (pa.types.is_int32, pa.types.is_int64, pa.types.is_float64, pa.types.is_boolean,
         pa.types.is_string, pa.types.is_large_string)  # fmt: skip

Convert = Callable[[Any], Any]


@functools.cache
def _between() -> list[bytes]:
    """The end of each wrapper and the beginning of the next."""
    return [_CLOSE % i + _OPEN for i in range(BLOCK_ROWS)]


class Misshapen(Exception):
    def __init__(self, expected: str, found: str, *path: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found
        self.path = list(path)  # innermost first

    def __str__(self) -> str:
        name = f"field {'.'.join(reversed(self.path))}" if self.path else "the value"
        return f"cannot fit {name}: expected {self.expected}, found {self.found}"


class Shape:
    """Columns, made ready to read JSON objects into them."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._struct = pa.struct(list(schema))
        self._convert = _converter(pa.field("", self._struct, nullable=False))
        for each in schema:
            try:
                pa.array([], each.type)
            except pa.ArrowNotImplementedError:
                raise _unfillable(each) from None
        self._parse: pj.ParseOptions | None = None
        if len(schema) and _fast(self._struct):
            explicit = pa.schema([(_BODY, _loose(self._struct)), (_TAG, pa.int64())])
            self._parse = pj.ParseOptions(
                explicit_schema=explicit, unexpected_field_behavior="error"
            )

    def decode(self, values: Sequence[bytes | None]) -> tuple[list[Decoded], list[Rejected]]:
        rejected: list[Rejected] = []
        tables = sift(
            len(values),
            (lambda start, end: self._block(values[start:end])) if self._parse else None,
            lambda start, end: self._each(values, start, end, rejected),
        )
        if not len(self._schema):
            tables = tables[:1]  # then there is one only, and a concat would forget its rows
        rows = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        if not rows.num_rows:
            return [], rejected
        bad = [(each.index, None) for each in rejected]
        index = _without(list(range(len(values))), bad) if bad else None
        return [Decoded(rows, index, None)], rejected

    def _block(self, values: Sequence[bytes | None]) -> pa.Table | None:
        count = len(values)
        parts: list[Any] = [b""] * (2 * count)
        parts[::2] = values
        parts[1::2] = _between()[:count]
        parts[-1] = _CLOSE % (count - 1)
        try:
            payload = b"".join((_OPEN, *parts))
        except TypeError:  # a null among them
            return None
        # All in one block: so a line break between the parts of a value does no harm.
        reading = pj.ReadOptions(use_threads=False, block_size=len(payload) + 1)
        try:
            table = pj.read_json(io.BytesIO(payload), reading, self._parse)
            if table.num_rows != count or table.num_columns != 2:
                return None
            tags = table.column(_TAG).combine_chunks()
            if tags.null_count or not np.array_equal(tags.to_numpy(), np.arange(count)):
                return None
            body = _settled(_one(table.column(_BODY)), self._struct, nullable=False)
        except (pa.ArrowException, Misshapen, UnicodeDecodeError):
            return None
        return pa.Table.from_arrays(
            [body.field(i) for i in range(len(self._schema))], schema=self._schema
        )

    def _each(
        self, values: Sequence[bytes | None], start: int, end: int, rejected: list[Rejected]
    ) -> pa.Table:
        rows = []
        for i in range(start, end):
            value = values[i]
            if value is None:
                rejected.append(Rejected(i, "null", "cannot read the value: found null"))
                continue
            try:
                rows.append(self._convert(_parsed(value)))
            except Misshapen as error:
                rejected.append(Rejected(i, "shape", str(error)))
            except RecursionError:
                rejected.append(Rejected(i, "limit", "cannot read JSON: it is nested too deep"))
            except ValueError as error:
                rejected.append(Rejected(i, "json", f"cannot read JSON: {error}"))
        if not len(self._schema):  # rows without columns: only a struct array keeps their number
            batch = pa.RecordBatch.from_struct_array(pa.array(rows, self._struct))
            return pa.Table.from_batches([batch])
        arrays = [pa.array([row[each.name] for row in rows], each.type) for each in self._schema]
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _parsed(value: bytes) -> Any:
    # Floats are kept as their text has them, for decimal columns.
    try:
        return json.loads(value.decode(), parse_constant=_no_constant, parse_float=Decimal)
    except DecimalException:
        raise ValueError("a number's exponent is beyond all bounds") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _fast(kind: pa.DataType) -> bool:
    """Does pyarrow's JSON reader agree with ours on this type, after `_settled`?"""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_fast(each.type) for each in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _fast(kind.value_type)
    return any(is_kind(kind) for is_kind in _FAST)


def _loose(kind: pa.DataType) -> pa.DataType:
    """The type as pyarrow's reader knows it: all nullable, so that nulls are for us to judge."""
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, _loose(each.type)) for each in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_loose(kind.value_type))
    return kind


def _settled(array: pa.Array, kind: pa.DataType, nullable: bool) -> pa.Array:
    """The array under its real type; raises where our own reader would reject a row."""
    if array.offset or (array.null_count and not nullable):
        raise Misshapen("a value", "null")
    if pa.types.is_struct(kind):
        children = []
        for i, each in enumerate(kind):
            child = array.field(i)
            if not each.nullable and array.null_count:
                if child.filter(array.is_valid()).null_count:
                    raise Misshapen("a value", "null")
                children.append(_settled(child, each.type, nullable=True))
            else:
                children.append(_settled(child, each.type, each.nullable))
        return pa.Array.from_buffers(kind, len(array), array.buffers()[:1], children=children)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        buffers = array.buffers()[:2]
        if pa.types.is_large_list(kind):
            wide = np.frombuffer(buffers[1], np.int32, len(array) + 1).astype(np.int64)
            buffers = [buffers[0], pa.py_buffer(wide)]
        values = _settled(array.values, kind.value_type, kind.value_field.nullable)
        return pa.Array.from_buffers(kind, len(array), buffers, children=[values])
    if pa.types.is_floating(kind) and not pc.all(pc.is_finite(array), min_count=0).as_py():
        raise Misshapen("a finite number", "another")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array.validate(full=True)  # pyarrow's reader takes bytes that are no UTF-8
    return array


def _found(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number",
             Decimal: "number", type(None): "null"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _converter(target: pa.Field) -> Convert:
    """A function that takes what `_parsed` gives for one field, and gives what pa.array takes."""
    inner = _of_type(target)
    if target.nullable:
        return lambda value: None if value is None else inner(value)
    return inner


def _of_type(target: pa.Field) -> Convert:
    kind, types = target.type, pa.types
    if types.is_struct(kind):
        return _of_struct(kind)
    if types.is_list(kind) or types.is_large_list(kind):
        item = _converter(kind.value_field)
        return lambda value: [item(each) for each in _must(value, list, "array")]
    if types.is_map(kind):
        key, item = _converter(kind.key_field), _converter(kind.item_field)
        return lambda value: [
            (key(name), item(each)) for name, each in _must(value, dict, "object").items()
        ]
    if types.is_boolean(kind):
        return lambda value: _must(value, bool, "boolean")
    if types.is_int32(kind) or types.is_int64(kind):
        most = 2 ** (kind.bit_width - 1)

        def whole(value: Any) -> int:
            if type(value) is not int:
                raise Misshapen(str(kind), _found(value) + (" with a fraction or exponent"
                                if type(value) is Decimal else ""))  # fmt: skip
            if not -most <= value < most:
                raise Misshapen(str(kind), "a number out of its range")
            return value

        return whole
    if types.is_float32(kind) or types.is_float64(kind):
        return lambda value: _floating(value, kind)
    if types.is_string(kind) or types.is_large_string(kind):
        return _text
    if types.is_decimal(kind):
        return lambda value: _decimal(value, kind)
    if types.is_date32(kind):
        return _date
    if types.is_timestamp(kind) and kind.unit in ("us", "ns"):
        return lambda value: _timestamp(value, kind)
    if types.is_time64(kind):
        return lambda value: _time(value, kind)
    if isinstance(kind, pa.UuidType):
        return _uuid
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        size = kind.byte_width if types.is_fixed_size_binary(kind) else None
        return lambda value: _bytes(value, size)
    raise _unfillable(target)


def _unfillable(target: pa.Field) -> Misfit:
    return Misfit(f"cannot fit JSON into column {target.name}: expected a type that JSON can fill, "
                  f"found {target.type}")  # fmt: skip


def _of_struct(kind: pa.StructType) -> Convert:
    fields = [(each.name, _converter(each), each.nullable) for each in kind]
    names = {name for name, _, _ in fields}

    def convert(value: Any) -> dict[str, Any]:
        _must(value, dict, "object")
        for name in value:
            if name not in names and value[name] is not None:  # null says no more than nothing
                raise Misshapen("no such field", _found(value[name]), name)
        row = {}
        name = ""
        try:
            for name, part, nullable in fields:
                if name not in value and not nullable:
                    raise Misshapen("a value", "nothing")
                row[name] = part(value.get(name))
        except Misshapen as error:
            error.path.append(name)
            raise
        return row

    return convert


def _must(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise Misshapen(name, _found(value))
    return value


def _text(value: Any) -> str:
    text: str = _must(value, str, "string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Misshapen("text", "half of a surrogate pair") from None
    return text


def _floating(value: Any, kind: pa.DataType) -> float:
    if type(value) not in (int, Decimal):
        raise Misshapen(str(kind), _found(value))
    try:
        number = float(value)
        if pa.types.is_float32(kind):
            with np.errstate(over="ignore"):
                number = float(np.float32(number))
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise Misshapen(str(kind), "a number out of its range")
    return number


_DECIMAL = re.compile(r"[+-]?\d{1,80}(\.\d{1,80})?([eE][+-]?\d{1,3})?", re.ASCII)
_EXACT = Context(prec=400)


def _decimal(value: Any, kind: pa.Decimal128Type) -> Decimal:
    if type(value) is str and _DECIMAL.fullmatch(value):
        value = Decimal(value)
    if type(value) not in (int, Decimal):
        found = "text that is none" if type(value) is str else _found(value)
        raise Misshapen(str(kind), found)
    # Exactly, or not at all: digits that do not fit are never rounded away.
    try:
        exact = Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except DecimalException:
        exact = None
    bound = 10 ** (kind.precision - kind.scale)
    if exact is None or exact != value or abs(exact) >= bound:
        raise Misshapen(str(kind), "a number that does not fit")
    return exact


_CLOCK = r"(\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
_TIME = re.compile(_CLOCK, re.ASCII)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_STAMP = re.compile(_DATE.pattern + "[Tt ]" + _CLOCK + r"([Zz]|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _matched(pattern: re.Pattern[str], value: Any, expected: str) -> re.Match[str]:
    found = pattern.fullmatch(_must(value, str, expected))
    if not found:
        raise Misshapen(expected, "other text")
    return found


def _date(value: Any) -> int:
    year, month, day = map(int, _matched(_DATE, value, "a date as 2001-02-03").groups())
    try:
        return date(year, month, day).toordinal() - _EPOCH.toordinal()
    except ValueError as error:
        raise Misshapen("a date", str(error)) from None


def _ticks(hour: str, minute: str, second: str | None, fraction: str | None, unit: str) -> int:
    """The time of day in `unit`s."""
    digits = 6 if unit == "us" else 9
    text = (fraction or "").ljust(digits, "0")
    if int(hour) > 23 or int(minute) > 59 or int(second or 0) > 59:
        raise Misshapen("a time of day", f"{hour}:{minute}:{second or '00'}")
    if text[digits:].strip("0"):
        raise Misshapen(f"at most {digits} digits of a second", f"{len(text)}")
    seconds = (int(hour) * 60 + int(minute)) * 60 + int(second or 0)
    return int(seconds * 10**digits + int(text[:digits]))


def _time(value: Any, kind: pa.Time64Type) -> int:
    hour, minute, second, fraction = _matched(_TIME, value, "a time as 12:34:56").groups()
    return _ticks(hour, minute, second, fraction, kind.unit)


def _timestamp(value: Any, kind: pa.TimestampType) -> int:
    expected = "a timestamp as 2001-02-03T04:05:06" + ("Z" if kind.tz else "")
    *_, hour, minute, second, fraction, zone = _matched(_STAMP, value, expected).groups()
    if bool(zone) != bool(kind.tz):
        # Which moment a local time is, or which local time a moment, is not ours to guess.
        raise Misshapen(expected, f"one with{'' if zone else 'out'} a zone")
    day = _date(value[:10])
    shift = 0
    if zone and zone not in "Zz":
        hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
        if hours > 23 or minutes > 59:
            raise Misshapen("a zone", zone)
        shift = (hours * 60 + minutes) * (-60 if zone[0] == "-" else 60)
    a_second = 1_000_000 if kind.unit == "us" else 1_000_000_000
    ticks = _ticks(hour, minute, second, fraction, kind.unit)
    moment = (day * 86_400 - shift) * a_second + ticks
    if not -(2**63) <= moment < 2**63:
        raise Misshapen(str(kind), "a moment out of its range")
    return moment


def _bytes(value: Any, size: int | None) -> bytes:
    try:
        found = base64.b64decode(_must(value, str, "base64 text"), validate=True)
    except (binascii.Error, ValueError):
        raise Misshapen("base64 text", "other text") from None
    if size is not None and len(found) != size:
        raise Misshapen(f"{size} bytes", f"{len(found)}")
    return found


def _uuid(value: Any) -> bytes:
    try:
        return uuid.UUID(_must(value, str, "a UUID")).bytes
    except ValueError:
        raise Misshapen("a UUID", "other text") from None


# --- columns of JSON ----------------------------------------------------------------------------


def infer(values: Iterable[bytes], guess: bool = True) -> pa.Schema:
    """The columns that all these JSON objects fit into; what is no object is passed over.

    Without `guess` a field that is null in all of them is left out, and an object that does not fit
    those before it is passed over, too.
    """
    seen: dict[str, Any] = {}
    for value in values:
        try:
            parsed = _parsed(value)
            if type(parsed) is dict:
                seen = _merged(seen, _kinds(parsed), "")
        except (ValueError, RecursionError):
            continue
        except Misfit:
            if guess:
                raise
    if not guess:
        seen = _told(seen)
    return pa.schema([pa.field(name, _arrow(kind, name)) for name, kind in seen.items()])


def _told(kinds: dict[str, Any]) -> dict[str, Any]:
    """Without fields of which only null is known."""
    told = {name: _told(kind) if type(kind) is dict else kind for name, kind in kinds.items()}
    return {name: kind for name, kind in told.items() if kind is not None and kind != {}}


def _kinds(value: Any) -> Any:
    """A kind is a word, a dict of kinds (object), a list of one kind (array), or None (null)."""
    if type(value) is dict:
        for name in value:
            name.encode()  # half of a surrogate pair is no name
        return {name: _kinds(each) for name, each in value.items()}
    if type(value) is list:
        kind = None
        for each in value:
            kind = _merged(kind, _kinds(each), "[]")
        return [kind]
    if type(value) is Decimal:
        return "fraction"
    return "whole" if type(value) is int else None if value is None else _found(value)


def _merged(one: Any, other: Any, path: str) -> Any:
    if one is None or other is None or one == other:
        return other if one is None else one
    if type(one) is dict and type(other) is dict:
        return {
            name: _merged(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
            for name in {**one, **other}
        }
    if type(one) is list and type(other) is list:
        return [_merged(one[0], other[0], path)]
    if {str(one), str(other)} == {"whole", "fraction"}:
        return "fraction"
    words = {"whole": "number", "fraction": "number"}
    found = [words.get(str(each), each) if isinstance(each, str) else
             "object" if type(each) is dict else "array" for each in (one, other)]  # fmt: skip
    raise Misfit(
        f"cannot infer field {path}: expected one type, found {found[0]} and {found[1]}",
        hint="give the table a schema",
    )


def _arrow(kind: Any, path: str) -> pa.DataType:
    if type(kind) is list:
        return pa.large_list(pa.field("element", _arrow(kind[0], path)))
    if type(kind) is dict:
        if not kind:
            raise Misfit(f"cannot infer field {path}: expected fields, found only empty objects",
                         hint="give the table a schema")  # fmt: skip
        return pa.struct([(name, _arrow(each, f"{path}.{name}")) for name, each in kind.items()])
    words = {"whole": pa.int64(), "fraction": pa.float64(), "boolean": pa.bool_()}
    return words.get(kind, pa.large_string())  # null in all: text, as Spark has it
