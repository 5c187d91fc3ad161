"""`frazil status` and `frazil health`: how a sink is, from outside its process, and as a probe."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from frazil.cli.app import ConfigFile, Spark, app, command, sink_opener, stop
from frazil.config.units import duration
from frazil.errors import ConfigError, FrazilError
from frazil.render import Report, error_values, output, print_json


@command(app)
def status(
    config: ConfigFile,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[str, typer.Option(help="Pause of --watch: 2s, 1m.")] = "2s",
    spark: Spark = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit 75 while the sink waits, and 3 if it failed or needs a person.",
        ),
    ] = False,
    *,
    as_json: bool,
) -> Report:
    """Whether a sink runs, its verdict with the remedy, lag by stage, dead letters and last
    commit."""
    from frazil.ops.status import status

    pause = duration(every, "--every")
    opened = sink_opener(config, spark)
    if not watch:
        report = status(config, opened)
        report.follows_verdict = exit_code
        return report
    _watch(lambda: status(config, opened), max(0.2, pause), as_json)
    raise typer.Exit


def _watch(report: Callable[[], Report], pause: float, as_json: bool) -> None:
    """Shows the report again and again, until a signal comes."""
    console = output()
    live = Live(console=console, auto_refresh=False)
    refreshed = console.is_terminal and not as_json
    with stop.flagged(), live if refreshed else nullcontext():
        while not stop.signal:
            try:
                shown = report()
            except FrazilError as error:
                shown = _Failed(error)
            if as_json:
                print_json(shown)
            elif refreshed:
                clock = Text(f"{datetime.now():%H:%M:%S}, every {pause:g} s, Ctrl-C ends", "dim")
                live.update(Group(*shown.lines(), clock), refresh=True)
            else:
                print("\n".join(map(str, shown.lines())), end="\n\n", flush=True)
            deadline = time.monotonic() + pause
            while not stop.signal and time.monotonic() < deadline:
                time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class _Failed:
    error: FrazilError
    JSON: ClassVar = "error=values"

    @property
    def values(self) -> dict[str, str]:
        return error_values(self.error)

    def lines(self) -> list[str]:
        return [f"frazil: {self.error}"]


@dataclass(frozen=True)
class ProbeReport:
    """What a health file says."""

    healthy: bool
    reason: str
    age: float | None = None
    sinks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 0 if self.healthy else 3

    def lines(self) -> Iterator[str]:
        yield ("well" if self.healthy else "not well") + (f": {self.reason}" if self.reason else "")
        for sink in self.sinks:
            remedy = f"; remedy: {sink['remedy']}" if sink.get("remedy") else ""
            yield f"{sink.get('sink')}: {sink.get('verdict')}{remedy}"


@command(app)
def health(
    file: Annotated[Path, typer.Argument(help="The file that \\[health] file names.")],
    ready: Annotated[
        bool, typer.Option("--ready", help="Whether it is ready, not only alive.")
    ] = False,
    max_age: Annotated[
        str, typer.Option(help="Maximum age of the health file; an older file counts as unhealthy.")
    ] = "30s",
) -> Report:
    """Probe a health file: exit 0 if healthy, 3 if not."""
    return probe(file, ready, duration(max_age, "--max-age"), time.time())


def probe(file: Path, ready: bool, most: float, now: float) -> ProbeReport:
    try:
        values = json.loads(file.read_bytes())
        age = now - datetime.fromisoformat(values["written_at"]).timestamp()
        well, sinks = bool(values["ready" if ready else "healthy"]), list(values["sinks"])
        sinks = [sink for sink in sinks if isinstance(sink, dict)]
    except FileNotFoundError:
        return ProbeReport(False, f"{file} does not exist")
    except OSError as error:
        raise ConfigError(f"cannot read health file {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"cannot read health file {file}: it is not a health file") from None
    if age > most:
        reason = f"the file is {age:,.0f} s old: the process has ended, or hangs"
        return ProbeReport(False, reason, round(age, 1), sinks)
    word = "ready" if ready else "alive"
    reason = "" if well else f"no sink is {word}" if not ready else "not every sink is ready"
    return ProbeReport(well, reason, round(age, 1), sinks)
