"""`spark.readStream.format("frazil")` and `spark.read.format("frazil")`: decoded rows of a stream.

The same planner, ranges and decoders as everywhere, behind Spark's Python DataSource. Options are
those of the config file: `config` names one, and `section.key` options (`sink.topics`,
`kafka.bootstrap.servers`, `decode.format`, …) override it. `start` and `end` are `earliest`,
`latest` or a cut as JSON; `end` is for batch reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from frazil.config import model as configs
from frazil.config.checks import check_stream
from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import ConfigError, FrazilError, encode_for_spark
from frazil.formats import schema_sample
from frazil.kafka.planner import Planner, TopicIdentity, split
from frazil.kafka.range_source import RangeStreamReader, options
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline.projection import MetadataColumns
from frazil.spark.tasks import ReadPlan, read

KEY, HEADERS = "_key", "_headers"
_NOTHING = Cut()


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """An inspected stream: the plan of its rows, and where it begins and ends now."""

    plan: ReadPlan
    start: Cut
    end: Cut
    origin: TopicIdentity


def open_stream(config: Config, start: str | Mapping[str, Mapping[str, int]] = "") -> StreamInfo:
    """Ask Kafka for the stream's offsets, and sample records for their columns."""
    check_stream(config)
    kafka, table = config.kafka.resolved(), config.tables[0]
    planner = Planner.of(config, None)
    origin, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    begin = planner.start(_NOTHING, start or config.sink.starting_offsets, first=False)
    # Sample the newest records as well as the first: columns may have been added later.
    oldest = Cut({p: max(offset, marks.low[p]) for p, offset in begin.items()})
    newest = Cut(
        {p: max(marks.low[p], end - schema_sample.RECORDS) for p, end in marks.end.items()}
    )
    ranges = planner.waiting(oldest, schema_sample.RECORDS)
    ranges += [r for r in planner.waiting(newest, schema_sample.RECORDS) if r not in ranges]
    format = schema_sample.format_of(config)
    columns = schema_sample.columns(config, kafka, format, ranges)
    if columns is None and format.schema:
        columns = schema_sample.schema_columns(format)
    if columns is None:
        topics = ", ".join(config.sink.topics) or config.sink.topic_pattern
        raise ConfigError(
            f"cannot name the columns of {topics}: it has no records yet",
            hint="give [decode] schema, or start when there are records",
        )
    metadata = MetadataColumns(
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
        KEY,
        HEADERS,
    )
    plan = ReadPlan(
        kafka,
        format,
        columns,
        metadata,
        duration(config.sink.unavailable_timeout),
        config.sink.kafka_client == "librdkafka",
    )
    return StreamInfo(plan, begin, marks.end, origin)


def spark_schema(plan: ReadPlan) -> StructType:
    return from_arrow_schema(plan.target)


class RowDataSource(DataSource):
    _opened: StreamInfo | None = None

    @classmethod
    def name(cls) -> str:
        return "frazil"

    def schema(self) -> StructType:
        return spark_schema(self._open().plan)

    def reader(self, schema: StructType) -> RowBatchReader:
        opened = self._open()
        config, given = options_config(self.options), self.options.get("end", "latest")
        end = opened.end if given == "latest" else Cut.of(json.loads(given))
        return RowBatchReader(opened, end, config)

    def streamReader(self, schema: StructType) -> RowStreamReader:
        opened = self._open()
        if "end" in self.options:
            raise encode_for_spark(ConfigError("cannot stream to an end: `end` is for spark.read"))
        given = options(
            options_config(self.options),
            start=opened.start,
            origin=opened.origin,
            parallelism=os.cpu_count() or 1,
            until=None,
        )
        return RowStreamReader(json.loads(given["plan"]), opened.plan)

    def _open(self) -> StreamInfo:
        """The stream, opened once: Spark asks for the schema first and reuses this object, pickled,
        for the rest."""
        if self._opened is None:
            start = _start(self.options.get("start", ""))
            try:
                self._opened = open_stream(options_config(self.options), start)
            except FrazilError as error:
                raise encode_for_spark(error) from None
        return self._opened


def _start(text: str) -> str | dict[str, dict[str, int]]:
    return dict(json.loads(text)) if text.startswith("{") else text


def options_config(given: Mapping[str, str]) -> Config:
    document: dict[str, Any] = {}
    base = Path()
    if path := given.get("config"):
        document, base = configs.document(path), Path(path).parent
    for key, value in given.items():
        section, dot, name = key.partition(".")
        if not dot:
            if key not in ("config", "start", "end"):
                raise ConfigError(
                    f"cannot read option {key!r}: expected config, start, end, or "
                    "section.key as in the config file"
                )
            continue
        inside = document.setdefault(section, [{}] if section == "table" else {})
        inside = inside[0] if section == "table" else inside
        if section == "decode" and name.startswith("registry."):
            inside, name = inside.setdefault("registry", {}), name.removeprefix("registry.")
        inside[name] = value.split(",") if (section, name) == ("sink", "topics") else value
    document["sink"] = {"id": "read", **document.get("sink", {})}
    document["table"] = [{"name": "none.none", **table} for table in document.get("table") or [{}]]
    return configs.from_document(document, base)


class RowStreamReader(RangeStreamReader):
    """A stream whose rows are records."""

    def __init__(self, plan: Mapping[str, Any], rows: ReadPlan) -> None:
        super().__init__(plan)
        self._rows = rows

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        topic, number, start, end, *_ = partition.value
        return _rows(self._rows, Range(Partition(topic, number), start, end))


class RowBatchReader(DataSourceReader):
    def __init__(self, opened: StreamInfo, end: Cut, config: Config) -> None:
        self._plan = opened.plan
        for partition, offset in end.items():
            begin, last = opened.start.get(partition), opened.end.get(partition)
            if begin is None or last is None or not begin <= offset <= last:
                fact = f"the stream's range is [{begin}, {last})"
                raise encode_for_spark(
                    ConfigError(f"cannot read {partition} to offset {offset}: {fact}")
                )
        ranges = [Range(p, start, end[p]) for p, start in opened.start.items() if p in end]
        self._pieces = split(
            ranges, most=config.sink.max_records_per_task, parallelism=os.cpu_count() or 1
        )

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(piece) for piece in self._pieces] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(self._plan, partition.value)


def _rows(plan: ReadPlan, wanted: Range | None) -> Iterator[pa.RecordBatch]:
    if wanted is None:
        return
    try:
        yield from read(plan, wanted, lambda _: None)
    except FrazilError as error:
        raise encode_for_spark(error) from None
