"""What the offset index costs: its share of a batch of 100,000 rows, in one run.

One life of a sink takes batches of equal size from a topic, one at a time: the next one begins when
the last is done, so that no two of them are in each other's way. The steps of each are timed.
A batch is what lies between plan and end. The index's part is from the last table's witness to its
own, and what looking after it took (merging its files, expiring its snapshots), spread over all
batches. In a stream commits run beside the next batch: what the index costs there is less.

    python bench/index.py                          # 50 batches of 100,000 rows
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

from frazil.core.config import Config, from_document
from frazil.sink import Sink, Step
from frazil.surface.broker import Broker
from frazil.surface.orders import SCHEMA, create_topic, produce
from frazil.surface.session import session

PARTITIONS = 4
#: The first batches start workers and load Java's classes.
WARM = 5
PARTS = {
    "write": ("planned", "written"),
    "stage": ("written", "staged"),
    "commit": ("staged", "witnessed"),
    "index_rows": ("witnessed", "index-commit"),
    "index_commit": ("index-commit", "index-committed"),
    "index_witness": ("index-committed", "index-witnessed"),
    "publish": ("index-witnessed", "done"),
}


class Timed(Sink):
    """One batch at a time; knows when each step was, and how long it looked after its index."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, on_step=self._timed)
        self.at: dict[int, dict[str, float]] = {}
        self.rows: dict[int, int] = {}
        self.tidied = 0.0
        self.merges = 0
        self._idle = threading.Event()
        self._idle.set()

    def _timed(self, step: Step) -> None:
        if step.name == "planned":
            self._idle.wait(60)  # until the last batch's commits are over
        elif step.name == "written":
            self.rows[step.batch] = step.records
        elif step.name == "staged":
            self._idle.clear()
        self.merges += step.name == "index-merged"
        self.at.setdefault(step.batch, {}).setdefault(step.name, time.perf_counter())

    def _tidy(self) -> None:
        began = time.perf_counter()
        super()._tidy()
        self.tidied += time.perf_counter() - began
        self._idle.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=100_000, help="of a batch")
    parser.add_argument("--batches", type=int, default=50)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "kafka") as broker:
        (Path(folder) / "order.avsc").write_text(SCHEMA)
        config = from_document(
            {
                "sink": {
                    "id": "bench",
                    "topics": ["orders"],
                    "trigger": "10ms",
                    "max_records_per_trigger": given.rows,
                },
                "kafka": {"bootstrap.servers": broker.bootstrap},
                "decode": {"schema": f"{folder}/order.avsc"},
                "catalog": {"type": "hadoop", "warehouse": f"{folder}/lake"},
                "table": [{"name": "db.orders"}],
            }
        )
        create_topic(broker.bootstrap, "orders", PARTITIONS)
        print(f"producing {given.rows * given.batches:,} orders", file=sys.stderr)
        produce(broker.bootstrap, "orders", PARTITIONS, rows=given.rows * given.batches)
        spark = session(config, say=lambda text: print(text, file=sys.stderr))
        sink = Timed(config)
        sink.start(spark)
        sink.wait_until(sink.ends())
        sink.stop()
        spark.stop()
    print(json.dumps(figures(sink, given.rows)))


def figures(sink: Timed, rows: int) -> dict[str, object]:
    whole = [each for number, each in sorted(sink.at.items()) if sink.rows.get(number) == rows]
    batches = [each for each in whole if {"planned", "done", "index-witnessed"} <= set(each)][WARM:]
    parts = {
        name: median(each[end] - each[start] for each in batches)
        for name, (start, end) in PARTS.items()
    }
    tidy = sink.tidied / max(1, sum("done" in each for each in sink.at.values()))
    index = median(each["index-witnessed"] - each["witnessed"] for each in batches) + tidy
    batch = median(each["done"] - each["planned"] for each in batches) + tidy
    return {
        "rows": rows,
        "batches": len(batches),
        "batch_ms": round(1000 * batch),
        "index_ms": round(1000 * index),
        "share": round(index / batch, 4),
        "merges": sink.merges,
        "parts_ms": {
            **{name: round(1000 * each) for name, each in parts.items()},
            "tidy": round(1000 * tidy, 1),
        },
    }


if __name__ == "__main__":
    main()
