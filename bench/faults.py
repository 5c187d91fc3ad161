"""Faults between a committer and a real REST catalog: what is in the table afterwards?

Iceberg's reference server, a proxy before it (`proxy.py`), and for every cell of the matrix a table
of its own: a fault before or after the catalog has applied the commit, into an append table, an
upsert table or a branch, with no, one or two other writers who commit in that very moment. Each
cell is a run of the sink: the second of its three batches meets the fault; claim, staging, commit,
index, tag are the real ones, only the records come from a script. Then DuckDB reads the table:
every record must be there once (of upserts, the last of each key), and every other writer's row.

Two smaller matrices beside it: *places*, where the fault meets the claim of a run, a tag, the
commit of the index; there the audit must prove the table as well. And *streams*: Kafka, Spark's
query and the whole sink.

Then, over the append cells and on the same proxy:

    spark     Iceberg's own streaming sink of Spark (`writeStream.toTable`)
    fenced    a commit with `validateWith` alone, as Kafka Connect and Flink's dynamic sink make it:
              whatever failed is looked up in the table and tried again
    naive     looks whether the batch is there, commits, and deletes its files where that fails

Who stops with an error is started again, as a supervisor would; it is counted.

    make faults                                 # all cells, and the peers
    make faults ARGS='--parts matrix,naive --only after'
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import pyarrow as pa
from confluent_kafka import Producer
from duckdb_extensions import import_extension
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parent))

from frazil.accounting import RangeCounts
from frazil.auditing.evidence import of_sink
from frazil.commit.table_schemas import writer_spec
from frazil.config.model import Config, from_document
from frazil.config.sections import TableConfig
from frazil.errors import Conflict, FrazilError
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg import java_table
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_errors import translated
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.table import Snapshot
from frazil.kafka.planner import TopicIdentity
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline import upsert
from frazil.pipeline.projection import MetadataColumns
from frazil.run import Run
from frazil.sink import Sink
from frazil.sources.base import (
    BatchRun,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TableWriteResult,
    WriteResult,
)
from frazil.spark.session import session
from frazil.steps import Step
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from proxy import FAULTS, Plot, Proxy, Request, claim, data, tag
from rest import RestCatalog

for _extension in ("avro", "iceberg"):
    import_extension(_extension)

WAYS = ("append", "upsert", "branch")
PARTS = ("matrix", "places", "streams", "spark", "fenced", "naive")
OTHERS = (0, 1, 2)
BATCHES = 3
#: Which of them meets the fault.
STRUCK = 1
TOPIC = "records"
PARTITIONS = (Partition(TOPIC, 0), Partition(TOPIC, 1))
#: Records of a batch in each partition.
EACH = 3
COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), ("value", pa.string())])
#: How often one that stops is started again.
LIVES = 4
#: Seconds; what a commit takes with all its retries is far below.
WITHIN = 60.0
#: Iceberg's client gives up after so long.
TIMEOUT_MS = 3000
BRANCH = "side"
DIRECT, THROUGH = "direct", "through"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Which request meets the fault."""

    match: Callable[[Request], bool] = data
    #: of the index, not of the table
    index: bool = False
    #: how many such requests come before it, in the run that meets it
    skip: int = 0
    #: which run: the first, from its beginning, or the second, which takes over
    heir: bool = False


COMMIT = "commit"
PLACES = {
    "index claim": Place(claim, index=True),
    "index tag": Place(tag, index=True),
    "first tag": Place(tag),
    "index": Place(data, index=True, skip=1),
    "claim": Place(claim, heir=True),
}


@dataclass(frozen=True, slots=True)
class Cell:
    kind: str
    after: bool
    way: str
    others: int
    place: str = COMMIT

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "_", str(self))

    @property
    def fault(self) -> str:
        return f"{self.kind} {'after' if self.after else 'before'}"

    def __str__(self) -> str:
        where = "" if self.place == COMMIT else f" at {self.place}"
        return f"{self.fault}{where}, {self.way}, {self.others} others"


def cells(ways: Sequence[str] = WAYS) -> list[Cell]:
    return [
        Cell(kind, after, way, others)
        for way in ways
        for kind in FAULTS
        for after in (False, True)
        for others in OTHERS
    ]


def cells_of_places() -> list[Cell]:
    return [
        Cell(kind, after, "append", 0, place)
        for place in PLACES
        for kind in FAULTS
        for after in (False, True)
    ]


def cells_of_streams() -> list[Cell]:
    worst = [
        ("503 later", True, 1),
        ("timeout", False, 1),
        ("dropped", True, 2),
        ("409", False, 1),
        ("duplicated", False, 2),
    ]
    return [Cell(kind, after, way, others) for way in WAYS for kind, after, others in worst]


@dataclass(slots=True)
class Outcome:
    cell: Cell
    #: what is in the table: exact; doubled, lost, foreign (another writer's commit is gone),
    #: unreadable
    verdict: str = ""
    fired: bool = False
    #: what the audit says, where it was asked
    proof: str = "proven"
    #: the errors with which it stopped
    trouble: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def stop(self, error: FrazilError) -> None:
        self.trouble.append(f"{type(error).__name__}: {error.message}")

    @property
    def well(self) -> bool:
        return self.verdict == "exact" and self.proof == "proven" and self.fired


# ── the world ───────────────────────────────────────────────────────────────────────────────────


def through(server: RestCatalog, proxy: Proxy) -> dict[str, str]:
    """A catalog's properties, by way of the proxy."""
    return {**server.properties(proxy.uri), "rest.client.socket-timeout-ms": str(TIMEOUT_MS)}


def settings(server: RestCatalog, proxy: Proxy) -> dict[str, str]:
    """Of a session: two catalogs that are one."""
    conf = {}
    for name, properties in ((DIRECT, server.properties()), (THROUGH, through(server, proxy))):
        conf[f"spark.sql.catalog.{name}"] = "org.apache.iceberg.spark.SparkCatalog"
        conf[f"spark.sql.catalog.{name}.cache-enabled"] = "false"
        conf |= {f"spark.sql.catalog.{name}.{key}": value for key, value in properties.items()}
    return conf


class World:
    """A session with two catalogs that are one: the server itself, and by way of the proxy."""

    def __init__(
        self, spark: SparkSession, server: RestCatalog, proxy: Proxy, bootstrap: str = ""
    ) -> None:
        self.bootstrap = bootstrap
        self.spark, self.server, self.proxy = spark, server, proxy
        for key, value in settings(server, proxy).items():
            spark.conf.set(key, value)
        self.catalog = JavaCatalog(spark, DIRECT)
        JavaCatalog(spark, THROUGH)  # Spark finds a catalog's settings in its own thread only
        self.catalog._create_namespace(["db"])

    def foreign(self, table: str, number: int, branch: str = "main") -> Callable[[], None]:
        """Another writer's commit of one row; the file is there already."""
        handle = self.catalog.load(table)
        assert handle is not None
        rows = {"id": [-number], "value": [f"foreign-{number}"]}
        shape = shape_of(handle)
        for column in shape.arrow:
            if column.name not in rows:
                rows[column.name] = [{"_topic": "foreign", "_timestamp": None}.get(column.name, 0)]
        descriptors = written(shape, rows)

        def commit() -> None:
            handle.refresh()
            handle.append(descriptors, {}, branch=branch, check=lambda _: None, leftovers=[])

        return commit

    def judge(self, table: str, expected: dict[str, list[tuple[int, str]]]) -> str:
        """Branch → the rows that must be there."""
        path, metadata = self.server.table(table)
        if not all(map(readable, metadata["snapshots"])):
            return "unreadable"
        engine = duckdb.connect()
        engine.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'")
        worst = "exact"
        for branch, wanted in expected.items():
            at = metadata["refs"].get(branch, {}).get("snapshot-id")
            scan = f"iceberg_scan('{path}', snapshot_from_id => {at})"
            query = f"SELECT id, value FROM {scan}"
            rows = [] if at is None else engine.execute(query).fetchall()
            worst = max(worst, compared(Counter(rows), Counter(wanted)), key=SEVERITY.index)
        return worst


def readable(snapshot: dict[str, Any]) -> bool:
    """Is everything there that it refers to? (DuckDB takes the process with it where it is not.)"""

    def entries(path: str) -> list[dict[str, Any]]:
        with open(path.removeprefix("file:"), "rb") as stream:
            return list(fastavro.reader(stream))  # type: ignore[arg-type]

    try:
        for manifest in entries(snapshot["manifest-list"]):
            for entry in entries(manifest["manifest_path"]):
                path = entry["data_file"]["file_path"].removeprefix("file:")
                if entry["status"] != 2 and not Path(path).exists():
                    return False
    except FileNotFoundError:
        return False
    return True


SEVERITY = ("exact", "doubled", "lost", "foreign", "unreadable")


def compared(actual: Counter[tuple[int, str]], wanted: Counter[tuple[int, str]]) -> str:
    if any(row[0] < 0 for row in wanted - actual):
        return "foreign"
    if wanted - actual:
        return "lost"
    return "doubled" if actual - wanted else "exact"


def shape_of(table: JavaTable) -> WriterSpec:
    return writer_spec(table, TableConfig(table.name, target_file_size="1MiB"))


def written(shape: WriterSpec, rows: dict[str, list[Any]]) -> list[str]:
    writer = TableWriter(shape, f"other-{uuid.uuid4().hex[:8]}")
    writer.write(pa.Table.from_pydict(rows, schema=shape.arrow))
    return [file.descriptor for file in writer.close()]


# ── records ─────────────────────────────────────────────────────────────────────────────────────

#: partition, offset, id, value; without a value: a delete
Record = tuple[int, int, int, str | None]


def records(way: str, batch: int) -> list[Record]:
    produced: list[Record] = []
    for place in range(EACH * len(PARTITIONS)):
        partition, offset = place % len(PARTITIONS), batch * EACH + place // len(PARTITIONS)
        number, value = batch * EACH * len(PARTITIONS) + place, f"{batch}-{place}"
        if way == "upsert":  # half of the keys come again with the next batch, and one goes
            number = batch * EACH + place
            produced.append((partition, offset, number, None if place == 2 else value))
        else:
            produced.append((partition, offset, number, value))
    return produced


def rows_of(way: str, batches: int = BATCHES) -> list[tuple[int, str]]:
    """What a plain dictionary holds, or a list."""
    every = [record for batch in range(batches) for record in records(way, batch)]
    if way != "upsert":
        return [(number, str(value)) for _, _, number, value in every]
    last = {number: value for _, _, number, value in every}
    return [(number, value) for number, value in last.items() if value is not None]


def expected(cell: Cell) -> dict[str, list[tuple[int, str]]]:
    rows = rows_of(cell.way)
    others = [(-n, f"foreign-{n}") for n in range(1, cell.others + 1)]
    if cell.way != "branch":
        return {"main": rows + others}
    return {BRANCH: rows + others[:1], "main": others[1:]}


# ── ours ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ScriptRun(BatchRun):
    result: WriteResult | None = None


class Script:
    """A source of records that are known beforehand."""

    paced = stateful = False
    changes, output_mode = "records", "append"
    checkpoint = ""
    columns: Mapping[str, pa.Schema] = {}
    fixed_columns: Mapping[str, pa.Schema] = {}
    metadata: MetadataColumns | None = None

    def __init__(self, config: Config, *_: Any, way: str) -> None:
        self._way = way
        self._table = config.tables[0].name
        self.required = {self._table: COLUMNS}
        self._origin = TopicIdentity("cluster", {TOPIC: "topic-id"})

    def template(self, table: str) -> str:
        return table

    def identify(self, *_: Any) -> TopicIdentity:
        return self._origin

    def start(self, position: Cut) -> Cut:
        return Cut({**dict.fromkeys(PARTITIONS, 0), **position})

    def check_resumable(self, _: Any) -> None: ...
    def resume(self, *_: Any) -> None: ...

    def sample(self, _: BatchTables) -> dict[str, pa.Schema]:
        return {}

    def stream(self, *_: Any) -> Any:
        raise AssertionError("batches are asked for one by one")

    def opening(self, *_: Any) -> None: ...

    def ends(self) -> Cut:
        return Cut(dict.fromkeys(PARTITIONS, BATCHES * EACH))

    def carried(self) -> list[Range]:
        return []

    def close(self) -> None: ...

    def plan(self, frame: Any, batch: int, reached: StreamPosition) -> PlannedBatch:
        return PlannedBatch(frame, reached)

    def check(self, plan: PlannedBatch, tables: BatchTables, run: ScriptRun) -> WriteResult | None:
        return run.result

    def records(self, *_: Any) -> dict[Partition, int]:
        return dict.fromkeys(PARTITIONS, EACH)

    def run(self, planned: PlannedBatch, tables: BatchTables) -> ScriptRun:
        begin = planned.position.cut
        number = begin[PARTITIONS[0]] // EACH
        end = Cut(dict.fromkeys(PARTITIONS, (number + 1) * EACH))
        plan = tables.plans[self._table]
        put, gone = [], []
        for partition, offset, key, value in records(self._way, number):
            row = {
                "id": key,
                "value": value,
                "_topic": TOPIC,
                "_topic_partition": partition,
                "_offset": offset,
                "_timestamp": None,
            }
            (gone if value is None else put).append(row)
        rows = pa.Table.from_pylist(put, schema=plan.shape.arrow)
        if self._way == "upsert":
            deletes = pa.Table.from_pylist(gone, schema=plan.of_deletes)
            made = upsert.apply(plan, upsert.KeyChanges([rows], [deletes]), tables.file_prefix)
            counts = {p: made.written.get(p, 0) for p in PARTITIONS}
            files = TableWriteResult((), made.files, made.deletes, made.keys)
        else:
            writer = TableWriter(plan.shape, tables.file_prefix)
            writer.write(rows)
            counts = dict.fromkeys(PARTITIONS, EACH)
            files = TableWriteResult((), tuple(writer.close()))
        tallies = tuple(
            RangeCounts(
                Range(p, begin[p], end[p]),
                counts[p],
                merged=EACH - counts[p],
                seen=(begin[p], end[p] - 1),
            )
            for p in PARTITIONS
        )
        table = TableWriteResult(tallies, files.files, files.deletes, files.keys)
        return ScriptRun(result=WriteResult(begin, end, {self._table: table}, self._origin))


class ScriptedRun(Sink):
    """A run without a query and without Kafka: batches are asked for one by one. All else is the
    sink's own."""

    def __init__(self, config: Config, way: str, on_step: Callable[[Step], None] | None = None):
        source = partial(Script, way=way)
        super().__init__(config, source=source, on_step=on_step)

    def begin(self, spark: SparkSession) -> None:
        staged = self._begin(spark)
        self._events._kafka = {}
        self.committer.start()
        for batch in staged:
            self.committer.submit(batch, bounded=False)
        self._batches.resume()

    @property
    def staged(self) -> int:
        """Batches that are staged, by this run or before it."""
        return self._stream.position.cut.get(PARTITIONS[0], 0) // EACH

    def batch(self) -> None:
        self._batches.run(None, 0)  # type: ignore[arg-type]

    def commit(self, within: float = WITHIN) -> None:
        if not self.committer.flush(within):
            raise Conflict(f"cannot commit: {self.committer.progress.trouble}")

    def end(self) -> None:
        if hasattr(self, "committer"):
            self.committer.close()


def config_of(
    world: World, name: str, way: str, *, topic: str = TOPIC, bootstrap: str = "none:1", **sink: Any
) -> Config:
    table: dict[str, Any] = {"name": f"db.{name}"}
    if way == "upsert":
        table |= {"mode": "upsert", "key": ["id"]}
    if way == "branch":
        table |= {"branch": BRANCH}
    return from_document(
        {
            "sink": {
                "id": name,
                "topics": [topic],
                "index_table": f"db.{name}_index",
                "unavailable_timeout": "30s",
                "commit_interval": "0s",
                **sink,
            },
            "kafka": {"bootstrap.servers": bootstrap},
            "decode": {"format": "json"},
            "catalog": {"name": THROUGH, **through(world.server, world.proxy)},
            "table": [table],
        }
    )


def meanwhile(world: World, cell: Cell, table: str) -> list[Callable[[], None]]:
    """The other writers. Of a branch, the second writes to main."""
    side = BRANCH if cell.way == "branch" else "main"
    return [world.foreign(table, n, side if n == 1 else "main") for n in range(1, cell.others + 1)]


def ours(world: World, cell: Cell, name: str, outcome: Outcome) -> Plot | None:
    config = config_of(world, name, cell.way)
    place = PLACES.get(cell.place)
    plot: Plot | None = None

    def arm() -> Plot:
        if place is None:
            others = meanwhile(world, cell, f"db.{name}")
            return world.proxy.plot(name, cell.kind, after=cell.after, meanwhile=others)
        table = f"{name}_index" if place.index else name
        return world.proxy.plot(
            table, cell.kind, after=cell.after, match=place.match, skip=place.skip
        )

    if place is not None and not place.heir:
        plot = arm()
    for _ in range(LIVES):
        run = ScriptedRun(config, cell.way)
        try:
            run.begin(world.spark)
            while run.staged < BATCHES:
                if run.staged == STRUCK and plot is None:
                    run.commit()
                    plot = arm()
                    if place is not None:
                        break  # for the next run
                run.batch()
                run.commit()
            else:
                break
        except FrazilError as error:
            outcome.stop(error)
        finally:
            run.end()
    if not cell.others:
        outcome.proof = verdict(world, config)
    return plot


def verdict(world: World, config: Config) -> str:
    """The audit's, of the table and the index. (It counts other writers' rows as unaccounted.)"""
    reports = of_sink(config, world.catalog.open_readonly).reports
    return next((report.verdict for report in reports if report.verdict != "proven"), "proven")


def stream(world: World, cell: Cell, name: str, outcome: Outcome) -> Plot | None:
    """Kafka, Spark's query and the whole sink."""
    assert world.bootstrap
    create_topic(world.bootstrap, name, len(PARTITIONS))
    config = config_of(
        world,
        name,
        cell.way,
        topic=name,
        bootstrap=world.bootstrap,
        trigger="50ms",
        commit_interval="0s",
    )
    plot: Plot | None = None
    produced = 0
    for _ in range(LIVES):
        sink: Run | None = None
        try:
            sink = Sink(config).start(world.spark)
            while True:
                if not sink.wait_until(sink.ends(), WITHIN):
                    raise Conflict(f"cannot commit: {sink.committer.progress.trouble}")
                if produced == BATCHES:
                    break
                if produced == STRUCK:
                    others = meanwhile(world, cell, f"db.{name}")
                    plot = world.proxy.plot(name, cell.kind, after=cell.after, meanwhile=others)
                produce(world.bootstrap, name, cell.way, produced)
                produced += 1
            break
        except FrazilError as error:
            outcome.stop(error)
        finally:
            if sink is not None:
                sink.stop(5)
    if not cell.others:
        outcome.proof = verdict(world, config)
    return plot


def produce(bootstrap: str, topic: str, way: str, batch: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": "true"})
    for partition, _, number, value in records(way, batch):
        body = None if value is None else json.dumps({"id": number, "value": value})
        producer.produce(topic, body, json.dumps({"id": number}), partition=partition)
    assert producer.flush(30) == 0


# ── peers ───────────────────────────────────────────────────────────────────────────────────────

MARK = "peer.batch"


def made(world: World, name: str) -> JavaTable:
    schema = {
        "type": "struct",
        "schema-id": 0,
        "fields": [
            {"id": 1, "name": "id", "required": False, "type": "long"},
            {"id": 2, "name": "value", "required": False, "type": "string"},
        ],
    }
    spec = '{"spec-id": 0, "fields": []}'
    return world.catalog.create(
        f"db.{name}", json.dumps(schema), spec, properties={"format-version": "2"}
    )


def marks(table: JavaTable) -> list[int]:
    return [int(s.summary[MARK]) for s in table.history("main") if MARK in s.summary]


def batch_of(number: int) -> dict[str, list[Any]]:
    rows = records("append", number)
    return {"id": [row[2] for row in rows], "value": [row[3] for row in rows]}


def appended(
    table: JavaTable,
    files: Sequence[str],
    number: int,
    check: Callable[[Iterator[Snapshot]], str | None] | None = None,
) -> None:
    with translated(f"commit to table {table.name}"):
        update = table._table.newAppend()
        for file in files:
            update.appendFile(table._data_file(file))
        update.set(MARK, str(number))
        if check is not None:
            update.validateWith(java_table._Validator(check, table._catalog.to_snapshot))
        update.commit()


def struck(world: World, cell: Cell, name: str) -> Plot:
    """The fault of a cell, armed for the first commit after `STRUCK`."""
    others = meanwhile(world, cell, f"db.{name}")
    return world.proxy.plot(name, cell.kind, after=cell.after, skip=STRUCK, meanwhile=others)


def fenced(world: World, cell: Cell, name: str, outcome: Outcome) -> Plot:
    """`validateWith` and no `deleteWith`; and else as careful as one can be: the files are kept,
    and the table is asked before each try."""
    made(world, name)
    catalog = JavaCatalog(world.spark, THROUGH)
    plot = struck(world, cell, name)
    for number in range(BATCHES):
        files: list[str] = []
        for _ in range(LIVES):
            try:
                table = catalog.load(f"db.{name}")
                assert table is not None
                before = max(marks(table), default=-1)
                if before >= number:
                    break
                files = files or written(shape_of(table), batch_of(number))

                def check(history: Iterator[Snapshot], before: int = before) -> str | None:
                    now = next((int(s.summary[MARK]) for s in history if MARK in s.summary), -1)
                    return None if now == before else f"stale: expected {before}, found {now}"

                appended(table, files, number, check)
            except FrazilError as error:
                outcome.stop(error)
    return plot


def naive(world: World, cell: Cell, name: str, outcome: Outcome) -> Plot:
    """Is it there? If not: write, commit; and if that fails, delete and begin again."""
    made(world, name)
    catalog = JavaCatalog(world.spark, THROUGH)
    plot = struck(world, cell, name)
    for number in range(BATCHES):
        for _ in range(LIVES):
            try:
                table = catalog.load(f"db.{name}")
                assert table is not None
                if number in marks(table):
                    break
                files = written(shape_of(table), batch_of(number))
                try:
                    appended(table, files, number)
                except FrazilError:
                    table.remove([json.loads(file)["file-path"] for file in files])
                    raise
            except FrazilError as error:
                outcome.stop(error)
    return plot


def spark_sink(world: World, cell: Cell, name: str, outcome: Outcome) -> Plot:
    """Iceberg's own, fed by files: one for each batch."""
    made(world, name)
    with tempfile.TemporaryDirectory(prefix="frazil-faults-") as folder:
        source = Path(folder, "source")
        source.mkdir()
        for number in range(BATCHES):
            rows = batch_of(number)
            lines = [json.dumps({"id": i, "value": v}) for i, v in zip(*rows.values(), strict=True)]
            (source / f"{number}.json").write_text("\n".join(lines))
            stamp = time.time() - 100 + number
            os.utime(source / f"{number}.json", (stamp, stamp))
        plot = struck(world, cell, name)
        for _ in range(LIVES):
            stream = (
                world.spark.readStream.schema("id bigint, value string")
                .option("maxFilesPerTrigger", 1)
                .json(str(source))
            )
            try:
                query = (
                    stream.coalesce(1)
                    .writeStream.format("iceberg")
                    .outputMode("append")
                    .option("checkpointLocation", f"{folder}/checkpoint")
                    .trigger(availableNow=True)
                    .toTable(f"{THROUGH}.db.{name}")
                )
                query.awaitTermination()
                break
            except (PySparkException, Py4JJavaError) as error:
                outcome.trouble.append(str(error).strip().splitlines()[0])
    return plot


RUNS: dict[str, Callable[[World, Cell, str, Outcome], Plot | None]] = {
    "ours": ours,
    "stream": stream,
    "spark": spark_sink,
    "fenced": fenced,
    "naive": naive,
}


def run(world: World, who: str, cell: Cell) -> Outcome:
    outcome = Outcome(cell)
    name = f"{who}_{cell.name}_{uuid.uuid4().hex[:6]}"
    began = time.monotonic()
    plot = RUNS[who](world, cell, name, outcome)
    if plot is not None:
        world.proxy.settle(plot.table)
        outcome.fired = plot.fired == 1 and plot.slipped == cell.others
        outcome.seen = plot.seen
    outcome.verdict = world.judge(f"db.{name}", expected(cell))
    outcome.seconds = time.monotonic() - began
    return outcome


# ── the whole ───────────────────────────────────────────────────────────────────────────────────


def attempt(world: World, who: str, cell: Cell) -> Outcome:
    try:
        return run(world, who, cell)
    except Exception:
        say(f"{who}, {cell}:\n{traceback.format_exc()}")
        return Outcome(cell, "broken")


def measure(world: World, who: str, wanted: Sequence[Cell], threads: int) -> list[Outcome]:
    began = time.monotonic()
    outcomes = []
    with ThreadPoolExecutor(threads) as pool:
        for outcome in pool.map(lambda cell: attempt(world, who, cell), wanted):
            outcomes.append(outcome)
            if who in ("ours", "stream") and (not outcome.well or outcome.trouble):
                say(
                    f"{outcome.cell}: {outcome.verdict}, {outcome.proof}, fired {outcome.fired}: "
                    f"{outcome.trouble} {outcome.seen}"
                )
    if outcomes:
        say(f"{who}: {len(outcomes)} cells in {time.monotonic() - began:.0f} s")
    return outcomes


SIGNS = {
    "exact": "·",
    "doubled": "twice",
    "lost": "lost",
    "foreign": "other",
    "broken": "?",
    "unreadable": "unread",
}


def table_of(outcomes: Sequence[Outcome], column: Callable[[Outcome], str]) -> str:
    """Faults down, columns across. A dot is exact; a star: it stopped, and was started again; an
    exclamation mark: the fault did not fire."""
    rows_by_fault: dict[str, dict[str, str]] = {}
    names = dict.fromkeys(map(column, outcomes))
    for outcome in outcomes:
        text = SIGNS[outcome.verdict] + ("*" if outcome.trouble else "")
        text += ("" if outcome.fired else "!") + ("" if outcome.proof == "proven" else "?")
        rows_by_fault.setdefault(outcome.cell.fault, {})[column(outcome)] = text
    width = max(map(len, names), default=0) + 2
    lines = ["".ljust(19) + "".join(name.rjust(width) for name in names)]
    for fault, row in rows_by_fault.items():
        lines.append(fault.ljust(19) + "".join(row.get(name, "").rjust(width) for name in names))
    return "\n".join(lines) + "\n"


def counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {
        "cells": len(outcomes),
        **{verdict: sum(o.verdict == verdict for o in outcomes) for verdict in SEVERITY},
        "fired": sum(o.fired for o in outcomes),
        "stopped": sum(bool(o.trouble) for o in outcomes),
    }


def main(given: argparse.Namespace) -> dict[str, Any]:
    def wanted(every: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in every if given.only in str(cell)]

    parts = given.parts.split(",")
    began = time.monotonic()
    outcomes_by_part: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="frazil-faults-") as name, ExitStack() as stack:
        server = stack.enter_context(RestCatalog(Path(name, "rest"), say))
        proxy = stack.enter_context(Proxy(server.port))
        bootstrap = ""
        if "streams" in parts:
            bootstrap = stack.enter_context(Broker(Path(name, "kafka"), say=say)).bootstrap
        document = {
            "sink": {"id": "faults", "topics": ["none"]},
            "kafka": {"bootstrap.servers": "none:1"},
            "decode": {"format": "raw"},
            "catalog": {"name": "lake", **server.properties()},
            "table": [{"name": "db.none"}],
        }
        spark = session(from_document(document), say=say)
        world = World(spark, server, proxy, bootstrap)
        for part in parts:
            who, every = {
                "matrix": ("ours", cells()),
                "places": ("ours", cells_of_places()),
                "streams": ("stream", cells_of_streams()),
            }.get(part, (part, cells(["append"])))
            threads = 1 if part == "streams" else given.threads
            outcomes_by_part[part] = measure(world, who, wanted(every), threads)
        spark.stop()
    for part, outcomes in outcomes_by_part.items():
        print(f"{part}\n")
        print(
            table_of(
                outcomes,
                lambda o, part=part: {
                    "places": o.cell.place,
                    "matrix": f"{o.cell.way} {o.cell.others}",
                    "streams": f"{o.cell.way} {o.cell.others}",
                }.get(part, f"{part} {o.cell.others}"),
            )
        )
    judged = [o for part in ("matrix", "places", "streams") for o in outcomes_by_part.get(part, ())]
    return {
        "cells": len(judged),
        "exact": sum(o.verdict == "exact" and o.proof == "proven" for o in judged),
        "fired": sum(o.fired for o in judged),
        "stopped": sum(bool(o.trouble) for o in judged),
        **{part: counted(outcomes) for part, outcomes in outcomes_by_part.items()},
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them, in this order")
    parser.add_argument("--only", default="", help="cells whose description has this in it")
    parser.add_argument("--threads", type=int, default=4)
    print(json.dumps(main(parser.parse_args())))
