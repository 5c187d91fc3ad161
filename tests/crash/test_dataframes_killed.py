"""SIGKILL of a driver with Spark in the middle, at named steps; the oracle reads the data files."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frazil.auditing.report import TableReport
from frazil.steps import STEPS
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkProcess
from tests.oracle import Lake, assert_once, topic_records
from tests.system.streams import audited, eventually, produce
from tests.system.test_dataframe_upserts import Records, assert_each_snapshot

PER_RUN = 120
PARTITIONS = 3
#: The watermark's distance to the newest record, and the length of a window, in seconds.
BEHIND, WINDOW = 20, 10


def records(start: int) -> Iterator[bytes]:
    """One a second, of four kinds."""
    for n in range(start, start + PER_RUN):
        yield json.dumps({"n": n, "k": f"k{n % 4}", "at": n}).encode()


def topic(bootstrap: str, name: str) -> dict[tuple[int, int], dict[str, Any]]:
    values = topic_records(bootstrap, name)
    return {at: json.loads(value or b"") for at, value in values.items()}


def killed_at(config: Path, step: str, log: Path) -> None:
    """One run, killed when it reaches the step for the second time: a batch is behind it."""
    sink_process = SinkProcess(config, hold=f"{step}:2", until="forever", log=log)
    assert sink_process.killed()


def report(spark: Any, name: str) -> TableReport:
    [table_report] = [
        candidate for candidate in audited(spark, f"db.{name}") if candidate.sink == name
    ]
    return table_report


@pytest.mark.long
def test_no_kill_loses_or_doubles_a_record_that_a_filter_lets_through(
    broker: Broker, lake: Lake, name: str, write_toml: Callable[..., Path], tmp_path: Path
):
    steps = ("written", "staged", "committed", "index-committed")
    create_topic(broker.bootstrap, name, PARTITIONS)
    sql = "SELECT n, k, _topic, _topic_partition, _offset FROM stream WHERE n % 3 = 0"
    config = write_toml(
        decode={"format": "json"},
        transform={"sql": sql},
        sink={"max_records_per_trigger": PER_RUN // 2},
    )
    for run, step in enumerate(steps):
        produce(broker.bootstrap, name, records(run * PER_RUN), PARTITIONS)
        killed_at(config, step, tmp_path / "log")
        assert_once(lake.query(f"db.{name}", "_topic_partition, _offset"))
    last = SinkProcess(config, audit=True, log=tmp_path / "log")
    events = list(last.events())
    assert last.wait() == 0, events[-1]
    produced = topic(broker.bootstrap, name)
    assert len(produced) == len(steps) * PER_RUN
    kept = {(*at, r["n"], r["k"]) for at, r in produced.items() if r["n"] % 3 == 0}
    rows = lake.query(f"db.{name}", "_topic_partition, _offset, n, k")
    assert_once(rows)
    assert set(rows) == kept
    audit = events[-1]["audit"]
    assert (audit["verdict"], audit["proves"]) == ("proven", "records"), audit
    lines = [line for line in audit["partitions"] if line["topic"] == name]
    for line in lines:
        in_partition = [row for row in kept if row[0] == line["partition"]]
        assert line["written"] == len(in_partition)
        assert line["skipped"] == len(produced) // PARTITIONS - len(in_partition)
        assert (line["invisible"], line["rejected"], line["merged"]) == (0, 0, 0)
    assert len(lines) == PARTITIONS


TRANSFORM = f'''
from pyspark.sql import functions as F


def counted(rows):
    timed = rows.withColumn("at", F.timestamp_seconds("at"))
    late = timed.withWatermark("at", "{BEHIND} seconds")
    windows = late.groupBy(F.window("at", "{WINDOW} seconds"), "k").count()
    return windows.selectExpr("window.start AS start", "k", "count")
'''


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(("written",), marks=pytest.mark.long),
        pytest.param(("planned", "written", "staged", "committed"), marks=pytest.mark.long),
    ],
    ids=["one", "more"],
)
def test_no_kill_loses_doubles_or_miscounts_a_window(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    steps: tuple[str, ...],
):
    """Windows that were open when a run was killed hold what it had read of them."""
    create_topic(broker.bootstrap, name, PARTITIONS)
    (tmp_path / "mine.py").write_text(TRANSFORM)
    config = write_toml(
        decode={"format": "json"},
        transform={"python": "mine.py:counted"},
        sink={
            "max_records_per_trigger": PER_RUN // 2,
            "checkpoint_location": str(tmp_path / "checkpoint"),
        },
        spark={"spark.sql.shuffle.partitions": "2"},
    )
    for run, step in enumerate(steps):
        produce(broker.bootstrap, name, records(run * PER_RUN), PARTITIONS)
        killed_at(config, step, tmp_path / "log")
        assert_once(lake.query(f"db.{name}", "start, k"))
    produced = topic(broker.bootstrap, name).values()
    assert len(produced) == len(steps) * PER_RUN
    closes = max(r["at"] for r in produced) - BEHIND
    counts = Counter((r["at"] // WINDOW * WINDOW, r["k"]) for r in produced)
    closed = {key: count for key, count in counts.items() if key[0] + WINDOW <= closes}

    def written_windows() -> list[tuple[Any, ...]]:
        return lake.query(f"db.{name}", "epoch(start)::int, k, count")

    last = SinkProcess(config, until="forever", log=tmp_path / "log")
    try:
        eventually(lambda: len(written_windows()) >= len(closed), "every window closes")
    finally:
        last.kill()
    rows = written_windows()
    assert_once(row[:2] for row in rows)
    assert {row[:2]: row[2] for row in rows} == closed
    table_report = report(spark, name)
    assert (table_report.verdict, table_report.proves) == ("proven", "batches"), table_report


def of_each_kind(records: Records) -> set[tuple[Any, ...]]:
    kinds = {record["k"] for record in records.values()}
    numbers = {k: [r["n"] for r in records.values() if r["k"] == k] for k in kinds}
    return {(k, len(several), sum(several)) for k, several in numbers.items()}


@pytest.mark.parametrize(
    "steps",
    [
        ("staged",),
        *(pytest.param(STEPS[at : at + 2], marks=pytest.mark.long) for at in range(0, 10, 2)),
    ],
    ids="+".join,
)
def test_no_kill_doubles_or_forgets_a_record_in_a_group_of_an_upsert_table(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    steps: tuple[str, ...],
):
    """Spark's state has the groups, and the table has them, too: both are at the same cut."""
    create_topic(broker.bootstrap, name, PARTITIONS)
    config = write_toml(
        decode={"format": "json"},
        transform={
            "sql": "SELECT k, count(*) AS c, sum(n) AS s FROM stream GROUP BY k",
            "output_mode": "update",
        },
        table={"mode": "upsert", "key": ["k"], "compact_after_commits": 3},
        sink={
            "max_records_per_trigger": PER_RUN // 2,
            "checkpoint_location": str(tmp_path / "checkpoint"),
        },
        spark={"spark.sql.shuffle.partitions": "2"},
    )
    for run, step in enumerate(steps):
        produce(broker.bootstrap, name, records(run * PER_RUN), PARTITIONS)
        killed_at(config, step, tmp_path / "log")
        produced = topic(broker.bootstrap, name)
        assert_each_snapshot(lake, spark, name, produced, of_each_kind, "k c s")
    last = SinkProcess(config, audit=True, log=tmp_path / "log")
    events = list(last.events())
    assert last.wait() == 0, events[-1]
    produced = topic(broker.bootstrap, name)
    assert len(produced) == len(steps) * PER_RUN
    assert set(lake.query(f"db.{name}", "k, c, s")) == of_each_kind(produced)
    assert_each_snapshot(lake, spark, name, produced, of_each_kind, "k c s")
    audit = events[-1]["audit"]
    assert (audit["verdict"], audit["proves"]) == ("proven", "batches"), audit
    merged = [line["merged"] for line in audit["partitions"] if line["topic"] == name]
    assert sum(merged) == len(produced)


def not_gone(records: Records) -> set[tuple[Any, ...]]:
    """The newest number of each kind, unless it deletes it."""
    newest = {r["k"]: r["n"] for r in sorted(records.values(), key=lambda record: record["n"])}
    return {(k, n) for k, n in newest.items() if n % 5}


@pytest.mark.long
def test_no_kill_between_a_table_and_its_deleted_keys_brings_a_row_back(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
):
    """Rows without offsets, ordered by a version; a batch goes into two tables."""
    create_topic(broker.bootstrap, name, PARTITIONS)
    config = write_toml(
        decode={"format": "json"},
        transform={"sql": "SELECT k, n, n % 5 = 0 AS gone FROM stream"},
        table={"mode": "upsert", "key": ["k"], "version_column": "n", "delete_column": "gone"},
        sink={"max_records_per_trigger": PER_RUN // 4},
    )
    for run in range(3):
        given = list(records(run * PER_RUN))
        random.Random(run).shuffle(given)
        produce(broker.bootstrap, name, given, PARTITIONS)
        hold = f"committed:{run + 1}"  # of the first table, of the second, of the next batch
        process = SinkProcess(config, hold=hold, until="forever", log=tmp_path / "log")
        assert process.killed()
    last = SinkProcess(config, audit=True, log=tmp_path / "log")
    events = list(last.events())
    assert last.wait() == 0, events[-1]
    produced = topic(broker.bootstrap, name)
    assert len(produced) == 3 * PER_RUN
    assert_each_snapshot(lake, spark, name, produced, not_gone, "k n")
    assert events[-1]["audit"]["verdict"] == "proven", events[-1]["audit"]
