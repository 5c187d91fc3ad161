"""The health of one sink, as its own process sees it: facts from steps and ticks, and the verdict.

In: steps and ticks of a run, and the ends of its topics. Out: `SinkHealth.verdict`, and `values`,
which `/readyz`, the health file and the heartbeat show. Promised: no call asks a server, and no
value of a record is kept. Steps come on the threads of the batches and of the committer, ticks on
the thread that watches the run, ends on a thread that asks for them; readers are on any thread.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from frazil.commit.commit_queue import INDEX
from frazil.commit.committer import Progress
from frazil.config.model import Config
from frazil.config.secret_values import masked, secret_values
from frazil.config.sections import AUTO, AVAILABLE_NOW
from frazil.config.units import duration
from frazil.errors import TRY_AGAIN, ConfigError, Fatal, FrazilError
from frazil.monitoring.health_state import (
    CATCHING_UP,
    OK,
    WAITING,
    SinkFacts,
    StageLag,
    Verdict,
    Wait,
    judge,
)
from frazil.offsets import BATCHES, Cut, Partition
from frazil.run import Run
from frazil.steps import COMMIT_FAILED, Step

#: Version of `values`.
VERSION = 1
#: The rate is that of the commits of so many seconds.
_WINDOW = 300.0
#: Offsets are late after so many commit intervals, and at least so many seconds.
_INTERVALS, _LEAST = 3, 60.0
#: Ends that are remembered, to know how old an offset is; of more, every other one is forgotten.
_REMEMBERED = 128
#: A commit that takes longer than this is a wait.
_LONG_COMMIT = 60.0
#: A run without a tick for this long is dead. (Its end takes up to a minute.)
_STALLED = 120.0
_VERSION = version("frazil")


class SinkHealth:
    """`clock`: seconds since 1970."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self.sink = config.sink.id
        self.started_at = clock()
        self._late = late_after(config)
        self._secrets = secret_values(config)
        self._bounds = config.health
        self._clock = clock
        self._lock = threading.RLock()
        self._run: Run | None = None
        #: it is over, by this error or by a stop
        self._over: tuple[FrazilError | None] | None = None
        #: when, which table, and how something failed last
        self._failure: tuple[float, str, FrazilError] | None = None
        self._holdups = _Holdups(config.index_table)
        self._counts = _Counts()
        self._ends = _Ends()
        #: the state of the last verdict, and since when
        self._state = ("", self.started_at)
        #: when the thread that watches the run came by; of a start, when it began its last step
        self._ticked_at = self.started_at

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def started(self, run: Run) -> None:
        with self._lock:
            self._run = run
        self.tick(run)

    def tick(self, run: Run) -> None:
        with self._lock:
            self._ticked_at = self._clock()
            self._holdups.look(run.progress, self._ticked_at)

    def step(self, step: Step) -> None:
        with self._lock:
            if self._run is None:
                self._ticked_at = self._clock()
            self._holdups.step(step)
            self._counts.step(step)
            if step.name == COMMIT_FAILED and step.error is not None:
                self._failure = (step.at, step.table, step.error)

    def ended(self, error: FrazilError | None) -> None:
        with self._lock:
            self._over = (error,)
            if error is not None:
                self._failure = (self._clock(), "", error)

    def saw_ends(self, ends: Cut) -> None:
        """The ends of the topics now."""
        with self._lock:
            self._holdups.unreachable = None
            self._ends.saw(ends, self._clock())

    def saw_no_ends(self, error: FrazilError) -> None:
        """Kafka does not tell the ends of the topics."""
        with self._lock:
            since, _ = self._holdups.unreachable or (self._clock(), error)
            self._holdups.unreachable = since, error

    # ── what follows ─────────────────────────────────────────────────────────────────────────

    @property
    def over(self) -> bool:
        return self._over is not None

    def facts(self) -> SinkFacts:
        with self._lock:
            lag = self.lag()
            return SinkFacts(
                running=self._run is not None,
                ended=self.over,
                error=self._over[0] if self._over else None,
                waits=[] if self.over else [*self._waits()],
                lag=lag,
                late=self._late,
                reached=self._ends.reached or self._ends.last() is None,
                rate=self.rate(),
            )

    def _waits(self) -> Iterator[Wait]:
        if self._start_hangs():
            since = self._ticked_at
            yield Wait(
                "the start",
                f"no progress for {self._clock() - since:,.0f} s",
                since,
                operator=True,
                remedy="see whether catalog, brokers and Spark answer (frazil check CONFIG); then "
                "end the process and start it again",
            )
        yield from self._holdups.waits(self._clock())

    def _start_hangs(self) -> bool:
        return self._run is None and self._clock() - self._ticked_at > duration(
            self._bounds.max_start
        )

    def verdict(self) -> Verdict:
        with self._lock:
            verdict = judge(self.facts())
            if verdict.state != self._state[0]:
                self._state = verdict.state, self._clock()
            return verdict

    def since(self) -> float:
        """Since when the verdict has its state."""
        return self._state[1]

    def alive(self) -> bool:
        """Does the stream go on, or wait for something that is tried again? A run that ended with
        an error that goes away is started again, or its process ends."""
        if self._over is not None:
            error = self._over[0]
            return error is not None and error.exit_code in (TRY_AGAIN, FrazilError.exit_code)
        if self._run is None:
            return not self._start_hangs()
        return self._clock() - self._ticked_at <= _STALLED

    def ready(self) -> bool:
        """Has it claimed its tables, and has it not waited for longer than `max_wait`?"""
        with self._lock:
            verdict = self.verdict()
            if verdict.state == WAITING:
                waited = self._clock() - self.since()
                return (
                    self._run is not None
                    and not verdict.operator
                    and waited <= duration(self._bounds.max_wait)
                )
            return verdict.state in (OK, CATCHING_UP) and self.alive()

    def rate(self) -> float:
        """Committed rows per second, of the last minutes."""
        return self._counts.rate(self._clock(), self.started_at)

    def lag(self) -> StageLag | None:
        """Offsets that are not committed, by stage."""
        with self._lock:
            if self._run is None:
                return None
            position, staged = self._run.position, self._run.staged
            between = _between(position, staged)
            catalog = between if self._holdups.stuck else 0
            ends = self._ends.last()
            if ends is None:
                return StageLag(None, self._counts.writing, between - catalog, catalog)
            beyond = _between(staged, ends)
            writing = min(self._counts.writing, beyond)
            age = self._ends.age(position, self._clock())
            return StageLag(beyond - writing, writing, between - catalog, catalog, age)

    def values(self) -> dict[str, Any]:
        """The verdict and what it rests on, as JSON values. The keys are documented."""
        with self._lock:
            verdict, counts = self.verdict(), self._counts
            values = {
                "version": VERSION,
                "sink": self.sink,
                "state": verdict.state,
                "verdict": verdict.text,
                "reason": verdict.reason,
                "remedy": verdict.remedy,
                "error": verdict.error_values,
                "operator": verdict.operator,
                "state_changed_at": moment(self.since()),
                "epoch": self._run.epoch if self._run else None,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "frazil": _VERSION,
                "started_at": moment(self.started_at),
                "written_at": moment(self._clock()),
                "rate": round(self.rate(), 1),
                "rows": counts.rows,
                "lag": lag_values(self.lag()),
                "rejected": dict(counts.rejected),
                "last_rejected": _rejection(counts.last_rejected),
                "last_commit_at": moment(counts.last_commit) if counts.last_commit else None,
                "last_failure": _failure(self._failure),
                "maintenance": self._run.progress.maintenance_error if self._run else "",
            }
        return dict(masked(values, self._secrets))


class _Holdups:
    """What holds the sink up at present."""

    def __init__(self, index: str) -> None:
        self._index = index
        #: table → since when, and why, its commits fail; its last error
        self.stuck: dict[str, tuple[float, str]] = {}
        self._errors: dict[str, FrazilError] = {}
        #: table → when its commit began
        self._committing: dict[str, float] = {}
        self._blocked: tuple[float, str] | None = None
        #: since when, and why, Kafka does not tell the ends of the topics
        self.unreachable: tuple[float, FrazilError] | None = None

    def look(self, progress: Progress, now: float) -> None:
        failing = {
            self._index if name == INDEX else name: why
            for name, why in list(progress.stuck.items())
        }
        self.stuck = {
            name: (self.stuck.get(name, (now, ""))[0], why) for name, why in failing.items()
        }
        blocked = progress.blocked
        self._blocked = ((self._blocked or (now, ""))[0], blocked) if blocked else None

    def step(self, step: Step) -> None:
        if step.name in ("commit", "index-commit"):
            self._committing[step.table] = step.at
        elif step.name in ("committed", "index-committed"):
            self._committing.pop(step.table, None)
        elif step.name == COMMIT_FAILED and step.error is not None:
            self._committing.pop(step.table, None)
            self._errors[step.table] = step.error

    def waits(self, now: float) -> Iterator[Wait]:
        for name, (since, why) in self.stuck.items():
            error = self._errors.get(name)
            operator = isinstance(error, (Fatal, ConfigError))
            reason = error.log_text if error else why
            yield Wait(f"table {name}", reason, since, error, operator)
        for name, since in self._committing.items():
            if now - since > _LONG_COMMIT and name not in self.stuck:
                reason = f"its commit has taken {now - since:,.0f} s so far"
                yield Wait(f"table {name}", reason, since)
        if self._blocked:
            yield Wait("the stream", self._blocked[1], self._blocked[0])
        if self.unreachable:
            since, error = self.unreachable
            yield Wait("Kafka", error.log_text, since, error)


class _Counts:
    """What the run has done so far."""

    def __init__(self) -> None:
        #: offsets of the batch under way
        self.writing = 0
        #: batch → rows
        self._written: dict[int, int] = {}
        self.rows = 0
        #: when rows were committed, and how many, of the last minutes
        self._commits: deque[tuple[float, int]] = deque()
        self.last_commit = 0.0
        self.rejected = Counter[str]()
        #: when, kind, and topic, partition and offset
        self.last_rejected: tuple[float, str, str] | None = None

    def step(self, step: Step) -> None:
        if step.name == "planned":
            self.writing = step.records
        elif step.name == "staged":
            self.writing = 0
        elif step.name == "written":
            self._written[step.batch] = step.records
            for kind, (count, last) in step.rejected.items():
                self.rejected[kind] += count
                self.last_rejected = (step.at, kind, place_of(last))
        elif step.name == "done":
            done = [number for number in self._written if number <= step.batch]
            rows = sum(self._written.pop(number) for number in done)
            self.rows += rows
            self.last_commit = step.at
            self._commits.append((step.at, rows))
            while self._commits[0][0] < step.at - _WINDOW:
                self._commits.popleft()

    def rate(self, now: float, began: float) -> float:
        recent = sum(rows for at, rows in self._commits if at >= now - _WINDOW)
        return recent / max(1.0, min(_WINDOW, now - began))


class _Ends:
    """The ends of the topics, as they were seen from time to time."""

    def __init__(self) -> None:
        #: has the sink reached the end that the topics had when it started?
        self.reached = False
        self._last: tuple[float, Cut] | None = None
        #: those that the position has not reached, oldest first, at least `_spacing` seconds apart
        self._seen: deque[tuple[float, Cut]] = deque()
        self._spacing = 0.0

    def saw(self, ends: Cut, now: float) -> None:
        self._last = now, ends
        if not self._seen or now - self._seen[-1][0] >= self._spacing:
            self._seen.append(self._last)
        if len(self._seen) > _REMEMBERED:
            self._spacing = (now - self._seen[0][0]) * 2 / _REMEMBERED
            self._seen = deque(list(self._seen)[::2])

    def last(self) -> Cut | None:
        return self._last[1] if self._last else None

    def age(self, position: Cut, now: float) -> float:
        """Seconds since an end was seen that the position does not reach."""
        while self._seen and _reaches(position, self._seen[0][1]):
            self.reached = True
            self._seen.popleft()
        if self._seen:
            return now - self._seen[0][0]
        self._spacing = 0.0
        if self._last is None or _reaches(position, self._last[1]):
            return 0.0
        self._seen.append(self._last)
        return now - self._last[0]


def late_after(config: Config) -> float:
    """Seconds after which offsets that are not committed are late."""
    trigger = config.sink.trigger
    own = 0.0 if trigger in (AUTO, AVAILABLE_NOW) else duration(trigger)
    return max(_LEAST, _INTERVALS * max(own, duration(config.sink.commit_interval)))


def place_of(text: str) -> str:
    """Topic, partition and offset of `orders[0] offset 5: reason`."""
    return text.partition(": ")[0]


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def lag_values(lag: StageLag | None) -> dict[str, Any] | None:
    if lag is None:
        return None
    seconds = None if lag.seconds is None else round(lag.seconds, 1)
    return {
        "kafka": lag.kafka,
        "writing": lag.writing,
        "staged": lag.staged,
        "catalog": lag.catalog,
        "seconds": seconds,
    }


def _rejection(last: tuple[float, str, str] | None) -> dict[str, Any] | None:
    return {"rejected_at": moment(last[0]), "kind": last[1], "location": last[2]} if last else None


def _failure(last: tuple[float, str, FrazilError] | None) -> dict[str, Any] | None:
    if last is None:
        return None
    at, table, error = last
    values = {"class": type(error).__name__, "message": error.log_text, "hint": error.hint}
    return {"failed_at": moment(at), "table": table, "error": values}


def _offsets(cut: Mapping[Partition, int]) -> dict[Partition, int]:
    return {partition: offset for partition, offset in cut.items() if partition != BATCHES}


def _between(start: Mapping[Partition, int], end: Mapping[Partition, int]) -> int:
    """Offsets from one cut to the other; partitions that the first lacks are not counted: where
    they begin is not known yet."""
    return sum(
        max(0, offset - start[partition])
        for partition, offset in _offsets(end).items()
        if partition in start
    )


def _reaches(position: Mapping[Partition, int], ends: Mapping[Partition, int]) -> bool:
    return all(position.get(p, 0) >= offset for p, offset in _offsets(ends).items())
