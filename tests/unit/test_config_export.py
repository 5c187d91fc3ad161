"""SQL and TOML say the same config, and `frazil config export` turns each into the other."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frazil.cli import commands
from frazil.config.model import Config, from_document
from frazil.config.sections import (
    CompletenessConfig,
    DeadLettersConfig,
    HealthConfig,
    LogConfig,
    MetricsConfig,
    NotifyConfig,
    SinkConfig,
    TableConfig,
)
from frazil.config.serializer import document_of
from frazil.errors import ConfigError
from frazil.sql.definitions import config_of_file
from frazil.sql.export import sql_of
from tests.oracle import Lake

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "sink": {"id": "orders", "topics": ["orders"]},
    "kafka": {"bootstrap.servers": "b:9092"},
    "decode": {"format": "json"},
    "catalog": {"type": "hadoop", "warehouse": "/w"},
    "table": [{"name": "shop.orders"}],
}


def documents() -> dict[str, dict[str, Any]]:
    """Every config in the docs, the examples, the recipes and the tests."""
    made: dict[str, dict[str, Any]] = {}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)):
            made[f"{page.relative_to(ROOT)}-{number}"] = tomllib.loads(block)
    for path in [*ROOT.rglob("examples/*.toml"), *ROOT.rglob("deploy/**/*.toml")]:
        made[str(path.relative_to(ROOT))] = tomllib.loads(path.read_text())
    for path in (ROOT / "deploy").rglob("*.yaml"):
        for number, block in enumerate(
            re.findall(r"\.toml: \|\n((?: {4}.*\n|\n)+)", path.read_text())
        ):
            text = "\n".join(line[4:] for line in block.splitlines())
            made[f"{path.relative_to(ROOT)}-{number}"] = tomllib.loads(text)
    texts = (path for path in (ROOT / "tests").rglob("*.py"))
    for path in texts:
        for number, block in enumerate(
            re.findall(r'"""\n(\[sink\]\n.*?)"""', path.read_text(), re.S)
        ):
            try:
                made[f"{path.relative_to(ROOT)}-{number}"] = tomllib.loads(block)
            except tomllib.TOMLDecodeError:
                continue  # with something wrong in it, or a field to be filled in
    names = {field.name.removesuffix("s") for field in dataclasses.fields(Config)}
    whole = {name for name in made if {key.removesuffix("s") for key in made[name]} <= names}
    return {name: made[name] for name in made if name in whole and "{0}" not in str(made[name])}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """A part of a config, as the docs show it, with what is missing."""
    merged = {**BASE, **document}
    for section in ("sink", "kafka", "catalog", "decode"):
        patterns = "topic_pattern" in document.get("sink", {}) or any(
            "pattern" in route for route in document.get("route", [])
        )
        if section == "sink" and patterns:
            given = document.get("sink", {})
            merged["sink"] = {"id": "orders", "topic_pattern": ".*", **given}
            if "topics" in given:
                del merged["sink"]["topic_pattern"]
        else:
            merged[section] = {**BASE[section], **document.get(section, {})}
    tables = [{"name": "shop.orders", **table} for table in merged["table"]]
    names = {table["name"] for table in tables}
    routed = [name for route in merged.get("route", []) for name in route.get("to", [])]
    others = [{"name": name} for name in dict.fromkeys(routed) if name not in names]
    return {**merged, "table": [*tables, *others]}


DOCUMENTS = documents()


def test_configs_are_there():
    assert len(DOCUMENTS) > 25
    assert any(name.startswith("deploy") for name in DOCUMENTS)
    assert any(name.startswith("tests") for name in DOCUMENTS)


def assert_same(config: Config) -> None:
    text = sql_of(config)  # it reads the text again, and compares
    assert text.count("CREATE SINK") == 1
    again = from_document(tomllib.loads(tomli_w.dumps(document_of(config))))
    assert again == config


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_config_of_docs_examples_recipes_and_tests_is_the_same_in_both(name: str):
    assert_same(from_document(complete(DOCUMENTS[name])))


def test_the_configs_of_the_system_tests_are_the_same_in_both(tmp_path: Path):
    sections: list[dict[str, Any]] = [
        {},
        {"decode": {"format": "confluent-avro", "registry": {"url": "http://r"}}},
        {"table": {"mode": "upsert", "key": ["id"]}, "decode": {"format": "json"}},
        {"transform": {"sql": "SELECT a FROM stream WHERE b > 5"}},
        {"transform": {"sql": "SELECT s.a FROM stream s JOIN stream t ON s.a = t.a"}},
        {"transform": {"python": "module:function"}},
        {"sink": {"starting_offsets": {"a.b": {"0": 5}}}},
        {"dead_letters": {"table": "db.dead", "max_count": 7}},
    ]
    for given_sections in sections:
        assert_same(Lake(tmp_path).config("s", "t", "b:1", **given_sections))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("kafka", "sasl.password", "env:KAFKA_PASSWORD"),
        ("kafka", "ssl.key.password", "file:/run/secrets/key"),
        ("decode", "registry", {"url": "http://r", "basic.auth.user.info": "me:env:PASSWORD"}),
        ("decode", "registry", {"url": "http://r", "basic.auth.user.info": "env:PAIR"}),
        ("catalog", "credential", "env:CREDENTIAL"),
        ("catalog", "header.X-Some.Thing", "it's"),
        ("catalog", "name", "Some-Catalog"),
        ("catalog", "name", "cluster"),
        ("spark", "spark.ui.enabled", "false"),
        ("notify", "webhook", "env:HOOK"),
        ("notify", "headers", {"Authorization": "env:TOKEN", "X-Team": "shop"}),
        ("sink", "id", "An-Id.of_all"),
        ("table", "select", ["id", "mask(email) as e", "* except (ssn)"]),
    ],
)
def test_references_and_odd_names_are_the_same_in_both(section: str, key: str, value: Any):
    document = complete({})
    where = document["table"][0] if section == "table" else document.setdefault(section, {})
    if section == "decode":
        where["format"] = "confluent-avro"
    if section == "notify":
        where["command"] = ["true"]
    where[key] = value
    config = from_document(document)
    assert_same(config)
    if key not in ("webhook", "header.X-Some.Thing"):
        assert "env:" not in sql_of(config).partition("CREATE CONNECTION")[2]


def values_of(kind: str) -> st.SearchStrategy[Any]:
    word = st.text(st.sampled_from("abzé'\"._- \\\n;(%${}"), min_size=1, max_size=8)
    if kind == "bool":
        return st.booleans()
    if kind == "int":
        return st.integers(0, 2**40)
    if kind == "float":
        return st.floats(0, 1, allow_subnormal=False)
    if kind.startswith("tuple"):
        return st.lists(word, max_size=3)
    if kind.startswith("dict"):
        return st.dictionaries(word, word, max_size=3)
    durations = st.sampled_from(["1s", "5m", "3d", "1GiB", "never", "auto", "latest", "upsert"])
    return st.one_of(word, durations)


SECTIONS: dict[str, Any] = {
    "sink": SinkConfig,
    "table": TableConfig,
    "dead_letters": DeadLettersConfig,
    "completeness": CompletenessConfig,
    "metrics": MetricsConfig,
    "health": HealthConfig,
    "log": LogConfig,
    "notify": NotifyConfig,
}
FIELDS = [
    (section, field.name, str(field.type))
    for section, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
    if (section, field.name) not in (("sink", "id"), ("table", "name"))
]
CHANGES = st.lists(
    st.sampled_from(FIELDS).flatmap(
        lambda field: st.tuples(st.just(field[0]), st.just(field[1]), values_of(field[2]))
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHANGES, st.dictionaries(st.text("ab.-_' ", min_size=1, max_size=6), st.text(max_size=9)))
def test_any_config_is_the_same_in_both(
    changes: list[tuple[str, str, Any]], passed: dict[str, str]
):
    """Of the values that the checks of a config take: each changed key by itself, and all."""
    document = json.loads(json.dumps(complete({"kafka": passed, "spark": passed})))
    for section, key, value in changes:
        where = document["table"][0] if section == "table" else document.setdefault(section, {})
        before = where.get(key)
        where[key] = value
        try:
            from_document(document)
        except ConfigError:
            where.pop(key)
            if before is not None:
                where[key] = before
    try:
        config = from_document(document)
    except ConfigError:
        return
    assert_same(config)


EXAMPLES: list[Any] = [
    True,
    5,
    "5s",
    "1GiB",
    "a",
    ["a"],
    {"a": "long"},
    0.25,
    "json",
    "INFO",
    "env",
]
EXAMPLES += [
    ["failed"],
    "db.a",
    {"orders": {"0": 5}},
    "librdkafka",
    "upsert",
    "reject",
    "snappy",
    "string",
]
EXAMPLES += [3, "DEBUG", "http://127.0.0.1/hook", "127.0.0.1:9464"]
UPSERT = {"mode": "upsert", "key": ["a"]}


def test_every_setting_is_said_by_some_config():
    """Else the test above may leave one out."""
    unsaid = set()
    for section, key, _ in FIELDS:
        said_by = [value for value in EXAMPLES if _same(section, key, value)]
        if not said_by:
            unsaid.add(key)
    assert sorted(unsaid) == []


def _same(section: str, key: str, value: Any) -> bool:
    """Whether some config has this value, and then it is the same in both."""
    for others in ({}, UPSERT, {"key_column": "k"}):
        document = complete({"decode": {"key_format": "json", "key_columns": {"a": "long"}}})
        where = document["table"][0] if section == "table" else document.setdefault(section, {})
        where |= (others if section == "table" else {}) | {key: value}
        if key == "topic_pattern":
            where.pop("topics")
        try:
            config = from_document(document)
        except ConfigError:
            continue
        assert_same(config)
        return key in str(document_of(config))
    return False


def run(capfd: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["frazil", "config", "export", *words])
    with pytest.raises(SystemExit) as end:
        commands.main()
    out, err = capfd.readouterr()
    return int(end.value.code or 0), out, err


def test_a_file_is_exported_and_back(capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    Path("orders.toml").write_text(tomli_w.dumps(complete({"decode": {"schema": "a.avsc"}})))
    monkeypatch.setenv("FRAZIL_SINK__TRIGGER", "9s")
    code, sql, _ = run(capfd, monkeypatch, "orders.toml")
    assert (code, "9s" in sql) == (0, False)
    Path("orders.sql").write_text(sql)
    code, text, _ = run(capfd, monkeypatch, "orders.sql")
    assert code == 0
    document = tomllib.loads(text)
    assert document["decode"]["schema"] == str(tmp_path / "a.avsc")
    assert from_document(document) == config_of_file(tmp_path / "orders.sql", "", {})[0]
    report = json.loads(run(capfd, monkeypatch, "orders.toml", "--toml", "--json")[1])
    assert report == {"sink": "orders", "language": "toml", "text": text}


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [("catalog", "user", "me", "user"), ("catalog", "aws-connection", "x", "expected")],
)
def test_what_sql_cannot_say_is_named_and_not_left_out(
    section: str,
    key: str,
    value: str,
    named: str,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    document = complete({})
    document[section][key] = value
    path = tmp_path / "sink.toml"
    path.write_text(tomli_w.dumps(document))
    code, out, err = run(capfd, monkeypatch, str(path), "--sql")
    assert (code, out) == (2, "")
    assert "cannot write the config as SQL: " in err
    assert named in err
