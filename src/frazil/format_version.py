"""Versions of the formats that Frazil stores, and the refusal of unknown ones. Pure.

Snapshot summaries and table properties have the version under `KEY`, JSON documents under
`version`. Each format has its own version; docs/reference/compatibility.md lists them. A format is
never changed without a new version: tests/unit/test_formats.py compares all of them with stored
examples.
"""

from __future__ import annotations

from frazil.errors import Fatal

#: Of a ledger entry, in the snapshot's summary; of a table that Frazil created, in its properties.
KEY = "frazil.format-version"
#: Version of the tables that Frazil creates: their `frazil.*` properties, and the columns of the
#: index, of dead-letter tables, of `_replayed` and of `_deleted` tables.
TABLE = "1"


def check(action: str, version: object, expected: object) -> None:
    """Raises Fatal if a stored format has another version than this Frazil reads.

    `action`: what cannot be done with it, for the message.
    """
    if type(version) is not type(expected) or version != expected:
        shown = "none" if version is None else version
        raise Fatal(
            f"cannot {action}: expected Frazil format version {expected}, found {shown}",
            hint="a newer Frazil wrote it; use that version, or a newer one",
        )


def check_table(name: str, version: str | None) -> None:
    """The same for a table; None: Frazil did not create it."""
    if version is not None:
        check(f"open table {name}", version, TABLE)
