from __future__ import annotations

import datetime as dt
import json
import pickle
import random
import re
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from frazil.config.sections import RouteConfig
from frazil.errors import ConfigError, Fatal
from frazil.kafka.record_batch import HEADERS
from frazil.pipeline import routing as module
from frazil.pipeline.field_text import peek
from frazil.pipeline.routing import SKIP, NoRoute, Route, RoutedChunk, RoutingRules

TABLES = ("lake.orders", "lake.users", "lake.all")


def route(**settings: Any) -> RouteConfig:
    return RouteConfig(**settings)


def typed(*values: Any) -> pa.Table:
    return pa.table({"type": list(values), "n": list(range(len(values)))})


def ways(out: RoutedChunk, count: int) -> list[Any]:
    """For each record the tables it goes to, or the kind under which it is rejected."""
    routed: list[Any] = [None] * count
    for share in out.shares:
        for i in range(count) if share.index is None else share.index.tolist():
            assert routed[i] is None
            routed[i] = share.tables
    for rejection in out.rejected:
        assert routed[rejection.index] is None
        routed[rejection.index] = rejection.kind
    assert None not in routed
    return routed


def sort(
    routes: Sequence[RouteConfig], rows: pa.Table, tables: Sequence[str] = TABLES, **more: Any
) -> list[Any]:
    return ways(RoutingRules(routes, tables).sort("t", rows, **more), len(rows))


# ── topics ──────────────────────────────────────────────────────────────────────────────────────


def test_without_rules_everything_goes_to_the_one_table():
    rules = RoutingRules([], ["lake.orders"])
    assert rules.of_topic("any") == Route(("lake.orders",), None, -1, "")
    assert rules.sort("any", typed("a")).shares == [Route(("lake.orders",), None, -1, "")]
    assert not rules.wants_headers
    assert not rules.wants_rows
    assert rules.fields == ()


def test_a_topic_decides_by_name_or_by_pattern_and_the_first_rule_wins():
    rules = RoutingRules(
        [
            route(topics=("orders", "old_orders"), to=("lake.orders",), envelope="debezium"),
            route(pattern="old_.*", skip=True),
            route(pattern=".*", to=("lake.users", "lake.all")),
        ],
        TABLES,
    )
    assert rules.of_topic("old_orders") == Route(("lake.orders",), None, 0, "debezium")
    assert rules.of_topic("old_users") == Route((), None, 1, "")
    assert rules.of_topic("users") == Route(("lake.users", "lake.all"), None, 2, "")


def test_a_pattern_speaks_of_the_whole_topic():
    rules = RoutingRules([route(pattern="order", skip=True)], TABLES)
    assert rules.of_topic("order") == Route((), None, 0, "")
    for topic in ("orders", "reorder", "order\n"):
        assert isinstance(rules.of_topic(topic), NoRoute), topic


def test_a_topic_that_no_rule_speaks_of_is_rejected_record_by_record():
    rules = RoutingRules([route(topics=("orders",), to=("lake.orders",))], TABLES)
    why = rules.of_topic("users")
    assert why == NoRoute("route", "cannot route a record of users: no rule matches it")
    out = rules.sort("users", typed("a", "b"))
    assert out.shares == []
    assert [(rejection.index, rejection.kind) for rejection in out.rejected] == [
        (0, "route"),
        (1, "route"),
    ]


def test_where_a_value_or_a_header_says_it_the_topic_does_not():
    rules = RoutingRules(
        [
            route(topics=("a",), field="type", skip=True),
            route(topics=("b",), header="h", skip=True),
            route(topics=("c",), python=len),
            route(to=("lake.all",)),
        ],
        TABLES,
    )
    assert [rules.of_topic(topic) for topic in "abc"] == [None] * 3
    assert rules.of_topic("d") == Route(("lake.all",), None, 3, "")
    assert rules.fields == ("type",)
    assert rules.wants_headers
    assert rules.wants_rows


# ── fields and headers ──────────────────────────────────────────────────────────────────────────


def test_a_fields_value_chooses_and_what_no_rule_matches_is_rejected():
    routes = [
        route(field="type", values=("order", "refund"), to=("lake.orders", "lake.all")),
        route(field="type", values=("user",), to=("lake.users",)),
        route(field="type", values=("ping",), skip=True),
    ]
    out = sort(routes, typed("user", "order", None, "ping", "refund", "other"))
    both = ("lake.orders", "lake.all")
    assert out == [("lake.users",), both, "route", (), both, "route"]


def test_a_share_says_which_rule_and_keeps_the_order_of_its_records():
    routes = [
        route(field="type", values=("a", "b"), to=("lake.all",), envelope="debezium"),
        route(to=("lake.users",)),
    ]
    out = RoutingRules(routes, TABLES).sort("t", typed("b", None, "a", "c", "b"))
    assert out.rejected == []
    by_rule = {share.rule: share for share in out.shares}
    assert by_rule[0].index is not None
    assert by_rule[0].index.tolist() == [0, 2, 4]
    assert by_rule[0].envelope == "debezium"
    assert by_rule[1].index is not None
    assert by_rule[1].index.tolist() == [1, 3]


def test_records_that_all_go_the_same_way_are_one_share_without_an_index():
    out = RoutingRules([route(field="type", to=("lake.all",))], TABLES).sort(
        "t", typed("a", "b", "c")
    )
    assert out.shares == [Route(("lake.all",), None, 0, "")]
    assert RoutingRules([route(field="type", skip=True)], TABLES).sort("t", typed()) == RoutedChunk(
        [], []
    )


def test_a_rule_without_values_takes_any_value_but_null():
    out = sort([route(field="type", to=("lake.orders",)), route(to=("lake.all",))], typed("", None))
    assert out == [("lake.orders",), ("lake.all",)]


def test_of_rules_over_the_same_field_the_first_decides():
    routes = [
        route(field="type", values=("a",), to=("lake.orders",)),
        route(field="type", values=("a", "b"), to=("lake.users",)),
        route(field="type", to=("lake.all",)),
    ]
    assert sort(routes, typed("a", "b", "c")) == [("lake.orders",), ("lake.users",), ("lake.all",)]


def test_rules_over_several_fields_are_tried_in_their_order():
    rows = pa.table({"a": ["x", "x", None], "b": ["y", "z", "y"]})
    routes = [
        route(field="b", values=("z",), to=("lake.orders",)),
        route(field="a", values=("x",), to=("lake.users",)),
        route(field="b", values=("y",), to=("lake.all",)),
    ]
    assert sort(routes, rows) == [("lake.users",), ("lake.orders",), ("lake.all",)]
    assert RoutingRules(routes, TABLES).fields == ("b", "a")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (pa.array([True, False, None]), ["true", "false"]),
        (pa.array([1, -7, None], pa.int32()), ["1", "-7"]),
        (pa.array([1.5, 1.0, None]), ["1.5", "1.0"]),
        (pa.array([0.1, 2.0, None], pa.float32()), ["0.1", "2.0"]),
        (pa.array(["a", "ä", None]), ["a", "ä"]),
        (pa.array(["a", "ä", None], pa.string_view()), ["a", "ä"]),
        (pa.array(["a", "b", None]).dictionary_encode(), ["a", "b"]),
        (pa.array([b"a", "ä".encode(), None], pa.large_binary()), ["a", "ä"]),
        (pa.array([b"ab", b"cd", None], pa.binary(2)), ["ab", "cd"]),
        (pa.array([Decimal("1.50"), Decimal("-2.00"), None]), ["1.50", "-2.00"]),
        (pa.array([dt.date(2024, 1, 2), dt.date(1, 1, 1), None]), ["2024-01-02", "0001-01-01"]),
        (
            pa.array([uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes, None], pa.uuid()),
            [str(uuid.UUID(int=1)), str(uuid.UUID(int=2))],
        ),
    ],
)
def test_values_compare_as_text(values: pa.Array, text: list[str]):
    routes = [
        route(field="x", values=(text[0],), to=("lake.orders",)),
        route(field="x", values=(text[1],), to=("lake.users",)),
    ]
    assert sort(routes, pa.table({"x": values})) == [("lake.orders",), ("lake.users",), "route"]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"\xff"]),
        pa.nulls(1),
        pa.array([["a"]]),
        pa.array([{"a": "a"}]),
        pa.array([[("a", "a")]], pa.map_(pa.string(), pa.string())),
    ],
)
def test_what_is_no_text_matches_nothing(values: pa.Array):
    assert sort([route(field="x", to=("lake.all",))], pa.table({"x": values})) == ["route"]


def test_a_path_goes_through_structs_and_a_field_that_is_not_there_is_null():
    rows = pa.table({"source": [{"db": {"table": "t1"}}, {"db": None}, None]})
    to = ("lake.all",)
    assert sort([route(field="source.db.table", to=to)], rows) == [to, "route", "route"]
    for path in ("nope", "source.nope", "source.db.nope", "source.db.table.x", "source.db"):
        assert sort([route(field=path, to=to)], rows) == ["route"] * 3, path


def test_below_a_struct_that_is_null_there_is_nothing():
    """Whatever its child has at that place."""
    table = pa.array(["seen", "hidden"])
    struct = pa.StructArray.from_arrays([table], ["t"], mask=pa.array([False, True]))
    assert sort([route(field="s.t", to=("lake.all",))], pa.table({"s": struct})) == [
        ("lake.all",),
        "route",
    ]


def test_columns_may_come_in_chunks():
    rows = pa.concat_tables([typed("a", "b"), typed("b", None)])
    routes = [route(field="type", values=("b",), to=("lake.all",)), route(skip=True)]
    assert sort(routes, rows) == [(), ("lake.all",), ("lake.all",), ()]


def headers(*records: Any) -> pa.Array:
    pairs = [[{"key": key, "value": value} for key, value in record] for record in records]
    return pa.array(pairs, HEADERS)


def test_the_last_header_of_a_name_decides():
    given = headers(
        [("kind", b"a"), ("x", b"b"), ("kind", b"b")],
        [("kind", b"b"), ("kind", b"a")],
        [],
        [("x", b"a")],
        [("kind", b"a"), ("kind", None)],
        [("kind", b"\xff")],
        [("Kind", b"a")],
    )
    routes = [
        route(header="kind", values=("a",), to=("lake.orders",)),
        route(header="kind", to=("lake.users",)),
    ]
    out = sort(routes, typed(*"1234567"), headers=given)
    assert out == [("lake.users",), ("lake.orders",), *["route"] * 5]
    part = sort(routes, typed(*"12"), headers=given[1:3])
    assert part == [("lake.orders",), "route"]


def test_without_headers_no_header_matches():
    assert sort([route(header="kind", to=("lake.all",))], typed("a")) == ["route"]


def test_header_rules_work_beside_rows_without_columns():
    rows = peek([b"{}", b"{}"], ())
    given = headers([("k", b"1")], [])
    assert sort([route(header="k", skip=True)], rows, headers=given) == [(), "route"]


def test_the_cost_is_by_distinct_values_and_not_by_tables(monkeypatch: pytest.MonkeyPatch):
    """A chunk over a thousand tables: one sort cuts it, and each value is decided once."""
    tables = [f"lake.t{i}" for i in range(1000)]
    routes = [route(field="type", values=(f"v{i}",), to=(t,)) for i, t in enumerate(tables)]
    decided: list[Any] = []
    looked: list[str] = []
    one, other = RoutingRules._decided, module.distinct_texts
    monkeypatch.setattr(RoutingRules, "_decided", lambda *a: decided.append(a[3]) or one(*a))
    monkeypatch.setattr(module, "distinct_texts", lambda c: looked.append("") or other(c))
    rules = RoutingRules(routes, tables)
    numbers = np.random.default_rng(5).integers(0, 1000, 50_000)
    rows = pa.table({"type": [f"v{i}" for i in numbers]})
    for _ in range(2):
        out = rules.sort("t", rows)
        assert len(out.shares) == 1000
        for share in out.shares:
            assert share.index is not None
            assert share.tables == (tables[numbers[share.index[0]]],)
            assert (numbers[share.index] == numbers[share.index[0]]).all()
    assert sum(len(share.index) for share in out.shares) == 50_000
    assert len(decided) == 1000
    assert len(looked) == 2


# ── Python ──────────────────────────────────────────────────────────────────────────────────────


def test_a_function_sees_columns_and_origin_and_names_tables():
    def by_parity(rows: pa.Table) -> list[Any]:
        assert rows.schema.names == ["type", "n", "_topic", "_offset"]
        answers = []
        for row in rows.to_pylist():
            answers.append(
                {0: "lake.orders", 1: None, 2: SKIP, 3: ["lake.users", "lake.all"], 4: []}[
                    row["_offset"] - 10
                ]
            )
        return answers

    origin = {"_topic": pa.array(["t"] * 5), "_offset": pa.array(range(10, 15))}
    routes = [route(python=by_parity), route(field="type", values=("b",), to=("lake.users",))]
    out = sort(routes, typed(*"abcde"), origin=origin)
    assert out == [("lake.orders",), ("lake.users",), (), ("lake.users", "lake.all"), "route"]


@pytest.mark.parametrize(
    "answer",
    [
        pa.array(["lake.all", None, SKIP]),
        pa.array(["lake.all", None, SKIP], pa.large_string()),
        pa.chunked_array([["lake.all"], [None, SKIP]]),
        pa.array(["lake.all", None, SKIP]).dictionary_encode(),
        pa.array([["lake.all"], None, [SKIP]]),
        ["lake.all", None, SKIP],
        ("lake.all", [], [SKIP]),
        np.array(["lake.all", None, SKIP], object),
    ],
)
def test_a_function_answers_with_columns_or_plain_python(answer: Any):
    assert sort([route(python=lambda rows: answer)], typed(*"abc")) == [("lake.all",), "route", ()]


def test_a_function_gets_only_what_no_rule_before_it_matched():
    seen: list[list[Any]] = []

    def call(rows: pa.Table) -> Any:
        seen.append(rows.column("type").to_pylist())
        return pa.nulls(len(rows), pa.string())

    routes = [
        route(field="type", values=("b",), skip=True),
        route(python=call),
        route(to=("lake.all",)),
    ]
    assert sort(routes, typed("a", "b", "c")) == [("lake.all",), (), ("lake.all",)]
    assert seen == [["a", "c"]]


@pytest.mark.parametrize(
    "name", ["lake.nope", "lake.Orders", "orders", "", SKIP + " ", "lake.{value}", "other.orders"]
)
def test_a_name_from_a_function_that_is_no_tables_is_rejected(name: str):
    out = RoutingRules([route(python=lambda rows: [name, [name, "lake.all"]])], TABLES).sort(
        "t", typed("a", "b")
    )
    assert [rejection.kind for rejection in out.rejected] == ["name", "name"]
    assert ascii(name) in out.rejected[0].reason


def test_a_name_from_a_function_may_be_made_of_a_template():
    names = ["lake.t_one", "lake.t_Two", "lake.t_", "lake.orders", "lake.t_a.b", None, [None]]
    routes = [route(python=lambda rows: names)]
    out = sort(routes, typed(*"abcdefg"), ("lake.orders", "lake.t_{kind}"))
    assert out == [("lake.t_one",), "name", "name", ("lake.orders",), "name", "route", "name"]


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (["a"], "expected answers for 2 records, found 1"),
        (pa.array(["a"] * 3), "expected answers for 2 records, found 3"),
        ("ab", "for each of 2 records, found str"),
        (None, "for each of 2 records, found NoneType"),
        ([1, 2], "found '1' (int)"),
        (pa.array([1, 2]), "found '1' (int)"),
        ([["a", 1], None], "(list)"),
    ],
)
def test_an_answer_of_another_shape_stops_the_stream(answer: Any, fact: str):
    def odd(rows: pa.Table) -> Any:
        return answer

    with pytest.raises(Fatal) as caught:
        sort([route(python=odd)], typed("a", "b"))
    assert fact in caught.value.message
    assert "cannot route by test_an_answer" in caught.value.message
    assert "odd" in caught.value.message


def test_what_a_function_raises_stops_the_stream_with_the_line():
    def broken(rows: pa.Table) -> Any:
        return rows.column("nope")

    with pytest.raises(Fatal, match=r"cannot route by .*broken: KeyError: .*nope.*:\d+\)"):
        sort([route(python=broken)], typed("a"))


def test_functions_are_loaded_from_files_and_modules(tmp_path: Path, monkeypatch: Any):
    code = "def to_all(rows):\n    return ['lake.all'] * len(rows)\n"
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "my_routes.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (f"{tmp_path}/mine.py:to_all", "my_routes:to_all"):
        rules = RoutingRules([route(python=name)], TABLES)
        assert ways(rules.sort("t", typed("a")), 1) == [("lake.all",)]
        assert [module.__file__ for module in rules.travelling] == [
            str(tmp_path / ("mine.py" if "mine" in name else "my_routes.py"))
        ]


@pytest.mark.parametrize(
    "name", ["nope_nope:f", "json:nope", "/nope.py:f", "json", "json:__doc__", ":f", "broken.py:f"]
)
def test_a_function_that_cannot_be_loaded_is_named_before_the_start(name: str, tmp_path: Path):
    (tmp_path / "broken.py").write_text("def f(:")
    name = name.replace("broken.py", str(tmp_path / "broken.py"))
    with pytest.raises(ConfigError, match=r"cannot use \[\[route\]\] 1: .*python = "):
        RoutingRules([route(python=name)], TABLES)


def to_all(rows: pa.Table) -> list[str]:
    return ["lake.all"] * len(rows)


def test_rules_travel_pickled_with_their_functions_and_without_what_they_learned():
    routes = [
        route(field="type", allowed_names="[A-Za-z]+", to=("lake.{value}",)),
        route(python=to_all),
    ]
    tables = ("lake.all", "lake.{value}")
    rules = RoutingRules(routes, tables, reserved=["lake.index"], known=["lake.Known"], room=1)
    assert ways(rules.sort("t", typed("a", "b", None)), 3) == [("lake.a",), "name", ("lake.all",)]
    arrived = pickle.loads(pickle.dumps(rules))
    assert ways(arrived.sort("t", typed("b", "index", "known", None)), 4) == [
        ("lake.b",),
        "name",
        "name",
        ("lake.all",),
    ]


# ── names ───────────────────────────────────────────────────────────────────────────────────────


def test_a_template_is_filled_with_value_topic_and_groups():
    tables = ("{env}.{value}_{topic}", "lake.all")
    rules = RoutingRules([route(pattern="(?P<env>[a-z]+)_x", field="type", to=tables)], tables)
    out = rules.sort("dev_x", typed("a"))
    assert out.shares == [Route(("dev.a_dev_x", "lake.all"), None, 0, "")]
    assert rules.template("dev.a_dev_x") == tables[0]
    assert rules.template("lake.all") == "lake.all"
    with pytest.raises(ConfigError, match="cannot configure table lake"):
        rules.template("lake.nope.x")


def test_a_name_by_topic_alone_is_decided_by_the_topic():
    rules = RoutingRules([route(to=("lake.{topic}",))], ("lake.{topic}",))
    assert rules.of_topic("orders") == Route(("lake.orders",), None, 0, "")
    refused = rules.of_topic("shop.orders")
    assert isinstance(refused, NoRoute)
    assert refused.kind == "name"
    assert refused.reason == "cannot name a table 'shop.orders': expected '[a-z][a-z0-9_]{0,63}'"
    assert [rejection.kind for rejection in rules.sort("shop.orders", typed("a")).rejected] == [
        "name"
    ]


def test_a_group_that_matched_nothing_makes_no_name():
    rules = RoutingRules([route(pattern="x(?P<g>y)?", to=("lake.t{g}",))], ("lake.t{g}",))
    assert rules.of_topic("xy") == Route(("lake.ty",), None, 0, "")
    assert rules.of_topic("x") == NoRoute("name", "cannot name a table: {g} is nothing")


def by_value(**more: Any) -> RoutingRules:
    routes = [
        route(field="type", allowed_names=more.pop("allowed_names", "(?s).*"), to=("lake.{value}",))
    ]
    return RoutingRules(routes, ("lake.{value}", *more.pop("tables", ())), **more)


@pytest.mark.parametrize(
    "value",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a.b",
        "a\n",
        "\na",
        "a b",
        "a-b",
        "a`b",
        'a"b',
        "a'b",
        "a\0b",
        "\uff41",
        "\u0430",
        "\u0131",
        "\u212a",
        "\u0663",
        "a;drop",
        "*",
        "%2e",
        "x" * 129,
        "{value}",
    ],
)
def test_no_setting_lifts_the_floor_under_names(value: str):
    out = by_value().sort("t", typed(value))
    assert out.shares == []
    assert out.rejected[0].kind == "name"
    assert out.rejected[0].reason.isascii()
    assert out.rejected[0].reason.isprintable()
    assert len(out.rejected[0].reason) < 250


def test_the_longest_name_has_128_characters_in_a_part():
    assert ways(by_value().sort("t", typed("x" * 128)), 1) == [("lake." + "x" * 128,)]
    routes = [route(field="type", allowed_names=".*", to=("lake.t_{value}",))]
    out = sort(routes, typed("x" * 126, "x" * 127), ("lake.t_{value}",))
    assert out == [("lake.t_" + "x" * 126,), "name"]


def test_the_allowlist_speaks_of_the_whole_value():
    rules = by_value(allowed_names="[a-z]+$")  # with search instead of fullmatch "a\n" would pass
    assert ways(rules.sort("t", typed("a", "a\n", "1a")), 3) == [("lake.a",), "name", "name"]


def test_of_names_that_differ_only_in_case_the_first_stays():
    rules = by_value()
    assert ways(rules.sort("t", typed("Orders", "orders", "Orders")), 3) == [
        ("lake.Orders",),
        "name",
        ("lake.Orders",),
    ]
    again = by_value(known=["lake.orders"])
    assert ways(again.sort("t", typed("Orders", "orders")), 2) == ["name", ("lake.orders",)]


def test_namespaces_that_differ_only_in_case_are_refused_too():
    routes = [route(field="type", allowed_names=".*", to=("{value}.events",))]
    out = sort(routes, typed("Lake", "lake", "other"), ("{value}.events", "lake.orders"))
    assert out == ["name", ("lake.events",), ("other.events",)]


def test_a_reserved_name_is_never_a_tables():
    rules = by_value(reserved=["lake.frazil_index", "lake.dead"])
    out = ways(rules.sort("t", typed("frazil_index", "Dead", "DEAD", "other")), 4)
    assert out == ["name", "name", "name", ("lake.other",)]


def test_no_table_from_data_lies_inside_another():
    routes = [route(field="type", allowed_names=".*", to=("lake.{value}.data",))]
    tables = ("lake.{value}.data", "lake.orders", "a.b.data.c")
    rules = RoutingRules(routes, tables)
    assert ways(rules.sort("t", typed("orders", "Orders", "users")), 3) == [
        "name",
        "name",
        ("lake.users.data",),
    ]
    routes = [route(field="type", allowed_names=".*", to=("lake.{value}",))]
    out = sort(routes, typed("x", "y"), ("lake.{value}", "lake.x.orders"))
    assert out == ["name", ("lake.y",)]


def test_a_table_with_a_name_of_its_own_is_not_filled_through_a_template():
    rules = by_value(tables=["lake.secret", "lake.t_{kind}"])
    out = rules.sort("t", typed("secret", "t_x", "other"))
    assert ways(out, 3) == ["name", "name", ("lake.other",)]
    assert out.rejected[1].reason.endswith("it would be one of lake.t_{kind}")
    assert rules.template("lake.t_x") == "lake.t_{kind}"


def test_max_tables_is_a_limit():
    rules = by_value(known=["lake.old"], room=2)
    out = ways(rules.sort("t", typed("a", "old", "b", "c", "a")), 5)
    assert out == [("lake.a",), ("lake.old",), ("lake.b",), "name", ("lake.a",)]
    none = by_value(known=["lake.a"], room=0)
    assert ways(none.sort("t", typed("a", "b")), 2) == [("lake.a",), "name"]


def test_the_driver_admits_names_one_by_one():
    rules = by_value(tables=["lake.own"])
    assert rules.admit("lake.a") == ""
    assert rules.admit("lake.a") == ""
    assert "there is the table lake.a" in rules.admit("lake.A")
    for bad in ("lake.own", "other.a", "lake.a.b", "lake.../x", "lake.a\n"):
        assert rules.admit(bad).startswith("cannot name a table "), bad


def test_one_bad_name_among_several_rejects_the_record_once():
    routes = [route(field="type", to=("lake.all", "lake.v_{value}", "lake.t_{topic}"))]
    rules = RoutingRules(routes, ("lake.all", "lake.v_{value}", "lake.t_{topic}"))
    out = rules.sort("T", typed("A"))
    assert out.shares == []
    assert len(out.rejected) == 1


# ── what is refused before the start ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({}, "expected one of to, skip and python, found none"),
        ({"to": TABLES, "skip": True}, "found to and skip"),
        ({"to": TABLES, "python": len}, "found to and python"),
        ({"skip": True, "python": len}, "found skip and python"),
        ({"skip": True, "topics": ("a",), "pattern": "a"}, "either topics or pattern"),
        ({"skip": True, "field": "a", "header": "b"}, "either field or header"),
        ({"skip": True, "values": ("a",)}, "values need a field or a header"),
        ({"python": len, "field": "a"}, "expected python without field and header"),
        ({"skip": True, "field": "a..b"}, "field 'a..b' is no path"),
        ({"skip": True, "pattern": "("}, "pattern is not a regular expression"),
        ({"to": TABLES, "allowed_names": "["}, "allowed_names is not a regular expression"),
        ({"skip": True, "pattern": "(?P<topic>a)"}, "another name for the pattern's group"),
        ({"to": TABLES, "envelope": "avro"}, "expected envelope = 'debezium' or none"),
        ({"to": ("lake.nope",)}, "lake.nope is not a [[table]]; expected one of lake.orders"),
        ({"to": ("lake.{value}",)}, "{value} in lake.{value} is not known; known are topic"),
        ({"to": ("lake.{value}",), "pattern": "(?P<a>.)"}, "known are a, topic"),
    ],
)
def test_a_rule_that_makes_no_sense_is_named(settings: Any, fact: str):
    with pytest.raises(ConfigError) as caught:
        RoutingRules(
            [route(skip=True, topics=("x",)), route(**settings)], (*TABLES, "lake.{value}")
        )
    assert caught.value.message.startswith("cannot use [[route]] 2: ")
    assert fact in caught.value.message


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ({}, {"field": "a"}),
        ({}, {}),
        ({"topics": ("a", "b")}, {"topics": ("b",), "field": "x"}),
        ({"pattern": "a.*"}, {"topics": ("ab", "ac")}),
        ({"header": "a"}, {"header": "a"}),
        ({"header": "a"}, {"header": "a", "values": ("x",)}),
        ({"field": "a", "values": ("x", "y")}, {"field": "a", "values": ("y",)}),
        ({"pattern": "a.*"}, {"pattern": "a.*"}),
    ],
)
def test_a_rule_that_no_record_reaches_is_refused(before: Any, behind: Any):
    with pytest.raises(ConfigError, match=r"\[\[route\]\] 2: no record reaches it, since .* 1 "):
        RoutingRules([route(skip=True, **before), route(skip=True, **behind)], TABLES)


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ({"field": "a"}, {}),
        ({"header": "a", "values": ("x",)}, {"header": "a"}),
        ({"field": "a", "values": ("x",)}, {"field": "a", "values": ("x", "y")}),
        ({"topics": ("a",)}, {"topics": ("a", "b")}),
        ({"pattern": "a.*"}, {"pattern": "a.+"}),
    ],
)
def test_a_rule_that_some_record_may_reach_is_taken(before: Any, behind: Any):
    RoutingRules([route(skip=True, **before), route(skip=True, **behind)], TABLES)


@pytest.mark.parametrize(
    ("tables", "fact"),
    [
        (("lake.a", "lake.A"), "there is the table lake.a"),
        (("lake.a", "lake.a"), "two [[table]] of this name"),
        (("lake.a", "lake.a.b"), "there is the table lake.a"),
        (("lake.{a}", "lake.{b}"), "cannot distinguish tables of lake.{b} from tables of lake.{a}"),
        (("lake.{a",), "cannot use table name 'lake.{a'"),
        (("lake.{}",), "cannot use table name"),
        (("lake.{a}-b",), "cannot use table name"),
        (("{a}",), "cannot use table name"),
        (("lake.index",), "there is the reserved table lake.index"),
    ],
)
def test_tables_that_cannot_be_distinguished_are_refused(tables: Sequence[str], fact: str):
    with pytest.raises(ConfigError) as caught:
        RoutingRules([route(skip=True)], tables, reserved=["lake.index"])
    assert fact in caught.value.message


@pytest.mark.parametrize("tables", [TABLES, ("lake.{topic}",), ()])
def test_without_rules_there_is_one_table_and_no_template(tables: Sequence[str]):
    with pytest.raises(ConfigError, match="cannot route without"):
        RoutingRules([], tables)


# ── a look at JSON ──────────────────────────────────────────────────────────────────────────────


def test_peek_gives_the_fields_as_text():
    values = [
        {"type": "a", "s": {"t": "x"}},
        {"type": True, "s": {"t": 1}},
        {"type": 1.5},
        {"type": None},
        {"type": {"a": 1}, "s": 7},
        {"type": [1]},
        {"other": 1},
        {"type": 12345678901234567890},
    ]
    peeked = peek([json.dumps(value).encode() for value in values], ["type", "s.t"])
    assert peeked.schema == pa.schema([("type", pa.large_string()), ("s.t", pa.large_string())])
    assert peeked.column(0).to_pylist() == [
        "a",
        "true",
        "1.5",
        None,
        None,
        None,
        None,
        "12345678901234567890",
    ]
    assert peeked.column(1).to_pylist() == ["x", "1", *[None] * 6]


def test_peek_gives_fractions_as_they_were_written():
    texts = ["1.10", "0.30000000000000000001", "12345678901234567890.5", "1e3", "-0.0"]
    assert peek([b'{"v":%b}' % text.encode() for text in texts], ["v"])["v"].to_pylist() == texts
    many = [b'{"v":%d}' % number for number in range(20)] + [b'{"v":2.50}', b'{"v":"2.50"}']
    assert peek(many, ["v"])["v"].to_pylist()[-3:] == ["19", "2.50", "2.50"]


@pytest.mark.parametrize(
    "bad",
    [
        None,
        b"",
        b"null",
        b"3",
        b'"x"',
        b"[1]",
        b"{",
        b"{}",
        b"\xff",
        b'{"type":"\\ud800"}',
        b'{"type":"\xff"}',
        b'{"type":"x"} {"type":"y"}',
        b"[" * 100_000,
        b'{"type":1',
        b"}" * 9,
        b'{"type":' + b"9" * 5000 + b"}",
    ],
)
def test_a_value_that_is_no_object_gives_nulls_and_its_neighbours_stay(bad: bytes | None):
    good = b'{"a":[{"b":null}],"type":"good"}'
    assert peek([good, bad, good], ["type"]).column(0).to_pylist() == ["good", None, "good"]
    assert peek([bad], ["type"]).column(0).to_pylist() == [None]
    many = [good] * 500
    many[250] = bad  # type: ignore[call-overload]
    assert peek(many, ["type"]).column(0).to_pylist() == [
        *["good"] * 250,
        None,
        *["good"] * 249,
    ]


def test_peek_keeps_the_number_of_values_even_without_paths():
    assert peek([b"{}", None], []).num_rows == 2
    assert peek([], ["a"]).num_rows == 0
    assert peek([], []).num_rows == 0


def test_a_path_may_go_through_another():
    value = b'{"a":{"b":"x"}}'
    assert peek([value, b'{"a":"y"}'], ["a", "a.b"]).to_pylist() == [
        {"a": None, "a.b": "x"},
        {"a": "y", "a.b": None},
    ]


@pytest.mark.parametrize("seed", range(6))
def test_values_read_at_once_say_the_same_as_one_by_one(seed: int):
    """Of one kind to the end, or of another behind the first ones."""
    rng = random.Random(seed)
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(["a", "", "ä\U0001f600", '"\\', "1"]),
        lambda: rng.choice([0, -1, 2**63 - 1, -(2**63)]),
        lambda: rng.choice([True, False]),
        lambda: rng.choice([1, 1.0, 1e20, 0.1, -0.0, 2**64]),
        lambda: rng.choice([None, {"u": 1}, [1], "x", 7, True]),
    ]

    def value(i: int) -> Any:
        kind = kinds[seed if seed < 5 else 4 * (i > 2500)]
        return {"o": {"x": [i]}, "t": kind(), "s": rng.choice([None, {}, {"t": kind()}])}

    values = [value(i) for i in range(3000)]
    encoded = [
        json.dumps(value, ensure_ascii=bool(i % 2)).encode() for i, value in enumerate(values)
    ]
    peeked = peek(encoded, ["t", "s.t"])
    peeked.validate(full=True)

    def text(it: Any) -> Any:
        plain = None if isinstance(it, (dict, list)) or it is None else str(it)
        return str(it).lower() if isinstance(it, bool) else plain

    assert peeked.column("t").to_pylist() == [text(value["t"]) for value in values]
    assert peeked.column("s.t").to_pylist() == [
        text((value["s"] or {}).get("t")) for value in values
    ]


def test_of_a_name_given_twice_the_last_counts():
    assert peek([b'{"a":"x","a":"y"}'], ["a"]).column(0).to_pylist() == ["y"]


def test_rules_over_paths_work_on_what_peek_saw():
    values = [b'{"s":{"t":"a"}}', b'{"s":{"t":1}}', b"no"]
    routes = [
        route(field="s.t", values=("a",), to=("lake.all",)),
        route(field="s.t", values=("1",), skip=True),
    ]
    rules = RoutingRules(routes, TABLES)
    assert ways(rules.sort("t", peek(values, rules.fields)), 3) == [("lake.all",), (), "route"]


@pytest.mark.parametrize("room", [0, -1, -1000])
def test_at_or_beyond_max_tables_no_name_from_data_is_admitted(room: int):
    """Less than none: the cap was lowered below what is there."""
    rules = RoutingRules(
        [RouteConfig(field="kind", to=("db.t_{value}",))],
        ["db.t_{value}"],
        known=["db.t_known"],
        room=room,
    )
    assert rules.admit("db.t_known") == ""
    assert "no room for another table" in rules.admit("db.t_new")


def test_names_of_a_reserved_template_are_not_for_records():
    routes = [RouteConfig(field="kind", to=("db.{value}",))]
    rules = RoutingRules(routes, ["db.{value}"], reserved=["db.{value}_deleted", "db.index"])
    assert rules.template("db.a_deleted") == "db.{value}_deleted"
    assert rules.template("db.a") == "db.{value}"
    _, why = rules.names.filled("db.{value}", {"value": "a_deleted"}, re.compile(".*"))
    assert "it would be one of db.{value}_deleted" in why
    assert "are not for records" in rules.admit("db.a_deleted")
    assert rules.admit("db.a") == ""
    with pytest.raises(ConfigError):
        RoutingRules(
            [RouteConfig(to=("db.{value}_deleted",), field="kind")],
            ["db.{value}"],
            reserved=["db.{value}_deleted"],
        )
