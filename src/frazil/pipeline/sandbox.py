"""Processes records in a child process, so that no record can kill the task. Runs on executors.

Input and output are those of `ChunkPipeline.process`. A task runs this way after it died twice. A
record that crashes a native library, hangs a user's function or allocates gigabytes does so in a
child with limited memory and time:

    chunk ──▶ child ──▶ result
                └──▶ dead: parts of the chunk, each to the next child, down to one record

A record that kills a child by itself is rejected as deadly; all others are processed as usual.
Errors with another cause (a registry that does not answer, a function that raises) fail the task,
as they do without a sandbox.

The child is a fresh interpreter: a fork would inherit the locks of polars without its threads. It
runs until a record kills it or its `Sandbox` is garbage-collected. A new child takes a second to
start, so a chunk is not halved but cut into many parts at once, and a part into single records: a
deadly record costs three children.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from frazil.errors import FrazilError, Unavailable
from frazil.kafka.record_batch import RawRecords
from frazil.native.warm_up import warm_up_all
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult, Rejection
from frazil.pipeline.isolation import IsolatingPipeline, add_part, part_of
from frazil.pipeline.routing import NoRoute, Route

#: Time limits of a child in seconds: to start, and for each answer.
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
#: Memory that a child may allocate after its start, in bytes.
MEMORY = 2 * 1024**3
#: The kind of a dead letter with only the offset of its record: the record batch is unreadable.
UNREAD = "batch"
ProcessChunk = Callable[[Partition, RawRecords, frozenset[str]], ChunkResult]


class Sandbox(IsolatingPipeline):
    """Processes the chunks of one task in a child process."""

    kind, does = "deadly", "kill the process that reads them"
    hint = (
        "so many failures are unlikely to be bad records: check the machine, and the "
        "function of the [[route]]"
    )

    def __init__(self, pipeline: ChunkPipeline) -> None:
        super().__init__(pipeline)
        # Spark's cloudpickle can pickle a user's function without the file it came from.
        pickler: Any = sys.modules.get("pyspark.cloudpickle", pickle)
        self._plan: bytes = pickler.dumps(pipeline.plan)
        self._child: _Child | None = None

    def _ask(self, work: tuple[Partition, RawRecords, frozenset[str]]) -> ChunkResult | str:
        """The result from the child, or the cause of its death."""
        if self._child is None:
            self._child = _Child(self._plan)
        answer = self._child.ask(work)
        if isinstance(answer, FrazilError):
            raise answer
        if isinstance(answer, ChunkResult):
            return answer
        self._child = None
        return str(answer)


def around(
    process: ProcessChunk,
    partition: Partition,
    opened: RawRecords,
    bad: Mapping[int, str],
    way: Route | NoRoute | None,
) -> ChunkResult:
    """Process all records but the `bad` ones, which lie in an unreadable record batch and are
    rejected or, if a rule skips the topic, skipped."""
    whole = ChunkResult()
    borders = [-1, *sorted(bad), len(opened.offsets)]
    for before, behind in itertools.pairwise(borders):
        if behind - before > 1:
            part = part_of(opened, before + 1, behind)
            add_part(whole, process(partition, part, frozenset()), before + 1)
    tables = way.tables if isinstance(way, Route) else None
    if tables == ():
        whole.skipped += len(bad)  # a rule skips the whole topic
        return whole
    for i, fact in bad.items():
        reason = f"cannot read the record batch it lies in: {fact}"
        whole.reject(Rejection(i, UNREAD, reason, tables or ()))
    return whole


class _Child:
    """The parent's handle of a child process."""

    def __init__(self, plan: bytes) -> None:
        self._line, child_line = Pipe()
        with child_line:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "frazil.pipeline.sandbox", str(child_line.fileno())],
                pass_fds=[child_line.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._end = weakref.finalize(self, _end, self._process, self._line)
        if (answer := self._exchange(plan, START_SECONDS)) is not True:
            if isinstance(answer, FrazilError):
                raise answer
            raise Unavailable(f"cannot start a process that reads records: {answer}")

    def ask(self, work: tuple[object, ...]) -> Any:
        return self._exchange(pickle.dumps(work), ANSWER_SECONDS)

    def _exchange(self, message: bytes, seconds: float) -> Any:
        with contextlib.suppress(OSError, EOFError):
            self._line.send_bytes(message)
            if not self._line.poll(seconds):
                self._end()
                return f"there is no end to it, or none within {seconds:.0f} s"
            answer = pickle.loads(self._line.recv_bytes())
            if isinstance(answer, str):  # the error that ended the child
                self._end()
            return answer
        code = self._process.wait()
        self._end()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"it kills the process that reads it ({how})"


def _end(process: subprocess.Popen[bytes], line: Connection[Any, Any]) -> None:
    process.kill()
    process.wait()
    line.close()


# ── the child ───────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    line: Connection[Any, Any] = Connection(int(sys.argv[1]))

    def last_words(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sys.__excepthook__(kind, error, trace)
        line.send_bytes(pickle.dumps(f"{kind.__name__}: {error}"[:1000]))

    sys.excepthook = last_words
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the parent
    pipeline = ChunkPipeline(pickle.loads(line.recv_bytes()))
    warm_up_all()  # not within the limits of the first answer
    _limit()
    line.send_bytes(pickle.dumps(True))
    with contextlib.suppress(EOFError):  # the parent closed the pipe
        while True:
            work = pickle.loads(line.recv_bytes())
            answer: ChunkResult | FrazilError
            try:
                answer = pipeline.process(*work)
            except FrazilError as error:
                answer = error
            line.send_bytes(pickle.dumps(answer))


def _limit() -> None:
    """Limit the address space of this process, so that it fails before the machine does."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as numbers:
        taken = int(numbers.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([taken + MEMORY, *bounds]), hard))


if __name__ == "__main__":
    main()
