"""A read before it touches a server: the view's name in SQL, options, and the user's function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from frazil.errors import ConfigError
from frazil.spark.datasource import _start, options_config
from frazil.spark.read import _by_python, _quoted

# ── the view `stream` in SQL ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("SELECT * FROM stream", "SELECT * FROM `stream`"),
        ("SELECT * FROM stream s WHERE s.x > 1", "SELECT * FROM `stream` s WHERE s.x > 1"),
        ("SELECT * FROM stream AS s", "SELECT * FROM `stream` AS s"),
        ("select x from\n\tstream\nwhere y.z = 1", "select x from\n\t`stream`\nwhere y.z = 1"),
        ("SELECT * FROM STREAM S", "SELECT * FROM `stream` S"),
        (
            "SELECT * FROM a JOIN stream s ON a.i = s.i",
            "SELECT * FROM a JOIN `stream` s ON a.i = s.i",
        ),
        (
            "SELECT * FROM db.a x, stream s WHERE x.i = s.i",
            "SELECT * FROM db.a x, `stream` s WHERE x.i = s.i",
        ),
        ("SELECT * FROM a,stream", "SELECT * FROM a,`stream`"),
        (
            "SELECT * FROM stream s JOIN db.t d ON s.i = d.i",
            "SELECT * FROM `stream` s JOIN db.t d ON s.i = d.i",
        ),
        (
            "SELECT * FROM stream JOIN lake.db.t USING (i)",
            "SELECT * FROM `stream` JOIN lake.db.t USING (i)",
        ),
        ("SELECT * FROM (SELECT * FROM stream)", "SELECT * FROM (SELECT * FROM `stream`)"),
        (
            "WITH s AS (SELECT * FROM stream) SELECT * FROM s",
            "WITH s AS (SELECT * FROM `stream`) SELECT * FROM s",
        ),
        ("SELECT * FROM stream LEFT JOIN stream b", "SELECT * FROM `stream` LEFT JOIN `stream` b"),
        ("SELECT 'it\\'s' FROM stream -- x", "SELECT 'it\\'s' FROM `stream` -- x"),
    ],
)
def test_the_view_is_quoted_in_place_of_a_table(given: str, expected: str):
    assert _quoted(given) == expected


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM `stream`",
        "SELECT * FROM STREAM(lake.db.t)",
        "SELECT * FROM stream (lake.db.t)",
        "SELECT * FROM STREAM lake.db.t",
        "SELECT * FROM stream\n  db.t s",
        "SELECT * FROM stream.t",
        "SELECT * FROM streams",
        "SELECT * FROM my_stream",
        "SELECT stream, a AS stream FROM t",
        "SELECT ' FROM stream s ' FROM t",
        "SELECT 'it\\'s from stream s' FROM t",
        'SELECT " from stream s " FROM t',
        "SELECT `from stream s` FROM t",
        "SELECT x -- from stream s\nFROM t",
        "SELECT x /* join stream s\n from stream */ FROM t",
    ],
)
def test_what_is_not_the_view_is_left_as_it_is(sql: str):
    assert _quoted(sql) == sql


# ── options ──────────────────────────────────────────────────────────────────────────────────

GIVEN = {
    "sink.topics": "orders,returns",
    "kafka.bootstrap.servers": "broker:9092",
    "decode.format": "raw",
}


def test_options_are_the_config_files_keys():
    config = options_config(
        {
            **GIVEN,
            "sink.max_records_per_trigger": "500",
            "start": "latest",
            "kafka.sasl.password": "env:SECRET",
        }
    )
    assert config.sink.topics == ("orders", "returns")
    assert config.sink.max_records_per_trigger == 500
    assert config.kafka == {"bootstrap.servers": "broker:9092", "sasl.password": "env:SECRET"}
    assert config.decode.format == "raw"


def test_a_registrys_settings_are_options_too():
    config = options_config(
        {
            **GIVEN,
            "decode.format": "confluent-avro",
            "decode.registry.url": "http://r:8081",
            "decode.registry.basic.auth.user.info": "env:R",
        }
    )
    assert config.decode.registry == {"url": "http://r:8081", "basic.auth.user.info": "env:R"}


TOML = """
[sink]
id = "orders"
topics = ["orders"]
max_records_per_trigger = 7
[kafka]
"bootstrap.servers" = "broker:9092"
[decode]
format = "avro"
schema = "row.avsc"
[[table]]
name = "shop.orders"
offset_column = "_at"
"""


def test_options_go_over_the_config_file_that_is_named(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(TOML)
    config = options_config(
        {"config": str(path), "sink.topics": "returns", "kafka.client.id": "reader"}
    )
    assert config.sink.topics == ("returns",)
    assert config.sink.max_records_per_trigger == 7
    assert config.kafka == {"bootstrap.servers": "broker:9092", "client.id": "reader"}
    assert config.decode.schema == str(tmp_path / "row.avsc"), "a path is meant from the file"
    assert config.tables[0].offset_column == "_at"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("topics", "cannot read option 'topics': expected config, start, end, or section.key"),
        ("path", "cannot read option 'path'"),
        ("sink.topic", "unknown key 'topic'; did you mean 'topics'"),
        ("sinks.topics", r"unknown section \[sinks\]; did you mean 'sink'"),
        ("decode.formatt", "unknown key 'formatt'; did you mean 'format'"),
    ],
)
def test_an_option_that_is_not_known_is_refused(option: str, words: str):
    with pytest.raises(ConfigError, match=words):
        options_config({**GIVEN, option: "x"})


@pytest.mark.parametrize(
    "option", ["kafka.sasl.password", "kafka.ssl.key.pem", "decode.registry.basic.auth.user.info"]
)
def test_a_secret_written_in_an_option_is_refused_and_not_repeated(option: str):
    with pytest.raises(ConfigError, match="a secret is written in the config") as refused:
        options_config({**GIVEN, option: "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_without_topics_or_servers_there_is_nothing_to_read():
    with pytest.raises(ConfigError, match="either topics or topic_pattern"):
        options_config({k: v for k, v in GIVEN.items() if k != "sink.topics"})
    with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
        options_config({k: v for k, v in GIVEN.items() if not k.startswith("kafka")})


def test_a_tables_settings_are_options_too(tmp_path: Path):
    """The names of the metadata columns are `[[table]]`'s."""
    config = options_config({**GIVEN, "table.offset_column": "_at"})
    assert config.tables[0].offset_column == "_at"
    path = tmp_path / "sink.toml"
    path.write_text(TOML)
    config = options_config({"config": str(path), "table.offset_column": "_there"})
    assert config.tables[0].offset_column == "_there"


def test_a_start_is_a_word_or_a_cut():
    assert _start("latest") == "latest"
    assert _start("") == ""
    assert _start('{"orders": {"0": 5}}') == {"orders": {"0": 5}}


# ── the user's function ──────────────────────────────────────────────────────────────────────


def loaded(folder: Path, text: str, function: str = "f", rows: Any = "rows") -> Any:
    path = folder / "mine.py"
    path.write_text(text)
    return _by_python(rows, f"{path}:{function}")


def test_a_function_of_a_file_beside_the_config_is_called_with_the_rows(tmp_path: Path):
    assert loaded(tmp_path, "def f(rows):\n    return rows.upper()\n") == "ROWS"


def test_each_file_is_read_again_and_two_are_not_mixed_up(tmp_path: Path):
    assert loaded(tmp_path, "def f(rows):\n    return 1\n") == 1
    other = tmp_path / "other"
    other.mkdir()
    assert loaded(other, "def f(rows):\n    return 2\n") == 2


def test_a_function_of_a_module_on_the_path_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "frazil_test_mine.py").write_text("def f(rows):\n    return rows * 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _by_python("ab", "frazil_test_mine:f") == "abab"  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "frazil_test_mine")


@pytest.mark.parametrize(
    ("text", "function", "words"),
    [
        ("x = 1", "f", "AttributeError: .*'f'"),
        ("def f(rows:\n", "f", "SyntaxError"),
        ("import no_such_module_at_all", "f", "ModuleNotFoundError: .*no_such_module_at_all"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, text: str, function: str, words: str
):
    named = r"cannot load \[transform\] python = .*mine\.py:"
    with pytest.raises(ConfigError, match=f"{named}.*{words}"):
        loaded(tmp_path, text, function)


def test_a_file_or_module_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gone\.py:f': FileNotFoundError"):
        _by_python(None, f"{tmp_path}/gone.py:f")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        _by_python(None, "no_such_module:f")  # type: ignore[arg-type]
