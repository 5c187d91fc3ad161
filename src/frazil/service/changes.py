"""What a changed definition means for the sink that runs by the former one. Pure.

In: two configs of one sink. Out: the keys that differ, and for each whether it takes effect at
once, restarts the sink, or is refused. What is not known to be safe in a running sink restarts it.
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
    #: the options of `frazil run` decide it for all sinks of the process
    OUTSIDE = "outside"


LIVE, RESTART, REFUSED, OUTSIDE = Effect
#: The keys that do not restart the sink. `*`: every key of the section.
EFFECTS: Mapping[str, Mapping[str, Effect]] = {
    "sink": {
        "id": REFUSED,
        "index_table": REFUSED,
        "commit_interval": LIVE,
        "max_pending_batches": LIVE,
        "max_pending_bytes": LIVE,
        "max_pending_age": LIVE,
    },
    "catalog": {"type": REFUSED, "catalog-impl": REFUSED, "uri": REFUSED, "warehouse": REFUSED},
    "table": {"commit_interval": LIVE, "commit_bytes": LIVE, "priority": LIVE},
    "log": {"*": OUTSIDE},
}
#: What refused keys have in common, and what helps.
LEFT_BEHIND = "the ledger would not apply to the new index or catalog"
PROCESS = "in a process of several sinks, the options of frazil run set the log for all of them"
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

    @property
    def lost_ledger(self) -> str:
        """The keys whose change leaves the ledger behind, whenever it takes effect."""
        refused = [change for change in self.keys if change.effect is REFUSED]
        return ", ".join(str(change) for change in refused if change.section != "[spark]")

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
