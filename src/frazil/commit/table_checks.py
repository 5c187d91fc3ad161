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
        f"cannot go on with table {target.table.name}: it was put back to an older state; by the "
        f"index it had {', '.join(map(str, lost))}",
        hint="restore the newest state of the table; or take all tables back to where it "
        "stands: `frazil rewind`. Its batches wait, staged",
    )


def unindexed(target: TableCommitter, index_table: str, alone: bool) -> FrazilError | None:
    """Why a sink whose index has no record of this table cannot fill it. `alone`: it is the sink's
    only one, whose ledger has all that an index has."""
    head = target.head()
    if not head.complete and head.unshown is None and target.filled:
        return Expired(
            f"cannot go on: table {target.table.name} holds what sink {target.sink} wrote before, "
            f"and nothing says up to which offset: its index {index_table} knows nothing of that, "
            f"the tag {ledger_tag(target.sink)} was removed, and the entries of its ledger expired",
            hint="restore the index, or use another sink id and other tables. If the table holds "
            f"nothing of the sink any more: ALTER TABLE {target.table.name} UNSET TBLPROPERTIES "
            f"('{filled_by(target.sink)}')",
        )
    entry = head.entry
    if alone or entry is None or not any(entry.end.values()):
        return None
    return Gap(
        f"cannot go on: table {target.table.name} holds what sink {target.sink} wrote before, and "
        f"its index {index_table} knows nothing of that",
        hint="restore the index, or use another sink id and other tables. If it was the table that "
        "was away when this run began: start it again",
    )


def forgotten(index_table: str, sink: str) -> FrazilError:
    return Expired(
        f"cannot go on: the index {index_table} has rows of sink {sink}, and its ledger, which "
        f"records the position, is gone: its tag {ledger_tag(sink)} was removed, and the snapshots "
        "of its entries were expired",
        hint="restore the index; or, where the sink fills one table alone: DELETE FROM "
        f"{index_table} WHERE sink = '{sink}', and the rows are rebuilt from the table's ledger",
    )
