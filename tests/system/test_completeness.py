"""Is the hour complete? Real Kafka, Spark and Iceberg; asked of index, command and callback."""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

import frazil
from frazil.config.model import Config, load
from frazil.iceberg.file_io import NeedsSpark
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.ledger import index
from frazil.ledger.completeness import moment
from frazil.offsets import BATCHES, Cut
from frazil.ops import completeness as hours
from frazil.run import Run
from frazil.sink import Sink
from frazil.spark.open_table import opener
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake
from tests.system.streams import WITHIN, Steps, avro, catch_up, eventually, part, proven

Make = Callable[..., Config]
UTC = dt.timezone.utc
ROOT = Path(__file__).parents[2]


def at(text: str) -> dt.datetime:
    """A time of one day: `10:50`."""
    return dt.datetime.fromisoformat(f"2026-11-14T{text}:00+00:00")


def send(bootstrap: str, topic: str, **times: list[str]) -> None:
    """Records whose timestamps are these; `p0=["10:00"]` for partition 0."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition, all_of_them in times.items():
        for text in all_of_them:
            producer.produce(
                topic,
                text.encode(),
                partition=int(partition[1:]),
                timestamp=int(at(text).timestamp() * 1000),
            )
    assert producer.flush(30) == 0


def untils(lake: Lake, name: str, columns: str = "batch, min(complete_until), max(complete_until)"):  # type: ignore[no-untyped-def]
    """What the index says with each batch: one moment in all of its rows, never an earlier one."""
    rows = lake.query(
        f"db.{name}_index", columns, f"WHERE sink = '{name}' GROUP BY batch ORDER BY 1"
    )
    assert all(low == high for _, low, high in rows)
    lows = [low for _, low, _ in rows]
    known = [low for low in lows if low is not None]
    assert known == sorted(known)
    assert lows[len(lows) - len(known) :] == known
    return lows


def answer(config: Config, hour: str = "") -> hours.CompletenessReport:
    """By the index's files alone: no Spark."""
    return hours.completeness(config, opener(config, spark=False), hour)


def until(config: Config) -> dt.datetime | None:
    text = answer(config).complete_until
    return None if text is None else moment(text)


def caught_up(config: Config, spark: Any, **more: Any) -> Run:
    sink = Sink(config, **more).start(spark)
    try:
        ends = sink.ends()
        assert sink.wait_until(ends, WITHIN), f"at {sink.position}, not at {ends}"
    finally:
        sink.stop(20)
    return sink


def frazil_command(*given: str) -> subprocess.CompletedProcess[str]:
    code = "from frazil.cli.commands import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *given],
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )


# ── the plain way ────────────────────────────────────────────────────────────────────────────────


def test_an_hour_is_complete_when_every_partition_is_past_it_and_stays_so(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Callable[..., Path]
):
    create_topic(broker.bootstrap, name, 3)  # one of them stays empty
    path = write_toml()
    config = load(path)
    send(broker.bootstrap, name, p0=["10:10", "10:30"], p1=["10:50"])
    heard: list[dt.datetime] = []
    sink = caught_up(config, spark, on_complete=heard.append)
    assert sink.complete_until == at("10:30")
    assert heard == [at("10:30")]
    assert untils(lake, name)[-1] == at("10:30")

    completed = frazil_command("completeness", str(path), "2026-11-14T10", "--json")
    assert completed.returncode == 3, completed.stderr
    shown = json.loads(completed.stdout)
    assert (shown["complete"], shown["complete_until"]) == (False, at("10:30").isoformat())
    assert [
        (partition["partition"], partition["state"], partition["missing_seconds"])
        for partition in shown["partitions"]
    ] == [
        (0, "holds", 1800.0),
        (1, "ahead", 600.0),
        (2, "silent", 0.0),
    ]

    # Another run; the partition that was ahead brings nothing, and is still known to be.
    send(broker.bootstrap, name, p0=["11:20"])
    again: list[dt.datetime] = []
    assert caught_up(config, spark, on_complete=again.append).complete_until == at("10:50")
    assert again == [at("10:30")]  # a run begins with what is complete; no hour was crossed
    send(broker.bootstrap, name, p1=["11:00"])
    assert caught_up(config, spark, on_complete=again.append).complete_until == at("11:00")
    assert again[1:] == [at("10:50"), at("11:00")]
    completed = frazil_command("completeness", str(path), "2026-11-14T10")
    assert completed.returncode == 0, completed.stderr
    assert f"complete until {at('11:00').isoformat()}" in completed.stdout
    assert "2026-11-14T10: complete" in completed.stdout
    assert frazil_command("completeness", str(path), "2026-11-14").returncode == 3
    assert frazil_command("completeness", str(path), "10 o'clock").returncode == 2

    # Late records, and a new partition with older ones.
    send(broker.bootstrap, name, p0=["08:00"])
    topics = AdminClient({"bootstrap.servers": broker.bootstrap})
    topics.create_partitions([NewPartitions(name, 4)])[name].result(30)
    eventually(lambda: part(name, 3) in sink.ends(), "a fourth partition")
    send(broker.bootstrap, name, p3=["03:00"])
    send(broker.bootstrap, name, p0=["12:00"], p1=["12:10"])
    catch_up(config, spark)
    assert until(config) == at("11:00")
    held = {partition.partition.number: partition.state for partition in answer(config).partitions}
    assert held == {0: "ahead", 1: "ahead", 2: "silent", 3: "holds"}
    send(broker.bootstrap, name, p3=["11:30"])
    assert caught_up(config, spark).complete_until == at("11:30")
    untils(lake, name)
    proven(config, spark)


@pytest.mark.long
def test_it_survives_compaction_and_expiry_of_the_table_and_of_the_index(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config(completeness={"allowed_lateness": "5m"})
    for hour in ("07", "08", "09"):
        send(broker.bootstrap, name, p0=[f"{hour}:00", f"{hour}:30"], p1=[f"{hour}:40"])
        catch_up(config, spark)
    before = untils(lake, name)
    assert before[-1] == at("09:25")
    for table in (f"db.{name}", f"db.{name}_index"):
        rewritten = spark.sql(
            f"CALL lake.system.rewrite_data_files(table => '{table}', "
            "options => map('rewrite-all', 'true'))"
        ).collect()[0]
        assert rewritten["rewritten_data_files_count"] > 1
        spark.sql(
            f"CALL lake.system.expire_snapshots(table => '{table}', retain_last => 1, "
            "older_than => current_timestamp())"
        )
    assert until(config) == at("09:25")
    assert untils(lake, name) == before
    send(broker.bootstrap, name, p0=["10:30"])
    assert caught_up(config, spark).complete_until == at("09:35")  # partition 1 was at 09:40
    send(broker.bootstrap, name, p1=["10:10"])
    assert caught_up(config, spark).complete_until == at("10:05")
    monkeypatch.setattr(index, "FANOUT", 3)  # and now the sink's own
    merges = Steps()
    sink = Sink(config, on_step=merges).start(spark)
    try:
        for minute in range(30, 38):
            send(broker.bootstrap, name, p0=[f"10:{minute}"], p1=[f"10:{minute}"])
            assert sink.wait_until(sink.ends(), WITHIN)
    finally:
        sink.stop()
    assert merges.named("index-merged")
    assert untils(lake, name)[-1] == at("10:32")
    assert len(untils(lake, name)) >= len(before) + 4
    assert caught_up(config, spark).complete_until == at("10:32")
    bounds = spark.sql(
        "SELECT readable_metrics._timestamp.lower_bound, readable_metrics._timestamp.upper_bound "
        f"FROM lake.db.{name}.files ORDER BY 1"
    ).collect()
    spans = [(str(low), str(high)) for low, high in bounds]
    assert spans[0] == ("2026-11-14 07:00:00", "2026-11-14 09:40:00")
    assert len(spans) > 3


def test_a_partition_with_records_to_read_holds_it_back_also_in_the_very_first_batch(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    send(broker.bootstrap, name, p0=["10:00", "11:00"], p1=["09:00"])
    config = make_config()
    sink = Sink(config).start(spark, until=Cut({part(name, 0): 2, part(name, 1): 0}))
    try:
        assert sink.wait_until(Cut({part(name, 0): 2}), WITHIN)
    finally:
        sink.stop()
    assert sink.complete_until is None
    assert until(config) is None
    assert [partition.state for partition in answer(config).partitions] == ["holds", "silent"]
    assert caught_up(config, spark).complete_until == at("09:00")
    assert untils(lake, name) == [None, at("09:00")]


def test_a_partition_that_is_idle_holds_the_others_back_no_more(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    send(broker.bootstrap, name, p0=["10:00"], p1=["09:00"])
    config = make_config(completeness={"idle_timeout": "2s"})
    sink = Sink(config).start(spark)
    try:
        assert sink.wait_until(sink.ends(), WITHIN)
        assert sink.complete_until == at("09:00")
        minutes = iter(range(1, 60))

        def moved() -> bool:
            send(broker.bootstrap, name, p0=[f"10:{next(minutes):02}"])
            assert sink.wait_until(sink.ends(), WITHIN)
            assert sink.complete_until is not None
            return sink.complete_until > at("10:00")

        eventually(moved, "the idle partition is left out", sink=sink)
        states = {
            partition.partition.number: partition.state for partition in answer(config).partitions
        }
        assert states == {0: "holds", 1: "idle"}
        send(broker.bootstrap, name, p1=["09:10"])  # late
        assert sink.wait_until(sink.ends(), WITHIN)
    finally:
        sink.stop()
    untils(lake, name)


# ── a dropped column, several tables, DataFrames ─────────────────────────────────────────────────


def test_an_index_that_lost_the_column_gets_it_back_with_the_event_times_of_partitions(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    send(broker.bootstrap, name, p0=["10:00"], p1=["11:00"])
    catch_up(config, spark)
    spark.sql(f"ALTER TABLE lake.db.{name}_index DROP COLUMN complete_until")
    assert answer(config, "2026-11-14T08").complete is False
    assert caught_up(config, spark).complete_until is None  # the column is back, without a value
    send(broker.bootstrap, name, p0=["12:00"])
    assert caught_up(config, spark).complete_until == at("11:00")
    assert untils(lake, name) == [None, at("11:00")]


def test_what_cannot_be_read_from_here_is_read_by_spark(
    broker: Broker,
    spark: Any,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    send(broker.bootstrap, name, p0=["10:00"], p1=["11:00"])
    catch_up(config, spark)

    def rows(*_: Any) -> None:
        raise NeedsSpark("cannot open the index: no such store")

    monkeypatch.setattr(ReadOnlyTable, "rows", rows)
    heard: list[dt.datetime] = []
    send(broker.bootstrap, name, p0=["12:00"])
    assert caught_up(config, spark, on_complete=heard.append).complete_until == at("11:00")
    assert heard == [at("10:00"), at("11:00")]


EVENT = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "kind", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}


def events(bootstrap: str, topic: str, *given: tuple[int, str, str | dt.datetime]) -> None:
    """Avro records: partition, kind and event time; a kind `bad` cannot be decoded."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition, kind, text in given:
        when = at(text) if isinstance(text, str) else text
        moment = int(when.timestamp() * 1_000_000)
        value = b"\xff" if kind == "bad" else avro(EVENT, {"kind": kind, "at": moment})
        producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


def of_events(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "event.avsc").write_text(json.dumps(EVENT))
    return {"format": "avro", "schema": str(tmp_path / "event.avsc")}


def test_of_many_tables_the_rows_of_the_stream_say_it_and_dead_letters_have_no_event_time(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 2)
    tables = [{"name": f"db.{name}_{suffix}", "event_time": "at"} for suffix in "ab"]
    config = make_config(
        decode=of_events(tmp_path),
        table=tables,
        route=[
            {"field": "kind", "values": [suffix], "to": [f"db.{name}_{suffix}"]} for suffix in "ab"
        ],
        dead_letters={"table": f"db.{name}_dead", "max_fraction": 1.0},
    )
    future = dt.datetime.now(UTC) + dt.timedelta(days=3650)
    events(
        broker.bootstrap,
        name,
        (0, "a", "10:00"),
        (0, "b", "10:20"),
        (1, "a", "10:40"),
        (1, "bad", "10:00"),
        (1, "nowhere", "23:00"),
    )
    assert caught_up(config, spark).complete_until == at("10:20")
    spans = lake.query(
        f"db.{name}_index",
        "table_name, partition, event_time_low, event_time_high",
        f"WHERE table_name <> 'db.{name}_dead' AND event_time_low IS NOT NULL ORDER BY 1, 2",
    )
    assert spans == [
        ("*", 0, at("10:00"), at("10:20")),
        ("*", 1, at("10:40"), at("10:40")),
        (f"db.{name}_a", 0, at("10:00"), at("10:00")),
        (f"db.{name}_a", 1, at("10:40"), at("10:40")),
        (f"db.{name}_b", 0, at("10:20"), at("10:20")),
    ]
    events(broker.bootstrap, name, (0, "a", future))  # a broken clock
    assert caught_up(config, spark).complete_until == at("10:20")
    partition = answer(config).partitions[0]
    assert partition.event_time is not None
    assert partition.ignored_event_time is not None
    events(broker.bootstrap, name, (0, "b", "12:00"))
    assert caught_up(config, spark).complete_until == at("10:40")
    untils(lake, name)


@contextmanager
def living(sink: Sink) -> Iterator[Run]:
    run = sink.start()
    try:
        yield run
    finally:
        run.stop(20)


def test_a_dataframe_that_keeps_where_rows_come_from_is_judged_by_partition(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    heard: list[dt.datetime] = []

    def run_once() -> Run:
        frame = frazil.read(spark, config).where("value <> 'no'")
        sink = frazil.write(
            frame,
            f"db.{name}",
            id=name,
            index_table=f"db.{name}_index",
            trigger="50ms",
            commit_interval="0s",
            event_time="_timestamp",
            allowed_lateness="10m",
            on_complete=heard.append,
        )
        with living(sink) as run:
            assert run.wait_until(run.ends(), WITHIN)
        return run

    send(broker.bootstrap, name, p0=["10:00"], p1=["11:30"])
    assert run_once().complete_until == at("09:50")
    send(broker.bootstrap, name, p0=["12:00"])
    assert run_once().complete_until == at("11:20")
    assert heard == [at("09:50"), at("09:50"), at("11:20")]
    spans = lake.query(
        f"db.{name}_index", "topic, partition, max(event_time_high)", "GROUP BY 1, 2 ORDER BY 1, 2"
    )
    assert spans == [("(batches)", 0, at("12:00")), (name, 0, at("12:00")), (name, 1, at("11:30"))]
    untils(lake, name)


def test_rows_that_come_from_no_partition_are_judged_by_batches(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    send(broker.bootstrap, name, p0=["10:00"], p1=["11:30"])
    frame = frazil.read(spark, config).selectExpr("value", "_timestamp AS happened")
    sink = frazil.write(
        frame,
        f"db.{name}",
        id=name,
        index_table=f"db.{name}_index",
        trigger="50ms",
        commit_interval="0s",
        event_time="happened",
    )
    with living(sink) as run:
        assert run.wait_until(run.ends(), WITHIN)
    assert run.complete_until == at("11:30")
    [partition] = hours.completeness(
        sink.config, JavaCatalog(spark, "lake").open_readonly
    ).partitions
    assert (partition.partition, partition.state) == (BATCHES, "holds")


# ── the callback, and waiting ────────────────────────────────────────────────────────────────────


def test_a_callback_that_raises_breaks_no_commit_and_is_called_again(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config()
    mended = threading.Event()
    heard: list[dt.datetime] = []

    def moody(until: dt.datetime) -> None:
        if not mended.is_set():
            raise RuntimeError("nobody is there")
        heard.append(until)

    sink = Sink(config, on_complete=moody).start(spark)
    try:
        for text in ("10:00", "11:00", "12:00"):
            send(broker.bootstrap, name, p0=[text])
            assert sink.wait_until(sink.ends(), WITHIN)
        assert "on_complete raised RuntimeError: nobody is there" in eventually(
            lambda: sink.progress.on_complete_error, "the error is reported"
        )
        mended.set()
        eventually(lambda: len(heard) == 3, "all hours are reported", sink=sink)
    finally:
        sink.stop()
    assert heard == [at("10:00"), at("11:00"), at("12:00")]
    assert sink.progress.on_complete_error == ""


def test_the_command_waits_for_an_hour(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Callable[..., Path]
):
    create_topic(broker.bootstrap, name, 1)
    path = write_toml()
    config = load(path)
    assert frazil_command("completeness", str(path)).returncode == 2  # there is no index yet
    send(broker.bootstrap, name, p0=["10:30"])
    catch_up(config, spark)
    assert frazil_command("completeness", str(path), "--wait", "1s").returncode == 2
    assert (
        frazil_command("completeness", str(path), "2026-11-14T10", "--wait", "1s").returncode == 3
    )
    completed: list[subprocess.CompletedProcess[str]] = []
    waiting = threading.Thread(
        target=lambda: completed.append(
            frazil_command("completeness", str(path), "2026-11-14T10", "--wait", "120s")
        )
    )
    waiting.start()
    send(broker.bootstrap, name, p0=["11:30"])
    catch_up(config, spark)
    waiting.join(WITHIN)
    assert completed[0].returncode == 0, completed[0].stderr


# ── the guide's queries ──────────────────────────────────────────────────────────────────────────


def queries(engine: str) -> dict[str, str]:
    """Title → query, as they stand in the guide."""
    page = (ROOT / "docs/guide/completeness.md").read_text()
    blocks = re.findall(rf"```sql\n-- {engine}: ([^\n]+)\n(.*?)```", page, re.DOTALL)
    return dict(blocks)


@pytest.fixture(scope="module")
def renamed_query(
    broker: Broker, lake: Lake, spark: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """A stream that went as the guide says; and its queries, with the names they have here."""
    name = "guide"
    create_topic(broker.bootstrap, name, 2)
    config = lake.config(
        name,
        name,
        broker.bootstrap,
        decode=of_events(tmp_path_factory.mktemp("guide")),
        table={"event_time": "at"},
    )
    for given in (
        [(0, "a", "10:00"), (1, "a", "10:50")],
        [(0, "a", "11:20"), (1, "a", "10:55")],
        [(0, "a", "10:20"), (0, "a", "11:20"), (1, "a", "11:05")],
    ):
        events(broker.bootstrap, name, *given)
        catch_up(config, spark)

    def renamed(query: str) -> str:
        replaced = {
            "lake.shop.frazil_index": "lake.db.guide_index",
            "lake.shop.orders": "lake.db.guide",
            "'warehouse/shop/frazil_index'": f"'{lake.metadata_file('db.guide_index')}'",
            "'orders'": "'guide'",
            "placed_at": "at",
            "2026-11-15": "2026-11-14",
        }
        for old, new in replaced.items():
            query = query.replace(old, new)
        return query

    return renamed


def test_the_guides_queries_run_in_spark(spark: Any, renamed_query: Callable[[str], str]):
    assert len(queries("Spark")) == 7
    answers = {
        title: [tuple(row) for row in spark.sql(renamed_query(query)).collect()]
        for title, query in queries("Spark").items()
    }
    check(answers, lambda text: at(text).replace(tzinfo=None))
    assert len(answers["only what is complete"]) == 4
    assert answers["how many of them"] == [(0,)]
    files = answers["event times of each file"]
    assert len(files) >= 3
    assert (files[0][2], max(row[3] for row in files)) == (
        at("10:00").replace(tzinfo=None),
        at("11:20").replace(tzinfo=None),
    )


def test_the_guides_queries_run_in_duckdb(renamed_query: Callable[[str], str]):
    assert len(queries("DuckDB")) == 4
    connection = duckdb.connect()
    connection.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'")
    answers = {
        title: connection.execute(renamed_query(query)).fetchall()
        for title, query in queries("DuckDB").items()
    }
    check(answers, at)


def check(answers: dict[str, list[tuple[Any, ...]]], when: Callable[[str], Any]) -> None:
    """What both engines must say."""
    assert answers["until when?"] == [(when("11:05"),)]
    [(complete, since)] = answers["is the hour from 10 to 11 complete, and since when?"]
    assert complete
    assert since is not None
    assert answers["where each partition stands, the last one first"] == [
        ("guide", 1, when("11:05"), 3),
        ("guide", 0, when("11:20"), 4),
    ]
    late = answers["batches with late records"]
    assert [(row[1], row[2], row[3], row[6], row[7]) for row in late] == [
        ("db.guide", "guide", 0, when("10:20"), when("10:55"))
    ]
