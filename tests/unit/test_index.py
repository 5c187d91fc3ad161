"""The offset index looks after itself, and its six caveats (L9 to L14), on tables in memory.

`FakeIndex` keeps real Parquet files in a folder; the committer and the upkeep are the real ones.
`tests/system/test_index.py` shows the same on Kafka, Spark and Iceberg.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from frazil.accounting import RangeCounts
from frazil.auditing.checks import audit
from frazil.auditing.history import Evidence
from frazil.commit.batch_chain import entry_of
from frazil.commit.commit_queue import BackpressureLimits, PendingBatch
from frazil.commit.index_writer import IndexWriter
from frazil.commit.protocol import LONGEST_PAUSE, TableCommitter
from frazil.config.sections import TableConfig
from frazil.errors import (
    CommitStateUnknown,
    ConfigError,
    Expired,
    Fenced,
    FrazilError,
    Gap,
    IdentityMismatch,
    Overlap,
    SchemaMismatch,
    Unavailable,
)
from frazil.files.writer import WriterSpec
from frazil.iceberg import maintenance_tasks, schema
from frazil.iceberg.maintenance_tasks import RewriteIndexFiles
from frazil.iceberg.table import DataFile, Snapshot
from frazil.ledger import entry as ledger
from frazil.ledger import index
from frazil.ledger.staged_batch import StagedBatch, StagedTable
from frazil.offsets import Cut, Partition, Range
from frazil.ops.index_rebuild_plan import COLUMNS, LedgerHistory, RebuiltRows, rebuild
from frazil.pipeline.projection import MetadataColumns
from frazil.sources.base import StreamPosition, StreamState
from tests.fakes import FakeClock, FakeTable
from tests.unit.test_commit import batch
from tests.unit.test_committer_tables import Stream
from tests.unit.test_index_rows import parsed_rows

P, Q = Partition("orders", 0), Partition("orders", 1)


@dataclass(frozen=True, slots=True)
class File:
    path: str
    rows: int
    sequence: int = 0
    deletes: int = 0


class FakeIndex(FakeTable):
    """With files that are there: a manifest is the descriptors of its files, as JSON."""

    def __init__(self, folder: Path) -> None:
        super().__init__("db.index", "uuid-index")
        self.folder = folder
        self.files: dict[int, list[File]] = {}
        self.rewrites: list[str] = []  # what happens to the next ones, as `faults` for appends
        self.properties: dict[str, str] = {}

    @property
    def shape(self) -> WriterSpec:
        made = schema.iceberg_schema(
            index.COLUMNS, MetadataColumns("", "", "", ""), TableConfig("db.index")
        )
        return WriterSpec(
            self.name,
            str(self.folder),
            made,
            0,
            '{"spec-id": 0, "fields": []}',
            {},
            2**28,
            "zstd",
            {},
        )

    def add(
        self, manifests: Sequence[str], summary: Mapping[str, str], branch: str = "main"
    ) -> Snapshot:
        before = self.files.get(self.refs.get(branch, 0), [])
        snapshot = super().add(manifests, summary, branch)
        new = [
            File(fact["file-path"], fact["record-count"], snapshot.sequence)
            for manifest in manifests
            for fact in map(json.loads, json.loads(manifest))
        ]
        return self._hold(snapshot, [*before, *new])

    def _hold(self, snapshot: Snapshot, files: list[File]) -> Snapshot:
        total = {"total-data-files": str(len(files))}
        self.snapshots[snapshot.id] = replace(snapshot, summary={**snapshot.summary, **total})
        self.files[snapshot.id] = files
        return self.snapshots[snapshot.id]

    def live(self, branch: str = "main") -> Any:  # type: ignore[override]
        newest = self.snapshots[self.refs[branch]]
        return newest, sorted(self.files[newest.id], key=lambda file: file.sequence)

    def rewrite(
        self,
        removed: Sequence[File],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        since: int,
        same: bool,
        check: Callable[[Iterator[Snapshot]], str | None],
        leftovers: list[str],
    ) -> None:
        fault = self.rewrites.pop(0) if self.rewrites else ""
        if fault == "race":
            self.race()
        if fault == "dropped":
            raise Unavailable("cannot rewrite: 503")
        files = self.files[self.refs["main"]]
        if refusal := check(self.history("main")):
            raise CommitStateUnknown(f"cannot rewrite: ValidationException: {refusal}")
        if not set(removed) <= set(files):
            raise CommitStateUnknown(
                "cannot rewrite: ValidationException: Missing required files to delete"
            )
        new = [File(e["file-path"], e["record-count"], 10**6) for e in map(json.loads, added)]
        assert not same or sum(f.rows for f in removed) == sum(f.rows for f in new)
        snapshot = super().add([], summary)
        self._hold(snapshot, [file for file in files if file not in removed] + new)
        leftovers.append(f"{self.folder}/metadata/filtered-{snapshot.id}-m1.avro")
        if fault == "lost":  # H1: Iceberg wants to delete the list of the commit that was applied
            leftovers.append(snapshot.manifest_list)
            raise CommitStateUnknown("cannot rewrite: CommitStateUnknownException")

    def live_manifests(self) -> list[str]:
        return super().live()

    def manifests_of(self, snapshot_id: int) -> set[str]:
        return {self.snapshots[snapshot_id].manifest_list}

    def moment(self, number: int) -> int | None:
        moments = [snapshot.timestamp_ms for snapshot in self.snapshots.values()]
        return moments[number] if -len(moments) <= number < len(moments) else None

    def branches(self) -> list[str]:
        return ["main"]

    def needed(self, paths: Sequence[str]) -> set[str]:
        return {snapshot.manifest_list for snapshot in self.snapshots.values()} & set(paths)

    def expire(self, before_ms: int = 2**62, keep: int = 1, unneeded: Any = None) -> None:
        held = {number for ref, number in self.refs.items() if ref != "main"}
        recent = [snapshot.id for snapshot in self.history("main")][:keep]
        for number, snapshot in list(self.snapshots.items()):
            if number not in held and number not in recent and snapshot.timestamp_ms < before_ms:
                del self.snapshots[number]
                if unneeded is not None:
                    unneeded.append(snapshot.manifest_list)

    def remove(self, paths: Sequence[str]) -> None:
        self.deleted += paths
        for path in paths:
            Path(path).unlink(missing_ok=True)

    def rows(self) -> pa.Table:
        _, files = self.live()
        return index.read(self.shape, [file.path for file in files])

    @property
    def on_disk(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*.parquet")}


class IndexRun:
    """One run of a sink that commits to an index and looks after it."""

    def __init__(self, table: FakeIndex, sink: str = "s", epoch: int = 1) -> None:
        self.table = table
        self.sink, self.epoch = sink, epoch
        self.clock = FakeClock()
        self.target = TableCommitter(table, "main", sink, epoch, self.clock)
        head = self.target.claim(lambda position: Cut({P: 0, Q: 0, **position}))
        assert head.entry is not None
        assert head.snapshot is not None
        self.target.set_tag(head.snapshot)
        self.end = head.entry.end
        self.number = head.entry.batches[1] + 1
        self.steps: list[str] = []
        self.upkeep = RewriteIndexFiles(
            _Named(table),
            sink=sink,
            epoch=epoch,
            shape=lambda: table.shape,
            history=86400,
            prefix=lambda: f"frazil-{sink}-{epoch}-{self.number}",
            step=self.steps.append,
            clock=self.clock,
        )

    def commit(self, tables: int = 1) -> str:
        """One batch of ten offsets of each partition; what the upkeep says to it."""
        ranges = [Range(p, self.end[p], self.end[p] + 10) for p in (P, Q)]
        batch = batch_of(self.sink, self.epoch, self.number, self.end, ranges, tables)
        located = [(batch, dict.fromkeys(batch.names, Snapshot(7, None, 0, 0, "", {})))]
        prefix = f"frazil-{self.sink}-{self.epoch}-{self.number}"
        manifest = json.dumps(index.write(self.table.shape, prefix, located))
        snapshot = self.target.commit([manifest], entry_of([batch], "", self.epoch))
        self.target.set_tag(snapshot)
        self.end, self.number = batch.end, self.number + 1
        return self.upkeep.run_due()


class _Named:
    """What the committer's fake calls otherwise."""

    def __init__(self, table: FakeIndex) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, {"manifests": "manifests_of"}.get(name, name))


def batch_of(
    sink: str, epoch: int, number: int, begin: Cut, ranges: Sequence[Range], tables: int = 1
) -> StagedBatch:
    staged = tuple(
        StagedTable(
            f"db.t{n}", f"u{n}", 0, (), (), 1, 1, tuple(RangeCounts(r, len(r)) for r in ranges)
        )
        for n in range(tables)
    )
    return StagedBatch(
        sink, epoch, number, str(uuid.uuid4()), begin, begin.after(ranges), {}, "", 0, 0, staged
    )


@pytest.fixture
def table(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files are many here."""
    monkeypatch.setattr(index, "FANOUT", 4)
    monkeypatch.setattr(index, "FULL", 256)
    monkeypatch.setattr(index, "MOST", 32)


def exact(table: FakeIndex, batches: int, sinks: Sequence[str] = ("s",)) -> None:
    """Every row of every batch is there once."""
    rows = (
        table.rows()
        .select(["sink", "batch", "table_name", "topic", "partition", "start_offset", "end_offset"])
        .to_pylist()
    )
    keys = [tuple(row.values()) for row in rows]
    assert len(set(keys)) == len(keys), "doubled"
    expected = {
        (sink, n, "db.t0", "orders", p, n * 10, n * 10 + 10)
        for sink in sinks
        for n in range(batches)
        for p in (0, 1)
    }
    assert set(keys) == expected


# ── tiers ────────────────────────────────────────────────────────────────────────────────────────


def test_few_files_and_few_writes_however_many_batches(monkeypatch: pytest.MonkeyPatch):
    """No row is written again more often than there are tiers, and live files stay few."""
    monkeypatch.undo()
    assert (index.FANOUT, index.FULL) == (32, 2**18)
    dice = random.Random(1)
    files: list[File] = []
    again = rows = 0
    for n in range(20_000):
        count = dice.choice([1, 1, 2, 8, 40, 1000])
        files.append(File(f"{n}.parquet", count))
        rows += count
        if chosen := index.due(files):
            assert 2 <= len(chosen) <= index.MOST
            merged = sum(file.rows for file in chosen)
            assert merged < 2 * index.FULL
            again += merged
            files = [file for file in files if file not in chosen]
            files.append(File(f"m{n}.parquet", merged))
        assert len(files) <= 4 * index.FANOUT + rows / index.FULL
    assert rows > 3_000_000
    assert again <= 4 * rows


def test_a_pile_of_files_is_taken_down_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Of an index that nobody looked after for years."""
    monkeypatch.undo()
    files = [File(f"{n}.parquet", 3) for n in range(10_000)]
    turns = 0
    while chosen := index.due(files):
        assert len(chosen) <= index.MOST
        rows = sum(file.rows for file in chosen)
        files = [*files[len(chosen) :], File(f"m{turns}.parquet", rows)]
        turns += 1
        assert turns < 100
    assert len(files) < 2 * index.FANOUT


def test_what_is_full_or_hidden_in_part_or_no_parquet_is_left_alone():
    full = [File(f"{n}.parquet", index.FULL) for n in range(9)]
    hidden = [File(f"h{n}.parquet", 1, deletes=1) for n in range(9)]
    others = [File(f"o{n}.orc", 1) for n in range(9)]
    few = [File(f"f{n}.parquet", 1) for n in range(3)]
    assert index.due([*full, *hidden, *others, *few]) == []
    one = File("one.parquet", 1)
    assert index.due([*full, *hidden, *others, *few, one]) == [*few, one]


# ── merging ──────────────────────────────────────────────────────────────────────────────────────


def test_files_of_a_tier_become_one_sorted_and_every_row_is_kept(table: FakeIndex):
    run = IndexRun(table)
    for _ in range(4):
        assert run.commit() == ""
    _, [file] = table.live()
    assert file.rows == 8
    exact(table, 4)
    keys = table.rows().select(list(index.ORDER)).to_pylist()
    assert [tuple(key.values()) for key in keys] == sorted(tuple(key.values()) for key in keys)
    assert run.steps == ["index-merge", "index-merged"]
    assert [path for path in table.deleted if "filtered" in path], "what Iceberg made on the way"


def test_hundreds_of_batches_stay_few_files_and_snapshots(
    table: FakeIndex, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(maintenance_tasks, "KEPT", 10)
    monkeypatch.setattr(maintenance_tasks, "AT_ONCE", 10)
    run = IndexRun(table)
    most = 0
    for _ in range(200):
        run.commit()
        most = max(most, len(table.live()[1]))
    assert most <= 4 * index.FANOUT + 400 // index.FULL
    assert len(table.snapshots) <= 10 + 10 + 2 * index.FANOUT
    exact(table, 200)
    head = TableCommitter(table, "main", "s", 0, run.clock).head()
    assert head.entry is not None
    assert head.entry.end == run.end == Cut({P: 2000, Q: 2000})


def test_the_position_is_found_when_everything_else_was_expired(table: FakeIndex):
    """L11: a merge on top of the tag, and nothing left before it."""
    run = IndexRun(table)
    for _ in range(4):
        run.commit()
    assert maintenance_tasks.MERGE in next(table.history("main")).summary
    table.add([], {})
    table.expire(2**62, 1)
    assert len(list(table.history("main"))) == 1
    heir = IndexRun(table, epoch=2)
    assert heir.end == Cut({P: 40, Q: 40})
    for _ in range(5):
        assert heir.commit() == ""
    exact(table, 9)


def test_what_a_merge_reads_is_counted_against_what_the_manifests_say(table: FakeIndex):
    run = IndexRun(table)
    for _ in range(3):
        run.commit()
    newest, files = table.live()
    table.files[newest.id] = [*files[1:], replace(files[0], rows=files[0].rows + 1)]
    assert "expected 9 rows, found 8" in run.commit()


# ── merging, when something goes wrong ───────────────────────────────────────────────────────────


def test_a_merge_whose_answer_was_lost_is_found_and_nothing_live_is_removed(table: FakeIndex):
    run = IndexRun(table)
    table.rewrites = ["lost"]
    for _ in range(4):
        assert run.commit() == ""
    newest, [file] = table.live()
    assert newest.manifest_list not in table.deleted
    assert Path(file.path).exists()
    exact(table, 4)


def test_files_of_a_merge_that_failed_go_when_it_can_come_to_nothing_any_more(table: FakeIndex):
    run = IndexRun(table)
    table.rewrites = ["dropped"]
    for _ in range(3):
        run.commit()
    before = table.on_disk
    assert "503" in run.commit()
    [made] = table.on_disk - before - {run.table.live()[1][-1].path}
    assert Path(made).name.startswith("frazil-s-1-4-"), "named so that `frazil orphans` finds it"
    run.clock.sleep(3600)
    assert run.commit() == "", "the next commit moved the table on"
    assert made in table.deleted
    assert len(table.live()[1]) == 1
    assert table.on_disk >= {file.path for file in table.live()[1]}
    exact(table, 5)


def test_a_request_that_may_still_arrive_keeps_its_files(table: FakeIndex):
    """Nothing is deleted before it is certain that the merge was not, and will not be, applied."""
    run = IndexRun(table)
    table.rewrites = ["dropped"]
    for _ in range(4):
        run.commit()
    run.clock.sleep(3600)
    run.upkeep.resolve()
    run.upkeep.resolve()
    assert table.deleted == []


def test_a_store_that_does_not_answer_is_left_in_peace_and_tried_again(
    table: FakeIndex, monkeypatch: pytest.MonkeyPatch
):
    run = IndexRun(table)
    asked: list[int] = []

    def away(*_: Any) -> pa.Table:
        asked.append(1)
        raise OSError("the bucket is away")

    with monkeypatch.context() as patched:
        patched.setattr(index, "read", away)
        for _ in range(40):
            run.commit()
            run.clock.sleep(1)
    assert run.upkeep.trouble == "OSError: the bucket is away"
    assert len(asked) < 8, "longer and longer"
    run.clock.sleep(3600)
    assert run.commit() == ""
    exact(table, 41)


def test_a_fenced_run_does_not_merge(table: FakeIndex):
    old = IndexRun(table)
    for _ in range(3):
        old.commit()
    heir = IndexRun(table, epoch=2)
    heir.commit()
    files = table.live()[1]
    old.upkeep._enough = 0
    assert old.upkeep.run_due() == ""
    assert table.live()[1] == files
    assert old.steps == []


def test_a_run_that_is_fenced_while_it_merges_changes_nothing(table: FakeIndex):
    old = IndexRun(table)
    heirs: list[IndexRun] = []
    table.rewrites, table.race = ["race"], lambda: heirs.append(IndexRun(table, epoch=2))
    for _ in range(3):
        old.commit()
    assert "has another run than epoch 1" in old.commit()
    assert len(table.live()[1]) == 4
    exact(table, 4)
    assert heirs[0].commit() == ""
    exact(table, 5)


def test_two_sinks_share_an_index_and_of_two_merges_one_gives_way(table: FakeIndex):
    ours, other = IndexRun(table, "s"), IndexRun(table, "x")
    for _ in range(2):
        ours.commit()
    other.commit()

    def race() -> None:
        other.upkeep._enough = 0
        assert other.upkeep.run_due() == ""  # merges the same four first

    table.rewrites, table.race = ["race"], race
    assert "Missing required files" in ours.commit()
    assert "index-merged" in other.steps
    assert len(table.live()[1]) == 1
    ours.clock.sleep(3600)
    for _ in range(20):
        assert ours.commit() == ""
        assert other.commit() == ""
    rows = table.rows()
    assert sorted(set(rows["sink"].to_pylist())) == ["s", "x"]
    assert len(rows) == 2 * (23 + 21)
    assert table.on_disk >= {file.path for file in table.live()[1]}


# ── what an index may look like ──────────────────────────────────────────────────────────────────


def test_an_added_or_renamed_column_is_kept(table: FakeIndex):
    shape = table.shape
    written = index.put(shape, "a", index.rows([]).slice(0))
    assert written == []
    batch = batch_of("s", 1, 0, Cut({P: 0}), [Range(P, 0, 3)])
    located = [(batch, {"db.t0": Snapshot(7, None, 0, 0, "", {})})]
    [file] = index.paths(index.write(shape, "a", located))
    schema = json.loads(shape.schema)
    by_name = {field["name"]: field for field in schema["fields"]}
    by_name["skipped"]["name"] = "left_out"
    schema["fields"].append({"id": 99, "name": "note", "required": False, "type": "string"})
    changed = replace(shape, schema=json.dumps(schema))
    rows = index.read(changed, [file])
    assert rows["left_out"].to_pylist() == [0]
    assert rows["note"].to_pylist() == [None]
    schema["fields"][-1]["required"] = True
    with pytest.raises(SchemaMismatch, match="'note'"):
        index.read(replace(shape, schema=json.dumps(schema)), [file])
    with pytest.raises(SchemaMismatch, match="make it optional"):
        index.put(replace(shape, schema=json.dumps(schema)), "a", index.rows(located))


# ── the six caveats ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stream() -> Stream:
    return Stream("db.a", "db.b")


def broken(stream: Stream, error: FrazilError) -> Callable[[], None]:
    """The index raises it, whatever is asked; until it is mended."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    stream.index.refresh = refuse  # type: ignore[method-assign]
    return lambda: stream.index.__dict__.pop("refresh")


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("cannot commit: 503"),
        IdentityMismatch("cannot commit to table db.index: it is gone"),
        ConfigError("cannot commit: 403"),
        Expired("cannot commit: its history ends"),
        SchemaMismatch("cannot write to the index"),
    ],
)
def test_l9_index_trouble_never_stops_the_data(stream: Stream, error: FrazilError):
    stream.bounds = BackpressureLimits(6, 10**9, 3600)
    stream.begin_run()
    stream.hand(a=1)
    stream.settle()
    mended = broken(stream, error)
    for _ in range(5):
        stream.hand(a=1, b=2)
        stream.round()
        stream.clock.sleep(LONGEST_PAUSE)
    assert stream.live("a") == [f"c{n}-a" for n in range(1, 7)], "the data goes on"
    assert stream.live("b") == [f"c{n}-b" for n in range(2, 7)]
    assert stream.committer.progress.trouble == error.message, "and it is said why"
    assert stream.indexed == ["c1"]
    assert stream.committer.queue.over() == "", "five wait, six may"
    stream.committer.queue.pending.append(PendingBatch(stream.batch(a=1), stream.clock.now))
    reason = stream.committer._with_cause(stream.committer.queue.over())
    assert reason.startswith(
        "6 batches wait for a commit; the bound is 6; 5 of them are committed to all"
    )
    assert reason.endswith(f"but not to the index: {error.message}")
    mended()
    stream.settle()
    assert stream.indexed == [f"c{n}" for n in range(1, 8)], "old and new together, each once"
    assert (dict(stream.stuck), stream.committer.stalled()) == ({}, None)


def test_l9_an_index_that_needs_an_operator_is_reported_to_those_who_wait(stream: Stream):
    broken(stream, IdentityMismatch("cannot commit to table db.index: it is gone"))
    stream.hand(a=1, b=1)
    stream.round()
    assert isinstance(stream.committer.stalled(), IdentityMismatch)
    stream.hand(b=1)
    assert stream.committer.stalled() is None, "a table still has something to get"
    stream.round()
    assert isinstance(stream.committer.stalled(), IdentityMismatch)


@pytest.mark.parametrize("error", [Fenced("cannot"), Gap("cannot"), Overlap("cannot")])
def test_l9_what_contradicts_the_position_still_stops_at_once(stream: Stream, error: FrazilError):
    stream.hand(a=1)
    broken(stream, error)
    with pytest.raises(type(error)):
        stream.round()


def history_of(stream: Stream, name: str) -> dict[str, int]:
    """Commit id → the snapshot of the table that has it."""
    table = stream.tables[name]
    committed = ledger.entries(table.history("main"), "s")
    return {
        commit_id: snapshot.id for entry, snapshot in committed for commit_id in entry.commit_ids
    }


@pytest.mark.parametrize("seed", range(8))
def test_l10_l11_no_row_without_its_data_and_none_twice_whatever_dies(seed: int):
    """Answers are lost, servers away, runs end anywhere: at no moment is a row of the index ahead
    of the data (L10), and at the end each batch has been counted once (L11)."""
    dice = random.Random(seed)
    stream = Stream("db.a", "db.b")
    tables = [*stream.tables.values(), stream.index]
    for _ in range(60):
        for table in tables:
            if dice.random() < 0.2:
                table.faults = [dice.choice(["lost", "dropped"]) for _ in range(dice.randint(1, 7))]
        stream.hand(**{name: dice.randint(1, 9) for name in "ab" if dice.random() < 0.7})
        if dice.random() < 0.7:
            stream.round()
        if dice.random() < 0.1:
            for table in tables:
                table.faults = []  # a claim needs its tables
            stream.begin_run()
        stream.clock.sleep(dice.choice([0, 1, LONGEST_PAUSE]))
        histories = {name: history_of(stream, name) for name in stream.tables}
        for row in stream.index.live():
            commit_id, _, names = row.partition(":")
            assert all(commit_id in histories[name] for name in names.split(",") if name), (
                "orphaned"
            )
    for table in tables:
        table.faults = []
    stream.settle()
    assert stream.indexed == [f"c{n}" for n in range(1, 61)]
    for name, table in stream.tables.items():
        batches = [batch for batch in table.live() if batch]
        assert len(set(batches)) == len(batches), name
    total = sum(
        entry.total.offsets for entry, _ in ledger.entries(stream.index.history("main"), "s")
    )
    assert total == 600


def test_l12_what_an_abandoned_run_leaves_is_found_by_its_name():
    """Data files, manifests, files of the index and of its merges: all are named alike."""
    made = [
        f"/lake/{where}/frazil-s-{epoch}-7-{uuid.uuid4()}{end}"
        for epoch in (1, 2)
        for where, end in (
            ("t/data/d=1", ".parquet"),
            ("t/metadata", "-m0.avro"),
            ("index/data", ".parquet"),
            ("index/metadata", "-m0.avro"),
        )
    ]
    orphans = maintenance_tasks.orphan_files(
        made, sink="s", epoch=2, referenced=made[2:3], staged=[]
    )
    assert orphans == [made[0], made[1], made[3]]


def test_l12_what_iceberg_made_for_a_commit_that_came_to_nothing_is_found_too():
    """Its names tell nothing: whoever asks must know that they are old."""
    one, other = f"/i/metadata/{uuid.uuid4()}-m0.avro", f"/i/metadata/{uuid.uuid4()}-m12.avro"
    lists = [f"/i/metadata/snap-{n}-1-{uuid.uuid4()}.avro" for n in (123, 456)]
    ours = f"/i/metadata/frazil-s-1-7-{uuid.uuid4()}-m0.avro"
    others = ["/i/metadata/v7.metadata.json", "/i/metadata/version-hint.text", "/i/metadata/x.avro"]
    orphans = maintenance_tasks.abandoned(
        [one, other, *lists, ours, *others], [f"file:{one}", lists[1]]
    )
    assert orphans == [other, lists[0]]


def test_l13_one_partitions_trouble_stays_its_own():
    """The index and the ledger tell of each partition apart: one hole, one line that says so."""
    snapshots, parts = [], []
    for n in range(4):
        ranges = [Range(p, n * 10, n * 10 + 10) for p in (P, Q)]
        begin = Cut({P: n * 10, Q: n * 10})
        batch = replace(batch_of("s", 1, n, begin, ranges), commit_id=f"c{n}")
        summary = {**entry_of([batch], "db.t0", 1).summary(), "added-records": "20"}
        snapshots.append(Snapshot(100 + n, 99 + n if n else None, n + 1, n, "append", summary))
        parts.append(index.rows([(batch, {"db.t0": snapshots[-1]})]))
    parts[2] = parts[2].filter(pc.not_equal(parts[2]["partition"], Q.number))
    rows, position = pa.concat_tables(parts), Cut({P: 40, Q: 40})
    evidence = Evidence(
        "db.t0", snapshots[::-1], index={"s": parsed_rows(rows)}, positions={"s": position}
    )
    [report] = audit(evidence, "s")
    verdicts = {line.range.partition: line.verdict for line in report.partitions}
    assert verdicts[P] == "proven"
    assert verdicts[Q] != "proven"
    assert {r for finding in report.findings for r in finding.ranges} == {Range(Q, 20, 30)}


def test_l14_a_slow_index_pushes_back_and_says_so(stream: Stream):
    """The stream waits at its bound, with a reason; nothing piles up, nothing is lost."""
    stream.bounds = BackpressureLimits(4, 10**9, 3600)
    stream.begin_run()
    stream.committer.queue.clock = time
    slow, append = threading.Event(), stream.index.append

    def slowly(*args: Any, **more: Any) -> None:
        assert slow.wait(30)
        append(*args, **more)

    stream.index.append = slowly  # type: ignore[method-assign]
    stream.committer.start()
    handed: list[str] = []
    feeder = threading.Thread(
        target=lambda: [handed.append(stream.hand(a=1, b=1).commit_id) for _ in range(12)]
    )
    try:
        feeder.start()
        deadline = time.monotonic() + 30
        while not stream.committer.progress.blocked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "batches wait for a commit; the bound is 4" in stream.committer.progress.blocked
        assert len(stream.committer.pending) == len(handed) == 4
        slow.set()
        feeder.join(30)
        assert stream.committer.flush(30)
    finally:
        slow.set()
        stream.committer.close()
    assert stream.committer.progress.blocked == ""
    assert stream.indexed == handed == [f"c{n}" for n in range(1, 13)]


# ── rebuilt from the ledgers ─────────────────────────────────────────────────────────────────────


class Filled(Stream):
    """A stream whose index has rows, and ledgers to rebuild them from."""

    def __init__(self, dice: random.Random, batches: int, *names: str) -> None:
        super().__init__(*names)
        self.dice = dice
        self.alone = len(names) == 1
        self.compacted = False
        self.made_of: list[StagedBatch] = []
        self.rows: list[pa.Table] = []
        self.committer.queue.alone = self.alone
        self.committer._events.index_manifests = self._rows  # type: ignore[assignment]
        for n in range(batches):
            self.committer.submit(self._random(n))
            if dice.random() < 0.4:
                self.round()
        self.settle()
        self.all_rows = pa.concat_tables(self.rows)

    def _rows(self, located: Any) -> list[str]:
        self.rows.append(index.rows(located))
        return []

    def _random(self, number: int) -> StagedBatch:
        dice, name = self.dice, [*self.tables]
        where = [p for p in (P, Q) if dice.random() < 0.8] or [P]
        ranges = [Range(p, self.end[p], self.end[p] + dice.randint(1, 9)) for p in where]
        held = name if self.alone else [table for table in name if dice.random() < 0.6]
        tables = tuple(
            StagedTable(
                table,
                f"uuid-{table}",
                0,
                (f"c{number}-{table}",),
                (),
                1,
                1,
                tuple(map(self._tally, ranges)),
            )
            for table in held
        )
        total = () if self.alone else tuple(map(self._tally, ranges))
        made = StagedBatch(
            "s",
            1,
            number,
            f"c{number}",
            self.end,
            self.end.after(ranges),
            {},
            "",
            0,
            1,
            tables,
            total,
        )
        self.staged[made.commit_id], self.end = made, made.end
        self.made_of.append(made)
        return made

    def _tally(self, range_: Range) -> RangeCounts:
        """All written where there is one table; else some were for others; now and then more."""
        fates, left = [0, 0, 0], len(range_)
        odd = self.dice.random() < 0.1
        for n in (0, 1, 2):
            if odd or (n == 1 and not self.alone):
                fates[n] = self.dice.randint(0, left)
                left -= fates[n]
        return RangeCounts(range_, left, *fates)

    @property
    def ledgers(self) -> list[LedgerHistory]:
        def of(table: FakeTable) -> list[Snapshot]:
            return [s for _, s in ledger.entries(table.history("main"), "s")][::-1]

        histories = [
            LedgerHistory(name, table.uuid, of(table), self._files(name))
            for name, table in self.tables.items()
        ]
        return (
            histories
            if self.alone
            else [*histories, LedgerHistory(index.STREAM, "", of(self.index))]
        )

    def _files(self, name: str) -> list[DataFile]:
        """Live ones, unless the table was compacted."""
        if self.compacted:
            return []
        return [
            DataFile(
                f"/t/frazil-s-1-{batch.number}-{uuid.uuid4()}.parquet",
                tally.written,
                tally.range.partition,
                None,
                0,
                snapshot.sequence,
            )
            for entry, snapshot in ledger.entries(self.tables[name].history("main"), "s")
            for batch in self.made_of
            if batch.commit_id in entry.commit_ids
            for tally in batch.table(name).tallies
        ]

    def rebuild(self, rows: pa.Table) -> tuple[pa.Table, RebuiltRows]:
        """The rows as they are afterwards."""
        rebuilt = rebuild(self.ledgers, rows.select(list(COLUMNS)), self.end)
        gone = set(rebuilt.drop)
        kept = rows.filter(pa.array([n not in gone for n in range(len(rows))], pa.bool_()))
        return pa.concat_tables([kept, index.rows(rebuilt.located)]), rebuilt

    def verdicts(self, rows: pa.Table) -> set[str]:
        """The audit's, of ledger and index."""
        seen = set()
        of = {
            name: parsed_rows(rows.filter(pc.equal(rows["table_name"], name)))
            for name in (*self.tables, index.STREAM)
        }
        for name, table in self.tables.items():
            evidence = Evidence(
                name,
                list(table.history("main")),
                index={"s": of[name]},
                stream={} if self.alone else {"s": of[index.STREAM]},
                positions={"s": self.end},
            )
            seen |= {report.verdict for report in audit(evidence, "s")}
        return seen


def keys(rows: pa.Table) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for row in rows.select(["batch", "table_name", "topic", "partition"]).to_pylist()
    ]


def test_an_index_that_lacks_nothing_is_left_as_it_is():
    for names in (["db.a"], ["db.a", "db.b"]):
        filled = Filled(random.Random(1), 30, *names)
        assert filled.verdicts(filled.all_rows) == {"proven"}
        assert filled.rebuild(filled.all_rows)[1] == RebuiltRows()


@pytest.mark.parametrize("names", [["db.a"], ["db.a", "db.b", "db.c"]], ids=["one", "three"])
@pytest.mark.parametrize("seed", range(40))
def test_rows_that_are_lost_or_altered_are_rebuilt_from_the_ledgers(seed: int, names: list[str]):
    dice = random.Random(seed)
    filled = Filled(dice, 24, *names)
    rows = filled.all_rows.take(
        [n for n in range(len(filled.all_rows)) if dice.random() > 0.15 * (seed % 4)]
    )
    if seed % 3 == 0 and len(rows):
        at = dice.randrange(len(rows))
        altered = rows["written"].to_pylist()
        altered[at] += dice.choice([-1, 1, 5])
        rows = rows.set_column(7, rows.schema.field(7), pa.array(altered, pa.int64()))
    after, rebuilt = filled.rebuild(rows)
    assert len(set(keys(after))) == len(after), "doubled"
    _, nothing = filled.rebuild(after)
    assert (nothing.located, nothing.drop) == ([], [])
    assert nothing.unknown == rebuilt.unknown
    if not rebuilt.unknown:
        assert filled.verdicts(after) == {"proven"}
        for name in filled.tables:
            of = after.filter(pc.equal(after["table_name"], name))
            total = sum(entry.total.written for entry in ledgers(filled.tables[name]))
            assert sum(of["written"].to_pylist()) == total
    assert not (rebuilt.unknown and len(names) == 1), "of one table alone everything is known"


def ledgers(table: FakeTable) -> list[ledger.LedgerEntry]:
    return [entry for entry, _ in ledger.entries(table.history("main"), "s")]


def test_everything_lost_is_rebuilt_entry_by_entry():
    filled = Filled(random.Random(3), 40, "db.a")
    after, rebuilt = filled.rebuild(filled.all_rows.slice(0, 0))
    assert filled.verdicts(after) == {"proven"}
    entries = [entry for entry in ledgers(filled.tables["db.a"]) if entry.ranges]
    assert len(rebuilt.ranges) == sum(len(entry.ranges) for entry in entries)
    assert set(after["snapshot_id"].to_pylist()) == {
        snapshot.id
        for entry, snapshot in ledger.entries(filled.tables["db.a"].history("main"), "s")
        if entry.ranges
    }


def test_what_the_index_has_not_reached_yet_is_not_rebuilt():
    """The sink writes those rows itself: rebuilt here too, they would be written twice."""
    filled = Filled(random.Random(4), 20, "db.a")
    kept = filled.all_rows.filter(pc.less(filled.all_rows["batch"], 10))
    reached = {row["partition"]: row["end_offset"] for row in kept.to_pylist()}
    position = Cut({p: reached.get(p.number, 0) for p in (P, Q)})
    rebuilt = rebuild(filled.ledgers, kept.select(list(COLUMNS)), position)
    assert all(span.range.end <= position[span.range.partition] for span in rebuilt.ranges)


def test_rows_that_the_index_lacks_are_written_with_one_batch(monkeypatch: pytest.MonkeyPatch):
    """Its commit was applied and only the tag failed: the next one goes on behind that batch."""
    written: list[list[str]] = []

    def write(_shape: Any, _prefix: str, located: Any, _until: Any) -> list[str]:
        written.append([batch.commit_id for batch, _ in located])
        return []

    monkeypatch.setattr(index, "write", write)
    owed: Any = (batch(0, 5, "owed"), {})
    stream = StreamState("s", 1, StreamPosition(), 0)
    writer = IndexWriter(Mock(), stream, None, unindexed=[owed], ends=Cut)
    writer._spec = Mock()
    first, second = (batch(5, 9, "a", 1), {}), (batch(9, 12, "b", 2), {})
    for located in ([first], [first, second], [second]):
        writer.manifests(located)
    assert written == [["owed", "a"], ["owed", "a", "b"], ["b"]]


def test_ranges_that_no_snapshot_has_any_more_are_reported():
    filled = Filled(random.Random(5), 30, "db.a")
    filled.tables["db.a"].refs["frazil/s"] = filled.tables["db.a"].refs["main"]
    filled.tables["db.a"].expire(keep=2)
    rows = filled.all_rows.filter(pc.not_equal(filled.all_rows["batch"], 3))
    lost = filled.all_rows.filter(pc.equal(filled.all_rows["batch"], 3))
    _, rebuilt = filled.rebuild(rows)
    assert rebuilt.located == []
    unknown = {
        (span.range.partition.number, span.range.start, span.range.end)
        for span in rebuilt.unknown
        if span.range and "no snapshot that is left" in span.reason
    }
    wanted = zip(
        *(lost[c].to_pylist() for c in ("partition", "start_offset", "end_offset")), strict=True
    )
    assert unknown == set(wanted)


def test_the_rows_of_a_table_show_how_far_it_was_recorded():
    """As they are read: in several chunks, with dictionaries of their own."""
    chunks = [
        pa.table(
            {
                "table_name": pa.array(names).dictionary_encode(),
                "topic": pa.array(["t"] * len(names)).dictionary_encode(),
                "partition": pa.array([0] * len(names), pa.int32()),
                "start_offset": starts,
                "end_offset": [start + 5 for start in starts],
            }
        )
        for names, starts in ((["db.a", "db.b"], [0, 3]), (["db.b", "*"], [8, 0]))
    ]
    ends = index.ends(pa.concat_tables(chunks, promote_options="none"))
    where = Partition("t", 0)
    assert ends == {"db.a": {where: (0, 5)}, "db.b": {where: (3, 13)}, "*": {where: (0, 5)}}
