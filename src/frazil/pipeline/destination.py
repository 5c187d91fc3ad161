"""A table that records are routed to, as one task sees it. Runs on executors.

In: what the `ChunkPlan` says of the table, or of the template of its name. Out: how JSON records
are read for it, which fields of a record are its key, and whether columns fit it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from frazil.arrow import default_values
from frazil.config.select_checks import from_key
from frazil.formats import json_inference
from frazil.formats.json_reader import JsonShape
from frazil.pipeline import evolution
from frazil.pipeline.evolution import Aliases, SchemaChanges
from frazil.pipeline.json_source import JsonSource
from frazil.pipeline.table_plan import LOG, ChunkPlan, NewTable, TablePlan

#: Size of the cache of wanted table changes, which hostile records would fill without end.
_MOST_WANTS = 1_000


class Destination:
    """Made once for each table of a task, when the first record is routed to it."""

    def __init__(self, name: str, plan: ChunkPlan) -> None:
        template = plan.rules.template(name) if plan.rules else name
        self.name = name
        self.exists = name in plan.tables
        #: upsert, changelog, or empty for append
        self.mode = plan.keyed.get(template, "")
        self.select = plan.selects.get(template)
        #: why it could not be created, or changed as records need it
        self.refused = plan.refused.get(name, "")
        #: its settings if it does not exist yet
        self.new = plan.new.get(template, NewTable())
        self._plan = plan
        self._verdicts: dict[str, str | bool] = {}
        self._wants: dict[str, str] = {}

    @property
    def plan(self) -> TablePlan:
        return self._plan.tables[self.name]

    # ── how its records are read ─────────────────────────────────────────────────────────────────

    @cached_property
    def json_source(self) -> JsonSource:
        key_format = self._plan.key_format
        source = JsonSource(
            self._plan.format,
            self.select.selection if self.select else None,
            key_format.declared if key_format else pa.schema([]),
            self.mode == LOG,
        )
        return replace(source, columns=self.plan.columns if self.exists else source.fixed)

    @cached_property
    def json_fields(self) -> dict[str, pa.Field]:
        """The fields of records that are read for it, as far as their types are known."""
        return {field.name: field for field in self.json_source.shape}

    @cached_property
    def json_verdict(self) -> str | bool:
        """The `verdict` on the columns that the table must have whatever records hold."""
        return self._verdict(self.json_source.expected, {}, relax=True)

    @cached_property
    def json_reader(self) -> JsonShape:
        fields = self.json_source.shape
        return JsonShape(default_values.loosened(fields).with_metadata(fields.metadata))

    @cached_property
    def key_fields(self) -> dict[str, str] | None:
        """Key column → field of the record's value; None: it comes from the record's Kafka key."""
        names = self.plan.key or self.plan.log
        if self.select is None:
            return {name: name for name in names}
        selection = self.select.selection
        if any(from_key(selection, name) for name in names):
            return None
        sources = {name: selection.source(name) for name in names}
        return {name: source[0] for name, source in sources.items() if source}

    @cached_property
    def order_path(self) -> str:
        """The path of the version in the record's value; empty: it has none."""
        order = self.plan.own_order
        source = self.select.selection.source(order) if self.select and order else None
        return order if source is None else ".".join(source)

    # ── do columns fit it ────────────────────────────────────────────────────────────────────────

    def changes(self, columns: pa.Schema, aliases: Aliases) -> SchemaChanges:
        """Changes of the table after which records with these columns fit."""
        plan = self.plan
        return evolution.changes(
            plan.shape.arrow,
            columns,
            aliases,
            beside={column.name for column in plan.metadata.fields},
            identifier=plan.identifier,
            partitions=plan.partitions,
            format_version=plan.format_version,
        )

    def verdict(self, columns: pa.Schema, aliases: Aliases, relax: bool = True) -> str | bool:
        """False: records with these columns fit. True: they fit after a change of the table.
        Otherwise the reason why they never fit. `relax`: a column that they lack becomes optional;
        not so where an object without a field implies nothing about the next."""
        key = f"{columns.to_string()} {aliases} {relax}"
        if key not in self._verdicts:
            self._verdicts[key] = self._verdict(columns, aliases, relax)
        return self._verdicts[key]

    def _verdict(self, columns: pa.Schema, aliases: Aliases, relax: bool) -> str | bool:
        plan, metadata = self.plan, self.plan.metadata.fields
        if plan.evolution != "evolve":
            named = evolution.renamed(columns.empty_table(), plan.columns, aliases).schema
            misfits = evolution.differences(pa.schema([*named, *metadata]), plan.shape.arrow)
            return f"cannot fit {self.name}: {'; '.join(misfits)}" if misfits else False
        needed = self.changes(columns, aliases)
        if needed.impossible:
            return f"cannot fit {self.name}: {'; '.join(needed.impossible)}"
        if not relax:
            return bool(needed.add or needed.widen or needed.rename)
        changed = bool(needed or {column.name for column in metadata} - {*plan.shape.arrow.names})
        return changed and (self.refused or changed)

    @property
    def max_columns(self) -> int:
        return self.plan.max_columns if self.exists else self.new.max_columns

    def unmakeable(self, columns: pa.Schema) -> str:
        """Why the table cannot be created with these columns; empty: it can."""
        return evolution.unmakeable(columns, self.new.beside)

    def unchangeable(self, kind: dict[str, Any]) -> str:
        """Why it cannot be created or changed as one JSON record needs it; empty: it can."""
        key = repr(kind)
        if key not in self._wants:
            if len(self._wants) >= _MOST_WANTS:
                self._wants.clear()
            self._wants[key] = self._unchangeable(kind)
        return self._wants[key]

    def _unchangeable(self, kind: dict[str, Any]) -> str:
        votes = json_inference.Votes()
        json_inference.vote(votes, kind)
        known = self.json_source.columns
        columns = json_inference.columns(votes, known)
        if not self.exists:
            named = bool(kind or len(known))
            reason = self.unmakeable(columns) if named else "it names no column"
            more = True
        else:
            needed = self.changes(columns, self.plan.aliases)
            reason = "; ".join(needed.impossible)
            more = bool(needed.add)
            if not reason and not (needed.add or needed.widen or needed.rename):
                reason = "no change of the table makes it fit"
        most, count = self.max_columns, json_inference.count(columns)
        if more and not reason and count > most:
            return f"with its fields the table would have {count} columns; max_columns is {most}"
        return reason
