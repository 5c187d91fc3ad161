"""Records in Avro, and in other formats that decode without the table's schema. Runs on executors.

In: the values of a chunk. Out, in the `ChunkResult`: rows, deletes and rejections. Records of one
writer schema are fitted together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.errors import SchemaMismatch
from frazil.formats import debezium
from frazil.formats.decode_result import UndecodableRecord
from frazil.formats.decoder import Decoder
from frazil.kafka.record_batch import Longs
from frazil.pipeline import connect_types
from frazil.pipeline.chunk_result import ChunkWork, Rejection, among
from frazil.pipeline.connect_types import converted
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
        self._verdicts: dict[tuple[str, str], str | bool] = {}

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
                    rows, at = _without_messages(work, rows, at)
                    self._moved(work, share.tables, rows, at, group.schema_id)
                    try:
                        rows, kept, bad = debezium.unwrap(rows)
                    except SchemaMismatch as error:
                        why = error.message
                        bad = [UndecodableRecord(i, "envelope", why) for i in range(len(rows))]
                        work.result.reject_all(bad, at, share.tables, group.schema_id)
                        continue
                    work.result.reject_all(bad, at, share.tables, group.schema_id)
                    at = among(at, kept)
                aliases = self._decoder.aliases(group.schema_id)
                if share.envelope:
                    aliases = debezium.aliases(aliases)
                for name in share.tables:
                    part = (rows, at)
                    if share.envelope and name in self._tables:
                        part = self._deleted(work, name, *part, group.schema_id)
                    self._into(work, name, *part, aliases, group.schema_id)

    def _undecoded(self, work: ChunkWork, rejected: UndecodableRecord, way: Route | None) -> None:
        if rejected.kind == "null" and self._changes(work):
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
        names = [name for name in way.tables if self._mode(name)] if way else []
        if not names or self._changes(work):
            return list(rejected)
        nulls = np.array([record.index for record in rejected if record.kind == "null"], np.int64)
        for name in names:
            self._tombstones(work, name, nulls)
        others = [name for name in way.tables if name not in names] if way else []
        for i in nulls.tolist() if others else ():
            reason = "cannot read the value: found null"
            work.result.reject(Rejection(i, "null", reason, tuple(others)))
        return [record for record in rejected if record.kind != "null"]

    def _deleted(
        self, work: ChunkWork, name: str, rows: pa.Table, at: Longs | None, schema_id: int | None
    ) -> tuple[pa.Table, Longs | None]:
        """Process the deletes among unwrapped changes. Returns the changes that are rows."""
        plan = self._tables[name]
        if not plan.key or name in work.below:
            return rows, at
        gone = pc.equal(rows.column("_op"), "d").to_numpy()
        if not gone.any():
            return rows, at
        index = np.flatnonzero(gone)
        fields = self._key_fields(name, plan)
        lacking = [column for column in (fields or {}).values() if column not in rows.schema.names]
        if fields is None:
            self._by_kafka_keys(work, name, plan, index if at is None else at[index])
        elif not lacking:
            keys = _key_columns(rows, fields)
            keys = _with_order(keys, plan, rows, self._order_path(name, plan)).take(pa.array(index))
            where = among(at, index)
            self._fitted(work, name, plan, keys, where, schema_id, work.result.gone)
        else:
            fact = f"the change has no column {lacking[0]!r}, which is its key"
            self._reject(work, name, fact, len(index), among(at, index), schema_id)
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
        for name in names:
            plan = self._tables.get(name)
            fields = self._key_fields(name, plan) if plan is not None else None
            # A change of a key that is Kafka's own is two records.
            if plan is not None and plan.key and fields and name not in work.below:
                types = {of: plan.shape.arrow.field(key).type for key, of in fields.items()}
                keys, index = debezium.left(rows, list(types), partial(_compared, types))
                if len(index):
                    changed = rows.take(pa.array(index))
                    path = debezium.path_of(self._order_path(name, plan))
                    keys = _with_order(_key_columns(keys, fields), plan, changed, path)
                    where = among(at, index)
                    self._fitted(work, name, plan, keys, where, schema_id, work.result.left)

    def _into(
        self,
        work: ChunkWork,
        name: str,
        rows: pa.Table,
        at: Longs | None,
        aliases: Aliases,
        schema_id: int | None,
    ) -> None:
        """Fit rows of one writer schema into one table, or reject them, or record a need."""
        if name in work.below or not len(rows):
            return
        if (select := self._selects.plan(name)) is not None:
            selection = select.selection
            aliases = {path: olds for path, olds in aliases.items() if selection.passes(_top(path))}
        for part, where in self._selected(work, name, rows, at, schema_id):
            self._fit_columns(work, name, part, where, aliases, schema_id)

    def _fit_columns(
        self,
        work: ChunkWork,
        name: str,
        rows: pa.Table,
        at: Longs | None,
        aliases: Aliases,
        schema_id: int | None,
    ) -> None:
        plan = self._tables.get(name)
        if plan is None:
            columns = connect_types.columns(rows.schema, (), {})
            if reason := self._refused.get(name) or self._unmakeable(name, columns):
                self._reject(work, name, reason, len(rows), at, schema_id)
            else:
                self._need(work, name, columns, aliases)
            return
        known = together(plan.aliases, aliases)
        columns = connect_types.columns(rows.schema, plan.columns, known)
        key = (name, f"{columns.to_string()} {known}")
        if key not in self._verdicts:
            self._verdicts[key] = self._verdict(plan, columns, known)
        verdict = self._verdicts[key]
        if verdict is True:
            self._need(work, name, columns, known)
        elif verdict:
            self._reject(work, name, str(verdict), len(rows), at, schema_id)
        else:
            self._fitted(work, name, plan, renamed(rows, plan.columns, known), at, schema_id)

    def _need(self, work: ChunkWork, name: str, columns: pa.Schema, aliases: Aliases) -> None:
        if self._mode(name) == LOG:  # a delete may contain nothing but its key
            if "_op" not in columns.names:
                columns = columns.append(OP)
            columns = pa.schema(
                [column.with_nullable(True) for column in columns], columns.metadata
            )
        work.result.need(name, columns, aliases)


def _without_messages(
    work: ChunkWork, rows: pa.Table, at: Longs | None
) -> tuple[pa.Table, Longs | None]:
    message = debezium.messages(rows)
    if not message.any():
        return rows, at
    work.result.skipped += int(message.sum())
    kept = np.flatnonzero(~message)
    return rows.take(pa.array(kept)), among(at, kept)


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
