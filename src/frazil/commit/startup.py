"""Startup of a run of a sink: it fences earlier runs off, and recovers their state.

The table is the checkpoint. The ledger of the index decides which run is the newest (`claim`); the
ledgers and the staged batches decide where the stream continues (`commit.recovery`). Nothing else
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from frazil.commit.protocol import TableCommitter
from frazil.commit.recovery import Recovered, Recovery
from frazil.commit.rewind_note import refuse_unfinished
from frazil.commit.table_checks import forgotten, index_mismatch, unindexed
from frazil.commit.table_configs import TableConfigs
from frazil.commit.table_schemas import TableSchemas
from frazil.commit.tables import (
    AnnouncedTables,
    SinkTable,
    SinkTables,
    parallel_map,
    refuse_unsupported,
    second_handle,
)
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.errors import ConfigError, Expired, Fatal, FrazilError, Gap
from frazil.iceberg import schema
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.table import SchemaUpdate, Table
from frazil.kafka.planner import TopicIdentity
from frazil.ledger import index
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.sink_state import REPLAY, announced_tables, staging_folder
from frazil.offsets import Cut, Partition
from frazil.pipeline.projection import NO_METADATA
from frazil.sources.base import BatchSource, StreamPosition

#: Reads of a table before it counts as restored to an older state.
_READS = 4


class Startup:
    #: the index, for the thread of the stream; `target` has the committer's own handle
    index: Table
    target: TableCommitter
    origin: TopicIdentity
    epoch: int
    _spark: SparkSession

    def __init__(self, config: Config, catalog: JavaCatalog, source: BatchSource[Any]) -> None:
        self.tables = SinkTables(catalog, config, TableConfigs(config, source.template))
        self.schemas = TableSchemas(catalog, config, self.tables)
        self.announced = AnnouncedTables(config.sink.id, self.tables)
        self._config = config
        self._catalog = catalog
        self._source = source
        self._alone = config.one_table
        #: where the index's rows of each table begin and end; None: not read yet
        self._index_ends: dict[str, dict[Partition, tuple[int, int]]] | None = None
        self._recovery = Recovery(config, self.tables, self._indexed_ends)

    @contextmanager
    def explaining_missing_files(self) -> Iterator[None]:
        """Where the source no longer has offsets that were staged: adds to its error why they are
        read."""
        try:
            yield
        except (Expired, Gap) as error:
            gone = self._recovery.gone
            if not gone:
                raise
            raise type(error)(
                f"{error.message}; files of a batch that was staged there are missing, "
                f"{len(gone)} in number, for example {gone[0]}",
                hint=error.hint,
            ) from None

    def open_readonly(self, spark: SparkSession, tables: Iterable[str]) -> None:
        """Open the existing tables, and `tables`: nothing is claimed, nothing can be written."""
        index_table = self._catalog.load(self._config.index_table)
        entry = self._open_index(index_table) if index_table else None
        self._source.identify(spark, entry)
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
        self.origin = self._source.identify(spark, entry)
        for name, columns in self._source.columns.items():
            # The metadata columns are part of the rows: for the table they are ordinary columns.
            self.schemas.check(name, columns, NO_METADATA)
        for name, columns in self._source.fixed_columns.items():
            self.schemas.check_fixed(name, columns)
        with self.explaining_missing_files():
            self._source.check_resumable(
                lambda: self.recover().reached if entry else StreamPosition()
            )
        if entry is None:
            self._refuse_a_lost_index()
            if index_table is not None:
                self._refuse_a_forgotten_ledger(None)
        every = list(self.tables.held.values())
        parallel_map(lambda table: self.tables.refuse_shared(table, self.origin.topics), every)
        if index_table is None:
            entry = self._open_index(self._create_index())
        held = list(self.tables.held.values())
        heads = parallel_map(lambda table: table.target.head().entry, held)
        self.epoch = 1 + max((head.epoch for head in (entry, *heads) if head), default=0)
        self._claim_target(self.target, self._source.start)
        self._index_ends = None  # from here on no other run adds rows
        # Only now: an earlier run that creates a table after this look is already fenced.
        claimed = self.target.head().entry
        self.index.refresh()
        self._refuse_a_forgotten_ledger(claimed)
        self._open_tables(claimed)
        known = self._known(claimed)
        if not self._alone or not known:
            staged: set[str] = set()
            if self.epoch > 1:  # a batch may be staged for a table unknown to the index
                staged = {n for _, batch in self._recovery.stored() if batch for n in batch.names}
            self.tables.open(staged)
            for name, table in self.tables.held.items():
                # A table new to the sink may be old: its expired snapshots were not the sink's.
                table.target.claimed_first |= name not in staged and name not in known
        if not self._alone:
            self.tables.compare(known, self._mismatch)
        # A newer run does not claim the tables it creates. If one of them is among these, its claim
        # on the index is seen here.
        self.still_newest()
        self.tables.claim_all(self.claim_table)

    def _refuse_a_lost_index(self) -> None:
        """Before a new one is created."""
        for held in self.tables.held.values():
            self.refuse_unknown(held, self._alone)

    def _refuse_a_forgotten_ledger(self, newest: LedgerEntry | None) -> None:
        """The index has rows of this sink, and no ledger, or one that begins with a claim: the tag
        was removed, and the entries that it kept were expired. All rows would be written again."""
        if self.index.made or (newest is not None and newest.batches[1] >= 0):
            return
        sink = self._config.sink.id
        if self.index.readonly.rows(["commit_id"], {"sink": [sink]}).num_rows:
            raise forgotten(self.index.name, sink)

    def refuse_unknown(self, held: SinkTable, alone: bool = False) -> None:
        """Refuse a table that this sink has filled and the index does not know: the position is not
        the table's, so pending and lost offsets in between look the same."""
        if error := unindexed(held.target, self._config.index_table, alone):
            raise error

    def _refuse_unfinished(self) -> None:
        refuse_unfinished(self.index.properties, self._config.sink.id.removesuffix(REPLAY))

    def _open_index(self, table: Table) -> LedgerEntry | None:
        self.index = table
        refuse_unsupported(table)
        self._refuse_unfinished()
        own = second_handle(self._catalog, table)
        self.target = TableCommitter(own, "main", self._config.sink.id, 0, time, claimed_first=True)
        self._recovery.open(table, self.target)
        return self.target.head().entry

    def _open_tables(self, entry: LedgerEntry | None) -> None:
        if entry is not None:  # again after a claim: of a rewind and a run, one sees the other
            self._refuse_unfinished()
        from_data = self.announced.read(self.index) if entry else ()
        names = [*self.tables.configs.names, *self._known(entry), *from_data]
        self.tables.open(dict.fromkeys(names))

    def _known(self, entry: LedgerEntry | None) -> dict[str, str]:
        """The tables that the index counts on: name → uuid."""
        return announced_tables(entry.tables, self.index.properties) if entry else {}

    def _claim_target(
        self, target: TableCommitter, extend: Callable[[Cut], Cut] = lambda position: position
    ) -> LedgerEntry:
        target.epoch = self.epoch
        head = target.claim(extend, cluster=self.origin.cluster, topics=self.origin.topics)
        assert head.entry is not None
        assert head.snapshot is not None
        if target is not self.target and (error := self._mismatch(target)):
            self._refuse_mismatch(target, error)
        target.set_tag(head.snapshot)
        return head.entry

    def _mismatch(self, target: TableCommitter) -> FrazilError | None:
        """A catalog may return an older state of a table than of the index. So a table that seems
        to be restored to an older state is read several times before that counts."""
        for attempt in range(_READS):
            # For an only table `Recovery.check_table` compares the ledger with the position.
            error = index_mismatch(
                target, lambda: {} if self._alone else self._indexed_ends(target.table.name)
            )
            if error is None:
                break
            if attempt < _READS - 1:
                target.pause(attempt)
        return error

    def _indexed_ends(self, table: str) -> Mapping[Partition, tuple[int, int]]:
        """Where the index's rows of a table begin and end."""
        if self._index_ends is None:
            first = self.index.made and self.epoch == 1  # else another run was faster
            self._index_ends = {} if first else index.ends(self.index_rows(index.ENDS))
        return self._index_ends.get(table, {})

    def index_rows(self, columns: Sequence[str]) -> pa.Table:
        """This sink's rows, from the files themselves; by Spark where only Spark can read them."""
        spark = self._spark
        name, sink = self._config.index_table, self._config.sink.id
        plain = self.index.readonly  # errors of the table itself raise here: Spark cannot help
        try:
            return plain.rows(columns, {"sink": [sink]})
        except (ConfigError, Fatal):
            catalog = self._config.catalog.name
            spark.catalog.refreshTable(f"{catalog}.{name}")  # a session may cache an older state
            frame = spark.read.table(f"{catalog}.{name}")
            rows = frame.where(frame["sink"] == sink)
            return rows.select(*(column for column in columns if column in frame.columns)).toArrow()

    def claim_table(self, held: SinkTable) -> None:
        """Claim a table. Of two sinks that claim it at the same moment, the later one sees the
        claim of the earlier below its own."""
        if not self._claim_target(held.target).end:
            try:
                self.tables.refuse_shared(held, self.origin.topics, walk=True)
            except ConfigError:
                held.target.forget()
                raise
        held.target.set_filled(self._config.index_table)

    def _refuse_mismatch(self, target: TableCommitter, error: FrazilError) -> None:
        """Raises, unless the ledger of an only table has all that the index counts on."""
        entry = self.target.head().entry
        if self._alone and entry is not None:
            self._recovery.check_table(self._known(entry), entry.end)  # names the ranges, if it can
            if target.end.reaches(entry.end):
                return
        raise error

    def still_newest(self) -> None:
        """Raises if another run has claimed the index since."""
        # Not with the committer's own handle: this is another thread.
        TableCommitter(self.index, "main", self._config.sink.id, self.epoch, time).still_newest()

    def recover(self) -> Recovered:
        """The state that earlier runs left. Before the claim it may still change; after it all
        earlier runs are fenced, and it is final."""
        return self._recovery.recover()

    def widen_index(self) -> None:
        """Add the columns that an index of an older Frazil lacks."""

        def lacking(current: str) -> SchemaUpdate:
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

    def _create_index(self) -> Table:
        name, config = self._config.index_table, TableConfig(self._config.index_table)
        made = schema.iceberg_schema(index.COLUMNS, NO_METADATA, config)
        spec = '{"spec-id": 0, "fields": []}'
        return self._catalog.create(name, made, spec, properties=index.PROPERTIES)

    @property
    def stage_folder(self) -> str:
        return staging_folder(self._config, self.index)
