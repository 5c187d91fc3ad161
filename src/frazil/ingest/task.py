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

from frazil.core.errors import FrazilError, Miscount, Undecodable, across
from frazil.core.offsets import Partition, Range
from frazil.ingest.decode import Decoder, Format, Rejected
from frazil.ingest.fetch import fetch
from frazil.ingest.records import Longs
from frazil.ingest.route import Metadata, route
from frazil.ingest.stage import Tally, tally_of, tally_values
from frazil.ingest.write import TableShape, Writer, WrittenFile

#: What `run_all` gives, in Spark's words and in Arrow's.
RESULTS = "result string, planned string, pieces int, origin string"
_RESULTS = pa.schema(
    [("result", pa.string()), ("planned", pa.string()), ("pieces", pa.int32()),
     ("origin", pa.string())]
)  # fmt: skip


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
    client: bool = False  # read with confluent-kafka, whatever else is possible


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
    clock = Stopwatch()
    target = plan.table.arrow
    origin = {field.name for field in plan.metadata.fields}
    decoder = Decoder(plan.format, pa.schema([f for f in target if f.name not in origin]))
    writer = Writer(plan.table, plan.file_prefix)
    tally = Tally(Range(wanted.partition, wanted.start, wanted.start), 0)
    chunks = fetch(plan.kafka, wanted, patience=plan.patience, client=plan.client)
    while True:
        with clock("fetch"):
            chunk = next(chunks, None)
        if chunk is None:
            break
        with clock("decode"):
            framed = decoder.framed(chunk.records) if chunk.records else None
            if framed is not None:
                decoded, offsets, stamps = [framed.decoded], framed.offsets, framed.stamps
            else:
                opened = chunk.open()
                offsets, stamps = opened.offsets, opened.stamps
                decoded, rejected = decoder.decode(opened.values)
                if rejected:
                    raise undecodable(chunk.span.partition, offsets, rejected)
        with clock("write"):
            for group in decoded:
                at = slice(None) if group.index is None else group.index
                rows = route(
                    group.rows, target, plan.metadata, wanted.partition, offsets[at], stamps[at]
                )
                writer.write(rows)
                tally += _tally(rows, plan.event_time, tally.range)
        seen = (int(offsets[0]), int(offsets[-1])) if len(offsets) else None
        # Every offset of the span was seen by the reader: those without a record are invisible.
        invisible = len(chunk.span) - len(offsets)
        tally += Tally(chunk.span, 0, invisible=invisible, seen=seen)
    if tally.range != wanted:
        raise Miscount(f"cannot finish {wanted}: the reader reached {tally.range}")
    with clock("write"):
        files = writer.close()
    return Result(tally, tuple(files), clock.seconds())


def run_all(plan: Plan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The shape Spark's `mapInArrow` wants: rows of ranges in, rows of results out."""
    # Spark collects garbage after every task, which takes longer than a small task among a thousand
    # modules: they are taken out of its sight.
    gc.disable()
    gc.freeze()
    try:
        for batch in batches:
            for row in batch.to_pylist():
                wanted = Range(Partition(row["topic"], row["partition"]), row["start"], row["end"])
                result = {
                    "result": run(plan, wanted).dump(),
                    "planned": str(wanted),
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
    return Tally(here, len(rows), watermark=watermark(rows, event_time))


def watermark(rows: pa.Table, event_time: str) -> tuple[int, int] | None:
    """Lowest and highest event time, in microseconds."""
    if not event_time or not len(rows):
        return None
    span = pc.min_max(rows.column(event_time).cast(pa.timestamp("us", "UTC"), safe=False))
    return (span["min"].value, span["max"].value) if span["min"].is_valid else None


def undecodable(partition: Partition, offsets: Longs, rejected: list[Rejected]) -> Undecodable:
    first = min(rejected, key=lambda each: each.index)
    more = f" (and {len(rejected) - 1} more of {len(offsets)})" if len(rejected) > 1 else ""
    return Undecodable(
        f"cannot decode {partition} offset {int(offsets[first.index])}: {first.reason}{more}",
        hint="nothing was lost or skipped; the stream goes on from here when it can be read",
    )


class Stopwatch:
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
