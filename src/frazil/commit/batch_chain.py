"""Staged batches as a chain: which of them continue a position, and the ledger entry of those that
follow each other. Pure: nothing is read and nothing is written. Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from frazil.accounting import OutcomeCounts
from frazil.errors import Overlap
from frazil.ledger.entry import LedgerEntry
from frazil.ledger.staged_batch import StagedBatch
from frazil.offsets import BATCHES, Cut, Partition, Range


def entry_of(
    batches: Sequence[StagedBatch], table: str, epoch: int, since: Cut | None = None
) -> LedgerEntry:
    """One ledger entry for consecutive batches.

    `since`: end of the table's ledger, if earlier batches may have had no records for the table.
    If no batch has a table of that name (the index), the entry covers every record.
    """
    outcomes: dict[Partition, OutcomeCounts] = {}
    rows = keys = 0
    low: list[int] = []
    high: list[int] = []
    first, last = batches[0], batches[-1]
    begin = _begin(batches, since)
    reached = dict(begin)
    for batch in batches:
        staged = next((staged for staged in batch.tables if staged.name == table), None)
        keys += staged.keys if staged else 0
        for tally in staged.tallies if staged else batch.total or batch.tables[0].tallies:
            key = tally.range.partition
            between = _between(table, tally.range, reached[key]) if since is not None else 0
            reached[key] = tally.range.end
            counts = OutcomeCounts(
                0, tally.rejected, tally.skipped, tally.invisible, tally.merged, between, tally.lost
            )
            if key == BATCHES:
                rows += tally.written
            elif counts != OutcomeCounts():
                outcomes[key] = outcomes.get(key, OutcomeCounts()) + counts
            if tally.watermark:
                low.append(tally.watermark[0])
                high.append(tally.watermark[1])
    end = last.end
    if since is not None:  # a ledger may be ahead of a batch, in partitions it got nothing of
        end = Cut({key: max(offset, reached[key]) for key, offset in end.items()})
        for key, offset in end.items():
            if key != BATCHES and (behind := offset - reached[key]):
                outcomes[key] = outcomes.get(key, OutcomeCounts()) + OutcomeCounts(elsewhere=behind)
    return LedgerEntry(
        sink=last.sink,
        epoch=epoch,
        commit_ids=tuple(batch.commit_id for batch in batches),
        batches=(first.number, last.number),
        begin=Cut(begin),
        end=end,
        outcomes=outcomes,
        topics=last.topics,
        cluster=last.cluster,
        schema_id=last.table(table).schema_id if table in last.names else 0,
        watermark=(min(low), max(high)) if low else None,
        rows=rows,
        keys=keys or None,
        source=(first.source[0], last.source[1]),
        note=last.note,
        leaders={p: epoch for p, epoch in last.leaders.items() if p in end},
    )


def _begin(batches: Sequence[StagedBatch], since: Cut | None) -> dict[Partition, int]:
    begin = dict(batches[0].begin)
    for batch in batches[1:]:  # a partition that appeared later begins where it appeared
        begin = {**batch.begin, **begin}
    if since is not None:
        begin |= {partition: offset for partition, offset in since.items() if partition in begin}
    return begin


def _between(table: str, span: Range, reached: int) -> int:
    """The offsets before `span` that the table got no records of."""
    if span.start < reached:
        overlap = Range(span.partition, span.start, min(reached, span.end))
        raise Overlap(f"cannot commit {span} to table {table}: it has {overlap} already")
    return span.start - reached


def chain(
    position: Cut, staged: Sequence[StagedBatch], committed: set[str], source: str = ""
) -> list[StagedBatch]:
    """The staged batches that continue `position`, in order.

    `source`: the position of Spark's sources. Two epochs may have given different batches the same
    number, so a batch must also begin at this source position.

    If two epochs staged the same ranges, the batch that is in the table wins. A partition missing
    from the position begins with the batch that has its lowest offset.
    """
    chained: list[StagedBatch] = []
    reached = position
    while True:
        # A batch lacks partitions that were added after it: their position does not change.
        known = [
            replace(batch, begin=Cut({**reached, **batch.begin}), end=Cut({**reached, **batch.end}))
            for batch in staged
        ]
        following = [
            batch
            for batch in known
            if batch.begin.continues(reached)
            and not reached.reaches(batch.end)
            and joins(batch.source[0], source)
        ]
        if not following:
            return chained
        ranked = [
            (
                sum(
                    offset for partition, offset in batch.begin.items() if partition not in reached
                ),
                batch.commit_id not in committed,
                -batch.epoch,
                batch.number,
            )
            for batch in following
        ]
        chained.append(following[ranked.index(min(ranked))])
        reached, source = chained[-1].end, chained[-1].source[1]


def preceding(batches: Sequence[StagedBatch], begins: Iterable[Cut]) -> set[str]:
    """Commit ids of the batches that lead up to `begins`, where the oldest remaining entries of
    ledgers begin. These batches are in the table; their own entries expired."""
    places, ids = list(begins), set()
    for batch in sorted(batches, key=lambda batch: -batch.number):
        if any(batch.end.continues(place) for place in places):
            ids.add(batch.commit_id)
            places.append(batch.begin)
    return ids


def joins(begin: str, end: str) -> bool:
    """Does source position `begin` continue `end`? Kafka ranges have no source position."""
    return not begin or not end or begin == end
