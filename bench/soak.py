"""A sink that runs for long, as it comes: do its tables stay readable, and its commits quick?

A real broker gets a steady stream of orders, and one run of a sink with default settings writes
them. Every few seconds this looks at what is on disk (data files, metadata files, snapshots,
manifests), at how long commits take, and at the memory of driver, JVM and workers. At the end the
sink catches up, the audit proves every record, and `judge` says whether anything grows that must
not: exit code 3 where something does.

    make soak                                              # 30 minutes, 20,000 rows/s, defaults
    make soak ARGS='--minutes 60 --commit-interval 1s'     # many small commits
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fastavro
import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from frazil.config.sections import SinkConfig
from frazil.iceberg.maintenance_tasks import MOST, TABLE_MOST
from frazil.ledger.index import OLD_METADATA
from frazil.testing import datagen
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkProcess, toml

TOPIC, TABLE, INDEX = "orders", "db.orders", "db.index"
#: What a snapshot may add beside its share of the metadata file: its list, and its manifest.
SNAPSHOT_BYTES = 64 * 1024
#: What it may take of the metadata file.
ENTRY_BYTES = 4 * 1024
#: Metadata files that are kept: as a table's property says, and some of commits under way.
VERSIONS = int(OLD_METADATA["write.metadata.previous-versions-max"]) + 5
MANIFESTS = 300


@dataclass(frozen=True)
class Folder:
    """A table as it lies on disk."""

    data_files: int = 0
    data_bytes: int = 0
    metadata_files: int = 0
    metadata_bytes: int = 0
    newest_bytes: int = 0
    snapshots: int = 0
    manifests: int = 0


@dataclass(frozen=True)
class Sample:
    seconds: float
    produced: int
    commits: int
    batches: int
    table: Folder
    index: Folder
    #: of the commits since the last sample: from `commit` to `tagged`
    commit_seconds: float | None
    #: MiB
    driver: int = 0
    jvm: int = 0
    workers: int = 0


def look(folder: Path) -> Folder:
    """Files come and go while they are counted: what is gone is not there."""
    sizes: dict[Path, int] = {}
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            if path.is_file() and not path.name.startswith("."):
                sizes[path] = path.stat().st_size
        except FileNotFoundError:
            continue
    data = {path: size for path, size in sizes.items() if "metadata" not in path.parts}
    metadata = [path for path in sizes if path.name.endswith(".metadata.json")]
    if not metadata:
        return Folder()
    newest, current, manifests = max(metadata, key=lambda path: path.name), {}, 0
    for newest in sorted(metadata, key=lambda path: path.name, reverse=True):
        try:
            known = json.loads(newest.read_text())
            current = {snapshot["snapshot-id"]: snapshot for snapshot in known.get("snapshots", ())}
            if known.get("current-snapshot-id") in current:
                listed = current[known["current-snapshot-id"]]["manifest-list"]
                with open(listed.removeprefix("file:"), "rb") as file:
                    manifests = sum(1 for _ in fastavro.reader(file))
            break
        except (FileNotFoundError, ValueError):
            continue  # it is gone, or being written: the one before it
    return Folder(
        data_files=len(data),
        data_bytes=sum(data.values()),
        metadata_files=len(metadata),
        metadata_bytes=sum(sizes.values()) - sum(data.values()),
        newest_bytes=sizes[newest],
        snapshots=len(current),
        manifests=manifests,
    )


@dataclass
class Watch:
    """What the sink tells of its steps."""

    commits: int = 0
    batches: int = 0
    lag: list[float] = field(default_factory=list)
    began: float = 0.0
    error: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, sink_process: SinkProcess) -> None:
        for event in sink_process.events():
            now = time.monotonic()
            with self.lock:
                if event.get("step") == "commit":
                    self.began = now
                elif event.get("step") == "tagged":
                    self.lag.append(now - self.began)
                elif event.get("step") == "done":
                    self.commits += 1
                elif event.get("step") == "staged":
                    self.batches += 1
                elif "error" in event:
                    self.error = str(event["message"])

    def taken(self) -> float | None:
        with self.lock:
            lags, self.lag = self.lag, []
        return statistics.median(lags) if lags else None


class Stream(threading.Thread):
    """Orders at a steady rate, until it is stopped."""

    def __init__(self, bootstrap: str, partitions: int, rate: int) -> None:
        super().__init__(daemon=True)
        self._given = bootstrap, partitions, rate
        self.ending = threading.Event()
        self.sent = 0

    def run(self) -> None:
        bootstrap, partitions, rate = self._given
        made = datagen.OrderGenerator()
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "linger.ms": 20,
                "log_level": 3,
                "queue.buffering.max.messages": 500_000,
                "enable.idempotence": True,  # rows are counted: a retry must not double one
            }
        )
        began = time.monotonic()
        while not self.ending.wait(0.1):
            due = int((time.monotonic() - began) * rate) - self.sent
            now = int(time.time() * 1_000_000)
            for _ in range(due):
                try:
                    producer.produce(TOPIC, made.next(now), partition=self.sent % partitions)
                except BufferError:  # the broker is behind: the rest is due with the next look
                    break
                self.sent += 1
            producer.poll(0)
        producer.flush()


def memory(sink_process: SinkProcess) -> dict[str, int]:
    """Of the driver, its JVM and its workers, in MiB. Workers share the pages of the daemon they
    were forked from."""
    me = psutil.Process(sink_process.process.pid)
    usage = {"driver": me.memory_info().rss, "jvm": 0, "workers": 0}
    for child in me.children(recursive=True):
        try:
            used = child.memory_info()
            jvm = child.name() == "java"
            usage["jvm" if jvm else "workers"] += used.rss - (0 if jvm else used.shared)
        except psutil.NoSuchProcess:
            continue
    return {name: used // 2**20 for name, used in usage.items()}


def judge(samples: Sequence[Sample], partitions: int, judged: bool = True) -> list[str]:
    """What grows that must not. `judged`: the run was long enough to see whether times and memory
    grow."""
    last, trouble = samples[-1], []
    if not last.commits:
        return ["nothing was committed"]
    for name, folder, most in (
        ("the table", last.table, TABLE_MOST),
        ("the index", last.index, MOST),
    ):
        snapshots = int(most * 1.25)
        if folder.snapshots > snapshots:
            trouble.append(f"{name} has {folder.snapshots} snapshots; expected at most {snapshots}")
        if folder.metadata_files > VERSIONS:
            trouble.append(
                f"{name} has {folder.metadata_files} metadata files; expected at most {VERSIONS}"
            )
        if folder.newest_bytes > 64 * 1024 + ENTRY_BYTES * folder.snapshots:
            trouble.append(
                f"{name}'s metadata file has {folder.newest_bytes} bytes for {folder.snapshots} "
                "snapshots"
            )
        bound = VERSIONS * folder.newest_bytes + SNAPSHOT_BYTES * (folder.snapshots + 10)
        if folder.metadata_bytes > bound:
            trouble.append(
                f"{name} has {folder.metadata_bytes} bytes of metadata; expected at most {bound}"
            )
        if folder.manifests > MANIFESTS:
            trouble.append(f"{name} has {folder.manifests} manifests; expected at most {MANIFESTS}")
    most = partitions * (last.batches + 1)
    if last.table.data_files > most:
        trouble.append(
            f"the table has {last.table.data_files} data files of {last.batches} batches; "
            f"expected at most {most}"
        )
    return trouble + (_growing(samples) if judged else [])


def _growing(samples: Sequence[Sample]) -> list[str]:
    """The last third against the middle one: what is warm by then must stay as it is."""
    third = len(samples) // 3
    middle, end = samples[third : 2 * third], samples[2 * third :]
    trouble = []
    before, after = (
        [s.commit_seconds for s in some if s.commit_seconds is not None] for some in (middle, end)
    )
    if before and after and statistics.median(after) > 2 * statistics.median(before) + 0.1:
        trouble.append(
            f"commits take {statistics.median(after):.2f} s; "
            f"before {statistics.median(before):.2f} s"
        )
    for who in ("driver", "jvm", "workers"):
        was, now = (statistics.median(getattr(s, who) for s in some) for some in (middle, end))
        if now > 1.3 * was + 100:
            trouble.append(f"the {who} holds {now:.0f} MiB; before {was:.0f} MiB")
    return trouble


def config(folder: Path, bootstrap: str, given: argparse.Namespace) -> Path:
    """All of it by default, but for the commit interval where that is asked for."""
    asked = {"commit_interval": given.commit_interval} if given.commit_interval else {}
    (folder / "order.avsc").write_text(datagen.SCHEMA)
    document = {
        "sink": {"id": "soak", "topics": [TOPIC], "index_table": INDEX, **asked},
        "kafka": {"bootstrap.servers": bootstrap},
        "decode": {"schema": str(folder / "order.avsc")},
        "catalog": {
            "type": "jdbc",
            "jdbc.schema-version": "V1",
            "warehouse": str(folder / "lake"),
            "uri": f"jdbc:sqlite:{folder}/catalog.db?busy_timeout=10000&journal_mode=WAL",
        },
        "table": [{"name": TABLE, "event_time": "placed_at"}],
    }
    path = folder / "soak.toml"
    path.write_text(toml(document))
    return path


def main() -> int:
    given = parsed()
    with (
        tempfile.TemporaryDirectory(prefix="frazil-soak-") as made,
        Broker(Path(made) / "kafka") as broker,
    ):
        folder = Path(made)
        retained = {"retention.ms": "1200000", "segment.bytes": str(64 * 2**20)}
        topic = NewTopic(TOPIC, given.partitions, 1, config=retained)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([topic])[TOPIC].result()
        path = config(folder, broker.bootstrap, given)
        samples = run(folder, path, broker.bootstrap, given)
        produced = samples[-1].produced
        verdict, written = proven(folder, path)
    trouble = judge(samples, given.partitions, given.minutes >= 10)
    if verdict != "proven" or written != produced:
        trouble.append(f"the audit says {verdict}: {written} rows of {produced}")
    for reason in trouble:
        say(f"grows: {reason}")
    last = samples[-1]
    print(
        json.dumps(
            {
                "minutes": given.minutes,
                "rate": given.rate,
                "rows": produced,
                "audit": verdict,
                "commit_interval": given.commit_interval or SinkConfig("x").commit_interval,
                "metadata_bytes_per_row": round(
                    (last.table.metadata_bytes + last.index.metadata_bytes) / produced, 4
                ),
                "last": asdict(last),
                "samples": [brief(sample) for sample in samples],
                "grows": trouble,
            }
        )
    )
    return 3 if trouble else 0


def run(folder: Path, path: Path, bootstrap: str, given: argparse.Namespace) -> list[Sample]:
    stream, watch = Stream(bootstrap, given.partitions, given.rate), Watch()
    sink_process = SinkProcess(
        path, until="forever", log=folder / "sink.log", scratch=folder / "scratch"
    )
    follower = threading.Thread(target=watch.follow, args=(sink_process,), daemon=True)
    follower.start()
    stream.start()
    samples: list[Sample] = []
    began = time.monotonic()
    try:
        while (
            now := time.monotonic() - began
        ) < given.minutes * 60 and sink_process.process.poll() is None:
            time.sleep(max(0.0, min(given.every, given.minutes * 60 - now)))
            samples.append(sample(folder, sink_process, watch, stream, began))
            say(line(samples[-1]))
        stream.ending.set()
        stream.join(60)
        sink_process.process.send_signal(signal.SIGTERM)
        follower.join(120)
        if watch.error or not samples:
            raise SystemExit(
                f"the sink ended: {watch.error or (folder / 'sink.log').read_text()[-2000:]}"
            )
        samples.append(sample(folder, None, watch, stream, began, samples[-1]))
    finally:
        sink_process.kill()
    return samples


def sample(
    folder: Path,
    sink_process: SinkProcess | None,
    watch: Watch,
    stream: Stream,
    began: float,
    like: Sample | None = None,
) -> Sample:
    lake = folder / "lake" / "db"
    used = (
        memory(sink_process)
        if sink_process
        else {w: getattr(like, w) for w in ("driver", "jvm", "workers")}
    )
    return Sample(
        round(time.monotonic() - began, 1),
        stream.sent,
        watch.commits,
        watch.batches,
        look(lake / "orders"),
        look(lake / "index"),
        watch.taken(),
        **used,
    )


def proven(folder: Path, path: Path) -> tuple[str, int]:
    """A second run reads what is left, and is audited."""
    sink_process = SinkProcess(
        path, audit=True, log=folder / "sink.log", scratch=folder / "scratch"
    )
    try:
        audits = [event["audit"] for event in sink_process.events() if "audit" in event]
    finally:
        sink_process.kill()
    return (audits[-1]["verdict"], audits[-1]["written"]) if audits else ("no audit", 0)


def brief(sample: Sample) -> dict[str, Any]:
    return {
        "seconds": sample.seconds,
        "rows": sample.produced,
        "commits": sample.commits,
        "batches": sample.batches,
        "files": sample.table.data_files,
        "snapshots": sample.table.snapshots,
        "metadata_bytes": sample.table.metadata_bytes,
        "index_bytes": sample.index.metadata_bytes,
        "commit_seconds": sample.commit_seconds and round(sample.commit_seconds, 3),
        "mib": [sample.driver, sample.jvm, sample.workers],
    }


def line(sample: Sample) -> str:
    took = "" if sample.commit_seconds is None else f", commits {sample.commit_seconds:.2f} s"
    return (
        f"{sample.seconds:6.0f} s {sample.produced:>11,} rows {sample.commits:>5} commits | "
        f"{sample.table.data_files:>6} files {sample.table.snapshots:>5} snapshots "
        f"{sample.table.manifests:>4} manifests, "
        f"metadata {sample.table.metadata_bytes / 2**20:6.1f} MiB in "
        f"{sample.table.metadata_files} versions; "
        f"index {sample.index.metadata_bytes / 2**20:.1f} MiB | "
        f"driver {sample.driver} jvm {sample.jvm} workers {sample.workers} MiB{took}"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=int, default=20_000, help="rows a second")
    parser.add_argument("--partitions", type=int, default=4, help="of the topic")
    parser.add_argument("--commit-interval", default="", help="by default the sink's own default")
    parser.add_argument("--every", type=float, default=15, help="seconds between two looks")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
