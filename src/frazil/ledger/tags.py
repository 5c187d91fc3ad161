"""What a sink leaves in a table beside its ledger: a tag and a property. Pure.

The tag is on the snapshot of the sink's newest ledger entry. Snapshot expiry keeps tagged
snapshots, so that entry outlives its neighbours. If the tag is removed and the entry expires, the
property still says that the table has rows of the sink: a table without entries is not a new one.
"""

from __future__ import annotations

#: Of the tags of all sinks.
TAG_PREFIX = "frazil/"


def filled_by(sink: str) -> str:
    """The property of every table that the sink fills; its value is the sink's index."""
    return f"frazil.filled-by.{sink}"


def ledger_tag(sink: str, branch: str = "main") -> str:
    return f"{TAG_PREFIX}{sink}" if branch == "main" else f"{TAG_PREFIX}{sink}/{branch}"


def sink_of(tag: str, branch: str = "main") -> str:
    """The sink whose tag in the branch this is; empty: not a sink's tag for the branch."""
    sink, _, suffix = tag.removeprefix(TAG_PREFIX).partition("/")
    return sink if tag.startswith(TAG_PREFIX) and (suffix or "main") == branch else ""
