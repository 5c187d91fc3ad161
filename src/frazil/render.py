"""How commands print: nothing is cut, numbers agree with their nouns, verdicts have colours."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from frazil.errors import counted as counted  # for all who print

#: Of a pipe or a file: wider than any line, so that nothing is folded there.
_WIDE = 10_000


def output() -> Console:
    """Standard output. A terminal has its width; anything else has none, and no colours."""
    return Console(width=None if sys.stdout.isatty() else _WIDE)


class TextTable(Table):
    """A table whose cells are folded where a terminal is narrow, and never cut."""

    def add_column(self, *given: Any, **settings: Any) -> None:
        super().add_column(*given, **{"overflow": "fold", **settings})


def colour(verdict: str) -> str:
    """For a terminal that has colours and no NO_COLOR."""
    return {"proven": "green", "accepted loss": "yellow"}.get(verdict, "red")
