"""Functions of this chapter → machine code, compiled once and cached on disk. Runs on executors.

`compiled` is numba's `njit` with this chapter's settings: no Python objects, no exceptions, no
bounds checks (addresses are checked by the code itself, see `frazil.native.memory`). `inlined` is
for small functions: a call costs as much as to read a number. `cached` is for the functions that
Python calls: `warm_up` compiles all of these that were imported.

Compilation takes seconds, so the result is cached. The folder's name contains a hash of all sources
of the chapter, because numba itself looks at the source of one function only and would not notice
a change of a function that it calls. The first of these folders that already holds the code is
read, else the first writable one is filled:

- `native` in `FRAZIL_CACHE`, or in `~/.cache/frazil`;
- the `__pycache__` beside this file, for images whose home is read-only: fill it when the image is
  built (`python -m frazil.native.warm_up`).

Where none is writable each process compiles for itself; Spark's worker daemon does so before its
workers are forked. Processes may race for a folder: numba writes files under temporary names and
renames them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

CHAPTER = Path(__file__).parent
#: Every access is checked (see `frazil.native.memory`). For tests; such code is not cached.
CHECKED = os.environ.get("FRAZIL_NATIVE_CHECKED") == "1"

Function = TypeVar("Function", bound=Callable[..., Any])

_entries: list[tuple[Any, str]] = []


def compiled(function: Function) -> Function:
    """The function as machine code, for calls from other compiled functions."""
    return numba.njit(error_model="numpy", boundscheck=False)(function)  # type: ignore[no-any-return]


def inlined(function: Function) -> Function:
    """The same as a part of each caller: for what is small and called for every value."""
    return numba.njit(error_model="numpy", boundscheck=False, forceinline=True)(function)  # type: ignore[no-any-return]


def cached(signature: str) -> Callable[[Function], Function]:
    """The function as machine code, for calls from Python; `signature` as numba writes it."""

    def decorate(function: Function) -> Function:
        dispatcher = compiled(function)
        _entries.append((dispatcher, signature))
        if not CHECKED:
            with contextlib.suppress(RuntimeError):  # no folder to write: it stays in memory
                dispatcher._cache = _FunctionCache(function)  # type: ignore[attr-defined]
        return dispatcher

    return decorate


def warm_up() -> None:
    """Loads the code of all `cached` functions, or compiles it."""
    for dispatcher, signature in _entries:
        dispatcher.compile(signature)


@functools.cache
def chapter_hash() -> str:
    """A hash of all sources of this chapter."""
    digest = hashlib.sha256()
    for source in sorted(CHAPTER.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def folders() -> list[Path]:
    """Folders that may hold the cached code, in order of preference."""
    roots = []
    if named := os.environ.get("FRAZIL_CACHE"):
        roots.append(Path(named) / "native")
    else:
        with contextlib.suppress(RuntimeError):  # a user without a home
            roots.append(Path.home() / ".cache" / "frazil" / "native")
    roots.append(CHAPTER / "__pycache__" / "native")
    return [root / chapter_hash() for root in roots]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


class _ChapterLocator(_CacheLocator):  # type: ignore[misc]
    """Where the code of a function is cached, and what it was made of."""

    def __init__(self, folder: Path, line: int) -> None:
        self._folder = folder
        self._line = line

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return chapter_hash()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Any, _: str) -> _ChapterLocator | None:
        line = function.__code__.co_firstlineno
        index = f"*.{function.__qualname__}-{line}.*.nbi"
        places = folders()
        filled = (place for place in places if any(place.glob(index)))
        folder = next(filled, None) or next(filter(_writable, places), None)
        return cls(folder, line) if folder else None


class _ChapterCache(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ChapterLocator,)


class _FunctionCache(FunctionCache):  # type: ignore[misc]
    """A cache that is an advantage or nothing: a broken or read-only one never fails a task."""

    _impl_class = _ChapterCache

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError):
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(signature, result)
