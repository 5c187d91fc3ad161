"""A share of `make planted`: each way of corruption is found, and the same history without it is
proven. And the histories are themselves looked at: other engines read them as they are meant."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest
from duckdb_extensions import import_extension
from pyiceberg.table import StaticTable

from frazil.auditing.report import Finding, TableReport
from frazil.ledger.entry import entries
from frazil.offsets import Partition, Range
from frazil.pipeline.projection import MetadataColumns as Names

for _extension in ("avro", "iceberg"):
    import_extension(_extension)


def bench(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "bench" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lake = bench("lake")
planted = bench("planted")

WAYS = [(kind, way) for kind, ways in sorted(planted.KINDS.items()) for way in ways]
#: Cases of each way: the whole is `make planted`.
SHARE = 2


# ── the audit ────────────────────────────────────────────────────────────────────────────────────


def test_the_nine_kinds_are_there():
    assert sorted(planted.KINDS) == [
        "counts off by one",
        "file added twice",
        "file removed",
        "index row edited",
        "range dropped",
        "range shifted",
        "rows deleted by hand",
        "snapshot rolled back",
        "tail lost",
    ]


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=[way.__name__ for _, way in WAYS])
def test_every_corruption_is_found_and_named_and_its_clean_twin_is_proven(
    kind: str, way: Any, tmp_path: Path
):
    for seed in range(SHARE):
        score = planted.case(seed, tmp_path, kind, way=way)
        assert score.complaints == []
        assert (score.clean, score.false_alarms) == (1, 0)
        assert score.planted == score.detected == Counter([f"{kind}: {way.__name__}"])


@pytest.mark.parametrize("way", planted.DEEP, ids=[way.__name__ for way in planted.DEEP])
def test_what_metadata_cannot_show_is_shown_by_the_rows_and_never_counted(way: Any, tmp_path: Path):
    score = planted.case(0, tmp_path, "deep", way=way)
    assert score.complaints == []
    assert (score.deep_planted, score.deep_found) == (1, 1)
    assert score.planted == Counter()


# ── the judge ────────────────────────────────────────────────────────────────────────────────────

P = Partition("t", 0)


def proof(table: str, *findings: Finding) -> Any:
    return planted.evidence.AuditResult([TableReport(table, "s", (), 1, findings)])


def test_a_finding_elsewhere_or_of_another_kind_is_not_taken_for_the_one():
    wanted = planted.Planted("", frozenset({"db.t"}), frozenset({"gap"}), (Range(P, 10, 20),))
    right = Finding("gap", "…", (Range(P, 19, 25),))
    assert wanted.by(proof("db.t", right)) is right
    for wrong in (
        proof("db.other", right),
        proof("db.t"),
        proof("db.t", Finding("overlap", "…", right.ranges)),
        proof("db.t", Finding("gap", "…", (Range(P, 20, 25),))),
        proof("db.t", Finding("gap", "…", (Range(Partition("t", 1), 10, 20),))),
        proof("db.t", Finding("gap", "t[0] [10, 20)")),
    ):
        assert wanted.by(wrong) is None


def test_a_false_alarm_is_counted():
    history = lake.History(Path("nowhere"), "judge 1").live()
    name = min(history.tables)
    score = planted._judge_clean(7, history, proof(name, Finding("unaccounted", "…")))
    assert score.false_alarms == 1
    assert score.complaints[0].startswith("seed 7: false alarm")


# ── the histories ────────────────────────────────────────────────────────────────────────────────


def real(seed: int, folder: Path) -> Any:
    """A history whose tables are all on main, with every file there."""
    for attempt in range(20):
        history = lake.History(folder / str(attempt), f"real {seed} {attempt}", real=True)
        if history.branch == "main":
            return history.live()
    raise AssertionError("no such history")


@pytest.mark.parametrize("seed", range(6))
def test_duckdb_reads_the_tables_as_they_are_meant(seed: int, tmp_path: Path):
    history = real(seed, tmp_path)
    engine = duckdb.connect()
    engine.execute("LOAD avro; LOAD iceberg; SET TimeZone='UTC'")
    paths = history.save(complete=True)
    for name, table in history.tables.items():
        origin = (table.names.topic, table.names.partition, table.names.offset)
        columns = ", ".join(f'"{column}"' for column in origin)
        scan = f"iceberg_scan('{paths[name]}')"
        rows = engine.execute(f"SELECT {columns} FROM {scan}").fetchall()
        assert Counter(rows) == Counter(row for file in table.live() for row in file["rows"])
    scan = f"iceberg_scan('{paths[history.index.name]}')"
    keys = "batch, table_name, topic, partition, start_offset, end_offset, written, commit_id"
    rows = engine.execute(f"SELECT {keys} FROM {scan}").fetchall()
    meant = history.index.rows().select(keys.split(", ")).to_pylist()
    assert Counter(rows) == Counter(tuple(row.values()) for row in meant)
    known = f"SELECT snapshot_id FROM iceberg_snapshots('{paths[history.index.name]}')"
    assert {i for (i,) in engine.execute(known).fetchall()} == set(history.index.snapshots)


@pytest.mark.parametrize("seed", range(3))
def test_pyiceberg_reads_manifests_sequence_numbers_and_deletes_as_they_are_meant(
    seed: int, tmp_path: Path
):
    history = real(seed, tmp_path)
    r = random.Random(seed)
    for table in history.tables.values():
        file = r.choice(table.live())
        hidden = r.randrange(1, len(file["rows"]) + 1)
        table.snapshot({}, [table.hidden(file, range(hidden))], operation="delete")
        if r.random() < 0.5:
            gone = r.choice(
                [live_file for live_file in table.live() if live_file is not file] or [file]
            )
            table.snapshot({}, (), {gone["file-path"]}, "delete")
    for name, path in history.save(complete=True).items():
        static = StaticTable.from_metadata(path)
        meant: Any = history.tables.get(name, history.index)
        for snapshot in static.snapshots():
            filed = [live_file for m in meant.lists[snapshot.snapshot_id] for live_file in m.live]
            listed = Counter(
                (entry.data_file.file_path, entry.sequence_number, entry.data_file.record_count)
                for manifest in snapshot.manifests(static.io)
                for entry in manifest.fetch_manifest_entry(static.io, discard_deleted=True)
            )
            assert listed == Counter(
                (live_file.file["file-path"], live_file.sequence, live_file.file["record-count"])
                for live_file in filed
            )
            total = int(snapshot.summary["total-records"])
            assert total == sum(
                live_file.file["record-count"]
                for live_file in filed
                if live_file.file["content"] == "data"
            )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_files_that_are_only_described_are_described_as_those_that_are_written(
    whole: bool, optional: bool, split: bool, tmp_path: Path
):
    rows = [("a-topic-with-a-long-name", n % 3, 40 + n) for n in range(20)]
    rows += [(None, None, None)] * 3 if optional else [("backfill", 0, 1)] * 3
    names = Names("_topic", "_topic_partition", "_offset", "_timestamp")

    def described(real: bool) -> list[Any]:
        table = lake.Table(tmp_path, "db.t", names, real=real, optional=optional, split=split)
        facts = []
        for file in table.write(rows, "frazil-s-1-0", whole=whole):
            maps = {
                key: {k: v for k, v in zip(*file[key].values(), strict=True) if k in table.ids}
                for key in ("null-value-counts", "lower-bounds", "upper-bounds")
            }
            facts.append((file["partition"], file["record-count"], sorted(maps.items())))
        return sorted(facts, key=repr)

    assert described(real=True) == described(real=False)


def test_a_seed_gives_the_same_run_every_time(tmp_path: Path):
    one, two = (lake.History(tmp_path / name, 11).live() for name in "ab")
    assert one.diary == two.diary
    for name, table in one.tables.items():
        ledgers = [
            [(entry.begin, entry.end, entry.outcomes, entry.batches) for entry, _ in committed]
            for committed in (one.entries(name), two.entries(name))
        ]
        assert ledgers[0] == ledgers[1]
        assert [f["rows"] for f in table.live(table.branch)] == [
            f["rows"] for f in two.tables[name].live(table.branch)
        ]


def test_in_a_clean_history_every_record_is_in_its_tables_once(tmp_path: Path):
    """By the records that were made up, and not by anything the sink or the audit says."""
    for seed in range(40):
        history = lake.History(tmp_path, f"truth {seed}").live()
        if history.feed == "merged":
            continue
        for name, table in history.tables.items():
            if name not in history.names:
                continue
            end = history.entries(name)[-1][0].end if history.entries(name) else {}
            counted = Counter(
                row
                for file in table.live(table.branch)
                for row in file["rows"]
                if planted.ours(row)
            )
            assert set(counted.values()) <= {1}
            meant = {
                (*partition, first + i): fate
                for partition, first in history.topics.first.items()
                for i, fate in enumerate(
                    history.topics.at(partition, first, end.get(partition, first))
                )
                if fate is not None and name in fate.tables
            }
            taken = {row for row, fate in meant.items() if name not in fate.rejecting}
            again = {row for row, fate in meant.items() if name in fate.rejecting}
            if history.entries(name):
                assert taken <= set(counted) | again
                assert set(counted) <= taken | again


def test_the_histories_hold_what_they_are_for(tmp_path: Path):
    """Not by chance alone: among a few hundred there is enough of everything."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        history = lake.History(tmp_path, f"contents {seed}").live()
        score = planted._judge_clean(0, history, planted.evidence.AuditResult([]))
        seen.update(score.happened)
        ledger = [entry for name in history.tables for entry, _ in history.entries(name)]
        seen["absorbed"] += any(len(entry.commit_ids) > 1 for entry in ledger)
        seen["elsewhere"] += any(entry.total.elsewhere for entry in ledger)
        seen["invisible"] += any(entry.total.invisible for entry in ledger)
        seen["rejected"] += any(entry.total.rejected for entry in ledger)
        seen["grown"] += len(history.topics.first) > 4
        newest = next(iter(entries(history.index.history("main"), history.sink)), None)
        seen["expired index"] += newest is None or len(history.index.snapshots) < 4
        seen["packed"] += any(
            "packed" in json.dumps(dict(s.summary))
            for t in history.tables.values()
            for s in t.snapshots.values()
        )
    for word in (
        "compaction",
        "expiry",
        "evolution",
        "transactions",
        "compacted",
        "several tables",
        "index compaction",
        "index expiry",
        "replay",
        "runs",
        "absorbed",
        "elsewhere",
        "invisible",
        "rejected",
        "lost records",
        "rewinds",
        "foreign rows",
        "grown",
        "mistakes undone",
        "two sinks",
        "expired index",
        "packed",
        "feed of merged",
        "feed of rows",
    ):
        assert seen[word] >= 2, word
