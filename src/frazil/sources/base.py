"""Sources of a sink: two kinds, one writer, one committer.

`kafka`: Kafka straight into the tables. Spark gets offset ranges and never a record.
`dataframe`: any streaming DataFrame.

A source knows its input and how rows become files; it knows nothing of ledgers and commits. The
sink calls, in this order: `look` before anything is claimed, `start` for the cut that the claim
records, `resume` once the end of the previous run is known, `stream` for the DataFrame that Spark
drives, and then `write` for each batch.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from frazil.config.model import Config
from frazil.files.writer import DataFileDescriptor, WriterSpec
from frazil.kafka.planner import TopicIdentity
from frazil.kafka.range_source import BatchGathering
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.staged_batch import RangeCounts
from frazil.offsets import Cut, Range
from frazil.pipeline.chunk import TablePlan
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.versions import VersionLookup

T = TypeVar("T")


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
    #: of an upsert table: delete files of keys whose older rows go, and the number of keys
    deletes: tuple[DataFileDescriptor, ...] = ()
    keys: int = 0


@dataclass(frozen=True, slots=True)
class WriteResult:
    """One batch, written and checked against its plan: ready to be staged."""

    begin: Cut
    end: Cut
    tables: Mapping[str, TableWriteResult]
    origin: TopicIdentity
    seconds: Mapping[str, float]
    source: tuple[str, str] = ("", "")
    #: counts of all records, where there are several tables
    total: tuple[RangeCounts, ...] = ()
    #: of an operator's batch (`ledger.entry.OperatorNote`)
    note: str = ""
    #: kind of rejected records → their number, and position and reason of the last one
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def rows(self, apart: Callable[[str], bool] = lambda name: False) -> int:
        """Rows in its files, without those of tables for which `apart` is true."""
        return sum(
            file.rows
            for name, table in self.tables.items()
            if not apart(name)
            for file in table.files
        )

    @property
    def skipped(self) -> int:
        """Records that a rule left out. (A table's counts also skip records of other tables.)"""
        tallies = self.total or [t for table in self.tables.values() for t in table.tallies]
        return sum(tally.skipped for tally in tallies)


class SourceHost(Protocol):
    """The interface of a sink for its source."""

    config: Config
    #: how long records may wait for a batch
    gathering: BatchGathering

    def shape(
        self, columns: pa.Schema, metadata: MetadataColumns, among: MetadataColumns | None = None
    ) -> WriterSpec:
        """The writer spec of the table for these columns and those of `metadata` behind them.
        Creates the table if it is missing; raises where the columns do not fit. `among`: metadata
        columns that are part of `columns`."""

    def check_fits(self, columns: pa.Schema, metadata: MetadataColumns) -> None:
        """Raises where such columns would not fit; creates and claims nothing."""

    def provide(self, needs: Mapping[str, pa.Schema]) -> None:
        """Create or evolve these tables so that records with such columns fit."""

    def plans(self) -> dict[str, TablePlan]:
        """The existing tables, as the tasks of a batch need them."""

    def known(self, table: str) -> tuple[VersionLookup, ...]:
        """Where to look up the order of keys of the table: in staged files, in live files, and in
        the `_deleted` table."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Tables that could not be created or evolved as records need it, and why."""

    @property
    def number(self) -> int:
        """The number of the batch in progress."""

    def patiently(self, call: Callable[[], T]) -> T:
        """`call`, retried while a server is unavailable."""

    @property
    def prefix(self) -> str:
        """The file name prefix of the batch in progress."""


class BatchSource(Protocol):
    def template(self, table: str) -> str:
        """The `[[table]]` that a table was created from: its own name, or a template's."""

    def look(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        """Check that the source exists and is the one in `entry`; refuse what cannot work."""

    def start(self, position: Cut) -> Cut:
        """`position`, plus the first offsets of partitions that it does not contain."""

    def check(self, reached: Callable[[], StreamPosition]) -> None:
        """Raises where the stream could not continue from there. Nothing is claimed yet."""

    def resume(self, reached: StreamPosition, life: str) -> None:
        """The next query begins there: the first one of a run, or a restarted one."""

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame: ...

    @property
    def checkpoint(self) -> str: ...

    def opening(self, batch: int, reached: StreamPosition) -> WriteResult | None:
        """A result that must be in the ledger before the first batch is read."""

    def write(self, frame: DataFrame, batch: int, reached: StreamPosition) -> WriteResult | None:
        """The files of one micro-batch; None where there is nothing to stage."""

    def ends(self) -> Cut:
        """The current end of the stream."""

    def untold(self) -> list[Range]:
        """Ranges with no visible records, held back until a table exists whose ledger can record
        them."""

    @property
    def paced(self) -> bool:
        """Does the source apply its own limits, and so take several batches to its end?"""

    @property
    def stateful(self) -> bool:
        """Does Spark keep state of the stream from batch to batch?"""

    def close(self) -> None: ...


class TemporaryView:
    """A checkpoint for one run, never read back."""

    def __init__(self) -> None:
        self._made = ""

    def folder(self, root: str, life: str) -> str:
        """A new folder: below `root`, where folders of runs long over are removed, or anywhere."""
        if not root:
            self.remove()
            self._made = tempfile.mkdtemp(prefix="frazil-checkpoint-")
            return self._made
        root = root.rstrip("/")
        for old in Path(root).glob("epoch-*") if Path(root).is_dir() else ():
            if int(old.name.split("-")[1]) < int(life) - 1:
                shutil.rmtree(old, ignore_errors=True)
        return f"{root}/epoch-{life}-{uuid.uuid4().hex[:8]}"

    def remove(self) -> None:
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)


def added(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = {key for timing in seconds for key in timing}
    return {key: sum(timing.get(key, 0.0) for timing in seconds) for key in sorted(keys)}
