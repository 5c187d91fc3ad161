"""`spark.readStream.format("frazil")` and `spark.read.format("frazil")`: decoded rows of a stream.

The same planner, the same ranges and the same decoders as everywhere, behind Spark's Python
DataSource. Options are those of the config file: `config` names one, and `section.key` options
(`sink.topics`, `kafka.bootstrap.servers`, `decode.format`, …) go over it. `start` and `end` are
`earliest`, `latest` or a cut as JSON; `end` is for batch reads.
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

from frazil.core import config as configs
from frazil.core.config import Config, duration
from frazil.core.errors import ConfigError, FrazilError, across
from frazil.core.offsets import Cut, Partition, Range
from frazil.ingest import sample
from frazil.ingest.frame import ReadPlan, read
from frazil.ingest.route import Metadata
from frazil.ingest.source import Origin, Planner, RangeReader, options, split

KEY, HEADERS = "_key", "_headers"
_NOTHING = Cut()


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream that was looked at: what its rows are, and where it begins and ends now."""

    plan: ReadPlan
    start: Cut
    end: Cut
    origin: Origin


def open_stream(config: Config, start: str | Mapping[str, Mapping[str, int]] = "") -> Opened:
    """Ask Kafka where the stream is, and the first records what columns they have."""
    configs.check_stream(config)
    kafka, table = config.kafka.resolved(), config.tables[0]
    planner = Planner(kafka, topics=config.sink.topics, pattern=config.sink.pattern)
    origin, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    begin = planner.start(_NOTHING, start or config.sink.start, first=False)
    # The newest records as well as the first: what was added to them later is to be learnt, too.
    there = Cut({p: max(offset, marks.low[p]) for p, offset in begin.items()})
    newest = Cut({p: max(marks.low[p], end - sample.RECORDS) for p, end in marks.end.items()})
    ranges = planner.waiting(there, sample.RECORDS)
    ranges += [each for each in planner.waiting(newest, sample.RECORDS) if each not in ranges]
    format = sample.format_of(config)
    columns = sample.columns(config, kafka, format, ranges)
    if columns is None and format.schema:
        columns = sample.schema_columns(format)
    if columns is None:
        topics = ", ".join(config.sink.topics) or config.sink.pattern
        raise ConfigError(
            f"cannot name the columns of {topics}: there is no record in it yet",
            hint="give [decode] schema, or start when there are records",
        )
    metadata = Metadata(
        table.topic_column, table.partition_column, table.offset_column, table.timestamp_column,
        KEY, HEADERS,
    )  # fmt: skip
    plan = ReadPlan(
        kafka, format, columns, metadata, duration(config.sink.patience),
        config.sink.fetch == "client",
    )  # fmt: skip
    return Opened(plan, begin, marks.end, origin)


def spark_schema(plan: ReadPlan) -> StructType:
    return from_arrow_schema(plan.target)


class RowSource(DataSource):
    _opened: Opened | None = None

    @classmethod
    def name(cls) -> str:
        return "frazil"

    def schema(self) -> StructType:
        return spark_schema(self._open().plan)

    def reader(self, schema: StructType) -> BatchReader:
        opened = self._open()
        config, given = options_config(self.options), self.options.get("end", "latest")
        end = opened.end if given == "latest" else Cut.of(json.loads(given))
        return BatchReader(opened, end, config)

    def streamReader(self, schema: StructType) -> RowReader:
        opened = self._open()
        if "end" in self.options:
            raise across(ConfigError("cannot stream to an end: `end` is for spark.read"))
        given = options(
            options_config(self.options),
            start=opened.start,
            origin=opened.origin,
            parallelism=os.cpu_count() or 1,
            until=None,
        )
        return RowReader(json.loads(given["plan"]), opened.plan)

    def _open(self) -> Opened:
        """Once: Spark asks for the schema first and hands this object on, pickled, for the rest."""
        if self._opened is None:
            self._opened = self._look()
        return self._opened

    def _look(self) -> Opened:
        try:
            return open_stream(options_config(self.options), _start(self.options.get("start", "")))
        except FrazilError as error:
            raise across(error) from None


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
                raise ConfigError(f"cannot read option {key!r}: expected config, start, end, or "
                                  "section.key as in the config file")  # fmt: skip
            continue
        inside = document.setdefault(section, [{}] if section == "table" else {})
        inside = inside[0] if section == "table" else inside
        if section == "decode" and name.startswith("registry."):
            inside, name = inside.setdefault("registry", {}), name.removeprefix("registry.")
        inside[name] = value.split(",") if (section, name) == ("sink", "topics") else value
    document["sink"] = {"id": "read", **document.get("sink", {})}
    document["table"] = [{"name": "none.none", **each} for each in document.get("table") or [{}]]
    return configs.from_document(document, base)


class RowReader(RangeReader):
    """A stream whose rows are records."""

    def __init__(self, plan: Mapping[str, Any], rows: ReadPlan) -> None:
        super().__init__(plan)
        self._rows = rows

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        topic, number, start, end, *_ = partition.value
        return _rows(self._rows, Range(Partition(topic, number), start, end))


class BatchReader(DataSourceReader):
    def __init__(self, opened: Opened, end: Cut, config: Config) -> None:
        self._plan = opened.plan
        for partition, offset in end.items():
            begin, last = opened.start.get(partition), opened.end.get(partition)
            if begin is None or last is None or not begin <= offset <= last:
                fact = f"the stream's range is [{begin}, {last})"
                raise across(ConfigError(f"cannot read {partition} to offset {offset}: {fact}"))
        ranges = [Range(p, start, end[p]) for p, start in opened.start.items() if p in end]
        self._pieces = split(
            ranges, most=config.sink.max_records_per_task, parallelism=os.cpu_count() or 1
        )

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(each) for each in self._pieces] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _rows(self._plan, partition.value)


def _rows(plan: ReadPlan, wanted: Range | None) -> Iterator[pa.RecordBatch]:
    if wanted is None:
        return
    try:
        yield from read(plan, wanted, lambda _: None)
    except FrazilError as error:
        raise across(error) from None
