"""The verdict on a table: what the audit found, and for which offsets. Pure values.

In: findings of the checks. Out: `TableReport`, one for each sink of a table, with a
`PartitionReport` for each topic partition. The verdict is the kind of the worst finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from frazil.accounting import OutcomeCounts
from frazil.ledger.entry import OperatorNote
from frazil.offsets import BATCHES, Range
from frazil.render import label

#: The worst first. `accepted_loss` is no fault: an operator has signed for it.
KINDS = (
    "gap",
    "overlap",
    "unaccounted",
    "cannot_tell",
    "nothing_committed",
    "behind",
    "accepted_loss",
)


@dataclass(frozen=True, slots=True)
class Finding:
    JSON: ClassVar = "=text"

    kind: str
    message: str
    ranges: tuple[Range, ...] = ()

    def __str__(self) -> str:
        return f"{label(self.kind)}: {self.message}"

    text = property(__str__)


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The verdict on one topic partition."""

    JSON: ClassVar = "*range verdict *counts rows_in_files *spans"

    range: Range
    counts: OutcomeCounts
    findings: tuple[Finding, ...] = ()
    #: None where files mix partitions and only the sum is known
    rows_in_files: int | None = None

    def ranges(self, kind: str) -> tuple[Range, ...]:
        ranges = [r for finding in self.findings if finding.kind == kind for r in finding.ranges]
        return tuple(sorted({r for r in ranges if r.partition == self.range.partition}))

    @property
    def gaps(self) -> tuple[Range, ...]:
        return self.ranges("gap")

    @property
    def overlaps(self) -> tuple[Range, ...]:
        return self.ranges("overlap")

    @property
    def spans(self) -> dict[str, list[list[int]]]:
        """The ranges of the findings by kind, as `[start, end]`."""
        kinds = {"gaps": "gap", "overlaps": "overlap"}
        kinds |= {kind: kind for kind in ("unaccounted", "cannot_tell")}
        return {key: [[r.start, r.end] for r in self.ranges(kinds[key])] for key in kinds}

    @property
    def by_record(self) -> bool:
        """Is the verdict about single records?"""
        return self.range.partition != BATCHES and not self.counts.merged

    @property
    def verdict(self) -> str:
        return worst(self.findings)


@dataclass(frozen=True, slots=True)
class TableReport:
    JSON: ClassVar = "table sink verdict proves examined commits written findings notes partitions"

    table: str
    sink: str
    partitions: tuple[PartitionReport, ...]
    commits: int
    findings: tuple[Finding, ...] = ()
    #: the sources that were examined
    examined: tuple[str, ...] = ()
    #: do its batches replace the rows of their keys?
    upserts: bool = False
    #: interventions of operators in the stream
    notes: tuple[OperatorNote, ...] = ()

    @property
    def written(self) -> int:
        return sum(line.counts.written for line in self.partitions)

    @property
    def proves(self) -> str:
        """The subject of the verdict: `records`, `batches` or `changes`."""
        counted = [line for line in self.partitions if line.range.partition != BATCHES]
        rows = self.written - sum(line.counts.written for line in counted)
        if self.upserts and not rows:
            return "changes"
        by_record = counted and not rows and all(line.by_record for line in counted)
        return "records" if by_record else "batches"

    @property
    def verdict(self) -> str:
        """`proven`, or the kind of the worst finding; `accepted_loss` where everything else is
        proven."""
        return worst(self.findings)


def worst(findings: Iterable[Finding]) -> str:
    kinds = {finding.kind for finding in findings}
    return next((kind for kind in KINDS if kind in kinds), "proven")
