"""SIGKILL of the real driver at every named step; the oracle reads the data files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from frazil.config.model import load
from frazil.ops.orphans import orphans
from frazil.steps import STEPS
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkRuns
from tests.oracle import Lake, assert_exact, assert_once

PER_RUN = 4_000


def produce(bootstrap: str, topic: str, start: int, count: int, partitions: int = 3) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for i in range(start, start + count):
        producer.produce(topic, f"record-{i}".encode(), partition=i % partitions)
    producer.flush()


@pytest.mark.parametrize(
    "steps",
    [("staged", "index-commit"), pytest.param(STEPS, marks=pytest.mark.long)],
    ids=["some", "every"],
)
def test_no_kill_at_any_step_loses_or_doubles_a_record(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    steps: tuple[str, ...],
):
    """One run after the other, each killed at the next step, each taking over from the last.

    Every run gets new records first, so that there is always a batch for the step to happen in;
    after each kill the table must be readable and without doubles, at the end exact.
    """
    create_topic(broker.bootstrap, name, 3)
    config = write_toml(sink={"max_records_per_trigger": PER_RUN // 2})
    runs = SinkRuns(config, log=tmp_path / "log", scratch=tmp_path / "scratch")
    kills = 0
    for run, step in enumerate(steps):
        produce(broker.bootstrap, name, run * PER_RUN, PER_RUN)
        # The second time, so that a batch of this run is behind the kill as well.
        assert runs.next(hold=f"{step}:2", until="forever").killed()
        kills += 1
        if run or step == "done":
            assert_once(lake.query(f"db.{name}", "_topic_partition, _offset"))
    last = runs.next(audit=True, last=True)
    events = list(last.events())
    assert last.wait() == 0
    assert events[-1]["audit"]["verdict"] == "proven"
    rows = assert_exact(lake, f"db.{name}", broker.bootstrap, name)
    assert rows == kills * PER_RUN
    # The index tells the same, from its own rows: no gap, no overlap, none twice.
    spans = lake.query(f"db.{name}_index", "partition, start_offset, end_offset", "ORDER BY ALL")
    reached = dict.fromkeys(range(3), 0)
    for number, start, end in spans:
        assert start == reached[number]
        reached[number] = end
    assert sum(reached.values()) == rows
    # What the killed runs left behind is listed and removed, and nothing of the table with it.
    given = load(config)
    left = orphans(given, spark)
    assert left, "a run killed after writing and before staging leaves files"
    for table, path in left:
        table.delete(path)
    assert orphans(given, spark) == []
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == rows
    print(f"{kills} kills, {rows} rows exact, {len(left)} leftovers removed")
