from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from frazil.commit.protocol import TableCommitter
from frazil.errors import ConfigError, Expired, IdentityMismatch, Unavailable
from frazil.iceberg import foreign_commits, maintenance_tasks
from frazil.iceberg.foreign_commits import ForeignCommits
from frazil.iceberg.live_files import refuse_shared, spellings
from frazil.iceberg.maintenance_tasks import (
    CREATED_BY,
    TABLE_AT_ONCE,
    TABLE_KEPT,
    ExpireSnapshots,
    SnapshotRetention,
    abandoned,
    advice,
    orphan_files,
    retention,
)
from frazil.iceberg.table import DataFile
from frazil.ledger import index
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import BATCHES, Cut, Partition
from tests.fakes import FakeClock, FakeTable
from tests.unit.test_stage import batch


def name(epoch: int, number: int, sink: str = "s", end: str = ".parquet") -> str:
    return f"/lake/t/data/day=1/frazil-{sink}-{epoch}-{number}-{uuid4()}{end}"


def test_only_files_of_older_runs_that_nothing_refers_to_are_left_over():
    dead, manifest = name(1, 4), name(1, 4, end="-m0.avro")
    live, staged, present = name(1, 3), name(2, 5), name(3, 6)
    other, foreign, near = (
        name(1, 4, sink="s2"),
        "/lake/t/data/part-0.parquet",
        name(1, 4, sink="s-1"),
    )
    leftovers = orphan_files(
        [dead, manifest, live, staged, present, other, foreign, near],
        sink="s",
        epoch=3,
        referenced=[f"file:{live}"],
        staged=[batch(epoch=2, number=5)],
    )
    assert leftovers == [dead, manifest]


def test_a_local_path_is_the_same_however_it_is_written():
    path = name(1, 1)
    for spelled in (path, f"file:{path}", f"file://{path}"):
        assert (
            orphan_files([f"file:{path}"], sink="s", epoch=2, referenced=[spelled], staged=[]) == []
        )


SAME = [
    ("s3://b/k/f", "s3a://b/k/f"),
    ("s3n://b/k/f", "s3a://b/k/f"),
    ("S3A://b/k/f", "s3://b/k/f"),
    ("s3://b/k/f", "s3://b//k/f"),
    ("abfss://c@a/k/f", "abfs://c@a/k/f"),
    ("/k/f", "file:/k/f"),
    ("file:///k/f", "FILE:/k/f"),
    ("file://localhost/k/f", "/k/f"),
    ("file:////k//f", "/k/f"),
    ("s3://b/d=a%2Fb/f", "s3://b/d=a/b/f"),
    ("s3://b/a b/f", "s3a://b/a%20b/f"),
    ("hdfs://nn:8020/k/f", "hdfs://nn:8020/k/f"),
]
OTHER = [
    ("s3://b/k/f", "s3://c/k/f"),
    ("s3://b/k/f", "gs://b/k/f"),
    ("hdfs://nn/k/f", "hdfs:/k/f"),
    ("hdfs://nn/k/f", "hdfs://standby/k/f"),
    ("hdfs:/k/f", "/k/f"),
    ("s3://b/k/f", "file:/k/f"),
]


@pytest.mark.parametrize(("listed", "referred"), SAME)
def test_a_live_file_is_never_left_over_however_it_is_spelled(listed: str, referred: str):
    own = f"frazil-s-1-4-{uuid4()}.parquet"
    for one, other in ((listed, referred), (referred, listed)):
        paths = [f"{one[:-1]}{own}"]
        assert (
            orphan_files(paths, sink="s", epoch=3, referenced=[f"{other[:-1]}{own}"], staged=[])
            == []
        )
        lists = [f"{one[:-1]}snap-1-1-{uuid4()}.avro"]
        assert abandoned(lists, [other[:-1] + lists[0].rpartition("/")[2]]) == []
    assert set(spellings(listed)) >= {listed}


@pytest.mark.parametrize(("listed", "referred"), OTHER)
def test_the_same_path_under_another_prefix_stops_the_command(listed: str, referred: str):
    own = f"frazil-s-1-4-{uuid4()}.parquet"
    for one, other in ((listed, referred), (referred, listed)):
        with pytest.raises(IdentityMismatch, match="under another prefix") as caught:
            orphan_files(
                [f"{one[:-1]}{own}"],
                sink="s",
                epoch=3,
                referenced=[f"{other[:-1]}{own}"],
                staged=[],
            )
        assert "nothing was removed" in caught.value.hint


def test_a_dead_file_is_left_over_beside_live_ones_of_other_spellings():
    dead, live = (f"s3://b/k/frazil-s-1-4-{uuid4()}.parquet" for _ in range(2))
    referenced = [live.replace("s3:", "s3a:")]
    assert orphan_files([dead, live], sink="s", epoch=3, referenced=referenced, staged=[]) == [dead]


def test_the_other_spellings_of_a_path_are_asked_for():
    assert set(spellings("s3a://b/k")) == {"s3a://b/k", "s3://b/k", "s3n://b/k"}
    assert set(spellings("/k")) == {"/k", "file:/k", "file:///k"}
    assert set(spellings("file:/k")) == {"/k", "file:/k", "file:///k"}
    assert spellings("gs://b/k") == ["gs://b/k"]


@pytest.mark.parametrize("value", ["false", "FALSE", " False "])
def test_files_of_a_table_without_garbage_collection_are_refused(value: str):
    with pytest.raises(ConfigError, match=r"gc\.enabled"):
        refuse_shared("db.t", {"gc.enabled": value})
    refuse_shared("db.t", {"gc.enabled": "true"})
    refuse_shared("db.t", {})


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────

P = Partition("t", 0)
OLD = "/data/replaced.parquet"


class Aging(FakeTable):
    """Its snapshots are as old as they can be; each needs its own list, all of them one file."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable = 0
        self.live_files = {"/data/live.parquet"}
        #: snapshot → the data files that it brought
        self.brought: dict[int, list[DataFile]] = {}
        #: what happened to it, in its order
        self.story: list[str] = []
        self.read_only = False

    @property
    def readonly(self) -> Aging:
        return self

    def added(self, snapshot_id: int) -> list[DataFile]:
        if snapshot_id not in self.brought:
            raise Expired(f"cannot read snapshot {snapshot_id}: it does not exist")
        return self.brought[snapshot_id]

    def set_property(self, key: str, value: str) -> None:
        if self.read_only:
            raise Unavailable("cannot set a property: 503")
        self.story.append(key)
        self.properties[key] = value

    def foreign(self, *files: DataFile, operation: str = "overwrite") -> int:
        """A commit of others: of an UPDATE, where nothing else is said."""
        rows = str(sum(file.rows for file in files))
        snapshot = self.add([], {"added-records": rows, "deleted-records": rows})
        self.snapshots[snapshot.id] = replace(snapshot, operation=operation)
        self.brought[snapshot.id] = list(files)
        return snapshot.id

    def moment(self, number: int) -> int | None:
        moments = [snapshot.timestamp_ms for snapshot in self.snapshots.values()]
        return moments[number] if -len(moments) <= number < len(moments) else None

    def branches(self) -> list[str]:
        return [name for name in self.refs if not name.startswith("frazil/")]

    def tags(self) -> dict[str, int]:
        return {name: at for name, at in self.refs.items() if name.startswith("frazil/")}

    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None:  # type: ignore[override]
        self.story.append("expired")
        held = {number for ref, number in self.refs.items()}
        recent = [snapshot.id for snapshot in self.history("main")][:keep]
        for number, snapshot in list(self.snapshots.items()):
            if number not in held and number not in recent and snapshot.timestamp_ms < before_ms:
                del self.snapshots[number]
                unneeded.append(snapshot.manifest_list)
        unneeded += [OLD, *self.live_files]  # as Iceberg does where it could not read a list

    def needed(self, paths: Sequence[str]) -> set[str]:
        if self.unreadable:
            self.unreadable -= 1
            raise Unavailable("cannot read the manifests: 503")
        lists = {snapshot.manifest_list for snapshot in self.snapshots.values()}
        return (lists | self.live_files) & set(paths)

    def remove(self, paths: Sequence[str]) -> None:
        self.deleted += paths

    def put(self, number: int, sink: str = "s", epoch: int = 1, tagged: bool = True) -> int:
        entry = LedgerEntry(
            sink, epoch, (str(uuid4()),), (number, number), Cut({P: number}), Cut({P: number + 1})
        )
        snapshot = self.add([], entry.summary())
        if tagged:
            self.refs[f"frazil/{sink}"] = snapshot.id
        return snapshot.id


def expiry(table: Aging, **more: Any) -> ExpireSnapshots:
    given = {
        "sink": "s",
        "epoch": 1,
        "retention": partial(retention, "60s"),
        "position": lambda: Cut({P: 2**60}),
        "clock": FakeClock(),
        **more,
    }
    return ExpireSnapshots(table, **given)  # type: ignore[arg-type]


def test_old_snapshots_go_and_the_newest_and_the_tagged_stay():
    table = Aging()
    other = table.put(0, sink="other")  # long ago
    tagged = table.put(0)
    table.refs["frazil/release"] = tagged  # anybody's tag
    ids = [table.put(number) for number in range(1, 50)]
    keeper = expiry(table)
    assert keeper.run_due() == ""
    assert list(table.snapshots) == [other, tagged, *ids[-TABLE_KEPT:]]
    assert OLD in table.deleted
    assert not table.live_files & set(table.deleted), "what a snapshot needs is looked at again"
    head = TableCommitter(table, "main", "other", 0, time).head()
    assert head.entry is not None
    before = list(table.snapshots)
    for number in range(50, 50 + TABLE_AT_ONCE // 2):
        before.append(table.put(number))
        keeper.run_due()
    assert list(table.snapshots) == before, "a few are not worth it"


def test_young_snapshots_stay():
    table = Aging()
    for number in range(50):
        table.put(number)
    assert expiry(table, retention=SnapshotRetention(time.time() + 60, 10).within).run_due() == ""
    assert len(table.snapshots) == 50


@pytest.mark.parametrize(
    ("keep", "properties", "stay"),
    [
        ("1ms", {}, TABLE_KEPT),
        ("", {CREATED_BY: "s"}, TABLE_KEPT),
        ("", {}, 50),  # nobody's: for its owner to decide
        ("never", {CREATED_BY: "s"}, 50),
        ("1ms", {"gc.enabled": "false"}, 50),
        ("1ms", {"history.expire.max-snapshot-age-ms": str(2**52)}, 50),
        ("1ms", {"history.expire.max-snapshot-age-ms": "a while"}, 50),
        ("1ms", {"history.expire.min-snapshots-to-keep": "35"}, 35),
        ("", {CREATED_BY: "s", "history.expire.min-snapshots-to-keep": "5"}, TABLE_KEPT),
    ],
)
def test_the_config_and_the_tables_own_properties_say_how_many_snapshots_stay(
    keep: str, properties: dict[str, str], stay: int
):
    table = Aging()
    table.properties = properties
    for number in range(50):
        table.put(number)
    assert expiry(table, retention=partial(retention, keep)).run_due() == ""
    assert len(table.snapshots) == stay


@pytest.mark.parametrize("interval", [60, 1])
def test_a_table_of_the_default_settings_never_has_more_than_a_few_snapshots(
    interval: int, monkeypatch: pytest.MonkeyPatch
):
    now = [1e9]
    monkeypatch.setattr(maintenance_tasks, "time", SimpleNamespace(time=lambda: now[0]))
    table = Aging()
    table.properties = {CREATED_BY: "s"}
    keeper = expiry(table, retention=partial(retention, ""))
    sizes, rounds = [], 0
    for number in range(8_000):
        now[0] += interval
        snapshot = table.put(number)
        table.snapshots[snapshot] = replace(
            table.snapshots[snapshot], timestamp_ms=int(now[0] * 1000)
        )
        before = len(table.snapshots)
        assert keeper.run_due() == ""
        rounds += len(table.snapshots) < before
        sizes.append(len(table.snapshots))
    assert max(sizes) <= maintenance_tasks.TABLE_MOST * 1.2, "metadata files grow with them"
    day = [
        snapshot
        for snapshot in table.snapshots.values()
        if snapshot.timestamp_ms > (now[0] - 86400) * 1000
    ]
    assert len(day) >= 86400 // 60, "a day, and a thousand and more where commits are quick"
    assert rounds <= 8_000 / 100, "to expire is work: many go at once"


def test_the_owner_of_a_table_that_no_sink_made_gets_advice_about_what_grows():
    ours = {CREATED_BY: "s", **index.OLD_METADATA}
    assert advice({"db.a": ("", ours), "db.b": ("never", index.OLD_METADATA)}) == []
    advised = advice({"db.a": ("", ours), "db.old": ("", {}), "db.kept": ("7d", {})})
    assert advised == [
        "every metadata file of db.old, db.kept is kept; to keep the newest alone: ALTER TABLE "
        "db.old SET TBLPROPERTIES ('write.metadata.delete-after-commit.enabled' = 'true', "
        "'write.metadata.previous-versions-max' = '50')",
        "every snapshot of db.old is kept, because no sink created it; to expire old ones set "
        'snapshot_retention of its [[table]], or "never" to silence this',
    ]


def test_a_sinks_newest_entry_stays_though_its_run_ended_before_the_tag_moved():
    """H4: else its next run would find the one before it, and commit the same batch again."""
    table = Aging()
    table.put(0, sink="other")
    for number in range(20):
        table.put(number)
    untagged = table.put(1, sink="other", tagged=False)
    for number in range(20, 60):
        table.put(number)
    assert expiry(table).run_due() == ""
    assert untagged in table.snapshots
    head = TableCommitter(table, "main", "other", 0, time).head()
    assert head.snapshot is not None
    assert head.snapshot.id == untagged
    assert len(table.snapshots) < 60, "what is older goes"


def test_what_the_index_lacks_stays():
    table = Aging()
    ids = [table.put(number) for number in range(60)]
    assert expiry(table, position=lambda: Cut({P: 31})).run_due() == ""
    assert list(table.snapshots) == ids[31:]


def test_files_that_could_not_be_checked_again_are_removed_later():
    table = Aging()
    for number in range(50):
        table.put(number)
    keeper = expiry(table, clock=(clock := FakeClock()))
    table.unreadable = 2
    assert "503" in keeper.run_due()
    assert table.deleted == []
    for _ in range(3):
        clock.now += 10_000
        trouble = keeper.run_due()
    assert trouble == ""
    assert OLD in table.deleted
    assert not table.live_files & set(table.deleted)


def test_a_run_that_was_taken_over_from_expires_nothing():
    table = Aging()
    for number in range(50):
        table.put(number)
    table.put(50, epoch=2)
    assert expiry(table).run_due() == ""
    assert len(table.snapshots) == 51


# ── commits of others whose snapshots expire ─────────────────────────────────────────────────────

KEY = "frazil.foreign-commits.s"


def updated(*files: DataFile, operation: str = "overwrite") -> tuple[Aging, int]:
    """A table that others wrote to once, among many commits of the sink."""
    table = Aging()
    for number in range(5):
        table.put(number)
    foreign = table.foreign(*files, operation=operation)
    for number in range(5, 50):
        table.put(number)
    return table, foreign


def kept_of(table: Aging) -> ForeignCommits:
    return foreign_commits.recorded(table.name, table.properties)[KEY]


@pytest.mark.parametrize("operation", ["append", "overwrite", "delete"])
def test_a_table_keeps_what_others_brought_before_their_snapshot_expires(operation: str):
    table, foreign = updated(DataFile("/theirs", 3, P, (2, 4)), operation=operation)
    assert expiry(table).run_due() == ""
    assert table.story == [KEY, "expired"]
    assert foreign not in table.snapshots
    expected = ForeignCommits(foreign, operation, foreign, False, {P: (2, 5)})
    assert kept_of(table) == expected


@pytest.mark.parametrize(
    ("operation", "files"),
    [
        ("replace", [DataFile("/compacted", 3, P, (2, 4))]),
        ("append", [DataFile("/theirs", 3, None, None, nulls=3)]),
        ("overwrite", [DataFile("/theirs", 3, Partition("other", 0), (2, 4))]),
        ("delete", []),
    ],
)
def test_nothing_is_kept_of_commits_that_brought_no_rows_of_the_sinks_partitions(
    operation: str, files: list[DataFile]
):
    table, foreign = updated(*files, operation=operation)
    assert expiry(table).run_due() == ""
    assert (table.story, table.properties) == (["expired"], {})
    assert foreign not in table.snapshots


def test_nothing_is_kept_of_commits_that_stay():
    table, foreign = updated(DataFile("/theirs", 3, P, (2, 4)))
    assert expiry(table, retention=SnapshotRetention(0, 60).within).run_due() == ""
    assert (table.story, foreign in table.snapshots) == ([], True)
    table = Aging()
    for number in range(50):
        table.put(number)
    foreign = table.foreign(DataFile("/theirs", 3, P, (2, 4)))
    table.put(50)
    assert expiry(table).run_due() == ""
    assert (table.story, foreign in table.snapshots) == (["expired"], True)


def test_nothing_is_expired_where_the_table_cannot_keep_what_others_brought():
    table, foreign = updated(DataFile("/theirs", 3, P, (2, 4)))
    table.read_only = True
    keeper = expiry(table, clock=(clock := FakeClock()))
    assert "503" in keeper.run_due()
    assert (len(table.snapshots), foreign in table.snapshots) == (51, True)
    table.read_only = False
    for _ in range(TABLE_AT_ONCE):
        clock.now += 10_000
        assert keeper.run_due() == ""
    assert table.story == [KEY, "expired"]


def test_nothing_is_expired_where_what_a_table_keeps_of_others_cannot_be_read():
    table, foreign = updated(DataFile("/theirs", 3, P, (2, 4)))
    table.properties[KEY] = "{}"
    assert f"cannot read property {KEY}" in expiry(table).run_due()
    assert foreign in table.snapshots


def test_what_a_table_keeps_of_others_grows_together_and_stays_small():
    table, first = updated(DataFile("/theirs", 3, P, (2, 4)))
    assert expiry(table).run_due() == ""
    second = table.foreign(DataFile("/more", 1, P, (9, 9)))
    for number in range(50, 100):
        table.put(number)
    assert expiry(table).run_due() == ""
    assert kept_of(table) == ForeignCommits(second, "overwrite", second, True, {P: (2, 10)})
    assert first != second
    again = dict(table.properties)
    assert expiry(table).run_due() == ""
    assert table.properties == again

    many = [Partition("t", number) for number in range(foreign_commits.PARTITIONS + 1)]
    snapshot = replace(table.snapshots[max(table.snapshots)], operation="overwrite", summary={})
    files = [DataFile(f"/{p}", 1, p, (0, 0)) for p in many]
    for some, bounded in ((many[:-1], True), (many, False)):
        commits = foreign_commits.of_snapshots([snapshot], lambda _: files, some)
        assert commits is not None
        assert (commits.ranges is not None) is bounded


def test_rows_of_others_without_exact_bounds_stay_in_doubt_as_a_whole():
    table, foreign = updated(DataFile("/theirs", 3, P, (2, 4)))
    del table.brought[foreign]  # its manifests are gone
    assert expiry(table).run_due() == ""
    assert kept_of(table).ranges is None
    # Rows that stand for no single offset have no bounds.
    table, foreign = updated(DataFile("/theirs", 3, None, None, nulls=3), operation="append")
    rows = LedgerEntry("s", 1, ("c",), (50, 50), Cut({BATCHES: 50}), Cut({BATCHES: 51}), rows=2)
    table.refs["frazil/s"] = table.add([], rows.summary()).id
    assert expiry(table, position=lambda: Cut({P: 2**60, BATCHES: 2**60})).run_due() == ""
    assert kept_of(table).ranges is None


def test_what_others_did_to_the_index_is_not_kept():
    table, foreign = updated(DataFile("/theirs", 3, P, (2, 4)))
    assert expiry(table, position=None).run_due() == ""
    assert (table.story, foreign in table.snapshots) == (["expired"], False)


def test_commits_of_others_on_another_branch_are_kept():
    """Whoever publishes that branch later brings their rows."""
    table = Aging()
    for number in range(50):
        table.put(number)
    table.refs["review"] = table.refs["main"]
    snapshot = table.add([], {"added-records": "3"}, branch="review")
    table.brought[snapshot.id] = [DataFile("/theirs", 3, P, (2, 4))]
    for _ in range(TABLE_KEPT):
        table.add([], {"added-records": "0"}, branch="review")
    assert expiry(table).run_due() == ""
    assert table.story == [KEY, "expired"]
    assert kept_of(table).snapshot_id == snapshot.id


def test_of_a_sink_that_ended_long_ago_the_tag_gives_its_partitions():
    table = Aging()
    other = Partition("other", 0)
    cuts = Cut({other: 0}), Cut({other: 9})
    ended = table.add([], LedgerEntry("ended", 1, ("c",), (0, 0), *cuts).summary())
    for number in range(30):
        table.put(number)
    del table.snapshots[table.refs["main"] - 20]  # the history does not go back to it
    table.refs["frazil/ended"] = ended.id
    table.foreign(DataFile("/theirs", 1, other, (2, 2)))
    for number in range(30, 50):
        table.put(number)
    assert expiry(table).run_due() == ""
    assert kept_of(table).ranges == {other: (2, 3)}
