"""Tables that are made and changed by Iceberg itself, and read by Spark: old files and new."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import threading
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from frazil.config.sections import TableConfig
from frazil.errors import CommitStateUnknown, ConfigError, Conflict, SchemaMismatch, Unwritable
from frazil.files.writer import TableWriter, WriterSpec
from frazil.iceberg import java_metadata
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.schema import former_names, iceberg_schema, partition_spec, sort_order, update
from frazil.iceberg.table import SchemaUpdate
from frazil.pipeline.evolution import Aliases, renamed, together
from frazil.pipeline.projection import MetadataColumns, fitted

NONE = MetadataColumns("", "", "", "")
L, M, S = pa.large_list, pa.map_, pa.struct
INT, LONG, FLOAT, DOUBLE, TEXT = (
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.large_string(),
)
MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, tzinfo=dt.timezone.utc)


def must(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


class Subject:
    """A table of this test's own, as the sink makes, changes and fills it."""

    def __init__(self, spark: Any, catalog: str, config: TableConfig, columns: Any) -> None:
        self.spark, self.config = spark, config
        self.sql_name = f"{catalog}.{config.name}"
        self.catalog = JavaCatalog(spark, catalog)
        self.table = self.create(columns)

    def create(self, columns: Any) -> JavaTable:
        name, config = self.config.name, self.config
        schema = iceberg_schema(pa.schema(columns), NONE, config)
        return self.catalog.create(
            name,
            schema,
            partition_spec(schema, config.partition_by, name),
            properties={"format-version": str(config.format_version)},
            sort_order=sort_order(schema, config.sort_by, name),
        )

    def plan(self, columns: Any, aliases: Aliases | None = None) -> Callable[[str], SchemaUpdate]:
        return lambda schema: update(
            schema,
            pa.schema(columns),
            self.config.name,
            aliases=aliases,
            spec=self.table.spec,
            format_version=self.config.format_version,
        )

    def evolve(self, columns: Any, aliases: Aliases | None = None) -> None:
        self.table.evolve(self.plan(columns, aliases))

    @property
    def shape(self) -> WriterSpec:
        table = self.table
        return WriterSpec(
            table.name,
            table.location,
            table.schema,
            table.schema_id,
            table.spec,
            table.properties,
            2**20,
            "zstd",
            {},
            table.sort_order,
        )

    def files(self, columns: Any, rows: list[dict[str, Any]], aliases: Any = None) -> list[str]:
        known = together(aliases or {}, former_names(self.table.schema, self.table.schemas))
        shape, given = self.shape, pa.Table.from_pylist(rows, schema=pa.schema(columns))
        writer = TableWriter(shape, "evolution")
        writer.write(fitted(renamed(given, shape.arrow, known), shape.arrow, "rows"))
        return [file.descriptor for file in writer.close()]

    def manifest(self, files: list[str]) -> str:
        path = f"{self.table.location}/metadata/{uuid.uuid4()}-m0.avro"
        return self.table.write_manifest(path, files)

    def commit(self, manifest: str) -> None:
        self.table.append([manifest], {}, branch="main", check=lambda _: None, leftovers=[])

    def write(self, columns: Any, rows: list[dict[str, Any]], aliases: Any = None) -> None:
        self.commit(self.manifest(self.files(columns, rows, aliases)))

    def rows(self, where: str = "true", order: str = "id") -> list[dict[str, Any]]:
        self.spark.sql(f"REFRESH TABLE {self.sql_name}")
        frame = self.spark.sql(f"SELECT * FROM {self.sql_name} WHERE {where} ORDER BY {order}")
        return [row.asDict(recursive=True) for row in frame.collect()]

    def fields(self) -> dict[str, Any]:
        return {field["name"]: field for field in json.loads(self.table.schema)["fields"]}


@pytest.fixture
def make(spark: Any, name: str) -> Callable[..., Subject]:
    def made(columns: Any, catalog: str = "lake", **config: Any) -> Subject:
        return Subject(spark, catalog, TableConfig(f"db.{name}", **config), columns)

    return made


_catalogs = itertools.count(1)


@pytest.fixture(params=["lake", "hadoop"])
def catalog(request: pytest.FixtureRequest, spark: Any, tmp_path: Path) -> str:
    if request.param == "lake":
        return "lake"
    name = f"hadoop{next(_catalogs)}"
    for key, value in {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "hadoop",
        ".warehouse": f"file:{tmp_path}",
    }.items():
        spark.conf.set(f"spark.sql.catalog.{name}{key}", value)
    return name


both_versions = pytest.mark.parametrize("version", [2, 3])


# ── evolution ────────────────────────────────────────────────────────────────────────────────


@both_versions
def test_all_changes_at_once_and_old_and_new_files_are_read_together(
    make: Callable[..., Subject], version: int
):
    inside = S([must("a", INT), must("gone", INT)])
    old = pa.schema(
        [
            must("id", INT),
            must("f", FLOAT),
            must("d", pa.decimal128(5, 2)),
            must("name", TEXT),
            must("gone", INT),
            must("s", inside),
            must("l", L(must("element", inside))),
            must("m", M(TEXT, must("value", inside))),
            must("n", L(must("element", INT))),
        ]
    )
    deep = {"a": 1, "gone": 2}
    subject = make(old, format_version=version)
    subject.write(
        old,
        [
            {
                "id": 1,
                "f": 0.5,
                "d": Decimal("1.25"),
                "name": "x",
                "gone": 3,
                "s": deep,
                "l": [deep],
                "m": [("k", deep)],
                "n": [7],
            }
        ],
    )
    more = S([pa.field("b", LONG), pa.field("new", S([must("x", TEXT)]))])
    new = pa.schema(
        [
            must("id", LONG),
            pa.field("f", DOUBLE),
            must("d", pa.decimal128(20, 2)),
            pa.field("title", TEXT),
            pa.field("s", more),
            pa.field("l", L(pa.field("element", more))),
            pa.field("m", M(TEXT, pa.field("value", more))),
            pa.field("n", L(LONG)),
            must("at", pa.timestamp("us", "UTC")),
        ]
    )
    aliases = {"title": "name", "s.b": "a", "l.element.b": "a", "m.value.b": ("z", "a")}
    subject.evolve(new, aliases)
    assert len(subject.table.schemas) == 2
    assert subject.plan(new, aliases)(subject.table.schema) == SchemaUpdate()
    big, richer = 2**40, {"b": 2**40, "new": {"x": "y"}}
    row = {
        "id": big,
        "f": 1e300,
        "d": Decimal("123456789012345678.25"),
        "title": "t",
        "s": richer,
        "l": [richer, None],
        "m": [("k", richer), ("z", None)],
        "n": [big, None],
        "at": MOMENT,
    }
    subject.write(new, [row, {"id": 2, "d": Decimal("0.01"), "at": MOMENT}])
    moved = {"b": 1, "gone": 2, "new": None}
    richer = {"b": big, "gone": None, "new": {"x": "y"}}
    was = {
        "id": 1,
        "f": 0.5,
        "d": Decimal("1.25"),
        "title": "x",
        "gone": 3,
        "s": moved,
        "l": [moved],
        "m": {"k": moved},
        "n": [7],
        "at": None,
    }
    now = {
        **row,
        "gone": None,
        "s": richer,
        "l": [richer, None],
        "m": {"k": richer, "z": None},
        "at": MOMENT.astimezone().replace(tzinfo=None),
    }
    rows = subject.rows()
    assert [rows[0], rows[2]] == [was, now]
    assert rows[1]["title"] is rows[1]["l"] is None
    # The bounds of old files have the narrower type: they must still find their rows.
    assert subject.rows("id = 1 AND f < 1 AND d < 2 AND title = 'x'") == [was]
    assert subject.rows("id > 1000 AND s.b > 1000") == [now]


@both_versions
@pytest.mark.parametrize("staged", ["files", "manifest"])
def test_files_written_under_an_older_schema_are_still_committed(
    make: Callable[..., Subject], version: int, staged: str
):
    old = pa.schema([must("id", INT), must("d", pa.decimal128(5, 2)), must("name", TEXT)])
    rows = [{"id": n, "d": Decimal(n), "name": f"n{n}"} for n in (1, 2)]
    parts = ("id", "bucket(4, id)", "truncate(10, id)", "d", "truncate(1, name)")
    subject = make(old, format_version=version, partition_by=parts)
    waiting: Any = subject.files(old, rows)
    if staged == "manifest":
        waiting = subject.manifest(waiting)
    new = pa.schema([must("id", LONG), must("d", pa.decimal128(9, 2)), pa.field("title", TEXT)])
    subject.evolve(new, {"title": "name"})
    subject.write(new, [{"id": 2**40, "d": Decimal(3), "title": "new"}])
    subject.commit(waiting if staged == "manifest" else subject.manifest(waiting))
    assert [(row["id"], row["title"]) for row in subject.rows()] == [
        (1, "n1"),
        (2, "n2"),
        (2**40, "new"),
    ]
    assert [row["title"] for row in subject.rows("id = 2 AND d = 2")] == ["n2"]
    assert len(subject.rows("id < 100")) == 2


def test_a_writer_that_knows_nothing_of_a_rename_still_finds_its_column(
    make: Callable[..., Subject],
):
    old = pa.schema({"id": INT, "name": TEXT, "s": S({"a": INT})})
    new = pa.schema({"id": INT, "title": TEXT, "t": S({"b": INT})})
    subject = make(old)
    subject.evolve(new, {"title": "name", "t": "s", "t.b": "a"})
    known = former_names(subject.table.schema, subject.table.schemas)
    assert known == {"title": ("name",), "t": ("s",), "t.b": ("a",)}
    subject.evolve(old, known)
    assert len(subject.table.schemas) == 2
    subject.write(old, [{"id": 1, "name": "x", "s": {"a": 5}}])
    assert subject.rows() == [{"id": 1, "title": "x", "t": {"b": 5}}]


def test_what_cannot_be_changes_nothing(make: Callable[..., Subject]):
    subject = make({"id": INT, "x": TEXT})
    with pytest.raises(SchemaMismatch, match=r"column 'x' is large_string in the table, int32"):
        subject.evolve({"id": LONG, "x": INT, "y": INT})
    subject.table.refresh()
    assert len(subject.table.schemas) == 1


def test_a_name_with_a_dot_is_a_name(make: Callable[..., Subject]):
    subject = make({"id": INT})
    subject.evolve({"id": INT, "a.b": INT, "c": S({"d.e": INT})})
    new = {"id": INT, "a.b": LONG, "c": S({"d.e": LONG, "f": INT})}
    subject.evolve(new)
    subject.write(new, [{"id": 1, "a.b": 2**40, "c": {"d.e": 2**41, "f": 1}}])
    assert subject.rows() == [{"id": 1, "a.b": 2**40, "c": {"d.e": 2**41, "f": 1}}]


@both_versions
def test_partition_sort_and_identifier_fields_survive(make: Callable[..., Subject], version: int):
    old = pa.schema(
        [must("id", INT), must("s", S([must("key", TEXT)])), pa.field("at", pa.date32())]
    )
    subject = make(
        old,
        format_version=version,
        partition_by=("bucket(4, id)", "day(at)", "s.key"),
        sort_by=("s.key desc", "id"),
        identifier_fields=("id", "s.key"),
    )
    ids = json.loads(subject.table.schema)["identifier-field-ids"]
    spec, order = subject.table.spec, subject.table.sort_order
    subject.write(old, [{"id": 1, "s": {"key": "k"}, "at": MOMENT.date()}])
    new = pa.schema(
        [
            must("number", LONG),
            must("t", S([must("name", TEXT), must("x", INT)])),
            must("day", pa.date32()),
        ]
    )
    subject.evolve(new, {"number": "id", "t": "s", "t.name": "key", "day": "at"})
    subject.write(new, [{"number": 2**40, "t": {"name": "n", "x": 1}, "day": MOMENT.date()}])
    assert sorted(json.loads(subject.table.schema)["identifier-field-ids"]) == sorted(ids)
    assert (subject.table.spec, subject.table.sort_order) == (spec, order)
    assert [row["t"]["name"] for row in subject.rows(order="number")] == ["k", "n"]
    assert [row["number"] for row in subject.rows("t.name = 'n'", "number")] == [2**40]
    loose = {"number": LONG, "t": S({"name": TEXT, "x": INT}), "day": pa.date32()}
    subject.evolve(loose)  # all may be null: but what identifies a row stays required
    fields = subject.fields()
    assert [fields[name]["required"] for name in ("number", "t", "day")] == [True, True, False]
    with pytest.raises(
        SchemaMismatch, match="'number' is an identifier field of the table and not in"
    ):
        subject.evolve({"x": INT})


def test_the_name_of_a_partition_field_is_the_one_iceberg_refuses(make: Callable[..., Subject]):
    columns = {"id": INT, "at": pa.date32(), "land": TEXT}
    subject = make(columns, partition_by=("day(at)", "land"))
    with pytest.raises(SchemaMismatch, match="column 'at_day' has the name of a partition field"):
        subject.evolve({**columns, "at_day": INT})
    with pytest.raises(ConfigError, match="at_day"):  # the day it can, we need not refuse it
        subject.table.evolve(lambda _: SchemaUpdate(add=(("", "at_day", subject.table.schema),)))
    new = {"id": INT, "at": pa.date32(), "country": TEXT}
    subject.evolve(new, {"country": "land"})
    subject.write(new, [{"id": 2, "at": MOMENT.date(), "country": "x"}])
    with pytest.raises(SchemaMismatch, match="column 'land' has the name of a partition field"):
        subject.evolve({**new, "land": TEXT})
    assert [row["country"] for row in subject.rows()] == ["x"]


# ── several at once ──────────────────────────────────────────────────────────────────────────


def other(subject: Subject) -> JavaTable:
    table = JavaCatalog(subject.spark, subject.catalog.name).load(subject.config.name)
    assert table is not None
    return table


@pytest.mark.parametrize("same", [True, False])
def test_an_evolver_that_comes_second_does_what_is_left(
    make: Callable[..., Subject], catalog: str, same: bool
):
    subject = make({"id": INT}, catalog)
    own_plan = subject.plan({"id": LONG, "x": INT})
    other_plan = own_plan if same else subject.plan({"id": LONG, "y": TEXT})
    asked: list[str] = []

    def plan(schema: str) -> SchemaUpdate:
        asked.append(schema)
        if len(asked) == 1:
            other(subject).evolve(other_plan)
        return own_plan(schema)

    subject.table.evolve(plan)
    assert len(asked) == 2, "the other evolver was not in the way"
    subject.table.refresh()
    assert list(subject.fields()) == (["id", "x"] if same else ["id", "y", "x"])
    assert subject.fields()["id"]["type"] == "long"
    assert len(subject.table.schemas) == (2 if same else 3)


def test_many_evolvers_at_once(make: Callable[..., Subject], catalog: str):
    subject = make({"id": INT}, catalog)
    tables = [other(subject) for _ in range(4)]
    failed: list[Exception] = []
    barrier = threading.Barrier(len(tables))

    def work(n: int) -> None:
        try:
            barrier.wait()
            tables[n].evolve(subject.plan({"id": LONG, "all": INT, f"c{n % 2}": INT}))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(tables))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    subject.table.refresh()
    assert sorted(subject.fields()) == ["all", "c0", "c1", "id"]
    assert len(subject.table.schemas) <= 3


def test_a_commit_of_data_and_one_of_the_schema_do_not_disturb_each_other(
    make: Callable[..., Subject],
):
    subject = make({"id": INT})
    beside = other(subject)
    beside.evolve(subject.plan({"id": INT, "x": INT}))
    subject.write({"id": INT}, [{"id": 1}])  # by a table object that has not seen the change
    asked = []

    def plan(schema: str) -> SchemaUpdate:
        if not asked:
            subject.write({"id": INT}, [{"id": 2}])
        asked.append(schema)
        return subject.plan({"id": INT, "y": INT})(schema)

    beside.evolve(plan)
    assert subject.rows() == [{"id": n, "x": None, "y": None} for n in (1, 2)]


def test_a_change_whose_answer_was_lost_is_not_made_twice(
    make: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
):
    subject = make({"id": INT})
    change = JavaTable._change

    def lost(self: JavaTable, schema_update: SchemaUpdate) -> None:
        change(self, schema_update)
        raise CommitStateUnknown("cannot change the schema: the answer was lost")

    monkeypatch.setattr(JavaTable, "_change", lost)
    subject.evolve({"id": INT, "x": INT})
    assert list(subject.fields()) == ["id", "x"]
    assert len(subject.table.schemas) == 2


def test_a_conflict_that_does_not_end_is_reported(
    make: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
):
    subject, tries = make({"id": INT}), []

    def refused(self: JavaTable, schema_update: SchemaUpdate) -> None:
        tries.append(schema_update)
        raise Conflict("cannot change the schema: another was first")

    monkeypatch.setattr(JavaTable, "_change", refused)
    with pytest.raises(Conflict):
        subject.evolve({"id": INT, "x": INT})
    assert len(tries) == java_metadata._EVOLUTIONS


# ── creation ─────────────────────────────────────────────────────────────────────────────────


@both_versions
def test_a_table_is_made_with_every_transform_an_order_and_identifier_fields(
    make: Callable[..., Subject], version: int
):
    parts = (
        "country",
        "bucket(4, id)",
        "truncate(2, name)",
        "year(y)",
        "month(m)",
        "day(d)",
        "hour(at)",
        "s.x",
    )
    columns = pa.schema(
        {
            "id": LONG,
            "country": TEXT,
            "name": TEXT,
            "y": pa.date32(),
            "m": pa.date32(),
            "d": pa.timestamp("us"),
            "at": pa.timestamp("us", "UTC"),
            "s": S({"x": INT, "k": INT}),
        }
    )
    order = ("name desc nulls first", "bucket(8, id)", "day(at) asc nulls last")
    subject = make(
        columns,
        format_version=version,
        partition_by=parts,
        sort_by=order,
        identifier_fields=("id", "s.k"),
    )
    table = subject.table
    assert [field["transform"] for field in json.loads(table.spec)["fields"]] == [
        "identity",
        "bucket[4]",
        "truncate[2]",
        "year",
        "month",
        "day",
        "hour",
        "identity",
    ]
    ids = {name: field["id"] for name, field in subject.fields().items()}
    assert json.loads(table.sort_order) == {
        "order-id": 1,
        "fields": [
            {
                "transform": "identity",
                "source-id": ids["name"],
                "direction": "desc",
                "null-order": "nulls-first",
            },
            {
                "transform": "bucket[8]",
                "source-id": ids["id"],
                "direction": "asc",
                "null-order": "nulls-first",
            },
            {
                "transform": "day",
                "source-id": ids["at"],
                "direction": "asc",
                "null-order": "nulls-last",
            },
        ],
    }
    assert json.loads(table.schema)["identifier-field-ids"][0] == ids["id"]
    assert table.format_version == version
    row = {
        "id": 7,
        "country": "é/ü",
        "name": "naïve",
        "y": MOMENT.date(),
        "m": MOMENT.date(),
        "d": MOMENT.replace(tzinfo=None),
        "at": MOMENT,
        "s": {"x": 1, "k": 2},
    }
    subject.write(columns, [row, {"id": 8, "s": {"k": 3}}])
    assert [row["name"] for row in subject.rows("country = 'é/ü' AND y = '2024-02-29'")] == [
        "naïve"
    ]
    assert len(subject.rows()) == 2


def test_the_second_creator_gets_the_existing_table(make: Callable[..., Subject], catalog: str):
    subject = make({"id": INT}, catalog)
    again = subject.create({"id": LONG, "x": INT})
    assert again.uuid == subject.table.uuid
    assert json.loads(again.schema)["fields"] == json.loads(subject.table.schema)["fields"]


def test_a_table_without_an_order_says_none(make: Callable[..., Subject]):
    assert make({"id": INT}).table.sort_order == ""


# ── manifests ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("broken", ['"record-count": NaN', '"record-count": "many"'])
def test_a_file_that_iceberg_does_not_take_into_a_manifest_is_reported_at_once_with_its_rows(
    make: Callable[..., Subject], broken: str
):
    columns = [
        ("id", pa.int64()),
        ("_topic", pa.large_string()),
        ("_topic_partition", pa.int32()),
        ("_offset", pa.int64()),
    ]
    subject = make(columns)
    row = {"id": 1, "_topic": "orders", "_topic_partition": 3, "_offset": 41}
    [good] = subject.files(columns, [row])
    [bad] = subject.files(columns, [row, {**row, "_offset": 45}])
    bad = bad.replace('"record-count": 2', broken)
    with pytest.raises(Unwritable, match=r"orders\[3\] \[41, 46\)") as caught:
        subject.manifest([good, bad])
    assert subject.table.name in caught.value.message
    subject.commit(subject.manifest([good]))
    assert [row["_offset"] for row in subject.rows()] == [41]
