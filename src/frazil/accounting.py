"""The outcomes of an offset and their arithmetic. Pure.

Every offset of a planned range has exactly one outcome (I3): *written* to the table, *rejected* (a
dead letter), *skipped* by a rule, *invisible* (it held no record), *merged* into rows of several
records, *elsewhere* (in a batch without records for this table), or *lost* (given up by an
operator).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from frazil.errors import AccountingError
from frazil.offsets import BATCHES, Partition, Range


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Outcomes of offsets. `read` records were delivered; `invisible` offsets held no record;
    `merged` ones were processed into rows that are not known individually. `elsewhere`: offsets of
    batches without records for this table; the index has their outcomes. `lost`: given up by an
    operator, with a note."""

    written: int = 0
    rejected: int = 0
    skipped: int = 0
    invisible: int = 0
    merged: int = 0
    elsewhere: int = 0
    lost: int = 0

    @property
    def read(self) -> int:
        return self.written + self.rejected + self.skipped

    @property
    def offsets(self) -> int:
        return self.read + self.invisible + self.merged + self.elsewhere + self.lost

    def __add__(self, other: OutcomeCounts) -> OutcomeCounts:
        return OutcomeCounts(
            self.written + other.written,
            self.rejected + other.rejected,
            self.skipped + other.skipped,
            self.invisible + other.invisible,
            self.merged + other.merged,
            self.elsewhere + other.elsewhere,
            self.lost + other.lost,
        )


#: The outcomes of an offset, in the order of `OutcomeCounts`.
OUTCOME_NAMES = tuple(field.name for field in fields(OutcomeCounts))


@dataclass(frozen=True, slots=True)
class RangeCounts:
    """The outcomes of one range of a batch in one table."""

    range: Range
    written: int
    rejected: int = 0
    skipped: int = 0
    invisible: int = 0
    #: offsets whose records have no row of their own (aggregated, joined)
    merged: int = 0
    #: lowest and highest offset with a record; None: no record
    seen: tuple[int, int] | None = None
    #: lowest and highest event time, in microseconds
    watermark: tuple[int, int] | None = None
    #: offsets that an operator has given up
    lost: int = 0

    @classmethod
    def of(
        cls, range: Range, counts: OutcomeCounts, watermark: tuple[int, int] | None = None
    ) -> RangeCounts:
        """The range with these outcomes, except its offsets elsewhere."""
        return cls(
            range,
            counts.written,
            counts.rejected,
            counts.skipped,
            counts.invisible,
            counts.merged,
            watermark=watermark,
            lost=counts.lost,
        )

    def __add__(self, other: RangeCounts) -> RangeCounts:
        """With the counts of the range that follows this one."""
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
    def outcomes(self) -> tuple[int, int, int, int, int, int]:
        """Written, rejected, skipped, invisible, merged, lost: as index rows and batch records have
        them, in this order."""
        return (
            *(self.written, self.rejected, self.skipped),
            *(self.invisible, self.merged, self.lost),
        )

    @property
    def balanced(self) -> bool:
        """I3: every offset of the range has exactly one outcome. (`BATCHES` may have any rows.)"""
        return self.range.partition == BATCHES or len(self.range) == sum(self.outcomes)


def _span(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])


def for_table(total: RangeCounts, tally: RangeCounts) -> RangeCounts:
    """The counts of a range for one table: records not routed to it count as skipped."""
    read = total.written + total.rejected + total.skipped
    return replace(
        total,
        written=tally.written,
        rejected=tally.rejected,
        merged=tally.merged,
        watermark=tally.watermark,
        skipped=read - tally.written - tally.rejected - tally.merged,
    )


def moved_to_written(tally: RangeCounts, rows: int, outcome: str) -> RangeCounts:
    """The counts with `rows` records moved from the outcome `outcome` to written."""
    rest = getattr(tally, outcome) - rows
    if rest < 0:
        raise miscounted(tally, "", rows)
    return replace(tally, written=rows, **{outcome: rest})


def by_partition(tallies: Iterable[RangeCounts]) -> tuple[RangeCounts, ...]:
    """One for each partition; `tallies` come in order."""
    sums: dict[Partition, RangeCounts] = {}
    for tally in tallies:
        key = tally.range.partition
        sums[key] = sums[key] + tally if key in sums else tally
    return tuple(sums.values())


def miscounted(tally: RangeCounts, name: str, files: int) -> AccountingError:
    return AccountingError(
        f"cannot stage {tally.range}: {len(tally.range)} offsets, of them {tally.written} written, "
        f"{tally.merged} merged, {tally.rejected} rejected, {tally.skipped} skipped, "
        f"{tally.invisible} invisible; {files} in the files" + (f" of table {name}" if name else "")
    )
