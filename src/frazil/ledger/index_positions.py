"""Where the index's rows of each table begin and end. Pure; also read by commands without Spark."""

from __future__ import annotations

import pyarrow as pa

from frazil.offsets import Partition

#: Columns that `ends` reads.
ENDS = ("table_name", "topic", "partition", "start_offset", "end_offset")


def ends(rows: pa.Table) -> dict[str, dict[Partition, tuple[int, int]]]:
    """Table → partition → lowest start and highest end offset of its rows."""
    # Readers differ in their string types.
    kinds = (pa.large_string(), pa.large_string(), pa.int32(), pa.int64(), pa.int64())
    types = pa.schema(zip(ENDS, kinds, strict=True))
    grouped = (
        rows.select(ENDS)
        .cast(types)
        .group_by(list(ENDS[:3]))
        .aggregate([("start_offset", "min"), ("end_offset", "max")])
    )
    spans: dict[str, dict[Partition, tuple[int, int]]] = {}
    for row in grouped.to_pylist():
        span = row["start_offset_min"], row["end_offset_max"]
        where = Partition(row["topic"], row["partition"])
        spans.setdefault(row["table_name"], {})[where] = span
    return spans
