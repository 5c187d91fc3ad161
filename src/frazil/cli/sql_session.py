"""Execution of SQL statements: what each one does, and what is reported of it.

In: a store of definitions, and statements. Out: a report for each statement, with lines, JSON and
an exit code. Definitions change as soon as their statement is executed; a process that runs them
takes the change over by itself. Runs on the driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from frazil.cli.app import say, table_opener
from frazil.config.explain import explain
from frazil.config.model import Config
from frazil.config.origins import Origins
from frazil.errors import ConfigError
from frazil.ops.findings import CheckReport
from frazil.ops.own_settings import own_settings
from frazil.render import Line, text_table
from frazil.service.changes import (
    LEFT_BEHIND,
    LIVE,
    OUTSIDE,
    PROCESS,
    REFUSED,
    RESTART,
    changes,
)
from frazil.sql.connections import TYPES
from frazil.sql.definition_changes import AppliedStatement, apply
from frazil.sql.definition_files import DefinitionFiles, DefinitionStore, is_folder
from frazil.sql.definition_set import Changes, concerned, config_of, dependents
from frazil.sql.definitions import (
    RUNNING,
    LoadedDefinitions,
    MemoryStore,
    definitions_of,
    sink_definitions,
)
from frazil.sql.document_builder import (
    Objects,
    checked_query,
    connection_properties,
    goes_straight,
    named,
    refusal,
)
from frazil.sql.formatter import create_text, name_text
from frazil.sql.source_text import masked
from frazil.sql.statements import (
    Alter,
    Command,
    Connection,
    Create,
    Drop,
    Secret,
    SinkStatement,
    SourceClause,
    Statement,
    View,
    key_of,
)

#: Properties of which the first that a connection has tells where it leads.
_ADDRESSES = ("bootstrap.servers", "url", "uri", "endpoint", "warehouse", "region")
_KINDS: Mapping[str, type[Any]] = {
    kind.KIND: kind for kind in (Secret, Connection, View, SinkStatement)
}


@dataclass(frozen=True)
class StatementReport:
    JSON: ClassVar = "statement name *values"

    #: its first words: CREATE SINK
    statement: str
    name: str
    #: for `--json`
    values: Mapping[str, Any]
    shown: Sequence[Line] = field(default=(), repr=False)
    exit_code: int = 0

    def lines(self) -> Iterator[Line]:
        yield from self.shown


class SqlSession:
    """Executes statements on the definitions of a store."""

    def __init__(
        self,
        store: DefinitionStore | MemoryStore,
        environ: Mapping[str, str] = os.environ,
        *,
        show_json: bool,
    ) -> None:
        self.store = store
        self._environ = environ
        self._quiet = show_json

    def definitions(self) -> LoadedDefinitions:
        return definitions_of(self.store)

    def execute(self, statement: Statement) -> StatementReport:
        if isinstance(statement, Create | Alter | Drop):
            return self._change(statement)
        if statement.verb in ("start", "stop"):
            return self._start_or_stop(statement)
        if isinstance(self.store, DefinitionFiles) and not is_folder(self.store.base):
            DefinitionFiles(self.store.base)  # a name that is misspelled, and says so
        definitions = self.definitions()
        try:
            return self._reads[statement.verb](self, definitions, statement)
        except ConfigError as error:
            raise self._with_broken_files(error, definitions) from None

    def _with_broken_files(self, error: ConfigError, definitions: LoadedDefinitions) -> ConfigError:
        """What is missing may stand in a file that cannot be read."""
        if definitions.errors and not error.hint:
            error.hint = f"these cannot be read: {', '.join(sorted(definitions.errors))}"
        return error

    # ── definitions ──────────────────────────────────────────────────────────────────────────

    def _change(self, statement: Create | Alter | Drop) -> StatementReport:
        if isinstance(statement, Create):
            kind, name = key_of(statement.definition)
        else:
            kind, name = statement.key
        applied = apply(self.store, statement, partial(self._keep_ledgers, statement))
        verb = type(statement).__name__.upper()
        result = {"CREATE": "created", "ALTER": "altered", "DROP": "dropped"}[verb]
        if not applied.changed:
            result = "not changed"
        elif isinstance(statement, Create) and (kind, name) in applied.before.objects:
            result = "replaced"
        effects = list(self._effects(applied))
        return StatementReport(
            f"{verb} {kind.upper()}",
            name,
            {"result": result, "effects": effects},
            [f"{kind} {name}: {result}", *(f"  {effect}" for effect in effects)],
        )

    def _keep_ledgers(
        self, statement: Create | Alter | Drop, before: Objects, made: Changes
    ) -> None:
        """Refuses what a running sink would refuse: the next start would take it unseen."""
        if isinstance(statement, Drop) or statement.force or isinstance(self.store, MemoryStore):
            return
        after = {key: value for key, value in {**before, **made}.items() if value is not None}
        for name in dict.fromkeys(concerned(before, made)):
            old, new = (_config_or_none(o, name, self.store.base) for o in (before, after))
            if old and new and (keys := changes(old, new).lost_ledger):
                raise refusal(
                    statement.location,
                    f"sink {name} has tables by its former definition: {keys} changed, and "
                    f"{LEFT_BEHIND}",
                    hint="a new sink is defined by CREATE SINK with another name; ALTER … FORCE "
                    "and CREATE OR REPLACE FORCE … change this one all the same, when it starts",
                )

    def _start_or_stop(self, command: Command) -> StatementReport:
        if command.verb == "start" and isinstance(self.store, MemoryStore):
            raise refusal(
                command.location,
                "START SINK has no definitions that a process could run",
                hint="frazil sql … --definitions DIR keeps them, and frazil run DIR runs them; "
                "frazil run FILE.sql runs what the file defines",
            )
        applied = apply(self.store, command)
        state = "running" if command.verb == "start" else "stopped"
        result = f"defined as {state}" if applied.changed else f"defined as {state} before"
        effects = [self._who_runs(command.verb)]
        shown = [f"sink {command.name}: {result}", *(f"  {effect}" for effect in effects)]
        values = {"result": result, "effects": effects}
        return StatementReport(f"{command.verb.upper()} SINK", command.name, values, shown)

    def _who_runs(self, verb: str = "start") -> str:
        """Which process takes over what has changed."""
        if isinstance(self.store, MemoryStore):
            return "it lasts for this command only: --definitions DIR keeps definitions"
        watched = self.store.watched()
        if watched:
            return f"the process that runs these definitions will {verb} it in seconds"
        if watched is None:
            return f"a process that runs these definitions will {verb} it in seconds"
        return f"no process runs these definitions: frazil run {self.store.arguments}"

    def _effects(self, applied: AppliedStatement) -> Iterator[str]:
        """What a change means for sinks that run."""
        if not applied.changed:
            return
        if isinstance(self.store, MemoryStore):
            yield "kept for this command only: --definitions DIR keeps it"
            return
        old, new = (
            sink_definitions(definitions, self.store.base, self._environ, applied.sinks)
            for definitions in (applied.before, applied.after)
        )
        concerned = False
        for name in {**old, **new}:
            before = old[name].config if name in old else None
            after = new[name].config if name in new else None
            running = new[name].state == RUNNING if name in new else True
            lines = list(_sink_effects(name, before, after)) if running else []
            if not running and before != after:
                yield f"sink {name} stays stopped: START SINK {name_text(name)} runs it"
            concerned = concerned or bool(lines)
            yield from lines
        if concerned:
            yield {
                True: "the process that runs these definitions takes it over in seconds",
                False: f"no process runs these definitions: frazil run {self.store.arguments}",
                None: "a process that runs these definitions takes it over in seconds",
            }[self.store.watched()]

    # ── what is shown ────────────────────────────────────────────────────────────────────────

    def _show(self, definitions: LoadedDefinitions, command: Command) -> StatementReport:
        rows = list(self._rows(command.kind, definitions))
        problems = {home: str(error) for home, error in sorted(definitions.errors.items())}
        statement = f"SHOW {command.kind.upper()}"
        shown: list[Line] = [_table(rows) if rows else f"there are no {command.kind}"]
        return StatementReport(
            statement, "", {"rows": rows, "problems": problems}, [*shown, *problems.values()]
        )

    def _rows(self, kind: str, definitions: LoadedDefinitions) -> Iterator[dict[str, Any]]:
        objects = definitions.objects
        if kind == "sinks":
            made = sink_definitions(definitions, self.store.base, self._environ)
            for name, sink in made.items():
                definition = objects.get(("sink", name))
                assert definition is None or isinstance(definition, SinkStatement)
                yield {
                    "name": name,
                    "from": _source_text(definition),
                    "tables": ", ".join(table.name for table in sink.config.tables)
                    if sink.config
                    else "",
                    "state": "error" if sink.error else sink.state,
                    "problem": sink.error.message if sink.error else "",
                }
            return
        for key, definition in sorted(objects.items()):
            row: dict[str, Any] = {"name": key[1]}
            users = ", ".join(name for _, name in dependents(objects, key))
            if isinstance(definition, Connection) and kind == "connections":
                yield {
                    **row,
                    "to": TYPES[definition.type][0],
                    "address": _address(definition),
                    "used by": users,
                }
            elif isinstance(definition, Secret) and kind == "secrets":
                yield {**row, "reference": definition.reference, "used by": users}
            elif isinstance(definition, View) and kind == "views":
                straight = goes_straight(definition, checked_query(definition))
                query = "none: columns as they are" if straight else "Spark"
                yield {**row, "from": _source_text(definition), "query": query, "used by": users}

    def _show_create(self, definitions: LoadedDefinitions, command: Command) -> StatementReport:
        definition = named(
            definitions.objects, _KINDS[command.kind], command.name, command.location
        )
        text = masked(create_text(definition))
        return StatementReport(
            f"SHOW CREATE {command.kind.upper()}", command.name, {"sql": text}, [text]
        )

    def _describe(self, definitions: LoadedDefinitions, command: Command) -> StatementReport:
        config, _ = self._config(definitions, command)
        definition = definitions.objects["sink", command.name]
        assert isinstance(definition, SinkStatement)
        state = definitions.states.get(command.name, RUNNING)
        values = {
            "from": _source_text(definition),
            "format": config.decode.format,
            "catalog": definition.catalog,
            "tables": [
                {
                    "name": table.name,
                    "mode": table.mode,
                    "key": list(table.key),
                    "partition_by": list(table.partition_by),
                }
                for table in config.tables
            ],
            "dead_letters": config.dead_letters.table,
            "index_table": config.index_table,
            "commit_interval": config.sink.commit_interval,
            "state": state,
            "defined_in": definitions.homes.get(("sink", command.name)) or str(definition.location),
            "run_by_a_process": self.store.watched(),
        }
        shown = {key: value for key, value in values.items() if key != "tables"}
        lines = [f"{key.replace('_', ' '):>16}  {_shown(value)}" for key, value in shown.items()]
        tables = [table | {"key": ", ".join(table["key"])} for table in _tables_of(values)]
        return StatementReport("DESCRIBE SINK", command.name, values, [*lines, _table(tables)])

    def _explain(self, definitions: LoadedDefinitions, command: Command) -> StatementReport:
        config, locations = self._config(definitions, command)
        explanation = explain(config, locations, own_settings(config))
        return StatementReport("EXPLAIN SINK", command.name, explanation, list(explanation.lines()))

    def _validate(self, definitions: LoadedDefinitions, command: Command) -> StatementReport:
        from frazil.ops.check_connection import connection_findings

        objects = definitions.objects
        given = named(objects, Connection, command.name, command.location)
        properties = connection_properties(objects, given)
        findings = connection_findings(
            given.type, properties, lambda config: table_opener(config, None)
        )
        places = {key: str(option.location) for key, option in given.options.items()}
        whole = str(given.location)
        findings = [
            replace(finding, location=places.get(finding.setting[-1], whole))
            if finding.setting
            else finding
            for finding in findings
        ]
        report = CheckReport(command.name, findings)
        shown = list(report.lines())[:-1]
        values = {"verdict": report.verdict, "findings": report.findings}
        return StatementReport("VALIDATE CONNECTION", command.name, values, shown, report.exit_code)

    def _audit(self, definitions: LoadedDefinitions, command: Command) -> StatementReport:
        from frazil.cli.audit import proof_of

        config, _ = self._config(definitions, command)
        proof = proof_of(config, say=(lambda _: None) if self._quiet else say)
        values = {"verdict": proof.verdict, "reports": proof.with_broker}
        return StatementReport(
            "AUDIT SINK", command.name, values, list(proof.lines()), proof.exit_code
        )

    def _config(self, definitions: LoadedDefinitions, command: Command) -> tuple[Config, Origins]:
        named(definitions.objects, SinkStatement, command.name, command.location)
        return config_of(definitions.objects, command.name, self.store.base, self._environ)

    _reads: ClassVar[Mapping[str, Callable[..., StatementReport]]] = {
        "show": _show,
        "show create": _show_create,
        "describe": _describe,
        "explain": _explain,
        "validate": _validate,
        "audit": _audit,
    }


def _config_or_none(objects: Objects, name: str, base: Path) -> Config | None:
    try:
        return config_of(objects, name, base)[0]
    except ConfigError:
        return None


def _sink_effects(name: str, before: Config | None, after: Config | None) -> Iterator[str]:
    if before is None and after is not None:
        yield f"sink {name} starts"
    elif before is not None and after is None:
        yield f"sink {name} stops after its batch; its tables and their data stay"
    elif before is not None and after is not None:
        different = changes(before, after)
        if keys := different.of(REFUSED):
            yield (
                f"sink {name} continues as before if it runs: {keys} changed, and "
                f"{LEFT_BEHIND}; STOP SINK and START SINK take the new definition"
            )
        elif keys := different.of(RESTART):
            yield f"sink {name} restarts after its batch: {keys} changed"
        elif keys := different.of(LIVE):
            yield f"sink {name} continues without a restart: {keys} changed"
        elif keys := different.of(OUTSIDE):
            yield f"sink {name} continues: {keys} changed, and {PROCESS}"


def _source_text(definition: SinkStatement | View | None) -> str:
    if definition is None:
        return ""
    source = definition.source
    if not isinstance(source, SourceClause):
        return f"view {source}"
    options = source.options
    topics = options.get(("sink", "topics"))
    pattern = options.get(("sink", "topic_pattern"))
    read = ", ".join(topics.value) if topics else f"topics like {pattern.value}" if pattern else ""
    return f"{source.connection}: {read}"


def _address(connection: Connection) -> str:
    options = connection.options
    return next((str(options[key].value) for key in _ADDRESSES if key in options), "")


def _tables_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {**table, "partition_by": ", ".join(table["partition_by"])} for table in values["tables"]
    ]


def _shown(value: Any) -> str:
    return {True: "yes", False: "no", None: "unknown", "": "none"}.get(value, str(value))


def _table(rows: Sequence[Mapping[str, Any]]) -> Line:
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [[str(row[name]) for name in columns] for row in rows]
    return text_table("", [column.replace("_", " ") for column in columns], cells)
