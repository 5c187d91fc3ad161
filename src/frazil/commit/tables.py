"""Opens, creates, evolves and claims the tables of one sink. Runs on the driver.

The config names a table, or a template (`lake.{value}`) for table names taken from the data. This
module does not handle batches; it gives the committer a `TableCommitter` per table.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa

from frazil.commit.committer import THREADS, CommitTrigger
from frazil.commit.protocol import TableCommitter
from frazil.commit.version_files import VersionFiles
from frazil.config.model import Config
from frazil.config.sections import TableConfig, deleted_keys_table
from frazil.config.units import duration, size
from frazil.errors import ConfigError, FrazilError, IdentityMismatch, SchemaMismatch
from frazil.files.writer import PARQUET, WriterSpec, check
from frazil.iceberg import schema
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.static_table import COLUMNS_PROPERTY
from frazil.ledger import index
from frazil.ledger.entry import Snapshot, parse
from frazil.ledger.sink_state import REPLAY, property_tables, tables_property, tables_text
from frazil.ledger.tags import filled_by, ledger_tag, sink_of
from frazil.maintenance.tasks import CREATED_BY
from frazil.offsets import Cut
from frazil.pipeline.evolution import together
from frazil.pipeline.needs import aliases_of
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.task import DEAD_LETTER_METADATA
from frazil.pipeline.upsert import deletes_shape

S = TypeVar("S")
T = TypeVar("T")

#: Up to so many tables are listed in the index's snapshot summaries; more go into a property.
_NAMED = 16


@dataclass(slots=True)
class SinkTable:
    """One table, with one handle for the stream and one for the committer's threads."""

    config: TableConfig
    table: JavaTable
    target: TableCommitter
    metadata: MetadataColumns
    #: the plan sent to executors; built on demand, and again after a schema change
    plan: TablePlan | None = None
    #: the files that contain the versions of its keys
    orders: VersionFiles | None = None
    #: its ledger's end, where that is beyond the position and all staged batches
    floor: Cut = field(default_factory=Cut)


class SinkTables:
    def __init__(
        self, catalog: JavaCatalog, config: Config, template: Callable[[str], str]
    ) -> None:
        self._catalog = catalog
        self._config = config
        self._template = template
        self._configs = {table.name: table for table in config.tables}
        if letters := config.dead_letters.table:
            self._configs[letters] = TableConfig(
                letters,
                topic_column=DEAD_LETTER_METADATA.topic,
                partition_column=DEAD_LETTER_METADATA.partition,
                offset_column=DEAD_LETTER_METADATA.offset,
                timestamp_column=DEAD_LETTER_METADATA.timestamp,
                schema_evolution="fail",
            )
        for table in config.tables:
            if table.version_column:
                self._configs[deleted_keys_table(table.name)] = TableConfig(
                    deleted_keys_table(table.name),
                    topic_column=table.topic_column,
                    partition_column=table.partition_column,
                    offset_column=table.offset_column,
                    timestamp_column=table.timestamp_column,
                    compression=table.compression,
                    format_version=table.format_version,
                    compact_after_commits=table.compact_after_commits,
                    commit_interval=table.commit_interval,
                    priority=table.priority,
                    snapshot_retention=table.snapshot_retention,
                )
        self._deleted_keys_tables = {deleted_keys_table(name) for name in config.versioned_tables}
        self.held: dict[str, SinkTable] = {}
        #: unhealthy tables among those that the position depends on: name → error
        self.unhealthy: dict[str, FrazilError] = {}
        self._gone: dict[str, str] = {}
        self._recorded: dict[str, str] = {}
        self._announcing = threading.Lock()
        #: tables that could not be created or evolved for incoming records: name → reason
        self.refused: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def __getitem__(self, name: str) -> SinkTable:
        return self.held[name]

    @property
    def names(self) -> list[str]:
        """The tables named in the config, without templates."""
        return [name for name in self._configs if "{" not in name]

    def config_of(self, name: str) -> TableConfig:
        """The config of the table's own name, or of its template."""
        if name in self._configs:
            return self._configs[name]
        return replace(self._configs[self._template(name)], name=name)

    def is_deleted_keys_table(self, name: str) -> bool:
        """Is it the `_deleted` table of another table?"""
        return bool(self._deleted_keys_tables) and (
            name in self._deleted_keys_tables
            or (name not in self._configs and self._template(name) in self._deleted_keys_tables)
        )

    def configured(self, name: str) -> bool:
        """Does the config contain the table or its template?"""
        try:
            return name in self._configs or self._template(name) in self._configs
        except ConfigError:
            return False

    def open(self, names: Iterable[str]) -> None:
        """Open the tables that exist."""
        wanted = [name for name in names if name not in self.held and self.configured(name)]
        for name, table in zip(wanted, parallel_map(self._catalog.load, wanted), strict=True):
            if table is not None:
                self._hold(name, table)

    def _hold(self, name: str, table: JavaTable) -> SinkTable:
        refuse_unsupported(table)
        config = self.config_of(name)
        own = second_handle(self._catalog, table)
        # A dead-letter replay writes to existing tables, whose history may have expired.
        sink = self._config.sink.id
        late = sink.endswith(REPLAY)
        target = TableCommitter(own, config.branch, sink, 0, time, claimed_first=late)
        self.held[name] = SinkTable(config, table, target, self.metadata(name))
        return self.held[name]

    def metadata(self, name: str) -> MetadataColumns:
        """The columns for a row's topic, partition, offset and timestamp."""
        if name == self._config.dead_letters.table:
            return DEAD_LETTER_METADATA
        config = self.config_of(name)
        return MetadataColumns(
            config.topic_column,
            config.partition_column,
            config.offset_column,
            config.timestamp_column,
        )

    def take(self, claim: Callable[[SinkTable], None]) -> None:
        """Claim all healthy tables, a few at a time."""
        well = [held for name, held in self.held.items() if name not in self.unhealthy]
        parallel_map(claim, well)

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
                    f"cannot fill table {table.name}: sink {entry.sink} fills it from "
                    f"{', '.join(both)}, too; each record would be there twice",
                    hint="give one of them another table or other topics; or set [sink] "
                    "allow_shared_topics = true, if that is wanted; or, if that sink is no more: "
                    f"ALTER TABLE {table.name} DROP TAG `{ledger_tag(entry.sink, branch)}`",
                )

    # ── create and evolve ────────────────────────────────────────────────────────────────────

    def check(self, name: str, columns: pa.Schema, metadata: MetadataColumns) -> None:
        """Raises if such a table cannot be created, or the existing one cannot take the columns."""
        if name not in self.held:
            self._new(name, columns, metadata)
        elif self.config_of(name).schema_evolution == "evolve":
            self._update(self.held[name], columns, metadata)(self.held[name].table.schema)
        else:
            schema.check_fits(columns, self.held[name].table.schema, metadata, name)

    def make(
        self,
        name: str,
        columns: pa.Schema,
        metadata: MetadataColumns,
        among: MetadataColumns,
        epoch: int,
    ) -> SinkTable:
        """The table, created now or by another writer meanwhile; not claimed yet."""
        config = self.config_of(name)
        made, spec, order = self._new(name, columns, metadata)
        names = ",".join(field.name for field in among.fields)
        codec = "uncompressed" if config.compression == "none" else config.compression
        properties = {
            "format-version": str(config.format_version),
            f"{PARQUET}compression-codec": codec,  # else Iceberg sets its own default
            CREATED_BY: self._config.sink.id,
            filled_by(self._config.sink.id): self._config.index_table,
            **index.OLD_METADATA,
            **config.properties,
        }
        if names:
            properties[COLUMNS_PROPERTY] = names
            # Compaction by other tools should also keep the whole topic name for the audit.
            properties.setdefault(f"write.metadata.metrics.column.{among.topic}", "full")
        table = self._catalog.create(
            name, made, spec, properties=properties, location=config.location, sort_order=order
        )
        if (
            not table.made
            and config.name not in self._configs
            and (COLUMNS_PROPERTY not in table.properties)
        ):
            raise SchemaMismatch(
                f"cannot fill table {name}, whose name comes from the data: it is there, and no "
                "sink made it"
            )
        held = self._hold(name, table)
        held.target.epoch = epoch
        return held

    def _new(
        self, name: str, columns: pa.Schema, metadata: MetadataColumns
    ) -> tuple[str, str, str]:
        config = self.config_of(name)
        made = schema.iceberg_schema(columns, metadata, config)
        schema.check_order(made, config)
        return (
            made,
            schema.partition_spec(made, config.partition_by, name),
            schema.sort_order(made, config.sort_by, name),
        )

    def fit(
        self, name: str, columns: pa.Schema, metadata: MetadataColumns, relax: bool = True
    ) -> None:
        """Evolve the table so that such records fit; raises if that is not possible."""
        held = self.held[name]
        if held.config.schema_evolution == "evolve":
            # With a new handle: a handle whose table was dropped can no longer be used for staging.
            table = self._catalog.load(name)
            if table is None or table.uuid != held.table.uuid:
                fact = "is gone" if table is None else "was dropped and made again"
                raise IdentityMismatch(f"cannot change table {name}: it {fact}")
            table.evolve(self._update(held, columns, metadata, relax))
            held.table, held.plan = table, None
        else:
            schema.check_fits(columns, held.table.schema, metadata, name)

    def renew(self, name: str) -> None:
        """Reload a table whose columns another writer changed; later writes use the new schema."""
        held, table = self.held[name], self._catalog.load(name)
        if table is not None and table.uuid == held.table.uuid:  # else its commits will fail
            held.table, held.plan = table, None

    def _update(
        self, held: SinkTable, columns: pa.Schema, metadata: MetadataColumns, relax: bool = True
    ) -> Callable[[str], schema.SchemaUpdate]:
        def update(current: str) -> schema.SchemaUpdate:
            beside = {field.name for field in schema.columns_of(current)}
            lacking = [field for field in metadata.fields if field.name not in beside]
            change = schema.update(
                current,
                pa.schema([*columns, *lacking]),
                held.table.name,
                spec=held.table.spec,
                format_version=held.table.format_version,
                aliases=together(_aliases(held), aliases_of(columns)),
                beside={field.name for field in metadata.fields if field.name in beside},
            )
            return change if relax else replace(change, relax=())

        return update

    # ── for executors and the committer ──────────────────────────────────────────────────────

    def plan(self, name: str, among: MetadataColumns | None = None) -> TablePlan:
        held = self.held[name]
        if held.plan is None:
            shape = writer_spec(held.table, held.config, (among or held.metadata).topic)
            check(shape)
            key = held.config.upsert_key
            if key and set(key) != set(schema.identifier_fields(shape.schema)):
                fields = ", ".join(schema.identifier_fields(shape.schema)) or "none"
                raise ConfigError(
                    f"cannot upsert into table {name} by {', '.join(key)}: its identifier fields "
                    f"are {fields}",
                    hint=f"ALTER TABLE {name} SET IDENTIFIER FIELDS {', '.join(key)}",
                )
            schema.check_order(shape.schema, held.config)
            held.plan = TablePlan(
                shape=shape,
                metadata=held.metadata,
                event_time=schema.event_time_column(shape.schema, held.config),
                evolution=held.config.schema_evolution,
                aliases=_aliases(held),
                identifier=schema.identifier_fields(shape.schema),
                partitions=tuple(field["name"] for field in json.loads(shape.spec)["fields"]),
                format_version=held.table.format_version,
                floor=held.floor,
                key=key,
                log=held.config.key if not key else (),
                deletes=deletes_shape(shape, key, held.table.unpartitioned_spec()) if key else None,
                partitioned_by_key=held.config.partitioned_by_key,
                order=held.config.version_column,
                max_columns=held.config.max_columns,
            )
        return held.plan

    def orders(self, name: str, key: tuple[str, ...], order: str) -> VersionFiles:
        held = self.held[name]
        if held.orders is None:
            table = second_handle(self._catalog, held.table)  # which is always refreshed
            held.orders = VersionFiles(table, held.config.branch, key, order)
        return held.orders

    def target(self, name: str) -> TableCommitter:
        if name in self.unhealthy:
            raise self.unhealthy[name]
        if name not in self.held:
            raise IdentityMismatch(
                f"cannot commit to table {name}: it is not there, or the config does not name it "
                "any more",
                hint="what was staged for it waits; restore the table, or its [[table]]",
            )
        return self.held[name].target

    def commit_trigger(self, name: str, interval: float) -> CommitTrigger:
        if not self.configured(name):
            return CommitTrigger(interval)
        from_config = self.config_of(name)
        return CommitTrigger(
            duration(from_config.commit_interval) if from_config.commit_interval else interval,
            size(from_config.commit_bytes) if from_config.commit_bytes else None,
            from_config.priority,
        )

    # ── tables recorded in the index ─────────────────────────────────────────────────────────

    def recorded(self, index: JavaTable) -> Mapping[str, str] | str:
        """Table → uuid for the next entry of the index; for many tables, the name of the index
        property that contains them, which is written when they change."""
        uuids = self._uuids()
        return uuids if len(uuids) <= _NAMED else self.announce(index)

    def announce(self, index: JavaTable) -> str:
        """Write table → uuid to a property of the index. Returns the property's name."""
        key = tables_property(self._config.sink.id)
        with self._announcing:  # the committer's thread announces, too
            uuids = self._uuids()
            if uuids != self._recorded:
                index.set_property(key, tables_text(uuids))
                self._recorded = uuids
        return key

    def announced(self, index: JavaTable) -> dict[str, str]:
        """Table → uuid, including tables that no index entry contains yet."""
        return property_tables(index.properties, tables_property(self._config.sink.id))

    def _uuids(self) -> dict[str, str]:
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
            if not self.configured(name):
                self._gone[name] = uuid  # no longer in the config, but still recorded
            elif held is None:
                self.unhealthy[name] = IdentityMismatch(
                    f"cannot go on with table {name}: it is gone",
                    hint="restore the table; what was staged for it waits",
                )
            elif held.table.uuid != uuid:
                self.unhealthy[name] = IdentityMismatch(
                    f"cannot go on with table {name}: it was dropped and made again; expected uuid "
                    f"{uuid}, found {held.table.uuid}",
                    hint="restore the table; its batches wait, staged",
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
                and self.config_of(name).version_column
            ):
                self.unhealthy[name] = error


def second_handle(catalog: JavaCatalog, table: JavaTable) -> JavaTable:
    """Another handle of the same table: the committer's threads and Spark's do not share them."""
    own = catalog.load(table.name)
    if own is None or own.uuid != table.uuid:
        fact = "is gone" if own is None else "was dropped and made again"
        raise IdentityMismatch(
            f"cannot open table {table.name}: it {fact} while the sink opened it",
            hint="start the sink again: it compares the table that is there then",
        )
    return own


#: Table properties that tasks cannot honour when they write files: property → why.
_UNSUPPORTED = {
    "write.location-provider.impl": "names its files by a Java class, which tasks cannot ask",
    "encryption.key-id": "is encrypted, and tasks write plain files",
}


def refuse_unsupported(table: JavaTable) -> None:
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


def writer_spec(table: JavaTable, config: TableConfig, topic_column: str = "") -> WriterSpec:
    # Bounds are truncated to 16 bytes by default; the audit needs the whole topic name.
    whole = {f"write.metadata.metrics.column.{topic_column}": "full"} if topic_column else {}
    return WriterSpec(
        name=table.name,
        location=table.location,
        schema=table.schema,
        schema_id=table.schema_id,
        spec=table.spec,
        properties={**table.properties, **whole},
        target_file_size=size(config.target_file_size),
        compression=config.compression,
        io=table.io_properties,
        sort_order=table.sort_order,
    )


def _aliases(held: SinkTable) -> dict[str, tuple[str, ...]]:
    """Former column names, from the config and from the table's earlier schemas."""
    return together(held.config.aliases, schema.former_names(held.table.schema, held.table.schemas))


def parallel_map(call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """`call` on each item, in a few threads."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items)), "frazil-tables") as pool:
        return list(pool.map(call, items))
