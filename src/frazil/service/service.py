"""Several sinks in one process, by definitions that may change while they run.

In: a source of definitions. Out: one thread for each sink, all in one Spark process with a session
and a pool of the fair scheduler for each. Promised: trouble of one sink does not stop another; a
sink whose definition is gone is stopped, one that is new is started, one that changed takes over
the change or starts again, and each of these is said. Runs on the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pyspark.sql import SparkSession

from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError
from frazil.monitoring.observer import Observer
from frazil.service.definitions import Definition, Definitions, DefinitionSource
from frazil.service.sink_run import ObservedRun, SinkRun
from frazil.service.sink_thread import SinkThread
from frazil.service.supervision import FINAL, SinkStatus, State
from frazil.spark.shared_session import SharedSession

#: Seconds that sinks get to finish and commit when the service stops.
STOP_SECONDS = 90.0
#: Seconds between two looks at the definitions.
WATCH_SECONDS = 2.0

#: What is to be reported of a sink; of the service itself if the name is empty.
Say = Callable[[str, str], None]


class Service:
    """`start`, then `wait` or `stop`; as a context manager it stops at the end of the block."""

    def __init__(
        self,
        source: DefinitionSource,
        *,
        spark: SparkSession | None = None,
        observers: Callable[[Config], Sequence[Observer]] = lambda config: (),
        watch: float | None = WATCH_SECONDS,
        until_caught_up: bool = False,
        say: Say = lambda sink, text: None,
        changed: Callable[[SinkStatus], None] = lambda status: None,
        removed: Callable[[str], None] = lambda sink: None,
    ) -> None:
        """`observers`: of one run of a sink. `watch`: seconds between two looks at the
        definitions; None: they are taken once. `changed` gets the status of a sink whenever it has
        changed, on the sink's thread; `removed` gets a sink that is no longer defined, when it has
        ended."""
        self._source = source
        self._given = spark
        self._watch = watch
        self._new_run: Callable[[str, Config], SinkRun] = lambda sink, config: ObservedRun(
            config, lambda: self.spark.session(sink, config), observers, until_caught_up
        )
        self._say = say
        self._changed = changed
        self._removed = removed
        self._threads: dict[str, SinkThread] = {}
        #: sinks that were asked to stop, because they are no longer defined
        self._leaving: set[str] = set()
        #: sinks that are no longer defined, and how they ended
        self._left: dict[str, SinkStatus] = {}
        self._problems: dict[str, str] = {}
        self._closed = threading.Event()
        self._failure: FrazilError | None = None
        self._looker = threading.Thread(target=self._look, name="frazil-definitions", daemon=True)

    def start(self, log_level: str = "FATAL") -> Service:
        """Raises ConfigError, with nothing started, where sinks contradict each other. `log_level`
        is Spark's."""
        first = self._source.read()
        doubled = [problem.message for problem in first.problems.values() if problem.sinks]
        if doubled:
            raise ConfigError(doubled[0], hint="give each sink an id of its own")
        if not first.sinks:
            wrong = [problem.message for problem in first.problems.values()]
            raise ConfigError(
                "\n".join(wrong) or "cannot run: there is no file of a sink",
                hint=""
                if wrong
                else "frazil sql FILE --definitions DIR defines one; TOML files do, too",
            )
        configs = {sink: definition.config for sink, definition in first.sinks.items()}
        self.spark = SharedSession(
            configs,
            spark=self._given,
            log_level=log_level,
            say=lambda text: self._say("", text),
        )
        self._take(first)
        if self._watch is not None:
            self._looker.start()
        return self

    # ── how they are ─────────────────────────────────────────────────────────────────────────

    @property
    def sinks(self) -> Mapping[str, SinkStatus]:
        """Every sink of the service, also those that are no longer defined."""
        now = {sink: thread.status for sink, thread in list(self._threads.items())}
        return {**self._left, **now}

    @property
    def problems(self) -> Mapping[str, str]:
        """File → why it defines no sink."""
        return dict(self._problems)

    @property
    def over(self) -> bool:
        """Does nothing run, and will nothing by itself?"""
        if self._failure is not None:
            return True
        threads = [t for sink, t in list(self._threads.items()) if sink not in self._leaving]
        states = [State(thread.status.state) for thread in threads]
        ended = FINAL if self._watch is not None else FINAL | {State.STOPPED}
        return bool(states or self._watch is None) and all(state in ended for state in states)

    def check(self) -> None:
        """Raise what ended Spark's process, if it ended."""
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout: float | None = None) -> bool:
        """Until every sink has ended, failed or was fenced, or the service is stopped: True. False
        when the time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.over:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._closed.wait(min(0.2, left)):
                break
        return True

    # ── its end ──────────────────────────────────────────────────────────────────────────────

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """All sinks, each after its batch in progress. False if the time was up before."""
        self._closed.set()
        if self._looker.is_alive():
            self._looker.join(timeout)
        threads = list(self._threads.values())
        for thread in threads:
            thread.leave("the service ends")
        deadline = time.monotonic() + timeout
        ends = [thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]
        return all(ends)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── definitions ──────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        with self._source.watching():
            while not self._closed.wait(self._watch):
                try:
                    self._take(self._source.read())
                except (
                    Exception
                ) as error:  # the thread's outermost frame: the next look may be well
                    self._report({"": f"cannot look at the definitions: {error!r}"})

    def _take(self, now: Definitions) -> None:
        """Sinks begin, change and end as they are defined now."""
        self._report({name: problem.message for name, problem in now.problems.items()})
        for sink in [sink for sink in self._leaving if self._threads[sink].join(0)]:
            self._left[sink] = self._threads[sink].status
            del self._threads[sink]
            self._leaving.remove(sink)
            self.spark.forget(sink)
            self._removed(sink)
        for sink, definition in now.sinks.items():
            if sink in self._leaving:
                continue  # it begins again when it has ended
            thread = self._threads.get(sink)
            if thread is None:
                self._begin(definition)
            elif definition != thread.defined:
                thread.define(definition)
        for sink, thread in self._threads.items():
            known = sink in now.sinks or sink in self._leaving
            if not known and not now.keeps(thread.defined):
                self._leaving.add(sink)
                thread.leave(f"{thread.defined.origin} no longer defines it")

    def _begin(self, definition: Definition) -> None:
        sink = definition.sink
        self._left.pop(sink, None)
        thread = self._threads[sink] = SinkThread(
            definition, partial(self._new_run, sink), partial(self._say, sink), self._sink_changed
        )
        thread.start()

    def _sink_changed(self, status: SinkStatus) -> None:
        if status.state in (State.RETRYING.value, State.FAILED.value) and self._failure is None:
            self._failure = self.spark.failure
        self._changed(status)

    def _report(self, problems: Mapping[str, str]) -> None:
        """Each problem once, until it changes."""
        for name, message in problems.items():
            if self._problems.get(name) != message:
                self._say("", message)
        self._problems = dict(problems)
