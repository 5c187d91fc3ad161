"""Every record of a chunk has its fate: rows of all its tables, skipped, rejected, or a need."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from frazil.arrow.avro import WriterSchema
from frazil.config.sections import RouteConfig, TableConfig
from frazil.errors import SchemaMismatch
from frazil.files.writer import WriterSpec
from frazil.formats import schema_registry
from frazil.formats.decode_result import DecodedChunk
from frazil.formats.decoder import RecordFormat
from frazil.iceberg.schema import iceberg_schema, partition_spec
from frazil.kafka.record_batch import HEADERS, RawRecords
from frazil.offsets import Partition
from frazil.pipeline.chunk import ChunkPipeline
from frazil.pipeline.chunk_result import ChunkResult, ChunkWork, Rejection
from frazil.pipeline.column_records import ColumnRecords
from frazil.pipeline.missing_columns import add_need, aliases_of, needed
from frazil.pipeline.projection import MetadataColumns
from frazil.pipeline.routing import SKIP, RoutingRules
from frazil.pipeline.table_plan import ChunkPlan, TablePlan

HERE = Partition("events", 2)
METADATA = MetadataColumns("_topic", "_topic_partition", "_offset", "_timestamp")
ID = pa.field("id", pa.int64(), nullable=False)
NAME = pa.field("name", pa.large_string())
REGISTRY = "http://registry"
NOBODY: frozenset[str] = frozenset()


def plan(
    name: str, *columns: pa.Field, metadata: MetadataColumns = METADATA, **more: Any
) -> TablePlan:
    schema = iceberg_schema(pa.schema(columns or (ID, NAME)), metadata, TableConfig(name))
    return TablePlan(WriterSpec(name, "", schema, 0, "", {}, 0, "", {}), METADATA, "", **more)


def plans(*tables: TablePlan) -> dict[str, TablePlan]:
    return {table.shape.name: table for table in tables}


def opened(values: list[bytes | None], headers: list[str | None] | None = None) -> RawRecords:
    """Offsets 100, 102, 104, …"""
    offsets = np.arange(100, 100 + 2 * len(values), 2, dtype=np.int64)
    words = headers or [None] * len(values)
    beside = pa.array([[("kind", word.encode())] if word else [] for word in words], HEADERS)
    return RawRecords(values, offsets, offsets * 10, None, beside)


def settle(
    settler: ChunkPipeline,
    values: list[bytes | None],
    below: frozenset[str] = NOBODY,
    headers: list[str | None] | None = None,
) -> ChunkResult:
    """And nothing falls through: each record has a row, a dead letter or is skipped, unless
    something is needed first."""
    settled = settler.process(HERE, opened(values, headers), below)
    offsets = {offset for _, rows in settled.rows for offset in rows.column("_offset").to_pylist()}
    rejected = {100 + 2 * index for index in settled.rejections}
    assert all(rejection.index == index for index, rejection in settled.rejections.items())
    if not settled.needs and not below:
        assert len(offsets | rejected) + settled.skipped == len(values)
    return settled


def ids(settled: ChunkResult, table: str) -> list[int]:
    """Those that a table gets, in the order of their offsets."""
    tables = [rows for name, rows in settled.rows if name == table]
    return pa.concat_tables(tables).sort_by("_offset").column("id").to_pylist() if tables else []


def reasons(settled: ChunkResult) -> dict[int, str]:
    return {index: rejection.reason for index, rejection in sorted(settled.rejections.items())}


def kinds(settled: ChunkResult) -> dict[int, str]:
    return {index: rejection.kind for index, rejection in sorted(settled.rejections.items())}


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────


def doc(**members: Any) -> bytes:
    return json.dumps(members).encode()


def of_json(*tables: TablePlan, refused: Mapping[str, str] | None = None) -> ChunkPipeline:
    """Everything into db.t."""
    return ChunkPipeline(
        ChunkPlan(RecordFormat("json"), None, plans(*tables), refused or {}, "db.t")
    )


def by_rules(
    *routes: RouteConfig, tables: dict[str, TablePlan], names: list[str] | None = None, **more: Any
) -> ChunkPipeline:
    return ChunkPipeline(
        ChunkPlan(RecordFormat("json"), RoutingRules(routes, names or list(tables)), tables, **more)
    )


def test_json_goes_into_the_columns_of_its_table_with_its_origin_beside():
    settled = settle(of_json(plan("db.t")), [doc(id=1, name="a"), doc(id=2)])
    [(name, rows)] = settled.rows
    assert name == "db.t"
    assert rows.select(["id", "name", "_topic", "_topic_partition", "_offset"]).to_pylist() == [
        {"id": 1, "name": "a", "_topic": "events", "_topic_partition": 2, "_offset": 100},
        {"id": 2, "name": None, "_topic": "events", "_topic_partition": 2, "_offset": 102},
    ]
    assert (settled.rejections, settled.skipped, settled.needs) == ({}, 0, {})


def test_values_that_are_no_json_or_null_are_rejected_one_by_one_with_the_table_they_were_for():
    values = [doc(id=1), b"{", None, b"\xff", doc(id=2), b"[" * 100_000]
    settled = settle(of_json(plan("db.t")), values)
    assert ids(settled, "db.t") == [1, 2]
    assert kinds(settled) == {1: "json", 2: "null", 3: "json", 5: "limit"}
    assert {rejection.tables for rejection in settled.rejections.values()} == {("db.t",)}


def test_a_missing_table_is_needed_with_the_columns_of_all_records_that_have_any():
    settled = settle(of_json(), [doc(id=1), doc(id=2, name="x"), b"{", None, doc(), doc(n=None)])
    assert settled.needs["db.t"].equals(
        pa.schema([("id", pa.int64()), ("name", pa.large_string())]), check_metadata=False
    )
    assert settled.rows == []


def test_a_missing_table_is_not_needed_by_what_names_no_column():
    settled = settle(of_json(), [b"{", None, doc(), doc(n=None), b"[]"])
    assert settled.needs == {}
    assert kinds(settled) == {0: "json", 1: "null", 2: "misfit", 3: "misfit", 4: "misfit"}


def test_one_record_that_is_unlike_all_others_does_not_decide_what_a_new_table_is_like():
    settled = settle(of_json(), [doc(id=1), doc(id="x"), doc(id=1.5, n=1)])
    assert settled.needs["db.t"].names == ["id", "n"]
    assert settled.needs["db.t"].field("id").type == pa.float64()


def test_a_table_that_was_refused_rejects_with_the_reason_and_is_not_needed_again():
    settled = settle(of_json(refused={"db.t": "cannot make it"}), [doc(id=1), doc(id=2)])
    assert reasons(settled) == dict.fromkeys((0, 1), "cannot fit db.t: cannot make it")
    assert settled.needs == {}


def test_a_new_field_is_a_need_of_an_evolving_table_and_the_records_that_fit_are_rows():
    settled = settle(of_json(plan("db.t")), [doc(id=1), doc(id=2, more=1.5)])
    assert ids(settled, "db.t") == [1]
    assert settled.needs["db.t"].names == ["id", "name", "more"]
    assert settled.rejections == {}


def test_a_change_log_that_evolves_keeps_its_column_of_operations():
    log = plan("db.t", ID, pa.field("_op", pa.large_string()), log=("id",))
    settler = ChunkPipeline(
        ChunkPlan(
            RecordFormat("json"),
            None,
            plans(log),
            {},
            "db.t",
            {"db.t": "changelog"},
            RecordFormat("json"),
        )
    )
    settled = settle(settler, [doc(id=1), doc(id=2, more="x")])
    assert ids(settled, "db.t") == [1]
    assert settled.needs["db.t"].names == ["id", "_op", "more"]
    assert settled.rejections == {}


@pytest.mark.parametrize("evolution", ["reject", "evolve"])
def test_a_new_field_is_a_misfit_of_a_table_that_is_frozen_or_refused_the_change(evolution: str):
    refused = {"db.t": "no more columns"} if evolution == "evolve" else {}
    table = plan("db.t", evolution=evolution)
    settled = settle(of_json(table, refused=refused), [doc(id=1), doc(id=2, more=1.5)])
    assert ids(settled, "db.t") == [1]
    assert kinds(settled) == {1: "misfit"}
    assert settled.needs == {}


def test_a_misfit_stops_the_stream_where_the_table_says_fail_and_bad_json_does_not():
    settler = of_json(plan("db.t", evolution="fail"))
    assert kinds(settle(settler, [doc(id=1), b"{"])) == {1: "json"}
    with pytest.raises(SchemaMismatch) as caught:
        settle(settler, [doc(id=1), doc(id=2, more=1.5)])
    assert "evolve or reject" in caught.value.hint


def test_what_no_change_of_the_table_heals_is_rejected_and_not_a_need():
    values = [doc(id="x"), doc(name="no id"), doc(id=None), doc(id=7), doc(id=1, _offset=5)]
    settled = settle(of_json(plan("db.t")), values)
    assert ids(settled, "db.t") == [7]
    assert kinds(settled) == dict.fromkeys((0, 1, 2, 4), "misfit")
    assert settled.needs == {}


def test_a_table_without_the_columns_that_say_where_a_row_comes_from_needs_them():
    bare = plan("db.t", metadata=MetadataColumns("", "", "", ""))
    assert list(settle(of_json(bare), [doc(id=1)]).needs) == ["db.t"]
    frozen = plan("db.t", metadata=MetadataColumns("", "", "", ""), evolution="reject")
    settled = settle(of_json(frozen), [doc(id=1)])
    assert "'_offset'" in reasons(settled)[0]


def test_json_that_calls_a_column_by_its_former_name_finds_it():
    table = plan("db.t", aliases={"name": ("title",)})
    settled = settle(of_json(table), [doc(id=1, name="new"), doc(id=2, title="old")])
    rows = pa.concat_tables([rows for _, rows in settled.rows]).sort_by("_offset")
    assert rows.column("name").to_pylist() == ["new", "old"]
    assert (settled.rejections, settled.needs) == ({}, {})


@pytest.mark.parametrize("value", [doc(id=1, heading="x"), doc(key=1, name="x")])
def test_json_may_use_any_former_name_and_mix_old_and_new_ones(value: bytes):
    table = plan("db.t", aliases={"name": ("title", "heading"), "id": ("key",)})
    settled = settle(of_json(table), [value])
    assert settled.rejections == {}
    assert ids(settled, "db.t") == [1]


def test_a_field_name_that_is_no_text_costs_its_own_record_alone():
    values = [b'{"id":1}', b'{"\\ud800":1}']
    settled = settle(of_json(plan("db.t")), values)
    assert (ids(settled, "db.t"), list(settled.rejections)) == ([1], [1])
    assert settle(of_json(), values).needs["db.t"].names == ["id"]
    assert list(settle(of_json(), values[1:]).rejections) == [0]


# ── JSON by rules ───────────────────────────────────────────────────────────────────────────────


def test_each_record_goes_to_all_tables_of_the_first_rule_that_matches_it():
    settler = by_rules(
        RouteConfig(field="kind", values=("both",), to=("db.a", "db.b")),
        RouteConfig(field="kind", values=("a",), to=("db.a",)),
        RouteConfig(field="kind", values=("none",), skip=True),
        tables=plans(
            *(plan(name, ID, pa.field("kind", pa.large_string())) for name in ("db.a", "db.b"))
        ),
    )
    values = [doc(id=i, kind=kind) for i, kind in enumerate(("a", "both", "none", "else", "a"))]
    settled = settle(settler, values)
    assert ids(settled, "db.a") == [0, 1, 4]
    assert ids(settled, "db.b") == [1]
    assert settled.skipped == 1
    assert kinds(settled) == {3: "route"}
    assert settled.rejections[3].tables == ()


def test_a_record_that_several_tables_reject_is_one_dead_letter_that_names_them_all():
    settler = by_rules(
        RouteConfig(topics=("events",), to=("db.a", "db.b")),
        tables=plans(plan("db.a", ID, evolution="reject"), plan("db.b", evolution="reject")),
    )
    settled = settle(settler, [doc(id=1), doc(id=2, name="x"), doc(id="x"), b"{"])
    assert ids(settled, "db.a") == [1]
    assert ids(settled, "db.b") == [1, 2], "what one table rejects, the other has"
    assert settled.rejections[1].tables == ("db.a",)
    assert settled.rejections[2].tables == ("db.a", "db.b")
    assert settled.rejections[3].tables == ("db.a", "db.b")
    assert settled.rejections[3].reason.count("cannot read JSON") == 1, "a reason is not repeated"


def test_a_topic_that_a_rule_skips_is_skipped_whatever_its_records_are():
    skipping = RouteConfig(topics=("events",), skip=True)
    values = [doc(id=1), b"{", None]
    assert settle(by_rules(skipping, tables=plans(plan("db.a"))), values).skipped == 3
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
    avro = ChunkPipeline(
        ChunkPlan(
            RecordFormat("avro", json.dumps(schema)),
            RoutingRules([skipping], ["db.a"]),
            plans(plan("db.a")),
        )
    )
    assert settle(avro, [b"\x02", b"", None]).skipped == 3


def test_a_topic_that_no_rule_speaks_of_is_rejected_as_a_whole():
    settler = by_rules(RouteConfig(topics=("other",), to=("db.a",)), tables=plans(plan("db.a")))
    assert kinds(settle(settler, [doc(id=1), b"{"])) == {0: "route", 1: "route"}


def test_names_from_data_are_needs_and_bad_ones_dead_letters():
    settler = by_rules(
        RouteConfig(field="kind", to=("db.x_{value}",)), tables={}, names=["db.x_{value}"]
    )
    values = [doc(id=1, kind="a"), doc(id=2, kind="b"), doc(id=3, kind="../c"), doc(id=4)]
    settled = settle(settler, values)
    assert sorted(settled.needs) == ["db.x_a", "db.x_b"]
    assert kinds(settled) == {2: "name", 3: "route"}


def test_headers_and_functions_decide_too():
    def sorted_out(rows: pa.Table) -> list[Any]:
        assert {"_offset", "_topic", "_headers", "value"} <= set(rows.schema.names)
        return [["db.b"], None, SKIP][: len(rows)]

    settler = by_rules(
        RouteConfig(header="kind", values=("a",), to=("db.a",)),
        RouteConfig(python=sorted_out),
        tables=plans(plan("db.a"), plan("db.b")),
    )
    values = [doc(id=i) for i in range(4)]
    settled = settle(settler, values, headers=[None, "a", None, "z"])
    assert (ids(settled, "db.a"), ids(settled, "db.b")) == ([1], [0])
    assert (list(settled.rejections), settled.skipped) == ([2], 1)


def test_what_is_no_json_is_rejected_and_not_skipped_by_a_rule_for_the_rest():
    settler = by_rules(
        RouteConfig(field="kind", to=("db.a",)), RouteConfig(skip=True), tables=plans(plan("db.a"))
    )
    assert kinds(settle(settler, [b"{", doc(id=1)])) == {0: "json"}


def test_tables_that_have_the_records_already_get_none_and_need_nothing():
    settler = by_rules(
        RouteConfig(topics=("events",), to=("db.a", "db.b", "db.new")),
        tables=plans(plan("db.a"), plan("db.b")),
        names=["db.a", "db.b", "db.new"],
    )
    settled = settle(settler, [doc(id=1), doc(id=2, more=1)], below=frozenset({"db.a", "db.new"}))
    assert ids(settled, "db.a") == []
    assert ids(settled, "db.b") == [1]
    assert list(settled.needs) == ["db.b"]


# ── Debezium ────────────────────────────────────────────────────────────────────────────────────

CHANGES = (ID, NAME, pa.field("_op", pa.large_string()), pa.field("_ts_ms", pa.int64()))


def change(op: str, before: Any = None, after: Any = None) -> dict[str, Any]:
    return {"op": op, "before": before, "after": after, "ts_ms": 5}


def test_changes_in_json_become_rows_and_tombstones_are_skipped():
    settler = by_rules(
        RouteConfig(topics=("events",), to=("db.t",), envelope="debezium"),
        tables=plans(plan("db.t", *CHANGES)),
    )
    values = [
        doc(**change("c", None, {"id": 1, "name": "a"})),
        None,
        b"{",
        doc(**change("d", {"id": 2, "name": "b"})),
        doc(**change("t")),
        doc(id=3),
        doc(**change("c", None, {"id": "x"})),
    ]
    settled = settle(settler, values)
    assert ids(settled, "db.t") == [1, 2]
    assert settled.skipped == 1
    assert kinds(settled) == {2: "json", 4: "envelope", 5: "envelope", 6: "misfit"}
    assert {rejection.tables for rejection in settled.rejections.values()} == {("db.t",)}


def test_a_tombstone_in_kafka_connects_envelope_is_one_too():
    settler = by_rules(
        RouteConfig(topics=("events",), to=("db.t",), envelope="debezium"),
        tables=plans(plan("db.t", *CHANGES)),
    )
    assert settle(settler, [b'{"schema":{},"payload":null}']).skipped == 1


def test_changes_in_columns_become_rows_by_the_field_of_their_source():
    row = {
        "type": "record",
        "name": "V",
        "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"]}],
    }
    schema = record(
        "E",
        {"name": "before", "type": ["null", row]},
        {"name": "after", "type": ["null", "V"]},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"]},
        {"name": "table", "type": "string"},
    )
    rules = RoutingRules(
        [
            RouteConfig(field="table", values=("t",), to=("db.t",), envelope="debezium"),
            RouteConfig(field="table", values=("no",), skip=True),
        ],
        ["db.t"],
    )
    settler = ChunkPipeline(
        ChunkPlan(RecordFormat("avro", json.dumps(schema)), rules, plans(plan("db.t", *CHANGES)))
    )
    values = [
        avro(schema, {**change("c", None, {"id": 1, "name": "a"}), "table": "t"}),
        avro(schema, {**change("c", None, {"id": 9, "name": "a"}), "table": "no"}),
        avro(schema, {**change("u", None, {"id": 2, "name": None}), "table": "t"}),
        avro(schema, {**change("t"), "table": "t"}),
        avro(schema, {**change("d", {"id": 3, "name": "c"}), "table": "t"}),
        avro(schema, {**change("c", None, {"id": 4, "name": "c"}), "table": "?"}),
    ]
    settled = settle(settler, values)
    assert ids(settled, "db.t") == [1, 2, 3]
    assert settled.skipped == 1
    assert kinds(settled) == {3: "envelope", 5: "route"}


# ── Avro: rows of several writer schemas ────────────────────────────────────────────────────────


def record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def avro(schema: dict[str, Any], value: dict[str, Any], schema_id: int | None = None) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return (b"" if schema_id is None else b"\0" + schema_id.to_bytes(4, "big")) + out.getvalue()


LONG_ID = {"name": "id", "type": "long"}
V1 = record("R", LONG_ID, {"name": "name", "type": ["null", "string"]})
V2 = record(
    "R",
    LONG_ID,
    {"name": "name", "type": ["null", "string"]},
    {"name": "more", "type": ["null", "double"]},
)
V3 = record("R", LONG_ID, {"name": "title", "type": ["null", "string"], "aliases": ["name"]})
V4 = record("R", {"name": "id", "type": ["null", "long"]}, {"name": "name", "type": "string"})
V5 = record("R", {"name": "id", "type": "string"})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> RecordFormat:
    for number, schema in enumerate((V1, V2, V3, V4, V5), 1):
        monkeypatch.setitem(
            schema_registry._writers, (REGISTRY, number), WriterSchema(json.dumps(schema))
        )
    return RecordFormat("confluent-avro", registry={"url": REGISTRY})


def test_of_a_chunk_with_several_schemas_each_has_its_own_fate(registered: RecordFormat):
    settler = ChunkPipeline(
        ChunkPlan(registered, None, plans(plan("db.t", evolution="reject")), only="db.t")
    )
    values = [
        avro(V1, {"id": 1, "name": "a"}, 1),
        avro(V2, {"id": 2, "name": "b", "more": 1.0}, 2),
        avro(V5, {"id": "x"}, 5),
        b"bad",
        None,
        avro(V1, {"id": 3, "name": None}, 1),
    ]
    settled = settle(settler, values)
    assert ids(settled, "db.t") == [1, 3]
    assert kinds(settled) == {1: "misfit", 2: "misfit", 3: "header", 4: "null"}
    assert (settled.rejections[1].schema_id, settled.rejections[2].schema_id) == (2, 5)
    assert "'more'" in settled.rejections[1].reason


def test_an_evolving_table_needs_what_all_schemas_bring_and_rejects_what_can_never_fit(
    registered: RecordFormat,
):
    settler = ChunkPipeline(ChunkPlan(registered, None, plans(plan("db.t")), only="db.t"))
    values = [
        avro(V1, {"id": 1, "name": "a"}, 1),
        avro(V2, {"id": 2, "name": "b", "more": 1.0}, 2),
        avro(V3, {"id": 3, "title": "c"}, 3),
        avro(V5, {"id": "x"}, 5),
    ]
    settled = settle(settler, values)
    assert list(settled.rejections) == [3]
    need = settled.needs["db.t"]
    assert need.names == ["id", "title", "more"], "renamed, and not there twice"
    assert aliases_of(need) == {"title": ("name",)}


def test_a_missing_table_is_needed_once_for_all_schemas_and_refused_for_all(
    registered: RecordFormat,
):
    values = [avro(V1, {"id": 1, "name": "a"}, 1), avro(V2, {"id": 2, "name": "b", "more": 1.0}, 2)]
    need = settle(ChunkPipeline(ChunkPlan(registered, None, {}, only="db.t")), values).needs
    assert need["db.t"].names == ["id", "name", "more"]
    refusing = ChunkPipeline(ChunkPlan(registered, None, {}, {"db.t": "no room"}, "db.t"))
    assert set(reasons(settle(refusing, values)).values()) == {"cannot fit db.t: no room"}


def test_rows_under_an_older_name_go_into_the_column_it_has_now(registered: RecordFormat):
    titled = ID, pa.field("title", pa.large_string())
    old, new = avro(V1, {"id": 1, "name": "a"}, 1), avro(V3, {"id": 3, "title": "c"}, 3)
    frozen = plan("db.t", *titled, evolution="reject")
    settled = settle(
        ChunkPipeline(ChunkPlan(registered, None, plans(frozen), only="db.t")), [old, new]
    )
    assert ids(settled, "db.t") == [3], "of V1 nobody has said that its name is the title"
    known = plan("db.t", *titled, aliases={"title": ("name",)}, evolution="reject")
    settled = settle(
        ChunkPipeline(ChunkPlan(registered, None, plans(known), only="db.t")), [old, new]
    )
    rows = pa.concat_tables([rows for _, rows in settled.rows]).sort_by("_offset")
    assert rows.column("title").to_pylist() == ["a", "c"]


def test_a_row_without_a_value_that_the_table_requires_is_rejected_alone(registered: RecordFormat):
    table = plan("db.t", ID, NAME, evolution="reject")
    settler = ChunkPipeline(ChunkPlan(registered, None, plans(table), only="db.t"))
    numbers: list[int | None] = [*range(50), None, *range(50, 80), None, 80]
    settled = settle(settler, [avro(V4, {"id": n, "name": "x"}, 4) for n in numbers])
    assert ids(settled, "db.t") == list(range(81))
    assert sorted(settled.rejections) == [50, 81]
    assert all("requires column 'id'" in reason for reason in reasons(settled).values())


def test_where_all_rows_lack_a_value_each_of_them_is_a_dead_letter(registered: RecordFormat):
    settler = ChunkPipeline(
        ChunkPlan(registered, None, plans(plan("db.t", evolution="reject")), only="db.t")
    )
    settled = settle(settler, [avro(V4, {"id": None, "name": "x"}, 4)] * 5)
    assert sorted(settled.rejections) == [0, 1, 2, 3, 4]


def test_an_identifier_stays_required_when_all_else_becomes_optional(registered: RecordFormat):
    table = plan("db.t", ID, NAME, identifier=("id",))
    settler = ChunkPipeline(ChunkPlan(registered, None, plans(table), only="db.t"))
    values = [avro(V4, {"id": n, "name": "x"}, 4) for n in (1, None)]
    settled = settle(settler, values)
    assert settled.needs == {}
    assert (ids(settled, "db.t"), list(settled.rejections)) == ([1], [1])


def test_the_records_of_a_share_keep_their_offsets_whatever_is_cut_out_around_them(
    registered: RecordFormat,
):
    rules = RoutingRules(
        [
            RouteConfig(field="name", values=("a",), to=("db.a",)),
            RouteConfig(field="name", values=("b",), to=("db.a", "db.b")),
        ],
        ["db.a", "db.b"],
    )
    settler = ChunkPipeline(ChunkPlan(registered, rules, plans(plan("db.a"), plan("db.b"))))
    words = ["a", "b", None, "a", "b", "c", "a"]
    values: list[bytes | None] = [avro(V1, {"id": i, "name": w}, 1) for i, w in enumerate(words)]
    values[3:3] = [b"bad", None]
    settled = settle(settler, values)
    for name, rows in settled.rows:
        for row in rows.to_pylist():
            at = (row["_offset"] - 100) // 2
            assert values[at] == avro(V1, {"id": row["id"], "name": row["name"]}, 1), name
    assert ids(settled, "db.a") == [0, 1, 3, 4, 6]
    assert ids(settled, "db.b") == [1, 4]
    assert kinds(settled) == {2: "route", 3: "header", 4: "null", 7: "route"}


# ── dead letters and needs ──────────────────────────────────────────────────────────────────────


def test_a_dead_letter_keeps_its_first_kind_and_gathers_reasons_and_tables():
    settled = ChunkResult()
    settled.reject(Rejection(4, "misfit", "too long", ("db.a",), 7))
    settled.reject(Rejection(4, "other", "too short", ("db.b",)))
    settled.reject(Rejection(4, "other", "too long", ("db.a",)))
    assert settled.rejections == {
        4: Rejection(4, "misfit", "too long; too short", ("db.a", "db.b"), 7)
    }


def test_needs_that_cannot_be_merged_keep_the_first_and_needs_that_can_keep_former_names():
    needs: dict[str, pa.Schema] = {}
    add_need(needs, "db.t", needed(pa.schema([("a", pa.int32())]), {"a": "x"}))
    add_need(needs, "db.t", needed(pa.schema([("a", pa.large_string())]), {}))
    assert needs["db.t"].field("a").type == pa.int32()
    add_need(needs, "db.t", needed(pa.schema([("a", pa.int64()), ("b", pa.bool_())]), {"b": "y"}))
    assert needs["db.t"].names == ["a", "b"]
    assert needs["db.t"].field("a").type == pa.int64()
    assert aliases_of(needs["db.t"]) == {"a": ("x",), "b": ("y",)}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("kind", "by", "values", "reason"),
    [
        (
            pa.timestamp("us", "UTC"),
            "hour(at)",
            [0, 2**31 * 3_600_000_000 - 1, 2**63 - 1, None, -(2**63)],
            "whose hour takes more than 32 bits",
        ),
        (pa.timestamp("us"), "at", [0, 2**62, 2**63 - 1, None, -(2**63)], "has no text form"),
        (
            pa.decimal128(5, 2),
            "truncate(50, at)",
            [Decimal("1.00"), Decimal("-999.50"), Decimal("-999.99"), None, Decimal("-999.51")],
            "when it is truncated",
        ),
    ],
)
def test_a_value_that_no_partition_can_have_is_a_misfit_of_its_own_row(
    inside: bool, kind: pa.DataType, by: str, values: list[Any], reason: str
):
    column = pa.array(values, kind)
    if inside:
        column = pa.StructArray.from_arrays([column], ["at"])
        by = by.replace("at)", "s.at)") if "(" in by else f"s.{by}"
    name = "s" if inside else "at"
    table_plan = plan("db.t", ID, pa.field(name, column.type), evolution="reject")
    spec = partition_spec(table_plan.shape.schema, (by,), "db.t")
    table_plan = replace(table_plan, shape=replace(table_plan.shape, spec=spec))
    rows = pa.table({"id": pa.array(range(5)), name: column})
    records = ColumnRecords(ChunkPlan(RecordFormat("raw"), None, plans(table_plan)))
    work = ChunkWork(HERE, opened([b""] * 5), NOBODY)
    records._into(work, records._to("db.t"), DecodedChunk(rows, None), {})
    assert ids(work.result, "db.t") == [0, 1, 3]
    assert kinds(work.result) == {2: "misfit", 4: "misfit"}
    assert all(reason in rejection.reason for rejection in work.result.rejections.values())


# ── timestamps that no column holds ──────────────────────────────────────────────────────────────

NANOSECONDS = 1794867748844274479  # what a producer says that takes milliseconds for nanoseconds


@pytest.mark.parametrize("format", [RecordFormat("json"), RecordFormat("raw")])
def test_a_record_whose_timestamp_does_not_fit_is_rejected_by_itself(format: RecordFormat):
    column = [ID] if format.kind == "json" else [pa.field("value", pa.large_binary())]
    settler = ChunkPipeline(ChunkPlan(format, None, plans(plan("db.t", *column)), {}, "db.t"))
    given = opened([b'{"id":1}', b'{"id":2}', b'{"id":3}'])
    stamps = np.array([5, NANOSECONDS, 1_700_000_000_000_000], np.int64)  # the last: year 55841
    settled = settler.process(HERE, given._replace(stamps=stamps), NOBODY)
    assert kinds(settled) == {1: "timestamp"}
    assert settled.rejections[1].reason == (
        "cannot fit db.t: the record's timestamp does not fit; expected at most 9223372036854775 "
        f"milliseconds since 1970, found {NANOSECONDS}"
    )
    [(_, rows)] = settled.rows
    assert rows["_offset"].to_pylist() == [100, 104]
    assert rows["_timestamp"].cast(pa.int64()).to_pylist() == [5000, 1_700_000_000_000_000_000]


def test_a_table_without_a_timestamp_column_takes_records_of_any_time():
    metadata = MetadataColumns("_topic", "_topic_partition", "_offset", "")
    schema = iceberg_schema(pa.schema([ID]), metadata, TableConfig("db.t"))
    shape = WriterSpec("db.t", "", schema, 0, "", {}, 0, "", {})
    settler = ChunkPipeline(
        ChunkPlan(RecordFormat("json"), None, plans(TablePlan(shape, metadata, "")), {}, "db.t")
    )
    given = opened([b'{"id":1}'])._replace(stamps=np.array([NANOSECONDS], np.int64))
    settled = settler.process(HERE, given, NOBODY)
    assert settled.rejections == {}
    assert ids(settled, "db.t") == [1]


def test_a_python_rule_sees_no_timestamp_where_none_fits():
    given = opened([b"a", b"b"])._replace(stamps=np.array([NANOSECONDS, 7], np.int64))
    origin = ChunkWork(HERE, given, NOBODY).origin(None)
    assert origin["_timestamp"].cast(pa.int64()).to_pylist() == [None, 7000]
