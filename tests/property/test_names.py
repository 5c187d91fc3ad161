"""Names of tables that come from data: ten thousand hostile ones by every way a name can come in,
and none gets out of its namespace, into another's place, or is changed to fit."""

from __future__ import annotations

import json
import posixpath
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.config.sections import RouteConfig
from frazil.kafka.record_batch import HEADERS
from frazil.pipeline.field_text import peek
from frazil.pipeline.routing import Route, RoutedChunk, RoutingRules

COUNT = 10_000
GOOD = ["orders", "users", "a", "t1", "snake_case_name", "x" * 64, "select", "table", "null"]
TAKEN = ["frazil_index", "dead_letters", "own"]
#: What a name may be made hostile with, or be as a whole.
PIECES = [
    "..",
    "../",
    "..\\",
    "/",
    "//",
    "\\",
    ".",
    "./",
    "~",
    "file:",
    "s3://",
    "\0",
    "\n",
    "\r\n",
    "\t",
    " ",
    "'",
    '"',
    "`",
    ";",
    "--",
    "/*",
    "*",
    "?",
    "%2e%2e%2f",
    "%00",
    "${jndi:x}",
    "{value}",
    "{0}",
    "}{",
    "$",
    "@",
    "#",
    "&",
    "|",
    "<",
    ">",
    "(",
    ")",
    "[",
    "]",
    "=",
    ",",
    "\u202e",
    "\u200b",
    "\ufeff",
    "\u0430",
    "\uff41",
    "\u2024",
    "\uff0e",
    "\u2215",
    "\u0131",
    "\u0130",
    "\u212a",
    "\u017f",
    "\u0663",
    "e\u0301",
    "\xe9",
    "\U0001f600",
    "\x7f",
    "\x1b[31m",
    "\x85",
    "\u2028",
    "drop table x",
    "' or 1=1",
    "metadata",
    "data",
    ".metadata",
    "CON",
    "nul",
    "-rf",
    "\ud7ff",
    "\ue000",
    "\U0010ffff",
]


def hostile(seed: int, count: int = COUNT) -> list[str]:
    """Different names, each of good words and attacks upon them."""
    rng = random.Random(seed)
    attacks: list[Callable[[str], str]] = [
        lambda w: rng.choice(PIECES) + w,
        lambda w: w + rng.choice(PIECES),
        lambda w: w[: len(w) // 2] + rng.choice(PIECES) + w[len(w) // 2 :],
        lambda w: "".join(rng.choices(PIECES, k=rng.randint(1, 6))),
        lambda w: "../" * rng.randint(1, 8) + w,
        lambda w: f"{w}.{rng.choice(GOOD)}",
        lambda w: w * rng.randint(60, 300),
        lambda w: "".join(rng.choice([c.upper(), c]) for c in w),  # case twins
        lambda w: rng.choice(TAKEN + GOOD),
        lambda w: "".join(rng.choice([c.upper(), c]) for c in rng.choice(TAKEN)),
        lambda w: "".join(chr(rng.randrange(0x20, 0xD800)) for _ in range(rng.randint(1, 12))),
        lambda w: "".join(chr(rng.randrange(128)) for _ in range(rng.randint(1, 12))),
        lambda w: w.translate({ord("a"): "\u0430", ord("o"): "\u03bf", ord("e"): "\u0435"}),
        lambda w: rng.choice(["", "_", "__", "-", "0", "1" * 200]),
    ]
    names = dict.fromkeys(GOOD)
    while len(names) < count:
        word = rng.choice(GOOD)
        for _ in range(rng.choice([1, 1, 2, 3])):
            word = rng.choice(attacks)(word)
        names[word[:2000]] = None
    shuffled = list(names)
    rng.shuffle(shuffled)
    return shuffled


TEMPLATES = ("lake.{value}", "lake.t_{value}", "deep.{value}.events", "lake.{value}_v1")
ALLOWED = ("[a-z][a-z0-9_]{0,63}", r"(?s).*", r"(?i)[a-z.\-/ ]+", r"[^\x00]*$")


def rules(template: str, names: str, **how: Any) -> RoutingRules:
    tables = ("lake.own", "lake.t_own", "deep.own.events", template)
    reserved = [f"lake.{taken}" for taken in TAKEN[:2]]
    how = {"to": (template,), **how}
    return RoutingRules([RouteConfig(allowed_names=names, **how)], tables, reserved=reserved)


def made(out: RoutedChunk, names: list[str]) -> dict[str, str]:
    """The table that each name led to; every one is in one share, or rejected under its kind."""
    admitted: dict[str, str] = {}
    seen = [rejection.index for rejection in out.rejected]
    assert {rejection.kind for rejection in out.rejected} <= {"name", "route"}
    assert all(
        rejection.reason.isascii() and rejection.reason.isprintable() for rejection in out.rejected
    )
    for share in out.shares:
        (table,) = share.tables
        for i in range(len(names)) if share.index is None else share.index.tolist():
            admitted[names[i]] = table
            seen.append(i)
    assert sorted(seen) == list(range(len(names)))
    return admitted


def assert_tame(admitted: dict[str, str], template: str, allowed: str, rules: RoutingRules) -> None:
    before, behind = map(re.escape, re.split(r"\{\w+\}", template))
    pattern = f"{before}([A-Za-z0-9_]{{1,128}}){behind}"
    for value, table in admitted.items():
        match = re.fullmatch(pattern, table, re.ASCII)
        assert match is not None, table
        assert match[1] == value, "a name was changed to fit"
        assert re.fullmatch(allowed, value)
        assert table.count(".") == template.count(".")
        assert table.lower() not in {"lake.own", "lake.t_own", "deep.own.events"}
        assert table.lower() not in {f"lake.{taken}" for taken in TAKEN}
        assert rules.template(table) == template
        place = posixpath.normpath(posixpath.join("/warehouse", *table.split(".")))
        assert place == "/warehouse/" + table.replace(".", "/")
    tables = set(admitted.values())
    assert len({table.casefold() for table in tables}) == len(tables)
    namespaces = {table.rpartition(".")[0] for table in tables}
    assert len({namespace.casefold() for namespace in namespaces}) == len(namespaces)
    assert not tables & namespaces


@pytest.mark.parametrize("allowed", ALLOWED)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ten_thousand_hostile_values_never_leave_the_namespace(template: str, allowed: str):
    names = hostile(TEMPLATES.index(template) * 10 + ALLOWED.index(allowed))
    assert len(set(names)) == COUNT
    ours = rules(template, allowed, field="x")
    admitted = made(ours.sort("t", pa.table({"x": names})), names)
    assert_tame(admitted, template, allowed, ours)
    assert 3 < len(admitted) < COUNT / 2  # good names do get through


def by_json(ours: RoutingRules, names: list[str]) -> RoutedChunk:
    values = [
        json.dumps({"x": name}, ensure_ascii=i % 2 == 0).encode() for i, name in enumerate(names)
    ]
    return ours.sort("t", peek(values, ours.fields))


def by_header(ours: RoutingRules, names: list[str]) -> RoutedChunk:
    pairs = [[{"key": "x", "value": b"good"}, {"key": "x", "value": n.encode()}] for n in names]
    headers = pa.array(pairs, HEADERS)
    return ours.sort("t", pa.table({"n": range(len(names))}), headers=headers)


def by_bytes(ours: RoutingRules, names: list[str]) -> RoutedChunk:
    return ours.sort("t", pa.table({"x": pa.array([n.encode() for n in names], pa.binary())}))


@pytest.mark.parametrize(
    ("how", "sort"),
    [({"field": "x"}, by_json), ({"header": "x"}, by_header), ({"field": "x"}, by_bytes)],
)
def test_nor_do_they_from_json_headers_and_bytes(how: Any, sort: Callable[..., RoutedChunk]):
    for allowed in ALLOWED[:2]:
        names = hostile(77)
        ours = rules("lake.{value}", allowed, **how)
        admitted = made(sort(ours, names), names)
        assert_tame(admitted, "lake.{value}", allowed, ours)
        straight = rules("lake.{value}", allowed, field="x")
        assert admitted == made(straight.sort("t", pa.table({"x": names})), names)


def test_nor_do_they_from_topics_and_groups():
    for template, how in (
        ("lake.{topic}", {}),
        ("lake.{group}", {"pattern": "(?s)(?P<group>.*)"}),
    ):
        ours = rules(template, "(?s).*", **how)
        admitted: dict[str, str] = {}
        for name in hostile(78):
            way = ours.of_topic(name)
            if isinstance(way, Route):
                (admitted[name],) = way.tables
        assert_tame(admitted, template, "(?s).*", ours)
        assert len(admitted) > 3


def test_nor_do_they_from_functions():
    for prefix in ("lake.", "", "lake.t_"):
        names = [prefix + name for name in hostile(79)]
        ours = rules("lake.{value}", "(?s).*", to=(), python=lambda rows: rows.column("x"))
        out = ours.sort("t", pa.table({"x": names}))
        admitted = made(out, names)
        assert all(name == table for name, table in admitted.items())
        own = {"lake.own", "lake.t_own", "deep.own.events"}
        rest = {
            name.removeprefix("lake."): table for name, table in admitted.items() if name not in own
        }
        assert_tame(rest, "lake.{value}", "(?s).*", ours)


def test_names_admitted_one_by_one_are_no_different():
    ours = rules("lake.{value}", "(?s).*", field="x")
    names = hostile(80)
    admitted = {name: f"lake.{name}" for name in names if not ours.admit(f"lake.{name}")}
    assert_tame(admitted, "lake.{value}", "(?s).*", ours)


def words() -> st.SearchStrategy[str]:
    pieces: Iterable[str] = [*PIECES, *GOOD, *TAKEN, "A", "Orders", "_"]
    return st.lists(st.one_of(st.sampled_from(list(pieces)), st.text(max_size=4)), max_size=5).map(
        "".join
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(words().filter(lambda w: not re.search("[\ud800-\udfff]", w)), max_size=12),
    st.sampled_from(TEMPLATES),
    st.sampled_from(ALLOWED),
)
def test_no_name_that_can_be_thought_of_leaves_the_namespace(
    values: list[str], template: str, allowed: str
):
    ours = rules(template, allowed, field="x")
    names = list(dict.fromkeys(values))
    admitted = made(ours.sort("t", pa.table({"x": pa.array(names, pa.string())})), names)
    assert_tame(admitted, template, allowed, ours)
