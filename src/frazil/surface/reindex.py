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

from frazil.core.config import Config, TableConfig
from frazil.core.errors import ConfigError, Conflict, Fatal, Retryable, Unavailable, Unknown
from frazil.core.offsets import Range
from frazil.ingest.write import TableShape
from frazil.surface.locate import branch_of
from frazil.table import index
from frazil.table.audit import REPLAY, said_tables
from frazil.table.commit import ATTEMPTS, FIRST_PAUSE, Target
from frazil.table.jvm import Catalog, Live, Table
from frazil.table.ledger import PREFIX, Entry, Snapshot, entries, parse
from frazil.table.plain import DataFile
from frazil.table.rebuild import COLUMNS, Told, rebuild
from frazil.table.rewind import refuse_unfinished
from frazil.table.tables import shaped, witness_of

#: In the summary of a snapshot that is no entry of a ledger: which rebuild it is.
REBUILD = f"{PREFIX}rebuild"
#: So many ranges are shown one by one; JSON has all of them.
_SHOWN = 20
_KEYS = ("table_name", "topic", "partition", "batch", "start_offset", "commit_id")


@dataclass(frozen=True, slots=True)
class Outcome:
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


def rebuilt(config: Config, spark: SparkSession, dry: bool = False) -> list[Outcome]:
    """The sink's rows, and those of the one that replays its dead letters."""
    catalog = Catalog(spark, config.catalog.name)
    table = catalog.load(config.index_table)
    if table is None:
        raise ConfigError(
            f"cannot rebuild the index {config.index_table}: it does not exist",
            hint="where it was lost, restore it: without its ledger no sink knows its position",
        )
    sinks = [config.sink.id, *([config.sink.id + REPLAY] if config.dead_letters else [])]
    found = [_Rebuilding(config, spark, catalog, table, sink).outcome(dry) for sink in sinks]
    return [each for each in found if each is not None]


class _Rebuilding:
    def __init__(
        self, config: Config, spark: SparkSession, catalog: Catalog, table: Table, sink: str
    ) -> None:
        self._config = config
        self._spark = spark
        self._catalog = catalog
        self._table = table
        self._sink = sink
        self._branches = {each.name: each.branch for each in config.tables}

    def outcome(self, dry: bool) -> Outcome | None:
        """None: the sink never wrote here."""
        trouble: Retryable | Unknown | None = None
        for attempt in range(ATTEMPTS):
            if trouble is not None:
                time.sleep(FIRST_PAUSE * 2**attempt)
            entry = (
                Target(self._table, "main", self._sink, 0, time, claimed_first=True).head().entry
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
            outcome = Outcome(self._sink, self._table.name, len(new), len(found.drop),
                              tuple(found.ranges), (*unknown, *found.unknown))  # fmt: skip
            if dry or not (len(new) or found.drop):
                return outcome
            try:
                self._commit(entry, base, files, new, rows.take(pa.array(found.drop, pa.int64())))
                return outcome
            except (Retryable, Unknown) as error:
                trouble = error  # somebody else was first: what they left must be read
        assert trouble is not None
        raise Unavailable(f"cannot rebuild the index {self._table.name} in {ATTEMPTS} tries: "
                          f"{trouble.message}")  # fmt: skip

    # ── what is there ────────────────────────────────────────────────────────────────────────

    def _rows(self, base: Snapshot) -> pa.Table:
        """The index's of this sink as of a snapshot, without those that somebody deleted."""
        name = f"{self._config.catalog.name}.{self._table.name}"
        frame = self._spark.read.option("versionAsOf", str(base.id)).table(name)
        there = [name for name in COLUMNS if name in frame.columns]  # it may be an older Frazil's
        return frame.where(frame["sink"] == self._sink).select(*there).toArrow()

    def _told(
        self, entry: Entry, rows: pa.Table, unknown: list[tuple[str, Range | None, str]]
    ) -> list[Told]:
        """The ledgers of all tables that the index counts on, and of several its own."""
        found = []
        for name, known in said_tables(entry.tables, self._table.properties).items():
            table = self._catalog.load(name)
            if table is None or table.uuid != known:
                fact = "is gone" if table is None else "was dropped and made again"
                unknown.append((name, None, f"the table {fact}"))
                continue
            branch = branch_of(self._branches, name)
            witness = table.tagged(witness_of(self._sink, branch))
            mine = self._mine(table.history(branch), witness)
            found.append(Told(name, table.uuid, mine, _files(table, branch)))
        several = pc.any(pc.equal(rows["table_name"], index.STREAM)).as_py()
        if several or not self._config.one_table:
            history = self._table.history("main")
            tagged = self._table.tagged(witness_of(self._sink, "main"))
            found.append(Told(index.STREAM, "", self._mine(history, tagged)))
        return found

    def _mine(self, history: Iterator[Snapshot], witness: Snapshot | None) -> list[Snapshot]:
        mine = [snapshot for _, snapshot in entries(history, self._sink)]
        return mine[::-1] or [each for each in [witness] if each]  # of an expired history

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def _commit(
        self, entry: Entry, base: Snapshot, files: Sequence[Live], new: pa.Table, drop: pa.Table
    ) -> None:
        shape = shaped(self._table, TableConfig(self._table.name))
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
        trouble: Retryable | Unknown | None = None
        try:
            self._table.rewrite(
                removed, added, {REBUILD: mark}, since=base.id, same=False,
                check=self._alone(base, entry), leftovers=[],
            )  # fmt: skip
        except (Retryable, Unknown) as error:
            trouble = error  # applied or not: the table tells
        self._table.refresh()
        since = takewhile(lambda each: each.id != base.id, self._table.history("main"))
        if not any(each.summary.get(REBUILD) == mark for each in since):
            raise trouble or Conflict("the commit returned, and the table does not show it")

    def _alone(self, base: Snapshot, entry: Entry) -> Callable[[Iterator[Snapshot]], str | None]:
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
    shape: TableShape, files: Sequence[Live], gone: Callable[[pa.Table], pa.Array], what: str
) -> tuple[list[Live], list[pa.Table]]:
    """Those files of the index that have rows that are to go, and what is left of each."""
    removed, left = [], []
    for file in files:
        rows = index.read(shape, [file.path])
        going = gone(rows)
        if not pc.any(going).as_py():
            continue
        if file.deletes or len(rows) != file.rows:
            raise Fatal(f"cannot {what} the index {shape.name}: rows of {file.path} were deleted "
                        "by hand", hint="rewrite its data files first")  # fmt: skip
        removed.append(file)
        left.append(rows.filter(pc.invert(going)))
    return removed, left


def _files(table: Table, branch: str) -> Sequence[DataFile]:
    """The live ones, where they can be read without Spark: they are of help, and not needed."""
    try:
        return table.plain.files(branch)[0]
    except (ConfigError, Fatal, Retryable):
        return ()


def show(found: Sequence[Outcome], dry: bool, console: Console) -> None:
    would = "to be " if dry else ""
    for each in found:
        for table, range_ in each.ranges[:_SHOWN]:
            console.print(f"{table}: {range_}", markup=False, highlight=False)
        if len(each.ranges) > _SHOWN:
            console.print(f"… and {len(each.ranges) - _SHOWN} more")
        for table, what, why in each.unknown[:_SHOWN]:
            console.print(f"cannot tell: {table}: {what or 'everything'}: {why}", markup=False,
                          highlight=False)  # fmt: skip
        if len(each.unknown) > _SHOWN:
            console.print(f"… and {len(each.unknown) - _SHOWN} more that cannot be told")
        console.print(
            f"sink {each.sink}: {each.written} rows {would}written, {each.removed} {would}replaced"
            f" in {each.index}", highlight=False,
        )  # fmt: skip
    if not found:
        console.print("no sink of this config has written to the index")


def _values(table: str, range_: Range) -> dict[str, object]:
    return {"table": table, "topic": range_.partition.topic, "partition": range_.partition.number,
            "start": range_.start, "end": range_.end}  # fmt: skip
