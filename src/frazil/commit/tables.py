"""Opens, compares and claims the tables of one sink. Runs on the driver.

This module does not handle batches; it gives the committer a `TableCommitter` per table.
`table_configs` knows the config of each table, `table_schemas` creates and evolves them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from frazil.commit.committer import THREADS
from frazil.commit.protocol import TableCommitter
from frazil.commit.table_configs import TableConfigs
from frazil.commit.version_files import VersionFiles
from frazil.config.model import Config
from frazil.config.sections import TableConfig, deleted_keys_table
from frazil.errors import ConfigError, FrazilError, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.table import Snapshot, Table
from frazil.ledger.entry import parse
from frazil.ledger.sink_state import REPLAY, property_tables, tables_property, tables_text
from frazil.ledger.tags import ledger_tag, sink_of
from frazil.offsets import Cut
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan

S = TypeVar("S")
T = TypeVar("T")

#: Up to so many tables are listed in the index's snapshot summaries; more go into a property.
_NAMED = 16


@dataclass(slots=True)
class SinkTable:
    """One table, with one handle for the stream and one for the committer's threads."""

    config: TableConfig
    table: Table
    target: TableCommitter
    metadata: MetadataColumns
    #: the plan sent to executors; built on demand, and again after a schema change
    plan: TablePlan | None = None
    #: the files that contain the versions of its keys
    version_files: VersionFiles | None = None
    #: its ledger's end, where that is beyond the position and all staged batches
    floor: Cut = field(default_factory=Cut)


class SinkTables:
    def __init__(self, catalog: JavaCatalog, config: Config, configs: TableConfigs) -> None:
        self._catalog = catalog
        self._config = config
        self.configs = configs
        self.held: dict[str, SinkTable] = {}
        #: unhealthy tables among those that the position depends on: name → error
        self.unhealthy: dict[str, FrazilError] = {}
        self._gone: dict[str, str] = {}
        #: tables that could not be created or evolved for incoming records: name → reason
        self.refused: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def __getitem__(self, name: str) -> SinkTable:
        return self.held[name]

    def open(self, names: Iterable[str]) -> None:
        """Open the tables that exist."""
        wanted = [name for name in names if name not in self.held and self.configs.configured(name)]
        for name, table in zip(wanted, parallel_map(self._catalog.load, wanted), strict=True):
            if table is not None:
                self.hold(name, table)

    def hold(self, name: str, table: Table) -> SinkTable:
        refuse_unsupported(table)
        config = self.configs.of(name)
        own = second_handle(self._catalog, table)
        # A dead-letter replay writes to existing tables, whose history may have expired.
        sink = self._config.sink.id
        late = sink.endswith(REPLAY)
        target = TableCommitter(own, config.branch, sink, 0, time, claimed_first=late)
        self.held[name] = SinkTable(config, table, target, self.configs.metadata(name))
        return self.held[name]

    def claim_all(self, claim: Callable[[SinkTable], None]) -> None:
        """Claim all healthy tables, a few at a time."""
        healthy = [held for name, held in self.held.items() if name not in self.unhealthy]
        parallel_map(claim, healthy)

    def refuse_shared(self, held: SinkTable, topics: Mapping[str, str], walk: bool = False) -> None:
        """Raises ConfigError if another sink fills the table from one of these topics: each record
        would be written twice. Other sinks are found by their tags; with `walk`, also by their
        claims in the branch's history, for sinks that first started at the same moment."""
        sink, branch, table = self._config.sink.id, held.config.branch, held.table
        if self._config.sink.allow_shared_topics or not topics:
            return
        known = {sink, sink.removesuffix(REPLAY), sink + REPLAY}
        snapshots: Iterable[Snapshot | None] = held.target.table.history(branch)
        if not walk:
            tags = [tag for tag in table.tags() if sink_of(tag, branch) not in {"", *known}]
            snapshots = map(table.tagged, tags)
        for snapshot in filter(None, snapshots):
            entry = parse(snapshot.summary)
            if entry is None or entry.sink in known:
                continue
            known.add(entry.sink)  # the first entry found is its newest
            if walk and entry.end:
                continue
            ids = set(entry.topics.values())
            both = [
                t
                for t, number in topics.items()
                if (number in ids if number else t in entry.topics)
            ]
            if both:
                raise ConfigError(
                    f"cannot fill table {table.name}: sink {entry.sink} also fills it "
                    f"from {', '.join(both)}; each record would be written twice",
                    hint="give one of them another table or other topics; or set [sink] "
                    "allow_shared_topics = true, if that is intended; or, if that sink no longer "
                    f"exists: ALTER TABLE {table.name} DROP TAG `{ledger_tag(entry.sink, branch)}`",
                )

    def target(self, name: str) -> TableCommitter:
        if name in self.unhealthy:
            raise self.unhealthy[name]
        if name not in self.held:
            raise IdentityMismatch(
                f"cannot commit to table {name}: it does not exist, or the config no "
                "longer names it",
                hint="its batches stay staged; restore the table, or its [[table]]",
            )
        return self.held[name].target

    def uuids(self) -> dict[str, str]:
        """Table → uuid of the tables that the position depends on."""
        held = list(self.held.items())  # a copy: another thread may be adding one
        return dict(sorted((name, sink_table.table.uuid) for name, sink_table in held)) | self._gone

    def compare(
        self,
        known: Mapping[str, str],
        mismatch: Callable[[TableCommitter], FrazilError | None],
    ) -> None:
        """Mark those of the `known` tables as unhealthy that are gone, recreated, or mismatched."""
        same = [
            name
            for name, uuid in known.items()
            if name in self.held and self.held[name].table.uuid == uuid
        ]
        errors = parallel_map(lambda name: mismatch(self.held[name].target), same)
        tag_mismatch = {name: error for name, error in zip(same, errors, strict=True) if error}
        for name, uuid in known.items():
            held = self.held.get(name)
            if not self.configs.configured(name):
                self._gone[name] = uuid  # no longer in the config, but still recorded
            elif held is None:
                self.unhealthy[name] = IdentityMismatch(
                    f"cannot commit to table {name}: it does not exist",
                    hint="restore the table; its batches stay staged",
                )
            elif held.table.uuid != uuid:
                self.unhealthy[name] = IdentityMismatch(
                    f"cannot commit to table {name}: it was dropped and recreated; "
                    f"expected uuid {uuid}, found {held.table.uuid}",
                    hint="restore the table; its batches stay staged",
                )
            elif name in tag_mismatch:
                self.unhealthy[name] = tag_mismatch[name]
            if name in self.unhealthy:
                self._gone[name] = uuid
        for name in self.held:  # without `_deleted`, a late update could resurrect a deleted key
            error = self.unhealthy.get(deleted_keys_table(name))
            if (
                error is not None
                and name not in self.unhealthy
                and self.configs.of(name).version_column
            ):
                self.unhealthy[name] = error


class AnnouncedTables:
    """The tables of a sink as its index records them: table → uuid."""

    def __init__(self, sink: str, tables: SinkTables) -> None:
        self._sink = sink
        self._tables = tables
        self._recorded: dict[str, str] = {}
        self._announcing = threading.Lock()

    def recorded(self, index: Table) -> Mapping[str, str] | str:
        """Table → uuid for the next entry of the index; for many tables, the name of the index
        property that contains them, which is written when they change."""
        uuids = self._tables.uuids()
        return uuids if len(uuids) <= _NAMED else self.announce(index)

    def announce(self, index: Table) -> str:
        """Write table → uuid to a property of the index. Returns the property's name."""
        key = tables_property(self._sink)
        with self._announcing:  # the committer's thread announces, too
            uuids = self._tables.uuids()
            if uuids != self._recorded:
                index.set_property(key, tables_text(uuids))
                self._recorded = uuids
        return key

    def read(self, index: Table) -> dict[str, str]:
        """Table → uuid, including tables that no index entry contains yet."""
        return property_tables(index.properties, tables_property(self._sink))


def second_handle(catalog: JavaCatalog, table: Table) -> Table:
    """Another handle of the same table: the committer's threads and Spark's do not share them."""
    own = catalog.load(table.name)
    if own is None or own.uuid != table.uuid:
        fact = "was dropped" if own is None else "was dropped and recreated"
        raise IdentityMismatch(
            f"cannot open table {table.name}: it {fact} while the sink opened it",
            hint="start the sink again: it checks the tables again",
        )
    return own


#: Table properties that tasks cannot honour when they write files: property → why.
_UNSUPPORTED = {
    "write.location-provider.impl": "names its files by a Java class, which tasks cannot call",
    "encryption.key-id": "is encrypted, and tasks write plain files",
}


def refuse_unsupported(table: Table) -> None:
    """Raises ConfigError for table features that would be ignored or cannot be audited."""
    if table.format_version < 2:
        raise ConfigError(
            f"cannot fill table {table.name}: expected format version 2 or 3, found "
            f"{table.format_version}, whose commits have no order",
            hint=f"ALTER TABLE {table.name} SET TBLPROPERTIES ('format-version' = '2')",
        )
    for key, why in _UNSUPPORTED.items():
        if value := table.properties.get(key):
            raise ConfigError(
                f"cannot fill table {table.name}: it {why}; found {key} = {value}",
                hint=f"ALTER TABLE {table.name} UNSET TBLPROPERTIES ('{key}'), or use another "
                "table",
            )


def parallel_map(call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """`call` on each item, in a few threads."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items)), "frazil-tables") as pool:
        return list(pool.map(call, items))
