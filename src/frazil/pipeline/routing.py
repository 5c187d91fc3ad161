"""Decides which tables a record goes to. Runs on executors, after decoding. The driver builds the
same `RoutingRules` before the sink starts, which validates them.

In: the columns of a chunk of records of one topic, and their headers. Out: shares, groups of
records with the same route, and an `UndecodableRecord` for each record that no rule matches or for
which the table name is not allowed. Every record is in exactly one of them.

Rules are tried in order and the first that matches decides. Fields and headers are compared as
text: `true` and `false`, numbers as Python prints them, strings as they are, bytes as UTF-8. Null,
invalid UTF-8, lists, maps and structs match nothing. Each distinct text of a chunk is decided once,
and one sort cuts all shares, whatever the number of tables.

**Names from data are attack input.** A text inserted into a template must match the rule's
`allowed_names` as a whole and is never altered to fit. `TableNames.admit` lists the
restrictions that no setting lifts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.config.route_checks import check_routes
from frazil.config.sections import RouteConfig
from frazil.errors import ConfigError, Fatal
from frazil.formats.decode_result import UndecodableRecord
from frazil.kafka.record_batch import Longs
from frazil.pipeline.field_text import column_at, distinct_texts, header_values, is_text
from frazil.pipeline.table_names import TableNames, shown

#: Returned by a Python function for a record to be skipped.
SKIP = "(skip)"
#: Size of a step's route cache, which hostile data would fill without end.
_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class Route:
    """Records of a chunk with the same destination tables."""

    tables: tuple[str, ...]  # full names, templates filled in; empty: skipped by the rule
    index: Longs | None  # positions in the input; None: all of it
    rule: int  # number of the rule that matched; -1: no rules, one table
    envelope: str  # "" or "debezium"


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Why records have no route."""

    kind: str  # route: no rule matches | name: the table name is not allowed
    reason: str


@dataclass(frozen=True, slots=True)
class RoutedChunk:
    shares: list[Route]
    rejected: list[UndecodableRecord]


@dataclass(slots=True)
class _Step:
    """Adjacent rules of a topic that read the same field or header, decided together."""

    reads: str  # field | header | python | nothing
    name: str
    by_text: dict[str, int] = field(default_factory=dict)
    otherwise: int = -1  # the rule that takes any text
    ways: dict[Any, Route | NoRoute | None] = field(default_factory=dict)


class RoutingRules:
    """`routes` over the names of `[[table]]`, validated and compiled. Can be pickled.

    `reserved`: tables that no rule may write to. `known`: tables already created from templates.
    `room`: how many more may be created; None: any number.
    """

    def __init__(
        self,
        routes: Sequence[RouteConfig],
        tables: Sequence[str],
        *,
        reserved: Collection[str] = (),
        known: Collection[str] = (),
        room: int | None = None,
    ) -> None:
        self._given: dict[str, Any] = {"reserved": reserved, "known": known, "room": room}
        self._tables = tuple(tables)
        self.names = TableNames(tables, reserved, room)
        self._steps: dict[str, list[_Step]] = {}
        #: Modules of functions that are not installed on workers and travel pickled.
        self.travelling: list[ModuleType] = []
        check_routes(routes, tables)
        checked = [self._with_function(i, route) for i, route in enumerate(routes)]
        self._routes = tuple(checked)
        self._patterns = [re.compile(r.pattern) if r.pattern else None for r in checked]
        self._allowed = [re.compile(route.allowed_names) for route in checked]
        #: Dotted paths of the fields that rules read.
        self.fields = tuple(dict.fromkeys(route.field for route in checked if route.field))
        #: Whether a Python function routes records; it may read all columns.
        self.wants_rows = any(route.python for route in checked)
        self.wants_headers = self.wants_rows or any(route.header for route in checked)
        for name in known:
            self.names.take(name)

    def __reduce__(self) -> tuple[Any, ...]:
        # The functions are pickled themselves: a worker may not have their file.
        return functools.partial(RoutingRules, **self._given), (self._routes, self._tables)

    def again(self, known: Collection[str], room: int) -> RoutingRules:
        """The same rules after more tables were created."""
        given = {**self._given, "known": known, "room": room}
        return RoutingRules(self._routes, self._tables, **given)

    def changes(self, topic: str) -> bool:
        """Whether records of the topic may be change events; then records without a value are
        tombstones."""
        return any(
            route.envelope
            and (not route.topics or topic in route.topics)
            and (pattern is None or pattern.fullmatch(topic))
            for route, pattern in zip(self._routes, self._patterns, strict=True)
        )

    # ── routes ──────────────────────────────────────────────────────────────────────────────────

    def of_topic(self, topic: str) -> Route | NoRoute | None:
        """The route of all records of a topic; None: it depends on their values or headers."""
        if not self._routes:
            return Route(self._tables, None, -1, "")
        step = next(iter(self._of(topic)), None)
        if step is None:
            return self._unmatched(topic)
        return None if step.reads != "nothing" else self._way(step, topic, "")

    def sort(
        self,
        topic: str,
        rows: pa.Table,
        *,
        headers: pa.Array | None = None,
        origin: Mapping[str, pa.Array] | None = None,
    ) -> RoutedChunk:
        """Split `rows` of one topic by route. Python functions also see the columns `origin`."""
        count = rows.num_rows
        ways: dict[Route | NoRoute | None, int] = {None: 0}
        whole = self.of_topic(topic)
        chosen: Longs = np.full(count, 0 if whole is None else ways.setdefault(whole, 1), np.int64)
        for step in self._of(topic) if whole is None else ():
            at = np.flatnonzero(chosen == 0)
            if not len(at):
                break
            part = None if len(at) == count else at
            if step.reads == "python":
                codes, answers = self._asked(step.otherwise, _beside(rows, origin), part, len(at))
            elif step.reads == "nothing":
                codes, answers = np.zeros(len(at), np.int64), [""]
            else:
                by_field = step.reads == "field"
                column = (
                    column_at(rows, step.name) if by_field else header_values(headers, step.name)
                )
                column = pa.nulls(count) if column is None else column
                codes, answers = distinct_texts(
                    column if part is None else column.take(pa.array(part))
                )
            numbers = [
                ways.setdefault(self._way(step, topic, answer), len(ways)) for answer in answers
            ]
            chosen[at] = np.array([*numbers, 0], np.int64)[codes]  # the last is for null: code -1
        return _cut(chosen, list(ways), self._unmatched(topic))

    def template(self, table: str) -> str:
        """The name of the `[[table]]` that configures this table."""
        return self.names.template(table)

    def admit(self, name: str) -> str:
        """See `TableNames.admit`."""
        return self.names.admit(name)

    # ── deciding ────────────────────────────────────────────────────────────────────────────────

    def _of(self, topic: str) -> list[_Step]:
        """The steps, in order, that decide the route of a record of the topic."""
        if topic not in self._steps:
            self._steps[topic] = list(self._steps_of(topic))
        return self._steps[topic]

    def _steps_of(self, topic: str) -> Iterator[_Step]:
        step = _Step("", "")
        for i, route in enumerate(self._routes):
            pattern = self._patterns[i]
            if pattern and not pattern.fullmatch(topic):
                continue
            if route.topics and topic not in route.topics:
                continue
            at = "field" if route.field else "header" if route.header else "nothing"
            at = "python" if route.python else at
            if (at, route.field or route.header) != (step.reads, step.name) or at == "python":
                if step.reads:
                    yield step
                step = _Step(at, route.field or route.header)
            if step.otherwise < 0:
                step.by_text |= {text: i for text in route.values if text not in step.by_text}
                step.otherwise = -1 if route.values else i
            if at == "nothing":
                break  # later rules are never reached
        if step.reads:
            yield step

    def _way(self, step: _Step, topic: str, answer: Any) -> Route | NoRoute | None:
        """The route for a text or for the answer of a function; None: try the next rule."""
        if answer is None:
            return None
        if answer not in step.ways:
            if len(step.ways) >= _REMEMBERED:
                step.ways.clear()
            step.ways[answer] = self._decided(step, topic, answer)
        return step.ways[answer]

    def _decided(self, step: _Step, topic: str, answer: Any) -> Route | NoRoute | None:
        rule = step.by_text.get(answer, step.otherwise)
        if rule < 0:
            return None
        route = self._routes[rule]
        if route.skip or answer == (SKIP,):
            return Route((), None, rule, "")
        if step.reads == "python":
            named = [self.names.answered(table, self._allowed[rule]) for table in answer]
        else:
            pattern = self._patterns[rule]
            match = pattern.fullmatch(topic) if pattern else None
            words = {**(match.groupdict() if match else {}), "topic": topic, "value": answer}
            named = [self.names.filled(to, words, self._allowed[rule]) for to in route.to]
        names = tuple(dict.fromkeys(name for name, _ in named))
        bad = [why for _, why in named if why] or [
            why
            for name in names
            if name not in self.names.plain and (why := self.names.admit(name))
        ]
        return NoRoute("name", bad[0]) if bad else Route(names, None, rule, route.envelope)

    def _unmatched(self, topic: str) -> NoRoute:
        read = [f"{step.reads} {step.name}".strip() for step in self._of(topic)]
        seen = f"; looked at {', '.join(dict.fromkeys(read))}" if read else ""
        return NoRoute("route", f"cannot route a record of {topic}: no rule matches it{seen}")

    def _asked(
        self, rule: int, rows: pa.Table, index: Longs | None, count: int
    ) -> tuple[Longs, list[Any]]:
        """Call a Python function: the index of each row's answer, and the distinct answers."""
        call = self._routes[rule].python
        given = rows if index is None or not rows.num_columns else rows.take(pa.array(index))
        name = getattr(call, "__qualname__", repr(call))
        try:
            result = call(given)  # type: ignore[operator]
        except MemoryError:  # caused by a record, not by the function
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[:2][-1]  # the function's own line
            raise Fatal(
                f"cannot route by {name}: {type(error).__name__}: {error} "
                f"({last.filename}:{last.lineno})"
            ) from error
        if isinstance(result, pa.ChunkedArray):
            result = result.combine_chunks()
        if isinstance(result, str) or not hasattr(result, "__len__"):
            raise Fatal(
                f"cannot route by {name}: expected a name or null for each of {count} "
                f"records, found {type(result).__name__}"
            )
        if len(result) != count:
            raise Fatal(
                f"cannot route by {name}: expected answers for {count} records, found {len(result)}"
            )
        if isinstance(result, pa.Array) and is_text(result.type):
            codes, texts = distinct_texts(result)
            return codes, [None if text is None else (text,) for text in texts]
        answers: dict[Any, int] = {}
        values = result.to_pylist() if isinstance(result, pa.Array) else result
        codes = np.array([answers.setdefault(_names(one, name), len(answers)) for one in values])
        return codes.astype(np.int64), list(answers)

    # ── validation before the start ─────────────────────────────────────────────────────────────

    def _with_function(self, number: int, route: RouteConfig) -> RouteConfig:
        if not route.python:
            return route
        title = f"cannot use [[route]] {number + 1}"
        return replace(route, python=self._loaded(title, number, route.python))

    def _loaded(self, title: str, number: int, python: Any) -> Callable[[pa.Table], Any]:
        if callable(python):
            return python  # type: ignore[no-any-return]
        call, module = load(str(python), f"{title}: cannot load", f"frazil_route_{number + 1}")
        if not callable(call):
            raise ConfigError(f"{title}: python = {python!r} is not a function")
        if "site-packages" not in (module.__file__ or ""):
            self.travelling.append(module)
        return call  # type: ignore[no-any-return]


def load(python: str, doing: str, name: str) -> tuple[Any, ModuleType]:
    """Load a user's function, `module:function` or `file.py:function`. Returns it and its module;
    a file becomes a module called `name`."""
    where, _, function = python.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(name, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module  # cloudpickle looks for it here
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        return getattr(module, function), module
    except (ImportError, AttributeError, OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{doing} python = {python!r}: {type(error).__name__}: {error}",
            hint="module:function of an installed module, or file.py:function beside the config",
        ) from None


def _names(answer: Any, function: str) -> tuple[str | None, ...] | None:
    """The table names in one answer of a function; None and an empty list are no match."""
    if answer is None or isinstance(answer, str):
        return None if answer is None else (answer,)
    if isinstance(answer, (list, tuple)) and all(
        one is None or isinstance(one, str) for one in answer
    ):
        return tuple(answer) or None
    raise Fatal(
        f"cannot route by {function}: expected a table's name, a list of them or null, "
        f"found {shown(str(answer))} ({type(answer).__name__})"
    )


def _cut(chosen: Longs, ways: list[Route | NoRoute | None], unmatched: NoRoute) -> RoutedChunk:
    """Split positions by route, with one sort instead of a mask per route."""
    shares: list[Route] = []
    rejected: list[UndecodableRecord] = []
    small = chosen.astype(np.uint16) if len(ways) <= 1 << 16 else chosen  # sorted by radix
    order: Longs = np.argsort(small, kind="stable")
    ends = np.searchsorted(small[order], np.arange(len(ways)), side="right").tolist()
    for way, start, end in zip(ways, [0, *ends], ends, strict=False):
        if start == end:
            continue
        if isinstance(way, Route):
            every = end - start == len(order)
            shares.append(replace(way, index=None if every else order[start:end]))
        else:
            why = way or unmatched
            rejected.extend(
                UndecodableRecord(i, why.kind, why.reason) for i in order[start:end].tolist()
            )
    rejected.sort(key=lambda record: record.index)
    return RoutedChunk(shares, rejected)


def _beside(rows: pa.Table, origin: Mapping[str, pa.Array] | None) -> pa.Table:
    """`rows` with the columns `origin`, which replace columns of the same name."""
    kept = [name for name in rows.schema.names if name not in (origin or {})]
    if not origin:
        return rows
    return pa.table({**{name: rows.column(name) for name in kept}, **origin})
