"""`frazil config export`: the same sink in the other language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frazil.cli.app import Json, config_app
from frazil.errors import ConfigError
from frazil.render import print_json


@config_app.command("export")
def export(
    config: Annotated[Path, typer.Argument(help="The sink's file: TOML, or SQL.")],
    to_sql: Annotated[bool, typer.Option("--sql", help="As SQL statements.")] = False,
    to_toml: Annotated[bool, typer.Option("--toml", help="As a TOML file.")] = False,
    sink: Annotated[str, typer.Option(help="Which sink, if the file defines several.")] = "",
    as_json: Json = False,
) -> None:
    """Print a config as SQL or as TOML; by default as the one that it is not. Paths become
    absolute, references to secrets stay, and FRAZIL_ variables do not count.

    Example: frazil config export orders.toml --sql > orders.sql
    """
    import tomli_w

    from frazil.config.model import load
    from frazil.config.serializer import document_of
    from frazil.sql.definitions import config_of_file
    from frazil.sql.export import sql_of

    if to_sql and to_toml:
        raise ConfigError("cannot export as SQL and as TOML: expected one of --sql and --toml")
    from_sql = config.suffix == ".sql"
    path = config.absolute()
    if sink and not from_sql:
        raise ConfigError(f"cannot find sink {sink}: a TOML file defines one sink, its own")
    loaded = config_of_file(path, sink, {})[0] if from_sql else load(path, {})
    language = "sql" if to_sql or not (to_toml or from_sql) else "toml"
    text = sql_of(loaded) if language == "sql" else tomli_w.dumps(document_of(loaded))
    if as_json:
        print_json({"sink": loaded.sink.id, "language": language, "text": text})
    else:
        print(text, end="")
