"""What decoding gives: rows of one writer schema, or rejected records. Runs on executors.

Values only. `frazil.formats.decoder` makes them; the pipeline takes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from frazil.kafka.record_batch import Longs


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """Rows of one writer schema, in input order."""

    rows: pa.Table
    index: np.ndarray[Any, np.dtype[np.int64]] | None  # positions in the input; None: all
    schema_id: int | None


class FramedRecords(NamedTuple):
    """Kafka record batches as columns, with offsets, timestamps and keys. No record has headers."""

    decoded: DecodedChunk
    offsets: Longs
    stamps: Longs
    keys: pa.Array | None  # large_binary; None: no record has a key


@dataclass(frozen=True, slots=True)
class UndecodableRecord:
    """A value that cannot be read. Returned, never raised."""

    index: int
    #: null | header | schema | datum | json | shape | limit, and from later steps: route | name |
    #: envelope | unavailable
    kind: str
    reason: str
    schema_id: int | None = None


def kept_positions(
    members: list[int], bad: Sequence[tuple[int, object]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions of the members without the bad ones, which are numbered within `members`."""
    return np.delete(np.array(members, np.int64), [i for i, _ in bad])
