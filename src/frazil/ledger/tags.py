"""The tag of a sink in a table, on the snapshot of its newest ledger entry. Pure.

Snapshot expiry keeps tagged snapshots, so the newest entry of a sink outlives its neighbours.
"""

from __future__ import annotations

#: Of the tags of all sinks.
TAG_PREFIX = "frazil/"


def ledger_tag(sink: str, branch: str = "main") -> str:
    return f"{TAG_PREFIX}{sink}" if branch == "main" else f"{TAG_PREFIX}{sink}/{branch}"


def sink_of(tag: str, branch: str = "main") -> str:
    """The sink whose tag in the branch this is; empty: not a sink's tag for the branch."""
    sink, _, suffix = tag.removeprefix(TAG_PREFIX).partition("/")
    return sink if tag.startswith(TAG_PREFIX) and (suffix or "main") == branch else ""
