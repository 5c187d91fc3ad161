"""Kafka through Spark's own source: a query that is there already, with Frazil behind it.

    python examples/spark_kafka.py readings.toml

No config is needed for this: the table's name, a sink id, and a session that knows the catalog.
(The file is read here for the session and for where the broker is.) The names of the last four
columns are those that Frazil looks for. While every record becomes a row, every record is accounted
for; Spark's source does not say which offsets held none, so behind a filter it is batches.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json
from pyspark.sql.streaming.query import StreamingQuery

import frazil
from frazil.testing import spark_kafka_jars


def main(
    spark: SparkSession, bootstrap: str, topic: str, table: str, **settings: Any
) -> StreamingQuery:
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    rows = records.select(
        from_json(col("value").cast("string"), "sensor string, celsius double").alias("reading"),
        col("topic").alias("_topic"),
        col("partition").alias("_topic_partition"),
        col("offset").alias("_offset"),
        col("timestamp").alias("_timestamp"),
    ).select("reading.*", "_topic", "_topic_partition", "_offset", "_timestamp")
    return frazil.write(rows, table, **settings).start()


if __name__ == "__main__":
    given = frazil.Config.from_toml(sys.argv[1])
    more = {"spark.jars": ",".join(map(str, spark_kafka_jars())), **given.spark}
    main(
        frazil.session(dataclasses.replace(given, spark=frazil.Settings(more))),
        given.kafka["bootstrap.servers"],
        given.sink.topics[0],
        given.tables[0].name,
        id=given.sink.id,
        catalog=given.catalog.name,
    ).awaitTermination()
