"""Needs: the columns that records require of a table that lacks them.

A task that meets such records reports a need, as an Arrow schema with its details in the metadata.
Needs of one table are merged (`add_need`), those of a task as well as those of all tasks of a
batch, in any order. The driver creates or changes the table, and the batch runs again. Pure.
"""

from __future__ import annotations

import json
from contextlib import suppress

import pyarrow as pa

from frazil.errors import SchemaMismatch
from frazil.formats import json_inference
from frazil.pipeline.evolution import Aliases, merged, together

#: Schema metadata of a need: former names of its columns; if it was inferred from JSON records,
#: their votes, the table's current columns and the maximal number of columns.
_ALIASES, _VOTES, _BASE = b"frazil.aliases", b"frazil.votes", b"frazil.base"
_MOST = b"frazil.most"


def needed(columns: pa.Schema, aliases: Aliases) -> pa.Schema:
    """A need: the columns that a table must have, with their former names."""
    return columns.with_metadata({_ALIASES: json.dumps(together(aliases)).encode()})


def voted(votes: json_inference.Votes, base: pa.Schema, aliases: Aliases, most: int) -> pa.Schema:
    """A need inferred from JSON records: their votes extend the columns `base`, up to `most`."""
    need = needed(json_inference.columns(votes, base, most), aliases)
    beside = {
        _VOTES: json.dumps(votes).encode(),
        _BASE: base.serialize().to_pybytes(),
        _MOST: b"%d" % most,
    }
    return need.with_metadata({**need.metadata, **beside})


def aliases_of(need: pa.Schema) -> dict[str, tuple[str, ...]]:
    aliases = json.loads((need.metadata or {}).get(_ALIASES, b"{}"))
    return {path: tuple(names) for path, names in aliases.items()}


def add_need(needs: dict[str, pa.Schema], table: str, need: pa.Schema) -> None:
    """Merge a need into `needs`. Votes of JSON records are added up. Of two incompatible writer
    schemas the first stays; records of the other are rejected once the table exists."""
    known = needs.get(table)
    if known is None:
        needs[table] = need
        return
    aliases = together(aliases_of(known), aliases_of(need))
    one, other = known.metadata or {}, need.metadata or {}
    if _VOTES in one and one.get(_BASE) == other.get(_BASE):
        votes = json.loads(one[_VOTES])
        json_inference.add(votes, json.loads(other[_VOTES]))
        base = pa.ipc.read_schema(pa.py_buffer(one[_BASE]))
        needs[table] = voted(votes, base, aliases, int(one[_MOST]))
        return
    with suppress(SchemaMismatch):
        needs[table] = needed(merged(known, need, aliases), aliases)
