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
    if config.routes or config.dead_letters:
        raise ConfigError(
            "cannot write a DataFrame with [[route]] or [dead_letters]: its rows go to one table"
        )
    return DataFrameSource(config, retry, lambda _: frame)


def refuse_keys(config: Config, source: BatchSource[Any]) -> None:
    """Raises for settings of tables with a key that the source has no use for."""
    for table in config.tables:
        doing = f"cannot write to table {table.name}"
        if source.changes == "records" and table.delete_column:
            raise ConfigError(
                f"{doing}: delete_column is for rows of a query, and its records come straight "
                "from Kafka",
                hint="a record without a value deletes its key, and so does Debezium's d",
            )
        if source.changes == "records" or not table.key:
            continue
        if not source.changes:
            raise ConfigError(
                f"{doing}: its key may have a newer row than a dead letter, which would replace it",
                hint="produce the record again, if its key has no newer one: it is then the newest",
            )
        if not table.upsert_key:
            raise ConfigError(
                f"{doing}: its mode is {table.mode}, and only records that come straight from "
                "Kafka are logged with their keys",
                hint="remove the [transform] or DataFrame between topic and table, or use mode "
                "append or upsert",
            )
        if table.partitioned_by_key:
            raise ConfigError(
                f"{doing}: partitioned_by_key is for records that come straight from Kafka, and "
                "its rows come from a query",
                hint="leave it out: the rows of a key are brought together in any case",
            )
