"""Output of commands: one way to print a report as JSON, and one on the console.

A report is a dataclass, or a dictionary of JSON values. Text is never truncated, nouns agree with
numbers, verdicts have colours.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from operator import attrgetter
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from frazil.errors import FrazilError
from frazil.offsets import Cut, Partition, Range

#: The width of a pipe or file: wider than any line, so that no line is folded.
_WIDE = 10_000

#: What a report prints: plain text, text with colours, or a table.
Line = str | Text | Table


class Report(Protocol):
    """The result of a command. It ends with the report's `exit_code`, if there is one.

    `--json` prints the attributes that the words of its `JSON` name, by default all fields:
    `name`, or `key=path.to.name`. `*name` merges the values of an attribute into those of the
    report, and a single `=name` is the whole report.
    """

    def lines(self) -> Iterable[Line]: ...


def json_values(value: Any) -> Any:
    """A report, or a part of it, as JSON."""
    if isinstance(value, Cut):
        return value.nested()
    if isinstance(value, datetime):
        return (value.astimezone(timezone.utc) if value.tzinfo else value).isoformat()
    if isinstance(value, Range):
        return [*value.partition, value.start, value.end]
    names = getattr(value, "JSON", "")
    if names.startswith("="):
        return json_values(getattr(value, names[1:]))
    if names or isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return _members(value)
    return list(map(json_values, value)) if isinstance(value, (list, tuple)) else value


def _members(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Partition):
        return {"topic": value.topic, "partition": value.number}
    if isinstance(value, Mapping):
        return {key: json_values(member) for key, member in value.items()}
    members: dict[str, Any] = {}
    words = getattr(value, "JSON", "").split()
    for word in words or [field.name for field in dataclasses.fields(value)]:
        key, _, path = word.partition("=")
        member = attrgetter(path or key.lstrip("*"))(value)
        if key.startswith("*") or isinstance(member, Partition):
            members |= _members(member)
        else:
            members[key] = json_values(member)
    return members


def error_values(error: FrazilError) -> dict[str, str]:
    """An error in JSON: the same everywhere."""
    return {"class": type(error).__name__, "message": error.message, "hint": error.hint}


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """`main` ends the command: rich would end the process with 1."""
        raise BrokenPipeError


def output() -> Console:
    """Standard output: a terminal with its own width; a pipe or file without folding or colours."""
    return _Output(width=None if sys.stdout.isatty() else _WIDE)


#: Has standard output a JSON document of this command?
json_printed = False


def print_json(report: Any) -> None:
    """One line, at once."""
    global json_printed
    json_printed = True
    print(json.dumps(json_values(report)), flush=True)


def show(report: Report, console: Console) -> None:
    for line in report.lines():
        if isinstance(line, Table):
            console.print(line)
        else:
            console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)


def text_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> Table:
    """Plain text in cells that are folded on a narrow terminal, never truncated. `right`: columns
    that are aligned to the right."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def label(value: str) -> str:
    """A value of JSON, such as `cannot_tell`, in words."""
    return value.replace("_", " ")


def colour(verdict: str) -> str:
    """The colour of a verdict, for a terminal with colours and without NO_COLOR."""
    return {"proven": "green", "accepted_loss": "yellow"}.get(verdict, "red")
