"""Hops of a walk through the source: the functions that a reader enters from another module of
Frazil, each once. Properties and values (offsets, counts, errors, units) are no hops. A return is a
hop up: into a module that waits for the caller.

    python -m bench.hops [-v] [append | upsert | audit | compaction]

A walk begins with the first call of a function in a unit test, whose stand-ins for Spark, Kafka and
the catalog are not walked. `-v` lists the hops.
"""

from __future__ import annotations

import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import frazil

ROOT = f"{Path(frazil.__file__).parent}/"
VALUES = ("offsets", "accounting", "errors", "retry", "steps", "config.", "format_version")
ONE_RECORD = "test_kafka_source.py::test_one_record_is_planned_written_checked_staged_and_submitted"
#: Walk → test in tests/unit, and the function with which it begins.
WALKS = {
    "append": (f"{ONE_RECORD}[append]", "sink:MicroBatches.run"),
    "upsert": (f"{ONE_RECORD}[upsert]", "sink:MicroBatches.run"),
    "audit": (
        "test_audit.py::test_ranges_that_join_and_files_that_hold_them_are_proven",
        "auditing.checks:audit",
    ),
    "compaction": (
        "test_compact.py::test_small_files_become_one_and_no_delete_is_left",
        "iceberg.maintenance_tasks:MaintenanceTask.run_due",
    ),
}


class Hops:
    """A profile function. `entered`: function entered → function that it was entered from."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._first: Any = None
        self.entered: dict[str, str] = {}
        self.returns: set[str] = set()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame is self._first:
            self._start, self._first = "", None
        name = _name(frame) if event == "call" else ""
        if name and name == self._start and self._first is None:
            self._first = frame
        elif name and self._first is not None:
            caller = frame.f_back
            while caller is not None and not _name(caller):
                caller = caller.f_back
            before = _name(caller) if caller else ""
            if _module(before) != _module(name) and _is_hop(name):
                self.entered.setdefault(name, before)
                while caller is not None and caller is not self._first:
                    caller = caller.f_back
                    if caller is not None and _module(_name(caller)) == _module(name):
                        self.returns.add(name)


def _name(frame: Any) -> str:
    """`module:qualified name`; empty where it is not of Frazil."""
    code = frame.f_code
    if not code.co_filename.startswith(ROOT):
        return ""
    module = code.co_filename.removeprefix(ROOT).removesuffix(".py").replace("/", ".")
    return f"{module}:{code.co_qualname}"


def _module(name: str) -> str:
    return name.partition(":")[0]


def _is_hop(name: str) -> bool:
    module, _, path = name.partition(":")
    value: Any = sys.modules[f"frazil.{module}"]
    for part in path.split("."):
        value = getattr(value, part, None)
    accessor = isinstance(value, (property, cached_property)) or path.endswith("__bool__")
    return not accessor and not name.startswith(VALUES) and name[-1] != ">"


def walk(name: str, verbose: bool) -> None:
    test, start = WALKS[name]
    hops = Hops(start)
    threading.setprofile(hops)
    sys.setprofile(hops)
    code = pytest.main(["-qq", "-p", "no:cacheprovider", "--durations=0", f"tests/unit/{test}"])
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    assert code == 0, test
    for entered, before in hops.entered.items() if verbose else ():
        print(f"{before:60} → {entered}{'  (return)' if entered in hops.returns else ''}")
    modules = {*map(_module, hops.entered)}
    assert modules, start
    up = sum(_module(entered) == "sink" for entered in hops.entered)
    constructors = sum(entered.endswith("__init__") for entered in hops.entered)
    print(
        f"{name}: {len(hops.entered)} hops into {len(modules)} modules, {constructors} of them "
        f"constructors, {len(hops.returns)} returns, {up} up into sink"
    )


if __name__ == "__main__":
    wanted = [argument for argument in sys.argv[1:] if argument != "-v"]
    for name in wanted or WALKS:
        walk(name, "-v" in sys.argv)
