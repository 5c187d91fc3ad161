"""A real `frazil run` on a real broker and catalog: how it is, seen from outside in every phase."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker, die_with_parent, free_ports
from frazil.testing.process import toml
from tests.oracle import Lake
from tests.system.streams import WITHIN, eventually, produce

SECRET, VALUE = "hunter22-canary", "record-value-canary"
_HOOK = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write(sys.stdin.read())
assert os.environ["FRAZIL_EVENT"]
"""


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    """One that can be stopped."""
    with Broker(tmp_path / "broker") as running:
        yield running


class Outside:
    """All that can be seen of a run from outside its process."""

    def __init__(self, config: Path, folder: Path, port: int) -> None:
        self._config, self._folder, self._port = config, folder, port

    def status(self) -> dict[str, Any]:
        done = self.frazil("status", str(self._config), "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def frazil(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "frazil.cli.commands", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)

    def probe(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and answer; 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as page:
                return page.status, json.loads(page.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:
            return 0, {}

    @property
    def sink(self) -> dict[str, Any]:
        """The only sink, as `/readyz` shows it."""
        return next(iter(self.probe("/readyz")[1].get("sinks", [])), {})

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        text = path.read_text() if path.exists() else ""
        assert SECRET not in text
        assert VALUE not in text
        return [json.loads(line) for line in text.splitlines()]

    def told(self, event: str) -> bool:
        return event in [line["event"] for line in self.lines("events")]


def test_a_run_shows_how_it_is_from_its_start_to_its_failure(
    own_broker: Broker, lake: Lake, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_HEALTH_SECRET", SECRET)
    create_topic(own_broker.bootstrap, name, 1)
    (tmp_path / "hook.py").write_text(_HOOK)
    (port,) = free_ports(1)
    config = tmp_path / "sink.toml"
    document = lake.document(
        name,
        name,
        own_broker.bootstrap,
        decode={"format": "json"},
        kafka={"ssl.key.password": "env:TEST_HEALTH_SECRET"},
        metrics={"address": f"127.0.0.1:{port}"},
        health={"file": str(tmp_path / "health.json"), "heartbeat_interval": "1s"},
        log={"format": "json", "level": "DEBUG", "file": str(tmp_path / "log")},
        notify={"command": [sys.executable, str(tmp_path / "hook.py"), str(tmp_path / "events")]},
    )
    config.write_text(toml(document))
    outside = Outside(config, tmp_path, port)
    file = str(tmp_path / "health.json")
    assert outside.frazil("health", file).returncode == 3, "there is no file yet"
    with open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "frazil.cli.commands", "run", str(config)],
            stdout=errors,
            stderr=errors,
            preexec_fn=die_with_parent,
        )
    try:
        # it starts, and is ready once it has claimed
        eventually(lambda: outside.probe("/healthz")[0] == 200, "it is alive")
        if outside.sink.get("state") == "starting":
            assert outside.probe("/readyz")[0] == 503
        eventually(lambda: outside.probe("/readyz")[0] == 200, "it is ready")
        produce(own_broker.bootstrap, name, [json.dumps({"id": n}).encode() for n in range(100)])
        eventually(lambda: outside.sink["rows"] == 100, "rows are committed")
        eventually(lambda: outside.sink["state"] == "ok", "it has caught up")
        assert outside.frazil("health", file, "--ready").returncode == 0
        shown = outside.status()
        assert (shown["state"], shown["run"]["state"]) == ("ok", "running"), shown
        assert (shown["run"]["pid"], shown["written"], shown["lag"]) == (process.pid, 100, 0)
        assert set(shown["stages"].values()) == {0}
        assert shown["freshness"] < WITHIN

        # the broker goes away, and comes back
        own_broker.stop()
        eventually(lambda: outside.sink["state"] == "waiting", "the wait is seen")
        assert outside.probe("/healthz")[0] == outside.probe("/readyz")[0] == 200, "a short wait"
        eventually(lambda: outside.status()["state"] == "waiting", "and by its heartbeat")
        shown = outside.status()
        assert shown["verdict"].startswith("waiting: Kafka: cannot "), shown["verdict"]
        assert (shown["lag"], shown["stages"]["kafka"]) == (None, None)
        assert shown["kafka"]
        eventually(lambda: outside.told("waiting"), "somebody is told")
        own_broker.start()
        eventually(lambda: outside.sink["state"] == "ok", "it has recovered")
        eventually(lambda: outside.told("recovered"), "somebody is told")
        produce(own_broker.bootstrap, name, [b'{"id": 100}'])
        eventually(lambda: outside.sink["rows"] == 101, "it goes on")

        # a record that no person allowed stops it: an operator must act
        produce(own_broker.bootstrap, name, [f"{VALUE} is no JSON".encode()])
        assert process.wait(WITHIN) == 5, (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.wait()
    errors_text = (tmp_path / "errors").read_text()
    assert f"frazil: cannot decode {name}[0] offset 101 (Undecodable; values are not" in errors_text
    assert VALUE not in errors_text
    done = outside.frazil("health", file)
    assert (done.returncode, VALUE in done.stdout) == (3, False), done.stdout
    shown = outside.status()
    reason = f"failed: cannot decode {name}[0] offset 101 (Undecodable; values are not logged)"
    assert (shown["verdict"], shown["run"]["state"]) == (reason, "ended")
    assert (shown["operator"], shown["error"]["class"], shown["lag"]) == (True, "Undecodable", 1)
    assert "nothing was lost" in shown["remedy"]
    assert VALUE not in json.dumps(shown)

    events = [line["event"] for line in outside.lines("events")]
    assert events == ["started", "waiting", "recovered", "failed"]
    log = outside.lines("log")
    assert {line["level"] for line in log} >= {"DEBUG", "INFO", "WARNING", "ERROR"}
    commits = [line for line in log if line.get("event") == "commit"]
    assert sum(line["rows"] for line in commits) == 101
    assert all(line["commit_id"] and line["sink"] == name for line in commits)
    assert (log[-1]["event"], log[-1]["exit_code"]) == ("failed", 5)
