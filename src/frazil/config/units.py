"""Durations, sizes, addresses and partition transforms: the texts of settings → values.

In: `20s`, `256MiB`, `127.0.0.1:9464`, `bucket(16, id)`. Out: seconds, bytes, host and port, a
column and Iceberg's transform. Any other text raises `ConfigError`, with the setting that the
caller names. Pure.
"""

from __future__ import annotations

import difflib
import re

from frazil.errors import ConfigError


def duration(text: str, key: str = "", path: tuple[str, ...] = ()) -> float:
    """Seconds of `500ms`, `20s`, `5m`, `6h`, `2d`; `key` names the setting in errors."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", text)
    if not match:
        raise ConfigError(
            f"cannot read {key or 'duration'}: expected a number with ms, s, m, h or "
            f"d, as 20s, found {text!r}",
            path=path,
        )
    scale = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[match.group(2)]
    return float(match.group(1)) * scale


def size(text: str, key: str = "", path: tuple[str, ...] = ()) -> int:
    """Bytes of `4096`, `64KiB`, `256MiB`, `1GiB` (`KB`, `MB`, `GB` are decimal)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", text)
    if not match:
        raise ConfigError(
            f"cannot read {key or 'size'}: expected a number with KiB, MiB or GiB, "
            f"as 256MiB, found {text!r}",
            path=path,
        )
    base = 1000 if match.group(3) == "B" and match.group(2) else 1024
    return int(float(match.group(1)) * base ** " KMGT".index(match.group(2) or " "))


_ADDRESS = re.compile(
    r"(?:(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))?:)?(?P<port>[0-9]{1,5})"
)


def address(text: str, key: str = "", path: tuple[str, ...] = ()) -> tuple[str, int]:
    """Host and port of `127.0.0.1:9464`, `[::1]:9464`, `metrics.local:9464`. A port alone is on
    loopback: nothing is open to other machines unless a host says so."""
    match = _ADDRESS.fullmatch(text.strip())
    if not match or int(match["port"]) > 65535:
        raise ConfigError(
            f"cannot read {key or 'address'}: expected HOST:PORT, as 127.0.0.1:9464, found "
            f"{text!r}",
            path=path,
        )
    return match["six"] or match["host"] or "127.0.0.1", int(match["port"])


#: A column; a name with a space is in double quotes.
_COLUMN = r'(?:"[^"]+"|[^(),\s"])+'
_TRANSFORM = re.compile(
    rf"\s*(?:(?P<name>[a-z]+)\s*\(\s*(?:(?P<width>\d+)\s*,\s*)?(?P<inner>{_COLUMN})\s*"
    rf"(?:,\s*(?P<behind>\d+)\s*)?\)|(?P<column>{_COLUMN}))\s*"
)
#: `bucket(16, id) desc nulls last`
ORDER = re.compile(
    r"(?P<term>.+?)(?:\s+(?P<direction>asc|desc))?(?:\s+nulls\s+(?P<nulls>first|last))?\s*",
    re.IGNORECASE,
)


_TRANSFORMS = ("year", "month", "day", "hour", "identity", "bucket", "truncate")


def transform_of(text: str, doing: str) -> tuple[str, str]:
    """`day(placed_at)` → its column, and Iceberg's name of the transform: `day`, `bucket[16]`."""
    match = _TRANSFORM.fullmatch(text)
    if not match:
        raise ConfigError(
            f"{doing}: expected a column, or one of year, month, day, hour(column), "
            "bucket(n, column), truncate(n, column)",
            hint="a column whose name has a space is in double quotes" if " " in text else "",
        )
    if match["column"]:
        return match["column"].replace('"', ""), "identity"
    name = match["name"].removesuffix("s")
    width = match["width"] or match["behind"] if not (match["width"] and match["behind"]) else None
    column = match["inner"].replace('"', "")
    if name in ("year", "month", "day", "hour", "identity") and not width:
        return column, name
    if name in ("bucket", "truncate") and width and 0 < int(width) < 2**31:
        return column, f"{name}[{int(width)}]"
    close = difflib.get_close_matches(name, _TRANSFORMS, n=1, cutoff=0.5)
    if name not in _TRANSFORMS and close:
        raise ConfigError(f"{doing}: {match['name']!r} is unknown; did you mean {close[0]!r}?")
    raise ConfigError(
        f"{doing}: unknown transform, or one without its number; expected "
        "bucket(n, column) or truncate(n, column) with n from 1 to 2147483647, or year, month, "
        "day, hour(column)"
    )
