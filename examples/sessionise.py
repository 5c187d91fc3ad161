"""Clicks into sessions: who stays away for half an hour begins a new one.

    python examples/sessionise.py clicks.toml

Spark keeps the open sessions in its checkpoint, so [sink] checkpoint_location must be set and
kept. A session is written once, when the watermark says that nothing can be added to it any more.
A row stands for several records, so the audit speaks of batches.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, count, session_window
from pyspark.sql.streaming.query import StreamingQuery

import frazil


def main(spark: SparkSession, config: frazil.Config) -> StreamingQuery:
    clicks = frazil.read(spark, config).select("user", col("at").cast("timestamp").alias("at"))
    sessions = (
        clicks.withWatermark("at", "10 minutes")  # how late a click may come
        .groupBy("user", session_window("at", "30 minutes").alias("time"))
        .agg(count("*").alias("clicks"))
        .select("user", "time.start", "time.end", "clicks")
    )
    return frazil.write(sessions, config).start()


if __name__ == "__main__":
    given = frazil.Config.from_toml(sys.argv[1])
    main(frazil.session(given), given).awaitTermination()
