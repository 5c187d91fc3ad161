"""Check of the index: its rows against each other, and against the ledger.

The rows of a sink, one per batch and partition, join without gap or overlap. Each adds up, has the
counts of its entry in the ledger, and names the commit of the entry.
"""

from __future__ import annotations

import numpy as np

from frazil.auditing.ranges import NOTHING, joints, nonempty, same, spans_of, uncovered
from frazil.auditing.sink_check import SinkCheck
from frazil.ledger.entry import PREFIX
from frazil.ledger.range_columns import INDEXED_OUTCOMES, by_partition
from frazil.offsets import BATCHES, Partition


class IndexCheck(SinkCheck):
    """The rows of the index."""

    def run(self) -> None:
        stream = self.evidence.stream.get(self.sink)
        whole = {} if stream is None else by_partition(stream.spans)
        strange = by_partition(self.evidence.index[self.sink].strange)
        position = self.evidence.positions.get(self.sink)
        for partition, part in self.rows.items():
            gaps, overlaps = joints(part)
            # Batches that held nothing for the table have rows in the whole stream only.
            bare = [hole for gap in gaps for hole in uncovered(whole.get(partition), *gap)]
            self.add_ranges("gap", partition, bare, "the index has no row of {}")
            self.add_ranges("overlap", partition, overlaps, "the index has {} twice")
            sums = part.written + part.rejected + part.skipped + part.invisible + part.merged
            sums = sums + part.lost
            odd = (sums != part.end - part.start) if partition != BATCHES else sums < 0
            wrong = [*spans_of(part, odd), *spans_of(strange.get(partition, NOTHING))]
            self.add_ranges(
                "unaccounted", partition, wrong, "the index's row of {} does not add up"
            )
        for partition in sorted({*self.rows, *self.ledger.parts}):
            offset = None if position is None else position.get(partition, 0)
            self._compare(partition, offset)
        self._misnamed()

    def _compare(self, partition: Partition, position: int | None) -> None:
        """Compare each entry of the ledger with its rows in the index."""
        rows = self.rows.get(partition, NOTHING)
        entries = self.ledger.parts.get(partition, NOTHING)
        reached = int(entries.end.max()) if len(entries) else 0
        if self.ledger.snapshots or self.ledger.complete:
            self.add_ranges(
                "gap",
                partition,
                spans_of(rows, rows.end > reached),
                "the index has {}, which the table's ledger lacks",
            )
        if self.ledger.complete and len(entries):
            self.add_ranges(
                "unaccounted",
                partition,
                spans_of(rows, rows.start < entries.start[0]),
                "the index has {}, from before the ledger begins",
            )
        entries = nonempty(entries)
        if not len(entries) or same(entries, rows):
            return
        low = np.searchsorted(rows.start, entries.start)
        high = np.searchsorted(rows.start, entries.end)
        # The index is committed last: it may lack rows of entries beyond its position.
        later = entries.end > (entries.end.max() if position is None else position)
        wanted = {"length": entries.end - entries.start - entries.elsewhere}
        wanted |= {outcome: getattr(entries, outcome) for outcome in INDEXED_OUTCOMES}
        if partition == BATCHES:  # a ledger records only the rows written of a batch
            wanted = {"written": entries.written}
        differ = np.zeros(len(entries), bool)
        for outcome, expected in wanted.items():
            column = rows.end - rows.start if outcome == "length" else getattr(rows, outcome)
            sums = np.append(0, np.cumsum(column))
            actual = sums[high] - sums[low]
            differ |= np.where(later, actual > expected, actual != expected)
        # A row that begins in an entry ends in it.
        last = np.maximum(high, 1) - 1
        differ |= (high > low) & (rows.end[last] > entries.end) if len(rows) else False
        none = differ & (low == high)
        self.add_ranges(
            "unaccounted",
            partition,
            spans_of(entries, none),
            "the ledger has {}, and the index has no row of it",
        )
        self.add_ranges(
            "unaccounted",
            partition,
            spans_of(entries, differ & ~none),
            "ledger and index have different counts of {}",
        )

    def _misnamed(self) -> None:
        """Each row of a batch must name a commit of the ledger, with its snapshot and epoch."""
        index = self.evidence.index[self.sink]
        places: dict[str, tuple[int, int, int, int]] = {}
        for snapshot in self.ledger.snapshots:
            summary = snapshot.summary
            first, _, last = summary[PREFIX + "batches"].partition("..")
            fact = (snapshot.id, int(first), int(last), int(summary[PREFIX + "epoch"]))
            places |= dict.fromkeys(summary[PREFIX + "commit-id"].split(","), fact)
        known = [places.get(commit_id) for commit_id in index.commit_ids]
        unknown = np.array([fact is None for fact in known], bool)
        facts = np.array([fact or (0, 0, 0, 0) for fact in known], np.int64).reshape(-1, 4)
        snapshot_ids, first, last, epoch = facts.T
        wrong = (index.snapshots != snapshot_ids) & (index.snapshots != 0)
        wrong |= (index.batches < first) | (index.batches > last) | (index.epochs > epoch)
        if not (wrong | unknown).any():
            return
        for partition, rows in self.rows.items():
            entries = self.ledger.parts.get(partition, NOTHING)
            if not len(entries):
                continue
            # The commits of expired entries are unknown.
            since = rows.start >= entries.start[0]
            odd = np.where(unknown[rows.source], since, wrong[rows.source])
            self.add_ranges(
                "unaccounted",
                partition,
                spans_of(rows, odd),
                "the index's row of {} names another batch, epoch, commit or snapshot than"
                " the ledger",
            )
