"""The observer that logs a sink: a line for each commit, and one for each minute of quiet.

In: steps and ticks of a run, and the sink's health. Out: records of the logger `frazil`, with the
values as `fields`. Steps of batches and commits are at DEBUG. No line has a value of a record: of
a rejection it has kind and place. Runs on the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

from frazil.config.model import Config
from frazil.errors import FrazilError, counted
from frazil.monitoring.health_state import WAITING, Verdict
from frazil.monitoring.sink_health import SinkHealth, place_of
from frazil.run import Run
from frazil.steps import COMMIT_FAILED, Step

_log = logging.getLogger("frazil")
#: Seconds without a commit after which a line tells that the sink is there.
QUIET = 60.0
#: With more partitions than this, a line shows the sum of a position.
_SHOWN = 8


class LogObserver:
    def __init__(self, config: Config, health: SinkHealth) -> None:
        self._sink = config.sink.id
        self._run: Run | None = None
        self._health = health
        self._lock = threading.Lock()
        #: batch → its step `written`
        self._written: dict[int, Step] = {}
        self._wrote_at = self._committed_at = time.monotonic()
        self._verdict = Verdict("")
        self._since = 0.0
        self._maintenance = ""

    def started(self, run: Run) -> None:
        self._run = run
        self._tell(
            logging.INFO,
            f"epoch {run.epoch}, {_position(run)}",
            event="started",
            epoch=run.epoch,
        )
        for advice in run.progress.advice:
            self._tell(logging.WARNING, advice, event="advice")

    def step(self, step: Step) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            self._tell(logging.DEBUG, _step_text(step), event="step", step=step.name, counts=False)
        if step.name == "written":
            with self._lock:
                self._written[step.batch] = step
        elif step.name == "done":
            self._committed(step)
        elif step.name == COMMIT_FAILED and step.error is not None:
            self._tell(
                logging.DEBUG,
                f"commit to table {step.table} failed: {step.error.log_text}",
                event=COMMIT_FAILED,
                table=step.table,
                error=type(step.error).__name__,
                counts=False,
            )

    def _committed(self, step: Step) -> None:
        with self._lock:
            numbers = [number for number in self._written if number <= step.batch]
            batches = [self._written.pop(number) for number in sorted(numbers)]
        now = time.monotonic()
        rows = sum(batch.records for batch in batches)
        skipped = sum(batch.skipped for batch in batches)
        rejected = Counter[str]()
        last = ""
        for batch in batches:
            for kind, (count, place) in batch.rejected.items():
                rejected[kind] += count
                last = place_of(place)
        rate = rows / max(0.001, now - self._committed_at)
        self._committed_at = now
        lag = self._health.lag()
        behind = None if lag is None or lag.kafka is None else lag.total
        text = f"batch {step.batch} committed: {counted(rows, 'row')}"
        if rejected:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in rejected.most_common())
            text += f", {rejected.total():,} rejected ({kinds}; the last: {last})"
        text += f", {skipped:,} skipped" if skipped else ""
        text += f", {rate:,.0f}/s, lag {'unknown' if behind is None else f'{behind:,}'}"
        text += f", commit {step.commit_id}" if step.commit_id else ""
        self._tell(
            logging.INFO,
            text,
            event="commit",
            batch=step.batch,
            commit_id=step.commit_id,
            rows=rows,
            skipped=skipped,
            rejected=dict(rejected),
            rate=round(rate, 1),
            lag=behind,
        )

    def tick(self, run: Run) -> None:
        verdict = self._health.verdict()
        if verdict.state != self._verdict.state:
            self._changed(verdict)
        maintenance = run.progress.maintenance_error
        if maintenance and maintenance != self._maintenance:
            self._tell(
                logging.WARNING, f"maintenance postponed: {maintenance}", event="maintenance"
            )
        self._maintenance = maintenance
        if time.monotonic() - self._wrote_at >= QUIET:
            lag = self._health.lag()
            behind = None if lag is None or lag.kafka is None else lag.total
            quiet = time.monotonic() - self._committed_at
            self._tell(
                logging.INFO,
                f"no commit for {quiet:,.0f} s, lag {'unknown' if behind is None else behind}, "
                f"{verdict.text}",
                event="quiet",
                lag=behind,
                state=verdict.state,
            )

    def _changed(self, verdict: Verdict) -> None:
        before, self._verdict = self._verdict, verdict
        waited = time.monotonic() - self._since
        self._since = time.monotonic()
        text = verdict.text
        if verdict.state == WAITING:
            text += f"; remedy: {verdict.remedy}"
        elif before.state == WAITING:
            text += f", after a wait of {waited:,.0f} s"
        elif not before.state:
            return  # the line of the start is enough
        level = logging.WARNING if verdict.state == WAITING else logging.INFO
        self._tell(level, text, event="verdict", state=verdict.state, error=verdict.error)

    def ended(self, error: FrazilError | None) -> None:
        verdict = self._health.verdict()
        if error is None:
            rows = self._health.values()["rows"]
            text = f"stopped: {counted(rows, 'row')} committed by this run"
            text += f", {_position(self._run)}" if self._run else ""
            self._tell(logging.INFO, text, event="stopped", rows=rows)
            return
        text = f"{verdict.text}; remedy: {verdict.remedy}"
        error.logged = True
        self._tell(
            logging.ERROR, text, event="failed", error=verdict.error, exit_code=error.exit_code
        )

    def _tell(self, level: int, text: str, *, counts: bool = True, **fields: Any) -> None:
        if counts:
            self._wrote_at = time.monotonic()
        _log.log(level, "%s", text, extra={"sink": self._sink, "fields": fields})


def _position(run: Run) -> str:
    cut = run.position
    if len(cut) > _SHOWN:
        return f"position {sum(cut.values()):,} in {len(cut):,} partitions"
    return "position " + (", ".join(f"{p} {o:,}" for p, o in sorted(cut.items())) or "none yet")


def _step_text(step: Step) -> str:
    where = f" of table {step.table}" if step.table else ""
    batch = f"batch {step.batch} " if step.batch >= 0 else ""
    seconds = f" {sum(step.seconds.values()):.3f} s" if step.seconds else ""
    return f"{batch}{step.name}{where}{seconds}"
