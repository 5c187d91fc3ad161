from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from frazil.config.sections import RESERVED, TableConfig
from frazil.errors import ConfigError, SchemaMismatch
from frazil.iceberg.schema import (
    check_fits,
    event_time_column,
    former_names,
    iceberg_schema,
    partition_spec,
    sort_order,
    update,
)
from frazil.iceberg.table import SchemaUpdate
from frazil.pipeline.projection import MetadataColumns

METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
INT = pa.int32()
TABLE = TableConfig("db.t")
V3 = TableConfig("db.t", format_version=3)


def made(columns: dict[str, pa.DataType] | pa.Schema, table: TableConfig = TABLE) -> str:
    return iceberg_schema(pa.schema(columns), METADATA, table)


def fields(text: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(text)["fields"]
    return listed


def type_of(kind: pa.DataType, table: TableConfig = TABLE) -> Any:
    return fields(made({"x": kind}, table))[0]["type"]


# ── iceberg_schema ───────────────────────────────────────────────────────────────────────────


def test_a_new_table_has_the_records_columns_and_the_metadata_behind_them():
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("s", pa.string())])
    assert [(f["id"], f["name"], f["type"], f["required"]) for f in fields(made(columns))] == [
        (1, "id", "long", True),
        (2, "s", "string", False),
        (3, "_topic", "string", True),
        (4, "_topic_partition", "int", True),
        (5, "_offset", "long", True),
        (6, "_timestamp", "timestamptz", False),
    ]


def test_a_metadata_column_without_a_name_is_left_out():
    text = iceberg_schema(pa.schema({"x": pa.int64()}), MetadataColumns("t", "p", "o", ""), TABLE)
    assert [f["name"] for f in fields(text)] == ["x", "t", "p", "o"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.int32(), "int"),
        (pa.int64(), "long"),
        (pa.float32(), "float"),
        (pa.float64(), "double"),
        (pa.bool_(), "boolean"),
        (pa.large_string(), "string"),
        (pa.large_binary(), "binary"),
        (pa.binary(16), "fixed[16]"),
        (pa.date32(), "date"),
        (pa.time64("us"), "time"),
        (pa.timestamp("us"), "timestamp"),
        (pa.timestamp("us", "UTC"), "timestamptz"),
        (pa.decimal128(9, 2), "decimal(9, 2)"),
        (pa.uuid(), "uuid"),
    ],
)
def test_each_type_has_its_place_in_iceberg(kind: pa.DataType, name: str):
    assert type_of(kind) == name


def test_nested_types_get_ids_of_their_own_all_different():
    kind = pa.struct({"l": pa.list_(pa.struct({"m": pa.map_(pa.string(), pa.list_(pa.int32()))}))})
    text = made({"x": kind})
    ids: list[int] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            ids.extend(
                v for k, v in value.items() if k in ("id", "element-id", "key-id", "value-id")
            )
        for below in value.values() if isinstance(value, dict) else value:
            if isinstance(below, (dict, list)):
                walk(below)

    walk(json.loads(text))
    assert len(ids) == 11
    assert len(set(ids)) == 11


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_nanoseconds_need_format_three(zone: str | None):
    kind = pa.timestamp("ns", zone)
    with pytest.raises(SchemaMismatch, match=r"db\.t: .*'x'.*timestamp\[ns") as caught:
        type_of(kind)
    assert "format_version = 3" in caught.value.hint
    assert type_of(kind, V3) == ("timestamptz_ns" if zone else "timestamp_ns")


@pytest.mark.parametrize(
    "kind", [pa.duration("s"), pa.decimal256(50, 2), pa.time64("ns"), pa.timestamp("us", "+03:00")]
)
@pytest.mark.parametrize("table", [TABLE, V3])
def test_a_type_iceberg_lacks_is_a_misfit(kind: pa.DataType, table: TableConfig):
    with pytest.raises(SchemaMismatch, match=r"cannot create table db\.t: .*'x'"):
        type_of(kind, table)


def test_the_hint_about_nanoseconds_is_given_for_nanoseconds_only():
    with pytest.raises(SchemaMismatch) as caught:
        type_of(pa.duration("s"))
    assert "nanosecond" not in caught.value.hint


def test_a_column_without_any_type_is_a_misfit():
    with pytest.raises(SchemaMismatch, match="Field: x"):
        type_of(pa.null())


def test_a_column_with_a_metadata_columns_name_is_a_misfit():
    with pytest.raises(
        SchemaMismatch, match="'_offset', which is also the name of a metadata column"
    ):
        made({"_offset": pa.int64()})


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_column_with_a_name_iceberg_keeps_is_a_misfit(name: str):
    with pytest.raises(
        SchemaMismatch, match=f"a column '{name}', a name that Iceberg keeps for itself"
    ):
        made({name: pa.int64()})


def test_columns_that_differ_only_in_case_are_a_misfit():
    with pytest.raises(SchemaMismatch, match="columns 'Id' and 'iD' differ only in case"):
        made({"Id": pa.int64(), "x": pa.int64(), "iD": pa.int64()})


@pytest.mark.parametrize(
    "columns",
    [
        {"_Offset": pa.int64()},
        {"s": pa.struct({"a": pa.int64(), "A": pa.int64()})},
    ],
)
def test_names_that_differ_only_in_case_are_found_everywhere(columns: dict[str, pa.DataType]):
    with pytest.raises(SchemaMismatch):
        made(columns)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a.b": pa.int64(), "a": pa.struct({"b": pa.int64()})}, "two columns are called 'a.b'"),
        ({"": pa.int64()}, "column '' has no name"),
    ],
)
def test_names_that_iceberg_cannot_distinguish_are_a_misfit(
    columns: dict[str, pa.DataType], words: str
):
    with pytest.raises(SchemaMismatch, match=words):
        made(columns)


def test_identifier_fields_are_required_and_so_is_all_around_them():
    columns = {"id": pa.int64(), "s": pa.struct({"key": pa.string(), "x": pa.int32()})}
    names = ("id", "s.key", "_offset")
    schema = json.loads(made(columns, TableConfig("db.t", identifier_fields=names)))
    identifier, around, _, _, offset, _ = schema["fields"]
    assert schema["identifier-field-ids"] == [
        identifier["id"],
        around["type"]["fields"][0]["id"],
        offset["id"],
    ]
    assert identifier["required"]
    assert around["required"]
    assert [field["required"] for field in around["type"]["fields"]] == [True, False]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("colour", "there is no column 'colour'; expected one of id, f"),
        ("ID", "there is no column 'ID'"),
        ("f", "it is float; expected a single value, and neither float nor double"),
        ("d", "it is double"),
        ("s", "it is struct"),
        ("l", "it is list"),
        ("l.element", "l.element is inside a list or a map"),
        ("m.key", "m.key is inside a list or a map"),
        ("s.l.element.x", "inside a list or a map"),
    ],
)
def test_an_identifier_field_that_cannot_be_is_refused(name: str, words: str):
    columns = {
        "id": pa.int64(),
        "f": pa.float32(),
        "d": pa.float64(),
        "l": pa.list_(pa.int32()),
        "m": pa.map_(pa.string(), pa.int32()),
        "s": pa.struct({"l": pa.list_(pa.struct({"x": pa.int32()}))}),
    }
    with pytest.raises(ConfigError, match=words) as caught:
        made(columns, TableConfig("db.t", identifier_fields=("id", name)))
    assert f"cannot use identifier field {name!r} of table db.t: " in caught.value.message


# ── partition_spec ───────────────────────────────────────────────────────────────────────────

ORDERS = made(
    {
        "id": pa.int64(),
        "country": pa.string(),
        "at": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "s": pa.struct({"at": pa.timestamp("us")}),
        "tags": pa.list_(pa.string()),
    }
)


@pytest.mark.parametrize(
    ("text", "source", "name", "transform"),
    [
        ("country", 2, "country", "identity"),
        (" country ", 2, "country", "identity"),
        ("identity(country)", 2, "country", "identity"),
        ("year(at)", 3, "at_year", "year"),
        ("months(at)", 3, "at_month", "month"),
        ("day(at)", 3, "at_day", "day"),
        ("days( at )", 3, "at_day", "day"),
        ("hour(at)", 3, "at_hour", "hour"),
        ("day(day)", 4, "day_day", "day"),
        ("bucket(16, id)", 1, "id_bucket", "bucket[16]"),
        ("bucket(id, 16)", 1, "id_bucket", "bucket[16]"),
        ("truncate(4,country)", 2, "country_trunc", "truncate[4]"),
        ("_topic_partition", 8, "_topic_partition", "identity"),
    ],
)
def test_a_partition_field_is_read(text: str, source: int, name: str, transform: str):
    spec = json.loads(partition_spec(ORDERS, (text,), "db.t"))
    assert spec == {
        "spec-id": 0,
        "fields": [{"source-id": source, "field-id": 1000, "name": name, "transform": transform}],
    }


def test_a_field_inside_a_struct_can_be_partitioned_by():
    (field,) = json.loads(partition_spec(ORDERS, ("hour(s.at)",), "db.t"))["fields"]
    inside = fields(ORDERS)[4]["type"]["fields"][0]["id"]
    assert (field["source-id"], field["name"]) == (inside, "s_at_hour")


def test_many_fields_are_numbered_in_order_and_none_is_no_partition():
    spec = json.loads(partition_spec(ORDERS, ("day(at)", "bucket(4, id)", "country"), "db.t"))
    assert [f["field-id"] for f in spec["fields"]] == [1000, 1001, 1002]
    assert json.loads(partition_spec(ORDERS, (), "db.t"))["fields"] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a column, or one of year"),
        ("day(", "expected a column, or one of year"),
        ("day()", "expected a column, or one of year"),
        ("day(hour(at))", "expected a column, or one of year"),
        ("Day(at)", "expected a column, or one of year"),
        ("bucket(-1, id)", "there is no column|expected a column"),
        ("bucket(0, id)", "without its number"),
        ("bucket(id)", "without its number"),
        ("truncate(country)", "without its number"),
        ("week(at)", "unknown transform"),
        ("void(id)", "unknown transform"),
        ("day(3, at)", "unknown transform"),
        ("colour", "there is no column 'colour'; expected one of id, country"),
        ("day(colour)", "there is no column 'colour'"),
        ("hour(id)", "id is long, which hour does not take"),
        ("hour(day)", "day is date, which hour does not take"),
        ("year(country)", "country is string, which year does not take"),
        ("truncate(2, at)", "which truncate does not take"),
        ("tags", "which identity does not take"),
        ("s", "which identity does not take"),
        ("tags.element", "tags.element is inside a list or a map"),
    ],
)
def test_a_partition_field_that_cannot_be_is_refused(text: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        partition_spec(ORDERS, (text,), "db.t")
    assert f"cannot partition table db.t by {text!r}" in caught.value.message


def test_the_same_partition_field_twice_is_refused():
    with pytest.raises(ConfigError):
        partition_spec(ORDERS, ("day(at)", "days(at)"), "db.t")


def test_a_transform_with_two_numbers_is_refused():
    with pytest.raises(ConfigError):
        partition_spec(ORDERS, ("bucket(16, id, 4)",), "db.t")


def test_a_partition_field_does_not_take_the_name_of_another_column():
    columns = {
        "at": pa.date32(),
        "at_day": pa.int32(),
        "s_x": pa.int32(),
        "s": pa.struct({"x": pa.int32()}),
    }
    spec = json.loads(partition_spec(made(columns), ("day(at)", "s.x", "at_day"), "db.t"))
    assert [field["name"] for field in spec["fields"]] == ["at_day_part", "s_x_part", "at_day"]


# ── sort_order ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "source", "transform", "direction", "nulls"),
    [
        ("country", 2, "identity", "asc", "nulls-first"),
        ("country asc", 2, "identity", "asc", "nulls-first"),
        ("country DESC", 2, "identity", "desc", "nulls-last"),
        (" country  desc  nulls  first ", 2, "identity", "desc", "nulls-first"),
        ("country nulls last", 2, "identity", "asc", "nulls-last"),
        ("bucket(16, id) asc nulls last", 1, "bucket[16]", "asc", "nulls-last"),
        ("day(at) desc", 3, "day", "desc", "nulls-last"),
        ("_offset", 9, "identity", "asc", "nulls-first"),
    ],
)
def test_a_sort_field_is_read(text: str, source: int, transform: str, direction: str, nulls: str):
    assert json.loads(sort_order(ORDERS, (text,), "db.t")) == {
        "order-id": 1,
        "fields": [
            {
                "transform": transform,
                "source-id": source,
                "direction": direction,
                "null-order": nulls,
            }
        ],
    }


def test_no_sort_field_is_no_order_and_many_keep_theirs():
    assert sort_order(ORDERS, (), "db.t") == ""
    order = json.loads(sort_order(ORDERS, ("s.at", "day(at) desc", "id"), "db.t"))
    inside = fields(ORDERS)[4]["type"]["fields"][0]["id"]
    assert [field["source-id"] for field in order["fields"]] == [inside, 3, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a column, or one of year"),
        ("colour", "there is no column 'colour'; expected one of id, country"),
        ("id desc desc", "expected a column, or one of"),
        ("id nulls", "expected a column, or one of"),
        ("bucket(id) desc", "without its number"),
        ("hour(day)", "day is date, which hour does not take"),
        ("s", "which identity does not take"),
        ("tags.element", "tags.element is inside a list or a map"),
    ],
)
def test_a_sort_field_that_cannot_be_is_refused(text: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        sort_order(ORDERS, (text,), "db.t")
    assert f"cannot sort table db.t by {text!r}" in caught.value.message


def test_the_same_sort_field_twice_is_refused():
    with pytest.raises(ConfigError, match="it exists already"):
        sort_order(ORDERS, ("id", "id desc"), "db.t")


# ── update ───────────────────────────────────────────────────────────────────────────────────


def planned(existing: str, columns: dict[str, pa.DataType], **more: Any) -> SchemaUpdate:
    beside = [field.name for field in METADATA.fields]
    spec = partition_spec(existing, ("bucket(4, x)",) if "x" in columns else (), "db.t")
    return update(
        existing, pa.schema(columns), "db.t", spec=spec, format_version=2, beside=beside, **more
    )


def test_an_update_says_types_in_icebergs_json():
    columns = [pa.field("x", pa.int32(), nullable=False), pa.field("s", pa.struct({"a": INT}))]
    given = {"x": pa.int64(), "s": pa.struct({"b": pa.string(), "a": INT}), "l": pa.list_(INT)}
    it = planned(made(pa.schema(columns)), given)
    assert it
    assert it.relax == ("x",)
    [(path, kind)] = it.widen
    assert (path, fields(kind)[0]["type"]) == ("x", "long")
    [(inside, b, text), (top, new, array)] = it.add
    assert (inside, b, fields(text)[0]["type"]) == ("s", "b", "string")
    assert (top, new, fields(array)[0]["type"]["type"]) == ("", "l", "list")


def test_what_fits_is_no_update():
    assert not planned(made({"x": pa.int64()}), {"x": INT})


def test_an_update_that_cannot_be_is_a_misfit_that_says_all():
    with pytest.raises(SchemaMismatch) as caught:
        planned(made({"x": pa.int64(), "y": INT}), {"x": pa.string(), "Y": INT})
    assert caught.value.message == (
        "cannot change table db.t so that the records fit: column 'x' is int64 in the table, "
        "string in the records; columns 'y' and 'Y' differ only in case"
    )


def test_a_new_column_must_not_have_the_name_of_a_partition_field():
    with pytest.raises(SchemaMismatch, match="column 'x_bucket' has the name of a partition field"):
        planned(made({"x": INT}), {"x": INT, "x_bucket": INT})


def test_identifier_fields_go_along_with_a_rename_of_what_is_around_them():
    config = TableConfig("db.t", identifier_fields=("id", "s.a.key"))
    inner = pa.struct({"key": pa.string()})
    existing = made({"id": INT, "s": pa.struct({"a": inner})}, config)
    new = {"id": INT, "t": pa.struct({"b": pa.struct({"name": pa.string()})})}
    aliases = {"t": "s", "t.b": "a", "t.b.name": "key"}
    it = planned(existing, new, aliases=aliases)
    assert dict(it.rename) == {"s": "t", "s.a": "b", "s.a.key": "name"}
    assert it.identifier == ("id", "t.b.name")
    assert it.relax == ()


def test_former_names_are_those_the_same_field_had():
    def schema(x: str, inside: str, more: int) -> str:
        element = {
            "type": "struct",
            "fields": [{"id": 3, "name": inside, "required": False, "type": "int"}],
        }
        return json.dumps(
            {
                "type": "struct",
                "schema-id": 0,
                "fields": [
                    {"id": 1, "name": x, "required": False, "type": "int"},
                    {
                        "id": 2,
                        "name": "l",
                        "required": False,
                        "type": {
                            "type": "list",
                            "element-id": 4,
                            "element": element,
                            "element-required": False,
                        },
                    },
                    {"id": more, "name": "z", "required": False, "type": "int"},
                ],
            }
        )

    now = schema("c", "q", 6)
    earlier = [schema("a", "p", 5), schema("b", "p", 5), now]
    assert former_names(now, earlier) == {"c": ("a", "b"), "l.element.q": ("p",)}
    assert former_names(now, [now]) == {}


# ── check_fits ───────────────────────────────────────────────────────────────────────────────


def fits(given: pa.Schema | dict[str, pa.DataType], existing: pa.Schema | dict[str, pa.DataType]):
    check_fits(pa.schema(given), made(existing, V3), METADATA, "db.t")


S, L, M = pa.struct, pa.list_, pa.map_


@pytest.mark.parametrize(
    ("given", "existing"),
    [
        (pa.int32(), pa.int64()),
        (pa.float32(), pa.float64()),
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.large_binary()),
        (pa.decimal128(5, 2), pa.decimal128(9, 2)),
        (pa.uuid(), pa.uuid()),
        (pa.timestamp("ns", "UTC"), pa.timestamp("ns", "UTC")),
        (L(pa.int32()), pa.large_list(pa.int64())),
        (M(pa.string(), pa.int32()), M(pa.string(), pa.int64())),
        (S({"a": pa.int32()}), S({"a": pa.int64(), "b": pa.string()})),
        (L(S({"a": pa.int32()})), L(S({"a": pa.int64()}))),
    ],
)
def test_a_type_that_goes_into_the_tables_unchanged_fits(given: pa.DataType, existing: pa.DataType):
    fits({"x": given}, {"x": existing})


@pytest.mark.parametrize(
    ("given", "existing"),
    [
        (pa.int64(), pa.int32()),
        (pa.float64(), pa.float32()),
        (pa.int32(), pa.float64()),
        (pa.int64(), pa.string()),
        (pa.string(), pa.binary()),
        (pa.decimal128(9, 2), pa.decimal128(5, 2)),
        (pa.decimal128(5, 2), pa.decimal128(9, 3)),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("ns"), pa.timestamp("us")),
        (pa.date32(), pa.timestamp("us")),
        (L(pa.int64()), L(pa.int32())),
        (L(pa.int32()), pa.int32()),
        (M(pa.string(), pa.int64()), M(pa.string(), pa.int32())),
        (S({"a": pa.int64()}), S({"a": pa.int32()})),
        (S({"a": pa.int32(), "b": pa.int32()}), S({"a": pa.int32()})),
        (L(S({"b": pa.int32()})), L(S({"a": pa.int32()}))),
    ],
)
def test_a_type_that_would_be_changed_or_cut_does_not_fit(
    given: pa.DataType, existing: pa.DataType
):
    with pytest.raises(SchemaMismatch, match=r"column 'x' is .* in the table, .* in the records"):
        fits({"x": given}, {"x": existing})


def test_a_required_field_of_a_struct_must_be_in_the_records():
    existing = S([pa.field("a", pa.int32()), pa.field("b", pa.int32(), nullable=False)])
    with pytest.raises(SchemaMismatch, match="column 'x'"):
        fits({"x": S({"a": pa.int32()})}, {"x": existing})


def test_a_table_may_have_more_optional_columns():
    fits({"x": pa.int64()}, {"x": pa.int64(), "more": pa.string()})


def test_every_difference_is_reported_at_once():
    existing = pa.schema([pa.field("x", pa.int32()), pa.field("must", pa.int64(), nullable=False)])
    with pytest.raises(SchemaMismatch) as caught:
        fits({"x": pa.string(), "new": pa.int64()}, existing)
    assert caught.value.message == (
        "cannot write to table db.t: its schema does not fit the records: "
        "column 'x' is int32 in the table, string in the records; "
        "column 'new' (int64) is not in the table; "
        "column 'must' (int64) is required by the table and not in the records"
    )


def test_a_table_without_the_metadata_columns_does_not_fit():
    bare = iceberg_schema(pa.schema({"x": pa.int64()}), MetadataColumns("", "", "", ""), TABLE)
    with pytest.raises(SchemaMismatch, match=r"'_topic' .* is not in the table.*'_offset'"):
        check_fits(pa.schema({"x": pa.int64()}), bare, METADATA, "db.t")


# ── event_time_column ────────────────────────────────────────────────────────────────────────


def test_event_time_is_the_records_timestamp_unless_a_column_is_named():
    assert event_time_column(ORDERS, TABLE) == "_timestamp"
    assert event_time_column(ORDERS, TableConfig("db.t", timestamp_column="")) == ""
    assert event_time_column(ORDERS, TableConfig("db.t", event_time="at")) == "at"


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("colour", "'colour' of table db.t: there is no such column"),
        ("id", "expected a timestamp, found long"),
        ("day", "expected a timestamp, found date"),
    ],
)
def test_an_event_time_that_is_no_timestamp_is_refused(column: str, words: str):
    with pytest.raises(ConfigError, match=words):
        event_time_column(ORDERS, TableConfig("db.t", event_time=column))


def test_an_event_time_inside_a_struct_is_refused_while_tasks_cannot_read_it():
    with pytest.raises(ConfigError):
        event_time_column(ORDERS, TableConfig("db.t", event_time="s.at"))
