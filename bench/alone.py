"""The tasks of a batch without Spark: fetch, decode and write of the same ranges, in processes of
our own, as many at a time as the session has slots. What `bench/append.py` compares a job with.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from frazil.native.warm_up import warm_up_all
from frazil.offsets import Range
from frazil.pipeline.task import BatchPlan, run_all
from frazil.sources import range_tasks

#: The plan of a batch and its ranges.
Batch = tuple[BatchPlan, Sequence[Range]]


@contextmanager
def noted_batches() -> Iterator[list[Batch]]:
    """The batches that are run as Spark tasks meanwhile."""
    batches: list[Batch] = []
    collect = range_tasks._collect

    def noting(spark: Any, plan: BatchPlan, pieces: Sequence[Range]) -> Any:
        batches.append((plan, pieces))
        return collect(spark, plan, pieces)

    range_tasks._collect = noting
    try:
        yield batches
    finally:
        range_tasks._collect = collect


def seconds_alone(batch: Batch, slots: int, repeat: int = 3) -> float:
    """Seconds of a batch's tasks, in warm processes; their files are in no table."""
    plan, pieces = batch
    with multiprocessing.get_context("spawn").Pool(slots, warm_up_all) as pool:
        spent = []
        for _ in range(repeat + 1):
            began = time.monotonic()
            pool.starmap(_task, [(plan, piece) for piece in pieces], chunksize=1)
            spent.append(time.monotonic() - began)
    return statistics.median(spent[1:])


def _task(plan: BatchPlan, piece: Range) -> int:
    return sum(1 for _ in run_all(plan, [piece]))
