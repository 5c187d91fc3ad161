"""Creates and evolves the tables that a batch needs, and makes the plans that executors get.

The one place where tables change: on the driver, on the thread of the batches, between two runs of
a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import pyarrow as pa

from frazil.commit.startup import Startup
from frazil.commit.tables import SinkTable, parallel_map
from frazil.config.model import Config
from frazil.config.sections import deleted_keys_table, replayed
from frazil.errors import ConfigError, IdentityMismatch, SchemaMismatch
from frazil.ledger.sink_state import REPLAY
from frazil.ledger.staged_batch import StagedBatch
from frazil.pipeline.isolation import StepFailed, noticing
from frazil.pipeline.missing_columns import needed
from frazil.pipeline.projection import NO_METADATA, MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import deleted_keys_columns, deleted_keys_version
from frazil.pipeline.versions import VersionLookup
from frazil.retry import Retry
from frazil.sources.base import BatchTables, StreamState


class TableProvisioner:
    """`metadata`: metadata columns that are among the records' own columns; None: the tables have
    them as the config says. `pending`: the batches that are staged and not committed."""

    def __init__(
        self,
        config: Config,
        startup: Startup,
        stream: StreamState,
        retry: Retry,
        metadata: MetadataColumns | None = None,
        pending: Callable[[], Sequence[StagedBatch]] = lambda: (),
    ) -> None:
        self._config = config
        self._startup = startup
        self._tables = startup.tables
        self._configs = startup.tables.configs
        self._schemas = startup.schemas
        self._stream = stream
        self._retry = retry
        self._among = metadata
        self._pending = pending
        self._alone = config.one_table
        self._replay = config.sink.id.endswith(REPLAY)

    def renew(self, names: set[str]) -> None:
        """Before a batch: reload tables whose columns another writer changed, and try again what
        was refused in the batch before."""
        self._tables.refused.clear()
        while names:
            name = names.pop()
            self._retry(lambda name=name: self._schemas.reload(name))  # type: ignore[misc]

    # ── plans for executors ──────────────────────────────────────────────────────────────────

    def plans(self, versions: bool = True) -> BatchTables:
        """`versions`: with the files in which tasks look up the versions of keys."""
        healthy = [name for name in self._tables.held if name not in self._tables.unhealthy]
        ours = [name for name in healthy if not self._configs.is_deleted_keys_table(name)]
        plans = {name: self._schemas.plan(name, self._among) for name in ours}
        for name, plan in list(plans.items()):
            if plan.order and not self._replay:  # which upserts nothing
                if deleted_keys := self._deleted_keys_plan(plan):
                    plans[name] = replace(plan, deleted_keys=deleted_keys)
                else:
                    plans.pop(name)
        if versions and not self._replay:
            for name, plan in plans.items():
                if plan.order:
                    plans[name] = replace(plan, known=self._known(name))
        return BatchTables(plans, self.refused, self._stream.number, self._stream.file_prefix)

    def holds_no_records(self, table: str) -> bool:
        """Does it hold anything but rows of records: dead letters, or deleted keys?"""
        name = self._config.dead_letters.table
        return table in (name, replayed(name)) or self._configs.is_deleted_keys_table(table)

    @property
    def refused(self) -> Mapping[str, str]:
        # A missing table is not recreated from the middle of the stream: its records become dead
        # letters, to be replayed when it is back.
        unhealthy = {name: error.message for name, error in self._tables.unhealthy.items()}
        return {**self._tables.refused, **unhealthy}

    def _deleted_keys_plan(self, plan: TablePlan) -> TablePlan | None:
        """The table of keys deleted from this one, created or evolved for its keys; None where that
        is not possible: then records of this one are refused."""
        name, columns = deleted_keys_table(plan.shape.name), deleted_keys_columns(plan)
        existing = self._schemas.plan(name).columns if name in self._tables else pa.schema([])
        if any(
            column.name not in existing.names or existing.field(column.name).type != column.type
            for column in columns
        ):
            self.ensure({name: needed(columns, plan.aliases)})
        if why := self.refused.get(name):
            self._tables.refused[plan.shape.name] = why
            return None
        return self._schemas.plan(name)

    def _known(self, table: str) -> tuple[VersionLookup, ...]:
        """Where to look up the versions of the table's keys: in staged files, in live files, and in
        the `_deleted` table."""
        pending = self._pending()
        plan = self._schemas.plan(table)
        deleted_keys = self._schemas.plan(deleted_keys_table(table))
        order = deleted_keys_version(plan.order)
        return self._retry(
            lambda: (
                self._schemas.version_files(table, plan.key, plan.order).within(
                    plan.shape, pending
                ),
                self._schemas.version_files(deleted_keys.shape.name, plan.key, order).within(
                    deleted_keys.shape, pending
                ),
            )
        )

    # ── create and evolve ────────────────────────────────────────────────────────────────────

    def ensure(self, needs: Mapping[str, pa.Schema]) -> None:
        """Create or evolve these tables so that records with such columns fit."""
        for name in sorted(needs.keys() - self._tables.held.keys()):
            # A conflict with the config is refused before the first table is created.
            if name in self._configs.names:
                with suppress(SchemaMismatch), _making(name):
                    self._schemas.check(name, needs[name], self._metadata(name))
        held, names = self._tables.held, self._configs.names
        ours = {self._config.dead_letters.table, replayed(self._config.dead_letters.table)}
        ours |= {name for name in (*needs, *held) if self._configs.is_deleted_keys_table(name)}
        room = self._config.sink.max_tables - len(held.keys() - ours)
        from_data = sorted(needs.keys() - {*held, *names, *ours})
        beyond = from_data[max(0, room) :]  # the plan of the next run has no room for them
        wanted = sorted(needs.keys() - set(beyond))

        def attempt(name: str) -> SinkTable | None:
            try:
                with _making(name):
                    return self._create_or_evolve(name, needs[name])
            except (SchemaMismatch, IdentityMismatch, ConfigError) as error:
                if self._alone or (isinstance(error, ConfigError) and name in names):
                    raise
                self._tables.refused[name] = error.message
                return None

        self._claim([made for made in parallel_map(attempt, wanted) if made is not None])

    def _metadata(self, name: str) -> MetadataColumns:
        """The columns that the sink adds to those of the records."""
        return self._configs.metadata(name) if self._among is None else NO_METADATA

    def _create_or_evolve(self, name: str, columns: pa.Schema) -> SinkTable | None:
        """The table, if it had to be created."""
        metadata = self._metadata(name)
        if name in self._tables:
            # A JSON object that lacks a field implies nothing about the next: nothing becomes
            # optional.
            relax = self._config.decode.format != "json"
            self._retry(lambda: self._schemas.evolve(name, columns, metadata, relax))
            return None
        among = metadata if self._among is None else self._among
        if self._among is not None and self._configs.is_deleted_keys_table(name):
            among = NO_METADATA  # its rows are keys and versions only
        epoch = self._stream.epoch
        return self._retry(lambda: self._schemas.create(name, columns, metadata, among, epoch))

    def _claim(self, made: Sequence[SinkTable]) -> None:
        """Claim tables that were just created, or raise if a newer run has begun.

        A newer run claims the index first, and then all tables that the config or the index names.
        So a table name from the data is recorded in the index before this run checks whether it is
        still the newest: either the newer run finds the name and claims the table, or this run sees
        its claim. For the same reason a table that this run created itself needs no claim.
        """
        if not made:
            return
        others = [held for held in made if not held.table.made]
        for held in others:  # one known to the index was found and claimed at startup
            self._startup.refuse_unknown(held)
        if any(held.table.name not in self._configs.names for held in made):
            self._retry(lambda: self._startup.announced.announce(self._startup.index))
        self._retry(self._startup.still_newest)
        for held in others:
            self._tables.refuse_shared(held, self._startup.origin.topics)
            self._startup.claim_table(held)


@contextmanager
def _making(table: str) -> Iterator[None]:
    """Unforeseen errors over the columns of records become a mismatch of this table alone."""
    try:
        with noticing():
            yield
    except StepFailed as error:
        raise SchemaMismatch(
            f"cannot create or change table {table} for its records: {error}"
        ) from error
