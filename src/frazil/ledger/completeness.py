"""Until when is the stream complete? Pure: staged batches and index rows in, timestamps out.

A partition's mark is the highest event time of its records. The stream is *complete* until the
lowest mark of its partitions less `lateness`, unless a producer sends older records later. An hour
is complete when the stream is complete until its end or beyond.

    orders[0]  ────────────────────────────●  11:20
    orders[1]  ──────────────────●            10:50     complete until 10:50, with lateness 0s
    orders[2]  ────────────────────────────────●  11:31

For the partitions in the position:

- a partition without an event time holds the stream back while it has unread offsets, but not if it
  was read to its end (an empty partition, or one with only skipped records);
- a partition that was read to its end and had no event time for `idle` does not hold it back;
- event times more than `ahead` after the start of their batch are ignored: one wrong clock would
  declare every hour complete, and that is never revoked.

If rows have no partition (from an aggregation, a join, another source), the batches themselves are
the only partition.

The result is written to the index with each batch and never decreases: not when late records or new
partitions arrive, not after a restart, not when `lateness` is raised. It covers only batches that
are in all their tables and in the index.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import polars as pl
import pyarrow as pa

from frazil.config.sections import NEVER, CompletenessConfig
from frazil.config.units import duration
from frazil.errors import ConfigError
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Partition

#: All times are in microseconds.
SECOND = 1_000_000
HOUR = 3600 * SECOND
#: Index columns needed to restore the marks.
COLUMNS = (
    "table_name",
    "topic",
    "partition",
    "event_time_low",
    "event_time_high",
    "started_at",
    "committed_at",
    "complete_until",
)


@dataclass(frozen=True, slots=True)
class CompletenessRules:
    lateness: int = 0
    #: None: no partition is ever idle
    idle: int | None = None
    ahead: int = HOUR

    @staticmethod
    def of(config: CompletenessConfig) -> CompletenessRules:
        def of_text(text: str) -> int:
            return round(duration(text) * SECOND)

        idle = None if config.idle_timeout == NEVER else of_text(config.idle_timeout)
        return CompletenessRules(of_text(config.allowed_lateness), idle, of_text(config.max_future))


@dataclass(frozen=True, slots=True)
class CompletenessMark:
    """The highest event time of a partition."""

    high: int
    #: start of the last batch that had an event time for it
    since: int

    def __or__(self, other: CompletenessMark | None) -> CompletenessMark:
        if other is None:
            return self
        return CompletenessMark(max(self.high, other.high), max(self.since, other.since))


Marks = Mapping[Partition, CompletenessMark]


def believed(span: tuple[int, int], began: int, ahead: int) -> int | None:
    """The highest plausible event time of a batch. Only its bounds are known: if the highest is too
    far in the future, the lowest is used, because at least one record has it."""
    low, high = span
    if high <= began + ahead:
        return high
    return low if low <= began + ahead else None


def complete(
    cut: Cut,
    marks: Marks,
    rules: CompletenessRules,
    ends: Callable[[], Mapping[Partition, int]],
    began: int,
) -> int | None:
    """Until when the stream is complete at `cut`, for a batch that started at `began`; None if that
    is unknown.

    `ends`, the current end offsets, is called only if needed. A partition missing from it does not
    count as read to its end.
    """
    judged = [p for p in cut.current if p != BATCHES]
    if BATCHES in cut and not any(p in marks for p in judged):
        judged = [BATCHES]

    def at_its_end(partition: Partition) -> bool:
        end = ends().get(partition)
        return partition == BATCHES or (end is not None and end <= cut[partition])

    stands = []
    for partition in judged:
        mark = marks.get(partition)
        if mark is None:
            if partition == BATCHES or not at_its_end(partition):
                return None
        # Idle time ends at the start of the batch, so the batch's duration does not count. If
        # the partition still ends here, it received nothing in between.
        elif rules.idle is None or began - mark.since < rules.idle or not at_its_end(partition):
            stands.append(mark.high)
    return min(stands) - rules.lateness if stands else None


class CompletenessTracker:
    """Completeness of one run's stream, batch by batch.

    The result for a batch is computed once and reused when its commit is retried. So a retry cannot
    contradict an attempt that was applied but whose response was lost.
    """

    def __init__(
        self,
        rules: CompletenessRules,
        apart: str = "",
        marks: Marks | None = None,
        until: int | None = None,
    ) -> None:
        """`apart`: the dead-letter table, whose timestamps are not event times."""
        self._rules = rules
        self._apart = apart
        self._marks = dict(marks or {})
        self._until = until
        self._results: dict[str, int | None] = {}

    @property
    def until(self) -> int | None:
        return self._until

    @property
    def event_times(self) -> dict[Partition, int]:
        """The highest event time of each partition; of other runs, as the index has it."""
        return {partition: mark.high for partition, mark in list(self._marks.items())}

    def tell(
        self,
        batches: Sequence[StagedBatch],
        ends: Callable[[], Mapping[Partition, int]],
        now: int,
    ) -> dict[str, int | None]:
        """Commit id → until when the stream is complete with that batch. Batches come in order."""
        asked = functools.cache(ends)
        for batch in batches:
            if batch.commit_id not in self._results:
                began = batch.window_start_ms * 1000 or now
                self._add_marks(batch, began)
                until = complete(batch.end, self._marks, self._rules, asked, began)
                self._until = later(self._until, until)
                self._results[batch.commit_id] = self._until
        return {batch.commit_id: self._results[batch.commit_id] for batch in batches}

    def committed(self, batches: Sequence[StagedBatch]) -> int | None:
        """Until when the stream is complete, now that the index has these batches. Forgets them."""
        for batch in batches:
            until = self._results.pop(batch.commit_id, self._until)
        return until

    def _add_marks(self, batch: StagedBatch, began: int) -> None:
        tallies = [*batch.total]
        tallies += [t for table in batch.tables if table.name != self._apart for t in table.tallies]
        for tally in tallies:
            if tally.watermark is None:
                continue
            high = believed(tally.watermark, began, self._rules.ahead)
            if high is not None:
                partition = tally.range.partition
                self._marks[partition] = CompletenessMark(high, began) | self._marks.get(partition)


def later(before: int | None, after: int | None) -> int | None:
    return after if before is None else before if after is None else max(before, after)


def crossed(before: int | None, after: int | None) -> bool:
    """Did another hour become complete?"""
    return after is not None and (before is None or after // HOUR > before // HOUR)


def recalled(
    rows: pa.Table, rules: CompletenessRules, apart: str = ""
) -> tuple[dict[Partition, CompletenessMark], int | None]:
    """The marks and the completeness of one sink, from its index rows."""
    frame = pl.DataFrame(rows).lazy()
    low, high = (pl.col(f"event_time_{name}").dt.epoch("us") for name in ("low", "high"))
    began = pl.coalesce("started_at", "committed_at").dt.epoch("us")
    limit = began + rules.ahead
    counts = pl.when(high <= limit).then(high).when(low <= limit).then(low)  # as `believed`
    stands = (
        frame.filter(pl.col("table_name").cast(pl.String) != apart)
        .select("topic", "partition", high=counts, since=began)
        .filter(pl.col("high").is_not_null())
        .group_by("topic", "partition")
        .agg(pl.max("high"), pl.max("since"))
    )
    until = frame.select(pl.max("complete_until").dt.epoch("us"))
    known = "complete_until" in rows.column_names  # a column that was dropped
    return {
        Partition(topic, number): CompletenessMark(high, since)
        for topic, number, high, since in stands.collect().rows()
    }, until.collect().item() if known else None


# ── timestamps as text ───────────────────────────────────────────────────────────────────────────

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def moment(microseconds: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:  # a record may have any time; Python has years 1 to 9999
        return (datetime.min if microseconds < 0 else datetime.max).replace(tzinfo=timezone.utc)


class Timestamp(int):
    """Microseconds since 1970; as text and in JSON ISO 8601, outside Python's years a number."""

    JSON = "=text"

    @staticmethod
    def of(microseconds: int | None) -> Timestamp | None:
        return None if microseconds is None else Timestamp(microseconds)

    def __str__(self) -> str:
        try:
            return (_EPOCH + timedelta(microseconds=self)).isoformat()
        except OverflowError:
            return f"{int(self)} µs since 1970"

    text = property(__str__)


def end_of(text: str) -> int:
    """The end of an hour (`2026-11-15T10`) or a day (`2026-11-15`), in UTC."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d))?Z?", text.strip())
    try:
        if match is None:
            raise ValueError
        begin = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc)
        begin += timedelta(hours=int(match[2] or 0))
        if int(match[2] or 0) > 23:
            raise ValueError
        end = begin + (timedelta(hours=1) if match[2] else timedelta(days=1))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"cannot read {text!r}: expected an hour, 2026-11-15T10, or a day, 2026-11-15, in UTC"
        ) from None
    return (end - _EPOCH) // timedelta(microseconds=1)
