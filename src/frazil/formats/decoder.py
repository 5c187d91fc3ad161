"""Record values → columns, or rejected records. Runs on executors, after the fetch.

In: the values of a chunk of records. Out: tables of plain Arrow types, one per writer schema, and
an `UndecodableRecord` for each value that cannot be read. Every value is in exactly one of them.

Promises: whether a value is rejected depends on that value alone, not on the rest of the chunk; bad
data never raises. The environment does: a registry that does not answer raises `Unavailable`, a
registry that refuses access or an invalid setting raises `ConfigError`.

Avro is read in `frazil.arrow.avro`, JSON in `frazil.formats.json_reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow.avro import WriterSchema
from frazil.arrow.byte_slices import ByteSlices
from frazil.config.sections import UNAVAILABLE_VALUE
from frazil.errors import ConfigError, SchemaMismatch, Undecodable
from frazil.formats.decode_result import Decoded, DecodedChunk, UndecodableRecord, accounted
from frazil.formats.json_columns import infer
from frazil.formats.json_reader import JsonShape
from frazil.formats.schema_registry import (
    RegistryRefusal,
    SchemaRegistry,
    UnknownSchemaId,
    configured_writer,
)
from frazil.native.avro import HEADER, NO_ID, schema_ids
from frazil.native.columns import Longs
from frazil.native.record_batches import SCHEMA_ID

KINDS = ("confluent-avro", "avro", "json", "raw")
RAW = pa.schema([pa.field("value", pa.large_binary())])


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

    def decode(self, values: Sequence[bytes | None], headers: pa.Array | None = None) -> Decoded:
        """Every value is in a returned chunk or rejected. `headers`: of the records, if known."""
        if not values:
            return [], []
        if self._format.kind == "raw":
            rows = pa.Table.from_arrays([ByteSlices.of(values).to_arrow()], schema=RAW)
            return [DecodedChunk(rows, None, None)], []
        if self._format.kind == "json":
            return (self._shape or JsonShape(self.columns(values))).decode(values)
        return accounted(len(values), *self._avro(ByteSlices.of(values), headers))

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

    def _avro(self, values: ByteSlices, headers: pa.Array | None) -> Decoded:
        rejected = [
            UndecodableRecord(i, "null", "cannot read the value: found null")
            for i in np.flatnonzero(values.nulls).tolist()
        ]
        if self._format.kind == "confluent-avro":
            ids, misheaded = _schema_ids(values, headers)
            rejected += misheaded
            datums = values.without(HEADER)
        else:
            ids, datums = np.where(values.nulls, NO_ID, 0), values
        decoded: list[DecodedChunk] = []
        for number, members in _groups(ids):
            schema_id = number if self._format.kind == "confluent-avro" else None
            writer = self._writer(schema_id)
            if not isinstance(writer, WriterSchema):
                places = range(len(values)) if members is None else members.tolist()
                rejected += (
                    UndecodableRecord(i, "schema", writer.reason, schema_id) for i in places
                )
                continue
            table, bad = writer.read(datums if members is None else datums.take(members))
            if bad:
                members = np.arange(len(values)) if members is None else members
                places = members[[i for i, _ in bad]].tolist()
                rejected += (
                    UndecodableRecord(i, "datum", why, schema_id)
                    for i, (_, why) in zip(places, bad, strict=True)
                )
                members = np.delete(members, [i for i, _ in bad])
            if table.num_rows:
                decoded.append(DecodedChunk(table, members, schema_id))
        return decoded, rejected

    def _writer(self, schema_id: int | None) -> WriterSchema | RegistryRefusal:
        if self._format.schema:
            return configured_writer(self._format.schema)
        assert self._registry is not None
        assert schema_id is not None
        return self._registry.writer(schema_id)


_APART = (
    f"cannot read the value: its schema id is in the record's header {SCHEMA_ID}, which "
    "is not read; expected it before the value, where serializers put it by default"
)


def _schema_ids(
    values: ByteSlices, headers: pa.Array | None
) -> tuple[Longs, list[UndecodableRecord]]:
    """The schema id of each value, or `NO_ID`; and the values that are not null and have none."""
    ids = np.empty(len(values), np.int64)
    starts, sizes = map(np.ascontiguousarray, (values.starts, values.sizes))
    places = starts.ctypes.data, sizes.ctypes.data, len(values), ids.ctypes.data
    schema_ids(values.address, *places)
    # A value without a schema id before it may still begin with bytes that look like one.
    apart = _schema_apart(headers)
    ids[apart] = NO_ID
    lacking = np.flatnonzero((ids == NO_ID) & ~values.nulls)
    reasons = dict.fromkeys(apart.tolist(), _APART)
    return ids, [
        UndecodableRecord(i, "header", reasons.get(i) or _misheaded(values[i] or b""))
        for i in lacking.tolist()
    ]


def _groups(ids: Longs) -> Iterator[tuple[int, Longs | None]]:
    """Each schema id, in the order of its first value, with the positions of its values; None: all
    values have it."""
    if len(ids) and ids[0] != NO_ID and (ids == ids[0]).all():
        yield int(ids[0]), None
        return
    encoded = pa.array(ids).dictionary_encode()
    numbers = encoded.indices.to_numpy()
    # 16-bit numbers are radix-sorted.
    narrow = numbers.astype(np.uint16) if len(encoded.dictionary) <= 1 << 16 else numbers
    order = np.argsort(narrow, kind="stable")
    ends = np.cumsum(np.bincount(numbers))
    for number, members in zip(
        encoded.dictionary.to_pylist(), np.split(order, ends[:-1]), strict=True
    ):
        if number != NO_ID:
            yield number, members


def _schema_apart(headers: pa.Array | None) -> Longs:
    """Indexes of the records that have their schema id in a header."""
    if headers is None or not len(items := headers.flatten()):
        return np.empty(0, np.int64)
    named = pc.equal(items.field("key"), SCHEMA_ID).fill_null(False)
    return np.asarray(pc.list_parent_indices(headers).filter(named), np.int64)


def _misheaded(value: bytes) -> str:
    """Why the Confluent header is invalid; empty if it is valid."""
    if len(value) < HEADER:
        return f"cannot read the header: expected {HEADER} bytes, found {len(value)}"
    return "" if value[0] == 0 else f"cannot read the header: expected byte 0, found {value[0]}"


def _id(header: bytes) -> int:
    return int.from_bytes(header[1:HEADER], "big")
