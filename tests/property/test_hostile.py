"""No raw exception reaches a user of the commands that only read, whatever they are given: files
that are no config, arguments that make no sense, metadata that is broken anywhere."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from frazil.cli import commands
from frazil.errors import OPERATOR, TRY_AGAIN, ConfigError, FrazilError, Unavailable
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.kafka import planner
from frazil.kafka.planner import TopicIdentity, Watermarks
from frazil.offsets import Cut
from frazil.spark import open_table
from tests.property.test_planted import lake

CODES = {0, 1, 2, 3, 4, OPERATOR, TRY_AGAIN}


def run(*arguments: str) -> tuple[int, str]:
    """The command as a shell starts it: exit code and standard error."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["frazil", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            commands.main()
    finally:
        sys.argv = before
    code = end.value.code
    assert isinstance(code, int), code
    assert code in CODES, code
    output = err.getvalue()
    assert "Traceback" not in output, output
    assert "is not one that Frazil knows" not in output, output
    if code in (1, 2, 4):
        assert "frazil: " in output, output
    return code, output


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes all checks comes to the session, and no further."""

    def refused(*_: Any, **__: Any) -> Any:
        raise Unavailable("cannot start Spark: not in this test")

    monkeypatch.setattr("frazil.spark.session.session", refused)


# ── files that are no config ─────────────────────────────────────────────────────────────────────

#: Commands, with what they need beside a config.
COMMANDS: list[tuple[str, ...]] = [
    ("audit", "{}", "--no-kafka"),
    ("locate", "{}", "t", "0", "0"),
    ("status", "{}"),
    ("offsets", "show", "{}"),
    ("completeness", "{}"),
    ("orphans", "{}"),
    ("dead-letters", "list", "{}"),
    ("index", "rebuild", "{}", "--dry-run"),
    ("rewind", "{}", "--to", "batch:1", "--dry-run"),
]
WELL = """
[sink]
id = "s"
topics = ["t"]
index_table = "db.index"
[kafka]
"bootstrap.servers" = "127.0.0.1:1"
[decode]
format = "raw"
[catalog]
type = "hadoop"
warehouse = "nowhere"
[[table]]
name = "db.t"
"""
NO_CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "zeros": b"\x00" * 100,
    "not text": b"\xff\xfe[sink]",
    "not toml": b"[sink\nid=",
    "json": b'{"sink": {"id": "s"}}',
    "a list": b"sink = [1, 2]",
    "numbers for texts": b"[sink]\nid = 5\ntopics = [1]\n[[table]]\nname = 7",
    "sections for values": b'[sink.id]\na = 1\n[table]\nname = "x"',
    "deep": b"a = " + b"[" * 5000 + b"]" * 5000,
    "long name": f'[sink]\nid = "{"x" * 100_000}"\ntopics = ["t"]'.encode(),
    "no table": WELL.partition("[[table]]")[0].encode(),
}


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(command[:2]) for command in COMMANDS])
def test_a_file_that_is_no_config_is_a_sentence(command: tuple[str, ...], tmp_path: Path):
    for name, content in NO_CONFIGS.items():
        path = tmp_path / f"{name.replace(' ', '-')}.toml"
        path.write_bytes(content)
        code, output = run(*(word.format(path) for word in command))
        assert code == 2, (name, output)
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / ("x" * 300 + ".toml")):
        code, output = run(*(word.format(path) for word in command))
        assert code == 2, (path, output)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────

NAMES = [
    "",
    ".",
    "..",
    "a.b.c.d",
    "db.",
    ".t",
    "db.'; DROP TABLE x",
    "db.t\x01",
    "é" * 300,
    "-",
    "db.t`",
    "s3://",
    "/",
    "file:///",
    "db/t",
    "%s",
    "{}",
    "db.${x}",
    "db.\ud800",
]
NUMBERS = [
    "-1",
    "0",
    "2147483647",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "x",
    "",
    "1e3",
    "0x10",
    "٣",
    "1" * 400,
]
TIMES = [
    "",
    "x",
    "2026-13-01",
    "2026-11-31T10",
    "9999-12-31T23",
    "0000-00-00",
    "2026-11-15T25",
    "99999-01-01",
    "2026-11-15T10:61",
    "-1",
    "batch:",
    "batch:x",
    "batch:-1",
    f"batch:{9**40}",
    "{}",
    "[]",
    '{"t": 5}',
    '{"t": {"x": 1}}',
    '{"t": {"0": -1}}',
    '{"t": {"0": 1.5}}',
    '{"t": {"0": 99999999999999999999}}',
    '{"t": null}',
    "{" * 2000,
    "null",
    "x" * 99,
    "2026-11-15T10:00:00Z",
    "1600-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00+23:59",
]
DURATIONS = ["", "x", "-1s", "1", "1y", "1e999s", "99999999999999999999d", "nan s", "0s"]


def arguments(config: str) -> Iterator[tuple[str, ...]]:
    catalogs = (
        "type=hadoop",
        "type=",
        "=",
        "type",
        "uri=x",
        "type=jdbc",
        "\x00=y",
        "type=sql",
        "uri=sqlite:////nowhere/x",
    )
    for name in NAMES:
        yield "audit", name, "--catalog", "type=hadoop", "--catalog", "warehouse=/nowhere"
        yield "audit", config, "--no-kafka", "--branch", name
        yield "locate", config, name, "0", "0"
        yield "locate", config, "t", "0", "0", "--table", name
        yield "dead-letters", "list", config, "--topic", name, "--kind", name, "--table", name
    for catalog in catalogs:
        yield "audit", "db.t", "--catalog", catalog, "--no-spark"
        yield "locate", "db.t", "t", "0", "0", "--catalog", catalog, "--no-spark"
    for number in NUMBERS:
        yield "locate", config, "t", number, "0"
        yield "locate", config, "t", "0", number
        yield "audit", config, "--no-kafka", "--max-lag", number
        yield "dead-letters", "list", config, "--limit", number, "--partition", number
        yield "dead-letters", "list", config, "--offsets", number
        yield "dead-letters", "list", config, "--offsets", f"{number}..{number}"
        yield "dead-letters", "list", config, "--offsets", f"{number}.."
    for moment in TIMES:
        yield "completeness", config, moment
        yield "rewind", config, "--to", moment, "--dry-run"
    for duration in DURATIONS:
        yield "audit", config, "--no-kafka", "--max-age", duration
        if not duration.startswith("999"):  # it would be waited for
            yield "completeness", config, "2026-11-15T10", "--wait", duration
        yield "orphans", config, "--older-than", duration
    yield "rewind", config, "--to", "batch:1"
    yield ("audit",)
    yield "audit", config, "--nonsense"
    yield ("nonsense",)


@pytest.fixture
def history(tmp_path: Path) -> Any:
    for attempt in range(20):
        made = lake.History(tmp_path / str(attempt), f"hostile {attempt}", real=False)
        if made.branch == "main" and made.feed == "ranges":
            return made.live(events=6)
    raise AssertionError("no such history")


class Kafka:
    """Answers for any topic; or does not."""

    error: Exception | None = None
    known = TopicIdentity()

    def origin(self) -> tuple[TopicIdentity, list[Any]]:
        if self.error:
            raise self.error
        return TopicIdentity("c1", {}), []

    def watermarks(self, _: Any, **__: Any) -> Watermarks:
        return Watermarks(Cut(), Cut())

    def require(self, *_: Any, **__: Any) -> None: ...

    def replaced(self, *_: Any, **__: Any) -> list[Any]:
        return []


@pytest.fixture
def world(history: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """A sink with tables and an index on disk; its config."""
    paths = history.save(complete=True)
    kafka = Kafka()
    monkeypatch.setattr(planner.Planner, "of", lambda *_, **__: kafka)
    monkeypatch.setattr(
        open_table,
        "opener",
        lambda *_, **__: (
            lambda name: ReadOnlyTable(name, paths[name], {}) if name in paths else None
        ),
    )
    text = WELL.replace('id = "s"', f'id = "{history.sink}"')
    names = [name for name in history.tables if name in history.names] or ["db.t"]
    text = text.replace('name = "db.t"', f'name = "{names[0]}"')
    path = tmp_path / "sink.toml"
    path.write_text(text)
    return paths, str(path)


def test_arguments_that_make_no_sense_are_sentences(world: tuple[Any, str]):
    failed = []
    for given in arguments(world[1]):
        try:
            run(*given)
        except BaseException as error:
            failed.append((given, repr(error)[:300]))
    assert failed == []


# ── what is broken in the store ──────────────────────────────────────────────────────────────────

READING: list[tuple[str, ...]] = [
    ("audit", "{}"),
    ("audit", "{}", "--json"),
    ("locate", "{}", "t", "0", "5"),
    ("offsets", "show", "{}"),
    ("completeness", "{}"),
    ("completeness", "{}", "2026-11-15T10"),
]
ODD = [None, -1, "x", [], {}, 2**70, True, 1.5, "", [None], {"a": None}, 2**63]


def spoiled(value: Any, r: random.Random) -> Any:
    """One place in a document has another value, or is gone."""
    if isinstance(value, dict) and value and r.random() < 0.93:
        key = r.choice(list(value))
        if r.random() < 0.2:
            return {name: value[name] for name in value if name != key}
        return {**value, key: spoiled(value[key], r)}
    if isinstance(value, list) and value and r.random() < 0.93:
        at = r.randrange(len(value))
        return [*value[:at], spoiled(value[at], r), *value[at + 1 :]]
    if isinstance(value, str) and value and r.random() < 0.5:
        at = r.randrange(len(value))
        return value[:at] + r.choice(["", "9", "}", "é", "-", value]) + value[at + 1 :]
    return r.choice(ODD)


def bytes_spoiled(raw: bytes, r: random.Random) -> bytes:
    at = r.randrange(len(raw))
    return r.choice(
        [
            raw[:at],
            raw[:at] + bytes([r.randrange(256)]) + raw[at + 1 :],
            raw[:at] + r.randbytes(8) + raw[at + 8 :],
            b"",
            raw + raw,
        ]
    )


def spoil(path: Path, r: random.Random) -> None:
    raw = path.read_bytes()
    if path.suffix == ".json":
        metadata = json.loads(raw)
        # Where a sink's entries are, most of the text is; elsewhere things must break, too.
        if metadata.get("snapshots") and r.random() < 0.5:
            at = r.randrange(len(metadata["snapshots"]))
            metadata["snapshots"][at] = spoiled(metadata["snapshots"][at], r)
        else:
            metadata = spoiled(metadata, r)
        path.write_text(json.dumps(metadata))
    else:
        path.write_bytes(bytes_spoiled(raw, r))


@pytest.mark.parametrize("seed", range(24))
def test_metadata_that_is_broken_anywhere_is_a_sentence(
    seed: int, world: tuple[Any, str], tmp_path: Path
):
    paths, config = world
    r = random.Random(f"hostile {seed}")
    files = [p for p in tmp_path.rglob("*") if p.suffix in (".json", ".avro", ".parquet")]
    chosen = r.choice([p for p in files if str(p) in paths.values()] if seed % 2 else files)
    spoil(chosen, r)
    failed = []
    for command in READING:
        try:
            run(*(word.format(config) for word in command))
        except BaseException as error:
            failed.append((chosen.name, command, repr(error)[:300]))
    assert failed == []


@pytest.mark.parametrize("error", [Unavailable("cannot list: no answer"), ConfigError("no topic")])
def test_a_broker_that_does_not_answer_is_a_sentence(
    world: tuple[Any, str], error: FrazilError, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Kafka, "error", error)
    code, output = run("offsets", "show", world[1])
    assert code == error.exit_code
    assert str(error) in output
    code, output = run("audit", world[1], "--kafka")
    assert code == error.exit_code
    assert "what waits in Kafka is not known" in run("audit", world[1])[1]
