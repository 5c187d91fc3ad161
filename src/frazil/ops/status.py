"""What can be known of a sink from outside: for `frazil status` and `frazil orphans`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import islice, takewhile
from typing import Any

import pyarrow.compute as pc
from pyspark.sql import SparkSession

from frazil.commit.protocol import TableCommitter, ledger_tag
from frazil.config.model import Config, duration
from frazil.errors import IdentityMismatch
from frazil.iceberg.java import JavaCatalog, JavaTable
from frazil.iceberg.live_files import place, refuse_shared
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.kafka.planner import Planner, TopicIdentity
from frazil.ledger import staged_batch
from frazil.ledger.entry import entries, head
from frazil.ledger.sink_state import known_tables
from frazil.ledger.staged_batch import StagedBatch
from frazil.maintenance import tasks
from frazil.offsets import Cut, Partition
from frazil.ops.startup_checks import in_doubt
from frazil.render import counted
from frazil.sources.dead_letters import replaying
from frazil.spark.open_table import Open
from frazil.startup import staging_folder

#: Seconds after which a file of Iceberg's that no snapshot refers to is of no commit under way: in
#: the index, and in tables, where others may take longer (Iceberg's own procedure waits as long).
_OLD, _OLDER = 24 * 3600.0, 3 * 24 * 3600.0


def status(config: Config, opened: Open) -> dict[str, Any]:
    """Position, lag, epoch, counts, pending batches and last commit, from metadata alone.

    Whether a process of the sink runs cannot be seen there. What can: when it last committed, and
    whether records wait for longer than it should take; that is said, and nothing beyond.
    """
    table, sink = opened(config.index_table), config.sink.id
    found = head(table.history("main"), sink, table.tagged(ledger_tag(sink))) if table else None
    entry = found.entry if found else None
    position = entry.end if entry else Cut()
    stored = [] if table is None else list(_batches(config, table))
    staged = [batch for batch in stored if not position.reaches(batch.end)]
    known = TopicIdentity.of(entry) if entry else TopicIdentity()
    planner = Planner(
        config.kafka.resolved(),
        topics=config.sink.topics,
        pattern=config.sink.topic_pattern,
        origin=known,
        trusting=True,
    )
    _, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    lag = {p: end - position.get(p, marks.low[p]) for p, end in marks.end.items()}
    # A claim is an entry, too: only one that moved the position tells of a commit of records.
    moved = _last_move(table, sink) if table else None
    doubts = in_doubt(config, opened)
    return {
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


_COUNTS = ("written", "rejected", "skipped")
#: Commit intervals after which a commit that should have come is late.
_LATE = 3


def _last_move(table: ReadOnlyTable, sink: str) -> int | None:
    for entry, snapshot in entries(table.history("main"), sink):
        if entry.ranges:
            return snapshot.timestamp_ms
    witness = table.tagged(ledger_tag(sink))
    return witness.timestamp_ms if witness else None


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
    """What became of all records, by the index. A batch of several tables has rows of all of them
    together, under the name `*`; of one table its own rows tell."""
    rows = table.rows(["batch", "table_name", *_COUNTS], {"sink": [sink]})
    starred = pc.equal(rows["table_name"].cast("string"), "*")
    whole = pc.is_in(rows["batch"], value_set=pc.unique(rows.filter(starred)["batch"]))
    each = rows.filter(pc.or_(starred, pc.invert(whole)))
    return {name: int(pc.sum(each[name]).as_py() or 0) for name in _COUNTS}


#: Of dead letters: how many of them, and commits with some, a look goes back.
_LETTERS, _COMMITS = 10_000, 20
_LETTER = ("kind", "topic", "partition", "offset", "message")
_WIDTH = 300


def _kinds(config: Config, opened: Open) -> dict[str, dict[str, object]]:
    """Kinds of the newest rejected records: how many, where and why the last of them. Only the
    files of the newest commits that rejected something are read."""
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
        for rows in table.rows_of(table.added(commit), _LETTER):
            kinds = rows["kind"].cast("string")
            for kind in pc.unique(kinds).to_pylist():
                alike = rows.filter(pc.equal(kinds, kind))
                counts[kind] += alike.num_rows
                last.setdefault(kind, _letter(alike.slice(alike.num_rows - 1).to_pylist()[0]))
        if counts.total() >= _LETTERS:
            break
    return {kind: {"records": count, "last": last[kind]} for kind, count in counts.most_common()}


def _letter(row: dict[str, Any]) -> str:
    """As `frazil run` tells it."""
    where = Partition(row["topic"], row["partition"])
    return f"{where} offset {row['offset']}: {row['message']}"[:_WIDTH]


def _batches(config: Config, table: ReadOnlyTable) -> Iterator[StagedBatch]:
    for path in table.listing(staging_folder(config, table)):
        try:
            batch = staged_batch.load(table.fetch(path), path) if path.endswith(".json") else None
        except IdentityMismatch:
            continue  # it was committed meanwhile
        if batch is not None:
            yield batch


def _waiting(
    config: Config, opened: Open, position: Cut, staged: list[StagedBatch]
) -> dict[str, dict[str, object]]:
    """The tables that staged batches wait for: how many, how large, since when, and why if that can
    be seen from outside. What all tables have waits for the index."""
    found: dict[str, dict[str, object]] = {}
    behind: set[str] = set()
    for name in sorted({name for batch in staged for name in batch.names}):
        mine = [batch for batch in staged if name in batch.names]
        table, why = opened(name), ""
        if table is None:
            why = "the table is gone"
        elif table.uuid != mine[-1].table(name).uuid:
            why = "the table was dropped and made again"
        else:
            branch = next((t.branch for t in config.tables if t.name == name), "main")
            beyond = takewhile(
                lambda each: not position.reaches(each[0].end),
                entries(table.history(branch), config.sink.id),
            )
            there = {commit_id for entry, _ in beyond for commit_id in entry.commit_ids}
            mine = [batch for batch in mine if batch.commit_id not in there]
        behind |= {batch.commit_id for batch in mine}
        if mine:
            since = min(batch.staged_at_ms for batch in mine)
            found[name] = {
                "batches": len(mine),
                "bytes": sum(batch.table(name).bytes for batch in mine),
                "since": _moment(since),
                "why": why,
            }
    if mine := [batch for batch in staged if batch.commit_id not in behind]:
        found[config.index_table] = {
            "batches": len(mine),
            "bytes": 0,
            "since": _moment(min(batch.staged_at_ms for batch in mine)),
            "why": "all their tables have them",
        }
    return found


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")


def orphans(
    config: Config, spark: SparkSession, older_than: float = 0.0
) -> list[tuple[JavaTable, str]]:
    """Files that lives of the sink before the newest left behind, and replays of its dead letters,
    with the table they lie in. `older_than`: seconds; what is younger is left out."""
    catalog = JavaCatalog(spark, config.catalog.name)
    index_table = catalog.load(config.index_table)
    if index_table is None:
        return []
    entry = TableCommitter(index_table, "main", config.sink.id, 0, time).head().entry
    if entry is None:
        return []
    # In this order, so that what the running sink commits meanwhile is never taken for a leftover:
    # staged batches first, then the files, then what the snapshots refer to.
    stored = _stored(config, index_table)
    names = {table.name for table in config.tables if "{" not in table.name}
    known = {*known_tables(index_table, config.sink.id), *(n for b in stored for n in b.names)}
    loaded = {name: catalog.load(name) for name in sorted(names | known)}
    tables = [index_table, *filter(None, loaded.values())]
    now = time.time()
    listed = []
    for table in tables:
        if _shared(table) and (gone := sorted(n for n in known if loaded[n] is None)):
            raise IdentityMismatch(
                f"cannot tell which files below {', '.join(_shared(table))} are live: table "
                f"{gone[0]} is gone, and its files may lie there",
                hint="it may have been renamed; nothing was removed",
            )
        before = int((now - older_than) * 1000) if older_than else None
        files = [path for root in _folders(table) for path in table.listing(root, before)]
        # Names of Iceberg's say nothing of the table: only where no other table has its own.
        age = max(older_than, _OLD if table is index_table else _OLDER)
        old = table.listing(f"{table.location}/metadata/", int((now - age) * 1000))
        listed.append((table, files, old))
    # Of all tables together: some may share a folder.
    live = [path for table in tables for path in _referenced(config, spark, table)]
    found = []
    for table, files, old in listed:
        ours = tasks.orphan_files(
            files, sink=config.sink.id, epoch=entry.epoch, referenced=live, staged=stored
        )
        found += [(table, path) for path in (*tasks.abandoned(old, live), *ours)]
    if config.dead_letters:
        found += orphans(replaying(config), spark, older_than)
    return list(dict.fromkeys(found))


def remove(found: list[tuple[JavaTable, str]]) -> None:
    """Those leftovers; none of them where the files of one table may be another's."""
    for table in dict.fromkeys(table for table, _ in found):
        refuse_shared(table.name, table.properties)
    for table, path in found:
        table.delete(path)


def _folders(table: JavaTable) -> list[str]:
    """Where a table's files lie: by its location, and by its properties."""
    own = [f"{table.location}/data/", f"{table.location}/metadata/"]
    return list(dict.fromkeys([*own, *(f"{path.rstrip('/')}/" for path in _told(table))]))


def _told(table: JavaTable) -> list[str]:
    """The folders that a table's properties name; two are names of older versions of Iceberg."""
    names = ("data", "metadata", "object-storage", "folder-storage")
    found = [table.properties.get(f"write.{name}.path", "") for name in names]
    return [path for path in found if path]


def _shared(table: JavaTable) -> list[str]:
    """Folders outside of the table's own, which other tables may have, too."""
    prefix, home = place(table.location)
    there = [(path, place(path)) for path in _told(table)]
    return [p for p, at in there if at[0] != prefix or not at[1].startswith(f"{home}/")]


def _referenced(config: Config, spark: SparkSession, table: JavaTable) -> Iterator[str]:
    """Whatever a snapshot of a table names: data and delete files, manifests and their lists."""
    name = f"{config.catalog.name}.{table.name}"
    columns = (
        ("all_files", "file_path"),
        ("all_manifests", "path"),
        ("snapshots", "manifest_list"),
    )
    for rows, column in columns:
        for row in spark.table(f"{name}.{rows}").select(column).collect():
            if row[0] is not None:
                yield row[0]


def _stored(config: Config, index_table: JavaTable) -> list[StagedBatch]:
    """The batch records in the stage; torn ones do not count."""
    paths = index_table.listing(staging_folder(config, index_table))
    found = [
        staged_batch.load(index_table.fetch(path), path) for path in paths if path.endswith(".json")
    ]
    return [batch for batch in found if batch is not None]
