"""Check of the rows themselves, where they were read (`frazil audit … --deep`).

In: topic, partition and offset of every visible row. No offset is there twice, and each range has
as many as were written.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow.compute as pc

from frazil.auditing.ranges import is_unplaced, spans_of
from frazil.auditing.sink_check import SinkCheck
from frazil.ledger.range_columns import select


class RowCheck(SinkCheck):
    """The offset columns of the table."""

    def run(self) -> None:
        """Every visible offset must be unique, and each range have as many as were written."""
        rows = self.evidence.deep
        assert rows is not None
        alone = {self.sink} >= {name for name, parts in self.table.whole.items() if parts}
        upserts = self.sink in self.table.upserts
        for partition, part in self.whole.items():
            if is_unplaced(partition, part) and (self.unplaced_rows or not upserts):
                continue
            mask = pc.and_(
                pc.equal(rows["topic"], partition.topic),
                pc.equal(rows["partition"], partition.number),
            )
            offsets = np.sort(np.asarray(rows["offset"].filter(mask).combine_chunks()))
            again = offsets[1:][offsets[1:] == offsets[:-1]].tolist()
            self.add_ranges("overlap", partition, _runs(again), "rows of {} are duplicated")
            part = select(part, part.end > part.start)
            held = np.searchsorted(offsets, part.end) - np.searchsorted(offsets, part.start)
            missing = spans_of(part, held < part.written) if not upserts else []
            self.add_ranges("gap", partition, missing, "of {} rows are missing")
            if alone:
                self.add_ranges(
                    "overlap",
                    partition,
                    spans_of(part, held > part.written),
                    "of {} there are more rows than were written",
                )
                if len(offsets) > held.sum():
                    self.add(
                        "unaccounted",
                        f"{len(offsets) - held.sum()} rows of {partition} have offsets that "
                        "neither ledger nor index has as written",
                    )


def _runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Single offsets, in order, as ranges."""
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and runs[-1][1] >= offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs
