"""Until when is the stream complete? Pure: staged batches and rows of the index in, moments out.

A partition stands at the highest event time that its records have had. The stream stands where the
last of its partitions stands, less `lateness`: until then it is *complete*, as far as nobody sends
what is older. An hour is complete when the stream stands at its end or beyond.

    orders[0]  ────────────────────────────●  11:20
    orders[1]  ──────────────────●            10:50     complete until 10:50, with lateness 0s
    orders[2]  ────────────────────────────────●  11:31

Of the partitions that the position knows

- one without an event time holds everything back while it has offsets that were not read; one that
  was read to its end (an empty one, or one of nothing but skipped records) does not;
- one that brought no event time for `idle`, and was read to its end, does not;
- event times more than `ahead` in the future of the batch they came with are not believed: one
  broken clock would declare every hour complete, and that is never taken back.

Where rows do not say which partition they come from (an aggregation, a join, another source), the
batches themselves are the only partition there is.

The answer is written into the index with each batch, never lower than the one before: so it does
not go back when late records or new partitions come, nor when a life ends, nor when `lateness` is
raised. It says nothing of a batch that is not in all its tables and in the index.
"""

from __future__ import annotations

import functools
import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import polars as pl
import pyarrow as pa

from frazil.config.model import NEVER, CompletenessConfig, duration
from frazil.errors import ConfigError
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Partition

#: Everything here is counted in microseconds.
SECOND = 1_000_000
HOUR = 3600 * SECOND
#: What must be read of the index to know where the stream stands.
COLUMNS = (
    "table_name",
    "topic",
    "partition",
    "event_time_low",
    "event_time_high",
    "window_start",
    "committed_at",
    "complete_until",
)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0

_log = logging.getLogger("frazil")


@dataclass(frozen=True, slots=True)
class CompletenessRules:
    lateness: int = 0
    #: None: a partition always counts
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
    """Where a partition stands."""

    high: int
    #: when the last batch began that brought an event time of it
    since: int

    def __or__(self, other: CompletenessMark | None) -> CompletenessMark:
        if other is None:
            return self
        return CompletenessMark(max(self.high, other.high), max(self.since, other.since))


Marks = Mapping[Partition, CompletenessMark]


def believed(span: tuple[int, int], began: int, ahead: int) -> int | None:
    """The highest event time of a batch that counts. Of more than its bounds nothing is known: if
    the highest is not believed, there was at least one as high as the lowest."""
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
    """Until when all is there that lies below `cut`, with a batch that began then; None where that
    cannot be said.

    `ends`, where the topics end now, is asked only if it matters. A partition of which it says
    nothing is not known to be read to its end.
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
        # How long the batch took is no silence: what counts is how long before it the last news
        # was. If the partition ends there now, it brought nothing in between.
        elif rules.idle is None or began - mark.since < rules.idle or not at_its_end(partition):
            stands.append(mark.high)
    return min(stands) - rules.lateness if stands else None


class CompletenessTracker:
    """Where one life's stream stands, batch by batch.

    A batch is judged once: should its commit have to be tried again, the answer is the same. So a
    try that was applied, and whose answer was lost, has said nothing that the next one takes back.
    """

    def __init__(
        self,
        rules: CompletenessRules,
        apart: str = "",
        marks: Marks | None = None,
        until: int | None = None,
    ) -> None:
        """`apart`: the table of the dead letters, whose times are not those of events."""
        self._rules = rules
        self._apart = apart
        self._marks = dict(marks or {})
        self._until = until
        self._told: dict[str, int | None] = {}

    def tell(
        self,
        batches: Sequence[StagedBatch],
        ends: Callable[[], Mapping[Partition, int]],
        now: int,
    ) -> dict[str, int | None]:
        """Commit id → until when the stream is complete with that batch. They come in order."""
        asked = functools.cache(ends)
        for batch in batches:
            if batch.commit_id not in self._told:
                began = batch.window_start_ms * 1000 or now
                self._take(batch, began)
                found = complete(batch.end, self._marks, self._rules, asked, began)
                self._until = later(self._until, found)
                self._told[batch.commit_id] = self._until
        return {batch.commit_id: self._told[batch.commit_id] for batch in batches}

    def committed(self, batches: Sequence[StagedBatch]) -> int | None:
        """These are in the index: until when it is complete. They are not asked for again."""
        for batch in batches:
            found = self._told.pop(batch.commit_id, self._until)
        return found

    def _take(self, batch: StagedBatch, began: int) -> None:
        tallies = [*batch.total]
        tallies += [t for each in batch.tables if each.name != self._apart for t in each.tallies]
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
    """Is an hour complete that was not?"""
    return after is not None and (before is None or after // HOUR > before // HOUR)


def recalled(
    rows: pa.Table, rules: CompletenessRules, apart: str = ""
) -> tuple[dict[Partition, CompletenessMark], int | None]:
    """Where the partitions and the stream stand by the index's rows of one sink."""
    frame = pl.DataFrame(rows).lazy()
    low, high = (pl.col(f"event_time_{name}").dt.epoch("us") for name in ("low", "high"))
    began = pl.coalesce("window_start", "committed_at").dt.epoch("us")
    limit = began + rules.ahead
    counts = pl.when(high <= limit).then(high).when(low <= limit).then(low)  # as `believed`
    stands = (
        frame.filter(pl.col("table_name").cast(pl.String) != apart)
        .select("topic", "partition", high=counts, since=began)
        .filter(pl.col("high").is_not_null())
        .group_by("topic", "partition")
        .agg(pl.max("high"), pl.max("since"))
    )
    said = frame.select(pl.max("complete_until").dt.epoch("us"))
    known = "complete_until" in rows.column_names  # an index of an older Frazil has none
    return {
        Partition(topic, number): CompletenessMark(high, since)
        for topic, number, high, since in stands.collect().rows()
    }, said.collect().item() if known else None


# ── moments, as people write them ────────────────────────────────────────────────────────────────

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def moment(microseconds: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:  # a record may claim any time; no year below 1, none above 9999
        return (datetime.min if microseconds < 0 else datetime.max).replace(tzinfo=timezone.utc)


def shown(microseconds: int | None) -> str | None:
    """As ISO 8601; what lies beyond Python's years, as the number it is."""
    if microseconds is None:
        return None
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()
    except OverflowError:
        return f"{microseconds} µs since 1970"


def end_of(text: str) -> int:
    """Where an hour (`2026-11-15T10`) or a day (`2026-11-15`) ends, in UTC."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d))?Z?", text.strip())
    try:
        if found is None:
            raise ValueError
        begin = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc)
        begin += timedelta(hours=int(found[2] or 0))
        if int(found[2] or 0) > 23:
            raise ValueError
        end = begin + (timedelta(hours=1) if found[2] else timedelta(days=1))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"cannot read {text!r}: expected an hour, 2026-11-15T10, or a day, 2026-11-15, in UTC"
        ) from None
    return (end - _EPOCH) // timedelta(microseconds=1)


# ── the callback ─────────────────────────────────────────────────────────────────────────────────


class CompletenessCallback:
    """Tells a user's function of hours that became complete, on a thread of its own: however slow
    it is, and whatever it raises, commits go on. Where it raises it is called again, with growing
    pauses, until it does not; `trouble` says what it raised, and so does the log."""

    def __init__(self, call: Callable[[datetime], object]) -> None:
        self.trouble = ""
        self._call = call
        self._waiting: queue.Queue[int | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frazil-complete", daemon=True)
        self._thread.start()

    def tell(self, until: int) -> None:
        self._waiting.put(until)

    def close(self, timeout: float) -> bool:
        """No more will be told. Was everything told?"""
        self._waiting.put(None)
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.trouble

    def _run(self) -> None:
        while (until := self._waiting.get()) is not None:
            pause = FIRST_PAUSE
            while not self._told(until):
                if self._closing.wait(pause):
                    return  # the next life tells it again
                pause = min(LONGEST_PAUSE, pause * 2)

    def _told(self, until: int) -> bool:
        try:
            self._call(moment(until))
        except Exception as error:  # a user's function may raise anything
            self.trouble = (
                f"cannot tell that all is complete until {shown(until)}: on_complete "
                f"raised {type(error).__name__}: {error}"
            )
            _log.warning("%s; it is called again", self.trouble, exc_info=True)
            return False
        self.trouble = ""
        return True
