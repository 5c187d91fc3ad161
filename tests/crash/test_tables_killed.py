"""SIGKILL of a driver that fills many tables, at every named step; the oracle reads the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import Config, load
from frazil.errors import Fenced
from frazil.iceberg.java import JavaCatalog
from frazil.offsets import Cut
from frazil.ops.orphans import orphans
from frazil.steps import STEPS
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkRuns
from tests.oracle import Lake, assert_once, topic_records
from tests.system.streams import (
    WITHIN,
    Steps,
    all_proven,
    catch_up,
    part,
    produce,
    running,
)

PER_RUN = 120
PARTITIONS = 2
#: Of each kind of record: the tables it goes to. `x` is a name that comes from the data.
TO = {"a": ["a"], "b": ["b", "a"], "x": ["of_x"], "odd": ["dead"], "noise": []}
SUFFIXES = ("a", "b", "of_x", "dead")


def sections(name: str) -> dict[str, Any]:
    made = f"db.{name}_of_{{value}}"
    return {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_a"}, {"name": f"db.{name}_b"}, {"name": made}],
        "route": [
            {"field": "kind", "values": ["noise"], "skip": True},
            {"field": "kind", "values": ["a"], "to": [f"db.{name}_a"]},
            {"field": "kind", "values": ["b"], "to": [f"db.{name}_b", f"db.{name}_a"]},
            {"field": "kind", "allowed_names": "x", "to": [made]},
        ],
        "dead_letters": {"table": f"db.{name}_dead"},
    }


def records(run: int) -> Iterator[bytes]:
    """Each run brings columns that no run before it had, to some of the tables."""
    kinds = list(TO)
    for i in range(PER_RUN):
        value = {"kind": kinds[i % len(kinds)], "n": run * PER_RUN + i}
        if i > PER_RUN // 2:
            value[f"v{run}"] = {"deep": i}
        yield json.dumps(value).encode()


def where(suffix: str) -> str:
    return '"partition", "offset"' if suffix == "dead" else "_topic_partition, _offset"


def assert_exact(lake: Lake, name: str, bootstrap: str, runs: int) -> int:
    """Every table has what is for it, once, value for value; how many records there are."""
    truth = {at: json.loads(value or b"") for at, value in topic_records(bootstrap, name).items()}
    for suffix in SUFFIXES:
        expected = {at: value for at, value in truth.items() if suffix in TO[value["kind"]]}
        values = [f"v{run}.deep" for run in range(runs)] if suffix != "dead" else ["value"]
        rows = lake.query(f"db.{name}_{suffix}", ", ".join([where(suffix), "kind", *values]))
        assert_once(row[:2] for row in rows)
        assert {row[:2] for row in rows} == expected.keys(), suffix
        for number, offset, kind, *actual in rows:
            value = expected[number, offset]
            if suffix == "dead":
                assert (kind, json.loads(actual[0])) == ("name", value)
            else:
                deep = [value.get(f"v{run}", {}).get("deep") for run in range(runs)]
                assert (kind, actual) == (value["kind"], deep)
    return len(truth)


@pytest.mark.parametrize(
    "steps",
    [("committed",), pytest.param(STEPS, marks=pytest.mark.long)],
    ids=["one", "every"],
)
def test_no_kill_at_any_step_loses_or_doubles_a_record_in_any_table(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    steps: tuple[str, ...],
):
    """One run after the other, each killed at the next step, each taking over from the last.

    Where a step happens once for each table, it is the third: some have the batch, some have not.
    After one of the kills the record of what was staged is lost as well: each table gets what it
    lacks, read again.
    """
    b = broker.bootstrap
    create_topic(b, name, PARTITIONS)
    config = write_toml(sink={"max_records_per_trigger": PER_RUN // 2}, **sections(name))
    runs = SinkRuns(config, log=tmp_path / "log", scratch=tmp_path / "scratch")
    for run, step in enumerate(steps):
        produce(b, name, records(run), PARTITIONS)
        nth = 3 if step in ("commit", "committed", "tagged") else 2
        assert runs.next(hold=f"{step}:{nth}", until="forever").killed()
        if step == "committed":
            stage = lake.folder / "warehouse" / "db" / f"{name}_index" / "stage" / name
            staged = list(stage.glob("*.json"))
            assert staged
            for path in staged:
                path.unlink()
        for suffix in SUFFIXES if run > 2 else ():
            assert_once(lake.query(f"db.{name}_{suffix}", where(suffix)))
    final = runs.next(last=True)
    events = list(final.events())
    assert final.wait() == 0, events[-1]
    count = assert_exact(lake, name, b, len(steps))
    assert count == len(steps) * PER_RUN
    given, tables = load(config), [f"db.{name}_{suffix}" for suffix in SUFFIXES]
    all_proven(given, spark, *tables)
    # The index tells the same: no gap, no overlap, and every record has one fate.
    columns = "partition, start_offset, end_offset, written, rejected, skipped"
    spans = lake.query(f"db.{name}_index", columns, "WHERE table_name = '*' ORDER BY ALL")
    reached = dict.fromkeys(range(PARTITIONS), 0)
    for number, start, end, *fates in spans:
        assert (start, sum(fates)) == (reached[number], end - start)
        reached[number] = end
    assert sum(reached.values()) == count
    assert [sum(column) for column in zip(*(span[3:] for span in spans), strict=True)] == [
        count * 3 // 5,
        count // 5,
        count // 5,
    ]
    # What the killed runs left behind is removed, from all tables, and nothing else with it.
    for table, path in orphans(given, spark):
        table.delete(path)
    assert assert_exact(lake, name, b, len(steps)) == count
    for table_name in tables:
        made = JavaCatalog(spark, "lake").load(table_name)
        assert made is not None
        live = {file.path.removeprefix("file:") for file in made.readonly.files()[0]}
        data = Path(made.location.removeprefix("file:")) / "data"
        assert {str(path) for path in data.rglob("*.parquet")} == live, table_name


def test_the_older_of_two_runs_is_fenced_from_every_table(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
):
    """It wakes up with files written for tables that a newer run has filled, changed and made."""
    b = broker.bootstrap
    create_topic(b, name, PARTITIONS)
    config = make_config(**sections(name))
    produce(b, name, [b'{"kind": "a", "n": 0}', b'{"kind": "b", "n": 1}'], PARTITIONS)
    catch_up(config, spark)
    steps = Steps(hold="written")
    with running(config, spark, steps) as older:
        produce(b, name, records(0), PARTITIONS)
        assert steps.held.wait(WITHIN), "the older run has written files and not staged them"
        monkeypatch.setattr("frazil.run._runs", {})  # as in another process
        produce(b, name, records(1), PARTITIONS)
        newer = catch_up(config, spark)
        assert newer.epoch == older.epoch + 1
        steps.go.set()
        with pytest.raises(Fenced, match=f"this one is epoch {older.epoch}"):
            older.wait_until(Cut({part(name, 0): 10**6}), WITHIN)
    assert assert_exact(lake, name, b, 2) == 2 * PER_RUN + 2
    for suffix in SUFFIXES:
        table = JavaCatalog(spark, "lake").load(f"db.{name}_{suffix}")
        assert table is not None
        late = [f.path for f in table.readonly.files()[0] if f.offsets and f.offsets[0] > 0]
        assert late
        assert all(f"/frazil-{name}-{newer.epoch}-" in path for path in late), suffix
    all_proven(config, spark, *(f"db.{name}_{suffix}" for suffix in SUFFIXES))
