"""Routes records and fits their rows into tables. Runs on executors.

In: columns of decoded records, or keys to delete. Out, in the `ChunkResult` of the chunk: rows in
the schema of each table, keys of deletes, and a `Rejection` for every record that does not fit.
`column_records` and `json_records` extend this class, each for its way of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from frazil.errors import SchemaMismatch
from frazil.files.partition_values import check as check_partition
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord
from frazil.formats.decoder import RecordFormat
from frazil.formats.unavailable_value import Placeholder, placeholder
from frazil.kafka.record_batch import Longs
from frazil.pipeline.chunk_result import ChunkWork, Rejection, nth, without_offsets
from frazil.pipeline.destination import Destination
from frazil.pipeline.json_source import declared_as
from frazil.pipeline.projection import project_rows, too_late, why_too_late
from frazil.pipeline.routing import Route
from frazil.pipeline.table_plan import LOG, UPSERT, ChunkPlan, TablePlan
from frazil.pipeline.table_selects import Reject, TableSelects
from frazil.pipeline.tombstones import KeyDecoder
from frazil.pipeline.versions import column_of

#: The operation column of a change log: Debezium's operation, or u for a record with a value and d
#: for one without.
OP = pa.field("_op", pa.large_string())
#: The kind of a rejected change: the database did not send the value of a column.
UNAVAILABLE = "unavailable"


class TableFitter:
    """The tables of one task, and the steps that all records go through after they are decoded."""

    def __init__(self, plan: ChunkPlan) -> None:
        self._plan = plan
        self._rules = plan.rules
        self._destinations: dict[str, Destination] = {}

    def _to(self, name: str) -> Destination:
        """The table of this name."""
        if name not in self._destinations:
            self._destinations[name] = Destination(name, self._plan)
        return self._destinations[name]

    @cached_property
    def _selects(self) -> TableSelects:
        return TableSelects(self._plan.key_format)

    # ── routes ────────────────────────────────────────────────────────────────────────────────

    def _sorted(self, work: ChunkWork, rows: pa.Table, index: Longs | None) -> list[Route]:
        assert self._rules is not None
        headers = work.beside("headers", index) if self._rules.wants_headers else None
        origin = work.origin(index) if self._rules.wants_rows else None
        routed = self._rules.sort(work.partition.kafka_topic, rows, headers=headers, origin=origin)
        work.result.reject_all(routed.rejected, index)
        return routed.shares

    # ── deletes ──────────────────────────────────────────────────────────────────────────────

    def _tombstones(self, work: ChunkWork, table: Destination, at: Longs) -> None:
        if not table.exists:  # nothing to delete
            work.tombstones_without_table.update(at.tolist())
            return
        work.tombstones.update(at.tolist())
        if not len(at) or table.name in work.below:
            return
        keys = work.opened.keys
        given = [None] * len(at) if keys is None else keys.take(pa.array(at)).to_pylist()
        self._by_keys(work, table, self._plan.key_format, given, at, table.plan.key_columns)

    def _by_keys(
        self,
        work: ChunkWork,
        table: Destination,
        format: RecordFormat | None,
        given: Sequence[bytes | None],
        at: Longs,
        columns: pa.Schema,
    ) -> None:
        """Delete the keys `given`, which have these columns: the key, and more."""
        if table.key_fields is None:
            self._by_kafka_keys(work, table, at)
            return
        rows, index, bad = self._read_keys(table, format, columns, given)
        work.result.reject_all(bad, at, (table.name,))
        self._delete(work, table, DecodedChunk(rows, at[index]))

    def _delete(self, work: ChunkWork, table: Destination, keys: DecodedChunk) -> None:
        """Delete rows by the columns of their key; in a change log, add a row for each."""
        if not table.plan.log:
            self._fitted(work, table, keys, work.result.gone)
            return
        for part in self._beside_keys(work, table, keys):
            self._fitted(work, table, with_op(part, "d"))

    def _by_kafka_keys(self, work: ChunkWork, table: Destination, at: Longs) -> None:
        """Delete the rows of records whose key columns are selected from their Kafka key."""
        assert table.select is not None
        names, reject = table.plan.key or table.plan.log, self._unselected(work, table)
        for keys in self._selects.keys(work, table.select, at, reject, names):
            self._delete(work, table, keys)

    def _beside_keys(
        self, work: ChunkWork, table: Destination, keys: DecodedChunk
    ) -> Iterator[DecodedChunk]:
        """Deletes with the columns that a select makes without a value."""
        if table.select is None:
            yield keys
            return
        at, reject = keys.positions, self._unselected(work, table)
        for beside in self._selects.keys(work, table.select, at, reject):
            part = keys.take(np.searchsorted(at, beside.positions))
            rows = part.rows
            for field, column in zip(beside.rows.schema, beside.rows.columns, strict=True):
                if field.name not in rows.schema.names:
                    rows = rows.append_column(field, column)
            yield replace(part, rows=rows)

    def _read_keys(
        self,
        table: Destination,
        format: RecordFormat | None,
        columns: pa.Schema,
        given: Sequence[bytes | None],
    ) -> tuple[pa.Table, Longs, list[UndecodableRecord]]:
        """Key columns of encoded keys, whose fields have the names of the record's value."""
        fields = {table.plan.own_order: table.order_path} | (table.key_fields or {})
        sources = [column.with_name(fields.get(column.name, column.name)) for column in columns]
        if format is not None and format.kind == "json":
            declared = self._plan.format.declared
            sources = [declared_as(source, declared) for source in sources]
        rows, index, bad = KeyDecoder(format, pa.schema(sources)).read(given)
        return rows.rename_columns(columns.names), index, bad

    def kept(self, work: ChunkWork, name: str, keys: pa.Table) -> pa.Table:
        """`keys` without the keys of records that the table rejects: their old rows stay."""
        rejections = work.result.rejections
        positions = [i for i, rejection in rejections.items() if name in rejection.tables]
        column = self._plan.tables[name].metadata.offset
        return without_offsets(keys, column, work.opened.offsets[positions])

    # ── rows ─────────────────────────────────────────────────────────────────────────────────

    def _unselected(
        self, work: ChunkWork, table: Destination, schema_id: int | None = None
    ) -> Reject:
        """Rejects records that a select makes no row of."""

        def reject(at: int, kind: str, reason: str) -> None:
            rejection = Rejection(at, kind, reason, (table.name,), schema_id)
            if kind == "misfit":
                self._misfit(work, table, rejection)
            else:
                work.result.reject(rejection)

        return reject

    def _selected(
        self, work: ChunkWork, table: Destination, group: DecodedChunk
    ) -> Iterator[DecodedChunk]:
        """Rows with the columns of their table: those of its select, and a change log's own."""
        if table.mode == LOG:
            group = with_op(group, "u")
        if table.select is None:
            yield group
            return
        # Before a mask or a digest hides that a value was not sent.
        group = self._available(work, table, group)
        reject = self._unselected(work, table, group.schema_id)
        yield from self._selects.rows(work, table.select, group, reject)

    def _fitted(
        self,
        work: ChunkWork,
        table: Destination,
        group: DecodedChunk,
        deletes: list[tuple[str, pa.Table]] | None = None,
    ) -> None:
        """Fit rows into the table's schema and add them to the result, or keys to `deletes`.
        Rows that do not fit are rejected one by one."""
        group = self._in_time(work, table, group)
        if deletes is None:
            group = self._available(work, table, group)
        rows, plan = group.rows, table.plan
        if not len(rows):
            return
        target = plan.shape.arrow if deletes is None else plan.of_deletes
        try:
            shaped = project_rows(
                rows,
                target,
                plan.metadata,
                work.partition,
                group.of(work.opened.offsets),
                group.of(work.opened.stamps),
            )
            if deletes is None:
                check_partition(shaped, plan.shape.schema, plan.shape.spec, plan.shape.name)
                _check_order(shaped, plan)
        except SchemaMismatch as error:
            if len(rows) == 1:
                self._reject(work, table, error.message, group.positions, group.schema_id)
                return
            for part in _parts(rows, plan):
                self._fitted(work, table, group.take(part), deletes)
            return
        (work.result.rows if deletes is None else deletes).append((table.name, shaped))

    def _in_time(self, work: ChunkWork, table: Destination, group: DecodedChunk) -> DecodedChunk:
        """Reject records whose timestamp does not fit the table's timestamp column. Returns the
        others."""
        stamps = group.of(work.opened.stamps)
        late = too_late(stamps) if table.plan.metadata.timestamp else np.empty(0, np.int64)
        if not len(late):
            return group
        for i in late.tolist():
            why, at = why_too_late(int(stamps[i])), nth(group.index, i)
            rejection = Rejection(at, "timestamp", why, (table.name,), group.schema_id)
            self._misfit(work, table, rejection)
        return group.take(np.delete(np.arange(len(stamps)), late))

    def _available(self, work: ChunkWork, table: Destination, group: DecodedChunk) -> DecodedChunk:
        """Reject records that would overwrite a value of an upsert table with Debezium's
        placeholder, in the envelope or flattened. Other tables write the placeholder as sent."""
        if table.mode != UPSERT:
            return group
        value = placeholder(self._plan.format.unavailable)
        if value is None:
            return group
        bad = np.zeros(len(group.rows), bool)
        for column, mask in value.in_columns(group.rows).items():
            for i in np.flatnonzero(mask & ~bad).tolist():
                why, at = not_carried(table.name, column, value), nth(group.index, i)
                rejection = Rejection(at, UNAVAILABLE, why, (table.name,), group.schema_id)
                work.result.reject(rejection)
            bad |= mask
        return group.take(np.flatnonzero(~bad)) if bad.any() else group

    def _reject(
        self,
        work: ChunkWork,
        table: Destination,
        reason: str,
        at: Longs,
        schema_id: int | None = None,
    ) -> None:
        for i in at.tolist():
            self._misfit(work, table, Rejection(i, "misfit", reason, (table.name,), schema_id))

    def _misfit(self, work: ChunkWork, table: Destination, rejection: Rejection) -> None:
        if table.name not in rejection.reason:
            fact = rejection.reason.removeprefix("cannot fit ")
            rejection = replace(rejection, reason=f"cannot fit {table.name}: {fact}")
        if table.exists and table.plan.evolution == "fail":
            where = f"{work.partition} offset {int(work.opened.offsets[rejection.index])}"
            raise SchemaMismatch(
                f"cannot write {where}: {rejection.reason}",
                hint="change the table, or set its schema_evolution to evolve or reject",
            )
        work.result.reject(rejection)


def with_op(group: DecodedChunk, op: str) -> DecodedChunk:
    """Rows with column `_op`: `op` where a row has no operation of its own."""
    rows = group.rows
    at = rows.schema.get_field_index("_op")
    if at < 0:
        every = pa.repeat(pa.scalar(op, OP.type), len(rows))
        return replace(group, rows=rows.append_column(OP, every))
    ops = rows.column(at).cast(OP.type).fill_null(op)
    return replace(group, rows=rows.set_column(at, OP, ops))


def not_carried(name: str, column: str, value: Placeholder) -> str:
    return (
        f"cannot apply a change to {name}: it does not carry the value of column {column!r}; found "
        f"Debezium's placeholder {value.text[:64]!a}. Let the database send whole rows "
        "(PostgreSQL: REPLICA IDENTITY FULL), or Debezium select the column again (ReselectColumns)"
    )


def _check_order(rows: pa.Table, plan: TablePlan) -> None:
    if plan.order and (missing := column_of(rows, plan.order).null_count):
        raise SchemaMismatch(
            f"cannot fit {plan.shape.name}: column {plan.order!r} says which change of a key is "
            f"the newer one, {missing} records have no value in it"
        )


def _parts(rows: pa.Table, plan: TablePlan) -> Iterator[Longs]:
    """Split rows of which some do not fit. Rows with all required values come together, the others
    in a second part, then one by one; if no value is missing, the rows are halved."""
    lacking = np.zeros(len(rows), bool)
    required = [column.name for column in plan.columns if not column.nullable]
    for name in (*required, plan.own_order):
        values = column_of(rows, name)
        if values is not None and values.null_count:
            lacking |= values.is_null().to_numpy()
    if lacking.any() and not lacking.all():
        yield np.flatnonzero(~lacking)
        yield np.flatnonzero(lacking)
    else:
        yield from np.array_split(np.arange(len(rows)), 2 if not lacking.all() else len(rows))
