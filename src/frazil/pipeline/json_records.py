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
from frazil.formats.decode_result import DecodedChunk, UndecodableRecord, among
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.formats.json_columns import UnexpectedJson, wanted
from frazil.formats.json_values import IGNORED
from frazil.formats.unavailable_value import placeholder
from frazil.kafka.record_batch import Longs
from frazil.pipeline.chunk_result import ChunkWork, Rejection, nth
from frazil.pipeline.destination import Destination
from frazil.pipeline.evolution import together
from frazil.pipeline.field_text import peek
from frazil.pipeline.fitting import OP, UNAVAILABLE, TableFitter, not_carried
from frazil.pipeline.missing_columns import add_need, voted
from frazil.pipeline.routing import Route
from frazil.pipeline.table_plan import LOG, TablePlan

JSON = RecordFormat("json")


class JsonRecords(TableFitter):
    """Processes records in JSON."""

    def process(self, work: ChunkWork, way: Route | None) -> None:
        """Process one chunk."""
        values = ByteSlices.of(work.opened.values)
        present: Longs | None = None
        with_field = None
        if work.changes:  # a tombstone repeats the delete event before it
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
                    self._json_into(work, self._to(name), texts, at, np.zeros(len(texts), bool))

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
        for table in map(self._to, share.tables):
            rows = [self._written(work, table, unwrapped, i) for i in present]
            self._moved_json(work, table, [changes[i] for i in present], rows, where)
            self._json_into(work, table, rows, where, gone)

    def _written(
        self, work: ChunkWork, table: Destination, unwrapped: debezium.UnwrappedChanges, i: int
    ) -> bytes:
        """A row as the columns of the table can read it."""
        row, named = unwrapped.rows[i] or b"", unwrapped.named[i]
        if not named:
            return row
        row = debezium.written(row, named, table.json_fields)
        work.named[row] = named
        return row

    def _skip_json(
        self, work: ChunkWork, values: ByteSlices, at: Longs | None, with_field: Any
    ) -> None:
        """Skip values by a rule. A value in which the rules found no field is rejected if it is
        not valid JSON."""
        work.result.skipped += len(values)
        if with_field is None:
            return
        where = _positions(values, at)
        without = np.flatnonzero(~with_field[where])
        objects = pa.schema([], {IGNORED: b"*"})
        _, broken = Decoder(self._plan.format, objects).decode(values.take(without))
        broken = [record for record in broken if record.kind != "shape"]
        work.result.skipped -= len(broken)
        work.result.reject_all(broken, where[without])

    def _moved_json(
        self,
        work: ChunkWork,
        table: Destination,
        changes: Sequence[bytes | None],
        after: Sequence[bytes | None],
        at: Longs | None,
    ) -> None:
        if not table.exists or not table.plan.key or table.name in work.below:
            return
        plan, fields = table.plan, table.key_fields
        if not fields:  # a change of a key that is Kafka's own is two records
            return
        pairs = {
            i: (_ordered_json(pair[0], newer or b"", table.order_path), pair[1])
            for i, (change, newer) in enumerate(zip(changes, after, strict=True))
            if (pair := debezium.keys_json(change, list(fields.values()), table.json_fields))
            is not None
        }
        if not pairs:
            return
        former, current = zip(*pairs.values(), strict=True)
        rows, some, _ = self._read_keys(table, JSON, plan.needs_deletes, former)
        now, others, _ = self._read_keys(table, JSON, plan.key_columns, current)
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
        self._fitted(work, table, DecodedChunk(rows.take(moved), where), work.result.left)

    def _json_into(
        self,
        work: ChunkWork,
        table: Destination,
        values: Sequence[bytes | None],
        at: Longs | None,
        deleted: Any,
    ) -> None:
        """Process JSON values for one table. `deleted`: mask of the values that are deletes."""
        if table.name in work.below:
            return
        if table.mode:
            where = _positions(values, at)
            values = ByteSlices.of(values)
            nulls = values.nulls
            self._tombstones(work, table, where[nulls])
            if table.exists and table.plan.key and deleted.any():
                rows_gone = [values[i] or b"" for i in np.flatnonzero(deleted).tolist()]
                texts = [_ordered_json(text, text, table.order_path) for text in rows_gone]
                columns = table.plan.needs_deletes
                self._by_keys(work, table, JSON, texts, where[deleted], columns)
                nulls |= deleted
            kept = np.flatnonzero(~nulls)
            values, at = values.take(kept), where[kept]
            if not values:
                return
        if not table.exists:
            if table.refused:
                self._reject(work, table, table.refused, _positions(values, at))
            else:
                learn = self._learn if table.json_source.inferring else self._declare
                _, reasons = learn(work, table, enumerate(values))
                for i, record in reasons.items():
                    self._unlike(work, table, record, nth(at, i))
            return
        # The table's own columns fit; declared and metadata columns can be missing.
        if table.json_verdict is True:
            work.result.need(table.name, table.json_source.expected, {})
        elif table.json_verdict:
            self._reject(work, table, table.json_verdict, _positions(values, at))
        else:
            self._decoded(work, table, values, at)

    def _decoded(
        self, work: ChunkWork, table: Destination, values: Sequence[bytes | None], at: Longs | None
    ) -> None:
        """Decode JSON values into a table that has all columns known to the config."""
        groups, rejected = table.json_reader.decode(values)
        for group in groups:
            rows = default_values.of_json(group.rows, table.json_source.shape, values, group.index)
            whole = DecodedChunk(rows, among(at, group.index))
            for part in self._selected(work, table, whole):
                self._fit_part(work, table, part)
        reasons = {record.index: record for record in rejected}
        misshapen = [i for i, record in reasons.items() if record.kind == "shape"]
        if misshapen and table.plan.aliases and table.select is None:
            misshapen = self._by_old_names(work, table, values, misshapen, at)
        later = set[int]()
        learning = table.plan.evolution == "evolve" and table.json_source.inferring
        if misshapen and learning and not table.refused:
            later, misfits = self._learn(work, table, ((i, values[i]) for i in misshapen))
            reasons |= misfits
        unlike = set(misshapen)
        for i, record in reasons.items():
            if i not in later and (record.kind != "shape" or i in unlike):
                self._unlike(work, table, record, nth(at, i))

    def _fit_part(self, work: ChunkWork, table: Destination, group: DecodedChunk) -> None:
        """Fit rows into the table. A select may give columns that the table lacks."""
        columns = group.rows.schema
        verdict: str | bool = False
        if table.select is not None:
            aliases = table.plan.aliases if table.plan.evolution == "evolve" else {}
            verdict = table.verdict(columns, aliases, relax=False)
        if verdict is True:
            work.result.need(table.name, columns, {})
        elif verdict:
            self._reject(work, table, verdict, group.positions)
        else:
            self._fitted(work, table, group)

    def _unlike(
        self, work: ChunkWork, table: Destination, rejected: UndecodableRecord, at: int
    ) -> None:
        rejection = Rejection(at, rejected.kind, rejected.reason, (table.name,))
        if rejected.kind == "shape":
            self._misfit(work, table, replace(rejection, kind="misfit"))
        else:
            work.result.reject(rejection)

    def _by_old_names(
        self,
        work: ChunkWork,
        table: Destination,
        values: Sequence[bytes | None],
        misshapen: list[int],
        at: Longs | None,
    ) -> list[int]:
        """Decode records that use former names of renamed columns. Returns the records that
        still do not fit."""
        newer = _newer(table.plan)
        texts: list[bytes | None] = [_under(values[i], newer) for i in misshapen]
        groups, rejected = table.json_reader.decode(texts)
        for group in groups:
            where = among(np.array(misshapen, np.int64), group.index)
            rows = default_values.of_json(group.rows, table.json_source.shape, texts, group.index)
            self._fitted(work, table, DecodedChunk(rows, among(at, where)))
        return [misshapen[record.index] for record in rejected]

    def _learn(
        self,
        work: ChunkWork,
        table: Destination,
        values: Iterable[tuple[int, bytes | None]],
    ) -> tuple[set[int], dict[int, UndecodableRecord]]:
        """Infer a need of the table from JSON values. Returns the positions of values that would
        fit after the change, and the reasons why the others never fit. Each wanted change is
        possible by itself; where two contradict each other, votes decide."""
        source = table.json_source
        base = source.columns
        judged = default_values.loosened(source.judged)
        own_names = not table.exists or table.select is not None
        newer = {} if own_names else _newer(table.plan)
        renames = {} if own_names else _renames(table.plan)
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
                if table.exists and source and not kind:
                    continue  # a declared or computed column does not take it
                self._refuse_placeholder(table.name, kind)
                if not table.exists:
                    kind = json_inference.undivided(kind, table.new.undivided)
                if reason := table.unchangeable(kind):
                    raise UnexpectedJson("shape", reason)
            except UnexpectedJson as error:
                reasons[i] = UndecodableRecord(i, error.kind, error.reason)
                continue
            fitting.add(i)
            json_inference.vote(votes, kind)
        if fitting:
            if table.mode == LOG and "_op" not in {*base.names, *votes["fields"]}:
                votes["fields"]["_op"] = [1, sys.maxsize, {"kinds": {"string": 1}}]  # the last
            aliases = table.plan.aliases if table.exists else {}
            need = voted(votes, base, aliases, table.max_columns)
            add_need(work.result.needs, table.name, need)
        return fitting, reasons

    def _declare(
        self,
        work: ChunkWork,
        table: Destination,
        values: Iterable[tuple[int, bytes | None]],
    ) -> tuple[set[int], dict[int, UndecodableRecord]]:
        """As `_learn` for a table that is not there, where only declared fields become columns."""
        columns = table.json_source.fixed
        if table.mode == LOG and "_op" not in columns.names:
            columns = columns.append(OP)
        why = table.unmakeable(columns)
        reasons = {
            i: UndecodableRecord(i, "shape", why)
            if value is not None
            else UndecodableRecord(i, "null", "cannot read the value: found null")
            for i, value in values
            if why or value is None
        }
        if not why:
            work.result.need(table.name, columns, {})
        return set(), reasons

    def _refuse_placeholder(self, name: str, kind: dict[str, Any]) -> None:
        """Reject the placeholder of an hstore, an object with the placeholder as a key: a column
        of that name must not be created."""
        value = placeholder(self._plan.format.unavailable)
        if value is not None and (column := json_inference.holder(kind, value.text)):
            raise UnexpectedJson(UNAVAILABLE, not_carried(name, column, value))


def _positions(values: Sequence[bytes | None], at: Longs | None) -> Longs:
    return np.arange(len(values)) if at is None else at


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
