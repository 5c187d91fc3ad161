"""What the offset index costs in batches of 100,000 rows, as two ratios of one run.

`share`: one batch at a time, the next one begins when the last is done. A batch is what lies
between plan and end; the index's part of it is from the last table's tag to the index's own,
and what looking after it took (merging its files, expiring its snapshots), spread over all batches.

`cost`: as streams run, each batch beside the commits of the one before it. Runs with an index and
runs without it take turns; how much longer do batches take with it? (Nothing but a benchmark may
leave it out.)

On a local disk Hadoop starts a process, `chmod`, for each file that Iceberg writes, and one for its
checksum: eight in each commit to the index. `parts_ms` has them in it.

    python bench/index.py                          # 100,000 rows, 40 batches and 8 × 10 of them
    python bench/index.py --batches 20 --rows 10000
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from pyspark.sql import SparkSession

from frazil.config.model import Config, from_document
from frazil.sink import Sink
from frazil.spark.session import session
from frazil.steps import Step
from frazil.testing.datagen import SCHEMA, create_topic, produce
from frazil.testing.kafka import Broker

PARTITIONS = 4
#: The first batches of a run start workers and load Java's classes.
WARM = 3
#: Runs with and without an index, and batches of each.
LIVES, BATCHES = 4, 10
PARTS = {
    "write": ("planned", "written"),
    "stage": ("written", "staged"),
    "commit": ("staged", "tagged"),
    "index_rows": ("tagged", "index-commit"),
    "index_commit": ("index-commit", "index-committed"),
    "index_witness": ("index-committed", "index-tagged"),
    "publish": ("index-tagged", "done"),
}


class Timed(Sink):
    """Knows when each step of each batch was, and how long it looked after its index."""

    def __init__(self, config: Config, alone: bool = False, indexed: bool = True) -> None:
        """`alone`: one batch at a time."""
        super().__init__(config, on_step=self._timed)
        self.at: dict[int, dict[str, float]] = {}
        self.rows: dict[int, int] = {}
        self.tidied = 0.0
        self.merges = 0
        self._alone_in_time = alone
        self._indexed = indexed
        self._idle = threading.Event()
        self._idle.set()

    def _assemble(self, *given: Any) -> None:
        super()._assemble(*given)
        bring, self._maintain = self.committer._commit_batches, self._events.maintain
        self._events.maintain = self._timed_maintenance  # type: ignore[method-assign]
        if not self._indexed:
            self.committer._commit_batches = (  # type: ignore[method-assign]
                lambda prefix, *rest: {} if prefix else bring(prefix, *rest)
            )

    def _timed(self, step: Step) -> None:
        if step.name == "planned" and self._alone_in_time:
            self._idle.wait(60)  # until the last batch's commits are over
        elif step.name == "written":
            self.rows[step.batch] = step.records
        elif step.name == "staged":
            self._idle.clear()
        self.merges += step.name == "index-merged"
        self.at.setdefault(step.batch, {}).setdefault(step.name, time.perf_counter())

    def _timed_maintenance(self) -> None:
        began = time.perf_counter()
        if self._indexed:
            self._maintain()
        self.tidied += time.perf_counter() - began
        self._idle.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=100_000, help="of a batch")
    parser.add_argument("--batches", type=int, default=40, help="one at a time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "kafka") as broker:
        bench = Bench(Path(folder), broker.bootstrap, given.rows)
        rows = given.rows * max(given.batches, LIVES * BATCHES)
        create_topic(broker.bootstrap, "orders", PARTITIONS)
        say(f"producing {rows:,} orders")
        produce(broker.bootstrap, "orders", PARTITIONS, rows=rows)
        spark = session(bench.config("first"), say=say)
        alone = bench.timed_run(spark, "first", given.batches, alone=True)
        periods: dict[bool, list[float]] = {True: [], False: []}
        for n in range(2 * LIVES):
            indexed = n % 2 == 0
            timed = bench.timed_run(spark, f"turn_{n}", BATCHES, indexed=indexed)
            begun = sorted(batch["planned"] for batch in bench.whole(timed))
            periods[indexed] += [b - a for a, b in zip(begun[WARM:], begun[WARM + 1 :])]  # noqa: B905
        spark.stop()
    print(json.dumps({**bench.share(alone), **cost(periods)}))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    def __init__(self, folder: Path, bootstrap: str, rows: int) -> None:
        self.folder, self.bootstrap, self.rows = folder, bootstrap, rows
        (folder / "order.avsc").write_text(SCHEMA)

    def config(self, name: str) -> Config:
        uri = f"jdbc:sqlite:{self.folder}/catalog.db?busy_timeout=10000&journal_mode=WAL"
        return from_document(
            {
                "sink": {
                    "id": name,
                    "topics": ["orders"],
                    "trigger": "10ms",
                    "commit_interval": "0s",
                    "index_table": f"db.{name}_index",
                    "max_records_per_trigger": self.rows,
                },
                "kafka": {"bootstrap.servers": self.bootstrap},
                "decode": {"schema": f"{self.folder}/order.avsc"},
                "catalog": {
                    "type": "jdbc",
                    "uri": uri,
                    "jdbc.schema-version": "V1",
                    "warehouse": f"{self.folder}/lake",
                },
                "table": [{"name": f"db.{name}"}],
            }
        )

    def timed_run(self, spark: SparkSession, name: str, batches: int, **how: bool) -> Timed:
        sink = Timed(self.config(name), **how)
        run = sink.start(spark)
        deadline = time.monotonic() + 600
        while len(self.whole(sink)) < batches and time.monotonic() < deadline:
            run.check()
            time.sleep(0.05)
        run.stop()
        say(f"{name}: {len(self.whole(sink))} batches")
        return sink

    def whole(self, sink: Timed) -> list[dict[str, float]]:
        """The batches that were as large as they should be, and are done."""
        batches = [batch for n, batch in sorted(sink.at.items()) if sink.rows.get(n) == self.rows]
        return [batch for batch in batches if {"planned", "done"} <= set(batch)]

    def share(self, sink: Timed) -> dict[str, object]:
        batches = [times for times in self.whole(sink) if "index-tagged" in times][WARM:]
        parts = {
            name: median(times[end] - times[start] for times in batches)
            for name, (start, end) in PARTS.items()
        }
        run_due = sink.tidied / max(1, sum("done" in times for times in sink.at.values()))
        index = median(times["index-tagged"] - times["tagged"] for times in batches) + run_due
        batch = median(times["done"] - times["planned"] for times in batches) + run_due
        shown = {name: round(1000 * seconds) for name, seconds in parts.items()}
        return {
            "rows": self.rows,
            "batches": len(batches),
            "batch_ms": round(1000 * batch),
            "index_ms": round(1000 * index),
            "share": round(index / batch, 4),
            "merges": sink.merges,
            "parts_ms": {**shown, "run_due": round(1000 * run_due, 1)},
        }


def cost(periods: dict[bool, list[float]]) -> dict[str, object]:
    having, lacking = median(periods[True]), median(periods[False])
    return {
        "stream_ms": round(1000 * having),
        "stream_without_ms": round(1000 * lacking),
        "cost": round(1 - lacking / having, 4),
    }


if __name__ == "__main__":
    main()
