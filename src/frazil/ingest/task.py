"""One range through the executor's stations: fetch ▶ decode ▶ route ▶ write.

Comes in: the plan of a batch (what all tasks share) and one range. Goes out: one `Result`, small
and plain, which the driver checks against the plan before it stages anything.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from frazil.core.errors import FrazilError, Undecodable, across
from frazil.core.offsets import Partition, Range
from frazil.ingest.decode import Decoder, Format, Rejected
from frazil.ingest.fetch import Chunk, fetch
from frazil.ingest.route import Metadata, route
from frazil.ingest.stage import Tally, tally_of, tally_values
from frazil.ingest.write import TableShape, Writer, WrittenFile

#: What `run_all` gives, in Spark's words and in Arrow's.
RESULTS = "result string, pieces int, origin string"
_RESULTS = pa.schema([("result", pa.string()), ("pieces", pa.int32()), ("origin", pa.string())])


@dataclass(frozen=True, slots=True)
class Plan:
    """What all tasks of a batch share. Travels pickled; its secrets are never shown."""

    kafka: Mapping[str, str] = field(repr=False)
    format: Format = field(repr=False)
    table: TableShape
    metadata: Metadata
    event_time: str
    file_prefix: str
    patience: float


@dataclass(frozen=True, slots=True)
class Result:
    tally: Tally
    files: tuple[WrittenFile, ...]
    seconds: Mapping[str, float]  # fetch, decode, write; and cpu of the whole worker process

    def dump(self) -> str:
        files = [[f.descriptor, f.rows, f.bytes] for f in self.files]
        return json.dumps([tally_values(self.tally), files, dict(self.seconds)])

    @staticmethod
    def load(text: str) -> Result:
        tally, files, seconds = json.loads(text)
        return Result(tally_of(tally), tuple(WrittenFile(*each) for each in files), seconds)


def run(plan: Plan, wanted: Range) -> Result:
    """Everything of one range, or an error and nothing that counts."""
    clock = _Stopwatch()
    target = plan.table.arrow
    origin = {field.name for field in plan.metadata.fields}
    decoder = Decoder(plan.format, pa.schema([f for f in target if f.name not in origin]))
    writer = Writer(plan.table, plan.file_prefix)
    tally = Tally(Range(wanted.partition, wanted.start, wanted.start), 0)
    chunks = fetch(plan.kafka, wanted, patience=plan.patience)
    while True:
        with clock("fetch"):
            chunk = next(chunks, None)
        if chunk is None:
            break
        with clock("decode"):
            decoded, rejected = decoder.decode(chunk.values)
        if rejected:
            raise _undecodable(chunk, rejected)
        with clock("write"):
            for group in decoded:
                offsets, timestamps = chunk.offsets, chunk.timestamps
                if group.index is not None:
                    offsets, timestamps = offsets[group.index], timestamps[group.index]
                rows = route(
                    group.rows, target, plan.metadata, chunk.partition, offsets, timestamps
                )
                writer.write(rows)
                tally += _tally(rows, plan.event_time, tally.range)
        seen = (int(chunk.offsets[0]), int(chunk.offsets[-1])) if len(chunk.offsets) else None
        reached = tally.range.end + len(chunk.values) + chunk.invisible
        tally += Tally(
            Range(wanted.partition, tally.range.end, reached),
            0,
            invisible=chunk.invisible,
            seen=seen,
        )
    with clock("write"):
        files = writer.close()
    return Result(tally, tuple(files), clock.seconds())


def run_all(plan: Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The shape Spark's `mapInArrow` wants: rows of ranges in, rows of results out."""
    gc.disable()  # a worker's garbage is counted references; cycles there are none worth looking for
    try:
        for batch in batches:
            for row in batch.to_pylist():
                wanted = Range(Partition(row["topic"], row["partition"]), row["start"], row["end"])
                result = {
                    "result": run(plan, wanted).dump(),
                    "pieces": row["pieces"],
                    "origin": row["origin"],
                }
                yield pa.RecordBatch.from_pylist([result], schema=_RESULTS)
    except FrazilError as error:
        raise across(error) from None
    finally:
        gc.enable()


def _tally(rows: pa.Table, event_time: str, behind: Range) -> Tally:
    """Of rows just written; the offsets they stand for are counted with their chunk."""
    here = Range(behind.partition, behind.end, behind.end)
    watermark = None
    if event_time and len(rows):
        span = pc.min_max(rows.column(event_time).cast(pa.timestamp("us", "UTC"), safe=False))
        if span["min"].is_valid:
            watermark = (span["min"].value, span["max"].value)
    return Tally(here, len(rows), watermark=watermark)


def _undecodable(chunk: Chunk, rejected: list[Rejected]) -> Undecodable:
    first = min(rejected, key=lambda each: each.index)
    offset = int(chunk.offsets[first.index])
    more = f" (and {len(rejected) - 1} more within {len(chunk.values)} records)"
    return Undecodable(
        f"cannot decode {chunk.partition} offset {offset}: {first.reason}"
        f"{more if len(rejected) > 1 else ''}",
        hint="nothing was lost or skipped: the stream goes on from here once the record can be read",
    )


class _Stopwatch:
    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._cpu = time.process_time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        return {**self._spent, "cpu": time.process_time() - self._cpu}
