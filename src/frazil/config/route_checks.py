"""Checks of `[[route]]`: what a rule says, where it leads, and whether a record can reach it.

In: the rules and the names of all tables. Out: nothing; the first rule that no sink can use raises
`ConfigError`, with its path. Loads no function and asks no server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from frazil.config.messages import within
from frazil.config.rules import Rule, require
from frazil.config.sections import ENVELOPES, RouteConfig
from frazil.errors import ConfigError


def check_routes(routes: Sequence[RouteConfig], tables: Sequence[str]) -> None:
    require(route_rules(routes, tables))


def route_rules(routes: Sequence[RouteConfig], tables: Sequence[str]) -> Iterator[Rule]:
    names = [("table", str(number), "name") for number in range(len(tables))]
    for number, route in enumerate(routes):
        at = ("route", str(number))
        check = partial(_check_route, f"cannot use [[route]] {number + 1}", route, tables)
        yield Rule(partial(_inside, at, check), (at, *names))
    yield Rule(partial(_check_any, routes, tables), (("route",), *names))
    yield Rule(partial(_check_order, routes), (("route",), *names))


def _inside(at: tuple[str, ...], check: Callable[[], None]) -> None:
    with within(*at):
        check()


def _check_any(routes: Sequence[RouteConfig], tables: Sequence[str]) -> None:
    if not routes and (len(tables) != 1 or "{" in tables[0]):
        raise ConfigError(
            "cannot route without [[route]]: expected one [[table]] without "
            f"{{words}} in its name, found {', '.join(tables)}",
            path=("route",),
        )


def _check_route(title: str, route: RouteConfig, tables: Sequence[str]) -> None:
    groups = _groups(title, route)
    ends = [key for key in ("to", "skip", "python") if getattr(route, key)]
    for wrong, key, why in (
        (
            len(ends) != 1,
            "",
            f"expected one of to, skip and python, found {' and '.join(ends) or 'none'}",
        ),
        (
            route.topics and route.pattern,
            "pattern",
            "expected either topics or pattern, found both",
        ),
        (route.field and route.header, "header", "expected either field or header, found both"),
        (
            route.values and not (route.field or route.header),
            "values",
            "values need a field or a header",
        ),
        (
            route.python and (route.field or route.header),
            "python",
            "a function looks at fields and headers itself; expected python without field and "
            "header",
        ),
        (
            route.field and not all(route.field.split(".")),
            "field",
            f"field {route.field!r} is no path",
        ),
        (
            groups & {"topic", "value"},
            "pattern",
            "{topic} and {value} mean something else; expected another name for the pattern's "
            "group",
        ),
        (
            route.envelope not in ENVELOPES,
            "envelope",
            f"expected envelope = 'debezium' or none, found {route.envelope!r}",
        ),
    ):
        if wrong:
            raise ConfigError(f"{title}: {why}", path=(key,) if key else ())
    words = groups | {"topic"} | ({"value"} if route.field or route.header else set())
    for to in route.to:
        if to not in tables:
            raise ConfigError(
                f"{title}: {to} is not a [[table]]; expected one of {', '.join(tables)}",
                path=("to",),
            )
        for word in re.findall(r"\{(\w+)\}", to):
            if word not in words:
                raise ConfigError(
                    f"{title}: {{{word}}} in {to} is not known; known are "
                    f"{', '.join(sorted(words))}",
                    path=("to",),
                )


def _groups(title: str, route: RouteConfig) -> set[str]:
    """The names of groups in the pattern; raises for what is no pattern."""
    groups: set[str] = set()
    for key in ("pattern", "allowed_names"):
        try:
            pattern = re.compile(getattr(route, key))
        except re.error as error:
            fact = f"{title}: {key} is not a regular expression: {error}"
            raise ConfigError(fact, path=(key,)) from None
        groups |= set(pattern.groupindex) if key == "pattern" else set()
    return groups


def _check_order(routes: Sequence[RouteConfig]) -> None:
    """Every rule can be reached: no rules before it take all of its records."""
    topics: dict[str, int] = {}  # decided by an earlier rule, whatever the record
    patterns: list[tuple[int, re.Pattern[str]]] = []  # and patterns of such topics
    values: dict[tuple[object, ...], dict[str, int]] = {}  # and values of one field or header
    for number, route in enumerate(routes):
        before = [
            topics.get(topic, next((n for n, p in patterns if p.fullmatch(topic)), -1))
            for topic in route.topics or [""]
        ]
        if route.pattern:
            before = [next((n for n, p in patterns if p.pattern == route.pattern), before[0])]
        reads = bool(route.field or route.header)
        if reads and min(before) < 0:
            decided = values.setdefault(
                (route.topics, route.pattern, route.field, route.header), {}
            )
            texts = route.values or (_ANY,)
            before = [decided.get(_ANY, decided.get(text, -1)) for text in texts]
            decided |= {text: number for text in texts if text not in decided}
        if min(before) >= 0:
            raise ConfigError(
                f"cannot use [[route]] {number + 1}: no record reaches it, since "
                f"[[route]] {min(before) + 1} takes all before",
                path=("route", str(number)),
            )
        if reads or route.python:
            continue
        topics |= {topic: number for topic in route.topics if topic not in topics}
        if not route.topics:
            patterns.append((number, re.compile(route.pattern or ".*", re.DOTALL)))


#: Stands for any value of a field; no text.
_ANY = "\0"
