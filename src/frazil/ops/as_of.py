"""`frazil.as_of`: time travel to the first snapshot of a table that contains a Kafka offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frazil.config.model import Config
from frazil.errors import ConfigError, Expired
from frazil.iceberg.file_io import NeedsSpark
from frazil.iceberg.java import JavaCatalog
from frazil.iceberg.java_table import JavaTable
from frazil.iceberg.table import Snapshot
from frazil.ledger.entry import PREFIX, LedgerEntry, entries, parse
from frazil.ledger.sink_state import index_entry
from frazil.offsets import Cut, Partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def wanted_cut(
    topic: str,
    partition: int,
    offset: int,
    cut: Mapping[str, Mapping[str, int]] | Mapping[Any, int] | None,
) -> Cut:
    """The cut to reach: one past the given offset, or the given cut. Expects exactly one of
    them."""
    if (cut is None) == (not topic) or (topic and min(partition, offset) < 0):
        raise ConfigError(
            "cannot read a table as of a cut: expected topic, partition and offset, or a cut"
        )
    if cut is None:
        return Cut({Partition(topic, partition): offset + 1})
    nested = isinstance(next(iter(cut), ""), str)
    return Cut.of(cut) if nested else Cut(cut)  # type: ignore[arg-type]


def as_of(
    spark: SparkSession,
    target: Config | str,
    wanted: Cut,
    *,
    table: str = "",
    sink: str = "",
    catalog: str = "",
    branch: str = "",
) -> DataFrame:
    """The table at its first snapshot that contains every offset below `wanted`."""
    if isinstance(target, Config):
        name, sink = _only_table(target, table), sink or target.sink.id
        catalog = catalog or target.catalog.name
        branch = branch or target.branch(name)
    else:
        name, catalog, branch = target, catalog or "lake", branch or "main"
    opened = JavaCatalog(spark, catalog)
    java_table = opened.load(name)
    if java_table is None:
        raise ConfigError(f"cannot read table {name} as of {wanted.text}: it does not exist")
    history = _history(java_table, branch)
    snapshot = first(name, history, wanted, sink) or _newest(opened, name, history, wanted, sink)
    reader = spark.read.option("versionAsOf", str(snapshot.id))
    return reader.table(f"{catalog}.{name}")


def _history(table: JavaTable, branch: str) -> list[Snapshot]:
    """Read from the metadata file, which is fast; through Java if only Java can read it."""
    try:
        return list(table.readonly.history(branch))
    except NeedsSpark:
        return list(table.history(branch))


def _only_table(config: Config, table: str) -> str:
    if table:
        return table
    names = [table_config.name for table_config in config.tables]
    if len(names) > 1 or "{" in names[0]:
        raise ConfigError(
            f"cannot choose a table: sink {config.sink.id} fills several",
            hint=f'as_of(…, table="{names[0]}")',
        )
    return names[0]


def first(table: str, history: Sequence[Snapshot], wanted: Cut, sink: str = "") -> Snapshot | None:
    """The first snapshot that contains every offset below `wanted`; None if no entry reaches it.

    `history` is newest first. `sink` selects the ledger; without it, the only sink that reads these
    partitions.
    """
    sink = sink or _only_sink(table, history, wanted)
    candidate: tuple[LedgerEntry, Snapshot] | None = None
    for entry, snapshot in entries(history, sink):
        if not set(wanted) & set(entry.end):
            continue
        if not entry.end.reaches(wanted):
            return candidate[1] if candidate else None
        candidate = entry, snapshot
    if candidate is None:
        return None
    (entry, snapshot), oldest = candidate, history[-1]
    if any(entry.begin.get(key, 0) < offset for key, offset in wanted.items()):
        return snapshot  # this entry committed it
    if oldest.parent is not None:
        # Older snapshots are expired: the first one cannot be determined.
        raise Expired(
            f"cannot read table {table} as of {wanted.text}: the first snapshot that had it was "
            "expired",
            hint=f"the oldest one left has it, too: VERSION AS OF {oldest.id}",
        )
    raise ConfigError(
        f"cannot read table {table} as of {wanted.text}: its ledger begins at "
        f"{_common(entry.begin, wanted).text}"
    )


def _only_sink(table: str, history: Sequence[Snapshot], wanted: Cut) -> str:
    """The only sink that reads these partitions."""
    newest = {snapshot.summary.get(f"{PREFIX}sink", ""): snapshot for snapshot in reversed(history)}
    known = [
        entry for snapshot in newest.values() if (entry := parse(snapshot.summary)) is not None
    ]
    sinks = sorted(entry.sink for entry in known if set(wanted) & set(entry.end))
    if len(sinks) > 1:
        raise ConfigError(
            f"cannot choose a sink: sinks {', '.join(sinks)} write to table {table}",
            hint=f'as_of(…, sink="{sinks[0]}")',
        )
    return sinks[0] if sinks else ""


def _newest(
    catalog: JavaCatalog, name: str, history: Sequence[Snapshot], wanted: Cut, sink: str
) -> Snapshot:
    """The newest snapshot of a table that the latest batches had nothing for. The position in the
    index proves that the stream has reached `wanted`."""
    for snapshot in history:
        entry = parse(snapshot.summary)
        if entry is None or (sink and entry.sink != sink) or not set(wanted) & set(entry.end):
            continue
        index = catalog.load(entry.index) if entry.index else None
        position = entry.end
        if index is not None:
            known = index_entry(index, entry.sink)
            position = known.end if known is not None else position
        if position.reaches(wanted):
            return snapshot
        raise ConfigError(
            f"cannot read table {name} as of {wanted.text}: sink {entry.sink} is at "
            f"{_common(position, wanted).text}"
        )
    raise ConfigError(
        f"cannot read table {name} as of {wanted.text}: no snapshot of it has these partitions"
    )


def _common(cut: Cut, wanted: Cut) -> Cut:
    return Cut({key: offset for key, offset in cut.items() if key in wanted})
