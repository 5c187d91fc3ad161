"""What `frazil audit` does: every table of a sink, or every sink of a table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyspark.sql import SparkSession
from rich.console import Console

from frazil.core.config import Config
from frazil.core.errors import ConfigError
from frazil.feed.letters import notes_table
from frazil.surface.demo import audit_table
from frazil.table.audit import REPLAY, Report, audit, known_tables, live_files
from frazil.table.jvm import Catalog

_PROVES = {
    "records": "every record is accounted for",
    "batches": "every range of the source was processed in exactly one committed batch; rows are "
    "not told apart by record",
}
#: Of more reports than this, only those that are not proven are shown partition by partition.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Proof:
    reports: list[Report]
    #: tables of the config that nobody has made or written to yet
    absent: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        return all(report.verdict == "proven" for report in self.reports)


def of_table(config: Config, spark: SparkSession, name: str, branch: str) -> Proof:
    """One report for each sink that wrote to the table."""
    reports = _reports(Catalog(spark, config.catalog.name), name, branch)
    if reports is None:
        raise ConfigError(f"cannot audit table {name}: it does not exist")
    if not reports:
        raise ConfigError(f"cannot audit table {name}: no snapshot of it was written by Frazil")
    return Proof(reports)


def of_sink(config: Config, spark: SparkSession) -> Proof:
    """Every table the sink fills: those of the config, those made by names from the data, the dead
    letters, and the notes of their replays. The sink that replays has reports of its own."""
    catalog = Catalog(spark, config.catalog.name)
    sinks = (config.sink.id, config.sink.id + REPLAY)
    index = catalog.load(config.index_table)
    known = [name for sink in sinks if index for name in known_tables(index, sink)]
    named = [table.name for table in config.tables if "{" not in table.name]
    named += [config.dead_letters.table, notes_table(config)] if config.dead_letters else []
    found: list[Report] = []
    absent = {}
    for name in dict.fromkeys([*named, *sorted(known)]):
        reports = _reports(catalog, name, _branch(config, name))
        if reports is None and name in known:
            gone = "gap: the table is gone; the index says that it was there"
            reports = [Report(name, config.sink.id, (), 0, (gone,))]
        mine = [
            report
            for report in reports or ()
            if report.sink == config.sink.id
            # A replay claims every table, and most get nothing from it.
            or (report.sink in sinks and (report.commits or report.verdict != "proven"))
        ]
        if not mine and name in named:
            nothing = f"no snapshot of it was written by sink {config.sink.id}"
            absent[name] = "it does not exist" if reports is None else nothing
        found += mine
    for name, why in absent.items() if not found else ():
        raise ConfigError(f"cannot audit table {name}: {why}")
    return Proof(found, tuple(absent))


def _reports(catalog: Catalog, name: str, branch: str) -> list[Report] | None:
    table = catalog.load(name)
    if table is None:
        return None
    return audit(name, table.history(branch), live_files(table, branch))


def _branch(config: Config, name: str) -> str:
    """A table's own, or its template's."""
    for table in config.tables:
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(table.name)), name):
            return table.branch
    return "main"


def show(proof: Proof, console: Console) -> None:
    few = len(proof.reports) <= _SHOWN
    for report in proof.reports:
        if few or report.verdict != "proven":
            console.print(audit_table(report.values()))
    for report in proof.reports:
        console.print(
            ("" if len(proof.reports) == 1 else f"{report.table}, sink {report.sink}: ")
            + f"{report.verdict}: {report.written:,} rows in {report.commits} commits; "
            f"{_PROVES[report.proves]}",
            soft_wrap=True,
        )
    if proof.absent:
        console.print(f"not written to yet: {', '.join(proof.absent)}", soft_wrap=True)
