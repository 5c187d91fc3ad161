"""Kafka's truths: what a topic can do under a sink, and what a person may decide about it.

No false alarm: transactions, compaction and new partitions go through. No missed loss: retention,
a topic that was made again, another cluster stop the stream with the command that helps; and what
the command did is distinguished from what is proven.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from frazil.auditing import evidence
from frazil.cli import commands
from frazil.config.model import Config
from frazil.errors import ConfigError, Expired, Fenced, FrazilError, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.ledger.entry import OperatorNote
from frazil.offsets import Cut
from frazil.ops import completeness, index_rebuild, locate, offsets
from frazil.render import json_values
from frazil.sink import Sink
from frazil.sources.operator_decision import OperatorDecisionSource
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact, assert_once, topic_records
from tests.system.streams import (
    WITHIN,
    catch_up,
    eventually,
    numbered,
    part,
    produce,
    proven,
    reports,
    running,
)

Make = Callable[..., Config]
WHY = "the topic's retention was set to an hour by mistake"


def admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def retain_from(bootstrap: str, topic: str, offset: int, partition: int = 0) -> None:
    """What retention does, at once."""
    client = admin(bootstrap)
    for future in client.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(30)


def make_again(bootstrap: str, topic: str, partitions: int) -> None:
    client = admin(bootstrap)
    client.delete_topics([topic])[topic].result(30)

    def made() -> bool:
        try:
            client.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return False  # still on its way out
            raise
        return True

    eventually(made, "the topic is made again")


def by_hand(config: Config, spark: Any, wanted: Any, why: str = WHY) -> offsets.OffsetsPlan:
    """As the command does it with --apply."""
    plan = offsets.preview(config, spark, wanted)
    assert plan.decision, plan
    return offsets.apply(config, spark, plan, offsets.operator_note(wanted.command, why, "ann@ops"))


def opened(config: Config, spark: Any) -> Any:
    return JavaCatalog(spark, config.catalog.name).open_readonly


def report_of(config: Config, spark: Any, table: str = "") -> Any:
    [report] = [r for r in reports(config, spark) if r.table == (table or config.tables[0].name)]
    return report


def options(hint: str) -> list[str]:
    """What a hint says to type, behind the config."""
    return hint.split("CONFIG ")[1].split()


def test_retention_overtakes_the_position_and_the_loss_is_accepted(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(100), 2)
    config = make_config()
    catch_up(config, spark)
    produce(b, name, numbered(100, 100), 2)
    retain_from(b, name, 70)
    with pytest.raises(Expired, match=rf"{name}\[0\] \[50, 70\)") as caught:
        Sink(config).start(spark)
    assert options(caught.value.hint) == ["--lost", f"{name}:0:50..70"]
    shown = offsets.show_offsets(config, opened(config, spark))
    assert shown["stops"]["class"] == "Expired"
    assert [p["expired_offsets"] for p in shown["partitions"]] == [20, 0]
    # Before it is accepted nobody calls it so, and it is not proven either.
    seen = evidence.against_kafka(
        config, opened(config, spark), evidence.of_sink(config, opened(config, spark))
    )
    assert seen.verdict == "gap"
    # Exactly what is lost, and nothing else.
    for wrong in ("50..71", "49..70", "50..50"):
        with pytest.raises(ConfigError, match="cannot accept the loss"):
            offsets.preview(config, spark, offsets.accept_loss([f"{name}:0:{wrong}"]))
    with pytest.raises(ConfigError, match="cannot accept the loss"):
        offsets.preview(config, spark, offsets.accept_loss([f"{name}:1:50..60"]))
    done = by_hand(config, spark, offsets.accept_loss([f"{name}:0:50..70"]))
    assert json_values(done)["lost"] == [[name, 0, 50, 70]]
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset", "ORDER BY ALL")
    assert rows == [(0, o) for o in range(100) if not 50 <= o < 70] + [(1, o) for o in range(100)]
    report = report_of(config, spark)
    assert report.verdict == "accepted_loss"
    assert [line.counts.lost for line in report.partitions] == [20, 0]
    assert [line.verdict for line in report.partitions] == ["accepted_loss", "proven"]
    [note] = report.notes
    assert (note.command, note.by, note.reason) == ("accept-loss", "ann@ops", WHY)
    assert report_of(config, spark, config.index_table).verdict == "accepted_loss"
    # Where it is requested, it is reported.
    told_of = json_values(locate.of_sink(config, opened(config, spark), part(name, 0), 60))
    assert not told_of["contained"]
    assert told_of["batches"][0]["note"]["reason"] == WHY
    [gone] = json_values(completeness.completeness(config, opened(config, spark)))["lost"]  # type: ignore[misc]
    assert (gone["start"], gone["end"], gone["note"]["by"]) == (50, 70, "ann@ops")
    # Snapshots go, the note stays: the index's rows have it.
    for table in (f"db.{name}", config.index_table):
        spark.sql(
            f"CALL lake.system.expire_snapshots(table => '{table}', retain_last => 1, "
            "older_than => TIMESTAMP '2100-01-01 00:00:00')"
        )
    left = report_of(config, spark)
    assert left.verdict == "accepted_loss"
    assert left.notes == report.notes


def test_a_lost_row_of_an_accepted_loss_is_rebuilt_with_its_note(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    config = make_config()
    catch_up(config, spark)
    produce(b, name, numbered(10, 10))
    retain_from(b, name, 15)
    by_hand(config, spark, offsets.accept_loss([f"{name}:0:10..15"]))
    catch_up(config, spark)
    spark.sql(f"DELETE FROM lake.db.{name}_index WHERE lost > 0")
    [outcome] = index_rebuild.rebuild_index(config, spark).sinks
    assert (outcome.written, outcome.unknown) == (1, ())
    report = report_of(config, spark)
    assert report.verdict == "accepted_loss", report
    [row] = spark.sql(f"SELECT * FROM lake.db.{name}_index WHERE lost > 0").collect()
    assert (row.start_offset, row.end_offset, row.lost) == (10, 15, 5)
    noted = OperatorNote.of(row.operator_note)
    assert noted is not None
    assert noted.reason == WHY


@pytest.mark.parametrize(
    "records", [5, pytest.param(40, marks=pytest.mark.long)], ids=["fewer", "more"]
)
def test_a_topic_that_was_made_again_is_adopted_and_both_stay_provable(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, records: int
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(20), 2)
    config = make_config()
    catch_up(config, spark)
    first = topic_records(b, name)
    make_again(b, name, 1)
    produce(b, name, numbered(records, 1000))
    with pytest.raises(IdentityMismatch, match="was dropped and recreated") as caught:
        Sink(config).start(spark)
    assert options(caught.value.hint) == ["--topic", name]
    with pytest.raises(IdentityMismatch, match="ends before the position"):
        # With fewer records both partitions end before it, with more one is not there at all.
        offsets.preview(config, spark, offsets.adopt_topic([], "earliest", True))
    done = by_hand(config, spark, offsets.adopt_topic([name], "earliest", False))
    new = f"{name}@{done.epoch}"
    assert json_values(done)["start_offsets"] == {new: {"0": 0}}
    sink = catch_up(config, spark)
    assert sink.position == Cut({part(name, 0): 10, part(name, 1): 10, part(new, 0): records})
    rows = lake.query(f"db.{name}", "_topic, _topic_partition, _offset, value")
    assert_once(row[:3] for row in rows)
    expected = {(name, *at): value for at, value in first.items()}
    expected |= {(new, *at): value for at, value in topic_records(b, name).items()}
    assert {row[:3]: row[3] for row in rows} == expected
    report = proven(config, spark)
    assert report.written == 20 + records
    assert [note.command for note in report.notes] == ["adopt-topic"]
    assert locate.of_sink(config, opened(config, spark), part(name, 0), 3).other_topics == (new,)
    shown = offsets.show_offsets(config, opened(config, spark))
    assert shown["stops"] is None
    assert [p["state"] for p in shown["partitions"]] == ["recreated", "recreated", "read"]


def test_the_same_offsets_under_another_id_go_on_where_they_stood(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """A mirror: the same records under the same offsets, and another topic id."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(20))
    config = make_config()
    catch_up(config, spark)
    make_again(b, name, 1)
    produce(b, name, numbered(30))
    done = by_hand(config, spark, offsets.adopt_topic([], "earliest", True))
    assert done.decision.begin == Cut({part(name, 0): 20})
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", b, name) == 30
    assert proven(config, spark).written == 30


def test_a_position_moved_forward_gives_records_up_and_moved_back_reads_them_as_new(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, numbered(40), 2)
    config = make_config()
    catch_up(config, spark)
    produce(b, name, numbered(40, 100), 2)
    by_hand(config, spark, offsets.seek([f"{name}:0:30"]), "they are of a test")
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset", "ORDER BY ALL")
    assert rows == [(0, o) for o in range(40) if not 20 <= o < 30] + [(1, o) for o in range(40)]
    done = by_hand(config, spark, offsets.seek([f"{name}:0:35"]), "they were wrong")
    new = f"{name}@{done.epoch}"
    assert done.decision.begin == Cut({part(new, 0): 35, part(new, 1): 40})
    produce(b, name, numbered(2, 200), 2)
    catch_up(config, spark)
    again = lake.query(f"db.{name}", "_topic_partition, _offset", f"WHERE _topic = '{new}'")
    assert sorted(again) == [(0, o) for o in range(35, 41)] + [(1, 40)]
    report = report_of(config, spark)
    assert report.verdict == "accepted_loss"
    assert [note.command for note in report.notes] == ["seek", "seek"]
    assert {str(line.range): line.verdict for line in report.partitions} == {
        f"{name}[0] [0, 40)": "accepted_loss",
        f"{name}[1] [0, 40)": "proven",
        f"{new}[0] [35, 41)": "proven",
        f"{new}[1] [40, 41)": "proven",
    }


@pytest.mark.long
def test_where_a_decision_dies_it_is_done_or_undone_and_a_running_sink_is_fenced(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    config = make_config()
    catch_up(config, spark)
    lost: list[int] = []
    end = 10
    for step in (
        "planned",
        "written",
        "staged",
        "commit",
        "committed",
        "index-commit",
        "index-committed",
    ):
        produce(b, name, numbered(10, end))
        retain_from(b, name, end + 4)
        wanted = offsets.accept_loss([f"{name}:0:{end}..{end + 4}"])

        def die(seen: Any, at: str = step) -> None:
            if seen.name == at:
                raise FrazilError(f"died at {at}")

        plan = offsets.preview(config, spark, wanted)
        note = offsets.operator_note("accept-loss", WHY, "ann@ops")
        source = partial(OperatorDecisionSource, wanted=wanted, note=note, expected=plan.now)
        dying = Sink(config, source=source, on_step=die)
        with pytest.raises(FrazilError, match="died at"):
            dying.once(spark)
        try:
            catch_up(config, spark)  # staged, it is the next run's to commit
        except Expired:
            assert step in ("planned", "written"), step
            by_hand(config, spark, wanted)
            catch_up(config, spark)
        lost += range(end, end + 4)
        end += 10
    rows = lake.query(f"db.{name}", "_offset", "ORDER BY ALL")
    assert rows == [(o,) for o in range(end) if o not in lost]
    report = report_of(config, spark)
    assert report.verdict == "accepted_loss", report
    assert report.partitions[0].counts.lost == len(lost)
    with running(config, spark) as alive:
        monkeypatch.setattr("frazil.run._runs", {})  # as from another process
        by_hand(config, spark, offsets.seek([f"{name}:0:{end - 5}"]), "again")
        produce(b, name, numbered(1))
        with pytest.raises(Fenced):
            alive.wait_until({part(name, 0): end + 1}, WITHIN)


def test_with_several_tables_the_index_records_the_loss_and_upserts_continue(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    for topic in (f"{name}-a", f"{name}-b"):
        create_topic(b, topic, 1)
    config = make_config(
        sink={"topics": [f"{name}-a", f"{name}-b"]},
        decode={"format": "json"},
        table=[{"name": f"db.{name}", "mode": "upsert", "key": ["id"]}, {"name": f"db.{name}_b"}],
        route=[
            {"topics": [f"{name}-a"], "to": [f"db.{name}"]},
            {"topics": [f"{name}-b"], "to": [f"db.{name}_b"]},
        ],
    )

    def send(turn: int) -> None:
        for topic in (f"{name}-a", f"{name}-b"):
            rows = ({"id": n, "turn": turn} for n in range(10))
            produce(b, topic, [json.dumps(row).encode() for row in rows])

    send(0)
    catch_up(config, spark)
    send(1)
    retain_from(b, f"{name}-a", 15)
    by_hand(config, spark, offsets.accept_loss([f"{name}-a:0:10..15"]))
    make_again(b, f"{name}-b", 1)
    send(2)
    by_hand(config, spark, offsets.adopt_topic([], "earliest", False), "made again")
    catch_up(config, spark)
    assert sorted(lake.query(f"db.{name}", "id, turn")) == [(n, 2) for n in range(10)]
    turns = [row[0] for row in lake.query(f"db.{name}_b", "turn", "ORDER BY ALL")]
    assert turns == [0] * 10 + [2] * 10, "routes go by the name that Kafka has"
    by_table = {report.table: report for report in reports(config, spark)}
    assert {table: report.verdict for table, report in by_table.items()} == {
        f"db.{name}": "proven",
        f"db.{name}_b": "proven",
        config.index_table: "accepted_loss",
    }
    assert [note.command for note in by_table[config.index_table].notes] == [
        "accept-loss",
        "adopt-topic",
    ]


# ── what must not alarm ──────────────────────────────────────────────────────────────────────────


def test_three_of_ten_transactions_aborted_markers_at_the_tail_and_one_that_hangs(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)

    def begun(number: int) -> Producer:
        sender = Producer(
            {"bootstrap.servers": b, "transactional.id": f"{name}-{number}", "log_level": 0}
        )
        sender.init_transactions(30)
        sender.begin_transaction()
        for i in range(10):
            sender.produce(name, b"%d-%d" % (number, i), partition=i % 2)
        assert sender.flush(30) == 0
        return sender

    for number in range(10):
        sender = begun(number)
        # Aborted ones in between, and the last: the topic ends with nothing that can be seen.
        if number in (2, 5, 9):
            sender.abort_transaction(30)
        else:
            sender.commit_transaction(30)
    hanging = begun(10)
    produce(b, name, numbered(6), 2)  # behind it, where nobody may read yet
    config = make_config(sink={"max_records_per_trigger": 7})
    with running(config, spark) as sink:
        stable = sink.ends()
        assert sum(stable.values()) == 10 * 12, "the end is before the one that hangs"
        assert sink.wait_until(stable, WITHIN)
        assert assert_exact(lake, f"db.{name}", b, name) == 70
        begun(10).abort_transaction(30)  # a new run of its producer ends the one that hangs
        eventually(lambda: sum(sink.ends().values()) > 126, "it hangs no more", sink=sink)
        assert sink.wait_until(sink.ends(), WITHIN)
        ends = sink.ends()
    del hanging
    assert assert_exact(lake, f"db.{name}", b, name) == 76
    report = proven(config, spark)
    assert sum(line.counts.invisible for line in report.partitions) == sum(ends.values()) - 76


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker whose cleaner does not rest, and that may be replaced."""
    quick = {"log.cleaner.backoff.ms": "50", "log.initial.task.delay.ms": "0"}
    with Broker(tmp_path_factory.mktemp("own") / "broker", settings=quick) as started:
        yield started


def test_a_compacted_topic_with_holes_at_head_middle_and_tail(
    own: Broker, lake: Lake, spark: Any, name: str
):
    b = own.bootstrap
    settings = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.compaction.lag.ms": "0",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "0",
    }
    client = admin(b)
    client.create_topics([NewTopic(name, 1, 1, config=settings)])[name].result(30)
    sender = Producer({"bootstrap.servers": b})
    sent = 0

    def send(key: str, value: bytes | None) -> None:
        nonlocal sent
        sender.produce(name, value, key)
        sent += 1

    for i in range(60):  # 0 to 29 have successors, so has every second behind: head and middle
        send(f"k{i % 30}" if i < 45 else f"x{i}", b"%d" % i)
    for i in range(45, 60):
        send(f"x{i}", None)  # they go, and what they delete: behind the last record is nothing
    assert sender.flush(30) == 0

    def cleaned() -> bool:
        # A record of one key of its own rolls the segment; only that one is left of its kind.
        send("roll", b"")
        assert sender.flush(30) == 0
        left = [offset for _, offset in topic_records(b, name)]
        return min(left) >= 15 and not any(45 <= offset < 75 for offset in left)

    eventually(cleaned, "the cleaner has been at it")
    policy = ConfigResource(
        ResourceType.TOPIC,
        name,
        incremental_configs=[
            ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    for future in client.incremental_alter_configs([policy]).values():
        future.result(30)  # from here on nothing more goes
    config = lake.config(name, name, b, sink={"max_records_per_trigger": 8})
    with running(config, spark) as sink:
        ends = sink.ends()
        assert sink.wait_until(ends, WITHIN)
    rows = assert_exact(lake, f"db.{name}", b, name)
    report = proven(config, spark)
    assert report.partitions[0].range.start == 0, "retention has not moved the beginning"
    assert report.partitions[0].counts.invisible == sent - rows >= 45


def test_another_cluster_behind_the_address_is_seen_and_can_be_adopted(
    own: Broker, lake: Lake, spark: Any, name: str
):
    """After the one above: it takes the broker's data away."""
    b = own.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(20))
    config = lake.config(name, name, b)
    catch_up(config, spark)
    own.stop()
    shutil.rmtree(own.directory)
    own.start()  # formatted anew, on the same port
    create_topic(b, name, 1)
    produce(b, name, numbered(30, 500))
    with pytest.raises(IdentityMismatch, match="the ledger belongs to Kafka cluster") as caught:
        Sink(config).start(spark)
    assert "frazil offsets adopt-topic CONFIG" in caught.value.hint
    assert (
        offsets.show_offsets(config, opened(config, spark))["stops"]["class"] == "IdentityMismatch"
    )
    assert lake.query(f"db.{name}", "count(*)") == [(20,)], "nothing of it was read"
    done = by_hand(config, spark, offsets.adopt_topic([], "earliest", False), "moved")
    assert done.note is not None
    assert "cluster" in done.note.result
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_topic, _offset", "ORDER BY ALL")
    assert rows == [(name, o) for o in range(20)] + [(f"{name}@{done.epoch}", o) for o in range(30)]
    assert proven(config, spark).written == 50


def test_the_commands_print_what_they_would_do_and_do_it_with_yes(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    catch_up(make_config(), spark)
    produce(b, name, numbered(10, 10))
    retain_from(b, name, 14)
    path = str(write_toml())
    monkeypatch.setattr("frazil.spark.session.session", lambda *_, **__: spark)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["frazil", *words])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, output = run("offsets", "show", path, "--json")
    [line] = json.loads(output)["partitions"]
    assert code == 0
    assert (line["position"], line["earliest_offset"], line["latest_offset"], line["lag"]) == (
        10,
        14,
        20,
        10,
    )
    _, output = run("offsets", "accept-loss", path)
    assert f"accept-loss {path} --lost {name}:0:10..14 --reason" in output
    words = ["offsets", "accept-loss", path, "--lost", f"{name}:0:10..14", "--json"]
    code, output = run(*words)
    assert (code, json.loads(output)["applied"]) == (0, False)
    assert run(*words, "--apply")[0] == 2, "without a reason"
    code, output = run(*words, "--apply", "--reason", WHY)
    assert (code, json.loads(output)["applied"]) == (0, True)
    assert json.loads(output)["note"]["reason"] == WHY
    assert run(*words, "--apply", "--reason", WHY)[0] == 2, "it is accepted already"
    catch_up(make_config(), spark)
    code, output = run("audit", path, "--json")
    assert code == 0, "somebody has signed for it"
    tables = [
        report for report in json.loads(output) if "table" in report
    ]  # Kafka's answer is last
    assert {report["verdict"] for report in tables} == {"accepted_loss"}
    assert "accept-loss by" in run("audit", path)[1]
    assert run("offsets", "seek", path, "--to", f"{name}:0:99")[0] == 2
    assert run("offsets", "adopt-topic", path, "--topic", name)[0] == 2
    assert run("offsets", "adopt-topic", path)[0] == 0, "there is nothing to adopt"
