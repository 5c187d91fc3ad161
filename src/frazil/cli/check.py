"""`frazil check` and `frazil plan`: before a sink runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from frazil.cli.app import (
    ConfigFile,
    ConfigPath,
    Spark,
    app,
    command,
    sink_opener,
    spark_session,
    table_opener,
    traced_config,
    with_place,
)
from frazil.config.error_list import ConfigErrors
from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError
from frazil.render import Report


@command(app)
def check(
    config: ConfigPath,
    write: Annotated[
        bool,
        typer.Option(
            "--write/--no-write",
            help="Write and delete a probe file to check the write permission.",
        ),
    ] = True,
    timeout: Annotated[str, typer.Option(help="How long each check may take: 10s, 1m.")] = "10s",
    spark: Annotated[
        bool, typer.Option("--spark", help="Open catalogs with Spark that need it; slower.")
    ] = False,
) -> Report:
    """Test broker, topics, rights, registry, catalog, storage, position, tables and the newest
    records, and list all that is wrong (exit 1; 2 if the config is; 75 if only servers are away; 3
    if not everything could be checked)."""
    from frazil.ops.check import Check, CheckOptions

    def opener(loaded: Config) -> Any:
        return table_opener(loaded, None if spark else False)

    options = CheckOptions(write, duration(timeout, "--timeout"), spark_session if spark else None)
    return Check(config, opener, options, _sql_errors(config)).run()


def _sql_errors(path: Path) -> ConfigErrors | None:
    """The error of a file of SQL statements; None for a TOML file."""
    if path.suffix != ".sql":
        return None
    errors = ConfigErrors()
    try:
        errors.config, errors.locations = traced_config(path)
    except ConfigError as error:
        errors.add(error)
    return errors


@command(app)
def plan(config: ConfigFile, spark: Spark = None) -> Report:
    """What a start would create (+), change (~) or refuse (!) now; nothing is changed. Exit code:
    that of the start, or 1 if a table is refused."""
    from frazil.ops.plan_report import PlanReport
    from frazil.ops.start_plan import start_plan

    opened = sink_opener(config, spark)
    session = spark_session(config) if config.transform else None
    planned = start_plan(config, opened, session)
    if planned.stops:
        with_place(planned.stops)
    return PlanReport(config, planned)
