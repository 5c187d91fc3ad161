"""What `bench/` has, for tests that run a share of it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import faults
import proxy
import rest
import soak

__all__ = ["faults", "proxy", "rest", "soak"]
