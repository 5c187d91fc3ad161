"""Compaction against a table in memory whose reader applies deletes row by row, as the spec says.

The files are real ones on disk; the snapshots are a Python list. What Iceberg itself makes of it is
in `tests/spark/test_compact.py`.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile

from frazil.errors import AccountingError, CommitStateUnknown, SchemaMismatch, Unavailable
from frazil.files.rewrite import (
    AppliedDeletes,
    EqualityDelete,
    RewriteJob,
    SourceFile,
    mask,
    rewrite,
)
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg import rewrite_data_files as rounds
from frazil.iceberg.rewrite_data_files import COMPACT, RewriteDataFiles
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut

FIELDS = [
    {"id": 1, "name": "since", "required": True, "type": "long"},  # a name that others use, too
    {"id": 2, "name": "code", "required": True, "type": "string"},
    {"id": 3, "name": "value", "required": False, "type": "string"},
]
KEYS = {1: ("since",), 2: ("since", "code")}
UNPARTITIONED = '{"spec-id": 0, "fields": []}'
BUCKETS = json.dumps(
    {
        "spec-id": 1,
        "fields": [{"source-id": 2, "field-id": 1000, "name": "code", "transform": "identity"}],
    }
)
LARGE = 2**12  # a target size for which a file of a thousand rows is not small
Row = tuple[int, str, str | None]


def schema(*fields: Mapping[str, Any]) -> str:
    return json.dumps({"type": "struct", "schema-id": 0, "fields": list(fields)})


def shape(folder: Path, spec: str = UNPARTITIONED, target: int = 2**27) -> WriterSpec:
    return WriterSpec("db.t", str(folder), schema(*FIELDS), 0, spec, {}, target, "none", {})


def written(shape: WriterSpec, rows: Sequence[Sequence[Any]]) -> list[str]:
    writer = TableWriter(shape, "test")
    columns = [list(column) for column in zip(*rows, strict=True)]
    if columns:
        arrays = [pa.array(c, f.type) for c, f in zip(columns, shape.arrow, strict=True)]
        writer.write(pa.Table.from_arrays(arrays, schema=shape.arrow))
    return [file.descriptor for file in writer.close()]


def equality(of: WriterSpec, keys: int) -> WriterSpec:
    return replace(
        of, schema=schema(*FIELDS[:keys]), spec=UNPARTITIONED, equality=tuple(range(1, keys + 1))
    )


@dataclass(frozen=True)
class Listed:
    descriptor: str
    sequence: int
    everywhere: bool


class Memory:
    """A table whose snapshots are lists of files; who reads it applies the deletes by hand."""

    name = "db.t"

    def __init__(self, shape: WriterSpec, version: int = 2, keys: int = 1) -> None:
        self.shape = shape
        self.format_version = version
        self.keys = keys
        self.snapshots: list[tuple[Snapshot, list[Listed]]] = []
        self.removed: list[str] = []
        #: what the next `replace` meets: "lost" applies and fails, "down" fails, "late" lets a
        #: commit in before it
        self.fault = ""
        self.late: Callable[[], None] = lambda: None
        self.model: dict[tuple[Any, ...], Row] = {}
        self.add([], {**LedgerEntry("s", 1, ("claim",), (0, 0), Cut(), Cut()).summary()})

    def add(self, files: list[Listed], summary: Mapping[str, str], kept: Any = None) -> None:
        before = self.snapshots[-1] if self.snapshots else None
        sequence = len(self.snapshots) + 1
        numbered = [replace(file, sequence=file.sequence or sequence) for file in files]
        old = (before[1] if before else []) if kept is None else kept
        snapshot = Snapshot(
            100 + sequence,
            before[0].id if before else None,
            sequence,
            0,
            "",
            dict(summary),
            f"list-{sequence}",
        )
        every = [*old, *numbered]
        data = [
            fact
            for fact in map(json.loads, (e.descriptor for e in every))
            if fact["content"] == "data"
        ]
        snapshot.summary["total-records"] = str(sum(fact["record-count"] for fact in data))
        self.snapshots.append((snapshot, every))

    def upsert(self, rows: Sequence[Row], deleted: Sequence[tuple[Any, ...]] = ()) -> None:
        """One batch, as the sink commits it: rows, and deletes of all its keys."""
        last = {row[: self.keys]: row for row in rows}
        gone = [*dict.fromkeys([*last, *deleted])]
        files = [
            Listed(descriptor, 0, False) for descriptor in written(self.shape, list(last.values()))
        ]
        files += [
            Listed(descriptor, 0, True)
            for descriptor in written(equality(self.shape, self.keys), gone)
        ]
        count = {"added-equality-delete-files": "1", "added-equality-deletes": str(len(gone))}
        self.add(files, count)
        for key in deleted:
            self.model.pop(key, None)
        self.model.update(last)

    @property
    def files(self) -> list[dict[str, Any]]:
        return [
            json.loads(file.descriptor) | {"sequence": file.sequence}
            for file in self.snapshots[-1][1]
        ]

    def count(self, content: str) -> int:
        return sum(file["content"] == content for file in self.files)

    def rows(self) -> list[Row]:
        files = self.files
        rows = []
        for data in (file for file in files if file["content"] == "data"):
            gone = set()
            for file in files:
                if file.get("referenced-data-file") == data["file-path"]:
                    gone |= positions(file)
            deleted = set()
            for file in files:
                if file["content"] == "equality-deletes" and file["sequence"] > data["sequence"]:
                    deleted |= set(read(file["file-path"]))
            for position, row in enumerate(read(data["file-path"])):
                if position not in gone and row[: self.keys] not in deleted:
                    rows.append(row)
        return sorted(rows)

    def check(self) -> None:
        assert self.rows() == sorted(self.model.values())
        for file in self.files:
            assert Path(file["file-path"]).exists()

    # What a keeper needs of it.

    def refresh(self) -> None: ...

    def history(self, branch: str) -> Iterator[Snapshot]:
        assert branch == "main"
        return (snapshot for snapshot, _ in reversed(self.snapshots))

    def tagged(self, tag: str) -> Snapshot | None:
        return None

    def manifests(self, snapshot_id: int) -> set[str]:
        return {"live.avro"}

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.removed.append(path)
            Path(path).unlink(missing_ok=True)

    def contents(self, branch: str, known: Mapping[str, Any]) -> tuple[Snapshot, dict[str, Any]]:
        snapshot, files = self.snapshots[-1]
        return snapshot, {"manifest": files}

    def replace(
        self,
        removed: Sequence[str],
        added: Sequence[str],
        summary: Mapping[str, str],
        *,
        branch: str,
        since: int,
        leftovers: list[str],
    ) -> None:
        fault, self.fault = self.fault, ""
        if fault == "down":
            raise Unavailable("cannot rewrite: 503")
        if fault == "late":
            self.late()
        leftovers.append("list.avro")
        if self.snapshots[-1][0].id != since:
            raise CommitStateUnknown("cannot rewrite: it is no longer the newest one")
        files = self.snapshots[-1][1]
        assert removed
        assert set(removed) <= {file.descriptor for file in files}
        assert len(set(removed)) == len(removed)
        kept = [file for file in files if file.descriptor not in removed]
        masks = [fact for fact in map(json.loads, added) if fact["content"] != "data"]
        if masks:  # Iceberg's rule
            assert any(json.loads(descriptor)["content"] != "data" for descriptor in removed)
        self.add([Listed(descriptor, 0, False) for descriptor in added], summary, kept)
        named = [e["referenced-data-file"] for e in self.files if e.get("referenced-data-file")]
        assert len(set(named)) == len(named), "two masks of one file"
        if fault == "lost":
            raise CommitStateUnknown("cannot rewrite: the answer was lost")


@lru_cache(maxsize=1000)
def read(path: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in pq.read_table(path).to_pylist()]


def positions(fact: Mapping[str, Any]) -> set[int]:
    """By pyiceberg's reader, or Arrow's."""
    path = fact["file-path"]
    if fact["file-format"] == "puffin":
        [vector] = deletion_vectors_from_puffin_file(PuffinFile(Path(path).read_bytes()))
        assert vector.referenced_data_file == fact["referenced-data-file"]
        numbers = set(vector.to_vector().to_pylist())
    else:
        numbers = {row["pos"] for row in pq.read_table(path).to_pylist()}
    assert len(numbers) == fact["record-count"]
    return numbers


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        self.now += 10_000.0
        return self.now


def compaction(table: Memory, **more: Any) -> RewriteDataFiles:
    given = {
        "sink": "s",
        "epoch": 1,
        "shape": lambda: table.shape,
        "after": 1,
        "clock": Clock(),
        "prefix": lambda: "frazil-s-1-0",
        **more,
    }
    return RewriteDataFiles(table, **given)


@pytest.fixture(params=[2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


def test_small_files_become_one_and_no_delete_is_left(tmp_path: Path):
    table = Memory(shape(tmp_path))
    for batch in range(10):
        table.upsert([(key, "a", f"{batch}") for key in range(batch, batch + 20)], [(batch,)])
    steps: list[str] = []
    assert compaction(table, step=steps.append).run_due() == ""
    assert steps == ["compact", "compacted"]
    assert table.count("equality-deletes") == 0
    assert table.count("data") == 2, "the newest batch has nothing to take out"
    assert COMPACT in table.snapshots[-1][0].summary
    table.check()


def test_of_a_large_file_only_positions_are_written(tmp_path: Path, version: int):
    table = Memory(shape(tmp_path, target=LARGE), version)
    table.upsert([(key, "a", "old") for key in range(1000)])
    base = table.files[0]["file-path"]
    keeper = compaction(table)
    for batch in range(3):
        table.upsert([(batch, "a", f"new {batch}")], [(500 + batch,)])
        assert keeper.run_due() == ""
        table.check()
        assert table.count("equality-deletes") == 0
        [hides] = [e for e in table.files if e.get("referenced-data-file") == base]
        assert positions(hides) == {*range(batch + 1), *range(500, 501 + batch)}
        assert hides["file-format"] == ("puffin" if version == 3 else "parquet")


def test_a_large_file_with_many_deleted_rows_is_rewritten(tmp_path: Path, version: int):
    table = Memory(shape(tmp_path, target=LARGE), version)
    table.upsert([(key, "a", "old") for key in range(1000)])
    keeper = compaction(table)
    table.upsert([], [(key,) for key in range(150)])
    keeper.run_due()
    assert table.count("position-deletes") == 1
    table.upsert([], [(key,) for key in range(150, 250)])
    keeper.run_due()
    assert [file["record-count"] for file in table.files] == [750]
    table.check()


def test_a_key_of_several_columns_and_partitions_is_deleted_wherever_it_is(tmp_path: Path):
    table = Memory(shape(tmp_path, BUCKETS), keys=1)
    table.upsert([(1, "a", "x"), (2, "a", "x"), (3, "b", "x")])
    table.upsert([(1, "b", "moved")])
    compaction(table).run_due()
    table.check()
    both = Memory(shape(tmp_path), keys=2)
    both.upsert([(1, "a", "x"), (1, "b", "x"), (2, "b", "x")])
    both.upsert([(1, "b", "y")], [(2, "b")])
    compaction(both).run_due()
    assert both.rows() == [(1, "a", "x"), (1, "b", "y")]
    assert both.count("equality-deletes") == 0


def test_deletes_that_count_for_nothing_are_removed_without_reading(tmp_path: Path):
    table = Memory(shape(tmp_path))
    table.upsert([(key, "a", "x") for key in range(10)])
    table.upsert([(key, "a", "x") for key in range(10, 20)])
    ran: list[Any] = []
    compaction(table, run=lambda jobs: ran.extend(jobs) or []).run_due()
    assert ran == [], "bounds say that the keys do not meet"
    assert table.count("equality-deletes") == 0
    table.check()


def test_a_round_is_due_after_so_many_commits_with_deletes(tmp_path: Path):
    table = Memory(shape(tmp_path))
    keeper = compaction(table, after=3)
    table.upsert([(1, "a", "0")])
    keeper.run_due()
    rewritten = []
    for batch in range(7):
        table.upsert([(1, "a", str(batch))])
        before = len(table.snapshots)
        keeper.run_due()
        rewritten.append(len(table.snapshots) - before)
    assert rewritten == [0, 0, 1, 0, 0, 1, 0]


def test_a_round_is_due_by_deleted_keys_before_that(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(rounds, "FEW_KEYS", 30)
    table = Memory(shape(tmp_path))
    table.upsert([(key, "a", "0") for key in range(200)])
    keeper = compaction(table, after=100)
    keeper.run_due()
    rewritten = []
    for batch in range(6):
        table.upsert([(key, "a", str(batch)) for key in range(batch * 10, batch * 10 + 50)])
        before = len(table.snapshots)
        keeper.run_due()
        rewritten.append(len(table.snapshots) - before)
    assert rewritten == [0, 1, 0, 1, 0, 1], "a third of 300 rows, most of them gone"
    table.check()


def test_rounds_take_a_part_of_the_time_only(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(rounds, "REST", 10_000.0)
    table = Memory(shape(tmp_path))
    clock = Clock()
    keeper = compaction(table, clock=clock)
    rewritten, wants = [], []
    for batch in range(4):
        table.upsert([(1, "a", str(batch))])
        before = len(table.snapshots)
        clock.now += 10**6 if batch == 3 else 0
        clock.monotonic = lambda: clock.now  # type: ignore[method-assign]
        keeper.run_due()
        rewritten.append(len(table.snapshots) - before)
        wants.append(keeper.due_at is not None)
    assert rewritten == [1, 0, 0, 1]
    assert wants == [False, True, True, False], "it wants to be called when it has rested"


@pytest.mark.parametrize(
    ("rows", "keys"), [(0, 100_000), (300_000, 100_000), (1_200_000, 400_000), (10**9, 500_000)]
)
def test_deleted_keys_wait_in_proportion_within_bounds(rows: int, keys: int):
    assert rounds.enough(rows) == keys


def test_a_table_too_large_for_one_round_takes_several(tmp_path: Path, version: int):
    table = Memory(shape(tmp_path, target=LARGE), version)
    for part in range(5):
        table.upsert([(key, "a", "old") for key in range(part * 1000, part * 1000 + 1000)])
    keeper = compaction(table, most=1)  # a file each
    keeper.run_due()
    table.upsert([], [(key,) for key in range(0, 5000, 500)])
    looked = [keeper.run_due() == "" and table.count("equality-deletes") for _ in range(6)]
    assert looked == [1, 1, 1, 1, 0, 0], "the delete goes when the last file was looked at"
    assert table.count("position-deletes") == 5
    table.check()


# ── what may come in between ─────────────────────────────────────────────────────────────────────


def test_a_delete_that_lands_while_a_round_runs_is_not_lost(tmp_path: Path):
    """H6: the round is thrown away with its files, and done again later."""
    table = Memory(shape(tmp_path))
    table.upsert([(1, "a", "x"), (2, "a", "x")])
    table.upsert([(2, "a", "y")])
    table.fault = "late"

    def late() -> None:
        table.upsert([], [(1,)])
        table.upsert([(3, "a", "z")])

    table.late = late
    keeper = compaction(table)
    assert "no longer the newest" in keeper.run_due()
    table.check()
    assert sum(path.endswith(".parquet") for path in table.removed) == 1
    assert keeper.run_due() == ""
    assert table.count("equality-deletes") == 0
    table.check()


@pytest.mark.parametrize("fault", ["lost", "down"])
def test_whether_a_round_was_done_is_asked_of_the_table(tmp_path: Path, fault: str):
    table = Memory(shape(tmp_path))
    for value in "xyz":
        table.upsert([(1, "a", value), (ord(value), "a", value)])
    table.fault = fault
    keeper = compaction(table)
    trouble = keeper.run_due()
    assert bool(trouble) == (fault == "down")
    made = [path for path in table.removed if path.endswith(".parquet")]
    assert made == []
    table.check()
    table.upsert([(1, "a", "last")])
    assert keeper.run_due() == ""
    assert table.count("equality-deletes") == 0
    table.check()
    if fault == "down":
        assert len([path for path in table.removed if path.endswith(".parquet")]) == 1


def test_files_of_a_round_whose_snapshot_was_expired_before_it_was_found_stay(tmp_path: Path):
    """It was done, others committed on top, and only their last snapshot is left: it needs them."""
    table = Memory(shape(tmp_path))
    table.upsert([(1, "a", "x"), (2, "a", "x")])
    table.upsert([(2, "a", "y")])
    replace_ = table.replace

    def done_and_forgotten(*given: Any, **more: Any) -> None:
        replace_(*given, **more)
        table.add([], {})
        table.add([], {})
        del table.snapshots[:-1]

    table.replace = done_and_forgotten  # type: ignore[method-assign]
    keeper = compaction(table)
    assert keeper.run_due(), "nothing shows whether it was done"
    table.check()
    assert table.removed == []


def test_a_run_that_is_over_touches_nothing(tmp_path: Path):
    table = Memory(shape(tmp_path))
    table.upsert([(1, "a", "x")])
    table.upsert([(1, "a", "y")])
    table.add([], LedgerEntry("s", 2, ("newer",), (0, 0), Cut(), Cut()).summary())
    before = len(table.snapshots)
    assert compaction(table).run_due() == ""
    assert len(table.snapshots) == before


def test_an_error_is_reported_and_retried_later(tmp_path: Path):
    table = Memory(shape(tmp_path))
    table.upsert([(1, "a", "x")])
    table.upsert([(1, "a", "y")])

    def fails(jobs: Sequence[RewriteJob]) -> list[Any]:
        raise OSError("the store is away")

    keeper = compaction(table, run=fails)
    assert "the store is away" in keeper.run_due()
    assert keeper.trouble
    table.check()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_rows_are_those_of_the_model(tmp_path: Path, seed: int):
    """Small and large files, several runs, few bytes a round, lost answers, late deletes."""
    chance = random.Random(seed)
    keys, version = chance.choice([1, 2]), chance.choice([2, 3])
    spec = chance.choice([UNPARTITIONED, BUCKETS])
    table = Memory(shape(tmp_path, spec, chance.choice([LARGE // 4, LARGE, 2**27])), version, keys)

    def batch() -> None:
        span = chance.choice([5, 40, 400])
        low = chance.randrange(0, 400)
        keyed = [(chance.randrange(low, low + span), chance.choice("ab")) for _ in range(span)]
        gone = [row[:keys] for row in keyed[: chance.randrange(0, 4)]]
        value = str(chance.random())
        table.upsert([(*row, value) for row in keyed if row[:keys] not in gone], gone)

    most = chance.choice([1, 2000, 2**30])
    keeper = compaction(table, most=most)
    table.late = batch
    for _ in range(25):
        batch()
        if chance.random() < 0.1:
            keeper = compaction(table, most=most)  # another process of the same run, say
        table.fault = chance.choice(["", "", "", "lost", "down", "late"])
        keeper.run_due()
        table.check()
    table.fault = ""
    for _ in range(100):
        keeper.run_due()
        if not table.count("equality-deletes"):
            break
    table.check()
    assert table.count("equality-deletes") == 0


def test_deletes_of_a_branch_that_was_moved_here_are_not_taken_for_known(tmp_path: Path):
    """Of a lower number than what was looked at, and still never seen."""
    table = Memory(shape(tmp_path, target=LARGE))
    table.upsert([(key, "a", "old") for key in range(1000)])
    base = list(table.snapshots)
    table.upsert([], [(1,)])
    elsewhere = table.snapshots[-1]
    table.snapshots = [*base, (replace(elsewhere[0], id=7), base[-1][1])]
    table.model[1,] = (1, "a", "old")
    table.upsert([], [(2,)])
    keeper = compaction(table)
    keeper.run_due()
    table.check()
    moved = [file for file in elsewhere[1] if file not in base[-1][1]]
    snapshot, files = table.snapshots[-1]
    table.snapshots[-1] = (
        replace(snapshot, id=8, summary={"added-equality-delete-files": "1"}),
        [*files, *moved],
    )
    del table.model[1,]
    table.add([], LedgerEntry("s", 1, ("again",), (0, 0), Cut(), Cut()).summary())
    table.check()
    assert keeper.run_due() == ""
    assert table.count("equality-deletes") == 0
    table.check()


# ── one task ─────────────────────────────────────────────────────────────────────────────────────


def source(descriptor: str, sequence: int, **more: Any) -> SourceFile:
    fact = json.loads(descriptor)
    given = {"small": True, "rows": fact["record-count"], **more}
    return SourceFile(
        path=fact["file-path"], bytes=fact["file-size-in-bytes"], sequence=sequence, **given
    )


def test_a_delete_counts_for_older_files_only(tmp_path: Path):
    spec = shape(tmp_path)
    [data] = written(spec, [(1, "a", "x"), (2, "a", "x")])
    [gone] = written(equality(spec, 1), [(1,)])
    delete = EqualityDelete(json.loads(gone)["file-path"], 5, (1,))
    for sequence, left in ((4, 1), (5, 2), (6, 2)):
        done = rewrite(RewriteJob(spec, "p", (source(data, sequence),), (delete,), 0.2, 0))
        assert sum(file.rows for file in done.files) == left


def test_files_of_older_schemas_are_read_by_the_ids_of_their_columns(tmp_path: Path):
    old = replace(
        shape(tmp_path),
        schema=schema({"id": 1, "name": "id", "required": True, "type": "int"}, FIELDS[1]),
    )
    [data] = written(old, [(1, "a"), (2, "b")])
    spec = shape(tmp_path)
    [gone] = written(equality(spec, 1), [(1,)])
    delete = EqualityDelete(json.loads(gone)["file-path"], 9, (1,))
    done = rewrite(RewriteJob(spec, "p", (source(data, 1),), (delete,), 0.2, 0))
    [file] = done.files
    assert read(json.loads(file.descriptor)["file-path"]) == [(2, "b", None)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("uuid", [uuid.UUID(int=n).bytes for n in (1, 2, 3)]),
        ("fixed[3]", [b"abc", b"abd", b"abe"]),
        ("binary", [b"", b"a", b"ab"]),
        ("decimal(9, 2)", ["1.00", "1.10", "2.00"]),
        ("date", [1, 2, 3]),
        ("timestamptz", [1, 2, 3]),
        ("time", [1, 2, 3]),
        ("boolean", [True, False]),
    ],
)
def test_keys_may_be_of_any_type(tmp_path: Path, kind: str, values: list[Any]):
    spec = replace(
        shape(tmp_path), schema=schema({"id": 1, "name": "deleted", "required": True, "type": kind})
    )
    arrow = spec.arrow.field(0).type
    plain = arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow
    columns = pa.array(values, pa.string() if "decimal" in kind else plain).cast(plain)
    table = pa.Table.from_arrays([columns.cast(arrow)], schema=spec.arrow)

    def put(of: WriterSpec, rows: pa.Table) -> str:
        writer = TableWriter(of, "test")
        writer.write(rows)
        return writer.close()[0].descriptor

    gone = put(replace(spec, equality=(1,)), table.slice(1, 1))
    delete = EqualityDelete(json.loads(gone)["file-path"], 9, (1,))
    done = rewrite(RewriteJob(spec, "p", (source(put(spec, table), 1),), (delete,), 0.2, 0))
    assert sum(file.rows for file in done.files) == len(values) - 1


@pytest.mark.parametrize("version", [2, 3])
def test_positions_are_read_as_they_were_written(tmp_path: Path, version: int):
    spec = shape(tmp_path)
    [data] = written(spec, [(n, "a", "x") for n in range(100_000)])
    gone = np.array([0, 7, 65_535, 65_536, 99_999], np.uint64)
    fact = json.loads(mask(spec, "p", version, data, gone))
    assert positions(fact) == set(gone.tolist())
    at = (fact["content-offset"], fact["content-size-in-bytes"]) if version == 3 else None
    hides = AppliedDeletes(fact["file-path"], at)
    done = rewrite(RewriteJob(spec, "p", (source(data, 1, hiding=(hides,)),), (), 0.2, 0))
    assert sum(file.rows for file in done.files) == 99_995
    kept = rewrite(
        RewriteJob(spec, "p", (source(data, 1, hiding=(hides,), small=False),), (), 0.2, 0)
    )
    assert [len(rows_gone) for rows_gone in kept.gone.values()] == [0], (
        "they are written down already"
    )


def test_rows_keep_their_numbers_when_they_move(tmp_path: Path):
    spec = shape(tmp_path)
    [data] = written(spec, [(n, "a", "x") for n in range(5)])
    [gone] = written(equality(spec, 1), [(1,), (3,)])
    delete = EqualityDelete(json.loads(gone)["file-path"], 9, (1,))
    done = rewrite(RewriteJob(spec, "p", (source(data, 4, first_row=100),), (delete,), 0.2, 0))
    path = json.loads(done.files[0].descriptor)["file-path"]
    assert [row[-2:] for row in read(path)] == [(100, 4), (102, 4), (104, 4)]
    again = rewrite(
        RewriteJob(spec, "p", (source(done.files[0].descriptor, 10, first_row=500),), (), 0.2, 0)
    )
    path = json.loads(again.files[0].descriptor)["file-path"]
    assert [row[-2:] for row in read(path)] == [(100, 4), (102, 4), (104, 4)]


def test_a_file_that_is_not_what_its_manifest_says_is_refused(tmp_path: Path):
    spec = shape(tmp_path)
    [data] = written(spec, [(1, "a", "x")])
    with pytest.raises(AccountingError, match="expected 2 rows, found 1"):
        rewrite(RewriteJob(spec, "p", (source(data, 1, rows=2),), (), 0.2, 0))
    with pytest.raises(SchemaMismatch, match="deleted by column 7"):
        rewrite(RewriteJob(spec, "p", (source(data, 1),), (EqualityDelete("x", 9, (7,)),), 0.2, 0))


def test_a_task_rewrites_no_more_large_files_than_allowed(tmp_path: Path):
    spec = shape(tmp_path)
    files = [written(spec, [(n, "a", "x") for n in range(100)])[0] for _ in range(3)]
    [gone] = written(equality(spec, 1), [(n,) for n in range(50)])
    delete = EqualityDelete(json.loads(gone)["file-path"], 9, (1,))
    sources = tuple(source(descriptor, 1, small=False) for descriptor in files)
    done = rewrite(RewriteJob(spec, "p", sources, (delete,), 0.2, 1))
    assert len(done.replaced) == 1
    assert [len(rows_gone) for rows_gone in done.gone.values()] == [50, 50]


def test_the_files_of_a_partition_go_to_one_task(tmp_path: Path):
    table = Memory(shape(tmp_path, BUCKETS))
    for batch in range(4):
        table.upsert([(1, "a", str(batch)), (2, "b", str(batch))])
    spec = table.shape
    state = rounds.RewriteState(table.snapshots[-1][1], Schema.model_validate_json(spec.schema), {})
    files = rounds.chosen(state, spec.target_file_size)
    assert len(files) == 6
    room = 2 * max(file.bytes for file in files)
    tasks = rounds.jobs(state, files, spec, "p", room=3 * room // 2)
    assert [len(task.sources) for task in tasks] == [3, 3]
