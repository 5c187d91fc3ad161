"""Writes streams to Apache Iceberg tables, exactly once, and proves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from frazil.config.model import Config
    from frazil.sink import Sink, Step

__all__ = ["as_of", "read", "register", "write"]


def register(spark: SparkSession) -> None:
    """Register the `frazil` format for `spark.read` and `spark.readStream` in your own session."""
    from frazil.spark.read import register as registering

    registering(spark)


def read(
    spark: SparkSession,
    config: Config,
    *,
    start: str | Mapping[str, Mapping[str, int]] = "",
    end: Mapping[str, Mapping[str, int]] | None = None,
) -> DataFrame:
    """The stream of `config` as a DataFrame of decoded rows; see `frazil.spark.read.read`."""
    from frazil.spark.read import read as reading

    return reading(spark, config, start=start, end=end)


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
    `[completeness]` as keywords; or a config that has them. The name may begin with the catalog,
    as in `prod.shop.orders`; otherwise `catalog` names it, by default `lake`.
    """
    from frazil.config.model import Config, check_output_mode, for_frame
    from frazil.sink import Sink

    check_output_mode(output_mode)
    if isinstance(target, Config):
        config = target
    else:
        first = "" if catalog or target.count(".") < 2 else target.split(".")[0]
        known = frame.sparkSession.conf.get(f"spark.sql.catalog.{first}", "") if first else ""
        config = for_frame(target, catalog or (first if known else "lake"), settings)
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
    """A table at the first snapshot that contains the offset, or everything below the cut.

    `target`: a config (with `table` where the sink fills several), or a table's name (with `sink`
    where several write to it).
    """
    from frazil.ops import as_of

    below = as_of.wanted(topic, partition, offset, cut)
    return as_of.as_of(spark, target, below, table=table, sink=sink, catalog=catalog, branch=branch)
