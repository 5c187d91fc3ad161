"""Where an offset is, from rows of the index, ledgers and the bounds of files alone."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from frazil.accounting import RangeCounts
from frazil.cli.commands import app
from frazil.commit.batch_chain import entry_of
from frazil.commit.commit_queue import INDEX
from frazil.commit.protocol import TableCommitter
from frazil.config.model import Config, from_document
from frazil.errors import ConfigError, Expired
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger import index as offset_index
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range
from frazil.ops import locate
from frazil.ops.as_of import first
from frazil.ops.locate import LocateReport, of_sink, of_table
from frazil.render import json_values, show
from tests.fakes import FakeClock, FakeTable

P, Q = Partition("orders", 0), Partition("orders", 1)


class FakePlain(FakeTable):
    """A table in memory, as those who only read see it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"uuid-{name}")
        self.properties: dict[str, str] = {}
        self.data: list[DataFile] = []
        self.deletes = 0
        self.made = offset_index.rows([])

    def files(self, branch: str = "main") -> tuple[list[DataFile], int]:
        return self.data, self.deletes

    def having(self, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if name in self.made.column_names]

    def rows(
        self, columns: Sequence[str], where: Mapping[str, Collection[str]] | None = None
    ) -> pa.Table:
        rows = self.made
        for name, values in (where or {}).items():
            rows = rows.filter(pc.is_in(rows[name], pa.array(values, rows[name].type)))
        texts = pa.dictionary(pa.int32(), pa.string())  # as `ReadOnlyTable` has them
        for at, field in enumerate(rows.schema):
            if pa.types.is_large_string(field.type):
                rows = rows.set_column(at, field.name, rows[field.name].cast(texts))
        return rows.select(list(columns))


class World:
    """A sink `s` into `db.a` and `db.b`; batches are committed as the committer does it."""

    def __init__(self, *names: str, begin: int = 0, sink: str = "s") -> None:
        self.sink = sink
        self.tables = {name: FakePlain(name) for name in (*names, "db.index")}
        self.index = self.tables["db.index"]
        self.targets = {
            n: TableCommitter(t, "main", sink, 1, FakeClock()) for n, t in self.tables.items()
        }
        for target in self.targets.values():
            target.claim(lambda _: Cut({P: begin, Q: 0}))
        self.end = Cut({P: begin, Q: 0})
        self.number = 0

    def open(self, name: str) -> Any:
        return self.tables.get(name)

    def batch(
        self, *, indexed: bool = True, total: RangeCounts | None = None, **tallies: RangeCounts
    ) -> None:
        where = next(iter(tallies.values()), total)
        assert where is not None
        staged = [
            StagedTable(
                f"db.{name}", f"uuid-db.{name}", 0, (f"m{self.number}",), (), 1, 1, (tally,)
            )
            for name, tally in tallies.items()
        ]
        end = self.end.after([where.range])
        made = StagedBatch(
            self.sink,
            1,
            self.number,
            f"c{self.number}",
            self.end,
            end,
            {},
            "",
            0,
            0,
            tuple(staged),
            (total,) if total else (),
        )
        snapshots = {}
        for table in staged:
            target = self.targets[table.name]
            entry = replace(entry_of([made], table.name, 1, target.end), index="db.index")
            snapshots[table.name] = target.commit(table.manifests, entry)
            tally = table.tallies[0]
            if tally.written:
                low, high = tally.seen or (tally.range.start, tally.range.end - 1)
                self.tables[table.name].data.append(
                    DataFile(
                        f"/{table.name}/frazil-{self.sink}-1-{self.number}-x.parquet",
                        tally.written,
                        tally.range.partition,
                        (low, high),
                    )
                )
        if indexed:
            rows = offset_index.rows([(made, snapshots)])
            self.index.made = pa.concat_tables([self.index.made, rows])
            known = {name: table.uuid for name, table in self.tables.items() if name != "db.index"}
            entry = replace(entry_of([made], INDEX, 1), tables=known)
            self.targets["db.index"].commit([], entry)
        self.end = end
        self.number += 1

    @property
    def config(self) -> Config:
        names = [name for name in self.tables if name != "db.index"]
        several: dict[str, Any] = {"route": [{"to": names}]} if len(names) > 1 else {}
        return from_document(
            {
                "sink": {"id": self.sink, "topics": ["orders"], "index_table": "db.index"},
                "kafka": {"bootstrap.servers": "none"},
                "decode": {"format": "raw"},
                "table": [{"name": name} for name in names],
                **several,
            }
        )

    def ask(self, offset: int, where: Partition = P, table: str = "") -> LocateReport:
        return of_sink(self.config, self.open, where, offset, table)


def tally(
    start: int, end: int, written: int | None = None, where: Partition = P, **more: Any
) -> RangeCounts:
    count = end - start if written is None else written
    return RangeCounts(Range(where, start, end), count, **more)


def only(answer: LocateReport) -> tuple[locate.LocatedBatch, locate.TableHit]:
    (batch,) = answer.batches
    (place,) = batch.tables
    return batch, place


def shown(answer: LocateReport) -> str:
    out = io.StringIO()
    show(answer, Console(file=out, width=400))
    return out.getvalue()


def test_an_offset_is_in_its_batch_its_first_snapshot_and_the_files_whose_bounds_hold_it():
    world = World("db.a")
    for start in (0, 10, 20):
        world.batch(a=tally(start, start + 10, watermark=(1_000_000, 2_000_000)))
    answer = world.ask(14)
    batch, place = only(answer)
    assert answer.contained
    assert (batch.batch, batch.commit_id, batch.epoch, batch.range) == (
        1,
        "c1",
        1,
        Range(P, 10, 20),
    )
    second = [snapshot.id for snapshot in world.tables["db.a"].history("main")][1]
    assert (place.contains, place.snapshot, place.expired) == ("yes", second, False)
    assert place.files == ("/db.a/frazil-s-1-1-x.parquet",)
    assert place.sql == (
        f"SELECT * FROM lake.db.a VERSION AS OF {second} WHERE `_topic` = 'orders' AND "
        "`_topic_partition` = 0 AND `_offset` = 14"
    )
    values = json_values(answer)
    assert values["batches"][0]["tables"][0]["event_time_low"] == "1970-01-01T00:00:01+00:00"
    for word in ("batch 1 of sink s", "c1", "db.a: yes", place.sql, place.files[0]):
        assert word in shown(answer)


@pytest.mark.parametrize(
    ("offset", "where", "reason"),
    [
        (100, P, "not read yet: sink s is at 30"),
        (0, P, "before the beginning: sink s began at 10"),
        (5, Partition("orders", 7), "no sink reads orders[7]; read are orders[0], orders[1]"),
        (0, Q, "not read yet: sink s is at 0"),
    ],
)
def test_outside_of_every_range_it_is_said_why(offset: int, where: Partition, reason: str):
    world = World("db.a", begin=10)
    world.batch(a=tally(10, 20))
    world.batch(a=tally(20, 30))
    answer = world.ask(offset, where)
    assert not answer.contained
    assert answer.batches == ()
    assert answer.reason == reason
    assert reason in shown(answer)


def test_a_hole_in_the_index_is_filled_by_the_ledger():
    world = World("db.a")
    world.batch(a=tally(0, 10))
    world.batch(a=tally(10, 20), indexed=False)  # in the table, and not in the index yet
    batch, place = only(world.ask(15))
    assert (batch.found_in, batch.batch, batch.commit_id, place.contains) == (
        "ledger",
        1,
        "c1",
        "yes",
    )
    assert "by the ledger; not in the index" in shown(world.ask(15))
    world.tables["db.a"].expire()
    world.index.made = world.index.made.slice(0, 0)
    assert "no batch of the index has it" in world.ask(5).reason


def test_of_a_batch_with_several_fates_counts_and_bounds_say_as_much_as_they_can():
    world = World("db.a")
    world.batch(a=tally(0, 10, 8, rejected=2, seen=(0, 9)))
    world.batch(a=tally(10, 20, 4, invisible=6, seen=(10, 13)))
    world.batch(a=tally(20, 30, 0, skipped=10))
    _, mixed = only(world.ask(5))
    assert (mixed.contains, mixed.reason) == ("maybe", "of 10 offsets 8 written, 2 rejected")
    _, dense = only(world.ask(11))
    assert (dense.contains, dense.reason) == ("yes", "a live file has every offset of its bounds")
    _, beside = only(world.ask(18))
    assert (beside.contains, beside.files) == ("no", ())
    answer = world.ask(25)
    _, skipped = only(answer)
    assert (skipped.contains, skipped.reason, skipped.sql) == ("no", "of 10 offsets 10 skipped", "")
    assert not answer.contained
    assert "no table contains it" in shown(answer)


def test_of_many_tables_those_are_named_that_the_batch_wrote_to():
    world = World("db.a", "db.b", "db.dead")
    world.batch(
        a=tally(0, 10, 4, skipped=6, seen=(0, 9)),
        b=tally(0, 10, 5, skipped=5, seen=(1, 8)),
        dead=tally(0, 10, 1, skipped=9, seen=(3, 3)),
        total=tally(0, 10, 9, rejected=1),
    )
    world.tables["db.dead"].properties["frazil.metadata-columns"] = (
        "topic,partition,offset,timestamp"
    )
    answer = world.ask(3)
    (batch,) = answer.batches
    assert {place.table: place.contains for place in batch.tables} == {
        "db.a": "maybe",
        "db.b": "maybe",
        "db.dead": "yes",
    }
    assert batch.counts is not None
    assert (batch.counts.written, batch.counts.rejected) == (9, 1)
    assert batch.tables[2].sql.endswith("`topic` = 'orders' AND `partition` = 0 AND `offset` = 3")
    _, alone = only(world.ask(3, table="db.b"))
    assert alone.table == "db.b"
    with pytest.raises(ConfigError, match=r"in table db\.c: sink s fills db\.a, db\.b, db\.dead"):
        world.ask(3, table="db.c")


def test_a_dead_letter_that_was_replayed_may_be_where_the_batch_wrote_nothing():
    world = World("db.a", "db.dead")
    world.batch(dead=tally(0, 10, 1, skipped=9, seen=(3, 3)), total=tally(0, 10, 9, rejected=1))
    assert [p.table for p in world.ask(3).batches[0].tables] == ["db.dead"]
    world.tables["db.a"].data.append(DataFile("/db.a/frazil-s.replay-1-0-x.parquet", 2, P, (2, 8)))
    places = {place.table: place for place in world.ask(3).batches[0].tables}
    assert places["db.a"].contains == "maybe"
    assert "dead letters were replayed around it" in places["db.a"].reason


def test_rows_of_several_offsets_are_reported_as_merged():
    world = World("db.a")
    world.batch(a=tally(0, 10, 0, merged=10))
    answer = world.ask(4)
    _, place = only(answer)
    assert place.contains == "merged"
    assert answer.contained
    assert "WHERE" not in place.sql


def test_deleted_rows_make_it_uncertain_and_files_that_are_gone_do_not():
    world = World("db.a")
    world.batch(a=tally(0, 10))
    world.tables["db.a"].deletes = 2
    assert only(world.ask(4))[1].contains == "maybe"
    world.tables["db.a"].data = []
    _, place = only(world.ask(4))
    assert place.contains == "no"
    assert "no live file's bounds include it" in place.reason


def test_an_expired_snapshot_is_said_to_be_and_the_oldest_one_left_that_has_it_is_named():
    world = World("db.a")
    for start in range(0, 50, 10):
        world.batch(a=tally(start, start + 10))
    table = world.tables["db.a"]
    table.expire(keep=2)
    newest, oldest = [snapshot.id for snapshot in table.history("main")]
    _, place = only(world.ask(5))
    assert (place.expired, place.oldest_snapshot) == (True, oldest)
    assert f"VERSION AS OF {oldest} " in place.sql
    assert f"which was expired; the oldest remaining snapshot with it is {oldest}" in shown(
        world.ask(5)
    )
    _, newest_place = only(world.ask(45))
    assert (newest_place.expired, newest_place.snapshot) == (False, newest)


def test_a_table_by_its_name_finds_the_index_in_its_ledger():
    world = World("db.a")
    world.batch(a=tally(0, 10))
    world.batch(a=tally(10, 20))
    answer = of_table("prod", world.open, "db.a", P, 12)
    batch, place = only(answer)
    assert (batch.found_in, batch.sink, batch.batch) == ("index", "s", 1)
    assert place.sql.startswith("SELECT * FROM prod.db.a VERSION AS OF ")
    del world.tables["db.index"]
    batch, _ = only(of_table("prod", world.open, "db.a", P, 12))
    assert batch.found_in == "ledger"
    with pytest.raises(ConfigError, match="does not exist"):
        of_table("prod", world.open, "db.z", P, 12)
    world.tables["db.z"] = FakePlain("db.z")
    with pytest.raises(ConfigError, match="was written by Frazil"):
        of_table("prod", world.open, "db.z", P, 12)


# ── as of ────────────────────────────────────────────────────────────────────────────────────────


def history(*spans: tuple[int, int], sink: str = "s") -> tuple[list[Snapshot], list[int]]:
    """Newest first; and the ids, oldest first."""
    world = World("db.a", begin=spans[0][0], sink=sink)
    for start, end in spans:
        world.batch(a=tally(start, end))
    snapshots = list(world.tables["db.a"].history("main"))
    return snapshots, [snapshot.id for snapshot in snapshots][::-1]


@pytest.mark.parametrize(("offset", "nth"), [(1, 1), (10, 1), (11, 2), (20, 2), (30, 3)])
def test_the_first_snapshot_that_has_everything_below_a_cut(offset: int, nth: int):
    """(Of the ids, the first is the claim's.)"""
    snapshots, ids = history((0, 10), (10, 20), (20, 30))
    snapshot = first("db.a", snapshots, Cut({P: offset}))
    assert snapshot is not None
    assert snapshot.id == ids[nth]


def test_commits_of_others_in_between_are_none_of_it():
    world = World("db.a")
    world.batch(a=tally(0, 10))
    world.tables["db.a"].add(["x"], {})
    world.batch(a=tally(10, 20))
    world.tables["db.a"].add(["y"], {})
    snapshots = list(world.tables["db.a"].history("main"))
    for offset, at in ((10, 3), (11, 1)):
        snapshot = first("db.a", snapshots, Cut({P: offset}))
        assert snapshot == snapshots[at]


def test_what_is_not_there_yet_is_none():
    snapshots, _ = history((0, 10))
    assert first("db.a", snapshots, Cut({P: 11})) is None
    assert first("db.a", snapshots, Cut({Partition("other", 0): 1})) is None
    assert first("db.a", [], Cut({P: 1})) is None


def test_what_lies_before_the_beginning_is_refused():
    snapshots, _ = history((100, 110))
    with pytest.raises(ConfigError, match=r"its ledger begins at orders\[0\]@100"):
        first("db.a", snapshots, Cut({P: 50}))


def test_what_was_expired_is_refused_with_the_oldest_one_left():
    snapshots, ids = history((0, 10), (10, 20), (20, 30))
    with pytest.raises(Expired) as refused:
        first("db.a", snapshots[:1], Cut({P: 15}))
    assert f"VERSION AS OF {ids[3]}" in refused.value.hint
    assert first("db.a", snapshots[:1], Cut({P: 25})) == snapshots[0]


def test_of_several_sinks_one_must_be_named():
    own, _ = history((0, 10))
    foreign, _ = history((0, 10), sink="other")

    with pytest.raises(ConfigError, match="sinks other, s write to table"):
        first("db.a", [*own, *foreign], Cut({P: 5}))
    assert first("db.a", [*own, *foreign], Cut({P: 5}), "s") == own[0]


@pytest.mark.parametrize("args", [("0", str(2**63)), (str(2**31), "0"), ("0", "9" * 400)])
def test_a_partition_or_offset_that_kafka_cannot_have_is_a_usage_error(args: tuple[str, str]):
    result = CliRunner().invoke(app, ["locate", "sink.toml", "orders", *args])
    assert result.exit_code == 2
    assert "Invalid value for" in result.output


@pytest.mark.parametrize("indexed", [True, False])
def test_event_times_beyond_the_calendar_are_shown_as_numbers(indexed: bool):
    world = World("db.a")
    world.batch(a=tally(0, 10))
    world.batch(a=tally(10, 20, watermark=(1_000_000, 1_700_000_000_000_000_000)), indexed=indexed)
    answer = world.ask(14)
    [place] = json_values(answer)["batches"][0]["tables"]
    assert place["event_time_low"] == "1970-01-01T00:00:01+00:00"
    assert place["event_time_high"] == "1700000000000000000 µs since 1970"
    assert "to 1700000000000000000 µs since 1970" in shown(answer)
