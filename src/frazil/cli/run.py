"""`frazil run`: one run of a sink, with a line for each commit and a summary at its end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from pyspark.sql import SparkSession
from rich.console import Console

from frazil.cli.run_output import RunOutput
from frazil.cli.signals import StopSignal
from frazil.config.model import Config
from frazil.errors import FrazilError
from frazil.monitoring.observer import ObserverFactory, Observers
from frazil.render import Line
from frazil.run import Run
from frazil.sink import Sink
from frazil.steps import Step

_log = logging.getLogger("frazil")


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
    #: not 0: a signal stopped the run before it had caught up
    exit_code: int = 0

    def __post_init__(self) -> None:
        self._say = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)
        self._commits = RunOutput(
            self.config,
            self._say,
            lead=f"sink {self.config.sink.id}: ",
            pending=lambda: len(self.sink.committer.pending),
        )
        self._observers = Observers([make(self.config) for make in self.observers])
        self.sink = Sink(self.config, on_step=self._on_step)

    def stream(
        self, session: Callable[[], SparkSession], stop: StopSignal, until_caught_up: bool
    ) -> None:
        """Run until a stop is requested."""
        try:
            self._stream(session(), stop, until_caught_up)
        except FrazilError as error:
            self._observers.ended(error)
            raise
        except Exception as error:  # a defect: the observers see it, too
            self._observers.ended(FrazilError(f"unexpected error: {type(error).__name__}: {error}"))
            raise
        self._observers.ended(None)

    def _stream(self, spark: SparkSession, stop: StopSignal, until_caught_up: bool) -> None:
        run = self.sink.start(spark)
        self._observers.started(run)
        self._commits.started(run)
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
                    self._commits.tick(run)
                if stop.signal:
                    text = "stopping: the batch under way is finished and committed"
                    _log.info(text, extra={"sink": self.config.sink.id})
                    self._say(f"{text}; a second signal ends the process at once")
            finally:
                run.stop()
        self.exit_code = 0 if done else stop.exit_code

    def _stops(self, run: Run, stop: StopSignal) -> bool:
        self._observers.tick(run)
        return bool(stop.signal)

    def _on_step(self, step: Step) -> None:
        self._observers.step(step)
        self._commits.step(step)

    @property
    def rows(self) -> int:
        return self._commits.rows

    @property
    def skipped(self) -> int:
        return self._commits.skipped

    @property
    def rejected(self) -> int:
        return self._commits.rejected

    @property
    def rejected_by_kind(self) -> dict[str, dict[str, object]]:
        return self._commits.rejected_by_kind

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._commits.began, 2)

    @property
    def pending_batches(self) -> int:
        return self._commits.pending()

    def lines(self) -> Iterable[Line]:
        return self._commits.summary(self.seconds, self.sink.committer.progress.position)


def with_monitoring(config: Config, metrics: str, health_file: str) -> Config:
    """The config with the address and the file that options give, where they give one."""
    change = dataclasses.replace
    if metrics:
        config = change(config, metrics=change(config.metrics, address=metrics))
    if health_file:
        config = change(config, health=change(config.health, file=health_file))
    return config
