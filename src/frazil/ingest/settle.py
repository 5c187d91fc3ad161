"""The records of a chunk, each with its fate. Runs on executors.

    bytes ▶ decode ▶ rules ▶ debezium ▶ evolve ▶ route ▶ rows of each table
                └───────┴─────────┴─────────┴───────┴──▶ rejected

In: the values of a chunk, with what stands beside them. Out: `Settled`: rows in the shape of each
table, and a `Letter` for every record that cannot be decoded, routed or fitted. Every record is in
all of its tables, or skipped by a rule, or rejected (by all of its tables, or some): nothing falls
through.

Where a table is missing, or could be changed so that records fit it, that is told as a need:
the driver sees to it, for all tasks at once, and the batch is run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.core.errors import Misfit
from frazil.core.offsets import Partition
from frazil.ingest import debezium
from frazil.ingest.decode import Decoder, Format, Framed, Rejected, infer
from frazil.ingest.evolve import Aliases, changes, merged, renamed, together
from frazil.ingest.keys import Keys
from frazil.ingest.order import Within, column_of, field_of
from frazil.ingest.records import Longs, Opened, Records, no_headers
from frazil.ingest.route import Metadata, differences, route
from frazil.ingest.rules import Rules, Share, Unrouted, peek
from frazil.ingest.write import TableShape


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A table as the tasks of a batch see it."""

    shape: TableShape
    metadata: Metadata
    event_time: str
    evolution: str = "evolve"
    aliases: Aliases = field(default_factory=dict)
    #: paths of the table's schema that stay required, and names of its partition fields
    identifier: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    format_version: int = 2
    #: columns of days or moments by which it is partitioned
    moments: tuple[str, ...] = ()
    #: records below it are in the table already
    floor: Mapping[Partition, int] = field(default_factory=dict)
    #: of an upsert table: its key columns, and how the files look that take keys away
    key: tuple[str, ...] = ()
    deletes: TableShape | None = None
    partitioned_by_key: bool = False
    #: and where a column says which change is the newer one: its path, the table that remembers
    #: what was deleted, and where to look for what both have
    order: str = ""
    memory: TablePlan | None = None
    known: tuple[Within, ...] = ()
    #: of a change log: its key columns
    log: tuple[str, ...] = ()

    @property
    def columns(self) -> pa.Schema:
        """The record's own."""
        beside = {each.name for each in self.metadata.fields}
        return pa.schema([each for each in self.shape.arrow if each.name not in beside])

    @property
    def key_columns(self) -> pa.Schema:
        key = self.key or self.log
        return pa.schema([each for each in self.shape.arrow if each.name in key])

    @property
    def told_by_deletes(self) -> pa.Schema:
        """The columns that a delete of a database tells: the key, and its order."""
        order = [self.order_field] if self.own_order else []
        return pa.schema([*self.key_columns, *order])

    @property
    def of_deletes(self) -> pa.Schema:
        """The columns of a delete: the key, its order, if it has one, and where its record is
        from."""
        wanted = {*self.key, *(each.name for each in self.metadata.fields)} - {self.order}
        columns = [each for each in self.shape.arrow if each.name in wanted]
        return pa.schema(columns + ([self.order_field] if self.order else []))

    @property
    def own_order(self) -> str:
        """Where it is among the record's own columns."""
        beside = {each.name for each in self.metadata.fields}
        return "" if self.order in beside else self.order

    @property
    def order_field(self) -> pa.Field:
        return field_of(self.shape.arrow, self.order).with_nullable(True)


@dataclass(frozen=True, slots=True)
class Letter:
    """A rejected record, and why."""

    index: int
    kind: str
    reason: str
    #: the tables it was for, as far as that is known
    tables: tuple[str, ...] = ()
    schema_id: int | None = None


@dataclass(slots=True)
class Settled:
    rows: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: keys that records delete from upsert tables
    gone: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: the same of records that are among the rows, too: the key a row had before
    left: list[tuple[str, pa.Table]] = field(default_factory=list)
    letters: dict[int, Letter] = field(default_factory=dict)
    skipped: int = 0
    needs: dict[str, pa.Schema] = field(default_factory=dict)

    def reject(self, letter: Letter) -> None:
        """A record that several tables reject is one letter. What it says can be written down:
        some reasons repeat what they found, which may be long, or half of a surrogate pair."""
        plain = letter.reason[:1000].encode(errors="replace").decode()
        letter = replace(letter, reason=plain)
        known = self.letters.get(letter.index)
        if known is not None:
            reason = known.reason if letter.reason in known.reason else (
                f"{known.reason}; {letter.reason}"
            )  # fmt: skip
            tables = tuple(dict.fromkeys((*known.tables, *letter.tables)))
            letter = Letter(letter.index, known.kind, reason, tables, known.schema_id)
        self.letters[letter.index] = letter

    def need(self, table: str, columns: pa.Schema, aliases: Aliases) -> None:
        add_need(self.needs, table, needed(columns, aliases))


#: The mode of a table that keeps every change, and the column that says which: u or d, where a
#: record has a value or none; or what Debezium says.
LOG = "changelog"
OP = pa.field("_op", pa.large_string())


def _with_op(rows: pa.Table, op: str) -> pa.Table:
    """With its operation; a change that tells its own keeps it."""
    if "_op" not in rows.schema.names:
        return rows.append_column(OP, pa.repeat(pa.scalar(op, OP.type), len(rows)))
    at = rows.schema.get_field_index("_op")
    return rows.set_column(at, OP, rows.column("_op").cast(OP.type).fill_null(op))


#: Where a need keeps the former names of its columns.
_ALIASES = b"frazil.aliases"


def needed(columns: pa.Schema, aliases: Aliases) -> pa.Schema:
    """Columns that a table must have, with the names they had before."""
    return columns.with_metadata({_ALIASES: json.dumps(together(aliases)).encode()})


def aliases_of(need: pa.Schema) -> dict[str, tuple[str, ...]]:
    said = json.loads((need.metadata or {}).get(_ALIASES, b"{}"))
    return {path: tuple(names) for path, names in said.items()}


def add_need(needs: dict[str, pa.Schema], table: str, need: pa.Schema) -> None:
    """To what others need of the table; where both cannot be, to the first: when the table is
    there, records of the other kind are rejected."""
    known = needs.get(table)
    if known is None:
        needs[table] = need
        return
    aliases = together(aliases_of(known), aliases_of(need))
    with suppress(Misfit):
        needs[table] = needed(merged(known, need, aliases), aliases)


class Settler:
    """Settles the chunks of one task."""

    def __init__(
        self,
        format: Format,
        rules: Rules | None,
        tables: Mapping[str, TablePlan],
        refused: Mapping[str, str] | None = None,
        only: str = "",
        keyed: Mapping[str, str] | None = None,
        key_format: Format | None = None,
    ) -> None:
        """Without `rules` everything goes to `only`. `refused`: why a table could not be made, or
        changed, for records that wanted it. `keyed`: names and templates of
        upsert tables and change logs, with their mode; `key_format`: how the keys of records
        without a value are read, None for text."""
        self._format = format
        self._rules = rules
        self._tables = tables
        self._refused = refused or {}
        self._json = format.kind == "json"
        self._decoder = Decoder(format)
        self._decoders: dict[str, Decoder] = {}
        self._verdicts: dict[tuple[str, str], str | bool] = {}
        self._only = Share((only,), None, -1, "")
        self._keyed = keyed or {}
        self._key_format = key_format

    def framed(self, records: Records | None) -> Framed | None:
        """Kafka's batches straight into columns, where that can be."""
        return None if self._json or records is None else self._decoder.framed(records)

    def settle(
        self, partition: Partition, opened: Opened, framed: Framed | None, below: frozenset[str]
    ) -> Settled:
        """`below`: tables that have these records already."""
        work = _Work(partition, opened, below)
        way = self._rules.of_topic(partition.kafka_topic) if self._rules else self._only
        if isinstance(way, Unrouted):
            for i in range(len(opened.offsets)):
                work.settled.reject(Letter(i, way.kind, way.reason))
        elif self._json:
            self._of_json(work, way)
        else:
            self._of_columns(work, way, framed)
        work.settled.skipped += len(work.needless - work.heard - work.settled.letters.keys())
        work.settled.left = [
            (name, self._kept(work, name, keys)) for name, keys in work.settled.left
        ]
        return work.settled

    # ── records that come as columns ─────────────────────────────────────────────────────────

    def _of_columns(self, work: _Work, way: Share | None, framed: Framed | None) -> None:
        if framed is not None:
            groups, rejected = [framed.decoded], list[Rejected]()
        else:
            groups, rejected = self._decoder.decode(work.opened.values)
        for each in self._deleting(work, way, rejected):
            self._undecoded(work, each, way)
        for group in groups:
            shares = [way] if way else self._sorted(work, group.rows, group.index)
            for share in shares:
                rows = group.rows
                at = _among(group.index, share.index)
                if share.index is not None:
                    rows = rows.take(pa.array(share.index))
                if not share.tables:
                    work.settled.skipped += len(rows)
                    continue
                if share.envelope:
                    self._moved(work, share.tables, rows, at, group.schema_id)
                    try:
                        rows, kept, bad = debezium.unwrap(rows)
                    except Misfit as error:
                        kept = np.empty(0, np.int64)
                        bad = [Rejected(i, "envelope", error.message) for i in range(len(rows))]
                        rows = rows.slice(0, 0)
                    for each in bad:
                        where = each.index if at is None else int(at[each.index])
                        work.settled.reject(
                            Letter(where, each.kind, each.reason, share.tables, group.schema_id)
                        )
                    at = _among(at, kept)
                aliases = self._decoder.aliases(group.schema_id)
                for name in share.tables:
                    mine = (rows, at)
                    if share.envelope and name in self._tables:
                        mine = self._deleted(work, name, *mine, group.schema_id)
                    elif self._mode(name) == LOG:
                        mine = (_with_op(rows, "u"), at)
                    self._into(work, name, *mine, aliases, group.schema_id)

    def _undecoded(self, work: _Work, rejected: Rejected, way: Share | None) -> None:
        if rejected.kind == "null" and self._changes(work):
            work.settled.skipped += 1  # the tombstone behind a delete, which is a row already
        elif way is not None and not way.tables:
            work.settled.skipped += 1  # a rule skips the topic, whatever its records are
        else:
            tables = way.tables if way else ()
            work.settled.reject(Letter(rejected.index, rejected.kind, rejected.reason, tables,
                                       rejected.schema_id))  # fmt: skip

    # ── what deletes ─────────────────────────────────────────────────────────────────────────

    def _mode(self, name: str) -> str:
        """upsert or changelog; empty: neither."""
        return self._keyed.get(self._rules.template(name) if self._rules else name, "")

    def _deleting(
        self, work: _Work, way: Share | None, rejected: Sequence[Rejected]
    ) -> list[Rejected]:
        """Records without a value delete from upsert tables, or are a row of a change log; gives
        those that are neither."""
        names = [name for name in way.tables if self._mode(name)] if way else []
        if not names or self._changes(work):
            return list(rejected)
        nulls = np.array([each.index for each in rejected if each.kind == "null"], np.int64)
        for name in names:
            self._tombstones(work, name, nulls)
        others = [name for name in way.tables if name not in names] if way else []
        for i in nulls.tolist() if others else ():
            reason = "cannot read the value: found null"
            work.settled.reject(Letter(i, "null", reason, tuple(others)))
        return [each for each in rejected if each.kind != "null"]

    def _tombstones(self, work: _Work, name: str, at: Longs) -> None:
        plan = self._tables.get(name)
        if plan is None:
            work.needless.update(at.tolist())  # there is nothing that could be deleted
            return
        work.heard.update(at.tolist())
        if not len(at) or name in work.below:
            return
        keys = work.opened.keys
        given = [None] * len(at) if keys is None else keys.take(pa.array(at)).to_pylist()
        self._by_keys(work, name, plan, self._key_format, given, at)

    def _by_keys(
        self, work: _Work, name: str, plan: TablePlan, format: Format | None,
        given: Sequence[bytes | None], at: Longs, columns: pa.Schema | None = None,
    ) -> None:  # fmt: skip
        """`columns`: those that `given` have, if it is more than the key."""
        rows, index, bad = Keys(format, columns or plan.key_columns).read(given)
        for each in bad:
            letter = Letter(int(at[each.index]), each.kind, each.reason, (name,), each.schema_id)
            work.settled.reject(letter)
        if plan.log:
            self._fitted(work, name, plan, _with_op(rows, "d"), at[index], None)
        else:
            self._fitted(work, name, plan, rows, at[index], None, work.settled.gone)

    def _deleted(
        self, work: _Work, name: str, rows: pa.Table, at: Longs | None, schema_id: int | None
    ) -> tuple[pa.Table, Longs | None]:
        """Of unwrapped changes: those that an upsert table takes as rows."""
        plan = self._tables[name]
        if not plan.key or name in work.below:
            return rows, at
        gone = pc.equal(rows.column("_op"), "d").to_numpy()
        if not gone.any():
            return rows, at
        index = np.flatnonzero(gone)
        lacking = [each for each in plan.key if each not in rows.schema.names]
        if not lacking:
            orders = column_of(rows, plan.own_order)
            keys = _with_order(rows.select(plan.key), plan, orders).take(pa.array(index))
            where = _among(at, index)
            self._fitted(work, name, plan, keys, where, schema_id, work.settled.gone)
        else:
            fact = f"the change has no column {lacking[0]!r}, which is its key"
            self._reject(work, name, fact, len(index), _among(at, index), schema_id)
        kept = np.flatnonzero(~gone)
        return rows.take(pa.array(kept)), _among(at, kept)

    def _moved(
        self, work: _Work, names: Sequence[str], rows: pa.Table, at: Longs | None,
        schema_id: int | None,
    ) -> None:  # fmt: skip
        """A row that got another key leaves the old one."""
        for name in names:
            plan = self._tables.get(name)
            if plan is not None and plan.key and name not in work.below:
                keys, index = debezium.left(rows, plan.key)
                if len(index):
                    changed = rows.take(pa.array(index))
                    path = debezium.path_of(plan.own_order)
                    keys = _with_order(keys, plan, column_of(changed, path))
                    where = _among(at, index)
                    self._fitted(work, name, plan, keys, where, schema_id, work.settled.left)

    def _changes(self, work: _Work) -> bool:
        return self._rules is not None and self._rules.changes(work.partition.kafka_topic)

    def _sorted(self, work: _Work, rows: pa.Table, index: Longs | None) -> list[Share]:
        assert self._rules is not None
        headers = work.beside("headers", index) if self._rules.wants_headers else None
        origin = work.origin(index) if self._rules.wants_rows else None
        found = self._rules.sort(work.partition.kafka_topic, rows, headers=headers, origin=origin)
        for each in found.rejected:
            where = each.index if index is None else int(index[each.index])
            work.settled.reject(Letter(where, each.kind, each.reason))
        return found.shares

    def _into(
        self,
        work: _Work,
        name: str,
        rows: pa.Table,
        at: Longs | None,
        aliases: Aliases,
        schema_id: int | None,
    ) -> None:
        """Rows of one writer schema into one table."""
        if name in work.below or not len(rows):
            return
        plan = self._tables.get(name)
        if plan is None:
            if name in self._refused:
                self._reject(work, name, self._refused[name], len(rows), at, schema_id)
            else:
                self._need(work, name, rows.schema, aliases)
            return
        known = together(plan.aliases, aliases)
        key = (name, f"{rows.schema.to_string()} {known}")
        if key not in self._verdicts:
            self._verdicts[key] = self._verdict(plan, rows.schema, known)
        verdict = self._verdicts[key]
        if verdict is True:
            self._need(work, name, rows.schema, known)
        elif verdict:
            self._reject(work, name, str(verdict), len(rows), at, schema_id)
        else:
            self._fitted(work, name, plan, renamed(rows, plan.columns, known), at, schema_id)

    def _kept(self, work: _Work, name: str, keys: pa.Table) -> pa.Table:
        """Without those of records whose row the table rejects: then its old one stays."""
        letters = work.settled.letters
        mine = [i for i, letter in letters.items() if name in letter.tables]
        rejected = pa.array(work.opened.offsets[mine]) if mine else pa.array([], pa.int64())
        offset = self._tables[name].metadata.offset
        return keys.filter(pc.invert(pc.is_in(keys.column(offset), rejected)))

    def _need(self, work: _Work, name: str, columns: pa.Schema, aliases: Aliases) -> None:
        if self._mode(name) == LOG:  # of a delete nothing is known but its key
            if "_op" not in columns.names:
                columns = columns.append(OP)
            columns = pa.schema([each.with_nullable(True) for each in columns], columns.metadata)
        work.settled.need(name, columns, aliases)

    def _reject(
        self, work: _Work, name: str, reason: str, count: int, at: Longs | None,
        schema_id: int | None,
    ) -> None:  # fmt: skip
        for i in range(count) if at is None else at.tolist():
            self._misfit(work, Letter(i, "misfit", reason, (name,), schema_id))

    def _misfit(self, work: _Work, letter: Letter) -> None:
        [name] = letter.tables
        if name not in letter.reason:
            what = letter.reason.removeprefix("cannot fit ")
            letter = replace(letter, reason=f"cannot fit {name}: {what}")
        if name in self._tables and self._tables[name].evolution == "fail":
            raise Misfit(
                letter.reason, hint="change the table, or set its evolution to evolve or frozen"
            )
        work.settled.reject(letter)

    def _verdict(self, plan: TablePlan, columns: pa.Schema, aliases: Aliases) -> str | bool:
        """False: records with such columns fit; True: they will, when the table is changed; or why
        they never do."""
        lacking = [each for each in plan.metadata.fields if each.name not in plan.shape.arrow.names]
        if plan.evolution == "evolve":
            found = _changes(plan, columns, aliases)
            if not found.impossible:
                changed = bool(found or lacking)
                return changed and self._refused.get(plan.shape.name, changed)
            return f"cannot fit {plan.shape.name}: {'; '.join(found.impossible)}"
        named = _names(columns, plan.columns, aliases)
        found_now = differences(pa.schema([*named, *plan.metadata.fields]), plan.shape.arrow)
        return f"cannot fit {plan.shape.name}: {'; '.join(found_now)}" if found_now else False

    def _fitted(
        self,
        work: _Work,
        name: str,
        plan: TablePlan,
        rows: pa.Table,
        at: Longs | None,
        schema_id: int | None,
        deletes: list[tuple[str, pa.Table]] | None = None,
    ) -> None:
        """In the table's shape; a row that does not fit is rejected by itself. The rows may be keys
        that are to be deleted."""
        if not len(rows):
            return
        target = plan.shape.arrow if deletes is None else plan.of_deletes
        try:
            shaped = route(
                rows, target, plan.metadata, work.partition,
                _picked(work.opened.offsets, at), _picked(work.opened.stamps, at),
            )  # fmt: skip
            if deletes is None:
                _check_moments(shaped, plan)
                _check_order(shaped, plan)
        except Misfit as error:
            positions = np.arange(len(rows)) if at is None else at
            if len(rows) == 1:
                letter = Letter(int(positions[0]), "misfit", error.message, (name,), schema_id)
                self._misfit(work, letter)
                return
            for part in _parts(rows, plan):
                some = rows.take(pa.array(part))
                self._fitted(work, name, plan, some, positions[part], schema_id, deletes)
            return
        (work.settled.rows if deletes is None else deletes).append((name, shaped))

    # ── records that come as JSON: a table's own columns say how to read them ─────────────────

    def _of_json(self, work: _Work, way: Share | None) -> None:
        values = work.opened.values
        there: Longs | None = None
        looked = None
        if self._changes(work):  # tombstones say nothing that a delete has not said
            there = np.flatnonzero([value is not None for value in values])
            work.settled.skipped += len(values) - len(there)
        if way is not None:
            shares = [replace(way, index=there)]
        else:
            assert self._rules is not None
            mine = values if there is None else [values[i] for i in there.tolist()]
            rows = peek(mine, self._rules.fields)
            looked = np.zeros(len(values), bool)  # where something was seen
            for column in rows.columns:
                looked[slice(None) if there is None else there] |= column.is_valid().to_numpy()
            if self._rules.wants_rows:
                rows = rows.append_column("value", pa.array(mine, pa.large_binary()))
            found = self._sorted(work, rows, there)
            shares = [replace(each, index=_among(there, each.index)) for each in found]
        for share in shares:
            at = share.index
            mine = values if at is None else [values[i] for i in at.tolist()]
            if not share.tables:
                self._skip_json(work, mine, at, None if way else looked)
                continue
            gone = np.zeros(len(mine), bool)
            if share.envelope:
                changed = mine
                mine, bad, deleted = debezium.unwrap_json(mine)
                gone[list(deleted)] = True
                for each in bad:
                    work.settled.reject(
                        Letter(_at(at, each.index), each.kind, each.reason, share.tables)
                    )
                left = np.flatnonzero([value is not None for value in mine])
                work.settled.skipped += len(mine) - len(left) - len(bad)  # wrapped tombstones
                at = _among(at, left)
                mine, gone = [mine[i] for i in left.tolist()], gone[left]
                changed = [changed[i] for i in left.tolist()]
                for name in share.tables:
                    self._moved_json(work, name, changed, mine, at)
            for name in share.tables if mine else ():
                self._json_into(work, name, mine, at, gone)

    def _skip_json(
        self, work: _Work, values: Sequence[bytes | None], at: Longs | None, looked: Any
    ) -> None:
        """Skipped by a rule; but what no rule could look into is rejected, if it is no JSON."""
        work.settled.skipped += len(values)
        if looked is None:
            return
        where = np.arange(len(values)) if at is None else at
        blind = np.flatnonzero(~looked[where]).tolist()
        _, broken = Decoder(self._format, pa.schema([])).decode([values[i] for i in blind])
        for each in broken:
            if each.kind != "shape":
                work.settled.skipped -= 1
                work.settled.reject(Letter(int(where[blind[each.index]]), each.kind, each.reason))

    def _moved_json(
        self, work: _Work, name: str, changes: Sequence[bytes | None],
        after: Sequence[bytes | None], at: Longs | None,
    ) -> None:  # fmt: skip
        plan = self._tables.get(name)
        if plan is None or not plan.key or name in work.below:
            return
        left = {
            i: _ordered_json(each, newer or b"", plan.own_order)
            for i, (change, newer) in enumerate(zip(changes, after, strict=True))
            if (each := debezium.left_json(change, plan.key)) is not None
        }
        index = np.array(list(left), np.int64)
        rows, some, _ = Keys(Format("json"), plan.told_by_deletes).read(list(left.values()))
        where = (np.arange(len(changes)) if at is None else at)[index[some]]
        self._fitted(work, name, plan, rows, where, None, work.settled.left)

    def _json_into(
        self,
        work: _Work,
        name: str,
        values: Sequence[bytes | None],
        at: Longs | None,
        deleted: Any,
    ) -> None:
        """`deleted`: which of the values are rows that are no more."""
        if name in work.below:
            return
        plan = self._tables.get(name)
        if self._mode(name):
            where = np.arange(len(values)) if at is None else at
            nulls = np.array([value is None for value in values], bool)
            self._tombstones(work, name, where[nulls])
            if plan is not None and plan.key:
                rows_gone = [values[i] or b"" for i in np.flatnonzero(deleted).tolist()]
                texts = [_ordered_json(each, each, plan.own_order) for each in rows_gone]
                self._by_keys(work, name, plan, Format("json"), texts, where[deleted],
                              plan.told_by_deletes)  # fmt: skip
                nulls |= deleted
            kept = np.flatnonzero(~nulls)
            values, at = [values[i] for i in kept.tolist()], where[kept]
            if not values:
                return
        if plan is None:
            if name in self._refused:
                self._reject(work, name, self._refused[name], len(values), at, None)
            else:
                self._learn(work, name, None, enumerate(values), at, {})
            return
        if name not in self._decoders:
            # Its own columns fit; what it may lack are those that say where a row comes from.
            if verdict := self._verdict(plan, plan.columns, {}):
                if verdict is not True:
                    self._reject(work, name, verdict, len(values), at, None)
                else:
                    work.settled.need(name, plan.columns, {})
                return
            self._decoders[name] = Decoder(self._format, plan.columns)
        groups, rejected = self._decoders[name].decode(values)
        for group in groups:
            rows = _with_op(group.rows, "u") if plan.log else group.rows
            self._fitted(work, name, plan, rows, _among(at, group.index), None)
        reasons = {each.index: each for each in rejected}
        misshapen = [i for i, each in reasons.items() if each.kind == "shape"]
        if misshapen and plan.aliases:
            misshapen = self._by_old_names(work, name, plan, values, misshapen, at)
        later = set[int]()
        if plan.evolution == "evolve" and name not in self._refused:
            named = ((i, values[i]) for i in misshapen)
            later = self._learn(work, name, plan, named, at, reasons)
        unlike = set(misshapen)
        for i, each in reasons.items():
            if i not in later and (each.kind != "shape" or i in unlike):
                letter = Letter(_at(at, i), each.kind, each.reason, (name,))
                if each.kind == "shape":
                    self._misfit(work, replace(letter, kind="misfit"))
                else:
                    work.settled.reject(letter)

    def _by_old_names(
        self,
        work: _Work,
        name: str,
        plan: TablePlan,
        values: Sequence[bytes | None],
        misshapen: list[int],
        at: Longs | None,
    ) -> list[int]:
        """Records that call a renamed column as it was called; gives those that are none."""
        here = set(plan.columns.names)
        newer = {
            old: new
            for new, olds in together(plan.aliases).items()
            for old in olds
            if new in here and old not in here
        }
        texts: list[bytes | None] = [_under(values[i], newer) for i in misshapen]
        groups, rejected = self._decoders[name].decode(texts)
        for group in groups:
            where = _among(np.array(misshapen, np.int64), group.index)
            self._fitted(work, name, plan, group.rows, _among(at, where), None)
        return [misshapen[each.index] for each in rejected]

    def _learn(
        self,
        work: _Work,
        name: str,
        plan: TablePlan | None,
        values: Iterable[tuple[int, bytes | None]],
        at: Longs | None,
        reasons: Mapping[int, Rejected],
    ) -> set[int]:
        """Which of the values would fit if the table were made or changed for them."""
        found = set[int]()
        if plan is None:  # all at once: 1 and 1.5 are both a double
            every = dict(values)
            columns = infer((each for each in every.values() if each is not None), guess=False)
            if len(columns):
                self._need(work, name, columns, {})
                return set(every)
            values = every.items()
        for i, value in values:
            try:
                columns = infer([value] if value is not None else [], guess=False)
                if not len(columns):
                    raise Misfit("cannot name the columns of the value: it is no object with any")
                if plan is not None:
                    aliases = plan.aliases
                    wanted = _changes(plan, columns, aliases)
                    if wanted.impossible:
                        raise Misfit("; ".join(wanted.impossible))
                    if not (wanted.add or wanted.widen or wanted.rename):
                        continue  # what is wrong with it, a change of the table does not heal
                self._need(work, name, columns, plan.aliases if plan else {})
                found.add(i)
            except Misfit as error:
                if i not in reasons:
                    self._misfit(work, Letter(_at(at, i), "misfit", error.message, (name,)))
        return found


class _Work:
    """One chunk on its way."""

    def __init__(self, partition: Partition, opened: Opened, below: frozenset[str]) -> None:
        self.partition = partition
        self.opened = opened
        self.below = below
        self.settled = Settled()
        #: positions of tombstones for tables that are not there, and for some that are
        self.needless: set[int] = set()
        self.heard: set[int] = set()

    def beside(self, what: str, index: Longs | None) -> pa.Array | None:
        column = getattr(self.opened, what)
        return column if column is None or index is None else column.take(pa.array(index))

    def origin(self, index: Longs | None) -> dict[str, pa.Array]:
        """What a Python function sees beside the record's own columns."""
        offsets = _picked(self.opened.offsets, index)
        stamps = _picked(self.opened.stamps, index)
        keys, headers = self.beside("keys", index), self.beside("headers", index)
        return {
            "_topic": pa.repeat(
                pa.scalar(self.partition.kafka_topic, pa.large_string()), len(offsets)
            ),
            "_topic_partition": pa.repeat(
                pa.scalar(self.partition.number, pa.int32()), len(offsets)
            ),
            "_offset": pa.array(offsets),
            "_timestamp": pa.array(stamps * 1000, mask=stamps < 0).view(pa.timestamp("us", "UTC")),
            "_key": pa.nulls(len(offsets), pa.large_binary()) if keys is None else keys,
            "_headers": no_headers(len(offsets)) if headers is None else headers,
        }


def _changes(plan: TablePlan, columns: pa.Schema, aliases: Aliases) -> Any:
    return changes(
        plan.shape.arrow, columns, aliases,
        beside={each.name for each in plan.metadata.fields},
        identifier=plan.identifier, partitions=plan.partitions,
        format_version=plan.format_version,
    )  # fmt: skip


#: The years 1 to 9999, in days since 1970: beyond them a partition has no name.
_DAYS = (-719_162, 2_932_896)


def _check_moments(rows: pa.Table, plan: TablePlan) -> None:
    for name in plan.moments:
        column = rows.column(name)
        days = column.cast(pa.int64() if pa.types.is_timestamp(column.type) else pa.int32())
        scale = {"us": 86_400_000_000, "ns": 86_400_000_000_000}.get(
            getattr(column.type, "unit", ""), 1
        )
        span = pc.min_max(days)
        if span["min"].is_valid and not (
            _DAYS[0] * scale <= span["min"].as_py() and span["max"].as_py() < (_DAYS[1] + 1) * scale
        ):
            raise Misfit(
                f"cannot fit {plan.shape.name}: column {name!r} has a moment outside the years 1 "
                "to 9999, which no partition can name"
            )


def _check_order(rows: pa.Table, plan: TablePlan) -> None:
    if plan.order and (missing := column_of(rows, plan.order).null_count):
        raise Misfit(
            f"cannot fit {plan.shape.name}: column {plan.order!r} says which change of a key is "
            f"the newer one, {missing} records have no value in it"
        )


def _with_order(keys: pa.Table, plan: TablePlan, orders: Any) -> pa.Table:
    """Keys that are deleted, with the order of what deletes them, where that is told."""
    if orders is None or not plan.own_order:
        return keys
    return keys.append_column(plan.own_order, orders)


def _ordered_json(key: bytes, row: bytes, path: str) -> bytes:
    """The same of one key in JSON; the order stands in its row."""
    if not path:
        return key
    try:
        found = debezium.members(row.decode())
        top, *inside = [path] if path in found else path.split(".")
        raw = found[top][1]
        for name in inside:
            raw = debezium.members(raw)[name][1]
    except (ValueError, KeyError, RecursionError, debezium.NoRow):
        return key
    return b"%s,%s:%s}" % (key.rstrip()[:-1], json.dumps(path).encode(), raw.encode())


def _under(value: bytes | None, newer: Mapping[str, str]) -> bytes | None:
    """A JSON object under the names that its fields have now; digits stay as they are."""
    try:
        given = debezium.members((value or b"").decode())
    except (ValueError, RecursionError, debezium.NoRow):
        return value
    named = {newer.get(name, name): raw for name, (_, raw) in given.items()}
    if len(named) < len(given):
        return value  # it has both
    body = ",".join(f"{json.dumps(name)}:{raw}" for name, raw in named.items())
    return f"{{{body}}}".encode(errors="surrogatepass")


def _names(columns: pa.Schema, target: pa.Schema, aliases: Aliases) -> pa.Schema:
    return renamed(columns.empty_table(), target, aliases).schema


def _parts(rows: pa.Table, plan: TablePlan) -> Iterator[Longs]:
    """Rows that lack a value which the table requires, one by one, and all others together; where
    that is not what is wrong, halves."""
    lacking = np.zeros(len(rows), bool)
    required = [each.name for each in plan.columns if not each.nullable]
    for name in (*required, plan.own_order):
        column = column_of(rows, name)
        if column is not None and column.null_count:
            lacking |= column.is_null().to_numpy()
    if lacking.any() and not lacking.all():
        yield np.flatnonzero(~lacking)
        yield np.flatnonzero(lacking)
    else:
        yield from np.array_split(np.arange(len(rows)), 2 if not lacking.all() else len(rows))


def _among(outer: Longs | None, inner: Longs | None) -> Longs | None:
    """Positions within positions."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]


def _at(index: Longs | None, i: int) -> int:
    return i if index is None else int(index[i])


def _picked(numbers: Longs, at: Longs | None) -> Longs:
    return numbers if at is None else numbers[at]
