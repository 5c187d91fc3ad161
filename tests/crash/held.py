"""A test module's `main` in a process of its own, held at a step and killed there."""

from __future__ import annotations

import sys
from pathlib import Path

from frazil.surface.child import Child, Hold


def killed_at(step: str, module: str, *arguments: str, log: Path) -> None:
    """`main` of the module gets the arguments and the step, at which it must come to `hold`."""
    assert Child(module, *arguments, step, log=log).killed(), f"it ended before {step}"


def hold(step: str, wanted: str) -> None:
    """Say which step it is; at the one that is wanted, wait for the kill."""
    Hold(wanted, sys.stdout)(step)
