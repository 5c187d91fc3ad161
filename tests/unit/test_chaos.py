"""The verifier of `make chaos` can fail: what is lost, doubled or wrong in a table is reported."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.ledger.entry import LedgerEntry
from frazil.offsets import Cut, Partition

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def chaos() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("chaos", BENCH / "chaos.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["chaos"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCH))


def avro(path: Path, rows: list[dict[str, Any]], schema: dict[str, Any]) -> str:
    with path.open("wb") as file:
        fastavro.writer(file, schema, rows)
    return str(path)


DATA_FILE = {
    "type": "record",
    "name": "file",
    "fields": [{"name": "content", "type": "int"}, {"name": "file_path", "type": "string"}],
}
ENTRY = {
    "type": "record",
    "name": "entry",
    "fields": [{"name": "status", "type": "int"}, {"name": "data_file", "type": DATA_FILE}],
}
LISTED = {
    "type": "record",
    "name": "listed",
    "fields": [
        {"name": "manifest_path", "type": "string"},
        {"name": "added_snapshot_id", "type": "long"},
    ],
}


class Made:
    """An append table of which each snapshot adds a file, and says a cut of partition 0."""

    def __init__(self, chaos: Any, folder: Path) -> None:
        self._chaos, self._folder = chaos, folder
        self._snapshots: list[dict[str, Any]] = []
        self._manifests: list[dict[str, Any]] = []

    def snapshot(self, offsets: list[int], cut: int, removed: list[str] | None = None) -> str:
        number = len(self._snapshots) + 1
        base = self._chaos.BASE
        path = self._folder / f"{number}.parquet"
        at = np.array(offsets, np.int64)
        pq.write_table(
            pa.table(
                {
                    "_topic_partition": np.zeros(len(at), np.int32),
                    "_offset": at,
                    "id": at % 7 + base,
                    "n": at * 2 + base,
                }
            ),
            path,
        )
        entries = [{"status": 1, "data_file": {"content": 0, "file_path": str(path)}}]
        entries += [
            {"status": 2, "data_file": {"content": 0, "file_path": path}} for path in removed or ()
        ]
        manifest = avro(self._folder / f"{number}-m.avro", entries, ENTRY)
        self._manifests.append({"manifest_path": manifest, "added_snapshot_id": number})
        listed = avro(self._folder / f"{number}-l.avro", self._manifests, LISTED)
        end = Cut({Partition("events", p): cut if p == 0 else 0 for p in range(4)})
        entry = LedgerEntry("chaos", 1, (str(number),), (number, number), end, end)
        self._snapshots.append(
            {
                "snapshot-id": number,
                "parent-snapshot-id": number - 1,
                "manifest-list": listed,
                "summary": entry.summary(),
            }
        )
        return str(path)

    def metadata(self) -> dict[str, Any]:
        document = {"snapshots": self._snapshots, "current-snapshot-id": len(self._snapshots)}
        return json.loads(json.dumps(document))


@pytest.fixture
def verifier(chaos: Any, tmp_path: Path) -> Any:
    """Events 0 to 99 in partition 0; of keys 0 to 9 ten changes each."""
    topics = {name: chaos.Topic("127.0.0.1:1", name) for name in ("events", "changes")}
    topics["events"].ids[0].extend(np.arange(100) % 7)
    topics["events"].numbers[0].extend(np.arange(100) * 2)
    for n in range(100):
        topics["changes"].ids[n % 10 % 4].extend(np.array([n % 10]))
        gone = n >= 90 and n % 10 == 3
        topics["changes"].numbers[n % 10 % 4].extend(np.array([-1 if gone else n]))
    return chaos.Verifier(topics, tmp_path / "none.db")


def seen(verifier: Any) -> tuple[int, int, int]:
    findings = verifier.findings
    return findings.lost, findings.doubled, findings.wrong


def test_an_append_table_that_is_right_at_every_snapshot(chaos: Any, verifier: Any, tmp_path: Path):
    made = Made(chaos, tmp_path)
    first = made.snapshot([*range(30)], 30)
    verifier._appended("", made.metadata())
    made.snapshot([*range(30, 100)], 100)
    made.snapshot([*range(30)], 100, removed=[first])  # as a compaction does
    verifier._appended("", made.metadata())
    assert seen(verifier) == (0, 0, 0)
    assert verifier.findings.append_snapshots == 3
    assert verifier.cuts["events"] == [100, 0, 0, 0]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda made: made.snapshot([*range(10, 50), 51], 52), (1, 0, 0)),
        (lambda made: made.snapshot([*range(5, 50)], 50), (0, 5, 0)),
        (lambda made: made.snapshot([*range(10, 50)], 45), (0, 0, 5)),
        (lambda made: made.snapshot([*range(10, 50)], 5), (0, 0, 45)),
        (lambda made: made.snapshot([], 10, removed=[made.first]), (10, 0, 0)),
    ],
    ids=["lost", "doubled", "beyond its cut", "the cut goes back", "removed"],
)
def test_an_append_table_that_is_not(
    chaos: Any,
    verifier: Any,
    tmp_path: Path,
    damage: Callable[[Any], Any],
    expected: tuple[int, ...],
):
    made = Made(chaos, tmp_path)
    made.first = made.snapshot([*range(10)], 10)  # type: ignore[attr-defined]
    damage(made)
    verifier._appended("", made.metadata())
    assert seen(verifier) == expected


def test_a_row_that_says_something_else(chaos: Any, verifier: Any, tmp_path: Path):
    made = Made(chaos, tmp_path)
    made.snapshot([*range(10)], 10)
    verifier._topics["events"].numbers[0].values[4] = 99
    verifier._appended("", made.metadata())
    assert seen(verifier) == (0, 0, 1)


def test_a_history_that_is_cut_off_stops_it(chaos: Any, verifier: Any, tmp_path: Path):
    made = Made(chaos, tmp_path)
    made.snapshot([*range(10)], 10)
    made.snapshot([*range(10, 20)], 20)
    verifier._appended("", made.metadata())
    back = made.metadata()
    back["current-snapshot-id"] = 1
    with pytest.raises(chaos.Stuck, match="no ancestor"):
        verifier._appended("", back)


RIGHT = {id: 90 + id for id in range(10) if id != 3}


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([*RIGHT.items()], 0),
        ([*RIGHT.items()][1:], 1),  # lost
        ([*RIGHT.items(), (3, 83)], 1),  # not deleted
        ([(0, 80), *[*RIGHT.items()][1:]], 1),  # stale
        ([*RIGHT.items(), (4, 94)], 1),  # a twin
    ],
)
def test_an_upsert_table(verifier: Any, rows: list[tuple[int, int]], wrong: int):
    ids, numbers = np.array(rows).T
    cut = [partition_ids.size for partition_ids in verifier._topics["changes"].ids]
    verifier.compare(ids, numbers, cut, "")
    assert seen(verifier) == (0, 0, wrong)


def test_numbers_are_what_avro_makes_of_them(chaos: Any):
    numbers = np.array([0, 1, 49_999, 2**32])
    raw = chaos.encoded(numbers)
    assert (chaos.decoded(raw) == numbers).all()
    schema = fastavro.parse_schema(json.loads(chaos.SCHEMA))
    read = fastavro.schemaless_reader(io.BytesIO(raw[2].tobytes() + raw[3].tobytes()), schema)
    assert read == {"id": 49_999 + chaos.BASE, "n": 2**32 + chaos.BASE}


def test_the_producer_ends_at_the_requested_number_of_records(
    chaos: Any, monkeypatch: pytest.MonkeyPatch
):
    """Also where the last kills were quicker than it was."""

    class Took:
        def __init__(self, _: dict[str, Any]) -> None:
            self.count = 0

        def produce(self, *_: Any, **__: Any) -> None:
            self.count += 1

        def poll(self, _: float) -> None: ...
        def flush(self, _: float) -> None: ...

    monkeypatch.setattr(chaos, "Producer", Took)
    generator = chaos.Generator("nowhere:1", seed=1, rate=20_000)
    generator.goal = 5_000
    generator.start()
    generator.stop()
    assert generator.sent >= 5_000
    assert generator._producer.count == generator.sent
