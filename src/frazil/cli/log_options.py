"""Where the log of `frazil run` goes, by its options and `[log]`.

A terminal shows progress in lines for people. Everything else gets log lines: standard error that
is no terminal, and a file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from frazil import logs
from frazil.cli.app import progress
from frazil.config.model import document
from frazil.config.monitoring_checks import LOG_LEVELS, SPARK_LEVELS, check_log
from frazil.config.sections import LogConfig
from frazil.errors import ConfigError

MetricsAddress = Annotated[
    str, typer.Option(help="HOST:PORT of /metrics for Prometheus; over \\[metrics] address.")
]
HealthFilePath = Annotated[
    str,
    typer.Option("--health-file", help="File for `frazil health FILE`; over \\[health] file."),
]
LogFormat = Annotated[
    str,
    typer.Option(
        help="text or json; by default text, and progress on a terminal.",
        autocompletion=lambda: ["text", "json"],
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(help="DEBUG, INFO, WARNING or ERROR.", autocompletion=lambda: [*LOG_LEVELS]),
]
LogFile = Annotated[str, typer.Option(help="By default standard error.")]
SparkLog = Annotated[
    str,
    typer.Option(
        help="Level of Spark's own log on standard error: OFF, ERROR, WARN, INFO …",
        autocompletion=lambda: [*SPARK_LEVELS],
    ),
]


def configure_log(config: LogConfig, options: Mapping[str, str]) -> LogConfig:
    """Start the log. Options that are given are over `config`. Returns both together."""
    given = {name: text for name, text in options.items() if text}
    for name in given.keys() & {"level", "spark_level"}:
        given[name] = given[name].upper()
    config = replace(config, **given)
    check_log(config)
    if config.format != "auto" or config.file or not sys.stderr.isatty():
        shown = "text" if config.format == "auto" else config.format
        try:
            logs.configure(shown, config.level, config.file)
        except ConfigError:
            logs.configure(shown, config.level)  # this error is logged, too
            raise
    return config


def start_log(path: Path | None, options: Mapping[str, str]) -> None:
    """The log, before the config is known to be right: its errors go where `[log]` and the options
    say, as far as these can be read."""
    config = LogConfig()
    if path is not None and path.suffix != ".sql":
        with suppress(ConfigError, TypeError):
            given = LogConfig(**document(path).get("log", {}))
            check_log(given)
            config = given
    configure_log(config, options)


def run_console() -> Console:
    """Where `frazil run` shows its progress: nowhere if the log is on standard error, or if that is
    no terminal."""
    quiet = logs.installed() or not sys.stderr.isatty()
    return Console(quiet=True) if quiet else progress
