"""Definitions in a directory: one `.sql` file for each object, so that they can be shared, reviewed
and compared like code.

In: a directory, and the texts to write. Out: its files with their contents, and one version of all.
A write takes place only if nothing has changed since the read that it rests on (compare-and-set
under a lock), and each file is replaced at once. Runs on the driver.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from frazil.errors import ConfigError, Conflict

#: Larger files are no definitions.
_LARGEST = 16_000_000


@dataclass(frozen=True)
class StoredTexts:
    #: name of the file or row → its text
    texts: Mapping[str, str]
    #: changes with every change of any text
    version: str


class DefinitionStore(Protocol):
    """Where definitions are kept."""

    #: folder of the paths in definitions
    base: Path

    @property
    def arguments(self) -> str:
        """What `frazil run` takes to run its sinks."""

    def read(self) -> StoredTexts: ...

    def write(self, before: StoredTexts, texts: Mapping[str, str | None]) -> None:
        """Replaces texts; None: removes it. Raises `Conflict` if anything is not as `before`."""

    def watched(self) -> bool | None:
        """Whether a process runs the sinks of these definitions; None: that cannot be seen."""


def version_of(texts: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(texts):
        for part in (name, texts[name]):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:16]


#: Marks a directory as one of definitions: `sinks/NAME.sql` in it is one of many files.
MARKER = ".frazil"


class DefinitionFiles:
    def __init__(self, directory: str | Path, *, create: bool = False) -> None:
        """`create`: the first write makes the directory."""
        self.base = Path(directory)
        if not is_folder(self.base) and (not create or _exists(self.base)):
            raise ConfigError(
                f"cannot read definitions: there is no directory {self.base}",
                hint="`frazil sql --definitions DIR` makes it",
            )

    @property
    def arguments(self) -> str:
        return str(self.base)

    def read(self) -> StoredTexts:
        texts: dict[str, str] = {}
        with _named(self.base):
            if not self.base.is_dir():
                return StoredTexts({}, version_of({}))
            for path in sorted(self.base.rglob("*.sql")):
                if path.is_file() and not path.name.startswith("."):
                    texts[path.relative_to(self.base).as_posix()] = _text(path)
        return StoredTexts(texts, version_of(texts))

    def write(self, before: StoredTexts, texts: Mapping[str, str | None]) -> None:
        with _named(self.base):
            self.base.mkdir(parents=True, exist_ok=True)
            (self.base / MARKER).touch()
        with _named(self.base), self._lock(".lock", fcntl.LOCK_EX):
            if self.read().version != before.version:
                raise Conflict(
                    f"cannot change definitions in {self.base}: another process changed them "
                    "at the same time"
                )
            for name, text in texts.items():
                path = self.base / name
                if text is None:
                    path.unlink()
                    continue
                path.parent.mkdir(exist_ok=True)
                partial = path.with_name(f".{path.name}.{os.getpid()}")
                with partial.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)

    def watched(self) -> bool | None:
        """A process that watches holds a shared lock."""
        if not (self.base / ".watched").exists():
            return False
        try:
            with self._lock(".watched", fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
        except BlockingIOError:
            return True
        except OSError:  # a directory that this user may only read
            return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Held by the process that runs the sinks, so that START SINK knows of it."""
        with self._lock(".watched", fcntl.LOCK_SH):
            yield

    @contextmanager
    def _lock(self, name: str, kind: int) -> Iterator[None]:
        with open(self.base / name, "a") as file:
            fcntl.flock(file, kind)
            try:
                yield
            finally:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return decoded(str(path), file.read(_LARGEST + 1))


def decoded(name: str, content: bytes) -> str:
    if len(content) > _LARGEST:
        raise ConfigError(f"cannot read {name}: it is larger than {_LARGEST:,} bytes")
    try:
        return content.decode("utf-8-sig")  # a BOM, as editors on Windows write it, is no sign
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {name}: it is not UTF-8") from None


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or no text
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return True  # and no directory can be made of it


def read_file(path: str | Path) -> str:
    """The text of a file of statements."""
    with _named(path):
        return _text(Path(path))


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        name = error.filename or path
        raise ConfigError(f"cannot read or write {name}: {error.strerror}") from None
    except ValueError as error:  # a name that is no text
        raise ConfigError(f"cannot read or write {str(path)!r}: {error}") from None
