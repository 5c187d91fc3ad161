"""What decoding gives: rows of one writer schema, or rejected records. Runs on executors.

Values only. `frazil.formats.decoder` makes them; the pipeline takes them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa


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
