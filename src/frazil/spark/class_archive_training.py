"""A small stream into an Iceberg table, in a folder of its own and without Kafka: it loads the
classes that a driver needs (`class_archive`)."""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame

from frazil.config.model import from_document
from frazil.spark.session import session


def run(folder: str) -> None:
    config = from_document(
        {
            "sink": {"id": "classes", "topics": ["classes"]},
            "kafka": {"bootstrap.servers": "127.0.0.1:1"},
            "decode": {"format": "json"},
            "catalog": {
                "name": "lake",
                "type": "jdbc",
                "uri": f"jdbc:sqlite:{folder}/catalog.db",
                "warehouse": f"file://{folder}",
                "jdbc.schema-version": "V1",
            },
            "table": [{"name": "db.classes"}],
        }
    )
    spark = session(config)
    spark.sql("CREATE NAMESPACE lake.db")
    spark.sql("CREATE TABLE lake.db.classes (timestamp timestamp, value bigint) USING iceberg")

    def append(frame: DataFrame, _: int) -> None:
        frame.writeTo("lake.db.classes").append()

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    writer = stream.writeStream.foreachBatch(append).trigger(availableNow=True)
    writer.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
    spark.table("lake.db.classes").collect()
    spark.stop()


if __name__ == "__main__":
    run(sys.argv[1])
