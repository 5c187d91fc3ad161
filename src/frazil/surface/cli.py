"""The `frazil` command. Results on standard output, progress and errors on standard error.

Exit codes: 0 well, 1 failed, 2 bad configuration, 3 the audit found something, 4 fenced.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from frazil.core import config as configs
from frazil.core.config import Config
from frazil.core.errors import ConfigError, FrazilError, from_traceback

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Streams into Apache Iceberg tables, exactly once, with the proof.",
)
progress = Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


config_app = typer.Typer(no_args_is_help=True, help="What a config file says.")
app.add_typer(config_app, name="config")

_PROVES = {
    "records": "every record is accounted for",
    "batches": "every range of the source was processed in exactly one committed batch; rows are "
    "not told apart by record",
}


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file; see docs/reference/config.md.")],
    until_caught_up: Annotated[
        bool, typer.Option(help="Stop at the end of the topic as it was at the start.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stream Kafka into the table until told to stop."""
    from frazil.sink import Sink, Step

    given = configs.load(config)
    written: dict[int, int] = {}
    began = time.monotonic()

    def on_step(step: Step) -> None:
        if step.name == "written":
            written[step.batch] = step.records
        elif step.name == "done":
            rows = sum(written.values())
            rate = rows / (time.monotonic() - began)
            waiting = len(sink.committer.pending)
            progress.print(
                f"batch {step.batch} committed: {rows:,} rows, {rate:,.0f}/s"
                + (f", {waiting} batches staged behind it" if waiting else "")
            )

    sink = Sink(given, on_step=on_step)
    spark = _session(given)
    query = sink.start(spark)
    progress.print(f"sink {given.sink.id}: epoch {sink.epoch}, position {sink.position.nested()}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    said = ""
    try:
        if until_caught_up:
            sink.wait_until(sink.ends())
        while not until_caught_up:
            if query.awaitTermination(1):
                break  # available-now: everything there was is committed
            sink.check()
            now = sink.committer.progress.blocked or sink.committer.progress.trouble
            if now and now != said:
                progress.print(f"[yellow]waiting: {now}[/yellow]")
            said = now
    except KeyboardInterrupt:
        progress.print("stopping after the batch under way")
    finally:
        sink.stop()
    rows, seconds = sum(written.values()), time.monotonic() - began
    if as_json:
        print(json.dumps({"rows": rows, "seconds": round(seconds, 2), "epoch": sink.epoch,
                          "position": sink.position.nested()}))  # fmt: skip
    else:
        progress.print(f"{rows:,} rows in {seconds:.1f} s; position {sink.position.nested()}")


@app.command()
def audit(
    what: Annotated[str, typer.Argument(metavar="TABLE|CONFIG",
                    help="A sink's TOML file, or a table's name with --catalog.")],
    catalog: Annotated[list[str], typer.Option(
        help="key=value of the catalog, e.g. type=rest; also FRAZIL_CATALOG__… variables.")] = [],  # noqa: B006
    branch: Annotated[str, typer.Option(help="Which branch of the table.")] = "main",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Prove from metadata alone that every offset is there exactly once (exit 3 if not)."""
    from frazil.surface.demo import audit_table
    from frazil.table.audit import audit as examine
    from frazil.table.audit import live_files
    from frazil.table.jvm import Catalog

    if Path(what).suffix == ".toml" or Path(what).is_file():
        given = configs.load(what)
        name, sink, branch = given.tables[0].name, given.sink.id, given.tables[0].branch
    else:
        given, name, sink = _bare(what, catalog), what, ""
    spark = _session(given)
    table = Catalog(spark, given.catalog.name).load(name)
    if table is None:
        raise ConfigError(f"cannot audit table {name}: it does not exist")
    reports = examine(name, table.history(branch), live_files(table, branch), sink)
    if not reports:
        raise ConfigError(f"cannot audit table {name}: no snapshot of it was written by "
                          f"{'sink ' + sink if sink else 'Frazil'}")  # fmt: skip
    if as_json:
        print(json.dumps([report.values() for report in reports]))
    for report in reports:
        if not as_json:
            Console().print(audit_table(report.values()))
            Console().print(
                f"{report.verdict}: {report.written:,} rows in {report.commits} commits; "
                f"{_PROVES[report.proves]}"
            )
    if any(report.verdict != "proven" for report in reports):
        raise typer.Exit(3)


@app.command()
def status(config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
           as_json: Json = False) -> None:  # fmt: skip
    """Position, lag, epoch, staged batches and last commit of a sink, running or not."""
    from frazil.surface.status import status as look

    given = configs.load(config)
    found = look(given, _session(given))
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        typer.echo(f"{key:>16}  {_plain(value)}")


@app.command()
def leftovers(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    remove: Annotated[bool, typer.Option(help="Remove them, too.")] = False,
    as_json: Json = False,
) -> None:
    """Files that killed or failed lives of the sink left behind; nothing live is among them."""
    from frazil.surface.status import leftovers as find

    given = configs.load(config)
    found = find(given, _session(given))
    for table, path in found:
        if remove:
            table.delete(path)
        if not as_json:
            print(path)
    if as_json:
        print(json.dumps({"leftovers": [path for _, path in found], "removed": remove}))
    progress.print(f"{len(found)} files {'removed' if remove else 'found'}")


@app.command()
def demo(
    rows: Annotated[int, typer.Option(help="How many orders to stream.")] = 2_000_000,
    seconds: Annotated[float | None, typer.Option(help="Or for how long to produce them.")] = None,
    partitions: Annotated[int, typer.Option(help="Partitions of the topic.")] = 4,
    keep: Annotated[Path | None, typer.Option(help="Folder for table, config and logs.")] = None,
    as_json: Json = False,
) -> None:
    """Broker, pipeline, two SIGKILLs in the middle of commits, and the audit's verdict."""
    from frazil.surface import demo as show

    if rows < 1 or partitions < 1:
        raise ConfigError("cannot run the demo: --rows and --partitions must be at least 1")
    outcome = show.demo(
        rows=rows, seconds=seconds, partitions=partitions, keep=keep, console=progress
    )
    if as_json:
        print(show.json_line(outcome))
    else:
        show.render(outcome, Console())
    if outcome.verdict != "proven":
        raise typer.Exit(3)


@config_app.command()
def explain(config: Annotated[Path, typer.Argument(help="TOML file.")],
            as_json: Json = False) -> None:  # fmt: skip
    """Which way the data takes, and why; and every setting in effect, secrets masked."""
    given = configs.load(config)
    way, why = configs.way(given)
    settings = configs.settings(given)
    if as_json:
        print(json.dumps({"way": way, "why": why, "settings": settings}))
        return
    typer.echo(f"way: {way}\nwhy: {why}")
    for section, values in settings.items():
        typer.echo(f"\n[{section}]")
        for key, value in values.items():
            typer.echo(f"{key} = {json.dumps(value)}")


@app.command()
def version() -> None:
    """The version of Frazil."""
    from importlib.metadata import version as of

    print(of("frazil"))


def main() -> None:
    """Errors as sentences, not as tracebacks."""
    try:
        code = app(standalone_mode=False) or 0  # without standalone mode click returns Exit's code
    except typer.Exit as end:
        code = end.exit_code
    except typer.Abort:
        code = 1
    except FrazilError as error:
        code = _say(error)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: a wrong option or argument
            print(f"frazil: {error.format_message()}", file=sys.stderr)
            code = 2
        elif found := from_traceback(str(error)):
            code = _say(found)
        else:
            raise
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _say(error: FrazilError) -> int:
    print(f"frazil: {error}", file=sys.stderr)
    return error.exit_code


def _session(given: Config) -> Any:
    from frazil.surface.session import session

    with progress.status("starting Spark"):
        return session(given, say=progress.print)


def _bare(table: str, catalog: list[str]) -> Config:
    """A config with nothing but a catalog, for commands that need no sink."""
    import os

    pairs = dict(pair.partition("=")[::2] for pair in catalog)
    section = configs.overlay({"catalog": pairs}, os.environ).get("catalog", {})
    if not section:
        raise ConfigError(
            f"cannot find table {table}: no catalog is given",
            hint="add --catalog type=… --catalog uri=…, or give the sink's TOML file",
        )
    return configs.from_document(
        {
            "sink": {"id": "audit", "topics": ["none"]},
            "kafka": {"bootstrap.servers": "none"},
            "decode": {"format": "raw"},
            "catalog": section,
            "table": [{"name": table}],
        }
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


if __name__ == "__main__":
    main()
