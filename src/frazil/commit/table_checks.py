"""Why a start refuses a table: it does not hold what the index counts on, or the index does not
know it. Pure, apart from reads of the table.

In: a table as one epoch of a sink sees it, and what the index says of it. Out: the error that a
start raises and that `frazil status` shows as a doubt; None. Runs on the driver, and in commands
without Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from frazil.commit.protocol import TableCommitter, not_shown
from frazil.errors import Expired, FrazilError, Gap
from frazil.ledger.tags import filled_by, ledger_tag
from frazil.offsets import Cut, Partition, Range


def index_mismatch(
    target: TableCommitter, indexed: Callable[[], Mapping[Partition, tuple[int, int]]]
) -> FrazilError | None:
    """Why the table is not in the state that the index counts on: it was rolled back, or restored
    to older metadata, which takes ledger and tag back together. `indexed`: where the index's rows
    of the table begin and end."""
    if error := target.tag_mismatch():
        return error
    head = target.head()
    if not head.complete:
        return not_shown(target.table.name, target.sink, head.unshown)
    end = head.entry.end if head.entry else Cut()
    lost = [
        Range(p, end.get(p, first), last)
        for p, (first, last) in sorted(indexed().items())
        if end.get(p, first) < last
    ]
    if not lost:
        return None
    return Gap(
        f"cannot commit to table {target.table.name}: it was rolled back; the index "
        f"records {', '.join(map(str, lost))}, the table lacks them",
        hint="restore the newest state of the table, or rewind all tables to its state: "
        "`frazil rewind`. Its batches stay staged",
    )


def unindexed(target: TableCommitter, index_table: str, alone: bool) -> FrazilError | None:
    """Why a sink whose index has no record of this table cannot fill it. `alone`: it is the sink's
    only one, whose ledger has all that an index has."""
    head = target.head()
    if not head.complete and head.unshown is None and target.filled:
        return Expired(
            f"cannot start: table {target.table.name} has rows of sink {target.sink}, but "
            f"their position is unknown: index {index_table} has no entry of the sink, "
            f"tag {ledger_tag(target.sink)} was removed, and the ledger entries were "
            "expired",
            hint="restore the index, or use another sink id and other tables. If the table "
            f"has no rows of the sink left: ALTER TABLE {target.table.name} UNSET "
            f"TBLPROPERTIES ('{filled_by(target.sink)}')",
        )
    entry = head.entry
    if alone or entry is None or not any(entry.end.values()):
        return None
    return Gap(
        f"cannot start: table {target.table.name} has rows of sink {target.sink}, but "
        f"index {index_table} has no entry of the sink",
        hint="restore the index, or use another sink id and other tables. If the table was "
        "missing when this run began, start the run again",
    )


def forgotten(index_table: str, sink: str) -> FrazilError:
    return Expired(
        f"cannot start: index {index_table} has rows of sink {sink}, but not its ledger, "
        f"which records the position: the tag {ledger_tag(sink)} was removed, and the "
        "snapshots with its entries were expired",
        hint="restore the index; or, if the sink fills only one table: DELETE FROM "
        f"{index_table} WHERE sink = '{sink}', and the rows are rebuilt from the table's "
        "ledger",
    )
