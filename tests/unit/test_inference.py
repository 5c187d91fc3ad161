"""What JSON records want of a table: judged by its own columns, and decided by votes."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from frazil.arrow.avro_types import MAX_DEPTH
from frazil.config.sections import TableConfig
from frazil.errors import SchemaMismatch
from frazil.files.writer import WriterSpec
from frazil.formats import json_inference
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import columns_of, iceberg_schema, update
from frazil.kafka.record_batch import RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult
from frazil.pipeline.missing_columns import add_need
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.table_plan import ChunkPlan, NewTable, TablePlan

METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
NEW = {"db.t": NewTable(tuple(field.name for field in METADATA.fields), undivided=("key", "k.v"))}
CONFIG = TableConfig("db.t", format_version=3)
ID = pa.field("id", pa.int64(), nullable=False)


class World:
    """A table that is made and changed as its records need it, as the driver does."""

    def __init__(self, *columns: pa.Field, keyed: Any = None, **plan: Any) -> None:
        self.keyed = keyed or {}
        self.schema = iceberg_schema(pa.schema(columns), METADATA, CONFIG) if columns else ""
        self.more = plan
        self.runs = 0

    @property
    def plan(self) -> TablePlan:
        shape = WriterSpec("db.t", "", self.schema, 0, '{"fields": []}', {}, 0, "", {})
        return TablePlan(shape, METADATA, "", format_version=3, **self.more)

    def settle(self, values: list[bytes], chunk: int = 10_000) -> ChunkResult:
        for _ in range(4):
            self.runs += 1
            tables = {"db.t": self.plan} if self.schema else {}
            settler = ChunkPipeline(
                ChunkPlan(RecordFormat("json"), None, tables, {}, "db.t", self.keyed, new=NEW)
            )
            whole = ChunkResult()
            for start in range(0, len(values), chunk):
                some = values[start : start + chunk]
                at = np.arange(start, start + len(some))
                part = settler.process(Partition("t", 0), RawRecords(some, at, at), frozenset())
                whole.rows += part.rows
                for i, rejection in part.rejections.items():
                    whole.rejections[start + i] = rejection
                for name, need in part.needs.items():
                    add_need(whole.needs, name, need)
            if not whole.needs:
                return whole
            self.provide(whole.needs["db.t"])
        raise AssertionError("the table does not come to fit")

    def provide(self, need: pa.Schema) -> None:
        if not self.schema:
            self.schema = iceberg_schema(need, METADATA, CONFIG)
            return
        changes = update(
            self.schema,
            need,
            "db.t",
            spec='{"fields": []}',
            format_version=3,
            aliases=self.more.get("aliases"),
            beside=[field.name for field in METADATA.fields],
        )
        columns = list(columns_of(self.schema))
        names = [field.name for field in columns]
        for path, kind in changes.widen:
            at = names.index(path)
            columns[at] = pa.field(path, _read(kind), columns[at].nullable)
        for path, name in changes.rename:
            columns[names.index(path)] = columns[names.index(path)].with_name(name)
        for path, name, kind in changes.add:
            columns = _added(columns, path.split(".") if path else [], pa.field(name, _read(kind)))
        metadata_names = {field.name for field in METADATA.fields}
        own = [field for field in columns if field.name not in metadata_names]
        self.schema = iceberg_schema(pa.schema(own), METADATA, CONFIG)


def _read(kind: str) -> pa.DataType:
    return columns_of(kind).field(0).type


def _added(fields: Any, path: list[str], new: pa.Field) -> list[pa.Field]:
    if not path:
        return [*fields, new]
    return [
        field.with_type(_inside(field.type, path[1:], new)) if field.name == path[0] else field
        for field in fields
    ]


def _inside(kind: pa.DataType, path: list[str], new: pa.Field) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct(_added(kind, path, new))
    if pa.types.is_map(kind):
        item = kind.item_field
        return pa.map_(kind.key_field, item.with_type(_inside(item.type, path[1:], new)))
    item = kind.value_field
    return pa.large_list(item.with_type(_inside(item.type, path[1:], new)))


def doc(**members: Any) -> bytes:
    return json.dumps(members).encode()


def ids(settled: ChunkResult) -> list[int]:
    numbers = [number for _, rows in settled.rows for number in rows.column("id").to_pylist()]
    return sorted(numbers)


# ── a table that is there ───────────────────────────────────────────────────────────────────────

STRUCT = pa.struct([("a", pa.float64()), ("b", pa.timestamp("us", "UTC"))])
#: Iceberg's types and what JSON has for them.
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False]),
    (pa.int32(), [1, -(2**31)]),
    (pa.int64(), [1, 2**63 - 1]),
    (pa.float32(), [1, 1.5, -0.0]),
    (pa.float64(), [2, 1.5, 10**20]),
    (pa.decimal128(9, 2), [1, 1.25, "12.50"]),
    (pa.date32(), ["2024-02-29"]),
    (pa.time64("us"), ["12:34:56.789"]),
    (pa.timestamp("us"), ["2024-02-29T12:34:56"]),
    (pa.timestamp("us", "UTC"), ["2024-02-29T12:34:56Z", "2024-02-29 12:34:56+02:00"]),
    (pa.timestamp("ns"), ["2024-02-29T12:34:56.123456789"]),
    (pa.timestamp("ns", "UTC"), ["2024-02-29T12:34:56.123456789Z"]),
    (pa.large_string(), ["text", "2024-02-29"]),
    (pa.uuid(), ["12345678-1234-5678-1234-567812345678"]),
    (pa.large_binary(), ["aGVsbG8="]),
    (pa.binary(4), ["AAAAAA=="]),
    (STRUCT, [{"a": 1}, {"a": 1.5, "b": "2024-02-29T12:34:56Z"}]),
    (pa.large_list(pa.field("element", pa.float64())), [[], [1, 1.5], [None]]),
    (pa.large_list(pa.field("element", STRUCT)), [[{"a": 1}, {"a": 2.5}]]),
    (pa.map_(pa.large_string(), pa.float64()), [{}, {"k": 1}]),
]


@pytest.mark.parametrize("upsert", [False, True])
@pytest.mark.parametrize(("kind", "values"), TYPES, ids=lambda value: str(value)[:24])
def test_a_new_field_is_added_whatever_types_the_other_columns_have(
    kind: pa.DataType, values: list[Any], upsert: bool
):
    keyed = {"identifier": ("id",), "key": ("id",)} if upsert else {}
    for value in values:
        world = World(ID, pa.field("x", kind), **keyed)
        before = columns_of(world.schema).field("x").type
        settled = world.settle([doc(id=1, x=value, more=True), doc(id=2), doc(id=3, x=value)])
        assert ids(settled) == [1, 2, 3], settled.rejections
        assert columns_of(world.schema).field("more").type == pa.bool_()
        assert columns_of(world.schema).field("x").type == before


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us", "UTC"), "yesterday"),
        (pa.date32(), 5),
        (pa.int64(), 1.5),
        (pa.bool_(), 1),
        (pa.decimal128(9, 2), 1.234),
        (pa.large_string(), 5),
        (pa.int32(), 2**63),
        (pa.uuid(), "x"),
        (STRUCT, [1]),
        (STRUCT, {"a": "x"}),
        (pa.large_list(pa.field("element", pa.float64())), ["x"]),
        (pa.binary(4), "AAAA"),
    ],
)
def test_a_value_that_does_not_convert_costs_its_own_record_and_no_column_is_added(
    kind: pa.DataType, value: Any
):
    world = World(ID, pa.field("x", kind))
    settled = world.settle([doc(id=1), doc(id=2, x=value, more=1), doc(id=3)])
    assert (ids(settled), list(settled.rejections)) == ([1, 3], [1])
    assert settled.rejections[1].kind == "misfit"
    assert "x" in settled.rejections[1].reason
    assert "more" not in columns_of(world.schema).names


@pytest.mark.parametrize(
    ("kind", "value", "wider"),
    [
        (pa.int32(), 2**31, pa.int64()),
        (pa.float32(), 1e300, pa.float64()),
        (pa.decimal128(9, 2), "123456789.25", pa.decimal128(11, 2)),
    ],
)
def test_a_column_is_widened_where_the_value_needs_it(
    kind: pa.DataType, value: Any, wider: pa.DataType
):
    world = World(ID, pa.field("x", kind))
    settled = world.settle([doc(id=1, x=1), doc(id=2, x=value), doc(id=3, x=value, more=1)])
    assert ids(settled) == [1, 2, 3]
    assert columns_of(world.schema).field("x").type == wider


def test_a_new_field_inside_a_struct_a_list_or_a_map_is_added_beside_those_that_convert():
    inner = pa.struct([("at", pa.timestamp("us", "UTC"))])
    world = World(
        ID,
        pa.field("s", inner),
        pa.field("l", pa.large_list(pa.field("element", inner))),
        pa.field("m", pa.map_(pa.large_string(), inner)),
    )
    value = {"at": "2024-02-29T12:34:56Z", "n": 1}
    settled = world.settle([doc(id=1, s=value, l=[value, {"o": True}], m={"k": value})])
    assert ids(settled) == [1]
    columns = columns_of(world.schema)
    assert [field.name for field in columns.field("s").type] == ["at", "n"]
    assert [field.name for field in columns.field("l").type.value_type] == ["at", "n", "o"]
    assert [field.name for field in columns.field("m").type.item_type] == ["at", "n"]


def test_a_change_log_gets_new_columns_and_has_its_operation_once():
    world = World(keyed={"db.t": "changelog"}, log=("id",))
    assert ids(world.settle([doc(id=1, v=1), doc(id=2, v=2)])) == [1, 2]
    assert columns_of(world.schema).names[:3] == ["id", "v", "_op"]
    assert ids(world.settle([doc(id=3, v=3, more="x"), doc(id=4, v=3)])) == [3, 4]
    assert columns_of(world.schema).names[:4] == ["id", "v", "_op", "more"]


def test_a_column_gets_its_new_name_whatever_its_type_is():
    world = World(ID, pa.field("at", pa.timestamp("us", "UTC")), aliases={"placed_at": ("at",)})
    settled = world.settle([doc(id=1, placed_at="2024-02-29T12:34:56Z", more=1)])
    assert ids(settled) == [1]
    assert columns_of(world.schema).names[:3] == ["id", "placed_at", "more"]


@pytest.mark.parametrize("value", ["1e400", "-1e999999", "9223372036854775808", '"\\ud800"', "{}"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_record_adds_no_column_that_does_not_take_its_own_value(value: str, exists: bool):
    world = World(ID) if exists else World()
    settled = world.settle([doc(id=1), f'{{"id":2,"more":{value}}}'.encode()])
    assert (ids(settled), list(settled.rejections)) == ([1], [1])
    assert columns_of(world.schema).names[:2] == ["id", "_topic"]


# ── the batch that makes a table ────────────────────────────────────────────────────────────────

GOOD = [doc(id=i, name=f"n{i}", at={"b": 1}) for i in range(50)]
ODD = {
    "case": doc(id=99, ID=1),
    "case inside": doc(id=99, at={"b": 1, "B": 2}),
    "no name": b'{"id":99,"":1}',
    "no name inside": b'{"id":99,"at":{"":1}}',
    "metadata column": doc(id=99, _offset=1),
    "metadata column in another case": doc(id=99, _Offset=1),
    "kept by Iceberg": doc(id=99, _pos=1),
    "path": b'{"id":99,"at.b":1,"at":{"b":1}}',
    "path of others": b'{"id":99,"at.b":1}',
    "case of others": b'{"Id":99}',
    "type": doc(id="x"),
    "type inside": doc(id=99, at={"b": "x"}),
    "array of several": b'{"id":99,"l":[1,"x"]}',
    "empty object": b'{"id":99,"o":{}}',
    "half a pair in a text": b'{"id":99,"x":"\\ud800"}',
    "beyond a long": b'{"id":99,"x":9223372036854775808}',
    "beyond a double": b'{"id":99,"x":1e400}',
    "half a pair": b'{"id":99,"\\ud800":1}',
    "no json": b"id,name\n1,x",
    "no object": b"[1]",
    "deep": b'{"id":99,"d":' + b'{"x":' * 70 + b"1" + b"}" * 71,
}


@pytest.mark.parametrize("place", [0, 25, 50])
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_one_odd_record_in_the_batch_that_makes_a_table_is_rejected_alone(odd: str, place: int):
    values = [*GOOD[:place], ODD[odd], *GOOD[place:]]
    for chunk in (1, 7, 1000):
        world = World()
        settled = world.settle(values, chunk)
        assert list(settled.rejections) == [place], settled.rejections
        assert settled.rejections[place].reason
        assert ids(settled) == list(range(50))
        assert columns_of(world.schema).names[:3] == ["id", "name", "at"]


LARGE = 1_234_567_890_123_456_789


@pytest.mark.parametrize("place", [0, 25, 50])
def test_one_fraction_does_not_round_the_large_whole_numbers_beside_it(place: int):
    values = [doc(id=LARGE + i) for i in range(50)]
    values.insert(place, doc(id=1.5))
    world = World()
    settled = world.settle(values, 7)
    assert columns_of(world.schema).field("id").type == pa.int64()
    assert ids(settled) == [LARGE + i for i in range(50)]
    assert list(settled.rejections) == [place]


def test_whole_numbers_that_a_double_holds_may_mix_with_fractions():
    world = World()
    settled = world.settle([doc(id=2**53), doc(id=-(2**53)), doc(id=0.5)])
    assert ids(settled) == [-(2.0**53), 0.5, 2.0**53]
    world = World()
    settled = world.settle([doc(id=0.5), doc(id=1.5), doc(id=10**18 + 1)])
    assert columns_of(world.schema).field("id").type == pa.float64()
    settled = World().settle([doc(id=1, l=[1, LARGE]), doc(id=2, l=[0.5, LARGE])])
    assert list(settled.rejections) == [1], "no type holds both"


@pytest.mark.parametrize("place", [0, 25, 50])
@pytest.mark.parametrize("field", [{"key": 0.5}, {"k": {"v": 0.5}}], ids=["top", "inside"])
def test_one_fraction_makes_no_double_of_a_column_that_can_be_none(field: Any, place: int):
    """A key, a version, the source of a bucket: a table with a double there cannot be made."""
    values = [doc(id=i, key=i, k={"v": i}) for i in range(50)]
    values.insert(place, doc(id=99, **field))
    world = World()
    settled = world.settle(values, 7)
    assert columns_of(world.schema).field("key").type == pa.int64()
    assert columns_of(world.schema).field("k").type.field("v").type == pa.int64()
    assert ids(settled) == list(range(50))
    assert list(settled.rejections) == [place]


def test_the_same_table_is_made_in_whatever_order_and_chunks_the_records_come():
    made = set()
    values = [
        *(doc(id=i, name="x", at={"b": i / 2}) for i in range(20)),
        doc(name=1, id=1),
        doc(id="x", more=[1]),
        doc(id=1, more=["x"]),
        doc(id=1, more=["y"]),
        doc(Name="y", id=3),
        b'{"id":4,"at.b":1}',
        doc(at=[1]),
        doc(id=5, last=None),
        doc(id=6, two=[], one=1),
    ]
    for seed in range(30):
        r = random.Random(seed)
        r.shuffle(values)
        world = World()
        settled = world.settle(values, r.choice([1, 2, 5, 100]))
        rejected = sorted(values[i] for i in settled.rejections)
        made.add((str(columns_of(world.schema)), tuple(rejected)))
        assert len(ids(settled)) + len(settled.rejections) == len(values)
    assert len(made) == 1
    assert len(made.pop()[1]) == 5


def test_where_no_record_can_have_a_table_each_is_rejected_with_its_own_reason():
    settled = World().settle([ODD["case"], ODD["metadata column"], ODD["no json"]])
    assert [rejection.kind for rejection in settled.rejections.values()] == [
        "misfit",
        "misfit",
        "json",
    ]
    assert "differ only in case" in settled.rejections[0].reason
    assert "'_offset'" in settled.rejections[1].reason
    assert "id,name" in settled.rejections[2].reason, "how it begins"


# ── how many columns ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("exists", [False, True])
def test_one_record_adds_no_more_columns_than_the_table_may_have(exists: bool):
    wide = {f"c{i}": i for i in range(997)}
    for fields, fits in (({**wide, "s": {"a": 1}}, True), ({**wide, "s": {"a": 1, "b": 1}}, False)):
        world = World(ID) if exists else World()
        settled = world.settle([doc(id=1), doc(id=2, **fields), doc(id=3)])
        assert ids(settled) == ([1, 2, 3] if fits else [1, 3])
        assert len(columns_of(world.schema)) == (1003 if fits else 5)
        for rejection in settled.rejections.values():
            assert "would have 1001 columns; max_columns is 1000" in rejection.reason


def test_of_what_records_together_want_too_much_of_the_table_gets_what_most_want():
    made = set()
    values = [
        doc(id=0, a=1, b=1),
        doc(id=1, a=1, c=1),
        doc(id=2, b={"x": 1}),
        doc(id=3, d=1),
        doc(id=4, b=2, d=2),
        doc(id=5, e={"f": {"g": 1}}),
    ]
    for seed in range(10):
        r = random.Random(seed)
        r.shuffle(values)
        world = World(ID, max_columns=4)
        settled = world.settle(values, r.choice([1, 2, 10]))
        made.add((str(columns_of(world.schema)), tuple(ids(settled))))
        assert all(
            "max_columns is 4" in rejection.reason
            or "'b'" in rejection.reason
            or "b:" in rejection.reason
            for rejection in settled.rejections.values()
        ), settled.rejections
    assert len(made) == 1
    assert {"a", "b", "d"} == set(columns_of(world.schema).names) - {
        "id",
        "_topic",
        "_topic_partition",
        "_offset",
        "_timestamp",
    }
    assert made.pop()[1] == (0, 3, 4)


def test_a_column_with_an_endless_name_is_not_made():
    settled = World(ID).settle(
        [doc(id=1), doc(id=2, **{"n" * 256: 1}), doc(id=3, **{"n" * 255: 1})]
    )
    assert (ids(settled), list(settled.rejections)) == ([1, 3], [1])
    assert "256 characters" in settled.rejections[1].reason
    assert len(settled.rejections[1].reason) < 300


# ── depth ───────────────────────────────────────────────────────────────────────────────────────


def nested(levels: int, shape: str) -> bytes:
    """An object with so many levels, itself one of them."""
    opened, closed = {"object": ('{"x":', "}"), "array": ("[", "]")}[shape]
    inside = opened * (levels - 1) + "1" + closed * (levels - 1)
    return f'{{"id":1,"d":{inside}}}'.encode()


@pytest.mark.parametrize("shape", ["object", "array"])
@pytest.mark.parametrize("exists", [False, True])
def test_json_may_be_nested_so_deep_and_what_is_deeper_is_rejected_by_itself(
    exists: bool, shape: str
):
    for levels in (MAX_DEPTH + 1, 65, 70, 150, 300, 480, 900, 5_000):
        world = World(ID) if exists else World()
        settled = world.settle([doc(id=0), nested(levels, shape), doc(id=2)])
        assert {i: rejection.kind for i, rejection in settled.rejections.items()} == {1: "limit"}, (
            levels
        )
        assert str(MAX_DEPTH) in settled.rejections[1].reason
        assert ids(settled) == [0, 2]
    world = World(ID) if exists else World()
    assert ids(world.settle([doc(id=0), nested(MAX_DEPTH, shape)])) == [0, 1]


def test_brackets_in_texts_and_side_by_side_are_no_depth():
    settled = World(
        ID,
        pa.field("l", pa.large_list(pa.large_list(pa.int64()))),
        pa.field("t", pa.large_string()),
    ).settle([doc(id=1, t="[{" * 500), doc(id=2, l=[[1]] * 500)])
    assert ids(settled) == [1, 2]


# ── votes ───────────────────────────────────────────────────────────────────────────────────────


def test_within_a_record_items_of_several_kinds_are_a_misfit():
    with pytest.raises(SchemaMismatch, match="found number and string"):
        json_inference.kind_of({"l": [1, "x"]})


def test_votes_are_added_up_in_any_order():
    kinds = [{"a": "whole"}, {"a": "string", "b": ["whole"]}, {"a": "fraction"}, {"b": {"c": "x"}}]
    one, other, halves = json_inference.Votes(), json_inference.Votes(), json_inference.Votes()
    for kind in kinds:
        json_inference.vote(one, kind)
    for kind in reversed(kinds):
        part = json_inference.Votes()
        json_inference.vote(part, kind)
        json_inference.add(other, part)
    json_inference.add(halves, json.loads(json.dumps(one)))
    assert one == other == halves
    assert json_inference.columns(one).field("a").type == pa.float64()
