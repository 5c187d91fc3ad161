"""The soak's judgement: what grows is named, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pytest

from tests.bench import soak

TABLE = soak.Folder(
    data_files=120,
    data_bytes=10**8,
    metadata_files=51,
    metadata_bytes=3_000_000,
    newest_bytes=40_000,
    snapshots=31,
    manifests=31,
)
INDEX = replace(TABLE, data_files=5, snapshots=33)


def samples(**last: Any) -> list[soak.Sample]:
    made = [
        soak.Sample(60.0 * n, 10_000 * n, n, n, TABLE, INDEX, 0.1, 200, 900, 300)
        for n in range(1, 31)
    ]
    return [*made[:-1], replace(made[-1], **last)]


def test_a_sink_that_keeps_its_tables_small_is_well():
    assert soak.judge(samples(), 4) == []


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"table": replace(TABLE, snapshots=1_900, newest_bytes=10**6)}, "1900 snapshots"),
        ({"table": replace(TABLE, metadata_files=1_905)}, "1905 metadata files"),
        ({"table": replace(TABLE, newest_bytes=1_360_000)}, "bytes for 31 snapshots"),
        ({"table": replace(TABLE, metadata_bytes=10**9)}, "bytes of metadata"),
        ({"table": replace(TABLE, manifests=1_000)}, "1000 manifests"),
        ({"table": replace(TABLE, data_files=4_000)}, "4000 data files of 30 batches"),
        ({"index": replace(INDEX, snapshots=900)}, "the index has 900 snapshots"),
        ({"commits": 0}, "nothing was committed"),
    ],
)
def test_what_grows_is_named(last: dict[str, Any], says: str):
    [message] = soak.judge(samples(**last), 4)
    assert says in message


@pytest.mark.parametrize("measure", ["commit_seconds", "driver", "jvm", "workers"])
def test_commits_that_become_slow_and_memory_that_grows_are_named_in_a_long_run(measure: str):
    grown = [
        replace(sample, **{measure: getattr(sample, measure) * (1, 1, 4)[n // 10]})
        for n, sample in enumerate(samples())
    ]
    assert len(soak.judge(grown, 4)) == 1
    assert soak.judge(grown, 4, judged=False) == [], "a short run warms up"


def test_a_table_is_counted_as_it_lies_on_disk(tmp_path: Path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.parquet").write_bytes(b"12345")
    with open(tmp_path / "metadata/list.avro", "wb") as file:
        fastavro.writer(file, {"type": "record", "name": "m", "fields": []}, [{}, {}, {}])
    for version in (1, 2):
        snapshot = {"snapshot-id": 7, "manifest-list": f"file:{tmp_path}/metadata/list.avro"}
        known = {"current-snapshot-id": 7, "snapshots": [snapshot]}
        (tmp_path / f"metadata/0000{version}-x.metadata.json").write_text(json.dumps(known))
    (tmp_path / "metadata/00003-x.metadata.json").write_text('{"snapsh')  # being written
    folder = soak.look(tmp_path)
    assert (folder.data_files, folder.data_bytes, folder.metadata_files) == (1, 5, 3)
    assert (folder.snapshots, folder.manifests) == (1, 3)
    assert soak.look(tmp_path / "nothing") == soak.Folder()
