"""One Spark process for the sinks of several configs: one context, a session for each sink.

In: the configs, by sink. Out: sessions that share context, executors and JVM, and nothing else: two
sinks may use one catalog's name with different properties. A setting of `[spark]` that concerns the
whole process (memory, master, jars) must be the same for every sink that has it. The sinks take
turns: each has its own pool of the fair scheduler. Runs on the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import SparkSession

from frazil.config.checks import check_catalog
from frazil.config.model import Config
from frazil.config.settings import SECRET
from frazil.config.spark_settings import of_process
from frazil.errors import ConfigError, FrazilError
from frazil.iceberg.java_spark import runs
from frazil.spark.read import register
from frazil.spark.session import (
    catalog_settings,
    jar_groups,
    jar_paths,
    process_settings,
    started,
)


class SharedSession:
    """Started with the first configs; later ones must fit in."""

    def __init__(
        self,
        configs: Mapping[str, Config],
        *,
        spark: SparkSession | None = None,
        log_level: str = "FATAL",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Raises ConfigError where two sinks contradict each other. `spark`: a session of the
        user's, whose settings are taken as they are."""
        self._given = spark is not None
        self._log_level = log_level
        #: setting of the process → its value, and the sink that has it
        self._settings: dict[str, tuple[str, str]] = {}
        self._jars: set[Sequence[str]] = set()
        #: sink → its session, and the settings that it was made with
        self._sessions: dict[str, tuple[SparkSession, dict[str, str]]] = {}
        self._making = threading.Lock()
        for sink, config in configs.items() if not self._given else ():
            self.take(sink, config)
        self._spark = spark or started(
            {
                **process_settings(
                    "frazil", transform=any(config.transform for config in configs.values())
                ),
                "spark.scheduler.mode": "FAIR",
                **{key: value for key, (value, _) in self._settings.items()},
            },
            jar_paths(configs.values(), say),
            log_level,
        )

    def take(self, sink: str, config: Config) -> None:
        """Before the process is started: its settings are to be those of the config, too."""
        check_catalog(config)
        self._refuse_other_settings(sink, config)
        self._settings |= {key: (value, sink) for key, value in _of_process(config).items()}
        self._jars |= set(jar_groups(config))

    def check(self, sink: str, config: Config) -> None:
        """Raises ConfigError if the sink would need another process."""
        if self._given:
            return
        check_catalog(config)
        self._refuse_other_settings(sink, config)
        wanted = _of_process(config)
        new = [key for key in wanted if key not in self._settings]
        lacking = sorted(name for group in set(jar_groups(config)) - self._jars for name in group)
        if not new and not lacking:
            return
        fact = (
            f"[spark] {new[0]} concerns" if new else f"it needs {', '.join(lacking)}, which is for"
        )
        raise ConfigError(
            f"cannot run sink {sink} in this process: {fact} the whole process, which has started "
            "without it",
            hint="start the process again",
        )

    def _refuse_other_settings(self, sink: str, config: Config) -> None:
        for key, value in _of_process(config).items():
            known, other = self._settings.get(key, (value, sink))
            if known == value:
                continue
            known, value = (shown(key, text) for text in (known, value))
            if other != sink:
                raise ConfigError(
                    f"cannot run sinks {other} and {sink} in one process: [spark] {key} concerns "
                    f"the whole process, and is {known} for {other}, {value} for {sink}",
                    hint="give both the same value, or run them in two processes",
                )
            raise ConfigError(
                f"cannot run sink {sink} in this process: [spark] {key} concerns the whole "
                f"process, which was started with {known}; found {value}",
                hint="start the process again",
            )

    def session(self, sink: str, config: Config) -> SparkSession:
        """The session of a sink. Jobs of the calling thread, and of the queries that it starts, run
        in the sink's pool."""
        self.check(sink, config)
        wanted = {k: v for k, v in config.spark.resolved().items() if not of_process(k)}
        if config.catalog.properties or not self._given:
            wanted = {**catalog_settings(config), **wanted}
        with self._making:
            session, settings = self._sessions.get(sink, (None, {}))
            if session is None or settings != wanted:
                session = self._spark.newSession()
                for key, value in wanted.items():
                    session.conf.set(key, value)
                register(session)
                self._sessions[sink] = session, wanted
        session.sparkContext.setLocalProperty("spark.scheduler.pool", f"frazil-{sink}")
        return session

    def forget(self, sink: str) -> None:
        """The sink is gone: its session may go, too."""
        self._sessions.pop(sink, None)

    @property
    def failure(self) -> FrazilError | None:
        """Why nothing runs in this process any more, if its JVM has ended."""
        if runs(self._spark):
            return None
        return FrazilError(
            "cannot continue: Spark's process has ended",
            hint="start the sinks again: nothing is lost",
        )

    def stop(self) -> None:
        if not self._given:
            self._spark.stop()


def shown(key: str, value: str) -> str:
    return "***" if SECRET.search(key) else repr(value)


def _of_process(config: Config) -> dict[str, str]:
    return {key: value for key, value in config.spark.resolved().items() if of_process(key)}
