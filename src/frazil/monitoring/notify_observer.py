"""The observer that turns what happens to a sink into events, for `monitoring.notifier`.

In: steps and ticks of a run, and the sink's health. Out: `started`, `stopped`, `failed`, `fenced`,
`waiting`, `recovered` and `rejected`, each with the verdict, reason and remedy. A wait is sent once
it has lasted, rejections at most once per kind and minute, with their number. No event has a value
of a record. Runs on the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from frazil.config.model import Config
from frazil.config.secret_values import secret_values
from frazil.config.sections import EVENTS
from frazil.errors import Fenced, FrazilError, counted
from frazil.monitoring.health_state import WAITING
from frazil.monitoring.notifier import Notifier
from frazil.monitoring.sink_health import SinkHealth, place_of
from frazil.run import Run
from frazil.steps import Step

#: Seconds that a wait lasts before it is sent.
SETTLED = 10.0
#: Seconds between two events of rejections of one kind.
PER_KIND = 60.0


class NotifyObserver:
    def __init__(
        self,
        config: Config,
        health: SinkHealth,
        notifier: Notifier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = frozenset(config.notify.events or EVENTS)
        self._health = health
        self._notifier = of_config(config) if notifier is None else notifier
        self._clock = clock
        self._lock = threading.Lock()
        #: when the wait of the moment began; 0: there is none
        self._waiting_since = 0.0
        self._wait_sent = False
        #: kind of rejected records → when it was sent, how many were not, and the last place
        self._rejected: dict[str, tuple[float, int, str]] = {}

    def started(self, run: Run) -> None:
        self._tell("started", f"epoch {run.epoch}")

    def step(self, step: Step) -> None:
        if step.name == "written" and step.rejected:
            with self._lock:
                for kind, (count, last) in step.rejected.items():
                    sent, waiting, _ = self._rejected.get(kind, (-PER_KIND, 0, ""))
                    self._rejected[kind] = sent, waiting + count, place_of(last)

    def tick(self, run: Run) -> None:
        now = self._clock()
        verdict = self._health.verdict()
        if verdict.state == WAITING:
            self._waiting_since = self._waiting_since or now
            if not self._wait_sent and now - self._waiting_since >= SETTLED:
                self._wait_sent = True
                self._tell("waiting")
        else:
            if self._wait_sent:
                seconds = now - self._waiting_since
                self._tell("recovered", f"after a wait of {seconds:,.0f} s", seconds=seconds)
            self._waiting_since, self._wait_sent = 0.0, False
        self._tell_rejected(now)

    def _tell_rejected(self, now: float, every: bool = False) -> None:
        with self._lock:
            due = {
                kind: (count, last)
                for kind, (sent, count, last) in self._rejected.items()
                if count and (every or now - sent >= PER_KIND)
            }
            self._rejected |= {kind: (now, 0, last) for kind, (_, last) in due.items()}
        for kind, (count, last) in due.items():
            text = f"{counted(count, 'record')} rejected, kind {kind}, the last: {last}"
            self._tell("rejected", text, kind=kind, records=count, last=last)

    def ended(self, error: FrazilError | None) -> None:
        self._tell_rejected(self._clock(), every=True)
        if error is None:
            self._tell("stopped")
        else:
            event = "fenced" if isinstance(error, Fenced) else "failed"
            self._tell(event, exit_code=error.exit_code)
        self._notifier.close()

    def _tell(self, event: str, detail: str = "", **more: Any) -> None:
        if event not in self._wanted:
            return
        values = self._health.values()
        keys = ("sink", "epoch", "host", "pid", "verdict", "state", "reason", "remedy", "error")
        text = f"sink {values['sink']} on {values['host']}: {event}"
        text += f": {detail}" if detail else ""
        if event not in ("started", "rejected"):
            text += f": {values['verdict']}"
            text += f"; remedy: {values['remedy']}" if values["remedy"] else ""
        chosen = {key: values[key] for key in keys}
        self._notifier.send(
            {
                "event": event,
                "occurred_at": values["written_at"],
                **chosen,
                "detail": detail,
                **more,
                "text": text,
            }
        )


def of_config(config: Config) -> Notifier:
    return Notifier(config.notify, config.sink.id, secret_values(config))
