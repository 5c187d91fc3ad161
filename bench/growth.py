"""What a batch costs, against one dimension of its input at a time.

    partitions  of the topic             100,000 records of 30 bytes in each batch
    tables      that the records go to   100,000 records
    columns     of a record              20,000 records
    bytes       of a record              2,000 records
    snapshots   of the table             20,000 records
    cores       of the sink's processes  500,000 records; only where there are more than two

Each point is a fresh process with a fresh sink on a topic of its own. Batches follow one another,
each begins when the one before is committed. The first ones warm up; of the others the median is
taken: wall seconds from the end of one to the end of the next, CPU seconds of the driver, the JVM
and the Python workers; and the peak of the memory of all processes together (PSS).

Between two points that follow each other, the exponent of growth is log(cost) / log(input): 0 is a
cost that stays, 1 one that grows as its input does. A cost that grew faster, beyond the noise, is
flagged; with `--judge` the exit code is 1 then. All but the measured dimension stays the same, so
that a table's history of 10,000 snapshots, for example, must not cost more than ten of 1,000.

A long history is made by metadata: a few batches of the sink, then generated snapshots below them
in the table's metadata file, each with a summary as the sink's own.

    make bench WHAT=growth                                       # all: about a quarter of an hour
    make bench WHAT=growth ARGS='--dimensions partitions tables --steps tables=1,10,100'
    make bench WHAT=growth ARGS='--judge --write docs'           # also into docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka.admin import AdminClient

import report
from frazil.spark import jars
from frazil.testing.datagen import create_topic, zigzag
from frazil.testing.kafka import Broker
from peer_topics import PARTITIONS, produce
from side import PARTS, Side, answer_requests, cpu_by_part

#: Five columns of fixed width: as many bytes for each record.
TYPES = {"long": 5, "string": 9, "double": 8, "int": 2, "boolean": 1}
COLUMNS = len(TYPES)
GROUP = sum(TYPES.values())
#: Confluent's header.
HEAD = b"\0\0\0\0\1"
#: Of a batch that costs this much more than its input grew, some is noise.
NOISE = 1.1
#: Bytes of records that are generated at once.
CHUNK = 16 << 20
#: A batch is as large as it is planned: nothing else may end it.
LIMITS = {"max_bytes_per_trigger": "1TiB", "trigger": "10ms", "commit_interval": "0s"}
WITHIN = 1800.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ── points ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Point:
    """What the batches of one sink are made of."""

    #: records of a batch
    rows: int
    partitions: int = PARTITIONS
    tables: int = 1
    columns: int = COLUMNS
    #: of a record; 0: as many as its columns have
    bytes: int = 0
    #: of the table before the first measured batch; 0: the sink's own
    snapshots: int = 0
    #: 0: all
    cores: int = 0


@dataclass(frozen=True, slots=True)
class Dimension:
    title: str
    steps: tuple[int, ...]
    rows: int


def core_steps(count: int) -> tuple[int, ...]:
    """1, 2, 4 … and all of a machine with more than two cores."""
    if count <= 2:
        return ()
    return (*(1 << n for n in range(count.bit_length()) if 1 << n < count), count)


DIMENSIONS = {
    "partitions": Dimension("Topic partitions", (4, 16, 64, 256, 1_000), 100_000),
    "tables": Dimension("Tables", (1, 10, 100, 300), 100_000),
    "columns": Dimension("Columns of a record", (5, 50, 500), 20_000),
    "bytes": Dimension("Bytes of a record", (50, 1_000, 10_000, 100_000), 2_000),
    "snapshots": Dimension("Snapshots of the table", (10, 100, 1_000, 10_000), 20_000),
    "cores": Dimension("Cores", core_steps(os.cpu_count() or 1), 500_000),
}


def schema(point: Point) -> str:
    types = list(TYPES)
    fields = [{"name": f"c{n}", "type": types[n % COLUMNS]} for n in range(point.columns)]
    if point.bytes:
        fields.append({"name": "payload", "type": "string"})
    return json.dumps({"type": "record", "name": "Event", "fields": fields})


def events(point: Point, rows: int, seed: int = 1) -> Iterator[bytes]:
    """Records with distinct values in each column; `c1` names the table of a record."""
    draw = np.random.default_rng(seed)
    width = len(HEAD) + GROUP * (point.columns // COLUMNS) + _payload(point)[1]
    for start in range(0, rows, max(1, CHUNK // width)):
        count = min(rows - start, max(1, CHUNK // width))
        parts = [np.tile(np.frombuffer(HEAD, np.uint8), (count, 1))]
        for _ in range(point.columns // COLUMNS):
            parts.append(_group(draw, count))
        length, size = _payload(point)
        if size:
            parts.append(np.tile(np.frombuffer(length, np.uint8), (count, 1)))
            parts.append(_letters(draw, count, size - len(length)))
        matrix = np.hstack(parts)
        if point.tables > 1:
            place = len(HEAD) + TYPES["long"] + 1
            names = b"".join(kind(n % point.tables) for n in range(start, start + count))
            matrix[:, place : place + 8] = np.frombuffer(names, np.uint8).reshape(count, 8)
        data = matrix.tobytes()
        for at in range(0, len(data), width):
            yield data[at : at + width]


def _payload(point: Point) -> tuple[bytes, int]:
    """Length prefix of the text that fills a record up, and the bytes of both."""
    if not point.bytes:
        return b"", 0
    size = point.bytes - len(HEAD) - GROUP
    length = size - len(zigzag(size))
    return zigzag(length), len(zigzag(length)) + length


def _group(draw: np.random.Generator, count: int) -> np.ndarray:
    """One value of each of the types for so many records, encoded."""
    group = np.empty((count, GROUP), np.uint8)
    group[:, 0:4] = draw.integers(0x80, 0x100, (count, 4))  # a varint of five bytes
    group[:, 4] = draw.integers(1, 0x80, count)
    group[:, 5] = 8 << 1
    group[:, 6:14] = _letters(draw, count, 8)
    group[:, 14:22] = draw.random(count).astype("<f8").view(np.uint8).reshape(count, 8)
    group[:, 22] = draw.integers(0x80, 0x100, count)
    group[:, 23] = draw.integers(1, 0x80, count)
    group[:, 24] = draw.integers(0, 2, count)
    return group


def _letters(draw: np.random.Generator, count: int, size: int) -> np.ndarray:
    return draw.integers(ord("a"), ord("z") + 1, (count, size), dtype=np.uint8)


def kind(number: int) -> bytes:
    return b"k%07d" % number


# ── the sink, in a process of its own ────────────────────────────────────────────────────────────


def config(settings: dict[str, Any], point: Point) -> Any:
    from frazil.config.model import from_document

    folder, topic = settings["folder"], settings["topic"]
    document: dict[str, Any] = {
        "sink": {
            "id": topic,
            "topics": [topic],
            "index_table": "db.frazil_index",
            "max_records_per_trigger": point.rows,
            "max_tables": point.tables + 10,
            **LIMITS,
        },
        "kafka": {"bootstrap.servers": settings["bootstrap"]},
        "decode": {"schema": f"{folder}/event.avsc"},
        "catalog": {"type": "hadoop", "warehouse": f"{folder}/lake"},
        "table": [{"name": "db.events", "snapshot_retention": "never"}],
    }
    if point.tables > 1:
        document["table"] = [{"name": "db.{value}", "snapshot_retention": "never"}]
        document["route"] = [{"field": "c1", "to": ["db.{value}"]}]
    if point.cores:
        document["spark"] = {"spark.master": f"local[{2 * point.cores},4]"}
    return from_document(document)


class Meter:
    """A sink's steps: one batch at a time, and what each cost."""

    def __init__(self, rows: int) -> None:
        self.batches: list[dict[str, Any]] = []
        self._rows = rows
        self._idle = threading.Event()
        self._idle.set()
        self._whole = False
        self._mark = self._now()

    def on_step(self, step: Any) -> None:
        if step.name == "planned" and step.records:
            self._idle.wait(WITHIN)  # until the commits of the batch before are over
            self._idle.clear()
            self._whole = step.records == self._rows
        elif step.name == "done":
            seconds, spent = self._now()
            if self._whole:  # not the records that were left over
                before_seconds, before = self._mark
                self.batches.append(
                    {
                        "wall_s": seconds - before_seconds,
                        "cpu_by_part": {part: spent[part] - before[part] for part in PARTS},
                    }
                )
            self._mark = seconds, spent
            self._idle.set()

    @staticmethod
    def _now() -> tuple[float, dict[str, float]]:
        return time.monotonic(), cpu_by_part(os.getpid())


def answer(settings: dict[str, Any]) -> None:
    """The child: all batches of one point."""
    point = Point(**settings["point"])
    if point.cores:
        os.sched_setaffinity(0, range(point.cores))  # of the JVM and its children as well
    from frazil.spark.session import session

    spark = session(config(settings, point))

    def on_request(request: dict[str, Any]) -> dict[str, Any]:
        if point.snapshots:
            run_until(settings, point, spark, Meter(point.rows), 1)
            lengthen_history(Path(settings["folder"], "lake/db/events"), point.snapshots)
        meter = Meter(point.rows)
        run_until(settings, point, spark, meter, request["warm"] + request["batches"])
        if point.snapshots:
            check_history(Path(settings["folder"], "lake/db/events"), point.snapshots)
        return {"measured": meter.batches[request["warm"] :][: request["batches"]]}

    answer_requests(on_request)


def run_until(
    settings: dict[str, Any], point: Point, spark: Any, meter: Meter, batches: int
) -> None:
    """Run the sink until it has committed so many batches in all."""
    from frazil.sink import Sink

    deadline = time.monotonic() + WITHIN
    with Sink(config(settings, point), on_step=meter.on_step).start(spark) as run:
        while len(meter.batches) < batches:
            run.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(meter.batches)} batches of {batches} are committed")
            time.sleep(0.02)


def lengthen_history(table: Path, snapshots: int) -> None:
    """Give a table of a Hadoop catalog so many snapshots in all: generated ones become the oldest.

    The sequence numbers of its own snapshots move up. Their files keep theirs, which are lower and
    only have to be no higher. Each generated snapshot lists the files of the newest one.
    """
    folder, (number, metadata) = table / "metadata", newest_metadata(table)
    own = sorted(metadata["snapshots"], key=lambda snapshot: int(snapshot["sequence-number"]))
    count, newest, oldest_ms = snapshots - len(own), own[-1], own[0]["timestamp-ms"]
    if count < 1:
        return
    ids = random.Random(number)
    generated: list[dict[str, Any]] = []
    for n in range(count):
        snapshot = {
            **newest,
            "snapshot-id": ids.getrandbits(62),
            "sequence-number": n + 1,
            "timestamp-ms": oldest_ms - 1000 * (count - n),
        }
        snapshot.pop("parent-snapshot-id", None)
        if generated:
            snapshot["parent-snapshot-id"] = generated[-1]["snapshot-id"]
        generated.append(snapshot)
    for snapshot in own:
        snapshot["sequence-number"] += count
    own[0]["parent-snapshot-id"] = generated[-1]["snapshot-id"]
    metadata["snapshots"] = [*generated, *own]
    metadata["last-sequence-number"] += count
    logged = ("snapshot-id", "timestamp-ms")
    metadata["snapshot-log"] = [
        *({key: snapshot[key] for key in logged} for snapshot in generated),
        *metadata["snapshot-log"],
    ]
    (folder / f"v{number + 1}.metadata.json").write_text(json.dumps(metadata))
    (folder / ".version-hint.text.crc").unlink(missing_ok=True)
    (folder / "version-hint.text").write_text(str(number + 1))


def newest_metadata(table: Path) -> tuple[int, dict[str, Any]]:
    """Number and content of the newest metadata file."""
    number = int((table / "metadata/version-hint.text").read_text())
    return number, json.loads((table / f"metadata/v{number}.metadata.json").read_text())


def check_history(table: Path, snapshots: int) -> None:
    """Raises unless the sink went on with the history that was made for it."""
    metadata = newest_metadata(table)[1]
    parents = {of["snapshot-id"]: of.get("parent-snapshot-id") for of in metadata["snapshots"]}
    length, at = 0, metadata["current-snapshot-id"]
    while at is not None:
        length, at = length + 1, parents[at]
    if length < snapshots:
        raise SystemExit(f"the table has {length:,} snapshots of {snapshots:,}")


# ── measuring ────────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "versions": {
            "Frazil": version("frazil"),
            "Spark": version("pyspark"),
            "Iceberg": jars.ICEBERG[0].rpartition(":")[2],
        },
        "dimensions": {},
    }
    with tempfile.TemporaryDirectory(prefix="frazil-bench-") as name:
        folder = Path(name)
        say("starting Apache Kafka")
        with Broker(folder / "kafka", jvm=("-Xmx1g",), say=say) as broker:
            for dimension in options.dimensions:
                result["dimensions"][dimension] = measured_dimension(
                    folder, broker.bootstrap, dimension, options
                )
    result["flagged"] = [
        line for dimension in result["dimensions"].values() for line in dimension["flagged"]
    ]
    return result


def measured_dimension(
    folder: Path, bootstrap: str, name: str, options: argparse.Namespace
) -> dict[str, Any]:
    dimension = DIMENSIONS[name]
    rows = options.rows or dimension.rows
    steps = options.steps.get(name, dimension.steps)
    note = f"{rows:,} records in each batch, {options.batches} batches after {options.warm}."
    if not steps:
        note = f"Not measured: {os.cpu_count()} cores; growth needs more than two."
    say(f"{dimension.title}: {note}")
    points = []
    for step in steps:
        point = Point(**{"rows": rows, name: step})
        points.append({"step": step, **measured_point(folder, bootstrap, point, options)})
        say(
            f"  {step:>7,}: wall {points[-1]['wall_s']:6.2f} s  cpu {points[-1]['cpu_s']:6.2f} s  "
            f"{points[-1]['memory_mib']:,} MiB"
        )
    return {"title": dimension.title, "note": note, "points": points, **judged(name, points)}


def measured_point(
    folder: Path, bootstrap: str, point: Point, options: argparse.Namespace
) -> dict[str, Any]:
    """A batch of one point: the medians of its figures."""
    topic = f"t{time.monotonic_ns()}"
    own = folder / topic
    own.mkdir()
    (own / "event.avsc").write_text(schema(point))
    create_topic(bootstrap, topic, point.partitions)
    # more than is measured: a run stops after a batch, and may have begun another
    total = point.rows * (options.warm + options.batches + (3 if point.snapshots else 1))
    produce(bootstrap, topic, events(point, total), partitions=point.partitions)
    settings = {
        "folder": str(own),
        "bootstrap": bootstrap,
        "topic": topic,
        "point": asdict(point),
    }
    with Side("frazil", [sys.executable, __file__, "--side", json.dumps(settings)]) as side:
        run = side.ask(warm=options.warm, batches=options.batches)
    shutil.rmtree(own)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_topics([topic]).values():
        future.result()
    batches = run["measured"]
    by_part = {
        part: round(statistics.median(batch["cpu_by_part"][part] for batch in batches), 3)
        for part in PARTS
    }
    total_cpu = [sum(batch["cpu_by_part"].values()) for batch in batches]
    walls = [batch["wall_s"] for batch in batches]
    return {
        "wall_s": round(statistics.median(walls), 3),
        "wall_s_range": [round(min(walls), 3), round(max(walls), 3)],
        "cpu_s": round(statistics.median(total_cpu), 3),
        "cpu_by_part": by_part,
        "memory_mib": run["memory_mib"],
    }


MEASURES = {"wall_s": "wall seconds", "cpu_s": "CPU seconds", "memory_mib": "peak memory"}


def judged(name: str, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The exponents of growth between neighbours, and a sentence for each that is too high."""
    growth, flagged = [], []
    for before, after in pairwise(points):
        inputs = after["step"] / before["step"]
        exponents = {}
        for key, title in MEASURES.items():
            costs = max(after[key], 0.001) / max(before[key], 0.001)
            exponents[key] = round(math.log(costs) / math.log(inputs), 2) + 0.0  # no -0.0
            if costs > inputs * NOISE:
                flagged.append(
                    f"{name} {before['step']:,} → {after['step']:,} ({inputs:.1f} ×): {title} of a "
                    f"batch {before[key]:,} → {after[key]:,} ({costs:.1f} ×)"
                )
        growth.append({"from": before["step"], "to": after["step"], "exponents": exponents})
    return {"growth": growth, "flagged": flagged}


def steps_of(text: str) -> tuple[str, tuple[int, ...]]:
    """`tables=1,10,100`."""
    name, _, steps = text.partition("=")
    if name not in DIMENSIONS:
        raise argparse.ArgumentTypeError(f"no dimension {name}; expected {', '.join(DIMENSIONS)}")
    numbers = tuple(sorted(int(step) for step in steps.split(",")))
    if name == "columns" and any(number % COLUMNS for number in numbers):
        raise argparse.ArgumentTypeError(f"expected multiples of {COLUMNS} columns, found {steps}")
    if name == "bytes" and numbers[0] < len(HEAD) + GROUP + 5:
        raise argparse.ArgumentTypeError(f"a record has at least {len(HEAD) + GROUP + 5} bytes")
    return name, numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dimensions", nargs="+", choices=DIMENSIONS, default=list(DIMENSIONS))
    parser.add_argument(
        "--steps", nargs="+", type=steps_of, default=[], metavar="DIMENSION=STEP,STEP…"
    )
    parser.add_argument("--rows", type=int, default=0, help="of a batch; 0: as each dimension says")
    parser.add_argument("--batches", type=int, default=5, help="that are measured at each point")
    parser.add_argument("--warm", type=int, default=2, help="batches before those")
    parser.add_argument("--judge", action="store_true", help="exit code 1 where a cost is flagged")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md, for table and plot")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        answer(json.loads(given.side))
        sys.exit()
    given.steps = dict(given.steps)
    if given.write:
        report.around(given.write, "growth")
    measured = measure(given)
    say(report.growth_table(measured))
    if given.write:
        report.write_growth(given.write, measured)
    if measured["flagged"]:
        say(f"cost grows faster than its input in {len(measured['flagged'])} places, see above")
    print(json.dumps(measured))
    sys.exit(1 if given.judge and measured["flagged"] else 0)
