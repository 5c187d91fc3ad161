"""SQL with real servers: from a file of statements to rows in a table and their proof; definitions
that a team shares in a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from frazil.cli.sql_session import SqlSession
from frazil.config.model import Config
from frazil.errors import Conflict
from frazil.sql.definition_changes import apply
from frazil.sql.definition_files import DefinitionFiles, StoredTexts
from frazil.sql.definition_table import DefinitionTable
from frazil.sql.definitions import StoredDefinitions
from frazil.sql.tree_reader import read_statements
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact
from tests.system.streams import WITHIN, numbered, produce
from tests.system.test_service import Process

STATEMENTS = """
-- the whole way of one topic
CREATE SECRET password AS 'env:TEST_SQL_PASSWORD';
CREATE CONNECTION k TO KAFKA (BROKER '{bootstrap}');
CREATE CONNECTION lake TO ICEBERG CATALOG (TYPE 'jdbc', URI '{uri}', WAREHOUSE '{warehouse}',
  USER 'nobody', PASSWORD SECRET password, 'jdbc.schema-version' 'V1');
VALIDATE CONNECTION k;
VALIDATE CONNECTION lake;
CREATE SINK {name} FROM KAFKA CONNECTION k (TOPIC '{name}') FORMAT RAW
  TO ICEBERG CATALOG lake NAMESPACE 'db' TABLE '{name}'
  WITH (TRIGGER '50ms', COMMIT INTERVAL '0s', INDEX TABLE 'db.{name}_index');
STOP SINK {name};
"""


def frazil_sql(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "frazil.cli.commands", "sql", *words, "--json"]
    ended = subprocess.run(
        [*command, "--definitions", "defs"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        stdin=subprocess.DEVNULL,
    )
    reports = json.loads(ended.stdout)["statements"] if ended.stdout else []
    return ended.returncode, reports, ended.stderr


def execute(folder: Path, text: str) -> dict[str, Any]:
    """The same in this process."""
    session = SqlSession(DefinitionFiles(folder / "defs"), show_json=True)
    [statement] = read_statements(text)
    return dict(session.execute(statement).values)


def test_a_file_of_statements_becomes_rows_and_a_proof(
    broker: Broker, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_SQL_PASSWORD", "hunter2")
    lake = Lake(tmp_path / "lake")
    lake.folder.mkdir()
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(40), 2)
    catalog = lake.document(name, name, broker.bootstrap)["catalog"]
    (tmp_path / "orders.sql").write_text(
        STATEMENTS.format(
            name=name,
            bootstrap=broker.bootstrap,
            uri=catalog["uri"],
            warehouse=catalog["warehouse"],
        )
    )
    code, reports, err = frazil_sql(tmp_path, "orders.sql")
    assert (code, err) == (0, "")
    kafka, where = (r for r in reports if r["statement"] == "VALIDATE CONNECTION")
    assert "Kafka answers at" in kafka["findings"][0]["message"]
    assert "is made by the first start" in where["findings"][0]["message"]

    process = Process(tmp_path / "defs")
    try:
        execute(tmp_path, f"START SINK {name}")
        process.says(f"sink {name}: batch 0 committed: 40 rows")
        report = execute(tmp_path, f"ALTER SINK {name} SET (MAX PENDING BATCHES 7)")
        assert report["effects"] == [
            f"sink {name} continues without a restart: [sink] max_pending_batches changed",
            "the process that runs these definitions takes it over in seconds",
        ]
        process.says(f"sink {name}: [sink] max_pending_batches changed: in effect now")
        report = execute(tmp_path, f"ALTER SINK {name} SET (TRIGGER '60ms')")
        assert "restarts after its batch: [sink] trigger changed" in report["effects"][0]
        process.says(f"sink {name}: epoch 2")
        execute(tmp_path, f"STOP SINK {name}")
        process.says(f"sink {name}: stopping: sinks/{name}.sql stops it")
        produce(broker.bootstrap, name, numbered(10, 40), 2)
        execute(tmp_path, f"START SINK {name}")
        process.says("committed: 10 rows")
        code, reports, err = frazil_sql(
            tmp_path, "-c", f"VALIDATE CONNECTION lake; AUDIT SINK {name}; DESCRIBE SINK {name}"
        )
        assert code == 0, err
        validated, audited, described = reports
        assert validated["findings"][0]["message"] == "the jdbc catalog answers"
        assert audited["verdict"] == "proven"
        assert (described["state"], described["run_by_a_process"]) == ("running", True)
        execute(tmp_path, f"DROP SINK {name}")
        process.says(f"sinks/{name}.sql no longer defines it")
        code, _ = process.end()
    finally:
        process.kill()
    assert code == 0
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 50
    written = "".join(path.read_text() for path in (tmp_path / "defs").rglob("*.sql"))
    assert "hunter2" not in written + "".join(process.lines)


def shared(lake: Lake, name: str) -> DefinitionTable:
    config: Config = lake.config(name, name, "none:1")
    return DefinitionTable(f"db.{name}_definitions", config, lambda _: None)


def test_a_team_shares_definitions_in_a_table(
    spark: Any, lake: Lake, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_SQL_PASSWORD", "hunter2")
    text = STATEMENTS.format(name=name, bootstrap="b:1", uri="jdbc:sqlite:x", warehouse="/w")
    store = shared(lake, name)
    for statement in read_statements(text):
        if not hasattr(statement, "verb") or statement.verb == "stop":
            apply(store, statement)
    sinks = StoredDefinitions(shared(lake, name), os.environ).sinks()
    assert sinks[name].config is not None
    assert sinks[name].state == "stopped"
    rows = lake.query(f"db.{name}_definitions", "name, text", "ORDER BY name")
    assert [row[0] for row in rows] == [
        "connections/k.sql",
        "connections/lake.sql",
        "secrets/password.sql",
        f"sinks/{name}.sql",
    ]
    assert rows[2][1] == "CREATE SECRET password AS 'env:TEST_SQL_PASSWORD';\n"
    files = b"".join(
        path.read_bytes()
        for path in (lake.folder / "warehouse").rglob("*")
        if f"{name}_definitions" in str(path) and path.is_file()
    )
    assert files
    assert b"hunter2" not in files


def test_no_change_in_a_table_is_lost(spark: Any, lake: Lake, name: str):
    [first] = read_statements("CREATE SECRET first AS 'env:A'")
    apply(shared(lake, name), first)
    store = shared(lake, name)
    before = store.read()
    apply(shared(lake, name), read_statements("CREATE SECRET other AS 'env:B'")[0])
    with pytest.raises(Conflict, match="another process changed them"):
        store.write(before, {"x.sql": "CREATE SECRET x AS 'env:X';\n"})

    class Beaten(DefinitionTable):
        """Another writer commits between the look at the table and the commit."""

        beaten = False

        def _table(self) -> Any:
            table = super()._table()
            live = table.live

            def and_then() -> Any:
                state = live()
                if not self.beaten:
                    self.beaten = True
                    apply(shared(lake, name), read_statements("CREATE SECRET late AS 'env:L'")[0])
                return state

            table.live = and_then
            return table

    config = lake.config(name, name, "none:1")
    beaten = Beaten(f"db.{name}_definitions", config, lambda _: None)
    current: StoredTexts = beaten.read()
    with pytest.raises(Conflict, match="another process changed them"):
        beaten.write(current, {"x.sql": "CREATE SECRET x AS 'env:X';\n"})
    statements = [f"CREATE SECRET s{number} AS 'env:S'" for number in range(3)]
    threads = [
        threading.Thread(target=apply, args=(shared(lake, name), read_statements(text)[0]))
        for text in statements
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    names = set(shared(lake, name).read().texts)
    assert names == {f"secrets/{n}.sql" for n in ("first", "other", "late", "s0", "s1", "s2")}
