"""The source of a sink: its DataFrame, or the stream of its config."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from frazil.config.checks import check_stream
from frazil.config.model import Config
from frazil.errors import ConfigError
from frazil.kafka.range_source import BatchGathering
from frazil.retry import Retry
from frazil.sources.base import BatchSource
from frazil.sources.dataframe import DataFrameSource
from frazil.sources.kafka import KafkaSource
from frazil.spark.read import transformed


def source_of(
    config: Config, retry: Retry, gathering: BatchGathering, frame: DataFrame | None = None
) -> BatchSource[Any]:
    if frame is None:
        check_stream(config)
        if not config.transform:
            return KafkaSource(config, retry, gathering)
        return DataFrameSource(config, retry, lambda spark: transformed(spark, config, gathering))
    if config.transform:
        raise ConfigError(
            "cannot write a DataFrame with a [transform]: transform it, or start the sink without "
            "it"
        )
    if not config.one_table:
        raise ConfigError(
            "cannot write a DataFrame with [[route]] or [dead_letters]: its rows go to one table"
        )
    return DataFrameSource(config, retry, lambda _: frame)


def refuse_keys(config: Config, source: BatchSource[Any]) -> None:
    """Raises for tables with a key, unless the records come straight from Kafka."""
    keyed = [table.name for table in config.tables if table.key]
    if keyed and not source.upserts:
        raise ConfigError(
            f"cannot write to table {keyed[0]}: only records that come straight from Kafka have "
            "keys that are upserted or logged",
            hint="remove the [transform] or DataFrame between topic and table, or use mode append",
        )
