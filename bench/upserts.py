"""Upserts under kills: at every snapshot the table is what a dictionary of the topic holds.

Changes of 200,000 keys in four Kafka partitions: inserts, updates, deletes, and what was deleted
inserted again; most keys in one partition, a tenth of them in any. The sink upserts them into a
table partitioned by a column that changes, so keys move; it compacts and expires snapshots as it
goes. It runs in a process of its own which is killed, SIGKILL, at each named step in turn: those of
a batch, and those of what is done between commits. After every run all new snapshots are read, by
time travel, with Spark and with DuckDB.

What they must hold is kept apart: the records as they were produced, the ranges that the snapshots'
ledger names, and an array with a place for each key, which is the dictionary. The engines add up
two hashes of every row (key, value and offset); the same sums are kept of the dictionary. Where
they differ, all rows are read and each key that differs is named.

Order: in a partition the last offset; of a key that came from several partitions in one batch, the
partition whose records of it carry the newest timestamp, of the same the highest.

    make upserts                                                # five million records
    make upserts ARGS='--records 200000 --keys 20000'
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from confluent_kafka import Producer
from duckdb_extensions import import_extension

from frazil.auditing.evidence import of_sink
from frazil.config.model import Config, load
from frazil.iceberg.java import JavaCatalog
from frazil.ops.orphans import orphans
from frazil.spark.session import session
from frazil.steps import STEPS
from frazil.testing.datagen import create_topic, zigzag
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkRuns

TOPIC, TABLE, PARTITIONS = "changes", "db.t", 4
KINDS = ("a", "b", "c")
#: What the sink does between commits. These come seldom: every run is held at the first it meets.
BETWEEN = ("compact", "compacted")
SELDOM = ("expire", "expired", "index-merge", "index-merged", "index-expire", "index-expired")
#: A run that does not come to a step at which it is held is killed after so many batches; where
#: it is held at none, after more.
SHORT, LONG = 12, 30
SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Change",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "version", "type": "long"},
            {"name": "amount", "type": "int"},
            {"name": "kind", "type": "string"},
            {"name": "note", "type": "string"},
        ],
    }
)
#: A row's hash is the square of a sum of its columns, modulo a prime: the same in any engine.
PRIME = 2**31 - 1
COLUMNS = {
    "id": "id",
    "version": "version",
    "amount": "amount",
    "offset": "_offset",
    "partition": "_topic_partition",
    "kind": "ascii(kind)",
    "note": "length(note)",
}
FACTORS = (
    (1610612741, 805306457, 402653189, 1207959559, 1342177283, 1476395029, 1744830467),
    (1073741789, 536870923, 268435459, 939524129, 1140850699, 1275068423, 2013265967),
)
Array = np.ndarray[Any, Any]
Sums = tuple[int, int, int]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def select() -> str:
    """The sums of a table, in SQL."""
    expressions = ["count(*)"]
    for factors in FACTORS:
        terms = zip(COLUMNS.values(), factors, strict=True)
        u = "(" + " + ".join(f"cast({c} AS bigint) * {f}" for c, f in terms) + f") % {PRIME}"
        expressions.append(f"coalesce(sum((({u}) * ({u})) % {PRIME}), 0)")
    return ", ".join(expressions)


def hashes(columns: dict[str, Array]) -> Array:
    """The same of rows in arrays."""
    hashed = []
    for factors in FACTORS:
        terms = (columns[n].astype(np.int64) * f for n, f in zip(COLUMNS, factors, strict=True))
        u = sum(terms) % PRIME
        hashed.append(u * u % PRIME)
    return np.array(hashed)


# ── the records, and what they come to ───────────────────────────────────────────────────────────


class Changes:
    """All records, by partition and offset, in arrays."""

    def __init__(self, count: int, keys: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.keys = keys
        ids = draw.integers(0, keys, count)
        # A tenth of the keys come from any partition, the others from their own.
        anywhere = ids % 10 == 0
        place = np.where(anywhere, draw.integers(0, PARTITIONS, count), ids % PARTITIONS)
        gone = draw.random(count) < 0.15
        # Clocks of producers differ: within a batch the newest record need not be the last.
        stamp = np.arange(count) // 40 + draw.integers(-200, 200, count)
        version = np.arange(1, count + 1)
        amount = draw.integers(0, 10_000, count)
        self.columns: list[dict[str, Array]] = []
        for number in range(PARTITIONS):
            chosen = place == number
            self.columns.append(
                {
                    "id": ids[chosen],
                    "version": version[chosen],
                    "amount": amount[chosen],
                    "offset": np.arange(chosen.sum()),
                    "partition": np.full(chosen.sum(), number),
                    "kind": ord(KINDS[0]) + version[chosen] % len(KINDS),
                    "note": version[chosen] % 17,
                    "gone": gone[chosen],
                    "stamp": stamp[chosen],
                }
            )
        self._place = place

    def produce(self, bootstrap: str) -> None:
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "linger.ms": 20,
                "batch.num.messages": 20_000,
                "queue.buffering.max.messages": 500_000,
                "enable.idempotence": True,
                "log_level": 3,
            }
        )
        now = int(time.time() * 1000)
        ids = [zigzag(i) for i in range(self.keys)]
        names = [str(i).encode() for i in range(self.keys)]
        kinds = {ord(kind): b"\2" + kind.encode() for kind in KINDS}
        notes = [zigzag(n) + b"x" * n for n in range(17)]
        wanted = ("id", "version", "amount", "kind", "note", "gone", "stamp")
        lists = [zip(*(c[name].tolist() for name in wanted), strict=True) for c in self.columns]
        failed: list[object] = []

        def delivered(error: object, _: object) -> None:
            if error:
                failed.append(error)

        for number in self._place.tolist():
            key, version, amount, kind, note, gone, stamp = next(lists[number])
            value = (
                None
                if gone
                else b"".join(
                    (
                        b"\0\0\0\0\1",
                        ids[key],
                        zigzag(version),
                        zigzag(amount),
                        kinds[kind],
                        notes[note],
                    )
                )
            )
            while True:
                try:
                    producer.produce(
                        TOPIC,
                        value,
                        names[key],
                        partition=number,
                        timestamp=now + stamp,
                        on_delivery=delivered,
                    )
                    break
                except BufferError:
                    producer.poll(0.05)
        assert producer.flush(120) == 0
        assert not failed, failed[0]

    def between(self, ranges: dict[int, tuple[int, int]]) -> dict[str, Array]:
        parts = [
            {name: column[low:high] for name, column in self.columns[p].items()}
            for p, (low, high) in sorted(ranges.items())
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Dictionary:
    """The last change of each key, and the sums of those that are rows."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        names = ("version", "amount", "offset", "partition", "kind", "note")
        self.rows = {name: np.zeros(changes.keys, np.int64) for name in names}
        self.rows["id"] = np.arange(changes.keys)
        self.present = np.zeros(changes.keys, bool)
        self.hashes = np.zeros((2, changes.keys), np.int64)
        self.at = dict.fromkeys(range(PARTITIONS), 0)

    def take(self, ranges: dict[int, tuple[int, int]]) -> None:
        """One batch."""
        for partition, (low, high) in ranges.items():
            assert self.at[partition] == low, f"[{partition}] is at {self.at[partition]}, not {low}"
            self.at[partition] = high
        batch = self.changes.between(ranges)
        won = winners(batch)
        ids = batch["id"][won]
        for name, column in self.rows.items():
            column[ids] = batch[name][won]
        self.present[ids] = ~batch["gone"][won]
        fresh = hashes({name: column[ids] for name, column in self.rows.items()})
        self.hashes[:, ids] = np.where(self.present[ids], fresh, 0)

    @property
    def sums(self) -> Sums:
        one, other = self.hashes.sum(axis=1).tolist()
        return int(self.present.sum()), one, other

    def differences(self, actual: dict[str, Array]) -> dict[str, list[int]]:
        """The keys of a table's rows that are there twice, missing, or not what they should be."""
        ids, count = np.unique(actual["id"], return_counts=True)
        seen = np.isin(np.flatnonzero(self.present), ids)
        known = (actual["id"] >= 0) & (actual["id"] < len(self.present))
        right = np.zeros(len(actual["id"]), bool)
        right[known] = self.present[actual["id"][known]]
        for name, column in self.rows.items():
            right[known] &= column[actual["id"][known]] == actual[name][known]
        return {
            "twins": ids[count > 1].tolist(),
            "lost": np.flatnonzero(self.present)[~seen].tolist(),
            "wrong": np.unique(actual["id"][~right]).tolist(),
        }


def winners(batch: dict[str, Array]) -> Array:
    """Which records of a batch are the last of their keys."""
    order = np.lexsort((batch["offset"], batch["partition"], batch["id"]))
    ids, places = batch["id"][order], batch["partition"][order]
    starts = np.flatnonzero(np.append(True, (ids[1:] != ids[:-1]) | (places[1:] != places[:-1])))
    last = np.append(starts[1:], len(order)) - 1  # of each key and partition
    newest = np.maximum.reduceat(batch["stamp"][order], starts)
    ranked = np.lexsort((places[last], newest, ids[last]))
    of_key = ids[last][ranked]
    return order[last[ranked[np.append(of_key[1:] != of_key[:-1], True)]]]


# ── the table ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Snapshot:
    id: int
    parent: int | None
    summary: dict[str, str]

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        ranges = json.loads(self.summary.get("frazil.ranges", "{}")).get(TOPIC, {})
        return {int(number): (low, high) for number, (low, high) in ranges.items() if low < high}


class Readers:
    """Spark and DuckDB, each with its own way to an older snapshot."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._catalog = folder / "catalog.db"
        self.spark = session(config)
        self._duckdb = duckdb.connect()
        for extension in ("avro", "iceberg"):
            import_extension(extension)
        self._duckdb.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'; SET threads=1")

    def metadata(self) -> str:
        with sqlite3.connect(self._catalog, timeout=30) as catalog:
            [(location,)] = catalog.execute(
                "SELECT metadata_location FROM iceberg_tables WHERE table_name = 't'"
            )
        return str(location).removeprefix("file:")

    def history(self) -> list[Snapshot]:
        """Of main, oldest first, as far as it is kept."""
        document = json.loads(Path(self.metadata()).read_text())
        known = {snapshot["snapshot-id"]: snapshot for snapshot in document.get("snapshots", [])}
        at = document.get("refs", {}).get("main", {}).get("snapshot-id")
        snapshots = []
        while at in known:
            snapshot = known[at]
            snapshots.append(
                Snapshot(at, snapshot.get("parent-snapshot-id"), snapshot.get("summary", {}))
            )
            at = snapshots[-1].parent
        return snapshots[::-1]

    def sums(self, snapshots: Sequence[int]) -> Iterator[tuple[str, int, Sums]]:
        metadata = self.metadata()

        def sums(snapshot: int) -> tuple[str, int, Sums]:
            scan = f"iceberg_scan('{metadata}', snapshot_from_id => {snapshot})"
            [row] = self._duckdb.cursor().execute(f"SELECT {select()} FROM {scan}").fetchall()
            return "DuckDB", snapshot, tuple(map(int, row))

        # It holds each deleted key against each file, on one core.
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(sums, snapshots)
        for at in range(0, len(snapshots), 8):  # a query has its price, whatever it reads
            scans = (
                f"SELECT {snapshot}, {select()} FROM lake.{TABLE} VERSION AS OF {snapshot}"
                for snapshot in snapshots[at : at + 8]
            )
            for row in self.spark.sql(" UNION ALL ".join(scans)).collect():
                yield "Spark", int(row[0]), tuple(map(int, row[1:]))

    def rows(self, engine: str, snapshot: int) -> dict[str, Array]:
        columns = ", ".join(f"cast({c} AS bigint) AS {n}_" for n, c in COLUMNS.items())
        if engine == "Spark":
            frame = self.spark.sql(f"SELECT {columns} FROM lake.{TABLE} VERSION AS OF {snapshot}")
            table = frame.toArrow()
        else:
            scan = f"iceberg_scan('{self.metadata()}', snapshot_from_id => {snapshot})"
            table = self._duckdb.execute(f"SELECT {columns} FROM {scan}").to_arrow_table()
        return {name: table[f"{name}_"].to_numpy() for name in COLUMNS}


@dataclass
class Run:
    readers: Readers
    dictionary: Dictionary
    #: what each snapshot must hold that was ever seen
    known: dict[int, Sums] = field(default_factory=dict)
    newest: int | None = None
    compared: Counter[str] = field(default_factory=Counter)
    difference_counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def check(self) -> None:
        """Every snapshot that is new since the last time."""
        history = self.readers.history()
        at = [snapshot.id for snapshot in history].index(self.newest) + 1 if self.newest else 0
        fresh = history[at:]
        read: dict[int, list[tuple[str, Sums]]] = {}
        for engine, snapshot, sums in self.readers.sums(
            [fresh_snapshot.id for fresh_snapshot in fresh]
        ):
            read.setdefault(snapshot, []).append((engine, sums))
        for fresh_snapshot in fresh:
            assert fresh_snapshot.parent == self.newest, "a snapshot went before it was compared"
            if fresh_snapshot.ranges:
                self.dictionary.take(fresh_snapshot.ranges)
            summary = fresh_snapshot.summary
            kind = (
                "compaction"
                if "frazil.compact" in summary
                else "batch"
                if fresh_snapshot.ranges
                else ""
            )
            self.kinds[kind or "claim"] += 1
            self.known[fresh_snapshot.id] = self.dictionary.sums
            self.newest = fresh_snapshot.id
            for engine, sums in read[fresh_snapshot.id]:
                self.compare(engine, fresh_snapshot, sums)

    def compare(self, engine: str, snapshot: Snapshot, sums: Sums) -> None:
        self.compared[engine] += 1
        if sums == self.known[snapshot.id]:
            return
        differ = self.dictionary.differences(self.readers.rows(engine, snapshot.id))
        self.difference_counts.update({kind: len(keys) for kind, keys in differ.items()})
        self.difference_counts["snapshots_that_differ"] += 1
        named = {kind: keys[:5] for kind, keys in differ.items() if keys}
        say(
            f"snapshot {snapshot.id} ({snapshot.summary.get('operation')}), read by {engine}: "
            f"expected {self.known[snapshot.id]}, found {sums}: {named}"
        )

    def again(self) -> int:
        """Every snapshot that is left, once more."""
        left = [snapshot.id for snapshot in self.readers.history()]
        for engine, snapshot, sums in self.readers.sums(left):
            if sums != self.known[snapshot]:
                self.difference_counts["snapshots_that_differ"] += 1
                say(f"snapshot {snapshot} changed: {engine} finds {sums}")
        return len(left)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def killed_run(runs: SinkRuns, hold: str, batches: int, steps: Counter[str]) -> str:
    """Until it is held at a step, or long enough; at which it was killed."""
    pipeline = runs.next(hold=hold, until="forever")
    watch = threading.Timer(240, pipeline.process.kill)
    watch.start()
    first, done = None, 0
    try:
        for event in pipeline.events():
            steps[event.get("step", "")] += 1
            if first is None and event.get("step") == "planned":
                first = event["batch"]
            if first is not None and event.get("step") == "done":  # of several batches, maybe
                done = event["batch"] - first + 1
            if "held" in event or done >= batches:
                return str(event.get("held", "anywhere"))
            if "error" in event:
                raise SystemExit(f"the sink stopped: {event}")
        raise SystemExit(f"the sink ended before {hold}")
    finally:
        watch.cancel()
        pipeline.kill()


def document(folder: Path, bootstrap: str, given: argparse.Namespace) -> str:
    (folder / "change.avsc").write_text(SCHEMA)
    return f"""
[sink]
id = "upserts"
topics = ["{TOPIC}"]
index_table = "db.index"
trigger = "1s"
commit_interval = "0s"
max_records_per_trigger = {given.batch}
index_snapshot_retention = "{given.keep}"
[kafka]
"bootstrap.servers" = "{bootstrap}"
[decode]
schema = "{folder}/change.avsc"
[catalog]
type = "jdbc"
uri = "jdbc:sqlite:{folder}/catalog.db?busy_timeout=10000&journal_mode=WAL"
"jdbc.schema-version" = "V1"
warehouse = "{folder}/warehouse"
[[table]]
name = "{TABLE}"
mode = "upsert"
key = ["id"]
partition_by = ["kind"]
format_version = {given.format_version}
compact_after_commits = 1
snapshot_retention = "{given.keep}"
"""


def prove(given: argparse.Namespace, folder: Path, broker: Broker) -> dict[str, Any]:
    path = folder / "sink.toml"
    path.write_text(document(folder, broker.bootstrap, given))
    with SinkRuns(path, log=folder / "pipeline.log", scratch=folder / "scratch") as runs:
        return _prove(given, folder, broker, load(path), runs)


def _prove(
    given: argparse.Namespace, folder: Path, broker: Broker, config: Config, runs: SinkRuns
) -> dict[str, Any]:
    began = time.monotonic()
    changes = Changes(given.records, given.keys, given.seed)
    create_topic(broker.bootstrap, TOPIC, PARTITIONS)
    changes.produce(broker.bootstrap)
    say(f"{given.records:,} records of {given.keys:,} keys produced")
    run = Run(Readers(folder, config), Dictionary(changes))
    chance = random.Random(given.seed)
    kills: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    turns = [step for _ in range(given.rounds) for step in (*STEPS, *BETWEEN)]
    left = given.records // given.batch
    while left > SHORT:
        if time.monotonic() - began > given.within:
            turns.clear()
        hold = [step for step in SELDOM if kills[step] < given.rounds]
        if turns:
            hold.append(f"{turns[0]}:{1 if turns[0] in BETWEEN else chance.randrange(1, 6)}")
        at = killed_run(runs, ",".join(hold), min(SHORT if turns else LONG, left - 4), steps)
        kills[at] += 1
        if at in turns[:1]:
            turns.pop(0)
        run.check()
        read = sum(run.dictionary.at.values())
        left = (given.records - read) // given.batch
        say(
            f"killed at {at}; {len(run.known)} snapshots, {read:,} records, "
            f"{dict(run.difference_counts) or 'all exact'}"
        )
    final = runs.next(last=True)
    for event in final.events():
        steps[event.get("step", "")] += 1
        if "error" in event:
            raise SystemExit(f"the sink stopped: {event}")
    assert final.wait() == 0, "the last run failed"
    run.check()
    ended = sum(run.dictionary.at.values()) == given.records
    say("all is in; what the killed runs left behind is removed")
    leftovers = orphans(config, run.readers.spark)
    for table, file in leftovers:
        table.delete(file)
    kept = run.again()
    remain = len(orphans(config, run.readers.spark))
    proof = of_sink(config, JavaCatalog(run.readers.spark, config.catalog.name).open_readonly)
    verdicts = {report.table: report.verdict for report in proof.reports}
    wrong = {
        kind: run.difference_counts[kind]
        for kind in ("twins", "lost", "wrong", "snapshots_that_differ")
    }
    every = all(kills[step] for step in (*STEPS, *BETWEEN))
    return {
        "records": given.records,
        "keys": given.keys,
        "rows": run.dictionary.sums[0],
        "snapshots": len(run.known),
        "snapshots_by_kind": dict(run.kinds),
        "compared": dict(run.compared),
        "kills": sum(kills.values()),
        "kills_by_step": dict(kills),
        "compactions": steps["compacted"],
        "expiries": steps["expired"],
        "expired_snapshots": len(run.known) - kept,
        "compared_again_at_the_end": kept,
        "leftovers": len(leftovers),
        "leftovers_after": remain,
        "audit": verdicts,
        "all_records": ended,
        "killed_at_every_step": every,
        **wrong,
        "exact": ended
        and not remain
        and not any(wrong.values())
        and set(verdicts.values()) == {"proven"},
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=40_000, help="records of a batch")
    parser.add_argument("--rounds", type=int, default=1, help="kills at each step")
    parser.add_argument("--within", type=int, default=3600, help="seconds; no step's turn after")
    parser.add_argument(
        "--keep", default="3m", help="snapshot_retention, and index_snapshot_retention"
    )
    parser.add_argument("--format-version", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where the run's files are; they are removed at its end")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="frazil-upserts-", dir=given.folder))
    try:
        with Broker(folder / "broker") as broker:
            result = prove(given, folder, broker)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    return 0 if result["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
