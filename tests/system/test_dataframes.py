"""Spark in the middle: any streaming DataFrame becomes a table; the oracle reads the data files."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

import frazil
from frazil.auditing.report import TableReport
from frazil.commit import protocol
from frazil.config.model import Config
from frazil.errors import (
    ConfigError,
    Expired,
    FrazilError,
    Gap,
    IdentityMismatch,
    SchemaMismatch,
    Unavailable,
    Undecodable,
    from_traceback,
)
from frazil.iceberg.java_table import JavaTable
from frazil.offsets import BATCHES, Partition
from frazil.render import json_values
from frazil.run import Run
from frazil.sink import Sink
from frazil.steps import Step
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact, assert_once, topic_records
from tests.system.streams import (
    WITHIN,
    Registry,
    Steps,
    audited,
    avro,
    catch_up,
    eventually,
    numbered,
    part,
    produce,
    running,
)
from tests.system.test_stream import transaction

Make = Callable[..., Config]
UTC = dt.timezone.utc
#: Where a row comes from, in SQL.
ORIGIN = "_topic, _topic_partition, _offset, _timestamp"


# ── what these tests share ───────────────────────────────────────────────────────────────────────


def rate(spark: Any, rows: int = 10, **options: Any) -> Any:
    """A stream that counts: value 0, 1, 2, …, so many in each batch, as fast as they are taken."""
    source = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=rows, **options)
    return source.options(numPartitions=2).load()


def kafka(spark: Any, bootstrap: str, topic: str, **options: Any) -> Any:
    """Spark's own Kafka source, with the names that ours has for where a row comes from."""
    given = {
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": "earliest",
        **options,
    }
    rows = spark.readStream.format("kafka").options(**given).load()
    return rows.selectExpr(
        "value", "topic AS _topic", "partition AS _topic_partition", "offset AS _offset"
    )


def orders(count: int, start: int = 0, **more: Callable[[int], Any]) -> list[bytes]:
    """JSON records: n counts, k is one of five, and whatever else is asked for."""
    return [
        json.dumps({"n": n, "k": f"k{n % 5}", **{key: f(n) for key, f in more.items()}}).encode()
        for n in range(start, start + count)
    ]


def written(frame: Any, name: str, **settings: Any) -> Sink:
    """A sink for `frame` with this test's own table and index."""
    quick = {"trigger": "50ms", "commit_interval": "0s"}
    given = {"id": name, "index_table": f"db.{name}_index", **quick, **settings}
    return frazil.write(frame, f"db.{name}", **given)


@contextmanager
def living(sink: Sink, flush: float = 20.0) -> Iterator[Run]:
    """One run of a DataFrame's sink; at its end what is staged has `flush` seconds."""
    run = sink.start()
    try:
        yield run
    finally:
        run.stop(flush)


def caught_up(sink: Sink, cut: dict[Partition, int] | None = None) -> Run:
    """One run, to the end of the topics as they are now."""
    with living(sink) as run:
        ends = run.ends() if cut is None else cut
        assert ends
        assert run.wait_until(ends, WITHIN), f"at {run.position}, not at {ends}"
    return run


def batches(sink: Run) -> int:
    """How many batches are committed."""
    return sink.position.get(BATCHES, 0)


def snapshots(lake: Lake, *tables: str) -> list[int]:
    """Of the tables' own metadata files; none where there is no such table."""
    ids = []
    for table in tables:
        try:
            text = Path(lake.metadata_file(table)).read_text()
        except LookupError:
            continue
        ids += [snapshot["snapshot-id"] for snapshot in json.loads(text)["snapshots"]]
    return ids


def wait_for_rows(lake: Lake, name: str, count: int, sink: Run) -> None:
    """By what the table's own metadata says, which is cheap to ask again and again."""

    def filled() -> bool:
        metadata = json.loads(Path(lake.metadata_file(f"db.{name}")).read_text())
        now = metadata.get("current-snapshot-id")
        summaries = [s["summary"] for s in metadata["snapshots"] if s["snapshot-id"] == now]
        return bool(summaries) and int(summaries[0].get("total-records", 0)) >= count

    eventually(filled, f"{count} rows", sink=sink)


def report(spark: Any, name: str) -> TableReport:
    [table_report] = [
        candidate for candidate in audited(spark, f"db.{name}") if candidate.sink == name
    ]
    return table_report


def assert_proven(spark: Any, name: str, of: str) -> TableReport:
    table_report = report(spark, name)
    assert (table_report.verdict, table_report.proves) == ("proven", of), table_report
    return table_report


def fates(table_report: TableReport, topic: str) -> dict[str, int]:
    """What became of a topic's offsets, in sum."""
    total: Counter[str] = Counter()
    for line in json_values(table_report)["partitions"]:
        if line["topic"] == topic:
            keys = ("written", "rejected", "skipped", "invisible", "merged")
            total.update({key: line[key] for key in keys})
    return {key: count for key, count in total.items() if count}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After the call, runs begin as in another process: none is known to run here."""
    return lambda: monkeypatch.setattr("frazil.run._runs", {})


@pytest.fixture(scope="module")
def shared(broker: Broker) -> str:
    """A topic that no test adds to: 60 orders with keys and headers over two partitions. With
    several workers of pytest the fixture may be set up twice: the topic is made once a broker."""
    topic = "frames-shared"
    if topic in AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics().topics:
        return topic
    create_topic(broker.bootstrap, topic, 2)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    began = int(time.time()) * 1000
    for n, value in enumerate(orders(60)):
        key = None if n % 3 == 0 else f"key-{n}".encode()
        headers = [("n", str(n).encode()), ("n", None)] if n % 2 else []
        producer.produce(topic, value, key, n % 2, headers=headers, timestamp=began + n)
    assert producer.flush(30) == 0
    return topic


# ── a stream as a DataFrame ──────────────────────────────────────────────────────────────────────

Record = tuple[Any, Any, list[tuple[str, Any]], int]


def whole_records(bootstrap: str, topic: str) -> dict[tuple[int, int], Record]:
    """(partition, offset) → value, key, headers and timestamp, read with a plain consumer."""
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "oracle",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    numbers = range(partitions(bootstrap, topic))
    consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
    records: dict[tuple[int, int], Record] = {}
    ended: set[int] = set()
    while len(ended) < len(numbers):
        for message in consumer.consume(1000, 1.0):
            if message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
            else:
                at = message.partition(), message.offset()
                headers = list(message.headers() or [])
                records[at] = message.value(), message.key(), headers, message.timestamp()[1]
    consumer.close()
    return records


def by_offset(rows: Iterable[Any], topic: str) -> dict[tuple[int, int], dict[str, Any]]:
    rows_by_offset: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        values = row.asDict(recursive=True)
        assert values.pop("_topic") == topic
        at = values.pop("_topic_partition"), values.pop("_offset")
        assert at not in rows_by_offset, f"{at} is there twice"
        rows_by_offset[at] = values
    return rows_by_offset


def beside(record: Record) -> dict[str, Any]:
    """What stands behind a record's own columns."""
    _, key, headers, timestamp = record
    return {
        "_timestamp": dt.datetime.fromtimestamp(timestamp / 1000, UTC).replace(tzinfo=None),
        "_key": key,
        "_headers": [{"key": k, "value": v} for k, v in headers],
    }


def streamed(frame: Any, name: str) -> list[Any]:
    """All there is of a streaming DataFrame, by Spark alone."""
    writer = frame.writeStream.format("memory").queryName(name).trigger(availableNow=True)
    query = writer.start()
    assert query.awaitTermination(WITHIN)
    return list(frame.sparkSession.table(name).collect())


def bytes_of(values: dict[str, Any]) -> dict[str, Any]:
    plain = {k: bytes(v) if isinstance(v, bytearray) else v for k, v in values.items()}
    plain["_headers"] = [
        {"key": h["key"], "value": None if h["value"] is None else bytes(h["value"])}
        for h in values["_headers"]
    ]
    return plain


@pytest.mark.parametrize("kind", ["raw", "json"])
def test_a_read_gives_every_record_with_its_envelope(
    broker: Broker, spark: Any, name: str, make_config: Make, shared: str, kind: str
):
    config = make_config(decode={"format": kind}, sink={"topics": [shared]})
    records = whole_records(broker.bootstrap, shared)
    own = {at: {"value": r[0]} if kind == "raw" else json.loads(r[0]) for at, r in records.items()}
    expected = {at: {**own[at], **beside(record)} for at, record in records.items()}
    assert len(expected) == 60
    frazil.register(spark)
    frazil.register(spark)  # again is no harm
    given = {
        "kafka.bootstrap.servers": broker.bootstrap,
        "sink.topics": shared,
        "decode.format": kind,
    }
    ways = {
        "frazil.read": streamed(frazil.read(spark, config), f"{name}a"),
        "readStream": streamed(
            spark.readStream.format("frazil").options(**given).load(), f"{name}b"
        ),
        "read": spark.read.format("frazil").options(**given).load().collect(),
    }
    for way, rows in ways.items():
        actual = {at: bytes_of(values) for at, values in by_offset(rows, shared).items()}
        assert actual == expected, way


def test_confluent_avro_is_read_as_it_was_written(
    broker: Broker, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    row = {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "who", "type": {"type": "string", "logicalType": "uuid"}},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
    begin = dt.datetime(2024, 2, 28, 21, 30, 0, 123456, tzinfo=UTC)
    given = [
        {
            "id": i,
            "at": begin + dt.timedelta(hours=i),
            "who": f"00000000-0000-0000-0000-{i:012d}",
            "tags": ["ä"] * i,
            "note": None if i % 2 else f"n{i}",
        }
        for i in range(8)
    ]
    produce(broker.bootstrap, name, (avro(row, record, 1) for record in given), 2)
    with Registry(id1=row) as registry:
        config = make_config(decode={"format": "confluent-avro", "registry": {"url": registry.url}})
        by_place = by_offset(streamed(frazil.read(spark, config), name), name)
        options = {
            "kafka.bootstrap.servers": broker.bootstrap,
            "sink.topics": name,
            "decode.format": "confluent-avro",
            "decode.registry.url": registry.url,
        }
        again = by_offset(spark.read.format("frazil").options(**options).load().collect(), name)
    rows = [{k: by_place[n % 2, n // 2][k] for k in given[0]} for n in range(8)]
    assert rows == [{**record, "at": record["at"].replace(tzinfo=None)} for record in given]
    assert again == by_place


def test_a_range_is_read_exactly(
    broker: Broker, lake: Lake, spark: Any, make_config: Make, shared: str
):
    config = make_config(
        decode={"format": "json"}, sink={"topics": [shared]}, table={"offset_column": "_at"}
    )
    start, end = {shared: {"0": 5, "1": 29}}, {shared: {"0": 17, "1": 30}}
    rows = frazil.read(spark, config, start=start, end=end)
    assert not rows.isStreaming
    offsets = sorted((r._topic_partition, r._at) for r in rows.collect())
    assert offsets == [(0, o) for o in range(5, 17)] + [(1, 29)]
    options = {
        "kafka.bootstrap.servers": broker.bootstrap,
        "sink.topics": shared,
        "decode.format": "json",
        "start": json.dumps(start),
        "end": json.dumps(end),
    }
    again = spark.read.format("frazil").options(**options).load()
    assert sorted((r._topic_partition, r._offset) for r in again.collect()) == offsets
    assert frazil.read(spark, config, start=start, end=start).count() == 0


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        ({}, {"0": 31}, r"frames-shared\[0\] to offset 31: the stream's range is \[0, 30\)"),
        ({}, {"7": 1}, r"frames-shared\[7\] to offset 1: "),
        ({"0": 9}, {"0": 4}, r"frames-shared\[0\] to offset 4: the stream's range is \[9, 30\)"),
    ],
)
def test_a_range_that_the_topic_does_not_have_is_refused_at_once(
    spark: Any, make_config: Make, shared: str, start: Any, end: Any, words: str
):
    config = make_config(
        decode={"format": "json"}, sink={"topics": [shared], "unavailable_timeout": "5s"}
    )
    with pytest.raises((ConfigError, PySparkException), match=words) as refused:
        frazil.read(
            spark, config, start={shared: start} if start else "", end={shared: end}
        ).count()
    error = refused.value
    cause = error if isinstance(error, ConfigError) else from_traceback(str(error))
    assert isinstance(cause, ConfigError)


@pytest.mark.long
def test_a_plain_spark_sink_behind_a_read_loses_and_doubles_nothing_and_the_limit_is_kept(
    broker: Broker, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    config = make_config(sink={"max_records_per_trigger": 10})
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    produced = 0
    for _ in range(2):
        produced += produce(b, name, numbered(35, produced), 2)
        rows = frazil.read(spark, config).select("value", "_topic_partition", "_offset")
        writer = rows.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(processingTime="50 milliseconds").start(str(out))
        try:
            eventually(lambda n=produced: planned(checkpoint)[-1] == n, "all is planned")  # type: ignore[misc]
            query.processAllAvailable()
        finally:
            query.stop()
    sizes = [b - a for a, b in zip([0, *planned(checkpoint)], planned(checkpoint), strict=False)]
    assert sum(sizes) == produced == 70
    assert max(sizes) <= 10, "the limit was not kept"
    assert len(sizes) <= 10, "the limit is used, not just kept"
    files = [str(path) for path in out.glob("*.parquet")]
    relation = duckdb.sql(f"SELECT _topic_partition, _offset, value FROM read_parquet({files})")
    rows_there = relation.fetchall()
    assert_once(row[:2] for row in rows_there)
    assert {row[:2]: row[2] for row in rows_there} == topic_records(b, name)


def planned(checkpoint: Path) -> list[int]:
    """How many offsets Spark's own log has planned after each batch."""
    numbers = sorted(int(p.name) for p in (checkpoint / "offsets").glob("[0-9]*"))
    offsets = [(checkpoint / "offsets" / str(n)).read_text().splitlines()[2] for n in numbers]
    cuts = [json.loads(text)["cut"] for text in offsets]
    return [sum(o for topic in cut.values() for o in topic.values()) for cut in cuts] or [0]


def test_a_record_that_cannot_be_decoded_is_named_and_nothing_of_its_batch_is_written(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    values = orders(20)
    values[15] = b"{not json"  # partition 1, offset 7
    produce(broker.bootstrap, name, values, 2)
    config = make_config(decode={"format": "json"}, transform={"sql": EVEN})
    with (
        running(config, spark) as sink,
        pytest.raises(Undecodable, match=rf"{name}\[1\] offset 7: "),
    ):
        sink.wait_until(sink.ends(), WITHIN)
    assert lake.query(f"db.{name}", "count(*)") == [(0,)]
    ends = {name: {"0": 10, "1": 10}}
    with pytest.raises(PySparkException) as raised:
        frazil.read(spark, config, end=ends).collect()
    assert isinstance(from_traceback(str(raised.value)), Undecodable)
    assert f"{name}[1] offset 7" in str(raised.value)


def test_an_empty_topic_has_no_columns_to_read_unless_a_schema_names_them(
    broker: Broker, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 1)
    with pytest.raises(ConfigError, match=f"columns of {name}: it has no records yet"):
        frazil.read(spark, make_config(decode={"format": "json"}))
    schema = tmp_path / "row.avsc"
    fields = [{"name": "n", "type": "long"}]
    schema.write_text(json.dumps({"type": "record", "name": "Row", "fields": fields}))
    rows = frazil.read(spark, make_config(decode={"format": "avro", "schema": str(schema)}))
    assert rows.columns == ["n", *ORIGIN.split(", "), "_key", "_headers"]


# ── the config's transform ───────────────────────────────────────────────────────────────────────


def test_what_sql_leaves_out_is_skipped_and_what_never_was_a_record_is_invisible(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    produce(b, name, orders(20), 2)
    transaction(b, f"{name}-a", name, orders(8, 100), "abort")
    transaction(b, f"{name}-b", name, orders(10, 20), "commit")
    sql = f"SELECT k, n * 10 AS tens, upper(k) AS loud, {ORIGIN} FROM stream s WHERE s.n % 3 = 0"
    config = make_config(
        decode={"format": "json"}, sink={"max_records_per_trigger": 20}, transform={"sql": sql}
    )
    sink = catch_up(config, spark)
    records = {key: json.loads(value or b"") for key, value in topic_records(b, name).items()}
    assert len(records) == 30
    kept = {key: r for key, r in records.items() if r["n"] % 3 == 0}
    rows = lake.query(f"db.{name}", "_topic_partition, _offset, k, tens, loud, _topic")
    assert_once(row[:2] for row in rows)
    assert set(rows) == {
        (*key, r["k"], r["n"] * 10, r["k"].upper(), name) for key, r in kept.items()
    }
    table_report = assert_proven(spark, name, "records")
    ends = sum(offset for p, offset in sink.position.items() if p.topic == name)
    assert fates(table_report, name) == {
        "written": len(kept),
        "skipped": 30 - len(kept),
        "invisible": ends - 30,
    }


def test_a_common_table_expression_and_a_subquery_are_sql_too(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, shared: str
):
    spark.sql(f"CREATE TABLE lake.db.{name}_some (k STRING) USING iceberg")
    spark.sql(f"INSERT INTO lake.db.{name}_some VALUES ('k1'), ('k3')")
    sql = f"""
        WITH few AS (SELECT * FROM stream WHERE n >= 10)  -- not FROM stream s
        SELECT n, k, {ORIGIN} FROM few WHERE k IN (SELECT k FROM db.{name}_some)
    """
    config = make_config(
        decode={"format": "json"}, sink={"topics": [shared]}, transform={"sql": sql}
    )
    catch_up(config, spark)
    numbers = sorted(n for (n,) in lake.query(f"db.{name}", "n"))
    assert numbers == [n for n in range(10, 60) if n % 5 in (1, 3)]
    table_report = assert_proven(spark, name, "records")
    assert fates(table_report, shared) == {"written": 20, "skipped": 40}


def test_a_dimension_of_the_catalog_is_joined_as_it_is_when_the_batch_runs(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """The row that comes while the stream runs is written by another session, as by a stranger."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, orders(10))
    spark.sql(f"CREATE TABLE lake.db.{name}_dim (k STRING, label STRING) USING iceberg")
    spark.sql(f"INSERT INTO lake.db.{name}_dim VALUES ('k0', 'zero'), ('k1', 'one')")
    sql = (
        f"SELECT s.n, d.label, s._topic, s._topic_partition, s._offset FROM stream s "
        f"JOIN db.{name}_dim d ON s.k = d.k"
    )
    config = make_config(decode={"format": "json"}, transform={"sql": sql})
    with running(config, spark) as sink:
        assert sink.wait_until(sink.ends(), WITHIN)
        stranger = spark.newSession()
        stranger.sql(f"INSERT INTO lake.db.{name}_dim VALUES ('k2', 'two')")
        produce(b, name, orders(10, 10))
        assert sink.wait_until(sink.ends(), WITHIN)
    label = {0: "zero", 1: "one", 2: "two"}
    expected = [(n, label[n % 5]) for n in range(20) if n % 5 < (2 if n < 10 else 3)]
    assert sorted(lake.query(f"db.{name}", "n, label")) == expected
    table_report = assert_proven(spark, name, "records")
    assert fates(table_report, name) == {"written": len(expected), "skipped": 20 - len(expected)}


PYTHON = """
from pyspark.sql import functions as F

FACTOR = 7


def scaled(n):
    return FACTOR * n


def transform(rows):
    by_python = F.udf(scaled, "long")
    kept = rows.where("n % 2 = 1").withColumn("scaled", by_python("n"))
    return kept.select("n", "scaled", "_topic", "_topic_partition", "_offset")
"""


def test_a_function_of_a_file_with_a_python_udf_in_it_is_a_transform(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    shared: str,
    tmp_path: Path,
):
    (tmp_path / "mine.py").write_text(PYTHON)
    config = make_config(
        decode={"format": "json"},
        sink={"topics": [shared]},
        transform={"python": f"{tmp_path}/mine.py:transform"},
    )
    catch_up(config, spark)
    rows = sorted(lake.query(f"db.{name}", "n, scaled"))
    assert rows == [(n, 7 * n) for n in range(1, 60, 2)]
    table_report = assert_proven(spark, name, "records")
    assert fates(table_report, shared) == {"written": 30, "skipped": 30}


WRONG = {
    "no column": ("SELECT nn FROM stream", r"nn.* cannot be resolved", "line 1"),
    "no table": ("SELECT 1\nFROM db.nowhere", r"nowhere.* cannot be found", "line 2"),
    "no sql": ("SELECT n\nFROM stream\nWHER n > 1 AND", "PARSE_SYNTAX_ERROR", "line 3"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_sql_that_spark_does_not_understand_is_refused_in_sparks_words_with_the_line(
    lake: Lake, spark: Any, name: str, make_config: Make, shared: str, mistake: str
):
    sql, words, line = WRONG[mistake]
    config = make_config(
        decode={"format": "json"}, sink={"topics": [shared]}, transform={"sql": sql}
    )
    with pytest.raises(ConfigError, match=rf"cannot use \[transform\] sql: .*{words}") as refused:
        Sink(config).start(spark)
    assert line in str(refused.value)
    assert "JVM" not in str(refused.value)
    assert snapshots(lake, f"db.{name}", f"db.{name}_index") == []
    assert spark.catalog.currentCatalog() != "lake", "the session is left as it was found"


def test_a_result_that_does_not_fit_the_table_is_refused_before_anything_is_written(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, shared: str
):
    def config(sql: str) -> Config:
        return make_config(
            decode={"format": "json"},
            sink={"topics": [shared]},
            transform={"sql": sql},
            table={"schema_evolution": "fail"},
        )

    catch_up(config(f"SELECT n, k, {ORIGIN} FROM stream"), spark)
    tables = [f"db.{name}", f"db.{name}_index"]
    before = snapshots(lake, *tables)
    for sql, words in (
        (f"SELECT n, k, n + 1 AS more, {ORIGIN} FROM stream", r"'more' \(int64\) is not in the"),
        (f"SELECT k AS n, k, {ORIGIN} FROM stream", "'n' is int64 in the table, string in the"),
    ):
        with pytest.raises(SchemaMismatch, match=words):
            Sink(config(sql)).start(spark)
        assert snapshots(lake, *tables) == before
    assert len(lake.query(f"db.{name}")) == 60


def test_the_command_line_runs_and_explains_a_transform(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Callable[..., Path], shared: str
):
    toml = write_toml(decode={"format": "json"}, sink={"topics": [shared]}, transform={"sql": EVEN})

    def frazil_says(*words: str) -> str:
        command = [sys.executable, "-m", "frazil.cli.commands", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * WITHIN)
        assert done.returncode == 0, done.stderr
        return done.stdout

    explained = json.loads(frazil_says("config", "explain", str(toml), "--json"))
    assert "[transform] sql" in explained["path"]
    assert explained["settings"]["transform"]["sql"] == EVEN
    assert explained["path"].startswith("Kafka (frames-shared) → ")
    ran = json.loads(frazil_says("run", str(toml), "--until-caught-up", "--json"))
    assert ran["rows"] == 30
    assert assert_even(lake, name, broker.bootstrap, shared) == 30
    assert_proven(spark, name, "records")


# ── any source that Spark has ────────────────────────────────────────────────────────────────────


def test_a_source_without_offsets_is_counted_in_batches_and_goes_on_without_a_checkpoint(
    lake: Lake, spark: Any, name: str
):
    for more in (3, 2):
        with living(written(rate(spark), name)) as sink:
            before = batches(sink)
            eventually(lambda n=before + more: batches(sink) >= n, "some batches", sink=sink)  # type: ignore[misc]
    assert assert_counted(lake, name) == batches(sink)
    table_report = assert_proven(spark, name, "batches")
    assert [str(line.range) for line in table_report.partitions] == [
        f"(batches)[0] [0, {batches(sink)})"
    ]


def test_files_that_arrive_are_read_once_with_a_checkpoint_and_not_without(
    lake: Lake, spark: Any, name: str, tmp_path: Path
):
    folder = tmp_path / "arrivals"
    folder.mkdir()

    def arrive(number: int) -> None:
        (folder / f".{number}.json").write_bytes(b"\n".join(orders(10, number * 10)))
        (folder / f".{number}.json").rename(folder / f"{number}.json")

    def sink(**more: Any) -> Sink:
        files = spark.readStream.schema("n long, k string").option("maxFilesPerTrigger", 1)
        return written(files.json(str(folder)), name, **more)

    arrive(0)
    with pytest.raises(
        ConfigError, match=r"source FileSource.* keeps its position in Spark's check"
    ):
        sink().start()
    assert snapshots(lake, f"db.{name}", f"db.{name}_index") == []
    for run in range(2):
        arrive(2 * run + 1)
        with living(sink(checkpoint_location=str(tmp_path / "checkpoint"))) as running_sink:
            arrive(2 * run + 2)
            wanted = {BATCHES: 3 + 2 * run}
            assert running_sink.wait_until(wanted, WITHIN), running_sink.position
    numbers = sorted(n for (n,) in lake.query(f"db.{name}", "n"))
    assert numbers == list(range(50))
    assert_proven(spark, name, "batches")


def test_an_iceberg_table_is_a_stream_and_goes_on_without_a_checkpoint(
    lake: Lake, spark: Any, name: str
):
    spark.sql(f"CREATE TABLE lake.db.{name}_from (n BIGINT) USING iceberg")

    def append(start: int) -> None:
        spark.sql(f"INSERT INTO lake.db.{name}_from SELECT id FROM range({start}, {start + 10})")

    append(0)
    for run in range(2):
        append(20 * run + 10)
        with living(written(spark.readStream.table(f"lake.db.{name}_from"), name)) as sink:
            append(20 * run + 20)
            wait_for_rows(lake, name, 20 * run + 30, sink)
    assert sorted(n for (n,) in lake.query(f"db.{name}", "n")) == list(range(50))
    assert_proven(spark, name, "batches")


def test_sparks_own_kafka_source_is_proven_by_record_and_a_new_partition_is_read_from_its_beginning(
    broker: Broker, lake: Lake, spark: Any, name: str
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, numbered(10))
    with living(written(kafka(spark, b, name), name)) as sink:
        assert sink.wait_until({part(name, 0): 10}, WITHIN)
        admin = AdminClient({"bootstrap.servers": b})
        admin.create_partitions([NewPartitions(name, 2)])[name].result()
        eventually(lambda: partitions(b, name) == 2, "two partitions")
        produce(b, name, numbered(10, 100), 2)
        assert sink.wait_until({part(name, 0): 15, part(name, 1): 5}, WITHIN), sink.position
    produce(b, name, numbered(10, 200), 2)
    caught_up(written(kafka(spark, b, name), name), {part(name, 0): 20, part(name, 1): 10})
    assert assert_exact(lake, f"db.{name}", b, name) == 30
    table_report = assert_proven(spark, name, "records")
    assert fates(table_report, name) == {"written": 30}


def partitions(bootstrap: str, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    return len(admin.list_topics(topic, timeout=10).topics[topic].partitions)


def test_several_sources_in_one_query_are_proven_side_by_side(
    broker: Broker, lake: Lake, spark: Any, name: str
):
    """Two streams of ours and one of Spark's, and the next run knows where each of them was."""
    b = broker.bootstrap
    topics = [f"{name}{suffix}" for suffix in "abc"]
    configs = {t: lake.config(name, t, b) for t in topics}
    for topic in topics:
        create_topic(b, topic, 1)

    def sink() -> Sink:
        rows = kafka(spark, b, topics[2])
        for topic in topics[:2]:
            rows = rows.unionByName(frazil.read(spark, configs[topic]).select(rows.columns))
        return written(rows, name)

    for run in range(2):
        for number, topic in enumerate(topics):
            produce(b, topic, numbered(4 + number, run * 100))
        ends = {part(t, 0): (run + 1) * (4 + i) for i, t in enumerate(topics)}
        caught_up(sink(), ends)
    rows = lake.query(f"db.{name}", "_topic, _offset, value")
    assert_once(rows)
    assert set(rows) == {
        (topic, o, v) for topic in topics for (_, o), v in topic_records(b, topic).items()
    }
    assert_proven(spark, name, "records")


# ── what Spark makes of the rows ─────────────────────────────────────────────────────────────────


def test_rows_of_several_records_are_proven_by_batch(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, shared: str
):
    config = make_config(decode={"format": "json"}, sink={"topics": [shared]})
    rows = frazil.read(spark, config)
    caught_up(
        written(
            rows.select(
                "n", F.explode(F.sequence(F.lit(0), F.col("n") % 3)).alias("i"), *ORIGIN.split(", ")
            ),
            name,
        )
    )
    expected = [(n, i) for n in range(60) for i in range(n % 3 + 1)]
    assert sorted(lake.query(f"db.{name}", "n, i")) == expected
    table_report = assert_proven(spark, name, "batches")
    assert fates(table_report, shared) == {"merged": 60}
    assert table_report.written == len(expected)


def test_each_window_is_there_once_when_it_closes_whatever_runs_it_was_open_in(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    config = make_config(decode={"format": "json"}, sink={"max_records_per_trigger": 30})

    def sink() -> Sink:
        at = F.timestamp_seconds("at")
        rows = frazil.read(spark, config).withColumn("at", at).withWatermark("at", "5 seconds")
        counted = rows.groupBy(F.window("at", "10 seconds"), "k").count()
        picked = counted.selectExpr("window.start AS start", "k", "count")
        return written(picked, name, checkpoint_location=str(tmp_path / "checkpoint"))

    def closed() -> list[tuple[Any, ...]]:
        """By the records themselves: the watermark is 5 s behind the newest of them."""
        values = [json.loads(v or b"") for v in topic_records(b, name).values()]
        watermark = max(v["at"] for v in values) - 5
        windows = Counter((v["at"] // 10 * 10, v["k"]) for v in values)
        return sorted((*key, count) for key, count in windows.items() if key[0] + 10 <= watermark)

    def written_windows() -> list[tuple[Any, ...]]:
        return sorted(lake.query(f"db.{name}", "epoch(start)::int, k, count"))

    for start, end in ((0, 28), (28, 60)):
        produce(b, name, orders(end - start, start, at=lambda n: n), 2)
        expected = closed()
        with living(sink()) as run:
            assert run.wait_until(run.ends(), WITHIN)
            wait_for_rows(lake, name, len(expected), run)
        assert written_windows() == expected
    assert len(expected) == 25
    table_report = assert_proven(spark, name, "batches")
    assert fates(table_report, name) == {"merged": 60}


@pytest.mark.long
def test_records_of_two_streams_find_each_other_across_runs(
    broker: Broker, lake: Lake, spark: Any, name: str, tmp_path: Path
):
    b = broker.bootstrap
    left, right = f"{name}l", f"{name}r"
    for topic in (left, right):
        create_topic(b, topic, 1)

    def sink() -> Sink:
        json_of = {t: lake.config(name, t, b, decode={"format": "json"}) for t in (left, right)}
        one = frazil.read(spark, json_of[left]).selectExpr("n", "k AS mine", "_offset AS l")
        two = frazil.read(spark, json_of[right]).selectExpr("n", "k AS theirs", "_offset AS r")
        return written(one.join(two, "n"), name, checkpoint_location=str(tmp_path / "checkpoint"))

    produce(b, left, orders(20))
    produce(b, right, orders(8))
    caught_up(sink())
    assert sorted(n for (n,) in lake.query(f"db.{name}", "n")) == list(range(8))
    produce(b, right, orders(17, 8))
    caught_up(sink())
    rows = lake.query(f"db.{name}", "n, mine, theirs, l, r", "ORDER BY n")
    assert rows == [(n, f"k{n % 5}", f"k{n % 5}", n, n) for n in range(20)]
    table_report = assert_proven(spark, name, "batches")
    assert (fates(table_report, left), fates(table_report, right)) == (
        {"merged": 20},
        {"merged": 25},
    )


# ── everything there is, then the end ────────────────────────────────────────────────────────────


def test_available_now_takes_all_there_is_in_limited_batches_and_ends(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, shared: str
):
    limited = make_config(sink={"topics": [shared], "max_records_per_trigger": 16})
    steps = Steps()
    sink = written(
        frazil.read(spark, limited).select("value", *ORIGIN.split(", ")),
        name,
        trigger="available-now",
        on_step=steps,
    )
    run = sink.start()
    assert run.awaitTermination(WITHIN)
    assert not run.active
    sizes = [step.records for step in steps.named("written")]
    assert sum(sizes) == 60
    assert max(sizes) <= 16
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, shared) == 60
    again = written(
        frazil.read(spark, limited).select("value", *ORIGIN.split(", ")),
        name,
        trigger="available-now",
    )
    assert again.start().awaitTermination(WITHIN), "there is nothing more"
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, shared) == 60
    assert_proven(spark, name, "records")


def test_available_now_with_sparks_own_kafka_source(
    broker: Broker, lake: Lake, spark: Any, name: str, shared: str
):
    steps = Steps()
    rows = kafka(spark, broker.bootstrap, shared, maxOffsetsPerTrigger=25)
    sink = written(rows, name, trigger="available-now", on_step=steps)
    assert sink.start().awaitTermination(WITHIN)
    assert len(steps.named("staged")) == 3
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, shared) == 60
    assert_proven(spark, name, "records")


def test_available_now_closes_the_windows_that_the_last_records_let_it_close(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, orders(40, at=lambda n: n))
    config = make_config(decode={"format": "json"})
    rows = frazil.read(spark, config).withColumn("at", F.timestamp_seconds("at"))
    counted = rows.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 seconds")).count()
    sink = written(
        counted.selectExpr("window.start AS start", "count"),
        name,
        trigger="available-now",
        checkpoint_location=str(tmp_path / "checkpoint"),
    )
    assert sink.start().awaitTermination(WITHIN)
    windows = sorted(lake.query(f"db.{name}", "epoch(start)::int, count"))
    assert windows == [(0, 10), (10, 10), (20, 10)]


# ── a catalog that is away ───────────────────────────────────────────────────────────────────────


def test_while_the_catalog_is_away_a_dataframe_goes_on_and_catches_up_in_order(
    lake: Lake, spark: Any, name: str, monkeypatch: pytest.MonkeyPatch
):
    away = threading.Event()
    away.set()
    append = JavaTable.append

    def failing(self: JavaTable, manifests: Any, *args: Any, **more: Any) -> None:
        if self.name == f"db.{name}" and manifests and away.is_set():
            raise Unavailable("cannot commit: the catalog is away")
        append(self, manifests, *args, **more)

    monkeypatch.setattr(JavaTable, "append", failing)
    monkeypatch.setattr(protocol, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(protocol, "LONGEST_PAUSE", 0.05)
    with living(written(rate(spark), name)) as sink:
        eventually(lambda: len(sink.committer.pending) >= 3, "batches wait, staged", sink=sink)
        eventually(lambda: sink.committer.progress.trouble, "the trouble is reported", sink=sink)
        assert batches(sink) == 0
        assert lake.query(f"db.{name}", "count(*)") == [(0,)]
        away.clear()
        eventually(lambda: batches(sink) >= 3, "they are committed", sink=sink)
    assert assert_counted(lake, name) == batches(sink)
    with monkeypatch.context() as patch:
        away.set()
        with living(written(rate(spark), name), flush=0.2) as sink:
            before = batches(sink)
            eventually(lambda: len(sink.committer.pending) >= 2, "staged again", sink=sink)
        away.clear()
        patch.setattr(JavaTable, "append", append)
        with living(written(rate(spark), name)) as heir:
            eventually(lambda: batches(heir) >= before + 3, "the heir commits them", sink=heir)
    assert assert_counted(lake, name) == batches(heir)
    assert_proven(spark, name, "batches")


# ── runs of a query without state ────────────────────────────────────────────────────────────────

EVEN = f"SELECT n, k, {ORIGIN} FROM stream WHERE n % 2 = 0"


def assert_even(lake: Lake, name: str, bootstrap: str, topic: str) -> int:
    """The table is the topic's even numbers, each from its own offset; how many there are."""
    values = topic_records(bootstrap, topic)
    numbers = {at: json.loads(value or b"")["n"] for at, value in values.items()}
    expected = {(*at, n) for at, n in numbers.items() if n % 2 == 0}
    rows = lake.query(f"db.{name}", "_topic_partition, _offset, n")
    assert_once(rows)
    assert set(rows) == expected
    return len(rows)


@pytest.mark.long
def test_without_state_no_checkpoint_is_needed_and_no_old_one_can_hurt(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    own = tmp_path / "mine"
    produced = 0

    config = make_config(
        decode={"format": "json"}, transform={"sql": EVEN}, sink={"checkpoint_location": str(own)}
    )

    def live(situation: str) -> None:
        nonlocal produced
        produced += produce(b, name, orders(10, produced), 2)
        assert catch_up(config, spark).position[part(name, 1)] == produced // 2, situation
        assert assert_even(lake, name, b, name) == produced // 2, situation

    live("the first")
    [first] = own.iterdir()
    assert any(first.glob("offsets/*")), "the configured checkpoint was not used"
    shutil.copytree(first, tmp_path / "older")
    shutil.rmtree(own)
    live("after the checkpoint was deleted")
    shutil.rmtree(own)
    shutil.copytree(tmp_path / "older", own)
    live("with the folder of another query, at an older place")
    table_report = assert_proven(spark, name, "records")
    assert fates(table_report, name) == {"written": produced // 2, "skipped": produced // 2}


@pytest.mark.long
def test_a_sink_may_get_a_transform_and_lose_it_again_and_get_none_that_keeps_state(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
):
    b = broker.bootstrap
    create_topic(b, name, 2)
    plain = make_config(decode={"format": "json"})
    even = make_config(decode={"format": "json"}, transform={"sql": EVEN})
    produced = 0
    for config in (plain, even, plain):
        produced += produce(b, name, orders(8, produced), 2)
        catch_up(config, spark)
    numbers = sorted(n for (n,) in lake.query(f"db.{name}", "n"))
    assert numbers == [*range(8), 8, 10, 12, 14, *range(16, 24)]
    table_report = assert_proven(spark, name, "records")
    assert fates(table_report, name) == {"written": 20, "skipped": 4}
    state = frazil.read(spark, plain).select("n", "k", *ORIGIN.split(", ")).dropDuplicates(["n"])
    with pytest.raises(
        IdentityMismatch, match=r"written by a stateless query .* this query is stateful"
    ):
        written(state, name, checkpoint_location=str(tmp_path / "checkpoint")).start()


@pytest.mark.parametrize("source", ["frazil", "kafka"])
def test_the_beginning_of_a_stream_does_not_move_with_a_restart(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, source: str
):
    """What came after the first start is the sink's, even if nothing was committed before."""
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, orders(5))

    def sink(on_step: Callable[[Step], None] | None = None) -> Sink:
        if source == "kafka":
            rows = kafka(spark, b, name, startingOffsets="latest")
            return written(rows, name, on_step=on_step)
        sql = f"SELECT n, {ORIGIN} FROM stream"
        config = make_config(
            decode={"format": "json"}, sink={"starting_offsets": "latest"}, transform={"sql": sql}
        )
        return Sink(config, on_step=on_step)

    def die(step: Step) -> None:
        if step.name == "planned":
            raise FrazilError("the first run ends in its first batch")

    first = sink(die).start(spark)
    eventually(lambda: not first.active, "the first run ends")
    first.stop()
    produce(b, name, orders(4, 50))
    second = sink().start(spark)
    try:
        produce(b, name, orders(3, 90))
        assert second.wait_until({part(name, 0): 12}, WITHIN)
    finally:
        second.stop()
    rows = lake.query(f"db.{name}", "_offset", "ORDER BY ALL")
    assert rows == [(o,) for o in range(5, 12)], "records between two runs were skipped in silence"


def test_a_recreated_topic_is_foreign_to_every_source(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    b = broker.bootstrap
    create_topic(b, name, 1)
    produce(b, name, orders(10))
    config = make_config(decode={"format": "json"}, transform={"sql": EVEN})
    other = f"{name}x"

    def spark_reads() -> Run:
        return caught_up(written(kafka(spark, b, name), other), {part(name, 0): 10})

    catch_up(config, spark)
    spark_reads()
    tables = [f"db.{table}" for table in (name, f"{name}_index", other, f"{other}_index")]
    before = snapshots(lake, *tables)
    admin = AdminClient({"bootstrap.servers": b})
    admin.delete_topics([name])[name].result()
    eventually(lambda: made(b, name), "the topic is made again")
    produce(b, name, orders(20, 100))
    for start in (lambda: catch_up(config, spark), spark_reads):
        with pytest.raises(IdentityMismatch, match=f"topic {name} was dropped and recreated"):
            start()
    assert snapshots(lake, *tables) == before


def made(bootstrap: str, topic: str) -> bool:
    """Create it, unless its namesake is still being deleted."""
    try:
        create_topic(bootstrap, topic, 1)
    except KafkaException:
        return False
    return True


@pytest.mark.long
def test_retention_stops_a_stream_that_it_overtook_and_no_other(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """The start of a sink is the past of one that has a position."""
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, orders(20))
    config = make_config(
        decode={"format": "json"},
        sink={"starting_offsets": {name: {"0": 5}}},
        transform={"sql": f"SELECT n, {ORIGIN} FROM stream"},
    )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})

    def forget(before: int) -> None:
        admin.delete_records([TopicPartition(name, 0, before)])[TopicPartition(name, 0)].result()

    catch_up(config, spark)
    forget(12)
    produce(broker.bootstrap, name, orders(5, 20))
    catch_up(config, spark)
    assert sorted(lake.query(f"db.{name}", "_offset")) == [(o,) for o in range(5, 25)]
    produce(broker.bootstrap, name, orders(10, 25))
    forget(28)
    with pytest.raises(Expired, match=rf"{name}\[0\] \[25, 28\) \(3 offsets\)"):
        catch_up(config, spark)
    assert len(lake.query(f"db.{name}")) == 20


# ── runs of a query with state ───────────────────────────────────────────────────────────────────


class Distinct:
    """Each number of a topic once: only Spark's state knows which ones there were."""

    def __init__(self, broker: Broker, lake: Lake, spark: Any, name: str, make: Make, folder: Path):
        self.bootstrap, self.lake, self.spark, self.name = broker.bootstrap, lake, spark, name
        self.checkpoint = folder / "checkpoint"
        self.config = make(decode={"format": "json"})
        create_topic(self.bootstrap, name, 2)

    def sink(self, name: str = "", checkpoint: Path | None = None, **more: Any) -> Sink:
        rows = frazil.read(self.spark, self.config).dropDuplicates(["n"]).select("n", "_offset")
        where = str(checkpoint or self.checkpoint)
        return written(rows, name or self.name, checkpoint_location=where, **more)

    def produce(self, start: int, end: int) -> None:
        produce(self.bootstrap, self.name, orders(end - start, start), 2)

    def numbers(self, name: str = "") -> list[int]:
        return sorted(n for (n,) in self.lake.query(f"db.{name or self.name}", "n"))

    def expected(self) -> list[int]:
        values = topic_records(self.bootstrap, self.name).values()
        return sorted({json.loads(value or b"")["n"] for value in values})

    def refused(self, kind: type[FrazilError], words: str, sink: Sink) -> None:
        """With these words, before anything is written."""
        tables = [f"db.{sink.config.sink.id}", f"db.{sink.config.sink.id}_index"]
        before = snapshots(self.lake, *tables)
        with pytest.raises(kind, match=words):
            sink.start()
        assert snapshots(self.lake, *tables) == before


@pytest.fixture
def distinct(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, tmp_path: Path
) -> Distinct:
    return Distinct(broker, lake, spark, name, make_config, tmp_path)


def test_a_query_with_state_goes_on_with_its_checkpoint_and_with_no_other(
    distinct: Distinct, tmp_path: Path, elsewhere: Callable[[], None]
):
    older, gone, foreign = (tmp_path / word for word in ("older", "gone", "foreign"))
    distinct.produce(0, 10)
    caught_up(distinct.sink())
    shutil.copytree(distinct.checkpoint, older)
    distinct.produce(5, 15)
    caught_up(distinct.sink())
    assert distinct.numbers() == distinct.expected() == list(range(15)), "state was lost"
    shutil.copytree(distinct.checkpoint, foreign)  # the same in all but whose it is
    (foreign / "metadata").write_text('{"id":"6d9bbd0e-6e2b-4c2f-9a3e-2f0d1f3c5a77"}')
    (foreign / ".metadata.crc").unlink()

    distinct.refused(
        Expired, "gone is empty, but sink .* batches in the ledger", distinct.sink(checkpoint=gone)
    )
    distinct.refused(
        Expired,
        r"older is an older copy, at batch \d+; the table has batch \d+",
        distinct.sink(checkpoint=older),
    )
    distinct.refused(
        IdentityMismatch,
        "foreign: it belongs to query .* and the ledger of sink",
        distinct.sink(checkpoint=foreign),
    )
    distinct.refused(
        IdentityMismatch, "the ledger has no batch of sink", distinct.sink(f"{distinct.name}y")
    )
    plain = frazil.read(distinct.spark, distinct.config).select("n", "_offset")
    distinct.refused(
        IdentityMismatch, "was written by a stateful query", written(plain, distinct.name)
    )
    assert distinct.numbers() == list(range(15))

    with living(distinct.sink()) as run:
        elsewhere()
        distinct.refused(Expired, "an older copy", distinct.sink(checkpoint=older))
        distinct.produce(10, 20)
        assert run.wait_until(run.ends(), WITHIN), "fenced by a run that was refused"
    assert distinct.numbers() == distinct.expected() == list(range(20))
    assert_proven(distinct.spark, distinct.name, "batches")


@pytest.mark.long
def test_a_ledger_that_was_rolled_back_behind_the_checkpoint_is_a_gap(distinct: Distinct):
    for start in (0, 10):
        distinct.produce(start, start + 10)
        caught_up(distinct.sink())
    for table in (f"db.{distinct.name}", f"db.{distinct.name}_index"):
        rolled_back(distinct.spark, distinct.lake, table, distinct.name)
    assert distinct.numbers() == list(range(10))
    distinct.refused(
        Gap, r"checkpoint has batch \d+, and the ledger .* ends at batch \d+", distinct.sink()
    )
    assert distinct.numbers() == list(range(10))


def rolled_back(spark: Any, lake: Lake, table: str, sink: str) -> None:
    """To where it was before its last batch."""
    metadata = json.loads(Path(lake.metadata_file(table)).read_text())
    data = [s for s in metadata["snapshots"] if int(s["summary"].get("added-records", 0))]
    before = data[-1]["parent-snapshot-id"]
    spark.sql(f"CALL lake.system.rollback_to_snapshot('{table}', {before})")


def test_a_batch_that_begins_when_the_sink_is_stopped_is_taken_up_by_the_next_run(
    distinct: Distinct, monkeypatch: pytest.MonkeyPatch
):
    """Spark must not note a batch as done that was never written."""
    distinct.produce(0, 10)
    sink = distinct.sink()
    entering, go = threading.Event(), threading.Event()
    guarded = sink._gated_batch

    def gated(*args: Any) -> None:
        entering.set()
        assert go.wait(WITHIN)
        guarded(*args)

    monkeypatch.setattr(sink, "_gated_batch", gated)
    run = sink.start()
    assert entering.wait(WITHIN)
    stopping = threading.Thread(target=run.stop, args=(5,), daemon=True)
    stopping.start()
    eventually(lambda: sink._gate.closed, "stop lets no batch begin")
    go.set()
    stopping.join(WITHIN)
    assert not stopping.is_alive()
    assert distinct.numbers() == []
    caught_up(distinct.sink())
    assert distinct.numbers() == distinct.expected() == list(range(10))


def test_a_batch_that_was_staged_and_not_noted_by_spark_is_not_written_again(distinct: Distinct):
    """The run ends after staging, before Spark hears of it: the state is made again, no row is."""
    distinct.produce(0, 10)

    def die(step: Step) -> None:
        if step.name == "staged":
            raise FrazilError("the run ends here")

    sink = distinct.sink(on_step=die).start()
    eventually(lambda: not sink.active, "the run ends")
    sink.stop()
    distinct.produce(5, 15)
    caught_up(distinct.sink())
    assert distinct.numbers() == distinct.expected() == list(range(15))
    assert_proven(distinct.spark, distinct.name, "batches")


# ── what cannot work is refused before anything is made ──────────────────────────────────────────


def batch(spark: Any) -> Any:
    return spark.range(3)


def unbounded_count(spark: Any) -> Any:
    return rate(spark).groupBy("value").count()


def deduplicated(spark: Any) -> Any:
    return rate(spark).dropDuplicates(["value"])


def lossy(spark: Any) -> Any:
    return kafka(spark, "none:1", "none", failOnDataLoss="false")


def columns(*expressions: str) -> Callable[[Any], Any]:
    return lambda spark: rate(spark).selectExpr("value", *expressions)


REFUSED = {
    "batch": (batch, ConfigError, "the DataFrame is not a stream"),
    "interval": (
        columns("make_interval(1) AS i"),
        SchemaMismatch,
        "'i' is interval, which Iceberg has no",
    ),
    "day": (
        columns("INTERVAL '1' DAY AS i"),
        SchemaMismatch,
        "'i' is interval day, which Iceberg has",
    ),
    "variant": (
        columns("parse_json('1') AS v"),
        SchemaMismatch,
        "'v' is variant, which Iceberg has no",
    ),
    "void": (
        columns("NULL AS n"),
        SchemaMismatch,
        "column 'n' is void, which Iceberg has no type for",
    ),
    "void inside": (columns("array(NULL) AS n"), SchemaMismatch, r"Null type .* Field: n\.element"),
    "case": (
        columns("1 AS a", "2 AS A"),
        SchemaMismatch,
        "columns 'a' and 'A' differ only in case",
    ),
    "reserved": (
        columns("1 AS _file"),
        SchemaMismatch,
        "'_file', a name that Iceberg keeps for itself",
    ),
    "no watermark": (unbounded_count, ConfigError, "(?i)watermark"),
    "no checkpoint": (
        deduplicated,
        ConfigError,
        "Deduplicate keeps state.*it needs a permanent checkpoint",
    ),
    "loss": (lossy, ConfigError, "source kafka: failOnDataLoss is false; a lost range must stop"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_dataframe_that_cannot_be_written_is_refused_and_nothing_is_made(
    lake: Lake, spark: Any, name: str, why: str
):
    frame, kind, words = REFUSED[why]
    sink = written(frame(spark), name)
    with pytest.raises(kind, match=words):
        sink.start()
    for table in (f"db.{name}", f"db.{name}_index"):
        with pytest.raises(LookupError):
            lake.metadata_file(table)


@pytest.mark.parametrize(
    ("mode", "refused"),
    [("update", "table db.* has mode append"), ("complete", "would replace the whole table")],
)
def test_an_output_mode_that_replaces_rows_is_refused(
    spark: Any, name: str, mode: str, refused: str
):
    with pytest.raises(ConfigError, match=f"'{mode}': .*{refused}"):
        written(rate(spark), name, output_mode=mode)


def test_a_dataframe_and_a_transform_are_one_too_many(spark: Any, make_config: Make):
    config = make_config(transform={"sql": "SELECT * FROM stream"})
    with pytest.raises(ConfigError, match=r"cannot write a DataFrame with a \[transform\]"):
        frazil.write(rate(spark), config)


def test_a_cut_to_stop_at_is_refused_before_anything_is_claimed(lake: Lake, spark: Any, name: str):
    with pytest.raises(ConfigError, match="cannot stop at a cut"):
        written(rate(spark), name).start(until={part("none", 0): 5})  # type: ignore[arg-type]
    assert snapshots(lake, f"db.{name}", f"db.{name}_index") == []


def test_of_two_sinks_with_one_id_the_second_is_refused_and_the_first_goes_on(
    lake: Lake, spark: Any, name: str
):
    with living(written(rate(spark), name)) as first:
        eventually(lambda: batches(first) >= 1, "a batch is committed", sink=first)
        with pytest.raises(ConfigError, match=f"sink {name}: this process already runs a sink"):
            written(rate(spark), name).start()
        before = batches(first)
        eventually(lambda: batches(first) > before + 1, "the first goes on", sink=first)
        assert first.epoch == 1
    with living(written(rate(spark), name)) as then:
        assert then.epoch == 2, "the id is free again"
    assert_counted(lake, name)


def test_a_column_with_the_name_of_the_timestamps_and_another_type_is_a_column_like_others(
    lake: Lake, spark: Any, name: str
):
    with living(written(columns("'abc' AS _timestamp")(spark), name)) as sink:
        eventually(lambda: batches(sink) >= 1, "a batch is committed", sink=sink)
    assert set(lake.query(f"db.{name}", "_timestamp")) == {("abc",)}


def assert_counted(lake: Lake, name: str, per_batch: int = 10) -> int:
    """What `rate` counted is there from 0 on, each number once, in whole batches."""
    values = sorted(value for (value,) in lake.query(f"db.{name}", "value"))
    assert values == list(range(len(values)))
    assert len(values) % per_batch == 0
    return len(values) // per_batch
