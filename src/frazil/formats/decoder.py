"""Record values → columns, or rejected records. Runs on executors, after the fetch.

In: the values of a chunk of records. Out: tables of plain Arrow types, one per writer schema, and
an `UndecodableRecord` for each value that cannot be read. Every value is in exactly one of them.

Promises: whether a value is rejected depends on that value alone, not on the rest of the chunk; bad
data never raises. The environment does: a registry that does not answer raises `Unavailable`, a
registry that refuses access or an invalid setting raises `ConfigError`.

Avro is read in `frazil.arrow.avro`. JSON is read here in the same way: all values at once by
pyarrow, each wrapped with a tag, and one by one if anything is wrong. The one-by-one reader is the
reference; the fast one is used only for types on which both are known to agree.
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from decimal import Context, Decimal, DecimalException
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from frazil.arrow.avro import (
    BLOCK_ROWS,
    MAX_DEPTH,
    UnsupportedSchema,
    WriterSchema,
    open_block,
    preamble,
    sift,
)
from frazil.arrow.cast import by_place, project
from frazil.config.sections import UNAVAILABLE_VALUE
from frazil.errors import AccountingError, ConfigError, SchemaMismatch, Unavailable, Undecodable
from frazil.formats.json_inference import (
    MINUS_ZERO,
    SeenValues,
    arrow,
    common_kind,
    kind_of,
    kinds_of,
)
from frazil.kafka.record_batch import Longs, RecordBatches, RecordLayout

KINDS = ("confluent-avro", "avro", "json", "raw")
RAW = pa.schema([pa.field("value", pa.large_binary())])
HEADER = 5  # a zero byte, then the schema's id in 4 bytes


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How the values of a topic are encoded, from the configuration. Can be pickled."""

    kind: str
    schema: str = ""
    registry: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds secrets
    #: Debezium's placeholder for values that a change does not carry; empty: not checked
    unavailable: str = UNAVAILABLE_VALUE

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
class DecodedChunk:
    """Rows of one writer schema, in input order."""

    rows: pa.Table
    index: np.ndarray[Any, np.dtype[np.int64]] | None  # positions in the input; None: all
    schema_id: int | None


class FramedRecords(NamedTuple):
    """Kafka record batches as columns, with offsets, timestamps and keys. No record has headers."""

    decoded: DecodedChunk
    offsets: Longs
    stamps: Longs
    keys: pa.Array | None  # large_binary; None: no record has a key


@dataclass(frozen=True, slots=True)
class UndecodableRecord:
    """A value that cannot be read. Returned, never raised."""

    index: int
    #: null | header | schema | datum | json | shape | limit, and from later steps: route | name |
    #: envelope | unavailable
    kind: str
    reason: str
    schema_id: int | None = None


class Decoder:
    def __init__(self, format: RecordFormat, shape: pa.Schema | None = None) -> None:
        self._format = format
        self._registry = SchemaRegistry(format.registry) if format.registry else None
        self._shape = JsonShape(shape) if shape is not None and format.kind == "json" else None

    def decode(
        self, values: Sequence[bytes | None], headers: pa.Array | None = None
    ) -> tuple[list[DecodedChunk], list[UndecodableRecord]]:
        """Every value is in a returned chunk or rejected. `headers`: of the records, if known."""
        if not values:
            return [], []
        apart = _schema_apart(headers) if self._format.kind == "confluent-avro" else set()
        if apart:
            # A value without a schema id before it may still begin with bytes that look like one.
            values = [
                _NO_HEADER if i in apart and v is not None else v for i, v in enumerate(values)
            ]
        if self._format.kind == "raw":
            rows = pa.Table.from_arrays([pa.array(values, RAW.field(0).type)], schema=RAW)
            return [DecodedChunk(rows, None, None)], []
        if self._format.kind == "json":
            decoded, rejected = (self._shape or JsonShape(self.columns(values))).decode(values)
        else:
            decoded, rejected = self._avro(values)
            rejected = [
                replace(record, reason=_APART)
                if record.index in apart and record.kind != "null"
                else record
                for record in rejected
            ]
        rejected.sort(key=lambda record: record.index)
        counted = sum(chunk.rows.num_rows for chunk in decoded) + len(rejected)
        if counted != len(values):
            raise AccountingError(f"cannot decode: expected {len(values)} values, found {counted}")
        return decoded, rejected

    def framed(self, records: RecordBatches) -> FramedRecords | None:
        """Kafka record batches read directly into columns, with offsets, timestamps and keys.

        None if that is impossible or anything is wrong: the caller then extracts the values, and
        `decode` rejects the bad ones. Requires the Confluent header: its five known bytes in every
        record are part of the proof that no record boundary is shifted.
        """
        first = records.first_value if records.count else None
        if self._format.kind != "confluent-avro" or first is None or _misheaded(first):
            return None
        header = first[:HEADER]
        writer = self._writer(_id(header))
        if not isinstance(writer, WriterSchema) or not writer.gluable:
            return None
        rows_in_block = records.rows_in_block
        frame = open_block(_framed(writer, records.layout), records.block, rows_in_block)
        if frame is None or frame.height != rows_in_block:
            return None
        if not (frame["head"] == pl.Series([header])).all():
            return None
        sizes = frame["size"].to_numpy()
        known = records.checked(frame, sizes)
        if known is None:
            return None
        ends = records.ends(frame)
        columns = frame.select(name for name, _ in writer.glued)
        table = writer.table(columns, records.block, ends - sizes + HEADER, ends)
        if table is None:
            return None
        offsets, stamps = known
        rows = records.rows(offsets)
        part = table.slice(rows.start, rows.stop - rows.start)
        decoded = DecodedChunk(part, None, _id(header))
        return FramedRecords(decoded, offsets[rows], stamps[rows], records.keys(frame, rows))

    def columns(self, values: Sequence[bytes | None]) -> pa.Schema:
        """The columns of a table for these values, with their nullability."""
        if self._format.kind == "raw":
            return RAW
        if self._format.kind == "json":
            return infer(value for value in values if value is not None)
        ids: Iterable[int | None] = [None]
        if self._format.kind == "confluent-avro" and not self._format.schema:
            heads = {value[:HEADER] for value in values if value is not None}
            ids = sorted((_id(head) for head in heads if not _misheaded(head)), reverse=True)
        why = "no value has the header of a schema"
        for schema_id in ids:
            writer = self._writer(schema_id)
            if isinstance(writer, WriterSchema):
                return writer.columns
            if not isinstance(writer, UnknownSchemaId):
                raise SchemaMismatch(writer.reason)
            why = writer.reason
        raise Undecodable(f"cannot name the columns of {len(values)} values: {why}")

    def aliases(self, schema_id: int | None) -> Mapping[str, tuple[str, ...]]:
        """Former names of columns, from the aliases of the writer schema."""
        if self._format.kind not in ("avro", "confluent-avro"):
            return {}
        writer = self._writer(schema_id)
        return writer.aliases if isinstance(writer, WriterSchema) else {}

    def _avro(
        self, values: Sequence[bytes | None]
    ) -> tuple[list[DecodedChunk], list[UndecodableRecord]]:
        headed = self._format.kind == "confluent-avro"
        size = HEADER if headed else 0
        # Common case, one schema and no bad value: try it without inspecting each value.
        first = values[0] if len(values) <= BLOCK_ROWS else None
        tried = None
        if first is not None and not (headed and _misheaded(first)):
            tried = first[:size]
            schema_id = _id(tried) if headed else None
            writer = self._writer(schema_id)
            if isinstance(writer, WriterSchema):
                table = writer.block(values, tried)  # type: ignore[arg-type]
                if table is not None:
                    return [DecodedChunk(table, None, schema_id)], []

        decoded: list[DecodedChunk] = []
        rejected: list[UndecodableRecord] = []
        groups: dict[bytes, list[int]] = {}
        for i, value in enumerate(values):
            if value is None:
                rejected.append(UndecodableRecord(i, "null", "cannot read the value: found null"))
            elif headed and _misheaded(value):
                rejected.append(UndecodableRecord(i, "header", _misheaded(value)))
            else:
                groups.setdefault(value[:size], []).append(i)
        for header, members in groups.items():
            schema_id = _id(header) if headed else None
            writer = self._writer(schema_id)
            if not isinstance(writer, WriterSchema):
                rejected.extend(
                    UndecodableRecord(i, "schema", writer.reason, schema_id) for i in members
                )
                continue
            every = len(members) == len(values)
            group = values if every else [values[i] for i in members]
            table, bad = writer.read(
                group,  # type: ignore[arg-type]
                header,
                tried=every and header == tried,
            )
            rejected.extend(
                UndecodableRecord(members[i], "datum", why, schema_id) for i, why in bad
            )
            if table.num_rows:
                index = None if every and not bad else _without(members, bad)
                decoded.append(DecodedChunk(table, index, schema_id))
        return decoded, rejected

    def _writer(self, schema_id: int | None) -> WriterSchema | RegistryRefusal:
        if self._format.schema:
            writer = _writers.get(("", self._format.schema))
            if writer is None:
                writer = _prepared("the schema", self._format.schema)
                _writers["", self._format.schema] = writer
            return writer
        assert self._registry is not None
        assert schema_id is not None
        return self._registry.writer(schema_id)


@functools.lru_cache(maxsize=256)
def _framed(writer: WriterSchema, layout: RecordLayout) -> bytes:
    header = {"type": "fixed", "size": HEADER}
    inner = [("size", "long"), ("head", header), *writer.glued]
    return preamble([*layout.before, *inner, *layout.after])


#: Header in which Confluent's serializers put the schema id if configured not to prefix the value.
SCHEMA_ID = "__value_schema_id"
_NO_HEADER = b"\x01"
_APART = (
    f"cannot read the value: its schema id stands in the record's header {SCHEMA_ID}, which is not "
    "read; expected it before the value, where serializers put it by default"
)


def _schema_apart(headers: pa.Array | None) -> set[int]:
    """Indexes of the records that have their schema id in a header."""
    if headers is None or not len(items := headers.flatten()):
        return set()
    named = pc.equal(items.field("key"), SCHEMA_ID).fill_null(False)
    return set(pc.list_parent_indices(headers).filter(named).to_pylist())


def _misheaded(value: bytes) -> str:
    """Why the Confluent header is invalid; empty if it is valid."""
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
class RegistryRefusal:
    """A schema that cannot be used. Each record rejected for it carries the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnknownSchemaId(RegistryRefusal):
    """The registry does not know the id yet. Asked again after `until`."""

    until: float = 0.0


# Kept for the lifetime of the process: the schema of an id never changes.
_writers: dict[tuple[str, str | int], WriterSchema | RegistryRefusal] = {}
_missing: dict[tuple[str, str | int], UnknownSchemaId] = {}
MISSING_SECONDS = 30.0
#: Limit on the number of unknown ids in `_missing`.
MOST_MISSING = 100_000
#: Registry ids are Java ints; for a larger id the registry answers as if the path did not exist.
MOST_ID = 2**31 - 1
_BETWEEN = "does something else stand before the registry (a proxy, a login)? Is its url right?"


def _prepared(
    name: str, text: str, references: Sequence[str] = ()
) -> WriterSchema | RegistryRefusal:
    try:
        return WriterSchema(text, references)
    except UnsupportedSchema as error:
        return RegistryRefusal(f"cannot make columns of {name}: {error}")


def ask_again() -> None:
    """Forgets the unknown schema ids, so that the registry is asked for them again."""
    _missing.clear()


class SchemaRegistry:
    """Writer schemas by id, each requested once per process."""

    _BOUNDS: Mapping[str, int] = {
        "timeout": 10,
        "max.retries": 4,
        "retries.wait.ms": 200,
        "retries.max.wait.ms": 2_000,
    }

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

    def writer(self, schema_id: int) -> WriterSchema | RegistryRefusal:
        """The schema of an id, or the reason it cannot be used. Every id is requested, however many
        others were unknown: hostile data can contain 2³¹ ids, and must not affect good records."""
        key = (self.url, schema_id)
        if key in _writers:
            return _writers[key]
        if schema_id > MOST_ID:
            return RegistryRefusal(
                f"cannot find schema {schema_id}: expected an id of at most {MOST_ID}"
            )
        if key in _missing and _missing[key].until > time.monotonic():
            return _missing[key]
        writer = self._ask(schema_id)
        if isinstance(writer, UnknownSchemaId):
            _missing.pop(key, None)
            _missing[key] = writer
            if len(_missing) > MOST_MISSING:
                del _missing[next(iter(_missing))]  # the oldest
        else:
            _writers[key] = writer
        return writer

    def _ask(self, schema_id: int) -> WriterSchema | RegistryRefusal:
        errors = importlib.import_module("confluent_kafka.schema_registry.error")
        client = self._opened()
        try:
            schema = client.get_schema(schema_id)
            kind, text = _schema_text(schema)
            references = self._references(client, schema, set())
        except errors.SchemaRegistryError as error:
            return self._refused(schema_id, error)
        except (OSError, errors.OAuthTokenError, *_transport_errors()) as error:
            raise Unavailable(
                f"cannot get schema {schema_id}: {self.url} does not answer: "
                f"{type(error).__name__}",
                hint="is the registry up, and its url right?",
            ) from None
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            self._client = None  # the client caches the bad answer
            raise Unavailable(
                f"cannot get schema {schema_id}: {self.url} answers something else; expected a "
                f"schema as JSON, found {type(error).__name__}: {str(error)[:200]!a}",
                hint=_BETWEEN,
            ) from None
        if kind != "AVRO":
            return RegistryRefusal(f"cannot read schema {schema_id}: expected AVRO, found {kind}")
        return _prepared(f"schema {schema_id}", text, references)

    def _opened(self) -> Any:
        if self._client is None:
            # Imported here: it loads an HTTP client and OAuth, and only this format needs it.
            library = importlib.import_module("confluent_kafka.schema_registry")
            try:
                self._client = library.SchemaRegistryClient(self._conf)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"cannot ask the registry {self.url}: {error}") from None
        return self._client

    def _refused(self, schema_id: int, error: Any) -> UnknownSchemaId:
        """Only the registry's own 404 code marks a schema as unknown, which rejects its records.
        Any other answer is a failure of the environment and raises."""
        status, code = error.http_status_code, error.error_code
        fact = f"{self.url} answers {status}: {str(error.error_message)[:200]}"
        if status == 404 and type(code) is int and code // 100 == 404:
            until = time.monotonic() + MISSING_SECONDS
            return UnknownSchemaId(
                f"cannot find schema {schema_id}, or one that it refers to: {fact}", until
            )
        message = f"cannot get schema {schema_id}: {fact}"
        if status in (401, 403, 407):
            raise ConfigError(message, hint="check the registry's credentials") from None
        patient = status in (408, 429) or status >= 500
        raise Unavailable(message, hint="is the registry up?" if patient else _BETWEEN) from None

    def _references(self, client: Any, schema: Any, seen: set[tuple[str, int]]) -> list[str]:
        """The texts of the schemas that this one references, dependencies first."""
        texts: list[str] = []
        for reference in schema.references or ():
            if (reference.subject, reference.version) not in seen:
                seen.add((reference.subject, reference.version))
                used = client.get_version(reference.subject, reference.version).schema
                texts += [*self._references(client, used, seen), _schema_text(used)[1]]
        return texts


def _schema_text(schema: Any) -> tuple[str, str]:
    """Type and text of a schema, checked here because the client accepts anything."""
    kind, text = schema.schema_type or "AVRO", schema.schema_str
    if not isinstance(kind, str) or not isinstance(text, str) or not text:
        raise TypeError(f"schema is {str(text)[:80]!r}, schemaType {str(kind)[:80]!r}")
    return kind, text


def _transport_errors() -> list[type[Exception]]:
    # The client uses one of these libraries and does not translate its errors.
    errors: list[type[Exception]] = []
    for name in ("httpx", "httpx2"):
        try:
            library = importlib.import_module(name)
            errors += [library.HTTPError, library.InvalidURL]
        except ImportError:
            continue
    return errors


# --- JSON ---------------------------------------------------------------------------------------

# Secret names, so that a value cannot close its wrapper and forge the tag.
_BODY = f"v{os.urandom(8).hex()}"
_TAG = f"t{os.urandom(8).hex()}"
_OPEN = b'{"%s":' % _BODY.encode()
_CLOSE = b',"%s":%%d}\n' % _TAG.encode()
_FAST = (
    pa.types.is_int32,
    pa.types.is_int64,
    pa.types.is_float64,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_large_string,
)

Convert = Callable[[Any], Any]


@functools.cache
def _between() -> list[bytes]:
    """For each row the end of its wrapper and the start of the next."""
    return [_CLOSE % i + _OPEN for i in range(BLOCK_ROWS)]


class NotThisShape(Exception):
    def __init__(self, expected: str, actual: str, *path: str) -> None:
        super().__init__(expected, actual)
        self.expected, self.found = expected, actual
        self.path = list(path)  # innermost first

    def __str__(self) -> str:
        name = f"field {'.'.join(reversed(self.path))}" if self.path else "the value"
        return f"cannot fit {name}: expected {self.expected}, found {self.found}"


class JsonShape:
    """Columns, compiled to read JSON objects into them."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._struct = pa.struct(list(schema))
        self._convert = _converter(pa.field("", self._struct, nullable=False))
        self._plain = [_without_extensions(column.type) for column in schema]
        self._parse: pj.ParseOptions | None = None
        if len(schema) and _fast(self._struct):
            explicit = pa.schema([(_BODY, _loose(self._struct)), (_TAG, pa.int64())])
            self._parse = pj.ParseOptions(
                explicit_schema=explicit, unexpected_field_behavior="error"
            )

    def decode(
        self, values: Sequence[bytes | None]
    ) -> tuple[list[DecodedChunk], list[UndecodableRecord]]:
        rejected: list[UndecodableRecord] = []
        tables = sift(
            len(values),
            (lambda start, end: self._block(values[start:end])) if self._parse else None,
            lambda start, end: self._each(values, start, end, rejected),
        )
        if not len(self._schema):
            tables = tables[:1]  # there is only one, and concat would lose its row count
        rows = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        if not rows.num_rows:
            return [], rejected
        bad = [(record.index, None) for record in rejected]
        index = _without(list(range(len(values))), bad) if bad else None
        return [DecodedChunk(rows, index, None)], rejected

    def _block(self, values: Sequence[bytes | None]) -> pa.Table | None:
        count = len(values)
        parts: list[Any] = [b""] * (2 * count)
        parts[::2] = values
        parts[1::2] = _between()[:count]
        parts[-1] = _CLOSE % (count - 1)
        try:
            payload = b"".join((_OPEN, *parts))
        except TypeError:  # one of the values is null
            return None
        # One block, so that a line break inside a value is harmless.
        reading = pj.ReadOptions(use_threads=False, block_size=len(payload) + 1)
        try:
            table = pj.read_json(io.BytesIO(payload), reading, self._parse)
            if table.num_rows != count or table.num_columns != 2:
                return None
            tags = table.column(_TAG).combine_chunks()
            if tags.null_count or not np.array_equal(tags.to_numpy(), np.arange(count)):
                return None
            body = _settled(_one(table.column(_BODY)), self._struct, nullable=False)
        except (pa.ArrowException, NotThisShape, UnicodeDecodeError):
            return None
        return pa.Table.from_arrays(
            [body.field(i) for i in range(len(self._schema))], schema=self._schema
        )

    def _each(
        self,
        values: Sequence[bytes | None],
        start: int,
        end: int,
        rejected: list[UndecodableRecord],
    ) -> pa.Table:
        rows = []
        for i in range(start, end):
            value = values[i]
            if value is None:
                rejected.append(UndecodableRecord(i, "null", "cannot read the value: found null"))
                continue
            try:
                rows.append(self._convert(_parsed(value)))
            except NotThisShape as error:
                rejected.append(UndecodableRecord(i, "shape", str(error)))
            except (RecursionError, NestedTooDeep):
                rejected.append(UndecodableRecord(i, "limit", str(NestedTooDeep())))
            except ValueError as error:
                rejected.append(UndecodableRecord(i, "json", no_json(value, error)))
        if not len(self._schema):  # rows without columns: only a struct array keeps their number
            batch = pa.RecordBatch.from_struct_array(pa.array(rows, self._struct))
            return pa.Table.from_batches([batch])
        arrays = []
        for column, plain in zip(self._schema, self._plain, strict=True):
            array = pa.array([row[column.name] for row in rows], plain)
            arrays.append(array if plain == column.type else project(array, column, by_place))
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _without_extensions(kind: pa.DataType) -> pa.DataType:
    """The type that Arrow builds from Python values: in nested types bytes instead of UUIDs."""

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(_without_extensions(field.type))

    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([inside(child) for child in kind])
    if pa.types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = inside(kind.value_field)
        return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element)
    return kind


def _parsed(value: bytes) -> Any:
    # Floats are parsed as Decimal, so that decimal columns get every digit.
    try:
        parsed = json.loads(
            value.decode(),
            parse_constant=_no_constant,
            parse_float=Decimal,
            parse_int=_whole if _MINUS.search(value) else None,
        )
    except DecimalException:
        raise ValueError("a number's exponent is beyond all bounds") from None
    # With at most MAX_DEPTH brackets, strings included, the value cannot be too deep.
    if type(parsed) in (dict, list) and value.count(b"{") + value.count(b"[") > MAX_DEPTH:
        _check_depth(parsed)
    return parsed


_MINUS = re.compile(rb"-0(?![0-9.eE])")


def _whole(text: str) -> int | Decimal:
    return MINUS_ZERO if text == "-0" else int(text)


class NestedTooDeep(Exception):
    def __str__(self) -> str:
        return f"cannot read JSON: it is nested too deep; expected at most {MAX_DEPTH} levels"


def _check_depth(parsed: Any) -> None:
    """Bounds the depth, so that later code may recurse over the value."""
    level = [parsed]
    for _ in range(MAX_DEPTH):
        level = [
            inside
            for node in level
            for inside in (node.values() if type(node) is dict else node)
            if type(inside) in (dict, list)
        ]
        if not level:
            return
    raise NestedTooDeep


def no_json(value: bytes, error: ValueError) -> str:
    """The error, and the first bytes of the value, to help recognise another format."""
    return f"cannot read JSON: the value is not JSON: {error}; it begins with {value[:24]!r}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _fast(kind: pa.DataType) -> bool:
    """Do pyarrow's JSON reader with `_settled` and the one-by-one reader agree on this type?"""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_fast(child.type) for child in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _fast(kind.value_type)
    return any(is_kind(kind) for is_kind in _FAST)


def _loose(kind: pa.DataType) -> pa.DataType:
    """The type for pyarrow's reader: all nullable, since `_settled` checks the nulls."""
    if pa.types.is_struct(kind):
        return pa.struct([(child.name, _loose(child.type)) for child in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_loose(kind.value_type))
    return kind


def _settled(array: pa.Array, kind: pa.DataType, nullable: bool) -> pa.Array:
    """The array in its real type; raises where the one-by-one reader would reject a row."""
    if array.offset or (array.null_count and not nullable):
        raise NotThisShape("a value", "null")
    if pa.types.is_struct(kind):
        children = []
        for i, target in enumerate(kind):
            child = array.field(i)
            if not target.nullable and array.null_count:
                if child.filter(array.is_valid()).null_count:
                    raise NotThisShape("a value", "null")
                children.append(_settled(child, target.type, nullable=True))
            else:
                children.append(_settled(child, target.type, target.nullable))
        return pa.Array.from_buffers(kind, len(array), array.buffers()[:1], children=children)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        buffers = array.buffers()[:2]
        if pa.types.is_large_list(kind):
            wide = np.frombuffer(buffers[1], np.int32, len(array) + 1).astype(np.int64)
            buffers = [buffers[0], pa.py_buffer(wide)]
        values = _settled(array.values, kind.value_type, kind.value_field.nullable)
        return pa.Array.from_buffers(kind, len(array), buffers, children=[values])
    if pa.types.is_floating(kind) and not pc.all(pc.is_finite(array), min_count=0).as_py():
        raise NotThisShape("a finite number", "another")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        array.validate(full=True)  # pyarrow's reader accepts invalid UTF-8
    return array


def _found(value: Any) -> str:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        Decimal: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _converter(target: pa.Field) -> Convert:
    """A function from a value of `_parsed` to a value for `pa.array`, for one field."""
    # Not by the field itself: to Arrow, maps of UUIDs with required and with optional values are
    # equal.
    return _compiled(pa.schema([target]).serialize().to_pybytes())


@functools.lru_cache(maxsize=10_000)
def _compiled(serialized: bytes) -> Convert:
    target = pa.ipc.read_schema(pa.py_buffer(serialized)).field(0)
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
        return lambda value: [item(element) for element in _must(value, list, "array")]
    if types.is_map(kind):
        key, item = _converter(kind.key_field), _converter(kind.item_field)
        return lambda value: [
            (key(name), item(element)) for name, element in _must(value, dict, "object").items()
        ]
    if types.is_boolean(kind):
        return lambda value: _must(value, bool, "boolean")
    if types.is_int32(kind) or types.is_int64(kind):
        most = 2 ** (kind.bit_width - 1)

        def whole(value: Any) -> int:
            if value is MINUS_ZERO:
                return 0
            if type(value) is not int:
                raise NotThisShape(
                    str(kind),
                    _found(value)
                    + (" with a fraction or exponent" if type(value) is Decimal else ""),
                )
            if not -most <= value < most:
                raise NotThisShape(str(kind), "a number out of its range")
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
    raise SchemaMismatch(
        f"cannot fit JSON into column {target.name}: expected a type that JSON can fill, "
        f"found {target.type}"
    )


def _of_struct(kind: pa.StructType) -> Convert:
    fields = [(child.name, _converter(child), child.nullable) for child in kind]
    names = {name for name, _, _ in fields}

    def convert(value: Any) -> dict[str, Any]:
        _must(value, dict, "object")
        for name in value:
            if name not in names and value[name] is not None:  # null is the same as absent
                raise NotThisShape("no such field", _found(value[name]), name)
        row = {}
        name = ""
        try:
            for name, part, nullable in fields:
                if name not in value and not nullable:
                    raise NotThisShape("a value", "nothing")
                row[name] = part(value.get(name))
        except NotThisShape as error:
            error.path.append(name)
            raise
        return row

    return convert


def _must(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise NotThisShape(name, _found(value))
    return value


def _text(value: Any) -> str:
    text: str = _must(value, str, "string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotThisShape("text", "half of a surrogate pair") from None
    return text


def _floating(value: Any, kind: pa.DataType) -> float:
    if type(value) not in (int, Decimal):
        raise NotThisShape(str(kind), _found(value))
    try:
        number = float(value)
        if pa.types.is_float32(kind):
            with np.errstate(over="ignore"):
                number = float(np.float32(number))
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise NotThisShape(str(kind), "a number out of its range")
    return number


_DECIMAL = re.compile(r"[+-]?\d{1,80}(\.\d{1,80})?([eE][+-]?\d{1,3})?", re.ASCII)
_EXACT = Context(prec=400)


def _decimal(value: Any, kind: pa.Decimal128Type) -> Decimal:
    if type(value) is str and _DECIMAL.fullmatch(value):
        value = Decimal(value)
    if type(value) not in (int, Decimal):
        actual = "text that is none" if type(value) is str else _found(value)
        raise NotThisShape(str(kind), actual)
    # Exact or rejected: digits are never rounded away.
    try:
        exact = Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except DecimalException:
        exact = None
    bound = 10 ** (kind.precision - kind.scale)
    if exact is None or exact != value or exact.copy_abs() >= bound:
        raise NotThisShape(str(kind), "a number that does not fit")
    return exact


_CLOCK = r"(\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
_TIME = re.compile(_CLOCK, re.ASCII)
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_STAMP = re.compile(_DATE.pattern + "[Tt ]" + _CLOCK + r"([Zz]|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _matched(pattern: re.Pattern[str], value: Any, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(_must(value, str, expected))
    if not match:
        raise NotThisShape(expected, "other text")
    return match


def _date(value: Any) -> int:
    year, month, day = map(int, _matched(_DATE, value, "a date as 2001-02-03").groups())
    try:
        return date(year, month, day).toordinal() - _EPOCH.toordinal()
    except ValueError as error:
        raise NotThisShape("a date", str(error)) from None


def _ticks(hour: str, minute: str, second: str | None, fraction: str | None, unit: str) -> int:
    """The time of day in `unit`s."""
    digits = 6 if unit == "us" else 9
    text = (fraction or "").ljust(digits, "0")
    if int(hour) > 23 or int(minute) > 59 or int(second or 0) > 59:
        raise NotThisShape("a time of day", f"{hour}:{minute}:{second or '00'}")
    if text[digits:].strip("0"):
        raise NotThisShape(f"at most {digits} digits of a second", f"{len(text)}")
    seconds = (int(hour) * 60 + int(minute)) * 60 + int(second or 0)
    return int(seconds * 10**digits + int(text[:digits]))


def _time(value: Any, kind: pa.Time64Type) -> int:
    hour, minute, second, fraction = _matched(_TIME, value, "a time as 12:34:56").groups()
    return _ticks(hour, minute, second, fraction, kind.unit)


def _timestamp(value: Any, kind: pa.TimestampType) -> int:
    expected = "a timestamp as 2001-02-03T04:05:06" + ("Z" if kind.tz else "")
    *_, hour, minute, second, fraction, zone = _matched(_STAMP, value, expected).groups()
    if bool(zone) != bool(kind.tz):
        # A conversion between local time and an instant would need a guess at the zone.
        raise NotThisShape(expected, f"one with{'' if zone else 'out'} a zone")
    day = _date(value[:10])
    shift = 0
    if zone and zone not in "Zz":
        hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
        if hours > 23 or minutes > 59:
            raise NotThisShape("a zone", zone)
        shift = (hours * 60 + minutes) * (-60 if zone[0] == "-" else 60)
    a_second = 1_000_000 if kind.unit == "us" else 1_000_000_000
    ticks = _ticks(hour, minute, second, fraction, kind.unit)
    moment = (day * 86_400 - shift) * a_second + ticks
    if not -(2**63) <= moment < 2**63:
        raise NotThisShape(str(kind), "a moment out of its range")
    return moment


def _bytes(value: Any, size: int | None) -> bytes:
    try:
        data = base64.b64decode(_must(value, str, "base64 text"), validate=True)
    except (binascii.Error, ValueError):
        raise NotThisShape("base64 text", "other text") from None
    if size is not None and len(data) != size:
        raise NotThisShape(f"{size} bytes", f"{len(data)}")
    return data


def _uuid(value: Any) -> bytes:
    try:
        return uuid.UUID(_must(value, str, "a UUID")).bytes
    except ValueError:
        raise NotThisShape("a UUID", "other text") from None


# --- columns of JSON ----------------------------------------------------------------------------


def infer(values: Iterable[bytes]) -> pa.Schema:
    """The columns that fit all these JSON objects; other values are ignored."""
    seen: dict[str, Any] = {}
    for value in values:
        try:
            parsed = _parsed(value)
            kind = kind_of(parsed) if type(parsed) is dict else {}
        except (ValueError, RecursionError, NestedTooDeep, SchemaMismatch):
            continue  # the decoder rejects it, with reason and position
        seen = common_kind(seen, kind, "")
    return pa.schema([pa.field(name, arrow(kind, name)) for name, kind in seen.items()])


def wanted(
    value: bytes, columns: pa.Schema, renames: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The changes that a table with `columns` needs to hold the value, as a kind (see
    `frazil.formats.json_inference`). Raises `UnexpectedJson` if no change helps. `renames`: new
    name of a column → its current name.

    A field that the table has is checked as in `JsonShape`: can its value be converted to the
    column's type? Only fields that the table lacks are inferred.
    """
    try:
        parsed = _parsed(value)
        if type(parsed) is not dict:
            raise NotThisShape("object", _found(parsed))
        fields = {column.name: column for column in columns}
        for name, old in (renames or {}).items():
            if name in parsed and name not in fields and old in fields and old not in parsed:
                fields[name] = fields.pop(old).with_metadata({_RENAMED: old.encode()})
        return _wanted_of(parsed, fields)
    except NestedTooDeep as error:
        raise UnexpectedJson("limit", str(error)) from None
    except RecursionError:
        raise UnexpectedJson("limit", str(NestedTooDeep())) from None
    except NotThisShape as error:
        raise UnexpectedJson("shape", str(error)) from None
    except SchemaMismatch as error:
        raise UnexpectedJson("shape", error.message) from None
    except UnicodeEncodeError:
        raise UnexpectedJson(
            "shape", "cannot infer a type: found half of a surrogate pair"
        ) from None
    except ValueError as error:
        raise UnexpectedJson("json", no_json(value, error)) from None


class UnexpectedJson(Exception):
    """A value that fits no table, even after a schema change."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


_RENAMED = b"frazil.renamed"


def _wanted_of(value: dict[str, Any], fields: Mapping[str, pa.Field]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, member in value.items():
        try:
            column = fields.get(name)
            if column is not None:
                kind = _wanted(member, column)
                old = (column.metadata or {}).get(_RENAMED)
                kind = kind if old is None else f"={old.decode()}"
            elif member is None:
                continue  # null is the same as absent
            elif (kind := kinds_of(kind_of({name: member}))) is None:
                raise NotThisShape("no such field", f"{_found(member)} without any value")
            else:
                kind = kind[name]
            if kind is not None:
                changes[name] = kind
        except NotThisShape as error:
            error.path.append(name)
            raise
    for name, column in fields.items():
        if name not in value and not column.nullable:
            raise NotThisShape("a value", "nothing", name)
    return changes


def _wanted(value: Any, column: pa.Field) -> Any:
    """The change that the column needs for the value; None: no change."""
    try:
        _converter(column)(value)
        return None
    except NotThisShape:
        kind = column.type
        if pa.types.is_struct(kind) and type(value) is dict:
            return _wanted_of(value, {child.name: child for child in kind}) or None
        if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and type(value) is list:
            return [_wanted_by_all(value, kind.value_field)]
        if pa.types.is_map(kind) and type(value) is dict:
            for name in value:
                _converter(kind.key_field)(name)
            return SeenValues(_wanted_by_all(value.values(), kind.item_field))
        if wider := _wider(value, kind):
            return wider
        raise


def _wanted_by_all(values: Iterable[Any], column: pa.Field) -> Any:
    kind = None
    for value in values:
        kind = common_kind(kind, _wanted(value, column), column.name)
    return kind


def _wider(value: Any, kind: pa.DataType) -> str:
    """The type to which Iceberg can widen the column so that it holds the value; empty: none."""
    if pa.types.is_int32(kind) and type(value) is int and -(2**63) <= value < 2**63:
        return "long"
    if pa.types.is_float32(kind) and type(value) in (int, Decimal):
        with suppress(NotThisShape):
            _floating(value, pa.float64())
            return "double"
    if pa.types.is_decimal(kind):
        for precision in range(kind.precision + 1, 39):
            with suppress(NotThisShape):
                _decimal(value, pa.decimal128(precision, kind.scale))
                return f"decimal:{precision}"
    return ""
