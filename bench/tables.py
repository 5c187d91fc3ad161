"""One stream into a thousand tables: what a table costs, per batch and at rest.

Small Avro records whose field `kind` names their table, on a topic of its own. Each phase produces
its records first and then lets one run of the sink take them in one batch, so that the steps of
that batch can be distinguished:

    one      all records into one table: what they cost without any routing
    made     into N tables that are not there yet: learned, created, written, committed
    all      into the same N tables again: every table gets rows, files and a commit
    few      the same number of records, all for ten of the N tables: idle tables at work
    stuck    as `all`, but one table is dropped meanwhile: the others take theirs, and it is named

    make bench-tables                          # 1,000 tables, 500,000 records a phase
    make bench-tables ARGS='--tables 100 --rows 100000'
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Producer

from frazil.auditing.evidence import of_sink
from frazil.config.model import Config, from_document
from frazil.iceberg.java import JavaCatalog
from frazil.run import Run
from frazil.sink import Sink
from frazil.spark.session import session
from frazil.steps import Step
from frazil.testing.datagen import create_topic, zigzag
from frazil.testing.kafka import Broker

PARTITIONS = 4
SCHEMA = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "kind", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
FEW = 10
#: A batch is as large as a phase: what is left over would be a second batch.
LIMITS = {"max_records_per_trigger": 100_000_000, "max_bytes_per_trigger": "1TiB"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kind(number: int) -> str:
    return f"k{number:04d}"


def events(rows: int, kinds: int) -> Iterator[bytes]:
    head = b"\0\0\0\0\1"
    names = [zigzag(len(kind(i))) + kind(i).encode() for i in range(kinds)]
    now = zigzag(int(time.time() * 1_000_000))
    for i in range(rows):
        yield b"".join((head, zigzag(i), names[i % kinds], struct.pack("<d", i / 7), now))


def produce(bootstrap: str, topic: str, rows: int, kinds: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "log_level": 3,
            "queue.buffering.max.messages": 500_000,
        }
    )
    for i, value in enumerate(events(rows, kinds)):
        while True:
            try:
                producer.produce(topic, value, partition=i // kinds % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush()


class Memory:
    """The most that the driver, its JVM and all Python workers together held, in MiB."""

    def __init__(self, broker: int) -> None:
        self.most = {"driver": 0, "jvm": 0, "workers": 0}
        self._broker = broker
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        me = psutil.Process()
        while True:
            now = {"driver": me.memory_info().rss, "jvm": 0, "workers": 0}
            for child in me.children(recursive=True):
                try:
                    if child.pid != self._broker:
                        who = "jvm" if child.name() == "java" else "workers"
                        # Workers share the pages of the daemon they were forked from.
                        used = child.memory_info()
                        now[who] += used.rss if who == "jvm" else used.rss - used.shared
                except psutil.NoSuchProcess:
                    continue
            for who, used in now.items():
                self.most[who] = max(self.most[who], used // 2**20)
            time.sleep(0.25)


class Bench:
    def __init__(self, folder: Path, broker: Broker, tables: int, rows: int) -> None:
        self.folder, self.broker, self.tables, self.rows = folder, broker, tables, rows
        (folder / "event.avsc").write_text(json.dumps(SCHEMA))
        self.spark = session(self.config("one"), say=say)
        self.memory = Memory(broker.pid)

    def config(self, way: str) -> Config:
        document: dict[str, Any] = {
            "sink": {
                "id": way,
                "topics": [way],
                "index_table": f"db.{way}_index",
                **LIMITS,
                "trigger": "100ms",
                "commit_interval": "0s",
                "max_tables": self.tables + 10,
            },
            "kafka": {"bootstrap.servers": self.broker.bootstrap},
            "decode": {"schema": f"{self.folder}/event.avsc"},
            "catalog": {"type": "hadoop", "warehouse": f"{self.folder}/lake"},
            "table": [{"name": "db.one"}],
        }
        if way == "many":
            document["table"] = [{"name": "db.t_{value}"}]
            document["route"] = [{"field": "kind", "to": ["db.t_{value}"]}]
            document["dead_letters"] = {"table": "db.dead"}
        return from_document(document)

    def phase(self, name: str, way: str, kinds: int, stuck: str = "") -> dict[str, Any]:
        if not stuck:
            produce(self.broker.bootstrap, way, self.rows, kinds)
        steps: list[Step] = []
        began = time.monotonic()
        sink = Sink(self.config(way), on_step=steps.append).start(self.spark)
        started = time.monotonic() - began
        if stuck:
            self.spark.sql(f"DROP TABLE lake.{stuck}")
            produce(self.broker.bootstrap, way, self.rows, kinds)
            self._until_stuck(sink)
        else:
            sink.wait_until(sink.ends())
        seconds = time.monotonic() - began
        named = dict(sink.committer.progress.stuck)
        sink.stop(1.0)
        at = {}
        for step in steps:
            at.setdefault(step.name, []).append(step.at)
        batches = len(at["written"])
        figures = {
            "start_s": started,
            "write_s": sum(w - p for p, w in zip(at["planned"], at["written"], strict=False)),
            "stage_s": sum(s - w for w, s in zip(at["written"], at["staged"], strict=False)),
            "commit_s": max(at["tagged"]) - min(at["commit"]),
            "index_s": max(at.get("index-tagged", [0])) - min(at.get("index-commit", [0])),
            "total_s": seconds,
        }
        figures = {key: round(value, 2) for key, value in figures.items()}
        say(
            f"{name:>6}: "
            + "  ".join(f"{k} {v:8.2f}" for k, v in figures.items())
            + f"  batches {batches}  memory {self.memory.most}"
        )
        if stuck and set(named) != {stuck}:
            raise SystemExit(f"expected {stuck} to be stuck, found {named}")
        return {**figures, "batches": batches}

    def _until_stuck(self, sink: Run) -> None:
        """All other tables have theirs, and one is named."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            sink.check()
            waiting = [batch.left for batch in list(sink.committer.queue.pending)]
            if sink.committer.progress.stuck and waiting and all(len(w) == 1 for w in waiting):
                return
            time.sleep(0.05)
        raise SystemExit("the other tables were not committed to")

    def prove(self, way: str, tables: int, expected: int) -> None:
        """Every table by the audit, and all rows together."""
        proof = of_sink(self.config(way), JavaCatalog(self.spark, "lake").open_readonly)
        reports = {report.table: report for report in proof.reports if report.sink == way}
        table_reports = [reports[f"db.t_{kind(i)}"] for i in range(tables)]
        for report in table_reports:
            if report.verdict != "proven":
                raise SystemExit(f"{report}")
        rows = sum(report.written for report in table_reports)
        if rows != expected:
            raise SystemExit(f"{rows} rows in the tables, {expected} records")
        say(f"{tables} tables proven by the audit, {rows:,} rows")


def measure(tables: int, rows: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="frazil-bench-") as name,
        Broker(Path(name) / "kafka", jvm=("-Xmx1g",), say=say) as broker,
    ):
        for topic in ("one", "many"):
            create_topic(broker.bootstrap, topic, PARTITIONS)
        bench = Bench(Path(name), broker, tables, rows)
        bench.phase("warm", "one", tables)
        one = bench.phase("one", "one", tables)
        made = bench.phase("made", "many", tables)
        every = bench.phase("all", "many", tables)
        few = bench.phase("few", "many", FEW)
        bench.prove("many", tables, 3 * rows)
        gone = f"db.t_{kind(tables - 1)}"
        bench.phase("stuck", "many", tables, stuck=gone)
        bench.spark.stop()
        memory = dict(bench.memory.most)

    def busy(phase: dict[str, Any]) -> float:
        return float(phase["write_s"] + phase["stage_s"] + phase["commit_s"] + phase["index_s"])

    return {
        "tables": tables,
        "rows": rows,
        "one": one,
        "made": made,
        "all": every,
        "few": few,
        "overhead_per_batch_s": round(busy(few) - busy(one), 2),
        "overhead_per_table_ms": round((busy(every) - busy(one)) / tables * 1000, 1),
        "made_per_table_ms": round((made["total_s"] - every["total_s"]) / tables * 1000, 1),
        "start_per_table_ms": round(every["start_s"] / tables * 1000, 1),
        "memory_mib": memory,
        "stuck_named": True,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=500_000)
    given = parser.parse_args()
    print(json.dumps(measure(given.tables, given.rows)))
