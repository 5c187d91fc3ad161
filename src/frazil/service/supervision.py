"""What one sink of a service does next: start, go on, take over a change, try again, or stop.

In: definitions, and what became of the runs. Out: actions, and the state that `frazil run` and
health tell. A state machine without threads and without Spark: `service.sink_thread` carries out
what it says.

    starting ──▶ running ──▶ ended                     everything that was there is committed
       ▲  ▲         │
       │  └─ retry ◀┤ a server does not answer, or what is not known; longer and longer pauses
       │            ├▶ failed    a person must look; the other sinks go on
       │            ├▶ fenced    a newer run of the sink has taken over
       └─ a change ◀┴▶ stopped   by its definition, its removal, or the end of the service

A sink that failed, was fenced or has ended starts again when its definition changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from frazil.errors import CommitStateUnknown, ConfigError, Fatal, Fenced, FrazilError, Retryable
from frazil.service.changes import (
    ELSEWHERE,
    LEFT_BEHIND,
    LIVE,
    OUTSIDE,
    PROCESS,
    REFUSED,
    RESTART,
    changes,
)
from frazil.service.definitions import Definition

#: Seconds before a sink is started again: the first pause, doubled after each failure.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: After so many failures in a row that Frazil does not know, a person must look.
UNKNOWN_FAILURES = 5


class State(str, Enum):
    STARTING = "starting"
    RUNNING = "running"
    RETRYING = "retrying"
    ENDED = "ended"
    STOPPED = "stopped"
    FAILED = "failed"
    FENCED = "fenced"


#: Nothing happens to these unless a person does something.
FINAL = frozenset([State.ENDED, State.FAILED, State.FENCED])


@dataclass(frozen=True, slots=True)
class Start:
    definition: Definition


@dataclass(frozen=True, slots=True)
class Watch:
    """Until there is an order, or the run ends."""


@dataclass(frozen=True, slots=True)
class Adapt:
    definition: Definition


@dataclass(frozen=True, slots=True)
class Restart:
    """Check the definition; where it is well, stop."""

    definition: Definition


@dataclass(frozen=True, slots=True)
class Stop:
    """After the batch in progress."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Until there is an order, or the time is up."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The sink is no longer one of the service."""


Action = Start | Watch | Adapt | Restart | Stop | Sleep | End


class WallClock(Protocol):
    def time(self) -> float: ...
    def monotonic(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """A sink of a service, as it is now."""

    sink: str
    #: where it is defined: `orders.toml`
    origin: str
    state: str
    #: seconds since 1970 at which the state began
    since: float
    #: runs that ended and were followed by another
    restarts: int
    #: what ended the last run, or keeps the sink from running
    error: FrazilError | None
    #: why the newest definition is not in effect; the sink goes on by the one before
    refused: str


class Supervision:
    """Not thread-safe. `say` gets a line for every decision."""

    def __init__(
        self, definition: Definition, say: Callable[[str], None], clock: WallClock = time
    ) -> None:
        self.definition = definition
        self.state = State.STARTING
        self.error: FrazilError | None = None
        self.refused = ""
        self.restarts = 0
        self._wanted = definition
        self._say = say
        self._clock = clock
        self._since = clock.time()
        self._live = False
        self._leaving = ""
        #: the definition of the run before a change, until a run by the changed one has begun
        self._former: Definition | None = None
        self._failures = 0
        self._started_at = self._retry_at = 0.0

    @property
    def status(self) -> SinkStatus:
        return SinkStatus(
            self.definition.sink,
            self.definition.origin,
            self.state.value,
            self._since,
            self.restarts,
            self.error,
            self.refused,
        )

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    @property
    def leaving(self) -> bool:
        return bool(self._leaving)

    @property
    def live(self) -> bool:
        """Is there a run that has started?"""
        return self._live

    def define(self, definition: Definition) -> None:
        self._wanted = definition

    def leave(self, reason: str) -> None:
        """Stop, and do not start again."""
        self._leaving = self._leaving or reason

    @property
    def ordered(self) -> bool:
        """Is there an order that a run in progress does not know?"""
        return bool(self._leaving) or self._wanted is not self.definition

    # ── what to do ───────────────────────────────────────────────────────────────────────────

    def next(self) -> Action:
        if self._live:
            return self._next_of_a_run()
        if self._leaving:
            if self.state not in FINAL:
                self._enter(State.STOPPED)
            return End()
        if self._wanted is not self.definition:
            self.definition, self._former = self._wanted, None
            self._failures, self.refused = 0, ""
            self._enter(State.STARTING)
        if not self.definition.running:
            self._enter(State.STOPPED)
        elif self.state is State.STOPPED:
            self._enter(State.STARTING)
        if self.state is State.RETRYING:
            pause = self._retry_at - self._clock.monotonic()
            if pause > 0:
                return Sleep(pause)
            self._enter(State.STARTING)
        return Start(self.definition) if self.state is State.STARTING else Sleep()

    def _next_of_a_run(self) -> Action:
        if self._leaving:
            self._say(f"stopping: {self._leaving}")
            return Stop()
        wanted, now = self._wanted, self.definition
        if wanted is now:
            return Watch()
        if not wanted.running:
            self._say(f"stopping: {wanted.origin} stops it")
            return Stop()
        different = changes(now.config, wanted.config)
        if left := different.of(REFUSED):
            self.refuse(f"{left} changed, and {LEFT_BEHIND}", hint=ELSEWHERE)
        elif reasons := different.of(RESTART):
            self._say(f"restarting: {reasons} changed")
            return Restart(wanted)
        else:
            self.definition, self.refused = wanted, ""
            if live := different.of(LIVE):
                self._say(f"{live} changed: in effect now")
                return Adapt(wanted)
            if outside := different.of(OUTSIDE):
                self._say(f"{outside} changed: {PROCESS}")
            if wanted.origin != now.origin:
                self._say(f"defined by {wanted.origin} now")
        return Watch()

    # ── what became of it ────────────────────────────────────────────────────────────────────

    def started(self) -> None:
        self._live, self._former, self.error = True, None, None
        self._started_at = self._clock.monotonic()
        self._enter(State.RUNNING)

    def ended(self) -> None:
        """By itself: everything that was there is committed."""
        self._live = False
        self._enter(State.ENDED)

    def stopped(self) -> None:
        """As it was asked to."""
        self._live = False
        if self._leaving or not self._wanted.running:
            self._enter(State.STOPPED)
            return
        self.restarts += 1
        self._former, self.definition = self.definition, self._wanted
        self._failures, self.refused = 0, ""
        self._enter(State.STARTING)

    def refuse(self, reason: str, hint: str = "") -> None:
        """The wanted definition cannot be used; the former one goes on."""
        self.refused = f"cannot use the changed {self._wanted.origin}: {reason}"
        self._say(
            f"{self.refused}; the sink goes on as before" + (f"\nhint: {hint}" if hint else "")
        )
        self._wanted = self.definition

    def failed(self, error: FrazilError) -> None:
        now, began = self._clock.monotonic(), self._live
        self._live, self.error = False, error
        if self._leaving:
            self._say(f"stopped: {_without_values(error)}")
            self._enter(State.STOPPED)
        elif isinstance(error, Fenced):
            self._say(f"fenced: {_without_values(error)}")
            self._enter(State.FENCED)
        elif self._former is not None and isinstance(error, (Fatal, ConfigError)):
            former, self._former = self._former, None
            newer = None if self._wanted is self.definition else self._wanted
            self.refuse(error.message, error.hint)
            self.definition, self._wanted = former, newer or former
            self._enter(State.STARTING)
        elif isinstance(error, (Fatal, ConfigError)):
            self._fail(error)
        else:
            if began and now - self._started_at >= LONGEST_PAUSE:
                self._failures = 0
            self._failures += 1
            known = isinstance(error, (Retryable, CommitStateUnknown))
            if not known and self._failures >= UNKNOWN_FAILURES:
                self._fail(error)
                return
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 10))
            self._say(f"failed: {error.log_text}; restarting in {pause:.0f} s")
            self.restarts += 1
            self._retry_at = now + pause
            self._enter(State.RETRYING)

    def _fail(self, error: FrazilError) -> None:
        self._say(f"failed; an operator must act: {_without_values(error)}")
        self._enter(State.FAILED)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.state, self._since = state, self._clock.time()


def _without_values(error: FrazilError) -> str:
    """What is said may be logged: the report of the process has the whole message."""
    return f"{error.log_text}\nhint: {error.hint}" if error.hint else error.log_text
