"""The configuration of each table of a sink, by its own name or by its template. Pure.

The config names a table, or a template (`lake.{value}`) for table names taken from the data. Tables
for dead letters and deleted keys are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from frazil.commit.commit_queue import CommitTrigger
from frazil.config.model import Config
from frazil.config.sections import TableConfig, deleted_keys_table
from frazil.config.units import duration, size
from frazil.errors import ConfigError
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.task import DEAD_LETTER_METADATA


class TableConfigs:
    """`template`: the template of a table name taken from the data."""

    def __init__(self, config: Config, template: Callable[[str], str]) -> None:
        self._template = template
        self._dead_letters = config.dead_letters.table
        self.adapt(config)
        self._deleted_keys_tables = {deleted_keys_table(name) for name in config.versioned_tables}

    def adapt(self, config: Config) -> None:
        """Take over the tables of `config`: the same ones, with other settings of their commits."""
        configs = {table.name: table for table in config.tables}
        if table := config.dead_letters.table:
            configs[table] = TableConfig(
                table,
                topic_column=DEAD_LETTER_METADATA.topic,
                partition_column=DEAD_LETTER_METADATA.partition,
                offset_column=DEAD_LETTER_METADATA.offset,
                timestamp_column=DEAD_LETTER_METADATA.timestamp,
                schema_evolution="fail",
            )
        for versioned in config.tables:
            if versioned.version_column:
                configs[deleted_keys_table(versioned.name)] = TableConfig(
                    deleted_keys_table(versioned.name),
                    topic_column=versioned.topic_column,
                    partition_column=versioned.partition_column,
                    offset_column=versioned.offset_column,
                    timestamp_column=versioned.timestamp_column,
                    compression=versioned.compression,
                    format_version=versioned.format_version,
                    compact_after_commits=versioned.compact_after_commits,
                    commit_interval=versioned.commit_interval,
                    priority=versioned.priority,
                    snapshot_retention=versioned.snapshot_retention,
                )
        self._configs = configs  # at once: other threads read it

    @property
    def names(self) -> list[str]:
        """The tables named in the config, without templates."""
        return [name for name in self._configs if "{" not in name]

    def of(self, name: str) -> TableConfig:
        """The config of the table's own name, or of its template."""
        if name in self._configs:
            return self._configs[name]
        return replace(self._configs[self._template(name)], name=name)

    def is_deleted_keys_table(self, name: str) -> bool:
        """Is it the `_deleted` table of another table?"""
        return bool(self._deleted_keys_tables) and (
            name in self._deleted_keys_tables
            or (name not in self._configs and self._template(name) in self._deleted_keys_tables)
        )

    def configured(self, name: str) -> bool:
        """Does the config contain the table or its template?"""
        try:
            return name in self._configs or self._template(name) in self._configs
        except ConfigError:
            return False

    def metadata(self, name: str) -> MetadataColumns:
        """The columns for a row's topic, partition, offset and timestamp."""
        if name == self._dead_letters:
            return DEAD_LETTER_METADATA
        config = self.of(name)
        return MetadataColumns(
            config.topic_column,
            config.partition_column,
            config.offset_column,
            config.timestamp_column,
        )

    def commit_trigger(self, name: str, interval: float) -> CommitTrigger:
        if not self.configured(name):
            return CommitTrigger(interval)
        from_config = self.of(name)
        return CommitTrigger(
            duration(from_config.commit_interval) if from_config.commit_interval else interval,
            size(from_config.commit_bytes) if from_config.commit_bytes else None,
            from_config.priority,
        )
