"""Payments into one row for each customer: how many, how much, and when the last one was.

    python examples/totals.py payments.toml

Spark keeps the totals in its checkpoint, so [sink] checkpoint_location must be set and kept. In
output mode update each batch has the totals that it changed, and replaces their rows: every
snapshot of the table is the query's result at one cut. The table has a key, those of the groups:

    [[table]]
    name = "shop.totals"
    mode = "upsert"
    key = ["customer"]
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, count, max
from pyspark.sql.functions import sum as total
from pyspark.sql.streaming.query import StreamingQuery

import frazil


def main(spark: SparkSession, config: frazil.Config) -> StreamingQuery:
    payments = frazil.read(spark, config)
    totals = payments.groupBy("customer").agg(
        count("*").alias("payments"),
        total("cents").alias("cents"),
        max(col("at").cast("timestamp")).alias("last_at"),
    )
    return frazil.write(totals, config, output_mode="update").start()


if __name__ == "__main__":
    given = frazil.Config.from_toml(sys.argv[1])
    main(frazil.session(given), given).awaitTermination()
