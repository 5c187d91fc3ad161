"""`MicroBatches` and `KafkaSource` as they are: one record from the trigger to the committer, with
stand-ins for Spark, Kafka and the catalog. `bench/hops.py` counts the functions on its way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from frazil.commit.staging import Staging
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.files.writer import WriterSpec
from frazil.iceberg.schema import iceberg_schema
from frazil.kafka.fetch import FetchedChunk
from frazil.kafka.planner import TopicIdentity
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline import task
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import deletes_shape
from frazil.retry import Retry
from frazil.sink import MicroBatches
from frazil.sources import kafka
from frazil.sources.base import BatchTables, StreamPosition, StreamState
from frazil.spark.checkpoint import SourceOffsets

P = Partition("events", 0)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
SPEC = '{"spec-id": 0, "fields": []}'


class Spark:
    """Runs the tasks of a batch in this process."""

    def __init__(self) -> None:
        self.sparkSession = self.sparkContext = self

    def parallelize(self, items: Any, _: int) -> Spark:
        self.items = items
        return self

    def mapPartitions(self, run: Any) -> Spark:
        self.items = list(run(self.items))
        return self

    def collect(self) -> Any:
        return self.items


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_one_record_is_planned_written_checked_staged_and_submitted(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    key = ("id",) if mode == "upsert" else ()
    config = Config(
        {"id": "s", "topics": ["events"]},
        {"bootstrap.servers": "b"},
        [{"name": "db.t", "mode": mode, "key": key}],
        decode={"format": "json"},
    )  # type: ignore[arg-type]
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    schema = iceberg_schema(columns, METADATA, TableConfig("db.t", mode=mode, key=key))
    shape = WriterSpec("db.t", str(tmp_path), schema, 0, SPEC, {}, 2**28, "zstd", {})
    deletes = deletes_shape(shape, key, SPEC) if key else None
    plan = TablePlan(shape, METADATA, "", key=key, identifier=key, deletes=deletes)
    stream = StreamState("s", 1, StreamPosition(Cut({P: 0})), 1)
    tables = SimpleNamespace(
        renew=lambda _: None,
        plans=lambda: BatchTables({"db.t": plan}, {}, 1, stream.file_prefix),
        holds_no_records=lambda _: False,
    )
    stored: list[str] = []
    table = SimpleNamespace(
        uuid="u",
        schema_id=0,
        metadata_path=str,
        write_manifest=lambda *_: "",
        store=lambda path, _: stored.append(path),
    )

    class Tables(dict[str, Any]):
        held = property(dict)

    held = Tables({"db.t": SimpleNamespace(table=table, floor={})})
    startup = SimpleNamespace(tables=held, index=table, stage_folder="")
    source = kafka.KafkaSource(config, Retry(1.0, lambda: True), None)  # type: ignore[arg-type]
    source._planner = SimpleNamespace(origin=lambda: (TopicIdentity(), []))  # type: ignore[assignment]
    ends = [SourceOffsets(Cut({P: offset})) for offset in (0, 1)]
    log = SimpleNamespace(before=lambda _: ends[0], after=lambda _: ends[1])
    monkeypatch.setattr(kafka, "Checkpoint", lambda *_, **__: log)
    monkeypatch.setattr(kafka, "HadoopFolder", lambda *_: None)

    def fetch(_: Any, wanted: Range, **__: Any) -> Any:
        keys, headers = pa.array([b"k"], pa.large_binary()), pa.array([[]], HEADERS)
        records = RawRecords([b'{"id": 1}'], np.array([0]), np.array([0]), keys, headers)
        yield FetchedChunk(wanted, None, records, envelope=True)

    monkeypatch.setattr(task, "fetch", fetch)
    submitted: list[Any] = []
    steps: list[str] = []
    MicroBatches(
        source,
        tables,  # type: ignore[arg-type]
        Staging(startup, stream),  # type: ignore[arg-type]
        SimpleNamespace(submit=submitted.append),  # type: ignore[arg-type]
        stream=stream,
        changed=set(),
        retry=Retry(1.0, lambda: True),
        on_step=lambda step: steps.append(step.name),
    ).run(Spark(), 0)  # type: ignore[arg-type]
    assert steps == ["planned", "written", "staged"]
    [batch] = submitted
    [written] = batch.tables
    assert (
        (batch.begin, batch.end) == (Cut({P: 0}), Cut({P: 1})) == (Cut({P: 0}), stream.position.cut)
    )
    assert (written.tallies[0].written, written.tallies[0].balanced) == (1, True)
    assert written.keys == len(key)
    assert stored == [batch.file_name]
