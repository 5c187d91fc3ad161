"""Records in Avro, and in other formats that decode without the table's schema. Runs on executors.

In: the values of a chunk. Out, in the `ChunkResult`: rows, deletes and rejections. Records of one
writer schema are fitted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import SchemaMismatch
from frazil.formats import debezium
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord, among
from frazil.formats.decoder import Decoder
from frazil.pipeline.chunk_result import ChunkWork, Rejection
from frazil.pipeline.destination import Destination
from frazil.pipeline.evolution import Aliases, renamed, together
from frazil.pipeline.fitting import OP, TableFitter
from frazil.pipeline.routing import Route
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
                    self._moved(work, share.tables, part)
                    part = self._unwrapped(work, share.tables, part)
                    aliases = debezium.aliases(aliases)
                for table in map(self._to, share.tables):
                    deleting = share.envelope and table.exists
                    rows = self._deleted(work, table, part) if deleting else part
                    self._into(work, table, rows, aliases)

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
            keys = pa.table({column: rows.column(source) for column, source in fields.items()})
            keys = _with_order(keys, table.plan, column_of(rows, table.order_path))
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
                keys, index = debezium.left(group.rows, list(fields.values()))
                if len(index):
                    keys = pa.table({key: keys.column(source) for key, source in fields.items()})
                    changed = group.take(index)
                    path = debezium.path_of(table.order_path)
                    keys = _with_order(keys, table.plan, column_of(changed.rows, path))
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
        columns = group.rows.schema
        known = together(table.plan.aliases, aliases) if table.exists else aliases
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


def _with_order(keys: pa.Table, plan: TablePlan, orders: Any) -> pa.Table:
    """Deleted keys with the version of the delete, if it has one."""
    if orders is None or not plan.own_order:
        return keys
    return keys.append_column(plan.own_order, orders)
