from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from frazil.core.errors import Unavailable
from frazil.core.offsets import Cut, Partition
from frazil.table.commit import Target
from frazil.table.ledger import Entry
from frazil.table.maintain import TABLE_AT_ONCE, TABLE_KEPT, Expiry, leftovers
from tests.fakes import FakeClock, FakeTable
from tests.unit.test_stage import batch


def name(epoch: int, number: int, sink: str = "s", end: str = ".parquet") -> str:
    return f"/lake/t/data/day=1/frazil-{sink}-{epoch}-{number}-{uuid4()}{end}"


def test_only_files_of_older_lives_that_nothing_refers_to_are_left_over():
    dead, manifest = name(1, 4), name(1, 4, end="-m0.avro")
    live, staged, present = name(1, 3), name(2, 5), name(3, 6)
    other, foreign, near = (
        name(1, 4, sink="s2"),
        "/lake/t/data/part-0.parquet",
        name(1, 4, sink="s-1"),
    )
    found = leftovers(
        [dead, manifest, live, staged, present, other, foreign, near],
        sink="s",
        epoch=3,
        referenced=[f"file:{live}"],
        staged=[batch(epoch=2, number=5)],
    )
    assert found == [dead, manifest]


def test_a_local_path_is_the_same_however_it_is_written():
    path = name(1, 1)
    for spelled in (path, f"file:{path}", f"file://{path}"):
        assert leftovers([f"file:{path}"], sink="s", epoch=2, referenced=[spelled], staged=[]) == []


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────

P = Partition("t", 0)
OLD = "/data/replaced.parquet"


class Aging(FakeTable):
    """Its snapshots are as old as they can be; each needs its own list, all of them one file."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable = 0
        self.live_files = {"/data/live.parquet"}

    def moment(self, number: int) -> int | None:
        moments = [each.timestamp_ms for each in self.snapshots.values()]
        return moments[number] if -len(moments) <= number < len(moments) else None

    def branches(self) -> list[str]:
        return [name for name in self.refs if not name.startswith("frazil/")]

    def expire(self, before_ms: int, keep: int, unneeded: list[str]) -> None:  # type: ignore[override]
        held = {number for ref, number in self.refs.items()}
        recent = [each.id for each in self.history("main")][:keep]
        for number, each in list(self.snapshots.items()):
            if number not in held and number not in recent and each.timestamp_ms < before_ms:
                del self.snapshots[number]
                unneeded.append(each.manifest_list)
        unneeded += [OLD, *self.live_files]  # as Iceberg does where it could not read a list

    def needed(self, paths: Sequence[str]) -> set[str]:
        if self.unreadable:
            self.unreadable -= 1
            raise Unavailable("cannot read the manifests: 503")
        lists = {each.manifest_list for each in self.snapshots.values()}
        return (lists | self.live_files) & set(paths)

    def remove(self, paths: Sequence[str]) -> None:
        self.deleted += paths

    def put(self, number: int, sink: str = "s", epoch: int = 1, witness: bool = True) -> int:
        entry = Entry(sink, epoch, (str(uuid4()),), (number, number), Cut({P: number}),
                      Cut({P: number + 1}))  # fmt: skip
        snapshot = self.add([], entry.summary())
        if witness:
            self.refs[f"frazil/{sink}"] = snapshot.id
        return snapshot.id


def expiry(table: Aging, **more: Any) -> Expiry:
    given = {"sink": "s", "epoch": 1, "age": 60.0, "position": lambda: Cut({P: 2**60}),
             "clock": FakeClock(), **more}  # fmt: skip
    return Expiry(table, **given)  # type: ignore[arg-type]


def test_old_snapshots_go_and_the_newest_and_the_witnesses_stay():
    table = Aging()
    other = table.put(0, sink="other")  # long ago
    tagged = table.put(0)
    table.refs["frazil/release"] = tagged  # anybody's tag
    ids = [table.put(number) for number in range(1, 50)]
    keeper = expiry(table)
    assert keeper.tidy() == ""
    assert list(table.snapshots) == [other, tagged, *ids[-TABLE_KEPT:]]
    assert OLD in table.deleted
    assert not table.live_files & set(table.deleted), "what a snapshot needs is looked at again"
    head = Target(table, "main", "other", 0, time).head()
    assert head.entry is not None
    before = list(table.snapshots)
    for number in range(50, 50 + TABLE_AT_ONCE // 2):
        before.append(table.put(number))
        keeper.tidy()
    assert list(table.snapshots) == before, "a few are not worth it"


def test_young_snapshots_stay():
    table = Aging()
    for number in range(50):
        table.put(number)
    assert expiry(table, age=time.time() + 60).tidy() == ""
    assert len(table.snapshots) == 50


def test_a_sinks_newest_entry_stays_though_its_life_ended_before_the_witness_moved():
    """H4: else its next life would find the one before it, and commit the same batch again."""
    table = Aging()
    table.put(0, sink="other")
    for number in range(20):
        table.put(number)
    unwitnessed = table.put(1, sink="other", witness=False)
    for number in range(20, 60):
        table.put(number)
    assert expiry(table).tidy() == ""
    assert unwitnessed in table.snapshots
    head = Target(table, "main", "other", 0, time).head()
    assert head.snapshot is not None
    assert head.snapshot.id == unwitnessed
    assert len(table.snapshots) < 60, "what is older goes"


def test_what_the_index_lacks_stays():
    table = Aging()
    ids = [table.put(number) for number in range(60)]
    assert expiry(table, position=lambda: Cut({P: 31})).tidy() == ""
    assert list(table.snapshots) == ids[31:]


def test_what_could_not_be_looked_at_again_is_removed_later():
    table = Aging()
    for number in range(50):
        table.put(number)
    keeper = expiry(table, clock=(clock := FakeClock()))
    table.unreadable = 2
    assert "503" in keeper.tidy()
    assert table.deleted == []
    for _ in range(3):
        clock.now += 10_000
        trouble = keeper.tidy()
    assert trouble == ""
    assert OLD in table.deleted
    assert not table.live_files & set(table.deleted)


def test_a_life_that_was_taken_over_from_forgets_nothing():
    table = Aging()
    for number in range(50):
        table.put(number)
    table.put(50, epoch=2)
    assert expiry(table).tidy() == ""
    assert len(table.snapshots) == 51
