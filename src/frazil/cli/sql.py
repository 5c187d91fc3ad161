"""`frazil sql`: statements from files, from the command line, from standard input or a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from frazil.cli.app import Catalog, Json, app, definition_store
from frazil.errors import ConfigError, counted
from frazil.render import output, print_json, show
from frazil.sql.definition_files import decoded, read_file
from frazil.sql.definitions import MemoryStore

#: A file's name for standard input.
_STANDARD_INPUT = "-"


@app.command()
def sql(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE...|-]",
            help="Files of statements; - is standard input. Without files, and without -c, a "
            "prompt, or standard input if that is no terminal.",
        ),
    ] = None,
    commands: Annotated[
        list[str],
        typer.Option("--command", "-c", help="Statements; may be repeated."),
    ] = [],  # noqa: B006
    definitions: Annotated[
        str,
        typer.Option(
            metavar="DIR|TABLE",
            help="Where definitions are kept: a directory, or with --catalog a table. By "
            "default they last for this command only.",
        ),
    ] = "",
    catalog: Catalog = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Define, show, start and stop sinks by SQL statements (docs/reference/sql.md).

    Example: frazil sql orders.sql --definitions sinks
    """
    from frazil.cli.sql_session import SqlSession

    files = files or []
    paths = [Path(file) for file in files if file != _STANDARD_INPUT]
    base = paths[0].parent if paths else Path()
    if catalog and not definitions:
        raise ConfigError("cannot use --catalog: expected --definitions TABLE, found none")
    store = definition_store(definitions, catalog) if definitions else MemoryStore(base)
    session = SqlSession(store, show_json=as_json)
    if not files and not commands:
        if sys.stdin.isatty() and not as_json:
            from frazil.cli.sql_prompt import prompt

            prompt(session)
            return
        files = [_STANDARD_INPUT]
    texts = [_read(file) for file in files]
    texts += [_argument(f"-c {number}", text) for number, text in enumerate(commands, 1)]
    if code := _execute(session, texts, as_json):
        raise typer.Exit(code)


def _read(file: str) -> tuple[str, str]:
    """The name and the text of a file."""
    if file != _STANDARD_INPUT:
        return file, read_file(file)
    return "standard input", decoded("standard input", sys.stdin.buffer.read())


def _argument(name: str, text: str) -> tuple[str, str]:
    return name, decoded(name, text.encode(errors="surrogateescape"))


def _execute(session: Any, texts: Sequence[tuple[str, str]], as_json: bool) -> int:
    """All statements, if all can be read, up to the first that fails; the exit code is its."""
    from frazil.sql.tree_reader import read_statements

    statements = [
        statement for name, text in texts for statement in read_statements(text, Path(name).name)
    ]
    if not statements:
        names = ", ".join(name for name, _ in texts)
        raise ConfigError(f"cannot execute {names}: there is no statement")
    reports: list[Any] = []
    left = len(statements)
    try:
        for statement in statements:
            left -= 1
            report = session.execute(statement)
            reports.append(report)
            if not as_json:
                show(report, output())
            if report.exit_code:
                break
    finally:
        if as_json:
            print_json({"statements": reports})
        if left:
            print(f"{counted(left, 'statement')} not executed", file=sys.stderr)
    return int(reports[-1].exit_code)
