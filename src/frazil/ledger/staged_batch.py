"""The staged batch: its form on the wire and in storage. Pure.

Iceberg manifests list all data files of a batch; this small record contains the manifests, the
ranges and the counts. Once it is stored, any later epoch of the sink can commit the batch without
reading Kafka again. A record has a checksum: a torn or altered record does not count as staged, and
the batch is read again.

A record is two lines: the SHA-256 of the second, and JSON with these keys:

    version           version of these keys: 1
    sink, epoch       sink id, and the epoch that staged it
    batch             batch number
    commit-id         its id in the ledger
    begin, end        topic → partition → offset
    topics, cluster   topic → topic id; cluster id
    staged-at-ms, started-at-ms   when it was staged, and when its epoch began to process it
    source            positions of Spark's sources before and after; empty texts without any
    operator-note     an operator's note, or empty
    leader-epochs     topic → partition → leader epoch, where known
    already-written   table → topic → partition → offset: the table had all records below, and the
                      batch does not contain them again
    outcomes          counts by range, over all tables; empty if there is only one table
    tables            per table: name, uuid, schema-id, manifests (Iceberg's encoding, base64),
                      manifest-paths, files, bytes, keys, and outcomes (counts by range)

Counts by range are lists: topic, partition, start, end, written, rejected, skipped, invisible,
merged, lost, [lowest, highest] offset with a record or null, [lowest, highest] event time or null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frazil import format_version
from frazil.accounting import RangeCounts
from frazil.errors import Fatal
from frazil.offsets import Cut, Partition, Range

#: Version of a batch record.
VERSION = 1


@dataclass(frozen=True, slots=True)
class StagedTable:
    name: str
    uuid: str
    schema_id: int
    #: Iceberg's own encoding of each manifest file, base64
    manifests: tuple[str, ...]
    #: paths of the manifests, for clean-up
    paths: tuple[str, ...]
    files: int
    bytes: int
    tallies: tuple[RangeCounts, ...]
    #: number of keys in its delete files; if not 0, the batch gets its own snapshot
    keys: int = 0


@dataclass(frozen=True, slots=True)
class StagedBatch:
    sink: str
    epoch: int
    number: int
    commit_id: str
    begin: Cut
    end: Cut
    topics: Mapping[str, str]
    cluster: str
    staged_at_ms: int
    window_start_ms: int
    tables: tuple[StagedTable, ...]
    #: outcomes of all records, over all tables; empty if there is only one table
    total: tuple[RangeCounts, ...] = ()
    #: positions of Spark's sources before and after, as Spark encodes them (`spark.checkpoint`)
    source: tuple[str, str] = ("", "")
    #: of a batch made by an operator: by whom, when and why (`entry.OperatorNote`)
    note: str = ""
    #: partition → leader epoch of the last record batch below `end`, if known
    leaders: Mapping[Partition, int] = field(default_factory=dict)
    #: table → the end of its ledger, where that was beyond the begin of the batch: the batch does
    #: not contain these records again, so it is of use only while the table has them
    already_written: Mapping[str, Cut] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(table.bytes for table in self.tables)

    @property
    def file_name(self) -> str:
        return f"{self.epoch:08d}-{self.number:010d}-{self.commit_id}.json"

    def table(self, name: str) -> StagedTable:
        return next(table for table in self.tables if table.name == name)

    @property
    def names(self) -> list[str]:
        """The tables that it has records for."""
        return [table.name for table in self.tables]


def dump(batch: StagedBatch) -> bytes:
    body = json.dumps(
        {
            "version": VERSION,
            "sink": batch.sink,
            "epoch": batch.epoch,
            "batch": batch.number,
            "commit-id": batch.commit_id,
            "begin": batch.begin.nested(),
            "end": batch.end.nested(),
            "topics": dict(batch.topics),
            "cluster": batch.cluster,
            "staged-at-ms": batch.staged_at_ms,
            "started-at-ms": batch.window_start_ms,
            "source": batch.source,
            "operator-note": batch.note,
            "leader-epochs": Cut(batch.leaders).nested(),
            "already-written": {name: cut.nested() for name, cut in batch.already_written.items()},
            "outcomes": [range_counts_values(tally) for tally in batch.total],
            "tables": [
                {
                    "name": table.name,
                    "uuid": table.uuid,
                    "schema-id": table.schema_id,
                    "manifests": table.manifests,
                    "manifest-paths": table.paths,
                    "files": table.files,
                    "bytes": table.bytes,
                    "keys": table.keys,
                    "outcomes": [range_counts_values(tally) for tally in table.tallies],
                }
                for table in batch.tables
            ],
        },
        separators=(",", ":"),
    ).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def load(stored: bytes, path: str = "") -> StagedBatch | None:
    """The batch, or None if the record is torn or altered. `path`: for error messages."""
    digest, _, body = stored.partition(b"\n")
    if hashlib.sha256(body.rstrip(b"\n")).hexdigest().encode() != digest:
        return None
    record = json.loads(body)
    version = record.get("version") if isinstance(record, dict) else None
    format_version.check(f"read staged batch {path}", version, VERSION)
    try:
        return _batch(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # The checksum is right, so the record is not torn: it must not be ignored.
        raise Fatal(
            f"cannot read staged batch {path}: its checksum is right, but its content is "
            f"not a batch record: {type(error).__name__}: {error}",
            hint="use the Frazil version that staged it; if Frazil did not write the file, "
            "move it away",
        ) from None


def _batch(record: Mapping[str, Any]) -> StagedBatch:
    return StagedBatch(
        sink=record["sink"],
        epoch=record["epoch"],
        number=record["batch"],
        commit_id=record["commit-id"],
        begin=Cut.of(record["begin"]),
        end=Cut.of(record["end"]),
        topics=record["topics"],
        cluster=record["cluster"],
        staged_at_ms=record["staged-at-ms"],
        window_start_ms=record["started-at-ms"],
        source=tuple(record["source"]),
        note=record["operator-note"],
        leaders=dict(Cut.of(record["leader-epochs"])),
        already_written={name: Cut.of(cut) for name, cut in record["already-written"].items()},
        total=tuple(range_counts_of(values) for values in record["outcomes"]),
        tables=tuple(
            StagedTable(
                name=table["name"],
                uuid=table["uuid"],
                schema_id=table["schema-id"],
                manifests=tuple(table["manifests"]),
                paths=tuple(table["manifest-paths"]),
                files=table["files"],
                bytes=table["bytes"],
                tallies=tuple(range_counts_of(values) for values in table["outcomes"]),
                keys=table["keys"],
            )
            for table in record["tables"]
        ),
    )


def range_counts_values(tally: RangeCounts) -> list[object]:
    """A tally as JSON; tasks also send their tallies to the driver in this form."""
    where = tally.range
    return [
        *where.partition,
        where.start,
        where.end,
        *tally.outcomes,
        tally.seen,
        tally.watermark,
    ]


def range_counts_of(values: Sequence[Any]) -> RangeCounts:
    topic, number, start, end, written, rejected, skipped, invisible, merged, *more = values
    lost, seen, watermark = more
    return RangeCounts(
        Range(Partition(topic, number), start, end),
        written,
        rejected,
        skipped,
        invisible,
        merged,
        tuple(seen) if seen else None,
        tuple(watermark) if watermark else None,
        lost,
    )
