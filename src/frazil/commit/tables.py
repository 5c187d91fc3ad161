"""The tables of one sink: opened, made, changed and claimed. Runs on the driver.

A table stands in the config by its name, or was made of a template (`lake.{value}`) for names that
came from the data. What is here knows nothing of batches; the committer gets a `TableCommitter` of
each.
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
from frazil.commit.protocol import TableCommitter, ledger_tag
from frazil.commit.version_files import VersionFiles
from frazil.config.model import Config, TableConfig, duration, remembered, size
from frazil.errors import ConfigError, FrazilError, IdentityMismatch, SchemaMismatch
from frazil.files.writer import PARQUET, WriterSpec, check
from frazil.iceberg import schema
from frazil.iceberg.java import JavaCatalog, JavaTable
from frazil.iceberg.static_table import COLUMNS_PROPERTY
from frazil.ledger import index
from frazil.ledger.entry import Snapshot, parse
from frazil.ledger.sink_state import REPLAY, TABLES_PROPERTY
from frazil.maintenance.tasks import CREATED_BY
from frazil.offsets import Cut
from frazil.pipeline.chunk import TablePlan, aliases_of
from frazil.pipeline.evolution import together
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.task import LETTERS
from frazil.pipeline.upsert import deletes_shape

S = TypeVar("S")
T = TypeVar("T")

#: So many tables are named in the summary of the index's snapshots; of more, it names a property.
_NAMED = 16
#: How the witnesses of all sinks begin.
WITNESS = ledger_tag("")


@dataclass(slots=True)
class SinkTable:
    """One table, with a handle for the stream and one for the committer's threads."""

    config: TableConfig
    table: JavaTable
    target: TableCommitter
    metadata: MetadataColumns
    #: what executors must know of it; made when it is asked for, and anew after a change
    plan: TablePlan | None = None
    #: where the orders of its keys are to be found
    orders: VersionFiles | None = None
    #: what its ledger has beyond the position and all that is staged
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
                topic_column=LETTERS.topic,
                partition_column=LETTERS.partition,
                offset_column=LETTERS.offset,
                timestamp_column=LETTERS.timestamp,
                schema_evolution="fail",
            )
        for table in config.tables:
            if table.version_column:
                self._configs[remembered(table.name)] = TableConfig(
                    remembered(table.name),
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
        self._memories = {remembered(name) for name in config.remembering}
        self.held: dict[str, SinkTable] = {}
        #: what is wrong with a table that the index counts on
        self.amiss: dict[str, FrazilError] = {}
        self._gone: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._announcing = threading.Lock()
        #: those that could not be made or changed for the records that wanted it, and why
        self.refused: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def __getitem__(self, name: str) -> SinkTable:
        return self.held[name]

    @property
    def names(self) -> list[str]:
        """Of the tables the config names; templates are none."""
        return [name for name in self._configs if "{" not in name]

    def config_of(self, name: str) -> TableConfig:
        """By its own name, or as its template says."""
        if name in self._configs:
            return self._configs[name]
        return replace(self._configs[self._template(name)], name=name)

    def remembers(self, name: str) -> bool:
        """Is it a table that remembers what was deleted from another?"""
        return bool(self._memories) and (
            name in self._memories
            or (name not in self._configs and self._template(name) in self._memories)
        )

    def configured(self, name: str) -> bool:
        """Does the config name it, or a template that makes it?"""
        try:
            return name in self._configs or self._template(name) in self._configs
        except ConfigError:
            return False

    def open(self, names: Iterable[str]) -> None:
        """Those of the tables that are there."""
        wanted = [name for name in names if name not in self.held and self.configured(name)]
        for name, table in zip(wanted, parallel_map(self._catalog.load, wanted), strict=True):
            if table is not None:
                self._hold(name, table)

    def _hold(self, name: str, table: JavaTable) -> SinkTable:
        refuse_unsupported(table)
        config = self.config_of(name)
        # A handle of its own: the committer's threads and Spark's do not share tables.
        own = self._catalog.load(name)
        if own is None:
            raise IdentityMismatch(f"cannot open table {name}: it is gone")
        # One that replays dead letters comes to tables that are there, and may be old.
        sink = self._config.sink.id
        late = sink.endswith(REPLAY)
        target = TableCommitter(own, config.branch, sink, 0, time, claimed_first=late)
        self.held[name] = SinkTable(config, table, target, self.metadata(name))
        return self.held[name]

    def metadata(self, name: str) -> MetadataColumns:
        """The columns that say where a row comes from."""
        if name == self._config.dead_letters.table:
            return LETTERS
        config = self.config_of(name)
        return MetadataColumns(
            config.topic_column,
            config.partition_column,
            config.offset_column,
            config.timestamp_column,
        )

    def take(self, claim: Callable[[SinkTable], None]) -> None:
        """Claim all that are held and well, a few at a time."""
        well = [held for name, held in self.held.items() if name not in self.amiss]
        parallel_map(claim, well)

    def refuse_shared(self, held: SinkTable, topics: Mapping[str, str], walk: bool = False) -> None:
        """No other sink may fill a table from one of these topics: each record would be there
        twice. Others are known by their witnesses. A `walk` down the branch finds those that came
        first at the same moment as we did, and have a claim alone."""
        sink, branch, table = self._config.sink.id, held.config.branch, held.table
        if self._config.sink.allow_shared_topics or not topics:
            return
        mine = {sink, sink.removesuffix(REPLAY), sink + REPLAY}
        found: Iterable[Snapshot | None] = held.target.table.history(branch)
        if not walk:
            tags = [tag for tag in table.tags() if _whose(tag, branch) not in {"", *mine}]
            found = map(table.tagged, tags)
        for snapshot in filter(None, found):
            theirs = parse(snapshot.summary)
            if theirs is None or theirs.sink in mine:
                continue
            mine.add(theirs.sink)  # once is enough: what comes first is its newest
            if walk and theirs.end:
                continue
            ids = set(theirs.topics.values())
            both = [
                t
                for t, number in topics.items()
                if (number in ids if number else t in theirs.topics)
            ]
            if both:
                raise ConfigError(
                    f"cannot fill table {table.name}: sink {theirs.sink} fills it from "
                    f"{', '.join(both)}, too; each record would be there twice",
                    hint="give one of them another table or other topics; or set [sink] "
                    "allow_shared_topics = true, if that is wanted; or, if that sink is no more: "
                    f"ALTER TABLE {table.name} DROP TAG `{ledger_tag_of(theirs.sink, branch)}`",
                )

    # ── making and changing ──────────────────────────────────────────────────────────────────

    def check(self, name: str, columns: pa.Schema, metadata: MetadataColumns) -> None:
        """Can a table of such columns be made, or does the one that is there take them?"""
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
        """The table, made now or by somebody else meanwhile; not claimed yet."""
        config = self.config_of(name)
        made, spec, order = self._new(name, columns, metadata)
        names = ",".join(field.name for field in among.fields)
        codec = "uncompressed" if config.compression == "none" else config.compression
        properties = {
            "format-version": str(config.format_version),
            f"{PARQUET}compression-codec": codec,  # Iceberg would set its own default
            CREATED_BY: self._config.sink.id,
            **index.OLD_METADATA,
            **config.properties,
        }
        if names:
            properties[COLUMNS_PROPERTY] = names
            # Who compacts the table should leave the audit the whole topic, too.
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
        """Change the table so that such records fit it, or raise why that cannot be."""
        held = self.held[name]
        if held.config.schema_evolution == "evolve":
            # With a handle of its own: one that has seen its table gone is of no use for staging.
            table = self._catalog.load(name)
            if table is None or table.uuid != held.table.uuid:
                fact = "is gone" if table is None else "was dropped and made again"
                raise IdentityMismatch(f"cannot change table {name}: it {fact}")
            table.evolve(self._update(held, columns, metadata, relax))
            held.table, held.plan = table, None
        else:
            schema.check_fits(columns, held.table.schema, metadata, name)

    def renew(self, name: str) -> None:
        """Somebody else changed the table's columns: what is written from here on shall know it."""
        held, table = self.held[name], self._catalog.load(name)
        if table is not None and table.uuid == held.table.uuid:  # else its commits will say so
            held.table, held.plan = table, None

    def _update(
        self, held: SinkTable, columns: pa.Schema, metadata: MetadataColumns, relax: bool = True
    ) -> Callable[[str], schema.SchemaUpdate]:
        def update(there: str) -> schema.SchemaUpdate:
            beside = {field.name for field in schema.columns_of(there)}
            lacking = [field for field in metadata.fields if field.name not in beside]
            found = schema.update(
                there,
                pa.schema([*columns, *lacking]),
                held.table.name,
                spec=held.table.spec,
                format_version=held.table.format_version,
                aliases=together(_aliases(held), aliases_of(columns)),
                beside={field.name for field in metadata.fields if field.name in beside},
            )
            return found if relax else replace(found, relax=())

        return update

    # ── what others ask for ──────────────────────────────────────────────────────────────────

    def plan(self, name: str, among: MetadataColumns | None = None) -> TablePlan:
        held = self.held[name]
        if held.plan is None:
            shape = writer_spec(held.table, held.config, (among or held.metadata).topic)
            check(shape)
            key = held.config.upsert_key
            if key and set(key) != set(schema.identifier_fields(shape.schema)):
                found = ", ".join(schema.identifier_fields(shape.schema)) or "none"
                raise ConfigError(
                    f"cannot upsert into table {name} by {', '.join(key)}: its identifier fields "
                    f"are {found}",
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
                partitions=tuple(each["name"] for each in json.loads(shape.spec)["fields"]),
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
            table = self._catalog.load(name)  # a handle of its own: it is always at the newest
            if table is None:
                raise IdentityMismatch(f"cannot open table {name}: it is gone")
            held.orders = VersionFiles(table, held.config.branch, key, order)
        return held.orders

    def target(self, name: str) -> TableCommitter:
        if name in self.amiss:
            raise self.amiss[name]
        if name not in self.held:
            raise IdentityMismatch(
                f"cannot commit to table {name}: it is not there, or the config does not name it "
                "any more",
                hint="what was staged for it waits; restore the table, or its [[table]]",
            )
        return self.held[name].target

    def pace(self, name: str, interval: float) -> CommitTrigger:
        if not self.configured(name):
            return CommitTrigger(interval)
        from_config = self.config_of(name)
        return CommitTrigger(
            duration(from_config.commit_interval) if from_config.commit_interval else interval,
            size(from_config.commit_bytes) if from_config.commit_bytes else None,
            from_config.priority,
        )

    # ── what the index knows of them ─────────────────────────────────────────────────────────

    def said(self, index: JavaTable) -> Mapping[str, str] | str:
        """Table → uuid for the next entry of the index; of many, the name of the property of the
        index that has them, which is written when they change."""
        uuids = self._uuids()
        return uuids if len(uuids) <= _NAMED else self.announce(index)

    def announce(self, index: JavaTable) -> str:
        """Write down in the index, as a property, which tables there are; its name."""
        key = f"{TABLES_PROPERTY}.{self._config.sink.id}"
        with self._announcing:  # the committer's thread does so, too
            uuids = self._uuids()
            if uuids != self._said:
                index.set_property(key, json.dumps(uuids, separators=(",", ":")))
                self._said = uuids
        return key

    def announced(self, index: JavaTable) -> dict[str, str]:
        """Also those that no entry of the index names yet."""
        key = f"{TABLES_PROPERTY}.{self._config.sink.id}"
        return dict(json.loads(index.properties.get(key, "{}")))

    def _uuids(self) -> dict[str, str]:
        held = list(self.held.items())  # at once: another thread may be making one
        return dict(sorted((name, each.table.uuid) for name, each in held)) | self._gone

    def compare(
        self, known: Mapping[str, str], astray: Callable[[TableCommitter], FrazilError | None]
    ) -> None:
        """The tables the position counts on must be there, the same, and not `astray`."""
        same = [
            name
            for name, uuid in known.items()
            if name in self.held and self.held[name].table.uuid == uuid
        ]
        errors = parallel_map(lambda name: astray(self.held[name].target), same)
        strayed = {name: error for name, error in zip(same, errors, strict=True) if error}
        for name, uuid in known.items():
            held = self.held.get(name)
            if not self.configured(name):
                self._gone[name] = uuid  # none of ours any more, and not forgotten
            elif held is None:
                self.amiss[name] = IdentityMismatch(
                    f"cannot go on with table {name}: it is gone",
                    hint="restore the table; what was staged for it waits",
                )
            elif held.table.uuid != uuid:
                self.amiss[name] = IdentityMismatch(
                    f"cannot go on with table {name}: it was dropped and made again; expected uuid "
                    f"{uuid}, found {held.table.uuid}",
                    hint="restore the table; its batches wait, staged",
                )
            elif name in strayed:
                self.amiss[name] = strayed[name]
            if name in self.amiss:
                self._gone[name] = uuid
        for name in self.held:  # without its memory it would take back what was deleted
            error = self.amiss.get(remembered(name))
            if error is not None and name not in self.amiss and self.config_of(name).version_column:
                self.amiss[name] = error


#: Properties by which a table's files are not the plain ones that tasks write: property → why.
_UNSUPPORTED = {
    "write.location-provider.impl": "names its files by a Java class, which tasks cannot ask",
    "encryption.key-id": "is encrypted, and tasks write plain files",
}


def refuse_unsupported(table: JavaTable) -> None:
    """What would be passed over in silence, or cannot be proven, is refused when it is opened."""
    if table.format_version < 2:
        raise ConfigError(
            f"cannot fill table {table.name}: expected format version 2 or 3, found "
            f"{table.format_version}, whose commits have no order",
            hint=f"ALTER TABLE {table.name} SET TBLPROPERTIES ('format-version' = '2')",
        )
    for key, why in _UNSUPPORTED.items():
        if found := table.properties.get(key):
            raise ConfigError(
                f"cannot fill table {table.name}: it {why}; found {key} = {found}",
                hint=f"ALTER TABLE {table.name} UNSET TBLPROPERTIES ('{key}'), or use another "
                "table",
            )


def ledger_tag_of(sink: str, branch: str) -> str:
    """The tag that is a sink's witness in a branch, as `protocol.TableCommitter` sets it."""
    return ledger_tag(sink) if branch == "main" else f"{ledger_tag(sink)}/{branch}"


def _whose(tag: str, branch: str) -> str:
    """The sink whose witness in the branch a tag is; empty: none's."""
    sink, _, there = tag.removeprefix(WITNESS).partition("/")
    return sink if tag.startswith(WITNESS) and (there or "main") == branch else ""


def writer_spec(table: JavaTable, config: TableConfig, topic_column: str = "") -> WriterSpec:
    # Bounds are cut at 16 bytes by default; the audit tells partitions apart by the whole topic.
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
    """What columns were called, by the config and by the table's own earlier schemas."""
    return together(held.config.aliases, schema.former_names(held.table.schema, held.table.schemas))


def parallel_map(call: Callable[[S], T], what: Sequence[S]) -> list[T]:
    """`call` on each of many, a few at a time."""
    if len(what) < 2:
        return [call(each) for each in what]
    with ThreadPoolExecutor(min(THREADS, len(what)), "frazil-tables") as pool:
        return list(pool.map(call, what))
