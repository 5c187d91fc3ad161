"""What `frazil index rebuild` does: what the ledgers tell and the index lacks is written again.

It claims nothing, and a running sink goes on. Below the position no life writes rows any more, and
nothing is written here beyond it; so the two are never in each other's way. Two rebuilds would be:
a commit of this one goes through only if nobody but sinks added something to the index since it was
read, and is begun anew otherwise.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from rich.console import Console

from frazil.commit.protocol import ATTEMPTS, FIRST_PAUSE, TableCommitter
from frazil.commit.rewind import refuse_unfinished
from frazil.commit.tables import ledger_tag_of, writer_spec
from frazil.config.model import Config, TableConfig
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Conflict,
    Fatal,
    Retryable,
    Unavailable,
)
from frazil.files.writer import WriterSpec
from frazil.iceberg.java import JavaCatalog, JavaTable, LiveFile
from frazil.iceberg.static_table import DataFile
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, LedgerEntry, Snapshot, entries, parse
from frazil.ledger.sink_state import REPLAY, STREAM, announced_tables
from frazil.offsets import Range
from frazil.ops.index_rebuild_plan import COLUMNS, LedgerHistory, rebuild
from frazil.ops.locate import branch_of
from frazil.render import counted

#: In the summary of a snapshot that is no entry of a ledger: which rebuild it is.
REBUILD = f"{PREFIX}rebuild"
#: So many ranges are shown one by one; JSON has all of them.
_SHOWN = 20
_KEYS = ("table_name", "topic", "partition", "batch", "start_offset", "commit_id")


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Of one sink."""

    sink: str
    index: str
    #: rows that were written, or would be; and rows that gave way to them
    written: int
    removed: int
    ranges: tuple[tuple[str, Range], ...]
    #: what no ledger tells, or not clearly enough, and why
    unknown: tuple[tuple[str, Range | None, str], ...]

    def values(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "sink": self.sink,
            "index": self.index,
            "written": self.written,
            "removed": self.removed,
            "ranges": [_values(table, each) for table, each in self.ranges],
            "unknown": [
                {**(_values(table, each) if each else {"table": table}), "why": why}
                for table, each, why in self.unknown
            ],
        }


def rebuilt(config: Config, spark: SparkSession, dry: bool = False) -> list[RebuildReport]:
    """The sink's rows, and those of the one that replays its dead letters."""
    catalog = JavaCatalog(spark, config.catalog.name)
    table = catalog.load(config.index_table)
    if table is None:
        raise ConfigError(
            f"cannot rebuild the index {config.index_table}: it does not exist",
            hint="where it was lost, restore it: without its ledger no sink knows its position",
        )
    sinks = [config.sink.id, *([config.sink.id + REPLAY] if config.dead_letters else [])]
    found = [_IndexRebuild(config, spark, catalog, table, sink).outcome(dry) for sink in sinks]
    return [each for each in found if each is not None]


class _IndexRebuild:
    def __init__(
        self, config: Config, spark: SparkSession, catalog: JavaCatalog, table: JavaTable, sink: str
    ) -> None:
        self._config = config
        self._spark = spark
        self._catalog = catalog
        self._table = table
        self._sink = sink
        self._branches = {each.name: each.branch for each in config.tables}

    def outcome(self, dry: bool) -> RebuildReport | None:
        """None: the sink never wrote here."""
        trouble: Retryable | CommitStateUnknown | None = None
        for attempt in range(ATTEMPTS):
            if trouble is not None:
                time.sleep(FIRST_PAUSE * 2**attempt)
            entry = (
                TableCommitter(self._table, "main", self._sink, 0, time, claimed_first=True)
                .head()
                .entry
            )
            if entry is None:
                return None
            doing = f"rebuild the index {self._table.name}"
            refuse_unfinished(self._table.properties, self._sink, doing)
            base, files = self._table.live()
            assert base is not None  # the entry's, or one above it
            rows = self._rows(base)
            unknown: list[tuple[str, Range | None, str]] = []
            found = rebuild(self._told(entry, rows, unknown), rows, entry.end)
            new = index.rows(found.located)
            outcome = RebuildReport(
                self._sink,
                self._table.name,
                len(new),
                len(found.drop),
                tuple(found.ranges),
                (*unknown, *found.unknown),
            )
            if dry or not (len(new) or found.drop):
                return outcome
            try:
                self._commit(entry, base, files, new, rows.take(pa.array(found.drop, pa.int64())))
                return outcome
            except (Retryable, CommitStateUnknown) as error:
                trouble = error  # somebody else was first: what they left must be read
        assert trouble is not None
        raise Unavailable(
            f"cannot rebuild the index {self._table.name} in {ATTEMPTS} tries: {trouble.message}"
        )

    # ── what is there ────────────────────────────────────────────────────────────────────────

    def _rows(self, base: Snapshot) -> pa.Table:
        """The index's of this sink as of a snapshot, without those that somebody deleted."""
        name = f"{self._config.catalog.name}.{self._table.name}"
        frame = self._spark.read.option("versionAsOf", str(base.id)).table(name)
        there = [name for name in COLUMNS if name in frame.columns]  # it may be an older Frazil's
        return frame.where(frame["sink"] == self._sink).select(*there).toArrow()

    def _told(
        self, entry: LedgerEntry, rows: pa.Table, unknown: list[tuple[str, Range | None, str]]
    ) -> list[LedgerHistory]:
        """The ledgers of all tables that the index counts on, and of several its own."""
        found = []
        for name, known in announced_tables(entry.tables, self._table.properties).items():
            table = self._catalog.load(name)
            if table is None or table.uuid != known:
                fact = "is gone" if table is None else "was dropped and made again"
                unknown.append((name, None, f"the table {fact}"))
                continue
            branch = branch_of(self._branches, name)
            witness = table.tagged(ledger_tag_of(self._sink, branch))
            mine = self._mine(table.history(branch), witness)
            found.append(LedgerHistory(name, table.uuid, mine, _files(table, branch)))
        several = pc.any(pc.equal(rows["table_name"], STREAM)).as_py()
        if several or not self._config.one_table:
            history = self._table.history("main")
            tagged = self._table.tagged(ledger_tag_of(self._sink, "main"))
            found.append(LedgerHistory(STREAM, "", self._mine(history, tagged)))
        return found

    def _mine(self, history: Iterator[Snapshot], witness: Snapshot | None) -> list[Snapshot]:
        mine = [snapshot for _, snapshot in entries(history, self._sink)]
        return mine[::-1] or [each for each in [witness] if each]  # of an expired history

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def _commit(
        self,
        entry: LedgerEntry,
        base: Snapshot,
        files: Sequence[LiveFile],
        new: pa.Table,
        drop: pa.Table,
    ) -> None:
        shape = writer_spec(self._table, TableConfig(self._table.name))
        going = set(zip(*(drop[key].to_pylist() for key in _KEYS), strict=True))

        def gone(rows: pa.Table) -> pa.Array:
            keys = zip(*(rows[key].to_pylist() for key in _KEYS), strict=True)
            dropped = pa.array([key in going for key in keys], pa.bool_())
            return pc.and_(pc.equal(rows["sink"], self._sink), dropped)

        removed, rows = taken_out(shape, files, gone, "rebuild") if going else ([], [])
        target = shape.arrow
        fresh = new.select([name for name in new.column_names if name in target.names])
        rows.append(fresh)
        prefix = f"frazil-{self._sink}-{entry.epoch}-{max(0, entry.batches[1])}"
        together = pa.concat_tables(rows, promote_options="permissive")
        added = index.put(shape, prefix, index.ordered(together))
        mark = str(uuid.uuid4())
        trouble: Retryable | CommitStateUnknown | None = None
        try:
            self._table.rewrite(
                removed,
                added,
                {REBUILD: mark},
                since=base.id,
                same=False,
                check=self._alone(base, entry),
                leftovers=[],
            )
        except (Retryable, CommitStateUnknown) as error:
            trouble = error  # applied or not: the table tells
        self._table.refresh()
        since = takewhile(lambda each: each.id != base.id, self._table.history("main"))
        if not any(each.summary.get(REBUILD) == mark for each in since):
            raise trouble or Conflict("the commit returned, and the table does not show it")

    def _alone(
        self, base: Snapshot, entry: LedgerEntry
    ) -> Callable[[Iterator[Snapshot]], str | None]:
        """Did nobody but sinks add something since, in the same life? Asked on each try."""

        def check(history: Iterator[Snapshot]) -> str | None:
            for snapshot in history:
                if snapshot.id == base.id:
                    return None
                theirs = parse(snapshot.summary)
                if theirs is not None and theirs.sink == self._sink and theirs.epoch != entry.epoch:
                    return f"sink {self._sink} has begun another life"
                if REBUILD in snapshot.summary or snapshot.operation in ("overwrite", "delete"):
                    return "somebody else changed rows of the index"
            return "the snapshot that was read is gone"

        return check


def taken_out(
    shape: WriterSpec, files: Sequence[LiveFile], gone: Callable[[pa.Table], pa.Array], what: str
) -> tuple[list[LiveFile], list[pa.Table]]:
    """Those files of the index that have rows that are to go, and what is left of each."""
    removed, left = [], []
    for file in files:
        rows = index.read(shape, [file.path])
        going = gone(rows)
        if not pc.any(going).as_py():
            continue
        if file.deletes or len(rows) != file.rows:
            raise Fatal(
                f"cannot {what} the index {shape.name}: rows of {file.path} were deleted by hand",
                hint="rewrite its data files first",
            )
        removed.append(file)
        left.append(rows.filter(pc.invert(going)))
    return removed, left


def _files(table: JavaTable, branch: str) -> Sequence[DataFile]:
    """The live ones, where they can be read without Spark: they are of help, and not needed."""
    try:
        return table.plain.files(branch)[0]
    except (ConfigError, Fatal, Retryable):
        return ()


def show(found: Sequence[RebuildReport], dry: bool, console: Console) -> None:
    would = "to be " if dry else ""
    for each in found:
        for table, range_ in each.ranges[:_SHOWN]:
            console.print(f"{table}: {range_}", markup=False, highlight=False)
        if len(each.ranges) > _SHOWN:
            console.print(f"… and {len(each.ranges) - _SHOWN} more")
        for table, what, why in each.unknown[:_SHOWN]:
            console.print(
                f"cannot tell: {table}: {what or 'everything'}: {why}",
                markup=False,
                highlight=False,
            )
        if len(each.unknown) > _SHOWN:
            console.print(f"… and {len(each.unknown) - _SHOWN} more that cannot be told")
        console.print(
            f"sink {each.sink}: {counted(each.written, 'row')} {would}written, "
            f"{each.removed} {would}replaced"
            f" in {each.index}",
            highlight=False,
        )
    if not found:
        console.print("no sink of this config has written to the index")


def _values(table: str, range_: Range) -> dict[str, object]:
    return {
        "table": table,
        "topic": range_.partition.topic,
        "partition": range_.partition.number,
        "start": range_.start,
        "end": range_.end,
    }
