"""What JSON records cost: CPU seconds of one core per million records, decode or a whole chunk.

    python bench/json_decode.py [--rows 500000] [--runs 3] [--before SRC]

Records are objects with 9 fields, about 170 bytes, in chunks of 50,000 as in a task. Cases: plain;
one record in 1,000 has a field that the table lacks; every record has one, and it is passed over;
texts with escapes and beyond ASCII; doubles of 17 digits; declared types. `decode` is bytes
to columns, `chunk` is decode, learn of new fields, and fit to the table, without fetch and write.

`pyarrow` is Arrow's own reader of newline-delimited JSON with the types given, which checks less
(invalid UTF-8 passes). `--before` is the `src` folder of another checkout, measured in turns with
this one. The last line is JSON. Figures: decision 085.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.selects import HERE, TABLE, World, config_of

from frazil.kafka.record_batch import RawRecords
from frazil.pipeline.chunk import ChunkPipeline
from frazil.sources.base import BatchTables

CHUNK = 50_000
DECLARED = {"created": "timestamptz", "updated": "timestamptz(ms)", "price": "decimal(12,2)"}


def record(i: int, dice: np.random.Generator, case: str) -> bytes:
    row: dict[str, Any] = {
        "id": i,
        "customer": int(dice.integers(10**6)),
        "email": f"user{i}@example.com",
        "country": "DE" if i % 2 else "NO",
        "amount": i % 10_000 / 100,
        "quantity": i % 7,
        "paid": i % 2 == 0,
        "session": f"{int(dice.integers(2**62)):016x}",
        "note": "as agreed, by the usual carrier",
    }
    if case == "escapes":
        row |= {"note": 'said "yes"\nat 9 o’clock', "country": "España"}
        return json.dumps(row, ensure_ascii=i % 2 == 0).encode()
    if case == "doubles":
        row |= {"amount": float(dice.random() * 100), "quantity": float(dice.random())}
    if case == "declared":
        row |= {"created": "2026-03-01T12:34:56.789Z", "updated": 1_772_000_000_000 + i}
        row |= {"price": i % 10_000 / 100}
        del row["session"], row["note"], row["amount"]
    if case == "passed over" or (case == "new field" and i % 1000 == 500):
        row["coupon"] = "A-1234"
    return json.dumps(row).encode()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "new field": {},
    "passed over": {"columns": {"id": "long"}, "undeclared": "drop"},
    "escapes": {},
    "doubles": {},
    "declared": {"columns": DECLARED},
}


def spent(work: Callable[[list[bytes]], None], values: list[bytes], rows: int) -> float:
    """CPU seconds per million records."""
    work(values[:CHUNK])  # allocates what later chunks use again
    start = time.process_time()
    done = 0
    while done < rows:
        at = done % len(values)
        work(values[at : at + CHUNK])
        done += CHUNK
    return round((time.process_time() - start) * 1_000_000 / done, 3)


def measured(rows: int) -> dict[str, dict[str, float]]:
    """Case → way → CPU seconds per million records."""
    figures = {}
    for case, decode in CASES.items():
        dice = np.random.default_rng(1)
        values = [record(i, dice, case) for i in range(2 * CHUNK)]
        world = World(config_of(decode={"format": "json", **_declared(case, decode, values[0])}))
        world.send(*values[:10])
        plan = world.plans.plan(BatchTables({TABLE: world.table_plan(TABLE)}, {}, 0, "f"))
        pipeline, offsets = ChunkPipeline(plan), np.arange(CHUNK)

        def chunk(part: list[bytes], pipeline: Any = pipeline, offsets: Any = offsets) -> None:
            raw = RawRecords([*part], offsets, offsets)
            result = pipeline.process(HERE, raw, frozenset())
            assert sum(len(rows) for _, rows in result.rows) >= CHUNK * 0.99, result.rejections

        chunk(values[:CHUNK])
        decoder = pipeline._records._to(TABLE).json_reader
        columns = pa.schema([(f.name, f.type) for f in plan.tables[TABLE].columns])
        figures[case] = {
            "decode": spent(lambda part, of=decoder: of.decode(part), values, rows),
            "chunk": spent(chunk, values, rows),
        }
        if case != "declared":
            figures[case]["pyarrow"] = spent(_by_pyarrow(columns), values, rows)
    return figures


def _declared(case: str, decode: dict[str, Any], value: bytes) -> dict[str, Any]:
    if case != "passed over":
        return decode
    words = {int: "long", float: "double", str: "string", bool: "boolean"}
    fields = json.loads(value)
    del fields["coupon"]
    return {**decode, "columns": {name: words[type(it)] for name, it in fields.items()}}


def _by_pyarrow(columns: pa.Schema) -> Callable[[list[bytes]], None]:
    parsing = pj.ParseOptions(explicit_schema=columns, unexpected_field_behavior="ignore")

    def read(part: list[bytes]) -> None:
        payload = b"\n".join(part)
        reading = pj.ReadOptions(use_threads=False, block_size=len(payload) + 1)
        assert pj.read_json(io.BytesIO(payload), reading, parsing).num_rows == CHUNK

    return read


def measured_apart(source: str, rows: int) -> dict[str, dict[str, float]]:
    environment = {**os.environ, "PYTHONPATH": source}
    script = Path(source).parent / "bench" / Path(__file__).name  # of that checkout
    command = [sys.executable, str(script), "--once", "--rows", str(rows)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--before", default="")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(measured(given.rows)))
        return
    sources = {"now": str(Path(__file__).parents[1] / "src")}
    sources |= {"before": given.before} if given.before else {}
    runs: dict[str, list[Any]] = {name: [] for name in sources}
    for _ in range(given.runs):
        for name, source in sources.items():
            runs[name].append(measured_apart(source, given.rows))
    result: dict[str, Any] = {}
    print(f"{'CPU-s per million':20}", *(f"{name:>26}" for name in sources))
    for case in CASES:
        for way in runs["now"][0][case]:
            figures = {name: [run[case][way] for run in runs[name]] for name in sources}
            texts = [f"{median(f):.3f} ({min(f):.3f}-{max(f):.3f})" for f in figures.values()]
            print(f"{case + ', ' + way:20}", *(f"{text:>26}" for text in texts))
            row = {name: median(f) for name, f in figures.items()}
            result.setdefault(case, {})[way] = row if given.before else row["now"]
    print(json.dumps({"cpu_seconds_per_million": result}))


if __name__ == "__main__":
    main()
