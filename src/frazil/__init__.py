"""Streams into Apache Iceberg tables, exactly once, with the proof.

    import frazil

    with frazil.Sink.from_toml("orders.toml").start() as run:
        run.wait_until_caught_up(timeout=600)
    frazil.audit("orders.toml").raise_unless_proven()

This package is the whole public API; every module below it is internal. `import frazil` loads
nothing of weight: Spark, Arrow and Kafka's client are imported where they are first used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frazil import errors
from frazil.config.model import Config, catalog_only
from frazil.config.sections import (
    CatalogConfig,
    CompletenessConfig,
    DeadLettersConfig,
    DecodeConfig,
    HealthConfig,
    LogConfig,
    MetricsConfig,
    NotifyConfig,
    RouteConfig,
    SinkConfig,
    TableConfig,
    TransformConfig,
)
from frazil.config.settings import Settings
from frazil.config.units import duration
from frazil.offsets import Cut, Partition, Range

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from frazil.auditing.evidence import AuditResult
    from frazil.ops.locate import LocateReport
    from frazil.pipeline.routing import SKIP
    from frazil.run import Run
    from frazil.service.service import Service
    from frazil.service.supervision import SinkStatus
    from frazil.sink import Sink
    from frazil.spark.session import session
    from frazil.steps import STEPS, Step

    __version__: str

__all__ = [
    "SKIP",
    "STEPS",
    "AuditResult",
    "CatalogConfig",
    "CompletenessConfig",
    "Config",
    "Cut",
    "DeadLettersConfig",
    "DecodeConfig",
    "HealthConfig",
    "LocateReport",
    "LogConfig",
    "MetricsConfig",
    "NotifyConfig",
    "Partition",
    "Range",
    "RouteConfig",
    "Run",
    "Service",
    "Settings",
    "Sink",
    "SinkConfig",
    "SinkStatus",
    "Step",
    "TableConfig",
    "TransformConfig",
    "__version__",
    "as_of",
    "audit",
    "errors",
    "locate",
    "read",
    "register",
    "run_all",
    "session",
    "status",
    "write",
]

logging.getLogger("frazil").addHandler(logging.NullHandler())  # the program decides, not a library

#: Names that need Spark or Arrow, and the modules that they are imported from at their first use.
_LAZY = {
    "SKIP": "frazil.pipeline.routing",
    "STEPS": "frazil.steps",
    "AuditResult": "frazil.auditing.evidence",
    "LocateReport": "frazil.ops.locate",
    "Run": "frazil.run",
    "Service": "frazil.service.service",
    "Sink": "frazil.sink",
    "SinkStatus": "frazil.service.supervision",
    "Step": "frazil.steps",
    "session": "frazil.spark.session",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("frazil")
    if name not in _LAZY:
        raise AttributeError(f"module 'frazil' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


def register(spark: SparkSession) -> None:
    """Register the data source `frazil` in a session: `spark.readStream.format("frazil")`."""
    from frazil.spark import read as reading

    reading.register(spark)


def read(
    spark: SparkSession,
    config: Config,
    *,
    start: str | Mapping[str, Mapping[str, int]] = "",
    end: Mapping[str, Mapping[str, int]] | None = None,
) -> DataFrame:
    """The stream of `config` as a DataFrame of decoded rows.

    `start`: `earliest`, `latest` or a cut, for a query's first start; by default
    `starting_offsets`. With `end`, a cut, a batch DataFrame of exactly that range.
    """
    from frazil.spark import read as reading

    return reading.read(spark, config, start=start, end=end)


def write(
    frame: DataFrame,
    target: str | Config,
    *,
    catalog: str = "",
    output_mode: str = "append",
    on_step: Callable[[Step], None] | None = None,
    on_complete: Callable[[datetime], object] | None = None,
    **settings: Any,
) -> Sink:
    """A sink for any streaming DataFrame; `.start()` it.

    `target`: the table's name, with `id` and other fields of `[sink]`, `[[table]]` and
    `[completeness]` as keywords; or a config that has them. The name may begin with the catalog's,
    `prod.shop.orders`; otherwise `catalog` names it, by default `lake`. `output_mode`: Spark's,
    `append`, or `update` for a table of mode `upsert`.
    """
    from dataclasses import replace

    from frazil.config.model import for_frame
    from frazil.sink import Sink

    if isinstance(target, Config):
        config = target
        if output_mode != "append":
            config = replace(config, transform=replace(config.transform, output_mode=output_mode))
    else:
        first = "" if catalog or target.count(".") < 2 else target.split(".")[0]
        known = frame.sparkSession.conf.get(f"spark.sql.catalog.{first}", "") if first else ""
        catalog = catalog or (first if known else "lake")
        config = for_frame(target, catalog, settings, output_mode)
    return Sink(config, frame=frame, on_step=on_step, on_complete=on_complete)


def run_all(
    targets: Sequence[str | Path | Config],
    *,
    spark: SparkSession | None = None,
    watch: str = "",
    until_caught_up: bool = False,
    changed: Callable[[SinkStatus], None] = lambda status: None,
) -> Service:
    """Several sinks in one process, started. `targets`: TOML files, folders of them, or configs.

    With `watch`, a duration, files and folders are looked at so often, and what is added, changed
    or removed is taken over. `changed` gets the status of a sink whenever it has changed, on a
    thread of that sink. Without `spark` one Spark process is started as the configs say.
    """
    from frazil.service.definitions import source_of
    from frazil.service.service import Service

    return Service(
        source_of(targets),
        spark=spark,
        watch=duration(watch, "watch") if watch else None,
        until_caught_up=until_caught_up,
        changed=changed,
    ).start()


def as_of(
    spark: SparkSession,
    target: str | Config,
    topic: str = "",
    partition: int = -1,
    offset: int = -1,
    *,
    cut: Mapping[str, Mapping[str, int]] | Mapping[Any, int] | None = None,
    table: str = "",
    sink: str = "",
    catalog: str = "",
    branch: str = "",
) -> DataFrame:
    """A table at the first snapshot that has the offset, or everything below the cut.

    `target`: a config (with `table` where the sink fills several), or a table's name (with `sink`
    where several write to it).
    """
    from frazil.ops import as_of

    below = as_of.wanted_cut(topic, partition, offset, cut)
    return as_of.as_of(spark, target, below, table=table, sink=sink, catalog=catalog, branch=branch)


def audit(
    target: str | Path | Config,
    *,
    catalog: Mapping[str, str] | None = None,
    branch: str = "main",
    deep: bool = False,
    ask_kafka: bool | None = None,
    max_lag: int | None = None,
    max_age: str = "",
    spark: bool | None = None,
) -> AuditResult:
    """Prove from metadata that every offset is in the tables exactly once.

    `target`: a config or the path of its TOML file; or a table's name, with the properties of its
    catalog. `deep` also reads the data files. `ask_kafka`: True: Kafka must answer; False: it is
    not asked; None: it is asked for the lag. `spark`: with it, without it, or where it is needed.
    """
    from frazil.auditing import evidence
    from frazil.spark.open_table import opener

    config, name = _target(target, catalog)
    opened = opener(config, spark, _silent)
    if name:
        return evidence.of_table(opened, name, branch, deep)
    limits = evidence.AuditLimits(max_lag, duration(max_age) if max_age else None)
    return evidence.of_config(config, opened, deep=deep, ask=ask_kafka, limits=limits, say=_silent)


def locate(
    target: str | Path | Config,
    topic: str,
    partition: int,
    offset: int,
    *,
    table: str = "",
    catalog: Mapping[str, str] | None = None,
    branch: str = "main",
    spark: bool | None = None,
) -> LocateReport:
    """Which batch, snapshot and files hold an offset; `target` as in `audit`."""
    from frazil.ops import locate as locating
    from frazil.spark.open_table import opener

    config, name = _target(target, catalog)
    opened, where = opener(config, spark, _silent), Partition(topic, partition)
    if name:
        return locating.of_table(config.catalog.name, opened, name, where, offset, branch)
    return locating.of_sink(config, opened, where, offset, table)


def status(target: str | Path | Config, *, spark: bool | None = None) -> dict[str, Any]:
    """Position, lag, counts, staged batches and last commit of a sink: `frazil status --json`."""
    from frazil.ops import status as looking
    from frazil.spark.open_table import opener

    config, _ = _target(target, None)
    return looking.status(config, opener(config, spark, _silent))


def _target(target: str | Path | Config, catalog: Mapping[str, str] | None) -> tuple[Config, str]:
    """The config, and the name of the table where that is all the target says."""
    if isinstance(target, Config):
        return target, ""
    if catalog is not None:
        return catalog_only(str(target), catalog), str(target)
    from frazil.config.model import load

    return load(target), ""


def _silent(_: str) -> None:
    """Progress of a call from Python is not printed."""
