"""Startup of a run of a sink: it fences earlier runs off, and recovers their state.

The table is the checkpoint. The ledger of the index decides which run is the newest (`claim`); the
ledgers and the staged batches decide where the stream continues (`recover`). Nothing else counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from frazil.commit.batch_chain import chain, preceding
from frazil.commit.committer import Located
from frazil.commit.protocol import TableCommitter, ledger_tag, not_shown
from frazil.commit.rewind import refuse_unfinished
from frazil.commit.tables import SinkTable, SinkTables, parallel_map, refuse_unsupported
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.errors import ConfigError, Expired, Fatal, FrazilError, Gap, IdentityMismatch
from frazil.iceberg import schema
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.kafka.planner import TopicIdentity
from frazil.ledger import entry as ledger
from frazil.ledger import index, staged_batch
from frazil.ledger.entry import LedgerEntry, Snapshot
from frazil.ledger.sink_state import REPLAY, announced_tables
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut, Partition, Range
from frazil.pipeline.projection import NO_METADATA
from frazil.sources.base import BatchSource, StreamPosition

#: Reads of a table before it counts as restored to an older state.
_READS = 4


@dataclass(frozen=True, slots=True)
class Recovered:
    """State that earlier runs left."""

    position: Cut
    #: batches that continue from the position, and need not be read again
    staged: Sequence[StagedBatch]
    #: the stream's position behind them, and the number of the next batch
    reached: StreamPosition
    number: int
    #: commits of tables beyond the position that no staged batch explains
    untold: list[Located]
    #: paths of batch records that are no longer needed
    useless: Sequence[str]


def astray(
    target: TableCommitter, indexed: Callable[[], Mapping[Partition, tuple[int, int]]]
) -> FrazilError | None:
    """Why the table is not in the state that the index counts on: it was rolled back, or restored
    to older metadata, which takes ledger and tag back together. `indexed`: where the index's rows
    of the table begin and end."""
    if error := target.strayed():
        return error
    head = target.head()
    if not head.complete:
        return not_shown(target.table.name, target.sink, head.unshown)
    end = head.entry.end if head.entry else Cut()
    lost = [
        Range(p, end.get(p, first), last)
        for p, (first, last) in sorted(indexed().items())
        if end.get(p, first) < last
    ]
    if not lost:
        return None
    return Gap(
        f"cannot go on with table {target.table.name}: it was put back to an older state; the "
        f"index has its rows and the table has not: {', '.join(map(str, lost))}",
        hint="restore the newest state of the table; or take all tables back to where it "
        "stands: `frazil rewind`. Its batches wait, staged",
    )


def unindexed(target: TableCommitter, index_table: str) -> FrazilError | None:
    """Why a sink whose index has no record of this table cannot fill it."""
    entry = target.head().entry
    if entry is None or not any(entry.end.values()):
        return None
    return Gap(
        f"cannot go on: table {target.table.name} holds what sink {target.sink} wrote before, and "
        f"its index {index_table} knows nothing of that",
        hint="restore the index, or use another sink id and other tables",
    )


def forgotten(index_table: str, sink: str) -> FrazilError:
    return Expired(
        f"cannot go on: the index {index_table} has rows of sink {sink}, and its ledger, which "
        f"tells the position, is gone: its tag {ledger_tag(sink)} was removed, and the snapshots "
        "of its entries were expired",
        hint="restore the index; or, where the sink fills one table alone: DELETE FROM "
        f"{index_table} WHERE sink = '{sink}', and the rows are made again of the table's ledger",
    )


class Startup:
    #: the index, for the thread of the stream; `target` has the committer's own handle
    index: JavaTable
    target: TableCommitter
    origin: TopicIdentity
    epoch: int
    _spark: SparkSession

    def __init__(self, config: Config, catalog: JavaCatalog, source: BatchSource[Any]) -> None:
        self.tables = SinkTables(catalog, config, source.template)
        self._config = config
        self._catalog = catalog
        self._source = source
        self._alone = config.one_table
        #: where the index's rows of each table begin and end; None: not read yet
        self._told: dict[str, dict[Partition, tuple[int, int]]] | None = None
        #: missing staged files of the batch that is therefore read again
        self.gone: list[str] = []

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Where the source no longer has offsets that were staged: adds to its error why they are
        read."""
        try:
            yield
        except (Expired, Gap) as error:
            if not self.gone:
                raise
            raise type(error)(
                f"{error.message}; a batch was staged there, and {len(self.gone)} of its files are "
                f"gone, {self.gone[0]} among them",
                hint=error.hint,
            ) from None

    def look(self, spark: SparkSession, tables: Iterable[str]) -> None:
        """Open the existing tables, and `tables`: nothing is claimed, nothing can be written."""
        index_table = self._catalog.load(self._config.index_table)
        entry = self._open_index(index_table) if index_table else None
        self._source.look(spark, entry)
        self._open_tables(entry)
        self.tables.open(tables)
        self.epoch = entry.epoch if entry else 0

    def claim(self, spark: SparkSession) -> None:
        """Fence every earlier run off, the index first: its ledger decides which run is the newest.

        The source is checked before anything is claimed, and the claim on the index records the cut
        this run starts from, so that no later look at Kafka can move it.
        """
        self._spark = spark
        index_table = self._catalog.load(self._config.index_table)
        entry = self._open_index(index_table) if index_table else None
        self._open_tables(entry)
        self.origin = self._source.look(spark, entry)
        for name, columns in self._source.columns.items():
            # The metadata columns are part of the rows: for the table they are ordinary columns.
            self.tables.check(name, columns, NO_METADATA)
        with self.telling():
            self._source.check_resumable(
                lambda: self.recover().reached if entry else StreamPosition()
            )
        if entry is None:
            self._refuse_a_lost_index()
        every = list(self.tables.held.values())
        parallel_map(lambda table: self.tables.refuse_shared(table, self.origin.topics), every)
        if index_table is None:
            entry = self._open_index(self._create_index())
        held = list(self.tables.held.values())
        heads = parallel_map(lambda table: table.target.head().entry, held)
        self.epoch = 1 + max((head.epoch for head in (entry, *heads) if head), default=0)
        self._take(self.target, self._source.start)
        self._told = None  # from here on no other run adds rows
        # Only now: an earlier run that creates a table after this look is already fenced.
        claimed = self.target.head().entry
        self.index.refresh()
        self._refuse_a_forgotten_ledger(claimed)
        self._open_tables(claimed)
        known = self._known(claimed)
        if not self._alone or not known:
            staged: set[str] = set()
            if self.epoch > 1:  # a batch may be staged for a table unknown to the index
                staged = {n for _, batch in self._stored() if batch for n in batch.names}
            self.tables.open(staged)
            for name, table in self.tables.held.items():
                # A table new to the sink may be old: its expired snapshots were not the sink's.
                table.target.claimed_first |= name not in staged and name not in known
        if not self._alone:
            self.tables.compare(known, self._astray)
        # A newer run does not claim the tables it creates. If one of them is among these, its claim
        # on the index is seen here.
        self.still_newest()
        self.tables.take(self.take_table)

    def _refuse_a_lost_index(self) -> None:
        """Before a new one is created. (The ledger of an only table has all that an index has.)"""
        for held in self.tables.held.values() if not self._alone else ():
            self.refuse_unknown(held)

    def _refuse_a_forgotten_ledger(self, claimed: LedgerEntry | None) -> None:
        """The index has rows of this sink, and a ledger that begins with the claim: the tag was
        removed, and the entries that it kept were expired. All rows would be written again."""
        if self.index.made or claimed is None or claimed.batches[1] >= 0:
            return
        sink = self._config.sink.id
        if self.index.plain.rows(["commit_id"], {"sink": [sink]}).num_rows:
            raise forgotten(self.index.name, sink)

    def refuse_unknown(self, held: SinkTable) -> None:
        """Refuse a table that this sink has filled and the index does not know: the position is not
        the table's, so pending and lost offsets in between look the same."""
        if error := unindexed(held.target, self._config.index_table):
            raise error

    def _refuse_unfinished(self) -> None:
        refuse_unfinished(self.index.properties, self._config.sink.id.removesuffix(REPLAY))

    def _open_index(self, table: JavaTable) -> LedgerEntry | None:
        self.index = table
        refuse_unsupported(table)
        self._refuse_unfinished()
        own = self._catalog.load(self._config.index_table)
        if own is None:
            raise IdentityMismatch(f"cannot open table {self._config.index_table}: it is gone")
        # A handle of its own: the committer's thread and Spark's do not share tables.
        self.target = TableCommitter(own, "main", self._config.sink.id, 0, time, claimed_first=True)
        return self.target.head().entry

    def _open_tables(self, entry: LedgerEntry | None) -> None:
        if entry is not None:  # again after a claim: of a rewind and a run, one sees the other
            self._refuse_unfinished()
        from_data = self.tables.announced(self.index) if entry else ()
        self.tables.open(dict.fromkeys([*self.tables.names, *self._known(entry), *from_data]))

    def _known(self, entry: LedgerEntry | None) -> dict[str, str]:
        """The tables that the index counts on: name → uuid."""
        return announced_tables(entry.tables, self.index.properties) if entry else {}

    def _take(
        self, target: TableCommitter, extend: Callable[[Cut], Cut] = lambda position: position
    ) -> LedgerEntry:
        target.epoch = self.epoch
        head = target.claim(extend, cluster=self.origin.cluster, topics=self.origin.topics)
        assert head.entry is not None
        assert head.snapshot is not None
        if target is not self.target and (error := self._astray(target)):
            self._refuse_strayed(target, error)
        target.witness(head.snapshot)
        return head.entry

    def _astray(self, target: TableCommitter) -> FrazilError | None:
        """A catalog may return an older state of a table than of the index. So a table that seems
        to be restored to an older state is read several times before that counts."""
        for attempt in range(_READS):
            # For an only table `_check_table` compares the ledger with the position.
            error = astray(target, lambda: {} if self._alone else self._told_of(target.table.name))
            if error is None:
                break
            if attempt < _READS - 1:
                target.pause(attempt)
        return error

    def _told_of(self, table: str) -> Mapping[Partition, tuple[int, int]]:
        """Where the index's rows of a table begin and end."""
        if self._told is None:
            first = self.index.made and self.epoch == 1  # else another run was faster
            self._told = {} if first else index.ends(self.index_rows(index.ENDS))
        return self._told.get(table, {})

    def index_rows(self, columns: Sequence[str]) -> pa.Table:
        """This sink's rows, from the files themselves; by Spark where only Spark can read them."""
        spark = self._spark
        name, sink = self._config.index_table, self._config.sink.id
        plain = self.index.plain  # errors of the table itself raise here: Spark cannot mend them
        try:
            return plain.rows(columns, {"sink": [sink]})
        except (ConfigError, Fatal):
            catalog = self._config.catalog.name
            spark.catalog.refreshTable(f"{catalog}.{name}")  # a session may cache an older state
            frame = spark.read.table(f"{catalog}.{name}")
            rows = frame.where(frame["sink"] == sink)
            return rows.select(*(column for column in columns if column in frame.columns)).toArrow()

    def take_table(self, held: SinkTable) -> None:
        """Claim a table. Of two sinks that claim it at the same moment, the later one sees the
        claim of the earlier below its own."""
        if not self._take(held.target).end:
            try:
                self.tables.refuse_shared(held, self.origin.topics, walk=True)
            except ConfigError:
                held.target.forget()
                raise

    def _refuse_strayed(self, target: TableCommitter, error: FrazilError) -> None:
        """Raises, unless the ledger of an only table has all that the index counts on."""
        entry = self.target.head().entry
        if self._alone and entry is not None:
            self._check_table(self._known(entry), entry.end)  # names the ranges, if it can
            if target.end.reaches(entry.end):
                return
        raise error

    def _check_table(self, known: Mapping[str, str], position: Cut) -> None:
        """The table that the position counts on must exist, be the same, and not be rolled back."""
        name = self._config.tables[0].name
        if not known:
            self._refuse_a_late_start(position)
            return
        if name not in known:
            raise IdentityMismatch(
                f"cannot go on: sink {self._config.sink.id} fills table {', '.join(known)}; "
                f"the config names {name}",
                hint="use another sink id for another table",
            )
        if name not in self.tables:
            raise IdentityMismatch(
                f"cannot go on: table {name} is gone; the index says that it holds everything "
                f"below {position.nested()}",
                hint="restore the table, or use another sink id to fill a new one from the start",
            )
        held = self.tables[name]
        if held.table.uuid != known[name]:
            raise IdentityMismatch(
                f"cannot go on: table {name} was dropped and made again; expected uuid "
                f"{known[name]}, found {held.table.uuid}",
                hint="restore the table, or use another sink id to fill the new one from the start",
            )
        head = held.target.head()
        if not head.complete:
            raise not_shown(name, self._config.sink.id, head.unshown)
        end = head.entry.end if head.entry else Cut()
        # A partition added by the last claim is not in the table's ledger yet.
        end = Cut({**{p: self._began(p, name) for p in position if p not in end}, **end})
        if not end.reaches(position):
            lost = [Range(p, end.get(p, 0), o) for p, o in position.items() if end.get(p, 0) < o]
            raise Gap(
                f"cannot go on: table {name} was rolled back; the index has its rows and the table "
                f"has not: {', '.join(map(str, lost))}",
                hint="roll the table forward again, or use another sink id",
            )

    def _refuse_a_late_start(self, position: Cut) -> None:
        """A recreated index begins where Kafka does. A table whose ledger ends before that lacks
        the offsets in between: its next commit would raise, but only once a record comes."""
        for name, held in self.tables.held.items():
            end = held.target.end  # of its claim
            lost = [Range(p, o, position[p]) for p, o in end.items() if o < position.get(p, o)]
            if lost:
                raise Gap(
                    f"cannot go on: the index {self._config.index_table} is new, and table {name} "
                    f"ends before Kafka begins; neither has: {', '.join(map(str, lost))}",
                    hint="restore the index, or the newest state of the table; or use another sink "
                    "id and another table",
                )

    def _began(self, partition: Partition, table: str) -> int:
        """Where a partition began, by the index's rows of the table and by its ledger, as far as
        that goes back."""
        began = 0
        for entry, _ in ledger.entries(self.handle().history("main"), self._config.sink.id):
            if partition not in entry.begin:
                break
            began = entry.begin[partition]
        return min(began, self._told_of(table).get(partition, (began,))[0])

    def still_newest(self) -> None:
        """Raises if another run has claimed the index since."""
        # Not with the committer's own handle: this is another thread.
        TableCommitter(self.index, "main", self._config.sink.id, self.epoch, time).still_newest()

    def recover(self) -> Recovered:
        """From the ledgers and the stage folder.

        Before the claim the result may still change; after it all earlier runs are fenced, and it
        is final. The position of a newer run is none to continue from: a table may have been rolled
        back to before it.
        """
        entry = self.target.still_newest()
        if entry is None:
            raise Gap(
                f"cannot go on: the index {self.index.name} was put back to before this run's "
                "claim",
                hint="start the sink again",
            )
        position = entry.end
        known = self._known(entry)
        if self._alone:
            self._check_table(known, position)
        well = [(n, held) for n, held in self.tables.held.items() if n not in self.tables.amiss]
        entries = parallel_map(lambda item: item[1].target.entries_after(position), well)
        after = {name: newer for (name, _), newer in zip(well, entries, strict=True)}
        committed = {i for newer in after.values() for e, _ in newer for i in e.commit_ids}
        first = self.index.made and entry.epoch == 1  # no run was here before
        stored = [] if first and not self._config.sink.staging_location else self._stored()
        place = entry.source[1]
        batches = [batch for _, batch in stored if batch and not _contradicted(batch, after)]
        if self._alone:
            committed |= preceding(
                batches, [newer[0][0].begin for newer in after.values() if newer]
            )
        staged = chain(position, batches, committed, place)
        if self._alone:
            # The table is ahead of the index with no staged batch left: rebuild it from the ledger.
            ids = {batch.commit_id for batch in staged}
            for name, newer in after.items():
                lost = [e for e, _ in newer if e.ranges and not ids & set(e.commit_ids)]
                uuid = self.tables[name].table.uuid
                staged += [index.rebuilt(e, name, uuid) for e in lost]
            staged = chain(position, staged, committed, place)
        whole, self.gone = self._whole(staged, after, committed if self._alone else set())
        waiting, staged = staged[len(whole) :], whole
        self._look_ahead(staged[-1].end if staged else position, position)
        untold = [] if self._alone else self._left_untold(after, staged, position)
        # Torn, superseded, or committed and indexed long ago.
        useful = {batch.commit_id for batch in staged}
        for batch in batches:
            if batch.commit_id not in useful | committed and not position.reaches(batch.end):
                self._refuse_untold(batch, after)
        useful |= {batch.commit_id for batch in waiting}  # until their offsets are committed
        useless = [path for path, batch in stored if batch is None or batch.commit_id not in useful]
        last = staged[-1] if staged else entry
        return Recovered(
            position=position,
            staged=staged,
            reached=StreamPosition(last.end, last.source[1], TopicIdentity.of(last)),
            number=max([entry.batches[1] + 1, *(batch.number + 1 for batch in staged)]),
            untold=untold,
            useless=useless,
        )

    def _whole(
        self,
        staged: Sequence[StagedBatch],
        after: Mapping[str, Sequence[tuple[LedgerEntry, Snapshot]]],
        committed: set[str],
    ) -> tuple[list[StagedBatch], list[str]]:
        """The batches before the first one with missing files that a table has not committed yet,
        and these files. Its offsets, and all behind them, are read again."""
        present = {
            name: committed.union(*(entry.commit_ids for entry, _ in entries))
            for name, entries in after.items()
        }
        for n, batch in enumerate(staged):
            for table in batch.tables:
                if table.name not in present or batch.commit_id in present[table.name]:
                    continue
                gone = self.tables[table.name].target.table.lacking(table.manifests)
                if gone:
                    return list(staged[:n]), gone
        return list(staged), []

    def _refuse_untold(self, batch: StagedBatch, well: Iterable[str]) -> None:
        """The records of the batch come again, with another batch or from Kafka. Raises unless it
        is certain that its tables do not have them."""
        for name in batch.names:
            if name in well and not self.tables[name].target.absent(batch):
                ranges = [tally.range for tally in batch.table(name).tallies]
                raise self.tables[name].target.untold(", ".join(map(str, ranges)))

    def _look_ahead(self, ahead: Cut, position: Cut) -> None:
        """A table can be ahead of the index with no staged batch left to explain it. Give it a
        floor: records below it are read again but not written again."""
        tables = list(self.tables.held.items())
        ends = parallel_map(lambda item: item[1].target.head().entry, tables)
        for (name, held), end in zip(tables, ends, strict=True):
            if name in self.tables.amiss or end is None or ahead.reaches(end.end):
                continue
            if self._alone:
                raise Gap(
                    f"cannot take over sink {self._config.sink.id}: table {name} is ahead of the "
                    f"index, and its ledger does not lead there from {position}"
                )
            held.floor = Cut({p: o for p, o in end.end.items() if o > ahead.get(p, 0)})

    def _left_untold(
        self,
        after: Mapping[str, Sequence[tuple[LedgerEntry, Snapshot]]],
        staged: Sequence[StagedBatch],
        position: Cut,
    ) -> list[Located]:
        """Commits of tables beyond the position that no staged batch explains: the index gets their
        rows from the ledgers, with the next batch. (Unless the entry does not show where in it the
        batches lie that held nothing for the table.)"""
        ids = {batch.commit_id for batch in staged}
        located: list[Located] = []
        for name, entries in after.items():
            for entry, snapshot in entries:
                known = all(
                    (gone := entry.counts(r.partition).elsewhere) == 0
                    or r.start + gone <= position.get(r.partition, 0)
                    for r in entry.ranges
                )
                if entry.ranges and known and not ids & set(entry.commit_ids):
                    batch = index.rebuilt(entry, name, self.tables[name].table.uuid)
                    located.append((batch, {name: snapshot}))
        if located:  # an earlier run may have written them
            condition = {"sink": [self._config.sink.id]}
            rows = self.index.plain.rows(["commit_id", "table_name"], condition).to_pylist()
            indexed = {(row["commit_id"], row["table_name"]) for row in rows}
            located = [pair for pair in located if (pair[0].commit_id, *pair[1]) not in indexed]
        return located

    def _stored(self) -> list[tuple[str, StagedBatch | None]]:
        stored = []
        for path in self.index.listing(self.stage_folder):
            if path.endswith(".json"):
                try:
                    stored.append((path, staged_batch.load(self.index.fetch(path), path)))
                except IdentityMismatch:
                    continue  # a run that is still alive has committed it meanwhile
        return stored

    def widen_index(self) -> None:
        """Add the columns that an index of an older Frazil lacks."""

        def lacking(current: str) -> schema.SchemaUpdate:
            change = schema.update(
                current,
                index.COLUMNS,
                self.index.name,
                spec=self.index.spec,
                format_version=self.index.format_version,
            )
            return replace(change, widen=(), relax=())

        if not self.index.made:
            self.index.evolve(lacking)

    def _create_index(self) -> JavaTable:
        name, config = self._config.index_table, TableConfig(self._config.index_table)
        made = schema.iceberg_schema(index.COLUMNS, NO_METADATA, config)
        spec = '{"spec-id": 0, "fields": []}'
        return self._catalog.create(name, made, spec, properties=index.PROPERTIES)

    def handle(self) -> JavaTable:
        """The committer's own handle of the index."""
        table = self.target.table
        assert isinstance(table, JavaTable)
        return table

    @property
    def stage_folder(self) -> str:
        return staging_folder(self._config, self.index)


def _contradicted(
    batch: StagedBatch, after: Mapping[str, Sequence[tuple[LedgerEntry, Snapshot]]]
) -> bool:
    """Has a table records of this batch from another one? An overtaken run may have staged them
    again: they are read again, each table from its own floor."""
    for name in after.keys() & set(batch.names):
        entries = [entry for entry, _ in after[name]]
        if entries and not any(batch.commit_id in entry.commit_ids for entry in entries):
            begin, end = entries[0].begin, entries[-1].end
            ranges = [tally.range for tally in batch.table(name).tallies]
            if any(
                r.end > begin.get(r.partition, 0) and r.start < end.get(r.partition, 0)
                for r in ranges
            ):
                return True
    return False


def staging_folder(config: Config, index_table: JavaTable | ReadOnlyTable) -> str:
    folder = config.sink.staging_location.rstrip("/") or f"{index_table.location}/stage"
    return f"{folder}/{config.sink.id}/"
