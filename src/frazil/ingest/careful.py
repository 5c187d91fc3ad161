"""Settles records where their worst can do no harm: in a process of its own. Runs on executors.

In and out as in `settle`. A task is run this way after it died twice. Whatever a record does there
(a crash in a native library, a user's function that never comes back, gigabytes claimed), it does
to a child with a limit on its memory and on its time:

    chunk ──▶ child ──▶ settled
                └──▶ dead: parts of the chunk, each to the next child, down to the one record

The one record that a child dies of, alone, is rejected as deadly; all others are settled as ever.
What goes wrong in the world around (a registry that does not answer, a function that raises) is an
error here as there, and no record's fault.

The child is a fresh interpreter: after a fork the threads of polars are gone and its locks are not.
It lives until it dies of a record, or until nobody holds its `Careful` any more. A fresh one takes
a second, so a chunk is not halved but cut into many parts at once, and a part into single records:
a deadly record costs three children.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

import pyarrow as pa

from frazil.core.errors import Fatal, FrazilError, Unavailable
from frazil.core.offsets import Partition
from frazil.ingest.decode import Framed
from frazil.ingest.records import Opened
from frazil.ingest.rules import Share
from frazil.ingest.settle import Letter, Settled, Settler, add_need

#: Seconds that a child has to start, and then for each answer.
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
#: Memory that a child may take beyond what it has when it starts.
MEMORY = 2 * 1024**3
#: Records that are tried one by one, when all of them together did not work.
FEW = 256
#: Deadly records of a chunk; more than that are no accident, and each takes seconds.
MOST = 100


class Careful:
    """Settles the chunks of one task."""

    def __init__(self, settler: Settler) -> None:
        self._way = settler._rules.of_topic if settler._rules else lambda _: settler._only
        parts = (settler._format, settler._rules, settler._tables, settler._refused,
                 settler._only.tables[0], settler._keyed, settler._key_format)  # fmt: skip
        # What brought a user's function here without its file can send it on.
        pickler: Any = sys.modules.get("pyspark.cloudpickle", pickle)
        self._parts: bytes = pickler.dumps(parts)
        self._child: _Child | None = None

    def settle(
        self, partition: Partition, opened: Opened, framed: Framed | None, below: frozenset[str]
    ) -> Settled:
        whole = Settled()
        way = self._way(partition.kafka_topic)
        tables = way.tables if isinstance(way, Share) else None
        spans = [(0, len(opened.offsets))]
        deadly = 0
        while spans:
            start, end = spans.pop()
            answer = self._ask((partition, *_cut(opened, framed, start, end), below))
            if isinstance(answer, Settled):
                _add(whole, answer, start)
            elif end - start > 1:
                step = math.isqrt(end - start) if end - start > FEW else 1
                spans += [(at, min(at + step, end)) for at in range(start, end, step)][::-1]
            elif tables == ():
                whole.skipped += 1  # a rule skips the topic, whatever its records are
            else:
                reason = f"cannot read the record: {answer}"
                whole.reject(Letter(start, "deadly", reason, tables or ()))
                deadly += 1
                if deadly > MOST:
                    raise Fatal(
                        f"cannot read {partition}: more than {MOST} of {len(opened.offsets)} "
                        f"records kill the process that reads them; the one at offset "
                        f"{opened.offsets[start]}: {answer}",
                        hint="so many are hardly an accident: look at the machine, and at the "
                        "function of the [[route]]",
                    )
        return whole

    def _ask(self, work: tuple[object, ...]) -> Settled | str:
        """What a child says, or what it died of."""
        if self._child is None:
            self._child = _Child(self._parts)
        answer = self._child.ask(work)
        if isinstance(answer, FrazilError):
            raise answer
        if isinstance(answer, Settled):
            return answer
        self._child = None
        return str(answer)


def _cut(
    opened: Opened, framed: Framed | None, start: int, end: int
) -> tuple[Opened, Framed | None]:
    if end - start == len(opened.offsets):
        return opened, framed
    # Taken, not sliced: the pickle of a slice has all that the array ever had.
    at = pa.array(range(start, end))
    keys, headers = (each if each is None else each.take(at) for each in opened[3:])
    offsets, stamps = opened.offsets[start:end], opened.stamps[start:end]
    if framed is not None:
        decoded = replace(framed.decoded, rows=framed.decoded.rows.take(at))
        framed = Framed(decoded, offsets, stamps, keys)
    return Opened(opened.values[start:end], offsets, stamps, keys, headers), framed


def _add(whole: Settled, part: Settled, start: int) -> None:
    whole.rows += part.rows
    whole.gone += part.gone
    whole.left += part.left
    whole.skipped += part.skipped
    for letter in part.letters.values():
        whole.reject(replace(letter, index=start + letter.index))
    for name, columns in part.needs.items():
        add_need(whole.needs, name, columns)


class _Child:
    """The parent's handle."""

    def __init__(self, parts: bytes) -> None:
        self._line, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "frazil.ingest.careful", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, self._line)
        if (answer := self._exchange(parts, START_SECONDS)) is not True:
            if isinstance(answer, FrazilError):
                raise answer
            raise Unavailable(f"cannot start a process that settles records: {answer}")

    def ask(self, work: tuple[object, ...]) -> Any:
        return self._exchange(pickle.dumps(work), ANSWER_SECONDS)

    def _exchange(self, message: bytes, seconds: float) -> Any:
        with contextlib.suppress(OSError, EOFError):
            self._line.send_bytes(message)
            if not self._line.poll(seconds):
                self._end()
                return f"there is no end to it, or none within {seconds:.0f} s"
            answer = pickle.loads(self._line.recv_bytes())
            if isinstance(answer, str):  # its last words
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
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # not to outlive the parent
    settler = Settler(*pickle.loads(line.recv_bytes()))
    _limit()
    line.send_bytes(pickle.dumps(True))
    with contextlib.suppress(EOFError):  # the parent wants no more
        while True:
            work = pickle.loads(line.recv_bytes())
            answer: Settled | FrazilError
            try:
                answer = settler.settle(*work)
            except FrazilError as error:
                answer = error
            line.send_bytes(pickle.dumps(answer))


def _limit() -> None:
    """Memory ends for this process before it does for the machine."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as numbers:
        taken = int(numbers.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([taken + MEMORY, *bounds]), hard))


if __name__ == "__main__":
    main()
