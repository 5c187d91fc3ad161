"""The configuration: one TOML file, or the same in Python, checked before anything starts.

In: a path (plus `FRAZIL_…` environment variables), or dataclasses made in code. Out: a frozen
`Config`. `[kafka]`, `[catalog]`, `[spark]` and `[decode.registry]` pass through unchanged to
librdkafka, Iceberg, Spark and the registry client. Every other key is defined in
`frazil.config.sections`; an unknown key is refused with the nearest known one. A secret is never a
value in the file: it is `env:NAME` or `file:PATH`, resolved where it is used and masked wherever a
config is shown.
"""

from __future__ import annotations

import dataclasses
import os
import select
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frazil.config import origins
from frazil.config.checks import check, check_catalog, check_stream
from frazil.config.environment import overlay
from frazil.config.messages import argument, nearest, placed, within
from frazil.config.section_builder import (
    check_section,
    numbered_sections,
    section_of,
    section_title,
)
from frazil.config.sections import (
    CatalogConfig,
    CompletenessConfig,
    ConfigSections,
    DeadLettersConfig,
    DecodeConfig,
    HealthConfig,
    LogConfig,
    MetricsConfig,
    NotifyConfig,
    RouteConfig,
    SinkConfig,
    TableConfig,
    TransformConfig,
)
from frazil.config.settings import Settings, settings_of
from frazil.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


#: Seconds for the writer of a pipe.
_PIPE_SECONDS = 5.0
#: Largest config file, in bytes.
_LARGEST = 16_000_000


@dataclass(frozen=True, slots=True)
class Config(ConfigSections):
    """The sections of a config, checked when it is made."""

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
            metrics: MetricsConfig | Mapping[str, Any] = ...,
            health: HealthConfig | Mapping[str, Any] = ...,
            log: LogConfig | Mapping[str, Any] = ...,
            notify: NotifyConfig | Mapping[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Converts dicts and lists to sections, as in a file, and checks them."""
        with placed(argument):
            self._fit_sections()
            check(self)

    def _fit_sections(self) -> None:
        put = partial(object.__setattr__, self)
        if isinstance(self.catalog, Mapping):
            properties = dict(self.catalog)
            with within("catalog"):
                name = properties.pop("name", "lake")
                put("catalog", CatalogConfig(name, settings_of("catalog", properties)))
        kinds = {
            "sink": SinkConfig,
            "decode": DecodeConfig,
            "transform": TransformConfig,
            "catalog": CatalogConfig,
            "dead_letters": DeadLettersConfig,
            "completeness": CompletenessConfig,
            "metrics": MetricsConfig,
            "health": HealthConfig,
            "log": LogConfig,
            "notify": NotifyConfig,
        }
        for name, kind in kinds.items():
            with within(name):
                put(name, section_of(kind, getattr(self, name)))
        for name, several in (("table", TableConfig), ("route", RouteConfig)):
            given = getattr(self, f"{name}s")
            if not isinstance(given, (list, tuple)):
                raise ConfigError(
                    f"cannot read {section_title(several)}: expected a list, found {given!r}",
                    path=(name,),
                )
            put(f"{name}s", numbered_sections(name, several, given))
        for name in ("kafka", "spark"):
            with within(name):
                put(name, settings_of(name, getattr(self, name)))
        for name, value in without_catalog(self).items():
            put(name, value)

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """The config of a TOML file, overridden by `FRAZIL_SECTION__KEY` variables."""
        return load(path)


def without_catalog(config: ConfigSections) -> dict[str, Any]:
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
    locations: origins.Origins = {}
    with placed(lambda setting: origins.location(locations, setting) if setting else ""):
        given = document(
            path, environ, locations
        )  # an error without a setting names the file or variable
    with placed(lambda setting: origins.location(locations, setting) or Path(path).name):
        config = from_document(given, base=Path(path).parent)
        check_catalog(config)
    return config, locations


def document(
    path: str | Path,
    environ: Mapping[str, str] = os.environ,
    locations: origins.Origins | None = None,
) -> dict[str, Any]:
    """The parsed file with variables applied. Adds the origin of each setting to `locations`."""
    try:
        text = _content(path)
        if len(text) > _LARGEST:
            raise ConfigError(f"cannot read config {path}: it is larger than {_LARGEST:,} bytes")
        parsed = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read config {path}: not TOML: it is not UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read config {path}: not TOML: {error}") from None
    locations = {} if locations is None else locations
    locations.update(origins.lines(text.decode(), Path(path).name))
    return overlay(parsed, environ, locations)


def _content(path: str | Path) -> bytes:
    """A file, or what is written to a pipe within a few seconds."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        with open(path, "rb") as file:
            return file.read(_LARGEST + 1)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        text, deadline = b"", time.monotonic() + _PIPE_SECONDS
        while len(text) <= _LARGEST:
            ready = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]
            part = os.read(pipe, 1 << 16) if ready else b""
            if not part:
                break
            text += part
    finally:
        os.close(pipe)
    if not text:
        raise ConfigError(f"cannot read config {path}: it is a pipe without a writer")
    return text


def from_document(document: Mapping[str, Any], base: Path = Path()) -> Config:
    _check_sections(document)
    decode = _decode_section(document, base)
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
    with within("catalog"):
        properties = settings_of("catalog", catalog)
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
        metrics=document.get("metrics", {}),
        health=document.get("health", {}),
        log=document.get("log", {}),
        notify=document.get("notify", {}),
    )
    check_stream(config)
    check_document(config)
    return config


def check_document(config: ConfigSections) -> None:
    """What is refused of a file, and not of a config that Frazil makes."""
    if config.sink.id.endswith(".replay"):
        raise ConfigError(
            f"cannot use sink id {config.sink.id!r}: that name belongs to the replay of "
            "another sink's dead letters",
            path=("sink", "id"),
        )


#: The sections of a document → the class of one; None: a pass-through section.
SECTIONS: Mapping[str, Any] = {
    "sink": SinkConfig,
    "kafka": None,
    "decode": DecodeConfig,
    "transform": TransformConfig,
    "catalog": None,
    "spark": None,
    "table": TableConfig,
    "route": RouteConfig,
    "dead_letters": DeadLettersConfig,
    "completeness": CompletenessConfig,
    "metrics": MetricsConfig,
    "health": HealthConfig,
    "log": LogConfig,
    "notify": NotifyConfig,
}


def _check_sections(document: Mapping[str, Any]) -> None:
    """Every section of a document is known, and a table of keys or a list of them."""
    for several in ("table", "route"):
        if not isinstance(document.get(several, []), list):
            raise ConfigError(
                f"cannot read config: [{several}] is one {several}; expected [[{several}]]",
                path=(several,),
            )
    for section in document:
        if section not in SECTIONS:
            raise ConfigError(
                f"cannot read config: unknown section [{section}]{nearest(section, SECTIONS)}",
                path=(section,),
            )
        content = document[section]
        for values in content if section in ("table", "route") else [content]:
            check_section(section, values)
    check_section("decode.registry", document.get("decode", {}).get("registry", {}))


def _decode_section(document: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """`[decode]`, with paths of schemas relative to the config file."""
    decode = dict(document.get("decode", {}))
    with within("decode", "registry"):
        decode["registry"] = settings_of("decode.registry", decode.get("registry", {}))
    for path in ("schema", "key_schema"):
        if given := decode.get(path):
            if not isinstance(given, str):
                raise ConfigError(
                    f"cannot read [decode] {path}: expected the path of a file, found {given!r}",
                    path=("decode", path),
                )
            decode[path] = str(base / given)
    return decode


def _from(base: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """The section, with a Python file's path relative to the config file."""
    given = dict(section)
    if str(given.get("python", "")).partition(":")[0].endswith(".py"):
        given["python"] = str(base / given["python"])
    return given


#: Settings of `[sink]` and `[[table]]` that concern the stream that a sink reads, and its records.
_OF_KAFKA = {
    "topics",
    "topic_pattern",
    "starting_offsets",
    "max_records_per_trigger",
    "max_bytes_per_trigger",
    "max_records_per_task",
    "kafka_client",
    "consumer_group",
    "select",
    "key_column",
    "key_column_type",
    "key_fields_prefix",
    "headers_column",
    "headers",
}


def for_frame(
    table: str, catalog: str, settings: Mapping[str, Any], output_mode: str = "append"
) -> Config:
    """The config of a sink that reads a DataFrame. `settings`: keys of `[sink]`, `[[table]]` and
    `[completeness]`."""
    sinks = {f.name for f in dataclasses.fields(SinkConfig)} - _OF_KAFKA
    fields = {f.name for f in dataclasses.fields(TableConfig)} - {"name"}
    others = {f.name for f in dataclasses.fields(CompletenessConfig)}
    for key in settings:
        if key in _OF_KAFKA:
            raise ConfigError(
                f"cannot write with {key!r}: the options of the DataFrame's own sources "
                "set what is read and how much"
            )
        if key not in sinks | fields | others:
            raise ConfigError(
                f"cannot write: unknown setting {key!r}"
                f"{nearest(key, sorted(sinks | fields | others))}"
            )
    of_sink = {key: value for key, value in settings.items() if key in sinks}
    of_table = {key: value for key, value in settings.items() if key in fields}
    of_hours = {key: value for key, value in settings.items() if key in others}
    with placed(lambda path: f"argument {path[-1]}" if path else ""):
        return Config(
            sink=of_sink,
            kafka=Settings(),
            catalog=CatalogConfig(catalog),
            tables=({"name": table, **of_table},),
            decode=DecodeConfig("raw"),
            transform=TransformConfig(output_mode=output_mode),
            completeness=of_hours,
        )
