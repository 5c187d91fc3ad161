"""Creates the tables of a sink, evolves their schemas, and plans what executors write to them.

Runs on the driver. `provisioning` decides which tables a batch needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from frazil.commit.tables import SinkTable, SinkTables, second_handle
from frazil.commit.version_files import VersionFiles
from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.config.select import table_selection
from frazil.config.units import size
from frazil.errors import ConfigError, IdentityMismatch, SchemaMismatch
from frazil.files.parquet_settings import PARQUET
from frazil.files.writer import WriterSpec, check
from frazil.iceberg import schema
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.maintenance_tasks import CREATED_BY
from frazil.iceberg.static_table import COLUMNS_PROPERTY
from frazil.iceberg.table import SchemaUpdate, Table
from frazil.ledger import index
from frazil.ledger.tags import filled_by
from frazil.pipeline.evolution import together
from frazil.pipeline.json_source import with_fixed
from frazil.pipeline.missing_columns import aliases_of
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.upsert import deletes_shape


class TableSchemas:
    def __init__(self, catalog: JavaCatalog, config: Config, tables: SinkTables) -> None:
        self._catalog = catalog
        self._config = config
        self._tables = tables

    def check(self, name: str, columns: pa.Schema, metadata: MetadataColumns) -> None:
        """Raises if such a table cannot be created, or the existing one cannot take the columns."""
        if name not in self._tables:
            self._new_layout(name, columns, metadata)
        elif self._tables.configs.of(name).schema_evolution == "evolve":
            self._update(self._tables[name], columns, metadata)(self._tables[name].table.schema)
        else:
            schema.check_fits(columns, self._tables[name].table.schema, metadata, name)

    def check_fixed(self, name: str, fixed: pa.Schema) -> None:
        """Raises if an existing table cannot have columns of these types. `fixed`: the columns
        whose types the config says."""
        if name not in self._tables:
            return  # it is created with them
        held = self._tables[name]
        beside = {field.name for field in held.metadata.fields}
        own = [c for c in schema.columns_of(held.table.schema) if c.name not in beside]
        self.check(name, with_fixed(own, fixed), held.metadata)

    def create(
        self,
        name: str,
        columns: pa.Schema,
        metadata: MetadataColumns,
        among: MetadataColumns,
        epoch: int,
    ) -> SinkTable:
        """The table, created now or by another writer meanwhile; not claimed yet."""
        config = self._tables.configs.of(name)
        made, spec, order = self._new_layout(name, columns, metadata)
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
            and config.name not in self._tables.configs.names
            and (COLUMNS_PROPERTY not in table.properties)
        ):
            raise SchemaMismatch(
                f"cannot fill table {name}, whose name comes from the data: it exists, and no "
                "sink created it"
            )
        held = self._tables.hold(name, table)
        held.target.epoch = epoch
        return held

    def _new_layout(
        self, name: str, columns: pa.Schema, metadata: MetadataColumns
    ) -> tuple[str, str, str]:
        config = self._tables.configs.of(name)
        if selection := table_selection(config):
            order = sorted(columns, key=lambda column: selection.place(column.name))
            columns = pa.schema(order, columns.metadata)
        made = schema.iceberg_schema(columns, metadata, config)
        schema.check_order(made, config)
        return (
            made,
            schema.partition_spec(made, config.partition_by, name),
            schema.sort_order(made, config.sort_by, name),
        )

    def evolve(
        self, name: str, columns: pa.Schema, metadata: MetadataColumns, relax: bool = True
    ) -> None:
        """Evolve the table so that such records fit; raises if that is not possible."""
        held = self._tables[name]
        if held.config.schema_evolution == "evolve":
            # With a new handle: a handle whose table was dropped can no longer be used for staging.
            table = self._catalog.load(name)
            if table is None or table.uuid != held.table.uuid:
                fact = "does not exist" if table is None else "was dropped and recreated"
                raise IdentityMismatch(f"cannot change table {name}: it {fact}")
            table.evolve(self._update(held, columns, metadata, relax))
            held.table, held.plan = table, None
        else:
            schema.check_fits(columns, held.table.schema, metadata, name)

    def reload(self, name: str) -> None:
        """Reload a table whose columns another writer changed; later writes use the new schema."""
        held, table = self._tables[name], self._catalog.load(name)
        if table is not None and table.uuid == held.table.uuid:  # else its commits will fail
            held.table, held.plan = table, None

    def _update(
        self, held: SinkTable, columns: pa.Schema, metadata: MetadataColumns, relax: bool = True
    ) -> Callable[[str], SchemaUpdate]:
        def update(current: str) -> SchemaUpdate:
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

    def plan(self, name: str, among: MetadataColumns | None = None) -> TablePlan:
        held = self._tables[name]
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

    def version_files(self, name: str, key: tuple[str, ...], order: str) -> VersionFiles:
        held = self._tables[name]
        if held.version_files is None:
            table = second_handle(self._catalog, held.table)  # which is always refreshed
            held.version_files = VersionFiles(table, held.config.branch, key, order)
        return held.version_files


def writer_spec(table: Table, config: TableConfig, topic_column: str = "") -> WriterSpec:
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
