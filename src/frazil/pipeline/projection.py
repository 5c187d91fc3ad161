"""Projects decoded columns to the schema of a table. Runs on executors.

Every row gets metadata columns: topic, partition, offset and timestamp (key and headers where the
table has columns for them). Rows that do not fit raise `SchemaMismatch` with the reason: a column
the table lacks, a value it requires, a type it cannot hold. Nothing is dropped to make a row fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow.cast import MissingField, absent, default_of, project
from frazil.errors import SchemaMismatch
from frazil.kafka.record_batch import HEADERS, no_headers
from frazil.offsets import Partition
from frazil.pipeline.connect_types import converted
from frazil.pipeline.evolution import castable
from frazil.pipeline.strict_cast import CastMismatch


@dataclass(frozen=True, slots=True)
class MetadataColumns:
    """Names of the metadata columns of a table; empty: the table does not have the column."""

    topic: str
    partition: str
    offset: str
    timestamp: str
    key: str = ""
    headers: str = ""

    @property
    def fields(self) -> list[pa.Field]:
        """The columns of a new table, which follow the record's own columns."""
        fields = [
            pa.field(self.topic, pa.large_string(), nullable=False),
            pa.field(self.partition, pa.int32(), nullable=False),
            pa.field(self.offset, pa.int64(), nullable=False),
            pa.field(self.timestamp, pa.timestamp("us", "UTC")),
            pa.field(self.key, pa.large_binary()),
            pa.field(self.headers, HEADERS),
        ]
        return [field for field in fields if field.name]


#: For a table without metadata columns, or with metadata as ordinary columns.
NO_METADATA = MetadataColumns("", "", "", "")

#: The last millisecond that a timestamp in microseconds can hold, in the year 294247. Kafka accepts
#: any 64-bit number as a record's timestamp.
LAST_MS = (2**63 - 1) // 1000


def too_late(
    timestamps: np.ndarray[Any, np.dtype[np.int64]],
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions of the timestamps that do not fit a timestamp column."""
    return np.flatnonzero(timestamps > LAST_MS)


def why_too_late(milliseconds: int) -> str:
    return (
        f"the record's timestamp does not fit; expected at most {LAST_MS} milliseconds since 1970, "
        f"found {milliseconds}"
    )


def moments(timestamps: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Kafka's timestamps as a column; null where a record has none or one that does not fit. A
    caller that must not lose a timestamp checks `too_late` first."""
    none = (timestamps < 0) | (timestamps > LAST_MS)
    stamps = pa.array(np.where(none, 0, timestamps) * 1000, mask=none)
    return stamps.view(pa.timestamp("us", "UTC"))


def project_rows(
    rows: pa.Table,
    target: pa.Schema,
    metadata: MetadataColumns,
    partition: Partition,
    offsets: np.ndarray[Any, np.dtype[np.int64]],
    timestamps: np.ndarray[Any, np.dtype[np.int64]],
    *,
    keys: pa.Array | None = None,
    headers: pa.Array | None = None,
) -> pa.Table:
    """`rows` of one partition in the schema of the table, with metadata columns.

    Without `keys` all keys are null; without `headers` all headers are empty.
    """
    origin = _origin(metadata, partition, offsets, timestamps, keys, headers)
    if both := [name for name in rows.schema.names if name in origin]:
        raise SchemaMismatch(
            f"cannot write {partition}: the record has a column {both[0]!r}, which is also the "
            "name of a metadata column",
            hint=f"give the metadata column another name in [[table]], e.g. _frazil{both[0]}",
        )
    return fitted(rows, target, str(partition), origin)


def fitted(
    rows: pa.Table, target: pa.Schema, subject: str, beside: Mapping[str, pa.Array] | None = None
) -> pa.Table:
    """`rows` and the columns `beside` them in the schema `target`. Raises `SchemaMismatch` if they
    do not fit; `subject` names them in the message."""
    beside = beside or {}
    names, known = rows.schema.names, set(target.names)  # once: Arrow makes a list each time
    for name in names:
        if name not in known:
            raise SchemaMismatch(
                f"cannot write {subject}: the record has a column {name!r} "
                f"({rows.schema.field(name).type}) that the table lacks",
                hint=f"add the column to the table: {name} {rows.schema.field(name).type}",
            )
    columns = []
    given = dict(zip(names, zip(rows.columns, rows.schema, strict=True), strict=True))
    for field in target:
        if field.name in beside:
            column = beside[field.name]
        elif field.name in given:
            array, decoded = given[field.name]
            column = _as_named(array, decoded, field.type, subject)
        elif field.nullable or default_of(field) is not None:
            column = absent(len(rows), field)
        else:
            raise SchemaMismatch(
                f"cannot write {subject}: the table requires column {field.name!r} "
                f"({field.type}), which the record lacks",
                hint=f"make it optional: ALTER TABLE … ALTER COLUMN {field.name} DROP NOT NULL",
            )
        columns.append(_fit(column, field, subject))
    return pa.Table.from_arrays(columns, schema=target)


def _origin(
    metadata: MetadataColumns,
    partition: Partition,
    offsets: np.ndarray[Any, np.dtype[np.int64]],
    timestamps: np.ndarray[Any, np.dtype[np.int64]],
    keys: pa.Array | None,
    headers: pa.Array | None,
) -> dict[str, pa.Array]:
    count = len(offsets)
    origin = {
        metadata.topic: pa.repeat(pa.scalar(partition.topic, pa.large_string()), count),
        metadata.partition: pa.repeat(pa.scalar(partition.number, pa.int32()), count),
        metadata.offset: pa.array(offsets),
    }
    if metadata.timestamp:
        origin[metadata.timestamp] = moments(timestamps)
    if metadata.key:
        origin[metadata.key] = pa.nulls(count, pa.large_binary()) if keys is None else keys
    if metadata.headers:
        origin[metadata.headers] = no_headers(count) if headers is None else headers
    return origin


def _as_named(column: Any, given: pa.Field, kind: pa.DataType, subject: str) -> Any:
    try:
        return converted(column, given, kind)
    except CastMismatch as error:
        raise SchemaMismatch(f"cannot write {subject}: {error}") from None


def _fit(column: Any, field: pa.Field, subject: str) -> Any:
    # Checked first: a projection would drop fields, and a cast would parse text.
    if column.type != field.type and not castable(column.type, field.type):
        raise SchemaMismatch(
            f"cannot write {subject}: column {field.name!r} does not fit; the table has "
            f"{field.type}, the record {column.type}"
        )
    try:
        return project(column, field)  # safe: never truncates, never overflows
    except pa.ArrowException as error:
        raise SchemaMismatch(
            f"cannot write {subject}: column {field.name!r} does not fit; the table has "
            f"{field.type}, the record {column.type}: {error}"
        ) from None
    except MissingField as error:
        raise SchemaMismatch(
            f"cannot write {subject}: the table requires column {error.path!r}, "
            f"{error.count} records have no value in it"
        ) from None
