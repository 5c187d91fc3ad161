"""Other writers' commits that added rows, and the record a table keeps of them after expiry.

The audit does not vouch for ranges into which other writers added rows (decision 044); it
recognizes those commits by their snapshots. Before such snapshots are expired for a sink, they are
recorded in a table property: without it, the audit would attribute the rows to the sink.
Maintenance and audit share these functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from frazil import format_version
from frazil.errors import Fatal
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger.entry import PREFIX
from frazil.offsets import Partition

#: Table property; the id of the sink that expired the snapshots is appended.
PROPERTY = f"{PREFIX}foreign-commits"
#: Version of the property's JSON.
VERSION = 1
EVERYTHING = (0, 2**63 - 1)
#: With more partitions the property has no ranges: it is in every metadata file.
PARTITIONS = 32
#: The end of the year 9999, in milliseconds.
_LATEST = 253_402_300_799_999

Ranges = Mapping[Partition, tuple[int, int]]


def counted(summary: Mapping[str, str]) -> bool:
    """Does a summary contain counts of rows or files? Iceberg requires only the operation."""
    return any(key.startswith(("added-", "deleted-", "removed-", "total-")) for key in summary)


def brings_rows(snapshot: Snapshot) -> bool:
    """Is it another writer's commit that added rows, or may have? A compaction (`replace`) adds
    none, by Iceberg's definition."""
    summary = snapshot.summary
    if PREFIX + "sink" in summary or snapshot.operation == "replace":
        return False
    return summary.get("added-records", "0") != "0" or not counted(summary)


def reaches(files: Iterable[DataFile], partition: Partition) -> list[tuple[int, int]]:
    """The offset ranges of a partition that the files may contain, by their bounds."""
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
    """A table's record of other writers' commits that added rows: the newest commit, and the ranges
    into which all of them may have added rows."""

    snapshot_id: int
    operation: str
    timestamp_ms: int
    #: does it cover older commits, too?
    older: bool = False
    #: lowest offset, and the one after the highest; None: any offset of any partition
    ranges: Ranges | None = None

    def reach(self, partition: Partition) -> tuple[int, int] | None:
        """The range of a partition into which the commits may have added rows."""
        return EVERYTHING if self.ranges is None else self.ranges.get(partition)

    def within(self, snapshot_ids: Collection[int]) -> bool:
        """Are all its snapshots still there? Then none was expired, and it adds nothing to them."""
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
            "version": VERSION,
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
    """Property → recorded commits. Each sink has its own: two that expire at once lose nothing."""
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
    """The record of those commits that may have added rows of the partitions; None if none did.

    `added`: the data files that a snapshot added; None if unknown. `partitions` is None for sinks
    whose rows have no single offset: bounds cannot tell partitions apart.
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
    """One range per partition; None if there are too many partitions."""
    ranges: dict[Partition, tuple[int, int]] = {}
    for partition, (low, high) in spans:
        start, end = ranges.get(partition, (low, high))
        ranges[partition] = (min(start, low), max(end, high))
    return ranges if len(ranges) <= PARTITIONS else None


def _parsed(table: str, key: str, text: str) -> ForeignCommits:
    try:
        values = dict(json.loads(text))
        version = values.get("version")
        format_version.check(f"read property {key} of table {table}", version, VERSION)
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
