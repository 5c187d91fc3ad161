"""The offset index: an ordinary Iceberg table, one row per (batch, table, topic, partition).

Committed last, so its ledger is the stream's position. Its rows are made from staged batches and
the snapshots that hold them, so a row never speaks of data that is not there. Where a stream fills
several tables, rows of table `*` say what became of all records of the batch together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from frazil.errors import SchemaMismatch
from frazil.files.writer import TableWriter, WriterSpec, file_io
from frazil.ledger.entry import LedgerEntry, Snapshot
from frazil.ledger.sink_state import STREAM
from frazil.ledger.staged_batch import RangeCounts, StagedBatch, StagedTable
from frazil.offsets import Partition, Range

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
        pa.field("complete_until", _TIME),  # see `ledger.completeness`
        pa.field("lost", pa.int64()),
        pa.field("signed", pa.large_string()),  # see `table.ledger.Note`
    ]
)


#: A batch, and the snapshot that holds it in each of its tables.
Located = tuple[StagedBatch, Mapping[str, Snapshot]]


def rows(located: Sequence[Located], complete: Mapping[str, int | None] | None = None) -> pa.Table:
    """`complete`: commit id → until when the stream is complete with that batch."""
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
                    (complete or {}).get(batch.commit_id),
                    tally.lost,
                    batch.note or None,
                )
            )
    columns = list(zip(*found, strict=True)) if found else [()] * len(COLUMNS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, COLUMNS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


def write(
    shape: WriterSpec,
    prefix: str,
    located: Sequence[Located],
    complete: Mapping[str, int | None] | None = None,
) -> list[str]:
    """The rows of these batches as one data file; its descriptor."""
    return put(shape, prefix, rows(located, complete))


def put(shape: WriterSpec, prefix: str, rows: pa.Table) -> list[str]:
    """Rows of an index into data files; their descriptors."""
    target = shape.arrow  # an index of an older Frazil may lack a column, anybody's may have more
    lacking = [each for each in target if each.name not in rows.column_names]
    for each in lacking:
        if not each.nullable:
            raise SchemaMismatch(
                f"cannot write to the index {shape.name}: its column {each.name!r} is "
                "required, and none of Frazil's",
                hint="make it optional",
            )
        rows = rows.append_column(each, pa.nulls(len(rows), each.type))
    writer = TableWriter(shape, prefix)
    writer.write(rows.select(target.names).cast(target))
    return [file.descriptor for file in writer.close()]


#: What `ends` needs of the rows.
ENDS = ("table_name", "topic", "partition", "start_offset", "end_offset")


def ends(rows: pa.Table) -> dict[str, dict[Partition, tuple[int, int]]]:
    """Table → how far its rows tell of each partition: where that begins and ends."""
    # Whoever read them has types of his own for texts.
    types = pa.schema([COLUMNS.field(name) for name in ENDS])
    grouped = (
        rows.select(ENDS)
        .cast(types)
        .group_by(list(ENDS[:3]))
        .aggregate([("start_offset", "min"), ("end_offset", "max")])
    )
    found: dict[str, dict[Partition, tuple[int, int]]] = {}
    for row in grouped.to_pylist():
        told = row["start_offset_min"], row["end_offset_max"]
        where = Partition(row["topic"], row["partition"])
        found.setdefault(row["table_name"], {})[where] = told
    return found


def paths(descriptors: Sequence[str]) -> list[str]:
    return [str(json.loads(each)["file-path"]) for each in descriptors]


def rebuilt(entry: LedgerEntry, table: str, uuid: str) -> StagedBatch:
    """A batch as far as a table's ledger can tell it, for index rows that were never written."""
    tallies = []
    whose = entry.watermark if len(entry.ranges) == 1 else None  # of several, nobody knows
    for each in entry.ranges:
        counts = entry.counts(each.partition)
        # Batches that held nothing for the table came before the one that did.
        span = Range(each.partition, each.start + counts.elsewhere, each.end)
        tallies.append(
            RangeCounts(
                span,
                counts.written,
                counts.rejected,
                counts.skipped,
                counts.invisible,
                counts.merged,
                watermark=whose,
                lost=counts.lost,
            )
        )
    staged = StagedTable(
        table, uuid, entry.schema_id, (), (), 0, 0, tuple(tallies), entry.keys or 0
    )
    return StagedBatch(
        sink=entry.sink,
        epoch=entry.epoch,
        number=entry.batches[1],
        commit_id=entry.commit_ids[-1],
        begin=entry.begin,
        end=entry.end,
        topics=entry.topics,
        cluster=entry.cluster,
        staged_at_ms=0,
        window_start_ms=0,
        tables=(staged,),
        source=entry.source,
        note=entry.note,
        leaders=entry.leaders,
    )


# ── few and large files ──────────────────────────────────────────────────────────────────────────

#: A file of the index is of a tier by its rows: 1 to 31, 32 to 1,023, and so on. So many of one
#: tier become one of the next: thus a row is written again once for each tier, and no more.
FANOUT = 32
#: A file of so many rows is left as it is.
FULL = 2**18
#: So many files are read at once at most: a commit that is due waits for it.
MOST = 8 * FANOUT
#: What belongs together for those who ask: gaps, overlaps, where an offset is.
ORDER = ("table_name", "topic", "partition", "start_offset")
#: Of every table that a sink makes: of its metadata files the newest stay.
OLD_METADATA = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "50",
}
#: Of a new index. Each commit adds a manifest and two metadata files; whatever merges files merges
#: manifests as well, and the oldest metadata files go.
PROPERTIES = {
    "format-version": "2",
    "commit.manifest.min-count-to-merge": "4",
    **OLD_METADATA,
}
_READERS = 8  # threads: reading waits for the store more than for the processor


class IndexFile(Protocol):
    """A live data file of the index."""

    @property
    def path(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def deletes(self) -> int:
        """Files that hide some of its rows."""


F = TypeVar("F", bound=IndexFile)


def tiers(files: Sequence[F]) -> list[list[F]]:
    """Those that may be merged. One whose rows are hidden in part is for others to rewrite."""
    found: list[list[F]] = []
    for file in files:
        if file.rows < FULL and not file.deletes and file.path.endswith(".parquet"):
            tier, rows = 0, file.rows
            while rows >= FANOUT:
                tier, rows = tier + 1, rows // FANOUT
            found += [[] for _ in range(tier + 1 - len(found))]
            found[tier].append(file)
    return found


def due(files: Sequence[F]) -> list[F]:
    """The files to make one of, if any; `files` come with the oldest rows first."""
    for tier in tiers(files):
        if len(tier) >= FANOUT:
            chosen: list[F] = []
            while len(chosen) < min(len(tier), MOST) and sum(f.rows for f in chosen) < FULL:
                chosen.append(tier[len(chosen)])
            return chosen
    return []


def enough(files: Sequence[IndexFile]) -> int:
    """How many files there must be for something to be due: new ones are of few rows."""
    return len(files) + max(0, FANOUT - max(map(len, tiers(files)), default=0))


def read(shape: WriterSpec, paths: Sequence[str]) -> pa.Table:
    """All rows of these files, as the table has them now."""
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
    """By field id: a column may have been added or renamed since the file was written."""
    known = {_number(each): n for n, each in enumerate(rows.schema)}
    columns = []
    for each in shape.arrow:
        if _number(each) in known:
            columns.append(rows.column(known[_number(each)]).cast(each.type))
        elif each.nullable:
            columns.append(pa.nulls(len(rows), each.type))
        else:
            raise SchemaMismatch(
                f"cannot read the index {shape.name}: a file lacks its required column "
                f"{each.name!r}"
            )
    return pa.Table.from_arrays(columns, schema=shape.arrow)


def _number(field: pa.Field) -> bytes | None:
    return (field.metadata or {}).get(b"PARQUET:field_id")
