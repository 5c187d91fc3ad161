from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import frazil
from frazil.config import checks, explain
from frazil.config import model as configs
from frazil.config.model import Config, from_document, load
from frazil.config.secret_values import masked, secret_values
from frazil.config.sections import (
    RESERVED,
    CompletenessConfig,
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
from frazil.config.settings import Settings
from frazil.config.units import duration, size
from frazil.errors import ConfigError, Fatal, without_passwords

TOML = """
[sink]
id = "orders"
topics = ["orders"]

[kafka]
"bootstrap.servers" = "broker:9092"

[decode]
format = "raw"

[catalog]
type = "glue"
"s3.path-style-access" = true

[[table]]
name = "shop.orders"
"""

GOOD: dict[str, Any] = {
    "sink": {"id": "orders", "topics": ["orders"]},
    "kafka": {"bootstrap.servers": "broker:9092"},
    "decode": {"format": "raw"},
    "table": [{"name": "shop.orders"}],
}


def made(**sections: Any) -> Config:
    """The good document with keys laid over it; `table=` means the one table's."""
    document = copy.deepcopy(GOOD)
    for section, values in sections.items():
        if section == "table":
            document["table"][0].update(values)
        else:
            document.setdefault(section, {}).update(values)
    return from_document(document)


def loaded(folder: Path, text: str = TOML, **environ: str) -> Config:
    path = folder / "sink.toml"
    path.write_text(text)
    return load(path, environ)


# ── the file ─────────────────────────────────────────────────────────────────────────────────


def test_a_file_becomes_a_config_and_pass_through_sections_stay_untouched(tmp_path: Path):
    config = loaded(tmp_path)
    assert config.sink.topics == ("orders",)
    assert config.kafka == {"bootstrap.servers": "broker:9092"}
    assert config.catalog.properties == {"type": "glue", "s3.path-style-access": "true"}
    assert config.catalog.name == "lake"
    assert config.tables[0].name == "shop.orders"


def test_an_unquoted_dotted_key_is_the_same_key(tmp_path: Path):
    text = TOML.replace('"bootstrap.servers"', "bootstrap.servers")
    assert loaded(tmp_path, text).kafka == {"bootstrap.servers": "broker:9092"}


def test_a_schema_path_is_meant_from_where_the_file_is(tmp_path: Path):
    text = TOML.replace('format = "raw"', 'format = "avro"\nschema = "order.avsc"')
    assert loaded(tmp_path, text).decode.schema == str(tmp_path / "order.avsc")


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml", {})
    with pytest.raises(ConfigError, match=r"sink\.toml: not TOML: "):
        loaded(tmp_path, "[sink\n")


def test_a_config_travels_between_processes():
    config = made()
    assert pickle.loads(pickle.dumps(config)) == config


def test_index_and_group_have_defaults_that_can_be_replaced():
    assert made().index_table == "shop.frazil_index"
    assert made(sink={"index_table": "ops.index"}).index_table == "ops.index"
    assert made().group == "orders"
    assert made(sink={"consumer_group": "lag"}).group == "lag"


# ── variables laid over it ───────────────────────────────────────────────────────────────────


def test_a_variable_sets_a_key_of_a_section(tmp_path: Path):
    assert loaded(tmp_path, FRAZIL_SINK__ID="other").sink.id == "other"
    assert loaded(tmp_path, FRAZIL_SINK__MAX_PENDING_BATCHES="7").sink.max_pending_batches == 7


def test_a_variable_of_a_pass_through_section_sets_a_dotted_key(tmp_path: Path):
    config = loaded(
        tmp_path, FRAZIL_KAFKA__BOOTSTRAP_SERVERS="else:1", FRAZIL_KAFKA__CLIENT_ID="me"
    )
    assert config.kafka == {"bootstrap.servers": "else:1", "client.id": "me"}


def test_a_variable_finds_the_key_that_is_there_dashes_included(tmp_path: Path):
    config = loaded(tmp_path, FRAZIL_CATALOG__S3_PATH_STYLE_ACCESS="false")
    assert config.catalog.properties == {"type": "glue", "s3.path-style-access": "false"}


def test_a_variable_finds_an_unquoted_key_with_dashes_too(tmp_path: Path):
    text = TOML.replace('"s3.path-style-access"', "s3.path-style-access")
    config = loaded(tmp_path, text, FRAZIL_CATALOG__S3_PATH_STYLE_ACCESS="false")
    assert config.catalog.properties == {"type": "glue", "s3.path-style-access": "false"}


def test_a_variable_names_the_catalog(tmp_path: Path):
    config = loaded(tmp_path, FRAZIL_CATALOG__NAME="prod")
    assert config.catalog.name == "prod"
    assert "name" not in config.catalog.properties


def test_a_list_is_written_with_commas(tmp_path: Path):
    config = loaded(
        tmp_path, FRAZIL_SINK__TOPICS="a,b", FRAZIL_TABLE__0__PARTITION_BY="day(at),country"
    )
    assert config.sink.topics == ("a", "b")
    assert config.tables[0].partition_by == ("day(at)", "country")


def test_a_variable_sets_a_field_of_the_first_table_numbered_or_not(tmp_path: Path):
    assert loaded(tmp_path, FRAZIL_TABLE__0__NAME="db.x").tables[0].name == "db.x"
    assert loaded(tmp_path, FRAZIL_TABLE__NAME="db.y").tables[0].name == "db.y"


def test_a_variable_sets_a_key_of_the_registry(tmp_path: Path):
    config = loaded(tmp_path, FRAZIL_DECODE__REGISTRY__URL="http://r", FRAZIL_DECODE__FORMAT="json")
    assert config.decode.registry == {"url": "http://r"}
    assert config.decode.format == "json"


def test_variables_alone_can_make_a_whole_config(tmp_path: Path):
    config = loaded(
        tmp_path,
        "",
        FRAZIL_SINK__ID="a",
        FRAZIL_SINK__TOPIC_PATTERN="o.*",
        FRAZIL_KAFKA__BOOTSTRAP_SERVERS="b:1",
        FRAZIL_DECODE__FORMAT="raw",
        FRAZIL_TABLE__0__NAME="db.t",
        FRAZIL_CATALOG__TYPE="glue",
    )
    assert config.sink.topic_pattern == "o.*"


def test_other_variables_are_not_ours(tmp_path: Path):
    assert loaded(tmp_path, FRAZIL_CACHE="/c", HOME="/h", FRAZ_SINK__ID="x").sink.id == "orders"


def test_a_mistyped_variable_is_refused_like_a_mistyped_key(tmp_path: Path):
    with pytest.raises(ConfigError, match="unknown key 'topic'; did you mean 'topics'"):
        loaded(tmp_path, FRAZIL_SINK__TOPIC="a")
    with pytest.raises(ConfigError, match=r"unknown section \[kafk\]; did you mean 'kafka'"):
        loaded(tmp_path, FRAZIL_KAFK__CLIENT_ID="a")


def test_a_variable_that_names_a_table_and_no_field_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="FRAZIL_TABLE__0"):
        loaded(tmp_path, FRAZIL_TABLE__0="db.t")


def test_a_variable_with_more_parts_than_the_key_has_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="FRAZIL_KAFKA__SSL__CA__LOCATION"):
        loaded(tmp_path, FRAZIL_KAFKA__SSL__CA__LOCATION="/ca.pem")


@pytest.mark.parametrize("number", ["²", "999999999", "1" * 5000, "-1", "1_0", "٣", "2"])
def test_a_variable_with_a_number_that_no_table_has_is_refused(tmp_path: Path, number: str):
    with pytest.raises(ConfigError, match=rf"variable FRAZIL_TABLE__{number}__NAME"):
        loaded(tmp_path, **{f"FRAZIL_TABLE__{number}__NAME": "db.t"})


def test_variables_alone_number_more_than_ten_tables(tmp_path: Path):
    text = TOML.replace('[[table]]\nname = "shop.orders"\n', "")
    names = {f"FRAZIL_TABLE__{i}__NAME": f"db.t{i}" for i in range(12)}
    routes = {
        f"FRAZIL_ROUTE__{i}__{key}": value.format(i)
        for i in range(12)
        for key, value in (("TOPICS", "t{}"), ("TO", "db.t{}"))
    }
    config = loaded(tmp_path, text, **names, **routes)
    assert [table.name for table in config.tables] == [f"db.t{i}" for i in range(12)]


@pytest.mark.parametrize("text", ["a,,b", ",", "a,", " ,b"])
def test_an_empty_item_in_a_variable_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="variable FRAZIL_SINK__TOPICS: an item"):
        loaded(tmp_path, FRAZIL_SINK__TOPICS=text)


def test_an_empty_variable_is_an_empty_list(tmp_path: Path):
    with pytest.raises(ConfigError, match="either topics or topic_pattern, found neither"):
        loaded(tmp_path, FRAZIL_SINK__TOPICS="")
    config = loaded(tmp_path, FRAZIL_SINK__TOPICS="", FRAZIL_SINK__TOPIC_PATTERN="o.*")
    assert config.sink.topics == ()


def test_spaces_around_the_items_of_a_variable_are_no_part_of_them(tmp_path: Path):
    assert loaded(tmp_path, FRAZIL_SINK__TOPICS=" a, b ").sink.topics == ("a", "b")


@pytest.mark.parametrize(
    "text",
    ['sink = ["a"]', "sink = 5", "table = 5", "table = [5]", "[table]", "[decode]\nregistry = 5"],
)
def test_a_variable_over_a_section_of_the_wrong_kind_is_refused(tmp_path: Path, text: str):
    variables = ("SINK__ID", "TABLE__0__NAME", "TABLE__NAME", "DECODE__REGISTRY__URL")
    for name in variables:
        with pytest.raises(ConfigError):
            loaded(tmp_path, text, **{f"FRAZIL_{name}": "x"})


# ── what is not known, missing or of the wrong kind ──────────────────────────────────────────


def test_an_unknown_section_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"unknown section \[tables\]; did you mean 'table'"):
        from_document({**GOOD, "tables": []})
    with pytest.raises(
        ConfigError, match="known are sink, kafka, decode, transform, catalog, spark, table"
    ):
        from_document({**GOOD, "zzz": {}})


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("sink", "comit_interval", "commit_interval"),
        ("decode", "formt", "format"),
        ("table", "partitionby", "partition_by"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(section: str, key: str, nearest: str):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{nearest}'"):
        made(**{section: {key: "x"}})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({k: v for k, v in GOOD.items() if k != "sink"}, r"there is no \[sink\]"),
        ({**GOOD, "sink": {"topics": ["t"]}}, r"\[sink\]: 'id' is missing"),
        ({**GOOD, "table": [{}]}, r"\[\[table\]\]: 'name' is missing"),
        ({**GOOD, "table": {"name": "db.t"}}, r"\[table\] is one table; expected \[\[table\]\]"),
        ({**GOOD, "table": []}, r"expected a table, found none"),
        ({**GOOD, "table": [{"name": "a.b"}, {"name": "a.c"}]}, r"2 tables, and no \[\[route\]\]"),
        ({**GOOD, "kafka": {}}, r'\[kafka\]: "bootstrap.servers" is missing'),
    ],
)
def test_what_is_missing_is_named(document: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        from_document(document)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (
            "sink",
            {"max_pending_batches": "many"},
            r"max_pending_batches: expected a whole number, found 'many",
        ),
        ("sink", {"max_pending_batches": True}, r"expected a whole number, found True"),
        (
            "sink",
            {"topics": "orders"},
            r"\[sink\] topics: expected a list of texts, found 'orders'",
        ),
        ("sink", {"id": ["a"]}, r"\[sink\] id: expected text"),
        ("sink", {"id": True}, r"\[sink\] id: expected text"),
        (
            "sink",
            {"starting_offsets": 5},
            r"\[sink\] starting_offsets: expected earliest, latest or a cut",
        ),
        ("table", {"properties": "a=b"}, r"properties: expected a table of texts"),
        ("kafka", {"ssl": ["a"]}, r"\[kafka\] ssl: expected text or a number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(section: str, values: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        made(**{section: values})


@pytest.mark.parametrize("value", [[1], 1.5])
def test_what_is_no_whole_number_is_refused(value: object):
    with pytest.raises(ConfigError, match="expected a whole number"):
        made(sink={"max_pending_batches": value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"sink": "x"},
        {"sink": [{"id": "a"}]},
        {"decode": "raw"},
        {"catalog": "lake"},
        {"table": ["db.t"]},
        {"decode": {"format": "raw", "registry": "http://r"}},
    ],
)
def test_a_section_that_is_no_table_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match="expected a table"):
        from_document({**GOOD, **wrong})


def test_numbers_and_booleans_of_pass_through_sections_become_text():
    config = made(kafka={"fetch.min.bytes": 5, "check.crcs": True}, table={"properties": {"a": 1}})
    assert config.kafka["fetch.min.bytes"] == "5"
    assert config.kafka["check.crcs"] == "true"
    assert config.tables[0].properties == {"a": "1"}


# ── every rule of check() ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("sink", {"id": ""}, "sink id ''"),
        ("sink", {"id": "-a"}, "sink id '-a'"),
        ("sink", {"id": "a/b"}, "sink id 'a/b'"),
        ("sink", {"id": "a" * 101}, "1 to 100 letters"),
        ("sink", {"topics": []}, "either topics or topic_pattern"),
        ("sink", {"topic_pattern": "o.*"}, "either topics or topic_pattern"),
        ("sink", {"topics": [], "topic_pattern": "("}, r"\[sink\] topic_pattern: "),
        (
            "sink",
            {"starting_offsets": "erliest"},
            "starting_offsets: expected earliest, latest or a cut, found 'erliest",
        ),
        (
            "sink",
            {"kafka_client": "fast"},
            "kafka_client: expected auto or librdkafka, found 'fast'",
        ),
        ("sink", {"trigger": "5"}, r"cannot read \[sink\] trigger: .* found '5'"),
        ("sink", {"commit_interval": "x"}, r"cannot read \[sink\] commit_interval: .* found 'x'"),
        ("sink", {"max_pending_age": "1y"}, r"cannot read \[+\w+\]+ \w+.* found '1y'"),
        ("sink", {"unavailable_timeout": "-1s"}, r"cannot read \[+\w+\]+ \w+.* found '-1s'"),
        ("sink", {"max_bytes_per_trigger": "1 GiG"}, r"cannot read \[+\w+\]+ \w+.* found '1 GiG'"),
        ("sink", {"max_pending_bytes": "-1"}, r"cannot read \[+\w+\]+ \w+.* found '-1'"),
        ("sink", {"max_records_per_trigger": 0}, "max_records_per_trigger: expected at least 1"),
        ("sink", {"max_records_per_task": 0}, "max_records_per_task: expected at least 1"),
        ("sink", {"max_pending_batches": -1}, "max_pending_batches: expected at least 1"),
        ("decode", {"format": "arvo"}, "format: 'arvo' is unknown; did you mean 'avro'"),
        ("decode", {"format": "confluent-avro"}, "neither .* schema nor .* url is given"),
        ("decode", {"format": "avro"}, "bare Avro: .* schema is missing"),
        ("table", {"snapshot_retention": "soon"}, r"cannot read \[+\w+\]+ \w+.* found 'soon'"),
        ("table", {"name": "orders"}, "table name 'orders': expected namespace.table"),
        ("table", {"name": "shop.or-ders"}, "table name 'shop.or-ders'"),
        ("table", {"name": "shop.`x`"}, "expected namespace.table"),
        ("table", {"offset_column": ""}, "carry the proof and cannot be left out"),
        ("table", {"partition_column": ""}, "carry the proof and cannot be left out"),
        ("table", {"topic_column": ""}, "carry the proof and cannot be left out"),
        ("table", {"format_version": 1}, "expected format_version 2 or 3, found 1"),
        ("table", {"target_file_size": "513MiB"}, "target_file_size is over 512MiB"),
        ("table", {"target_file_size": "big"}, r"cannot read \[+\w+\]+ \w+.* found 'big'"),
    ],
)
def test_what_can_be_refused_without_a_server_is(section: str, values: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        made(**{section: values})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("sink", {"id": "a" * 100}),
        ("sink", {"id": "0.a_b-c"}),
        ("sink", {"topics": [], "topic_pattern": "orders-.*"}),
        ("sink", {"starting_offsets": "latest"}),
        ("sink", {"starting_offsets": {"orders": {"0": 5}}}),
        ("decode", {"format": "confluent-avro", "schema": "x.avsc"}),
        ("decode", {"format": "confluent-avro", "registry": {"url": "http://r"}}),
        ("decode", {"format": "avro", "schema": "x.avsc"}),
        ("table", {"name": "a.b.c"}),
        ("table", {"timestamp_column": ""}),
        ("table", {"format_version": 3}),
        ("table", {"target_file_size": "512MiB"}),
    ],
)
def test_values_just_inside_a_limit_are_accepted(section: str, values: dict[str, Any]):
    assert isinstance(made(**{section: values}), Config)


@pytest.mark.parametrize("name", sorted(RESERVED))
@pytest.mark.parametrize(
    "column", ["topic_column", "partition_column", "offset_column", "timestamp_column"]
)
def test_a_metadata_column_cannot_have_a_name_that_iceberg_keeps(column: str, name: str):
    with pytest.raises(
        ConfigError, match=f"column name '{name}' of {column} is reserved by Iceberg"
    ):
        made(table={column: name})


def test_two_metadata_columns_cannot_share_a_name():
    with pytest.raises(ConfigError, match="_x"):
        made(table={"topic_column": "_x", "offset_column": "_x"})


@pytest.mark.parametrize("start", [{"t": 5}, {"t": {"0": "x"}}, {"t": {"0": -1}}, {"t": {"a": 1}}])
def test_a_start_that_is_no_cut_is_refused(start: dict[str, Any]):
    with pytest.raises(ConfigError, match="start"):
        made(sink={"starting_offsets": start})


def test_a_compression_that_parquet_lacks_is_refused():
    with pytest.raises(ConfigError, match="zstdd"):
        made(table={"compression": "zstdd"})


# ── what would break the promise ─────────────────────────────────────────────────────────────

#: For each row of `_REFUSED`, in its order: section, key, refused value; then a value that passes.
BREAKERS = [
    ("kafka", "failOnDataLoss", "false", "true"),
    ("spark", "spark.sql.streaming.asyncProgressTrackingEnabled", "true", None),
    ("spark", "spark.sql.streaming.realTimeMode.enabled", "true", None),
    ("kafka", "enable.auto.commit", "True", "false"),
    ("kafka", "auto.offset.reset", "latest", "error"),
    ("kafka", "group.id", "mine", None),
    ("kafka", "enable.partition.eof", "false", "true"),
]


def test_every_refused_setting_has_its_test():
    assert len(BREAKERS) == len(checks._REFUSED)


@pytest.mark.parametrize("number", range(len(BREAKERS)))
def test_a_setting_that_breaks_the_promise_is_refused_with_its_reason(number: int):
    section, key, bad, good = BREAKERS[number]
    reason = checks._REFUSED[number][3]
    with pytest.raises(ConfigError) as caught:
        made(**{section: {key: bad}})
    message, _, place = caught.value.message.rpartition(" (")
    assert message == f"cannot take [{section}] {key} = {bad!r}: {reason}"
    assert place in (f"argument {section}[{key!r}])", f"argument {section}.{key})")
    if good is not None:
        made(**{section: {key: good}})


@pytest.mark.parametrize("section", ["kafka", "spark", "catalog"])
@pytest.mark.parametrize("key", ["failOnDataLoss", "fail.on.data.loss", "FAILONDATALOSS"])
def test_losing_data_in_silence_is_refused_everywhere(section: str, key: str):
    with pytest.raises(ConfigError, match="a lost range must stop the stream"):
        made(**{section: {key: False}})


@pytest.mark.parametrize("value", ["earliest", "smallest", "errors", ""])
def test_no_position_that_is_gone_may_jump(value: str):
    with pytest.raises(ConfigError, match=r"auto\.offset\.reset"):
        made(kafka={"auto.offset.reset": value})


# ── secrets ──────────────────────────────────────────────────────────────────────────────────

SECRETS = [
    ("kafka", "sasl.password"),
    ("kafka", "ssl.key.password"),
    ("kafka", "ssl.key.pem"),
    ("kafka", "sasl.oauthbearer.client.secret"),
    ("kafka", "sasl.oauthbearer.config"),
    ("catalog", "credential"),
    ("catalog", "token"),
    ("catalog", "s3.secret-access-key"),
    ("catalog", "s3.session-token"),
    ("catalog", "jdbc.password"),
    ("spark", "spark.hadoop.fs.s3a.secret.key"),
]


@pytest.mark.parametrize(("section", "key"), SECRETS)
def test_a_secret_in_the_file_is_refused_and_not_repeated(section: str, key: str):
    with pytest.raises(ConfigError, match="expected env:NAME or file:PATH") as caught:
        made(**{section: {key: "hunter2"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("section", "key"), SECRETS)
@pytest.mark.parametrize("reference", ["env:PASSWORD_OF_X", "file:/run/secrets/x"])
def test_a_reference_to_a_secret_is_taken_and_masked(section: str, key: str, reference: str):
    config = made(**{section: {key: reference}})
    assert key in repr(config)
    assert reference not in repr(config)


def test_a_secret_of_the_registry_is_one_too():
    registry = {"url": "http://r", "basic.auth.user.info": "me:hunter2"}
    with pytest.raises(ConfigError, match=r"\[decode.registry\] basic.auth.user.info"):
        made(decode={"registry": registry})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("catalog", "header.Authorization"),
        ("catalog", "header.X-Api-Key"),
        ("catalog", "header.Cookie"),
        ("registry", "api.key"),
        ("catalog", "adls.sas-token.account"),
        ("catalog", "adls.auth.shared-key.account.key"),
        ("spark", "spark.hadoop.fs.azure.account.key.me.dfs.core.windows.net"),
    ],
)
def test_secrets_with_unusual_names_are_refused_too(section: str, key: str):
    registry = {"decode": {"registry": {"url": "http://r", key: "hunter2"}}}
    given = registry if section == "registry" else {section: {key: "hunter2"}}
    with pytest.raises(ConfigError, match="a secret is written in the config"):
        made(**given)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("catalog", "client.credentials-provider", "com.example.Provider"),
        ("spark", "spark.hadoop.fs.s3a.aws.credentials.provider", "com.example.Provider"),
    ],
)
def test_the_name_of_a_class_is_no_secret(section: str, key: str, value: str):
    made(**{section: {key: value}})


def test_references_are_resolved_where_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "password").write_text("from-file\n")
    monkeypatch.setenv("FRAZIL_TEST_USER", "from-env")
    given = Settings(
        {
            "sasl.username": "env:FRAZIL_TEST_USER",
            "sasl.password": f"file:{tmp_path / 'password'}",
            "ssl.ca.location": "file:/ca.pem",
            "client.id": "me",
        }
    )
    assert given.resolved() == {
        "sasl.username": "from-env",
        "sasl.password": "from-file",
        "ssl.ca.location": "file:/ca.pem",  # not a secret: a location may have a scheme
        "client.id": "me",
    }
    assert given["sasl.username"] == "env:FRAZIL_TEST_USER"


def test_a_reference_that_leads_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FRAZIL_TEST_GONE", raising=False)
    with pytest.raises(ConfigError, match="variable FRAZIL_TEST_GONE is not set"):
        Settings({"sasl.password": "env:FRAZIL_TEST_GONE"}).resolved()
    with pytest.raises(ConfigError, match=r"sasl\.password: .*gone: No such file"):
        Settings({"sasl.password": f"file:{tmp_path / 'gone'}"}).resolved()


# ── durations and sizes ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("20s", 20), ("1.5m", 90), ("6h", 21600), ("2d", 172800), (" 0 s ", 0)],
)
def test_a_duration_is_a_number_with_a_unit(text: str, seconds: float):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "5 min", "-1s", "1e3s", "5S"])
def test_a_duration_without_a_known_unit_is_refused(text: str):
    with pytest.raises(ConfigError, match="cannot read duration"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("5B", 5),
        ("64KiB", 65536),
        ("64K", 65536),
        ("1KB", 1000),
        ("1.5MiB", 1572864),
        ("2MB", 2_000_000),
        ("1GiB", 2**30),
        ("1 TiB", 2**40),
        ("0", 0),
    ],
)
def test_a_size_is_binary_unless_its_unit_is_decimal(text: str, count: int):
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1PB", "-1", "1 kib", "1,5GiB"])
def test_a_size_with_an_unknown_unit_is_refused(text: str):
    with pytest.raises(ConfigError, match="cannot read size"):
        size(text)


# ── Spark in the middle ──────────────────────────────────────────────────────────────────────


def test_without_a_transform_there_is_none_and_with_one_there_is():
    assert not made().transform
    assert made(transform={"sql": "SELECT * FROM stream"}).transform
    assert made(transform={"python": "module.inner:function"}).transform


def test_a_transform_is_sql_or_python():
    with pytest.raises(ConfigError, match=r"\[transform\]: expected either sql or python, found b"):
        made(transform={"sql": "SELECT * FROM stream", "python": "module:function"})


@pytest.mark.parametrize("text", ["module", "module:", ":function", "a:b:c", "module:not-a-name"])
def test_a_python_transform_is_a_module_and_a_function(text: str):
    with pytest.raises(ConfigError, match="expected module:function, found"):
        made(transform={"python": text})


def test_a_transforms_file_is_meant_from_where_the_config_is(tmp_path: Path):
    text = TOML + '[transform]\npython = "mine.py:function"\n'
    assert loaded(tmp_path, text).transform.python == f"{tmp_path}/mine.py:function"
    text = TOML + '[transform]\npython = "module:function"\n'
    assert loaded(tmp_path, text).transform.python == "module:function"


def test_an_unknown_key_of_transform_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown key 'output'; did you mean 'output_mode'"):
        made(transform={"output": "append"})


def test_output_modes_that_replace_rows_are_for_upsert_tables():
    query = {"sql": "SELECT 1", "output_mode": "update"}
    with pytest.raises(ConfigError, match=r"'update': it replaces existing rows.*append") as no:
        made(transform=query)
    assert "watermark" in no.value.hint
    assert 'mode = "upsert"' in no.value.hint
    upserted = {"mode": "upsert", "key": ["id"]}
    assert made(transform=query, table=upserted).transform.output_mode == "update"
    with pytest.raises(ConfigError, match="'complete': each batch would replace the whole") as no:
        made(transform={**query, "output_mode": "complete"}, table=upserted)
    assert "use update" in no.value.hint
    with pytest.raises(ConfigError, match="'sideways': expected append or update"):
        made(transform={**query, "output_mode": "sideways"})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"delete_column": "gone"}, "delete_column is for upsert tables"),
        ({"mode": "upsert", "key": ["gone"], "delete_column": "gone"}, "which is in its key"),
    ],
)
def test_a_delete_column_is_beside_the_key_of_an_upsert_table(table: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        made(table=table)


@pytest.mark.parametrize(
    ("trigger", "reason"),
    [
        ("continuous", "has no batches, so there is no cut to prove"),
        ("Continuous", "has no batches"),
        ("real-time", "before their batch ends"),
        ("realtime", "before their batch ends"),
        ("once", "whatever the limits; use available-now"),
    ],
)
def test_triggers_without_batches_or_limits_are_refused_with_the_reason(trigger: str, reason: str):
    with pytest.raises(ConfigError, match=f"cannot use trigger '{trigger}': .*{reason}"):
        made(sink={"trigger": trigger})


def test_by_default_records_gather_for_the_minute_between_two_commits():
    assert made().sink.commit_interval == "1m"
    assert made().gather == 60
    assert made(sink={"commit_interval": "5s"}).gather == 5, "one key says how fresh a table is"
    assert made(table={"commit_interval": "2s"}).gather == 2, "the most impatient table's"
    assert made(table={"commit_interval": "2h"}).gather == 7200
    assert made(sink={"trigger": "10s"}).gather == 0, "Spark's trigger says when there is a batch"
    assert made(sink={"trigger": "available-now"}).gather == 0


def test_a_trigger_is_a_duration_or_available_now():
    assert made(sink={"trigger": "available-now"}).sink.trigger == "available-now"
    assert made(sink={"trigger": "2s"}).sink.trigger == "2s"
    with pytest.raises(ConfigError, match=r"cannot read \[+\w+\]+ \w+.* found 'sometimes'"):
        made(sink={"trigger": "sometimes"})


def test_a_dataframes_sink_takes_fields_of_sink_and_table():
    given = {
        "id": "s",
        "checkpoint_location": "/c",
        "partition_by": ["day(at)"],
        "event_time": "at",
        "max_pending_batches": 3,
    }
    config = configs.for_frame("shop.orders", "ice", given)
    assert (config.sink.id, config.sink.checkpoint_location) == ("s", "/c")
    assert config.sink.max_pending_batches == 3
    assert config.tables[0].name == "shop.orders"
    assert (config.tables[0].partition_by, config.tables[0].event_time) == (("day(at)",), "at")
    assert config.catalog.name == "ice"
    assert config.kafka == {}
    assert config.index_table == "shop.frazil_index"


def test_a_dataframes_setting_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown setting 'checkpoints'; did you mean 'checkp"):
        configs.for_frame("shop.orders", "lake", {"id": "s", "checkpoints": "/c"})
    with pytest.raises(ConfigError, match="unknown setting 'partitionBy'; did you mean 'partition"):
        configs.for_frame("shop.orders", "lake", {"id": "s", "partitionBy": ["x"]})


def test_a_dataframes_sink_is_checked_like_any_other():
    with pytest.raises(ConfigError, match="'id' is missing"):
        configs.for_frame("shop.orders", "lake", {})
    with pytest.raises(ConfigError, match="cannot use table name"):
        configs.for_frame("orders", "lake", {"id": "s"})
    with pytest.raises(ConfigError, match="cannot use trigger 'once'"):
        configs.for_frame("shop.orders", "lake", {"id": "s", "trigger": "once"})
    with pytest.raises(ConfigError, match="expected a whole number, found 'many'"):
        configs.for_frame("shop.orders", "lake", {"id": "s", "max_pending_batches": "many"})


def test_the_path_of_the_data_is_shown_with_its_reason():
    way, why = explain.path_taken(made())
    assert way.startswith("Kafka (orders) → ")
    assert way.endswith("→ shop.orders")
    assert "no record enters its JVM" in why
    way, why = explain.path_taken(made(transform={"sql": "SELECT * FROM stream"}))
    assert "rows in Spark: [transform] sql →" in way
    assert "there is a [transform]" in why
    way, _ = explain.path_taken(made(transform={"python": "module:function"}))
    assert "[transform] python module:function →" in way
    way, _ = explain.path_taken(made(sink={"topics": [], "topic_pattern": "or.*"}))
    assert "Kafka (or.*)" in way


def test_every_setting_in_effect_is_shown_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HUNTER", "hunter2")
    config = made(
        kafka={"sasl.password": "env:HUNTER", "client.id": "me"},
        catalog={"name": "ice", "type": "rest", "s3.secret-access-key": "env:HUNTER"},
        decode={"registry": {"url": "http://r", "basic.auth.user.info": "env:HUNTER"}},
        spark={"spark.hadoop.fs.s3a.secret.key": "env:HUNTER", "spark.master": "local[1]"},
        transform={"sql": "SELECT password FROM stream"},
        sink={"trigger": "2s"},
    )
    shown = explain.settings(config)
    assert "hunter2" not in repr(shown)
    assert "env:HUNTER" not in repr(shown)
    assert shown["kafka"] == {
        "bootstrap.servers": "broker:9092",
        "sasl.password": "***",
        "client.id": "me",
    }
    assert shown["catalog"] == {"name": "ice", "type": "rest", "s3.secret-access-key": "***"}
    assert shown["decode.registry"] == {"url": "http://r", "basic.auth.user.info": "***"}
    assert shown["spark"]["spark.master"] == "local[1]"
    assert shown["transform"]["sql"] == "SELECT password FROM stream"
    assert shown["sink"]["trigger"] == "2s"
    assert shown["sink"]["unavailable_timeout"] == "5m", "defaults are in effect, too"
    assert shown["table 0"]["name"] == "shop.orders"
    assert made().kafka == {"bootstrap.servers": "broker:9092"}


#: URLs with a password, hunter2.
URLS = [
    "jdbc:postgresql://h/db?user=u&password=hunter2",
    "http://user:hunter2@host:8181/api",
    "https://host/api?api_key=hunter2",
    "jdbc:sqlserver://h;user=u;password=hunter2",
]


@pytest.mark.parametrize("url", URLS)
def test_a_password_in_a_url_is_shown_nowhere(url: str):
    config = made(
        catalog={"type": "rest", "uri": url},
        decode={"registry": {"url": url}},
        spark={"spark.sql.catalog.other.uri": url},
        metrics={"otlp_endpoint": url.removeprefix("jdbc:")} if url.startswith("http") else {},
    )
    assert "hunter2" not in repr(explain.settings(config))
    assert "hunter2" not in repr(config.catalog)
    assert "hunter2" in secret_values(config)
    assert masked({"a": [f"no route to {url}", "hunter2"]}, secret_values(config)) == {
        "a": [f"no route to {url.replace('hunter2', '***')}", "***"]
    }
    for error in (ConfigError(f"cannot ask {url}", hint=url), Fatal(url)):
        assert "hunter2" not in f"{error} {error.log_text} {error.hint}"
    placed = ConfigError(f"cannot ask {url}").placed("sink.toml:3")
    assert "hunter2" not in str(placed)


def test_a_url_without_a_password_is_shown_as_it_is():
    for url in ("http://user@host/x?a=b", "jdbc:sqlite:/a/b.db?mode=ro", "s3://bucket/key=1/x"):
        assert without_passwords(f"cannot read {url}: no") == f"cannot read {url}: no"


# ── upserts ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"mode": "changelog"}, "key is missing"),
        ({"mode": "upsert"}, "key is missing"),
        ({"key": ["id"]}, "it has a key, and its mode is append"),
        ({"mode": "merge", "key": ["id"]}, "mode 'merge' is unknown"),
        ({"partitioned_by_key": True}, "partitioned_by_key is for upsert tables"),
        ({"mode": "upsert", "key": ["id"], "identifier_fields": ["n"]}, "are different columns"),
        ({"mode": "upsert", "key": ["_offset"]}, "'_offset' is a metadata column"),
        ({"version_column": "version"}, "version_column is for upsert tables"),
        (
            {"mode": "changelog", "key": ["id"], "version_column": "n"},
            "version_column is for upsert tables",
        ),
        ({"mode": "upsert", "key": ["id"], "version_column": "id"}, "which is its key"),
        ({"mode": "upsert", "key": ["id"], "version_column": "_offset"}, "a metadata column"),
    ],
)
def test_an_upsert_table_has_a_key_and_no_other_has(table: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        made(table=table)


def test_an_upsert_table_is_taken():
    config = made(table={"mode": "upsert", "key": ["id", "n"], "partitioned_by_key": True})
    assert config.tables[0].key == ("id", "n")
    assert config.one_table


def test_a_table_with_an_order_has_another_beside_it():
    table = {"mode": "upsert", "key": ["id"], "version_column": "_timestamp"}
    config = made(table=table)
    assert config.versioned_tables == ("shop.orders",)
    assert not config.one_table
    with pytest.raises(ConfigError, match="two tables of the sink have that name"):
        made(table=table, dead_letters={"table": "shop.orders_deleted"})


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ({"key_format": "xml"}, "'xml' is unknown"),
        ({"key_format": "avro"}, "key_schema is missing"),
        ({"key_format": "confluent-avro"}, "neither \\[decode\\] key_schema nor"),
    ],
)
def test_how_keys_are_read_is_checked(decode: dict[str, str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        made(decode={"format": "json", **decode})


@pytest.mark.parametrize("key", ["schema", "key_schema"])
@pytest.mark.parametrize("value", [5, True, 1.5, ["a.avsc"], {"a": 1}])
def test_a_schema_that_is_no_path_is_refused(key: str, value: Any):
    with pytest.raises(ConfigError, match=rf"\[decode\] {key}: expected the path of a file"):
        made(decode={key: value})


@pytest.mark.parametrize("topic", ["", " ", "a b", "a/b", ".", "..", "ä", "a" * 250, "a\n"])
def test_a_topic_that_kafka_cannot_have_is_refused(topic: str):
    with pytest.raises(ConfigError, match="cannot read topics"):
        made(sink={"topics": ["orders", topic]})
    document = {**copy.deepcopy(GOOD), "route": [{"topics": [topic], "to": ["shop.orders"]}]}
    with pytest.raises(ConfigError, match="cannot read topics"):
        from_document(document)


def test_a_catalog_name_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match=r"\[catalog\] name: expected text, found 5"):
        made(catalog={"name": 5})


@pytest.mark.parametrize("text", ["hex:", "hex:0", "hex:zz", "hex:00 11"])
def test_a_placeholder_that_is_no_hex_is_refused(text: str):
    with pytest.raises(ConfigError, match="unavailable_value: expected pairs of hex"):
        made(decode={"unavailable_value": text})
    assert made(decode={"unavailable_value": "hex:00fF"})
    assert made(decode={"unavailable_value": ""}).decode.unavailable_value == ""


def test_a_table_allows_at_least_one_column():
    assert made(table={"max_columns": 5}).tables[0].max_columns == 5
    with pytest.raises(ConfigError, match="max_columns from 1, found 0"):
        made(table={"max_columns": 0})


# ── made in Python, and where things stand ───────────────────────────────────────────────────


def test_sections_made_in_python_are_checked_as_those_of_a_file():
    with pytest.raises(ConfigError, match=r"\[sink\] topics: expected a list of texts, found 'or"):
        SinkConfig(id="a", topics="orders")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"\[sink\] unavailable_timeout: expected a number with .* found '5"
    ):
        Config(
            sink={"id": "a", "topics": ["t"], "unavailable_timeout": 5},
            kafka={"bootstrap.servers": "b"},
            decode={"format": "raw"},
            tables=[{"name": "a.b"}],
        )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\[\[table\]\]: expected a list, found"):
        Config(SinkConfig("a"), Settings(), {"name": "a.b"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot read \[sink\]: expected a table of keys"):
        Config("orders", Settings(), ())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\[sink\]: unknown key 'topic'; did you mean 'topics'"):
        Config({"id": "a", "topic": "t"}, {}, [{"name": "a.b"}])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    [
        SinkConfig,
        TableConfig,
        DecodeConfig,
        RouteConfig,
        DeadLettersConfig,
    ],
)
def test_no_field_takes_what_is_not_of_its_type(kind: Any):
    required = {"id": "a"} if kind is SinkConfig else {"name": "a.b"}
    required = required if kind in (SinkConfig, TableConfig) else {}
    for field in dataclasses.fields(kind):
        for wrong in (None, object(), b"x", {1, 2}):
            with pytest.raises(ConfigError, match=rf"\] {field.name}: expected "):
                kind(**{**required, field.name: wrong})


def test_dicts_and_lists_become_sections():
    config = Config(
        sink={"id": "a", "topics": ["t"]},
        kafka={"bootstrap.servers": "b"},
        decode={"format": "raw"},
        catalog={"name": "prod", "type": "rest", "uri": "http://c"},
        tables=[{"name": "prod.shop.orders", "partition_by": ["day(at)"]}],
    )  # type: ignore[arg-type]
    assert config == from_document(
        {
            "sink": {"id": "a", "topics": ["t"]},
            "kafka": {"bootstrap.servers": "b"},
            "decode": {"format": "raw"},
            "catalog": {"name": "prod", "type": "rest", "uri": "http://c"},
            "table": [{"name": "shop.orders", "partition_by": ["day(at)"]}],
        }
    )


def test_names_may_begin_with_the_catalogs():
    config = made(
        catalog={"name": "prod"},
        table={"name": "prod.shop.orders"},
        sink={"index_table": "prod.x.i"},
        dead_letters={"table": "prod.shop.dead"},
    )
    assert (config.tables[0].name, config.index_table) == ("shop.orders", "x.i")
    assert config.dead_letters.table == "shop.dead"
    assert made(table={"name": "shop.eu.orders"}).tables[0].name == "shop.eu.orders"
    assert made(catalog={"name": "shop"}).tables[0].name == "shop.orders"  # a namespace of its name


@pytest.mark.parametrize(
    ("catalog", "message"),
    [
        ("", "no .catalog"),
        ('name = "prod"', "no .catalog"),
        ('type = "rset"', "did you mean 'rest'"),
        ('type = "rest"', "uri is missing"),
        ('type = "hadoop"', "warehouse is missing"),
        ('type = "hive"', "the metastore's uri is missing"),
        ('uri = "http://c"', "neither type nor catalog-impl"),
    ],
)
def test_a_catalog_that_cannot_be_opened_is_refused_by_the_file(
    tmp_path: Path, catalog: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HIVE_CONF_DIR", "HADOOP_CONF_DIR", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    text = TOML.replace(
        '[catalog]\ntype = "glue"\n"s3.path-style-access" = true\n',
        f"[catalog]\n{catalog}\n" if catalog else "",
    )
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "dya(at)",
        "bucket(id)",
        "bucket(0, id)",
        "day(at, 3)",
        "day(at",
        "truncate(x, y)",
        "",
        "bucket(99999999999, id)",
        "truncate(2147483648, id)",
    ],
)
def test_a_transform_that_is_none_is_refused_before_anything_starts(text: str):
    with pytest.raises(ConfigError, match="cannot partition table shop"):
        made(table={"partition_by": [text]})
    with pytest.raises(ConfigError, match="cannot sort table shop"):
        made(table={"sort_by": [f"{text} desc" if text else ""]})


def test_a_master_that_spark_does_not_know_is_refused_before_a_jvm_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot start Spark on 'nonsense'.*toml:"):
        loaded(tmp_path, TOML + '[spark]\n"spark.master" = "nonsense"\n')
    for master in ("local[2]", "spark://host:7077", "k8s://https://host", "yarn", "env:MASTER"):
        assert loaded(tmp_path, TOML + f'[spark]\n"spark.master" = "{master}"\n').spark


def test_a_secret_may_be_in_a_variable_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FRAZIL_KAFKA__SASL_PASSWORD", "hunter2")
    config = loaded(tmp_path, FRAZIL_KAFKA__SASL_PASSWORD="hunter2")
    assert config.kafka["sasl.password"] == "env:FRAZIL_KAFKA__SASL_PASSWORD"
    assert config.kafka.resolved()["sasl.password"] == "hunter2"
    assert "hunter2" not in repr(config)
    with pytest.raises(ConfigError, match="a secret is written in the config"):
        loaded(tmp_path, TOML.replace("[decode]", '"sasl.password" = "hunter2"\n[decode]'))


#: One error of each class: what the file says, the reported line (counted from the end of TOML),
#: and what the message says of the setting.
WRONG = {
    "a duration": ('commit_interval = "soon"', 1, "[[table]] commit_interval of shop.orders"),
    "a size": ('target_file_size = "big"', 1, "[[table]] target_file_size of shop.orders"),
    "a type": ("partition_by = 5", 1, "[[table]] partition_by"),
    "a type below": (
        "\n[table.properties]\na = 1\n[table.aliases]\nb = 5\n[[table]]\nname = []",
        7,
        "[[table]] name",
    ),
    "an unknown key": ('\npartition_bye = ["id"]', 2, "unknown key 'partition_bye'"),
    "an unknown section": ('[sinks]\nid = "a"', 1, "unknown section [sinks]"),
    "a missing key": ("[[route]]\n[[table]]\nmode = 'append'", 2, "'name' is missing"),
    "a wrong word": ('mode = "upset"', 1, "mode 'upset' is unknown"),
    "a word that lacks another": ('mode = "upsert"', 1, "mode is upsert, and key"),
    "a wrong word of a second table": (
        '[[table]]\nname = "shop.b"\nmode = "append"\ncompression = "rar"\n[[route]]',
        4,
        "'rar'",
    ),
    "a transform": ('partition_by = [\n  "week(at)",\n]', 1, "by 'week(at)' in partition_by"),
    "an order": ('sort_by = ["week(at) desc"]', 1, "by 'week(at) desc' in sort_by"),
    "a number": ("[dead_letters]\ntable = 'shop.dead'\nmax_share = 2", 3, "max_fraction"),
    "a route": ('[[route]]\nto = ["shop.orders"]\n[[route]]\ntopics = ["a b"]', 4, "topics"),
    "a cut": ("[completeness]\nidle_timeout = 'x'", 2, "[completeness] idle_timeout"),
    "what breaks the promise": (
        '[spark]\n"spark.x.asyncProgressTrackingEnabled" = "true"',
        2,
        "asyncProgressTracking",
    ),
    "a key inside others": ("[spark.a]\nb.realTimeMode = 1", 2, "[spark] a.b.realTimeMode"),
    "a value of a library": ("[spark]\n'a b' = 1\nc = [5]", 3, "[spark] c"),
}


@pytest.mark.parametrize(("text", "line", "setting"), WRONG.values(), ids=WRONG)
def test_an_error_names_the_setting_and_its_line(
    tmp_path: Path, text: str, line: int, setting: str
):
    last = TOML.count("\n")
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, f"{TOML}{text}\n")
    assert setting in error.value.message
    assert error.value.message.endswith(f" (sink.toml:{last + line})")


@pytest.mark.parametrize(
    ("before", "after", "line", "setting"),
    [
        ('type = "glue"', 'type = "glu"', 13, "[catalog] type: 'glu' is unknown"),
        ('type = "glue"', 'type = "rest"', 13, "[catalog] uri is missing, and its type is rest"),
        ('format = "raw"', 'format = "xml"', 10, "[decode] format: 'xml' is unknown"),
        ('id = "orders"', 'id = "a b"', 3, "sink id 'a b'"),
        ("[kafka]", '"trigger" = 5\n[kafka]', 6, "[sink] trigger"),
        ("[kafka]", "[kafka]\n'group.id' = 'x'", 7, "[kafka] group.id"),
    ],
)
def test_an_error_of_another_section_names_its_line(
    tmp_path: Path, before: str, after: str, line: int, setting: str
):
    assert before in TOML
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, TOML.replace(before, after))
    assert setting in error.value.message
    assert error.value.message.endswith(f" (sink.toml:{line})")


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("FRAZIL_SINK__UNAVAILABLE_TIMEOUT", "soon", "[sink] unavailable_timeout"),
        ("FRAZIL_SINK__MAX_TABLES", "many", "[sink] max_tables"),
        ("FRAZIL_SINK__TRIGER", "5s", "'triger'"),
        ("FRAZIL_TABLE__0__MODE", "upset", "mode 'upset'"),
        ("FRAZIL_TABLE__0__PARTITION_BY", "week(at)", "partition_by"),
        ("FRAZIL_CATALOG__TYPE", "hadop", "[catalog] type"),
        ("FRAZIL_KAFKA__GROUP_ID", "x", "[kafka] group.id"),
    ],
)
def test_an_error_of_a_variable_names_the_variable(
    tmp_path: Path, name: str, value: str, setting: str
):
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, **{name: value})
    assert setting in error.value.message
    assert error.value.message.endswith(f" (environment variable {name})")


def test_an_error_of_a_file_without_the_setting_names_the_section_or_the_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is missing \(sink.toml:6\)"):
        loaded(tmp_path, TOML.replace('"bootstrap.servers"', '"client.id"'))
    with pytest.raises(ConfigError, match=r"there is no \[sink\] \(sink.toml\)"):
        loaded(tmp_path, TOML.replace("[sink]", "[completeness]").replace("[kafka]", "[spark]"))


def test_an_error_in_python_names_the_argument():
    document = {
        "sink": {"id": "a", "topics": ["a"]},
        "kafka": {"bootstrap.servers": "x"},
        "decode": {"format": "raw"},
        "tables": [{"name": "a.b", "mode": "upset"}],
    }
    with pytest.raises(ConfigError, match=r"mode 'upset' .* \(argument tables\[0\].mode\)"):
        Config(**document)
    with pytest.raises(ConfigError, match=r"triger.* \(argument sink.triger\)"):
        Config(**{**document, "sink": {"id": "a", "triger": "5s"}})
    with pytest.raises(ConfigError, match=r"partition_by: .* 5 \(argument partition_by\)"):
        TableConfig("a.b", partition_by=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"commit_interval.* \(argument commit_interval\)"):
        configs.for_frame("a.b", "lake", {"id": "a", "commit_interval": "soon"})
    with pytest.raises(ConfigError, match=r"mode 'upset' .* \(argument mode\)"):
        configs.for_frame("a.b", "lake", {"id": "a", "mode": "upset"})


def test_no_error_shows_the_value_of_a_secret(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"\[kafka\] sasl.password: .* \(sink.toml:7\)") as error:
        loaded(tmp_path, TOML.replace("[kafka]", "[kafka]\n'sasl.password' = ['hunter2']"))
    assert "hunter2" not in str(error.value)


def _error(folder: Path, text: str) -> str:
    try:
        loaded(folder, text)
    except ConfigError as error:
        return error.message
    return ""


def test_every_wrong_value_is_reported_with_the_line_of_its_key_or_section(tmp_path: Path):
    """Whatever is refused: no check forgets to say which setting it is about."""
    document = [
        ("sink", "id", '"orders"'),
        ("sink", "topics", '["orders"]'),
        ("kafka", "bootstrap.servers", '"x:1"'),
        ("decode", "format", '"raw"'),
        ("catalog", "type", '"hadoop"'),
        ("catalog", "warehouse", '"/x"'),
        ("[table]", "name", '"shop.orders"'),
    ]
    kinds = {
        "sink": SinkConfig,
        "decode": DecodeConfig,
        "transform": TransformConfig,
        "[table]": TableConfig,
        "[route]": RouteConfig,
        "dead_letters": DeadLettersConfig,
        "completeness": CompletenessConfig,
        "metrics": MetricsConfig,
        "health": HealthConfig,
        "log": LogConfig,
        "notify": NotifyConfig,
    }
    refused = 0
    for section, kind in kinds.items():
        for key in (*(field.name for field in dataclasses.fields(kind)), "no_such_key"):
            for value in ("-1", "true", "1.5", '"\\u00b2"', '"x"', "[[1]]", "{a = {b = []}}"):
                settings = [setting for setting in document if setting[:2] != (section, key)]
                settings.append((section, key, value))
                lines: list[str] = []
                where: dict[Any, int] = {}
                for title in dict.fromkeys(setting[0] for setting in settings):
                    lines.append(f"[{title}]")
                    where[title] = len(lines)
                    for _, name, given in (setting for setting in settings if setting[0] == title):
                        lines.append(f'"{name}" = {given}')
                        where[title, name] = len(lines)
                if error := _error(tmp_path, "\n".join(lines)):
                    refused += 1
                    named_line = re.search(r" \(sink\.toml:(\d+)\)$", error)
                    fit = {where[section, key], where[section]}
                    assert named_line, (section, key, value, error)
                    assert int(named_line[1]) in fit, (section, key, value, error)
    assert refused > 300


def test_every_setting_has_a_place(tmp_path: Path):
    path = tmp_path / "sink.toml"
    path.write_text(
        TOML + '[table.properties]\n"a.b" = 1\n[transform]\nsql = """\n[sink]\nid = 1\n"""\n'
    )
    _, places = configs.traced(path, {"FRAZIL_TABLE__0__COMPRESSION": "gzip"})
    assert places["sink.id"] == "sink.toml:3"
    assert places["kafka.bootstrap.servers"] == "sink.toml:7"
    assert places["table.0.name"] == "sink.toml:17"
    assert places["table.0.properties.a.b"] == "sink.toml:19"
    assert places["transform.sql"] == "sink.toml:21"
    assert places["table.0.compression"] == "environment variable FRAZIL_TABLE__0__COMPRESSION"


class Frame:
    """Of a session with the catalogs `lake` and `prod`."""

    def __init__(self) -> None:
        self.sparkSession = self
        self.conf = {f"spark.sql.catalog.{catalog}": "SparkCatalog" for catalog in ("lake", "prod")}


@pytest.mark.parametrize(
    ("name", "catalog", "expected"),
    [
        ("shop.orders", "", ("lake", "shop.orders")),
        ("prod.shop.orders", "", ("prod", "shop.orders")),
        ("prod.shop.orders", "prod", ("prod", "shop.orders")),
        ("eu.shop.orders", "", ("lake", "eu.shop.orders")),
        ("eu.shop.orders", "prod", ("prod", "eu.shop.orders")),
        ("prod.orders", "", ("lake", "prod.orders")),
    ],
)
def test_write_understands_a_name_that_begins_with_a_catalog(
    name: str, catalog: str, expected: tuple[str, str]
):
    sink = frazil.write(Frame(), name, catalog=catalog, id="s")  # type: ignore[arg-type]
    assert (sink.config.catalog.name, sink.config.tables[0].name) == expected
