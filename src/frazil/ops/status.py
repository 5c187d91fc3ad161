"""`frazil status`: the state of a sink, read from outside its process."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import islice, takewhile
from typing import Any

import pyarrow.compute as pc

from frazil.config.model import Config
from frazil.config.units import duration
from frazil.errors import counted
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.kafka.planner import Planner
from frazil.ledger.entry import entries
from frazil.ledger.sink_state import index_entry, known_tables, staged_batches
from frazil.ledger.staged_batch import StagedBatch
from frazil.ledger.tags import ledger_tag
from frazil.offsets import Cut, Partition
from frazil.ops.startup_checks import doubt_lines, in_doubt
from frazil.render import Line
from frazil.spark.open_table import Open


class StatusReport(dict[str, Any]):
    """The values of `frazil status --json`."""

    def lines(self) -> Iterator[Line]:
        values = {key: value for key, value in self.items() if key not in _APART}
        for kind, summary in self["rejected_by_kind"].items():
            values[f"rejected: {kind}"] = (
                f"{summary['records']:,} of the newest; the last: {summary['last']}"
            )
        for key, value in values.items():
            text = json.dumps(value) if isinstance(value, (dict, list)) else value
            yield f"{key:>16}  {text}"
        yield from doubt_lines(self["in_doubt"])


def status(config: Config, opened: Open) -> StatusReport:
    """Position, lag, epoch, counts, pending batches and last commit, from metadata alone.

    Metadata does not show whether a process of the sink runs. `state` reports only the time of the
    last commit, and whether records wait longer than they should.
    """
    table, sink = opened(config.index_table), config.sink.id
    entry = index_entry(table, sink) if table else None
    position = entry.end if entry else Cut()
    stored = staged_batches(config, table) if table else ()
    staged = [batch for _, batch in stored if batch and not position.reaches(batch.end)]
    planner = Planner.of(config, entry, trusting=True)
    _, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    lag = {p: end - position.get(p, marks.low[p]) for p, end in marks.end.items()}
    # A claim is an entry, too; only an entry that moved the position is a commit of records.
    moved = _last_move(table, sink) if table else None
    doubts = in_doubt(config, opened)
    values = {
        "sink": sink,
        "table": ", ".join(table.name for table in config.tables),
        "tables": len(known_tables(table, sink)) if table else 0,
        "index": config.index_table,
        "epoch": entry.epoch if entry else None,
        "state": _state(config, sum(lag.values()), moved, list(doubts)),
        "position": position.nested(),
        "lag": sum(lag.values()),
        "lag_by_partition": Cut(lag).nested(),
        "topic_begins": marks.low.nested(),
        "topic_ends": marks.end.nested(),
        **(_counts(table, sink) if table else dict.fromkeys(_COUNTS, 0)),
        "pending_batches": len(staged),
        "pending_bytes": sum(batch.bytes for batch in staged),
        "waiting": _waiting(config, opened, position, staged),
        "rejected_by_kind": _kinds(config, opened),
        "in_doubt": doubts,
        "last_batch": entry.batches[1] if entry else None,
        "last_commit": None if moved is None else _moment(moved),
    }
    return StatusReport(values)


_COUNTS = ("written", "rejected", "skipped")
#: Values that are printed in a form of their own.
_APART = ("rejected_by_kind", "in_doubt")
#: Number of commit intervals after which a commit is late.
_LATE = 3


def _last_move(table: ReadOnlyTable, sink: str) -> int | None:
    for entry, snapshot in entries(table.history("main"), sink):
        if entry.ranges:
            return snapshot.timestamp_ms
    tagged = table.tagged(ledger_tag(sink))
    return tagged.timestamp_ms if tagged else None


def _state(config: Config, lag: int, moved: int | None, doubted: Sequence[str] = ()) -> str:
    waits = f"{counted(lag, 'offset waits', 'offsets wait')} in Kafka" if lag else "nothing waits"
    if doubted:
        waits += f"; in doubt: {', '.join(doubted)}"
    if moved is None:
        return f"nothing committed yet; {waits}"
    age = time.time() - moved / 1000
    due = max(60.0, _LATE * duration(config.sink.commit_interval))
    late = ": is it running?" if lag and age > due else ""
    return f"last commit {_ago(age)} ago; {waits}{late}"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _counts(table: ReadOnlyTable, sink: str) -> dict[str, int]:
    """The outcomes of all records, from the index. A batch of several tables has `*` rows for all
    of them together; a batch of one table has only that table's rows."""
    rows = table.rows(["batch", "table_name", *_COUNTS], {"sink": [sink]})
    starred = pc.equal(rows["table_name"].cast("string"), "*")
    whole = pc.is_in(rows["batch"], value_set=pc.unique(rows.filter(starred)["batch"]))
    totals = rows.filter(pc.or_(starred, pc.invert(whole)))
    return {name: int(pc.sum(totals[name]).as_py() or 0) for name in _COUNTS}


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
            why = "the table is gone"
        elif table.uuid != batches[-1].table(name).uuid:
            why = "the table was dropped and made again"
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
                "since": _moment(since),
                "why": why,
            }
    if batches := [batch for batch in staged if batch.commit_id not in behind]:
        waiting[config.index_table] = {
            "batches": len(batches),
            "bytes": 0,
            "since": _moment(min(batch.staged_at_ms for batch in batches)),
            "why": "all their tables have them",
        }
    return waiting


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
