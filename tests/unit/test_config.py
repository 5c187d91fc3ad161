from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from frazil.core import config as configs
from frazil.core.config import RESERVED, Config, Settings, duration, from_document, load, size
from frazil.core.errors import ConfigError

TOML = """
[sink]
id = "orders"
topics = ["orders"]

[kafka]
"bootstrap.servers" = "broker:9092"

[decode]
format = "raw"

[catalog]
type = "rest"
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
    assert config.catalog.properties == {"type": "rest", "s3.path-style-access": "true"}
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
    assert made(sink={"index": "ops.index"}).index_table == "ops.index"
    assert made().group == "orders"
    assert made(sink={"group": "lag"}).group == "lag"


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
    assert config.catalog.properties == {"type": "rest", "s3.path-style-access": "false"}


def test_a_variable_finds_an_unquoted_key_with_dashes_too(tmp_path: Path):
    text = TOML.replace('"s3.path-style-access"', "s3.path-style-access")
    config = loaded(tmp_path, text, FRAZIL_CATALOG__S3_PATH_STYLE_ACCESS="false")
    assert config.catalog.properties == {"type": "rest", "s3.path-style-access": "false"}


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
        tmp_path, "",
        FRAZIL_SINK__ID="a", FRAZIL_SINK__PATTERN="o.*", FRAZIL_KAFKA__BOOTSTRAP_SERVERS="b:1",
        FRAZIL_DECODE__FORMAT="raw", FRAZIL_TABLE__0__NAME="db.t",
    )  # fmt: skip
    assert config.sink.pattern == "o.*"


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
            r"max_pending_batches: expected int, found 'many",
        ),
        ("sink", {"max_pending_batches": True}, r"expected int, found True"),
        ("sink", {"topics": "orders"}, r"\[sink\] topics: expected tuple.*found 'orders'"),
        ("sink", {"id": ["a"]}, r"\[sink\] id: expected str"),
        ("sink", {"id": True}, r"\[sink\] id: expected str"),
        ("sink", {"start": 5}, r"\[sink\] start: expected str \| dict"),
        ("table", {"properties": "a=b"}, r"properties: expected dict"),
        ("kafka", {"ssl": ["a"]}, r"\[kafka\] ssl: expected text or a number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(section: str, values: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        made(**{section: values})


@pytest.mark.parametrize("value", [[1], 1.5])
def test_what_is_no_whole_number_is_refused(value: object):
    with pytest.raises(ConfigError, match="expected int"):
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
        ("sink", {"topics": []}, "either topics or pattern"),
        ("sink", {"pattern": "o.*"}, "either topics or pattern"),
        ("sink", {"topics": [], "pattern": "("}, r"\[sink\] pattern: "),
        ("sink", {"start": "erliest"}, "start: expected earliest, latest or a cut, found 'erliest"),
        ("sink", {"fetch": "fast"}, "fetch: expected auto or client, found 'fast'"),
        ("sink", {"trigger": "5"}, "cannot read duration '5'"),
        ("sink", {"commit_interval": "x"}, "cannot read duration 'x'"),
        ("sink", {"max_pending_age": "1y"}, "cannot read duration '1y'"),
        ("sink", {"patience": "-1s"}, "cannot read duration '-1s'"),
        ("sink", {"max_bytes_per_trigger": "1 GiG"}, "cannot read size '1 GiG'"),
        ("sink", {"max_pending_bytes": "-1"}, "cannot read size '-1'"),
        ("sink", {"max_records_per_trigger": 0}, "max_records_per_trigger: expected at least 1"),
        ("sink", {"max_records_per_task": 0}, "max_records_per_task: expected at least 1"),
        ("sink", {"max_pending_batches": -1}, "max_pending_batches: expected at least 1"),
        ("decode", {"format": "arvo"}, "format: 'arvo' is unknown; did you mean 'avro'"),
        ("decode", {"format": "confluent-avro"}, "neither .* schema nor .* url is given"),
        ("decode", {"format": "avro"}, "bare Avro: .* schema is missing"),
        ("table", {"keep_snapshots": "soon"}, "cannot read duration 'soon'"),
        ("table", {"name": "orders"}, "table name 'orders': expected namespace.table"),
        ("table", {"name": "shop.or-ders"}, "table name 'shop.or-ders'"),
        ("table", {"name": "shop.`x`"}, "expected namespace.table"),
        ("table", {"offset_column": ""}, "carry the proof and cannot be left out"),
        ("table", {"partition_column": ""}, "carry the proof and cannot be left out"),
        ("table", {"topic_column": ""}, "carry the proof and cannot be left out"),
        ("table", {"format_version": 1}, "expected format_version 2 or 3, found 1"),
        ("table", {"target_file_size": "513MiB"}, "target_file_size is over 512MiB"),
        ("table", {"target_file_size": "big"}, "cannot read size 'big'"),
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
        ("sink", {"topics": [], "pattern": "orders-.*"}),
        ("sink", {"start": "latest"}),
        ("sink", {"start": {"orders": {"0": 5}}}),
        ("decode", {"format": "confluent-avro", "schema": "x.avsc"}),
        ("decode", {"format": "confluent-avro", "registry": {"url": "http://r"}}),
        ("decode", {"format": "avro", "schema": "x.avsc"}),
        ("table", {"name": "a.b.c"}),
        ("table", {"timestamp_column": ""}),
        ("table", {"format_version": 3}),
        ("table", {"target_file_size": "512MiB"}),
    ],
)
def test_what_stands_just_inside_a_rule_is_taken(section: str, values: dict[str, Any]):
    assert isinstance(made(**{section: values}), Config)


@pytest.mark.parametrize("name", sorted(RESERVED))
@pytest.mark.parametrize(
    "column", ["topic_column", "partition_column", "offset_column", "timestamp_column"]
)
def test_a_metadata_column_cannot_have_a_name_that_iceberg_keeps(column: str, name: str):
    with pytest.raises(ConfigError, match=f"column name '{name}' is reserved by Iceberg"):
        made(table={column: name})


def test_two_metadata_columns_cannot_share_a_name():
    with pytest.raises(ConfigError, match="_x"):
        made(table={"topic_column": "_x", "offset_column": "_x"})


@pytest.mark.parametrize("start", [{"t": 5}, {"t": {"0": "x"}}, {"t": {"0": -1}}, {"t": {"a": 1}}])
def test_a_start_that_is_no_cut_is_refused(start: dict[str, Any]):
    with pytest.raises(ConfigError, match="start"):
        made(sink={"start": start})


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
    assert len(BREAKERS) == len(configs._REFUSED)


@pytest.mark.parametrize("number", range(len(BREAKERS)))
def test_a_setting_that_breaks_the_promise_is_refused_with_its_reason(number: int):
    section, key, bad, good = BREAKERS[number]
    reason = configs._REFUSED[number][3]
    with pytest.raises(ConfigError) as caught:
        made(**{section: {key: bad}})
    assert caught.value.message == f"cannot take [{section}] {key} = {bad!r}: {reason}"
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
        ("catalog", "adls.sas-token.account"),
        ("catalog", "adls.auth.shared-key.account.key"),
        ("spark", "spark.hadoop.fs.azure.account.key.me.dfs.core.windows.net"),
    ],
)
def test_secrets_with_unusual_names_are_refused_too(section: str, key: str):
    with pytest.raises(ConfigError, match="a secret stands in the config"):
        made(**{section: {key: "hunter2"}})


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
        ("4096", 4096), ("5B", 5), ("64KiB", 65536), ("64K", 65536), ("1KB", 1000),
        ("1.5MiB", 1572864), ("2MB", 2_000_000), ("1GiB", 2**30), ("1 TiB", 2**40), ("0", 0),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_output_modes_that_replace_rows_are_refused_with_the_reason(mode: str):
    with pytest.raises(ConfigError, match=f"{mode}.*replaces rows.*the table is append-only") as no:
        made(transform={"sql": "SELECT 1", "output_mode": mode})
    assert "withWatermark" in no.value.hint or "watermark" in no.value.hint
    with pytest.raises(ConfigError, match="'sideways': expected append"):
        made(transform={"sql": "SELECT 1", "output_mode": "sideways"})


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


def test_a_trigger_is_a_duration_or_available_now():
    assert made(sink={"trigger": "available-now"}).sink.trigger == "available-now"
    assert made(sink={"trigger": "2s"}).sink.trigger == "2s"
    with pytest.raises(ConfigError, match="cannot read duration 'sometimes'"):
        made(sink={"trigger": "sometimes"})


def test_a_dataframes_sink_takes_fields_of_sink_and_table():
    given = {"id": "s", "checkpoint": "/c", "partition_by": ["day(at)"], "event_time": "at",
             "max_pending_batches": 3}  # fmt: skip
    config = configs.for_frame("shop.orders", "ice", given)
    assert (config.sink.id, config.sink.checkpoint) == ("s", "/c")
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
    with pytest.raises(ConfigError, match="expected int, found 'many'"):
        configs.for_frame("shop.orders", "lake", {"id": "s", "max_pending_batches": "many"})


def test_the_way_of_the_data_is_told_with_its_reason():
    way, why = configs.way(made())
    assert way.startswith("Kafka (orders) → ")
    assert way.endswith("→ shop.orders")
    assert "no record enters its JVM" in why
    way, why = configs.way(made(transform={"sql": "SELECT * FROM stream"}))
    assert "rows in Spark: [transform] sql →" in way
    assert "there is a [transform]" in why
    way, _ = configs.way(made(transform={"python": "module:function"}))
    assert "[transform] python module:function →" in way
    way, _ = configs.way(made(sink={"topics": [], "pattern": "or.*"}))
    assert "Kafka (or.*)" in way


def test_every_setting_in_effect_is_told_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HUNTER", "hunter2")
    config = made(
        kafka={"sasl.password": "env:HUNTER", "client.id": "me"},
        catalog={"name": "ice", "type": "rest", "s3.secret-access-key": "env:HUNTER"},
        decode={"registry": {"url": "http://r", "basic.auth.user.info": "env:HUNTER"}},
        spark={"spark.hadoop.fs.s3a.secret.key": "env:HUNTER", "spark.master": "local[1]"},
        transform={"sql": "SELECT password FROM stream"},
        sink={"trigger": "2s"},
    )
    shown = configs.settings(config)
    assert "hunter2" not in repr(shown)
    assert "env:HUNTER" not in repr(shown)
    assert shown["kafka"] == {"bootstrap.servers": "broker:9092", "sasl.password": "***",
                              "client.id": "me"}  # fmt: skip
    assert shown["catalog"] == {"name": "ice", "type": "rest", "s3.secret-access-key": "***"}
    assert shown["decode.registry"] == {"url": "http://r", "basic.auth.user.info": "***"}
    assert shown["spark"]["spark.master"] == "local[1]"
    assert shown["transform"]["sql"] == "SELECT password FROM stream"
    assert shown["sink"]["trigger"] == "2s"
    assert shown["sink"]["patience"] == "5m", "defaults are in effect, too"
    assert shown["table 0"]["name"] == "shop.orders"
    assert made().kafka == {"bootstrap.servers": "broker:9092"}


# ── upserts ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"mode": "changelog"}, "no key says which rows are the same"),
        ({"mode": "upsert"}, "no key says which rows are the same"),
        ({"key": ["id"]}, "it has a key, and its mode is append"),
        ({"mode": "merge", "key": ["id"]}, "mode 'merge' is unknown"),
        ({"partitioned_by_key": True}, "partitioned_by_key is for upsert tables"),
        ({"mode": "upsert", "key": ["id"], "identifier_fields": ["n"]}, "are different columns"),
        ({"mode": "upsert", "key": ["_offset"]}, "'_offset' says where a row comes from"),
        ({"order_by": "version"}, "order_by is for upsert tables"),
        ({"mode": "changelog", "key": ["id"], "order_by": "n"}, "order_by is for upsert tables"),
        ({"mode": "upsert", "key": ["id"], "order_by": "id"}, "which is its key"),
        ({"mode": "upsert", "key": ["id"], "order_by": "_offset"}, "where a row comes from"),
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
    table = {"mode": "upsert", "key": ["id"], "order_by": "_timestamp"}
    config = made(table=table)
    assert config.remembering == ("shop.orders",)
    assert not config.one_table
    with pytest.raises(ConfigError, match="two tables of the sink have that name"):
        made(table=table, dead_letters={"table": "shop.orders_deleted"})


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ({"key": "xml"}, "'xml' is unknown"),
        ({"key": "avro"}, "key_schema is missing"),
        ({"key": "confluent-avro"}, "neither \\[decode\\] key_schema nor"),
    ],
)
def test_how_keys_are_read_is_checked(decode: dict[str, str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        made(decode={"format": "json", **decode})
