"""Dead letters are listed, and replayed after a fix: exactly once, into the tables that lacked
them. Real Kafka, Spark and Iceberg; the oracle reads the data files."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from frazil.auditing import evidence
from frazil.cli import commands
from frazil.config.model import Config
from frazil.errors import ConfigError, Fenced, Gap, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.ops import dead_letters
from frazil.sources.dead_letters import DeadLetterSelection, ReplayReport
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_once
from tests.system.streams import Registry, Steps, avro, catch_up, eventually, produce, running

Make = Callable[..., Config]
ALL = DeadLetterSelection()


def events(*kinds: str, **more: Any) -> list[bytes]:
    return [json.dumps({"kind": kind, "id": i, **more}).encode() for i, kind in enumerate(kinds)]


def replay(config: Config, spark: Any, wanted: DeadLetterSelection = ALL) -> ReplayReport:
    return dead_letters.replay(config, spark, wanted)


def assert_proven(config: Config, spark: Any) -> dict[str, set[str]]:
    """Every table of the sink; gives who has written to each."""
    result = evidence.of_sink(config, JavaCatalog(spark, config.catalog.name).open_readonly)
    tables: dict[str, set[str]] = {}
    for report in result.reports:
        assert report.verdict == "proven", report
        if report.table != config.index_table:
            tables.setdefault(report.table, set()).add(report.sink)
    return tables


def ids(lake: Lake, table: str, columns: str = "id") -> list[Any]:
    """Of all rows; none of them is there twice."""
    rows = lake.query(table, f"_topic, _topic_partition, _offset, {columns}", "ORDER BY 1, 2, 3")
    assert_once(row[:3] for row in rows)
    return [row[3] if len(row) == 4 else row[3:] for row in rows]


@contextmanager
def files_as_they_are(lake: Lake, *tables: str) -> Iterator[None]:
    """Nothing is committed to these tables meanwhile."""
    before = [lake.metadata_file(table) for table in tables]
    yield
    assert [lake.metadata_file(table) for table in tables] == before


# ── after a fix ──────────────────────────────────────────────────────────────────────────────────


def test_a_schema_that_the_registry_learns_later(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    schema = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}
    create_topic(broker.bootstrap, name, 2)
    values = [avro(schema, {"id": i}, 2 if i % 5 == 3 else 1) for i in range(40)]
    with Registry(id1=schema) as registry:
        produce(broker.bootstrap, name, values, 2)
        config = make_config(
            decode={"format": "confluent-avro", "registry": {"url": registry.url}},
            dead_letters={"table": f"db.{name}_dead"},
        )
        catch_up(config, spark)
        assert len(ids(lake, f"db.{name}")) == 32
        first = replay(config, spark)  # too early
        assert (first.replayed, first.rejected) == (0, 8)
        assert "schema 2" in first.rejected_again[0].reason
        registry.schemas[2] = schema
        outcome = replay(config, spark)
        assert (outcome.replayed, outcome.rejected, outcome.rows) == (8, 0, {f"db.{name}": 8})
        with files_as_they_are(lake, f"db.{name}", f"db.{name}_dead", f"db.{name}_dead_replayed"):
            assert replay(config, spark) == ReplayReport()
    rows = lake.query(f"db.{name}", "_topic_partition, _offset, id, _timestamp IS NOT NULL")
    assert_once((partition, offset) for partition, offset, *_ in rows)
    assert {(p, o, i) for p, o, i, _ in rows} == {(i % 2, i // 2, i) for i in range(40)}
    assert all(stamped for *_, stamped in rows)
    tables = assert_proven(config, spark)
    assert tables[f"db.{name}"] == {name, f"{name}.replay"}
    assert set(tables) == {f"db.{name}", f"db.{name}_dead", f"db.{name}_dead_replayed"}


def test_a_route_that_is_added_and_names_from_data(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, events("a", "b", "c", "a", "b", "noise"))
    routes = [{"field": "kind", "values": ["a"], "to": [f"db.{name}_{{value}}"]}]
    sections: Any = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_{{value}}"}],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    config = make_config(route=routes, **sections)
    catch_up(config, spark)
    assert ids(lake, f"db.{name}_a") == [0, 3]
    more = [
        {"field": "kind", "values": ["noise"], "skip": True},
        {"field": "kind", "to": [f"db.{name}_{{value}}"]},
    ]
    config = make_config(route=routes + more, **sections)
    would = dead_letters.preview_replay(config, spark, ALL)
    assert (would.replayed, would.rejected) == (3, 0)
    assert would.needs == [f"db.{name}_b", f"db.{name}_c"]
    outcome = replay(config, spark)
    assert (outcome.replayed, outcome.skipped, outcome.rejected) == (3, 1, 0)
    assert outcome.rows == {f"db.{name}_b": 2, f"db.{name}_c": 1}
    assert (ids(lake, f"db.{name}_b"), ids(lake, f"db.{name}_c")) == ([1, 4], [2])
    assert replay(config, spark) == ReplayReport()
    produce(broker.bootstrap, name, events("b", "c", "noise"))  # the sink itself goes on
    catch_up(config, spark)
    assert (ids(lake, f"db.{name}_b"), ids(lake, f"db.{name}_c")) == ([1, 4, 0], [2, 1])
    tables = assert_proven(config, spark)
    assert tables[f"db.{name}_b"] == {name, f"{name}.replay"}
    notes = lake.query(f"db.{name}_dead_replayed", '"offset", tables', "ORDER BY 1")
    assert notes == [(1, [f"db.{name}_b"]), (2, [f"db.{name}_c"]), (4, [f"db.{name}_b"]), (5, [])]


def test_a_table_that_rejected_a_record_gets_it_and_no_other_table_does(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """One table took it, one was frozen: after the fix only that one lacks it."""
    create_topic(broker.bootstrap, name, 1)
    one, other = f"db.{name}_one", f"db.{name}_other"
    sections: Any = {
        "decode": {"format": "json"},
        "route": [{"to": [one, other]}],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    config = make_config(
        table=[{"name": one}, {"name": other, "schema_evolution": "reject"}], **sections
    )
    produce(broker.bootstrap, name, events("a", "b"))
    catch_up(config, spark)
    produce(broker.bootstrap, name, events("c", "d", extra="new") + events("e"))
    catch_up(config, spark)
    assert ids(lake, one, "kind") == ["a", "b", "c", "d", "e"]
    assert ids(lake, other, "kind") == ["a", "b", "e"]
    assert replay(config, spark).rejected == 2
    config = make_config(table=[{"name": one}, {"name": other}], **sections)
    with files_as_they_are(lake, f"db.{name}_dead"):
        assert replay(config, spark).rows == {other: 2}
    for table in (one, other):
        assert ids(lake, table, "kind, extra") == [
            ("a", None),
            ("b", None),
            ("c", "new"),
            ("d", "new"),
            ("e", None),
        ]
    assert_proven(config, spark)
    assert dead_letters.list_dead_letters(config, spark, ALL)["waiting"] == 0


def test_a_dead_letter_goes_to_all_of_its_tables_or_stays(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """Both tables rejected it, one of them takes it now: it would be written twice next time."""
    create_topic(broker.bootstrap, name, 1)
    one, other = f"db.{name}_one", f"db.{name}_other"
    sections: Any = {
        "decode": {"format": "json"},
        "route": [{"to": [one, other]}],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }

    def tables(one_is: str, other_is: str) -> list[dict[str, Any]]:
        return [
            {"name": one, "schema_evolution": one_is},
            {"name": other, "schema_evolution": other_is},
        ]

    config = make_config(table=tables("reject", "reject"), **sections)
    produce(broker.bootstrap, name, events("a"))
    catch_up(config, spark)
    produce(broker.bootstrap, name, events("b", extra="new"))
    catch_up(config, spark)
    assert (ids(lake, one), ids(lake, other)) == ([0], [0])
    outcome = replay(make_config(table=tables("evolve", "reject"), **sections), spark)
    assert (outcome.replayed, outcome.rejected) == (0, 1)
    assert (ids(lake, one), ids(lake, other)) == ([0], [0])
    config = make_config(table=tables("evolve", "evolve"), **sections)
    assert replay(config, spark).rows == {one: 1, other: 1}
    assert ids(lake, one, "kind") == ids(lake, other, "kind") == ["a", "b"]
    assert_proven(config, spark)


def test_rules_that_send_a_dead_letter_elsewhere_are_reported_and_it_stays(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    sections: Any = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_{suffix}", "schema_evolution": "reject"} for suffix in "xy"],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    config = make_config(route=[{"to": [f"db.{name}_x"]}], **sections)
    produce(broker.bootstrap, name, events("a"))
    catch_up(config, spark)
    produce(broker.bootstrap, name, events("b", extra="new"))
    catch_up(config, spark)
    outcome = replay(make_config(route=[{"to": [f"db.{name}_y"]}], **sections), spark)
    assert outcome.rejected == 1
    assert "the rules send the record elsewhere" in outcome.rejected_again[0].reason


ROUTING = """
import pyarrow as pa

def where(rows):
    names = {known}
    return pa.array([names.get(kind) for kind in rows.column("kind").to_pylist()])
"""


def test_a_function_that_is_fixed(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, tmp_path: Path
):
    create_topic(broker.bootstrap, name, 1)
    fields = [{"name": "kind", "type": "string"}, {"name": "id", "type": "long"}]
    schema = {"type": "record", "name": "r", "fields": fields}
    values = [avro(schema, {"kind": kind, "id": i}, 1) for i, kind in enumerate("aabba")]
    produce(broker.bootstrap, name, values)
    with Registry(id1=schema) as registry:

        def config(version: int, known: dict[str, str]) -> Config:
            path = tmp_path / f"routing{version}.py"
            path.write_text(ROUTING.format(known=known))
            return make_config(
                decode={"format": "confluent-avro", "registry": {"url": registry.url}},
                table=[{"name": f"db.{name}_{suffix}"} for suffix in "ab"],
                route=[{"python": f"{path}:where"}],
                dead_letters={"table": f"db.{name}_dead", "max_fraction": 1},
            )

        catch_up(config(1, {"a": f"db.{name}_a"}), spark)
        assert ids(lake, f"db.{name}_a") == [0, 1, 4]
        mended = config(2, {"a": f"db.{name}_a", "b": f"db.{name}_b"})
        assert replay(mended, spark).rows == {f"db.{name}_b": 2}
        assert ids(lake, f"db.{name}_b") == [2, 3]
        assert_proven(mended, spark)


def test_a_record_comes_back_with_its_key_its_headers_and_its_time(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    """A rule over a header sees what it would have seen at first."""
    create_topic(broker.bootstrap, name, 1)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for kind in ("a", "b"):
        producer.produce(
            name,
            b'{"id": 1}',
            key=b"k",
            headers=[("kind", kind.encode())],
            timestamp=1_700_000_000_123,
        )
    producer.flush()
    sections: Any = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_{{value}}"}],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    route = {"header": "kind", "to": [f"db.{name}_{{value}}"]}
    catch_up(make_config(route=[{**route, "values": ["a"]}], **sections), spark)
    config = make_config(route=[route], **sections)
    assert replay(config, spark).replayed == 1
    times = [
        lake.query(f"db.{name}_{suffix}", "epoch_ms(_timestamp), _offset") for suffix in ("a", "b")
    ]
    assert times == [[(1_700_000_000_123, 0)], [(1_700_000_000_123, 1)]]


# ── which dead letters ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rejected(broker: Broker, spark: Any, name: str, make_config: Make) -> Config:
    """Six dead letters of two partitions, five of them mended by a rule."""
    create_topic(broker.bootstrap, name, 2)
    produce(
        broker.bootstrap, name, [b"{", *events("a", "b", "c", "d", "e"), *events("ok", "ok")], 2
    )
    sections: Any = {
        "decode": {"format": "json"},
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    ok = {"field": "kind", "values": ["ok"], "to": [f"db.{name}"]}
    catch_up(make_config(route=[ok], **sections), spark)
    return make_config(route=[ok, {"field": "kind", "to": [f"db.{name}"]}], **sections)


def test_dead_letters_are_selected(rejected: Config, spark: Any, lake: Lake, name: str):
    def would(**wanted: Any) -> int:
        return dead_letters.preview_replay(rejected, spark, DeadLetterSelection(**wanted)).selected

    assert would() == 6
    assert would(topics=(name,)) == 6
    assert would(topics=("other",)) == 0
    assert would(partitions=(1,)) == 3
    assert would(partitions=(1,), start=1, end=2) == 1
    assert (would(kinds=("route",)), would(kinds=("misfit",))) == (6, 0)
    assert would(tables=(f"db.{name}",)) == 0
    assert would(limit=2) == 2
    assert replay(rejected, spark, DeadLetterSelection(partitions=(1,), limit=1)).replayed == 1
    assert ids(lake, f"db.{name}", "kind") == ["ok", "a", "ok"]  # the first by offset
    assert replay(rejected, spark, DeadLetterSelection(partitions=(1,), start=1)).replayed == 2
    outcome = replay(rejected, spark)
    assert (outcome.replayed, outcome.rejected) == (2, 1)
    assert outcome.rejected_again[0].offset == 0
    assert sorted(ids(lake, f"db.{name}", "kind")) == ["a", "b", "c", "d", "e", "ok", "ok"]
    assert replay(rejected, spark).rejected == 1
    assert_proven(rejected, spark)


def test_dead_letters_are_listed(rejected: Config, spark: Any, name: str):
    listing = dead_letters.list_dead_letters(rejected, spark, replace(ALL, limit=2))
    assert (listing["waiting"], listing["replayed"]) == (6, 0)
    assert len(listing["dead_letters"]) == 2
    counts = {
        (g["kind"], g["partition"]): (g["count"], g["first"], g["last"]) for g in listing["groups"]
    }
    assert counts["route", 1] == (3, 0, 2)
    replay(rejected, spark, DeadLetterSelection(partitions=(1,)))
    listing = dead_letters.list_dead_letters(rejected, spark, ALL, "all")
    assert (listing["waiting"], listing["replayed"]) == (3, 3)
    done = dead_letters.list_dead_letters(rejected, spark, ALL, "replayed")
    assert {dead_letter["partition"] for dead_letter in done["dead_letters"]} == {1}
    assert {tuple(dead_letter["replayed_to"]) for dead_letter in done["dead_letters"]} == {
        (f"db.{name}",)
    }
    assert json.loads(json.dumps(listing)) == listing


def test_a_config_without_dead_letters_is_refused(make_config: Make):
    with pytest.raises(ConfigError, match="the config has none"):
        dead_letters.selection(make_config(), [], [], "", [], [], None)


@pytest.mark.parametrize(
    ("text", "span"), [("17", (17, 18)), ("3..9", (3, 9)), ("3..", (3, None)), ("..9", (None, 9))]
)
def test_offsets_are_half_open(text: str, span: tuple[Any, Any], make_config: Make, name: str):
    config = make_config(dead_letters={"table": f"db.{name}_dead"})
    selection = dead_letters.selection(config, [], [], text, [], [], None)
    assert (selection.start, selection.end) == span
    for bad in ("", "..", "a..b", "-3")[1:]:
        with pytest.raises(ConfigError, match="cannot read --offsets"):
            dead_letters.selection(config, [], [], bad, [], [], None)


# ── beside the sink ──────────────────────────────────────────────────────────────────────────────


def test_a_replay_while_the_sink_runs(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    sections: Any = {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}"}],
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    ok = {"field": "kind", "values": ["ok"], "to": [f"db.{name}"]}
    old = make_config(route=[ok], **sections)
    new = make_config(route=[ok, {"field": "kind", "to": [f"db.{name}"]}], **sections)
    expected = 0
    with running(old, spark) as sink:
        for round in range(4):
            values = events("ok", "later", "ok", "later", extra=str(round), **{f"x{round}": round})
            expected += produce(broker.bootstrap, name, values)
            assert sink.wait_until(sink.ends(), 60)
            produce(broker.bootstrap, name, events("ok"))  # on its way meanwhile
            expected += 1
            assert replay(new, spark).replayed == 2
        eventually(lambda: sink.wait_until(sink.ends(), 5), "all committed", sink=sink)
    assert len(ids(lake, f"db.{name}")) == expected
    assert_proven(new, spark)


@pytest.mark.parametrize("step", ["written", "staged"])
def test_two_replays_at_once_bring_every_dead_letter_once(
    rejected: Config, spark: Any, lake: Lake, name: str, step: str
):
    """The younger takes over what the older has staged, and fences it."""
    steps, ended = Steps(hold=step), list[Any]()

    def older() -> None:
        try:
            ended.append(dead_letters.replay(rejected, spark, ALL, steps).replayed)
        except Fenced as error:
            ended.append(error)

    thread = threading.Thread(target=older)
    thread.start()
    assert steps.held.wait(60)
    outcome = replay(rejected, spark)
    steps.go.set()
    thread.join(60)
    assert (outcome.replayed, outcome.finished) == ((5, 0) if step == "written" else (0, 5))
    assert step == "staged" or isinstance(ended[0], Fenced)
    assert sorted(ids(lake, f"db.{name}", "kind")) == ["a", "b", "c", "d", "e", "ok", "ok"]
    assert replay(rejected, spark).selected == 1
    assert_proven(rejected, spark)


def test_notes_that_are_gone_or_rolled_back_are_not_guessed(
    rejected: Config, spark: Any, lake: Lake, name: str
):
    notes = f"db.{name}_dead_replayed"
    assert replay(rejected, spark, DeadLetterSelection(limit=1, partitions=(1,))).replayed == 1
    table = JavaCatalog(spark, "lake").load(notes)
    assert table is not None
    first = next(table.history("main")).id
    assert replay(rejected, spark, DeadLetterSelection(limit=1, partitions=(1,))).replayed == 1
    spark.sql(f"CALL lake.system.rollback_to_snapshot('{notes}', {first})")
    with files_as_they_are(lake, notes), pytest.raises(Gap, match="rolled back"):
        replay(rejected, spark)
    spark.sql(f"DROP TABLE lake.{notes}")
    with pytest.raises(IdentityMismatch, match="it does not exist"):
        replay(rejected, spark)
    assert len(ids(lake, f"db.{name}")) == 2 + 2


# ── the command ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def frazil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The `frazil` command in this process: exit code, standard output, standard error."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["frazil", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            commands.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err + out
        return int(end.value.code or 0), out, err  # type: ignore[arg-type]

    return call


def test_the_command_lists_and_replays(
    broker: Broker, lake: Lake, spark: Any, name: str, write_toml: Any, frazil: Any
):
    create_topic(broker.bootstrap, name, 1)
    produce(broker.bootstrap, name, [b'{"id": 1}', b"{", b'{"id": 2, "more": "x"}', b'{"id": 3}'])
    sections: Any = {
        "decode": {"format": "json"},
        "dead_letters": {"table": f"db.{name}_dead", "max_fraction": 1},
    }
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.db")
    path = write_toml(**sections)
    code, _, err = frazil("dead-letters", "list", write_toml(decode={"format": "json"}))
    assert code == 2
    assert "hint: [dead_letters]" in err
    path = write_toml(table={"schema_evolution": "reject"}, **sections)
    columns = "_topic STRING NOT NULL, _topic_partition INT NOT NULL, _offset BIGINT NOT NULL"
    spark.sql(
        f"CREATE TABLE lake.db.{name} (id BIGINT, {columns}, _timestamp TIMESTAMP) USING iceberg"
    )
    assert frazil("run", path, "--until-caught-up")[0] == 0
    code, out, _ = frazil("dead-letters", "list", path, "--json")
    assert code == 0
    assert json.loads(out)["waiting"] == 2
    assert "2 dead letters wait, 0 were replayed" in frazil("dead-letters", "list", path)[1]
    path = write_toml(**sections)
    code, out, _ = frazil("dead-letters", "replay", path, "--dry-run", "--json")
    assert code == 3
    assert json.loads(out)["replayed"] == 1
    code, out, err = frazil("dead-letters", "replay", path, "--kind", "misfit")
    assert (code, out.splitlines()[-1]) == (
        0,
        "1 letter selected: 1 replayed, 0 rejected again",
    ), err
    code, out, _ = frazil("dead-letters", "replay", path, "--json")
    assert code == 3
    assert json.loads(out)["rejected"] == 1
    assert lake.query(f"db.{name}", "id, more", "ORDER BY 1") == [(1, None), (2, "x"), (3, None)]
    code, out, _ = frazil("audit", path)
    assert code == 0
    assert out.count("proven:") == 6  # four tables' reports, and the index's of sink and replay
