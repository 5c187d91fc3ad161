"""Errors planted in a good config: `frazil check` lists exactly those, each at its place."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from frazil.config.error_list import every_error

Document = dict[str, Any]


def good() -> Document:
    return {
        "sink": {"id": "orders", "topics": ["orders", "refunds"], "commit_interval": "1m"},
        "kafka": {"bootstrap.servers": "127.0.0.1:1", "sasl.password": "env:PASSWORD"},
        "decode": {
            "format": "json",
            "undeclared": "drop",
            "columns": {"id": "long", "at": "timestamp", "kind": "string", "x": "long"},
            "key_format": "json",
            "key_columns": {"id": "long"},
        },
        "catalog": {"type": "hadoop", "warehouse": "/lake"},
        "spark": {"spark.master": "local[1]"},
        "table": [
            {
                "name": "shop.orders",
                "mode": "upsert",
                "key": ["id"],
                "select": ["id", "at", "kind as kind", "sha256(kind, 'env:SALT') as hash"],
            },
            {
                "name": "shop.refunds",
                "partition_by": ["day(at)", "kind"],
                "sort_by": ["x desc", "id"],
                "headers": {"trace": "X-Trace", "span": "X-Span"},
                "event_time": "at",
            },
        ],
        "route": [{"topics": ["refunds"], "to": ["shop.refunds"]}, {"to": ["shop.orders"]}],
        "dead_letters": {"table": "shop.dead", "max_fraction": 0.5},
        "metrics": {"address": "127.0.0.1:9464"},
        "health": {"max_wait": "5m"},
        "log": {"level": "INFO"},
        "notify": {"webhook": "env:HOOK", "events": ["failed", "fenced"]},
    }


def put(value: Any, *path: str | int) -> tuple[Callable[[Document], None], tuple[str, ...]]:
    """A wrong value, and the place at which it is reported: no deeper than a key."""

    def plant(document: Document) -> None:
        inside: Any = document
        for word in path[:-1]:
            inside = inside[word]
        inside[path[-1]] = value

    depth = 3 if path[0] in ("table", "route") else 2
    if path[:2] in (("decode", "columns"), ("decode", "key_columns"), ("decode", "registry")):
        depth = 3
    return plant, tuple(map(str, path[:depth]))


PLANTS = {
    "an id": put("a b", "sink", "id"),
    "a duration": put("soon", "sink", "commit_interval"),
    "a size": put("much", "sink", "max_pending_bytes"),
    "a count": put(0, "sink", "max_pending_batches"),
    "a type": put([1], "sink", "max_records_per_trigger"),
    "a trigger": put("once", "sink", "trigger"),
    "a client": put("kafkacat", "sink", "kafka_client"),
    "a topic": put("a b", "sink", "topics", 1),
    "an unknown key": put(1, "sink", "colour"),
    "a pattern beside topics": put("or.*", "sink", "topic_pattern"),
    "a secret": put("hunter2", "kafka", "sasl.password"),
    "a forbidden setting": put("g", "kafka", "group.id"),
    "a broken list": put([1], "kafka", "client.id"),
    "a declared type": put("lnog", "decode", "columns", "id"),
    "another declared type": put("decimal(99,1)", "decode", "columns", "at"),
    "a key's type": put("lnog", "decode", "key_columns", "id"),
    "an undeclared": put("ignore", "decode", "undeclared"),
    "a placeholder": put("hex:0", "decode", "unavailable_value"),
    "a catalog": put("resst", "catalog", "type"),
    "a master": put("mesos://x", "spark", "spark.master"),
    "a mode": put("upsrt", "table", 0, "mode"),
    "an item": put("cast(id as", "table", 0, "select", 0),
    "another item": put("sha256(kind, 'salt') as hash", "table", 0, "select", 3),
    "a codec": put("zst", "table", 0, "compression"),
    "a format": put(9, "table", 0, "format_version"),
    "a key of a table": put(1, "table", 0, "colour"),
    "a column without a name": put("", "table", 0, "offset_column"),
    "a term": put("x y", "table", 1, "partition_by", 0),
    "a transform": put("dya(x)", "table", 1, "partition_by", 1),
    "an order": put("x descc", "table", 1, "sort_by", 0),
    "another order": put("bucket(x)", "table", 1, "sort_by", 1),
    "a branch": put("", "table", 1, "branch"),
    "a file size": put("0", "table", 1, "target_file_size"),
    "a header": put("", "table", 1, "headers", "trace"),
    "another header": put("", "table", 1, "headers", "span"),
    "columns": put(0, "table", 1, "max_columns"),
    "a routed topic": put("a b", "route", 0, "topics", 0),
    "a fraction": put(3, "dead_letters", "max_fraction"),
    "a number": put(-1, "dead_letters", "max_count"),
    "a dead letter key": put("x", "dead_letters", "kind"),
    "an address": put("x:y:z", "metrics", "address"),
    "labels": put(0, "metrics", "max_labels"),
    "a wait": put("soon", "health", "max_wait"),
    "a level": put("LOUD", "log", "level"),
    "an event": put("faild", "notify", "events", 0),
    "another event": put("fencd", "notify", "events", 1),
    "a section": put({"x": 1}, "metrocs"),
    "lateness": put({"allowed_lateness": "x"}, "completeness"),
}
#: Where a section is made for the error, or is unknown.
PLANTS["lateness"] = PLANTS["lateness"][0], ("completeness", "allowed_lateness")
#: One error of a section hides nothing, but `did you mean` leaves open what the meant one says.
APART = ({"a section", "an address"}, {"a section", "labels"})


def listed(names: list[str], folder: Path) -> tuple[Counter[tuple[str, ...]], list[str]]:
    document = good()
    for name in names:
        PLANTS[name][0](document)
    path = folder / "sink.toml"
    path.write_text(tomli_w.dumps(document))
    result = every_error(path, {})
    for error in result.errors:
        assert result.location(*error.path), error
        assert f"({result.location(*error.path)})" in error.message
    return Counter(e.path for e in result.errors), [e.message for e in result.errors]


def expect(names: list[str], folder: Path) -> None:
    paths, messages = listed(names, folder)
    assert paths == Counter(PLANTS[name][1] for name in names), (names, messages)


def test_a_good_config_has_no_error(tmp_path: Path):
    expect([], tmp_path)


@pytest.mark.parametrize("name", PLANTS)
def test_an_error_is_listed_with_its_place_and_without_consequences(name: str, tmp_path: Path):
    expect([name], tmp_path)


def test_no_error_hides_another(tmp_path: Path):
    for pair in itertools.islice(itertools.combinations(PLANTS, 2), 0, None, 5):
        if set(pair) not in APART:
            expect(list(pair), tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.sets(st.sampled_from(sorted(set(PLANTS) - {"a section"}))))
def test_errors_that_were_planted_are_those_that_are_listed(names: set[str]):
    with tempfile.TemporaryDirectory() as folder:
        expect(sorted(names), Path(folder))
