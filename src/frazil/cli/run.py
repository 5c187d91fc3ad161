"""`frazil run`: one run of a sink, with a line for each commit and a summary at its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from pyspark.sql import SparkSession
from rich.console import Console
from rich.text import Text

from frazil.cli.signals import StopSignal
from frazil.config.model import Config
from frazil.errors import FrazilError, counted
from frazil.monitoring.observer import ObserverFactory, Observers
from frazil.offsets import Cut
from frazil.render import Line
from frazil.run import Run
from frazil.sink import Sink
from frazil.steps import Step

#: With more partitions than this, a line shows the sum.
_SHOWN = 8


@dataclass
class RunCommand:
    """One run, with its progress on the console, and the report of it."""

    JSON: ClassVar = (
        "rows rejected skipped rejected_by_kind seconds epoch=sink.epoch "
        "position=sink.committer.progress.position pending_batches"
    )

    config: Config
    console: Console
    observers: Sequence[ObserverFactory] = ()
    began: float = field(default_factory=time.monotonic)
    rows: int = 0
    skipped: int = 0
    #: not 0: a signal stopped the run before it had caught up
    exit_code: int = 0
    #: kind of rejected records → their number, and position and reason of the last one
    _kinds: dict[str, tuple[int, str]] = field(default_factory=dict)
    _written: dict[int, Step] = field(default_factory=dict)
    _trouble: str = ""
    _maintenance_error: str = ""

    def __post_init__(self) -> None:
        self._observers = Observers([make(self.config) for make in self.observers])
        self.sink = Sink(self.config, on_step=self._on_step)
        self._say = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)

    def stream(self, spark: SparkSession, stop: StopSignal, until_caught_up: bool) -> None:
        """Run until a stop is requested."""
        try:
            self._stream(spark, stop, until_caught_up)
        except FrazilError as error:
            self._observers.ended(error)
            raise
        self._observers.ended(None)

    def _stream(self, spark: SparkSession, stop: StopSignal, until_caught_up: bool) -> None:
        run = self.sink.start(spark)
        self._observers.started(run)
        self._say(f"sink {self.config.sink.id}: epoch {run.epoch}, {position_text(run.position)}")
        for advice in run.advice:
            self._say(advice, style="yellow")
        done = not until_caught_up
        with stop.flagged():
            try:
                if until_caught_up:
                    done = run.wait_until(run.ends(), unless=lambda: self._stops(run, stop))
                    done = done or not stop.signal  # available-now ends where its topics ended
                while not (until_caught_up or stop.signal):
                    if run.awaitTermination(1):
                        break  # available-now: everything there was is committed
                    run.check()
                    self._observers.tick(run)
                    self._print_trouble()
                if stop.signal:
                    self._say(
                        "stopping: the batch under way is finished and committed; "
                        "a second signal ends the process at once"
                    )
            finally:
                run.stop()
        self.exit_code = 0 if done else stop.exit_code

    def _stops(self, run: Run, stop: StopSignal) -> bool:
        self._observers.tick(run)
        return bool(stop.signal)

    def _on_step(self, step: Step) -> None:
        self._observers.step(step)
        if step.name == "written":
            self._written[step.batch] = step
        elif step.name == "done":
            done = [
                self._written.pop(number)
                for number in sorted(self._written)
                if number <= step.batch
            ]
            self.rows += sum(written.records for written in done)
            self.skipped += sum(written.skipped for written in done)
            now = _together(written.rejected for written in done)
            self._kinds = _together([self._kinds, now])
            rate = self.rows / (time.monotonic() - self.began)
            waiting = self.pending_batches
            self._say(
                f"batch {step.batch} committed: {self._counts}, {rate:,.0f}/s"
                + (f", {counted(waiting, 'batch', 'batches')} staged behind it" if waiting else "")
            )
            for line in _rejected_lines(now):
                self._say(line)

    @property
    def _counts(self) -> str:
        return (
            counted(self.rows, "row")
            + (f", {self.rejected:,} rejected" if self.rejected else "")
            + (f", {self.skipped:,} skipped" if self.skipped else "")
        )

    def _print_trouble(self) -> None:
        progress = self.sink.committer.progress
        now = progress.blocked or progress.trouble
        for title, text, before in (
            ("waiting", now, self._trouble),
            ("for later", progress.maintenance_error, self._maintenance_error),
        ):
            if text and text != before:
                self._say(f"{title}: {text}", style="yellow")
        self._trouble, self._maintenance_error = now, progress.maintenance_error

    @property
    def rejected(self) -> int:
        return sum(count for count, _ in self._kinds.values())

    @property
    def rejected_by_kind(self) -> dict[str, dict[str, object]]:
        return {k: {"records": count, "last": last} for k, (count, last) in self._kinds.items()}

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 2)

    @property
    def pending_batches(self) -> int:
        return len(self.sink.committer.pending)

    def lines(self) -> Iterator[Line]:
        position = position_text(self.sink.committer.progress.position)
        yield f"{self._counts}: committed in {self.seconds:.1f} s; {position}"
        yield from _rejected_lines(self._kinds)
        if self._kinds:
            table = self.config.dead_letters.table
            yield f"they are in {table}: frazil dead-letters list CONFIG"
        if self.pending_batches:
            yield Text(
                f"{counted(self.pending_batches, 'batch', 'batches')} staged and not committed: "
                "the next run commits what waits",
                style="yellow",
            )


def with_metrics(config: Config, address: str) -> Config:
    """The config with the address that an option gives, if it gives one."""
    if not address:
        return config
    return dataclasses.replace(config, metrics=dataclasses.replace(config.metrics, address=address))


def _rejected_lines(kinds: Mapping[str, tuple[int, str]]) -> Iterator[Line]:
    for kind, (count, last) in kinds.items():
        yield Text(f"rejected: {count:,} of kind {kind}; the last: {last}", style="yellow")


def _together(counts: Iterable[Mapping[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
    totals: dict[str, tuple[int, str]] = {}
    for rejected in counts:
        for kind, (count, last) in rejected.items():
            totals[kind] = totals.get(kind, (0, ""))[0] + count, last
    return totals


def position_text(cut: Cut) -> str:
    """One line, for any number of partitions."""
    if len(cut) > _SHOWN:
        return f"position {sum(cut.values()):,} in {len(cut):,} partitions"
    return "position " + (", ".join(f"{p} {o:,}" for p, o in sorted(cut.items())) or "none yet")
