"""Writer schemas of Confluent Avro, by id, from the schema registry. Runs on executors.

In: the id before a value, and the registry's client settings. Out: a `WriterSchema`, or a
`RegistryRefusal` with the reason why the records of that schema are rejected.

Promises: a schema is requested once per process, an unknown id again after `MISSING_SECONDS`. Only
the registry's own answer that it does not know an id, or a schema that no table can hold, rejects
records. A registry that does not answer raises `Unavailable`, one that refuses access or an invalid
setting raises `ConfigError`.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from frazil.arrow.avro import WriterSchema
from frazil.arrow.avro_types import UnsupportedSchema
from frazil.errors import ConfigError, FrazilError, Unavailable


@dataclass(frozen=True, slots=True)
class RegistryRefusal:
    """A schema that cannot be used. Each record rejected for it carries the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnknownSchemaId(RegistryRefusal):
    """The registry does not know the id yet. Asked again after `until`."""

    until: float = 0.0


# Kept for the lifetime of the process: the schema of an id never changes.
_writers: dict[tuple[str, str | int], WriterSchema | RegistryRefusal] = {}
_missing: dict[tuple[str, str | int], UnknownSchemaId] = {}
MISSING_SECONDS = 30.0
#: Limit on the number of unknown ids in `_missing`.
MOST_MISSING = 100_000
#: Registry ids are Java ints; for a larger id the registry answers as if the path did not exist.
MOST_ID = 2**31 - 1
_BETWEEN = "check the url, and any proxy or login page before the registry"


def _prepared(
    name: str, text: str, references: Sequence[str] = ()
) -> WriterSchema | RegistryRefusal:
    try:
        return WriterSchema(text, references)
    except UnsupportedSchema as error:
        return RegistryRefusal(f"cannot make columns of {name}: {error}")


def configured_writer(text: str) -> WriterSchema | RegistryRefusal:
    """The schema that the configuration gives instead of a registry."""
    writer = _writers.get(("", text))
    if writer is None:
        writer = _prepared("the schema", text)
        _writers["", text] = writer
    return writer


def ask_again() -> None:
    """Forgets the unknown schema ids, so that the registry is asked for them again."""
    _missing.clear()


class SchemaRegistry:
    """Writer schemas by id, each requested once per process."""

    _BOUNDS: Mapping[str, int] = {
        "timeout": 10,
        "max.retries": 4,
        "retries.wait.ms": 200,
        "retries.max.wait.ms": 2_000,
    }

    def __init__(self, conf: Mapping[str, str]) -> None:
        self._conf: dict[str, Any] = {**self._BOUNDS, **conf}
        for key in (*self._BOUNDS, "cache.capacity", "cache.latest.ttl.sec"):
            if isinstance(self._conf.get(key), str):
                try:
                    self._conf[key] = float(self._conf[key])
                except ValueError as error:
                    raise ConfigError(f"cannot set {key} of the registry: {error}") from None
        self.url = re.sub(r"//[^/@]*@", "//", str(conf.get("url", "")))
        self._client: Any = None

    def writer(self, schema_id: int) -> WriterSchema | RegistryRefusal:
        """The schema of an id, or the reason it cannot be used. Every id is requested, however many
        others were unknown: hostile data can contain 2³¹ ids, and must not affect good records."""
        key = (self.url, schema_id)
        if key in _writers:
            return _writers[key]
        if schema_id > MOST_ID:
            return RegistryRefusal(
                f"cannot find schema {schema_id}: expected an id of at most {MOST_ID}"
            )
        if key in _missing and _missing[key].until > time.monotonic():
            return _missing[key]
        writer = self._ask(schema_id)
        if isinstance(writer, UnknownSchemaId):
            _missing.pop(key, None)
            _missing[key] = writer
            if len(_missing) > MOST_MISSING:
                del _missing[next(iter(_missing))]  # the oldest
        else:
            _writers[key] = writer
        return writer

    def subjects(self) -> list[str]:
        """All subjects; raises what a request for a schema would raise."""
        errors = _client_errors()
        with self._translated("list the subjects"):
            try:
                return list(map(str, self._opened().get_subjects()))
            except errors.SchemaRegistryError as error:
                raise self._failure("list the subjects", error) from None

    def latest(self, subject: str) -> tuple[int, WriterSchema | RegistryRefusal]:
        """Id and schema of a subject's newest version."""
        errors = _client_errors()
        with self._translated(f"get the schema of {subject}"):
            try:
                number = int(self._opened().get_latest_version(subject).schema_id)
            except errors.SchemaRegistryError as error:
                raise self._failure(f"get the schema of {subject}", error) from None
        return number, self.writer(number)

    def _ask(self, schema_id: int) -> WriterSchema | RegistryRefusal:
        errors = _client_errors()
        with self._translated(f"get schema {schema_id}"):
            try:
                client = self._opened()
                schema = client.get_schema(schema_id)
                kind, text = _schema_text(schema)
                references = self._references(client, schema, set())
            except errors.SchemaRegistryError as error:
                return self._refused(schema_id, error)
        if kind != "AVRO":
            return RegistryRefusal(f"cannot read schema {schema_id}: expected AVRO, found {kind}")
        return _prepared(f"schema {schema_id}", text, references)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Errors of the client below → ours."""
        errors = _client_errors()
        try:
            yield
        except (OSError, errors.OAuthTokenError, *_transport_errors()) as error:
            raise Unavailable(
                f"cannot {doing}: {self.url} does not answer: {type(error).__name__}",
                hint="is the registry up, and its url right?",
            ) from None
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            self._client = None  # the client caches the bad answer
            raise Unavailable(
                f"cannot {doing}: {self.url} answers something else; expected a "
                f"schema as JSON, found {type(error).__name__}: {str(error)[:200]!a}",
                hint=_BETWEEN,
            ) from None

    def _opened(self) -> Any:
        if self._client is None:
            # Imported here: it loads an HTTP client and OAuth, and only this format needs it.
            library = importlib.import_module("confluent_kafka.schema_registry")
            try:
                self._client = library.SchemaRegistryClient(self._conf)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"cannot ask the registry {self.url}: {error}") from None
        return self._client

    def _refused(self, schema_id: int, error: Any) -> UnknownSchemaId:
        """Only the registry's own 404 code marks a schema as unknown, which rejects its records.
        Any other answer is a failure of the environment and raises."""
        status, code = error.http_status_code, error.error_code
        fact = f"{self.url} answers {status}: {str(error.error_message)[:200]}"
        if status == 404 and type(code) is int and code // 100 == 404:
            until = time.monotonic() + MISSING_SECONDS
            return UnknownSchemaId(
                f"cannot find schema {schema_id}, or one that it refers to: {fact}", until
            )
        raise self._failure(f"get schema {schema_id}", error) from None

    def _failure(self, doing: str, error: Any) -> FrazilError:
        """The error for an answer that is a failure of the environment."""
        status = error.http_status_code
        answer = f"{self.url} answers {status}: {str(error.error_message)[:200]}"
        message = f"cannot {doing}: {answer}"
        if status in (401, 403, 407):
            return ConfigError(message, hint="check the registry's credentials")
        patient = status in (408, 429) or status >= 500
        return Unavailable(message, hint="is the registry up?" if patient else _BETWEEN)

    def _references(self, client: Any, schema: Any, seen: set[tuple[str, int]]) -> list[str]:
        """The texts of the schemas that this one references, dependencies first."""
        texts: list[str] = []
        for reference in schema.references or ():
            if (reference.subject, reference.version) not in seen:
                seen.add((reference.subject, reference.version))
                used = client.get_version(reference.subject, reference.version).schema
                texts += [*self._references(client, used, seen), _schema_text(used)[1]]
        return texts


def _schema_text(schema: Any) -> tuple[str, str]:
    """Type and text of a schema, checked here because the client accepts anything."""
    kind, text = schema.schema_type or "AVRO", schema.schema_str
    if not isinstance(kind, str) or not isinstance(text, str) or not text:
        raise TypeError(f"schema is {str(text)[:80]!r}, schemaType {str(kind)[:80]!r}")
    return kind, text


def _client_errors() -> Any:
    return importlib.import_module("confluent_kafka.schema_registry.error")


def _transport_errors() -> list[type[Exception]]:
    # The client uses one of these libraries and does not translate its errors.
    errors: list[type[Exception]] = []
    for name in ("httpx", "httpx2"):
        try:
            library = importlib.import_module(name)
            errors += [library.HTTPError, library.InvalidURL]
        except ImportError:
            continue
    return errors
