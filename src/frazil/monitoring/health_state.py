"""The verdict on one sink: `judge`. Pure.

In: facts of a sink, as its own process sees them or as its heartbeat tells them. Out: one of
`starting`, `ok`, `catching_up`, `waiting`, `failed` and `stopped`, with the reason and the remedy.
Texts name tables, topics, offsets and errors, and never a value of a record or a secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frazil.errors import TRY_AGAIN, FrazilError, counted
from frazil.render import label

STARTING, OK, CATCHING_UP = "starting", "ok", "catching_up"
WAITING, FAILED, STOPPED = "waiting", "failed", "stopped"
#: Every state of a sink.
STATES = (STARTING, OK, CATCHING_UP, WAITING, FAILED, STOPPED)
#: Waits that a reason lists.
_LISTED = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    state: str
    reason: str = ""
    #: what to do, a command where there is one; empty: nothing
    remedy: str = ""
    #: class of the error, if one is the reason
    error: str = ""
    #: must an operator act?
    operator: bool = False

    @property
    def error_values(self) -> dict[str, str] | None:
        """The error, as every JSON of Frazil has it."""
        if not self.error:
            return None
        return {"class": self.error, "message": self.reason, "hint": self.remedy}

    @property
    def text(self) -> str:
        words = label(self.state)
        return f"{words}: {self.reason}" if self.reason else words


@dataclass(frozen=True, slots=True)
class Wait:
    """Something that holds records up, and that Frazil tries again by itself."""

    #: `table shop.orders`, `Kafka`, `the stream`
    subject: str
    reason: str
    since: float  # seconds since 1970
    error: FrazilError | None = None
    #: it ends only when an operator acts
    operator: bool = False
    #: what to do, where it is another thing than for the error
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class StageLag:
    """Offsets that are not committed, by the stage that they have reached. None: not known."""

    #: in Kafka, and in no batch
    kafka: int | None = None
    #: in the batch under way
    writing: int = 0
    #: staged, until the next commit is due
    staged: int = 0
    #: staged, behind a commit that fails
    catalog: int = 0
    #: age of the oldest of them
    seconds: float | None = None

    @property
    def total(self) -> int:
        return (self.kafka or 0) + self.writing + self.staged + self.catalog


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """What is known of one sink."""

    #: has it claimed its tables, and does its query run?
    running: bool = False
    ended: bool = False
    #: why it ended; None: it was stopped, or was done
    error: FrazilError | None = None
    waits: Sequence[Wait] = ()
    lag: StageLag | None = None
    #: seconds after which offsets that are not committed are late
    late: float = 60.0
    #: has it reached the end that the topics had when it started?
    reached: bool = True
    #: rows per second
    rate: float = 0.0


def judge(facts: SinkFacts) -> Verdict:
    if facts.ended:
        return _ended(facts.error)
    if facts.waits:
        return _waiting(facts.waits)
    if not facts.running:
        return Verdict(STARTING, "taking over from the previous run")
    lag = facts.lag
    if lag is not None and lag.kafka is None:
        return Verdict(CATCHING_UP, "the ends of the topics are not known yet")
    if lag is None or not lag.total:
        return Verdict(OK)
    if not facts.reached or (lag.seconds or 0.0) > facts.late:
        pace = f", {facts.rate:,.0f} rows/s" if facts.rate else ""
        return Verdict(CATCHING_UP, f"{counted(lag.total, 'offset')} behind{pace}")
    return Verdict(OK)


def _ended(error: FrazilError | None) -> Verdict:
    if error is None:
        return Verdict(STOPPED)
    operator = error.exit_code not in (FrazilError.exit_code, TRY_AGAIN)
    return Verdict(FAILED, error.log_text, remedy_of(error), type(error).__name__, operator)


def _waiting(waits: Sequence[Wait]) -> Verdict:
    ordered = sorted(waits, key=lambda wait: (not wait.operator, wait.since))
    reasons = [f"{wait.subject}: {wait.reason}" for wait in ordered[:_LISTED]]
    if len(ordered) > _LISTED:
        reasons.append(f"and {len(ordered) - _LISTED:,} more")
    first = ordered[0]
    kind = type(first.error).__name__ if first.error else ""
    return Verdict(WAITING, "; ".join(reasons), _wait_remedy(first), kind, first.operator)


def _wait_remedy(wait: Wait) -> str:
    if wait.remedy:
        return wait.remedy
    if wait.error is not None and wait.operator:
        return f"{remedy_of(wait.error)}; its batches stay staged"
    return "none: the sink retries. Check the server named in the reason"


#: Class of an error → what to do, where the error itself has no hint.
REMEDIES = {
    "ConfigError": "correct the setting that the reason names, then start again",
    "Retryable": "start again",
    "Unavailable": "check that the server is up and reachable, then start again",
    "CommitStateUnknown": "start again: the next run reads the outcome from the ledger",
    "Fatal": "frazil audit CONFIG",
    "Gap": "frazil audit CONFIG",
    "Overlap": "find the other writer with this sink's id; frazil audit CONFIG",
    "Expired": "frazil offsets show CONFIG",
    "Fenced": "let the newer run continue; to take over from it, start this run again",
    "IdentityMismatch": "frazil offsets show CONFIG",
    "SchemaMismatch": "change the table or the producer, or set [dead_letters]; then start again",
    "Undecodable": "correct the format or the producer, or set [dead_letters]; then start again",
    "Unroutable": "add a [[route]], or set [dead_letters]; then start again",
    "Unwritable": "set [dead_letters] and start again, or report the message",
    "TooManyRejected": "frazil dead-letters list CONFIG; correct the producer, then start again",
    "NotProven": "frazil audit CONFIG",
    "AccountingError": "start again; report the error if it occurs again",
    "FrazilError": "start again; report the error if it occurs again",
}


def remedy_of(error: FrazilError) -> str:
    if error.hint:
        return error.hint
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((REMEDIES[name] for name in names if name in REMEDIES), "")
