"""Commits of others that brought rows, and what a table keeps of them when their snapshots expire.

The audit doubts ranges into which others brought rows (decision 044), and knows those commits by
their snapshots. Who expires such snapshots for a sink writes first into a property of the table
what they were: without it the audit would take the rows for those that the sink wrote. Maintenance
and audit ask the same functions here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from frazil.errors import Fatal
from frazil.iceberg.static_table import DataFile
from frazil.ledger.entry import PREFIX, Snapshot
from frazil.offsets import Partition

#: Property of a table, with the id behind it of the sink that expired the snapshots.
PROPERTY = f"{PREFIX}foreign-commits"
EVERYTHING = (0, 2**63 - 1)
#: Of more partitions the property has no ranges: it is in every metadata file.
PARTITIONS = 32
#: The end of the year 9999, in milliseconds.
_LATEST = 253_402_300_799_999

Ranges = Mapping[Partition, tuple[int, int]]


def counted(summary: Mapping[str, str]) -> bool:
    """Does a summary tell how many rows came and went? Iceberg asks for the operation only."""
    return any(key.startswith(("added-", "deleted-", "removed-", "total-")) for key in summary)


def brings_rows(snapshot: Snapshot) -> bool:
    """Is it a commit of others that brought rows, or may have? A compaction (`replace`) brings
    none: Iceberg defines it so."""
    summary = snapshot.summary
    if PREFIX + "sink" in summary or snapshot.operation == "replace":
        return False
    return summary.get("added-records", "0") != "0" or not counted(summary)


def reaches(files: Iterable[DataFile], partition: Partition) -> list[tuple[int, int]]:
    """What each of the files may hold of a partition, by its bounds."""
    spans = []
    for file in files:
        low, high = file.topics or ("", "\U0010ffff")
        if file.partition is not None:
            may = file.partition == partition
        else:
            may = file.nulls < file.rows and low <= partition.topic <= high
        if may:
            spans.append((file.offsets[0], file.offsets[1] + 1) if file.offsets else EVERYTHING)
    return spans


@dataclass(frozen=True, slots=True)
class ForeignCommits:
    """What a table keeps of commits of others that brought rows: the newest, and where they all may
    have brought some."""

    snapshot_id: int
    operation: str
    timestamp_ms: int
    #: does it stand for older ones, too?
    older: bool = False
    #: lowest offset, and the one behind the highest; None: of any partition, anything
    ranges: Ranges | None = None

    def reach(self, partition: Partition) -> tuple[int, int] | None:
        """What they may have brought of a partition."""
        return EVERYTHING if self.ranges is None else self.ranges.get(partition)

    def within(self, snapshot_ids: Collection[int]) -> bool:
        """Are all of its snapshots there? Then nothing was expired, and they tell themselves."""
        return not self.older and self.snapshot_id in snapshot_ids

    def joined(self, other: ForeignCommits) -> ForeignCommits:
        newest = max(self, other, key=lambda commits: commits.timestamp_ms)
        older = self.older or other.older or self.snapshot_id != other.snapshot_id
        ranges = None
        if self.ranges is not None and other.ranges is not None:
            ranges = _bounded([*self.ranges.items(), *other.ranges.items()])
        return ForeignCommits(
            newest.snapshot_id, newest.operation, newest.timestamp_ms, older, ranges
        )

    def text(self) -> str:
        topics: dict[str, dict[str, list[int]]] = {}
        for partition, span in sorted((self.ranges or {}).items()):
            topics.setdefault(partition.topic, {})[str(partition.number)] = list(span)
        values = {
            "snapshot": self.snapshot_id,
            "operation": self.operation,
            "timestamp-ms": self.timestamp_ms,
            "older": self.older,
            "ranges": None if self.ranges is None else topics,
        }
        return json.dumps(values, separators=(",", ":"))

    def __str__(self) -> str:
        moment = datetime.fromtimestamp(self.timestamp_ms / 1000, timezone.utc)
        newest = f"snapshot {self.snapshot_id}, {self.operation}"
        newest += f" at {moment.isoformat(timespec='seconds')}"
        return newest + (" and older ones" if self.older else "")


def key_of(sink: str) -> str:
    return f"{PROPERTY}.{sink}"


def recorded(table: str, properties: Mapping[str, str]) -> dict[str, ForeignCommits]:
    """Property → what it keeps. Each sink has its own: two that expire at once lose nothing."""
    return {
        key: _parsed(table, key, text)
        for key, text in properties.items()
        if key.startswith(f"{PROPERTY}.")
    }


def of_snapshots(
    snapshots: Iterable[Snapshot],
    added: Callable[[int], Sequence[DataFile] | None],
    partitions: Collection[Partition] | None,
) -> ForeignCommits | None:
    """Of those commits that may have brought rows of the partitions; None: none did.

    `added`: the data files that a snapshot brought; None: nobody can tell. `partitions` of sinks
    whose rows stand for no single offset are None: no bounds tell them apart.
    """
    commits: ForeignCommits | None = None
    for snapshot in snapshots:
        files = None if partitions is None else added(snapshot.id)
        ranges = None
        if partitions is not None and files is not None:
            ranges = _bounded([(p, span) for p in partitions for span in reaches(files, p)])
            if ranges is not None and not ranges:
                continue
        one = ForeignCommits(snapshot.id, snapshot.operation, snapshot.timestamp_ms, False, ranges)
        commits = one if commits is None else commits.joined(one)
    return commits


def _bounded(spans: Iterable[tuple[Partition, tuple[int, int]]]) -> Ranges | None:
    """One range for each partition; None where there are too many."""
    ranges: dict[Partition, tuple[int, int]] = {}
    for partition, (low, high) in spans:
        start, end = ranges.get(partition, (low, high))
        ranges[partition] = (min(start, low), max(end, high))
    return ranges if len(ranges) <= PARTITIONS else None


def _parsed(table: str, key: str, text: str) -> ForeignCommits:
    try:
        values = json.loads(text)
        moment = int(values["timestamp-ms"])
        if not 0 <= moment <= _LATEST:
            raise ValueError(f"no moment: {moment}")
        topics = values["ranges"]
        ranges = None
        if topics is not None:
            ranges = {
                Partition(topic, int(number)): (int(low), int(high))
                for topic, spans in topics.items()
                for number, (low, high) in spans.items()
            }
        return ForeignCommits(
            int(values["snapshot"]), str(values["operation"]), moment, bool(values["older"]), ranges
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise Fatal(
            f"cannot read property {key} of table {table}: {type(error).__name__}: {error}",
            hint=f"it was altered by hand; ALTER TABLE {table} UNSET TBLPROPERTIES ('{key}'), and "
            "have frazil audit --deep read the rows",
        ) from None
