"""`[[table]] select`, keys and headers as columns: what is read, what is refused, what becomes of
records."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from frazil.config.column_types import column_type, quoted
from frazil.config.model import Config
from frazil.config.select import (
    HEADERS,
    KEY,
    AllHeaders,
    Cast,
    Column,
    Digest,
    Expression,
    Header,
    Item,
    KeyBytes,
    KeyField,
    Literal,
    Mask,
    Star,
    parse_item,
    parse_select,
)
from frazil.config.select_checks import never_cast
from frazil.errors import ConfigError
from frazil.formats.declared_columns import arrow_type
from frazil.pipeline.strict_cast import CastMismatch, strict_cast
from frazil.sql.formatter import literal
from tests.selects import TABLE, Sent, World, config_of
from tests.system.streams import avro

Format = Callable[[dict[str, Any]], dict[str, str]]


@pytest.fixture
def avro_format(tmp_path: Path) -> Format:
    """`[decode]` of values in Avro, of this schema."""

    def of(schema: dict[str, Any]) -> dict[str, str]:
        (tmp_path / "value.avsc").write_text(json.dumps(schema))
        return {"format": "avro", "schema": str(tmp_path / "value.avsc")}

    return of


def doc(**members: Any) -> bytes:
    return json.dumps(members).encode()


# ── the language ─────────────────────────────────────────────────────────────────────────────────


def item_text(item: Item | Star) -> str:
    """The text of an item; `parse_item` reads it back."""
    if isinstance(item, Star):
        names = ", ".join(map(quoted, item.excluded))
        return f"* except ({names})" if names else "*"
    return f"{_text(item.of)} as {quoted(item.name)}"


def _text(of: Expression) -> str:
    match of:
        case Column(names):
            first, *rest = names
            first = f"`{first}`" if first in (KEY, HEADERS) else quoted(first)
            return ".".join([first, *map(quoted, rest)])
        case KeyBytes():
            return KEY
        case KeyField(names):
            return ".".join([KEY, *(map(quoted, names) if names else ["*"])])
        case AllHeaders():
            return HEADERS
        case Header(name):
            return f"{HEADERS}[{literal(name)}]"
        case Cast(inner, kind):
            return f"cast({_text(inner)} as {kind})"
        case Mask(inner, keep):
            return f"mask({_text(inner)}{f', {keep}' if keep else ''})"
        case Digest(inner, salt):
            return f"sha256({_text(inner)}{f', {literal(salt)}' if salt else ''})"
        case Literal(value):
            if isinstance(value, str):
                return literal(value)
            return "null" if value is None else str(value).lower()


@pytest.mark.parametrize(
    "text",
    [
        "id as id",
        "customer.name as name",
        "CAST(amount AS decimal(10, 2)) AS amount",
        "mask(email, 4) as email",
        "sha256(cast(id as string), 'env:SALT') as h",
        "* except (ssn, `odd name`)",
        "`_key` as k",
        "_key as _key",
        "_key.id as id",
        "_key.* as k",
        "_headers as h",
        "_headers['it''s'] as h",
        "'it''s' as t",
        "-12.50 as d",
        "cast(null as struct<a: list<map<string, int>>, `b c`: timestamptz(ms)>) as s",
        "größe as größer",
    ],
)
def test_an_item_is_read_and_written_back(text: str):
    item = parse_item(text)
    assert parse_item(item_text(item)) == item
    assert item_text(item).lower() == text.lower()


@pytest.mark.parametrize(
    ("text", "fault", "place"),
    [
        ("upper(email) as email", "unknown function 'upper'", 0),
        ("cast(amount as money) as a", "unknown type 'money'", 15),
        ("mask(email)", "expected a name for the column", 11),
        ("amount + 1 as a", "unexpected '+'", 7),
        ("a b", "expected the end", 2),
        ("* except ()", "expected a name", 10),
        ("_headers[1] as h", "expected the name of a header in quotes", 9),
        ("cast(a as decimal(39, 1)) as a", "expected decimal(p,s)", 10),
        ("", "expected a column", 0),
        ("cast(" * 40 + "a", "expected at most 20 levels", 105),
    ],
)
def test_a_fault_is_shown_with_a_caret(text: str, fault: str, place: int):
    with pytest.raises(ConfigError) as caught:
        parse_item(text)
    assert fault in caught.value.message
    _, shown, caret = caught.value.hint.splitlines()
    assert shown[caret.index("^") :] == text[place : place + 60]


def test_a_salt_is_a_reference_and_is_not_repeated_in_the_error():
    with pytest.raises(ConfigError, match="expected a salt as 'env:NAME'") as caught:
        parse_item("sha256(email, 'hunter2') as h")
    assert "hunter2" not in str(caught.value) + caught.value.hint


def test_two_columns_of_one_name_are_refused_whatever_their_case():
    with pytest.raises(ConfigError, match="two of its columns are called 'ID'"):
        parse_select(["ID", "mask(x) as id"])


# ── what is refused before the start ─────────────────────────────────────────────────────────────

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"select": ["a as _offset"]}, "'_offset' is the name of a metadata column"),
    ({"select": ["a as _OFFSET"]}, "'_OFFSET' is the name of a metadata column"),
    ({"select": ["a as _file"]}, "reserved by Iceberg"),
    ({"key_column": "_topic"}, "'_topic' is the name of a metadata column"),
    ({"select": ["a", "b"], "key_column": "A"}, "two of its columns are called 'A'"),
    ({"select": ["a"], "partition_by": ["day(at)"]}, "leaves out 'at', which partition_by names"),
    ({"select": ["* except (at)"], "sort_by": ["at desc"]}, "'at', which sort_by names"),
    ({"select": ["a"], "event_time": "at"}, "'at', which event_time names"),
    ({"select": ["a"], "identifier_fields": ["id"]}, "'id', which identifier_fields names"),
    ({"select": ["a"], "mode": "upsert", "key": ["id"]}, "leaves out 'id', which key names"),
    (
        {"select": ["* except (id)", "sha256(id) as id"], "mode": "upsert", "key": ["id"]},
        "select computes 'id', which is its key",
    ),
    (
        {"select": ["a.id as id", "*"], "mode": "upsert", "key": ["id"]},
        "from inside 'a'; expected a field at the top",
    ),
    (
        {"select": ["_key as k", "*"], "mode": "upsert", "key": ["k", "id"]},
        "'k' comes from the record's key, and the other columns",
    ),
    (
        {"select": ["x as a", "x as b"], "mode": "upsert", "key": ["a", "b"]},
        "two columns of its key of one field",
    ),
    (
        {
            "select": ["*", "cast(v as long) as w"],
            "mode": "upsert",
            "key": ["id"],
            "version_column": "w",
        },
        "select computes 'w', which is its version_column",
    ),
    ({"select": ["'d' as _op", "*"], "mode": "changelog", "key": ["id"]}, "_op is the change log"),
    ({"select": ["a"], "aliases": {"b": "a"}}, "it has aliases and select"),
    ({"select": ["null as a"]}, "select makes 'a' null without a type"),
    ({"select": ["mask('a') as a"]}, "select hides a constant"),
    ({"key_column": "k", "key_column_type": "text"}, "key_column_type 'text' is unknown"),
    ({"key_column": "k", "key_column_type": "struct"}, "their types are missing"),
    ({"key_fields_prefix": "k_"}, "their types are missing"),
]


@pytest.mark.parametrize(("table", "fact"), REFUSED)
def test_what_cannot_work_is_refused_before_the_start(table: dict[str, Any], fact: str):
    with pytest.raises(ConfigError) as caught:
        config_of(table)
    assert fact in caught.value.message
    assert caught.value.path[:2] == ("table", "0")


def test_the_error_names_file_and_line(tmp_path: Any):
    path = tmp_path / "s.toml"
    path.write_text(
        '[sink]\nid = "s"\ntopics = ["t"]\n[kafka]\n"bootstrap.servers" = "b:1"\n[decode]\n'
        'format = "json"\n[catalog]\ntype = "rest"\nuri = "http://c"\n[[table]]\n'
        'name = "db.t"\nselect = ["upper(a) as a"]\n'
    )
    with pytest.raises(ConfigError, match=r"unknown function 'upper'.*s\.toml:13"):
        Config.from_toml(path)


def test_a_transform_selects_for_itself():
    with pytest.raises(ConfigError, match=r"its rows come from a \[transform\]"):
        config_of({"select": ["a"]}, transform={"sql": "SELECT * FROM stream"})


@pytest.mark.parametrize("salt", ["", None])
def test_a_digest_without_its_salt_does_not_start(
    monkeypatch: pytest.MonkeyPatch, salt: str | None
):
    monkeypatch.delenv("SALT", raising=False)
    if salt is not None:
        monkeypatch.setenv("SALT", salt)
    with pytest.raises(ConfigError, match=r"is empty|is not set") as caught:
        World(config_of({"select": ["sha256(a, 'env:SALT') as a"]}))
    assert caught.value.path == ("table", "0", "select")


# ── what becomes of records ──────────────────────────────────────────────────────────────────────


def test_the_columns_are_the_items_in_their_order_and_star_is_the_rest():
    world = World(config_of({"select": ["b as x", "mask(c) as c", "* except (d)", "1 as one"]}))
    rows = world.send(doc(a=1, b="b", c="secret", d="d", e=None), doc(f=2.5))
    assert rows == [
        {"x": "b", "c": "***", "one": 1, "a": 1, "b": "b", "f": None, "_offset": 0},
        {"x": None, "c": None, "one": 1, "a": None, "b": None, "f": 2.5, "_offset": 1},
    ]


def test_a_list_without_star_ignores_other_fields_whatever_they_hold():
    world = World(config_of({"select": ["id", "at.b as b"]}))
    rows = world.send(
        doc(id=1, z=[1, "a", {}], at={"b": 1, "c": [None, {"x": 1}]}), doc(id=2, at=None)
    )
    assert rows == [{"id": 1, "b": 1, "_offset": 0}, {"id": 2, "b": None, "_offset": 1}]
    assert list(world.columns()) == ["id", "b"]
    assert world.rejections == {}


def test_a_listed_field_that_comes_later_becomes_a_column():
    world = World(config_of({"select": ["id", "phone", "a.b as ab"]}))
    world.send(doc(id=1))
    assert list(world.columns()) == ["id"]
    [row] = world.send(doc(id=2, phone="1", a={"b": True, "c": 1}))
    assert row == {"id": 2, "phone": "1", "ab": True, "_offset": 0}


def test_a_record_that_does_not_cast_is_rejected_alone_and_not_quoted(avro_format: Format):
    select = ["id", "cast(secret as long) as secret"]
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "long"}, {"name": "secret", "type": "string"}],
    }
    world = World(config_of({"select": select}, decode=avro_format(schema)))
    sent = [avro(schema, {"id": i, "secret": "hunter" if i in (3, 40) else "7"}) for i in range(99)]
    rows = world.send(*sent)
    assert [row["id"] for row in rows] == [i for i in range(99) if i not in (3, 40)]
    assert {i: r.kind for i, r in world.rejections.items()} == {3: "misfit", 40: "misfit"}
    reason = world.rejections[3].reason
    assert reason == f"cannot fit {TABLE}: cannot select secret: the value is no long"


def test_an_exact_cast_of_json_has_every_digit():
    world = World(config_of({"select": ["cast(n as decimal(38,20)) as n"]}))
    rows = world.send(b'{"n":0.12345678901234567890}', b'{"n":"123456789012345678.5"}')
    assert [row["n"] for row in rows] == [
        Decimal("0.12345678901234567890"),
        Decimal("123456789012345678.5"),
    ]


def test_digests_are_those_of_salt_and_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SALT", "pepper")
    world = World(config_of({"select": ["sha256(a) as plain", "sha256(a, 'env:SALT') as salted"]}))
    rows = world.send(doc(a="é"), doc(a=""), doc(a=None))
    assert [(row["plain"], row["salted"]) for row in rows] == [
        tuple(hashlib.sha256(salt + text.encode()).hexdigest() for salt in (b"", b"pepper"))
        for text in ("é", "")
    ] + [(None, None)]
    assert "pepper" not in repr(world.plans.selects)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a@b.com", "***com"), ("abcdefg", "***efg"), ("abcdef", "***"), ("ab", "***"), ("", "***")],
)
def test_of_a_short_text_a_mask_shows_nothing(text: str, shown: str):
    world = World(config_of({"select": ["mask(a, 3) as a"]}))
    [row] = world.send(doc(a=text))
    assert row["a"] == shown


def test_headers_keep_their_order_their_doubles_and_their_bytes():
    world = World(config_of({"headers_column": "h", "headers": {"trace": "t"}, "key_column": "k"}))
    large = b"\xff" * 1_000_000
    given: list[tuple[str, bytes | None]] = [("t", b"1"), ("", b""), ("t", b"2"), ("x", None)]
    rows = world.send(
        Sent(doc(a=1), b"\x00\xff", given), Sent(doc(a=2), b"", [("big", large)]), Sent(doc(a=3))
    )
    assert [[(h["key"], h["value"]) for h in row["h"]] for row in rows] == [
        given,
        [("big", large)],
        [],
    ]
    assert [row["k"] for row in rows] == [b"\x00\xff", b"", None]
    assert [row["trace"] for row in rows] == ["2", None, None]


def test_a_header_or_key_that_is_no_text_rejects_its_record_alone():
    table = {"headers": {"trace": "t"}, "key_column": "k", "key_column_type": "string"}
    world = World(config_of(table))
    rows = world.send(
        Sent(doc(a=1), b"k", [("t", b"\xff")]), Sent(doc(a=2), b"\xff"), Sent(doc(a=3), b"k3")
    )
    assert [row["k"] for row in rows] == ["k3"]
    assert sorted(world.rejections) == [0, 1]
    assert "cannot select trace" in world.rejections[0].reason


def test_a_key_in_avro_becomes_columns_and_a_broken_one_rejects_its_record(avro_format: Format):
    schema = {"type": "record", "name": "K", "fields": [{"name": "id", "type": "long"}]}
    path = avro_format(schema)["schema"]
    decode = {"format": "json", "key_format": "avro", "key_schema": path}
    world = World(config_of({"key_fields_prefix": "k_"}, decode=decode))
    large, none = Sent(doc(a=1), avro(schema, {"id": 2**40})), Sent(doc(a=2), None)
    rows = world.send(large, none, Sent(doc(a=3), b"\xff"))
    assert [row["k_id"] for row in rows] == [2**40, None]
    assert world.rejections[2].kind == "key"


def test_deletes_of_renamed_keys_are_found_by_the_field_that_was_sent():
    table = {"mode": "upsert", "key": ["cid"], "select": ["id as cid", "* except (id)"]}
    world = World(config_of(table))
    world.send(doc(id=1, a=1))
    rows = world.send(Sent(doc(id=1, a=2), b'{"id":1}'), Sent(None, b'{"id":2}'), Sent(None, b"{}"))
    assert [(row["cid"], row["a"]) for row in rows] == [(1, 2)]
    assert world.deleted == [{"cid": 2, "_offset": 1}]
    assert world.rejections[2].kind == "key"


def test_a_change_log_keeps_its_operation_and_the_envelope_of_deletes():
    table = {
        "mode": "changelog",
        "key": ["id"],
        "select": ["id", "_headers['h'] as h"],
        "key_column": "k",
    }
    world = World(config_of(table))
    rows = world.send(Sent(doc(id=1), b'{"id":1}'))
    rows = world.send(
        Sent(doc(id=1), b'{"id":1}'), Sent(None, b'{"id":2}', [("h", b"1")]), Sent(None, None)
    )
    assert [(r["id"], r["h"], r["k"], r["_op"]) for r in rows] == [
        (1, None, b'{"id":1}', "u"),
        (2, b"1", b'{"id":2}', "d"),
    ]
    assert world.rejections[2].kind == "key"


@pytest.mark.parametrize("form", ["json", "avro"])
def test_debezium_changes_are_selected_as_rows(form: str, avro_format: Format):
    row = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": "id", "type": "long"}, {"name": "email", "type": "string"}],
    }
    schema = {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": ["null", row]},
            {"name": "after", "type": ["null", "Row"]},
            {"name": "op", "type": "string"},
        ],
    }
    table = {"mode": "upsert", "key": ["cid"], "select": ["id as cid", "mask(email) as email"]}
    route = [{"to": [TABLE], "envelope": "debezium"}]
    world = World(config_of(table, route=route))
    if form == "avro":
        world = World(config_of(table, route=route, decode=avro_format(schema)))

    def change(before: Any, after: Any, op: str) -> bytes:
        value = {"before": before, "after": after, "op": op}
        return avro(schema, value) if form == "avro" else doc(**value)

    one, two = ({"id": i, "email": "x"} for i in (1, 2))
    world.send(change(None, one, "c"))
    rows = world.send(change(None, one, "c"), change(one, two, "u"), change(two, None, "d"))
    assert [(r["cid"], r["email"]) for r in rows] == [(1, "***"), (2, "***")]
    assert [(k["cid"], k["_offset"]) for k in world.deleted] == [(1, 1), (2, 2)]
    assert world.rejections == {}


def test_a_placeholder_of_debezium_does_not_hide_behind_a_digest():
    table = {"mode": "upsert", "key": ["id"], "select": ["id", "sha256(a) as a"]}
    world = World(config_of(table))
    world.send(doc(id=1, a="x"))
    rows = world.send(doc(id=1, a="x"), doc(id=2, a="__debezium_unavailable_value"))
    assert [row["id"] for row in rows] == [1]
    assert world.rejections[1].kind == "unavailable"


def test_an_existing_table_takes_what_is_selected_or_says_why_not():
    columns = pa.schema([("id", pa.int64()), ("h", pa.int64())])
    world = World(config_of({"select": ["id", "sha256(a) as h"]}), {TABLE: columns})
    assert world.send(doc(id=1, a="x")) == []
    assert "column 'h' is int64 in the table" in world.rejections[0].reason
    world = World(config_of({"select": ["id", "sha256(a) as g"]}), {TABLE: columns})
    assert [row["id"] for row in world.send(doc(id=1, a="x"))] == [1]
    assert list(world.columns()) == ["id", "h", "g"]


@pytest.mark.parametrize("name", ["größe", "a b", "a.b", "select", "名", "'"])
def test_odd_names_are_quoted(name: str):
    quoted = "`" + name + "`"
    world = World(config_of({"select": [f"{quoted} as {quoted}", "id"]}))
    rows = world.send(json.dumps({name: 1, "id": 2}).encode())
    assert [row[name] for row in rows] == [1]


def test_case_twins_of_the_records_are_one_records_trouble():
    world = World(config_of({"select": ["id", "*"]}))
    rows = world.send(doc(id=1), doc(id=2, ID=3), doc(id=3))
    assert [row["id"] for row in rows] == [1, 3]
    assert "differ only in case" in world.rejections[1].reason


def test_five_thousand_columns_are_selected():
    names = [f"c{i}" for i in range(5_000)]
    table = {"select": [*(f"{name} as x_{name}" for name in names)], "max_columns": 6_000}
    world = World(config_of(table))
    [row] = world.send(json.dumps(dict.fromkeys(names, 1)).encode())
    assert len(row) == 5_001
    assert set(row.values()) == {0, 1}


def test_nested_fields_below_a_null_are_null(avro_format: Format):
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "id", "type": "long"},
            {
                "name": "s",
                "type": [
                    "null",
                    {
                        "type": "record",
                        "name": "S",
                        "fields": [{"name": "a", "type": "string"}, {"name": "n", "type": "int"}],
                    },
                ],
            },
        ],
    }
    select = ["id", "s.a as a", "mask(s.a) as m", "cast(s.n as long) as n", "s.x as x"]
    world = World(config_of({"select": select}, decode=avro_format(schema)))
    rows = world.send(
        *(avro(schema, {"id": i, "s": s}) for i, s in enumerate([None, {"a": "q", "n": 7}]))
    )
    assert [tuple(row.values()) for row in rows] == [
        (0, None, None, None, 0),
        (1, "q", "***", 7, 1),
    ]


# ── casts ────────────────────────────────────────────────────────────────────────────────────────

D = Decimal
CASTS: list[tuple[pa.DataType, Any, str, Any]] = [
    (pa.int64(), 5, "int", 5),
    (pa.int64(), 2**31, "int", None),
    (pa.int64(), 2**53 + 1, "double", None),
    (pa.int64(), -7, "decimal(3,2)", D("-7.00")),
    (pa.int64(), 10, "decimal(3,2)", None),
    (pa.int64(), 2**63 - 1, "decimal(38,19)", D(2**63 - 1)),
    (pa.int64(), 7, "string", "7"),
    (pa.int64(), 2**60, "timestamptz(s)", None),
    (pa.float64(), 0.1, "decimal(4,2)", D("0.10")),
    (pa.float64(), 0.125, "decimal(4,2)", None),
    (pa.float64(), float("nan"), "decimal(4,2)", None),
    (pa.float64(), float("inf"), "long", None),
    (pa.float64(), 3.0, "long", 3),
    (pa.float64(), 3.5, "long", None),
    (pa.float64(), 0.1, "float", None),
    (pa.float64(), 0.1, "string", None),
    (pa.decimal128(5, 2), D("1.50"), "decimal(4,1)", D("1.5")),
    (pa.decimal128(5, 2), D("1.55"), "decimal(4,1)", None),
    (pa.decimal128(38, 2), D("12345678901234567.89"), "double", None),
    (pa.decimal128(9, 8), D("0.00000001"), "string", "0.00000001"),
    (pa.string(), "0x1F", "int", None),
    (pa.string(), "1_0", "int", None),
    (pa.string(), "\u0661", "int", None),
    (pa.string(), " 1", "long", None),
    (pa.string(), "+12", "long", 12),
    (pa.string(), "1e3", "double", 1000.0),
    (pa.string(), "nan", "double", None),
    (pa.string(), "TRUE", "boolean", None),
    (pa.string(), "true", "boolean", True),
    (pa.string(), "2023-02-29", "date", None),
    (pa.string(), "2026-01-01T00:00:00Z", "timestamp", None),
    (pa.string(), "", "decimal(4,2)", None),
    (pa.binary(), b"\xff", "string", None),
    (pa.binary(), "é".encode(), "string", "é"),
    (pa.timestamp("us", "UTC"), 1, "timestamp", None),
    (pa.timestamp("ns"), 1, "timestamp", None),
    (pa.bool_(), True, "int", None),
    (pa.list_(pa.int64()), [1], "string", None),
]


@pytest.mark.parametrize(("given", "value", "text", "wanted"), CASTS)
def test_a_cast_is_exact_or_refused(given: pa.DataType, value: Any, text: str, wanted: Any):
    array = pa.array([None, value], given)
    if wanted is None:
        with pytest.raises(CastMismatch):
            strict_cast(array, column_type(text))
        return
    assert strict_cast(array, column_type(text)).to_pylist() == [None, wanted]


def test_the_parser_survives_any_text():
    for text in (
        "`",
        "'",
        '"',
        "a.",
        ".a",
        "cast(",
        "cast(a as",
        "é" * 9,
        "*,",
        "\0",
        "_key.",
        "1a",
    ):
        with pytest.raises(ConfigError):
            parse_item(text + " ~")


# ── what declared columns say before the start ───────────────────────────────────────────────────

TYPES = (
    *("boolean", "int", "long", "float", "double", "string", "binary", "date", "time"),
    *("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns", "uuid", "decimal(10,2)"),
    *("fixed(16)", "list<int>", "map<string, int>", "struct<a: int>"),
)


def empty(kind: str) -> pa.Array:
    made = arrow_type(column_type(kind))
    if isinstance(made, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(made, pa.array([], made.storage_type))
    return pa.array([], made)


@pytest.mark.parametrize("given", TYPES)
def test_a_cast_is_refused_before_the_start_if_no_value_is_cast_so(given: str):
    """As the cast itself says of an array without values."""
    for target in (*TYPES, "timestamp(ms)", "timestamptz(us)"):
        if target == given:
            continue
        try:
            strict_cast(empty(given), column_type(target))
            possible = True
        except CastMismatch:
            possible = False
        assert never_cast(column_type(given), column_type(target)) is not possible, target


DECODE = {
    "format": "json",
    "undeclared": "drop",
    "columns": {"id": "long", "at": "timestamp", "meta.kind": "string", "s": "struct<n: date>"},
}


@pytest.mark.parametrize(
    ("table", "path", "fact"),
    [
        ({"select": ["cast(at as boolean) as x"]}, "select", "casts timestamp to boolean"),
        ({"select": ["cast(s.n as long) as x"]}, "select", "casts date to long"),
        ({"select": ["cast(id as timestamp) as x"]}, "select", "casts long to timestamp"),
        ({"select": ["cast(cast(id as string) as fixed(4)) as x"]}, "select", "casts string to"),
        ({"select": ["cast(meta as long) as x"]}, "select", "casts struct<> to long"),
        ({"partition_by": ["day(placed_at)"]}, "partition_by", "names 'placed_at'"),
        ({"sort_by": ["idd desc"]}, "sort_by", "did you mean 'id'?"),
        ({"event_time": "ts"}, "event_time", "names 'ts'"),
        ({"mode": "upsert", "key": ["ident"]}, "key", "names 'ident'"),
        ({"identifier_fields": ["ident"]}, "identifier_fields", "names 'ident'"),
        ({"key_column": "id"}, "key_column", "its key_column is 'id'"),
        ({"headers_column": "meta"}, "headers_column", "its headers_column is 'meta'"),
        ({"headers": {"at": "X-At"}}, "headers", "its headers is 'at'"),
    ],
)
def test_what_declared_columns_forbid_is_refused_with_its_setting(
    table: dict[str, Any], path: str, fact: str
):
    with pytest.raises(ConfigError, match=re.escape(fact)) as caught:
        config_of(table, decode=DECODE)
    assert caught.value.path == ("table", "0", path)


@pytest.mark.parametrize(
    "table",
    [
        {"select": ["cast(id as timestamp(ms)) as x", "cast(meta.kind as date) as d"]},
        {"partition_by": ["day(at)", "meta.kind"], "sort_by": ["_timestamp desc"]},
        {"event_time": "at", "identifier_fields": ["id"]},
        {"key_column": "k", "sort_by": ["k"]},
        {"key_column": "id", "select": ["* except (id)"]},
        {"select": ["id as number"], "sort_by": ["number"]},
    ],
)
def test_what_declared_columns_allow_is_taken(table: dict[str, Any]):
    config_of(table, decode=DECODE)
    undeclared = {"partition_by": ["day(elsewhere)"], "key_column": "elsewhere_too"}
    config_of(undeclared, decode={**DECODE, "undeclared": "infer"})
