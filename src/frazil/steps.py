"""The named moments of a run: one hook for metrics, log, health and crash tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frazil.errors import FrazilError

#: Of a batch, in order. Crash tests kill at each of them.
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
#: A commit that failed: it is tried again, or an operator must act.
COMMIT_FAILED = "commit-failed"


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files of one table in a batch, delete files among them."""

    rows: int
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A named moment of a batch, of a commit, or of maintenance."""

    name: str
    batch: int
    at: float  # seconds since 1970
    #: of `written`: rows of its tables, without dead letters and the rows of `_deleted` tables
    records: int = 0
    #: of `written`: seconds of its tasks by part; of `committed` and `commit-failed`: of the commit
    seconds: Mapping[str, float] | None = None
    skipped: int = 0
    #: kind of rejected records → their number, and position and reason of the last one
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: of `written`: the files of each table
    tables: Mapping[str, WrittenFiles] = field(default_factory=dict)
    #: of commits: the table; of `commit` to `tagged`, and of `commit-failed`
    table: str = ""
    #: of `commit-failed`
    error: FrazilError | None = None
