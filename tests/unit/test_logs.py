"""The log: lines of text and JSON, without secrets and without values of records."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frazil import logs
from frazil.config.secret_values import secret_values
from frazil.errors import ConfigError, Undecodable
from frazil.monitoring.log_observer import QUIET, LogObserver
from frazil.offsets import Cut
from frazil.steps import COMMIT_FAILED, Step
from tests.unit.test_health import AWAY, P, World, config

LOG = logging.getLogger("frazil")
SECRET = "hunter22-canary"
VALUE = "record-value-canary"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    logs.remove()


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Reads the lines of a log at DEBUG; JSON ones are parsed."""
    path = tmp_path / "log"
    given = config(
        kafka={"bootstrap.servers": "b", "sasl.password": "env:TEST_LOG_SECRET"},
        catalog={"type": "rest", "uri": "http://x", "credential": "env:TEST_LOG_PAIR"},
    )
    os.environ.update(TEST_LOG_SECRET=SECRET, TEST_LOG_PAIR=f"user:{SECRET}-2")
    logs.configure(request.param, "DEBUG", str(path))
    logs.mask(secret_values(given))

    def read() -> list[Any]:
        text = path.read_text()
        assert SECRET not in text
        assert VALUE not in text
        split = text.splitlines()
        return [json.loads(line) for line in split] if request.param == "json" else split

    return read


def watched() -> tuple[World, LogObserver]:
    world = World()
    observer = LogObserver(config(), world.health)
    world.started()
    observer.started(world.run)
    return world, observer


def both(world: World, observer: LogObserver, step: Step) -> None:
    world.health.step(step)
    observer.step(step)


def commit(world: World, observer: LogObserver) -> None:
    rejected = {"json": (3, f"t[0] offset 7: not JSON: {VALUE}")}
    both(world, observer, Step("planned", 4, world.now, records=1003))
    both(world, observer, Step("written", 4, world.now, records=1000, rejected=rejected))
    both(world, observer, Step("commit", 4, world.now, table="db.t"))
    both(world, observer, Step("done", 4, world.now, commit_id="c0ffee", table="db.i"))


def test_a_commit_is_one_line_with_batch_commit_rows_rate_and_lag(lines: Any):
    world, observer = watched()
    world.health.saw_ends(Cut({P: 60}))
    commit(world, observer)
    last = lines()[-1]
    if isinstance(last, dict):
        assert (last["level"], last["sink"], last["event"]) == ("INFO", "s", "commit")
        assert (last["batch"], last["commit_id"], last["rows"]) == (4, "c0ffee", 1000)
        assert (last["rejected"], last["lag"]) == ({"json": 3}, 50)
        assert last["rate"] > 0
        text = last["message"]
    else:
        time, level, title, sink, text = last.split(" ", 4)
        assert (len(time), time[-1], level, title, sink) == (24, "Z", "INFO", "sink", "s:")
    assert text.startswith("batch 4 committed: 1,000 rows, 3 rejected (json 3; the last: t[0] off")
    assert text.endswith(", lag 50, commit c0ffee")


def test_no_secret_and_no_value_of_a_record_is_in_any_line(lines: Any):
    """`lines` looks for both."""
    world, observer = watched()
    commit(world, observer)
    error = Undecodable(f"cannot decode t[0] offset 5: found {VALUE}", hint="set [dead_letters]")
    for failure in (error, AWAY):
        both(
            world,
            observer,
            Step(COMMIT_FAILED, -1, world.now, table="db.t", error=failure),
        )
    world.run.progress.stuck["db.t"] = f"cannot reach http://user:{SECRET}@x"
    world.after(1)
    observer.tick(world.run)
    try:
        raise ValueError(f"a callback found {VALUE}")
    except ValueError:
        LOG.warning("cannot call on_complete\nagain", exc_info=True)
    LOG.debug("connecting with %s and %s-2", SECRET, SECRET)
    world.health.ended(error)
    observer.ended(error)
    shown = [str(line) for line in lines()]
    assert any("ValueError at" in line for line in shown)
    assert any("on_complete | again" in line for line in shown), "a line is one line"
    assert any("connecting with *** and ***" in line for line in shown)
    assert "cannot decode t[0] offset 5 (Undecodable; values are not logged)" in shown[-1]
    assert "remedy: set [dead_letters]" in shown[-1]


def test_a_quiet_sink_logs_once_a_minute(lines: Any, monkeypatch: pytest.MonkeyPatch):
    world, observer = watched()
    clock = [1000.0]
    monkeypatch.setattr("frazil.monitoring.log_observer.time.monotonic", lambda: clock[0])
    observer._wrote_at = observer._committed_at = clock[0]
    for _ in range(3 * int(QUIET) + 5):
        clock[0] += 1
        world.after(1)
        observer.tick(world.run)
    quiet = [line for line in lines() if "no commit for" in str(line)]
    assert len(quiet) == 3
    assert "no commit for 180 s, lag 0, ok" in str(quiet[-1])


def test_a_wait_and_its_end_are_a_line_each(lines: Any):
    world, observer = watched()
    for blocked in ("", AWAY.message, AWAY.message, ""):
        world.run.progress.blocked = blocked
        world.after(1)
        observer.tick(world.run)
    levels = [
        line["level"] if isinstance(line, dict) else line.split(" ")[1] for line in lines()[-2:]
    ]
    assert levels == ["WARNING", "INFO"]
    assert "waiting: the stream: cannot reach the catalog; remedy:" in str(lines()[-2])
    assert "ok, after a wait of" in str(lines()[-1])
    assert len(lines()) == 3, "and the line of the start"


def test_a_file_that_was_moved_is_opened_again(tmp_path: Path):
    path = tmp_path / "log"
    logs.configure("text", "INFO", str(path))
    LOG.info("one")
    path.rename(tmp_path / "log.1")
    LOG.info("two")
    assert "one" in (tmp_path / "log.1").read_text()
    assert "two" in path.read_text()
    with pytest.raises(ConfigError, match="cannot write log"):
        logs.configure("text", "INFO", str(tmp_path / "no" / "log"))


def test_a_level_leaves_out_what_is_below(tmp_path: Path):
    logs.configure("text", "WARNING", str(tmp_path / "log"))
    LOG.info("one")
    LOG.warning("two")
    assert "one" not in (tmp_path / "log").read_text()


def test_the_planning_process_logs_as_the_driver_does(tmp_path: Path):
    path = tmp_path / "log"
    logs.configure("json", "INFO", str(path))
    code = (
        "import logging\nfrom frazil import logs\nlogs.of_environment()\n"
        "logging.getLogger('frazil').warning('from %s', 'there')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert json.loads(path.read_text())["message"] == "from there"


def test_without_a_configured_log_the_planning_process_prints_warnings():
    code = (
        "import logging\nfrom frazil import logs\nlogs.of_environment()\n"
        "logging.getLogger('frazil').warning('here')\nlogging.getLogger('frazil').info('not')"
    )
    environ = {name: text for name, text in os.environ.items() if name != "FRAZIL_LOG"}
    ended = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ
    )
    assert ended.stderr.strip().endswith("WARNING frazil: here")


def test_a_library_user_gets_no_handler_that_writes():
    code = (
        "import logging, frazil\nlogger = logging.getLogger('frazil')\n"
        "print([type(handler).__name__ for handler in logger.handlers], logger.level)\n"
        "logger.warning('nothing')\n"
        "print(logging.getLogger().handlers, logger.propagate)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["['NullHandler'] 0", "[] True"]
    assert ended.stderr == ""


def test_json_takes_what_json_cannot(tmp_path: Path):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    record = logging.LogRecord("frazil", logging.INFO, "", 0, "a\udcff\n%s", ("ö",), None)
    record.fields = {"set": {1}, "path": tmp_path}
    line = handler.format(record).encode(errors="replace")
    assert json.loads(line)["message"].startswith("a")


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────

PEM = (
    "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANcanary\nq83vEjRWeJASNFZ4kA==\n"
    "-----END PRIVATE KEY-----"
)


def logged(tmp_path: Path, format: str, *messages: str, **sections: Any) -> str:
    """The log of a process with such a config."""
    path = tmp_path / f"log.{format}"
    logs.configure(format, "DEBUG", str(path))
    logs.mask(secret_values(config(**sections)))
    for message in messages:
        LOG.info("%s", message)
    return path.read_text()


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_secret_of_several_lines_is_masked_line_by_line(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_LOG_PEM", PEM)
    kafka = {"bootstrap.servers": "b", "ssl.key.pem": "env:TEST_LOG_PEM"}
    shown = logged(tmp_path, format, f"bad key {PEM}", PEM.splitlines()[2], kafka=kafka)
    assert len(shown.splitlines()) == 2
    assert "canary" not in shown
    assert "q83v" not in shown


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_short_secret_is_masked_as_a_word(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_LOG_SHORT", "pw1")
    kafka = {"bootstrap.servers": "b", "sasl.password": "env:TEST_LOG_SHORT"}
    shown = logged(tmp_path, format, "login of u with pw1 failed; pw12 is a topic", kafka=kafka)
    assert "with *** failed; pw12 is a topic" in shown


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(
    "uri",
    [
        "jdbc:postgresql://h/db?user=u&password=canary-9",
        "http://user:canary-9@host/x",
        "https://host/x?access_token=canary-9&a=b",
        "jdbc:sqlserver://host;user=u;password=canary-9",
        "jdbc:oracle:thin:u/canary-9@host:1521",
    ],
)
def test_a_password_in_a_url_is_masked(uri: str, format: str, tmp_path: Path):
    catalog = {"type": "jdbc", "uri": uri, "warehouse": "/w"}
    shown = logged(tmp_path, format, f"cannot reach {uri}", "found canary-9 there", catalog=catalog)
    assert "canary" not in shown
    assert "found *** there" in shown


@pytest.mark.parametrize("format", ["text", "json"])
def test_control_characters_are_escaped(format: str, tmp_path: Path):
    text = "a\x1b[2Jb\u2028c\u0085d\x0be\rf\ng\u202eh\U000e0001"
    shown = logged(tmp_path, format, text)
    assert len(shown.splitlines()) == 1
    assert shown.rstrip("\n").isprintable()
    assert "a\\u001b[2Jb\\u2028c\\u0085d\\u000bef | g\\u202eh\\udb40\\udc01" in shown
    if format == "json":
        assert json.loads(shown)["message"].startswith("a\x1b[2Jb\u2028c")


# ── other libraries ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_libraries_say_comes_in_the_same_format(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "log"
    monkeypatch.setenv("TEST_LOG_SECRET", SECRET)
    logs.configure(format, "INFO", str(path))
    kafka = {"bootstrap.servers": "b", "sasl.password": "env:TEST_LOG_SECRET"}
    logs.mask(secret_values(config(kafka=kafka)))
    logging.getLogger("urllib3.connectionpool").warning("Retrying %s\nafter", SECRET)
    logging.getLogger("urllib3.connectionpool").info("every request")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"deprecated: {SECRET}", DeprecationWarning, stacklevel=1)

    def fail() -> None:
        raise ValueError(f"found {VALUE}")

    thread = threading.Thread(target=fail, name="frazil-x")
    thread.start()
    thread.join()
    shown = path.read_text()
    lines = shown.splitlines()
    assert len(lines) == 3
    assert SECRET not in shown
    assert VALUE not in shown
    assert all(
        word in shown for word in ("urllib3", "py.warnings", "thread frazil-x", "ValueError")
    )
    if format == "json":
        parsed = [json.loads(line) for line in lines]
        assert [line.get("logger") for line in parsed[:2]] == [
            "urllib3.connectionpool",
            "py.warnings",
        ]
        assert parsed[2]["event"] == "thread_failed"
    logs.remove()
    assert threading.excepthook is logs._thread_hook
    assert logging.getLogger().handlers == [
        handler
        for handler in logging.getLogger().handlers
        if type(handler).__module__ != "frazil.logs"
    ]
