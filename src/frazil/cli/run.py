"""`frazil run`: one run of a sink, with a line for each commit and a summary at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from frazil.cli.signals import StopSignal
from frazil.config.model import Config
from frazil.errors import counted
from frazil.offsets import Cut
from frazil.sink import Sink
from frazil.steps import Step

#: With more partitions than this, a line shows the sum.
_SHOWN = 8


@dataclass
class RunCommand:
    """One run, with its progress on the console."""

    config: Config
    console: Console
    began: float = field(default_factory=time.monotonic)
    rows: int = 0
    skipped: int = 0
    #: kind of rejected records → their number, and place and reason of the last one
    rejected: dict[str, tuple[int, str]] = field(default_factory=dict)
    _written: dict[int, Step] = field(default_factory=dict)
    _said: str = ""
    _maintenance_error: str = ""

    def __post_init__(self) -> None:
        self.sink = Sink(self.config, on_step=self._on_step)
        self._say = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)

    def stream(self, spark: SparkSession, stop: StopSignal, until_caught_up: bool) -> bool:
        """Run until a stop is requested; False if that was before the run had caught up."""
        sink = self.sink
        run = sink.start(spark)
        self._say(f"sink {self.config.sink.id}: epoch {run.epoch}, {position(run.position)}")
        for advice in run.advice:
            self._say(advice, style="yellow")
        done = not until_caught_up
        with stop.flagged():
            try:
                if until_caught_up:
                    done = run.wait_until(run.ends(), unless=lambda: bool(stop.signal))
                    done = done or not stop.signal  # available-now ends where its topics ended
                while not (until_caught_up or stop.signal):
                    if run.awaitTermination(1):
                        break  # available-now: everything there was is committed
                    run.check()
                    self._tell_trouble()
                if stop.signal:
                    self._say(
                        "stopping: the batch under way is finished and committed; "
                        "a second signal ends the process at once"
                    )
            finally:
                run.stop()
        return done

    def _on_step(self, step: Step) -> None:
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
            self.rejected = _together([self.rejected, now])
            rate = self.rows / (time.monotonic() - self.began)
            waiting = len(self.sink.committer.pending)
            self._say(
                f"batch {step.batch} committed: {self._counts}, {rate:,.0f}/s"
                + (f", {counted(waiting, 'batch', 'batches')} staged behind it" if waiting else "")
            )
            for kind, (count, last) in now.items():
                self._say(f"rejected: {count:,} of kind {kind}; the last: {last}", style="yellow")

    @property
    def _counts(self) -> str:
        rejected = sum(count for count, _ in self.rejected.values())
        return (
            counted(self.rows, "row")
            + (f", {rejected:,} rejected" if rejected else "")
            + (f", {self.skipped:,} skipped" if self.skipped else "")
        )

    def _tell_trouble(self) -> None:
        progress = self.sink.committer.progress
        now = progress.blocked or progress.trouble
        for title, text, before in (
            ("waiting", now, self._said),
            ("for later", progress.maintenance_error, self._maintenance_error),
        ):
            if text and text != before:
                self._say(f"{title}: {text}", style="yellow")
        self._said, self._maintenance_error = now, progress.maintenance_error

    def values(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "rows": self.rows,
            "rejected": sum(count for count, _ in self.rejected.values()),
            "skipped": self.skipped,
            "rejected_by_kind": {
                kind: {"records": count, "last": last}
                for kind, (count, last) in self.rejected.items()
            },
            "seconds": round(time.monotonic() - self.began, 2),
            "epoch": self.sink.epoch,
            "position": self.sink.committer.progress.position.nested(),
            "pending_batches": len(self.sink.committer.pending),
        }

    def show(self) -> None:
        self._say(
            f"{self._counts}: committed in {time.monotonic() - self.began:.1f} s; "
            f"{position(self.sink.committer.progress.position)}"
        )
        for kind, (count, last) in self.rejected.items():
            self._say(f"rejected: {count:,} of kind {kind}; the last: {last}", style="yellow")
        if self.rejected:
            self._say(
                f"they are in {self.config.dead_letters.table}: frazil dead-letters list CONFIG"
            )
        if waiting := len(self.sink.committer.pending):
            self._say(
                f"{counted(waiting, 'batch', 'batches')} staged and not committed: "
                "the next run commits what waits",
                style="yellow",
            )


def _together(counts: Iterable[Mapping[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
    totals: dict[str, tuple[int, str]] = {}
    for rejected in counts:
        for kind, (count, last) in rejected.items():
            totals[kind] = totals.get(kind, (0, ""))[0] + count, last
    return totals


def position(cut: Cut) -> str:
    """One line, for any number of partitions."""
    if len(cut) > _SHOWN:
        return f"position {sum(cut.values()):,} in {len(cut):,} partitions"
    return "position " + (", ".join(f"{p} {o:,}" for p, o in sorted(cut.items())) or "none yet")
