"""A running sink: how far it is, waiting for it, and its end.

Any thread of the caller may use a `Run`. The batches run on Spark's thread (`frazil.sink`), commits
on the committer's; `BatchGate` keeps the end of the run and its batches apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from frazil.commit.commit_queue import BackpressureLimits
from frazil.commit.committer import Committer, Progress
from frazil.commit.events import SinkCommitEvents
from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError, PythonWorkerUnavailable, Unavailable, counted
from frazil.kafka.range_source import BatchGathering
from frazil.offsets import Cut, Partition
from frazil.sources.base import BatchSource, StreamState
from frazil.spark.foreach_batch import BatchGate
from frazil.spark.query import Running, translated

_CALL_SECONDS = 10.0  # for a callback under way when the sink stops

#: Runs of this process: one sink, one stream.
_runs: dict[tuple[str, str, str], Run] = {}


def _identity(config: Config) -> tuple[str, str, str]:
    return config.catalog.name, config.index_table, config.sink.id


def refuse_a_second_run(config: Config) -> None:
    """Raises where this process runs the sink already."""
    run = _runs.get(_identity(config))
    if run is not None and run.active:
        raise ConfigError(
            f"cannot start sink {config.sink.id}: this process already runs a sink with this id",
            hint="stop the other one first, or use another sink id",
        )


def not_committed(committer: Committer) -> FrazilError:
    """Why a run ends with batches that are staged and not committed."""
    waiting = counted(len(committer.pending), "batch", "batches")
    return Unavailable(
        f"cannot end the run: {waiting} staged and not committed: "
        f"{committer.progress.trouble or 'the timeout has passed'}",
        hint="nothing is lost: the next run commits them",
    )


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run shares with its sink."""

    stream: StreamState
    gate: BatchGate
    gathering: BatchGathering
    events: SinkCommitEvents


class Run(StreamingQuery):
    """Spark's own handle, except that its end means: everything is committed.

    As a context manager it stops the sink at the end of the block.
    """

    def __init__(
        self,
        config: Config,
        running: Running,
        committer: Committer,
        source: BatchSource[Any],
        *,
        parts: RunParts,
        ends_by_itself: bool,
        ends: Cut | None,
    ) -> None:
        """`ends_by_itself`: the trigger is available-now. `ends`: the run stops itself there."""
        self.committer = committer
        self._running = running
        self._source = source
        self._parts = parts
        self._ends_by_itself = ends_by_itself
        self._ending = threading.Lock()
        self._stopped = False
        self._beaten = False
        _runs[_identity(config)] = self
        if ends is not None:
            threading.Thread(
                target=self._end_at, args=(ends,), name="frazil-available-now", daemon=True
            ).start()

    # ── how far it is ────────────────────────────────────────────────────────────────────────

    @property
    def epoch(self) -> int:
        return self._parts.stream.epoch

    @property
    def position(self) -> Cut:
        """Everything below it is committed, in the tables and in the index."""
        return self.committer.progress.position

    @property
    def staged(self) -> Cut:
        """Everything below it is committed, or staged and durable."""
        return self._parts.stream.position.cut

    @property
    def complete_until(self) -> datetime | None:
        """Every event before it is committed, unless one is later than `[completeness]` allows;
        None where nothing is known yet."""
        return self._parts.events.index_writer.complete_until

    @property
    def event_times(self) -> Mapping[Partition, int]:
        """The highest event time of each partition that this run and those before it staged, in
        microseconds."""
        return self._parts.events.index_writer.event_times

    @property
    def progress(self) -> Progress:
        """Commits so far, what holds them up, and advice."""
        return self.committer.progress

    def beat(self, content: bytes) -> None:
        """Write the heartbeat of this run where the sink stages, so that others see that it runs.
        Of earlier runs only the heartbeat of the last one stays. Any thread may call it."""
        staging = self._parts.events.staging
        staging.beat(content)
        if not self._beaten:
            staging.forget_heartbeats()
            self._beaten = True

    def ends(self) -> Cut:
        """The current end of the topics."""
        return self._source.ends()

    @property
    def active(self) -> bool:
        return self._running.active and not self._parts.gate.closed

    def check(self) -> None:
        """Raise the error that stopped the stream, if one did."""
        if self.committer.failure is not None:
            raise self.committer.failure
        if (error := self._running.failure) is not None:
            raise error
        if not self._running.active and (self._stopped or not self._ends_by_itself):
            raise FrazilError("cannot continue: the stream was stopped")

    # ── waiting ──────────────────────────────────────────────────────────────────────────────

    def wait_until_caught_up(self, timeout: float | None = None) -> bool:
        """Block until every record that is in the topics now is committed; False when the time is
        up. Raises the error that stopped the stream."""
        return self.wait_until(self.ends(), timeout)

    def wait_until(
        self,
        cut: Mapping[Partition, int] | Mapping[str, Mapping[int, int]],
        timeout: float | None = None,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Block until every offset below `cut` is committed, `{"orders": {0: 5000}}`; False when
        the time is up, or when `unless`, called every now and then, returns true.

        Raises the error that stopped the stream.
        """
        nested = any(isinstance(offsets, Mapping) for offsets in cut.values())
        wanted = Cut.of(cut) if nested else cut  # type: ignore[arg-type]
        with self._parts.gathering.hurried():
            return self._wait_until(wanted, timeout, unless)  # type: ignore[arg-type]

    def _wait_until(
        self, cut: Mapping[Partition, int], timeout: float | None, unless: Callable[[], bool]
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.committer.wait_until(cut, 0.25):
            if unless():
                return False
            self.check()
            if not self.active and not self.committer.pending:
                return False  # available-now, and its end lies before the cut
            staged = self._parts.stream.position.cut
            if staged.reaches(cut):
                done = self.committer.flush(0.25)
                if timeout is None and not done and (stalled := self.committer.stalled()):
                    raise stalled  # nothing else would report it
            elif staged.after(self._source.carried()).reaches(cut):
                return True  # nothing but invisible offsets: there is nothing to commit
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    # ── Spark's own interface ────────────────────────────────────────────────────────────────

    @property
    def _jsq(self) -> Any:
        return self._running.query._jsq

    @property
    def isActive(self) -> bool:
        return self._running.active

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Until the stream has ended and its staged batches are committed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended():
            if self.committer.failure is not None:
                raise self.committer.failure
            if deadline is not None and time.monotonic() > deadline:
                return False
        self.stop()
        if self.committer.failure is not None:
            raise self.committer.failure
        if self.committer.pending:
            raise not_committed(self.committer)
        return None if timeout is None else True

    def _ended(self) -> bool | None:
        try:
            return super().awaitTermination(0.25)  # type: ignore[arg-type]
        except PySparkException as error:
            return self._restarts(error)

    def processAllAvailable(self) -> None:
        """Until everything available now is committed."""
        with self._parts.gathering.hurried():
            done = 0
            while done < 2:  # the first may rest on a plan from before the hurry
                try:
                    super().processAllAvailable()
                    done += 1
                except PySparkException as error:
                    self._restarts(error)
        if not self.committer.flush():
            raise self.committer.stalled() or Unavailable("cannot commit all staged batches")

    def _restarts(self, error: PySparkException) -> bool:
        """False, after a pause, where a query that ended with `error` is restarted; else raises."""
        reason = translated(error)
        failure = self._running.failure
        if failure is not None or not isinstance(reason, PythonWorkerUnavailable):
            raise failure or reason from None
        time.sleep(0.05)
        return False

    def adapt(self, config: Config) -> None:
        """Take over what can change while it runs: commit intervals, sizes and priorities, and the
        bounds of staged batches. Everything else of `config` must be as it was."""
        self._parts.events.adapt(config)
        self.committer.adapt(BackpressureLimits.of(config.sink))
        self._parts.gathering.adapt(config.gather)

    # ── its end ──────────────────────────────────────────────────────────────────────────────

    def stop(self, timeout: float = 60.0) -> None:
        """After the batch in progress; staged batches are committed, or wait for the next run."""
        with self._ending:  # a second caller waits for the first
            if self._stopped:
                return
            self._stopped = True
            self.committer.hurry()
            self._parts.gate.close()
            self._running.stop()  # not behind the gate: it waits for a batch that may wait for it
            try:
                if self.committer.failure is None:
                    self.committer.flush(timeout)
            finally:
                self.committer.close()
                self._source.close()
                self._parts.gathering.close()
                self._parts.events.index_writer.close(min(timeout, _CALL_SECONDS))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end_at(self, ends: Cut) -> None:
        """Stop like Spark's own trigger: behind everything up to `ends`, and behind the batch
        without data that closes the windows which the last records allow to close."""
        try:
            self.wait_until(ends)
            batch = self._parts.stream.number
            while (
                self._source.stateful
                and self._parts.stream.number == batch
                and self._running.active
            ):
                status = self._running.query.status
                if not status["isTriggerActive"] and not status["isDataAvailable"]:
                    break
                time.sleep(0.05)
            self.stop()
        except FrazilError:
            if self.committer.failure is None:
                self.stop()  # a table waits for an operator: end the query
