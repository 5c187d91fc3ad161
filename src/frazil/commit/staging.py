"""Staging of a batch: its files into manifests, the manifests into a batch record. Driver.

A staged batch is durable and not yet visible: the committer adds its manifests to the tables, in
this run or in a later one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from frazil.commit.startup import Startup
from frazil.commit.tables import parallel_map
from frazil.errors import FrazilError
from frazil.ledger import staged_batch
from frazil.ledger.sink_state import heartbeat_path, heartbeat_paths
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut
from frazil.sources.base import StreamState, TableWriteResult, WriteResult


class Staging:
    """`write` runs on the thread of the batches and keeps no state. `remove` runs on the
    committer's thread, which owns the list of files that wait to be deleted."""

    def __init__(self, startup: Startup, stream: StreamState) -> None:
        self._startup = startup
        self._tables = startup.tables
        self._stream = stream
        self._records: list[str] = []
        self._manifests: list[tuple[str, str]] = []  # table and path

    def write(self, result: WriteResult, window_start_ms: int) -> StagedBatch:
        """File names are unique per attempt. Files left by a failed attempt cannot collide with
        this one; `frazil orphans` removes them."""
        commit_id = str(uuid.uuid4())
        tables = parallel_map(
            lambda item: self._staged_table(*item, commit_id), list(result.tables.items())
        )
        batch = StagedBatch(
            sink=self._stream.sink,
            epoch=self._stream.epoch,
            number=self._stream.number,
            commit_id=commit_id,
            begin=result.begin,
            end=result.end,
            topics=result.origin.topics,
            cluster=result.origin.cluster,
            staged_at_ms=int(time.time() * 1000),
            window_start_ms=window_start_ms,
            source=result.source,
            tables=tuple(tables),
            total=result.total,
            note=result.note,
            leaders=result.origin.leaders,
            already_written=self._already_written(result.begin),
        )
        path = f"{self._startup.stage_folder}{batch.file_name}"
        self._startup.index.store(path, staged_batch.dump(batch))
        return batch

    def _already_written(self, begin: Cut) -> dict[str, Cut]:
        """Table → its floor, where that is beyond `begin`."""
        ahead = {
            name: Cut({p: o for p, o in held.floor.items() if o > begin.get(p, 0)})
            for name, held in list(self._tables.held.items())
            if held.floor
        }
        return {name: cut for name, cut in ahead.items() if cut}

    def _staged_table(self, name: str, written: TableWriteResult, commit_id: str) -> StagedTable:
        table = self._tables[name].table
        manifests, paths = [], []
        for number, files in enumerate((written.files, written.deletes)):
            if files:
                path = table.metadata_path(f"{self._stream.file_prefix}-{commit_id}-m{number}.avro")
                manifests.append(table.write_manifest(path, [f.descriptor for f in files]))
                paths.append(path)
        return StagedTable(
            name=name,
            uuid=table.uuid,
            schema_id=table.schema_id,
            manifests=tuple(manifests),
            paths=tuple(paths),
            files=len(written.files) + len(written.deletes),
            bytes=sum(file.bytes for file in (*written.files, *written.deletes)),
            tallies=written.tallies,
            keys=written.keys,
        )

    def beat(self, content: bytes) -> None:
        """Overwrite the heartbeat of this run. Any thread may call it."""
        path = heartbeat_path(self._startup.stage_folder, self._stream.epoch)
        self._startup.index.store(path, content, overwrite=True)

    def forget_heartbeats(self) -> None:
        """Remove the heartbeats of all runs before the one that this run took over from."""
        index = self._startup.index
        for epoch, path in heartbeat_paths(index, self._startup.stage_folder).items():
            if epoch < self._stream.epoch - 1:
                index.delete(path)

    @property
    def waiting(self) -> bool:
        """Do files wait to be deleted?"""
        return bool(self._records or self._manifests)

    def remove(self, batches: Sequence[StagedBatch], records: Sequence[str] = ()) -> str:
        """Delete the batches' records, these other `records`, and manifests whose files a row delta
        has listed again. Returns why that failed; then it is tried again the next time.

        No guard is asked. A batch record is in the stage folder, and no table refers to it. A batch
        with deleted keys has delete files (its counts were checked against them), so its commit was
        a row delta, which writes manifests of its own: the staged ones are in no snapshot.
        """
        self._records += records
        for batch in batches:
            self._records.append(f"{self._startup.stage_folder}{batch.file_name}")
            self._manifests += [(t.name, path) for t in batch.tables if t.keys for path in t.paths]
        try:
            while self._records:
                self._startup.target.table.delete(self._records[0])
                self._records.pop(0)
            while self._manifests:
                name, path = self._manifests[0]
                if name in self._tables:
                    self._tables[name].target.table.delete(path)
                self._manifests.pop(0)
        except FrazilError as error:
            return error.message
        return ""
