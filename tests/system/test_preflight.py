"""Before a sink runs: `init` writes a config that works, `check` finds all that is wrong, `plan` is
what a start then does. Real Kafka, Spark and Iceberg; a registry of a few schemas."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from frazil.cli import commands
from frazil.config.model import Config, load
from frazil.errors import FrazilError
from frazil.iceberg.java import JavaCatalog
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import toml
from tests.oracle import Lake
from tests.system.streams import Registry, avro, catch_up
from tests.system.test_debezium import change, envelope, person

Write = Callable[..., Path]
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": "string"},
        {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
PERSON = envelope({"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"]})
KEY = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}


class Frazil:
    """The command line, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["frazil", *map(str, words)])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            commands.main()
        out, err = self._capfd.readouterr()
        assert "Traceback" not in out + err, (words, err)
        return int(end.value.code or 0), out, err

    def json(self, *words: object, code: int = 0) -> Any:
        ended, out, err = self(*words, "--json")
        assert ended == code, (words, out, err)
        return json.loads(out)


@pytest.fixture
def frazil(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Frazil:
    return Frazil(monkeypatch, capfd)


def send(broker: Broker, topic: str, pairs: list[tuple[bytes | None, bytes | None]]) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for key, value in pairs:
        producer.produce(topic, value, key=key, partition=0)
    assert producer.flush(30) == 0


def state(broker: Broker, lake: Lake, folder: Path) -> dict[str, Any]:
    """All that a check or a plan could change: files, catalog, topics, groups."""
    files = {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None
        for root in (lake.folder / "warehouse", folder)
        for path in root.rglob("*")
    }
    with sqlite3.connect(lake.folder / "catalog.db") as catalog:
        tables = catalog.execute("SELECT * FROM iceberg_tables").fetchall()
        tables += catalog.execute("SELECT * FROM iceberg_namespace_properties").fetchall()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    groups = admin.list_consumer_groups().result().valid
    names = sorted(group.group_id for group in groups)
    topics = {name: len(t.partitions) for name, t in admin.list_topics(timeout=10).topics.items()}
    return {"files": files, "tables": tables, "topics": topics, "groups": names}


def real(spark: Any, config: Config, name: str) -> dict[str, Any]:
    """A table as the catalog has it, in the words of a plan."""
    table = JavaCatalog(spark, config.catalog.name).load(name)
    assert table is not None, name
    schema, spec = json.loads(table.schema), json.loads(table.spec)
    names = {field["id"]: field["name"] for field in schema["fields"]}
    return {
        "columns": [(field["name"], field["required"]) for field in schema["fields"]],
        "types": {f["name"]: f["type"] for f in schema["fields"] if isinstance(f["type"], str)},
        "partitions": [(f["transform"], names[f["source-id"]]) for f in spec["fields"]],
        "format_version": table.format_version,
        "location": table.location.removeprefix("file:"),
        "properties": table.properties,
    }


def assert_created_as_planned(spark: Any, config: Config, planned: dict[str, Any]) -> None:
    now = real(spark, config, planned["table"])
    assert [(c["name"], c["required"]) for c in planned["columns"]] == now["columns"]
    types = {c["name"]: c["type"] for c in planned["columns"] if c["name"] in now["types"]}
    assert types == now["types"]
    terms = [c if t == "identity" else f"{t}({c})" for t, c in now["partitions"]]
    assert planned["partitioned_by"] == terms
    assert planned["format_version"] == now["format_version"]
    assert planned["location"] == now["location"]
    assert planned["properties"].items() <= now["properties"].items()


def kinds(name: str) -> dict[str, tuple[list[tuple[bytes | None, bytes | None]], str]]:
    """Topic → records, and the mode that they call for."""
    orders: list[tuple[bytes | None, bytes | None]] = [
        (None, json.dumps({"id": n, "name": f"n{n}", "lines": [{"sku": "a"}]}).encode())
        for n in range(50)
    ]
    avros = [
        (None, avro(ORDER, {"id": n, "name": "x", "placed_at": n * 10**12}, 1)) for n in range(50)
    ]
    changes = [change("c", after=person(n % 5, f"p{n}"), pos=n) for n in range(20)]
    people: list[tuple[bytes | None, bytes | None]] = [
        (avro(KEY, {"id": c["after"]["id"]}, 3), avro(PERSON, c, 2)) for c in changes
    ]
    people += [
        (avro(KEY, {"id": 0}, 3), avro(PERSON, change("d", before=person(0, "p15"), pos=21), 2)),
        (avro(KEY, {"id": 0}, 3), None),
    ]
    return {
        f"{name}-json": (orders, "append"),
        f"{name}-avro": (avros, "append"),
        f"{name}-people": (people, "upsert"),
    }


def test_init_writes_configs_that_pass_the_check_and_run_as_planned(
    broker: Broker, lake: Lake, spark: Any, name: str, tmp_path: Path, frazil: Frazil
):
    expected = {f"{name}-json": 50, f"{name}-avro": 50, f"{name}-people": 4}
    catalog = lake.document(name, name, broker.bootstrap)["catalog"]
    options = [word for key, value in catalog.items() for word in ("--catalog", f"{key}={value}")]
    with Registry(id1=ORDER, id2=PERSON, id3=KEY) as registry:
        registry.subjects = {f"{topic}-value": 1 for topic in expected}
        options += ["--registry", registry.url, "--kafka", "ssl.key.password=hunter2", "--yes"]
        for topic, (records, mode) in kinds(name).items():
            create_topic(broker.bootstrap, topic, 1)
            send(broker, topic, records)
            path = tmp_path / f"{topic}.toml"
            table = f"db.{topic.replace('-', '_')}"
            given = ["--bootstrap-servers", broker.bootstrap, "--topic", topic, "--table", table]
            made = frazil.json("init", *given, *options, "-o", path)
            assert made["variables"] == ["KAFKA_SSL_KEY_PASSWORD"]
            text = path.read_text()
            assert "hunter2" not in text
            assert frazil("init", *given, *options, "-o", path)[0] == 2  # nothing is overwritten
            path.write_text(text.replace('"ssl.key.password" = "env:KAFKA_SSL_KEY_PASSWORD"', ""))
            config = load(path)
            assert config.tables[0].mode == mode

            before = state(broker, lake, tmp_path)
            report = frazil.json("check", path)
            assert (report["verdict"], report["errors"]) in (("ok", 0), ("warnings", 0)), report
            plan = frazil.json("plan", path)
            assert state(broker, lake, tmp_path) == before
            assert {t["action"] for t in plan["tables"] if t["role"] == "records"} == {"create"}
            assert plan["waiting"] == len(records)

            catch_up(config, spark)
            for planned in plan["tables"]:
                if planned["action"] == "create":
                    assert_created_as_planned(spark, config, planned)
            assert lake.query(table, "count(*)")[0][0] == expected[topic]


def test_a_plan_of_a_change_and_of_a_refusal_is_what_a_start_does(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Write, frazil: Frazil
):
    def schema(identity: str, kind: Any, *more: str) -> dict[str, Any]:
        fields = [{"name": "id", "type": identity}, {"name": "name", "type": kind}]
        fields += [{"name": column, "type": "string"} for column in more]
        return {"type": "record", "name": "R", "fields": fields}

    schemas = {
        1: schema("int", "string"),
        2: schema("long", ["null", "string"], "coupon"),
        3: schema("long", ["null", "string"], "coupon", "colour"),
    }

    def record(number: int) -> list[tuple[bytes | None, bytes | None]]:
        value = {"id": 1, "name": "a", "coupon": "x", "colour": "red"}
        return [(None, avro(schemas[number], value, number))]

    create_topic(broker.bootstrap, name, 1)
    index, table = f"db.{name}_index", f"db.{name}"
    with Registry(id1=schemas[1], id2=schemas[2], id3=schemas[3]) as registry:
        decode = {"format": "confluent-avro", "registry": {"url": registry.url}}
        path = write_toml(decode=decode)
        send(broker, name, record(1))
        catch_up(load(path), spark)

        send(broker, name, record(2))
        before = state(broker, lake, path.parent)
        plan = frazil.json("plan", path)
        assert state(broker, lake, path.parent) == before
        planned = {t["table"]: t for t in plan["tables"]}
        assert (plan["epoch_now"], plan["epoch"], plan["waiting"]) == (1, 2, 1)
        assert planned[index]["action"] == "none"
        changes = planned[table]["changes"]
        assert {(c["change"], c["column"]) for c in changes} == {
            ("add", "coupon"),
            ("widen", "id"),
            ("optional", "name"),
        }
        assert real(spark, load(path), table)["types"]["id"] == "int"
        run = catch_up(load(path), spark)
        assert run.epoch == plan["epoch"]
        now = real(spark, load(path), table)
        types = {c["column"]: c["type"] for c in changes if "type" in c}
        assert types.items() <= now["types"].items()
        assert ("name", False) in now["columns"]
        assert frazil.json("plan", path)["tables"][0]["action"] == "none"

        # A table that must not change: the plan refuses with the sentence of the start.
        path = write_toml(decode=decode, table={"schema_evolution": "fail"})
        send(broker, name, record(3))
        plan = frazil.json("plan", path, code=5)
        with pytest.raises(FrazilError) as refused:
            catch_up(load(path), spark)
        assert plan["stops"]["message"] == refused.value.message
        report = frazil.json("check", path, code=1)
        [finding] = [f for f in report["findings"] if f["area"] == "tables"]
        assert finding["message"] == refused.value.message
        assert finding["location"].startswith("sink.toml:")

        # Retention overtakes the position: the check has the command that accepts the loss.
        send(broker, name, record(1))
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        for future in admin.delete_records([TopicPartition(name, 0, 4)]).values():
            future.result()
        report = frazil.json("check", path, code=1)
        [finding] = [f for f in report["findings"] if f["area"] == "position"]
        assert "retention has deleted" in finding["message"]
        assert "accept-loss" in finding["hint"]


def test_what_is_wrong_is_said_in_a_sentence_with_its_setting(
    broker: Broker, lake: Lake, name: str, tmp_path: Path, frazil: Frazil
):
    create_topic(broker.bootstrap, name, 1)
    send(broker, name, [(None, b'{"id": 1}'), (None, b"no json")])

    def findings(code: int = 1, **changes: Any) -> dict[str, Any]:
        document = lake.document(name, name, broker.bootstrap, decode={"format": "json"})
        for section, values in changes.items():
            document[section] = values if isinstance(values, list) else document[section] | values
        path = tmp_path / "sink.toml"
        path.write_text(toml({key: value for key, value in document.items() if value}))
        report = frazil.json("check", path, code=code)
        assert report["seconds"] < 15, report
        wrong = [f for f in report["findings"] if f["severity"] in ("error", "warning")]
        return {finding["area"]: finding for finding in wrong}

    refused = findings(75, kafka={"bootstrap.servers": "127.0.0.1:1"})["broker"]
    assert "Connection refused" in refused["message"]
    assert refused["setting"] == ["kafka", "bootstrap.servers"]
    tls = findings(kafka={"security.protocol": "SSL"})["broker"]
    assert "PLAINTEXT" in tls["hint"]
    assert tls["setting"] == ["kafka", "security.protocol"]
    twin = findings(sink={"topics": [name[:-1] + "x" + name[-1]]})["topics"]
    assert f"did you mean {name!r}" in twin["hint"]
    records = findings()["records"]  # without dead letters the stream would stop
    assert "1 of the newest 2 records are rejected (json)" in records["message"]
    assert records["setting"] == ["decode", "format"]
    dead = {"dead_letters": {"table": f"db.{name}_dead"}}
    assert findings(0, **dead)["records"]["severity"] == "warning"
    rest = {"type": "rest", "uri": "http://127.0.0.1:1", "warehouse": "x"}
    assert findings(75, catalog=rest)["catalog"]["setting"] == ["catalog", "uri"]
    hadoop = {"type": "hadoop", "uri": "", "warehouse": "/proc/frazil"}
    assert "probe file" in findings(catalog=hadoop)["storage"]["message"]
    secret = findings(2, kafka={"sasl.password": "env:FRAZIL_TEST_NOT_SET"})["secrets"]
    assert "FRAZIL_TEST_NOT_SET is not set" in secret["message"]
    glue = findings(3, catalog={"type": "glue", "uri": "", "warehouse": "s3://x/y"}, **dead)
    assert not glue.keys() - {"java"}, "nothing is wrong, and not everything was checked"
    column = findings(table=[{"name": f"db.{name}", "partition_by": ["day(at)"]}])["tables"]
    assert column["setting"] == ["table", "0", "partition_by"]
    with Registry() as registry:
        avro_of = {"decode": {"format": "confluent-avro", "registry": {"url": registry.url}}}
        assert "no subject" in findings(**avro_of)["registry"]["message"]
        for status, code in ((401, 1), (404, 75), (500, 75)):
            registry.status = status
            assert f"answers {status}" in findings(code, **avro_of)["registry"]["message"]
    tables = [{"name": f"db.{name}_{number}"} for number in range(200)]
    routes = [{"to": [tables[0]["name"]]}]
    assert not findings(0, table=tables, route=routes, **dead).keys() - {"records"}
