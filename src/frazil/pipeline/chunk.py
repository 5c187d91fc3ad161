"""Decodes, routes and fits the records of one chunk. Runs on executors.

    bytes ▶ decode ▶ rules ▶ debezium ▶ evolve ▶ route ▶ rows of each table
                └───────┴─────────┴─────────┴───────┴──▶ rejected

In: the records of a chunk: values, keys, headers, offsets and timestamps. Out: `ChunkResult`: rows
in the schema of each table, and a `Rejection` for every record that cannot be decoded, routed or
fitted. Every record is written to all of its tables, skipped by a rule, or rejected by one or more
of its tables. No record is dropped silently.

A table that is missing, or that must change before records fit it, is reported as a need. The
driver collects the needs of all tasks, creates or changes the tables, and runs the batch again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frazil.arrow import default_values
from frazil.config.sections import MAX_COLUMNS
from frazil.errors import SchemaMismatch
from frazil.files.partition_values import check as check_partition
from frazil.files.writer import WriterSpec
from frazil.formats import debezium, json_inference
from frazil.formats.decode_result import DecodedChunk, FramedRecords, UndecodableRecord
from frazil.formats.decoder import Decoder, RecordFormat
from frazil.formats.json_columns import UnexpectedJson, wanted
from frazil.formats.unavailable_value import Placeholder, placeholder
from frazil.kafka.record_batch import Longs, RawRecords, RecordBatches, no_headers
from frazil.offsets import Partition
from frazil.pipeline.evolution import Aliases, changes, merged, renamed, together, unmakeable
from frazil.pipeline.field_text import peek
from frazil.pipeline.projection import (
    MetadataColumns,
    differences,
    moments,
    project_rows,
    too_late,
    why_too_late,
)
from frazil.pipeline.routing import NoRoute, Route, RoutingRules
from frazil.pipeline.tombstones import KeyDecoder
from frazil.pipeline.versions import VersionLookup, column_of, field_of


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A table as the tasks of a batch see it: schema, settings and position."""

    shape: WriterSpec
    metadata: MetadataColumns
    event_time: str
    evolution: str = "evolve"
    aliases: Aliases = field(default_factory=dict)
    #: paths of identifier fields, which stay required; names of the table's partition fields
    identifier: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    format_version: int = 2
    #: the table already contains the records below these offsets
    floor: Mapping[Partition, int] = field(default_factory=dict)
    #: upsert tables: the key columns, and the writer spec of equality-delete files
    key: tuple[str, ...] = ()
    deletes: WriterSpec | None = None
    partitioned_by_key: bool = False
    #: upsert tables with a `version_column`: its path, the `_deleted` table, and the files of
    #: both tables in which to look up the current version of a key
    order: str = ""
    memory: TablePlan | None = None
    known: tuple[VersionLookup, ...] = ()
    #: change logs: the key columns
    log: tuple[str, ...] = ()
    #: how many columns JSON records may add up to, nested ones counted, metadata columns not
    max_columns: int = MAX_COLUMNS

    @property
    def columns(self) -> pa.Schema:
        """The columns of the record, without metadata columns."""
        beside = {column.name for column in self.metadata.fields}
        return pa.schema([column for column in self.shape.arrow if column.name not in beside])

    @property
    def key_columns(self) -> pa.Schema:
        key = self.key or self.log
        return pa.schema([column for column in self.shape.arrow if column.name in key])

    @property
    def told_by_deletes(self) -> pa.Schema:
        """The columns that a delete event contains: the key and, if it has one, its version."""
        order = [self.order_field] if self.own_order else []
        return pa.schema([*self.key_columns, *order])

    @property
    def of_deletes(self) -> pa.Schema:
        """The columns of a delete: key, metadata columns and, if it has one, the version."""
        wanted = {*self.key, *(column.name for column in self.metadata.fields)} - {self.order}
        columns = [column for column in self.shape.arrow if column.name in wanted]
        return pa.schema(columns + ([self.order_field] if self.order else []))

    @property
    def own_order(self) -> str:
        """`order`, if it is a column of the record; empty if it is a metadata column."""
        beside = {column.name for column in self.metadata.fields}
        return "" if self.order in beside else self.order

    @property
    def order_field(self) -> pa.Field:
        return field_of(self.shape.arrow, self.order).with_nullable(True)


@dataclass(frozen=True, slots=True)
class NewTable:
    """The settings of a table that does not exist yet."""

    beside: tuple[str, ...] = ()  # names of its metadata columns
    max_columns: int = MAX_COLUMNS
    #: columns that cannot be float or double: keys, versions, sources of bucket and truncate
    undivided: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected record and the reason."""

    index: int
    kind: str
    reason: str
    #: the tables it was routed to; empty if unknown
    tables: tuple[str, ...] = ()
    schema_id: int | None = None


@dataclass(slots=True)
class ChunkResult:
    rows: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: keys that records delete from upsert tables
    gone: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: former keys of records in `rows` that changed their key
    left: list[tuple[str, pa.Table]] = field(default_factory=list)
    letters: dict[int, Rejection] = field(default_factory=dict)
    skipped: int = 0
    needs: dict[str, pa.Schema] = field(default_factory=dict)

    def reject(self, letter: Rejection) -> None:
        """Add a rejection. Rejections of one record by several tables become one dead letter. The
        reason is shortened and made valid UTF-8: it may quote the record's data."""
        plain = letter.reason[:1000].encode(errors="replace").decode()
        letter = replace(letter, reason=plain)
        known = self.letters.get(letter.index)
        if known is not None:
            reason = (
                known.reason
                if letter.reason in known.reason
                else (f"{known.reason}; {letter.reason}")
            )
            tables = tuple(dict.fromkeys((*known.tables, *letter.tables)))
            letter = Rejection(letter.index, known.kind, reason, tables, known.schema_id)
        self.letters[letter.index] = letter

    def need(self, table: str, columns: pa.Schema, aliases: Aliases) -> None:
        add_need(self.needs, table, needed(columns, aliases))


JSON = RecordFormat("json")

#: Modes of tables with a key, and the operation column of a change log: Debezium's operation, or
#: u for a record with a value and d for one without.
LOG = "changelog"
UPSERT = "upsert"
OP = pa.field("_op", pa.large_string())


#: The kind of a rejected change: the database did not send the value of a column.
UNAVAILABLE = "unavailable"


def _not_carried(name: str, column: str, look: Placeholder) -> str:
    return (
        f"cannot apply a change to {name}: it does not carry the value of column {column!r}; found "
        f"Debezium's placeholder {look.text[:64]!a}. Let the database send whole rows (PostgreSQL: "
        "REPLICA IDENTITY FULL), or Debezium select the column again (ReselectColumns)"
    )


def _with_op(rows: pa.Table, op: str) -> pa.Table:
    """Rows with column `_op`: `op` where a row has no operation of its own."""
    if "_op" not in rows.schema.names:
        return rows.append_column(OP, pa.repeat(pa.scalar(op, OP.type), len(rows)))
    at = rows.schema.get_field_index("_op")
    return rows.set_column(at, OP, rows.column("_op").cast(OP.type).fill_null(op))


#: Schema metadata of a need: former names of its columns; if it was inferred from JSON records,
#: their votes, the table's current columns and the maximal number of columns.
_ALIASES, _VOTES, _BASE = b"frazil.aliases", b"frazil.votes", b"frazil.base"
_MOST = b"frazil.most"


def needed(columns: pa.Schema, aliases: Aliases) -> pa.Schema:
    """A need: the columns that a table must have, with their former names."""
    return columns.with_metadata({_ALIASES: json.dumps(together(aliases)).encode()})


def voted(votes: json_inference.Votes, base: pa.Schema, aliases: Aliases, most: int) -> pa.Schema:
    """A need inferred from JSON records: their votes extend the columns `base`, up to `most`."""
    need = needed(json_inference.columns(votes, base, most), aliases)
    beside = {
        _VOTES: json.dumps(votes).encode(),
        _BASE: base.serialize().to_pybytes(),
        _MOST: b"%d" % most,
    }
    return need.with_metadata({**need.metadata, **beside})


def aliases_of(need: pa.Schema) -> dict[str, tuple[str, ...]]:
    aliases = json.loads((need.metadata or {}).get(_ALIASES, b"{}"))
    return {path: tuple(names) for path, names in aliases.items()}


def add_need(needs: dict[str, pa.Schema], table: str, need: pa.Schema) -> None:
    """Merge a need into `needs`. Votes of JSON records are added up. Of two incompatible writer
    schemas the first stays; records of the other are rejected once the table exists."""
    known = needs.get(table)
    if known is None:
        needs[table] = need
        return
    aliases = together(aliases_of(known), aliases_of(need))
    one, other = known.metadata or {}, need.metadata or {}
    if _VOTES in one and one.get(_BASE) == other.get(_BASE):
        votes = json.loads(one[_VOTES])
        json_inference.add(votes, json.loads(other[_VOTES]))
        base = pa.ipc.read_schema(pa.py_buffer(one[_BASE]))
        needs[table] = voted(votes, base, aliases, int(one[_MOST]))
        return
    with suppress(SchemaMismatch):
        needs[table] = needed(merged(known, need, aliases), aliases)


#: Size of the cache of wanted table changes, which hostile records would fill without end.
_MOST_WANTS = 1_000


class ChunkPipeline:
    """Processes the chunks of one task."""

    def __init__(
        self,
        format: RecordFormat,
        rules: RoutingRules | None,
        tables: Mapping[str, TablePlan],
        refused: Mapping[str, str] | None = None,
        only: str = "",
        keyed: Mapping[str, str] | None = None,
        key_format: RecordFormat | None = None,
        new: Mapping[str, NewTable] | None = None,
    ) -> None:
        """Without `rules` all records go to table `only`.

        `refused`: tables that could not be created or changed as records need it, with the reason.
        `keyed`: names and templates of upsert tables and change logs, with their mode.
        `key_format`: format of the keys of records without a value; None: text.
        `new`: names and templates of tables, with the settings of one that does not exist yet.
        """
        self._format = format
        self._rules = rules
        self._tables = tables
        self._refused = refused or {}
        self._json = format.kind == "json"
        self._decoder = Decoder(format)
        self._decoders: dict[str, Decoder] = {}
        self._verdicts: dict[tuple[str, str], str | bool] = {}
        self._wants: dict[tuple[str, str], str] = {}
        self._only = Route((only,), None, -1, "")
        self._keyed = keyed or {}
        self._key_format = key_format
        self._new = new or {}

    def framed(self, records: RecordBatches | None) -> FramedRecords | None:
        """Kafka's record batches decoded directly into columns; None: not possible."""
        return None if self._json or records is None else self._decoder.framed(records)

    def way(self, partition: Partition) -> Route | NoRoute | None:
        """The route of all records of a partition; None: it depends on the record."""
        return self._rules.of_topic(partition.kafka_topic) if self._rules else self._only

    def settle(
        self,
        partition: Partition,
        opened: RawRecords,
        framed: FramedRecords | None,
        below: frozenset[str],
    ) -> ChunkResult:
        """Process one chunk. `below`: tables that already contain its records."""
        work = _ChunkWork(partition, opened, below)
        way = self.way(partition)
        if isinstance(way, NoRoute):
            for i in range(len(opened.offsets)):
                work.settled.reject(Rejection(i, way.kind, way.reason))
        elif self._json:
            self._of_json(work, way)
        else:
            self._of_columns(work, way, framed)
        work.settled.skipped += len(work.needless - work.heard - work.settled.letters.keys())
        work.settled.left = [
            (name, self._kept(work, name, keys)) for name, keys in work.settled.left
        ]
        return work.settled

    # ── Avro and other formats that decode without the table's schema ────────────────────────

    def _of_columns(
        self, work: _ChunkWork, way: Route | None, framed: FramedRecords | None
    ) -> None:
        if framed is not None:
            groups, rejected = [framed.decoded], list[UndecodableRecord]()
        else:
            groups, rejected = self._decoder.decode(work.opened.values, work.opened.headers)
        for record in self._deleting(work, way, rejected):
            self._undecoded(work, record, way)
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
                    except SchemaMismatch as error:
                        kept = np.empty(0, np.int64)
                        bad = [
                            UndecodableRecord(i, "envelope", error.message)
                            for i in range(len(rows))
                        ]
                        rows = rows.slice(0, 0)
                    for record in bad:
                        where = record.index if at is None else int(at[record.index])
                        work.settled.reject(
                            Rejection(
                                where, record.kind, record.reason, share.tables, group.schema_id
                            )
                        )
                    at = _among(at, kept)
                aliases = self._decoder.aliases(group.schema_id)
                if share.envelope:
                    aliases = debezium.aliases(aliases)
                for name in share.tables:
                    part = (rows, at)
                    if share.envelope and name in self._tables:
                        part = self._deleted(work, name, *part, group.schema_id)
                    elif self._mode(name) == LOG:
                        part = (_with_op(part[0], "u"), part[1])
                    self._into(work, name, *part, aliases, group.schema_id)

    def _undecoded(self, work: _ChunkWork, rejected: UndecodableRecord, way: Route | None) -> None:
        if rejected.kind == "null" and self._changes(work):
            work.settled.skipped += 1  # a tombstone: the delete event before it was a row
        elif way is not None and not way.tables:
            work.settled.skipped += 1  # a rule skips the whole topic
        else:
            tables = way.tables if way else ()
            work.settled.reject(
                Rejection(
                    rejected.index, rejected.kind, rejected.reason, tables, rejected.schema_id
                )
            )

    # ── deletes ──────────────────────────────────────────────────────────────────────────────

    def _mode(self, name: str) -> str:
        """The mode of a table: upsert, changelog, or empty for append."""
        return self._keyed.get(self._rules.template(name) if self._rules else name, "")

    def _deleting(
        self, work: _ChunkWork, way: Route | None, rejected: Sequence[UndecodableRecord]
    ) -> list[UndecodableRecord]:
        """Process records without a value: a delete in an upsert table, a row of a change log.
        Returns the other rejected records."""
        names = [name for name in way.tables if self._mode(name)] if way else []
        if not names or self._changes(work):
            return list(rejected)
        nulls = np.array([record.index for record in rejected if record.kind == "null"], np.int64)
        for name in names:
            self._tombstones(work, name, nulls)
        others = [name for name in way.tables if name not in names] if way else []
        for i in nulls.tolist() if others else ():
            reason = "cannot read the value: found null"
            work.settled.reject(Rejection(i, "null", reason, tuple(others)))
        return [record for record in rejected if record.kind != "null"]

    def _tombstones(self, work: _ChunkWork, name: str, at: Longs) -> None:
        plan = self._tables.get(name)
        if plan is None:
            work.needless.update(at.tolist())  # the table does not exist: nothing to delete
            return
        work.heard.update(at.tolist())
        if not len(at) or name in work.below:
            return
        keys = work.opened.keys
        given = [None] * len(at) if keys is None else keys.take(pa.array(at)).to_pylist()
        self._by_keys(work, name, plan, self._key_format, given, at)

    def _by_keys(
        self,
        work: _ChunkWork,
        name: str,
        plan: TablePlan,
        format: RecordFormat | None,
        given: Sequence[bytes | None],
        at: Longs,
        columns: pa.Schema | None = None,
    ) -> None:
        """Delete the keys `given`. `columns`: their columns, if they contain more than the key."""
        rows, index, bad = KeyDecoder(format, columns or plan.key_columns).read(given)
        for record in bad:
            letter = Rejection(
                int(at[record.index]), record.kind, record.reason, (name,), record.schema_id
            )
            work.settled.reject(letter)
        if plan.log:
            self._fitted(work, name, plan, _with_op(rows, "d"), at[index], None)
        else:
            self._fitted(work, name, plan, rows, at[index], None, work.settled.gone)

    def _deleted(
        self, work: _ChunkWork, name: str, rows: pa.Table, at: Longs | None, schema_id: int | None
    ) -> tuple[pa.Table, Longs | None]:
        """Process the deletes among unwrapped changes. Returns the changes that are rows."""
        plan = self._tables[name]
        if not plan.key or name in work.below:
            return rows, at
        gone = pc.equal(rows.column("_op"), "d").to_numpy()
        if not gone.any():
            return rows, at
        index = np.flatnonzero(gone)
        lacking = [column for column in plan.key if column not in rows.schema.names]
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
        self,
        work: _ChunkWork,
        names: Sequence[str],
        rows: pa.Table,
        at: Longs | None,
        schema_id: int | None,
    ) -> None:
        """Delete the old keys of rows whose key changed."""
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

    def _changes(self, work: _ChunkWork) -> bool:
        return self._rules is not None and self._rules.changes(work.partition.kafka_topic)

    def _sorted(self, work: _ChunkWork, rows: pa.Table, index: Longs | None) -> list[Route]:
        assert self._rules is not None
        headers = work.beside("headers", index) if self._rules.wants_headers else None
        origin = work.origin(index) if self._rules.wants_rows else None
        routed = self._rules.sort(work.partition.kafka_topic, rows, headers=headers, origin=origin)
        for record in routed.rejected:
            where = record.index if index is None else int(index[record.index])
            work.settled.reject(Rejection(where, record.kind, record.reason))
        return routed.shares

    def _into(
        self,
        work: _ChunkWork,
        name: str,
        rows: pa.Table,
        at: Longs | None,
        aliases: Aliases,
        schema_id: int | None,
    ) -> None:
        """Fit rows of one writer schema into one table, or reject them, or record a need."""
        if name in work.below or not len(rows):
            return
        plan = self._tables.get(name)
        if plan is None:
            if reason := self._refused.get(name) or self._unmakeable(name, rows.schema):
                self._reject(work, name, reason, len(rows), at, schema_id)
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

    def _kept(self, work: _ChunkWork, name: str, keys: pa.Table) -> pa.Table:
        """`keys` without those of records that the table rejects: their old rows stay."""
        letters = work.settled.letters
        positions = [i for i, letter in letters.items() if name in letter.tables]
        rejected = (
            pa.array(work.opened.offsets[positions]) if positions else pa.array([], pa.int64())
        )
        offset = self._tables[name].metadata.offset
        return keys.filter(pc.invert(pc.is_in(keys.column(offset), rejected)))

    def _need(self, work: _ChunkWork, name: str, columns: pa.Schema, aliases: Aliases) -> None:
        if self._mode(name) == LOG:  # a delete may contain nothing but its key
            if "_op" not in columns.names:
                columns = columns.append(OP)
            columns = pa.schema(
                [column.with_nullable(True) for column in columns], columns.metadata
            )
        work.settled.need(name, columns, aliases)

    def _unmakeable(self, name: str, columns: pa.Schema) -> str:
        """Why a table cannot be created with these columns; empty: it can."""
        return unmakeable(columns, self._made(name).beside)

    def _made(self, name: str) -> NewTable:
        template = self._rules.template(name) if self._rules else name
        return self._new.get(template, NewTable())

    def _reject(
        self,
        work: _ChunkWork,
        name: str,
        reason: str,
        count: int,
        at: Longs | None,
        schema_id: int | None,
    ) -> None:
        for i in range(count) if at is None else at.tolist():
            self._misfit(work, Rejection(i, "misfit", reason, (name,), schema_id))

    def _misfit(self, work: _ChunkWork, letter: Rejection) -> None:
        [name] = letter.tables
        if name not in letter.reason:
            fact = letter.reason.removeprefix("cannot fit ")
            letter = replace(letter, reason=f"cannot fit {name}: {fact}")
        if name in self._tables and self._tables[name].evolution == "fail":
            where = f"{work.partition} offset {int(work.opened.offsets[letter.index])}"
            raise SchemaMismatch(
                f"cannot write {where}: {letter.reason}",
                hint="change the table, or set its schema_evolution to evolve or reject",
            )
        work.settled.reject(letter)

    def _verdict(self, plan: TablePlan, columns: pa.Schema, aliases: Aliases) -> str | bool:
        """False: records with these columns fit. True: they fit after a change of the table.
        Otherwise the reason why they never fit."""
        lacking = [
            column for column in plan.metadata.fields if column.name not in plan.shape.arrow.names
        ]
        if plan.evolution == "evolve":
            schema_changes = _changes(plan, columns, aliases)
            if not schema_changes.impossible:
                changed = bool(schema_changes or lacking)
                return changed and self._refused.get(plan.shape.name, changed)
            return f"cannot fit {plan.shape.name}: {'; '.join(schema_changes.impossible)}"
        named = _names(columns, plan.columns, aliases)
        misfits = differences(pa.schema([*named, *plan.metadata.fields]), plan.shape.arrow)
        return f"cannot fit {plan.shape.name}: {'; '.join(misfits)}" if misfits else False

    def _fitted(
        self,
        work: _ChunkWork,
        name: str,
        plan: TablePlan,
        rows: pa.Table,
        at: Longs | None,
        schema_id: int | None,
        deletes: list[tuple[str, pa.Table]] | None = None,
    ) -> None:
        """Fit rows into the table's schema and add them to the result, or keys to `deletes`.
        Rows that do not fit are rejected one by one."""
        rows, at = self._in_time(work, name, plan, rows, at, schema_id)
        if deletes is None:
            rows, at = self._available(work, name, rows, at, schema_id)
        if not len(rows):
            return
        target = plan.shape.arrow if deletes is None else plan.of_deletes
        try:
            shaped = project_rows(
                rows,
                target,
                plan.metadata,
                work.partition,
                _picked(work.opened.offsets, at),
                _picked(work.opened.stamps, at),
            )
            if deletes is None:
                check_partition(shaped, plan.shape.schema, plan.shape.spec, plan.shape.name)
                _check_order(shaped, plan)
        except SchemaMismatch as error:
            positions = np.arange(len(rows)) if at is None else at
            if len(rows) == 1:
                letter = Rejection(int(positions[0]), "misfit", error.message, (name,), schema_id)
                self._misfit(work, letter)
                return
            for part in _parts(rows, plan):
                some = rows.take(pa.array(part))
                self._fitted(work, name, plan, some, positions[part], schema_id, deletes)
            return
        (work.settled.rows if deletes is None else deletes).append((name, shaped))

    def _in_time(
        self,
        work: _ChunkWork,
        name: str,
        plan: TablePlan,
        rows: pa.Table,
        at: Longs | None,
        schema_id: int | None,
    ) -> tuple[pa.Table, Longs | None]:
        """Reject records whose timestamp does not fit the table's timestamp column. Returns the
        others."""
        stamps = _picked(work.opened.stamps, at)
        late = too_late(stamps) if plan.metadata.timestamp else np.empty(0, np.int64)
        if not len(late):
            return rows, at
        for i in late.tolist():
            reason = why_too_late(int(stamps[i]))
            self._misfit(work, Rejection(_at(at, i), "timestamp", reason, (name,), schema_id))
        kept = np.delete(np.arange(len(rows)), late)
        return rows.take(pa.array(kept)), _among(at, kept)

    def _available(
        self, work: _ChunkWork, name: str, rows: pa.Table, at: Longs | None, schema_id: int | None
    ) -> tuple[pa.Table, Longs | None]:
        """Reject records that would overwrite a value of an upsert table with Debezium's
        placeholder, in the envelope or flattened. Other tables write the placeholder as sent."""
        look = placeholder(self._format.unavailable)
        if look is None or self._mode(name) != UPSERT:
            return rows, at
        bad = np.zeros(len(rows), bool)
        for column, mask in look.in_columns(rows).items():
            for i in np.flatnonzero(mask & ~bad).tolist():
                reason = _not_carried(name, column, look)
                work.settled.reject(Rejection(_at(at, i), UNAVAILABLE, reason, (name,), schema_id))
            bad |= mask
        if not bad.any():
            return rows, at
        kept = np.flatnonzero(~bad)
        return rows.take(pa.array(kept)), _among(at, kept)

    # ── JSON: decoded by the schema of the table ──────────────────────────────────────────────

    def _of_json(self, work: _ChunkWork, way: Route | None) -> None:
        values = work.opened.values
        present: Longs | None = None
        looked = None
        if self._changes(work):  # a tombstone repeats the delete event before it
            present = np.flatnonzero([value is not None for value in values])
            work.settled.skipped += len(values) - len(present)
        if way is not None:
            shares = [replace(way, index=present)]
        else:
            assert self._rules is not None
            texts = values if present is None else [values[i] for i in present.tolist()]
            rows = peek(texts, self._rules.fields)
            looked = np.zeros(len(values), bool)  # where a rule found one of its fields
            for column in rows.columns:
                looked[slice(None) if present is None else present] |= column.is_valid().to_numpy()
            if self._rules.wants_rows:
                rows = rows.append_column("value", pa.array(texts, pa.large_binary()))
            routes = self._sorted(work, rows, present)
            shares = [replace(route, index=_among(present, route.index)) for route in routes]
        for share in shares:
            at = share.index
            texts = values if at is None else [values[i] for i in at.tolist()]
            if not share.tables:
                self._skip_json(work, texts, at, None if way else looked)
                continue
            if share.envelope:
                self._changes_json(work, share, texts, at)
            else:
                for name in share.tables:
                    self._json_into(work, name, texts, at, np.zeros(len(texts), bool))

    def _changes_json(
        self, work: _ChunkWork, share: Route, changes: Sequence[bytes | None], at: Longs | None
    ) -> None:
        unwrapped = debezium.unwrap_json(changes)
        work.named |= unwrapped.named
        for record in unwrapped.rejected:
            work.settled.reject(
                Rejection(_at(at, record.index), record.kind, record.reason, share.tables)
            )
        present = [i for i, row in enumerate(unwrapped.rows) if row is not None]
        # The other changes are tombstones in Connect's wrapper.
        work.settled.skipped += len(changes) - len(present) - len(unwrapped.rejected)
        if not present:
            return
        rows, where = [unwrapped.rows[i] for i in present], _among(at, np.array(present, np.int64))
        gone = np.array([i in unwrapped.deleted for i in present], bool)
        for name in share.tables:
            self._moved_json(work, name, [changes[i] for i in present], rows, where)
            self._json_into(work, name, rows, where, gone)

    def _skip_json(
        self, work: _ChunkWork, values: Sequence[bytes | None], at: Longs | None, looked: Any
    ) -> None:
        """Skip values by a rule. A value in which the rules found no field is rejected if it is
        not valid JSON."""
        work.settled.skipped += len(values)
        if looked is None:
            return
        where = np.arange(len(values)) if at is None else at
        blind = np.flatnonzero(~looked[where]).tolist()
        _, broken = Decoder(self._format, pa.schema([])).decode([values[i] for i in blind])
        for record in broken:
            if record.kind != "shape":
                work.settled.skipped -= 1
                work.settled.reject(
                    Rejection(int(where[blind[record.index]]), record.kind, record.reason)
                )

    def _moved_json(
        self,
        work: _ChunkWork,
        name: str,
        changes: Sequence[bytes | None],
        after: Sequence[bytes | None],
        at: Longs | None,
    ) -> None:
        plan = self._tables.get(name)
        if plan is None or not plan.key or name in work.below:
            return
        pairs = {
            i: (_ordered_json(pair[0], newer or b"", plan.own_order), pair[1])
            for i, (change, newer) in enumerate(zip(changes, after, strict=True))
            if (pair := debezium.keys_json(change, plan.key)) is not None
        }
        if not pairs:
            return
        former, current = zip(*pairs.values(), strict=True)
        rows, some, _ = KeyDecoder(JSON, plan.told_by_deletes).read(former)
        now, others, _ = KeyDecoder(JSON, plan.key_columns).read(current)
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
        where = _among(at, np.array(list(pairs), np.int64)[some[moved]])
        self._fitted(work, name, plan, rows.take(moved), where, None, work.settled.left)

    def _json_into(
        self,
        work: _ChunkWork,
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
            nulls = np.array([value is None for value in values], bool)
            self._tombstones(work, name, where[nulls])
            if plan is not None and plan.key:
                rows_gone = [values[i] or b"" for i in np.flatnonzero(deleted).tolist()]
                texts = [_ordered_json(text, text, plan.own_order) for text in rows_gone]
                self._by_keys(work, name, plan, JSON, texts, where[deleted], plan.told_by_deletes)
                nulls |= deleted
            kept = np.flatnonzero(~nulls)
            values, at = [values[i] for i in kept.tolist()], where[kept]
            if not values:
                return
        if plan is None:
            if name in self._refused:
                self._reject(work, name, self._refused[name], len(values), at, None)
            else:
                _, reasons = self._learn(work, name, None, enumerate(values))
                for i, record in reasons.items():
                    self._unlike(work, name, record, _at(at, i))
            return
        if name not in self._decoders:
            # The table's own columns fit; only metadata columns can be missing.
            if verdict := self._verdict(plan, plan.columns, {}):
                if verdict is not True:
                    self._reject(work, name, verdict, len(values), at, None)
                else:
                    work.settled.need(name, plan.columns, {})
                return
            self._decoders[name] = Decoder(self._format, default_values.loosened(plan.columns))
        groups, rejected = self._decoders[name].decode(values)
        for group in groups:
            rows = _with_defaults(plan, group, values)
            rows = _with_op(rows, "u") if plan.log else rows
            self._fitted(work, name, plan, rows, _among(at, group.index), None)
        reasons = {record.index: record for record in rejected}
        misshapen = [i for i, record in reasons.items() if record.kind == "shape"]
        if misshapen and plan.aliases:
            misshapen = self._by_old_names(work, name, plan, values, misshapen, at)
        later = set[int]()
        if plan.evolution == "evolve" and name not in self._refused:
            named = ((i, values[i]) for i in misshapen)
            later, misfits = self._learn(work, name, plan, named)
            reasons |= misfits
        unlike = set(misshapen)
        for i, record in reasons.items():
            if i not in later and (record.kind != "shape" or i in unlike):
                self._unlike(work, name, record, _at(at, i))

    def _unlike(self, work: _ChunkWork, name: str, rejected: UndecodableRecord, at: int) -> None:
        letter = Rejection(at, rejected.kind, rejected.reason, (name,))
        if rejected.kind == "shape":
            self._misfit(work, replace(letter, kind="misfit"))
        else:
            work.settled.reject(letter)

    def _by_old_names(
        self,
        work: _ChunkWork,
        name: str,
        plan: TablePlan,
        values: Sequence[bytes | None],
        misshapen: list[int],
        at: Longs | None,
    ) -> list[int]:
        """Decode records that use former names of renamed columns. Returns those that still do not
        fit."""
        newer = _newer(plan)
        texts: list[bytes | None] = [_under(values[i], newer) for i in misshapen]
        groups, rejected = self._decoders[name].decode(texts)
        for group in groups:
            where = _among(np.array(misshapen, np.int64), group.index)
            rows = _with_defaults(plan, group, texts)
            self._fitted(work, name, plan, rows, _among(at, where), None)
        return [misshapen[record.index] for record in rejected]

    def _learn(
        self,
        work: _ChunkWork,
        name: str,
        plan: TablePlan | None,
        values: Iterable[tuple[int, bytes | None]],
    ) -> tuple[set[int], dict[int, UndecodableRecord]]:
        """Infer a need of the table from JSON values. Returns the positions of values that would
        fit after the change, and the reasons of those that never fit. Each of the former is
        possible by itself; where they contradict each other, votes decide."""
        base = pa.schema([]) if plan is None else plan.columns
        judged = default_values.loosened(base)
        newer = {} if plan is None else _newer(plan)
        renames = {} if plan is None else _renames(plan)
        fitting, reasons, votes = set[int](), dict[int, UndecodableRecord](), json_inference.Votes()
        for i, value in values:
            if value is None:
                reasons[i] = UndecodableRecord(i, "null", "cannot read the value: found null")
                continue
            try:
                text = _under(value, newer) if newer else value
                known = {*base.names, *renames}
                typed = {n: k for n, k in work.named.get(value, {}).items() if n not in known}
                # A column with a declared type is judged as if the table had it.
                whole = pa.schema(
                    [*judged, *((n, json_inference.arrow(k, n)) for n, k in typed.items())]
                )
                kind = wanted(text or b"", whole, renames)
                kind = _in_order(value, kind | typed) if typed else kind
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
            add_need(work.settled.needs, name, voted(votes, base, aliases, most))
        return fitting, reasons

    def _refuse_placeholder(self, name: str, kind: dict[str, Any]) -> None:
        """Reject the placeholder of an hstore, an object with the placeholder as a key: a column
        of that name must not be created."""
        look = placeholder(self._format.unavailable)
        if look is not None and (column := json_inference.holder(kind, look.text)):
            raise UnexpectedJson(UNAVAILABLE, _not_carried(name, column, look))

    def _unchangeable(self, name: str, plan: TablePlan | None, kind: dict[str, Any]) -> str:
        """Why the table cannot be created or changed as one record needs it; empty: it can."""
        key = (name, repr(kind))
        if key not in self._wants:
            if len(self._wants) >= _MOST_WANTS:
                self._wants.clear()
            votes = json_inference.Votes()
            json_inference.vote(votes, kind)
            columns = json_inference.columns(votes, plan.columns if plan else None)
            if plan is None:
                reason = self._unmakeable(name, columns) if kind else "it names no column"
                more = True
            else:
                schema_changes = _changes(plan, columns, plan.aliases)
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


class _ChunkWork:
    """One chunk in progress and its result."""

    def __init__(self, partition: Partition, opened: RawRecords, below: frozenset[str]) -> None:
        self.partition = partition
        self.opened = opened
        self.below = below
        self.settled = ChunkResult()
        #: JSON row → kinds of the columns with a type declared in the envelope's schema
        self.named: dict[bytes, dict[str, str]] = {}
        #: positions of tombstones for tables that do not exist, and for tables that do
        self.needless: set[int] = set()
        self.heard: set[int] = set()

    def beside(self, name: str, index: Longs | None) -> pa.Array | None:
        column = getattr(self.opened, name)
        return column if column is None or index is None else column.take(pa.array(index))

    def origin(self, index: Longs | None) -> dict[str, pa.Array]:
        """The metadata columns that a Python function sees beside the record's own."""
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
            "_timestamp": moments(stamps),
            "_key": pa.nulls(len(offsets), pa.large_binary()) if keys is None else keys,
            "_headers": no_headers(len(offsets)) if headers is None else headers,
        }


def _changes(plan: TablePlan, columns: pa.Schema, aliases: Aliases) -> Any:
    return changes(
        plan.shape.arrow,
        columns,
        aliases,
        beside={column.name for column in plan.metadata.fields},
        identifier=plan.identifier,
        partitions=plan.partitions,
        format_version=plan.format_version,
    )


def _check_order(rows: pa.Table, plan: TablePlan) -> None:
    if plan.order and (missing := column_of(rows, plan.order).null_count):
        raise SchemaMismatch(
            f"cannot fit {plan.shape.name}: column {plan.order!r} says which change of a key is "
            f"the newer one, {missing} records have no value in it"
        )


def _with_defaults(
    plan: TablePlan, group: DecodedChunk, values: Sequence[bytes | None]
) -> pa.Table:
    """Rows of JSON values, with the table's defaults for missing fields."""
    if not default_values.any_of(plan.columns):
        return group.rows
    texts = values if group.index is None else [values[i] for i in group.index.tolist()]
    return default_values.of_json(group.rows, plan.columns, texts)


def _with_order(keys: pa.Table, plan: TablePlan, orders: Any) -> pa.Table:
    """Deleted keys with the version of the delete, if it has one."""
    if orders is None or not plan.own_order:
        return keys
    return keys.append_column(plan.own_order, orders)


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
    names = set(plan.columns.names)
    return {
        old: new
        for new, olds in together(plan.aliases).items()
        for old in olds
        if new in names and old not in names
    }


def _renames(plan: TablePlan) -> dict[str, str]:
    """New name → current name of columns that are yet to be renamed."""
    names = set(plan.columns.names)
    return {
        new: old
        for new, olds in together(plan.aliases).items()
        for old in olds
        if new not in names and old in names
    }


def _names(columns: pa.Schema, target: pa.Schema, aliases: Aliases) -> pa.Schema:
    return renamed(columns.empty_table(), target, aliases).schema


def _parts(rows: pa.Table, plan: TablePlan) -> Iterator[Longs]:
    """Split rows of which some do not fit. Rows with all required values come together, the others
    in a second part, then one by one; if no value is missing, the rows are halved."""
    lacking = np.zeros(len(rows), bool)
    required = [column.name for column in plan.columns if not column.nullable]
    for name in (*required, plan.own_order):
        values = column_of(rows, name)
        if values is not None and values.null_count:
            lacking |= values.is_null().to_numpy()
    if lacking.any() and not lacking.all():
        yield np.flatnonzero(~lacking)
        yield np.flatnonzero(lacking)
    else:
        yield from np.array_split(np.arange(len(rows)), 2 if not lacking.all() else len(rows))


def _among(outer: Longs | None, inner: Longs | None) -> Longs | None:
    """Positions `inner` within the positions `outer`; None: all."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]


def _at(index: Longs | None, i: int) -> int:
    return i if index is None else int(index[i])


def _picked(numbers: Longs, at: Longs | None) -> Longs:
    return numbers if at is None else numbers[at]
