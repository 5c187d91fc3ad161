"""Before a sink runs: every error of a config, plans in memory, the order of findings."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from frazil.cli import commands
from frazil.config.error_list import every_error
from frazil.config.model import load
from frazil.errors import ConfigError, Fatal
from frazil.iceberg.file_io import FileStore
from frazil.iceberg.memory_table import MemoryCatalog, updated
from frazil.iceberg.table import SchemaUpdate
from frazil.monitoring import process_health
from frazil.monitoring.http import MonitoringServer
from frazil.monitoring.sink_health import SinkHealth
from frazil.ops.check import Check, CheckOptions, setting_of, side_by_side
from frazil.ops.check_machine import machine_findings
from frazil.ops.config_proposal import Wishes, new_config, write_new
from frazil.ops.findings import AREAS, CheckFinding, CheckReport
from frazil.ops.topic_sample import TopicSample, _Shape
from frazil.render import output, show
from frazil.spark.open_table import opener

TEN = """[sink]
id = "bad id!"
topics = ["or ders"]
trigger = "continuous"
[kafka]
"bootstrap.servers" = "127.0.0.1:1"
"sasl.password" = "hunter2"
[decode]
format = "jsn"
[catalog]
type = "resst"
uri = "http://127.0.0.1:1"
[[table]]
name = "shop.orders"
mod = "upsert"
key = ["id"]
[[table]]
name = "shop.users"
partition_by = ["dya(x)"]
compression = "zst"
[[route]]
to = ["shop.users"]
[dead_letters]
tabel = "shop.dead"
max_fraction = 3
[metrocs]
x = 1
"""
#: The lines of the errors in it.
LINES = [2, 3, 4, 7, 9, 11, 15, 19, 20, 24, 25, 26]


def test_every_error_of_a_config_is_listed_once_with_its_line(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(TEN)
    errors = every_error(path, {"FRAZIL_SINK__A__B": "1"})
    assert "FRAZIL_SINK__A__B" in errors.errors[0].message
    lines = [int(errors.location(*e.path).rpartition(":")[2]) for e in errors.errors[1:]]
    assert sorted(lines) == LINES
    assert "hunter2" not in str(errors.errors)
    # What is left is a config, in which nothing of a section with an error is tried out.
    assert errors.config is not None
    assert {"sink", "kafka", "decode", "catalog", "table", "dead_letters"} <= errors.sections


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["there is no [sink]"]),
        ("x = [", ["not TOML"]),
        (
            '[sink]\nid = "a"\ntopics = ["t"]\n[kafka]\nx = 1',
            ["bootstrap.servers", "neither [decode] schema", "expected a table", "no [catalog]"],
        ),
        ('[sink]\nid = ""\ntopics = []', ["sink id", "topics"]),
        ("[[table]]\n[[table]]\n[[table]]", ["'name' is missing"] * 3),
        ("sink = 1", ["[sink]"]),
    ],
)
def test_a_broken_config_ends_in_sentences(tmp_path: Path, text: str, expected: list[str]):
    path = tmp_path / "sink.toml"
    path.write_text(text)
    messages = [error.message for error in every_error(path, {}).errors]
    for fact in expected:
        assert sum(fact in message for message in messages) >= expected.count(fact), messages


def test_a_wrong_word_does_not_make_its_consequence_an_error(tmp_path: Path):
    """Without its mode the table would have a key for nothing."""
    path = tmp_path / "sink.toml"
    good = '[sink]\nid = "a"\ntopics = ["t"]\n[kafka]\n"bootstrap.servers" = "b:1"\n[decode]\n'
    good += 'format = "json"\n[catalog]\ntype = "hadoop"\nwarehouse = "/x"\n[[table]]\n'
    for mode in ("upsrt", "qqqqqq"):
        path.write_text(good + f'name = "a.b"\nmode = "{mode}"\nkey = ["id"]')
        assert [error.path for error in every_error(path, {}).errors] == [("table", "0", "mode")]


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ('format = "json"', 'format = "jsn"\ncolumns = {id = "long"}', [("decode", "format")]),
        ('type = "hadoop"\nwarehouse = "/x"', 'type = "resst"', [("catalog", "type")]),
        ('type = "hadoop"\nwarehouse = "/x"', 'type = ["rest"]', [("catalog", "type")]),
        ('topics = ["t"]', 'topics = ["t"]\ntopic_pattern = "t"', [("sink", "topic_pattern")]),
        ('name = "a.b"', 'name = "a.b"\n[[table]]\nname = "a.c"', [("table", "1")]),
        ('name = "a.b"', 'nam = "a.b"', [("table", "0", "nam")]),
        ('id = "a"', 'idd = "a"', [("sink", "idd")]),
        ('name = "a.b"', 'name = "a.b"\nmodee = "upsert"\nkey = ["id"]', [("table", "0", "modee")]),
        (
            'name = "a.b"',
            'name = "a.b"\nkey_column_type = "string"',
            [("table", "0", "key_column_type")],
        ),
        ("[catalog]", "[catalogg]", [("catalogg",)]),
    ],
)
def test_one_error_is_listed_as_one(
    old: str, new: str, paths: list[tuple[str, ...]], tmp_path: Path
):
    path = tmp_path / "sink.toml"
    good = '[sink]\nid = "a"\ntopics = ["t"]\n[kafka]\n"bootstrap.servers" = "b:1"\n[decode]\n'
    good += 'format = "json"\n[catalog]\ntype = "hadoop"\nwarehouse = "/x"\n[[table]]\nname = "a.b"'
    path.write_text(good.replace(old, new))
    errors = every_error(path, {}).errors
    assert [error.path for error in errors] == paths, [error.message for error in errors]


def test_a_config_with_errors_exits_with_2_and_names_no_server(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(TEN)
    report = Check(path, lambda _: lambda _: None, CheckOptions(), every_error(path, {})).run()
    assert report.exit_code == 2
    assert report.errors == len(LINES)
    assert [f.area for f in report.findings if f.severity != "error"] == ["java", "position"]
    numbers = [int(f.location.rpartition(":")[2]) for f in report.findings if f.area == "config"]
    assert numbers == LINES


def test_a_check_of_sql_statements_names_line_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    statements = f"""CREATE CONNECTION k TO KAFKA (BROKER '127.0.0.1:1');
CREATE CONNECTION c TO ICEBERG CATALOG (TYPE = 'hadoop', WAREHOUSE = '{tmp_path}/lake');
CREATE SINK s FROM KAFKA CONNECTION k (TOPIC 'orders') FORMAT JSON
  TO ICEBERG CATALOG c NAMESPACE 'shop' TABLE 'orders' WITH (COMMIT INTERVAL = '20m');
"""
    path = tmp_path / "s.sql"
    for text, code, place in (
        (statements.replace("JSON", "JSN"), 2, "s.sql:3:63"),
        (statements.replace("CREATE SINK", "CREATE SNK"), 2, "s.sql:3:8"),
        (statements, 75, "s.sql:1:38"),
    ):
        path.write_text(text)
        monkeypatch.setattr(sys, "argv", ["frazil", "check", str(path), "--timeout", "2s"])
        with pytest.raises(SystemExit) as end:
            commands.main()
        out, _ = capfd.readouterr()
        assert (end.value.code, place in out) == (code, True), out


def test_findings_are_in_the_order_in_which_to_fix_them():
    findings = [CheckFinding(area, "error", area) for area in reversed(AREAS)]
    report = CheckReport("s", findings)
    assert [finding.area for finding in report.findings] == list(AREAS)
    assert CheckReport("s", [CheckFinding("topics", "warning", "old")]).exit_code == 0
    assert CheckReport("s", [CheckFinding("topics", "error", "gone")]).exit_code == 1
    assert CheckReport("s", []).verdict == "ok"


GOOD = (
    '[sink]\nid = "a"\ntopics = ["t"]\n[kafka]\n"bootstrap.servers" = "127.0.0.1:1"\n[decode]\n'
    'format = "json"\n[catalog]\ntype = "hadoop"\nwarehouse = "{0}/lake"\n'
    '[dead_letters]\ntable = "a.dead"\n[[table]]\nname = "a.b"\n'
)


@pytest.mark.parametrize(
    ("text", "setting", "fact"),
    [
        ('[log]\nfile = "{0}/absent/log"', "log.file", "there is no folder"),
        ('[log]\nfile = "{0}"', "log.file", "it is a folder"),
        ('[health]\nfile = "{0}/absent/health"', "health.file", "there is no folder"),
        ('[metrics]\naddress = "127.0.0.1:{1}"', "metrics.address", "Address already in use"),
        ('[metrics]\naddress = "192.0.2.1:9464"', "metrics.address", "annot assign requested"),
        ('[notify]\nwebhook = "env:TEST_NOT_SET"', "notify.webhook", "TEST_NOT_SET is not set"),
        ('[notify]\nwebhook = "env:TEST_NO_URL"', "notify.webhook", "expected a URL"),
        (
            '[notify]\nwebhook = "http://x"\nheaders = {{a = "env:TEST_NOT_SET"}}',
            "notify.headers.a",
            "TEST_NOT_SET is not set",
        ),
        ('[notify]\ncommand = "/no/program -x"', "notify.command", "/no/program is no program"),
        (
            '[[table]]\nname = "a.c"\nselect = ["sha256(x, \'env:TEST_NOT_SET\') as y"]\n'
            '[[route]]\nto = ["a.c"]',
            "table.1.select",
            "TEST_NOT_SET is not set",
        ),
        (
            '[[table]]\nname = "a.c"\nselect = ["sha256(x, \'env:TEST_EMPTY\') as y"]\n[[route]]\n'
            'to = ["a.c"]',
            "table.1.select",
            "is empty",
        ),
        ('[decode.registry]\nurl = "env:TEST_NOT_SET"', "decode.registry.url", "is not set"),
    ],
)
def test_what_a_start_opens_on_this_machine_is_checked(
    text: str, setting: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each of them ends `frazil run` with 2, before anything is claimed."""
    monkeypatch.setenv("TEST_NO_URL", "ftp://x")
    monkeypatch.setenv("TEST_EMPTY", "")
    path = tmp_path / "sink.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(GOOD.format(tmp_path) + text.format(tmp_path, port))
        report = Check(path, lambda _: lambda _: None, CheckOptions(limit=2.0)).run()
    errors = [f for f in report.findings if f.severity == "error" and f.area != "broker"]
    assert [(".".join(f.setting), fact in f.message) for f in errors] == [(setting, True)], errors
    assert errors[0].location.startswith("sink.toml:"), errors
    assert report.exit_code == 2


def test_a_port_that_the_running_sink_serves_is_no_error(tmp_path: Path):
    path = tmp_path / "sink.toml"
    process_health._sinks.clear()
    server = MonitoringServer.open("127.0.0.1:0", process_health.ROUTES)
    port = server.url.rpartition(":")[2]
    path.write_text(GOOD.format(tmp_path) + f'[metrics]\naddress = "127.0.0.1:{port}"')
    try:
        assert [f.severity for f in machine_findings(load(path, {}))] == ["error"]
        process_health.add(SinkHealth(load(path, {})))
        assert [f.severity for f in machine_findings(load(path, {}))] == ["ok"]
    finally:
        process_health._sinks.clear()
        server.close()


@pytest.mark.parametrize(
    ("catalog", "install"),
    [
        ({"type": "jdbc", "uri": "jdbc:postgresql://h/db", "warehouse": "/w"}, "frazil[postgres]"),
        ({"type": "glue", "warehouse": "s3://x/y"}, "frazil[glue]"),
        ({"type": "hive", "uri": "thrift://h:9083"}, "frazil[hive]"),
        ({"type": "nessie", "uri": "http://h"}, ""),
    ],
)
def test_a_catalog_that_was_not_opened_is_not_well(
    catalog: dict[str, str], install: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "sink.toml"
    lines = "\n".join(f'{key} = "{value}"' for key, value in catalog.items())
    path.write_text(GOOD.replace('type = "hadoop"\nwarehouse = "{0}/lake"', lines).format(tmp_path))
    report = Check(path, lambda config: opener(config, False), CheckOptions(limit=5.0)).run()
    [finding] = [f for f in report.findings if f.area == "catalog"]
    assert finding.severity == "skipped"
    assert install in finding.hint
    assert "frazil check --spark" in finding.hint
    others = [f for f in report.findings if f.area != "broker"]
    only = CheckReport("a", others)
    assert (only.verdict, only.exit_code, only.not_run) == ("incomplete", 3, 2)
    show(only, output())
    shown = capsys.readouterr().out
    assert "2 checks not run (catalog: " in shown
    assert install in shown.splitlines()[-1]


def test_servers_that_are_away_are_tried_again_later(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(GOOD.format(tmp_path))
    report = Check(path, lambda _: lambda _: None, CheckOptions(limit=6.0)).run()
    assert [f.area for f in report.findings if f.severity == "error"] == ["broker"]
    assert report.exit_code == 75


def test_a_check_that_hangs_or_fails_is_a_finding():
    never = threading.Event()

    def hanging() -> list[CheckFinding]:
        never.wait(60)
        return []

    def failing() -> list[CheckFinding]:
        raise Fatal("cannot read it", hint="look")

    def odd() -> list[CheckFinding]:
        raise KeyError("x")

    results = side_by_side({"broker": hanging, "catalog": failing, "registry": odd}, 0.3)
    never.set()
    assert "no answer within" in results["broker"][0].message
    assert (results["catalog"][0].message, results["catalog"][0].hint) == ("cannot read it", "look")
    assert "KeyError" in results["registry"][0].message


SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "identifier-field-ids": [1],
    "fields": [
        {"id": 1, "name": "id", "type": "int", "required": True},
        {"id": 2, "name": "name", "type": "string", "required": True},
        {
            "id": 3,
            "name": "lines",
            "type": {
                "type": "list",
                "element-id": 4,
                "element-required": False,
                "element": {
                    "type": "struct",
                    "fields": [{"id": 5, "name": "sku", "type": "string", "required": False}],
                },
            },
            "required": False,
        },
    ],
}


def one(kind: str) -> str:
    fields = [{"id": 1, "name": "type", "type": kind, "required": False}]
    return json.dumps({"type": "struct", "schema-id": 0, "fields": fields})


def test_a_planned_change_of_a_schema_is_icebergs():
    update = SchemaUpdate(
        add=(("lines.element", "count", one("long")), ("", "note", one("string"))),
        widen=(("id", one("long")),),
        relax=("name",),
        rename=(("name", "title"),),
        identifier=("id",),
    )
    after = json.loads(updated(json.dumps(SCHEMA), update))
    columns = {field["name"]: field for field in after["fields"]}
    assert list(columns) == ["id", "title", "lines", "note"]
    assert columns["id"]["type"] == "long"
    assert columns["title"]["required"] is False
    element = columns["lines"]["type"]["element"]["fields"]
    assert [field["name"] for field in element] == ["sku", "count"]
    assert after["identifier-field-ids"] == [1]
    ids = [columns[name]["id"] for name in columns] + [field["id"] for field in element]
    assert len({*ids, 4}) == 7


def test_a_planned_table_takes_commits_and_keeps_them_to_itself(tmp_path: Path):
    catalog = MemoryCatalog(lambda _: None, lambda name: f"{tmp_path}/{name}", FileStore({}))
    assert catalog.load("a.b") is None
    made = catalog.create("a.b", json.dumps(SCHEMA), '{"spec-id": 0, "fields": []}', properties={})
    made.append([], {"x": "1"}, branch="main", check=lambda _: None, leftovers=[])
    [snapshot] = made.history("main")
    made.tag("t", snapshot.id, None)
    assert made.tagged("t") == snapshot
    assert catalog.load("a.b") is made
    assert made.changes.created
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_start_leads_to_the_setting_that_it_quotes(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(
        '[sink]\nid = "a"\ntopics = ["t"]\n[kafka]\n"bootstrap.servers" = "b:1"\n[decode]\n'
        'format = "json"\n[catalog]\ntype = "hadoop"\nwarehouse = "/x"\n[[table]]\nname = "a.b"\n'
        'partition_by = ["day(at)"]'
    )
    config = load(path, {})
    error = ConfigError("cannot partition table a.b by 'day(at)': there is no column 'at'")
    assert setting_of(config, error) == ("table", "0", "partition_by")
    assert setting_of(config, Fatal("cannot change table a.b: x")) == ("table", "0", "name")
    assert setting_of(config, Fatal("cannot go on")) == ()


def wishes(*tables: str, **sections: dict[str, str]) -> Wishes:
    kafka = {"bootstrap.servers": "b:1", **sections.get("kafka", {})}
    catalog = sections.get("catalog", {"type": "hadoop", "warehouse": "/x"})
    return Wishes(kafka, sections.get("registry", {}), catalog, "s", tables or ("a.b",))


COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("at", pa.timestamp("us", "UTC"))])


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({}, {"mode": "append", "partition_by": ["day(at)"], "event_time": "at"}),
        ({"columns": pa.schema([])}, {"mode": "append", "partition_by": ["day(_timestamp)"]}),
        ({"columns": pa.schema([]), "timeless": 3}, {"mode": "append"}),
        ({"key": ("id",), "tombstones": 1}, {"mode": "upsert", "key": ["id"]}),
        ({"key": ("id",), "compacted": True}, {"mode": "upsert", "key": ["id"]}),
        ({"key": ("id",), "debezium": True}, {"mode": "upsert", "key": ["id"]}),
        ({"compacted": True}, {"mode": "append"}),
    ],
)
def test_a_proposal_follows_from_what_is_in_the_topic(
    sample: dict[str, object], expected: dict[str, object], tmp_path: Path
):
    given = {"columns": COLUMNS, "because": "why", **sample}
    made = new_config([TopicSample("t", 1, 10, **given)], wishes())  # type: ignore[arg-type]
    write_new(tmp_path / "a.toml", made.text)
    [table] = load(tmp_path / "a.toml", {}).tables
    values = {key: getattr(table, key) for key in expected}
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()} == expected
    assert all(proposal["reason"] for proposal in made.proposals)
    with pytest.raises(ConfigError, match="it exists already"):
        write_new(tmp_path / "a.toml", made.text)


def test_a_new_config_never_has_a_secret(tmp_path: Path):
    made = new_config(
        [TopicSample("t", 1, format="confluent-avro", columns=COLUMNS)],
        wishes(
            kafka={"sasl.password": "hunter2", "ssl.key.password": "env:MINE"},
            registry={"url": "http://r", "basic.auth.user.info": "a:hunter2"},
            catalog={"type": "rest", "uri": "http://c", "credential": "a:hunter2"},
        ),
    )
    assert "hunter2" not in made.text
    names = ["KAFKA_SASL_PASSWORD", "MINE", "REGISTRY_BASIC_AUTH_USER_INFO", "CATALOG_CREDENTIAL"]
    assert made.variables == names


def test_a_new_config_refuses_a_password_in_a_url():
    for sections in (
        {"catalog": {"type": "rest", "uri": "http://u:hunter2@h"}},
        {"catalog": {"type": "jdbc", "uri": "jdbc:postgresql://h/db?password=hunter2"}},
    ):
        with pytest.raises(ConfigError, match=r"expected uri=env:NAME") as caught:
            new_config([TopicSample("t", 1, columns=COLUMNS)], wishes(**sections))
        assert "hunter2" not in str(caught.value)
        assert "export CATALOG_URI=" in caught.value.hint
    catalog = {"type": "rest", "uri": "env:CATALOG_URI"}
    made = new_config([TopicSample("t", 1, columns=COLUMNS)], wishes(catalog=catalog))
    assert made.variables == ["CATALOG_URI"]


def test_a_password_in_a_url_is_a_warning_with_its_line(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(
        '[sink]\nid = "a"\ntopics = ["t"]\n[kafka]\n"bootstrap.servers" = "127.0.0.1:1"\n[decode]\n'
        'format = "json"\n[catalog]\ntype = "rest"\nuri = "http://u:hunter2@127.0.0.1:1"\n'
        '[[table]]\nname = "a.b"'
    )
    report = Check(path, lambda _: lambda _: None, CheckOptions(limit=2.0)).run()
    [finding] = [finding for finding in report.findings if finding.area == "secrets"]
    assert (finding.severity, finding.location) == ("warning", "sink.toml:10")
    assert "hunter2" not in str(report.findings)


def test_several_topics_get_a_table_and_a_rule_each(tmp_path: Path):
    samples = [TopicSample(topic, 1, columns=COLUMNS) for topic in ("a.x", "b-y")]
    made = new_config(samples, wishes("n.a_x", "n.b_y"))
    write_new(tmp_path / "a.toml", made.text)
    config = load(tmp_path / "a.toml", {})
    assert [(route.topics, route.to) for route in config.routes] == [
        (("a.x",), ("n.a_x",)),
        (("b-y",), ("n.b_y",)),
    ]
    others = [samples[0], TopicSample("c", 1, format="raw")]
    with pytest.raises(ConfigError, match="several formats"):
        new_config(others, wishes("n.a_x", "n.c"))


def row(number: int) -> bytes:
    return json.dumps({"id": number, "name": f"n{number}"}).encode()


def test_texts_that_are_times_are_declared_as_such(tmp_path: Path):
    rows = [
        {
            "id": i,
            "zoned": f"2026-11-19T10:00:{i:02}.5+01:00",
            "local": f"2026-11-19 10:00:{i:02}",
            "day": f"2026-11-{i + 1:02}",
            "mixed": "2026-11-19T10:00:00Z" if i else "soon",
            "year": "2026",
            "none": None,
            "inside": {"at": "2026-11-19T10:00:00Z"},
        }
        for i in range(9)
    ]
    shape = _Shape("t", [json.dumps(row).encode() for row in rows], {})
    times = {"zoned": "timestamptz", "local": "timestamp", "day": "date"}
    assert shape.times == times
    sample = TopicSample("t", 1, 9, columns=shape.columns, times=times)
    made = new_config([sample], wishes())
    write_new(tmp_path / "a.toml", made.text)
    config = load(tmp_path / "a.toml", {})
    assert dict(config.decode.columns) == times
    assert config.tables[0].event_time in ("zoned", "local")
    other = TopicSample("u", 1, columns=COLUMNS)
    both = new_config([sample, other], wishes("n.t", "n.u"))
    assert "columns" not in both.text, "a declared column would be in the other table, too"


def test_values_show_their_format_and_keys_their_columns():
    shape = _Shape("t", [row(1), row(2)], {})
    assert (shape.format, shape.debezium, shape.columns.names) == ("json", False, ["id", "name"])
    assert shape.key([b"1", b"2"]) == (("id",), "text")
    assert shape.key([b"n1", b"n2"]) == (("name",), "text")
    assert shape.key([b'{"id": 1}', b'{"id": 2}']) == (("id",), "json")
    assert shape.key([b"1", None]) == shape.key([b"x", b"y"]) == ((), "")
    change = {"payload": {"op": "c", "before": None, "after": {"id": 1}}, "schema": {}}
    shape = _Shape("t", [json.dumps(change).encode()], {})
    assert (shape.format, shape.debezium, shape.columns.names) == ("json", True, ["id"])
    key = json.dumps({"schema": {}, "payload": {"id": 1}}).encode()
    assert shape.key([key]) == (("id",), "json")
    assert _Shape("t", [b"\xff\xfe", b"{"], {}).format == "raw"
    assert "guess" in _Shape("t", [], {}).because
    with pytest.raises(ConfigError, match="no registry is given"):
        _Shape("t", [b"\0\0\0\0\1\2"], {})
