"""Several sinks in one process: does a backlog make a small sink wait, and what does a sink cost?

share    a small sink, some records a second, beside a sink that reads a backlog: seconds from
         the write to Kafka until the commit, first in first out and with fair pools
sinks    a folder of N sinks: seconds until each runs, and has its first commit; memory

make bench-service                          # both
make bench-service ARGS='--sinks 50 --rows 0'
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from confluent_kafka import Producer

from frazil.config.model import Config, from_document
from frazil.errors import FrazilError
from frazil.run import Run
from frazil.service.definitions import ConfigFiles, FixedConfigs
from frazil.service.service import Service
from frazil.steps import Step
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import toml

PARTITIONS = 16
#: Records of the small sink, in a second.
PACE = 100
WITHIN = 280.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def document(folder: Path, broker: Broker, name: str, **settings: Any) -> dict[str, Any]:
    return {
        "sink": {"id": name, "topics": [name], "index_table": f"db.{name}_index", **settings},
        "kafka": {"bootstrap.servers": broker.bootstrap},
        "decode": {"format": "json"},
        "catalog": {
            "type": "jdbc",
            "uri": f"jdbc:sqlite:{folder}/{name}.db?busy_timeout=10000&journal_mode=WAL",
            "jdbc.schema-version": "V1",
            "warehouse": f"{folder}/lake",
        },
        "table": [{"name": f"db.{name}"}],
    }


def produce(bootstrap: str, topic: str, rows: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "log_level": 3,
            "queue.buffering.max.messages": 500_000,
        }
    )
    for i in range(rows):
        value = b'{"id": %d, "kind": "k%d", "amount": %d.25, "note": "as it was said"}' % (
            i,
            i % 9,
            i,
        )
        while True:
            try:
                producer.produce(topic, value, partition=i % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush()


class Watched:
    """An observer: the moments at which runs and commits were done."""

    def __init__(self, config: Config) -> None:
        self.sink = config.sink.id
        self.run: Run | None = None
        self.started_at = self.first_commit = 0.0
        #: when, and up to which offset of partition 0
        self.commits: list[tuple[float, int]] = []

    def started(self, run: Run) -> None:
        self.run, self.started_at = run, time.time()

    def step(self, step: Step) -> None:
        if step.name == "done":
            self.first_commit = self.first_commit or time.time()
            if self.run is not None:
                self.commits.append((time.time(), sum(self.run.position.values())))

    def tick(self, run: Run) -> None: ...

    def ended(self, error: FrazilError | None) -> None: ...


class Trickle:
    """Writes a record now and then; when each was written."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.at: list[float] = []
        self._stop = threading.Event()
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1})
        self._topic = topic
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Trickle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush()

    def _write(self) -> None:
        while not self._stop.wait(1 / PACE):
            self._producer.produce(self._topic, b'{"id": 1}', partition=0)
            self._producer.poll(0)
            self.at.append(time.time())


def share(folder: Path, broker: Broker, mode: str, name: str, rows: int) -> dict[str, Any]:
    """The small sink runs; then the large one starts, and reads its backlog."""
    lake = folder / name
    lake.mkdir()
    small, large = f"small_{name}", f"large_{name}"
    create_topic(broker.bootstrap, small, 1)
    watched: dict[str, Watched] = {}

    def observer(config: Config) -> list[Watched]:
        watched[config.sink.id] = Watched(config)
        return [watched[config.sink.id]]

    documents = [
        document(lake, broker, small, commit_interval="1s"),
        document(lake, broker, large, topics=["backlog"], commit_interval="1s"),
    ]
    configs = [from_document({**one, "spark": {"spark.scheduler.mode": mode}}) for one in documents]
    service = Service(FixedConfigs(configs[:1]), observers=observer, watch=None)
    service.start()
    with Trickle(broker.bootstrap, small) as trickle:
        _until(lambda: len(watched[small].commits) > 5)  # warm
        began = time.time()
        service._take(FixedConfigs(configs).read())  # the large one begins
        _until(lambda: large in watched and watched[large].commits)
        _until(lambda: watched[large].commits[-1][1] >= rows)
        ended = time.time()
        _until(lambda: watched[small].commits[-1][0] > ended + 1)
    error = [status.error for status in service.sinks.values() if status.error]
    service.stop()
    service.spark.stop()
    if error:
        raise SystemExit(f"a sink failed: {error[0]}")
    ages = freshness(trickle.at, watched[small].commits, began, ended)
    calm = freshness(trickle.at, watched[small].commits, 0, began)
    return {
        "mode": mode,
        "backlog_s": round(ended - watched[large].started_at, 1),
        "calm_p50_s": round(float(np.percentile(calm, 50)), 2),
        **{f"p{p}_s": round(float(np.percentile(ages, p)), 2) for p in (50, 95, 100)},
        "commits": sum(began <= at <= ended for at, _ in watched[small].commits),
    }


def freshness(
    written: list[float], commits: list[tuple[float, int]], begin: float, end: float
) -> list[float]:
    """Of the records written between `begin` and `end`: seconds until their commit."""
    ages, done = [], 0
    for at, position in commits:
        for i in range(done, min(position, len(written))):
            if begin <= written[i] <= end:
                ages.append(at - written[i])
        done = max(done, position)
    return ages


def _until(happened: Any) -> None:
    deadline = time.monotonic() + WITHIN
    while not happened():
        if time.monotonic() > deadline:
            raise SystemExit("the time was up")
        time.sleep(0.05)


def memory(broker: int) -> dict[str, int]:
    """MiB of this driver, of the JVM, and of the Python processes that plan streams or run tasks:
    what each has for itself, and how many there are."""
    now = {
        "driver": 0,
        "jvm": 0,
        "planners": 0,
        "planner_count": 0,
        "workers": 0,
        "worker_count": 0,
    }
    me = psutil.Process()
    now["driver"] = me.memory_info().rss
    for child in me.children(recursive=True):
        try:
            if child.pid == broker:
                continue
            if child.name() == "java":
                now["jvm"] += child.memory_info().rss
                continue
            words = " ".join(child.cmdline())
            who = "planner" if "python_streaming_source_runner" in words else "worker"
            now[f"{who}s"] += child.memory_full_info().uss
            now[f"{who}_count"] += 1
        except psutil.NoSuchProcess:
            continue
    return {k: v if k.endswith("count") else v // 2**20 for k, v in now.items()}


def cpu(broker: int) -> dict[str, float]:
    """CPU-seconds of the driver, of its JVM, and of all Python processes below it."""
    used = {"driver": 0.0, "jvm": 0.0, "python": 0.0}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            if process.pid == broker:
                continue
            who = "driver" if process == me else "jvm" if process.name() == "java" else "python"
            times = process.cpu_times()
            used[who] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return used


def sinks(folder: Path, broker: Broker, count: int) -> dict[str, Any]:
    definitions = folder / "sinks"
    definitions.mkdir()
    for number in range(count):
        name = f"s{number:03d}"
        create_topic(broker.bootstrap, name, 1)
        path = definitions / f"{name}.toml"
        path.write_text(toml(document(folder, broker, name)))
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for i in range(100):
            producer.produce(name, b'{"id": %d}' % i, partition=0)
        producer.flush()
    watched: dict[str, Watched] = {}

    def observer(config: Config) -> list[Watched]:
        watched[config.sink.id] = Watched(config)
        return [watched[config.sink.id]]

    began = time.time()
    service = Service(ConfigFiles([definitions]), observers=observer).start()
    spark = time.time() - began
    _until(lambda: len(watched) == count and all(w.first_commit for w in watched.values()))
    idle = cpu(broker.pid)
    time.sleep(20)
    later = cpu(broker.pid)
    figures = {
        "sinks": count,
        "spark_s": round(spark, 1),
        "first_running_s": round(min(w.started_at for w in watched.values()) - began, 1),
        "all_running_s": round(max(w.started_at for w in watched.values()) - began, 1),
        "all_committed_s": round(max(w.first_commit for w in watched.values()) - began, 1),
        **{f"idle_{who}_cores": round((later[who] - idle[who]) / 20, 2) for who in idle},
        **memory(broker.pid),
    }
    stopping = time.time()
    if not service.stop(WITHIN):
        raise SystemExit("a sink did not stop")
    figures["stop_s"] = round(time.time() - stopping, 1)
    service.spark.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12_000_000, help="of the backlog; 0: no share")
    parser.add_argument("--sinks", type=int, default=50, help="of the folder; 0: none")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as path:
        folder = Path(path)
        with Broker(folder / "broker") as broker:
            if given.rows:
                create_topic(broker.bootstrap, "backlog", PARTITIONS)
                produce(broker.bootstrap, "backlog", given.rows)
                for number, mode in enumerate(("FIFO", "FAIR") * 2):
                    figures = share(folder, broker, mode, f"{mode.lower()}_{number}", given.rows)
                    results.setdefault("share", []).append(figures)
                    say(json.dumps(figures))
            if given.sinks:
                results["sinks"] = sinks(folder, broker, given.sinks)
                say(json.dumps(results["sinks"]))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
