"""`frazil check`: everything that would stop a sink, found before it runs.

In: the path of a config. Out: a `CheckReport`. Independent checks run side by side, each with a
time limit; what needs another server's answer waits for it, and is skipped where there is none.
Position, tables and records are those of a plan (`ops.start_plan`), so the checks are a start's
own. Nothing is changed, but for a probe file that is removed again. Runs on the driver, without
Spark where the catalog allows it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frazil.config.error_list import ConfigErrors, every_error
from frazil.config.model import Config
from frazil.errors import ConfigError, FrazilError, counted
from frazil.kafka.planner import Planner
from frazil.offsets import Range
from frazil.ops.check_catalog import CatalogCheck
from frazil.ops.check_kafka import BrokerCheck
from frazil.ops.check_machine import machine_findings
from frazil.ops.check_registry import registry_findings
from frazil.ops.findings import CheckFinding, CheckReport
from frazil.ops.start_plan import StartPlan, start_plan, unexpected
from frazil.pipeline.task import run
from frazil.sources.batch_plans import BatchPlans
from frazil.spark import jars
from frazil.spark.open_table import Open, with_new_catalog
from frazil.spark.query_syntax import QueryFault, read_query

#: Seconds for each check, and for the plan, which reads the catalog and a sample of the records.
_LIMIT, _PLAN_LIMIT, _SPARK_LIMIT = 10.0, 30.0, 180.0
#: Partitions of which the newest records are read, and records of each.
_PARTITIONS, _RECORDS = 16, 100
_JAVA = 17

Findings = list[CheckFinding]
#: Sections whose errors forbid to try something out; those of monitoring concern no server.
TRIED = {"", "sink", "kafka", "decode", "transform", "catalog", "spark", "table", "route"} | {
    "dead_letters"
}
#: Kinds of rejected records that are about the format, and about the rules.
_READING, _ROUTING = ("null", "header", "datum", "json", "limit", "schema"), ("route", "name")
_FORMAT = ("decode", "format")


@dataclass(frozen=True)
class CheckOptions:
    write: bool = True
    #: seconds for each check
    limit: float = _LIMIT
    #: starts Spark; None: without
    spark: Callable[[Config], Any] | None = None


def query_findings(config: Config) -> Findings:
    """What is doubtful about the query: Spark decides, when the sink starts."""
    if not config.transform.sql:
        return []
    try:
        query = read_query(config.transform.sql)
        endless = query.endless if config.transform.output_mode == "append" else None
        doubt = query.doubt or (f"{endless[1]} never end" if endless else "")
    except QueryFault as fault:
        doubt = fault.fact
    says = f"cannot read the query without Spark: {doubt}; Spark reads it when the sink starts"
    return [CheckFinding("config", "warning", says, setting=("transform", "sql"))] if doubt else []


class Check:
    """The checks of one config."""

    def __init__(
        self,
        path: Path,
        opener: Callable[[Config], Open],
        options: CheckOptions,
        errors: ConfigErrors | None = None,
    ) -> None:
        """`errors`: of the config, where it is no TOML file."""
        self._began = time.monotonic()
        self._path = path
        self._opener = opener
        self._options = options
        self._errors = errors or every_error(path, os.environ)

    def run(self) -> CheckReport:
        errors = self._errors
        findings = sorted((_of_config(error, errors) for error in errors.errors), key=_line)
        config = errors.config
        if config is None:
            return self._report(self._path.name, findings)
        if not findings:
            says = f"{self._path.name} has {counted(len(config.tables), 'table')} and no error"
            findings.append(CheckFinding("config", "ok", says))
        findings += query_findings(config)
        local = machine_findings(config)
        findings += local
        # What stands in a section with an error is not tried out.
        wrong = {finding.setting[0] for finding in local if finding.severity == "error"}
        away = {*errors.sections, *wrong} & TRIED
        for finding in self._servers(config, away):
            findings.append(finding)
        return self._report(config.sink.id, findings)

    def _report(self, sink: str, findings: Sequence[CheckFinding]) -> CheckReport:
        placed = [
            finding
            if finding.location or not finding.setting
            else replace(finding, location=self._errors.location(*finding.setting))
            for finding in findings
        ]
        return CheckReport(sink, placed, round(time.monotonic() - self._began, 2))

    def _servers(self, config: Config, away: set[str]) -> Iterator[CheckFinding]:
        limit = self._options.limit
        broker = BrokerCheck(config)
        catalog = CatalogCheck(config, with_new_catalog(config, self._opener(config)))
        checks: dict[str, Callable[[], Findings]] = {"java": lambda: java_findings(config)}
        if not away & {"kafka", ""}:
            checks["broker"] = broker.run
        if config.decode.registry.get("url") and not away & {"decode", ""}:
            checks["registry"] = lambda: registry_findings(config, config.sink.topics)
        if not away & {"catalog", "spark", ""}:
            checks["catalog"] = lambda: self._catalog(catalog)
        results = side_by_side(checks, limit if self._options.spark is None else _SPARK_LIMIT)
        yield from (finding for findings in results.values() for finding in findings)
        failed = {
            area
            for area, findings in results.items()
            if area != "java" and any(finding.severity == "error" for finding in findings)
        }
        missing = {"broker", "catalog"} - results.keys()
        needed = failed | missing | ({"catalog"} if not catalog.reached else set())
        if away or needed:
            because = ", ".join(sorted({*failed, *({"config"} if away or missing else ())}))
            says = f"position, tables and records: first {because or 'catalog'}"
            yield CheckFinding("position", "skipped", says)
            return
        seconds = _PLAN_LIMIT if self._options.spark is None else _SPARK_LIMIT
        planned = side_by_side({"position": lambda: self._planned(config, broker)}, seconds)
        yield from planned["position"]

    def _catalog(self, catalog: CatalogCheck) -> Findings:
        findings = catalog.run()
        return findings + (catalog.storage(self._options.write) if catalog.reached else [])

    # ── what a start would do ────────────────────────────────────────────────────────────────

    def _planned(self, config: Config, broker: BrokerCheck) -> Findings:
        session = None
        if config.transform and self._options.spark is None:
            says = "position, tables and records: the [transform] needs Spark"
            hint = "frazil check --spark CONFIG starts Spark for it, and takes longer"
            return [CheckFinding("position", "skipped", says, hint)]
        if config.transform and self._options.spark is not None:
            session = self._options.spark(config)
        plan = start_plan(config, with_new_catalog(config, self._opener(config)), session)
        findings = list(plan_findings(config, plan))
        if not plan.stops:
            findings += broker.retention(plan.position)
            findings += newest_records(config, plan)
        return findings


def plan_findings(config: Config, plan: StartPlan) -> Iterator[CheckFinding]:
    """Position and tables, as a plan has them."""
    if plan.stops:
        area = "tables" if any(t.name in plan.stops.message for t in config.tables) else "position"
        yield CheckFinding.of(area, plan.stops, setting_of(config, plan.stops))
    else:
        waits = counted(plan.waiting, "offset waits", "offsets wait")
        if plan.epoch_now is None:
            says = f"a start begins at [sink] starting_offsets; {waits}"
        else:
            says = (
                f"a start resumes as epoch {plan.epoch} and fences epoch {plan.epoch_now}; {waits}"
            )
        yield CheckFinding("position", "ok", says)
    if plan.staged:
        says = counted(len(plan.staged), "staged batch is", "staged batches are")
        yield CheckFinding("position", "ok", f"{says} committed first")
    for name, why in plan.refused.items():
        hint = "its records are rejected until it fits"
        yield CheckFinding("tables", "error", why, hint, _table_setting(config, name))
    created = [name for name, table in plan.tables.items() if table.changes.created]
    changed = [name for name, table in plan.tables.items() if table.changes.updates]
    if created and not plan.stops:
        yield CheckFinding(
            "tables", "ok", f"a start creates {_named(created)} (frazil plan CONFIG)"
        )
    if changed:
        yield CheckFinding(
            "tables", "ok", f"a start changes {_named(changed)} (frazil plan CONFIG)"
        )
    if not created and not changed and not plan.stops:
        yield CheckFinding("tables", "ok", f"{counted(len(plan.tables), 'table')} fit the records")


def newest_records(config: Config, plan: StartPlan) -> Findings:
    """The newest records of the topics, through the pipeline as the tables will be."""
    if plan.batch_tables is None:
        return []
    plans = BatchPlans(config, config.kafka.resolved())
    if plans.rules is not None and plans.rules.wants_rows:
        says = "no record was decoded: a rule calls a function, which may end its process"
        return [CheckFinding("records", "warning", says)]
    pipeline = plans.plan(plan.batch_tables)
    pipeline = replace(pipeline, patience=5.0)
    marks = Planner.of(config, None, trusting=True)
    low = marks.watermarks([*plan.ends]).low
    ranges = [
        Range(partition, max(low[partition], end - _RECORDS), end)
        for partition, end in sorted(plan.ends.items())
        if end > low[partition]
    ][:_PARTITIONS]
    rejected: dict[str, tuple[int, str]] = {}
    count, needs = 0, set[str]()
    for wanted in ranges:
        result = run(pipeline, wanted, dry=True)
        count += len(wanted) - result.total.invisible
        needs |= result.needs.keys()
        for kind, (number, last) in result.rejected.items():
            rejected[kind] = rejected.get(kind, (0, ""))[0] + number, last
    if not count:
        return [
            CheckFinding("records", "warning", "the topics have no records yet: none was decoded")
        ]
    findings = []
    for kind, (number, last) in sorted(rejected.items()):
        stops = not config.dead_letters
        says = f"{number} of the newest {count} records are rejected ({kind}); the last: {last}"
        hint = "the stream stops at it: set [dead_letters] table" if stops else ""
        setting = _FORMAT if kind in _READING else ("route",) if kind in _ROUTING else ()
        verdict = "error" if stops else "warning"
        findings.append(CheckFinding("records", verdict, says, hint, setting))
    if needs:
        says = f"newer records need changes of {_named(sorted(needs))}, which the stream makes"
        findings.append(CheckFinding("records", "ok", says))
    if not rejected:
        says = f"the newest {counted(count, 'record')} can be decoded and written"
        findings.append(CheckFinding("records", "ok", says))
    return findings


def setting_of(config: Config, error: FrazilError) -> tuple[str, ...]:
    """The setting that an error of a start is about: the value that it quotes, or the table that it
    names."""
    if isinstance(error, ConfigError) and error.path:
        return error.path
    for number, table in enumerate(config.tables):
        if table.name in error.message:
            for key in ("partition_by", "sort_by", "key", "identifier_fields"):
                if any(repr(item) in error.message for item in getattr(table, key)):
                    return "table", str(number), key
            for key in ("event_time", "version_column", "mode"):
                if (value := getattr(table, key)) and repr(value) in error.message:
                    return "table", str(number), key
            return "table", str(number), "name"
    return ()


def _table_setting(config: Config, name: str) -> tuple[str, ...]:
    for number, table in enumerate(config.tables):
        if table.name == name:
            return "table", str(number), "name"
    return ()


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _of_config(error: ConfigError, errors: ConfigErrors) -> CheckFinding:
    location = errors.location(*error.path) if error.path else ""
    return CheckFinding("config", "error", error.message, error.hint, error.path, location)


def _line(finding: CheckFinding) -> int:
    number = finding.location.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def java_findings(config: Config) -> Findings:
    """Java, and the jars that a session needs."""
    try:
        command = jars.java()
    except ConfigError as error:
        return [CheckFinding.of("java", error)]
    ended = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=_LIMIT)
    text = ended.stderr.partition('"')[2].partition('"')[0]
    number = text.removeprefix("1.").partition(".")[0]
    if not number.isdigit() or int(number) < _JAVA:
        says = f"{command} is Java {text or 'of an unknown version'}; expected {_JAVA} or newer"
        return [CheckFinding("java", "error", says, "set JAVA_HOME to a newer one")]
    missing = [
        group for group in jars.of_catalog(config.catalog.properties) if not jars.cached(group)
    ]
    if missing:
        names = ", ".join(coordinate.split(":", 1)[1] for group in missing for coordinate in group)
        says = f"Java {text}; the first start fetches {names} from Maven Central"
        return [CheckFinding("java", "warning", says, f"they are kept in {jars.cache_dir()}")]
    return [CheckFinding("java", "ok", f"Java {text}; Iceberg's jars are in {jars.cache_dir()}")]


def side_by_side(checks: Mapping[str, Callable[[], Findings]], limit: float) -> dict[str, Findings]:
    """The findings of each check; all run at once, and none longer than `limit` seconds. (A thread
    that still waits for a server is left behind: the process ends without it.)"""
    done: queue.Queue[tuple[str, Findings]] = queue.Queue()

    def one(area: str, check: Callable[[], Findings]) -> None:
        try:
            done.put((area, check()))
        except FrazilError as error:
            done.put((area, [CheckFinding.of(area, error)]))
        except Exception as error:  # of a library below: a sentence, and no traceback
            done.put((area, [CheckFinding.of(area, unexpected(error))]))

    for area, check in checks.items():
        threading.Thread(target=one, args=(area, check), daemon=True).start()
    results: dict[str, Findings] = {}
    deadline = time.monotonic() + limit
    while len(results) < len(checks):
        try:
            area, findings = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            for area in checks.keys() - results.keys():
                says = f"no answer within {limit:g} s"
                hint = "check the address; a firewall that drops packets causes this"
                results[area] = [CheckFinding(area, "error", says, hint, temporary=True)]
            break
        results[area] = findings
    return results
