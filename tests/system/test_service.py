"""Several sinks in one process, with real servers: one in trouble, files that come, change and go,
and the proof of each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import frazil
from frazil.cli.signals import children
from frazil.service.definitions import FixedConfigs
from frazil.service.service import Service
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import toml
from tests.oracle import Lake, assert_exact
from tests.system.streams import WITHIN, eventually, numbered, produce


class Process:
    """`frazil run DIR`, and what it says."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "frazil.cli.commands", "run", str(folder), "--json"]
        self._process = subprocess.Popen(
            [*command, "--watch-interval", "200ms"],
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in self._process.stderr)

    def says(self, text: str, times: int = 1) -> None:
        def said_or_ended() -> bool:
            assert self._process.poll() is None, self.lines
            return sum(text in line for line in self.lines) >= times

        eventually(said_or_ended, f"{text!r} in {self.lines}")

    def end(self) -> tuple[int, dict[str, Any]]:
        jvm = children(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        out = self._process.stdout.read()
        code = self._process.wait(WITHIN)
        self._reader.join(WITHIN)
        eventually(lambda: not [p for p in jvm if Path(f"/proc/{p}").exists()], "the JVM ends", 20)
        return code, json.loads(out)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Sinks:
    """The folder of the sinks, each with a topic and a lake of its own under one catalog name."""

    def __init__(self, tmp_path: Path, broker: Broker, prefix: str) -> None:
        self.folder = tmp_path / "sinks"
        self.folder.mkdir()
        self._lakes = tmp_path
        self.broker, self.prefix = broker, prefix

    def topic(self, name: str) -> str:
        return f"{self.prefix}_{name}"

    def make_topic(self, name: str, records: int = 20) -> None:
        create_topic(self.broker.bootstrap, self.topic(name), 1)
        self.produce(name, records)

    def produce(self, name: str, records: int, start: int = 0) -> None:
        produce(self.broker.bootstrap, self.topic(name), numbered(records, start))

    def lake(self, name: str) -> Lake:
        folder = self._lakes / f"lake_{name}"
        folder.mkdir(exist_ok=True)
        return Lake(folder)

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def define(self, name: str, **sections: Any) -> Path:
        bootstrap = self.broker.bootstrap
        document = self.lake(name).document(name, self.topic(name), bootstrap, **sections)
        path = self.file(name)
        written = path.with_suffix(".new")
        written.write_text(toml(document))
        return written.rename(path)


def test_sinks_of_a_folder_share_a_process_and_no_trouble(
    broker: Broker, tmp_path: Path, name: str
):
    sinks = Sinks(tmp_path, broker, name)
    for sink in ("steady", "edited", "removed", "added"):
        sinks.make_topic(sink)
    sinks.make_topic("later")
    create_topic(broker.bootstrap, sinks.topic("broken"), 1)
    produce(broker.bootstrap, sinks.topic("broken"), (b'{"id": %d}' % i for i in range(10)))
    for sink in ("steady", "edited", "removed"):
        sinks.define(sink)
    sinks.define("broken", decode={"format": "json"})
    process = Process(sinks.folder)
    try:
        for sink, rows in (("steady", 20), ("edited", 20), ("removed", 20), ("broken", 10)):
            process.says(f"sink {sink}: batch 0 committed: {rows} rows")

        produce(broker.bootstrap, sinks.topic("broken"), [b"not json"])
        process.says("sink broken: failed; an operator must act: cannot decode")

        sinks.define("added")
        process.says("sink added: batch 0 committed: 20 rows")
        sinks.file("removed").rename(sinks.folder / "renamed.toml")
        process.says("sink removed: defined by renamed.toml now")
        (sinks.folder / "renamed.toml").unlink()
        process.says("sink removed: stopping: renamed.toml no longer defines it")
        sinks.define("edited", sink={"max_pending_batches": 7})
        process.says("sink edited: [sink] max_pending_batches changed: in effect now")
        topics = [sinks.topic("edited"), sinks.topic("later")]
        sinks.define("edited", sink={"topics": topics})
        process.says("sink edited: restarting: [sink] topics changed")
        process.says("sink edited: epoch 2")
        process.says("sink edited: batch 1 committed: 20 rows")

        sinks.file("steady").write_text("[sink")
        process.says("cannot read config")
        warehouse = tmp_path / "elsewhere"
        document = sinks.lake("added").document("added", sinks.topic("added"), broker.bootstrap)
        document["catalog"]["warehouse"] = str(warehouse)
        sinks.file("added").write_text(toml(document))
        process.says("sink added: cannot use the changed added.toml: [catalog] warehouse changed")
        for sink in ("steady", "added"):
            sinks.produce(sink, 5, 20)
            process.says(f"sink {sink}: batch 1 committed: 5 rows")

        sinks.define("steady")
        sinks.define("added")
        sinks.define("broken", decode={"format": "json"}, dead_letters={"table": "db.broken_dead"})
        process.says("sink broken: batch 1 committed: 0 rows, 1 rejected")
        code, report = process.end()
    finally:
        process.kill()
    assert code == 0, process.lines
    assert {s: values["state"] for s, values in report["sinks"].items()} == dict.fromkeys(
        ["added", "broken", "edited", "removed", "steady"], "stopped"
    )
    assert (report["sinks"]["broken"]["rejected"], report["problems"]) == (1, {})
    assert (report["sinks"]["edited"]["restarts"], report["sinks"]["edited"]["epoch"]) == (1, 2)
    assert report["sinks"]["steady"]["epoch"] == 1, "what happened to others is not its business"
    assert not warehouse.exists()
    assert sum("cannot read config" in line for line in process.lines) == 1
    for sink, rows in (("steady", 25), ("added", 25)):
        topic = sinks.topic(sink)
        assert assert_exact(sinks.lake(sink), f"db.{sink}", broker.bootstrap, topic) == rows
    assert sinks.lake("removed").query("db.removed", "count(*)") == [(20,)]
    assert sinks.lake("edited").query("db.edited", "_topic, count(*)", "GROUP BY 1 ORDER BY 1") == [
        (topic, 20) for topic in topics
    ]
    for sink in ("steady", "added", "edited", "broken"):
        frazil.audit(sinks.file(sink), spark=False).raise_unless_proven()


class Pools:
    """An observer: the pool of the thread that runs the batches."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self.pools: set[str] = set()

    def started(self, run: frazil.Run) -> None: ...

    def step(self, step: frazil.Step) -> None:
        if step.name == "written":
            self.pools.add(self._spark.sparkContext.getLocalProperty("spark.scheduler.pool"))

    def tick(self, run: frazil.Run) -> None: ...

    def ended(self, error: frazil.errors.FrazilError | None) -> None: ...


def test_sinks_of_configs_catch_up_in_a_session_of_the_users(
    broker: Broker, lake: Lake, spark: Any, name: str, tmp_path: Path
):
    """Two catalogs of one name, each in a session and a pool of its own, and nothing of it in the
    user's."""
    elsewhere = Lake(tmp_path)
    configs = []
    for number, own in enumerate((lake, elsewhere)):
        sink = f"{name}_{number}"
        create_topic(broker.bootstrap, sink, 1)
        produce(broker.bootstrap, sink, numbered(10 + number))
        configs.append(own.config(sink, sink, broker.bootstrap))
    states: list[tuple[str, str]] = []
    pools = {config.sink.id: Pools(spark) for config in configs}
    with Service(
        FixedConfigs(configs),
        spark=spark,
        observers=lambda config: [pools[config.sink.id]],
        watch=None,
        until_caught_up=True,
        changed=lambda status: states.append((status.sink, status.state)),
    ).start() as service:
        assert service.wait(WITHIN)
        assert {status.state for status in service.sinks.values()} == {"ended"}
    for number, (config, own) in enumerate(zip(configs, (lake, elsewhere), strict=True)):
        sink = config.sink.id
        assert assert_exact(own, f"db.{sink}", broker.bootstrap, sink) == 10 + number
        assert [state for of, state in states if of == sink] == ["starting", "running", "ended"]
        frazil.audit(config, spark=False).raise_unless_proven()
    assert {sink: seen.pools for sink, seen in pools.items()} == {
        sink: {f"frazil-{sink}"} for sink in pools
    }
    assert spark.sparkContext.getLocalProperty("spark.scheduler.pool") is None
    scheduler = spark.sparkContext._jsc.sc()
    shares = []
    for sink in pools:  # the scheduler has a pool once a job ran in it
        pool = scheduler.getPoolForName(f"frazil-{sink}")
        assert pool.isDefined(), sink
        shares.append((pool.get().weight(), pool.get().minShare()))
    assert shares == [(1, 0), (1, 0)]
