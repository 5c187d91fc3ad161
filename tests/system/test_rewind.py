"""All tables of a sink and its index go back to a cut together, and the stream goes on from there.
Real Kafka, Spark and Iceberg; the oracle reads the data files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from frazil.auditing.evidence import of_table
from frazil.cli import commands
from frazil.config.model import Config, load
from frazil.errors import ConfigError, Expired, Fatal, Fenced, Gap, IdentityMismatch
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.offsets import Cut
from frazil.ops import dead_letters
from frazil.ops.rewind import preview, rewind
from frazil.sink import Sink
from frazil.sources.dead_letters import DeadLetterSelection
from frazil.testing import datagen
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_exact, assert_once
from tests.system.streams import (
    WITHIN,
    Steps,
    all_proven,
    catch_up,
    numbered,
    part,
    produce,
    proven,
    running,
)
from tests.system.test_object_store import _sink

Make = Callable[..., Config]


def batches(broker: Broker, spark: Any, config: Config, count: int, size: int = 20) -> list[Cut]:
    """So many runs of one batch; where each of them ended."""
    topic = config.sink.topics[0]
    ends = []
    for number in range(count):
        produce(broker.bootstrap, topic, numbered(size, number * size), 2)
        ends.append(catch_up(config, spark).position)
    return ends


def offsets(lake: Lake, table: str) -> set[tuple[int, int]]:
    rows = lake.query(table, "_topic_partition, _offset")
    assert_once(rows)
    return set(rows)  # type: ignore[arg-type]


def below(cut: Cut) -> set[tuple[int, int]]:
    return {(p.number, offset) for p, end in cut.items() for offset in range(end)}


def table_of(spark: Any, name: str) -> JavaTable:
    table = JavaCatalog(spark, "lake").load(name)
    assert table is not None
    return table


def test_a_table_goes_back_and_the_stream_goes_on(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    ends = batches(broker, spark, config, 4)
    before = lake.metadata_file(f"db.{name}"), lake.metadata_file(f"db.{name}_index")
    plan = preview(config, spark, "batch:1")
    assert before == (lake.metadata_file(f"db.{name}"), lake.metadata_file(f"db.{name}_index"))
    (moved,) = plan.choice.moves
    assert (plan.choice.boundary.cut, plan.batches) == (ends[1], 2)
    assert (moved.rows, moved.commits) == (40, 2)
    steps: list[str] = []
    went = rewind(config, spark, "batch:1", on_step=lambda step, _: steps.append(step))
    assert went == replace(plan, done=True)
    assert steps == ["claimed", "noted", "forked", "moved", "unstaged", "indexed", "done"]
    assert offsets(lake, f"db.{name}") == below(ends[1])
    assert lake.query(f"db.{name}_index", "max(batch)") == [(1,)]
    assert proven(config, spark).written == 40
    assert preview(config, spark, "batch:1").nothing
    sink = catch_up(config, spark)
    assert sink.epoch == 4 + 3, "two epochs were the rewind's"
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 80
    assert proven(config, spark).written == 80
    refs = {row.name for row in spark.table(f"lake.db.{name}.refs").collect()}
    assert refs == {"main", f"frazil/{name}"}


@pytest.mark.parametrize("to", ["offsets", "time", "beginning"])
@pytest.mark.long
def test_a_cut_is_also_said_by_offsets_or_a_time(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, to: str
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    first = batches(broker, spark, config, 1)[0]
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 1))
    time.sleep(1.1)  # the second is over
    produce(broker.bootstrap, name, numbered(20, 20), 2)
    catch_up(config, spark)
    wanted = {"offsets": json.dumps({name: {"0": 15}}), "time": moment, "beginning": "batch:-1"}
    plan = rewind(config, spark, wanted[to])
    cut = Cut({part(name, 0): 0, part(name, 1): 0}) if to == "beginning" else first
    assert plan.choice.boundary.cut == cut
    assert offsets(lake, f"db.{name}") == below(cut)
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 40
    proven(config, spark)


def kinds(*names: str, start: int = 0) -> Iterator[bytes]:
    return (json.dumps({"kind": kind, "n": start + i}).encode() for i, kind in enumerate(names))


def many(name: str) -> dict[str, Any]:
    made = f"db.{name}_of_{{value}}"
    return {
        "decode": {"format": "json"},
        "table": [{"name": f"db.{name}_a"}, {"name": f"db.{name}_b"}, {"name": made}],
        "route": [
            {"field": "kind", "values": ["a"], "to": [f"db.{name}_a"]},
            {"field": "kind", "values": ["b"], "to": [f"db.{name}_b", f"db.{name}_a"]},
            {"field": "kind", "allowed_names": "[xyz]", "to": [made]},
        ],
        "dead_letters": {"table": f"db.{name}_dead"},
    }


@pytest.mark.long
def test_many_tables_go_back_together_those_made_since_and_dead_letters_too(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(**many(name))
    runs = [("a", "b", "x"), ("a", "a"), ("odd", "b"), ("y", "y", "odd"), ("b", "a", "y")]
    at = 0
    for run_kinds in runs:
        produce(broker.bootstrap, name, kinds(*run_kinds, start=at))
        at += len(run_kinds)
        catch_up(config, spark)

    def numbers(suffix: str) -> list[int]:
        if suffix == "dead":
            values = lake.query(f"db.{name}_dead", "value", 'ORDER BY "offset"')
            return [json.loads(value)["n"] for (value,) in values]
        return [n for (n,) in lake.query(f"db.{name}_{suffix}", "n", "ORDER BY n")]

    plan = rewind(config, spark, "batch:1")
    assert {move.table: move.rows for move in plan.choice.moves} == {
        f"db.{name}_a": 3,
        f"db.{name}_b": 2,
        f"db.{name}_of_y": 3,
        f"db.{name}_dead": 2,
    }
    contents = {suffix: numbers(suffix) for suffix in ("a", "b", "of_x", "of_y", "dead")}
    assert contents == {"a": [0, 1, 3, 4], "b": [1], "of_x": [2], "of_y": [], "dead": []}
    every = [f"db.{name}_{suffix}" for suffix in contents]
    all_proven(config, spark, *every)
    catch_up(config, spark)
    contents = {suffix: numbers(suffix) for suffix in contents}
    assert contents == {
        "a": [0, 1, 3, 4, 6, 10, 11],
        "b": [1, 6, 10],
        "of_x": [2],
        "of_y": [7, 8, 12],
        "dead": [5, 9],
    }
    all_proven(config, spark, *every)
    spans = lake.query(
        f"db.{name}_index", "start_offset, end_offset", "WHERE table_name = '*' ORDER BY ALL"
    )
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == at


@pytest.mark.long
def test_absorbed_batches_go_back_as_one_and_a_batch_between_them_is_refused(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    batches(broker, spark, make_config(), 1)
    slow = make_config(sink={"commit_interval": "1h"})
    steps = Steps()
    with running(slow, spark, steps):
        for number in range(1, 4):
            produce(broker.bootstrap, name, numbered(20, 20 * number), 2)
            deadline = time.monotonic() + WITHIN
            while len(steps.named("staged")) < number:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    staged = len(steps.named("staged"))
    # The first of a run is committed at once, the others wait for the interval.
    with pytest.raises(ConfigError, match=f"took batches 2 to {staged} in one commit") as refused:
        rewind(slow, spark, "batch:2")
    assert "--to batch:1" in refused.value.hint
    plan = rewind(slow, spark, json.dumps({name: {"0": 35}}))
    assert plan.choice.boundary.batch == 1
    assert offsets(lake, f"db.{name}") == below(plan.choice.boundary.cut)
    proven(slow, spark)


@pytest.mark.long
def test_a_branch_goes_back_and_main_does_not(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    spark.sql(
        f"CREATE TABLE lake.db.{name} (value BINARY, _topic STRING, _topic_partition INT, "
        "_offset BIGINT, _timestamp TIMESTAMP, _key BINARY)"
    )
    spark.sql(f"INSERT INTO lake.db.{name} (_offset) VALUES (7)")
    config = make_config(table={"branch": "side"})
    batches(broker, spark, config, 3)
    side = f"SELECT count(*) FROM lake.db.{name} VERSION AS OF 'side'"
    assert spark.sql(side).first()[0] == 61
    rewind(config, spark, "batch:0")
    assert (spark.sql(side).first()[0], len(lake.query(f"db.{name}"))) == (21, 1)
    rewind(config, spark, "batch:-1")
    assert (spark.sql(side).first()[0], len(lake.query(f"db.{name}"))) == (1, 1)
    catch_up(config, spark)
    assert spark.sql(side).first()[0] == 61
    refs = {row.name for row in spark.table(f"lake.db.{name}.refs").collect()}
    assert refs == {"main", "side", f"frazil/{name}/side"}


@pytest.mark.long
def test_a_query_of_sparks_goes_on_from_where_its_sources_stood(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config(transform={"sql": "SELECT * EXCEPT (_key, _headers) FROM stream"})
    ends = batches(broker, spark, config, 3)
    plan = rewind(config, spark, json.dumps(ends[0].nested()))
    assert plan.choice.boundary.cut == ends[0]
    assert len(offsets(lake, f"db.{name}")) == 20
    proven(config, spark)
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 60
    proven(config, spark)


@pytest.mark.long
def test_a_rest_catalog_and_an_object_store_take_it_too(
    broker: Broker,
    spark: Any,
    store: dict[str, str],
    name: str,
    tmp_path: Path,
):
    """References move by the catalog's own compare-and-set; the index's files are read and written
    in the bucket."""
    create_topic(broker.bootstrap, name, 2)
    config = _sink(
        spark, broker, store, name, tmp_path, staging_location="s3://stage/frazil"
    ).config
    source = datagen.OrderGenerator()
    ends = []
    for _ in range(3):
        datagen.produce(broker.bootstrap, name, 2, rows=1_000, orders=source)
        ends.append(catch_up(config, spark).position)
    count = f"SELECT count(*), count(DISTINCT order_id) FROM s3lake.db.{name}"
    plan = rewind(config, spark, json.dumps(ends[0].nested()))
    assert plan.choice.boundary.cut == ends[0]
    assert tuple(spark.sql(count).first()) == (1_000, 1_000)
    assert rewind(config, spark, "batch:-1").choice.tables[0].snapshot_then is None
    assert tuple(spark.sql(count).first()) == (0, 0)
    catch_up(config, spark)
    assert tuple(spark.sql(count).first()) == (3_000, 3_000)
    for report in of_table(
        JavaCatalog(spark, "s3lake").open_readonly, f"db.{name}", "main"
    ).reports:
        assert report.verdict == "proven", report


# ── what forbids it ──────────────────────────────────────────────────────────────────────────────


def test_later_rows_of_others_are_kept_unless_the_operator_discards_them(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    ends = batches(broker, spark, config, 2)
    columns = "_topic, _topic_partition, _offset, value"
    insert = f"INSERT INTO lake.db.{name} ({columns}) VALUES ('foreign', 0, 0, CAST('x' AS BINARY))"
    spark.sql(insert)
    with pytest.raises(IdentityMismatch, match="would lose 1 commit of others, as snapshot"):
        rewind(config, spark, "batch:0")
    assert len(lake.query(f"db.{name}")) == 41
    assert preview(config, spark, "batch:1").nothing, "nothing of it goes"
    plan = rewind(config, spark, "batch:0", discard_foreign=True)
    assert [lost.reason for lost in plan.choice.foreign] == ["append: 1 row added, 0 deleted"]
    assert offsets(lake, f"db.{name}") == below(ends[0])
    proven(config, spark)


@pytest.mark.long
def test_a_compaction_is_undone_and_nothing_is_lost_by_that(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    ends = batches(broker, spark, config, 3)
    spark.sql(
        f"CALL lake.system.rewrite_data_files(table => 'db.{name}', "
        "options => map('rewrite-all', 'true'))"
    )
    rewind(config, spark, "batch:1")
    assert offsets(lake, f"db.{name}") == below(ends[1])
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 60
    proven(config, spark)


@pytest.mark.long
def test_expired_snapshots_are_reported_with_the_earliest_cut_that_is_left(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    ends = batches(broker, spark, config, 4)
    spark.sql(
        f"CALL lake.system.expire_snapshots(table => 'db.{name}', retain_last => 3, "
        "older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    with pytest.raises(Expired, match=rf"snapshots of db\.{name} were expired") as refused:
        rewind(config, spark, "batch:0")
    assert "the earliest possible cut is --to batch:2" in refused.value.hint
    rewind(config, spark, "batch:2")
    assert offsets(lake, f"db.{name}") == below(ends[2])
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 80


@pytest.mark.long
def test_what_kafka_has_no_more_is_not_thrown_away(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    batches(broker, spark, config, 3)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([TopicPartition(name, 0, 12)]).values():
        future.result()
    with pytest.raises(Expired, match=rf"Kafka no longer has {name}\[0\] \[10, 12\)") as no:
        rewind(config, spark, "batch:0")
    assert "--to batch:1" in no.value.hint
    rewind(config, spark, "batch:1")
    assert len(offsets(lake, f"db.{name}")) == 40


@pytest.mark.long
def test_dead_letters_that_were_replayed_since_are_not_undone_by_halves(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(**many(name))
    for run_kinds in (("a", "odd"), ("a", "odd"), ("a", "a")):
        produce(broker.bootstrap, name, kinds(*run_kinds))
        catch_up(config, spark)
    mended = make_config(**{**many(name), "route": [{"field": "kind", "to": [f"db.{name}_a"]}]})
    assert dead_letters.replay(mended, spark, DeadLetterSelection(limit=1)).replayed == 1
    for to in ("batch:0", "batch:1"):
        with pytest.raises(Fatal, match="dead letters were replayed"):
            rewind(mended, spark, to)
    produce(broker.bootstrap, name, kinds("a"))
    catch_up(mended, spark)
    rewind(mended, spark, "batch:2")
    assert len(lake.query(f"db.{name}_a")) == 5, "four of the stream, one of the replay"
    catch_up(mended, spark)
    assert dead_letters.replay(mended, spark, DeadLetterSelection()).replayed == 1, (
        "the tag went along"
    )
    assert len(offsets(lake, f"db.{name}_a")) == 7
    all_proven(mended, spark, f"db.{name}_dead")


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_sink_is_fenced_and_its_staged_batches_are_gone(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    make_config: Make,
    monkeypatch: pytest.MonkeyPatch,
):
    create_topic(broker.bootstrap, name, 2)
    config = make_config()
    ends = batches(broker, spark, config, 2)
    steps = Steps(hold="staged")
    with running(config, spark, steps) as sink:
        produce(broker.bootstrap, name, numbered(20, 40), 2)
        assert steps.held.wait(WITHIN)
        plan = rewind(config, spark, "batch:0")
        assert plan.staged == 1
        steps.go.set()
        with pytest.raises(Fenced):
            sink.wait_until(Cut({part(name, 0): 10**6}), WITHIN)
    assert offsets(lake, f"db.{name}") == below(ends[0])
    monkeypatch.setattr("frazil.run._runs", {})
    catch_up(config, spark)
    assert assert_exact(lake, f"db.{name}", broker.bootstrap, name) == 60
    proven(config, spark)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "step",
    [
        "moved",
        *(
            pytest.param(step, marks=pytest.mark.long)
            for step in ("noted", "forked", "unstaged", "indexed")
        ),
    ],
)
def test_no_run_starts_from_half_a_rewind_and_the_next_one_finishes_it(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make, step: str
):
    create_topic(broker.bootstrap, name, 1)
    config = make_config(**many(name))
    for run_kinds in (("a", "b", "odd"), ("b", "x"), ("a", "x")):
        produce(broker.bootstrap, name, kinds(*run_kinds))
        catch_up(config, spark)

    def kill(reached: str, _: str) -> None:
        if reached == step:
            raise Killed

    with pytest.raises(Killed):
        rewind(config, spark, "batch:0", on_step=kill)
    with pytest.raises(Gap, match="a rewind to batch:0 is unfinished"):
        Sink(config).start(spark)
    with pytest.raises(Gap, match="a rewind to batch:0 is unfinished"):
        dead_letters.preview_replay(config, spark, DeadLetterSelection())
    with pytest.raises(ConfigError, match="a rewind to batch:0 is unfinished"):
        rewind(config, spark, "batch:1")
    assert rewind(config, spark, "batch:0").unfinished
    rows = {suffix: len(lake.query(f"db.{name}_{suffix}")) for suffix in ("a", "b", "of_x", "dead")}
    assert rows == {"a": 2, "b": 1, "of_x": 0, "dead": 1}
    catch_up(config, spark)
    rows = {suffix: len(lake.query(f"db.{name}_{suffix}")) for suffix in rows}
    assert rows == {"a": 4, "b": 2, "of_x": 2, "dead": 1}
    all_proven(config, spark, *(f"db.{name}_{suffix}" for suffix in rows))


@pytest.mark.long
def test_sinks_that_share_an_index_do_not_go_back_together(
    broker: Broker, spark: Any, lake: Lake, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 2)
    one = make_config()
    other = replace(
        one,
        sink=replace(one.sink, id=f"{name}_2", index_table=one.index_table),
        tables=(replace(one.tables[0], name=f"db.{name}_2"),),
    )
    for number in range(2):
        produce(broker.bootstrap, name, numbered(20, 20 * number), 2)
        catch_up(one, spark)
        catch_up(other, spark)
    rewind(one, spark, "batch:0")
    assert len(lake.query(f"db.{name}")) == 20
    rows = lake.query(one.index_table, "sink, count(*)", "GROUP BY 1 ORDER BY 1")
    assert rows == [(name, 2), (f"{name}_2", 4)]
    proven(other, spark)
    catch_up(other, spark)
    catch_up(one, spark)
    for config in (one, other):
        assert proven(config, spark).written == 40


# ── the table's side ─────────────────────────────────────────────────────────────────────────────


def test_references_move_together_or_not_at_all(spark: Any, name: str):
    spark.sql(f"CREATE TABLE lake.db.{name} (n INT)")
    for number in range(3):
        spark.sql(f"INSERT INTO lake.db.{name} VALUES ({number})")
    table = table_of(spark, f"db.{name}")
    third, second, first = [snapshot.id for snapshot in table.history("main")]
    table.tag("frazil/s", third, None)
    table.fork("side", first)
    spark.sql(f"INSERT INTO lake.db.{name} VALUES (3)")
    with pytest.raises(Exception, match="expected it at snapshot"):
        table.move({"main": second, "frazil/s": second}, expected={"main": third})
    table.refresh()
    newest = next(table.history("main")).id
    assert table.tags() == {"frazil/s": third}
    table.move(
        {"main": second, "frazil/s": second, "side": None, "frazil/new": first},
        expected={"main": newest, "side": first},
    )
    assert [snapshot.id for snapshot in table.history("main")] == [second, first]
    assert table.tags() == {"frazil/s": second, "frazil/new": first}
    assert next(table.history("side"), None) is None
    table.move({"main": None, "frazil/s": None}, expected={"main": second})
    assert next(table.history("main"), None) is None
    spark.sql(f"INSERT INTO lake.db.{name} VALUES (7)")
    table.refresh()
    (only,) = table.history("main")
    assert only.parent is None
    table.set_property("a", "b")
    table.remove_property("a")
    assert "a" not in table.properties


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_the_command_asks_says_and_does(
    broker: Broker,
    spark: Any,
    lake: Lake,
    name: str,
    write_toml: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    create_topic(broker.bootstrap, name, 2)
    path = write_toml()
    batches(broker, spark, load(path), 3)
    monkeypatch.setattr("frazil.spark.session.session", lambda *_, **__: spark)

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["frazil", "rewind", str(path), *arguments])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    assert command("--to", "batch:1")[0] == 2, "nobody said yes"
    assert command("--to", "soon", "--yes")[0] == 2
    assert command("--to", "batch:9", "--yes")[0] == 2
    code, out, _ = command("--to", "batch:1", "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["done"], plan["batch"], plan["batches"]) == (0, False, 1, 1)
    assert plan["tables"][0]["rows"] == 20
    assert len(lake.query(f"db.{name}")) == 60
    code, out, _ = command("--to", "batch:1", "--dry-run")
    assert code == 0
    assert "20 rows of 1 table, 1 batch of the index and 0 staged batches would be removed" in out
    code, out, _ = command("--to", "batch:1", "--yes", "--json")
    assert (code, json.loads(out)["done"]) == (0, True)
    assert len(lake.query(f"db.{name}")) == 40
    code, out, _ = command("--to", "batch:1", "--yes")
    assert code == 0
    assert "are at batch:1" in out
