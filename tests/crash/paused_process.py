"""A test module's `main` in a process of its own, held at a step and killed there."""

from __future__ import annotations

import sys
from pathlib import Path

from frazil.testing.process import ChildProcess, StepHold


def killed_at(step: str, module: str, *arguments: str, log: Path) -> None:
    """`main` of the module gets the arguments and the step, at which it must come to `hold`."""
    assert ChildProcess(module, *arguments, step, log=log).killed(), f"it ended before {step}"


def hold(step: str, wanted: str) -> None:
    """Say which step it is; at the one that is wanted, wait for the kill."""
    StepHold(wanted, sys.stdout)(step)
