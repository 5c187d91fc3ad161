"""Other people's hands on a sink's table, between stage and commit and between batches: the sink
goes on, or stops with the right words; no row is lost, none is there twice, and theirs stay."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from frazil.config.model import Config
from frazil.errors import Expired, FrazilError, Gap, IdentityMismatch, Unavailable
from frazil.ops import offsets
from frazil.sink import Sink
from frazil.steps import Step
from frazil.testing.datagen import create_topic
from frazil.testing.kafka import Broker
from tests.oracle import Lake, assert_once
from tests.system.streams import WITHIN, catch_up, part, produce, reports

Make = Callable[..., Config]
FAR = "TIMESTAMP '2100-01-01 00:00:00'"


class Gate:
    """Holds the stream once its next batch is staged."""

    def __init__(self) -> None:
        self.armed = False
        self.held, self.go = threading.Event(), threading.Event()

    def __call__(self, step: Step) -> None:
        if step.name == "staged" and self.armed:
            self.armed = False
            self.held.set()
            assert self.go.wait(WITHIN), "held and never let go"

    def arm(self) -> None:
        self.held.clear()
        self.go.clear()
        self.armed = True


@dataclass
class Lane:
    """A topic of changes to a few keys, the table they go to, and what others put there."""

    broker: Broker
    lake: Lake
    spark: Any
    name: str
    upserts: bool
    sent: list[dict[str, int]] = field(default_factory=list)
    foreign: dict[int, int] = field(default_factory=dict)
    turn: int = 0

    @property
    def table(self) -> str:
        return f"db.{self.name}"

    def sql(self, text: str) -> list[Any]:
        return list(self.spark.sql(text.format(t=f"lake.{self.table}", n=self.table)).collect())

    def send(self) -> None:
        """The same keys each time."""
        rows = [{"id": n, "v": len(self.sent) + n} for n in range(6)]
        produce(self.broker.bootstrap, self.name, [json.dumps(row).encode() for row in rows])
        self.sent += rows

    def put(self) -> None:
        """A row of somebody else's, of a key of its own."""
        self.turn += 1
        self.foreign[-self.turn] = self.turn
        values = f"{-self.turn}, {self.turn}, 'by hand', 0, {self.turn}, TIMESTAMP '2026-01-01'"
        self.sql(
            "INSERT INTO {t} (id, v, _topic, _topic_partition, _offset, _timestamp) "
            f"VALUES ({values})"
        )

    def exact(self) -> None:
        rows = self.lake.query(self.table, "id, v, _topic, _offset")
        foreign_rows = {i: v for i, v, topic, _ in rows if topic == "by hand"}
        own_rows = [(i, v, offset) for i, v, topic, offset in rows if topic == self.name]
        assert len(foreign_rows) + len(own_rows) == len(rows)
        assert foreign_rows == self.foreign
        if self.upserts:
            assert_once((i,) for i, _, _ in own_rows)
            assert {i: v for i, v, _ in own_rows} == {row["id"]: row["v"] for row in self.sent}
        else:
            assert_once((offset,) for _, _, offset in own_rows)
            assert {offset: {"id": i, "v": v} for i, v, offset in own_rows} == dict(
                enumerate(self.sent)
            )


# ── hands that a stream outlives ─────────────────────────────────────────────────────────────────


def overwrite(lane: Lane) -> None:
    for key in lane.foreign:
        lane.foreign[key] += 100
    known = "id, v, _topic, _topic_partition, _offset, _timestamp"
    values = ", ".join(
        f"({i}, {v}, 'by hand', 0, {-i}, TIMESTAMP '2026-01-01')" for i, v in lane.foreign.items()
    )
    columns = [
        (f.name, f.dataType.simpleString()) for f in lane.spark.table(f"lake.{lane.table}").schema
    ]
    chosen = ", ".join(
        f"CAST({name if name in known else 'NULL'} AS {kind}) AS {name}" for name, kind in columns
    )
    lane.sql(
        "INSERT INTO {t} REPLACE WHERE _topic = 'by hand' "
        f"SELECT {chosen} FROM VALUES {values} AS t({known})"
    )


def delete(lane: Lane) -> None:
    gone = min(lane.foreign)
    del lane.foreign[gone]
    lane.sql(f"DELETE FROM {{t}} WHERE id = {gone}")


def compact(lane: Lane) -> None:
    lane.sql(
        "CALL lake.system.rewrite_data_files(table => '{n}', "
        "options => map('min-input-files', '2', 'rewrite-all', 'true'))"
    )


def rewrite_manifests(lane: Lane) -> None:
    lane.sql("CALL lake.system.rewrite_manifests(table => '{n}')")


def compact_and_expire(lane: Lane) -> None:
    """H4: no snapshot of the sink's is left but the one its tag holds."""
    compact(lane)
    lane.sql(
        f"CALL lake.system.expire_snapshots(table => '{{n}}', older_than => {FAR}, "
        "retain_last => 1)"
    )


def add_a_column(lane: Lane) -> None:
    lane.turn += 1
    lane.sql(f"ALTER TABLE {{t}} ADD COLUMN extra{lane.turn} STRING")


def drop_a_column(lane: Lane) -> None:
    [name, *_] = [
        column
        for column in lane.spark.table(f"lake.{lane.table}").columns
        if column.startswith("extra")
    ]
    lane.sql(f"ALTER TABLE {{t}} DROP COLUMN {name}")


def evolve_the_spec(lane: Lane) -> None:
    lane.turn += 1
    lane.sql(f"ALTER TABLE {{t}} ADD PARTITION FIELD bucket({2 + lane.turn}, id)")


GOES_ON = (
    Lane.put,
    overwrite,
    Lane.put,
    delete,
    compact,
    rewrite_manifests,
    compact_and_expire,
    add_a_column,
    add_a_column,
    drop_a_column,
    evolve_the_spec,
)


@pytest.mark.parametrize("mode", ["upsert", pytest.param("append", marks=pytest.mark.long)])
def test_a_stream_goes_on_and_nothing_is_lost_or_doubled(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, mode: str
):
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, mode == "upsert")
    keyed = {"mode": "upsert", "key": ["id"], "compact_after_commits": 0} if lane.upserts else {}
    config = make_config(decode={"format": "json"}, table=keyed)
    lane.send()
    gate = Gate()
    sink = Sink(config, on_step=gate).start(spark)
    try:
        assert sink.wait_until(sink.ends(), WITHIN)
        lane.put()
        lane.put()
        for hand in GOES_ON:
            gate.arm()
            lane.send()
            assert gate.held.wait(WITHIN), f"{hand.__name__}: never staged"
            hand(lane)
            gate.go.set()
            assert sink.wait_until({part(name, 0): len(lane.sent)}, WITHIN), hand.__name__
            lane.exact()
            if hand not in (drop_a_column, delete):
                hand(lane)  # and between two batches
        lane.send()
        assert sink.wait_until({part(name, 0): len(lane.sent)}, WITHIN)
    finally:
        gate.go.set()
        sink.stop()
    lane.exact()
    lane.send()
    catch_up(config, spark)  # by the spec and schema that others have made of it
    lane.exact()
    worst = {report.table: report.verdict for report in reports(config, spark)}
    assert worst[config.index_table] == "proven"
    # Of rows that others brought, and took away again, metadata does not tell everything.
    assert worst[f"db.{name}"] in ("proven", "cannot_tell", "unaccounted"), worst


def test_rows_deleted_by_others_stay_deleted_and_the_audit_reports_it(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, False)
    config = make_config(decode={"format": "json"})
    lane.send()
    catch_up(config, spark)
    lane.sql("DELETE FROM {t} WHERE _offset = 3")
    lane.send()
    catch_up(config, spark)
    assert sorted(o for (o,) in lake.query(f"db.{name}", "_offset")) == [0, 1, 2, *range(4, 12)]
    [report] = [report for report in reports(config, spark) if report.table == f"db.{name}"]
    assert report.verdict in ("gap", "unaccounted")


def test_a_column_of_the_records_that_is_dropped_comes_back_and_no_row_is_lost(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """What was staged for it goes with it; what comes later needs it again, in the same run."""
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, False)
    config = make_config(decode={"format": "json"})
    lane.send()
    gate = Gate()
    sink = Sink(config, on_step=gate).start(spark)
    try:
        assert sink.wait_until(sink.ends(), WITHIN)
        gate.arm()
        lane.send()
        assert gate.held.wait(WITHIN)
        lane.sql("ALTER TABLE {t} DROP COLUMN v")
        gate.go.set()
        assert sink.wait_until({part(name, 0): 12}, WITHIN)
        assert sorted(o for (o,) in lake.query(f"db.{name}", "_offset")) == list(range(12))
        lane.send()
        assert sink.wait_until({part(name, 0): 18}, WITHIN)
    finally:
        gate.go.set()
        sink.stop()
    rows = lake.query(f"db.{name}", "_offset, v", "ORDER BY ALL")
    assert [offset for offset, _ in rows] == list(range(18))
    assert [v for _, v in rows[12:]] == [row["v"] for row in lane.sent[12:]]


# ── hands that stop it ───────────────────────────────────────────────────────────────────────────


def newest(lane: Lane, branch: str) -> tuple[int, int]:
    """The branch's snapshot now, and the first that there ever was."""
    [(now,)] = lane.sql(f"SELECT snapshot_id FROM {{t}}.refs WHERE name = '{branch}'")
    [(first,)] = lane.sql("SELECT snapshot_id FROM {t}.snapshots ORDER BY committed_at LIMIT 1")
    return now, first


def roll_back(lane: Lane, branch: str) -> Callable[[], object]:
    now, first = newest(lane, branch)
    lane.sql(f"CALL lake.system.rollback_to_snapshot('{{n}}', {first})")
    return lambda: lane.sql(f"CALL lake.system.set_current_snapshot('{{n}}', {now})")


def replace_the_branch(lane: Lane, branch: str) -> Callable[[], object]:
    now, first = newest(lane, branch)
    lane.sql(f"ALTER TABLE {{t}} REPLACE BRANCH `{branch}` AS OF VERSION {first}")
    return lambda: lane.sql(f"ALTER TABLE {{t}} REPLACE BRANCH `{branch}` AS OF VERSION {now}")


def drop_and_make_again(lane: Lane, branch: str) -> Callable[[], object]:
    location = lane.lake.metadata_file(lane.table)
    lane.sql("DROP TABLE {t}")
    lane.sql(
        "CREATE TABLE {t} (id BIGINT, v BIGINT, _topic STRING NOT NULL, _topic_partition INT "
        "NOT NULL, _offset BIGINT NOT NULL, _timestamp TIMESTAMP) USING iceberg"
    )

    def restore() -> None:
        lane.sql("DROP TABLE {t}")
        lane.sql(f"CALL lake.system.register_table('{{n}}', '{location}')")

    return restore


@pytest.mark.parametrize("mode", ["append", pytest.param("upsert", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("hand", "kind", "words"),
    [
        (roll_back, Gap, "roll"),
        (replace_the_branch, Gap, "roll"),
        (drop_and_make_again, IdentityMismatch, "dropped and recreated"),
    ],
)
def test_a_stream_stops_with_the_right_error_and_continues_after_the_fix(
    broker: Broker,
    lake: Lake,
    spark: Any,
    name: str,
    make_config: Make,
    mode: str,
    hand: Callable[[Lane, str], Callable[[], object]],
    kind: type[FrazilError],
    words: str,
):
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, mode == "upsert")
    keyed = {"mode": "upsert", "key": ["id"], "compact_after_commits": 0} if lane.upserts else {}
    config = make_config(decode={"format": "json"}, table=keyed)
    for _ in range(2):
        lane.send()
        catch_up(config, spark)
    gate = Gate()
    sink = Sink(config, on_step=gate).start(spark)
    try:
        gate.arm()
        lane.send()
        assert gate.held.wait(WITHIN)
        mend = hand(lane, "main")
        gate.go.set()
        with pytest.raises(kind) as caught:
            sink.wait_until({part(name, 0): len(lane.sent)}, WITHIN)
        assert words in f"{caught.value}", caught.value
    finally:
        gate.go.set()
        sink.stop()
    with pytest.raises(kind) as caught:  # and so says the next run
        Sink(config).start(spark)
    assert words in f"{caught.value}", caught.value
    mend()
    lane.send()
    catch_up(config, spark)
    lane.exact()
    verdicts = {report.table: report.verdict for report in reports(config, spark)}
    assert set(verdicts.values()) == {"proven"}, verdicts


# ── a branch that was moved, and what would tell of it expired ───────────────────────────────────


def hide(lane: Lane) -> None:
    """Two commits on top of what is there, and all before them expired."""
    lane.put()
    compact(lane)
    lane.put()
    lane.sql(
        f"CALL lake.system.expire_snapshots(table => '{{n}}', older_than => {FAR}, "
        "retain_last => 1)"
    )


def forget_earlier_metadata(lane: Lane) -> None:
    newest = Path(lane.lake.metadata_file(lane.table))
    for path in newest.parent.glob("*.metadata.json"):
        if path != newest:
            path.unlink()


@pytest.mark.parametrize(
    ("mode", "evident"),
    [
        ("append", True),
        ("upsert", False),
        pytest.param("append", False, marks=pytest.mark.long),
        pytest.param("upsert", True, marks=pytest.mark.long),
    ],
)
def test_a_rollback_that_others_commit_over_and_expire_stops_the_sink_and_nothing_else_does(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, mode: str, evident: bool
):
    """`evident`: from earlier metadata files. Without them, nothing shows what the table holds."""
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, mode == "upsert")
    keyed = {"mode": "upsert", "key": ["id"], "compact_after_commits": 0} if lane.upserts else {}
    config = make_config(decode={"format": "json"}, table=keyed)
    lane.send()
    catch_up(config, spark)
    hide(lane)  # ordinary maintenance: it goes on
    lane.send()
    catch_up(config, spark)
    lane.exact()
    [(before,)] = lane.sql("SELECT snapshot_id FROM {t}.history ORDER BY made_current_at LIMIT 1")
    lane.sql(f"CALL lake.system.set_current_snapshot('{{n}}', {before})")
    hide(lane)
    if not evident:
        forget_earlier_metadata(lane)
    error, words = (Gap, r"\[6, 12\)") if evident else (Expired, "cannot prove")
    with pytest.raises(error, match=words):
        Sink(config).start(spark)
    lane.sql(f"CALL lake.system.set_current_snapshot(table => '{{n}}', ref => 'frazil/{name}')")
    lane.foreign = dict(list(lane.foreign.items())[:2])  # those that came before it
    lane.send()
    catch_up(config, spark)
    lane.exact()


def test_a_person_who_knows_what_a_table_holds_lets_the_sink_go_on(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, False)
    config = make_config(decode={"format": "json"})
    lane.send()
    catch_up(config, spark)
    hide(lane)
    forget_earlier_metadata(lane)
    with pytest.raises(Expired, match="cannot prove that table"):
        Sink(config).start(spark)
    asked = offsets.confirm(config, spark, lane.table, None)
    assert (asked.confirmable, asked.applied, asked.up_to.nested()) == (
        True,
        False,
        {name: {"0": 6}},
    )
    note = offsets.operator_note("confirm", "counted", "ops")
    assert offsets.confirm(config, spark, lane.table, note).applied
    assert not offsets.confirm(config, spark, lane.table, None).confirmable
    lane.send()
    catch_up(config, spark)
    lane.exact()


# ── files that are staged, and that somebody takes for orphans ───────────────────────────────────


def leave_staged(config: Config, spark: Any) -> None:
    """A run that ends between stage and commit."""
    staged = threading.Event()

    def away(step: Step) -> None:
        if step.name == "commit":
            staged.set()
            raise Unavailable("cannot commit: 503")

    sink = Sink(config, on_step=away).start(spark)
    try:
        assert staged.wait(WITHIN)
    finally:
        sink.stop(0)


@pytest.mark.parametrize(
    "which",
    ["data/*.parquet", pytest.param("metadata/frazil-*.avro", marks=pytest.mark.long)],
)
def test_staged_files_that_are_gone_are_read_again_and_never_committed(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make, which: str
):
    """In an upsert table: the file of deletes alone is missing."""
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, upserts=True)
    keyed = {"mode": "upsert", "key": ["id"], "compact_after_commits": 0}
    config = make_config(decode={"format": "json"}, table=keyed)
    lane.send()
    catch_up(config, spark)
    folder = Path(lake.metadata_file(lane.table)).parents[1]
    before = set(folder.glob(which))
    lane.send()
    leave_staged(config, spark)
    new = sorted(set(folder.glob(which)) - before, key=lambda path: path.stat().st_size)
    new[0].unlink()
    catch_up(config, spark)
    lane.exact()


def test_staged_files_that_are_gone_and_that_kafka_lacks_stop_the_sink_with_the_ranges(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, False)
    config = make_config(decode={"format": "json"})
    lane.send()
    catch_up(config, spark)
    folder = Path(lake.metadata_file(lane.table)).parents[1]
    before = set(folder.glob("data/*.parquet"))
    lane.send()
    leave_staged(config, spark)
    for path in set(folder.glob("data/*.parquet")) - before:
        path.unlink()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for answer in admin.delete_records([TopicPartition(name, 0, 12)]).values():
        answer.result(WITHIN)
    with pytest.raises(
        Expired, match=r"\[6, 12\).*files of a batch that was staged there are missing"
    ):
        Sink(config).start(spark)
    wanted = offsets.accept_loss([f"{name}:0:6..12"])
    plan = offsets.preview(config, spark, wanted)
    offsets.apply(config, spark, plan, offsets.operator_note("accept-loss", "an orphan job", "ops"))
    lane.send()
    catch_up(config, spark)
    left = sorted(offset for (offset,) in lake.query(lane.table, "_offset"))
    assert left == [*range(6), *range(12, 18)]


# ── a table that is put back to older metadata ───────────────────────────────────────────────────


def test_one_of_several_tables_that_is_put_back_to_older_metadata_is_seen(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """Its ledger and its tag go back together: the index has rows of it that it lacks."""
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, False)
    config = make_config(decode={"format": "json"}, dead_letters={"table": f"db.{name}_dead"})
    lane.send()
    catch_up(config, spark)
    older = lake.metadata_file(lane.table)
    lane.send()
    catch_up(config, spark)
    newest = lake.metadata_file(lane.table)

    def restore(metadata: str) -> None:
        lane.spark.sql(f"DROP TABLE lake.{lane.table}")  # without PURGE: the files stay
        lane.sql(f"CALL lake.system.register_table('{{n}}', '{metadata}')")

    restore(older)
    lane.send()
    catch_up(config, spark)  # it waits, and its new records can be replayed
    dead_letters = lake.query(f"{lane.table}_dead", "message")
    assert len(dead_letters) == 6
    assert "was rolled back; the index records" in dead_letters[0][0]
    assert f"{name}[0] [6, 12)" in dead_letters[0][0]
    assert sorted(o for (o,) in lake.query(lane.table, "_offset")) == [*range(6)]
    restore(newest)
    lane.send()
    catch_up(config, spark)
    offsets = sorted(o for (o,) in lake.query(lane.table, "_offset"))
    assert offsets == [*range(12), *range(18, 24)]


def test_a_sink_may_come_to_a_table_that_is_old_and_whose_history_was_expired(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    create_topic(broker.bootstrap, name, 1)
    lane = Lane(broker, lake, spark, name, False)
    lane.sql(
        "CREATE TABLE {t} (id BIGINT, v BIGINT, _topic STRING, _topic_partition INT, "
        "_offset BIGINT, _timestamp TIMESTAMP) USING iceberg"
    )
    hide(lane)
    forget_earlier_metadata(lane)
    lane.send()
    catch_up(make_config(decode={"format": "json"}), spark)
    lane.exact()


def test_a_table_that_lost_index_tag_and_entries_is_not_filled_again_from_the_start(
    broker: Broker, lake: Lake, spark: Any, name: str, make_config: Make
):
    """Somebody else made it, its history was expired before, and nothing is left of the ledger but
    a property."""
    test_a_sink_may_come_to_a_table_that_is_old_and_whose_history_was_expired(
        broker, lake, spark, name, make_config
    )
    lane, config = Lane(broker, lake, spark, name, False), make_config(decode={"format": "json"})
    lane.sql(f"DROP TABLE lake.{config.index_table}")
    lane.sql(f"ALTER TABLE {{t}} DROP TAG `frazil/{name}`")
    hide(lane)
    forget_earlier_metadata(lane)
    with pytest.raises(Expired, match="their position is unknown"):
        Sink(config).start(spark)
    assert not spark.catalog.tableExists(f"lake.{config.index_table}"), "an old one may come back"
    # Who starts again on purpose says so.
    lane.sql(f"DELETE FROM {{t}} WHERE _topic = '{name}'")
    lane.sql(f"ALTER TABLE {{t}} UNSET TBLPROPERTIES ('frazil.filled-by.{name}')")
    catch_up(config, spark)
    assert sorted(o for (o,) in lake.query(lane.table, "_offset", f"WHERE _topic = '{name}'")) == [
        *range(6)
    ]
