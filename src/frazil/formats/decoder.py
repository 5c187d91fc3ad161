"""Record values → columns, or rejected records. Runs on executors, after the fetch.

In: the values of a chunk of records. Out: tables of plain Arrow types, one per writer schema, and
an `UndecodableRecord` for each value that cannot be read. Every value is in exactly one of them.

Promises: whether a value is rejected depends on that value alone, not on the rest of the chunk; bad
data never raises. The environment does: a registry that does not answer raises `Unavailable`, a
registry that refuses access or an invalid setting raises `ConfigError`.

Avro is read in `frazil.arrow.avro`, JSON in `frazil.formats.json_reader`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.avro import BLOCK_ROWS, WriterSchema, open_block, preamble
from frazil.config.sections import UNAVAILABLE_VALUE
from frazil.errors import AccountingError, ConfigError, SchemaMismatch, Undecodable
from frazil.formats.decode_result import (
    DecodedChunk,
    FramedRecords,
    UndecodableRecord,
    kept_positions,
)
from frazil.formats.json_columns import infer
from frazil.formats.json_reader import JsonShape
from frazil.formats.schema_registry import (
    RegistryRefusal,
    SchemaRegistry,
    UnknownSchemaId,
    configured_writer,
)
from frazil.kafka.record_batch import RecordBatches, RecordLayout

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
    #: JSON: the columns that the config declares, and what happens to other fields: infer, drop,
    #: reject
    declared: pa.Schema = field(default_factory=lambda: pa.schema([]))
    undeclared: str = "infer"

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
            declared = self._format.declared
            if self._format.undeclared != "infer":
                return declared
            inferred = infer(value for value in values if value is not None)
            others = [column for column in inferred if column.name not in declared.names]
            return pa.schema([*declared, *others], declared.metadata)
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
                index = None if every and not bad else kept_positions(members, bad)
                decoded.append(DecodedChunk(table, index, schema_id))
        return decoded, rejected

    def _writer(self, schema_id: int | None) -> WriterSchema | RegistryRefusal:
        if self._format.schema:
            return configured_writer(self._format.schema)
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
    f"cannot read the value: its schema id is in the record's header {SCHEMA_ID}, which "
    "is not read; expected it before the value, where serializers put it by default"
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
