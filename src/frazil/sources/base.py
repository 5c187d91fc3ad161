"""Sources of a sink: two kinds, one writer, one committer.

`kafka`: Kafka straight into the tables. Spark gets offset ranges and never a record.
`dataframe`: any streaming DataFrame.

A source is a function of values: planned offsets and tables in, written files and missing tables
out. It knows nothing of ledgers and commits, and never calls the sink. The sink calls, in this
order: `identify` before anything is claimed, `start` for the cut that the claim records, `resume`
once the end of the previous run is known, `sample` for the tables of the next records, `stream` for
the DataFrame that Spark drives, and then for each batch `plan`, `run` until no table is missing,
and `check`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from frazil.accounting import RangeCounts
from frazil.files.writer import DataFileDescriptor
from frazil.kafka.planner import TopicIdentity
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.spark.checkpoint import SourceOffsets
from frazil.steps import Step, WrittenFiles


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The stream's position: behind everything that is committed or staged."""

    cut: Cut = field(default_factory=Cut)
    #: the same for sources without Kafka offsets (`checkpoint.SourceOffsets.text`)
    source: str = ""
    #: identity of the topics that the offsets belong to
    origin: TopicIdentity = field(default_factory=TopicIdentity)


@dataclass(frozen=True, slots=True)
class TableWriteResult:
    tallies: tuple[RangeCounts, ...]
    files: tuple[DataFileDescriptor, ...]
    #: upsert tables: delete files of the changed keys, and the number of these keys
    deletes: tuple[DataFileDescriptor, ...] = ()
    keys: int = 0


@dataclass(frozen=True, slots=True)
class WriteResult:
    """One batch, written and checked against its plan: ready to be staged."""

    begin: Cut
    end: Cut
    tables: Mapping[str, TableWriteResult]
    origin: TopicIdentity
    #: of each task: fetch, decode, write, …
    timings: Sequence[Mapping[str, float]] = ()
    source: tuple[str, str] = ("", "")
    #: counts of all records, where there are several tables
    total: tuple[RangeCounts, ...] = ()
    #: the note of an operator's batch (`ledger.entry.OperatorNote`)
    note: str = ""
    #: kind of rejected records → their number, and position and reason of the last one
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: the most files that one of its tasks had open at a time; 0: unknown
    open_files: int = 0

    def step(self, batch: int, apart: Callable[[str], bool]) -> Step:
        """The step `written`; rows of tables for which `apart` is true are no records."""
        tables = {}
        for name, table in self.tables.items():
            files = (*table.files, *table.deletes)
            rows = sum(file.rows for file in table.files)
            tables[name] = WrittenFiles(rows, len(files), sum(file.bytes for file in files))
        return Step(
            "written",
            batch,
            time.time(),
            records=sum(table.rows for name, table in tables.items() if not apart(name)),
            seconds={
                name: sum(timing.get(name, 0.0) for timing in self.timings)
                for name in sorted({name for timing in self.timings for name in timing})
            },
            skipped=self.skipped,
            invisible=sum(tally.invisible for tally in self._outcomes),
            open_files=self.open_files,
            rejected=self.rejected,
            tables=tables,
        )

    @property
    def skipped(self) -> int:
        """Records that a rule left out. (A table's counts also skip records of other tables.)"""
        return sum(tally.skipped for tally in self._outcomes)

    @property
    def _outcomes(self) -> Sequence[RangeCounts]:
        return self.total or [t for table in self.tables.values() for t in table.tallies]


@dataclass(slots=True)
class StreamState:
    """How far the batches of one run are. Written by the thread of the batches, read by others."""

    sink: str
    epoch: int
    #: behind the last staged batch
    position: StreamPosition
    #: number of the batch in progress
    number: int

    @property
    def file_prefix(self) -> str:
        """The prefix of file names of the batch in progress."""
        return f"frazil-{self.sink}-{self.epoch}-{self.number}"


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The sink's tables, as one run of a batch needs them."""

    plans: Mapping[str, TablePlan]
    #: tables that could not be created or evolved as records need it, and why
    refused: Mapping[str, str]
    #: number of the batch, and the prefix of its files' names
    number: int
    file_prefix: str


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The offsets of one micro-batch, before any record of it is read."""

    frame: DataFrame
    position: StreamPosition
    ranges: Sequence[Range] = ()
    #: offsets of Spark's sources before and after it
    before: SourceOffsets = field(default_factory=SourceOffsets)
    after: SourceOffsets = field(default_factory=SourceOffsets)


@dataclass(frozen=True)
class BatchRun:
    """The results of the tasks that ran over a planned batch; each source adds its own."""

    #: tables that must be created or evolved first, with the columns that records need
    missing: Mapping[str, pa.Schema] = field(default_factory=dict)
    #: the batch must run again with the current files of the tables, or in smaller parts
    again: bool = False
    #: how many records the tasks read, where Spark has seen ranges in their place
    records: Mapping[Partition, int] = field(default_factory=dict)


RunT = TypeVar("RunT", bound=BatchRun)


class BatchSource(Protocol[RunT]):
    """A source of batches. The defaults suit a source whose run is one batch without a query."""

    #: tables whose columns are known before a record is read, and which of these columns hold a
    #: record's topic, partition, offset and timestamp (None: the sink adds columns for them)
    columns: Mapping[str, pa.Schema] = MappingProxyType({})

    @property
    def fixed_columns(self) -> Mapping[str, pa.Schema]:
        """Columns whose types the config says, beside others that only records show."""
        return {}

    metadata: MetadataColumns | None = None
    checkpoint: str = ""

    #: what changes the rows of a key: records, by Kafka's keys and offsets; rows of a query; or
    #: nothing, and tables with a key are refused
    changes: str = ""

    @property
    def output_mode(self) -> str:
        """Spark's."""
        return "append"

    @property
    def paced(self) -> bool:
        """Does the source apply its own limits, and so take several batches to its end?"""
        return False

    @property
    def stateful(self) -> bool:
        """Does Spark keep state of the stream from batch to batch?"""
        return False

    def template(self, table: str) -> str:
        """The `[[table]]` that a table was created from: its own name, or a template's."""
        return table

    def identify(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        """Check that the source exists and is the one in `entry`. Raises for a query that cannot
        work."""

    def start(self, position: Cut) -> Cut:
        """`position`, plus the first offsets of partitions that it does not contain."""
        return position

    def check_resumable(self, reached: Callable[[], StreamPosition]) -> None:
        """Raises if the stream cannot continue from `reached`. Nothing is claimed yet."""
        return

    def resume(self, reached: StreamPosition, epoch: int) -> None:
        """The next query begins at `reached`: the first one of a run, or a restarted one."""
        return

    @property
    def required(self) -> Mapping[str, pa.Schema]:
        """Tables that must exist before the first batch."""
        return {}

    def sample(self, tables: BatchTables) -> Mapping[str, pa.Schema]:
        """Tables that are missing for the next records, as far as these can be seen before the
        first batch; empty where none is."""
        return {}

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame: ...

    def opening(self, batch: int, reached: StreamPosition) -> WriteResult | None:
        """A result that must be in the ledger before the first batch is read."""
        return None

    def plan(self, frame: DataFrame, batch: int, reached: StreamPosition) -> PlannedBatch | None:
        """The offsets of a micro-batch; None if an earlier run has staged them."""
        return PlannedBatch(frame, reached)

    def run(self, plan: PlannedBatch, tables: BatchTables) -> RunT:
        """Read and write the records on executors. Only results of successful tasks count."""

    def check(self, plan: PlannedBatch, tables: BatchTables, run: RunT) -> WriteResult | None:
        """The batch, once every planned offset has exactly one outcome, and every written one a row
        in a file; raises otherwise. None: nothing is to be staged."""

    def ends(self) -> Cut:
        """The current end of the stream."""
        return Cut()

    def carried(self) -> list[Range]:
        """Ranges with no visible records, held back until a table exists whose ledger can record
        them."""
        return []

    def close(self) -> None:
        return


class TemporaryView:
    """A checkpoint for one run, never read back."""

    def __init__(self) -> None:
        self._made = ""

    def folder(self, root: str, epoch: int) -> str:
        """A new folder: below `root`, where folders of runs long over are removed, or anywhere."""
        if not root:
            self.remove()
            self._made = tempfile.mkdtemp(prefix="frazil-checkpoint-")
            return self._made
        root = root.rstrip("/")
        for old in Path(root).glob("epoch-*") if Path(root).is_dir() else ():
            if int(old.name.split("-")[1]) < epoch - 1:
                shutil.rmtree(old, ignore_errors=True)
        return f"{root}/epoch-{epoch}-{uuid.uuid4().hex[:8]}"

    def remove(self) -> None:
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)
