"""Errors of Spark's JVM, translated into ours.

In: what Py4J and PySpark raise while Java is called. Out: a `FrazilError` that names what was being
done. Java exceptions are looked up in `KINDS`, by the name of the exception or of a cause. One that
is not there becomes `CommitStateUnknown`, which the committer handles by reading back, never by
guessing. Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Conflict,
    FrazilError,
    IdentityMismatch,
    Unavailable,
)

#: Java exception (simple name, of the error or of a cause) → our error.
KINDS: dict[str, type[FrazilError]] = {
    # certain: nothing was applied
    "CommitFailedException": Conflict,
    "AlreadyExistsException": Conflict,
    # raised only by our ancestry validator. Whether an earlier attempt of the same commit was
    # applied is decided by reading the ledger (H1).
    "ValidationException": CommitStateUnknown,
    "CommitStateUnknownException": CommitStateUnknown,
    # the catalog or store does not answer; in a commit the caller still reads back
    "ServiceUnavailableException": Unavailable,
    "ServiceFailureException": Unavailable,
    "RESTException": Unavailable,
    "UncheckedIOException": Unavailable,
    "RuntimeIOException": Unavailable,
    "UncheckedSQLException": Unavailable,
    "UncheckedInterruptedException": Unavailable,
    "SdkClientException": Unavailable,
    "S3Exception": Unavailable,
    "NoSuchTableException": IdentityMismatch,
    "NoSuchNamespaceException": IdentityMismatch,
    "NoSuchIcebergTableException": IdentityMismatch,
    "NotFoundException": IdentityMismatch,
    "NotAuthorizedException": ConfigError,
    "ForbiddenException": ConfigError,
    "BadRequestException": ConfigError,
    "IllegalArgumentException": ConfigError,
    "UnsupportedOperationException": ConfigError,
    "ClassNotFoundException": ConfigError,
    "CatalogNotFoundException": ConfigError,
}

#: Raised by Spark if a job failed, with the task's own message.
FAILED = (PySparkException, Py4JJavaError)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    try:
        yield
    except Py4JJavaError as error:
        names, fact = causes(error.java_exception)
        kind = next((KINDS[name] for name in names if name in KINDS), CommitStateUnknown)
        if "Status Code: 403" in fact or "Status Code: 401" in fact:  # of S3; a retry does not help
            raise ConfigError(
                f"cannot {doing}: {fact}", hint="check the credentials, and what the bucket allows"
            ) from None
        raise kind(f"cannot {doing}: {fact}") from None
    except PySparkException as error:
        name = type(error).__name__
        fact = str(error).strip().splitlines()[0] if str(error).strip() else name
        raise KINDS.get(name, CommitStateUnknown)(f"cannot {doing}: {fact}") from None
    except (Py4JError, ConnectionError) as error:
        raise CommitStateUnknown(f"cannot {doing}: the JVM does not answer: {error}") from None


def causes(exception: Any) -> tuple[list[str], str]:
    """The names of an exception and its causes, and the outermost and innermost message."""
    names, messages = [], []
    for _ in range(8):  # bounded: Java allows causes in a circle
        if exception is None:
            break
        names.append(exception.getClass().getSimpleName())
        message = (exception.getMessage() or "").strip().splitlines()
        messages.append(f"{names[-1]}: {message[0] if message else 'no message'}")
        exception = exception.getCause()
    inner = messages[-1].partition(": ")[2]
    return names, messages[0] if inner in messages[0] else f"{messages[0]} ({messages[-1]})"
