"""The `frazil` command. Results on standard output, progress and errors on standard error.

Exit codes: 0 well, 1 failed, 2 bad configuration, 3 the audit found something, dead letters were
rejected again, or no table holds an offset, 4 fenced, 5 an operator must act, 75 try again, 130 or
143 stopped by a signal before it was done.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

try:  # Ctrl-C this early is a normal stop: nothing was begun
    import typer

    from frazil import logs, render
    from frazil.cli import check as _check  # noqa: F401
    from frazil.cli import export as _export  # noqa: F401  commands register themselves
    from frazil.cli import health as _health  # noqa: F401
    from frazil.cli import init as _init  # noqa: F401
    from frazil.cli import sql as _sql  # noqa: F401
    from frazil.cli.app import (
        Apply,
        Branch,
        By,
        Catalog,
        ConfigFile,
        ConfigPath,
        DryRun,
        Json,
        Kinds,
        Offsets,
        Partitions,
        Reason,
        Rejecting,
        Spark,
        Target,
        Topics,
        Unasked,
        app,
        catalog_config,
        command,
        config_app,
        config_argument,
        config_to_run,
        defines_several,
        definition_store,
        dlq_app,
        index_app,
        is_config,
        load_config,
        offsets_app,
        print_report,
        progress,
        sink_opener,
        spark_session,
        stop,
        table_opener,
        traced_config,
        with_place,
    )
    from frazil.cli.log_options import (
        HealthFilePath,
        LogFile,
        LogFormat,
        LogLevel,
        MetricsAddress,
        SparkLog,
        configure_log,
        run_console,
        start_log,
    )
    from frazil.cli.signals import end_children
    from frazil.config import explain as explanation
    from frazil.config.model import Config
    from frazil.config.sections import LogConfig
    from frazil.config.units import duration
    from frazil.errors import ConfigError, FrazilError, counted, from_traceback
    from frazil.offsets import Partition
    from frazil.render import Report, error_values, print_json
    from frazil.sql.definition_files import is_folder
except KeyboardInterrupt:
    sys.exit(130)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda asked: _print_version() if asked else None,
            help="Print the version and exit.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With an error, the whole text from Spark or Python.")
    ] = False,
) -> None:
    global _verbose
    _verbose = verbose


_verbose = False


def _print_version() -> None:
    version()
    raise typer.Exit


@command(app, console=run_console)
def run(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR|TABLE...",
            help="TOML file (see docs/reference/config.md), or SQL. Of several, of a folder, or "
            "of a table of definitions (with --catalog), every sink in one process.",
        ),
    ],
    until_caught_up: Annotated[
        bool, typer.Option(help="Stop at the end of the topic as it was at the start.")
    ] = False,
    metrics: MetricsAddress = "",
    watch: Annotated[
        bool | None,
        typer.Option(help="Several sinks: follow changed files. Off with --until-caught-up."),
    ] = None,
    watch_interval: Annotated[str, typer.Option(help="How often to look at the files.")] = "2s",
    catalog: Catalog = [],  # noqa: B006
    health_file: HealthFilePath = "",
    log_format: LogFormat = "",
    log_level: LogLevel = "",
    log_file: LogFile = "",
    spark_log: SparkLog = "",
) -> Report:
    """Stream Kafka into the tables until stopped: one sink, or several in one process."""
    words = {"format": log_format, "level": log_level, "file": log_file, "spark_level": spark_log}
    start_log(paths[0] if len(paths) == 1 and not catalog else None, words)
    if len(paths) > 1 or catalog or is_folder(paths[0]) or defines_several(paths[0]):
        log = configure_log(LogConfig(), words)
        from frazil.cli.service import ServiceCommand

        seconds = max(0.1, duration(watch_interval, "--watch-interval"))
        watched = watch if watch is not None else not until_caught_up
        service = ServiceCommand(
            [definition_store(str(p), catalog) for p in paths] if catalog else paths,
            run_console(),
            watch=seconds if watched else None,
            until_caught_up=until_caught_up,
            metrics=metrics,
            health_file=health_file,
            spark_level=log.spark_level,
        )
        service.run(stop)
        return service
    if watch is not None:
        raise ConfigError(
            f"cannot {'watch' if watch else 'leave unwatched'} {paths[0]}: one file is one run",
            hint="give the folder that it is in",
        )
    config = config_to_run(paths[0])
    log = configure_log(config.log, words)
    from frazil.cli.run import RunCommand, with_monitoring
    from frazil.monitoring.setup import monitoring_of

    config = replace(with_monitoring(config, metrics, health_file), log=log)
    running = RunCommand(config, run_console(), [monitoring_of])
    running.stream(lambda: spark_session(config), stop, until_caught_up)
    return running


@command(app)
def audit(
    target: Target,
    catalog: Catalog = [],  # noqa: B006
    branch: Branch = "main",
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also read the data files: offset columns and footers."),
    ] = False,
    kafka: Annotated[
        bool | None,
        typer.Option(
            "--kafka/--no-kafka",
            help="Fail if Kafka does not answer, or do not ask it. By default: ask for the lag.",
        ),
    ] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Exit 3 if more offsets than this wait in Kafka.")
    ] = None,
    max_age: Annotated[
        str, typer.Option(help="Exit 3 if offsets wait and the last commit is older: 90s, 10m.")
    ] = "",
    spark: Spark = None,
) -> Report:
    """Prove from metadata alone that every offset is there exactly once (exit 3 if not)."""
    from frazil.auditing import evidence
    from frazil.cli.audit import proof_of

    gc.disable()  # a short process: each collection would walk up to 100,000 snapshots
    if is_config(target):
        return proof_of(
            load_config(target),
            deep=deep,
            kafka=kafka,
            limits=evidence.AuditLimits(max_lag, duration(max_age) if max_age else None),
            spark=spark,
            say=progress.print,
        )
    if kafka or max_lag is not None or max_age:
        raise ConfigError("cannot compare with Kafka: only a sink's TOML file names the broker")
    return evidence.of_table(
        table_opener(catalog_config(target, catalog), spark), target, branch, deep
    )


@command(app)
def completeness(
    config: ConfigFile,
    hour: Annotated[
        str, typer.Argument(help="Hour (2026-11-15T10) or day (2026-11-15) in UTC.")
    ] = "",
    wait: Annotated[str, typer.Option(help="Wait at most this long for it: 90s, 10m.")] = "",
    spark: Spark = None,
) -> Report:
    """Until when the stream is complete, and what holds it back (exit 3 if HOUR is not)."""
    from frazil.ops.completeness import wait_until_complete

    return wait_until_complete(config, sink_opener(config, spark), hour, wait)


@command(app)
def orphans(
    config: ConfigFile,
    remove: Annotated[bool, typer.Option(help="Remove them, too.")] = False,
    older_than: Annotated[str, typer.Option(help="Only files older than this: 6h, 3d.")] = "0s",
) -> Report:
    """Files that killed or failed runs of the sink left behind; never a live file."""
    from frazil.ops import orphans

    age = duration(older_than)
    files = orphans.orphans(config, spark_session(config), age)
    if remove:
        orphans.remove(files)
    progress.print(f"{counted(len(files), 'file')} {'removed' if remove else 'found'}")
    return orphans.OrphansReport([path for _, path in files], remove)


@command(app)
def locate(
    target: Target,
    topic: Annotated[str, typer.Argument(help="Kafka's topic.")],
    partition: Annotated[int, typer.Argument(help="Its partition.", max=2**31 - 1)],
    offset: Annotated[int, typer.Argument(help="Offset to look for.", max=2**63 - 1)],
    table: Annotated[str, typer.Option(help="Only in this table of the sink.")] = "",
    catalog: Catalog = [],  # noqa: B006
    branch: Branch = "main",
    spark: Spark = None,
) -> Report:
    """Which batch, snapshot and files hold an offset (exit 3 if no table holds it)."""
    from frazil.ops import locate

    if not topic.isprintable():
        raise ConfigError(f"cannot look for topic {topic!r}: expected a name that Kafka may have")
    where = Partition(topic, partition)
    if is_config(target):
        config = load_config(target)
        return locate.of_sink(config, sink_opener(config, spark), where, offset, table)
    config = catalog_config(target, catalog)
    opened = table_opener(config, spark)
    return locate.of_table(config.catalog.name, opened, target, where, offset, branch)


@command(app)
def rewind(
    config: ConfigFile,
    to: Annotated[
        str, typer.Option(help='batch:N, a time as 2026-11-15T10:00:00Z, or {"topic": {"0": 17}}.')
    ],
    dry_run: DryRun = False,
    yes: Unasked = False,
    discard_foreign: Annotated[
        bool,
        typer.Option("--discard-foreign", help="Also undo what others wrote to the tables since."),
    ] = False,
    *,
    as_json: bool,
) -> Report:
    """Take all tables of a sink, and its index, back to a cut; the stream goes on from there."""
    from frazil.ops import rewind

    if not (yes or dry_run) and (as_json or not sys.stdin.isatty()):
        raise ConfigError("cannot rewind without a terminal to ask on: expected --yes or --dry-run")
    spark = spark_session(config)
    plan = rewind.preview(config, spark, to, discard_foreign=discard_foreign)
    if plan.refusals:
        print_report(plan, as_json)
        raise plan.refusals[0]
    if dry_run or (plan.nothing and not as_json):
        return plan
    if not as_json:
        print_report(plan, as_json)
    if not yes:
        typer.confirm("this stops a running sink; continue?", abort=True)
    return rewind.rewind(
        config,
        spark,
        to,
        discard_foreign=discard_foreign,
        on_step=lambda name, table: progress.print(f"{name} {table}".rstrip()),
    )


@command(app)
def demo(
    rows: Annotated[int, typer.Option(help="How many orders to stream.")] = 2_000_000,
    seconds: Annotated[
        float | None, typer.Option(help="Produce for this many seconds instead of --rows.")
    ] = None,
    partitions: Annotated[int, typer.Option(help="Partitions of the topic.")] = 4,
    keep: Annotated[Path | None, typer.Option(help="Folder for table, config and logs.")] = None,
) -> Report:
    """Broker, pipeline, two SIGKILLs in the middle of commits, and the audit's verdict."""
    from frazil.testing.demo import demo

    if rows < 1 or partitions < 1:
        raise ConfigError("cannot run the demo: --rows and --partitions must be at least 1")
    with stop.raised():
        return demo(rows=rows, seconds=seconds, partitions=partitions, keep=keep, console=progress)


@command(app)
def selftest(
    config: Annotated[Config, config_argument("A sink's TOML file: its broker, its catalog.")],
    rows: Annotated[int, typer.Option(help="Records of each scratch topic.")] = 20_000,
    steps: Annotated[
        str,
        typer.Option(help="Steps to kill at, comma-separated; by default every step of a batch."),
    ] = "",
    upsert: Annotated[
        bool | None,
        typer.Option(
            "--upsert/--append",
            help="Only an upsert table, or only an append table; by default both.",
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Namespace for its tables; by default one of its own.")
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Remove nothing.")] = False,
    yes: Unasked = False,
    *,
    as_json: bool,
) -> Report:
    """SIGKILL at each step on your own broker and catalog, judged by reading all records (exit 3 if
    not proven); scratch topics and tables are removed."""
    from frazil.testing import scratch
    from frazil.testing.selftest import selftest

    plan = scratch.plan(
        config,
        rows=rows,
        steps=[step.strip() for step in steps.split(",") if step.strip()],
        modes=scratch.MODES if upsert is None else ("upsert",) if upsert else ("append",),
        namespace=namespace,
    )
    for resource in plan.creates:
        progress.print(f"will make {resource}", highlight=False, soft_wrap=True)
    if not (yes or as_json) and sys.stdin.isatty():
        typer.confirm("all of it is removed at the end; continue?", abort=True)
    spark = spark_session(config)
    with stop.raised():
        return selftest(config, plan, spark, progress, keep=keep)


@command(config_app)
def explain(
    config: Annotated[Path, typer.Argument(help="The sink's file: TOML, or SQL.")],
) -> Report:
    """The path that the data takes, and why; every setting in effect, and where it comes from."""
    from frazil.ops.own_settings import own_settings

    loaded, locations = traced_config(config)
    return explanation.explain(loaded, locations, own_settings(loaded))


@command(dlq_app, "list")
def list_dead_letters(
    config: ConfigFile,
    topic: Topics = [],  # noqa: B006
    partition: Partitions = [],  # noqa: B006
    offsets: Offsets = "",
    kind: Kinds = [],  # noqa: B006
    table: Rejecting = [],  # noqa: B006
    replayed: Annotated[
        bool,
        typer.Option(
            "--replayed", help="Dead letters that were replayed, in place of those that wait."
        ),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Dead letters that were replayed, and those that wait.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Number of the newest to show one by one.")] = 10,
) -> Report:
    """How many records were rejected, why, and by which tables; and the newest of them."""
    from frazil.ops import dead_letters

    wanted = dead_letters.selection(config, topic, partition, offsets, kind, table, limit)
    which = "all" if every else "replayed" if replayed else "waiting"
    return dead_letters.list_dead_letters(config, spark_session(config), wanted, which)


@command(dlq_app)
def replay(
    config: Annotated[Config, config_argument("The sink's TOML file, as it is after the fix.")],
    topic: Topics = [],  # noqa: B006
    partition: Partitions = [],  # noqa: B006
    offsets: Offsets = "",
    kind: Kinds = [],  # noqa: B006
    table: Rejecting = [],  # noqa: B006
    limit: Annotated[
        int | None, typer.Option(help="At most this many, in the order of offsets.")
    ] = None,
    dry_run: DryRun = False,
) -> Report:
    """Write dead letters to their tables after a fix, exactly once (exit 3 if some are rejected
    again; those stay)."""
    from frazil.ops import dead_letters

    wanted = dead_letters.selection(config, topic, partition, offsets, kind, table, limit)
    spark = spark_session(config)
    if dry_run:
        report = dead_letters.preview_replay(config, spark, wanted)
    else:
        report = dead_letters.replay(
            config, spark, wanted, lambda step: progress.print(f"batch {step.batch}: {step.name}")
        )
    return dead_letters.ReplayOutput(report, dry_run)


@command(index_app)
def rebuild(config: ConfigFile, dry_run: DryRun = False) -> Report:
    """Write missing index rows again, from the ledgers (exit 3 if some cannot be determined)."""
    from frazil.ops.index_rebuild import rebuild_index

    return rebuild_index(config, spark_session(config), dry_run)


@command(offsets_app, "show")
def show_offsets(config: ConfigFile, spark: Spark = None) -> Report:
    """Position, lag, and what Kafka still has, by partition; what stops the stream, if anything."""
    from frazil.ops.offsets import show_offsets

    return show_offsets(config, sink_opener(config, spark))


@command(offsets_app)
def accept_loss(
    config: ConfigPath,
    lost: Annotated[
        list[str],
        typer.Option(help="TOPIC:PARTITION:START..END, exactly the lost offsets; may be repeated."),
    ] = [],  # noqa: B006
    reason: Reason = "",
    by: By = "",
    apply: Apply = False,
) -> Report:
    """Continue behind offsets that retention deleted before they were read; they count as lost."""
    from frazil.ops import offsets

    return _decide(config, offsets.accept_loss(lost), reason, by, apply)


@command(offsets_app)
def adopt_topic(
    config: ConfigPath,
    topic: Annotated[
        list[str],
        typer.Option(
            help="Only this topic; may be repeated. Default: every topic that was recreated."
        ),
    ] = [],  # noqa: B006
    start: Annotated[str, typer.Option(help="Where to begin: earliest or latest.")] = "earliest",
    same_offsets: Annotated[
        bool,
        typer.Option(
            "--same-offsets", help="Its offsets mean the same records: continue from the position."
        ),
    ] = False,
    reason: Reason = "",
    by: By = "",
    apply: Apply = False,
) -> Report:
    """Accept a recreated topic, or another cluster, as the one the ledger knows."""
    from frazil.ops import offsets

    return _decide(config, offsets.adopt_topic(topic, start, same_offsets), reason, by, apply)


@command(offsets_app)
def seek(
    config: ConfigPath,
    to: Annotated[
        list[str], typer.Option(help="TOPIC:PARTITION:OFFSET to continue from; may be repeated.")
    ],
    reason: Reason = "",
    by: By = "",
    apply: Apply = False,
) -> Report:
    """Move the position. Forward skips records; back reads them again, as a new topic."""
    from frazil.ops import offsets

    return _decide(config, offsets.seek(to), reason, by, apply)


@command(offsets_app)
def confirm(
    config: ConfigFile,
    table: Annotated[str, typer.Option(help="The table whose history was expired.")],
    reason: Reason = "",
    by: By = "",
    apply: Apply = False,
) -> Report:
    """Confirm that a table whose history was expired holds everything below its ledger's end."""
    from frazil.ops import offsets

    _require_reason("confirm", reason, apply)
    note = offsets.operator_note("confirm", reason, by) if apply else None
    return offsets.confirm(config, spark_session(config), table, note)


def _require_reason(command: str, reason: str, apply: bool) -> None:
    if apply and not reason.strip():
        raise ConfigError(
            f"cannot {command}: expected a --reason, found none",
            hint="the reason is kept in the ledger, for future audits",
        )


def _decide(path: Path, wanted: Any, reason: str, by: str, apply: bool) -> Report:
    from frazil.ops import offsets

    config = load_config(path)
    _require_reason(wanted.command, reason, apply)
    spark = spark_session(config)
    plan = offsets.preview(config, spark, wanted, path)
    if apply and plan.decision:
        plan = offsets.apply(config, spark, plan, offsets.operator_note(wanted.command, reason, by))
    return plan


@app.command()
def version(as_json: Json = False) -> None:
    """The version of Frazil."""
    from importlib.metadata import version as of

    if as_json:
        print_json({"version": of("frazil")})
    else:
        print(of("frazil"))


def main() -> None:
    """Run a command; errors are printed as sentences, not as tracebacks."""
    stop.install()
    render.json_printed = False
    try:
        code = app(standalone_mode=False) or 0  # without standalone mode click returns Exit's code
    except typer.Exit as end:
        code = end.exit_code
    except (typer.Abort, KeyboardInterrupt):  # PySpark raises the latter while it starts
        code = stop.exit_code if stop.signal else 1
        end_children()
    except BrokenPipeError:  # the reader has closed the pipe
        code = _CLOSED
    except SystemExit as end:  # click's own answer to that
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = _CLOSED
    except FrazilError as error:
        code = _say(with_place(error))
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: a wrong option or argument
            if message := error.format_message():  # a group without a command has shown its help
                _say_wrong_usage(message)
            code = 2
        else:
            code = _say(from_traceback(str(error)) or _unexpected(error))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # else the interpreter tells of it at its end
        code = _CLOSED
    if code == _CLOSED:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logs.remove()
    sys.exit(code)


#: As a shell reports a process that SIGPIPE ended.
_CLOSED = 141


def _say_wrong_usage(message: str) -> None:
    print(f"frazil: {message}", file=sys.stderr)
    _print_error(ConfigError(message, hint="frazil COMMAND --help"))


def _print_error(error: FrazilError) -> None:
    """With `--json`: the error on standard output, unless a report is there already."""
    if "--json" in sys.argv[1:] and not render.json_printed:
        values = error_values(error)
        with suppress(BrokenPipeError):
            print_json({"error": logs.secrets_masked(values)})


def _unexpected(error: Exception) -> FrazilError:
    """An error that Frazil does not translate: a defect, but no reason for a traceback."""
    defect = FrazilError(
        f"unexpected error: {type(error).__name__}: {error}"[:2000],
        hint="this error is not one that Frazil knows: please report it with the file below",
    )
    defect.detail = "".join(traceback.format_exception(error))
    return defect


def _say(error: FrazilError) -> int:
    """Where the log is on standard error, what reads it expects its lines alone."""
    _print_error(error)
    if logs.active() and not error.logged:
        text = f"{error.log_text}; hint: {error.hint}" if error.hint else error.log_text
        fields = {"event": "exit", "error": type(error).__name__, "exit_code": error.exit_code}
        logging.getLogger("frazil").error("%s", text, extra={"fields": fields})
    if logs.installed():
        return error.exit_code
    shown = str(error)
    if logs.active() and not sys.stderr.isatty():  # another log, that of the process's parent
        shown = f"{error.log_text}\nhint: {error.hint}" if error.hint else error.log_text
    print(f"frazil: {logs.secrets_masked(shown)}", file=sys.stderr)
    if error.detail and _verbose:
        print(logs.secrets_masked(error.detail), file=sys.stderr)
    elif error.detail:
        with suppress(OSError):  # no place to write it: the message is printed already
            number, path = tempfile.mkstemp(prefix="frazil-error-", suffix=".txt")
            with open(number, "w", encoding="utf-8", errors="replace") as file:
                file.write(logs.secrets_masked(error.detail))
            print(f"the whole error: {path}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
