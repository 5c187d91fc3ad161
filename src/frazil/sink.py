"""One micro-batch told in order; the first file to read; the Python API.

    sink = Sink(config)
    query = sink.start(spark)      # an ordinary StreamingQuery
    sink.wait_until(cut)           # every offset below `cut` is in the table, and in the index
    sink.stop()                    # after the batch under way; what is staged gets committed

Structured Streaming plans ranges (`ingest.source`), Spark's tasks turn each range into data files
(`ingest.task`), and `_batch` below does the rest: check the results against the plan, stage them,
hand them to the committer, which works beside the next batch. Every step has a name; whoever wants
to watch, time, or kill at a step passes `on_step`.

The table is the checkpoint. Each life of a sink begins from the ledgers and the staged batches
(`start`), with a Spark checkpoint of its own that is never read back: lost, old or foreign
checkpoints cannot matter.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from frazil.core.config import Config, TableConfig, duration, size
from frazil.core.errors import (
    ConfigError,
    Fenced,
    Foreign,
    FrazilError,
    Gap,
    Miscount,
    Unavailable,
    Undecodable,
    Unknown,
    across,
    from_traceback,
)
from frazil.core.offsets import Cut, Partition, Range, join
from frazil.ingest import stage
from frazil.ingest.decode import Decoder, Format
from frazil.ingest.fetch import fetch
from frazil.ingest.route import Metadata
from frazil.ingest.source import FORMAT, Origin, Planner, RangeSource, options, publish
from frazil.ingest.stage import StagedBatch, StagedTable, Tally
from frazil.ingest.task import RESULTS, Plan, Result, run_all
from frazil.ingest.write import TableShape
from frazil.table import index, schema
from frazil.table.audit import COLUMNS_PROPERTY
from frazil.table.commit import Bounds, Committer, Target, chain
from frazil.table.jvm import Catalog, Table
from frazil.table.ledger import Head, Snapshot

T = TypeVar("T")
_SAMPLE = 200

#: The steps of a batch, in order. Crash tests kill at each of them.
STEPS = (
    "planned", "written", "staged", "commit", "committed", "witnessed",
    "index-commit", "index-committed", "index-witnessed", "done",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A named moment in a batch's life."""

    name: str
    batch: int
    at: float  # seconds since 1970
    records: int = 0
    seconds: Mapping[str, float] | None = None


class Sink:
    def __init__(self, config: Config, *, on_step: Callable[[Step], None] | None = None) -> None:
        self.config = config
        self._on_step = on_step or (lambda _: None)
        self._kafka = config.kafka.resolved()
        self._table: TableConfig = config.tables[0]
        self._metadata = Metadata(
            self._table.topic_column, self._table.partition_column,
            self._table.offset_column, self._table.timestamp_column,
        )  # fmt: skip
        self._format = Format(
            config.decode.format, _text(config.decode.schema), config.decode.registry.resolved()
        )
        self._plan: Plan | None = None
        self._carried: list[Result] = []
        self._between_batches = threading.Lock()
        self._stopping = False
        self._query: StreamingQuery | None = None
        self._folder: str | None = None

    # ── a life begins ────────────────────────────────────────────────────────────────────────

    def start(self, spark: SparkSession, *, until: Cut | None = None) -> StreamingQuery:
        """Take over from the last life, commit what it staged, and stream on.

        With `until` the plan goes no further than that cut.
        """
        self._catalog = Catalog(spark, self.config.catalog.name)
        self._claim()
        staged, useless = self._recover()
        _, partitions = self._planner.origin()
        self._planner.require(self._reached, self._planner.watermarks(partitions))
        self._prepare(self._waiting_ranges(self._reached, _SAMPLE))
        for path in useless:
            self._index.delete(path)
        self._committer.start()
        for batch in staged:
            self._committer.submit(batch)
        spark.dataSource.register(RangeSource)
        source = options(
            self.config,
            start=self._reached,
            origin=self._origin,
            parallelism=spark.sparkContext.defaultParallelism,
            until=until,
        )
        self._query = (
            spark.readStream.format(FORMAT)
            .options(**source)
            .load()
            .writeStream.foreachBatch(self._guarded_batch)
            .queryName(f"frazil-{self.config.sink.id}-{self.epoch}")
            .option("checkpointLocation", self._checkpoint())
            .trigger(
                processingTime=f"{int(duration(self.config.sink.trigger) * 1000)} milliseconds"
            )
            .start()
        )
        return self._query

    def _claim(self) -> None:
        """Fence every older life off, the index first: its ledger decides who is the newest.

        The topics are looked at before anything is claimed, and the claim on the index names the
        cut this life starts from, so that no later look at Kafka can move it.
        """
        self._index = self._index_table()
        self._index_target = self._new_target(self.config.index_table, "main")
        index_head = self._index_target.head()
        entry = index_head.entry
        self._planner = Planner(
            self._kafka,
            topics=self.config.sink.topics,
            pattern=self.config.sink.pattern,
            origin=Origin(entry.cluster, entry.topics) if entry else Origin(),
        )
        self._origin, _ = self._planner.origin()
        heads = [index_head]
        if self._catalog.load(self._table.name) is not None:
            heads.append(self._new_target(self._table.name, self._table.branch).head())
        self.epoch = 1 + max((head.entry.epoch for head in heads if head.entry), default=0)
        start = self.config.sink.start
        self._take(self._index_target, lambda position: self._planner.start(position, start))
        # Only now: a table that an older life makes after this look finds its maker fenced.
        self._data = self._catalog.load(self._table.name)
        self._data_target = None
        if self._data is not None:
            self._data_target = self._new_target(self._table.name, self._table.branch)
            self._take(self._data_target)

    def _take(
        self, target: Target, extend: Callable[[Cut], Cut] = lambda position: position
    ) -> None:
        target.epoch = self.epoch
        head = target.claim(extend, cluster=self._origin.cluster, topics=self._origin.topics)
        assert head.snapshot is not None
        target.witness(head.snapshot)

    def _new_target(self, name: str, branch: str) -> Target:
        """With a handle of its own: the committer's thread and Spark's do not share tables."""
        table = self._catalog.load(name)
        if table is None:
            raise Foreign(f"cannot open table {name}: it is gone")
        return Target(table, branch, self.config.sink.id, 0, time)

    def _recover(self) -> tuple[list[StagedBatch], list[str]]:
        """The staged batches that lead on from the position without reading Kafka again, and the
        paths of records that are of no use any more.

        All older lives are fenced by now, so what is read here stays as it is.
        """
        entry = self._index_target.head().entry
        assert entry is not None  # the claim
        position = entry.end
        self._check_table(entry.tables, position)
        self._number = entry.batches[1] + 1
        after = self._data_target.entries_after(position) if self._data_target else []
        committed = {commit_id for each, _ in after for commit_id in each.commit_ids}
        stored = self._stored()
        staged = chain(position, [batch for _, batch in stored if batch], committed)
        if self._data is not None:
            # The table is ahead of the index, and no staged batch tells of it: the ledger does.
            known = {batch.commit_id for batch in staged}
            lost = [e for e, _ in after if e.ranges and not known & set(e.commit_ids)]
            staged += [index.rebuilt(e, self._table.name, self._data.uuid) for e in lost]
            staged = chain(position, staged, committed)
        ahead = staged[-1].end if staged else position
        head = self._data_target.head() if self._data_target else None
        if head and head.entry and not ahead.reaches(head.entry.end):
            raise Gap(
                f"cannot take over sink {self.config.sink.id}: table {self._table.name} is ahead "
                f"of the index, and its ledger does not lead there from {position}"
            )
        # Torn, superseded, or committed and indexed long ago.
        useful = {batch.commit_id for batch in staged}
        useless = [path for path, batch in stored if batch is None or batch.commit_id not in useful]
        self._reached = ahead
        self._number = max([self._number, *(batch.number + 1 for batch in staged)])
        self._committer = Committer(
            data=self._target,
            index=self._index_target,
            index_manifests=self._index_manifests,
            committed=self._after_commit,
            position=position,
            interval=duration(self.config.sink.commit_interval),
            bounds=Bounds(
                self.config.sink.max_pending_batches,
                size(self.config.sink.max_pending_bytes),
                duration(self.config.sink.max_pending_age),
            ),
            step=lambda name, batch: self._step(name, batch.number if batch else -1),
        )
        return staged, useless

    def _check_table(self, known: Mapping[str, str], position: Cut) -> None:
        """The table the position counts on must be there, the same, and not rolled back."""
        name = self._table.name
        if not known:
            return
        if name not in known:
            raise Foreign(
                f"cannot go on: sink {self.config.sink.id} fills table {', '.join(known)}; "
                f"the config names {name}",
                hint="use another sink id for another table",
            )
        if self._data is None:
            raise Foreign(
                f"cannot go on: table {name} is gone; the index says that it holds everything "
                f"below {position.nested()}",
                hint="restore the table, or use another sink id to fill a new one from the start",
            )
        if self._data.uuid != known[name]:
            raise Foreign(
                f"cannot go on: table {name} was dropped and made again; expected uuid "
                f"{known[name]}, found {self._data.uuid}",
                hint="restore the table, or use another sink id to fill the new one from the start",
            )
        assert self._data_target is not None
        head: Head = self._data_target.head()
        end = head.entry.end if head.entry else Cut()
        if not end.reaches(position):
            lost = [Range(p, end.get(p, 0), o) for p, o in position.items() if end.get(p, 0) < o]
            raise Gap(
                f"cannot go on: table {name} was rolled back; the index has its rows and the table "
                f"has not: {', '.join(map(str, lost))}",
                hint="roll the table forward again, or use another sink id",
            )

    def _stored(self) -> list[tuple[str, StagedBatch | None]]:
        return [
            (path, stage.load(self._index.fetch(path)))
            for path in self._index.listing(self._stage_folder)
            if path.endswith(".json")
        ]

    def _prepare(self, ranges: Sequence[Range]) -> None:
        """Make the table, or see that it fits, from a sample of the records that come first."""
        values = [value for each in ranges for value in self._first_values(each)]
        if not values and not (ranges and self._format.kind == "raw"):
            return  # nothing to learn a schema from; the first batch with records will
        columns = Decoder(self._format).columns(values)
        if not len(columns):
            raise Undecodable(f"cannot name the columns of table {self._table.name}: none of the "
                              f"first {len(values)} records can be read")  # fmt: skip
        config = self._table
        if self._data is None:
            made = schema.iceberg_schema(columns, self._metadata, config)
            spec = schema.partition_spec(made, config.partition_by, config.name)
            columns_property = ",".join(field.name for field in self._metadata.fields)
            self._data = self._create(
                config.name, made, spec, config, {COLUMNS_PROPERTY: columns_property}
            )
            self._data_target = self._new_target(config.name, config.branch)
            self._take(self._data_target)
            self._still_newest()
        else:
            schema.check_fits(columns, self._data.schema, self._metadata, config.name)
        self._plan = Plan(
            kafka=self._kafka,
            format=self._format,
            table=_shape(self._data, config, self._metadata.topic),
            metadata=self._metadata,
            event_time=schema.event_time_column(self._data.schema, config),
            file_prefix=f"frazil-{self.config.sink.id}-{self.epoch}",
            patience=duration(self.config.sink.patience),
            client=self.config.sink.fetch == "client",
        )

    def _still_newest(self) -> None:
        """A newer life that began before there was a table could not claim it, only the index."""
        entry = self._index_target.head().entry
        if entry is not None and entry.epoch > self.epoch:
            raise Fenced(
                f"cannot go on with table {self._table.name}: sink {self.config.sink.id} has a "
                f"newer life; this one is epoch {self.epoch}, the index is at epoch {entry.epoch}",
                hint="stop this one; the newer life has taken over and nothing of this one is lost",
            )

    def _first_values(self, wanted: Range) -> list[bytes]:
        chunks = fetch(
            self._kafka,
            wanted,
            patience=duration(self.config.sink.patience),
            client=self.config.sink.fetch == "client",
        )
        values = (value for chunk in chunks for value in chunk.open()[0] if value is not None)
        return list(itertools.islice(values, _SAMPLE))

    # ── one batch ────────────────────────────────────────────────────────────────────────────

    def _batch(self, ranges: DataFrame, _: int) -> None:
        if self._plan is None:
            rows = ranges.collect()
            self._prepare([Range(Partition(r.topic, r.partition), r.start, r.end) for r in rows])
        window_start = time.time()
        self._step("planned", self._number)
        results = self._carried + self._write(ranges)
        if not results:
            return  # a cut that only named new partitions
        if self._data is None:
            self._carried = results  # invisible offsets, and no table yet: told with the next batch
            return
        begin, end, tallies = self._checked(results)
        seconds = {
            key: sum(r.seconds.get(key, 0.0) for r in results)
            for key in ("fetch", "decode", "write", "cpu")
        }
        self._step("written", self._number, sum(t.written for t in tallies), seconds)
        since = int(window_start * 1000)
        batch = self._patiently(lambda: self._stage(results, begin, end, tallies, since))
        self._step("staged", self._number)
        self._number += 1
        self._reached = end
        self._carried = []
        self._committer.submit(batch)

    def _write(self, ranges: DataFrame) -> list[Result]:
        """Spark runs one task per range; only what successful tasks hand back is believed."""
        plan = self._plan or Plan(  # no record with a value yet: the tasks count, and write nothing
            self._kafka, self._format, _NO_TABLE, self._metadata, "", "", 60.0
        )
        plan = replace(plan, file_prefix=f"frazil-{self._file_stem}")
        rows = ranges.mapInArrow(functools.partial(run_all, plan), RESULTS).collect()
        if rows and (len({row.pieces for row in rows}) != 1 or rows[0].pieces != len(rows)):
            raise Miscount(
                f"cannot stage batch {self._number}: {rows[0].pieces} ranges were planned, "
                f"{len(rows)} came back"
            )
        for row in rows[:1]:
            cluster, topics = json.loads(row.origin)
            self._origin = Origin(cluster, topics)
        results = [Result.load(row.result) for row in rows]
        for row, result in zip(rows, results, strict=True):
            if row.planned != str(result.tally.range):
                raise Miscount(f"cannot stage batch {self._number}: {row.planned} was planned, "
                               f"{result.tally.range} came back")  # fmt: skip
        return results

    def _checked(self, results: Sequence[Result]) -> tuple[Cut, Cut, list[Tally]]:
        """The arithmetic (I3), the joint to the batch before, and the topics' identity."""
        for result in results:
            tally = result.tally
            if not tally.balanced or sum(file.rows for file in result.files) != tally.written:
                raise Miscount(
                    f"cannot stage {tally.range}: {len(tally.range)} offsets, of them "
                    f"{tally.written} written, {tally.rejected} rejected, {tally.skipped} skipped, "
                    f"{tally.invisible} invisible; {sum(f.rows for f in result.files)} in the files"
                )
        tallies: dict[Partition, Tally] = {}
        for result in sorted(results, key=lambda r: r.tally.range):
            key = result.tally.range.partition
            tallies[key] = tallies[key] + result.tally if key in tallies else result.tally
        ranges = join(result.tally.range for result in results)
        end = self._reached.after(ranges)
        begin = Cut({**{r.partition: r.start for r in ranges}, **self._reached})
        # A topic that was dropped and made again between plan and fetch brought other records.
        self._origin.check(self._patiently(lambda: self._planner.origin()[0]))
        return begin, end, list(tallies.values())

    def _stage(
        self, results: Sequence[Result], begin: Cut, end: Cut, tallies: list[Tally], since: int
    ) -> StagedBatch:
        """Files into a manifest, the manifest into a batch record: durable, not yet visible.

        Each try has names of its own: what an unfinished one left is in nobody's way.
        """
        commit_id = str(uuid.uuid4())
        files = [file for result in results for file in result.files]
        assert self._data is not None
        data = self._data
        manifests, paths = [], []
        if files:
            path = f"{data.location}/metadata/frazil-{self._file_stem}-{commit_id}-m0.avro"
            manifests.append(data.write_manifest(path, [file.descriptor for file in files]))
            paths.append(path)
        batch = StagedBatch(
            sink=self.config.sink.id,
            epoch=self.epoch,
            number=self._number,
            commit_id=commit_id,
            begin=begin,
            end=end,
            topics=self._origin.topics,
            cluster=self._origin.cluster,
            staged_at_ms=int(time.time() * 1000),
            window_start_ms=since,
            tables=(
                StagedTable(
                    name=self._table.name,
                    uuid=data.uuid,
                    schema_id=data.schema_id,
                    manifests=tuple(manifests),
                    paths=tuple(paths),
                    files=len(files),
                    bytes=sum(file.bytes for file in files),
                    tallies=tuple(tallies),
                ),
            ),
        )
        self._index.store(f"{self._stage_folder}{batch.file_name}", stage.dump(batch))
        return batch

    # ── what the committer asks for ──────────────────────────────────────────────────────────

    def _target(self) -> Target:
        assert self._data_target is not None  # made with the table, before its first batch
        return self._data_target

    def _index_manifests(self, located: Sequence[tuple[StagedBatch, Snapshot]]) -> list[str]:
        table = self._index_target.table
        assert isinstance(table, Table)
        shape = _shape(table, TableConfig(table.name))
        files = index.write(shape, f"frazil-{self._file_stem}", located)
        if not files:
            return []
        path = f"{table.location}/metadata/frazil-{self._file_stem}-{uuid.uuid4()}-m0.avro"
        return [table.write_manifest(path, files)]

    def _after_commit(self, batches: Sequence[StagedBatch]) -> None:
        table = self._index_target.table
        for batch in batches:
            table.delete(f"{self._stage_folder}{batch.file_name}")
        try:
            publish(self._kafka, self.config.group, batches[-1].end)
            self._committer.progress.unpublished = ""
        except Unavailable as error:  # a courtesy to Kafka's lag tools; the position is the table's
            self._committer.progress.unpublished = error.message

    # ── waiting and ending ───────────────────────────────────────────────────────────────────

    @property
    def position(self) -> Cut:
        """Everything below it is committed, in the table and in the index."""
        return self._committer.progress.position

    @property
    def committer(self) -> Committer:
        return self._committer

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def ends(self) -> Cut:
        """The end of the topics as they are now."""
        _, partitions = self._planner.origin()
        return self._planner.watermarks(partitions).end

    def wait_until(self, cut: Mapping[Partition, int], timeout: float | None = None) -> bool:
        """Block until every offset below `cut` is committed; False when the time is up.

        Raises what stopped the stream, if it stopped first.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._committer.wait_until(cut, 0.25):
            self.check()
            if self._reached.reaches(cut):
                self._committer.flush(0.25)
            elif self._data is None and self._carried:
                ranges = [result.tally.range for result in self._carried]
                if self._reached.after(ranges).reaches(cut):
                    return True  # nothing but invisible offsets: there is nothing to commit
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    def check(self) -> None:
        """Raise what stopped the stream, in our own words."""
        if self._committer.failure is not None:
            raise self._committer.failure
        assert self._query is not None
        if (error := self._query.exception()) is not None:
            raise translated(error)
        if not self._query.isActive:
            raise FrazilError("cannot go on: the stream was stopped")

    def stop(self, timeout: float = 60.0) -> None:
        """After the batch under way; what is staged is committed, or waits for the next life."""
        self._committer.hurry()
        with self._between_batches:
            self._stopping = True  # a batch that is called from here on does nothing
        if self._query is not None:
            self._query.stop()  # not under the lock: it waits for a batch that may wait for it
        try:
            if self._committer.failure is None:
                self._committer.flush(timeout)
        finally:
            self._committer.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    # ── small things ─────────────────────────────────────────────────────────────────────────

    def _guarded_batch(self, ranges: DataFrame, number: int) -> None:
        with self._between_batches:
            if self._stopping:
                return
            try:
                self._batch(ranges, number)
            except PySparkException as error:
                raise across(translated(error)) from None
            except FrazilError as error:
                raise across(error) from None

    def _waiting_ranges(self, start: Cut, most: int) -> list[Range]:
        ends = self._planner.watermarks(list(start)).end
        return [
            Range(partition, offset, min(ends[partition], offset + most))
            for partition, offset in start.items()
            if ends[partition] > offset
        ]

    def _patiently(self, call: Callable[[], T]) -> T:
        """Storage and brokers may be away for a while; a batch is not lost for that."""
        deadline = time.monotonic() + duration(self.config.sink.patience)
        pause = 0.2
        while True:
            try:
                return call()
            except (Unavailable, Unknown) as error:
                if time.monotonic() > deadline:
                    raise
                self._committer.progress.blocked = error.message
                time.sleep(pause)
                pause = min(5.0, pause * 2)

    def _index_table(self) -> Table:
        name = self.config.index_table
        table = self._catalog.load(name)
        if table is None:
            config = TableConfig(name)
            made = schema.iceberg_schema(index.COLUMNS, Metadata("", "", "", ""), config)
            table = self._create(name, made, '{"spec-id": 0, "fields": []}', config)
        return table

    def _create(
        self,
        name: str,
        made: str,
        spec: str,
        config: TableConfig,
        extra: Mapping[str, str] | None = None,
    ) -> Table:
        properties = {
            "format-version": str(config.format_version), **config.properties, **(extra or {})
        }  # fmt: skip
        return self._catalog.create(
            name, made, spec, properties=properties, location=config.location
        )

    @property
    def _stage_folder(self) -> str:
        return stage_folder(self.config, self._index)

    @property
    def _file_stem(self) -> str:
        return f"{self.config.sink.id}-{self.epoch}-{self._number}"

    def _checkpoint(self) -> str:
        """A fresh one for each life; folders of lives long over are removed."""
        if not self.config.sink.checkpoint:
            self._folder = tempfile.mkdtemp(prefix="frazil-checkpoint-")
            return self._folder
        root = self.config.sink.checkpoint.rstrip("/")
        for old in Path(root).glob("epoch-*") if Path(root).is_dir() else ():
            if int(old.name.split("-")[1]) < self.epoch - 1:
                shutil.rmtree(old, ignore_errors=True)
        return f"{root}/epoch-{self.epoch}-{uuid.uuid4().hex[:8]}"

    def _step(
        self,
        name: str,
        batch: int,
        records: int = 0,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._on_step(Step(name, batch, time.time(), records, seconds))


_NO_TABLE = TableShape(
    name="",
    location="file:///",
    schema='{"type":"struct","schema-id":0,"fields":[]}',
    schema_id=0,
    spec='{"spec-id":0,"fields":[]}',
    properties={},
    target_file_size=1,
    compression="zstd",
    io={},
)


def stage_folder(config: Config, index_table: Table) -> str:
    return f"{config.sink.stage.rstrip('/') or f'{index_table.location}/stage'}/{config.sink.id}/"


def _text(path: str) -> str:
    """A schema file's text; no path, no text."""
    try:
        return Path(path).read_text() if path else ""
    except OSError as error:
        raise ConfigError(f"cannot read [decode] schema {path}: {error.strerror}") from None


def _shape(table: Table, config: TableConfig, topic_column: str = "") -> TableShape:
    # Bounds are cut at 16 bytes by default; the audit tells partitions apart by the whole topic.
    whole = {f"write.metadata.metrics.column.{topic_column}": "full"} if topic_column else {}
    return TableShape(
        name=table.name,
        location=table.location,
        schema=table.schema,
        schema_id=table.schema_id,
        spec=table.spec,
        properties={**table.properties, **whole},
        target_file_size=size(config.target_file_size),
        compression=config.compression,
        io=table.io_properties,
    )


def translated(error: Exception) -> FrazilError:
    """Spark's word for it, in ours: an error of our own inside it, or its first line."""
    text = str(error)
    found = from_traceback(text)
    if found is not None:
        return found
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return FrazilError(f"cannot go on: Spark stopped the stream: {lines[0] if lines else error!r}",
                       hint="\n".join(lines[-3:]))  # fmt: skip
