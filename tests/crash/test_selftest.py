"""`frazil selftest` on real servers: a verdict that can fail, and nothing left behind."""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from rich.console import Console

from frazil.config.model import Config
from frazil.steps import STEPS
from frazil.testing.kafka import Broker
from frazil.testing.process import ChildProcess
from frazil.testing.scratch import plan
from frazil.testing.selftest import SelfTestReport, selftest
from tests.oracle import Lake
from tests.system.streams import WITHIN

ROWS = 600


@pytest.fixture
def given(lake: Lake, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a sink whose own topic, table and index nobody has made yet."""
    # Temporary files of its own: another self-test may run beside this one.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lake.config("mine", "mine", broker.bootstrap)


def run(
    given: Config, spark: Any, *, steps: tuple[str, ...], mode: str = "", **how: Any
) -> SelfTestReport:
    wanted = plan(given, rows=ROWS, steps=steps, modes=[mode] if mode else ())
    return selftest(given, wanted, spark, Console(file=io.StringIO()), **how)


def left(broker: Broker, lake: Lake) -> list[str]:
    """All that has a self-test's name, wherever it may be."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    leftovers = [f"topic {name}" for name in admin.list_topics(timeout=10).topics]
    groups = admin.list_consumer_groups().result().valid
    leftovers += [f"group {group.group_id}" for group in groups]
    with sqlite3.connect(lake.folder / "catalog.db") as catalog:
        for table, column in (
            ("iceberg_tables", "table_namespace || '.' || table_name"),
            ("iceberg_namespace_properties", "namespace"),
        ):
            rows = catalog.execute(f"SELECT {column} FROM {table}").fetchall()
            leftovers += [f"{table} {name}" for (name,) in rows]
    folders = (lake.folder / "warehouse", Path(tempfile.gettempdir()))
    leftovers += [f"file {path}" for folder in folders for path in folder.glob("frazil_selftest*")]
    return [leftover for leftover in leftovers if "frazil_selftest" in leftover]


@pytest.mark.long
@pytest.mark.parametrize(
    "steps", [("committed",), pytest.param(STEPS, marks=pytest.mark.long)], ids=["one", "every"]
)
def test_kills_on_ones_own_servers_are_survived_and_nothing_is_left_behind(
    broker: Broker, lake: Lake, spark: Any, given: Config, steps: tuple[str, ...]
):
    outcome = run(given, spark, steps=steps)
    assert outcome.verdict == "proven", outcome
    assert [(part.mode, part.kills) for part in outcome.parts] == [
        ("append", len(steps)),
        ("upsert", len(steps)),
    ]
    assert all(part.records >= ROWS for part in outcome.parts)
    assert (outcome.exit_code, outcome.not_removed) == (0, [])
    assert left(broker, lake) == []


def test_a_sink_that_forgets_a_file_is_found_out_with_the_exact_ranges(
    broker: Broker, lake: Lake, spark: Any, given: Config
):
    outcome = run(given, spark, steps=("done",), mode="append", module="tests.crash.lost_file")
    [part] = outcome.parts
    assert part.verdict == "lost"
    assert part.found_after == "the kill at done"
    [lost] = part.lost
    assert 0 < len(lost) <= ROWS // 3
    assert (part.doubled, part.wrong) == ([], [])
    assert part.audit != "proven"
    assert outcome.exit_code == 3
    assert left(broker, lake) == []


@pytest.mark.long
def test_one_that_is_interrupted_leaves_nothing_behind(
    broker: Broker, lake: Lake, spark: Any, given: Config, monkeypatch: pytest.MonkeyPatch
):
    """By Ctrl-C, while a run of the sink is about to start."""
    processes = []

    def interrupted(process: ChildProcess, *_: Any) -> bool:
        processes.append(process)
        kinds = {leftover.split()[0] for leftover in left(broker, lake)}
        assert kinds >= {"topic", "iceberg_namespace_properties", "file"}
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(WITHIN)
        return True

    monkeypatch.setattr(ChildProcess, "killed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(given, spark, steps=("staged",), mode="upsert")
    assert left(broker, lake) == []
    [process] = processes
    assert process.process.returncode == -signal.SIGKILL
