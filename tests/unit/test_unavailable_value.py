"""Values that a change does not carry never replace the real ones."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa
import pytest

from frazil.config.sections import RouteConfig
from frazil.formats.decoder import RecordFormat
from frazil.formats.unavailable_value import Placeholder
from frazil.pipeline.table_plan import LOG
from tests.unit.test_deletes import CHANGES, datum, doc, gone, ids, left, plan, settle, settler

TEXT = "__debezium_unavailable_value"
BYTES = TEXT.encode()
ROUTES = (RouteConfig(to=("db.t",), envelope="debezium"),)

#: As UnchangedToastedPlaceholder of Debezium's PostgreSQL connector and the value converters of
#: Oracle, MySQL and SQL Server make them: type of the column, value in Avro.
FORMS: list[tuple[pa.DataType, Any]] = [
    (pa.large_string(), TEXT),
    (pa.large_binary(), BYTES),
    (pa.large_string(), base64.b64encode(BYTES).decode()),
    (pa.large_string(), base64.urlsafe_b64encode(BYTES).decode()),
    (pa.large_string(), BYTES.hex()),
    (pa.large_list(pa.large_string()), [TEXT]),
    (pa.large_list(pa.large_binary()), [BYTES]),
    (pa.large_list(pa.int32()), list(BYTES)),
    (pa.large_list(pa.int64()), list(BYTES)),
    (pa.large_list(pa.float64()), list(BYTES)),
    (pa.large_list(pa.decimal128(12, 2)), list(BYTES)),
    (pa.large_list(pa.large_string()), ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"]),
    (pa.map_(pa.large_string(), pa.large_string()), [(TEXT, TEXT)]),
    (pa.large_string(), json.dumps({TEXT: TEXT}, separators=(",", ":"))),
]


@pytest.mark.parametrize(("kind", "value"), FORMS)
def test_the_placeholder_is_known_in_every_shape(kind: pa.DataType, value: Any):
    look = Placeholder(TEXT)
    array = pa.array([None, value, None], kind)
    for rows, wanted in ((array, [False, True, False]), (array[1:], [True, False])):
        assert look.in_columns(pa.table({"c": rows}))["c"].tolist() == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.large_string(), TEXT + "s"),
        (pa.large_string(), ""),
        (pa.large_binary(), BYTES[1:]),
        (pa.large_list(pa.large_string()), [TEXT, TEXT]),
        (pa.large_list(pa.large_string()), []),
        (pa.large_list(pa.int32()), list(BYTES)[1:]),
        (pa.large_list(pa.int32()), [*BYTES[1:], 0]),
        (pa.large_list(pa.int64()), [None] * len(BYTES)),
        (pa.int64(), 5),
        (pa.bool_(), True),
        (pa.map_(pa.large_string(), pa.large_string()), [("a", TEXT)]),
        (pa.struct([("a", pa.large_string())]), {"a": "b"}),
        (pa.large_string(), "b68a35a7-17ad-35b3-af2a-ae46edb4545a"),
    ],
)
def test_similar_values_are_values(kind: pa.DataType, value: Any):
    look = Placeholder(TEXT)
    assert look.in_columns(pa.table({"c": pa.array([value, None], kind)})) == {}


def test_the_placeholder_may_be_other_text_or_bytes():
    rows = pa.table({"c": ["gone", "?"], "b": [b"\xff\x00", b""], "n": [[1], [-1, 0]]})
    masks = Placeholder("gone").in_columns(rows)
    assert {name: mask.tolist() for name, mask in masks.items()} == {"c": [True, False]}
    masks = Placeholder("hex:ff00").in_columns(rows)
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "b": [True, False],
        "n": [False, True],
    }


ROW = {
    "type": "record",
    "name": "row",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"]}],
}
ENVELOPE = {
    "type": "record",
    "name": "change",
    "fields": [
        {"name": "op", "type": "string"},
        {"name": "before", "type": ["null", ROW]},
        {"name": "after", "type": ["null", "row"]},
    ],
}
STORY = [
    {"op": "c", "before": None, "after": {"id": 1, "name": "a long text"}},
    {"op": "u", "before": None, "after": {"id": 1, "name": TEXT}},
    {"op": "u", "before": {"id": 2, "name": "x"}, "after": {"id": 3, "name": TEXT}},
    {"op": "d", "before": {"id": 4, "name": TEXT}, "after": None},
]


def settled_with(kind: str, *tables: Any, placeholder: str = TEXT, routes: Any = ROUTES) -> Any:
    schema = json.dumps(ENVELOPE) if kind == "avro" else ""
    by = settler(RecordFormat(kind, schema, {}, placeholder), *tables, routes=routes)
    encode = doc if kind == "json" else lambda **change: datum(ENVELOPE, **change)
    return settle(by, *((None, encode(**change)) for change in STORY))


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_an_upsert_table_rejects_what_would_replace_a_value_by_the_placeholder(kind: str):
    settled = settled_with(kind, plan("db.t", CHANGES))
    assert ids(settled) == [1]
    assert gone(settled) == [(103, 4)]
    assert left(settled) == []  # the row whose key changed stays as it was
    assert {i: rejection.kind for i, rejection in settled.rejections.items()} == dict.fromkeys(
        (1, 2), "unavailable"
    )
    reason = settled.rejections[1].reason
    assert reason.startswith("cannot apply a change to db.t: it does not carry the value of column")
    assert "'name'" in reason
    assert "REPLICA IDENTITY FULL" in reason


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_tables_that_keep_every_change_keep_the_placeholder_as_it_was_sent(kind: str):
    log = settled_with(
        kind, plan("db.t", pa.schema([field.with_nullable(True) for field in CHANGES]), log=True)
    )
    for settled in (log, settled_with(kind, plan("db.t", CHANGES, key=()))):
        assert settled.rejections == {}
        names = [name for _, rows in settled.rows for name in rows["name"].to_pylist()]
        assert names == ["a long text", TEXT, TEXT, TEXT]


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_without_a_placeholder_it_is_a_value_like_others(kind: str):
    settled = settled_with(kind, plan("db.t", CHANGES), placeholder="")
    assert (ids(settled), left(settled), settled.rejections) == ([1, 1, 3], [(102, 2)], {})


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_of_two_tables_the_one_that_keeps_every_change_has_it(kind: str):
    routes = (RouteConfig(to=("db.t", "db.log"), envelope="debezium"),)
    settled = settled_with(
        kind, plan("db.t", CHANGES), plan("db.log", CHANGES, key=()), routes=routes
    )
    assert ids(settled, "db.log") == [1, 1, 3, 4]
    assert {rejection.tables for rejection in settled.rejections.values()} == {("db.t",)}


FLAT = {"id": 1, "name": TEXT}


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_a_flattened_change_is_rejected_as_one_in_its_envelope(kind: str):
    """Debezium's ExtractNewRecordState leaves the row alone."""
    columns = pa.schema(list(CHANGES)[:2])
    schema, value = (json.dumps(ROW), datum(ROW, **FLAT)) if kind == "avro" else ("", doc(**FLAT))
    by = settler(RecordFormat(kind, schema, {}, TEXT), plan("db.t", columns))
    settled = settle(by, (None, value))
    assert (ids(settled), settled.rejections[0].kind) == ([], "unavailable")


HSTORE = {"op": "u", "before": None, "after": {"id": 1, "h": {TEXT: TEXT}}}


@pytest.mark.parametrize("mode", ["upsert", "append", LOG])
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("more", [{}, {"doc": TEXT}], ids=["alone", "with another"])
def test_the_placeholder_names_no_column(mode: str, exists: bool, more: dict[str, str]):
    columns = pa.schema(
        [
            CHANGES.field(0),
            pa.field("h", pa.struct([("k", pa.large_string())])),
            pa.field("_op", pa.large_string()),
        ]
    )
    made = plan("db.t", columns, key=() if mode == "append" else ("id",), log=mode == LOG)
    by = settler(
        RecordFormat("json"),
        *([made] if exists else []),
        routes=ROUTES,
        upserts=("db.t",),
        modes={} if mode == "append" else {"db.t": mode},
    )
    after = {**more, **HSTORE["after"]}  # type: ignore[dict-item]
    settled = settle(by, (None, doc(**{**HSTORE, "after": after})))
    assert settled.needs == {}
    assert settled.rejections[0].kind == "unavailable"


def test_a_map_takes_the_placeholder_of_an_hstore_as_it_was_sent():
    entries = pa.map_(pa.large_string(), pa.large_string())
    columns = pa.schema([CHANGES.field(0), pa.field("h", entries), CHANGES.field(2)])
    settled = settle(
        settler(RecordFormat("json"), plan("db.t", columns, key=()), routes=ROUTES),
        (None, doc(**HSTORE)),
    )
    assert settled.rejections == {}
    assert settled.rows[0][1]["h"].to_pylist() == [[(TEXT, TEXT)]]
