"""Which tables a sink's position counts on, as the ledger of its offset index says. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Protocol

from frazil.errors import IdentityMismatch
from frazil.ledger.entry import Snapshot, head

#: What the id of a sink that replays has behind the id of the sink whose dead letters they are.
REPLAY = ".replay"
#: Property of the index, with the sink's id behind it: table → uuid, as JSON.
TABLES_PROPERTY = "frazil.tables"
#: The index's rows that speak of the whole stream have this for a table.
STREAM = "*"


class ReadableIndex(Protocol):
    """What is read of the offset index."""

    def history(self, branch: str) -> Iterator[Snapshot]: ...
    def tagged(self, tag: str) -> Snapshot | None: ...
    @property
    def properties(self) -> dict[str, str]: ...


def known_tables(index: ReadableIndex, sink: str) -> dict[str, str]:
    """The tables that a sink's position counts on: name → uuid."""
    entry = head(index.history("main"), sink, index.tagged(f"frazil/{sink}")).entry
    if entry is None:
        return {}
    return announced_tables(entry.tables, index.properties)


def announced_tables(
    said: Mapping[str, str] | str, properties: Mapping[str, str]
) -> dict[str, str]:
    """Of an entry of the index: its own words, or the property that it names."""
    if not isinstance(said, str):
        return dict(said)
    if said not in properties:
        raise IdentityMismatch(
            f"cannot tell the tables of a sink: the index lacks its property {said}"
        )
    return dict(json.loads(properties[said]))
