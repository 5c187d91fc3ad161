"""The audit at scale: a billion rows in 100,000 batches over 100 partitions, from metadata alone.

The metadata is what a sink leaves behind, made without a stream: each batch is staged by hand, and
what stands in the table's snapshots and in the index comes out of Frazil's own code: `entry_of` of
the committer, `rows` of the index, the writer's data files. Then it lies on disk as any Iceberg
table: a metadata file with every snapshot, manifests of 1,000 files each, a compacted index.

    batches   each batch touches every partition, so the index has batches × partitions rows
    rows      the same batches with ten times the rows: the audit must not notice
    files     of the table: one per batch, with all partitions in it (`batch`), or as many that hold
              one partition each, as a compaction by partition leaves them (`partition`)

Measured in fresh processes, the median of some runs: the index alone (do its rows join, and add
up?), the ledger alone, the manifests alone, all three as `frazil audit` compares them, and the
command itself as a person runs it. The cost of imports is shown separately.

    make bench-audit                                     # 1,000, 10,000 and 100,000 batches
    make bench-audit ARGS='--batches 10000 --runs 1'     # smaller
    make bench-audit ARGS='--keep /tmp/lake'             # the metadata stays, for the next time
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

SINK, TABLE, INDEX, TOPIC = "orders", "lake.orders", "lake.frazil_index", "orders"
#: Batches that one process makes at once.
CHUNK = 500
#: Files in a manifest, as `rewrite_manifests` leaves them.
LISTED = 1000
#: Snapshots that the sink leaves of the index.
LEFT = 1000
FIRST_MS = 1_700_000_000_000
LAYOUTS = ("batch", "partition")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Scale:
    """So many batches of a sink, each with so many rows, spread over so many partitions."""

    batches: int
    partitions: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.batches}x{self.partitions}x{self.rows}"


# ── what is measured ────────────────────────────────────────────────────────────────────────────


def catalog(folder: Path) -> dict[str, str]:
    return {"type": "hadoop", "warehouse": str(folder)}


def hear_index(folder: Path) -> tuple[float, Callable[[], Any]]:
    began = time.perf_counter()
    import frazil.auditing.ranges  # noqa: F401 (for `joined`)
    from frazil.iceberg.static_table import find
    from frazil.ledger import index_rows

    imported = time.perf_counter() - began

    def run() -> Any:
        index = find(catalog(folder), INDEX)
        assert index is not None
        where = {"sink": [SINK], "table_name": [TABLE]}
        files = index.map_files(index_rows.of_file, index.having(index_rows.COLUMNS), where)
        return joined(index_rows.by_table(files)[TABLE].spans)

    return imported, run


def joined(spans: Any) -> dict[str, int]:
    from frazil.auditing.ranges import joints
    from frazil.ledger.range_columns import by_partition

    parts = by_partition(spans)
    assert all(joints(part) == ([], []) for part in parts.values())
    return {"ranges": len(spans), "rows": int(spans.written.sum()), "partitions": len(parts)}


def hear_ledger(folder: Path) -> tuple[float, Callable[[], Any]]:
    began = time.perf_counter()
    import frazil.auditing.ranges  # noqa: F401 (for `joined`)
    from frazil.iceberg.static_table import find
    from frazil.ledger.range_columns import of_entries

    imported = time.perf_counter() - began

    def run() -> Any:
        table = find(catalog(folder), TABLE)
        assert table is not None
        summaries = [snapshot.summary for snapshot in table.history("main")][::-1]
        return joined(of_entries([summary for summary in summaries if "frazil.sink" in summary]))

    return imported, run


def hear_manifests(folder: Path) -> tuple[float, Callable[[], Any]]:
    began = time.perf_counter()
    from frazil.iceberg.static_table import find

    imported = time.perf_counter() - began

    def run() -> Any:
        table = find(catalog(folder), TABLE)
        assert table is not None
        files, deletes = table.files("main")
        return {"files": len(files), "deletes": deletes, "rows": sum(file.rows for file in files)}

    return imported, run


def hear_all(folder: Path) -> tuple[float, Callable[[], Any]]:
    """All that `frazil audit` does, but for starting Python and printing."""
    gc.disable()  # as the command does
    began = time.perf_counter()
    from frazil.auditing import evidence
    from frazil.iceberg.static_table import find

    imported = time.perf_counter() - began

    def run() -> Any:
        result = evidence.of_table(lambda name: find(catalog(folder), name), TABLE, "main")
        report = result.reports[0]
        return {
            "verdict": result.verdict,
            "examined": list(report.examined),
            "commits": report.commits,
            "rows": report.written,
            "partitions": len(report.partitions),
            "findings": [str(finding) for finding in report.findings][:4],
        }

    return imported, run


MEASURES = {
    "index": hear_index,
    "ledger": hear_ledger,
    "manifests": hear_manifests,
    "all": hear_all,
}


def measure(part: str, folder: Path) -> None:
    """In a process of its own."""
    imported, run = MEASURES[part](folder)
    began, cpu = time.perf_counter(), time.process_time()
    answer = run()
    seconds = time.perf_counter() - began
    # (What getrusage calls the most is inherited from whoever started the process.)
    most = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(
        json.dumps(
            {
                "import_seconds": imported,
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu,
                "memory_gib": int(most[1]) / 1024**2 if most else 0.0,
                "found": answer,
            }
        )
    )


def measured(part: str, folder: Path, runs: int) -> dict[str, Any]:
    """The run in the middle."""
    command = [sys.executable, __file__, "--measure", part, "--folder", str(folder)]
    answers = []
    for _ in range(runs):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    middle = sorted(answers, key=lambda answer: float(answer["seconds"]))[len(answers) // 2]
    return {key: round(v, 3) if isinstance(v, float) else v for key, v in middle.items()}


def commanded(folder: Path, runs: int) -> dict[str, Any]:
    """`frazil audit`, from the prompt to its last line."""
    options = [f"--catalog={key}={value}" for key, value in catalog(folder).items()]
    command = [sys.executable, "-m", "frazil.cli.commands", "audit", TABLE, *options, "--json"]
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        took.append(time.perf_counter() - began)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {done.stderr}{done.stdout[:2000]}")
    report = json.loads(done.stdout.splitlines()[-1])[0]
    return {
        "seconds": round(statistics.median(took), 3),
        "verdict": report["verdict"],
        "rows": report["written"],
        "commits": report["commits"],
    }


# ── what is audited ─────────────────────────────────────────────────────────────────────────────


class Batches:
    """All batches of a history: which range each took of which partition, and what became of it."""

    def __init__(self, scale: Scale) -> None:
        import numpy as np

        self.scale = scale
        chance = np.random.default_rng(scale.batches * 31 + scale.rows)
        size = (scale.batches, scale.partitions)
        mean = scale.rows // scale.partitions
        lengths = chance.integers(mean * 4 // 5, mean * 6 // 5 + 1, size)
        self.end = chance.integers(0, 10**6, scale.partitions) + np.cumsum(lengths, axis=0)
        self.start = self.end - lengths
        # A marker of a transaction now and then, a record that cannot be decoded less often; and
        # in every tenth batch there is one of them in every partition.
        often = np.where(np.arange(scale.batches) % 10 == 9, 0.9, 0.02)[:, None]
        self.invisible = (chance.random(size) < often).astype(np.int64)
        self.rejected = (chance.random(size) < 0.005).astype(np.int64)
        self.written = lengths - self.invisible - self.rejected
        self.snapshots = chance.integers(1, 2**62, scale.batches).tolist()

    def staged(self, number: int, uuid_: str) -> Any:
        from frazil.accounting import RangeCounts
        from frazil.ledger.staged_batch import StagedBatch, StagedTable
        from frazil.offsets import Cut, Range

        begin, end, tallies = {}, {}, []
        columns = (self.start, self.end, self.written, self.rejected, self.invisible)
        at = self.time(number)
        for i, (low, high, written, rejected, invisible) in enumerate(
            zip(*(column[number].tolist() for column in columns), strict=True)
        ):
            where = partition(i)
            begin[where], end[where] = low, high
            tallies.append(
                RangeCounts(
                    Range(where, low, high),
                    written,
                    rejected,
                    0,
                    invisible,
                    0,
                    (low, high - 1),
                    (at * 1000 + i, at * 1000 + 5_000_000 - i),
                )
            )
        made = uuid.UUID(int=random.Random(number).getrandbits(128), version=4)
        table = StagedTable(TABLE, uuid_, 0, (), (), 1, 0, tuple(tallies))
        return StagedBatch(
            sink=SINK,
            epoch=1,
            number=number,
            commit_id=str(made),
            begin=Cut(begin),
            end=Cut(end),
            topics={TOPIC: "SGVsbG8gZnJhemlsIQo"},
            cluster="c2ltcGxlIGNsdXN0ZXI",
            staged_at_ms=at,
            window_start_ms=0,
            tables=(table,),
        )

    @staticmethod
    def time(number: int) -> int:
        return FIRST_MS + 5000 * number


@lru_cache(maxsize=4096)
def partition(number: int) -> Any:
    from frazil.offsets import Partition

    return Partition(TOPIC, number)


_made: Batches | None = None


def some(task: tuple[int, int, str]) -> tuple[bytes, bytes, bytes]:
    """Of batches that follow each other: their ledger entries, those of the index, and its rows."""
    import pyarrow as pa

    from frazil.commit import batch_chain
    from frazil.commit.commit_queue import INDEX as OF_INDEX
    from frazil.iceberg.table import Snapshot
    from frazil.ledger import index
    from frazil.ledger.entry import split

    first, last, table_uuid = task
    batches = _made
    assert batches is not None
    entries, heads, rows = [], [], []
    kept: dict[str, str] = {}
    for number in range(first, last):
        batch = batches.staged(number, table_uuid)
        entry = batch_chain.entry_of([batch], TABLE, 1)
        entries.append(replace(entry, index=INDEX, kept=kept).summary())
        kept = split(entries[-1])[1]
        if number >= batches.scale.batches - LEFT:
            entry = replace(batch_chain.entry_of([batch], OF_INDEX, 1), tables={TABLE: table_uuid})
            heads.append(entry.summary())
        snapshot = Snapshot(batches.snapshots[number], None, 0, 0, "append", {})
        rows.append((batch, {TABLE: snapshot}))
    made = index.rows(rows)
    for i, field in enumerate(made.schema):
        if pa.types.is_large_string(field.type):  # ten million of them fit into memory so
            made = made.set_column(i, field.name, made[i].dictionary_encode())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, made.schema) as stream:
        stream.write_table(made)
    return json.dumps(entries).encode(), json.dumps(heads).encode(), sink.getvalue().to_pybytes()


def make(scale: Scale, folder: Path) -> None:
    """Both layouts of one history, below `folder`; the index is the same."""
    global _made
    import pyarrow as pa

    began = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    _made = batches = Batches(scale)
    tables = {layout: data_table(folder / layout, scale) for layout in LAYOUTS}
    table_uuid = tables["batch"].uuid
    tasks = [
        (at, min(at + CHUNK, scale.batches), table_uuid) for at in range(0, scale.batches, CHUNK)
    ]
    entries: list[dict[str, str]] = []
    heads: list[dict[str, str]] = []
    rows = []
    with multiprocessing.get_context("fork").Pool(min(len(tasks), os.cpu_count() or 1)) as pool:
        for i, (summaries, index_summaries, stream) in enumerate(pool.imap(some, tasks)):
            entries += json.loads(summaries)
            heads += json.loads(index_summaries)
            rows.append(pa.ipc.open_stream(stream).read_all())
            if i % 20 == 19:
                say(
                    f"  {len(entries):,} of {scale.batches:,} batches, "
                    f"{time.perf_counter() - began:.0f} s"
                )
    for layout in LAYOUTS:
        fill(tables.pop(layout), batches, entries, layout)
    del entries
    index_rows = pa.concat_tables(rows).unify_dictionaries()
    rows.clear()
    files = fill_index(folder / "batch", scale, heads, index_rows)
    say(
        f"  {scale.name}: the index has {len(index_rows):,} rows in {files} files; "
        f"{time.perf_counter() - began:.0f} s"
    )
    for layout in LAYOUTS[1:]:
        index_folder = folder / "batch" / INDEX.replace(".", "/")
        (folder / layout / INDEX.replace(".", "/")).symlink_to(index_folder.resolve())
    (folder / "ready").touch()


def data_table(warehouse: Path, scale: Scale) -> Any:
    from frazil.pipeline.projection import MetadataColumns as Names
    from lake import Table

    folder = warehouse.resolve() / TABLE.replace(".", "/")
    names = Names("_topic", "_topic_partition", "_offset", "_timestamp")
    return Table(folder, TABLE, names, seed=scale.name)


class Template:
    """A data file as the writer describes one; others differ in rows and bounds only."""

    def __init__(self, table: Any) -> None:
        self.table = table
        table.real = True
        (self.file,) = table.write([(TOPIC, 0, offset) for offset in range(100)], "t", whole=True)
        table.real = False

    def of(self, path: str, rows: int, numbers: tuple[int, int], offsets: tuple[int, int]) -> Any:
        """Of some partitions, from the first to the last, and of some offsets of them."""
        _, partition_id, offset_id = self.table.ids
        file = {**self.file, "file-path": path, "record-count": rows, "rows": []}
        for name, side in (("lower-bounds", 0), ("upper-bounds", 1)):
            values = list(file[name]["values"])
            keys = file[name]["keys"]
            values[keys.index(partition_id)] = struct.pack("<i", numbers[side]).hex()
            values[keys.index(offset_id)] = struct.pack("<q", offsets[side]).hex()
            file[name] = {"keys": keys, "values": values}
        file["value-counts"] = {
            "keys": file["value-counts"]["keys"],
            "values": [rows] * len(file["value-counts"]["keys"]),
        }
        return file

    def check(self) -> None:
        """That a file which the writer describes is described so here."""
        numbers, offsets = (3, 8), (70, 5_000_000_000)
        rows = [(TOPIC, numbers[0], offsets[0]), (TOPIC, 5, 99), (TOPIC, numbers[1], offsets[1])]
        self.table.real = True
        (real,) = self.table.write(rows, "t", whole=True)
        self.table.real = False
        ours = self.of(real["file-path"], 3, numbers, offsets)
        assert real.keys() == ours.keys()
        for name in ("record-count", "value-counts", "null-value-counts", "content", "partition"):
            assert real[name] == ours[name], name
        for name in ("lower-bounds", "upper-bounds"):
            maps = [dict(zip(*file[name].values(), strict=True)) for file in (real, ours)]
            assert all(maps[0][i] == maps[1][i] for i in self.table.ids), name


#: What Iceberg in Spark says of itself in each summary.
ENGINE = {
    "engine-version": "4.1.1",
    "app-id": "local-1700000000000",
    "engine-name": "spark",
    "iceberg-version": "Apache Iceberg 1.12.0 (commit 0123456789abcdef0123456789abcdef01234567)",
}


def fill(table: Any, batches: Batches, entries: list[dict[str, str]], layout: str) -> None:
    """Every snapshot, and the files that are live behind the last of them."""
    from frazil.iceberg.table import Snapshot
    from lake import Filed

    scale, template = batches.scale, Template(table)
    template.check()
    written = batches.written.sum(axis=1).tolist()
    size, total, parent = template.file["file-size-in-bytes"], 0, None
    for number, (entry, rows) in enumerate(zip(entries, written, strict=True)):
        total += rows
        summary = {
            **entry,
            "added-data-files": "1",
            "added-records": str(rows),
            "added-files-size": str(size),
            "changed-partition-count": "1",
            "manifests-created": "1",
            "manifests-kept": "0",
            "manifests-replaced": "0",
            "total-records": str(total),
            "total-files-size": str(size * (number + 1)),
            "total-data-files": str(number + 1),
            "total-delete-files": "0",
            "total-position-deletes": "0",
            "total-equality-deletes": "0",
            **ENGINE,
        }
        snapshot_id = batches.snapshots[number]
        keep(
            table,
            Snapshot(
                snapshot_id,
                parent,
                number + 1,
                batches.time(number),
                "append",
                summary,
                table.path(f"snap-{snapshot_id}-1-{uuid.UUID(int=snapshot_id)}.avro"),
            ),
        )
        parent = snapshot_id
    table.sequence = scale.batches
    table.tag(f"frazil/{SINK}", parent)
    filed = []
    for i, file in enumerate(described(template, batches, layout)):
        born = batches.snapshots[i] if layout == "batch" else parent
        filed.append(Filed(0, born, i + 1 if layout == "batch" else scale.batches + 1, file))
    replaced = str(total) if layout == "partition" else ""
    closed(
        table,
        filed,
        {"added-records": replaced, "deleted-records": replaced}
        if replaced
        else {"entries-processed": str(len(filed))},
    )
    table.save()


def keep(table: Any, snapshot: Any) -> None:
    """A snapshot as if it had just been committed to main."""
    table.snapshots[snapshot.id] = snapshot
    table.refs["main"] = snapshot.id
    table.now = snapshot.timestamp_ms
    table._schema_ids[snapshot.id] = 0
    table._log.append((snapshot.timestamp_ms, snapshot.id))


def closed(table: Any, filed: list[Any], summary: dict[str, str]) -> None:
    """The last commit, not the sink's: it leaves the live files in manifests of equal size."""
    from lake import Manifest

    made = table.snapshot(summary, operation="replace")
    table.snapshots[made.id] = replace(made, summary={**made.summary, **summary})
    table.lists[made.id] = tuple(
        Manifest(
            table.path(f"optimized-m-{table._id():x}.avro"),
            False,
            made.id,
            made.sequence,
            tuple(filed[at : at + LISTED]),
        )
        for at in range(0, len(filed), LISTED)
    )
    # Of the sink's last commit its tag says where it is; a list of its own is not needed here.
    table.lists[table.refs[f"frazil/{SINK}"]] = ()


def described(template: Template, batches: Batches, layout: str) -> Iterator[Any]:
    scale, folder = batches.scale, f"{template.table.location}/data"
    if layout == "batch":
        columns = (batches.written.sum(axis=1), batches.start.min(axis=1), batches.end.max(axis=1))
        for number, (rows, low, high) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            name = uuid.UUID(int=random.Random(f"f{number}").getrandbits(128), version=4)
            path = f"{folder}/frazil-{SINK}-1-{number}-{name}.parquet"
            yield template.of(path, rows, (0, scale.partitions - 1), (low, high - 1))
        return
    step = scale.partitions
    for i in range(scale.partitions):
        for at in range(0, scale.batches, step):
            rows = int(batches.written[at : at + step, i].sum())
            last = min(at + step, scale.batches) - 1
            name = uuid.UUID(int=random.Random(f"c{i}.{at}").getrandbits(128), version=4)
            path = f"{folder}/{i:05d}-{at}-{name}.parquet"
            offsets = int(batches.start[at, i]), int(batches.end[last, i]) - 1
            yield template.of(path, rows, (i, i), offsets)


def compacted(scale: Scale) -> list[int]:
    """The rows of each file that is left when the sink has compacted its index after each batch, as
    it does; oldest batches first."""
    from frazil.iceberg.table import LiveFile
    from frazil.ledger import index

    files: list[LiveFile] = []
    for number in range(scale.batches):
        files.append(LiveFile("index.parquet", scale.partitions, sequence=number))
        while some := index.due(files):
            first = files.index(some[0])
            assert some == files[first : first + len(some)]
            merged = replace(some[0], rows=sum(file.rows for file in some))
            files[first : first + len(some)] = [merged]
    return [file.rows for file in files]


def fill_index(warehouse: Path, scale: Scale, heads: list[dict[str, str]], rows: Any) -> int:
    """The index, in files as the sink leaves them; `rows` are batch by batch."""
    from frazil.files.writer import TableWriter, WriterSpec
    from frazil.iceberg.table import Snapshot
    from frazil.ledger import index
    from lake import Filed, Metadata, _index_schema

    folder = warehouse.resolve() / INDEX.replace(".", "/")
    table = Metadata(folder, INDEX, _index_schema(), seed=scale.name)
    shape = WriterSpec(
        INDEX, str(folder), table.schema, 0, table.spec_text, index.PROPERTIES, 1 << 29, "zstd", {}
    )
    files = []
    start = 0
    for count in compacted(scale):
        writer = TableWriter(shape, f"frazil-{SINK}-1-index")
        writer.write(index.ordered(rows.slice(start, count).cast(shape.arrow)))
        start += count
        files += [json.loads(file.descriptor) for file in writer.close()]
    parent = None
    for i, summary in enumerate(heads):
        number = scale.batches - len(heads) + i
        snapshot_id = random.Random(f"i{number}").getrandbits(62)
        keep(
            table,
            Snapshot(
                snapshot_id,
                parent or (1 if number else None),
                number + 1,
                Batches.time(number),
                "append",
                summary,
                table.path(f"snap-{snapshot_id}.avro"),
            ),
        )
        parent = snapshot_id
    table.sequence = scale.batches
    table.tag(f"frazil/{SINK}", parent)
    closed(
        table,
        [Filed(1, 0, 0, file) for file in files],
        {"added-records": str(len(rows)), "deleted-records": str(len(rows))},
    )
    table.save()
    return len(files)


# ── the curve ───────────────────────────────────────────────────────────────────────────────────


def point(scale: Scale, folder: Path, runs: int) -> dict[str, Any]:
    """All measures of one history, on both layouts where they differ."""
    figures: dict[str, Any] = {
        "batches": scale.batches,
        "partitions": scale.partitions,
        "ranges": scale.batches * scale.partitions,
    }
    for part in MEASURES:
        for layout in LAYOUTS if part in ("manifests", "all") else LAYOUTS[:1]:
            name = part if layout == "batch" else f"{part}_{layout}"
            answer = measured(part, folder / layout, runs)
            figures[f"{name}_seconds"] = answer["seconds"]
            figures[f"{name}_gib"] = answer["memory_gib"]
            figures["rows"] = answer["found"]["rows"]
            if part == "all":
                figures["import_seconds"] = answer["import_seconds"]
                figures[f"{name}_verdict"] = answer["found"]["verdict"]
                if answer["found"]["verdict"] != "proven":
                    say(f"  {answer['found']}")
            say(f"  {scale.name} {name}: {answer}")
    answer = commanded(folder / "partition", runs)
    figures["command_seconds"] = answer["seconds"]
    say(f"  {scale.name} frazil audit: {answer}")
    return figures


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--batches", type=int, default=100_000, help="of the largest history")
    options.add_argument("--partitions", type=int, default=100)
    options.add_argument("--rows", type=int, default=10_000, help="of a batch")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--keep", type=Path, help="folder in which the metadata stays")
    options.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        measure(given.measure, given.folder)
        return
    sizes = [given.batches // 100, given.batches // 10, given.batches]
    scales = [Scale(size, given.partitions, given.rows) for size in sizes]
    more = replace(scales[1], rows=given.rows * 10)
    with tempfile.TemporaryDirectory() as temporary:
        root = given.keep or Path(temporary)
        curve = []
        for scale in [*scales, more]:
            folder = root / scale.name
            if not (folder / "ready").exists():
                say(f"making {scale.batches:,} batches of {scale.rows:,} rows")
                make(scale, folder)
            curve.append(point(scale, folder, given.runs))
    largest = curve[len(scales) - 1]
    print(
        json.dumps(
            {
                "batches": largest["batches"],
                "partitions": largest["partitions"],
                "rows": largest["rows"],
                "index_seconds": largest["index_seconds"],
                "all_seconds": max(largest["all_seconds"], largest["all_partition_seconds"]),
                "command_seconds": largest["command_seconds"],
                "verdict": largest["all_partition_verdict"],
                "times": {
                    "batches": round(scales[-1].batches / scales[1].batches, 1),
                    "all": round(largest["all_seconds"] / curve[1]["all_seconds"], 1),
                    "rows": round(curve[-1]["rows"] / curve[1]["rows"], 1),
                    "all_by_rows": round(curve[-1]["all_seconds"] / curve[1]["all_seconds"], 1),
                },
                "curve": curve,
            }
        )
    )


if __name__ == "__main__":
    main()
