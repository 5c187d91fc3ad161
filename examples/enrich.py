"""A stream joined with a table of the catalog: orders, and what is known of their country.

    python examples/enrich.py orders.toml shop.countries

The reference table is looked at anew in each batch. One row of it at most for each country, so one
row for each order: the rows keep topic, partition and offset, and the audit speaks of records.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import broadcast
from pyspark.sql.streaming.query import StreamingQuery

import frazil


def main(spark: SparkSession, config: frazil.Config, countries: str) -> StreamingQuery:
    orders = frazil.read(spark, config).drop("_key", "_headers")
    known = spark.table(f"{config.catalog.name}.{countries}")  # country, name, currency
    rows = orders.join(broadcast(known), "country", "left")  # left: an unknown country is no loss
    return frazil.write(rows, config).start()


if __name__ == "__main__":
    path, table = sys.argv[1:]
    given = frazil.Config.from_toml(path)
    main(frazil.session(given), given, table).awaitTermination()
