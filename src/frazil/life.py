"""How a life of a sink begins: it fences the others off, and finds what they left.

The table is the checkpoint. Who is the newest, the ledger of the index decides (`claim`); where the
stream goes on, the ledgers and the staged batches (`recover`). Nothing else is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from frazil.core.config import Config, TableConfig
from frazil.core.errors import ConfigError, Expired, Foreign, Gap
from frazil.core.offsets import Cut, Partition, Range
from frazil.feed import Feed, Reached
from frazil.ingest import stage
from frazil.ingest.route import Metadata
from frazil.ingest.source import Origin
from frazil.ingest.stage import StagedBatch
from frazil.table import index, ledger, schema
from frazil.table.audit import REPLAY, said_tables
from frazil.table.commit import Target, chain, led_up_to, witness_tag
from frazil.table.committer import Located
from frazil.table.jvm import Catalog, Table
from frazil.table.ledger import Entry, Snapshot
from frazil.table.rewind import refuse_unfinished
from frazil.table.tables import Held, Tables, each_of


@dataclass(frozen=True, slots=True)
class Left:
    """What earlier lives left behind."""

    position: Cut
    #: batches that lead on from the position, and need not be read again
    staged: Sequence[StagedBatch]
    #: where the stream stands with them, and what the next batch is called
    reached: Reached
    number: int
    #: what tables have beyond the position, and no staged batch tells of
    untold: list[Located]
    #: paths of records that are of no use any more
    useless: Sequence[str]


class Life:
    #: the index, as the thread of the stream sees it; `target` has the committer's own handle
    index: Table
    target: Target
    origin: Origin
    epoch: int

    def __init__(self, config: Config, catalog: Catalog, feed: Feed) -> None:
        self.tables = Tables(catalog, config, feed.template)
        self._config = config
        self._catalog = catalog
        self._feed = feed
        self._alone = config.one_table

    def look(self, spark: SparkSession, tables: Iterable[str]) -> None:
        """Open the tables as they are, and these: nothing is claimed, nothing can be written."""
        there = self._catalog.load(self._config.index_table)
        entry = self._open_index(there) if there else None
        self._feed.look(spark, entry)
        self._open_tables(entry)
        self.tables.open(tables)
        self.epoch = entry.epoch if entry else 0

    def claim(self, spark: SparkSession) -> None:
        """Fence every older life off, the index first: its ledger decides who is the newest.

        The source is looked at before anything is claimed, and the claim on the index names the
        cut this life starts from, so that no later look at Kafka can move it.
        """
        index_table = self._catalog.load(self._config.index_table)
        entry = self._open_index(index_table) if index_table else None
        self._open_tables(entry)
        self.origin = self._feed.look(spark, entry)
        self._feed.check(lambda: self.recover().reached if entry else Reached())
        if entry is None:
            self._refuse_a_lost_index()
        every = list(self.tables.held.values())
        each_of(lambda each: self.tables.refuse_shared(each, self.origin.topics), every)
        if index_table is None:
            entry = self._open_index(self._create_index())
        held = list(self.tables.held.values())
        heads = each_of(lambda each: each.target.head().entry, held)
        self.epoch = 1 + max((each.epoch for each in (entry, *heads) if each), default=0)
        self._take(self.target, self._feed.start)
        # Only now: a table that an older life makes after this look finds its maker fenced.
        claimed = self.target.head().entry
        self.index.refresh()
        self._refuse_a_forgotten_ledger(claimed)
        self._open_tables(claimed)
        if not self._alone:
            if self.epoch > 1:  # a batch may be staged for a table the index knows nothing of
                self.tables.open({n for _, each in self._stored() if each for n in each.names})
            self.tables.compare(self._known(claimed))
        # A newer life does not claim the tables it makes. If one of them is among these, its claim
        # on the index is seen here.
        self.still_newest()
        self.tables.take(self.take_table)

    def _refuse_a_lost_index(self) -> None:
        """Before a new one is made. (Of one table alone the ledger tells all that an index has.)"""
        for held in self.tables.held.values() if not self._alone else ():
            self.refuse_unknown(held)

    def _refuse_a_forgotten_ledger(self, claimed: Entry | None) -> None:
        """Rows of this sink, and a ledger that begins with the claim: the witness was removed, and
        the entries that it would have kept were expired. All would be told once more."""
        if self.index.made or claimed is None or claimed.batches[1] >= 0:
            return
        sink, name = self._config.sink.id, self.index.name
        if self.index.plain.rows(["commit_id"], {"sink": [sink]}).num_rows:
            raise Expired(
                f"cannot go on: the index {name} has rows of sink {sink}, and its ledger, which "
                f"tells the position, is gone: its tag {witness_tag(sink)} was removed, and the "
                "snapshots of its entries were expired",
                hint="restore the index; or, where the sink fills one table alone: DELETE FROM "
                f"{name} WHERE sink = '{sink}', and the rows are made again of the table's ledger",
            )

    def refuse_unknown(self, held: Held) -> None:
        """A table that this sink has filled and the index knows nothing of: the position is not its
        own, so what lies between cannot be told from what is lost."""
        there = held.target.head().entry
        if there is not None and any(there.end.values()):
            raise Gap(
                f"cannot go on: table {held.table.name} holds what sink {self._config.sink.id} "
                f"wrote before, and its index {self._config.index_table} knows nothing of that",
                hint="restore the index, or use another sink id and other tables",
            )

    def _refuse_unfinished(self) -> None:
        refuse_unfinished(self.index.properties, self._config.sink.id.removesuffix(REPLAY))

    def _open_index(self, table: Table) -> Entry | None:
        self.index = table
        self._refuse_unfinished()
        own = self._catalog.load(self._config.index_table)
        if own is None:
            raise Foreign(f"cannot open table {self._config.index_table}: it is gone")
        # A handle of its own: the committer's thread and Spark's do not share tables.
        self.target = Target(own, "main", self._config.sink.id, 0, time, claimed_first=True)
        return self.target.head().entry

    def _open_tables(self, entry: Entry | None) -> None:
        if entry is not None:  # and again after a claim: of a rewind and a life, one sees the other
            self._refuse_unfinished()
        from_data = self.tables.announced(self.index) if entry else ()
        self.tables.open(dict.fromkeys([*self.tables.names, *self._known(entry), *from_data]))

    def _known(self, entry: Entry | None) -> dict[str, str]:
        """The tables that the index counts on: name → uuid."""
        return said_tables(entry.tables, self.index.properties) if entry else {}

    def _take(
        self, target: Target, extend: Callable[[Cut], Cut] = lambda position: position
    ) -> Entry:
        target.epoch = self.epoch
        head = target.claim(extend, cluster=self.origin.cluster, topics=self.origin.topics)
        assert head.entry is not None
        assert head.snapshot is not None
        if target is not self.target and target.rolled_back():
            self._refuse_rolled_back(target)
        target.witness(head.snapshot)
        return head.entry

    def take_table(self, held: Held) -> None:
        """Of two sinks that come to a table at the same moment, the later sees the claim of the
        earlier below its own."""
        if not self._take(held.target).end:
            try:
                self.tables.refuse_shared(held, self.origin.topics, walk=True)
            except ConfigError:
                held.target.forget()
                raise

    def _refuse_rolled_back(self, target: Target) -> None:
        """Of one table the ledger may have all that the index counts on, all the same."""
        if self._alone:
            entry = self.target.head().entry
            assert entry is not None
            self._check_table(self._known(entry), entry.end)  # names the ranges, if it can
            if target.end.reaches(entry.end):
                return
        raise Gap(
            f"cannot go on with table {target.table.name}: it was rolled back behind the snapshot "
            "that its witness names",
            hint="roll the table forward again; its batches wait, staged",
        )

    def _check_table(self, known: Mapping[str, str], position: Cut) -> None:
        """The table the position counts on must be there, the same, and not rolled back."""
        name = self._config.tables[0].name
        if not known:
            return
        if name not in known:
            raise Foreign(
                f"cannot go on: sink {self._config.sink.id} fills table {', '.join(known)}; "
                f"the config names {name}",
                hint="use another sink id for another table",
            )
        if name not in self.tables:
            raise Foreign(
                f"cannot go on: table {name} is gone; the index says that it holds everything "
                f"below {position.nested()}",
                hint="restore the table, or use another sink id to fill a new one from the start",
            )
        held = self.tables[name]
        if held.table.uuid != known[name]:
            raise Foreign(
                f"cannot go on: table {name} was dropped and made again; expected uuid "
                f"{known[name]}, found {held.table.uuid}",
                hint="restore the table, or use another sink id to fill the new one from the start",
            )
        head = held.target.head()
        end = head.entry.end if head.entry else Cut()
        # A partition that came with the last claim is not in the table's ledger yet.
        end = Cut({**{p: self._began(p) for p in position if p not in end}, **end})
        if not end.reaches(position):
            lost = [Range(p, end.get(p, 0), o) for p, o in position.items() if end.get(p, 0) < o]
            raise Gap(
                f"cannot go on: table {name} was rolled back; the index has its rows and the table "
                f"has not: {', '.join(map(str, lost))}",
                hint="roll the table forward again, or use another sink id",
            )

    def _began(self, partition: Partition) -> int:
        """Where the index says that a partition began, as far as its history goes back."""
        began = 0
        for entry, _ in ledger.entries(self.handle().history("main"), self._config.sink.id):
            if partition not in entry.begin:
                break
            began = entry.begin[partition]
        return began

    def still_newest(self) -> None:
        """Has no other life claimed the index since?"""
        # Not with the committer's own handle: this is another thread.
        Target(self.index, "main", self._config.sink.id, self.epoch, time).still_newest()

    def recover(self) -> Left:
        """By the ledgers and the stage folder.

        Before the claim this is a look at what may still move; after it all older lives are fenced,
        and what is read here stays as it is. The position of a newer one is none to go on from: a
        table may have been rolled back to before it.
        """
        entry = self.target.still_newest()
        assert entry is not None
        position = entry.end
        known = self._known(entry)
        if self._alone:
            self._check_table(known, position)
        well = [(n, held) for n, held in self.tables.held.items() if n not in self.tables.amiss]
        entries = each_of(lambda item: item[1].target.entries_after(position), well)
        after = {name: found for (name, _), found in zip(well, entries, strict=True)}
        committed = {i for found in after.values() for each, _ in found for i in each.commit_ids}
        first = self.index.made and entry.epoch == 1  # nobody was here before
        stored = [] if first and not self._config.sink.stage else self._stored()
        place = entry.source[1]
        batches = [each for _, each in stored if each and not _contradicted(each, after)]
        if self._alone:
            committed |= led_up_to(
                batches, [found[0][0].begin for found in after.values() if found]
            )
        staged = chain(position, batches, committed, place)
        if self._alone:
            # The table is ahead of the index, and no staged batch tells of it: the ledger does.
            ids = {batch.commit_id for batch in staged}
            for name, found in after.items():
                lost = [e for e, _ in found if e.ranges and not ids & set(e.commit_ids)]
                uuid = self.tables[name].table.uuid
                staged += [index.rebuilt(each, name, uuid) for each in lost]
            staged = chain(position, staged, committed, place)
        self._look_ahead(staged[-1].end if staged else position, position)
        untold = [] if self._alone else self._left_untold(after, staged, position)
        # Torn, superseded, or committed and indexed long ago.
        useful = {batch.commit_id for batch in staged}
        useless = [path for path, batch in stored if batch is None or batch.commit_id not in useful]
        last = staged[-1] if staged else entry
        return Left(
            position=position,
            staged=staged,
            reached=Reached(last.end, last.source[1], Origin(last.cluster, last.topics)),
            number=max([entry.batches[1] + 1, *(batch.number + 1 for batch in staged)]),
            untold=untold,
            useless=useless,
        )

    def _look_ahead(self, ahead: Cut, position: Cut) -> None:
        """A table may have what no staged batch tells of any more. It gets no record twice: each
        has its own floor."""
        tables = list(self.tables.held.items())
        ends = each_of(lambda item: item[1].target.head().entry, tables)
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
        after: Mapping[str, Sequence[tuple[Entry, Snapshot]]],
        staged: Sequence[StagedBatch],
        position: Cut,
    ) -> list[Located]:
        """What tables have beyond the position, and no staged batch tells of: the index gets its
        rows from their ledgers, with the next batch. (Unless the entry does not say where in it the
        batches lie that held nothing for the table.)"""
        ids = {batch.commit_id for batch in staged}
        found: list[Located] = []
        for name, entries in after.items():
            for entry, snapshot in entries:
                known = all(
                    (gone := entry.counts(each.partition).elsewhere) == 0
                    or each.start + gone <= position.get(each.partition, 0)
                    for each in entry.ranges
                )
                if entry.ranges and known and not ids & set(entry.commit_ids):
                    batch = index.rebuilt(entry, name, self.tables[name].table.uuid)
                    found.append((batch, {name: snapshot}))
        if found:  # a life before this one may have had them written
            mine = {"sink": [self._config.sink.id]}
            there = self.index.plain.rows(["commit_id", "table_name"], mine).to_pylist()
            told = {(row["commit_id"], row["table_name"]) for row in there}
            found = [each for each in found if (each[0].commit_id, *each[1]) not in told]
        return found

    def _stored(self) -> list[tuple[str, StagedBatch | None]]:
        found = []
        for path in self.index.listing(self.stage_folder):
            if path.endswith(".json"):
                try:
                    found.append((path, stage.load(self.index.fetch(path))))
                except Foreign:
                    continue  # a life that still runs has committed it meanwhile
        return found

    def widen_index(self) -> None:
        """An index of an older Frazil gets the columns that it lacks."""

        def lacking(there: str) -> schema.Update:
            found = schema.update(there, index.COLUMNS, self.index.name, spec=self.index.spec,
                                  format_version=self.index.format_version)  # fmt: skip
            return replace(found, widen=(), relax=())

        if not self.index.made:
            self.index.evolve(lacking)

    def _create_index(self) -> Table:
        name, config = self._config.index_table, TableConfig(self._config.index_table)
        made = schema.iceberg_schema(index.COLUMNS, Metadata("", "", "", ""), config)
        spec = '{"spec-id": 0, "fields": []}'
        return self._catalog.create(name, made, spec, properties=index.PROPERTIES)

    def handle(self) -> Table:
        """The committer's own."""
        table = self.target.table
        assert isinstance(table, Table)
        return table

    @property
    def stage_folder(self) -> str:
        return stage_folder(self._config, self.index)


def _contradicted(
    batch: StagedBatch, after: Mapping[str, Sequence[tuple[Entry, Snapshot]]]
) -> bool:
    """Has a table got records of it with another batch? An overtaken life may have staged them once
    more: they are read again, each table from its own floor."""
    for name in after.keys() & set(batch.names):
        entries = [entry for entry, _ in after[name]]
        if entries and not any(batch.commit_id in entry.commit_ids for entry in entries):
            begin, end = entries[0].begin, entries[-1].end
            ranges = [tally.range for tally in batch.table(name).tallies]
            if any(
                each.end > begin.get(each.partition, 0) and each.start < end.get(each.partition, 0)
                for each in ranges
            ):
                return True
    return False


def stage_folder(config: Config, index_table: Table) -> str:
    return f"{config.sink.stage.rstrip('/') or f'{index_table.location}/stage'}/{config.sink.id}/"
