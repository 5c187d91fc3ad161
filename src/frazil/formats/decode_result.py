"""What decoding gives: rows of one writer schema, or rejected records. Runs on executors.

Values only. `frazil.formats.decoder` makes them; the pipeline takes them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.errors import AccountingError


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """Rows of one writer schema, in input order."""

    rows: pa.Table
    index: np.ndarray[Any, np.dtype[np.int64]] | None  # positions in the input; None: all
    schema_id: int | None


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
