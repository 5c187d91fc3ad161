"""The named moments of a batch: one hook for metrics, log and crash tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: In order. Crash tests kill at each of them.
STEPS = (
    "planned",
    "written",
    "staged",
    "commit",
    "committed",
    "tagged",
    "index-commit",
    "index-committed",
    "index-tagged",
    "done",
)


@dataclass(frozen=True, slots=True)
class Step:
    """A named moment of a batch."""

    name: str
    batch: int
    at: float  # seconds since 1970
    #: rows of its tables, without dead letters and the rows of `_deleted` tables
    records: int = 0
    seconds: Mapping[str, float] | None = None
    skipped: int = 0
    #: kind of rejected records → their number, and position and reason of the last one
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)
