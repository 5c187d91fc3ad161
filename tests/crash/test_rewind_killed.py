"""SIGKILL of a rewind in a process of its own; the oracle reads the data files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import load
from frazil.errors import Gap
from frazil.ops.rewind import rewind
from frazil.sink import Sink
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.crash.paused_process import hold, killed_at
from tests.oracle import Lake, assert_once
from tests.system.streams import all_proven, catch_up, produce

#: Some tables have moved and others have not; all have; the index has gone back, too. (Of every
#: step `tests/unit/test_rewind.py` makes sure.)
KILLS = ("moved", "unstaged", "indexed")
KINDS = ("a", "b", "c")


@pytest.mark.long
def test_no_kill_of_a_rewind_loses_or_doubles_a_record(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
):
    """One rewind after the other, each killed at the next step; in between the stream goes on."""
    create_topic(broker.bootstrap, name, 2)
    path = write_toml(
        decode={"format": "json"},
        table=[{"name": f"db.{name}_{kind}"} for kind in KINDS],
        route=[{"field": "k", "values": [k], "to": [f"db.{name}_{k}"]} for k in KINDS],
        dead_letters={"table": f"db.{name}_dead"},
    )
    config, made = load(path), 0
    tables = [f"db.{name}_{kind}" for kind in (*KINDS, "dead")]
    for _ in range(2):
        made += fill(broker, name, made)
        catch_up(config, spark)
    for step in KILLS:
        made += fill(broker, name, made)
        catch_up(config, spark)
        killed_at(step, __name__, str(path), "batch:0", log=tmp_path / "log")
        with pytest.raises(Gap, match="is unfinished"):
            Sink(config).start(spark)
        plan = rewind(config, spark, "batch:0")
        assert plan.unfinished
        kept = numbers(lake, name)
        assert len(kept) == sum(plan.choice.boundary.cut.values())
        all_proven(config, spark, *tables)
        catch_up(config, spark)
        assert numbers(lake, name) == list(range(made))
        all_proven(config, spark, *tables)


def fill(broker: Broker, topic: str, start: int, count: int = 40) -> int:
    kinds = (*KINDS, "odd")
    values = [json.dumps({"k": kinds[i % 4], "n": i}).encode() for i in range(start, start + count)]
    return produce(broker.bootstrap, topic, values, 2)


def numbers(lake: Lake, name: str) -> list[int]:
    """What all tables hold together, dead letters too."""
    all_numbers = [n for kind in KINDS for (n,) in lake.query(f"db.{name}_{kind}", "n")]
    all_numbers += [json.loads(value)["n"] for (value,) in lake.query(f"db.{name}_dead", "value")]
    assert_once((n,) for n in all_numbers)
    return sorted(all_numbers)


def main() -> None:
    """A rewind in a process of its own, which is held at a step."""
    from frazil.spark.session import session

    path, to, wanted = sys.argv[1:]
    config = load(path)
    rewind(config, session(config), to, on_step=lambda step, _: hold(step, wanted))


if __name__ == "__main__":
    main()
