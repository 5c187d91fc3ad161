"""What decoding gives: rows of one writer schema, or rejected records. Runs on executors.

Values only. `frazil.formats.decoder` makes them; the pipeline takes them on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from frazil.errors import AccountingError
from frazil.native.columns import Longs


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """Rows of one writer schema, in input order."""

    rows: pa.Table
    index: Longs | None  # positions in the input; None: all
    schema_id: int | None = None

    @property
    def positions(self) -> Longs:
        return np.arange(len(self.rows)) if self.index is None else self.index

    def of(self, numbers: Longs) -> Longs:
        """The numbers of these rows, from those of all the input."""
        return numbers if self.index is None else numbers[self.index]

    def take(self, at: Longs) -> DecodedChunk:
        """The rows at these places."""
        rows = self.rows.take(pa.array(at))
        return DecodedChunk(rows, among(self.index, at), self.schema_id)


@dataclass(frozen=True, slots=True)
class UndecodableRecord:
    """A value that cannot be read. Returned, never raised."""

    index: int
    #: null | header | schema | datum | json | shape | limit, and from later steps: route | name |
    #: envelope | unavailable
    kind: str
    reason: str
    schema_id: int | None = None


#: Rows and rejected records, of all values of a chunk.
Decoded = tuple[list[DecodedChunk], list[UndecodableRecord]]


def accounted(
    count: int, decoded: list[DecodedChunk], rejected: list[UndecodableRecord]
) -> Decoded:
    """What was decoded of so many values. Every value is in a chunk or rejected."""
    counted = sum(chunk.rows.num_rows for chunk in decoded) + len(rejected)
    if counted != count:
        raise AccountingError(f"cannot decode: expected {count} values, found {counted}")
    return decoded, sorted(rejected, key=lambda record: record.index)


def among(outer: Longs | None, inner: Longs | None) -> Longs | None:
    """Positions `inner` within the positions `outer`; None: all."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]
