"""Jars that the product does not need: Spark's Kafka source, and Iceberg's REST catalog server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from frazil.spark.jars import SQLITE, fetch, pyspark_home


def spark_kafka_jars(say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Spark's own Kafka source and `from_avro`: for comparisons and users' queries; the pipeline
    needs neither. Not all of it is published for this Spark version."""
    return fetch(
        (
            "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.1",
            "org.apache.spark:spark-avro_2.13:4.1.1",
        ),
        overrides=["org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0"],
        excludes=["org.apache.hadoop", "org.scala-lang", "org.slf4j"],
        say=say,
    )


def rest_catalog_jars(say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Iceberg's reference REST catalog server, over JDBC on SQLite: for tests and comparisons. It
    is published as test code of 1.11; its Hadoop part is PySpark's own."""
    core, jetty = "org.apache.iceberg:iceberg-core:1.11.0", "12.1.13"
    paths = fetch(
        (
            core,
            f"org.eclipse.jetty.ee10:jetty-ee10-servlet:{jetty}",
            f"org.eclipse.jetty.compression:jetty-compression-server:{jetty}",
            f"org.eclipse.jetty.compression:jetty-compression-gzip:{jetty}",
            *SQLITE,
            "org.slf4j:slf4j-simple:2.0.17",
        ),
        say=say,
    )
    server = ("org.apache.iceberg:iceberg-open-api:1.11.0:test-fixtures", f"{core}:tests")
    paths += fetch(server, transitive=False, say=say)
    return paths + sorted((pyspark_home() / "jars").glob("hadoop-client-*.jar"))
