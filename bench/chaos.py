"""Random kills under load, and a verifier that compares every offset while it goes on.

One sink fills an append table and an upsert table, with a real broker and a real REST catalog. A
producer never stops. One after the other, in an order drawn by the seed, these are killed with
SIGKILL:

    driver     held at each named step of a batch, a compaction and an expiry; while it starts; at
               any moment
    worker     a Python worker in the middle of a task
    broker     when the sink comes to a step, drawn; started again on the same port and data
    catalog    the same

The next run of the sink has its JVM started while the last one runs: a kill costs what a run
needs to take over, not what Java needs to start.

Meanwhile the verifier follows both tables. It reads the topics with a plain consumer, asks the
catalog's database where the tables are, and reads files with Arrow and DuckDB:

    append     of each new snapshot the files it added: every offset below the snapshot's cut is in
               the table exactly once, as the record says, and none beyond it
    upsert     the newest snapshot as a whole: the last value of each key up to its cut, none of a
               key that was deleted, none twice

    make chaos KILLS=10
    make chaos KILLS=200 ARGS='--seed 7'

The last line of standard output is JSON; exit 1 if anything is lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import numpy as np
import psutil
import pyarrow.parquet as pq
from confluent_kafka import Consumer, Producer, TopicPartition
from duckdb_extensions import import_extension

from frazil.auditing.evidence import of_sink
from frazil.config.model import load
from frazil.ledger import entry as ledger
from frazil.offsets import Partition
from frazil.spark.open_table import opener
from frazil.steps import STEPS
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import Event, SinkProcess, SinkRuns, toml
from rest import RestCatalog

APPEND, UPSERT = "events", "changes"
PARTITIONS = 4
KEYS = 10_000  # DuckDB holds each key that waits for a compaction against each row
TOMBSTONES = 0.1
BATCH = 40_000
BASE = 1 << 33  # so that Avro writes every number in five bytes
HEAD = b"\0\0\0\0\1"
SIZE = len(HEAD) + 10
SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Change",
        "fields": [{"name": "id", "type": "long"}, {"name": "n", "type": "long"}],
    }
)

#: Beside the steps of a batch, those of what the sink does to the upsert table between commits.
#: They come now and then: a run that has made so many commits without is killed as it is.
BETWEEN = ("compact", "compacted", "expire", "expired")
COMMITS = 12
#: Steps at which broker or catalog are killed.
GATES = ("planned", "written", "staged", "commit", "committed", "index-commit", "index-committed")
WITHIN = 180.0  # seconds; a bound for what takes a few
TRICKLE = 3_000  # rows a second, so that there is always something for a step to happen in


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Stuck(Exception):
    pass


# ── the producer ─────────────────────────────────────────────────────────────────────────────────


def encoded(numbers: np.ndarray) -> np.ndarray:
    """Avro's longs of numbers from BASE on: five bytes each."""
    zigzag = (numbers + BASE).astype(np.uint64) << np.uint64(1)
    shifted = zigzag[:, None] >> (np.arange(5, dtype=np.uint64) * np.uint64(7))
    return ((shifted & np.uint64(0x7F)) | np.array([128] * 4 + [0], np.uint64)).astype(np.uint8)


def decoded(raw: np.ndarray) -> np.ndarray:
    shifts = np.arange(5, dtype=np.uint64) * np.uint64(7)
    zigzag = ((raw.astype(np.uint64) & np.uint64(0x7F)) << shifts).sum(axis=1)
    return (zigzag >> np.uint64(1)).astype(np.int64) - BASE


class Generator(threading.Thread):
    """Records without end: half of them events, half changes of keys; all of a key go to one
    partition. `goal` is how many there shall be soon; beyond it they only trickle."""

    def __init__(self, bootstrap: str, seed: int, rate: int) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 20,
                "message.timeout.ms": 600_000,
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
            }
        )
        self._chance = np.random.default_rng(seed)
        self._rate = rate
        self._ending = threading.Event()
        self.sent = 0
        self.goal = 0
        self.failure = ""

    def run(self) -> None:
        tick = 0.1
        while not self._ending.is_set():
            began = time.monotonic()
            many = self._rate if self.sent < self.goal else TRICKLE
            self._send(int(many * tick))
            self._ending.wait(max(0.0, tick - (time.monotonic() - began)))
        self._producer.flush(WITHIN)

    def _send(self, count: int) -> None:
        numbers = np.arange(self.sent, self.sent + count)
        ids = self._chance.integers(0, KEYS, count)
        gone = self._chance.random(count) < TOMBSTONES
        values = np.empty((count, SIZE), np.uint8)
        values[:, : len(HEAD)] = np.frombuffer(HEAD, np.uint8)
        values[:, len(HEAD) : -5] = encoded(ids)
        values[:, -5:] = encoded(numbers)
        raw = values.tobytes()
        for i, (key, deletes) in enumerate(zip(ids.tolist(), gone.tolist(), strict=True)):
            value = raw[i * SIZE : (i + 1) * SIZE]
            if i % 2:
                self._put(APPEND, value, None, (i // 2) % PARTITIONS)
            else:
                text = str(key + BASE).encode()
                self._put(UPSERT, None if deletes else value, text, key % PARTITIONS)
        self.sent += count
        self._producer.poll(0)

    def _put(self, topic: str, value: bytes | None, key: bytes | None, partition: int) -> None:
        while True:
            try:
                self._producer.produce(
                    topic, value, key, partition=partition, on_delivery=self._delivered
                )
                return
            except BufferError:  # the broker is away
                self._producer.poll(0.1)

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self.failure = str(error)

    def stop(self) -> None:
        """When there are as many as there shall be: the last kills may have been quicker."""
        deadline = time.monotonic() + WITHIN
        while self.sent < self.goal and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._ending.set()
        self.join(WITHIN)
        if self.sent < self.goal:
            raise Stuck(f"the producer sent {self.sent:,} of {self.goal:,} records")
        if self.failure or self.is_alive():
            raise Stuck(f"the producer failed: {self.failure or 'it does not end'}")


# ── the verifier ─────────────────────────────────────────────────────────────────────────────────


class Column:
    """An array that grows."""

    def __init__(self, kind: Any) -> None:
        self._values = np.zeros(1 << 16, kind)
        self.size = 0

    def extend(self, values: np.ndarray) -> None:
        self.grow(self.size + len(values))
        self._values[self.size - len(values) : self.size] = values

    def grow(self, size: int) -> None:
        if size > len(self._values):
            room = np.zeros(max(size, 2 * len(self._values)), self._values.dtype)
            room[: self.size] = self._values[: self.size]
            self._values = room
        self.size = max(size, self.size)

    @property
    def values(self) -> np.ndarray:
        return self._values[: self.size]


class Topic:
    """What a topic holds, partition by partition, read with a plain consumer: ids and numbers of
    its records; the number of one that deletes is -1."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.name = name
        self.ids = [Column(np.int32) for _ in range(PARTITIONS)]
        self.numbers = [Column(np.int64) for _ in range(PARTITIONS)]
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "verifier",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
                "queued.max.messages.kbytes": 16_384,
            }
        )
        self._consumer.assign([TopicPartition(name, p, 0) for p in range(PARTITIONS)])

    def read(self, seconds: float) -> None:
        """What comes at once."""
        messages = [m for m in self._consumer.consume(50_000, seconds) if m.error() is None]
        for partition in range(PARTITIONS):
            received = [m for m in messages if m.partition() == partition]
            if not received:
                continue
            begin = self.ids[partition].size
            offsets = np.array([m.offset() for m in received])
            if not np.array_equal(offsets, np.arange(begin, begin + len(received))):
                raise Stuck(f"the topic {self.name}[{partition}] has holes at {begin}")
            values = [m.value() for m in received]
            present = np.array([value is not None for value in values])
            raw = np.frombuffer(b"".join(filter(None, values)), np.uint8).reshape(-1, SIZE)
            ids, numbers = np.empty(len(received), np.int64), np.full(len(received), -1, np.int64)
            ids[present], numbers[present] = decoded(raw[:, len(HEAD) : -5]), decoded(raw[:, -5:])
            ids[~present] = [int(m.key() or b"") - BASE for m in received if m.value() is None]
            self.ids[partition].extend(ids)
            self.numbers[partition].extend(numbers)

    def reach(self, cut: list[int]) -> None:
        deadline = time.monotonic() + WITHIN
        while any(self.ids[p].size < end for p, end in enumerate(cut)):
            self.read(0.2)
            if time.monotonic() > deadline:
                raise Stuck(f"the topic {self.name} cannot be read up to {cut}")


@dataclass
class Findings:
    """What the verifier saw, at its worst."""

    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    append_snapshots: int = 0
    upsert_snapshots: int = 0
    first: dict[str, str] = field(default_factory=dict)

    def worse(self, kind: str, count: int, where: str) -> None:
        if count:
            if kind not in self.first:
                say(f"{kind.upper()}: {count} in {where}")
                self.first[kind] = where
            setattr(self, kind, max(getattr(self, kind), count))


class Table:
    """A table as the catalog's database and its own files say it is."""

    def __init__(self, database: Path, name: str) -> None:
        self._database, self.name = database, name

    def metadata(self) -> tuple[str, dict[str, Any]] | None:
        with sqlite3.connect(f"file:{self._database}?mode=ro", uri=True, timeout=30) as catalog:
            row = catalog.execute(
                "SELECT metadata_location FROM iceberg_tables "
                "WHERE table_namespace = 'db' AND table_name = ?",
                (self.name,),
            ).fetchone()
        if row is None:
            return None
        path = str(row[0]).removeprefix("file://").removeprefix("file:")
        return path, json.loads(Path(path).read_text())


def ancestry(metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Newest first."""
    known = {snapshot["snapshot-id"]: snapshot for snapshot in metadata.get("snapshots", ())}
    snapshot_id = metadata.get("current-snapshot-id")
    while snapshot_id in known:
        yield known[snapshot_id]
        snapshot_id = known[snapshot_id].get("parent-snapshot-id")


def cut_of(snapshot: dict[str, Any], topic: str) -> list[int] | None:
    """Up to where the sink says that a snapshot has everything; None where it says nothing."""
    entry = ledger.parse(snapshot["summary"])
    return entry and [entry.end.get(Partition(topic, p), 0) for p in range(PARTITIONS)]


class Verifier(threading.Thread):
    def __init__(self, topics: dict[str, Topic], database: Path) -> None:
        super().__init__(daemon=True)
        self.findings = Findings()
        self.cuts: dict[str, list[int]] = {name: [0] * PARTITIONS for name in (APPEND, UPSERT)}
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self._ending = threading.Event()
        self._topics = topics
        self._tables = {name: Table(database, name) for name in (APPEND, UPSERT)}
        self._seen: dict[str, int] = {}
        self._times = [Column(np.uint8) for _ in range(PARTITIONS)]  # offset → how often
        self._last = np.full(KEYS, -1, np.int64)  # id → number of its last record

    @cached_property
    def _duckdb(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        for extension in ("avro", "iceberg"):
            import_extension(extension)
            connection.execute(f"LOAD {extension}")
        return connection.execute("SET threads = 1")

    def run(self) -> None:
        try:
            while not self._ending.wait(1.0):
                began = time.thread_time()
                self.look()
                self.seconds += time.thread_time() - began
        except BaseException as error:
            self.failure = error

    def look(self) -> None:
        for name, compare in ((APPEND, self._appended), (UPSERT, self._upserted)):
            self._topics[name].read(0)
            for _ in range(20):  # an old metadata file may go while it is read
                with suppress(FileNotFoundError, duckdb.IOException):
                    if now := self._tables[name].metadata():
                        compare(*now)
                    break
            else:
                raise Stuck(f"the table {name} cannot be read")

    def caught_up(self, ends: dict[str, list[int]]) -> bool:
        return all(self.cuts[name] == ends[name] for name in ends)

    def stop(self) -> None:
        self._ending.set()
        self.join(WITHIN)
        if self.failure is None:
            self.look()

    # ── append: every snapshot, by the files it added ────────────────────────────────────────

    def _appended(self, _: str, metadata: dict[str, Any]) -> None:
        new = []
        for snapshot in ancestry(metadata):
            if snapshot["snapshot-id"] == self._seen.get(APPEND):
                break
            new.append(snapshot)
        else:
            if APPEND in self._seen:
                raise Stuck(f"{APPEND}: a snapshot that was there is no ancestor any more")
        for snapshot in reversed(new):
            self._seen[APPEND] = snapshot["snapshot-id"]
            where = f"{APPEND}, snapshot {snapshot['snapshot-id']}"
            for path, sign in self._files(snapshot):
                self._count(path, sign, where)
            cut = cut_of(snapshot, APPEND)
            if cut is not None:
                if any(now < before for now, before in zip(cut, self.cuts[APPEND], strict=True)):
                    self.findings.worse("wrong", 1, f"{where}: the cut went back to {cut}")
                self.cuts[APPEND] = cut
            self._complete(where)
            self.findings.append_snapshots += 1

    def _files(self, snapshot: dict[str, Any]) -> Iterator[tuple[str, int]]:
        """Data files that came (1) and went (-1) with a snapshot."""
        for listed in _avro(snapshot["manifest-list"]):
            if listed["added_snapshot_id"] == snapshot["snapshot-id"]:
                for entry in _avro(listed["manifest_path"]):
                    if entry["status"] != 0 and entry["data_file"].get("content", 0) == 0:
                        yield entry["data_file"]["file_path"], 1 if entry["status"] == 1 else -1

    def _count(self, path: str, sign: int, where: str) -> None:
        columns = ["_topic_partition", "_offset", "id", "n"]
        rows = pq.ParquetFile(_local(path)).read(columns=columns)
        partitions, offsets, ids, numbers = (rows[name].to_numpy() for name in columns)
        topic = self._topics[APPEND]
        for p in np.unique(partitions).tolist():
            at = offsets[partitions == p]
            times = self._times[p]
            times.grow(int(at.max()) + 1)
            np.add.at(times.values, at, np.uint8(sign % 256))
            topic.reach([int(at.max()) + 1 if p == q else 0 for q in range(PARTITIONS)])
            same = (topic.ids[p].values[at] == ids[partitions == p] - BASE) & (
                topic.numbers[p].values[at] == numbers[partitions == p] - BASE
            )
            self.findings.worse("wrong", int((~same).sum()), f"{where}: {path}")

    def _complete(self, where: str) -> None:
        for p, end in enumerate(self.cuts[APPEND]):
            times = self._times[p]
            times.grow(end)
            below, beyond = times.values[:end], times.values[end:]
            for kind, bad in (("lost", below == 0), ("doubled", below > 1)):
                if bad.any():
                    first = f"{where}: {APPEND}[{p}], first at offset {int(bad.argmax())}"
                    self.findings.worse(kind, int(bad.sum()), first)
            self.findings.worse("wrong", int((beyond > 0).sum()), f"{where}: rows beyond the cut")

    # ── upsert: the newest snapshot, as a whole ──────────────────────────────────────────────

    def _upserted(self, path: str, metadata: dict[str, Any]) -> None:
        chain = list(ancestry(metadata))
        if not chain or chain[0]["snapshot-id"] == self._seen.get(UPSERT):
            return
        # Compactions carry no cut: it is that of the batch before.
        cut = next((cut for snapshot in chain if (cut := cut_of(snapshot, UPSERT))), None)
        if cut is None:
            return
        rows = self._duckdb.execute(f"SELECT id, n FROM iceberg_scan('{path}')").fetchnumpy()
        self._seen[UPSERT] = chain[0]["snapshot-id"]
        where = f"{UPSERT}, snapshot {chain[0]['snapshot-id']}"
        self.compare(np.asarray(rows["id"]) - BASE, np.asarray(rows["n"]) - BASE, cut, where)

    def compare(self, ids: np.ndarray, numbers: np.ndarray, cut: list[int], where: str) -> None:
        """The rows of an upsert table with what the topic says up to the cut."""
        topic = self._topics[UPSERT]
        topic.reach(cut)
        for p, (before, end) in enumerate(zip(self.cuts[UPSERT], cut, strict=True)):
            if end < before:
                self.findings.worse("wrong", 1, f"{where}: the cut went back to {cut}")
            # In the order of the offsets: of several numbers of an id the last one stays.
            self._last[topic.ids[p].values[before:end]] = topic.numbers[p].values[before:end]
        self.cuts[UPSERT] = cut
        actual = np.full(KEYS, -1, np.int64)
        actual[ids] = numbers
        twins = len(ids) - len(np.unique(ids))
        bad = np.flatnonzero(actual != self._last)
        first = f"{where}: first id {int(bad[0])}" if len(bad) else where
        self.findings.worse("wrong", len(bad) + twins, first)
        self.findings.upsert_snapshots += 1


def _local(path: str) -> str:
    return path.removeprefix("file://").removeprefix("file:")


def _avro(path: str) -> list[dict[str, Any]]:
    with open(_local(path), "rb") as file:
        return list(fastavro.reader(file))


# ── a run, and what is killed ────────────────────────────────────────────────────────────────────


class WatchedRun:
    """A pipeline whose events are read by a thread, so that others can wait for them."""

    def __init__(self, pipeline: SinkProcess) -> None:
        self.pipeline = pipeline
        self.seen: Counter[str] = Counter()
        self.last: Event = {}
        self.began = time.monotonic()
        #: seconds until it came to each step for the first time
        self.first: dict[str, float] = {}
        self.held = ""
        self.ended = False
        self.started = False
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(ValueError):  # the pipe was closed: it was killed
            for event in self.pipeline.events():
                with self._news:
                    self.last = event
                    self.started |= "started" in event
                    self.held = event.get("held", self.held)
                    name = event.get("step") or next(iter(event))  # ready, started, held
                    self.seen[name] += 1
                    self.first.setdefault(name, time.monotonic() - self.began)
                    self._news.notify_all()
        with self._news:
            self.ended = True
            self._news.notify_all()

    def wait(self, step: str, beyond: int, within: float = WITHIN) -> bool:
        """Until the step was seen more often than that; False where the run ended before."""
        with self._news:
            if not self._news.wait_for(lambda: self.ended or self.seen[step] > beyond, within):
                raise Stuck(f"no {step} in {within:.0f} s; the last was {self.last}")
            return self.seen[step] > beyond


class Died(Exception):
    """A run that ended by itself."""


class Chaos:
    def __init__(self, broker: Broker, catalog: RestCatalog, runs: SinkRuns, seed: int) -> None:
        self._broker, self._catalog, self._runs = broker, catalog, runs
        self._chance = random.Random(seed)
        self.by_point: Counter[str] = Counter()
        self.runs = self.died = 0
        self._first: dict[str, list[float]] = {}
        self.current = self._next()

    def deck(self) -> Iterator[tuple[str, str]]:
        """All kinds of kills in a drawn order, and again."""
        while True:
            kinds = [("driver", step) for step in (*STEPS, *BETWEEN)]
            kinds += [("driver", "start"), ("driver", "any")]
            kinds += [("worker", "task")] * 3
            kinds += [(who, self._chance.choice(GATES)) for who in ("broker", "catalog") * 3]
            self._chance.shuffle(kinds)
            yield from kinds

    def _next(self) -> WatchedRun:
        self.runs += 1
        if self.runs > 1:
            for step, seconds in self.current.first.items():
                self._first.setdefault(step, []).append(seconds)
        return WatchedRun(self._runs.next(until="forever"))

    def take_over(self) -> str:
        """Where the time of a kill goes: medians of all runs."""
        steps = ("ready", "started", "planned", "written", "staged", "committed", "done")
        seconds = {step: self._first[step] for step in steps if step in self._first}
        return ", ".join(f"{step} {statistics.median(s):.1f} s" for step, s in seconds.items())

    def _again(self) -> None:
        """As a supervisor would."""
        self.died += 1
        self.current.pipeline.wait()
        say(f"  a run ended by itself: {self.current.last}")
        self.current = self._next()

    def kill(self, who: str, point: str) -> str:
        """One kill, however many runs end by themselves before it comes to that; where it was."""
        do = self._driver if who == "driver" else self._worker if who == "worker" else self._server
        for _ in range(5):
            try:
                at = f"{who}:{do(who, point)}"
                break
            except Died:
                self._again()
        else:
            raise Stuck(f"five runs ended by themselves before {who}:{point}")
        self.by_point[at] += 1
        for _ in range(5 if who != "driver" else 0):
            if self.current.wait("done", self.current.seen["done"]):
                break  # it went on without a person
            self._again()
        return at

    def _await(self, step: str) -> None:
        if not self.current.wait(step, self.current.seen[step]):
            raise Died

    def _driver(self, _: str, point: str) -> str:
        if point in (*STEPS, *BETWEEN):
            self.current.pipeline.hold(f"{point},done:{COMMITS}" if point in BETWEEN else point)
            if not self.current.wait("held", 0):
                raise Died
            point = self.current.held
        else:
            if point == "any":
                self._await("done")
            elif self.current.started:  # the next one, then, whose start is not over
                self.current.pipeline.kill()
                self.current = self._next()
            time.sleep(self._chance.uniform(0, 2.0 if point == "start" else 1.0))
            if self.current.ended:
                raise Died
        self.current.pipeline.kill()
        self.current = self._next()
        return point

    def _worker(self, _: str, point: str) -> str:
        """A worker that has worked since the batch was planned, before the batch was written."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            self._await("planned")
            written = self.current.seen["written"]
            before = {pid: _ticks(pid) for pid in self._workers()}
            while before and self.current.seen["written"] == written and not self.current.ended:
                if busy := [pid for pid, ticks in before.items() if _ticks(pid) > ticks]:
                    with suppress(ProcessLookupError):
                        os.kill(self._chance.choice(busy), signal.SIGKILL)
                        if self.current.seen["written"] == written:
                            return point
                time.sleep(0.002)
        raise Stuck("no worker was ever seen at work")

    def _workers(self) -> list[int]:
        """Spark's workers for tasks, of this run: forks of their daemon."""
        pids = []
        for process in psutil.Process(self.current.pipeline.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                above, command = process.parent(), process.cmdline()
                if above and "pyspark.worker" in command and above.cmdline() == command:
                    pids.append(process.pid)
        return pids

    def _server(self, who: str, point: str) -> str:
        self._await(point)
        server = self._broker if who == "broker" else self._catalog
        server.kill()
        time.sleep(self._chance.uniform(0, 2.0))
        server.start()
        return point


def _ticks(pid: int) -> int:
    """Of CPU, that a process has had; none where it is gone."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return sum(map(int, fields.split()[11:13]))
    except OSError:
        return -1


# ── the run ──────────────────────────────────────────────────────────────────────────────────────


def written_config(folder: Path, bootstrap: str, catalog: RestCatalog) -> Path:
    (folder / "change.avsc").write_text(SCHEMA)
    document = {
        "sink": {
            "id": "chaos",
            "topics": [APPEND, UPSERT],
            "index_table": "db.chaos_index",
            "trigger": "50ms",
            "commit_interval": "0s",
            "max_records_per_trigger": BATCH,
            "unavailable_timeout": "120s",
        },
        "kafka": {"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": "500"},
        "decode": {"schema": "change.avsc", "key_format": "text"},
        "catalog": catalog.properties(),
        "table": [
            {"name": f"db.{APPEND}"},
            {
                "name": f"db.{UPSERT}",
                "mode": "upsert",
                "key": ["id"],
                "compact_after_commits": 5,
                "snapshot_retention": "10s",
            },
        ],
        "route": [{"topics": [name], "to": [f"db.{name}"]} for name in (APPEND, UPSERT)],
    }
    path = folder / "chaos.toml"
    path.write_text(toml(document))
    return path


def ends(bootstrap: str) -> dict[str, list[int]]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "ends", "log_level": 2})
    try:
        return {
            name: [
                consumer.get_watermark_offsets(TopicPartition(name, p), WITHIN)[1]
                for p in range(PARTITIONS)
            ]
            for name in (APPEND, UPSERT)
        }
    finally:
        consumer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rows", type=int, help="in all, at least; by default 100,000 a kill")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", default="", help="only kills of these: driver,worker,…")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="frazil-chaos-") as folder:
        return run(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> int:
    began = time.monotonic()
    rows = given.rows or 100_000 * given.kills
    say(f"seed {given.seed}: {given.kills} kills, {rows:,} rows")
    with Broker(folder / "kafka", say=say) as broker, RestCatalog(folder / "lake", say) as catalog:
        for name in (APPEND, UPSERT):
            create_topic(broker.bootstrap, name, PARTITIONS)
        config = written_config(folder, broker.bootstrap, catalog)
        log, scratch = folder / "log", folder / "scratch"
        generator = Generator(
            broker.bootstrap, given.seed, rate=max(20_000, rows // given.kills // 4)
        )
        topics = {name: Topic(broker.bootstrap, name) for name in (APPEND, UPSERT)}
        verifier = Verifier(topics, folder / "lake" / "catalog.db")
        with SinkRuns(config, log=log, scratch=scratch) as runs:
            generator.goal = rows // given.kills
            generator.start()
            verifier.start()
            chaos = Chaos(broker, catalog, runs, given.seed)
            try:
                _kill(chaos, generator, verifier, given, rows)
                last = _finish(chaos, generator, verifier, broker)
            except Stuck as error:
                say(f"STUCK: {error}; the end of the log:\n{log.read_text()[-3000:]}")
                raise
        verifier.stop()
        if verifier.failure is not None:
            raise verifier.failure
        proof = of_sink(load(config), opener(load(config), False, say))
    say(f"a run, from its turn to its first: {chaos.take_over()}")
    findings = verifier.findings
    good = not (findings.lost or findings.doubled or findings.wrong) and proof.verdict == "proven"
    seconds = time.monotonic() - began
    print(
        json.dumps(
            {
                "kills": sum(chaos.by_point.values()),
                "rows": sum(map(sum, last.values())),
                "lost": findings.lost,
                "doubled": findings.doubled,
                "wrong": findings.wrong,
                "seconds": round(seconds, 1),
                "by_point": dict(sorted(chaos.by_point.items())),
                "seed": given.seed,
                "audit": proof.verdict,
                "runs": chaos.runs,
                "died": chaos.died,
                "append_snapshots": findings.append_snapshots,
                "upsert_snapshots": findings.upsert_snapshots,
                "verifier_cpu_seconds": round(verifier.seconds, 1),
            }
        )
    )
    return 0 if good else 1


def _kill(
    chaos: Chaos, generator: Generator, verifier: Verifier, given: argparse.Namespace, rows: int
) -> None:
    only = given.only.split(",") if given.only else ("driver", "worker", "broker", "catalog")
    wanted = (kind for kind in chaos.deck() if kind[0] in only)
    for number, (who, point) in zip(range(1, given.kills + 1), wanted, strict=False):
        at = time.monotonic()
        where = chaos.kill(who, point)
        generator.goal = rows * min(number + 1, given.kills) // given.kills
        if verifier.failure is not None:
            raise verifier.failure
        done = {name: sum(cut) for name, cut in verifier.cuts.items()}
        say(
            f"kill {number} of {given.kills}: {where}, {time.monotonic() - at:.1f} s; "
            f"{generator.sent:,} sent, verified {done[APPEND]:,} and {done[UPSERT]:,}"
        )


def _finish(
    chaos: Chaos, generator: Generator, verifier: Verifier, broker: Broker
) -> dict[str, list[int]]:
    """No more kills, no more records: the tables must come to the end of the topics."""
    generator.stop()
    last = ends(broker.bootstrap)
    deadline = time.monotonic() + 2 * WITHIN
    while not verifier.caught_up(last):
        if chaos.current.ended:
            chaos._again()
        if verifier.failure is not None:
            raise verifier.failure
        if time.monotonic() > deadline:
            raise Stuck(f"the tables stand at {verifier.cuts}, the topics end at {last}")
        time.sleep(0.2)
    return last


if __name__ == "__main__":
    sys.exit(main())
