"""What Avro records cost: CPU seconds of one core per million records, from Kafka to rows.

    python bench/decode.py [--rows 1000000] [--runs 3] [--before SRC]

Records are Avro of 8 fields with Confluent's header, about 60 bytes, in record batches of 250 and
chunks of 50,000, as a task gets them from the broker. Cases: plain; one header on each record; keys
and headers; one value in 1,000 is null; one datum in 1,000 is bad; eight schema ids by turns.
`open` is record batches to values, keys and headers; `decode` is that and columns; `chunk` is that
and rows that fit the table, with its metadata columns, without fetch and write.

`--before` is the `src` folder of another checkout, measured in turns with this one. The last line
is JSON. Figures: decision 083.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from frazil.config.sections import TableConfig
from frazil.files.writer import WriterSpec
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.iceberg.schema import iceberg_schema
from frazil.kafka.record_batch import RawRecords, RecordBatches, RecordBatchHeader
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import ChunkPlan, TablePlan

CHUNK, BATCH = 50_000, 250
HERE, TABLE = Partition("events", 0), "db.t"
FIELDS = {
    "id": "long",
    "customer": "int",
    "email": "string",
    "country": {"type": "enum", "name": "Country", "symbols": ["DE", "NO", "FR"]},
    "amount": "double",
    "paid": "boolean",
    "note": ["null", "string"],
    "created": {"type": "long", "logicalType": "timestamp-micros"},
}
SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": name, "type": kind} for name, kind in FIELDS.items()],
    }
)
CASES = ("plain", "headers", "keys and headers", "nulls", "bad datums", "many schemas")


def varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def value_of(i: int, dice: random.Random, case: str) -> bytes | None:
    if case == "nulls" and i % 1_000 == 500:
        return None
    schema_id = 7 + (i % 8 if case == "many schemas" else 0)
    note = b"\0" if i % 2 else b"\2" + sized(b"as agreed")
    parts = (
        b"\0" + struct.pack(">I", schema_id),
        varint(i) + varint(dice.randrange(10**6)) + sized(b"user%d@example.com" % i),
        varint(i % 3) + struct.pack("<d", i / 100) + bytes([i % 2]),
        note + varint(1_772_000_000_000_000 + i),
        b"x" if case == "bad datums" and i % 1_000 == 500 else b"",
    )
    return b"".join(parts)


def batches_of(case: str) -> list[RecordBatchHeader]:
    """One chunk, as the broker stores it."""
    dice = random.Random(1)
    batches = []
    for base in range(0, CHUNK, BATCH):
        raw = []
        for delta in range(BATCH):
            i = base + delta
            key = b"%08d" % i if case == "keys and headers" else None
            trace = sized(b"traceparent") + sized(b"00-%032d-%016d-01" % (i, i))
            headers = varint(1) + trace if "headers" in case else varint(0)
            inner = varint(delta) + varint(delta) + sized(key) + sized(value_of(i, dice, case))
            body = b"\0" + inner + headers
            raw.append(varint(len(body)) + body)
        header = RecordBatchHeader(base, BATCH - 1, BATCH, 1_772_000_000_000, None, b"".join(raw))
        batches.append(header)
    return batches


def plan_of(format: RecordFormat) -> ChunkPlan:
    columns = Decoder(format).columns([b"\0\0\0\0\7"])
    metadata = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
    schema = iceberg_schema(columns, metadata, TableConfig(TABLE))
    shape = WriterSpec(TABLE, "", schema, 0, "", {}, 0, "", {})
    return ChunkPlan(format, None, {TABLE: TablePlan(shape, metadata, "", "reject")}, only=TABLE)


def spent(work: Callable[[], int], rows: int) -> float:
    """CPU seconds per million records."""
    work()  # compiles, and allocates what later chunks use again
    start = time.process_time()
    done = 0
    while done < rows:
        assert work() >= CHUNK * 0.99
        done += CHUNK
    return round((time.process_time() - start) * 1_000_000 / done, 4)


def measured(rows: int) -> dict[str, dict[str, float]]:
    """Case → way → CPU seconds per million records."""
    format = RecordFormat("confluent-avro", SCHEMA)
    decoder, pipeline = Decoder(format), ChunkPipeline(plan_of(format))
    figures = {}
    for case in CASES:
        batches = batches_of(case)

        def open_(batches: list[RecordBatchHeader] = batches) -> int:
            return len(RecordBatches(batches, 0, CHUNK).open(envelope=True).values)

        def decode(batches: list[RecordBatchHeader] = batches) -> int:
            opened = RecordBatches(batches, 0, CHUNK).open(envelope=True)
            return sum(len(g.rows) for g in decoder.decode(opened.values, opened.headers)[0])

        def chunk(batches: list[RecordBatchHeader] = batches) -> int:
            opened = RecordBatches(batches, 0, CHUNK).open(envelope=True)
            result = pipeline.process(HERE, opened, frozenset())
            return sum(len(rows) for _, rows in result.rows)

        def framed_chunk(batches: list[RecordBatchHeader] = batches) -> int:
            """As it was before decision 083."""
            records = RecordBatches(batches, 0, CHUNK)
            framed = pipeline.framed(records)  # type: ignore[attr-defined]
            if framed is not None:
                opened = RawRecords([], framed.offsets, framed.stamps, framed.keys)
            else:
                opened = records.open(envelope=True)
            result = pipeline.process(HERE, opened, framed, frozenset())  # type: ignore[call-arg, arg-type]
            return sum(len(rows) for _, rows in result.rows)

        if hasattr(pipeline, "framed"):
            figures[case] = {"chunk": spent(framed_chunk, rows)}
        else:
            works = {"open": open_, "decode": decode, "chunk": chunk}
            figures[case] = {way: spent(work, rows) for way, work in works.items()}
    return figures


def measured_apart(source: str, rows: int) -> dict[str, dict[str, float]]:
    environment = {**os.environ, "PYTHONPATH": source, "RUST_BACKTRACE": "0"}
    command = [sys.executable, __file__, "--once", "--rows", str(rows)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
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
    print(f"{'CPU-s per million':26}", *(f"{name:>26}" for name in sources))
    for case in CASES:
        for way in runs["now"][0][case]:
            figures = {
                name: [run[case][way] for run in runs[name]]
                for name in sources
                if way in runs[name][0][case]
            }
            texts = [f"{median(f):.3f} ({min(f):.3f}-{max(f):.3f})" for f in figures.values()]
            print(f"{case + ', ' + way:26}", *(f"{text:>26}" for text in texts))
            row = {name: median(f) for name, f in figures.items()}
            result.setdefault(case, {})[way] = row if given.before else row["now"]
    print(json.dumps({"cpu_seconds_per_million": result}))


if __name__ == "__main__":
    main()
