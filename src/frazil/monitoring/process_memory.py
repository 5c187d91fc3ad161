"""Memory of a sink's processes on this machine: driver, JVM, Spark's Python processes.

In: /proc. Out: resident bytes and a number of processes by kind; nothing where there is no /proc.
Pages that forked workers share count in each. Runs on the driver.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory(proc: Path = Path("/proc"), driver: int = 0) -> dict[str, tuple[int, int]]:
    """Kind → resident bytes and number of processes. A JVM is a child of the driver named java;
    workers are all other descendants."""
    driver = driver or os.getpid()
    parents: dict[int, tuple[int, str]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            # pid (name) state ppid …; a name may hold spaces and parentheses
            head, _, rest = stat.read_text(errors="replace").rpartition(")")
            parents[int(stat.parent.name)] = int(rest.split()[1]), head.partition("(")[2]
    kinds: dict[int, str] = {driver: "driver"}
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in parents.items():
        children.setdefault(parent, []).append(pid)
    waiting = [driver]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in kinds:
                kinds[pid] = "jvm" if parents[pid][1] == "java" else "workers"
                waiting.append(pid)
    sums: dict[str, tuple[int, int]] = {}
    for pid, kind in kinds.items():
        with suppress(OSError, ValueError, IndexError):
            pages = int((proc / str(pid) / "statm").read_text().split()[1])
            known, count = sums.get(kind, (0, 0))
            sums[kind] = known + pages * _PAGE, count + 1
    return sums
