"""The thread of one sink of a service: it carries out what `service.supervision` says.

Whatever happens to the sink ends here: the threads of the others notice nothing.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError
from frazil.service.definitions import Definition
from frazil.service.sink_run import SinkRun
from frazil.service.supervision import (
    Action,
    Adapt,
    End,
    Restart,
    SinkStatus,
    Sleep,
    Start,
    Stop,
    Supervision,
    WallClock,
)


class SinkThread:
    def __init__(
        self,
        definition: Definition,
        make: Callable[[Config], SinkRun],
        say: Callable[[str], None],
        changed: Callable[[SinkStatus], None] = lambda status: None,
        clock: WallClock = time,
    ) -> None:
        """`make`: a run that is not started yet; it raises ConfigError for a config that it can
        refuse without a server. `changed` is called after each change of state."""
        self.sink = definition.sink
        #: as it was last reported
        self.defined = definition
        self._make = make
        self._changed = changed
        self._orders = threading.Condition()
        self._supervision = Supervision(definition, say, clock)
        self._run: SinkRun | None = None
        self._reported: SinkStatus | None = None
        self._thread = threading.Thread(target=self._loop, name=f"frazil-{self.sink}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def status(self) -> SinkStatus:
        with self._orders:
            return self._supervision.status

    def define(self, definition: Definition) -> None:
        self.defined = definition
        with self._orders:
            self._supervision.define(definition)
            self._orders.notify_all()

    def leave(self, reason: str) -> None:
        with self._orders:
            self._supervision.leave(reason)
            self._orders.notify_all()
            run = None if self._supervision.live else self._run
        if run is not None:
            run.cancel()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            with self._orders:
                action = self._supervision.next()
            self._tell()
            if isinstance(action, End):
                return
            try:
                self._do(action)
            except FrazilError as error:
                self._failed(error)
            except Exception as error:
                # The thread's outermost frame: a defect, or Spark's own process has ended.
                unknown = FrazilError(f"unexpected error: {type(error).__name__}: {error}")
                unknown.detail = traceback.format_exc()
                self._failed(unknown)
            self._tell()

    def _do(self, action: Action) -> None:
        supervision = self._supervision
        if isinstance(action, Sleep):
            with self._orders:
                if not supervision.ordered:
                    self._orders.wait(action.seconds)
        elif isinstance(action, Start):
            run = self._make(action.definition.config)
            with self._orders:
                self._run = run
                if supervision.leaving:
                    run.cancel()
            run.start()
            with self._orders:
                supervision.started()
        else:
            assert self._run is not None
            self._go_on(action, self._run)

    def _go_on(self, action: Action, run: SinkRun) -> None:
        supervision = self._supervision
        if isinstance(action, Adapt):
            run.adapt(action.definition.config)
        elif isinstance(action, Restart):
            try:
                self._make(action.definition.config)
            except ConfigError as error:
                with self._orders:
                    supervision.refuse(error.message, error.hint)
            else:
                self._stop(run)
        elif isinstance(action, Stop):
            self._stop(run)
        elif run.watch(self._ordered):
            self._run = None
            run.stop()
            with self._orders:
                supervision.ended()

    def _ordered(self) -> bool:
        return self._supervision.ordered

    def _stop(self, run: SinkRun) -> None:
        self._run = None
        run.stop()
        with self._orders:
            self._supervision.stopped()

    def _failed(self, error: FrazilError) -> None:
        run, self._run = self._run, None
        if run is not None:
            try:
                run.stop(error)
            except Exception as late:  # what ended it also hinders its end: the first one counts
                error.detail = error.detail or str(late)
        with self._orders:
            self._supervision.failed(error)

    def _tell(self) -> None:
        status = self.status
        if status != self._reported:
            self._reported = status
            self._changed(status)
