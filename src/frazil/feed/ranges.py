"""Kafka straight into the table: Spark gets ranges, and the records never enter its JVM."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from frazil.core.config import Config, duration
from frazil.core.errors import Miscount
from frazil.core.offsets import Cut, Partition, Range, join
from frazil.feed import Host, Reached, Temporary, Written, added
from frazil.feed.reads import register
from frazil.ingest import sample
from frazil.ingest.decode import Format
from frazil.ingest.route import Metadata
from frazil.ingest.source import FORMAT, Origin, Planner, kafka_only, options
from frazil.ingest.stage import Tally
from frazil.ingest.task import RESULTS, Plan, Result, run_all
from frazil.ingest.write import TableShape
from frazil.table import schema
from frazil.table.ledger import Entry


class Ranges:
    paced = True
    stateful = False

    def __init__(self, host: Host) -> None:
        self._host = host
        self._config: Config = host.config
        self._kafka = self._config.kafka.resolved()
        table = self._config.tables[0]
        self._metadata = Metadata(
            table.topic_column, table.partition_column, table.offset_column, table.timestamp_column
        )
        self._format: Format = sample.format_of(self._config)
        self._plan: Plan | None = None
        self._carried: list[Result] = []
        self._origin = Origin()
        self.checkpoint = ""
        self._temporary = Temporary()

    def look(self, spark: SparkSession, entry: Entry | None) -> Origin:
        self._planner = Planner(
            self._kafka,
            topics=self._config.sink.topics,
            pattern=self._config.sink.pattern,
            origin=Origin(entry.cluster, entry.topics) if entry else Origin(),
        )
        self._origin, _ = self._planner.origin()
        return self._origin

    def start(self, position: Cut) -> Cut:
        return Cut(
            {**position, **self._planner.start(kafka_only(position), self._config.sink.start)}
        )

    def check(self, reached: Callable[[], Reached]) -> None: ...

    def resume(self, reached: Reached, life: str) -> None:
        self._reached = kafka_only(reached.cut)
        _, partitions = self._planner.origin()
        self._planner.require(self._reached, self._planner.watermarks(partitions))
        self._prepare(self._planner.waiting(self._reached, sample.RECORDS))
        self.checkpoint = self._temporary.folder(self._config.sink.checkpoint, life)

    def stream(self, spark: SparkSession, until: Cut | None) -> DataFrame:
        register(spark)
        source = options(
            self._config,
            start=self._reached,
            origin=self._origin,
            parallelism=spark.sparkContext.defaultParallelism,
            until=until,
        )
        return spark.readStream.format(FORMAT).options(**source).load()

    def ends(self) -> Cut:
        _, partitions = self._planner.origin()
        return self._planner.watermarks(partitions).end

    def untold(self) -> list[Range]:
        return [result.tally.range for result in self._carried]

    def close(self) -> None:
        self._temporary.remove()

    def opening(self, batch: int, reached: Reached) -> Written | None:
        return None  # the claim names it

    def write(self, frame: DataFrame, batch: int, reached: Reached) -> Written | None:
        """Spark runs one task per range; only what successful tasks hand back is believed."""
        if self._plan is None:
            rows = frame.collect()
            self._prepare([Range(Partition(r.topic, r.partition), r.start, r.end) for r in rows])
        results = self._carried + self._run(frame)
        if not results:
            return None  # a cut that only named new partitions
        if self._plan is None:
            self._carried = results  # invisible offsets, and no table yet: told with the next batch
            return None
        written = self._checked(results, reached.cut)
        self._carried = []
        return written

    def _prepare(self, ranges: Sequence[Range]) -> None:
        """Make the table, or see that it fits, from a sample of the records that come first."""
        table = self._config.tables[0]
        columns = sample.columns(self._config, self._kafka, self._format, ranges)
        if columns is None:
            return  # nothing to learn a schema from; the first batch with records will
        shape = self._host.shape(columns, self._metadata)
        self._plan = Plan(
            kafka=self._kafka,
            format=self._format,
            table=shape,
            metadata=self._metadata,
            event_time=schema.event_time_column(shape.schema, table),
            file_prefix="",
            patience=duration(self._config.sink.patience),
            client=self._config.sink.fetch == "client",
        )

    def _run(self, frame: DataFrame) -> list[Result]:
        plan = self._plan or Plan(  # no record with a value yet: the tasks count, and write nothing
            self._kafka, self._format, _NO_TABLE, self._metadata, "", "", 60.0
        )
        plan = replace(plan, file_prefix=self._host.prefix)
        rows = frame.mapInArrow(functools.partial(run_all, plan), RESULTS).collect()
        if rows and (len({row.pieces for row in rows}) != 1 or rows[0].pieces != len(rows)):
            raise Miscount(
                f"cannot stage a batch: {rows[0].pieces} ranges were planned, {len(rows)} came back"
            )
        for row in rows[:1]:
            cluster, topics = json.loads(row.origin)
            self._origin = Origin(cluster, topics)
        results = [Result.load(row.result) for row in rows]
        for row, result in zip(rows, results, strict=True):
            if row.planned != str(result.tally.range):
                raise Miscount(f"cannot stage a batch: {row.planned} was planned, "
                               f"{result.tally.range} came back")  # fmt: skip
        return results

    def _checked(self, results: Sequence[Result], reached: Cut) -> Written:
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
        end = reached.after(ranges)
        begin = Cut({**{r.partition: r.start for r in ranges}, **reached})
        # A topic that was dropped and made again between plan and fetch brought other records.
        self._origin.check(self._host.patiently(lambda: self._planner.origin()[0]))
        files = tuple(file for result in results for file in result.files)
        seconds = added([result.seconds for result in results])
        return Written(begin, end, tuple(tallies.values()), files, self._origin, seconds)


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
