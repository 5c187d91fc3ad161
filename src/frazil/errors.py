"""Every error of Frazil, sorted by what the operator must do.

    FrazilError
    ├── ConfigError           change the configuration or the machine; nothing was started (exit 2)
    ├── Retryable             goes away by itself; tried again, bounded
    │   ├── Conflict          another writer of the table was first
    │   └── Unavailable       a broker, registry, catalog or store does not answer
    │       └── PythonWorkerUnavailable  Spark could not start a Python process, or not reach it
    ├── CommitStateUnknown    the answer was lost: read back, never guess
    └── Fatal                 a person must look; nothing was skipped, nothing was guessed
        ├── Gap               offsets between the position and what comes next are missing
        ├── Overlap           offsets would be there twice
        ├── Expired           what would prove the position, or the offsets themselves, were deleted
        ├── Fenced            a newer life of the same sink owns the tables
        ├── IdentityMismatch  the topic, cluster or table is not the one the ledger knows
        ├── SchemaMismatch    data and table schema do not fit
        ├── Undecodable       a record cannot be decoded
        ├── Unroutable        no rule says to which table a record goes
        ├── Unwritable        records cannot be written to a table's files
        ├── TooManyRejected   a batch has more rejected records than the dead letters may take
        └── AccountingError   the arithmetic of a batch does not add up

A message reads `cannot <verb> <object>: <fact>; expected <x>, found <y>`; the hint says what to do.
Errors cross process borders as text inside Spark's tracebacks: `from_traceback` finds them again.
"""

from __future__ import annotations

import json
import re


class FrazilError(Exception):
    """Base of all. `str()` is one line for people, plus the hint on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        #: all that somebody else said of it; stays in this process
        self.detail = ""

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self).__name__, self.message, self.hint)


class ConfigError(FrazilError):
    """`path` is the setting it is about: section, number where there are several, key."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "", path: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self._fact = message

    def placed(self, place: str) -> ConfigError:
        """The same error, and where the setting stands. The last place given is the one shown."""
        self.message = f"{self._fact} ({place})"
        self.args = (self.message,)
        return self


class Retryable(FrazilError):
    pass


class Conflict(Retryable):
    pass


class Unavailable(Retryable):
    pass


class PythonWorkerUnavailable(Unavailable):
    pass


class CommitStateUnknown(FrazilError):
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


class IdentityMismatch(Fatal):
    pass


class SchemaMismatch(Fatal):
    pass


class Undecodable(Fatal):
    pass


class Unroutable(Fatal):
    pass


class Unwritable(Fatal):
    pass


class TooManyRejected(Fatal):
    pass


class AccountingError(Fatal):
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


def counted(number: int, one: str, several: str = "") -> str:
    """`1 commit`, `2 commits`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


_MARK = "frazil-error:"


def encode_for_spark(error: FrazilError) -> RuntimeError:
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


#: What only says that something below has failed.
_WRAPPERS = ("py4j.", "pyspark.", "org.apache.spark.api.python.PythonException")
_RAISED = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Invalid|Interrupt|Exit|Panic\w*|Warning"
    r"|[A-Z]\w+))(?:: (.*))?"
)


def cause(text: str) -> str:
    """The innermost cause in Spark's text about a failure: what Python raised last in a worker or
    the driver, or the last `Caused by` of Java's; else the first line. Plans and stacks stand
    around it."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised, frames = [], False
    for line in lines:
        if "Traceback (most recent call last):" in line:
            frames = True
        elif frames and not line.startswith((" ", "\t")):
            frames = False
            if _RAISED.fullmatch(line) and not line.startswith(_WRAPPERS):
                raised.append(line)
    if raised:
        return raised[-1]
    causes = [
        line.strip().removeprefix("Caused by: ")
        for line in lines
        if line.strip().startswith("Caused by: ")
    ]
    causes = [each for each in causes if not each.startswith(_WRAPPERS)]
    if causes:
        return causes[-1]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):  # Py4J's words
        del lines[0]
    return lines[0].lstrip(": ") if lines else ""


def _rebuild(name: str, message: str, hint: str) -> FrazilError:
    return kinds().get(name, FrazilError)(message, hint=hint)
