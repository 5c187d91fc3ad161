"""The `frazil` command. Results on standard output, progress and errors on standard error.

Exit codes: 0 well, 1 failed, 2 bad configuration, 3 the audit found something, dead letters were
rejected again, or no table holds an offset, 4 fenced, 130 or 143 stopped by a signal before it was
done.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

try:  # Ctrl-C this early is a normal stop: nothing was begun
    import typer
    from rich.console import Console

    from frazil.cli.signals import StopSignal, end_children
    from frazil.config import explain as explanation
    from frazil.config import model as configs
    from frazil.config.environment import overlay
    from frazil.config.model import Config
    from frazil.config.units import duration
    from frazil.errors import ConfigError, FrazilError, counted, from_traceback
    from frazil.offsets import Partition
    from frazil.render import output
except KeyboardInterrupt:
    sys.exit(130)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Streams into Apache Iceberg tables, exactly once, with the proof.",
)
progress = Console(stderr=True)
stop = StopSignal(before_exit=progress.show_cursor)
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Spark = Annotated[
    bool | None,
    typer.Option("--spark/--no-spark", help="Open tables with Spark; by default only if needed."),
]


config_app = typer.Typer(no_args_is_help=True, help="What a config file says.")
app.add_typer(config_app, name="config")
dlq_app = typer.Typer(no_args_is_help=True, help="Dead letters: records that were rejected.")
app.add_typer(dlq_app, name="dead-letters")
app.add_typer(dlq_app, name="dlq", hidden=True)  # the common name
index_app = typer.Typer(no_args_is_help=True, help="The offset index.")
app.add_typer(index_app, name="index")
offsets_app = typer.Typer(
    no_args_is_help=True,
    help="Where a stream stands, and what a person may decide about it. Without --yes it is said "
    "what would be; with it, a running sink is stopped (fenced).",
)
app.add_typer(offsets_app, name="offsets")

Topics = Annotated[list[str], typer.Option("--topic", help="Of this topic; may be repeated.")]
Partitions = Annotated[list[int], typer.Option("--partition", help="Of this partition.")]
Offsets = Annotated[str, typer.Option(help="One offset, or START..END without END itself.")]
Kinds = Annotated[list[str], typer.Option("--kind", help="Of this kind: route, misfit, …")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; a running sink is fenced.")]
Reason = Annotated[str, typer.Option(help="Why; it stands in the ledger with who and when.")]
By = Annotated[str, typer.Option(help="Who; by default the user and the host.")]
Rejecting = Annotated[list[str], typer.Option("--table", help="Rejected by this table.")]


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
        bool, typer.Option("--verbose", help="With an error, all that Spark or Python said of it.")
    ] = False,
) -> None:
    global _verbose
    _verbose = verbose


_verbose = False


def _print_version() -> None:
    version()
    raise typer.Exit


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file; see docs/reference/config.md.")],
    until_caught_up: Annotated[
        bool, typer.Option(help="Stop at the end of the topic as it was at the start.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stream Kafka into the tables until stopped."""
    from frazil.cli.run import RunCommand

    given = configs.load(config)
    running = RunCommand(given, progress)
    done = running.stream(_session(given), stop, until_caught_up)
    if as_json:
        print(json.dumps(running.values()))
    else:
        running.show()
    if not done:
        raise typer.Exit(stop.exit_code)


@app.command()
def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TABLE|CONFIG", help="A sink's TOML file, or a table's name with --catalog."
        ),
    ],
    catalog: Annotated[
        list[str],
        typer.Option(
            help="key=value of the catalog, e.g. type=rest; also FRAZIL_CATALOG__… variables."
        ),
    ] = [],  # noqa: B006
    branch: Annotated[str, typer.Option(help="Which branch of the table.")] = "main",
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read the files, too: offsets, and footers against manifests."),
    ] = False,
    against_kafka: Annotated[
        bool | None,
        typer.Option(
            "--against-kafka/--no-broker",
            help="Kafka must answer, or is not asked; by default it is asked for the lag.",
        ),
    ] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Exit 3 if more offsets than this wait in Kafka.")
    ] = None,
    max_age: Annotated[
        str, typer.Option(help="Exit 3 if offsets wait and the last commit is older: 90s, 10m.")
    ] = "",
    spark: Spark = None,
    as_json: Json = False,
) -> None:
    """Prove from metadata alone that every offset is there exactly once (exit 3 if not)."""
    from frazil.auditing import evidence
    from frazil.spark.open_table import opener

    gc.disable()  # a short process: each collection would walk up to 100,000 snapshots
    if _is_file(target):
        given = configs.load(target)
        opened = opener(given, spark, progress.print)
        limits = evidence.AuditLimits(max_lag, duration(max_age) if max_age else None)
        report = evidence.of_config(
            given, opened, deep=deep, ask=against_kafka, limits=limits, say=progress.print
        )
    elif against_kafka or max_lag is not None or max_age:
        raise ConfigError("cannot compare with Kafka: only a sink's TOML file says where it is")
    else:
        opened = opener(_bare(target, catalog), spark, progress.print)
        report = evidence.of_table(opened, target, branch, deep)
    if as_json:
        print(json.dumps(evidence.values(report)))
    else:
        evidence.show(report, output())
    if not report.proven:
        raise typer.Exit(3)


@app.command()
def status(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    spark: Spark = None,
    as_json: Json = False,
) -> None:
    """Position, lag, counts, staged batches and last commit of a sink, running or not."""
    from frazil.ops.startup_checks import show_doubts
    from frazil.ops.status import status as look
    from frazil.spark.open_table import opener

    given = configs.load(config)
    report = look(given, opener(given, spark, progress.print))
    if as_json:
        print(json.dumps(report))
        return
    doubts = report.pop("in_doubt")
    for kind, summary in report.pop("rejected_by_kind").items():
        report[f"rejected: {kind}"] = (
            f"{summary['records']:,} of the newest; the last: {summary['last']}"
        )
    for key, value in report.items():
        typer.echo(f"{key:>16}  {_plain(value)}")
    show_doubts(doubts, output())


@app.command("completeness")
def complete(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    hour: Annotated[
        str, typer.Argument(help="An hour, 2026-11-15T10, or a day, 2026-11-15, in UTC.")
    ] = "",
    wait: Annotated[str, typer.Option(help="Wait so long for it: 90s, 10m.")] = "",
    spark: Spark = None,
    as_json: Json = False,
) -> None:
    """Until when the stream is complete, and what holds it back (exit 3 if HOUR is not)."""
    from frazil.ops import completeness as hours
    from frazil.spark.open_table import opener

    given = configs.load(config)
    report = hours.awaited(given, opener(given, spark, progress.print), hour, wait)
    if as_json:
        print(json.dumps(hours.values(report)))
    else:
        hours.show(report, output())
    if report.complete is False:
        raise typer.Exit(3)


@app.command("orphans")
def leftovers(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    remove: Annotated[bool, typer.Option(help="Remove them, too.")] = False,
    older_than: Annotated[str, typer.Option(help="Only files older than this: 6h, 3d.")] = "0s",
    as_json: Json = False,
) -> None:
    """Files that killed or failed runs of the sink left behind; never a live file."""
    from frazil.ops import status as looking

    given = configs.load(config)
    age = duration(older_than)
    files = looking.orphans(given, _session(given), age)
    if remove:
        looking.remove(files)
    for _, path in files if not as_json else ():
        print(path)
    if as_json:
        print(json.dumps({"orphans": [path for _, path in files], "removed": remove}))
    progress.print(f"{counted(len(files), 'file')} {'removed' if remove else 'found'}")


@app.command()
def locate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TABLE|CONFIG", help="A sink's TOML file, or a table's name with --catalog."
        ),
    ],
    topic: Annotated[str, typer.Argument(help="Kafka's topic.")],
    partition: Annotated[int, typer.Argument(help="Its partition.", max=2**31 - 1)],
    offset: Annotated[int, typer.Argument(help="The offset that is looked for.", max=2**63 - 1)],
    table: Annotated[str, typer.Option(help="Only in this table of the sink.")] = "",
    catalog: Annotated[
        list[str],
        typer.Option(
            help="key=value of the catalog, e.g. type=rest; also FRAZIL_CATALOG__… variables."
        ),
    ] = [],  # noqa: B006
    branch: Annotated[str, typer.Option(help="Which branch of the table.")] = "main",
    spark: Spark = None,
    as_json: Json = False,
) -> None:
    """Which batch, snapshot and files hold an offset (exit 3 if no table holds it)."""
    from frazil.ops import locate as locating
    from frazil.spark.open_table import opener

    if not topic.isprintable():
        raise ConfigError(f"cannot look for topic {topic!r}: expected a name that Kafka may have")
    where = Partition(topic, partition)
    if _is_file(target):
        given = configs.load(target)
        opened = opener(given, spark, progress.print)
        report = locating.of_sink(given, opened, where, offset, table)
    else:
        given = _bare(target, catalog)
        opened = opener(given, spark, progress.print)
        report = locating.of_table(given.catalog.name, opened, target, where, offset, branch)
    if as_json:
        print(json.dumps(locating.values(report)))
    else:
        locating.show(report, output())
    if not report.held:
        raise typer.Exit(3)


@app.command()
def rewind(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    to: Annotated[
        str, typer.Option(help='batch:N, a time as 2026-11-15T10:00:00Z, or {"topic": {"0": 17}}.')
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    discard_foreign: Annotated[
        bool,
        typer.Option("--discard-foreign", help="Also undo what others wrote to the tables since."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Take all tables of a sink, and its index, back to a cut; the stream goes on from there."""
    from frazil.ops import rewind as rewinding

    given = configs.load(config)
    if not (yes or dry_run) and (as_json or not sys.stdin.isatty()):
        raise ConfigError("cannot rewind without being asked for it: expected --yes or --dry-run")
    spark = _session(given)
    plan = rewinding.look(given, spark, to, discard_foreign=discard_foreign)
    if as_json and (dry_run or plan.refusals):
        print(json.dumps({**plan.values(), "done": False}))
    elif not as_json:
        rewinding.show(plan, output())
    for refusal in plan.refusals:
        raise refusal
    if dry_run or (plan.nothing and not as_json):
        return
    if not yes:
        typer.confirm("a running sink is stopped by this; go on?", abort=True)
    plan = rewinding.rewind(
        given,
        spark,
        to,
        discard_foreign=discard_foreign,
        on_step=lambda name, table: progress.print(f"{name} {table}".rstrip()),
    )
    if as_json:
        print(json.dumps({**plan.values(), "done": True}))
    else:
        rewinding.show(plan, output(), done=True)


@app.command()
def demo(
    rows: Annotated[int, typer.Option(help="How many orders to stream.")] = 2_000_000,
    seconds: Annotated[float | None, typer.Option(help="Or for how long to produce them.")] = None,
    partitions: Annotated[int, typer.Option(help="Partitions of the topic.")] = 4,
    keep: Annotated[Path | None, typer.Option(help="Folder for table, config and logs.")] = None,
    as_json: Json = False,
) -> None:
    """Broker, pipeline, two SIGKILLs in the middle of commits, and the audit's verdict."""
    from frazil.testing import demo as show

    if rows < 1 or partitions < 1:
        raise ConfigError("cannot run the demo: --rows and --partitions must be at least 1")
    with stop.raised():
        outcome = show.demo(
            rows=rows, seconds=seconds, partitions=partitions, keep=keep, console=progress
        )
    if as_json:
        print(show.json_line(outcome))
    else:
        show.render(outcome, output())
    if outcome.verdict != "proven":
        raise typer.Exit(3)


@app.command()
def selftest(
    config: Annotated[Path, typer.Argument(help="A sink's TOML file: its broker, its catalog.")],
    rows: Annotated[int, typer.Option(help="Records of each scratch topic.")] = 20_000,
    steps: Annotated[
        str,
        typer.Option(
            help="Only these steps, with commas between; by default every step of a batch."
        ),
    ] = "",
    upsert: Annotated[
        bool | None,
        typer.Option(
            "--upsert/--append", help="Only an upsert, or only an append table; default both."
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Where tables may be made; by default a namespace of its own.")
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """SIGKILL at each step on your own broker and catalog, judged by reading all records (exit 3 if
    not proven); scratch topics and tables are removed."""
    from frazil.testing import scratch
    from frazil.testing import selftest as testing

    given = configs.load(config)
    wanted = scratch.plan(
        given,
        rows=rows,
        steps=[step.strip() for step in steps.split(",") if step.strip()],
        modes=scratch.MODES if upsert is None else ("upsert",) if upsert else ("append",),
        namespace=namespace,
    )
    for resource in wanted.creates:
        progress.print(f"will make {resource}", highlight=False, soft_wrap=True)
    if not (yes or as_json) and sys.stdin.isatty():
        typer.confirm("and remove it all again; go on?", abort=True)
    spark = _session(given)
    with stop.raised():
        outcome = testing.selftest(given, wanted, spark, progress, keep=keep)
    if as_json:
        print(json.dumps(outcome.values()))
    else:
        testing.show(outcome, output())
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


@config_app.command()
def explain(
    config: Annotated[Path, typer.Argument(help="TOML file.")], as_json: Json = False
) -> None:
    """The path that the data takes, and why; every setting in effect, and where it comes from."""
    given, places = configs.traced(config)
    way, why = explanation.path_taken(given)
    settings = explanation.settings(given)
    origins = {
        section: {
            key: places.get(f"{section.replace(' ', '.')}.{key}", "default") for key in values
        }
        for section, values in settings.items()
    }
    effect = explanation.in_effect(given)
    if as_json:
        shown = {"way": way, "why": why, "settings": settings, "origins": origins}
        print(json.dumps({**shown, "in_effect": effect}))
        return
    typer.echo(f"way: {way}\nwhy: {why}")
    for section, values in settings.items():
        typer.echo(f"\n[{section}]")
        lines = {key: f"{key} = {json.dumps(value)}" for key, value in values.items()}
        width = min(48, max(map(len, lines.values()), default=0))
        for key, text in lines.items():
            implied = effect.get(section, {}).get(key, "")
            typer.echo(
                f"{text:<{width}}  # {origins[section][key]}{f': {implied}' if implied else ''}"
            )


@dlq_app.command("list")
def list_letters(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    topic: Topics = [],  # noqa: B006
    partition: Partitions = [],  # noqa: B006
    offsets: Offsets = "",
    kind: Kinds = [],  # noqa: B006
    table: Rejecting = [],  # noqa: B006
    replayed: Annotated[bool, typer.Option("--replayed", help="Those that were replayed.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Those, and those that wait.")] = False,
    limit: Annotated[int, typer.Option(help="How many of the newest are shown one by one.")] = 10,
    as_json: Json = False,
) -> None:
    """How many records were rejected, why, and by which tables; and the newest of them."""
    from frazil.ops import dead_letters

    given = configs.load(config)
    wanted = dead_letters.selection(given, topic, partition, offsets, kind, table, limit)
    which = "all" if every else "replayed" if replayed else "waiting"
    listing = dead_letters.list_dead_letters(given, _session(given), wanted, which)
    if as_json:
        print(json.dumps(listing))
    else:
        dead_letters.show_list(listing, output())


@dlq_app.command()
def replay(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file, as it is after the fix.")],
    topic: Topics = [],  # noqa: B006
    partition: Partitions = [],  # noqa: B006
    offsets: Offsets = "",
    kind: Kinds = [],  # noqa: B006
    table: Rejecting = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Only so many, the first by offset.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be.")] = False,
    as_json: Json = False,
) -> None:
    """Write dead letters to their tables after a fix, exactly once (exit 3 if some are rejected
    again; those stay)."""
    from frazil.ops import dead_letters

    given = configs.load(config)
    wanted = dead_letters.selection(given, topic, partition, offsets, kind, table, limit)
    spark = _session(given)
    if dry_run:
        outcome = dead_letters.look(given, spark, wanted)
    else:
        outcome = dead_letters.replay(
            given, spark, wanted, lambda step: progress.print(f"batch {step.batch}: {step.name}")
        )
    if as_json:
        print(json.dumps(dead_letters.values(outcome, dry_run)))
    else:
        dead_letters.show_replay(outcome, dry_run, output())
    if outcome.rejected:
        raise typer.Exit(3)


@index_app.command("rebuild")
def rebuild_index(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be.")] = False,
    as_json: Json = False,
) -> None:
    """Write missing index rows again, from the ledgers (exit 3 if some cannot be determined)."""
    from frazil.ops import index_rebuild

    given = configs.load(config)
    reports = index_rebuild.rebuilt(given, _session(given), dry_run)
    if as_json:
        print(json.dumps({"sinks": [report.values() for report in reports], "dry_run": dry_run}))
    else:
        index_rebuild.show(reports, dry_run, output())
    if any(report.unknown for report in reports):
        raise typer.Exit(3)


@offsets_app.command("show")
def show_offsets(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    spark: Spark = None,
    as_json: Json = False,
) -> None:
    """Position, lag, and what Kafka still has, by partition; what stops the stream, if anything."""
    from frazil.ops import offsets
    from frazil.spark.open_table import opener

    given = configs.load(config)
    report = offsets.standing(given, opener(given, spark, progress.print))
    if as_json:
        print(json.dumps(report))
    else:
        offsets.show_standing(report, output())


@offsets_app.command("accept-loss")
def accept_loss(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    lost: Annotated[
        list[str],
        typer.Option(help="TOPIC:PARTITION:START..END, exactly what is given up; may be repeated."),
    ] = [],  # noqa: B006
    reason: Reason = "",
    by: By = "",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Go on behind offsets that retention deleted before they were read; they stay a loss."""
    from frazil.ops import offsets

    _decide(config, offsets.losses(lost), reason, by, yes, as_json)


@offsets_app.command("adopt-topic")
def adopt(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    topic: Annotated[
        list[str],
        typer.Option(help="Only this topic; may be repeated. Default: all that are others."),
    ] = [],  # noqa: B006
    start: Annotated[str, typer.Option(help="Where they begin: earliest or latest.")] = "earliest",
    same_offsets: Annotated[
        bool,
        typer.Option(
            "--same-offsets", help="Their offsets mean the same records: go on where it stood."
        ),
    ] = False,
    reason: Reason = "",
    by: By = "",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Accept a recreated topic, or another cluster, as the one the ledger knows."""
    from frazil.ops import offsets

    wanted = offsets.adoption(topic, start, same_offsets)
    _decide(config, wanted, reason, by, yes, as_json)


@offsets_app.command("seek")
def rebase(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    to: Annotated[
        list[str], typer.Option(help="TOPIC:PARTITION:OFFSET, where to go on; may be repeated.")
    ],
    reason: Reason = "",
    by: By = "",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Move the position: forward gives records up, back reads the topic on as a new one."""
    from frazil.ops import offsets

    _decide(config, offsets.seeking(to), reason, by, yes, as_json)


@offsets_app.command()
def confirm(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    table: Annotated[str, typer.Option(help="The table whose history was expired.")],
    reason: Reason = "",
    by: By = "",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Sign that a table whose history was expired holds everything below its ledger's end."""
    from frazil.ops import offsets

    given = configs.load(config)
    _want_a_reason("confirm", reason, yes)
    note = offsets.signed("confirm", reason, by) if yes else None
    result = offsets.confirmed(given, _session(given), table, note)
    if as_json:
        print(json.dumps(result))
    else:
        offsets.show_confirmed(result, output())


def _want_a_reason(did: str, reason: str, yes: bool) -> None:
    if yes and not reason.strip():
        raise ConfigError(
            f"cannot {did}: expected a --reason, found none",
            hint="it stands in the ledger for whoever audits it",
        )


def _decide(path: Path, wanted: Any, reason: str, by: str, yes: bool, as_json: bool) -> None:
    from frazil.ops import offsets

    given = configs.load(path)
    _want_a_reason(wanted.did, reason, yes)
    spark = _session(given)
    plan = offsets.look(given, spark, wanted)
    if yes and plan.decision:
        plan = offsets.done(given, spark, plan, offsets.signed(wanted.did, reason, by))
    if as_json:
        print(json.dumps(plan.values()))
    else:
        offsets.show(plan, path, output())


@app.command()
def version(as_json: Json = False) -> None:
    """The version of Frazil."""
    from importlib.metadata import version as of

    print(json.dumps({"version": of("frazil")}) if as_json else of("frazil"))


def main() -> None:
    """Run a command; errors are printed as sentences, not as tracebacks."""
    stop.install()
    try:
        code = app(standalone_mode=False) or 0  # without standalone mode click returns Exit's code
    except typer.Exit as end:
        code = end.exit_code
    except (typer.Abort, KeyboardInterrupt):  # PySpark raises the latter while it starts
        code = stop.exit_code if stop.signal else 1
        end_children()
    except FrazilError as error:
        code = _say(error)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: a wrong option or argument
            if message := error.format_message():  # a group without a command has shown its help
                print(f"frazil: {message}", file=sys.stderr)
            code = 2
        else:
            code = _say(from_traceback(str(error)) or _unexpected(error))
    with suppress(BrokenPipeError):  # the reader has closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code)


def _unexpected(error: Exception) -> FrazilError:
    """An error that Frazil does not translate: a defect, but no reason for a traceback."""
    defect = FrazilError(
        f"cannot go on: {type(error).__name__}: {error}"[:2000],
        hint="this error is not one that Frazil knows: please report it with the file below",
    )
    defect.detail = "".join(traceback.format_exception(error))
    return defect


def _say(error: FrazilError) -> int:
    print(f"frazil: {error}", file=sys.stderr)
    if error.detail and _verbose:
        print(error.detail, file=sys.stderr)
    elif error.detail:
        with suppress(OSError):  # no place to write it: the message is printed already
            number, path = tempfile.mkstemp(prefix="frazil-error-", suffix=".txt")
            with open(number, "w", encoding="utf-8", errors="replace") as file:
                file.write(error.detail)
            print(f"all that was said of it: {path}", file=sys.stderr)
    return error.exit_code


def _session(given: Config) -> Any:
    from frazil.spark.session import session

    with progress.status("starting Spark"):
        return session(given, say=progress.print)


def _is_file(target: str) -> bool:
    """Whether it is a config file; else a table name, possibly too long or odd for a path."""
    try:
        return Path(target).suffix == ".toml" or Path(target).is_file()
    except (OSError, ValueError):
        return False


def _bare(table: str, catalog: list[str]) -> Config:
    """A config with nothing but a catalog, for commands that need no sink."""
    import os

    pairs = dict(pair.partition("=")[::2] for pair in catalog)
    section = overlay({"catalog": pairs}, os.environ).get("catalog", {})
    if not section:
        raise ConfigError(
            f"cannot find table {table}: no catalog is given",
            hint="add --catalog type=… --catalog uri=…, or give the sink's TOML file",
        )
    return configs.catalog_only(table, section)


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


if __name__ == "__main__":
    main()
