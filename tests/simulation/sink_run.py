"""One run of the real sink: `Sink.start` and all that follows, on a simulated machine.

`simulated()` puts the world in the place of the few names through which the code reaches out: the
catalog, the clock, threads, ids, and what would read and write Parquet. Nothing of it is in `src`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import frazil.commit.startup as startup_module
import frazil.sink as sink_module
from frazil import retry, run
from frazil.accounting import RangeCounts
from frazil.commit import (
    committer,
    events,
    index_writer,
    protocol,
    staging,
    table_maintenance,
    tables,
)
from frazil.commit.startup import Startup as RealStartup
from frazil.commit.table_schemas import TableSchemas
from frazil.config.model import Config
from frazil.config.sections import DecodeConfig, RouteConfig, SinkConfig, TableConfig
from frazil.config.settings import Settings
from frazil.errors import Expired, FrazilError, IdentityMismatch, Unavailable, from_traceback
from frazil.files.rewrite import RewriteJob, RewriteResult
from frazil.files.writer import DataFileDescriptor
from frazil.iceberg import maintenance_tasks, rewrite_data_files
from frazil.kafka.planner import TopicIdentity
from frazil.ledger import entry, index, staged_batch
from frazil.offsets import Cut, Partition, Range
from frazil.run import Run
from frazil.sink import Sink
from frazil.sources import factory
from frazil.sources.base import (
    BatchRun,
    BatchTables,
    PlannedBatch,
    StreamPosition,
    TableWriteResult,
    WriteResult,
)
from frazil.spark import foreach_batch, query
from tests.simulation import world as worlds
from tests.simulation.catalog import Client, File, Server, Table
from tests.simulation.oracle import INDEX, SINK, Oracle
from tests.simulation.world import Task, World


class Context:
    """The world that this process is in, for the patches."""

    world: World
    server: Server
    oracle: Oracle
    parsed: dict[int, Any]
    branches: Mapping[str, str]


context = Context()


def current_run() -> SinkRun:
    assert context.world.running is not None
    return context.world.running.owner  # type: ignore[no-any-return]


# ── what stands in for the machine ───────────────────────────────────────────────────────────────


class _Time:
    """`time`, and the `Clock` of everybody."""

    @staticmethod
    def monotonic() -> float:
        return context.world.now

    @staticmethod
    def time() -> float:
        return worlds.START + context.world.now

    @staticmethod
    def sleep(seconds: float) -> None:
        context.world.wait(None, seconds)


class _Threading:
    @staticmethod
    def Condition() -> worlds.Condition:
        return worlds.Condition(context.world)

    @staticmethod
    def Lock() -> worlds.Lock:
        return worlds.Lock(context.world)

    @staticmethod
    def Thread(target: Callable[[], object], name: str = "", **_: object) -> worlds.Thread:
        return worlds.Thread(context.world, target, name)


class _Unwatched:
    """The world's query fails in no way that would have it started again: nobody watches it, in a
    thread that the world does not know."""

    Event, Lock = threading.Event, threading.Lock

    @staticmethod
    def Thread(**_: object) -> mock.Mock:
        return mock.Mock()


class _Uuid:
    @staticmethod
    def uuid4() -> str:
        return f"id-{context.world.number():04d}"


class _Pool:
    """Several at once: which of them comes first is drawn. They give way to others, not to each
    other, for they share nothing but a lock."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, call: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        order = list(range(len(tasks)))
        context.world.dice.shuffle(order)
        results: list[Any] = [None] * len(tasks)
        for n in order:
            results[n] = call(tasks[n])
        return results


class _Nowhere(dict):  # type: ignore[type-arg]
    """Each run is a process of its own: no other runs in it."""

    def __contains__(self, _: object) -> bool:
        return False

    def __setitem__(self, *_: object) -> None: ...


#: Of a table that nobody gives any.
_NONE: Mapping[str, str] = MappingProxyType({})


class Catalog:
    """As `java.JavaCatalog`."""

    def __init__(self, *_: object) -> None:
        self.name = "sim"
        self._client = current_run().client

    def load(self, name: str) -> Table | None:
        self._client.read(f"load {name}")
        meta = self._client.server.tables.get(name)
        return Table(self._client, name, meta) if meta else None

    def create(
        self, name: str, *_: object, properties: Mapping[str, str] = _NONE, **__: object
    ) -> Table:
        self._client.read(f"create {name}")
        server = self._client.server
        if name in server.tables:
            return Table(self._client, name, server.tables[name])
        meta = server.create(name, properties)
        context.world.say(f"makes {name}, {meta.uuid}")
        if self._client.fails("lost"):
            raise Unavailable(f"cannot create table {name}: the answer was lost")
        context.world.point(f"made {name}")
        return Table(self._client, name, meta, made=True)


_SHAPE = SimpleNamespace(schema="", target_file_size=400, location="", properties={})
_SCHEMA = SimpleNamespace(model_validate_json=lambda _: SimpleNamespace(fields=()))


def _index_file(rows: Sequence[Any]) -> list[str]:
    client = current_run().client
    path = f"/{INDEX}/data/{context.world.number()}.parquet"
    return [client.written(File(path, tuple(rows))).descriptor]


def _index_write(_shape: object, _prefix: str, located: Sequence[Any], *_: object) -> list[str]:
    rows = []
    for batch, _ in located:
        for table in batch.tables:
            rows += [
                (batch.commit_id, table.name, t.range.partition, t.range.start, t.range.end)
                for t in table.tallies
            ]
        rows += [
            (batch.commit_id, "*", t.range.partition, t.range.start, t.range.end)
            for t in batch.total
        ]
    return _index_file(rows)


def _index_ends(rows: Any) -> dict[str, dict[Partition, tuple[int, int]]]:
    ends: dict[str, dict[Partition, tuple[int, int]]] = {}
    for row in rows.to_pylist():
        table_ends = ends.setdefault(row["table_name"], {})
        first, last = table_ends.get(row["partition"], (row["start_offset"], row["end_offset"]))
        table_ends[row["partition"]] = min(first, row["start_offset"]), max(last, row["end_offset"])
    return ends


def _index_read(_shape: object, paths: Sequence[str]) -> list[Any]:
    return [row for path in paths for row in context.server.files[path].rows]


def _compact(job: RewriteJob) -> RewriteResult:
    """Live rows of small files anew; of large ones the places of those that are gone."""
    objects, client = context.server.files, current_run().client
    context.world.point("read what is compacted")
    rows: list[Any] = []
    replaced, gone = [], {}
    for source in job.sources:
        file = objects[source.path]
        hidden = {
            n
            for hiding in source.hiding
            for path, n in objects[hiding.path].rows
            if path == source.path
        }
        dead = hidden | {
            n
            for n, (key, _) in enumerate(file.rows)
            if any(key in objects[d.path].rows for d in job.deletes if d.sequence > source.sequence)
        }
        if source.small or len(dead) >= job.share * source.rows:
            replaced.append(source.path)
            rows += [row for n, row in enumerate(file.rows) if n not in dead]
        else:
            gone[source.path] = sorted(dead) if dead - hidden else []
    files = []
    context.world.point("write what is left of it")
    if rows:
        path = f"{job.prefix}-{context.world.number()}.parquet"
        made = client.written(File(f"/compacted/{path}", tuple(rows), size=10 * len(rows)))
        files = [DataFileDescriptor(made.descriptor, len(rows), made.size)]
    return RewriteResult(tuple(files), tuple(replaced), gone)  # type: ignore[arg-type]


def _mask(_shape: object, prefix: str, _v: int, descriptor: str, gone: Sequence[int]) -> str:
    client = current_run().client
    of = client.file(descriptor).path
    path = f"/compacted/{prefix}-{context.world.number()}-hides.parquet"
    rows = tuple((of, n) for n in gone)
    return client.written(File(path, rows, "position-deletes", of=of)).descriptor


class _Json:
    """`json`, with one encoder for all, and each text read once: whoever gets the value leaves it
    as it is."""

    loads = staticmethod(lru_cache(4096)(json.loads))
    _encode = json.JSONEncoder(separators=(",", ":")).encode

    @staticmethod
    def dumps(value: Any, separators: object = None) -> str:
        return _Json._encode(value)


_parse = entry.parse


def _parsed(summary: Mapping[str, str]) -> Any:
    """Each summary is parsed once: they do not change, and everybody reads them again."""
    cached = context.parsed.get(id(summary))
    if cached is None:
        cached = context.parsed[id(summary)] = (summary, _parse(summary))
    return cached[1]


def _new(*_: object) -> tuple[str, str, str]:
    """Schema, spec and order of a new table: nobody asks for them here."""
    return "", "", ""


def _plan(schemas: TableSchemas, name: str, *_: object) -> SimpleNamespace:
    """The part of a table's plan that the feed reads."""
    return SimpleNamespace(floor=schemas._tables[name].floor, order="")


@contextmanager
def simulated() -> Iterator[None]:
    """The code under test in the world that `context` names."""
    everywhere = {
        startup_module: {"time": _Time},
        sink_module: {
            "JavaCatalog": Catalog,
            "Startup": SimulatedStartup,
            "time": _Time,
            "KafkaSource": Feed,
            "completeness_tracker": lambda *_: None,
            "started": lambda start: start(),  # any number at once
        },
        factory: {"KafkaSource": Feed},
        run: {"time": _Time, "threading": _Threading, "_runs": _Nowhere()},
        foreach_batch: {"time": _Time, "threading": _Threading},
        retry: {"time": _Time},
        staging: {"time": _Time, "uuid": _Uuid},
        events: {"time": _Time, "publish": lambda *_: None},
        index_writer: {"time": _Time, "writer_spec": lambda *_: _SHAPE},
        table_maintenance: {
            "time": _Time,
            "writer_spec": lambda *_: _SHAPE,
        },
        query: {"threading": _Unwatched},
        protocol: {"uuid": _Uuid},
        committer: {"time": _Time, "threading": _Threading, "ThreadPoolExecutor": _Pool},
        tables: {
            "time": _Time,
            "threading": _Threading,
            "ThreadPoolExecutor": _Pool,
        },
        maintenance_tasks: {"time": _Time, "uuid": _Uuid, "KEPT": 3, "AT_ONCE": 2, "MOST": 8},
        rewrite_data_files: {"uuid": _Uuid, "rewrite": _compact, "mask": _mask, "Schema": _SCHEMA},
        index: {
            "write": _index_write,
            "read": _index_read,
            "ends": _index_ends,
            "ordered": lambda rows: rows,
            "put": lambda _s, _p, rows: _index_file(rows),
            "FANOUT": 4,
        },
        entry: {"parse": _parsed, "json": _Json},
        staged_batch: {"json": _Json},
    }
    with ExitStack() as stack:
        for module, names in everywhere.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        for made in (
            committer.Committer,
            maintenance_tasks.MaintenanceTask,
            maintenance_tasks.RewriteIndexFiles,
            maintenance_tasks.ExpireSnapshots,
            rewrite_data_files.RewriteDataFiles,
        ):
            defaults = {**made.__init__.__kwdefaults__, "clock": _Time}
            stack.enter_context(mock.patch.object(made.__init__, "__kwdefaults__", defaults))
        stack.enter_context(mock.patch.object(TableSchemas, "_new_layout", _new))
        stack.enter_context(mock.patch.object(TableSchemas, "plan", _plan))
        # A set of names has another order in every process.
        opened = tables.SinkTables.open
        stack.enter_context(
            mock.patch.object(
                tables.SinkTables, "open", lambda self, names: opened(self, sorted(names))
            )
        )
        yield


# ── Kafka and Spark, as a sink sees them ─────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FeedRun(BatchRun):
    touched: Mapping[str, TableWriteResult] = field(default_factory=dict)


class Feed:
    """Reads the topic in ranges of drawn length, and writes what each table gets of them."""

    paced, stateful, checkpoint = True, False, ""
    changes, output_mode = "records", "append"
    columns: Mapping[str, Any] = {}
    required: Mapping[str, Any] = {}
    fixed_columns: Mapping[str, Any] = {}
    metadata = None

    def __init__(self, config: Config, *_: object) -> None:
        self._one = config.one_table
        self.sink_run = current_run()
        self._next: list[str] = []
        self.topic = context.oracle.topic

    def template(self, table: str) -> str:
        return table

    def identify(self, *_: object) -> TopicIdentity:
        return TopicIdentity("cluster", {"t": "topic-id"})

    def start(self, position: Cut) -> Cut:
        return Cut({**{p: self.topic.starts.get(p, 0) for p in self.topic.ends}, **position})

    def check_resumable(self, _: object) -> None: ...

    def resume(self, reached: StreamPosition, epoch: int) -> None:
        """All claims are made, and what is staged was read."""
        for partition, start in self.topic.starts.items():
            if reached.cut.get(partition, start) < start:
                at = reached.cut[partition]
                raise Expired(f"cannot go on from {partition} {at}: Kafka begins at {start}")
        self.sink_run.begins(epoch)
        ahead = {p: end for p, end in self.topic.ends.items() if end > reached.cut.get(p, 0)}
        self._next = [n for p in ahead for n in self.topic.tables(p, reached.cut.get(p, 0))]

    def sample(self, held: BatchTables) -> Mapping[str, Any]:
        return self._missing(self._next, held)

    def _missing(self, names: Sequence[str], held: BatchTables) -> dict[str, Any]:
        for name in names:
            if name in held.refused:  # (where the real one makes dead letters of its records)
                why = self.sink_run.sink._startup.tables.unhealthy.get(name)  # type: ignore[union-attr]
                raise why or IdentityMismatch(f"cannot write to {name}: {held.refused[name]}")
        return dict.fromkeys(name for name in names if name not in held.plans)

    def stream(self, *_: object) -> Stream:
        return Stream(self)

    def opening(self, *_: object) -> None:
        return None

    def carried(self) -> list[Range]:
        return []

    def ends(self) -> Cut:
        return Cut(self.topic.ends)

    def close(self) -> None: ...

    def plan(self, ranges: Sequence[Range], _: int, reached: StreamPosition) -> PlannedBatch:
        return PlannedBatch(None, reached, ranges)  # type: ignore[arg-type]

    def run(self, plan: PlannedBatch, held: BatchTables) -> FeedRun:
        topic, one, ranges = self.topic, self._one, plan.ranges
        wanted = [
            n for r in ranges for o in range(r.start, r.end) for n in topic.tables(r.partition, o)
        ]
        if one and not held.plans and not wanted:
            wanted = topic.names
        if missing := self._missing(wanted, held):
            return FeedRun(missing=missing)
        if one:
            wanted = topic.names
        touched = {}
        for name in dict.fromkeys(wanted):
            floor = held.plans[name].floor
            above = [
                Range(r.partition, min(r.end, max(r.start, floor.get(r.partition, 0))), r.end)
                for r in ranges
            ]
            above = [r for r in above if len(r) or r.partition not in floor]
            if above and (
                one or any(topic.routed(name, r.partition, r.start, r.end) for r in above)
            ):
                touched[name] = self._of_table(name, above, held.file_prefix)
        return FeedRun(touched=touched)

    def check(self, plan: PlannedBatch, _: BatchTables, done: FeedRun) -> WriteResult:
        one, ranges, reached, touched = self._one, plan.ranges, plan.position, done.touched
        begin = Cut({**{r.partition: r.start for r in ranges}, **reached.cut})
        total = () if one else tuple(self._tally(r, None) for r in ranges)
        return WriteResult(begin, reached.cut.after(ranges), touched, self.identify(), total=total)

    def _tally(self, r: Range, name: str | None) -> RangeCounts:
        fates = [self.topic.fate(r.partition, o) for o in range(r.start, r.end)]
        routed = fates.count("routed")
        written = (
            routed if name is None else len(self.topic.routed(name, r.partition, r.start, r.end))
        )
        return RangeCounts(
            r, written, 0, fates.count("skipped") + routed - written, fates.count("invisible")
        )

    def _of_table(self, name: str, ranges: Sequence[Range], prefix: str) -> TableWriteResult:
        topic, client = self.topic, self.sink_run.client
        places = [
            (r.partition, o)
            for r in ranges
            for o in topic.routed(name, r.partition, r.start, r.end)
        ]
        path = f"/{name}/data/{prefix}-{context.world.number()}"
        size = context.world.dice.choice((10, 100))
        tallies = [self._tally(r, name) for r in ranges]
        if topic.modes[name] == "append":
            rows: Sequence[Any] = [(p.number, o) for p, o in places]
            if not rows:
                return TableWriteResult(tuple(tallies), ())
            file = client.written(File(f"{path}.parquet", tuple(rows), size=size))
            return TableWriteResult(
                tuple(tallies), (DataFileDescriptor(file.descriptor, len(rows), size),)
            )
        last = {topic.key(p, o): (p, o) for p, o in places}
        live = {k: (p.number, o) for k, (p, o) in last.items() if not topic.tombstone(p, o)}
        per: dict[Partition, int] = {}
        for key, (p, _) in last.items():
            per[p] = per.get(p, 0) + (key in live)
        tallies = [
            RangeCounts(
                t.range,
                per.get(t.range.partition, 0),
                0,
                t.skipped,
                t.invisible,
                t.written - per.get(t.range.partition, 0),
            )
            for t in tallies
        ]
        files, deletes = [], []
        if live:
            file = client.written(File(f"{path}.parquet", tuple(live.items()), size=size))
            files.append(DataFileDescriptor(file.descriptor, len(live), size))
        if last:
            file = client.written(File(f"{path}-keys.parquet", tuple(last), "equality-deletes"))
            deletes.append(DataFileDescriptor(file.descriptor, len(last), 10))
        return TableWriteResult(tuple(tallies), tuple(files), tuple(deletes), len(last))


class Stream:
    """A streaming DataFrame, its writer and its query in one: Spark calls for batch after batch."""

    _jsq = None

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._call: Callable[[Any, int], None] = lambda *_: None
        self._error: BaseException | None = None
        self.task: Task | None = None
        self.isActive = False

    writeStream = property(lambda self: self)

    def foreachBatch(self, call: Callable[[Any, int], None]) -> Stream:
        self._call = call
        return self

    def outputMode(self, _: str) -> Stream:
        return self

    def queryName(self, _: str) -> Stream:
        return self

    def option(self, *_: object) -> Stream:
        return self

    def trigger(self, **_: object) -> Stream:
        return self

    def start(self) -> Stream:
        self.isActive = True
        self._feed.sink_run.query = self
        self.task = context.world.spawn(self._feed.sink_run, "batches", self._run)
        return self

    def _run(self) -> None:
        number = 0
        topic = self._feed.topic
        dice = context.world.dice
        try:
            while self.isActive:
                context.world.point("trigger")
                cut = self._feed.sink_run.sink._stream.position.cut  # type: ignore[union-attr]
                ranges = [
                    Range(p, cut.get(p, 0), min(end, cut.get(p, 0) + dice.randint(1, 4)))
                    for p, end in topic.ends.items()
                    if end > cut.get(p, 0)
                ]
                if not ranges:
                    context.world.wait(topic, None)
                    continue
                if len(ranges) > 1 and dice.random() < 0.5:
                    ranges = [dice.choice(ranges)]
                self._call(ranges, number)
                number += 1
        except (RuntimeError, FrazilError) as error:
            self._error = error
        finally:
            self.isActive = False
            context.world.wake(self)

    def exception(self) -> BaseException | None:
        return self._error

    def stop(self) -> None:
        self.isActive = False
        context.world.wake(self._feed.topic)
        while self.task is not None and not self.task.done:
            context.world.wait(self, 1.0)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────


class SimulatedStartup(RealStartup):
    """What needs Arrow or Spark of the start is left out: the columns of the index, and until when
    the stream is complete."""

    def _create_index(self) -> Any:
        return self._catalog.create(INDEX)  # type: ignore[call-arg]

    def widen_index(self) -> None: ...

    def still_newest(self) -> None:
        """This look must be fresh: a table that a run made itself has no claim to fence others."""
        client = current_run().client
        stale, client.stale = client.stale, 0.0
        try:
            super().still_newest()
        finally:
            client.stale = stale


Named = tuple[str, str, str]


@lru_cache
def config(
    names: tuple[tuple[str, str, str], ...], interval: str, bound: int, after: int
) -> Config:
    """`names`: name, mode and branch of each table."""
    return Config(
        sink=SinkConfig(
            SINK,
            topics=("t",),
            index_table=INDEX,
            commit_interval=interval,
            max_pending_batches=bound,
            unavailable_timeout="1m",
        ),
        kafka=Settings({"bootstrap.servers": "x"}),
        decode=DecodeConfig("json"),
        tables=tuple(
            TableConfig(
                name,
                mode=mode,
                key=("k",) if mode == "upsert" else (),
                branch=branch,
                compact_after_commits=after,
            )
            for name, mode, branch in names
        ),
        routes=(RouteConfig(topics=("t",), to=(names[0][0],)),) if len(names) > 1 else (),
    )


class SinkRun:
    """One process that runs the sink."""

    def __init__(self, number: int, config: Config, server: Server) -> None:
        self.number = number
        self.dead = self.stopped = False
        self.client = Client(server)
        self.config = config
        self.sink: Sink | None = None
        self._run: Run | None = None
        self.query: Stream | None = None
        self.epoch = 0
        #: how it ended, when it did not just die
        self.error: BaseException | None = None
        self.over = self.asked = False

    def __str__(self) -> str:
        return f"run {self.number}"

    def run(self) -> None:
        try:
            self.sink = Sink(self.config, on_step=self._step)
            self._run = self.sink.start(SimpleNamespace())  # type: ignore[arg-type]
        except FrazilError as error:
            self.error, self.over = error, True

    def _step(self, step: Any) -> None:
        if step.name == "done":
            context.oracle.done(self.epoch, step.batch, context.branches)

    def stop(self) -> None:
        """Somebody asks it to end."""
        try:
            if self._run is not None:
                self._run.stop()
        except FrazilError as error:
            self.error = error
        self.over = True

    def look(self) -> bool:
        """Is it over? (What `Query.awaitTermination` does.)"""
        query = self.query
        if query is None or self.over:
            return self.over
        assert self.sink is not None
        if self.sink.committer.failure is not None:
            self.error, self.over = self.sink.committer.failure, True
        elif not self.asked and not query.isActive and (error := query.exception()) is not None:
            known = error if isinstance(error, FrazilError) else from_traceback(str(error))
            self.error = known or FrazilError(str(error))
            self.over = True
        return self.over

    def begins(self, epoch: int) -> None:
        self.epoch = epoch
        oracle = context.oracle
        context.world.say(f"begins: epoch {epoch}")
        if epoch in oracle.epochs and INDEX not in oracle.harm and oracle.ledgers:
            context.world.violated("I7", f"two runs have epoch {epoch}")
        oracle.epochs.add(epoch)
        oracle.settled = max(oracle.settled, epoch)
