"""Many runs of one sink, and several sinks on one table: epochs only grow, nothing is doubled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frazil.commit.tables import SinkTables
from frazil.config.model import Config
from frazil.errors import ConfigError, Fenced, FrazilError
from frazil.iceberg.java import JavaCatalog
from frazil.ledger.entry import entries
from frazil.offsets import Cut
from frazil.run import Run
from frazil.sink import Sink
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact, topic_records
from tests.system.streams import (
    WITHIN,
    Steps,
    audited,
    catch_up,
    eventually,
    numbered,
    produce,
    proven,
    running,
)

Make = Callable[..., Config]


def take_overs(
    count: int,
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    config: Config,
    elsewhere: Callable[[], None],
) -> None:
    """A supervisor that starts the other one although the one before still runs, again and again,
    at whatever it is doing."""
    create_topic(broker.bootstrap, name, 2)
    sent = 0
    older: Run | None = None
    epochs: list[int] = []
    for turn in range(count):
        sent += produce(broker.bootstrap, name, numbered(20, sent), 2)
        elsewhere()
        sink = Sink(config).start(spark)
        epochs.append(sink.epoch)
        sent += produce(broker.bootstrap, name, numbered(20, sent), 2)
        if older is not None:
            before = older
            fenced = eventually(lambda old=before: stopped(old), "it is fenced")  # type: ignore[misc]
            assert isinstance(fenced, Fenced), fenced
            older.stop(5)
        if turn % 2:  # every second one is taken over in the middle of it
            assert sink.wait_until(Cut(dict.fromkeys(sink.ends(), sent // 2)), WITHIN), (
                "no progress"
            )
        older = sink
    assert older is not None
    assert older.wait_until(older.ends(), WITHIN)
    older.stop()
    assert epochs == list(range(1, count + 1))
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == sent
    for table_name in (f"db.{name}", config.index_table):
        table = JavaCatalog(spark, "lake").load(table_name)
        assert table is not None
        taken = [entry.epoch for entry, _ in entries(table.history("main"), config.sink.id)]
        assert taken == sorted(taken, reverse=True), "an older epoch lies on a newer one"
    assert proven(config, spark).written == sent


def stopped(sink: Run) -> FrazilError | None:
    try:
        sink.check()
    except FrazilError as error:
        return error
    return None


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After the call, runs begin as in another process: none is known to run here."""
    return lambda: monkeypatch.setattr("frazil.run._runs", {})


def test_runs_that_take_over_from_each_other(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    elsewhere: Callable[[], None],
):
    take_overs(6, broker, lake, spark, name, make_config(), elsewhere)


@pytest.mark.long
def test_a_hundred_runs_that_take_over_from_each_other(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    elsewhere: Callable[[], None],
):
    take_overs(100, broker, lake, spark, name, make_config(), elsewhere)


def test_two_sinks_fill_one_table_side_by_side_but_not_from_the_same_topic(
    broker: Broker, lake: Lake, spark: Any, name: str
):
    b = broker.bootstrap
    table = {"name": f"db.{name}"}
    both = [f"{name}-a", f"{name}-b"]
    for topic in both:
        create_topic(b, topic, 1)
        produce(b, topic, numbered(10))
    one, other = (lake.config(sink_id, sink_id, b, table=table) for sink_id in both)
    with running(one, spark) as first, running(other, spark) as second:
        for topic in both:
            produce(b, topic, numbered(10, 10))
        assert first.wait_until(first.ends(), WITHIN)
        assert second.wait_until(second.ends(), WITHIN)
    rows = lake.query(f"db.{name}", "_topic, _topic_partition, _offset, value")
    expected = {(t, *at): value for t in both for at, value in topic_records(b, t).items()}
    assert len(rows) == len(expected) == 40
    assert {row[:3]: row[3] for row in rows} == expected
    assert {
        report.sink: report.verdict for report in audited(spark, f"db.{name}")
    } == dict.fromkeys(both, "proven")
    third = {"topics": [f"{name}-b"]}
    twice = lake.config(f"{name}-c", f"{name}-b", b, table=table, sink=third)
    with pytest.raises(ConfigError, match=f"sink {name}-b also fills it from {name}-b") as caught:
        Sink(twice).start(spark)
    assert "allow_shared_topics = true" in caught.value.hint
    assert f"DROP TAG `frazil/{name}-b`" in caught.value.hint
    assert len(lake.query(f"db.{name}", "value")) == 40
    produce(b, f"{name}-b", numbered(1, 20))
    catch_up(other, spark)  # the refused one is in nobody's way
    accepted = lake.config(
        f"{name}-c", f"{name}-b", b, table=table, sink={**third, "allow_shared_topics": True}
    )
    catch_up(accepted, spark)
    rows = lake.query(f"db.{name}", "_offset", f"WHERE _topic = '{name}-b'")
    assert sorted(rows) == sorted([(o,) for o in range(21)] * 2), "as it was asked for"


def test_of_two_sinks_that_come_at_the_same_moment_the_later_is_refused(
    broker: Broker, lake: Lake, spark: Any, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Neither had a tag when the other looked for one."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(5))
    table = {"name": f"db.{name}"}
    one, other = (lake.config(f"{name}-{suffix}", name, b, table=table) for suffix in "ab")
    columns = (
        "value BINARY, _topic STRING NOT NULL, _topic_partition INT NOT NULL, "
        "_offset BIGINT NOT NULL, _timestamp TIMESTAMP"
    )
    spark.sql(f"CREATE TABLE lake.db.{name} ({columns}) USING iceberg")
    look = SinkTables.refuse_shared

    def blind(self: SinkTables, held: Any, topics: Any, walk: bool = False) -> None:
        if walk:
            look(self, held, topics, walk)

    monkeypatch.setattr(SinkTables, "refuse_shared", blind)
    steps = Steps(hold="planned")
    with running(one, spark, steps):
        assert steps.held.wait(WITHIN), "it has claimed the table, and committed nothing"
        with pytest.raises(ConfigError, match=f"sink {name}-a also fills it"):
            Sink(other).start(spark)
    monkeypatch.undo()
    catch_up(one, spark)  # the tag of the refused one is gone
    assert assert_exact(lake, f"db.{name}", b, name) == 5
