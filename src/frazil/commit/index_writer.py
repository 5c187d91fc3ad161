"""Rows of the offset index for committed batches, and until when the stream is complete.

Runs on the committer's thread, which owns all state here; `complete_until` is read by others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

import pyarrow as pa

from frazil.commit.committer import Located
from frazil.commit.completeness_callback import CompletenessCallback
from frazil.commit.startup import Startup
from frazil.commit.table_schemas import writer_spec
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.errors import FrazilError, SchemaMismatch, Unavailable
from frazil.files.writer import WriterSpec
from frazil.ledger import completeness, index
from frazil.ledger.completeness import CompletenessTracker
from frazil.ledger.sink_state import REPLAY
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut, Partition
from frazil.retry import Retry
from frazil.sources.base import StreamState


class IndexWriter:
    """`unindexed`: commits of tables that earlier runs left out of the index; they are written with
    the first batch. `ends`: asks for the current ends of the topics."""

    def __init__(
        self,
        startup: Startup,
        stream: StreamState,
        tracker: CompletenessTracker | None,
        *,
        unindexed: Sequence[Located],
        ends: Callable[[], Cut],
    ) -> None:
        self._startup = startup
        self._stream = stream
        self._tracker = tracker
        self._ends = ends
        self._unindexed = list(unindexed)
        self._unindexed_with = ""
        self._spec: WriterSpec | None = None
        self._complete_until = tracker.until if tracker else None
        self._callback: CompletenessCallback | None = None

    def manifests(self, located: Sequence[Located]) -> list[str]:
        """Write the rows of these batches. Returns the descriptors of the files."""
        table = self._startup.target.table
        if self._spec is None:
            self._spec = writer_spec(table, TableConfig(table.name))
        first = located[0][0].commit_id
        if self._unindexed_with not in ("", first):
            self._unindexed = []  # written with the batch before this one
        self._unindexed_with = first
        until = None
        if self._tracker is not None:
            now = int(time.time() * 1_000_000)
            until = self._tracker.tell([batch for batch, _ in located], self._known_ends, now)
        try:
            rows = [*self._unindexed, *located]
            return index.write(self._spec, self._stream.file_prefix, rows, until)
        except OSError as error:  # of the store
            raise Unavailable(f"cannot write to the index {table.name}: {error}") from None
        except pa.ArrowException as error:
            raise SchemaMismatch(f"cannot write to the index {table.name}: {error}") from None

    def _known_ends(self) -> Cut:
        """The current ends, if known: otherwise no partition counts as read to its end."""
        try:
            return self._ends()
        except FrazilError:
            return Cut()

    def indexed(self, batches: Sequence[StagedBatch]) -> None:
        """The batches are in the index, with the time until which the stream is complete."""
        self._unindexed = []
        if self._tracker is None:
            return
        before, now = self._complete_until, self._tracker.committed(batches)
        self._complete_until = now
        if self._callback is not None and now is not None and completeness.crossed(before, now):
            self._callback.tell(now)

    @property
    def complete_until(self) -> datetime | None:
        return None if self._complete_until is None else completeness.moment(self._complete_until)

    @property
    def event_times(self) -> dict[Partition, int]:
        """The highest event time of each partition, in microseconds."""
        return self._tracker.event_times if self._tracker else {}

    def call(
        self, on_complete: Callable[[datetime], object], failed: Callable[[str], None]
    ) -> None:
        """Call `on_complete` from now on: at once, since the previous run may have died before it
        did, and whenever another hour is complete. `failed` gets its error, and "" after it."""
        self._callback = CompletenessCallback(on_complete, failed)
        if self._complete_until is not None:
            self._callback.tell(self._complete_until)

    def close(self, timeout: float) -> None:
        if self._callback is not None:
            self._callback.close(timeout)


def completeness_tracker(
    config: Config, startup: Startup, retry: Retry
) -> CompletenessTracker | None:
    """Until when the stream is complete, and the marks of its partitions, from the index's rows.

    None for a replay of dead letters, which is no stream: its event times say nothing about later
    events.
    """
    rules = completeness.CompletenessRules.of(config.completeness)
    apart = config.dead_letters.table
    if config.sink.id.endswith(REPLAY):
        return None
    if startup.index.made:
        return CompletenessTracker(rules, apart)
    rows = retry(lambda: startup.index_rows(completeness.COLUMNS))
    marks, until = completeness.recalled(rows, rules, apart)
    return CompletenessTracker(rules, apart, marks, until)
