"""The offset index: an ordinary Iceberg table, one row per (batch, table, topic, partition).

Committed last, so its ledger is the stream's position. Its rows are made from staged batches and
the snapshots that hold them, so a row never speaks of data that is not there. Where a stream fills
several tables, rows of table `*` say what became of all records of the batch together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pyarrow as pa

from frazil.ingest.stage import StagedBatch, StagedTable, Tally
from frazil.ingest.write import TableShape, Writer
from frazil.table.ledger import Entry, Snapshot

_TIME = pa.timestamp("us", "UTC")
COLUMNS = pa.schema(
    [
        pa.field("sink", pa.large_string(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("table_name", pa.large_string(), nullable=False),
        pa.field("topic", pa.large_string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("start_offset", pa.int64(), nullable=False),
        pa.field("end_offset", pa.int64(), nullable=False),
        pa.field("written", pa.int64(), nullable=False),
        pa.field("rejected", pa.int64(), nullable=False),
        pa.field("skipped", pa.int64(), nullable=False),
        pa.field("invisible", pa.int64(), nullable=False),
        pa.field("merged", pa.int64()),
        pa.field("min_offset", pa.int64()),
        pa.field("max_offset", pa.int64()),
        pa.field("event_time_low", _TIME),
        pa.field("event_time_high", _TIME),
        pa.field("window_start", _TIME),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("commit_id", pa.large_string(), nullable=False),
        pa.field("snapshot_id", pa.int64()),
        pa.field("committed_at", _TIME, nullable=False),
    ]
)


#: The table's name in rows that speak of the whole stream.
STREAM = "*"

#: A batch, and the snapshot that holds it in each of its tables.
Located = tuple[StagedBatch, Mapping[str, Snapshot]]


def rows(located: Sequence[Located]) -> pa.Table:
    now = int(time.time() * 1_000_000)
    found = []
    for batch, snapshots in located:
        told = [(table.name, tally) for table in batch.tables for tally in table.tallies]
        for name, tally in (*told, *((STREAM, each) for each in batch.total)):
            seen, span = tally.seen or (None, None), tally.watermark or (None, None)
            where = tally.range
            found.append(
                (
                    batch.sink,
                    batch.number,
                    name,
                    *where.partition,
                    where.start,
                    where.end,
                    tally.written,
                    tally.rejected,
                    tally.skipped,
                    tally.invisible,
                    tally.merged,
                    *seen,
                    *span,
                    batch.window_start_ms * 1000 or None,
                    batch.epoch,
                    batch.commit_id,
                    (snapshots[name].id or None) if name != STREAM else None,
                    now,
                )
            )
    columns = list(zip(*found, strict=True)) if found else [()] * len(COLUMNS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, COLUMNS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


def write(shape: TableShape, prefix: str, located: Sequence[Located]) -> list[str]:
    """The rows of these batches as one data file; its descriptor."""
    writer = Writer(shape, prefix)
    target = shape.arrow  # an index of an older Frazil may lack a column
    writer.write(rows(located).select(target.names).cast(target))
    return [file.descriptor for file in writer.close()]


def rebuilt(entry: Entry, table: str, uuid: str) -> StagedBatch:
    """A batch as far as a table's ledger can tell it, for index rows that were never written."""
    tallies = []
    for each in entry.ranges:
        counts = entry.counts(each.partition)
        tallies.append(
            Tally(each, counts.written, counts.rejected, counts.skipped, counts.invisible,
                  counts.merged)
        )  # fmt: skip
    staged = StagedTable(table, uuid, entry.schema_id, (), (), 0, 0, tuple(tallies))
    return StagedBatch(
        sink=entry.sink, epoch=entry.epoch, number=entry.batches[1], commit_id=entry.commit_ids[-1],
        begin=entry.begin, end=entry.end, topics=entry.topics, cluster=entry.cluster,
        staged_at_ms=0, window_start_ms=0, tables=(staged,), source=entry.source,
    )  # fmt: skip
