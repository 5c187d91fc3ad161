"""The lines that `frazil run` prints while a sink runs: its start, each commit, and what waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.text import Text

from frazil.config.model import Config
from frazil.errors import FrazilError, counted
from frazil.offsets import Cut
from frazil.render import Line
from frazil.run import Run
from frazil.steps import Step

#: With more partitions than this, a line shows the sum.
_SHOWN = 8


class RunOutput:
    """An observer of a sink's runs, which counts their records."""

    def __init__(
        self,
        config: Config,
        say: Callable[..., object],
        *,
        lead: str = "",
        pending: Callable[[], int] | None = None,
    ) -> None:
        """`say(text, style="yellow")` prints; `lead`: before the line of a start; `pending`: the
        number of staged batches."""
        self._lead = lead
        self._config = config
        self._say = say
        self.pending = pending or self._pending
        self.began = time.monotonic()
        self.rows = self.skipped = 0
        self.run: Run | None = None
        #: kind of rejected records → their number, and position and reason of the last one
        self.kinds: dict[str, tuple[int, str]] = {}
        self._written: dict[int, Step] = {}
        self._trouble = self._maintenance_error = ""

    def started(self, run: Run) -> None:
        self.run = run
        self._say(f"{self._lead}epoch {run.epoch}, {position_text(run.position)}")
        for advice in run.progress.advice:
            self._say(advice, style="yellow")

    def step(self, step: Step) -> None:
        if step.name == "written":
            self._written[step.batch] = step
        elif step.name == "done":
            numbers = [number for number in sorted(self._written) if number <= step.batch]
            done = [self._written.pop(number) for number in numbers]
            self.rows += sum(written.records for written in done)
            self.skipped += sum(written.skipped for written in done)
            now = _together(written.rejected for written in done)
            self.kinds = _together([self.kinds, now])
            rate = self.rows / (time.monotonic() - self.began)
            waiting = self.pending()
            self._say(
                f"batch {step.batch} committed: {self.counts}, {rate:,.0f}/s"
                + (f", {counted(waiting, 'batch', 'batches')} staged behind it" if waiting else "")
            )
            for line in rejected_lines(now):
                self._say(line.plain, style="yellow")

    def tick(self, run: Run) -> None:
        progress = run.progress
        now = progress.blocked or progress.trouble
        for title, text, before in (
            ("waiting", now, self._trouble),
            ("maintenance postponed", progress.maintenance_error, self._maintenance_error),
        ):
            if text and text != before:
                self._say(f"{title}: {text}", style="yellow")
        self._trouble, self._maintenance_error = now, progress.maintenance_error

    def ended(self, error: FrazilError | None) -> None:
        self._written.clear()  # the next run counts its batches from 0

    @property
    def counts(self) -> str:
        return (
            counted(self.rows, "row")
            + (f", {self.rejected:,} rejected" if self.rejected else "")
            + (f", {self.skipped:,} skipped" if self.skipped else "")
        )

    @property
    def rejected(self) -> int:
        return sum(count for count, _ in self.kinds.values())

    @property
    def rejected_by_kind(self) -> dict[str, dict[str, object]]:
        return {k: {"records": count, "last": last} for k, (count, last) in self.kinds.items()}

    def _pending(self) -> int:
        return len(self.run.committer.pending) if self.run else 0

    def summary(self, seconds: float, position: Cut) -> Iterator[Line]:
        yield f"{self.counts}: committed in {seconds:.1f} s; {position_text(position)}"
        yield from rejected_lines(self.kinds)
        if self.kinds:
            table = self._config.dead_letters.table
            yield f"they are in {table}: frazil dead-letters list CONFIG"
        if self.pending():
            yield Text(
                f"{counted(self.pending(), 'batch', 'batches')} staged and not committed: "
                "the next run commits what waits",
                style="yellow",
            )


def rejected_lines(kinds: Mapping[str, tuple[int, str]]) -> Iterator[Text]:
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
