"""What follows from a commit, beside the commit itself: index rows, completeness, the end of staged
files, Kafka's committed offsets, maintenance. Runs on the committer's threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from frazil.commit.commit_queue import CommitTrigger
from frazil.commit.committer import Located, Progress
from frazil.commit.index_writer import IndexWriter
from frazil.commit.protocol import TableCommitter
from frazil.commit.recovery import Recovered
from frazil.commit.staging import Staging
from frazil.commit.startup import Startup
from frazil.commit.table_maintenance import TableMaintenance
from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import FrazilError, Unavailable
from frazil.kafka.planner import publish
from frazil.ledger.completeness import CompletenessTracker
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut, Partition
from frazil.sources.base import StreamState
from frazil.steps import COMMIT_FAILED, COMMIT_RETRIED, Step, WrittenFiles


class SinkCommitEvents:
    """The `CommitEvents` of a sink."""

    def __init__(
        self,
        config: Config,
        startup: Startup,
        stream: StreamState,
        left: Recovered,
        *,
        tracker: CompletenessTracker | None,
        ends: Callable[[], Cut],
        on_step: Callable[[Step], None],
    ) -> None:
        """`left`: what earlier runs left behind; `ends`: asks for the ends of the topics."""
        self._config = config
        self._kafka = config.kafka.resolved()
        self._interval = duration(config.sink.commit_interval)
        self._startup = startup
        self._tables = startup.tables
        self._on_step = on_step
        self.progress = Progress(position=left.position)
        self.staging = Staging(startup, stream)
        self.progress.maintenance_error = self.staging.remove([], left.useless)
        self.index_writer = IndexWriter(
            startup, stream, tracker, unindexed=left.unindexed, ends=ends
        )
        self.maintenance = TableMaintenance(
            config,
            startup,
            stream,
            position=lambda: self.progress.position,
            on_step=on_step,
        )
        self.progress.advice = self.maintenance.advice()
        startup.target.on_retry = self._retried
        #: tables whose columns another writer changed; the thread of the batches empties it
        self.changed: set[str] = set()

    def adapt(self, config: Config) -> None:
        """Take over the commit intervals, sizes and priorities of `config`."""
        self._tables.configs.adapt(config)
        self._interval = duration(config.sink.commit_interval)

    def table(self, name: str) -> TableCommitter:
        target = self._tables.target(name)
        target.on_retry = self._retried
        return target

    def trigger(self, name: str) -> CommitTrigger:
        return self._tables.configs.commit_trigger(name, self._interval)

    def recorded_tables(self) -> Mapping[str, str] | str:
        return self._startup.announced.recorded(self._startup.target.table)

    def index_manifests(self, located: Sequence[Located]) -> list[str]:
        return self.index_writer.manifests(located)

    def step(
        self, name: str, batches: Sequence[StagedBatch], table: str, seconds: float = 0.0
    ) -> None:
        self._on_step(
            Step(
                name,
                batches[-1].number,
                time.time(),
                seconds={"commit": seconds} if seconds else None,
                batches=len(batches),
                tables={table: files_of(batches, table)} if name == "committed" else {},
                event_times=event_times(batches) if name == "done" else {},
                table=table,
                commit_id=batches[-1].commit_id,
            )
        )

    def _retried(self, table: str, error: FrazilError) -> None:
        self._on_step(Step(COMMIT_RETRIED, -1, time.time(), table=table, error=error))

    def failed(self, table: str, error: FrazilError, seconds: float) -> None:
        spent = {"commit": seconds}
        self._on_step(Step(COMMIT_FAILED, -1, time.time(), seconds=spent, table=table, error=error))

    def indexed(self, batches: Sequence[StagedBatch]) -> None:
        self.index_writer.indexed(batches)

    def committed(self, batches: Sequence[StagedBatch]) -> None:
        if error := self.staging.remove(batches):
            self.progress.maintenance_error = error
        for staged in {table.name: table for batch in batches for table in batch.tables}.values():
            handle = self._tables[staged.name].target.table  # as the commit has seen it
            if handle.schema_id != staged.schema_id:
                self.changed.add(staged.name)
        if not self._kafka:
            return
        try:
            publish(self._kafka, self._config.group, batches[-1].end)
            self.progress.unpublished = ""
        except Unavailable as error:  # a courtesy to Kafka's lag tools; the position is the table's
            self.progress.unpublished = error.message

    def maintain(self) -> float | None:
        errors, again = self.maintenance.run()
        if errors or not self.staging.waiting:
            self.progress.maintenance_error = "; ".join(errors)
        return again


def files_of(batches: Sequence[StagedBatch], table: str) -> WrittenFiles:
    """The files of one table in batches that were committed together."""
    staged = [batch.table(table) for batch in batches]
    tallies = [tally for some in staged for tally in some.tallies]
    return WrittenFiles(
        sum(tally.written for tally in tallies),
        sum(some.files for some in staged),
        sum(some.bytes for some in staged),
        max((tally.watermark[1] for tally in tallies if tally.watermark), default=0),
    )


def event_times(batches: Sequence[StagedBatch]) -> dict[Partition, int]:
    """The highest event time of each partition, in microseconds."""
    newest: dict[Partition, int] = {}
    for batch in batches:
        tallies = batch.total or [tally for table in batch.tables for tally in table.tallies]
        for tally in tallies:
            if tally.watermark is not None:
                partition = tally.range.partition
                newest[partition] = max(newest.get(partition, 0), tally.watermark[1])
    return newest
