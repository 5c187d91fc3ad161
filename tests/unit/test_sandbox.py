"""A child that dies of a record costs that record, and nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from frazil.config.sections import RouteConfig, TableConfig
from frazil.errors import Fatal, Unavailable
from frazil.files.writer import WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import Partition
from frazil.pipeline import isolation, sandbox
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import SKIP, RoutingRules
from frazil.pipeline.sandbox import Sandbox
from frazil.pipeline.table_plan import ChunkPlan, TablePlan

HERE = Partition("t", 3)
SCHEMA = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "n", "type": "long"}, {"name": "s", "type": "string"}],
}
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
COLUMNS = [pa.field("n", pa.int64(), False), pa.field("s", pa.large_string(), False)]


def plan(name: str, columns: list[pa.Field] = COLUMNS, evolution: str = "reject") -> TablePlan:
    schema = iceberg_schema(pa.schema(columns), METADATA, TableConfig(name))
    shape = WriterSpec(name, "", schema, 0, "", {}, 0, "", {})
    return TablePlan(shape, METADATA, "", evolution)


def deadly(rows: pa.Table) -> list[Any]:
    """The function of a [[route]] that some records are too much for."""
    print("not among the answers")
    for word in rows.column("s").to_pylist():
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "segfault":
            ctypes.string_at(0)
        if word == "exit":
            sys.exit(0)
        if word == "hang":
            time.sleep(600)
        if word == "memory":
            try:
                bytearray(64 * 1024**3)
            except MemoryError:
                os.abort()
        if word == "raise":
            raise ValueError("not this one")
    odd = {"nowhere": None, "skip": SKIP}
    return [odd.get(word, "db.a") for word in rows.column("s").to_pylist()]


def settler(**more: Any) -> ChunkPipeline:
    """Into db.a, as `deadly` says."""
    rules = RoutingRules([RouteConfig(python=deadly, **more)], ["db.a"])
    return ChunkPipeline(
        ChunkPlan(RecordFormat("avro", json.dumps(SCHEMA)), rules, {"db.a": plan("db.a")})
    )


def plain(kind: str = "avro", **more: Any) -> ChunkPipeline:
    """Into db.a, without a rule."""
    format = RecordFormat(kind, json.dumps(SCHEMA) if kind == "avro" else "")
    return ChunkPipeline(ChunkPlan(format, None, {"db.a": plan("db.a", **more)}, only="db.a"))


def datum(number: int, text: str = "") -> bytes:
    raw = text.encode()
    return _long(number) + _long(len(raw)) + raw


def _long(number: int) -> bytes:
    out, number = bytearray(), number << 1
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def opened(values: list[bytes | None]) -> RawRecords:
    count = len(values)
    offsets = np.arange(100, 100 + 2 * count, 2, dtype=np.int64)
    keys = pa.array([struct.pack(">I", i) for i in range(count)], pa.large_binary())
    headers = pa.array([[("h", b"%d" % i)] for i in range(count)], HEADERS)
    return RawRecords(values, offsets, offsets * 10, keys, headers)


def words(*odd: tuple[int, str], count: int = 2000) -> list[bytes | None]:
    texts = dict(odd)
    return [datum(i, texts.get(i, "fine")) for i in range(count)]


def by_offset(settled: ChunkResult) -> pa.Table:
    """The rows, whatever parts they came in."""
    return pa.concat_tables([rows for _, rows in settled.rows]).sort_by("_offset").combine_chunks()


def assert_same(one: ChunkResult, other: ChunkResult) -> None:
    assert {name for name, _ in one.rows} == {name for name, _ in other.rows}
    if one.rows:
        assert by_offset(one).equals(by_offset(other))
    assert one.rejections == other.rejections
    assert one.skipped == other.skipped
    assert one.needs.keys() == other.needs.keys()
    assert all(one.needs[name].equals(other.needs[name], True) for name in one.needs)


def settle(made: ChunkPipeline, values: list[bytes | None]) -> ChunkResult:
    return Sandbox(made).process(HERE, opened(values), frozenset())


# ── harmless ────────────────────────────────────────────────────────────────────────────────────

BAD = [b"", b"\x02", datum(7) + b"x", None]
MIXED = [*words((3, "nowhere"), (1500, "skip")), *BAD, *words(count=50)]
JSON = [b'{"n":1,"s":"x"}', b"{", b'{"n":2,"s":"y","new":1.5}', None, b'{"n":"x","s":"z"}'] * 20


@pytest.mark.parametrize(
    ("made", "values"),
    [
        (settler(), MIXED),
        (plain(), MIXED),
        (plain(columns=COLUMNS[:1], evolution="evolve"), MIXED),
        (plain("json"), JSON),
        (plain("json", evolution="evolve"), JSON),
        (ChunkPipeline(ChunkPlan(RecordFormat("json"), None, {}, only="db.a")), JSON),
        (plain(), []),
    ],
    ids=["rules", "avro", "avro-needs", "json", "json-needs", "json-no-table", "nothing"],
)
def test_harmless_records_are_settled_as_ever(made: ChunkPipeline, values: list[bytes | None]):
    expected = made.process(HERE, opened(values), frozenset())
    assert_same(settle(made, values), expected)


def test_tables_that_have_the_records_get_none():
    settled = Sandbox(plain()).process(HERE, opened(words()), frozenset(["db.a"]))
    assert settled == ChunkResult()


def test_one_child_settles_all_chunks():
    made = Sandbox(plain())
    made.process(HERE, opened(words()), frozenset())
    first = made._child
    made.process(HERE, opened(words()), frozenset())
    assert made._child is first


def test_the_child_ends_with_its_parent():
    made = Sandbox(plain())
    made.process(HERE, opened(words()), frozenset())
    assert made._child is not None
    child = made._child._process.pid
    assert psutil.pid_exists(child)
    del made
    assert not psutil.pid_exists(child)


# ── deadly ──────────────────────────────────────────────────────────────────────────────────────


def test_records_that_kill_are_the_only_ones_that_are_rejected():
    kills = {4: "kill", 5: "segfault", 6: "exit", 7: "memory"}
    odd = {2: "nowhere", 11: "skip"}
    settled = settle(settler(), words(*kills.items(), *odd.items(), count=16))
    rejections = [settled.rejections.pop(at) for at in kills]
    assert {(rejection.kind, rejection.tables) for rejection in rejections} == {("deadly", ())}
    assert [rejection.reason for rejection in rejections] == [
        f"cannot read the record: it kills the process that reads it ({how})"
        for how in ("SIGKILL", "SIGSEGV", "exit code 0", "SIGABRT")
    ]
    skipped = words(*dict.fromkeys(kills, "skip").items(), *odd.items(), count=16)
    expected = settler().process(HERE, opened(skipped), frozenset())
    expected.skipped -= len(kills)
    assert_same(settled, expected)


def test_a_deadly_record_costs_three_children(monkeypatch: pytest.MonkeyPatch):
    children = []

    class Counted(sandbox._Child):
        def __init__(self, parts: bytes) -> None:
            children.append(self)
            super().__init__(parts)

    monkeypatch.setattr(sandbox, "_Child", Counted)
    settled = settle(settler(), words((39_999, "kill"), count=50_000))
    assert list(settled.rejections) == [39_999]
    offsets = by_offset(settled).column("_offset")
    assert pc.count_distinct(offsets).as_py() == len(offsets) == 49_999
    assert len(children) == 4  # three die, and one does the rest


def test_a_record_that_never_ends_is_one_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "ANSWER_SECONDS", 0.5)
    settled = settle(settler(), words((1, "hang"), count=2))
    assert settled.rejections[1].reason == (
        "cannot read the record: there is no end to it, or none within 0 s"
    )
    assert len(by_offset(settled)) == 1


def test_an_unforeseen_error_is_reported_with_the_tables_that_the_topic_names():
    broken = TablePlan(WriterSpec("db.a", "", "{", 0, "", {}, 0, "", {}), METADATA, "")
    settled = settle(
        ChunkPipeline(ChunkPlan(RecordFormat("raw"), None, {"db.a": broken}, only="db.a")), [b"x"]
    )
    rejection = settled.rejections[0]
    assert (rejection.kind, rejection.tables) == ("deadly", ("db.a",))
    assert rejection.reason.startswith("cannot read the record: ValidationError: ")


def test_in_a_topic_that_is_skipped_a_deadly_record_is_skipped_too():
    rules = RoutingRules(
        [RouteConfig(topics=("t",), skip=True), RouteConfig(to=("db.a",))], ["db.a"]
    )
    made = Sandbox(ChunkPipeline(ChunkPlan(RecordFormat("raw"), rules, {})))
    made._parts = pickle.dumps((RecordFormat("raw"), "no rules", {}))
    assert made.process(HERE, opened([b"x"]), frozenset()) == ChunkResult(skipped=1)


def test_more_than_can_be_an_accident_stop_the_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "MOST", 2)
    with pytest.raises(Fatal, match=r"more than 2 of 3 records kill .* offset 104: .*SIGKILL"):
        settle(settler(), words((0, "kill"), (1, "kill"), (2, "kill"), count=3))


# ── no record's fault ───────────────────────────────────────────────────────────────────────────


def test_a_function_that_raises_is_an_error_here_as_there():
    with pytest.raises(Fatal, match="ValueError: not this one"):
        settle(settler(), words((5, "raise")))


def test_a_registry_that_is_away_is_an_error_here_as_there():
    format = RecordFormat(
        "confluent-avro", registry={"url": "http://127.0.0.1:9", "max.retries": "0"}
    )
    made = ChunkPipeline(ChunkPlan(format, None, {"db.a": plan("db.a")}, only="db.a"))
    with pytest.raises(Unavailable, match="cannot get schema 1"):
        settle(made, [b"\0\0\0\0\1x"])


def test_a_child_that_cannot_start_is_no_records_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(Unavailable, match=r"cannot start a process .* \(exit code 3\)"):
        settle(settler(), words())
