"""Decodes, routes and fits the records of one chunk. Runs on executors.

    bytes ▶ decode ▶ rules ▶ debezium ▶ evolve ▶ route ▶ rows of each table
                └───────┴─────────┴─────────┴───────┴──▶ rejected

In: the records of a chunk: values, keys, headers, offsets and timestamps. Out: `ChunkResult`: rows
in the schema of each table, and a `Rejection` for every record that cannot be decoded, routed or
fitted. Every record is written to all of its tables, skipped by a rule, or rejected by one or more
of its tables. No record is dropped silently.

A table that is missing, or that must change before records fit it, is reported as a need. The
driver collects the needs of all tasks, creates or changes the tables, and runs the batch again.
"""

from __future__ import annotations

from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk_result import ChunkResult, ChunkWork, Rejection
from frazil.pipeline.column_records import ColumnRecords
from frazil.pipeline.json_records import JsonRecords
from frazil.pipeline.routing import NoRoute, Route
from frazil.pipeline.table_plan import ChunkPlan


class ChunkPipeline:
    """Processes the chunks of one task."""

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan
        self._only = Route((plan.only,), None, -1, "")
        kind = JsonRecords if plan.format.kind == "json" else ColumnRecords
        self._records: JsonRecords | ColumnRecords = kind(plan)

    def way(self, partition: Partition) -> Route | NoRoute | None:
        """The route of all records of a partition; None: it depends on the record."""
        rules = self.plan.rules
        return rules.of_topic(partition.kafka_topic) if rules else self._only

    def process(
        self, partition: Partition, opened: RawRecords, below: frozenset[str]
    ) -> ChunkResult:
        """Process one chunk. `below`: tables that already contain its records."""
        rules = self.plan.rules
        changes = rules is not None and rules.changes(partition.kafka_topic)
        work = ChunkWork(partition, opened, below, changes)
        way = self.way(partition)
        if isinstance(way, NoRoute):
            for i in range(len(opened.offsets)):
                work.result.reject(Rejection(i, way.kind, way.reason))
        else:
            self._records.process(work, way)
        useless = work.tombstones_without_table - work.tombstones
        work.result.skipped += len(useless - work.result.rejections.keys())
        work.result.left = [
            (name, self._records.kept(work, name, keys)) for name, keys in work.result.left
        ]
        return work.result
