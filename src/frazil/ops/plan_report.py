"""The report of `frazil plan`: what a start would create (+), change (~) and refuse (!).

In: a config and a `StartPlan`. Out: lines for the console, values for `--json`. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pyiceberg.schema import Schema
from rich.text import Text

from frazil.config.model import Config
from frazil.config.sections import AUTO, NEVER, TableConfig
from frazil.errors import FrazilError, counted
from frazil.format_version import KEY
from frazil.iceberg.memory_table import MemoryTable
from frazil.iceberg.table import SchemaUpdate
from frazil.ops.start_plan import StartPlan, roles
from frazil.render import Line, label

_SIGNS = {"create": ("+", "green"), "change": ("~", "yellow"), "refuse": ("!", "red")}


@dataclass
class PlanReport:
    JSON: ClassVar = (
        "sink epoch_now=plan.epoch_now epoch=plan.epoch position=plan.position "
        "latest_offsets=plan.ends waiting=plan.waiting staged stops=plan.stopped_by tables notes"
    )

    config: Config
    plan: StartPlan

    @property
    def sink(self) -> str:
        return self.config.sink.id

    @property
    def exit_code(self) -> int:
        return self.plan.exit_code

    @property
    def staged(self) -> list[dict[str, Any]]:
        return [
            {"batch": batch.number, "bytes": batch.bytes, "tables": list(batch.names)}
            for batch in self.plan.staged
        ]

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The tables in the order of the config; the index and those that the data name follow."""
        kinds, plan = roles(self.config), self.plan
        rank = [table.name for table in self.config.tables] + list(kinds)
        names = sorted(
            {*plan.tables, *plan.refused}, key=lambda n: rank.index(n) if n in rank else -1
        )
        return [
            {
                "table": name,
                "role": kinds.get(name, "records"),
                **(_planned(plan.tables[name]) if name in plan.tables else {"action": "refuse"}),
                **({"action": "refuse", "reason": why} if (why := plan.refused.get(name)) else {}),
            }
            for name in names
        ]

    @property
    def notes(self) -> list[str]:
        """What the settings in effect mean for the tables."""
        sink, config = self.config.sink, self.config
        pace = (
            f"commits about every {sink.commit_interval}"
            if sink.trigger == AUTO
            else f"a batch every {sink.trigger}, commits about every {sink.commit_interval}"
        )
        rejected = (
            f"rejected records go to {config.dead_letters.table}; more than "
            f"{config.dead_letters.max_fraction:.0%} of a batch stop the stream"
            if config.dead_letters
            else "there are no [dead_letters]: the first record that is rejected stops the stream"
        )
        return [pace, rejected, *dict.fromkeys(map(self._retention, config.tables))]

    def _retention(self, table: TableConfig) -> str:
        kept = table.snapshot_retention
        if kept == NEVER:
            return f"snapshots of {table.name} are never expired"
        planned = self.plan.tables.get(table.name)
        if not kept and planned is not None and not planned.changes.created:
            return f"snapshots of {table.name} are kept as its properties say"
        return f"snapshots of {table.name} are kept for {kept or 'a day, and at most 1,500'}"

    def lines(self) -> Iterator[Line]:
        plan = self.plan
        yield f"sink {self.sink}: {self._beginning()}"
        for table in self.tables:
            yield from _table_lines(table)
        for text in self.notes if not plan.stops else ():
            yield f"  {text}"
        if plan.stops:
            yield from _stop_lines(plan.stops)
        counts = dict.fromkeys(_SIGNS, 0)
        for table in self.tables:
            if table["action"] in counts:
                counts[table["action"]] += 1
        yield (
            f"{counts['create']} to create, {counts['change']} to change, "
            f"{counts['refuse'] + bool(plan.stops)} refused; nothing was changed now"
        )

    def _beginning(self) -> str:
        plan = self.plan
        if plan.stops and not plan.ends:
            return "a start would stop"
        records = counted(plan.waiting, "offset waits", "offsets wait")
        if plan.epoch_now is None:
            begin = f"starts with epoch {plan.epoch}; {records}"
        else:
            begin = (
                f"resumes with epoch {plan.epoch}; a run of epoch {plan.epoch_now} that is still "
                f"alive is fenced; {records}"
            )
        staged = counted(len(plan.staged), "staged batch is", "staged batches are")
        return begin + (f"; {staged} committed first" if plan.staged else "")


def _stop_lines(error: FrazilError) -> Iterator[Line]:
    yield Text(f"! {error.message}", style="red")
    if error.hint:
        yield Text(f"  hint: {error.hint}")


def _table_lines(table: dict[str, Any]) -> Iterator[Line]:
    sign, colour = _SIGNS.get(table["action"], (" ", ""))
    head = f"{sign} {table['table']}  ({label(table['role'])})"
    if table["action"] == "none":
        yield f"{head}: no change"
        return
    yield Text(head, style=colour)
    if reason := table.get("reason"):
        yield Text(f"    {reason}", style="red")
    if table["action"] == "create":
        shown = table["columns"] if table["role"] == "records" else []  # others are always alike
        width = max((len(column["name"]) for column in shown), default=0)
        for column in shown:
            required = "  required" if column["required"] else ""
            yield f"    + {column['name']:<{width}}  {column['type']}{required}"
        for key, text in (("partitioned_by", "partitioned by"), ("sorted_by", "sorted by")):
            if table[key]:
                yield f"    {text} {', '.join(table[key])}"
        location = table["location"] or "chosen by the catalog"
        yield f"    format version {table['format_version']}, location {location}"
    for change in table.get("changes", ()):
        yield f"    {_change_text(change)}"
    for key, value in table.get("properties", {}).items():
        yield f"    {sign} {key} = {value}"


def _change_text(change: dict[str, Any]) -> str:
    column = change["column"]
    return {
        "add": f"+ {column}  {change.get('type')}",
        "widen": f"~ {column}  {change.get('from')} → {change.get('type')}",
        "optional": f"~ {column}  required → optional",
        "rename": f"~ {column}  renamed to {change.get('to')}",
        "spec": "~ an unpartitioned spec beside the current one, for deletes",
    }[change["change"]]


def _planned(table: MemoryTable) -> dict[str, Any]:
    changes = table.changes
    if changes.created:
        schema = Schema.model_validate_json(table.schema)
        return {
            "action": "create",
            "columns": [
                {"name": f.name, "type": _text(f.field_type), "required": f.required}
                for f in schema.fields
            ],
            "partitioned_by": _terms(schema, json.loads(table.spec)["fields"]),
            "sorted_by": _terms(schema, json.loads(table.sort_order or '{"fields": []}')["fields"]),
            "format_version": table.format_version,
            "location": table.location,
            "properties": {key: value for key, value in table.properties.items() if key != KEY},
        }
    columns = _schema_changes(changes.before, changes.updates)
    if changes.unpartitioned:
        columns.append({"change": "spec", "column": ""})
    action = "change" if columns or changes.properties else "none"
    return {"action": action, "changes": columns, "properties": changes.properties}


def _schema_changes(before: str, updates: list[SchemaUpdate]) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = []
    known = {}
    if before:
        schema = Schema.model_validate_json(before)
        known = {name: _text(schema.find_type(name)) for name in schema.column_names}
    for update in updates:
        for path, name in update.rename:
            changes.append({"change": "rename", "column": path, "to": name})
        for path, kind in update.widen:
            was = known.get(path, "?")
            changes.append({"change": "widen", "column": path, "from": was, "type": _type(kind)})
        for path in update.relax:
            changes.append({"change": "optional", "column": path})
        for path, name, kind in update.add:
            column = f"{path}.{name}".lstrip(".")
            changes.append({"change": "add", "column": column, "type": _type(kind)})
    return changes


def _type(schema: str) -> str:
    """Of Iceberg's JSON of a schema with one column."""
    return _text(Schema.model_validate_json(schema).fields[0].field_type)


def _text(kind: Any) -> str:
    """A type without ids of fields: `struct<city: string>`."""
    return re.sub(r"\b\d+: ([^:,<>]+: )(optional )?", r"\1", str(kind))


def _terms(schema: Schema, fields: list[dict[str, Any]]) -> list[str]:
    """Partition or sort fields as the config has them: `day(placed_at)`, `id desc`."""
    terms = []
    for field in fields:
        column = schema.find_column_name(field["source-id"])
        name, _, width = str(field["transform"]).rstrip("]").partition("[")
        term = (
            column if name == "identity" else f"{name}({', '.join(filter(None, [width, column]))})"
        )
        terms.append(f"{term} desc" if field.get("direction") == "desc" else str(term))
    return terms
