"""Maintenance of a sink's tables while it runs: compaction, expiry, merges of index files.

Runs on the committer's thread, after each commit to the index and when a task is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from frazil.commit.startup import Startup
from frazil.commit.table_schemas import writer_spec
from frazil.commit.tables import SinkTable
from frazil.config.model import Config
from frazil.config.sections import NEVER, TableConfig
from frazil.config.units import duration
from frazil.errors import FrazilError
from frazil.iceberg.maintenance_tasks import (
    ExpireSnapshots,
    MaintenanceTask,
    RewriteIndexFiles,
    advice,
    retention,
)
from frazil.iceberg.rewrite_data_files import RewriteDataFiles
from frazil.offsets import Cut
from frazil.sources.base import StreamState
from frazil.steps import MAINTAINED, Step


class TableMaintenance:
    """`position`: the committed one; `on_step`: called at each step of a task."""

    def __init__(
        self,
        config: Config,
        startup: Startup,
        stream: StreamState,
        *,
        position: Callable[[], Cut],
        on_step: Callable[[Step], None],
    ) -> None:
        self._stream = stream
        self._tables = startup.tables
        self._position = position
        self._on_step = on_step
        #: did the task under way change the table?
        self._changed = False
        table = startup.target.table
        merge = RewriteIndexFiles(
            table,
            sink=stream.sink,
            epoch=stream.epoch,
            shape=lambda: writer_spec(table, TableConfig(table.name)),
            prefix=lambda: stream.file_prefix,
            history=duration(config.sink.index_snapshot_retention),
            step=self._step,
            clock=time,
        )
        #: tasks of each table, the index first
        self._tasks: dict[str, list[MaintenanceTask]] = {table.name: [merge]}

    def run(self) -> tuple[list[str], float | None]:
        """Do what is due. Returns what failed, and when to call again even without a new commit. No
        failure stops the stream."""
        for name, held in list(self._tables.held.items()):
            if name not in self._tasks:
                self._tasks[name] = self._tasks_of(name, held)
        errors = []
        for name, tasks in self._tasks.items():
            for task in tasks if name not in self._tables.unhealthy else ():
                errors.append(self._run_due(name, task))
        moments = [task.due_at for tasks in self._tasks.values() for task in tasks]
        again = min((moment for moment in moments if moment is not None), default=None)
        return [error for error in errors if error], again

    def _run_due(self, name: str, task: MaintenanceTask) -> str:
        """Do what is due of one task. Returns the error message, or an empty string."""
        self._changed, failures, removed = False, task.failures, task.removed
        began = time.monotonic()
        try:
            text = task.run_due()
            failed = task.failures > failures
        except Exception as error:
            text, failed = f"cannot maintain {name}: {type(error).__name__}: {error}", True
        removed = task.removed - removed
        if self._changed or failed or removed:
            self._on_step(
                Step(
                    MAINTAINED,
                    self._stream.number,
                    time.time(),
                    seconds={task.NAME: time.monotonic() - began},
                    removed=removed,
                    table=name,
                    error=FrazilError(text) if failed else None,
                )
            )
        return text

    def _step(self, name: str) -> None:
        self._changed = True
        self._on_step(Step(name, self._stream.number, time.time()))

    def _tasks_of(self, name: str, held: SinkTable) -> list[MaintenanceTask]:
        config, table = held.config, held.target.table  # the committer's own handle
        common: dict[str, Any] = {
            "sink": self._stream.sink,
            "epoch": self._stream.epoch,
            "branch": config.branch,
            "step": self._step,
            "clock": time,
        }
        tasks: list[MaintenanceTask] = []
        replaced = bool(config.upsert_key)
        compacted = replaced or self._tables.configs.is_deleted_keys_table(name)
        if compacted and config.compact_after_commits:
            tasks.append(
                RewriteDataFiles(
                    table,
                    **common,
                    shape=lambda: writer_spec(table, config, held.metadata.topic),
                    prefix=lambda: self._stream.file_prefix,
                    after=config.compact_after_commits,
                    counted="deletes" if replaced else "data",
                )
            )
        if config.snapshot_retention != NEVER:
            tasks.append(
                ExpireSnapshots(
                    table,
                    **common,
                    retention=partial(retention, config.snapshot_retention),
                    position=self._position,
                )
            )
        return tasks

    def advice(self) -> list[str]:
        """Suggestions for the owner of tables that existed before the sink."""
        return advice(
            {
                name: (held.config.snapshot_retention, held.table.properties)
                for name, held in self._tables.held.items()
            }
        )
