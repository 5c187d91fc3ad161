"""The application that the modules of commands register with: argument types, and how a command's
report is printed. `frazil.cli.commands` has `main`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from frazil import logs
from frazil.cli.examples import EXAMPLES
from frazil.cli.signals import StopSignal
from frazil.config import model as configs
from frazil.config import origins
from frazil.config.environment import overlay
from frazil.config.model import Config
from frazil.config.origins import Origins
from frazil.config.secret_values import secret_values
from frazil.errors import ConfigError, FrazilError
from frazil.render import Report, output, print_json, show
from frazil.sql.definition_files import DefinitionFiles, DefinitionStore

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Streams into Apache Iceberg tables, exactly once, with the proof.",
)
progress = Console(stderr=True)
#: Lines for people; what stands in brackets is no markup.
say = functools.partial(progress.print, markup=False, highlight=False)
stop = StopSignal(before_exit=progress.show_cursor)
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Spark = Annotated[
    bool | None,
    typer.Option("--spark/--no-spark", help="Open tables with Spark; by default only if needed."),
]


config_app = typer.Typer(
    no_args_is_help=True, help="The settings of a config file, and where each comes from."
)
app.add_typer(config_app, name="config")
dlq_app = typer.Typer(no_args_is_help=True, help="Dead letters: records that were rejected.")
app.add_typer(dlq_app, name="dead-letters")
app.add_typer(dlq_app, name="dlq", hidden=True)  # the common name
index_app = typer.Typer(no_args_is_help=True, help="The offset index.")
app.add_typer(index_app, name="index")
offsets_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The position of a stream, and an operator's decisions about it. Without --apply a "
    "command prints what it would do. With --apply it does it, and a running "
    "sink is stopped (fenced).",
)
app.add_typer(offsets_app, name="offsets")


def load_config(path: str | Path) -> Config:
    """The config of a TOML file, or of the only sink of a file of SQL statements."""
    return traced_config(path)[0]


def traced_config(path: str | Path) -> tuple[Config, Origins]:
    """The config, and the origin of each setting."""
    if Path(path).suffix != ".sql":
        config, places = configs.traced(path)
    else:
        from frazil.sql.definitions import config_of_file

        config, places = config_of_file(path)
    logs.mask(secret_values(config))  # whatever a library below says of them
    _places.clear()
    _places.update(places)
    return config, places


#: Origins of the settings of the config that was loaded last.
_places: Origins = {}


def with_place(error: FrazilError) -> FrazilError:
    """The error, with the line of the setting that it is about, where that was found only when a
    server or a library was asked."""
    if isinstance(error, ConfigError) and error.path:
        place = origins.location(_places, error.path)
        if place and f"({place})" not in error.message:
            error.placed(place)
    return error


def config_to_run(path: Path) -> Config:
    """The config of a file, if it does not stop its sink."""
    if not path.suffix and not path.exists():
        raise ConfigError(
            f"cannot run {path}: there is no such file or folder",
            hint=f"frazil sql FILE --definitions {path} makes it a folder of definitions",
        )
    config = load_config(path)
    if path.suffix == ".sql" and config.sink.id not in _sql_configs(path):
        raise ConfigError(
            f"cannot run {path}: STOP SINK says that sink {config.sink.id} is not to run",
            hint="START SINK in the file, or without STOP SINK",
        )
    return config


def _sql_configs(path: Path) -> Mapping[str, Config]:
    from frazil.sql.definitions import configs_of

    return configs_of(path)


def defines_several(path: Path) -> bool:
    """Does a file of SQL statements define several sinks?"""
    return path.suffix == ".sql" and len(_sql_configs(path)) > 1


def config_argument(text: str) -> Any:
    return typer.Argument(parser=load_config, help=text)


ConfigFile = Annotated[Config, config_argument("The sink's file: TOML, or SQL.")]
ConfigPath = Annotated[Path, typer.Argument(help="The sink's file: TOML, or SQL.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TABLE|CONFIG", help="A sink's TOML or SQL file, or a table's name with --catalog."
    ),
]
Catalog = Annotated[
    list[str],
    typer.Option(
        help="key=value of the catalog, e.g. type=rest; also FRAZIL_CATALOG__… variables."
    ),
]
Branch = Annotated[str, typer.Option(help="Branch of the table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")]
Unasked = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Topics = Annotated[list[str], typer.Option("--topic", help="Only this topic; may be repeated.")]
Partitions = Annotated[
    list[int], typer.Option("--partition", help="Only this partition; may be repeated.")
]
Offsets = Annotated[str, typer.Option(help="One offset, or START..END without END itself.")]
Kinds = Annotated[
    list[str], typer.Option("--kind", help="Only this kind: route, misfit, …; may be repeated.")
]
Apply = Annotated[
    bool,
    typer.Option("--apply", help="Apply the decision; a running sink is stopped (fenced)."),
]
Reason = Annotated[str, typer.Option(help="Reason; the ledger keeps it with who and when.")]
By = Annotated[str, typer.Option(help="Who; by default the user and the host.")]
Rejecting = Annotated[
    list[str], typer.Option("--table", help="Only those that this table rejected; may be repeated.")
]


def command(
    group: typer.Typer, name: str | None = None, console: Callable[[], Console] = output
) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Registers a function as a command with `--json`: the report that it returns is printed, and
    the command ends with the report's exit code. `as_json` is passed on where it is asked for."""

    def register(function: Callable[..., Report]) -> Callable[..., Report]:
        signature = inspect.signature(function, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = dict(signature.parameters)
        parameters["as_json"] = inspect.Parameter("as_json", kind, default=False, annotation=Json)

        @functools.wraps(function)
        def run_command(**given: Any) -> None:
            report = function(**{name: given[name] for name in signature.parameters})
            print_report(report, given["as_json"], console())
            if code := getattr(report, "exit_code", 0):
                raise typer.Exit(code)

        run_command.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        group.command(name, help=_help(group, name, function))(run_command)
        return function

    return register


def _help(group: typer.Typer, name: str | None, function: Callable[..., Report]) -> str:
    """The docstring, and an example."""
    name = name or function.__name__.replace("_", "-")
    groups = [str(one.name) for one in app.registered_groups if one.typer_instance is group]
    path = " ".join([*groups[:1], name])
    example = f"\n\nExample: frazil {path} {EXAMPLES[path]}" if path in EXAMPLES else ""
    return (inspect.getdoc(function) or "") + example


def print_report(report: Report, as_json: bool, console: Console | None = None) -> None:
    if as_json:
        print_json(report)
    else:
        show(report, console or output())


def spark_session(config: Config) -> Any:
    from frazil.spark.session import session

    with progress.status("starting Spark"):
        return session(config, log_level=config.log.spark_level, say=say)


def table_opener(config: Config, spark: bool | None) -> Any:
    from frazil.spark.open_table import opener

    return opener(config, spark, say)


def sink_opener(config: Config, spark: bool | None) -> Any:
    """The tables of a sink: a catalog that its first start makes has none yet."""
    from frazil.spark.open_table import with_new_catalog

    return with_new_catalog(config, table_opener(config, spark))


def is_config(target: str) -> bool:
    """Whether it is a config file; else a table name, possibly too long or odd for a path."""
    try:
        return Path(target).suffix in (".toml", ".sql") or Path(target).is_file()
    except (OSError, ValueError):
        return False


def catalog_config(table: str, catalog: list[str]) -> Config:
    """A config with nothing but a catalog, for commands that need no sink."""
    pairs = dict(pair.partition("=")[::2] for pair in catalog)
    section = overlay({"catalog": pairs}, os.environ).get("catalog", {})
    if not section:
        raise ConfigError(
            f"cannot find table {table}: no catalog is given",
            hint="add --catalog type=… --catalog uri=…, or give the sink's TOML file",
        )
    return configs.catalog_only(table, section)


def definition_store(place: str, catalog: list[str]) -> DefinitionStore:
    """Where definitions are kept: a directory, or with a catalog a table."""
    if not catalog:
        return DefinitionFiles(place, create=True)
    from frazil.sql.definition_table import DefinitionTable

    return DefinitionTable(place, catalog_config(place, catalog), say)
