"""The plan of a batch's tasks: the config and the tables as one value, sent to executors.

`KafkaSource` and `DeadLetterSource` run their records through the same pipeline. Both make their
plans here, and run a batch again here after a failure that a second run can resolve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark import cloudpickle

from frazil.config.messages import within
from frazil.config.model import Config
from frazil.config.sections import TableConfig, deleted_keys_table, replayed
from frazil.config.select import table_selection
from frazil.config.settings import resolve
from frazil.config.units import duration, transform_of
from frazil.errors import ConfigError, Conflict, Unwritable, from_traceback
from frazil.formats import schema_sample
from frazil.iceberg.java_errors import FAILED
from frazil.pipeline.json_source import JsonSource
from frazil.pipeline.missing_columns import add_need
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.selection import SelectPlan
from frazil.pipeline.table_plan import NewTable
from frazil.pipeline.task import BatchPlan, RangeResult
from frazil.sources.base import BatchTables, PlannedBatch
from frazil.sources.range_results import KafkaRun


class BatchPlans:
    """Makes the plans of one run's batches."""

    def __init__(self, config: Config, kafka: Mapping[str, str]) -> None:
        """`kafka`: settings with which tasks fetch records; empty if they fetch none."""
        self._config = config
        self._kafka = kafka
        self._format = schema_sample.format_of(config)
        self._key_format = schema_sample.key_format_of(config)
        self.selects = _selects(config)
        self.rules = _routing_rules(config) if config.routes else None
        #: number of tasks that Spark runs at once
        self.parallelism = 1
        #: the batch whose rows could not be written together
        self._isolated: PlannedBatch | None = None

    @property
    def fixed_columns(self) -> dict[str, pa.Schema]:
        """Table → columns whose types the config says, of tables that it names."""
        keys = self._key_format.declared if self._key_format else pa.schema([])
        sources = {
            table.name: JsonSource(
                self._format, plan.selection if plan else None, keys, table.mode == "changelog"
            )
            for table in self._config.tables
            if "{" not in table.name
            for plan in [self.selects.get(table.name)]
        }
        return {name: source.fixed for name, source in sources.items() if len(source.fixed)}

    def template(self, table: str) -> str:
        """The `[[table]]` that a table was created from."""
        return self.rules.template(table) if self.rules else table

    def plan(self, tables: BatchTables, others: Iterable[str] = ()) -> BatchPlan:
        """`others`: tables named by the data that are not among `tables`."""
        config, plans = self._config, dict(tables.plans)
        dead_letters = plans.pop(config.dead_letters.table, None)
        if self.rules is not None:
            named = {table.name for table in config.tables if "{" not in table.name}
            notes = replayed(config.dead_letters.table)
            made = {*plans, *others} - named - {notes}
            room = max(0, config.sink.max_tables - len(named) - len(made))
            self.rules = self.rules.again(sorted({*made, *tables.refused} - named), room)
        return BatchPlan(
            kafka=self._kafka,
            format=self._format,
            tables=plans,
            keyed={table.name: table.mode for table in config.tables if table.key},
            key_format=self._key_format,
            new={table.name: _new(table) for table in config.tables},
            selects=self.selects,
            buckets=self.parallelism,
            most_records=config.sink.max_records_per_trigger,
            rules=self.rules,
            only=config.tables[0].name,
            dead_letters=dead_letters,
            refused=tables.refused,
            file_prefix=tables.file_prefix,
            batch=tables.number,
            patience=duration(config.sink.unavailable_timeout),
            client=config.sink.kafka_client == "librdkafka",
        )

    def run(
        self,
        planned: PlannedBatch,
        tables: BatchTables,
        tasks: Callable[[BatchPlan], KafkaRun],
        others: Iterable[str] = (),
    ) -> KafkaRun:
        """The results of a batch's tasks; or the request to run it again: in isolation, to find
        records that cannot be written, or with the current files of a table."""
        isolating = self._isolated is planned
        try:
            done = tasks(replace(self.plan(tables, others), isolating=isolating))
        except FAILED as error:
            failure = from_traceback(str(error))
            if isinstance(failure, Unwritable) and not isolating:
                self._isolated = planned
            elif not isinstance(failure, Conflict):
                raise
            # On a conflict a file with versions of keys is gone; other files have its rows.
            return KafkaRun(again=True)
        return replace(done, missing=missing_tables(done.results))


def missing_tables(results: Sequence[RangeResult]) -> dict[str, pa.Schema]:
    missing: dict[str, pa.Schema] = {}
    for result in results:
        for name, columns in result.needs.items():
            add_need(missing, name, columns)
    return missing


def _routing_rules(config: Config) -> RoutingRules:
    names = [table.name for table in config.tables]
    reserved = [config.index_table]
    if table := config.dead_letters.table:
        reserved += [table, replayed(table)]
    reserved += map(deleted_keys_table, config.versioned_tables)
    rules = RoutingRules(config.routes, names, reserved=reserved)
    for module in rules.travelling:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return rules


def _selects(config: Config) -> dict[str, SelectPlan]:
    """The tables that select their columns, with the salts of digests."""
    plans = {}
    for number, table in enumerate(config.tables):
        selection = table_selection(table)
        if selection is None:
            continue
        with within("table", str(number), "select"):
            salts = {salt: resolve("secret of select", salt).encode() for salt in selection.salts}
            if empty := [salt for salt, secret in salts.items() if not secret]:
                raise ConfigError(f"cannot use table {table.name}: the salt {empty[0]} is empty")
            plans[table.name] = SelectPlan(selection, salts)
    return plans


def _new(table: TableConfig) -> NewTable:
    names = (
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
    )
    terms = (
        transform_of(text, f"cannot partition table {table.name} by {text!r}")
        for text in table.partition_by
    )
    hashed = [path for path, word in terms if word.startswith(("bucket", "truncate"))]
    exact = (*table.key, *table.identifier_fields, table.version_column, *hashed)
    return NewTable(
        tuple(name for name in names if name), table.max_columns, tuple(filter(None, exact))
    )
