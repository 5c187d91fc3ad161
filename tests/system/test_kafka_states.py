"""States that a real broker can be brought into: both readers agree record by record, and what was
lost is never passed over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

import frazil
from frazil.auditing import evidence
from frazil.errors import Expired, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.kafka import protocol
from frazil.kafka.fetch import fetch
from frazil.kafka.leader_epochs import asked_epoch_ends, epoch_ends
from frazil.kafka.planner import Planner, TopicIdentity
from frazil.offsets import Cut, Partition, Range
from frazil.ops import offsets
from frazil.sink import Sink
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import WITHIN, catch_up, reports

Kafka = dict[str, str]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that cleans at once, and that tests may stop and rob of its files."""
    quick = {"log.cleaner.backoff.ms": "50", "log.initial.task.delay.ms": "50"}
    with Broker(tmp_path_factory.mktemp("states") / "broker", settings=quick) as running:
        yield running


def made(broker: Broker, name: str, partitions: int = 1, **config: str) -> Kafka:
    kafka = {"bootstrap.servers": broker.bootstrap, "log_level": "0"}
    admin = AdminClient(kafka)
    for future in admin.create_topics([NewTopic(name, partitions, 1, config=config)]).values():
        future.result()
    return kafka


def send(kafka: Kafka, topic: str, texts: list[str], **where: object) -> None:
    producer = Producer({**kafka, "linger.ms": 5})
    for text in texts:
        producer.produce(topic, text.encode(), **where)  # type: ignore[arg-type]
    producer.flush()


def read(kafka: Kafka, wanted: Range, client: bool) -> tuple[dict[int, bytes | None], int]:
    """Records by offset, and the last leader epoch."""
    records: dict[int, bytes | None] = {}
    at = wanted.start
    for chunk in fetch(kafka, wanted, patience=20, client=client):
        assert chunk.span.start == at
        at = chunk.span.end
        opened = chunk.open()
        records |= dict(zip(opened.offsets.tolist(), opened.values, strict=True))
    assert at == wanted.end
    return records, chunk.leader


def both(kafka: Kafka, wanted: Range) -> tuple[dict[int, bytes | None], int]:
    """What our own Fetch request and librdkafka read alike; and the last leader epoch."""
    for _ in range(20):
        fetched, consumed, again = (read(kafka, wanted, client) for client in (False, True, False))
        if fetched == again:  # else the cleaner was there meanwhile
            assert consumed[0] == fetched[0]
            assert consumed[1] in (-1, fetched[1])
            return fetched
    raise AssertionError("the log does not come to rest")


def lose_the_log(broker: Broker, topic: str) -> None:
    """The only replica loses its disk; the topic is still the same one."""
    broker.stop()
    for path in (broker.directory / "data" / f"{topic}-0").iterdir():
        if path.name != "partition.metadata":
            path.unlink()
    broker.start()


def answer(kafka: Kafka, where: Partition, offset: int) -> tuple[int, list[memoryview], Any]:
    """One Fetch. The connection of this thread may be older than the broker: tests restart it."""
    try:
        return protocol._receive(protocol._send(kafka, where, offset, False), where)
    except (OSError, EOFError):
        protocol.drop_connection(kafka, where)
        return protocol._receive(protocol._send(kafka, where, offset, False), where)


def headers(kafka: Kafka, where: Partition, end: int) -> list[tuple[int, bool, int]]:
    """Base offset, is it a control batch, and count, of all record batches."""
    batch_headers, at = [], 0
    while at < end:
        _, batches, _ = answer(kafka, where, at)
        for raw in batches:
            header = protocol._HEADER.unpack_from(raw)
            batch_headers.append((header[0], bool(header[5] & 32), header[12]))
            at = protocol._behind(raw)
    return batch_headers


def test_control_batches_that_the_cleaner_emptied_are_read_over(states: Broker):
    """A compacted topic with transactions: the cleaner takes the marker's record away and keeps its
    batch, for that tells the producer's state."""
    name, where = "emptied", Partition("emptied", 0)
    kafka = made(
        states,
        name,
        **{
            "cleanup.policy": "compact",
            "segment.ms": "50",
            "min.cleanable.dirty.ratio": "0.001",
            "delete.retention.ms": "0",
            "max.compaction.lag.ms": "100",
        },
    )
    opened = Producer({**kafka, "transactional.id": "x"})
    opened.init_transactions()
    opened.begin_transaction()
    opened.produce(name, b"gone", key=b"k")
    opened.flush()
    # Whoever comes next under this id has the open transaction aborted, in an epoch of its own.
    Producer({**kafka, "transactional.id": "x"}).init_transactions()
    plain = Producer({**kafka, "linger.ms": 0})
    for i in range(400):  # each rolls a segment, which may then be cleaned
        plain.produce(name, b"v%d" % i, key=b"k")
        plain.flush()
        end = 3 + i
        if any(control and not count for _, control, count in headers(kafka, where, end)):
            break
        time.sleep(0.05)
    assert any(control and not count for _, control, count in headers(kafka, where, end))
    for start in range(3):  # also from within
        records, _ = both(kafka, Range(where, start, end))
        assert records[end - 1] == b"v%d" % i
        assert b"gone" not in records.values()


def test_a_log_that_lost_its_tail_and_grew_again_is_not_read_on(states: Broker):
    name, where = "truncated", Partition("truncated", 0)
    kafka = made(states, name)
    send(kafka, name, [f"old-{i}" for i in range(10)])
    _, epoch = both(kafka, Range(where, 0, 10))
    ledger = TopicIdentity(leaders={where: epoch})
    running = Planner(kafka, topics=(name,))
    position = Cut({where: 10})
    running.require(position, running.watermarks([where]))

    lose_the_log(states, name)
    send(kafka, name, [f"new-{i}" for i in range(20)])

    for planner in (running, Planner(kafka, topics=(name,), origin=ledger)):
        _, partitions = planner.origin()
        marks = planner.watermarks(partitions)
        assert marks.end[where] == 20, "it has grown beyond the position"
        with pytest.raises(
            IdentityMismatch, match=r"truncated and overwritten: truncated\[0\] \[0, 10\) were read"
        ) as stop:
            planner.require(position, marks)
        assert "frazil offsets seek CONFIG --to truncated:0:0" in stop.value.hint
    for client in (False, True):
        assert epoch_ends(kafka, {where: epoch}, position, client=client) == {where: 0}
    # What is there now is read in its own epoch, and stands.
    records, later = both(kafka, Range(where, 0, 20))
    assert (records[10], later > epoch) == (b"new-10", True)
    fresh = Planner(kafka, topics=(name,), origin=TopicIdentity(leaders={where: later}))
    fresh.require(Cut({where: 20}), fresh.watermarks([where]))


def test_a_change_of_leader_that_lost_nothing_is_no_trouble(states: Broker):
    name, where = "elected", Partition("elected", 0)
    kafka = made(states, name)
    send(kafka, name, [f"v{i}" for i in range(10)])
    _, epoch = both(kafka, Range(where, 0, 10))
    states.stop()
    states.start()
    position = Cut({where: 10})
    planner = Planner(kafka, topics=(name,), origin=TopicIdentity(leaders={where: epoch}))
    marks = planner.watermarks([where])
    assert marks.leaders[where] > epoch
    planner.require(position, marks)
    assert epoch_ends(kafka, {where: epoch}, position, client=True)[where] >= 10
    send(kafka, name, ["more"])
    planner.require(position, planner.watermarks([where]))


def widen(kafka: Kafka, topic: str, gone: int) -> None:
    """A second partition, ten records in it, and the first ones deleted by retention."""
    admin = AdminClient(kafka)
    for future in admin.create_partitions([NewPartitions(topic, 2)]).values():
        future.result()
    for _ in range(100):
        if len(admin.list_topics(topic).topics[topic].partitions) == 2:
            break
        time.sleep(0.05)
    send(kafka, topic, [f"v{i}" for i in range(10)], partition=1)
    for future in admin.delete_records([TopicPartition(topic, 1, gone)]).values():
        future.result()


def test_a_new_partition_that_lost_its_first_records_is_a_loss(states: Broker):
    name, first, second = "widened", Partition("widened", 0), Partition("widened", 1)
    kafka = made(states, name)
    send(kafka, name, ["a", "b"])
    widen(kafka, name, 7)
    planner = Planner(kafka, topics=(name,))
    with pytest.raises(Expired, match=r"widened\[1\] \[0, 7\) \(7 offsets\)"):
        planner.start(Cut({first: 2}), "earliest")
    assert planner.start(Cut(), "earliest") == Cut({first: 0, second: 7})
    assert both(kafka, Range(second, 7, 10))[0] == {7: b"v7", 8: b"v8", 9: b"v9"}
    with pytest.raises(Expired, match=r"\[3, 7\)"):
        list(fetch(kafka, Range(second, 3, 10), patience=10))


def test_the_broker_is_asked_in_the_protocols_own_words(states: Broker):
    """Many partitions of several topics in one request."""
    kafka = made(states, "many-a", 5)
    made(states, "many-b", 3)
    asked = {Partition("many-a", i): 0 for i in range(5)}
    asked |= {Partition("many-b@7", i): 0 for i in range(3)}
    answered = asked_epoch_ends(kafka, asked)
    assert answered == dict.fromkeys(asked, 0)


def test_a_sink_stops_at_such_a_log_and_reads_the_other_records_after_a_rebase(
    states: Broker, lake: Lake, spark: Any, name: str
):
    kafka = made(states, name)
    config = lake.config(name, name, states.bootstrap)
    send(kafka, name, [f"old-{i}" for i in range(10)])
    catch_up(config, spark)
    index = JavaCatalog(spark, config.catalog.name)
    lose_the_log(states, name)
    send(kafka, name, [f"new-{i}" for i in range(20)])
    with pytest.raises(
        IdentityMismatch, match=rf"truncated and overwritten: {name}\[0\] \[0, 10\) were read"
    ) as stop:
        Sink(config).start(spark)
    seen = evidence.against_kafka(
        config, index.open_readonly, evidence.of_sink(config, index.open_readonly)
    )
    assert seen.verdict == "unaccounted"
    assert offsets.show_offsets(config, index.open_readonly)["stops"]["class"] == "IdentityMismatch"
    [to] = stop.value.hint.split("--to ")[1].split()
    plan = offsets.preview(config, spark, offsets.seek([to]))
    epoch = offsets.apply(
        config, spark, plan, offsets.operator_note("seek", "a disk", "ann@ops")
    ).epoch
    catch_up(config, spark)
    rows = lake.query(
        f"db.{name}",
        "_topic, count(*), min(_offset), max(_offset)",
        "GROUP BY _topic ORDER BY _topic",
    )
    assert rows == [(name, 10, 0, 9), (f"{name}@{epoch}", 20, 0, 19)]


#: Rows with their offsets, rows without, and rows that stand for many records of several batches.
TRANSFORMS = {
    "rows": "SELECT * FROM stream",
    "values": "SELECT value FROM stream WHERE value <> 'x'",
    "windows": "SELECT window.start AS at, count(*) AS n FROM stream WATERMARK _timestamp DELAY OF "
    "INTERVAL 1 SECOND GROUP BY window(_timestamp, '1 second')",
}


@pytest.mark.parametrize(
    "kind", [k if k == "rows" else pytest.param(k, marks=pytest.mark.long) for k in TRANSFORMS]
)
def test_a_sink_with_a_transform_stops_at_such_a_log_and_at_no_other_change_of_leader(
    states: Broker, lake: Lake, spark: Any, name: str, kind: str, tmp_path: Path
):
    kafka = made(states, name)
    sections: dict[str, Any] = {"transform": {"sql": TRANSFORMS[kind]}}
    if kind == "windows":
        sections["sink"] = {"checkpoint_location": str(tmp_path / "checkpoint")}
    config = lake.config(name, name, states.bootstrap, **sections)
    send(kafka, name, [f"old-{i}" for i in range(6)])
    catch_up(config, spark)
    states.stop()
    states.start()
    send(kafka, name, [f"old-{i}" for i in range(6, 10)])
    catch_up(config, spark)  # a restart that loses nothing
    index = JavaCatalog(spark, config.catalog.name)
    assert offsets.show_offsets(config, index.open_readonly)["stops"] is None

    lose_the_log(states, name)
    send(kafka, name, [f"new-{i}" for i in range(20)])
    with pytest.raises(
        IdentityMismatch, match=rf"truncated and overwritten: {name}\[0\] \[0, 10\) were read"
    ):
        Sink(config).start(spark)
    seen = evidence.against_kafka(
        config, index.open_readonly, evidence.of_sink(config, index.open_readonly)
    )
    assert seen.verdict == "unaccounted"
    assert f"{name}[0] [0, 10) were read, but the topic was truncated" in str(seen.findings)
    assert offsets.show_offsets(config, index.open_readonly)["stops"]["class"] == "IdentityMismatch"


def test_a_dataframe_of_our_own_source_stops_at_such_a_log_and_goes_on_over_a_restart(
    states: Broker, lake: Lake, spark: Any, name: str
):
    """Its tasks do not tell in which epochs they read: the broker is asked before and after."""
    kafka = made(states, name)
    given = {
        "kafka.bootstrap.servers": states.bootstrap,
        "sink.topics": name,
        "decode.format": "raw",
    }
    frazil.register(spark)

    def run_to(count: int) -> None:
        rows = spark.readStream.format("frazil").options(**given).load()
        settings = {"id": name, "index_table": f"db.{name}_index", "commit_interval": "0s"}
        sink = frazil.write(rows, f"db.{name}", **settings, trigger="50ms").start()
        try:
            assert sink.wait_until({Partition(name, 0): count}, WITHIN)
        finally:
            sink.stop(20.0)

    send(kafka, name, [f"old-{i}" for i in range(6)])
    run_to(6)
    states.stop()
    states.start()
    send(kafka, name, [f"old-{i}" for i in range(6, 10)])
    run_to(10)
    lose_the_log(states, name)
    send(kafka, name, [f"new-{i}" for i in range(20)])
    with pytest.raises(
        IdentityMismatch, match=rf"truncated and overwritten: {name}\[0\] \[0, 10\) were read"
    ):
        run_to(20)
    assert lake.query(f"db.{name}", "count(*), max(_offset)") == [(10, 9)]


def test_a_sink_stops_at_a_new_partition_that_lost_records_and_goes_on_when_that_is_accepted(
    states: Broker, lake: Lake, spark: Any, name: str
):
    kafka = made(states, name)
    config = lake.config(name, name, states.bootstrap)
    send(kafka, name, ["a", "b"])
    catch_up(config, spark)
    widen(kafka, name, 7)
    with pytest.raises(Expired, match=rf"{name}\[1\] \[0, 7\)") as stop:
        Sink(config).start(spark)
    [lost] = stop.value.hint.split("--lost ")[1].split()
    plan = offsets.preview(config, spark, offsets.accept_loss([lost]))
    offsets.apply(config, spark, plan, offsets.operator_note("accept-loss", "retention", "ann@ops"))
    catch_up(config, spark)
    rows = lake.query(f"db.{name}", "_topic_partition, _offset", "ORDER BY ALL")
    assert rows == [(0, 0), (0, 1), (1, 7), (1, 8), (1, 9)]
    [report] = [r for r in reports(config, spark) if r.table == f"db.{name}"]
    assert report.verdict == "accepted_loss"
    assert [line.counts.lost for line in report.partitions] == [0, 7]
