"""Every error of Frazil, sorted by what the operator must do.

    FrazilError
    ├── ConfigError        change the configuration or the machine; nothing was started (exit 2)
    ├── Retryable          goes away by itself; tried again, bounded
    │   ├── Conflict       another writer of the table was first
    │   └── Unavailable    a broker, registry, catalog or store does not answer
    ├── Unknown            the answer was lost: read back, never guess
    └── Fatal              a person must look; nothing was skipped, nothing was guessed
        ├── Gap            offsets between the position and what comes next are missing
        ├── Overlap        offsets would be there twice
        ├── Expired        what would prove the position, or the offsets themselves, were deleted
        ├── Fenced         a newer life of the same sink owns the tables
        ├── Foreign        the topic, cluster or table is not the one the ledger knows
        ├── Misfit         data and table schema do not fit
        ├── Undecodable    a record cannot be decoded
        ├── Unroutable     no rule says to which table a record goes
        ├── Overflow       a batch has more rejected records than the dead letters may take
        └── Miscount       the arithmetic of a batch does not add up

A message reads `cannot <verb> <object>: <fact>; expected <x>, found <y>`; the hint says what to do.
Errors cross process borders as text inside Spark's tracebacks: `from_traceback` finds them again.
"""

from __future__ import annotations

import json


class FrazilError(Exception):
    """Base of all. `str()` is one line for people, plus the hint on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self).__name__, self.message, self.hint)


class ConfigError(FrazilError):
    exit_code = 2


class Retryable(FrazilError):
    pass


class Conflict(Retryable):
    pass


class Unavailable(Retryable):
    pass


class Unknown(FrazilError):
    pass


class Fatal(FrazilError):
    pass


class Gap(Fatal):
    pass


class Overlap(Fatal):
    pass


class Expired(Fatal):
    pass


class Fenced(Fatal):
    exit_code = 4


class Foreign(Fatal):
    pass


class Misfit(Fatal):
    pass


class Undecodable(Fatal):
    pass


class Unroutable(Fatal):
    pass


class Overflow(Fatal):
    pass


class Miscount(Fatal):
    pass


def kinds() -> dict[str, type[FrazilError]]:
    """All error classes by name."""
    found: dict[str, type[FrazilError]] = {}
    queue: list[type[FrazilError]] = [FrazilError]
    while queue:
        kind = queue.pop()
        found[kind.__name__] = kind
        queue.extend(kind.__subclasses__())
    return found


_MARK = "frazil-error:"


def across(error: FrazilError) -> RuntimeError:
    """The form in which an error leaves a worker: Spark passes on nothing but text."""
    line = json.dumps([type(error).__name__, error.message, error.hint])
    return RuntimeError(f"{_MARK}{line}")


def from_traceback(text: str) -> FrazilError | None:
    """The error that a worker or the planner raised, found in Spark's text about it."""
    _, mark, rest = text.partition(_MARK)
    if not mark:
        return None
    try:
        (name, message, hint), _ = json.JSONDecoder().raw_decode(rest)  # Spark may add to the line
    except ValueError:
        return None
    return _rebuild(name, message, hint)


def _rebuild(name: str, message: str, hint: str) -> FrazilError:
    return kinds().get(name, FrazilError)(message, hint=hint)
