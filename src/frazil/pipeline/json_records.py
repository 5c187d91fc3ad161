"""JSON records, which are decoded by the schema of their table. Runs on executors.

In: the values of a chunk. Out, in the `ChunkResult`: rows, deletes and rejections. Records with
fields that the table lacks add up to a need of the table, by votes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from frazil.arrow import default_values
from frazil.arrow.byte_slices import ByteSlices
from frazil.formats import debezium, json_inference
from frazil.formats.connect_schema import Named
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.formats.json_columns import UnexpectedJson, wanted
from frazil.formats.json_values import IGNORED
from frazil.formats.unavailable_value import placeholder
from frazil.kafka.record_batch import Longs
from frazil.pipeline.chunk_result import ChunkWork, Rejection, among, nth
from frazil.pipeline.evolution import together
from frazil.pipeline.field_text import peek
from frazil.pipeline.fitting import OP, UNAVAILABLE, TableFitter, not_carried, table_changes
from frazil.pipeline.json_source import JsonSource
from frazil.pipeline.missing_columns import add_need, voted
from frazil.pipeline.routing import Route
from frazil.pipeline.table_plan import LOG, ChunkPlan, TablePlan

JSON = RecordFormat("json")
#: Size of the cache of wanted table changes, which hostile records would fill without end.
_MOST_WANTS = 1_000


class JsonRecords(TableFitter):
    """Processes records in JSON."""

    def __init__(self, plan: ChunkPlan) -> None:
        super().__init__(plan)
        self._decoders: dict[str, Decoder] = {}
        #: the fields that are read for a table
        self._shapes: dict[str, pa.Schema] = {}
        self._sources: dict[str, JsonSource] = {}
        self._read: dict[str, dict[str, pa.Field]] = {}
        self._verdicts: dict[tuple[str, str], str | bool] = {}
        self._wants: dict[tuple[str, str], str] = {}

    def process(self, work: ChunkWork, way: Route | None) -> None:
        """Process one chunk."""
        values = ByteSlices.of(work.opened.values)
        present: Longs | None = None
        with_field = None
        if self._changes(work):  # a tombstone repeats the delete event before it
            present = np.flatnonzero(~values.nulls)
            work.result.skipped += len(values) - len(present)
        if way is not None:
            shares = [replace(way, index=present)]
        else:
            assert self._rules is not None
            texts = values if present is None else values.take(present)
            rows = peek(texts, self._rules.fields)
            with_field = np.zeros(len(values), bool)  # where a rule found one of its fields
            for column in rows.columns:
                with_field[slice(None) if present is None else present] |= (
                    column.is_valid().to_numpy()
                )
            if self._rules.wants_rows:
                rows = rows.append_column("value", texts.to_arrow())
            routes = self._sorted(work, rows, present)
            shares = [replace(route, index=among(present, route.index)) for route in routes]
        for share in shares:
            at = share.index
            texts = values if at is None else values.take(at)
            if not share.tables:
                self._skip_json(work, texts, at, None if way else with_field)
                continue
            if share.envelope:
                self._changes_json(work, share, texts, at)
            else:
                for name in share.tables:
                    self._json_into(work, name, texts, at, np.zeros(len(texts), bool))

    def _changes_json(
        self, work: ChunkWork, share: Route, changes: Sequence[bytes | None], at: Longs | None
    ) -> None:
        unwrapped = debezium.unwrap_json(changes)
        work.result.reject_all(unwrapped.rejected, at, share.tables)
        present = [i for i, row in enumerate(unwrapped.rows) if row is not None]
        # The others are messages, and tombstones in Connect's wrapper.
        work.result.skipped += len(changes) - len(present) - len(unwrapped.rejected)
        if not present:
            return
        where = among(at, np.array(present, np.int64))
        gone = np.array([i in unwrapped.deleted for i in present], bool)
        for name in share.tables:
            rows = [self._written(work, name, unwrapped, i) for i in present]
            self._moved_json(work, name, [changes[i] for i in present], rows, where)
            self._json_into(work, name, rows, where, gone)

    def _written(
        self, work: ChunkWork, name: str, unwrapped: debezium.UnwrappedChanges, i: int
    ) -> bytes:
        """A row as the columns of the table can read it."""
        row, named = unwrapped.rows[i] or b"", unwrapped.named[i]
        if not named:
            return row
        row = debezium.written(row, named, self._fields(name))
        work.named[row] = named
        return row

    def _fields(self, name: str) -> Mapping[str, pa.Field]:
        """The fields of records that are read for a table, as far as their types are known."""
        if name not in self._read:
            plan, source = self._tables.get(name), self._source(name)
            shape = source.shape(source.fixed if plan is None else plan.columns)
            self._read[name] = {field.name: field for field in shape}
        return self._read[name]

    def _skip_json(
        self, work: ChunkWork, values: ByteSlices, at: Longs | None, with_field: Any
    ) -> None:
        """Skip values by a rule. A value in which the rules found no field is rejected if it is
        not valid JSON."""
        work.result.skipped += len(values)
        if with_field is None:
            return
        where = np.arange(len(values)) if at is None else at
        without = np.flatnonzero(~with_field[where])
        objects = pa.schema([], {IGNORED: b"*"})
        _, broken = Decoder(self._plan.format, objects).decode(values.take(without))
        broken = [record for record in broken if record.kind != "shape"]
        work.result.skipped -= len(broken)
        work.result.reject_all(broken, where[without])

    def _moved_json(
        self,
        work: ChunkWork,
        name: str,
        changes: Sequence[bytes | None],
        after: Sequence[bytes | None],
        at: Longs | None,
    ) -> None:
        plan = self._tables.get(name)
        if plan is None or not plan.key or name in work.below:
            return
        fields = self._key_fields(name, plan)
        if not fields:  # a change of a key that is Kafka's own is two records
            return
        pairs = {
            i: (_ordered_json(pair[0], newer or b"", self._order_path(name, plan)), pair[1])
            for i, (change, newer) in enumerate(zip(changes, after, strict=True))
            if (pair := debezium.keys_json(change, list(fields.values()), self._fields(name)))
            is not None
        }
        if not pairs:
            return
        former, current = zip(*pairs.values(), strict=True)
        rows, some, _ = self._read_keys(name, plan, JSON, plan.needs_deletes, former)
        now, others, _ = self._read_keys(name, plan, JSON, plan.key_columns, current)
        place = {int(position): i for i, position in enumerate(others)}
        # A row with an unreadable new key is rejected, and the old row stays.
        moved = np.array(
            [
                i
                for i, position in enumerate(some.tolist())
                if position in place
                and any(not rows[n][i].equals(now[n][place[position]]) for n in plan.key)
            ],
            np.int64,
        )
        where = among(at, np.array(list(pairs), np.int64)[some[moved]])
        self._fitted(work, name, plan, rows.take(moved), where, None, work.result.left)

    def _json_into(
        self,
        work: ChunkWork,
        name: str,
        values: Sequence[bytes | None],
        at: Longs | None,
        deleted: Any,
    ) -> None:
        """Process JSON values for one table. `deleted`: mask of the values that are deletes."""
        if name in work.below:
            return
        plan = self._tables.get(name)
        if self._mode(name):
            where = np.arange(len(values)) if at is None else at
            values = ByteSlices.of(values)
            nulls = values.nulls
            self._tombstones(work, name, where[nulls])
            if plan is not None and plan.key:
                rows_gone = [values[i] or b"" for i in np.flatnonzero(deleted).tolist()]
                path = self._order_path(name, plan)
                texts = [_ordered_json(text, text, path) for text in rows_gone]
                self._by_keys(work, name, plan, JSON, texts, where[deleted], plan.needs_deletes)
                nulls |= deleted
            kept = np.flatnonzero(~nulls)
            values, at = values.take(kept), where[kept]
            if not values:
                return
        if plan is None:
            if name in self._refused:
                self._reject(work, name, self._refused[name], len(values), at, None)
            else:
                learn = self._learn if self._source(name).inferring else self._declare
                _, reasons = learn(work, name, None, enumerate(values))
                for i, record in reasons.items():
                    self._unlike(work, name, record, nth(at, i))
            return
        if name not in self._decoders and not self._prepared(work, name, plan, len(values), at):
            return
        groups, rejected = self._decoders[name].decode(values)
        for group in groups:
            rows = _with_defaults(self._shapes[name], group, values)
            for part, positions in self._selected(work, name, rows, among(at, group.index), None):
                self._fit_part(work, name, plan, part, positions)
        reasons = {record.index: record for record in rejected}
        misshapen = [i for i, record in reasons.items() if record.kind == "shape"]
        if misshapen and plan.aliases and self._selects.plan(name) is None:
            misshapen = self._by_old_names(work, name, plan, values, misshapen, at)
        later = set[int]()
        learning = plan.evolution == "evolve" and self._source(name).inferring
        if misshapen and learning and name not in self._refused:
            named = ((i, values[i]) for i in misshapen)
            later, misfits = self._learn(work, name, plan, named)
            reasons |= misfits
        unlike = set(misshapen)
        for i, record in reasons.items():
            if i not in later and (record.kind != "shape" or i in unlike):
                self._unlike(work, name, record, nth(at, i))

    def _prepared(
        self, work: ChunkWork, name: str, plan: TablePlan, count: int, at: Longs | None
    ) -> bool:
        """Can records be read for the table? Otherwise it must change, or they are rejected."""
        # The table's own columns fit; declared and metadata columns can be missing.
        source = self._source(name)
        expected = source.expected(plan.columns)
        if verdict := self._verdict(plan, expected, {}):
            if verdict is not True:
                self._reject(work, name, verdict, count, at, None)
            else:
                work.result.need(name, expected, {})
            return False
        self._shapes[name] = shape = source.shape(plan.columns)
        loosened = default_values.loosened(shape).with_metadata(shape.metadata)
        self._decoders[name] = Decoder(self._plan.format, loosened)
        return True

    def _source(self, name: str) -> JsonSource:
        """How records of a table are read."""
        if name not in self._sources:
            select, key_format = self._selects.plan(name), self._plan.key_format
            self._sources[name] = JsonSource(
                self._plan.format,
                select.selection if select else None,
                key_format.declared if key_format else pa.schema([]),
                self._mode(name) == LOG,
            )
        return self._sources[name]

    def _fit_part(
        self, work: ChunkWork, name: str, plan: TablePlan, rows: pa.Table, at: Longs | None
    ) -> None:
        """Fit rows into the table. A select may give columns that the table lacks."""
        verdict: str | bool = False
        if self._selects.plan(name) is not None:
            key = (name, rows.schema.to_string())
            if key not in self._verdicts:
                self._verdicts[key] = self._selectable(plan, rows.schema)
            verdict = self._verdicts[key]
        if verdict is True:
            work.result.need(name, rows.schema, {})
        elif verdict:
            self._reject(work, name, verdict, len(rows), at, None)
        else:
            self._fitted(work, name, plan, rows, at, None)

    def _selectable(self, plan: TablePlan, columns: pa.Schema) -> str | bool:
        """As `_verdict`, but nothing becomes optional: an object without a field implies nothing
        about the next."""
        if plan.evolution != "evolve":
            return self._verdict(plan, columns, {})
        schema_changes = table_changes(plan, columns, plan.aliases)
        if schema_changes.impossible:
            return f"cannot fit {plan.shape.name}: {'; '.join(schema_changes.impossible)}"
        return bool(schema_changes.add or schema_changes.widen or schema_changes.rename)

    def _unlike(self, work: ChunkWork, name: str, rejected: UndecodableRecord, at: int) -> None:
        rejection = Rejection(at, rejected.kind, rejected.reason, (name,))
        if rejected.kind == "shape":
            self._misfit(work, replace(rejection, kind="misfit"))
        else:
            work.result.reject(rejection)

    def _by_old_names(
        self,
        work: ChunkWork,
        name: str,
        plan: TablePlan,
        values: Sequence[bytes | None],
        misshapen: list[int],
        at: Longs | None,
    ) -> list[int]:
        """Decode records that use former names of renamed columns. Returns the records that
        still do not fit."""
        newer = _newer(plan)
        texts: list[bytes | None] = [_under(values[i], newer) for i in misshapen]
        groups, rejected = self._decoders[name].decode(texts)
        for group in groups:
            where = among(np.array(misshapen, np.int64), group.index)
            rows = _with_defaults(plan.columns, group, texts)
            self._fitted(work, name, plan, rows, among(at, where), None)
        return [misshapen[record.index] for record in rejected]

    def _learn(
        self,
        work: ChunkWork,
        name: str,
        plan: TablePlan | None,
        values: Iterable[tuple[int, bytes | None]],
    ) -> tuple[set[int], dict[int, UndecodableRecord]]:
        """Infer a need of the table from JSON values. Returns the positions of values that would
        fit after the change, and the reasons why the others never fit. Each wanted change is
        possible by itself; where two contradict each other, votes decide."""
        source = self._source(name)
        base = source.fixed if plan is None else plan.columns
        judged = default_values.loosened(source.judged(base))
        own_names = plan is None or source.selection is not None
        newer = {} if own_names or plan is None else _newer(plan)
        renames = {} if own_names or plan is None else _renames(plan)
        fitting, reasons, votes = set[int](), dict[int, UndecodableRecord](), json_inference.Votes()
        for i, value in values:
            if value is None:
                reasons[i] = UndecodableRecord(i, "null", "cannot read the value: found null")
                continue
            try:
                text = _under(value, newer) if newer else source.learned(value)
                known = {*base.names, *renames}
                named = source.names(_kinds(value, work.named.get(value, {})))
                typed = {n: k for n, k in named.items() if n not in known}
                # A column with a declared type is judged as if the table had it.
                whole = pa.schema(
                    [*judged, *((n, json_inference.arrow(k, n)) for n, k in typed.items())]
                )
                kind = wanted(text or b"", whole, renames)
                kind = _in_order(text or b"", kind | typed) if typed else kind
                if plan is not None and source and not kind:
                    continue  # a declared or computed column does not take it
                self._refuse_placeholder(name, kind)
                if plan is None:
                    kind = json_inference.undivided(kind, self._made(name).undivided)
                if reason := self._unchangeable(name, plan, kind):
                    raise UnexpectedJson("shape", reason)
            except UnexpectedJson as error:
                reasons[i] = UndecodableRecord(i, error.kind, error.reason)
                continue
            fitting.add(i)
            json_inference.vote(votes, kind)
        if fitting:
            if self._mode(name) == LOG and "_op" not in {*base.names, *votes["fields"]}:
                votes["fields"]["_op"] = [1, sys.maxsize, {"kinds": {"string": 1}}]  # the last
            aliases = {} if plan is None else plan.aliases
            most = self._most_columns(name, plan)
            add_need(work.result.needs, name, voted(votes, base, aliases, most))
        return fitting, reasons

    def _declare(
        self,
        work: ChunkWork,
        name: str,
        plan: TablePlan | None,
        values: Iterable[tuple[int, bytes | None]],
    ) -> tuple[set[int], dict[int, UndecodableRecord]]:
        """As `_learn` for a table that is not there, where only declared fields become columns."""
        columns = self._source(name).fixed
        if self._mode(name) == LOG and "_op" not in columns.names:
            columns = columns.append(OP)
        why = self._unmakeable(name, columns)
        reasons = {
            i: UndecodableRecord(i, "shape", why)
            if value is not None
            else UndecodableRecord(i, "null", "cannot read the value: found null")
            for i, value in values
            if why or value is None
        }
        if not why:
            work.result.need(name, columns, {})
        return set(), reasons

    def _refuse_placeholder(self, name: str, kind: dict[str, Any]) -> None:
        """Reject the placeholder of an hstore, an object with the placeholder as a key: a column
        of that name must not be created."""
        value = placeholder(self._plan.format.unavailable)
        if value is not None and (column := json_inference.holder(kind, value.text)):
            raise UnexpectedJson(UNAVAILABLE, not_carried(name, column, value))

    def _unchangeable(self, name: str, plan: TablePlan | None, kind: dict[str, Any]) -> str:
        """Why the table cannot be created or changed as one record needs it; empty: it can."""
        key = (name, repr(kind))
        if key not in self._wants:
            if len(self._wants) >= _MOST_WANTS:
                self._wants.clear()
            votes = json_inference.Votes()
            json_inference.vote(votes, kind)
            fixed = self._source(name).fixed
            columns = json_inference.columns(votes, plan.columns if plan else fixed)
            if plan is None:
                named = bool(kind or len(fixed))
                reason = self._unmakeable(name, columns) if named else "it names no column"
                more = True
            else:
                schema_changes = table_changes(plan, columns, plan.aliases)
                reason = "; ".join(schema_changes.impossible)
                more = bool(schema_changes.add)
                if not reason and not (
                    schema_changes.add or schema_changes.widen or schema_changes.rename
                ):
                    reason = "no change of the table makes it fit"
            most, count = self._most_columns(name, plan), json_inference.count(columns)
            if more and not reason and count > most:
                reason = (
                    f"with its fields the table would have {count} columns; max_columns is {most}"
                )
            self._wants[key] = reason
        return self._wants[key]

    def _most_columns(self, name: str, plan: TablePlan | None) -> int:
        return self._made(name).max_columns if plan is None else plan.max_columns


def _with_defaults(
    shape: pa.Schema, group: DecodedChunk, values: Sequence[bytes | None]
) -> pa.Table:
    """Rows of JSON values, with the defaults of their columns for missing fields."""
    if not default_values.any_of(shape):
        return group.rows
    texts = values if group.index is None else [values[i] for i in group.index.tolist()]
    return default_values.of_json(group.rows, shape, texts)


def _ordered_json(key: bytes, row: bytes, path: str) -> bytes:
    """A deleted key in JSON with the version from its row, if it has one."""
    if not path:
        return key
    try:
        members = debezium.members(row.decode())
        top, *inside = [path] if path in members else path.split(".")
        raw = members[top][1]
        for name in inside:
            raw = debezium.members(raw)[name][1]
    except (ValueError, KeyError, RecursionError, debezium.NotARow):
        return key
    return b"%s,%s:%s}" % (key.rstrip()[:-1], json.dumps(path).encode(), raw.encode())


def _kinds(row: bytes, named: Named) -> dict[str, Any]:
    """The kinds of the row's columns whose type the schema beside it says."""
    fields = debezium.members(row.decode()) if named else ()
    return {name: named[name].kind for name in fields if name in named}


def _in_order(value: bytes, kind: dict[str, Any]) -> dict[str, Any]:
    """The columns that a record needs, in the order of its fields."""
    fields = [*debezium.members(value.decode()), *kind]
    return {name: kind[name] for name in dict.fromkeys(fields) if name in kind}


def _under(value: bytes | None, newer: Mapping[str, str]) -> bytes | None:
    """A JSON object with current field names. Values keep their text: numbers lose no digit."""
    try:
        given = debezium.members((value or b"").decode())
    except (ValueError, RecursionError, debezium.NotARow):
        return value
    named = {newer.get(name, name): raw for name, (_, raw) in given.items()}
    if len(named) < len(given):
        return value  # it has a field under its former and its current name
    body = ",".join(f"{json.dumps(name)}:{raw}" for name, raw in named.items())
    return f"{{{body}}}".encode(errors="surrogatepass")


def _newer(plan: TablePlan) -> dict[str, str]:
    """Former name → current name of renamed columns."""
    return {old: new for new, old in _aliases(plan, done=True)}


def _renames(plan: TablePlan) -> dict[str, str]:
    """New name → current name of columns that are yet to be renamed."""
    return dict(_aliases(plan, done=False))


def _aliases(plan: TablePlan, *, done: bool) -> Iterator[tuple[str, str]]:
    """New and former name of columns that the table has under one of them: of those that were
    renamed (`done`), or of those that are yet to be."""
    names = set(plan.columns.names)
    for new, olds in together(plan.aliases).items():
        yield from ((new, old) for old in olds if (new in names, old in names) == (done, not done))
