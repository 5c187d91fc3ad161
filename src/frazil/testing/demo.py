"""`frazil demo`: a real broker, a real table, real kills, and the verdict, in two minutes.

A broker is started, orders are produced, and the pipeline runs in a process of its own that is
killed with SIGKILL in the middle of commits: once when the table has the rows and the index does
not, once more when the next run is about to repair that. The last run catches up and audits.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from frazil.auditing.evidence import audit_table
from frazil.errors import FrazilError, counted
from frazil.render import Line, label
from frazil.spark import jars
from frazil.testing import datagen
from frazil.testing.kafka import Broker
from frazil.testing.process import Event, SinkProcess

TOPIC = "orders"
#: the step at which each run but the last is killed
KILLS = ("committed:1", "index-commit:1")


@dataclass
class DemoReport:
    JSON: ClassVar = "rows seconds kills verdict *audited rows_per_second folder"

    rows: int = 0
    seconds: float = 0.0
    kills: int = 0
    #: commits that its runs reported
    reported_commits: int = 0
    verdict: str = ""
    audit: dict[str, Any] = field(default_factory=dict)
    folder: str = ""

    @property
    def audited(self) -> dict[str, Any]:
        return {key: self.audit[key] for key in ("written", "commits", "partitions")}

    @property
    def rows_per_second(self) -> int:
        return round(self.rows / self.seconds)

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict == "proven" else 3

    def lines(self) -> Iterator[Line]:
        """The verdict as a table, and commands to query the result."""
        yield audit_table(self.audit)
        colour = "green" if self.verdict == "proven" else "red"
        yield Text.from_markup(
            f"[bold {colour}]{label(self.verdict)}[/]: {self.audit['written']:,} of {self.rows:,} "
            f"records exactly once, {counted(self.kills, 'kill')} survived, "
            f"{counted(self.audit['commits'], 'commit')}, "
            f"{self.seconds:.0f} s ({self.rows_per_second:,} rows/s, restarts included)"
        )
        yield "\nLook for yourself, with Spark SQL and with DuckDB:"
        folder = Path(self.folder)
        paths = [
            *jars.fetch(jars.ICEBERG, transitive=False),
            *jars.fetch(jars.SQLITE, transitive=False),
        ]
        query = "SELECT country, count(*) FROM {} GROUP BY country"
        settings = {
            "lake": "org.apache.iceberg.spark.SparkCatalog",
            "lake.type": "jdbc",
            "lake.uri": _sqlite(folder),
            "lake.jdbc.schema-version": "V1",
            "lake.warehouse": f"{folder}/warehouse",
        }
        confs = " ".join(f"--conf 'spark.sql.catalog.{k}={v}'" for k, v in settings.items())
        yield (
            f"{jars.spark_command('spark-sql')} --jars {','.join(map(str, paths))} {confs} "
            f"-e '{query.format('lake.demo.orders')}'"
        )
        scan = f"iceberg_scan('{self.audit['metadata_file']}')"
        yield f'duckdb -c "INSTALL iceberg; LOAD iceberg; {query.format(scan)}"'


def demo(
    *, rows: int, seconds: float | None, partitions: int, keep: Path | None, console: Console
) -> DemoReport:
    """Run the demo; progress goes to `console`, which is standard error."""
    folder = keep or Path(tempfile.mkdtemp(prefix="frazil-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    if (folder / "warehouse").exists():
        raise FrazilError(
            f"cannot run the demo in {folder}: it holds an earlier one",
            hint="choose another folder, or remove it",
        )

    def say(text: str) -> None:
        console.print(f"[dim]{text}[/dim]")

    jars.fetch(jars.ICEBERG, transitive=False, say=say)
    jars.fetch(jars.SQLITE, transitive=False, say=say)
    say("starting Apache Kafka")
    with Broker(folder / "kafka", say=say) as broker:
        datagen.create_topic(broker.bootstrap, TOPIC, partitions)
        config = _write_config(folder, broker.bootstrap, rows)
        outcome = _run(broker.bootstrap, config, folder, rows, seconds, partitions, console)
    for done in ("kafka", "scratch"):
        shutil.rmtree(folder / done, ignore_errors=True)
    outcome.folder = str(folder)
    return outcome


def _run(
    bootstrap: str,
    config: Path,
    folder: Path,
    rows: int,
    seconds: float | None,
    partitions: int,
    console: Console,
) -> DemoReport:
    began = time.monotonic()
    deadline = None if seconds is None else began + seconds
    total = rows if seconds is None else 2**62
    produced = [0]

    def go_on(sent: int) -> bool:
        produced[0] = sent
        return deadline is None or time.monotonic() < deadline

    def generate() -> None:
        produced[0] = datagen.produce(bootstrap, TOPIC, partitions, rows=total, go_on=go_on)

    generator = threading.Thread(target=generate, daemon=True)
    generator.start()
    outcome = DemoReport()
    batches: dict[int, int] = {}  # records per batch; a batch written again counts once
    with _progress(console) as progress:
        bar = progress.add_task(
            "", total=None if seconds else rows, kills=0, commits=0, rate=0, lag=0
        )

        def show() -> None:
            done = sum(batches.values())
            spent = time.monotonic() - began
            progress.update(
                bar,
                completed=done,
                kills=outcome.kills,
                commits=outcome.reported_commits,
                rate=done / spent,
                lag=max(0, produced[0] - done),
            )

        for hold in (*KILLS, ""):
            if not hold:
                generator.join()  # the last run must reach the end of the topic
            final = _run_process(config, folder, hold, batches, outcome, show)
    outcome.rows = produced[0]
    outcome.seconds = round(time.monotonic() - began, 2)
    outcome.audit = final["audit"]
    outcome.audit["metadata_file"] = final["metadata_file"]
    outcome.verdict = final["audit"]["verdict"]
    if outcome.verdict == "proven" and outcome.audit["written"] != outcome.rows:
        outcome.verdict = (
            f"unaccounted: {outcome.rows} produced, {outcome.audit['written']} written"
        )
    return outcome


def _run_process(
    config: Path, folder: Path, hold: str, batches: dict[int, int], outcome: DemoReport, show: Any
) -> dict[str, Any]:
    until = "forever" if hold else "caught-up"
    last: dict[str, Any] = {}

    def seen(event: Event) -> None:
        last.clear()
        last.update(event)
        if event.get("step") == "written":
            batches[event["batch"]] = event["records"]
        elif event.get("step") == "done":
            outcome.reported_commits += 1
        show()

    log, scratch = folder / "pipeline.log", folder / "scratch"
    process = SinkProcess(config, hold=hold, until=until, audit=not hold, log=log, scratch=scratch)
    if process.killed(seen):
        outcome.kills += 1
        show()
    return last


def _write_config(folder: Path, bootstrap: str, rows: int) -> Path:
    (folder / "order.avsc").write_text(datagen.SCHEMA)
    config = folder / "demo.toml"
    per_batch = max(1, rows // 12)  # enough batches to kill between them
    config.write_text(
        f"""# What `frazil demo` ran.
[sink]
id = "demo"
topics = ["{TOPIC}"]
max_records_per_trigger = {per_batch}
commit_interval = "0s"   # a commit for each batch; without this line: one a minute

[kafka]
"bootstrap.servers" = "{bootstrap}"

[decode]
format = "confluent-avro"
schema = "order.avsc"

[catalog]
name = "lake"
type = "jdbc"
uri = "{_sqlite(folder)}"
"jdbc.schema-version" = "V1"
warehouse = "{folder}/warehouse"

[[table]]
name = "demo.orders"
partition_by = ["day(placed_at)"]
event_time = "placed_at"
"""
    )
    return config


def _sqlite(folder: Path) -> str:
    return f"jdbc:sqlite:{folder}/catalog.db?busy_timeout=10000&journal_mode=WAL"


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        TextColumn("{task.completed:,.0f} rows"),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TextColumn("lag {task.fields[lag]:,.0f}"),
        TextColumn("{task.fields[commits]} commits"),
        TextColumn("[red]{task.fields[kills]} kills survived[/red]"),
        TimeElapsedColumn(),
        console=console,
    )
