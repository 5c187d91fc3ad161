"""SIGINT and SIGTERM on the command line, from the first moment to the last.

Python's own handler, and PySpark's, raise `KeyboardInterrupt` wherever the main thread happens to
be: inside Py4J that prints a traceback per thread, and while Spark starts it leaves the JVM behind.
Here a signal ends the process at once, together with the processes it started; or, while a stream
runs, it only sets a flag, so that the batch under way is finished and committed. The second signal
always ends the process. Nothing is lost by that: the next run recovers as after a SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

#: How long the JVM may take to remove its temporary files before it is killed.
_PATIENCE = 5.0


class StopSignal:
    """The reaction to a signal, and whether one came."""

    def __init__(self, before_exit: Callable[[], object] = lambda: None) -> None:
        #: number of the signal that requested a stop; 0: none
        self.signal = 0
        self._mode = "exit"
        self._before_exit = before_exit

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._received)

    @property
    def exit_code(self) -> int:
        """The exit code of a command that a signal ended early, as shells have it: 130 or 143."""
        return 128 + (self.signal or signal.SIGINT)

    @contextmanager
    def flagged(self) -> Iterator[None]:
        """Within it, the first signal only sets the flag."""
        yield from self._during("flag")

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within it, the first signal raises KeyboardInterrupt: for commands that clean up."""
        yield from self._during("raise")

    def _during(self, mode: str) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = "exit"

    def _received(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = bool(self.signal), number
        if again or self._mode == "exit":
            self.now("forced" if again else "")
        if self._mode == "raise":
            raise KeyboardInterrupt

    def now(self, how: str = "") -> None:
        """End this process and its children."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with suppress(Exception):
            self._before_exit()
        name = signal.Signals(self.signal or signal.SIGINT).name
        with suppress(OSError, ValueError):  # the reader may be gone
            print(f"frazil: stopped by {name}{f' ({how})' if how else ''}", file=sys.stderr)
            sys.stderr.flush()
        end_children()
        os._exit(130 if how else self.exit_code)


def end_children() -> None:
    """End all children of this process, such as the JVM: SIGTERM first, then SIGKILL."""
    pids = children(os.getpid())
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            pids = [pid for pid in pids if _runs(pid)]
            if not pids:
                return
            time.sleep(0.02)


def _runs(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:  # another caller waited for it
        return False


def children(parent: int) -> list[int]:
    if Path("/proc/self/stat").exists():
        stats = [folder / "stat" for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        pids = []
        for stat in stats:
            with suppress(OSError):  # it ended meanwhile
                # pid (name) state ppid …; a name may hold spaces and parentheses
                fields = stat.read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    pids.append(int(stat.parent.name))
        return pids
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = (line.split() for line in listing.stdout.splitlines())
    return [int(pid) for pid, ppid in pairs if int(ppid) == parent]
