"""What an error of the config says besides its text: the setting, its location, the nearest known
word.

In: the path of a setting, as `("table", "0", "mode")`, collected while the error passes through its
sections. Out: a `ConfigError` that names the argument, line or variable. Runs on the driver.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from frazil.errors import ConfigError


@contextmanager
def within(*section: str) -> Iterator[None]:
    """Prefixes the path of a setting's error with its section."""
    try:
        yield
    except ConfigError as error:
        error.path = (*section, *error.path)
        raise


@contextmanager
def placed(shown: Callable[[tuple[str, ...]], str]) -> Iterator[None]:
    """Adds the location of the setting to an error, from its path. An outer context overrides an
    inner one: argument of a section, argument of the config, line of a file or variable."""
    try:
        yield
    except ConfigError as error:
        if where := shown(error.path):
            error.placed(where)
        raise


def argument(path: tuple[str, ...]) -> str:
    """The name of a setting in Python: `argument tables[0].mode`, `kafka['group.id']`."""
    if not path:
        return ""
    first = f"{path[0]}s" if path[0] in ("table", "route") else path[0]
    below = (
        f".{word}" if word.isidentifier() else f"[{word}]" if word.isdigit() else f"[{word!r}]"
        for word in path[1:]
    )
    return f"argument {first}{''.join(below)}"


def nearest(word: str, known: Any, shown: Any = ()) -> str:
    """`shown`: in place of the known words, where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(shown or known)}"
