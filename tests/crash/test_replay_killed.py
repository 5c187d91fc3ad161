"""SIGKILL of a replay at every named step; the oracle reads the data files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frazil.auditing import evidence
from frazil.config.model import load
from frazil.iceberg.java import JavaCatalog
from frazil.ops import dead_letters
from frazil.ops.orphans import orphans
from frazil.sources.dead_letters import DeadLetterSelection, ReplayReport
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.crash.paused_process import hold, killed_at
from tests.oracle import Lake, assert_once
from tests.system.streams import catch_up, produce

KINDS = 3
KILLS = ("written", "committed")  # of all of them `tests/crash/test_tables_killed.py` makes sure
RECORDS = 60 * (len(KILLS) + 1)
#: Of each run: there are always dead letters left for the next.
PER_RUN = 20


def test_no_kill_of_a_replay_loses_or_doubles_a_dead_letter(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
):
    """One replay after the other, each killed at the next step, each taking over from the last.

    The dead letters go to tables that are made for them by names from the data; the sink itself has
    written to one of them already.
    """
    create_topic(broker.bootstrap, name, 2)
    tables = [f"db.{name}_k{kind}" for kind in range(KINDS)]
    sections: Any = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_{{value}}"}],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    route = {"field": "kind", "to": [f"db.{name}_{{value}}"]}
    values = [json.dumps({"id": i, "kind": f"k{i % KINDS}"}).encode() for i in range(RECORDS)]
    produce(broker.bootstrap, name, values, 2)
    config = write_toml(route=[{**route, "values": ["k0"]}], **sections)
    catch_up(load(config), spark)
    config = write_toml(route=[route], **sections)
    for step in KILLS:
        killed_at(step, __name__, str(config), log=tmp_path / "log")
        for filled in tables:
            assert_once((id_,) for id_ in _ids(lake, filled))
    last = dead_letters.replay(load(config), spark, DeadLetterSelection())
    assert last.replayed
    assert last.rejected == 0
    left = orphans(load(config), spark)
    assert any(f"frazil-{name}.replay-" in path for _, path in left), "one died before it staged"
    for table, path in left:
        table.delete(path)
    assert orphans(load(config), spark) == []
    for kind, filled in enumerate(tables):
        assert sorted(_ids(lake, filled)) == list(range(kind, RECORDS, KINDS))
    for report in evidence.of_sink(load(config), JavaCatalog(spark, "lake").open_readonly).reports:
        assert report.verdict == "proven", report
    notes = lake.query(f"db.{name}_dead_replayed", '"partition", "offset"')
    assert_once(notes)
    assert len(notes) == RECORDS - RECORDS // KINDS
    assert dead_letters.replay(load(config), spark, DeadLetterSelection()) == ReplayReport()


def _ids(lake: Lake, table: str) -> list[int]:
    try:
        return [row[0] for row in lake.query(table, "id")]
    except LookupError:
        return []  # not made yet


def main() -> None:
    """A replay in a process of its own, which is held at a step."""
    from frazil.spark.session import session

    path, wanted = sys.argv[1:]
    config = load(path)
    chosen = DeadLetterSelection(limit=PER_RUN)
    dead_letters.replay(config, session(config), chosen, lambda step: hold(step.name, wanted))


if __name__ == "__main__":
    main()
