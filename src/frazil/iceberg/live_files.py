"""The guard before every file removal: does anything live refer to the file, in any spelling?

The same file can be named `s3://b/k`, `s3a://b/k`, `file:/k`, `file:///k` or `/k`. A table whose
location was respelled, or to which another engine added files, has several spellings in its
manifests; a comparison of texts would take live files for garbage.

Two names are the same file if their paths and their prefixes (scheme and authority) are the same.
The same path under another prefix may be a copy or the same file: this cannot be decided here, so
it raises, and nothing is removed. Spellings that differ only by escapes, doubled or trailing
slashes count as the same: a mistake there keeps a file, and removes none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from frazil.errors import ConfigError, IdentityMismatch

#: Aliases of schemes. Iceberg equates those of S3, too; the others differ by TLS only.
_SAME = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?(/.*)?", re.DOTALL)
_NO_GC = "gc.enabled"


def place(path: str) -> tuple[str, str]:
    """Prefix and path of a file, normalized."""
    match = _URI.fullmatch(path)
    scheme, authority, rest = match.groups() if match else ("file", "", path)
    scheme = _SAME.get(scheme.lower(), scheme.lower())
    authority = authority or ""
    if scheme == "file" and authority in ("", "localhost"):
        return "file:", _path(rest)
    return f"{scheme}://{authority}", _path(rest)


def _path(text: str | None) -> str:
    return "/" + re.sub("/+", "/", unquote(text or "")).strip("/")


def spellings(path: str) -> list[str]:
    """A path, and the other common spellings of the same file."""
    match = _URI.fullmatch(path)
    scheme, authority, rest = match.groups() if match else ("file", "", path)
    if place(path)[0] == "file:":
        bare = "/" + (rest or "").lstrip("/")
        return [path, *sorted({bare, f"file:{bare}", f"file://{bare}"} - {path})]
    group = _SAME.get(scheme.lower(), scheme.lower())
    alike = {group, *(name for name, same in _SAME.items() if same == group)}
    return [path, *sorted({f"{alias}://{authority or ''}{rest or ''}" for alias in alike} - {path})]


class LiveFiles:
    """The files that something refers to. `in` raises where a path is live under another prefix."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._prefixes: dict[str, set[str]] = {}
        for spelling in paths:
            prefix, path = place(spelling)
            self._prefixes.setdefault(path, set()).add(prefix)

    def __contains__(self, path: object) -> bool:
        prefix, rest = place(str(path))
        known = self._prefixes.get(rest)
        if known is None or prefix in known:
            return known is not None
        raise IdentityMismatch(
            f"cannot decide whether {path} is live: a table refers to this path under "
            f"another prefix; expected {prefix}, found {', '.join(sorted(known))}",
            hint="nothing was removed; if both are the same store, give the table's location and "
            "its files one spelling (rewrite_data_files, rewrite_manifests)",
        )


def refuse_shared(table: str, properties: Mapping[str, str]) -> None:
    """Refuses a table without garbage collection: its files may be another table's, too."""
    if properties.get(_NO_GC, "true").strip().lower() == "false":
        raise ConfigError(
            f"cannot remove files of table {table}: expected its property {_NO_GC} to be true, "
            "found false",
            hint="its files may belong to other tables; nothing was removed",
        )
