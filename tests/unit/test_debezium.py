from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from frazil.errors import SchemaMismatch
from frazil.formats.debezium import aliases, columns, messages, unwrap, unwrap_json
from frazil.formats.decoder import Decoder, RecordFormat

ROW = pa.struct([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.large_string())])
SOURCE = pa.struct([("table", pa.large_string()), ("lsn", pa.int64())])
ENVELOPE = pa.schema(
    [
        pa.field("before", ROW),
        pa.field("after", ROW),
        pa.field("source", SOURCE, nullable=False),
        pa.field("op", pa.large_string(), nullable=False),
        pa.field("ts_ms", pa.int64()),
        pa.field("transaction", pa.struct([("id", pa.large_string())])),
    ]
)


def change(op: Any, before: Any = None, after: Any = None) -> dict[str, Any]:
    source = {"table": "t", "lsn": 7}
    return {
        "before": before,
        "after": after,
        "source": source,
        "op": op,
        "ts_ms": 5,
        "transaction": None,
    }


def row(number: int, name: str | None = "x") -> dict[str, Any]:
    return {"id": number, "name": name}


def given(*changes: Any, schema: pa.Schema = ENVELOPE) -> pa.Table:
    return pa.Table.from_pylist(list(changes), schema=schema)


def test_an_envelope_has_the_rows_columns_and_three_of_its_own():
    assert columns(ENVELOPE) == pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.large_string()),
            pa.field("_op", pa.large_string(), nullable=False),
            pa.field("_source", SOURCE, nullable=False),
            pa.field("_ts_ms", pa.int64()),
        ]
    )


def test_the_row_is_after_the_change_and_before_it_where_it_was_deleted():
    rows, index, rejected = unwrap(
        given(
            change("r", None, row(1)),
            change("c", None, row(2)),
            change("u", row(2), row(3, None)),
            change("d", row(3), None),
            change("d", row(4), row(5)),
            change("x", None, row(6)),
        )
    )
    assert (index, rejected) == (None, [])
    assert rows.schema == columns(ENVELOPE)
    rows.validate(full=True)
    assert rows.select(["id", "name", "_op"]).to_pylist() == [
        {"id": 1, "name": "x", "_op": "r"},
        {"id": 2, "name": "x", "_op": "c"},
        {"id": 3, "name": None, "_op": "u"},
        {"id": 3, "name": "x", "_op": "d"},
        {"id": 4, "name": "x", "_op": "d"},
        {"id": 6, "name": "x", "_op": "x"},
    ]
    assert rows.column("_source")[0].as_py() == {"table": "t", "lsn": 7}
    assert rows.column("_ts_ms").to_pylist() == [5] * 6


def test_what_is_no_change_of_a_row_is_rejected_by_itself():
    changes = [
        change("c", None, row(1)),
        change("t"),
        change("c"),
        change("d"),
        change("u", row(2)),
        change("d", None, row(3)),
        change("t", row(1), row(1)),
        change("d", row(9)),
    ]
    rows, index, rejected = unwrap(given(*changes))
    assert rows.column("id").to_pylist() == [1, 9]
    assert index is not None
    assert index.tolist() == [0, 7]
    assert [rejection.index for rejection in rejected] == [1, 2, 3, 4, 5, 6]
    assert {rejection.kind for rejection in rejected} == {"envelope"}
    assert rejected[0].reason.startswith(
        "cannot make a row of a change: the table was truncated (op t), and rows that were written"
    )
    assert rejected[3].reason == "cannot make a row of a change: op is 'u' and after is null"
    assert rejected[4].reason == "cannot make a row of a change: op is 'd' and before is null"


def test_messages_are_told_from_changes():
    changes = [change("c", None, row(1)), change("m"), change(None), change("t")]
    schema = ENVELOPE.set(3, pa.field("op", pa.string()))
    assert messages(given(*changes, schema=schema)).tolist() == [False, True, False, False]
    assert not messages(pa.table({"id": [1]})).any()
    assert not messages(pa.table({"op": [1]})).any()


def test_a_change_without_op_is_rejected():
    schema = ENVELOPE.set(3, pa.field("op", pa.string()))
    rows, index, rejected = unwrap(given(change(None, None, row(1)), schema=schema))
    assert rows.num_rows == 0
    assert rows.schema == columns(schema)
    assert index is not None
    assert [rejection.reason for rejection in rejected] == [
        "cannot make a row of a change: it has no op"
    ]


def nested(nullable: bool) -> pa.DataType:
    def of(kind: pa.DataType, name: str = "item") -> pa.Field:
        return pa.field(name, kind, nullable)

    inner = pa.struct([of(pa.int32(), "a")])
    return pa.struct(
        [
            of(pa.int64(), "id"),
            of(inner, "s"),
            of(pa.large_list(of(inner)), "l"),
            of(pa.map_(pa.large_string(), of(inner, "value")), "m"),
            of(pa.list_(of(inner)), "k"),
        ]
    )


@pytest.mark.parametrize("strict", ["after", "before"])
def test_sides_that_differ_in_what_may_be_null_become_one(strict: str):
    kinds = {side: nested(side != strict) for side in ("before", "after")}
    schema = pa.schema([("op", pa.string()), *kinds.items()])
    one = {"id": 1, "s": {"a": 1}, "l": [{"a": 2}], "m": [("x", {"a": 3})], "k": [{"a": 4}]}
    other = {**one, "id": 2}
    rows, _, rejected = unwrap(
        pa.Table.from_pylist(
            [{"op": "c", "after": one}, {"op": "d", "before": other}], schema=schema
        )
    )
    assert rejected == []
    rows.validate(full=True)
    assert pa.struct(list(rows.schema)[:-1]) == nested(True)
    assert rows.drop_columns(["_op"]).to_pylist() == [one, other]
    alone, _, _ = unwrap(pa.Table.from_pylist([{"op": "c", "after": one}], schema=schema))
    assert alone.schema == rows.schema


def test_a_column_of_one_side_is_null_on_the_other():
    before = pa.struct([pa.field("id", pa.int64(), nullable=False)])
    schema = pa.schema([("op", pa.string()), ("before", before), ("after", ROW)])
    rows, _, _ = unwrap(
        pa.Table.from_pylist(
            [{"op": "d", "before": {"id": 1}}, {"op": "c", "after": row(2)}], schema=schema
        )
    )
    assert rows.to_pylist() == [
        {"id": 1, "name": None, "_op": "d"},
        {"id": 2, "name": "x", "_op": "c"},
    ]
    turned = pa.schema([("op", pa.string()), ("before", ROW), ("after", before)])
    assert columns(turned).names == ["id", "name", "_op"]
    rows, _, _ = unwrap(pa.Table.from_pylist([{"op": "c", "after": {"id": 1}}], schema=turned))
    assert rows.to_pylist() == [{"id": 1, "name": None, "_op": "c"}]


def test_without_before_a_delete_has_no_row():
    schema = pa.schema([("op", pa.string()), ("after", ROW)])
    rows, _, rejected = unwrap(
        pa.Table.from_pylist([{"op": "d", "after": None}, {"op": "c", "after": row(1)}], schema)
    )
    assert rows.num_rows == 1
    assert [rejection.index for rejection in rejected] == [0]


def test_chunks_and_no_rows_at_all_are_fine():
    parts = [given(change("c", None, row(1))), given(change("d", row(2)))]
    rows, _, _ = unwrap(pa.concat_tables(parts))
    assert rows.column("id").to_pylist() == [1, 2]
    rows, index, rejected = unwrap(ENVELOPE.empty_table())
    assert (rows.num_rows, index, rejected) == (0, None, [])


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("id", pa.int64())]),
        pa.schema([("op", pa.string()), ("after", pa.int64())]),
        pa.schema([("after", ROW), ("before", ROW)]),
        pa.schema([("after", ROW), ("op", pa.int32())]),
    ],
)
def test_what_is_no_envelope_is_a_misfit(schema: pa.Schema):
    with pytest.raises(SchemaMismatch, match="expected op, before and after, found"):
        columns(schema)
    with pytest.raises(SchemaMismatch):
        unwrap(schema.empty_table())


def test_sides_of_different_types_and_columns_named_as_ours_are_misfits():
    other = pa.struct([pa.field("id", pa.large_string())])
    with pytest.raises(SchemaMismatch, match="column 'id' is int64 after and large_string before"):
        columns(pa.schema([("op", pa.string()), ("after", ROW), ("before", other)]))
    taken = pa.struct([pa.field("_op", pa.large_string())])
    with pytest.raises(SchemaMismatch, match="the row has a column '_op'"):
        columns(pa.schema([("op", pa.string()), ("after", taken)]))


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────


def encoded(*changes: Any) -> list[bytes]:
    return [json.dumps(change).encode() for change in changes]


def test_json_is_unwrapped_with_and_without_connects_wrapper():
    one = change("c", None, row(1))
    out, rejected, *_ = unwrap_json(encoded(one, {"schema": {"type": "struct"}, "payload": one}))
    assert rejected == []
    wanted = {"id": 1, "name": "x", "_op": "c", "_source": {"table": "t", "lsn": 7}, "_ts_ms": 5}
    assert [json.loads(value or b"") for value in out] == [wanted, wanted]


def test_tombstones_are_neither_rows_nor_rejected():
    assert unwrap_json([None, b'{"schema":null,"payload":null}', b'{"payload": null}']) == (
        [None] * 3,
        [],
        set(),
        [{}] * 3,
    )


def test_json_chooses_the_side_as_avro_does():
    changes = [
        change("r", None, row(1)),
        change("u", row(1), row(2)),
        change("d", row(3)),
        change("d", row(4), row(5)),
        change("t"),
        change("m"),
        change("c"),
        change("d"),
        change("u", row(2)),
        change(None, None, row(1)),
        change(7, None, row(1)),
    ]
    out, rejected, *_ = unwrap_json(encoded(*changes))
    assert [value and json.loads(value)["id"] for value in out] == [1, 2, 3, 4, *[None] * 7]
    assert [rejection.index for rejection in rejected] == [4, *range(6, 11)], "a message is skipped"
    assert {rejection.kind for rejection in rejected} == {"envelope"}
    _, _, of_avro = unwrap(given(*changes[:5], *changes[6:9]))
    assert [rejection.reason for rejection in rejected[:4]] == [
        rejection.reason for rejection in of_avro
    ]


def test_every_digit_and_escape_stays_as_it_was():
    inner = (
        b'{"big":123456789012345678901234567890,"dec":1.10000000000000000000000000000000001,'
        b'"e":1E+400,"zero":-0.0,"s":"\\u00e4\\ud83d\\ude00 \\"}\xc3\xa4","n":{"op":"z"}}'
    )
    value = b' {"after" : ' + inner + b' ,\n"op":"c", "ts_ms":9223372036854775807}\n'
    (out,), rejected, *_ = unwrap_json([value])
    assert rejected == []
    assert out == inner[:-1] + b',"_op":"c","_ts_ms":9223372036854775807}'
    (out,), rejected, *_ = unwrap_json([b'{"op":"c","after":{"n":' + b"9" * 5000 + b"}}"])
    assert rejected == []
    assert out == b'{"n":' + b"9" * 5000 + b',"_op":"c"}'


def test_a_row_without_fields_and_names_given_twice_are_read_as_json_has_them():
    out, rejected, *_ = unwrap_json(
        [b'{"op":"c","after":{ }}', b'{"op":"d","op":"c","after":{"a":1}}']
    )
    assert rejected == []
    assert out == [b'{"_op":"c"}', b'{"a":1,"_op":"c"}']


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"", "json"),
        (b"{", "json"),
        (b"\xff", "json"),
        (b'{"op":"c","after":{}', "json"),
        (b'{"op":"c","after":{}} x', "json"),
        (b'{"op":"c","after":{}}{}', "json"),
        (b'{"op":"c" "after":{}}', "json"),
        (b'{"op":"c",}', "json"),
        (b"{1:2}", "json"),
        (b'{"op":"c","after":{"a":NaN}}', "json"),
        (b'{"op":"c","after":{"a":01}}', "json"),
        (b'{"op"}', "json"),
        (b'{"op":"c","after":{"a":1,}}', "json"),
        (b"nul", "json"),
        (b'{"op":"c","after":' + b"[" * 200_000, "limit"),
        (b"{}", "envelope"),
        (b"null", "envelope"),
        (b"[]", "envelope"),
        (b"7", "envelope"),
        (b'{"id":1}', "envelope"),
        (b'{"op":"c"}', "envelope"),
        (b'{"after":{}}', "envelope"),
        (b'{"op":"c","after":[1]}', "envelope"),
        (b'{"op":"c","after":"x"}', "envelope"),
        (b'{"schema":{},"payload":7}', "envelope"),
        (b'{"payload":{"id":1}}', "envelope"),
        (b'{"op":"c","after":{"_op":"x"}}', "envelope"),
        (b'{"op":"c","ts_ms":1,"after":{"_ts_ms":"x"}}', "envelope"),
    ],
)
def test_bad_json_is_rejected_by_itself(value: bytes, kind: str):
    good = b'{"op":"c","after":{"a":1}}'
    out, rejected, *_ = unwrap_json([good, value, good])
    assert out == [b'{"a":1,"_op":"c"}', None, b'{"a":1,"_op":"c"}']
    assert [(rejection.index, rejection.kind) for rejection in rejected] == [(1, kind)]


def test_the_json_decoder_reads_on():
    out, _, deleted, *_ = unwrap_json(encoded(change("c", None, row(1)), change("d", row(2))))
    assert deleted == {1}
    decoded, rejected = Decoder(RecordFormat("json")).decode(out)
    assert rejected == []
    assert decoded[0].rows.column("id").to_pylist() == [1, 2]
    assert decoded[0].rows.schema.names == ["id", "name", "_op", "_source", "_ts_ms"]


def test_former_names_of_a_rows_columns_come_from_the_envelopes_schema():
    names = {"before.a": ("x",), "after.a": ("x",), "after.s.b": ("y",), "source.db": ("z",)}
    assert aliases(names) == {"a": ("x",), "s.b": ("y",)}
