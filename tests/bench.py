"""What `bench/` has, for tests that run a share of it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import faults
import growth
import proxy
import quick
import report
import rest
import soak

__all__ = ["faults", "growth", "proxy", "quick", "report", "rest", "soak"]
