"""Checks of the ledger: a sink's entries in the snapshots of a table, and notes of operators.

`LedgerCheck`: the entries join without gap or overlap, each adds up, and each agrees with the
summary that Iceberg wrote for its snapshot. `NoteCheck`: an operator signed for every lost offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from frazil.accounting import OUTCOME_NAMES
from frazil.auditing.history import Evidence, TableHistory
from frazil.auditing.ranges import joints, spans_of
from frazil.auditing.sink_check import SinkCheck
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import PREFIX, OperatorNote, parse
from frazil.offsets import Partition, Range


class LedgerCheck(SinkCheck):
    """The entries of the ledger, by themselves and against their snapshots."""

    def run(self) -> None:
        for partition, part in self.ledger.parts.items():
            gaps, overlaps = joints(part)
            self.add_ranges("gap", partition, gaps, "no entry of the ledger has {}")
            self.add_ranges("overlap", partition, overlaps, "the ledger has {} twice")
            self.add_ranges(
                "unaccounted",
                partition,
                spans_of(part, part.written < 0),
                "the ledger counts more records of {} than it has offsets",
            )
        self._unchained()
        self._miscounted()
        self._rolled_back()
        if not self.table.knows(self.sink):
            self.add(
                "cannot_tell",
                "snapshots before the oldest one left were expired, and no "
                "index was found; the ranges are what the ledger left proves",
            )

    def _unchained(self) -> None:
        """Find entries that do not begin at the Spark source offset where the previous one ended.
        The offsets are compared as text; a sink that reads Kafka directly has none."""
        end = ""
        for snapshot in self.ledger.snapshots:
            source = snapshot.summary.get(PREFIX + "source")
            before, after = json.loads(source) if source else ("", "")
            if end and before and before != end:
                batch = snapshot.summary[PREFIX + "batches"].partition("..")[0]
                self.add(
                    "gap", f"batch {batch} begins at {before}, and the one before it ends at {end}"
                )
            end = after

    def _miscounted(self) -> None:
        """Find entries whose counts differ from their own ranges, or from Iceberg's summary."""
        derived = np.zeros((len(OUTCOME_NAMES), len(self.ledger.snapshots)), np.int64)
        for part in self.ledger.parts.values():
            for counts, outcome in zip(derived, OUTCOME_NAMES, strict=True):
                if not getattr(part, outcome).any():
                    continue
                if len(part) == len(counts):  # every entry has it
                    counts += getattr(part, outcome)
                else:
                    counts[part.source] += getattr(part, outcome)  # an entry names a partition once
        for i, (snapshot, sums) in enumerate(
            zip(self.ledger.snapshots, derived.T.tolist(), strict=True)
        ):
            summary, rows = snapshot.summary, sums[0]
            text = summary.get(PREFIX + "counts", "{}")
            counted = {} if text == _counts(sums) else json.loads(text)
            if counted and any(
                counted.get(f, 0) != n for f, n in zip(OUTCOME_NAMES, sums, strict=True)
            ):
                entry = {outcome: number for outcome, number in counted.items() if number}
                ranges = {f: n for f, n in zip(OUTCOME_NAMES, sums, strict=True) if n}
                self.add(
                    "unaccounted",
                    f"the entry of batches {summary[PREFIX + 'batches']} says"
                    f" {entry}; its ranges say {ranges}",
                    self.of_entry(i),
                )
            added = summary.get("added-records", "0")
            if self.evidence.files is not None and int(added) != rows:
                self.add(
                    "unaccounted",
                    f"the entry of batches {summary[PREFIX + 'batches']} says"
                    f" {rows} written; its snapshot {snapshot.id} added {added}",
                    self.of_entry(i),
                )
            keys, gone = (
                summary.get(name, "0") for name in (PREFIX + "keys", "added-equality-deletes")
            )
            if self.evidence.files is not None and keys != gone:
                self.add(
                    "unaccounted",
                    f"the entry of batches {summary[PREFIX + 'batches']} says"
                    f" that it deletes {keys} keys; its snapshot {snapshot.id} deletes {gone}",
                    self.of_entry(i),
                )

    def _rolled_back(self) -> None:
        tagged = self.evidence.tagged_snapshots.get(self.sink)
        entry = parse(tagged.summary) if tagged is not None else None
        if tagged is None or entry is None:
            return
        if tagged in self.ledger.snapshots and self.table.apart(tagged):
            self._bridged(tagged, entry.ranges)
            return
        reached = {p: int(part.end.max()) for p, part in self.ledger.parts.items()}
        lost = [
            Range(partition, reached.get(partition, 0), end)
            for partition, end in entry.end.items()
            if reached.get(partition, 0) < end
        ]
        if lost:
            named = ", ".join(map(str, lost[:4]))
            self.add(
                "gap",
                f"the table was rolled back: its tag has {named}, which its ledger lacks",
                lost,
            )

    def _bridged(self, tagged: Snapshot, ranges: Sequence[Range]) -> None:
        """Snapshots between the sink's newest entry and the oldest one left were expired. A lower
        sequence number proves nothing: numbers rise on a branch that was rolled back, too. In an
        append table the files show a rollback; in an upsert table only the ancestry does."""
        behind = self.evidence.behind.get(self.sink)
        if behind is False:
            self.add(
                "gap",
                f"the table was rolled back to before snapshot {tagged.id}, the newest "
                "entry of the sink, and snapshots were expired since",
                ranges,
            )
        elif behind is None and self.sink in self.table.upserts:
            self.add(
                "cannot_tell",
                f"snapshots since the newest entry of the sink ({tagged.id})"
                " were expired, and no earlier metadata file shows that the table was not "
                "rolled back; compare it with its topics (frazil offsets confirm signs for "
                "it)",
                ranges,
            )


class NoteCheck(SinkCheck):
    """The notes of operators, and the losses that they accepted."""

    def __init__(self, evidence: Evidence, table: TableHistory, sink: str) -> None:
        super().__init__(evidence, table, sink)
        self.notes: list[OperatorNote] = []

    def run(self) -> None:
        """Every offset recorded as lost must lie in a range that an operator gave up as a whole and
        signed for: in the ledger or, where that was expired, in the index."""
        signed: dict[tuple[Partition, int, int], OperatorNote] = {}
        for number, snapshot in enumerate(self.ledger.snapshots):
            if (
                note := OperatorNote.of(snapshot.summary.get(PREFIX + "operator-note"))
            ) is not None:
                self._signed(signed, note, self.of_entry(number))
        index = self.evidence.index.get(self.sink)
        for range_, text in index.notes if index is not None else ():
            if (note := OperatorNote.of(text)) is not None:
                self._signed(signed, note, [range_])
        for partition, part in self.whole.items():
            if not part.lost.any():
                continue
            unsigned = []
            at = np.flatnonzero(part.lost)
            spans = zip(
                part.start[at].tolist(), part.end[at].tolist(), part.lost[at].tolist(), strict=True
            )
            for start, end, lost in spans:
                known = signed.get((partition, start, end))
                if known is None or lost != end - start:
                    unsigned.append((start, end))
                else:
                    gone = Range(partition, start, end)
                    self.add("accepted_loss", f"{gone}: {known}", [gone])
            self.add_ranges(
                "gap",
                partition,
                unsigned,
                "{} are recorded as lost, without an operator who accepted it",
            )

    def _signed(
        self,
        signed: dict[tuple[Partition, int, int], OperatorNote],
        note: OperatorNote,
        ranges: Iterable[Range],
    ) -> None:
        if note not in self.notes:
            self.notes.append(note)
        signed |= {(range_.partition, range_.start, range_.end): note for range_ in ranges}


def _counts(sums: Sequence[int]) -> str:
    """Counts as the text of an entry: comparing text spares parsing most entries."""
    others = [
        f',"{outcome}":{n}' for outcome, n in zip(OUTCOME_NAMES[1:], sums[1:], strict=True) if n
    ]
    return f'{{"read":{sum(sums[:3])},"written":{sums[0]}{"".join(others)}}}'
