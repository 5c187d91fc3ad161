"""One contract for three tables: the fake of the unit tests, that of the simulation and Iceberg's
own, so none can drift.

What only the real one can show (what is left on disk, expiry, lost answers of a REST catalog) comes
after the contract.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata

from frazil.commit.protocol import TableCommitter
from frazil.errors import (
    CommitStateUnknown,
    Conflict,
    Expired,
    Fatal,
    Fenced,
    Gap,
    IdentityMismatch,
    Overlap,
    Unavailable,
)
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg import foreign_commits, java_errors
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.maintenance_tasks import ExpireSnapshots, SnapshotRetention
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import LedgerEntry, parse, referred, split
from frazil.ledger.tags import ledger_tag
from frazil.offsets import Cut, Partition
from tests.fakes import FakeTable
from tests.simulation.catalog import Client, File, Server, expire
from tests.simulation.catalog import Table as Handle
from tests.simulation.world import World

P = Partition("orders", 0)
SCHEMA = json.dumps(
    {
        "type": "struct",
        "schema-id": 0,
        "fields": [{"id": 1, "name": "value", "required": False, "type": "string"}],
    }
)
UNPARTITIONED = '{"spec-id": 0, "fields": []}'


class Fake:
    """The table of the unit tests."""

    def __init__(self) -> None:
        self.table: Any = FakeTable()

    def manifest(self, tag: str) -> str:
        return tag

    def foreign(self, tag: str) -> None:
        self.table.add([tag], {})

    def slip_in(self, tag: str) -> None:
        """Another writer's commit goes through while our next one is under way."""
        self.table.race = lambda: self.foreign(tag)
        self.table.faults = ["race"]

    def lose_the_next_answer(self) -> None:
        self.table.faults = ["lost"]

    def expire(self) -> None:
        self.table.metadata_kept = True
        self.table.expire()

    def live(self, branch: str = "main") -> list[str]:
        return sorted(self.table.live(branch))

    def still_there(self, path: str) -> bool:
        return path not in self.table.deleted


class Simulated:
    """The table of the simulation (`tests.simulation`)."""

    def __init__(self) -> None:
        self.server = Server(World(0))
        self.server.oracle = Mock()
        self.client = Client(self.server)
        self.table: Any = Handle(self.client, "db.t", self.server.create("db.t"))

    def manifest(self, tag: str) -> str:
        file = self.client.written(File(f"/db.t/data/{tag}.parquet", (tag,)))
        return str(self.table.write_manifest(f"/db.t/metadata/{tag}-m0.avro", [file.descriptor]))

    def foreign(self, tag: str) -> None:
        other = Handle(Client(self.server), "db.t", self.server.tables["db.t"])
        other.append([self.manifest(tag)], {}, branch="main", check=yes, leftovers=[])

    def slip_in(self, tag: str) -> None:
        send, self.client.send = self.client.send, Mock()

        def late(request: Any) -> None:
            self.client.send = send  # type: ignore[method-assign]
            self.foreign(tag)
            send(request)

        self.client.send = late  # type: ignore[method-assign]

    def lose_the_next_answer(self) -> None:
        send = self.client.send

        def lost(request: Any) -> None:
            self.client.send = send  # type: ignore[method-assign]
            send(request)
            raise CommitStateUnknown("cannot commit: CommitStateUnknownException")

        self.client.send = lost  # type: ignore[method-assign]

    def expire(self) -> None:
        expire(self.server, "db.t", 1)

    def live(self, branch: str = "main") -> list[str]:
        head = self.server.tables["db.t"].head(branch)
        return sorted(row for file, _ in (head.files if head else ()) for row in file.rows)

    def still_there(self, path: str) -> bool:
        return path in self.server.objects


class Real:
    """An Iceberg table in the catalog that the test's session has."""

    def __init__(self, spark: Any, catalog: str, name: str) -> None:
        self.spark = spark
        self.name = f"db.{name}"
        self.sql_name = f"{catalog}.db.{name}"
        self.catalog = JavaCatalog(spark, catalog)
        self.table: Any = self.catalog.create(
            self.name, SCHEMA, UNPARTITIONED, properties={"format-version": "2"}
        )

    def manifest(self, tag: str) -> str:
        table = self.table
        shape = WriterSpec(
            table.name,
            table.location,
            table.schema,
            table.schema_id,
            table.spec,
            table.properties,
            2**20,
            "zstd",
            {},
        )
        writer = TableWriter(shape, "contract")
        writer.write(pa.Table.from_pydict({"value": [tag]}, schema=shape.arrow))
        path = f"{table.location}/metadata/{uuid.uuid4()}-m0.avro"
        return str(table.write_manifest(path, [file.descriptor for file in writer.close()]))

    def foreign(self, tag: str) -> None:
        self.spark.sql(f"REFRESH TABLE {self.sql_name}")
        self.spark.sql(f"INSERT INTO {self.sql_name} VALUES ('{tag}')")

    def slip_in(self, tag: str) -> None:
        append, other = self.table.append, self

        def raced(*args: Any, check: Any, **more: Any) -> None:
            left = ["once"]

            def checked(history: Iterator[Snapshot]) -> str | None:
                answer = check(history)
                if left:
                    left.pop()
                    other.foreign(tag)
                return answer  # type: ignore[no-any-return]

            append(*args, check=checked, **more)

        self._once(raced)

    def lose_the_next_answer(self) -> None:
        append = self.table.append

        def lost(*args: Any, **more: Any) -> None:
            append(*args, **more)
            raise CommitStateUnknown("cannot commit: the answer was lost")

        self._once(lost)

    def _once(self, instead: Callable[..., None]) -> None:
        def call(*args: Any, **more: Any) -> None:
            del self.table.append
            instead(*args, **more)

        self.table.append = call

    def expire(self) -> None:
        catalog = self.sql_name.split(".")[0]
        self.spark.sql(
            f"CALL {catalog}.system.expire_snapshots(table => '{self.name}', "
            "older_than => TIMESTAMP '2099-01-01', retain_last => 1)"
        )

    def live(self, branch: str = "main") -> list[str]:
        self.spark.sql(f"REFRESH TABLE {self.sql_name}")
        at = "" if branch == "main" else f" VERSION AS OF '{branch}'"
        rows = self.spark.sql(f"SELECT value FROM {self.sql_name}{at}").collect()
        return sorted(row.value for row in rows)

    def still_there(self, path: str) -> bool:
        return Path(path.removeprefix("file:")).exists()


Subject = Fake | Simulated | Real


@pytest.fixture(params=["fake", "simulated", "real"])
def subject(request: pytest.FixtureRequest, name: str) -> Subject:
    if request.param == "fake":
        return Fake()
    if request.param == "simulated":
        return Simulated()
    return Real(request.getfixturevalue("spark"), "lake", name)


@pytest.fixture
def real(spark: Any, name: str) -> Real:
    return Real(spark, "lake", name)


def yes(_: Iterator[Snapshot]) -> None:
    return None


def append(subject: Subject, tag: str, branch: str = "main", **summary: str) -> list[str]:
    leftovers: list[str] = []
    subject.table.append(
        [subject.manifest(tag)] if tag else [],
        summary,
        branch=branch,
        check=yes,
        leftovers=leftovers,
    )
    return leftovers


def history(subject: Subject, branch: str = "main") -> list[Snapshot]:
    subject.table.refresh()
    return list(subject.table.history(branch))


def entry(begin: int, end: int, commit_id: str, epoch: int = 1) -> LedgerEntry:
    return LedgerEntry("s", epoch, (commit_id,), (0, 0), Cut({P: begin}), Cut({P: end}))


class NoWait:
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def sleep(_: float) -> None: ...


def target(subject: Subject, epoch: int = 1, branch: str = "main") -> TableCommitter:
    return TableCommitter(subject.table, branch, "s", epoch, NoWait())  # type: ignore[arg-type]


# ── the contract ─────────────────────────────────────────────────────────────────────────────────


def test_a_new_table_has_no_history_and_no_tags(subject: Subject):
    assert history(subject) == []
    assert history(subject, "elsewhere") == []
    assert subject.table.tagged("frazil/s") is None


def test_history_is_newest_first_with_parents_and_summaries(subject: Subject):
    for tag in ("a", "b", ""):
        append(subject, tag, mark=tag or "empty")
    snapshots = history(subject)
    assert [s.summary["mark"] for s in snapshots] == ["empty", "b", "a"]
    assert [s.parent for s in snapshots] == [snapshots[1].id, snapshots[2].id, None]
    assert [s.operation for s in snapshots] == ["append"] * 3
    assert snapshots[0].sequence > snapshots[1].sequence > snapshots[2].sequence
    assert snapshots[0].timestamp_ms >= snapshots[2].timestamp_ms > 0
    assert len({s.manifest_list for s in snapshots}) == 3
    assert subject.live() == ["a", "b"]


def test_a_refused_append_raises_and_changes_nothing(subject: Subject):
    append(subject, "a")
    before = history(subject)
    leftovers: list[str] = []
    with pytest.raises(CommitStateUnknown, match="the sun is too high"):
        subject.table.append(
            [subject.manifest("b")],
            {},
            branch="main",
            check=lambda _: "the sun is too high",
            leftovers=leftovers,
        )
    assert history(subject) == before
    assert subject.live() == ["a"]
    assert all(path != before[0].manifest_list for path in leftovers)


def test_the_check_sees_the_ancestry_newest_first(subject: Subject):
    append(subject, "a", mark="a")
    append(subject, "b", mark="b")
    seen: list[list[Snapshot]] = []
    subject.table.append(
        [],
        {"mark": "c"},
        branch="main",
        leftovers=[],
        check=lambda ancestry: seen.append(list(ancestry)),  # type: ignore[func-returns-value]
    )
    assert [s.summary["mark"] for s in seen[-1]] == ["b", "a"]
    assert seen[-1] == history(subject)[1:]


def test_a_foreign_commit_that_slips_in_is_kept_and_the_check_sees_it(
    subject: Subject,
):
    append(subject, "a")
    seen: list[int] = []
    leftovers: list[str] = []
    subject.slip_in("foreign")
    subject.table.append(
        [subject.manifest("b")],
        {},
        branch="main",
        leftovers=leftovers,
        check=lambda ancestry: seen.append(len(list(ancestry))),  # type: ignore[func-returns-value]
    )
    assert seen[-1] == 2
    assert len(history(subject)) == 3
    assert subject.live() == ["a", "b", "foreign"]
    assert all(map(subject.still_there, leftovers))


def test_what_a_commit_that_lost_a_race_leaves_is_handed_out_and_not_deleted(
    subject: Subject,
):
    append(subject, "a")
    leftovers: list[str] = []
    subject.slip_in("foreign")

    def check(ancestry: Iterator[Snapshot]) -> str | None:
        return "somebody else was here" if len(list(ancestry)) > 1 else None

    with pytest.raises(CommitStateUnknown, match="somebody else was here"):
        subject.table.append(
            [subject.manifest("b")], {}, branch="main", leftovers=leftovers, check=check
        )
    assert leftovers
    assert all(map(subject.still_there, leftovers))
    assert not {s.manifest_list for s in history(subject)} & set(leftovers)
    assert subject.live() == ["a", "foreign"]


def test_a_tag_is_set_moved_and_survives_later_commits(subject: Subject):
    append(subject, "a")
    first = history(subject)[0]
    subject.table.tag("frazil/s", first.id, None)
    append(subject, "b")
    assert subject.table.tagged("frazil/s") == first
    assert subject.table.tagged("frazil/t") is None
    second = history(subject)[0]
    with pytest.raises(Conflict):
        subject.table.tag("frazil/s", second.id, second.id)
    assert subject.table.tagged("frazil/s") == first, "it is not where somebody thinks it is"
    subject.table.tag("frazil/s", second.id, first.id)
    assert subject.table.tagged("frazil/s") == second
    subject.table.tag("frazil/s", second.id, second.id)  # a run that moves it again to where it is
    assert subject.table.tagged("frazil/s") == second
    assert len(history(subject)) == 2


def grown(subject: Subject, count: int, epoch: int = 1) -> list[LedgerEntry]:
    """A run whose entries are large: a claim, and batches of a thousand topics."""
    parts = [Partition(f"topic-{i:04}", 0) for i in range(1000)]
    ids = {part.topic: uuid.uuid5(uuid.NAMESPACE_OID, part.topic).hex for part in parts}
    committer = target(subject, epoch)
    begin = Cut({p: i * 999_983 % 10**9 for i, p in enumerate(parts)})
    claimed = committer.claim(lambda known: known or begin, topics=ids).entry
    assert claimed is not None
    committer.set_tag(committer.head().snapshot)  # type: ignore[arg-type]
    made = [claimed]
    for batch in range(count):
        begin = made[-1].end
        end = Cut({p: o + 1 + hash((batch, i)) % 3000 for i, (p, o) in enumerate(begin.items())})
        one = replace(
            claimed,
            commit_ids=(f"{epoch}-{batch}",),
            begin=begin,
            end=end,
            batches=(batch, batch),
            leaders=dict.fromkeys(parts, batch),
        )
        committer.set_tag(committer.commit([subject.manifest(f"{epoch}-{batch}")], one))
        made.append(one)
    return made


def test_entries_of_a_thousand_topics_come_back_as_they_were(subject: Subject):
    made = grown(subject, 6)
    assert [parse(snapshot.summary) for snapshot in history(subject)] == made[::-1]
    tagged = subject.table.tagged(ledger_tag("s"))
    assert parse(tagged.summary) == made[-1]
    assert target(subject, 2).head().entry == made[-1]


def test_large_entries_are_small_in_the_snapshot_and_forgotten_properties_go(real: Real):
    made = grown(real, 6)
    stored = json.loads(Path(real.table.metadata_file.removeprefix("file:")).read_text())
    for snapshot in stored["snapshots"]:
        ledger_properties = {
            k: v for k, v in snapshot["summary"].items() if k.startswith("frazil.")
        }
        assert sum(len(key) + len(value) for key, value in ledger_properties.items()) <= 4096
    kept = {
        key
        for key in stored["properties"]
        if key.startswith(("frazil.partitions.", "frazil.base."))
    }
    assert len([key for key in kept if key.startswith("frazil.partitions.")]) == 1
    assert 1 < len(kept) < 7
    assert [parse(snapshot.summary) for snapshot in real.table.readonly.history("main")] == made[
        ::-1
    ]
    # What was expired refers to nothing any more; the next run sees to it.
    real.expire()
    real.table.refresh()
    again = grown(real, 4, epoch=2)
    [*newest] = history(real)
    assert [parse(snapshot.summary) for snapshot in newest][:5] == again[::-1]
    needed = {key for snapshot in newest for key in referred(snapshot.summary)}
    tagged = real.table.tagged(ledger_tag("s"))
    left = split(real.table.properties)[1].keys() - needed - set(referred(tagged.summary))
    assert len(left) <= 1, "the one that was in use when the last base was written"
    assert not kept <= real.table.properties.keys()


@pytest.mark.parametrize("kind", ["partitions", "base"])
def test_a_removed_property_stops_the_readers_that_need_it(real: Real, kind: str):
    grown(real, 2)
    gone = [key for key in real.table.properties if key.startswith(f"frazil.{kind}.s.")]
    for key in gone:
        real.table.remove_property(key)
    fresh = real.catalog.load(real.name)
    assert fresh is not None
    with pytest.raises(
        Fatal, match=rf"property frazil\.{kind}\.s\..*, which it refers to, is gone"
    ):
        TableCommitter(fresh, "main", "s", 2, NoWait()).claim()  # type: ignore[arg-type]


def test_a_table_has_the_version_of_its_format_and_a_newer_one_is_refused(real: Real):
    assert real.table.properties["frazil.format-version"] == "1"
    assert real.table.readonly.properties["frazil.format-version"] == "1"
    real.table.set_property("frazil.format-version", "2")
    for opened in (real.catalog.load, real.catalog.open_readonly):
        with pytest.raises(
            Fatal, match=rf"cannot open table {real.name}: expected Frazil format .* 1, found 2"
        ):
            opened(real.name)


def test_a_branch_has_a_history_of_its_own(subject: Subject):
    append(subject, "on-main")
    append(subject, "on-side", branch="side", mark="side")
    [newest, *_] = history(subject, "side")
    assert newest.summary["mark"] == "side"
    assert [s.summary.get("mark") for s in history(subject)] == [None]
    assert subject.live() == ["on-main"]
    assert "on-side" in subject.live("side")


def test_earlier_metadata_has_expired_snapshots(subject: Subject):
    for tag in "abcd":
        append(subject, tag, **{"frazil.test": tag})
    before = history(subject)
    subject.table.tag("frazil/s", before[2].id, None)
    assert subject.table.carries("main", before[2].id)
    subject.expire()
    assert [snapshot.id for snapshot in history(subject)] == [before[0].id]
    expired = list(subject.table.expired(before[1].id))
    assert [snapshot.id for snapshot in expired] == [snapshot.id for snapshot in before[1:]]
    assert expired[0].summary["frazil.test"] == "c"
    assert expired[-1].parent is None
    assert list(subject.table.expired(12345)) == []
    assert subject.table.carries("main", before[2].id)


def test_staged_files_that_are_gone_are_reported(real: Real):
    manifest = real.manifest("a")
    assert real.table.lacking([manifest]) == []
    folder = Path(real.table.location.removeprefix("file:"))
    [data] = folder.glob("data/*.parquet")
    data.unlink()
    assert [Path(path).name for path in real.table.lacking([manifest])] == [data.name]
    [listed] = folder.glob("metadata/*-m0.avro")
    listed.unlink()
    assert [Path(path).name for path in real.table.lacking([manifest])] == [listed.name]


def test_a_deleted_path_may_be_gone_already(subject: Subject, tmp_path: Path):
    subject.table.delete(f"file:{tmp_path}/never-was.avro")


def test_an_entry_whose_answer_was_lost_is_found_and_not_added_twice(
    subject: Subject,
):
    committer = target(subject)
    subject.lose_the_next_answer()
    committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    committer.commit([subject.manifest("b")], entry(5, 9, "b"))
    assert subject.live() == ["a", "b"]
    assert [parse(s.summary).commit_ids for s in history(subject)] == [("b",), ("a",)]  # type: ignore[union-attr]


def test_a_foreign_commit_in_between_does_not_disturb_an_entry(subject: Subject):
    committer = target(subject)
    committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    subject.slip_in("foreign")
    committer.commit([subject.manifest("b")], entry(5, 9, "b"))
    assert subject.live() == ["a", "b", "foreign"]


def test_an_older_run_is_fenced_and_its_rows_are_absent(subject: Subject):
    old = target(subject)
    old.commit([subject.manifest("a")], entry(0, 5, "a"))
    heir = target(subject, epoch=2)
    assert heir.claim().entry.end == Cut({P: 5})  # type: ignore[union-attr]
    with pytest.raises(Fenced, match="this one is epoch 1, the table is at epoch 2"):
        old.commit([subject.manifest("b")], entry(5, 9, "b"))
    heir.commit([subject.manifest("c")], entry(5, 8, "c", epoch=2))
    assert subject.live() == ["a", "c"]


def test_gaps_and_overlaps_are_refused(subject: Subject):
    committer = target(subject)
    committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    with pytest.raises(Gap):
        committer.commit([subject.manifest("b")], entry(7, 9, "b"))
    with pytest.raises(Overlap):
        committer.commit([subject.manifest("c")], entry(3, 9, "c"))
    assert subject.live() == ["a"]


def test_an_entry_on_a_branch_leaves_main_alone(subject: Subject):
    append(subject, "foreign")
    committer = target(subject, branch="side")
    snapshot = committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    committer.set_tag(snapshot)
    assert subject.table.tagged(f"{ledger_tag('s')}/side") == snapshot
    committer.commit([subject.manifest("b")], entry(5, 9, "b"))
    assert subject.live() == ["foreign"]
    assert set(subject.live("side")) >= {"a", "b"}


# ── what only the real table can show ────────────────────────────────────────────────────────────


def test_the_manifest_list_of_a_lost_race_is_swept_once_the_entry_is_there(real: Real):
    committer = target(real)
    committer.commit([real.manifest("a")], entry(0, 5, "a"))
    real.slip_in("foreign")
    live_before = set(_manifest_lists(real))
    committer.commit([real.manifest("b")], entry(5, 9, "b"))
    lists = {s.manifest_list for s in history(real)}
    assert set(_manifest_lists(real)) == {Path(p.removeprefix("file:")).name for p in lists}
    assert live_before < set(_manifest_lists(real))


def test_a_commit_moves_its_tag_in_the_same_metadata_file(real: Real):
    def version() -> int:
        real.table.refresh()
        return int(real.table.metadata_file.rsplit("/", 1)[-1].partition("-")[0])

    append(real, "foreign")
    for branch, name in (("side", "frazil/s/side"), ("main", "frazil/s")):
        committer, before = target(real, branch=branch), version()
        for number, tag in enumerate("abc"):
            staged = [real.manifest(f"{branch}-{tag}")]
            snapshot = committer.commit(staged, entry(number, number + 1, tag))
            assert real.table.tagged(name) == snapshot
            committer.set_tag(snapshot)  # where it stands already
        assert version() == before + 3
    claimed = target(real, epoch=2).claim()
    assert real.table.tagged("frazil/s") == snapshot, "what a claim compares the branch with"
    committer = target(real, epoch=2)
    committer.seen = claimed.commit_id
    real.slip_in("foreign")
    snapshot = committer.commit([real.manifest("d")], entry(3, 4, "d", epoch=2))
    assert real.table.tagged("frazil/s") == snapshot
    assert real.live() == ["d", "foreign", "foreign", "main-a", "main-b", "main-c"]


def test_manifests_of_many_commits_are_merged_and_none_is_left_behind(real: Real):
    real.table.set_property("commit.manifest.min-count-to-merge", "3")
    committer = target(real)
    for number in range(9):
        if number == 4:
            real.slip_in("foreign")
        snapshot = committer.commit(
            [real.manifest(f"{number}")], entry(number, number + 1, f"c{number}")
        )
        committer.set_tag(snapshot)
    assert real.live() == [*"012345678", "foreign"]
    assert len(real.table.manifests(snapshot.id)) - 1 < 5, "ten batches, ten manifests"
    known = {
        row[0]
        for row in real.spark.sql(f"SELECT path FROM {real.sql_name}.all_manifests").collect()
    }
    folder = Path(real.table.location.removeprefix("file:")) / "metadata"
    on_disk = {path.name for path in folder.glob("*-m*.avro")}
    assert on_disk == {path.rsplit("/", 1)[-1] for path in known}
    # A try that was applied, and whose answer was lost, may have merged the manifest as well.
    for number in range(9, 14):
        real.lose_the_next_answer()
        committer.commit([real.manifest(f"{number}")], entry(number, number + 1, f"c{number}"))
    assert len(real.live()) == 15
    assert [parse(snapshot.summary) is not None for snapshot in history(real)].count(True) == 14


def test_a_tag_keeps_the_ledger_over_compaction_and_expiry(real: Real):
    """H4, with Iceberg's own procedures."""
    committer = target(real)
    for number, tag in enumerate("abc"):
        committer.set_tag(committer.commit([real.manifest(tag)], entry(number, number + 1, tag)))
    _rewrite_and_expire(real)
    assert len(history(real)) == 1, "the expiry left more than the compacted snapshot"
    committer.commit([real.manifest("d")], entry(3, 4, "d"))
    assert real.live() == ["a", "b", "c", "d", "foreign"]


def test_without_tag_and_earlier_metadata_an_expired_ledger_stops_the_sink(real: Real):
    """H4: not found is not never committed."""
    committer = target(real)
    for number, tag in enumerate("abc"):
        committer.commit([real.manifest(tag)], entry(number, number + 1, tag))
    real.table.untag(ledger_tag("s"))
    _rewrite_and_expire(real)
    assert committer.head().commit_id == "c"
    newest = Path(real.table.metadata_file.removeprefix("file:"))
    for path in newest.parent.glob("*.metadata.json"):
        if path != newest:
            path.unlink()
    for any_committer in (committer, target(real, epoch=2)):
        with pytest.raises(Expired, match="cannot prove that table"):
            any_committer.commit([real.manifest("d")], entry(3, 4, "d", epoch=2))
    with pytest.raises(Expired):
        target(real, epoch=2).claim()
    assert real.live() == ["a", "b", "c", "foreign"]


def test_a_table_that_was_made_again_is_not_the_same_table(real: Real):
    append(real, "a")
    real.spark.sql(f"DROP TABLE {real.sql_name}")
    real.catalog.create(real.name, SCHEMA, UNPARTITIONED, properties={})
    with pytest.raises(IdentityMismatch, match="dropped and recreated"):
        real.table.refresh()


def test_the_map_of_java_errors_names_classes_that_exist(spark: Any):
    """A renamed exception would fall through to another kind in silence."""
    loader = spark._jvm.java.lang.Class
    where = (
        "org.apache.iceberg.exceptions.",
        "org.apache.iceberg.jdbc.",
        "java.io.",
        "java.lang.",
        "org.apache.spark.sql.connector.catalog.",
        "org.apache.iceberg.aws.shaded.",
        "software.amazon.awssdk.services.s3.model.",
        "software.amazon.awssdk.core.exception.",
    )
    elsewhere = {"SdkClientException", "S3Exception"}  # in the user's own iceberg-aws-bundle

    def exists(name: str) -> bool:
        context = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        for package in where:
            try:
                loader.forName(package + name, False, context)
                return True
            except Exception:
                continue
        return False

    assert [name for name in java_errors.KINDS if name not in elsewhere and not exists(name)] == []


# ── a REST catalog that applies a commit and loses its answer ────────────────────────────────────


class Rest(BaseHTTPRequestHandler):
    """The few calls of Iceberg's REST protocol that a commit needs; pyiceberg does the arithmetic.

    `faults`: what the next commits get. "lost": applied, then 503 with Retry-After, which makes the
    client post again by itself. "down": 503 and nothing applied.
    """

    server: Any

    def do_HEAD(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        known = parts[-2] == "namespaces" or parts[-1] in self.server.tables
        self._answer(204 if known else 404, None)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[-1] == "config":
            self._answer(200, {"defaults": {}, "overrides": {}})
        elif parts[-2] == "tables" and parts[-1] in self.server.tables:
            self._answer(200, self._loaded(parts[-1]))
        elif parts[-2] == "namespaces":
            self._answer(200, {"namespace": ["db"], "properties": {}})
        else:
            self._refuse(404, "NoSuchTableException", "no such thing")

    def do_POST(self) -> None:
        parts = self.path.strip("/").split("/")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if parts[-1] == "tables":
            self._create(body)
        elif parts[-2] == "tables":
            self._commit(parts[-1], body)
        else:
            self._answer(200, {"namespace": ["db"], "properties": {}})

    def _create(self, body: dict[str, Any]) -> None:
        name = body["name"]
        made = new_table_metadata(
            Schema.model_validate(body["schema"]),
            PartitionSpec(),
            UNSORTED_SORT_ORDER,
            f"file:{self.server.folder}/{name}",
            body.get("properties", {}),
        )
        self._save(name, made)
        self._answer(200, self._loaded(name))

    def _commit(self, name: str, body: dict[str, Any]) -> None:
        request = CommitTableRequest.model_validate(
            {**body, "identifier": {"namespace": ["db"], "name": name}}
        )
        if slip := self.server.slips.pop() if self.server.slips else None:
            slip()
        base: TableMetadata = self.server.tables[name][0]
        data = any(update.action == "add-snapshot" for update in request.updates)
        self.server.posts += data
        fault = self.server.faults.pop(0) if data and self.server.faults else ""
        if fault == "down":
            return self._refuse(503, "ServiceUnavailableException", "later")
        try:
            for requirement in request.requirements:
                requirement.validate(base)
        except Exception as error:
            return self._refuse(409, "CommitFailedException", str(error))
        self._save(name, update_table_metadata(base, tuple(request.updates)))
        if fault == "lost":
            return self._refuse(503, "ServiceUnavailableException", "later")
        return self._answer(200, self._loaded(name))

    def _save(self, name: str, metadata: TableMetadata) -> None:
        path = Path(self.server.folder) / name / "metadata" / f"{uuid.uuid4()}.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(metadata.model_dump_json())
        self.server.tables[name] = TableMetadataUtil.parse_raw(path.read_text()), f"file:{path}"

    def _loaded(self, name: str) -> dict[str, Any]:
        metadata, location = self.server.tables[name]
        return {
            "metadata-location": location,
            "metadata": json.loads(metadata.model_dump_json()),
            "config": {},
        }

    def _refuse(self, status: int, kind: str, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": kind, "code": status}})

    def _answer(self, status: int, body: Any) -> None:
        raw = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if status == 503:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None: ...


_catalogs = itertools.count(1)


@pytest.fixture
def rest(spark: Any, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Rest)
    server.tables, server.faults, server.posts, server.folder = {}, [], 0, tmp_path
    server.slips = []  # called when the next commit arrives, before it is looked at
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    name = f"rest{next(_catalogs)}"
    for key, value in {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "rest",
        ".uri": f"http://127.0.0.1:{server.server_port}",
        ".warehouse": "w",
        ".rest.client.max-retries": "1",
    }.items():
        spark.conf.set(f"spark.sql.catalog.{name}{key}", value)
    yield server, name
    server.shutdown()
    server.server_close()


def test_a_commit_that_was_applied_and_posted_again_leaves_the_table_readable(
    spark: Any, rest: tuple[Any, str], name: str
):
    """H1: the catalog applies the commit and answers 503; the client posts again by itself and gets
    409; the validator, seeing our own entry, refuses; Iceberg's clean-up would then delete the
    manifest list of the live snapshot."""
    server, catalog = rest
    subject = Real(spark, catalog, name)
    committer = target(subject)
    committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    posts = server.posts
    server.faults = ["lost"]
    committer.commit([subject.manifest("b")], entry(5, 9, "b"))
    assert server.posts - posts >= 2, "the client did not post again: the fault was not met"
    snapshots = history(subject)
    assert [parse(s.summary).commit_ids for s in snapshots] == [("b",), ("a",)]  # type: ignore[union-attr]
    assert all(subject.still_there(s.manifest_list) for s in snapshots)
    assert subject.live() == ["a", "b"]
    committer.commit([subject.manifest("c")], entry(9, 12, "c"))
    assert subject.live() == ["a", "b", "c"]


def test_a_lost_answer_and_a_foreign_commit_lose_no_rows(
    spark: Any, rest: tuple[Any, str], name: str
):
    """H2: between our commit and the look at what came of it another writer commits."""
    server, catalog = rest
    subject = Real(spark, catalog, name)
    committer = target(subject)
    committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    subject.slip_in("foreign")
    server.faults = ["", "", "lost"]  # the foreign one, ours refused, ours again
    committer.commit([subject.manifest("b")], entry(5, 9, "b"))
    assert subject.live() == ["a", "b", "foreign"]
    assert all(subject.still_there(s.manifest_list) for s in history(subject))


def test_a_branch_is_removed_only_from_where_it_was(spark: Any, rest: tuple[Any, str], name: str):
    """A rewind to the beginning: Iceberg sends no requirement with the removal of a reference."""
    server, catalog = rest
    subject = Real(spark, catalog, name)
    append(subject, "a")
    [first] = history(subject)
    server.slips = [lambda: subject.foreign("foreign")]
    with pytest.raises(Conflict):
        subject.table.move({"main": None}, expected={"main": first.id})
    assert subject.live() == ["a", "foreign"]
    newest = history(subject)[0]
    subject.table.move({"main": None}, expected={"main": newest.id})
    assert subject.live() == []


def test_a_catalog_that_stays_away_is_unavailable_and_the_batch_can_go_in_later(
    spark: Any, rest: tuple[Any, str], name: str
):
    server, catalog = rest
    subject = Real(spark, catalog, name)
    committer = target(subject)
    committer.commit([subject.manifest("a")], entry(0, 5, "a"))
    server.faults = ["down"] * 500
    waiting = subject.manifest("b")
    with pytest.raises(Unavailable, match="in 6 tries"):
        committer.commit([waiting], entry(5, 9, "b"))
    server.faults = []
    committer.commit([waiting], replace(entry(5, 9, "b"), batches=(1, 1)))
    assert subject.live() == ["a", "b"]


def _rewrite_and_expire(real: Real) -> None:
    """With another writer's row: the ledger's snapshots are not even the parent of what is left."""
    catalog = real.sql_name.split(".")[0]
    real.foreign("foreign")
    real.spark.sql(f"REFRESH TABLE {real.sql_name}")
    real.spark.sql(
        f"CALL {catalog}.system.rewrite_data_files(table => '{real.name}', "
        "options => map('rewrite-all', 'true'))"
    )
    real.spark.sql(
        f"CALL {catalog}.system.expire_snapshots(table => '{real.name}', "
        "older_than => TIMESTAMP '2099-01-01 00:00:00', retain_last => 1)"
    )


def _manifest_lists(real: Real) -> list[str]:
    folder = Path(real.table.location.removeprefix("file:")) / "metadata"
    return [path.name for path in folder.glob("snap-*.avro")]


def test_a_table_keeps_what_others_brought_before_a_sink_expires_their_snapshot(real: Real):
    committer = target(real)
    for number in range(6):
        if number == 2:
            real.foreign("foreign")
            foreign = next(real.table.readonly.history("main"))
        snapshot = committer.commit(
            [real.manifest(str(number))], entry(number, number + 1, f"c{number}")
        )
        committer.set_tag(snapshot)
    keeper = ExpireSnapshots(
        real.table,
        sink="s",
        epoch=1,
        retention=SnapshotRetention(0, 2).within,
        position=lambda: Cut({P: 6}),
        at_once=2,
    )
    assert keeper.run_due() == ""
    plain = real.table.readonly
    assert foreign.id not in {snapshot.id for snapshot in plain.history("main")}
    (commits,) = foreign_commits.recorded(plain.name, plain.properties).values()
    assert (commits.snapshot_id, commits.operation) == (foreign.id, "append")
    assert commits.timestamp_ms == foreign.timestamp_ms
    assert len(real.live()) == 7
