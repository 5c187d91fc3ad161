"""The `frazil` command. Results on standard output, progress and errors on standard error.

Exit codes: 0 well, 1 failed, 2 bad configuration, 3 the audit found something, dead letters were
rejected again, or no table holds an offset, 4 fenced.
"""

from __future__ import annotations

import gc
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
from frazil.core.offsets import Partition

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Streams into Apache Iceberg tables, exactly once, with the proof.",
)
progress = Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Spark = Annotated[
    bool | None,
    typer.Option("--spark/--no-spark", help="Open tables with Spark; by default only if needed."),
]


config_app = typer.Typer(no_args_is_help=True, help="What a config file says.")
app.add_typer(config_app, name="config")
dlq_app = typer.Typer(no_args_is_help=True, help="Dead letters: records that were rejected.")
app.add_typer(dlq_app, name="dlq")
index_app = typer.Typer(no_args_is_help=True, help="The offset index.")
app.add_typer(index_app, name="index")
offsets_app = typer.Typer(
    no_args_is_help=True,
    help="Where a stream stands, and what a person may decide about it. Without --yes it is said "
    "what would be; with it, a running life of the sink is stopped (fenced).",
)
app.add_typer(offsets_app, name="offsets")

Topics = Annotated[list[str], typer.Option("--topic", help="Of this topic; may be repeated.")]
Partitions = Annotated[list[int], typer.Option("--partition", help="Of this partition.")]
Offsets = Annotated[str, typer.Option(help="One offset, or START..END without END itself.")]
Kinds = Annotated[list[str], typer.Option("--kind", help="Of this kind: route, misfit, …")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; a running life of the sink is fenced.")]
Reason = Annotated[str, typer.Option(help="Why; it stands in the ledger with who and when.")]
By = Annotated[str, typer.Option(help="Who; by default the user and the host.")]
Rejecting = Annotated[list[str], typer.Option("--table", help="Rejected by this table.")]


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
    said = untidy = ""
    try:
        if until_caught_up:
            sink.wait_until(sink.ends())
        while not until_caught_up:
            if query.awaitTermination(1):
                break  # available-now: everything there was is committed
            sink.check()
            how = sink.committer.progress
            now = how.blocked or how.trouble
            if now and now != said:
                progress.print(f"[yellow]waiting: {now}[/yellow]")
            if how.untidy and how.untidy != untidy:
                progress.print(f"[yellow]for later: {how.untidy}[/yellow]")
            untidy = how.untidy
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
    deep: Annotated[bool, typer.Option(
        "--deep", help="Read the offset columns, too, as a fourth witness.")] = False,
    against_kafka: Annotated[bool, typer.Option(
        "--against-kafka", help="Compare with the broker's offsets, too.")] = False,
    spark: Spark = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Prove from metadata alone that every offset is there exactly once (exit 3 if not)."""
    from frazil.surface import proof
    from frazil.surface.opened import opener

    gc.disable()  # a short life, and 100,000 snapshots would be walked again and again
    if Path(what).suffix == ".toml" or Path(what).is_file():
        given = configs.load(what)
        opened = opener(given, spark, progress.print)
        found = proof.of_sink(given, opened, deep)
        if against_kafka:
            found = proof.against_kafka(given, opened, found)
    elif against_kafka:
        raise ConfigError("cannot compare with Kafka: only a sink's TOML file says where it is")
    else:
        opened = opener(_bare(what, catalog), spark, progress.print)
        found = proof.of_table(opened, what, branch, deep)
    if as_json:
        print(json.dumps(proof.values(found)))
    else:
        proof.show(found, Console())
    if found.verdict not in ("proven", "accepted loss"):
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
def complete(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    hour: Annotated[str, typer.Argument(
        help="An hour, 2026-11-15T10, or a day, 2026-11-15, in UTC.")] = "",
    wait: Annotated[str, typer.Option(help="Wait so long for it: 90s, 10m.")] = "",
    spark: Spark = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Until when the stream is complete, and what holds it back (exit 3 if HOUR is not)."""
    from frazil.surface import complete as hours
    from frazil.surface.opened import opener

    given = configs.load(config)
    found = hours.awaited(given, opener(given, spark, progress.print), hour, wait)
    if as_json:
        print(json.dumps(hours.values(found)))
    else:
        hours.show(found, Console())
    if found.complete is False:
        raise typer.Exit(3)


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
def locate(
    what: Annotated[str, typer.Argument(metavar="TABLE|CONFIG",
                    help="A sink's TOML file, or a table's name with --catalog.")],
    topic: Annotated[str, typer.Argument(help="Kafka's topic.")],
    partition: Annotated[int, typer.Argument(help="Its partition.")],
    offset: Annotated[int, typer.Argument(help="The offset that is looked for.")],
    table: Annotated[str, typer.Option(help="Only in this table of the sink.")] = "",
    catalog: Annotated[list[str], typer.Option(
        help="key=value of the catalog, e.g. type=rest; also FRAZIL_CATALOG__… variables.")] = [],  # noqa: B006
    branch: Annotated[str, typer.Option(help="Which branch of the table.")] = "main",
    spark: Spark = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Which batch, snapshot and files hold an offset (exit 3 if no table holds it)."""
    from frazil.surface import locate as locating
    from frazil.surface.opened import opener

    where = Partition(topic, partition)
    if Path(what).suffix == ".toml" or Path(what).is_file():
        given = configs.load(what)
        opened = opener(given, spark, progress.print)
        found = locating.of_sink(given, opened, where, offset, table)
    else:
        given = _bare(what, catalog)
        opened = opener(given, spark, progress.print)
        found = locating.of_table(given.catalog.name, opened, what, where, offset, branch)
    if as_json:
        print(json.dumps(locating.values(found)))
    else:
        locating.show(found, Console())
    if not found.held:
        raise typer.Exit(3)


@app.command()
def rewind(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    to: Annotated[str, typer.Option(
        help='batch:N, a time as 2026-11-15T10:00:00Z, or {"topic": {"0": 17}}.')],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    discard_foreign: Annotated[bool, typer.Option(
        "--discard-foreign", help="Also undo what others wrote to the tables since.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Take all tables of a sink, and its index, back to a cut; the stream goes on from there."""
    from frazil.surface import rewind as rewinding

    given = configs.load(config)
    if not (yes or dry_run) and (as_json or not sys.stdin.isatty()):
        raise ConfigError("cannot rewind without being asked for it: expected --yes or --dry-run")
    spark = _session(given)
    plan = rewinding.look(given, spark, to, discard_foreign=discard_foreign)
    if as_json and (dry_run or plan.refusals):
        print(json.dumps({**plan.values(), "done": False}))
    elif not as_json:
        rewinding.show(plan, Console())
    for refusal in plan.refusals:
        raise refusal
    if dry_run or (plan.nothing and not as_json):
        return
    if not yes:
        typer.confirm("running lives of the sink are stopped by this; go on?", abort=True)
    plan = rewinding.rewind(
        given, spark, to, discard_foreign=discard_foreign,
        on_step=lambda name, table: progress.print(f"{name} {table}".rstrip()),
    )  # fmt: skip
    if as_json:
        print(json.dumps({**plan.values(), "done": True}))
    else:
        rewinding.show(plan, Console(), done=True)


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


@app.command()
def selftest(
    config: Annotated[Path, typer.Argument(help="A sink's TOML file: its broker, its catalog.")],
    rows: Annotated[int, typer.Option(help="Records of each scratch topic.")] = 20_000,
    steps: Annotated[str, typer.Option(
        help="Only these steps, with commas between; by default every step of a batch.")] = "",
    upsert: Annotated[bool | None, typer.Option(
        "--upsert/--append", help="Only an upsert, or only an append table; default both.")] = None,
    namespace: Annotated[str, typer.Option(
        help="Where tables may be made; by default a namespace of its own.")] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """SIGKILL at each step on your own broker and catalog, judged by reading all (exit 3 if not
    proven); scratch topics and tables, of which nothing is left."""
    from frazil.surface import scratch
    from frazil.surface import selftest as testing

    given = configs.load(config)
    wanted = scratch.plan(
        given, rows=rows, steps=[each.strip() for each in steps.split(",") if each.strip()],
        modes=scratch.MODES if upsert is None else ("upsert",) if upsert else ("append",),
        namespace=namespace,
    )  # fmt: skip
    for each in wanted.creates:
        progress.print(f"will make {each}", highlight=False, soft_wrap=True)
    if not (yes or as_json) and sys.stdin.isatty():
        typer.confirm("and remove it all again; go on?", abort=True)
    signal.signal(signal.SIGTERM, _interrupt)
    outcome = testing.selftest(given, wanted, _session(given), progress, keep=keep)
    if as_json:
        print(json.dumps(outcome.values()))
    else:
        testing.show(outcome, Console())
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


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


@dlq_app.command("list")
def list_letters(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    topic: Topics = [], partition: Partitions = [], offsets: Offsets = "",  # noqa: B006
    kind: Kinds = [], table: Rejecting = [],  # noqa: B006
    replayed: Annotated[bool, typer.Option("--replayed", help="Those that were replayed.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Those, and those that wait.")] = False,
    limit: Annotated[int, typer.Option(help="How many of the newest are shown one by one.")] = 10,
    as_json: Json = False,
) -> None:  # fmt: skip
    """How many records were rejected, why, and by which tables; and the newest of them."""
    from frazil.surface import dlq

    given = configs.load(config)
    wanted = dlq.selection(given, topic, partition, offsets, kind, table, limit)
    which = "all" if every else "replayed" if replayed else "waiting"
    found = dlq.listed(given, _session(given), wanted, which)
    if as_json:
        print(json.dumps(found))
    else:
        dlq.show_list(found, Console())


@dlq_app.command()
def replay(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file, as it is after the fix.")],
    topic: Topics = [], partition: Partitions = [], offsets: Offsets = "",  # noqa: B006
    kind: Kinds = [], table: Rejecting = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Only so many, the first by offset.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write dead letters to their tables after a fix, exactly once (exit 3 if some are rejected
    again; those stay)."""
    from frazil.surface import dlq

    given = configs.load(config)
    wanted = dlq.selection(given, topic, partition, offsets, kind, table, limit)
    spark = _session(given)
    if dry_run:
        outcome = dlq.look(given, spark, wanted)
    else:
        outcome = dlq.replay(
            given, spark, wanted, lambda step: progress.print(f"batch {step.batch}: {step.name}")
        )
    if as_json:
        print(json.dumps(dlq.values(outcome, dry_run)))
    else:
        dlq.show_replay(outcome, dry_run, Console())
    if outcome.rejected:
        raise typer.Exit(3)


@index_app.command("rebuild")
def rebuild_index(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be.")] = False,
    as_json: Json = False,
) -> None:
    """Write rows that the index lacks again, from the ledgers (exit 3 if some cannot be told)."""
    from frazil.surface import reindex

    given = configs.load(config)
    found = reindex.rebuilt(given, _session(given), dry_run)
    if as_json:
        print(json.dumps({"sinks": [each.values() for each in found], "dry_run": dry_run}))
    else:
        reindex.show(found, dry_run, Console())
    if any(each.unknown for each in found):
        raise typer.Exit(3)


@offsets_app.command("show")
def show_offsets(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    spark: Spark = None,
    as_json: Json = False,
) -> None:
    """Position, lag, and what Kafka still has, by partition; what stops the stream, if anything."""
    from frazil.surface import offsets
    from frazil.surface.opened import opener

    given = configs.load(config)
    found = offsets.standing(given, opener(given, spark, progress.print))
    if as_json:
        print(json.dumps(found))
    else:
        offsets.show_standing(found, Console())


@offsets_app.command("accept-loss")
def accept_loss(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    lost: Annotated[list[str], typer.Option(
        help="TOPIC:PARTITION:START..END, exactly what is given up; may be repeated.")] = [],  # noqa: B006
    reason: Reason = "", by: By = "", yes: Yes = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Go on behind offsets that retention deleted before they were read; they stay a loss."""
    from frazil.surface import offsets

    _decide(config, offsets.losses(lost), reason, by, yes, as_json)


@offsets_app.command()
def adopt(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    topic: Annotated[list[str], typer.Option(
        help="Only this topic; may be repeated. Default: all that are others.")] = [],  # noqa: B006
    start: Annotated[str, typer.Option(help="Where they begin: earliest or latest.")] = "earliest",
    same_offsets: Annotated[bool, typer.Option("--same-offsets",
        help="Their offsets mean the same records: go on where it stood.")] = False,
    reason: Reason = "", by: By = "", yes: Yes = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Take a topic that was made again, or another cluster, for the one the ledger knows."""
    from frazil.surface import offsets

    wanted = offsets.adoption(topic, start, same_offsets)
    _decide(config, wanted, reason, by, yes, as_json)


@offsets_app.command()
def rebase(
    config: Annotated[Path, typer.Argument(help="The sink's TOML file.")],
    to: Annotated[list[str], typer.Option(
        help="TOPIC:PARTITION:OFFSET, where to go on; may be repeated.")],
    reason: Reason = "", by: By = "", yes: Yes = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Move the position: forward gives records up, back reads the topic on as a new one."""
    from frazil.surface import offsets

    _decide(config, offsets.rebasing(to), reason, by, yes, as_json)


def _decide(path: Path, wanted: Any, reason: str, by: str, yes: bool, as_json: bool) -> None:
    from frazil.surface import offsets

    given = configs.load(path)
    if yes and not reason.strip():
        raise ConfigError(f"cannot {wanted.did}: expected a --reason, found none",
                          hint="it stands in the ledger for whoever audits it")  # fmt: skip
    spark = _session(given)
    plan = offsets.look(given, spark, wanted)
    if yes and plan.decision:
        plan = offsets.done(given, spark, plan, offsets.signed(wanted.did, reason, by))
    if as_json:
        print(json.dumps(plan.values()))
    else:
        offsets.show(plan, path, Console())


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
