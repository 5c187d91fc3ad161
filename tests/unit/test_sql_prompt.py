"""The prompt of `frazil sql`: what it completes, and how it is used on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frazil.sql.completion import complete
from frazil.sql.option_names import option_names
from frazil.sql.parser import keywords
from frazil.sql.statements import Create, key_of
from frazil.sql.tree_reader import read_statements

DEFINED = """
CREATE SECRET pass AS 'env:PASSWORD';
CREATE CONNECTION k TO KAFKA (BROKER 'b');
CREATE CONNECTION reg TO CONFLUENT SCHEMA REGISTRY (URL 'u');
CREATE CONNECTION cat TO ICEBERG CATALOG (TYPE 'rest', URI 'u');
CREATE CONNECTION aws_c TO AWS (REGION 'r');
CREATE VIEW big AS SELECT * FROM KAFKA CONNECTION k (TOPIC 'o') FORMAT JSON;
CREATE SINK orders FROM big TO ICEBERG CATALOG cat TABLE 'a.b';
"""
OBJECTS = {
    key_of(statement.definition): statement.definition
    for statement in read_statements(DEFINED)
    if isinstance(statement, Create)
}
SINK = "CREATE SINK s FROM big TO ICEBERG CATALOG cat TABLE 'a.b' "


def texts(text: str) -> set[str]:
    return {candidate.text for candidate in complete(text, OBJECTS).candidates}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", {"CREATE", "SHOW", "AUDIT"}),
        ("cre", {"CREATE"}),
        ("SHOW SINKS; al", {"ALTER"}),
        ("SHOW ", {"SINKS", "CONNECTIONS", "CREATE"}),
        ("START SINK ", {"orders"}),
        ("DROP SINK or", {"orders"}),
        ("VALIDATE CONNECTION ", {"k", "reg", "cat", "aws_c"}),
        ("CREATE VIEW v AS SELECT a, count(*) FROM ", {"KAFKA"}),
        ("CREATE VIEW v AS SELECT * FROM KAFKA CONNECTION ", {"k"}),
        ("CREATE SINK s FROM ", {"big", "KAFKA"}),
        ("CREATE SINK s FROM big TO ICEBERG CATALOG ", {"cat", "CONNECTION"}),
        (f"{SINK}USING AWS CONNECTION ", {"aws_c"}),
        (f"{SINK}MODE ", {"APPEND", "UPSERT", "CHANGELOG"}),
        (f"{SINK}PAR", {"PARTITION", "PARTITIONED"}),
        (f"{SINK}WITH (COMMIT IN", {"COMMIT INTERVAL"}),
        (f"{SINK}WITH (TRIGGER = '1s', completeness idle", {"COMPLETENESS IDLE TIMEOUT"}),
        (f"{SINK}WITH (ALLOW SHARED TOPICS = ", {"TRUE", "FALSE", "SECRET"}),
        ("CREATE CONNECTION x TO KAFKA (SASL PASSWORD SECRET ", {"pass"}),
        ("CREATE CONNECTION x TO KAFKA (SASL PASSWORD = SECRET ", {"pass"}),
        ("CREATE OR REPLACE CONNECTION x TO KAFKA (BRO", {"BROKER", "BROKERS"}),
        ("CREATE CONNECTION x TO ICEBERG CATALOG (TYPE = ", {"'rest'", "'glue'"}),
        ("CREATE CONNECTION x TO ICEBERG CATALOG (AWS CONNECTION ", {"aws_c"}),
        ("ALTER CONNECTION aws_c SET (REG", {"REGION"}),
        ("ALTER SINK orders RESET (MAX PENDING A", {"MAX PENDING AGE"}),
        ("ALTER SINK orders TABLE 'a.b' SET (FORM", {"FORMAT VERSION"}),
    ],
)
def test_what_fits_is_completed(typed: str, expected: set[str]):
    assert expected <= texts(typed)


def test_a_connection_of_another_type_is_not_offered():
    assert texts("CREATE SINK s FROM KAFKA CONNECTION ") == {"k"}
    assert not {"k", "reg"} & texts("CREATE SINK s FROM big TO ICEBERG CATALOG ")


def test_a_candidate_replaces_the_words_that_are_typed():
    completion = complete(f"{SINK}WITH (commit in", OBJECTS)
    assert completion.replaced == len("commit in")


def test_every_option_of_a_sink_is_offered_and_read():
    offered = texts(f"{SINK}WITH (")
    assert set(option_names(("sink", "table"))) <= offered


@pytest.mark.parametrize("typed", ["'open", "SHOW SINKS /* open", "SELECT ", "CREATE SINK (", "))"])
def test_nothing_is_offered_where_nothing_fits(typed: str):
    assert texts(typed) <= {"NAME"} | keywords()


class Terminal:
    """A real pseudo-terminal with the prompt in it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "TERM": "xterm"}
        environ |= {"PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frazil.cli.commands", "sql", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            cwd=folder,
            start_new_session=True,
        )
        os.close(slave)
        self._shown = ""

    def type(self, keys: str) -> None:
        self._shown = ""
        os.write(self._master, keys.encode())

    def shows(self, text: str) -> str:
        deadline = time.monotonic() + 20
        while text not in self._plain() and time.monotonic() < deadline:
            if not select.select([self._master], [], [], 0.2)[0]:
                continue
            try:
                self._shown += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        assert text in self._plain(), self._plain()
        return self._plain()

    def _plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", self._shown)

    def ends(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            os.close(self._master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    running = Terminal(tmp_path, "--definitions", "defs")
    running.shows("frazil>")
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def test_statements_of_several_lines_run_on_a_terminal(terminal: Terminal, tmp_path: Path):
    terminal.type("CREATE SECRET pass\r")
    terminal.shows("->")
    terminal.type("AS 'env:PASSWORD';\r")
    terminal.shows("secret pass: created")
    assert (tmp_path / "defs/secrets/pass.sql").read_text() == (
        "CREATE SECRET pass AS 'env:PASSWORD';\n"
    )
    terminal.type("CREATE SECRET other AS 'hunter2';\r")
    terminal.shows("the secret itself is written in the statement")
    terminal.type("show sec\t")
    terminal.shows("SECRETS")
    terminal.type(";\r")
    terminal.shows("env:PASSWORD")
    terminal.type("DROP SECRET pa\x03")  # Ctrl-C drops what is typed
    terminal.shows("frazil>")
    terminal.type("\x1b[A")  # arrow up: the statement before
    terminal.shows("SECRETS;")
    terminal.type("\x03")
    terminal.shows("frazil>")
    terminal.type("\x04")
    assert terminal.ends() == 0
    history = tmp_path / "state/frazil/sql_history"
    assert "hunter2" not in history.read_text()
    assert "CREATE SECRET other AS ***" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
