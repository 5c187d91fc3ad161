"""The truth, by reading data: independent of the ledger, the index and the audit.

What is in the topic is read with a plain consumer; what is in the table is read with DuckDB from
the table's own files, an engine without a line of ours in it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient
from duckdb_extensions import import_extension

from frazil.config.model import Config, from_document

for _extension in ("avro", "iceberg"):
    import_extension(_extension)


class Lake:
    """A warehouse in a folder, with the embedded catalog."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def document(self, name: str, topic: str, bootstrap: str, **sections: Any) -> dict[str, Any]:
        tables = sections.get("table", {})
        uri = f"jdbc:sqlite:{self.folder}/catalog.db?busy_timeout=10000&journal_mode=WAL"
        return {
            "sink": {
                "id": name,
                "topics": [topic],
                "index_table": f"db.{name}_index",
                "trigger": "50ms",
                "commit_interval": "0s",
                "unavailable_timeout": "60s",
                **sections.get("sink", {}),
            },
            "kafka": {"bootstrap.servers": bootstrap, **sections.get("kafka", {})},
            "decode": {"format": "raw", **sections.get("decode", {})},
            "catalog": {
                "type": "jdbc",
                "uri": uri,
                "jdbc.schema-version": "V1",
                "warehouse": str(self.folder / "warehouse"),
            },
            "spark": sections.get("spark", {}),
            "transform": sections.get("transform", {}),
            "table": tables if isinstance(tables, list) else [{"name": f"db.{name}", **tables}],
            "route": sections.get("route", []),
            "dead_letters": sections.get("dead_letters", {}),
            "completeness": sections.get("completeness", {}),
            "metrics": sections.get("metrics", {}),
            "health": sections.get("health", {}),
            "log": sections.get("log", {}),
            "notify": sections.get("notify", {}),
        }

    def config(self, name: str, topic: str, bootstrap: str, **sections: Any) -> Config:
        return from_document(self.document(name, topic, bootstrap, **sections))

    def metadata_file(self, table: str) -> str:
        """Where the catalog says the table is now, asked of SQLite itself."""
        namespace, _, name = table.rpartition(".")
        with sqlite3.connect(self.folder / "catalog.db") as catalog:
            row = catalog.execute(
                "SELECT metadata_location FROM iceberg_tables "
                "WHERE table_namespace = ? AND table_name = ?",
                (namespace, name),
            ).fetchone()
        if row is None:
            raise LookupError(f"the catalog has no table {table}")
        return str(row[0]).removeprefix("file:")

    def query(self, table: str, select: str = "*", rest: str = "") -> list[tuple[Any, ...]]:
        connection = duckdb.connect()
        connection.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'")
        scan = f"iceberg_scan('{self.metadata_file(table)}')"
        return connection.execute(f"SELECT {select} FROM {scan} {rest}").fetchall()


def topic_records(bootstrap: str, topic: str) -> dict[tuple[int, int], bytes | None]:
    """(partition, offset) → value of everything a committed reader sees."""
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "oracle",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }
    consumer = Consumer(settings)
    numbers = (
        AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic).topics[topic].partitions
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
    records: dict[tuple[int, int], bytes | None] = {}
    ended: set[int] = set()
    while len(ended) < len(numbers):
        for message in consumer.consume(10_000, 1.0):
            if message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
            else:
                records[message.partition(), message.offset()] = message.value()
    consumer.close()
    return records


def assert_exact(lake: Lake, table: str, bootstrap: str, topic: str) -> int:
    """Every record of the topic is in the table exactly once, value for value; the count."""
    expected = topic_records(bootstrap, topic)
    rows = lake.query(table, "_topic_partition, _offset, value")
    assert_once((p, o) for p, o, _ in rows)
    actual = {(p, o): v for p, o, v in rows}
    missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    assert not missing, f"{len(missing)} records are lost, first {min(missing)}"
    assert not extra, f"{len(extra)} rows have no record, first {min(extra)}"
    wrong = [key for key, value in expected.items() if actual[key] != value]
    assert not wrong, f"{len(wrong)} rows are wrong, first {wrong[0]}"
    return len(actual)


def assert_once(keys: Iterable[tuple[Any, ...]]) -> None:
    seen: set[tuple[Any, ...]] = set()
    for key in keys:
        assert key not in seen, f"{key} is in the table twice"
        seen.add(key)
