"""The offset index: an ordinary Iceberg table, one row per (batch, table, topic, partition).

Committed last, so its ledger is the stream's position. Its rows are made from staged batches and
the snapshots that hold them, so a row never refers to data that is not in its table. If a stream
fills several tables, rows of table `*` contain the outcomes of all records of the batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from frazil.accounting import RangeCounts
from frazil.errors import SchemaMismatch
from frazil.files.writer import TableWriter, WriterSpec, file_io
from frazil.iceberg.table import LiveFile, Snapshot
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.index_positions import ENDS as ENDS
from frazil.ledger.index_positions import ends as ends
from frazil.ledger.sink_state import STREAM
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Range

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
        pa.field("merged", pa.int64(), nullable=False),
        pa.field("lost", pa.int64(), nullable=False),
        pa.field("min_offset", pa.int64()),
        pa.field("max_offset", pa.int64()),
        pa.field("event_time_low", _TIME),
        pa.field("event_time_high", _TIME),
        pa.field("started_at", _TIME),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("commit_id", pa.large_string(), nullable=False),
        pa.field("snapshot_id", pa.int64()),
        pa.field("committed_at", _TIME, nullable=False),
        pa.field("complete_until", _TIME),  # see `ledger.completeness`
        pa.field("operator_note", pa.large_string()),  # see `entry.OperatorNote`
    ]
)


#: A batch, with its snapshot in each of its tables.
Located = tuple[StagedBatch, Mapping[str, Snapshot]]


def rows(located: Sequence[Located], complete: Mapping[str, int | None] | None = None) -> pa.Table:
    """`complete`: commit id → until when the stream is complete with that batch."""
    now = int(time.time() * 1_000_000)
    values = []
    for batch, snapshots in located:
        tallies = [(table.name, tally) for table in batch.tables for tally in table.tallies]
        for name, tally in (*tallies, *((STREAM, tally) for tally in batch.total)):
            seen, span = tally.seen or (None, None), tally.watermark or (None, None)
            where = tally.range
            values.append(
                (
                    batch.sink,
                    batch.number,
                    name,
                    *where.partition,
                    where.start,
                    where.end,
                    *tally.outcomes,
                    *seen,
                    *span,
                    batch.window_start_ms * 1000 or None,
                    batch.epoch,
                    batch.commit_id,
                    (snapshots[name].id or None) if name != STREAM else None,
                    now,
                    (complete or {}).get(batch.commit_id),
                    batch.note or None,
                )
            )
    columns = list(zip(*values, strict=True)) if values else [()] * len(COLUMNS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, COLUMNS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


def write(
    shape: WriterSpec,
    prefix: str,
    located: Sequence[Located],
    complete: Mapping[str, int | None] | None = None,
) -> list[str]:
    """Write the rows of these batches to data files. Returns their descriptors."""
    return put(shape, prefix, rows(located, complete))


def put(shape: WriterSpec, prefix: str, rows: pa.Table) -> list[str]:
    """Write rows of an index to data files. Returns their descriptors."""
    target = shape.arrow  # an index may have more columns, or lack optional ones
    lacking = [field for field in target if field.name not in rows.column_names]
    for field in lacking:
        if not field.nullable:
            raise SchemaMismatch(
                f"cannot write to the index {shape.name}: its column {field.name!r} is "
                "required, and none of Frazil's",
                hint="make it optional",
            )
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    writer = TableWriter(shape, prefix)
    writer.write(rows.select(target.names).cast(target))
    return [file.descriptor for file in writer.close()]


def paths(descriptors: Sequence[str]) -> list[str]:
    return [str(json.loads(descriptor)["file-path"]) for descriptor in descriptors]


def rebuilt(entry: LedgerEntry, table: str, uuid: str) -> StagedBatch:
    """A batch restored from a table's ledger entry, for index rows that were never written."""
    tallies = []
    whose = entry.watermark if len(entry.ranges) == 1 else None  # per partition it is unknown
    for span in entry.ranges:
        counts = entry.counts(span.partition)
        # Batches without records for the table come before the one with records.
        rest = Range(span.partition, span.start + counts.elsewhere, span.end)
        tallies.append(RangeCounts.of(rest, counts, whose))
    staged = StagedTable(
        table, uuid, entry.schema_id, (), (), 0, 0, tuple(tallies), entry.keys or 0
    )
    return batch_of(entry, entry.batches[1], entry.commit_ids[-1], tables=(staged,))


def batch_of(entry: LedgerEntry, number: int, commit_id: str, **more: Any) -> StagedBatch:
    """One of an entry's batches, with what the entry knows of it."""
    return StagedBatch(
        sink=entry.sink,
        epoch=entry.epoch,
        number=number,
        commit_id=commit_id,
        begin=entry.begin,
        end=entry.end,
        topics=entry.topics,
        cluster=entry.cluster,
        staged_at_ms=0,
        window_start_ms=0,
        source=entry.source,
        note=entry.note,
        leaders=entry.leaders,
        **more,
    )


# ── merging files ────────────────────────────────────────────────────────────────────────────────

#: Index files have tiers by number of rows: 1 to 31, 32 to 1,023, and so on. `FANOUT` files of one
#: tier are merged into one of the next, so each row is rewritten at most once per tier.
FANOUT = 32
#: Files with this many rows are not merged.
FULL = 2**18
#: Maximum number of files per merge: due commits wait for it.
MOST = 8 * FANOUT
#: Sort order for queries: gaps, overlaps, the location of an offset.
ORDER = ("table_name", "topic", "partition", "start_offset")
#: Properties of every table that a sink creates: only the newest metadata files are kept.
OLD_METADATA = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "50",
}
#: Properties of a new index. Each commit adds a manifest and two metadata files; manifests are
#: merged, and the oldest metadata files are deleted.
PROPERTIES = {
    "format-version": "2",
    "commit.manifest.min-count-to-merge": "4",
    **OLD_METADATA,
}
_READERS = 8  # threads: reading is I/O-bound


def tiers(files: Sequence[LiveFile]) -> list[list[LiveFile]]:
    """The mergeable files by tier. Files with deletes are left to other tools."""
    groups: list[list[LiveFile]] = []
    for file in files:
        if file.rows < FULL and not file.deletes and file.path.endswith(".parquet"):
            tier, rows = 0, file.rows
            while rows >= FANOUT:
                tier, rows = tier + 1, rows // FANOUT
            groups += [[] for _ in range(tier + 1 - len(groups))]
            groups[tier].append(file)
    return groups


def due(files: Sequence[LiveFile]) -> list[LiveFile]:
    """The files to merge into one, if any; `files`: oldest rows first."""
    for tier in tiers(files):
        if len(tier) >= FANOUT:
            chosen: list[LiveFile] = []
            while len(chosen) < min(len(tier), MOST) and sum(f.rows for f in chosen) < FULL:
                chosen.append(tier[len(chosen)])
            return chosen
    return []


def enough(files: Sequence[LiveFile]) -> int:
    """The number of files at which a merge becomes due, if new files have few rows."""
    return len(files) + max(0, FANOUT - max(map(len, tiers(files)), default=0))


def read(shape: WriterSpec, paths: Sequence[str]) -> pa.Table:
    """All rows of these files, in the table's current schema."""
    io = file_io(shape.location, shape.io)

    def one(path: str) -> pa.Table:
        with io.new_input(path).open() as file:
            return _fitted(pq.read_table(file), shape)

    with ThreadPoolExecutor(_READERS, "frazil-index") as pool:
        return pa.concat_tables([shape.arrow.empty_table(), *pool.map(one, paths)])


def ordered(rows: pa.Table) -> pa.Table:
    by = [(name, "ascending") for name in ORDER if name in rows.column_names]
    return rows.sort_by(by) if by else rows


def _fitted(rows: pa.Table, shape: WriterSpec) -> pa.Table:
    """Match columns by field id: they may have been added or renamed since."""
    known = {_number(field): n for n, field in enumerate(rows.schema)}
    columns = []
    for field in shape.arrow:
        if _number(field) in known:
            columns.append(rows.column(known[_number(field)]).cast(field.type))
        elif field.nullable:
            columns.append(pa.nulls(len(rows), field.type))
        else:
            raise SchemaMismatch(
                f"cannot read the index {shape.name}: a file lacks its required column "
                f"{field.name!r}"
            )
    return pa.Table.from_arrays(columns, schema=shape.arrow)


def _number(field: pa.Field) -> bytes | None:
    return (field.metadata or {}).get(b"PARQUET:field_id")
