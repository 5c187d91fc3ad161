"""Notifications: to a real program and a real HTTP server, well and hostile."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import Config
from frazil.config.sections import NotifyConfig
from frazil.errors import ConfigError, Fenced, Gap
from frazil.monitoring import notifier as module
from frazil.monitoring.audit_event import notify_audit
from frazil.monitoring.notifier import Notifier
from frazil.monitoring.notify_observer import NotifyObserver
from frazil.steps import Step
from tests.unit.test_health import AWAY, World, config

EVENT = {"event": "failed", "sink": "s", "verdict": "failed: x", "text": "it is hunter22"}


class Target:
    """A web server; `answer` writes the answer."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        target = self

        class Answers(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                target.headers.append(dict(self.headers))
                target.bodies.append(json.loads(self.rfile.read(length)))
                with suppress(OSError):
                    answer(self)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


def status(number: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.send_response(number)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def serving(answer: Callable[[Any], None]) -> Iterator[Target]:
    target = Target(answer)
    threading.Thread(target=target.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield target
    finally:
        target.server.shutdown()
        target.server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.01, 0.01))


def notified(events: int = 1, close: float = 10.0, **settings: Any) -> Notifier:
    """A notifier that has sent so many events, and is closed."""
    notifier = Notifier(NotifyConfig(**settings), "s", ["hunter22"])
    for number in range(events):
        notifier.send({**EVENT, "number": number})
    notifier.close(close)
    return notifier


# ── a web hook ───────────────────────────────────────────────────────────────────────────────────


def test_an_event_is_posted_with_secret_headers_and_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TEST_HOOK_TOKEN", "Bearer abc")
    (tmp_path / "key").write_text("from-a-file\n")
    headers = {"Authorization": "env:TEST_HOOK_TOKEN", "X-Api-Key": f"file:{tmp_path}/key"}
    with serving(status(200, b"x" * 5_000_000)) as target:
        notifier = notified(webhook=target.url, headers=headers)
    assert target.bodies == [{**EVENT, "text": "it is ***", "number": 0}]
    sent = target.headers[0]
    assert (sent["Authorization"], sent["X-Api-Key"]) == ("Bearer abc", "from-a-file")
    assert (notifier.failed, notifier.dropped) == (0, 0)


@pytest.mark.parametrize(
    ("number", "calls"), [(500, 3), (503, 3), (429, 3), (404, 1), (403, 1), (302, 1)]
)
def test_an_answer_that_may_change_is_asked_for_again(
    number: int, calls: int, caplog: pytest.LogCaptureFixture
):
    with serving(status(number, Location="/elsewhere")) as target, caplog.at_level("WARNING"):
        notifier = notified(webhook=target.url)
    assert (len(target.bodies), notifier.failed) == (calls, 1)
    assert f"cannot notify by webhook of failed: HTTP status {number}" in caplog.text


def test_a_refused_connection_is_counted_and_does_not_show_the_url(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level("WARNING"):
        notifier = notified(webhook="http://127.0.0.1:1/secret-path")
    assert notifier.failed == 1
    assert "Connection refused" in caplog.text
    assert "secret-path" not in caplog.text


def _hang(handler: Any) -> None:
    time.sleep(20)


def _drip(handler: Any) -> None:
    for _ in range(200):
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.05)


def _nonsense(handler: Any) -> None:
    handler.wfile.write(os.urandom(3000))


@pytest.mark.parametrize("answer", [_hang, _drip, _nonsense])
def test_a_hostile_server_takes_a_bounded_time(answer: Callable[[Any], None]):
    began = time.monotonic()
    with serving(answer) as target:
        notifier = notified(webhook=target.url, timeout="0.3s", close=8)
    assert notifier.failed == 1
    assert time.monotonic() - began < 7


def test_what_does_not_fit_is_dropped_counted_and_logged(caplog: pytest.LogCaptureFixture):
    gate = threading.Event()
    with serving(lambda handler: gate.wait(5) and status(200)(handler)) as target:
        notifier = Notifier(NotifyConfig(webhook=target.url), "s", [])
        began = time.monotonic()
        with caplog.at_level("WARNING"):
            for number in range(module.MOST_WAITING + 52):
                notifier.send({**EVENT, "number": number})
        assert time.monotonic() - began < 2, "it never blocks"
        gate.set()
        notifier.close()
    assert notifier.dropped in (50, 51, 52)
    assert len(target.bodies) == module.MOST_WAITING + 52 - notifier.dropped
    assert "notifications dropped" in caplog.text


# ── a command ────────────────────────────────────────────────────────────────────────────────────


def script(folder: Path, text: str) -> list[str]:
    path = folder / "hook.py"
    path.write_text(text)
    return [sys.executable, str(path), "an argument; with $HOME and 'quotes'"]


def test_a_command_gets_the_event_on_its_standard_input_and_in_its_environment(tmp_path: Path):
    out = tmp_path / "out"
    command = script(
        tmp_path,
        "import json, os, sys\n"
        f"with open({str(out)!r}, 'a') as file:\n"
        "    words = [os.environ['FRAZIL_EVENT'], os.environ['FRAZIL_VERDICT'], sys.argv[1]]\n"
        "    file.write(json.dumps([json.load(sys.stdin), *words]) + '\\n')\n",
    )
    assert notified(2, command=command).failed == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line[0]["number"] for line in lines] == [0, 1]
    assert lines[0][0]["text"] == "it is ***"
    assert lines[0][1:] == ["failed", "failed: x", "an argument; with $HOME and 'quotes'"]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("import sys; sys.exit(7)", "exit code 7"),
        ("import time; time.sleep(60)", "it did not end within"),
        ("while True: print('x' * 1000)", "it did not end within"),
        ("import sys, os; os.write(1, b'x' * 5_000_000); sys.exit(1)", "exit code 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        (
            "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
            "'import time; time.sleep(60)']).wait()",
            "it did not end within",
        ),
    ],
)
def test_a_hostile_command_takes_a_bounded_time_and_is_named(
    text: str, fact: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    began = time.monotonic()
    with caplog.at_level("WARNING"):
        notifier = notified(command=script(tmp_path, text), timeout="1s")
    assert notifier.failed == 1
    assert fact in caplog.text
    assert time.monotonic() - began < 6


def test_a_command_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("WARNING"):
        assert notified(command=["/no/such/program"]).failed == 1
    assert "/no/such/program: No such file" in caplog.text


def test_a_command_that_never_reads_is_no_failure(tmp_path: Path):
    notifier = Notifier(NotifyConfig(command=script(tmp_path, "pass")), "s", [])
    notifier.send({**EVENT, "text": "x" * 1_000_000})
    notifier.close()
    assert notifier.failed == 0


# ── the settings ─────────────────────────────────────────────────────────────────────────────────


def test_a_text_is_split_as_a_shell_would_and_no_shell_runs():
    assert NotifyConfig(command="/bin/a --to 'the night shift' $X").command == (  # type: ignore[arg-type]
        "/bin/a",
        "--to",
        "the night shift",
        "$X",
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"command": "a 'b"}, "No closing quotation"),
        ({"events": ["faild"]}, "did you mean"),
        ({"webhook": "ftp://x"}, "expected a URL"),
        ({"webhook": "http://"}, "expected a URL"),
        ({"webhook": "http://x:99999999"}, "expected a URL"),
        ({"webhook": "http://x", "headers": {"Authorization": "Bearer x"}}, "a secret is written"),
        ({"webhook": "http://x", "headers": {"X-Api-Key": "x"}}, "a secret is written"),
        ({"webhook": "http://x", "headers": {"a b": "x"}}, "is not a header name"),
        ({"webhook": "http://x", "headers": {"a": "x\r\nb: c"}}, "is not a header name"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text) as caught:
        config(notify=settings)
    assert "Bearer" not in str(caught.value)


def test_a_secret_that_is_missing_stops_the_start():
    with pytest.raises(ConfigError, match="TEST_NO_SUCH is not set"):
        Notifier(NotifyConfig(webhook="env:TEST_NO_SUCH"), "s", [])
    shown = repr(NotifyConfig(webhook="https://hooks.example/T0/secret"))
    assert "secret" not in shown


# ── which events ─────────────────────────────────────────────────────────────────────────────────


class Events(list[dict[str, Any]]):
    def send(self, event: dict[str, Any]) -> None:
        self.append(event)

    def close(self) -> None: ...

    @property
    def names(self) -> list[str]:
        return [event["event"] for event in self]


def observed(given: Config | None = None) -> tuple[World, NotifyObserver, Events]:
    given = given or config(notify={"command": ["x"]})
    world, events = World(given), Events()
    observer = NotifyObserver(given, world.health, events, lambda: world.now)  # type: ignore[arg-type]
    world.started()
    observer.started(world.run)
    return world, observer, events


def test_a_lasting_wait_and_its_end_are_sent_once():
    world, observer, events = observed()
    for wait in (5, 30):
        world.run.progress.blocked = AWAY.message
        for _ in range(wait):
            world.after(1)
            observer.tick(world.run)
        world.run.progress.blocked = ""
        world.after(1)
        observer.tick(world.run)
    assert events.names == ["started", "waiting", "recovered"]
    waiting, recovered = events[1:]
    assert waiting["verdict"] == "waiting: the stream: cannot reach the catalog"
    assert waiting["remedy"]
    assert waiting["text"].startswith("sink s on ")
    assert recovered["seconds"] == 30
    observer.ended(None)
    assert events.names[-1] == "stopped"


@pytest.mark.parametrize(
    ("error", "event", "code"), [(Gap("cannot go on"), "failed", 5), (Fenced("x"), "fenced", 4)]
)
def test_an_end_is_sent_with_its_exit_code(error: Any, event: str, code: int):
    world, observer, events = observed()
    world.health.ended(error)
    observer.ended(error)
    assert (events.names[-1], events[-1]["exit_code"]) == (event, code)


def test_rejections_are_sent_once_a_minute_per_kind_with_their_number_and_no_value():
    world, observer, events = observed()

    def reject(kind: str, count: int, offset: int) -> None:
        last = f"t[0] offset {offset}: found 'canary'"
        observer.step(Step("written", 1, world.now, rejected={kind: (count, last)}))
        world.after(1)
        observer.tick(world.run)

    for second in range(130):
        reject("json", 2, second)
    reject("route", 1, 500)
    observer.ended(None)
    rejected = [event for event in events if event["event"] == "rejected"]
    assert [(e["kind"], e["records"]) for e in rejected] == [
        ("json", 2),
        ("json", 120),
        ("json", 120),
        ("route", 1),
        ("json", 18),
    ]
    assert rejected[0]["last"] == "t[0] offset 0"
    assert "canary" not in json.dumps(events)


@pytest.mark.parametrize("verdict", ["proven", "gap"])
def test_the_verdict_of_an_audit_is_sent(verdict: str):
    with serving(status(204)) as target:
        given = config(notify={"webhook": target.url})
        tables = {"db.t of s": verdict, "db.i of s": "proven"}
        notify_audit(given, verdict, tables, verdict == "proven")
        silent = config(notify={"webhook": target.url, "events": ["failed"]})
        notify_audit(silent, verdict, tables, True)
    (event,) = target.bodies
    assert (event["event"], event["verdict"], event["tables"]) == ("audit", verdict, tables)
    assert f"audit: {verdict}" in event["text"]


def test_only_the_wanted_events_are_sent():
    world, observer, events = observed(config(notify={"command": ["x"], "events": ["failed"]}))
    world.health.ended(None)
    observer.ended(None)
    assert events == []


def test_the_log_of_a_notification_has_its_sink(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        notified(command=["/no/such/program"])
    assert [getattr(record, "sink", None) for record in caplog.records] == ["s"]
