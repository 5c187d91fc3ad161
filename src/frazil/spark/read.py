"""A stream as a DataFrame of decoded rows, and the config's transform of it."""

from __future__ import annotations

import functools
import json
import logging
import re
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from frazil.config.model import Config
from frazil.config.settings import Settings
from frazil.errors import ConfigError, from_traceback
from frazil.iceberg.java_spark import active
from frazil.kafka.planner import Planner
from frazil.kafka.range_source import FORMAT, BatchGathering, RangeDataSource, options
from frazil.pipeline.routing import load
from frazil.spark.datasource import RowDataSource, open_stream, options_config, spark_schema
from frazil.spark.planning_python import planning_python
from frazil.spark.tasks import ReadCounts, ReadCountsAccumulator, read_all

#: Names under which Spark knows our sources.
FRAZIL = (FORMAT, RowDataSource.name())

#: Counts that the tasks of each read reported: name of the read → accumulator of Spark.
_read_counts: dict[str, Any] = {}
#: ranges kept for each read
_REMEMBERED = 100_000
_sessions: weakref.WeakSet[SparkSession] = weakref.WeakSet()


def register(spark: SparkSession) -> None:
    """Register `format("frazil")` with a session. Idempotent."""
    if spark not in _sessions:
        with active(spark):  # else a name that another session has registered counts as taken
            with planning_python(spark.sparkContext):
                spark.dataSource.register(RangeDataSource)
            spark.dataSource.register(RowDataSource)
        _sessions.add(spark)


def read(
    spark: SparkSession,
    config: Config,
    *,
    start: str | Mapping[str, Mapping[str, int]] = "",
    end: Mapping[str, Mapping[str, int]] | None = None,
    gathering: BatchGathering | None = None,
) -> DataFrame:
    """The stream of `config` as a streaming DataFrame of decoded rows.

    The record's own columns are followed by topic, partition, offset and timestamp (under the names
    that the config gives them), `_key` and `_headers`. `start`: earliest, latest or a cut; it
    applies to the first start of a query only, later Spark knows the position. With `end`, a cut, a
    batch DataFrame of exactly that range. `gathering`: of the sink that reads it.
    """
    register(spark)
    if end is not None:
        return _batch(spark, config, start or "earliest", end)
    opened = open_stream(config, start)
    given = options(
        config,
        start=opened.start,
        origin=opened.origin,
        parallelism=spark.sparkContext.defaultParallelism,
        until=None,
        gathering=gathering,
    )
    name = str(uuid.uuid4())
    counts_of_read: Any = spark.sparkContext.accumulator({}, ReadCountsAccumulator())  # type: ignore[arg-type]
    _read_counts[name] = counts_of_read
    ranges = spark.readStream.format(FORMAT).options(**given, read=name).load()
    rows = functools.partial(read_all, opened.plan, counts_of_read.add)
    return ranges.mapInArrow(rows, spark_schema(opened.plan))


def _batch(spark: SparkSession, config: Config, start: Any, end: Any) -> DataFrame:
    given = {
        "start": start if isinstance(start, str) else json.dumps(start),
        "end": json.dumps(end),
    }
    names = ("topic_column", "partition_column", "offset_column", "timestamp_column")
    given |= {f"table.{name}": getattr(config.tables[0], name) for name in names}
    for section, values in (
        ("kafka", config.kafka),
        ("decode.registry", config.decode.registry),
        ("decode", {"format": config.decode.format, "schema": config.decode.schema}),
        (
            "sink",
            {
                key: getattr(config.sink, key)
                for key in (
                    "topic_pattern",
                    "kafka_client",
                    "unavailable_timeout",
                    "max_records_per_task",
                )
            },
        ),
        ("sink", {"topics": ",".join(config.sink.topics)}),
    ):
        given |= {f"{section}.{key}": str(value) for key, value in values.items() if value}
    try:
        return spark.read.format(RowDataSource.name()).options(**given).load()
    except PySparkException as error:
        raise from_traceback(str(error)) or error from None


def reports_counts(given: Mapping[str, str]) -> bool:
    """Do the tasks of this read report counts? Those of `format("frazil")` do not."""
    return given.get("read", "") in _read_counts


def reported_counts(given: Mapping[str, str]) -> ReadCounts:
    """Counts that the tasks of a read reported lately. Several queries may share a read, each at
    its own pace."""
    counts_of_read = _read_counts.get(given.get("read", ""))
    if counts_of_read is None:
        return {}
    counts: ReadCounts = dict(counts_of_read.value)
    for key in list(counts)[:-_REMEMBERED]:
        counts_of_read.value.pop(key, None)
    return counts


def planner(source: str, given: Mapping[str, str]) -> Planner | None:
    """A planner for the source's topics, from its options; None where Kafka cannot be asked."""
    if "plan" in given:
        plan = json.loads(given["plan"])
        kafka, topics, pattern = Settings(plan["kafka"]), tuple(plan["topics"]), plan["pattern"]
    elif source in FRAZIL:
        config = options_config(given)
        kafka, topics, pattern = config.kafka, config.sink.topics, config.sink.topic_pattern
    elif source == "kafka":
        # Spark's own source: its security settings are Java's, not librdkafka's.
        if any(re.match(r"kafka\.(security|sasl|ssl)", key) for key in given):
            return None
        kafka = Settings({"bootstrap.servers": given["kafka.bootstrap.servers"]})
        assigned = json.loads(given.get("assign", "{}"))
        topics = tuple(t.strip() for t in given.get("subscribe", "").split(",") if t) or (
            *assigned,
        )
        pattern = given.get("subscribepattern", "")
    else:
        return None
    return Planner(kafka.resolved(), topics=topics, pattern=pattern)


# ── the config's transform ───────────────────────────────────────────────────────────────────────


def transformed(
    spark: SparkSession, config: Config, gathering: BatchGathering | None = None
) -> DataFrame:
    """The stream after its `[transform]`."""
    rows = read(spark, config, gathering=gathering)
    if config.transform.python:
        return _by_python(rows, config.transform.python)
    rows.createOrReplaceTempView("stream")
    before = spark.catalog.currentCatalog()
    spark.catalog.setCurrentCatalog(config.catalog.name)  # `db.customers` is in the tables' catalog
    try:
        with _analysed("sql"):
            return spark.sql(_quoted(config.transform.sql))
    finally:
        spark.catalog.setCurrentCatalog(before)


def _by_python(rows: DataFrame, name: str) -> DataFrame:
    call, module = load(name, "cannot load [transform]", "frazil_transform")
    if "site-packages" not in (module.__file__ or ""):
        # Workers lack modules that are not installed: pickle their functions by value.
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    with _analysed(f"python {name}"):
        made: DataFrame = call(rows)
    return made


@contextmanager
def _analysed(transform: str) -> Iterator[None]:
    """Raises ConfigError with Spark's own message, and the line, for a faulty transform."""
    loggers = [
        logging.getLogger(n) for n in ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # it would print the whole Java trace beside our message
    try:
        yield
    except PySparkException as error:
        first, *rest = str(error).strip().splitlines()
        shown = [line for line in rest if line.strip() and not re.match(r"\s*['+:!]", line)]
        raise ConfigError(
            f"cannot use [transform] {transform}: {first}", hint="\n".join(shown)
        ) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


#: Quoted text, comments, and the view's name in the position of a table. `STREAM` is also a keyword
#: of Spark SQL: without quotes `FROM stream s` would mean the table `s`, streamed.
_TOKENS = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`|--[^\n]*|/\*.*?\*/"""
    r"""|(?P<before>\bfrom\b|\bjoin\b|,)(?P<space>\s*)\bstream\b(?!\s*[(.]|\s+\w+\.)""",
    re.IGNORECASE | re.DOTALL,
)


def _quoted(sql: str) -> str:
    def one(match: re.Match[str]) -> str:
        return f"{match['before']}{match['space']}`stream`" if match["before"] else match[0]

    return _TOKENS.sub(one, sql)
