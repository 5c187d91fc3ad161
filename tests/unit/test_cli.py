"""The command line: no raw exception reaches a user, whatever the arguments, files and variables;
every command says it in JSON too; nothing is cut in a pipe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from frazil.cli import commands
from frazil.config import model as configs
from frazil.config.sections import (
    CompletenessConfig,
    DeadLettersConfig,
    DecodeConfig,
    HealthConfig,
    LogConfig,
    MetricsConfig,
    NotifyConfig,
    RouteConfig,
    SinkConfig,
    TableConfig,
    TransformConfig,
)
from frazil.errors import ConfigError, Fatal, Unavailable, cause, counted
from frazil.formats import schema_sample
from frazil.kafka.setting_names import NAMES, refusals
from frazil.ledger import staged_batch
from frazil.ledger.sink_state import staged_batches, staging_folder
from frazil.ops.status import StatusReport
from frazil.render import output, text_table
from frazil.spark.open_table import opener
from frazil.spark.query import translated
from tests.unit.test_static_table import Made

CODES = {0, 1, 2, 3, 4, 5, 75, 130, 141, 143}
GOOD = """
[sink]
id = "orders"
topics = ["orders"]
unavailable_timeout = "1s"
[kafka]
"bootstrap.servers" = "127.0.0.1:1"
[decode]
format = "json"
[catalog]
type = "hadoop"
warehouse = "{0}/lake"
[[table]]
name = "shop.orders"
[dead_letters]
table = "shop.dead"
"""


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(typer.main.get_command(commands.app)))
#: Those that start servers whatever they are given: they fetch the jars for it first.
STARTING = {("demo",)}
#: The exit code of commands that need no argument, where it is not 0.
ALONE = {("demo",): 75, ("init",): 2}
#: Those with an argument that may be left out, and which is given here.
OPTIONAL = {("sql",)}
#: Their report on standard output is the sentence.
REPORTING = {"check", "plan"}
#: Those that ask the catalog and need no JVM for that; they ask for the index, or for the table.
LOOKING = {
    ("audit",): ["--no-spark"],
    ("status",): ["--no-spark"],
    ("completeness",): ["--no-spark"],
    ("locate",): ["orders", "0", "1", "--no-spark"],
    ("offsets", "show"): ["--no-spark"],
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without Spark and Kafka: a call of one of them gets the error that it does not answer."""

    def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("cannot ask: it is away")

    monkeypatch.setattr("frazil.spark.session.session", away)
    monkeypatch.setattr("frazil.spark.open_table._by_spark", away)
    monkeypatch.setattr("frazil.kafka.planner.Planner.origin", away)
    monkeypatch.setattr("frazil.spark.jars.fetch", away)  # before a broker is started
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def says(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["frazil", *words])
    with pytest.raises(SystemExit) as end:
        commands.main()
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err, (words, err)
    assert "not one that Frazil knows" not in err, (words, err)
    assert end.value.code in CODES, words
    if words[:1] and words[0] in REPORTING and out:
        return int(end.value.code or 0), out, err
    if end.value.code in (1, 2, 4, 5, 75) and "Usage" not in out:
        logged = " ERROR " in err or '"level": "ERROR"' in err
        assert logged or err.startswith("frazil: ") or "\nfrazil: " in err, (words, err)
    return int(end.value.code or 0), out, err


def arguments(command: Any, given: str, rest: str) -> list[str]:
    """Its arguments: `given` for the config or table, `rest` for all others and needed options."""
    words: list[str] = []
    for param in command.params:
        if param.param_type_name == "argument" and param.required:
            words.append(given if not words else rest)
        elif param.required:
            words += [param.opts[0], rest]
    return words


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("hostile")
    files = {
        "empty": b"",
        "binary": os.urandom(2000),
        "latin": b'[sink]\nid = "\xff"',
        "nul": b"\0" * 9,
        "half": b"[sink\nid",
        "scalar": b"sink = 5\nkafka = []",
        "list": b"[[sink]]\nid = 1",
        "deep": b"x = " + b"[" * 5000 + b"]" * 5000,
        "huge": b"# " + b"x" * 17_000_000,
        "number": b"[sink]\nid = 1e400\ntopics = [[]]",
        "date": b"[sink]\nid = 2026-01-01",
    }
    for name, content in files.items():
        (folder / f"{name}.toml").write_bytes(content)
    (folder / "folder.toml").mkdir()
    (folder / "locked.toml").symlink_to(folder / "locked.toml")
    paths = [str(path) for path in folder.iterdir()]
    return [*paths, str(folder / "absent.toml"), "x" * 5000 + ".toml", "\udcff.toml"]


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_hostile_files_are_refused_in_a_sentence(
    path: tuple[str, ...], hostile: list[str], capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    command = COMMANDS[path]
    if not any(param.param_type_name == "argument" for param in command.params):
        assert says(capfd, monkeypatch, *path)[0] == ALONE.get(path, 0)
        return
    for file in hostile:
        given = [file] if path in OPTIONAL else arguments(command, file, "1")
        code, _, err = says(capfd, monkeypatch, *path, *given, "--json")
        assert code == 2 or (path == ("health",) and code == 3), (file, err)


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_hostile_arguments_are_refused_in_a_sentence(
    path: tuple[str, ...], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # some options name files that are written
    config = tmp_path / "sink.toml"
    config.write_text(GOOD.format(tmp_path))
    command = COMMANDS[path]
    words = ["", "-1", "9" * 30, "a:b:c", "\N{SUPERSCRIPT TWO}", "2026-99-99"]
    for word in words:
        given = arguments(command, str(config), word)
        if not given and path != ("version",):
            given = [str(config)]
        says(capfd, monkeypatch, *path, *given)
        for param in command.params:
            if param.param_type_name == "option" and not getattr(param, "is_flag", False):
                says(capfd, monkeypatch, *path, *given, param.opts[0], word)
    says(capfd, monkeypatch, *path, "--no-such-option")


def wrong_values() -> list[tuple[str, str, Any]]:
    kinds = {
        "sink": SinkConfig,
        "decode": DecodeConfig,
        "transform": TransformConfig,
        "table": TableConfig,
        "route": RouteConfig,
        "dead_letters": DeadLettersConfig,
        "completeness": CompletenessConfig,
        "metrics": MetricsConfig,
        "health": HealthConfig,
        "log": LogConfig,
        "notify": NotifyConfig,
    }
    values = [5, -1, True, 1.5, "\N{SUPERSCRIPT TWO}", "", "x", [], [[1]], {"a": {"b": []}}]
    return [
        (section, field.name, value)
        for section, kind in kinds.items()
        for field in dataclasses.fields(kind)
        for value in values
    ]


def test_no_key_takes_a_value_of_any_type_raw(tmp_path: Path):
    """Each is a config, or a ConfigError; nothing else."""
    for section, key, value in wrong_values():
        document: dict[str, Any] = configs.document(_written(tmp_path), {})
        where = document.setdefault(section, [{}] if section in ("table", "route") else {})
        (where[0] if isinstance(where, list) else where)[key] = value
        with suppress(ConfigError):
            configs.from_document(document)


def _written(folder: Path) -> Path:
    path = folder / "sink.toml"
    path.write_text(GOOD.format(folder))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "FRAZIL_",
        "FRAZIL___",
        "FRAZIL_SINK__",
        "FRAZIL__X__Y",
        "FRAZIL_SINK__ID__X",
        "FRAZIL_TABLE__",
        "FRAZIL_TABLE__0",
        "FRAZIL_TABLE__-1__NAME",
        "FRAZIL_DECODE__REGISTRY",
        "FRAZIL_KAFKA____",
        "FRAZIL_ROUTE__0__TO__X",
        "FRAZIL_DECODE__REGISTRY__",
        "FRAZIL_CATALOG__NAME",
    ],
)
@pytest.mark.parametrize("value", ["", "x", "\udcff", "5", "env:", "a,,b"])
def test_hostile_variables_are_refused_in_a_sentence(
    name: str, value: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    says(capfd, monkeypatch, "config", "explain", str(_written(tmp_path)))


#: What answers in place of a REST catalog: status, and what it says of everything.
ANSWERS = {
    "html": (200, b"<html><body>Log in</body></html>"),
    "an empty answer": (200, b""),
    "a list": (200, b"[]"),
    "text": (200, b'"config"'),
    "null": (200, b"null"),
    "half of an object": (200, b'{"defaults": {"a"'),
    "wrong types": (200, b'{"defaults": 5, "overrides": [], "metadata": {"format-version": "x"}}'),
    "metadata of nothing": (200, b'{"defaults": {}, "overrides": {}, "metadata": {}}'),
    "no text": (200, bytes(range(256))),
    "server error": (500, b"Internal Server Error"),
    "server error in html": (502, b"<html>Bad Gateway</html>"),
    "unavailable": (503, b'{"error": 5}'),
    "forbidden": (403, b"<html>Forbidden</html>"),
    "not found by a proxy": (404, b"<html>nginx</html>"),
    "not implemented": (501, b"no"),
    "redirect in a circle": (302, b""),
}


@contextmanager
def answering(status: int, body: bytes, config: bool) -> Iterator[str]:
    """`config`: all but the first question of a client is answered so."""
    first = (200, b'{"defaults": {}, "overrides": {}}') if config else (status, body)
    other = status, body

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = first if "/config" in self.path else other
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 302:
                self.send_header("Location", self.path)
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def rest(folder: Path, uri: str) -> str:
    text = GOOD.format(folder).replace('type = "hadoop"', f'type = "rest"\nuri = "{uri}"')
    path = folder / "sink.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("config", [False, True], ids=["always", "behind the config"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_catalog_that_answers_nonsense_is_reported_in_a_sentence(
    answer: tuple[int, bytes],
    config: bool,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    with answering(*answer, config) as uri:
        for path, more in [*LOOKING.items()][0 if config else 4 :]:
            code, _, err = says(capfd, monkeypatch, *path, rest(tmp_path, uri), *more)
            assert code in (2, 5, 75), (path, err)
            assert "catalog" in err, (path, err)
            assert len(err) < 2000, (path, err)


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:1",
        "http://",
        "no-uri",
        "ftp://x",
        "http://a b",
        "http://no-such-host.invalid",
    ],
)
def test_a_catalog_that_is_away_is_reported_in_a_sentence(
    uri: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    for path, more in LOOKING.items():
        code, _, err = says(capfd, monkeypatch, *path, rest(tmp_path, uri), *more)
        assert code in (2, 5, 75), (path, err)
        assert "catalog" in err, (path, err)


@contextmanager
def silent() -> Iterator[str]:
    """The URI of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_catalog_that_never_answers_is_tried_again_later(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    with silent() as uri:
        path = Path(rest(tmp_path, uri))
        limit = '"rest.client.socket-timeout-ms" = "300"\n[[table]]'
        path.write_text(path.read_text().replace("[[table]]", limit, 1))
        for words, more in {**LOOKING, ("plan",): []}.items():
            began = time.monotonic()
            code, out, err = says(capfd, monkeypatch, *words, str(path), *more)
            assert time.monotonic() - began < 8, words
            assert code == 75, (words, out, err)
            assert "expected an answer within" in out + err, (words, out, err)
            assert "uri" in out + err, "the hint"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('"secruity.protocol" = "SSL"', "did you mean 'security.protocol'?"),
        ('"security.protocol" = "SLS"', 'Invalid value "SLS"'),
        ('"ssl.ca.location" = "/no"\n"security.protocol" = "SSL"', "ssl.ca.location failed"),
    ],
)
def test_a_wrong_setting_of_kafka_is_an_error_of_the_config(
    line: str, shown: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "sink.toml"
    path.write_text(GOOD.format(tmp_path).replace("[kafka]", f"[kafka]\n{line}"))
    asking = ["status", "plan", "offsets show", "check"]
    for words in asking:
        code, out, err = says(capfd, monkeypatch, *words.split(), str(path))
        assert code == 2, (words, out, err)
        assert shown in out + err, (words, out, err)
        assert "sink.toml:7" in out + err, (words, out, err)
    key, _, value = line.splitlines()[0].replace('"', "").partition(" = ")
    given = ["--kafka", f"{key}={value}", "--kafka", "security.protocol=SSL"]
    given = given[:2] if "security" in key or "secruity" in key else given
    code, out, err = says(
        capfd,
        monkeypatch,
        *("init", "--bootstrap-servers", "127.0.0.1:1", "--topic", "t", *given),
        *("--catalog", "type=hadoop", "--catalog", "warehouse=/x"),
    )
    assert (code, shown in err) == (2, True), err


def test_the_known_settings_of_kafka_are_those_of_librdkafka():
    for name in NAMES:
        with pytest.raises((KafkaException, TypeError, ValueError)) as caught:
            AdminClient({"log_level": "0", name: "\1", "retries": "x"})  # never a client
        assert "No such configuration property" not in str(caught.value), name


def test_an_error_of_librdkafka_leads_to_its_setting_and_shows_no_secret():
    for kafka, path in (
        ({"secruity.protocol": "x"}, ("kafka", "secruity.protocol")),
        ({"sasl.password": "hunter2", "socket.timeout.ms": "1"}, ("kafka", "socket.timeout.ms")),
        ({"security.protocol": "sasl_ssl", "sasl.mechanism": "FOO"}, ("kafka", "sasl.mechanism")),
    ):
        with pytest.raises(ConfigError) as caught, refusals(kafka):
            AdminClient({"log_level": "0", **kafka})
        assert caught.value.path == path
        assert "hunter2" not in str(caught.value)


def _sealed(values: Any) -> bytes:
    """With a checksum that is right, whatever it says."""
    body = json.dumps(values).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


#: Torn and altered records are none; what has a right checksum and is no record stops.
TORN = {
    "empty": b"",
    "binary": bytes(range(256)),
    "digest alone": b"0" * 64,
    "other json": b'{"a": 1}',
    "half": _sealed({"version": 1})[:70],
}
FOREIGN = {
    "no object": _sealed([]),
    "null": _sealed(None),
    "no version": _sealed({}),
    "newer": _sealed({"version": 999}),
    "nothing else": _sealed({"version": staged_batch.VERSION}),
    "wrong types": _sealed({"version": staged_batch.VERSION, "sink": 5, "begin": []}),
}


@pytest.mark.parametrize("name", [*TORN, *FOREIGN])
def test_a_batch_record_that_is_none_is_reported_in_a_sentence(
    name: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    config = _written(tmp_path)
    index = Made(tmp_path / "lake" / "shop" / "frazil_index")
    index.commit()
    index.save()
    given = configs.load(config)
    table = opener(given, False)("shop.frazil_index")
    assert table is not None
    folder = Path(staging_folder(given, table))
    folder.mkdir(parents=True)
    (folder / "0.json").write_bytes({**TORN, **FOREIGN}[name])
    with pytest.raises(Fatal) if name in FOREIGN else nullcontext():
        assert [batch for _, batch in staged_batches(given, table)] == [None]
    code, _, err = says(capfd, monkeypatch, "status", str(config), "--no-spark")
    assert code == 5  # the index made here has no rows to count
    assert ("staged batch" in err) == (name in FOREIGN), err
    assert ("0.json" in err) == (name in FOREIGN), err


def test_a_pipe_is_read_and_one_that_nobody_writes_to_is_refused(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    code, out, err = says(capfd, monkeypatch, "check", str(path), "--no-write")
    assert (code, "a pipe without a writer" in out + err) == (2, True)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)
    os.write(writing, GOOD.format(tmp_path).encode())
    threading.Timer(0.3, os.close, [writing]).start()
    assert configs.load(path, {}).sink.id == "orders"
    os.close(reading)


def test_a_mistyped_section_of_a_variable_leads_to_the_variable(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "sink.toml"
    path.write_text(GOOD.format(tmp_path))
    monkeypatch.setenv("FRAZIL_SNK__ID", "x")
    _, _, err = says(capfd, monkeypatch, "config", "explain", str(path))
    assert (
        "unknown section [snk]; did you mean 'sink'? (environment variable FRAZIL_SNK__ID)" in err
    )


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ("--catalog type=resst", "did you mean 'rest'?"),
        ("--catalog type=rest", "uri is missing"),
        ("--catalog type=jdbc --catalog uri=jdbc:sqlite:x.db", "warehouse is missing"),
        ("--catalog type", "expected KEY=VALUE"),
        ("--catalog type=hadoop --catalog warehouse=/x --kafka x", "expected KEY=VALUE"),
        ("--catalog type=rest --catalog uri=http://u:hunter2@h", "expected uri=env:NAME"),
        (
            "--catalog type=hadoop --catalog warehouse=/x --registry http://u:hunter2@h",
            "expected url=env:NAME",
        ),
        ("", "no catalog is given"),
    ],
)
def test_init_checks_its_options_before_it_asks_a_server(
    options: str, fact: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    def asked(*_: Any) -> Any:
        raise AssertionError("Kafka was asked")

    monkeypatch.setattr("frazil.ops.topic_sample.topic_names", asked)
    monkeypatch.chdir(tmp_path)
    given = ["--bootstrap-servers", "127.0.0.1:1", "--topic", "t", "--yes", *options.split()]
    code, _, err = says(capfd, monkeypatch, "init", *given)
    assert (code, fact in err, "hunter2" in err) == (2, True, False), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_every_error_is_an_object_of_json(
    path: tuple[str, ...], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    absent = str(tmp_path / "absent.toml")
    takes = any(param.param_type_name == "argument" for param in COMMANDS[path].params)
    given = [absent] if path in OPTIONAL else arguments(COMMANDS[path], absent, "1")
    given = given if takes else ["--no-such-option"]
    plain = says(capfd, monkeypatch, *path, *given)
    code, out, err = says(capfd, monkeypatch, *path, *given, "--json")
    assert code == plain[0]
    if path in (("health",), ("check",)):
        assert json.loads(out), "a report"
        return
    values = json.loads(out)["error"]
    assert set(values) == {"class", "message", "hint"}
    assert values["class"] == "ConfigError"
    assert values["message"] in err


def test_errors_before_a_run_are_logged_as_asked_for(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    path, log = tmp_path / "sink.toml", tmp_path / "log"
    text = GOOD.format(tmp_path).replace("id =", "idd =")

    def logged(*words: str) -> dict[str, Any]:
        code, _, err = says(capfd, monkeypatch, "run", str(path), *words)
        assert code == 2
        lines = (log.read_text() if log.exists() else err).splitlines()
        return dict(json.loads(lines[-1]))

    path.write_text(text)
    assert "idd" in logged("--log-format", "json")["message"]
    path.write_text(f'{text}[log]\nformat = "json"')
    assert logged()["event"] == "exit"
    path.write_text(f'{text}[log]\nformat = "json"\nfile = "{log}"')
    assert "idd" in logged()["message"]
    log.unlink()
    path.write_text(GOOD.format(tmp_path))
    absent = str(tmp_path / "absent" / "log")
    assert absent in logged("--log-format", "json", "--log-file", absent)["message"]
    assert "LOUD" in says(capfd, monkeypatch, "run", str(path), "--log-level", "loud")[2]


def test_a_closed_pipe_is_quiet(tmp_path: Path):
    for words in (
        ["config", "explain", "CONFIG"],
        ["version", "--json"],
        ["audit", "CONFIG", "--no-kafka"],
    ):
        config = tmp_path / "sink.toml"
        config.write_text(GOOD.format(tmp_path))
        given = [str(config) if word == "CONFIG" else word for word in words]
        process = subprocess.Popen(
            [sys.executable, "-m", "frazil", *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        assert (process.wait(120), err) == (141, ""), words


def test_before_the_first_start_nothing_is_committed(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    """The file of a catalog on SQLite is made by the first start."""
    path = tmp_path / "sink.toml"
    sqlite = f'type = "jdbc"\nuri = "jdbc:sqlite:{tmp_path}/catalog.db"'
    path.write_text(GOOD.format(tmp_path).replace('type = "hadoop"', sqlite))
    codes = {
        " ".join(words): says(capfd, monkeypatch, *words, str(path), *more)[0]
        for words, more in LOOKING.items()
    }
    assert codes == {
        "audit": 3,
        "status": 0,
        "completeness": 2,
        "locate": 2,
        "offsets show": 75,
    }


@pytest.mark.parametrize(
    ("state", "operator", "code"),
    [
        ("ok", False, 0),
        ("catching_up", False, 0),
        ("starting", False, 0),
        ("stopped", False, 0),
        ("waiting", False, 75),
        ("waiting", True, 3),
        ("failed", True, 3),
        ("failed", False, 3),
        ("unknown", False, 3),
    ],
)
def test_the_exit_code_of_status_follows_the_verdict_where_it_is_asked_for(
    state: str, operator: bool, code: int
):
    report = StatusReport(state=state, operator=operator)
    assert report.exit_code == 0
    report.follows_verdict = True
    assert report.exit_code == code


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_every_command_has_json(path: tuple[str, ...]):
    assert any("--json" in param.opts for param in COMMANDS[path].params)


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_every_help_has_an_example_and_whole_texts(path: tuple[str, ...]):
    command = COMMANDS[path]
    name = " ".join(path).replace("dlq", "dead-letters")  # its other name
    example = f"Example: frazil {name} "
    assert example in (command.help or "") or path == ("version",)
    texts = [command.help, *(getattr(param, "help", "") for param in command.params)]
    # Rich leaves out `[name]`, taken for a style, unless it is escaped.
    assert [text for text in texts if re.search(r"(?<!\\)\[[a-z]", text or "")] == []


def test_the_package_runs_as_a_module():
    ran = subprocess.run([sys.executable, "-m", "frazil", "--version"], capture_output=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, version("frazil").encode())


def test_frazil_alone_shows_its_help(capfd: Any, monkeypatch: pytest.MonkeyPatch):
    for words in ((), ("dead-letters",), ("offsets",)):
        code, out, err = says(capfd, monkeypatch, *words)
        assert code == 2
        assert "Usage" in out + err
        assert "frazil: \n" not in err


def test_the_version_is_printed(capfd: Any, monkeypatch: pytest.MonkeyPatch):
    _, version, _ = says(capfd, monkeypatch, "--version")
    assert says(capfd, monkeypatch, "version")[1] == version
    assert json.loads(says(capfd, monkeypatch, "version", "--json")[1]) == {
        "version": version.strip()
    }
    assert "--install-completion" in says(capfd, monkeypatch, "--help")[1]


def test_config_explain_names_the_origin_of_each_setting(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FRAZIL_SINK__UNAVAILABLE_TIMEOUT", "7s")
    path = str(_written(tmp_path))
    _, out, _ = says(capfd, monkeypatch, "config", "explain", path, "--json")
    explained = json.loads(out)
    assert explained["settings"]["sink"]["unavailable_timeout"] == "7s"
    for section, key, value, origin in (
        ("kafka", "isolation.level", "read_committed", "default of Frazil"),
        ("kafka", "enable.auto.commit", "false", "required by Frazil"),
        ("spark", "spark.sql.session.timeZone", "UTC", "default of Frazil"),
        ("catalog", "cache-enabled", "false", "default of Frazil"),
    ):
        assert explained["settings"][section][key] == value
        assert explained["origins"][section][key] == origin
    assert (
        explained["origins"]["sink"]["unavailable_timeout"]
        == "environment variable FRAZIL_SINK__UNAVAILABLE_TIMEOUT"
    )
    assert explained["origins"]["table 0"]["name"] == "sink.toml:14"
    assert explained["origins"]["sink"]["trigger"] == "default"
    assert explained["in_effect"]["sink"]["index_table"] == "shop.frazil_index"
    _, out, _ = says(capfd, monkeypatch, "config", "explain", path)
    assert 'name = "shop.orders"' in out
    assert "# sink.toml:14" in out
    assert 'snapshot_retention = ""' in out
    assert "# default: 1d and at most 1500 snapshots" in out, "what an empty default stands for"
    assert "# default: new tables keep 50 old metadata files" in out


def test_an_unknown_error_is_a_sentence_and_a_file(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("frazil.spark.session.session", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["frazil", "orphans", str(_written(tmp_path))])
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 1
    err = capfd.readouterr().err
    assert err.startswith("frazil: unexpected error: ZeroDivisionError: division by zero\n")
    assert "Traceback" not in err
    (file,) = tmp_path.glob("frazil-error-*.txt")
    assert str(file) in err
    assert "ZeroDivisionError" in file.read_text()


def test_nothing_is_cut_in_a_pipe(capfd: pytest.CaptureFixture[str]):
    topic, snapshot = "a-topic-with-a-long-name." * 8 + "[127]", "8744736658442914487"
    columns = ("partition", "snapshot", "more", "and more")
    output().print(text_table("x", columns, [(topic, snapshot, "y" * 80, "z" * 80)]))
    out = capfd.readouterr().out
    assert topic in out
    assert snapshot in out
    assert "…" not in out


def test_numbers_agree_with_their_nouns():
    assert [counted(n, "commit") for n in (0, 1, 2)] == ["0 commits", "1 commit", "2 commits"]
    assert counted(1, "batch", "batches") == "1 batch"


SPARK_SAID = """[STREAM_FAILED] Query terminated: An exception was raised by the Python Proxy.
Return Message: Traceback (most recent call last):
  File "py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
  File "frazil/sink.py", line 815, in _guarded_batch
    return self._batch(frame, number)
py4j.protocol.Py4JJavaError: An error occurred while calling o1.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 4 times
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "frazil/files/writer.py", line 480, in descriptor
    writer.write_table(rows)
pyarrow.lib.ArrowInvalid: Column 'x' is declared non-nullable but contains nulls

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
=== Streaming Query ===
Identifier: frazil-orders-1
Current Committed Offsets: {}
Logical Plan: WriteToMicroBatchDataSource"""


def test_the_cause_is_found_in_what_spark_says():
    expected = "pyarrow.lib.ArrowInvalid: Column 'x' is declared non-nullable but contains nulls"
    assert cause(SPARK_SAID) == expected
    error = translated(RuntimeError(SPARK_SAID))
    assert error.message.endswith(expected)
    assert "Logical Plan" not in str(error)
    assert error.detail == SPARK_SAID
    java = "first line\n\tat a.b\nCaused by: java.io.IOException: No space left\n\tat c.d"
    assert cause(java) == "java.io.IOException: No space left"
    assert cause("only a line") == "only a line"
    py4j = "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.\n"
    java = (
        ": org.apache.spark.SparkException: Could not parse Master URL: 'x'\n\tat a.B.c(B.java:1)"
    )
    assert cause(py4j + java) == "org.apache.spark.SparkException: Could not parse Master URL: 'x'"


@pytest.mark.parametrize("content", [b"\xff\xfe{", None], ids=["no UTF-8", "no path"])
def test_a_schema_file_that_is_no_text_is_named(tmp_path: Path, content: bytes | None):
    schema = tmp_path / "order.avsc"
    schema.write_bytes(content or b"")
    with pytest.raises(ConfigError, match="cannot read schema"):
        schema_sample.text_of(str(schema) if content else "a\0b")


def test_a_taken_port_of_metrics_is_an_error_before_spark_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "sink.toml"
    path.write_text(GOOD.format(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = says(capfd, monkeypatch, "run", str(path), "--metrics", where)
    assert code == 2
    assert f"frazil: cannot serve metrics at {where}: Address already in use" in err
    code, _, err = says(capfd, monkeypatch, "run", str(path), "--metrics", "http://x")
    assert code == 2
    assert "[metrics] address: expected HOST:PORT" in err
