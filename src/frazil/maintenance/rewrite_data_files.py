"""Upsert tables stay quick to read: what equality deletes hide is taken out while the stream runs.

Every batch of an upsert table deletes its keys in all that was there before, without looking where
they are. Whoever reads the table must: with each batch a little more. So the life that commits now
and then looks itself, between two commits and on the thread that makes them (`RewriteDataFiles`).

A round is of one snapshot, and its commit is made on that very snapshot or not at all: nobody's
delete can come in between and be missed, and no deleted row comes back (H6).

    data files that deletes count for ─▶ `files.rewrite`, some bytes at a time ─┬▶ new files
    (oldest first)                                                               └▶ gone: positions
    deletes that count for no file any more ─▶ removed, once the positions are written down

Small files, and files of which much is gone, are written anew. Of large ones only the keys are
read, and what is gone is hidden by position: by a deletion vector in format version 3, in 2 by a
file of positions. Of a table that is too large for one round, positions are remembered until no
file is left that needs the oldest deletes. They stay true whatever is committed meanwhile; a new
life finds them again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any, Protocol

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
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, Snapshot
from frazil.maintenance.tasks import MaintainedTable, MaintenanceTask, RewriteAttempt, WallClock

#: In the summary of a snapshot that is no entry of a ledger: which round it is.
COMPACT = f"{PREFIX}compact"
#: A file below this part of the target size is not worth keeping as it is; so many of them in one
#: partition are made one even where nothing is gone.
SMALL, MANY = 8, 16
#: A file of which such a share is gone is written anew.
SHARE = 0.2
#: What one round reads, and what one task of it does; in bytes of the files as they are stored.
ROUND_BYTES, TASK_BYTES = 256 * 1024**2, 64 * 1024**2
#: Deleted keys that wait make a round due, too: as many as this share of the table's rows, but not
#: fewer than these, nor more than those. Readers hold all of them against each file, in memory.
WAITING, FEW_KEYS, MANY_KEYS = 1 / 3, 100_000, 500_000
#: After a round there is none for so many times as long, or as so many seconds: at most two thirds
#: of the time are theirs.
REST, LEAST = 0.5, 0.2


class ManifestRow(Protocol):
    """What a manifest says of a file."""

    @property
    def descriptor(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def everywhere(self) -> bool: ...


class UpsertTable(MaintainedTable, Protocol):
    """What compaction needs of a table."""

    @property
    def format_version(self) -> int: ...
    def contents(
        self, branch: str, known: Mapping[str, list[Any]]
    ) -> tuple[Snapshot | None, dict[str, list[Any]]]: ...
    def replace(
        self,
        removed: Sequence[str],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        since: int,
        leftovers: list[str],
    ) -> None: ...


# ── what is there, and what is due: pure ─────────────────────────────────────────────────────────


#: A file may hold several deletion vectors: a path, and the place in it.
Id = tuple[str, int]


def id_of(said: Mapping[str, Any]) -> Id:
    return str(said["file-path"]), int(said.get("content-offset") or 0)


class TableFile:
    """A file of data or of deletes, as its manifest describes it."""

    def __init__(self, entry: ManifestRow) -> None:
        self.descriptor = entry.descriptor
        self.sequence = entry.sequence
        self.everywhere = entry.everywhere
        self.said: dict[str, Any] = json.loads(entry.descriptor)
        self.path = str(self.said["file-path"])
        self.rows = int(self.said["record-count"])
        self.bytes = int(self.said["file-size-in-bytes"])
        self.content = str(self.said["content"]).lower().replace("_", "-")
        self.partition = f"{self.said['spec-id']} {json.dumps(self.said.get('partition'))}"
        self.keys = tuple(self.said.get("equality-ids") or ())
        #: of a file of positions: the only data file it speaks of
        self.referenced: str | None = self.said.get("referenced-data-file")
        #: of a data file: the files of positions that hide rows of it
        self.hiding: list[TableFile] = []
        self._spans: dict[int, tuple[Any, Any] | None] = {}

    @property
    def id(self) -> Id:
        return id_of(self.said)

    @property
    def hiding_ids(self) -> frozenset[Id]:
        return frozenset(each.id for each in self.hiding)

    @property
    def masks(self) -> list[TableFile]:
        """Those that hide rows of it alone."""
        return [each for each in self.hiding if each.referenced]

    @property
    def hidden(self) -> int:
        """About how many rows they hide."""
        return sum(each.rows for each in self.masks)

    @property
    def format(self) -> str:
        return str(self.said["file-format"]).lower()

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
        """Bytes of some columns; all of them, where that is not known."""
        sizes = self._map("column-sizes")
        return sum(int(sizes.get(key, self.bytes)) for key in keys)

    def _map(self, name: str) -> dict[int, Any]:
        values = self.said.get(name) or {"keys": (), "values": ()}
        return dict(zip(values["keys"], values["values"], strict=True))


@dataclass(slots=True)
class KnownFiles:
    """Of a data file that stays as it is: what it was held against."""

    #: with which snapshot
    sequence: int
    #: paths of deletes. Not their numbers: a branch may be moved to where others are
    deletes: frozenset[str]
    #: the files that hid rows of it then
    hiding: frozenset[Id]
    #: all that is gone, where it is not written down yet
    gone: Positions | None


class RewriteState:
    """The files of one snapshot, and which deletes count for which data."""

    def __init__(
        self, entries: Iterable[ManifestRow], schema: Schema, known: Mapping[str, KnownFiles]
    ) -> None:
        content: dict[str, list[TableFile]] = {}
        for entry in entries:
            file = TableFile(entry)
            content.setdefault(file.content, []).append(file)
        self.data = content.get("data", [])
        #: by equality
        self.deletes = content.get("equality-deletes", [])
        self._required = {f.field_id: f.field_type for f in schema.fields if f.required}
        hiding: dict[str, list[TableFile]] = {}
        for each in content.get("position-deletes", []):
            hiding.setdefault(each.referenced or each.partition, []).append(each)
        for file in self.data:
            found = [*hiding.get(file.path, ()), *hiding.get(file.partition, ())]
            file.hiding = [each for each in found if each.sequence >= file.sequence]
        #: of files that are there, and that nobody else hid rows of since
        self.known = {
            file.path: fact
            for file in self.data
            if (fact := known.get(file.path)) and fact.hiding == file.hiding_ids
        }

    def since(self, file: TableFile) -> int:
        """When it was last looked at."""
        known = self.known.get(file.path)
        return max(file.sequence, known.sequence if known else 0)

    def counts(self, delete: TableFile, file: TableFile, written: bool = False) -> bool:
        """May the delete hide a row of the file that is not known to be gone, or not `written`
        down to be?"""
        known = self.known.get(file.path)
        if known is not None and written and known.gone is not None:
            known = None
        return (
            delete.sequence > file.sequence
            and (known is None or delete.path not in known.deletes)
            and (delete.everywhere or delete.partition == file.partition)
            and self._meet(delete, file)
        )

    def _meet(self, delete: TableFile, file: TableFile) -> bool:
        """Do their keys overlap? Bounds tell, but nothing of nulls."""
        for key in delete.keys:
            if kind := self._required.get(key):
                one, other = delete.span(key, kind), file.span(key, kind)
                if one and other and (one[0] > other[1] or one[1] < other[0]):
                    return False
        return True


def chosen(state: RewriteState, target: int, most: int = ROUND_BYTES) -> list[TableFile]:
    """The data files of this round, those first that were not looked at for longest: the oldest
    deletes count for no others, and go when they are done."""
    keys = {key for each in state.deletes for key in each.keys}
    small = {file.path for file in state.data if file.bytes * SMALL < target}
    crowds = Counter(file.partition for file in state.data if file.path in small)
    found: list[TableFile] = []
    for file in sorted(state.data, key=state.since):
        due = (
            (file.path in small and crowds[file.partition] >= MANY)
            or file.hidden >= SHARE * file.rows
            or any(state.counts(delete, file) for delete in state.deletes)
        )
        if not due or file.format != "parquet":  # of another's file nothing is known
            continue
        most -= file.bytes if file.path in small else file.cost(keys)
        if most < 0 and found:
            break
        found.append(file)
    return found


def enough(rows: int) -> int:
    """So many deleted keys are too many to wait, in a table of so many rows."""
    return min(MANY_KEYS, max(FEW_KEYS, int(rows * WAITING)))


def jobs(
    state: RewriteState,
    files: Sequence[TableFile],
    shape: WriterSpec,
    prefix: str,
    room: int = TASK_BYTES,
) -> list[RewriteJob]:
    """The files in tasks, each partition's together, with the deletes that may count for them."""
    target = shape.target_file_size
    local = not all(each.everywhere for each in state.deletes)
    found: list[RewriteJob] = []
    ordered = sorted(files, key=lambda each: (each.partition, each.sequence))
    for _, some in groupby(ordered, key=lambda each: each.partition if local else ""):
        for part in _parts(list(some), room):
            # What was found and not written down yet is found again: its deletes are still there.
            deletes = tuple(
                EqualityDelete(each.path, each.sequence, each.keys)
                for each in state.deletes
                if any(state.counts(each, file, written=True) for file in part)
            )
            sources = tuple(_source(file, target) for file in part)
            found.append(RewriteJob(shape, prefix, sources, deletes, SHARE, room))
    return found


def _parts(files: Sequence[TableFile], room: int) -> Iterator[list[TableFile]]:
    part: list[TableFile] = []
    for file in files:
        if part and sum(each.bytes for each in part) + file.bytes > room:
            yield part
            part = []
        part.append(file)
    yield part


def _source(file: TableFile, target: int) -> SourceFile:
    hiding = []
    for each in file.hiding:
        at = each.said.get("content-offset")
        place = None if at is None else (int(at), int(each.said["content-size-in-bytes"]))
        hiding.append(AppliedDeletes(each.path, place))
    small, first = file.bytes * SMALL < target, file.said.get("first-row-id")
    return SourceFile(file.path, file.rows, file.bytes, file.sequence, small, tuple(hiding), first)


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


class RewriteDataFiles(MaintenanceTask):
    """Of one upsert table and one life of a sink. `tidy` is called after its commits."""

    def __init__(
        self,
        table: UpsertTable,
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
        clock: WallClock = time,
        most: int = ROUND_BYTES,
    ) -> None:
        """`after`: so many commits with deletes make a round due, fewer of large ones; or those
        with "data", if these are `counted`, where nothing is deleted and files are only many.
        `run`: where the work is done, on executors or here. `table` is the handle of the thread
        that commits."""
        super().__init__(table, sink=sink, epoch=epoch, mark=COMPACT, branch=branch, clock=clock)
        self._table = table
        self._shape = shape
        self._prefix = prefix
        self._after_commits = after
        kind = "equality-delete" if counted == "deletes" else "data"
        self._counted = f"added-{kind}-files"
        self._run = run
        self._step = step
        self._most = most
        self._waiting = after  # what earlier lives left is looked at first
        self._keys = 0
        self._rest = 0.0
        self._seen = 0
        self._manifests: dict[str, list[Any]] = {}
        self._known: dict[str, KnownFiles] = {}

    def work(self) -> float | None:
        began = self._clock.monotonic()
        if not self._due():
            return None
        if began < self._rest:
            return self._rest
        self._table.refresh()
        if self.newest_life()(self._table.history(self._branch)):
            return None  # a newer life looks after it; the next commit will tell this one
        base, self._manifests = self._table.contents(self._branch, self._manifests)
        if base is not None and not self._round(base):
            self._waiting = self._keys = 0
        now = self._clock.monotonic()
        self._rest = now + REST * max(LEAST, now - began)
        return self._rest if self._due() else None

    def _due(self) -> bool:
        """Were there enough commits with deletes since all was well, or enough keys in them?"""
        newest = next(self._table.history(self._branch), None)
        if newest is None:
            return False
        if self._seen:
            history = self._table.history(self._branch)
            fresh = [each.summary for each in takewhile(lambda s: s.id != self._seen, history)]
            self._waiting += sum(self._counted in each for each in fresh)
            self._keys += sum(int(each.get("added-equality-deletes", 0)) for each in fresh)
        self._seen = newest.id
        rows = int(newest.summary.get("total-records", 0))
        return self._waiting >= self._after_commits or self._keys >= enough(rows)

    def _round(self, base: Snapshot) -> bool:
        """Is there more to do?"""
        shape = self._shape()
        entries = (each for some in self._manifests.values() for each in some)
        state = RewriteState(entries, Schema.model_validate_json(shape.schema), self._known)
        self._known = state.known
        self._refuse(state)
        files = {each.path: each for each in chosen(state, shape.target_file_size, self._most)}
        planned = jobs(state, list(files.values()), shape, self._prefix())
        done = list(self._run(planned)) if planned else []
        deletes = frozenset(each.path for each in state.deletes)
        for each in done:
            for path, gone in each.gone.items():
                self._known[path] = KnownFiles(
                    base.sequence, deletes, files[path].hiding_ids, gone if len(gone) else None
                )
        replaced = {path: files[path] for each in done for path in each.replaced}
        state.data = [file for file in state.data if file.path not in replaced]
        spent = [
            each
            for each in state.deletes
            if not any(state.counts(each, file) for file in state.data)
        ]
        if spent or replaced:
            self._commit(base, shape, done, [*replaced.values()], spent, state.data)
        return bool(files) and len(spent) < len(state.deletes)

    def _refuse(self, state: RewriteState) -> None:
        for each in (*state.deletes, *(hides for file in state.data for hides in file.hiding)):
            if each.format not in ("parquet", "puffin"):
                raise SchemaMismatch(
                    f"cannot compact table {self._table.name}: expected deletes in "
                    f"Parquet, found {each.format}"
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
        added = [file.descriptor for each in done for file in each.files]
        removed = [*spent]
        for file in replaced:
            removed += [file, *file.masks]
        written: dict[str, KnownFiles] = {}
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
                [each.descriptor for each in removed],
                added,
                {COMPACT: this.id},
                branch=self._branch,
                since=base.id,
                leftovers=this.unneeded,
            ),
        )
        self._known |= written
        self._step("compacted")
