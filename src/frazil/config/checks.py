"""Checks of a config that need no server, and settings that would break a guarantee.

In: all sections of a config. Out: nothing; the first wrong setting raises `ConfigError`, with its
path. `check` runs whenever a `Config` is made, `check_stream` where records come from Kafka,
`check_catalog` before a catalog is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from frazil.config.messages import nearest, within
from frazil.config.monitoring_checks import check_monitoring
from frazil.config.route_checks import check_routes
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
    TransformConfig,
)
from frazil.config.select_checks import check_declared
from frazil.config.settings import SECRET, is_reference
from frazil.config.table_checks import check_tables
from frazil.config.units import address, duration, size
from frazil.errors import ConfigError


def check(config: ConfigSections) -> None:
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
    _check_metrics(config.metrics)
    check_monitoring(config)
    for name in ("max_bytes_per_trigger", "max_pending_bytes"):
        size(getattr(sink, name), f"[sink] {name}", ("sink", name))
    for name in ("max_records_per_trigger", "max_records_per_task", "max_pending_batches"):
        if getattr(sink, name) < 1:
            raise ConfigError(
                f"cannot read [sink] {name}: expected at least 1, found {getattr(sink, name)}",
                path=("sink", name),
            )
    _check_transform(config.transform)
    check_tables(config)
    if config.routes:
        check_routes(config.routes, [table.name for table in config.tables])
        _check_fit(config)
    _refuse_what_breaks_the_promise(config)


def _check_fit(config: ConfigSections) -> None:
    """A pattern is that of a topic of the sink, and an envelope is in a format that has one."""
    for number, route in enumerate(config.routes):
        title, at = f"cannot use [[route]] {number + 1}", ("route", str(number))
        if route.envelope and config.decode.format == "raw":
            raise ConfigError(
                f"{title}: envelope is {route.envelope!r}, and format is raw; expected avro "
                "or json",
                path=(*at, "envelope"),
            )
        topics = config.sink.topics
        if topics and route.pattern and not any(re.fullmatch(route.pattern, t) for t in topics):
            raise ConfigError(
                f"{title}: no record reaches it, since its pattern {route.pattern!r} is that of "
                f"none of the topics {', '.join(topics)}",
                path=(*at, "pattern"),
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
            hint=f"expected one of {', '.join(CATALOG_NEEDS)}",
            path=("catalog",),
        )
    if kind and kind.lower() not in CATALOG_NEEDS:
        raise ConfigError(
            f"cannot read [catalog] type: {kind!r} is unknown{nearest(kind, CATALOG_NEEDS)}",
            path=of_type,
        )
    for key in CATALOG_NEEDS.get(kind.lower(), ()):
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
            "cannot open the catalog: its type is hive, and the metastore's uri is missing",
            hint='[catalog]\nuri = "thrift://host:9083"',
            path=of_type,
        )


#: Topic names that Kafka accepts.
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._\-]{1,249}")


def _check_topics(topics: tuple[str, ...], path: tuple[str, ...]) -> None:
    for topic in topics:
        if not _TOPIC.fullmatch(topic):
            raise ConfigError(
                "cannot read topics: expected names of 1 to 249 letters, digits, "
                f"dots, dashes and underscores, found {topic!r}",
                path=path,
            )


def check_stream(config: ConfigSections) -> None:
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
    _check_decode(config.decode)


def _check_decode(decode: DecodeConfig) -> None:
    check_declared(decode)
    if decode.format not in FORMATS:
        raise ConfigError(
            f"cannot read [decode] format: {decode.format!r} is unknown"
            f"{nearest(decode.format, FORMATS)}",
            path=("decode", "format"),
        )
    if decode.format == "confluent-avro" and not (decode.schema or decode.registry):
        raise ConfigError(
            "cannot decode Confluent Avro: neither [decode] schema nor "
            "[decode.registry] url is given",
            path=("decode", "format"),
        )
    if decode.format == "avro" and not decode.schema:
        raise ConfigError(
            "cannot decode bare Avro: [decode] schema is missing", path=("decode", "format")
        )
    placeholder = decode.unavailable_value
    if placeholder.startswith("hex:") and not re.fullmatch("hex:([0-9A-Fa-f]{2})+", placeholder):
        raise ConfigError(
            "cannot read [decode] unavailable_value: expected pairs of hexadecimal "
            f"digits behind hex:, found {placeholder!r}",
            path=("decode", "unavailable_value"),
        )
    kind = decode.key_format
    if kind and kind not in KEY_FORMATS:
        raise ConfigError(
            f"cannot read [decode] key_format: {kind!r} is unknown{nearest(kind, KEY_FORMATS)}",
            path=("decode", "key_format"),
        )
    if kind == "avro" and not decode.key_schema:
        raise ConfigError(
            "cannot decode keys of bare Avro: [decode] key_schema is missing",
            path=("decode", "key_format"),
        )
    if kind == "confluent-avro" and not (decode.key_schema or decode.registry):
        raise ConfigError(
            "cannot decode keys of Confluent Avro: neither [decode] key_schema nor "
            "[decode.registry] url is given",
            path=("decode", "key_format"),
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


def _check_metrics(metrics: MetricsConfig) -> None:
    if metrics.address:
        address(metrics.address, "[metrics] address", ("metrics", "address"))
    for name in ("lag_interval", "audit_interval"):
        if (text := getattr(metrics, name)) != NEVER:
            seconds = duration(text, f"[metrics] {name}", ("metrics", name))
            if seconds < 1:
                raise ConfigError(
                    f"cannot read [metrics] {name}: expected at least 1s, found {text!r}",
                    path=("metrics", name),
                )
    if metrics.max_labels < 1:
        raise ConfigError(
            f"cannot read [metrics] max_labels: expected at least 1, found {metrics.max_labels}",
            path=("metrics", "max_labels"),
        )
    endpoint = metrics.otlp_endpoint
    if endpoint not in ("", OTLP_ENVIRONMENT) and not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(
            "cannot read [metrics] otlp_endpoint: expected a URL, as http://127.0.0.1:4318, "
            f"or env, found {endpoint!r}",
            path=("metrics", "otlp_endpoint"),
        )


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
    with within("transform", "output_mode"):
        check_output_mode(transform.output_mode)


def check_output_mode(mode: str) -> None:
    if mode in ("update", "complete"):
        raise ConfigError(
            f"cannot write in output mode {mode!r}: it replaces existing rows, and the "
            "table is append-only",
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


def _refuse_what_breaks_the_promise(config: ConfigSections) -> None:
    sections = {
        "kafka": config.kafka,
        "spark": config.spark,
        "catalog": config.catalog.properties,
        "decode.registry": config.decode.registry,
    }
    for section, settings in sections.items():
        for key, value in settings.items():
            if SECRET.search(key) and not is_reference(key, value):
                raise ConfigError(
                    f"cannot take [{section}] {key}: a secret is written in the config; "
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
