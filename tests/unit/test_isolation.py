"""Poison at every step: the record at which a step fails for an unforeseen reason is
rejected alone, or stops the stream by its name. The faults are planted: a step is made to raise
at marked records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frazil.commit.provisioning import TableProvisioner
from frazil.commit.table_configs import TableConfigs
from frazil.config.model import from_document
from frazil.config.sections import RouteConfig, TableConfig
from frazil.errors import (
    Fatal,
    FrazilError,
    SchemaMismatch,
    Unavailable,
    Undecodable,
    Unwritable,
    from_traceback,
)
from frazil.files import writer as write
from frazil.files.writer import DataFileDescriptor, WriterSpec
from frazil.formats import debezium
from frazil.formats.decoder import RecordFormat
from frazil.formats.json_reader import JsonShape
from frazil.iceberg.schema import iceberg_schema, identifier_columns, partition_spec
from frazil.kafka.fetch import FetchedChunk
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import Partition, Range
from frazil.pipeline import fitting, isolation, json_records, task, upsert
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import TablePlan
from frazil.pipeline.task import (
    DEAD_LETTER_COLUMNS,
    DEAD_LETTER_METADATA,
    BatchPlan,
    EndedRange,
    UpsertOutcome,
    apply_all,
    run_all,
)
from frazil.pipeline.upsert import ShuffleBlock, deletes_shape
from frazil.retry import Retry
from frazil.sources.base import StreamPosition, StreamState
from frazil.sources.kafka import KafkaSource
from frazil.spark import tasks

HERE = Partition("events", 0)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
ID, WORD = pa.field("id", pa.int64(), nullable=False), pa.field("word", pa.large_string())
COUNT = 40
POISON = "poison"
BAD = {3: POISON, 17: POISON, 39: POISON}  # in the first chunk, in the second, the last of all


class Planted(Exception):
    """An error that nobody foresaw."""


def table(folder: Path, name: str = "db.t", by: tuple[str, ...] = (), key: str = "") -> TablePlan:
    config = TableConfig(name, mode="upsert" if key else "append", key=(key,) if key else ())
    schema = iceberg_schema(pa.schema([ID, WORD]), METADATA, config)
    spec = partition_spec(schema, by, name)
    shape = WriterSpec(name, str(folder / name), schema, 0, spec, {}, 2**28, "zstd", {})
    if not key:
        return TablePlan(shape, METADATA, "_timestamp")
    deletes = deletes_shape(shape, (key,), '{"spec-id": 0, "fields": []}')
    return TablePlan(shape, METADATA, "_timestamp", key=(key,), identifier=(key,), deletes=deletes)


def dead(folder: Path) -> TablePlan:
    schema = iceberg_schema(DEAD_LETTER_COLUMNS, DEAD_LETTER_METADATA, TableConfig("db.dead"))
    shape = WriterSpec(
        "db.dead",
        str(folder / "dead"),
        schema,
        0,
        partition_spec(schema, (), "db.dead"),
        {},
        2**28,
        "zstd",
        {},
    )
    return TablePlan(shape, DEAD_LETTER_METADATA, "timestamp", "fail")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What the records say, by offset. Chunks are of ten offsets."""
    held = {i: f"w{i}" for i in range(COUNT)}

    def fetch(kafka: Any, wanted: Range, **_: Any) -> Iterator[FetchedChunk]:
        for start in range(wanted.start, wanted.end, 10):
            offsets = np.arange(start, min(start + 10, wanted.end))
            values = [json.dumps({"id": i, "word": held[i]}).encode() for i in offsets.tolist()]
            keys = pa.array([str(i).encode() for i in offsets.tolist()], pa.large_binary())
            headers = pa.array([[] for _ in values], HEADERS)
            opened = RawRecords(values, offsets, offsets * 1000, keys, headers)
            yield FetchedChunk(
                Range(HERE, start, int(offsets[-1]) + 1), None, opened, envelope=True
            )

    monkeypatch.setattr(task, "fetch", fetch)
    return held


def plan(folder: Path, *tables: TablePlan, **more: Any) -> BatchPlan:
    made = {table_plan.shape.name: table_plan for table_plan in tables or (table(folder),)}
    keyed = {name: "upsert" for name, table_plan in made.items() if table_plan.key}
    return BatchPlan(
        rules=None,
        kafka={},
        format=RecordFormat("json"),
        tables=made,
        only="db.t",
        dead_letters=dead(folder),
        file_prefix="p",
        keyed=keyed,
        **more,
    )


def rows_of(files: Any) -> list[dict[str, Any]]:
    paths = [json.loads(file.descriptor)["file-path"] for file in files]
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def everything(plan: BatchPlan) -> tuple[set[int], dict[int, tuple[str, str]], EndedRange]:
    """Ids that were written, and of each dead letter kind and message; all counted (I3)."""
    outcomes = [outcome for _, outcome in run_all(plan, [Range(HERE, 0, COUNT)])]
    [ended] = [outcome for outcome in outcomes if isinstance(outcome, EndedRange)]
    [result] = ended.results
    files = [f for name, some in result.files.items() if name != "db.dead" for f in some]
    files += [
        f for outcome in outcomes if isinstance(outcome, UpsertOutcome) for f in outcome.done.files
    ]
    dead_letters = {
        row["offset"]: (row["kind"], row["message"])
        for row in rows_of(result.files.get("db.dead", ()))
    }
    assert result.total.balanced
    assert result.total.rejected == len(dead_letters)
    written = [row["id"] for row in rows_of(files)]
    assert len(set(written)) == len(written)
    return set(written), dead_letters, ended


# ── the steps, each made to raise at a marked record ─────────────────────────────────────────

Plant = Callable[[pytest.MonkeyPatch], None]


def raising(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, matches: Callable[..., bool]):
    original = getattr(where, name)

    def planted(*args: Any, **named: Any) -> Any:
        if matches(*args):
            raise Planted("out of the blue")
        return original(*args, **named)

    monkeypatch.setattr(where, name, planted)


def poisoned(rows: pa.Table) -> bool:
    return "word" in rows.schema.names and POISON in rows.column("word").to_pylist()


def at_decode(m: pytest.MonkeyPatch) -> None:
    raising(m, JsonShape, "decode", lambda _, values: any(POISON.encode() in v for v in values))


def at_fit(m: pytest.MonkeyPatch) -> None:
    raising(m, fitting, "project_rows", lambda rows, *_: poisoned(rows))


def at_partition(m: pytest.MonkeyPatch) -> None:
    raising(m, write._Layout, "clusters", lambda _, rows: poisoned(rows))


def at_path(m: pytest.MonkeyPatch) -> None:
    raising(m, write._Layout, "path", lambda _, partition, name: POISON in partition)


def at_encode(m: pytest.MonkeyPatch) -> None:
    raising(m, write._OpenFile, "encode", lambda _, rows: poisoned(rows))


def at_close(m: pytest.MonkeyPatch) -> None:
    """A file with a marked row cannot be described; which rows it has, only its bounds tell."""

    def highest(layout: Any, path: str, partition: Any, metadata: Any, size: int) -> bool:
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        wide = metadata.num_columns > 1  # files of deletes have the key alone
        bounds = [group.column(1).statistics for group in groups if wide]
        return any(b is not None and POISON in (b.min, b.max) for b in bounds)

    raising(m, write._Layout, "descriptor", highest)


SETTLE = {"decode": at_decode, "fit": at_fit}
WRITE = {"partition": at_partition, "path": at_path, "encode": at_encode, "close": at_close}


@pytest.mark.parametrize("step", [*SETTLE, *WRITE])
@pytest.mark.parametrize("key", ["", "id"], ids=["append", "upsert"])
def test_a_record_at_which_a_step_fails_is_a_dead_letter_and_harms_no_other(
    step: str, key: str, words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= BAD
    {**SETTLE, **WRITE}[step](monkeypatch)
    by = ("word",) if step == "path" else ()
    written, dead_letters, ended = everything(plan(tmp_path, table(tmp_path, by=by, key=key)))
    assert written == set(range(COUNT)) - BAD.keys()
    assert dead_letters.keys() == BAD.keys()
    for kind, message in dead_letters.values():
        assert kind == ("failed" if step in SETTLE else "unwritable")
        assert "Planted: out of the blue" in message
    tally = ended.results[0].tallies["db.t"]
    assert (tally.rejected, tally.written + tally.merged) == (len(BAD), COUNT - len(BAD))


@pytest.mark.parametrize("step", [*SETTLE, *WRITE])
def test_without_dead_letters_it_stops_the_stream_and_is_named(
    step: str, words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= {17: POISON}
    {**SETTLE, **WRITE}[step](monkeypatch)
    by = ("word",) if step == "path" else ()
    with pytest.raises(RuntimeError) as caught:
        everything(replace(plan(tmp_path, table(tmp_path, by=by)), dead_letters=None))
    error = from_traceback(str(caught.value))
    assert isinstance(error, Undecodable if step in SETTLE else Unwritable)
    assert "events[0] offset 17" in error.message
    assert "Planted: out of the blue" in error.message


def test_a_record_at_which_the_unwrapping_of_changes_fails_is_rejected_alone(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= BAD
    raising(monkeypatch, debezium, "_change", lambda text: POISON in text)
    made = RoutingRules(
        [RouteConfig(topics=("events",), to=("db.t",), envelope="debezium")], ["db.t"]
    )
    _, dead_letters, _ = everything(replace(plan(tmp_path), rules=made))
    assert {i for i, (kind, _) in dead_letters.items() if kind == "failed"} == BAD.keys()
    assert {kind for i, (kind, _) in dead_letters.items() if i not in BAD} == {"envelope"}


def test_a_record_at_which_the_rules_fail_is_rejected_alone(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= BAD
    raising(monkeypatch, RoutingRules, "sort", lambda _, topic, rows, **more: poisoned(rows))
    made = RoutingRules([RouteConfig(field="word", to=("db.t",))], ["db.t"])
    written, dead_letters, _ = everything(replace(plan(tmp_path), rules=made))
    assert written == set(range(COUNT)) - BAD.keys()
    assert {i: kind for i, (kind, _) in dead_letters.items()} == dict.fromkeys(BAD, "failed")


def test_a_record_at_which_learning_fails_does_not_keep_a_table_from_being_made(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= BAD
    raising(monkeypatch, json_records, "wanted", lambda value, *_: POISON.encode() in value)
    result = task.run(replace(plan(tmp_path), tables={}), Range(HERE, 0, COUNT), dry=True)
    assert result.needs["db.t"].names == ["id", "word"]


def test_what_fails_while_records_are_fetched_is_named_with_the_offset_that_was_reached(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetch = task.fetch

    def broken(*args: Any, **named: Any) -> Iterator[FetchedChunk]:
        yield from itertools.islice(fetch(*args, **named), 3)
        raise Planted("out of the blue")

    monkeypatch.setattr(task, "fetch", broken)
    with pytest.raises(RuntimeError) as caught:
        everything(plan(tmp_path))
    error = from_traceback(str(caught.value))
    assert isinstance(error, Undecodable)
    assert "cannot read events[0] from offset 30 on: Planted" in error.message


def test_what_fails_before_records_can_be_separated_is_named_with_its_offset(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    raising(monkeypatch, FetchedChunk, "open", lambda chunk, *_: chunk.span.start == 20)
    with pytest.raises(RuntimeError) as caught:
        everything(plan(tmp_path))
    error = from_traceback(str(caught.value))
    assert isinstance(error, Undecodable)
    assert "cannot read events[0] from offset 20 on: Planted" in error.message


def test_two_tables_of_one_record_do_not_share_its_trouble(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= {17: POISON}
    at_path(monkeypatch)
    two = table(tmp_path, "db.a", by=("word",)), table(tmp_path, "db.b")
    rules = RoutingRules([RouteConfig(topics=("events",), to=("db.a", "db.b"))], ["db.a", "db.b"])
    outcomes = run_all(replace(plan(tmp_path, *two), rules=rules), [Range(HERE, 0, COUNT)])
    [(_, ended)] = list(outcomes)
    assert isinstance(ended, EndedRange)
    [result] = ended.results
    assert len(rows_of(result.files["db.a"])) == COUNT - 1
    assert len(rows_of(result.files["db.b"])) == COUNT
    assert [row["tables"] for row in rows_of(result.files["db.dead"])] == [["db.a"]]


def test_more_than_can_be_an_accident_stop_the_stream(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= dict.fromkeys(range(COUNT), POISON)
    monkeypatch.setattr(isolation, "MOST", 5)
    at_encode(monkeypatch)
    with pytest.raises(RuntimeError, match="more than 5 of 10 rows cannot be written"):
        everything(plan(tmp_path))
    monkeypatch.undo()


def test_so_do_too_many_at_which_settling_fails(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words |= dict.fromkeys(range(COUNT), POISON)
    monkeypatch.setattr(isolation, "MOST", 5)
    at_fit(monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        everything(plan(tmp_path))
    assert isinstance(from_traceback(str(caught.value)), Fatal)


def test_a_store_that_takes_nothing_is_no_records_fault(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def away(*_: Any) -> Any:
        raise OSError("503 slow down")

    monkeypatch.setattr(write._OpenFile, "__init__", away)
    monkeypatch.setattr(isolation, "probe", away)
    with pytest.raises(RuntimeError) as caught:
        everything(plan(tmp_path))
    error = from_traceback(str(caught.value))
    assert isinstance(error, Unavailable)
    assert "takes no files: OSError: 503 slow down" in error.message


def test_a_transient_fault_costs_no_record(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = [1, 1, 1]
    raising(monkeypatch, write._OpenFile, "encode", lambda *_: bool(left) and bool(left.pop()))
    written, dead_letters, _ = everything(plan(tmp_path))
    assert (len(written), dead_letters) == (COUNT, {})


def test_rows_that_fail_together_and_not_apart_are_all_written(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    raising(monkeypatch, write._OpenFile, "encode", lambda _, rows: len(rows) > 4)
    written, dead_letters, _ = everything(plan(tmp_path))
    assert (len(written), dead_letters) == (COUNT, {})


def test_changes_that_were_brought_together_and_fail_stop_it_by_table_and_range(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = plan(tmp_path, table(tmp_path, key="id"), together=frozenset({"db.t"}))
    handed = list(run_all(made, [Range(HERE, 0, COUNT)]))
    assert any(isinstance(part, ShuffleBlock) for _, part in handed)
    raising(monkeypatch, upsert, "_last", lambda *_: True)
    with pytest.raises(RuntimeError) as caught:
        list(apply_all(made, handed))
    error = from_traceback(str(caught.value))
    assert isinstance(error, Unwritable)
    assert "table db.t: Planted" in error.message
    assert "events[0] [0, 40)" in error.message


@pytest.mark.parametrize("step", ["encode", "close"])
def test_the_record_at_fault_among_changes_that_come_together_is_found_by_a_second_run(
    step: str, words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The task that writes them has no dead letters: the driver runs the batch in isolation."""
    words |= BAD
    made = plan(tmp_path, table(tmp_path, key="id"), together=frozenset({"db.t"}))
    WRITE[step](monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        list(apply_all(made, list(run_all(made, [Range(HERE, 0, COUNT)]))))
    assert isinstance(from_traceback(str(caught.value)), Unwritable)
    again = replace(made, isolating=True)
    outcomes = [
        outcome for _, outcome in apply_all(again, list(run_all(again, [Range(HERE, 0, COUNT)])))
    ]
    rows = [
        row["id"]
        for outcome in outcomes
        if isinstance(outcome, UpsertOutcome)
        for row in rows_of(outcome.done.files)
    ]
    [ended] = [outcome for outcome in outcomes if isinstance(outcome, EndedRange)]
    dead_letters = rows_of(ended.results[0].files["db.dead"])
    assert sorted(rows) == sorted(set(range(COUNT)) - BAD.keys())
    assert {row["offset"]: row["kind"] for row in dead_letters} == dict.fromkeys(BAD, "unwritable")


def test_an_error_of_our_own_passes_through(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def ours(*_: Any) -> Any:
        raise Unavailable("the registry is away")

    monkeypatch.setattr(JsonShape, "decode", ours)
    with pytest.raises(RuntimeError) as caught:
        everything(plan(tmp_path))
    assert isinstance(from_traceback(str(caught.value)), Unavailable)


def test_rows_of_a_dataframe_that_cannot_be_written_are_named_with_their_table_and_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = table(tmp_path)
    columns = [[1, 2], ["a", POISON], ["t", "t"], [0, 0], [5, 6], [None, None]]
    schema = made.shape.arrow
    rows = pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )
    at_encode(monkeypatch)
    write_plan = tasks.WritePlan(made.shape, ("_topic", "_topic_partition", "_offset"), "", "p")
    with pytest.raises(Unwritable) as caught:
        tasks.write(write_plan, rows.to_batches())
    assert "table db.t: Planted" in caught.value.message
    assert "t[0] [5, 7)" in caught.value.message


def test_a_file_that_a_manifest_does_not_take_is_reported_with_the_origin_of_its_rows(
    tmp_path: Path,
):
    made = table(tmp_path)
    columns = [[1, 2], ["a", "b"], ["t", "t"], [0, 0], [5, 6], [None, None]]
    schema = made.shape.arrow
    writer = write.TableWriter(made.shape, "p")
    writer.write(
        pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    )
    [file] = writer.close()
    assert isinstance(file, DataFileDescriptor)
    names = ("_topic", "_topic_partition", "_offset")
    assert (
        identifier_columns(file.descriptor, made.shape.schema, names)
        == "it has 2 rows of t[0] [5, 7)"
    )
    assert (
        identifier_columns(file.descriptor, made.shape.schema, ("no", "such", "name"))
        == "it has 2 rows"
    )


def test_the_net_lets_no_error_of_the_library_below_through():
    for error in (ValueError("x"), RecursionError("x"), MemoryError("x"), KeyError("x")):
        with (
            pytest.raises(isolation.StepFailed, match=type(error).__name__),
            isolation.noticing(),
        ):
            raise error
    with pytest.raises(FrazilError), isolation.noticing():
        raise Unavailable("x")


# ── on the driver ───────────────────────────────────────────────────────────────────────────────


def provisioner(tables: Any, alone: bool) -> TableProvisioner:
    document: dict[str, Any] = {
        "sink": {"id": "s", "topics": ["t"]},
        "kafka": {"bootstrap.servers": "b"},
        "decode": {"format": "json"},
        "table": [{"name": "db.t"}],
    }
    if not alone:
        document["table"].append({"name": "db.u"})
        document["route"] = [{"topics": ["t"], "to": ["db.t", "db.u"]}]
    config = from_document(document)
    tables.configs = TableConfigs(config, lambda name: name)
    startup = SimpleNamespace(tables=tables, schemas=tables, index=None, still_newest=lambda: None)
    stream = StreamState("s", 1, StreamPosition(), 0)
    retry = Retry(1.0, lambda: False)
    return TableProvisioner(config, startup, stream, retry)  # type: ignore[arg-type]


class Tables:
    """Of which one cannot be made, for an unforeseen reason."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.made: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def check(self, name: str, *_: Any) -> None:
        if name == "db.t":
            raise RecursionError("maximum recursion depth exceeded")

    def create(self, name: str, *_: Any) -> None:
        self.check(name)
        self.made.append(name)


def test_an_unforeseen_failure_to_create_a_table_costs_its_own_records_alone():
    tables = Tables()
    provisioner(tables, alone=False).ensure({"db.t": pa.schema([ID]), "db.u": pa.schema([ID])})
    assert tables.made == ["db.u"]
    assert "table db.t for its records: RecursionError: maximum" in tables.refused["db.t"]


def test_where_it_is_the_only_table_it_stops_in_our_own_words():
    with pytest.raises(SchemaMismatch, match=r"table db\.t for its records: RecursionError"):
        provisioner(Tables(), alone=True).ensure({"db.t": pa.schema([ID])})


def test_a_record_that_fails_at_the_start_is_left_to_the_tasks(
    words: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The driver reads the first records to learn their columns; it does not stop at one."""
    feed = KafkaSource.__new__(KafkaSource)
    feed._plans = SimpleNamespace(rules=None, plan=lambda *_: plan(tmp_path))  # type: ignore[assignment]
    monkeypatch.setattr(feed, "_refuse_unknown_fields", lambda _: None)
    words |= {3: POISON}
    at_decode(monkeypatch)
    feed._next = [Range(HERE, 0, COUNT)]
    assert feed.sample(None) == {}  # type: ignore[arg-type]
    raising(monkeypatch, task, "_dead_letter_rows", lambda *_: True)
    feed._next = [Range(HERE, 0, COUNT)]
    assert feed.sample(None) == {}  # type: ignore[arg-type]
