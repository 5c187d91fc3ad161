"""Records in Avro, and in other formats that decode without the table's schema. Runs on executors.

In: the values of a chunk. Out, in the `ChunkResult`: rows, deletes and rejections. Records of one
writer schema are fitted together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import SchemaMismatch
from frazil.formats import debezium
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord, among
from frazil.formats.decoder import Decoder
from frazil.pipeline import connect_types
from frazil.pipeline.chunk_result import ChunkWork, Rejection
from frazil.pipeline.connect_types import converted
from frazil.pipeline.destination import Destination
from frazil.pipeline.evolution import Aliases, renamed, together
from frazil.pipeline.fitting import OP, TableFitter
from frazil.pipeline.routing import Route
from frazil.pipeline.selection import field_at
from frazil.pipeline.strict_cast import CastMismatch
from frazil.pipeline.table_plan import LOG, ChunkPlan, TablePlan
from frazil.pipeline.versions import column_of


class ColumnRecords(TableFitter):
    """Processes records whose writer schema names their columns."""

    def __init__(self, plan: ChunkPlan) -> None:
        super().__init__(plan)
        self._decoder = Decoder(plan.format)

    def process(self, work: ChunkWork, way: Route | None) -> None:
        """Process one chunk."""
        groups, rejected = self._decoder.decode(work.opened.values, work.opened.headers)
        for record in self._deleting(work, way, rejected):
            self._undecoded(work, record, way)
        for group in groups:
            for share in [way] if way else self._sorted(work, group.rows, group.index):
                part = group if share.index is None else group.take(share.index)
                if not share.tables:
                    work.result.skipped += len(part.rows)
                    continue
                aliases = self._decoder.aliases(group.schema_id)
                if share.envelope:
                    part = self._without_messages(work, part)
                    self._moved(work, share.tables, part)
                    part = self._unwrapped(work, share.tables, part)
                    aliases = debezium.aliases(aliases)
                    if not len(part.rows):  # they may be no change events, without an operation
                        continue
                for table in map(self._to, share.tables):
                    deleting = share.envelope and table.exists
                    rows = self._deleted(work, table, part) if deleting else part
                    self._into(work, table, rows, aliases)

    def _without_messages(self, work: ChunkWork, group: DecodedChunk) -> DecodedChunk:
        """Skips messages of the database's log, which have no row."""
        message = debezium.messages(group.rows)
        if not message.any():
            return group
        work.result.skipped += int(message.sum())
        return group.take(np.flatnonzero(~message))

    def _unwrapped(
        self, work: ChunkWork, tables: tuple[str, ...], group: DecodedChunk
    ) -> DecodedChunk:
        """The rows of change events."""
        try:
            rows, kept, bad = debezium.unwrap(group.rows)
        except SchemaMismatch as error:
            count = len(group.rows)
            bad = [UndecodableRecord(i, "envelope", error.message) for i in range(count)]
            rows, kept = group.rows.slice(0, 0), np.empty(0, np.int64)
        work.result.reject_all(bad, group.index, tables, group.schema_id)
        return replace(group, rows=rows, index=among(group.index, kept))

    def _undecoded(self, work: ChunkWork, rejected: UndecodableRecord, way: Route | None) -> None:
        if rejected.kind == "null" and work.changes:
            work.result.skipped += 1  # a tombstone: the delete event before it was a row
        elif way is not None and not way.tables:
            work.result.skipped += 1  # a rule skips the whole topic
        else:
            work.result.reject_all([rejected], None, way.tables if way else ())

    def _deleting(
        self, work: ChunkWork, way: Route | None, rejected: Sequence[UndecodableRecord]
    ) -> list[UndecodableRecord]:
        """Process records without a value: a delete in an upsert table, a row of a change log.
        Returns the other rejected records."""
        tables = [table for table in map(self._to, way.tables) if table.mode] if way else []
        if not tables or work.changes:
            return list(rejected)
        nulls = np.array([record.index for record in rejected if record.kind == "null"], np.int64)
        for table in tables:
            self._tombstones(work, table, nulls)
        others = [name for name in way.tables if not self._to(name).mode] if way else []
        for i in nulls.tolist() if others else ():
            reason = "cannot read the value: found null"
            work.result.reject(Rejection(i, "null", reason, tuple(others)))
        return [record for record in rejected if record.kind != "null"]

    def _deleted(self, work: ChunkWork, table: Destination, group: DecodedChunk) -> DecodedChunk:
        """Process the deletes among unwrapped changes. Returns the changes that are rows."""
        if not table.plan.key or table.name in work.below:
            return group
        gone = pc.equal(group.rows.column("_op"), "d").to_numpy()
        if not gone.any():
            return group
        rows, at, fields = group.rows, np.flatnonzero(gone), table.key_fields
        lacking = [column for column in (fields or {}).values() if column not in rows.schema.names]
        if fields is None:
            self._by_kafka_keys(work, table, group.positions[at])
        elif not lacking:
            keys = _key_columns(rows, fields)
            keys = _with_order(keys, table.plan, rows, table.order_path)
            self._fitted(work, table, replace(group, rows=keys).take(at), work.result.gone)
        else:
            fact = f"the change has no column {lacking[0]!r}, which is its key"
            self._reject(work, table, fact, group.positions[at], group.schema_id)
        return group.take(np.flatnonzero(~gone))

    def _moved(self, work: ChunkWork, names: Sequence[str], group: DecodedChunk) -> None:
        """Delete the old keys of rows whose key changed."""
        for table in map(self._to, names):
            fields = table.key_fields if table.exists else None
            # A change of a key that is Kafka's own is two records.
            if fields and table.plan.key and table.name not in work.below:
                types = {of: table.plan.shape.arrow.field(key).type for key, of in fields.items()}
                keys, index = debezium.left(group.rows, list(types), partial(_compared, types))
                if len(index):
                    changed = group.take(index)
                    path = debezium.path_of(table.order_path)
                    keys = _key_columns(keys, fields)
                    keys = _with_order(keys, table.plan, changed.rows, path)
                    self._fitted(work, table, replace(changed, rows=keys), work.result.left)

    def _into(
        self, work: ChunkWork, table: Destination, group: DecodedChunk, aliases: Aliases
    ) -> None:
        """Fit rows of one writer schema into one table, or reject them, or record a need."""
        if table.name in work.below or not len(group.rows):
            return
        if table.select is not None:
            passes = table.select.selection.passes
            aliases = {path: olds for path, olds in aliases.items() if passes(_top(path))}
        for part in self._selected(work, table, group):
            self._fit_columns(work, table, part, aliases)

    def _fit_columns(
        self, work: ChunkWork, table: Destination, group: DecodedChunk, aliases: Aliases
    ) -> None:
        known = together(table.plan.aliases, aliases) if table.exists else aliases
        existing = table.plan.columns if table.exists else ()
        columns = connect_types.columns(group.rows.schema, existing, known if table.exists else {})
        if not table.exists:
            verdict = table.refused or table.unmakeable(columns) or True
        else:
            verdict = table.verdict(columns, known)
        if verdict is True:
            self._need(work, table, columns, known)
        elif verdict:
            self._reject(work, table, verdict, group.positions, group.schema_id)
        else:
            rows = renamed(group.rows, table.plan.columns, known)
            self._fitted(work, table, replace(group, rows=rows))

    def _need(
        self, work: ChunkWork, table: Destination, columns: pa.Schema, aliases: Aliases
    ) -> None:
        if table.mode == LOG:  # a delete may contain nothing but its key
            if "_op" not in columns.names:
                columns = columns.append(OP)
            columns = pa.schema(
                [column.with_nullable(True) for column in columns], columns.metadata
            )
        work.result.need(table.name, columns, aliases)


def _top(path: str) -> str:
    return path.partition(".")[0]


def _key_columns(rows: pa.Table, fields: Mapping[str, str]) -> pa.Table:
    """Key columns from the fields of the record's value."""
    schema = pa.schema(
        [
            rows.schema.field(source).with_name(key).with_nullable(True)
            for key, source in fields.items()
        ]
    )
    arrays = [rows.column(source) for source in fields.values()]
    return pa.Table.from_arrays(arrays, schema=schema)


def _with_order(keys: pa.Table, plan: TablePlan, rows: pa.Table, path: str) -> pa.Table:
    """Deleted keys with the version of the delete, if it has one: that of `rows` at `path`."""
    orders = column_of(rows, path) if plan.own_order else None
    if orders is None:
        return keys
    named = [path] if path in rows.schema.names else path.split(".")
    field = field_at(rows.schema, tuple(named)) or pa.field(path, orders.type)
    return keys.append_column(field.with_name(plan.own_order).with_nullable(True), orders)


def _compared(types: Mapping[str, pa.DataType], array: pa.Array, field: pa.Field) -> pa.Array:
    """Values of a key in the table's type, as Arrow can compare them. If it cannot take one of
    them, they are compared as they were sent: the change with that value is rejected."""
    try:
        array = converted(array, field, types[field.name])
    except CastMismatch:
        array = pa.array([None if v is None else repr(v) for v in array.to_pylist()], pa.string())
    return array.storage if isinstance(array, pa.ExtensionArray) else array
