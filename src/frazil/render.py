"""Output of commands: text is never truncated, nouns agree with numbers, verdicts have colours."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

#: The width of a pipe or file: wider than any line, so that no line is folded.
_WIDE = 10_000


def output() -> Console:
    """Standard output: a terminal with its own width; a pipe or file without folding or colours."""
    return Console(width=None if sys.stdout.isatty() else _WIDE)


class TextTable(Table):
    """A table whose cells are folded on a narrow terminal, never truncated."""

    def add_column(self, *given: Any, **settings: Any) -> None:
        super().add_column(*given, **{"overflow": "fold", **settings})


def colour(verdict: str) -> str:
    """The colour of a verdict, for a terminal with colours and without NO_COLOR."""
    return {"proven": "green", "accepted loss": "yellow"}.get(verdict, "red")
