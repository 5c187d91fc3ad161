"""What a changed definition means for the sink that runs by the former one. Pure.

In: two configs of one sink. Out: the keys that differ, and for each whether it takes effect at
once, restarts the sink, or is refused. Every key of every section has its class in `EFFECTS`; a
test holds that none is forgotten. What is not known to be safe in a running sink restarts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from frazil.config.model import Config
from frazil.config.sections import TableConfig
from frazil.config.spark_settings import of_process


class Effect(Enum):
    #: the running sink takes it over
    LIVE = "at once"
    #: the sink ends after its batch, and starts again as a new epoch
    RESTART = "restart"
    #: the ledger would be left behind, or the process cannot have it
    REFUSED = "refused"


LIVE, RESTART, REFUSED = Effect
#: The class of each key. `*`: of every key that the section passes through.
EFFECTS: Mapping[str, Mapping[str, Effect]] = {
    "sink": {
        "id": REFUSED,
        "topics": RESTART,
        "topic_pattern": RESTART,
        "starting_offsets": RESTART,
        "index_table": REFUSED,
        "index_snapshot_retention": RESTART,
        "staging_location": RESTART,
        "checkpoint_location": RESTART,
        "trigger": RESTART,
        "commit_interval": LIVE,
        "max_records_per_trigger": RESTART,
        "max_bytes_per_trigger": RESTART,
        "max_records_per_task": RESTART,
        "max_pending_batches": LIVE,
        "max_pending_bytes": LIVE,
        "max_pending_age": LIVE,
        "kafka_client": RESTART,
        "unavailable_timeout": RESTART,
        "consumer_group": RESTART,
        "max_tables": RESTART,
        "allow_shared_topics": RESTART,
    },
    "kafka": {"*": RESTART},
    "decode": {
        "format": RESTART,
        "schema": RESTART,
        "columns": RESTART,
        "key_columns": RESTART,
        "undeclared": RESTART,
        "key_format": RESTART,
        "key_schema": RESTART,
        "unavailable_value": RESTART,
        "registry": RESTART,
    },
    "transform": {"sql": RESTART, "python": RESTART, "output_mode": RESTART},
    "catalog": {
        "name": RESTART,
        "type": REFUSED,
        "catalog-impl": REFUSED,
        "uri": REFUSED,
        "warehouse": REFUSED,
        "*": RESTART,
    },
    "spark": {"*": RESTART},  # one that concerns the process: REFUSED
    "table": {
        "name": RESTART,
        "partition_by": RESTART,
        "properties": RESTART,
        "format_version": RESTART,
        "location": RESTART,
        "branch": RESTART,
        "event_time": RESTART,
        "mode": RESTART,
        "key": RESTART,
        "partitioned_by_key": RESTART,
        "version_column": RESTART,
        "compact_after_commits": RESTART,
        "snapshot_retention": RESTART,
        "identifier_fields": RESTART,
        "sort_by": RESTART,
        "schema_evolution": RESTART,
        "max_columns": RESTART,
        "aliases": RESTART,
        "target_file_size": RESTART,
        "compression": RESTART,
        "commit_interval": LIVE,
        "commit_bytes": LIVE,
        "priority": LIVE,
        "key_column": RESTART,
        "key_column_type": RESTART,
        "key_fields_prefix": RESTART,
        "headers": RESTART,
        "headers_column": RESTART,
        "select": RESTART,
        "topic_column": RESTART,
        "partition_column": RESTART,
        "offset_column": RESTART,
        "timestamp_column": RESTART,
    },
    "route": {"*": RESTART},
    "dead_letters": {"table": RESTART, "max_fraction": RESTART, "max_count": RESTART},
    "completeness": {
        "allowed_lateness": RESTART,
        "idle_timeout": RESTART,
        "max_future": RESTART,
    },
    "metrics": {
        "address": RESTART,
        "otlp_endpoint": RESTART,
        "lag_interval": RESTART,
        "audit_interval": RESTART,
        "max_labels": RESTART,
    },
    "health": {"file": RESTART, "heartbeat_interval": RESTART, "max_wait": RESTART},
    "log": {"format": RESTART, "level": RESTART, "file": RESTART, "spark_level": RESTART},
    "notify": {
        "command": RESTART,
        "webhook": RESTART,
        "headers": RESTART,
        "events": RESTART,
        "timeout": RESTART,
    },
}
#: What refused keys have in common, and what helps.
LEFT_BEHIND = "the ledger would not apply to the new index or catalog"
ELSEWHERE = "stop the sink, and start it again with the new definition"


@dataclass(frozen=True, slots=True)
class KeyChange:
    section: str
    key: str
    effect: Effect

    def __str__(self) -> str:
        return f"{self.section} {self.key}".rstrip()


@dataclass(frozen=True, slots=True)
class Changes:
    """All keys that differ."""

    keys: tuple[KeyChange, ...]

    def of(self, effect: Effect) -> str:
        """`[sink] topics, [decode] format`; empty if nothing has this effect."""
        return ", ".join(str(change) for change in self.keys if change.effect is effect)

    def __bool__(self) -> bool:
        return bool(self.keys)


def changes(old: Config, new: Config) -> Changes:
    """What differs between two definitions of one sink."""
    return Changes(tuple(dict.fromkeys(_changes(old, new))))


def _changes(old: Config, new: Config) -> Iterator[KeyChange]:
    if old.index_table != new.index_table:  # by default beside the first table
        yield KeyChange("[sink]", "index_table", REFUSED)
    for field in dataclasses.fields(old):
        one, other = getattr(old, field.name), getattr(new, field.name)
        if one == other:
            continue
        if field.name == "tables":
            yield from _table_changes(one, other)
        elif field.name == "routes":
            yield KeyChange("[[route]]", "", RESTART)
        elif field.name == "catalog":
            one, other = ({"name": c.name, **c.properties} for c in (one, other))
            yield from _key_changes("catalog", "[catalog]", one, other)
        else:
            one, other = (
                v if isinstance(v, Mapping) else dataclasses.asdict(v) for v in (one, other)
            )
            yield from _key_changes(field.name, f"[{field.name}]", one, other)


def _table_changes(
    old: tuple[TableConfig, ...], new: tuple[TableConfig, ...]
) -> Iterator[KeyChange]:
    one, other = ({table.name: table for table in tables} for tables in (old, new))
    for name in {**one, **other}:
        if name in one and name in other:
            yield from _key_changes(
                "table",
                f"[[table]] {name}",
                dataclasses.asdict(one[name]),
                dataclasses.asdict(other[name]),
            )
        else:
            yield KeyChange(f"[[table]] {name}", "", RESTART)
    if list(one) != list(other) and one.keys() == other.keys():
        yield KeyChange("[[table]]", "order", RESTART)


def _key_changes(
    section: str, title: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[KeyChange]:
    for key in {**old, **new}:
        if old.get(key) == new.get(key) or (section, key) == ("sink", "index_table"):
            continue
        known = EFFECTS.get(section, {})
        effect = known.get(key, known.get("*", RESTART))
        if section == "spark" and of_process(key):
            effect = REFUSED
        yield KeyChange(title, key, effect)
