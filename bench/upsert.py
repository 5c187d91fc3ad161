"""Upserts: Frazil's upsert table against `MERGE INTO` in `foreachBatch`, in one run, on one topic.

Spark's way, as most people do it: its Kafka source → `from_avro` → in `foreachBatch` the last
record of each key by offset → `MERGE INTO` an Iceberg table. It begins in three ways: copy-on-write
as it comes, copy-on-write without Spark's look for the files that need it (each batch needs them
all), and merge-on-read. After each of the first two turns the slowest leaves, one goes on. Frazil's
way: `mode = "upsert"`, with ledger, index, offset columns and checks; once without maintenance of
the table and once with it.

A batch is 500,000 records over a million keys, drawn evenly, each key in one of four partitions. A
turn is ten batches; before each turn its records are produced, then every side takes them, from
`start` until all is committed. Rows a second count while the stream runs, from the first commit
of a turn to the last one or to the end of its maintenance; beside it with the start and the end of
the query, which a stream has once and a turn each time. Each side runs in one process of its own
for the whole run, so all but its first turn is warm. After 10, 50, … batches all columns of the
records are scanned in a third process, the same for every table: both sides' tables as they are,
the maintained one also right after a round, and a table freshly written of the same rows, ordered
by key. What the records say is kept in plain arrays (last value of each key) and compared with
every table: sums at each scan, and at the end every row, by DuckDB over what Spark read.

    make bench-upsert                       # 50 batches, scans after 10 and 50
    make bench-upsert ARGS='--long'         # 200 batches, beyond 50 of one side
    make bench-upsert ARGS='--batches 4 --turn 2 --scan-at 2,4 --rows 20000 --keys 40000'
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from confluent_kafka import Producer

from frazil.spark import jars
from frazil.testing.datagen import create_topic, zigzag
from frazil.testing.jars import spark_kafka_jars
from frazil.testing.kafka import Broker
from side import cpu_seconds

TOPIC = "accounts"
PARTITIONS = 4
SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Account",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "version", "type": "long"},
            {"name": "customer", "type": "string"},
            {"name": "sku", "type": "string"},
            {"name": "quantity", "type": "int"},
            {"name": "price", "type": "double"},
            {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "country", "type": "string"},
            {"name": "express", "type": "boolean"},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
)
COLUMNS = {
    "id": "bigint",
    "version": "bigint",
    "customer": "string",
    "sku": "string",
    "quantity": "int",
    "price": "double",
    "placed_at": "timestamp",
    "country": "string",
    "express": "boolean",
    "note": "string",
}
MERGES = {
    "merge_cow": "copy-on-write",
    "merge_cow_all": "copy-on-write, all files",
    "merge_mor": "merge-on-read",
}
#: The scan that stands for them all: every column is read, and no row is kept.
SUMS = "count(*), sum(id), sum(version), sum(quantity), sum(cast(round(price * 100) AS bigint))"
SCAN_SECONDS = 60.0
#: So many batches all sides take; behind them the maintained table goes on alone, for its scans.
BESIDE = 50
#: A table that took so long is not scanned again: what takes that long is not the JVM's warming up.
ENOUGH_SECONDS = 10.0
#: Of a table that no reader could read to its end.
UNREAD = {
    "seconds": None,
    "against_fresh": None,
    "why": "the reader ended",
    "files": 0,
    "deletes": 0,
    "sums": None,
}

#: a request → its answer
Job = Callable[[dict[str, Any]], dict[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── the records, and what they come to ───────────────────────────────────────────────────────────


class Accounts:
    """Changes of accounts: real keys, real values, the same each time. `last` is the oracle: the
    newest change of each key, in arrays with a place for each."""

    CUSTOMERS, SKUS, COUNTRIES = 200_000, 5_000, ("DE", "FR", "US", "JP", "BR", "IN")
    BEGAN = 1_767_225_600_000_000

    def __init__(self, keys: int) -> None:
        assert keys % PARTITIONS == 0
        self.keys, self.made = keys, 0
        self._draw = np.random.default_rng(7)
        kinds = {
            "version": "i8",
            "customer": "i4",
            "sku": "i4",
            "quantity": "i4",
            "price": "i4",
            "country": "i1",
            "express": "?",
            "note": "?",
        }
        self.last = {name: np.zeros(keys, kind) for name, kind in kinds.items()}
        self._ids = [zigzag(i) for i in range(keys)]
        self._keys = [str(i).encode() for i in range(keys)]
        self._customers = [_text(f"customer-{i:06d}") for i in range(self.CUSTOMERS)]
        self._skus = [_text(f"sku-{i:04d}") for i in range(self.SKUS)]
        self._prices = [struct.pack("<d", cents / 100) for cents in range(50_000)]
        self._tails = [
            _text(country) + (b"\1" if express else b"\0") + note
            for country in self.COUNTRIES
            for express in (False, True)
            for note in (b"\0", b"\2" + _text("gift wrap"))
        ]

    def produce(self, producer: Producer, rows: int) -> None:
        """One batch: the same number of records for each partition, so that whoever cuts evenly
        gets whole batches."""
        draw, many = self._draw, rows // PARTITIONS
        drawn = draw.integers(0, self.keys // PARTITIONS, (many, PARTITIONS))
        ids = (drawn * PARTITIONS + np.arange(PARTITIONS)).ravel()
        count = len(ids)
        change = {
            "version": np.arange(self.made + 1, self.made + count + 1),
            "customer": draw.integers(0, self.CUSTOMERS, count),
            "sku": draw.integers(0, self.SKUS, count),
            "quantity": draw.integers(1, 10, count),
            "price": draw.integers(100, 50_000, count),
            "country": draw.integers(0, len(self.COUNTRIES), count),
            "express": draw.random(count) < 0.25,
            "note": draw.random(count) < 0.33,
        }
        self.made += count
        for name, column in change.items():
            self.last[name][ids] = column  # of a key that is there twice, the last one stays
        tails = change["country"] * 4 + change["express"] * 2 + change["note"]
        placed = _long8(self.BEGAN + change["version"])
        head = b"\0\0\0\0\1"
        columns = zip(
            ids.tolist(),
            change["version"].tolist(),
            change["customer"].tolist(),
            change["sku"].tolist(),
            change["quantity"].tolist(),
            change["price"].tolist(),
            tails.tolist(),
            strict=True,
        )
        for i, (key, version, customer, sku, quantity, price, tail) in enumerate(columns):
            value = b"".join(
                (
                    head,
                    self._ids[key],
                    zigzag(version),
                    self._customers[customer],
                    self._skus[sku],
                    bytes((2 * quantity,)),
                    self._prices[price],
                    placed[8 * i : 8 * i + 8],
                    self._tails[tail],
                )
            )
            while True:
                try:
                    producer.produce(TOPIC, value, self._keys[key], partition=key % PARTITIONS)
                    break
                except BufferError:
                    producer.poll(0.05)

    def sums(self) -> list[int]:
        """What `SUMS` must say of a table that holds the last change of each key."""
        present = self.last["version"] > 0
        ids = np.flatnonzero(present)
        rest = (int(self.last[name][present].sum()) for name in ("version", "quantity", "price"))
        return [len(ids), int(ids.sum()), *rest]

    def table(self) -> pa.Table:
        """The last change of each key, column for column."""
        present = self.last["version"] > 0
        last = {name: column[present] for name, column in self.last.items()}

        def words(pool: list[str], name: str) -> pa.Array:
            return pa.array(pool).take(pa.array(last[name]))

        columns = {
            "id": pa.array(np.flatnonzero(present)),
            "version": pa.array(last["version"]),
            "customer": words([f"customer-{i:06d}" for i in range(self.CUSTOMERS)], "customer"),
            "sku": words([f"sku-{i:04d}" for i in range(self.SKUS)], "sku"),
            "quantity": pa.array(last["quantity"]),
            "price": pa.array(last["price"] / 100),
            "placed_at": pa.array(self.BEGAN + last["version"], pa.timestamp("us", "UTC")),
            "country": words(list(self.COUNTRIES), "country"),
            "express": pa.array(last["express"]),
            "note": pa.array(["gift wrap"]).take(
                pa.array(np.zeros(len(last["note"]), "i1"), mask=~last["note"])
            ),
        }
        return pa.table(columns)


def _text(value: str) -> bytes:
    raw = value.encode()
    return zigzag(len(raw)) + raw


def _long8(numbers: Any) -> bytes:
    """Avro's long of each number, all of them in the range that takes eight bytes."""
    doubled = numbers.astype(np.uint64) << 1
    assert doubled.min() >= 1 << 49
    assert doubled.max() < 1 << 56
    septets = (doubled[:, None] >> (7 * np.arange(8, dtype=np.uint64))) & 0x7F
    septets[:, :7] |= 0x80
    return septets.astype(np.uint8).tobytes()


def rows_that_differ(read: str, expected: pa.Table) -> int:
    """Rows in the Parquet files of a folder that should not be there, and the other way round."""
    engine = duckdb.connect()
    engine.execute("SET TimeZone='UTC'")
    engine.register("expected", expected)
    names = ", ".join(COLUMNS)
    actual = f"SELECT {names} FROM read_parquet('{read}/*.parquet')"
    meant = f"SELECT {names} FROM expected"
    count = "SELECT count(*) FROM ({} EXCEPT ALL {})"
    return sum(
        engine.execute(count.format(*pair)).fetchall()[0][0]
        for pair in ((actual, meant), (meant, actual))
    )


# ── the parent ───────────────────────────────────────────────────────────────────────────────────


class Ended(SystemExit):
    """A side's process is gone."""


class Peer:
    """One side: a process that does what it is asked, and says how it went."""

    def __init__(self, side: str, settings: dict[str, Any]) -> None:
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--side", side, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turns: list[dict[str, Any]] = []

    def ready(self) -> Peer:
        if self._answer() != {"ready": True}:
            raise Ended(f"the {self.side} side did not start")
        return self

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        before = cpu_seconds(self.process.pid)
        run = self.ask(request)
        run["cpu"] = cpu_seconds(self.process.pid) - before
        self.turns.append(run)
        return run

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if answer is None:
            raise Ended(f"the {self.side} side ended")
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        return None


class Run:
    def __init__(self, given: argparse.Namespace, folder: str, bootstrap: str) -> None:
        self.given, self.folder = given, folder
        self.accounts = Accounts(given.keys)
        self.producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "linger.ms": 20,
                "batch.num.messages": 20_000,
                "queue.buffering.max.messages": 500_000,
                "enable.idempotence": True,
                "log_level": 3,
            }
        )
        self.settings = {"folder": folder, "bootstrap": bootstrap, "rows": given.rows}
        frazil = [] if given.only_merge else ["frazil", "frazil_maintained"]
        say("starting all sides")
        self.peers = {name: Peer(name, self.settings) for name in (*MERGES, *frazil)}
        self.scanner = Peer("scan", self.settings)
        for peer in (*self.peers.values(), self.scanner):
            peer.ready()
        self.left: list[Peer] = []
        self.retired: dict[str, Peer] = {}
        self.scans: dict[int, dict[str, Any]] = {}
        self.merge = ""
        self.verified: list[str] = []

    def all(self) -> None:
        turns = self.given.batches // self.given.turn
        for number in range(turns):
            self._turn(number, turns)
            done = (number + 1) * self.given.turn
            self._choose()
            if done in self.given.scan_at:
                self._scan(done)
            if done == BESIDE and number + 1 < turns and "frazil_maintained" in self.peers:
                self._retire({*self.peers} - {"frazil_maintained"})
        self._retire({*self.peers})
        self.scanner.end()
        del self.producer  # before its broker goes

    def _retire(self, names: set[str]) -> None:
        """Compare every row they have, and let them go."""
        expected = self.accounts.table()
        for name in sorted(names):
            read = self._ask_scanner({"copy": name}).get("folder")
            if read is None:
                say(f"  {name}: cannot be read any more")
            elif wrong := rows_that_differ(read, expected):
                raise SystemExit(f"{name} has {wrong} rows that differ from the records")
            else:
                say(f"  {name}: every row as the records say")
                self.verified.append(name)
            self.retired[name] = self.peers.pop(name)
            self.retired[name].end()

    def _turn(self, number: int, turns: int) -> None:
        began = time.monotonic()
        for _ in range(self.given.turn):
            self.accounts.produce(self.producer, self.given.rows)
        self.producer.flush()
        say(f"turn {number + 1} of {turns}: produced in {time.monotonic() - began:.0f} s")
        rows = self.given.turn * self.given.rows
        expected = self.accounts.sums()
        for name, peer in self.peers.items():
            run = peer.turn({"turn": number})
            if run.get("sums", expected) != expected:
                raise SystemExit(f"{name} has {run['sums']}, the records say {expected}")
            say(
                f"  {name:>18}: {run['seconds']:6.2f} s {rows / run['seconds']:>9,.0f} rows/s  "
                f"cpu {run['cpu']:6.1f} s  batches {len(run['batches'])}"
            )
            if run.get("trouble"):
                raise SystemExit(f"{name}: {run['trouble']}")
            if name in MERGES and len(run["batches"]) != self.given.turn:
                raise SystemExit(f"{name} made {len(run['batches'])} batches")

    def _choose(self) -> None:
        """Of Spark's ways that are left, the slowest leaves; by batches when the JVM was warm."""

        def later(name: str) -> float:
            batches = self.peers[name].turns[-1]["batches"]
            return statistics.median(batches[len(batches) // 2 :])

        ways = sorted((name for name in MERGES if name in self.peers), key=later)
        if not ways:
            return
        if len(ways) > 1:
            say(
                ", ".join(f"{MERGES[name]} {later(name):.2f} s a batch" for name in ways)
                + ": the last one leaves"
            )
            self.left.append(self.peers.pop(ways[-1]))
            self.left[-1].end()
        self.merge = ways[0]

    def _scan(self, done: int) -> None:
        kept = "frazil_maintained" if "frazil_maintained" in self.peers else next(iter(self.peers))
        fresh = {"fresh": f"fresh.db.t{done}", "of": kept}
        scans = self._ask_scanner({**fresh, "scan": [n for n in self.peers if n != "frazil"]})
        self._tell(done, scans)
        if kept == "frazil_maintained":
            run = self.peers[kept].ask({"maintain": True})
            if run["trouble"]:
                raise SystemExit(f"{kept}: {run['trouble']}")
            again = self._ask_scanner({**fresh, "scan": [kept]})[kept]
            scans["frazil_after_maintenance"] = {**again, "maintenance_s": run["seconds"]}
            self._tell(done, {"frazil_after_maintenance": again})
        if "frazil" in self.peers:  # it may be too much for a reader, and comes last
            last = self._ask_scanner({**fresh, "scan": ["frazil"]})
            scans["frazil"] = last.get("frazil", UNREAD)
            self._tell(done, {"frazil": scans["frazil"]})
        self.scans[done] = scans

    def _tell(self, done: int, scans: dict[str, Any]) -> None:
        expected = self.accounts.sums()
        for name, scan in scans.items():
            if scan["sums"] not in (expected, None):
                raise SystemExit(f"{name} reads {scan['sums']}, the records say {expected}")
            result = f"{scan['seconds']:6.2f} s" if scan["seconds"] else scan["why"]
            say(
                f"  scan after {done} batches {name:>24}: {result}  ({scan['files']} files, "
                f"{scan['deletes']} of them deletes)"
            )

    def _ask_scanner(self, request: dict[str, Any]) -> dict[str, Any]:
        """Nothing where it ended of it: then there is another."""
        try:
            return self.scanner.ask(request)
        except Ended:
            self.scanner = Peer("scan", self.settings).ready()
            return {}


def compare(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="frazil-bench-", dir=given.folder) as name:
        folder = Path(name)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", jvm=("-Xmx1g",), say=say) as broker:
            create_topic(broker.bootstrap, TOPIC, PARTITIONS)
            (folder / "account.avsc").write_text(SCHEMA)
            run = Run(given, name, broker.bootstrap)
            run.all()
    return _summary(run)


def _summary(run: Run) -> dict[str, Any]:
    given = run.given
    rows = given.turn * given.rows
    beside = min(given.batches, BESIDE) // given.turn

    def warm(peer: Peer) -> list[dict[str, Any]]:
        """The turns that all sides took; ten batches are more than a JVM needs to be warm."""
        return peer.turns[1:beside] or peer.turns

    def rate(peer: Peer) -> float:
        """While the stream runs: from the first commit of a turn to its last, or to the end of the
        maintenance."""

        def seconds(turn: dict[str, Any]) -> float:
            first, *others = turn["batches"]
            running = turn["seconds"] - first if peer.side == "frazil_maintained" else sum(others)
            return running / len(others)

        return given.rows / statistics.median(map(seconds, warm(peer)))

    def whole(peer: Peer) -> float:
        """With the start and the end of the query, every turn."""
        return rows / statistics.median(turn["seconds"] for turn in warm(peer))

    def cpu(peer: Peer) -> float:
        return statistics.median(turn["cpu"] for turn in warm(peer)) / rows * 1e6

    merge = run.retired[run.merge]
    peers = {"merge": merge, **{n: p for n, p in run.retired.items() if n not in MERGES}}
    result: dict[str, Any] = {
        "rows": given.batches * given.rows,
        "keys": given.keys,
        "batch_rows": given.rows,
        "merge_mode": MERGES[run.merge],
        "merge_others": {
            MERGES[p.side]: [round(t["seconds"], 2) for t in p.turns]
            for p in (*run.left, *run.retired.values())
            if p.side in MERGES and p is not merge
        },
        "warm_turns": len(warm(merge)),
        "every_row_compared": run.verified,
    }
    say(f"\n{'':20}{'rows/s':>12}{'CPU-s per million':>20}{'first turn':>12}{'first batch':>13}")
    for name, peer in peers.items():
        first = peer.turns[0]
        result[f"{name}_rows_per_s"] = round(rate(peer))
        result[f"{name}_rows_per_s_with_start"] = round(whole(peer))
        result[f"{name}_rows_per_s_first_turn"] = round(rows / first["seconds"])
        result[f"{name}_first_batch_s"] = round(first["batches"][0], 2)
        result[f"{name}_cpu_s_per_million"] = round(cpu(peer), 2)
        result[f"{name}_seconds"] = [round(turn["seconds"], 2) for turn in peer.turns]
        say(
            f"{name:20}{rate(peer):>12,.0f}{cpu(peer):>20.2f}{rows / first['seconds']:>12,.0f}"
            f"{first['batches'][0]:>11.2f} s"
        )
        if name == "frazil_maintained":
            result["maintenance_rounds"] = [turn["rounds"] for turn in peer.turns]
        if peer.turns[-1]["split"]:
            result[f"{name}_seconds_by_station"] = {
                key: round(statistics.median(t["split"].get(key, 0.0) for t in warm(peer)), 2)
                for key in peer.turns[-1]["split"]
            }
    if not given.only_merge:
        ours, kept = peers["frazil"], peers["frazil_maintained"]
        result["ratio"] = round(rate(ours) / rate(merge), 2)
        result["ratio_first"] = round(merge.turns[0]["seconds"] / ours.turns[0]["seconds"], 2)
        result["ratio_with_maintenance"] = round(rate(kept) / rate(merge), 2)
        result["ratio_with_start"] = round(whole(ours) / whole(merge), 2)
        result["ratio_with_start_and_maintenance"] = round(whole(kept) / whole(merge), 2)
        say(
            f"ratio {result['ratio']} warm, {result['ratio_with_maintenance']} with maintenance; "
            f"with the start of every query {result['ratio_with_start']} and "
            f"{result['ratio_with_start_and_maintenance']}"
        )
        if run.scans:
            last = run.scans[max(run.scans)]
            result["scan_ratio_after_maintenance"] = last["frazil_after_maintenance"][
                "against_fresh"
            ]
            say(
                "scan against a fresh table: "
                + ", ".join(f"{name} {scan['against_fresh']}" for name, scan in last.items())
            )
    shown = ("seconds", "against_fresh", "files", "deletes", "maintenance_s", "runs", "why")
    result["scans"] = {
        done: {
            name: {key: scan[key] for key in shown if scan.get(key) not in (None, "")}
            for name, scan in scans.items()
        }
        for done, scans in run.scans.items()
    }
    return result


# ── the sides ────────────────────────────────────────────────────────────────────────────────────


def side(name: str, settings: dict[str, Any]) -> None:
    """The child: prepare, then an answer for each line on standard input."""
    made = {"scan": scan_side, "frazil": frazil_side, "frazil_maintained": frazil_side}
    job: Job = made.get(name, merge_side)(name, settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(job(json.loads(line))), flush=True)


def _spark(folder: str, memory: str, *catalogs: str) -> Any:
    from pyspark.sql import SparkSession

    jar_paths = [*jars.fetch(jars.ICEBERG, transitive=False, say=say), *spark_kafka_jars(say)]
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(map(str, jar_paths)))
        .config("spark.driver.memory", memory)
        .config("spark.driver.extraJavaOptions", "-XX:+ExitOnOutOfMemoryError")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")  # two for each core, not 200
        .config(
            "spark.sql.extensions",
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        )
    )
    for catalog in catalogs:
        prefix = f"spark.sql.catalog.{catalog}"
        builder = (
            builder.config(prefix, "org.apache.iceberg.spark.SparkCatalog")
            .config(f"{prefix}.type", "hadoop")
            .config(f"{prefix}.warehouse", f"{folder}/{catalog}")
            .config(f"{prefix}.cache-enabled", "false")
        )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _sums(spark: Any, table: str) -> list[int]:
    return [int(value) for value in spark.sql(f"SELECT {SUMS} FROM {table}").collect()[0]]


def merge_side(name: str, settings: dict[str, Any]) -> Job:
    from pyspark.sql.avro.functions import from_avro
    from pyspark.sql.functions import col, expr

    folder = settings["folder"]
    spark = _spark(folder, "4g", name)
    table = f"{name}.db.t"
    columns = ", ".join(f"{column} {kind}" for column, kind in COLUMNS.items())
    spark.sql(
        f"CREATE TABLE {table} ({columns}) USING iceberg TBLPROPERTIES ("
        f"'format-version'='2', 'write.merge.mode'='{MERGES[name].partition(',')[0]}', "
        "'write.parquet.compression-codec'='zstd')"
    )
    if name == "merge_cow_all":
        spark.conf.set("spark.sql.optimizer.runtime.rowLevelOperationGroupFilter.enabled", "false")
    names = ", ".join(COLUMNS)
    last = (
        f"SELECT {names} FROM (SELECT *, row_number() OVER "
        "(PARTITION BY id ORDER BY _offset DESC) AS newest FROM changes) WHERE newest = 1"
    )
    ends: list[float] = []

    def merge(batch: Any, _: int) -> None:
        batch.createOrReplaceTempView("changes")
        batch.sparkSession.sql(
            f"MERGE INTO {table} t USING ({last}) s ON t.id = s.id "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        ends.append(time.monotonic())

    def job(request: dict[str, Any]) -> dict[str, Any]:
        ends.clear()
        began = time.monotonic()
        records = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", settings["bootstrap"])
            .option("subscribe", TOPIC)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", settings["rows"])
            .load()
        )
        payload = expr("substring(value, 6)")  # without the Confluent header
        rows = records.select(
            from_avro(payload, SCHEMA).alias("r"), col("offset").alias("_offset")
        ).select("r.*", "_offset")
        query = (
            rows.writeStream.foreachBatch(merge)
            .option("checkpointLocation", f"{folder}/{name}-checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        seconds = time.monotonic() - began
        # What it replaced would fill the disk; nothing of this is timed.
        spark.sql(
            f"CALL {name}.system.expire_snapshots(table => 'db.t', retain_last => 1, "
            "older_than => TIMESTAMP '2100-01-01')"
        )
        took = [end - start for start, end in zip([began, *ends], ends, strict=False)]
        return {"seconds": seconds, "sums": _sums(spark, table), "batches": took, "split": {}}

    return job


def frazil_side(name: str, settings: dict[str, Any]) -> Job:
    from frazil.config.model import from_document
    from frazil.sink import Sink
    from frazil.spark.session import session
    from frazil.steps import Step

    folder = settings["folder"]
    kept = name == "frazil_maintained"
    table: dict[str, Any] = {"name": "db.t", "mode": "upsert", "key": ["id"]}
    config = from_document(
        {
            "sink": {
                "id": name,
                "topics": [TOPIC],
                "index_table": "db.index",
                "trigger": "10ms",
                "commit_interval": "0s",
                "max_records_per_trigger": settings["rows"],
            },
            "kafka": {"bootstrap.servers": settings["bootstrap"]},
            "decode": {"schema": f"{folder}/account.avsc"},
            "catalog": {"type": "hadoop", "warehouse": f"{folder}/{name}"},
            "table": [table if kept else {**table, "compact_after_commits": 0}],
        }
    )
    spark = session(config, say=say)

    def maintain() -> dict[str, Any]:
        """A round at once. The sink's own are made after commits, so there may be none now."""
        made = Sink(config)
        sink = made.start(spark)
        began = time.monotonic()
        made._events.maintain()
        seconds = time.monotonic() - began
        sink.stop()
        return {"seconds": round(seconds, 2), "trouble": sink.committer.progress.maintenance_error}

    def job(request: dict[str, Any]) -> dict[str, Any]:
        if "maintain" in request:
            return maintain()
        steps: list[Step] = []
        clock = time.time() - time.monotonic()
        began = time.monotonic()
        sink = Sink(config, on_step=steps.append).start(spark)
        sink.wait_until(sink.ends())
        seconds = time.monotonic() - began
        sink.stop()
        if kept:  # what it still had to do is a part of it
            seconds = time.monotonic() - began
        ends = [step.at - clock for step in steps if step.name == "committed"]
        took = [end - start for start, end in zip([began, *ends], ends, strict=False)]
        rounds = sum(step.name == "compacted" for step in steps)
        return {
            "seconds": seconds,
            "batches": took,
            "split": _split(steps),
            "rounds": rounds,
            "trouble": sink.committer.progress.maintenance_error,
        }

    return job


def _split(steps: list[Any]) -> dict[str, float]:
    """Seconds per station: the tasks' own clocks, and the driver's between its steps."""
    split: dict[str, float] = {}
    at: dict[tuple[int, str], float] = {(step.batch, step.name): step.at for step in steps}

    def add(key: str, seconds: float) -> None:
        split[key] = split.get(key, 0.0) + seconds

    for step in steps:
        for key, seconds in (step.seconds or {}).items():
            add(key, seconds)
        if step.name == "written":
            add("stage", at[step.batch, "staged"] - step.at)
        if step.name == "commit" and (step.batch, "done") in at:
            add("commit", at[step.batch, "done"] - step.at)
    return split


def scan_side(_: str, settings: dict[str, Any]) -> Job:
    """Reads the tables of all sides, each as often as it takes to be warm, in turns."""
    names = [*MERGES, "frazil", "frazil_maintained"]
    spark = _spark(settings["folder"], "6g", *names, "fresh")
    ordinary = ", ".join(COLUMNS)

    def bounded(table: str, write: Callable[[Any], None]) -> float:
        """Every column of every row; how long it took."""
        spark.sparkContext.setJobGroup("scan", table, interruptOnCancel=True)
        limit = threading.Timer(SCAN_SECONDS, spark.sparkContext.cancelJobGroup, ["scan"])
        began = time.monotonic()
        limit.start()
        try:
            write(spark.sql(f"SELECT {ordinary} FROM {table}").write)
        finally:
            limit.cancel()
        return time.monotonic() - began

    def timed(table: str) -> float:
        return bounded(table, lambda into: into.format("noop").mode("overwrite").save())

    def files(table: str) -> tuple[int, int]:
        [(count, deletes)] = spark.sql(
            f"SELECT count(*), count_if(content <> 0) FROM {table}.files"
        ).collect()
        return count, deletes

    def copied(name: str) -> dict[str, Any]:
        folder = f"{settings['folder']}/read/{name}"
        try:
            bounded(f"{name}.db.t", lambda into: into.parquet(folder))
        except Exception:  # it takes too long: it is not compared, and that is reported
            return {}
        return {"folder": folder}

    def job(request: dict[str, Any]) -> dict[str, Any]:
        if "copy" in request:
            return copied(request["copy"])
        fresh = request["fresh"]
        if not spark.catalog.tableExists(fresh):
            rows = spark.sql(f"SELECT {ordinary} FROM {request['of']}.db.t")
            ordered = rows.repartitionByRange(4, "id").sortWithinPartitions("id")
            ordered.writeTo(fresh).using("iceberg").tableProperty(
                "write.parquet.compression-codec", "zstd"
            ).create()
        tables = {"fresh": fresh, **{catalog: f"{catalog}.db.t" for catalog in request["scan"]}}
        runs: dict[str, list[float]] = {side: [] for side in tables}
        why: dict[str, str] = {}
        spent = dict.fromkeys(tables, 0.0)
        for _ in range(8):
            for side, table in tables.items():
                if side in why or spent[side] > ENOUGH_SECONDS:
                    continue
                try:
                    seconds = timed(table)
                except Exception as error:  # too long, or out of memory: reported, and not hidden
                    why[side] = str(error).splitlines()[0][:200]
                    continue
                runs[side].append(seconds)
                spent[side] += seconds
        answer: dict[str, Any] = {}
        measure = statistics.median(runs["fresh"][3:])
        for side, table in tables.items():
            count, deletes = files(table)
            # The first three warm the JVM, where there is time for them.
            warm = runs[side][3:] or runs[side][1:] or runs[side]
            seconds = statistics.median(warm) if warm and side not in why else None
            answer[side] = {
                "seconds": seconds and round(seconds, 3),
                "against_fresh": seconds and round(seconds / measure, 2),
                "runs": [round(run, 3) for run in runs[side]],
                "why": why.get(side, ""),
                "files": count,
                "deletes": deletes,
                "sums": None if side in why else _sums(spark, table),
            }
        return answer

    return job


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--rows", type=int, default=500_000, help="records of a batch")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--turn", type=int, default=10, help="batches before the next side's turn")
    parser.add_argument("--scan-at", default="10,50,200", help="after so many batches")
    parser.add_argument("--long", action="store_true", help="200 batches")
    parser.add_argument("--only-merge", action="store_true", help="Spark's side alone")
    parser.add_argument("--folder", help="where the run's files are; they are removed at its end")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side(given.side, json.loads(given.settings))
    else:
        if given.long:
            given.batches = 200
        given.scan_at = {int(number) for number in given.scan_at.split(",")}
        if given.batches % given.turn or given.rows % PARTITIONS or given.keys % PARTITIONS:
            parser.error("whole turns, and rows and keys for four partitions each")
        print(json.dumps(compare(given)))
