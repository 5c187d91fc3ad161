"""One chunk in progress, and its result. Runs on executors.

`ChunkWork` holds the records of a chunk while they are processed, `ChunkResult` the outcome: rows
of each table, rejections and needs. Positions are those of records in the chunk; where positions
are optional, None stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.formats.connect_schema import Named
from frazil.formats.decode_result import UndecodableRecord
from frazil.kafka.record_batch import Longs, RawRecords, no_headers
from frazil.offsets import Partition
from frazil.pipeline.evolution import Aliases
from frazil.pipeline.missing_columns import add_need, needed
from frazil.pipeline.projection import moments

#: Kinds of rejected records, as the guide to dead letters explains them.
KINDS = (
    *("null", "header", "datum", "json", "limit", "schema", "key", "route", "name", "envelope"),
    *("unavailable", "timestamp", "misfit", "batch", "failed", "unwritable", "deadly"),
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected record and the reason."""

    index: int
    kind: str
    reason: str
    #: the tables it was routed to; empty if unknown
    tables: tuple[str, ...] = ()
    schema_id: int | None = None


@dataclass(slots=True)
class ChunkResult:
    rows: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: keys that records delete from upsert tables
    gone: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: former keys of records in `rows` that changed their key
    left: list[tuple[str, pa.Table]] = field(default_factory=list)
    rejections: dict[int, Rejection] = field(default_factory=dict)
    skipped: int = 0
    needs: dict[str, pa.Schema] = field(default_factory=dict)

    def reject(self, rejection: Rejection) -> None:
        """Add a rejection. Rejections of one record by several tables become one dead letter. The
        reason is shortened and made valid UTF-8: it may quote the record's data."""
        plain = rejection.reason[:1000].encode(errors="replace").decode()
        rejection = replace(rejection, reason=plain)
        known = self.rejections.get(rejection.index)
        if known is not None:
            reason = (
                known.reason
                if rejection.reason in known.reason
                else (f"{known.reason}; {rejection.reason}")
            )
            tables = tuple(dict.fromkeys((*known.tables, *rejection.tables)))
            rejection = Rejection(rejection.index, known.kind, reason, tables, known.schema_id)
        self.rejections[rejection.index] = rejection

    def reject_all(
        self,
        records: Iterable[UndecodableRecord],
        at: Longs | None,
        tables: tuple[str, ...] = (),
        schema_id: int | None = None,
    ) -> None:
        """Reject records of a part of the chunk, which is at the positions `at`."""
        for record in records:
            number = record.schema_id if schema_id is None else schema_id
            where = nth(at, record.index)
            self.reject(Rejection(where, record.kind, record.reason, tables, number))

    def need(self, table: str, columns: pa.Schema, aliases: Aliases) -> None:
        add_need(self.needs, table, needed(columns, aliases))


@dataclass(slots=True)
class ChunkWork:
    """One chunk in progress and its result."""

    partition: Partition
    opened: RawRecords
    #: tables that already contain its records
    below: frozenset[str]
    #: records may be change events; one without a value is then a tombstone that repeats a delete
    changes: bool = False
    result: ChunkResult = field(default_factory=ChunkResult)
    #: JSON row → what the schema beside it says of columns
    named: dict[bytes, Named] = field(default_factory=dict)
    #: the decoded keys (see `table_selects`), once a table needs them
    decoded_keys: Any = None
    #: positions of tombstones: for a table that does not exist, and for one that exists
    tombstones_without_table: set[int] = field(default_factory=set)
    tombstones: set[int] = field(default_factory=set)

    def beside(self, name: str, index: Longs | None) -> pa.Array | None:
        column = getattr(self.opened, name)
        return column if column is None or index is None else column.take(pa.array(index))

    def origin(self, index: Longs | None) -> dict[str, pa.Array]:
        """The metadata columns that a Python function sees beside the record's own."""
        offsets, stamps = self.opened.offsets, self.opened.stamps
        if index is not None:
            offsets, stamps = offsets[index], stamps[index]
        keys, headers = self.beside("keys", index), self.beside("headers", index)
        return {
            "_topic": pa.repeat(
                pa.scalar(self.partition.kafka_topic, pa.large_string()), len(offsets)
            ),
            "_topic_partition": pa.repeat(
                pa.scalar(self.partition.number, pa.int32()), len(offsets)
            ),
            "_offset": pa.array(offsets),
            "_timestamp": moments(stamps),
            "_key": pa.nulls(len(offsets), pa.large_binary()) if keys is None else keys,
            "_headers": no_headers(len(offsets)) if headers is None else headers,
        }


def nth(index: Longs | None, i: int) -> int:
    """The i-th of the positions."""
    return i if index is None else int(index[i])


def without_offsets(rows: pa.Table, column: str, offsets: Longs) -> pa.Table:
    """The rows of other records: `column` has none of these offsets."""
    if not len(offsets):
        return rows
    return rows.filter(pa.array(~np.isin(rows.column(column).to_numpy(), offsets)))
