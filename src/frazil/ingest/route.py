"""Decoded columns in, columns in the table's own shape out. Runs on executors.

Every decoded row goes to the table, with its topic, partition, offset and timestamp beside it, or
the misfit is named: a column the table lacks, a value it requires, a type it cannot hold. Nothing
is dropped to make a row fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.core.errors import Misfit
from frazil.core.offsets import Partition


@dataclass(frozen=True, slots=True)
class Metadata:
    """Names of the columns that say where a row comes from; empty: left out."""

    topic: str
    partition: str
    offset: str
    timestamp: str

    @property
    def fields(self) -> list[pa.Field]:
        """As they stand in a new table, behind the record's own columns."""
        fields = [
            pa.field(self.topic, pa.large_string(), nullable=False),
            pa.field(self.partition, pa.int32(), nullable=False),
            pa.field(self.offset, pa.int64(), nullable=False),
            pa.field(self.timestamp, pa.timestamp("us", "UTC")),
        ]
        return [field for field in fields if field.name]


def route(
    rows: pa.Table,
    target: pa.Schema,
    metadata: Metadata,
    partition: Partition,
    offsets: np.ndarray[Any, np.dtype[np.int64]],
    timestamps: np.ndarray[Any, np.dtype[np.int64]],
) -> pa.Table:
    """`rows` of one partition in the shape of the table."""
    origin = _origin(metadata, partition, offsets, timestamps)
    for name in rows.schema.names:
        if name not in target.names:
            raise Misfit(
                f"cannot write {partition}: the record has a column {name!r} "
                f"({rows.schema.field(name).type}) that the table lacks",
                hint=f"add the column to the table: {name} {rows.schema.field(name).type}",
            )
        if name in origin:
            raise Misfit(
                f"cannot write {partition}: the record has a column {name!r}, which is also the "
                "name of a metadata column",
                hint=f"give the metadata column another name in [[table]], e.g. _frazil{name}",
            )
    columns = []
    for field in target:
        if field.name in origin:
            column = origin[field.name]
        elif field.name in rows.schema.names:
            column = rows.column(field.name)
        elif field.nullable:
            column = pa.nulls(len(rows), field.type)
        else:
            raise Misfit(
                f"cannot write {partition}: the table requires column {field.name!r} "
                f"({field.type}), which the record lacks",
                hint=f"make the column optional: ALTER TABLE … ALTER COLUMN {field.name} DROP NOT NULL",
            )
        columns.append(_fit(column, field, partition))
    return pa.Table.from_arrays(columns, schema=target)


def _origin(
    metadata: Metadata,
    partition: Partition,
    offsets: np.ndarray[Any, np.dtype[np.int64]],
    timestamps: np.ndarray[Any, np.dtype[np.int64]],
) -> dict[str, pa.Array]:
    count = len(offsets)
    origin = {
        metadata.topic: pa.repeat(pa.scalar(partition.topic, pa.large_string()), count),
        metadata.partition: pa.repeat(pa.scalar(partition.number, pa.int32()), count),
        metadata.offset: pa.array(offsets),
    }
    if metadata.timestamp:
        stamps = pa.array(timestamps * 1000, mask=timestamps < 0)
        origin[metadata.timestamp] = stamps.view(pa.timestamp("us", "UTC"))
    return origin


def _fit(column: Any, field: pa.Field, partition: Partition) -> Any:
    if column.type != field.type:
        try:
            column = pc.cast(column, field.type)  # safe: never truncates, never overflows
        except pa.ArrowException as error:
            raise Misfit(
                f"cannot write {partition}: column {field.name!r} does not fit; the table has "
                f"{field.type}, the record {column.type}: {error}"
            ) from None
    if not field.nullable and column.null_count:
        raise Misfit(
            f"cannot write {partition}: the table requires column {field.name!r}, "
            f"{column.null_count} records have no value in it"
        )
    return column
