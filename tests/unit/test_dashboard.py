"""The dashboard and the alert rules: every expression asks for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from frazil.monitoring.metrics import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "frazil.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/frazil.rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
RUNBOOK = (ROOT / "docs" / "guide" / "runbook.md").read_text()
#: Labels that Prometheus adds to each series.
TARGET = {"job", "instance"}
#: series → its labels
SERIES = {metric.name: {*metric.label_names, *TARGET} for metric in METRICS}
SERIES |= {
    f"{metric.name}_{part}": {*metric.label_names, *TARGET, *(["le"] if part == "bucket" else [])}
    for metric in METRICS
    if metric.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
SERIES |= {"frazil_build_info": {"version", "python", *TARGET}, "up": TARGET}
SERIES |= {f"process_{name}": TARGET for name in ("open_fds", "cpu_seconds_total")}


def parsed(text: str) -> Any:
    """An expression; Grafana's own durations become one that Prometheus reads."""
    return promql.parse(text.replace("$__rate_interval", "5m"))


def children(node: Any) -> Iterator[Any]:
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield child
    yield from getattr(node, "args", None) or ()


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in children(node):
        yield from nodes(child)


def selectors(text: str) -> list[Any]:
    return [node for node in nodes(parsed(text)) if isinstance(node, promql.VectorSelector)]


def problems(text: str) -> list[str]:
    """What is wrong with an expression; and that of its labels which no series has."""
    wrong = []
    labels: set[str] = set()
    asked: set[str] = set()
    for node in nodes(parsed(text)):
        if isinstance(node, promql.VectorSelector):
            if node.name not in SERIES:
                wrong.append(f"no series {node.name}")
                continue
            labels |= SERIES[node.name]
            own = {matcher.name for matcher in node.matchers.matchers}
            wrong += [f"{node.name} has no label {name}" for name in own - SERIES[node.name]]
        modifier = getattr(node, "modifier", None)
        if isinstance(modifier, promql.AggModifier):
            asked |= set(modifier.labels)
        elif modifier is not None and getattr(modifier, "matching", None) is not None:
            asked |= set(modifier.matching.labels)
    return wrong + [f"no label {name}" for name in sorted(asked - labels)]


def labels_of(node: Any) -> set[str]:
    """Labels of the result of an expression."""
    if isinstance(node, promql.VectorSelector):
        return SERIES[node.name]
    if isinstance(node, promql.AggregateExpr) and str(node.op) not in ("topk", "bottomk"):
        return set(node.modifier.labels) if node.modifier else set()
    labels: set[str] = set()
    for child in children(node):
        labels |= labels_of(child)
    if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
        labels -= {"le"}
    return labels


PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
ANNOTATIONS = [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
EXPRESSIONS = [
    *((title, target["expr"]) for title, target in TARGETS),
    *(("annotation", text) for text in ANNOTATIONS),
    *((rule["alert"], rule["expr"]) for rule in RULES),
]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('sum by (sink) (rate(frazil_rows_total{table="a"}[5m])) > 0', []),
        ("frazil_rows > 1", ["no series frazil_rows"]),
        ("1 - frazil_up{topic='a'}", ["frazil_up has no label topic"]),
        ("max by (kind) (frazil_lag_seconds)", ["no label kind"]),
        ("frazil_up and on (topic) frazil_epoch", ["no label topic"]),
        ("abs(-(rate(frazil_x_total[5m])))", ["no series frazil_x_total"]),
        ("max_over_time((frazil_y)[5m:1m])", ["no series frazil_y"]),
    ],
)
def test_wrong_expressions_are_found(text: str, wrong: list[str]):
    assert problems(text) == wrong


@pytest.mark.parametrize(("where", "text"), EXPRESSIONS)
def test_expressions_ask_for_series_and_labels_that_exist(where: str, text: str):
    assert problems(text) == []


RULE_TESTS = yaml.safe_load((ROOT / "deploy/prometheus/frazil.test.yml").read_text())


def test_the_tests_of_the_rules_are_about_rules_and_series_that_exist():
    """What `promtool test rules` would not find: it takes any series for one."""
    rules = {rule["alert"]: rule for rule in RULES}
    assert RULE_TESTS["rule_files"] == ["frazil.rules.yml"]
    for test in RULE_TESTS["tests"]:
        given = [problems(series["series"]) for series in test["input_series"]]
        assert given == [[] for _ in given]
        names = {selectors(series["series"])[0].name for series in test["input_series"]}
        for alert in test["alert_rule_test"]:
            rule = rules[alert["alertname"]]
            assert {selector.name for selector in selectors(rule["expr"])} <= names, rule["alert"]
            for expected in alert["exp_alerts"]:
                assert expected["exp_labels"]["severity"] == rule["labels"]["severity"]
                assert set(expected["exp_annotations"]) == set(rule["annotations"])
        for series in test["input_series"]:
            values = series["values"].split()
            assert all(re.fullmatch(r"-?\d+(\+\d+)?(x\d+)?", value) for value in values), values


def test_every_metric_is_on_the_dashboard():
    shown = {selector.name for _, target in TARGETS for selector in selectors(target["expr"])}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert {metric.name for metric in METRICS} <= shown


def test_legends_and_texts_of_alerts_have_labels_that_exist():
    wrong = []
    for where, expression, text, pattern in (
        *((t, x["expr"], x["legendFormat"], r"\{\{\s*(\w+)\s*\}\}") for t, x in TARGETS),
        *((r["alert"], r["expr"], str(r["annotations"]), r"\$labels\.(\w+)") for r in RULES),
    ):
        lacking = set(re.findall(pattern, text)) - labels_of(parsed(expression))
        wrong += [(where, text, lacking)] if lacking else []
    assert wrong == []


def test_panels_have_a_place_of_their_own_and_one_data_source():
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        own = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert x + w <= 24
        assert not own & places, panel["title"]
        places |= own
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert {target["datasource"]["uid"] for _, target in TARGETS} == {"${datasource}"}


def test_variables_of_the_dashboard_are_declared_and_in_every_expression():
    declared = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    for _, target in TARGETS:
        for selector in selectors(target["expr"]):
            own = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            expected = {"job", "instance", "sink"} & SERIES[selector.name]
            assert {name for name in expected if own.get(name) == f"${name}"} == expected
    for name in ("job", "instance", "sink"):
        selector, label = re.fullmatch(  # type: ignore[union-attr]
            r"label_values\((.*), (\w+)\)", declared[name]["definition"]
        ).groups()
        assert (problems(selector), label) == ([], name)


def anchors(text: str) -> set[str]:
    """Names by which a page's sections are linked."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_alert_is_in_the_runbook():
    names = [rule["alert"] for rule in RULES]
    assert re.findall(r"^\| `(Frazil\w+)` \|", RUNBOOK, re.M) == names
    assert {rule["annotations"]["runbook"] for rule in RULES} <= anchors(RUNBOOK)
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}
