"""The guide to a first sink, command by command: real broker, REST catalog and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.bench import rest
from tests.system.streams import eventually, produce

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "first-sink.md").read_text()
FRAZIL = [sys.executable, "-m", "frazil"]


def clicks(count: int) -> list[bytes]:
    return [
        json.dumps(
            {
                "id": i,
                "user": {"name": f"u{i % 50}", "plan": "pro" if i % 3 else "free"},
                "at": f"2026-11-19T10:{i // 60 % 60:02}:{i % 60:02}Z",
                "tags": ["a", "b"][: i % 3],
                "ref": None if i % 4 else "ad",
            }
        ).encode()
        for i in range(count)
    ]


def test_the_guide_leads_to_a_sink_whose_rows_are_proven(broker: Broker, name: str, tmp_path: Path):
    create_topic(broker.bootstrap, name, 3)
    produce(broker.bootstrap, name, clicks(500), 3)
    with rest.RestCatalog(tmp_path / "catalog") as catalog:

        def own(text: str) -> str:
            text = text.replace("localhost:9092", broker.bootstrap)
            return text.replace("http://localhost:8181", catalog.uri).replace("clicks", name)

        lines = re.findall(r"^\$ frazil (.*)$", GUIDE, re.M)
        assert [line.split()[0] for line in lines] == [
            "init",
            "check",
            "plan",
            "run",
            "status",
            "audit",
        ]
        commands = {line.split()[0]: own(line).split() for line in lines}

        def says(command: str) -> str:
            ran = subprocess.run(
                [*FRAZIL, *commands[command]], cwd=tmp_path, capture_output=True, text=True
            )
            assert ran.returncode == 0, (ran.stdout, ran.stderr)
            return ran.stdout

        assert f"{name}.toml written" in says("init")
        config = (tmp_path / f"{name}.toml").read_text()
        assert '\ncolumns = {"at" = "timestamptz"}\n' in config
        assert '\npartition_by = ["day(at)"]\n' in config
        assert " 0 errors, 0 warnings" in says("check")
        assert f"+ streams.{name}  (records)" in says("plan")
        log = tmp_path / "run.log"
        with log.open("wb") as file:
            run = subprocess.Popen(
                [*FRAZIL, *commands["run"]], cwd=tmp_path, stderr=file, start_new_session=True
            )
        try:
            eventually(lambda: "batch 0 committed: 500 rows" in log.read_text(), log.read_text())
            ok = f"sink {name}: ok\nrunning: epoch 1"  # once the index has the batch too
            eventually(lambda: ok in says("status"), "status is ok")
            os.killpg(run.pid, signal.SIGINT)  # Ctrl-C
            assert run.wait(60) == 0, log.read_text()
        finally:
            run.kill()
        assert f"streams.{name}, sink {name}: proven: 500 rows" in says("audit")
        [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
        reader = subprocess.run([sys.executable, "-c", own(code)], capture_output=True, text=True)
        assert reader.returncode == 0, reader.stderr
        assert "2026-11-19 10:0" in reader.stdout
