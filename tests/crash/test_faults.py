"""Workers, brokers and drivers that die or stand still in the middle; the oracle reads the data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from frazil.config.model import Config
from frazil.iceberg.java import JavaCatalog
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkProcess
from tests.oracle import Lake, assert_exact, assert_once
from tests.system.streams import (
    WITHIN,
    Registry,
    avro,
    catch_up,
    eventually,
    numbered,
    part,
    produce,
    proven,
    running,
)

Make = Callable[..., Config]
ROW = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "id", "type": "long"}, {"name": "text", "type": "string"}],
}
#: several fetches of records, so that the file is open while a later chunk waits for its schema
FIRST = 20_000


def test_a_worker_killed_in_the_middle_of_a_file_is_replaced_and_the_batch_is_exact(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """The second schema's answer is held back: the worker stands between two chunks of one file."""
    create_topic(broker.bootstrap, name, 1)
    values = [avro(ROW, {"id": i, "text": f"{i:0300d}"}, 1) for i in range(FIRST)]
    values += [avro(ROW, {"id": FIRST + i, "text": "late"}, 2) for i in range(10)]
    produce(broker.bootstrap, name, values)
    with Registry(id1=ROW, id2={**ROW, "doc": "the same, newer"}) as registry:
        registry.shut = {2}
        config = make_config(
            decode={"format": "confluent-avro", "registry": {"url": registry.url}},
            table={"properties": {"write.parquet.row-group-size-bytes": "65536"}},
        )
        folder = lake.folder / "warehouse" / "db" / name / "data"
        with running(config, spark) as sink:
            eventually(
                lambda: 2 in registry.asked, "a worker asks for the second schema", sink=sink
            )
            [worker] = eventually(lambda: writing(folder), "a worker has a file open", sink=sink)
            assert list(folder.rglob("*.parquet"))
            worker.kill()
            eventually(lambda: not worker.is_running(), "the worker is dead")
            assert not any(sink.position.values())
            registry.gate.set()
            assert sink.wait_until(sink.ends(), WITHIN)
    assert len(list(folder.rglob("*.parquet"))) == 2, "the dead worker's file, and the right one"
    rows = lake.query(f"db.{name}", "_offset, id, text")
    assert_once((offset,) for offset, _, _ in rows)
    assert {(o, i) for o, i, _ in rows} == {(i, i) for i in range(FIRST + 10)}
    assert proven(config, spark).written == FIRST + 10


def writing(folder: Path) -> list[psutil.Process]:
    """Spark's Python workers that hold a data file of this folder open."""
    writers = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("python") and any(
                Path(file.path).is_relative_to(folder) for file in process.open_files()
            ):
                writers.append(process)
        except psutil.Error:
            continue
    return writers


def test_a_broker_that_is_killed_and_comes_back_needs_no_person(
    lake: Lake, spark: Any, name: str, tmp_path: Path
):
    with Broker(tmp_path / "broker") as broker:
        b = broker.bootstrap
        create_topic(b, name, 2)
        produce(b, name, numbered(1000), 2)
        config = lake.config(
            name, name, b, sink={"unavailable_timeout": "120s", "max_records_per_trigger": 400}
        )
        with running(config, spark) as sink:
            assert sink.wait_until({part(name, 0): 200, part(name, 1): 200}, WITHIN)
            broker.kill()
            broker.start()
            produce(b, name, numbered(1000, 1000), 2)
            ends = eventually(sink.ends, "the broker answers", sink=sink)
            assert sum(ends.values()) == 2000
            assert sink.wait_until(ends, 2 * WITHIN), f"stuck at {sink.position}"
        assert assert_exact(lake, f"db.{name}", b, name) == 2000
        proven(config, spark)


@pytest.mark.long
def test_two_drivers_started_at_once_leave_an_exact_table(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    make_config: Make,
    tmp_path: Path,
):
    """At least one of them catches up; one that does not was fenced and says so."""
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(2000), 2)
    sections = {"sink": {"max_records_per_trigger": 500}}
    config = write_toml(**sections)
    both = [SinkProcess(config, log=tmp_path / f"log{i}") for i in range(2)]
    ended = []
    for pipeline in both:
        events = list(pipeline.events())
        ended.append((pipeline.wait(), events[-1] if events else {}))
    assert sorted(code for code, _ in ended) in ([0, 0], [0, 4]), ended
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 2000
    proven(make_config(**sections), spark)


def test_a_driver_that_stood_still_while_another_took_over_is_fenced_when_it_wakes(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    make_config: Make,
    tmp_path: Path,
):
    create_topic(broker.bootstrap, name, 2)
    produce(broker.bootstrap, name, numbered(100), 2)
    sleeper = SinkProcess(write_toml(), until="forever", log=tmp_path / "log")
    events = sleeper.events()
    assert any(event.get("step") == "done" for event in events), "it never committed"
    os.killpg(sleeper.process.pid, signal.SIGSTOP)
    try:
        produce(broker.bootstrap, name, numbered(100, 100), 2)
        heir = catch_up(make_config(), spark)
        assert heir.epoch == 2
        assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 200
    finally:
        os.killpg(sleeper.process.pid, signal.SIGCONT)
    last = list(events)[-1]
    assert sleeper.wait() == 4, last
    assert last["error"] == "Fenced"
    assert f"sink {name} has a newer run; this one is epoch 1" in last["message"]
    assert "stop this run" in last["hint"]
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 200
    table = JavaCatalog(spark, "lake").load(f"db.{name}")
    assert table is not None
    late = [f.path for f in table.readonly.files()[0] if f.offsets and f.offsets[0] >= 50]
    assert late
    assert all(f"/frazil-{name}-2-" in path for path in late), "rows of the fenced run are there"
    proven(make_config(), spark)
