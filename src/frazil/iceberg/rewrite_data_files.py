"""Compacts upsert tables while the stream runs: removes rows that equality deletes hide.

Every batch of an upsert table deletes its keys from all earlier data without locating them. Readers
must locate them, and each batch adds to that cost. So the run that commits compacts the table from
time to time, between two commits and on the thread that commits (`RewriteDataFiles`).

A round reads one snapshot and commits on exactly that snapshot or not at all: no delete of another
writer can come between and be missed, and no deleted row comes back (H6).

    data files that deletes apply to ─▶ `files.rewrite`, in bounded tasks ─┬▶ new files
    (oldest first)                                                          └▶ gone: positions
    deletes that apply to no file any more ─▶ removed, once the positions are committed

Small files, and files with many deleted rows, are rewritten. Of large files only the keys are read,
and deleted rows are hidden by position: with a deletion vector in format version 3, with a position
delete file in version 2. Where a table is too large for one round, positions are kept in memory
until no file needs the oldest deletes. They stay valid whatever is committed meanwhile; a new run
computes them again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from pyiceberg.conversions import from_bytes
from pyiceberg.schema import Schema

from frazil.errors import SchemaMismatch
from frazil.files.rewrite import (
    AppliedDeletes,
    EqualityDelete,
    Positions,
    RewriteJob,
    RewriteResult,
    SourceFile,
    mask,
    rewrite,
)
from frazil.files.writer import WriterSpec
from frazil.iceberg.maintenance_tasks import MaintenanceTask, RewriteAttempt
from frazil.iceberg.table import ManifestEntry, Snapshot, Table
from frazil.ledger import index
from frazil.ledger.entry import PREFIX
from frazil.retry import Clock

#: Summary key of a compaction's snapshot, which is no ledger entry: the id of the round.
COMPACT = f"{PREFIX}compact"
#: A file smaller than target size / SMALL is rewritten rather than masked; MANY of them in one
#: partition are merged even if no row is deleted.
SMALL, MANY = 8, 16
#: A file with this share of deleted rows is rewritten.
SHARE = 0.2
#: Bytes, as stored, that one round and one task of it read.
ROUND_BYTES, TASK_BYTES = 256 * 1024**2, 64 * 1024**2
#: Pending deleted keys make a round due, too: this share of the table's rows, but at least
#: FEW_KEYS and at most MANY_KEYS. Readers hold all of them in memory for each file.
WAITING, FEW_KEYS, MANY_KEYS = 1 / 3, 100_000, 500_000
#: The pause after a round: REST times its duration, counted as at least LEAST seconds. Rounds take
#: at most two thirds of the time.
REST, LEAST = 0.5, 0.2


# ── selection of files: pure ─────────────────────────────────────────────────────────────────────


#: Path and offset: a file may hold several deletion vectors.
Id = tuple[str, int]


def id_of(descriptor: Mapping[str, Any]) -> Id:
    return str(descriptor["file-path"]), int(descriptor.get("content-offset") or 0)


class TableFile:
    """A data or delete file, as its manifest describes it."""

    def __init__(self, entry: ManifestEntry) -> None:
        self.descriptor = entry.descriptor
        self.sequence = entry.sequence
        self.everywhere = entry.everywhere
        self.values: dict[str, Any] = json.loads(entry.descriptor)
        self.path = str(self.values["file-path"])
        self.rows = int(self.values["record-count"])
        self.bytes = int(self.values["file-size-in-bytes"])
        self.content = str(self.values["content"]).lower().replace("_", "-")
        self.partition = f"{self.values['spec-id']} {json.dumps(self.values.get('partition'))}"
        self.keys = tuple(self.values.get("equality-ids") or ())
        #: of a position delete file: the only data file it applies to
        self.referenced: str | None = self.values.get("referenced-data-file")
        #: of a data file: the position deletes that apply to it
        self.hiding: list[TableFile] = []
        self._spans: dict[int, tuple[Any, Any] | None] = {}

    @property
    def id(self) -> Id:
        return id_of(self.values)

    @property
    def hiding_ids(self) -> frozenset[Id]:
        return frozenset(delete.id for delete in self.hiding)

    @property
    def masks(self) -> list[TableFile]:
        """The position deletes that apply to this file only."""
        return [delete for delete in self.hiding if delete.referenced]

    @property
    def hidden(self) -> int:
        """About how many rows the masks hide."""
        return sum(delete.rows for delete in self.masks)

    @property
    def format(self) -> str:
        return str(self.values["file-format"]).lower()

    def span(self, key: int, kind: Any) -> tuple[Any, Any] | None:
        """The lowest and highest value of a column, if they are known."""
        if key not in self._spans:
            bounds = [self._map(name).get(key) for name in ("lower-bounds", "upper-bounds")]
            low, high = bounds
            self._spans[key] = (
                None
                if low is None or high is None
                else (from_bytes(kind, bytes.fromhex(low)), from_bytes(kind, bytes.fromhex(high)))
            )
        return self._spans[key]

    def cost(self, keys: Iterable[int]) -> int:
        """Bytes of the columns `keys`; the file's size for a column of unknown size."""
        sizes = self._map("column-sizes")
        return sum(int(sizes.get(key, self.bytes)) for key in keys)

    def _map(self, name: str) -> dict[int, Any]:
        values = self.values.get(name) or {"keys": (), "values": ()}
        return dict(zip(values["keys"], values["values"], strict=True))


@dataclass(slots=True)
class CheckedFile:
    """The deletes that a data file, not rewritten, was already checked against."""

    #: sequence number of the snapshot of that round
    sequence: int
    #: paths of the deletes. Sequence numbers are not unique: a branch may be rolled back
    deletes: frozenset[str]
    #: the position deletes that applied to it then
    hiding: frozenset[Id]
    #: all deleted positions, until they are committed
    gone: Positions | None


class RewriteState:
    """The files of one snapshot, and which deletes apply to which data files."""

    def __init__(
        self, entries: Iterable[ManifestEntry], schema: Schema, known: Mapping[str, CheckedFile]
    ) -> None:
        content: dict[str, list[TableFile]] = {}
        for entry in entries:
            file = TableFile(entry)
            content.setdefault(file.content, []).append(file)
        self.data = content.get("data", [])
        #: the equality deletes
        self.deletes = content.get("equality-deletes", [])
        self._required = {f.field_id: f.field_type for f in schema.fields if f.required}
        hiding: dict[str, list[TableFile]] = {}
        for delete in content.get("position-deletes", []):
            hiding.setdefault(delete.referenced or delete.partition, []).append(delete)
        for file in self.data:
            deletes = [*hiding.get(file.path, ()), *hiding.get(file.partition, ())]
            file.hiding = [delete for delete in deletes if delete.sequence >= file.sequence]
        #: only of files still in the table, to which no other writer added position deletes since
        self.known = {
            file.path: fact
            for file in self.data
            if (fact := known.get(file.path)) and fact.hiding == file.hiding_ids
        }

    def since(self, file: TableFile) -> int:
        """The sequence number at which a file was last examined."""
        known = self.known.get(file.path)
        return max(file.sequence, known.sequence if known else 0)

    def counts(self, delete: TableFile, file: TableFile, written: bool = False) -> bool:
        """May the delete hide a row of the file that is not known to be deleted? `written`: known
        from committed positions only."""
        known = self.known.get(file.path)
        if known is not None and written and known.gone is not None:
            known = None
        return (
            delete.sequence > file.sequence
            and (known is None or delete.path not in known.deletes)
            and (delete.everywhere or delete.partition == file.partition)
            and self._keys_overlap(delete, file)
        )

    def _keys_overlap(self, delete: TableFile, file: TableFile) -> bool:
        """May their keys overlap, by bounds? Optional columns are ignored: bounds omit nulls."""
        for key in delete.keys:
            if kind := self._required.get(key):
                one, other = delete.span(key, kind), file.span(key, kind)
                if one and other and (one[0] > other[1] or one[1] < other[0]):
                    return False
        return True


def chosen(state: RewriteState, target: int, most: int = ROUND_BYTES) -> list[TableFile]:
    """The data files of this round, the least recently examined first: the oldest deletes apply to
    no others, and can be removed after them."""
    keys = {key for delete in state.deletes for key in delete.keys}
    small = {file.path for file in state.data if file.bytes * SMALL < target}
    crowds = Counter(file.partition for file in state.data if file.path in small)
    files: list[TableFile] = []
    for file in sorted(state.data, key=state.since):
        due = (
            (file.path in small and crowds[file.partition] >= MANY)
            or file.hidden >= SHARE * file.rows
            or any(state.counts(delete, file) for delete in state.deletes)
        )
        if not due or file.format != "parquet":  # other formats are left alone
            continue
        most -= file.bytes if file.path in small else file.cost(keys)
        if most < 0 and files:
            break
        files.append(file)
    return files


def enough(rows: int) -> int:
    """The number of pending deleted keys that makes a round due, in a table of `rows`."""
    return min(MANY_KEYS, max(FEW_KEYS, int(rows * WAITING)))


def jobs(
    state: RewriteState,
    files: Sequence[TableFile],
    shape: WriterSpec,
    prefix: str,
    room: int = TASK_BYTES,
) -> list[RewriteJob]:
    """The files as tasks, grouped by partition, with the deletes that may apply to them."""
    target = shape.target_file_size
    local = not all(delete.everywhere for delete in state.deletes)
    planned: list[RewriteJob] = []
    ordered = sorted(files, key=lambda file: (file.partition, file.sequence))
    for _, some in groupby(ordered, key=lambda file: file.partition if local else ""):
        for part in _parts(list(some), room):
            # Positions that are not committed yet are computed again: their deletes still exist.
            deletes = tuple(
                EqualityDelete(delete.path, delete.sequence, delete.keys)
                for delete in state.deletes
                if any(state.counts(delete, file, written=True) for file in part)
            )
            sources = tuple(_source(file, target) for file in part)
            planned.append(RewriteJob(shape, prefix, sources, deletes, SHARE, room))
    return planned


def _parts(files: Sequence[TableFile], room: int) -> Iterator[list[TableFile]]:
    part: list[TableFile] = []
    for file in files:
        if part and sum(member.bytes for member in part) + file.bytes > room:
            yield part
            part = []
        part.append(file)
    yield part


def _source(file: TableFile, target: int) -> SourceFile:
    hiding = []
    for delete in file.hiding:
        at = delete.values.get("content-offset")
        place = None if at is None else (int(at), int(delete.values["content-size-in-bytes"]))
        hiding.append(AppliedDeletes(delete.path, place))
    small, first = file.bytes * SMALL < target, file.values.get("first-row-id")
    return SourceFile(file.path, file.rows, file.bytes, file.sequence, small, tuple(hiding), first)


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


class RewriteDataFiles(MaintenanceTask):
    """Compaction of one upsert table by one run of a sink, which calls `run_due` after its
    commits."""

    NAME = "rewrite-data-files"

    def __init__(
        self,
        table: Table,
        *,
        sink: str,
        epoch: int,
        shape: Callable[[], WriterSpec],
        prefix: Callable[[], str],
        after: int,
        counted: str = "deletes",
        branch: str = "main",
        run: Callable[[Sequence[RewriteJob]], Iterable[RewriteResult]] = lambda jobs: map(
            rewrite, jobs
        ),
        step: Callable[[str], None] = lambda _: None,
        clock: Clock = time,
        most: int = ROUND_BYTES,
    ) -> None:
        """`after`: the number of commits that makes a round due; many deleted keys make it due
        earlier. `counted`: commits with "deletes", or with "data" for a table that has many files
        and no deletes. `run`: executes the tasks, on executors or in this process. `table`: the
        handle of the thread that commits."""
        super().__init__(table, sink=sink, epoch=epoch, mark=COMPACT, branch=branch, clock=clock)
        self._shape = shape
        self._prefix = prefix
        self._after_commits = after
        kind = "equality-delete" if counted == "deletes" else "data"
        self._counted = f"added-{kind}-files"
        self._run = run
        self._step = step
        self._most = most
        self._waiting = after  # the first round handles deletes of earlier runs
        self._keys = 0
        self._rest_until = 0.0
        self._seen = 0
        self._manifests: dict[str, list[ManifestEntry]] = {}
        self._known: dict[str, CheckedFile] = {}

    def work(self) -> float | None:
        began = self._clock.monotonic()
        if not self._due():
            return None
        if began < self._rest_until:
            return self._rest_until
        self._table.refresh()
        if self.newest_run()(self._table.history(self._branch)):
            return None  # a newer run maintains it; this one is fenced at its next commit
        base, self._manifests = self._table.contents(self._branch, self._manifests)
        if base is not None and not self._round(base):
            self._waiting = self._keys = 0
        now = self._clock.monotonic()
        self._rest_until = now + REST * max(LEAST, now - began)
        return self._rest_until if self._due() else None

    def _due(self) -> bool:
        """Were there enough commits, or enough deleted keys, since the table was compacted?"""
        newest = next(self._table.history(self._branch), None)
        if newest is None:
            return False
        if self._seen:
            history = self._table.history(self._branch)
            fresh = [
                snapshot.summary for snapshot in takewhile(lambda s: s.id != self._seen, history)
            ]
            self._waiting += sum(self._counted in summary for summary in fresh)
            self._keys += sum(int(summary.get("added-equality-deletes", 0)) for summary in fresh)
        self._seen = newest.id
        rows = int(newest.summary.get("total-records", 0))
        return self._waiting >= self._after_commits or self._keys >= enough(rows)

    def _round(self, base: Snapshot) -> bool:
        """Run one round. Is there more to do?"""
        shape = self._shape()
        entries = (entry for some in self._manifests.values() for entry in some)
        state = RewriteState(entries, Schema.model_validate_json(shape.schema), self._known)
        self._known = state.known
        self._refuse(state)
        files = {file.path: file for file in chosen(state, shape.target_file_size, self._most)}
        planned = jobs(state, list(files.values()), shape, self._prefix())
        done = list(self._run(planned)) if planned else []
        deletes = frozenset(delete.path for delete in state.deletes)
        for result in done:
            for path, gone in result.gone.items():
                self._known[path] = CheckedFile(
                    base.sequence, deletes, files[path].hiding_ids, gone if len(gone) else None
                )
        replaced = {path: files[path] for result in done for path in result.replaced}
        state.data = [file for file in state.data if file.path not in replaced]
        spent = [
            delete
            for delete in state.deletes
            if not any(state.counts(delete, file) for file in state.data)
        ]
        if spent or replaced:
            self._commit(base, shape, done, [*replaced.values()], spent, state.data)
        return bool(files) and len(spent) < len(state.deletes)

    def _refuse(self, state: RewriteState) -> None:
        for delete in (*state.deletes, *(hides for file in state.data for hides in file.hiding)):
            if delete.format not in ("parquet", "puffin"):
                raise SchemaMismatch(
                    f"cannot compact table {self._table.name}: expected deletes in "
                    f"Parquet, found {delete.format}"
                )

    def _commit(
        self,
        base: Snapshot,
        shape: WriterSpec,
        done: Sequence[RewriteResult],
        replaced: Sequence[TableFile],
        spent: Sequence[TableFile],
        data: Sequence[TableFile],
    ) -> None:
        added = [file.descriptor for result in done for file in result.files]
        removed = [*spent]
        for file in replaced:
            removed += [file, *file.masks]
        written: dict[str, CheckedFile] = {}
        for file in data if spent else ():
            known = self._known.get(file.path)
            if known is not None and known.gone is not None:
                version, prefix = self._table.format_version, self._prefix()
                made = mask(shape, prefix, version, file.descriptor, known.gone)
                added.append(made)
                removed += file.masks
                hiding = {*known.hiding, id_of(json.loads(made))} - {m.id for m in file.masks}
                written[file.path] = replace(known, hiding=frozenset(hiding), gone=None)
        this = RewriteAttempt(str(uuid.uuid4()), base.id, index.paths(added), [], seen=base.id)
        self._step("compact")
        self.attempt(
            this,
            lambda: self._table.replace(
                [file.descriptor for file in removed],
                added,
                {COMPACT: this.id},
                branch=self._branch,
                since=base.id,
                leftovers=this.unneeded,
            ),
        )
        self._known |= written
        self._step("compacted")
