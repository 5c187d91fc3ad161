"""What is wrong is named, with the exact ranges and what helps; nothing is skipped or half done."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from frazil.cli import commands
from frazil.commit.protocol import TableCommitter
from frazil.config.model import Config
from frazil.errors import (
    ConfigError,
    Expired,
    FrazilError,
    Gap,
    IdentityMismatch,
    SchemaMismatch,
    Unavailable,
)
from frazil.iceberg.java import JavaCatalog
from frazil.kafka import planner
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut
from frazil.sink import Sink
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker, free_ports
from tests.oracle import Lake, assert_exact
from tests.system.streams import (
    WITHIN,
    avro,
    catch_up,
    eventually,
    numbered,
    part,
    produce,
    running,
)

Make = Callable[..., Config]
COLUMNS = "value binary, _topic string, _topic_partition int, _offset bigint, _timestamp timestamp"
ROW = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}


def stopped(config: Config, spark: Any) -> FrazilError:
    """What a run of this sink ends with, at its start or in its stream."""
    try:
        sink = Sink(config).start(spark)
    except FrazilError as error:
        return error
    try:
        sink.wait_until(Cut({part(config.sink.topics[0], 0): 10**9}), WITHIN)
    except FrazilError as error:
        return error
    finally:
        sink.stop(1)
    raise AssertionError("the stream went on")


def delete_below(bootstrap: str, topic: str, partition: int, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result()


# ── Kafka ────────────────────────────────────────────────────────────────────────────────────────


def test_a_topic_that_does_not_exist_is_named(spark: Any, name: str, make_config: Make):
    error = stopped(make_config(), spark)
    assert isinstance(error, ConfigError)
    assert f"topic {name}: it does not exist" in error.message
    index = JavaCatalog(spark, "lake").load(f"db.{name}_index")
    assert index is None or not list(index.history("main")), "something was claimed"


def test_a_broker_that_cannot_be_reached_is_named_with_its_address(
    spark: Any, lake: Lake, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planner, "_CALL_SECONDS", 1.0)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    error = stopped(lake.config(name, name, address, sink={"unavailable_timeout": "1s"}), spark)
    assert isinstance(error, Unavailable)
    assert f"Kafka at {address} does not answer" in error.message
    assert "bootstrap.servers" in error.hint


def test_records_that_retention_deleted_before_they_were_read_are_reported_exactly(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(20), 2)
    config = make_config()
    catch_up(config, spark)
    produce(b, name, numbered(40, 100), 2)
    delete_below(b, name, 1, 25)
    error = stopped(config, spark)
    assert isinstance(error, Expired)
    assert f"{name}[1] [10, 25) (15 offsets)" in error.message
    assert f"{name}[0]" not in error.message
    assert "nothing was skipped" in error.hint
    assert lake.query(f"db.{name}", "count(*)") == [(20,)]


def test_a_start_that_retention_has_already_deleted_is_reported_exactly(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(10))
    delete_below(broker.bootstrap, name, 0, 7)
    error = stopped(make_config(sink={"starting_offsets": {name: {"0": 4}}}), spark)
    assert isinstance(error, Expired)
    assert f"{name}[0] [4, 7) (3 offsets)" in error.message


@pytest.mark.parametrize("again", [30, 5])
def test_a_topic_that_was_dropped_and_made_again_is_not_read_on(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, again: int
):
    """H12, with more and with fewer records than the old one had."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    config = make_config()
    catch_up(config, spark)
    admin = AdminClient({"bootstrap.servers": b})
    admin.delete_topics([name])[name].result()
    eventually(lambda: name not in admin.list_topics(timeout=5).topics, "the topic is gone")
    create_topic(b, name, 1)
    produce(b, name, numbered(again, 1000))
    error = stopped(config, spark)
    assert isinstance(error, IdentityMismatch)
    assert f"topic {name} was dropped and recreated; expected topic id" in error.message
    assert lake.query(f"db.{name}", "count(*)") == [(10,)]


def test_another_cluster_behind_the_same_address_is_refused(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(10))
    config = make_config()
    catch_up(config, spark)
    index = JavaCatalog(spark, "lake").load(f"db.{name}_index")
    assert index is not None
    committer = TableCommitter(index, "main", name, 0, time)
    entry = committer.head().entry
    assert entry is not None
    assert entry.cluster
    committer.seen, committer.epoch = entry.commit_ids[-1], entry.epoch
    committer.commit(
        [],
        replace(
            entry,
            cluster="elsewhere",
            commit_ids=("planted",),
            begin=entry.end,
            outcomes={},
            watermark=None,
        ),
    )
    error = stopped(config, spark)
    assert isinstance(error, IdentityMismatch)
    assert f"belongs to Kafka cluster elsewhere, found cluster {entry.cluster}" in error.message


def test_a_registry_that_cannot_be_reached_is_named(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [avro(ROW, {"id": 1}, 1)])
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    registry = {"url": url, "max.retries": "1", "retries.wait.ms": "10"}
    error = stopped(make_config(decode={"format": "confluent-avro", "registry": registry}), spark)
    assert isinstance(error, Unavailable)
    assert url in str(error)
    assert JavaCatalog(spark, "lake").load(f"db.{name}") is None


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def test_a_table_whose_schema_does_not_fit_is_refused_with_every_difference(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(3))
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
    spark.sql(
        f"CREATE TABLE lake.db.{name} (value string, must bigint NOT NULL, _topic string, "
        "_offset bigint, _timestamp timestamp) USING iceberg"
    )
    error = stopped(make_config(table={"schema_evolution": "fail"}), spark)
    assert isinstance(error, SchemaMismatch)
    assert "column 'value' is" in error.message
    assert "column '_topic_partition' (int32) is not in the table" in error.message
    assert "column 'must' (int64) is required by the table" in error.message
    assert "'_offset'" not in error.message
    assert spark.table(f"lake.db.{name}").count() == 0


@pytest.mark.parametrize("then", ["does not exist", "dropped and recreated"])
def test_a_table_that_was_dropped_between_two_runs_is_not_filled_from_the_middle(
    broker: Broker, spark: Any, name: str, make_config: Make, then: str
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(10))
    config = make_config()
    catch_up(config, spark)
    spark.sql(f"DROP TABLE lake.db.{name}")
    if then == "dropped and recreated":
        spark.sql(f"CREATE TABLE lake.db.{name} ({COLUMNS}) USING iceberg")
    produce(broker.bootstrap, name, numbered(5, 10))
    error = stopped(config, spark)
    assert isinstance(error, IdentityMismatch)
    assert f"table db.{name}" in error.message
    assert then in error.message


def test_a_table_that_is_dropped_and_made_again_during_the_run_stops_the_stream(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, numbered(10))
    config = make_config()
    with running(config, spark, flush=0.1) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        spark.sql(f"DROP TABLE lake.db.{name}")
        spark.sql(f"CREATE TABLE lake.db.{name} ({COLUMNS}) USING iceberg")
        produce(broker.bootstrap, name, numbered(5, 10))
        with pytest.raises(IdentityMismatch, match="dropped and recreated"):
            assert sink.wait_until(sink.ends(), 10), "it waits, and waiting cannot help"


def test_a_table_that_was_rolled_back_between_two_runs_is_a_gap_with_its_ranges(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(10), 2)
    config = make_config()
    catch_up(config, spark)
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    before = next(table.history("main")).id
    produce(b, name, numbered(10, 10), 2)
    catch_up(config, spark)
    spark.sql(f"REFRESH TABLE lake.db.{name}")
    spark.sql(f"CALL lake.system.rollback_to_snapshot('db.{name}', {before})")
    produce(b, name, numbered(10, 20), 2)
    error = stopped(config, spark)
    assert isinstance(error, Gap)
    assert f"{name}[0] [5, 10), {name}[1] [5, 10)" in error.message
    assert lake.query(f"db.{name}", "count(*)") == [(10,)]


def test_a_catalog_name_that_is_not_icebergs_is_refused(spark: Any):
    with pytest.raises(ConfigError, match="expected an Iceberg catalog"):
        JavaCatalog(spark, "spark_catalog")


# ── the command line ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def frazil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The `frazil` command in this process: exit code, standard output, standard error."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["frazil", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            commands.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err + out
        return int(end.value.code or 0), out, err  # type: ignore[arg-type]

    return call


def test_an_unknown_key_is_refused_with_the_nearest_known_one(frazil: Any, tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(
        '[sink]\nid = "a"\ntopics = ["t"]\nmax_record_per_trigger = 5\n'
        '[kafka]\n"bootstrap.servers" = "none:1"\n[[table]]\nname = "db.t"\n'
    )
    code, out, err = frazil("run", path)
    assert (code, out) == (2, "")
    assert "unknown key 'max_record_per_trigger'; did you mean 'max_records_per_trigger'?" in err


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {"kafka": {"auto.offset.reset": "earliest"}},
            "a position that Kafka no longer has must stop",
        ),
        ({"kafka": {"sasl.password": "hunter2"}}, "a secret is written in the config"),
        ({"kafka": {"failOnDataLoss": "false"}}, "a lost range must stop the stream"),
    ],
)
def test_what_would_break_the_promise_is_refused_with_the_reason(
    frazil: Any, tmp_path: Path, sections: dict[str, dict[str, str]], reason: str
):
    path = tmp_path / "sink.toml"
    more = "".join(f'"{key}" = "{value}"\n' for key, value in sections["kafka"].items())
    path.write_text(
        '[sink]\nid = "a"\ntopics = ["t"]\n[decode]\nformat = "raw"\n[kafka]\n'
        f'"bootstrap.servers" = "none:1"\n{more}[[table]]\nname = "db.t"\n'
    )
    code, _, err = frazil("run", path)
    assert code == 2
    assert reason in err
    assert "hunter2" not in err


def test_run_audit_and_status_from_the_command_line(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Any, frazil: Any
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(30), 2)
    path = write_toml()
    code, out, _ = frazil("audit", path)
    assert code == 3
    assert "never committed a batch" in " ".join(out.split()), out
    code, out, err = frazil("run", path, "--until-caught-up", "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == 30
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 30
    code, out, _ = frazil("audit", path, "--json")
    assert code == 0
    report, stream, kafka = json.loads(out)
    assert kafka["lag"] == 0
    assert (report["verdict"], report["written"]) == ("proven", 30)
    assert report["examined"] == ["ledger", "index", "manifests"]
    assert (stream["verdict"], stream["examined"]) == ("proven", ["ledger", "index"])
    code, out, _ = frazil("audit", path, "--deep", "--kafka", "--json")
    assert code == 0
    deep, _, kafka = json.loads(out)
    assert deep["examined"][-1] == "rows"
    assert (kafka["verdict"], [line["lag"] for line in kafka["broker"]]) == ("proven", [0, 0])
    code, out, _ = frazil("audit", path)
    assert code == 0
    assert "proven: 30 rows in 1 commit;" in " ".join(out.split())
    produce(broker.bootstrap, name, numbered(4), 2)
    code, out, _ = frazil("audit", path, "--max-lag", "4", "--max-age", "1d")
    assert code == 0
    assert "4 offsets wait in Kafka and are not part of this proof" in out
    code, out, _ = frazil("audit", path, "--max-lag", "3")
    assert code == 3
    assert "behind: 4 offsets wait in Kafka; expected at most 3" in out
    code, out, _ = frazil("status", path, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["sink"] == name
    assert answer["table"] == f"db.{name}"
    assert answer["epoch"] == 1
    assert answer["position"] == {name: {"0": 15, "1": 15}}
    assert answer["lag"] == 4
    assert answer["lag_by_partition"] == {name: {"0": 2, "1": 2}}
    assert (answer["pending_batches"], answer["pending_bytes"]) == (0, 0)
    assert answer["last_batch"] == 0
    assert answer["last_commit_at"].startswith("20")
    code, out, _ = frazil("status", path)
    assert code == 0
    assert "lag  4" in out


def test_the_audit_finds_a_planted_gap_and_exits_with_3(
    spark: Any, name: str, write_toml: Any, frazil: Any
):
    path = write_toml()
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
    spark.sql(f"CREATE TABLE lake.db.{name} ({COLUMNS}) USING iceberg")
    code, out, _ = frazil("audit", path)
    assert code == 3
    assert "never committed a batch" in " ".join(out.split()), out
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    where = part(name, 0)
    for begin, end in ((0, 5), (8, 12), (10, 14)):
        committer = TableCommitter(table, "main", name, 1, time)
        head = committer.head()
        entry = LedgerEntry(
            name, 1, (str(uuid.uuid4()),), (0, 0), Cut({where: begin}), Cut({where: end})
        )
        table.append([], entry.summary(), branch="main", check=lambda _: None, leftovers=[])
        assert committer.head().commit_id != head.commit_id
    code, out, _ = frazil("audit", path, "--no-kafka", "--json")
    assert code == 3
    [report] = json.loads(out)
    assert report["verdict"] == "gap"
    assert report["partitions"][0]["gaps"] == [[5, 8]]
    assert report["partitions"][0]["overlaps"] == [[10, 12]]
    assert frazil("audit", path)[0] == 3


def test_a_run_that_cannot_begin_says_so_in_a_sentence(
    frazil: Any, name: str, write_toml: Any, spark: Any
):
    code, out, err = frazil("run", write_toml())
    assert (code, out) == (2, "")
    assert f"cannot read topic {name}: it does not exist" in err
    assert "remedy: create it first" in err
