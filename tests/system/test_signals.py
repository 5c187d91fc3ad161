"""A stop at any moment: two lines, the exit code, no traceback, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.cli import commands
from frazil.cli.run import RunCommand
from frazil.cli.signals import StopSignal, children
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact
from tests.system.streams import WITHIN, eventually, numbered, produce

INT, TERM = signal.SIGINT, signal.SIGTERM
#: Sends a real signal to itself at the moment that a module is imported.
_AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rich.console":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from frazil.cli.commands import main
main()
"""


def started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it said; none of its children runs on."""
    out, errors = process.communicate(timeout=WITHIN)
    for noise in ("Traceback", "Error", "Exception", " at org.", "Caused by"):
        assert noise not in out + errors, errors
    return errors


def test_ctrl_c_while_the_command_is_imported_is_silent():
    process = started("-c", _AT_IMPORT, "run", "none.toml")
    assert ended(process) == ""
    assert process.returncode == 130


@pytest.mark.parametrize(("number", "code", "later"), [(TERM, 143, 0.0), (INT, 130, 2.5)])
def test_a_stop_while_spark_starts_takes_the_jvm_with_it(
    write_toml: Callable[..., Path], number: signal.Signals, code: int, later: float
):
    path = write_toml(kafka={"bootstrap.servers": "127.0.0.1:1"})
    process = started("-m", "frazil.cli.commands", "run", str(path))
    jvm = eventually(lambda: children(process.pid), "the JVM is there")
    time.sleep(later)  # the moments within Spark's start are not named; both lie before its end
    process.send_signal(number)
    errors = ended(process)
    assert process.returncode == code, errors
    assert f"frazil: stopped by {number.name}\n" in errors
    assert not [pid for pid in jvm if Path(f"/proc/{pid}").exists()]


def test_a_running_sink_stops_in_two_lines(
    broker: Broker, lake: Lake, name: str, write_toml: Callable[..., Path]
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(50))
    process = started("-m", "frazil.cli.commands", "run", str(write_toml()))
    jvm = eventually(lambda: children(process.pid), "the JVM is there")
    assert process.stderr is not None
    for line in process.stderr:
        if "committed: 50 rows" in line:
            break
    process.send_signal(TERM)
    ok = f"{name}: ok"  # its verdict once it has caught up, before or after the signal
    lines = [line for line in ended(process).splitlines() if not line.endswith(ok)]
    assert process.returncode == 0
    assert "INFO sink" in lines[0]
    assert lines[0].endswith("stopping: the batch under way is finished and committed"), lines
    assert lines[-1].endswith(f"stopped: 50 rows committed by this run, position {name}[0] 50")
    assert len(lines) == 2, lines
    eventually(lambda: not [pid for pid in jvm if Path(f"/proc/{pid}").exists()], "it ends", 20)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 50


@pytest.mark.parametrize(
    ("step", "number"), [("planned", TERM), ("commit", INT), ("index-committed", TERM)]
)
def test_a_stop_at_a_step_finishes_the_batch(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    step: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(20))
    before = {signum: signal.getsignal(signum) for signum in (INT, TERM)}
    stopped: list[str] = []
    tell = RunCommand._on_step

    def on_step(self: Any, reached: Any) -> None:
        if reached.name == step and not stopped:
            stopped.append(step)
            os.kill(os.getpid(), number)
        tell(self, reached)

    monkeypatch.setattr(RunCommand, "_on_step", on_step)
    monkeypatch.setattr("frazil.spark.session.session", lambda *_, **__: spark)
    monkeypatch.setattr("frazil.cli.commands.stop", StopSignal())
    monkeypatch.setattr(sys, "argv", ["frazil", "run", str(write_toml())])
    try:
        with pytest.raises(SystemExit) as end:
            commands.main()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    errors = capfd.readouterr().err
    assert end.value.code == 0
    assert "Traceback" not in errors
    assert "stopped: 20 rows committed by this run" in errors, errors
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 20
