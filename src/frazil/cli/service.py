"""`frazil run` with a folder or several files: lines of every sink, and a summary of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from frazil.cli.run import with_monitoring
from frazil.cli.run_output import RunOutput
from frazil.cli.signals import StopSignal
from frazil.config.model import Config
from frazil.errors import counted
from frazil.monitoring.http import MonitoringServer
from frazil.monitoring.observer import Observer
from frazil.monitoring.setup import forget, monitoring_of
from frazil.render import Line, error_values
from frazil.service.definitions import source_of
from frazil.service.service import Service
from frazil.service.supervision import SinkStatus, State
from frazil.sql.definition_files import DefinitionStore

_log = logging.getLogger("frazil")
#: Exit codes of failed sinks: of several, the first of these is the process's.
_URGENT = (5, 3, 2, 4, 1, 75)
#: States in the colours of a terminal.
_STYLES = {State.FAILED: "red", State.FENCED: "red", State.RETRYING: "yellow"}


class ServiceCommand:
    """All sinks of the definitions, with their progress on the console, and the report of them."""

    JSON = "sinks problems seconds"

    def __init__(
        self,
        targets: Sequence[Path | DefinitionStore],
        console: Console,
        *,
        watch: float | None,
        until_caught_up: bool,
        metrics: str = "",
        health_file: str = "",
        spark_level: str = "FATAL",
    ) -> None:
        """`metrics` and `health_file`: over those of the configs; `spark_level`: of Spark's log."""
        self._print = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        self._until_caught_up = until_caught_up
        self._metrics, self._health_file = metrics, health_file
        self._spark_level = spark_level
        self._began = time.monotonic()
        #: of all runs of a sink together
        self._lines: dict[str, RunOutput] = {}
        #: open until the process ends, also while no sink that uses one runs
        self._servers: dict[str, MonitoringServer] = {}
        self.exit_code = 0
        self.service = Service(
            source_of(targets),
            observers=self._observers_of,
            watch=watch,
            until_caught_up=until_caught_up,
            say=self._say,
            changed=self._changed,
            removed=forget,
        )

    def run(self, stop: StopSignal) -> None:
        """Until all sinks have ended, or a stop is requested. Returns normally whatever became of
        the sinks: the report tells."""
        service = self.service.start(self._spark_level)
        with stop.flagged():
            try:
                while not (stop.signal or service.wait(0.2)):
                    pass
                if stop.signal:
                    text = "stopping: the batches under way are finished and committed"
                    self._say("", text)
                    self._print("a second signal ends the process at once")
                over = service.over and not stop.signal
            finally:
                service.stop()
                for server in self._servers.values():
                    server.close()
        service.check()
        self.exit_code = self._exit_code()
        if self._until_caught_up and not over:
            self.exit_code = self.exit_code or stop.exit_code

    def _exit_code(self) -> int:
        statuses = self.service.sinks.values()
        codes = {status.error.exit_code for status in statuses if status.error}
        codes |= {2} if self.service.problems else set()
        return next((code for code in _URGENT if code in codes), max(codes, default=0))

    def _changed(self, status: SinkStatus) -> None:
        if status.state == State.STOPPED and status.error is not None:
            forget(status.sink)  # it had failed, and an operator stopped it

    def _say(self, sink: str, text: str, style: str = "") -> None:
        """What happens to the service, on the console and in the log."""
        _log.info("%s", text, extra={"sink": sink, "fields": {"event": "service"}})
        self._show(sink, text, style)

    def _show(self, sink: str, text: str, style: str = "") -> None:
        for line in text.splitlines():
            self._print(f"sink {sink}: {line}" if sink else line, style=style or None)

    def _observers_of(self, config: Config) -> list[Observer]:
        sink = config.sink.id
        if sink not in self._lines:
            self._lines[sink] = RunOutput(config, partial(self._show, sink))
        config = with_monitoring(config, self._metrics, self._health_file)
        address = config.metrics.address
        if address and address not in self._servers and address.rpartition(":")[2] != "0":
            self._servers[address] = MonitoringServer.open(address, {})
        return [self._lines[sink], monitoring_of(config)]

    # ── the report ───────────────────────────────────────────────────────────────────────────

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 2)

    @property
    def problems(self) -> dict[str, str]:
        return dict(self.service.problems)

    @property
    def sinks(self) -> dict[str, Any]:
        return {sink: self._values(status) for sink, status in sorted(self.service.sinks.items())}

    def _values(self, status: SinkStatus) -> dict[str, Any]:
        commits, error = self._lines.get(status.sink), status.error
        run = commits.run if commits else None
        return {
            "state": status.state,
            "state_changed_at": datetime.fromtimestamp(status.since, timezone.utc),
            "file": status.origin,
            "error": error and error_values(error),
            "refused": status.refused,
            "restarts": status.restarts,
            "rows": commits.rows if commits else 0,
            "rejected": commits.rejected if commits else 0,
            "skipped": commits.skipped if commits else 0,
            "rejected_by_kind": commits.rejected_by_kind if commits else {},
            "epoch": run.epoch if run else None,
            "position": run.position if run else {},
            "pending_batches": commits.pending() if commits else 0,
        }

    def lines(self) -> Iterator[Line]:
        for sink, status in sorted(self.service.sinks.items()):
            style = _STYLES.get(State(status.state), "")
            commits = self._lines.get(sink)
            if commits is not None and commits.run is not None:
                first, *others = commits.summary(self.seconds, commits.run.position)
                yield Text(f"sink {sink}: {status.state}; {first}", style=style)
                yield from (Text(f"sink {sink}: {line}", style="yellow") for line in others)
            else:
                yield Text(f"sink {sink}: {status.state}; it never ran", style=style)
            if status.error is not None:
                yield Text(f"sink {sink}: {status.error}", style=style)
            if status.refused:
                yield Text(f"sink {sink}: {status.refused}", style="yellow")
        for message in self.problems.values():
            yield Text(message, style="red")
        failed = sum(status.error is not None for status in self.service.sinks.values())
        if failed:
            yield f"{counted(failed, 'sink')} of {len(self.service.sinks)} failed"
