"""What each statement does to definitions, and what `frazil sql` reports of it."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.cli import commands
from frazil.errors import Conflict, Unavailable
from frazil.service.definitions import source_of
from frazil.sql.definition_changes import apply
from frazil.sql.definition_files import DefinitionFiles, StoredTexts
from frazil.sql.definitions import loaded, open_definitions
from frazil.sql.tree_reader import read_statements

BASE = """
CREATE SECRET pass AS 'env:PASSWORD';
CREATE CONNECTION k TO KAFKA (BROKER '127.0.0.1:1', SASL PASSWORD = SECRET pass);
CREATE CONNECTION cat TO ICEBERG CATALOG (TYPE 'jdbc', URI 'jdbc:sqlite:c.db', WAREHOUSE 'w');
CREATE VIEW v AS SELECT a FROM KAFKA CONNECTION k(TOPIC 'orders')FORMAT JSON(COLUMNS['a'=>'long']);
"""
SINK = "CREATE SINK s FROM v TO ICEBERG CATALOG cat NAMESPACE 'shop' TABLE 'orders'"

Frazil = Callable[..., tuple[int, str, str]]


@pytest.fixture
def frazil(capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Frazil:
    """`frazil sql` with these words, and a standard input."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["frazil", "sql", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            commands.main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run


def reports(out: str) -> list[dict[str, Any]]:
    return json.loads(out)["statements"]  # type: ignore[no-any-return]


def test_statements_of_a_file_are_kept_in_a_directory(frazil: Frazil, tmp_path: Path):
    Path("a.sql").write_text(f"{BASE}{SINK} WITH (COMMIT INTERVAL '20m');")
    code, out, err = frazil("a.sql", "--definitions", "defs")
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "sink s: created",
        "  sink s starts",
        "  no process runs these definitions: frazil run defs",
    ]
    assert list(open_definitions(tmp_path / "defs").sinks()) == ["s"]
    code, out, _ = frazil("-c", "SHOW SINKS", "--definitions", "defs", "--json")
    assert reports(out)[0]["rows"] == [
        {"name": "s", "from": "view v", "tables": "shop.orders", "state": "running", "problem": ""}
    ]


@pytest.mark.parametrize(
    ("statement", "effect"),
    [
        (
            "ALTER SINK s SET (COMMIT INTERVAL '2m')",
            "continues without a restart: [sink] commit_int",
        ),
        ("ALTER SINK s SET (TRIGGER '5s')", "restarts after its batch: [sink] trigger changed"),
        ("ALTER SINK s TABLE 'orders' SET (FORMAT VERSION 3)", "restarts after its batch: [[table"),
        ("ALTER CONNECTION k SET (CLIENT ID 'x')", "restarts after its batch: [kafka] client.id"),
        (
            "ALTER CONNECTION cat SET (WAREHOUSE 'x') FORCE",
            "continues as before if it runs: [catalog] war",
        ),
        ("ALTER SINK s RESET (PRIORITY)", "continues without a restart: [[table]] shop.orders pri"),
        ("DROP SINK s", "stops after its batch; its tables and their data stay"),
    ],
)
def test_a_change_says_what_it_means_for_a_running_sink(
    statement: str, effect: str, frazil: Frazil
):
    frazil("-c", f"{BASE}{SINK} WITH (PRIORITY 3)", "--definitions", "defs")
    with open_definitions("defs").watching():
        code, out, _ = frazil("-c", statement, "--definitions", "defs")
    assert code == 0
    assert f"sink s {effect}" in out
    assert "the process that runs these definitions takes it over in seconds" in out


@pytest.mark.parametrize(
    ("statement", "key"),
    [
        ("ALTER CONNECTION cat SET (WAREHOUSE 'x')", "[catalog] warehouse"),
        ("ALTER SINK s SET (INDEX TABLE 'shop.i')", "[sink] index_table"),
        (SINK.replace("CREATE", "CREATE OR REPLACE").replace("shop", "store"), "index_table"),
    ],
)
def test_a_change_that_leaves_the_ledger_behind_needs_a_word(
    statement: str, key: str, frazil: Frazil, tmp_path: Path
):
    frazil("-c", f"{BASE}{SINK}; STOP SINK s", "--definitions", "defs")
    before = DefinitionFiles(tmp_path / "defs").read()
    code, _, err = frazil("-c", statement, "--definitions", "defs")
    assert (code, DefinitionFiles(tmp_path / "defs").read()) == (2, before)
    assert f"{key} changed, and the ledger" in err
    assert "FORCE" in err
    forced = statement.replace("REPLACE", "REPLACE FORCE")
    forced += "" if forced != statement else " FORCE"
    code, out, _ = frazil("-c", f"START SINK s; {forced}", "--definitions", "defs")
    assert code == 0
    assert "continues as before if it runs" in out
    assert DefinitionFiles(tmp_path / "defs").read() != before


def test_the_log_of_a_process_is_not_a_sinks(frazil: Frazil):
    frazil("-c", f"{BASE}{SINK}", "--definitions", "defs")
    _, out, _ = frazil("-c", "ALTER SINK s SET (LOG LEVEL 'DEBUG')", "--definitions", "defs")
    assert "sink s continues: [log] level changed, and in a process of several sinks" in out


def test_start_and_stop_change_what_a_process_runs(frazil: Frazil):
    frazil("-c", f"{BASE}{SINK}", "--definitions", "defs")
    for statement, state in (("STOP SINK s", "stopped"), ("START SINK s", "running")):
        for result in (f"defined as {state}", f"defined as {state} before"):
            code, out, _ = frazil("-c", statement, "--definitions", "defs", "--json")
            assert (code, reports(out)[0]["result"]) == (0, result)
            assert open_definitions("defs").sinks()["s"].state == state


def test_only_the_statement_that_changes_is_written_again(tmp_path: Path):
    store = DefinitionFiles(tmp_path)
    text = f"-- ours\n{BASE}-- the sink\n{SINK};\n/* more; */\nSTOP SINK s ;\n-- end"
    (tmp_path / "all.sql").write_text(text)
    changes = """START SINK s; ALTER SINK s SET (TRIGGER '5s'); CREATE SECRET other AS 'env:O';
    DROP SINK s"""
    texts = []
    for statement in read_statements(changes):
        apply(store, statement)
        texts.append((tmp_path / "all.sql").read_text())
    assert texts[0] == text.replace("STOP SINK s ;\n", "")
    before, _, behind = texts[0].partition(SINK)
    assert texts[1].startswith(f"{before}CREATE SINK s\nFROM v\n")
    assert texts[1].endswith(f"TRIGGER = '5s'\n){behind}")
    assert texts[2] == texts[1]
    assert (tmp_path / "secrets/other.sql").read_text() == "CREATE SECRET other AS 'env:O';\n"
    assert texts[3] == f"{before}/* more; */\n-- end"


def test_a_file_of_its_own_goes_with_its_object(frazil: Frazil, tmp_path: Path):
    frazil("-c", f"{BASE}{SINK}; STOP SINK s", "--definitions", "defs")
    assert (tmp_path / "defs/sinks/s.sql").read_text().endswith("\nSTOP SINK s;\n")
    frazil("-c", "DROP SINK s; DROP VIEW v", "--definitions", "defs")
    names = {path.name for path in (tmp_path / "defs").rglob("*.sql")}
    assert names == {"pass.sql", "k.sql", "cat.sql"}


def test_a_statement_is_applied_to_what_others_made_meanwhile(tmp_path: Path):
    class Busy(DefinitionFiles):
        """Another process writes a secret before each of the first three writes."""

        left = 3

        def write(self, before: StoredTexts, texts: Any) -> None:
            if self.left:
                self.left -= 1
                name = f"s{self.left}"
                super().write(before, {f"{name}.sql": f"CREATE SECRET {name} AS 'env:X'"})
                raise Conflict("cannot change definitions: another process changed them")
            assert self.read().version == before.version
            super().write(before, texts)

    store = Busy(tmp_path)
    for statement in read_statements("CREATE SECRET mine AS 'env:MINE'"):
        apply(store, statement)
    assert {name for _, name in loaded(store.read()).objects} == {"s0", "s1", "s2", "mine"}


def test_a_text_with_an_error_anywhere_changes_nothing(frazil: Frazil, tmp_path: Path):
    code, out, err = frazil("-c", f"{BASE}{SINK}; SHOW SNIKS", "--definitions", "defs")
    assert (code, out) == (2, "")
    assert "-c 1:6:" in err
    assert "did you mean SINKS?" in err
    assert not (tmp_path / "defs").exists()


def test_the_first_statement_that_fails_is_the_last(frazil: Frazil):
    text = f"{BASE}VALIDATE CONNECTION k; SHOW SINKS; SHOW VIEWS".encode()
    code, out, err = frazil("--json", stdin=text)
    assert code == 2  # a secret that is not there
    assert [report["statement"] for report in reports(out)][-1] == "VALIDATE CONNECTION"
    assert "PASSWORD is not set" in out
    assert err == "2 statements not executed\n"
    code, out, err = frazil("-", "--json", stdin=b"DROP SINK x; SHOW SINKS")
    assert (code, reports(out)) == (2, [])
    assert "standard input:1:1: there is no sink x" in err
    assert "1 statement not executed" in err


def test_a_definition_that_cannot_be_read_is_shown_beside_the_others(
    frazil: Frazil, tmp_path: Path
):
    frazil("-c", f"{BASE}{SINK}", "--definitions", "defs")
    (tmp_path / "defs/views/v.sql").write_text("CREATE VIEW v AS")
    code, out, _ = frazil("-c", "SHOW SINKS", "--definitions", "defs", "--json")
    assert code == 0
    assert reports(out)[0]["rows"][0]["state"] == "error"
    assert "views/v.sql:1:17: expected" in reports(out)[0]["problems"]["views/v.sql"]
    code, _, err = frazil("-c", "EXPLAIN SINK s", "--definitions", "defs")
    assert code == 2
    assert "hint: these cannot be read: views/v.sql" in err
    code, _, err = frazil("-c", "CREATE SECRET t AS 'env:T'", "--definitions", "defs")
    assert (code, err) == (0, "")
    code, _, err = frazil("-c", f"{BASE.splitlines()[-1]}", "--definitions", "defs")
    assert code == 2
    assert "views/v.sql:1:17" in err


def test_everything_can_be_shown(frazil: Frazil):
    text = """SHOW SECRETS; SHOW CONNECTIONS; SHOW VIEWS; SHOW CREATE SECRET pass;
    SHOW CREATE CONNECTION k; SHOW CREATE VIEW v; SHOW CREATE SINK s; DESCRIBE SINK s;
    EXPLAIN SINK s"""
    code, out, _ = frazil("-c", f"{BASE}{SINK}; {text}", "--json")
    assert code == 0
    secrets, connections, views, *creates, describe, explain = reports(out)[5:]
    assert secrets["rows"] == [{"name": "pass", "reference": "env:PASSWORD", "used by": "k"}]
    assert [row["address"] for row in connections["rows"]] == ["jdbc:sqlite:c.db", "127.0.0.1:1"]
    assert views["rows"][0]["query"] == "none: columns as they are"
    definitions = "".join(report["sql"] for report in creates)
    assert len(read_statements(definitions)) == 4
    assert describe["tables"][0]["name"] == "shop.orders"
    assert explain["path"].startswith("Kafka")
    assert explain["settings"]["table 0"]["select"] == ["a"]
    assert explain["origins"]["sink"]["topics"].startswith("-c 1:5:")
    assert explain["origins"]["kafka"]["bootstrap.servers"].startswith("-c 1:3:")
    assert explain["origins"]["catalog"]["name"].startswith("-c 1:4:")


def test_a_process_runs_what_a_directory_defines_and_a_file_names_its_sink(
    frazil: Frazil, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    frazil("-c", f"{BASE}{SINK}", "--definitions", "defs")
    words = ["frazil", "config", "explain", "defs/sinks/s.sql", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 0
    assert json.loads(capfd.readouterr().out)["settings"]["sink"]["id"] == "s"


def test_a_file_of_statements_is_checked(
    frazil: Frazil, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    Path("a.sql").write_text(f"{BASE}{SINK} WITH (CHECKPOINT LOCATION 'c');")
    Path("b.sql").write_text(f"{BASE}{SINK} WITH (TRIGGER 'no');")
    for name, code, place in (("a.sql", 2, "(a.sql:3:69)"), ("b.sql", 2, "b.sql:6:")):
        monkeypatch.setattr(sys, "argv", ["frazil", "check", name, "--timeout", "1s"])
        with pytest.raises(SystemExit) as end:
            commands.main()
        out = capfd.readouterr().out
        assert (end.value.code, place in out) == (code, True), out


def test_a_store_of_statements_is_what_a_service_runs(tmp_path: Path):
    store = DefinitionFiles(tmp_path)
    for statement in read_statements(f"{BASE}{SINK}; STOP SINK s"):
        apply(store, statement)
    source = source_of([store])
    sink = source.read().sinks["s"]
    assert (sink.config.sink.id, sink.running, sink.origin) == ("s", False, "sinks/s.sql")
    apply(store, read_statements("START SINK s")[0])
    source.read()
    assert source.read().sinks["s"].running, "what two looks have seen"


def test_a_store_that_is_away_takes_nothing_away(tmp_path: Path):
    class Away(DefinitionFiles):
        away = False

        def read(self) -> StoredTexts:
            if self.away:
                raise Unavailable("cannot open the catalog: it is away")
            return super().read()

    store = Away(tmp_path)
    for statement in read_statements(f"{BASE}{SINK}"):
        apply(store, statement)
    source = source_of([store])
    sink = source.read().sinks["s"]
    store.away = True
    look = source.read()
    assert look.sinks == {}
    assert look.keeps(sink)


def test_without_a_directory_every_statement_says_that_it_is_gone(frazil: Frazil):
    code, out, _ = frazil("-c", f"{BASE}{SINK}")
    assert (code, out.count("kept for this command only: --definitions DIR")) == (0, 5)
    code, _, err = frazil("-c", f"{BASE}{SINK}; START SINK s")
    assert code == 2
    assert "hint: frazil sql … --definitions DIR keeps them" in err


def test_a_directory_that_is_not_there_is_not_shown_as_empty(frazil: Frazil):
    code, _, err = frazil("-c", "SHOW SINKS", "--definitions", "typo")
    assert (code, "there is no directory typo" in err) == (2, True)
    assert not Path("typo").exists()


def test_a_stopped_sink_says_that_it_stays_so(frazil: Frazil):
    frazil("-c", f"{BASE}{SINK}; STOP SINK s", "--definitions", "defs")
    _, out, _ = frazil("-c", "ALTER SINK s SET (TRIGGER '5s')", "--definitions", "defs")
    assert "sink s stays stopped: START SINK s runs it" in out


def test_a_file_that_stops_its_sink_is_not_run(
    capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "one.sql"
    file.write_text(f"{BASE}{SINK}; STOP SINK s")
    monkeypatch.setattr(sys, "argv", ["frazil", "run", str(file)])
    with pytest.raises(SystemExit):
        commands.main()
    assert "STOP SINK says that sink s is not to run" in capfd.readouterr().err


def test_a_file_that_stops_a_ghost_is_a_problem(tmp_path: Path):
    store = DefinitionFiles(tmp_path, create=True)
    for statement in read_statements(f"{BASE}{SINK}"):
        apply(store, statement)
    (tmp_path / "more.sql").write_text("STOP SINK ghost;")
    made = loaded(store.read())
    assert list(made.errors) == ["more.sql"]
    assert ("sink", "s") in made.objects


def test_a_hundred_sinks_take_two_seconds(tmp_path: Path):
    store = DefinitionFiles(tmp_path, create=True)
    sinks = (SINK.replace("SINK s", f"SINK s{number}") for number in range(100))
    statements = read_statements(f"{BASE}{'; '.join(sinks)}")
    began = time.process_time()
    for statement in statements:
        apply(store, statement)
    assert time.process_time() - began < 2
    assert len(loaded(store.read()).objects) == 104


def test_a_connection_is_validated_with_line_and_brackets(frazil: Frazil, tmp_path: Path):
    Path("w").mkdir()
    text = """CREATE CONNECTION h TO ICEBERG CATALOG (TYPE 'hadoop', WAREHOUSE '{}');
    VALIDATE CONNECTION h"""
    code, out, _ = frazil("-c", text.format("gone[hive]"))
    assert (code, "?" in out) == (0, True)
    assert "there is no folder gone[hive]: the first table makes it (-c 1:1:" in out
    code, out, _ = frazil("-c", text.format("w"))
    assert "the hadoop catalog answers" in out


def test_a_folder_that_is_not_there_is_named(capfd: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["frazil", "run", "sinks_that_are_not_there"])
    with pytest.raises(SystemExit):
        commands.main()
    err = capfd.readouterr().err
    assert "there is no such file or folder" in err
    assert "frazil sql FILE --definitions sinks_that_are_not_there" in err
