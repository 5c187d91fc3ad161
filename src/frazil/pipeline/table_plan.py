"""The tables of a batch, as its tasks see them. Made on the driver, read on executors.

`TablePlan` describes a table that exists: schema, settings, and which records it already contains.
`NewTable` has the settings of one that does not exist yet. `ChunkPlan` has all tables, the rules
that route records to them, and the format of the records. Values only: nothing here reads a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from frazil.config.sections import MAX_COLUMNS
from frazil.files.writer import WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.offsets import Partition
from frazil.pipeline.evolution import Aliases
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.selection import SelectPlan
from frazil.pipeline.versions import VersionLookup, field_of

#: Modes of tables with a key.
LOG = "changelog"
UPSERT = "upsert"


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A table as the tasks of a batch see it: schema, settings and position."""

    shape: WriterSpec
    metadata: MetadataColumns
    event_time: str
    evolution: str = "evolve"
    aliases: Aliases = field(default_factory=dict)
    #: paths of identifier fields, which stay required; names of the table's partition fields
    identifier: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    format_version: int = 2
    #: the table already contains the records below these offsets
    floor: Mapping[Partition, int] = field(default_factory=dict)
    #: upsert tables: the key columns, and the writer spec of equality-delete files
    key: tuple[str, ...] = ()
    deletes: WriterSpec | None = None
    partitioned_by_key: bool = False
    #: upsert tables with a `version_column`: its path, the `_deleted` table, and the files of
    #: both tables in which to look up the current version of a key
    order: str = ""
    deleted_keys: TablePlan | None = None
    known: tuple[VersionLookup, ...] = ()
    #: change logs: the key columns
    log: tuple[str, ...] = ()
    #: how many columns JSON records may add up to, nested ones counted, metadata columns not
    max_columns: int = MAX_COLUMNS

    @property
    def columns(self) -> pa.Schema:
        """The columns of the record, without metadata columns."""
        beside = {column.name for column in self.metadata.fields}
        return pa.schema([column for column in self.shape.arrow if column.name not in beside])

    @property
    def key_columns(self) -> pa.Schema:
        key = self.key or self.log
        return pa.schema([column for column in self.shape.arrow if column.name in key])

    @property
    def needs_deletes(self) -> pa.Schema:
        """The columns that a delete event contains: the key and, if it has one, its version."""
        order = [self.order_field] if self.own_order else []
        return pa.schema([*self.key_columns, *order])

    @property
    def of_deletes(self) -> pa.Schema:
        """The columns of a delete: key, metadata columns and, if it has one, the version."""
        wanted = {*self.key, *(column.name for column in self.metadata.fields)} - {self.order}
        columns = [column for column in self.shape.arrow if column.name in wanted]
        return pa.schema(columns + ([self.order_field] if self.order else []))

    @property
    def own_order(self) -> str:
        """`order`, if it is a column of the record; empty if it is a metadata column."""
        beside = {column.name for column in self.metadata.fields}
        return "" if self.order in beside else self.order

    @property
    def order_field(self) -> pa.Field:
        return field_of(self.shape.arrow, self.order).with_nullable(True)


@dataclass(frozen=True, slots=True)
class NewTable:
    """The settings of a table that does not exist yet."""

    beside: tuple[str, ...] = ()  # names of its metadata columns
    max_columns: int = MAX_COLUMNS
    #: columns that cannot be float or double: keys, versions, sources of bucket and truncate
    undivided: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The input of a `ChunkPipeline`, besides the records."""

    format: RecordFormat = field(repr=False)
    #: None: all records go to table `only`
    rules: RoutingRules | None
    #: name → table; a table that records are routed to and that is missing here is a need
    tables: Mapping[str, TablePlan]
    #: tables that could not be created or changed as records need it, with the reason
    refused: Mapping[str, str] = field(default_factory=dict)
    only: str = ""
    #: names and templates of upsert tables and change logs, with their mode; and the format of the
    #: keys of records without a value; None: text
    keyed: Mapping[str, str] = field(default_factory=dict)
    key_format: RecordFormat | None = field(default=None, repr=False)
    #: names and templates of tables, with the settings of one that does not exist yet
    new: Mapping[str, NewTable] = field(default_factory=dict)
    #: names and templates of tables that select their columns, key and headers included
    selects: Mapping[str, SelectPlan] = field(default_factory=dict)
