"""Every error of Frazil, sorted by what the operator must do.

    FrazilError
    ├── ConfigError           change the configuration or the machine; nothing was started (exit 2)
    │   └── SqlError          the same of an SQL statement, with line, column and the line itself
    ├── Retryable             goes away by itself; tried again, bounded (exit 75)
    │   ├── Conflict          another writer of the table was first
    │   └── Unavailable       a broker, registry, catalog or store does not answer
    │       └── PythonWorkerUnavailable  Spark could not start or reach a Python process
    ├── CommitStateUnknown    the answer was lost: read back, never guess (exit 75)
    └── Fatal                 an operator must act; nothing was skipped or guessed (exit 5)
        ├── Gap               offsets between the position and the next range are missing
        ├── Overlap           offsets would be written twice
        ├── Expired           the snapshots that prove the position, or the offsets, were deleted
        ├── Fenced            a newer epoch of the same sink owns the tables (exit 4)
        ├── IdentityMismatch  the topic, cluster or table is not the one the ledger knows
        ├── SchemaMismatch    data and table schema do not fit
        ├── Undecodable       a record cannot be decoded
        ├── Unroutable        no rule routes a record to a table
        ├── Unwritable        records cannot be written to a table's files
        ├── TooManyRejected   a batch has more rejected records than the limit allows
        ├── NotProven         the audit found something, or cannot tell (exit 3)
        └── AccountingError   the arithmetic of a batch does not add up

A message reads `cannot <verb> <object>: <fact>; expected <x>, found <y>`; the hint says what to do.
Errors cross process borders as text inside Spark's tracebacks: `from_traceback` finds them again.
No message shows a password that is part of a URL: an error masks it when it is made.
"""

from __future__ import annotations

import json
import re
import traceback

#: Exit code of an error that goes away by itself: EX_TEMPFAIL of sysexits.
TRY_AGAIN = 75
#: Exit code of an error that stays until an operator acts.
OPERATOR = 5


#: Passwords in URLs: before the host, as a parameter, and in Oracle's form.
_IN_URLS = (
    re.compile(r"(?<=://)([^/?#\s:@'\"]*:)([^/?#\s'\"]+)(?=@)"),
    re.compile(
        r"((?:[?&;(,][\w.\-]*(?:password|passwd|pwd|passphrase|secret|token|api[_\-.]?key"
        r"|credential|signature)|[?&](?:sig|key))=)([^&;#,)\s'\"]+)",
        re.IGNORECASE,
    ),
    re.compile(r"(jdbc:oracle:\w+:[^/@\s]+/)([^@\s]+)(?=@)"),
)


def without_passwords(text: str) -> str:
    """The text with *** for each password in a URL."""
    if "://" in text or "=" in text or "jdbc:" in text:
        for pattern in _IN_URLS:
            text = pattern.sub(r"\1***", text)
    return text


def passwords_in(text: str) -> list[str]:
    """What `without_passwords` masks."""
    return [match[2] for pattern in _IN_URLS for match in pattern.finditer(text)]


class FrazilError(Exception):
    """Base of all. `str()` is the message on one line, and the hint on a second."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = without_passwords(message)
        super().__init__(message)
        self.message = message
        self.hint = without_passwords(hint)
        #: the full traceback or Spark message; not pickled
        self.detail = ""
        #: a log has a line of it already
        self.logged = False

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    @property
    def log_text(self) -> str:
        """The message for logs, notifications and health: without what it quotes of a record, or
        of an error that Frazil does not know. Place, column and class stay."""
        kept = _kept(self)
        if kept == self.message:
            return kept
        column = _COLUMN.search(self.message, len(kept))
        place = f": {column[0]}" if column else ""
        return f"{kept.rstrip(': ')}{place} ({type(self).__name__}; values are not logged)"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self).__name__, self.message, self.hint)


class ConfigError(FrazilError):
    """`path`: the setting at fault: section, number where there are several, key."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "", path: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self._fact = self.message

    def placed(self, place: str) -> ConfigError:
        """This error, with the location of the setting. The last location given is shown."""
        self.message = f"{self._fact} ({place})"
        self.args = (self.message,)
        return self


class SqlError(ConfigError):
    """`excerpt`: the line at fault, and a caret below the column; secrets in it are masked."""

    def __init__(
        self, message: str, *, hint: str = "", path: tuple[str, ...] = (), excerpt: str = ""
    ) -> None:
        super().__init__(message, hint=hint, path=path)
        self.excerpt = without_passwords(excerpt)

    def __str__(self) -> str:
        hint = f"hint: {self.hint}" if self.hint else ""
        return "\n".join(filter(None, (self.message, self.excerpt, hint)))


def defect(error: Exception) -> ConfigError:
    """An exception that nobody expected while a definition was read."""
    made = ConfigError(f"cannot read the definition: {type(error).__name__}: {error}")
    made.detail = "".join(traceback.format_exception(error))
    return made


class Retryable(FrazilError):
    exit_code = TRY_AGAIN


class Conflict(Retryable):
    pass


class Unavailable(Retryable):
    pass


class PythonWorkerUnavailable(Unavailable):
    pass


class CommitStateUnknown(FrazilError):
    exit_code = TRY_AGAIN


class Fatal(FrazilError):
    exit_code = OPERATOR


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


class NotProven(Fatal):
    exit_code = 3


class AccountingError(Fatal):
    pass


#: Where a message that names a record, or a partition, begins to quote it.
_PLACE = re.compile(r"cannot \w+ [^:]*?\[\d+\](?:(?: from)? offset \d+(?: on)?)?")
_BY_FUNCTION = re.compile(r"cannot route by [^:]+")
#: What is kept of an error that Frazil does not know: its class.
_UNKNOWN = re.compile(
    r"(?:unexpected error|cannot [^:]*)(?:: Spark stopped the stream)?"
    r"(?:: (?:[\w.]+(?:Error|Exception)\b|\[[A-Z_.]+\]))?"
)
_COLUMN = re.compile(r"column '[^']{1,200}'")


def _kept(error: FrazilError) -> str:
    message, kind = error.message, type(error)
    if kind is FrazilError:
        kept = _UNKNOWN.match(message)
        return kept[0] if kept else message.partition(":")[0]
    if kind is Fatal:
        kept = _BY_FUNCTION.match(message) or _PLACE.match(message)
        return kept[0] if kept else message
    if kind in (Undecodable, Unroutable, SchemaMismatch, Unwritable):
        kept = _PLACE.match(message)
        cut = message.partition(": ")[0] if kind is Unwritable else message
        return kept[0] if kept else cut
    return message


def kinds() -> dict[str, type[FrazilError]]:
    """All error classes by name."""
    classes: dict[str, type[FrazilError]] = {}
    queue: list[type[FrazilError]] = [FrazilError]
    while queue:
        kind = queue.pop()
        classes[kind.__name__] = kind
        queue.extend(kind.__subclasses__())
    return classes


def counted(number: int, one: str, several: str = "") -> str:
    """`1 commit`, `2 commits`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


_MARK = "frazil-error:"


def encode_for_spark(error: FrazilError) -> RuntimeError:
    """The form in which an error leaves a worker: Spark forwards only text."""
    line = json.dumps([type(error).__name__, error.message, error.hint])
    return RuntimeError(f"{_MARK}{line}")


def from_traceback(text: str) -> FrazilError | None:
    """The error that a worker or the planner raised, parsed from Spark's message."""
    _, mark, rest = text.partition(_MARK)
    if not mark:
        return None
    try:
        (name, message, hint), _ = json.JSONDecoder().raw_decode(rest)  # Spark may add to the line
    except ValueError:
        return None
    return _rebuild(name, message, hint)


#: Exceptions that only wrap the cause.
_WRAPPERS = ("py4j.", "pyspark.", "org.apache.spark.api.python.PythonException")
_RAISED = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Invalid|Interrupt|Exit|Panic\w*|Warning"
    r"|[A-Z]\w+))(?:: (.*))?"
)


def cause(text: str) -> str:
    """The innermost cause in Spark's message of a failure, without plans and stack traces: the last
    exception that Python raised in a worker or the driver, or Java's last `Caused by`; else the
    first line."""
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
    causes = [line for line in causes if not line.startswith(_WRAPPERS)]
    if causes:
        return causes[-1]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):  # Py4J's words
        del lines[0]
    return lines[0].lstrip(": ") if lines else ""


def _rebuild(name: str, message: str, hint: str) -> FrazilError:
    return kinds().get(name, FrazilError)(message, hint=hint)
