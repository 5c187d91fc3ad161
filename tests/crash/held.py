"""A test module's `main` in a process of its own, held at a step and killed there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from frazil.surface.broker import die_with_parent


def killed_at(step: str, module: str, *arguments: str, log: Path) -> None:
    """`main` of the module gets the arguments and the step, at which it must come to `hold`."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, step], stdout=subprocess.PIPE,
            stderr=errors, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    assert process.stdout is not None
    said = []
    try:
        with process.stdout:
            for line in process.stdout:
                if line.startswith(b"step "):
                    said.append(line.split()[1].decode())
                if said[-1:] == ["held"]:
                    break
        assert said, log.read_text()[-2000:]
        assert said[-1] == "held", f"it ended before {step}: {said}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hold(step: str, wanted: str) -> None:
    """Say which step it is; at the one that is wanted, wait for the kill."""
    print("step", step, flush=True)
    if step == wanted:
        print("step held", flush=True)
        threading.Event().wait()
