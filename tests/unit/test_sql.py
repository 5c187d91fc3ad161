"""Statements: what they mean, and what is said of those that cannot be."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from frazil.config.model import Config
from frazil.config.sections import RouteConfig
from frazil.errors import ConfigError, Conflict, SqlError
from frazil.sql.definition_files import DefinitionFiles
from frazil.sql.definition_set import config_of
from frazil.sql.definitions import (
    config_of_file,
    configs_of,
    file_definitions,
    home_of,
    open_definitions,
)
from frazil.sql.formatter import create_text
from frazil.sql.source_text import masked
from frazil.sql.statements import key_of
from frazil.sql.tree_reader import read_statements

BASE = """
CREATE SECRET pass AS 'env:PASSWORD';
CREATE CONNECTION k TO KAFKA (BROKER 'broker:9092');
CREATE CONNECTION reg TO CONFLUENT SCHEMA REGISTRY (URL 'http://registry:8081');
CREATE CONNECTION cat TO ICEBERG CATALOG (TYPE = 'rest', URI = 'http://catalog:8181');
"""
SOURCE = "FROM KAFKA CONNECTION k (TOPIC 'orders') FORMAT JSON"
TARGET = "TO ICEBERG CATALOG cat NAMESPACE 'shop' TABLE 'orders'"


def config(*statements: str, sink: str = "s") -> Config:
    text = ";\n".join([BASE.rstrip().rstrip(";"), *statements])
    return config_of(file_definitions(text, Path("test.sql")).objects, sink)[0]


def refused(*statements: str) -> SqlError:
    with pytest.raises(SqlError) as caught:
        config(*statements)
    return caught.value


def test_a_sink_has_the_config_that_its_clauses_name():
    made = config(
        f"""create Sink s {SOURCE} (KEY FORMAT 'text') {TARGET}
        partition by (day(placed_at), Bucket( 16,id )) -- any order
        KEY (id) /* comments /* nest */ */ MODE Upsert
        DEAD LETTERS TABLE dead
        WITH (COMMIT_INTERVAL '20m', max records per trigger = 5, ALLOW SHARED TOPICS,
              PROPERTIES = MAP ['write.delete.mode' => 'merge-on-read'], 'spark.ui.enabled' TRUE,
              COMPLETENESS IDLE TIMEOUT = '5m', KAFKA 'client.id' = 'it''s', SORT BY (a desc))"""
    )
    table = made.tables[0]
    assert (made.sink.id, made.sink.topics, made.sink.commit_interval) == ("s", ("orders",), "20m")
    assert (made.sink.max_records_per_trigger, made.sink.allow_shared_topics) == (5, True)
    assert (table.name, table.mode, table.key) == ("shop.orders", "upsert", ("id",))
    assert table.partition_by == ("day(placed_at)", "bucket(16, id)")
    assert table.properties == {"write.delete.mode": "merge-on-read"}
    assert table.sort_by == ("a desc",)
    assert (made.decode.format, made.decode.key_format) == ("json", "text")
    assert made.kafka == {"bootstrap.servers": "broker:9092", "client.id": "it's"}
    assert made.spark == {"spark.ui.enabled": "true"}
    assert made.completeness.idle_timeout == "5m"
    assert made.dead_letters.table == "shop.dead"
    assert made.catalog.name == "cat"


def test_records_that_no_route_takes_go_to_the_first_table_unless_they_are_rejected():
    routes = "ROUTE WHEN kind = 'refund' TO TABLE refunds ROUTE WHEN TOPIC = 'x' SKIP"
    made = config(f"CREATE SINK s {SOURCE} {TARGET} {routes}")
    assert [table.name for table in made.tables] == ["shop.orders", "shop.refunds"]
    assert made.routes == (
        RouteConfig(field="kind", values=("refund",), to=("shop.refunds",)),
        RouteConfig(topics=("x",), skip=True),
        RouteConfig(to=("shop.orders",)),
    )
    made = config(f"CREATE SINK s {SOURCE} {TARGET} {routes} ROUTE ELSE REJECT")
    assert len(made.routes) == 2


def test_an_envelope_is_that_of_all_routes():
    made = config(f"CREATE SINK s {SOURCE} ENVELOPE DEBEZIUM {TARGET} KEY (id) MODE UPSERT")
    assert made.routes == (RouteConfig(to=("shop.orders",), envelope="debezium"),)


def test_a_view_is_a_query_of_spark_over_the_stream():
    view = """CREATE VIEW v AS SELECT 'it\\'s; FROM', `a;b` FROM KAFKA CONNECTION k (TOPIC 'orders')
        FORMAT AVRO USING CONFLUENT SCHEMA REGISTRY CONNECTION reg o JOIN r ON o.x = r.x -- ;
"""
    made = config(view, f"CREATE SINK s FROM v {TARGET}")
    assert made.transform.sql == ("SELECT 'it\\'s; FROM', `a;b` FROM stream o JOIN r ON o.x = r.x")
    assert (made.decode.format, made.decode.registry["url"]) == (
        "confluent-avro",
        "http://registry:8081",
    )


def test_a_view_of_everything_needs_no_spark():
    view = "CREATE VIEW v AS SELECT * FROM KAFKA CONNECTION k (TOPIC 'orders') FORMAT JSON"
    assert not config(view, f"CREATE SINK s FROM v {TARGET}").transform


def test_rows_of_a_query_are_not_upserted():
    view = f"CREATE VIEW v AS SELECT a, b + 1 AS b {SOURCE}"
    error = refused(view, f"CREATE SINK s FROM v {TARGET} KEY (a)\nMODE UPSERT")
    assert "test.sql:8:6: view v is a query" in error.message
    assert "cannot be written in mode upsert: they carry no Kafka key" in error.message


@pytest.mark.parametrize("mode", ["", "MODE APPEND", "KEY (a) MODE UPSERT"])
def test_endless_groups_are_refused_with_their_location(mode: str):
    view = f"CREATE VIEW v AS\nSELECT a, count(*) {SOURCE} e\n  JOIN t USING (a)\n  GROUP BY a"
    for statements in ((view,), (view, f"CREATE SINK s FROM v {TARGET} {mode}")):
        error = refused(*statements)
        assert "test.sql:9:3: the groups of view v never end" in error.message
        line, pointer = error.excerpt.split("\n")
        assert line[pointer.index("^") :].startswith("GROUP BY a")
        assert "WATERMARK placed_at DELAY OF INTERVAL" in error.hint


def test_windows_and_groups_of_tables_are_left_to_spark():
    windows = f"""CREATE VIEW v AS SELECT window.start, count(*) n {SOURCE}
        WATERMARK at DELAY OF INTERVAL 5 MINUTES GROUP BY window(at, '1 hour')"""
    made = config(windows, f"CREATE SINK s FROM v {TARGET}")
    assert made.transform.sql.endswith("GROUP BY window(at, '1 hour')")
    table = f"""CREATE VIEW v AS SELECT e.a, n {SOURCE} e
        JOIN (SELECT a, count(*) n FROM cat.db.t GROUP BY a) USING (a)"""
    assert config(table, f"CREATE SINK s FROM v {TARGET}").transform


@pytest.mark.parametrize(
    ("statement", "message", "caret"),
    [
        ("CREATE CONECTION x TO KAFKA ()", "did you mean CONNECTION?", "CONECTION"),
        (f"CREATE SINK s {SOURCE} {TARGET} MOD UPSERT", "did you mean MODE?", "MOD "),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (COMIT INTERVAL '3s')", "'COMMIT INT", "COMIT"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (IDLE TIMEOUT '3s')", "COMPLETENESS", "IDLE"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (TRIGGER = '3' 's')", "behind the", "'s')"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (TRIGGER = auto)", "single quotes", "auto"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (TRIGGER = 'no')", "20s, found 'no'", "'no'"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (ID = 'no')", "a clause of the statement", "ID"),
        (f"CREATE SINK s {SOURCE} {TARGET} KEY (a) KEY (b)", "is given twice", "b"),
        (f"CREATE SINK s {SOURCE} {TARGET} MODE UPSERT", "key is missing", "UPSERT"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH ('x.y' = 1)", "its section before it", "'x.y'"),
        (f"CREATE SINK s FROM vieww {TARGET}", "there is no view vieww", "vieww"),
        (
            f"CREATE SINK s {SOURCE} TO ICEBERG CATALOG reg TABLE 'a.b'",
            "expected one to ICE",
            "reg",
        ),
        (f"CREATE SINK s {SOURCE} {TARGET} ROUTE ELSE REJECT", "only what no ROUTE", "ROUTE ELSE"),
        ("CREATE VIEW v AS SELECT 1", "expected KAFKA, found the end", ""),
        ("CREATE VIEW v AS SELECT * FROM x JOIN KAFKA CONNECTION k (TOPIC 'x')", "FROM", "KAFKA"),
        (f"CREATE VIEW v AS SELECT * {SOURCE} UNION SELECT * {SOURCE}", "second one", "KAFKA"),
        ("SHOW SINK", "did you mean SINKS?", "SINK"),
        ("DROP SINK a-b", "this sign is none of SQL's", "-b"),
        ("CREATE SECRET a AS 'env:unclosed", "has no end", "'env"),
        ("/* CREATE", "the comment that begins here has no end", "/*"),
        ("DROP CONNECTION k2", "there is no connection k2; did you mean 'k'?", "DROP"),
        ("CREATE CONNECTION k TO KAFKA (BROKER 'x')", "there is a connection k already", "CREATE"),
        ("CREATE CONNECTION \"K\" TO KAFKA (BROKER 'x')", "differs in more than case", "CREATE"),
        ("CREATE CONNECTION c TO ICEBERG CATALOG (TYPE 'rst')", "did you mean 'rest'?", "TYPE"),
        ("CREATE CONNECTION c TO AWS (REGON 'x')", "did you mean 'REGION'?", "REGON"),
        ("ALTER CONNECTION k RESET (CLIENT ID)", "CLIENT ID is not set", "CLIENT"),
    ],
)
def test_an_error_names_line_and_column_and_shows_the_place(
    statement: str, message: str, caret: str
):
    error = refused(statement)
    assert message in error.message
    line, pointer = error.excerpt.split("\n")
    assert line[pointer.index("^") :].startswith(caret)
    number, column = error.message.split("test.sql:")[1].split(":")[:2]
    assert int(number) == 6
    assert int(column.rstrip(")")) >= 1


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE SECRET s AS 'hunter2'",
        "CREATE SECRET s AS hunter2",
        'CREATE SECRET s AS "hunter2"',
        "CREATE SECRET s AS 'hunter2",
        "CREATE CONNECTION x TO KAFKA (SASL PASSWORD 'hunter2')",
        "CREATE CONNECTION x TO KAFKA (SASL PASSWORD 'hunter2', = )",
        "CREATE CONNECTION x TO KAFKA (SASL PASSWORD = 'hunter2' x)",
        "CREATE CONNECTION x TO KAFKA (SASL PASSWORD hunter2)",
        "CREATE CONNECTION x TO KAFKA (SASL PASSWORD = hunter2)",
        "CREATE CONNECTION x TO KAFKA (SASL PASSWRD = 'hunter2')",
        "CREATE CONNECTION x TO KAFKA ('sasl.password' = 'hunter2')",
        "CREATE CONNECTION x TO KAFKA ('sasl.password' 'hunter2', BROKER)",
        "CREATE CONNECTION x TO ICEBERG CATALOG (TYPE 'jdbc', URI 'jdbc:x?password=hunter2')",
        "CREATE CONNECTION x TO ICEBERG CATALOG (URI 'http://me:hunter2@host')",
        "CREATE CONNECTION x TO AWS (SECRET ACCESS KEY = 'hunter2')",
        "CREATE CONNECTION x TO AWS (SECRET ACCESS KEY hunter2)",
        f"CREATE SINK s {SOURCE} {TARGET} WITH (KAFKA 'sasl.password' = 'hunter2')",
        f"CREATE SINK s {SOURCE} {TARGET} WITH (KAFKA SASL PASSWORD hunter2)",
        f"CREATE SINK s {SOURCE} {TARGET} WITH (KAFKA SASL PASSWORD = hunter2)",
    ],
)
def test_a_secret_in_a_statement_is_refused_and_not_printed(statement: str):
    error = refused(statement)
    assert "hunter2" not in f"{error} {error!r} {error.detail}"
    assert "hunter2" not in masked(statement)
    assert "test.sql:6:" in error.message


def test_references_to_secrets_are_shown():
    statement = "CREATE CONNECTION k TO KAFKA (SASL PASSWORD = SECRET kafka_pass, BROKER 'b')"
    assert masked(statement) == statement
    assert masked("CREATE SECRET a AS 'env:A'") == "CREATE SECRET a AS 'env:A'"


@pytest.mark.parametrize(
    ("options", "section"),
    [
        (
            "TYPE 'rest', URI 'http://c', USER 'me', PASSWORD SECRET = pass",
            {"type": "rest", "uri": "http://c", "credential": "me:env:PASSWORD"},
        ),
        (
            "CATALOG TYPE 's3table', URL 'https://c', WAREHOUSE 'arn:aws:s3tables:x', "
            "AWS CONNECTION = aws",
            {
                "type": "rest",
                "uri": "https://c",
                "warehouse": "arn:aws:s3tables:x",
                "rest.sigv4-enabled": "true",
                "rest.signing-name": "s3tables",
                "rest.signing-region": "eu-west-1",
                "rest.access-key-id": "AKIA",
                "rest.secret-access-key": "env:PASSWORD",
                "rest-metrics-reporting-enabled": "false",
                "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
                "s3.access-key-id": "AKIA",
                "s3.secret-access-key": "env:PASSWORD",
                "client.region": "eu-west-1",
            },
        ),
        (
            "TYPE 'glue', WAREHOUSE 's3://w', AWS CONNECTION role",
            {
                "type": "glue",
                "warehouse": "s3://w",
                "client.region": "eu-west-1",
                "client.factory": "org.apache.iceberg.aws.AssumeRoleAwsClientFactory",
                "client.assume-role.arn": "arn:aws:iam::1:role/r",
                "client.assume-role.region": "eu-west-1",
            },
        ),
        (
            "TYPE 'jdbc', URI 'jdbc:postgresql://h/d', WAREHOUSE 's3://w', USER 'u', PASSWORD "
            "SECRET pass, 'jdbc.schema-version' 'V1'",
            {
                "type": "jdbc",
                "uri": "jdbc:postgresql://h/d",
                "warehouse": "s3://w",
                "jdbc.user": "u",
                "jdbc.password": "env:PASSWORD",
                "jdbc.schema-version": "V1",
            },
        ),
        ("TYPE 'hadoop', WAREHOUSE '/w'", {"type": "hadoop", "warehouse": "/w"}),
        ("TYPE 'hive', URI 'thrift://h'", {"type": "hive", "uri": "thrift://h"}),
        (
            "TYPE 'nessie', URI 'http://n', 'authentication.type' = 'BEARER', "
            "'authentication.token' SECRET pass",
            {
                "type": "nessie",
                "uri": "http://n",
                "authentication.type": "BEARER",
                "authentication.token": "env:PASSWORD",
            },
        ),
    ],
)
def test_a_catalog_has_icebergs_own_properties(options: str, section: dict[str, str]):
    made = config(
        "CREATE CONNECTION aws TO AWS (ACCESS KEY ID 'AKIA', SECRET ACCESS KEY = SECRET pass, "
        "REGION 'eu-west-1')",
        "CREATE CONNECTION role TO AWS (ASSUME ROLE ARN 'arn:aws:iam::1:role/r', REGION "
        "'eu-west-1')",
        f"CREATE CONNECTION c TO ICEBERG CATALOG ({options})",
        f"CREATE SINK s {SOURCE} TO ICEBERG CATALOG c TABLE shop.orders",
    )
    assert made.catalog.properties == section


def test_a_name_and_a_secret_are_one_property(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PASSWORD", "p:w")
    made = config(
        "CREATE CONNECTION r2 TO CONFLUENT SCHEMA REGISTRY (URL 'http://r', USER 'me', PASSWORD "
        "SECRET pass)",
        f"""CREATE SINK s FROM KAFKA CONNECTION k (TOPIC 'x') FORMAT AVRO USING CONFLUENT SCHEMA
        REGISTRY CONNECTION r2 {TARGET}""",
    )
    assert made.decode.registry["basic.auth.user.info"] == "me:env:PASSWORD"
    assert made.decode.registry.resolved()["basic.auth.user.info"] == "me:p:w"
    assert "p:w" not in repr(made)


def test_what_something_needs_is_not_dropped():
    error = refused(f"CREATE SINK s {SOURCE} {TARGET}", "DROP CONNECTION k")
    assert "sink s needs connection k" in error.message


def test_a_sink_is_altered_where_it_stays_valid():
    sink = f"CREATE SINK s {SOURCE} {TARGET} WITH (COMMIT INTERVAL '5s', PRIORITY 3)"
    made = config(
        sink, "ALTER SINK s SET (COMMIT INTERVAL = '7s')", "ALTER SINK s RESET (PRIORITY)"
    )
    assert (made.sink.commit_interval, made.tables[0].priority) == ("7s", 0)
    assert "key is missing" in refused(sink, "ALTER SINK s SET (MODE 'upsert')").message
    error = refused(sink, "ALTER CONNECTION k RESET (BROKER)")
    assert '"bootstrap.servers" is missing' in error.message


def test_if_exists_and_if_not_exists_leave_things_as_they_are():
    made = config(
        f"CREATE SINK s {SOURCE} {TARGET}",
        "DROP SINK IF EXISTS other",
        "CREATE CONNECTION IF NOT EXISTS k TO KAFKA (BROKER 'other:9092')",
    )
    assert made.kafka["bootstrap.servers"] == "broker:9092"


def directory(folder: Path, *statements: str) -> Path:
    """A directory of definitions."""
    store = DefinitionFiles(folder / "defs", create=True)
    texts = {}
    for statement in read_statements(";\n".join([BASE.rstrip().rstrip(";"), *statements])):
        definition = statement.definition  # type: ignore[union-attr]
        texts[home_of(key_of(definition))] = f"{create_text(definition)}\n"
    store.write(store.read(), texts)
    return store.base


def test_definitions_in_a_directory_are_one_file_each(tmp_path: Path):
    folder = directory(tmp_path, f"CREATE SINK s {SOURCE} {TARGET}")
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.sql")) == [
        "connections/cat.sql",
        "connections/k.sql",
        "connections/reg.sql",
        "secrets/pass.sql",
        "sinks/s.sql",
    ]
    assert (folder / "sinks/s.sql").read_text() == (
        "CREATE SINK s\nFROM KAFKA CONNECTION k (TOPIC 'orders')\nFORMAT JSON\n"
        "TO ICEBERG CATALOG cat\nNAMESPACE 'shop'\nTABLE 'orders';\n"
    )


def test_a_process_sees_sinks_with_state_and_version(tmp_path: Path):
    folder = directory(tmp_path, f"CREATE SINK s {SOURCE} {TARGET}")
    definitions = open_definitions(folder, {})
    before = definitions.sinks()["s"]
    assert before.config is not None
    assert (before.config.sink.id, before.state, before.error) == ("s", "running", None)
    (folder / "sinks/s.sql").open("a").write("STOP SINK s;")
    stopped = definitions.sinks()["s"]
    assert (stopped.state, stopped.version) == ("stopped", before.version)
    kafka = folder / "connections/k.sql"
    kafka.write_text(kafka.read_text().replace("broker:9092", "other:9092"))
    assert definitions.sinks()["s"].version != before.version


def test_a_broken_definition_concerns_no_other_sink(tmp_path: Path):
    folder = directory(
        tmp_path, f"CREATE SINK s {SOURCE} {TARGET}", f"CREATE SINK t {SOURCE} {TARGET}"
    )
    (folder / "sinks/t.sql").write_text("CREATE SINK t FROM")
    sinks = open_definitions(folder, {}).sinks()
    assert sinks["s"].config is not None
    assert sinks["t"].config is None
    assert "sinks/t.sql:1:" in str(sinks["t"].error)


def test_two_changes_at_once_are_a_conflict(tmp_path: Path):
    folder = directory(tmp_path, f"CREATE SINK s {SOURCE} {TARGET}")
    first, other = DefinitionFiles(folder), DefinitionFiles(folder)
    before = first.read()
    other.write(other.read(), {"secrets/pass.sql": "CREATE SECRET pass AS 'env:OTHER';\n"})
    with pytest.raises(Conflict, match="another process changed them"):
        first.write(before, {"secrets/pass.sql": "CREATE SECRET pass AS 'env:MINE';\n"})
    assert "OTHER" in (folder / "secrets/pass.sql").read_text()


def _add(folder: str, number: int) -> None:
    store = DefinitionFiles(folder, create=True)
    while True:
        before = store.read()
        count = int(before.texts.get("count.sql", "-- 0").split()[1])
        try:
            store.write(before, {"count.sql": f"-- {count + 1} {os.getpid()}"})
        except Conflict:
            continue
        number -= 1
        if not number:
            return


def test_no_change_is_lost_among_processes(tmp_path: Path):
    folder = DefinitionFiles(tmp_path / "defs", create=True).base
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add, args=(str(folder), 25)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert (folder / "count.sql").read_text().startswith("-- 75 ")


def test_it_is_known_whether_a_process_watches(tmp_path: Path):
    definitions = open_definitions(directory(tmp_path))
    assert definitions.store.watched() is False
    with definitions.watching():
        assert definitions.store.watched() is True
    assert definitions.store.watched() is False


def test_a_file_with_one_sink_is_a_config(tmp_path: Path):
    path = tmp_path / "orders.sql"
    sink = f"CREATE SINK s {SOURCE} {TARGET};"
    path.write_text(f"{BASE}{sink}SHOW SINKS;")
    assert config_of_file(path, environ={"FRAZIL_SINK__TRIGGER": "5s"})[0].sink.trigger == "5s"
    assert list(configs_of(path)) == ["s"]
    path.write_text(f"{BASE}{sink}{sink.replace(' s ', ' t ')}STOP SINK t")
    with pytest.raises(ConfigError, match="it defines 2 sinks; expected one"):
        config_of_file(path)
    assert config_of_file(path, "t")[0].sink.id == "t"
    assert list(configs_of(path)) == ["s"]
    assert list(configs_of(directory(tmp_path, sink.rstrip(";")))) == ["s"]
