"""The named moments of a run: one hook for metrics, log, health and crash tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frazil.errors import FrazilError
from frazil.offsets import Partition

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
#: One attempt of a commit failed; the next one follows at once.
COMMIT_RETRIED = "commit-retried"
#: A maintenance task of a table did something, or failed.
MAINTAINED = "maintained"


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files of one table in a batch, delete files among them."""

    rows: int
    files: int
    bytes: int
    #: the highest event time, in microseconds; 0: unknown
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A named moment of a batch, of a commit, or of maintenance."""

    name: str
    batch: int
    at: float  # seconds since 1970
    #: of `written`: rows of its tables, without dead letters and the rows of `_deleted` tables;
    #: of `planned`: its offsets
    records: int = 0
    #: of `written`: seconds of its tasks by part; of `committed` and `commit-failed`: of the commit
    #: of `maintained`: of the task, by its name
    seconds: Mapping[str, float] | None = None
    skipped: int = 0
    #: of `written`: offsets that held no record
    invisible: int = 0
    #: of `written`: the most files that one of its tasks had open at a time
    open_files: int = 0
    #: of `committed`, `index-committed` and `done`: batches committed together
    batches: int = 1
    #: of `done`: the highest event time by partition, in microseconds
    event_times: Mapping[Partition, int] = field(default_factory=dict)
    #: of `maintained`: files removed
    removed: int = 0
    #: kind of rejected records → their number, and position and reason of the last one
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: of `written` and `committed`: the files of each table
    tables: Mapping[str, WrittenFiles] = field(default_factory=dict)
    #: of commits and of `maintained`: the table
    table: str = ""
    #: of commits: the id of the last batch in it
    commit_id: str = ""
    #: of `commit-failed` and `commit-retried`; of `maintained`, if the task failed
    error: FrazilError | None = None
