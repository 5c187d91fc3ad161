"""The sections of a config: every key, its type, its default and what it means.

One frozen dataclass per section of the TOML file; `ConfigSections` holds all of them. Types are
checked when a section is made; whether the values make sense is for `frazil.config.checks`. The
reference in `docs/reference/config.md` has the same keys and defaults.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from frazil.config.section_builder import CheckedSection
from frazil.config.settings import Settings
from frazil.config.units import duration
from frazil.errors import ConfigError

#: Names reserved by Iceberg: Spark cannot read a table with such a column.
RESERVED = frozenset(
    [
        "_file",
        "_pos",
        "_deleted",
        "_spec_id",
        "_partition",
        "_row_id",
        "_last_updated_sequence_number",
        "_change_type",
        "_change_ordinal",
        "_commit_snapshot_id",
    ]
)
#: Bounds the columns, and so the metadata, that hostile records can add to a table.
MAX_COLUMNS = 1_000
CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
FORMATS = ("confluent-avro", "avro", "json", "raw")
EVOLUTION = ("evolve", "reject", "fail")
ENVELOPES = ("", "debezium")
MODES = ("append", "upsert", "changelog")
#: The default placeholder of Debezium's connectors.
UNAVAILABLE_VALUE = "__debezium_unavailable_value"
UNDECLARED = ("infer", "drop", "reject")
KEY_FORMATS = ("confluent-avro", "avro", "json", "text")
AVAILABLE_NOW = "available-now"
AUTO = "auto"
NEVER = "never"
#: OpenTelemetry's own variables say where metrics go.
OTLP_ENVIRONMENT = "env"


@dataclass(frozen=True, slots=True)
class SinkConfig(CheckedSection):
    """`[sink]`: identity, topics, batch and commit intervals, limits."""

    id: str
    topics: tuple[str, ...] = ()
    topic_pattern: str = ""
    #: earliest, latest, or a cut: {topic = {partition = offset}}; used only if no table has a
    #: position yet
    starting_offsets: str | dict[str, dict[str, int]] = "earliest"
    #: the offset index; by default `frazil_index` beside the first table
    index_table: str = ""
    #: how long snapshots of the index are kept; at most the newest 500
    index_snapshot_retention: str = "1d"
    #: folder for staged batches; by default `stage` beside the index's own files. Set it for table
    #: buckets that accept only Iceberg's files
    staging_location: str = ""
    #: Spark's checkpoint. Required only for a query with state, or with a source that stores its
    #: progress there; by default a temporary folder
    checkpoint_location: str = ""
    #: auto: one batch per commit interval, sooner if a batch is full or a caller waits for the
    #: records; a duration: Spark starts a batch of the available records at this interval;
    #: available-now: process all available records, then stop
    trigger: str = "auto"
    #: how often tables are committed; all batches staged by then are committed together
    commit_interval: str = "1m"
    max_records_per_trigger: int = 16_000_000
    max_bytes_per_trigger: str = "1GiB"
    #: a partition's range is split so that one task gets at most this many offsets
    max_records_per_task: int = 1_000_000
    #: limits on staged, uncommitted batches: beyond any of them the stream blocks until a commit
    max_pending_batches: int = 64
    max_pending_bytes: str = "16GiB"
    max_pending_age: str = "6h"
    #: auto: Frazil's own fetch client, also over TLS and SASL, and confluent-kafka for what that
    #: does not know (Kerberos, key stores, old message formats); librdkafka: always
    #: confluent-kafka
    kafka_client: str = "auto"
    #: how long a broker may be unavailable before the stream stops
    unavailable_timeout: str = "5m"
    #: consumer group under which committed offsets are published; by default the sink's id
    consumer_group: str = ""
    #: how many tables a sink may create: a guard for table names taken from the data
    max_tables: int = 1000
    #: allow another sink to write the same topic to the same table, which then has records twice
    allow_shared_topics: bool = False


@dataclass(frozen=True, slots=True)
class DecodeConfig(CheckedSection):
    """`[decode]`: how a record's value is decoded into columns."""

    format: str = "confluent-avro"
    #: path of an Avro schema (.avsc); without it Confluent Avro uses the registry. With JSON: the
    #: columns as an Avro schema or a JSON Schema
    schema: str = ""
    #: JSON: path of a field → type of its column: {at = "timestamptz", "meta.id" = "long"}
    columns: dict[str, str] = field(default_factory=dict)
    #: JSON: what happens to fields that `columns` or `schema` do not declare: infer, drop, reject
    undeclared: str = "infer"
    #: format of record keys, used to find the row that a record without a value deletes:
    #: confluent-avro, avro, json, or text. By default that of the value if it is JSON or has its
    #: schema in the registry; otherwise text
    key_format: str = ""
    #: path of the key's Avro schema
    key_schema: str = ""
    #: keys in JSON: path of a field → its type, as `columns`
    key_columns: dict[str, str] = field(default_factory=dict)
    #: Debezium's `unavailable.value.placeholder`: upsert tables reject a change that contains it.
    #: Empty: it is an ordinary value
    unavailable_value: str = UNAVAILABLE_VALUE
    registry: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TransformConfig(CheckedSection):
    """`[transform]`: a Spark query between the stream and the table; empty: none."""

    #: a query over the view `stream`; it may join tables of the catalog
    sql: str = ""
    #: module:function, from DataFrame to DataFrame
    python: str = ""
    #: output mode of Spark: append, or update, which replaces rows by their key in an upsert table
    output_mode: str = "append"

    def __post_init__(self) -> None:
        CheckedSection.__post_init__(self)
        object.__setattr__(self, "sql", self.sql.strip())

    def __bool__(self) -> bool:
        return bool(self.sql or self.python)


@dataclass(frozen=True, slots=True)
class CatalogConfig(CheckedSection):
    """`[catalog]`: `name`; all other keys are Iceberg's catalog properties."""

    name: str = "lake"
    properties: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TableConfig(CheckedSection):
    """`[[table]]`: one Iceberg table, created from the writer schema if absent."""

    name: str
    partition_by: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)
    format_version: int = 2
    location: str = ""
    branch: str = "main"
    #: column whose lowest and highest value each batch records; by default the record's timestamp
    event_time: str = ""
    #: append: every record is a row. upsert: the last record of each key is its row, and a record
    #: without a value deletes it. changelog: every record is a row, including those without a value
    mode: str = "append"
    #: upsert and changelog tables: the columns of a row's key
    key: tuple[str, ...] = ()
    #: all records of a key are in one Kafka partition, so they need not be merged across partitions
    #: before the write. Checked in every batch; a violation stops the stream
    partitioned_by_key: bool = False
    #: upsert tables: the column that orders the changes of a key, whatever their order in Kafka (a
    #: version, a log sequence number); a path if it is nested. Empty: the last record is the newest
    version_column: str = ""
    #: upsert tables behind a query: a boolean column of its rows, which is not written; true
    #: deletes the row's key
    delete_column: str = ""
    #: upsert tables: the sink compacts the table after so many commits with deletes, sooner if many
    #: keys were deleted; 0: never
    compact_after_commits: int = 10
    #: how long snapshots of the table are kept; older ones are expired, and files that only they
    #: reference are removed. Empty: a day, and at most 1,500, if a sink created the table, else
    #: forever; never: they are never expired
    snapshot_retention: str = ""
    #: columns that identify a row (Iceberg's identifier fields); they become required
    identifier_fields: tuple[str, ...] = ()
    #: order of the rows within each file: "country", "placed_at desc", "bucket(16, id) nulls last"
    sort_by: tuple[str, ...] = ()
    #: how records that do not fit the table are handled: evolve changes the table if possible,
    #: reject makes them dead letters, fail stops the stream
    schema_evolution: str = "evolve"
    #: most columns, nested ones counted, to which fields of JSON records may extend the table
    max_columns: int = MAX_COLUMNS
    #: the columns of a row, as the items of a SELECT list: "id", "customer.name as name",
    #: "mask(email) as email", "* except (ssn)". Empty: all fields of the record's value
    select: tuple[str, ...] = ()
    #: column for the record's key; empty: none
    key_column: str = ""
    #: what it holds: binary (its bytes), string (UTF-8), struct (its fields, by key_format)
    key_column_type: str = "binary"
    #: makes every field of the decoded key a column, its name behind this prefix; empty: none
    key_fields_prefix: str = ""
    #: column for all headers, a list of name and value; empty: none
    headers_column: str = ""
    #: columns for the text of single headers: column → header
    headers: dict[str, str] = field(default_factory=dict)
    #: renamed columns: new name → former name, which older records still use
    aliases: dict[str, str] = field(default_factory=dict)
    target_file_size: str = "256MiB"
    compression: str = "zstd"
    #: how long staged files of this table may wait for a commit; by default as in `[sink]`
    commit_interval: str = ""
    #: commit earlier once staged files have this size; empty: only time counts
    commit_bytes: str = ""
    #: of the tables due for a commit, those with a higher number are committed first
    priority: int = 0
    #: names of the metadata columns; an empty name omits the column (`timestamp_column` only)
    topic_column: str = "_topic"
    partition_column: str = "_topic_partition"
    offset_column: str = "_offset"
    timestamp_column: str = "_timestamp"

    @property
    def upsert_key(self) -> tuple[str, ...]:
        """The key by which rows are replaced; empty: rows are never replaced."""
        return self.key if self.mode == "upsert" else ()


@dataclass(frozen=True, slots=True)
class RouteConfig(CheckedSection):
    """`[[route]]`: the tables a record goes to. The first matching rule decides."""

    #: topics of the rule, by name or by a pattern that matches the whole name; neither: all
    topics: tuple[str, ...] = ()
    pattern: str = ""
    #: a field of the value (a path: `source.table`), or a header of the record
    field: str = ""
    header: str = ""
    #: accepted values of the field or header, as text; empty: any value but null
    values: tuple[str, ...] = ()
    #: the target tables; names may contain `{value}`, `{topic}` and groups of `pattern`
    to: tuple[str, ...] = ()
    #: skip the record, and count it
    skip: bool = False
    #: module:function over columns, for conditions that rules cannot express
    python: str | Callable[..., Any] = ""
    #: pattern of the values allowed in a table's name; other records are rejected
    allowed_names: str = "[a-z][a-z0-9_]{0,63}"
    #: debezium: the value is a change event, and its row is written
    envelope: str = ""


@dataclass(frozen=True, slots=True)
class DeadLettersConfig(CheckedSection):
    """`[dead_letters]`: where rejected records go. Without a table they stop the stream."""

    table: str = ""
    #: a batch with more rejected records than this share, or this number, stops the stream
    max_fraction: float = 0.5
    max_count: int = 1_000_000

    def __bool__(self) -> bool:
        return bool(self.table)


@dataclass(frozen=True, slots=True)
class CompletenessConfig(CheckedSection):
    """`[completeness]`: when an hour counts as complete."""

    #: how much older than the newest record of its partition a record may be
    allowed_lateness: str = "0s"
    #: a partition without records for so long, and with none left to read, no longer holds back the
    #: others; never: it always does
    idle_timeout: str = "never"
    #: event times further ahead of the clock than this are ignored
    max_future: str = "1h"


@dataclass(frozen=True, slots=True)
class MetricsConfig(CheckedSection):
    """`[metrics]`: where metrics of a running sink go, and what they ask for."""

    #: HOST:PORT of `/metrics` for Prometheus; a port alone is on loopback; empty: no server
    address: str = ""
    #: base URL of an OpenTelemetry collector (OTLP over HTTP); env: where OTEL_EXPORTER_OTLP_…
    #: variables say; empty: none
    otlp_endpoint: str = ""
    #: how often Kafka is asked for the ends of the topics
    lag_interval: str = "10s"
    #: how often the sink audits itself, from metadata; never: it does not
    audit_interval: str = "never"
    #: tables, topics, and partitions that have series of their own; further ones are `other`
    max_labels: int = 100

    def __bool__(self) -> bool:
        return bool(self.address or self.otlp_endpoint)


@dataclass(frozen=True, slots=True)
class HealthConfig(CheckedSection):
    """`[health]`: how a running sink shows that it is well."""

    #: file that is written every few seconds, for `frazil health FILE`; empty: none
    file: str = ""
    #: how often a heartbeat is written where the sink stages, for `frazil status`; never: not
    heartbeat_interval: str = "10s"
    #: a sink that waits for longer is not ready
    max_wait: str = "5m"
    #: a start that shows no progress for longer is not healthy
    max_start: str = "15m"


@dataclass(frozen=True, slots=True)
class LogConfig(CheckedSection):
    """`[log]`: where the log of a process goes, and what it has."""

    #: auto: text, but none on a terminal, which shows progress; text; json
    format: str = "auto"
    level: str = "INFO"
    #: by default standard error. Opened again where it was moved or removed
    file: str = ""
    #: level of Spark's own log, on standard error
    spark_level: str = "FATAL"


#: Events of `[notify]`.
EVENTS = ("started", "stopped", "failed", "fenced", "waiting", "recovered", "rejected", "audit")


@dataclass(frozen=True, slots=True)
class NotifyConfig(CheckedSection):
    """`[notify]`: who is notified of what happens to a sink."""

    #: program and arguments; a text is split as a shell would, and no shell runs. It gets the event
    #: as JSON on its standard input
    command: tuple[str, ...] = ()
    #: URL that gets the event as JSON in a POST; env:NAME or file:PATH where it is a secret
    webhook: str = field(default="", repr=False)
    #: headers of the POST; secrets as env:NAME or file:PATH
    headers: Settings = field(default_factory=Settings, repr=False)
    #: empty: all
    events: tuple[str, ...] = ()
    #: for one call of the command, or one POST
    timeout: str = "10s"

    def __post_init__(self) -> None:
        if isinstance(self.command, str):
            try:
                object.__setattr__(self, "command", tuple(shlex.split(self.command)))
            except ValueError as error:
                raise ConfigError(
                    f"cannot read [notify] command: {error}", path=("command",)
                ) from None
        CheckedSection.__post_init__(self)

    def __bool__(self) -> bool:
        return bool(self.command or self.webhook)


@dataclass(frozen=True, slots=True)
class ConfigSections:
    """All sections of a config, and the values that follow from several of them. Not checked:
    `frazil.config.model.Config` is the checked one."""

    sink: SinkConfig
    kafka: Settings
    tables: tuple[TableConfig, ...]
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    catalog: CatalogConfig = field(default_factory=CatalogConfig)
    spark: Settings = field(default_factory=Settings)
    transform: TransformConfig = field(default_factory=TransformConfig)
    routes: tuple[RouteConfig, ...] = ()
    dead_letters: DeadLettersConfig = field(default_factory=DeadLettersConfig)
    completeness: CompletenessConfig = field(default_factory=CompletenessConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    log: LogConfig = field(default_factory=LogConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)

    @property
    def index_table(self) -> str:
        if self.sink.index_table:
            return self.sink.index_table
        namespace, _, _ = self.tables[0].name.rpartition(".")
        return f"{namespace}.frazil_index"

    @property
    def one_table(self) -> bool:
        """Do all records go to one table that is known by name?"""
        return not self.routes and not self.dead_letters and not self.versioned_tables

    @property
    def versioned_tables(self) -> tuple[str, ...]:
        """Tables, or templates of tables, that have a `_deleted` table beside them."""
        return tuple(table.name for table in self.tables if table.version_column)

    def branch(self, table: str) -> str:
        """The branch of a table, by its `[[table]]` or the template that it was created from."""
        branches = {table_config.name: table_config.branch for table_config in self.tables}
        for name, branch in branches.items() if table not in branches else ():
            if re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(name)), table):
                return branch
        return branches.get(table, "main")

    @property
    def group(self) -> str:
        return self.sink.consumer_group or self.sink.id

    @property
    def gather(self) -> float:
        """Seconds that records may wait in Kafka for their batch: the shortest commit interval of
        all tables. 0 if `trigger` determines the batches."""
        if self.sink.trigger != AUTO:
            return 0.0
        own = (table.commit_interval or self.sink.commit_interval for table in self.tables)
        return min(map(duration, own))


def replayed(dead_letters: str) -> str:
    """The table that records which dead letters were replayed."""
    return f"{dead_letters}_replayed"


def deleted_keys_table(table: str) -> str:
    """The table that records the deleted keys of a table with `version_column`."""
    return f"{table}_deleted"
