"""`frazil selftest`: proves exactly once on the user's own broker and catalog.

In: a sink's config, of which only the broker, the catalog and Spark's settings are used. Scratch
topics and tables are created, and a sink fills the tables run after run; each run is killed with
SIGKILL at the next step of a batch. After every kill the table must equal the topic up to the cut
in its ledger, and at the end the whole topic. Both are read to compare them, and the audit must
reach the same verdict from metadata alone.

Out: a verdict, with the exact ranges that are lost, doubled or wrong. All resources are removed in
any case; those that cannot be removed are listed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from frazil.auditing.evidence import against_kafka, of_sink
from frazil.config import model as configs
from frazil.config.model import Config
from frazil.errors import FrazilError, Unavailable, counted
from frazil.iceberg.java import JavaCatalog
from frazil.ledger import entry as ledger
from frazil.offsets import Cut, Partition, Range, join
from frazil.render import Line, label
from frazil.testing.process import SinkRuns
from frazil.testing.scratch import CALL_SECONDS, PARTITIONS, Scratch, ScratchPart, ScratchPlan

_FAILURES = ("lost", "doubled", "wrong")
_KEYS = 10  # records per key, on average
_TOMBSTONES = 7  # one of so many records of an upsert topic is a tombstone
_TRIES = 3  # runs that may catch up before they reach their step


@dataclass
class PartReport:
    """The result of one part."""

    JSON: ClassVar = "mode topic table verdict records kills *spans found_after audit findings"

    mode: str
    topic: str
    table: str
    records: int = 0
    kills: int = 0
    lost: list[Range] = field(default_factory=list)
    doubled: list[Range] = field(default_factory=list)
    wrong: list[Range] = field(default_factory=list)
    #: the kill after which that was first seen; empty: at the end
    found_after: str = ""
    audit: str = ""
    findings: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)

    @property
    def verdict(self) -> str:
        failure = "lost" if self.lost else "doubled" if self.doubled else "wrong"
        return self.audit if self.exact else failure

    @property
    def spans(self) -> dict[str, list[list[int]]]:
        """The ranges that are lost, doubled or wrong, as `[partition, start, end]`."""
        return {
            kind: [[span.partition.number, span.start, span.end] for span in getattr(self, kind)]
            for kind in _FAILURES
        }

    def lines(self) -> Iterator[Line]:
        """What failed."""
        for kind in _FAILURES:
            ranges = getattr(self, kind)
            for span in ranges[:20]:
                yield f"{kind}: {span}" + (
                    f", after {self.found_after}" if self.found_after else ""
                )
            if len(ranges) > 20:
                yield f"{kind}: {len(ranges) - 20} more ranges; --json has all"
        yield from (f"audit: {finding}" for finding in self.findings)


@dataclass
class SelfTestReport:
    JSON: ClassVar = "verdict name namespace kills seconds parts not_removed folder"

    name: str
    namespace: str
    parts: list[PartReport] = field(default_factory=list)
    seconds: float = 0.0
    #: what could not be removed, and why
    not_removed: list[str] = field(default_factory=list)
    #: the folder with config and log, if everything is kept
    folder: str = ""

    @property
    def kills(self) -> int:
        return sum(part.kills for part in self.parts)

    @property
    def verdict(self) -> str:
        return next((p.verdict for p in self.parts if p.verdict != "proven"), "proven")

    @property
    def exit_code(self) -> int:
        return 3 if self.verdict != "proven" else 1 if self.not_removed else 0

    def lines(self) -> Iterator[Line]:
        for part in self.parts:
            yield from part.lines()
        for part in self.parts:
            yield Text.from_markup(
                f"{part.mode}: [bold {_colour(part.verdict)}]{label(part.verdict)}[/], "
                f"{counted(part.records, 'record')}, {counted(part.kills, 'kill')}; "
                f"the audit says {label(part.audit) or 'nothing'}"
            )
        if self.folder:
            topics = ", ".join(part.topic for part in self.parts)
            yield f"kept: namespace {self.namespace}, topics {topics}, and {self.folder}"
        left = "everything was kept" if self.folder else "everything was removed"
        if self.not_removed:
            left = f"{len(self.not_removed)} things could not be removed"
        yield f"{counted(self.kills, 'kill')} in {self.seconds:.0f} s; {left}"


def selftest(
    given: Config,
    wanted: ScratchPlan,
    spark: SparkSession,
    console: Console,
    *,
    keep: bool = False,
    module: str = "frazil.testing.process",
) -> SelfTestReport:
    """Create, kill, compare, remove. `module` is what a run of the sink executes."""
    began = time.monotonic()
    outcome = SelfTestReport(wanted.name, wanted.namespace)
    folder = Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))
    scratch = Scratch(given, wanted, JavaCatalog(spark, given.catalog.name), folder)
    try:
        scratch.make()
        with _progress(console) as progress:
            for part in wanted.parts:
                judged = PartReport(part.mode, part.name, part.table)
                outcome.parts.append(judged)
                bar = progress.add_task(part.mode, total=len(wanted.steps) + 1, status="starting")
                run = _SelfTest(scratch, part, judged, spark, module)
                with closing(run.prove()) as steps:  # ends the child processes in any case
                    for done, status in steps:
                        progress.update(bar, completed=done, status=status)
    except FrazilError as error:
        if all(part.exact for part in outcome.parts):
            raise
        outcome.parts[-1].findings.append(error.message)  # findings before the error count
    finally:
        if keep:
            outcome.folder = str(folder)
        else:
            console.print("[dim]removing what was made[/dim]")
            with _undisturbed():
                outcome.not_removed = scratch.clear()
            for leftover in outcome.not_removed:
                console.print(f"[red]could not be removed: {leftover}[/red]", soft_wrap=True)
        outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores signals, so that a second interrupt does not stop the removal halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ── runs, kills and comparison ───────────────────────────────────────────────────────────────────

#: (partition, offset) → id and number of a record; the number of a tombstone is None
Records = dict[tuple[int, int], tuple[int, int | None]]


class _SelfTest:
    def __init__(
        self,
        scratch: Scratch,
        part: ScratchPart,
        judged: PartReport,
        spark: SparkSession,
        module: str,
    ) -> None:
        self._scratch, self._part, self._judged = scratch, part, judged
        self._spark, self._module = spark, module
        self._sent = 0

    def prove(self) -> Generator[tuple[int, str]]:
        """Run and kill the sink step by step; yields the number of runs done, and the current
        one."""
        plan, judged = self._scratch.plan, self._judged
        folder, config = self._scratch.folder, self._scratch.config(self._part)
        # These are applied in the config already, and some name the user's own sink and tables.
        laid_over = {name: None for name in os.environ if re.match("FRAZIL_.*__", name)}
        with SinkRuns(
            config,
            log=folder / "log",
            scratch=folder / "scratch",
            module=self._module,
            environ=laid_over,
        ) as runs:
            for done, step in enumerate(plan.steps):
                yield done, f"to be killed at {step}"
                self._kill(runs, step, plan.rows * (done + 1) // len(plan.steps))
                judged.kills += 1
                self._compare(f"the kill at {step}")
                if not judged.exact:
                    break  # more kills would show nothing more
            else:
                yield len(plan.steps), "catching up"
                if runs.next(last=True).killed():
                    raise FrazilError("cannot continue: the last run was paused")
                self._compare("")
        proof = against_kafka(*self._proof())
        judged.audit = proof.verdict
        judged.findings = [str(finding) for report in proof.reports for finding in report.findings]
        judged.findings += map(str, proof.findings)
        yield len(plan.steps) + 1, f"[{_colour(judged.verdict)}]{label(judged.verdict)}[/]"

    def _proof(self) -> tuple[Any, Any, Any]:
        config = configs.load(self._scratch.config(self._part), {})
        look = self._scratch.catalog.open_readonly
        return config, look, of_sink(config, look)

    def _kill(self, runs: SinkRuns, step: str, until: int) -> None:
        """Kill a run when it reaches the step, the second time if possible, so that a batch of the
        same run precedes it. A run may catch up before, as commits are combined; then more records
        are produced, and the next run tries again."""
        for n in range(_TRIES):
            self._produce(max(until, self._sent + PARTITIONS))
            if runs.next(hold=f"{step}:{1 if n else 2}").killed():
                return
        raise FrazilError(f"cannot kill at {step}: {_TRIES} runs never reached it")

    def _produce(self, until: int) -> None:
        producer = Producer(
            {"log_level": "2", **self._scratch.kafka, "enable.idempotence": True, "linger.ms": "5"}
        )
        upsert = self._part.mode == "upsert"
        for n in range(self._sent, until):
            number = n % max(1, self._scratch.plan.rows // _KEYS) if upsert else n
            value = json.dumps({"id": number, "n": n})
            gone = upsert and zlib.crc32(b"%d" % n) % _TOMBSTONES == 0
            producer.produce(
                self._part.name,
                None if gone else value,
                json.dumps({"id": number}) if upsert else None,
                partition=number % PARTITIONS,
            )
            if n % 10_000 == 9_999:
                producer.flush(CALL_SECONDS)
        if producer.flush(CALL_SECONDS):
            raise Unavailable(
                f"cannot produce to topic {self._part.name}: no answer in {CALL_SECONDS:.0f} s"
            )
        self._sent = max(until, self._sent)

    def _compare(self, seen: str) -> None:
        """Compare the table's rows with the topic's records up to the cut in the ledger; at the
        end, with all records."""
        table = self._scratch.catalog.load(self._part.table)
        records = self._records()
        self._judged.records = len(records)
        if table is None and seen:
            return  # killed before the table was created
        if table is not None and seen:
            entry = ledger.head(table.history("main"), self._part.name).entry
            cut = entry.end if entry else Cut()
            records = {
                at: record
                for at, record in records.items()
                if at[1] < cut.get(Partition(self._part.name, at[0]), 0)
            }
        rows = self._rows() if table else []
        lost, doubled, wrong = (appended if self._part.mode == "append" else upserted)(
            records, rows
        )
        judged = self._judged
        judged.lost, judged.doubled, judged.wrong = map(self._ranges, (lost, doubled, wrong))
        judged.found_after = "" if judged.exact else seen

    def _rows(self) -> list[Row]:
        name = f"{self._scratch.given.catalog.name}.{self._part.table}"
        frame = self._spark.read.table(name).select("_topic_partition", "_offset", "id", "n")
        return [tuple(row.values()) for row in frame.toArrow().to_pylist()]

    def _records(self) -> Records:
        """All records of the topic, read by a plain consumer."""
        settings = {
            "log_level": "2",
            **self._scratch.kafka,
            "group.id": self._part.name,
            "enable.auto.commit": "false",
            "enable.partition.eof": "true",
            "auto.offset.reset": "earliest",
        }
        consumer = Consumer(settings)
        records: Records = {}
        try:
            consumer.assign([TopicPartition(self._part.name, p, 0) for p in range(PARTITIONS)])
            ended: set[int] = set()
            deadline = time.monotonic() + CALL_SECONDS
            while len(ended) < PARTITIONS:
                for message in consumer.consume(10_000, 1.0):
                    if (error := message.error()) is None:
                        value = json.loads(message.value() or message.key() or b"{}")
                        at = message.partition(), message.offset()
                        records[at] = value["id"], value.get("n")  # type: ignore[index]
                        deadline = time.monotonic() + CALL_SECONDS
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended.add(message.partition() or 0)
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"cannot read topic {self._part.name}: no answer in {CALL_SECONDS:.0f} s"
                    )
        finally:
            consumer.close()
        return records

    def _ranges(self, offsets: Iterable[tuple[int, int]]) -> list[Range]:
        return join(Range(Partition(self._part.name, p), o, o + 1) for p, o in set(offsets))


Places = set[tuple[int, int]]
#: partition, offset, id and number of a row of the table
Row = tuple[int, int, int, int]


def appended(records: Records, rows: Sequence[Row]) -> tuple[Places, Places, Places]:
    """The offsets that are lost, doubled and wrong: each record must be there once, unchanged."""
    seen: Places = set()
    doubled: Places = set()
    wrong: Places = set()
    for partition, offset, number, n in rows:
        at = partition, offset
        (doubled if at in seen else seen).add(at)
        if records.get(at) != (number, n):
            wrong.add(at)
    return records.keys() - seen, doubled, wrong


def upserted(records: Records, rows: Sequence[Row]) -> tuple[Places, Places, Places]:
    """The same for the last record of each key; a row that was replaced or deleted is wrong. (All
    records of a key are in one partition, so the highest offset is the last.)"""
    last: dict[int, tuple[int, int]] = {}
    for at, (number, _) in sorted(records.items()):
        last[number] = at
    expected = {at: records[at] for at in last.values() if records[at][1] is not None}
    lost, doubled, wrong = appended(expected, rows)
    keys = Counter(number for _, _, number, _ in rows)
    twins = {last[number] for number, count in keys.items() if count > 1 and number in last}
    return lost, doubled | twins, wrong


# ── output ───────────────────────────────────────────────────────────────────────────────────────


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} runs"),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _colour(verdict: str) -> str:
    return "green" if verdict == "proven" else "red"
