from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.arrow.avro import WriterSchema
from frazil.config.sections import RESERVED
from frazil.errors import SchemaMismatch
from frazil.pipeline.evolution import (
    SchemaChanges,
    changes,
    differences,
    merged,
    renamed,
    together,
    twins,
)
from frazil.pipeline.projection import fitted

L, M, S = pa.large_list, pa.map_, pa.struct
INT, LONG, FLOAT, DOUBLE, TEXT = (
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.large_string(),
)


LACKS = "in the records, a type that Iceberg does not have"


def must(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def compared(existing: Any, given: Any, aliases: Any = None, **more: Any) -> SchemaChanges:
    return changes(pa.schema(existing), pa.schema(given), aliases, **more)


# ── changes ──────────────────────────────────────────────────────────────────────────────────


def test_what_fits_needs_no_change():
    existing = {"x": LONG, "s": S({"a": DOUBLE, "more": TEXT}), "l": L(LONG), "m": M(TEXT, LONG)}
    given = {"x": INT, "s": S({"a": FLOAT}), "l": pa.list_(INT), "m": M(pa.string(), pa.int16())}
    assert compared(existing, given) == SchemaChanges()
    assert not compared(existing, given)


def test_a_column_that_the_table_lacks_is_added_and_optional():
    assert compared({"x": INT}, [must("y", pa.string()), pa.field("x", INT)]).add == (
        ("", pa.field("y", TEXT)),
    )


def test_columns_are_added_inside_structs_lists_and_maps():
    def nested(*names: str) -> dict[str, pa.DataType]:
        inside = S(dict.fromkeys(names, INT))
        return {"s": inside, "l": L(inside), "m": M(TEXT, inside), "d": S({"s": L(L(inside))})}

    new = pa.field("b", INT)
    assert compared(nested("a"), nested("a", "b")) == SchemaChanges(
        add=(("s", new), ("l.element", new), ("m.value", new), ("d.s.element.element", new))
    )


def test_what_is_inside_an_added_struct_stays_required():
    inside = S([must("a", pa.list_(must("item", pa.int16())))])
    (column,) = compared({}, {"s": inside}).add
    assert column == ("", pa.field("s", S([must("a", L(must("element", INT)))])))


@pytest.mark.parametrize(
    ("existing", "given"),
    [(INT, LONG), (FLOAT, DOUBLE), (pa.decimal128(5, 2), pa.decimal128(9, 2))],
)
def test_a_type_is_widened(existing: pa.DataType, given: pa.DataType):
    assert compared({"x": existing}, {"x": given}) == SchemaChanges(widen=(("x", given),))
    assert compared({"x": given}, {"x": existing}) == SchemaChanges()
    deep = [L(S({"a": M(TEXT, kind)})) for kind in (existing, given)]
    assert compared({"x": deep[0]}, {"x": deep[1]}).widen == (("x.element.a.value", given),)


@pytest.mark.parametrize(
    ("existing", "given"),
    [
        (LONG, DOUBLE),
        (INT, FLOAT),
        (INT, TEXT),
        (TEXT, pa.binary()),
        (pa.bool_(), INT),
        (pa.decimal128(5, 2), pa.decimal128(9, 3)),
        (pa.decimal128(5, 2), pa.decimal256(50, 2)),
        (pa.date32(), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (L(INT), INT),
        (S({"a": INT}), L(INT)),
        (INT, pa.null()),
    ],
)
def test_any_other_change_of_type_is_impossible(existing: pa.DataType, given: pa.DataType):
    (reason,) = compared({"x": existing}, {"x": given}).impossible
    assert reason.startswith("column 'x' is ")
    assert str(given) in reason


def test_the_key_of_a_map_never_changes():
    assert compared({"m": M(INT, TEXT)}, {"m": M(LONG, TEXT)}).impossible == (
        "column 'm.key' is int32 in the table, int64 in the records",
    )
    assert not compared({"m": M(LONG, TEXT)}, {"m": M(INT, TEXT)})


def test_columns_that_records_may_lack_become_optional():
    existing = [
        must("x", INT),
        must("y", INT),
        must("s", S([must("a", INT), must("b", INT)])),
        must("l", L(must("element", INT))),
        must("m", M(TEXT, must("value", INT))),
    ]
    given = [
        pa.field("x", INT),
        must("s", S([pa.field("b", INT)])),
        must("l", L(pa.field("element", INT))),
        must("m", M(TEXT, pa.field("value", INT))),
    ]
    assert compared(existing, given) == SchemaChanges(
        relax=("x", "s.b", "s.a", "l.element", "m.value", "y")
    )


def test_identifier_fields_and_what_is_around_them_stay_required():
    existing = [must("id", INT), must("s", S([must("id", INT), must("b", INT)])), must("t", INT)]
    given = {"id": INT, "s": S({"id": INT, "b": INT}), "t": INT}
    assert compared(existing, given, identifier=["id", "s.id"]) == SchemaChanges(relax=("s.b", "t"))
    assert compared(existing, {"t": INT}, identifier=["id", "s.id"]).impossible == (
        "column 'id' is an identifier field of the table and not in the records",
        "column 's' is an identifier field of the table and not in the records",
    )


def test_metadata_columns_are_not_the_records():
    existing = [must("_offset", LONG), pa.field("x", INT)]
    assert not compared(existing, {"x": INT}, beside=["_offset"])
    for name, reason in [
        ("_offset", "column '_offset' is also the name of a metadata column"),
        ("_Offset", "columns '_offset' and '_Offset' differ only in case"),
    ]:
        assert compared(existing, {name: LONG}, beside=["_offset"]).impossible == (reason,)


@pytest.mark.parametrize(
    ("existing", "given", "reason"),
    [
        ({"id": INT}, {"Id": INT}, "columns 'id' and 'Id' differ only in case"),
        ({"id": INT}, {"id": INT, "ID": INT}, "columns 'id' and 'ID' differ only in case"),
        ({}, {"a": INT, "A": INT}, "columns 'a' and 'A' differ only in case"),
        ({"s": S({"a": INT})}, {"s": S({"A": INT})}, "columns 's.a' and 's.A' differ only in case"),
        ({}, {"s": S({"a": INT, "A": INT})}, "columns 's.a' and 's.A' differ only in case"),
        ({"a.b": INT}, {"a": S({"b": INT})}, "two columns are called 'a.b'"),
        ({"a": S({"b": INT})}, {"a.b": INT, "a": S({"b": INT})}, "two columns are called 'a.b'"),
        ({}, {"": INT}, "column '' has no name"),
        ({}, {"s": S({"": INT})}, "column 's.' has no name"),
        ({"s": S({"a": INT})}, {"s": S({"": INT})}, "column 's.' has no name"),
        ({}, {"x": S([])}, "column 'x' is struct<> " + LACKS),
        ({}, {"x": L(pa.null())}, "column 'x.element' is null " + LACKS),
        ({}, {"x": pa.duration("s")}, "column 'x' is duration[s] " + LACKS),
    ],
)
def test_a_column_that_no_table_can_have_is_impossible(existing: Any, given: Any, reason: str):
    it = compared(existing, given)
    assert it.impossible == (reason,)
    assert it


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_name_that_iceberg_keeps_is_impossible_at_the_top_only(name: str):
    assert compared({}, {name: INT}).impossible == (
        f"column {name!r} has a name that Iceberg keeps for itself",
    )
    assert not compared({}, {"s": S({name: INT})}).impossible


def test_a_name_of_a_partition_field_is_impossible_for_a_new_column_only():
    it = compared({"x": INT}, {"x": INT, "at_day": INT}, partitions=["x", "at_day"])
    assert it.impossible == ("column 'at_day' has the name of a partition field of the table",)
    assert compared({"y": INT}, {"at_day": INT}, {"at_day": "y"}, partitions=["at_day"]).impossible


def test_nanoseconds_need_format_three():
    kind = pa.timestamp("ns", "UTC")
    assert compared({}, {"x": kind}).add == (("", pa.field("x", kind)),)
    assert "format_version = 3" in compared({}, {"x": kind}, format_version=2).impossible[0]
    assert not compared({"x": kind}, {"x": kind}, format_version=2)


def test_a_zone_is_how_a_moment_is_shown_so_a_new_column_has_none_but_utc():
    (added,) = compared({}, {"at": pa.timestamp("us", "+03:00")}).add
    assert added[1].type == pa.timestamp("us", "UTC")


# ── names that changed ───────────────────────────────────────────────────────────────────────


def test_a_column_is_renamed_by_its_alias_and_compared_under_it():
    existing = [must("old", INT), pa.field("x", INT)]
    assert compared(existing, {"new": LONG, "x": INT}, {"new": "old"}) == SchemaChanges(
        widen=(("old", LONG),), relax=("old",), rename=(("old", "new"),)
    )


def test_columns_inside_are_renamed_and_paths_have_the_names_that_the_table_has():
    existing = {"s": S({"a": INT}), "l": L(S({"a": INT})), "m": M(TEXT, S({"a": INT}))}
    given = {"t": S({"b": LONG}), "l": L(S({"b": INT, "c": INT})), "m": M(TEXT, S({"b": INT}))}
    aliases = {"t": ("s",), "t.b": "s.a", "l.element.b": ("z", "a"), "m.value.b": "a"}
    assert compared(existing, given, aliases) == SchemaChanges(
        add=(("l.element", pa.field("c", INT)),),
        widen=(("s.a", LONG),),
        rename=(("s", "t"), ("s.a", "b"), ("l.element.a", "b"), ("m.value.a", "b")),
    )


def test_a_record_that_has_both_names_has_two_columns():
    assert compared({"old": INT}, {"old": INT, "new": INT}, {"new": "old"}) == SchemaChanges(
        add=(("", pa.field("new", INT)),)
    )


def test_a_rename_may_change_nothing_but_case():
    assert compared({"Id": INT}, {"id": INT}, {"id": "Id"}) == SchemaChanges(rename=(("Id", "id"),))


def test_a_rename_to_a_name_that_is_taken_is_impossible():
    it = compared({"old": INT, "New": INT}, {"new": INT}, {"new": "old"})
    assert it.impossible == ("columns 'New' and 'new' differ only in case",)
    assert compared({"old": INT}, {"_pos": INT}, {"_pos": "old"}).impossible
    assert compared(
        [must("_o", INT), pa.field("old", INT)], {"_o": INT}, {"_o": "old"}, beside=["_o"]
    )


def test_a_metadata_column_is_never_renamed():
    it = compared({"_offset": LONG}, {"offset": LONG}, {"offset": "_offset"}, beside=["_offset"])
    assert it == SchemaChanges(add=(("", pa.field("offset", LONG)),))


def test_records_of_an_older_writer_need_no_change_after_a_rename():
    existing = {"new": LONG, "s": S({"b": INT})}
    assert not compared(existing, {"old": INT, "s": S({"a": INT})}, {"new": "old", "s.b": "a"})


def test_two_writers_that_rename_to_and_fro_come_to_rest():
    aliases = {"x": "y", "y": "x"}
    assert not compared({"x": INT}, {"y": INT}, aliases)
    assert not compared({"y": INT}, {"x": INT}, aliases)


def test_rows_of_an_older_writer_get_the_names_that_the_table_has():
    deep = S({"a": INT, "l": L(S({"p": TEXT})), "m": M(TEXT, S({"p": INT})), "u": pa.bool_()})
    rows = pa.table(
        {
            "old": pa.array(
                [
                    {"a": 1, "l": [{"p": "x"}], "m": [("k", {"p": 5})], "u": True},
                    None,
                    {"a": None, "l": [], "m": None, "u": None},
                ],
                deep,
            ),
            "z": pa.array([1, 2, 3]),
        }
    )
    target = pa.schema(
        {
            "new": S(
                {"b": INT, "l": L(S({"q": TEXT})), "m": M(TEXT, S({"q": INT})), "u": pa.bool_()}
            ),
            "z": LONG,
        }
    )
    aliases = {"new": "old", "new.b": ("a",), "new.l.element.q": "p", "new.m.value.q": "p"}
    out = renamed(rows, target, aliases)
    assert out.to_pylist() == [
        {"new": {"b": 1, "l": [{"q": "x"}], "m": [("k", {"q": 5})], "u": True}, "z": 1},
        {"new": None, "z": 2},
        {"new": {"b": None, "l": [], "m": None, "u": None}, "z": 3},
    ]
    assert out.schema.equals(target)
    assert renamed(rows.slice(1), target, aliases).to_pylist() == out.to_pylist()[1:]
    numbers = [table.column(0).chunk(0).field(0).buffers()[1] for table in (out, rows)]
    assert numbers[0].address == numbers[1].address, "values are not copied"


@pytest.mark.parametrize(
    ("target", "aliases"),
    [
        ({"old": INT}, {}),
        ({"old": INT}, {"new": "old"}),  # the table's to be renamed, not the rows'
        ({"new": INT, "old": INT}, {"new": "old"}),
        ({"x": INT}, {"new": "old"}),
    ],
)
def test_rows_keep_their_names_where_there_is_nothing_to_rename(target: Any, aliases: Any):
    rows = pa.table({"old": pa.array([1], INT)})
    assert renamed(rows, pa.schema(target), aliases) is rows
    rows = pa.table({"new": pa.array([1], INT)})
    assert renamed(rows, pa.schema(target), aliases) is rows


def test_rows_without_columns_keep_their_number():
    rows = pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array([{}, {}], S([])))])
    assert renamed(rows, pa.schema({"x": INT}), {"x": "y"}).num_rows == 2


def test_former_names_are_gathered():
    assert together({"a": "b", "s.x": "s.y"}, {"a": ("c", "b"), "z": ()}) == {
        "a": ("b", "c"),
        "s.x": ("y",),
        "z": (),
    }


def test_avros_aliases_have_the_path_of_the_column():
    inside = {
        "type": "record",
        "name": "P",
        "aliases": ["Q"],
        "fields": [{"name": "x", "type": "int", "aliases": ["y", "w"]}],
    }
    fields: list[tuple[str, Any]] = [
        ("s", ["null", "P"]),
        ("l", {"type": "array", "items": ["P", "null"]}),
        ("m", {"type": "map", "values": {"type": "array", "items": "P"}}),
        ("u", ["int", "null", "P"]),
    ]
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "a", "type": "int", "aliases": ["b"]},
            *({"name": name, "type": kind} for name, kind in fields),
        ],
    }
    writer = WriterSchema(json.dumps(schema), [json.dumps(inside)])
    paths = ("s.x", "l.element.x", "m.value.element.x", "u.member1.x")
    assert writer.aliases == {"a": ("b",), **dict.fromkeys(paths, ("y", "w"))}


# ── merged ───────────────────────────────────────────────────────────────────────────────────


def test_columns_are_merged_by_name_as_a_table_has_them():
    one = pa.schema([must("x", pa.int16()), must("s", S([must("a", pa.string())])), must("y", INT)])
    other = pa.schema([must("z", FLOAT), must("s", S([must("b", INT)])), must("x", LONG)])
    assert merged(one, other) == pa.schema(
        [
            must("x", LONG),
            must("s", S({"a": TEXT, "b": INT})),
            pa.field("y", INT),
            pa.field("z", FLOAT),
        ]
    )


def test_columns_that_are_the_same_by_an_alias_are_one_under_the_newer_name():
    one, other = pa.schema([must("old", INT)]), pa.schema([must("new", LONG)])
    for pair in ((one, other), (other, one)):
        assert merged(*pair, {"new": "old"}) == pa.schema([must("new", LONG)])


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"x": INT}, {"x": TEXT}, "column 'x' is int32 in some, large_string in others"),
        ({"x": L(INT)}, {"x": L(FLOAT)}, "column 'x.element' is int32 in some, float in others"),
        ({"Id": INT}, {"id": INT}, "columns 'Id' and 'id' differ only in case"),
        ({"x": pa.null()}, {"x": INT}, "column 'x' is null in the records, a type that Iceberg"),
    ],
)
def test_columns_that_have_nothing_in_common_are_a_misfit(one: Any, other: Any, reason: str):
    for pair in ((one, other), (other, one)):
        with pytest.raises(SchemaMismatch, match="cannot merge the columns of records: ") as caught:
            merged(*map(pa.schema, pair))
        words = {"in", "some", "others", "and"}
        assert set(reason.replace(",", "").split()) - words <= set(
            caught.value.message.replace(",", "").split()
        )


def test_a_uuid_and_its_bytes_are_a_uuid_in_either_order():
    one, other = pa.schema({"x": pa.uuid()}), pa.schema({"x": pa.binary(16)})
    assert merged(one, other) == merged(other, one) == one


# ── for all schemas ──────────────────────────────────────────────────────────────────────────

LEAVES = [
    pa.int16(),
    INT,
    LONG,
    FLOAT,
    DOUBLE,
    TEXT,
    pa.string(),
    pa.bool_(),
    pa.binary(),
    pa.timestamp("us", "UTC"),
    pa.decimal128(5, 2),
    pa.decimal128(9, 2),
    pa.decimal128(9, 3),
]


def fields(kinds: st.SearchStrategy[pa.DataType], least: int) -> st.SearchStrategy[list[pa.Field]]:
    any_field = st.builds(pa.field, st.sampled_from("abcd"), kinds, st.booleans())
    return st.lists(any_field, unique_by=lambda field: field.name, min_size=least, max_size=3)


def nested(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    inside = st.builds(pa.field, st.just("item"), kinds, st.booleans())
    return st.one_of(
        fields(kinds, 1).map(pa.struct),
        inside.map(pa.list_),
        inside.map(pa.large_list),
        inside.map(lambda field: pa.map_(TEXT, field)),
    )


#: Few kinds in each, so that two of them often have something in common.
schemas = st.one_of(
    fields(st.recursive(st.sampled_from(some), nested, max_leaves=4), 0).map(pa.schema)
    for some in ([INT, LONG, pa.int16()], [TEXT, pa.string()], LEAVES)
)


def applied(target: pa.Schema, schema_changes: SchemaChanges) -> pa.Schema:
    """As Iceberg would, path by path."""

    def struct(fields: Any, path: str) -> list[pa.Field]:
        inside = [field(column, f"{path}.{column.name}".lstrip(".")) for column in fields]
        return inside + [new for where, new in schema_changes.add if where == path]

    def field(column: pa.Field, path: str) -> pa.Field:
        kind = column.type
        if pa.types.is_struct(kind):
            kind = S(struct(kind, path))
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = L(field(kind.value_field.with_name("element"), f"{path}.element"))
        elif pa.types.is_map(kind):
            kind = M(TEXT, field(kind.item_field.with_name("value"), f"{path}.value"))
        kind = dict(schema_changes.widen).get(path, kind)
        name = dict(schema_changes.rename).get(path, column.name)
        return pa.field(name, kind, column.nullable or path in schema_changes.relax)

    return pa.schema(struct(target, ""))


def unordered(schema: Any) -> Any:
    """A schema in which the order of fields does not count."""
    if isinstance(schema, pa.Field):
        return schema.nullable, unordered(schema.type)
    if isinstance(schema, pa.Schema) or pa.types.is_struct(schema):
        return {field.name: unordered(field) for field in schema}
    if pa.types.is_large_list(schema):
        return [unordered(schema.value_field)]
    if pa.types.is_map(schema):
        return (schema.key_type, unordered(schema.item_field))
    return schema


def table(columns: pa.Schema) -> pa.Schema:
    return merged(columns, columns)


def attempt(*some: pa.Schema) -> Any:
    try:
        one = some[0]
        for other in some[1:]:
            one = merged(one, other)
        return unordered(one)
    except SchemaMismatch:
        return None


@given(schemas, schemas)
def test_whatever_is_merged_both_fit_into_it_and_nothing_is_left_to_change(
    one: pa.Schema, other: pa.Schema
):
    try:
        both = merged(one, other)
    except SchemaMismatch:
        return
    for side in (one, other):
        assert changes(both, side) == SchemaChanges()
        assert differences(side, both) == []
    assert unordered(merged(both, one)) == unordered(both)


@given(schemas, schemas, schemas)
def test_the_order_of_merging_does_not_count(a: pa.Schema, b: pa.Schema, c: pa.Schema):
    assert attempt(a, b) == attempt(b, a)
    results = [attempt(*some) for some in ((a, b, c), (b, a, c), (c, b, a), (c, a, b), (b, c, a))]
    assert all(one == results[0] for one in results)


@given(schemas.map(table), schemas)
@settings(max_examples=300)
def test_a_table_that_is_changed_fits_the_new_records_and_still_the_old(
    existing: pa.Schema, given: pa.Schema
):
    schema_changes = changes(existing, given)
    if schema_changes.impossible:
        assert attempt(existing, given) is None
        return
    after = applied(existing, schema_changes)
    assert differences(given, after) == []
    assert changes(after, given) == SchemaChanges()
    assert differences(existing, after) == []  # what was there goes on to fit
    assert unordered(after) == attempt(existing, given)
    rows = pa.Table.from_arrays([pa.nulls(0, field.type) for field in given], schema=given)
    assert fitted(rows, after, "rows").schema == after


@given(schemas.map(table), schemas)
def test_what_has_no_differences_needs_at_most_optional_columns(
    existing: pa.Schema, given: pa.Schema
):
    schema_changes = changes(existing, given)
    if differences(given, existing):
        assert schema_changes
    else:
        assert schema_changes == SchemaChanges(relax=schema_changes.relax)


@given(schemas.map(table))
def test_a_table_fits_itself(existing: pa.Schema):
    assert changes(existing, existing) == SchemaChanges()
    assert twins(existing) == ""
