"""Tables that would stop the next start of a sink, or that wait for an operator.

In: the config, and tables read from their metadata files. Out: table → kind of error, message and
hint. The checks are those of a start (`commit.table_checks`); nothing is written, and Spark is not
started.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import cast

from rich.text import Text

from frazil.commit.protocol import TableCommitter
from frazil.commit.rewind_note import refuse_unfinished
from frazil.commit.table_checks import forgotten, index_mismatch, unindexed
from frazil.config.model import Config
from frazil.config.sections import deleted_keys_table
from frazil.errors import FrazilError, IdentityMismatch
from frazil.iceberg.static_table import ReadOnlyTable
from frazil.iceberg.table import Table
from frazil.ledger.index_positions import ENDS, ends
from frazil.ledger.sink_state import announced_tables, index_entry
from frazil.render import error_values
from frazil.spark.open_table import Open


def in_doubt(config: Config, opened: Open) -> dict[str, dict[str, str]]:
    """Table → class, message and hint. Empty: nothing in the metadata prevents a start."""
    return {name: error_values(error) for name, error in _doubts(config, opened).items()}


def doubt_lines(doubts: Mapping[str, Mapping[str, str]]) -> Iterator[Text]:
    for name, doubt in doubts.items():
        text = f"in doubt: {name}: {doubt['class']}: {doubt['message']}\nhint: {doubt['hint']}"
        yield Text(text, style="yellow")


def _doubts(config: Config, opened: Open) -> dict[str, FrazilError]:
    index, sink = opened(config.index_table), config.sink.id
    entry = None
    if index is not None:
        try:
            refuse_unfinished(index.properties, sink)
        except FrazilError as error:
            return {index.name: error}
        entry = index_entry(index, sink)
    if index is None or entry is None or entry.batches[1] < 0:
        rows = index.rows(["commit_id"], {"sink": [sink]}).num_rows if index is not None else 0
        if index is not None and rows:
            return {index.name: forgotten(index.name, sink)}
        return _unindexed(config, opened) if entry is None else {}
    indexed = ends(index.rows(ENDS, {"sink": [sink]}))
    doubts: dict[str, FrazilError] = {}
    for name, uuid in announced_tables(entry.tables, index.properties).items():
        if (branch := _branch(config, name)) is None:
            continue  # no longer in the config
        table = opened(name)
        if table is None:
            doubts[name] = IdentityMismatch(
                f"cannot commit to table {name}: it does not exist",
                hint="restore the table; its batches stay staged",
            )
        elif table.uuid != uuid:
            doubts[name] = IdentityMismatch(
                f"cannot commit to table {name}: it was dropped and recreated; expected "
                f"uuid {uuid}, found {table.uuid}",
                hint="restore the table; its batches stay staged",
            )
        elif mismatch := index_mismatch(
            _target(table, branch, sink),
            lambda: indexed.get(name, {}),  # noqa: B023
        ):
            doubts[name] = mismatch
    return doubts


def _unindexed(config: Config, opened: Open) -> dict[str, FrazilError]:
    doubts = {}
    for table_config in config.tables:
        table = opened(table_config.name) if "{" not in table_config.name else None
        if table is not None:
            target = _target(table, table_config.branch, config.sink.id)
            if error := unindexed(target, config.index_table, config.one_table):
                doubts[table_config.name] = error
    return doubts


def _target(table: ReadOnlyTable, branch: str, sink: str) -> TableCommitter:
    # Reading needs no epoch, and calls only methods that a metadata file can answer.
    return TableCommitter(cast(Table, table), branch, sink, 0, time)


def _branch(config: Config, name: str) -> str | None:
    """The branch configured for a table, or for a template that it matches."""
    branches = {table.name: table.branch for table in config.tables}
    branches |= dict.fromkeys(map(deleted_keys_table, config.versioned_tables), "main")
    if config.dead_letters:
        branches[config.dead_letters.table] = "main"
    for known, branch in branches.items():
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(known)), name):
            return branch
    return None
