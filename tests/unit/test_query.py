"""When a query is started again, without Spark."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from frazil.errors import (
    Expired,
    FrazilError,
    PythonWorkerUnavailable,
    Undecodable,
    encode_for_spark,
)
from frazil.spark import query as querying
from frazil.spark.query import STARTS, Running, started, translated

LOST = (
    "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
    "Python worker failed to connect back. SQLSTATE: XXKST"
)
WITHIN = 5.0


class FakeQuery:
    """Ended with `error`, or running."""

    def __init__(self, error: str = "", worked: bool = False) -> None:
        self.error = error
        self.lastProgress: Any = {} if worked else None
        self.stopped = False

    @property
    def isActive(self) -> bool:
        return not self.error and not self.stopped

    def exception(self) -> Exception | None:
        return RuntimeError(self.error) if self.error else None

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_SECONDS", "_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(querying, name, 0.01)


def running(first: FakeQuery, *later: Any, patience: float = WITHIN) -> tuple[Running, list[str]]:
    queue, messages = list(later), list[str]()

    def start() -> Any:
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Running(first, start, patience=patience, blocked=messages.append), messages  # type: ignore[arg-type]


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_query_that_lost_a_python_process_is_started_again_until_it_works():
    works = FakeQuery(worked=True)
    handle, messages = running(FakeQuery(LOST), FakeQuery(LOST), FakeQuery(LOST), works)
    assert handle.active
    assert handle.failure is None
    eventually(lambda: messages[-1:] == [""])
    assert handle.query is works  # type: ignore[comparison-overlap]
    assert len(messages) == 4
    assert "Spark could not start or reach a Python process" in messages[0]
    works.error, works.lastProgress = LOST, {}  # and once more, long after
    eventually(lambda: len(messages) > 4)
    handle.stop()


@pytest.mark.parametrize(
    "error",
    [
        "java.lang.OutOfMemoryError: Java heap space",
        "org.apache.kafka.common.errors.SaslAuthenticationException: Authentication failed",
        str(
            encode_for_spark(
                Undecodable("cannot read t[0] at offset 3: Python worker failed to connect back")
            )
        ),
    ],
)
def test_any_other_failure_ends_it(error: str):
    handle, messages = running(FakeQuery(error), FakeQuery())
    assert not handle.active
    assert not isinstance(handle.failure, PythonWorkerUnavailable)
    handle._thread.join(WITHIN)
    assert not handle._thread.is_alive()
    assert messages == []


def test_patience_ends_and_the_message_says_what_to_do():
    handle, _ = running(FakeQuery(LOST), FakeQuery(LOST), patience=0.1)
    eventually(lambda: not handle.active)
    assert isinstance(handle.failure, PythonWorkerUnavailable)
    assert "loopback" in handle.failure.hint
    assert handle.failure.detail == LOST


def test_the_error_that_ended_a_query_prevents_another_start():
    handle, _ = running(FakeQuery(LOST), Expired("cannot fetch t[0]: retention"))
    eventually(lambda: not handle.active)
    assert isinstance(handle.failure, Expired)


def test_nothing_is_started_after_the_end():
    later = FakeQuery()
    handle, _ = running(FakeQuery(LOST), later)
    handle.stop()
    handle._thread.join(WITHIN)
    assert handle.query is not later or later.stopped  # type: ignore[comparison-overlap]
    assert not handle.active


@pytest.mark.parametrize(
    "text",
    [
        LOST,
        "java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect "
        "back after 60000 ms",
        "java.lang.IllegalArgumentException: Authentication failed.",
        "[CANNOT_OPEN_SOCKET] Can not open socket: [\"tried to connect to ('127.0.0.1', 4711)\"].",
        'Traceback (most recent call last):\n  File "util.py", line 1, in _do_server_auth\n'
        "    reply = UTF8Deserializer().loads(conn)\nEOFError",
    ],
)
def test_what_spark_says_of_a_python_process_that_it_did_not_reach(text: str):
    error: FrazilError = translated(RuntimeError(text))
    assert isinstance(error, PythonWorkerUnavailable)
    assert error.detail == text


class StartingQuery(FakeQuery):
    """Initializes until it is told that it has its sources."""

    def __init__(self) -> None:
        super().__init__()
        self.status = {"message": "Initializing sources"}


def test_queries_start_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Each starts a Python process, which has 10 seconds to connect back."""
    monkeypatch.setattr(querying, "_STATUS_SECONDS", 0.01)
    queries = [StartingQuery() for _ in range(3 * STARTS)]
    begun: list[StartingQuery] = []

    def start(query: StartingQuery) -> Any:
        begun.append(query)
        return query

    threads = [
        threading.Thread(target=started, args=(lambda query=query: start(query),), daemon=True)
        for query in queries
    ]
    for thread in threads:
        thread.start()
    for done in range(STARTS, len(queries), STARTS):
        eventually(lambda expected=done: len(begun) == expected)
        time.sleep(0.05)
        assert len(begun) == done
        for query in begun[done - STARTS :]:
            query.status = {"message": "Getting offsets"}
    eventually(lambda: len(begun) == len(queries))
    begun[-1].stop()  # one that has ended makes room, too
    for query in begun:
        query.error = LOST
    for thread in threads:
        thread.join(WITHIN)
    for _ in range(2 * STARTS):
        with pytest.raises(RuntimeError):
            started(lambda: (_ for _ in ()).throw(RuntimeError("no")))
