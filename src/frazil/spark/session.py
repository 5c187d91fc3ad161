"""A Spark session from a config: for the command line, the demo and the tests.

Users of the Python API bring their own session; `start(spark)` takes it as it is.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from frazil.config.checks import check_catalog
from frazil.config.model import Config
from frazil.errors import ConfigError, cause
from frazil.spark import class_archive, jars
from frazil.spark.read import register

#: Spark's own default, and the names of secrets in Iceberg's catalogs.
_REDACT = "(?i)secret|password|token|access[.]?key|credential|user[.]info"


#: A cached table is not refreshed: joins would keep its content from the start.
CATALOG_DEFAULTS = {"cache-enabled": "false"}
#: Records never enter the JVM: it plans and commits, so it should start fast and stay small.
_SMALL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
#: With a transform, rows do.
_JVM = "-XX:+UseParallelGC"


def session(
    config: Config, *, log_level: str = "FATAL", say: Callable[[str], None] = lambda _: None
) -> SparkSession:
    """`log_level` is Spark's: our own errors state the cause, without Java's stack traces."""
    check_catalog(config)
    settings = {
        **process_settings(f"frazil-{config.sink.id}", transform=bool(config.transform)),
        **catalog_settings(config),
        **config.spark.resolved(),
    }
    return started(settings, jar_paths([config], say), log_level)


def process_settings(name: str, *, transform: bool) -> dict[str, str]:
    """The settings of a Spark process; `transform`: records enter its JVM."""
    return {
        "spark.app.name": name,
        # Twice the cores: a task that waits for Kafka leaves its core to another. Four attempts:
        # plain local[n] would fail a job at the first lost worker.
        "spark.master": f"local[{2 * (os.cpu_count() or 1)},4]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.redaction.regex": _REDACT,
        "spark.python.daemon.module": "frazil.spark.worker_daemon",
        "spark.driver.extraJavaOptions": f"{_JVM if transform else _SMALL_JVM} "
        f"{class_archive.jvm_options()} "
        f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    }


def catalog_settings(config: Config) -> dict[str, str]:
    """The catalog of a config, as settings of a session. Secrets are resolved: never log them."""
    lead = f"spark.sql.catalog.{config.catalog.name}"
    properties = config.catalog.properties.resolved()
    return {
        lead: "org.apache.iceberg.spark.SparkCatalog",
        **{f"{lead}.{key}": value for key, value in CATALOG_DEFAULTS.items()},
        **{f"{lead}.{key}": value for key, value in properties.items()},
    }


def jar_groups(config: Config) -> list[Sequence[str]]:
    return jars.of_catalog(config.catalog.properties.resolved())


def jar_paths(configs: Iterable[Config], say: Callable[[str], None]) -> list[Path]:
    groups = dict.fromkeys(group for config in configs for group in jar_groups(config))
    return [path for group in groups for path in jars.fetch(group, transitive=False, say=say)]


def started(settings: dict[str, str], paths: Iterable[Path], log_level: str) -> SparkSession:
    jars.java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers need the same packages
    if settings["spark.master"].startswith("local"):
        give_the_host_an_address()
    extra = settings.pop("spark.jars", "")
    builder = SparkSession.builder.config(
        "spark.jars", ",".join([*map(str, paths), *filter(None, [extra])])
    )
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with _own_interrupt():
            spark = builder.getOrCreate()
    except (PySparkException, RuntimeError) as error:
        raise _unstarted(str(error).strip().splitlines()[0]) from None
    except Exception as error:
        # Py4J's own error: PySpark translates Java's only once there is a session.
        raise _unstarted(cause(str(error))) from None
    spark.sparkContext.setLogLevel(log_level)
    register(spark)
    return spark


def give_the_host_an_address() -> None:
    """Spark looks up the address of the machine's name, and does not start where it has none, as in
    some containers. With all of Spark on one machine loopback will do."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _unstarted(fact: str) -> ConfigError:
    return ConfigError(f"cannot start Spark: {fact}", hint="see [spark] in the config")


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Keeps the handler of SIGINT: PySpark's own raises wherever the main thread is."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
