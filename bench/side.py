"""One side of a comparison: a child process that does a job on request and answers one JSON line.

The side's memory is the sum over its process tree of what each process adds to the machine (PSS),
sampled while a job runs; its CPU is that of the whole tree, processes that have ended included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil

#: Parts of a side: the process itself, the JVM below it, and Spark's Python processes.
PARTS = ("driver", "jvm", "workers")


class Side:
    def __init__(self, name: str, command: list[str], *, watch_memory: bool = True) -> None:
        """`watch_memory`: looking at it costs the machine a little of its time."""
        self.name = name
        self._watch_memory = watch_memory
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()

    def ask(self, **request: object) -> dict[str, Any]:
        """Do one job: its answer, the CPU seconds that it took, and the peak memory in MiB."""
        if not self._watch_memory:
            return self._timed(request)
        with _Memory(self.process.pid) as memory:
            answer = self._timed(request)
        return answer | {"memory_mib": round(memory.peak / 2**20)}

    def end(self) -> None:
        """Close the side's standard input: it ends by itself, or is killed after a minute."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            for process in tree(self.process.pid):
                process.kill()
            self.process.wait()

    def _timed(self, request: dict[str, object]) -> dict[str, Any]:
        assert self.process.stdin is not None
        before = cpu_seconds(self.process.pid)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        answer["cpu"] = cpu_seconds(self.process.pid) - before
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"the side {self.name} ended")


def answer_requests(job: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's part: one job for each line of standard input, until it is closed."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(job(json.loads(line))), flush=True)


def tree(pid: int) -> list[psutil.Process]:
    try:
        main = psutil.Process(pid)
        return [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Of a process and all below it."""
    return sum(cpu_by_part(pid).values())


def cpu_by_part(pid: int) -> dict[str, float]:
    """CPU seconds of a side's parts; processes that have ended count for their parent."""
    spent = dict.fromkeys(PARTS, 0.0)
    for process in tree(pid):
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        part = "driver" if process.pid == pid else "jvm" if name == "java" else "workers"
        spent[part] += times.user + times.system + times.children_user + times.children_system
    return spent


class _Memory:
    """The largest sum of PSS of a process tree, looked at every half second."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._now())
            if self._ended.wait(0.5):
                return

    def _now(self) -> int:
        total = 0
        for process in tree(self._pid):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total
