"""The evidence about one table, and what its history says of each sink and of other writers.

In: `Evidence`, gathered by `auditing.evidence`. Out: `TableHistory`: the ranges of each sink, from
its ledger and, where snapshots were expired, from the index; and the rows that commits of others
added or removed. The checks read it, and never change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from frazil.auditing.ranges import NOTHING, joined_columns, nonempty, same
from frazil.iceberg.foreign_commits import ForeignCommits, brings_rows, counted
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger.entry import PREFIX, parse
from frazil.ledger.index_rows import IndexRows
from frazil.ledger.range_columns import RangeColumns, by_partition, of_entries, select
from frazil.offsets import Cut, Partition

Parts = Mapping[Partition, RangeColumns]
#: Iceberg operations that may remove rows.
_TAKING = ("overwrite", "delete")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts about one table, from its metadata and from the rows of the index."""

    table: str
    #: the branch's ancestry, newest first
    history: Sequence[Snapshot]
    #: sink → the snapshot that its tag names
    tagged_snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    #: sink → is its tagged snapshot an ancestor of the branch, though snapshots between were
    #: expired? A sink is missing where no metadata file shows it
    behind: Mapping[str, bool] = field(default_factory=dict)
    #: the live data files; None: not examined
    files: Sequence[DataFile] | None = None
    #: live delete files, which hide rows of data files
    deletes: int = 0
    #: snapshot id → the data files that it added; None: unknown
    brought: Callable[[int], Sequence[DataFile] | None] | None = None
    #: the table's record of foreign commits whose snapshots its sinks expired
    foreign_commits: Sequence[ForeignCommits] = ()
    #: sink → the index rows of this table; a sink whose index was not found is missing
    index: Mapping[str, IndexRows] = field(default_factory=dict)
    #: sink → the index rows of the whole stream (`*`), for a sink that fills several tables
    stream: Mapping[str, IndexRows] = field(default_factory=dict)
    #: sink → the position in the index, which all of its tables have reached
    positions: Mapping[str, Cut] = field(default_factory=dict)
    #: topic, partition and offset of every visible row
    deep: pa.Table | None = None
    #: (path, wrong statement) of live files that a manifest misdescribes; None: not examined
    misdescribed: Sequence[tuple[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class SinkLedger:
    """One sink's entries in one table, oldest first."""

    snapshots: tuple[Snapshot, ...]
    parts: Parts
    #: does it go back to the table's first snapshot?
    complete: bool


class ForeignHistory:
    """The commits of other writers to a table."""

    def __init__(self, evidence: Evidence, complete: bool, ids: set[int]) -> None:
        """`complete`: the history goes back to the first snapshot; `ids`: of its snapshots."""
        self._complete = complete
        self._files_of = evidence.brought
        #: rows that other writers added, less those they removed
        self.rows = 0
        #: did other writers remove any rows; did they certainly remove rows of a sink?
        self.removed = self.taken = False
        #: did a sink itself remove the rows that its deletes hide?
        self.compacted = False
        #: compactions that wrote more rows than they read
        self.swollen: list[str] = []
        #: foreign commits that added rows, and those that removed rows
        self._bringing: list[Snapshot] = []
        self.taking: list[Snapshot] = []
        #: foreign commits whose snapshots a sink has expired
        self.expired = [c for c in evidence.foreign_commits if not c.within(ids)]

    def add(self, snapshot: Snapshot) -> None:
        """Count a commit that is not a sink's. Commits come in their order, oldest first."""
        summary = snapshot.summary
        added = int(summary.get("added-records", 0))
        removed = int(summary.get("deleted-records", 0))
        if snapshot.operation == "replace":  # rows replaced by the same rows: none are added
            if added > removed:
                self.swollen.append(f"snapshot {snapshot.id} rewrote {removed} rows as {added}")
            removed, added = max(0, removed - added), 0
            if PREFIX + "compact" in summary:
                self.compacted = True
                return
        elif brings_rows(snapshot):
            self._bringing.append(snapshot)
        # A commit that removes rows, or hides them behind delete files, may have removed rows
        # of a sink; it certainly has if it removed more than other writers had added.
        hides = int(summary.get("added-delete-files", 0)) > 0
        if removed > 0 or hides or (snapshot.operation in _TAKING and not counted(summary)):
            self.removed = True
            self.taking.append(snapshot)
        self.taken |= self._complete and removed > self.rows
        self.rows += added - removed

    @cached_property
    def brought(self) -> list[tuple[Snapshot, Sequence[DataFile] | None]]:
        """Files that foreign commits added, where rows may also have been removed: foreign rows may
        then replace as many of the sink's in the same ranges. Without removals counts suffice."""
        if self._complete and not self.removed:
            return []
        return [(s, self._files_of(s.id) if self._files_of else None) for s in self._bringing]


class TableHistory:
    """The history of a table, for all of its sinks."""

    def __init__(self, evidence: Evidence) -> None:
        oldest_first = list(evidence.history)[::-1]
        self.complete = not oldest_first or oldest_first[0].parent is None
        self._oldest = oldest_first[0] if oldest_first else None
        self._ids = {snapshot.id for snapshot in oldest_first}
        by_sink: dict[str, list[Snapshot]] = {}
        self.others = ForeignHistory(evidence, self.complete, self._ids)
        rewound = set()
        for snapshot in oldest_first:
            summary = snapshot.summary
            if (sink := summary.get(PREFIX + "sink")) is not None:
                if PREFIX + "rewound" in summary:  # of the index: its rows record what stayed
                    by_sink[sink] = []
                    rewound.add(sink)
                by_sink.setdefault(sink, []).append(snapshot)
            else:
                self.others.add(snapshot)
        for sink, tagged in evidence.tagged_snapshots.items():
            # If the history was expired, the tag still has the newest entry.
            expired = not self.complete and tagged.sequence < oldest_first[0].sequence
            if expired and sink not in by_sink and parse(tagged.summary) is not None:
                by_sink[sink] = [tagged]
        # The ledgers first: the index may still be loading.
        entries = {
            name: of_entries([snapshot.summary for snapshot in snapshots])
            for name, snapshots in by_sink.items()
        }
        #: sink → its index rows of this table
        self.rows = {name: by_partition(index.spans) for name, index in evidence.index.items()}
        # If the table was rolled back behind its first entry, only the index may know the sink.
        self.sinks = {
            name: SinkLedger(
                tuple(by_sink.get(name, ())),
                by_partition(entries.get(name, NOTHING)),
                self.complete and name not in rewound,
            )
            for name in {*by_sink, *(name for name, rows in self.rows.items() if rows)}
        }
        self.whole = {name: self._together(name) for name in self.sinks}
        #: sinks whose batches replace the rows of their keys
        self.upserts = {
            name
            for name, snapshots in by_sink.items()
            if any(PREFIX + "keys" in snapshot.summary for snapshot in snapshots)
        }

    def apart(self, tagged: Snapshot) -> bool:
        """Do expired snapshots lie between a tagged snapshot and the history that is left?"""
        return self._oldest is not None and tagged.id not in (
            *self._ids,
            self._oldest.parent,
        )

    def _together(self, sink: str) -> Parts:
        """The ranges of a sink: from the index where the ledger was expired, else the ledger."""
        ledger, rows = self.sinks[sink], self.rows.get(sink, {})
        if ledger.complete:
            return ledger.parts
        parts = dict(ledger.parts)
        for partition, part in rows.items():
            left = ledger.parts.get(partition)
            if left is None:
                parts[partition] = part
                continue
            before = part.end <= left.start[0]
            if not same(nonempty(left), select(part, ~before)):  # else the index has all of them
                parts[partition] = joined_columns(select(part, before), left)
            else:
                parts[partition] = part
        return parts

    def knows(self, sink: str) -> bool:
        """Do ledger and index together record everything that a sink wrote to this table?"""
        ledger = self.sinks[sink]
        return ledger.complete or sink in self.rows or not ledger.parts

    def owners(self, partition: Partition) -> set[str]:
        return {name for name, parts in self.whole.items() if partition in parts}
