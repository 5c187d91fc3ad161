"""What feeds a sink. Two feeders, one writer, one committer.

`ranges`: nothing stands between topic and table, so Spark gets offset ranges and never a record.
`frames`: any streaming DataFrame.

A feed knows its source and how rows become files; it knows nothing of ledgers and commits. The sink
asks it, in this order: `look` before anything is claimed, `start` for the cut a claim names,
`resume` when it is known where the last life ended, `stream` for the DataFrame that Spark shall
drive, and then `write` batch by batch.
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
from frazil.kafka.planner import BatchGathering, TopicIdentity
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.staged_batch import RangeCounts
from frazil.offsets import Cut, Range
from frazil.pipeline.chunk import TablePlan
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.versions import VersionLookup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where the stream stands: behind everything that is committed or staged."""

    cut: Cut = field(default_factory=Cut)
    #: the same for sources that have no offsets of Kafka's (`checkpoint.SourceOffsets.text`)
    source: str = ""
    #: and whose offsets they are
    origin: TopicIdentity = field(default_factory=TopicIdentity)


@dataclass(frozen=True, slots=True)
class TableWriteResult:
    tallies: tuple[RangeCounts, ...]
    files: tuple[DataFileDescriptor, ...]
    #: of an upsert table: files of keys whose older rows go, and how many keys
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
    #: of all records, where there are several tables
    total: tuple[RangeCounts, ...] = ()
    #: of a batch that a person made (`table.ledger.Note`)
    note: str = ""
    #: kind of rejected records → how many there are, and where and why the last of them was
    rejected: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def rows(self, apart: Callable[[str], bool] = lambda name: False) -> int:
        """In its files, except those of tables that stand `apart`."""
        return sum(
            file.rows
            for name, table in self.tables.items()
            if not apart(name)
            for file in table.files
        )

    @property
    def skipped(self) -> int:
        """Records that a rule left out. (A table's tally also skips what went to other tables.)"""
        tallies = self.total or [t for each in self.tables.values() for t in each.tallies]
        return sum(tally.skipped for tally in tallies)


class SourceHost(Protocol):
    """What a feed needs of its sink."""

    config: Config
    #: how long records may wait for a batch
    gathering: BatchGathering

    def shape(
        self, columns: pa.Schema, metadata: MetadataColumns, among: MetadataColumns | None = None
    ) -> WriterSpec:
        """The table for such columns and those of `metadata` behind them, made if it is not there;
        raises where it does not fit. `among`: metadata columns that stand among `columns`."""

    def check_fits(self, columns: pa.Schema, metadata: MetadataColumns) -> None:
        """Raises where such columns would not fit; makes and claims nothing."""

    def provide(self, needs: Mapping[str, pa.Schema]) -> None:
        """Make these tables, or change them, so that records with such columns fit."""

    def plans(self) -> dict[str, TablePlan]:
        """The tables that are there, as the tasks of a batch must know them."""

    def known(self, table: str) -> tuple[VersionLookup, ...]:
        """Where to look for the order that keys of the table have: in what is staged, in what is
        live, and in what is remembered of deletes."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Tables that could not be made or changed as records wanted it, and why."""

    @property
    def number(self) -> int:
        """Of the batch under way."""

    def patiently(self, call: Callable[[], T]) -> T:
        """`call`, again and again while a server is away."""

    @property
    def prefix(self) -> str:
        """How the files of the batch under way are named."""


class BatchSource(Protocol):
    def template(self, table: str) -> str:
        """The `[[table]]` that a table was made of: its own name, or a template's."""

    def look(self, spark: SparkSession, entry: LedgerEntry | None) -> TopicIdentity:
        """See that the source is there and the one that `entry` knows; refuse what cannot work."""

    def start(self, position: Cut) -> Cut:
        """`position`, and where partitions begin that it does not know."""

    def check(self, reached: Callable[[], StreamPosition]) -> None:
        """Raises where it could not go on from there. Nothing is claimed yet."""

    def resume(self, reached: StreamPosition, life: str) -> None:
        """The next query begins there: the first of a life, or one that is started again."""

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame: ...

    @property
    def checkpoint(self) -> str: ...

    def opening(self, batch: int, reached: StreamPosition) -> WriteResult | None:
        """What must be in the ledger before a first batch is read."""

    def write(self, frame: DataFrame, batch: int, reached: StreamPosition) -> WriteResult | None:
        """The files of one micro-batch; None where there is nothing to stage."""

    def ends(self) -> Cut:
        """The end of the stream as it is now."""

    def untold(self) -> list[Range]:
        """Ranges of invisible offsets alone, that wait for a table to tell them of."""

    @property
    def paced(self) -> bool:
        """Does the source keep its own limits, and so takes several batches to its end?"""

    @property
    def stateful(self) -> bool:
        """Does Spark remember something of the stream from batch to batch?"""

    def close(self) -> None: ...


class TemporaryView:
    """A checkpoint for one life, which nobody reads back."""

    def __init__(self) -> None:
        self._made = ""

    def folder(self, root: str, life: str) -> str:
        """Below `root`, where those of lives long over are removed; or anywhere."""
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
    keys = {key for each in seconds for key in each}
    return {key: sum(each.get(key, 0.0) for each in seconds) for key in sorted(keys)}
