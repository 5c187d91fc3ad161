"""The state of a sink, read from its offset index: position, epoch, tables and staged batches.

Every command and every start reads it here; nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from frazil.config.model import Config
from frazil.errors import IdentityMismatch
from frazil.iceberg.table import ReadableTable
from frazil.ledger import staged_batch
from frazil.ledger.entry import LedgerEntry, head
from frazil.ledger.staged_batch import StagedBatch
from frazil.ledger.tags import ledger_tag

#: Suffix of the id of a sink that replays the dead letters of another.
REPLAY = ".replay"
#: Prefix, before the sink's id, of the index property with table → uuid, as JSON.
TABLES_PROPERTY = "frazil.tables"
#: The table name of index rows that cover the whole stream.
STREAM = "*"


def staging_folder(config: Config, index: ReadableTable) -> str:
    folder = config.sink.staging_location.rstrip("/") or f"{index.location}/stage"
    return f"{folder}/{config.sink.id}/"


def new_location(config: Config, table: str) -> str:
    """Where the catalog would put a new table; empty: that is the server's to say."""
    properties = config.catalog.properties
    kind, warehouse = properties.get("type", ""), properties.get("warehouse", "").rstrip("/")
    if kind not in ("hadoop", "jdbc") or not warehouse:
        return ""
    return "/".join([warehouse, *table.split(".")])


def start_folder(config: Config, index: ReadableTable | None) -> str:
    """The staging folder, also where there is no index yet; empty: only the catalog knows where
    that will be."""
    if index is not None:
        return staging_folder(config, index)
    location = new_location(config, config.index_table)
    folder = config.sink.staging_location.rstrip("/") or (location and f"{location}/stage")
    return f"{folder}/{config.sink.id}/" if folder else ""


def staged_batches(
    config: Config, index: ReadableTable
) -> Iterator[tuple[str, StagedBatch | None]]:
    """Paths and batches in the staging folder; None: the record of the batch is torn."""
    for path in index.listing(staging_folder(config, index)):
        if path.endswith(".json"):
            try:
                yield path, staged_batch.load(index.fetch(path), path)
            except IdentityMismatch:
                continue  # a run that is still alive has committed it meanwhile


#: Name of a heartbeat, before the epoch of the run that writes it; no batch record has such a name.
_HEARTBEAT = "heartbeat-"


def heartbeat_path(folder: str, epoch: int) -> str:
    """The object that the run of an epoch overwrites while it is alive, in the staging folder."""
    return f"{folder}{_HEARTBEAT}{epoch}"


def start_heartbeat_path(folder: str) -> str:
    """The object that a run overwrites until it has claimed its tables."""
    return f"{folder}{_HEARTBEAT}start"


def heartbeat_paths(index: ReadableTable, folder: str) -> dict[int, str]:
    """Epoch → path of the heartbeats in a staging folder."""
    epochs = {}
    for path in index.listing(folder):
        name, digits = path.rpartition("/")[2], path.rpartition("-")[2]
        if name.startswith(_HEARTBEAT) and digits.isdigit():
            epochs[int(digits)] = path
    return epochs


def index_entry(index: ReadableTable, sink: str) -> LedgerEntry | None:
    """The newest entry of a sink in its index: its position, epoch and tables. None: it has none,
    or expired snapshots hide it."""
    return head(index.history("main"), sink, index.tagged(ledger_tag(sink))).entry


def known_tables(index: ReadableTable, sink: str) -> dict[str, str]:
    """The tables that a sink's position depends on: name → uuid."""
    entry = index_entry(index, sink)
    if entry is None:
        return {}
    return announced_tables(entry.tables, index.properties)


def tables_property(sink: str) -> str:
    """The index property with table → uuid of a sink."""
    return f"{TABLES_PROPERTY}.{sink}"


def tables_text(uuids: Mapping[str, str]) -> str:
    """The text of the index property with table → uuid."""
    return json.dumps(dict(uuids), separators=(",", ":"))


def announced_tables(
    tables: Mapping[str, str] | str, properties: Mapping[str, str]
) -> dict[str, str]:
    """Name → uuid from an index entry's `tables`: the mapping, or the property that has it."""
    if not isinstance(tables, str):
        return dict(tables)
    if tables not in properties:
        raise IdentityMismatch(
            f"cannot read the tables of a sink: the index lacks its property {tables}"
        )
    return property_tables(properties, tables)


def property_tables(properties: Mapping[str, str], key: str) -> dict[str, str]:
    """Name → uuid from this property of the index; empty where it is not there."""
    try:
        return dict(json.loads(properties.get(key, "{}")))
    except (ValueError, TypeError) as error:
        raise IdentityMismatch(
            f"cannot read the tables of a sink: property {key} of the index is not table "
            f"→ uuid: {error}",
            hint="it was altered by hand; restore it from an earlier metadata file of the index",
        ) from None
