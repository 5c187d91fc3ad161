"""What deletes from an upsert table: records without a value, Debezium's deletes, a key that a row
had before it got another. In any other table they are what they were."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from frazil.config.sections import RouteConfig, TableConfig
from frazil.files.writer import WriterSpec
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema
from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import RoutingRules
from frazil.pipeline.table_plan import LOG, ChunkPlan, TablePlan

HERE = Partition("events", 2)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
NAME = pa.field("name", pa.large_string())
COLUMNS = pa.schema([pa.field("id", pa.int64()), NAME])
CHANGES = pa.schema([*COLUMNS, pa.field("_op", pa.large_string(), nullable=False)])
CHANGES_LOGGED = pa.schema([*COLUMNS, pa.field("_op", pa.large_string())])
JSON = RecordFormat("json")


def plan(
    name: str, columns: pa.Schema = COLUMNS, key: tuple[str, ...] = ("id",), log: bool = False
) -> TablePlan:
    config = TableConfig(
        name, mode="upsert" if key and not log else "append", key=() if log else key
    )
    shape = WriterSpec(name, "", iceberg_schema(columns, METADATA, config), 0, "", {}, 0, "", {})
    if log:
        return TablePlan(shape, METADATA, "", log=key)
    return TablePlan(shape, METADATA, "", key=key, identifier=key)


def settler(
    format: RecordFormat,
    *tables: TablePlan,
    routes: tuple[RouteConfig, ...] = (),
    key: RecordFormat | None = JSON,
    upserts: tuple[str, ...] = (),
    modes: dict[str, str] | None = None,  # instead of those of `tables` and `upserts`
) -> ChunkPipeline:
    plans = {table.shape.name: table for table in tables}
    keyed = dict.fromkeys(upserts, "upsert")
    keyed |= {
        name: LOG if plan.log else "upsert" for name, plan in plans.items() if plan.key or plan.log
    }
    rules = RoutingRules(routes, list({**plans, **keyed})) if routes else None
    keyed = keyed if modes is None else modes
    return ChunkPipeline(ChunkPlan(format, rules, plans, {}, "db.t", keyed, key))


def settle(by: ChunkPipeline, *records: tuple[bytes | None, bytes | None]) -> ChunkResult:
    """Keys and values, at offsets 100, 101, …: every record has one fate."""
    keys, values = zip(*records, strict=True)
    offsets = np.arange(100, 100 + len(records), dtype=np.int64)
    opened = RawRecords(list(values), offsets, offsets, pa.array(keys, pa.large_binary()), None)
    settled = by.process(HERE, opened, frozenset())
    accounted = {
        offset
        for _, rows in (*settled.rows, *settled.gone)
        for offset in rows.column("_offset").to_pylist()
    }
    accounted |= {100 + index for index in settled.rejections}
    if not settled.needs:
        assert len(accounted) + settled.skipped == len(records)
    return settled


def gone(settled: ChunkResult, name: str = "db.t") -> list[tuple[Any, ...]]:
    return _offsets_and_keys(settled.gone, name)


def left(settled: ChunkResult, name: str = "db.t") -> list[tuple[Any, ...]]:
    return _offsets_and_keys(settled.left, name)


def _offsets_and_keys(pairs: list[tuple[str, pa.Table]], name: str) -> list[tuple[Any, ...]]:
    """Offset and key of each."""
    rows = [row for table, rows in pairs if table == name for row in rows.to_pylist()]
    return sorted(
        (row["_offset"], *(v for k, v in row.items() if not k.startswith("_"))) for row in rows
    )


def ids(settled: ChunkResult, name: str = "db.t") -> list[int]:
    return [n for table, rows in settled.rows if table == name for n in rows["id"].to_pylist()]


def doc(**members: Any) -> bytes:
    return json.dumps(members).encode()


def test_a_record_without_a_value_deletes_its_key():
    settled = settle(
        settler(JSON, plan("db.t")), (doc(id=1), doc(id=1, name="a")), (doc(id=2), None)
    )
    assert (ids(settled), gone(settled)) == ([1], [(101, 2)])
    assert settled.gone[0][1].schema.names == [
        "id",
        "_topic",
        "_topic_partition",
        "_offset",
        "_timestamp",
    ]


def test_keys_may_be_text_a_bare_value_or_connects_payload():
    by = settler(JSON, plan("db.t"), key=None)
    assert gone(settle(by, (b"7", None))) == [(100, 7)]
    by = settler(JSON, plan("db.t"))
    payload = doc(schema={"type": "struct"}, payload={"id": 9})
    assert gone(settle(by, (b"8", None), (payload, None))) == [(100, 8), (101, 9)]
    names = plan("db.t", key=("name",))
    assert gone(settle(settler(JSON, names, key=None), ("é 1".encode(), None))) == [(100, "é 1")]


def test_a_key_that_cannot_be_read_is_rejected_by_itself():
    settled = settle(
        settler(JSON, plan("db.t")),
        (None, None),
        (b"{", None),
        (doc(name="x"), None),
        (doc(id=None), None),
        (doc(id=3), None),
    )
    assert gone(settled) == [(104, 3)]
    assert sorted(settled.rejections) == [0, 1, 2, 3]
    assert {rejection.kind for rejection in settled.rejections.values()} == {"key"}
    assert "so the row to delete is unknown" in settled.rejections[0].reason


def test_a_key_of_several_columns():
    two = plan("db.t", key=("id", "name"))
    settled = settle(
        settler(JSON, two), (doc(name="a", id=1), None), (doc(id=1), None), (b"1", None)
    )
    assert gone(settled) == [(100, 1, "a")]
    assert sorted(settled.rejections) == [1, 2]


def test_a_row_without_its_key_is_rejected():
    settled = settle(settler(JSON, plan("db.t")), (None, doc(name="a")), (None, doc(id=1)))
    assert ids(settled) == [1]
    assert settled.rejections[0].tables == ("db.t",)


def test_in_an_append_table_a_record_without_a_value_is_rejected_as_ever():
    settled = settle(settler(JSON, plan("db.t", key=())), (doc(id=2), None))
    assert settled.rejections[0].kind == "null"
    assert not settled.gone


def test_where_there_is_no_table_there_is_nothing_to_delete():
    settled = settle(settler(JSON, upserts=("db.t",)), (doc(id=2), None))
    assert (settled.skipped, settled.rejections, settled.needs) == (1, {}, {})
    settled = settle(settler(JSON, upserts=("db.t",)), (doc(id=2), None), (b"1", doc(id=1)))
    assert list(settled.needs) == ["db.t"]


# ── Avro ────────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {
    "type": "record",
    "name": "r",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"]}],
}
KEY = {"type": "record", "name": "k", "fields": [{"name": "id", "type": ["null", "int"]}]}


def datum(schema: Any, **values: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, values)
    return out.getvalue()


def test_avro_values_and_keys():
    by = settler(
        RecordFormat("avro", json.dumps(SCHEMA)),
        plan("db.t"),
        key=RecordFormat("avro", json.dumps(KEY)),
    )
    settled = settle(
        by,
        (datum(KEY, id=1), datum(SCHEMA, id=1, name="a")),
        (datum(KEY, id=5), None),
        (datum(KEY, id=None), None),
        (b"", None),
    )
    assert (ids(settled), gone(settled)) == ([1], [(101, 5)])
    assert sorted(settled.rejections) == [2, 3]


def test_a_tombstone_for_two_kinds_of_tables_deletes_in_one_and_is_rejected_by_the_other():
    routes = (RouteConfig(to=("db.t", "db.log")),)
    by = settler(
        RecordFormat("avro", json.dumps(SCHEMA)),
        plan("db.t"),
        plan("db.log", key=()),
        routes=routes,
    )
    settled = settle(by, (doc(id=4), None))
    assert gone(settled) == [(100, 4)]
    assert settled.rejections[0].tables == ("db.log",)


# ── Debezium ────────────────────────────────────────────────────────────────────────────────────

ROUTES = (RouteConfig(to=("db.t",), envelope="debezium"),)


ENVELOPE = {
    "type": "record",
    "name": "change",
    "fields": [
        {"name": "op", "type": "string"},
        {"name": "before", "type": ["null", {**SCHEMA, "name": "row"}]},
        {"name": "after", "type": ["null", "row"]},
    ],
}


def change(op: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> bytes:
    return doc(op=op, before=before, after=after)


def row(n: int | None, name: str = "a") -> dict[str, Any]:
    return {"id": n, "name": name}


STORY = [
    (None, change("c", None, row(1))),
    (None, change("u", row(1), row(1, "b"))),
    (None, change("d", row(2), None)),
    (None, None),  # the tombstone behind it
    (None, change("u", row(3), row(4))),  # another key
    (None, change("u", None, row(5))),  # `before` is not sent
]


def check_story(settled: ChunkResult) -> None:
    assert ids(settled) == [1, 1, 4, 5]
    assert gone(settled) == [(102, 2)]
    assert left(settled) == [(104, 3)]
    assert (settled.skipped, settled.rejections) == (1, {})


def test_changes_in_json():
    check_story(settle(settler(JSON, plan("db.t", CHANGES), routes=ROUTES), *STORY))


def test_changes_in_avro():
    by = settler(RecordFormat("avro", json.dumps(ENVELOPE)), plan("db.t", CHANGES), routes=ROUTES)
    story = [(k, None if v is None else datum(ENVELOPE, **json.loads(v))) for k, v in STORY]
    check_story(settle(by, *story))


def test_a_delete_without_its_key_is_rejected():
    by = settler(JSON, plan("db.t", CHANGES), routes=ROUTES)
    settled = settle(
        by, (None, change("d", {"name": "a"}, None)), (None, change("d", row(None), None))
    )
    assert sorted(settled.rejections) == [0, 1]
    assert not settled.gone


def test_in_an_append_table_every_change_is_a_row():
    by = settler(JSON, plan("db.t", CHANGES, key=()), routes=ROUTES)
    settled = settle(by, *STORY)
    assert ids(settled) == [1, 1, 2, 4, 5]
    assert not settled.gone
    assert not settled.left


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (pa.int64(), "1805213471234567168", "1805213471234567169"),
        (pa.int64(), "9007199254740993", "9007199254740992"),
        (pa.decimal128(38, 2), "12345678901234567890.12", "12345678901234567890.13"),
        (pa.decimal128(38, 2), '"12345678901234567890.12"', "12345678901234567890.13"),
        (pa.large_string(), '"a"', '"A"'),
        (pa.large_string(), '"1"', '"1.0"'),
        (pa.timestamp("us"), '"2020-01-01T00:00:00"', '"2020-01-01T00:00:00.000001"'),
    ],
)
def test_a_change_of_the_key_in_json_is_seen_whatever_the_key_is(
    kind: pa.DataType, before: str, after: str
):
    columns = pa.schema([pa.field("id", kind), *list(CHANGES)[1:]])
    by = settler(JSON, plan("db.t", columns), routes=ROUTES)
    text = '{"op":"u","before":{"id":%s},"after":{"id":%s}}'
    moved = settle(by, (None, (text % (before, after)).encode()))
    assert moved.rejections == {}
    assert [offset for offset, *_ in left(moved)] == [100]
    stays = settle(by, (None, (text % (after, after)).encode()))
    assert left(stays) == []


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (pa.decimal128(9, 2), "1.0", "1.00"),
        (pa.decimal128(9, 2), '"1.5"', "1.5"),
        (pa.large_string(), '"a"', '"\\u0061"'),
        (pa.timestamp("us", "UTC"), '"2020-01-01T00:00:00Z"', '"2020-01-01T01:00:00+01:00"'),
        (
            pa.uuid(),
            '"B68A35A7-17AD-35B3-AF2A-AE46EDB4545A"',
            '"b68a35a7-17ad-35b3-af2a-ae46edb4545a"',
        ),
    ],
)
def test_a_key_in_json_that_is_only_written_another_way_is_the_same(
    kind: pa.DataType, before: str, after: str
):
    columns = pa.schema([pa.field("id", kind), *list(CHANGES)[1:]])
    by = settler(JSON, plan("db.t", columns), routes=ROUTES)
    text = '{"op":"u","before":{"id":%s},"after":{"id":%s}}' % (before, after)  # noqa: UP031
    settled = settle(by, (None, text.encode()))
    assert settled.rejections == {}
    assert left(settled) == []


# ── a change log ────────────────────────────────────────────────────────────────────────────────


def logged(settled: ChunkResult) -> list[tuple[Any, ...]]:
    rows = [row for _, rows in settled.rows for row in rows.to_pylist()]
    return sorted((row["_offset"], row["_op"], row["id"], row["name"]) for row in rows)


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_every_change_is_a_row_of_a_change_log_deletes_too(kind: str):
    format, key, value = JSON, doc(id=2), doc(id=1, name="a")
    if kind == "avro":
        format, value = RecordFormat("avro", json.dumps(SCHEMA)), datum(SCHEMA, id=1, name="a")
    by = settler(format, plan("db.t", CHANGES_LOGGED, log=True))
    settled = settle(by, (doc(id=1), value), (key, None), (doc(id=1), value))
    assert logged(settled) == [(100, "u", 1, "a"), (101, "d", 2, None), (102, "u", 1, "a")]


def test_a_change_log_is_made_with_its_operation_and_optional_columns():
    by = settler(JSON, modes={"db.t": LOG})
    need = settle(by, (doc(id=1), doc(id=1, name="a"))).needs["db.t"]
    assert need.names == ["id", "name", "_op"]
    assert all(field.nullable for field in need)
    by = settler(RecordFormat("avro", json.dumps(SCHEMA)), modes={"db.t": LOG})
    need = settle(by, (doc(id=1), datum(SCHEMA, id=1, name="a"))).needs["db.t"]
    assert need.names == ["id", "name", "_op"]
    assert all(field.nullable for field in need)


def test_a_database_sends_the_operation_itself():
    by = settler(JSON, plan("db.t", CHANGES_LOGGED, log=True), routes=ROUTES)
    assert logged(settle(by, *STORY)) == [
        (100, "c", 1, "a"),
        (101, "u", 1, "b"),
        (102, "d", 2, "a"),
        (104, "u", 4, "a"),
        (105, "u", 5, "a"),
    ]


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_a_change_of_the_key_whose_row_is_rejected_leaves_the_old_row_alone(kind: str):
    required = pa.schema([CHANGES.field(0), NAME.with_nullable(False), CHANGES.field(2)])
    changes = [change("u", row(3), {"id": 4, "name": None}), change("u", row(5), row(6))]
    format = JSON
    if kind == "avro":
        format = RecordFormat("avro", json.dumps(ENVELOPE))
        changes = [datum(ENVELOPE, **json.loads(change)) for change in changes]
    plans = replace(plan("db.t", required), evolution="reject")
    settled = settle(settler(format, plans, routes=ROUTES), *((None, change) for change in changes))
    assert sorted(settled.rejections) == [0]
    assert (ids(settled), left(settled)) == ([6], [(101, 5)])


# ── where a column says which change is the newer one ───────────────────────────────────────────

LSN = pa.field("_source", pa.struct([pa.field("lsn", pa.int64())]))
ORDERED = pa.schema([*CHANGES, pa.field("version", pa.int32()), LSN])
ORDERED_ENVELOPE = {
    "type": "record",
    "name": "change",
    "fields": [
        {"name": "op", "type": "string"},
        {
            "name": "before",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "row",
                    "fields": [
                        {"name": "id", "type": ["null", "long"]},
                        {"name": "name", "type": ["null", "string"]},
                        {"name": "version", "type": ["null", "int"]},
                    ],
                },
            ],
        },
        {"name": "after", "type": ["null", "row"]},
        {
            "name": "source",
            "type": {
                "type": "record",
                "name": "origin",
                "fields": [{"name": "lsn", "type": ["null", "long"]}],
            },
        },
    ],
}


def ordered(path: str, columns: pa.Schema = ORDERED) -> TablePlan:
    return replace(plan("db.t", columns), order=path)


def orders(pairs: list[tuple[str, pa.Table]], path: str) -> list[tuple[int, Any]]:
    return sorted((row["_offset"], row[path]) for _, t in pairs for row in t.to_pylist())


@pytest.mark.parametrize("kind", ["json", "avro"])
@pytest.mark.parametrize(
    ("path", "deletes", "moves", "rejected"),
    [
        ("version", [(101, 7), (102, None)], [(103, 9)], [4]),
        ("_source.lsn", [(101, 21), (102, 22)], [(103, 23)], [5]),
    ],
)
def test_a_delete_has_the_order_of_its_row_or_of_its_change(
    path: str, deletes: Any, moves: Any, rejected: list[int], kind: str
):
    def versioned(n: int, version: int | None) -> dict[str, Any]:
        return {"id": n, "name": "a", "version": version}

    story: list[dict[str, Any]] = [
        {"op": "c", "before": None, "after": versioned(1, 6), "source": {"lsn": 20}},
        {"op": "d", "before": versioned(1, 7), "after": None, "source": {"lsn": 21}},
        {"op": "d", "before": versioned(2, None), "after": None, "source": {"lsn": 22}},
        {"op": "u", "before": versioned(3, 8), "after": versioned(4, 9), "source": {"lsn": 23}},
        {"op": "u", "before": versioned(5, 1), "after": versioned(6, None), "source": {"lsn": 24}},
        {"op": "u", "before": versioned(7, 1), "after": versioned(8, 5), "source": {"lsn": None}},
    ]
    format = JSON if kind == "json" else RecordFormat("avro", json.dumps(ORDERED_ENVELOPE))
    values = [
        doc(**change) if kind == "json" else datum(ORDERED_ENVELOPE, **change) for change in story
    ]
    settled = settle(
        settler(format, ordered(path), routes=ROUTES), *((None, value) for value in values)
    )
    assert orders(settled.gone, path) == deletes
    assert [pair for pair in orders(settled.left, path) if pair[0] == 103] == moves
    assert sorted(settled.rejections) == rejected
    assert "says which change of a key is the newer one" in settled.rejections[rejected[0]].reason
    assert {offset for offset, _ in orders(settled.left, path)} == {103, 104, 105} - {
        100 + rejected[0]
    }


def test_a_record_without_a_value_has_no_order_but_its_time():
    columns = pa.schema([*COLUMNS, pa.field("version", pa.int64())])
    settled = settle(settler(JSON, ordered("version", columns)), (doc(id=2), None))
    assert orders(settled.gone, "version") == [(100, None)]
    settled = settle(settler(JSON, ordered("_timestamp", COLUMNS)), (doc(id=2), None))
    [(_, gone)] = settled.gone
    assert gone.column("_timestamp").null_count == 0


def test_rows_without_an_order_are_rejected_and_all_others_taken():
    by = settler(JSON, ordered("version", pa.schema([*COLUMNS, pa.field("version", pa.int64())])))
    given = [doc(id=n, name="a", **({} if n % 3 else {"version": n})) for n in range(9)]
    settled = settle(by, *((None, value) for value in given))
    assert sorted(ids(settled)) == [0, 3, 6]
    assert sorted(settled.rejections) == [1, 2, 4, 5, 7, 8]
    assert {rejection.kind for rejection in settled.rejections.values()} == {"misfit"}
