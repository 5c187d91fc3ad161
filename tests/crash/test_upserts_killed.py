"""SIGKILL of a driver that upserts, at named steps: at every snapshot of every run the table is
what a plain dictionary holds, read by Spark and by DuckDB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frazil.config.model import load
from frazil.ops.orphans import orphans
from frazil.steps import STEPS
from frazil.testing.kafka import Broker
from frazil.testing.process import SinkRuns
from tests.oracle import Lake
from tests.system.streams import proven
from tests.system.test_upserts import Feed, batches, chaos, upsert
from tests.upserts import spark_rows

PER_RUN, KEYS, PARTITIONS = 200, 50, 3
#: Of what the sink does between commits; each comes once in a short run.
BETWEEN = ("compact", "compacted", "expire", "expired")


@pytest.mark.parametrize(
    ("steps", "ordered"),
    [
        (("committed", "compact"), False),
        pytest.param((*STEPS, *BETWEEN), False, marks=pytest.mark.long),
        pytest.param((*STEPS, *BETWEEN), True, marks=pytest.mark.long),
    ],
    ids=["some", "every", "ordered"],
)
def test_no_kill_brings_a_row_back_loses_one_or_leaves_a_twin(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    steps: tuple[str, ...],
    ordered: bool,
):
    """`ordered`: by what is sent first, whichever Kafka partition it comes from."""
    feed = Feed(broker, name, PARTITIONS, order=(lambda row: row["value"]) if ordered else None)

    def configured(**table: str) -> Path:
        return write_toml(
            decode={"format": "json"},
            table=upsert(**table, **({"version_column": "value"} if ordered else {})),
            sink={"max_records_per_trigger": PER_RUN // 2},
        )

    def check() -> None:
        feed.oracle.check(
            lake.metadata_file(f"db.{name}"), Spark=spark_rows(spark, f"lake.db.{name}")
        )

    config = configured(snapshot_retention="1ms")
    where = {"log": tmp_path / "log", "scratch": tmp_path / "scratch"}
    runs = SinkRuns(config, **where)
    for run, step in enumerate(steps):
        chaos(feed, run, PER_RUN, KEYS, PARTITIONS)
        hold = f"{step}:{1 if step in BETWEEN else 2}"
        last = run == len(steps) - 1
        assert runs.next(hold=hold, until="forever", last=last).killed()
        check()
    # The final run expires nothing: each snapshot of its many batches is looked at behind it.
    final = SinkRuns(configured(), **where).next(last=True)
    events = list(final.events())
    assert final.wait() == 0, events[-1]
    check()
    given = load(config)
    counted = sum(
        line.counts.written + line.counts.merged for line in proven(given, spark).partitions
    )
    assert counted == len(steps) * PER_RUN
    if "expire" not in steps:
        assert len(batches(lake, f"db.{name}")) >= 2 * len(steps)
    # What the killed runs left behind is removed, and nothing else with it.
    left = orphans(given, spark)
    assert any(path.endswith(".parquet") for _, path in left), "of the round that came to nothing"
    for table, path in left:
        table.delete(path)
    assert orphans(given, spark) == []
    check()
