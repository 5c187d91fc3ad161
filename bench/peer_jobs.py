"""The four sides of the comparison, each set up as its documentation advises.

A side starts jobs that write a topic into a new table: with an interval of 0 all that the topic
has, as fast as it can; else for ever, committing every few seconds. Each table has the same columns
in the same REST catalog.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from frazil.spark import jars
from frazil.testing import datagen
from frazil.testing.jars import spark_kafka_jars
from frazil.testing.kafka import die_with_parent, free_ports
from peer_topics import Servers, Topic

FLINK = "2.1.1"
CONNECT = "4.3.1"
#: Flink's Kafka connector and Avro format are released apart from Flink.
FLINK_JARS = (
    *(
        f"org.apache.flink:flink-{name}:{FLINK}"
        for name in (
            "clients",
            "table-planner-loader",
            "table-runtime",
            "table-api-java-bridge",
            "connector-base",
            "connector-files",
            "json",
        )
    ),
    "org.apache.flink:flink-connector-kafka:4.0.1-2.0",
    "org.apache.flink:flink-sql-avro-confluent-registry:2.1.0",
)
FLINK_ICEBERG = ("org.apache.iceberg:iceberg-flink-runtime-2.1:1.11.0",)
CONNECT_JARS = (
    f"org.apache.kafka:connect-runtime:{CONNECT}",
    f"org.apache.kafka:connect-json:{CONNECT}",
    "org.apache.iceberg:iceberg-kafka-connect:1.12.0",
    "org.apache.iceberg:iceberg-parquet:1.12.0",
    "io.apicurio:apicurio-registry-utils-converter:2.6.13.Final",
    "org.slf4j:slf4j-simple:1.7.36",
)
VERSIONS = {
    "Flink": FLINK,
    "Flink's Kafka connector": "4.0.1-2.0",
    "Iceberg for Flink": "1.11.0",
    "Kafka Connect": CONNECT,
    "Iceberg for Kafka Connect and Spark": "1.12.0",
    "Spark": version("pyspark"),
}
COLUMNS = {
    "order_id": "bigint",
    "customer": "string",
    "sku": "string",
    "quantity": "int",
    "price": "double",
    "placed_at": "timestamp",
    "country": "string",
    "express": "boolean",
    "note": "string",
}
SPARK_COLUMNS = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
#: Seconds between the commits of a job that follows its topic.
COMMIT_SECONDS = 5
_WITHIN = 900.0


class Job(Protocol):
    """One running job of a side."""

    def wait(self, rows: int) -> None: ...
    def stop(self) -> None: ...


class Catalog:
    """What a table holds and since when, by the REST catalog's own answers."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def committed(self, table: str) -> int:
        """Rows in the current snapshot of `db.table`."""
        try:
            metadata = self._ask(f"namespaces/db/tables/{table}")["metadata"]
        except urllib.error.HTTPError:
            return 0
        for snapshot in metadata.get("snapshots", []):
            if snapshot["snapshot-id"] == metadata.get("current-snapshot-id"):
                return int(snapshot["summary"].get("total-records", 0))
        return 0

    def size(self, table: str) -> tuple[int, int]:
        """Data files of a table that has no others, and their bytes. On disk: the summary of a
        snapshot has no bytes of files that were committed as whole manifests, as Frazil does."""
        location = self._ask(f"namespaces/db/tables/{table}")["metadata"]["location"]
        folder = Path(urlsplit(location).path, "data")
        sizes = [path.stat().st_size for path in folder.rglob("*.parquet")]
        return len(sizes), sum(sizes)

    def await_rows(self, table: str, rows: int, alive: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + _WITHIN
        while self.committed(table) < rows:
            alive()
            if time.monotonic() > deadline:
                raise SystemExit(f"db.{table} has {self.committed(table)} rows of {rows}")
            time.sleep(0.1)

    def create(self, table: str) -> None:
        """`db.table` with the columns of an order."""
        types = {"bigint": "long", "timestamp": "timestamptz"}
        fields = [
            {"id": number, "name": name, "required": False, "type": types.get(kind, kind)}
            for number, (name, kind) in enumerate(COLUMNS.items(), 1)
        ]
        self._ask(
            "namespaces/db/tables",
            {
                "name": table,
                "schema": {"type": "struct", "schema-id": 0, "fields": fields},
                "properties": {"format-version": "2"},
            },
        )

    def create_namespace(self) -> None:
        self._ask("namespaces", {"namespace": ["db"]})

    def _ask(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"{self.uri}/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


# ── Frazil ───────────────────────────────────────────────────────────────────────────────────────


class FrazilSide:
    def __init__(self, folder: Path, servers: Servers) -> None:
        self._servers = servers
        self._spark: Any = None

    def start(self, topic: Topic, table: str, interval: int) -> Job:
        import frazil
        from frazil.config.model import from_document

        decode: dict[str, Any] = {"registry": {"url": self._servers.registry}}
        if topic.is_json:
            decode = {"format": "json", "columns": {"placed_at": "timestamptz"}}
        config = from_document(
            {
                "sink": {
                    "id": table,
                    "topics": [topic.name],
                    "index_table": f"db.{table}_index",
                    # what it takes to have fresher tables: records gather for this long
                    "trigger": "auto" if interval else "10ms",
                    "commit_interval": f"{interval}s",
                },
                "kafka": topic.librdkafka,
                "decode": decode,
                "catalog": {"type": "rest", "uri": self._servers.catalog},
                "table": [{"name": f"db.{table}"}],
            }
        )
        if self._spark is None:
            self._spark = frazil.session(config)
        return _FrazilJob(frazil.Sink(config).start(self._spark))


class _FrazilJob:
    def __init__(self, run: Any) -> None:
        self._run = run

    def wait(self, rows: int) -> None:
        self._run.wait_until_caught_up(timeout=_WITHIN)

    def stop(self) -> None:
        self._run.stop()


# ── Spark's own source and sink ──────────────────────────────────────────────────────────────────


class SparkSide:
    def __init__(self, folder: Path, servers: Servers) -> None:
        from pyspark.sql import SparkSession

        self._folder = folder
        paths = [*jars.fetch(jars.ICEBERG, transitive=False), *spark_kafka_jars()]
        self._spark = (
            SparkSession.builder.master("local[*]")
            .config("spark.jars", ",".join(map(str, paths)))
            .config("spark.driver.memory", "4g")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
            .config("spark.sql.catalog.lake.type", "rest")
            .config("spark.sql.catalog.lake.uri", servers.catalog)
            .getOrCreate()
        )
        self._spark.sparkContext.setLogLevel("ERROR")

    def start(self, topic: Topic, table: str, interval: int) -> Job:
        self._spark.sql(f"CREATE TABLE lake.db.{table} ({SPARK_COLUMNS}) USING iceberg")
        records = self._spark.readStream.format("kafka").options(
            **{f"kafka.{key}": value for key, value in topic.java.items()}
        )
        read = records.option("subscribe", topic.name).option("startingOffsets", "earliest").load()
        writer = (
            spark_orders(read, as_json=topic.is_json)
            .writeStream.format("iceberg")
            .outputMode("append")
            .option("checkpointLocation", str(self._folder / f"checkpoint-{table}"))
        )
        trigger = {"processingTime": f"{interval} seconds"} if interval else {"availableNow": True}
        return _SparkJob(writer.trigger(**trigger).toTable(f"lake.db.{table}"))


def spark_orders(records: Any, *, as_json: bool) -> Any:
    """The orders in a DataFrame of Kafka's records, as Spark's documentation reads them."""
    from pyspark.sql.avro.functions import from_avro
    from pyspark.sql.functions import col, expr, from_json

    if as_json:
        order = from_json(col("value").cast("string"), SPARK_COLUMNS)
    else:  # from_avro knows nothing of the Confluent header: five bytes before the value
        order = from_avro(expr("substring(value, 6)"), datagen.SCHEMA)
    return records.select(order.alias("order")).select("order.*")


class _SparkJob:
    def __init__(self, query: Any) -> None:
        self._query = query

    def wait(self, rows: int) -> None:
        self._query.awaitTermination(int(_WITHIN))

    def stop(self) -> None:
        self._query.stop()


# ── Flink SQL with Iceberg's sink (V2) ───────────────────────────────────────────────────────────


class FlinkSide:
    """Flink's own mini cluster in a JVM of this process, with SQL over its gateway."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self._catalog, self._registry = Catalog(servers.catalog), servers.registry
        hadoop = sorted((jars.pyspark_home() / "jars").glob("hadoop-client-*.jar"))
        paths = [
            *jars.fetch(FLINK_JARS),
            *jars.fetch(FLINK_ICEBERG, transitive=False),
            *hadoop,
        ]
        opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "util")]
        port = launch_gateway(
            classpath=jars.classpath(paths),
            javaopts=["-Xmx4g", *opens, "-Dslf4j.internal.verbosity=ERROR"],
            die_on_exit=True,
            redirect_stdout=sys.stderr,
            redirect_stderr=open(folder / "flink.log", "w"),  # noqa: SIM115
            java_path=jars.java(),
        )
        gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))
        flink = gateway.jvm.org.apache.flink
        settings = flink.configuration.Configuration()
        for key, value in {
            "parallelism.default": "2",
            "taskmanager.numberOfTaskSlots": "2",
            "execution.checkpointing.dir": f"file://{folder}/flink-checkpoints",
            "table.local-time-zone": "UTC",
            "table.exec.iceberg.use-v2-sink": "true",
        }.items():
            settings.setString(key, value)
        environment = (
            flink.table.api.EnvironmentSettings.newInstance()
            .inStreamingMode()
            .withConfiguration(settings)
            .build()
        )
        self._tables = flink.table.api.TableEnvironment.create(environment)
        self._sql(
            f"CREATE CATALOG lake WITH ('type'='iceberg', 'catalog-type'='rest', "
            f"'uri'='{servers.catalog}')"
        )

    def start(self, topic: Topic, table: str, interval: int) -> Job:
        self._catalog.create(table)
        self._tables.getConfig().set(
            "execution.checkpointing.interval", f"{interval or COMMIT_SECONDS} s"
        )
        self._sql(self._source(topic, table, bounded=not interval))
        # Flink's Confluent Avro reads timestamps of milliseconds only: others as what they are
        placed_at = "placed_at" if topic.is_json else "TO_TIMESTAMP_LTZ(placed_at / 1000, 3)"
        columns = ", ".join(COLUMNS).replace("placed_at", f"CAST({placed_at} AS TIMESTAMP_LTZ(6))")
        query = f"INSERT INTO lake.db.{table} SELECT {columns} FROM `{table}_topic`"
        return _FlinkJob(self._sql(query))

    def _source(self, topic: Topic, table: str, *, bounded: bool) -> str:
        time_type = "TIMESTAMP_LTZ(6)" if topic.is_json else "BIGINT"
        columns = ", ".join(
            f"{name} {time_type if kind == 'timestamp' else kind.upper()}"
            + ("" if name == "note" else " NOT NULL")
            for name, kind in COLUMNS.items()
        )
        options = {
            "connector": "kafka",
            "topic": topic.name,
            "scan.startup.mode": "earliest-offset",
            **{f"properties.{key}": value for key, value in topic.java.items()},
        }
        if bounded:
            options["scan.bounded.mode"] = "latest-offset"
        if topic.is_json:
            options |= {"format": "json", "json.timestamp-format.standard": "ISO-8601"}
        else:
            options |= {"format": "avro-confluent", "avro-confluent.url": self._registry}
        listed = ", ".join(f"'{key}'='{value}'" for key, value in options.items())
        return f"CREATE TABLE `{table}_topic` ({columns}) WITH ({listed})"

    def _sql(self, statement: str) -> Any:
        return self._tables.executeSql(statement)


class _FlinkJob:
    """A job, and the mini cluster that Flink starts for it and shuts down after it."""

    def __init__(self, result: Any) -> None:
        self._result = result
        self._ended = False

    def wait(self, rows: int) -> None:
        getattr(self._result, "await")()
        self._ended = True

    def stop(self) -> None:
        if not self._ended:
            self._result.getJobClient().get().cancel().get()


# ── Iceberg's Kafka Connect sink ─────────────────────────────────────────────────────────────────


class ConnectSide:
    """A standalone Connect worker; each job is a connector over its REST interface."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        self._servers, self._catalog = servers, Catalog(servers.catalog)
        [port] = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        hadoop = sorted((jars.pyspark_home() / "jars").glob("hadoop-client-*.jar"))
        worker = {
            "bootstrap.servers": servers.bootstrap,
            "listeners": self._url,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "offset.storage.file.filename": str(folder / "connect-offsets"),
            "offset.flush.interval.ms": "5000",
            "plugin.discovery": "only_scan",
        }
        (folder / "worker.properties").write_text(
            "".join(f"{key}={value}\n" for key, value in worker.items())
        )
        log = open(folder / "connect.log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                jars.java(),
                "-Xmx4g",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-cp",
                jars.classpath([*jars.fetch(CONNECT_JARS), *hadoop]),
                "org.apache.kafka.connect.cli.ConnectStandalone",
                str(folder / "worker.properties"),
            ],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        deadline = time.monotonic() + 120
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Kafka Connect does not start; see {folder / 'connect.log'}")
            time.sleep(0.2)

    def start(self, topic: Topic, table: str, interval: int) -> Job:
        self._catalog.create(table)
        datagen.create_topic(self._servers.bootstrap, f"{table}-control", 1)
        config = {
            "connector.class": "org.apache.iceberg.connect.IcebergSinkConnector",
            "tasks.max": "2",
            "topics": topic.name,
            "consumer.override.auto.offset.reset": "earliest",
            "consumer.override.max.poll.records": "5000",
            **{f"consumer.override.{key}": value for key, value in topic.java.items()},
            "iceberg.tables": f"db.{table}",
            "iceberg.catalog.type": "rest",
            "iceberg.catalog.uri": self._servers.catalog,
            "iceberg.control.topic": f"{table}-control",
            "iceberg.control.commit.interval-ms": str((interval or COMMIT_SECONDS) * 1000),
            **{f"iceberg.kafka.{key}": value for key, value in topic.java.items()},
            **self._converter(topic),
        }
        self._ask("connectors", {"name": table, "config": config})
        return _ConnectJob(self, table, self._catalog)

    def remove(self, name: str) -> None:
        self._ask(f"connectors/{name}", method="DELETE")

    def check(self, name: str) -> None:
        """Raises with the trace of a task that failed."""
        try:
            status = self._ask(f"connectors/{name}/status")
        except urllib.error.HTTPError:
            return
        for part in (status["connector"], *status["tasks"]):
            if part["state"] == "FAILED":
                raise SystemExit(f"Kafka Connect failed: {part['trace']}")

    def _converter(self, topic: Topic) -> Mapping[str, str]:
        if topic.is_json:
            return {
                "value.converter": "org.apache.kafka.connect.json.JsonConverter",
                "value.converter.schemas.enable": "false",
            }
        return {
            "value.converter": "io.apicurio.registry.utils.converter.AvroConverter",
            "value.converter.apicurio.registry.url": self._servers.apicurio,
            "value.converter.apicurio.registry.as-confluent": "true",
            "value.converter.apicurio.registry.use-id": "contentId",
            "value.converter.apicurio.registry.id-handler": (
                "io.apicurio.registry.serde.Legacy4ByteIdHandler"
            ),
        }

    def _answers(self) -> bool:
        try:
            self._ask("connectors")
        except OSError:
            return False
        return True

    def _ask(self, path: str, body: object = None, method: str = "") -> Any:
        request = urllib.request.Request(
            f"{self._url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method or None,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None


class _ConnectJob:
    def __init__(self, side: ConnectSide, table: str, catalog: Catalog) -> None:
        self._side, self._table, self._catalog = side, table, catalog

    def wait(self, rows: int) -> None:
        self._catalog.await_rows(self._table, rows, lambda: self._side.check(self._table))

    def stop(self) -> None:
        self._side.remove(self._table)


SIDES: dict[str, Any] = {
    "frazil": FrazilSide,
    "spark": SparkSide,
    "flink": FlinkSide,
    "connect": ConnectSide,
}
