"""The configuration: one TOML file, or the same in Python, checked before anything starts.

In: a path (plus `FRAZIL_…` environment variables), or dataclasses made in code. Out: a frozen
`Config`. `[kafka]`, `[catalog]`, `[spark]` and `[decode.registry]` pass through unchanged to
librdkafka, Iceberg, Spark and the registry client. Every other key is defined here; an unknown key
is refused with the nearest known one. A secret is never a value in the file: it is `env:NAME` or
`file:PATH`, resolved where it is used and masked wherever a config is shown.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from frazil.config import origins
from frazil.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

T = TypeVar("T")

#: Keys of the pass-through sections whose values are secrets.
SECRET = re.compile(
    r"password|passphrase|secret|credential(?!s?[.\-](provider|source))|(^|[.\-_])token($|\.)"
    r"|user\.info|key\.pem|oauthbearer\.config|authorization|account\.key|connection-string",
    re.IGNORECASE,
)
#: A reference to a secret.
_REFERENCE = re.compile(r"(env|file):.")
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
MODES = ("append", "upsert", "changelog")
#: The default placeholder of Debezium's connectors.
UNAVAILABLE_VALUE = "__debezium_unavailable_value"
KEY_FORMATS = ("confluent-avro", "avro", "json", "text")


class Settings(dict[str, str]):
    """A pass-through section. Its repr masks the values of secrets."""

    def __repr__(self) -> str:
        return repr({k: "***" if SECRET.search(k) else v for k, v in self.items()})

    def resolved(self) -> dict[str, str]:
        """The settings with `env:` and `file:` references resolved. Never log or store them."""
        return {key: resolve(key, value) for key, value in self.items()}


def resolve(key: str, value: str) -> str:
    kind, _, name = value.partition(":")
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(
                f"cannot resolve {key}: environment variable {name} is not set",
                hint=f"export {name}=…",
            )
        return os.environ[name]
    if kind == "file" and SECRET.search(key):
        try:
            return Path(name).read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot resolve {key}: {name}: {error.strerror}") from None
    return value


class _CheckedSection:
    """Checks sections made in Python like those of a file: lists become tuples, and an error names
    the setting with a wrong type."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):  # type: ignore[arg-type]
            where = f"{_title(type(self))} {setting.name}"
            with _placed(lambda path: f"argument {path[0]}"), _within(setting.name):
                fitted = _fit(where, str(setting.type), getattr(self, setting.name))
            object.__setattr__(self, setting.name, fitted)


@contextmanager
def _within(*section: str) -> Iterator[None]:
    """Prefixes the path of a setting's error with its section."""
    try:
        yield
    except ConfigError as error:
        error.path = (*section, *error.path)
        raise


@contextmanager
def _placed(shown: Callable[[tuple[str, ...]], str]) -> Iterator[None]:
    """Adds the location of the setting to an error, from its path. An outer context overrides an
    inner one: argument of a section, argument of the config, line of a file or variable."""
    try:
        yield
    except ConfigError as error:
        if where := shown(error.path):
            error.placed(where)
        raise


def _argument(path: tuple[str, ...]) -> str:
    """The name of a setting in Python: `argument tables[0].mode`, `kafka['group.id']`."""
    if not path:
        return ""
    first = f"{path[0]}s" if path[0] in ("table", "route") else path[0]
    below = (
        f".{word}" if word.isidentifier() else f"[{word}]" if word.isdigit() else f"[{word!r}]"
        for word in path[1:]
    )
    return f"argument {first}{''.join(below)}"


def _title(kind: Any) -> str:
    """`[sink]`, `[[table]]`: the section name at the start of the class's docstring."""
    match = re.search(r"`(\[+[\w.]+\]+)`", kind.__doc__ or "")
    assert match, kind
    return match[1]


@dataclass(frozen=True, slots=True)
class SinkConfig(_CheckedSection):
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
    #: auto: Frazil's own fetch client on plaintext connections, confluent-kafka otherwise;
    #: librdkafka: always confluent-kafka
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
class DecodeConfig(_CheckedSection):
    """`[decode]`: how a record's value is decoded into columns."""

    format: str = "confluent-avro"
    #: path of an Avro schema (.avsc); without it Confluent Avro uses the registry
    schema: str = ""
    #: format of record keys, used to find the row that a record without a value deletes:
    #: confluent-avro, avro, json, or text. By default that of the value if it is JSON or has its
    #: schema in the registry; otherwise text
    key_format: str = ""
    #: path of the key's Avro schema
    key_schema: str = ""
    #: Debezium's `unavailable.value.placeholder`: upsert tables reject a change that contains it.
    #: Empty: it is an ordinary value
    unavailable_value: str = UNAVAILABLE_VALUE
    registry: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TransformConfig(_CheckedSection):
    """`[transform]`: a Spark query between the stream and the table; empty: none."""

    #: a query over the view `stream`; it may join tables of the catalog
    sql: str = ""
    #: module:function, from DataFrame to DataFrame
    python: str = ""
    #: output mode of the query; tables accept only append
    output_mode: str = "append"

    def __bool__(self) -> bool:
        return bool(self.sql or self.python)


@dataclass(frozen=True, slots=True)
class CatalogConfig(_CheckedSection):
    """`[catalog]`: `name`; all other keys are Iceberg's catalog properties."""

    name: str = "lake"
    properties: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TableConfig(_CheckedSection):
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
class RouteConfig(_CheckedSection):
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
class DeadLettersConfig(_CheckedSection):
    """`[dead_letters]`: where rejected records go. Without a table they stop the stream."""

    table: str = ""
    #: a batch with more rejected records than this share, or this number, stops the stream
    max_fraction: float = 0.5
    max_count: int = 1_000_000

    def __bool__(self) -> bool:
        return bool(self.table)


@dataclass(frozen=True, slots=True)
class CompletenessConfig(_CheckedSection):
    """`[completeness]`: when an hour counts as complete."""

    #: how much older than the newest record of its partition a record may be
    allowed_lateness: str = "0s"
    #: a partition without records for so long, and with none left to read, no longer holds back the
    #: others; never: it always does
    idle_timeout: str = "never"
    #: event times further ahead of the clock than this are ignored
    max_future: str = "1h"


@dataclass(frozen=True, slots=True)
class Config:
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

    if TYPE_CHECKING:  # dicts stand for sections, and lists for several of them

        def __init__(
            self,
            sink: SinkConfig | Mapping[str, Any],
            kafka: Mapping[str, str],
            tables: Sequence[TableConfig | Mapping[str, Any]],
            decode: DecodeConfig | Mapping[str, Any] = ...,
            catalog: CatalogConfig | Mapping[str, str] = ...,
            spark: Mapping[str, str] = ...,
            transform: TransformConfig | Mapping[str, Any] = ...,
            routes: Sequence[RouteConfig | Mapping[str, Any]] = ...,
            dead_letters: DeadLettersConfig | Mapping[str, Any] = ...,
            completeness: CompletenessConfig | Mapping[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Converts dicts and lists to sections, as in a file, and checks them."""
        with _placed(_argument):
            self._fit_sections()
            check(self)

    def _fit_sections(self) -> None:
        put = partial(object.__setattr__, self)
        if isinstance(self.catalog, Mapping):
            properties = dict(self.catalog)
            with _within("catalog"):
                name = properties.pop("name", "lake")
                put("catalog", CatalogConfig(name, _settings("catalog", properties)))
        kinds = {
            "sink": SinkConfig,
            "decode": DecodeConfig,
            "transform": TransformConfig,
            "catalog": CatalogConfig,
            "dead_letters": DeadLettersConfig,
            "completeness": CompletenessConfig,
        }
        for name, kind in kinds.items():
            with _within(name):
                put(name, _made(kind, getattr(self, name)))
        for name, several in (("table", TableConfig), ("route", RouteConfig)):
            given = getattr(self, f"{name}s")
            if not isinstance(given, (list, tuple)):
                raise ConfigError(
                    f"cannot read {_title(several)}: expected a list, found {given!r}", path=(name,)
                )
            put(f"{name}s", _numbered_sections(name, several, given))
        for name in ("kafka", "spark"):
            with _within(name):
                put(name, _settings(name, getattr(self, name)))
        for name, value in _without_catalog(self).items():
            put(name, value)

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """The config of a TOML file, overridden by `FRAZIL_SECTION__KEY` variables."""
        return load(path)

    @property
    def index_table(self) -> str:
        if self.sink.index_table:
            return self.sink.index_table
        namespace, _, _ = self.tables[0].name.rpartition(".")
        return f"{namespace}.frazil_index"

    @property
    def one_table(self) -> bool:
        """Do all records go to one table that is known by name?"""
        return not self.routes and not self.dead_letters and not self.remembering

    @property
    def remembering(self) -> tuple[str, ...]:
        """Tables, or templates of tables, that have a `_deleted` table beside them."""
        return tuple(table.name for table in self.tables if table.version_column)

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


def _made(kind: Callable[..., T], given: Any) -> T:
    if isinstance(given, Mapping):
        return _section(kind, _title(kind), given)
    if type(given) is not kind:
        raise ConfigError(f"cannot read {_title(kind)}: expected a table of keys, found {given!r}")
    return cast(T, given)


def _numbered_sections(name: str, kind: Callable[..., T], given: Any) -> tuple[T, ...]:
    made = []
    for number, section in enumerate(given):
        with _within(name, str(number)):
            made.append(_made(kind, section))
    return tuple(made)


def _without_catalog(config: Config) -> dict[str, Any]:
    """Removes the catalog's name from names of three or more parts, as in Spark."""
    lead = f"{config.catalog.name}."

    def named(name: str) -> str:
        return name.removeprefix(lead) if name.count(".") > 1 else name

    change = dataclasses.replace
    return {
        "sink": change(config.sink, index_table=named(config.sink.index_table)),
        "tables": tuple(change(table, name=named(table.name)) for table in config.tables),
        "routes": tuple(change(route, to=tuple(map(named, route.to))) for route in config.routes),
        "dead_letters": change(config.dead_letters, table=named(config.dead_letters.table)),
    }


def duration(text: str, key: str = "", path: tuple[str, ...] = ()) -> float:
    """Seconds of `500ms`, `20s`, `5m`, `6h`, `2d`; `key` names the setting in errors."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", text)
    if not match:
        raise ConfigError(
            f"cannot read {key or 'duration'}: expected a number with ms, s, m, h or "
            f"d, as 20s, found {text!r}",
            path=path,
        )
    scale = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[match.group(2)]
    return float(match.group(1)) * scale


def size(text: str, key: str = "", path: tuple[str, ...] = ()) -> int:
    """Bytes of `4096`, `64KiB`, `256MiB`, `1GiB` (`KB`, `MB`, `GB` are decimal)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", text)
    if not match:
        raise ConfigError(
            f"cannot read {key or 'size'}: expected a number with KiB, MiB or GiB, "
            f"as 256MiB, found {text!r}",
            path=path,
        )
    base = 1000 if match.group(3) == "B" and match.group(2) else 1024
    return int(float(match.group(1)) * base ** " KMGT".index(match.group(2) or " "))


def load(path: str | Path, environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a TOML file, overridden by `FRAZIL_SECTION__KEY` variables."""
    return traced(path, environ)[0]


def catalog_only(table: str, properties: Mapping[str, str]) -> Config:
    """A config with nothing but a catalog and a table, for reads that need no sink."""
    return from_document(
        {
            "sink": {"id": "audit", "topics": ["none"]},
            "kafka": {"bootstrap.servers": "none"},
            "decode": {"format": "raw"},
            "catalog": dict(properties),
            "table": [{"name": table}],
        }
    )


def traced(
    path: str | Path, environ: Mapping[str, str] = os.environ
) -> tuple[Config, origins.Origins]:
    """The config, and the origin of each setting."""
    places: origins.Origins = {}
    with _placed(lambda setting: origins.place(places, setting) if setting else ""):
        given = document(
            path, environ, places
        )  # an error without a setting names the file or variable
    with _placed(lambda setting: origins.place(places, setting) or Path(path).name):
        config = from_document(given, base=Path(path).parent)
        check_catalog(config)
    return config, places


def document(
    path: str | Path,
    environ: Mapping[str, str] = os.environ,
    places: origins.Origins | None = None,
) -> dict[str, Any]:
    """The parsed file with variables applied. Adds the origin of each setting to `places`."""
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ConfigError(f"cannot read config {path}: it is larger than {_LARGEST:,} bytes")
        parsed = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read config {path}: not TOML: it is not UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read config {path}: not TOML: {error}") from None
    places = {} if places is None else places
    places.update(origins.lines(text.decode(), Path(path).name))
    return overlay(parsed, environ, places)


#: Largest config file, in bytes.
_LARGEST = 16_000_000


def overlay(
    document: dict[str, Any], environ: Mapping[str, str], places: origins.Origins | None = None
) -> dict[str, Any]:
    """`FRAZIL_SINK__ID=a` sets `[sink] id`; `FRAZIL_KAFKA__BOOTSTRAP_SERVERS` a dotted key;
    `FRAZIL_TABLE__0__NAME` a field of the first table; `FRAZIL_SINK__TOPICS=a,b` a list."""
    for name in sorted(environ):
        if not name.startswith("FRAZIL_") or "__" not in name:
            continue
        section, *rest = name.removeprefix("FRAZIL_").lower().split("__")
        where: Any = document
        path = [section]
        several = section in ("table", "route")
        numbered = several and _NUMBER.fullmatch(rest[0])
        depth = 1 + bool(numbered) + (rest[0] == "registry")
        if len(rest) != depth or not isinstance(where.get(section, {}), (dict, list)):
            raise ConfigError(
                f"cannot read environment variable {name}: expected FRAZIL_SECTION__KEY"
            )
        where = where.setdefault(section, [] if several else {})
        if several:
            index = int(rest.pop(0)) if numbered else 0
            path.append(str(index))
            if isinstance(where, list):
                where = _numbered(name, index, where, environ)
        if not isinstance(where, dict):
            raise ConfigError(
                f"cannot read environment variable {name}: the file says [{section}] "
                f"is {where!r}; expected a table of keys"
            )
        if section == "decode" and rest[0] == "registry" and len(rest) > 1:
            where = where.setdefault(rest.pop(0), {})
            _table("decode.registry", where)
            section = "registry"
            path.append(section)
        key = rest[0]
        if section in ("kafka", "catalog", "spark", "registry"):
            with _within(*path):
                flat = _settings(section, where)  # TOML nests unquoted dotted keys
            where.clear()
            where.update(flat)
            alike = [k for k in where if re.sub(r"[.\-]", "_", k).lower() == key]
            key = alike[0] if alike else key if key == "name" else key.replace("_", ".")
        lists = (
            "topics",
            "partition_by",
            "sort_by",
            "identifier_fields",
            "to",
            "values",
            *(["key"] if section == "table" else []),
        )
        where[key] = _listed(name, environ[name]) if key in lists else environ[name]
        passed = section in ("kafka", "catalog", "spark", "registry")
        if passed and SECRET.search(key) and not _REFERENCE.match(environ[name]):
            where[key] = f"env:{name}"  # a secret may be in the environment
        if places is not None:
            places[".".join((*path, key))] = f"environment variable {name}"
    return document


_NUMBER = re.compile(r"[0-9]{1,9}")


def _numbered(name: str, index: int, sections: list[Any], environ: Mapping[str, str]) -> Any:
    """The table or route number `index`. Variables may add sections without gaps, so the number is
    bounded by the count of variables, whatever number a variable names."""
    section = name.split("__")[0]
    known = len(sections) + sum(variable.startswith(f"{section}__") for variable in environ)
    if index >= known:
        raise ConfigError(
            f"cannot read environment variable {name}: there is no number {index}; "
            f"expected 0 to {known - 1}"
        )
    sections.extend({} for _ in range(len(sections), index + 1))
    return sections[index]


def _listed(name: str, text: str) -> list[str]:
    # commas inside parentheses belong to a transform: bucket(16, id)
    items = [item.strip() for item in re.split(r",(?![^(]*\))", text)] if text.strip() else []
    if "" in items:
        raise ConfigError(
            f"cannot read environment variable {name}: an item of the list is empty; "
            f"expected items with a comma between them, found {text!r}"
        )
    return items


def from_document(document: Mapping[str, Any], base: Path = Path()) -> Config:
    known = (
        "sink",
        "kafka",
        "decode",
        "transform",
        "catalog",
        "spark",
        "table",
        "route",
        "dead_letters",
        "completeness",
    )
    for several in ("table", "route"):
        if not isinstance(document.get(several, []), list):
            raise ConfigError(
                f"cannot read config: [{several}] is one {several}; expected [[{several}]]",
                path=(several,),
            )
    for section in document:
        if section not in known:
            raise ConfigError(
                f"cannot read config: unknown section [{section}]{_nearest(section, known)}",
                path=(section,),
            )
        content = document[section]
        for values in content if section in ("table", "route") else [content]:
            _table(section, values)
    _table("decode.registry", document.get("decode", {}).get("registry", {}))
    decode = dict(document.get("decode", {}))
    with _within("decode", "registry"):
        decode["registry"] = _settings("decode.registry", decode.get("registry", {}))
    for path in ("schema", "key_schema"):
        if given := decode.get(path):  # relative to the config file
            if not isinstance(given, str):
                raise ConfigError(
                    f"cannot read [decode] {path}: expected the path of a file, found {given!r}",
                    path=("decode", path),
                )
            decode[path] = str(base / given)
    transform = _from(base, document.get("transform", {}))
    routes = [_from(base, route) for route in document.get("route", [])]
    catalog = dict(document.get("catalog", {}))
    name = catalog.pop("name", "lake")
    if not isinstance(name, str):
        raise ConfigError(
            f"cannot read [catalog] name: expected text, found {name!r}", path=("catalog", "name")
        )
    if "sink" not in document:
        raise ConfigError("cannot read config: there is no [sink]", hint='[sink]\nid = "orders"')
    with _within("catalog"):
        properties = _settings("catalog", catalog)
    config = Config(  # checks the sections, with the path of the setting in errors
        sink=document["sink"],
        kafka=document.get("kafka", {}),
        decode=decode,
        catalog=CatalogConfig(name, properties),
        spark=document.get("spark", {}),
        tables=document.get("table", []),
        transform=transform,
        routes=routes,
        dead_letters=document.get("dead_letters", {}),
        completeness=document.get("completeness", {}),
    )
    check_stream(config)
    if config.sink.id.endswith(".replay"):
        raise ConfigError(
            f"cannot use sink id {config.sink.id!r}: so is called what replays the "
            "dead letters of another",
            path=("sink", "id"),
        )
    return config


def _from(base: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """The section, with a Python file's path relative to the config file."""
    given = dict(section)
    if str(given.get("python", "")).partition(":")[0].endswith(".py"):
        given["python"] = str(base / given["python"])
    return given


#: Settings of `[sink]` that concern the stream it reads.
_OF_KAFKA = {
    "topics",
    "topic_pattern",
    "starting_offsets",
    "max_records_per_trigger",
    "max_bytes_per_trigger",
    "max_records_per_task",
    "kafka_client",
    "consumer_group",
}


def for_frame(table: str, catalog: str, settings: Mapping[str, Any]) -> Config:
    """The config of a sink that reads a DataFrame. `settings`: keys of `[sink]`, `[[table]]` and
    `[completeness]`."""
    sinks = {f.name for f in dataclasses.fields(SinkConfig)} - _OF_KAFKA
    fields = {f.name for f in dataclasses.fields(TableConfig)} - {"name"}
    others = {f.name for f in dataclasses.fields(CompletenessConfig)}
    for key in settings:
        if key in _OF_KAFKA:
            raise ConfigError(
                f"cannot write with {key!r}: what is read, and how much at once, is "
                "for the DataFrame's own sources to say"
            )
        if key not in sinks | fields | others:
            raise ConfigError(
                f"cannot write: unknown setting {key!r}"
                f"{_nearest(key, sorted(sinks | fields | others))}"
            )
    of_sink = {key: value for key, value in settings.items() if key in sinks}
    of_table = {key: value for key, value in settings.items() if key in fields}
    of_hours = {key: value for key, value in settings.items() if key in others}
    with _placed(lambda path: f"argument {path[-1]}" if path else ""):
        return Config(
            sink=of_sink,
            kafka=Settings(),
            catalog=CatalogConfig(catalog),
            tables=({"name": table, **of_table},),
            decode=DecodeConfig("raw"),
            completeness=of_hours,
        )


def path_taken(config: Config) -> tuple[str, str]:
    """The data path, in the words of `frazil config explain`, and the reason for it."""
    name = ", ".join(table.name for table in config.tables)
    source = f"Kafka ({', '.join(config.sink.topics) or config.sink.topic_pattern})"
    if not config.transform:
        return (
            f"{source} → fetch, decode and write in Spark's Python workers → {name}",
            "there is no [transform]: Spark gets offset ranges, and no record enters its JVM",
        )
    query = "sql" if config.transform.sql else f"python {config.transform.python}"
    return (
        f"{source} → fetch and decode in Python workers → rows in Spark: [transform] {query} → "
        f"write in Python workers → {name}",
        "there is a [transform]: what Spark shall work on must be rows of its own",
    )


def settings(config: Config) -> dict[str, dict[str, Any]]:
    """Every setting in effect, section by section; secrets are masked."""
    shown: dict[str, dict[str, Any]] = {}
    for name in ("sink", "kafka", "decode", "transform", "catalog", "spark", "completeness"):
        section: Any = getattr(config, name)
        values: dict[str, Any] = (
            dict(section) if isinstance(section, Settings) else dataclasses.asdict(section)
        )
        shown[name] = values
        if name == "catalog":
            values |= values.pop("properties")
        if registry := values.pop("registry", None):
            shown["decode.registry"] = dict(registry)
    for number, table in enumerate(config.tables):
        shown[f"table {number}"] = dataclasses.asdict(table)
    for number, route in enumerate(config.routes):
        shown[f"route {number}"] = {**dataclasses.asdict(route), "python": str(route.python)}
    if config.dead_letters:
        shown["dead_letters"] = dataclasses.asdict(config.dead_letters)
    return {
        section: {
            key: "***" if _is_secret(section, key) else value for key, value in values.items()
        }
        for section, values in shown.items()
    }


def in_effect(config: Config) -> dict[str, dict[str, str]]:
    """The effective values of settings that are left empty."""
    sink = {
        "index_table": config.index_table,
        "consumer_group": config.group,
        "staging_location": "stage, beside the files of the index",
        "checkpoint_location": "a temporary folder",
    }
    sections = {"sink": (config.sink, sink)}
    for number, table in enumerate(config.tables):
        values = {
            "snapshot_retention": "1d and at most 1500 snapshots if a sink made the table, "
            "else never",
            "properties": "new tables keep 50 old metadata files",
            "commit_interval": config.sink.commit_interval,
            "event_time": table.timestamp_column,
        }
        sections[f"table {number}"] = (table, values)  # type: ignore[assignment]
    return {
        section: {key: text for key, text in values.items() if not getattr(given, key)}
        for section, (given, values) in sections.items()
    }


def _is_secret(section: str, key: str) -> bool:
    return section in ("kafka", "decode.registry", "catalog", "spark") and bool(SECRET.search(key))


def _table(section: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"cannot read config: [{section}] is {values!r}; expected a table of keys",
            path=tuple(section.split(".")),
        )


def check(config: Config) -> None:
    """All checks that need no server. Raises `ConfigError`."""
    sink = config.sink
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}", sink.id):
        raise ConfigError(
            f"cannot use sink id {sink.id!r}: expected 1 to 100 letters, digits, "
            "dots, dashes or underscores",
            path=("sink", "id"),
        )
    master = config.spark.get("spark.master", "local")
    if not re.match(r"(local|spark://|k8s://|yarn|env:)", master):
        raise ConfigError(
            f"cannot start Spark on {master!r}: expected local[n], spark://…, k8s://… or yarn",
            path=("spark", "spark.master"),
        )
    if config.kafka or sink.topics or sink.topic_pattern:  # none of them: fed by a DataFrame
        check_stream(config)
    _check_trigger(sink.trigger)
    for name in (
        "commit_interval",
        "max_pending_age",
        "unavailable_timeout",
        "index_snapshot_retention",
    ):
        duration(getattr(sink, name), f"[sink] {name}", ("sink", name))
    hours = config.completeness
    for name in (
        "allowed_lateness",
        "max_future",
        *([] if hours.idle_timeout == NEVER else ["idle_timeout"]),
    ):
        duration(getattr(hours, name), f"[completeness] {name}", ("completeness", name))
    for name in ("max_bytes_per_trigger", "max_pending_bytes"):
        size(getattr(sink, name), f"[sink] {name}", ("sink", name))
    for name in ("max_records_per_trigger", "max_records_per_task", "max_pending_batches"):
        if getattr(sink, name) < 1:
            raise ConfigError(
                f"cannot read [sink] {name}: expected at least 1, found {getattr(sink, name)}",
                path=("sink", name),
            )
    _check_transform(config.transform)
    _check_tables(config)
    _refuse_what_breaks_the_promise(config)


#: Iceberg's catalog types → required properties.
_CATALOGS = {
    "hadoop": ("warehouse",),
    "hive": (),
    "rest": ("uri",),
    "glue": (),
    "nessie": ("uri",),
    "jdbc": ("uri", "warehouse"),
    "dynamodb": (),
    "bigquery": (),
}


def check_catalog(config: Config) -> None:
    """Runs before a session is created: without a type Iceberg would look for a Hive metastore, and
    Spark would create one in the working directory."""
    name, given = config.catalog.name, config.catalog.properties
    lead = f"spark.sql.catalog.{name}."
    properties = {
        **{
            key.removeprefix(lead): value
            for key, value in config.spark.items()
            if key.startswith(lead)
        },
        **given,
    }
    hint = '[catalog]\ntype = "rest"\nuri = "https://…"'
    if not properties:
        raise ConfigError("cannot open a catalog: the config has no [catalog]", hint=hint)
    kind = properties.get("type", "")
    of_type = ("catalog", "type") if "type" in given else ("spark", f"{lead}type")
    if not kind and not properties.get("catalog-impl"):
        raise ConfigError(
            "cannot open the catalog: [catalog] has neither type nor catalog-impl",
            hint=f"expected one of {', '.join(_CATALOGS)}",
            path=("catalog",),
        )
    if kind and kind.lower() not in _CATALOGS:
        raise ConfigError(
            f"cannot read [catalog] type: {kind!r} is unknown{_nearest(kind, _CATALOGS)}",
            path=of_type,
        )
    for key in _CATALOGS.get(kind.lower(), ()):
        if not properties.get(key):
            raise ConfigError(
                f"cannot open the catalog: [catalog] {key} is missing, and its type is {kind}",
                path=of_type,
            )
    elsewhere = any("hive.metastore.uris" in key for key in config.spark) or any(
        os.environ.get(variable)
        for variable in ("HIVE_CONF_DIR", "HADOOP_CONF_DIR", "SPARK_CONF_DIR")
    )
    if kind.lower() == "hive" and not properties.get("uri") and not elsewhere:
        raise ConfigError(
            "cannot open the catalog: its type is hive, and nothing says where the metastore is",
            hint='[catalog]\nuri = "thrift://host:9083"',
            path=of_type,
        )


def _check_topics(topics: tuple[str, ...], path: tuple[str, ...]) -> None:
    for topic in topics:
        if not _TOPIC.fullmatch(topic):
            raise ConfigError(
                "cannot read topics: expected names of 1 to 249 letters, digits, "
                f"dots, dashes and underscores, found {topic!r}",
                path=path,
            )


def check_stream(config: Config) -> None:
    """Checks the input: `[sink]`'s topics, `[kafka]` and `[decode]`."""
    sink = config.sink
    if bool(sink.topics) == bool(sink.topic_pattern):
        raise ConfigError(
            "cannot read [sink]: expected either topics or topic_pattern, found "
            f"{'both' if sink.topics else 'neither'}",
            path=("sink",),
        )
    _check_topics(sink.topics, ("sink", "topics"))
    for number, route in enumerate(config.routes):
        _check_topics(route.topics, ("route", str(number), "topics"))
    if sink.topic_pattern:
        try:
            re.compile(sink.topic_pattern)
        except re.error as error:
            raise ConfigError(
                f"cannot read [sink] topic_pattern: {error}", path=("sink", "topic_pattern")
            ) from None
    if isinstance(sink.starting_offsets, str) and sink.starting_offsets not in (
        "earliest",
        "latest",
    ):
        raise ConfigError(
            "cannot read [sink] starting_offsets: expected earliest, latest or a cut, "
            f"found {sink.starting_offsets!r}",
            path=("sink", "starting_offsets"),
        )
    if sink.kafka_client not in ("auto", "librdkafka"):
        raise ConfigError(
            "cannot read [sink] kafka_client: expected auto or librdkafka, "
            f"found {sink.kafka_client!r}",
            path=("sink", "kafka_client"),
        )
    if not isinstance(sink.starting_offsets, str):
        _check_cut(sink.starting_offsets)
    if "bootstrap.servers" not in config.kafka:
        raise ConfigError('cannot read [kafka]: "bootstrap.servers" is missing', path=("kafka",))
    if config.decode.format not in FORMATS:
        raise ConfigError(
            f"cannot read [decode] format: {config.decode.format!r} is unknown"
            f"{_nearest(config.decode.format, FORMATS)}",
            path=("decode", "format"),
        )
    if config.decode.format == "confluent-avro" and not (
        config.decode.schema or config.decode.registry
    ):
        raise ConfigError(
            "cannot decode Confluent Avro: neither [decode] schema nor "
            "[decode.registry] url is given",
            path=("decode", "format"),
        )
    if config.decode.format == "avro" and not config.decode.schema:
        raise ConfigError(
            "cannot decode bare Avro: [decode] schema is missing", path=("decode", "format")
        )
    placeholder = config.decode.unavailable_value
    if placeholder.startswith("hex:") and not re.fullmatch("hex:([0-9A-Fa-f]{2})+", placeholder):
        raise ConfigError(
            "cannot read [decode] unavailable_value: expected pairs of hexadecimal "
            f"digits behind hex:, found {placeholder!r}",
            path=("decode", "unavailable_value"),
        )
    kind = config.decode.key_format
    if kind and kind not in KEY_FORMATS:
        raise ConfigError(
            f"cannot read [decode] key_format: {kind!r} is unknown{_nearest(kind, KEY_FORMATS)}",
            path=("decode", "key_format"),
        )
    if kind == "avro" and not config.decode.key_schema:
        raise ConfigError(
            "cannot decode keys of bare Avro: [decode] key_schema is missing",
            path=("decode", "key_format"),
        )
    if kind == "confluent-avro" and not (config.decode.key_schema or config.decode.registry):
        raise ConfigError(
            "cannot decode keys of Confluent Avro: neither [decode] key_schema nor "
            "[decode.registry] url is given",
            path=("decode", "key_format"),
        )


#: Topic names that Kafka accepts.
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._\-]{1,249}")
AVAILABLE_NOW = "available-now"
AUTO = "auto"
NEVER = "never"


def _check_trigger(trigger: str) -> None:
    reason = {
        "continuous": "continuous processing has no batches, so there is no cut to prove",
        "real-time": "real-time mode hands rows on before their batch ends, so there is no batch "
        "to commit exactly once",
        "once": "it takes everything in one batch whatever the limits; use available-now",
    }.get(trigger.strip().lower().replace("realtime", "real-time"))
    if reason:
        raise ConfigError(f"cannot use trigger {trigger!r}: {reason}", path=("sink", "trigger"))
    if trigger not in (AVAILABLE_NOW, AUTO):
        duration(trigger, "[sink] trigger", ("sink", "trigger"))


def _check_transform(transform: TransformConfig) -> None:
    if transform.sql and transform.python:
        raise ConfigError(
            "cannot read [transform]: expected either sql or python, found both",
            path=("transform",),
        )
    if transform.python and not re.fullmatch(r"[^:]+:\w+", transform.python):
        raise ConfigError(
            f"cannot read [transform] python: expected module:function, found {transform.python!r}",
            path=("transform", "python"),
        )
    with _within("transform", "output_mode"):
        check_output_mode(transform.output_mode)


def check_output_mode(mode: str) -> None:
    if mode in ("update", "complete"):
        raise ConfigError(
            f"cannot write in output mode {mode!r}: it replaces rows that are there already, and "
            "the table is append-only",
            hint="use append: with a watermark, aggregations give each window once, when it closes",
        )
    if mode != "append":
        raise ConfigError(f"cannot write in output mode {mode!r}: expected append")


def _check_cut(start: Mapping[str, Any]) -> None:
    for topic, offsets in start.items():
        numbers = offsets.items() if isinstance(offsets, Mapping) else [("", None)]
        for partition, offset in numbers:
            if not str(partition).isdigit() or not isinstance(offset, int) or offset < 0:
                raise ConfigError(
                    f"cannot read [sink] starting_offsets: expected {{topic = {{partition = "
                    f"offset}}}}, found {topic} = {offsets!r}",
                    path=("sink", "starting_offsets"),
                )


def replayed(letters: str) -> str:
    """The table that records which dead letters were replayed."""
    return f"{letters}_replayed"


def remembered(table: str) -> str:
    """The table that records the deleted keys of a table with `version_column`."""
    return f"{table}_deleted"


_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def _named(config: Config, names: list[str]) -> tuple[str, ...]:
    """The last setting that gives one of these names to a table."""
    wanted = {name.lower() for name in names}
    if config.dead_letters.table.lower() in wanted:
        return "dead_letters", "table"
    if config.sink.index_table.lower() in wanted:
        return "sink", "index_table"
    tables = [str(at) for at, table in enumerate(config.tables) if table.name.lower() in wanted]
    return ("table", tables[-1], "name") if tables else ()


def _check_tables(config: Config) -> None:
    names = [table.name for table in config.tables]
    if not names:
        raise ConfigError("cannot read [[table]]: expected a table, found none")
    if len(names) > 1 and not config.routes:
        raise ConfigError(
            f"cannot read [[table]]: {len(names)} tables, and no [[route]] says what goes where",
            path=("table", "1"),
        )
    if config.routes and config.transform:
        raise ConfigError(
            "cannot use [[route]] with a [transform]: what comes out of a query goes to one table",
            hint="use a sink for each query",
            path=("route", "0"),
        )
    if config.dead_letters and config.transform:
        raise ConfigError(
            "cannot use [dead_letters] with a [transform]: a query's rows are Spark's own",
            path=("dead_letters",),
        )
    every = [*names, config.index_table]
    if config.dead_letters:
        every += [config.dead_letters.table, replayed(config.dead_letters.table)]
    every += map(remembered, config.remembering)
    if not config.routes and "{" in names[0]:
        raise ConfigError(
            f"cannot use table {names[0]}: no [[route]] says what stands for the words in its name",
            path=("table", "0", "name"),
        )
    lower = [name.lower() for name in every]
    if twice := [name for name in every if lower.count(name.lower()) > 1]:
        raise ConfigError(
            f"cannot use table {twice[0]}: two tables of the sink have that name",
            path=_named(config, twice),
        )
    for number, table in enumerate(config.tables):
        with _within("table", str(number)):
            _check_table(table)
    letters = config.dead_letters
    if letters and not _NAME.fullmatch(letters.table):
        raise ConfigError(
            f"cannot read [dead_letters] table: expected namespace.table, found {letters.table!r}",
            path=("dead_letters", "table"),
        )
    if not 0 <= letters.max_fraction <= 1:
        raise ConfigError(
            "cannot read [dead_letters] max_fraction: expected a number from 0 to 1, "
            f"found {letters.max_fraction}",
            path=("dead_letters", "max_fraction"),
        )
    if letters.max_count < 0:
        raise ConfigError(
            f"cannot read [dead_letters] max_count: expected at least 0, found {letters.max_count}",
            path=("dead_letters", "max_count"),
        )
    if config.sink.max_tables < len(names):
        raise ConfigError(
            f"cannot read [sink] max_tables: {config.sink.max_tables} is less than "
            f"the {len(names)} tables of the config",
            path=("sink", "max_tables"),
        )


_TRANSFORM = re.compile(
    r"\s*(?:(?P<name>[a-z]+)\s*\(\s*(?:(?P<width>\d+)\s*,\s*)?(?P<inner>[^(),]+?)\s*"
    r"(?:,\s*(?P<behind>\d+)\s*)?\)|(?P<column>[^(),]+?))\s*"
)
#: `bucket(16, id) desc nulls last`
ORDER = re.compile(
    r"(?P<term>.+?)(?:\s+(?P<direction>asc|desc))?(?:\s+nulls\s+(?P<nulls>first|last))?\s*",
    re.IGNORECASE,
)


def transform_of(text: str, doing: str) -> tuple[str, str]:
    """`day(placed_at)` → its column, and Iceberg's name of the transform: `day`, `bucket[16]`."""
    match = _TRANSFORM.fullmatch(text)
    if not match:
        raise ConfigError(
            f"{doing}: expected a column, or one of year, month, day, hour(column), "
            "bucket(n, column), truncate(n, column)"
        )
    if match["column"]:
        return match["column"], "identity"
    name = match["name"].removesuffix("s")
    width = match["width"] or match["behind"] if not (match["width"] and match["behind"]) else None
    if name in ("year", "month", "day", "hour", "identity") and not width:
        return match["inner"], name
    if name in ("bucket", "truncate") and width and 0 < int(width) < 2**31:
        return match["inner"], f"{name}[{int(width)}]"
    raise ConfigError(
        f"{doing}: unknown transform, or one without its number; expected "
        "bucket(n, column) or truncate(n, column) with n from 1 to 2147483647, or year, month, "
        "day, hour(column)"
    )


def _check_table(table: TableConfig) -> None:
    if not _NAME.fullmatch(re.sub(r"\{\w+\}", "x", table.name)):
        raise ConfigError(
            f"cannot use table name {table.name!r}: expected namespace.table of "
            "letters, digits and underscores",
            path=("name",),
        )
    if "{" in table.name.rpartition(".")[0]:
        raise ConfigError(
            f"cannot use table name {table.name!r}: a namespace does not come from the data",
            path=("name",),
        )
    if "{" in table.name and table.location:
        raise ConfigError(
            f"cannot use table {table.name}: tables made of a template cannot share one location",
            path=("location",),
        )
    if table.schema_evolution not in EVOLUTION:
        raise ConfigError(
            f"cannot use table {table.name}: schema_evolution {table.schema_evolution!r} is "
            f"unknown{_nearest(table.schema_evolution, EVOLUTION)}",
            path=("schema_evolution",),
        )
    if table.max_columns < 1:
        raise ConfigError(
            f"cannot use table {table.name}: expected max_columns from 1, found "
            f"{table.max_columns}",
            path=("max_columns",),
        )
    _check_mode(table)
    kept = "" if table.snapshot_retention == NEVER else table.snapshot_retention
    for name, text in (("commit_interval", table.commit_interval), ("snapshot_retention", kept)):
        if text:
            duration(text, f"[[table]] {name} of {table.name}", (name,))
    if table.commit_bytes:
        size(table.commit_bytes, f"[[table]] commit_bytes of {table.name}", ("commit_bytes",))
    for text in table.partition_by:
        with _within("partition_by"):
            transform_of(text, f"cannot partition table {table.name} by {text!r} in partition_by")
    for text in table.sort_by:
        match = ORDER.fullmatch(text)
        with _within("sort_by"):
            transform_of(
                match["term"] if match else text,
                f"cannot sort table {table.name} by {text!r} in sort_by",
            )
    _check_columns(table)
    if table.compression not in CODECS:
        raise ConfigError(
            f"cannot use table {table.name}: compression {table.compression!r} is "
            f"unknown{_nearest(table.compression, CODECS)}",
            path=("compression",),
        )
    if table.format_version not in (2, 3):
        raise ConfigError(
            f"cannot use table {table.name}: expected format_version 2 or 3, "
            f"found {table.format_version}",
            path=("format_version",),
        )
    largest = ("target_file_size",)
    if size(table.target_file_size, f"[[table]] {largest[0]} of {table.name}", largest) > 2**29:
        raise ConfigError(
            f"cannot use table {table.name}: target_file_size is over 512MiB", path=largest
        )


def _check_columns(table: TableConfig) -> None:
    """Checks the names of the metadata columns."""
    names = {
        key: getattr(table, key)
        for key in ("topic_column", "partition_column", "offset_column", "timestamp_column")
    }
    for key, name in names.items():
        others = [other for other, value in names.items() if value == name and other != key]
        if not name and key != "timestamp_column":
            raise ConfigError(
                f"cannot use table {table.name}: {key} is empty; the topic, "
                "partition and offset columns carry the proof and cannot be left "
                "out",
                path=(key,),
            )
        if others:
            raise ConfigError(
                f"cannot use table {table.name}: two metadata columns are named "
                f"{name!r}: {key} and {others[0]}",
                path=(others[0],),
            )
        if name in RESERVED:
            raise ConfigError(
                f"cannot use table {table.name}: the column name {name!r} of {key} "
                "is reserved by Iceberg",
                path=(key,),
            )


def _check_mode(table: TableConfig) -> None:
    doing = f"cannot use table {table.name}"
    if table.mode not in MODES:
        raise ConfigError(
            f"{doing}: mode {table.mode!r} is unknown{_nearest(table.mode, MODES)}", path=("mode",)
        )
    if (table.mode == "append") == bool(table.key):
        raise ConfigError(
            f"{doing}: it has a key, and its mode is append"
            if table.key
            else f"{doing}: its mode is {table.mode}, and no key says which rows are the same",
            hint='mode = "upsert"\nkey = ["id"]',
            path=("key" if table.key else "mode",),
        )
    if table.compact_after_commits < 0:
        raise ConfigError(
            f"{doing}: compact_after_commits is below 0", path=("compact_after_commits",)
        )
    if table.partitioned_by_key and not table.upsert_key:
        raise ConfigError(
            f"{doing}: partitioned_by_key is for upsert tables", path=("partitioned_by_key",)
        )
    if table.upsert_key and set(table.identifier_fields or table.key) != set(table.key):
        raise ConfigError(
            f"{doing}: its key and its identifier_fields are different columns",
            path=("identifier_fields",),
        )
    beside = {
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
    }
    if taken := beside & set(table.key):
        raise ConfigError(
            f"{doing}: {min(taken)!r} says where a row comes from, and is no key", path=("key",)
        )
    if table.version_column and not table.upsert_key:
        raise ConfigError(
            f"{doing}: version_column is for upsert tables",
            hint="rows of other tables are not replaced: sort_by orders them in their files",
            path=("version_column",),
        )
    if table.version_column in table.key:
        raise ConfigError(
            f"{doing}: version_column is {table.version_column!r}, which is its key: changes of "
            "one key would all be alike",
            path=("version_column",),
        )
    if table.version_column in beside - {table.timestamp_column, ""}:
        raise ConfigError(
            f"{doing}: version_column is {table.version_column!r}, which says where a row comes "
            "from; that counts where version_column says nothing",
            path=("version_column",),
        )


#: section, key pattern, forbidden value pattern, reason
_REFUSED = (
    (
        "*",
        r"fail\.?on\.?data\.?loss",
        r"(?i)false",
        "a lost range must stop the stream, not pass in silence",
    ),
    (
        "spark",
        r".*asyncProgressTracking.*",
        r".*",
        "progress is written by the commit, not beside it",
    ),
    ("spark", r".*(realTimeMode|continuous).*", r".*", "without batches there is no cut to prove"),
    (
        "kafka",
        r"enable\.auto\.commit",
        r"(?i)true",
        "the table is the position; the group's offsets are published after the commit",
    ),
    (
        "kafka",
        r"auto\.offset\.reset",
        r"(?!error$).*",
        "a position that is gone must stop the stream, not jump",
    ),
    ("kafka", r"group\.id", r".*", "set [sink] consumer_group instead"),
    (
        "kafka",
        r"enable\.partition\.eof",
        r"(?i)false",
        "the end of a range may be invisible offsets; only this event shows it",
    ),
)


def _refuse_what_breaks_the_promise(config: Config) -> None:
    sections = {
        "kafka": config.kafka,
        "spark": config.spark,
        "catalog": config.catalog.properties,
        "decode.registry": config.decode.registry,
    }
    for section, settings in sections.items():
        for key, value in settings.items():
            if SECRET.search(key) and not _REFERENCE.match(value):
                raise ConfigError(
                    f"cannot take [{section}] {key}: a secret stands in the config; "
                    "expected env:NAME or file:PATH",
                    path=(*section.split("."), key),
                )
            for where, key_pattern, value_pattern, reason in _REFUSED:
                if (
                    where in ("*", section)
                    and re.fullmatch(key_pattern, key, re.IGNORECASE)
                    and re.fullmatch(value_pattern, value)
                ):
                    raise ConfigError(
                        f"cannot take [{section}] {key} = {value!r}: {reason}",
                        path=(*section.split("."), key),
                    )


def _section(kind: Callable[..., T], title: str, values: Mapping[str, Any]) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(
                f"cannot read {title}: unknown key {key!r}{_nearest(key, fields)}", path=(key,)
            )
        taken[key] = value
    required = [
        n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in taken:
            raise ConfigError(f"cannot read {title}: {name!r} is missing")
    return kind(**taken)


#: Types of fields, as named in messages.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple[str, ...]": "a list of texts",
    "dict[str, str]": "a table of texts",
    "Settings": "a table of keys",
    "str | Callable[..., Any]": "module:function",
    "str | dict[str, dict[str, int]]": "earliest, latest or a cut",
}


def _fit(where: str, kind: str, value: Any) -> Any:
    try:
        if kind == "int" and isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
        if kind == "float" and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
        if kind == "bool" and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if kind.startswith("str | Callable") and (isinstance(value, str) or callable(value)):
            return value
        if kind == "str" and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
        if kind.startswith("tuple") and isinstance(value, (list, tuple)):
            return tuple(_text(item) for item in value)
        if kind == "dict[str, str]" and isinstance(value, Mapping):
            return {str(k): _text(v) for k, v in value.items()}
        if kind.startswith("str | dict") and isinstance(value, (str, Mapping)):
            return value
        if kind == "Settings" and isinstance(value, Mapping):
            return _settings(where.split()[0].strip("[]"), value)
    except ValueError:
        pass
    raise ConfigError(f"cannot read {where}: expected {_WORDS[kind]}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settings(section: str, values: Mapping[str, Any]) -> Settings:
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):  # TOML reads `bootstrap.servers = …` as a nested table
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), below)
        elif isinstance(value, bool):
            flat[prefix] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            flat[prefix] = str(value)
        else:
            # without the value: it may be a secret
            raise ConfigError(
                f"cannot read [{section}] {prefix}: expected text or a number, found "
                f"{type(value).__name__}",
                path=(prefix,),
            )

    if not isinstance(values, Mapping):
        raise ConfigError(
            f"cannot read [{section}]: expected a table of keys, found {type(values).__name__}"
        )
    walk("", values)
    return Settings(flat)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
