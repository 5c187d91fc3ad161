"""`frazil status`: the state of a sink, read from outside its process.

In: the index and the tables, read from their metadata files; the heartbeat of the run; the ends of
the topics, if Kafka answers in time. Out: a report. Nothing is written, and no JVM starts unless
the catalog needs one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice, takewhile
from typing import Any

import pyarrow.compute as pc
from rich.text import Text

from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import TRY_AGAIN, ConfigError, FrazilError, NotProven, counted
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.kafka.planner import Planner, Watermarks
from frazil.ledger.entry import LedgerEntry, entries
from frazil.ledger.sink_state import index_entry, known_tables, staged_batches
from frazil.ledger.staged_batch import StagedBatch
from frazil.ledger.tags import ledger_tag
from frazil.monitoring.health_state import CATCHING_UP, OK, STARTING, STOPPED, WAITING
from frazil.offsets import Cut, Partition
from frazil.ops import run_state
from frazil.ops.startup_checks import doubt_lines, in_doubt
from frazil.render import Line
from frazil.spark.open_table import Open

#: Seconds that Kafka has to tell the ends of the topics.
KAFKA_SECONDS = 3.0


class StatusReport(dict[str, Any]):
    """The values of `frazil status --json`."""

    #: whether the command's exit code is that of the verdict
    follows_verdict = False

    @property
    def exit_code(self) -> int:
        if not self.follows_verdict or self["state"] in (OK, CATCHING_UP, STARTING, STOPPED):
            return 0
        waits = self["state"] == WAITING and not self["operator"]
        return TRY_AGAIN if waits else NotProven.exit_code

    def lines(self) -> Iterator[Line]:
        yield Text(f"sink {self['sink']}: {self['verdict']}", style=_colour(self["state"]))
        if self["remedy"]:
            yield f"remedy: {self['remedy']}"
        yield from _run_lines(self["run"])
        for run in self["fenced_runs"]:
            yield Text(
                f"epoch {run['epoch']} still runs on {run['host']}, pid {run['pid']}: fenced by "
                f"epoch {run['fenced_by']}",
                style="yellow",
            )
        values = {key: value for key, value in self.items() if key not in _APART}
        values["stages"] = ", ".join(
            f"{'?' if count is None else f'{count:,}'} {_STAGES[stage]}"
            for stage, count in self["stages"].items()
        )
        for kind, summary in self["rejected_by_kind"].items():
            values[f"rejected: {kind}"] = (
                f"{summary['records']:,} of the newest; the last: {summary['last']}"
            )
        for key, value in values.items():
            if value is None or value in ("", {}, []):
                continue
            text = json.dumps(value) if isinstance(value, (dict, list)) else value
            yield f"{key:>16}  {text}"
        yield from doubt_lines(self["in_doubt"])


_STAGES = {
    "kafka": "in Kafka",
    "writing": "being written",
    "staged": "staged",
    "catalog": "behind a commit that fails",
}


def _colour(state: str) -> str:
    return {"ok": "green", "failed": "red"}.get(state, "yellow")


def _run_lines(run: Mapping[str, Any]) -> Iterator[Line]:
    if run["state"] == run_state.NONE:
        return
    rate = f", {run['rate']:,.0f} rows/s" if run["state"] == run_state.RUNNING else ""
    yield (
        f"{run['state']}: {_epoch(run)} on {run['host']}, pid {run['pid']}, started "
        f"{run['started_at']}, heartbeat {_ago(run['heartbeat_age'])} ago{rate}"
    )
    if failure := run["last_failure"]:
        table = f" of table {failure['table']}" if failure["table"] else ""
        error = failure["error"]
        yield f"last failure{table}, {failure['failed_at']}: {error['class']}: {error['message']}"
    if run["maintenance"]:
        yield f"maintenance postponed: {run['maintenance']}"


def _epoch(run: Mapping[str, Any]) -> str:
    return "a start" if run["epoch"] is None else f"epoch {run['epoch']}"


def status(config: Config, opened: Open) -> StatusReport:
    """The verdict, where and since when it runs, position, lag by stage, counts, staged batches
    and last commit: from metadata, the heartbeat of the run, and Kafka.

    Kafka has some seconds to answer. If it does not, its part is missing, with the reason.
    """
    table, sink = opened(config.index_table), config.sink.id
    entry = index_entry(table, sink) if table else None
    asked = _Answer(lambda: _asked(config, entry))
    position = entry.end if entry else Cut()
    stored = staged_batches(config, table) if table else ()
    staged = [batch for _, batch in stored if batch and not position.reaches(batch.end)]
    beats = run_state.read(config, table) if table else {}
    start = run_state.read_start(config, table)
    state = run_state.run_state(beats, entry.epoch if entry else None, time.time(), start)
    # A claim is an entry, too; only an entry that moved the position is a commit of records.
    moved = _last_move(table, sink) if table else None
    doubts = in_doubt(config, opened)
    counts = _counts(table, sink) if table else _IndexCounts()
    waiting = _waiting(config, opened, position, staged)
    kinds = _kinds(config, opened)
    marks, unanswered = asked.within(KAFKA_SECONDS)
    low, ends = (marks.low, marks.end) if marks else (Cut(), Cut())
    lag = {p: end - position.get(p, low[p]) for p, end in ends.items()}
    reached = staged[-1].end if staged else position
    beyond = sum(max(0, end - reached.get(p, low[p])) for p, end in ends.items())
    known = {"lag": sum(lag.values()), "beyond": beyond} if marks else {"lag": None, "beyond": None}
    values = {
        "sink": sink,
        **{key: state[key] for key in _VERDICT},
        "run": state["run"],
        "fenced_runs": state.get("fenced_runs", []),
        "table": ", ".join(table.name for table in config.tables),
        "tables": len(known_tables(table, sink)) if table else 0,
        "index": config.index_table,
        "epoch": entry.epoch if entry else None,
        "summary": _summary(config, known["lag"], moved, list(doubts)),
        "position": position.nested(),
        "lag": known["lag"],
        "stages": _stages(
            known["beyond"], _between(position, reached), run_state.writing(beats, state)
        ),
        "lag_by_partition": Cut(lag).nested(),
        "earliest_offsets": low.nested(),
        "latest_offsets": ends.nested(),
        "kafka": unanswered,
        **counts.values,
        "pending_batches": len(staged),
        "pending_bytes": sum(batch.bytes for batch in staged),
        "waiting": waiting,
        "rejected_by_kind": kinds,
        "in_doubt": doubts,
        "last_batch": entry.batches[1] if entry else None,
        "last_commit_at": None if moved is None else _moment(moved),
        "newest_event_at": counts.newest and counts.newest.isoformat(timespec="milliseconds"),
        "freshness": counts.newest and round(time.time() - counts.newest.timestamp(), 1),
    }
    return StatusReport(values)


def _asked(config: Config, entry: LedgerEntry | None) -> Watermarks:
    planner = Planner.of(config, entry, trusting=True)
    _, partitions = planner.origin()
    return planner.watermarks(partitions)


class _Answer:
    """A question to a server, asked on a thread of its own while other things are read."""

    def __init__(self, ask: Callable[[], Watermarks]) -> None:
        self._ask = ask
        self._marks: Watermarks | None = None
        self._error = "Kafka did not answer in time"
        self._wrong: ConfigError | None = None
        self._thread = threading.Thread(target=self._run, name="frazil-kafka", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._marks = self._ask()
        except ConfigError as error:
            self._error = error.message
            if error.path[:1] == ("kafka",):  # no time will mend it
                self._wrong = error
        except FrazilError as error:
            self._error = error.message

    def within(self, seconds: float) -> tuple[Watermarks | None, str]:
        """The answer, or None and why there is none. A wrong [kafka] raises `ConfigError`."""
        self._thread.join(seconds)
        if self._wrong is not None:
            raise self._wrong
        return self._marks, "" if self._marks else self._error


def _stages(beyond: int | None, between: int, beat: tuple[int, bool]) -> dict[str, int | None]:
    """Offsets that are not committed, by stage. `beat`, of the heartbeat: offsets of the batch
    under way, and whether commits fail."""
    writing, fails = min(beat[0], beyond or 0), beat[1]
    return {
        "kafka": None if beyond is None else beyond - writing,
        "writing": writing,
        "staged": 0 if fails else between,
        "catalog": between if fails else 0,
    }


def _between(start: Cut, end: Cut) -> int:
    return sum(max(0, offset - start[p]) for p, offset in end.items() if p in start)


_COUNTS = ("written", "rejected", "skipped")
#: Values that are printed in a form of their own.
_VERDICT = ("state", "verdict", "reason", "remedy", "error", "operator")
_APART = ("sink", *_VERDICT, "run", "fenced_runs", "rejected_by_kind", "in_doubt")
#: Number of commit intervals after which a commit is late.
_LATE = 3


def _last_move(table: ReadOnlyTable, sink: str) -> int | None:
    for entry, snapshot in entries(table.history("main"), sink):
        if entry.ranges:
            return snapshot.timestamp_ms
    tagged = table.tagged(ledger_tag(sink))
    return tagged.timestamp_ms if tagged else None


def _summary(
    config: Config, lag: int | None, moved: int | None, doubted: Sequence[str] = ()
) -> str:
    waits = f"{counted(lag, 'offset waits', 'offsets wait')}" if lag else "nothing waits"
    if lag is None:
        waits = "the lag is unknown"
    if doubted:
        waits += f"; in doubt: {', '.join(doubted)}"
    if moved is None:
        return f"nothing committed yet; {waits}"
    age = time.time() - moved / 1000
    due = max(60.0, _LATE * duration(config.sink.commit_interval))
    late = ": that is late" if lag and age > due else ""
    return f"last commit {_ago(age)} ago; {waits}{late}"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@dataclass(frozen=True, slots=True)
class _IndexCounts:
    values: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    #: the highest event time that is committed
    newest: datetime | None = None


def _counts(table: ReadOnlyTable, sink: str) -> _IndexCounts:
    """The outcomes of all records, from the index. A batch of several tables has `*` rows for all
    of them together; a batch of one table has only that table's rows."""
    times = ["event_time_high"] if "event_time_high" in table.schema else []
    rows = table.rows(["batch", "table_name", *times, *_COUNTS], {"sink": [sink]})
    starred = pc.equal(rows["table_name"].cast("string"), "*")
    whole = pc.is_in(rows["batch"], value_set=pc.unique(rows.filter(starred)["batch"]))
    totals = rows.filter(pc.or_(starred, pc.invert(whole)))
    values = {name: int(pc.sum(totals[name]).as_py() or 0) for name in _COUNTS}
    return _IndexCounts(values, pc.max(totals[times[0]]).as_py() if times else None)


#: Dead letters to count, and commits with dead letters to read, at most.
_DEAD_LETTERS, _COMMITS = 10_000, 20
_COLUMNS = ("kind", "topic", "partition", "offset", "message")
_WIDTH = 300


def _kinds(config: Config, opened: Open) -> dict[str, dict[str, object]]:
    """Kinds of the newest rejected records: their number, and place and reason of the last one.
    Only the files of the newest commits that rejected something are read."""
    name = config.dead_letters.table
    table = opened(name) if name else None
    counts, last = Counter[str](), dict[str, str]()
    if table is None:
        return {}
    commits = (
        snapshot.id
        for entry, snapshot in entries(table.history("main"), config.sink.id)
        if entry.ranges
    )
    for commit in islice(commits, _COMMITS):
        for rows in table.rows_of(table.added(commit), _COLUMNS):
            kinds = rows["kind"].cast("string")
            for kind in pc.unique(kinds).to_pylist():
                alike = rows.filter(pc.equal(kinds, kind))
                counts[kind] += alike.num_rows
                last.setdefault(kind, _dead_letter(alike.slice(alike.num_rows - 1).to_pylist()[0]))
        if counts.total() >= _DEAD_LETTERS:
            break
    return {kind: {"records": count, "last": last[kind]} for kind, count in counts.most_common()}


def _dead_letter(row: dict[str, Any]) -> str:
    """In the format of `frazil run`."""
    where = Partition(row["topic"], row["partition"])
    return f"{where} offset {row['offset']}: {row['message']}"[:_WIDTH]


def _waiting(
    config: Config, opened: Open, position: Cut, staged: list[StagedBatch]
) -> dict[str, dict[str, object]]:
    """Tables that staged batches wait for: number and size of the batches, since when, and why if
    that is visible from outside. Batches that all their tables have wait for the index."""
    waiting: dict[str, dict[str, object]] = {}
    behind: set[str] = set()
    for name in sorted({name for batch in staged for name in batch.names}):
        batches = [batch for batch in staged if name in batch.names]
        table, why = opened(name), ""
        if table is None:
            why = "the table does not exist"
        elif table.uuid != batches[-1].table(name).uuid:
            why = "the table was dropped and recreated"
        else:
            beyond = takewhile(
                lambda pair: not position.reaches(pair[0].end),
                entries(table.history(config.branch(name)), config.sink.id),
            )
            committed = {commit_id for entry, _ in beyond for commit_id in entry.commit_ids}
            batches = [batch for batch in batches if batch.commit_id not in committed]
        behind |= {batch.commit_id for batch in batches}
        if batches:
            since = min(batch.staged_at_ms for batch in batches)
            waiting[name] = {
                "batches": len(batches),
                "bytes": sum(batch.table(name).bytes for batch in batches),
                "staged_at": _moment(since),
                "reason": why,
            }
    if batches := [batch for batch in staged if batch.commit_id not in behind]:
        waiting[config.index_table] = {
            "batches": len(batches),
            "bytes": 0,
            "staged_at": _moment(min(batch.staged_at_ms for batch in batches)),
            "reason": "committed to all tables, not to the index",
        }
    return waiting


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
