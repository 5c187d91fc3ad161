"""Checks of the manifests: the live data files against what was written, and against themselves.

`ManifestCheck`: the rows of the files, by their counts and bounds of the offset columns, are those
that ledger and index report as written, range by range. `ForeignRowCheck`: where other writers
added rows and rows were removed, equal counts prove nothing. `FooterCheck`: a manifest states of a
file what its footer says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from frazil.auditing.history import Evidence, TableHistory
from frazil.auditing.ranges import NOTHING, is_unplaced, joints, spans_of
from frazil.auditing.sink_check import SinkCheck
from frazil.iceberg.foreign_commits import EVERYTHING, reaches
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger.range_columns import RangeColumns, select
from frazil.ledger.sink_state import REPLAY
from frazil.offsets import BATCHES, Partition, Range

#: The most files that are listed one by one.
_FILES = 20
#: All files are rewritten: a filter would skip the files whose bounds are wrong.
_REWRITE = "CALL system.rewrite_data_files(table => '{}', options => map('rewrite-all', 'true'))"
_DOUBT = (
    "another writer changed rows of {{}} ({}): counts and bounds agree, but metadata "
    "cannot prove every offset. Read the rows: frazil audit … --deep"
)
_EXPIRED_DOUBT = (
    "other writers wrote rows of {{}} ({}), and their snapshots were expired: rows may "
    "have been removed, too, so metadata cannot prove every offset. Read the rows: "
    "frazil audit … --deep"
)


class ManifestCheck(SinkCheck):
    """The live data files, against the rows that ledger and index report as written."""

    def __init__(self, evidence: Evidence, table: TableHistory, sink: str) -> None:
        super().__init__(evidence, table, sink)
        #: rows in the files of a partition; None where files mix partitions
        self.in_files: dict[Partition, int | None] = {}

    def run(self) -> None:
        files = self.evidence.files or ()
        self._doubled(files)
        if self.table.upserts:
            self._upserts(files)
            return
        if not self.table.knows(self.sink):
            return
        companion = (
            self.sink.removesuffix(REPLAY) if self.sink.endswith(REPLAY) else self.sink + REPLAY
        )
        writers = {
            name
            for name, parts in self.table.whole.items()
            if name != self.sink and any(part.written.any() for part in parts.values())
        }
        # The name of a file shows which sink wrote it, until it is compacted.
        named = {file.path: _maker(file.path) for file in files}
        maker = named if writers else dict.fromkeys(named, self.sink)
        mixed = any(
            file.partition is None
            and file.nulls < file.rows
            and maker[file.path] in ("", self.sink)
            for file in files
        )
        by_partition: dict[Partition | None, list[DataFile]] = {}
        for file in files:
            by_partition.setdefault(file.partition, []).append(file)
        all_sure = True  # bounds and names alone suffice
        for partition, part in self.whole.items():
            if is_unplaced(partition, part):
                all_sure = all_sure and not part.written.any()
                continue
            if joints(part)[1]:
                continue  # reported already; overlapping rows have no single owner
            group = by_partition.get(partition, [])
            rivals = (self.table.owners(partition) & writers) | ({companion} & writers)
            own = [f for f in group if f.offsets and (not rivals or maker[f.path] == self.sink)]
            sure = not mixed and not any(not maker[f.path] for f in group if rivals)
            sure = sure and all(file.offsets for file in group)
            all_sure = all_sure and sure
            held = sum(file.rows - file.nulls for file in own)
            self.in_files[partition] = held if sure else None
            if sure or not rivals:
                self._segments(partition, part, own, part.written, sure)
                self._homes(partition, [f for f in own if named[f.path] == self.sink])
            if rivals == {companion}:
                # Replayed dead letters have offsets that the table rejected, or that no rule routed
                # to it, or that lie outside.
                near = [file for file in group if file.offsets]
                room = part.written + part.rejected + part.skipped
                self._segments(partition, part, near, room, None)
        self._strays(by_partition)
        if not all_sure or self.evidence.deletes:
            self._sum(files, writers - {companion})

    def _doubled(self, files: Sequence[DataFile]) -> None:
        """Find files, and rows of a compaction, that are in the table twice."""
        times = Counter(file.path for file in files)
        if twice := sorted(path for path, count in times.items() if count > 1):
            ranges = {r for file in files if times[file.path] > 1 and (r := _range_of(file))}
            self.add(
                "overlap",
                f"{len(twice)} data files are in the table twice: {twice[0]}",
                sorted(ranges),
            )
        for rewrite in self.table.others.swollen:
            self.add("overlap", f"a compaction left rows there twice: {rewrite}")

    def _strays(self, by_partition: Mapping[Partition | None, Sequence[DataFile]]) -> None:
        """Find files of partitions that no sink has, in topics that this sink reads."""
        topics = {partition.topic for partition in self.whole}
        for where, strays in by_partition.items():
            if where and where.topic in topics and not self.table.owners(where):
                self.add_ranges(
                    "unaccounted",
                    where,
                    [(f.offsets[0], f.offsets[1] + 1) for f in strays if f.offsets],
                    "data files hold {}, which neither ledger nor index has as written",
                )

    def _upserts(self, files: Sequence[DataFile]) -> None:
        """Every row must be recorded as written by ledger or index. Until a compaction every row
        written is still in the files, though deletes may hide it."""
        table = self.table
        if table.others.removed:
            self.add(
                "unaccounted",
                "rows were removed or hidden by a commit that is not the "
                f"sink's: {_named(table.others.taking)}",
            )
        elif table.others.rows:
            self.add(
                "cannot_tell", "others added rows to this table, of keys that it may have already"
            )
        for commits in table.others.expired:
            self.add(
                "cannot_tell",
                f"others wrote rows into this table ({commits}), of keys that it may have "
                "already, and their snapshots were expired",
            )
        for partition, part in self.whole.items():
            own = [file for file in files if file.partition == partition and file.offsets]
            if partition != BATCHES and not self.unplaced_rows and not joints(part)[1]:
                self._segments(partition, part, own, part.written, False)
                made = [file for file in own if _maker(file.path) == self.sink]
                self._homes(partition, made if not table.others.compacted else [])
        live = sum(file.rows for file in files)
        every = (part for parts in table.whole.values() for part in parts.values())
        written = sum(int(part.written.sum()) for part in every)
        known = table.complete and all(map(table.knows, table.sinks)) and not table.others.removed
        if live > written + table.others.rows or (
            known and not table.others.compacted and live < written
        ):
            self.add(
                "unaccounted",
                f"the manifests hold {live} rows; ledger and index say that {written} were written",
            )

    def _segments(
        self,
        partition: Partition,
        part: RangeColumns,
        files: Sequence[DataFile],
        room: NDArray[np.int64],
        sure: bool | None,
    ) -> None:
        """Compare the rows of the files with the rows written, range by range.

        Files and ranges need not have the same borders: ranges that share a file are compared as
        one. `sure`: no other file can hold rows of the partition; None: rows may lie outside of it.
        """
        if (part.start[1:] < part.start[:-1]).any() or (part.end <= part.start).any():
            order = np.argsort(part.start, kind="stable")
            order = order[part.end[order] > part.start[order]]
            part, room = select(part, order), room[order]
        offsets = np.array([f.offsets for f in files], np.int64).reshape(-1, 2)
        rows = np.array([f.rows - f.nulls for f in files], np.int64)
        low = np.searchsorted(part.start, offsets[:, 0], "right") - 1
        high = np.searchsorted(part.start, offsets[:, 1], "right") - 1
        inside = np.zeros(len(files), bool)
        if len(part):
            inside = (low >= 0) & (offsets[:, 0] < part.end[low]) & (offsets[:, 1] < part.end[high])
        if sure is not None:
            self.add_ranges(
                "unaccounted",
                partition,
                [(a, b + 1) for a, b in offsets[~inside].tolist()],
                "data files hold {}, which neither ledger nor index has as written",
            )
        low, high, rows = low[inside], high[inside], rows[inside]
        covered = np.zeros(len(part) + 1, np.int64)
        if len(low):
            order = np.argsort(low, kind="stable")
            low, high, rows = low[order], np.maximum.accumulate(high[order]), rows[order]
            first = np.flatnonzero(np.append(True, low[1:] > high[:-1]))
            begins, ends = low[first], high[np.append(first[1:], len(low)) - 1]
            np.add.at(covered, begins, 1)
            np.add.at(covered, ends + 1, -1)
            held = np.add.reduceat(rows, first)
            sums = np.append(0, np.cumsum(room))
            wanted = sums[ends + 1] - sums[begins]
            spans = list(zip(part.start[begins].tolist(), part.end[ends].tolist(), strict=True))
            self.add_ranges(
                "overlap",
                partition,
                compress(spans, held > wanted),
                "the files hold more rows of {} than were written",
            )
            if sure:
                self.add_ranges(
                    "unaccounted",
                    partition,
                    compress(spans, held < wanted),
                    "the files hold fewer rows of {} than were written",
                )
        if sure:
            bare = (np.cumsum(covered[:-1]) == 0) & (part.written > 0)
            self.add_ranges("gap", partition, spans_of(part, bare), "no data file holds {}")

    @cached_property
    def entries(self) -> dict[int, int]:
        """Sequence number of a commit → number of its entry in the ledger."""
        return {snapshot.sequence: i for i, snapshot in enumerate(self.ledger.snapshots)}

    def _homes(self, partition: Partition, files: Sequence[DataFile]) -> None:
        """A file that the sink wrote must lie within the ranges of the commit that added it."""
        part = self.ledger.parts.get(partition, NOTHING)
        entry = self.entries
        known = [(f.offsets, entry[f.sequence]) for f in files if f.offsets and f.sequence in entry]
        at = np.searchsorted(part.source, [number for _, number in known])
        index_mismatch = [
            (low, high + 1)
            for ((low, high), number), i in zip(known, at.tolist(), strict=True)
            if i == len(part)
            or part.source[i] != number
            or low < part.start[i]
            or high >= part.end[i]
        ]
        self.add_ranges(
            "unaccounted",
            partition,
            index_mismatch,
            "data files hold {}, outside of what was written by their commit",
        )

    def _sum(self, files: Sequence[DataFile], others: Collection[str]) -> None:
        """Compare the total rows of the table, where bounds cannot separate its writers."""
        if self.evidence.deep is not None:
            return  # `RowCheck` checks every row
        if self.evidence.deletes:
            self.add(
                "unaccounted",
                f"{self.evidence.deletes} delete files hide rows of this "
                "table; which ones, metadata does not say (see --deep)",
            )
            return
        if not all(map(self.table.knows, self.table.sinks)):
            self.add(
                "cannot_tell",
                "another sink writes to this table, whose older snapshots "
                "were expired; its rows are not distinguished",
            )
            return
        table = self.table
        placed, unplaced, topics = self._recorded()
        measured = [file for file in files if file.offsets or file.nulls == file.rows]
        with_offset, between, elsewhere, unclear = _rows_by_topic(measured, topics)
        without = sum(file.nulls for file in measured)
        live = sum(file.rows for file in files)
        unknown = live - sum(file.rows for file in measured)
        if unplaced:  # rows that stand for several records may carry the offset of one of them
            with_offset = between = elsewhere = unclear = without = 0
            unknown = live
        spare = max(0, unplaced - without)  # of the unknown rows, those that must have no offset
        most = with_offset + between + unclear + unknown - spare
        kept = table.complete and not table.others.removed  # then all foreign changes are known
        expected = placed + unplaced + (table.others.rows if kept else elsewhere)
        if (kept and live != expected) or live < expected or most < placed or unknown < spare:
            self.add(
                "unaccounted",
                f"the manifests hold {live} rows; ledger and index say "
                f"{expected}, {placed} of them with offsets",
            )
        elif table.others.taken and (unplaced or unknown):
            self.add("unaccounted", "rows were removed by a commit that is not the sink's")
        elif with_offset > placed:
            self.add(
                "overlap",
                f"the manifests hold {with_offset} rows with offsets; ledger and "
                f"index say {placed}",
            )
        elif (
            (placed and most > placed and (table.others.rows or not kept))
            or (unplaced and not kept and (live > expected or table.others.removed))
            or ((unknown or unclear or between) and (table.others.removed or (placed and not kept)))
        ):
            self.add(
                "cannot_tell",
                "others wrote to this table, or removed rows, and their rows "
                "are not distinguished from the sink's (see --deep)",
            )
        elif others:
            self.add(
                "cannot_tell", "several sinks write to this table; its rows are not distinguished"
            )

    def _recorded(self) -> tuple[int, int, set[str]]:
        """Rows of sinks: with an offset (a replay's too, though it counts batches), and without;
        and the topics that the sinks read."""
        table = self.table
        every = [(sink, *pair) for sink, parts in table.whole.items() for pair in parts.items()]
        placed = unplaced = 0
        topics = {topic for cut in self.evidence.positions.values() for topic in cut.topics}
        for sink, partition, part in every:
            rows = int(part.written.sum())
            if partition != BATCHES:
                topics.add(partition.topic)
                placed += rows
            elif sink.endswith(REPLAY):
                placed += rows
            else:
                unplaced += rows
        return placed, unplaced, topics


class ForeignRowCheck(SinkCheck):
    """Ranges with rows that other writers added."""

    def run(self) -> None:
        """Doubt ranges to which other writers added rows although the counts agree: as many rows
        were removed, either the sink's or theirs. Counts and bounds cannot show which. Files that a
        sink wrote hold what it wrote; only files of other writers are in doubt."""
        strange = [f for f in self.evidence.files or () if _maker(f.path) not in self.table.sinks]
        if self.table.upserts or not strange:
            return
        if not (self.table.others.brought or self.table.others.expired):
            return
        alone = {self.sink} >= {name for name, parts in self.table.whole.items() if parts}
        unplaced = False
        for partition, part in self.whole.items():
            if is_unplaced(partition, part):
                unplaced |= bool(part.written.any())
                continue
            if self.evidence.deep is not None and alone:
                continue  # `RowCheck` checks every row
            foreign = []
            for snapshot, files in self.table.others.brought:
                reach = [EVERYTHING] if files is None else reaches(files, partition)
                foreign += [(*span, snapshot) for span in reach]
            begins, ends = int(part.start[0]), int(part.end.max())
            doubtful = []
            by: dict[int, Snapshot] = {}
            for low, high in reaches(strange, partition):
                met = {s.id: s for a, b, s in foreign if a < high and low < b}
                if met and max(low, begins) < min(high, ends):
                    doubtful.append((max(low, begins), min(high, ends)))
                    by |= met
            says = _DOUBT.format(_named(by.values()))
            self.add_ranges("cannot_tell", partition, _union(doubtful), says)
            self._doubt_expired(partition, (begins, ends), reaches(strange, partition))
        if unplaced and self.table.others.removed and self.table.others.brought:
            self.add(
                "cannot_tell",
                _DOUBT.format(_named(s for s, _ in self.table.others.brought)).format("the table"),
            )
        for commits in self.table.others.expired if unplaced else ():
            self.add("cannot_tell", _EXPIRED_DOUBT.format(commits).format("the table"))

    def _doubt_expired(
        self, partition: Partition, whole: tuple[int, int], strange: Sequence[tuple[int, int]]
    ) -> None:
        """The same for commits whose snapshots are expired: the table records their ranges."""
        begins, ends = whole
        for commits in self.table.others.expired:
            reach = commits.reach(partition)
            doubtful = [
                (max(low, begins), min(high, ends))
                for low, high in strange
                if reach and reach[0] < high and low < reach[1]
            ]
            spans = _union((low, high) for low, high in doubtful if low < high)
            self.add_ranges("cannot_tell", partition, spans, _EXPIRED_DOUBT.format(commits))


class FooterCheck(SinkCheck):
    """The footers of the files, against what manifests state of them."""

    def run(self) -> None:
        """Engines prune files by their manifests: wrong statements there lose rows."""
        statements = self.evidence.misdescribed or ()
        ranges = {f.path: range_ for f in self.evidence.files or () if (range_ := _range_of(f))}
        for path, says in statements[:_FILES]:
            lie = f"the manifest of {path} has wrong statistics ({says}); queries may skip the file"
            self.add(
                "unaccounted",
                f"{lie} ({_REWRITE.format(self.evidence.table)})",
                [ranges[path]] if path in ranges else (),
            )
        if len(statements) > _FILES:
            files = len({path for path, _ in statements})
            self.add(
                "unaccounted",
                f"so do the manifests of {files} files in all, in {len(statements)} statements",
            )


def _rows_by_topic(files: Iterable[DataFile], topics: Collection[str]) -> tuple[int, int, int, int]:
    """Rows with an offset, of files with bounds: in one of the topics that the sinks of the table
    read, in several of them, in another topic, and in an unknown one."""
    with_offset = between = elsewhere = unclear = 0
    for file in files:
        low, high = file.topics or ("", "")
        if low in topics and low == high:
            with_offset += file.rows - file.nulls
        elif low in topics and high in topics:
            between += file.rows - file.nulls
        elif low and low == high:
            elsewhere += file.rows - file.nulls
        else:
            unclear += file.rows - file.nulls
    return with_offset, between, elsewhere, unclear


def _named(snapshots: Iterable[Snapshot]) -> str:
    """The newest three, as text."""
    every = sorted(snapshots, key=lambda snapshot: -snapshot.sequence)
    text = ", ".join(f"snapshot {snapshot.id}, {snapshot.operation}" for snapshot in every[:3])
    return text + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    union: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _range_of(file: DataFile) -> Range | None:
    if file.partition is None or file.offsets is None:
        return None
    return Range(file.partition, file.offsets[0], file.offsets[1] + 1)


def _maker(path: str) -> str:
    """The sink that wrote a data file, by the file's name; empty: unknown."""
    named = re.match(r"frazil-(.+)-\d+-\d+-[0-9a-f-]{36}", path.rsplit("/", 1)[-1])
    return named[1] if named else ""
