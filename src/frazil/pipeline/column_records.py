"""Records in Avro, and in other formats that decode without the table's schema. Runs on executors.

In: the values of a chunk. Out, in the `ChunkResult`: rows, deletes and rejections. Records of one
writer schema are fitted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import SchemaMismatch
from frazil.formats import debezium
from frazil.formats.decode_result import UndecodableRecord
from frazil.formats.decoder import Decoder
from frazil.kafka.record_batch import Longs
from frazil.pipeline.chunk_result import ChunkWork, Rejection, among
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
            shares = [way] if way else self._sorted(work, group.rows, group.index)
            for share in shares:
                rows = group.rows
                at = among(group.index, share.index)
                if share.index is not None:
                    rows = rows.take(pa.array(share.index))
                if not share.tables:
                    work.result.skipped += len(rows)
                    continue
                if share.envelope:
                    self._moved(work, share.tables, rows, at, group.schema_id)
                    try:
                        rows, kept, bad = debezium.unwrap(rows)
                    except SchemaMismatch as error:
                        kept = np.empty(0, np.int64)
                        bad = [
                            UndecodableRecord(i, "envelope", error.message)
                            for i in range(len(rows))
                        ]
                        rows = rows.slice(0, 0)
                    work.result.reject_all(bad, at, share.tables, group.schema_id)
                    at = among(at, kept)
                aliases = self._decoder.aliases(group.schema_id)
                if share.envelope:
                    aliases = debezium.aliases(aliases)
                for table in map(self._to, share.tables):
                    part = (rows, at)
                    if share.envelope and table.exists:
                        part = self._deleted(work, table, *part, group.schema_id)
                    self._into(work, table, *part, aliases, group.schema_id)

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

    def _deleted(
        self,
        work: ChunkWork,
        table: Destination,
        rows: pa.Table,
        at: Longs | None,
        schema_id: int | None,
    ) -> tuple[pa.Table, Longs | None]:
        """Process the deletes among unwrapped changes. Returns the changes that are rows."""
        if not table.plan.key or table.name in work.below:
            return rows, at
        gone = pc.equal(rows.column("_op"), "d").to_numpy()
        if not gone.any():
            return rows, at
        index = np.flatnonzero(gone)
        fields = table.key_fields
        lacking = [column for column in (fields or {}).values() if column not in rows.schema.names]
        if fields is None:
            self._by_kafka_keys(work, table, index if at is None else at[index])
        elif not lacking:
            orders = column_of(rows, table.order_path)
            keys = pa.table({column: rows.column(source) for column, source in fields.items()})
            keys = _with_order(keys, table.plan, orders).take(pa.array(index))
            where = among(at, index)
            self._fitted(work, table, keys, where, schema_id, work.result.gone)
        else:
            fact = f"the change has no column {lacking[0]!r}, which is its key"
            self._reject(work, table, fact, len(index), among(at, index), schema_id)
        kept = np.flatnonzero(~gone)
        return rows.take(pa.array(kept)), among(at, kept)

    def _moved(
        self,
        work: ChunkWork,
        names: Sequence[str],
        rows: pa.Table,
        at: Longs | None,
        schema_id: int | None,
    ) -> None:
        """Delete the old keys of rows whose key changed."""
        for table in map(self._to, names):
            fields = table.key_fields if table.exists else None
            # A change of a key that is Kafka's own is two records.
            if fields and table.plan.key and table.name not in work.below:
                keys, index = debezium.left(rows, list(fields.values()))
                if len(index):
                    keys = pa.table({key: keys.column(source) for key, source in fields.items()})
                    changed = rows.take(pa.array(index))
                    path = debezium.path_of(table.order_path)
                    keys = _with_order(keys, table.plan, column_of(changed, path))
                    where = among(at, index)
                    self._fitted(work, table, keys, where, schema_id, work.result.left)

    def _into(
        self,
        work: ChunkWork,
        table: Destination,
        rows: pa.Table,
        at: Longs | None,
        aliases: Aliases,
        schema_id: int | None,
    ) -> None:
        """Fit rows of one writer schema into one table, or reject them, or record a need."""
        if table.name in work.below or not len(rows):
            return
        if table.select is not None:
            passes = table.select.selection.passes
            aliases = {path: olds for path, olds in aliases.items() if passes(_top(path))}
        for part, where in self._selected(work, table, rows, at, schema_id):
            self._fit_columns(work, table, part, where, aliases, schema_id)

    def _fit_columns(
        self,
        work: ChunkWork,
        table: Destination,
        rows: pa.Table,
        at: Longs | None,
        aliases: Aliases,
        schema_id: int | None,
    ) -> None:
        if not table.exists:
            if reason := table.refused or table.unmakeable(rows.schema):
                self._reject(work, table, reason, len(rows), at, schema_id)
            else:
                self._need(work, table, rows.schema, aliases)
            return
        known = together(table.plan.aliases, aliases)
        verdict = table.verdict(rows.schema, known)
        if verdict is True:
            self._need(work, table, rows.schema, known)
        elif verdict:
            self._reject(work, table, verdict, len(rows), at, schema_id)
        else:
            self._fitted(work, table, renamed(rows, table.plan.columns, known), at, schema_id)

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
