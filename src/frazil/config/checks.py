"""Checks of a config that need no server, and settings that would break a guarantee.

In: all sections of a config. Out: nothing; the first wrong setting raises `ConfigError`, with its
path. `check` runs whenever a `Config` is made, `check_stream` where records come from Kafka,
`check_catalog` before a catalog is opened. Each is a list of `config.rules`, which
`config.error_list` runs one by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from frazil.config.messages import nearest, within
from frazil.config.monitoring_checks import monitoring_rules
from frazil.config.route_checks import route_rules
from frazil.config.rules import PRESENCE, Checked, Rule, require, under
from frazil.config.sections import (
    AUTO,
    AVAILABLE_NOW,
    FORMATS,
    KEY_FORMATS,
    NEVER,
    OTLP_ENVIRONMENT,
    ConfigSections,
    DecodeConfig,
    MetricsConfig,
    RouteConfig,
    SinkConfig,
    TransformConfig,
)
from frazil.config.select_checks import declared_rules
from frazil.config.settings import SECRET, is_reference
from frazil.config.table_checks import table_rules
from frazil.config.units import address, duration, size
from frazil.errors import ConfigError


def check(config: ConfigSections) -> None:
    """All checks that need no server. Raises `ConfigError`."""
    require(rules(config))


def rules(config: ConfigSections) -> Iterator[Rule]:
    sink = config.sink
    yield Rule(lambda: _check_id(sink.id), (("sink", "id"),))
    master = config.spark.get("spark.master", "local")
    yield Rule(lambda: _check_master(master), (("spark", "spark.master"),))
    if config.kafka or sink.topics or sink.topic_pattern:  # none of them: fed by a DataFrame
        yield from stream_rules(config)
    yield Rule(lambda: _check_trigger(sink.trigger), (("sink", "trigger"),))
    yield from _number_rules(config)
    yield from under(("metrics",), _metrics_rules(config.metrics))
    yield from monitoring_rules(config)
    yield from under(("transform",), _transform_rules(config.transform))
    yield from table_rules(config)
    to = (("transform", "output_mode"), ("table", "0", "mode"), ("table", "0", "key"))
    yield Rule(lambda: _check_replaced(config), to)
    if config.routes:
        yield from route_rules(config.routes, [table.name for table in config.tables])
        yield from _fit_rules(config)
    yield from _promise_rules(config)


def _check_id(sink: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}", sink):
        raise ConfigError(
            f"cannot use sink id {sink!r}: expected 1 to 100 letters, digits, "
            "dots, dashes or underscores",
            path=("sink", "id"),
        )


def _check_master(master: str) -> None:
    if not re.match(r"(local|spark://|k8s://|yarn|env:)", master):
        raise ConfigError(
            f"cannot start Spark on {master!r}: expected local[n], spark://…, k8s://… or yarn",
            path=("spark", "spark.master"),
        )


def _number_rules(config: ConfigSections) -> Iterator[Rule]:
    """Durations, sizes and counts."""
    durations = {
        "sink": ["commit_interval", "max_pending_age", "unavailable_timeout"],
        "completeness": ["allowed_lateness", "max_future"],
    }
    durations["sink"].append("index_snapshot_retention")
    if config.completeness.idle_timeout != NEVER:
        durations["completeness"].append("idle_timeout")
    sizes = {"sink": ["max_bytes_per_trigger", "max_pending_bytes"]}
    for read, names in ((duration, durations), (size, sizes)):
        for section, keys in names.items():
            for key in keys:
                path = (section, key)
                text = getattr(getattr(config, section), key)
                yield Rule(partial(read, text, f"[{section}] {key}", path), (path,))
    for key in ("max_records_per_trigger", "max_records_per_task", "max_pending_batches"):
        yield Rule(partial(_check_count, config, key), (("sink", key),))


def _check_count(config: ConfigSections, key: str) -> None:
    if getattr(config.sink, key) < 1:
        raise ConfigError(
            f"cannot read [sink] {key}: expected at least 1, found {getattr(config.sink, key)}",
            path=("sink", key),
        )


def _fit_rules(config: ConfigSections) -> Iterator[Rule]:
    """A pattern is that of a topic of the sink, and an envelope is in a format that has one."""
    for number, route in enumerate(config.routes):
        at = ("route", str(number))
        title = f"cannot use [[route]] {number + 1}"
        yield from under(
            at,
            [
                (
                    partial(_check_envelope, title, route, config.decode.format),
                    ["envelope", "/decode/format"],
                ),
                (
                    partial(_check_reached, title, route, config.sink.topics),
                    ["pattern", "/sink/topics"],
                ),
            ],
        )


def _check_envelope(title: str, route: RouteConfig, kind: str) -> None:
    if route.envelope and kind == "raw":
        raise ConfigError(
            f"{title}: envelope is {route.envelope!r}, and format is raw; expected avro or json",
            path=("envelope",),
        )


def _check_reached(title: str, route: RouteConfig, topics: Sequence[str]) -> None:
    if topics and route.pattern and not any(re.fullmatch(route.pattern, t) for t in topics):
        raise ConfigError(
            f"{title}: no record reaches it, since its pattern {route.pattern!r} is that of "
            f"none of the topics {', '.join(topics)}",
            path=("pattern",),
        )


#: Iceberg's catalog types → required properties.
CATALOG_NEEDS = {
    "hadoop": ("warehouse",),
    "hive": (),
    "rest": ("uri",),
    "glue": (),
    "nessie": ("uri",),
    "jdbc": ("uri", "warehouse"),
    "dynamodb": (),
    "bigquery": (),
}


def check_catalog(config: ConfigSections) -> None:
    """Runs before a session is created: without a type Iceberg would look for a Hive metastore, and
    Spark would create one in the working directory."""
    require(catalog_rules(config))


def catalog_rules(config: ConfigSections) -> Iterator[Rule]:
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
    kind = properties.get("type", "")
    of_type = ("catalog", "type") if "type" in given else ("spark", f"{lead}type")
    types = tuple(dict.fromkeys([("catalog", "type"), of_type]))
    yield Rule(lambda: _check_type(properties, kind, of_type), types)
    for key in CATALOG_NEEDS.get(kind.lower(), ()):
        yield Rule(
            partial(_check_property, properties, key, kind, of_type), (("catalog", key), *types)
        )
    yield Rule(
        lambda: _check_hive(config, properties, kind.lower(), of_type),
        (("catalog", "uri"), *types),
    )


def _check_type(properties: Mapping[str, str], kind: str, of_type: tuple[str, ...]) -> None:
    if not properties:
        hint = '[catalog]\ntype = "rest"\nuri = "https://…"'
        raise ConfigError("cannot open a catalog: the config has no [catalog]", hint=hint)
    if not kind and not properties.get("catalog-impl"):
        raise ConfigError(
            "cannot open the catalog: [catalog] has neither type nor catalog-impl",
            hint=f"expected one of {', '.join(CATALOG_NEEDS)}",
            path=("catalog",),
        )
    if kind and kind.lower() not in CATALOG_NEEDS:
        raise ConfigError(
            f"cannot read [catalog] type: {kind!r} is unknown{nearest(kind, CATALOG_NEEDS)}",
            path=of_type,
        )


def _check_property(
    properties: Mapping[str, str], key: str, kind: str, of_type: tuple[str, ...]
) -> None:
    if not properties.get(key):
        raise ConfigError(
            f"cannot open the catalog: [catalog] {key} is missing, and its type is {kind}",
            path=of_type,
        )


def _check_hive(
    config: ConfigSections, properties: Mapping[str, str], kind: str, of_type: tuple[str, ...]
) -> None:
    elsewhere = any("hive.metastore.uris" in key for key in config.spark) or any(
        os.environ.get(variable)
        for variable in ("HIVE_CONF_DIR", "HADOOP_CONF_DIR", "SPARK_CONF_DIR")
    )
    if kind == "hive" and not properties.get("uri") and not elsewhere:
        raise ConfigError(
            "cannot open the catalog: its type is hive, and the metastore's uri is missing",
            hint='[catalog]\nuri = "thrift://host:9083"',
            path=of_type,
        )


#: Topic names that Kafka accepts.
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._\-]{1,249}")


def _check_topic(topic: str, path: tuple[str, ...]) -> None:
    if not _TOPIC.fullmatch(topic):
        raise ConfigError(
            "cannot read topics: expected names of 1 to 249 letters, digits, "
            f"dots, dashes and underscores, found {topic!r}",
            path=path,
        )


def check_stream(config: ConfigSections) -> None:
    """Checks the input: `[sink]`'s topics, `[kafka]` and `[decode]`."""
    require(stream_rules(config))


def stream_rules(config: ConfigSections) -> Iterator[Rule]:
    sink = config.sink
    either = (("sink", "topics", PRESENCE), ("sink", "topic_pattern", PRESENCE))
    yield Rule(lambda: _check_either(sink), either)
    for path, topics in (
        (("sink", "topics"), sink.topics),
        *((("route", str(n), "topics"), route.topics) for n, route in enumerate(config.routes)),
    ):
        for at, topic in enumerate(topics):
            yield Rule(partial(_check_topic, topic, path), ((*path, str(at)),))
    yield Rule(lambda: _check_pattern(sink.topic_pattern), (("sink", "topic_pattern"),))
    yield Rule(lambda: _check_start(sink.starting_offsets), (("sink", "starting_offsets"),))
    yield Rule(lambda: _check_client(sink.kafka_client), (("sink", "kafka_client"),))
    yield Rule(lambda: _check_servers(config.kafka), (("kafka", "bootstrap.servers"),))
    yield from decode_rules(config.decode)


def _check_either(sink: SinkConfig) -> None:
    if bool(sink.topics) == bool(sink.topic_pattern):
        raise ConfigError(
            "cannot read [sink]: expected either topics or topic_pattern, found "
            f"{'both' if sink.topics else 'neither'}",
            path=("sink", "topic_pattern") if sink.topics else ("sink",),
        )


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"cannot read [sink] topic_pattern: {error}", path=("sink", "topic_pattern")
        ) from None


def _check_start(start: str | Mapping[str, Any]) -> None:
    if not isinstance(start, str):
        _check_cut(start)
    elif start not in ("earliest", "latest"):
        raise ConfigError(
            "cannot read [sink] starting_offsets: expected earliest, latest or a cut, "
            f"found {start!r}",
            path=("sink", "starting_offsets"),
        )


def _check_client(client: str) -> None:
    if client not in ("auto", "librdkafka"):
        raise ConfigError(
            f"cannot read [sink] kafka_client: expected auto or librdkafka, found {client!r}",
            path=("sink", "kafka_client"),
        )


def _check_servers(kafka: Mapping[str, str]) -> None:
    if "bootstrap.servers" not in kafka:
        raise ConfigError('cannot read [kafka]: "bootstrap.servers" is missing', path=("kafka",))


def decode_rules(decode: DecodeConfig) -> Iterator[Rule]:
    yield from under(("decode",), declared_rules(decode))
    yield from under(
        ("decode",),
        (
            (lambda: _check_format(decode), ["format"]),
            (lambda: _check_schema(decode), ["format", "schema", "registry"]),
            (lambda: _check_placeholder(decode.unavailable_value), ["unavailable_value"]),
            (lambda: _check_key_format(decode.key_format), ["key_format"]),
            (lambda: _check_key_schema(decode), ["key_format", "key_schema", "registry"]),
        ),
    )


def _check_format(decode: DecodeConfig) -> None:
    if decode.format not in FORMATS:
        raise ConfigError(
            f"cannot read [decode] format: {decode.format!r} is unknown"
            f"{nearest(decode.format, FORMATS)}",
            path=("format",),
        )


def _check_schema(decode: DecodeConfig) -> None:
    if decode.format == "confluent-avro" and not (decode.schema or decode.registry):
        raise ConfigError(
            "cannot decode Confluent Avro: neither [decode] schema nor "
            "[decode.registry] url is given",
            path=("format",),
        )
    if decode.format == "avro" and not decode.schema:
        raise ConfigError("cannot decode bare Avro: [decode] schema is missing", path=("format",))


def _check_placeholder(placeholder: str) -> None:
    if placeholder.startswith("hex:") and not re.fullmatch("hex:([0-9A-Fa-f]{2})+", placeholder):
        raise ConfigError(
            "cannot read [decode] unavailable_value: expected pairs of hexadecimal "
            f"digits behind hex:, found {placeholder!r}",
            path=("unavailable_value",),
        )


def _check_key_format(kind: str) -> None:
    if kind and kind not in KEY_FORMATS:
        raise ConfigError(
            f"cannot read [decode] key_format: {kind!r} is unknown{nearest(kind, KEY_FORMATS)}",
            path=("key_format",),
        )


def _check_key_schema(decode: DecodeConfig) -> None:
    kind = decode.key_format
    if kind == "avro" and not decode.key_schema:
        raise ConfigError(
            "cannot decode keys of bare Avro: [decode] key_schema is missing",
            path=("key_format",),
        )
    if kind == "confluent-avro" and not (decode.key_schema or decode.registry):
        raise ConfigError(
            "cannot decode keys of Confluent Avro: neither [decode] key_schema nor "
            "[decode.registry] url is given",
            path=("key_format",),
        )


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


def _metrics_rules(metrics: MetricsConfig) -> Iterator[Checked]:
    if metrics.address:
        yield partial(address, metrics.address, "[metrics] address", ("address",)), ["address"]
    for name in ("lag_interval", "audit_interval"):
        yield partial(_check_interval, name, getattr(metrics, name)), [name]
    yield lambda: _check_labels(metrics.max_labels), ["max_labels"]
    yield lambda: _check_endpoint(metrics.otlp_endpoint), ["otlp_endpoint"]


def _check_interval(name: str, text: str) -> None:
    if text != NEVER and duration(text, f"[metrics] {name}", (name,)) < 1:
        raise ConfigError(
            f"cannot read [metrics] {name}: expected at least 1s, found {text!r}", path=(name,)
        )


def _check_labels(most: int) -> None:
    if most < 1:
        raise ConfigError(
            f"cannot read [metrics] max_labels: expected at least 1, found {most}",
            path=("max_labels",),
        )


def _check_endpoint(endpoint: str) -> None:
    if endpoint not in ("", OTLP_ENVIRONMENT) and not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(
            "cannot read [metrics] otlp_endpoint: expected a URL, as http://127.0.0.1:4318, "
            f"or env, found {endpoint!r}",
            path=("otlp_endpoint",),
        )


def _transform_rules(transform: TransformConfig) -> Iterator[Checked]:
    yield lambda: _check_one_query(transform), ["sql", "python"]
    yield lambda: _check_function(transform.python), ["python"]
    yield lambda: _check_mode(transform.output_mode), ["output_mode"]


def _check_one_query(transform: TransformConfig) -> None:
    if transform.sql and transform.python:
        raise ConfigError("cannot read [transform]: expected either sql or python, found both")


def _check_function(python: str) -> None:
    if python and not re.fullmatch(r"[^:]+:\w+", python):
        raise ConfigError(
            f"cannot read [transform] python: expected module:function, found {python!r}",
            path=("python",),
        )


def _check_mode(mode: str) -> None:
    with within("output_mode"):
        check_output_mode(mode)


def check_output_mode(mode: str) -> None:
    if mode == "complete":
        raise ConfigError(
            "cannot write in output mode 'complete': each batch would replace the whole table",
            hint="use update with a table of mode upsert, whose key is the columns of GROUP BY: "
            "its rows are the same, and each batch replaces those that changed",
        )
    if mode not in ("append", "update"):
        raise ConfigError(f"cannot write in output mode {mode!r}: expected append or update")


def _check_replaced(config: ConfigSections) -> None:
    table = next(iter(config.tables), None)
    if config.transform.output_mode == "update" and table and not table.upsert_key:
        raise ConfigError(
            "cannot write in output mode 'update': it replaces existing rows, and table "
            f"{table.name} has mode {table.mode}",
            hint='mode = "upsert", and key = the columns of GROUP BY; or use append: with a '
            "watermark, aggregations give each window once, when it closes",
            path=("transform", "output_mode"),
        )


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


#: section, key pattern, forbidden value pattern, reason
_REFUSED = (
    (
        "*",
        r"fail\.?on\.?data\.?loss",
        r"(?i)false",
        "a lost range must stop the stream",
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
        "a position that Kafka no longer has must stop the stream",
    ),
    ("kafka", r"group\.id", r".*", "set [sink] consumer_group instead"),
    (
        "kafka",
        r"enable\.partition\.eof",
        r"(?i)false",
        "the end of a range may be invisible offsets; only this event shows it",
    ),
)


def _promise_rules(config: ConfigSections) -> Iterator[Rule]:
    sections = {
        "kafka": config.kafka,
        "spark": config.spark,
        "catalog": config.catalog.properties,
        "decode.registry": config.decode.registry,
    }
    for section, settings in sections.items():
        for key, value in settings.items():
            path = (*section.split("."), key)
            yield Rule(partial(_check_passed, section, key, value, path), (path,))


def _check_passed(section: str, key: str, value: str, path: tuple[str, ...]) -> None:
    if SECRET.search(key) and not is_reference(key, value):
        raise ConfigError(
            f"cannot take [{section}] {key}: a secret is written in the config; "
            "expected env:NAME or file:PATH",
            path=path,
        )
    for where, key_pattern, value_pattern, reason in _REFUSED:
        if (
            where in ("*", section)
            and re.fullmatch(key_pattern, key, re.IGNORECASE)
            and re.fullmatch(value_pattern, value)
        ):
            raise ConfigError(
                f"cannot take [{section}] {key} = {value!r}: {reason}",
                path=path,
            )
