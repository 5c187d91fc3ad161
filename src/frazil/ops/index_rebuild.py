"""`frazil index rebuild`: write the index rows that the ledgers record and the index lacks.

A rebuild makes no claim, and a running sink continues. The rebuild writes rows only below the
sink's position, and runs of the sink write rows only beyond it, so the two never conflict. Two
rebuilds could conflict: a commit succeeds only if nothing but sinks changed the index since it was
read. Otherwise the rebuild starts over.
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

from frazil.commit.protocol import ATTEMPTS, FIRST_PAUSE, TableCommitter
from frazil.commit.rewind_note import refuse_unfinished
from frazil.commit.table_schemas import writer_spec
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Conflict,
    Fatal,
    Retryable,
    Unavailable,
    counted,
)
from frazil.files.writer import WriterSpec
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.table import DataFile, LiveFile, Snapshot
from frazil.ledger import index
from frazil.ledger.entry import PREFIX, LedgerEntry, entries, own_entry
from frazil.ledger.sink_state import REPLAY, STREAM, announced_tables
from frazil.ledger.tags import ledger_tag
from frazil.ops.index_rebuild_plan import (
    COLUMNS,
    LedgerHistory,
    RebuiltRange,
    UnknownRange,
    rebuild,
)
from frazil.render import Line

#: Summary key of a rebuild's snapshot, which is no ledger entry: the id of the rebuild.
REBUILD = f"{PREFIX}rebuild"
#: Number of ranges shown one by one; JSON lists all.
_SHOWN = 20
_KEYS = ("table_name", "topic", "partition", "batch", "start_offset", "commit_id")


@dataclass(frozen=True, slots=True)
class SinkRebuild:
    """The rebuild of one sink's rows."""

    sink: str
    index: str
    #: rows written, and rows replaced by them; in a dry run, those that would be
    written: int
    removed: int
    ranges: tuple[RebuiltRange, ...]
    unknown: tuple[UnknownRange, ...]

    def lines(self, would: str) -> Iterator[Line]:
        for rebuilt in self.ranges[:_SHOWN]:
            yield f"{rebuilt.table}: {rebuilt.range}"
        if len(self.ranges) > _SHOWN:
            yield f"… and {len(self.ranges) - _SHOWN} more"
        for unknown in self.unknown[:_SHOWN]:
            yield (
                f"cannot determine {unknown.table}: {unknown.range or 'everything'}: "
                f"{unknown.reason}"
            )
        if len(self.unknown) > _SHOWN:
            yield f"… and {len(self.unknown) - _SHOWN} more that are unknown"
        yield (
            f"sink {self.sink}: {counted(self.written, 'row')} {would}written, "
            f"{self.removed} {would}replaced in {self.index}"
        )


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """The rebuild of the rows of a sink, and of the sink that replays its dead letters."""

    sinks: tuple[SinkRebuild, ...]
    dry_run: bool

    @property
    def exit_code(self) -> int:
        return 3 if any(rebuilt.unknown for rebuilt in self.sinks) else 0

    def lines(self) -> Iterator[Line]:
        for rebuilt in self.sinks:
            yield from rebuilt.lines("to be " if self.dry_run else "")
        if not self.sinks:
            yield "no sink of this config has written to the index"


def rebuild_index(config: Config, spark: SparkSession, dry_run: bool = False) -> RebuildReport:
    """Rebuild the rows of the sink, and of the sink that replays its dead letters."""
    catalog = JavaCatalog(spark, config.catalog.name)
    table = catalog.load(config.index_table)
    if table is None:
        raise ConfigError(
            f"cannot rebuild the index {config.index_table}: it does not exist",
            hint="restore it: without its ledger no sink knows its position",
        )
    sinks = [config.sink.id, *([config.sink.id + REPLAY] if config.dead_letters else [])]
    rebuilt = [_IndexRebuild(config, spark, catalog, table, sink).run(dry_run) for sink in sinks]
    return RebuildReport(tuple(report for report in rebuilt if report is not None), dry_run)


class _IndexRebuild:
    def __init__(
        self, config: Config, spark: SparkSession, catalog: JavaCatalog, table: JavaTable, sink: str
    ) -> None:
        self._config = config
        self._spark = spark
        self._catalog = catalog
        self._table = table
        self._sink = sink

    def run(self, dry_run: bool) -> SinkRebuild | None:
        """None: the sink never wrote to this index."""
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
            assert base is not None  # there is an entry, so there is a snapshot
            rows = self._rows(base)
            unknown: list[UnknownRange] = []
            plan = rebuild(self._ledgers(entry, rows, unknown), rows, entry.end)
            new = index.rows(plan.located)
            outcome = SinkRebuild(
                self._sink,
                self._table.name,
                len(new),
                len(plan.drop),
                tuple(plan.ranges),
                (*unknown, *plan.unknown),
            )
            if dry_run or not (len(new) or plan.drop):
                return outcome
            try:
                self._commit(entry, base, files, new, rows.take(pa.array(plan.drop, pa.int64())))
                return outcome
            except (Retryable, CommitStateUnknown) as error:
                trouble = error  # another writer was first: read the table again
        assert trouble is not None
        raise Unavailable(
            f"cannot rebuild the index {self._table.name} in {ATTEMPTS} tries: {trouble.message}"
        )

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def _rows(self, base: Snapshot) -> pa.Table:
        """The sink's rows of the index as of a snapshot, with deletes applied."""
        name = f"{self._config.catalog.name}.{self._table.name}"
        frame = self._spark.read.option("versionAsOf", str(base.id)).table(name)
        columns = [name for name in COLUMNS if name in frame.columns]  # some may be dropped
        return frame.where(frame["sink"] == self._sink).select(*columns).toArrow()

    def _ledgers(
        self, entry: LedgerEntry, rows: pa.Table, unknown: list[UnknownRange]
    ) -> list[LedgerHistory]:
        """The ledgers of all tables announced in the index; with several tables, also the index's
        own. Missing tables are added to `unknown`."""
        histories = []
        for name, known in announced_tables(entry.tables, self._table.properties).items():
            table = self._catalog.load(name)
            if table is None or table.uuid != known:
                fact = "does not exist" if table is None else "was dropped and recreated"
                unknown.append(UnknownRange(name, None, f"the table {fact}"))
                continue
            branch = self._config.branch(name)
            tagged = table.tagged(ledger_tag(self._sink, branch))
            snapshots = self._own_snapshots(table.history(branch), tagged)
            histories.append(LedgerHistory(name, table.uuid, snapshots, _files(table, branch)))
        several = pc.any(pc.equal(rows["table_name"], STREAM)).as_py()
        if several or not self._config.one_table:
            history = self._table.history("main")
            index_tagged = self._table.tagged(ledger_tag(self._sink, "main"))
            histories.append(LedgerHistory(STREAM, "", self._own_snapshots(history, index_tagged)))
        return histories

    def _own_snapshots(
        self, history: Iterator[Snapshot], tagged: Snapshot | None
    ) -> list[Snapshot]:
        snapshots = [snapshot for _, snapshot in entries(history, self._sink)]
        # Where the history is expired, the tag keeps the last snapshot.
        return snapshots[::-1] or [snapshot for snapshot in [tagged] if snapshot]

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
            trouble = error  # applied or not: the table shows it below
        self._table.refresh()
        since = takewhile(lambda snapshot: snapshot.id != base.id, self._table.history("main"))
        if not any(snapshot.summary.get(REBUILD) == mark for snapshot in since):
            raise trouble or Conflict(
                "the commit returned, but the table does not have the snapshot"
            )

    def _alone(
        self, base: Snapshot, entry: LedgerEntry
    ) -> Callable[[Iterator[Snapshot]], str | None]:
        """A check for each commit attempt: since `base` only sinks added rows, and this sink is
        still in the same epoch."""

        def check(history: Iterator[Snapshot]) -> str | None:
            for snapshot in history:
                if snapshot.id == base.id:
                    return None
                other = own_entry(snapshot, self._sink)
                if other is not None and other.epoch != entry.epoch:
                    return f"sink {self._sink} has started another run"
                if REBUILD in snapshot.summary or snapshot.operation in ("overwrite", "delete"):
                    return "another writer changed rows of the index"
            return "the snapshot that was read was expired"

        return check


def taken_out(
    shape: WriterSpec,
    files: Sequence[LiveFile],
    gone: Callable[[pa.Table], pa.Array],
    operation: str,
) -> tuple[list[LiveFile], list[pa.Table]]:
    """The index files that contain rows to remove, and the remaining rows of each."""
    removed, left = [], []
    for file in files:
        rows = index.read(shape, [file.path])
        going = gone(rows)
        if not pc.any(going).as_py():
            continue
        if file.deletes or len(rows) != file.rows:
            raise Fatal(
                f"cannot {operation} the index {shape.name}: rows of {file.path} were deleted "
                "by hand",
                hint="rewrite its data files first",
            )
        removed.append(file)
        left.append(rows.filter(pc.invert(going)))
    return removed, left


def _files(table: JavaTable, branch: str) -> Sequence[DataFile]:
    """The live data files if they can be read without Spark: helpful, but optional."""
    try:
        return table.readonly.files(branch)[0]
    except (ConfigError, Fatal, Retryable):
        return ()
