"""The staged batch: its form on the wire and in storage. Pure.

All data files of a batch stand in Iceberg manifests; this small record names the manifests, the
ranges and the counts. Once it is stored the batch can be committed by any later life of the sink
without reading Kafka again. A record carries its own checksum: a torn or altered one does not
count as staged, and the batch is read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frazil.errors import Fatal
from frazil.offsets import BATCHES, Cut, Partition, Range

VERSION = 1


@dataclass(frozen=True, slots=True)
class RangeCounts:
    """What became of one range of a batch in one table."""

    range: Range
    written: int
    rejected: int = 0
    skipped: int = 0
    invisible: int = 0
    #: offsets whose records went into rows that stand for several of them, or for none
    merged: int = 0
    #: lowest and highest offset that held a record; None when none did
    seen: tuple[int, int] | None = None
    #: lowest and highest event time, in microseconds
    watermark: tuple[int, int] | None = None
    #: offsets that a person has given up
    lost: int = 0

    def __add__(self, other: RangeCounts) -> RangeCounts:
        """Of the range right behind this one."""
        return RangeCounts(
            Range(self.range.partition, self.range.start, other.range.end),
            self.written + other.written,
            self.rejected + other.rejected,
            self.skipped + other.skipped,
            self.invisible + other.invisible,
            self.merged + other.merged,
            _span(self.seen, other.seen),
            _span(self.watermark, other.watermark),
            self.lost + other.lost,
        )

    @property
    def balanced(self) -> bool:
        """I3: every offset of the range has exactly one fate. (A batch may hold any rows.)"""
        told = self.written + self.rejected + self.skipped + self.invisible + self.merged
        told += self.lost
        return self.range.partition == BATCHES or len(self.range) == told


@dataclass(frozen=True, slots=True)
class StagedTable:
    name: str
    uuid: str
    schema_id: int
    #: Iceberg's own encoding of each manifest file, base64
    manifests: tuple[str, ...]
    #: where they are, for those who clean up
    paths: tuple[str, ...]
    files: int
    bytes: int
    tallies: tuple[RangeCounts, ...]
    #: how many keys its delete files take away: such a batch is a snapshot of its own
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
    #: what became of every record, whichever table it went to; empty where there is one table only
    total: tuple[RangeCounts, ...] = ()
    #: where Spark's sources stood before and after it, in their own words (see `spark.checkpoint`)
    source: tuple[str, str] = ("", "")
    #: of a batch that a person made: who, when and why (`entry.OperatorNote`)
    note: str = ""
    #: partition → leader epoch of the last record batch below `end`, where it is known
    leaders: Mapping[Partition, int] = field(default_factory=dict)

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
        """The tables it holds something for."""
        return [table.name for table in self.tables]


def dump(batch: StagedBatch) -> bytes:
    body = json.dumps(
        {
            "version": VERSION,
            "sink": batch.sink,
            "epoch": batch.epoch,
            "number": batch.number,
            "commit-id": batch.commit_id,
            "begin": batch.begin.nested(),
            "end": batch.end.nested(),
            "topics": dict(batch.topics),
            "cluster": batch.cluster,
            "staged-at-ms": batch.staged_at_ms,
            "window-start-ms": batch.window_start_ms,
            "source": batch.source,
            "note": batch.note,
            "leaders": Cut(batch.leaders).nested(),
            "total": [range_counts_values(tally) for tally in batch.total],
            "tables": [
                {
                    "name": table.name,
                    "uuid": table.uuid,
                    "schema-id": table.schema_id,
                    "manifests": table.manifests,
                    "paths": table.paths,
                    "files": table.files,
                    "bytes": table.bytes,
                    "tallies": [range_counts_values(tally) for tally in table.tallies],
                    "keys": table.keys,
                }
                for table in batch.tables
            ],
        },
        separators=(",", ":"),
    ).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def load(stored: bytes, path: str = "") -> StagedBatch | None:
    """The batch, or None where the record is torn or altered. `path`: where it was read."""
    digest, _, body = stored.partition(b"\n")
    if hashlib.sha256(body.rstrip(b"\n")).hexdigest().encode() != digest:
        return None
    record = json.loads(body)
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise Fatal(
            f"cannot read staged batch {path}: expected version {VERSION}, found {version}",
            hint="use the Frazil that staged it",
        )
    try:
        return _batch(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # Its checksum is right, so it is no torn one: it is not taken for nothing.
        raise Fatal(
            f"cannot read staged batch {path}: it has the checksum of a batch record and "
            f"is none: {type(error).__name__}: {error}",
            hint="use the Frazil that staged it; if none did, move the file away",
        ) from None


def _batch(record: Mapping[str, Any]) -> StagedBatch:
    return StagedBatch(
        sink=record["sink"],
        epoch=record["epoch"],
        number=record["number"],
        commit_id=record["commit-id"],
        begin=Cut.of(record["begin"]),
        end=Cut.of(record["end"]),
        topics=record["topics"],
        cluster=record["cluster"],
        staged_at_ms=record["staged-at-ms"],
        window_start_ms=record["window-start-ms"],
        source=tuple(record.get("source", ("", ""))),
        note=record.get("note", ""),
        leaders=dict(Cut.of(record.get("leaders", {}))),
        total=tuple(range_counts_of(values) for values in record.get("total", ())),
        tables=tuple(
            StagedTable(
                name=table["name"],
                uuid=table["uuid"],
                schema_id=table["schema-id"],
                manifests=tuple(table["manifests"]),
                paths=tuple(table["paths"]),
                files=table["files"],
                bytes=table["bytes"],
                tallies=tuple(range_counts_of(values) for values in table["tallies"]),
                keys=table.get("keys", 0),
            )
            for table in record["tables"]
        ),
    )


def range_counts_values(tally: RangeCounts) -> list[object]:
    """A tally as JSON: also the form in which tasks hand theirs to the driver."""
    where = tally.range
    return [
        *where.partition,
        where.start,
        where.end,
        tally.written,
        tally.rejected,
        tally.skipped,
        tally.invisible,
        tally.merged,
        *([tally.lost] if tally.lost else []),
        tally.seen,
        tally.watermark,
    ]


def range_counts_of(values: list[object]) -> RangeCounts:
    topic, number, start, end, *counts, seen, watermark = values
    counts += [0] * (6 - len(counts))  # records of a time before `merged`, and most have no `lost`
    return RangeCounts(  # type: ignore[call-arg]
        Range(Partition(topic, number), start, end),  # type: ignore[arg-type]
        *counts[:5],  # type: ignore[arg-type]
        tuple(seen) if seen else None,  # type: ignore[arg-type]
        tuple(watermark) if watermark else None,  # type: ignore[arg-type]
        counts[5],
    )


def _span(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])
