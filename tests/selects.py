"""Records through the pipeline of a config, with tables in memory: no broker, no catalog, no JVM.

Tables are created and changed by the needs of their records, as on the driver, until the records
fit; what comes out are rows in the schema of each table, keys to delete, and rejections.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.config.model import Config, from_document
from frazil.files.writer import WriterSpec
from frazil.iceberg.schema import columns_of, iceberg_schema, identifier_fields, partition_spec
from frazil.iceberg.schema import update as schema_update
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult
from frazil.pipeline.isolation import IsolatingPipeline, StepFailed
from frazil.pipeline.missing_columns import aliases_of
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import deletes_shape
from frazil.sources.base import BatchTables
from frazil.sources.batch_plans import BatchPlans
from tests.roundtrip import applied

HERE = Partition("events", 0)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
TABLE = "db.t"


@dataclass
class Sent:
    """A record; headers as pairs of name and value."""

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)


def config_of(table: dict[str, Any] | None = None, **sections: Any) -> Config:
    return from_document(
        {
            "sink": {"id": "s", "topics": [HERE.topic]},
            "kafka": {"bootstrap.servers": "none:1"},
            "decode": {"format": "json"},
            "catalog": {"type": "rest", "uri": "http://none"},
            "table": [{"name": TABLE, **(table or {})}],
            **sections,
        }
    )


class World:
    """The tables of a config, and what its records made of them."""

    def __init__(self, config: Config, tables: dict[str, pa.Schema] | None = None) -> None:
        self.config = config
        self.plans = BatchPlans(config, {})
        self.schemas: dict[str, str] = {}
        for name, columns in (tables or {}).items():
            self.create(name, columns)
        self.deleted: list[dict[str, Any]] = []
        self.rejections: dict[int, Any] = {}

    def create(self, name: str, columns: pa.Schema) -> None:
        self.schemas[name] = iceberg_schema(columns, METADATA, self._table(name))

    def _table(self, name: str) -> Any:
        template = self.plans.template(name)
        return next(table for table in self.config.tables if table.name == template)

    def columns(self, name: str = TABLE) -> dict[str, Any]:
        """The record's columns of a table: name → type in Iceberg's JSON."""
        beside = {field.name for field in METADATA.fields}
        fields = json.loads(self.schemas[name])["fields"]
        return {field["name"]: field["type"] for field in fields if field["name"] not in beside}

    def table_plan(self, name: str) -> TablePlan:
        table, schema = self._table(name), self.schemas[name]
        spec = partition_spec(schema, table.partition_by, name)
        shape = WriterSpec(name, f"/none/{name}", schema, 0, spec, {}, 2**28, "zstd", {})
        key = table.upsert_key
        return TablePlan(
            shape,
            METADATA,
            "_timestamp",
            table.schema_evolution,
            key=key,
            identifier=identifier_fields(schema),
            log=table.key if not key else (),
            deletes=deletes_shape(shape, key, '{"spec-id": 0, "fields": []}') if key else None,
            order=table.version_column,
            format_version=table.format_version,
        )

    def process(self, opened: RawRecords, isolating: bool = True) -> ChunkResult:
        """One chunk, again after each change of the tables."""
        for _ in range(8):
            plans = {name: self.table_plan(name) for name in self.schemas}
            pipeline = ChunkPipeline(self.plans.plan(BatchTables(plans, {}, 0, "f")))
            process = (IsolatingPipeline(pipeline) if isolating else pipeline).process
            result = process(HERE, opened, frozenset())
            if not result.needs:
                return result
            for name, need in result.needs.items():
                if name not in self.schemas:
                    self.create(name, need)
                else:
                    self._change(name, need)
        raise AssertionError("the tables change for ever")

    def _change(self, name: str, need: pa.Schema) -> None:
        change = schema_update(
            self.schemas[name],
            need,
            name,
            spec='{"fields": []}',
            format_version=2,
            aliases=aliases_of(need),
            beside={field.name for field in METADATA.fields},
        )
        assert change.add or change.widen or change.relax or change.rename, need
        self.schemas[name] = applied(self.schemas[name], change)

    def send(self, *sent: Sent | bytes, table: str = TABLE) -> list[dict[str, Any]]:
        """Rows of the table that these records make, by offset, without metadata but `_offset`."""
        records = [Sent(item) if isinstance(item, bytes) else item for item in sent]
        result = self.process(opened_of(records))
        self.rejections = result.rejections
        self.deleted = rows_of([*result.gone, *result.left], table)
        rows = rows_of(result.rows, table)
        assert not any(isinstance(r.reason, StepFailed) for r in result.rejections.values())
        return rows

    def arrow(self, *sent: Sent) -> pa.Table:
        """The same as one table of Arrow, in the order of the offsets."""
        result = self.process(opened_of(list(sent)))
        self.rejections = result.rejections
        parts = [rows for name, rows in result.rows if name == TABLE]
        empty = columns_of(self.schemas[TABLE]).empty_table()
        return pa.concat_tables(parts or [empty]).sort_by("_offset")


def opened_of(sent: Sequence[Sent]) -> RawRecords:
    count = len(sent)
    return RawRecords(
        [record.value for record in sent],
        np.arange(count, dtype=np.int64),
        np.arange(count, dtype=np.int64) * 1000,
        pa.array([record.key for record in sent], pa.large_binary()),
        pa.array([record.headers for record in sent], HEADERS),
    )


def rows_of(parts: Sequence[tuple[str, pa.Table]], table: str) -> list[dict[str, Any]]:
    beside = {field.name for field in METADATA.fields} - {"_offset"}
    rows = [row for name, part in parts if name == table for row in part.to_pylist()]
    return [
        {name: value for name, value in row.items() if name not in beside}
        for row in sorted(rows, key=lambda row: row["_offset"])
    ]
