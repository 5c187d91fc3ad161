"""What can be known of a sink from outside, running or not: for `frazil status` and `leftovers`."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from pyspark.sql import SparkSession

from frazil.core.config import Config
from frazil.core.offsets import Cut
from frazil.feed.letters import replaying
from frazil.ingest import stage
from frazil.ingest.source import Origin, Planner
from frazil.ingest.stage import StagedBatch
from frazil.life import stage_folder
from frazil.table import maintain
from frazil.table.audit import known_tables
from frazil.table.commit import Target
from frazil.table.jvm import Catalog, Table

#: Seconds after which a file of Iceberg's that no snapshot refers to is of no commit under way: in
#: the index, and in tables, where others may take longer (Iceberg's own procedure waits as long).
_OLD, _OLDER = 24 * 3600.0, 3 * 24 * 3600.0


def status(config: Config, spark: SparkSession) -> dict[str, object]:
    """Position, lag, epoch, pending batches and last commit."""
    catalog = Catalog(spark, config.catalog.name)
    table = catalog.load(config.index_table)
    head = Target(table, "main", config.sink.id, 0, time).head() if table else None
    entry = head.entry if head else None
    position = entry.end if entry else Cut()
    stored = _stored(config, table) if table else []
    staged = [batch for batch in stored if not position.reaches(batch.end)]
    known = Origin(entry.cluster, entry.topics) if entry else Origin()
    planner = Planner(config.kafka.resolved(), topics=config.sink.topics,
                      pattern=config.sink.pattern, origin=known, trusting=True)  # fmt: skip
    _, partitions = planner.origin()
    marks = planner.watermarks(partitions)
    lag = {p: end - position.get(p, marks.low[p]) for p, end in marks.end.items()}
    last = head.snapshot.timestamp_ms if head and head.snapshot else None
    return {
        "sink": config.sink.id,
        "table": ", ".join(table.name for table in config.tables),
        "tables": len(known_tables(table, config.sink.id)) if table else 0,
        "index": config.index_table,
        "epoch": entry.epoch if entry else None,
        "position": position.nested(),
        "lag": sum(lag.values()),
        "lag_by_partition": Cut(lag).nested(),
        "topic_begins": marks.low.nested(),
        "topic_ends": marks.end.nested(),
        "pending_batches": len(staged),
        "pending_bytes": sum(batch.bytes for batch in staged),
        "waiting": _waiting(config, catalog, position, staged),
        "last_batch": entry.batches[1] if entry else None,
        "last_commit": None if last is None else _moment(last),
    }


def _waiting(
    config: Config, catalog: Catalog, position: Cut, staged: list[StagedBatch]
) -> dict[str, dict[str, object]]:
    """The tables that staged batches wait for: how many, how large, since when, and why if that can
    be seen from outside. What all tables have waits for the index."""
    found: dict[str, dict[str, object]] = {}
    behind: set[str] = set()
    for name in sorted({name for batch in staged for name in batch.names}):
        mine = [batch for batch in staged if name in batch.names]
        table, why = catalog.load(name), ""
        if table is None:
            why = "the table is gone"
        elif table.uuid != mine[-1].table(name).uuid:
            why = "the table was dropped and made again"
        else:
            branch = next((t.branch for t in config.tables if t.name == name), "main")
            entries = Target(table, branch, config.sink.id, 0, time).entries_after(position)
            there = {commit_id for entry, _ in entries for commit_id in entry.commit_ids}
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


def leftovers(config: Config, spark: SparkSession) -> list[tuple[Table, str]]:
    """Files that lives of the sink before the newest left behind, and replays of its dead letters,
    with the table they lie in."""
    catalog = Catalog(spark, config.catalog.name)
    index_table = catalog.load(config.index_table)
    if index_table is None:
        return []
    entry = Target(index_table, "main", config.sink.id, 0, time).head().entry
    if entry is None:
        return []
    # In this order, so that what the running sink commits meanwhile is never taken for a leftover:
    # staged batches first, then the files, then what the snapshots refer to.
    stored = _stored(config, index_table)
    found = []
    names = {table.name for table in config.tables if "{" not in table.name}
    names |= {*known_tables(index_table, config.sink.id), *(n for b in stored for n in b.names)}
    for table in (index_table, *map(catalog.load, sorted(names))):
        if table is None:
            continue
        name = f"{config.catalog.name}.{table.name}"
        paths = table.listing(f"{table.location}/data/") + table.listing(
            f"{table.location}/metadata/"
        )
        before = int((time.time() - (_OLD if table is index_table else _OLDER)) * 1000)
        old = table.listing(f"{table.location}/metadata/", before)
        files = spark.table(f"{name}.all_files").select("file_path").collect()  # of deletes, too
        manifests = spark.table(f"{name}.all_manifests").select("path").collect()
        lists = spark.table(f"{name}.snapshots").select("manifest_list").collect()
        found += [
            (table, path)
            for path in maintain.abandoned(old, [row[0] for row in (*manifests, *lists)])
        ]
        found += [
            (table, path)
            for path in maintain.leftovers(
                paths,
                sink=config.sink.id,
                epoch=entry.epoch,
                referenced=[row[0] for row in (*files, *manifests)],
                staged=stored,
            )
        ]
    if config.dead_letters:
        found += leftovers(replaying(config), spark)
    return found


def _stored(config: Config, index_table: Table) -> list[StagedBatch]:
    """The batch records in the stage; torn ones do not count."""
    paths = index_table.listing(stage_folder(config, index_table))
    found = [stage.load(index_table.fetch(path)) for path in paths if path.endswith(".json")]
    return [batch for batch in found if batch is not None]
