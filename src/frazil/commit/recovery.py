"""Recovery: the state that earlier runs of a sink left. Runs on the driver, at the start of a run.

In: the ledgers of the index and of the tables, and the staging folder. Out: `Recovered`: the
position, the staged batches that continue from it, the rows that the index still lacks; and a floor
for each table that is ahead of the position. It raises where ledgers, staged batches and tables
contradict each other. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from frazil.commit.batch_chain import chain, preceding
from frazil.commit.committer import Located
from frazil.commit.protocol import TableCommitter, not_shown
from frazil.commit.tables import SinkTables, parallel_map
from frazil.config.model import Config
from frazil.errors import Gap, IdentityMismatch
from frazil.iceberg.table import Snapshot, Table
from frazil.kafka.planner import TopicIdentity
from frazil.ledger import entry as ledger
from frazil.ledger import index
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.sink_state import announced_tables, staged_batches
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import Cut, Partition, Range
from frazil.sources.base import StreamPosition


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
    unindexed: list[Located]
    #: paths of batch records that are no longer needed
    useless: Sequence[str]


class Recovery:
    """Reads the state that earlier runs left, before and after this run's claim."""

    _index: Table
    _target: TableCommitter

    def __init__(
        self,
        config: Config,
        tables: SinkTables,
        indexed: Callable[[str], Mapping[Partition, tuple[int, int]]],
    ) -> None:
        """`indexed`: where the index's rows of a table begin and end."""
        self.tables = tables
        self._config = config
        self._indexed = indexed
        self._alone = config.one_table
        #: missing staged files of the batch that is therefore read again
        self.gone: list[str] = []

    def open(self, index_table: Table, target: TableCommitter) -> None:
        """`target`: the index again, with the committer's own handle."""
        self._index = index_table
        self._target = target

    def recover(self) -> Recovered:
        """From the ledgers and the stage folder.

        Before the claim the result may still change; after it all earlier runs are fenced, and it
        is final. The position of a newer run is none to continue from: a table may have been rolled
        back to before it.
        """
        entry = self._index_entry()
        position = entry.end
        known = announced_tables(entry.tables, self._index.properties)
        if self._alone:
            self.check_table(known, position)
        healthy = [
            (n, held) for n, held in self.tables.held.items() if n not in self.tables.unhealthy
        ]
        entries = parallel_map(lambda item: item[1].target.entries_after(position), healthy)
        after = {name: newer for (name, _), newer in zip(healthy, entries, strict=True)}
        committed = {i for newer in after.values() for e, _ in newer for i in e.commit_ids}
        first = self._index.made and entry.epoch == 1  # no run was here before
        stored = [] if first and not self._config.sink.staging_location else self.stored()
        place = entry.source[1]
        batches = [batch for _, batch in stored if batch and not _contradicts(batch, after)]
        batches = self._with_records(batches)
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
        whole, self.gone = self._with_files(staged, after, committed if self._alone else set())
        waiting, staged = staged[len(whole) :], whole
        self._set_floors(staged[-1].end if staged else position, position)
        unindexed = [] if self._alone else self._unindexed_commits(after, staged, position)
        # Torn, superseded, or committed and indexed long ago.
        useful = {batch.commit_id for batch in staged}
        for batch in batches:
            if batch.commit_id not in useful | committed and not position.reaches(batch.end):
                self._refuse_unknown_outcome(batch, after)
        useful |= {batch.commit_id for batch in waiting}  # until their offsets are committed
        useless = [path for path, batch in stored if batch is None or batch.commit_id not in useful]
        last = staged[-1] if staged else entry
        return Recovered(
            position=position,
            staged=staged,
            reached=StreamPosition(last.end, last.source[1], TopicIdentity.of(last)),
            number=max([entry.batches[1] + 1, *(batch.number + 1 for batch in staged)]),
            unindexed=unindexed,
            useless=useless,
        )

    def _index_entry(self) -> LedgerEntry:
        """The newest entry of the index; after the claim, the claim or one that follows it."""
        entry = self._target.still_newest()
        claim = self._target.seen  # None: nothing is claimed yet
        if entry is None or (claim is not None and claim not in entry.commit_ids):
            raise Gap(
                f"cannot start: index {self._index.name} was rolled back after this run claimed it",
                hint="start the sink again",
            )
        return entry

    def check_table(self, known: Mapping[str, str], position: Cut) -> None:
        """The table that the position counts on must exist, be the same, and not be rolled back."""
        name = self._config.tables[0].name
        if not known:
            self._refuse_a_late_start(position)
            return
        if name not in known:
            raise IdentityMismatch(
                f"cannot start: sink {self._config.sink.id} fills table "
                f"{', '.join(known)}; the config names {name}",
                hint="use another sink id for another table",
            )
        if name not in self.tables:
            raise IdentityMismatch(
                f"cannot start: table {name} does not exist; the index records its "
                f"position {position.nested()}",
                hint="restore the table, or use another sink id to fill a new one from the start",
            )
        held = self.tables[name]
        if held.table.uuid != known[name]:
            raise IdentityMismatch(
                f"cannot start: table {name} was dropped and recreated; expected uuid "
                f"{known[name]}, found {held.table.uuid}",
                hint="restore the table, or use another sink id to fill the new one from the start",
            )
        head = held.target.head()
        if not head.complete:
            raise not_shown(name, self._config.sink.id, head.unshown)
        end = head.entry.end if head.entry else Cut()
        # A partition added by the last claim is not in the table's ledger yet.
        end = Cut({**{p: self._partition_start(p, name) for p in position if p not in end}, **end})
        if not end.reaches(position):
            lost = [Range(p, end.get(p, 0), o) for p, o in position.items() if end.get(p, 0) < o]
            raise Gap(
                f"cannot start: table {name} was rolled back; the index records "
                f"{', '.join(map(str, lost))}, the table lacks them",
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
                    f"cannot start: index {self._config.index_table} is new; table {name} "
                    f"and Kafka both lack {', '.join(map(str, lost))}",
                    hint="restore the index, or the newest state of the table; or use another sink "
                    "id and another table",
                )

    def _partition_start(self, partition: Partition, table: str) -> int:
        """Where a partition began, by the index's rows of the table and by its ledger, as far as
        that goes back."""
        began = 0
        for entry, _ in ledger.entries(self._target.table.history("main"), self._config.sink.id):
            if partition not in entry.begin:
                break
            began = entry.begin[partition]
        return min(began, self._indexed(table).get(partition, (began,))[0])

    def _with_files(
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

    def _with_records(self, batches: Sequence[StagedBatch]) -> list[StagedBatch]:
        """The batches whose tables still have the records that the batch leaves out for that
        reason. Those of others are read again. (An unhealthy table waits for an operator, with all
        its batches.)"""
        names = {name for batch in batches for name in batch.already_written}
        heads = {
            name: self.tables[name].target.head().entry for name in names & self.tables.held.keys()
        }
        ends = {name: entry.end for name, entry in heads.items() if entry is not None}
        return [
            batch
            for batch in batches
            if all(
                name in self.tables.unhealthy or ends.get(name, Cut()).reaches(floor)
                for name, floor in batch.already_written.items()
            )
        ]

    def _refuse_unknown_outcome(self, batch: StagedBatch, healthy: Iterable[str]) -> None:
        """The records of the batch come again, with another batch or from Kafka. Raises unless it
        is certain that its tables do not have them."""
        for name in batch.names:
            if name in healthy and not self.tables[name].target.absent(batch):
                ranges = [tally.range for tally in batch.table(name).tallies]
                raise self.tables[name].target.unknown_outcome(", ".join(map(str, ranges)))

    def _set_floors(self, ahead: Cut, position: Cut) -> None:
        """A table can be ahead of the index with no staged batch left to explain it. Give it a
        floor: records below it are read again but not written again."""
        tables = list(self.tables.held.items())
        ends = parallel_map(lambda item: item[1].target.still_newest(), tables)
        for (name, held), end in zip(tables, ends, strict=True):
            if name in self.tables.unhealthy or end is None or ahead.reaches(end.end):
                continue
            if self._alone:
                raise Gap(
                    f"cannot take over sink {self._config.sink.id}: table {name} is ahead "
                    f"of the index, and the ledger entries from {position} to there were "
                    "expired; no staged batch has their counts",
                    hint="restore the files of the staging folder, or an earlier metadata file of "
                    "the table; or use another sink id and another table",
                )
            held.floor = Cut({p: o for p, o in end.end.items() if o > ahead.get(p, 0)})

    def _unindexed_commits(
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
            rows = self._index.readonly.rows(["commit_id", "table_name"], condition).to_pylist()
            indexed = {(row["commit_id"], row["table_name"]) for row in rows}
            located = [pair for pair in located if (pair[0].commit_id, *pair[1]) not in indexed]
        return located

    def stored(self) -> list[tuple[str, StagedBatch | None]]:
        """Paths and batches in the staging folder; None: the record of the batch is torn."""
        return list(staged_batches(self._config, self._index))


def _contradicts(
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
