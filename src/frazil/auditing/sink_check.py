"""What all checks of one sink in one table have in common.

In: the evidence, the history of the table, and the name of the sink. Out: `findings`. Each check
compares two of the sources that the audit hears, and adds a finding for every contradiction.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from frazil.auditing.history import Evidence, TableHistory
from frazil.auditing.report import Finding
from frazil.offsets import BATCHES, Partition, Range

#: The most ranges of one kind that are listed one by one.
_NAMED = 100


class SinkCheck:
    """A check of one sink in one table."""

    def __init__(self, evidence: Evidence, table: TableHistory, sink: str) -> None:
        self.evidence = evidence
        self.table = table
        self.sink = sink
        self.ledger = table.sinks[sink]
        self.rows = table.rows.get(sink, {})
        self.whole = table.whole[sink]
        #: has it rows that stand for no single offset, though they may carry one?
        self.unplaced_rows = BATCHES in self.whole and bool(self.whole[BATCHES].written.any())
        self.findings: list[Finding] = []

    def run(self) -> None:
        raise NotImplementedError

    def add(self, kind: str, says: str, ranges: Iterable[Range] = ()) -> None:
        self.findings.append(Finding(kind, says, tuple(ranges)))

    def add_ranges(
        self, kind: str, partition: Partition, spans: Iterable[tuple[int, int]], says: str
    ) -> None:
        """Add a finding for ranges of one partition, if any; `{}` in the text stands for them."""
        ranges = [Range(partition, max(0, a), max(0, a, b)) for a, b in islice(spans, _NAMED)]
        if ranges:
            named = ", ".join(map(str, ranges[:4])) + (" …" if len(ranges) > 4 else "")
            self.add(kind, says.format(named), ranges)

    def of_entry(self, number: int) -> list[Range]:
        return [
            Range(partition, int(part.start[at]), int(part.end[at]))
            for partition, part in self.ledger.parts.items()
            for at in np.flatnonzero((part.source == number) & (part.end > part.start))[:1]
        ]
