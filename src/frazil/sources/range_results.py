"""The results of a batch's tasks: checked, and added up for each table. Pure.

In: one `RangeResult` for each range, and the files of upsert tables. Out: the batch as the sink
stages it. Every offset has exactly one outcome, and every written record a row in a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from frazil.accounting import RangeCounts, by_partition, for_table, miscounted, moved_to_written
from frazil.config.model import Config
from frazil.config.sections import DeadLettersConfig, deleted_keys_table
from frazil.errors import TooManyRejected
from frazil.kafka.planner import TopicIdentity
from frazil.offsets import Cut, join
from frazil.pipeline.task import RangeResult
from frazil.pipeline.upsert import UpsertResult
from frazil.sources.base import BatchRun, StreamPosition, TableWriteResult, WriteResult

#: With fewer rejected records `max_fraction` does not apply: a quiet stream has batches of one
#: record.
_FEW = 100


@dataclass(frozen=True)
class KafkaRun(BatchRun):
    results: Sequence[RangeResult] = ()
    #: upsert tables: files of rows and deletes
    upserts: Mapping[str, UpsertResult] = field(default_factory=dict)


def write_result(
    config: Config, run: KafkaRun, before: StreamPosition, origin: TopicIdentity
) -> WriteResult:
    """The results of all ranges as one batch, which follows `before`. Raises unless every offset
    has exactly one outcome (I3), and every written record a row in a file."""
    results, upserts = run.results, run.upserts
    for result in results:
        for name, tally in (("", result.total), *result.tallies.items()):
            files = sum(file.rows for file in result.files.get(name, ()))
            if not tally.balanced or (name and files != tally.written):
                raise miscounted(tally, name, files)
    ordered = sorted(results, key=lambda result: result.total.range)
    _refuse_too_many(config.dead_letters, ordered)
    ranges = join(result.total.range for result in results)
    reached = before.cut
    end = reached.after(ranges)
    last = {result.total.range.partition: result.leader for result in ordered}
    leaders = {p: e for p, e in {**before.origin.leaders, **last}.items() if e >= 0}
    begin = Cut({**{r.partition: r.start for r in ranges}, **reached})
    touched = dict.fromkeys(name for result in ordered for name in result.tallies)
    touched |= {name: None for name, done in upserts.items() if done.files}
    if config.one_table:
        touched = {config.tables[0].name: None}
    return WriteResult(
        begin,
        end,
        tables={name: _of_table(name, ordered, upserts) for name in touched},
        total=() if config.one_table else by_partition(r.total for r in ordered),
        origin=TopicIdentity(origin.cluster, origin.topics, leaders),
        rejected=_by_kind(ordered),
        open_files=max(result.open_files for result in results),
        timings=[
            *(result.seconds for result in results),
            *({"write": done.seconds} for done in upserts.values()),
        ],
    )


def _refuse_too_many(limits: DeadLettersConfig, results: Sequence[RangeResult]) -> None:
    rejected = sum(result.total.rejected for result in results)
    read = rejected + sum(result.total.written + result.total.skipped for result in results)
    too_large_a_share = rejected >= _FEW and rejected > limits.max_fraction * read
    if rejected > limits.max_count or too_large_a_share:
        raise TooManyRejected(
            f"cannot write a batch: {rejected} of {read} records are rejected; "
            f"[dead_letters] allows {limits.max_fraction:.0%} and {limits.max_count}",
            hint="nothing of the batch was written; fix the producer or the format, or raise "
            "max_fraction or max_count",
        )


def _of_table(
    name: str, ordered: Sequence[RangeResult], upserts: Mapping[str, UpsertResult]
) -> TableWriteResult:
    nothing = RangeCounts(ordered[0].total.range, 0)
    tallies = by_partition(
        result.tallies.get(name) or for_table(result.total, nothing)
        for result in ordered
        if name not in result.below
    )
    if name not in upserts:
        files = tuple(file for result in ordered for file in result.files.get(name, ()))
        return TableWriteResult(tallies, files)
    done = upserts[name]
    outcome = "skipped" if name in map(deleted_keys_table, upserts) else "merged"
    tallies = tuple(
        moved_to_written(tally, done.written.get(tally.range.partition, 0), outcome)
        for tally in tallies
    )
    rows = sum(file.rows for file in done.files)
    keys = sum(file.rows for file in done.deletes)
    if rows != sum(tally.written for tally in tallies) or keys != done.keys:
        raise miscounted(tallies[0], name, rows)
    return TableWriteResult(tallies, done.files, done.deletes, keys)


def _by_kind(results: Sequence[RangeResult]) -> dict[str, tuple[int, str]]:
    kinds: dict[str, tuple[int, str]] = {}
    for result in results:
        for kind, (count, last) in result.rejected.items():
            kinds[kind] = kinds.get(kind, (0, ""))[0] + count, last
    return kinds
