"""Streams into Apache Iceberg tables, exactly once, with the proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from frazil.core.config import Config
    from frazil.sink import Sink, Step

__all__ = ["as_of", "read", "register", "write"]


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("frazil")` and `readStream` known to a session of your own."""
    from frazil.feed.reads import register as registering

    registering(spark)


def read(
    spark: SparkSession,
    config: Config,
    *,
    start: str | Mapping[str, Mapping[str, int]] = "",
    end: Mapping[str, Mapping[str, int]] | None = None,
) -> DataFrame:
    """The stream of `config` as a DataFrame of decoded rows; see `frazil.feed.reads.read`."""
    from frazil.feed.reads import read as reading

    return reading(spark, config, start=start, end=end)


def write(
    frame: DataFrame,
    target: str | Config,
    *,
    catalog: str = "lake",
    output_mode: str = "append",
    on_step: Callable[[Step], None] | None = None,
    on_complete: Callable[[datetime], object] | None = None,
    **settings: Any,
) -> Sink:
    """A sink for any streaming DataFrame; `.start()` it.

    `target`: the table's name, with `id` and other fields of `[sink]`, `[[table]]` and
    `[completeness]` as keywords; or a config that has them.
    """
    from frazil.core.config import Config, check_output_mode, for_frame
    from frazil.sink import Sink

    check_output_mode(output_mode)
    config = target if isinstance(target, Config) else for_frame(target, catalog, settings)
    return Sink(config, frame=frame, on_step=on_step, on_complete=on_complete)


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
    from frazil.surface import asof

    below = asof.wanted(topic, partition, offset, cut)
    return asof.as_of(spark, target, below, table=table, sink=sink, catalog=catalog, branch=branch)
