"""The note of an unfinished rewind, in a property of the index. No run starts while it exists.

In: the properties of an index. Out: the note, or the error of a start. Runs on the driver, and in
commands without Spark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from frazil import format_version
from frazil.errors import Fatal, Gap

#: Prefix, before the sink's id, of the index property that exists while a rewind is running.
PROPERTY = "frazil.rewind"
#: Version of the property's JSON.
VERSION = 1


class RewindNote(NamedTuple):
    """An unfinished rewind, as recorded in the index's property."""

    #: the target, as the operator gave it
    to: str
    #: the last batch that remains
    batch: int
    #: topic → partition → the offset that the stream continues from
    cut: dict[str, dict[str, int]]

    def text(self) -> str:
        return json.dumps({"version": VERSION, **self._asdict()}, separators=(",", ":"))


def note_of(properties: Mapping[str, str], sink: str) -> RewindNote | None:
    key = f"{PROPERTY}.{sink}"
    if key not in properties:
        return None
    try:
        values = dict(json.loads(properties[key]))
        format_version.check(f"read property {key} of the index", values.get("version"), VERSION)
        return RewindNote(values["to"], values["batch"], values["cut"])
    except (ValueError, TypeError, KeyError) as error:
        raise Fatal(
            f"cannot read property {key} of the index: {type(error).__name__}: {error}",
            hint="it was altered by hand; restore it from an earlier metadata file of the index",
        ) from None


def refuse_unfinished(properties: Mapping[str, str], sink: str, action: str = "") -> None:
    """Raises Gap if a rewind is unfinished: tables may have moved before the position did."""
    note = note_of(properties, sink)
    if note is not None:
        raise Gap(
            f"cannot {action or f'start sink {sink}'}: a rewind to {note.to} is "
            "unfinished; its tables are at different cuts",
            hint=f"finish it: frazil rewind CONFIG --to '{note.to}'",
        )
