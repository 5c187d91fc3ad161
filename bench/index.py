"""What the offset index costs: its share of a batch of 100,000 rows, in one run.

One life of a sink takes batches of equal size from a topic. The steps of each batch are timed; the
index's part is from the last table's witness to the end of the batch, and what looking after the
index took behind it (merging its files, expiring its snapshots), spread over all batches. A batch
is what lies between plan and end. Commits run beside the next batch, so most of the index's part
is hidden: what it costs the stream is less than its share.

    python bench/index.py                          # 50 batches of 100,000 rows
    python bench/index.py --batches 20 --rows 10000
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from frazil.core.config import from_document
from frazil.sink import Sink, Step
from frazil.surface.broker import Broker
from frazil.surface.orders import SCHEMA, create_topic, produce
from frazil.surface.session import session

PARTITIONS = 4
#: The first batches start workers and load Java's classes.
WARM = 5


class Timed(Sink):
    """Knows how long it looked after its index."""

    tidied = 0.0

    def _tidy(self) -> None:
        began = time.perf_counter()
        super()._tidy()
        self.tidied += time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=100_000, help="of a batch")
    parser.add_argument("--batches", type=int, default=50)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "kafka") as broker:
        (Path(folder) / "order.avsc").write_text(SCHEMA)
        config = from_document(
            {
                "sink": {"id": "bench", "topics": ["orders"], "trigger": "10ms",
                         "max_records_per_trigger": given.rows},
                "kafka": {"bootstrap.servers": broker.bootstrap},
                "decode": {"schema": f"{folder}/order.avsc"},
                "catalog": {"type": "hadoop", "warehouse": f"{folder}/lake"},
                "table": [{"name": "db.orders"}],
            }
        )  # fmt: skip
        create_topic(broker.bootstrap, "orders", PARTITIONS)
        print(f"producing {given.rows * given.batches:,} orders", file=sys.stderr)
        produce(broker.bootstrap, "orders", PARTITIONS, rows=given.rows * given.batches)
        spark = session(config, say=lambda text: print(text, file=sys.stderr))
        steps: list[Step] = []
        sink = Timed(config, on_step=steps.append)
        sink.start(spark)
        sink.wait_until(sink.ends())
        sink.stop()
        spark.stop()
    print(json.dumps(figures(steps, sink.tidied, given.rows)))


def figures(steps: list[Step], tidied: float, rows: int) -> dict[str, object]:
    at: dict[int, dict[str, float]] = {}
    for step in steps:
        at.setdefault(step.batch, {}).setdefault(step.name, step.at)
    whole = [each for each in at.values() if {"planned", "done", "witnessed"} <= set(each)]
    whole = sorted(whole, key=lambda each: each["planned"])[WARM:]
    batch = [each["done"] - each["planned"] for each in whole]
    index = [each["done"] - each["witnessed"] for each in whole]
    parts = {
        name: round(1000 * median(each[end] - each[start] for each in whole))
        for name, start, end in (
            ("write", "planned", "written"), ("stage", "written", "staged"),
            ("commit", "staged", "witnessed"), ("index_rows", "witnessed", "index-commit"),
            ("index_commit", "index-commit", "index-committed"),
            ("index_witness", "index-committed", "index-witnessed"),
        )
    }  # fmt: skip
    tidy = tidied / max(1, len([s for s in steps if s.name == "done"]))
    wall = whole[-1]["done"] - whole[0]["planned"]
    return {
        "rows": rows,
        "batches": len(whole),
        "batch_ms": round(1000 * median(batch)),
        "index_ms": round(1000 * median(index)),
        "tidy_ms": round(1000 * tidy, 1),
        "share": round((median(index) + tidy) / (median(batch) + tidy), 4),
        "rows_per_second": round(rows * (len(whole) - 1) / wall),
        "merges": sum(step.name == "index-merged" for step in steps),
        "parts_ms": parts,
    }


if __name__ == "__main__":
    main()
