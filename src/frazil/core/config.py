"""One TOML file, or the same in Python, checked before anything starts.

Comes in: a path (plus `FRAZIL_…` environment variables), or dataclasses made in code. Goes out: a
frozen `Config`. `[kafka]`, `[catalog]`, `[spark]` and `[decode.registry]` pass through untouched
to librdkafka, Iceberg, Spark and the registry client; every other key is known here, and an unknown
one is refused with the nearest known one. A secret is never a value in the file: it is `env:NAME`
or `file:PATH`, resolved where it is used and masked wherever a config is shown.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from frazil.core.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

T = TypeVar("T")

#: Keys whose value is a secret in the libraries that the pass-through sections go to.
SECRET = re.compile(
    r"password|passphrase|secret|credential(?!s?[.\-](provider|source))|(^|[.\-_])token($|\.)"
    r"|user\.info|key\.pem|oauthbearer\.config|authorization|account\.key|connection-string",
    re.IGNORECASE,
)
#: Names that Iceberg keeps for itself: Spark cannot read a table that has one as a column.
RESERVED = frozenset(
    ["_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id",
     "_last_updated_sequence_number", "_change_type", "_change_ordinal", "_commit_snapshot_id"]
)  # fmt: skip
CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
FORMATS = ("confluent-avro", "avro", "json", "raw")
EVOLUTION = ("evolve", "frozen", "fail")
MODES = ("append", "upsert", "changelog")
KEY_FORMATS = ("confluent-avro", "avro", "json", "text")


class Settings(dict[str, str]):
    """A pass-through section. Shows its keys, and its values except the secret ones."""

    def __repr__(self) -> str:
        return repr({k: "***" if SECRET.search(k) else v for k, v in self.items()})

    def resolved(self) -> dict[str, str]:
        """With `env:` and `file:` references replaced. Never log or store what comes back."""
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


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """`[sink]`: who the sink is, what it reads, how it paces itself."""

    id: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    #: earliest, latest, or a cut: {topic = {partition = offset}}; used only where no table has
    #: a position yet
    start: str | dict[str, dict[str, int]] = "earliest"
    #: the offset index; by default `frazil_index` beside the first table
    index: str = ""
    #: how long snapshots of the index are kept; of many, only the newest 500
    index_history: str = "1d"
    #: folder for staged batches; by default `stage` beside the index's own files. Table buckets
    #: that take nothing but Iceberg's files need another place
    stage: str = ""
    #: Spark's checkpoint. Only a query that keeps state, or reads a source that keeps notes there,
    #: reads it back and needs one; otherwise a temporary folder by default
    checkpoint: str = ""
    #: how often Spark looks for new offsets; or available-now: everything there is, then stop
    trigger: str = "500ms"
    #: how long staged batches may gather before they are committed together
    commit_interval: str = "0s"
    max_records_per_trigger: int = 16_000_000
    max_bytes_per_trigger: str = "1GiB"
    #: a partition's range is split so that one task gets at most this many offsets
    max_records_per_task: int = 1_000_000
    #: bounds of absorption: beyond any of them the stream blocks until commits go through
    max_pending_batches: int = 64
    max_pending_bytes: str = "16GiB"
    max_pending_age: str = "6h"
    #: auto reads Kafka's batches as they are where the connection is plain, and with
    #: confluent-kafka otherwise; client always uses confluent-kafka
    fetch: str = "auto"
    #: how long a broker may be away before the stream stops
    patience: str = "5m"
    #: consumer group under which committed offsets are published; by default the sink's id
    group: str = ""
    #: how many tables a sink may make: a guard where their names come from the data
    max_tables: int = 1000
    #: may another sink fill the same table from the same topic? Each record is there twice then
    share_topics: bool = False


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`[decode]`: how a record's value becomes columns."""

    format: str = "confluent-avro"
    #: path of an Avro schema (.avsc); without it Confluent Avro asks the registry
    schema: str = ""
    #: how a record's key is read, where only the key says what a record without a value deletes:
    #: confluent-avro, avro, json, or text. By default as the value where that is JSON, or where the
    #: registry knows its schema; otherwise text
    key: str = ""
    #: path of the key's Avro schema
    key_schema: str = ""
    registry: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TransformConfig:
    """`[transform]`: what Spark does between the stream and the table; empty: nothing."""

    #: a query over the view `stream`; tables of the catalog may be joined in
    sql: str = ""
    #: module:function, from DataFrame to DataFrame
    python: str = ""
    #: of the query that comes out; tables take append only
    output_mode: str = "append"

    def __bool__(self) -> bool:
        return bool(self.sql or self.python)


@dataclass(frozen=True, slots=True)
class CatalogConfig:
    """`[catalog]`: `name`, and everything else is Iceberg's own catalog property."""

    name: str = "lake"
    properties: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class TableConfig:
    """`[[table]]`: one Iceberg table, made from the writer schema when it is absent."""

    name: str
    partition_by: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)
    format_version: int = 2
    location: str = ""
    branch: str = "main"
    #: column whose lowest and highest value each batch records; by default the record's timestamp
    event_time: str = ""
    #: append: every record a row. upsert: the last record of each key is its row, and a record
    #: without a value deletes it. changelog: every record a row, and one without a value, too
    mode: str = "append"
    #: of an upsert table or a change log: the columns that are a row's key
    key: tuple[str, ...] = ()
    #: all records of a key stand in one Kafka partition: they need not be brought together before
    #: they are written. Checked in every batch; a stream of which it is not true stops
    partitioned_by_key: bool = False
    #: of an upsert table: the column that says which change of a key is the newer one, whatever
    #: comes first (a version, a log sequence number); a path, where it is inside others. Empty: the
    #: one that comes last is the newest
    order_by: str = ""
    #: of an upsert table: after so many commits with deletes the sink compacts it, sooner where
    #: many keys were deleted; 0: never
    compact_after: int = 10
    #: older snapshots of the table are forgotten, and the files that only they need; empty: never
    keep_snapshots: str = ""
    #: columns that identify a row (Iceberg's identifier fields); they become required
    identifier_fields: tuple[str, ...] = ()
    #: order of the rows within each file: "country", "placed_at desc", "bucket(16, id) nulls last"
    sort_by: tuple[str, ...] = ()
    #: what a table does with records that do not fit: evolve changes it where that can be done,
    #: frozen rejects them, fail stops the stream
    evolution: str = "evolve"
    #: renamed columns: new name → the name it had, which is also what older records call it
    aliases: dict[str, str] = field(default_factory=dict)
    target_file_size: str = "256MiB"
    compression: str = "zstd"
    #: how long staged files of this table may gather before a commit; by default the sink's
    commit_interval: str = ""
    #: and how large they may become before that; empty: only time counts
    commit_bytes: str = ""
    #: of the tables that are due, those with the higher number are committed first
    priority: int = 0
    #: names of the metadata columns; an empty name leaves the column out (not `offset`'s)
    topic_column: str = "_topic"
    partition_column: str = "_topic_partition"
    offset_column: str = "_offset"
    timestamp_column: str = "_timestamp"

    @property
    def upsert_key(self) -> tuple[str, ...]:
        """The key by which rows are replaced; empty: none are."""
        return self.key if self.mode == "upsert" else ()


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """`[[route]]`: which tables a record is for. The first rule that matches decides."""

    #: topics the rule speaks of, by name or by a pattern over the whole name; neither: all
    topics: tuple[str, ...] = ()
    pattern: str = ""
    #: a field of the value (a path: `source.table`), or a header of the record
    field: str = ""
    header: str = ""
    #: what the field or header must say, as text; empty: anything but null
    values: tuple[str, ...] = ()
    #: the tables it goes to; `{value}`, `{topic}` and groups of `pattern` may stand in a name
    to: tuple[str, ...] = ()
    #: leave the record out, and count it
    skip: bool = False
    #: module:function over columns, for what rules cannot say
    python: str | Callable[..., Any] = ""
    #: what may be put into a table's name, whole; all else is rejected
    names: str = "[a-z][a-z0-9_]{0,63}"
    #: debezium: the value is a change, and its row is what is written
    envelope: str = ""


@dataclass(frozen=True, slots=True)
class DeadLettersConfig:
    """`[dead_letters]`: where rejected records go. Without a table they stop the stream."""

    table: str = ""
    #: a batch with more rejected records than this share, or this number, stops the stream
    max_share: float = 0.5
    max_count: int = 1_000_000

    def __bool__(self) -> bool:
        return bool(self.table)


@dataclass(frozen=True, slots=True)
class CompletenessConfig:
    """`[completeness]`: from when on an hour counts as complete."""

    #: how much older than the newest record of its partition a record may be
    lateness: str = "0s"
    #: a partition that brought nothing for so long, and has nothing left to read, holds the others
    #: back no more; never: it always does
    idle: str = "never"
    #: event times further ahead of the clock than this are not believed
    ahead: str = "1h"


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

    def __post_init__(self) -> None:
        check(self)

    @property
    def index_table(self) -> str:
        if self.sink.index:
            return self.sink.index
        namespace, _, _ = self.tables[0].name.rpartition(".")
        return f"{namespace}.frazil_index"

    @property
    def one_table(self) -> bool:
        """Does everything go to one table that is known by name?"""
        return not self.routes and not self.dead_letters and not self.remembering

    @property
    def remembering(self) -> tuple[str, ...]:
        """Tables, or templates of some, beside which it is remembered what was deleted."""
        return tuple(table.name for table in self.tables if table.order_by)

    @property
    def group(self) -> str:
        return self.sink.group or self.sink.id


def duration(text: str) -> float:
    """Seconds of `500ms`, `20s`, `5m`, `6h`, `2d`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", text)
    if not found:
        raise ConfigError(f"cannot read duration {text!r}: expected a number with ms, s, m, h or d")
    scale = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[found.group(2)]
    return float(found.group(1)) * scale


def size(text: str) -> int:
    """Bytes of `4096`, `64KiB`, `256MiB`, `1GiB` (`KB`, `MB`, `GB` are decimal)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", text)
    if not found:
        raise ConfigError(f"cannot read size {text!r}: expected a number with KiB, MiB or GiB")
    base = 1000 if found.group(3) == "B" and found.group(2) else 1024
    return int(float(found.group(1)) * base ** " KMGT".index(found.group(2) or " "))


def load(path: str | Path, environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a TOML file, with `FRAZIL_SECTION__KEY` variables laid over it."""
    return from_document(document(path, environ), base=Path(path).parent)


def document(path: str | Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read config {path}: not TOML: {error}") from None
    return overlay(found, environ)


def overlay(document: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """`FRAZIL_SINK__ID=a` sets `[sink] id`; `FRAZIL_KAFKA__BOOTSTRAP_SERVERS` a dotted key;
    `FRAZIL_TABLE__0__NAME` a field of the first table; `FRAZIL_SINK__TOPICS=a,b` a list."""
    for name in sorted(environ):
        if not name.startswith("FRAZIL_") or "__" not in name:
            continue
        section, *rest = name.removeprefix("FRAZIL_").lower().split("__")
        where: Any = document
        several = section in ("table", "route")
        depth = 1 + (several and rest[0].isdigit()) + (rest[0] == "registry")
        if len(rest) != depth or not isinstance(where.get(section, {}), (dict, list)):
            raise ConfigError(f"cannot read environment variable {name}: "
                              "expected FRAZIL_SECTION__KEY")  # fmt: skip
        if several:
            index = int(rest.pop(0)) if rest and rest[0].isdigit() else 0
            found = where.setdefault(section, [])
            while len(found) <= index:
                found.append({})
            where = found[index]
        else:
            where = where.setdefault(section, {})
        if section == "decode" and rest[0] == "registry" and len(rest) > 1:
            where = where.setdefault(rest.pop(0), {})
            section = "registry"
        key = rest[0]
        if section in ("kafka", "catalog", "spark", "registry"):
            flat = _settings(section, where)  # TOML nests what is dotted and not quoted
            where.clear()
            where.update(flat)
            alike = [k for k in where if re.sub(r"[.\-]", "_", k).lower() == key]
            key = alike[0] if alike else key if key == "name" else key.replace("_", ".")
        lists = ("topics", "partition_by", "sort_by", "identifier_fields", "to", "values",
                 *(["key"] if section == "table" else []))  # fmt: skip
        # commas inside parentheses belong to a transform: bucket(16, id)
        where[key] = re.split(r",(?![^(]*\))", environ[name]) if key in lists else environ[name]
    return document


def from_document(document: Mapping[str, Any], base: Path = Path()) -> Config:
    known = ("sink", "kafka", "decode", "transform", "catalog", "spark", "table", "route",
             "dead_letters", "completeness")  # fmt: skip
    for several in ("table", "route"):
        if not isinstance(document.get(several, []), list):
            raise ConfigError(f"cannot read config: [{several}] is one {several}; expected "
                              f"[[{several}]]")  # fmt: skip
    for section in document:
        if section not in known:
            raise ConfigError(f"cannot read config: unknown section [{section}]"
                              f"{_nearest(section, known)}")  # fmt: skip
        found = document[section]
        for each in found if section in ("table", "route") else [found]:
            _table(section, each)
    _table("decode.registry", document.get("decode", {}).get("registry", {}))
    decode = dict(document.get("decode", {}))
    decode["registry"] = _settings("decode.registry", decode.get("registry", {}))
    for path in ("schema", "key_schema"):
        if decode.get(path):  # a path in a file is meant from where the file is
            decode[path] = str(base / decode[path])
    transform = _from(base, document.get("transform", {}))
    routes = [_from(base, each) for each in document.get("route", [])]
    catalog = dict(document.get("catalog", {}))
    name = catalog.pop("name", "lake")
    if "sink" not in document:
        raise ConfigError("cannot read config: there is no [sink]", hint='[sink]\nid = "orders"')
    tables = document.get("table", [])
    config = Config(
        sink=_section(SinkConfig, "[sink]", document["sink"]),
        kafka=_settings("kafka", document.get("kafka", {})),
        decode=_section(DecodeConfig, "[decode]", decode),
        catalog=CatalogConfig(name, _settings("catalog", catalog)),
        spark=_settings("spark", document.get("spark", {})),
        tables=tuple(_section(TableConfig, "[[table]]", each) for each in tables),
        transform=_section(TransformConfig, "[transform]", transform),
        routes=tuple(_section(RouteConfig, "[[route]]", each) for each in routes),
        dead_letters=_section(
            DeadLettersConfig, "[dead_letters]", document.get("dead_letters", {})
        ),
        completeness=_section(
            CompletenessConfig, "[completeness]", document.get("completeness", {})
        ),
    )
    check_stream(config)
    if config.sink.id.endswith(".replay"):
        raise ConfigError(f"cannot use sink id {config.sink.id!r}: so is called what replays the "
                          "dead letters of another")  # fmt: skip
    return config


def _from(base: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """With a path to a Python file meant from where the config is."""
    given = dict(section)
    if str(given.get("python", "")).partition(":")[0].endswith(".py"):
        given["python"] = str(base / given["python"])
    return given


#: Settings of `[sink]` that speak of the stream it reads.
_OF_KAFKA = {"topics", "pattern", "start", "max_records_per_trigger", "max_bytes_per_trigger",
             "max_records_per_task", "fetch", "group"}  # fmt: skip


def for_frame(table: str, catalog: str, settings: Mapping[str, Any]) -> Config:
    """The config of a sink that is fed by a DataFrame: fields of `[sink]`, `[[table]]` and
    `[completeness]`."""
    sinks = {f.name for f in dataclasses.fields(SinkConfig)} - _OF_KAFKA
    fields = {f.name for f in dataclasses.fields(TableConfig)} - {"name"}
    others = {f.name for f in dataclasses.fields(CompletenessConfig)}
    for key in settings:
        if key in _OF_KAFKA:
            raise ConfigError(f"cannot write with {key!r}: what is read, and how much at once, is "
                              "for the DataFrame's own sources to say")  # fmt: skip
        if key not in sinks | fields | others:
            raise ConfigError(f"cannot write: unknown setting {key!r}"
                              f"{_nearest(key, sorted(sinks | fields | others))}")  # fmt: skip
    of_sink = {key: value for key, value in settings.items() if key in sinks}
    of_table = {key: value for key, value in settings.items() if key in fields}
    of_hours = {key: value for key, value in settings.items() if key in others}
    return Config(
        sink=_section(SinkConfig, "sink", of_sink),
        kafka=Settings(),
        catalog=CatalogConfig(catalog),
        tables=(_section(TableConfig, "table", {"name": table, **of_table}),),
        decode=DecodeConfig("raw"),
        completeness=_section(CompletenessConfig, "completeness", of_hours),
    )


def way(config: Config) -> tuple[str, str]:
    """How the data goes, in the words of `frazil config explain`, and why."""
    name = ", ".join(table.name for table in config.tables)
    source = f"Kafka ({', '.join(config.sink.topics) or config.sink.pattern})"
    if not config.transform:
        return (
            f"{source} → fetch, decode and write in Spark's Python workers → {name}",
            "there is no [transform]: Spark gets offset ranges, and no record enters its JVM",
        )
    what = "sql" if config.transform.sql else f"python {config.transform.python}"
    return (
        f"{source} → fetch and decode in Python workers → rows in Spark: [transform] {what} → "
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


def _is_secret(section: str, key: str) -> bool:
    return section in ("kafka", "decode.registry", "catalog", "spark") and bool(SECRET.search(key))


def _table(section: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"cannot read config: [{section}] is {values!r}; expected a table of keys"
        )


def check(config: Config) -> None:
    """Everything that can be refused without asking a server."""
    sink = config.sink
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}", sink.id):
        raise ConfigError(f"cannot use sink id {sink.id!r}: expected 1 to 100 letters, digits, "
                          "dots, dashes or underscores")  # fmt: skip
    if config.kafka or sink.topics or sink.pattern:  # none of them: fed by a DataFrame
        check_stream(config)
    _check_trigger(sink.trigger)
    hours = config.completeness
    for text in (sink.commit_interval, sink.max_pending_age, sink.patience, sink.index_history,
                 hours.lateness, hours.ahead,
                 *([] if hours.idle == NEVER else [hours.idle])):  # fmt: skip
        duration(text)
    for text in (sink.max_bytes_per_trigger, sink.max_pending_bytes):
        size(text)
    for name in ("max_records_per_trigger", "max_records_per_task", "max_pending_batches"):
        if getattr(sink, name) < 1:
            raise ConfigError(f"cannot read [sink] {name}: expected at least 1")
    _check_transform(config.transform)
    _check_tables(config)
    _refuse_what_breaks_the_promise(config)


def check_stream(config: Config) -> None:
    """What is read, and how: `[sink]`'s topics, `[kafka]` and `[decode]`."""
    sink = config.sink
    if bool(sink.topics) == bool(sink.pattern):
        raise ConfigError("cannot read [sink]: expected either topics or pattern")
    if sink.pattern:
        try:
            re.compile(sink.pattern)
        except re.error as error:
            raise ConfigError(f"cannot read [sink] pattern: {error}") from None
    if isinstance(sink.start, str) and sink.start not in ("earliest", "latest"):
        raise ConfigError(f"cannot read [sink] start: expected earliest, latest or a cut, "
                          f"found {sink.start!r}")  # fmt: skip
    if sink.fetch not in ("auto", "client"):
        raise ConfigError(
            f"cannot read [sink] fetch: expected auto or client, found {sink.fetch!r}"
        )
    if not isinstance(sink.start, str):
        _check_cut(sink.start)
    if "bootstrap.servers" not in config.kafka:
        raise ConfigError('cannot read [kafka]: "bootstrap.servers" is missing')
    if config.decode.format not in FORMATS:
        raise ConfigError(f"cannot read [decode] format: {config.decode.format!r} is unknown"
                          f"{_nearest(config.decode.format, FORMATS)}")  # fmt: skip
    if config.decode.format == "confluent-avro" and not (
        config.decode.schema or config.decode.registry
    ):
        raise ConfigError("cannot decode Confluent Avro: neither [decode] schema nor "
                          "[decode.registry] url is given")  # fmt: skip
    if config.decode.format == "avro" and not config.decode.schema:
        raise ConfigError("cannot decode bare Avro: [decode] schema is missing")
    kind = config.decode.key
    if kind and kind not in KEY_FORMATS:
        raise ConfigError(f"cannot read [decode] key: {kind!r} is unknown"
                          f"{_nearest(kind, KEY_FORMATS)}")  # fmt: skip
    if kind == "avro" and not config.decode.key_schema:
        raise ConfigError("cannot decode keys of bare Avro: [decode] key_schema is missing")
    if kind == "confluent-avro" and not (config.decode.key_schema or config.decode.registry):
        raise ConfigError("cannot decode keys of Confluent Avro: neither [decode] key_schema nor "
                          "[decode.registry] url is given")  # fmt: skip


AVAILABLE_NOW = "available-now"
NEVER = "never"


def _check_trigger(trigger: str) -> None:
    reason = {
        "continuous": "continuous processing has no batches, so there is no cut to prove",
        "real-time": "real-time mode hands rows on before their batch ends, so there is no batch "
        "to commit exactly once",
        "once": "it takes everything in one batch whatever the limits; use available-now",
    }.get(trigger.strip().lower().replace("realtime", "real-time"))
    if reason:
        raise ConfigError(f"cannot use trigger {trigger!r}: {reason}")
    if trigger != AVAILABLE_NOW:
        duration(trigger)


def _check_transform(transform: TransformConfig) -> None:
    if transform.sql and transform.python:
        raise ConfigError("cannot read [transform]: expected either sql or python, found both")
    if transform.python and not re.fullmatch(r"[^:]+:\w+", transform.python):
        raise ConfigError(f"cannot read [transform] python: expected module:function, "
                          f"found {transform.python!r}")  # fmt: skip
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
                raise ConfigError(f"cannot read [sink] start: expected {{topic = {{partition = "
                                  f"offset}}}}, found {topic} = {offsets!r}")  # fmt: skip


def replayed(letters: str) -> str:
    """The table that notes which dead letters were replayed."""
    return f"{letters}_replayed"


def remembered(table: str) -> str:
    """The table that remembers which keys of a table with `order_by` were deleted."""
    return f"{table}_deleted"


_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")


def _check_tables(config: Config) -> None:
    names = [table.name for table in config.tables]
    if not names:
        raise ConfigError("cannot read [[table]]: expected a table, found none")
    if len(names) > 1 and not config.routes:
        raise ConfigError(f"cannot read [[table]]: {len(names)} tables, and no [[route]] says what "
                          "goes where")  # fmt: skip
    if config.routes and config.transform:
        raise ConfigError("cannot use [[route]] with a [transform]: what comes out of a query goes "
                          "to one table", hint="use a sink for each query")  # fmt: skip
    if config.dead_letters and config.transform:
        raise ConfigError("cannot use [dead_letters] with a [transform]: a query's rows are "
                          "Spark's own")  # fmt: skip
    every = [*names, config.index_table]
    if config.dead_letters:
        every += [config.dead_letters.table, replayed(config.dead_letters.table)]
    every += map(remembered, config.remembering)
    if not config.routes and "{" in names[0]:
        raise ConfigError(f"cannot use table {names[0]}: no [[route]] says what stands for the "
                          "words in its name")  # fmt: skip
    lower = [name.lower() for name in every]
    if twice := [name for name in every if lower.count(name.lower()) > 1]:
        raise ConfigError(f"cannot use table {twice[0]}: two tables of the sink have that name")
    for table in config.tables:
        _check_table(table)
    letters = config.dead_letters
    if letters and not _NAME.fullmatch(letters.table):
        raise ConfigError(f"cannot read [dead_letters] table: expected namespace.table, found "
                          f"{letters.table!r}")  # fmt: skip
    if not 0 <= letters.max_share <= 1 or letters.max_count < 0:
        raise ConfigError("cannot read [dead_letters]: expected max_share from 0 to 1, and "
                          "max_count from 0")  # fmt: skip
    if config.sink.max_tables < len(names):
        raise ConfigError(f"cannot read [sink] max_tables: {config.sink.max_tables} is less than "
                          f"the {len(names)} tables of the config")  # fmt: skip


def _check_table(table: TableConfig) -> None:
    if not _NAME.fullmatch(re.sub(r"\{\w+\}", "x", table.name)):
        raise ConfigError(f"cannot use table name {table.name!r}: expected namespace.table of "
                          "letters, digits and underscores")  # fmt: skip
    if "{" in table.name.rpartition(".")[0]:
        raise ConfigError(f"cannot use table name {table.name!r}: a namespace does not come from "
                          "the data")  # fmt: skip
    if "{" in table.name and table.location:
        raise ConfigError(f"cannot use table {table.name}: tables made of a template cannot share "
                          "one location")  # fmt: skip
    if table.evolution not in EVOLUTION:
        raise ConfigError(f"cannot use table {table.name}: evolution {table.evolution!r} is "
                          f"unknown{_nearest(table.evolution, EVOLUTION)}")  # fmt: skip
    _check_mode(table)
    for text in (table.commit_interval, table.keep_snapshots):
        if text:
            duration(text)
    if table.commit_bytes:
        size(table.commit_bytes)
    if not table.offset_column or not table.partition_column or not table.topic_column:
        raise ConfigError(f"cannot use table {table.name}: the topic, partition and offset columns "
                          "carry the proof and cannot be left out")  # fmt: skip
    names = (
        table.topic_column,
        table.partition_column,
        table.offset_column,
        table.timestamp_column,
    )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"cannot use table {table.name}: two metadata columns are named "
                          f"{twice[0]!r}")  # fmt: skip
    if table.compression not in CODECS:
        raise ConfigError(f"cannot use table {table.name}: compression {table.compression!r} is "
                          f"unknown{_nearest(table.compression, CODECS)}")  # fmt: skip
    if taken := RESERVED & set(names):
        raise ConfigError(f"cannot use table {table.name}: the column name {min(taken)!r} is "
                          "reserved by Iceberg")  # fmt: skip
    if table.format_version not in (2, 3):
        raise ConfigError(f"cannot use table {table.name}: expected format_version 2 or 3, "
                          f"found {table.format_version}")  # fmt: skip
    if size(table.target_file_size) > 512 * 1024**2:
        raise ConfigError(f"cannot use table {table.name}: target_file_size is over 512MiB")


def _check_mode(table: TableConfig) -> None:
    doing = f"cannot use table {table.name}"
    if table.mode not in MODES:
        raise ConfigError(f"{doing}: mode {table.mode!r} is unknown{_nearest(table.mode, MODES)}")
    if (table.mode == "append") == bool(table.key):
        raise ConfigError(
            f"{doing}: it has a key, and its mode is append"
            if table.key
            else f"{doing}: its mode is {table.mode}, and no key says which rows are the same",
            hint='mode = "upsert"\nkey = ["id"]',
        )
    if table.compact_after < 0:
        raise ConfigError(f"{doing}: compact_after is below 0")
    if table.partitioned_by_key and not table.upsert_key:
        raise ConfigError(f"{doing}: partitioned_by_key is for upsert tables")
    if table.upsert_key and set(table.identifier_fields or table.key) != set(table.key):
        raise ConfigError(f"{doing}: its key and its identifier fields are different columns")
    beside = {table.topic_column, table.partition_column, table.offset_column,
              table.timestamp_column}  # fmt: skip
    if taken := beside & set(table.key):
        raise ConfigError(f"{doing}: {min(taken)!r} says where a row comes from, and is no key")
    if table.order_by and not table.upsert_key:
        raise ConfigError(f"{doing}: order_by is for upsert tables",
                          hint="rows of other tables are not replaced: sort_by orders them in "
                          "their files")  # fmt: skip
    if table.order_by in table.key:
        raise ConfigError(f"{doing}: order_by is {table.order_by!r}, which is its key: changes of "
                          "one key would all be alike")  # fmt: skip
    if table.order_by in beside - {table.timestamp_column, ""}:
        raise ConfigError(
            f"{doing}: order_by is {table.order_by!r}, which says where a row comes from; that "
            "counts where order_by says nothing"
        )


#: section, key pattern, forbidden value pattern, reason
_REFUSED = (
    ("*", r"fail\.?on\.?data\.?loss", r"(?i)false", "a lost range must stop the stream, not pass "
     "in silence"),
    ("spark", r".*asyncProgressTracking.*", r".*", "progress is written by the commit, not beside "
     "it"),
    ("spark", r".*(realTimeMode|continuous).*", r".*", "without batches there is no cut to prove"),
    ("kafka", r"enable\.auto\.commit", r"(?i)true", "the table is the position; the group's "
     "offsets are published after the commit"),
    ("kafka", r"auto\.offset\.reset", r"(?!error$).*", "a position that is gone must stop the "
     "stream, not jump"),
    ("kafka", r"group\.id", r".*", "set [sink] group instead"),
    ("kafka", r"enable\.partition\.eof", r"(?i)false", "the end of a range may be invisible "
     "offsets; only this event shows it"),
)  # fmt: skip


def _refuse_what_breaks_the_promise(config: Config) -> None:
    sections = {"kafka": config.kafka, "spark": config.spark, "catalog": config.catalog.properties,
                "decode.registry": config.decode.registry}  # fmt: skip
    for section, settings in sections.items():
        for key, value in settings.items():
            if SECRET.search(key) and not re.match(r"(env|file):.", value):
                raise ConfigError(
                    f"cannot take [{section}] {key}: a secret stands in the config; "
                    "expected env:NAME or file:PATH"
                )
            for where, key_pattern, value_pattern, reason in _REFUSED:
                if (
                    where in ("*", section)
                    and re.fullmatch(key_pattern, key, re.IGNORECASE)
                    and re.fullmatch(value_pattern, value)
                ):
                    raise ConfigError(f"cannot take [{section}] {key} = {value!r}: {reason}")


def _section(kind: Callable[..., T], title: str, values: Mapping[str, Any]) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"cannot read {title}: unknown key {key!r}{_nearest(key, fields)}")
        taken[key] = _fit(f"{title} {key}", str(fields[key].type), value)
    required = [
        n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in taken:
            raise ConfigError(f"cannot read {title}: {name!r} is missing")
    return kind(**taken)


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
            return tuple(_text(each) for each in value)
        if kind == "dict[str, str]" and isinstance(value, Mapping):
            return {str(k): str(v) for k, v in value.items()}
        if kind.startswith("str | dict") and isinstance(value, (str, Mapping)):
            return value
        if kind == "Settings" and isinstance(value, Settings):
            return value
    except ValueError:
        pass
    raise ConfigError(f"cannot read {where}: expected {kind}, found {value!r}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settings(section: str, values: Mapping[str, Any]) -> Settings:
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):  # TOML reads `bootstrap.servers = …` as a nested table
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else key, below)
        elif isinstance(value, bool):
            flat[prefix] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            flat[prefix] = str(value)
        else:
            raise ConfigError(f"cannot read [{section}] {prefix}: expected text or a number")

    walk("", values)
    return Settings(flat)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
