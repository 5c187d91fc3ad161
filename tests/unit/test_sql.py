"""Statements: what they mean, and what is said of those that cannot be."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

import pytest

from frazil.config.model import Config
from frazil.config.sections import RouteConfig
from frazil.errors import ConfigError, Conflict, SqlError
from frazil.ops.check import query_findings
from frazil.spark.query_syntax import read_query
from frazil.sql.definition_files import DefinitionFiles
from frazil.sql.definition_set import config_of
from frazil.sql.definitions import (
    config_of_file,
    configs_of,
    file_definitions,
    home_of,
    open_definitions,
)
from frazil.sql.export import sql_of
from frazil.sql.formatter import create_text
from frazil.sql.parser import is_open, keywords
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
DECLARED = (
    "FROM KAFKA CONNECTION k (TOPIC 'orders') FORMAT AVRO USING CONFLUENT SCHEMA REGISTRY "
    "CONNECTION reg"
)
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


def test_rows_of_a_query_are_upserted_in_the_order_of_their_offsets():
    view = f"CREATE VIEW v AS SELECT a, b + 1 AS b {SOURCE}"
    error = refused(view, f"CREATE SINK s FROM v {TARGET} MODE UPSERT\nKEY (a)")
    assert "test.sql:8:1: cannot write view v with KEY: its query needs Spark" in error.message
    assert (
        "expected _topic, _topic_partition, _offset, _timestamp among its columns" in error.message
    )
    for columns in ("_topic, _topic_partition, _offset, _timestamp, b + 1 AS a", "*, a + 1 AS b"):
        view = f"CREATE VIEW v AS SELECT {columns} {SOURCE}"
        made = config(view, f"CREATE SINK s FROM v {TARGET} KEY (a)")
        assert (made.tables[0].upsert_key, made.transform.output_mode) == (("a",), "append")


@pytest.mark.parametrize("mode", ["", "MODE APPEND", "KEY (a) MODE APPEND"])
def test_groups_without_an_end_are_not_appended(mode: str):
    view = f"CREATE VIEW v AS\nSELECT a, count(*) n {SOURCE} e\n  JOIN t USING (a)\n  GROUP BY a"
    error = refused(view, f"CREATE SINK s\nFROM v {TARGET} {mode}")
    assert "test.sql:11:6: cannot append view v: the groups never end" in error.message
    assert "expected KEY (a)" in error.message
    line, pointer = error.excerpt.split("\n")
    assert line[pointer.index("^") :].startswith("v TO")


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("SELECT a, count(*) AS n FROM stream GROUP BY a", "a"),
        ("SELECT count(*) AS n, s.b AS c, a FROM stream s GROUP BY a, b", "c, a"),
        ("SELECT a, b, max(c) AS c FROM stream GROUP BY ALL", "a, b"),
        ("SELECT upper(a) AS u, sum(b) AS s FROM stream GROUP BY 1", "u"),
        ("SELECT upper(a) AS u, sum(b) AS s FROM stream GROUP BY u", "u"),
        ("SELECT upper(a) AS u, sum(b) AS s FROM stream GROUP BY upper(a)", "u"),
        (
            "SELECT x, max(y) AS y FROM (SELECT a + 1 AS x, y FROM stream WHERE y > 0) GROUP BY x",
            "x",
        ),
        (
            "SELECT window.start AS hour, a, count(*) AS n FROM stream WATERMARK t DELAY OF "
            "INTERVAL 1 MINUTE GROUP BY window(t, '1 hour'), a",
            "hour, a",
        ),
    ],
)
def test_groups_go_into_an_upsert_table_by_the_columns_that_hold_them(query: str, key: str):
    view = f"CREATE VIEW v AS {query.replace('FROM stream', SOURCE)}"
    made = config(view, f"CREATE SINK s FROM v {TARGET} KEY ({key})")
    assert (made.transform.sql, made.transform.output_mode) == (query, "update")
    assert made.tables[0].upsert_key == tuple(key.split(", "))
    for names in (f"{key}, n", "n") + ((key.split(", ")[0],) if "," in key else ()):
        error = refused(view, f"CREATE SINK s FROM v {TARGET}\n KEY ({names})")
        assert "the columns of its GROUP BY, found KEY" in error.message
        line, pointer = error.excerpt.split("\n")
        assert line[pointer.index("^") :].startswith("KEY (")


@pytest.mark.parametrize(
    ("query", "fact", "caret"),
    [
        (f"SELECT a, count(*) n {SOURCE} GROUP BY a HAVING count(*) > 1", "HAVING", "HAVING"),
        (f"SELECT count(*) n {SOURCE} GROUP BY a", "the group a is none of its", "GROUP BY"),
        (f"SELECT upper(a) AS a, count(*) n {SOURCE} GROUP BY a", "the group a is", "GROUP BY"),
        (f"SELECT a, count(*) n {SOURCE} GROUP BY a ORDER BY n", "ORDER BY is not", "GROUP BY"),
        (f"SELECT a, count(*) n {SOURCE} GROUP BY a WITH ROLLUP", "ROLLUP is not", "GROUP BY"),
    ],
)
def test_groups_whose_rows_no_key_can_replace_are_refused(query: str, fact: str, caret: str):
    error = refused(f"CREATE VIEW v AS\n {query}")
    assert "are replaced as their groups change" in error.message
    assert fact in error.message
    line, pointer = error.excerpt.split("\n")
    assert line[pointer.index("^") :].startswith(caret)


def test_an_upserted_view_is_exported_and_read_again():
    view = f"CREATE VIEW v AS SELECT a, count(*) AS n {SOURCE} GROUP BY a"
    made = config(view, f"CREATE SINK s FROM v {TARGET} KEY (a) WITH (DELETE COLUMN = 'gone')")
    text = sql_of(made)
    assert "CREATE VIEW" in text
    assert "KEY (a)" in text
    assert config_of(file_definitions(text, Path("again.sql")).objects, "s")[0] == made


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
        (
            f"CREATE SINK s {SOURCE} {TARGET} WITH (ID = 'no')",
            "a clause of the statement sets it",
            "ID",
        ),
        (f"CREATE SINK s {SOURCE} {TARGET} KEY (a) KEY (b)", "is given twice", "KEY (b"),
        (f"CREATE SINK s {SOURCE} {TARGET} MODE UPSERT", "key is missing", "MODE UPSERT"),
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


def test_any_property_of_a_store_stands_in_quotes():
    made = config(
        "CREATE CONNECTION aws TO AWS (REGION 'eu', 's3.path-style-access' = TRUE)",
        "CREATE CONNECTION c TO ICEBERG CATALOG (TYPE 'rest', URI 'http://c', AWS CONNECTION aws)",
        f"CREATE SINK s {SOURCE} TO ICEBERG CATALOG c TABLE shop.orders",
    )
    assert made.catalog.properties["s3.path-style-access"] == "true"
    assert made.catalog.properties["client.region"] == "eu"
    assert sql_of(made)
    (statement,) = read_statements("CREATE CONNECTION a TO AWS ('region' 'x', 'foo' 'y')")
    assert read_statements(create_text(statement.definition)) == [statement]  # type: ignore[union-attr]


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
    assert "the connection k cannot be opened; expected BROKER = '…'" in error.message


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


# ── views ────────────────────────────────────────────────────────────────────────────────────────

#: What Spark's SELECT has, by its reference. Each was read by Spark 4.1's own parser.
SPARK_QUERIES = r"""
SELECT a AS x, b y, `odd name` FROM stream
SELECT s.* EXCEPT (a, b.c) FROM stream s
SELECT ALL a FROM stream
SELECT a.b.c, m['k'], xs[0], m.k FROM stream
SELECT CAST(a AS DECIMAL(10, 2)), a::int, TRY_CAST(b AS DATE) FROM stream
SELECT CASE WHEN a > 1 THEN 'x' WHEN b THEN 'y' ELSE NULL END AS k FROM stream
SELECT CASE a WHEN 1 THEN 'x' END FROM stream
SELECT a + b * -c / d % e, a DIV b, a & b | c ^ ~d, a || b FROM stream
SELECT a <=> b, a == b, a != b, a <> b, NOT a, !b FROM stream
SELECT a FROM stream WHERE a BETWEEN 1 AND 2 AND b NOT IN (1, 2) OR c IS NOT NULL
SELECT a FROM stream WHERE a LIKE 'x%' ESCAPE '!' AND b RLIKE '^x' AND c ILIKE ANY ('a', 'b')
SELECT a FROM stream WHERE a REGEXP 'x' AND b NOT LIKE ALL ('a', 'b')
SELECT a FROM stream WHERE a IS DISTINCT FROM b AND c IS NOT TRUE
SELECT 'it\'s', r'a\b', X'1F', 'a' 'b', "text" FROM stream
SELECT 1L, 2S, 3Y, 4.5D, 6.7F, 8.9BD, 1e10, .5 FROM stream
SELECT DATE '2024-01-01', TIMESTAMP '2024-01-01 00:00:00', INTERVAL '1' DAY FROM stream
SELECT INTERVAL '1-2' YEAR TO MONTH, INTERVAL 3 DAYS 2 HOURS, current_timestamp() FROM stream
SELECT date_trunc('hour', at), extract(YEAR FROM at), at - INTERVAL 1 DAY FROM stream
SELECT transform(xs, x -> x + 1), filter(xs, (x, i) -> x > i) FROM stream
SELECT aggregate(xs, 0, (acc, x) -> acc + x) FROM stream
SELECT named_struct('a', 1), struct(a, b), array(1, 2), map('k', v) FROM stream
SELECT from_json(body, 'a INT, b ARRAY<STRING>') AS j, to_json(struct(a)) FROM stream
SELECT body:items[0].price FROM stream
SELECT explode(xs) AS x FROM stream
SELECT a, posexplode(xs) AS (i, x) FROM stream
SELECT a, x FROM stream LATERAL VIEW explode(xs) t AS x
SELECT a, x FROM stream LATERAL VIEW OUTER posexplode(xs) t AS i, x
SELECT a, x FROM stream, LATERAL explode(xs) AS t(x)
SELECT s.a, x FROM stream s JOIN LATERAL (SELECT s.a + 1 AS x)
SELECT s.a, r.b FROM stream s JOIN cat.db.r r ON s.k = r.k
SELECT a FROM stream JOIN db.t USING (a)
SELECT a FROM stream NATURAL JOIN db.t
SELECT a FROM stream LEFT OUTER JOIN t ON x = y FULL JOIN v ON z = w CROSS JOIN q
SELECT a FROM stream LEFT SEMI JOIN t ON x = y
SELECT a FROM stream LEFT ANTI JOIN t ON x = y
SELECT a FROM stream s LEFT JOIN (SELECT k, max(v) AS v FROM db.t GROUP BY k) r ON s.k = r.k
WITH r AS (SELECT * FROM db.t) SELECT s.a, r.b FROM stream s JOIN r ON s.k = r.k
WITH r (x, y) AS (SELECT a, b FROM db.t), q AS (SELECT x FROM r) SELECT * FROM stream JOIN q
SELECT a FROM stream UNION ALL SELECT b FROM t
SELECT a FROM stream EXCEPT SELECT b FROM t
(SELECT a FROM stream)
SELECT x FROM (SELECT a AS x FROM stream) q WHERE x > 1
SELECT a, (SELECT max(v) FROM db.t) AS m FROM stream
SELECT a FROM stream WHERE a IN (SELECT k FROM db.t)
SELECT a FROM stream s WHERE EXISTS (SELECT 1 FROM db.t WHERE t.k = s.k)
SELECT k, sum(v) FROM stream WATERMARK at DELAY OF INTERVAL 1 DAY GROUP BY k, window(at, '1 hour')
SELECT k FROM stream WATERMARK t DELAY OF INTERVAL '10' MINUTE GROUP BY k, session_window(t, '5s')
SELECT k FROM stream WATERMARK to_date(t) AS d DELAY OF INTERVAL 1 HOUR 30 MINUTES s GROUP BY k, d
SELECT DISTINCT k, at FROM stream WATERMARK at DELAY OF INTERVAL 1 DAY
SELECT a FROM stream ORDER BY a DESC NULLS FIRST LIMIT 10 OFFSET 5
SELECT a FROM stream SORT BY a
SELECT a FROM stream DISTRIBUTE BY a SORT BY b
SELECT a FROM stream CLUSTER BY a
SELECT a FROM stream TABLESAMPLE (10 PERCENT)
SELECT /*+ BROADCAST(r) */ a FROM stream s JOIN db.r r ON s.k = r.k
SELECT /*+ REPARTITION(4, k), COALESCE(2) */ a FROM stream
SELECT * FROM stream PIVOT (sum(v) AS s FOR k IN ('a' AS x, 'b'))
SELECT * FROM stream UNPIVOT (v FOR k IN (a, b AS bb))
FROM stream SELECT a, b WHERE a > 1
FROM stream |> WHERE a > 1 |> SELECT a, b
SELECT a FROM stream |> WHERE a > 1 |> EXTEND a + 1 AS b |> DROP a
SELECT TRANSFORM(a, b) USING 'cat' AS (x STRING, y INT) FROM stream
MAP a, b USING 'cat' FROM stream
SELECT t.a FROM db.t VERSION AS OF 1 t JOIN stream s ON t.a = s.a
SELECT t.a FROM stream s JOIN db.t TIMESTAMP AS OF '2024-01-01' t ON t.a = s.a
SELECT t.a FROM stream s JOIN db.t FOR SYSTEM_VERSION AS OF 3 t ON t.a = s.a
SELECT a FROM stream JOIN db.t WITH ('k' = 'v') ON x = y
SELECT a FROM stream CROSS JOIN VALUES (1, 'x'), (2, 'y') AS t(i, n)
SELECT a FROM stream, range(10) r
SELECT if(a > 1, 'x', 'y'), nvl(a, 0), coalesce(a, b), nullif(a, b) FROM stream
SELECT overlay(a PLACING 'x' FROM 2 FOR 1), trim(BOTH 'x' FROM a), position('x' IN a) FROM stream
SELECT a COLLATE UNICODE_CI FROM stream
SELECT system.builtin.abs(a), my_cat.db.fn(a), upper(a => b) FROM stream
SELECT split(a, ',')[0] AS x, (struct(a, b)).col1, element_at(xs, -1) FROM stream
SELECT a FROM stream /* a /* nested */ comment */ WHERE a > 1
SELECT try_add(a, b), try_divide(a, b), variant_get(v, '$.a', 'int') FROM stream
SELECT a FROM stream WHERE (a, b) IN ((1, 2), (3, 4))
SELECT timestampdiff(HOUR, a, b), timestampadd(DAY, 1, a), dateadd(DAY, 1, a) FROM stream
SELECT CAST(a AS STRUCT<x: INT, y: ARRAY<MAP<STRING, DOUBLE>>>) FROM stream
SELECT CAST(a AS TIMESTAMP_NTZ), CAST(b AS INTERVAL DAY TO SECOND) FROM stream
SELECT json_tuple(a, 'x', 'y') AS (x, y) FROM stream
SELECT inline(xs), stack(2, 1, 2) FROM stream
SELECT a AS select_, b AS `from`, timestamp, date, value, key, format, offset FROM stream
TABLE stream
""".strip().splitlines()


@pytest.mark.parametrize("query", SPARK_QUERIES)
def test_what_spark_reads_is_a_view(query: str):
    head, tail = re.split(r"\bstream\b", query, maxsplit=1, flags=re.IGNORECASE)
    made = read_query(query)
    assert made.endless is None
    if head.upper().endswith("FROM "):
        view = f"CREATE VIEW v AS {head}KAFKA CONNECTION k (TOPIC 't') FORMAT JSON{tail}"
        made_config = config(view, f"CREATE SINK s FROM v {TARGET}")
        if made_config.transform:
            assert made_config.transform.sql == query


@pytest.mark.parametrize(
    ("query", "caret"),
    [
        (f"SELEC a {SOURCE}", "SELEC"),
        (f"SELECT a {SOURCE} WHERE (((", "("),
        (f"SELECT a {SOURCE} WHERE", "WHERE"),
        (f"SELECT a {SOURCE} FORMAT JSON", "FORMAT JSON"),
        (f"SELECT a {SOURCE} ENVELOPE DEBEZIUM FORMAT JSON", "FORMAT JSON"),
        (f"SELECT a {SOURCE} TO ICEBERG CATALOG cat", "TO ICE"),
        ("SELECT a FROM KAFKA CONNECTION k (TOPIC 't') FORMAT CSV", "CSV"),
        ("SELECT a FROM KAFKA CONNECTION k (TOPIC 't') ENVELOPE DEBEZIUM FORMAT JSON", "FORMAT"),
        (f"SELECT a, {SOURCE}", "KAFKA"),
        (f"SELECT a {SOURCE} GRUOP BY a", "BY a"),
        (f"SELECT a b c {SOURCE}", "c FROM"),
        (f"SELECT a {SOURCE} WHERE a = = 3", "= 3"),
        (f"SELECT count(* {SOURCE}", "KAFKA"),
        (f"SELECT a) {SOURCE}", ")"),
        (f"INSERT INTO t SELECT a {SOURCE}", "INSERT"),
        (f"SELECT a {SOURCE} JOIN", "JOIN"),
        # rows that never end
        (f"SELECT count(*) {SOURCE}", "count(*)"),
        (f"SELECT DISTINCT a {SOURCE}", "DISTINCT a"),
        (f"SELECT x FROM (SELECT a AS x, max(b) {SOURCE} GROUP BY a) q", "GROUP BY a"),
        (f"SELECT n {SOURCE} WATERMARK t DELAY OF INTERVAL 1 DAY GROUP BY a", "GROUP BY a"),
        (f"SELECT a, row_number() OVER (PARTITION BY a ORDER BY b) n {SOURCE}", "row_number"),
        (f"SELECT 'GROUP BY', sum(b) FILTER (WHERE c) {SOURCE}", "sum(b)"),
    ],
)
def test_a_query_that_cannot_be_is_refused_where_it_goes_wrong(query: str, caret: str):
    for end in ("", " ;"):
        error = refused(f"CREATE VIEW v AS\n  {query}{end}")
        line, pointer = error.excerpt.split("\n")
        shown = line[pointer.index("^") :]
        assert shown.startswith("FROM KAFKA" if caret == "KAFKA" else caret) or shown.startswith(
            caret
        )


def test_a_source_is_read_by_the_same_rules_in_views_and_sinks():
    source = """FROM KAFKA CONNECTION "k" (TOPIC 'it''s;') FORMAT JSON
        (COLUMNS MAP ['at' => 'timestamp'])"""
    (view,) = read_statements(f"CREATE VIEW v AS SELECT r'a\\', * {source} -- FORMAT")
    (sink,) = read_statements(f"CREATE SINK s {source} {TARGET}")
    assert view.definition.source == sink.definition.source  # type: ignore[union-attr]
    assert view.definition.head == "SELECT r'a\\', * FROM "  # type: ignore[union-attr]
    assert view.definition.tail == ""  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("query", "select"),
    [
        ("SELECT *", ()),
        ("SELECT * EXCEPT (a)", ("* except (a)",)),
        (
            "SELECT id, `odd name` AS x, stream.c.d, TRUE AS t, 'eu' AS r, _key, _topic",
            ("id", "`odd name` as x", "c.d", "true as t", "'eu' as r", "_key"),
        ),
        ("SELECT id, amount + 1 AS b", None),
        ("SELECT CAST(id AS STRING) AS id", None),
        ("SELECT _headers", None),
        ("SELECT a AS b, b AS c", None),
        ("SELECT upper(a) AS a", None),
        ("SELECT 1 AS a", None),
    ],
)
def test_columns_alone_need_no_spark(query: str, select: tuple[str, ...] | None):
    made = config(f"CREATE VIEW v AS {query} {DECLARED}", f"CREATE SINK s FROM v {TARGET}")
    assert bool(made.transform) == (select is None)
    assert made.tables[0].select == (select or ())


@pytest.mark.parametrize(
    "tail", ["WHERE a > 1", "LIMIT 3", "o JOIN t ON o.x = t.x", "TABLESAMPLE (1 ROWS)"]
)
def test_what_is_more_than_columns_needs_spark(tail: str):
    made = config(f"CREATE VIEW v AS SELECT a {SOURCE} {tail}", f"CREATE SINK s FROM v {TARGET}")
    assert made.transform.sql == f"SELECT a FROM stream {tail}"


@pytest.mark.parametrize(
    ("columns", "straight"),
    [
        ("(COLUMNS MAP ['id' => 'long'])", True),
        ("(COLUMNS MAP ['Id' => 'long'])", False),
        ("", False),
    ],
)
def test_names_that_no_schema_declares_are_found_by_spark(columns: str, straight: bool):
    """In any case; a select would make nulls of them."""
    source = f"FROM KAFKA CONNECTION k (TOPIC 'o') FORMAT JSON {columns}"
    made = config(f"CREATE VIEW v AS SELECT id {source}", f"CREATE SINK s FROM v {TARGET}")
    assert (made.transform.sql, made.tables[0].select) == (
        ("", ("id",)) if straight else ("SELECT id FROM stream", ())
    )
    if not straight:
        view = f"CREATE VIEW v AS SELECT id {source}"
        error = refused(view, f"CREATE SINK s FROM v {TARGET} KEY (id)")
        assert "no schema declares its names" in error.message


def test_a_view_of_columns_has_routes_keys_and_dead_letters():
    """The sink of the issue."""
    made = config(
        """CREATE VIEW big_orders AS SELECT id, placed_at, type AS kind
        FROM KAFKA CONNECTION k (TOPIC 'orders')
        FORMAT AVRO USING CONFLUENT SCHEMA REGISTRY CONNECTION reg""",
        """CREATE SINK s FROM big_orders TO ICEBERG CATALOG cat NAMESPACE 'shop' TABLE 'orders'
        KEY (id) PARTITION BY (day(placed_at), bucket(16, id))
        ROUTE WHEN kind = 'refund' TO TABLE 'refunds' DEAD LETTERS TABLE 'dead'
        WITH (COMMIT INTERVAL = '20m')""",
    )
    assert not made.transform
    assert {(t.mode, t.key, t.select) for t in made.tables} == {
        ("upsert", ("id",), ("id", "placed_at", "type as kind"))
    }
    assert made.routes[0].field == "type"
    assert made.dead_letters.table == "shop.dead"


@pytest.mark.parametrize(
    "clause",
    [
        "ROUTE WHEN a = 'x' TO TABLE u",
        "DEAD LETTERS TABLE 'd'",
        "KEY (a) MODE CHANGELOG",
    ],
)
def test_what_needs_records_is_refused_behind_spark_at_its_clause(clause: str):
    view = f"CREATE VIEW v AS SELECT a {SOURCE} WHERE a > 1"
    error = refused(view, f"CREATE SINK s FROM v {TARGET}\n{clause}")
    assert "its query needs Spark (WHERE)" in error.message
    line, pointer = error.excerpt.split("\n")
    shown = line[pointer.index("^") :]
    assert shown.startswith(("ROUTE", "DEAD", "KEY (a)", "MODE"))
    error = refused(f"{view} ", f"CREATE SINK s FROM v {TARGET} WITH (SELECT ('a'))")
    assert "[[table]] select" not in error.message


def test_a_key_means_upsert_and_in_mode_append_it_names_columns():
    made = config(f"CREATE SINK s {SOURCE} {TARGET} KEY (id)")
    assert (made.tables[0].mode, made.tables[0].key) == ("upsert", ("id",))
    made = config(f"CREATE SINK s {SOURCE} {TARGET} KEY (id) MODE APPEND")
    assert (made.tables[0].mode, made.tables[0].identifier_fields) == ("append", ("id",))
    clauses = "KEY (a) MODE APPEND WITH (IDENTIFIER FIELDS (b))"
    error = refused(f"CREATE SINK s {SOURCE} {TARGET} {clauses}")
    assert "expected one of them" in error.message


@pytest.mark.parametrize(
    ("query", "warned"),
    [("SELECT a FROM stream |> DROP a", True), ("SELEC", True), ("SELECT a FROM stream", False)],
)
def test_a_doubt_about_a_query_is_a_warning(query: str, warned: bool):
    given = config(f"CREATE SINK s {SOURCE} {TARGET} WITH (TRANSFORM SQL = '{query}')")
    assert [finding.severity for finding in query_findings(given)] == ["warning"] * warned


@pytest.mark.parametrize(
    ("clauses", "message", "caret"),
    [
        ("ROUTE ELSE SKIP ROUTE WHEN a = 'x' SKIP", "no record reaches it", "ROUTE WHEN"),
        ("ROUTE WHEN a = 'x' SKIP ROUTE WHEN a = 'x' SKIP", "no record reaches", "ROUTE WHEN"),
        ("ROUTE (PATTERN = '-1') SKIP", "none of the topics orders", "'-1'"),
        ("ROUTE (PATTERN = -1) SKIP", "expected a text in single quotes", "-1"),
        ("ROUTE (PATTERN '(') SKIP", "not a regular expression", "'('"),
        ("ROUTE WHEN a = 1 TO TABLE 't_{b}'", "{b} in", "ROUTE WHEN"),
    ],
)
def test_a_route_that_cannot_be_is_refused_where_it_stands(clauses: str, message: str, caret: str):
    error = refused(f"CREATE SINK s {SOURCE} {TARGET} {clauses}")
    assert message in error.message
    line, pointer = error.excerpt.split("\n")
    assert line[pointer.index("^") :].startswith(caret)


@pytest.mark.parametrize("words", ["JSON ENVELOPE UPSERT", "RAW ENVELOPE DEBEZIUM"])
def test_an_envelope_is_debeziums_in_a_format_that_has_one(words: str):
    error = refused(f"CREATE SINK s FROM KAFKA CONNECTION k (TOPIC 'o') FORMAT {words} {TARGET}")
    line, pointer = error.excerpt.split("\n")
    assert line[pointer.index("^") :].startswith(("UPSERT", "NONE", "ENVELOPE"))


# ── words, names and shapes ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("word", sorted(keywords() - {"CONNECTION"}))
def test_every_name_may_be_any_word(word: str):
    """But for a catalog that is called `connection`, which stands in quotes."""
    made = config(
        f"CREATE SECRET {word} AS 'env:X'",
        f"CREATE CONNECTION {word} TO KAFKA (BROKER 'b', SASL PASSWORD SECRET {word})",
        f"CREATE CONNECTION c{word} TO ICEBERG CATALOG (TYPE 'hive', URI 'thrift://h')",
        f"""CREATE VIEW {word} AS SELECT a FROM KAFKA CONNECTION {word} (TOPIC 't')
        FORMAT JSON (COLUMNS MAP ['a' => 'long'])""",
        f"""CREATE SINK {word} FROM {word} TO ICEBERG CATALOG c{word} NAMESPACE {word}
        TABLE {word} KEY (a) WITH (SORT BY (a))""",
        f"START SINK {word}",
        sink=word.lower(),
    )
    assert (made.sink.id, made.tables[0].name) == (word.lower(), f"{word}.{word}")


@pytest.mark.parametrize(
    ("condition", "field", "topics"),
    [
        ("topic.x = 'a'", "topic.x", ()),
        ("header = 'a'", "header", ()),
        ("topic IS NOT NULL", "topic", ()),
        ("TOPIC = 'orders'", "", ("orders",)),
        ("\"topic\" = 'a'", "topic", ()),
        ("`kind` = 'a'", "kind", ()),
    ],
)
def test_a_field_may_be_any_word(condition: str, field: str, topics: tuple[str, ...]):
    made = config(f"CREATE SINK s {SOURCE} {TARGET} ROUTE WHEN {condition} SKIP")
    assert (made.routes[0].field, made.routes[0].topics) == (field, topics)


@pytest.mark.parametrize("quote", ['"', "`"])
def test_names_in_quotes_stay_as_they_are(quote: str):
    sec, aws, sink = (f"{quote}{name}{quote}" for name in ("Sec", "Aws", "S.1"))
    statements = [
        f"CREATE SECRET {sec} AS 'env:X'",
        f"CREATE CONNECTION a2 TO KAFKA (BROKER 'b', SASL PASSWORD SECRET {sec})",
        f"CREATE CONNECTION {aws} TO AWS (SECRET ACCESS KEY = SECRET {sec})",
        f"CREATE CONNECTION c TO ICEBERG CATALOG (TYPE 'rest', URI 'u', AWS CONNECTION = {aws})",
        f"CREATE CONNECTION d TO ICEBERG CATALOG (TYPE 'rest', URI 'u', AWS CONNECTION {aws})",
        f"CREATE SINK {sink} FROM KAFKA CONNECTION a2 (TOPIC 't') FORMAT JSON "
        f"TO ICEBERG CATALOG c TABLE {quote}shop{quote}.orders",
    ]
    made = config(*statements, sink="S.1")
    assert made.kafka["sasl.password"] == "env:X"
    assert made.catalog.properties["s3.secret-access-key"] == "env:X"
    error = refused(*statements, statements[-1])
    assert 'CREATE OR REPLACE SINK "S.1"' in error.hint
    assert is_open(f"CREATE SECRET {quote}a;")
    assert not is_open(f"CREATE SECRET {quote}a;{quote} AS 'env:X';")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (f"CREATE SINK s {SOURCE} {TARGET} KEY (a b)", "expected ',' or ')' before b"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (KEY = (a b))", "expected ',' or ')' before b"),
        (f"CREATE SINK s {SOURCE} {TARGET} KEY (lower(a))", "KEY takes columns"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH (KEY (lower(a)))", "KEY takes columns"),
        (f"CREATE SINK s {SOURCE} {TARGET} KEY (a, A)", "names 'a' twice"),
        (f"CREATE SINK s {SOURCE} {TARGET} PARTITION BY (day(a), day(a))", "'day(a)' twice"),
        ("CREATE OR REPLACE SECRET IF NOT EXISTS s AS 'env:X'", "found both"),
        (f"CREATE SINK s {SOURCE} {TARGET} ROUTE WHEN \"a.b\" = 'x' SKIP", "name has a dot"),
        (f"CREATE SINK s {SOURCE} {TARGET}; STOP SINK ghost", "there is no sink ghost"),
        ("CREATE CONNECTION c TO KAFKA (CLIENT ID 'x')", "expected BROKER"),
        ("CREATE CONNECTION c TO CONFLUENT SCHEMA REGISTRY ()", "expected URL"),
        ("CREATE CONNECTION c TO ICEBERG CATALOG (TYPE 'rest')", "expected URI"),
        ("CREATE CONNECTION c TO ICEBERG CATALOG (URI 'u')", "expected TYPE"),
        (f"CREATE SINK s {SOURCE} {TARGET} WITH ('commit_interval' = '20m')", "COMMIT INTERVAL"),
        (f"CREATE SINK s {SOURCE} {TARGET} MODE UPSERT", "key is missing"),
    ],
)
def test_what_means_nothing_is_refused(statement: str, message: str):
    error = refused(statement)
    assert message in error.message
    assert "[[" not in str(error)


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("SELECT * FROM t", "a query belongs in a view"),
        ("CREATE TABLE t (a INT)", "a sink makes its tables"),
        ("CREATE MATERIALIZED VIEW v AS SELECT 1", "a query belongs in a view"),
        ("INSERT INTO t SELECT 1", "a query belongs in a view"),
        (f"CREATE SINK s {SOURCE} {TARGET} ROUTE WHEN a <> 'x' SKIP", "= and IN"),
        (f"CREATE SINK s {SOURCE} {TARGET} ROUTE WHEN a != 'x' SKIP", "= and IN"),
        (f"CREATE SINK s {SOURCE} {TARGET} MODE UPSERT", "MODE = 'upsert', KEY = ('id')"),
    ],
)
def test_shapes_of_other_systems_get_a_hint(statement: str, hint: str):
    assert hint in refused(statement).hint


@pytest.mark.parametrize(
    "mode", ["MODE = UPSERT", "MODE 'UPSERT'", "MODE = 'upsert'", "MODE UPSERT"]
)
def test_shapes_of_other_systems_are_read_where_they_are_clear(mode: str):
    made = config(
        f"""CREATE SINK s {SOURCE} {TARGET} KEY = (id) {mode}
        WITH (NOTIFY HEADERS = MAP ['X-A' => 'b'], KAFKA MAP ['client.id' => 'c'])""",
        "ALTER SINK s TABLE 'shop.orders' SET (PRIORITY 3)",
        "ALTER SINK s TABLE orders SET (FORMAT VERSION 3)",
    )
    assert made.tables[0].mode == "upsert"
    assert (made.tables[0].priority, made.tables[0].format_version) == (3, 3)
    assert made.notify.headers == {"X-A": "b"}
    assert made.kafka["client.id"] == "c"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE CONNECTION x TO KAFKA (BROKER 'b', 'sasl.jaas.config' = 'a password=\"hunter2\"')",
        "CREATE CONNECTION x TO ICEBERG CATALOG (TYPE 'jdbc', WAREHOUSE 'w', URI "
        "'jdbc:oracle:thin:me/hunter2@host:1521/x')",
        "CREATE CONNECTION x TO ICEBERG CATALOG (TYPE 'rest', URI 'https://c?api_key=hunter2')",
        "CREATE CONNECTION x TO ICEBERG CATALOG (TYPE 'rest', URI 'https://c?a=1&token=hunter2')",
    ],
)
def test_a_secret_inside_a_value_is_refused(statement: str):
    error = refused(statement)
    assert "hunter2" not in str(error)
    assert "hunter2" not in masked(statement)


def test_an_address_that_is_a_secret_is_masked():
    text = "WITH (NOTIFY WEBHOOK = 'https://hooks.example.com/services/T0/hunter2')"
    assert "hunter2" not in masked(text)


def test_a_mark_at_the_begin_of_a_file_is_no_sign(tmp_path: Path):
    (tmp_path / "s.sql").write_bytes(
        b"\xef\xbb\xbf" + f"{BASE} CREATE SINK s {SOURCE} {TARGET}".encode()
    )
    assert list(configs_of(tmp_path / "s.sql")) == ["s"]


def test_only_a_marked_directory_is_read_beside_a_file(tmp_path: Path):
    folder = directory(tmp_path, f"CREATE SINK s {SOURCE} {TARGET}")
    assert config_of_file(folder / "sinks/s.sql")[0].sink.id == "s"
    (folder / ".frazil").unlink()
    with pytest.raises(SqlError, match="there is no connection"):
        config_of_file(folder / "sinks/s.sql")


def test_a_setting_is_from_the_connection_that_has_it():
    text = f"""{BASE}CREATE CONNECTION aws TO AWS (REGION 'eu');
    CREATE CONNECTION c TO ICEBERG CATALOG (TYPE 'rest', URI 'u', USER 'me', PASSWORD SECRET pass,
      AWS CONNECTION aws);
    CREATE SINK s {SOURCE} TO ICEBERG CATALOG c TABLE a.b KEY (id)"""
    _, origins = config_of(file_definitions(text, Path("x.sql")).objects, "s")
    lines = {key: origins[key].split(":")[1] for key in origins}
    assert (lines["kafka.bootstrap.servers"], lines["catalog.uri"]) == ("3", "7")
    assert (lines["catalog.credential"], lines["catalog.client.region"]) == ("7", "6")
    assert (lines["table.0.key"], lines["table.0.mode"], lines["catalog.name"]) == ("9", "9", "7")
